-- Side by side with PHP programs that use Symfony Lock: real ones, on the same store. docs/symfony.md says which
-- lock excludes which.

local uv = require "luv"
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

-- The stores that both know: a DSN for each of us.
local places = {}

do
  local root = os.getenv "HIERLOCK_SPEC_DIRECTORY"
  if root then
    local files = root .. "/symfony"
    places[1] = {
      name = "files",
      php = "flock://" .. files,
      ours = "file:" .. root .. "/beside-symfony?flock=" .. files,
      theirs = "flock://" .. files,
      files = files,
      options = {},
    }
  end
  for _, store in ipairs(support.stores) do
    if store.name == "postgresql" and not store.missing then
      local user, password, host, port, database =
        store.dsn:match "^postgresql://([^:]+):([^@]+)@([^:]+):(%d+)/([^?]+)"
      local list = ("host=%s;port=%s;dbname=%s;user=%s;password=%s"):format(host, port, database, user, password)
      places[#places + 1] = {
        name = "PostgreSQL",
        php = "pgsql+advisory:" .. list,
        ours = store.dsn,
        theirs = "pgsql+advisory:" .. list,
        server = true,
        options = {},
      }
    end
  end
end

for _, place in ipairs(places) do
  place.dsn = place.ours -- as support.thread wants it
  place.options = { interoperate = "symfony" }
end

