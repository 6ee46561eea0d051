--- `hierlock doctor`, as an operator runs it: it names the faults of a real store, and its printed line mends them
-- when it is run.
-- Parts: a_space ceases_to_answer stores redis memcached sqlite

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack -- luacheck: ignore

local UNREACHABLE = "mysql://u@127.0.0.1:1/d"

local undo

before_each(function() undo = {} end)
after_each(function()
  program.close()
  for i = #undo, 1, -1 do undo[i]() end
end)

local function at_end(fn) undo[#undo + 1] = fn end

-- Returns the doctor's findings by name, and the exit status.
local function findings_of(said)
  local object, _, err = json.decode(said.out)
  assert.is_nil(err, said.out .. said.err)
  local found = { verdict = object.verdict }
  for i, finding in ipairs(object.findings) do
    assert.is_nil(found[finding.check], finding.check .. " comes twice")
    assert.truthy(#finding.why > 0 and #finding.found > 0, finding.check)
    assert.is_true(finding.status == "ok" or finding.mend[1] ~= nil or finding.status == "unseen", finding.check .. " has nothing that mends it")
    found[finding.check], found[i] = finding, finding
  end
  assert.equal(found.verdict == "wrong" and 1 or 0, said.status, said.out .. said.err)
  return found
end

local function examine(dsn, ...) return findings_of(run(dsn, "doctor", "--json", ...)) end

local function status_of(found, check) return found[check] and found[check].status or "absent" end

local function assert_finding(status, found, check)
  assert.equal(status, status_of(found, check), check .. ": " .. json.encode(found[check] or found))
end

local function shell(line)
  local ok = os.execute("unset LD_PRELOAD; exec >/dev/null 2>&1; " .. line)
  assert(ok == true or ok == 0, line)
end

-- Obeys the lines as an administrator: statements by sql(line), commands by the shell. Lines in words are left to
-- the spec, but for a server's options: restart(options) where they want one. Returns how many lines there were, and
-- the options.
local function follow(dsn, finding, sql, restart)
  local done, options = 0, {}
  for _, line in ipairs(finding.mend) do
    if line:find ";$" then
      sql(line)
    elseif line:find "^hierlock " then
      assert_status(0, program.run_line(dsn, line))
    elseif line:find "in my.cnf, below %[mysqld%]" then
      options[#options + 1] = line:gsub("^.-: ", "--"):gsub(" = ", "=")
    elseif line:find "^on the command line .*: %-c " then
      options[#options + 1] = line:match ": (%-c .*)"
    elseif line:find "^then restart the server" and restart then
      restart(table.concat(options, " "))
    elseif line:find "^redis%-cli " then
      -- The command asks for the password of the user that it names.
      local password = line:find(" --user ", 1, true) and dsn:match "//[^:/]*:([^@]*)@" or "rootpassword"
      shell(("printf '%%s\\n' '%s' | %s"):format(password, line))
    elseif line:find "^chmod " or line:find "^chown " or line:find "^rm " or line:find "^install " or line:find "^sqlite3 " then
      shell(line)
    else
      done = done - 1
    end
    done = done + 1
  end
  return done, table.concat(options, " ")
end

-- Examines a store as another user, which needs root.
local function examined_by(user, at, options, limits)
  -- A copy of the command, where everybody may read it.
  local out, copy = os.tmpname(), os.tmpname()
  at_end(function() os.remove(out) shell("rm -r " .. copy) end)
  local modules
  for place in package.cpath:gmatch "([^;]+)/%?%.so" do
    if not modules and uv.fs_stat(place .. "/hierlock/core.so") then modules = place end
  end
  shell(("rm %s; mkdir %s && cp -r lua '%s/hierlock' %s && chmod -R a+rX %s"):format(copy, copy, modules, copy, copy))
  shell("chmod 0644 " .. out)
  local words = (limits or "true") .. ("; cd %s; HIERLOCK_DSN='%s' LUA_PATH='lua/?.lua;lua/?/init.lua;;' LUA_CPATH='?.so;;' " ..
    "setpriv --reuid=%d --regid=65534 --clear-groups %s lua/hierlock/command/main.lua doctor --json %s >%s; echo $? >>%s")
    :format(copy, at, user, program.interpreter, options or "", out, out)
  os.execute(words)
  local file = assert(io.open(out))
  local text = file:read "*a"
  file:close()
  return findings_of { out = text:gsub("%d+\n$", ""), err = "", status = tonumber(text:match "(%d+)\n$") }
end

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

  setup(function() store.prepare() end)
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

  local function restart(options)
    at_end(function()
      if store.dialect == "mysql" then pcall(root.query, root, "RESET PERSIST") end
      store.command "restart"
    end)
    store.command("restart", options)
    root = store.root()
  end

  it("names a database that is not there, or not this account's, and the line mends that", function()
    local at_database = store.dsn:gsub("/" .. database, "/hldoctor")
    at_end(function() store.root():query "DROP DATABASE IF EXISTS hldoctor" end)
    local dsn = at_database:gsub("//[^@]*@", "//root:rootpassword@")
    local found = examine(dsn)
    assert_finding("wrong", found, "reached")
    sql(found.reached.mend[1])
    assert_finding("ok", examine(dsn), "reached")
    root:query "DROP USER IF EXISTS hldoctor@'%'"
    root:query "CREATE USER hldoctor@'%' IDENTIFIED BY 'x'"
    at_end(function() store.root():query "DROP USER hldoctor@'%'" end)
    dsn = at_database:gsub("//[^@]*@", "//hldoctor:x@")
    found = examine(dsn)
    assert_finding("wrong", found, "reached")
    assert.equal(1, follow(dsn, found.reached, sql))
    assert_finding("ok", examine(dsn), "reached")
  end)

  describe("a setting that is wrong is named, and put right by the line:", function()
    for _, case in ipairs {
      { "read_only", "ON", "read-only", "wrong" },
      { "transaction_isolation", "'SERIALIZABLE'", "isolation", "warning" },
      { "innodb_deadlock_detect", "OFF", "deadlock detection", "warning" },
      { "innodb_lock_wait_timeout", "1", "time-outs", "warning" },
      { "innodb_flush_log_at_trx_commit", "2", "durability", "warning" },
      { "max_connections", "20", "max_connections", "wrong" },
      { "init_connect", "'SET @a = 1'", "init_connect", "warning" },
    } do
      local name, value, check, status = unpack(case)
      it(name, function()
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
      end)
    end
  end)

  -- MariaDB gets the lines for my.cnf behind the options with which it was started. With MySQL, which is started by
  -- options here, these go before what SET PERSIST has kept.
  it("settings with which the server was started are named, and put right by the lines", function()
    local mysql = store.dialect == "mysql"
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
  end)

  describe("a server that has no connection left is named, and the line makes room:", function()
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

    it("none at all", function()
      fill(12)
      set("max_connections", root:query("SHOW GLOBAL STATUS LIKE 'Threads_connected'")[1][2])
      assert_room "Too many connections"
    end)

    it("none for this account, by a limit of its own", function()
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
      sql((found.reached.mend[1]:gsub("HOST'", "127.0.0.1'"):gsub(";.*", "")))
      assert_finding("ok", examine(few), "reached")
    end)

    it("none for this account", function()
      restart "--max-user-connections=12"
      fill(12)
      assert_room "max_user_connections"
    end)
  end)

  it("names a group with several primaries, and the line leaves one", function()
    if store.dialect ~= "mysql" then return end
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
  end)

  it("names an engine that only reads, and the line mends that", function()
    restart "--innodb-read-only=ON"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "read-only")
    assert.matches("innodb_read_only", found["read-only"].found)
    follow(store.dsn, found["read-only"], sql, restart)
    assert_finding("ok", examine(store.dsn), "read-only")
  end)

  it("names a server that logs statements, and the line mends that", function()
    restart "--log-bin --server-id=7 --binlog-format=STATEMENT"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "binlog format")
    assert.is_true(follow(store.dsn, found["binlog format"], sql) > 0)
    found = examine(store.dsn)
    assert_finding("ok", found, "binlog format")
    assert_finding("ok", found, "leases")
  end)

  it("names performance_schema that is off; turned on, observers see who holds", function()
    restart "--performance-schema=OFF"
    local found = examine(store.dsn)
    assert_finding("warning", found, "performance_schema")
    assert_finding("warning", found, "observers")
    assert.equal("then restart the server", found.performance_schema.mend[2])
    follow(store.dsn, found.performance_schema, sql, restart)
    found = examine(store.dsn)
    assert_finding("ok", found, "performance_schema")
    assert_finding("ok", found, "observers")
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

    it("without some of its rows is named, with the rows, and filled by the line", function()
      provision()
      connection:query("DELETE FROM %s_buckets WHERE level = 1 AND bucket BETWEEN 7 AND 9", stem)
      assert.matches("level 1 (account): missing: 7-9", examine(dsn).rows.found, 1, true)
      assert_finding("absent", examine(dsn, "--quick"), "rows")
      assert_mended("rows", "wrong")
    end)

    it("with rows beyond its own is named, and freed of them by the line", function()
      provision()
      assert_status(0, run(dsn, "provision", "--quiet", "--buckets", "100", "--updates"))
      connection:query("INSERT INTO %s_buckets VALUES (5, 1), (0, 100), (-126, 100), (-100, 7), (1, -1)", stem)
      local found = examine(dsn)
      assert_finding("warning", found, "other rows")
      assert.matches("^5 beyond", found["other rows"].found)
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
    end)

    it("without its primary key is named, and given it by the line", function()
      provision "--leases"
      assert_mended("primary keys", "wrong", "ALTER TABLE STEM_nodes DROP PRIMARY KEY")
      assert_mended("primary keys", "wrong", "ALTER TABLE STEM_gate DROP PRIMARY KEY")
    end)

    it("of another engine is named, and made InnoDB by the line", function()
      provision()
      assert_mended("engine", "wrong", "ALTER TABLE STEM_buckets ENGINE = MyISAM")
    end)

    it("whose tables of leases are not whole is named, and mended by the line", function()
      provision "--leases"
      assert_mended("engine", "wrong", "DROP TABLE STEM_leased")
      assert_mended("gate", "wrong", "DELETE FROM STEM_gate WHERE g < 10")
    end)

    it("that is larger than the buffer pool is named, and the line makes room for it", function()
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
    end)

    it("with other buckets or levels than those that are wanted is named", function()
      provision()
      for _, options in ipairs { { "--buckets", "50" }, { "--levels", "a,b" } } do
        local found = examine(dsn, unpack(options))
        assert_finding("wrong", found, "opens")
        assert.matches("has 100 buckets for each of the levels", found.opens.found)
      end
    end)

    it("that an account may not use is named, and each line gives it what it needs, and no more", function()
      provision "--leases"
      local user = "'hierlock_ill'@'127.0.0.1'"
      at_end(function() store.root():query("DROP USER %s", user) end)
      root:query("CREATE USER %s IDENTIFIED BY 'ill'", user)
      root:query("GRANT USAGE ON *.* TO %s", user)
      root:query("GRANT SELECT ON %s.hier_lock_meta TO %s", database, user)
      local poor = dsn:gsub("//.-@", "//hierlock_ill:ill@")
      local found = examine(poor)
      assert_finding("wrong", found, "opens")
      for _, line in ipairs(found.opens.mend) do if line:find "^GRANT" then sql(line) end end
      for _, line in ipairs(found.table.mend) do if line:find "^GRANT" then sql(line) end end
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
    end)
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
    local function tls(parameters) return status_of(examine((store.dsn:gsub("127%.0%.0%.1", "127.1")) .. parameters), "TLS") end
    assert.equal("warning", tls "&tls=off")
    assert.equal("warning", tls "&tls=required")
    assert.equal("ok", tls("&tls=verify-ca&tls_ca=" .. os.getenv("HIERLOCK_" .. store.name:upper() .. "_CA")))
  end)

  it("of a quorum without tables of leases is named, and the line that is printed makes them", function()
    local dsn = store.bare_dsn .. "?table=q_buckets"
    at_end(function()
      for _, name in ipairs { "buckets", "nodes", "leases", "leased", "gate" } do sql(("DROP TABLE IF EXISTS %s.q_%s"):format(database, name)) end
      sql(("DELETE FROM %s.hier_lock_meta WHERE table_name = 'q_buckets'"):format(database))
    end)
    local function doctor() return findings_of(run("quorum:all;null:;" .. dsn, "doctor", "--json")) end
    assert_status(0, run(dsn, "provision", "--buckets", "10"))
    local found = doctor()
    assert_finding("wrong", found, "2: tables of leases")
    local words = assert(found["2: tables of leases"].mend[1]:match "^for store 2: hierlock (.*)$")
    assert_status(0, run(dsn, words:match "^(%S+) (%S+)$"))
    assert_finding("absent", doctor(), "2: tables of leases")
  end)
end)

support.on_postgresql(function(store)
  local database = (store.bare_dsn or ""):match "/([^/?]*)$"
  local root

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
      { "track_activities", "off", "track_activities" }, { "idle_session_timeout", "'1min'", "time-outs" },
    } do
      local name, value, check = unpack(case)
      it(name, function()
        local breaks, mends = alter(name, value)
        if name == "idle_session_timeout" then mends[3] = "ALTER ROLE testuser RESET idle_session_timeout" end
        assert_mended(check, "warning", breaks, mends)
      end)
    end
  end)

  it("names a server that forgets what it has answered, or clears nothing away, and the lines mend that", function()
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
  end)

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
    local lock = "FUNCTION pg_advisory_xact_lock(bigint)"
    for name, case in pairs {
      ["a function that locks"] = { "privileges", { "REVOKE EXECUTE ON " .. lock .. " FROM PUBLIC" },
        { "GRANT EXECUTE ON " .. lock .. " TO PUBLIC", "REVOKE EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint), " ..
          "pg_try_advisory_xact_lock_shared(bigint), pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint) FROM testuser" } },
      ["the sequence of tokens"] = { "tokens", { "CREATE SEQUENCE public.hier_lock_token" }, { "DROP SEQUENCE public.hier_lock_token" } },
      ["the tables of leases"] = { "tables of leases", { "REVOKE ALL ON public.hier_lock_leases FROM PUBLIC" },
        { "GRANT ALL ON public.hier_lock_leases TO PUBLIC" } },
      ["connections"] = { "connections of the role", { "ALTER ROLE testuser CONNECTION LIMIT 10" }, { "ALTER ROLE testuser CONNECTION LIMIT -1" } },
      ["connections to the database"] = { "connections of the database", { ("ALTER DATABASE %s CONNECTION LIMIT 10"):format(database) },
        { ("ALTER DATABASE %s CONNECTION LIMIT -1"):format(database) } },
    } do
      it(name, function() assert_mended(case[1], "wrong", case[2], case[3]) end)
    end

    it("the schema public", function()
      at_end(function()
        root:query "GRANT USAGE ON SCHEMA public TO PUBLIC"
        root:query "DROP OWNED BY hierlock_ill"
        root:query "DROP ROLE hierlock_ill"
      end)
      root:query "CREATE ROLE hierlock_ill LOGIN PASSWORD 'ill'"
      root:query "REVOKE USAGE ON SCHEMA public FROM PUBLIC"
      local dsn = store.dsn:gsub("//.-@", "//hierlock_ill:ill@")
      local found = examine(dsn)
      assert_finding("warning", found, "schema public")
      assert.equal(1, follow(dsn, found["schema public"], sql))
      assert_finding("absent", examine(dsn), "schema public")
    end)
  end)

  it("names tables of leases that are not whole; with none it tries no lease, and makes none", function()
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
  end)

  it("compares connections and locks with the pools that are wanted, and the lines make room", function()
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
  end)

  it("names a server that has no connection left, and the line gives the role one", function()
    at_end(function() store.root():query "ALTER ROLE testuser CONNECTION LIMIT -1" end)
    root:query "ALTER ROLE testuser CONNECTION LIMIT 0"
    local found = examine(store.dsn)
    assert_finding("wrong", found, "reached")
    assert.equal(1, follow(store.dsn, found.reached, sql))
    assert_finding("ok", examine(store.dsn), "reached")
  end)

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

  it("names locks of other roles that this one does not see, and the line shows them", function()
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
  end)

  it("changes a setting where it was made, which goes before others", function()
    for _, whose in ipairs { "ROLE ALL", "DATABASE " .. database, "ROLE testuser", "ROLE testuser IN DATABASE " .. database } do
      root:query("ALTER %s SET deadlock_timeout = '20s'", whose)
      at_end(function() store.root():query("ALTER %s RESET deadlock_timeout", whose) end)
      local found = examine(store.dsn)
      assert_finding("warning", found, "deadlock detection")
      assert.equal(1, follow(store.dsn, found["deadlock detection"], sql))
      assert_finding("ok", examine(store.dsn), "deadlock detection")
    end
    uv.os_setenv("PGOPTIONS", "-c synchronous_commit=off")
    at_end(function() uv.os_unsetenv "PGOPTIONS" end)
    assert.matches("take synchronous_commit out of PGOPTIONS", table.concat(examine(store.dsn).durability.mend), 1, true)
  end)

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

