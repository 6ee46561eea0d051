-- The store on PostgreSQL: its assumptions about the server, its messages, and trouble with its connections.
-- stores_spec.lua and others have the duties of all stores.

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local R1 = { "u1", "a1", "r1" }
-- The keys of R1's rows, computed by hand: level << 60 | FNV-1a-64, folded to 60 bits.
local KEYS = { "810262712412770932", "1454694798511399655", "3110462370617527745" }

-- A program that knows nothing of hierlock, and its own connection.
local function foreign(store) return support.foreign(store) end

support.on_postgresql(function(store)
  local managers
  local function open(options, params)
    managers[#managers + 1] = support.open(store, options, params)
    return managers[#managers]
  end
  -- Opens a DSN as it is: support.open puts its parameters behind a '?'.
  local function open_dsn(dsn, options)
    local manager, err = hierlock.open(dsn, options or store.options)
    managers[#managers + 1] = manager
    return manager, err
  end

  before_each(function() managers = {} end)
  after_each(function()
    support.close_peers()
    for _, manager in ipairs(managers) do manager:close() end
  end)

  local function keys_of(pid, condition)
    return support.column(store.sql():query(
      "SELECT (classid::int8<<32)|objid::int8 FROM pg_locks WHERE locktype='advisory' AND pid=%d AND %s ORDER BY 1",
      pid, condition or "true"))
  end

  -- ------------------------------------------------------ assumptions

  describe("what the store takes for granted:", function()
    local a, b
    before_each(function() a, b = foreign(store), foreign(store) end)

    local function waits(one)
      support.wait_until(function() return #keys_of(one.id, "NOT granted") > 0 end, "a waiter")
    end

    for title, form in pairs {
      ["a select list"] = { "SELECT ", "pg_advisory_xact_lock('%d')", "," },
      ["a union"] = { "", "SELECT pg_advisory_xact_lock('%d')", " UNION ALL " },
    } do
      it(title .. " is evaluated from left to right, however many it has", function()
        local keys, list = {}, {}
        for i = 1, 500 do keys[i] = i * 7919 % 500 + 1 end
        for i, key in ipairs(keys) do list[i] = form[2]:format(key) end
        local sql = form[1] .. table.concat(list, form[3])
        for _, blocked in ipairs { 1, 2, 250, 499, 500 } do
          a:query "BEGIN"
          a:query("SELECT pg_advisory_xact_lock(%d)", keys[blocked])
          b:send("BEGIN;" .. sql)
          waits(b)
          local held = {}
          for i = 1, blocked - 1 do held[i] = keys[i] end
          table.sort(held)
          local seen = keys_of(b.id, "granted")
          for i, key in ipairs(seen) do seen[i] = tonumber(key) end
          assert.same(held, seen)
          a:query "ROLLBACK"
          b:result()
          b:query "ROLLBACK"
        end
      end)
    end

    it("each statement of a message has its own time-out, as it is set then", function()
      a:query "BEGIN"
      a:query "SELECT pg_advisory_xact_lock(1)"
      local start = support.now()
      local rows, _, message = b:query(
        "BEGIN;SELECT pg_sleep(0.3);SET LOCAL statement_timeout=200;SELECT pg_advisory_xact_lock(1)")
      local took = support.now() - start
      assert.is_nil(rows)
      assert.matches("statement timeout", message)
      assert.is_true(took >= 0.5 and took < 1.5, took)
    end)

    it("an error gives back what the transaction has, and so does ROLLBACK TO of what came since", function()
      b:query "BEGIN"
      b:query "SELECT pg_advisory_xact_lock_shared(1)"
      b:query "SAVEPOINT hierlock"
      b:query "SELECT pg_advisory_xact_lock(1),pg_advisory_xact_lock(2)"
      assert.same({ "1", "1", "2" }, keys_of(b.id))
      assert.is_nil((b:query "SELECT 1/0"))
      assert.same({ "1" }, keys_of(b.id))
      b:query "ROLLBACK TO SAVEPOINT hierlock;RELEASE SAVEPOINT hierlock"
      assert.same({ "1" }, keys_of(b.id))
      assert.is_nil((b:query "SELECT 1/0"))
      assert.same({}, keys_of(b.id))
      b:query "ROLLBACK"
    end)

    it("a comment alone is a sign of life", function()
      b:query "SET idle_in_transaction_session_timeout=1000" -- long enough for a slow machine
      b:query "BEGIN"
      b:query "SELECT pg_advisory_xact_lock(1)"
      local start = support.now()
      while support.now() - start < 3 do
        b:query "/*hierlock1*/"
        support.sleep(0.05)
      end
      assert.same({ "1" }, keys_of(b.id))
      support.wait_until(function() return #keys_of(b.id) == 0 end, "the end of the session")
    end)

    it("who waits for a shared lock does not pass who waits for it exclusively", function()
      local c = foreign(store)
      a:query "BEGIN"
      a:query "SELECT pg_advisory_xact_lock_shared(1)"
      b:send "BEGIN;SELECT pg_advisory_xact_lock(1)"
      waits(b)
      c:send "BEGIN;SELECT pg_advisory_xact_lock_shared(1)"
      waits(c)
      assert.same({ { "f" } }, a:query "SELECT pg_try_advisory_xact_lock_shared(2) AND false")
      a:query "ROLLBACK"
      b:result()
      assert.is_true(c:stays_blocked())
      b:query "ROLLBACK"
      c:result()
    end)

    it("a look at the clock behind the locks is made after the wait", function()
      a:query "BEGIN"
      a:query "SELECT pg_advisory_xact_lock(1)"
      b:send "BEGIN;SELECT extract(epoch FROM now()),pg_advisory_xact_lock(1),extract(epoch FROM clock_timestamp())"
      waits(b)
      local at = tonumber(a:query("SELECT extract(epoch FROM clock_timestamp())")[1][1])
      a:query "ROLLBACK"
      local row = b:result()[1]
      assert.is_true(tonumber(row[1]) < at and tonumber(row[3]) > at)
    end)
  end)

  -- ------------------------------------------------------------- a grant

  it("locks keys of level and hash, which the plan's SQL has as well", function()
    support.lease_tables(store.root()) -- closes the gate
    local manager, other = open(), foreign(store)
    local handle = assert(manager:acquire(R1))
    local pid = store.sql():query("SELECT pid FROM pg_locks WHERE locktype='advisory' LIMIT 1")[1][1]
    assert.same(KEYS, keys_of(pid))
    assert.same({ KEYS[1], KEYS[2] }, keys_of(pid, "mode='ShareLock'"))
    local plan = hierlock.plan { R1 }
    assert.equal(("SELECT pg_catalog.pg_advisory_xact_lock_shared('%s') UNION ALL " ..
      "SELECT pg_catalog.pg_advisory_xact_lock_shared('%s') UNION ALL SELECT l FROM (SELECT pg_catalog.pg_advisory_xact_lock('%s') AS l,"):format(
        KEYS[1], KEYS[2], KEYS[3]), (plan:sql("postgresql"):gsub("CASE.*$", "")))
    other:query "BEGIN"
    other:send(plan:sql "postgresql")
    assert.is_true(other:stays_blocked())
    handle:release()
    assert.is_true(plan:verify(#other:result()))
    assert.same(KEYS, keys_of(other.id))
    other:query "ROLLBACK"
  end)

  it("locks deep trees, whose keys are negative numbers to the server", function()
    local levels, target = {}, {}
    for i = 1, 16 do levels[i], target[i] = "l" .. i, "x" end
    local one, other = open { levels = levels }, open { levels = levels }
    local handle = assert(one:acquire(target))
    assert.equal("timeout", select(2, other:acquire(target, { timeout = 0 })).code)
    assert.equal(1, #assert(other:holders(target)))
    handle:release()
    assert(other:acquire(target))
  end)

  it("takes no notice of `buckets`: who wants other ones excludes as well", function()
    local one, other = open { buckets = 10 }, open { buckets = 20 }
    local handle = assert(one:acquire(R1))
    assert.equal("timeout", select(2, other:acquire(R1, { timeout = 0 })).code)
    handle:release()
  end)

  it("takes more rows than a statement has, in one order, and all or none", function()
    local one, other = open(), open()
    local resources, blocked = {}, nil
    for i = 1, 2000 do resources[i] = "r" .. i end
    local highest = ""
    for _, resource in ipairs(resources) do
      local key = hierlock.plan({ { "u1", "a1", resource } }):sql("postgresql"):match(".*'(%d+)'")
      if key > highest then highest, blocked = key, resource end
    end
    local blocker = assert(one:acquire { "u1", "a1", blocked })
    for _, timeout in ipairs { 0, 0.2 } do
      assert.equal("timeout", select(2, other:acquire_resources("u1", "a1", resources, { timeout = timeout })).code)
      support.wait_until(function() return #store.sql():query("SELECT 1 FROM pg_locks WHERE locktype='advisory'") == 3 end)
    end
    local held = assert(other:acquire { "u2" })
    for _, timeout in ipairs { 0, 0.2 } do
      local ok, err = held:extend({ user = "u1", account = "a1", resources = resources }, { timeout = timeout })
      assert.is_nil(ok)
      assert.equal("timeout", err.code)
      assert.equal("4", store.sql():query("SELECT count(*) FROM pg_locks WHERE locktype='advisory'")[1][1])
    end
    blocker:release { confirm = true }
    assert.is_true(held:extend({ user = "u1", account = "a1", resources = resources }, { timeout = 0 }))
    assert.is_true(held:check())
    assert.equal("2003", store.sql():query("SELECT count(*) FROM pg_locks WHERE locktype='advisory'")[1][1])
    held:release()
  end)

  it("goes on, on the same connection, when the server has refused a request", function()
    local root = store.root()
    if not root then return pending("no administrator here") end
    local manager = open { pool_size = 1 }
    local functions = "FUNCTION pg_try_advisory_xact_lock(bigint), pg_try_advisory_xact_lock_shared(bigint), " ..
      "pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint)"
    root:query("REVOKE EXECUTE ON %s FROM PUBLIC", functions)
    finally(function() root:query("GRANT EXECUTE ON %s TO PUBLIC", functions) end)
    for _ = 1, 2 do
      local handle, err = manager:acquire(R1)
      assert.is_nil(handle)
      assert.equal("store", err.code)
      assert.equal("42501", err.sqlstate)
    end
    root:query("GRANT EXECUTE ON %s TO PUBLIC", functions)
    for _ = 1, 2 do assert(manager:acquire(R1)):release { confirm = true } end
    assert.equal(0, manager:stats().reconnects)
  end)

  it("says what to raise when the server's table of locks is full, and holds nothing", function()
    local manager = open()
    local ids = {}
    for i = 1, 60000 do ids[i] = i end
    local handle, err = manager:acquire_resources("u1", "a1", ids)
    assert.is_nil(handle)
    assert.equal("store", err.code)
    assert.equal("53200", err.sqlstate)
    assert.matches("max_locks_per_transaction", err.message)
    assert.equal(0, store.waiting())
    assert(manager:acquire { "u1" }):release { confirm = true }
  end)

  -- ------------------------------------------------------ trips

  it("costs one trip to acquire, and none to release", function()
    local between = proxy.open(store)
    finally(function() between.close() end)
    local peer = support.process(store, nil, between.dsn)
    peer:call "for _ = 1, 2 do manager:acquire({ 'u1' }):release { confirm = true } end"
    between.take()
    local turns = between.turns
    peer:call "handles.one = assert(manager:acquire { 'u1', 'a1', 'r1' })"
    -- Messages of the protocol: BEGIN is parsed and executed; the shape is prepared in the same trip, the next time it
    -- is only executed; the comment for observers is parsed.
    assert.equal("PBDE" .. "PBDE" .. "P", table.concat(between.take()))
    assert.equal(turns + 1, between.turns)
    peer:call "handles.one:release { confirm = true }"
    between.take()
    turns = between.turns
    peer:call "handles.one = assert(manager:acquire { 'u2', 'a1', 'r1' })"
    assert.equal("PBDE" .. "BDE" .. "P", table.concat(between.take()))
    assert.equal(turns + 1, between.turns)
    peer:call "handles.one:release()"
    support.wait_until(function() return table.concat(between.take()):find("ROLLBACK", 1, true) end, "the release")
    peer:call "assert(manager:acquire({ 'u1' }, { timeout = 0 })):extend({ 'u2' })"
    local sent = between.take()
    assert.matches("SAVEPOINT hierlock;SET LOCAL lock_timeout=0;SET LOCAL statement_timeout=%d+;SELECT pg_advisory_xact_lock%('[^;]*;" ..
      "SELECT 0,[^;]*$", sent[#sent])
    -- The next acquisition ends the savepoint that the one has left open.
    peer:call "handles.two = assert(manager:acquire({ 'u5' }, { timeout = 0 })) assert(handles.two:extend({ 'u6' }) and handles.two:extend({ 'u7' }))"
    sent = between.take()
    assert.matches("RELEASE SAVEPOINT hierlock;SAVEPOINT hierlock;SET LOCAL", sent[#sent])
  end)

  it("has a wait ended at once when it is cancelled, and needs none of the server's connections for that", function()
    local manager, other = open { pool_size = 1 }, open()
    local handle = assert(other:acquire(R1))
    assert(manager:acquire { "u2" }):release { confirm = true }
    -- The server itself looks every second whether a waiting client still is there.
    local took = 0
    for _ = 1, 5 do
      local pending = assert(manager:start(R1, { timeout = 30 }))
      support.wait_for_waiters(store, R1)
      local lift = store.root() and store.limit_connections(0)
      local start = support.now()
      pending:cancel()
      support.wait_until(function() return store.waiting() == 0 end, "the end of the wait")
      took = took + support.now() - start
      if lift then lift() end
    end
    assert.is_true(took < 1.2, took .. " s")
    handle:release()
    assert(manager:acquire(R1, { timeout = 5 }))
    assert.equal(0, manager:stats().lost)
  end)

  it("never ends a later call by a cancellation that comes late", function()
    local manager, other = open { pool_size = 2 }, open()
    for round = 1, 200 do
      local handle = assert(other:acquire(R1))
      local pending = assert(manager:start(R1, { timeout = 30 }))
      if round % 2 == 0 then support.wait_for_waiters(store, R1) end
      handle:release()
      if round % 3 == 0 then support.sleep(0.001) end
      pending:cancel()
      assert(manager:acquire(R1, { timeout = 10 })):release { confirm = true }
    end
    local stats = manager:stats()
    assert.equal(0, stats.lost + stats.errors)
  end)

  it("is `cancelled` when an administrator has ended the request, and not a time-out", function()
    if not store.root() then return pending("no administrator here") end
    local manager, other = open(), open()
    support.keep(assert(other:acquire(R1)))
    local pending = assert(manager:start(R1, { timeout = 30 }))
    support.wait_for_waiters(store, R1)
    store.root():query("SELECT pg_cancel_backend(%s)", store.transactions(true)[1])
    local _, err = pending:wait(support.DEADLINE)
    assert.equal("cancelled", err.code)
    assert.equal("57014", err.sqlstate)
  end)

  it("counts a wait whose time ends just after the last row as a time-out, not as a grant that the server takes back", function()
    if not store.control then return pending("the server is not ours") end
    finally(function() store.command "restart" end)
    store.command("restart", nil, support.library "late")
    local manager, other = open(), open()
    local handle = assert(other:acquire(R1))
    assert.equal(0, store.waiting()) -- has connected before the waiter's time begins
    local wait = assert(manager:start(R1, { timeout = 3 }))
    support.wait_until(function() return store.waiting() == 1 end, "the waiter")
    handle:release()
    local granted, err = wait:wait(support.DEADLINE)
    assert.is_nil(granted, granted and select(2, granted:check()))
    assert.equal("timeout", err.code)
  end)

  it("has no later call end because the look at who is in the way took too long", function()
    if not store.control then return pending("the server is not ours") end
    finally(function() store.command "restart" end)
    store.command("restart", nil, support.library "late_set")
    -- Without tables of leases, which are looked at next.
    local dsn = store.dsn:gsub("/[^/]+$", "/postgres", 1)
    local manager, other = assert(open_dsn(dsn, { pool_size = 1 })), assert(open_dsn(dsn))
    support.keep(assert(other:acquire(R1)))
    local _, err = manager:acquire(R1, { timeout = 0 }) -- and looks, for a few milliseconds
    assert.equal("timeout", err.code, err.message)
    -- Also on the connection of the look, which was in use when the caller left.
    for _ = 1, 10 do
      local handle = assert(manager:acquire({ "u2" }, { timeout = 10 }))
      assert.is_true(handle:check())
      assert(handle:release { confirm = true })
      support.sleep(0.02)
    end
    assert.equal(0, manager:stats().reconnects)
  end)

  -- -------------------------------------------------------------- the lease

  it("frees the locks of a holder that is not heard of for hold_timeout", function()
    local holder = support.process(store, { hold_timeout = 1 })
    assert.is_true(holder:acquire("lock", "acquire", R1):result())
    local other = open()
    local start = support.now()
    holder:signal "sigstop"
    assert(other:acquire(R1, { timeout = 10 }))
    local took = support.now() - start
    holder:signal "sigcont"
    assert.is_true(took > 0.5 and took < 3, took)
    assert.is_false(holder:call "return handles.lock:is_held()")
  end)

  it("keeps them while the holder lives, for many times hold_timeout", function()
    local manager = open { hold_timeout = 1 }
    local handle = assert(manager:acquire(R1, { label = "long" }))
    support.sleep(3.5)
    assert.is_true(handle:is_held())
    assert.is_true(handle:check())
    assert.equal("long", open():holders(R1)[1].label)
    handle:release()
  end)

  it("notices at once that its session was ended, and says why", function()
    if not store.root() then return pending("no administrator here") end
    local lost
    local manager = open { on_lost = function(_, err) lost = err end }
    local handle = assert(manager:acquire(R1))
    store.kill(store.transactions()[1])
    local start = support.now()
    support.wait_until(function() return not handle:is_held() end, "the loss")
    assert.is_true(support.now() - start < 0.5)
    assert.equal(0, handle:remaining())
    local ok, err = handle:release()
    assert.is_nil(ok)
    assert.equal("lost", err.code)
    support.wait_until(function() manager:stats() return lost end, "on_lost")
  end)

  it("does not take news of a changed setting for its end", function()
    if not store.root() then return pending("no administrator here") end
    local root = store.root()
    local manager = open()
    local handle = assert(manager:acquire(R1))
    assert(manager:acquire { "u2" }):release { confirm = true }
    finally(function()
      root:query "ALTER SYSTEM RESET ALL"
      root:query "SELECT pg_reload_conf()"
    end)
    for _, zone in ipairs { "'Asia/Tokyo'", "'UTC'" } do
      root:query("ALTER SYSTEM SET timezone=" .. zone)
      root:query "SELECT pg_reload_conf()"
      support.sleep(support.STAYS_BLOCKED)
      assert.is_true(handle:is_held())
      assert(manager:acquire { "u2" }):release { confirm = true }
    end
    assert.is_true(handle:check())
    assert.equal(0, manager:stats().lost + manager:stats().reconnects)
  end)

  -- --------------------------------------------------------------- refusals

  local function is_refused(dsn, code, word)
    local manager, err = open_dsn(dsn)
    assert.is_nil(manager)
    assert.equal(code, err.code, tostring(err))
    assert.matches(word, err.message)
    return err
  end

  it("refuses a standby", function()
    local root = store.root()
    if not root or not store.control then return pending("the server is not ours") end
    local data = root:query("SHOW data_directory")[1][1]
    root:query("COPY (SELECT 1 WHERE false) TO '%s/standby.signal'", data)
    finally(function()
      if store.root():query("SELECT pg_is_in_recovery()")[1][1] == "t" then store.root():query "SELECT pg_promote()" end
      support.wait_until(function() return store.root():query("SELECT pg_is_in_recovery()")[1][1] == "f" end, "the promotion")
    end)
    store.command "restart"
    is_refused(store.dsn, "unsafe_server", "standby.*target_session_attrs=primary")
  end)

  it("refuses a server behind a pooler, which gives a number of its own", function()
    local between = proxy.open(store, function(data)
      -- BackendKeyData
      return (data:gsub("K%z%z%z\12........", function(key) return key:sub(1, 5) .. "\0\0\0\1" .. key:sub(10) end))
    end)
    finally(function() between.close() end)
    local peer = support.process(nil)
    local code, message = peer:call([[
      local manager, err = hierlock.open(...)
      return err.code, err.message
    ]], between.dsn)
    assert.equal("unsafe_server", code)
    assert.matches("pooler", message)
  end)

  -- A proxy that leads statements to several servers, behind one greeting.
  it("is not granted by another server than that to which it has connected", function()
    local backend
    local between = proxy.open(store, function(data)
      return backend and (data:gsub(backend, ("9"):rep(#backend))) or data
    end)
    finally(function() between.close() end)
    local peer = support.process(store, nil, between.dsn)
    peer:call "manager:acquire({ 'u1' }):release { confirm = true }"
    backend = store.sql():query("SELECT pid FROM pg_stat_activity WHERE usename = 'testuser' AND query = 'ROLLBACK'")[1][1]
    local code, message = peer:call "local handle, err = manager:acquire({ 'u1' }) return err and err.code, err and err.message"
    assert.equal("unsafe_server", code)
    assert.matches("another server", message)
  end)

  it("becomes no lease by the word of another server", function()
    local backend
    local between = proxy.open(store, function(data)
      return backend and (data:gsub(backend, ("9"):rep(#backend))) or data
    end)
    finally(function() between.close() end)
    local peer = support.process(store, nil, between.dsn)
    backend = peer:call [[
      handles.u1 = assert(manager:acquire { "u1" })
      return manager:holders { "u1" }[1].session
    ]]
    local code, message = peer:call [[
      local _, err = handles.u1:to_lease { ttl = 1 }
      return err and err.code, err and err.message
    ]]
    assert.equal("lost", code)
    assert.matches("another server", message)
  end)

  it("refuses servers that are too old, and those that only look like one", function()
    local function rewritten(from, to)
      local between = proxy.open(store, function(data) return (data:gsub(from, to, 1)) end)
      local peer = support.process(nil)
      local code, message = peer:call([[
        local manager, err = hierlock.open(...)
        return err.code, err.message
      ]], between.dsn)
      between.close()
      assert.equal("unsafe_server", code, message)
      return message
    end
    local version = store.sql():query("SHOW server_version")[1][1]:match("^%d+%.%d")
    assert.matches("too old %(09%.6", rewritten("server_version%z" .. version:gsub("%p", "%%%0"), "server_version\0" .. "09.6"))
    assert.matches("CockroachDB", rewritten("is_superuser%z", "crdb_version\0"))
  end)

  it("says that credentials were refused, and that trying again is of no use", function()
    local err = is_refused(store.dsn:gsub(":[^:@]+@", ":SECRETMARKER@", 1), "connection", "password authentication failed")
    assert.is_false(err.retryable)
    assert.equal("28P01", err.sqlstate)
    assert.is_nil(tostring(err):find("SECRETMARKER", 1, true))
    err = is_refused(store.dsn:gsub("/[^/]+$", "/nosuch", 1), "store", "does not exist")
    assert.equal("3D000", err.sqlstate)
  end)

  it("tells apart that the server has no connection left: that passes", function()
    if not store.root() then return pending("no administrator here") end
    local manager = open()
    local handle = assert(manager:acquire(R1))
    store.root():query "ALTER ROLE testuser CONNECTION LIMIT 1"
    finally(function() store.root():query "ALTER ROLE testuser CONNECTION LIMIT -1" end)
    local second, err = manager:acquire({ "u2" }, { timeout = 1 })
    assert.is_nil(second)
    assert.equal("connection", err.code)
    assert.equal("53300", err.sqlstate)
    assert.is_true(err.retryable)
    assert.is_true(handle:check())
  end)

  it("needs no privilege but to connect, and writes nothing", function()
    local root = store.root()
    if not root then return pending("no administrator here") end
    root:query "CREATE ROLE little LOGIN PASSWORD 'little'"
    finally(function() root:query "DROP ROLE little" end)
    local dsn = store.dsn:gsub("//[^@]+@", "//little:little@", 1)
    local little = assert(open_dsn(dsn))
    local before = root:query "SELECT pg_snapshot_xmax(pg_current_snapshot())"[1][1]
    local handle = assert(little:acquire(R1))
    assert(handle:extend { "u2" })
    -- The role sees no more than a name of other roles' sessions.
    local other = open { application = "the other" }
    local theirs = assert(other:acquire { "u3" })
    local seen
    support.wait_until(function() -- a busy server may not answer in time
      seen = little:holders { "u3" }
      return seen
    end, "the holders")
    assert.equal(1, #seen)
    assert.equal("the other", seen[1].application)
    assert.matches("^advisory lock %d+ of the server's process %d+$", seen[1].path)
    seen = assert(other:holders(R1))
    assert.equal(1, #seen)
    assert.equal("exclusive", seen[1].mode)
    theirs:release()
    handle:release()
    assert.equal(before, root:query "SELECT pg_snapshot_xmax(pg_current_snapshot())"[1][1])
    little:close()
  end)

  it("is understood by observers, whatever characters its names have", function()
    local odd = "ä|*/%25 \\ ' \27 €" .. ("x"):rep(90)
    local manager, observer = open { application = "a*/b|c%41" }, open()
    local handle = assert(manager:acquire({ "*/;DROP|", "|%", "ü" }, { label = odd }))
    local seen = observer:holders { "*/;DROP|", "|%", "ü" }
    assert.equal(1, #seen)
    assert.equal("a*/b|c%41", seen[1].application)
    assert.equal("*%2F;DROP|/|%25/ü", seen[1].path)
    assert.equal("ä|*/%25 \\ ' \\x1b €" .. ("x"):rep(90), seen[1].label)
    handle:release()
  end)

  it("shows other programs' locks as what they are", function()
    local other, manager = foreign(store), open()
    other:query("BEGIN; SELECT pg_advisory_xact_lock(%s)", KEYS[1])
    local err = support.told(function() return manager:acquire(R1, { timeout = 0.1 }) end)
    assert.equal("timeout", err.code)
    assert.equal(1, #err.holders)
    assert.equal(("advisory lock %s of the server's process %d"):format(KEYS[1], other.id), err.holders[1].path)
    assert.equal("exclusive", err.holders[1].mode)
  end)

  -- ----------------------------------------------------------------- tokens

  it("makes tokens of a sequence where there is one, greater than those without", function()
    local root = store.root()
    if not root then return pending("no administrator here") end
    local plain = assert(open():acquire(R1))
    local token = plain.token
    plain:release { confirm = true }
    root:query "CREATE SEQUENCE public.hier_lock_token"
    finally(function()
      for _, manager in ipairs(managers) do manager:close() end -- who holds a lock, holds the sequence, too
      root:query "DROP SEQUENCE public.hier_lock_token"
    end)
    is_refused(store.dsn, "store", "GRANT USAGE ON SEQUENCE public.hier_lock_token")
    root:query "GRANT USAGE ON SEQUENCE public.hier_lock_token TO testuser"
    local one, other = open(), open()
    for i = 1, 20 do
      local handle = assert((i % 2 == 0 and one or other):acquire(R1))
      assert.is_true(handle.token > token, handle.token .. " after " .. token)
      token = handle.token
      assert(handle:extend { "u2" })
      assert.is_true(handle.token > token)
      token = handle.token
      handle:release()
    end
    -- The sequence's comment may say which levels there are to be.
    root:query "COMMENT ON SEQUENCE public.hier_lock_token IS 'hierlock levels: tenant,project'"
    local third = open { application = "third" }
    assert(third:acquire { tenant = "t", project = "p" })
    local manager, err = open_dsn(store.dsn, { levels = { "user" } })
    assert.is_nil(manager)
    assert.equal("mismatch", err.code)
    assert.matches("tenant,project", err.message)
    assert(open { levels = { "tenant", "project" } }:acquire { project = "p2", tenant = "t" })
  end)

  -- ----------------------------------------------------------------- TLS

  it("speaks TLS as libpq's parameters say", function()
    local ca = os.getenv "HIERLOCK_POSTGRESQL_CA"
    if not ca then return pending("the server's authority is not known") end
    local function encrypted(manager)
      assert(manager:acquire(R1)):release { confirm = true }
      return #store.sql():query "SELECT 1 FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND application_name='encrypted'" > 0
    end
    assert.is_true(encrypted(open_dsn(store.dsn .. "?application_name=encrypted&sslmode=verify-full&sslrootcert=" .. ca)))
    managers[1]:close()
    support.wait_until(function() return #store.sessions() == 0 end, "the end of the sessions")
    assert.is_false(encrypted(open_dsn(store.dsn .. "?application_name=encrypted&sslmode=disable")))
    is_refused(store.dsn .. "?sslmode=verify-full&sslrootcert=/nonexistent", "connection", "nonexistent")
  end)

  it("connects by a socket, and by the first of several hosts that answers", function()
    local socket, port = os.getenv "HIERLOCK_POSTGRESQL_SOCKET", store.dsn:match(":(%d+)/")
    if not socket then return pending("the server's socket is not known") end
    assert(open_dsn(("host=%s port=%s user=testuser password=testpassword dbname=mgl_test"):format(socket, port)):acquire(R1)):release()
    assert(open_dsn((store.dsn:gsub("@", "@127.0.0.1:1,", 1))):acquire(R1)):release()
  end)
end)
