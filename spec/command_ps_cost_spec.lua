--- What `hierlock ps` costs where a thousand hold something: the operator, and those who lock.

local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status

local HOLDERS = 1000
local WINDOW = 5 -- s, with one look

after_each(program.close)

support.each_leasing_store(function(store)
  if store.lists_by_root then return end -- there all holders of a root are in one document

  local manager

  after_each(function()
    support.close_peers()
    if manager then manager:close() end
    manager = nil
  end)

  it("lists a thousand holders in less than a second, and costs who locks at most a twentieth meanwhile", function()
    if store.server and not store.leases_only then
      if not store.root() then return end -- a server of the user's
      if store.dialect == "postgresql" then
        store.command("restart", "-c max_connections=1100")
        finally(function() store.command "restart" end)
      else
        local before = store.root():query("SELECT @@GLOBAL.max_connections")[1][1]
        store.root():query("SET GLOBAL max_connections=1100")
        finally(function()
          support.close_peers()
          -- The server needs a moment to notice so many ends; until then it would refuse the next specs.
          support.wait_until(function()
            return tonumber(store.root():query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1][2]) < 20
          end, "the end of a thousand connections", 60)
          store.root():query("SET GLOBAL max_connections=" .. before)
        end)
      end
    end
    manager = support.open(store)
    local crowd = support.process(store, { pool_size = 1000, hold_timeout = 600 })
    local held = 0
    while held < HOLDERS do -- in steps, as a peer has to answer in time
      held = crowd:call([[
        local first, last, ttl = ...
        for i = first, last do handles[i] = assert(manager:acquire({ "crowd" .. i, "a", "r" }, { mode = "shared", ttl = ttl })) end
        return last
      ]], held + 1, held + 50, store.leases_only and 600 or nil)
    end
    local best = math.huge
    support.wait_until(function() -- the machine may be busy
      local began = support.now()
      local said = assert_status(0, run(store.dsn, "ps"))
      local took = support.now() - began
      -- MariaDB shows an old picture.
      if select(2, said.out:gsub("\n", "")) == HOLDERS then best = math.min(best, took) else support.sleep(0.15) end
      return best < 1
    end, "a fast look", 60)
    -- Windows side by side, alone and with a look: what others do to the machine is in both, but for a change between the two.
    local function rate(command)
      local began, n, elapsed = support.now(), 0
      repeat
        assert(assert(manager:acquire({ "rate", "a", "r" })):release())
        n, elapsed = n + 1, support.now() - began
      until elapsed > WINDOW
      if command then assert_status(0, command.join()) end
      return n / elapsed
    end
    local ratio
    local ratios, ends = {}, support.now() + 120
    repeat
      local alone = rate()
      ratio = rate(program.start(store.dsn, "ps")) / alone
      ratios[#ratios + 1] = ("%.3f"):format(ratio)
    until ratio > 0.95 or support.now() > ends
    assert.is_true(ratio > 0.95, "its rate, of what it was alone: " .. table.concat(ratios, " "))
  end)

  it("names a hundred at most to who waited in vain", function()
    manager = support.open(store)
    local crowd = support.process(store, { pool_size = 128, hold_timeout = 600 })
    crowd:call([[
      for i = 1, 110 do handles[i] = assert(manager:acquire({ "crowd", "a" .. i }, { mode = "shared", ttl = ... })) end
    ]], store.leases_only and 600 or nil)
    local err
    support.wait_until(function() -- the machine may be too busy to look
      support.sleep(0.11) -- MariaDB shows an old picture to those who look more often
      err = select(2, manager:acquire({ "crowd" }, { timeout = 0 }))
      return err.holders
    end, "the holders")
    assert.is_true(#err.holders <= 100, #err.holders .. " are named")
    assert.is_false(err.holders[1].waiting)
  end)
end)