support.on_redis(function(store)
  local function config(name) return (store.cli("CONFIG", "GET", name):match "\n(.*)") or "" end

  local file -- the server's, which lines change

  before_each(function() -- as after the first use, and nothing of others
    store.cli "FLUSHALL"
    local manager = support.open(store)
    assert(manager:acquire { "u1" }):release { confirm = true }
    manager:close()
    file = store.cli("INFO", "server"):match "config_file:([^\r\n]+)"
    shell(("cp '%s' '%s.before'"):format(file, file))
    at_end(function() shell(("mv '%s.before' '%s'"):format(file, file)) end)
  end)

  -- Sets it, until the end of the spec.
  local function set(name, value)
    local before = config(name)
    at_end(function() store.cli("CONFIG", "SET", name, before) end)
    assert.equal("OK", store.cli("CONFIG", "SET", name, value))
  end

  local function until_info(pattern)
    support.wait_until(function() return store.cli "INFO":find(pattern) end, pattern)
  end

  -- Each line is run, but those in words.
  local function assert_mended(check, dsn, found)
    found = found or examine(dsn)
    local lines = 0
    for _, line in ipairs(found[check].mend) do
      assert.is_nil(line:find("password", 1, true), line)
      if line:find "^redis%-cli " then lines = lines + 1 end
    end
    assert.is_true(lines > 0, json.encode(found[check]))
    assert.equal(lines, follow(dsn, found[check], error))
    found = examine(dsn)
    assert.is_true(status_of(found, check) == "ok" or not found[check], json.encode(found[check]))
  end

  describe("a setting that is wrong is named, and put right by the line:", function()
    for _, case in ipairs {
      { "maxmemory-policy", "allkeys-lru", "eviction", "wrong" },
      { "maxclients", "40", "maxclients", "wrong" },
      { "timeout", "60", "time-outs", "warning" },
      { "maxmemory", "1mb", "memory", "warning" },
      { "appendonly", "no", "persistence", "warning" },
    } do
      local name, value, check, status = unpack(case)
      it(name, function()
        set("appendfsync", config "appendfsync")
        set(name, value)
        store.cli("CONFIG", "REWRITE")
        assert_finding(status, examine(store.dsn), check)
        assert_mended(check, store.dsn)
        -- The server's next run has it, too: the file says so, or says nothing where that is the default.
        for line in io.lines(file) do
          local said = line:match("^" .. name:gsub("%-", "%%-") .. " (.*)")
          assert.is_true(not said or said == config(name), line)
        end
      end)
    end
  end)

  it("names an append-only file that is not written while it is rewritten, and the line mends that", function()
    set("appendonly", "yes")
    set("appendfsync", "always")
    set("no-appendfsync-on-rewrite", "yes")
    assert_finding("warning", examine(store.dsn), "persistence")
    assert_mended("persistence", store.dsn)
  end)

  it("advises no setting on a server where others keep something, or that does not show whether", function()
    set("maxmemory-policy", "allkeys-lru")
    local app = store.dsn:gsub("//.-@", "//app:app@")
    store.cli("ACL", "SETUSER", "app", "on", ">app", "+@all", "-scan", "~hierlock:*", "&*")
    at_end(function() store.cli("ACL", "DELUSER", "app") end)
    for _, case in ipairs {
      { store.dsn, "0", "SET" }, { store.dsn, "5", "SET" }, { app, "0", "DEL" },
    } do
      store.cli("-n", case[2], case[3], "theirs", case[3] == "SET" and "1" or nil)
      local found = examine(case[1])
      assert_finding("wrong", found, "eviction")
      assert.matches("^a server for locks alone", found.eviction.mend[1])
      assert.is_nil(found.eviction.mend[2])
      store.cli("-n", case[2], "DEL", "theirs")
    end
    assert_mended("eviction", store.dsn)
  end)

  it("says who may, where this user may not, and the lines are for him", function()
    store.cli("ACL", "SETUSER", "app's", "on", ">app", "~hierlock:*", "&hierlock:*", "+@all", "-config", "-acl|dryrun")
    at_end(function() store.cli("ACL", "DELUSER", "app's") end)
    local dsn = store.dsn:gsub("//.-@", "//app's:app@")
    set("timeout", "60")
    set("appendfsync", "always")
    store.cli("ACL", "SETUSER", "app's", "+config|get")
    local found = examine(dsn)
    assert.matches("^as the user default", found["time-outs"].mend[1])
    assert.is_nil(found["time-outs"].mend[2]:find("--user", 1, true))
    assert_mended("time-outs", dsn, found)
    store.cli("ACL", "SETUSER", "app's", "-config|get")
    set("appendonly", "yes")
    assert_finding("unseen", examine(dsn), "persistence")
    assert_mended("persistence", dsn)
  end)

  it("names a snapshot that failed, and the line makes another", function()
    local dump = config "dir" .. "/" .. config "dbfilename"
    shell(("mkdir '%s'"):format(dump))
    at_end(function() shell(("rm -rf '%s'"):format(dump)) end)
    store.cli "BGSAVE"
    until_info "rdb_last_bgsave_status:err"
    local found = examine(store.dsn)
    assert_finding("warning", found, "snapshots")
    shell(("rmdir '%s'"):format(dump))
    assert.equal(1, follow(store.dsn, found.snapshots, error))
    until_info "rdb_last_bgsave_status:ok"
    assert_finding("absent", examine(store.dsn), "snapshots")
  end)

  it("has lines that come to a socket, whatever its name, and over TLS", function()
    local ca = os.getenv "HIERLOCK_REDIS_CA"
    local directory = ca:match "^(.*)/"
    local odd = os.tmpname() .. " it's"
    shell(([[ln -s '%s' "%s"]]):format(os.getenv "HIERLOCK_REDIS_SOCKET", odd))
    at_end(function() os.remove(odd) os.remove(odd:sub(1, -6)) end)
    local probe = assert(require("socket").bind("127.0.0.1", 0))
    local port = select(2, probe:getsockname())
    probe:close()
    store.cli("CONFIG", "SET", "tls-auth-clients", "optional")
    store.cli("CONFIG", "SET", "tls-cert-file", directory .. "/cert.pem", "tls-key-file", directory .. "/key.pem", "tls-ca-cert-file", ca)
    set("tls-port", tostring(port))
    local at_tls = ("rediss://testuser:testpassword@127.0.0.1:%d/0?quarantine=0&"):format(port)
    for _, dsn in ipairs {
      "redis+unix://testuser:testpassword@" .. odd:gsub(" ", "%%20") .. "?quarantine=0",
      at_tls .. "tls_ca=" .. ca:gsub("/", "%%2F"),
      at_tls .. "tls=required",
    } do
      set("timeout", "60")
      assert_mended("time-outs", dsn)
    end
  end)

  it("counts replicas as the DSN says it, and the line is what the DSN takes", function()
    local pipe = io.popen(("unset LD_PRELOAD; REDISCLI_AUTH=rootpassword redis-cli -h %s -p %s --replica >/dev/null 2>&1 & echo $!")
      :format(store.host, store.port))
    local pid = tonumber(pipe:read "*l")
    pipe:close()
    at_end(function() uv.kill(pid, "sigkill") end)
    until_info "connected_slaves:1"
    local found = examine(store.dsn)
    assert_finding("warning", found, "replicas")
    local more = found.replicas.mend[1]:match "^in the DSN: (.*)$"
    assert_finding("ok", examine(store.dsn .. "&" .. more), "replicas")
    uv.kill(pid, "sigkill")
    until_info "connected_slaves:0"
    assert_finding("wrong", examine(store.dsn .. "&" .. more), "replicas")
  end)

  it("names a replica, and the line makes it a master", function()
    at_end(function() store.cli("REPLICAOF", "NO", "ONE") end)
    store.cli("REPLICAOF", "127.0.0.1", "1")
    local found = examine(store.dsn)
    assert_finding("wrong", found, "replica")
    assert_finding("wrong", found, "opens")
    assert_mended("replica", store.dsn, found)
  end)

  it("says what a user may not see or do", function()
    at_end(function() store.cli("ACL", "DELUSER", "poor") end)
    local dsn = store.dsn:gsub("//.-@", "//poor:poor@")
    store.cli("ACL", "SETUSER", "poor", "on", ">poor", "~hierlock:*", "+info", "+time", "+get", "+setnx", "+ping", "+select")
    local found = examine(dsn)
    assert.equal("wrong", found.verdict)
    assert_finding("wrong", found, "opens")
    assert.matches("docs/security.md", found.opens.mend[1], 1, true)
    found = examine((dsn:gsub("poor:poor", "poor:rich")))
    assert_finding("wrong", found, "reached")
    assert.matches("password", found.reached.mend[1])
  end)

  it("settles nothing where nobody has been, unless the levels are said", function()
    local dsn = store.dsn .. "&prefix=hierlock:doctor"
    at_end(function() store.cli("EVAL", "for _, k in ipairs(redis.call('KEYS', 'hierlock:doctor:*')) do redis.call('DEL', k) end", "0") end)
    local found = examine(dsn)
    assert_finding("unseen", found, "opens")
    assert.equal("", store.cli("KEYS", "hierlock:doctor:*"))
    assert_finding("ok", examine(dsn, "--levels", "a,b"), "a lock")
  end)
end)

