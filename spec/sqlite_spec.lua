-- The SQLite store, sqlite:, as processes see it: which file it is, and who is refused. Leases and waiters when
-- others are killed, stopped, write for long, fork, take the file away or leave no space. leases_spec has the duties
-- of every store with leases.

local hierlock = require "hierlock"
local support = require "spec.support"
local uv = require "luv"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local PROMPT = 1.5

local function sh(command, ...)
  local status = os.execute(command:format(...))
  assert(status == true or status == 0, command)
end

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function write_file(name, text)
  local file = assert(io.open(name, "wb"))
  file:write(text)
  file:close()
end

support.on_sqlite(function(store)
  local counter = 0
  -- A name in the specs' directory that nothing has yet.
  local function fresh()
    counter = counter + 1
    return store.directory .. "/s" .. counter .. ".db"
  end

  local managers = {}
  local function open(path, options, params)
    local all = {}
    for k, v in pairs(store.options) do all[k] = v end
    for k, v in pairs(options or {}) do all[k] = v end
    local manager, err = hierlock.open("sqlite:" .. path .. (params or "?synchronous=normal"), all)
    managers[#managers + 1] = manager
    return manager, err
  end

  local function process(path, options, params)
    return support.process(store, options, "sqlite:" .. path .. (params or "?synchronous=normal"))
  end

  -- A program that knows nothing of hierlock: query(sql) runs it, on a connection of its own.
  local function stranger(path)
    local self = support.process(nil)
    self:call([[
      handles.db = assert(require("luasql.sqlite3").sqlite3():connect((...)))
      handles.db:execute "PRAGMA busy_timeout=5000"
    ]], path)
    function self:query(sql)
      return self:call([[
        local cursor = assert(handles.db:execute((...)))
        if type(cursor) == "number" then return cursor end
        local value = cursor:fetch()
        cursor:close()
        return value
      ]], sql)
    end
    return self
  end

  local function waiters(manager, target)
    local n = 0
    for _, holder in ipairs(assert(manager:holders(target))) do n = n + (holder.waiting and 1 or 0) end
    return n
  end

  local function wait_for_waiters(manager, target, n)
    support.wait_until(function() return waiters(manager, target) == n end, n .. " waiters")
  end

  after_each(function()
    support.close_peers()
    while #managers > 0 do table.remove(managers):close() end
  end)

  describe("the file", function()
    it("is made for its user alone, and so are those beside it", function()
      local path = fresh()
      assert(assert(open(path)):acquire(R1))
      for _, name in ipairs { "", "-wal", "-shm", "-hierlock" } do
        assert.equal(384, assert(uv.fs_stat(path .. name)).mode % 512, name) -- 0600
      end
    end)

    it("keeps the mode that others gave it, and so do those beside it", function()
      local path = fresh()
      sh("umask 0; : >%s; chmod 0660 %s", path, path)
      assert(assert(open(path)):acquire(R1))
      for _, name in ipairs { "", "-wal", "-shm", "-hierlock" } do
        assert.equal(432, assert(uv.fs_stat(path .. name)).mode % 512, name)
      end
    end)

    for _, call in ipairs { "refresh", "check", "downgrade", "upgrade" } do
      it("that was restored from before an upgrade loses the lease for its holder, by " .. call, function()
        local path = fresh()
        local one, other = assert(open(path)), assert(open(path))
        local handle = assert(one:acquire(R1, { mode = "update", ttl = 60 }))
        local operator = stranger(path)
        operator:query(("VACUUM INTO '%s-backup'"):format(path))
        assert(handle:upgrade())
        if call == "upgrade" then assert(handle:downgrade()) end
        operator:query(("ATTACH '%s-backup' AS backup"):format(path))
        operator:query "BEGIN IMMEDIATE"
        for _, name in ipairs { "leases", "rows" } do
          operator:query("DELETE FROM hierlock_" .. name)
          operator:query(("INSERT INTO hierlock_%s SELECT * FROM backup.hierlock_%s"):format(name, name))
        end
        operator:query "COMMIT"
        assert_code("lost", handle[call](handle))
        assert.is_false(handle:is_held())
        assert(assert(other:acquire(R1, { mode = "shared", timeout = 0 })):release { confirm = true })
      end)
    end

    it("is one file, by whichever name, relative or linked", function()
      local path = fresh()
      local manager = assert(open(path))
      uv.fs_symlink(path, path .. ".link")
      local handle = assert(manager:acquire(R1))
      assert_code("timeout", assert(open(path .. ".link")):acquire(R1, { timeout = 0 }))
      local here = uv.cwd()
      uv.chdir(store.directory)
      local near, err = open(path:match "[^/]+$")
      uv.chdir(here)
      assert(near, err)
      assert_code("timeout", near:acquire(R1, { timeout = 0 }))
      assert(handle:release { confirm = true })
    end)

    -- SQLite, and we, give the files beside it its mode a moment after the umask has cut theirs.
    if uv.getuid() == 0 then
      it("may be used for the first time by two users of a group at once", function()
        local group, peers = 54321, {}
        local directory = store.directory .. "/group"
        sh("chmod 0711 %s %s/..; mkdir %s; chgrp %d %s; chmod 2770 %s", store.directory, store.directory, directory, group,
          directory, directory)
        for i = 1, 2 do
          peers[i] = support.process(nil, nil, nil, support.preloaded("modes", "umask 077"))
          peers[i]:call([[
            local path, group, user = ...
            hierlock.open("sqlite:" .. path):close() -- loads what this user may not read
            local uv = require "luv"
            uv.setgid(group)
            uv.setuid(user)
          ]], fresh(), group, group + i)
        end
        for n = 1, 8 do
          local path = directory .. "/" .. n
          sh(": >%s; chmod 0660 %s", path, path)
          for _, peer in ipairs(peers) do
            peer:start([[
              local manager, err = hierlock.open("sqlite:" .. ... .. "?synchronous=normal")
              if manager then manager:close() end
              return tostring(err)
            ]], path)
            uv.sleep(n)
          end
          for _, peer in ipairs(peers) do assert.equal("nil", peer:result()) end
        end
      end)
    else
      pending("several users can be looked at by root only")
    end

    it("may be used for the first time by many at once", function()
      local peers = {}
      for i = 1, 4 do peers[i] = support.process(nil) end
      for _ = 1, 20 do
        local path = fresh()
        for i, peer in ipairs(peers) do
          peer:start([[
            local path, i = ...
            local manager, err = hierlock.open("sqlite:" .. path .. "?synchronous=normal")
            if not manager then return tostring(err) end
            local handle, why = manager:acquire({ "u" .. i }, { timeout = 10 })
            if not handle then return tostring(why) end
            local done = handle:release { confirm = true }
            manager:close()
            return done
          ]], path, i)
        end
        for _, peer in ipairs(peers) do assert.is_true(peer:result()) end
      end
    end)

    it("is named by the DSN, which is understood or refused", function()
      for dsn, word in pairs {
        ["sqlite:"] = "names no file", ["sqlite:/tmp/"] = "names no file", ["sqlite:?synchronous=full"] = "names no file",
        ["sqlite://host/x"] = "without a host", ["sqlite:/tmp/x?mode=ro"] = "'mode'", ["sqlite:/tmp/x?synchronous=off"] = "synchronous",
        ["sqlite:/tmp/%zz"] = "file",
      } do
        local err = assert_code("dsn", hierlock.open(dsn))
        assert.truthy(err.message:find(word, 1, true), err.message)
      end
      local path = fresh()
      assert(assert(open(path:gsub("s(%d+)%.db$", "%%73%1.db"), nil, "?synchronous=FULL")):acquire(R1))
      assert(uv.fs_stat(path))
    end)

    it("is refused where it is none of ours, and is left as it was", function()
      local text, other, empty = fresh(), fresh(), fresh()
      write_file(text, ("no database at all\n"):rep(200))
      stranger(other):query "CREATE TABLE mine(x)"
      for _, path in ipairs { text, other } do
        local before = read_file(path)
        assert_code("store", open(path))
        assert.equal(before, read_file(path))
      end
      write_file(empty, "")
      assert(open(empty))
      assert_code("store", open "/nonexistent/x.db")
      assert_code("store", open(store.directory))
      local path = fresh()
      assert(open(path))
      stranger(path):query "PRAGMA user_version=99"
      assert.truthy(assert_code("store", open(path)).message:find "another version")
      path = fresh()
      assert(open(path)):close()
      local file = assert(io.open(path .. "-hierlock", "r+b"))
      file:write "\9"
      file:close()
      assert.matches("another version of hierlock: see Upgrading", assert_code("store", open(path)).message)
    end)

    it("that is damaged is told of, and nobody hangs in it", function()
      local damages = {
        { "INSERT INTO hierlock_waits SELECT key,1,1.5 FROM hierlock_rows",
          "INSERT INTO hierlock_waiters VALUES(1,x'',0,'','','','',0,0)" },
        { "UPDATE hierlock_leases SET till=0,till_unix=0",
          "CREATE TRIGGER one BEFORE DELETE ON hierlock_leases BEGIN SELECT RAISE(IGNORE); END",
          "CREATE TRIGGER two BEFORE DELETE ON hierlock_rows BEGIN SELECT RAISE(IGNORE); END" },
      }
      for _, damage in ipairs(damages) do
        local path = fresh()
        local victim, db = process(path), stranger(path)
        victim:call([[ handles.lease = assert(manager:acquire({ "u1" }, { ttl = 60 })) ]])
        for _, statement in ipairs(damage) do db:query(statement) end
        local code = victim:call([[ return select(2, manager:acquire({ "u1" }, { ttl = 60, timeout = 0 })).code ]])
        assert.equal("store", code)
      end
    end)

    it("is refused when it has two names, as the second would have another log", function()
      local path = fresh()
      assert(open(path)):close()
      assert(uv.fs_link(path, path .. ".second"))
      assert_code("unsafe_server", open(path))
      assert_code("unsafe_server", open(path .. ".second"))
    end)

    -- Mounts it as `docker -v /host/l.db:/l.db` does: each side would have its own -wal, -shm and -hierlock.
    it("is refused where it was mounted by its own name, and not where its directory was", function()
      local path = fresh()
      assert(open(path)):close()
      local here = path .. " mounted"
      sh("mkdir -p '%s' && touch '%s/one.db'", here, here)
      local function opened(name, what)
        return support.run(([[
          local manager, err = require("hierlock").open("sqlite:%s")
          print(manager and manager:acquire({ "u1" }) and "granted", err and err.code, err)
        ]]):format(name), ("unshare -m%s sh -c 'mount --bind \"$0\" \"$1\"; shift; exec \"$@\"' %s"):format(
          uv.getuid() == 0 and "" or "r", what))
      end
      local output = opened(here .. "/one.db", ("%s '%s/one.db'"):format(path, here))
      assert.matches("^nil%s+unsafe_server%s.*mount its directory", output)
      local directory = path .. ".d"
      sh("mkdir %s", directory)
      assert.matches("^granted", opened(here .. "/two.db", ("%s '%s'"):format(directory, here)))
      assert(uv.fs_stat(directory .. "/two.db"))
    end)

    it("is refused when it, its directory, or a file beside it cannot be written", function()
      local path = fresh()
      assert(open(path)):close()
      sh("rm -f %s-wal %s-shm", path, path)
      local before = ""
      -- For root a mode means something without these.
      if uv.getuid() == 0 then before = "setpriv --bounding-set=-dac_override,-dac_read_search" end
      sh("mkdir %s.d; mv %s %s.d/x.db", path, path, path)
      for mode, hint in pairs {
        ["chmod 444 %s.d/x.db"] = "read%-only",
        ["chmod 600 %s.d/x.db; chmod 555 %s.d"] = "read%-only",
        ["chmod 600 %s.d/x.db; touch %s.d/x.db-wal; chmod 0 %s.d/x.db-wal"] = "chmod g%+s",
      } do
        sh("chmod 755 %s.d; rm -f %s.d/x.db-*; " .. mode, path, path, path, path, path)
        local output = support.run(([[
          local manager, err = require("hierlock").open("sqlite:%s.d/x.db")
          print(manager, err and err.code, err)
        ]]):format(path), before)
        assert.matches("^nil%s+store%s", output)
        assert.matches(hint, output)
      end
      sh("chmod 755 %s.d", path)
    end)

    if uv.getuid() == 0 then
      it("is its owner's, with all that is beside it, though root opens it first", function()
        local path = fresh()
        sh("install -m 0640 -o 54321 -g 54322 /dev/null %s", path)
        assert(assert(open(path)):acquire(R1))
        for _, name in ipairs { "", "-wal", "-shm", "-hierlock" } do
          local stat = assert(uv.fs_stat(path .. name))
          assert.same({ name, 54321, 54322, 416 }, { name, stat.uid, stat.gid, stat.mode % 512 })
        end
      end)
    else
      pending("files of other users can be made by root only")
    end

    it("records the levels, and those who want others are refused", function()
      local path = fresh()
      assert(open(path, { levels = { "house", "room" } })):close()
      local manager = assert(open(path))
      assert.equal("h", assert(manager:acquire { house = "h", room = "r" }).targets[1].house)
      assert_code("mismatch", open(path, { levels = { "house", "flat" } }))
      assert(open(path, { levels = { "house", "room" }, buckets = 17 }))
    end)

    it("that is taken away is made anew, and who held something in it hears that it is lost", function()
      for _, how in ipairs { "rm -f %s*", "mv %s %s.old; rm -f %s-*" } do
        local path = fresh()
        local manager, other = assert(open(path)), assert(open(path))
        local handle = assert(manager:acquire(R1, { ttl = 60 }))
        local waiter = process(path)
        waiter:acquire("lock", "acquire", R1)
        wait_for_waiters(other, R1, 1)
        sh(how, path, path, path)
        assert_code("lost", handle:check())
        assert_code("lost", handle:release { confirm = true })
        local granted, code, message = waiter:result() -- as soon as it looks
        assert.is_true(granted, tostring(code) .. tostring(message))
        assert_code("timeout", other:acquire(A1, { timeout = 0 }))
        assert.is_true(waiter:release "lock")
        assert(other:acquire(A1, { timeout = 0 }))
      end
    end)

    it("that is replaced while somebody waits to write to it grants him nothing", function()
      local path = fresh()
      local manager = assert(open(path))
      assert(assert(manager:acquire(R1)):release { confirm = true })
      local writer, late, new = stranger(path), process(path), process(path)
      writer:query "BEGIN IMMEDIATE"
      late:acquire("lock", "acquire", R1, { ttl = 60 })
      assert.is_true(late:stays_blocked())
      sh("mv %s %s.old; rm -f %s-*", path, path, path)
      assert.is_true(new:call("handles.lock = assert(manager:acquire(..., { ttl = 60 })) return true", R1))
      writer:query "ROLLBACK"
      assert.is_true(late:stays_blocked())
      assert.is_true(new:release "lock")
      assert.is_true(late:result())
    end)

    it("beside it, that is taken away, is made anew: order may suffer, exclusion does not", function()
      local path = fresh()
      local manager, other = assert(open(path)), assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local old = process(path)
      old:acquire("lock", "acquire", R1)
      wait_for_waiters(other, R1, 1)
      sh("rm %s-hierlock", path)
      local new = process(path)
      new:acquire("lock", "acquire", R1)
      assert.is_true(new:stays_blocked())
      assert(handle:release { confirm = true })
      local function one_of_them()
        return old:stays_blocked() ~= new:stays_blocked()
      end
      support.wait_until(one_of_them)
      for _ = 1, 3 do assert.is_true(one_of_them()) end
      local first, second = old, new
      if old:stays_blocked() then first, second = new, old end
      assert.is_true(first:result())
      assert.is_true(first:release "lock")
      assert.is_true(second:result())
    end)

    it("numbers its grants by the clock, in microseconds", function()
      local manager = assert(open(fresh()))
      local before = os.time()
      local token = assert(manager:acquire(R1, { ttl = 60 })).token
      local second = tonumber(token:sub(1, 14), 16) / 1e6
      assert.is_true(before <= second and second <= os.time() + 1, token)
    end)

    it("beside it, that was taken away, is left before a wait, which keeps its place in the new one", function()
      local path = fresh()
      local first = process(path)
      assert.is_true(first:call("return assert(manager:acquire(...)):release { confirm = true }", R1))
      sh("rm %s-hierlock", path)
      local manager = assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      first:acquire("lock", "acquire", R1)
      wait_for_waiters(manager, R1, 1)
      local second = process(path)
      second:acquire("lock", "acquire", R1)
      wait_for_waiters(manager, R1, 2)
      assert(handle:release { confirm = true })
      assert.is_true(second:stays_blocked())
      assert.is_true(first:result())
      assert.is_true(first:release "lock")
      assert.is_true(second:result())
    end)
  end)

  describe("a wait", function()
    -- Holds SQLite's write lock, as a program does that writes for long, or is stopped in the middle.
    local function writes(path)
      local peer = stranger(path)
      peer:query "BEGIN IMMEDIATE"
      return peer
    end

    if coroutine.close then
      it("of an import that is given up changes nothing when its turn comes", function()
        local path = fresh()
        local manager = assert(open(path, { application = "the exporter" }))
        local yielding = assert(open(path, {
          application = "the importer",
          loop = function(pending) repeat coroutine.yield() until pending:done() end,
        }))
        local text = assert(assert(manager:acquire(R1, { ttl = 60 })):export())
        local inode = ":" .. uv.fs_stat(path .. "-hierlock").ino .. " "
        local function locks()
          local n = 0
          for line in io.lines "/proc/locks" do if line:find(inode, 1, true) then n = n + 1 end end
          return n
        end
        local writer, before = writes(path), locks()
        local thread = coroutine.create(function() yielding:import(text) end)
        assert(coroutine.resume(thread))
        support.wait_until(function() return locks() > before end, "the import, which stands in line")
        assert(coroutine.close(thread))
        writer:query "ROLLBACK"
        support.wait_until(function() return locks() == before end)
        assert.equal("the exporter", manager:leases()[1].application)
        assert(assert(manager:import(text)):release { confirm = true })
      end)
    end

    it("ends in time, to the millisecond, for a lease and for one who writes", function()
      local path = fresh()
      local manager, other = assert(open(path)), assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 600 }))
      local function in_vain(seconds)
        local start = support.now()
        assert_code("timeout", other:acquire(R1, { timeout = seconds }))
        return support.now() - start
      end
      support.ends_in_time(store, 0.123, 0.02, in_vain)
      assert(handle:release { confirm = true })
      local writer = writes(path)
      support.ends_in_time(store, 0.123, 0.02, in_vain)
      writer:query "ROLLBACK"
      assert(other:acquire(R1, { timeout = 0 }))
    end)

    it("can be cancelled, for a lease and for one who writes", function()
      local path = fresh()
      local manager, other = assert(open(path)), assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 600 }))
      local writer
      for _ = 1, 2 do
        local pending = assert(other:start(R1, { timeout = math.huge }))
        support.sleep(0.1)
        local start = support.now()
        assert(pending:cancel())
        assert_code("cancelled", pending:wait(5))
        assert.is_true(support.now() - start < PROMPT)
        if not writer then
          wait_for_waiters(other, R1, 0)
          assert(handle:release { confirm = true })
          writer = writes(path)
        end
      end
      writer:query "ROLLBACK"
      assert(other:acquire(R1, { timeout = 0 }))
    end)

    it("goes on when the one who writes has done", function()
      local path = fresh()
      local manager = assert(open(path))
      local writer = writes(path)
      local peer = process(path)
      peer:acquire("lock", "acquire", R1)
      assert.is_true(peer:stays_blocked())
      local start = support.now()
      writer:query "COMMIT"
      assert.is_true(peer:result())
      assert.is_true(support.now() - start < PROMPT)
      assert.equal(1, #manager:leases())
    end)

    for _, params in ipairs { "?synchronous=normal", "?synchronous=full" } do
      it("of several processes ends in the order in which they came, whatever they want, with " .. params, function()
        local path = fresh()
        local manager = assert(open(path, nil, params))
        local wants = { { R1 }, { A1 }, { R1, { mode = "shared" } }, { U1 }, { R2 }, { A1 } }
        local handle = assert(manager:acquire(U1, { ttl = 60 }))
        local peers = {}
        for i, want in ipairs(wants) do
          peers[i] = process(path, nil, params)
          peers[i]:acquire("lock", "acquire", want[1], want[2])
          wait_for_waiters(manager, U1, i)
        end
        assert(handle:release { confirm = true })
        local tokens = {}
        for i, peer in ipairs(peers) do
          local ok, token = peer:result()
          assert.is_true(ok)
          tokens[i] = token
          assert.is_true(peer:release "lock")
        end
        for i = 2, #tokens do assert.is_true(tokens[i] > tokens[i - 1], i) end
      end)
    end

    it("says that there are too many open files, where SQLite cannot open one more", function()
      local output = support.run(([[
        local hierlock = require "hierlock"
        local function open() return hierlock.open("sqlite:%s", { levels = { "user" }, buckets = 100 }) end
        assert(open()):close() -- what is loaded needs files, too
        local files = {}
        for file in function() return io.open "/dev/null" end do files[#files + 1] = file end
        for _ = 1, 20 do
          local manager, err = open()
          if manager then break end
          print(err.message)
          if #files > 0 then table.remove(files):close() end
        end]]):format(fresh()), "ulimit -n 100;")
      assert.matches("cannot open .-: there are too many open files", output)
      -- A program that could not read it would write leases that end by the wall clock for all others.
      assert.matches("cannot read the id of this boot in /proc: ", output)
    end)

    it("waits for the disk with each grant, unless the DSN says that it need not", function()
      local script = [[
        local manager = assert(require("hierlock").open(arg[1], { levels = { "user", "account", "resource" }, buckets = 1000 }))
        for i = 1, 20 do assert(assert(manager:acquire({ "u" .. i }, { ttl = 60 })):release { confirm = true }) end
        manager:close()]]
      local shim = support.library "syncs"
      local counted = {}
      for _, params in ipairs { "", "?synchronous=full", "?synchronous=normal" } do
        local name = os.tmpname()
        local file = assert(io.open(name, "w"))
        assert(file:write(script))
        file:close()
        local pipe = assert(io.popen(("LD_PRELOAD=\"${LD_PRELOAD:+$LD_PRELOAD:}%s\" %s %s 'sqlite:%s%s' 2>&1"):format(
          shim, os.getenv "HIERLOCK_LUA" or "lua", name, fresh(), params)))
        local said = pipe:read "*a"
        pipe:close()
        os.remove(name)
        counted[params] = assert(tonumber(said:match "syncs: (%d+)"), said)
      end
      assert.is_true(counted[""] >= 20, counted[""])
      assert.is_true(counted["?synchronous=full"] >= 20, counted["?synchronous=full"])
      assert.is_true(counted["?synchronous=normal"] < 20, counted["?synchronous=normal"])
    end)

    it("of one that is killed is over at once, and who waited behind it goes on", function()
      local path = fresh()
      local manager = assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60, mode = "shared" }))
      local writer, reader = process(path), process(path)
      writer:acquire("lock", "acquire", A1)
      wait_for_waiters(manager, U1, 1)
      reader:acquire("lock", "acquire", R2)
      wait_for_waiters(manager, U1, 2)
      assert_code("timeout", manager:acquire(R2, { timeout = 0 })) -- nor does anybody go before it
      assert.is_true(reader:stays_blocked())
      local start = support.now()
      writer:signal "sigkill"
      assert.is_true(reader:result())
      assert.is_true(support.now() - start < PROMPT)
      assert.equal(0, waiters(manager, U1))
      assert(handle:release { confirm = true })
    end)

    it("of one that is stopped keeps its place for 3 s; then it is passed, and goes on in a new one", function()
      local path = fresh()
      local manager = assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local peer = process(path)
      peer:acquire("lock", "acquire", R1)
      wait_for_waiters(manager, R1, 1)
      peer:signal "sigstop"
      local start = support.now()
      assert(handle:release { confirm = true })
      local err = assert_code("timeout", manager:acquire(R1, { timeout = 0.3 }))
      assert.matches("is waited for by", err.message)
      assert.not_matches(" more", err.message)
      local other = assert(manager:acquire(A1, { timeout = 10 }))
      assert.is_true(support.now() - start > 2.5, support.now() - start)
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      peer:signal "sigcont"
      assert.is_true(peer:stays_blocked())
      wait_for_waiters(manager, R1, 1)
      assert(other:release { confirm = true })
      assert.is_true(peer:result())
    end)

    it("of one that writes goes on, and of all behind it, when the first in line has been stopped for 3 s", function()
      local path = fresh()
      local manager = assert(open(path))
      local writer, stopped, other = writes(path), process(path), process(path)
      stopped:start("return manager:acquire(..., { timeout = 30 }) ~= nil", R1)
      assert.is_true(stopped:stays_blocked())
      stopped:signal "sigstop"
      other:start("return manager:acquire(..., { timeout = 10 }) ~= nil", R2)
      writer:query "ROLLBACK"
      assert.is_true(other:result())
      local start = support.now()
      for _ = 1, 3 do assert(assert(manager:acquire { "u2" }):release { confirm = true }) end
      assert.is_true(support.now() - start < PROMPT, support.now() - start)
      stopped:signal "sigcont"
      assert.is_true(stopped:result())
    end)

    -- The waiter's futex is in the side file: see side.c.
    it("that ends in vain wakes those who waited for it alone", function()
      local path = fresh()
      local manager = assert(open(path))
      local function rung()
        local futexes, n = read_file(path .. "-hierlock"):sub(33, 32 + 8000), 0
        for i = 1, #futexes, 8 do
          local a, b, c, d = futexes:byte(i, i + 3)
          n = n + a + 256 * (b + 256 * (c + 256 * d))
        end
        return n
      end
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local first, second = process(path), process(path)
      first:start("return select(2, manager:acquire(..., { timeout = 1.5 })).code", A1)
      wait_for_waiters(manager, U1, 1)
      second:acquire("lock", "acquire", R2)
      wait_for_waiters(manager, U1, 2)
      local before = rung()
      assert.equal("timeout", first:result())
      assert.is_true(second:result())
      assert.is_true(rung() > before)
      assert(handle:release { confirm = true })
    end)

    -- A session that is stopped in the line of writers keeps its place there: no other session comes to write.
    it("ends in time though what was in its way is over, and one that is stopped is before it", function()
      local path = fresh()
      local manager = assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60, auto_refresh = false, auto_release = false }))
      local waiting, stopped = process(path), process(path)
      waiting:start("return select(2, manager:acquire(..., { timeout = 2.8 })).code", R1)
      wait_for_waiters(manager, R1, 1)
      assert(handle:refresh(1))
      local start = support.now()
      local writer = writes(path)
      stopped:start("return manager:acquire(..., { timeout = 20 }) ~= nil", R2)
      support.sleep(0.2)
      stopped:signal "sigstop"
      writer:query "ROLLBACK"
      assert.equal("timeout", waiting:result())
      assert.is_true(support.now() - start < 2.8 + 1, support.now() - start)
      stopped:signal "sigcont"
      assert.is_true(stopped:result())
    end)

    -- The waiter would look by itself in 250 ms.
    it("hears of a release at once, and that a lease will end sooner than it was to", function()
      local path = fresh()
      local manager = assert(open(path))
      local peer = process(path)
      local fastest = { release = math.huge, refresh = math.huge }
      for _, how in ipairs { "release", "refresh" } do
        for _ = 1, 8 do
          local handle = assert(manager:acquire(R1, { ttl = 60 }))
          peer:acquire("lock", "acquire", R1)
          wait_for_waiters(manager, R1, 1)
          local start = support.now()
          if how == "release" then
            assert(handle:release { confirm = true })
          else
            local ok, err = handle:refresh(0.01) -- shorter than a busy machine takes to answer
            assert.is_true(ok or err.code == "lost", tostring(err))
          end
          assert.is_true(peer:result())
          fastest[how] = math.min(fastest[how], support.now() - start)
          assert.is_true(peer:release "lock")
        end
      end
      assert.is_true(fastest.release < 0.1, fastest.release)
      assert.is_true(fastest.refresh < 0.11, fastest.refresh)
    end)

    it("hears that a lease will end sooner than it was to, and waits for that end", function()
      local path = fresh()
      local manager = assert(open(path))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local peer = process(path)
      peer:acquire("lock", "acquire", R1)
      wait_for_waiters(manager, R1, 1)
      local start = support.now()
      assert(handle:refresh(0.2))
      assert.is_true(peer:result())
      local took = support.now() - start
      assert.is_true(took >= 0.199 and took < 0.2 + PROMPT, took)
    end)
  end)

  describe("a lease", function()
    it("survives a reboot, and ends by the wall clock then", function()
      local path = fresh()
      local manager, db = assert(open(path)), stranger(path)
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      local text = assert(handle:export())
      local function reboot(left)
        db:query(("UPDATE hierlock_leases SET boot=randomblob(16),till=0,till_unix=%.0f"):format((os.time() + left) * 1000))
      end
      reboot(30)
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      local left = manager:leases()[1].remaining
      assert.is_true(left > 25 and left <= 30, left)
      handle = assert(manager:import(text)) -- and is of this boot from then on
      assert.is_true(manager:leases()[1].remaining > 50)
      assert(handle:export())
      reboot(-1)
      assert.equal(0, #manager:leases())
      local token = assert(manager:acquire(R1, { timeout = 0, ttl = 1 })).token
      assert.is_true(token > handle.token)
      assert_code("lost", manager:import(text))
    end)

    it("does not hang on the wall clock, which may be set while it is held", function()
      local path = fresh()
      local manager = assert(open(path))
      support.keep(assert(manager:acquire(R1, { ttl = 60 })))
      stranger(path):query "UPDATE hierlock_leases SET till_unix=0"
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
    end)

    it("whose time is up stays for an hour, whatever the wall clock says", function()
      local path = fresh()
      local manager, db = assert(open(path)), stranger(path)
      local handle = assert(manager:acquire(R1, { ttl = 0.01 }))
      support.sleep(0.03)
      -- A manager takes away what is over when it looks for the first time.
      db:query(("UPDATE hierlock_leases SET till_unix=%.0f"):format((os.time() - 7200) * 1000))
      assert.same({}, assert(open(path)):leases())
      assert(handle:refresh(0.01))
      db:query "UPDATE hierlock_leases SET till=till-7200000"
      assert.same({}, assert(open(path)):leases())
      assert_code("lost", handle:refresh())
    end)

    it("leaves nothing in the file when it has ended, or nobody remembers it", function()
      local path = fresh()
      local manager, db = assert(open(path)), stranger(path)
      for i = 1, 20 do assert(assert(manager:acquire { "u" .. i }):release { confirm = true }) end
      support.keep(assert(manager:acquire(R1, { ttl = 0.01 })))
      support.sleep(0.03)
      assert(assert(manager:acquire(A1, { timeout = 0 })):release { confirm = true })
      for _, name in ipairs { "rows", "waits", "waiters" } do
        assert.equal(0, tonumber(db:query("SELECT count(*) FROM hierlock_" .. name)), name)
      end
      assert.equal("ok", db:query "PRAGMA integrity_check")
    end)

    -- Each connection has a cache of its own, which is void once another one has written.
    it("is taken and given back on one connection, where there are several idle", function()
      local CYCLES, path = 200, fresh()
      local manager, other = assert(open(path)), assert(open(path))
      local held = assert(other:acquire_all { U1, { "u2" } })
      local pending = { assert(manager:start(U1)), assert(manager:start { "u2" }) } -- a connection each
      support.wait_until(function() return manager:stats().connections > 1 end, "both wait")
      assert(held:release { confirm = true })
      for _, one in ipairs(pending) do assert(assert(one:wait(5)):release { confirm = true }) end
      local function cycles()
        for _ = 1, CYCLES do assert(assert(manager:acquire(R2)):release { confirm = true }) end
      end
      local function reads() return tonumber(read_file("/proc/self/io"):match "syscr: (%d+)") end
      cycles()
      local before = reads()
      cycles()
      assert.is_true(reads() - before < 3 * CYCLES, reads() - before)
    end)

    it("is whole or not there when its process is killed, and the file is sound", function()
      local path = fresh()
      local manager, db = assert(open(path)), stranger(path)
      for _ = 1, 25 do
        local peer = process(path)
        peer:start [[
          while true do
            local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { ttl = 0.05, timeout = 10 }))
            handle:refresh(0.06)
            handle:release { confirm = true }
          end
        ]]
        support.sleep(0.01 + math.random() * 0.02)
        peer:signal "sigkill"
      end
      local handle = assert(manager:acquire(U1, { timeout = 2 }))
      assert.is_true(handle:check())
      assert.equal("ok", db:query "PRAGMA integrity_check")
      assert.equal(1, tonumber(db:query "SELECT count(*) FROM hierlock_leases"))
      assert.equal(1, tonumber(db:query "SELECT count(*) FROM hierlock_rows"))
    end)

    it("is refused where there is no space for it; what is held is renewed and given back all the same", function()
      local path = fresh()
      local output = support.run(([[
        local hierlock = require "hierlock"
        local manager = assert(hierlock.open("sqlite:%s?synchronous=normal"))
        local handles, err = {}
        for i = 1, 5000 do
          local handle
          handle, err = manager:acquire({ "u", "a", "r" .. i }, { ttl = 600, timeout = 0 })
          if not handle then break end
          handles[i] = handle
        end
        assert(err and err.code == "store" and err.message:find "space" and #handles > 100, tostring(err))
        assert(#manager:leases() == #handles)
        for _, handle in ipairs(handles) do assert(handle:refresh(500)) end
        for _, handle in ipairs(handles) do assert(handle:release { confirm = true }) end
        assert(#manager:leases() == 0)
        assert(assert(manager:acquire { "u" }):release { confirm = true })
        print "fine"
      ]]):format(path), "trap \"\" XFSZ; ulimit -f 1200;")
      assert.equal("fine\n", output)
      assert.equal("ok", stranger(path):query "PRAGMA integrity_check")
    end)
  end)

  describe("a fork", function()
    it("leaves the parent's leases and the database alone, whatever parent and child do then", function()
      local path = fresh()
      local manager = assert(open(path))
      local peer = process(path)
      local status = peer:call([[
        local fork, uv, path = require "hierlock_spec.fork", require "luv", ...
        -- Descriptors of the database and of what belongs to it.
        local function descriptors()
          local n = 0
          for fd = 0, 255 do
            local name = uv.fs_readlink("/proc/self/fd/" .. fd)
            if name and name:find(path, 1, true) then n = n + 1 end
          end
          return n
        end
        handles.lock = assert(manager:acquire({ "u1", "a1", "r1" }, { ttl = 60 }))
        local waits = assert(manager:start({ "u1", "a1" }, { timeout = 30 })) -- a thread that waits
        support.sleep(0.1)
        local failed = 0
        assert(descriptors() > 0)
        for i = 1, 6 do
          local pid = fork.fork()
          if pid == 0 then
            local ok, err = pcall(function()
              assert(descriptors() == 0, "SQLite was carried over the fork")
              assert(not manager:acquire({ "u1", "a1", "r1" }, { timeout = 0 }))
              for _ = 1, 20 do
                local handle = assert(manager:acquire({ "u2", "a" .. i }, { ttl = 60, timeout = 10 }))
                assert(handle:release { confirm = true })
              end
              assert(#manager:leases { target = { "u1" } } == 1)
              manager:close()
            end)
            if not ok then io.stderr:write("in the child: ", tostring(err), "\n") end
            fork.exit(ok and 0 or 1)
          end
          for _ = 1, 20 do
            local handle = assert(manager:acquire({ "u2", "a" .. i }, { ttl = 60, timeout = 10 }))
            assert(handle:release { confirm = true })
          end
          failed = failed + (fork.wait(pid) == 0 and 0 or 1)
        end
        assert(handles.lock:check())
        assert(handles.lock:release { confirm = true })
        handles.waited = assert(waits:wait(10))
        return failed
      ]], path)
      assert.equal(0, status)
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      assert.equal("ok", stranger(path):query "PRAGMA integrity_check")
    end)
  end)
end)
