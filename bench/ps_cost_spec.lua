--- The cost of `hierlock ps` with a thousand holders, for the operator and for the holders, with its two goals: make
-- bench-ps. Measuring rates takes minutes, so `make test` leaves it out.

local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status

after_each(program.close)

support.each_leasing_store(function(store)
  if store.lists_by_root then return end -- there all holders of a root are in one document

  local manager

  after_each(function()
    support.close_peers()
    if manager then manager:close() end
    manager = nil
  end)

  it("lists a thousand holders in less than a second, or fewer in less, and costs those who lock a twentieth at most", function()
    -- Each session is a connection, and expensive for a server: so there are fewer of them. A look that grows with
    -- the square of their number may then take as much less.
    local sessions = store.server and not store.leases_only
    local holders, window = sessions and 400 or 1000, sessions and 2 or 5 -- s, with one look
    local limit = (holders / 1000) ^ 2
    manager = support.open(store)
    local crowd = support.process(store, { pool_size = 1000, hold_timeout = 600 })
    local held = 0
    while held < holders do -- in steps, as a peer has to answer in time
      held = crowd:call([[
        local first, last, ttl = ...
        for i = first, last do handles[i] = assert(manager:acquire({ "crowd" .. i, "a", "r" }, { mode = "shared", ttl = ttl })) end
        return last
      ]], held + 1, held + 50, store.leases_only and 600 or nil)
    end
    support.wait_until(function() -- MariaDB shows an old picture
      return select(2, assert_status(0, run(store.dsn, "ps")).out:gsub("\n", "")) == holders
    end, "all of them in the list", 60)
    local observer = support.process(store)
    local LOOK = [[
      local now = require("spec.support").now
      local begun = now()
      return { n = #assert(manager:holders()), took = now() - begun }
    ]]
    local best = math.huge
    support.wait_until(function() -- the machine may be busy
      support.sleep(0.15)
      local seen = observer:call(LOOK)
      if seen.n == holders then best = math.min(best, seen.took) end
      return best < limit
    end, "a fast look", 60)
    -- Windows side by side, alone and with a look: what others do to the machine is in both, but for a change between the two.
    local function rate(looks)
      local began, n, elapsed = support.now(), 0
      if looks then observer:start(LOOK) end
      repeat
        assert(assert(manager:acquire({ "rate", "a", "r" })):release())
        n, elapsed = n + 1, support.now() - began
      until elapsed > window
      if looks then assert(observer:result()) end
      return n / elapsed
    end
    local ratio
    local ratios, ends = {}, support.now() + 120
    repeat
      local alone = rate()
      ratio = rate(true) / alone
      ratios[#ratios + 1] = ("%.3f"):format(ratio)
    until ratio > 0.95 or support.now() > ends
    assert.is_true(ratio > 0.95, "its rate, of what it was alone: " .. table.concat(ratios, " "))
  end)
end)
