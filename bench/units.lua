-- The cost of checking the order of units: acquire and release, in µs, the best of 400 rounds.
--     lua bench/units.lua [DSN]

local hierlock = require "hierlock"
local uv = require "luv"

local ROUNDS, TIMES = 400, 500

local dsn = arg[1] or "null:"
local plain = assert(hierlock.open(dsn))
local units = assert(hierlock.open(dsn, { units = { "account", "order", "invoice" } }))
local cases = {
  { "without units", plain },
  { "with units", units },
  { "without units, while another node is held", plain, true },
  { "with units, while another unit is held", units, true },
}
for _ = 1, ROUNDS do
  for _, case in ipairs(cases) do
    local manager = case[2]
    local held = case[3] and assert(manager:acquire { "account", 7 })
    local start = uv.hrtime()
    for _ = 1, TIMES do manager:acquire({ "order", 5 }):release() end
    case.best = math.min(case.best or math.huge, (uv.hrtime() - start) / TIMES / 1000)
    if held then held:release() end
  end
end
for _, case in ipairs(cases) do print(("%-45s %6.2f"):format(case[1], case.best)) end
