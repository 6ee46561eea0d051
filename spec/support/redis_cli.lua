--- Prints as redis-cli would, without the start of a program for each question.

local socket = require "socket"

-- As redis-cli prints a reply that goes to a pipe: each element of an array on a line of its own.
local function shown(connection)
  local line, err = connection:receive "*l"
  if not line then return "Error: " .. err end
  local kind, rest = line:sub(1, 1), line:sub(2)
  if kind == "$" then
    local length = tonumber(rest)
    return length < 0 and "" or (connection:receive(length + 2) or ""):sub(1, -3)
  elseif kind == "*" then
    local lines = {}
    for i = 1, tonumber(rest) do lines[i] = shown(connection) end
    return table.concat(lines, "\n")
  end
  return rest
end

--- Asks the server at that port, where a password may be nil. words: those of one command; "-n" and a number before
-- them name the database.
return function(host, port, password, words)
  local connection, err = socket.connect(host, port)
  if not connection then return ("Could not connect to Redis at %s:%s: %s"):format(host, port, err) end
  connection:settimeout(30)
  connection:setoption("tcp-nodelay", true)
  local function ask(list)
    local parts = { ("*%d\r\n"):format(#list) }
    for _, word in ipairs(list) do parts[#parts + 1] = ("$%d\r\n%s\r\n"):format(#tostring(word), word) end
    connection:send(table.concat(parts))
    return shown(connection)
  end
  if password then ask { "AUTH", password } end
  if words[1] == "-n" then
    ask { "SELECT", words[2] }
    words = { select(3, (table.unpack or unpack)(words)) } -- luacheck: ignore
  end
  local text = ask(words)
  connection:close()
  return text
end
