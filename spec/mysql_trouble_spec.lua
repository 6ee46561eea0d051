--- Trouble while locks are held or awaited: killed connections, holders that vanish,
-- cut networks. A lost lock is known to be lost before another caller can have it, and all other locks go on.
-- Parts: stores

local uv = require "luv"
local proxy = require "spec.support.proxy"
local support = require "spec.support"
local threads = require "hierlock_spec.threads"

local TARGET = { user = "u1", account = "a1", resource = "r1" }

-- From kill -9 of a client to its end as the server sees it, and the like.
local SOON = 5

support.each_server(function(store)
  local opened, between

  before_each(function() opened = {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    if between then between.close() end
    between = nil
  end)

  local function open(...)
    local manager = support.open(store, ...)
    opened[#opened + 1] = manager
    return manager
  end

  local function is_waiting() return store.waiting() >= 1 end

  -- The connections whose last request had the label.
  local function connections(label)
    local rows = store.sql():query([[
      SELECT t.PROCESSLIST_ID FROM performance_schema.threads t
      JOIN performance_schema.user_variables_by_thread u USING (THREAD_ID)
      WHERE u.VARIABLE_NAME='hierlock' AND LOCATE('%s', u.VARIABLE_VALUE) > 0
      AND t.PROCESSLIST_ID IS NOT NULL]], label)
    local list = {}
    for i, row in ipairs(rows) do list[i] = row[1] end
    return list
  end

  -- Kills them; returns how many they were, once they are gone.
  local function kill(label)
    local ids = connections(label)
    for _, id in ipairs(ids) do store.sql():query("KILL " .. id) end
    support.wait_until(function() return #connections(label) == 0 end, "the connections' end")
    return #ids
  end

  local function assert_lost(handle)
    assert.is_false(handle:is_held())
    assert.equal(0, handle:remaining())
    local ok, err = handle:check()
    assert.is_nil(ok)
    assert.equal("lost", err.code)
    assert.is_true(err.retryable)
    ok, err = handle:release()
    assert.is_nil(ok)
    assert.equal("lost", err.code)
    assert.is_true(handle:release()) -- the second time, as always
  end

  local function acquire_by_another(timeout)
    local peer = support.process(store)
    local granted, code = peer:acquire("h", "acquire", TARGET, { timeout = timeout or SOON }):result()
    assert(granted, code)
    return peer
  end

  describe("a killed connection", function()
    it("loses the lock it held: known at once, told once, free for others", function()
      local told = {}
      local manager = open {
        on_lost = function(handle, err) told[#told + 1] = { handle, err } end,
      }
      local handle = assert(manager:acquire(TARGET, { label = "to be killed" }))
      local other = assert(manager:acquire({ "u2" }))
      assert.is_true(handle:is_held())
      assert.equal(1, kill("to be killed"))
      support.wait_until(function() return not handle:is_held() end, "the loss")
      assert_lost(handle)
      assert.is_true(manager:stats().lost == 1)
      assert.equal(1, #told)
      assert.equal(handle, told[1][1])
      assert.equal("lost", told[1][2].code)
      acquire_by_another():release("h")
      assert.is_true(other:is_held())
      assert.is_true(other:release())
    end)

    it("is noticed by the very next look, without a word to the server", function()
      local manager = open()
      local handle = assert(manager:acquire(TARGET, { label = "to be killed" }))
      kill("to be killed")
      assert.is_false(handle:is_held())
    end)

    it("calls on_lost although nobody looks at the handle", function()
      local lost
      local manager = open {
        hold_timeout = 1,
        on_lost = function(handle, err) lost = { handle, err.code } end,
      }
      local handle = assert(manager:acquire(TARGET, { label = "to be killed" }))
      kill("to be killed")
      support.wait_until(function() manager:stats() return lost end, "on_lost")
      assert.same({ handle, "lost" }, lost)
    end)

    it("is told for each handle, though on_lost raises for the first", function()
      local told = {}
      local manager = open {
        hold_timeout = 6,
        on_lost = function(handle)
          told[#told + 1] = handle
          if #told == 1 then error("of on_lost", 0) end
        end,
      }
      local handles = {}
      for i = 1, 3 do handles[i] = assert(manager:acquire({ "u" .. i }, { label = "to be killed" })) end
      assert.equal(3, kill("to be killed"))
      support.wait_until(function() return not pcall(manager.stats, manager) end, "what on_lost raises")
      support.wait_until(function() manager:stats() return #told >= 3 end, "the others to be told of")
      for _ = 1, 3 do manager:stats() end
      assert.equal(3, #told)
      local different = {}
      for _, handle in ipairs(told) do different[handle] = true end
      for _, handle in ipairs(handles) do assert.is_true(different[handle]) end
    end)

    -- The server ends a session that a busy machine has kept silent for hold_timeout: one of some tries.
    it("was the last one of a manager, and the next one is kept alive all the same", function()
      support.wait_until(function()
        local manager = open { hold_timeout = 1 }
        assert(manager:acquire(TARGET, { label = "idle" })):release { confirm = true }
        if kill("idle") == 0 then return false end
        support.wait_until(function() return manager:stats().connections == 0 end, "the keeper's look")
        support.sleep(0.2) -- it sleeps by then
        local handle = assert(manager:acquire(TARGET))
        support.sleep(2.5)
        local kept = handle:is_held() and handle:check()
        handle:release()
        return kept
      end, "a lock that is kept", 20)
    end)

    it("before the first lock costs nobody an error", function()
      local function ids()
        local found = {}
        for _, row in ipairs(store.sql():query "SELECT id FROM information_schema.processlist") do found[row[1]] = true end
        return found
      end
      local before = ids()
      local manager = open()
      local opened_by_it = {}
      for id in pairs(ids()) do
        if not before[id] then
          opened_by_it[#opened_by_it + 1] = id
          store.sql():query("KILL " .. id)
        end
      end
      assert.is_true(#opened_by_it > 0)
      support.wait_until(function() return not ids()[opened_by_it[1]] end, "the connection's end")
      assert(manager:acquire(TARGET)):release()
    end)

    it("in the pool costs nobody an error", function()
      local manager = open()
      for _ = 1, 6 do assert(manager:acquire(TARGET, { label = "idle" })):release() end
      assert.is_true(kill("idle") >= 1)
      for _ = 1, 6 do
        local handle = assert(manager:acquire(TARGET, { label = "again" }))
        assert.is_true(handle:check())
        assert.is_true(handle:release { confirm = true })
      end
      assert.is_true(manager:stats().errors == 0)
    end)

    it("while waiting is repaired when it came from the pool, and holds nothing twice", function()
      local manager = open()
      local waiter = support.process(store)
      waiter:acquire("h", "acquire", { "u9" }):result()
      waiter:release("h")
      local handle = assert(manager:acquire(TARGET))
      waiter:acquire("h", "acquire", TARGET, { label = "waits" })
      support.wait_until(is_waiting, "the waiter")
      store.sql():query("KILL " .. connections("waits")[1])
      assert.is_true(waiter:stays_blocked())
      assert.is_true(handle:release { confirm = true })
      assert.is_true(waiter:result())
      local none, err = manager:acquire(TARGET, { timeout = 0 })
      assert.is_nil(none)
      assert.equal("timeout", err.code)
      assert.is_true(waiter:release("h"))
    end)
  end)

  -- The server grants, hears nothing for hold_timeout, and ends the session, as it does on a machine that is too busy.
  it("a waiter that was too slow to take its lock goes on with fresh connections, each time, until it has it", function()
    local manager = open()
    local waiter = support.process(store, { hold_timeout = 1 })
    local handle = assert(manager:acquire(TARGET))
    waiter:acquire("h", "acquire", TARGET, { label = "waits", timeout = 60 })
    for _ = 1, 2 do
      support.wait_until(function() return is_waiting() and #connections "waits" == 1 end, "the waiter")
      waiter:signal("sigstop")
      handle:release()
      support.wait_until(function() return #connections "waits" == 0 end, "the session's end")
      handle = assert(manager:acquire(TARGET))
      waiter:signal("sigcont")
    end
    assert.is_true(waiter:stays_blocked())
    handle:release()
    assert.is_true(waiter:result())
    local none, err = manager:acquire(TARGET, { timeout = 0 })
    assert.is_nil(none)
    assert.equal("timeout", err.code)
    assert.is_true(waiter:release("h"))
  end)

  describe("a KILL QUERY", function()
    it("that hits a sign of life, a check or a release costs nothing", function()
      local manager = open { hold_timeout = 1 }
      local handle = assert(manager:acquire(TARGET, { label = "to be interrupted" }))
      local id = connections("to be interrupted")[1]
      local checker = support.process(store)
      local code = checker:call([[
        local id, dsn = ...
        handles.sql = support.sql_connection(dsn)
        handles.command = "KILL QUERY " .. id
      ]], id, store.bare_dsn)
      assert.is_nil(code)
      checker:start [[
        local begun, n = support.now(), 0
        repeat handles.sql:try(handles.command) n = n + 1 until support.now() - begun > 3
        return n
      ]]
      local begun = support.now()
      repeat
        assert.is_true(handle:is_held())
        if support.now() - begun > 1.5 then assert(handle:check()) end
      until support.now() - begun > 2.5
      assert(handle:release { confirm = true })
      assert.is_true(checker:result() > 10)
      assert.is_true(manager:stats().lost == 0)
      acquire_by_another():release("h")
    end)

    -- The kill ends a text between two statements, and the server says nothing more: a library that does not tell
    -- waits for the rest without bounds.
    support.it_where_waits_are_told("that hits anything is told as such, whatever it hits", function()
      local busy, killer = support.process(nil), support.process(nil)
      busy:start([[
        local dsn, options = ...
        local ends, codes, n = support.now() + 3, {}, 0
        repeat
          local manager, err = hierlock.open(dsn, options)
          for i = 1, manager and 20 or 0 do -- each as text, as no two waits are of one length
            local handle
            handle, err = manager:acquire({ "u1", "a" .. i }, { timeout = i % 3 == 0 and 0 or i / 10 })
            if handle then handle:release() else codes[err.code] = tostring(err) end
            n = n + 1
          end
          if manager then manager:close() else codes[err.code] = tostring(err) end
        until support.now() > ends and n > 0 -- when the storm is over, it can open
        return codes, n
      ]], store.dsn .. "&connect_timeout=2", store.options)
      killer:start([[
        local sql, ends, n = support.sql_connection(...), support.now() + 3, 0
        repeat
          for _, row in ipairs(sql:query "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID()") do
            if sql:try("KILL QUERY " .. row[1]) then n = n + 1 end
          end
          support.sleep(math.random() / 500) -- or nothing is ever opened
        until support.now() > ends
        return n
      ]], store.bare_dsn)
      local codes, n = busy:result()
      assert.is_true(killer:result() > 10)
      assert.is_true(n > 0)
      -- `connection`: the look at a server that is being connected to was cut short.
      codes.cancelled, codes.timeout, codes.connection = nil, nil, nil
      assert.same({}, codes)
    end)

    it("that hits a wait ends it: cancelled, and not at its timeout", function()
      local handle = assert(open():acquire(TARGET))
      local waiter = support.process(store)
      for round = 1, 3 do -- as text, and prepared
        waiter:acquire("w", "acquire", TARGET, { timeout = 30, label = "to be ended" })
        support.wait_until(is_waiting, "the waiter")
        for _, id in ipairs(connections("to be ended")) do store.sql():query("KILL QUERY " .. id) end
        local granted, code, message = waiter:result()
        assert.is_nil(granted)
        assert.equal("cancelled", code, round .. ": " .. tostring(message))
      end
      assert(handle:release { confirm = true })
      -- The waiter had its user and its account already, and keeps neither, although its connection stays.
      assert(open():acquire({ user = TARGET.user }, { timeout = SOON })):release()
    end)
  end)

  it("the end of a connection costs no lock of another one that the same thread waits on, over TLS", function()
    local peer = support.process(nil)
    local extended, message, held = peer:call([[
      local dsn, options = ...
      options.loop = function(pending) while not pending:done() do coroutine.yield() end end
      local ours, theirs = assert(hierlock.open(dsn, options)), assert(hierlock.open(dsn, options))
      local other, before, extends, extended, err, held
      local function a_second() return support.now() - before > 1 end
      local routine = coroutine.wrap(function()
        local handle = assert(ours:acquire { "u8" })
        other = assert(theirs:acquire { "u9" })
        local waiting = assert(ours:start({ "u9" }, { timeout = 10 }))
        before = support.now()
        repeat coroutine.yield() until a_second()
        waiting:cancel() -- its connection ends
        before = support.now()
        repeat coroutine.yield() until a_second()
        before, extends = support.now(), true
        extended, err = handle:extend({ "u9" }, { timeout = 10 }) -- by the same worker
        held = handle:is_held()
        return "done"
      end)
      repeat
        local done = routine()
        if extends and a_second() then other:release() end
        support.sleep(0.001)
      until done
      ours:close() theirs:close()
      return extended, err and err.message, held
    ]], store.dsn, store.options)
    assert.same({ true, true }, { extended, held }, message)
  end)

  describe("a holder", function()
    for _, hold_timeout in ipairs { 1, 1.9 } do
      it("that is stopped loses its lock after hold_timeout, and knows when it goes on: " .. hold_timeout .. " s", function()
        local holder = support.process(store, { hold_timeout = hold_timeout })
        assert.is_true(holder:acquire("h", "acquire", TARGET):result())
        local begun = support.now()
        local promised = holder:call "return handles.h:remaining()"
        holder:signal("sigstop")
        local peer = acquire_by_another(10)
        local took = support.now() - begun
        assert.is_true(took > 0.2 and took > promised and took < math.ceil(hold_timeout) + SOON,
                       took .. " s of " .. promised)
        holder:signal("sigcont")
        local held, remaining, ok, code = holder:call([[
          local h = handles.h
          local held, remaining = h:is_held(), h:remaining()
          local ok, err = h:release()
          return held, remaining, ok, err and err.code
        ]])
        assert.same({ false, 0, nil, "lost" }, { held, remaining, ok, code })
        assert.is_true(peer:release("h"))
      end)
    end

    it("that is cut off knows of its loss before another gets the lock", function()
      between = proxy.open(store)
      local holder = support.process(store, { hold_timeout = 1 }, between.dsn)
      assert.is_true(holder:acquire("h", "acquire", TARGET):result())
      assert.is_true(holder:call("return handles.h:is_held()"))
      between.cut()
      local peer = support.process(store)
      local granted = peer:acquire("h", "acquire", TARGET, { timeout = 10 }):result()
      assert.same({ false, 0 }, { holder:call("return handles.h:is_held(), handles.h:remaining()") })
      assert.is_true(granted)
      local ok, code = holder:call("local ok, err = handles.h:release() return ok, err and err.code")
      assert.same({ nil, "lost" }, { ok, code })
      assert.is_true(peer:release("h"))
    end)

    -- The server's time began when it answered, or sooner: the time of the answer on its way is unknown.
    it("behind a slow line counts from when it asked", function()
      between = proxy.open(store)
      local holder = support.process(store, { hold_timeout = 30 }, between.dsn)
      assert.is_true(holder:acquire("h", "acquire", { "u3" }):result()) -- so that it has connected
      between.delay(400)
      local code = "return handles.h:remaining()"
      for _ = 1, 3 do -- as text, and prepared
        assert.is_true(holder:release("h"))
        assert.is_true(holder:acquire("h", "acquire", TARGET):result())
        local remaining = holder:call(code)
        assert.is_true(remaining > 20 and remaining <= 29.6, remaining .. " s")
      end
      local remaining = holder:call("assert(handles.h:check()) " .. code)
      assert.is_true(remaining > 20 and remaining <= 29.6, remaining .. " s")
      between.delay(0)
      assert.is_true(holder:release("h"))
    end)

    it("that lives keeps its lock for longer than hold_timeout, idle or busy", function()
      local idle = support.process(store, { hold_timeout = 1 })
      local busy = support.process(store, { hold_timeout = 1 })
      assert.is_true(idle:acquire("h", "acquire", TARGET):result())
      assert.is_true(busy:acquire("h", "acquire", { "u2", "a1", "r1" }):result())
      idle:start("support.sleep(3.2) return handles.h:is_held(), handles.h:check(), handles.h:remaining()")
      busy:start([[
        local finish = support.now() + 3.2
        repeat for i = 1, 1e5 do local _ = i * i end until support.now() > finish
        return handles.h:is_held(), handles.h:check(), handles.h:remaining()
      ]])
      local other = open()
      for _, target in ipairs { TARGET, { "u2", "a1", "r1" } } do
        local none, err = other:acquire(target, { timeout = 1.5 })
        assert.is_nil(none)
        assert.equal("timeout", err.code)
      end
      for _, peer in ipairs { idle, busy } do
        local held, checked, remaining = peer:result()
        assert.same({ true, true }, { held, checked })
        assert.is_true(remaining > 0.5 and remaining <= 1, remaining .. " s")
        assert.is_true(peer:release("h"))
      end
    end)

    it("that waited for longer than hold_timeout has all of it before it", function()
      local holder = open()
      local handle = assert(holder:acquire(TARGET))
      local peer = support.process(store, { hold_timeout = 1 })
      peer:start([[
        handles.h = assert(manager:acquire(...))
        return handles.h.waited, handles.h:remaining(), handles.h:is_held()
      ]], TARGET)
      support.wait_until(is_waiting, "the waiter")
      support.sleep(1.3)
      handle:release()
      local waited, remaining, held = peer:result()
      assert.is_true(waited > 1.2)
      assert.is_true(remaining > 0.5 and remaining <= 1, remaining .. " s")
      assert.is_true(held)
      assert.is_true(peer:call("return handles.h:check()"))
      assert.is_true(peer:release("h"))
    end)

    it("that is killed outright is noticed at once", function()
      local holder = support.process(store)
      assert.is_true(holder:acquire("h", "acquire", TARGET):result())
      holder:signal("sigkill")
      acquire_by_another():release("h")
    end)
  end)

  describe("a waiter that is killed", function()
    it("does not keep others out once its turn has come", function()
      local manager = open()
      local handle = assert(manager:acquire(TARGET))
      local waiter = support.process(store)
      waiter:acquire("h", "acquire", TARGET, { timeout = 30 })
      support.wait_until(is_waiting, "the waiter")
      waiter:signal("sigkill")
      handle:release()
      acquire_by_another():release("h")
    end)

    it("does not keep others from its ancestors for longer than it would have waited", function()
      local manager = open()
      local handle = assert(manager:acquire(TARGET))
      local waiter = support.process(store)
      -- The waiter waits for the account, holding the user shared.
      waiter:acquire("h", "acquire", { user = "u1", account = "a1" }, { timeout = 1.5 })
      support.wait_until(is_waiting, "the waiter")
      waiter:signal("sigkill")
      support.wait_until(function() return store.waiting() == 0 end, "the end of the wait")
      assert.is_true(handle:is_held())
      local other = assert(open():acquire({ "u1", "a2" }, { timeout = SOON }))
      assert.is_true(other:release())
      handle:release()
      acquire_by_another():release("h")
    end)
  end)

  it("does not claim a lock for longer than its lease when the network is cut while an extension waits", function()
    local other = { "u1", "a1", "r2" }
    local blocker = assert(open():acquire(other))
    between = proxy.open(store)
    local peer = support.process(store, { hold_timeout = 2 }, between.dsn)
    assert.is_true(peer:acquire("h", "acquire", TARGET):result())
    peer:start([[
      local uv, core = require "luv", require "hierlock.core"
      local h = handles.h
      pending = core.start.extend(h, ..., { timeout = 30 })
      local ends, claims = uv.hrtime() + 10e9, 0
      repeat
        uv.sleep(10)
        -- In this order: it may end between the two.
        local left, held = h:remaining(), h:is_held()
        if left == 0 and held then claims = claims + 1 end
      until left == 0 or uv.hrtime() > ends
      return claims, h:is_held(), h:remaining()
    ]], other)
    support.wait_until(function()
      uv.run("nowait") -- the proxy
      return is_waiting()
    end, "the waiter")
    between.cut()
    assert.same({ 0, false, 0 }, { peer:result() })
    blocker:release()
  end)

  it("does not claim a lock that an extension has cost, though its thread has not read so", function()
    local manager = open()
    local peer = support.process(store)
    assert.is_true(peer:acquire("h", "acquire", TARGET):result())
    local mine = assert(manager:acquire { "u1", "a1", "r2" })
    -- The server ends the one of the two that has less.
    local others = {}
    for i = 1, 30 do others[i] = "r" .. i end
    assert(mine:extend { user = "u2", account = "a1", resources = others })
    peer:start([[
      pending = require("hierlock.core").start.extend(handles.h, ..., { timeout = 30 })
      return pending ~= nil
    ]], { "u1", "a1", "r2" })
    assert.is_true(peer:result())
    support.wait_until(is_waiting, "the waiter")
    assert.is_true(peer:call "return handles.h:is_held() and handles.h:remaining() > 0")
    assert.is_true(threads.stop(peer.pid) > 0)
    assert(mine:extend(TARGET, { timeout = 10 }))
    local held, left
    local ok, why = pcall(support.wait_until, function() -- the server tells the two one after the other
      held, left = peer:call "return handles.h:is_held(), handles.h:remaining()"
      return not held
    end, "the loss")
    threads.go(peer.pid)
    assert.is_true(ok, why)
    assert.same({ false, 0 }, { held, left })
    assert.equal("deadlock", peer:call "return select(2, pending:wait()).code")
    mine:release()
  end)

  describe("an extension that closes a circle", function()
    it("is a deadlock for one of the two, whose handle then holds nothing", function()
      local manager = open()
      local peer = support.process(store)
      local mine = assert(manager:acquire { "u1", "a1", "r1" })
      assert.is_true(peer:acquire("h", "acquire", { "u1", "a1", "r2" }):result())
      peer:start([[
        local ok, err = handles.h:extend(...)
        return ok, err and {err.code, err.retryable, err.errno, err.sqlstate}, handles.h:is_held()
      ]], { "u1", "a1", "r1" })
      support.wait_until(is_waiting, "the waiter")
      local ok, err = mine:extend { "u1", "a1", "r2" }
      local failure = err and { err.code, err.retryable, err.errno, err.sqlstate }
      local held = mine:is_held()
      -- Should the peer be the victim, it is so by now; else we have made room.
      local peer_ok, peer_failure, peer_held = peer:result()
      assert.not_equal(ok, peer_ok)
      assert.same({ "deadlock", true, 1213, "40001" }, failure or peer_failure)
      assert.equal(ok == true, held)
      assert.equal(peer_ok == true, peer_held)
      local winner_has_it = support.open(store)
      opened[#opened + 1] = winner_has_it
      for _, resource in ipairs { "r1", "r2" } do
        local none, why = winner_has_it:acquire({ "u1", "a1", resource }, { timeout = 0 })
        assert.is_nil(none)
        assert.equal("timeout", why.code)
      end
      if ok then mine:release() else peer:release("h") end
      assert(manager:acquire({ "u1" }, { timeout = SOON })):release()
    end)
  end)
end)
