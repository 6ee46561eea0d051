--- What a store outside of the program must do when that is in trouble, theme by theme. The file of each store
-- (spec/support/stores) brings that about, or says why the store has no such theme:
--
--            mariadb memcached mysql postgresql redis sqlite
--   hang      yes     yes       yes   yes        yes   yes
--   restart   yes     yes       yes   yes        yes   -
--   restart, sqlite: it has no server
-- Parts: restart mysql mariadb postgresql redis memcached sqlite

local proxy = require "spec.support.proxy"
local support = require "spec.support"
local uv = require "luv"

local THEMES = { "hang", "restart" }

local R1, LONG = { "u1", "a1", "r1" }, 60
-- How much later than its timeout a call may return; on a server that holds session locks.
local LATE, LATER = 0.2, 1
local BUSY = 0.3 -- for a machine that has other things to do
local TTL = 1.5

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

local function timed(fn)
  local start = support.now()
  local ok, err = fn()
  return support.now() - start, ok, err
end

local function free(handle) return handle:release { confirm = true } end

-- -------------------------------------------------------------------- hang

-- The states of a manager's only connection when the store becomes silent, and what makes the state.
local STATES = {
  idle = function(manager, options)
    for _ = 1, 2 do assert(free(assert(manager:acquire({ "u2" }, options)))) end
  end,
  ["with a release that is not answered"] = function(manager, options)
    local handle = assert(manager:acquire({ "u3" }, options))
    return function() handle:release() end
  end,
  ["not yet made"] = function() end,
}

