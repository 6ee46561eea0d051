-- manager:acquire_any: the first of several targets that is free, on every store.

local hierlock = require "hierlock"
local support = require "spec.support"

local A, B, C = { "any", "a1", "r1" }, { "any", "a1", "r2" }, { "any", "a2", "r1" }

describe("acquire_any", function()
  support.each_leasing_store(function(store)
    local managers

    local function open(options)
      managers[#managers + 1] = support.open(store, options)
      return managers[#managers]
    end

    before_each(function() managers = {} end)
    after_each(function()
      for _, manager in ipairs(managers) do manager:close() end
      support.close_peers()
    end)

    local function path(handle)
      assert.equal(1, #handle.targets)
      local target = handle.targets[1]
      return table.concat({ target.user, target.account, target.resource }, "/")
    end

    it("takes the first that is free, in the order of the list", function()
      local manager, other = open(), open()
      -- A busy server may not have heard yet of an earlier spec's release.
      assert(assert(manager:acquire({ "any" }, { timeout = support.DEADLINE })):release { confirm = true })
      local one = assert(manager:acquire_any { A, B, C })
      assert.equal("any/a1/r1", path(one))
      local two = assert(other:acquire_any { A, B, C })
      assert.equal("any/a1/r2", path(two))
      assert(one:release { confirm = true })
      assert(two:release { confirm = true })
      assert.equal(0, manager:stats().held)
      assert.equal(0, manager:stats().waiting)
    end)

    it("waits for whichever becomes free, and leaves nothing behind", function()
      local holder, manager = support.process(store), open()
      for i, target in ipairs { A, B, C } do assert(holder:acquire("h" .. i, "acquire", target):result()) end
      for i, target in ipairs { B, C, A } do
        local pending = assert(manager:start_any({ A, B, C }, { timeout = support.DEADLINE }))
        assert.is_false(pending:done())
        support.wait_for_waiters(store, target, 1)
        holder:release(target == A and "h1" or target == B and "h2" or "h3")
        local handle = assert(pending:wait(support.DEADLINE))
        assert.equal(table.concat(target, "/"), path(handle))
        assert.is_true(handle:is_held())
        assert.equal(1, manager:stats().held)
        assert.equal(0, manager:stats().waiting)
        assert(handle:release { confirm = true })
        local again = holder:acquire("h" .. i + 10, "acquire", target, { timeout = support.DEADLINE })
        assert.is_truthy(again:result())
        assert(holder:release("h" .. i + 10))
        assert(holder:acquire(target == A and "h1" or target == B and "h2" or "h3", "acquire", target):result())
      end
    end)

    it("says that none was granted in time, never early", function()
      local holder, manager = support.process(store), open()
      for i, target in ipairs { A, B } do assert(holder:acquire("h" .. i, "acquire", target):result()) end
      for _, timeout in ipairs { 0, 0.2, 1.1 } do
        local since = support.now()
        local handle, err = manager:acquire_any({ A, B }, { timeout = timeout })
        assert.is_nil(handle)
        assert.equal("timeout", err.code, tostring(err))
        assert.is_true(support.now() - since >= timeout)
        assert.is_true(support.now() - since < timeout + 5)
      end
      assert.equal(0, manager:stats().waiting)
      assert.equal(0, manager:stats().held)
    end)

    it("does not stand in its own way where targets contain each other", function()
      local holder, manager = support.process(store), open()
      assert(holder:acquire("h1", "acquire", A):result())
      assert(holder:acquire("h2", "acquire", B):result())
      local pending = assert(manager:start_any({ { "any" }, { "any", "a1" }, A, A }, { timeout = support.DEADLINE }))
      support.wait_for_waiters(store, A, 1)
      holder:release "h1"
      local handle = assert(pending:wait(support.DEADLINE))
      assert.equal("any/a1/r1", path(handle))
      assert(handle:release { confirm = true })
    end)

    it("cancels all of them", function()
      local holder, manager = support.process(store), open()
      for i, target in ipairs { A, B } do assert(holder:acquire("h" .. i, "acquire", target):result()) end
      local pending = assert(manager:start_any { A, B })
      support.wait_for_waiters(store, A, 1)
      pending:cancel()
      assert.equal("cancelled", select(2, pending:wait()).code)
      assert(manager:start_any { A, B })
      support.collect()
      assert.equal(0, manager:stats().waiting)
      holder:release "h1"
      holder:release "h2"
      support.wait_until(function()
        local handle = manager:acquire_all({ A, B }, { timeout = 0 })
        return handle and handle:release { confirm = true }
      end, "nothing is left")
      local granted = assert(manager:start_any { A, B })
      support.wait_until(function() return granted:done() end, "a grant")
      granted:cancel()
      support.wait_until(function()
        local handle = manager:acquire_all({ A, B }, { timeout = 0 })
        return handle and handle:release { confirm = true }
      end, "nothing is left")
    end)

    it("is told at once when all that is in the way is its own, and else not", function()
      local manager = open()
      local a = assert(manager:acquire(A))
      assert.equal("deadlock", select(2, manager:acquire_any({ A, { "any", "a1" } }, { timeout = support.DEADLINE })).code)
      assert.equal("any/a1/r2", path(assert(manager:acquire_any { A, B })))
      assert.is_true(a:is_held())
      manager:close()
    end)

    it("makes no circle for one whom another alternative may let go on", function()
      local one, two, holder = support.thread(store), support.thread(store), support.thread(store)
      assert(one:acquire("x", "acquire", A):result())
      assert(two:acquire("x", "acquire", B):result())
      assert(holder:acquire("x", "acquire", C):result())
      one:start([[
        local handle, err = manager:acquire_any(...)
        if not handle then return nil, err.code end
        handles.x:release { confirm = true }
        return handle:release { confirm = true }
      ]], { B, C }, { timeout = support.DEADLINE })
      support.wait_for_waiters(store, C, 1)
      local waiting = two:acquire("y", "acquire", A, { timeout = support.DEADLINE })
      assert.is_true(waiting:stays_blocked())
      holder:release "x"
      assert.is_true((one:result()))
      assert.is_truthy(waiting:result())
    end)

    it("hands over among many workers, each at most once at a time, and starves none", function()
      local peers, targets, rounds = {}, { A, B, C }, 15
      for i = 1, 5 do peers[i] = (i % 2 == 0 and support.thread or support.process)(store) end
      for _, peer in ipairs(peers) do
        peer:start([[
          local targets, rounds = ...
          local got = {}
          for i = 1, rounds do
            local handle, err = manager:acquire_any(targets, { timeout = 60 })
            if not handle then return nil, tostring(err) end
            got[#got + 1] = handle.token
            if not handle:is_held() then return nil, "lost" end
            handle:release()
          end
          return #got
        ]], targets, rounds)
      end
      for _, peer in ipairs(peers) do
        local n, err = peer:result()
        assert.equal(rounds, n, err)
      end
    end)
  end)

  local store = support.stores[1]

  it("yields in coroutines", function()
    local cqueues = require "cqueues"
    local manager = support.open(store)
    local queue, order = cqueues.new(), {}
    local x, y = assert(manager:acquire(A)), assert(manager:acquire(B))
    for i = 1, 2 do
      queue:wrap(function()
        local handle = assert(manager:acquire_any({ A, B }, { timeout = support.DEADLINE }))
        order[#order + 1] = i
        handle:release()
      end)
    end
    queue:wrap(function()
      cqueues.sleep(0.05)
      order[#order + 1] = "released"
      y:release()
      cqueues.sleep(0.05)
      x:release()
    end)
    assert(queue:loop())
    assert.equal("released", order[1])
    assert.equal(3, #order)
    assert.equal(0, manager:stats().held)
    manager:close()
  end)

  it("gives back a second grant that comes at the same moment, without loss to others", function()
    local manager, other = support.open(store), support.open(store)
    for _ = 1, 200 do
      local all = assert(manager:acquire_all { A, B })
      local pending = assert(other:start_any { A, B })
      all:release()
      local handle = assert(pending:wait(support.DEADLINE))
      assert.equal(1, #handle.targets)
      handle:release { confirm = true }
      assert(manager:acquire_all({ A, B }, { timeout = support.DEADLINE })):release { confirm = true }
    end
    assert.equal(0, other:stats().held)
    assert.equal(0, other:stats().waiting)
    manager:close()
    other:close()
  end)

  it("raises on misuse", function()
    local manager = assert(hierlock.open "null:")
    for _, targets in ipairs { {}, { {} }, { x = A }, { A, x = 1 }, { A, { "u", "" } } } do
      assert.has_error(function() manager:acquire_any(targets) end)
      assert.has_error(function() manager:start_any(targets) end)
    end
    assert.has_error(function() manager:acquire_any() end)
    assert.has_error(function() manager:acquire_any({ A }, { time_out = 1 }) end)
    assert.has_error(function() manager:acquire_any({ A }, 1) end)
    assert.equal("any", assert(manager:acquire_any { { "any" } }).targets[1].user)
    manager:close()
    assert.has_error(function() manager:acquire_any { A } end)
  end)
end)
