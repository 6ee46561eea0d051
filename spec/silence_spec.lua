-- A store that does not answer: its server is stopped (SIGSTOP), the network takes all bytes and passes none on,
-- another program, or an administrator, keeps it locked. No call returns later than 0.2 s after its timeout, on the
-- servers that hold session locks a second, and none on a lock later than that lock is sure. A command that comes
-- late at the store is recalled, or goes with its session.
-- Parts: redis memcached sqlite stores

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"
local uv = require "luv"

local LATE, LATER = 0.2, 1
local TTL = 1.5
local LONG = 60 -- of a lease that nobody gives back by its end
local BUSY = 0.3 -- for a machine that has other things to do

local function timed(fn)
  local start = support.now()
  local ok, err = fn()
  return support.now() - start, ok, err
end

-- silence(): from now on the store does not answer; speak(): it does again. kinds: options for acquiring, on a
-- server that holds session locks.
local function promises(store, params, silence, speak, kinds)
  local late = kinds and LATER or LATE
  local function open(options)
    return assert(hierlock.open(store.dsn .. params, setmetatable(options or {}, { __index = store.options })))
  end

  local function in_silence(fn)
    finally(speak)
    silence()
    fn()
    speak()
  end

  for kind, options in pairs(kinds or { lock = {} }) do
    it("answers a try, and a wait, no later than " .. late .. " s after its timeout: " .. kind, function()
      local managers = { [0] = open(), [0.3] = open() } -- with a connection each
      for _, manager in pairs(managers) do
        for _ = 1, 2 do assert(assert(manager:acquire({ "u1" }, options)):release { confirm = true }) end
      end
      in_silence(function()
        for timeout, manager in pairs(managers) do
          local took, handle, err = timed(function()
            return manager:acquire({ "u1" }, { timeout = timeout, ttl = options.ttl })
          end)
          assert.is_nil(handle)
          assert.is_true(err.retryable, tostring(err))
          assert.is_true(took < timeout + late + BUSY, took)
        end
      end)
      -- A request that was sent all the same is recalled.
      support.wait_until(function()
        local handle = managers[0]:acquire({ "u1" }, { timeout = 0 })
        return handle and handle:release { confirm = true }
      end)
      for _, manager in pairs(managers) do manager:close() end
    end)
  end

  for _, call in ipairs { "refresh", "check", "release" } do
    it("keeps a " .. call .. " no longer than until the lease ends", function()
      local manager = open()
      local handle = assert(manager:acquire({ "u2" }, { ttl = TTL, auto_refresh = false }))
      in_silence(function()
        local left = handle:remaining()
        local took = timed(function() return handle[call](handle, call == "release" and { confirm = true } or nil) end)
        assert.is_true(took < left + BUSY, took)
      end)
      manager:close()
    end)
  end

  it("answers an import, which has no timeout, within " .. LATER .. " s", function()
    local manager = open()
    local text = assert(assert(manager:acquire({ "u3" }, { ttl = LONG, auto_refresh = false })):export())
    in_silence(function()
      local took = timed(function() return manager:import(text) end)
      assert.is_true(took < LATER + BUSY, took)
    end)
    support.wait_until(function()
      local handle = manager:import(text)
      return handle and handle:release { confirm = true }
    end)
    manager:close()
  end)

  if not kinds or not kinds.lock then return end

  for _, call in ipairs { "check", "release" } do
    it("keeps a " .. call .. " of a session lock no longer than that is sure", function()
      local manager = open { hold_timeout = TTL }
      local handle = assert(manager:acquire { "u4" })
      in_silence(function()
        local took = timed(function() return handle[call](handle, call == "release" and { confirm = true } or nil) end)
        assert.is_true(took < TTL + BUSY, took)
      end)
      manager:close()
    end)
  end
end

