-- Finalizers and callbacks that pull the ground from under a call: they run inside of it, at any of its allocations,
-- and close, finalize or change its objects. The call raises, fails or succeeds; it never touches a freed object
-- (make asan sees whether it does).

local support = require "spec.support"

-- at_every_moment(prepare, call, interfere): for n = 1, 2 ... runs call(subject), and
-- interfere(subject) within the n-th of its moments at which the collector runs
-- finalizers, until it has fewer moments. Returns how many there were.
local HARNESS = [[
  local hierlock = require "hierlock"
  local core = require "hierlock.core"
  local dsn = %q
  local options = { buckets = 10000, timeout = 0 }

  -- From now on a whole collection runs wherever Lua looks whether it is time for a step.
  if _VERSION >= "Lua 5.4" then
    collectgarbage("incremental", 1, 1000, 63)
  else
    collectgarbage("setstepmul", _VERSION == "Lua 5.1" and 0 or 1000000000)
  end

  local function finalizer(fn)
    if not newproxy then return setmetatable({}, { __gc = fn }) end
    local proxy = newproxy(true)
    getmetatable(proxy).__gc = fn
    return proxy
  end

  -- Finalizes an object, as the end of a Lua state does, and as any program can.
  local function finalize(object) getmetatable(object).__gc(object) end

  local function at_every_moment(prepare, call, interfere)
    local n, fired = 0, nil
    repeat
      n = n + 1
      local subject, left, state = prepare(), n, "before"
      fired = false
      local function arm()
        finalizer(function()
          if state == "after" then return end
          if state == "during" then left = left - 1 end
          if left > 0 then return arm() end
          fired, state = true, "after"
          interfere(subject)
        end)
      end
      collectgarbage("setpause", 0)
      collectgarbage()
      arm()
      state = "during"
      pcall(call, subject)
      state = "after"
      collectgarbage("setpause", 200)
      collectgarbage()
      if subject.manager then subject.manager:close() end
      if subject.other then subject.other:close() end
      assert(n < 1000, "it never ends")
    until not fired
    return n - 1
  end

  local function open(more)
    for name, value in pairs(options) do if more[name] == nil then more[name] = value end end
    return assert(hierlock.open(dsn, more))
  end

  -- A manager, a handle, an account that another manager holds, and a pending.
  local function prepare()
    local s = { manager = open { application = "mine" }, other = open { application = "others" } }
    s.handle = assert(s.manager:acquire { "u1", "a1", "r1" })
    s.blocker = assert(s.other:acquire { "u2", "a2" })
    s.options = { timeout = 0, label = ("label "):rep(10) .. tostring(s), mode = "exclusive" }
    s.target = { user = "u3" .. tostring(s), account = "a3" .. tostring(s), resources = { "r" .. tostring(s), "r2" } }
    s.refused = { user = "u2", account = "a2", resource = "r2" }
    s.plan = hierlock.plan { { "u1", "a1" }, { "u2", "a2" }, { "u3" } }
    s.pending = assert(s.manager:start({ "u2", "a2" }, { timeout = 0 }))
    return s
  end

  local calls = {
    function(s) return s.manager:acquire(s.target, s.options) end,
    function(s) return s.manager:acquire(s.refused, s.options) end,
    function(s) return s.manager:acquire_user("u9", s.options) end,
    function(s) return s.manager:acquire_resource("u2", "a2", "r2", s.options) end,
    function(s) return s.manager:acquire_resources("u4", "a4", { "r4", "r5" }, s.options) end,
    function(s) return s.manager:acquire_all({ s.target, { "u7" } }, s.options) end,
    function(s) return s.manager:holders(s.refused) end,
    function(s) return s.manager:stats() end,
    function(s) return tostring(s.manager) end,
    function(s) return s.manager:start(s.target, s.options) end,
    function(s) return s.manager:start(s.refused, s.options) end,
    function(s) return s.manager:with(s.target, s.options, function(handle) return handle.targets end) end,
    function(s) return s.pending:wait() end,
    function(s) return s.pending:fd(), s.pending:done(), tostring(s.pending), s.pending:cancel() end,
    function(s) return s.handle:extend(s.target, s.options) end,
    function(s) return s.handle:extend(s.refused, s.options) end,
    function(s) return core.start.extend(s.handle, s.target, s.options):wait() end,
    function(s) return core.start.extend(s.handle, s.refused, s.options) end,
    function(s) return core.start.check(s.handle):wait() end,
    function(s) return core.start.release(s.handle, { confirm = true }):wait() end,
    function(s) return s.handle:check() end,
    function(s) return s.handle:release { confirm = true } end,
    function(s) return s.handle.targets end,
    function(s) return s.handle.mode .. s.handle.token .. s.handle.level .. s.handle.waited .. tostring(s.handle) end,
    function(s) return s.handle:is_held(), s.handle:remaining() end,
    function(s) return s.plan:rows() end,
    function(s) return s.plan:sql("mysql"), s.plan:verify(1), tostring(s.plan) end,
    function(s) return hierlock.plan({ s.target }, { levels = s.levels }) end,
    function(s) return open { application = "a", levels = { "user", "account", "resource" }, on_lost = print } end,
  }
  local function every_call(interfere)
    local moments = 0
    for _, call in ipairs(calls) do moments = moments + at_every_moment(prepare, call, interfere) end
    return moments
  end
]]

