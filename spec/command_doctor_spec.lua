--- `hierlock doctor`, as an operator runs it: it names the faults of a real store, and its printed line mends them
-- when it is run. Here: its command line, any store, and servers of MySQL and MariaDB.
-- Parts: a_space_that a_space engine_that_only_reads on_mysql:_started_with on_mariadb:_started_with ceases_to_answer stores

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local with_param = require("spec.support.sql").with_param
local doctor = require "spec.support.doctor"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"

local run, assert_status = program.run, program.assert_status
local at_end, findings_of, examine, status_of, assert_finding, shell, follow =
  doctor.at_end, doctor.findings_of, doctor.examine, doctor.status_of, doctor.assert_finding, doctor.shell, doctor.follow
local unpack = table.unpack or unpack -- luacheck: ignore

local UNREACHABLE = "mysql://u@127.0.0.1:1/d"

after_each(doctor.clean_up)

describe("the command line of doctor", function()
  it("is refused with 64 and a line when it is wrong", function()
    for _, arguments in ipairs {
      { "--pool-size", "0" }, { "--pool-size", "x" }, { "--processes", "1.5" }, { "--levels", "a,,b" }, { "--jsn" }, { "a", "b" },
      { "mysql://u:sEcReT@127.0.0.1:1/d" }, { "nonsense:" },
    } do
      local said = assert_status(64, run(UNREACHABLE, "doctor", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
      assert.is_nil(said.err:find("sEcReT", 1, true))
    end
  end)

  it("says what mends a server that is not there, or does not know us, and that this is wrong", function()
    for _, dsn in ipairs { UNREACHABLE, "postgresql://u@127.0.0.1:1/d", "redis://127.0.0.1:1", "memcached://127.0.0.1:1" } do
      local found = examine(dsn)
      assert.equal(1, (found[1].check == "reached" and found[1].status == "wrong") and 1 or 0, dsn)
      assert.matches("start the server", found[1].mend[1])
    end
  end)

  it("warns of the store that grants everything", function() assert.equal("warning", examine("null:").verdict) end)

  it("reaches each store of a quorum by its own protocol", function()
    local found = findings_of(run(("quorum:majority;redis://127.0.0.1:1;%s;redis://127.0.0.1:1/1;postgresql://u@127.0.0.1:1/d;redis://127.0.0.1:1/2")
      :format(UNREACHABLE), "doctor", "--json"))
    for _, number in ipairs { 3, 5 } do assert.equal(found["1: reached"].found, found[number .. ": reached"].found) end
    for _, number in ipairs { 2, 4 } do
      assert.equal("start", found[number .. ": reached"].mend[1]:match "^%a+", json.encode(found[number .. ": reached"]))
    end
  end)
end)

describe("what doctor prints", function()
  local directory

  before_each(function()
    directory = os.tmpname()
    os.remove(directory)
    assert_status(0, run("file:" .. directory, "doctor", "--levels", "user,account,resource"))
    at_end(function() shell("rm -r " .. directory) end)
  end)

  it("is plain ASCII without colours where there is no terminal, a line for each finding", function()
    shell(": >" .. directory .. "/str\195\164nge")
    local said = assert_status(0, run("file:" .. directory, "doctor"))
    assert.is_nil(said.out:find "[^ -~\n]")
    assert.matches("\n  ok       rights +mode 0700\n", said.out)
    assert.matches("\n  warning  other files +str\\xc3\\xa4nge\n           %u", said.out)
    assert.matches("\n           mend: move them elsewhere", said.out, 1, true)
    assert.matches("\n1 warning, %d+ ok\n$", said.out)
    local brief = assert_status(0, run("file:" .. directory, "doctor", "--quiet"))
    assert.is_nil(brief.out:find("  ok ", 1, true))
    assert.truthy(brief.out:find("  warning  other files", 1, true))
  end)

  it("fits a terminal, in colours, unless NO_COLOR is set", function()
    for _, columns in ipairs { 40, 60, 132 } do
      local self = program.on_terminal("file:" .. directory, columns, "doctor")
      assert_status(0, self.join())
      assert.truthy(self.out:find("\27[32m  ok       \27[0m", 1, true))
      for line in self.out:gsub("\27%[[%d;]*m", ""):gmatch "([^\r\n]+)\r?\n" do
        local text = line:gsub("[\128-\191]", "")
        -- Commands are to be copied, and stay whole.
        assert.is_true(#text <= columns or text:find "^ *mend: %l+ " ~= nil or text:find(directory, 1, true) ~= nil, columns .. ": " .. line)
      end
    end
    uv.os_setenv("NO_COLOR", "1")
    at_end(function() uv.os_unsetenv "NO_COLOR" end)
    local self = program.on_terminal("file:" .. directory, 80, "doctor")
    assert_status(0, self.join())
    assert.is_nil(self.out:find("\27", 1, true))
  end)

  it("writes names as they are on a terminal that shows UTF-8, and escaped on another", function()
    shell(": >" .. directory .. "/str\195\164nge")
    for locale, name in pairs { ["C.UTF-8"] = "str\195\164nge", C = "str\\xc3\\xa4nge" } do
      local self = program.line_on_terminal("file:" .. directory, 80,
        ("exec env LC_ALL=%s %s lua/hierlock/command/main.lua doctor"):format(locale, program.interpreter))
      assert_status(0, self.join())
      assert.truthy(self.out:find(name, 1, true), self.out)
    end
  end)
end)

support.each_store(function(plain)
  local store = support.leased(plain)
  -- The arguments with which it may try an unused store.
  local settling = { "--levels", "user,account,resource", "--buckets", ("%d"):format(store.options and store.options.buckets or 10000) }
  setup(function() store.prepare() end)

  it("finds nothing wrong with a store that is as it should be, and leaves nothing behind", function()
    local found = examine(store.dsn, unpack(settling))
    for i in ipairs(found) do assert.not_equal("wrong", found[i].status, json.encode(found[i])) end
    for _, check in ipairs { "opens", "a lock", "observers", "speed", "leases" } do assert_finding("ok", found, check) end
    local manager = support.open(store)
    at_end(function() manager:close() end)
    assert.same({}, assert(manager:leases { over = true }))
  end)
end)

support.each_server(function(plain)
  local store = support.leased(plain)
  local root
  local mysql = plain.name == "mysql"
  local of_a_space = {
    "hierlock provision", "hierlock provision --leases", "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;",
    "DELETE FROM %s WHERE %s;", "ALTER TABLE %s %sADD PRIMARY KEY (%s);", "ALTER TABLE %s ENGINE = InnoDB;",
    "set innodb_buffer_pool_size", "GRANT SELECT ON %s TO %s;", "GRANT SELECT%s ON %s TO %s;",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s;", "GRANT SELECT ON performance_schema.%s TO %s;",
    "GRANT %s ON *.* TO %s;", "ALTER USER %s WITH MAX_USER_CONNECTIONS 0;", not mysql and "GRANT PROCESS ON *.* TO %s;" or nil,
  }
  local of_a_start = {
    "set max_user_connections", "SET GLOBAL max_user_connections = 0;", "in my.cnf, below [mysqld]: innodb_read_only = OFF",
    "set binlog_format", "in my.cnf, below [mysqld]: performance_schema = ON",
    unpack(mysql and { "set sync_binlog", "SELECT group_replication_switch_to_single_primary_mode();" } or
      { 'set name, "0"', "and in my.cnf, below [mysqld], so that it lasts: %s = %s" }),
  }
  -- The other servers' alone.
  local obeying, all_obeyed = doctor.obedience("mysql", mysql and
    { ["SET GLOBAL %s = %s;"] = true, ["GRANT PROCESS ON *.* TO %s;"] = true, ['set name, "0"'] = true,
      ["and in my.cnf, below [mysqld], so that it lasts: %s = %s"] = true } or
    { ["SET PERSIST %s = %s;"] = true, ["set sync_binlog"] = true, ["SELECT group_replication_switch_to_single_primary_mode();"] = true },
    of_a_space, of_a_start)

  setup(function() store.prepare() end)
  teardown(all_obeyed)
  before_each(function() root = store.root() or pending "no administrator here" end)

  local database = plain.bare_dsn and plain.bare_dsn:match "/([^/?]*)$"

  local function sql(statement)
    root = store.root()
    root:query("%s", statement)
  end

  local function global(name) return root:query("SELECT @@GLOBAL.%s", name)[1][1] end

  -- Sets it, until the end of the spec.
  local function set(name, value)
    local before = global(name)
    at_end(function()
      if store.dialect == "mysql" then pcall(root.query, root, "RESET PERSIST IF EXISTS " .. name) end
      root:query("SET GLOBAL %s = %s", name, tonumber(before) and before or "'" .. before .. "'")
    end)
    root:query("SET GLOBAL %s = %s", name, value)
  end

  -- With those options, until the next restart: a start costs MySQL seconds.
  local function restart(options)
    at_end(function()
      if store.dialect == "mysql" then pcall(root.query, root, "RESET PERSIST") end
    end)
    store.command("restart", options)
    root = store.root()
  end

  it("names a database that is not there, or not this account's, and the line mends that",
     obeying({ "CREATE DATABASE `%s`;", "GRANT SELECT ON `%s`.* TO %s;" }, function()
    local at_database = store.dsn:gsub("/" .. database, "/hldoctor")
    at_end(function() store.root():query "DROP DATABASE IF EXISTS hldoctor" end)
    local dsn = at_database:gsub("//[^@]*@", "//root:rootpassword@")
    local found = examine(dsn)
    assert_finding("wrong", found, "reached")
    follow(dsn, { mend = { found.reached.mend[1] } }, sql)
    assert_finding("ok", examine(dsn), "reached")
    root:query "DROP USER IF EXISTS hldoctor@'%'"
    root:query "CREATE USER hldoctor@'%' IDENTIFIED BY 'x'"
    at_end(function() store.root():query "DROP USER hldoctor@'%'" end)
    dsn = at_database:gsub("//[^@]*@", "//hldoctor:x@")
    found = examine(dsn)
    assert_finding("wrong", found, "reached")
    assert.equal(1, follow(dsn, found.reached, sql))
    assert_finding("ok", examine(dsn), "reached")
  end))

  describe("a setting that is wrong is named, and put right by the line:", function()
    for _, case in ipairs {
      { "read_only", "ON", "read-only", "wrong", { 'set name, "OFF"', "read_only" } },
      { "transaction_isolation", "'SERIALIZABLE'", "isolation", "warning", "set transaction_isolation|tx_isolation" },
      { "innodb_deadlock_detect", "OFF", "deadlock detection", "warning" },
      { "innodb_lock_wait_timeout", "1", "time-outs", "warning" },
      { "innodb_flush_log_at_trx_commit", "2", "durability", "warning" },
      { "max_connections", "20", "max_connections", "wrong" },
      { "init_connect", "'SET @a = 1'", "init_connect", "warning" },
    } do
      local name, value, check, status, key = unpack(case)
      it(name, obeying({ key or "set " .. name, mysql and "SET PERSIST %s = %s;" or "SET GLOBAL %s = %s;" }, function()
        if name == "transaction_isolation" and store.dialect == "mariadb" then name = "tx_isolation" end
        set(name, value)
        local found = examine(store.dsn)
        assert_finding(status, found, check)
        if check == "read-only" then
          assert_finding("wrong", found, "opens")
          assert.is_nil(table.concat(found.opens.mend):find("GRANT", 1, true))
        end
        assert.is_true(follow(store.dsn, found[check], sql) > 0)
        found = examine(store.dsn)
        assert.is_true(status_of(found, check) == "ok" or name == "init_connect" and not found[check], json.encode(found[check]))
        assert.not_equal("wrong", found.verdict)
      end))
    end
  end)

  local function fill(n)
    local list = {}
    at_end(function() for _, one in ipairs(list) do one:close() end end)
    for i = 1, n do list[i] = support.sql_connection(plain.bare_dsn) end
  end

  local function assert_room(message)
    local found = examine(store.dsn)
    assert_finding("wrong", found, "reached")
    assert.matches(message, found.reached.found)
    assert.equal(1, follow(store.dsn, found.reached, sql))
    assert_finding("ok", examine(store.dsn), "reached")
  end

  describe("a server that has no connection left is named, and the line makes room:", function()
    it("none at all", obeying({ "SET GLOBAL max_connections = @@GLOBAL.max_connections + 100;" }, function()
      fill(12)
      set("max_connections", root:query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1][2])
      assert_room "Too many connections"
    end))

    local limited = "ALTER USER %s WITH %s 0; -- HOST: as in mysql.user"
    it("none for this account, by a limit of its own", obeying({ limited }, function()
      local user = "'hierlock_few'@'127.0.0.1'"
      root:query("CREATE USER %s IDENTIFIED BY 'few' WITH MAX_USER_CONNECTIONS 1", user)
      at_end(function() store.root():query("DROP USER %s", user) end)
      root:query("GRANT SELECT ON %s.* TO %s", database, user)
      local few = plain.bare_dsn:gsub("//.-@", "//hierlock_few:few@")
      local one = support.sql_connection(few)
      at_end(function() one:close() end)
      local found = examine(few)
      assert_finding("wrong", found, "reached")
      assert.equal("ALTER USER 'hierlock_few'@'HOST' WITH MAX_USER_CONNECTIONS 0; -- HOST: as in mysql.user", found.reached.mend[1])
      local line = found.reached.mend[1]:gsub("HOST'", "127.0.0.1'"):gsub(";.*", ";")
      follow(few, { mend = { line } }, sql)
      assert_finding("ok", examine(few), "reached")
    end))
  end)

  describe("started with other options:", function()
    teardown(function() store.command "restart" end)

    -- MariaDB gets the lines for my.cnf behind the options with which it was started. With MySQL, which is started by
    -- options here, these go before what SET PERSIST has kept.
    it("settings with which the server was started are named, and put right by the lines", obeying({
      "set max_user_connections", "set innodb_flush_log_at_trx_commit",
      unpack(mysql and { { 'set name, "OFF"', "super_read_only" }, "set sync_binlog" } or {
        { 'set name, "0"', "idle_transaction_timeout", "idle_readonly_transaction_timeout", "idle_write_transaction_timeout" },
        "and in my.cnf, below [mysqld], so that it lasts: %s = %s" }),
    }, function()
      local ill = "--transaction-isolation=SERIALIZABLE --innodb-deadlock-detect=OFF --innodb-lock-wait-timeout=1 --read-only=ON " ..
        "--innodb-flush-log-at-trx-commit=2 --max-connections=30 --max-user-connections=15 --init-connect=SELECT/**/1 " ..
        (mysql and "--log-bin --server-id=7 --super-read-only=ON" or
          "--idle-transaction-timeout=60 --idle-readonly-transaction-timeout=60 --idle-write-transaction-timeout=60")
      restart(ill)
      local checks = { ["read-only"] = "wrong", isolation = "warning", ["deadlock detection"] = "warning", ["time-outs"] = "warning",
        durability = "warning", max_connections = "wrong", max_user_connections = "wrong", init_connect = "warning" }
      local found, options = examine(store.dsn, "--pool-size", "40"), { ill }
      assert.equal(mysql and "innodb_flush_log_at_trx_commit = 2, sync_binlog = 0" or "innodb_flush_log_at_trx_commit = 2", found.durability.found)
      for check, status in pairs(checks) do
        assert_finding(status, found, check)
        local done, lines = follow(store.dsn, found[check], sql)
        assert.is_true(done > 0, check)
        options[#options + 1] = lines
      end
      for _, when in ipairs { "now", not mysql and "after a start" or nil } do
        found = examine(store.dsn, "--pool-size", "40")
        for check in pairs(checks) do
          local is = status_of(found, check)
          assert.is_true(is == "ok" or is == "absent", when .. ", " .. check .. ": " .. json.encode(found[check]))
        end
        if when == "now" and not mysql then restart(table.concat(options, " ")) end
      end
    end))

    it("a server that has no connection left for this account is named, and the line makes room", obeying({ "SET GLOBAL max_user_connections = 0;" }, function()
      restart "--max-user-connections=12"
      fill(12)
      assert_room "max_user_connections"
    end))

    local it_on_mysql = mysql and it or function() end
    it_on_mysql("names a group with several primaries, and the line leaves one", mysql and obeying({
      "SELECT group_replication_switch_to_single_primary_mode();",
    }, function()
      local free = uv.new_tcp()
      assert(free:bind("127.0.0.1", 0))
      local port = free:getsockname().port
      free:close()
      restart("--plugin-load-add=group_replication.so --log-bin --server-id=7 --gtid-mode=ON --enforce-gtid-consistency=ON " ..
        "--loose-group-replication-group-name=aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa --loose-group-replication-bootstrap-group=ON " ..
        "--loose-group-replication-single-primary-mode=OFF --loose-group-replication-enforce-update-everywhere-checks=ON " ..
        "--loose-group-replication-local-address=127.0.0.1:" .. port)
      support.wait_until(function()
        return root:query("SELECT COUNT(*) FROM performance_schema.replication_group_members WHERE MEMBER_STATE = 'ONLINE'")[1][1] == "1"
      end, "the group")
      local found = examine(store.dsn)
      assert_finding("wrong", found, "cluster")
      assert.equal(1, follow(store.dsn, found.cluster, sql))
      assert_finding("ok", examine(store.dsn), "cluster")
    end))

    it("names an engine that only reads, and the line mends that", obeying({ "in my.cnf, below [mysqld]: innodb_read_only = OFF" }, function()
      restart "--innodb-read-only=ON"
      local found = examine(store.dsn)
      assert_finding("wrong", found, "read-only")
      assert.matches("innodb_read_only", found["read-only"].found)
      follow(store.dsn, found["read-only"], sql, restart)
      assert_finding("ok", examine(store.dsn), "read-only")
    end))

    it("names a server that logs statements, and the line mends that", obeying({ "set binlog_format" }, function()
      restart "--log-bin --server-id=7 --binlog-format=STATEMENT"
      local found = examine(store.dsn)
      assert_finding("wrong", found, "binlog format")
      assert.is_true(follow(store.dsn, found["binlog format"], sql) > 0)
      found = examine(store.dsn)
      assert_finding("ok", found, "binlog format")
      assert_finding("ok", found, "leases")
    end))

    it("names performance_schema that is off; turned on, observers see who holds", obeying({
      "in my.cnf, below [mysqld]: performance_schema = ON",
    }, function()
      restart "--performance-schema=OFF"
      local found = examine(store.dsn)
      assert_finding("warning", found, "performance_schema")
      assert_finding("warning", found, "observers")
      assert.equal("then restart the server", found.performance_schema.mend[2])
      follow(store.dsn, found.performance_schema, sql, restart)
      found = examine(store.dsn)
      assert_finding("ok", found, "performance_schema")
      assert_finding("ok", found, "observers")
    end))
  end)

  describe("a space", function()
    local dsn, stem, connection = plain.bare_dsn .. "?table=hierlock_spec_ill_buckets", "hierlock_spec_ill", nil

    local function provision(...) assert_status(0, run(dsn, "provision", "--quiet", "--buckets", "100", ...)) end

    before_each(function() connection = plain.sql() end)
    after_each(function()
      for _, suffix in ipairs { "_buckets", "_nodes", "_leases", "_leased", "_gate" } do
        plain.sql():query("DROP TABLE IF EXISTS %s", stem .. suffix)
      end
      plain.sql():query("DELETE FROM hier_lock_meta WHERE table_name = '%s'", stem .. "_buckets")
    end)

    local function assert_mended(check, status, breaks)
      if breaks then connection:query("%s", breaks:gsub("STEM", stem)) end
      local found = examine(dsn)
      assert_finding(status, found, check)
      assert.equal(status, found.verdict)
      assert.is_true(follow(dsn, found[check], sql) > 0)
      found = examine(dsn)
      assert_finding("ok", found, found[check] and check or "table")
      assert.is_true(found.verdict ~= "wrong", json.encode(found))
    end

    it("that is not there is named, and made by the line", function()
      connection:query("INSERT INTO hier_lock_meta VALUES ('%s_buckets', 100, 'user,account,resource')", stem)
      local found = examine(dsn)
      assert_finding("wrong", found, "table")
      assert.equal("hierlock provision", found.table.mend[1])
      assert_status(0, run(dsn, "provision", "--quiet"))
      assert_finding("ok", examine(dsn), "table")
    end)

    it("without some of its rows is named, with the rows, and filled by the line", obeying({ "hierlock provision" }, function()
      provision()
      connection:query("DELETE FROM %s_buckets WHERE level = 1 AND bucket BETWEEN 7 AND 9", stem)
      assert.matches("level 1 (account): missing: 7-9", examine(dsn).rows.found, 1, true)
      assert_finding("absent", examine(dsn, "--quick"), "rows")
      assert_mended("rows", "wrong")
    end))

    it("with rows beyond its own is named, and freed of them by the line", obeying({
      "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;", "DELETE FROM %s WHERE %s;",
    }, function()
      provision()
      assert_status(0, run(dsn, "provision", "--quiet", "--buckets", "100", "--updates"))
      connection:query("INSERT INTO %s_buckets VALUES (5, 1), (0, 100), (-126, 100), (-100, 7), (1, -1)", stem)
      local found = examine(dsn)
      assert_finding("warning", found, "other rows")
      assert.matches("^5 beyond", found["other rows"].found)
      assert.equal("100 buckets for each of user,account,resource", found["buckets and levels"].found)
      -- A program that locks does not hold up who follows the lines, nor they the programs.
      local manager = support.open({ dsn = dsn, options = {} })
      local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { mode = "update" }))
      assert.equal(6, follow(dsn, found["other rows"], sql))
      assert.is_true(handle:release { confirm = true })
      manager:close()
      assert_finding("absent", examine(dsn), "other rows")
      assert.equal("400", connection:query("SELECT COUNT(*) FROM %s_buckets", stem)[1][1])
      -- Where it is not known for what the table was made, no line deletes a row.
      connection:query("INSERT INTO %s_buckets VALUES (5, 1)", stem)
      connection:query("DELETE FROM hier_lock_meta WHERE table_name = '%s_buckets'", stem)
      found = examine(dsn)
      assert_finding("warning", found, "other rows")
      assert.matches("^record", found["other rows"].mend[1])
      assert.equal("10,000,000 buckets for each of user,account,resource (the defaults: hier_lock_meta does not say)",
        found["buckets and levels"].found)
    end))

    it("with leases that has lost its record gets it back, and no second table to lock in", function()
      provision("--leases", "--levels", "tenant,project,task")
      connection:query("DELETE FROM hier_lock_meta WHERE table_name = '%s_buckets'", stem)
      connection:query("DELETE FROM %s_nodes WHERE level = 0 AND bucket = 99", stem)
      for _, leases in ipairs { {}, { "--leases" } } do
        local said = assert_status(78, run(dsn, "provision", "--quiet", "--buckets", "100", unpack(leases)))
        assert.matches("hier_lock_meta has no record", said.err)
      end
      -- Its rows do not tell the names of the levels. A record with other names would let in programs that lock other rows.
      local found = examine(dsn)
      assert_finding("wrong", found, "table")
      assert.matches("names of its 3 levels .* by %-%-levels", found.table.mend[1])
      assert.is_nil(found.table.mend[2])
      assert.is_nil(json.encode(found.opens):find "hierlock provision\"")
      assert.is_nil(examine(dsn, "--levels", "tenant,task").table.mend[2])
      assert.is_true(follow(dsn, examine(dsn, "--levels", "tenant,project,task").table, sql) > 0)
      found = examine(dsn)
      assert_finding("ok", found, "table")
      assert.matches("^100 .*tenant, ?project, ?task", found["buckets and levels"].found)
    end)

    it("without its primary key is named, and given it by the line", obeying({ "ALTER TABLE %s %sADD PRIMARY KEY (%s);" }, function()
      provision "--leases"
      assert_mended("primary keys", "wrong", "ALTER TABLE STEM_nodes DROP PRIMARY KEY")
      assert_mended("primary keys", "wrong", "ALTER TABLE STEM_gate DROP PRIMARY KEY")
    end))

    it("of another engine is named, and made InnoDB by the line", obeying({ "ALTER TABLE %s ENGINE = InnoDB;" }, function()
      provision()
      assert_mended("engine", "wrong", "ALTER TABLE STEM_buckets ENGINE = MyISAM")
    end))

    it("whose tables of leases are not whole is named, and mended by the line", obeying({ "hierlock provision --leases" }, function()
      provision "--leases"
      assert_mended("engine", "wrong", "DROP TABLE STEM_leased")
      assert_mended("gate", "wrong", "DELETE FROM STEM_gate WHERE g < 10")
    end))

    it("that is larger than the buffer pool is named, and the line makes room for it", obeying({ "set innodb_buffer_pool_size" }, function()
      at_end(function() store.command "restart" end)
      restart(store.dialect == "mysql" and "--innodb-buffer-pool-size=6M --innodb-buffer-pool-chunk-size=1M" or "--innodb-buffer-pool-size=6M")
      connection = plain.sql()
      assert_status(0, run(dsn, "provision", "--quiet", "--buckets", "100000"))
      connection:query("ANALYZE TABLE %s_buckets", stem)
      local found = examine(dsn, "--quick")
      assert_finding("warning", found, "buffer pool")
      assert.is_true(follow(dsn, found["buffer pool"], sql) > 0)
      support.wait_until(function() -- the server resizes it by and by
        return status_of(examine(dsn, "--quick"), "buffer pool") == "ok"
      end, "a larger buffer pool")
    end))

    it("with other buckets or levels than those that are wanted is named", function()
      provision()
      for _, options in ipairs { { "--buckets", "50" }, { "--levels", "a,b" } } do
        local found = examine(dsn, unpack(options))
        assert_finding("wrong", found, "opens")
        assert.matches("has 100 buckets for each of the levels", found.opens.found)
      end
    end)

    it("that an account may not use is named, and each line gives it what it needs, and no more", obeying({
      "GRANT SELECT ON %s TO %s;", "GRANT SELECT%s ON %s TO %s;", "GRANT SELECT, INSERT, UPDATE, DELETE ON %s TO %s;",
      "GRANT SELECT ON performance_schema.%s TO %s;", "GRANT %s ON *.* TO %s;", "ALTER USER %s WITH MAX_USER_CONNECTIONS 0;",
      not mysql and "GRANT PROCESS ON *.* TO %s;" or nil,
    }, function()
      provision "--leases"
      local user = "'hierlock_ill'@'127.0.0.1'"
      at_end(function() store.root():query("DROP USER %s", user) end)
      root:query("CREATE USER %s IDENTIFIED BY 'ill'", user)
      root:query("GRANT USAGE ON *.* TO %s", user)
      root:query("GRANT SELECT ON %s.hier_lock_meta TO %s", database, user)
      local poor = dsn:gsub("//.-@", "//hierlock_ill:ill@")
      local found = examine(poor)
      assert_finding("wrong", found, "opens")
      for _, check in ipairs { "opens", "table" } do
        for _, line in ipairs(found[check].mend) do
          if line:find "^GRANT" then follow(poor, { mend = { line } }, sql) end
        end
      end
      found = examine(poor)
      for _, check in ipairs { "opens", "a lock", "leases", "rows", "gate" } do assert_finding("ok", found, check) end
      assert_finding("warning", found, "observers")
      assert.is_true(follow(poor, found.observers, sql) > 1)
      assert_finding("ok", examine(poor), "observers")
      assert_finding("unseen", found, "replica")
      assert.equal(1, follow(poor, found.replica, sql))
      assert_finding("ok", examine(poor), "replica")
      assert_finding("absent", found, "max_user_connections")
      root:query("ALTER USER %s WITH MAX_USER_CONNECTIONS 20", user)
      found = examine(poor)
      assert_finding("wrong", found, "max_user_connections")
      assert.equal(1, follow(poor, found.max_user_connections, sql))
      assert_finding("absent", examine(poor), "max_user_connections")
    end))
  end)

  it("names a replica that follows another server, where it may look", function()
    local dsn = store.root_dsn .. database .. "?table=" .. store.table
    assert_finding("ok", examine(dsn), "replica")
  end)

  it("that ceases to answer keeps nobody waiting", function()
    local between
    between = proxy.open(store, function(data) return between.sent:find("REPLICA", 1, true) and "" or data end)
    at_end(between.close)
    local began = uv.hrtime()
    local found = examine(between.dsn, "--quick")
    assert.is_true((uv.hrtime() - began) / 1e9 < 25, "it waited for too long")
    assert_finding("wrong", found, "answers")
    assert_finding("absent", found, "opens")
  end)

  it("names a proxy in between, and a password that is not ours", function()
    local function through(edit)
      local between = proxy.open(store, edit)
      at_end(between.close)
      return examine(between.dsn)
    end
    assert_finding("wrong", through(function(data, first)
      if not first then return data end
      local at = data:find("\0", 6, true) + 1
      return data:sub(1, at - 1) .. string.char((data:byte(at) + 1) % 256) .. data:sub(at + 1)
    end), "opens")
    local found = examine((store.dsn:gsub("//.-@", "//testuser:wrong@")))
    assert_finding("wrong", found, "reached")
    assert.matches("password", found.reached.mend[1])
  end)

  it("warns of a connection that others may read or answer, unless the DSN says what it wants to see", function()
    local elsewhere = store.dsn:gsub("127%.0%.0%.1", "127.1")
    local function tls(parameters) return status_of(examine(with_param(elsewhere, parameters)), "TLS") end
    assert.equal("warning", tls "tls=off")
    assert.equal("warning", tls "tls=required")
    assert.equal("ok", tls("tls=verify-ca&tls_ca=" .. os.getenv("HIERLOCK_" .. store.name:upper() .. "_CA")))
  end)

  it("of a quorum without tables of leases is named, and the line that is printed makes them", function()
    local dsn = store.bare_dsn .. "?table=q_buckets"
    at_end(function()
      for _, name in ipairs { "buckets", "nodes", "leases", "leased", "gate" } do sql(("DROP TABLE IF EXISTS %s.q_%s"):format(database, name)) end
      sql(("DELETE FROM %s.hier_lock_meta WHERE table_name = 'q_buckets'"):format(database))
    end)
    local function of_quorum() return findings_of(run("quorum:all;null:;" .. dsn, "doctor", "--json")) end
    assert_status(0, run(dsn, "provision", "--buckets", "10"))
    local found = of_quorum()
    assert_finding("wrong", found, "2: tables of leases")
    local words = assert(found["2: tables of leases"].mend[1]:match "^for store 2: hierlock (.*)$")
    assert_status(0, run(dsn, words:match "^(%S+) (%S+)$"))
    assert_finding("absent", of_quorum(), "2: tables of leases")
  end)
end)
