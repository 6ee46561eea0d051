-- A manager's reports about its program: handles that only the collector has released, and locks that are taken in
-- changing orders.

local hierlock = require "hierlock"
local support = require "spec.support"

local store = support.stores[1]

local managers
local function open(options)
  managers[#managers + 1] = support.open(store, options)
  return managers[#managers]
end

local function line() return debug.getinfo(2, "l").currentline end

local function collector(reports)
  return function(message) reports[#reports + 1] = message end
end

-- Runs a chunk as a program of its own; returns its output on stderr.
local function stderr(chunk, environment)
  local output = support.run(([[
    local hierlock = require "hierlock"
    local dsn, buckets = %q, %d
    %s
  ]]):format(store.dsn, store.options.buckets, chunk), environment)
  return output
end

describe("warn_unreleased", function()
  before_each(function() managers = {} end)
  after_each(function() for _, manager in ipairs(managers) do manager:close() end end)

  it("tells of a handle that only the collector has released, at the next call, with its line", function()
    local reports = {}
    local manager = open { warn_unreleased = collector(reports) }
    local at = line() + 2
    do
      assert(manager:acquire { "u1", "a1" })
    end
    support.collect()
    assert.equal(0, #reports)
    assert.equal(0, manager:stats().held)
    assert.equal(1, #reports)
    assert.truthy(reports[1]:find("u1/a1", 1, true), reports[1])
    assert.truthy(reports[1]:find("check_spec.lua:" .. at, 1, true), reports[1])
  end)

  it("tells of nothing else", function()
    local reports = {}
    local manager = open { warn_unreleased = collector(reports) }
    assert(manager:acquire { "u1" }):release()
    assert(manager:with({ "u1" }, function() return true end))
    assert(manager:acquire({ "u1" }, { ttl = 600, auto_release = false, owner = "check" }))
    assert(manager:start { "u2" }):cancel()
    support.collect()
    assert.equal(1, manager:revoke { owner = "check" })
    local closed = open { warn_unreleased = collector(reports) }
    assert(closed:acquire { "u1" })
    closed:close()
    support.collect()
    manager:stats()
    assert.same({}, reports)
  end)

  it("passes on what its function raises, and tells the rest next", function()
    local n = 0
    local manager = open { warn_unreleased = function() n = n + 1 error "told" end }
    for i = 1, 3 do assert(manager:acquire { "u" .. i }) end
    support.collect()
    for i = 1, 3 do
      assert.has_error(function() manager:stats() end)
      assert.equal(i, n)
    end
    assert(manager:stats())
  end)

  it("may close the manager in it", function()
    local manager
    manager = open { warn_unreleased = function() manager:close() end }
    assert(manager:acquire { "u1" })
    support.collect()
    assert.has_error(function() manager:stats() end)
  end)

  it("tells the last ones when the manager is closed", function()
    local reports = {}
    local manager = open { warn_unreleased = collector(reports) }
    assert(manager:acquire { "u1" })
    support.collect()
    manager:close()
    assert.equal(1, #reports)
  end)

  it("writes to stderr with true, at the end of the program, too", function()
    local output = stderr [[
      local manager = assert(hierlock.open(dsn, { buckets = buckets, warn_unreleased = true }))
      local handle = assert(manager:acquire { "u1" })
    ]]
    assert.truthy(output:find("hierlock: u1, acquired at ", 1, true), output)
    assert.equal("", (stderr [[
      local manager = assert(hierlock.open(dsn, { buckets = buckets }))
      local handle = assert(manager:acquire { "u1" })
    ]]))
  end)

  it("wants a boolean or a function", function()
    for _, name in ipairs { "warn_unreleased", "check_order" } do
      assert.has_error(function() hierlock.open("null:", { [name] = 1 }) end)
    end
  end)
end)

describe("check_order", function()
  before_each(function() managers = {} end)
  after_each(function() for _, manager in ipairs(managers) do manager:close() end end)

  local function nested(manager, first, second, options)
    local x = assert(manager:acquire(first, options and options[1]))
    local y = assert(manager:acquire(second, options and options[2]))
    y:release()
    x:release { confirm = true }
  end

  -- The process keeps the learned orders: each spec has kinds of its own.
  local n = 0
  local function labels()
    n = n + 1
    local name = ("spec %s"):format(string.char(96 + n))
    return { { label = name .. " first" }, { label = name .. " second" } }, { { label = name .. " second" }, { label = name .. " first" } }
  end

  it("tells the first time that two kinds are taken in both orders, with all four lines", function()
    local reports = {}
    local manager = open { check_order = collector(reports) }
    local forth, back = labels()
    for i = 1, 3 do nested(manager, { "u" .. i, "a", "r" }, { "v" .. i }, forth) end
    manager:stats()
    assert.same({}, reports)
    local x = assert(manager:acquire({ "w1" }, back[1]))
    local at = line() - 1
    local y = assert(manager:acquire({ "w2", "a", "r" }, back[2]))
    manager:stats()
    assert.equal(1, #reports)
    assert.truthy(reports[1]:find("check_spec.lua:" .. at, 1, true), reports[1])
    assert.truthy(reports[1]:find("check_spec.lua:" .. at + 2, 1, true), reports[1])
    local _, lines = reports[1]:gsub("check_spec%.lua:%d+", "")
    assert.equal(4, lines)
    x:release()
    y:release()
    nested(manager, { "w1" }, { "w2", "a", "r" }, back)
    nested(manager, { "u1", "a", "r" }, { "v1" }, forth)
    manager:stats()
    assert.equal(1, #reports)
  end)

  it("finds a circle of three", function()
    local reports = {}
    local manager = open { check_order = collector(reports) }
    local kinds = { { label = "three: x" }, { label = "three: y" }, { label = "three: z" } }
    for i = 1, 3 do
      manager:stats()
      assert.equal(0, #reports)
      nested(manager, { "u" .. i }, { "v" .. i }, { kinds[i], kinds[i % 3 + 1] })
    end
    manager:stats()
    assert.equal(1, #reports)
  end)

  it("takes the digits of labels for one kind, and knows nodes apart within one", function()
    local reports = {}
    local manager = open { check_order = collector(reports) }
    for i = 1, 3 do nested(manager, { "a" .. i }, { "b" .. i }, { { label = "order " .. i }, { label = "order 4" .. i } }) end
    manager:stats()
    assert.same({}, reports)
    nested(manager, { "b2" }, { "a2" }, { { label = "order 7" }, { label = "order 8" } })
    manager:stats()
    assert.equal(1, #reports)
    assert.truthy(reports[1]:find('order #', 1, true), reports[1])
  end)

  it("takes no notice of who tries once, of one call's own order, and of other coroutines", function()
    local reports = {}
    local manager = open { check_order = collector(reports) }
    local forth, back = labels()
    nested(manager, { "u1", "a", "r" }, { "v1" }, forth)
    local x = assert(manager:acquire({ "w1" }, back[1]))
    local y = assert(manager:acquire({ "w2", "a", "r" }, { label = back[2].label, timeout = 0 }))
    y:release()
    coroutine.wrap(function() assert(manager:acquire({ "w2", "a", "r" }, back[2])):release() end)()
    x:release()
    assert(manager:acquire_all({ { "w2", "a", "r" }, { "w1" } }, back[1])):release()
    manager:stats()
    assert.same({}, reports)
  end)

  it("sees what an extend adds", function()
    local reports = {}
    local manager = open { check_order = collector(reports) }
    local forth, back = labels()
    nested(manager, { "u1", "a", "r" }, { "v1" }, forth)
    local x = assert(manager:acquire({ "w1" }, back[1]))
    assert(x:extend({ "w2", "a", "r" }, back[2]))
    manager:stats()
    assert.equal(1, #reports)
    x:release()
  end)

  it("is learnt by all threads, and asked for by the environment", function()
    local chunk = [[
      local thread = require "cqueues.thread"
      local manager = assert(hierlock.open(dsn, { buckets = buckets }))
      local x = assert(manager:acquire { "u1" })
      local y = assert(manager:acquire { "u2", "a1" })
      x:release() y:release()
      local other = thread.start(function(_, dsn, buckets, path, cpath)
        package.path, package.cpath = path, cpath
        local manager = assert(require "hierlock".open(dsn, { buckets = tonumber(buckets) }))
        local x = assert(manager:acquire { "u2", "a1" })
        local y = assert(manager:acquire { "u1" })
        x:release() y:release()
      end, dsn, tostring(buckets), package.path, package.cpath)
      assert(other:join())
    ]]
    local output = stderr(chunk, "HIERLOCK_CHECK=1")
    assert.truthy(output:find("locks are taken in a circle of orders", 1, true), output)
    assert.equal("", (stderr(chunk)))
    assert.equal("", (stderr(chunk, "HIERLOCK_CHECK=0")))
  end)
end)
