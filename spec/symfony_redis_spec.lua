-- Side by side with PHP programs that use Symfony Lock on Redis: real ones, on the same server. docs/symfony.md says
-- which lock excludes which; symfony_spec has the stores whose locks end with a session.

local hierlock = require "hierlock"
local support = require "spec.support"
local symfony = require "spec.support.symfony"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local LONG = 15 -- a time-out that is not waited for
local SHORT = 0.3 -- one that is

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

describe("beside Symfony Lock in Redis,", function()
  local missing = symfony.missing()
  if missing then
    if (" " .. (os.getenv "HIERLOCK_REQUIRE" or "") .. " "):find(" php ", 1, true) then
      it("has PHP", function() error(missing) end)
    else
      pending(missing)
    end
    return
  end

  support.on_redis(function(store)
    local manager, php, opened, dsn, theirs

    local function open(options)
      local all = { interoperate = "symfony" }
      for k, v in pairs(options or {}) do all[k] = v end
      opened[#opened + 1] = assert(hierlock.open(dsn, all))
      return opened[#opened]
    end

    local function process() return symfony.process(theirs) end

    before_each(function()
      opened = {}
      theirs = ("redis://:rootpassword@%s:%s/0"):format(store.host, store.port)
      dsn = theirs .. "?quarantine=0" -- servers of other specs may just have been emptied
      for _, name in ipairs { "u1", "u1/a1", "u1/a1/r1", "u1/a1/r2", "u1/a1/r3" } do store.cli("DEL", name) end
      manager, php = open(), process()
    end)

    after_each(function()
      support.close_peers()
      for _, one in ipairs(opened) do one:close() end
    end)

    local function php_gets(name, mode)
      local got = php:call("acquire", name, mode or "write", "try")
      if got then php:call("release", name) end
      return got
    end

    local function we_get(target, mode)
      local handle, err = manager:acquire(target, { timeout = 0, mode = mode })
      if handle then return assert(handle:release { confirm = true }) end
      assert.equal("timeout", err.code, err.message)
      return false
    end

    it("ours keeps out theirs, until it is released", function()
      local handle = assert(manager:acquire(R1, { timeout = 0 }))
      assert.is_false(php_gets "u1/a1/r1")
      assert.is_false(php_gets("u1/a1/r1", "read"))
      assert.is_true(php_gets "u1/a1/r2")
      assert.is_false(php_gets "u1/a1")
      assert.is_true(php_gets("u1/a1", "read"))
      assert(handle:check())
      assert(handle:release { confirm = true })
      assert.is_true(php_gets "u1/a1/r1")
      assert.is_true(php_gets "u1")
    end)

    it("theirs keeps out ours, until it is released", function()
      assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
      assert.is_false(we_get(R1))
      assert.is_false(we_get(R1, "shared"))
      assert.is_true(we_get(R2))
      assert.is_true(php:call("refresh", "u1/a1/r1"))
      assert.is_true(php:call("held", "u1/a1/r1"))
      php:call("release", "u1/a1/r1")
      assert.is_true(we_get(R1))
    end)

    it("readers are together, and keep out writers", function()
      local handle = assert(manager:acquire(R1, { mode = "shared", timeout = 0 }))
      assert.is_true(php:call("acquire", "u1/a1/r1", "read", "try"))
      assert.is_true(we_get(R1, "shared"))
      assert.is_false(we_get(R1))
      local other = process()
      assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
      php:call("release", "u1/a1/r1")
      assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
      assert(handle:check())
      assert(handle:release { confirm = true })
      assert.is_true(other:call("acquire", "u1/a1/r1", "write", "try"))
    end)

    it("their writer of a node keeps out all of ours below it, their reader those of the node", function()
      assert.is_true(php:call("acquire", "u1", "write", "try"))
      for _, target in ipairs { U1, A1, R1 } do assert.is_false(we_get(target)) end
      assert.is_true(we_get { "u2", "a1" })
      php:call("release", "u1")
      assert.is_true(php:call("acquire", "u1", "read", "try"))
      assert.is_false(we_get(U1))
      assert.is_true(we_get(R1))
    end)

    it("ours waits for theirs, and has it soon after", function()
      assert.is_true(php:call("acquire", "u1/a1", "write", "try"))
      local pending = assert(manager:start(R1, { timeout = LONG }))
      assert.is_nil((pending:wait(SHORT)))
      php:call("release", "u1/a1")
      local start = support.now()
      local handle = assert(pending:wait(LONG))
      assert.is_true(support.now() - start < 0.7, "a waiter that is not rung looks each second")
      assert.is_false(php_gets "u1/a1")
      assert(handle:release())
    end)

    it("theirs waits for ours", function()
      local handle = assert(manager:acquire(R1))
      php:ask("acquire", "u1/a1/r1", "write", "wait")
      assert.is_true(php:stays_blocked())
      assert(handle:release())
      assert.is_true(php:result())
      assert.is_false(we_get(R1))
    end)

    it("who waits leaves nothing under names that may be theirs", function()
      assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
      local pending = assert(manager:start(R1, { timeout = LONG }))
      assert.is_nil((pending:wait(SHORT)))
      assert.equal("u1/a1/r1", store.cli("KEYS", "u1*"))
      pending:cancel()
      assert_code("cancelled", pending:wait(LONG))
      assert.is_true(php_gets "u1")
    end)

    it("theirs ends with its time, and ours has it then", function()
      assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try", 1))
      assert.is_false(we_get(R1))
      local handle = assert(manager:acquire(R1, { timeout = LONG }))
      assert.is_false(php:call("held", "u1/a1/r1"))
      pcall(php.call, php, "release", "u1/a1/r1")
      assert(handle:check())
      assert.is_false(php_gets "u1/a1/r1")
      assert(handle:release())
    end)

    it("theirs lasts for all of its time, to the microsecond, though their scripts cut it to milliseconds", function()
      local SAVE = [[
        local time = redis.call('TIME')
        local now = time[1] * 1000 + math.floor(time[2] / 1000)
        redis.call('ZADD', KEYS[1], now + 15, 'token')
        redis.call('ZADD', KEYS[1], now + 15, '__write__')
        redis.call('PEXPIREAT', KEYS[1], now + 15)
        return time[1] * 1000000 + time[2] ]]
      local late, seen = 0, 0
      while seen < 20 do
        -- The PHP program counts from a time before this.
        local began = tonumber((store.cli("EVAL", SAVE, "1", "u1/a1/r1")))
        if began % 1000 > 500 then
          seen = seen + 1
          local handle
          repeat handle = manager:acquire(R1, { timeout = 0 }) until handle
          -- A token is the server's time of the grant, unless others came before.
          local granted = tonumber(handle.token:sub(1, 14), 16)
          if granted < began + 15000 then late = late + 1 end
          assert(handle:release { confirm = true })
        end
      end
      assert.equal(0, late)
    end)

    it("ours ends with its time, and a refresh finds that theirs has had it", function()
      local handle = assert(manager:acquire(R1, { ttl = 0.5 }))
      assert.is_false(php_gets "u1/a1/r1")
      support.wait_until(function() return php:call("acquire", "u1/a1/r1", "write", "try") end, "the end")
      assert_code("lost", handle:refresh(5))
      assert.is_true(php:call("held", "u1/a1/r1"))
      assert.is_false(we_get(R1))
    end)

    it("a refresh of ours is one to them", function()
      local handle = assert(manager:acquire(R1, { ttl = 0.6 }))
      assert(handle:refresh(LONG))
      support.sleep(0.8)
      assert.is_false(php_gets "u1/a1/r1")
      assert.is_false(php_gets("u1/a1/r1", "read"))
      assert(handle:release { confirm = true })
      assert.is_true(php_gets "u1/a1/r1")
    end)

    it("a lease that is exported and imported keeps them out", function()
      local handle = assert(manager:acquire(R1, { ttl = LONG }))
      local again = assert(open():import(assert(handle:export())))
      assert.is_false(php_gets "u1/a1/r1")
      assert(again:release { confirm = true })
      assert.is_true(php_gets "u1/a1/r1")
    end)

    it("theirs are listed among the leases, and can be revoked, by target alone", function()
      assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
      local found = assert(manager:leases { target = R1 })
      assert.equal(1, #found)
      assert.equal("Symfony Lock", found[1].application)
      assert.equal("exclusive", found[1].mode)
      assert.equal("u1/a1/r1", found[1].path)
      assert.is_true(found[1].remaining > 200 and found[1].remaining <= 300)
      assert.equal(0, manager:revoke { target = R1, owner = "somebody" })
      assert.is_true(php:call("held", "u1/a1/r1"))
      assert.equal(1, manager:revoke { target = R1 })
      assert.is_false(php:call("held", "u1/a1/r1"))
      assert.is_true(we_get(R1))
    end)

    it("theirs are shown to those who ask, and to those who waited in vain", function()
      assert.is_true(php:call("acquire", "u1/a1", "write", "try"))
      assert.is_true(php:call("acquire", "u1/a1/r1", "read", "try")) -- in the way of those who want it alone
      local other = process()
      assert.is_true(other:call("acquire", "u1/a1/r1", "read", "try"))
      local found = assert(manager:holders(R1))
      assert.equal(3, #found)
      local modes = {}
      for _, holder in ipairs(found) do
        assert.equal("Symfony Lock", holder.application)
        assert.equal("lease", holder.kind)
        assert.is_false(holder.waiting)
        assert.is_true(holder.remaining > 200 and holder.remaining <= 300)
        assert.is_nil(holder.owner)
        assert.is_nil(holder.since)
        modes[#modes + 1] = holder.path .. " " .. holder.mode
      end
      table.sort(modes)
      assert.same({ "u1/a1 exclusive", "u1/a1/r1 shared", "u1/a1/r1 shared" }, modes)
      assert.equal(1, #assert(manager:holders({ "u1", "a1", "r2" })))
      assert.same({}, manager:holders { "u2" })
      local err = support.told(function() return manager:acquire(R2, { timeout = 0.1 }) end)
      assert.equal("timeout", err.code)
      assert.equal(1, #err.holders)
      assert.matches("u1/a1 is held by Symfony Lock, and for %d%d%d s more$", err.message)
      -- Keys under such a name that are no lock.
      store.cli("SET", "u1/a1/r1:w", "x")
      store.cli("HSET", "u1/a1/r3", "f", "x")
      assert.equal(3, #assert(manager:holders(R1)))
      assert.equal(1, #assert(manager:holders { "u1", "a1", "r3" }))
      store.cli("DEL", "u1/a1/r1:w", "u1/a1/r3")
    end)

    it("names that would be keys of our own are refused, before anything is sent", function()
      local prefixed = assert(hierlock.open(dsn .. "&prefix=p1", { interoperate = "symfony" }))
      opened[#opened + 1] = prefixed
      local sent = tonumber(store.cli("INFO", "commandstats"):match "cmdstat_evalsha:calls=(%d+)")
      for _, target in ipairs { { "hierlock:{0}:l:x" }, { "hierlock:levels" }, { "hierlock:", "a1", "r1" } } do
        for _, verb in ipairs { "acquire", "start", "holders" } do
          local ok, raised = pcall(manager[verb], manager, target)
          assert.is_false(ok)
          assert.matches("hierlock: .*begins with 'hierlock:', as the keys of hierlock itself do.*%?prefix=", raised)
        end
        assert.is_false((pcall(manager.leases, manager, { target = target })))
        assert.is_false((pcall(manager.revoke, manager, { target = target })))
      end
      assert.is_false((pcall(prefixed.acquire, prefixed, { "p1:x" })))
      assert.equal(sent, tonumber(store.cli("INFO", "commandstats"):match "cmdstat_evalsha:calls=(%d+)"))
      for _, user in ipairs { "p1", "p1/", "hierlock:x" } do assert(prefixed:acquire({ user }, { timeout = 1 })):release() end
      assert(manager:acquire({ "hierlock" }, { timeout = 1 })):release()
      -- Programs that do not share names may use any, and their leases have no name here.
      local plain = assert(hierlock.open(dsn))
      opened[#opened + 1] = plain
      local text = assert(assert(plain:acquire({ "hierlock:x" }, { ttl = LONG })):export())
      assert_code("mismatch", manager:import(text))
      assert(plain:import(text)):release { confirm = true }
    end)

    it("whoever deletes the key of ours ends it", function()
      local handle = assert(manager:acquire(R1))
      store.cli("SET", "u1/a1/r1", "x")
      assert_code("lost", handle:check())
      assert.is_false(we_get(R1)) -- as Symfony Lock before 5.2 locks
      store.cli("DEL", "u1/a1/r1")
      assert.is_true(we_get(R1))
    end)

    it("names may be of any bytes and size", function()
      for _, id in ipairs { "r", "a b/c", "\195\188ber#1", "\1\255'\\", ("x"):rep(1024), 17, "%41\n~", "..", "r\n" } do
        local handle = assert(manager:acquire { "u1", "a1", id })
        local name = "u1/a1/" .. id
        assert.is_false(php_gets(name), name)
        assert.is_true(php_gets(name .. "x"), name)
        assert(handle:release { confirm = true })
        assert.is_true(php_gets(name), name)
      end
    end)

    it("those of ours that do not know of Symfony Lock exclude ours all the same", function()
      local plain = assert(hierlock.open(dsn))
      opened[#opened + 1] = plain
      local handle = assert(plain:acquire(A1))
      assert.is_false(we_get(R1))
      assert.is_true(php_gets "u1/a1")
      assert(handle:release { confirm = true })
      assert.is_true(we_get(R1))
    end)

    it("nobody is in it together", function()
      local path = os.tmpname()
      local file = assert(io.open(path, "w"))
      file:write "0"
      file:close()
      local N, peers = 10, {}
      for _ = 1, 2 do
        peers[#peers + 1] = process():ask("count", path, "u1/a1/r1", N)
        peers[#peers + 1] = support.process(nil, { interoperate = "symfony" }, dsn):start([[
          local path, n = ...
          for _ = 1, n do
            local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { timeout = 60 }))
            local file = assert(io.open(path))
            local number = file:read "*n"
            file:close()
            support.sleep(math.random() * 0.0003)
            file = assert(io.open(path, "w"))
            file:write(math.floor(number + 1))
            file:close()
            assert(handle:release())
            support.sleep(0.02)
          end
          return true
        ]], path, N)
      end
      for _, peer in ipairs(peers) do
        support.wait_until(function()
          peer.line = peer.line or peer:read(0.01)
          return peer.line
        end, "the end", 90)
        assert.is_true(peer:result())
      end
      file = assert(io.open(path))
      assert.equal(4 * N, file:read "*n")
      file:close()
      os.remove(path)
    end)
  end)
end)
