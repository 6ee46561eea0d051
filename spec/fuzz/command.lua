-- The command `hierlock` with any arguments. The command ends with a status that hierlock(1) names, and a message
-- that is no traceback; its output about others' leases has nothing that a terminal obeys. No server is connected
-- to: what stands in its place answers with what the input has.
--
-- The input is lines: the arguments, an empty one, the DSN of the environment, and then a
-- server's answers: "-CODE" fails, "N" changes N rows, "a,b" is a row of two or a lease, and
-- "." ends the rows.

local data = ...
local lines = {}
for line in (data .. "\n"):gmatch("([^\n]*)\n") do lines[#lines + 1] = line end
local at = 0
local function line()
  at = at + 1
  return lines[at]
end

local arguments = {}
for argument in line do
  if argument == "" then break end
  if not argument:find("%z") then arguments[#arguments + 1] = argument end
end
local dsn = line() or "null:"
if not dsn:find("%z") then set_dsn(dsn) end -- luacheck: ignore 113

-- ------------------------------------------------------------ the surroundings

local ENDED = {} -- what os.exit raises
local status
local said = { stdout = {}, stderr = {} }
local function stream(name)
  return {
    write = function(self, ...)
      for i = 1, select("#", ...) do
        local text = select(i, ...)
        assert(type(text) == "string" or type(text) == "number", "wrote a " .. type(text))
        table.insert(said[name], text)
        if #said[name] > 100 then os.exit(0) end -- it is at work
      end
      return self
    end,
    flush = function() return true end,
    close = function() end,
    setvbuf = function() end,
    isatty = function() return false end,
    read = function() end,
  }
end
io.stdout, io.stderr = stream "stdout", stream "stderr" -- luacheck: ignore 122
io.open = function() end -- luacheck: ignore 122 (no terminal that could be asked)
io.popen = function() end -- luacheck: ignore 122 (nobody has logged in)
function print(...) io.stdout:write(table.concat({ ... }, "\t"), "\n") end -- luacheck: ignore 121
os.exit = function(code) -- luacheck: ignore 122
  status = code
  error(ENDED, 0)
end
os.execute = function() return true end -- luacheck: ignore 122

-- Time goes on by itself.
local clock = 0
package.preload.luv = function()
  return {
    hrtime = function()
      clock = clock + 1e8
      return clock
    end,
    sleep = function(ms) clock = clock + ms * 1e6 end,
    guess_handle = function() return "file" end,
    new_signal = function() return { start = function() end, close = function() end } end,
    run = function() end,
    os_get_passwd = function() return { username = "fuzz" } end,
    os_setenv = function() end,
  }
end

-- ------------------------------------------------------------------ the server

local function failure(code)
  return nil, { code = code, message = "the server says so", retryable = code == "connection" }
end

local queries = 0
local connection = {}
function connection.table() return "hier_lock_buckets" end
function connection.logs_statements() return #data % 2 == 0 end
function connection.close() end

-- An answer has the type that was asked for; its value is arbitrary. Answers of other types are
-- spec/fuzz/answers.c's.
local function number(text) return math.tointeger(tonumber(text)) or 0 end
local function few(text) return number(text) % 100 end
local TYPES = {
  ["^SELECT COUNT"] = { number },
  ["^SELECT GET_LOCK"] = { number },
  ["^SELECT buckets, levels"] = { number, tostring },
  ["^SELECT previous"] = { few, few },
  ["^SELECT ENGINE"] = { tostring },
  ["^SELECT"] = { number },
}
local function types_of(sql)
  local found
  for pattern in pairs(TYPES) do
    if sql:find(pattern) and (not found or #pattern > #found) then found = pattern end
  end
  return TYPES[found]
end

function connection.query(_, sql)
  assert(type(sql) == "string" and not sql:find("%z"))
  queries = queries + 1
  local answer, types = line(), types_of(sql)
  if not answer or queries > 60 then return failure "store" end
  if answer:find("^-") then return failure(answer:sub(2)) end
  if not types then return number(answer) end
  local rows = {}
  while answer and answer ~= "." do
    local row, i = {}, 0
    for field in (answer .. ","):gmatch("([^,]*),") do
      i = i + 1
      if types[i] then row[i] = tostring(types[i](field)) end
    end
    for k = #row + 1, #types do row[k] = "0" end
    rows[#rows + 1] = row
    answer = not sql:find "COUNT" and line() or nil
  end
  if sql:find "COUNT" and not rows[1] then rows[1] = { "0" } end
  return rows
end

package.preload["hierlock.store.mysql"] = function()
  local texts = {}
  for i, name in ipairs { "schema", "leases" } do
    local file = assert(io.open("sql/" .. name .. ".sql"))
    texts[i] = file:read "*a"
    file:close()
  end
  return {
    sql = table.concat(texts),
    connect = function(where, application)
      assert(type(where) == "string" and type(application) == "string")
      queries = queries + 1
      local answer = line()
      if not answer or queries > 60 then return failure "store" end
      if answer:find("^-") then return failure(answer:sub(2)) end
      return setmetatable({}, { __index = connection })
    end,
  }
end

-- ------------------------------------------------------------------- the leases

local hierlock = require "hierlock"
local plan = hierlock.plan

-- The next answer; nil, err where it is a failure.
local function answered()
  queries = queries + 1
  local answer = line()
  if not answer or queries > 60 then return failure "store" end
  if answer:find("^-") then return failure(answer:sub(2)) end
  return answer
end

local manager = {}
function manager.close() end

function manager.leases(_, filter)
  if filter.target then plan { filter.target } end -- which raises what is misuse
  local found, answer, err = {}, answered()
  if not answer then return nil, err end
  while answer and answer ~= "." do
    local fields = {}
    for field in (answer .. ","):gmatch "([^,]*)," do fields[#fields + 1] = (field:gsub("%z", "")) end
    found[#found + 1] = {
      path = fields[1], owner = fields[2] or "", label = fields[3], mode = "shared", id = ("%032d"):format(#found),
      application = fields[4] or "", host = fields[5] or "", pid = tonumber(fields[6]) and number(fields[6]),
      remaining = number(fields[7]) / 1000, since = fields[8] and number(fields[8]),
    }
    answer = line()
  end
  return found
end

function manager.holders(self, target) return self:leases { target = target } end

function manager.revoke(_, filter, options)
  assert(#filter.id == 32 and #options.by > 0)
  local answer, err = answered()
  if not answer then return nil, err end
  return number(answer) % 2
end

hierlock.open = function(where, options)
  assert(type(where) == "string" and type(options.application) == "string")
  local answer, err = answered()
  if not answer then return nil, err end
  return manager
end

-- --------------------------------------------------------------------- the run

-- Use the same table each time: argparse has kept it.
arg = arg or {} -- luacheck: ignore 121
for i = 1, math.max(#arg, #arguments) do arg[i] = arguments[i] end -- luacheck: ignore 122
local main = assert(loadfile "lua/hierlock/command/main.lua")
local ok, raised = xpcall(main, function(raised)
  return raised == ENDED and raised or debug.traceback(tostring(raised))
end)
assert(not ok, "it did not end")
assert(raised == ENDED or status, raised)

local STATUSES = { [0] = true, [1] = true, [64] = true, [69] = true, [70] = true, [77] = true, [78] = true }
assert(STATUSES[status], "status " .. tostring(status))
local message = table.concat(said.stderr)
-- An argument may hold these words, but no line.
assert(not message:find("\nstack traceback:", 1, true), message)
if status >= 64 then assert(message:find("hierlock: ", 1, true), "no message") end
if arguments[1] == "leases" or arguments[1] == "revoke" then
  local shown = table.concat(said.stdout)
  assert(not shown:gsub("\n", ""):find "[%c\127]", "a control character")
end
