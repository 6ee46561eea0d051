-- Any function and method of hierlock's, with any values as self and as arguments, of
-- which many are such as a program would give. Each call returns what the contract says,
-- or raises misuse; nothing stays locked, and no value can make it crash or hang.
--
-- The input is a row of bytes; each decides something. At their end all are zero.

local data, directory = ...
local hierlock = require "hierlock"

local at = 0
local function byte()
  at = at + 1
  return data:byte(at) or 0
end
local function below(n) return byte() % n end
local function one_of(list) return list[below(#list) + 1] end

-- ------------------------------------------------------------------ values

local WORDS = { "user", "account", "resource", "resources", "mode", "shared", "exclusive", "timeout", "label", "u1", "a1",
  "r1", "buckets", "levels", "loop", "auto", "block", "cqueues", "application", "hold_timeout", "pool_size", "on_lost",
  "confirm", "", "\0", "a\0b", "\27[1m", "mysql", "mariadb", "x", "y" }
-- Nothing that would be waited for: a millisecond at most.
local NUMBERS = { 0, 1, -1, 2, 3, 16, 17, 100, 2147483647, 2147483648, math.maxinteger, math.mininteger, 0.0, 0.5, -0.5,
  1e300, -1e300, math.huge, -math.huge, 0 / 0, 1.0, 31536000001 }
-- The error that our values raise.
local RAISED = "values.lua raised this"

local objects = {} -- what calls have returned, to be selves and arguments
local running = 0

local value

local function fill(t, depth)
  for _ = 1, below(6) do
    local key = value(depth)
    if key ~= nil and key == key then t[key] = value(depth) end
  end
  return t
end

local FUNCTIONS = {
  function() end,
  function() error(RAISED, 0) end,
  function() error({ RAISED }) end,
  function(...) return ... end,
  function() collectgarbage() end,
  function() -- whoever is called back closes what he was called by
    local object = objects[#objects]
    if object then pcall(object.close or object.release, object) end
  end,
  function() if coroutine.isyieldable() then coroutine.yield() end end,
}

local METATABLES = {
  { __index = function() error(RAISED, 0) end, __newindex = function() error(RAISED, 0) end },
  { __index = function(_, key) return key end, __len = function() return 5 end },
  { __name = "hierlock.manager", __metatable = "hierlock.handle" },
  { __tostring = function() error(RAISED, 0) end, __call = function() return 1 end, __close = function() end },
  { __gc = function() collectgarbage() end, __pairs = function() error(RAISED, 0) end },
  { __mode = "kv" },
  { __eq = function() return true end, __lt = function() return true end, __concat = function() return "" end },
}

local function sequence(n, of)
  local list = {}
  for i = 1, n do list[i] = of() end
  return list
end

local KINDS = {
  function() return nil end,
  function() return one_of(WORDS) end,
  function() return one_of(WORDS) end,
  function() return one_of(NUMBERS) end,
  function() return below(2) == 0 end,
  function() return ("x"):rep(below(2) == 0 and 1024 or 1025) end,
  function() -- any bytes
    local n = below(16)
    local from = at + 1
    at = at + n
    return data:sub(from, at)
  end,
  function(depth) return fill({}, depth) end,
  function(depth) return sequence(below(5), function() return value(depth) end) end,
  function(depth) return fill({ user = "u1", account = one_of(WORDS), resource = one_of(WORDS) }, depth) end,
  function() return sequence(1 + below(3), function() return one_of(WORDS) end) end,
  function() return { user = "u1", account = "a1", resources = sequence(below(4), function() return byte() end) } end,
  function() return { "u" .. below(3), "a" .. below(2), mode = below(2) == 0 and "shared" or nil } end,
  function() return { timeout = 0, label = one_of(WORDS), mode = below(2) == 0 and "shared" or nil } end,
  function(depth) return setmetatable(fill({}, depth), one_of(METATABLES)) end,
  function()
    local t = { "u1" }
    t[one_of(WORDS)] = t
    t[2] = t
    return t
  end,
  function() return one_of(FUNCTIONS) end,
  function() return objects[below(16) + 1] end,
  function() return objects[below(16) + 1] end,
  function() return coroutine.create(one_of(FUNCTIONS)) end,
  function() return io.stdout end,
  function() return { levels = sequence(below(18), function() return one_of(WORDS) .. below(20) end), buckets = byte() } end,
}

function value(depth)
  if depth > 4 then return one_of(WORDS) end
  return one_of(KINDS)(depth + 1)
end

-- --------------------------------------------------------------- functions

local METHODS = { "acquire", "acquire_user", "acquire_account", "acquire_resource", "acquire_resources", "acquire_all",
  "start", "holders", "stats", "close", "with", "release", "is_held", "remaining", "check", "extend", "done", "fd", "wait",
  "cancel", "pollfd", "events", "timeout", "rows", "sql", "verify", "mode", "token", "level", "waited", "targets", "message",
  "__gc", "__close", "__tostring", "__index" }
local CODES = { timeout = 1, deadlock = 1, cancelled = 1, busy = 1, connection = 1, lost = 1, released = 1,
  not_provisioned = 1, mismatch = 1, unsafe_server = 1, dsn = 1, unsupported = 1, store = 1 }

-- Nothing waits for longer than a millisecond, and nothing is written elsewhere.
local function tame(arguments)
  for i = 1, arguments.n do
    local argument = arguments[i]
    if type(argument) == "table" and not hierlock.is_error(argument) then
      local timeout = rawget(argument, "timeout")
      if type(timeout) == "number" and timeout > 0 then rawset(argument, "timeout", 0.001) end
    end
  end
  return arguments
end

local function is_ours(raised)
  if type(raised) == "table" then return raised[1] == RAISED or hierlock.is_error(raised) end
  return type(raised) == "string" and (raised:find(RAISED, 1, true) or raised:find("hierlock: ", 1, true)
    or raised:find("not enough memory", 1, true) or raised:find("stack overflow", 1, true))
end

local function check_error(err)
  assert(hierlock.is_error(err), tostring(err))
  assert(CODES[err.code], err.code)
  assert(type(err.retryable) == "boolean")
  assert(type(err.message) == "string" and err.message ~= "" and not err.message:find("%c"), err.message)
  assert(tostring(err) == err.code .. ": " .. err.message)
end

local function keep(object)
  local kind = type(object)
  if kind == "userdata" or kind == "table" and hierlock.is_error(object) then
    objects[#objects % 16 + 1] = object
  end
end

local function check(name, ok, ...)
  running = running - 1
  local first, second = ...
  if not ok then
    assert(is_ours(first), name .. " raised " .. tostring(first))
  elseif name ~= "with" and first == nil and second ~= nil then
    check_error(second)
  end
  if ok then
    keep(first)
    keep(second)
  end
end

-- Some in a coroutine, which is resumed a few times and then left.
local function call(name, fn, arguments)
  running = running + 1
  if below(4) > 0 then return check(name, pcall(fn, table.unpack(arguments, 1, arguments.n))) end
  local thread = coroutine.create(fn)
  local result = table.pack(coroutine.resume(thread, table.unpack(arguments, 1, arguments.n)))
  for _ = 1, 3 do
    if coroutine.status(thread) ~= "suspended" then break end
    result = table.pack(coroutine.resume(thread))
  end
  if coroutine.status(thread) == "suspended" then
    coroutine.close(thread)
    running = running - 1
  else
    check(name, table.unpack(result, 1, result.n))
  end
end

local function arguments_of()
  local arguments = { n = below(6) }
  for i = 1, arguments.n do arguments[i] = value(0) end
  return tame(arguments)
end

local function open(dsn)
  local options = value(0)
  if type(options) ~= "table" or hierlock.is_error(options) then options = {} end
  rawset(options, "timeout", 0)
  call("open", hierlock.open, { n = 2, dsn, options })
end

local OPERATIONS = {
  function() open("file:" .. directory) end,
  function() open("null:") end,
  function()
    local dsn = value(0)
    if type(dsn) == "string" and dsn:lower():find("^file:") then dsn = "null:" end
    if dsn ~= nil then open(dsn) end
  end,
  function() call("plan", hierlock.plan, arguments_of()) end,
  function() call("is_error", hierlock.is_error, arguments_of()) end,
  function() -- on the default manager, which is of null:
    local name = METHODS[below(8) + 1]
    if hierlock[name] then call(name, hierlock[name], arguments_of()) end
  end,
  function() collectgarbage() end,
}

local function method()
  local self, name = objects[below(16) + 1], one_of(METHODS)
  if self == nil then return end
  local found, fn
  if name:find("^__") then
    local class = debug.getmetatable(self)
    found, fn = true, class and class[name]
  else
    found, fn = pcall(function() return self[name] end)
  end
  if not found then return assert(is_ours(fn), fn) end
  if type(fn) ~= "function" then return end
  local arguments = arguments_of()
  if name == "wait" then arguments[1] = 0.001 end
  if below(8) > 0 then
    table.insert(arguments, 1, self)
    arguments.n = arguments.n + 1
  end
  -- No program should call a finalizer, but any can.
  call(name, fn, arguments)
end

local manager = assert(hierlock.open("file:" .. directory, { timeout = 0 }))
objects[1] = manager
for _ = 1, 40 do
  if at >= #data then break end
  local choice = below(16)
  local operation = OPERATIONS[choice + 1] or method
  operation()
end

-- Whatever was done, nothing stays locked.
objects = {}
collectgarbage()
collectgarbage()
pcall(manager.close, manager)
local after = assert(hierlock.open("file:" .. directory, { timeout = 0 }))
assert(after:acquire_all { { "u0" }, { "u1" }, { "u2" } }):release()
after:close()
