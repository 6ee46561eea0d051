-- redis+sentinel://: a master, a replica that may lag, and three sentinels, all of this spec's own.
-- Parts: lose_grants a_replica_has fail_over_that_was killed_master

local hierlock = require "hierlock"
local program = require "spec.support.command"
local redis_cli = require "spec.support.redis_cli"
local socket = require "socket"
local stress = require "spec.support.stress"
local support = require "spec.support"

local U1, R1, R2 = { "u1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local SERVER = os.getenv "HIERLOCK_REDIS_SERVER" or "redis-server"

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

local function shell(command)
  local pipe = io.popen("unset LD_PRELOAD; " .. command)
  local text = pipe:read "*a"
  pipe:close()
  return (text:gsub("\n$", ""))
end

describe("redis+sentinel://", function()
  support.on_redis(function()
    local directory, servers, sentinels, managers

    local function port()
      local probe = assert(socket.bind("127.0.0.1", 0))
      local _, number = probe:getsockname()
      probe:close()
      return number
    end

    local function cli(one, words)
      local list = {}
      for word in words:gmatch "%S+" do list[#list + 1] = word end
      return redis_cli("127.0.0.1", one.port, one.password, list)
    end

    local function signal(one, name) os.execute(("kill -%s %d"):format(name, one.pid)) end

    local function launch(one)
      one.pid = tonumber(shell(("setsid %s %s %s </dev/null >>%s.log 2>&1 & echo $!"):format(SERVER, one.conf, one.options, one.conf)))
      support.wait_until(function() return cli(one, "PING") == "PONG" end, "a server")
    end

    local function write(name, options, text)
      local one = { port = port(), conf = ("%s/%s.conf"):format(directory, name), options = options, password = "secret" }
      local file = assert(io.open(one.conf, "w"))
      file:write(("bind 127.0.0.1\nport %s\ndir %s\nrequirepass secret\n%s"):format(one.port, directory, text))
      file:close()
      launch(one)
      return one
    end

    local function watch(master, down_after, failover_timeout)
      for i = 1, 3 do
        sentinels[i] = write("sentinel" .. i, "--sentinel", ([[
sentinel monitor locks 127.0.0.1 %s 2
sentinel auth-pass locks secret
sentinel sentinel-pass secret
sentinel down-after-milliseconds locks %d
sentinel failover-timeout locks %d
]]):format(master.port, down_after or 1000, failover_timeout or 4000))
      end
      support.wait_until(function()
        for _, one in ipairs(sentinels) do
          local text = cli(one, "SENTINEL MASTER locks"):gsub("\n", " ")
          if not text:find "num%-slaves 1 " or not text:find "num%-other%-sentinels 2 " then return false end
        end
        return true
      end, "sentinels that know each other")
    end

    local function dsn(params)
      local hosts = {}
      for i, one in ipairs(sentinels) do hosts[i] = "127.0.0.1:" .. one.port end
      return ("redis+sentinel://:secret@%s/0?service=locks&sentinel_password=secret&%s"):format(table.concat(hosts, ","), params)
    end

    local function open(text, options)
      local manager, err = hierlock.open(text, options or { timeout = 5 })
      managers[#managers + 1] = manager
      return manager, err
    end

    -- Until it is granted, whatever the servers say meanwhile.
    local function acquire(manager, target, options)
      local handle
      support.wait_until(function()
        handle = manager:acquire(target, options)
        return handle
      end, "a grant", 40)
      return handle
    end

    -- The replica hears nothing more of the master.
    local function cut(master, replica)
      assert.equal("OK", cli(replica, "CONFIG SET masterauth wrong"))
      cli(master, "CLIENT KILL TYPE replica")
      support.wait_until(function() return cli(replica, "INFO replication"):find "master_link_status:down" end, "a cut")
    end

    local function role(one) return cli(one, "ROLE"):match "^%w+" end

    -- A sentinel that was kept from running for two seconds does nothing for thirty (its TILT mode).
    local function wait_for_sentinels(condition, what)
      local ok, result = pcall(support.wait_until, condition, what, 90)
      if ok then return result end
      error(("gave up waiting for %s:\n%s"):format(what, shell(("tail -n 12 %s/sentinel*.log"):format(directory))), 2)
    end

    before_each(function()
      managers, sentinels = {}, {}
      directory = shell "mktemp -d /tmp/hierlock-sentinel-XXXXXX"
      servers = { write("one", "", "masterauth secret\nsave \"\"\nrepl-diskless-sync-delay 0\n") }
      servers[2] = write("two", "", ("masterauth secret\nsave \"\"\nreplicaof 127.0.0.1 %s\nrepl-diskless-sync-delay 0\n"):format(
        servers[1].port))
      support.wait_until(function() return cli(servers[2], "INFO replication"):find "master_link_status:up" end, "a replica")
    end)

    after_each(function()
      for _, manager in ipairs(managers) do manager:close() end
      for _, one in ipairs(sentinels) do signal(one, "KILL") end
      for _, one in ipairs(servers) do signal(one, "KILL") end
      os.execute("rm -rf " .. directory)
    end)

    it("is looked at by hierlock doctor, which says where the lines are to be run", function()
      watch(servers[1])
      local said = program.run(dsn "quarantine=0", "doctor", "--levels", "user,account,resource")
      program.close()
      assert.equal(0, said.status, said.out .. said.err)
      assert.matches("ok       reached +the master that 127.0.0.1:", said.out)
      assert.matches("ok       a lock +taken, seen to exclude", said.out)
      assert.matches("warning  replicas +1 are connected; a lock waits for 0", said.out)
      assert.matches("mend: on the master: redis-cli CONFIG SET appendonly yes\n", said.out, 1, true)
      assert.is_nil((said.out .. said.err):find("secret", 1, true))
    end)

    it("names what it asked, and says what is wrong", function()
      watch(servers[1])
      assert_code("dsn", open "redis+sentinel://127.0.0.1:1/0")
      assert_code("dsn", open "redis+sentinel://a,,b/0?service=locks")
      assert_code("dsn", open "redis://a,b/0")
      local err = assert_code("connection", open((dsn "quarantine=0":gsub("service=locks", "service=other"))))
      assert.truthy(err.message:find("'other'", 1, true), err.message)
      err = assert_code("connection", open((dsn "quarantine=0":gsub("sentinel_password=secret", "sentinel_password=wr0ng"))))
      assert.truthy(err.message:find(sentinels[3].port, 1, true), err.message)
      assert.is_false(err.retryable)
      assert.is_nil(err.message:find("wr0ng", 1, true))
      err = assert_code("connection", open((dsn "quarantine=0":gsub("//:secret@", "//:wr0ng@"))))
      assert.truthy(err.message:find("127.0.0.1:" .. servers[1].port, 1, true), err.message)
      assert.is_false(err.retryable)
      -- A single sentinel is enough, whichever.
      signal(sentinels[1], "STOP")
      signal(sentinels[2], "KILL")
      local manager = assert(open(dsn "quarantine=0"))
      assert(assert(manager:acquire(R1)):release { confirm = true })
      signal(sentinels[3], "KILL")
      err = assert_code("connection", open(dsn "quarantine=0&connect_timeout=2"))
      assert.is_true(err.retryable)
      assert.truthy(err.message:find("no sentinel of 3", 1, true), err.message)
    end)

    it("follows a fail-over that was asked for, and leases stay", function()
      watch(servers[1])
      local manager = assert(open(dsn "quarantine=1&wait_replicas=1"))
      local handle = acquire(manager, R1, { ttl = 120 })
      assert.equal("OK", cli(sentinels[1], "SENTINEL FAILOVER locks"))
      wait_for_sentinels(function() return role(servers[2]) == "master" and role(servers[1]) == "slave" end, "a fail-over")
      support.wait_until(function() return handle:refresh() end, "a refresh", 20)
      assert_code("timeout", manager:acquire(U1, { timeout = 0.1 }))
      assert.is_true(handle:release { confirm = true })
    end)

    it("grants nothing of what a killed master had granted, though the replica has not heard of it", function()
      watch(servers[1])
      local manager, other = assert(open(dsn "quarantine=3")), assert(open(dsn "quarantine=3"))
      acquire(manager, R2, { timeout = 0, ttl = 20 })
      support.wait_until(function() return cli(servers[2], "HGET hierlock:memory longest") == "20000" end, "a lease on the replica")
      cut(servers[1], servers[2])
      local handle = assert(manager:acquire(R1, { ttl = 20 }))
      signal(servers[1], "KILL")
      wait_for_sentinels(function() return role(servers[2]) == "master" end, "a fail-over")
      assert.is_true(handle:is_held())
      support.wait_until(function()
        local found = other:leases { target = R1 }
        return found and #found == 0
      end, "a master that lacks the lease", 20)
      local after = acquire(other, R1, { timeout = 5 })
      assert.is_false(handle:is_held())
      assert.is_true(after:check())
      assert(after:release { confirm = true })
    end)

    it("grants by one of two masters only, where both have to tell a replica", function()
      watch(servers[1])
      local params = "quarantine=2&wait_replicas=1"
      local manager, other = assert(open(dsn(params))), assert(open(dsn(params)))
      local handle = acquire(manager, R1, { ttl = 2 })
      signal(servers[1], "STOP")
      wait_for_sentinels(function() return role(servers[2]) == "master" end, "a fail-over")
      signal(servers[1], "CONT") -- a master in its own eyes, as yet, and `manager` has connections to it
      local early = manager:acquire(R1, { timeout = 0.5, ttl = 10 })
      local late = acquire(other, R2, { timeout = 5, ttl = 10 })
      assert.is_false(handle:is_held())
      if early then assert.equal(1, #assert(other:leases { target = R1 })) end
      wait_for_sentinels(function() return role(servers[1]) == "slave" end, "one master")
      assert.is_true(late:check())
    end)

    -- A lost lease is over when the quarantine is. So no two hold, by the checker of spec/leases/stress.c, whose
    -- leases last up to 2.5 s. A master that lives on beside the new one grants for some seconds, until a sentinel makes
    -- it a replica: only wait_replicas helps against that, as docs/redis.md says. So without it masters die, and the
    -- sentinels, which on a busy machine take a master for down that lives, fail over only when they are asked to.
    local function fail_over_often(params, lives_on, seconds)
      watch(servers[1], lives_on and 1000 or 600000, 1000)
      local times = 0
      local function fail_over() return cli(sentinels[1], "SENTINEL FAILOVER locks") == "OK" end
      -- On a busy machine sentinels may fail over once more of themselves. Until all agree, nothing else is done: of two
      -- servers that are killed in turn, as each was the master in its own eyes, none would be left that could be one.
      local function settled()
        local port_of_master
        for _, one in ipairs(sentinels) do
          local named = cli(one, "SENTINEL GET-MASTER-ADDR-BY-NAME locks"):match "[^\n]*$"
          local flags = cli(one, "SENTINEL MASTER locks"):gsub("\n", " "):match " flags (%S+)"
          if named ~= (port_of_master or named) or flags ~= "master" then return nil end
          port_of_master = named
        end
        local master, other = servers[1], servers[2]
        if tostring(master.port) ~= port_of_master then master, other = other, master end
        if role(master) ~= "master" or role(other) ~= "slave" then return nil end
        return cli(master, "INFO replication"):find "state=online" and { master, other }
      end
      local pair = wait_for_sentinels(settled, "a master and a replica")
      stress.run(dsn("quarantine=3&" .. params), directory .. "/stress", seconds, 50, function()
        local master, other = pair[1], pair[2]
        times = times + 1
        local how = lives_on and times % 3 or 1
        if not lives_on then
          cut(master, other)
          support.sleep(0.5) -- what is granted meanwhile is lost
        end
        if how == 1 then
          signal(master, "KILL")
        elseif how == 2 then
          signal(master, "STOP")
        elseif not fail_over() then
          times = times - 1
        end
        wait_for_sentinels(function()
          if (how == 0 or not lives_on) and role(other) ~= "master" then fail_over() end
          return role(other) == "master"
        end, "a fail-over")
        if how == 1 then
          master.options = "--masterauth secret --replicaof 127.0.0.1 " .. other.port
          launch(master)
        elseif how == 2 then
          signal(master, "CONT")
        end
        pair = wait_for_sentinels(settled, "a master and a replica")
        assert.is_true(lives_on or pair[1] == other, "the sentinels failed over, though they were not asked to")
        support.sleep(2 + math.random() * 2) -- something is granted meanwhile, when the quarantine is over
      end)
      assert.is_true(times > 0, times)
    end

    it("lets no two in through many fail-overs, where a replica has to have each grant", function()
      fail_over_often("wait_replicas=1", true, 25)
    end)

    it("lets no two in through many fail-overs that lose grants, as the quarantine is longer than leases", function()
      fail_over_often("wait_replicas=0", false, 20)
    end)

    -- No request reaches the other server while it is the master.
    it("grants nothing after a fail-over there and back", function()
      local own = ("redis://:secret@127.0.0.1:%s/0?quarantine=3"):format(servers[1].port)
      local manager = assert(open(own))
      acquire(manager, R2, { timeout = 0, ttl = 1 })
      cut(servers[1], servers[2])
      local handle = assert(manager:acquire(R1, { ttl = 3 }))
      local run = cli(servers[1], "INFO server"):match "run_id:(%w+)"
      assert.equal("OK", cli(servers[2], "REPLICAOF NO ONE"))
      assert.equal("OK", cli(servers[1], "REPLICAOF 127.0.0.1 " .. servers[2].port))
      support.wait_until(function() return cli(servers[1], "INFO replication"):find "master_link_status:up" end, "a replica")
      assert.equal("OK", cli(servers[1], "REPLICAOF NO ONE"))
      assert.equal(run, cli(servers[1], "INFO server"):match "run_id:(%w+)")
      local other = assert(open(own))
      assert.is_true(handle:is_held())
      local after = assert(other:acquire(R1, { timeout = 10 }))
      assert.is_false(handle:is_held())
      assert(after:release { confirm = true })
    end)
  end)
end)
