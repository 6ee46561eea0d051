-- Trouble while a call waits without blocking.
-- Parts: stores
local proxy = require "spec.support.proxy"
local support = require "spec.support"
local core = require "hierlock.core"
local cqueues = require "cqueues"
local uv = require "luv"

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

  it("does not claim a lock whose session was interrupted when a call on it was cancelled", function()
    local blocker = assert(other:acquire({ "trouble", "f1" }))
    local handle = assert(manager:acquire({ "trouble", "f2" }))
    local pending = core.start.extend(handle, { "trouble", "f1" }, { timeout = support.DEADLINE })
    if store.server then
      support.wait_until(function() return store.waiting() > 0 end, "a waiter")
    end
    assert.is_true(handle:is_held())
    pending:cancel()
    -- The embedded store ends the wait, and keeps the handle's locks.
    assert.equal(not store.server, handle:is_held())
    assert.equal(not store.server, handle:remaining() > 0)
    blocker:release()
    handle:release()
    assert(other:acquire({ "trouble", "f2" }, { timeout = support.DEADLINE })):release()
  end)

  if store.server then
    it("goes on holding while an extension waits for longer than hold_timeout", function()
      local patient = support.open(store, { hold_timeout = 1 })
      local blocker = assert(other:acquire({ "trouble", "g1" }))
      local handle = assert(patient:acquire({ "trouble", "g2" }))
      local pending = core.start.extend(handle, { "trouble", "g1" }, { timeout = 2.5 })
      while not pending:done() do
        assert.is_true(handle:is_held())
        assert.is_true(handle:remaining() > 0)
        support.sleep(0.02)
      end
      local ok, err = pending:wait(0)
      assert.is_nil(ok)
      assert.equal("timeout", err.code)
      assert.is_true(handle:check())
      blocker:release()
      patient:close()
    end)

    it("keeps looking at a lock whose extension has ended and was not waited for", function()
      local patient = support.open(store, { hold_timeout = 1 })
      local handle = assert(patient:acquire({ "trouble", "h1" }))
      local pending = core.start.extend(handle, { "trouble", "h2" }, { timeout = 2 })
      support.wait_until(function() return pending:done() end, "the extension")
      local ends = support.now() + 1.5
      while support.now() < ends do
        assert.is_true(handle:is_held())
        assert.is_true(handle:remaining() > 0)
        support.sleep(0.05)
      end
      assert.is_true(pending:wait(0))
      patient:close()
    end)

    it("does not say of a lock that was lost while a call used it that it is held", function()
      local blocker = assert(other:acquire({ "trouble", "b1" }))
      local handle = assert(manager:acquire({ "trouble", "b2" }))
      local pending = core.start.extend(handle, { "trouble", "b1" }, { timeout = support.DEADLINE })
      support.wait_until(function() return store.waiting() > 0 end, "a waiter")
      assert.is_true(handle:is_held())
      for _, id in ipairs(store.sessions(true)) do store.kill(id) end
      support.wait_until(function() return pending:done() end, "the end of the call")
      assert.is_false(handle:is_held())
      assert.equal(0, handle:remaining())
      local ok, err = pending:wait(0)
      assert.is_nil(ok)
      assert.equal("lost", err.code)
      blocker:release()
    end)

    -- A program that begins to wait and ends; `how` is its last line.
    local function begin_and_end(how)
      return support.run(([[
        local hierlock = require "hierlock"
        local manager = assert(hierlock.open(%q, { buckets = %d, timeout = 30 }))
        local pending = {}
        for i = 1, 4 do pending[i] = assert(manager:start { "trouble", "c1" }) end
        for i = 5, 8 do pending[i] = assert(manager:start { "trouble", "d" .. i }) end
        %s]]):format(store.dsn, store.options.buckets, how))
    end

    for title, how in pairs {
      ["ends"] = "", ["cancels, and ends"] = "for i = 1, 8 do pending[i]:cancel() end",
      ["closes the manager, and ends"] = "manager:close()",
    } do
      it("leaves no waiter at the server when the program " .. title, function()
        local blocker = assert(other:acquire { "trouble", "c1" })
        local output, status = begin_and_end("require('luv').sleep(300) " .. how)
        assert.equal(0, status, output)
        support.wait_until(function() return store.waiting() == 0 end, "the end of the wait")
        assert.is_true(blocker:release { confirm = true })
      end)
    end

    -- Twenty requests of a process that wait at the server, each on a connection of its
    -- own, while the server has one more to give. `how` ends them.
    for title, how in pairs {
      ["closes the manager"] = "manager:close()",
      ["cancels"] = "for i = 1, 20 do handles.pending[i]:cancel() end",
      ["closes the manager, and ends"] = "manager:close() os.exit(0)",
    } do
      it("leaves no waiter at a server without free connections when it " .. title, function()
        if not store.root() then return pending("no administrator here") end
        local resources = {}
        for i = 1, 20 do resources[i] = "r" .. i end
        local blocker = assert(other:acquire_resources("trouble", "f1", resources))
        local peer = support.process(store, { pool_size = 40 })
        peer:call([[
          handles.pending = {}
          for i, resource in ipairs(...) do
            handles.pending[i] = assert(manager:start({ "trouble", "f1", resource }, { timeout = 60 }))
          end
        ]], resources)
        support.wait_for_waiters(store, nil, 20)
        finally(store.limit_connections())
        peer:start(how)
        support.wait_until(function() return store.waiting() == 0 end, "the end of the waits")
        assert.is_true(blocker:release { confirm = true })
        assert(manager:acquire({ "trouble" }, { timeout = 2 })):release { confirm = true }
      end)
    end

    -- A single thread tells the server for all, one after the other: each takes a trip. Connecting for that takes as
    -- long as the line makes it.
    for title, line in pairs { ["long"] = { delay = 80, waits = 30 }, ["very long"] = { delay = 400, waits = 3 } } do
      it("leaves no waiter at the server when it cancels over a " .. title .. " line", function()
        local resources = {}
        for i = 1, line.waits do resources[i] = "r" .. i end
        local blocker = assert(other:acquire_resources("trouble", "l1", resources))
        local between = proxy.open(store)
        finally(function() between.close() end)
        local peer = support.process(store, { pool_size = 100 }, between.dsn)
        between.delay(line.delay)
        peer:start([[
          handles.pending = {}
          for i, resource in ipairs(...) do
            handles.pending[i] = assert(manager:start({ "trouble", "l1", resource }, { timeout = 60 }))
          end
        ]], resources)
        peer:result()
        local function are_waiting(n)
          support.wait_until(function()
            local over, timer = false, uv.new_timer()
            timer:start(200, 0, function() over = true end)
            repeat uv.run "once" until over -- the proxy, for longer than the look takes
            timer:close()
            return store.waiting() == n
          end, n .. " waiters", 50) -- many trips for each, and the proxy works only here
        end
        are_waiting(line.waits)
        peer:start("for _, pending in ipairs(handles.pending) do pending:cancel() end")
        peer:result()
        are_waiting(0)
        between.delay(0)
        assert.is_true(blocker:release { confirm = true })
      end)
    end

    local it_by_number = store.table and it or function() end
    it_by_number("ends no connection of another program's that has the number of its own", function()
      if not store.control then pending("the server is not ours to restart") end
      local dsn = store.bare_dsn
      -- Numbers that a server which has just been started does not come to by itself.
      for _ = 1, 100 do support.sql_connection(dsn):close() end
      support.keep(assert(other:acquire { "trouble", "g1" }))
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(store, nil, between.dsn)
      peer:call [[ handles.pending = assert(manager:start({ "trouble", "g1" }, { timeout = 60 })) ]]
      support.wait_until(function()
        uv.run("nowait") -- the proxy
        return store.waiting() > 0
      end, "a waiter")
      local number = tonumber(store.sql():query([[
        SELECT id FROM information_schema.processlist
        WHERE info LIKE '%%UNION ALL (SELECT%%' AND id <> CONNECTION_ID()]])[1][1])
      -- The wait does not hear that the server ends; the connection that is there to end it does, and is made anew.
      for _, command in ipairs(between.commands) do
        if command.text and command.text:find("UNION ALL (SELECT", 1, true) then between.hold(command.connection) end
      end
      store.command "restart"
      local innocent, id
      repeat
        if innocent then innocent:close() end
        innocent = support.sql_connection(dsn)
        id = tonumber(innocent:query("SELECT CONNECTION_ID()")[1][1])
      until id >= number
      assert.equal(number, id)
      peer:start "handles.pending:cancel() manager:close()"
      peer:result()
      peer:close() -- it ends when it has told the server, or has given it up
      assert.equal(number, tonumber(innocent:query("SELECT CONNECTION_ID()")[1][1]))
      innocent:close()
    end)

    -- exit() takes the client library's TLS apart.
    for title, how in pairs { ["ends"] = "", ["calls os.exit"] = "os.exit(0)" } do
      it("does not crash when it " .. title .. " while others connect", function()
        for _ = 1, 8 do
          local output, status = begin_and_end(how)
          assert.equal(0, status, output)
        end
      end)
    end

    it("does not crash either where a store of another library came first", function()
      for _ = 1, 8 do
        local output, status = support.run(([[
          local hierlock = require "hierlock"
          local first = assert(hierlock.open(%q))
          assert(assert(first:acquire { "trouble" }):release { confirm = true })
          local manager = assert(hierlock.open(%q, { buckets = %d }))
          local pending = {}
          for i = 1, 8 do pending[i] = assert(manager:start { "trouble", "d" .. i }) end
          os.exit(0)]]):format("sqlite:" .. os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "/first.sqlite", store.dsn, store.options.buckets))
        assert.equal(0, status, output)
      end
    end)

    it("does not take long to end after it has closed a manager that connects", function()
      local soon, tries = 0, 0
      repeat
        local start = support.now()
        local output, status = begin_and_end("manager:close()")
        assert.equal(0, status, output)
        if support.now() - start < 2.2 then soon = soon + 1 end
        tries = tries + 1
        -- Some may take longer because the machine is busy.
      until soon == 4 or tries == 16
      assert.equal(4, soon)
    end)
  end
end)