describe("beside Symfony Lock,", function()
  local missing = symfony.missing()
  if missing then
    if (" " .. (os.getenv "HIERLOCK_REQUIRE" or "") .. " "):find(" php ", 1, true) then
      it("has PHP", function() error(missing) end)
    else
      pending(missing)
    end
    return
  end

  for _, place in ipairs(places) do
    describe("in " .. place.name .. ":", function()
      local manager, php, opened

      local function open(options, dsn)
        local all = { interoperate = "symfony" }
        for k, v in pairs(options or {}) do all[k] = v end
        opened[#opened + 1] = assert(hierlock.open(dsn or place.ours, all))
        return opened[#opened]
      end

      before_each(function()
        opened = {}
        manager, php = open(), symfony.process(place.php)
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
        assert(handle:release { confirm = true })
        assert.is_true(php_gets "u1/a1/r1")
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
        local other = symfony.process(place.php)
        assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
        php:call("release", "u1/a1/r1")
        assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
        assert(handle:release { confirm = true })
        assert.is_true(other:call("acquire", "u1/a1/r1", "write", "try"))
      end)

      it("ours below a node keeps out their writer of the node, and no reader", function()
        local handle = assert(manager:acquire(R1, { timeout = 0 }))
        assert.is_false(php_gets "u1")
        assert.is_false(php_gets "u1/a1")
        assert.is_true(php_gets("u1", "read"))
        assert.is_true(php_gets("u1/a1", "read"))
        assert(handle:release())
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

      it("theirs below a node keeps out none of ours on the node: they know no tree", function()
        assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
        assert.is_true(we_get(U1))
      end)

      it("ours waits for theirs", function()
        assert.is_true(php:call("acquire", "u1/a1", "write", "try"))
        local pending = assert(manager:start(R1, { timeout = LONG }))
        assert.is_nil((pending:wait(SHORT)))
        php:call("release", "u1/a1")
        local handle = assert(pending:wait(LONG))
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

      it("a time-out is exact, and leaves nothing", function()
        assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
        support.ends_in_time({}, SHORT, 0.01, function(seconds)
          local start = support.now()
          assert_code("timeout", manager:acquire(R1, { timeout = seconds }))
          local took = support.now() - start
          assert.is_true(took >= seconds, took)
          return took
        end)
        local other = symfony.process(place.php)
        assert.is_true(other:call("acquire", "u1/a1", "write", "try"))
        assert.is_true(other:call("acquire", "u1", "write", "try"))
      end)

      it("a wait can be cancelled, and leaves nothing", function()
        assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
        local pending = assert(manager:start({ user = "u1", account = "a1", resources = { "r0", "r1", "r2" } },
          { timeout = LONG }))
        assert.is_nil((pending:wait(SHORT)))
        pending:cancel()
        assert_code("cancelled", pending:wait(LONG))
        local other = symfony.process(place.php)
        for _, name in ipairs { "u1", "u1/a1", "u1/a1/r0", "u1/a1/r2" } do
          support.wait_until(function() return other:call("acquire", name, "write", "try") end, name)
        end
      end)

      it("a wait ends with its manager", function()
        assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
        local other = open()
        local pending = assert(other:start(R1, { timeout = LONG }))
        assert.is_nil((pending:wait(SHORT)))
        other:close()
        assert.is_nil((pending:wait(LONG)))
        local third = symfony.process(place.php)
        support.wait_until(function() return third:call("acquire", "u1", "write", "try") end, "u1")
      end)

      it("the locks of a program of theirs that is killed are free", function()
        assert.is_true(php:call("acquire", "u1/a1", "write", "try"))
        local pending = assert(manager:start(R1, { timeout = LONG }))
        assert.is_nil((pending:wait(SHORT)))
        php:signal "sigkill"
        local handle = assert(pending:wait(LONG))
        assert(handle:release())
      end)

      it("the locks of a program of ours that is killed are free, held or awaited", function()
        local peer = support.process(nil, place.options, place.ours)
        assert.is_true((peer:acquire("r1", "acquire", R1):result()))
        assert.is_false(php_gets "u1/a1/r1")
        php:ask("acquire", "u1/a1/r1", "write", "wait")
        assert.is_true(php:stays_blocked())
        peer:signal "sigkill"
        assert.is_true(php:result())
        local waiter = support.process(nil, place.options, place.ours)
        waiter:acquire("r1", "acquire", R1, { timeout = LONG })
        assert.is_true(waiter:stays_blocked())
        waiter:signal "sigkill"
        local other = symfony.process(place.php)
        support.wait_until(function() return other:call("acquire", "u1", "write", "try") end, "u1")
      end)

      it("threads of ours keep out theirs, and each other", function()
        local thread = support.thread(place)
        assert.is_true((thread:acquire("r1", "acquire", R1, { mode = "shared" }):result()))
        assert.is_true(we_get(R1, "shared"))
        assert.is_false(php_gets "u1/a1/r1")
        thread:release "r1"
        assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
        thread:acquire("r1", "acquire", R1, { timeout = LONG })
        assert.is_true(thread:stays_blocked())
        php:call("release", "u1/a1/r1")
        assert.is_true((thread:result()))
        assert.is_false(php_gets "u1/a1/r1")
      end)

      it("the collector releases what they wait for", function()
        local handle = assert(manager:acquire(R1))
        assert.is_true(handle:is_held())
        assert.is_false(php_gets "u1/a1/r1")
        handle = nil -- luacheck: ignore 311
        support.collect()
        support.wait_until(function() return php_gets "u1/a1/r1" end, "the release")
      end)

      it("a child of ours keeps nothing of its parent's, and gives back nothing", function()
        local peer = support.process(nil, place.options, place.ours)
        assert.is_true((peer:acquire("r1", "acquire", R1):result()))
        local child = peer:call([[
          local fork = require "hierlock_spec.fork"
          local pid = fork.fork()
          if pid ~= 0 then return pid end
          handles.r1 = nil
          for _ = 1, 3 do collectgarbage() end
          local got = manager:acquire({ "u1", "a1", "r1" }, { timeout = 0 })
          if got then fork.exit(1) end
          local other = manager:acquire({ "u1", "a1", "r2" }, { timeout = 20 })
          support.sleep(other and 60 or 0)
          fork.exit(2)
        ]])
        support.wait_until(function() return not php_gets "u1/a1/r2" end, "the child")
        assert.is_false(php_gets "u1/a1/r1")
        peer:signal "sigkill"
        support.wait_until(function() return php_gets "u1/a1/r1" end, "the parent's end")
        assert.is_false(php_gets "u1/a1/r2")
        uv.kill(child, "sigkill")
        support.wait_until(function() return php_gets "u1/a1/r2" end, "the child's end")
      end)

      it("names are what the program says", function()
        local other = open { interoperate = { with = "symfony",
          names = { "{user}", "{user}.{account}", "invoice-{resource} of {user}: {resource}" } } }
        local handle = assert(other:acquire(R1))
        assert.is_false(php_gets "invoice-r1 of u1: r1")
        assert.is_false(php_gets "u1.a1")
        assert.is_false(php_gets "u1")
        assert.is_true(php_gets "u1/a1/r1")
        assert.is_false(we_get(R1))
        assert(handle:release())
      end)

      it("names may be of any bytes and size", function()
        for _, id in ipairs { "r", "a b/c", "\195\188ber#1", "\1\255'\\", ("x"):rep(1024), 17, "..", ("-"):rep(64),
                              ("y"):rep(55), ("y"):rep(56), ("y"):rep(58), ("y"):rep(118) } do
          local handle = assert(manager:acquire { "u1", "a1", id })
          local name = "u1/a1/" .. id
          assert.is_false(php_gets(name), name)
          assert.is_true(php_gets(name .. "x"), name)
          assert(handle:release { confirm = true })
          assert.is_true(php_gets(name), name)
        end
      end)

      it("many at once are all or nothing", function()
        local ids = {}
        for i = 1, 300 do ids[i] = "r" .. i end
        assert.is_true(php:call("acquire", "u1/a1/r137", "write", "try"))
        local target = { user = "u1", account = "a1", resources = ids }
        assert_code("timeout", manager:acquire(target, { timeout = 0 }))
        local other = symfony.process(place.php)
        for _, i in ipairs { 1, 136, 138, 300 } do
          assert.is_true(other:call("acquire", "u1/a1/r" .. i, "write", "try"))
          other:call("release", "u1/a1/r" .. i)
        end
        php:call("release", "u1/a1/r137")
        local handle = assert(manager:acquire(target, { timeout = LONG }))
        for _, i in ipairs { 1, 137, 300 } do assert.is_false(php_gets("u1/a1/r" .. i)) end
        assert(handle:release())
      end)

      it("more of it can be locked", function()
        local handle = assert(manager:acquire(R1))
        assert(handle:extend(R2))
        assert.is_false(php_gets "u1/a1/r2")
        assert.is_true(php:call("acquire", "u1/a1/r3", "write", "try"))
        assert_code("timeout", handle:extend({ "u1", "a1", "r3" }, { timeout = 0 }))
        assert.is_true(handle:is_held())
        assert.is_false(php_gets "u1/a1/r1")
        assert(handle:release())
      end)

      it("what is shared becomes exclusive where the store can, and is kept where it cannot", function()
        local handle = assert(manager:acquire(R1))
        local ok, err = handle:extend(A1)
        if place.server then assert(ok, err) else assert_code("unsupported", ok, err) end
        assert(handle:check())
        assert.equal(not place.server, php_gets("u1/a1", "read"))
        assert.is_false(php_gets "u1/a1")
        assert(handle:release())
      end)

      it("there are no leases", function()
        assert_code("unsupported", manager:acquire(R1, { ttl = 5 }))
        local handle = assert(manager:acquire(R1))
        assert_code("unsupported", handle:to_lease { ttl = 5 })
        assert.is_true(handle:is_held())
        assert(handle:release())
      end)

      it("those of ours that do not know of Symfony Lock exclude ours all the same", function()
        local plain = assert(hierlock.open((place.ours:gsub("%?.*", ""))))
        opened[#opened + 1] = plain
        local handle = assert(plain:acquire(A1))
        assert.is_false(we_get(R1))
        assert.is_true(php_gets "u1/a1")
        assert(handle:release { confirm = true })
        assert.is_true(we_get(R1))
      end)

      it("a DSN of Symfony's opens both", function()
        local other = open({}, place.theirs)
        local handle = assert(other:acquire(R1))
        assert.is_false(php_gets "u1/a1/r1")
        assert(handle:release())
        opened[#opened + 1] = assert(hierlock.open(place.theirs))
        handle = assert(opened[#opened]:acquire(R1))
        assert.is_false(php_gets "u1/a1/r1")
        assert(handle:release())
      end)

      it("nobody is in it together", function()
        local path = os.tmpname()
        local file = assert(io.open(path, "w"))
        file:write "0"
        file:close()
        local N, peers = 40, {}
        for i = 1, 2 do
          peers[#peers + 1] = symfony.process(place.php):ask("count", path, "u1/a1/r1", N)
          peers[#peers + 1] = support.process(nil, place.options, place.ours):start([[
            local path, n, i = ...
            for k = 1, n do
              local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { timeout = 60 }))
              local file = assert(io.open(path))
              local number = file:read "*n"
              file:close()
              support.sleep(math.random() * 0.0003)
              file = assert(io.open(path, "w"))
              file:write(math.floor(number + 1))
              file:close()
              assert(handle:release())
              if k % 7 == i then support.sleep(0.002) end
            end
            return true
          ]], path, N, i)
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

      if place.files then
        it("a lock file that is removed is a lock that is lost", function()
          local handle = assert(manager:acquire(R1))
          for name in io.popen("ls " .. place.files):lines() do os.remove(place.files .. "/" .. name) end
          assert_code("lost", handle:check())
          handle = assert(manager:acquire(R2))
          assert.is_false(php_gets "u1/a1/r2")
          assert(handle:release())
        end)

        it("waits for a file that is removed meanwhile no longer", function()
          assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
          local pending = assert(manager:start(R1, { timeout = LONG }))
          assert.is_nil((pending:wait(SHORT)))
          for name in io.popen("ls " .. place.files .. "/*r1*"):lines() do os.remove(name) end
          php:call("release", "u1/a1/r1")
          local handle = assert(pending:wait(LONG))
          local other = symfony.process(place.php)
          assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
          assert(handle:release())
        end)

        it("keeps no file that is removed meanwhile, in a call that blocks", function()
          assert.is_true(php:call("acquire", "u1/a1/r1", "write", "try"))
          local peer = support.process(nil, place.options, place.ours)
          local request = peer:acquire("r1", "acquire", R1, { timeout = LONG })
          support.wait_until(function()
            return io.popen(("ls -l /proc/%d/fd"):format(peer.pid)):read("*a"):find(place.files, 1, true)
          end, "the peer to have the file open")
          for name in io.popen("ls " .. place.files .. "/*r1*"):lines() do os.remove(name) end
          php:call("release", "u1/a1/r1")
          assert.is_true((request:result()))
          local other = symfony.process(place.php)
          assert.is_false(other:call("acquire", "u1/a1/r1", "write", "try"))
        end)

        it("want of descriptors takes nothing", function()
          local peer = support.process(nil, nil, place.ours, { "sh", "-c", 'ulimit -n 250 && exec "$0" "$@"',
            os.getenv "HIERLOCK_LUA" or "lua", "spec/support/peer.lua", place.ours, "{}" })
          local ids = {}
          for i = 1, 300 do ids[i] = "r" .. i end
          local ok, code = peer:acquire("all", "acquire", { user = "u1", account = "a1", resources = ids }):result()
          assert.is_nil(ok)
          assert.equal("store", code)
          for _, name in ipairs { "u1", "u1/a1", "u1/a1/r1" } do assert.is_true(php_gets(name)) end
          assert.is_true((peer:acquire("some", "acquire", R1):result()))
          assert.is_false(php_gets "u1/a1/r1")
        end)

        it("follows no link that somebody has put there", function()
          local handle = assert(manager:acquire(R1))
          assert(handle:release())
          for name in io.popen("ls " .. place.files .. "/*r1*"):lines() do
            os.remove(name)
            assert(uv.fs_symlink("/etc/hostname", name))
          end
          assert_code("store", manager:acquire(R1, { timeout = 0 }))
          assert.is_true(we_get(R2))
          for name in io.popen("ls " .. place.files .. "/*r1*"):lines() do os.remove(name) end
        end)
      else
        it("who is in the way is told", function()
          assert.is_true(php:call("acquire", "u1/a1", "write", "try"))
          local err = support.told(function() return manager:acquire(R1, { timeout = 0.05 }) end)
          assert.equal("timeout", err.code)
          assert.equal(1, #err.holders)
          assert.equal("exclusive", err.holders[1].mode)
        end)

        it("a circle with theirs is ended by the server: one of both is refused", function()
          local peer = support.process(nil, place.options, place.ours)
          assert.is_true(php:call("acquire", "u1/a1/r9", "write", "try"))
          assert.is_true((peer:acquire("mine", "acquire", { "u1", "a1", "r8" }):result()))
          php:ask("acquire", "u1/a1/r8", "write", "wait")
          assert.is_true(php:stays_blocked())
          peer:start([[
            local ok, err = handles.mine:extend({ "u1", "a1", "r9" }, { timeout = 60 })
            return ok or err.code
          ]])
          support.wait_until(function()
            php.line, peer.line = php.line or php:read(0.01), peer.line or peer:read(0.01)
            return php.line or peer.line
          end)
          if php.line then
            local ok, raised = pcall(php.result, php)
            assert.is_false(ok)
            assert.is_truthy(tostring(raised):find "LockAcquiringException", raised)
            php:call("release", "u1/a1/r9") -- it keeps what it had
            assert.is_true(peer:result())
          else
            assert.equal("deadlock", peer:result())
            assert.is_true(php:result())
          end
        end)
      end
    end)
  end
end)

describe("Symfony's stores", function()
  it("do not take away a user's name of the Go form", function()
    local err = assert_code("connection", hierlock.open("mysql:a=b@tcp(127.0.0.1:1)/d"))
    assert.is_nil(err.message:find("lock_keys", 1, true))
  end)

  it("whose locks cannot be joined are unsupported", function()
    for _, dsn in ipairs { "mysql://u:p@127.0.0.1:1/d", "sqlite:/nowhere/x", "null:" } do
      local err = assert_code("unsupported", hierlock.open(dsn, { interoperate = "symfony" }))
      assert.is_truthy(err.message:find("flock:///", 1, true), err.message)
    end
  end)

  it("\"null\" is null:", function()
    local manager = assert(hierlock.open "null")
    assert(manager:acquire(U1))
    manager:close()
  end)

  it("what is misspelt raises", function()
    for _, wrong in ipairs { "symphony", true, 1, {}, { with = "symfony", name = "x" }, { names = { "{user}" } },
                             { with = "symfony", names = {} }, { with = "symfony", names = { 1, 2, 3 } },
                             { with = "symfony", names = { "{user}", "{account}" } },
                             { with = "symfony", names = { "{user}", "{account}", "r" } },
                             { with = "symfony", names = { "{user}", "{acount}", "{resource}" } },
                             { with = "symfony", names = { "{user}{account}", "{account}", "{resource}" } },
                             { with = "symfony", names = { "", "{account}", "{resource}" } },
                             { with = "symfony", names = { "{user}", "{account}", "{resource}", "{x}" } } } do
      assert.has_error(function() hierlock.open("file:", { interoperate = wrong }) end)
    end
  end)
end)
