-- The embedded store, file:, as processes see it: which directory, who is refused,
-- what becomes of waiters when others are killed, stopped or unfair, and how many
-- descriptors it needs. The store by itself is in spec/core/test_embedded_store.c.

local hierlock = require "hierlock"
local support = require "spec.support"
local uv = require "luv"

local embedded = support.stores[1]
local root = uv.getuid() == 0

local function sh(command, ...)
  local status = os.execute(command:format(...))
  assert(status == true or status == 0, command)
end

local counter = 0
-- A name in the specs' directory that nothing has yet.
local function fresh()
  counter = counter + 1
  return embedded.directory .. "/e" .. counter
end

local managers = {}
local function open(directory, options)
  local manager, err = hierlock.open(directory and "file:" .. directory or embedded.dsn, options or embedded.options)
  managers[#managers + 1] = manager
  return manager, err
end
local function close_all()
  while #managers > 0 do table.remove(managers):close() end
  support.close_peers()
end

local function excludes(a, b)
  local handle = assert(a:acquire { "x" })
  local other = b:acquire({ "x" }, { timeout = 0 })
  handle:release()
  return other == nil
end

describe("the directory", function()
  after_each(close_all)

  it("is made, for its user alone", function()
    local directory = fresh()
    assert(open(directory))
    local stat = uv.fs_stat(directory)
    assert.equal("directory", stat.type)
    assert.equal(448, stat.mode % 512) -- 0700
    assert.equal(uv.getuid(), stat.uid)
  end)

  it("may be used for the first time by many at once", function()
    local peers = {}
    for i = 1, 4 do peers[i] = support.process(nil) end
    for _ = 1, 60 do
      local directory = fresh()
      for _, peer in ipairs(peers) do
        peer:start([[
          local manager = assert(hierlock.open(...))
          for i = 1, 30 do
            local handle, err = manager:acquire({ "u" .. i })
            if not handle then return tostring(err) end
            handle:release()
          end
          manager:close()
          return true
        ]], "file:" .. directory)
      end
      for _, peer in ipairs(peers) do assert.is_true(peer:result()) end
      sh("rm -r %s", directory)
    end
  end)

  it("is one and the same by every name", function()
    local directory = fresh()
    local manager = assert(open(directory))
    sh("ln -s %s %s-link", directory, directory)
    for _, name in ipairs { "//" .. directory, directory .. "/", directory .. "//", directory .. "/../" .. directory:match("[^/]+$"), directory .. "-link" } do
      assert.is_true(excludes(manager, assert(open(name))), name)
    end
    assert.is_false(excludes(manager, assert(open(fresh()))))
  end)

  it("may be relative, and stays where it was when the program goes elsewhere", function()
    local directory = fresh()
    local manager = assert(open(directory .. "-x", {}))
    local handle = assert(manager:acquire { "r" })
    local output, status = support.run(([[
      local hierlock = require "hierlock"
      local manager = assert(hierlock.open("file:%s-x"))
      require("luv").chdir("/")
      print(select(2, manager:acquire({ "r" }, { timeout = 0 })).code)
    ]]):format(directory:match("[^/]+$")), "cd " .. embedded.directory .. ";")
    assert.equal("timeout\n", output)
    assert.equal(0, status)
    handle:release()
  end)

  it("may be relative, and is made again where it was when it was removed and the program has gone elsewhere", function()
    local directory = fresh()
    local output, status = support.run(([[
      local manager = assert(require("hierlock").open("file:%s"))
      os.execute("rm -r %s")
      require("luv").chdir("/")
      assert(manager:acquire { "r" }):release()
    ]]):format(directory:match("[^/]+$"), directory), "cd " .. embedded.directory .. ";")
    assert.equal("", output)
    assert.equal(0, status)
    assert(io.open(directory .. "/control", "rb")):close()
  end)

  local function refused(title, prepare, code, word)
    it("is refused when it " .. title, function()
      local directory = fresh()
      directory = prepare(directory) or directory
      local manager, err = open(directory)
      assert.is_nil(manager)
      assert.equal(code, err.code)
      assert.matches(word, err.message)
    end)
  end
  refused("has no parent", function(d) return d .. "/x" end, "store", "parent")
  refused("is a file", function(d) sh("touch %s", d) end, "store", "[Nn]ot a directory")
  refused("is in a file", function(d) sh("touch %s", d) return d .. "/x" end, "store", "lock directory")
  refused("is a link to nowhere", function(d) sh("ln -s /nonexistent/x %s", d) end, "store", "lock directory")
  refused("is used for something else", function(d) sh("mkdir %s && echo mine > %s/control", d, d) end, "store", "not hierlock's")
  refused("has a directory for a control file", function(d) sh("mkdir -p %s/control", d) end, "store", "control")
  it("is refused when another version of hierlock made it, and nothing advises to remove it in use", function()
    for _, version in ipairs { "\2", "\9" } do
      for _, size in ipairs { "+0", "12345", "+4096" } do
        local directory = fresh()
        sh("%s -e 'require(\"hierlock\").open(\"file:%s\")'", os.getenv "HIERLOCK_LUA" or "lua", directory)
        local file = assert(io.open(directory .. "/control", "r+b"))
        file:seek("set", 8) -- as in format.h, and in the formats before it
        file:write(version)
        file:close()
        sh("truncate -s %s %s/control", size, directory)
        local manager, err = open(directory)
        assert.is_nil(manager)
        assert.equal("store", err.code)
        assert.matches(("made by another version of hierlock %%(format %d, and this one knows 3 and 4%%): see Upgrading in docs/operations.md")
          :format(version:byte()), err.message)
        assert.not_matches("remove", err.message)
      end
    end
  end)

  it("is refused where its control file alone was mounted from elsewhere", function()
    local directory, here = fresh(), fresh()
    assert(open(directory)):close()
    local output = support.run(([[
      local manager, err = require("hierlock").open("file:%s")
      print(manager, err and err.code, err)
    ]]):format(here), ([[mkdir %s; touch %s/control; unshare -m%s sh -c 'mount --bind "$0" "$1"; shift; exec "$@"' %s/control %s/control]])
      :format(here, here, root and "" or "r", directory, here))
    assert.matches("^nil%s+unsafe_server%s.*mount the directory", output)
  end)
  if root then
    refused("is a link that somebody else has planted",
      function(d) sh("mkdir %s-x && ln -s %s-x %s && chown -h 54321 %s", d, d, d, d) end, "store", "symbolic link")
  end

  for title, options in pairs { ["buckets 9999"] = { buckets = 9999 }, ["levels a,b"] = { buckets = 10000, levels = { "a", "b" } } } do
    it("is refused for " .. title .. " when it was made for others, also when nobody uses it, and both are named", function()
      local directory = fresh()
      assert(open(directory, { buckets = 10000 })):close()
      local manager, err = open(directory, options)
      assert.is_nil(manager)
      assert.equal("mismatch", err.code)
      assert.matches("10000 buckets for each of the levels user,account,resource; this program wants ", err.message)
      assert.matches("leave out `buckets` and `levels`.* or give this program a directory of its own", err.message)
      assert.matches(title:match("%S+$"), err.message, 1, true)
      assert(open(directory, { buckets = 10000 }))
    end)
  end

  it("decides the buckets and levels that the program leaves open", function()
    local directory = fresh()
    local maker = assert(open(directory, { buckets = 1000, levels = { "tenant", "folder" } }))
    local handle = assert(maker:acquire { "t1", "f1" })
    for _, options in ipairs { {}, { buckets = 1000 }, { levels = { "tenant", "folder" } } } do
      local manager = assert(open(directory, options))
      assert.equal("timeout", select(2, manager:acquire({ tenant = "t1" }, { timeout = 0 })).code)
      assert(manager:acquire { tenant = "t1", folder = "f2" }):release()
      assert.is_false(pcall(manager.acquire, manager, { user = "u1" }))
    end
    handle:release()
    -- Where nothing is recorded, the defaults.
    assert.equal(2, assert(assert(open(fresh(), {})):acquire { user = "u", account = "a", resource = "r" }).level)
    assert.equal(2, assert(assert(hierlock.open("null:")):acquire { user = "u", account = "a", resource = "r" }).level)
  end)

  -- The default one depends on nothing but the user, so there are users for it.
  local uid = ("%d"):format(1000000 + uv.os_getpid())
  local default = "/dev/shm/hierlock-" .. uid
  -- The modules, where that user may read them: this directory may be in root's home.
  local library = default .. "-library"
  local function where(name, path) -- package.searchpath, which Lua 5.1 has not
    for template in path:gmatch("[^;]+") do
      local file = template:gsub("%?", (name:gsub("%.", "/")))
      if uv.fs_stat(file) then return file end
    end
  end
  local function as_user(before, dsn)
    sh("rm -rf %s %s; %s", default, library, before)
    sh("mkdir %s; cp -r %s %s/hierlock; cp %s %s/hierlock; chmod -R a+rX %s", library,
      where("hierlock", package.path):match("^(.*)/"), library, where("hierlock.core", package.cpath), library, library)
    finally(function() sh("rm -rf %s %s %s-group", default, library, default) end)
    return support.run([[
      local manager, err = require("hierlock").open(os.getenv "DSN")
      if manager then assert(manager:acquire { "u" }) end
      print(err or "open")
    ]], ("umask 0; export DSN=" .. (dsn or "file:") .. "; unset HIERLOCK_DSN; setpriv --reuid=%s --regid=%s --clear-groups env -u HOME " ..
         "LUA_PATH='%s/?.lua;%s/?/init.lua' LUA_CPATH='%s/?.so'"):format(uid, uid, library, library, library))
  end
  if root then
    it("by default is that of the user in /dev/shm, for him alone, whatever the umask", function()
      assert.equal("open\n", as_user("true"))
      local stat = uv.fs_lstat(default)
      assert.same({ "directory", 448, uid }, { stat.type, stat.mode % 512, ("%d"):format(stat.uid) })
      assert.equal("open\n", as_user("true"))
    end)
    it("of another group says whose it is, and how users share one", function()
      local directory = default .. "-group"
      assert.equal(("store: the lock directory %s is closed to user %s: it belongs to user 0 and group 54321, with mode 2770; " ..
                    "several users share one with their group and mode 2770\n"):format(directory, uid),
        as_user(("mkdir %s; chgrp 54321 %s; chmod 2770 %s"):format(directory, directory, directory), "file:" .. directory))
    end)
    for title, case in pairs {
      ["a symbolic link"] = { "mkdir %s-x; chown %d %s-x; ln -s %s-x %s; chown -h %d %s", "symbolic link" },
      ["a file"] = { "touch %s; chown %d %s", "not a directory" },
      ["somebody else's"] = { "mkdir -m 0777 %s", "belongs to user 0" },
      ["open to its group"] = { "mkdir -m 0770 %s; chown %d %s", "others may write" },
      ["open to everybody"] = { "mkdir -m 0777 %s; chown %d %s", "others may write" },
    } do
      it("by default is refused when it is " .. title, function()
        local output = as_user((case[1]:gsub("%%s", default):gsub("%%d", uid)))
        os.execute("rm -rf " .. default .. "-x")
        assert.matches("^store: ", output)
        assert.matches(case[2], output)
      end)
    end
  else
    pending("that of other users can be looked at by root only")
  end

  it("that is removed takes the locks with it, which their holders notice", function()
    local directory = fresh()
    local manager = assert(open(directory, { buckets = 10000, timeout = 5, on_lost = function() end }))
    local held, checked = assert(manager:acquire { "x" }), assert(manager:acquire { "y" })
    sh("rm -rf %s", directory)
    assert.is_false(held:is_held())
    assert.equal(0, held:remaining())
    local lost = select(2, checked:check())
    assert.equal("lost", lost.code)
    assert.equal("lost", select(2, held:release()).code)
    assert.matches("lost%)$", tostring(held))
    -- A new one takes its place for those who come now.
    local again = assert(manager:acquire { "x" })
    assert.is_true(again:is_held())
    assert.equal("timeout", select(2, assert(open(directory, { buckets = 10000 })):acquire({ "x" }, { timeout = 0 })).code)
  end)
end)

describe("a directory that is renamed", function()
  after_each(close_all)

  it("is lost to those who use it, and a new one takes its place for all", function()
    local directory = fresh()
    local manager, peer = assert(open(directory, {})), support.process(nil)
    local held, checked = assert(manager:acquire { "x" }), assert(manager:acquire { "y" })
    sh("mv %s %s-moved", directory, directory)
    assert.is_false(held:is_held())
    peer:start([[
      manager = assert(hierlock.open(...))
      handle = assert(manager:acquire({ "x" }, { timeout = 0 }))
      return handle:is_held()
    ]], "file:" .. directory)
    assert.is_true(peer:result())
    assert.equal("lost", select(2, held:release()).code)
    local lost = select(2, checked:check())
    assert.equal("lost", lost.code)
    assert.matches("renamed", lost.message)
    assert.equal("timeout", select(2, manager:acquire({ "x" }, { timeout = 0 })).code)
    peer:start("return handle:release()")
    assert.is_true(peer:result())
    assert(manager:acquire { "x" }):release()
    assert.is_true(excludes(manager, assert(open(directory, {}))))
  end)

  it("has no lease any more at the next check, and the next refresh", function()
    for _, call in ipairs { "check", "refresh" } do
      local directory = fresh()
      local handle = assert(assert(open(directory, {})):acquire({ "x" }, { ttl = 30 }))
      assert(handle:check())
      assert(uv.fs_rename(directory, directory .. "-moved"))
      local _, lost = handle[call](handle)
      assert.equal("lost", lost and lost.code, call)
    end
  end)

  it("is left by who waits in it", function()
    local directory = fresh()
    local manager, peer = assert(open(directory, {})), support.process(nil)
    local held = assert(manager:acquire { "x" })
    peer:start([[
      manager = assert(hierlock.open(...))
      return assert(manager:acquire { "x" }):is_held()
    ]], "file:" .. directory)
    support.wait_until(function() return #manager:holders { "x" } == 2 end)
    sh("mv %s %s-moved", directory, directory)
    assert.is_true(peer:result())
    assert.is_false(held:is_held())
  end)
end)

describe("descriptors", function()
  after_each(close_all)

  it("are a few for 10,000 handles of one process, and given back", function()
    local output = support.run(([[
      local hierlock, uv = require "hierlock", require "luv"
      local function descriptors()
        local n, scan = 0, assert(uv.fs_scandir("/proc/self/fd"))
        while uv.fs_scandir_next(scan) do n = n + 1 end
        return n
      end
      local before, handles = descriptors(), {}
      local manager = assert(hierlock.open("file:%s"))
      for i = 1, 10000 do
        handles[i] = assert(manager:acquire({ "u" .. i %% 100, "a" .. i %% 1000, i }, { mode = "shared" }))
      end
      assert(manager:stats().held == 10000, "counted wrong")
      local used = descriptors() - before
      assert(used < 10, used)
      for i = 1, 10000 do assert(handles[i]:is_held()) end
      manager:close()
      handles, manager = nil, nil
      collectgarbage()
      collectgarbage()
      assert(descriptors() - before < 5, descriptors() - before)
      print("fine")
    ]]):format(fresh()), "ulimit -n 64;")
    assert.equal("fine\n", output)
  end)
end)

describe("a directory's record of intentions", function()
  local SHARED = { mode = "shared", timeout = 0 }
  after_each(close_all)

  local function mode_of(manager)
    local handle = assert(manager:acquire({ "u1" }, SHARED))
    local mode = handle.mode
    assert(handle:release())
    return mode
  end

  local function format_of(directory)
    local file = assert(io.open(directory .. "/control", "rb"))
    file:seek("set", 8)
    local number = file:read(1):byte()
    file:close()
    return number
  end

  local function mismatch(words, manager, err)
    assert.is_nil(manager)
    assert.equal("mismatch", err.code)
    assert.matches(words, err.message, 1, true)
  end

  it("is its format's number, and is made where the DSN says so", function()
    local with, without = fresh(), fresh()
    assert.equal("shared", mode_of(assert(open(with .. "?intentions=on"))))
    assert.equal("exclusive", mode_of(assert(open(without))))
    assert.equal(4, format_of(with))
    assert.equal(3, format_of(without))
  end)

  it("is followed by programs whose DSN says nothing, also when they make the directory anew", function()
    local directory = fresh()
    open(directory .. "?intentions=on"):close()
    local manager = assert(open(directory))
    assert.equal("shared", mode_of(manager))
    assert.equal("IX", manager:plan({ { "u1", "a1" } }):rows()[1].intention)
    sh("rm -r %s", directory)
    support.wait_until(function()
      local handle = manager:acquire { "u1" }
      if handle then handle:release() end
      return uv.fs_stat(directory .. "/control")
    end, "the directory anew")
    assert.equal(4, format_of(directory))
    manager:close()
    assert.equal("shared", mode_of(assert(open(directory))))
  end)

  it("refuses programs that want what was not made so", function()
    local directory = fresh()
    local plain = assert(open(directory))
    mismatch(directory .. " was made without intentions: leave out intentions=on", open(directory .. "?intentions=on"))
    plain:close()
    mismatch("remove that one while no program uses it", open(directory .. "?intentions=on"))
    assert.equal("exclusive", mode_of(assert(open(directory))))
    local manager, err = open(directory .. "?intentions=maybe")
    assert.is_nil(manager)
    assert.equal("dsn", err.code)
    assert.matches("intentions in the DSN must be one of on", err.message, 1, true)
  end)

  it("refuses programs of a directory that was made anew, and is another", function()
    for _, as in ipairs { { "", "?intentions=on", "was made anew" }, { "?intentions=on", "", "was made without intentions" } } do
      local directory = fresh()
      local manager = assert(open(directory .. as[1]))
      assert(manager:acquire { "u1" }):release()
      sh("rm -r %s", directory)
      local other = assert(open(directory .. as[2]))
      local handle, err
      support.wait_until(function()
        handle, err = manager:acquire({ "u1" }, { timeout = 0 })
        if handle then handle:release() end
        return not handle
      end, "the other directory")
      mismatch(as[3], handle, err)
      assert.matches(directory, err.message, 1, true)
      other:close()
    end
  end)

  it("is kept by a child that is born before the directory is another", function()
    local directory = fresh()
    local output = support.run(([[
      local hierlock, fork = require "hierlock", require "hierlock_spec.fork"
      local manager = assert(hierlock.open "file:%s")
      os.execute "rm -r %s"
      local other = assert(hierlock.open "file:%s?intentions=on")
      local pid = fork.fork()
      if pid == 0 then
        local handle, err = manager:acquire { "u1" }
        print(handle, err and err.code, err)
        io.stdout:flush()
        fork.exit(0)
      end
      fork.wait(pid)
    ]]):format(directory, directory, directory))
    assert.matches("^nil%s+mismatch%s.*was made anew", output)
  end)

  it("refuses a quorum, whose requests say nothing of intentions", function()
    local list = {}
    for i = 1, 3 do list[i] = "file:" .. fresh() .. (i == 2 and "?intentions=on" or "") end
    mismatch("store 2 of the quorum: its programs know intentions", hierlock.open(list, { quorum = "majority" }))
  end)

  it("keeps a quorum out of a directory that was made anew", function()
    local list, directory = { "file:" .. fresh(), "file:" .. fresh() }, fresh()
    list[3] = "file:" .. directory
    local manager = assert(hierlock.open(list, { quorum = "all" }))
    managers[#managers + 1] = manager
    assert(assert(manager:acquire { "u1" }):release { confirm = true })
    sh("rm -r %s", directory)
    assert(open(directory .. "?intentions=on"))
    local err
    support.wait_until(function()
      local handle
      handle, err = manager:acquire({ "u1" }, { timeout = 0.2 })
      if handle then handle:release { confirm = true } end
      return not handle
    end, "a refusal")
    assert.matches("was made anew, with intentions=on", err.message, 1, true)
  end)
end)

describe("a shared inner node", function()
  local SHARED, BOTH = { mode = "shared", timeout = 0 }, { { "u1", mode = "shared" }, { "u1", "a1", "r1" } }
  local dsn, manager, other

  before_each(function()
    dsn = "file:" .. fresh()
    manager, other = assert(hierlock.open(dsn .. "?intentions=on")), assert(hierlock.open(dsn))
  end)

  after_each(function()
    manager:close()
    other:close()
  end)

  local function refused(target, options)
    local handle, err = other:acquire(target, options or { timeout = 0 })
    assert.is_nil(handle)
    assert.equal("timeout", err.code)
  end

  local function granted(target, options)
    assert(assert(other:acquire(target, options or { timeout = 0 })):release())
  end

  -- While it reads all of u1, and writes r1.
  local function reads_all_and_writes_one()
    refused({ "u1" }, SHARED)
    refused { "u1", "a2", "r2" }
    refused({ "u1", "a1", "r1" }, SHARED)
    granted({ "u1", "a1", "r2" }, SHARED)
    granted({ "u1", "a2" }, SHARED)
  end

  it("is read by its holder, who may write one node in it", function()
    local handle = support.keep(assert(manager:acquire_all(BOTH)))
    assert.equal("exclusive", handle.mode)
    reads_all_and_writes_one()
    handle:release()
    handle = support.keep(assert(manager:acquire({ "u1" }, { mode = "shared" })))
    granted({ "u1" }, SHARED)
    assert(handle:extend { "u1", "a1", "r1" })
    reads_all_and_writes_one()
  end)

  it("becomes exclusive for its holder once the other readers have gone", function()
    local handle = support.keep(assert(manager:acquire({ "u1" }, SHARED)))
    local reader = assert(other:acquire({ "u1", "a1" }, SHARED))
    local _, err = handle:extend({ "u1" }, { timeout = 0 })
    assert.equal("timeout", err.code)
    assert.is_true(reader:check())
    reader:release()
    assert(handle:extend({ "u1" }, { timeout = 0 }))
    refused({ "u1", "a1" }, SHARED)
  end)

  it("is a lease's in the same way, which another process imports", function()
    local handle = assert(manager:acquire_all(BOTH, { ttl = 60 }))
    reads_all_and_writes_one()
    local text = assert(handle:export())
    local peer = support.process { dsn = dsn, options = {} }
    assert.is_true(peer:call("handles.it = assert(manager:import(...)) return true", text))
    reads_all_and_writes_one()
    assert.is_true(peer:call "return handles.it:release { confirm = true }")
    granted { "u1" }
    support.close_peers()
  end)

  it("keeps update locks below out, and is kept out by them", function()
    local update = assert(manager:acquire({ "u1", "a1", "r1" }, { mode = "update" }))
    refused({ "u1" }, SHARED)
    granted({ "u1", "a1", "r1" }, SHARED)
    assert(update:upgrade())
    assert(update:downgrade())
    granted({ "u1", "a1", "r1" }, SHARED)
    refused({ "u1", "a1" }, SHARED)
    update:release()
    local handle = support.keep(assert(manager:acquire({ "u1" }, SHARED)))
    refused({ "u1", "a1", "r1" }, { mode = "update", timeout = 0 })
    assert.is_true(handle:is_held())
  end)

  it("is exclusive for a program that also locks Symfony's files, which know no intentions", function()
    other:close()
    other = assert(hierlock.open(dsn, { interoperate = "symfony" }))
    local handle = assert(other:acquire({ "u1" }, SHARED))
    assert.equal("exclusive", handle.mode)
    handle:release()
    handle = assert(other:acquire { "u1", "a1", "r1" })
    assert.equal("timeout", select(2, manager:acquire({ "u1" }, SHARED)).code)
    handle:release()
    support.keep(assert(manager:acquire({ "u1" }, SHARED)))
    refused { "u1", "a1", "r1" }
    granted({ "u1", "a1", "r1" }, SHARED)
  end)

  it("is seen in a plan of its manager, and is exclusive in what a server is told", function()
    local rows = manager:plan(BOTH):rows()
    assert.same({ "shared", "shared", "exclusive" }, { rows[1].mode, rows[2].mode, rows[3].mode })
    assert.same({ "SIX", "IX" }, { rows[1].intention, rows[2].intention })
    assert.equal(hierlock.plan(BOTH):sql "mysql", manager:plan(BOTH):sql "mysql")
    assert.equal(hierlock.plan(BOTH):sql "postgresql", manager:plan(BOTH):sql "postgresql")
  end)
end)

describe("between processes", function()
  local manager, peer
  before_each(function() manager = assert(open()) end)
  after_each(close_all)

  local function waits(p, target)
    p:acquire("waiter", "acquire", target)
    support.wait_until(function() return embedded.waiting(target) >= 1 end, "the waiter")
  end

  it("a thread that holds many locks gets a free one no later when it would wait than when it only tries", function()
    local many, held, quick, patient = assert(open(fresh(), {})), {}, {}, {}
    local function time(times, timeout)
      local began = support.now()
      local handle = assert(many:acquire({ "free" }, { timeout = timeout }))
      times[#times + 1] = support.now() - began
      handle:release()
    end
    for i = 1, 2000 do held[i] = assert(many:acquire({ "held" .. i }, { timeout = 0 })) end
    for _ = 1, 200 do
      time(quick, 0)
      time(patient, 60)
    end
    table.sort(quick)
    table.sort(patient)
    assert.is_true(patient[100] < 5 * quick[100], ("%g s against %g s"):format(patient[100], quick[100]))
    for _, handle in ipairs(held) do handle:release() end
  end)

  it("a lock is handed over at once", function()
    peer = support.process(embedded)
    local delays = {}
    for i = 1, 40 do
      local handle = assert(manager:acquire { "h" })
      peer:start([[ local h = assert(manager:acquire { "h" }) local now = support.now() h:release() return now ]])
      support.wait_until(function() return embedded.waiting { "h" } == 1 end)
      local released = support.now()
      handle:release()
      delays[i] = peer:result() - released
    end
    table.sort(delays)
    assert.is_true(delays[20] < 0.005, ("the median is %.1f ms"):format(delays[20] * 1000))
  end)

  it("a row that two of one process share is kept by the second when the first gives it back", function()
    peer = support.process(embedded)
    local first, second = assert(manager:acquire { "s", "a", "r1" }), assert(manager:acquire { "s", "a", "r2" })
    assert.is_true(first:release())
    assert.same({ nil, "timeout" }, { (peer:acquire("h", "acquire", { "s", "a" }, { timeout = 0 }):result()),
                                      (select(2, peer:acquire("h", "acquire", { "s" }, { timeout = 0 }):result())) })
    assert.is_true(second:release())
    assert.is_true(peer:acquire("h", "acquire", { "s" }, { timeout = 0 }):result())
  end)

  it("a shared request does not pass an exclusive one that waits, whoever shares the row", function()
    local sharer, target = support.process(embedded), { "s", "a", "r3" }
    peer = support.process(embedded)
    assert.is_true(sharer:acquire("h", "acquire", target, { mode = "shared" }):result())
    waits(peer, target)
    support.wait_until(function() -- it shows a moment before it stands in the queue
      local passed = manager:acquire(target, { mode = "shared", timeout = 0 })
      return not passed or not passed:release()
    end, "a refusal")
    sharer:release("h")
    assert.is_true(peer:result())
    peer:release("waiter")
  end)

  it("a waiter that the revoking of many leases lets in is granted a lease that lasts", function()
    local store = setmetatable({ dsn = "file:" .. fresh(), options = { timeout = 15 } }, { __index = embedded })
    local one, leases, lease = support.open(store), {}, { ttl = 60, auto_refresh = false }
    managers[#managers + 1] = one
    -- The first lease is the first to be revoked; the waiter's comes behind all of these.
    for i = 1, 4000 do leases[i] = assert(one:acquire({ "k", "a", "r" .. i }, lease)) end
    peer = support.process(store)
    peer:acquire("h", "acquire", { "k", "a", "r1" }, lease)
    support.wait_until(function() return support.waiting(store, { "k", "a", "r1" }) == 1 end, "the waiter")
    assert.equal(#leases, one:revoke { target = { "k" } })
    assert.is_true(peer:result())
    assert.is_true(peer:call "return handles.h:check()")
  end)

  it("a waiter goes on when the holder is killed", function()
    peer = support.process(embedded)
    local holder = support.process(embedded)
    assert.is_true(holder:acquire("h", "acquire", { "k" }):result())
    peer:start([[ local h = assert(manager:acquire { "k" }) return support.now() ]])
    support.wait_until(function() return embedded.waiting { "k" } == 1 end)
    local killed = support.now()
    holder:signal("sigkill")
    assert.is_true(peer:result() - killed < 0.5)
  end)

  it("a waiter goes on when the one before it in the queue is killed", function()
    peer = support.process(embedded)
    local handle = assert(manager:acquire { "k" })
    waits(peer, { "k" })
    local second = support.process(embedded)
    second:acquire("waiter", "acquire", { "k" })
    support.wait_until(function() return embedded.waiting { "k" } == 2 end)
    peer:signal("sigkill")
    handle:release()
    assert.is_true(second:result())
  end)

  it("a waiter that gives up lets those behind it pass", function()
    peer = support.process(embedded, { timeout = 0.3 })
    local handle = assert(manager:acquire({ "k", "a", "r" }, { mode = "shared" }))
    waits(peer, { "k" })
    local before = support.now()
    assert(manager:acquire({ "k", "a", "r" }, { mode = "shared" }))
    assert.is_true(support.now() - before < 5)
    assert.is_nil((peer:result()))
    handle:release()
  end)

  it("a stopped waiter keeps its place: who comes for its row waits until it goes on or ends, and no longer than asked", function()
    peer = support.process(embedded)
    local handle = assert(manager:acquire { "s" })
    waits(peer, { "s" })
    peer:signal("sigstop")
    handle:release()
    local before = support.now()
    local _, err = manager:acquire({ "s" }, { timeout = 0.1 })
    assert.equal("timeout", err.code)
    assert.is_true(support.now() - before < 5)
    assert(manager:acquire({ "another" }, { timeout = 0 })):release()
    peer:signal("sigcont")
    assert.is_true(peer:result())
    assert.is_true(peer:release("waiter"))
    assert(manager:acquire { "s" }):release()
  end)

  it("a wait for a program that stands still in the table costs the processor next to nothing, and ends in time", function()
    local path = embedded.dsn:match "^file:(.*)" .. "/control"
    local peer_path = ("%q"):format(path)
    peer = support.process(embedded)
    assert(manager:acquire({ "still" }, { ttl = 10 })):release()
    peer:call("require('hierlock_spec.stall').begin(" .. peer_path .. ")")
    local before, start = os.clock(), support.now()
    local _, err = manager:acquire({ "still" }, { timeout = 1 })
    local cost, took = os.clock() - before, support.now() - start
    peer:call("require('hierlock_spec.stall').finish(" .. peer_path .. ")")
    assert.equal("timeout", err.code)
    assert.is_true(cost < 0.2, cost)
    assert.is_true(took >= 1 and took < 5, took)
    assert(manager:acquire { "still" }):release()
  end)

  it("a stopped waiter that is killed is out of the way", function()
    peer = support.process(embedded)
    local handle = assert(manager:acquire { "s" })
    waits(peer, { "s" })
    peer:signal("sigstop")
    handle:release()
    peer:signal("sigkill")
    local before = support.now()
    assert(manager:acquire { "s" })
    assert.is_true(support.now() - before < 0.5)
  end)

  -- Three processes that lock without pause, until the file is there; each for
  -- another time, so that they do not fall into step.
  local function stream(mode)
    local stop = fresh()
    local peers = {}
    for i = 1, 3 do
      peers[i] = support.process(embedded):start([[
        local mode, stop, i = ...
        local n = 0
        repeat
          local handle = assert(manager:acquire({ "f", "a", "r" }, { mode = mode }))
          n = n + 1
          support.sleep((3 * i + 2) / 1000)
          handle:release()
          local file = io.open(stop)
        until file
        return n
      ]], mode, stop, i)
    end
    support.wait_until(function() return #manager:holders { "f" } >= 2 end)
    return function()
      sh("touch %s", stop)
      for i = 1, 3 do assert.is_true(peers[i]:result() > 0) end
    end
  end
  for mode, others in pairs { exclusive = "shared", shared = "exclusive" } do
    it("a request for an " .. mode .. " lock gets in behind a stream of " .. others .. " ones", function()
      local stop = stream(others)
      local slowest = 0
      for _ = 1, 10 do
        local before = support.now()
        assert(manager:acquire({ "f", "a", "r" }, { mode = mode })):release()
        slowest = math.max(slowest, support.now() - before)
      end
      stop()
      assert.is_true(slowest < 1, slowest)
    end)
  end
end)
