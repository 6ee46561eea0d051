-- Misuse: every public function with every kind of wrong argument raises, with the argument's name and the position
-- of the caller; a right argument at the edge of wrong does not raise. Also that nothing can be done with objects
-- that are collected.

local hierlock = require "hierlock"
local uv = require "luv"

local THIS = debug.getinfo(1, "S").short_src
local long = ("x"):rep(1025)

local manager, handle, plan, closed
local target = { "m1" }

-- Each call stands on one line, and is no tail call, so that its position is where
-- the function is defined. pattern: what the message says.
local function raises(call, pattern)
  local position = THIS .. ":" .. debug.getinfo(call, "S").linedefined .. ": hierlock: "
  local ok, message = pcall(call)
  assert.is_false(ok, "nothing was raised; " .. pattern)
  assert.is_string(message)
  assert.equal(position, message:sub(1, #position), message)
  assert.matches(pattern, message:sub(#position + 1))
end

local function cases(list)
  for i = 1, #list, 3 do
    it(list[i], function() raises(list[i + 1], list[i + 2]) end)
  end
end

before_each(function()
  uv.os_setenv("HIERLOCK_DSN", "null:") -- for the default manager
  manager, closed = assert(hierlock.open("null:")), assert(hierlock.open("null:"))
  handle, plan = assert(manager:acquire { "m" }), hierlock.plan { { "m" } }
  closed:close()
end)
after_each(function()
  manager:close()
  local default = require("hierlock.core").default(hierlock.open)
  if default then default:close() end
  uv.os_unsetenv("HIERLOCK_DSN")
end)

describe("open raises when", function()
  cases {
    "dsn is a number", function() hierlock.open(1) end, "dsn must be a string or a list of strings, not number",
    "dsn is an empty list", function() hierlock.open({}) end, "dsn must be a string or a list of strings",
    "dsn is a boolean", function() hierlock.open(false) end, "dsn .* not boolean",
    "options is a string", function() hierlock.open("null:", "x") end, "options .* not string",
    "options is true", function() hierlock.open("null:", true) end, "options .* not boolean",
    "an option is unknown", function() hierlock.open("null:", { time_out = 1 }) end, "unknown option 'time_out'",
    "an option has a position", function() hierlock.open("null:", { "timeout" }) end, "options",
    "timeout is a string", function() hierlock.open("null:", { timeout = "1" }) end, "timeout .* not string",
    "timeout is negative", function() hierlock.open("null:", { timeout = -0.001 }) end, "timeout must not be negative",
    "timeout is NaN", function() hierlock.open("null:", { timeout = 0 / 0 }) end, "timeout .* NaN",
    "timeout is minus infinity", function() hierlock.open("null:", { timeout = -math.huge }) end, "timeout",
    "hold_timeout is a boolean", function() hierlock.open("null:", { hold_timeout = true }) end, "hold_timeout .* not boolean",
    "hold_timeout is too short", function() hierlock.open("null:", { hold_timeout = 0.5 }) end, "hold_timeout",
    "hold_timeout is for ever", function() hierlock.open("null:", { hold_timeout = math.huge }) end, "hold_timeout",
    "levels is a string", function() hierlock.open("null:", { levels = "user" }) end, "levels .* not string",
    "levels is empty", function() hierlock.open("null:", { levels = {} }) end, "levels",
    "levels has a number", function() hierlock.open("null:", { levels = { "a", 2 } }) end, "levels .* number 2",
    "levels has 17 names", function() hierlock.open("null:", { levels = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 } }) end, "levels .* 16",
    "a level is empty", function() hierlock.open("null:", { levels = { "a", "" } }) end, "level name 2",
    "a level is too long", function() hierlock.open("null:", { levels = { ("x"):rep(65) } }) end, "level name 1",
    "a level is there twice", function() hierlock.open("null:", { levels = { "a", "b", "a" } }) end, "'a'",
    "a level has a colon", function() hierlock.open("null:", { levels = { "a:b" } }) end, "level name 1",
    "a level has a comma", function() hierlock.open("null:", { levels = { "a,b" } }) end, "level name 1",
    "a level has a NUL byte", function() hierlock.open("null:", { levels = { "a\0b" } }) end, "levels",
    "a level has a line feed", function() hierlock.open("null:", { levels = { "a\n" } }) end, "level name 1",
    "a level is named mode", function() hierlock.open("null:", { levels = { "mode" } }) end, "'mode'",
    "levels has another key", function() hierlock.open("null:", { levels = { "a", x = "b" } }) end, "levels",
    "buckets is zero", function() hierlock.open("null:", { buckets = 0 }) end, "buckets",
    "buckets is 2^31", function() hierlock.open("null:", { buckets = 2147483648 }) end, "buckets",
    "buckets has a fraction", function() hierlock.open("null:", { buckets = 1.5 }) end, "buckets",
    "buckets is NaN", function() hierlock.open("null:", { buckets = 0 / 0 }) end, "buckets",
    "buckets is a string", function() hierlock.open("null:", { buckets = "100" }) end, "buckets",
    "pool_size is zero", function() hierlock.open("null:", { pool_size = 0 }) end, "pool_size",
    "pool_size has a fraction", function() hierlock.open("null:", { pool_size = 1.5 }) end, "pool_size",
    "pool_size is a string", function() hierlock.open("null:", { pool_size = "1" }) end, "pool_size",
    "application is a number", function() hierlock.open("null:", { application = 1 }) end, "application .* not number",
    "on_lost is a table", function() hierlock.open("null:", { on_lost = {} }) end, "on_lost .* not table",
    "loop is unknown", function() hierlock.open("null:", { loop = "nothing" }) end, "loop",
    "loop is a number", function() hierlock.open("null:", { loop = 1 }) end, "loop",
  }
end)

-- Each place where a target, an id or options go.
local function target_cases(title, call)
  describe(title .. " raises when", function()
    local function bad(what, value, pattern)
      it(what, function()
        local ok, message = pcall(call, value)
        assert.is_false(ok)
        assert.matches("^" .. THIS:gsub("%p", "%%%0") .. ":%d+: hierlock: ", message)
        assert.matches(pattern, message)
      end)
    end
    bad("target is missing", nil, "target")
    bad("target is a string", "u1", "target .* string")
    bad("target is a number", 1, "target .* number")
    bad("target is a function", print, "target .* function")
    bad("target is an object of the library", hierlock.open("null:"), "target .* userdata")
    bad("target is empty", {}, "target is empty.*user")
    bad("target has only a mode", { mode = "shared" }, "target is empty")
    bad("target has an unknown key", { user = "a", acount = "b" }, "'acount'")
    bad("target has a key of another type", { user = "a", [true] = 1 }, "target .* boolean")
    bad("target has the position 0", { [0] = "a" }, "position")
    bad("target has the position 1.5", { "a", [1.5] = "b" }, "position")
    bad("target has too many positions", { "a", "b", "c", "d" }, "position")
    bad("target mixes positions and names", { "a", account = "b" }, "mixes")
    bad("target mixes positions and a list", { "a", "b", resources = { "c" } }, "mixes")
    bad("the user is missing", { account = "a" }, "user is missing")
    bad("the user is missing for a resource", { account = "a", resource = "r" }, "user is missing")
    bad("the account is missing", { user = "u", resource = "r" }, "account is missing")
    bad("the account is missing for a list", { user = "u", resources = { "r" } }, "account is missing")
    bad("there is a hole in the positions", { "a", nil, "c" }, "account is missing")
    bad("resource and resources are given", { user = "u", account = "a", resource = "r", resources = { "r" } }, "both")
    bad("resources is empty", { user = "u", account = "a", resources = {} }, "resources must not be empty")
    bad("resources is a string", { user = "u", account = "a", resources = "r" }, "resources .* string")
    bad("resources has a hole", { user = "u", account = "a", resources = { "r", nil, "s" } }, "resource")
    bad("resources has names", { user = "u", account = "a", resources = { "r", x = "s" } }, "resources")
    bad("resources has only names", { user = "u", account = "a", resources = { x = "s" } }, "resources")
    bad("a resource of the list is empty", { user = "u", account = "a", resources = { "r", "" } }, "resource must not be empty")
    bad("mode is unknown", { user = "u", mode = "share" }, "mode")
    bad("mode is a number", { user = "u", mode = 1 }, "mode")
    for name, make in pairs { user = function(id) return { user = id } end,
                              account = function(id) return { user = "u", account = id } end,
                              resource = function(id) return { "u", "a", id } end } do
      bad(name .. " is empty", make "", name .. " must not be empty")
      bad(name .. " has 1,025 bytes", make(long), name .. " has 1025 bytes")
      bad(name .. " is a fraction", make(1.5), name .. " .* float")
      bad(name .. " is NaN", make(0 / 0), name)
      bad(name .. " is infinite", make(math.huge), name)
      bad(name .. " is a table", make {}, name .. " .* table")
      bad(name .. " is false", make(false), name .. " .* boolean")
      bad(name .. " is a function", make(print), name .. " .* function")
    end
  end)
end
target_cases("acquire", function(t) manager:acquire(t) return 1 end)
target_cases("hierlock.acquire", function(t) hierlock.acquire(t) return 1 end)
target_cases("with", function(t) manager:with(t, print) return 1 end)
target_cases("holders", function(t) manager:holders(t) return 1 end)
target_cases("extend", function(t) handle:extend(t) return 1 end)
target_cases("acquire_all", function(t) manager:acquire_all { { "ok" }, t == nil and 0 or t } return 1 end)
target_cases("plan", function(t) hierlock.plan { t == nil and 0 or t } return 1 end)

local function option_cases(title, call)
  describe(title .. " raises when", function()
    local function bad(what, value, pattern)
      it(what, function()
        local ok, message = pcall(call, value)
        assert.is_false(ok)
        assert.matches("^" .. THIS:gsub("%p", "%%%0") .. ":%d+: hierlock: ", message)
        assert.matches(pattern, message)
      end)
    end
    bad("options is a string", "exclusive", "options .* string")
    bad("options is a number", 5, "options .* number")
    bad("an option is unknown", { time_out = 1 }, "unknown option 'time_out'")
    bad("an option has a position", { 5 }, "options")
    bad("timeout is a string", { timeout = "5" }, "timeout .* string")
    bad("timeout is NaN", { timeout = 0 / 0 }, "timeout")
    bad("timeout is negative", { timeout = -1 }, "timeout")
    bad("mode is unknown", { mode = "write" }, "mode")
    bad("mode is a boolean", { mode = true }, "mode")
    bad("label is a table", { label = {} }, "label .* table")
    bad("label is a number", { label = 1 }, "label .* number")
  end)
end
option_cases("acquire", function(o) manager:acquire(target, o) return 1 end)
option_cases("acquire_user", function(o) manager:acquire_user("u", o) return 1 end)
option_cases("acquire_account", function(o) manager:acquire_account("u", "a", o) return 1 end)
option_cases("acquire_resource", function(o) manager:acquire_resource("u", "a", "r", o) return 1 end)
option_cases("acquire_resources", function(o) manager:acquire_resources("u", "a", { "r" }, o) return 1 end)
option_cases("acquire_all", function(o) manager:acquire_all({ target }, o) return 1 end)
option_cases("with", function(o) manager:with(target, o, print) return 1 end)
option_cases("extend", function(o) handle:extend(target, o) return 1 end)
option_cases("hierlock.acquire_user", function(o) hierlock.acquire_user("u", o) return 1 end)
option_cases("hierlock.with", function(o) hierlock.with(target, o, print) return 1 end)

describe("a number of seconds", function()
  it("is rounded up to milliseconds, never down", function()
    assert(hierlock.open("null:", { hold_timeout = 0.9991 })):close() -- the least is 1
  end)
end)

describe("the others raise when", function()
  cases {
    "user is missing", function() manager:acquire_user() end, "user is missing",
    "account is missing", function() manager:acquire_account("u") end, "account is missing",
    "user is missing before an account", function() manager:acquire_account(nil, "a") end, "user is missing",
    "resource is missing", function() manager:acquire_resource("u", "a") end, "resource is missing",
    "account is a table", function() manager:acquire_resource("u", {}, "r") end, "account .* table",
    "resource is too long", function() manager:acquire_resource("u", "a", long) end, "resource has 1025 bytes",
    "resources is missing", function() manager:acquire_resources("u", "a") end, "resources is missing",
    "resources is a string", function() manager:acquire_resources("u", "a", "r") end, "resources .* string",
    "resources is empty", function() manager:acquire_resources("u", "a", {}) end, "resources must not be empty",
    "the user of resources is a table", function() manager:acquire_resources({}, "a", { "r" }) end, "user .* table",
    "options stand in the place of an id", function() manager:acquire_account("u", { timeout = 1 }) end, "account .* table",
    "targets is missing", function() manager:acquire_all() end, "targets .* nil",
    "targets is empty", function() manager:acquire_all {} end, "targets must not be empty",
    "targets is one target", function() manager:acquire_all { user = "u" } end, "targets",
    "targets is a list of ids", function() manager:acquire_all { "u" } end, "target .* string",
    "targets has a hole", function() manager:acquire_all { { "u" }, nil, { "v" } } end, "target",
    "targets has names", function() manager:acquire_all { { "u" }, x = { "v" } } end, "targets",
    "hierlock.acquire_user has no user", function() hierlock.acquire_user() end, "user is missing",
    "hierlock.acquire_all has no targets", function() hierlock.acquire_all() end, "targets",
    "hierlock.acquire_resources has no list", function() hierlock.acquire_resources("u", "a", 5) end, "resources .* number",
    "hierlock.holders has nil for a target", function() hierlock.holders(nil) end, "target",
    "with has no function", function() manager:with(target) end, "fn .* nil",
    "with has options and no function", function() manager:with(target, {}) end, "fn .* nil",
    "with has a table for a function", function() manager:with(target, nil, {}) end, "fn .* table",
    "hierlock.with has no function", function() hierlock.with(target) end, "fn .* nil",
    "release has a boolean", function() handle:release(true) end, "options .* boolean",
    "release has an unknown option", function() handle:release { confrim = true } end, "'confrim'",
    "confirm is a string", function() handle:release { confirm = "no" } end, "confirm .* string",
    "plan has no targets", function() hierlock.plan() end, "targets .* nil",
    "plan has an unknown option", function() hierlock.plan({ target }, { bucket = 1 }) end, "'bucket'",
    "plan has bad buckets", function() hierlock.plan({ target }, { buckets = -1 }) end, "buckets",
    "plan has bad levels", function() hierlock.plan({ target }, { levels = {} }) end, "levels",
    "plan has a bad mode", function() hierlock.plan({ target }, { mode = "x" }) end, "mode",
    "sql has no dialect", function() plan:sql() end, "dialect",
    "sql has an unknown dialect", function() plan:sql("postgres") end, "dialect",
    "sql has a table that is no name", function() plan:sql("mysql", "a; DROP TABLE b") end, "table",
    "sql has an empty table", function() plan:sql("mysql", "") end, "table",
    "sql has a long table", function() plan:sql("mysql", ("t"):rep(65)) end, "table",
    "sql has a boolean for a table", function() plan:sql("mysql", true) end, "table",
    "verify has no number", function() plan:verify() end, "n must be the number",
    "verify has a string", function() plan:verify("3") end, "n must be .* string",
  }
end)

describe("a NUL byte does not end a word that is longer:", function()
  cases {
    "a mode", function() manager:acquire(target, { mode = "shared\0x" }) end, "mode",
    "the mode of a target", function() manager:acquire { "u", mode = "shared\0x" } end, "mode",
    "an option", function() manager:acquire(target, { ["timeout\0x"] = 1 }) end, "unknown option",
    "a key", function() manager:acquire { ["user\0x"] = "u" } end, "unknown key",
    "a list's key", function() manager:acquire { user = "u", account = "a", ["resources\0x"] = { "r" } } end, "unknown key",
    "a dialect", function() plan:sql("mysql\0x") end, "dialect",
    "a table", function() plan:sql("mysql", "t\0x") end, "table",
    "a loop", function() hierlock.open("null:", { loop = "block\0x" }) end, "loop",
  }
end)

describe("a closed manager raises in", function()
  cases {
    "acquire", function() closed:acquire(target) end, "closed",
    "acquire_user", function() closed:acquire_user("u") end, "closed",
    "acquire_account", function() closed:acquire_account("u", "a") end, "closed",
    "acquire_resource", function() closed:acquire_resource("u", "a", "r") end, "closed",
    "acquire_resources", function() closed:acquire_resources("u", "a", { "r" }) end, "closed",
    "acquire_all", function() closed:acquire_all { target } end, "closed",
    "with", function() closed:with(target, print) end, "closed",
    "stats", function() closed:stats() end, "closed",
    "holders", function() closed:holders(target) end, "closed",
  }
end)

describe("a method on something else raises:", function()
  cases {
    "acquire with a dot", function() manager.acquire(target) end, "manager",
    "acquire_user with a dot", function() manager.acquire_user("u") end, "manager",
    "acquire_all with a dot", function() manager.acquire_all { target } end, "manager",
    "stats with a dot", function() manager.stats() end, "manager",
    "close with a dot", function() manager.close() end, "manager",
    "holders with a dot", function() manager.holders(target) end, "manager",
    "with with a dot", function() manager.with(target, print) end, "manager",
    "with with a dot and options", function() manager.with(target, {}, print) end, "manager",
    "acquire of a handle", function() manager.acquire(handle, target) end, "manager",
    "acquire of a file", function() manager.acquire(io.stdout, target) end, "manager",
    "release with a dot", function() handle.release() end, "handle",
    "release of a manager", function() handle.release(manager) end, "handle",
    "is_held with a dot", function() handle.is_held() end, "handle",
    "check with a dot", function() handle.check() end, "handle",
    "remaining with a dot", function() handle.remaining() end, "handle",
    "extend with a dot", function() handle.extend(target) end, "handle",
    "rows with a dot", function() plan.rows() end, "plan",
    "sql with a dot", function() plan.sql("mysql") end, "plan",
    "verify with a dot", function() plan.verify(1) end, "plan",
  }
end)

describe("the position is that of the caller", function()
  it("through pcall", function()
    local line = debug.getinfo(1, "l").currentline + 1
    local _, message = pcall(manager.acquire, manager, {})
    assert.matches(":" .. line .. ": hierlock: ", message, 1, true)
  end)
  it("inside of with's function", function()
    local line = debug.getinfo(1, "l").currentline + 2
    local _, message = pcall(function()
      manager:with(target, function() manager:acquire({}) end)
    end)
    assert.matches(THIS .. ":" .. line .. ": hierlock: ", message, 1, true)
  end)
  it("in a coroutine", function()
    local line = debug.getinfo(1, "l").currentline + 1
    local _, message = coroutine.resume(coroutine.create(function() manager:acquire({}) end))
    assert.matches(THIS .. ":" .. line .. ": hierlock: ", message, 1, true)
  end)
end)

describe("what is right at the edge:", function()
  local ids = { "x", long:sub(2), "\0", "a\0b", "\255\254", "\195\188", " ", "/", ":", "'", "-1", 0, -1, 2 ^ 31 < 0 and 0 or 2147483647 }
  it("ids of 1 to 1,024 bytes, of any bytes, and integers", function()
    for _, id in ipairs(ids) do
      local got = assert(manager:acquire_resource(id, id, id))
      assert.same({ { user = tostring(id), account = tostring(id), resource = tostring(id) } }, got.targets)
      got:release()
    end
  end)
  it("timeouts of 0, of a fraction, of ages and for ever", function()
    for _, timeout in ipairs { 0, 0.0001, 1e9, 1e18, 1e308, math.huge } do
      assert(manager:acquire(target, { timeout = timeout })):release()
      hierlock.open("null:", { timeout = timeout }):close()
    end
  end)
  it("options that are nil or empty", function()
    assert(manager:acquire(target, nil)):release()
    assert(manager:acquire(target, {})):release()
    assert.is_true(handle:release(nil))
  end)
  it("a label of any length and bytes, also none", function()
    for _, label in ipairs { "", "\0", ("\255"):rep(100000) } do
      assert(manager:acquire(target, { label = label })):release()
    end
  end)
  it("tables with metatables are read raw", function()
    local magic = setmetatable({ "u" }, { __index = error, __pairs = error, __len = error })
    assert(manager:acquire(magic, setmetatable({}, { __index = error, __pairs = error }))):release()
  end)
end)

describe("an unknown field", function()
  it("of a handle, manager or plan is nil", function()
    for _, object in ipairs { handle, manager, plan } do
      for _, key in ipairs { "nothing", "__gc", "__index", 1, true, {} } do assert.is_nil(object[key]) end
    end
  end)
  it("cannot be set", function()
    for _, object in ipairs { handle, manager, plan } do
      assert.is_false(pcall(function() object.mode = "shared" end))
    end
  end)
end)

describe("tostring", function()
  it("shows a handle's targets, mode and state", function()
    local got = assert(manager:acquire_all { { "u", "a", "r" }, { "v\n\255" } })
    assert.equal([[hierlock.handle (exclusive u/a/r, v%0A%FF, held)]], tostring(got))
    got:release()
    assert.matches("released%)$", tostring(got))
    assert.matches("%(shared .*held%)$", tostring(assert(manager:acquire({ "u", "a", "r" }, { mode = "shared" }))))
  end)
  it("shows a manager's state, and a plan's targets", function()
    assert.equal("hierlock.manager (open)", tostring(manager))
    assert.equal("hierlock.manager (closed)", tostring(closed))
    assert.equal("hierlock.plan (m)", tostring(plan))
  end)
  it("is one short line whatever the targets are", function()
    local targets = {}
    for i = 1, 1000 do targets[i] = { "\n" .. i .. long:sub(100) } end
    for _, object in ipairs { hierlock.plan(targets), (assert(manager:acquire_all(targets))) } do
      assert.is_true(#tostring(object) < 700)
      assert.is_nil(tostring(object):find("%c"))
    end
  end)
end)

-- The objects of a cycle are finalised one after another, the youngest first; so the finalizer here sees objects
-- that were collected before it.
describe("in a finalizer", function()
  local function finalizer(fn)
    if not newproxy then return setmetatable({}, { __gc = fn }) end -- luacheck: ignore
    local proxy = newproxy(true) -- luacheck: ignore
    getmetatable(proxy).__gc = fn
    return proxy
  end

  it("a collected handle holds nothing, a collected manager is closed, and nothing crashes", function()
    local seen
    do
      local things = {}
      things.proxy = finalizer(function()
        local h, m, p = things.handle, things.manager, things.plan
        local held, err = select(2, h:check()), select(2, h:extend { "x" })
        seen = {
          released = h:release(), confirmed = h:release { confirm = true }, is_held = h:is_held(), check = held.code,
          extend = err.code, remaining = h:remaining(), shown = tostring(h), mode = tostring(h.mode), token = tostring(h.token),
          manager = tostring(m), acquire = pcall(m.acquire, m, { "x" }), close = m:close(), rows = pcall(p.rows, p),
          plan = pcall(tostring, p),
        }
      end)
      things.manager = assert(hierlock.open("null:"))
      things.handle, things.plan = assert(things.manager:acquire { "x" }), hierlock.plan { { "x" } }
    end
    for _ = 1, 3 do collectgarbage() end
    assert.is_table(seen, "the finalizer has not run, or has raised")
    assert.same({
      released = true, confirmed = true, is_held = false, check = "released", extend = "released", remaining = 0,
      shown = "hierlock.handle (released)", mode = "nil", token = "nil", manager = "hierlock.manager (closed)",
      acquire = false, close = true, rows = false, plan = true,
    }, seen)
  end)
end)
