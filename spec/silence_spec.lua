-- A store that does not answer: its server is stopped (SIGSTOP), or another program keeps it locked. No call returns
-- later than 0.2 s after its timeout, and none on a lease later than that lease ends.

local hierlock = require "hierlock"
local support = require "spec.support"
local uv = require "luv"

local LATE = 0.2
local TTL = 1.5
local BUSY = 0.3 -- for a machine that has other things to do

local function timed(fn)
  local start = support.now()
  local ok, err = fn()
  return support.now() - start, ok, err
end

-- silence(): from now on it does not answer; speak(): it does again.
local function promises(store, params, silence, speak)
  local function open() return assert(hierlock.open(store.dsn .. params, store.options)) end

  local function in_silence(fn)
    finally(speak)
    silence()
    fn()
    speak()
  end

  it("answers a try, and a wait, no later than " .. LATE .. " s after its timeout", function()
    local managers = { [0] = open(), [0.3] = open() } -- with a connection each
    for _, manager in pairs(managers) do assert(assert(manager:acquire { "u1" }):release { confirm = true }) end
    in_silence(function()
      for timeout, manager in pairs(managers) do
        local took, handle, err = timed(function() return manager:acquire({ "u1" }, { timeout = timeout }) end)
        assert.is_nil(handle)
        assert.is_true(err.retryable, tostring(err))
        assert.is_true(took < timeout + LATE + BUSY, took)
      end
    end)
    -- What was sent all the same is recalled.
    support.wait_until(function()
      local handle = managers[0]:acquire({ "u1" }, { timeout = 0 })
      return handle and handle:release { confirm = true }
    end)
    for _, manager in pairs(managers) do manager:close() end
  end)

  for _, call in ipairs { "refresh", "check" } do
    it("keeps a " .. call .. " no longer than until the lease ends", function()
      local manager = open()
      local handle = assert(manager:acquire({ "u2" }, { ttl = TTL, auto_refresh = false }))
      in_silence(function()
        local left = handle:remaining()
        local took = timed(function() return handle[call](handle) end)
        assert.is_true(took < left + BUSY, took)
      end)
      manager:close()
    end)
  end
end

for _, of_store in ipairs { "on_redis", "on_memcached" } do
  support[of_store](function(store)
    local function signal(which)
      local pipe = io.popen(store.control .. " pid")
      local pid = tonumber(pipe:read "*l")
      pipe:close()
      assert(uv.kill(pid, which))
      return pid
    end
    -- A thread that runs stops when it enters the kernel, not when the signal is sent.
    local function stop()
      local pid = signal "sigstop"
      support.wait_until(function()
        for task in uv.fs_scandir_next, assert(uv.fs_scandir("/proc/" .. pid .. "/task")) do
          local file = io.open(("/proc/%d/task/%s/stat"):format(pid, task))
          local state = file and file:read "*a" or ") T"
          if file then file:close() end
          if not state:match "%) T" then return false end
        end
        return true
      end)
    end
    promises(store, "", stop, function() signal "sigcont" end)
  end)
end

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
