--- What a store outside of the program must do when that is in trouble, theme by theme. The file of each store
-- (spec/support/stores) brings that about, or says why the store has no such theme:
--
--            mariadb memcached mysql postgresql redis sqlite
--   hang      yes     yes       yes   yes        yes   yes
--   restart   yes     yes       yes   yes        yes   -
--   forget    -       yes       -     -          yes   -
--   cut       yes     yes       yes   yes        yes   -
--   restart, sqlite: it has no server
--   forget, mariadb: it keeps its tables
--   forget, mysql: it keeps its tables
--   forget, postgresql: it keeps its tables
--   forget, sqlite: it has no server
--   cut, sqlite: it has no server
-- Parts: restart keeps_a_call_for cut mysql mariadb postgresql redis memcached sqlite

local proxy = require "spec.support.proxy"
local support = require "spec.support"
local uv = require "luv"

local THEMES = { "hang", "restart", "forget", "cut" }

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

  it("keeps a refresh no longer than until a lease ends that ends soon", function()
    local handle = assert(manager:acquire(R1, { ttl = 0.4, auto_refresh = false }))
    in_silence(function()
      local left = handle:remaining()
      local took = timed(function() return handle:refresh() end)
      assert.is_true(took < left + BUSY, took)
    end)
  end)

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
      -- Where this fails, the next ones would find them.
      finally(function() for _, user in ipairs { "exported", "released" } do idle:revoke { target = { user } } end end)
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

-- ------------------------------------------------------------------ forget

-- A server that is emptied, with a store that grants again at once.
local function forget(store, kinds)
  it("lets the next one in, its holder hears of that, waiters queue again, and tokens grow", function()
    local manager, other = support.open(store), support.open(store)
    local last = ""
    for _, waits in ipairs { true, true, false } do
      local lost = assert(manager:acquire(R1, kinds.lease))
      local peer = support.process(store)
      if waits then
        peer:acquire("lock", "acquire", R1, kinds.lease)
        support.wait_for_waiters(store, R1)
      end
      store.themes.forget.empty(store)
      if not waits then peer:acquire("lock", "acquire", R1, { ttl = LONG, timeout = 0 }) end
      assert.is_true(peer:result())
      local token = peer:call "return handles.lock.token"
      assert_code("lost", lost:check())
      assert.is_false(lost:is_held())
      assert.is_true(peer:call "return handles.lock:check()")
      assert_code("timeout", other:acquire(R1, { timeout = 0 }))
      assert.is_true(lost.token > last and token > lost.token, token)
      last = token
      peer:release "lock"
      assert(free(assert(other:acquire(R1, { timeout = 0 }))))
      support.close_peers()
    end
    manager:close()
    other:close()
  end)
end

-- --------------------------------------------------------------------- cut

