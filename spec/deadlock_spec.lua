-- A request that would wait for its own caller, or in a circle inside one process, is told at once; no other is.
-- Parts: stores

local hierlock = require "hierlock"
local support = require "spec.support"

local A, B, C = { "u1", "a1", "r1" }, { "u2", "a1", "r1" }, { "u3", "a1", "r1" }

local function here() return debug.getinfo(2, "l").currentline end

describe("a deadlock", function()
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

    local function told_at_once(fn, ...) -- long before its 50 s, or what it says
      local since = support.now()
      local ok, err = fn(...)
      assert.is_nil(ok)
      assert.equal("deadlock", err.code, tostring(err))
      assert.is_true(support.now() - since < support.DEADLINE / 2)
      return err
    end

    it("of a thread with itself is told at once, with the line that acquired", function()
      local one, two = open(), open()
      local line = here() + 1
      local handle = assert(one:acquire(A))
      for _, manager in ipairs { one, two } do
        for _, target in ipairs { A, { "u1", "a1" }, { "u1" } } do
          local err = told_at_once(manager.acquire, manager, target)
          assert.is_false(err.retryable)
          assert.truthy(err.message:find("deadlock_spec.lua:" .. line, 1, true), err.message)
        end
        told_at_once(manager.acquire_all, manager, { B, A })
        told_at_once(manager.with, manager, A, function() error "not reached" end)
      end
      assert.equal(5, one:stats().deadlocks)
      assert.equal(0, one:stats().waiting)
      assert.is_true(handle:is_held())
      handle:release { confirm = true }
      assert(two:acquire(A))
    end)

    it("is none while a handle of one's own is not in the way", function()
      local manager = open()
      local handle = assert(manager:acquire(A, { mode = "shared" }))
      local again = assert(manager:acquire(A, { mode = "shared" }))
      local sibling = assert(manager:acquire { "u1", "a1", "r2" })
      local other = assert(manager:acquire(B))
      told_at_once(manager.acquire, manager, A)
      assert(handle:release { confirm = true })
      told_at_once(manager.acquire, manager, A)
      assert(again:release { confirm = true })
      assert(manager:acquire(A))
      assert.is_true(sibling:is_held() and other:is_held())
    end)

    it("is none for one who tries once, or waits for less than a second", function()
      local manager = open()
      local handle = assert(manager:acquire(A))
      for _, timeout in ipairs { 0, 0.05 } do
        assert.equal("timeout", select(2, manager:acquire(A, { timeout = timeout })).code)
      end
      assert.is_true(handle:is_held())
    end)

    it("is none for one that is started: its program may release", function()
      local manager = open()
      local handle = assert(manager:acquire(A))
      local pending = assert(manager:start(A))
      assert.is_false(pending:done())
      handle:release()
      local got = assert(pending:wait(support.DEADLINE))
      assert.is_true(got:is_held())
    end)

    it("of two threads is told to the one who closes the circle; the other one goes on", function()
      local one, two = support.thread(store), support.thread(store)
      one:acquire("x", "acquire", A):result()
      two:acquire("x", "acquire", B):result()
      local waiting = one:acquire("y", "acquire", B, { timeout = support.DEADLINE })
      support.wait_for_waiters(store, B, 1)
      local since = support.now()
      local granted, code = two:acquire("y", "acquire", A, { timeout = support.DEADLINE }):result()
      assert.same({ nil, "deadlock" }, { granted, code })
      assert.is_true(support.now() - since < support.DEADLINE / 2)
      two:release "x"
      assert.is_truthy(waiting:result())
    end)

    it("is never told to threads that take what they nest in one order", function()
      local peers = {}
      for i = 1, 4 do peers[i] = support.thread(store) end
      for i, peer in ipairs(peers) do
        peer:start([[
          local rounds, seed = ...
          for i = 1, rounds do
            local x = assert(manager:acquire({ "o", "a", "r" .. (i * seed) % 3 }, { timeout = 60 }))
            local y = assert(manager:acquire({ "o", "b", "r" .. (i + seed) % 3 }, { timeout = 60 }))
            local z = assert(manager:acquire({ "o", "c", "r" .. i % 2 }, { timeout = 60 }))
            x:release()
            y:release()
            z:release()
          end
          return manager:stats().deadlocks
        ]], store.name == "embedded" and 3000 or 30, i)
      end
      for _, peer in ipairs(peers) do assert.equal(0, (peer:result())) end
    end)

    it("of three threads is found, too; a chain is none", function()
      local peers = { support.thread(store), support.thread(store), support.thread(store) }
      local targets = { A, B, C }
      for i, peer in ipairs(peers) do peer:acquire("x", "acquire", targets[i]):result() end
      local waiting = {}
      for i = 1, 2 do
        waiting[i] = peers[i]:acquire("y", "acquire", targets[i + 1], { timeout = support.DEADLINE })
        -- Servers count those who wait for anything. Counting holders would not do: a holder whose statement has
        -- just been answered may still be shown as waiting, and then another one closes the circle.
        support.wait_for_waiters(store, targets[i + 1], store.dialect and i or 1)
      end
      local granted, code = peers[3]:acquire("y", "acquire", A, { timeout = support.DEADLINE }):result()
      assert.same({ nil, "deadlock" }, { granted, code })
      peers[3]:release "x"
      assert.is_truthy(waiting[2]:result())
      peers[2]:release "x"
      assert.is_truthy(waiting[1]:result())
    end)

    it("goes through one of several readers; the others end none", function()
      local one, two, three = support.thread(store), support.thread(store), support.thread(store)
      one:acquire("x", "acquire", B):result()
      two:acquire("x", "acquire", A, { mode = "shared" }):result()
      three:acquire("x", "acquire", A, { mode = "shared" }):result()
      local waiting = one:acquire("y", "acquire", A, { timeout = support.DEADLINE })
      support.wait_for_waiters(store, A, 1)
      local since = support.now()
      local granted, code = two:acquire("y", "acquire", B, { timeout = support.DEADLINE }):result()
      assert.same({ nil, "deadlock" }, { granted, code })
      assert.is_true(support.now() - since < support.DEADLINE / 2)
      two:release "x"
      assert.is_true(waiting:stays_blocked())
      three:release "x"
      assert.is_truthy(waiting:result())
    end)

    if not store.leases_only then
      it("is found, too, where what is in the way is just being extended", function()
        local one, two = support.thread(store), support.thread(store)
        one:acquire("x", "acquire", A):result()
        two:acquire("x", "acquire", B):result()
        one:start("return handles.x:extend(...)", B, { timeout = support.DEADLINE })
        support.wait_for_waiters(store, B, 1)
        local granted, code, message = two:acquire("y", "acquire", A, { timeout = support.DEADLINE }):result()
        assert.same({ nil, "deadlock" }, { granted, code })
        assert.truthy(message:find("another thread", 1, true), message) -- told at once, by no look at the boards
        two:release "x"
        assert.is_true((one:result()))
      end)

      it("that an extend would close costs its handle", function()
        local manager = open()
        local handle = assert(manager:acquire(A))
        local other = assert(manager:acquire(B))
        told_at_once(handle.extend, handle, B)
        assert.is_false(handle:is_held())
        assert.equal("released", select(2, handle:check()).code)
        assert.is_true(handle:release())
        assert.is_true(other:is_held())
        local again = assert(manager:acquire(A))
        assert.equal(2, manager:stats().held)
        assert(other:extend(B))
        assert.is_true(again:is_held())
      end)
    end
  end)

  support.each_leasing_store(function(store)
    local manager
    if store.server and not store.leases_only and not store.unbucketed then store = support.leased(store) end
    setup(store.prepare)
    before_each(function() manager = support.open(store) end)
    after_each(function() manager:close() end)

    it("is none where a lease of one's own ends in time", function()
      local lease = assert(manager:acquire(A, { ttl = 1 }))
      assert(manager:acquire(A, { ttl = 1, timeout = support.DEADLINE }))
      assert.is_false(lease:is_held())
    end)

    it("is one where it ends too late, and none once somebody has revoked it", function()
      local lease = assert(manager:acquire(A, { ttl = 600, owner = "deadlock" }))
      assert.equal("deadlock", select(2, manager:acquire(A, { ttl = 600, timeout = 5 })).code)
      local other = support.open(store)
      local count, err = other:revoke { owner = "deadlock" }
      other:close()
      assert(count == 1 or err.code == "unsupported", tostring(err))
      if not count then return assert(lease:release()) end
      local again = assert(manager:acquire(A, { ttl = 600, timeout = 5 }))
      assert.is_true(again:check())
      assert.equal("lost", select(2, lease:check()).code)
    end)

    it("is none with another thread whose lease was revoked, which it does not know", function()
      for _, revoked in ipairs { false, true } do
        local one, two = support.thread(store), support.thread(store)
        assert(one:acquire("x", "acquire", A, { ttl = 600, owner = "circle" }):result())
        assert(two:acquire("x", "acquire", B, { ttl = 600 }):result())
        local waiting = one:acquire("y", "acquire", B, { ttl = 600, timeout = support.DEADLINE })
        support.wait_for_waiters(store, B, 1)
        if revoked then
          local count, err = manager:revoke { owner = "circle" }
          if not count then
            assert.equal("unsupported", err.code)
            revoked = false
          end
        end
        local granted, code = two:acquire("y", "acquire", A, { ttl = 600, timeout = support.DEADLINE }):result()
        if revoked then
          assert.is_true(granted, code)
          two:release "y"
        else
          assert.same({ nil, "deadlock" }, { granted, code })
        end
        two:release "x"
        assert.is_truthy(waiting:result())
        one:release "y"
        one:call [[ handles.x:release(); handles.x = nil ]]
      end
    end)
  end)

  describe("of processes on the embedded store", function()
    local store = support.stores[1]
    local targets = { A, B, C }
    after_each(support.close_peers)

    -- Each of n peers holds its target and asks for the next one's; returns their results, in the order of the
    -- peers.
    local function circle(n, method, make)
      local peers, since = {}, nil
      for i = 1, n do
        peers[i] = (make or support.process)(store)
        assert(peers[i]:acquire("x", "acquire", targets[i]):result())
      end
      for i, peer in ipairs(peers) do
        peer:start([[
          local method, target = ...
          local options = { timeout = 15 }
          local y, err
          if method == "extend" then
            y, err = handles.x:extend(target, options)
            if not y then assert(not handles.x:is_held()) end
          else
            y, err = manager:acquire(target, options)
          end
          local code, message = y and "granted" or err.code, err and err.message
          handles.x:release { confirm = true }
          if y and y ~= true then y:release { confirm = true } end
          return code, message
        ]], method, targets[i % n + 1])
        -- The last one may be told before others see it wait.
        if i < n then support.wait_for_waiters(store, targets[i % n + 1], 1) end
        support.sleep(0.005) -- their ages are told apart by the millisecond
        since = support.now()
      end
      local codes, count = {}, 0
      for i, peer in ipairs(peers) do
        local code, message = peer:result()
        codes[i] = code
        if code == "deadlock" then
          count = count + 1
          assert.truthy(message:find("in a circle", 1, true), message)
        end
      end
      assert.is_true(support.now() - since < 12)
      return codes, count
    end

    it("is told to the youngest of two, and of three, soon", function()
      for n = 2, 3 do
        local codes, count = circle(n)
        assert.equal(1, count)
        assert.equal("deadlock", codes[n])
      end
    end)

    it("is told to one that extends, which then holds nothing", function()
      local codes, count = circle(2, "extend")
      assert.same({ "granted", "deadlock" }, codes)
      assert.equal(1, count)
    end)

    it("is found where one holds what acquire_any has given it", function()
      local one, two = support.process(store), support.process(store)
      for i, peer in ipairs { one, two } do
        assert.is_true(peer:call("handles.x = assert(manager:acquire_any { ... }) return true", targets[i]))
      end
      one:acquire("y", "acquire", B, { timeout = 20 })
      support.sleep(0.05) -- an older request
      local young = two:acquire("y", "acquire", A, { timeout = 20 })
      local ok, code = young:result()
      assert.is_falsy(ok)
      assert.equal("deadlock", code)
      two:release "x"
      assert.is_true(one:result())
    end)

    it("is found where one of them is another thread of a process", function()
      local n = 0
      local _, count = circle(3, nil, function(...)
        n = n + 1
        return (n == 2 and support.process or support.thread)(...)
      end)
      assert.equal(1, count)
    end)

    it("is told to one who stands in line behind a caller that holds nothing and waits for him", function()
      for _, make in ipairs { support.process, support.thread } do
        local one, two = make(store), make(store)
        assert(one:acquire("x", "acquire", A):result())
        local whole = two:acquire("x", "acquire", { "u1" }, { timeout = 20 })
        support.wait_for_waiters(store, { "u1" }, 1)
        local since = support.now()
        local y, code, message = one:acquire("y", "acquire", { "u1", "a1", "r2" }, { timeout = 15 }):result()
        assert.same({ nil, "deadlock" }, { y, code })
        assert.truthy(message:find("in a circle", 1, true), message)
        assert.is_true(support.now() - since < 12)
        assert.is_true(whole:stays_blocked())
        one:release "x"
        assert.is_truthy(whole:result())
        two:release "x"
      end
    end)

    it("is told where the one in line has a part of what he asks for, in one call", function()
      local codes = {}
      for i, pair in ipairs { { A, "u2" }, { B, "u1" } } do
        local one, two = support.process(store), support.process(store)
        assert(one:acquire("x", "acquire", pair[1]):result())
        local both = two:acquire("x", "acquire_all", { { "u1" }, { "u2" } }, { timeout = 20 })
        support.wait_for_waiters(store, { pair[1][1] }, 1)
        local y, code = one:acquire("y", "acquire", { pair[2], "a2" }, { timeout = 15 }):result()
        codes[i] = y and "granted" or code
        one:release "x"
        if y then one:release "y" end
        assert.is_truthy(both:result())
        two:release "x"
      end
      table.sort(codes) -- he has that one of the two whose row comes first
      assert.same({ "deadlock", "granted" }, codes)
    end)

    it("is none behind one that waits for less than a second, or for the first of several", function()
      local one, two = support.process(store), support.process(store)
      assert(one:acquire("x", "acquire", A):result())
      local whole = two:acquire("x", "acquire", { "u1" }, { timeout = 0.9 })
      support.wait_for_waiters(store, { "u1" }, 1)
      assert.is_truthy(one:acquire("y", "acquire", { "u1", "a1", "r2" }, { timeout = support.DEADLINE }):result())
      assert.is_falsy((whole:result()))
      one:release "y"
      local any = two:acquire("x", "acquire_any", { { "u1" } }, { timeout = 3 })
      support.wait_for_waiters(store, { "u1" }, 1)
      assert.is_truthy(one:acquire("y", "acquire", { "u1", "a1", "r2" }, { timeout = support.DEADLINE }):result())
      assert.is_falsy((any:result()))
    end)

    it("is none in a chain that somebody will end", function()
      local one, two, three = support.process(store), support.process(store), support.process(store)
      for i, peer in ipairs { one, two, three } do assert(peer:acquire("x", "acquire", targets[i]):result()) end
      local second = two:acquire("y", "acquire", A, { timeout = 20 })
      local third = three:acquire("y", "acquire", B, { timeout = 20 })
      support.sleep(2.5) -- longer than the first two looks
      assert.is_true(second:stays_blocked() and third:stays_blocked())
      one:release "x"
      assert.is_truthy(second:result())
      two:release "x"
      assert.is_truthy(third:result())
    end)

    it("is none with a process that was killed while it waited", function()
      local one, manager = support.process(store), support.open(store)
      finally(function() manager:close() end)
      local mine = assert(manager:acquire(A))
      assert(one:acquire("x", "acquire", B):result())
      one:acquire("y", "acquire", A, { timeout = 60 })
      support.wait_for_waiters(store, A, 1)
      one:signal "sigkill"
      -- No thread looked for deaths meanwhile. An acquisition would look as it tries, an extend does not try.
      assert(mine:extend(B, { timeout = 10 }))
      mine:release()
    end)
  end)

  it("is never told by a store that grants everything", function()
    local manager = assert(hierlock.open "null:")
    local handle = assert(manager:acquire(A))
    assert(manager:acquire(A))
    assert.is_true(handle:is_held())
    manager:close()
  end)

  describe("of coroutines", function()
    local cqueues = require "cqueues"
    local store = support.stores[1]
    local manager
    after_each(function() manager:close() end)

    local function circle(options)
      manager = support.open(store, options)
      local codes, queue = {}, cqueues.new()
      local function go(first, second)
        queue:wrap(function()
          local x = assert(manager:acquire(first))
          cqueues.sleep(0.05)
          local y, err = manager:acquire(second, { timeout = 1.5 })
          codes[#codes + 1] = y and "granted" or err.code
          x:release()
          if y then y:release() end
        end)
      end
      go(A, B)
      go(B, A)
      assert(queue:loop())
      return codes
    end

    it("is told at once where each promises to release what it acquired", function()
      local since = support.now()
      assert.same({ "deadlock", "granted" }, circle { own_handles = true })
      assert.is_true(support.now() - since < 1.2)
    end)

    it("is not guessed where they do not", function()
      assert.equal("timeout", circle()[1])
    end)

    it("with themselves likewise; another coroutine may release what it was not promised for", function()
      for _, own in ipairs { true, false } do
        manager = support.open(store, { own_handles = own })
        local code, queue = nil, cqueues.new()
        queue:wrap(function()
          local x = assert(manager:acquire(A))
          queue:wrap(function()
            cqueues.sleep(0.1)
            x:release()
          end)
          local y, err = manager:acquire(A, { timeout = support.DEADLINE })
          code = y and "granted" or err.code
        end)
        assert(queue:loop())
        assert.equal(own and "deadlock" or "granted", code)
        if own then manager:close() end
      end
    end)
  end)

  it("is not found with what a parent of this process holds", function()
    local output = support.run([[
      local fork = require "hierlock_spec.fork"
      local hierlock = require "hierlock"
      local manager = assert(hierlock.open(nil, { buckets = tonumber(os.getenv "BUCKETS") }))
      local handle = assert(manager:acquire { "u1" })
      local pid = fork.fork()
      if pid == 0 then
        local again, err = manager:acquire({ "u1" }, { timeout = 1 })
        io.write(again and "granted" or err.code)
        io.stdout:flush()
        fork.exit(0)
      end
      fork.wait(pid)
      handle:release()
    ]], "BUCKETS=" .. support.stores[1].options.buckets .. " HIERLOCK_DSN=" .. support.stores[1].dsn)
    assert.equal("timeout", output)
  end)
end)
