-- The duties of every store, for a lock from its request to its end: all or nothing, release by every route and once
-- only, exact timeouts, fencing tokens, the view of a handle and an observer, and the counters.
-- Parts: gives_up stores

local uv = require "luv"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local R1 = { "u1", "a1", "r1" }

-- A release of whatever kind must reach a waiter so soon.
local PROMPT = 1.5

-- In a peer: tries once. True, or the code.
local TRY = [[
  local target, options = ...
  options = options or {}
  options.timeout = 0
  local handle, err = manager:acquire(target, options)
  if not handle then return err.code end
  assert(handle:release { confirm = true })
  return true
]]

local function hexadecimal(token) return #token == 16 and not token:find("[^0-9a-f]") end

-- -------------------------------------------------- routes of a release

-- Each gives box.handle back, which manager acquired.
local ROUTES = {
  { "release", function(box) assert.is_true(box.handle:release()) end },
  { "release with confirm=true", function(box) assert.is_true(box.handle:release { confirm = true }) end },
  { "the garbage collector", function(box)
    box.handle = nil
    collectgarbage()
    collectgarbage()
  end },
  { "manager:close", function(_, manager) manager:close() end },
}
if _VERSION >= "Lua 5.4" then
  table.insert(ROUTES, { "the end of a <close> scope", load [[
    local box = ...
    do local handle <close> = box.handle end
  ]] })
end

-- Each ends a process that holds a lock and releases nothing.
local ENDS = {
  { "os.exit", function(peer) peer:start("os.exit(0)"):join() end },
  { "_exit", function(peer) peer:start("require('hierlock_spec.fork').exit(0)"):join() end },
  { "kill -9", function(peer) peer:signal("sigkill") end },
}

-- --------------------------------------------------------------- the specs

