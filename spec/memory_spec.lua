-- Memory: nothing is left held when Lua runs out of it at any place, with a busy collector, or at the end of a
-- state; and endless cycles do not need more and more of it.

local alloc = require "hierlock_spec.alloc"
local hierlock = require "hierlock"
local support = require "spec.support"

local embedded = support.stores[1]

-- In a state of its own; the directory is its argument.
local SETUP = ([[
  package.path, package.cpath = %q, %q
  hierlock = require "hierlock"
  options = { buckets = 10000, timeout = 5 }
  try = { timeout = 0 }
  manager = assert(hierlock.open("file:" .. ..., options))
]]):format(package.path, package.cpath)

-- The code that runs out of memory at each of its allocations. An error in pcall is one of misuse, or of memory.
local BODY = [[
  local directory = ...
  local other = assert(hierlock.open("file:" .. directory,
    { buckets = 10000, application = "other", on_lost = function() end, timeout = 0 }))
  local handle = assert(manager:acquire({ user = "o1", account = "a", resource = "r" }, { label = "l", timeout = 0 }))
  assert(handle:extend({ user = "o2" }, try))
  assert(handle:is_held() and handle:check() and handle:remaining() > 0)
  assert(handle.mode .. handle.token .. handle.level .. handle.waited .. #handle.targets .. tostring(handle))
  local nothing, err = other:acquire_user("o1", try)
  assert(nothing == nil and err.code == "timeout", err)
  assert(tostring(err) .. err .. "text")
  nothing, err = handle:extend({ user = "o3", account = string.rep("x", 500) }, try)
  assert(nothing, err)
  assert(#assert(manager:holders { user = "o1" }) == 1)
  assert(handle:release { confirm = true })
  assert(manager:acquire_user("o1", try)):release()
  assert(manager:acquire_account("o1", 2, try)):release()
  assert(other:acquire_resource("o1", 2, "r", try)):release()
  assert(manager:acquire_resources("o1", "a", { "r1", "r2", "r3" }, try)):release()
  assert(manager:acquire_all({ { "o1", "a" }, { user = "o2", mode = "shared" }, { "o3", "a", "r", mode = "shared" } }, try)):release()
  local plan = hierlock.plan({ { "o1", "a" }, { "o2" }, { "o3" } }, { levels = { "x", "y" }, buckets = 100 })
  assert(plan:rows()[1].bucket and plan:sql("mysql") and plan:verify(4) and tostring(plan))
  assert(plan:verify(3) == nil)
  assert(manager:with({ "o1" }, try, function(held, ...) return ... end, "a", "b") == "a")
  pcall(manager.with, manager, { "o1" }, try, function() error("raised") end)
  pcall(manager.acquire, manager, {})
  assert(hierlock.open("nonsense") == nil)
  assert(hierlock.open("file:" .. directory, { buckets = 1 }) == nil)
  assert(manager:stats().held >= 0)
  local kept = assert(other:acquire { "o4" })
  other:close()
  assert(kept:check() == nil)
  forgotten = manager:acquire({ "o5" }, try)
  forgotten = nil
]]

local CHECK = [[
  for _ = 1, 3 do collectgarbage() end
  local stats = manager:stats()
  assert(stats.held == 0 and stats.waiting == 0, "held " .. stats.held .. ", waiting " .. stats.waiting)
  local all = {}
  for i = 1, 5 do all[i] = { "o" .. i } end
  assert(manager:acquire_all(all, try)):release()
]]

-- Leases likewise: forgetting them does not release them.
local LEASES = [[
  text = nil
  local handle = assert(manager:acquire({ "o1" }, { ttl = 600, timeout = 0, owner = "me" }))
  assert(handle:refresh(300))
  text = assert(handle:export())
  handle = assert(manager:import(text))
  text = nil
  local session = assert(manager:acquire({ "o2" }, try))
  assert(session:to_lease { ttl = 600 })
  assert(#assert(manager:leases { owner = "me" }) == 1)
  assert(manager:revoke({ target = { "o2" } }, { by = "admin", reason = "memory" }) == 1)
  local nothing, err = session:check()
  assert(nothing == nil and err.revoked_by == "admin")
  assert(handle:release())
]]

local LEASES_CHECK = [[
  local handle = text and manager:import(text)
  if handle then handle:release() end
]] .. CHECK .. [[
  assert(#assert(manager:leases()) == 0, "a lease stays")
]]

-- A stack that could not grow is reported as too deep: lua_checkstack does not say why.
local function is_about_memory(message)
  return message:find("not enough memory", 1, true) or message:find("error in error handling", 1, true)
    or message:find("stack overflow (target)", 1, true)
end

describe("when Lua runs out of memory", function()
  local directory = embedded.directory
  if select("#", alloc.run("", "", "", "", 0, 0)) == 0 then
    return pending("this Lua has no states with allocators of one's own")
  end

  -- The n-th allocation of body fails, and so many behind it. Returns its message.
  local function one_place(setup, body, check, n, failures)
    local message, _, wrong = alloc.run(setup, body, check, directory, n, failures)
    assert(not wrong, ("allocation %d: afterwards: %s"):format(n, tostring(wrong)))
    assert(not message or is_about_memory(message), ("allocation %d: %s"):format(n, tostring(message)))
    return message
  end
  local function every_place(setup, body, check)
    local n = 0
    repeat
      n = n + 1
      assert(n < 20000, "it never passes")
    until not one_place(setup, body, check, n, -1)
    return n
  end

  it("nothing needs memory that is not there, without failures", function()
    local message, requests, wrong = alloc.run(SETUP, BODY, CHECK, directory, 0, 0)
    assert.same({ false, false }, { message, wrong })
    assert.is_true(requests > 100)
  end)

  it("at any place, and stays out of it, nothing stays held", function()
    assert.is_true(every_place(SETUP, BODY, CHECK) > 100)
    local observer = support.open(embedded)
    assert(observer:acquire_all({ { "o1" }, { "o2" }, { "o3" }, { "o4" }, { "o5" } }, { timeout = 0 }))
    observer:close()
  end)

  it("at any place of calls on leases, none stays", function()
    assert.is_true(every_place(SETUP, LEASES, LEASES_CHECK) > 20)
    local failures = _VERSION == "Lua 5.1" and 1 or 2
    local _, requests = alloc.run(SETUP, LEASES, LEASES_CHECK, directory, 0, 0)
    for n = 1, requests do one_place(SETUP, LEASES, LEASES_CHECK, n, failures) end
  end)

  it("at one place only, nothing stays held either", function()
    -- Lua 5.2 and later collect, and try again, before they give up.
    local failures = _VERSION == "Lua 5.1" and 1 or 2
    local _, requests = alloc.run(SETUP, BODY, CHECK, directory, 0, 0)
    for n = 1, requests do one_place(SETUP, BODY, CHECK, n, failures) end
  end)

  -- A call's own memory, beside Lua's, is large here, so that a leak of it shows.
  for name, body in pairs {
    ["what a DSN says"] = [[ require("hierlock.core").dsn("mysql://u:" .. ("p"):rep(4000) .. "@h/d") ]],
    ["an extend"] = [[
      local handle = assert(manager:acquire({ "o1" }, try))
      assert(handle:extend({ user = ("u"):rep(250) }, try))
      pcall(handle.extend, handle, { user = ("u"):rep(250), account = {} })
    ]],
  } do
    it("at any place of " .. name .. ", nothing is leaked", function()
      local function passes()
        local before = alloc.heap()
        for _ = 1, 20 do every_place(SETUP, body, CHECK) end
        return alloc.heap() - before
      end
      passes() -- malloc keeps some for next time
      local more = passes()
      assert.is_true(more < 100000, more .. " bytes more")
    end)
  end

  it("while the module is loaded, it can be loaded later", function()
    local paths = ("package.path, package.cpath = %q, %q"):format(package.path, package.cpath)
    every_place(paths, [[ require "hierlock" ]],
      [[ -- 5.1 keeps marks there
         for _, name in ipairs { "hierlock", "hierlock.core", "hierlock.waiting" } do package.loaded[name] = nil end
         assert(require("hierlock").open("null:")):close() ]])
  end)
end)

-- A value whose finalizer is fn.
local FINALIZER = [[
  local function finalizer(fn)
    if not newproxy then return setmetatable({}, { __gc = fn }) end
    local proxy = newproxy(true)
    getmetatable(proxy).__gc = fn
    return proxy
  end
]]
local finalizer = (loadstring or load)(FINALIZER .. " return finalizer")()

describe("under a collector that always runs", function()
  local pause, stepmul
  before_each(function()
    pause, stepmul = collectgarbage("setpause", 0), collectgarbage("setstepmul", 400)
  end)
  after_each(function()
    collectgarbage("setpause", pause)
    collectgarbage("setstepmul", stepmul)
  end)

  for _, dsn in ipairs { embedded.dsn, "null:" } do
    it("on " .. dsn:match("^%a+:") .. " locks are as held as ever", function()
      local manager = assert(hierlock.open(dsn, embedded.options))
      for i = 1, 100 do
        local handle = assert(manager:acquire_resources("c1", i, { "r1", "r2" }, { timeout = 0, label = "label" .. i }))
        assert.equal("r1", handle.targets[1].resource)
        assert(manager:with({ "c2", i }, { timeout = 0 }, function(h) assert(h:extend { "c3", i }) return h:is_held() end))
        local _, err = manager:acquire(setmetatable({ "c1" }, nil), { timeout = 0 })
        assert(dsn == "null:" or err.code == "timeout" and tostring(err))
        assert(handle:is_held() and handle:release())
        assert(#hierlock.plan({ { "c1", i } }):rows() == 2)
      end
      manager:close()
    end)

    it("on " .. dsn:match("^%a+:") .. " finalizers may acquire, release and close", function()
      local manager = assert(hierlock.open(dsn, embedded.options))
      local ran, errors = 0, {}
      local shared = { timeout = 0, mode = "shared" } -- buckets may meet
      for i = 1, 200 do
        local held = assert(manager:acquire({ "f", i, "r" }, shared))
        finalizer(function()
          ran = ran + 1
          local ok, err = pcall(function()
            assert(held:release())
            assert(manager:acquire({ "f", i, "r" }, shared)):release()
            assert(manager:acquire({ "g", i, ran }, shared))
            if i % 20 == 0 then assert(hierlock.open(dsn, embedded.options)):acquire { "h", i } end
          end)
          if not ok then errors[#errors + 1] = tostring(err) end
        end)
      end
      for _ = 1, 4 do collectgarbage() end
      assert.equal("", table.concat(errors, "\n"))
      assert.equal(200, ran)
      assert.equal(0, manager:stats().held)
      manager:close()
    end)
  end
end)

describe("at the end of a Lua state, all is well with", function()
  local scenarios = {
    ["handles and managers in globals"] = [[ m = open() h = m:acquire { "x" } i = m:acquire { "y", "a" } ]],
    ["a handle without its manager"] = [[ h = open():acquire { "x" } ]],
    ["a closed manager and its handles"] = [[ m = open() h = m:acquire { "x" } m:close() ]],
    ["released handles"] = [[ m = open() h = m:acquire { "x" } h:release() ]],
    ["cycles"] = [[ local m = open() local t = { m = m, h = m:acquire { "x" } } t.t = t m, u = nil, t ]],
    ["many managers"] = [[ t = {} for i = 1, 50 do t[i] = open() t[-i] = t[i]:acquire { "x", i } end ]],
    ["a callback that refers to its manager"] = [[ m = open { on_lost = function() return m, h end } h = m:acquire { "x" } ]],
    ["finalizers that use what is collected before them"] = [[
      t = {}
      t.f = finalizer(function() use(t) end)
      t.m = open()
      t.h, t.p = t.m:acquire { "x" }, hierlock.plan { { "x" } } ]],
    ["finalizers that use what is collected after them"] = [[
      t = { m = open() }
      t.h, t.p = t.m:acquire { "x" }, hierlock.plan { { "x" } }
      t.f = finalizer(function() use(t) end) ]],
    ["finalizers that acquire"] = [[
      t = {}
      for i = 1, 10 do
        t[#t + 1] = finalizer(function() kept = open():acquire({ "z", i }) late = hierlock.plan { { "x" } } end)
        t[#t + 1] = open()
      end ]],
    ["a coroutine that was left inside of with"] = [[
      m = open()
      c = coroutine.create(function() m:with({ "x" }, function() coroutine.yield() end) end)
      coroutine.resume(c) ]],
    ["plans and errors"] = [[ p = hierlock.plan { { "x" } } e = select(2, hierlock.open("nonsense")) ]],
    ["an end by os.exit"] = [[ m = open() h = m:acquire { "x" } os.exit(0, true) ]],
    ["an end by os.exit that closes nothing"] = [[ m = open() h = m:acquire { "x" } os.exit(0) ]],
  }
  for title, chunk in pairs(scenarios) do
    for _, dsn in ipairs { embedded.dsn, "null:" } do
      it(title .. ", on " .. dsn:match("^%a+:"), function()
        local output, status = support.run(([[
          hierlock = require "hierlock"
          %s
          function open(options)
            options = options or {}
            options.buckets, options.timeout = 10000, 0
            return assert(hierlock.open("%s", options))
          end
          function use(t)
            t.h:is_held() t.h:check() t.h:remaining() t.h:extend { "y" } t.h:release()
            tostring(t.h) tostring(t.m) pcall(tostring, t.p)
            pcall(t.m.acquire, t.m, { "x" }) pcall(t.m.stats, t.m) t.m:close()
          end
          %s]]):format(FINALIZER, dsn, chunk))
        assert.equal("", output)
        assert.equal(0, status)
        if dsn ~= "null:" then
          local manager = support.open(embedded)
          assert(manager:acquire_all({ { "x" }, { "y" }, { "z" } }, { timeout = 0 }))
          manager:close()
        end
      end)
    end
  end
end)

describe("cycles without end leave memory where it was:", function()
  local function resident()
    local file = assert(io.open("/proc/self/statm"))
    local pages = tonumber(file:read("*a"):match("^%d+ (%d+)"))
    file:close()
    return pages * 4
  end

  -- Collects now and then, because the amount of garbage is not the point; twice, because an object with a finalizer
  -- is freed the second time.
  local function stays(n, cycle, most)
    local before, kilobytes
    for i = 1, n do
      cycle(i)
      if i % (n / 50) == 0 then
        collectgarbage()
        collectgarbage()
      end
      if i == n / 5 then before, kilobytes = resident(), collectgarbage("count") end
    end
    assert.is_true(collectgarbage("count") - kilobytes < 200, "Lua's grew by " .. collectgarbage("count") - kilobytes .. " KiB")
    assert.is_true(resident() - before < (most or 2048), "the process grew by " .. resident() - before .. " KiB")
  end

  for dsn, case in pairs { [embedded.dsn] = { 100000, 2048 }, ["null:"] = { 200000, 400 } } do
    local n, most = case[1], case[2]
    it(n .. " times acquire and release on " .. dsn:match("^%a+:"), function()
      local manager = assert(hierlock.open(dsn, embedded.options))
      local ids = { "u", "a", "r" }
      stays(n, function(i)
        ids[3] = i % 5000
        assert(manager:acquire(ids)):release()
      end, most)
      manager:close()
    end)
  end

  it("handles that are left to the collector", function()
    local manager = support.open(embedded)
    stays(20000, function(i) assert(manager:acquire({ "u", "a", i }, { mode = "shared" })) end)
    manager:close()
  end)

  it("refused acquisitions, and errors", function()
    local manager, other = support.open(embedded), support.open(embedded)
    local handle = assert(manager:acquire { "u" })
    stays(8000, function() assert(not other:acquire({ "u", "a" }, { timeout = 0 })) end)
    assert(handle:release())
    stays(8000, function() assert(not pcall(manager.acquire, manager, {})) end)
    manager:close()
    other:close()
  end)

  it("managers that are opened, used and closed", function()
    stays(2000, function(i)
      local manager = support.open(embedded)
      assert(manager:acquire { "u", i })
      manager:close()
    end)
  end)
end)
