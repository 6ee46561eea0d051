-- A release that was called is done when the process has ended, however it ends, and the end takes no longer than a
-- round trip.
local proxy = require "spec.support.proxy"
local support = require "spec.support"

-- The longest end of a program, which takes a trip. A server that hangs may take longer.
local PROMPT = 1.5
local MANY = 60

-- Releases all its locks, says when, and ends.
local PROGRAM = [[
  local uv = require "luv"
  local manager = assert(require "hierlock".open(%q, %s))
  local handles = {}
  for i = 1, %d do
    handles[i] = assert(manager:acquire({ "exit", "a", "r" .. i }, { ttl = 300, timeout = 20 }))
  end
  for _, handle in ipairs(handles) do assert(handle:release()) end
  io.write(("%%.6f"):format(uv.hrtime() / 1e9))
  io.flush()
  %s]]

-- The close leaves leases without auto_release to themselves.
local BEHIND = [[
  local manager = assert(require "hierlock".open(%q, %s))
  local handles = {}
  for i = 1, 20 do
    handles[i] = assert(manager:acquire({ "exit", "a", "r" .. i }, { ttl = 300, timeout = 20, auto_release = false }))
  end
  manager:close()
  for _, handle in ipairs(handles) do assert(handle:release()) end
  os.exit(0)]]

local SCARCE = [[
  local manager = assert(require "hierlock".open(%q, %s))
  local lease = assert(manager:acquire({ "exit", "a", "r" }, { ttl = 300, timeout = 20 }))
  local sessions = {}
  for i = 1, manager:stats().connections + 1 do sessions[i] = assert(manager:acquire({ "exit", "b", "r" .. i })) end
  assert(lease:release())
  os.exit(0)]]

local ANY = [[
  local manager = assert(require "hierlock".open(%q, %s))
  local targets = {}
  for i = 1, 8 do targets[i] = { "exit", "a", "r" .. i } end
  assert(assert(manager:start_any(targets, { ttl = 300 })):wait(20)):release()
  manager:close()
  os.exit(0)]]

local ENDS = {
  { "at the end of the script", "", 0 },
  { "by os.exit", "os.exit(0)", 0 },
  { "by os.exit, which closes the Lua state", "os.exit(0, true)", 0 },
  { "by an error at top level", "error 'the end'", 1 },
  { "by os.exit after it has closed the manager", "manager:close() os.exit(0)", 0 },
}

describe("a process that ends after it has released leases", function()
  support.each_leasing_store(function(store)
    store = support.leased(store)
    local manager

    setup(function() store.prepare() end)
    before_each(function() manager = support.open(store) end)
    after_each(function()
      assert(manager:revoke { target = { "exit" } })
      manager:close()
    end)

    local function run(program, ...)
      local buckets = store.options.buckets
      return support.run(program:format(store.dsn, buckets and ("{ buckets = %d }"):format(buckets) or "nil", ...))
    end

    for _, last in ipairs(ENDS) do
      for _, n in ipairs { 2, MANY } do
        it(("leaves none of %d, and ends at once: %s"):format(n, last[1]), function()
          local output, status = run(PROGRAM, n, last[2])
          local took = support.now() - (tonumber(output:match "^%d+%.%d+") or 0)
          assert.equal(last[3], status, output)
          assert.equal(0, #assert(manager:leases { target = { "exit" } }))
          assert.is_true(took < PROMPT, ("the end took %.3f s"):format(took))
        end)
      end
    end

    if store.server then
      for _, last in ipairs { "os.exit(0)", "manager:close() os.exit(0)" } do
        it("takes a few trips for many, and no connection for each: " .. last, function()
          local between = proxy.open(store)
          finally(function() between.close() end)
          local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
          peer:call([[
            for i = 1, ... do handles[i] = assert(manager:acquire({ "exit", "a", "r" .. i }, { ttl = 300, timeout = 20 })) end
          ]], MANY)
          local connections, turns = #between.connections, between.turns
          peer:start("for _, handle in ipairs(handles) do assert(handle:release()) end " .. last):join()
          assert.equal(0, #assert(manager:leases { target = { "exit" } }))
          assert.is_true(#between.connections - connections <= 3, #between.connections - connections)
          -- Redis and Memcached are told of one lease after the other.
          if store.dialect then assert.is_true(between.turns - turns <= MANY / 3, between.turns - turns) end
        end)
      end
    end

    -- Session locks keep all its connections, and exit() begins while the worker that gives the lease back has none.
    if not store.leases_only then
      it("leaves none for which it needs a connection more", function()
        for _ = 1, 5 do
          local output, status = run(SCARCE)
          assert.equal(0, status, output)
          assert.equal(0, #assert(manager:leases { target = { "exit" } }))
        end
      end)
    end

    it("leaves none that it releases behind the close of their manager", function()
      local output, status = run(BEHIND)
      assert.equal(0, status, output)
      assert.equal(0, #assert(manager:leases { target = { "exit" } }))
    end)

    -- The other waits are given up when the first is granted, and may be granted just then.
    it("leaves none of what it started, and did not want, when it closes the manager", function()
      for _ = 1, 4 do
        local output, status = run(ANY)
        assert.equal(0, status, output)
        assert.equal(0, #assert(manager:leases { target = { "exit" } }))
      end
    end)
  end)
end)