-- The network goes silent, is slow, or loses a connection; a client's last words may come to the server late.
local function cut(store, kinds)
  local late = store.leases_only and LATE or LATER
  local between, observer, peer

  before_each(function()
    between, observer = proxy.open(store), support.open(store)
    peer = support.process(store, { pool_size = 1 }, between.dsn) -- for the proxy works beside it
    peer:call [[
      for _ = 1, 3 do assert(assert(manager:acquire({ "w" }, { ttl = 9 })):release { confirm = true }) end
    ]]
  end)
  after_each(function()
    support.close_peers()
    between.close()
    observer:revoke { target = { "u1" } }
    observer:close()
  end)

  -- Like support.wait_until, while the proxy works.
  local function wait_until(condition, what)
    return support.wait_until(function()
      uv.run "nowait"
      return condition()
    end, what)
  end

  local function found() return assert(observer:leases { target = R1 }) end

  local acquire = [[
    local timeout, ttl = ...
    local begun = support.now()
    local handle, err = manager:acquire({ "u1", "a1", "r1" }, { timeout = timeout, ttl = ttl, auto_refresh = ttl and false })
    local took = support.now() - begun
    handles.lock = handle
    return took, handle and "granted" or err.code
  ]]

  for kind, options in pairs(kinds) do
    for _, timeout in ipairs { 0, 0.3 } do
      it(("keeps a call for %g s beyond its timeout of %g s: %s"):format(late, timeout, kind), function()
        between.cut()
        local took, code = peer:call(acquire, timeout, options.ttl)
        assert.equal("connection", code)
        assert.is_true(took < timeout + late + BUSY, took)
      end)
    end

    it("keeps no try from its grant when it is merely slow: " .. kind, function()
      between.delay(20)
      local _, code = peer:call(acquire, 0, options.ttl)
      assert.equal("granted", code)
      peer:release "lock"
    end)
  end

  -- Keeps back what the client says (late), or what the server answers. Returns how many connections there are.
  local function keep_back(is_late)
    local n = #between.connections
    for i = 1, n do between[is_late and "detain" or "hold"](i) end
    return n
  end

  -- Waits until something is kept back of a lease, and ends those connections for the client; for the server, too,
  -- unless it is to hear the rest late.
  local function lose(n, is_late)
    wait_until(function()
      for i = 1, n do if is_late and #between.connections[i].detained > 0 then return true end end
      return not is_late and #found() == 1
    end, "the request, or the lease")
    local id = not is_late and found()[1].id
    for i = 1, n do
      if is_late then between.leave(i) else between.connections[i].finish() end
    end
    return id
  end

  -- Has the server read what was kept back, and waits until it has done all of that.
  local function deliver(n)
    for i = 1, n do
      local upstream = between.connections[i].upstream
      between.deliver(i)
      -- Behind what the client said: a server whose client has gone may leave the rest of that undone.
      if not upstream:is_closing() then upstream:write(store.themes.cut.quit) end
      wait_until(function() return upstream:is_closing() end, "the server to do all of it")
    end
  end

  for title, when in pairs { ["the answer is lost"] = false, ["the request comes while it is held"] = "held",
                             ["the request comes when it is free again"] = "free" } do
    it("grants a lease once: " .. title, function()
      peer:start(acquire, 10, LONG)
      assert.equal("granted", select(2, peer:result()))
      assert.is_true(peer:call "return handles.lock:release { confirm = true }") -- or its answer is kept back
      local n = keep_back(when)
      peer:start(acquire, 10, LONG)
      local id = lose(n, when)
      assert.equal("granted", select(2, peer:result()))
      if when == "held" then deliver(n) end
      assert.equal(1, #found())
      -- Messages that are still under way of the first try, or of its end, do not meet it.
      assert.is_true(id ~= found()[1].id or store.themes.cut.resumes)
      assert.is_true(peer:call "return handles.lock:check() and handles.lock:refresh()")
      peer:release "lock"
      if when == "free" then deliver(n) end
      assert.same({}, found())
      assert(free(assert(observer:acquire({ "u1" }, { timeout = 0 }))))
    end)
  end

  local function rows()
    local name = store.table and store.stem .. "_leased" or "public.hier_lock_lease_rows"
    return tonumber((store.table and store.sql() or store.root()):query("SELECT COUNT(*) FROM " .. name)[1][1])
  end

  -- As where there has been no lease for long: a session with locks may shut a gate.
  local function shut_gates()
    store.sql():query(("UPDATE %s_gate SET n=0 WHERE NOT EXISTS (SELECT 1 FROM %s_leased)"):format(store.stem, store.stem))
  end

  for title, prepare in pairs { [""] = function() end, [", where there was no lease"] = store.table and shut_gates } do
    it("grants nothing to a caller that has given up, when the request comes late" .. title, function()
      prepare()
      local n, recall = keep_back(true), store.themes.cut.recall
      local said, before = #between.sent, kinds.session and rows()
      assert.equal("connection", select(2, peer:call(acquire, 0, LONG)))
      -- The recall comes before, and on another connection.
      wait_until(function() return not recall or between.sent:find(recall, said + 1, true) end, "the recall")
      wait_until(function()
        return peer:call [[
          local handle = manager:acquire({ "u6" }, { timeout = 0, ttl = 9 })
          return handle and handle:release { confirm = true }
        ]] and #between.connections > n
      end, "another connection")
      deliver(n)
      if before then assert.is_true(rows() <= before) end
      wait_until(function()
        local handle = observer:acquire(R1, { timeout = 0 })
        return handle and free(handle)
      end)
      assert.same({}, found())
    end)
  end

  if not kinds.session then return end

  for title, is_late in pairs { ["the answer is lost"] = false, ["the request comes late"] = true } do
    it("loses the session lock that was to become a lease, and leaves no record: " .. title, function()
      assert.equal("granted", select(2, peer:call(acquire, 10)))
      local before, n = rows(), keep_back(is_late)
      peer:start "local ok, err = handles.lock:to_lease { ttl = 60 } return ok, err and err.code"
      lose(n, is_late)
      assert.same({ n = 2, nil, "lost" }, { n = 2, peer:result() })
      if is_late then deliver(n) end
      wait_until(function() return #found() == 0 and rows() <= before end, "the end of the record")
      assert(free(assert(observer:acquire(R1, { timeout = 10 }))))
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
  theme("forget", forget)

  theme("cut", cut)

  -- It sends nothing, or has its client library send, which closes a connection that fails.
  if not store.leases_only or type(store.themes.cut) ~= "table" then return end

  it("takes no answer for another's when the system does not send a release", function()
    local path = os.tmpname()
    os.remove(path)
    local peer = support.process(nil, nil, nil, support.preloaded("slow_send", "export HIERLOCK_SPEC_REFUSE=" .. path))
    finally(support.close_peers)
    local observer = support.open(store)
    local held = assert(observer:acquire({ "u1", "a1", "r2" }, kinds.lease))
    local believed, code = peer:call([[
      local dsn, options, path, lease = ...
      local manager = assert(hierlock.open(dsn, options or {}))
      local handle = assert(manager:acquire({ "u1", "a1", "r1" }, lease))
      io.open(path, "w"):close()
      handle:release()
      support.wait_until(function() return not io.open(path) end, "a send that is refused")
      local other, err = manager:acquire({ "u1", "a1", "r2" }, { timeout = 0, ttl = lease.ttl })
      local believed = other and other:is_held()
      manager:close()
      return believed or false, err and err.code
    ]], store.dsn, store.options, path, { ttl = LONG })
    assert.same({ false, "timeout" }, { believed, code })
    assert(free(held))
    support.wait_until(function()
      local handle = observer:acquire({ "u1", "a1", "r1" }, { timeout = 0, ttl = LONG })
      return handle and free(handle)
    end, "the end of the lease that was released")
    observer:close()
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
