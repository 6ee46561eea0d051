-- manager:with and hierlock.with: a lock for as long as a function runs. Results are passed through, and nothing
-- stays held, however the function ends.

local hierlock = require "hierlock"
local support = require "spec.support"

local unpack = table.unpack or unpack

describe("with", function()
  local manager, observer
  before_each(function()
    manager, observer = support.open(support.stores[1]), support.open(support.stores[1])
  end)
  after_each(function()
    manager:close()
    observer:close()
  end)

  local function is_free()
    local handle = observer:acquire({ "w1" }, { timeout = 0 })
    if handle then handle:release() end
    return handle ~= nil
  end

  local function pack(...) return { n = select("#", ...), ... } end

  it("holds the lock while the function runs, and not afterwards", function()
    local held
    manager:with({ "w1" }, function(handle) held = handle:is_held() and not is_free() end)
    assert.is_true(held)
    assert.is_true(is_free())
  end)

  for _, values in ipairs { { n = 0 }, { n = 1 }, { n = 1, 7 }, { n = 3, nil, 2, nil }, { n = 2, false, nil }, { n = 4 } } do
    it("passes " .. values.n .. " results through, nils included", function()
      assert.same(values, pack(manager:with({ "w1" }, function() return unpack(values, 1, values.n) end)))
    end)
    it("passes " .. values.n .. " arguments on behind the handle, nils included", function()
      local got
      manager:with({ "w1" }, {}, function(handle, ...)
        got = pack(...)
        assert.is_true(handle:is_held())
      end, unpack(values, 1, values.n))
      assert.same(values, got)
    end)
  end

  it("takes options, or none, or nil", function()
    local target = { "w1", "a", "r" }
    assert.equal("exclusive", manager:with(target, function(handle) return handle.mode end))
    assert.equal("exclusive", manager:with(target, nil, function(handle) return handle.mode end))
    assert.equal("shared", manager:with(target, { mode = "shared" }, function(handle) return handle.mode end))
    assert.equal(5, manager:with(target, function(_, n) return n end, 5))
  end)

  it("releases when the function raises, and raises the same", function()
    for _, raised in ipairs { {}, setmetatable({}, { __tostring = function() return "t" end }), 42, true, print } do
      local ok, caught = pcall(manager.with, manager, { "w1" }, function() error(raised, 0) end)
      assert.is_false(ok)
      assert.equal(raised, caught)
      assert.is_true(is_free())
    end
  end)

  it("raises nil where the function raised nil", function()
    local ok, caught = pcall(manager.with, manager, { "w1" }, function() error() end)
    assert.is_false(ok)
    assert.is_true(caught == nil or type(caught) == "string") -- as the Lua has it
    assert.is_true(is_free())
  end)

  it("adds the traceback of the place that raised to a string", function()
    local here = debug.getinfo(1, "l").currentline
    local function innermost() error("broken") end
    local function inner() innermost() return 1 end
    local ok, caught = pcall(manager.with, manager, { "w1" }, function() inner() return 1 end)
    assert.is_false(ok)
    assert.matches("^[^:]*with_spec.lua:" .. here + 1 .. ": broken\n", caught)
    assert.matches("traceback", caught)
    assert.matches("with_spec.lua:" .. here + 2 .. ":", caught)
    assert.matches("with_spec.lua:" .. here + 3 .. ":", caught)
  end)

  it("adds one traceback to what is raised through many of it", function()
    local function nest(n)
      if n == 0 then error "broken" end
      return manager:with({ "w1", "a" .. n }, function() return nest(n - 1) end)
    end
    local ok, caught = pcall(nest, 30)
    assert.is_false(ok)
    assert.equal(1, select(2, caught:gsub("stack traceback:", "")))
    assert.is_true(#caught < 20000, #caught)
  end)

  it("passes errors of its own kind on as they are", function()
    local ok, caught = pcall(manager.with, manager, { "w1" }, function()
      error(select(2, hierlock.open("nonsense")))
    end)
    assert.is_false(ok)
    assert.is_true(hierlock.is_error(caught))
  end)

  it("releases after a stack overflow", function()
    local function endless() return 1 + endless() end
    assert.is_false(pcall(manager.with, manager, { "w1" }, endless))
    assert.is_true(is_free())
  end)

  it("does not run the function when the lock is not granted", function()
    local handle, ran = assert(observer:acquire { "w1" }), false
    local result, err = manager:with({ "w1" }, { timeout = 0 }, function() ran = true end)
    handle:release()
    assert.is_nil(result)
    assert.equal("timeout", err.code)
    assert.is_false(ran)
  end)

  it("does not mind that the function has released already", function()
    assert.equal("fine", manager:with({ "w1" }, function(handle) handle:release() return "fine" end))
  end)

  it("does not mind that the function has closed the manager", function()
    assert.equal("fine", manager:with({ "w1" }, function() manager:close() return "fine" end))
    assert.is_true(is_free())
  end)

  it("is nil, lost when the lock was lost while the function ran", function()
    local directory = support.stores[1].directory .. "/with-lost"
    local own = assert(hierlock.open("file:" .. directory))
    local result, err = own:with({ "w1" }, function()
      assert(os.remove(directory .. "/control"))
      return "as if nothing had happened"
    end)
    own:close()
    assert.is_nil(result)
    assert.equal("lost", err.code)
  end)

  it("raises what the function raised also when the lock was lost", function()
    local directory = support.stores[1].directory .. "/with-lost-2"
    local own = assert(hierlock.open("file:" .. directory))
    local raised = {}
    local ok, caught = pcall(own.with, own, { "w1" }, function()
      assert(os.remove(directory .. "/control"))
      error(raised)
    end)
    own:close()
    assert.is_false(ok)
    assert.equal(raised, caught)
  end)

  it("can be nested", function()
    local result = manager:with({ "w1", "a", "r1" }, function()
      return manager:with({ "w1", "a", "r2" }, function()
        return manager:stats().held
      end)
    end)
    assert.equal(2, result)
    assert.equal(0, manager:stats().held)
  end)

  it("gives the lock back with a coroutine that is never resumed again", function()
    local thread = coroutine.create(function()
      -- Where a coroutine cannot yield inside of with (Lua 5.1), it ends here.
      manager:with({ "w1" }, function() coroutine.yield() end)
    end)
    coroutine.resume(thread)
    thread = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
    assert.is_true(is_free())
  end)

  if coroutine.close then
    it("gives the lock back at once when its coroutine is closed from outside", function()
      local thread = coroutine.create(function()
        manager:with({ "w1" }, function() coroutine.yield() end)
      end)
      assert(coroutine.resume(thread))
      assert.is_false(is_free())
      assert(coroutine.close(thread))
      assert.is_true(is_free())
      -- The function may also clean up for itself.
      local closed
      thread = coroutine.create(function()
        manager:with({ "w1" }, function(handle)
          local first = setmetatable({}, { __close = function() closed = handle:is_held() end })
          for _ in next, { 1 }, nil, first do coroutine.yield() end
        end)
      end)
      assert(coroutine.resume(thread))
      assert(coroutine.close(thread))
      assert.is_true(closed) -- first
      assert.is_true(is_free())
    end)

    it("waits no longer when its coroutine is closed while it waits", function()
      local yielding = assert(hierlock.open(support.stores[1].dsn, {
        buckets = support.stores[1].options.buckets, timeout = 15,
        loop = function(pending) while not pending:done() do coroutine.yield() end end,
      }))
      local holder = assert(observer:acquire { "w1" })
      local thread = coroutine.create(function() return yielding:with({ "w1" }, print) end)
      assert(coroutine.resume(thread))
      assert.equal(1, yielding:stats().waiting)
      assert(coroutine.close(thread))
      assert.equal(0, yielding:stats().waiting)
      holder:release { confirm = true }
      -- The cancelled thread may still get the lock, and gives it back then.
      support.wait_until(is_free, "the end of the wait")
      yielding:close()
    end)
  end

  -- Lua 5.1 cannot yield across pcall.
  if _VERSION ~= "Lua 5.1" or rawget(_G, "jit") then
    it("lets the function yield, and holds the lock meanwhile", function()
      local thread = coroutine.wrap(function()
        return manager:with({ "w1" }, function(_, first)
          local second = coroutine.yield(first)
          return first, second
        end, "a")
      end)
      assert.equal("a", thread())
      assert.is_false(is_free())
      assert.same({ n = 2, "a", "b" }, pack(thread("b")))
      assert.is_true(is_free())
    end)
  end

  it("of the module uses the default manager", function()
    local output, status = support.run([[
      local hierlock = require "hierlock"
      print(hierlock.with({"w1"}, function(handle, x) return handle:is_held(), x end, 7))
      print(hierlock.with({"w1"}, {timeout = 0}, function() return nil end))
      print(pcall(hierlock.with, {"w1"}, function() error({}, 0) end))
    ]], "HIERLOCK_DSN=null:")
    assert.matches("^true\t7\nnil\nfalse\ttable: ", output)
    assert.equal(0, status)
    output = support.run([[print(require("hierlock").with({"w1"}, print))]], "HIERLOCK_DSN=nonsense")
    assert.matches("^nil\tdsn: ", output)
  end)
end)