-- A store whose server does not answer, or which another program, or an administrator, keeps locked. No call returns
-- later than LATE after its timeout, and none on a lock later than that lock is sure. A command that comes late at
-- the store is recalled, or goes with its session.
local function hang(store, way, kinds)
  local sessions = kinds.session
  local late = store.leases_only and LATE or LATER
  local manager, opened

  local function open(options)
    opened[#opened + 1] = support.open(store, options)
    return opened[#opened]
  end

  before_each(function()
    opened = {}
    manager = open()
  end)
  after_each(function()
    support.close_peers()
    for _, one in ipairs(opened) do one:close() end
  end)

  local function in_silence(fn)
    local silent = true
    local function speak()
      if silent then way.speak() end
      silent = false
    end
    finally(speak)
    way.silence()
    fn()
    speak()
  end

  for kind, options in pairs(kinds) do
    it("answers a try, and a wait, no later than " .. late .. " s after its timeout: " .. kind, function()
      local calls = {}
      local function add(state, timeout)
        local call = { manager = open { pool_size = 1 }, state = state, timeout = timeout }
        call.first = STATES[state](call.manager, options)
        calls[#calls + 1] = call
      end
      add("idle", 0)
      for state in pairs(STATES) do
        if state == "idle" or not way.leases then add(state, 0.3) end
      end
      in_silence(function()
        for _, call in ipairs(calls) do
          if call.first then call.first() end
          local took, handle, err = timed(function()
            return call.manager:acquire({ "u1" }, { timeout = call.timeout, ttl = options.ttl })
          end)
          assert.is_nil(handle)
          assert.is_true(err.retryable, tostring(err))
          assert.is_true(took < call.timeout + late + BUSY, call.state .. ": " .. took)
        end
      end)
      -- A request that was sent all the same is recalled, and no manager is broken.
      for _, call in ipairs(calls) do
        support.wait_until(function()
          local handle = call.manager:acquire({ "u1" }, { timeout = 0, ttl = options.ttl })
          return handle and free(handle)
        end, call.state)
      end
    end)
  end

  for _, call in ipairs { "refresh", "check", "release" } do
    it("keeps a " .. call .. " no longer than until the lease ends, and a waiter goes on, or hears of it", function()
      local handle = assert(manager:acquire(R1, { ttl = TTL, auto_refresh = false }))
      local peer = not way.leases and support.process(store) -- else it keeps the administrator waiting
      if peer then
        peer:acquire("lock", "acquire", R1, { ttl = LONG, timeout = 30 })
        support.wait_for_waiters(store, R1)
      end
      in_silence(function()
        local left = handle:remaining()
        local took = timed(function() return handle[call](handle, call == "release" and { confirm = true } or nil) end)
        assert.is_true(took < left + BUSY, took)
        if not peer then return end -- an administrator's lock may let a refresh pass
        support.sleep(left + 0.01 - took)
        assert.is_false(handle:is_held())
      end)
      if not peer then return end
      local granted, code = peer:result()
      assert.is_true(granted or store.table and code == "connection", code)
    end)
  end

  it("answers an import, which has no timeout, within " .. LATER .. " s", function()
    local text = assert(assert(manager:acquire({ "u3" }, { ttl = LONG, auto_refresh = false })):export())
    in_silence(function()
      local took = timed(function() return manager:import(text) end)
      assert.is_true(took < LATER + BUSY, took)
    end)
    support.wait_until(function()
      local handle = manager:import(text)
      return handle and free(handle)
    end)
  end)

  it("ends a wait that is cancelled", function()
    in_silence(function()
      local pending = assert(manager:start(R1, { timeout = 30, ttl = LONG }))
      support.sleep(0.2)
      assert(pending:cancel())
      local took = timed(function() assert_code("cancelled", pending:wait()) end)
      assert.is_true(took < LATER + BUSY, took)
    end)
    support.wait_until(function()
      local handle = manager:acquire(R1, { timeout = 0 })
      return handle and free(handle)
    end)
  end)

  if not sessions then return end

  for _, call in ipairs { "check", "release" } do
    it("keeps a " .. call .. " of a session lock no longer than that is sure", function()
      local handle = assert(open { hold_timeout = TTL }:acquire { "u4" })
      in_silence(function()
        local took = timed(function() return handle[call](handle, call == "release" and { confirm = true } or nil) end)
        assert.is_true(took < TTL + BUSY, took)
      end)
    end)
  end
end

-- ----------------------------------------------------------------- restart

-- A server that ends, in order or not, and comes back: it has lost its sessions, and keeps the leases, or not.
local function restart(store, kinds)
  local holder, idle, down

  before_each(function() holder, idle = support.open(store), support.open(store) end)
  after_each(function()
    if down then store.command "start" end
    down = false
    holder:close()
    idle:close()
  end)

  local function go(verb)
    down = verb ~= "start"
    store.command(verb)
  end

  -- Of a session lock.
  local function assert_lost(handle)
    assert.is_false(handle:is_held())
    assert.equal(0, handle:remaining())
    assert.is_true(assert_code("lost", handle:check()).retryable)
    assert_code("lost", handle:release())
    assert.is_true(handle:release()) -- the second time, as always
  end

  for verb, waiting in pairs { stop = 1, kill = 100 } do
    it("loses its sessions, ends waits, and serves again once it is back, by " .. verb, function()
      local options, held, tokens = kinds.lease, {}, {}
      for kind, how in pairs(kinds) do
        for _ = 1, 6 do assert(free(assert(idle:acquire({ kind }, how)))) end
        held[kind] = assert(holder:acquire({ kind, "a1" }, how))
        tokens[kind] = held[kind].token
      end
      local text = assert(assert(holder:acquire({ "exported" }, options)):export())
      local released = assert(holder:acquire({ "released" }, options))
      local target, waits = { store.leases_only and "lease" or "session", "a1" }, {}
      for i = 1, waiting do
        waits[i] = assert(holder:start({ target[1], "a1", "r" .. i % 5 }, { timeout = 15, ttl = options.ttl }))
      end
      support.wait_for_waiters(store, target)

      local start = support.now()
      go(verb)
      for _, wait in ipairs(waits) do
        local handle, err = wait:wait(15)
        assert.is_nil(handle)
        assert.truthy(({ connection = true, lost = true })[err.code], tostring(err))
      end
      assert.is_true(support.now() - start < 15)
      if held.session then assert_lost(held.session) end
      assert_code("connection", held.lease:refresh())
      assert.is_true(held.lease:is_held())
      assert.is_true(released:release())
      for _, manager in ipairs { holder, idle } do
        assert.is_true(assert_code("connection", manager:acquire({ "u1" }, { timeout = 2 })).retryable)
      end

      go "start"
      if store.themes.restart.keeps then
        support.wait_until(function() return held.lease:refresh() end)
        assert.is_true(held.lease:check())
        assert_code("timeout", idle:acquire({ "lease" }, { timeout = 0 }))
        assert.is_true(free(assert(idle:import(text))))
        support.wait_until(function() return #idle:leases { target = { "released" } } == 0 end)
        assert.is_true(free(assert(idle:acquire({ "released" }, { timeout = 0 }))))
        assert.is_true(free(held.lease))
      else
        support.wait_until(function()
          local handle = idle:acquire({ "lease" }, { timeout = 1 })
          return handle and free(handle)
        end)
        assert_code("lost", held.lease:check())
      end
      for kind, how in pairs(kinds) do
        for _, manager in ipairs { holder, idle } do
          local handle = assert(manager:acquire({ kind, "a1" }, how))
          assert.is_true(handle.token > tokens[kind], handle.token .. " after " .. tokens[kind])
          tokens[kind] = handle.token
          assert(free(handle))
        end
      end
    end)
  end
end

support.each_troubled_store(function(plain)
  local store = support.leased(plain)
  lazy_setup(function() store.prepare() end)
  local kinds = { lease = { ttl = LONG, auto_refresh = false } }
  if not store.leases_only then kinds.session = {} end

  for _, way in ipairs(store.silences) do
    describe(way.title .. ":", function() hang(store, way, way.leases and { lease = kinds.lease } or kinds) end)
  end

  local function theme(name, declare)
    if type(store.themes[name]) == "table" then describe(name .. ":", function() declare(store, kinds) end) end
  end

  if store.control then theme("restart", restart) end

  if store.leases_only then return end
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
end)

-- ------------------------------------------------------------------- table

describe("the table at the top of this file", function()
  it("says which store has which theme, and why one has it not", function()
    local names, stores, reasons = {}, {}, {}
    for file in uv.fs_scandir_next, assert(uv.fs_scandir "spec/support/stores") do
      local name = file:match "^(.*)%.lua$"
      stores[name] = require("spec.support.stores." .. name).themes
      if stores[name] then names[#names + 1] = name end
    end
    table.sort(names)
    local lines = { "--            " .. table.concat(names, " ") }
    for _, theme in ipairs(THEMES) do
      local line = ("--   %-9s"):format(theme)
      for _, name in ipairs(names) do
        local has = assert(stores[name][theme], name .. " says nothing of " .. theme)
        line = line .. (" %-" .. #name .. "s"):format(type(has) == "string" and "-" or "yes")
        if type(has) == "string" then reasons[#reasons + 1] = ("--   %s, %s: %s"):format(theme, name, has) end
      end
      lines[#lines + 1] = line:gsub("%s+$", "")
    end
    local wanted = table.concat(lines, "\n") .. "\n" .. table.concat(reasons, "\n")
    local file = assert(io.open "spec/server_spec.lua")
    local text = file:read "*a"
    file:close()
    assert.truthy(text:find(wanted, 1, true), wanted)
  end)
end)