local function run(chunk, dsn)
  local output, status = support.run(HARNESS:format(dsn or support.stores[1].dsn) .. chunk)
  assert.equal(0, status, output)
  return output
end

describe("a finalizer that runs inside of any call", function()
  -- title -> chunk
  local interferences = {
    ["closes the manager"] = [[ s.manager:close() ]],
    ["closes and finalizes the manager"] = [[ finalize(s.manager) s.manager = nil ]],
    ["releases the handle"] = [[ s.handle:release() ]],
    ["finalizes the handle"] = [[ finalize(s.handle) ]],
    ["extends the handle"] = [[ s.handle:extend({ "u8", "a8", ("r"):rep(500) }, { timeout = 0 }) ]],
    ["closes the pending"] = [[ core.close(s.pending) ]],
    ["takes the pending's result"] = [[ pcall(s.pending.wait, s.pending) ]],
    ["finalizes the plan"] = [[ finalize(s.plan) ]],
    ["asks the plan"] = [[ s.plan:sql("mariadb") s.plan:rows() ]],
    ["empties targets and options"] = [[
      s.options.label, s.options.mode = nil, nil
      s.target.user, s.target.account, s.target.resources = nil, nil, nil
      collectgarbage() ]],
    ["does the same as the call"] = [[
      s.manager:acquire({ "u3", "a9" }, { timeout = 0 })
      s.manager:holders { "u2" }
      s.handle:extend({ "u6" }, { timeout = 0 })
      s.manager:start({ "u5" }, { timeout = 0 }):wait() ]],
    ["closes everything"] = [[
      core.close(s.pending) finalize(s.handle) finalize(s.plan) finalize(s.manager) s.manager = nil ]],
  }
  for title, chunk in pairs(interferences) do
    for _, dsn in ipairs { support.stores[1].dsn, "null:" } do
      it(title .. ", on " .. dsn:match("^%a+:"), function()
        local moments = tonumber(run(("print(every_call(function(s) %s end))"):format(chunk), dsn))
        assert.is_true(moments > 50, "only " .. moments .. " moments")
      end)
    end
  end
end)

describe("an on_lost that is called inside of a call", function()
  -- Two locks are lost, and one is known to be: the call on the other tells on_lost of it.
  local function losing(call, interfere)
    local directory = os.tmpname()
    os.remove(directory)
    local output = run(([[
      local s = { options = { timeout = 0, label = ("label "):rep(10) .. os.time() } }
      s.target = { user = "u3" .. os.time() }
      local told = 0
      s.manager = open { on_lost = function()
        told = told + 1
        if told == 1 then %s end
      end }
      s.known, s.handle = assert(s.manager:acquire { "u1" }), assert(s.manager:acquire { "u2" })
      assert(os.remove(%q .. "/control"))
      assert(not s.known:is_held()) -- which tells before it looks
      assert(told == 0)
      print(told > 0, pcall(function() %s end))
    ]]):format(interfere, directory, call), "file:" .. directory)
    os.execute("rm -rf '" .. directory .. "'")
    return output
  end

  local calls = {
    check = [[ return select(2, s.handle:check()) ]],
    extend = [[ return select(2, s.handle:extend(s.target, s.options)) ]],
    ["extend, started"] = [[ return select(2, core.start.extend(s.handle, s.target, s.options)) ]],
    ["check, started"] = [[ return select(2, core.start.check(s.handle)) ]],
    ["confirmed release"] = [[ return s.handle:release { confirm = true } ]],
    is_held = [[ return s.handle:is_held() ]],
    acquire = [[ return select(2, s.manager:acquire(s.target, s.options)) ]],
  }
  for title, call in pairs(calls) do
    it("may finalize the handle: " .. title, function() losing(call, [[ finalize(s.handle) ]]) end)
    it("may close the manager: " .. title, function() losing(call, [[ s.manager:close() ]]) end)
    it("may empty the options: " .. title, function()
      losing(call, [[ s.options.label, s.target.user = nil, nil collectgarbage() ]])
    end)
  end
end)
