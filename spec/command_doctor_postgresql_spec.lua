--- `hierlock doctor` on PostgreSQL, as an operator runs it: see command_doctor_spec.lua.

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local doctor = require "spec.support.doctor"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"

local run, assert_status = program.run, program.assert_status
local at_end, examine, status_of, assert_finding, shell, follow =
  doctor.at_end, doctor.examine, doctor.status_of, doctor.assert_finding, doctor.shell, doctor.follow
local unpack = table.unpack or unpack -- luacheck: ignore

after_each(doctor.clean_up)

support.on_postgresql(function(store)
  local database = (store.bare_dsn or ""):match "/([^/?]*)$"
  local root
  local obeying, all_obeyed = doctor.obedience("postgresql", {})

  teardown(all_obeyed)
  before_each(function() root = store.root() or pending "no administrator here" end)

  local function sql(statement) store.root():query("%s", statement) end

  local function restart(options) store.command("restart", options) end

  local function reset()
    store.root():query "ALTER SYSTEM RESET ALL"
    store.command "restart"
  end

  -- Checks that the finding is named, follows its lines, and checks that it is gone.
  local function assert_mended(check, status, breaks, mends)
    at_end(function()
      root = store.root()
      for _, statement in ipairs(mends) do root:query("%s", statement) end
    end)
    for _, statement in ipairs(breaks) do root:query("%s", statement) end
    local found
    support.wait_until(function() -- pg_reload_conf() only asks
      found = examine(store.dsn)
      return status_of(found, check) == status
    end, check .. " " .. status .. ": " .. json.encode(found or {}))
    assert.is_true(follow(store.dsn, found[check], sql) > 0)
    local verdict
    support.wait_until(function()
      found = examine(store.dsn)
      verdict = status_of(found, check)
      return verdict == "ok" or verdict == "absent"
    end, check .. " to be mended")
    assert.not_equal("wrong", found.verdict, json.encode(found))
  end

  local function alter(name, value)
    return { ("ALTER SYSTEM SET %s = %s"):format(name, value), "SELECT pg_reload_conf()" },
           { "ALTER SYSTEM RESET " .. name, "SELECT pg_reload_conf()" }
  end

  describe("a setting that is wrong is named, and put right by the line:", function()
    for _, case in ipairs {
      { "deadlock_timeout", "'1min'", "deadlock detection" },
      { "track_activities", "off", "track_activities" },
      { "idle_session_timeout", "'1min'", "time-outs", "ALTER ROLE %s SET idle_session_timeout = 0;" },
    } do
      local name, value, check, key = unpack(case)
      it(name, obeying(key and { key } or { "set " .. name, "ALTER SYSTEM SET %s = %s;", "SELECT pg_reload_conf();" }, function()
        local breaks, mends = alter(name, value)
        if name == "idle_session_timeout" then mends[3] = "ALTER ROLE testuser RESET idle_session_timeout" end
        assert_mended(check, "warning", breaks, mends)
      end))
    end
  end)

  it("names a server that forgets what it has answered, or clears nothing away, and the lines mend that", obeying({
    { 'set name, "on"', "fsync", "full_page_writes" }, "set synchronous_commit", "set autovacuum",
    "on the command line that starts the server, which goes before ALTER SYSTEM: -c %s=%s",
  }, function()
    at_end(reset)
    root:query "ALTER SYSTEM SET synchronous_commit = off"
    store.command "restart" -- with the specs' own settings
    for _, round in ipairs { "file", "command line" } do
      local found = examine(store.dsn)
      assert_finding("warning", found, "durability")
      assert.matches("fsync = off, full_page_writes = off, synchronous_commit = off", found.durability.found, 1, true)
      assert_finding("warning", found, "autovacuum")
      if round == "file" then
        follow(store.dsn, found.durability, sql)
        follow(store.dsn, found.autovacuum, sql)
        support.wait_until(function() return status_of(examine(store.dsn), "autovacuum") == "absent" end, "the settings to be read")
        assert_finding("ok", examine(store.dsn), "durability")
        store.command("restart", "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c autovacuum=off")
      else -- where ALTER SYSTEM would change nothing
        local mend = {}
        for _, check in ipairs { "durability", "autovacuum" } do
          for _, line in ipairs(found[check].mend) do
            assert.is_nil(line:find "^ALTER")
            if not line:find "^then" then mend[#mend + 1] = line end
          end
        end
        mend[#mend + 1] = found.durability.mend[#found.durability.mend]
        follow(store.dsn, { mend = mend }, sql, restart)
      end
    end
    local found = examine(store.dsn)
    assert_finding("ok", found, "durability")
    assert_finding("absent", found, "autovacuum")
  end))

  it("that ceases to answer keeps nobody waiting", function()
    local between
    between = proxy.open(store, function(data) return between.sent:find("pg_settings", 1, true) and "" or data end)
    at_end(between.close)
    local began = uv.hrtime()
    local found = examine(between.dsn, "--quick")
    assert.is_true((uv.hrtime() - began) / 1e9 < 25, "it waited for too long")
    assert_finding("wrong", found, "reached")
    assert_finding("absent", found, "opens")
  end)

  describe("what the role lacks is named, and granted by the line:", function()
    -- To all roles, as before, and not to this one by itself, as the lines do.
    local leases = { "GRANT ALL ON public.hier_lock_leases TO PUBLIC", "GRANT ALL ON SEQUENCE public.hier_lock_gate TO PUBLIC",
      "REVOKE ALL ON public.hier_lock_leases, public.hier_lock_lease_rows, public.hier_lock_gate FROM testuser" }
    local limit, no_limit = { "ALTER ROLE testuser CONNECTION LIMIT 10" }, { "ALTER ROLE testuser CONNECTION LIMIT -1" }
    local lock = "FUNCTION pg_advisory_xact_lock(bigint)"
    for name, case in pairs {
      ["a function that locks"] = { "privileges", "GRANT EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint), " ..
          "pg_try_advisory_xact_lock_shared(bigint), pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint) TO %s;",
        { "REVOKE EXECUTE ON " .. lock .. " FROM PUBLIC" },
        { "GRANT EXECUTE ON " .. lock .. " TO PUBLIC", "REVOKE EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint), " ..
          "pg_try_advisory_xact_lock_shared(bigint), pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint) FROM testuser" } },
      ["the sequence of tokens"] = { "tokens", "GRANT USAGE ON SEQUENCE public.hier_lock_token TO %s;",
        { "CREATE SEQUENCE public.hier_lock_token" }, { "DROP SEQUENCE public.hier_lock_token" } },
      ["the tables of leases"] = { "tables of leases",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO %s;",
        { "REVOKE ALL ON public.hier_lock_leases FROM PUBLIC" }, leases },
      ["the gate of leases"] = { "tables of leases", "GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO %s;",
        { "REVOKE ALL ON SEQUENCE public.hier_lock_gate FROM PUBLIC" }, leases },
      ["connections"] = { "connections of the role", "ALTER ROLE %s CONNECTION LIMIT -1;", limit, no_limit },
      ["connections to the database"] = { "connections of the database", "ALTER DATABASE %s CONNECTION LIMIT -1;",
        { ("ALTER DATABASE %s CONNECTION LIMIT 10"):format(database) }, { ("ALTER DATABASE %s CONNECTION LIMIT -1"):format(database) } },
    } do
      it(name, obeying({ case[2] }, function() assert_mended(case[1], "wrong", case[3], case[4]) end))
    end

    -- A role with the rights that each role has, until the end of the test; returns its DSN.
    local function ill_role()
      at_end(function()
        root:query "DROP OWNED BY hierlock_ill"
        root:query "DROP ROLE hierlock_ill"
      end)
      root:query "CREATE ROLE hierlock_ill LOGIN PASSWORD 'ill'"
      return (store.dsn:gsub("//.-@", "//hierlock_ill:ill@"))
    end

    it("the schema public", obeying({ "GRANT USAGE ON SCHEMA public TO %s;" }, function()
      local dsn = ill_role()
      at_end(function() root:query "GRANT USAGE ON SCHEMA public TO PUBLIC" end)
      root:query "REVOKE USAGE ON SCHEMA public FROM PUBLIC"
      local found = examine(dsn)
      assert_finding("warning", found, "schema public")
      assert_finding("wrong", found, "a lock")
      assert.same(found["schema public"].mend, found["a lock"].mend)
      assert.equal(1, follow(dsn, found["schema public"], sql))
      found = examine(dsn)
      assert_finding("absent", found, "schema public")
      assert_finding("ok", found, "a lock")
    end))

    it("what row-level security hides", obeying({ "ALTER ROLE %s BYPASSRLS;" }, function()
      local dsn = ill_role()
      at_end(function() root:query "ALTER TABLE public.hier_lock_leases DISABLE ROW LEVEL SECURITY" end)
      root:query "ALTER TABLE public.hier_lock_leases ENABLE ROW LEVEL SECURITY"
      local found = examine(dsn)
      assert_finding("wrong", found, "row-level security")
      -- A session looks at the tables where there may be leases.
      local refused = status_of(found, "a lock") == "ok" and "leases" or "a lock"
      assert_finding("wrong", found, refused)
      assert.same(found["row-level security"].mend, found[refused].mend)
      assert.equal(1, follow(dsn, found["row-level security"], sql))
      found = examine(dsn)
      assert_finding("absent", found, "row-level security")
      assert_finding("ok", found, "leases")
    end))
  end)

  it("names tables of leases that are not whole, or that a quorum lacks; with none it tries no lease, and makes none", obeying({
    "hierlock provision --leases",
  }, function()
    at_end(function() support.lease_tables(store.root()) end)
    root:query "DROP TABLE public.hier_lock_leases"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "tables of leases")
    assert.same({ "hierlock provision --leases" }, found["tables of leases"].mend)
    assert_finding("absent", found, "leases")
    root:query "DROP TABLE public.hier_lock_lease_rows"
    root:query "DROP SEQUENCE public.hier_lock_gate"
    found = examine(store.root_dsn)
    assert.equal("ok", status_of(found, "tables of leases"))
    local of_role, of_root = examine("quorum:all;null:;" .. store.dsn), examine("quorum:all;null:;" .. store.root_dsn)
    assert_finding("wrong", of_role, "2: tables of leases")
    assert.same({ "for store 2: hierlock provision --leases" }, of_role["2: tables of leases"].mend)
    assert.equal("ok", status_of(of_root, "2: tables of leases"))
    assert.equal("f", root:query("SELECT to_regclass('public.hier_lock_leases') IS NOT NULL")[1][1])
    assert_status(0, run(store.root_dsn, "provision", "--leases", "--grant-to", "PUBLIC"))
    assert_finding("ok", examine(store.dsn), "leases")
    root:query "DROP INDEX public.hier_lock_lease_rows_exclusive"
    found = examine(store.dsn)
    assert_finding("warning", found, "indexes of leases")
    assert_finding("ok", found, "leases")
    assert.same({ "hierlock provision --leases" }, found["indexes of leases"].mend)
    assert.equal(1, follow(store.root_dsn, found["indexes of leases"], sql))
    assert_finding("absent", examine(store.dsn), "indexes of leases")
  end))

  it("compares connections and locks with the pools that are wanted, and the lines make room", obeying({
    "set max_connections", "set max_locks_per_transaction",
  }, function()
    local before = examine(store.dsn, "--processes", "7", "--pool-size", "70")
    assert_finding("ok", before, "max_connections")
    at_end(reset)
    root:query "ALTER SYSTEM SET max_connections = 30"
    root:query "ALTER SYSTEM SET max_locks_per_transaction = 10"
    store.command "restart"
    assert_finding("warning", examine(store.dsn, "--pool-size", "45"), "max_locks_per_transaction")
    local many = { "--processes", "3" }
    local found = examine(store.dsn, unpack(many))
    for _, check in ipairs { "max_locks_per_transaction", "max_connections" } do
      assert_finding("wrong", found, check)
      follow(store.dsn, found[check], sql, restart)
      assert_finding("ok", examine(store.dsn, unpack(many)), check)
    end
    store.command("restart", "-c max_connections=30 -c max_locks_per_transaction=10")
    found = examine(store.dsn, unpack(many))
    for _, check in ipairs { "max_locks_per_transaction", "max_connections" } do
      assert_finding("wrong", found, check)
      follow(store.dsn, found[check], sql, restart)
      assert_finding("ok", examine(store.dsn, unpack(many)), check)
    end
  end))

  it("names a server that has no connection left, and the line gives the role one", obeying({ "ALTER %s %s CONNECTION LIMIT -1;" }, function()
    at_end(function() store.root():query "ALTER ROLE testuser CONNECTION LIMIT -1" end)
    root:query "ALTER ROLE testuser CONNECTION LIMIT 0"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "reached")
    assert.equal(1, follow(store.dsn, found.reached, sql))
    assert_finding("ok", examine(store.dsn), "reached")
  end))

  it("names a server that has no connection left for any role, and its lines make room", function()
    at_end(reset)
    store.command("restart", "-c max_connections=12 -c superuser_reserved_connections=3")
    local list = {}
    at_end(function() for _, one in ipairs(list) do one:close() end end)
    local found
    support.wait_until(function()
      local ok, one = pcall(support.sql_connection, store.bare_dsn)
      if ok then list[#list + 1] = one end
      found = examine(store.dsn)
      return status_of(found, "reached") == "wrong"
    end, "a server without a connection left")
    assert.matches("raise max_connections", found.reached.mend[1])
    for _, one in ipairs(list) do one:close() end
    list = {}
    support.wait_until(function() return status_of(examine(store.dsn), "reached") == "ok" end, "connections to have ended")
  end)

  it("names locks of other roles that this one does not see, and the line shows them", obeying({ "GRANT pg_read_all_stats TO %s;" }, function()
    at_end(function() store.root():query "DROP ROLE IF EXISTS hierlock_blind" end)
    root:query "CREATE ROLE hierlock_blind LOGIN PASSWORD 'blind'"
    local blind = store.bare_dsn:gsub("//.-@", "//hierlock_blind:blind@")
    assert_finding("ok", examine(blind), "other roles")
    local manager = support.open(store)
    at_end(function() manager:close() end)
    local handle = assert(manager:acquire { "u1" })
    local found = examine(blind)
    assert_finding("warning", found, "other roles")
    assert.equal(1, follow(blind, found["other roles"], sql))
    assert_finding("ok", examine(blind), "other roles")
    local watcher = support.open({ dsn = blind, options = store.options })
    at_end(function() watcher:close() end)
    assert.equal(1, #assert(watcher:holders { "u1" }))
    assert.is_true(handle:release())
  end))

  it("changes a setting where it was made, which goes before others", obeying({
    "ALTER %s SET %s = %s;", "set deadlock_timeout", "set idle_session_timeout", "take %s out of PGOPTIONS",
  }, function()
    for _, whose in ipairs { "ROLE ALL", "DATABASE " .. database, "ROLE testuser", "ROLE testuser IN DATABASE " .. database } do
      root:query("ALTER %s SET deadlock_timeout = '20s'", whose)
      at_end(function() store.root():query("ALTER %s RESET deadlock_timeout", whose) end)
      local found = examine(store.dsn)
      assert_finding("warning", found, "deadlock detection")
      assert.equal(1, follow(store.dsn, found["deadlock detection"], sql))
      assert_finding("ok", examine(store.dsn), "deadlock detection")
    end
    -- What a role has in a database goes before what it has anywhere.
    root:query("ALTER ROLE testuser IN DATABASE %s SET idle_session_timeout = '1min'", database)
    at_end(function() store.root():query("ALTER ROLE testuser IN DATABASE %s RESET idle_session_timeout", database) end)
    assert.equal(1, follow(store.dsn, examine(store.dsn)["time-outs"], sql))
    assert_finding("ok", examine(store.dsn), "time-outs")
    uv.os_setenv("PGOPTIONS", "-c synchronous_commit=off")
    at_end(function() uv.os_unsetenv "PGOPTIONS" end)
    -- The specs' server is started with other settings that make it forget.
    local found = examine(store.dsn).durability
    follow(store.dsn, { mend = { found.mend[#found.mend] } }, sql)
    assert.is_nil(examine(store.dsn).durability.found:find "synchronous_commit")
  end))

  it("names a standby", function()
    local dir = root:query("SELECT setting FROM pg_settings WHERE name = 'data_directory'")[1][1]
    at_end(function()
      os.remove(dir .. "/standby.signal")
      store.command "restart"
    end)
    shell(": >" .. dir .. "/standby.signal; chown --reference=" .. dir .. " " .. dir .. "/standby.signal")
    store.command "restart"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "standby")
    assert.matches("primary", found.standby.mend[1])
    assert_finding("wrong", found, "opens")
  end)
end)