describe("a store", function()
  support.each_store(function(store)
    local manager, opened

    local function open(options)
      opened[#opened + 1] = support.open(store, options)
      return opened[#opened]
    end

    -- Holds a lock here until the end of the spec.
    local function hold(target, options)
      return support.keep(assert(manager:acquire(target, options)))
    end

    before_each(function()
      opened = {}
      manager = open { application = "the holder" }
    end)

    after_each(function()
      support.close_peers()
      for _, one in ipairs(opened) do one:close() end
    end)

    -- Another process that waits for the target, and is seen to.
    local function waiter(target, options)
      local peer = support.process(store)
      peer:acquire("lock", "acquire", target, options)
      support.wait_for_waiters(store, target)
      return peer
    end

    -- Checks that a peer's wait ends with a grant, soon.
    local function granted_promptly(peer)
      local start = support.now()
      assert.is_true(peer:result())
      assert.is_true(support.now() - start < PROMPT, "it took " .. support.now() - start .. " s")
      assert.is_true(peer:call("return handles.lock:check()"))
    end

    -- ---------------------------------------------------- shared subtrees

    it("shares an inner node where the store can, else takes it exclusively, and says which", function()
      local mode = store.subtrees and "shared" or "exclusive"
      local handle = hold({ "u1", "a1" }, { mode = "shared" })
      assert.equal(mode, handle.mode)
      if store.dialect == "mariadb" then support.sleep(0.11) end -- or it shows an old picture
      assert.equal(mode, manager:holders({ "u1", "a1" })[1].mode)
      local second = open()
      for _, reader in ipairs { { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" } } do
        local other = second:acquire(reader, { mode = "shared", timeout = 0 })
        assert.equal(store.subtrees or false, other ~= nil)
        if other then other:release { confirm = true } end
      end
      for _, writer in ipairs { { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" } } do
        local _, err = second:acquire(writer, { timeout = 0 })
        assert.equal("timeout", err and err.code)
      end
      assert(assert(second:acquire({ "u1", "a2" }, { timeout = 0 })):release { confirm = true })
      assert(handle:release { confirm = true })
      assert(assert(second:acquire({ "u1", "a1", "r1" }, { timeout = 5 })):release())
    end)

    -- ---------------------------------------------------- all or nothing

    for _, timeout in ipairs { 0, 0.1 } do
      it(("holds nothing of an acquisition that fails (timeout=%s)"):format(timeout), function()
        local targets = {
          { "u1" }, { "u2", "a1" }, { "u2", "a2", "r1", mode = "shared" }, { "u2", "a2", "r2" },
        }
        -- Blocked at its very last row, after all others have been taken.
        local rows = hierlock.plan(targets, { buckets = store.options.buckets }):rows()
        local last = 0
        for i = 1, 1000 do
          last = { "u3", "a1", "r" .. i }
          local bucket = hierlock.plan({ last }, { buckets = store.options.buckets }):rows()[3].bucket
          if bucket > rows[#rows].bucket then break end
        end
        targets[#targets + 1] = last
        local blocker = hold(last)
        local second = open()
        -- To look who is in the way, as err.holders tells, would clean up the session
        -- that failed; so this is about a failure in a second with too many looks.
        support.wait_until(function()
          local handle, err
          repeat
            handle, err = second:acquire_all(targets, { timeout = 0 })
          until handle or not err.holders
          handle, err = second:acquire_all(targets, { timeout = timeout })
          assert.is_nil(handle)
          assert.equal("timeout", err.code)
          assert.is_true(err.retryable)
          return not err.holders
        end, "a failure without a look")
        assert.equal(0, second:stats().held)

        local other = support.process(store)
        assert.is_true(other:call(TRY, { "u1" }))
        assert.is_true(other:call(TRY, { "u2" }))
        assert.equal("timeout", other:call(TRY, { "u3" }))
        assert.is_true(blocker:check())
        assert.is_true(blocker:release { confirm = true })
        assert.is_true(other:call(TRY, { "u3" }))
        assert(second:acquire_all(targets, { timeout = 0 }))
      end)
    end

    -- ----------------------------------------------------------- release

    for _, route in ipairs(ROUTES) do
      it(("gives a lock back by %s, and once only"):format(route[1]), function()
        local box = { handle = assert(manager:acquire(R1)) }
        local peer = waiter(R1)
        route[2](box, manager)
        granted_promptly(peer)
        if route[1] ~= "manager:close" then
          assert.equal(0, manager:stats().held)
          assert.equal(1, manager:stats().released)
        end
        -- Nothing of this takes away what the other one has now.
        if box.handle then
          assert.is_false(box.handle:is_held())
          assert.is_true(box.handle:release())
          assert.is_true(box.handle:release { confirm = true })
          box.handle = nil
        end
        collectgarbage()
        collectgarbage()
        manager:close()
        manager:close()
        assert.is_true(peer:call("return handles.lock:check()"))
        local third, err = open():acquire(R1, { timeout = 0 })
        assert.is_nil(third)
        assert.equal("timeout", err.code)
      end)
    end

    for _, ending in ipairs(ENDS) do
      it(("gives a lock back when the process of its holder ends by %s"):format(ending[1]), function()
        local holder = support.process(store)
        assert.is_true(holder:acquire("lock", "acquire", R1):result())
        local peer = waiter(R1)
        ending[2](holder)
        granted_promptly(peer)
      end)
    end

    it("is not held up by a waiter that was killed for longer than that would have waited", function()
      local patience, tries = 1, 0
      hold(R1)
      repeat
        -- Waits for the account, and keeps newcomers from it meanwhile.
        local killed, behind = support.process(store), support.process(store)
        local start = support.now()
        -- On a busy machine the first may have given up before both are seen to wait.
        local function is_seen(n)
          return support.wait_until(function()
            return store.waiting { "u1", "a1" } >= n and "seen" or support.now() - start > patience and "late"
          end, "a waiter") == "seen"
        end
        killed:acquire("lock", "acquire", { "u1", "a1" }, { timeout = patience })
        local both = is_seen(1)
        behind:acquire("lock", "acquire", { "u1", "a1", "r2" })
        both = both and is_seen(2)
        killed:signal("sigkill")
        local at = support.now()
        granted_promptly(behind)
        local in_time = support.now() - (store.server and start + patience or at) < 0.5
        if store.server then
          support.wait_until(function() return store.waiting(R1) == 0 end, "the end of the dead waiter")
        end
        behind:close()
        tries = tries + 1
        assert.is_true(both and in_time or tries < 5)
      until both and in_time
    end)

    -- ---------------------------------------------------------- timeouts

    -- How long an acquisition of R1, held elsewhere, waits.
    local function waits_in_vain(second, seconds)
      local start = support.now()
      local handle, err = second:acquire(R1, { timeout = seconds })
      local elapsed = support.now() - start
      assert.is_nil(handle)
      assert.equal("timeout", err.code)
      return elapsed
    end

    local function gives_up(seconds, late)
      -- Not in this process: a request that would wait for itself for a second is told `deadlock`.
      support.process(store):acquire("h", "acquire", R1):result()
      local second = open()
      assert(second:acquire { "u2" }):release { confirm = true }
      support.ends_in_time(store, seconds, late, function() return waits_in_vain(second, seconds) end)
    end

    for _, seconds in ipairs { 0.05, 0.3, 1.2 } do
      it(("gives up after %s s, never sooner, and at most 10 ms later"):format(seconds),
        function() gives_up(seconds, 0.01) end)
    end

    it("gives up at once with timeout=0", function() gives_up(0, 0.02) end)

    it("gets at a try what the same manager has just given back, without waiting for the store's word", function()
      local one = open()
      local granted = 0
      for round = 1, 50 do
        local handles = {}
        for i = 1, 4 do handles[i] = assert(one:acquire { "u1", "a1", "r" .. i }) end
        local start = support.now()
        for i = 1, 4 do handles[i]:release() end
        local handle, err = one:acquire({ "u1", "a1" }, { timeout = 0 })
        -- The call waits 0.1 s for the answers to earlier releases, which a busy machine may exceed.
        assert.is_true(handle ~= nil or support.now() - start >= 0.1, ("round %d: %s"):format(round, tostring(err)))
        if handle then
          granted = granted + 1
          handle:release { confirm = true }
        end
      end
      assert.is_true(granted >= 25, granted .. " of 50")
    end)

    it("tries once though the same rows were waited for before, by the same connection", function()
      local one, other = open { pool_size = 1 }, open()
      for _ = 1, 4 do assert(one:acquire(R1, { timeout = 5 })):release { confirm = true } end
      local held = assert(other:acquire(R1))
      local shortest = math.huge
      for _ = 1, 3 do -- a busy machine may take its time
        local start = support.now()
        local handle, err = one:acquire(R1, { timeout = 0 })
        shortest = math.min(shortest, support.now() - start)
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
      end
      assert.is_true(shortest < 0.5, shortest .. " s")
      assert.is_true(held:is_held())
    end)

    it("gives up as exactly at a manager's first acquisition, when it still has to connect", function()
      hold(R1)
      -- The first look at the holders takes a new connection to PostgreSQL 10 to 20 ms.
      support.ends_in_time(store, 0.1, store.name == "postgresql" and 0.04 or 0.01, function(seconds)
        local second = open()
        local elapsed = waits_in_vain(second, seconds)
        second:close()
        return elapsed
      end)
    end)

    -- ---------------------------------------------------- who is in the way

    it("names in the message who holds, however it was asked for", function()
      local peer = support.process(store, { application = "billing" })
      peer:acquire("lock", "acquire", { "u1", "a1" }, { label = "nightly" })
      assert.is_true(peer:result())
      -- Checks an err: the wanted target, and then the blocker.
      local function assert_said(wanted, handle, err)
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
        assert.equal(1, #err.holders)
        local by = ('u1/a1 is held by billing (pid %d on %s, "nightly") for '):format(peer.pid, err.holders[1].host)
        local at = err.message:find(": " .. by, 1, true)
        assert.is_truthy(at, err.message)
        assert.matches(wanted, err.message:sub(1, at - 1))
        assert.matches("^[%d.]+ s$", err.message:sub(at + 2 + #by))
      end
      -- Looking has its limits, too, which a busy machine may exceed: one of five tries.
      local function says(wanted, try)
        local ok, why
        for _ = 1, 5 do
          ok, why = pcall(function() assert_said(wanted, try()) end)
          if ok then return end
          support.sleep(0.3)
        end
        error(why, 0)
      end
      local in_time, once = "^u1/a1/r1 was not granted within 0%.200 s$", "^u1/a1/r1 is locked; tried once$"
      says(in_time, function() return manager:acquire(R1, { timeout = 0.2 }) end)
      says(once, function() return manager:acquire(R1, { timeout = 0 }) end)
      says(in_time, function() return manager:start(R1, { timeout = 0.2 }):wait() end)
      says(once, function() return manager:start(R1, { timeout = 0 }):wait() end)
      local handle = hold { "u2" }
      says(in_time, function() return handle:extend(R1, { timeout = 0.2 }) end)
    end)

    -- manager:close sends the releases of session locks to a server, and does not wait for the answer.
    it("confirms no release that followed the manager's close, unless the lock is gone", function()
      local one = open()
      local handle = assert(one:acquire(R1, { timeout = 5 }))
      one:close()
      local ok, err = handle:release { confirm = true }
      if store.server and not store.leases_only then
        assert.is_nil(ok)
        assert.equal("connection", err.code, err.message)
      else
        assert.is_true(ok)
        assert(manager:acquire(R1, { timeout = 0 }))
      end
    end)

    it("says so when this very process is in the way", function()
      hold { "u1", "a1" }
      local other = open()
      local err = support.told(function() return other:acquire(R1, { timeout = 0.2 }) end)
      assert.matches(("u1/a1/r1 was not granted within 0.200 s: u1/a1 is held by this process (pid %d on ")
        :format(uv.os_getpid()), err.message, 1, true)
    end)

    -- ------------------------------------------------------------ tokens

    it("gives tokens that grow in the order of the grants, whoever holds", function()
      local other_manager = open()
      local peers = { support.process(store), support.process(store), support.thread(store) }
      local last = ("0"):rep(16)
      local function later(token)
        assert.is_true(hexadecimal(token), token)
        assert.is_true(last < token, token .. " came after " .. last)
        last = token
      end
      for _ = 1, 3 do
        for _, one in ipairs { manager, other_manager } do
          local handle = assert(one:acquire(R1))
          later(handle.token)
          handle:release()
        end
        for _, peer in ipairs(peers) do
          local granted, token = peer:acquire("lock", "acquire", R1):result()
          assert.is_true(granted)
          later(token)
          peer:release("lock")
        end
      end
    end)

    it("gives one who waited a greater token than one who held meanwhile", function()
      local holder = hold(R1)
      local peer = waiter(R1)
      local another = hold { "u2" }
      holder:release()
      local _, token = peer:result()
      assert.is_true(token > holder.token)
      assert.is_true(token > another.token)
    end)

    it("gives one who waited for the last of hundreds a greater token, too", function()
      local resources, highest, last = {}, -1, nil
      for i = 1, 600 do
        resources[i] = "r" .. i
        local rows = hierlock.plan({ { "u1", "a1", resources[i] } }, { buckets = store.options.buckets }):rows()
        if rows[3].bucket > highest then highest, last = rows[3].bucket, resources[i] end
      end
      local holder = hold { "u1", "a1", last }
      local peer = support.process(store)
      peer:start([[
        local handle = assert(manager:acquire_resources("u1", "a1", ...))
        return handle.token
      ]], resources)
      support.wait_until(function() return store.waiting { "u1", "a1", last } > 0 end, "the waiter")
      assert(holder:extend { "u2" })
      holder:release()
      assert.is_true(peer:result() > holder.token)
    end)

    -- ------------------------------------------------------------ handles

    it("says how long a grant was waited for", function()
      local start = support.now()
      local handle = assert(manager:acquire(R1))
      assert.is_true(handle.waited >= 0 and handle.waited < 1)
      local peer = waiter(R1)
      local seen = support.now()
      assert.is_true(peer:stays_blocked())
      local at_least = support.now() - seen
      handle:release()
      local _, _, waited = peer:result()
      assert.is_true(waited >= at_least - 0.001, waited .. " < " .. at_least)
      assert.is_true(waited <= support.now() - start)
    end)

    it("shows a handle that is held, and then released", function()
      local handle = assert(manager:acquire(R1))
      assert.is_true(handle:is_held())
      assert.is_true(handle:check())
      if store.server then
        local left = handle:remaining()
        assert.is_true(left > 25 and left <= 30, left)
      else
        assert.equal(math.huge, handle:remaining())
      end
      assert.is_true(handle:extend({ "u1", "a1", "r2" }))
      assert.equal(2, #handle.targets)
      local other = support.process(store)
      assert.equal("timeout", other:call(TRY, { "u1", "a1", "r2" }))

      assert.is_true(handle:release { confirm = true })
      assert.is_true(other:call(TRY, { "u1" }))
      assert.is_false(handle:is_held())
      assert.equal(0, handle:remaining())
      local calls = { check = {}, extend = { { "u1", "a1", "r2" } }, refresh = {}, export = {}, to_lease = { { ttl = 1 } } }
      for method, arguments in pairs(calls) do
        local ok, err = handle[method](handle, arguments[1])
        assert.is_nil(ok)
        assert.equal("released", err.code, method)
        assert.is_false(err.retryable)
      end
      assert.is_true(handle:release())
    end)

    it("keeps what a handle had when its extension times out", function()
      local handle = assert(manager:acquire(R1))
      local other = support.process(store)
      assert.is_true(other:acquire("lock", "acquire", { "u1", "a1", "r2" }):result())
      local ok, err = handle:extend({ "u1", "a1", "r2" }, { timeout = 0.05 })
      assert.is_nil(ok)
      assert.equal("timeout", err.code)
      assert.is_true(handle:check())
      assert.equal(1, #handle.targets)
      assert.equal("timeout", other:call(TRY, R1))
    end)

    -- ---------------------------------------------------------- observers

    it("tells who holds and who waits, and nothing of others", function()
      local handle = hold(R1, { label = "nightly report" })
      local peer = support.process(store, { application = "the waiter" })
      peer:acquire("lock", "acquire", R1, { label = "for %s & <b>", mode = "shared" })
      local observer = open()
      local function look(target)
        -- As in store.waiting: MariaDB shows an old picture to observers that look more often.
        if store.dialect == "mariadb" then support.sleep(0.11) end
        return assert(observer:holders(target))
      end
      local found = support.wait_until(function()
        local list = look(R1)
        if #list ~= 2 then return end
        table.sort(list, function(a, b) return not a.waiting and b.waiting end)
        return list[2].waiting and list
      end, "a holder and a waiter")
      for _, one in ipairs(found) do
        assert.is_true(math.abs(one.since - os.time()) < 10)
        one.since = nil
        -- A server's number for it; the embedded store has none.
        assert.equal("string", type(one.session))
        one.session = nil
      end
      local host = uv.os_gethostname()
      assert.same({
        { application = "the holder", host = host, pid = uv.os_getpid(), label = "nightly report",
          path = "u1/a1/r1", mode = "exclusive", waiting = false, kind = "session" },
        { application = "the waiter", host = host, pid = peer.pid, label = "for %s & <b>",
          path = "u1/a1/r1", mode = "shared", waiting = true, kind = "session" },
      }, found)

      assert.same({}, look { "u1", "a1", "r2" })
      assert.same({}, look { "u2" })
      assert.equal(2, #look { "u1" })
      handle:release { confirm = true }
      assert.is_true(peer:result())
      peer:release("lock")
      support.wait_until(function() return #look(R1) == 0 end, "an empty list")
    end)

    it("tells with a timeout who was in the way", function()
      hold({ "u1", "a1" }, { label = "migration" })
      local second = open()
      local err = support.told(function() return second:acquire(R1, { timeout = 0.12 }) end)
      assert.equal("timeout", err.code)
      assert.equal(1, #err.holders)
      assert.equal("migration", err.holders[1].label)
      assert.equal("the holder", err.holders[1].application)
      assert.equal("u1/a1", err.holders[1].path)
      assert.is_false(err.holders[1].waiting)
      assert.same({ user = "u1", account = "a1", resource = "r1" }, err.target)
    end)

    -- From the look on the server says nothing: then it is unknown whether a holder blocks.
    it("keeps a caller 50 ms for who was in the way, and says that it does not know", function()
      if not store.server or store.leases_only then return end
      hold(R1)
      local between
      between = proxy.open(store, function(data)
        for _, list in ipairs { "pg_lock_status", "INNODB_TRX", "data_locks" } do
          if between.sent:find(list, 1, true) then return "" end
        end
        return data
      end)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      for _, try in ipairs { "manager:acquire(...)", "assert(manager:start(...)):wait()" } do
        support.wait_until(function() -- the machine may have other things to do
          between.sent = ""
          local seen = peer:call([[
            local uv = require "luv"
            local begun = uv.hrtime()
            local _, err = ]] .. try .. [[

            return { late = (uv.hrtime() - begun) / 1e9 - 0.2, err = err }
          ]], R1, { timeout = 0.2 })
          local err = seen.err
          assert.equal("timeout", err.code)
          assert.is_nil(err.holders)
          assert.matches("not granted within 0.200 s; who is in the way is not known: ", err.message, 1, true)
          assert.is_string(err.holders_unknown)
          return err.holders_unknown == "the store did not tell in time" and seen.late < 0.05
        end, try .. " to return in time", 20)
      end
    end)

    it("says when it has not looked who was in the way", function()
      hold(R1)
      local second = open()
      local err = support.wait_until(function()
        local _, failure = second:acquire(R1, { timeout = 0 })
        -- A store that did not tell in time may have told of one.
        return failure.holders_unknown and not failure.holders and failure
      end, "a try that is one too many")
      assert.equal("timeout", err.code)
      assert.is_nil(err.holders)
      assert.matches("tried once; who is in the way is not known: " .. err.holders_unknown, err.message, 1, true)
    end)

    -- MariaDB's picture is up to 100 ms old where another session has just looked.
    it("tells of nobody who has waited in vain, not even right afterwards", function()
      hold(R1)
      local loser, observer = support.process(store), open()
      for _ = 1, 6 do
        loser:start([[
          local _, err = manager:acquire(...)
          return err.code, #(err.holders or {})
        ]], R1, { timeout = 0.3 })
        support.sleep(0.25)
        observer:holders(R1)
        local code, seen = loser:result()
        assert.equal("timeout", code)
        assert.is_true(seen <= 1, seen)
        assert.equal(1, #assert(observer:holders(R1)))
        support.sleep(0.11)
      end
    end)

    it("counts what happens", function()
      local second = open()
      local a, b = assert(second:acquire { "u1" }), assert(second:acquire { "u2" })
      assert.equal(2, second:stats().held)
      a:release()
      hold(R1)
      assert.is_nil((second:acquire(R1, { timeout = 0.05 })))
      local stats = second:stats()
      assert.equal(2, stats.acquired)
      assert.equal(1, stats.released)
      assert.equal(1, stats.held)
      assert.equal(1, stats.timeouts)
      assert.is_true(stats.wait_seconds >= 0.05 and stats.wait_seconds < 2)
      for _, none in ipairs { "waiting", "deadlocks", "cancelled", "busy", "lost", "errors", "reconnects" } do
        assert.equal(0, stats[none], none)
      end
      assert.is_true(store.server and stats.connections >= 1 or stats.connections == 0)
      b:release()
      assert.equal(0, second:stats().held)

      local peer = waiter(R1)
      assert.is_true(peer:stays_blocked())
      manager:close()
      granted_promptly(peer)
      stats = peer:call("return manager:stats()")
      assert.equal(1, stats.acquired)
      assert.equal(1, stats.waited)
      assert.equal(1, stats.held)
      assert.equal(0, stats.waiting)
    end)

    if store.server then
      it("is busy at once when this thread's own locks fill the pool", function()
        local small = open { pool_size = 1 }
        local handle = assert(small:acquire(R1))
        local start = support.now()
        local second, err = small:acquire({ "u2" }, { timeout = 10 })
        assert.is_true(support.now() - start < PROMPT)
        assert.is_nil(second)
        assert.equal("busy", err.code)
        assert.is_true(err.retryable)
        assert.equal(1, small:stats().busy)
        handle:release()
        assert(small:acquire { "u2" })
      end)
    end
  end, "intentions")
end)