-- stop(), and what ends that.
local function signals_of(store)
  local function pids()
    local pipe = io.popen(store.control .. " pid")
    local pid = tonumber(pipe:read "*l")
    pipe:close()
    local list = { pid }
    -- PostgreSQL is one process for each session; the first, stopped, makes no more.
    for name in uv.fs_scandir_next, assert(uv.fs_scandir "/proc") do
      local file = name:find "^%d+$" and io.open("/proc/" .. name .. "/stat")
      local stat = file and file:read "*a" -- nil: the process has ended
      local parent = stat and stat:match "%) %S (%d+)"
      if file then file:close() end
      if tonumber(parent) == pid then list[#list + 1] = tonumber(name) end
    end
    return list
  end
  local function signal(which)
    local list = pids()
    for _, pid in ipairs(list) do uv.kill(pid, which) end
    return list
  end
  -- A thread that runs stops when it enters the kernel, not when the signal is sent.
  local function is_stopped(pid)
    for task in uv.fs_scandir_next, assert(uv.fs_scandir("/proc/" .. pid .. "/task")) do
      local file = io.open(("/proc/%d/task/%s/stat"):format(pid, task))
      local state = file and file:read "*a" or ") T"
      if file then file:close() end
      if not state:match "%) [TZ]" then return false end
    end
    return true
  end
  local function stop()
    for _, pid in ipairs(signal "sigstop") do
      support.wait_until(function() return is_stopped(pid) end)
    end
  end
  return stop, function() signal "sigcont" end
end

for _, of_store in ipairs { "on_redis", "on_memcached" } do
  support[of_store](function(store)
    describe("its server is stopped:", function()
      local stop, continue = signals_of(store)
      promises(store, "", stop, continue)
    end)
  end)
end

-- The statements of an administrator that stand in the way, and those that take them back.
local function locks_of(store)
  if store.dialect == "postgresql" then
    local lock = "BEGIN; LOCK TABLE public.%s IN ACCESS EXCLUSIVE MODE"
    return { [lock:format "hier_lock_leases"] = "ROLLBACK", [lock:format "hier_lock_lease_rows"] = "ROLLBACK" }
  end
  return { ["FLUSH TABLES WITH READ LOCK"] = "UNLOCK TABLES",
           ["LOCK TABLES " .. store.stem .. "_leases WRITE"] = "UNLOCK TABLES" }
end

support.each_connection(function(plain)
  local store = support.leased(plain)
  lazy_setup(function() store.prepare() end)
  local kinds = { lock = {}, lease = { ttl = LONG, auto_refresh = false } }

  describe("its server is stopped:", function()
    local stop, continue = signals_of(store)
    promises(store, "", stop, continue, kinds)
  end)

  describe("the network", function()
    local between
    after_each(function()
      support.close_peers()
      if between then between.close() end
      between = nil
    end)
    -- In a process beside the proxy: with a connection that has made leases before.
    local function peer_behind()
      between = proxy.open(store)
      local peer = support.process(store, { pool_size = 1 }, between.dsn)
      peer:call [[
        for _ = 1, 3 do assert(assert(manager:acquire({ "w" }, { ttl = 9 })):release { confirm = true }) end
      ]]
      return peer
    end
    local acquire = [[
      local timeout, ttl = ...
      local begun = support.now()
      local handle, err = manager:acquire({ "u5" }, { timeout = timeout, ttl = ttl, auto_refresh = ttl and false })
      local took = support.now() - begun
      if handle then handle:release { confirm = true } end
      return took, handle and "granted" or err.code
    ]]

    for kind, options in pairs(kinds) do
      it("is cut: a call ends " .. LATER .. " s after its timeout: " .. kind, function()
        for _, timeout in ipairs { 0, 0.3 } do
          local peer = peer_behind()
          between.cut()
          local took, code = peer:call(acquire, timeout, options.ttl)
          assert.equal("connection", code)
          assert.is_true(took < timeout + LATER + BUSY, took)
          support.close_peers()
          between.close()
        end
      end)
    end

    it("delivers a request for a lease when it was given up, and recalled: nobody has it", function()
      local peer, observer = peer_behind(), support.open(store)
      finally(function()
        observer:revoke { target = { "u5" } }
        observer:close()
      end)
      local n = #between.connections
      -- Where the gate is open, one request locks the rows and writes the record.
      assert(assert(observer:acquire({ "u5" }, { ttl = LONG })):release { confirm = true })
      for i = 1, n do between.detain(i) end
      local took, code = peer:call(acquire, 0, LONG)
      assert.equal("connection", code)
      assert.is_true(took < LATER + BUSY, took)
      -- The recall comes on another connection, and before.
      support.wait_until(function()
        uv.run "nowait"
        return #between.connections > n and peer:call [[
          local handle = manager:acquire({ "u6" }, { timeout = 0, ttl = 9 })
          return handle and handle:release { confirm = true }
        ]]
      end)
      support.wait_until(function()
        uv.run "nowait"
        for _, command in ipairs(between.commands) do
          if command.connection > n and (command.text or ""):find("INSERT INTO", 1, true) then return true end
        end
        return store.dialect == "postgresql" and between.sent:find("ON CONFLICT", 1, true)
      end, "the recall")
      for i = 1, n do
        local connection = between.connections[i]
        between.deliver(i)
        -- Behind what the client said: a server whose client has gone may leave the rest of that undone.
        connection.upstream:write(store.dialect == "postgresql" and "X\0\0\0\4" or "\1\0\0\0\1")
        support.wait_until(function()
          uv.run "nowait"
          return connection.upstream:is_closing()
        end, "the server has done all of it")
      end
      support.wait_until(function()
        uv.run "nowait"
        local handle = observer:acquire({ "u5" }, { timeout = 0 })
        return handle and handle:release { confirm = true }
      end)
      assert.same({}, observer:leases { target = { "u5" } })
    end)

    it("is slow: a try is granted all the same", function()
      local peer = peer_behind()
      between.delay(20)
      for kind, options in pairs(kinds) do
        local _, code = peer:call(acquire, 0, options.ttl)
        assert.equal("granted", code, kind)
      end
    end)
  end)

  for lock, unlock in pairs(locks_of(store)) do
    describe("an administrator has said " .. lock .. ":", function()
      local root
      local function locked()
        root = support.sql_connection(store.root_dsn)
        if store.table then root:query("USE " .. store.bare_dsn:match "/([%w_]+)$") end
        for statement in lock:gmatch "[^;]+" do root:query(statement) end
      end
      local function unlocked()
        if not root then return end
        root:query(unlock)
        root:close()
        root = nil
      end
      promises(store, "", locked, unlocked, { lease = kinds.lease })
    end)
  end
end)

support.on_sqlite(function(store)
  local path = store.directory .. "/silence.db"
  local writer
  promises({ dsn = "sqlite:" .. path, options = store.options }, "?synchronous=normal", function()
    writer = assert(require("luasql.sqlite3").sqlite3():connect(path))
    assert(writer:execute "BEGIN EXCLUSIVE")
  end, function()
    if not writer then return end
    writer:execute "ROLLBACK"
    writer:close()
    writer = nil
  end)
end)
