--- The command `hierlock`. provision makes the table that programs need, whatever interrupts it and whatever programs
-- lock meanwhile, and never one that they would disagree about. verify finds missing rows. Each runs as a user runs
-- it: a process of its own, on a terminal where it matters.
-- Parts: stores

local uv = require "luv"
local hierlock = require "hierlock"
local support = require "spec.support"
local program = require "spec.support.command"

local TABLE = "hierlock_spec_command"
local PROGRAM = "lua/hierlock/command/main.lua"
-- This user's directory, named: of `file:` alone `run` says to root whose locks they are.
local NAMED = ("file:/dev/shm/hierlock-%d"):format(uv.getuid())
local INTERPRETER = program.interpreter
local start, run, assert_status = program.start, program.run, program.assert_status

after_each(program.close)

-- On a terminal of its own, by script(1), with a line typed for each prompt.
local function on_terminal(typed, dsn, arguments)
  local pipe = assert(io.popen(("printf '%%s\\n' '%s' | HIERLOCK_DSN='%s' TERM=xterm script -qec '%s %s %s' /dev/null 2>&1; echo \"=$?\"")
    :format(typed, dsn or "file:", INTERPRETER, PROGRAM, arguments)))
  local text = pipe:read("*a")
  pipe:close()
  return text
end

