--- `hierlock doctor` on Redis, and on Memcached, as an operator runs it: see command_doctor_spec.lua.
-- Parts: redis

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local doctor = require "spec.support.doctor"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"

local at_end, findings_of, examine, status_of, assert_finding, shell, follow =
  doctor.at_end, doctor.findings_of, doctor.examine, doctor.status_of, doctor.assert_finding, doctor.shell, doctor.follow
local unpack = table.unpack or unpack -- luacheck: ignore

after_each(doctor.clean_up)

support.on_redis(function(store)
  local obeying, all_obeyed = doctor.obedience("redis", { ["CLUSTER NODES"] = true }) -- spec/redis_cluster_spec.lua
  teardown(all_obeyed)

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
      { "maxmemory-policy", "allkeys-lru", "eviction", "wrong", "CONFIG SET maxmemory-policy noeviction" },
      { "maxclients", "40", "maxclients", "wrong", "CONFIG SET maxclients %.0f" },
      { "timeout", "60", "time-outs", "warning", "CONFIG SET timeout 0" },
      { "maxmemory", "1mb", "memory", "warning", "CONFIG SET maxmemory 0" },
      { "appendonly", "no", "persistence", "warning", "CONFIG SET appendonly yes", "CONFIG SET appendfsync always" },
    } do
      local name, value, check, status = unpack(case)
      it(name, obeying({ "CONFIG REWRITE", unpack(case, 5) }, function()
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
      end))
    end
  end)

  it("names an append-only file that is not written while it is rewritten, and the line mends that", obeying({
    "CONFIG SET no-appendfsync-on-rewrite no",
  }, function()
    set("appendonly", "yes")
    set("appendfsync", "always")
    set("no-appendfsync-on-rewrite", "yes")
    assert_finding("warning", examine(store.dsn), "persistence")
    assert_mended("persistence", store.dsn)
  end))

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

  it("says who may, where this user may not, and the lines are for him", obeying({ "ACL SETUSER %s '+config|get'" }, function()
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
  end))

  it("names a snapshot that failed, and the line makes another", obeying({ "BGSAVE" }, function()
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
  end))

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

  it("leaves the server before it tries a lock: there may be room for few", function()
    local between
    local beside = false
    between = proxy.open(store, function(data)
      local ours, later = between.connections[1], between.connections[2]
      beside = beside or later and not ours.client:is_closing()
      return data
    end)
    at_end(between.close)
    assert.equal("ok", status_of(examine(between.dsn), "a lock"))
    assert.is_true(#between.connections > 1)
    assert.is_false(beside)
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

  it("names a replica, and the line makes it a master", obeying({ "REPLICAOF NO ONE" }, function()
    at_end(function() store.cli("REPLICAOF", "NO", "ONE") end)
    store.cli("REPLICAOF", "127.0.0.1", "1")
    local found = examine(store.dsn)
    assert_finding("wrong", found, "replica")
    assert_finding("wrong", found, "opens")
    assert_mended("replica", store.dsn, found)
  end))

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
  local obeying, all_obeyed = doctor.obedience("memcached", {})
  teardown(all_obeyed)
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

  -- The options with which the lines have it started.
  local function options_of(found, ...)
    local options = {}
    for _, check in ipairs { ... } do
      local done, said = follow(store.dsn, found[check], error)
      assert.equal(1, done, check)
      options[#options + 1] = said
    end
    return table.concat(options, " ")
  end

  it("names options with which it must not be used, and those with which it may", obeying({
    "start memcached without -C", "start memcached with -c %.0f", "a Memcached for locks alone, or start memcached with -m %.0f",
  }, function()
    at_end(function() store.command "restart" end)
    store.command("restart", "-C -c 40 -m 8")
    for i = 1, 30 do store.say(("set fill%d 0 0 500000\r\n"):format(i) .. ("x"):rep(500000)) end
    local found = examine(store.dsn)
    for check, status in pairs { ["compare and swap"] = "wrong", connections = "wrong", memory = "warning", eviction = "warning" } do
      assert_finding(status, found, check)
    end
    assert.equal(options_of(found, "memory"), options_of(found, "eviction"))
    store.command("restart", options_of(found, "compare and swap", "connections", "memory"))
    local after = examine(store.dsn, "--levels", "user,account,resource")
    for _, check in ipairs { "compare and swap", "connections", "memory", "eviction", "a lock" } do assert_finding("ok", after, check) end
    assert.matches("^0 of 16 MiB", after.memory.found)
  end))

  it("names one that everybody reaches, and the option that closes it", obeying({ "start memcached with -l %s" }, function()
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
    assert_finding("ok", among(options_of(found, "access")), "access")
  end))

  it("settles nothing where nobody has been", function()
    assert_finding("unseen", examine(store.dsn .. "?prefix=doctor"), "opens")
    assert.equal("END", store.say "get doctor:space")
  end)
end)