support.on_memcached(function(store)
  before_each(function()
    local manager = support.open(store)
    assert(manager:acquire { "u1" }):release { confirm = true }
    manager:close()
  end)

  it("finds a server that is well, and says what it is not for", function()
    local found = examine(store.dsn)
    assert_finding("ok", found, "a lock")
    assert_finding("warning", found, "durability")
    assert.equal("warning", found.verdict)
  end)

  local function options_of(finding) return assert(finding.mend[1]:match "start memcached with (.*)$", finding.mend[1]) end

  it("names options with which it must not be used, and those with which it may", function()
    at_end(function() store.command "restart" end)
    store.command("restart", "-C -c 40 -m 8")
    for i = 1, 30 do store.say(("set fill%d 0 0 500000\r\n"):format(i) .. ("x"):rep(500000)) end
    local found = examine(store.dsn)
    assert.equal("start memcached without -C", found["compare and swap"].mend[1])
    for check, status in pairs { ["compare and swap"] = "wrong", connections = "wrong", memory = "warning", eviction = "warning" } do
      assert_finding(status, found, check)
    end
    assert.equal(options_of(found.memory), options_of(found.eviction))
    store.command("restart", options_of(found.connections) .. " " .. options_of(found.memory))
    local after = examine(store.dsn, "--levels", "user,account,resource")
    for _, check in ipairs { "compare and swap", "connections", "memory", "eviction", "a lock" } do assert_finding("ok", after, check) end
    assert.matches("^0 of 16 MiB", after.memory.found)
  end)

  it("names one that everybody reaches, and the option that closes it", function()
    -- In a network of its own, as it listens on all addresses.
    local function among(options)
      local pipe = io.popen(([[unset LD_PRELOAD; exec unshare -n%s bash -c 'ip link set lo up || exit; memcached -u "$(id -un)" -p 11311 %s & pid=$!
        until (: <>/dev/tcp/127.0.0.1/11311) 2>/dev/null; do kill -0 $pid || exit; sleep 0.01; done
        HIERLOCK_DSN=memcached://127.0.0.1:11311 %s lua/hierlock/command/main.lua doctor --json; kill $pid']]):format(
        uv.getuid() == 0 and "" or "r", options, program.interpreter))
      local said = pipe:read "*a"
      pipe:close()
      return findings_of { out = said, err = "", status = 0 }
    end
    local found = among "-l 0.0.0.0"
    assert_finding("warning", found, "access")
    assert_finding("ok", among(options_of(found.access)), "access")
  end)

  it("settles nothing where nobody has been", function()
    assert_finding("unseen", examine(store.dsn .. "?prefix=doctor"), "opens")
    assert.equal("END", store.say "get doctor:space")
  end)
end)

describe("a directory", function()
  local directory, dsn

  before_each(function()
    directory = os.tmpname()
    os.remove(directory)
    dsn = "file:" .. directory
    assert_status(0, run(dsn, "doctor", "--levels", "user,account,resource"))
    at_end(function() shell("rm -rf " .. directory) end)
  end)

  local function assert_mended(check, status, at)
    local found = examine(at or dsn)
    assert_finding(status, found, check)
    assert.is_true(follow(at or dsn, found[check], error) > 0)
    found = examine(at or dsn)
    assert.is_true(status_of(found, check) == "ok" or not found[check], json.encode(found[check]))
  end

  it("in which everybody may write is named, and closed by the line", function()
    shell("chmod 0777 " .. directory)
    assert_mended("rights", "warning")
  end)

  it("is told to be changed only where it is hierlock's", function()
    shell(": >" .. directory .. "/x; mkdir -m 0777 " .. directory .. "/y; : >" .. directory .. "/y/z")
    for place, check in pairs { ["/x"] = "directory", ["/y"] = "rights" } do
      local found = examine(dsn .. place)
      assert.not_equal("ok", status_of(found, check))
      for _, line in ipairs(found[check].mend) do assert.matches("^name a", line) end
    end
  end)

  it("of another user is named to root", function()
    if uv.getuid() ~= 0 then return end
    shell("chown 65534 " .. directory)
    local found = examine(dsn)
    assert_finding("warning", found, "rights")
    assert.matches("belongs to user 65534", found.rights.found, 1, true)
  end)

  it("that is none, or in which one cannot be made, is named", function()
    shell(": >" .. directory .. "/x")
    for _, place in ipairs { "/x", "/x/y", "/x/y/z" } do
      local found = examine(dsn .. place)
      assert_finding("wrong", found, "directory")
      assert.matches("^name another directory", found.directory.mend[1])
    end
    shell("rm " .. directory .. "/x; mkdir " .. directory .. "/y")
    assert_finding("ok", examine(dsn .. "/y/z"), "directory")
    assert.is_nil(uv.fs_stat(directory .. "/y/z"))
    assert_mended("directory", "wrong", dsn .. "/a/b c")
  end)

  it("that only root can make is made for the user by the line", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell("chmod 0755 " .. directory)
    for _, place in ipairs { "/c", "/d/e" } do
      local found = examined_by(65534, dsn .. place)
      assert_finding("wrong", found, "directory")
      assert.equal("as root:", found.directory.mend[1])
      assert.equal(1, follow(dsn, found.directory, error))
      found = examined_by(65534, dsn .. place, "--levels user,account")
      assert_finding("ok", found, "directory")
      assert_finding("ok", found, "a lock")
    end
    -- The other user cannot enter that directory, whoever owns it.
    shell("chmod 0700 " .. directory)
    assert.matches("^name another directory", examined_by(65534, dsn .. "/f").directory.mend[1])
  end)

  it("of any name has lines that a shell reads as that name, wherever they are shown", function()
    for _, name in ipairs { "-h4 a", "it's", "a\nb", "str\195\164nge %s\\", "\27[31m$(false)`" } do
      local place = name:find "^%-" and name or directory .. "/" .. name
      local at = "file:" .. place:gsub("%%", "%%25")
      at_end(function() shell("rm -rf ./-h4*") end)
      -- An unused store, named by an argument.
      local opens = findings_of(run(nil, "doctor", "--json", at)).opens
      assert.equal("unseen", opens.status)
      shell(("hierlock() { %s lua/hierlock/command/main.lua \"$@\"; }; %s"):format(program.interpreter, opens.mend[1]))
      assert_finding("ok", examine(at), "a lock")
      assert(uv.fs_chmod(place, tonumber("777", 8)))
      assert_mended("rights", "warning", at)
      assert(uv.fs_chmod(place, tonumber("777", 8)))
      local said = assert_status(0, run(at, "doctor"))
      shell(assert(said.out:match "mend: (chmod [^\n]*)\n", said.out))
      assert.equal(tonumber("775", 8), assert(uv.fs_stat(place)).mode % 512)
    end
  end)

  it("with what others have put into it is named, and nobody is told to delete that", function()
    shell(("mkdir \"%s/it's\""):format(directory))
    local found = examine(dsn)
    assert_finding("warning", found, "other files")
    assert.equal(0, follow(dsn, found["other files"], error))
    shell(("rmdir \"%s/it's\""):format(directory))
    assert_finding("absent", examine(dsn), "other files")
  end)

  -- A process of another container is not seen, but may live: removing its file would hide its locks.
  it("is told to be freed of no process's file, as the store does that itself", function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    local handle = assert(manager:acquire { "u1" })
    shell(("touch -d '1 hour ago' %s/who-*; touch -d '1 hour ago' %s/tmp-999999999-0123456789abcdef"):format(directory, directory))
    local pipe = io.popen(("unset LD_PRELOAD; HIERLOCK_DSN=%s unshare -pf%s %s lua/hierlock/command/main.lua doctor --json"):format(dsn,
      uv.getuid() == 0 and "" or "r", program.interpreter))
    local said = pipe:read "*a"
    pipe:close()
    assert.is_nil(said:find("who-", 1, true), said)
    assert_finding("ok", findings_of { out = said, err = "", status = 0 }, "a lock")
    assert.is_nil(uv.fs_stat(directory .. "/tmp-999999999-0123456789abcdef"))
    assert.equal(1, #assert(manager:holders { "u1" }))
    assert(handle:release())
  end)

  it("that a user may not use is named to him", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell("chmod 0711 " .. directory)
    local found = examined_by(65534, dsn)
    assert_finding("wrong", found, "rights")
    assert_finding("wrong", found, "opens")
    -- Closed to others it would be closed to him.
    shell("chmod 0777 " .. directory)
    found = examined_by(65534, dsn)
    assert_finding("warning", found, "rights")
    assert.matches("^have user 0 give it to a group", found.rights.mend[1])
  end)

  -- The directory's owner may have programs that lock in it.
  it("of another user, in the place of this user's own, is not said to be removed", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell "mkdir -m 0700 /dev/shm/hierlock-54321"
    at_end(function() shell "rmdir /dev/shm/hierlock-54321" end)
    local found = examined_by(54321, "file:")
    assert.equal("it belongs to user 0", found.rights.found)
    assert.matches("^name a directory for hierlock alone", found.rights.mend[1])
  end)

  it("with files that a user may not write is mended by the lines, as the store makes its files", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    for _, case in ipairs { { "0755", "0600" }, { "0775", "0660" } } do
      local group = case[1] == "0775"
      shell(("chmod %s %s; chown %s %s"):format(case[1], directory, group and "12345:65534" or "65534:65534", directory))
      shell(("chown 0:0 %s/*; chmod 0600 %s/*"):format(directory, directory))
      local found = examined_by(65534, dsn)
      assert_finding("wrong", found, "files")
      assert.equal("as root:", found.files.mend[1])
      assert.equal(2, follow(dsn, found.files, error))
      found = examined_by(65534, dsn)
      assert_finding("absent", found, "files")
      assert_finding("ok", found, "a lock")
      assert.equal(tonumber(case[2], 8), assert(uv.fs_stat(directory .. "/control")).mode % 512)
    end
  end)

  it("in the place of this user's own that is a link is not told to be removed by another", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    local own = "/dev/shm/hierlock-54321"
    at_end(function() shell("rm -rf " .. own) end)
    for _, owner in ipairs { 54321, 0 } do
      shell(("ln -s %s %s; chown -h %d %s"):format(directory, own, owner, own))
      local found = examined_by(54321, "file:")
      assert_finding("wrong", found, "directory")
      assert.equal(owner == 0 and "as root:" or "rm " .. own, found.directory.mend[1])
      assert.equal(1, follow(dsn, found.directory, error))
      assert_finding("ok", examined_by(54321, "file:"), "directory")
    end
    shell(": >" .. own)
    assert.matches("^name another", examined_by(54321, "file:").directory.mend[1])
  end)

  it("for which there are too few descriptors is named, and the line gives more", function()
    local function among(limits)
      local pipe = io.popen(("%s; HIERLOCK_DSN=%s %s lua/hierlock/command/main.lua doctor --json"):format(limits, dsn, program.interpreter))
      local said = pipe:read "*a"
      pipe:close()
      return findings_of { out = said, err = "", status = 0 }
    end
    local found = among "ulimit -Sn 128"
    assert_finding("warning", found, "descriptors")
    assert_finding("ok", among("ulimit -Sn 128; " .. found.descriptors.mend[1]), "descriptors")
    if uv.getuid() ~= 0 then return end
    found = examined_by(65534, "file:" .. directory .. "-none", "", "ulimit -n 128")
    assert.matches("^more than 128 need root", found.descriptors.mend[1])
  end)

  it("on a full file system is named, and the line shows what there is", function()
    local words = ("HIERLOCK_DSN=%s %s lua/hierlock/command/main.lua doctor --json --levels a,b"):format(dsn, program.interpreter)
    local function among(size, line)
      local pipe = io.popen(("unset LD_PRELOAD; exec unshare -m%s sh -c 'mount -t tmpfs -o size=%s tmpfs %s && %s'"):format(
        uv.getuid() == 0 and "" or "r", size, directory, line or words))
      local said = pipe:read "*a"
      pipe:close()
      return said
    end
    local said = among "1m"
    local found = findings_of { out = said, err = "", status = 1 }
    assert_finding("wrong", found, "space")
    assert.matches("1.0M.*tmpfs", among("1m", found.space.mend[2]))
    assert_finding("ok", findings_of { out = among "8m", err = "", status = 0 }, "space")
  end)

  it("on a network file system would be named", function()
    local core = require "hierlock.core"
    assert.equal("NFS", core.remote_kind(0x6969))
    assert.equal("SMB", core.remote_kind(0xFE534D42))
    assert.is_nil(core.remote_kind(0x01021994))
  end)

  it("of a quorum is looked at like each of its stores", function()
    local several = ("quorum:majority;file:%s/1;file:%s/2;file:%s/3"):format(directory, directory, directory)
    assert_finding("unseen", examine(several), "opens")
    local found = examine(several, "--levels", "a,b")
    assert_finding("ok", found, "a lock")
    shell("chmod 0777 " .. directory .. "/2")
    found = examine(several)
    assert_finding("warning", found, "2: rights")
    assert_finding("ok", found, "3: rights")
    local four = several .. (";file:%s/4"):format(directory)
    assert_finding("warning", examine(four), "number of stores")
  end)
end)

support.on_sqlite(function(store)
  local file, dsn

  before_each(function()
    file = store.directory .. "/doctor.db"
    dsn = "sqlite:" .. file
    at_end(function() shell("rm -f " .. file .. "*") end)
    assert_finding("unseen", examine(dsn), "opens")
    assert.is_nil(uv.fs_stat(file))
    assert_finding("ok", examine(dsn, "--levels", "user,account,resource"), "a lock")
  end)

  it("names a file that everybody may read, or its log, and the line closes them", function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true }
    for _, which in ipairs { "", "-wal", "*" } do
      shell(("chmod 0644 %s%s"):format(file, which))
      local found = examine(dsn)
      assert_finding("warning", found, "rights")
      assert.equal(1, follow(dsn, found.rights, error))
      assert_finding("ok", examine(dsn), "rights")
      shell(("test -z \"$(find %s* -perm /007)\""):format(file))
    end
  end)

  it("says who can close a file of another user's", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    local directory = os.tmpname()
    at_end(function() shell("rm -rf " .. directory) end)
    shell(("rm %s; mkdir -m 0777 %s"):format(directory, directory))
    local at = "sqlite:" .. directory .. "/a/b.db"
    shell(("chmod 0755 %s"):format(directory))
    local found = examined_by(65534, at)
    assert_finding("wrong", found, "file")
    assert.equal("as root:", found.file.mend[1])
    assert.equal(1, follow(dsn, found.file, error))
    assert_finding("ok", examined_by(65534, at, "--levels a,b"), "a lock")
    shell(("chown 12345 %s/a/b.db; chmod 0666 %s/a/b.db"):format(directory, directory))
    found = examined_by(65534, at)
    assert_finding("warning", found, "rights")
    assert.equal("as root, or user 12345:", found.rights.mend[1])
  end)

  it("names a long log, and the line shortens it", function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true }
    shell(("truncate -s 70M %s-wal"):format(file))
    local found = examine(dsn)
    assert_finding("warning", found, "log")
    shell(("truncate -s 70M %s-wal"):format(file)) -- a program that has locked meanwhile may have shortened it
    assert.equal(1, follow(dsn, found.log, error))
    assert_finding("ok", examine(dsn), "log")
  end)

  it("has nobody change the rights of a file that is not hierlock's", function()
    shell(": >" .. file .. "0; chmod 0644 " .. file .. "0")
    local found = examine(dsn .. "0")
    assert_finding("warning", found, "rights")
    assert.matches("^name a file", found.rights.mend[1])
  end)

  it("names a file with two names, one of another program, none at all, and a DSN that lets changes be forgotten", function()
    shell(("ln %s %s2; ln -s %s %s3"):format(file, file, file, file))
    for _, name in ipairs { file, file .. "3" } do
      local found = examine("sqlite:" .. name)
      assert_finding("wrong", found, "names")
      local pipe = io.popen(found.names.mend[2])
      local shown = {}
      for line in pipe:lines() do shown[line] = true end
      pipe:close()
      assert.same({ [file] = true, [file .. "2"] = true }, shown)
    end
    shell(("rm %s2"):format(file))
    assert_finding("ok", examine(dsn), "names")
    shell(("mkdir %s2"):format(file))
    at_end(function() shell("rm -rf " .. file .. "2") end)
    assert_finding("wrong", examine("sqlite:" .. file .. "2"), "file")
    assert_finding("wrong", examine("sqlite:" .. file .. "2/a/b"), "file")
    assert_finding("warning", examine(dsn .. "?synchronous=normal"), "durability")
    shell(("echo 'this is none, and long enough to be taken for one, were it not for its first bytes' >%s2/x"):format(file))
    assert_finding("wrong", examine("sqlite:" .. file .. "2/x"), "opens")
  end)

  it("names a file that was mounted by its own name", function()
    local pipe = io.popen(([[unshare -m%s sh -c 'mount --bind "$0" "$0"; HIERLOCK_DSN="$1" exec %s lua/hierlock/command/main.lua doctor --json' %s %s]])
      :format(uv.getuid() == 0 and "" or "r", program.interpreter, file, dsn))
    local found = assert(json.decode(pipe:read "*a"))
    pipe:close()
    for _, finding in ipairs(found.findings) do found[finding.check] = finding end
    assert_finding("wrong", found, "mount")
    assert_finding("wrong", found, "opens")
  end)
end)
