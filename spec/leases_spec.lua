-- The duties of every store that has leases: a lease from its grant to its end, renewed, handed over, revoked, over,
-- forgotten; beside session locks; and when processes die.
-- Parts: stores

local uv = require "luv"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }

-- By the name of the store. The others refuse a ttl.
local LEASES = { embedded = true, mysql = true, mariadb = true, postgresql = true, redis = true, sqlite = true, memcached = true, quorum = true,
                 folder = true }

local SHORT = 0.15 -- a ttl that is waited for
local LONG = tonumber(os.getenv "HIERLOCK_SPEC_TTL") or 60 -- one that is not
local LEAST = 0.98 * LONG - 10 -- what is left of that: a quorum takes 1 % off
local unpack = table.unpack or unpack
local PROMPT = 1.5

-- Waits until a lease of so many seconds from now is surely over, in the store, too.
local function outlast(seconds, store)
  -- Memcached's clock ticks once a second: the record is there for up to four seconds more.
  support.sleep(store and store.whole_seconds and math.ceil(seconds) + 3.1 or seconds + 0.02)
end

local function collect() for _ = 1, 3 do collectgarbage() end end

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

-- In a peer: tries once. True, or the code.
local TRY = [[
  local target, options = ...
  options = options or {}
  options.timeout = options.timeout or 0
  local handle, err = manager:acquire(target, options)
  if not handle then return err.code end
  assert(handle:release { confirm = true })
  return true
]]

