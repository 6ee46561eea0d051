-- Acquisitions that are started and not waited for, on every store: a pending's report and its fate in each of its
-- states. No end of it keeps a lock, a descriptor or a place.

local uv = require "luv"
local cqueues = require "cqueues"
local support = require "spec.support"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
-- For calls that should not wait at all; on a server, a release or a cancellation may be under way still.
local SOON = { timeout = 2 }

local function here(offset) return ("pending_spec.lua:%d: "):format(debug.getinfo(2, "l").currentline + offset) end

-- Whether the descriptor can be read now.
local function readable(fd)
  local poll, is = uv.new_poll(fd), false
  poll:start("r", function() is = true end)
  uv.run("nowait")
  poll:close()
  uv.run("nowait")
  return is
end

-- Open descriptors of the kind that pendings have.
local function descriptors()
  local n, scan = 0, assert(uv.fs_scandir("/proc/self/fd"))
  for fd in function() return uv.fs_scandir_next(scan) end do
    if (uv.fs_readlink("/proc/self/fd/" .. fd) or ""):find("eventfd", 1, true) then n = n + 1 end
  end
  return n
end

local function wait_until_done(pending)
  support.wait_until(function() return pending:done() end, "a pending")
end

describe("a pending", function()
  support.each_store(function(store)
    local manager, other, held

    before_each(function()
      manager, other = support.open(store), support.open(store)
    end)

    after_each(function()
      support.close_peers()
      manager:close()
      other:close()
      held = nil
    end)

    -- Another manager holds the target.
    local function hold(target) held = assert(other:acquire(target)) end
    local function let_go() assert(held:release { confirm = true }) end
    local function assert_free(target)
      assert(assert(other:acquire(target, SOON)):release { confirm = true })
    end

    -- Pendings for R1 in each state, and the lock or caller that keeps them there.
    local STATES = {
      { "at the store", function()
        hold(R1)
        local pending = assert(manager:start(R1))
        support.wait_for_waiters(store, R1)
        return pending
      end },
      { "in line", function()
        hold(R1)
        local first = assert(manager:start(R1))
        support.wait_for_waiters(store, R1)
        return assert(manager:start(R1)), first
      end },
      { "granted", function()
        local pending = assert(manager:start(R1))
        wait_until_done(pending)
        return pending
      end },
      { "failed", function()
        hold(R1)
        local pending = assert(manager:start(R1, { timeout = 0 }))
        wait_until_done(pending)
        return pending
      end },
      { "taken", function()
        local pending = assert(manager:start(R1))
        assert(pending:wait()):release { confirm = true }
        return pending
      end },
    }

    -- ------------------------------------------------------------ its life

    it("gives what acquire gives", function()
      local pending = assert(manager:start(R1, { label = "it", mode = "shared" }))
      local handle = assert(pending:wait())
      assert.equal("shared", handle.mode)
      assert.equal(2, handle.level)
      assert.matches("^%x+$", handle.token)
      assert.same({ { user = "u1", account = "a1", resource = "r1" } }, handle.targets)
      assert.is_true(handle:is_held())
      assert.is_true(handle:check())
      assert.equal(1, manager:stats().acquired)
      assert.equal(1, manager:stats().held)
      assert.is_true(handle:release { confirm = true })
      assert_free(U1)
    end)

    it("waits without anybody's help, and its descriptor tells when it is done", function()
      hold(R1)
      local pending = assert(manager:start(R1))
      local fd = pending:fd()
      support.wait_for_waiters(store, R1)
      assert.is_false(pending:done())
      assert.is_false(readable(fd))
      assert.equal("hierlock.pending (waiting)", tostring(pending))
      assert.equal(1, manager:stats().waiting)
      assert.is_nil((pending:wait(0.005)))
      let_go()
      support.wait_until(function() return readable(fd) end, "the descriptor")
      assert.is_true(pending:done())
      assert.equal("hierlock.pending (done)", tostring(pending))
      assert.equal(0, manager:stats().waiting)
      assert.is_true(readable(fd), "it stays so")
      assert.equal(fd, pending:fd())
      local handle = assert(pending:wait())
      assert(handle.waited > 0)
      assert.is_true(readable(fd))
    end)

    it("has a descriptor that can be read when it was done before it was asked for", function()
      local pending = assert(manager:start(R1))
      wait_until_done(pending)
      assert.is_true(readable(pending:fd()))
    end)

    it("is waited for in pieces", function()
      hold(R1)
      local pending = assert(manager:start(R1))
      for _, seconds in ipairs { 0, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01 } do
        local began = support.now()
        local handle, err = pending:wait(seconds)
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
        assert.is_true(support.now() - began >= seconds)
        assert.is_false(pending:done())
      end
      let_go()
      assert(pending:wait(support.DEADLINE)):release()
    end)

    it("is polled by cqueues as it is", function()
      hold(R1)
      local controller, order = cqueues.new(), {}
      controller:wrap(function()
        local pending = assert(manager:start(R1))
        assert.equal("r", pending:events())
        assert.is_nil(pending:timeout())
        assert.equal(pending:fd(), pending:pollfd())
        while not pending:done() do cqueues.poll(pending) end
        order[#order + 1] = "granted"
        pending:wait():release()
      end)
      controller:wrap(function()
        while manager:stats().waiting == 0 do cqueues.sleep(0.001) end
        cqueues.sleep(support.STAYS_BLOCKED)
        order[#order + 1] = "let go"
        let_go()
      end)
      assert(controller:loop(support.DEADLINE))
      assert.same({ "let go", "granted" }, order)
    end)

    -- A controller takes a descriptor for the one of that number that it knows.
    it("is forgotten by cqueues before its descriptor is closed", function()
      hold(R1)
      local controller, numbers, again, n = cqueues.new(), {}, 0, 0
      controller:wrap(function()
        for _ = 1, 5 do
          local pending = assert(manager:start(R1, { timeout = 0.01 }))
          if numbers[pending:fd()] then again = again + 1 end
          numbers[pending:fd()] = true
          while not pending:done() do cqueues.poll(pending) end
          assert.equal("timeout", select(2, pending:wait()).code)
          getmetatable(pending).__close(pending)
          n = n + 1
        end
      end)
      assert(controller:loop(2))
      assert.equal(5, n)
      assert.is_true(again > 0, "no number came again")
    end)

    it("gives its result once", function()
      local pending = assert(manager:start(R1))
      local handle = assert(pending:wait())
      local ok, message = pcall(function() pending:wait() end)
      assert.is_false(ok)
      assert.matches(here(-2) .. "hierlock: the pending has given its result already", message, 1, true)
      assert.is_true(handle:is_held())
      assert.is_true(pending:cancel())
      assert.is_true(handle:is_held(), "what was taken is not the pending's any more")
      pending = nil -- luacheck: ignore
      support.collect()
      assert.is_true(handle:check())
    end)

    it("says of no holder that it keeps back a result which was given already", function()
      hold(R1)
      local pending = assert(manager:start(R1, { timeout = 0.01 }))
      assert.equal("timeout", select(2, pending:wait()).code)
      local ok, message = pcall(pending.wait, pending)
      assert.is_false(ok)
      assert.matches("the pending has given its result already$", message)
    end)

    it("raises misuse where it is called", function()
      for _, case in ipairs {
        { "must be", function() manager:start(7) end },
        { "time_out", function() manager:start(U1, { time_out = 1 }) end },
        { "empty", function() manager:start { "" } end },
        { "self must be a manager", function() manager.start({}, U1) end },
        { "self must be a pending", function() manager:start(U1).wait({}) end },
        { "self must be a pending", function() manager:start(U1).done() end },
        { "self must be a pending", function() manager:start(U1).cancel(manager) end },
        { "seconds", function() manager:start(U1):wait("soon") end },
        { "seconds", function() manager:start(U1):wait(-1) end },
      } do
        local ok, message = pcall(case[2])
        assert.is_false(ok)
        assert.matches("pending_spec.lua:" .. debug.getinfo(case[2], "S").linedefined .. ": hierlock: ", message, 1, true)
        assert.matches(case[1], message, 1, true)
      end
      manager:close()
      assert.has_error(function() manager:start(U1) end)
    end)

    -- -------------------------------------------------------------- errors

    describe("ends with", function()
      -- Never early; on a busy machine now and then later than it should be.
      local function ends_in_time(start, seconds)
        local late
        for _ = 1, 24 do
          local began = support.now()
          local handle, err = start():wait()
          local took = support.now() - began
          assert.is_nil(handle)
          assert.equal("timeout", err.code)
          assert.is_true(took >= seconds - 0.0005, ("%.4f s is early"):format(took))
          late = math.min(late or math.huge, took - seconds)
          if late < 0.01 then return err end
        end
        error(("at best %.1f ms late"):format(late * 1000))
      end

      it("timeout at the store, to 10 ms, with the node and who was in the way", function()
        hold(R1)
        local err = support.told(function()
          return nil, ends_in_time(function() return assert(manager:start(R1, { timeout = 0.15 })) end, 0.15)
        end)
        assert.is_true(err.retryable)
        assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
        assert.equal(1, #err.holders)
        assert.equal(uv.os_getpid(), err.holders[1].pid)
        assert.equal("u1/a1/r1", err.holders[1].path)
        assert.is_false(err.holders[1].waiting)
        assert.equal(0, manager:stats().waiting)
        let_go()
        assert_free(U1)
      end)

      it("timeout in line, to 10 ms, with the node", function()
        hold(R1)
        local first = assert(manager:start(R1))
        support.wait_for_waiters(store, R1)
        local err = ends_in_time(function() return assert(manager:start(R1, { timeout = 0.15 })) end, 0.15)
        assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
        assert.is_false(first:done())
        let_go()
        assert(first:wait())
      end)

      it("timeout at once, where it tries once", function()
        hold(R1)
        local began = support.now()
        local _, err = assert(manager:start(R1, { timeout = 0 })):wait()
        assert.equal("timeout", err.code)
        assert.is_true(support.now() - began < 1)
        assert.equal(1, manager:stats().timeouts)
      end)

      if store.server then
        it("busy, when the pool has no room until its time is up", function()
          local small = support.open(store, { pool_size = 1 })
          finally(function() small:close() end)
          hold(R1)
          local first = assert(small:start(R1))
          support.wait_for_waiters(store, R1)
          local second = assert(small:start({ "u2" }, { timeout = 0.1 }))
          local _, err = second:wait()
          assert.equal("busy", err.code)
          assert.is_true(err.retryable)
          assert.equal(1, small:stats().busy)
          let_go()
          assert(first:wait()):release()
          assert(assert(small:start { "u2" }):wait())
        end)

        -- Each is still connecting when the next one comes: its place in the pool counts once.
        it("a lock, when the pool has room, while the others connect", function()
          local small = support.open(store, { pool_size = 4 })
          finally(function() small:close() end)
          hold(A1)
          local waiting = {}
          for i = 1, 3 do
            waiting[i] = assert(small:start { "u1", "a1", "r" .. i })
            uv.sleep(6)
          end
          local handle, err = assert(small:start({ "u2" }, { timeout = 10 })):wait()
          assert(handle, tostring(err)):release { confirm = true }
          let_go()
          for i = 1, 3 do assert(waiting[i]:wait(support.DEADLINE)):release() end
          assert.equal(0, small:stats().busy)
        end)

        -- At once, not when the keeper looks next: that is within a second, so it is tried several times.
        it("a lock, as soon as another one is lost and leaves room in the pool", function()
          if not store.root() then return pending("no administrator here") end
          local small = support.open(store, { pool_size = 1 })
          finally(function() small:close() end)
          local function delay()
            local lost = assert(small:acquire { "u3" })
            local waits = assert(small:start({ "u2" }, { timeout = support.DEADLINE }))
            assert.is_false(waits:done())
            support.wait_until(function()
              if not lost:is_held() then return true end
              for _, id in ipairs(store.transactions()) do store.kill(id) end
            end, "the loss")
            local began = support.now()
            support.wait_until(function() return small:stats().connections == 1 end, "a new connection")
            local took = support.now() - began
            local handle, err = waits:wait(support.DEADLINE)
            assert(handle, tostring(err)):release { confirm = true }
            return took
          end
          for _ = 1, 3 do
            local slow = 0
            for _ = 1, 5 do
              if delay() > 0.5 then slow = slow + 1 end
            end
            if slow == 0 then return end
          end
          error("it waited for the keeper")
        end)

        it("connection, where nobody answers", function()
          local dsn = store.dsn:gsub("@.-/", "@127.0.0.1:1/", 1)
          local manager_of_nobody = require("hierlock").open(dsn, store.options)
          assert.is_nil(manager_of_nobody, "opening asks already")
          local proxy = support.open(store)
          finally(function() proxy:close() end)
          if not store.root() then return pending("no administrator here") end
          hold(R1)
          local waiting = assert(proxy:start(R1))
          support.wait_for_waiters(store, R1)
          local id = support.wait_until(function() return store.transactions(true)[1] end, "the waiter's transaction")
          store.kill(id)
          local _, err = waiting:wait()
          assert.equal("connection", err.code)
          assert.is_true(err.retryable)
          let_go()
          assert(assert(proxy:start(R1)):wait())
        end)

        local it_with_a_table = store.table and it or function() end
        it_with_a_table("not_provisioned, with the node whose row is missing", function()
          local row = require("hierlock").plan({ A1 }, { buckets = store.options.buckets }):rows()[2]
          local where = (" FROM %s WHERE level=%d AND bucket=%d"):format(store.table, row.level, row.bucket)
          store.sql():query("DELETE" .. where)
          finally(function()
            store.sql():query("INSERT INTO %s VALUES (%d, %d)", store.table, row.level, row.bucket)
          end)
          local _, err = assert(manager:start(R1)):wait()
          assert.equal("not_provisioned", err.code)
          assert.is_false(err.retryable)
          assert.same({ user = "u1", account = "a1" }, err.target)
          assert_free { "u1", "a2" }
        end)
      end
    end)

    -- -------------------------------------------------- the end of a state

    for _, state in ipairs(STATES) do
      local name, make = state[1], state[2]
      local waits = name == "at the store" or name == "in line"

      it(("that is %s: cancel ends it, and nothing stays locked"):format(name), function()
        local pending, first = make()
        local began = support.now()
        assert.is_true(pending:cancel())
        assert.is_true(support.now() - began < 1)
        assert.is_true(pending:done())
        assert.is_true(readable(pending:fd()))
        assert.is_true(pending:cancel())
        if name == "taken" then
          assert.has_error(function() pending:wait() end)
        else
          local handle, err = pending:wait()
          assert.is_nil(handle)
          assert.equal(name == "failed" and "timeout" or "cancelled", err.code)
          if waits then
            assert.is_true(err.retryable)
            assert.equal(1, manager:stats().cancelled)
          end
        end
        if first then first:cancel() end
        if held then let_go() end
        assert_free(U1)
        assert.equal(0, manager:stats().held)
        assert.equal(0, manager:stats().waiting)
      end)

      it(("that is %s: the collector ends it, and nothing stays locked"):format(name), function()
        -- In a function of its own: the stack must not keep them.
        local function drop()
          support.collect()
          local before, connections = descriptors(), manager:stats().connections
          local pending, first = make()
          pending:fd()
          if first then first:fd() end
          assert.is_true(descriptors() > before)
          return before, connections
        end
        local before, connections = drop()
        if held then let_go() end
        support.collect()
        assert_free(U1)
        assert.equal(0, manager:stats().held)
        -- A connection to PostgreSQL has one, too. The first was there before it is counted. A worker may still be
        -- closing one, or asking the server to end a wait.
        support.wait_until(function()
          local of_connections = store.name == "postgresql" and manager:stats().connections - math.max(connections, 1) or 0
          return before == descriptors() - of_connections
        end, "the descriptors that were there before")
      end)

      it(("that is %s: the manager's end ends it, and nothing stays locked"):format(name), function()
        local pending, first = make()
        manager:close()
        assert.is_true(pending:done())
        if name == "taken" then
          assert.has_error(function() pending:wait() end)
        else
          local handle, err = pending:wait()
          assert.is_nil(handle)
          assert.equal(name == "failed" and "timeout" or "cancelled", err.code)
        end
        if first then assert.equal("cancelled", select(2, first:wait()).code) end
        if held then let_go() end
        assert_free(U1)
      end)
    end

    it("that is closed is cancelled", function()
      for _, state in ipairs(STATES) do
        local pending, first = state[2]()
        getmetatable(pending).__close(pending)
        getmetatable(pending).__close(pending)
        assert.is_true(pending:done())
        local handle, err = pending:wait()
        assert.is_nil(handle)
        assert.equal("cancelled", err.code)
        assert.equal("released", select(2, pending:fd()).code)
        assert.is_true(pending:cancel())
        if first then first:cancel() end
        if held then let_go() end
        held = nil
        assert_free(U1)
      end
    end)

    if _VERSION >= "Lua 5.4" then
      it("that leaves its scope is cancelled", function()
        local scope = assert(load [[
          local manager, target = ...
          local pending <close> = manager:start(target)
          while not pending:done() do end
        ]])
        scope(manager, R1)
        assert_free(U1)
      end)
    end

    it("in line goes on when the one before it is cancelled, or gives up", function()
      hold(R1)
      local first = assert(manager:start(R1))
      support.wait_for_waiters(store, R1)
      local impatient = assert(manager:start(R1, { timeout = 0.05 }))
      local last = assert(manager:start(R1))
      assert.equal("timeout", select(2, impatient:wait()).code)
      first:cancel()
      let_go()
      assert.is_true(assert(last:wait()):check())
    end)

    it("of many is granted in the order in which they came", function()
      hold(U1)
      local pendings, order = {}, {}
      for i = 1, 20 do pendings[i] = assert(manager:start(i % 2 == 0 and R1 or A1)) end
      let_go()
      local function next_one()
        for i, pending in pairs(pendings) do
          if pending:done() then return i end
        end
      end
      while next(pendings) do
        local i = support.wait_until(next_one)
        order[#order + 1] = i
        assert(pendings[i]:wait()):release { confirm = true }
        pendings[i] = nil
      end
      for i = 1, 20 do assert.equal(i, order[i]) end
    end)

    it("of a thousand for one node costs at most two connections, and 4 KiB", function()
      hold(R1)
      assert(assert(manager:start(R2)):wait()):release { confirm = true } -- what is needed once
      local pendings = { assert(manager:start(R1)) }
      support.wait_for_waiters(store, R1)
      support.collect()
      local function resident()
        local file = assert(io.open("/proc/self/statm"))
        local pages = file:read("*l"):match("^%d+ (%d+)")
        file:close()
        return tonumber(pages) * 4096
      end
      local memory = resident()
      for i = 2, 1000 do pendings[i] = assert(manager:start(R1)) end
      assert.equal(1000, manager:stats().waiting)
      assert.is_true(manager:stats().connections <= 2)
      local each = (resident() - memory) / 1000
      assert.is_true(each <= 4096, each .. " bytes each")
      local threads = 0
      for line in io.lines("/proc/self/status") do threads = tonumber(line:match("^Threads:%s*(%d+)")) or threads end
      assert.is_true(threads <= 16, threads .. " threads")
      for _, pending in ipairs(pendings) do pending:cancel() end
      assert.equal(0, manager:stats().waiting)
      assert.equal(1000, manager:stats().cancelled)
      let_go()
      assert_free(U1)
    end)

    -- ------------------------------------------------------------- the fork

    it("is dead in a forked child, and goes on in the parent", function()
      hold(R1)
      local peer = support.process(store)
      peer:call([[
        handles.waiting, handles.line = manager:start(...), manager:start(...)
        handles.granted = manager:start { "u9" }
        handles.taken = manager:start { "u8" }:wait()
        support.wait_until(function() return handles.granted:done() end)
      ]], R1)
      support.wait_for_waiters(store, R1)
      assert.equal(0, peer:call [[
        local fork = require "hierlock_spec.fork"
        local pid = fork.fork()
        if pid == 0 then
          local ok, err = pcall(function()
            for name, pending in pairs(handles) do
              if name ~= "taken" then
                assert(pending:done())
                local handle, err = pending:wait()
                assert(not handle and err.code == "released")
                handle, err = pending:fd()
                assert(not handle and err.code == "released")
                assert(pending:cancel())
              end
            end
            handles = nil
            collectgarbage() collectgarbage()
            local own = assert(manager:start({ "u7" }):wait())
            assert(own:release { confirm = true })
          end)
          if not ok then io.stderr:write(tostring(err), "\n") end
          fork.exit(ok and 0 or 1)
        end
        return fork.wait(pid)
      ]])
      assert.is_false(peer:call "return handles.waiting:done() or handles.line:done()")
      local handle, err = other:acquire({ "u9" }, { timeout = 0 })
      assert.is_nil(handle)
      assert.equal("timeout", err.code)
      let_go()
      assert.is_true(peer:call [[
        for _, name in ipairs { "granted", "waiting", "line" } do
          local handle = assert(handles[name]:wait())
          assert(handle:check())
          handle:release { confirm = true }
        end
        return true
      ]])
    end)
  end)
end)

describe("a pending of the null store", function()
  it("is done at once", function()
    local manager = require("hierlock").open "null:"
    local pending = assert(manager:start(U1))
    assert.is_true(pending:done())
    assert.is_true(pending:wait():is_held())
    manager:close()
  end)
end)
