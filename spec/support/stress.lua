--- Runs the stress of leases (spec/leases/stress.c) beside what a spec does to the servers, and reads what its checker says.

local support = require "spec.support"

local stress = {}

local BUILD = assert((os.getenv("LUA_CPATH") or ""):match("^(.-)/%?%.so"), "run the specs by `make spec`")

-- Runs it for so many seconds; calls `fault` again and again until they are nearly over. `log`: a file for its
-- output. Returns how much was granted, whether its checker has found nothing, and its output.
local function run_once(dsn, log, seconds, fault)
  local seed = os.time() % 100000
  os.execute(("%s/stress '%s' --seconds=%d --seed=%d --processes=6 --fails-over >%s 2>&1 &"):format(BUILD, dsn, seconds, seed, log))
  local function said()
    local file = assert(io.open(log))
    local text = file:read "*a"
    file:close()
    return text
  end
  local stop = support.now() + seconds - 2
  while support.now() < stop do fault() end
  support.wait_until(function() return said():find(("seed %d: "):format(seed), 1, true) end, "the stress", 60)
  local text = said()
  local sessions, leases = text:match "(%d+) sessions, (%d+) leases"
  return tonumber(sessions) + tonumber(leases), text:find(("seed %d: no violation"):format(seed), 1, true), text
end

--- Like run_once, again until so much was granted: servers that fail over on a busy machine may be long about it.
-- Fails when the checker has found something.
function stress.run(dsn, log, seconds, least, fault)
  local granted = 0
  for _ = 1, 5 do
    local more, fine, text = run_once(dsn, log, seconds, fault)
    assert(fine, text)
    granted = granted + more
    if granted >= least then return end
    print(text)
  end
  error(("%d grants in five times %d s"):format(granted, seconds))
end

return stress
