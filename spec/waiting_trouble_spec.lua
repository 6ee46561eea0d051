-- What goes wrong while a call waits without blocking.
local support = require "spec.support"
local core = require "hierlock.core"
local cqueues = require "cqueues"

support.each_store(function(store)
  local manager, other

  before_each(function()
    manager, other = support.open(store), support.open(store)
  end)
  after_each(function()
    manager:close()
    other:close()
    support.close_peers()
  end)

  -- Lua 5.1 cannot yield across pcall, nor across xpcall in `with`: there it blocks.
  it("acquires in a coroutine within pcall and within `with`", function()
    local loop, results = cqueues.new(), {}
    loop:wrap(function()
      results[1] = select(2, pcall(function()
        return (manager:acquire({ "trouble", "a1" }, { timeout = 5 })):release()
      end))
      results[2] = manager:with({ "trouble", "a2" }, function()
        return (manager:acquire({ "trouble", "a3" }, { timeout = 5 })):release()
      end)
    end)
    assert(loop:loop(10))
    assert.same({ true, true }, results)
  end)

  if store.server then
    it("does not say of a lock that was lost while a call used it that it is held", function()
      local blocker = assert(other:acquire({ "trouble", "b1" }))
      local handle = assert(manager:acquire({ "trouble", "b2" }))
      local pending = core.start.extend(handle, { "trouble", "b1" }, { timeout = support.DEADLINE })
      support.wait_until(function() return store.waiting() > 0 end, "a waiter")
      assert.is_true(handle:is_held())
      for _, row in ipairs(store.sql():query(
        "SELECT id FROM information_schema.processlist WHERE command NOT IN ('Sleep', 'Daemon') AND id <> CONNECTION_ID()" ..
        " AND user = SUBSTRING_INDEX(USER(), '@', 1)")) do
        pcall(store.sql().query, store.sql(), "KILL " .. row[1])
      end
      support.wait_until(function() return pending:done() end, "the end of the call")
      assert.is_false(handle:is_held())
      assert.equal(0, handle:remaining())
      local ok, err = pending:wait(0)
      assert.is_nil(ok)
      assert.equal("lost", err.code)
      blocker:release()
    end)
  end
end)
