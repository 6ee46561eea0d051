-- Coroutines that wait, under each event loop: everything else goes on, calls give the same results as when they
-- block, and whatever ends a wait, nothing stays locked.

local uv = require "luv"
local cqueues = require "cqueues"
local hierlock = require "hierlock"
local support = require "spec.support"
local loops = require "spec.support.loops"

local U1, A1, R1, R2, R3 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }, { "u1", "a1", "r3" }
local SOON = { timeout = 2 }


-- A place in the program that calls fn, and its line as an error shows it.
local function line_of(fn) return ("loop_spec.lua:%d: "):format(debug.getinfo(fn, "S").linedefined) end

describe("a coroutine", function()
  if loops.missing then pending(loops.missing) end
  support.each_store(function(store)
    -- Only sessions can extend: leases are not extended.
    local it_extends = store.leases_only and function() end or it
    local other, opened, held

    local function open(options)
      local manager = support.open(store, options)
      opened[#opened + 1] = manager
      return manager
    end

    before_each(function()
      opened = {}
      other = open()
    end)

    after_each(function()
      support.close_peers()
      for _, manager in ipairs(opened) do manager:close() end
      held = nil
    end)

    local function hold(target) held = assert(other:acquire(target)) end
    local function let_go() assert(held:release { confirm = true }) end
    local function assert_free(target)
      assert(assert(other:acquire(target, SOON)):release { confirm = true })
    end

    for _, loop_name in ipairs(loops.names) do
      describe("of " .. loop_name, function()
        local loop, manager

        before_each(function()
          loop = loops[loop_name]()
          manager = open { loop = loop.option }
        end)

        after_each(function() loop.close() end)

        -- Runs the loop until there is what condition() returns.
        local function run_until(condition)
          local deadline = support.now() + support.DEADLINE
          repeat
            local result = condition()
            if result then return result end
            loop.step()
          until support.now() > deadline
          error("gave up waiting", 2)
        end

        -- Runs fn in a coroutine; the table gets `done`, and its results.
        local function spawn(fn, ...)
          local results = {}
          loop.spawn(function(...)
            local function keep(...)
              results.n = select("#", ...)
              for i = 1, results.n do results[i] = select(i, ...) end
              results.done = true
            end
            keep(fn(...))
          end, ...)
          return results
        end
        local function result_of(results)
          run_until(function() return results.done end)
          return (table.unpack or unpack)(results, 1, results.n)
        end

        it("counts an acquisition once, granted at once or after a wait", function()
          hold(R2)
          local first, second = spawn(manager.acquire, manager, R1), spawn(manager.acquire, manager, R2)
          run_until(function() return first.done and manager:stats().waiting == 1 end)
          let_go()
          run_until(function() return second.done end)
          local stats = manager:stats()
          assert.same({ 2, 2, 0, 0, 0 }, { stats.acquired, stats.held, stats.timeouts, stats.errors, stats.waiting })
          assert(first[1]:release())
          assert(second[1]:release())
          assert.equal(0, manager:stats().held)
        end)

        it("waits, and everything else goes on", function()
          hold(R1)
          local ticks, stop = 0, false
          local ticker = spawn(function()
            repeat
              loop.sleep(0.001)
              ticks = ticks + 1
            until stop
          end)
          local waiter = spawn(function() return manager:acquire(R1) end)
          support.wait_for_waiters(store, R1)
          local before = ticks
          run_until(function() return ticks >= before + 20 end)
          assert.is_nil(waiter.done)
          let_go()
          local handle = result_of(waiter)
          assert.is_true(handle:is_held())
          assert.is_true(handle.waited > 0)
          stop = true
          run_until(function() return ticker.done end)
        end)

        it("is among many that want the same, and each gets it once", function()
          local inside, most, entered, waiters = 0, 0, 0, {}
          for i = 1, 20 do
            waiters[i] = spawn(function()
              for _ = 1, 3 do
                local handle = assert(manager:acquire(i % 2 == 0 and R1 or A1))
                inside = inside + 1
                most = math.max(most, inside)
                entered = entered + 1
                loop.sleep(0)
                inside = inside - 1
                assert(handle:release())
              end
            end)
          end
          for _, waiter in ipairs(waiters) do result_of(waiter) end
          assert.equal(60, entered)
          assert.equal(1, most)
          assert.equal(60, manager:stats().acquired)
          assert.equal(0, manager:stats().waiting)
        end)

        it("calls whatever waits, and gets what it would get if it blocked", function()
          for _, case in ipairs {
            { U1, function() return manager:acquire(U1) end, "user" },
            { U1, function() return manager:acquire_user("u1") end, "user" },
            { A1, function() return manager:acquire_account("u1", "a1") end, "account" },
            { R1, function() return manager:acquire_resource("u1", "a1", "r1") end, "resource" },
            { R2, function() return manager:acquire_resources("u1", "a1", { "r1", "r2" }) end, "resource" },
            { R2, function() return manager:acquire_all { R1, R2 } end, "resource" },
          } do
            hold(case[1])
            local waiter = spawn(case[2])
            support.wait_for_waiters(store, case[1])
            loop.step()
            assert.is_nil(waiter.done)
            let_go()
            local handle = result_of(waiter)
            assert.is_string(handle.targets[1][case[3]])
            assert.is_true(handle:release { confirm = true })
          end
        end)

        it("holds with `with`, and its function may wait, too", function()
          if _VERSION == "Lua 5.1" and not rawget(_G, "jit") then
            -- pcall cannot be yielded across there: calls inside it block.
            local results = { result_of(spawn(function()
              return manager:with(R1, function(handle, ...)
                assert(manager:acquire(R2)):release()
                return handle:is_held(), ...
              end, 7, nil)
            end)) }
            assert.same({ true, 7 }, results)
          else
            hold(R1)
            local waiter = spawn(function()
              return manager:with(R1, function(handle, ...)
                loop.sleep(0.001)
                if not store.leases_only then assert(handle:extend(R2)) end
                assert(manager:acquire(R3)):release { confirm = true }
                assert(handle:check())
                return "done", ...
              end, 7, nil)
            end)
            support.wait_for_waiters(store, R1)
            let_go()
            local done, seven, none = result_of(waiter)
            assert.equal("done", done)
            assert.equal(7, seven)
            assert.is_nil(none)
          end
          assert_free(U1)
          local ok, message = result_of(spawn(function()
            return pcall(manager.with, manager, R1, { timeout = 1 }, function() error "in fn" end)
          end))
          assert.is_false(ok)
          assert.matches("in fn", message)
          assert_free(U1)
        end)

        it_extends("extends, checks and releases, and other coroutines go on meanwhile", function()
          local handle = result_of(spawn(function() return manager:acquire(R1) end))
          hold(R2)
          local ticks = 0
          local extending = spawn(function() return handle:extend(R2) end)
          support.wait_for_waiters(store, R2)
          spawn(function() loop.sleep(0.001) ticks = 1 end)
          run_until(function() return ticks == 1 end)
          assert.is_nil(extending.done)
          let_go()
          assert.is_true(result_of(extending))
          assert.equal(2, #handle.targets)
          assert.is_true(result_of(spawn(function() return handle:check() end)))
          assert.is_true(result_of(spawn(function() return handle:release { confirm = true } end)))
          assert.is_true(result_of(spawn(function() return handle:release { confirm = true } end)))
          assert.equal("released", select(2, result_of(spawn(function() return handle:check() end))).code)
          assert.equal("released", select(2, result_of(spawn(function() return handle:extend(R3) end))).code)
          assert_free(U1)
        end)

        it("gets errors as nil, err", function()
          hold(R1)
          for _, call in ipairs {
            function() return manager:acquire(R1, { timeout = 0 }) end,
            function() return manager:acquire(R1, { timeout = 0.02 }) end,
            function() return manager:with(R1, { timeout = 0.02 }, error) end,
            not store.leases_only and function()
              local handle = assert(manager:acquire(R2))
              local ok, err = handle:extend(R1, { timeout = 0.02 })
              handle:release { confirm = true }
              return ok, err
            end or nil,
          } do
            if store.dialect == "mariadb" then support.sleep(0.11) end -- or it shows an old picture
            local nothing, err
            for _ = 1, 10 do -- a look at the holders has its limit, too, which a busy machine may exceed
              nothing, err = result_of(spawn(call))
              if err.holders then break end
              support.sleep(0.2)
            end
            assert.is_nil(nothing)
            assert.is_true(hierlock.is_error(err))
            assert.equal("timeout", err.code)
            assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
            assert.equal(uv.os_getpid(), err.holders[1].pid)
          end
        end)

        it("that misuses raises where it called", function()
          local handle = result_of(spawn(function() return manager:acquire(R3) end))
          for _, case in ipairs {
            { "time_out", function() manager:acquire(U1, { time_out = 1 }) end },
            { "self must be a manager", function() manager.acquire_user({}, "u1") end },
            { "self must be a handle", function() handle.check(manager) end },
            { "it needs user", function() manager:acquire {} end },
            { "fn must be", function() manager:with(U1, {}, "fn") end },
            { "confirm must be", function() handle:release { confirm = 1 } end },
            { "timeout", function() handle:extend(R1, { timeout = "x" }) end },
          } do
            local ok, message = result_of(spawn(function()
              -- Not pcall, which would not yield in Lua 5.1.
              return coroutine.resume(coroutine.create(case[2]))
            end))
            assert.is_false(ok)
            assert.matches(line_of(case[2]) .. "hierlock: ", message, 1, true)
            assert.matches(case[1], message, 1, true)
          end
        end)

        it_extends("that waits for one who deadlocks with it goes on: one of them gives way", function()
          local held_by_both = 0
          local function half_a_circle(first, second)
            return spawn(function()
              local handle = assert(manager:acquire(first))
              held_by_both = held_by_both + 1
              while held_by_both < 2 do loop.sleep(0.001) end
              local ok, err = handle:extend(second, { timeout = store.server and 10 or 0.2 })
              if not ok and err.code == "timeout" then handle:release() end
              return ok, err and err.code, handle
            end)
          end
          local a, b = half_a_circle(R1, R2), half_a_circle(R2, R1)
          run_until(function() return a.done and b.done end)
          if store.server then
            assert.is_true((a[1] and b[2] == "deadlock") or (b[1] and a[2] == "deadlock"))
            assert.equal(1, manager:stats().deadlocks)
            assert.is_false((a[1] and b or a)[3]:is_held())
          else
            assert.is_true(a[2] == "timeout" or b[2] == "timeout")
          end
          for _, one in ipairs { a, b } do one[3]:release { confirm = true } end
          assert_free(U1)
        end)

        it_extends("finds a handle in use while another coroutine waits with it, and may release it", function()
          local handle = result_of(spawn(function() return manager:acquire(R1) end))
          hold(R2)
          local extending = spawn(function() return handle:extend(R2) end)
          support.wait_for_waiters(store, R2)
          local ok, message = coroutine.resume(coroutine.create(function() local _ = handle:extend(R3) end))
          assert.is_false(ok)
          assert.matches("loop_spec.lua:%d+: hierlock: the lock is in use", message)
          ok, message = pcall(handle.check, handle)
          assert.is_false(ok)
          assert.matches("in use", message)
          assert.is_true(handle:is_held())
          assert.is_true(handle:remaining() > 0)
          assert.is_true(handle:release())
          local extended, err = result_of(extending)
          assert.is_nil(extended)
          assert.equal("released", err.code)
          assert.is_false(handle:is_held())
          assert_free(R1) -- although nobody has let go what the extension waited for
          let_go()
          assert_free(U1)
        end)

        it_extends("does not confirm the release of a handle in use, which follows", function()
          local handle = result_of(spawn(function() return manager:acquire(R1) end))
          hold(R2)
          local extending = spawn(function() return handle:extend(R2) end)
          support.wait_for_waiters(store, R2)
          local released, err = result_of(spawn(function() return handle:release { confirm = true } end))
          assert.is_nil(released)
          assert.equal("connection", err.code)
          assert.matches("not confirmed", err.message)
          assert.is_false(handle:is_held())
          assert.equal("released", select(2, result_of(extending)).code)
          assert_free(R1)
          assert.is_true(handle:release { confirm = true }) -- the second one does nothing
          let_go()
          assert_free(U1)
        end)

        it("ends when the manager is closed", function()
          hold(R1)
          local first = spawn(function() return manager:acquire(R1) end)
          support.wait_for_waiters(store, R1)
          local second = spawn(function() return manager:acquire(R1) end)
          manager:close()
          for _, waiter in ipairs { first, second } do
            local nothing, err = result_of(waiter)
            assert.is_nil(nothing)
            assert.equal("cancelled", err.code)
          end
          let_go()
          assert_free(U1)
        end)

        it("that is resumed by somebody else goes on waiting", function()
          hold(R1)
          local thread
          local waiter = spawn(function()
            thread = coroutine.running()
            return manager:acquire(R1)
          end)
          support.wait_for_waiters(store, R1)
          if loop_name == "luv" then -- the others know their threads
            for _ = 1, 3 do assert(coroutine.resume(thread)) end
            assert.is_nil(waiter.done)
          end
          let_go()
          assert.is_true(result_of(waiter):is_held())
          for _ = 1, 5 do loop.step() end
        end)

        if coroutine.close and loop_name == "luv" then -- the others know their threads
          it("that is closed while it waits keeps nothing", function()
            hold(R1)
            local thread = coroutine.create(function() manager:acquire(R1, { timeout = 60 }) end)
            assert(coroutine.resume(thread))
            support.wait_for_waiters(store, R1)
            collectgarbage("stop") -- it would cancel, too, but later
            coroutine.close(thread)
            local gone = pcall(support.wait_until, function() return store.waiting(R1) == 0 end)
            collectgarbage("restart")
            assert.is_true(gone)
            let_go()
            run_until(function() return manager:stats().waiting == 0 end)
            for _ = 1, 5 do loop.step() end
            assert_free(U1)
          end)
        end

        it("blocks in the main thread", function()
          hold(R1)
          local began = support.now()
          local nothing, err = manager:acquire(R1, { timeout = 0.05 })
          assert.is_nil(nothing)
          assert.equal("timeout", err.code)
          assert.is_true(support.now() - began >= 0.05)
        end)

        if not store.server then -- what a loop remembers does not depend on the store
          it("that is over is not remembered, nor is its manager", function()
            hold(R1)
            local kept = setmetatable({}, { __mode = "v" })
            local function wait()
              local own = support.open(store, { loop = loop.option })
              kept[1] = own
              local waiter = spawn(function()
                assert(own:acquire(R1)):release { confirm = true }
                own:close()
                own = nil
                return true
              end)
              support.wait_for_waiters(store, R1)
              let_go()
              result_of(waiter)
            end
            wait()
            support.collect()
            support.collect()
            assert.is_nil(kept[1])
          end)
        end

        if loop_name ~= "copas" then -- which keeps its threads for ever
          it("of a loop that is given up keeps nothing", function()
            hold(R1)
            local function begin()
              result_of(spawn(function() return manager:acquire(R2) end))
              local first = spawn(function() return manager:acquire(R1) end)
              support.wait_for_waiters(store, R1)
              local second = spawn(function() return manager:acquire(R1) end)
              return first.done or second.done
            end
            assert.is_nil(begin())
            loop.close()
            loop = { close = function() end }
            support.collect()
            support.collect()
            let_go()
            assert_free(U1)
            assert.equal(0, manager:stats().waiting)
            assert.equal(0, manager:stats().held)
          end)
        end
      end)
    end

    -- ------------------------------------------------------------- cqueues

    it("of cqueues is noticed without an option; one within it blocks", function()
      local manager = open()
      hold(R1)
      local controller, order = cqueues.new(), {}
      controller:wrap(function()
        local handle = assert(manager:acquire(R1))
        order[#order + 1] = "granted"
        handle:release { confirm = true }
      end)
      controller:wrap(function()
        while manager:stats().waiting == 0 do cqueues.sleep(0.001) end
        order[#order + 1] = "goes on"
        -- A generator of the program's: it must not get yields that are meant for cqueues.
        local generator = coroutine.wrap(function()
          local nothing, err = manager:acquire(R1, { timeout = 0.02 })
          coroutine.yield(nothing, err.code)
        end)
        assert.same({ nil, "timeout" }, { generator() })
        order[#order + 1] = "let go"
        let_go()
      end)
      assert(controller:loop(support.DEADLINE))
      assert.same({ "goes on", "let go", "granted" }, order)
    end)

    it("of cqueues within another one yields with cqueues' own wrap", function()
      local manager = open { loop = "cqueues" }
      hold(R1)
      local controller, ticks, granted = cqueues.new(), 0, nil
      controller:wrap(function()
        local auxlib = require "cqueues.auxlib"
        granted = auxlib.wrap(function() return assert(manager:acquire(R1)) end)()
      end)
      controller:wrap(function()
        while manager:stats().waiting == 0 do cqueues.sleep(0.001) end
        while ticks < 5 do
          cqueues.sleep(0.001)
          ticks = ticks + 1
        end
        let_go()
      end)
      assert(controller:loop(support.DEADLINE))
      assert.equal(5, ticks)
      assert.is_true(granted:is_held())
    end)

    it("of cqueues may wait for a time of its own, and cancel", function()
      local manager = open()
      hold(R1)
      local controller, code = cqueues.new(), nil
      controller:wrap(function()
        local pending = assert(manager:start(R1))
        cqueues.poll(pending, 0.02)
        assert.is_false(pending:done())
        pending:cancel()
        code = select(2, pending:wait()).code
      end)
      assert(controller:loop(support.DEADLINE))
      assert.equal("cancelled", code)
      let_go()
      assert_free(U1)
    end)

    it("of luv may be cancelled by a timer", function()
      local manager = open { loop = "luv" }
      hold(R1)
      local pending = assert(manager:start(R1))
      local timer, code = uv.new_timer(), nil
      timer:start(20, 0, function()
        timer:close()
        pending:cancel()
      end)
      coroutine.wrap(function()
        require("hierlock.loop.luv")(pending)
        code = select(2, pending:wait()).code
      end)()
      support.wait_until(function() uv.run "nowait" return code end)
      assert.equal("cancelled", code)
      let_go()
      assert_free(U1)
    end)

    -- ---------------------------------------------------- a loop that fails

    it("whose loop raises gets what it raised, and nothing stays locked", function()
      for _, case in ipairs {
        { function() error("no loop", 0) end, false, "no loop" },
        { function() error(setmetatable({}, { __tostring = function() return "an object" end })) end, false, "an object" },
        { function(pending) pending:cancel() end, "cancelled" },
        { function(pending)
            pending:cancel()
            return nil, select(2, pending:wait())
          end, "cancelled" },
      } do
        local manager = open { loop = case[1] }
        hold(R1)
        local ok, handle, err = coroutine.resume(coroutine.create(function() return manager:acquire(R1) end))
        if case[2] then
          assert.is_true(ok)
          assert.is_nil(handle)
          assert.equal(case[2], err.code)
        else
          assert.is_false(ok)
          assert.matches(case[3], tostring(handle))
        end
        support.collect()
        let_go()
        assert_free(U1)
        assert.equal(0, manager:stats().waiting)
      end
    end)

    it("whose loop returns too early raises where it called", function()
      local manager = open { loop = function() end }
      hold(R1)
      local function call() return manager:acquire(R1) end
      local ok, message = coroutine.resume(coroutine.create(function() local handle = call() return handle end))
      assert.is_false(ok)
      assert.matches("loop_spec.lua:%d+: hierlock: the function given as loop returned before pending:done%(%)", message)
      let_go()
      assert_free(U1)
    end)

    it("blocks with loop = \"block\", and by default where no loop is known", function()
      for _, option in ipairs { "block", "auto" } do
        local manager = open { loop = option }
        hold(R1)
        local thread = coroutine.create(function() return manager:acquire(R1, { timeout = 0.05 }) end)
        local ok, handle, err = coroutine.resume(thread)
        assert.is_true(ok)
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
        assert.equal("dead", coroutine.status(thread))
        let_go()
      end
    end)

    it("blocks where it cannot yield", function()
      local yields = 0
      local manager = open { loop = function(pending)
        while not pending:done() do
          yields = yields + 1
          coroutine.yield()
        end
      end }
      hold(R1)
      -- No Lua can yield out of table.sort.
      local function sort()
        local code
        table.sort({ 1, 2 }, function(a, b)
          code = code or select(2, manager:acquire(R1, { timeout = 0.02 })).code
          return a < b
        end)
        return code
      end
      local function run(fn)
        local thread = coroutine.create(fn)
        local ok, code
        repeat
 ok, code = coroutine.resume(thread) until coroutine.status(thread) == "dead"
        assert.is_true(ok, code)
        return code
      end
      if _VERSION ~= "Lua 5.2" then
        assert.equal("timeout", run(sort))
        assert.equal(0, yields)
      end
      local _, _, err = run(function()
        return { pcall(manager.acquire, manager, R1, { timeout = 0.02 }) }
      end), nil, nil
      assert.is_nil(err)
      local in_pcall = run(function()
        local _, _, failed = pcall(manager.acquire, manager, R1, { timeout = 0.02 })
        return failed.code
      end)
      assert.equal("timeout", in_pcall)
      if _VERSION == "Lua 5.1" and not rawget(_G, "jit") then
        assert.equal(0, yields)
      else
        assert.is_true(yields > 0)
      end
    end)
  end, true)
end)

describe("the option loop", function()
  it("raises for what is no loop, at the caller's position", function()
    for _, case in ipairs {
      { "libev", 'not "libev"' }, { 7, "not a number" }, { {}, "not a table" }, { true, "not a boolean" }, { "", 'not ""' },
      { { anywhere = 7 }, "not a table" }, { { anywhere = print, sometimes = print }, "not a table" }, { { print }, "not a table" },
    } do
      local function call() hierlock.open("null:", { loop = case[1] }) end
      local ok, message = pcall(call)
      assert.is_false(ok)
      assert.matches(line_of(call) .. "hierlock: loop must be", message, 1, true)
      assert.matches(case[2], message, 1, true)
    end
  end)

  it("raises when the loop's module cannot be had", function()
    local output = support.run([[
      package.loaded.luv, package.preload.luv = nil, function() error("there is no luv", 0) end
      local hierlock = require "hierlock"
      print(pcall(function() hierlock.open("null:", { loop = "luv" }) end))
    ]])
    assert.matches('false\t[^\n]*hierlock: loop "luv" cannot be had: [^\n]*there is no luv', output)
  end)

  -- The main thread cannot yield either. luv's loop stands for Tarantool's.
  it("waits by Tarantool's iowait, also where it cannot yield", function()
    local output = support.run(([[
      local uv = require "luv"
      package.loaded.socket = { iowait = function(fd, events)
        assert(events == "R")
        local poll = uv.new_poll(fd)
        poll:start("r", function() poll:close() end)
        uv.run()
      end }
      local manager = assert(require("hierlock").open(%q, { loop = "tarantool" }))
      local first = assert(manager:acquire { "u1" })
      local timer = uv.new_timer()
      timer:start(20, 0, function()
        timer:close()
        first:release()
      end)
      print(manager:acquire({ "u1" }, { timeout = 30 }))
    ]]):format(support.stores[1].dsn .. "/tarantool"))
    assert.matches("^hierlock%.handle .exclusive u1, held.", output)
  end)

  -- The main thread cannot yield. What runs there is the program's whole loop.
  it("is called where Lua cannot yield only if the function needs no yield, and then its errors end the wait", function()
    local output = support.run(([[
      local uv, hierlock = require "luv", require "hierlock"
      local calls, fail = 0, nil
      local function loop(pending)
        calls = calls + 1
        if fail then error(fail, 0) end
        local poll = uv.new_poll(pending:fd())
        poll:start("r", function() poll:close() end)
        uv.run()
      end
      local plain = assert(hierlock.open(%q, { loop = loop }))
      local anywhere = assert(hierlock.open(%q, { loop = { anywhere = loop } }))
      local first = assert(anywhere:acquire { "u1" })
      local _, err = plain:acquire({ "u1" }, { timeout = 0.01 })
      print(err.code, calls)
      local timer = uv.new_timer()
      timer:start(20, 0, function()
        timer:close()
        first:release()
      end)
      local second = assert(anywhere:acquire({ "u1" }, { timeout = 30 }))
      print(calls)
      fail = "no more"
      print(pcall(anywhere.acquire, anywhere, { "u1" }, { timeout = 30 }))
      second:release()
      fail = nil
      for _ = 1, 3 do collectgarbage() end -- which ends the wait on Lua 5.1
      print(anywhere:acquire({ "u1" }, { timeout = 30 }))
    ]]):format(support.stores[1].dsn .. "/anywhere", support.stores[1].dsn .. "/anywhere"))
    assert.matches("^timeout\t0\n1\nfalse\tno more\nhierlock%.handle .exclusive u1, held.", output)
  end)

  it("is nginx's by itself where nginx runs the program", function()
    local output = support.run [[
      ngx = { get_phase = function() return "content" end }
      package.loaded["hierlock.loop.ngx"] = { call = function(name) return "by nginx: " .. name end }
      local hierlock = require "hierlock"
      for _, loop in ipairs { "auto", "ngx" } do print((assert(hierlock.open("null:", { loop = loop })):acquire { "u1" })) end
      print((assert(hierlock.open "null:"):acquire { "u1" }))
    ]]
    assert.equal(("by nginx: acquire\n"):rep(3), output)
  end)

  it("of luv tells where a coroutine that it has resumed raised", function()
    local output, status = support.run(([[
      local uv = require "luv"
      local manager = assert(require("hierlock").open(%q, { loop = "luv" }))
      local first = assert(manager:acquire { "u1" })
      local function fails_later() error("no more", 0) end
      coroutine.wrap(function()
        local handle = assert(manager:acquire({ "u1" }, { timeout = 30 }))
        fails_later()
        return handle
      end)()
      first:release()
      uv.run()
    ]]):format(support.stores[1].dsn .. "/raises"))
    assert.not_equal(0, status)
    assert.matches("no more\n.*fails_later", output)
  end)

  it("needs no loop's module where it is not asked for", function()
    local output, status = support.run([[
      for _, name in ipairs { "luv", "cqueues", "copas", "socket", "ngx" } do
        package.preload[name] = function() error("not wanted: " .. name) end
      end
      local manager = require("hierlock").open "null:"
      coroutine.wrap(function() assert(manager:acquire { "u1" }):release() end)()
      print "fine"
    ]])
    assert.equal("fine\n", output)
    assert.equal(0, status)
  end)
end)

describe("the connection to nginx's loop", function()
  after_each(support.close_peers)

  it("is not written to by a child of a fork, which has none before it makes its own", function()
    assert.equal("00000001", support.process(nil):call [[
      local core, fork, uv = require "hierlock.core", require "hierlock_spec.fork", require "luv"
      local function ring(number) core.notifier_watch(require("hierlock").open("null:"):start { "x" }, number) end
      local loop, said, ended = uv.new_pipe(false), {}, false
      loop:connect(core.notifier_address():match "^unix:(.*)", function()
        loop:read_start(function(_, digits)
          said[#said + 1] = digits
          ended = not digits
        end)
      end)
      assert(core.notifier_answer())
      ring(1)
      local pid = fork.fork()
      if pid == 0 then fork.exit(pcall(ring, 2) and 0 or 1) end
      assert(fork.wait(pid) == 0)
      core.notifier_end()
      while not ended do uv.run "once" end
      return table.concat(said)
    ]])
  end)

  it("does not hang a child that is born while a thread writes to it", function()
    local path = os.tmpname()
    os.remove(path)
    local process = support.process(nil, nil, nil, support.preloaded("slow_send", "export HIERLOCK_SPEC_SEND=" .. path))
    assert.equal(0, process:call([[
      local path = ...
      local core, fork, uv = require "hierlock.core", require "hierlock_spec.fork", require "luv"
      local function appears(name)
        for _ = 1, 900 do
          if uv.fs_stat(name) then return true end
          uv.sleep(10)
        end
      end
      local manager, loop = assert(require("hierlock").open("file:" .. path .. ".locks")), uv.new_pipe(false)
      loop:connect(core.notifier_address():match "^unix:(.*)", function() end)
      assert(core.notifier_answer())
      local handle = assert(manager:acquire { "x" })
      local pending = manager:start({ "x" }, { timeout = 0.1 })
      core.notifier_watch(pending, 1) -- a thread writes once the time is up
      assert(appears(path))
      local pid = fork.fork()
      if pid == 0 then
        core.notifier_end()
        io.open(path .. ".child", "w"):close()
        fork.exit(0)
      end
      local went = appears(path .. ".child")
      os.remove(path)
      os.remove(path .. ".child")
      if not went then uv.kill(pid, 9) end
      handle:release()
      manager:close()
      os.execute("rm -r " .. path .. ".locks")
      return fork.wait(pid)
    ]], path))
  end)
end)
