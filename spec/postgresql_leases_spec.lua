-- Leases on PostgreSQL: their assumptions about the server; tables that are missing, were dropped, or are closed to
-- a role; trouble with connections and servers; their cost. leases_spec.lua has the duties of every store.
-- Parts: listen polled

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local LONG, SHORT = 60, 0.15

local DROP = "DROP TABLE IF EXISTS public.hier_lock_leases, public.hier_lock_lease_rows; " ..
  "DROP SEQUENCE IF EXISTS public.hier_lock_gate"
local KEY = 4711 -- of no level

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

support.on_postgresql(function(store)
  local managers, made

  local function root(query, ...) return store.root():query(query, ...) end
  local function provide() support.lease_tables(store.root()) end
  local function open(options, dsn)
    local all = {}
    for k, v in pairs(store.options) do all[k] = v end
    for k, v in pairs(options or {}) do all[k] = v end
    local manager, err = hierlock.open(dsn or store.dsn, all)
    managers[#managers + 1] = manager
    return manager, err
  end

  before_each(function()
    managers = {}
    root(DROP)
    provide()
  end)
  after_each(function()
    support.close_peers()
    for _, manager in ipairs(managers) do manager:close() end
    root(DROP)
    provide()
    if made then root "DROP OWNED BY little; DROP ROLE little" end
    made = false
  end)

  local function lease(manager, target, ttl, options)
    local all = { ttl = ttl or LONG, timeout = 0 }
    for k, v in pairs(options or {}) do all[k] = v end
    return manager:acquire(target, all)
  end

  -- A role of its own, with what the statements grant; its DSN.
  local function role(...)
    root "CREATE ROLE little LOGIN PASSWORD 'little'"
    made = true
    for _, statement in ipairs { ... } do root((statement:gsub("%%", "%%%%"))) end
    return (store.dsn:gsub("//[^@]*@", "//little:little@", 1))
  end

  -- ------------------------------------------------------------ assumptions

  describe("what leases take for granted:", function()
    local one, two
    before_each(function()
      one, two = support.foreign(store), support.foreign(store)
      root "CREATE SEQUENCE public.hierlock_spec_s MINVALUE 1 MAXVALUE 2"
      root "CREATE TABLE public.hierlock_spec_t (n int, till timestamptz)"
      root "INSERT INTO public.hierlock_spec_t VALUES (1, clock_timestamp())"
      root "GRANT ALL ON SEQUENCE public.hierlock_spec_s TO PUBLIC"
      root "GRANT ALL ON public.hierlock_spec_t TO PUBLIC"
    end)
    after_each(function()
      for _, each in ipairs { one, two } do pcall(each.query, each, "ROLLBACK") end
      root "DROP SEQUENCE public.hierlock_spec_s"
      root "DROP TABLE public.hierlock_spec_t"
    end)

    -- The value that `two` reads behind the wait for a lock, while `one` does something and gives it up.
    local function behind(before, expression, meanwhile)
      one:query "BEGIN"
      one:query("SELECT pg_advisory_xact_lock(%d)", KEY)
      for _, statement in ipairs(before) do two:query(statement) end
      two:send("SELECT pg_advisory_xact_lock(%d), %s", KEY, expression)
      support.wait_until(function() return store.waiting() == 1 end)
      meanwhile()
      one:query "COMMIT"
      local rows, _, message = two:result()
      return assert(rows, message)[1][2]
    end

    it("the value of a sequence is read behind the wait, and a table is as it was before", function()
      root "SELECT setval('public.hierlock_spec_s', 1)"
      local function meanwhile()
        one:query "SELECT setval('public.hierlock_spec_s', 2)"
        one:query "UPDATE public.hierlock_spec_t SET n = 2"
      end
      assert.equal("2", behind({ "BEGIN" }, "pg_sequence_last_value(to_regclass('public.hierlock_spec_s'))", meanwhile))
      two:query "ROLLBACK"
      root "UPDATE public.hierlock_spec_t SET n = 1"
      assert.equal("1", behind({ "BEGIN" }, "(SELECT n FROM public.hierlock_spec_t)", meanwhile))
      -- The next statement sees it.
      assert.equal("2", two:query("SELECT n FROM public.hierlock_spec_t")[1][1])
      two:query "ROLLBACK"
    end)

    it("a relation that was made during the wait is found behind the lock of another one", function()
      local MISSING = "to_regclass('public.hierlock_spec_new')"
      finally(function() root "DROP SEQUENCE public.hierlock_spec_new" end)
      assert.truthy(behind({ "SELECT " .. MISSING, "BEGIN" },
        "CASE WHEN pg_relation_is_updatable(1259,false) IS NULL THEN NULL ELSE " .. MISSING .. " END",
        function() root "CREATE SEQUENCE public.hierlock_spec_new" end))
    end)

    it("what deletes if the time is up waits for a refresh that is under way, and deletes nothing", function()
      one:query "BEGIN"
      one:query "UPDATE public.hierlock_spec_t SET till = clock_timestamp() + interval '1 hour'"
      assert.equal("1", two:query("SELECT count(*) FROM public.hierlock_spec_t WHERE till <= clock_timestamp()")[1][1])
      assert.equal(0, two:query("DELETE FROM public.hierlock_spec_t WHERE n IN (SELECT n FROM public.hierlock_spec_t " ..
        "WHERE till <= clock_timestamp() FOR UPDATE SKIP LOCKED)"))
      two:send "DELETE FROM public.hierlock_spec_t WHERE till <= clock_timestamp()"
      assert.is_true(two:stays_blocked())
      one:query "COMMIT"
      assert.equal(0, two:result())
      assert.equal("1", two:query("SELECT count(*) FROM public.hierlock_spec_t")[1][1])
    end)

    it("a refresh waits for a deletion that is under way, and finds nothing", function()
      one:query "BEGIN"
      one:query "DELETE FROM public.hierlock_spec_t WHERE till <= clock_timestamp()"
      two:send "UPDATE public.hierlock_spec_t SET till = clock_timestamp() + interval '1 hour'"
      assert.is_true(two:stays_blocked())
      one:query "COMMIT"
      assert.equal(0, two:result())
    end)

    it("now() is the time of BEGIN", function()
      two:query "BEGIN"
      support.sleep(0.05)
      assert.equal("t", two:query("SELECT clock_timestamp() - now() >= interval '40 ms'")[1][1])
    end)
  end)

  -- ------------------------------------------------------------- the tables

  for _, call in ipairs { "refresh", "check", "downgrade" } do
    it("whose upgrade a replica lacked when it took over is lost for its holder by " .. call, function()
      local handle = assert(lease(open(), R1, LONG, { mode = "update", auto_refresh = false }))
      local token = root("SELECT token FROM public.hier_lock_leases")[1][1]
      local shared = support.column(root "SELECT key FROM public.hier_lock_lease_rows WHERE NOT exclusive")
      assert.is_true(handle:upgrade { timeout = 0 })
      root("UPDATE public.hier_lock_leases SET token=%s, shared=true", token)
      root("UPDATE public.hier_lock_lease_rows SET exclusive=false WHERE key IN (%s)", table.concat(shared, ","))
      assert_code("lost", handle[call](handle))
      assert.is_false(handle:is_held())
      assert.equal("0", root("SELECT count(*) FROM public.hier_lock_leases")[1][1])
    end)
  end

  it("sees a lease in tables that were made after it was opened, even while it waited", function()
    root(DROP)
    local holder = open()
    local peer = support.process(store)
    peer:call "manager:acquire({ 'u1' }):release { confirm = true }" -- it has seen that there are none
    local session = assert(holder:acquire(R1))
    peer:acquire("lock", "acquire", R1, { timeout = 10 })
    support.wait_for_waiters(store, R1)
    provide()
    assert.is_true(session:to_lease { ttl = LONG })
    assert.is_true(peer:stays_blocked())
    assert.is_true(session:release { confirm = true })
    assert.is_true((peer:result()))
  end)

  it("makes the tables at the first use of a lease, if it may", function()
    root(DROP)
    root "GRANT CREATE ON SCHEMA public TO testuser"
    finally(function() root "REVOKE CREATE ON SCHEMA public FROM testuser" end)
    local manager, other = open(), open()
    assert.equal(0, #manager:leases())
    assert.equal(0, manager:revoke { target = U1 })
    assert.equal("0", root("SELECT count(*) FROM pg_class WHERE relname = 'hier_lock_gate'")[1][1])
    local handle = assert(lease(manager, R1))
    assert_code("timeout", other:acquire(R1, { timeout = 0 }))
    local session = assert(other:acquire(R2))
    assert.is_true(session:to_lease { ttl = LONG })
    assert.equal(2, #manager:leases())
    assert.is_true(handle:release { confirm = true })
  end)

  it("says what is missing where it may not make them; a session lock stays what it is", function()
    root(DROP)
    local manager = open()
    local err = assert_code("not_provisioned", lease(manager, R1))
    assert.truthy(err.message:find("hierlock provision --leases", 1, true))
    local session = assert(manager:acquire(R1))
    assert_code("not_provisioned", session:to_lease { ttl = 1 })
    assert.is_true(session:check())
    assert.is_true(session:release { confirm = true })
    provide()
    assert(lease(manager, R1)):release()
  end)

  it("says what is missing where there is no schema for them", function()
    root(DROP)
    root "ALTER SCHEMA public RENAME TO hierlock_spec_elsewhere"
    finally(function() root "ALTER SCHEMA hierlock_spec_elsewhere RENAME TO public" end)
    local manager = open()
    assert_code("not_provisioned", lease(manager, R1))
    local session = assert(manager:acquire(R1))
    assert_code("not_provisioned", session:to_lease { ttl = 1 })
    assert.is_true(session:check())
    assert.is_true(session:release { confirm = true })
    assert.equal(0, #manager:leases())
  end)

  it("is refused where this role may not see the leases", function()
    local dsn = role()
    root "REVOKE ALL ON SEQUENCE public.hier_lock_gate FROM PUBLIC"
    local manager, err = open(nil, dsn)
    assert.truthy(assert_code("not_provisioned", manager, err).message:find("GRANT", 1, true))
    root "GRANT SELECT ON SEQUENCE public.hier_lock_gate TO little"
    manager = assert(open(nil, dsn))
    local session = assert(manager:acquire(R1))
    assert.is_true(session:release { confirm = true })
    -- From PostgreSQL 17 on a gate that may not be read has no value, which counts as open: then the records tell.
    root "REVOKE SELECT ON SEQUENCE public.hier_lock_gate FROM little"
    root "REVOKE ALL ON public.hier_lock_leases, public.hier_lock_lease_rows FROM PUBLIC"
    assert_code("not_provisioned", manager:acquire(R1))
  end)

  it("is refused where this role may not look into the schema, once there are tables", function()
    local dsn = role()
    root "REVOKE USAGE ON SCHEMA public FROM PUBLIC"
    finally(function() root "GRANT USAGE ON SCHEMA public TO PUBLIC" end)
    root(DROP)
    local manager = assert(open(nil, dsn))
    assert(manager:acquire(R1)):release()
    provide()
    assert_code("not_provisioned", manager:acquire(R1))
    assert_code("not_provisioned", lease(manager, R1))
    root "GRANT USAGE ON SCHEMA public TO PUBLIC"
    assert(manager:acquire(R1)):release { confirm = true }
  end)

  it("is refused where this role loses the privilege to look into the schema", function()
    local dsn = role("GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local manager = assert(open(nil, dsn))
    local function both_granted()
      assert(manager:acquire(R1)):release { confirm = true }
      assert(lease(manager, R1)):release { confirm = true }
    end
    for _ = 1, 3 do both_granted() end
    root "REVOKE USAGE ON SCHEMA public FROM PUBLIC"
    finally(function() root "GRANT USAGE ON SCHEMA public TO PUBLIC" end)
    for _ = 1, 2 do
      for _, take in ipairs { manager.acquire, lease } do
        local err = assert_code("not_provisioned", take(manager, R1))
        assert.matches("schema public", err.message:lower())
        assert.is_nil(err.message:find("provision", 1, true))
      end
    end
    root "GRANT USAGE ON SCHEMA public TO PUBLIC"
    both_granted()
  end)

  it("needs no more privileges than it says", function()
    root "REVOKE ALL ON SEQUENCE public.hier_lock_gate FROM PUBLIC"
    root "REVOKE ALL ON public.hier_lock_leases, public.hier_lock_lease_rows FROM PUBLIC"
    root "GRANT ALL ON public.hier_lock_leases, public.hier_lock_lease_rows TO testuser"
    root "GRANT ALL ON SEQUENCE public.hier_lock_gate TO testuser"
    local dsn = role("GRANT SELECT ON SEQUENCE public.hier_lock_gate TO little",
      "GRANT SELECT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little")
    local owner, little = open(), assert(open(nil, dsn))
    -- A role that only takes session locks:
    local over = assert(lease(owner, R1, SHORT))
    assert_code("timeout", little:acquire(R1, { timeout = 0 }))
    assert(little:acquire(R1)):release { confirm = true }
    assert_code("lost", over:refresh())
    assert_code("not_provisioned", lease(little, R1))
    -- A role that takes leases:
    root "GRANT INSERT ON public.hier_lock_leases, public.hier_lock_lease_rows TO little"
    root "GRANT UPDATE ON SEQUENCE public.hier_lock_gate TO little"
    local handle = assert(lease(little, R1))
    assert.is_true(handle:refresh())
    assert.is_true(handle:check())
    handle = assert(little:import((assert(handle:export()))))
    assert.equal(1, #little:leases())
    assert.equal(1, little:revoke { target = R1 })
    assert_code("lost", handle:check())
    assert.is_true(assert(lease(little, R1)):release { confirm = true })
  end)

  it("is refused where nothing is to be written", function()
    local dsn = role "ALTER ROLE little SET default_transaction_read_only = on"
    local manager = assert(open(nil, dsn))
    assert_code("unsafe_server", lease(manager, R1))
    assert.is_true(assert(manager:acquire(R1)):release { confirm = true })
  end)

  it("is granted to a manager that was refused, once that has been mended", function()
    local dsn = role("ALTER ROLE little SET default_transaction_read_only = on",
      "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local manager = assert(open(nil, dsn))
    assert_code("unsafe_server", lease(manager, R1))
    root "ALTER ROLE little RESET default_transaction_read_only"
    assert.is_true(assert(lease(manager, R1)):release { confirm = true })
  end)

  it("is granted on a session that began before that was mended", function()
    local dsn = role("ALTER ROLE little SET default_transaction_read_only = on",
      "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local manager, first = assert(open(nil, dsn)), assert(open(nil, dsn))
    local held = assert(manager:acquire(R1))
    assert.is_true(assert(manager:acquire(R2)):release { confirm = true })
    root "ALTER ROLE little RESET default_transaction_read_only"
    support.sleep(1.1) -- a younger session is believed
    root "ALTER ROLE little CONNECTION LIMIT 1"
    assert_code("timeout", held:to_lease { ttl = LONG }) -- no session can begin, which would know
    root "ALTER ROLE little CONNECTION LIMIT -1"
    assert.is_true(held:to_lease { ttl = LONG })
    assert.is_true(assert(lease(manager, R2)):release { confirm = true })
    assert.is_true(held:release { confirm = true })
    assert.is_true(assert(lease(first, R1)):release { confirm = true })
  end)

  it("is not granted by the word of another server, to which a proxy leads new sessions", function()
    local dsn = role("ALTER ROLE little SET default_transaction_read_only = on",
      "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local strange = true
    local between = proxy.open(setmetatable({ dsn = dsn }, { __index = store }), function(data)
      -- a new session says when its server started
      return strange and data:gsub("(off%z%z%z\16)(%d+)", function(head, number) return head .. number:reverse() end)
        or data
    end)
    finally(function() between.close() end)
    local peer, watch = support.process(store, nil, between.dsn), support.process(store)
    peer:call("handles.lock = assert(manager:acquire(...))", R1)
    root "ALTER ROLE little RESET default_transaction_read_only"
    watch:call "support.sleep(1.1)" -- a younger session is believed
    local TO_LEASE = "local ok, err = handles.lock:to_lease { ttl = 60 } return ok, err and err.code, err and err.message"
    local ok, code, message = peer:call(TO_LEASE)
    assert.is_nil(ok)
    assert.equal("timeout", code)
    assert.truthy(message:find("another server", 1, true), message)
    strange = false
    assert.is_true((peer:call(TO_LEASE)))
    peer:close() -- the role goes
  end)

  it("does not mind another default isolation", function()
    local dsn = role("ALTER ROLE little SET default_transaction_isolation = 'serializable'",
      "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local one, two = assert(open(nil, dsn)), assert(open(nil, dsn))
    local handle = assert(lease(one, R1, SHORT))
    for _ = 1, 10 do assert.is_true(handle:refresh()) end
    assert.is_true(assert(two:acquire(R1, { ttl = LONG })):release { confirm = true })
    assert_code("lost", handle:refresh())
  end)

  it("fails, and shares nothing, when its tables are dropped or altered", function()
    local manager, other = open(), open()
    local handle = assert(lease(manager, R1))
    local session = assert(other:acquire(R2))
    assert.is_true(session:release { confirm = true })
    root "ALTER TABLE public.hier_lock_leases RENAME COLUMN till TO until"
    assert_code("not_provisioned", handle:refresh())
    local ok, err = other:acquire(R1, { timeout = 0 })
    assert.is_nil(ok)
    assert.truthy(err.code == "not_provisioned" or err.code == "connection", err.code)
    root(DROP)
    ok, err = handle:check()
    assert.is_nil(ok)
    assert.truthy(err.code == "not_provisioned" or err.code == "lost", err.code)
    provide()
    assert(assert(other:acquire(R1, { timeout = 0 })):release { confirm = true })
    assert.is_true(assert(lease(other, R1)):release { confirm = true })
    assert_code("lost", handle:refresh())
  end)

  -- Where an administrator, or a trigger of his, turns it on for all tables.
  it("refuses what row-level security would hide", function()
    local dsn = role("GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO little",
      "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO little")
    local handle = assert(lease(open(), R1))
    local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    local connection = assert(support.luasql_postgresql():connect(database, user, password, host, tonumber(port)))
    finally(function() connection:close() end)
    for _, name in ipairs { "hier_lock_leases", "hier_lock_lease_rows" } do
      root("ALTER TABLE public.%s ENABLE ROW LEVEL SECURITY", name)
      local manager = assert(open(nil, dsn))
      for _ = 1, 2 do assert_code("not_provisioned", manager:acquire(R1, { timeout = 0 })) end
      assert.matches("row%-level security", assert_code("not_provisioned", lease(manager, R1)).message)
      assert_code("not_provisioned", manager:revoke { target = R1 })
      assert(connection:execute "BEGIN")
      assert_code("store", require("hierlock.attach").luasql(connection):acquire(R1, { timeout = 0 }))
      assert(connection:execute "ROLLBACK")
      root("ALTER TABLE public.%s DISABLE ROW LEVEL SECURITY", name)
    end
    assert.is_true(handle:refresh())
  end)

  it("refuses tables whose gate was dropped, until they are provisioned again", function()
    local early = open()
    assert(early:acquire(R2)):release { confirm = true }
    local handle = assert(lease(open(), R1))
    root "DROP SEQUENCE public.hier_lock_gate"
    assert_code("not_provisioned", early:acquire(R1, { timeout = 0 }))
    local manager, err = open()
    assert_code("not_provisioned", manager, err)
    local _, status = support.run('arg = { [0] = "hierlock", "provision", "--leases", "--grant-to", "PUBLIC" } ' ..
      'require "hierlock.command.main"', "HIERLOCK_DSN='" .. store.root_dsn .. "'")
    assert.equal(0, status)
    assert_code("timeout", early:acquire(R1, { timeout = 0 }))
    assert.is_true(handle:release { confirm = true })
  end)

  it("takes a gate without a value for an open one, as after a restore of the schema alone", function()
    local early = open()
    assert(early:acquire(R2)):release { confirm = true }
    root "ALTER SEQUENCE public.hier_lock_gate RESTART"
    assert(assert(early:acquire(R2)):release { confirm = true })
    local handle = assert(lease(open(), R1))
    root "ALTER SEQUENCE public.hier_lock_gate RESTART"
    assert_code("timeout", early:acquire(R1, { timeout = 0 }))
    assert_code("timeout", open():acquire(R1, { timeout = 0 }))
    assert_code("timeout", lease(open(), R1))
    assert.is_true(handle:release { confirm = true })
  end)

  -- ------------------------------------------------------------ the command

  local function command(arguments, dsn)
    return support.run([[
      arg = { [0] = "hierlock", ]] .. arguments .. [[ }
      require "hierlock.command.main"
    ]], "HIERLOCK_DSN='" .. dsn .. "'")
  end

  it("is provisioned by the command, for a role", function()
    local dsn = role()
    root(DROP)
    local output, status = command('"verify"', store.root_dsn)
    assert.matches("no tables for leases", output)
    assert.equal(0, status)
    output, status = command('"provision", "--leases", "--dry-run"', store.root_dsn)
    assert.matches("CREATE TABLE.*COMMIT;\n$", output)
    assert.equal(0, status)
    output, status = command('"provision", "--leases"', dsn)
    assert.matches("permission denied", output)
    assert.is_true(status ~= 0)
    for _ = 1, 2 do
      output, status = command('"provision", "--leases", "--grant-to", "little"', store.root_dsn)
      assert.matches("has tables for leases, which little may use\n$", output)
      assert.equal(0, status)
    end
    local manager = assert(open(nil, dsn))
    local handle = assert(lease(manager, R1))
    assert.equal(0, select(2, command('"provision", "--leases"', store.root_dsn))) -- closes no gate
    assert_code("timeout", assert(open(nil, dsn)):acquire(R1, { timeout = 0 }))
    assert.is_true(handle:release { confirm = true })
    output, status = command('"verify"', dsn)
    assert.matches("it has tables for leases\n$", output)
    assert.equal(0, status)
    root "DROP TABLE public.hier_lock_lease_rows"
    output, status = command('"verify"', store.root_dsn)
    assert.matches("some of the tables for leases are missing", output)
    assert.equal(1, status)
  end)

  -- ------------------------------------------- in transactions of the program's

  it("keeps out who has attached, and who locks by the statement of a plan", function()
    local manager = open()
    local plan = hierlock.plan { R1 }
    local one = support.foreign(store)
    local handle = assert(lease(manager, R1))
    one:query "BEGIN"
    assert.equal("not_provisioned", select(2, plan:verify(#one:query(plan:sql "postgresql"))).code)
    one:query "ROLLBACK"
    local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    local connection = assert(support.luasql_postgresql():connect(database, user, password, host, tonumber(port)))
    local locks = require("hierlock.attach").luasql(connection)
    finally(function() connection:close() end)
    for _, timeout in ipairs { 0, 0.1 } do
      assert(connection:execute "BEGIN")
      assert_code("timeout", locks:acquire(R1, { timeout = timeout }))
      assert(connection:execute "ROLLBACK")
    end
    assert(connection:execute "BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert_code("store", locks:acquire(R1, { timeout = 0 }))
    assert(connection:execute "ROLLBACK")
    assert.is_true(handle:release { confirm = true })
    assert(connection:execute "BEGIN")
    assert(locks:acquire(R1, { timeout = 0 }))
    assert_code("timeout", lease(manager, R1))
    assert(connection:execute "ROLLBACK")
  end)

  -- ---------------------------------------------------------------- trouble

  it("bears an end for ever, and one before all times, that somebody has written", function()
    local manager, other = open(), open()
    local handle = assert(lease(manager, R1))
    root "UPDATE public.hier_lock_leases SET till = 'infinity'"
    assert_code("timeout", other:acquire(R1, { timeout = 0 }))
    assert.equal(1, #other:leases())
    assert.is_true(handle:check())
    root "UPDATE public.hier_lock_leases SET till = '-infinity'"
    assert.equal(0, #other:leases())
    assert_code("lost", handle:check())
    assert.is_true(assert(other:acquire(R1, { timeout = 0 })):release { confirm = true })
  end)

  it("keeps nobody much longer than his time while somebody has its tables locked", function()
    local manager, peer = open(), support.process(store)
    local handle = assert(lease(manager, R1))
    assert(assert(manager:acquire(R2)):release { confirm = true }) -- it looks in the same trip from now on
    local other = support.sql_connection(store.root_dsn)
    finally(function() other:close() end)
    other:query "BEGIN"
    other:query "LOCK TABLE public.hier_lock_leases, public.hier_lock_lease_rows"
    for _, options in ipairs { { timeout = 0 }, { timeout = 0, ttl = LONG }, { timeout = 0.3 }, { timeout = 0.3, ttl = LONG } } do
      local start = support.now()
      assert_code("timeout", manager:acquire(R2, options))
      assert.is_true(support.now() - start < 5)
    end
    assert_code("timeout", handle:refresh())
    peer:acquire("lock", "acquire", R2, { timeout = 30, ttl = LONG })
    support.sleep(1.5) -- longer than a try
    assert.is_true(peer:stays_blocked())
    other:query "ROLLBACK"
    assert.is_true((peer:result()))
    assert.is_true(handle:refresh())
  end)

  -- A role that may make functions and operators in a schema of the path can offer others of the same names.
  it("is seen, whatever the path of the program that has attached leads to", function()
    root "CREATE SCHEMA evil"
    local connection
    finally(function()
      if connection then connection:close() end
      root "DROP SCHEMA evil CASCADE"
    end)
    for _, sql in ipairs {
      "FUNCTION evil.to_regclass(text) RETURNS regclass LANGUAGE sql AS 'SELECT NULL::regclass'",
      "FUNCTION evil.pg_sequence_last_value(regclass) RETURNS int8 LANGUAGE sql AS 'SELECT 1::int8'",
      "FUNCTION evil.yes(int8,int4) RETURNS bool LANGUAGE sql AS 'SELECT true'",
      "FUNCTION evil.no(int8,int8) RETURNS bool LANGUAGE sql AS 'SELECT false'",
      "FUNCTION evil.no(uuid,uuid) RETURNS bool LANGUAGE sql AS 'SELECT false'",
      "OPERATOR evil.< (FUNCTION=evil.yes,LEFTARG=int8,RIGHTARG=int4)",
      "OPERATOR evil.= (FUNCTION=evil.no,LEFTARG=int8,RIGHTARG=int8)",
      "OPERATOR evil.= (FUNCTION=evil.no,LEFTARG=uuid,RIGHTARG=uuid)",
    } do root("CREATE %s", sql) end
    root "GRANT USAGE ON SCHEMA evil TO PUBLIC"
    local handle = assert(lease(open(), R1))
    local one = support.foreign(store)
    one:query "SET search_path=evil,pg_catalog"
    one:query "BEGIN"
    local plan = hierlock.plan { R1 }
    assert.equal("not_provisioned", select(2, plan:verify(#one:query(plan:sql "postgresql"))).code)
    one:query "ROLLBACK"
    local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    connection = assert(support.luasql_postgresql():connect(database, user, password, host, tonumber(port)))
    assert(connection:execute "SET search_path=evil,pg_catalog")
    for _, timeout in ipairs { 0, 0.1 } do
      assert(connection:execute "BEGIN")
      assert_code("timeout", require("hierlock.attach").luasql(connection):acquire(R1, { timeout = timeout }))
      assert(connection:execute "ROLLBACK")
    end
    assert.is_true(handle:check())
  end)

  it("that a session waits for is waited for no longer when that is ended, and nothing stays", function()
    local manager, other = open(), open()
    local handle = assert(lease(manager, R1))
    local peer = support.process(store)
    peer:start("local h, err = manager:acquire(..., { timeout = 5, ttl = 60 }) return h, err and err.code", R1)
    support.wait_for_waiters(store, R1)
    peer:signal "sigkill"
    assert.is_true(handle:release { confirm = true })
    assert(assert(other:acquire(R1)):release { confirm = true })
    assert.equal(0, #manager:leases())
  end)

  it("that is over is waited for while there is no connection with which to delete it", function()
    assert(lease(open(), R1, 1.5, { auto_release = false }))
    local peer = support.process(store)
    peer:acquire("lock", "acquire", R1, { timeout = 20 })
    support.wait_for_waiters(store, R1)
    root "ALTER ROLE testuser CONNECTION LIMIT 1"
    finally(function() root "ALTER ROLE testuser CONNECTION LIMIT -1" end)
    support.wait_until(function()
      return root("SELECT count(*) FROM hier_lock_leases WHERE till > clock_timestamp()")[1][1] == "0"
    end, "its end")
    support.sleep(0.3)
    assert.equal("1", root("SELECT count(*) FROM hier_lock_leases")[1][1])
    root "ALTER ROLE testuser CONNECTION LIMIT -1"
    assert.is_true((peer:result()))
  end)

  -- ------------------------------------------------------------------ costs

  it("costs one trip where nobody is in the way; a session beside it, too", function()
    local between = proxy.open(store)
    finally(function() between.close() end)
    local peer = support.process(store, nil, between.dsn)
    peer:call "for _ = 1, 2 do manager:acquire({ 'u2', 'a', 'r' }, { ttl = 60 }):release { confirm = true } end"
    between.take()
    local turns = between.turns
    peer:call "handles.one = assert(manager:acquire({ 'u2', 'a', 'r' }, { ttl = 60 }))"
    between.take()
    assert.equal(turns + 1, between.turns)
    peer:call "assert(handles.one:refresh())"
    between.take()
    assert.equal(turns + 2, between.turns)
    peer:call "handles.one = assert(manager:import(assert(handles.one:export())))"
    between.take()
    assert.equal(turns + 4, between.turns) -- who has it; and from that holder
    -- The gate is open: the look is in the trip, from the second time on.
    peer:call "for _ = 1, 3 do manager:acquire({ 'u3', 'a', 'r' }):release { confirm = true } end"
    between.take()
    turns = between.turns
    peer:call "handles.two = assert(manager:acquire { 'u3', 'a', 'r' })"
    between.take()
    assert.equal(turns + 1, between.turns)
  end)

  -- The ancestor has a shared row for each of them.
  it("below a node with thousands of leases costs a lock there, and a lease, no more than below one with one", function()
    local manager = assert(open())
    local held = assert(lease(manager, R1))
    local function best(options)
      local shortest = math.huge
      for _ = 1, 300 do
        local start = support.now()
        local handle = assert(manager:acquire({ "u1", "a2", "r1" }, options))
        shortest = math.min(shortest, support.now() - start)
        assert(handle:release { confirm = true })
      end
      return shortest
    end
    local session, short = best {}, best { ttl = LONG }
    root [[WITH one AS MATERIALIZED (SELECT * FROM public.hier_lock_leases),
      made AS (SELECT gen_random_uuid() AS id FROM generate_series(1, 9600)),
      rows AS (INSERT INTO public.hier_lock_lease_rows SELECT r.key, r.exclusive, made.id
        FROM public.hier_lock_lease_rows r, made WHERE NOT r.exclusive)
      INSERT INTO public.hier_lock_leases SELECT made.id, holder, secret, till, token, shared, owner, path, label, application, host, pid, since
        FROM one, made]]
    for what, before in pairs { session = session, lease = short } do
      local after, tries = math.huge, 0 -- a busy machine may need some
      repeat
        after, tries = math.min(after, best(what == "lease" and { ttl = LONG } or {})), tries + 1
      until after < 1.5 * before or tries == 10
      assert.is_true(after < 1.5 * before, ("%s: %.2f ms, %.2f before"):format(what, after * 1000, before * 1000))
    end
    local looked = support.now()
    assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
    assert.is_true(support.now() - looked < 0.2)
    assert.is_true(held:check())
  end)

  it("leaves the gate open as long as there are any, and no longer than the next sweep", function()
    local function gate() return root("SELECT last_value FROM public.hier_lock_gate")[1][1] end
    local handle = assert(lease(open(), R1))
    assert.equal("2", gate())
    open():leases()
    assert.equal("2", gate())
    assert.is_true(handle:release { confirm = true })
    open():leases()
    assert.equal("1", gate())
    -- The gate opens again, also for sessions that are connected already.
    local other = open()
    assert(other:acquire(R1)):release { confirm = true }
    support.keep(assert(lease(open(), R1)))
    assert.equal("2", gate())
    assert_code("timeout", other:acquire(R1, { timeout = 0 }))
  end)

  it("forgets what has ended long ago, and who revoked it", function()
    local manager = open()
    support.keep(assert(lease(manager, R1)))
    support.keep(assert(lease(manager, R2)))
    assert.equal(1, manager:revoke { target = R2 })
    root "UPDATE public.hier_lock_leases SET till = till - interval '2 hours', revoked = revoked - interval '2 hours'"
    open():leases()
    assert.equal("0", root("SELECT count(*) FROM public.hier_lock_leases")[1][1])
    assert.equal("0", root("SELECT count(*) FROM public.hier_lock_lease_rows")[1][1])
  end)

  it("is kept for all of its time from the grant, however long the transaction has waited before", function()
    local manager, other = open(), open()
    local session = assert(other:acquire(R1))
    local peer = support.process(store)
    peer:start("handles.h = assert(manager:acquire(..., { ttl = 3, timeout = 10 }))", R1)
    support.wait_for_waiters(store, R1)
    support.sleep(1.5)
    assert.is_true(session:release { confirm = true })
    peer:result()
    local left = manager:leases()[1].remaining
    assert.is_true(left > 1.8 and left <= 3, left)
  end)

  -- The releases go together, and the server gives up the whole statement.
  it("that were released before exit() are gone, though a stranger keeps the record of one locked", function()
    local peer, stranger = support.process(store), support.foreign(store)
    peer:call "for i = 1, 8 do handles[i] = assert(manager:acquire({ 'u1', 'a1', 'r' .. i }, { ttl = 60 })) end"
    stranger:query "BEGIN"
    stranger:query "SELECT 1 FROM public.hier_lock_leases WHERE path='u1/a1/r8' FOR UPDATE"
    peer:start "for i = 1, 8 do handles[i]:release() end os.exit(0)"
    support.wait_until(function()
      return root("SELECT count(*) FROM public.hier_lock_leases WHERE path<>'u1/a1/r8'")[1][1] == "0"
    end, "the others are gone")
    stranger:query "ROLLBACK"
  end)

  -- The server grants a lock, and ends the wait for it, in either order: here it is stopped between.
  it("leaves no lead behind in a session whose wait ends when that is granted", function()
    local handle = assert(lease(open(), U1))
    local first, second = support.process(store), support.process(store)
    first:acquire("lock", "acquire", { "u1", "a1", "n1" }, { timeout = 15 })
    support.wait_for_waiters(store, U1)
    second:acquire("lock", "acquire", { "u1", "a1", "n2" }, { timeout = 1 })
    local backend = support.wait_until(function()
      local rows = root "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND NOT granted"
      return rows[1] and tonumber(rows[1][1])
    end, "who waits for the lead")
    local uv = require "luv"
    local start = support.now()
    uv.kill(backend, "sigstop")
    finally(function() uv.kill(backend, "sigcont") end)
    assert.is_true(handle:release { confirm = true })
    assert.is_true((first:result()))
    support.sleep(math.max(0, start + 1.02 - support.now())) -- the server's clock for the wait has run out
    uv.kill(backend, "sigcont")
    second:result()
    assert.equal("0", root("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2")[1][1])
    assert.equal("1", root("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", backend)[1][1])
  end)

  it("above many waiters is looked at by one of them", function()
    local handle = assert(lease(open(), U1))
    local peers = {}
    for i = 1, 5 do
      peers[i] = support.process(store)
      peers[i]:acquire("lock", "acquire", { "u1", "a1", "n" .. i }, { timeout = 15 })
    end
    support.wait_until(function()
      return root("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND NOT granted")[1][1] == "4"
    end, "four who wait for the fifth")
    assert.equal("1", root("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted")[1][1])
    assert.is_true(handle:release { confirm = true })
    local start = support.now()
    for _, peer in ipairs(peers) do assert.is_true((peer:result())) end
    assert.is_true(support.now() - start < 1.5)
    assert.equal("0", root("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2")[1][1])
    assert.equal(5, #open():holders(A1))
  end)

  -- --------------------------------------------------------------- the bell

  local function is_marked()
    return root("SELECT count(*) FROM hier_lock_leases WHERE reason IS NOT NULL AND revoked IS NULL")[1][1] == "1"
  end

  -- Waits until a waiter listens for the end of a lease, and polls as seldom as it ever does; then for its next poll.
  local function wait_for_the_marked()
    local function polled()
      return root([[SELECT max(query_start) FROM pg_stat_activity
        WHERE query LIKE '%%hier_lock_lease_rows%%' AND pid <> pg_backend_pid()]])[1][1]
    end
    support.wait_until(is_marked, "a mark", 30) -- a busy server takes no ear at first
    support.sleep(0.3)
    local last = polled()
    support.wait_until(function() return polled() ~= last end, "a poll")
  end

  -- The seconds from the end of a lease to the return of its waiter: sorted times.
  local function hand_over(peers, mode, finish, silent)
    local times = {}
    for i = 1, 5 do
      peers.holder:call([[
        local target, shared = ...
        handles.one = assert(manager:acquire(target, { ttl = 60, mode = shared and "update" or nil }))
        if shared then assert(handles.one:upgrade()) end]], R1, mode == "shared")
      peers.waiter:start([[
        local target, mode = ...
        local handle = assert(manager:acquire(target, { timeout = 60, ttl = 60, mode = mode }))
        local now = support.now()
        assert(handle:release { confirm = true })
        return now]], R1, mode)
      wait_for_the_marked()
      if silent then root "UPDATE hier_lock_leases SET reason = NULL" end
      local ended = peers.holder:call("local now = support.now() " .. finish .. " return now")
      times[i] = assert(peers.waiter:result()) - ended
      peers.holder:call "handles.one:release()"
    end
    table.sort(times)
    return times
  end

  -- As an older program ends a lease, without a notification, the waiter finds out by its next poll.
  it("that ends wakes the waiter that listens", function()
    local peers = { holder = support.process(store), waiter = support.process(store) }
    local silent = hand_over(peers, "exclusive", "handles.one:release()", true)[3]
    for _, one in ipairs {
      { "exclusive", "handles.one:release()" },
      { "exclusive", "assert(handles.one:release { confirm = true })" },
      { "exclusive", "assert(manager:revoke { target = { 'u1', 'a1', 'r1' } })" },
      { "shared", "assert(handles.one:downgrade())" },
    } do
      local rung = hand_over(peers, one[1], one[2])[2] -- a busy machine delays some
      assert.is_true(rung < silent / 2, ("%s: %.1f ms, %.1f without"):format(one[2], rung * 1000, silent * 1000))
    end
  end)

  it("costs the server few queries while it is waited for", function()
    local handle = assert(lease(open(), R1))
    local between = proxy.open(store)
    finally(function() between.close() end)
    local peer, watch = support.process(store, nil, between.dsn), support.process(store)
    peer:start("return manager:acquire(..., { timeout = 60, ttl = 60 }):release { confirm = true }", R1)
    support.wait_until(function()
      watch:call "support.sleep(0.1)" -- the proxy works meanwhile
      return is_marked()
    end, "a mark", 30)
    watch:call "support.sleep(1)"
    between.take()
    watch:call "support.sleep(2)"
    local found = between.take()
    assert.is_true(#found > 5 and #found <= 30, #found .. " commands")
    assert(handle:release { confirm = true })
    assert(peer:result())
  end)

  it("is waited for on one more connection, which the manager keeps for its next waiter", function()
    local function connections()
      return tonumber(root("SELECT count(*) FROM pg_stat_activity WHERE usename = 'testuser'")[1][1])
    end
    local manager = assert(open())
    local peer = support.process(store)
    peer:call("assert(manager:acquire(..., { ttl = 60 })):release { confirm = true }", R1)
    local before
    for i = 1, 3 do
      local handle = assert(lease(manager, R1))
      before = before or connections()
      peer:start("return manager:acquire(..., { timeout = 60, ttl = 60 }):release { confirm = true }", R1)
      wait_for_the_marked()
      local function has_one_more() return connections() == before + 1 end
      support.wait_until(has_one_more, "one more connection")
      assert(handle:release { confirm = true })
      assert.is_true((peer:result()), i)
      support.wait_until(has_one_more, "one more connection")
    end
    peer:close()
    support.wait_until(function() return connections() < before end, "the end of its connections")
  end)

  it("is polled for where no connection can be had, or this role may not notify", function()
    local manager = assert(open())
    finally(function()
      root "ALTER ROLE testuser CONNECTION LIMIT -1"
      root "GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO PUBLIC"
    end)
    local handle, peer
    local function begin()
      handle = assert(lease(manager, R1))
      peer = support.process(store)
      peer:call("manager:acquire({ 'other' }, { ttl = 60 }):release { confirm = true }")
    end
    local function wait_through(statement)
      root(statement)
      peer:start("return manager:acquire(..., { timeout = 60, ttl = 60 }):release { confirm = true }", R1)
      support.sleep(0.3)
      assert.equal("0", root("SELECT count(*) FROM hier_lock_leases WHERE reason IS NOT NULL")[1][1])
    end
    begin()
    wait_through "ALTER ROLE testuser CONNECTION LIMIT 1"
    assert.is_true(handle:release { confirm = true })
    assert.is_true((peer:result()))
    root "ALTER ROLE testuser CONNECTION LIMIT -1"
    root "REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC"
    manager = assert(open())
    begin()
    wait_through "SELECT"
    assert.is_true(handle:release { confirm = true })
    assert.is_true((peer:result()))
  end)

  it("is polled for, and its ear tried again seldom, while the server answers no new connection", function()
    local between = proxy.open(store)
    finally(function() between.close() end)
    between.delay(300) -- connecting takes a second and a half
    local peer, watch = support.process(store, nil, between.dsn), support.process(store)
    peer:call("assert(manager:acquire(..., { ttl = 60 })):release { confirm = true }", R1)
    between.delay(nil)
    between.drip(nil, 3600000)
    local before = #between.connections
    for i = 1, 2 do
      local handle = assert(lease(open(), R1))
      peer:start("assert(manager:acquire(..., { timeout = 60, ttl = 60 })):release() return support.now()", R1)
      watch:call "support.sleep(1.5)"
      local ended = support.now()
      assert(handle:release { confirm = true })
      watch:call "support.sleep(0.3)"
      assert.is_true(peer:result() - ended < 5)
      local tried = #between.connections - before
      assert.is_true(tried >= i and tried <= 8, tried .. " connections")
    end
    local handle = assert(lease(open(), R1))
    peer:start([[
      local now = support.now()
      local got, err = manager:acquire(..., { timeout = 0.5, ttl = 60 })
      return err.code, support.now() - now]], R1)
    watch:call "support.sleep(1)"
    local code, took = peer:result()
    assert.equal("timeout", code)
    assert.is_true(took < 2, took)
    assert(handle:release { confirm = true })
  end)

  it("is listened for again, seldom, after its ear was cut off", function()
    local LISTENS = "usename = 'testuser' AND query LIKE '%%LISTEN%%'"
    local handle = assert(lease(open(), R1))
    local peer = support.process(store)
    peer:start("assert(manager:acquire(..., { timeout = 30, ttl = 60 })):release() return support.now()", R1)
    local last
    for _ = 1, 2 do
      wait_for_the_marked()
      local ears = root("SELECT pid, extract(epoch FROM backend_start) FROM pg_stat_activity WHERE " .. LISTENS)
      assert.equal(1, #ears)
      assert.is_true(not last or ears[1][2] - last > 0.4)
      root "UPDATE hier_lock_leases SET reason = NULL"
      last = root("SELECT extract(epoch FROM clock_timestamp())")[1][1]
      root("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE " .. LISTENS)
    end
    local ended = support.now()
    assert(handle:release { confirm = true })
    assert.is_true(peer:result() - ended < 5)
  end)

  it("is listened for by the parent alone after a fork, until its manager closes", function()
    local SOCKETS = [[
      local uv, n = require "luv", 0
      local names = assert(uv.fs_scandir("/proc/self/fd"))
      for name in function() return uv.fs_scandir_next(names) end do
        if (uv.fs_readlink("/proc/self/fd/" .. name) or ""):find "^socket:" then n = n + 1 end
      end
    ]]
    local handle, peer = assert(lease(open(), R1)), support.process(store)
    local own = peer:call(SOCKETS .. "return n") - 1 -- and the manager's first connection
    peer:call("handles.pending = assert(manager:start(..., { timeout = 60, ttl = 60 }))", R1)
    wait_for_the_marked()
    local status = peer:call([[
      local fork = require "hierlock_spec.fork"
      local pid = fork.fork()
      if pid > 0 then return (fork.wait(pid)) end
    ]] .. SOCKETS .. [[
      local target, own = ...
      local got, err = manager:acquire(target, { timeout = 0.5, ttl = 60 })
      manager:close()
      os.exit(n == own and not got and err.code == "timeout" and 0 or 1)
    ]], R1, own)
    assert.equal(0, status)
    peer:start "local lock = assert(handles.pending:wait(20)) return support.now(), lock:release { confirm = true }"
    local ended = support.now()
    assert(handle:release { confirm = true })
    assert.is_true(peer:result() - ended < 5)
    assert.is_true(peer:call(SOCKETS .. "return n") > own + 1)
    assert.equal(own, peer:call("manager:close()" .. SOCKETS .. "return n"))
  end)

  -- The lock of the whole server that a notification takes is held here by one that awaits a standby.
  it("is released though another program's notification takes long", function()
    local other = support.foreign(store)
    finally(function()
      root "ALTER SYSTEM RESET synchronous_standby_names"
      root "SELECT pg_reload_conf()"
      root "ALTER ROLE testuser RESET synchronous_commit"
      root "SET synchronous_commit TO DEFAULT"
    end)
    root "SET synchronous_commit = local"
    root "ALTER ROLE testuser SET synchronous_commit = local"
    local holder, peer = support.process(store), support.process(store)
    holder:call("handles.one = assert(manager:acquire(..., { ttl = 60 }))", R1)
    peer:start("return manager:acquire(..., { timeout = 60, ttl = 60 }):release { confirm = true }", R1)
    wait_for_the_marked()
    other:query "SET synchronous_commit = on"
    root "ALTER SYSTEM SET synchronous_standby_names = 'none'"
    root "SELECT pg_reload_conf()"
    support.wait_until(function()
      other:send "CREATE TEMP TABLE written ();DROP TABLE written;NOTIFY other"
      return other:stays_blocked() or not other:result()
    end, "a notification that awaits a standby")
    holder:start "return assert(handles.one:release { confirm = true })"
    support.sleep(1.5)
    root "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE query LIKE '%%NOTIFY other' AND pid <> pg_backend_pid()"
    assert.is_true((holder:result()))
    assert.is_true((peer:result()))
  end)

  it("is released at the second try where this role may notify no longer", function()
    local manager = assert(open())
    local handle = assert(lease(manager, R1))
    finally(function() root "GRANT EXECUTE ON FUNCTION pg_notify(text, text) TO PUBLIC" end)
    root "REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC"
    local err = assert_code("not_provisioned", handle:release { confirm = true })
    assert.is_truthy(err.message:find("pg_notify", 1, true), err.message)
    assert.is_true(handle:release { confirm = true })
  end)
end)