describe("a lease", function()
  support.each_leasing_store(function(store)
    local manager, other, opened
    if LEASES[store.name] then store = support.leased(store) end

    local function open(options)
      opened[#opened + 1] = support.open(store, options)
      return opened[#opened]
    end

    setup(function() store.prepare() end)

    before_each(function()
      opened = {}
      manager, other = open { application = "the holder" }, open { application = "the other" }
    end)

    after_each(function()
      support.close_peers()
      local last = open()
      if LEASES[store.name] then assert(last:revoke { target = U1 }) end
      for i = 1, #opened - 1 do opened[i]:close() end
      -- A wait that was given up may stand in line at the server for a moment more, in the way of the next spec.
      assert(last:acquire(U1, { timeout = 10 })):release { confirm = true }
      last:close()
      -- An on_lost keeps its arguments, and with them a lock of the space, as long as its manager is there.
      manager, other, opened = nil, nil, nil
    end)

    if not LEASES[store.name] then
      it("is not to be had yet, and the store says so", function()
        assert_code("unsupported", manager:acquire(R1, { ttl = 1 }))
        local session = assert(manager:acquire(R1))
        assert_code("unsupported", session:to_lease { ttl = 1 })
        assert.is_true(session:check())
        assert_code("unsupported", manager:leases())
        assert_code("unsupported", manager:revoke { owner = "x" })
      end)
      return
    end

    -- A caller that does not ask for a server's answer does not hear that the lease was lost, nor wait until the
    -- record is gone.
    local CONFIRM = (store.server or store.leases_only) and { confirm = true } or nil
    -- The kind of lock that is acquired without a ttl.
    local PLAIN = store.leases_only and "lease" or "session"
    local function it_with_sessions(name, fn) if not store.leases_only then it(name, fn) end end
    -- Where the store deletes a record by itself when its time is up, no refresh brings that back.
    local function it_with_records(name, fn) if not store.whole_seconds then it(name, fn) end end
    -- How much longer a record may be there.
    local TICKS = store.whole_seconds and 4 or 0
    -- A filter, and below which root, where the store must be told.
    local function scope(filter)
      if store.lists_by_root then filter.target = U1 end
      return filter
    end
    -- All leases of the specs.
    local function leases(one) return one:leases(scope {}) end

    -- Waits until commands without an awaited answer have reached the server.
    local function eventually(check)
      return support.wait_until(function() return pcall(check) end)
    end

    local function lease(target, ttl, options)
      local all = { ttl = ttl or LONG, timeout = 0 }
      for k, v in pairs(options or {}) do all[k] = v end
      return manager:acquire(target, all)
    end

    -- A lock that is free. On a busy machine one try at a quorum gets nothing from a member that is too slow; and a server
    -- may answer one, or two, later than a try waits.
    local function free_of(one, target, options)
      local all, tries = { timeout = 0 }, 0
      for k, v in pairs(options or {}) do all[k] = v end
      local handle, err
      repeat
        if tries > 0 then support.sleep(0.1) end
        handle, err = one:acquire(target, all)
        tries = tries + 1
        local late = handle == nil and tries < 3 and err.message:find("does not answer", 1, true)
      until handle or not (late or store.name == "quorum") or tries == 30
      return assert(handle, err)
    end

    local function assert_free(target, options)
      assert(free_of(other, target, options):release { confirm = true })
    end

    local function assert_taken(target, options)
      local all = { timeout = 0 }
      for k, v in pairs(options or {}) do all[k] = v end
      return assert_code("timeout", other:acquire(target, all))
    end

    -- Checks that a peer's wait ends with a grant, soon.
    local function granted_promptly(peer)
      local start = support.now()
      assert.is_true(peer:result())
      assert.is_true(support.now() - start < PROMPT, "it took " .. support.now() - start .. " s")
    end

    local function waiter(target, options)
      local peer = support.process(store)
      peer:acquire("lock", "acquire", target, options)
      support.wait_for_waiters(store, target)
      return peer
    end

    -- -------------------------------------------------- grant and release

    it("is there from its grant to its release, and can be taken again", function()
      for _ = 1, 2 do
        local handle = assert(lease(R1))
        assert.equal("lease", handle.kind)
        assert.is_true(handle:is_held())
        assert.is_true(handle:remaining() > LEAST and handle:remaining() <= LONG, handle:remaining())
        assert.is_true(handle:check())
        assert_taken(R1)
        assert_free(R2)
        assert.is_true(handle:release(CONFIRM))
        assert.is_true(handle:release(CONFIRM))
        assert.is_false(handle:is_held())
        assert_code("released", handle:check())
        assert_code("released", handle:refresh())
        assert_code("released", handle:extend(R2))
        assert_code("released", handle:export())
        assert_code("released", handle:to_lease { ttl = 1 })
        assert_free(R1)
      end
      assert.equal(PLAIN, assert(manager:acquire(R1)).kind)
    end)

    if store.leases_only then
      it("of hold_timeout, which is refreshed, is what one gets without a ttl", function()
        local brief = open { hold_timeout = 1 }
        local handle = assert(brief:acquire(R1, { owner = "alice" }))
        assert.is_true(handle:remaining() <= 1)
        assert.equal("alice", leases(other)[1].owner)
        local end_ = support.now() + 2.5
        while support.now() < end_ do
          assert.is_true(handle:is_held())
          support.sleep(0.02)
        end
        assert_code("unsupported", handle:extend(R2))
        assert_code("unsupported", handle:to_lease { ttl = 1 })
        brief:close()
        support.wait_until(function() return #leases(other) == 0 end)
      end)
    end

    it("pins no connection, however many there are", function()
      local small = open { pool_size = 1 }
      for i = 1, 5 do support.keep(assert(small:acquire({ "u1", "a1", "n" .. i }, { ttl = LONG, timeout = 1 }))) end
      assert.equal(5, small:stats().held)
      assert.is_true((small:acquire({ "u1", "a1", "n6" }, { timeout = 1 })):release(CONFIRM))
    end)

    -- A try awaits such releases for as long as an answer, and no longer: on a busy machine that is too short at times.
    it("that was released without waiting is not in the way of who then tries once", function()
      local late = 0
      local function try(options)
        for _ = 1, 2 do
          local start = support.now()
          local handle, err = manager:acquire(R1, options)
          if handle then return handle end
          local took = support.now() - start
          assert.is_true(took > 0.15, tostring(err) .. " after " .. took .. " s")
          late = late + 1
          assert.is_true(late < 10)
          assert(other:acquire(R1, { timeout = 10 })):release(CONFIRM)
        end
        error "it was late twice"
      end
      for i = 1, 150 do
        try({ ttl = LONG, timeout = 0 }):release()
        assert.is_true(try({ ttl = i % 2 == 0 and LONG or nil, timeout = 0 }):release { confirm = true })
      end
    end)

    it("is over when its time is up, also for its holder, and can be taken again", function()
      local handle = assert(lease(R1, SHORT))
      local left = handle:remaining()
      assert.is_true(left <= SHORT)
      outlast(SHORT, store)
      assert.equal(0, handle:remaining())
      assert.is_false(handle:is_held())
      assert.truthy(tostring(handle):find("over", 1, true))
      assert_code("lost", handle:check())
      assert_free(R1)
      assert_code("lost", handle:release(CONFIRM))
      assert.is_true(assert(lease(R1, SHORT)):release(CONFIRM))
    end)

    it_with_records("is given to others no sooner than the end of remaining()", function()
      for _ = 1, 5 do
        local handle, believed = assert(lease(R1, SHORT)), 0
        local start = support.now()
        repeat
          believed = math.max(believed, support.now() + handle:remaining())
        until support.now() > start + SHORT / 2
        support.sleep(believed - support.now() - 0.01)
        local taken
        repeat taken = other:acquire(R1, { ttl = LONG, timeout = 0 }) until taken or support.now() > start + 10
        assert.is_true(support.now() >= believed, "it was early by " .. believed - support.now() .. " s")
        assert(taken:release(CONFIRM))
      end
    end)

    it("counts from its grant, not from the call", function()
      local blocker = assert(other:acquire(R1))
      local peer = support.process(store)
      peer:start([[
        local handle = assert(manager:acquire(..., { ttl = 2, timeout = 10 }))
        return handle.waited, handle:remaining()
      ]], R1)
      support.wait_for_waiters(store, R1)
      support.sleep(0.6)
      assert(blocker:release(CONFIRM))
      local waited, remaining = peer:result()
      assert.is_true(waited >= 0.6)
      assert.is_true(remaining > 1.4, remaining)
    end)

    it("is shared among readers, and keeps writers out until the last is gone", function()
      local one = assert(lease(R1, LONG, { mode = "shared" }))
      local two = assert(other:acquire(R1, { ttl = LONG, timeout = 0, mode = "shared" }))
      local session = assert(other:acquire(R1, { timeout = 0, mode = "shared" }))
      local third = open()
      assert.is_nil((third:acquire(R1, { timeout = 0 })))
      assert(one:release(CONFIRM) and session:release { confirm = true })
      assert.is_nil((third:acquire(R1, { timeout = 0, ttl = LONG })))
      assert(two:release(CONFIRM))
      free_of(third, R1, { ttl = LONG })
    end)

    it("keeps others out of what is above and below, and of nothing else", function()
      local handle = assert(lease(A1))
      assert_taken(U1)
      assert_taken(R1)
      assert_taken(A1, { ttl = LONG })
      assert_free { "u1", "a2" }
      assert(handle:release(CONFIRM))
      handle = assert(lease(R1))
      assert_taken(A1)
      assert_taken(A1, { ttl = LONG })
      assert_free(R2, { ttl = LONG })
      assert(handle:release(CONFIRM))
      assert_free(U1, { ttl = LONG })
    end)

    it("has as many targets as a call names, all or none", function()
      local names = {}
      for i = 1, 300 do names[i] = "r" .. i end
      local blocker = assert(other:acquire({ "u1", "a1", "r200" }, { ttl = LONG }))
      assert_code("timeout", manager:acquire_resources("u1", "a1", names, { ttl = LONG, timeout = 0 }))
      assert.equal(1, #leases(manager))
      assert(blocker:release(CONFIRM))
      local handle = assert(manager:acquire_resources("u1", "a1", names, { ttl = LONG, timeout = 0 }))
      for _, i in ipairs { 1, 64, 65, 200, 300 } do assert_taken { "u1", "a1", names[i] } end
      assert.equal(1, #leases(manager))
      local text = assert(handle:export())
      handle = assert(manager:import(text))
      assert(handle:release(CONFIRM))
      for _, i in ipairs { 1, 64, 65, 200, 300 } do assert_free { "u1", "a1", names[i] } end
    end)

    it("and a session lock exclude each other, whichever was first", function()
      local handle = assert(lease(R1))
      assert_taken(R1)
      assert(handle:release(CONFIRM))
      local session = assert(other:acquire(R1))
      assert_code("timeout", lease(R1))
      assert_code("timeout", lease(A1))
      assert(session:release { confirm = true })
      assert(assert(lease(R1)):release(CONFIRM))
    end)

    it("keeps out the same handle's manager, too: leases are not re-entrant", function()
      local handle = assert(lease(R1))
      local err = support.told(function() return lease(R1) end)
      assert.equal("timeout", err.code)
      assert.truthy(err.message:find("this process", 1, true), err.message)
      assert(handle:release(CONFIRM))
    end)

    it("has a token that grows with those of sessions", function()
      local last = ""
      for i = 1, 6 do
        local handle = assert(manager:acquire(R1, { ttl = i % 2 == 0 and LONG or nil }))
        assert.is_true(handle.token > last)
        last = handle.token
        assert(handle:release { confirm = true })
      end
    end)

    it("takes its options, and no others", function()
      local function refused(options, what)
        local ok, message = pcall(manager.acquire, manager, R1, options)
        assert.is_false(ok)
        assert.truthy(message:find(what, 1, true), message)
      end
      for _, ttl in ipairs { 0, -1, 1e12, "1", math.huge } do refused({ ttl = ttl }, "ttl") end
      refused({ ttl = 1, owner = "" }, "owner")
      refused({ ttl = 1, owner = ("x"):rep(128) }, "owner")
      refused({ ttl = 1, owner = "a\0b" }, "owner")
      refused({ ttl = 1, auto_refresh = 1 }, "auto_refresh")
      refused({ ttl = 1, auto_release = "no" }, "auto_release")
      refused({ tll = 1 }, "unknown option 'tll'")
      local handle = assert(lease(R1, LONG, { owner = ("x"):rep(127) }))
      assert.equal(("x"):rep(127), leases(manager)[1].owner)
      for _, ttl in ipairs { 0, -1, 1e12 } do assert.is_false((pcall(handle.refresh, handle, ttl))) end
      assert.is_false((pcall(manager.revoke, manager, {})))
      assert.is_false((pcall(manager.revoke, manager, { id = "zz" })))
      assert.is_false((pcall(manager.leases, manager, { path = "x" })))
      assert.is_false((pcall(manager.import, manager, "x", { timeout = 1 })))
      assert.is_false((pcall(manager.import, manager, 17)))
      assert_code("unsupported", handle:extend(R2))
      assert_code("unsupported", handle:to_lease { ttl = 1 })
      if store.leases_only then return end
      local session = assert(manager:acquire(R2))
      assert_code("unsupported", session:refresh())
      assert_code("unsupported", session:export())
      assert.is_true(session:is_held())
    end)

    -- ------------------------------------------------------------ waiting

    it("that is waited for lets a waiter in as soon as it is released", function()
      for _, options in ipairs { {}, { ttl = LONG } } do
        local handle = assert(lease(R1))
        local peer = waiter(R1, options)
        assert.is_true(peer:stays_blocked())
        assert(handle:release(CONFIRM))
        granted_promptly(peer)
        assert(peer:release("lock"))
      end
    end)

    it("that is waited for lets a waiter in as soon as its time is up", function()
      for _, options in ipairs { {}, { ttl = LONG } } do
        local start = support.now()
        local handle = assert(lease(R1, 0.4))
        local granted = assert(other:acquire(R1, { ttl = options.ttl, timeout = 10 }))
        local waited = support.now() - start
        -- Milliseconds are counted whole, rounded down.
        assert.is_true(waited >= 0.399 and waited < 0.4 + PROMPT + TICKS, waited)
        assert.is_false(handle:is_held())
        assert_code("lost", handle:refresh())
        assert.is_true(granted:check())
        assert(granted:release { confirm = true })
      end
    end)

    it("that is refreshed keeps its waiters waiting", function()
      local handle = assert(lease(R1))
      local peer = waiter(R1)
      for _ = 1, 5 do
        assert.is_true(handle:refresh(1.5))
        support.sleep(0.4)
      end
      assert.is_true(peer:stays_blocked())
      assert(handle:release(CONFIRM))
      granted_promptly(peer)
    end)

    it("leaves a wait that ends in time, and that leaves nothing behind", function()
      local handle = assert(lease(R1))
      -- Longer than MySQL shows an old picture of who holds what.
      for _, options in ipairs { { timeout = 0.15 }, { timeout = 0.15, ttl = LONG } } do
        local err
        support.wait_until(function() -- a busy machine may have no time to name the holders
          local start = support.now()
          err = assert_taken(R1, options)
          local elapsed = support.now() - start
          assert.is_true(elapsed >= 0.15 and elapsed < 0.15 + PROMPT, elapsed)
          return err.holders
        end, "the holders")
        assert.equal(1, #err.holders) -- and not the session that has just waited
        assert.equal("lease", err.holders[1].kind)
      end
      local pending = assert(other:start(R1, { ttl = LONG }))
      support.wait_for_waiters(store, R1)
      assert(pending:cancel())
      assert_code("cancelled", pending:wait())
      support.wait_until(function() return store.waiting(R1) == 0 end)
      assert(handle:release(CONFIRM))
      assert_free(A1, { ttl = LONG })
      assert.equal(0, #leases(manager))
    end)

    it("lets those in first who came first, be they sessions or leases", function()
      local handle = assert(lease(R1))
      local first = waiter(R1, { ttl = LONG })
      local second = support.process(store)
      second:acquire("lock", "acquire", R1)
      support.wait_for_waiters(store, R1, 2)
      assert(handle:release(CONFIRM))
      granted_promptly(first)
      assert.is_true(second:stays_blocked())
      first:release "lock"
      granted_promptly(second)
    end)

    -- A quorum promises no order: single stores of it may.
    if store.name ~= "quorum" then
      it("that is shared is not shared with more, past one who waits for it alone", function()
        local handle = assert(lease(R1, 10, { mode = "shared" }))
        local writer = waiter(R1, { ttl = 10 })
        assert_taken(R1, { mode = "shared" })
        assert_taken(U1)
        local reader = support.process(store)
        reader:acquire("lock", "acquire", R1, { mode = "shared", ttl = 10 })
        support.wait_for_waiters(store, R1, 2)
        assert(handle:release(CONFIRM))
        granted_promptly(writer)
        assert.is_true(reader:stays_blocked())
        writer:release "lock"
        granted_promptly(reader)
      end)
    end

    it("names itself to those whom it kept out", function()
      support.keep(assert(lease(R1, LONG, { owner = "alice", label = "edit" })))
      -- The look takes another connection than the try, whose session holds nothing any more.
      for _, one in ipairs { assert(other:acquire(R2)), assert(other:acquire { "u1", "a1", "r3" }) } do
        assert(one:release { confirm = true })
      end
      local err
      for _ = 1, 5 do
        err = support.told(function() return nil, assert_taken(R1) end)
        assert.equal(1, #err.holders)
        assert.equal("lease", err.holders[1].kind)
      end
      local holder = err.holders[1]
      assert.equal("alice", holder.owner)
      assert.equal("the holder", holder.application)
      assert.is_true(holder.remaining > LEAST and holder.remaining <= LONG)
      assert.truthy(err.message:find("alice", 1, true), err.message)
      assert.equal("alice", other:holders(R1)[1].owner)
    end)

    -- -------------------------------------------------------------- refresh

    it("ends ttl after a refresh, sooner or later than before", function()
      local handle = assert(lease(R1, LONG))
      for _, ttl in ipairs { 100, 10, 1.5 } do
        local start = support.now()
        assert.is_true(handle:refresh(ttl))
        local left = handle:remaining()
        local clocks = store.name == "quorum" and ttl / 100 or 0 -- how far they may differ
        assert.is_true(left <= ttl and left > ttl - clocks - 0.4 - (support.now() - start), left)
        local listed, took = leases(other)[1].remaining, support.now() - start
        assert.is_true(math.abs(listed - left) < clocks + 0.4 + TICKS + took)
      end
      assert.is_true(handle:refresh())
      assert.is_true(handle:remaining() > LEAST and handle:remaining() <= LONG)
      assert.is_true(handle:refresh(SHORT))
      outlast(SHORT, store)
      assert_free(R1)
    end)

    it_with_records("that is over, and whose nodes nobody has had, is held again by a refresh", function()
      local handle = assert(lease(R1, SHORT))
      outlast(SHORT, store)
      assert.is_false(handle:is_held())
      assert_free(R2) -- not in its way
      assert.is_true(handle:refresh(LONG))
      assert.is_true(handle:is_held())
      assert_taken(R1)
    end)

    -- Such as one whose connection was cut behind a proxy or a machine that hung.
    it("is not cut short by an earlier refresh that the store carries out late", function()
      if not store.server then return end -- no request is under way behind its caller's back
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:call("handles.lease = assert(manager:acquire(..., { ttl = 60 })) assert(handles.lease:refresh())", R1)
      local n = #between.connections
      for i = 1, n do between.detain(i) end
      peer:start "assert(handles.lease:refresh(1)) return handles.lease:refresh(60)"
      local late
      support.wait_until(function()
        uv.run "nowait"
        for i = 1, n do late = #between.connections[i].detained > 0 and i or late end
        return late
      end, "the refresh")
      between.leave(late)
      assert.is_true(peer:result())
      between.deliver(late)
      assert.is_true(manager:leases({ target = R1 })[1].remaining > 50)
      assert.is_true(peer:call "return handles.lease:refresh() and handles.lease:release { confirm = true }")
    end)

    it("that somebody has had since is lost, and a refresh changes nothing", function()
      local handle = assert(lease(R1, SHORT))
      outlast(SHORT, store)
      local taken = assert(other:acquire(R1, { ttl = LONG, timeout = 0 }))
      assert_code("lost", handle:refresh())
      assert_code("lost", handle:check())
      assert.truthy(tostring(handle):find("lost", 1, true))
      assert.is_true(taken:check())
      assert.is_true(taken:remaining() > LEAST)
      assert_code("lost", handle:release(CONFIRM))
      assert.is_true(taken:check())
      assert.equal(1, #leases(manager))
    end)

    it("is refreshed by the manager's thread, if it is to be, until it is released", function()
      local handle = assert(lease(R1, 1.2, { auto_refresh = true }))
      local plain = assert(lease(R2, 1.2))
      local end_ = support.now() + 2
      while support.now() < end_ do
        assert.is_true(handle:is_held())
        support.sleep(0.02)
      end
      assert.is_false(plain:is_held())
      assert_taken(R1)
      assert.is_true(handle:check())
      assert.is_true(handle:release(CONFIRM))
      assert_free(R1)
      support.sleep(0.5)
      assert.equal(0, #manager:leases { target = R1 })
    end)

    it("tells on_lost once, when its time is up or it is revoked", function()
      local told = {}
      local telling = open { on_lost = function(handle, err) told[#told + 1] = { handle, err } end }
      local over = assert(telling:acquire(R1, { ttl = SHORT }))
      local revoked = assert(telling:acquire(R2, { ttl = LONG }))
      outlast(SHORT, store)
      telling:stats()
      telling:stats()
      assert.equal(1, #told)
      assert.equal(over, told[1][1])
      assert.equal("lost", told[1][2].code)
      assert.equal(1, assert(other:revoke({ target = R2 }, { by = "admin", reason = "lunch" })))
      assert_code("lost", revoked:check())
      telling:stats()
      assert.equal(2, #told)
      assert.equal(revoked, told[2][1])
      assert.equal("admin", told[2][2].revoked_by)
      assert.equal("lunch", told[2][2].reason)
    end)

    it_with_records("tells on_lost again when it is over again, after a refresh had restored it", function()
      local told = 0
      local telling = open { on_lost = function() told = told + 1 end }
      local handle = assert(telling:acquire(R1, { ttl = SHORT }))
      for i = 1, 3 do
        outlast(SHORT, store)
        telling:stats()
        telling:stats()
        assert.equal(i, told)
        assert(handle:refresh(SHORT))
      end
    end)

    it("counts as held, released and lost", function()
      local function counters()
        local s = manager:stats()
        return { s.acquired, s.held, s.released, s.lost }
      end
      local one, two = assert(lease(R1)), assert(lease(R2))
      assert.same({ 2, 2, 0, 0 }, counters())
      assert(one:release(CONFIRM))
      assert(other:revoke { target = R2 })
      assert_code("lost", two:refresh())
      assert.same({ 2, 0, 1, 1 }, counters())
      local text = assert(assert(lease(R1)):export())
      assert.equal(0, manager:stats().held)
      local imported = assert(manager:import(text))
      assert.equal(1, manager:stats().held)
      assert(imported:release(CONFIRM))
    end)

    -- ---------------------------------------------------------- its end

    local ROUTES = {
      { "the garbage collector", function(box)
        box.handle = nil
        collect()
      end },
      { "manager:close", function(_, one) one:close() end },
      { "a <close> scope", _VERSION >= "Lua 5.4" and load [[
        local box = ...
        do local handle <close> = box.handle end
      ]] or nil },
    }
    for _, route in ipairs(ROUTES) do
      if route[2] then
        it(("is released by %s, unless auto_release is false"):format(route[1]), function()
          for _, auto in ipairs { true, false } do
            local one = open()
            local box = { handle = assert(one:acquire(R1, { ttl = LONG, auto_release = auto })) }
            route[2](box, one)
            if not auto then assert_taken(R1) end
            eventually(function()
              if auto then assert_free(R1) end
              assert.equal(auto and 0 or 1, #leases(other))
            end)
          end
        end)
      end
    end

    it("is released by release and with, whatever auto_release says", function()
      local handle = assert(lease(R1, LONG, { auto_release = false }))
      assert.is_true(handle:release(CONFIRM))
      assert_free(R1)
      assert.equal("done", manager:with(R1, { ttl = LONG, auto_release = false }, function() return "done" end))
      eventually(function() assert_free(R1) end)
      if CONFIRM then return end -- `with` does not wait for its release
      local ok, err = manager:with(R1, { ttl = LONG }, function() assert(other:revoke({ target = R1 }, { by = "x" })) end)
      assert.equal("x", assert_code("lost", ok, err).revoked_by)
    end)

    it("is gone when its release is confirmed, also after its manager was closed", function()
      for _, auto in ipairs { true, false } do
        local one = open()
        local handle = assert(one:acquire(R1, { ttl = LONG, auto_release = auto }))
        one:close()
        assert.is_true(handle:release { confirm = true })
        assert_free(R1)
      end
      if not store.server then return end
      local between = proxy.open(store)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:call("handles.lease = assert(manager:acquire(..., { ttl = 60 }))", R1)
      between.close()
      local ok, code = peer:call [[
        manager:close()
        local ok, err = handles.lease:release { confirm = true }
        return ok, err and err.code
      ]]
      assert.is_nil(ok)
      assert.equal("connection", code)
      assert_taken(R1)
    end)

    it("is lost to a confirmed release behind its manager's close, if a revocation had ended it", function()
      for _, auto in ipairs { true, false } do
        local one = open()
        local handle = assert(one:acquire(R1, { ttl = LONG, auto_release = auto }))
        local beside = assert(one:acquire(R2, { ttl = LONG, auto_release = auto }))
        assert.equal(1, assert(other:revoke({ target = R1 }, { by = "x" })))
        one:close()
        assert.equal("x", assert_code("lost", handle:release { confirm = true }).revoked_by)
        assert.is_true(beside:release { confirm = true })
      end
    end)

    it("is lost to a confirmed release behind its manager's close, if a later holder had ended it", function()
      local handles = {}
      for i, targets in ipairs { { R1 }, { R2 }, { { "u1", "a1", "r3" }, { "u1", "a1", "r4" } } } do
        local one = open()
        for _, target in ipairs(targets) do
          handles[#handles + 1] = assert(one:acquire(target, { ttl = SHORT, auto_release = i ~= 1 }))
        end
        handles[one] = true
      end
      outlast(SHORT, store)
      for _, handle in ipairs(handles) do assert_free(handle.targets[1]) end
      for one in pairs(handles) do
        if type(one) ~= "number" then one:close() end
      end
      for i, handle in ipairs(handles) do
        local ok, err
        support.wait_until(function() -- each has 0.17 s to connect and ask: too short for a busy machine
          ok, err = handle:release { confirm = true }
          -- A store that deletes several at once does not always know which of them were there.
          return ok or err.code ~= "connection" or i > 2
        end, "an answer")
        assert.is_nil(ok)
        assert.is_true(err.code == "lost" or i > 2 and err.code == "connection", err.message)
      end
    end)

    it("is given back by a release that follows its manager's close, also without auto_release", function()
      for _ = 1, 2 do
        local one = open()
        local handle = assert(one:acquire(R1, { ttl = LONG, auto_release = false }))
        one:close()
        assert_taken(R1)
        assert.is_true(handle:release())
        eventually(function() assert_free(R1) end)
      end
    end)

    it("survives a process that is killed, and ends by itself", function()
      local peer = support.process(store)
      peer:call("handles.lock = assert(manager:acquire(..., { ttl = 1.5 }))", R1)
      peer:signal "sigkill"
      assert_taken(R1)
      assert(assert(other:acquire(R1, { timeout = 10 })):release { confirm = true })
    end)

    it("is released by a process that ends, and not by its forked child", function()
      local peer = support.process(store)
      local status, held, checked = peer:call([[
        local fork = require "hierlock_spec.fork"
        handles.lock = assert(manager:acquire(..., { ttl = 60, auto_refresh = true }))
        local pid = fork.fork()
        if pid == 0 then
          local ok, err = pcall(function()
            do
              local lock = handles.lock
              assert(not lock:is_held() and lock:remaining() == 0)
              for _, call in ipairs { "check", "refresh", "release", "export" } do
                local done, err = lock[call](lock)
                assert(done == nil and err.code == "released", call)
              end
              assert(not manager:acquire(lock.targets[1], { timeout = 0 }))
              assert(#manager:leases { target = { "u1" } } == 1)
            end
            handles.lock = nil
            collectgarbage() collectgarbage()
            assert(#manager:leases { target = { "u1" } } == 1)
            manager:close()
          end)
          if not ok then io.stderr:write("in the child: ", tostring(err), "\n") end
          fork.exit(ok and 0 or 1)
        end
        local status = fork.wait(pid)
        return status, handles.lock:is_held(), (handles.lock:check())
      ]], R1)
      assert.equal(0, status)
      assert.is_true(held and checked)
      peer:close()
      support.wait_until(function() return #leases(other) == 0 end)
    end)

    it("leaves a forked child the memory of what was released before, until its connection is forgotten", function()
      -- What is used after it was freed is no pointer then.
      uv.os_setenv("MALLOC_PERTURB_", "165")
      local peer = support.process(store)
      uv.os_unsetenv "MALLOC_PERTURB_"
      local status = peer:call([[
        local fork = require "hierlock_spec.fork"
        handles.lock = assert(manager:acquire(..., { ttl = 60 }))
        assert(handles.lock:release())
        local pid = fork.fork()
        if pid == 0 then
          handles.lock = nil
          collectgarbage() collectgarbage()
          manager:close()
          fork.exit(0)
        end
        return (fork.wait(pid))
      ]], R1)
      assert.equal(0, status)
    end)

    it("is what finalizers find, who may do with it what they like", function()
      local handle = assert(lease(R1))
      local text
      local guard = newproxy and newproxy(true) or setmetatable({}, {}) -- luacheck: ignore
      getmetatable(guard).__gc = function() text = handle:export() end
      if not newproxy then guard = setmetatable(guard, getmetatable(guard)) end -- luacheck: ignore
      guard = nil -- luacheck: ignore
      collect()
      assert.is_string(text)
      assert(manager:import(text)):release(CONFIRM)
      assert_free(R1)
    end)

    -- -------------------------------------------------------- export, import

    it("passes to another process by its text, and was never free in between", function()
      local peer, probe = support.process(store), support.process(store)
      local text, token = peer:call([[
        local handle = assert(manager:acquire(..., { ttl = 60, owner = "alice" }))
        local token = handle.token
        local text = assert(handle:export())
        assert(handle:release() == true and not handle:is_held())
        assert(select(2, handle:check()).code == "released")
        return text, token
      ]], R1)
      assert.is_nil(text:find "[^%w_-]")
      peer:signal "sigkill"
      assert.equal("timeout", probe:call(TRY, R1))
      local handle = assert(manager:import(text))
      assert.equal(token, handle.token)
      assert.equal("lease", handle.kind)
      assert.same({ { user = "u1", account = "a1", resource = "r1" } }, handle.targets)
      assert.is_true(handle:remaining() > 50)
      assert.equal("alice", leases(manager)[1].owner)
      assert.equal("the holder", leases(manager)[1].application)
      assert.equal("timeout", probe:call(TRY, R1))
      assert(handle:release(CONFIRM))
      assert.is_true(probe:call(TRY, R1))
    end)

    it_with_records("is refreshed by an import, for its own time or another", function()
      local handle = assert(lease(R1, 1))
      assert(handle:refresh(SHORT))
      local text = assert(handle:export())
      outlast(SHORT, store)
      handle = assert(manager:import(text))
      local left = handle:remaining()
      assert.is_true(left > 0.5 and left <= 1, left)
      assert.is_true(math.abs(leases(other)[1].remaining - left) < 0.4 + TICKS)
      text = assert(handle:export())
      handle = assert(manager:import(text, { ttl = LONG, auto_refresh = true, auto_release = false }))
      assert.is_true(handle:remaining() > LEAST and handle:remaining() <= LONG)
      handle = nil -- luacheck: ignore
      collect()
      assert.equal(1, #leases(other))
    end)

    it("that is imported twice is the later one's", function()
      local text = assert(assert(lease(R1)):export())
      local one, two = assert(manager:import(text)), assert(other:import(text))
      assert_code("lost", one:refresh())
      assert.is_true(two:check())
      assert_code("lost", one:release(CONFIRM))
      assert.is_true(two:check())
      local three = assert(manager:import(text))
      assert_code("lost", two:release(CONFIRM))
      local four = assert(other:import(text))
      assert_code("lost", three:check())
      assert.is_true(four:check())
      assert.is_true(four:release(CONFIRM))
      assert_code("lost", manager:import(text))
    end)

    -- The import fails at first, and is made once more; the server reads its first message last.
    it("is not taken back by an earlier import that the store carries out late", function()
      if not store.server then return end -- no request is under way behind its caller's back
      local STEPS = { memcached = 3 }
      for passes = 0, (STEPS[store.name] or 2) - 1 do
        local text = assert(assert(lease(R1)):export())
        local between = proxy.open(store)
        finally(function() between.close() end)
        local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
        peer:call("assert(assert(manager:acquire(..., { ttl = 60 })):release { confirm = true })", R2)
        local n = #between.connections
        for i = 1, n do between.detain(i, passes) end
        peer:start("handles.lease = assert(manager:import(...)) return true", text)
        local late
        support.wait_until(function()
          uv.run "nowait"
          for i = 1, n do late = #between.connections[i].detained > 0 and i or late end
          return late
        end, "the import, step " .. passes + 1)
        between.leave(late)
        assert.is_true(peer:result())
        between.deliver(late)
        assert.is_true(peer:call "return handles.lease:check() and handles.lease:refresh()")
        assert_taken(R1)
        assert.is_true(peer:call "return handles.lease:release { confirm = true }")
        peer:close()
        between.close()
      end
    end)

    -- The import asks the server for the lease's holder; the answer comes when a later import has the lease.
    it("is not taken from a later import by one that was given up", function()
      if not store.server or not coroutine.close then return end
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:call([[
        local dsn, target = ...
        local function yield(pending) repeat coroutine.yield() until pending:done() end
        handles.yielding = assert(require("hierlock").open(dsn, { pool_size = 1, loop = yield }))
        assert(assert(handles.yielding:acquire(target, { ttl = 60 })):release { confirm = true })
      ]], between.dsn, R2)
      local text, n = assert(assert(lease(R1)):export()), #between.connections
      for i = 1, n do between.detain(i) end
      peer:call([[
        local text = ...
        handles.import = coroutine.create(function() return handles.yielding:import(text) end)
        assert(coroutine.resume(handles.import))
      ]], text)
      support.wait_until(function()
        uv.run "nowait"
        for i = 1, n do if #between.connections[i].detained > 0 then return true end end
      end, "the import")
      peer:call "assert(coroutine.close(handles.import))"
      local later = assert(manager:import(text))
      for i = 1, n do -- the server's answers come while the peer is waited for
        local connection = between.connections[i]
        local said = table.concat(connection.detained)
        connection.detained = nil
        if not connection.upstream:is_closing() then connection.upstream:write(said) end
      end
      -- By the only connection, so behind it.
      peer:call("assert(assert(handles.yielding:acquire(..., { ttl = 60 })):release { confirm = true })", R2)
      assert.is_true(later:check())
      assert.is_true(later:release(CONFIRM))
    end)

    -- Stores look at many rows in parts.
    it("keeps out a plan of several hundred rows, wherever in that it stands", function()
      local names = {}
      for i = 1, 300 do names[i] = "r" .. i end
      for _, i in ipairs { 1, 100, 200, 300 } do
        local handle = assert(lease { "u1", "a1", names[i] })
        assert_code("timeout", other:acquire_resources("u1", "a1", names, { timeout = 0 }))
        assert(handle:release(CONFIRM))
      end
    end)

    -- Runs code in a peer whose answers are kept back, from a statement with that text on, until `check` says that the
    -- store has carried it out; then they are cut off.
    local function cut_off(prepare, code, check, argument, text)
      local between = proxy.open(store)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:call(prepare, argument)
      local n, held = #between.connections, false
      between.take()
      peer:start(code)
      local done = pcall(eventually, function()
        uv.run "nowait"
        for _, command in ipairs(text and between.commands or {}) do held = held or (command.text or ""):find(text, 1, true) end
        if held or not text then
          for i = 1, n do between.connections[i].held = true end
        end
        check()
      end)
      for i = 1, n do between.connections[i].finish() end
      local result = { peer:result() }
      peer:close()
      between.close()
      assert.is_true(done)
      return unpack(result, 1, 2)
    end

    it("that is released, though the answer is cut off, is not lost", function()
      if not store.server then return end
      local function is_gone() assert.equal(0, #leases(manager)) end
      local RELEASE = "local ok, err = handles.lease:release { confirm = true } return ok, err and err.code"
      assert.is_true(cut_off("handles.lease = assert(manager:acquire(..., { ttl = 60 })) assert(handles.lease:refresh())",
                             RELEASE, is_gone, R1))
      -- Another holder of its text may have released the lease in between: so the outcome is unknown.
      local text = assert(assert(lease(R1)):export())
      local ok, code = cut_off("handles.lease = assert(manager:import(...))", RELEASE, is_gone, text)
      assert.is_nil(ok)
      assert.equal("connection", code)
    end)

    it("that is revoked, though the answer is cut off, is counted", function()
      if not store.server or store.name == "memcached" then return end
      local one, two = assert(lease(R1)), assert(lease(R2))
      local count = cut_off("assert(assert(manager:acquire({ 'u2' }, { ttl = 60 })):release { confirm = true })",
        "return manager:revoke { target = { 'u1' } }", function() assert.is_true(#leases(manager) < 2) end, nil,
        store.table and "revoked=1")
      assert.equal(2, count)
      assert_code("lost", one:check())
      assert_code("lost", two:check())
    end)

    it("cannot be had by a text that is damaged, forged, cut short or of something else", function()
      local handle = assert(lease(R1))
      local text = assert(handle:export())
      assert_code("mismatch", manager:import "")
      for i = 1, #text - 1 do assert_code("mismatch", manager:import(text:sub(1, i))) end
      for i = 1, #text do
        local byte = text:sub(i, i) == "A" and "B" or "A"
        local ok, err = manager:import(text:sub(1, i - 1) .. byte .. text:sub(i + 1))
        assert.is_nil(ok)
        assert.truthy(err.code == "mismatch" or err.code == "lost")
      end
      for _, bad in ipairs { text .. "A", text .. text, "\0" .. text, text .. "\0", text:upper(), ("A"):rep(10000) } do
        assert_code("mismatch", manager:import(bad))
      end
      assert.equal(1, #leases(manager))
      assert_taken(R1)
      assert(assert(manager:import(text)):release(CONFIRM))
      assert_code("lost", manager:import(text))
      local elsewhere = assert(hierlock.open("null:", { levels = { "x", "y" } }))
      assert_code("mismatch", elsewhere:import(text))
    end)

    -- --------------------------------------------------------------- to_lease

    it_with_sessions("is what a session lock becomes, with no moment in between", function()
      local session = assert(manager:acquire(R1, { label = "before" }))
      local token = session.token
      local peer = waiter(R1, { timeout = 10 })
      assert.is_true(session:to_lease { ttl = LONG, owner = "bob", label = "after" })
      assert.equal("lease", session.kind)
      assert.equal(token, session.token)
      assert.is_true(session:check())
      assert.is_true(session:remaining() <= LONG)
      assert.is_true(peer:stays_blocked())
      local found = leases(manager)[1]
      assert.equal("bob", found.owner)
      assert.equal("after", found.label)
      assert.equal(1, manager:stats().held)
      assert(session:release(CONFIRM))
      granted_promptly(peer)
      assert_code("released", session:to_lease { ttl = 1 })
    end)

    it_with_sessions("is what a session lock becomes, beside tries that have begun before", function()
      local peer = support.process(store)
      peer:call [[
        many = {}
        for i = 1, 300 do many[i] = { "u1", "a1", "r" .. i } end
      ]]
      for round = 1, 30 do
        local session = assert(manager:acquire { "u1", "a1", "r" .. round * 10 })
        peer:start [[
          local uv = require "luv"
          local till, handle = uv.hrtime() + 40e6
          repeat handle = manager:acquire_all(many, { timeout = 0 }) until handle or uv.hrtime() > till
          if handle then handle:release() end
          return handle == nil
        ]]
        support.sleep(0.01 + round / 10000)
        assert.is_true(session:to_lease { ttl = LONG })
        assert.is_true(peer:result())
        assert(session:release(CONFIRM))
      end
    end)

    it_with_sessions("is what all becomes that a session lock was extended by", function()
      local session = assert(manager:acquire(R1))
      assert(session:extend { "u1", "a2" })
      assert(session:to_lease { ttl = LONG })
      assert_taken(R1)
      assert_taken { "u1", "a2", "r9" }
      local token = session.token
      session = assert(manager:import((assert(session:export()))))
      assert.equal(token, session.token)
      assert(session:release(CONFIRM))
      assert_free(U1)
    end)

    -- ------------------------------------------------------- lists, revocation

    it("is listed with all that is known of it", function()
      local before = os.time()
      support.keep(assert(lease(R1, LONG, { owner = "alice", label = "edit" })))
      support.keep(assert(other:acquire({ "u1", "a2" }, { ttl = 100, owner = "bob" })))
      assert.equal(2, #leases(manager))
      local found = manager:leases(scope { owner = "alice" })
      assert.equal(1, #found)
      local one = found[1]
      assert.equal(32, #one.id)
      assert.equal("u1/a1/r1", one.path)
      assert.equal("edit", one.label)
      assert.equal("exclusive", one.mode)
      assert.equal("the holder", one.application)
      assert.equal(uv.os_getpid(), one.pid)
      assert.equal(uv.os_gethostname(), one.host)
      assert.is_true(one.since >= before - 1 and one.since < before + 30)
      assert.is_true(one.remaining > LEAST and one.remaining <= LONG)
      assert.equal("bob", manager:leases({ target = { "u1", "a2", "r1" } })[1].owner)
      assert.equal("alice", manager:leases({ target = A1 })[1].owner)
      assert.equal(2, #manager:leases { target = U1 })
      assert.equal(0, #manager:leases { target = U1, owner = "carol" })
      assert.equal("alice", manager:leases({ id = one.id })[1].owner)
    end)

    it("is revoked by owner, id or target, and its holder hears by whom and why", function()
      for _, by in ipairs { "owner", "id", "target" } do
        local handle = assert(lease(R1, LONG, { owner = "alice" }))
        local second = assert(lease(R2, LONG, { owner = "bob" }))
        local filter = { owner = scope { owner = "alice" }, id = { id = manager:leases(scope { owner = "alice" })[1].id }, target = { target = R1 } }
        assert.equal(1, other:revoke(filter[by], { by = "admin", reason = "time for lunch" }))
        assert_free(R1)
        assert.is_true(second:check())
        local err = assert_code("lost", handle[by == "id" and "release" or "refresh"](handle, by == "id" and CONFIRM or nil))
        assert.equal("admin", err.revoked_by)
        assert.equal("time for lunch", err.reason)
        assert.truthy(err.message:find("admin: time for lunch", 1, true), err.message)
        if by ~= "id" then assert.equal("admin", assert_code("lost", handle:check()).revoked_by) end
        assert.equal(0, other:revoke(filter[by]))
        assert(second:release(CONFIRM))
      end
    end)

    it_with_records("that is over is revoked like others, as a refresh or an import would have it back", function()
      for _, by in ipairs { "owner", "id", "target" } do
        local handle = assert(lease(R1, SHORT, { owner = "alice" }))
        local filter = { owner = { owner = "alice" }, id = { id = manager:leases({ owner = "alice" })[1].id }, target = { target = A1 } }
        outlast(SHORT)
        assert.equal(0, #manager:leases(filter[by]))
        filter[by].over = true
        assert.same({ "u1/a1/r1", 0, nil }, { manager:leases(filter[by])[1].path, manager:leases(filter[by])[1].remaining })
        filter[by].over = nil
        assert.equal(1, other:revoke(filter[by], { by = "admin", reason = "closing time" }))
        assert.equal(0, #manager:leases { over = true, target = U1 })
        local err = assert_code("lost", handle:refresh(LONG))
        assert.same({ "admin", "closing time" }, { err.revoked_by, err.reason })
        assert.equal(0, other:revoke(filter[by]))
        assert_free(R1)
      end
      local text = assert(assert(lease(R1, SHORT)):export())
      outlast(SHORT)
      assert.equal(1, other:revoke({ target = R1 }, { by = "admin" }))
      assert.equal("admin", assert_code("lost", manager:import(text)).revoked_by)
    end)

    it("that is revoked lets in who waits for it, at once", function()
      local handle = assert(lease(A1))
      local peer = waiter(R1)
      assert.equal(1, other:revoke { target = R1 })
      granted_promptly(peer)
      local err = assert_code("lost", handle:check())
      assert.is_nil(err.revoked_by)
    end)

    it("that is revoked without a name or a reason says neither, also after one that said both", function()
      for _, said in ipairs { { by = "admin", reason = "lunch" }, {} } do
        local handle = assert(lease(R1))
        assert.equal(1, other:revoke({ target = R1 }, said))
        local err = assert_code("lost", handle:refresh())
        assert.same(said, { by = err.revoked_by, reason = err.reason })
      end
    end)

    it("that is revoked after its export cannot be imported, and says why", function()
      local text = assert(assert(lease(R1)):export())
      assert.equal(1, other:revoke({ target = R1 }, { by = "admin" }))
      assert.equal("admin", assert_code("lost", manager:import(text)).revoked_by)
    end)

    -- ------------------------------------------------------------ coroutines

    it("is waited for, refreshed, converted and imported in coroutines, nested ones too", function()
      local yields = 0
      local yielding = open { loop = function(pending)
        repeat
          yields = yields + 1
          coroutine.yield()
        until pending:done()
      end }
      local handle = assert(lease(R1))
      local steps = {}
      local function body()
        local one = assert(yielding:acquire(R1, { ttl = LONG, timeout = 10 }))
        steps[#steps + 1] = "granted"
        assert(one:refresh(30))
        assert(one:check())
        local text = assert(one:export())
        local two = assert(yielding:import(text))
        local inner = coroutine.wrap(function()
          local three = assert(yielding:acquire(R2))
          if PLAIN == "session" then assert(three:to_lease { ttl = LONG }) end
          assert(three:release { confirm = true })
          return "inner"
        end)
        local said
        repeat said = inner() until said == "inner"
        assert(two:release { confirm = true })
        steps[#steps + 1] = "released"
      end
      local co = coroutine.create(body)
      assert(coroutine.resume(co))
      assert.same({}, steps)
      assert(handle:release(CONFIRM))
      support.wait_until(function()
        if coroutine.status(co) == "dead" then return true end
        assert(coroutine.resume(co))
      end)
      assert.same({ "granted", "released" }, steps)
      assert.is_true(yields > 0)
      assert.equal(0, #leases(manager))
    end)

    if _VERSION >= "Lua 5.4" then
      it("that a closed coroutine waits for is nobody's", function()
        local yielding = open { loop = function(pending) repeat coroutine.yield() until pending:done() end }
        local handle = assert(lease(R1))
        local co = coroutine.create(function() return yielding:acquire(R1, { ttl = LONG }) end)
        assert(coroutine.resume(co))
        support.wait_for_waiters(store, R1)
        assert(coroutine.close(co))
        assert(handle:release(CONFIRM))
        support.wait_until(function()
          local free = other:acquire(R1, { timeout = 0 })
          return free and free:release { confirm = true }
        end)
        assert.equal(0, #leases(manager))
      end)
    end
  end, "and examples")

  it("is not to be had of a store that grants everything, which says so", function()
    local manager = assert(hierlock.open "null:")
    assert_code("unsupported", manager:acquire(R1, { ttl = 1 }))
    local handle = assert(manager:acquire(R1))
    assert_code("unsupported", handle:to_lease { ttl = 1 })
    assert.is_true(handle:check())
    assert_code("unsupported", manager:leases())
    assert_code("unsupported", manager:revoke { owner = "x" })
    manager:close()
  end)
end)
