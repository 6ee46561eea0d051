-- The histograms of manager:stats(): how long acquisitions waited, and how long their locks were held, for each
-- level. On every store, for whatever route a wait or a hold ends by, by one thread or by several of the same
-- process.

local hierlock = require "hierlock"
local support = require "spec.support"

local BOUNDS = {}
for exponent = -4, 3 do
  for _, digit in ipairs { 1, 2, 5 } do BOUNDS[#BOUNDS + 1] = tonumber(("%de%d"):format(digit, exponent)) end
end

local function sum(list)
  local total = 0
  for _, n in ipairs(list) do total = total + n end
  return total
end

-- Counts the waits of so many seconds or longer, as far as the bounds tell: one of these.
local function at_least(histogram, seconds)
  local n = 0
  for i, count in ipairs(histogram.buckets) do
    if (BOUNDS[i - 1] or 0) >= seconds then n = n + count end
  end
  return n
end

-- Fails unless the parts fit each other.
local function consistent(histogram)
  assert.equal(#BOUNDS + 1, #histogram.buckets)
  assert.equal(histogram.count, sum(histogram.buckets))
  local least, most = 0, 0
  for i, count in ipairs(histogram.buckets) do
    least, most = least + count * (BOUNDS[i - 1] or 0), most + count * (BOUNDS[i] or math.huge)
    if count == 0 then most = most ~= most and math.huge or most end -- 0 times infinite
  end
  assert.is_true(histogram.seconds >= least - 1e-4, histogram.seconds .. " is less than " .. least)
  assert.is_true(histogram.seconds <= most + 1e-4 or most == math.huge, histogram.seconds .. " is more than " .. most)
end

local function counts(stats, which)
  local list = {}
  for i, level in ipairs(stats.levels) do list[i] = level[which].count end
  return list
end

describe("the histograms of stats", function()
  local function specs(store)
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

    it("are empty at first, one of each kind for each level", function()
      local stats = manager:stats()
      assert.same(BOUNDS, stats.bounds)
      assert.equal(3, #stats.levels)
      for i, name in ipairs { "user", "account", "resource" } do
        local level = stats.levels[i]
        assert.equal(name, level.name)
        for _, which in ipairs { "waits", "holds" } do
          assert.equal(0, level[which].count)
          assert.equal(0, level[which].seconds)
          consistent(level[which])
        end
      end
    end)

    it("have each call at the level of its deepest target", function()
      for _, target in ipairs { { "h1" }, { "h1", "a1" }, { "h1", "a2" }, { "h1", "a1", "r1" } } do
        assert.is_true(assert(manager:acquire(target)):release())
      end
      local mixed = assert(manager:acquire_all { { "h2" }, { "h1", "a1", "r1" } })
      local stats = manager:stats()
      assert.same({ 1, 2, 2 }, counts(stats, "waits"))
      assert.same({ 1, 2, 1 }, counts(stats, "holds")) -- of what is not held any more
      mixed:release()
      stats = manager:stats()
      assert.same({ 1, 2, 2 }, counts(stats, "holds"))
      for _, level in ipairs(stats.levels) do
        consistent(level.waits)
        consistent(level.holds)
      end
    end)

    it("have how long a lock was held", function()
      local handle = assert(manager:acquire { "h1", "a1" })
      local start = support.now()
      support.sleep(0.03)
      handle:release()
      local elapsed = support.now() - start
      local holds = manager:stats().levels[2].holds
      assert.equal(1, holds.count)
      assert.is_true(holds.seconds >= 0.0299 and holds.seconds < elapsed + 0.5, holds.seconds)
      assert.equal(1, at_least(holds, 0.02))
      consistent(holds)
    end)

    it("have a hold once, whatever ends it", function()
      local handle = assert(manager:acquire { "h1" })
      handle:release { confirm = true }
      handle:release()
      handle = assert(manager:acquire { "h2" })
      assert.is_true(handle:is_held())
      handle = nil -- luacheck: ignore
      support.collect()
      assert.equal(2, manager:stats().levels[1].holds.count)
      manager:with({ "h3" }, function() end)
      assert.equal(3, manager:stats().levels[1].holds.count)
      local pending = manager:start { "h4" }
      support.wait_until(function() return pending:done() end, "the grant")
      pending:cancel()
      support.wait_until(function() return manager:stats().levels[1].holds.count == 4 end, "it to be given back")
      assert.equal(manager:stats().released, 4)
    end)

    it("have how long a call waited, granted or not", function()
      local handle = assert(open():acquire({ "h1", "a1", "r1" }))
      assert.equal("timeout", select(2, manager:acquire({ "h1", "a1", "r1" }, { timeout = 0.03 })).code)
      local waits = manager:stats().levels[3].waits
      assert.equal(1, waits.count)
      assert.is_true(waits.seconds >= 0.03, waits.seconds)
      assert.equal(1, at_least(waits, 0.02))
      consistent(waits)
      assert.equal(0, manager:stats().levels[3].holds.count)

      local pending = manager:start { "h1", "a1" }
      pending:cancel()
      assert.equal("cancelled", select(2, pending:wait()).code)
      pending = manager:start { "h1", "a1" }
      support.sleep(0.03)
      handle:release { confirm = true }
      local got = assert(pending:wait())
      local stats = manager:stats()
      assert.same({ 0, 2, 1 }, counts(stats, "waits"))
      assert.is_true(stats.levels[2].waits.seconds >= 0.0299, stats.levels[2].waits.seconds)
      consistent(stats.levels[2].waits)
      assert.is_true(math.abs(stats.wait_seconds - stats.levels[2].waits.seconds - stats.levels[3].waits.seconds) < 0.01)
      got:release()
    end)

    it("are each manager's own", function()
      assert(manager:acquire { "h1" }):release()
      assert.same({ 0, 0, 0 }, counts(open():stats(), "waits"))
    end)

    it("miss nothing that threads do at once", function()
      local threads = {}
      for i = 1, 3 do threads[i] = support.thread(store) end
      for i, thread in ipairs(threads) do
        thread:start([[
          local user = ...
          for i = 1, 50 do assert(manager:acquire { user, "a" .. i % 3 }):release() end
          local s = manager:stats()
          return s.levels[2].waits.count, s.levels[2].holds.count, s.acquired
        ]], "thread" .. i)
      end
      for _, thread in ipairs(threads) do assert.same({ 50, 50, 50 }, { thread:result() }) end
    end)
  end

  support.each_store(specs)
  support.on_redis(specs)
  support.on_sqlite(specs)
  support.on_memcached(specs)

  support.each_leasing_store(function(plain)
    local store = support.leased(plain)
    setup(function() store.prepare() end)

    it("have a lease until it is given back, over or not, handed over or made of a session", function()
      local manager = support.open(store)
      finally(function() manager:close() end)
      local handle = assert(manager:acquire({ "h1" }, { ttl = 30 }))
      assert.equal(0, manager:stats().levels[1].holds.count)
      assert.is_true(handle:release())
      assert.equal(1, manager:stats().levels[1].holds.count)

      handle = assert(manager:acquire({ "h1" }, { ttl = 30 }))
      local text = assert(handle:export())
      assert.equal(2, manager:stats().levels[1].holds.count)
      handle = assert(manager:import(text))
      assert.equal(2, manager:stats().levels[1].holds.count)
      assert.equal(3, manager:stats().levels[1].waits.count)
      handle:release()
      assert.equal(3, manager:stats().levels[1].holds.count)

      local session = assert(manager:acquire { "h2" })
      if session.kind ~= "session" then return end
      support.sleep(0.03)
      assert.is_true(session:to_lease { ttl = 30 })
      assert.equal(3, manager:stats().levels[1].holds.count)
      local before = manager:stats().levels[1].holds.seconds
      session:release()
      local holds = manager:stats().levels[1].holds
      assert.equal(4, holds.count)
      assert.is_true(holds.seconds - before >= 0.0299, holds.seconds - before) -- from the grant of the session on
    end)
  end)

  it("are of the levels that a manager has", function()
    local manager = assert(hierlock.open("null:", { levels = { "site", "room" } }))
    finally(function() manager:close() end)
    assert(manager:acquire { "s", "r" }):release()
    local stats = manager:stats()
    assert.equal(2, #stats.levels)
    assert.same({ "site", "room" }, { stats.levels[1].name, stats.levels[2].name })
    assert.same({ 0, 1 }, counts(stats, "waits"))
  end)

  it("have what took no time in the first bucket", function()
    local manager = assert(hierlock.open "null:")
    finally(function() manager:close() end)
    for _ = 1, 200 do assert(manager:acquire { "s" }):release() end
    local waits = manager:stats().levels[1].waits
    assert.equal(200, waits.count)
    assert.is_true(waits.buckets[1] > 100, waits.buckets[1])
    assert.is_true(waits.seconds > 0)
  end)
end)