describe("the command line", function()
  it("explains itself", function()
    local help = assert_status(0, run(nil, "--help"))
    assert.matches("provision", help.out)
    assert.matches("verify", help.out)
    for _, name in ipairs { "provision", "verify", "run", "leases", "revoke", "ps", "top", "explain", "graph", "kill", "doctor", "matrix", "bench" } do
      assert.matches("$HIERLOCK_DSN", assert_status(0, run(nil, name, "--help")).out, 1, true)
    end
    assert.equal(hierlock._VERSION .. "\n", assert_status(0, run(nil, "--version")).out)
  end)

  it("is all in the manual page, and nothing else is", function()
    local page = io.open("docs/hierlock.1"):read("*a")
    for _, name in ipairs { "provision", "verify", "run", "leases", "revoke", "ps", "top", "explain", "graph", "kill", "doctor", "matrix", "bench" } do
      local section = assert(page:match("\n%.Ss hierlock " .. name .. "\n(.-)\n%.S[sh]"), "no section on " .. name)
      local documented = {}
      for option in section:gmatch("%.It Fl [^\n]*Fl %-([%w-]+)") do documented[option] = true end
      for option in section:gmatch("%.It Fl %-([%w-]+)") do documented[option] = true end
      local help = run(nil, name, "--help").out:match("Options:(.*)")
      for option in help:gmatch("%-%-([%w-]+)") do
        assert.is_true(documented[option], name .. " --" .. option .. " is not in the manual page")
        documented[option] = nil
      end
      assert.is_nil(next(documented), "the manual page knows an option that the command does not")
    end
  end)

  it("says what is wrong with it, and exits with 64", function()
    for _, arguments in ipairs {
      {}, { "provide" }, { "provision", "--bukets", "5" }, { "provision", "--buckets", "0" },
      { "provision", "--buckets", "2.5" }, { "provision", "--buckets", "x" }, { "provision", "--levels", "a,,b" },
      { "provision", "--levels", "" }, { "provision", "--chunk", "0" }, { "provision", "--chunk", "1000001" },
      { "provision", "--rate", "0" }, { "provision", "--rate", "-1" }, { "verify", "pg://x/y" },
      { "verify", "file:", "more" },
    } do
      local command = assert_status(64, run("mysql://u@127.0.0.1:1/d", (table.unpack or unpack)(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. command.err)
      assert.equal("", command.out)
    end
  end)

  it("may contain no password, which `ps` would show", function()
    for _, dsn in ipairs { "mysql://u:sEcReT@127.0.0.1:1/d", "u:sEcReT@tcp(127.0.0.1:1)/d",
                           "postgresql://u:sEcReT@127.0.0.1:1/d", "host=127.0.0.1 port=1 password=sEcReT",
                           "postgresql://127.0.0.1:1/d?sslpassword=sEcReT", "host=127.0.0.1 port=1 sslpassword = sEcReT",
                           "redis+sentinel://127.0.0.1:1/0?service=m&sentinel_password=sEcReT",
                           "REDIS+SENTINEL://127.0.0.1:1/0?service=m&sentinel_passwor%64=sEcReT",
                           "quorum:majority;redis://127.0.0.1:1;redis://:sEcReT@127.0.0.1:2;redis://127.0.0.1:3",
                           "quorum:all;redis://127.0.0.1:1;redis+sentinel://127.0.0.1:2?service=m%3Bn&sentinel_password=sEcReT",
                           "mysql://u@127.0.0.1:1/d?password=sEcReT", "Mysql://u@127.0.0.1:1/d?PassWord=sEcReT" } do
      local command = assert_status(64, run(nil, "provision", dsn))
      assert.matches("--ask-password", command.err, 1, true)
      assert.is_nil((command.out .. command.err):find("sEcReT", 1, true))
    end
  end)

  it("leaves the terminal as it was when a signal ends the question for the password", function()
    local said = program.line_on_terminal(nil, 80, ([[ulimit -c 0
      for signal in TERM HUP QUIT INT; do
        sh -c '(until stty -a </dev/tty | grep -q -e "-echo "; do sleep 0.05; done; kill -'$signal' $$) &
          exec %s %s ps -p --dsn mysql://u@127.0.0.1:1/d'
        echo "=$? $(stty -a | grep -o -e "-*echo ")"
        stty echo
      done]]):format(INTERPRETER, PROGRAM)).join().out
    local found = {}
    for line in said:gmatch "=%d+[^\r\n]*" do found[#found + 1] = line end
    assert.same({ "=143 echo ", "=129 echo ", "=131 echo ", "=130 echo " }, found, said)
  end)

  it("ends by Ctrl-C with 130 while it still loads what it is made of, and blames no module", function()
    for _, module in ipairs { "argparse", "luv", "hierlock", "hierlock.command.run" } do
      local load = ([[
        package.preload["%s"] = function()
          local kill = io.popen("kill -INT $PPID")
          kill:read "*a"
          kill:close()
          while true do end
        end
        arg = { [0] = "hierlock", "--version" }
        dofile "%s"
      ]]):format(module, PROGRAM)
      local output, status = support.run(load)
      assert.equal("", output)
      assert.equal(130, status)
    end
  end)

  it("is fine for a store that needs nothing", function()
    assert_status(0, run("file:", "provision"))
    assert_status(0, run(nil, "verify", "null:"))
  end)

  it("says whose the locks of `file:` are; of a directory's nothing", function()
    local said = assert_status(0, run(nil, "verify", "file:")).out
    assert.truthy(said:find(("%s are those of user %d alone"):format(NAMED:match "^file:(.*)", uv.getuid()), 1, true), said)
    assert.equal("file: needs no provisioning\n", assert_status(0, run(nil, "verify", NAMED)).out)
  end)

  -- Runs the command as a shell does, with something done to its descriptors: its output, and its exit status.
  local function shell(arguments, descriptors)
    local pipe = assert(io.popen(("{ HIERLOCK_DSN=%s %s %s %s %s; } 2>&1; echo =$?"):format(NAMED, INTERPRETER, PROGRAM, arguments, descriptors)))
    local said = pipe:read "*a"
    pipe:close()
    return said
  end

  it("works where standard descriptors are closed, and gives none of them to anything else", function()
    local node = ("'of the spec %d'"):format(uv.os_getpid())
    for _, closed in ipairs { "<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-" } do
      -- The command gets them as they were: whatever it reads or writes there fails, or does nothing.
      assert.equal("=7\n", shell("run " .. node .. [[ -- sh -c 'for fd in 0 1 2; do
        case $(readlink /proc/$$/fd/$fd) in socket:*|anon_inode:*) exit 8;; esac; done; exit 7']], closed), closed)
      assert.matches("=0\n$", shell("run " .. node .. " -- true", closed), closed)
    end
    assert.equal("hierlock: cannot write: Bad file descriptor\n=74\n", shell("explain u1", ">&-"))
    assert.matches("=0\n$", shell("explain u1", "<&-"))
    assert.equal("=64\n", shell("explain", "2>&-"))
  end)

  -- Opens a file as LuaRocks' loader does, which runs before the command.
  it("works where a closed standard descriptor became a file's that is garbage", function()
    local line = ([[%s -e 'io.open "/bin/sh"' %s run 'of the spec %d' -- sh -c 'readlink /proc/$$/fd/0']])
      :format(INTERPRETER, PROGRAM, uv.os_getpid())
    local pipe = assert(io.popen(("{ HIERLOCK_DSN=%s %s <&-; } 2>&1; echo =$?"):format(NAMED, line)))
    assert.equal("/dev/null\n=0\n", pipe:read "*a")
    pipe:close()
  end)

  it("says so when what it writes cannot be written", function()
    for _, arguments in ipairs { "explain u1", "provision", "verify", "graph", "--help", "ps --help", "--version", "--completion bash",
                                 "provision --leases --dry-run postgresql://127.0.0.1:1/d" } do
      assert.equal("hierlock: cannot write: No space left on device\n=74\n", shell(arguments, ">/dev/full"), arguments)
    end
  end)

  it("says when there is no server, and exits with 69", function()
    local command = assert_status(69, run(nil, "provision", "mysql://u@127.0.0.1:1/d"))
    assert.matches("127.0.0.1", command.err, 1, true)
  end)
end)

support.each_server(function(store)
  local dsn = store.bare_dsn and store.bare_dsn .. "?table=" .. TABLE

  local function sql(query, ...) return store.sql():query(query, ...) end
  local function count()
    local rows = store.sql():try("SELECT COUNT(*) FROM " .. TABLE)
    if not rows then return 0 end
    local n = tonumber(rows:fetch({}, "n")[1])
    rows:close()
    return n
  end
  local function clean()
    sql("DROP TABLE IF EXISTS " .. TABLE)
    sql("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
  end
  before_each(clean)
  after_each(function()
    support.close_peers()
    clean()
  end)

  local function provision(...) return run(dsn, "provision", ...) end
  local function verify(...) return run(dsn, "verify", ...) end

  -- Programs can lock with these buckets and levels.
  local function assert_usable(buckets, levels)
    local manager = assert(hierlock.open(dsn, { buckets = buckets, levels = levels }))
    for i = 1, 20 do assert(manager:acquire { "u" .. i, "a" .. i, "r" .. i }):release() end
    manager:close()
  end

  describe("provision", function()
    it("makes the tables of sql/schema.sql, filled to the last bucket, and says so", function()
      local command = assert_status(0, provision("--buckets", "2345", "--chunk", "1000"))
      assert.matches("7,035 rows, 7,035 of them new", command.out, 1, true)
      local made = sql("SHOW CREATE TABLE " .. TABLE)[1][2]
      assert.same({ { "0", "2345", "0", "2344" }, { "1", "2345", "0", "2344" }, { "2", "2345", "0", "2344" } },
        sql("SELECT level, COUNT(*), MIN(bucket), MAX(bucket) FROM %s GROUP BY level ORDER BY level", TABLE))
      assert.same({ { "2345", "user,account,resource" } },
        sql("SELECT buckets, levels FROM hier_lock_meta WHERE table_name='%s'", TABLE))
      assert_usable(2345)
      clean()
      support.provision(store.sql(), TABLE, 10)
      assert.equal(sql("SHOW CREATE TABLE " .. TABLE)[1][2], made)
    end)

    it("has nothing to do the second time, also without being told the size again", function()
      provision("--buckets", "500")
      local command = assert_status(0, provision())
      assert.matches("1,500 rows, 0 of them new", command.out, 1, true)
    end)

    it("takes any levels, whatever their names, and any chunk", function()
      for _, levels in ipairs { "a", "a,b'c\\d\"e", "größe,l2,l3,l4,l5" } do
        clean()
        local list = {}
        for name in levels:gmatch("[^,]+") do list[#list + 1] = name end
        assert_status(0, provision("--buckets", "77", "--levels", levels, "--chunk", "10"))
        assert_status(0, verify("--levels", levels, "--buckets", "77"))
        assert.equal(77 * #list, count())
        hierlock.open(dsn, { buckets = 77, levels = list }):close()
      end
    end)

    it("fills what is missing anywhere, without waiting for rows that are locked", function()
      provision("--buckets", "3000")
      sql("DELETE FROM %s WHERE bucket %% 7 = 3 OR (level = 1 AND bucket > 2000)", TABLE)
      local handles = {}
      local manager = assert(hierlock.open(dsn, { buckets = 3000 }))
      local held = 0
      for i = 1, 300 do
        local handle = manager:acquire({ "u" .. i }, { timeout = 0 })
        if handle then
          -- Kept.
          held = held + 1
          handles[held] = handle
          if held == 10 then break end
        end
      end
      assert.equal(10, held)
      assert_status(0, provision("--chunk", "250"))
      for _, handle in ipairs(handles) do assert.is_true(handle:release { confirm = true }) end
      manager:close()
      assert_status(0, verify())
      assert.equal(9000, count())
    end)

    it("does not depend on limits of the server's that end statements early", function()
      local root = store.root() or pending("no administrator here")
      local limits = store.dialect == "mysql" and { cte_max_recursion_depth = 100, max_execution_time = 1 }
        or { max_recursive_iterations = 100, max_statement_time = 0.01 }
      finally(function()
        for name in pairs(limits) do root:query("SET GLOBAL %s=DEFAULT", name) end
      end)
      for name, value in pairs(limits) do root:query("SET GLOBAL %s=%s", name, tostring(value)) end
      assert_status(0, provision("--buckets", "50000"))
      assert_status(0, verify())
    end)

    it("lets other programs lock meanwhile", function()
      provision("--buckets", "50000", "--levels", "user") -- the first level is there
      sql("UPDATE hier_lock_meta SET levels='user,account' WHERE table_name='%s'", TABLE)
      local command = start(dsn, "provision", "--rate", "5000")
      command.until_true(function() return count() > 50000 end, "the first rows")
      local manager = assert(hierlock.open(dsn, { buckets = 50000, levels = { "user", "account" } }))
      for i = 1, 200 do assert(manager:acquire({ "u" .. i }, { timeout = 0 })):release() end
      assert.is_nil(command.status)
      manager:close()
      uv.kill(command.pid, "sigint") -- it would take 10 s
      assert_status(130, command.join())
      assert_status(0, provision())
    end)

    it("goes on after Ctrl-C", function()
      local command = start(dsn, "provision", "--buckets", "10000", "--rate", "20000")
      command.until_true(function() return count() > 0 end, "the first rows")
      uv.kill(command.pid, "sigint")
      assert_status(130, command.join())
      assert.matches("run the same command again", command.err, 1, true)
      local before = count()
      assert.is_true(before < 30000)
      assert_status(1, verify())
      local again = assert_status(0, provision("--buckets", "10000"))
      assert.matches(("30,000 rows, %s of them new"):format(
        ("%d"):format(30000 - before):gsub("(%d)(%d%d%d)$", "%1,%2")), again.out)
      assert_status(0, verify())
    end)

    it("goes on after kill -9", function()
      local command = start(dsn, "provision", "--buckets", "10000", "--rate", "20000")
      command.until_true(function() return count() > 0 end, "the first rows")
      uv.kill(command.pid, "sigkill")
      command.join()
      assert.equal(9, command.signal)
      assert_status(0, provision())
      assert_status(0, verify())
    end)

    it("goes on by itself when its connection is killed", function()
      local command = start(dsn, "provision", "--buckets", "10000", "--rate", "20000")
      command.until_true(function() return count() > 0 end, "the first rows")
      local ids = sql("SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN " ..
        "(SELECT PROCESSLIST_ID FROM performance_schema.session_account_connect_attrs " ..
        "WHERE ATTR_VALUE='hierlock provision')")
      assert.equal(1, #ids)
      sql("KILL " .. ids[1][1])
      assert_status(0, command.join())
      assert.matches("trying again", command.err, 1, true)
      assert_status(0, verify())
    end)

    it("goes on by itself when the server is restarted", function()
      if not store.control then pending("the server is not ours to restart") end
      local command = start(dsn, "provision", "--buckets", "10000", "--rate", "20000")
      command.until_true(function() return count() > 0 end, "the first rows")
      uv.kill(command.pid, "sigstop") -- or it may have ended before the server has
      store.command("restart")
      uv.kill(command.pid, "sigcont")
      assert_status(0, command.join())
      assert.matches("trying again", command.err, 1, true)
      assert_status(0, verify())
    end)

    it("spares the server as --rate says", function()
      local started = support.now()
      assert_status(0, provision("--buckets", "1000", "--rate", "3000"))
      assert.is_true(support.now() - started > 0.9)
    end)

    it("refuses other buckets or levels than recorded", function()
      provision("--buckets", "100")
      for _, arguments in ipairs { { "--buckets", "101" }, { "--levels", "user,account" } } do
        local command = assert_status(78, provision((table.unpack or unpack)(arguments)))
        assert.matches("100 buckets", command.err, 1, true)
      end
      assert.equal(300, count())
    end)

    it("takes a table that others made for one of the defaults", function()
      provision("--buckets", "100")
      sql("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
      local command = assert_status(78, provision("--buckets", "100"))
      assert.matches("10,000,000", command.err, 1, true)
      assert.equal(300, count())
    end)

    it("waits for another one that is at work, and refuses when that had another size in mind", function()
      local first = start(dsn, "provision", "--buckets", "3000", "--rate", "4000")
      first.until_true(function() return count() > 0 end, "the first rows")
      uv.kill(first.pid, "sigstop") -- it is at work for as long as we want
      finally(function() if not first.status then uv.kill(first.pid, "sigcont") end end)
      local second = start(dsn, "provision", "--buckets", "3000")
      local third = start(dsn, "provision", "--buckets", "4000")
      for _, later in ipairs { second, third } do
        later.until_true(function() return later.err:find("is at work", 1, true) end, "word of the other one")
      end
      assert.is_nil(first.status)
      uv.kill(first.pid, "sigcont")
      assert_status(0, first.join())
      assert_status(0, second.join())
      assert.matches("9,000 rows, 0 of them new", second.out, 1, true)
      assert_status(78, third.join())
      assert.equal(9000, count())
    end)

    it("refuses a table whose rows are not locked, and a server that is read-only", function()
      sql("CREATE TABLE %s (level TINYINT, bucket INT, PRIMARY KEY (level, bucket)) ENGINE=MyISAM", TABLE)
      assert.matches("MyISAM", assert_status(78, provision()).err, 1, true)
      clean()
      local root = store.root()
      if not root then return end
      root:query("SET GLOBAL read_only=1")
      local command = provision("--buckets", "10")
      root:query("SET GLOBAL read_only=0")
      assert_status(78, command)
    end)

    it("makes tables of leases for a name of up to 57 characters, and refuses a longer one", function()
      local longest = ("hierlock_spec_%s"):format(("n"):rep(57 - #"hierlock_spec_"))
      local function tables(name, what)
        for _, suffix in ipairs { "", "_nodes", "_leases", "_leased", "_gate" } do store.sql():query(what, name .. suffix) end
        store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", name)
      end
      finally(function() tables(longest, "DROP TABLE IF EXISTS %s") end)
      local space = store.bare_dsn .. "?table=" .. longest
      assert_status(0, run(space, "provision", "--quiet", "--leases", "--buckets", "10"))
      local manager = assert(hierlock.open(space))
      assert(manager:acquire({ "u" }, { ttl = 60 })):release()
      manager:close()
      local message = ("the name %sn is too long for leases"):format(longest)
      local refused = run(space .. "n", "provision", "--quiet", "--leases", "--buckets", "10")
      assert_status(64, refused)
      assert.matches(message, refused.err, 1, true)
    end)

    it("--dry-run changes nothing, and prints SQL that does it", function()
      local printed = assert_status(0, provision("--dry-run", "--buckets", "1234", "--chunk", "1000")).out
      assert.equal(0, count())
      for statement in printed:gmatch("[^;]+") do
        if statement:find("%S") then store.sql():query((statement:gsub("%%", "%%%%"))) end
      end
      assert_status(0, verify("--buckets", "1234"))
      assert.equal("", assert_status(0, provision("--dry-run")).out)
      sql("DELETE FROM %s WHERE level=1 AND bucket=17", TABLE)
      printed = provision("-n").out
      assert.matches("INSERT INTO", printed)
      sql((printed:gsub(";%s*$", "")))
      assert_status(0, verify())
    end)

    it("shows a bar on a terminal, and lines elsewhere", function()
      local screen = on_terminal("", dsn, "provision --buckets 20000 --rate 60000")
      assert.matches("\r%l+ %[#*%.+%] [%d,]+ of 60,000 rows, %d+ %%, [%d,]+/s, 0:0%d left", screen)
      assert.matches("=0\n$", screen)
      clean()
      local command = provision("--buckets", "20000")
      assert.matches("\n60,000 of 60,000 rows, 100 %%[^\n]*\n$", command.err)
      assert.is_nil(command.err:find("[\r\27]"))
      clean()
      assert.equal("", provision("--buckets", "20", "--quiet").err)
    end)

    it("asks for the password on the terminal, and never shows it", function()
      local password = dsn:match("//[^:]+:([^@]+)@")
      local screen = on_terminal(password, nil, ("provision --ask-password --buckets 10 \"%s\"")
        :format((dsn:gsub(":[^:@]+@", "@"))))
      assert.matches("Password: ", screen, 1, true)
      assert.matches("=0\n$", screen)
      -- script(1) itself echoes text that is typed before the command turns echo off.
      assert.is_nil(screen:gsub("^[^:]*Password: ", ""):find(password, 1, true))
      assert.equal(30, count())
    end)

    it("exits with 77 when the server refuses the user, or a privilege is missing, which it names", function()
      assert_status(77, run((dsn:gsub(":[^:@]+@", ":wrong@")), "provision"))
      local root = store.root()
      if not root then return end
      assert_status(0, provision("--buckets", "10"))
      root:query("CREATE USER hlrefused@'%' IDENTIFIED BY 'x'")
      finally(function() root:query("DROP USER hlrefused@'%'") end)
      local database = store.bare_dsn:match "/([^/?]+)[^/]*$"
      root:query("GRANT SELECT ON %s.%s TO hlrefused@'%%'", database, TABLE)
      local said = assert_status(77, run(dsn:gsub("//[^:]+:[^@]+@", "//hlrefused:x@"), "run", "u1", "--", "true"))
      assert.matches("; GRANT SELECT ON %S*hier_lock_meta%S* to it\n$", said.err)
    end)
  end)

  describe("sql/provision.sql", function()
    it("makes what `hierlock verify` finds complete, and mends it when it is called again", function()
      support.provision(store.sql(), TABLE, 2345)
      assert_status(0, verify("--buckets", "2345"))
      sql("DELETE FROM %s WHERE bucket %% 7 = 3 OR level = 1", TABLE)
      assert_status(1, verify())
      support.provision(store.sql(), TABLE, 2345)
      assert_status(0, verify())
    end)

    it("says so when the server leaves rows out", function()
      local setting = store.dialect == "mysql" and "cte_max_recursion_depth" or "max_recursive_iterations"
      sql("SET SESSION %s=5, sql_mode=''", setting)
      finally(function() sql("SET SESSION %s=DEFAULT, sql_mode=DEFAULT", setting) end)
      assert.has_error(function() support.provision(store.sql(), TABLE, 2345) end)
    end)

    it("refuses other buckets or levels, and records nothing then", function()
      support.provision(store.sql(), TABLE, 100)
      assert.has_error(function() support.provision(store.sql(), TABLE, 101) end)
      assert.has_error(function() support.provision(store.sql(), TABLE, 100, { "user" }) end)
      sql("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
      assert.has_error(function() support.provision(store.sql(), TABLE, 100) end)
      assert.same({}, sql("SELECT * FROM hier_lock_meta WHERE table_name='%s'", TABLE))
      assert.equal(300, count())
    end)
  end)

  describe("provision --leases", function()
    local STEM = TABLE
    local function drop()
      for _, name in ipairs { "_nodes", "_leases", "_leased", "_gate" } do sql("DROP TABLE IF EXISTS %s%s", STEM, name) end
    end
    before_each(drop)
    after_each(drop)

    local R1 = { "u1", "a1", "r1" }
    local function lease(manager) return manager:acquire(R1, { ttl = 60, timeout = 0 }) end

    local function assert_complete()
      local command = assert_status(0, verify())
      for _, name in ipairs { "_leases +InnoDB", "_leased +InnoDB", "_gate +complete" } do
        assert.matches(STEM .. name, command.out)
      end
      local manager = assert(hierlock.open(dsn))
      local held = assert(lease(manager))
      assert.is_nil((manager:acquire({ "u1" }, { timeout = 0 })))
      assert(held:release { confirm = true })
      manager:close()
    end

    it("makes a new space that has leases", function()
      provision("--leases", "--buckets", "500")
      assert_complete()
      assert.equal("1500", sql("SELECT COUNT(*) FROM %s_nodes", STEM)[1][1])
      assert.equal("65536", sql("SELECT COUNT(*) FROM %s_gate", STEM)[1][1])
    end)

    it("gives leases to a space that has none, and may be called again", function()
      provision("--buckets", "500")
      local manager = assert(hierlock.open(dsn))
      assert.equal("unsupported", select(2, lease(manager)).code)
      manager:close()
      for _ = 1, 2 do
        provision("--leases")
        assert_complete()
        provision()
        assert_complete()
      end
    end)

    it("goes on where it was interrupted", function()
      provision("--buckets", "500")
      local statements = {}
      for statement in (assert_status(0, run(dsn, "provision", "--leases", "-n")).out):gmatch("(.-);\n\n") do
        statements[#statements + 1] = statement
      end
      assert.truthy(statements[#statements]:find("^RENAME"))
      for n = 1, #statements - 1 do
        sql(statements[n])
        -- A lock excludes only programs that are there.
        local manager, err = hierlock.open(dsn)
        if manager then
          assert.is_nil((lease(manager)))
          manager:close()
        else
          assert.equal("not_provisioned", err.code)
        end
      end
      provision()
      assert_complete()
    end)

    it("waits for those who hold locks; who has connected before excludes nobody afterwards, and hears it", function()
      provision("--buckets", "500")
      local manager = assert(hierlock.open(dsn))
      for _ = 1, 3 do assert(assert(manager:acquire(R1)):release { confirm = true }) end
      local handle = assert(manager:acquire(R1))
      local command = start(dsn, "provision", "--leases")
      support.wait_until(function()
        return tonumber(sql("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE '%%metadata lock%%'")[1][1]) > 0
      end)
      assert.is_true(handle:check())
      assert(handle:release { confirm = true })
      assert_status(0, command.join())
      for _ = 1, 3 do
        local ok, err = manager:acquire(R1, { timeout = 1 })
        assert.is_nil(ok)
        assert.is_true(err.code == "not_provisioned" or err.code == "mismatch", err.message)
      end
      manager:close()
      assert_complete()
    end)

    it("keeps out programs that know of no leases, whatever they try", function()
      provision("--leases", "--buckets", "500")
      local levels = sql("SELECT levels FROM hier_lock_meta WHERE table_name='%s'", TABLE)[1][1]
      local names = {}
      for name in levels:gmatch "[^,]+" do names[#names + 1] = name end
      -- Whatever they do with the record, no such levels can exist.
      assert.is_false((pcall(hierlock.plan, { { "x" } }, { levels = names })))
      assert.is_nil(store.sql():try("SELECT 1 FROM " .. TABLE))
    end)

    it("gives no two spaces the same tables", function()
      local other = TABLE .. "_buckets"
      local others = dsn:gsub(TABLE, other)
      assert.not_equal(dsn, others)
      finally(function()
        sql("DROP TABLE IF EXISTS %s", other)
        sql("DELETE FROM hier_lock_meta WHERE table_name='%s'", other)
      end)
      assert_status(0, run(others, "provision", "--buckets", "300"))
      provision("--leases", "--buckets", "500")
      local command = run(others, "provision", "--leases")
      assert.matches(STEM .. "_nodes already", command.err, 1, true)
      assert.equal("user,account,resource", sql("SELECT levels FROM hier_lock_meta WHERE table_name='%s'", other)[1][1])
      assert_status(0, run(others, "verify"))
      assert_complete()
      -- A space without leases does not take the table of a space with leases either.
      command = run((dsn:gsub(TABLE, STEM .. "_nodes")), "provision")
      assert.matches(STEM .. "_nodes already", command.err, 1, true)
    end)

    it("is checked: what is missing is named, and mended", function()
      provision("--leases", "--buckets", "500")
      sql("DELETE FROM %s_gate WHERE g > 65000", STEM)
      assert.matches("_gate +missing: 535 rows", assert_status(1, verify()).out)
      sql("DROP TABLE %s_leased", STEM)
      assert.matches("_leased +missing", assert_status(1, verify()).out)
      provision()
      sql("ALTER TABLE %s_leased ENGINE=MyISAM", STEM)
      assert.matches("MyISAM, which locks no rows", assert_status(1, verify()).out, 1, true)
    end)

    it("is what sql/leases.sql does", function()
      support.provision(store.sql(), TABLE, 500)
      local file = assert(io.open "sql/leases.sql")
      local text = file:read("*a"):gsub("%-%-[^\n]*", ""):gsub("hier_lock_buckets", TABLE)
      file:close()
      for _, name in ipairs { "nodes", "leases", "leased", "gate" } do text = text:gsub("hier_lock_" .. name, STEM .. "_" .. name) end
      for statement in text:gmatch "[^;]+" do
        if statement:find "%S" then store.sql():query((statement:gsub("%%", "%%%%"))) end
      end
      assert_complete()
    end)
  end)

  describe("verify", function()
    it("finds nothing wrong with a complete table", function()
      provision("--buckets", "400")
      local command = assert_status(0, verify())
      for level, name in ipairs { "user", "account", "resource" } do
        assert.matches(("level %d  %s +400 rows  complete"):format(level - 1, name), command.out)
      end
    end)

    it("names what is missing, by level and bucket", function()
      provision("--buckets", "4000")
      sql("DELETE FROM %s WHERE (level = 1 AND bucket IN (0, 17, 18, 19, 3999)) OR (level = 2 AND bucket %% 3 = 1)", TABLE)
      local command = assert_status(1, verify())
      assert.matches("user +4,000 rows  complete", command.out)
      assert.matches("account +3,995 rows  missing: 0, 17%-19, 3999\n", command.out)
      assert.matches("resource +2,667 rows  missing: 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, …\n", command.out)
      assert.matches("hierlock provision", command.out, 1, true)
    end)

    it("names an empty level, and rows beyond the space", function()
      provision("--buckets", "400")
      sql("DELETE FROM %s WHERE level = 2", TABLE)
      sql("INSERT INTO %s VALUES (3, 5), (0, 400)", TABLE)
      local command = assert_status(1, verify())
      assert.matches("resource +0 rows  missing: 0%-399\n", command.out)
      assert.matches("2 rows more", command.out, 1, true)
    end)

    it("says when there is no table, or one for something else", function()
      assert.matches("no table", assert_status(1, verify()).out, 1, true)
      provision("--buckets", "400")
      assert.matches("400 buckets", assert_status(1, verify("--buckets", "500")).out, 1, true)
    end)

    it("refuses recorded levels that cannot be, and writes nothing of them to a terminal", function()
      provision("--buckets", "10")
      sql("UPDATE hier_lock_meta SET levels = CONCAT('user,', CHAR(27), ']0;mine', CHAR(7)) WHERE table_name = '%s'", TABLE)
      local command = verify()
      assert_status(78, command)
      assert.matches("levels of the table " .. TABLE .. " that cannot be: level name 2 must not contain", command.err, 1, true)
      assert.is_nil((command.out .. command.err):find("[\27\7]"))
    end)

    it("locks nothing, and does not wait for locks", function()
      provision("--buckets", "400")
      local manager = assert(hierlock.open(dsn, { buckets = 400 }))
      local handle = assert(manager:acquire { "u1" })
      assert_status(0, verify())
      assert.is_true(handle:release { confirm = true })
      manager:close()
    end)
  end)
end)
