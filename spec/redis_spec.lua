-- Trouble of Redis and Valkey alone: servers that would not exclude, that forget, scripts that are forgotten, wake-ups,
-- privileges. leases_spec, scenarios_spec, loop_spec have the duties that they share with other stores.
-- Parts: restarted

local hierlock = require "hierlock"
local program = require "spec.support.command"
local support = require "spec.support"

local unpack = table.unpack or unpack -- luacheck: ignore

local U1, R1, R2 = { "u1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local PROMPT = 0.7 -- a waiter looks each second by itself

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

describe("redis", function()
  support.on_redis(function(store)
    local managers

    -- A DSN with other parameters than the specs'.
    local function dsn(params) return (store.dsn:gsub("%?.*", "?" .. params)) end

    local function open(options, params)
      local all = { timeout = 5 }
      for k, v in pairs(options or {}) do all[k] = v end
      local manager, err = hierlock.open(params and dsn(params) or store.dsn, all)
      if manager then managers[#managers + 1] = manager end
      return manager, err
    end

    local function cli(...) return store.cli(...) end

    local function keys(pattern)
      local found = {}
      for key in cli("KEYS", pattern):gmatch "[^\n]+" do found[#found + 1] = key end
      return found
    end

    local function clear_keys()
      for _, key in ipairs(keys "*") do cli("DEL", key) end
    end

    before_each(function()
      managers = {}
      clear_keys()
    end)

    after_each(function()
      support.close_peers()
      for _, manager in ipairs(managers) do manager:close() end
      clear_keys() -- the next file's specs are to wait for nothing that these have made it remember
    end)

    -- --------------------------------------------------------------- opening

    it("is refused where it may evict, or is a replica, and the message says what to do", function()
      finally(function()
        cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
        cli("REPLICAOF", "NO", "ONE")
      end)
      cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
      local err = assert_code("unsafe_server", open())
      assert.truthy(err.message:find("maxmemory-policy noeviction", 1, true), err.message)
      cli("CONFIG", "SET", "maxmemory-policy", "noeviction")
      cli("REPLICAOF", "127.0.0.1", "1")
      err = assert_code("unsafe_server", open())
      assert.truthy(err.message:find("replica", 1, true), err.message)
    end)

    it("that becomes a replica grants nothing more", function()
      finally(function() cli("REPLICAOF", "NO", "ONE") end)
      local manager = assert(open())
      assert(assert(manager:acquire(R1)):release { confirm = true })
      cli("REPLICAOF", "127.0.0.1", "1")
      assert_code("unsafe_server", manager:acquire(R1, { timeout = 0 }))
    end)

    it("is told of parameters that it does not know, and of a bad password", function()
      local err = assert_code("dsn", open({}, "prefx=a"))
      assert.truthy(err.message:find("prefx", 1, true))
      assert_code("dsn", open({}, "prefix=a{b}"))
      assert_code("dsn", open({}, "wait_replicas=many"))
      err = assert_code("connection", hierlock.open((store.dsn:gsub("testpassword", "not%%40this"))))
      assert.is_false(err.retryable)
      assert.is_nil(err.message:find("not@this", 1, true))
      err = assert_code("connection", hierlock.open "redis://127.0.0.1:1/")
      assert.is_true(err.retryable)
    end)

    it("is reached by a Unix socket, and in another database is another space", function()
      local socket = assert(os.getenv "HIERLOCK_REDIS_SOCKET")
      local manager = assert(open())
      local held = assert(manager:acquire(R1))
      local by_socket = "redis+unix://testuser:testpassword@" .. socket
      local same = assert(hierlock.open(by_socket .. "?quarantine=0"))
      managers[#managers + 1] = same
      assert_code("timeout", same:acquire(R1, { timeout = 0 }))
      local elsewhere = assert(hierlock.open(by_socket .. "?quarantine=0&database=3"))
      managers[#managers + 1] = elsewhere
      assert(assert(elsewhere:acquire(R1, { timeout = 0 })):release { confirm = true })
      local prefixed = assert(open({}, "quarantine=0&prefix=other"))
      assert(assert(prefixed:acquire(R1, { timeout = 0 })):release { confirm = true })
      assert(held:release())
    end)

    it("remembers the levels of a space, and refuses others", function()
      assert(open { levels = { "shop", "order" } })
      local err = assert_code("mismatch", open { levels = { "x", "y", "z" } })
      assert.truthy(err.message:find("shop,order", 1, true), err.message)
      local manager = assert(open())
      assert(assert(manager:acquire { shop = "s", order = "o" }):release())
    end)

    it("compares the levels at each connection: a server that was emptied may have others", function()
      local manager = assert(open { levels = { "shop", "order" } })
      cli "FLUSHALL"
      local other = assert(open { levels = { "x", "y", "z" } })
      cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
      local err = assert_code("mismatch", manager:acquire { shop = "s", order = "o" })
      assert.truthy(err.message:find("x,y,z", 1, true), err.message)
      assert(assert(other:acquire { x = "s" }):release())
    end)

    -- ------------------------------------------------------------ forgetting

    it("that does not answer whether a lease is shared again is believed to have shared it, until it is asked", function()
      local manager, other = assert(open()), assert(open())
      local handle = assert(manager:acquire(R1, { mode = "update", ttl = 60 }))
      assert(handle:upgrade { timeout = 5 })
      assert.equal("exclusive", handle.mode)
      cli("CLIENT", "PAUSE", "12000", "ALL") -- both times that it asks
      local ok, err = handle:downgrade()
      assert_code("connection", ok, err)
      assert.equal("update", handle.mode)
      support.wait_until(function() return handle:upgrade { timeout = 1 } end)
      assert.equal("exclusive", handle.mode)
      assert_code("timeout", other:acquire(R1, { mode = "shared", timeout = 0 }))
      assert(handle:downgrade())
      assert(assert(other:acquire(R1, { mode = "shared", timeout = 0 })):release())
    end)

    -- Redis passes over what it has not read of a connection that ends while it is paused.
    for last, chunk in pairs {
      ["is closed"] = "manager:close()",
      ["is collected"] = "handles[1], manager = nil collectgarbage() collectgarbage()",
    } do
      it("that is paused is told of a release again when the manager " .. last, function()
        local manager, peer = assert(open()), support.process(store)
        peer:call([[handles[1] = assert(manager:acquire({ "u1" }, { ttl = 60 }))]])
        assert.equal(1, #assert(manager:leases()))
        cli("CLIENT", "PAUSE", "500", "ALL")
        peer:start("assert(handles[1]:release()) " .. chunk .. " os.exit(0)"):join()
        assert.same({}, assert(manager:leases()))
      end)
    end

    it("whose scripts were flushed gets them again", function()
      local manager, other = assert(open()), assert(open())
      for _ = 1, 3 do
        local handle = assert(manager:acquire(R1))
        cli("SCRIPT", "FLUSH")
        assert(handle:refresh())
        cli("SCRIPT", "FLUSH")
        assert(handle:release()) -- nobody waits for its answer
        local again = assert(other:acquire(R1, { timeout = 1 }))
        cli("SCRIPT", "FLUSH")
        assert(again:release { confirm = true })
        cli("SCRIPT", "FLUSH")
        assert.equal(0, #manager:leases())
      end
    end)

    it("that was emptied grants nothing until what it has granted is over, and tokens grow", function()
      local manager = assert(open({}, "quarantine=1"))
      local before
      support.wait_until(function() -- it has just been started, perhaps
        before = manager:acquire(R1, { timeout = 0, ttl = 1.5 })
        return before
      end)
      local other = assert(open({}, "quarantine=1")) -- has asked nothing yet
      local token = before.token
      cli "FLUSHALL"
      local start = support.now()
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      assert_code("timeout", other:acquire(R2, { timeout = 0 }))
      local after = assert(other:acquire(R1, { timeout = 10 }))
      assert.is_false(before:is_held())
      assert.is_true(support.now() - start > 1.4, support.now() - start)
      assert.is_true(after.token > token)
      assert_code("lost", before:refresh())
      assert.is_true(after:check())
    end)

    it("serves beside an earlier version, each leaving the other's mark, and refuses what a later one made", function()
      finally(clear_keys)
      local manager = assert(open({}, "quarantine=1"))
      support.wait_until(function() return manager:acquire(R1, { timeout = 0, ttl = 1 }) end)
      local run = cli("HGET", "hierlock:memory", "run"):match "^(%x+)/0"
      cli("HSET", "hierlock:memory", "run", run) -- as versions wrote it that did not know databases
      manager = assert(open({}, "quarantine=60"))
      assert(assert(manager:acquire({ "u2" }, { timeout = 0 })):release { confirm = true })
      assert.equal(run, cli("HGET", "hierlock:memory", "run"):match "^%S+")
      cli("HSET", "hierlock:memory", "format", "2")
      local err = assert_code("store", manager:acquire({ "u2" }, { timeout = 0 }))
      assert.matches("made by another version of hierlock", err.message)
      assert_code("store", assert(open({}, "quarantine=0")):acquire({ "u2" }, { timeout = 0 }))
    end)

    it("that has forgotten says for how long it grants nothing, to those who ask and to those who watch", function()
      local manager = assert(open({}, "quarantine=1"))
      support.wait_until(function() return manager:acquire(R1, { timeout = 0, ttl = 1 }) end)
      cli "FLUSHALL"
      local url = dsn "quarantine=20"
      local err = assert_code("timeout", assert(open({}, "quarantine=20")):acquire(R1, { timeout = 0 }))
      assert.is_true(err.retry_after > 10 and err.retry_after <= 20.1, err.retry_after)
      local words = "nothing is granted for %d+ s more: the server has forgotten what it had granted"
      assert.matches(words, err.message)
      assert.matches(words, program.run(url, "ps").err)
      assert.matches(words, program.run(url, "top").out)
      local said = program.run(url, "doctor")
      assert.matches("\n%s*warning%s+a lock%s[^\n]*" .. words, "\n" .. said.out)
      assert.matches("wait %d+ s, and ask again", said.out)
      assert.equal("", program.run(dsn "quarantine=0", "ps").err)
    end)

    it("that was restarted and has forgotten grants nothing for as long; one that keeps all goes on", function()
      finally(function()
        clear_keys() -- the next one with such a file reads it
        store.command("restart")
      end)
      local manager = assert(open({}, "quarantine=3"))
      support.wait_until(function() return manager:acquire(R1, { timeout = 0, ttl = 2 }) end)
      store.command("restart")
      local start = support.now()
      local other = assert(open({}, "quarantine=3"))
      assert_code("timeout", other:acquire(R1, { timeout = 0 }))
      local handle = assert(other:acquire(R1, { timeout = 10 }))
      -- Servers count their uptime in whole seconds.
      assert.is_true(support.now() - start > 1, support.now() - start)
      assert(handle:release { confirm = true })

      store.command("restart", "--appendonly yes --appendfsync always")
      clear_keys() -- of another one with such a file
      manager = assert(open({}, "quarantine=1"))
      support.wait_until(function() return manager:acquire(R2, { timeout = 0, ttl = 1 }) end)
      local kept = assert(manager:acquire(R1, { ttl = 60 }))
      store.command("restart", "--appendonly yes --appendfsync always")
      other = assert(open({}, "quarantine=60"))
      assert_code("timeout", other:acquire(R1, { timeout = 0 }))
      assert(assert(other:acquire({ "u2" }, { timeout = 0 })):release())
      assert.is_true(kept:refresh())
      assert.is_true(kept:release { confirm = true })
    end)

    it("that is restarted by one that keeps all has forgotten all the same what was not kept before", function()
      finally(function()
        clear_keys() -- the next one with such a file reads it
        store.command("restart")
      end)
      local always = "--appendonly yes --appendfsync always"
      store.command("restart", "--appendonly yes --appendfsync everysec")
      clear_keys()
      local manager = assert(open({}, "quarantine=1"))
      support.wait_until(function() return manager:acquire(R2, { timeout = 0, ttl = 1 }) end)
      store.command("restart", always)
      assert_code("timeout", assert(open({}, "quarantine=60")):acquire(R1, { timeout = 0 }))
    end)

    it("that is restarted while it grants nothing goes on so, though it has forgotten nothing since", function()
      finally(function()
        clear_keys() -- the next one with such a file reads it
        store.command("restart")
      end)
      local always = "--appendonly yes --appendfsync always"
      store.command("restart", always)
      clear_keys()
      assert_code("timeout", assert(open({}, "quarantine=60")):acquire(R1, { timeout = 0 }))
      store.command("restart", always)
      assert_code("timeout", assert(open({}, "quarantine=1")):acquire(R1, { timeout = 0 }))
    end)

    it("that grants nothing does so for longer when a program asks it that knows of longer leases", function()
      cli "FLUSHALL"
      local short, long = assert(open({}, "quarantine=1")), assert(open({}, "quarantine=4"))
      local start = support.now() -- the quarantine begins when the server is asked for the first time
      assert_code("timeout", short:acquire(R1, { timeout = 0 }))
      assert_code("timeout", long:acquire(R1, { timeout = 0 }))
      local handle = assert(short:acquire(R1, { timeout = 10 }))
      assert.is_true(support.now() - start > 3.9, support.now() - start)
      assert(handle:release { confirm = true })
      -- The quarantine is over: leases that were granted since were not forgotten.
      local kept = assert(short:acquire(R1, { ttl = 3600 }))
      assert(assert(short:acquire(R2, { timeout = 0 })):release { confirm = true })
      assert(assert(long:acquire(R2, { timeout = 0 })):release { confirm = true })
      assert(kept:release { confirm = true })
    end)

    it("whose databases were exchanged has forgotten, also for a program that asks it for the first time", function()
      finally(function()
        cli("SWAPDB", "0", "5")
        cli("CONFIG", "RESETSTAT")
      end)
      cli("CONFIG", "RESETSTAT")
      local manager = assert(open({}, "quarantine=1"))
      support.wait_until(function() return manager:acquire(R1, { timeout = 0 }) end)
      cli("SWAPDB", "0", "5")
      assert_code("timeout", assert(open({}, "quarantine=60")):acquire(R1, { timeout = 0 }))
    end)

    it("that was emptied grants nothing until the longest is over that anybody knows of who comes meanwhile", function()
      local manager, other = assert(open({}, "quarantine=1")), assert(open({}, "quarantine=1"))
      local before
      support.wait_until(function()
        before = manager:acquire(R1, { timeout = 0, ttl = 3 })
        return before
      end)
      cli "FLUSHALL"
      assert_code("timeout", other:acquire(R2, { timeout = 0 })) -- knows of a second only
      assert_code("timeout", manager:acquire(R2, { timeout = 0 }))
      local after = assert(other:acquire(R1, { timeout = 10 }))
      assert.is_false(before:is_held())
      assert(after:release { confirm = true })
    end)

    -- Restarted with a snapshot: what came after it is forgotten, and the memory is there.
    describe("that was restarted with an older snapshot", function()
      local dump

      local function crash() -- the lines of a server that is killed: what it has in memory is gone
        store.command "kill"
        store.command "start"
      end

      before_each(function() dump = cli("CONFIG", "GET", "dir"):match "\n(.*)" .. "/dump.rdb" end)

      after_each(function()
        os.remove(dump)
        os.execute(("rm -rf '%s'"):format((dump:gsub("dump.rdb$", "appendonlydir"))))
        crash()
      end)

      it("grants nothing for as long, though it keeps all from now on and is restarted again", function()
        local manager = assert(open({}, "quarantine=4"))
        support.wait_until(function() return manager:acquire(R2, { timeout = 0, ttl = 4 }) end)
        assert.equal("OK", cli "SAVE")
        local forgotten = assert(manager:acquire(R1, { ttl = 4 }))
        crash()
        assert.equal("OK", cli("CONFIG", "SET", "appendonly", "yes", "appendfsync", "always"))
        local other = assert(open({}, "quarantine=1"))
        assert_code("timeout", other:acquire({ "u2" }, { timeout = 0 }))
        support.wait_until(function() return cli("INFO", "persistence"):find("aof_rewrite_in_progress:0", 1, true) end)
        store.command("restart", "--appendonly yes --appendfsync always")
        local handle = assert(assert(open({}, "quarantine=1")):acquire(R1, { timeout = 10 }))
        assert.is_false(forgotten:is_held())
        assert(handle:release { confirm = true })
      end)

      it("refreshes no lease whose time is up: somebody may have had the lock since", function()
        local manager, other = assert(open({}, "quarantine=3")), assert(open({}, "quarantine=3"))
        local former
        support.wait_until(function()
          former = manager:acquire(R1, { timeout = 0, ttl = 0.5 })
          return former
        end)
        local text = assert(assert(manager:acquire(R2, { ttl = 0.5 })):export())
        assert.equal("OK", cli "SAVE")
        local heir = assert(other:acquire(R1, { ttl = 3, timeout = 5 }))
        crash()
        assert.is_true(heir:is_held())
        for _, refresh in ipairs {
          function() return former:refresh() end, function() return manager:import(text, { ttl = 60 }) end,
        } do
          support.wait_until(function() -- a busy server may not answer in time
            local ok, err = refresh()
            assert.is_nil(ok)
            return err.code == "lost"
          end, "the loss")
        end
        local again = assert(manager:acquire(R1, { timeout = 10 }))
        assert.is_false(heir:is_held())
        assert(again:release { confirm = true })
      end)

      for _, call in ipairs { "refresh", "check", "downgrade" } do
        it("has no lease whose upgrade it has forgotten: readers would come in beside its holder (" .. call .. ")", function()
          local manager, other = assert(open({}, "quarantine=1")), assert(open({}, "quarantine=1"))
          local handle
          support.wait_until(function()
            handle = manager:acquire(R1, { timeout = 0, ttl = 3, mode = "update" })
            return handle
          end)
          assert.equal("OK", cli "SAVE")
          assert.is_true(handle:upgrade { timeout = 0 })
          crash()
          assert_code("lost", handle[call](handle))
          assert.is_false(handle:is_held())
          assert(assert(other:acquire(R1, { mode = "shared", timeout = 10 })):release { confirm = true })
        end)
      end
    end)

    -- The server restarts from a snapshot that was made before the lease.
    it("that has forgotten a lease grants nothing for as long as it was imported for", function()
      local manager = assert(open({}, "quarantine=0"))
      local handle = assert(manager:acquire(R1, { ttl = 1, auto_release = false }))
      assert(manager:import(assert(handle:export()), { ttl = 86400 }))
      local memory = assert(keys("*:memory")[1])
      cli("HSET", memory, "run", "another")
      for _, key in ipairs(keys "*:{*") do cli("DEL", key) end
      assert_code("timeout", assert(open({}, "quarantine=1")):acquire(R1, { timeout = 0 }))
    end)

    it("that was emptied grants nothing, though a program asks it before that does not mind", function()
      cli "FLUSHALL"
      local careless = assert(open({}, "quarantine=0"))
      assert(assert(careless:acquire(R2, { timeout = 0 })):release { confirm = true })
      local careful = assert(open({}, "quarantine=60"))
      assert_code("timeout", careful:acquire(R1, { timeout = 0 }))
      assert_code("timeout", careless:acquire(R1, { timeout = 0 }))
    end)

    it("that has lost a part of a lease has lost all of it: a refresh makes nothing anew", function()
      local manager = assert(open())
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      for _, key in ipairs(keys "hierlock:{*}:2:*") do cli("DEL", key) end
      assert_code("lost", handle:refresh())
      assert.equal(0, #keys "hierlock:{*}:[012]:*")
      assert.equal(0, #keys "hierlock:{*}:l:*")
      assert(assert(manager:acquire(U1, { timeout = 0 })):release())
    end)

    it("keeps a lease for all of its time, to the microsecond", function()
      local manager = assert(open())
      for _ = 1, 10 do
        local handle = assert(manager:acquire(U1, { ttl = 1 }))
        local granted = tonumber(handle.token:sub(1, 14), 16) -- a token is the server's time, where that is the greater one
        local till = tonumber(cli("ZSCORE", keys("hierlock:{*}:0:*")[1], "__write__"))
        assert.is_true(till * 1000 >= granted + 1000000, ("%.0f us"):format(till * 1000 - granted))
        assert(handle:release { confirm = true })
      end
    end)

    it("keeps nothing of what was released, and of nobody who waited", function()
      local manager, other = assert(open()), assert(open())
      local handle = assert(manager:acquire(R1))
      assert_code("timeout", other:acquire(R1, { timeout = 0.1 }))
      local pending = assert(other:start(U1))
      support.wait_for_waiters(store, U1)
      assert(pending:cancel())
      assert(handle:release { confirm = true })
      support.wait_until(function()
        local found = keys "hierlock:*"
        for _, key in ipairs(found) do
          if not key:find ":memory$" and not key:find ":levels$" and not key:find "}:n$" then return false end
        end
        return true
      end)
    end)

    it("gives tokens beyond those that a quorum has given elsewhere", function()
      local base = "redis://testuser:testpassword@" .. store.host .. ":" .. store.port
      local dsns, single = {}, {}
      for i = 1, 3 do
        dsns[i] = ("%s/%d?quarantine=0&prefix=q%d"):format(base, i - 1, i)
        single[i] = assert(hierlock.open(dsns[i], { timeout = 5 }))
        managers[#managers + 1] = single[i]
      end
      -- The clock of the first is an hour ahead.
      cli("HSET", "q1:memory", "least", ("%d000000"):format(os.time() + 3600))
      local many = assert(hierlock.open(dsns, { quorum = "majority", timeout = 5 }))
      managers[#managers + 1] = many
      local handle = assert(many:acquire(R1))
      local token = handle.token
      assert(handle:release { confirm = true })
      -- A majority was told of it: the first, and one of the others at least.
      local highest = ""
      for i = 2, 3 do
        local other = assert(single[i]:acquire(R1))
        if other.token > highest then highest = other.token end
        assert(other:release { confirm = true })
      end
      assert.is_true(highest > token, highest .. " after " .. token)
    end)

    it("whose memory is full goes on locking, and says so to whoever makes a space there", function()
      finally(function() cli("CONFIG", "SET", "maxmemory", "0") end)
      local manager, other = assert(open()), assert(open())
      local handle = assert(manager:acquire(R1, { ttl = 2 }))
      cli("CONFIG", "SET", "maxmemory", "1")
      local err = assert_code("store", open({}, "quarantine=0&prefix=fresh"))
      assert.is_true(err.retryable)
      assert.truthy(err.message:find("maxmemory", 1, true), err.message)
      assert.is_true(handle:refresh(60))
      assert.is_true(handle:remaining() > 50)
      local pending = assert(other:start(U1))
      support.wait_for_waiters(store, U1)
      handle = assert(assert(open()):import((assert(handle:export()))))
      assert.is_true(handle:release { confirm = true })
      handle = assert(pending:wait(5))
      assert.equal(1, manager:revoke({ target = U1 }, { by = "x" }))
      assert_code("lost", handle:check())
      handle = assert(manager:acquire(R1, { mode = "update" }))
      assert.is_true(handle:upgrade())
      assert.is_true(handle:downgrade())
    end)

    it("that has too few replicas for its own taste, says so", function()
      finally(function() cli("CONFIG", "SET", "min-replicas-to-write", "0") end)
      local manager = assert(open())
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      cli("CONFIG", "SET", "min-replicas-to-write", "1")
      local err = assert_code("store", manager:acquire(R2, { timeout = 0 }))
      assert.is_true(err.retryable)
      assert.truthy(err.message:find("NOREPLICAS", 1, true), err.message)
      assert_code("store", handle:refresh())
      assert.is_true(handle:is_held(), "a refresh that was refused took the lease")
    end)

    it("gives back what too few replicas have", function()
      local manager = assert(open({}, "quarantine=0&wait_replicas=1"))
      local err = assert_code("store", manager:acquire(R1, { timeout = 0 }))
      assert.is_true(err.retryable)
      assert.truthy(err.message:find("wait_replicas", 1, true), err.message)
      assert(assert(open()):acquire(R1, { timeout = 1 }))
    end)

    -- --------------------------------------------------------------- waiting

    it("wakes many waiters of a program by one subscription, at once", function()
      local manager, waiters = assert(open()), assert(open { pool_size = 20, timeout = 20 })
      local held, pending = {}, {}
      for i = 1, 5 do
        held[i] = assert(manager:acquire({ "u1", "a1", "r" .. i }))
        pending[i] = assert(waiters:start({ "u1", "a1", "r" .. i }))
      end
      for i = 1, 5 do support.wait_for_waiters(store, { "u1", "a1", "r" .. i }) end
      support.wait_until(function()
        support.collect() -- a handle of another spec's keeps its manager's
        return select(2, cli("CLIENT", "LIST"):gsub(" sub=1 ", "")) == 1
      end, "one subscription")
      for i = 5, 1, -1 do
        local start = support.now()
        assert(held[i]:release())
        local handle = assert(pending[i]:wait(5))
        assert.is_true(support.now() - start < PROMPT, support.now() - start)
        handle:release()
      end
    end)

    -- Several waiters leave at once: one of them reads, and another was to read next.
    it("wakes each of many waiters of a program at once, whichever of them leave at the same time", function()
      local N, ROUNDS, slowest = 10, 30, 0
      local manager, waiters = assert(open()), assert(open { pool_size = 2 * N, timeout = 20 })
      for round = 1, ROUNDS do
        local held, pending = {}, {}
        for i = 1, N do
          held[i] = assert(manager:acquire({ "u1", "a1", "r" .. i }))
          pending[i] = assert(waiters:start({ "u1", "a1", "r" .. i }))
        end
        for i = 1, N do support.wait_for_waiters(store, { "u1", "a1", "r" .. i }) end
        for i = 1, N, 2 do
          local start = support.now()
          local a, b = (i + round) % N + 1, (i + 1 + round) % N + 1
          assert(held[a]:release())
          assert(held[b]:release())
          local first, second = assert(pending[a]:wait(5)), assert(pending[b]:wait(5))
          slowest = math.max(slowest, support.now() - start)
          first:release()
          second:release()
        end
      end
      assert.is_true(slowest < PROMPT, slowest)
    end)

    it("loses no waiter when the subscription, or every connection, is cut", function()
      local manager, other = assert(open()), assert(open { timeout = 10 })
      local handle = assert(manager:acquire(R1))
      local pending = assert(other:start(R1))
      support.wait_for_waiters(store, R1)
      cli("CLIENT", "KILL", "TYPE", "pubsub")
      assert.is_false(pending:done())
      support.wait_until(function() -- who waits subscribes anew
        support.collect()
        return select(2, cli("CLIENT", "LIST"):gsub(" sub=1 ", "")) == 1
      end, "another subscription")
      local start = support.now()
      assert(handle:release { confirm = true })
      handle = assert(pending:wait(10))
      assert.is_true(support.now() - start < PROMPT, support.now() - start)
      cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
      assert.is_true(handle:is_held())
      assert.is_true(handle:refresh())
      assert(handle:release())
      assert(assert(manager:acquire(R1)):release())
    end)

    it("lets those pass who stand behind a waiter that was killed", function()
      local manager = assert(open())
      local handle = assert(manager:acquire(R1))
      local peer = support.process(store)
      peer:start("return manager:acquire(...)", U1)
      support.wait_for_waiters(store, U1)
      peer:signal "sigkill"
      local start = support.now()
      assert(assert(manager:acquire(R2, { timeout = 10 })):release())
      assert.is_true(support.now() - start < 5)
      assert(handle:release())
    end)

    -- ------------------------------------------------------- other programs

    it("has nodes in the layout of Symfony Lock, whose programs it keeps out and is kept out by", function()
      local manager = assert(open())
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local node = keys "hierlock:{*}:2:*"[1]
      local root = keys "hierlock:{*}:0:*"[1]
      assert.equal("zset", cli("TYPE", node))
      assert.equal("2", cli("ZCARD", node))
      assert.equal(cli("ZSCORE", node, "__write__"), cli("ZRANGE", node, "1", "1", "WITHSCORES"):match "\n(%d+)$")
      assert.equal("1", cli("ZCARD", root))
      assert.equal("", cli("ZSCORE", root, "__write__"))
      assert(handle:release { confirm = true })
      local till = tostring(os.time() + 1) .. "500"
      cli("ZADD", node, till, "a token of theirs", till, "__write__")
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      handle = assert(manager:acquire(R1, { timeout = 10 }))
      assert.is_true(os.time() * 1000 + 1000 >= tonumber(till))
      assert(handle:release())
    end)

    it("needs no more privileges than docs/security.md lists", function()
      finally(function() cli("ACL", "DELUSER", "least") end)
      local RULES = { "~hierlock:*", "&hierlock:*", "+eval", "+evalsha", "+script|load", "+info", "+time", "+ping", "+select",
        "+config|get", "+setnx", "+get", "+set", "+exists", "+del", "+scan", "+hset", "+hget", "+hmget", "+zadd", "+zrem",
        "+zscore", "+zcard", "+zrange", "+zrevrange", "+zrangebyscore", "+zremrangebyscore", "+pexpire", "+pexpireat", "+publish",
        "+subscribe", "+wait" }
      local page = assert(io.open("docs/security.md")):read "*a"
      for _, rule in ipairs(RULES) do assert.truthy(page:find(rule, 1, true), rule) end
      assert.equal("OK", cli("ACL", "SETUSER", "least", "reset", "on", ">least", unpack(RULES)))
      local mine = (store.dsn:gsub("testuser:testpassword", "least:least"))
      local function open_least()
        local manager, err = hierlock.open(mine)
        managers[#managers + 1] = manager
        return manager, err
      end
      local manager, other = assert(open_least()), assert(open_least())
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local pending = assert(other:start(R1))
      support.wait_for_waiters(store, R1)
      assert(handle:refresh())
      assert(handle:check())
      handle = assert(manager:import((assert(handle:export()))))
      local start = support.now()
      assert(handle:release { confirm = true })
      handle = assert(pending:wait(5))
      assert.is_true(support.now() - start < PROMPT)
      assert.equal(1, #manager:leases())
      assert.equal(1, manager:revoke({ target = U1 }, { by = "x" }))
      assert_code("lost", handle:check())
      -- Without wake-ups it waits, too.
      cli("ACL", "SETUSER", "least", "-publish", "-subscribe")
      handle = assert(manager:acquire(R1))
      pending = assert(other:start(R1))
      support.wait_for_waiters(store, R1)
      assert(handle:release { confirm = true })
      assert(assert(pending:wait(5)):release { confirm = true })
      cli("ACL", "SETUSER", "least", "-zadd")
      -- The server refuses at once; a busy machine may need longer than a try waits for its answer.
      local err = assert_code("store", manager:acquire(R1, { timeout = 10 }))
      assert.truthy(err.message:find("docs/security.md", 1, true), err.message)
      assert.equal(0, #assert(open()):leases())
    end)
  end)
end)
