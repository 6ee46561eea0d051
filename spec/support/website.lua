--- Runs an example that is a web site, in nginx, by the line that it prints, on a port and with data of its own; and asks it
-- over HTTP.

local uv = require "luv"
local support = require "spec.support"

local website = {}

local MODULE = "/usr/lib/nginx/modules/ngx_http_lua_module.so"

--- Why nginx with Lua cannot be run here, or nil.
function website.missing()
  for _, name in ipairs { "/usr/sbin/nginx", MODULE } do
    local file = io.open(name, "rb")
    if not file then return "nginx with Lua cannot be had here (Debian: nginx, libnginx-mod-http-lua)" end
    file:close()
  end
  if not pcall(require, "luasql.sqlite3") then return "LuaSQL for SQLite cannot be had here (Debian: lua-sql-sqlite3)" end
end

local function read(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read "*a"
  file:close()
  return text
end

local function free_port()
  local probe = uv.new_tcp()
  assert(probe:bind("127.0.0.1", 0))
  local port = probe:getsockname().port
  probe:close()
  uv.run "nowait"
  return port
end

local function wait_until(condition, what)
  return support.wait_until(function()
    uv.run "nowait"
    return condition()
  end, what)
end

-- ------------------------------------------------------------------- nginx

local server_class = {}
server_class.__index = server_class

-- The line below "Run it:".
local function printed(config)
  return assert(read(config):match("\n# Run it: .-\n#     ([^\n]+)\n"), config .. " does not say how to run it")
end

local function try(self)
  if self.process then self.process:close() end
  self.port, self.exit, self.process = free_port(), nil, nil
  local config = "examples/" .. self.name .. "/nginx.conf"
  local text, n = read(config):gsub("127%.0%.0%.1:808%d", "127.0.0.1:" .. self.port)
  assert(n >= 1)
  local file = assert(io.open(self.directory .. "/nginx.conf", "w"))
  file:write((text:gsub("/tmp/hierlock%-", self.directory .. "/hierlock-")))
  file:close()
  local output = assert(uv.fs_open(self.directory .. "/output", "w", 384))
  local command = printed(config):gsub(config:gsub("%p", "%%%0"), self.directory .. "/nginx.conf")
  local environment = { "PATH=/usr/sbin:/usr/bin:/bin", "PWD=" .. uv.cwd(), "HIERLOCK_DSN=" .. self.dsn }
  for name, value in pairs(self.variables) do environment[#environment + 1] = name .. "=" .. value end
  self.process, self.pid = assert(uv.spawn("/bin/sh", {
    args = { "-c", "exec " .. command }, env = environment, stdio = { nil, nil, output },
  }, function(code, signal) self.exit = { code = code, signal = signal } end))
  uv.fs_close(output)
  -- The pid file is written once the port is the server's own; until then, another program may answer there.
  local pid_file = self.directory .. "/hierlock-" .. self.name .. ".pid"
  wait_until(function() return self.exit or uv.fs_stat(pid_file) and website.ask(self, "GET", "/style.css") end, "nginx")
end

local function start_on_free_port(self)
  for _ = 1, 3 do -- another program may take the port before nginx does
    try(self)
    if not self.exit or not self:output():find("Address already in use", 1, true) then break end
  end
  if self.exit then error("nginx does not start: " .. self:output()) end
end

--- Starts it. name: of the example; dsn: of its locks, by default of an embedded store of its own;
-- variables(directory): of its environment, by name. The example must keep its data in directory/hierlock-NAME.
function website.start(name, dsn, variables)
  -- The workers, which run as user nobody if root runs the specs, make the store and the data. Not longer than nginx
  -- bears.
  local directory = assert(uv.fs_mkdtemp "/dev/shm/hierlock-spec-XXXXXX")
  uv.fs_chmod(directory, tonumber("777", 8))
  local self = setmetatable({ name = name, directory = directory, dsn = dsn or "file:" .. directory .. "/locks",
                              variables = variables(directory) }, server_class)
  local ok, why = pcall(start_on_free_port, self)
  if not ok then
    self:stop()
    error(why, 0)
  end
  return self
end

function server_class:output() return read(self.directory .. "/output") end

--- The workers' pids: the master's children.
function server_class:workers()
  local workers = {}
  for pid in read(("/proc/%d/task/%d/children"):format(self.pid, self.pid)):gmatch "%d+" do workers[tonumber(pid)] = true end
  return workers
end

--- Lets it read its configuration again, and waits until the workers of before are gone.
function server_class:reload()
  local before = self:workers()
  assert(next(before))
  assert(uv.kill(self.pid, "sighup"))
  wait_until(function()
    local some
    for pid in pairs(self:workers()) do
      if before[pid] then return false end
      some = true
    end
    return some
  end, "new workers")
end

local function end_process(self)
  if not self.exit then
    assert(uv.kill(self.pid, "sigterm"))
    wait_until(function() return self.exit end, "nginx to end")
  end
  self.process:close()
  self.process = nil
  uv.run "nowait"
end

--- Ends it and starts it again, on another port.
function server_class:restart()
  end_process(self)
  start_on_free_port(self)
end

function server_class:stop()
  end_process(self)
  os.execute("rm -rf '" .. self.directory .. "'")
end

-- -------------------------------------------------------------------- HTTP

local function encoded(text)
  return (tostring(text):gsub("[^%w._-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- Status, page, headers (names in lower case) of an answer; nothing: there was none.
local function parsed(answer)
  local status, head, page = answer:match "^HTTP/1.1 (%d+)[^\r\n]*\r\n(.-\r\n)\r\n(.*)$"
  if not status then return end
  local found = {}
  for name, value in head:gmatch "([^:\r\n]+): ([^\r\n]*)\r\n" do found[name:lower()] = value end
  if found["transfer-encoding"] == "chunked" then
    local rest = page
    page = ""
    repeat
      local size, after = rest:match "^(%x+)\r\n()"
      size = tonumber(size, 16)
      page, rest = page .. rest:sub(after, after + size - 1), rest:sub(after + size + 2)
    until size == 0
  end
  return tonumber(status), page, found
end

--- Sends a request; fields: of a form. Returns a function that waits for the answer: status, page, headers (names in
-- lower case); or nothing without an answer.
function website.send(server, method, path, fields, headers)
  local body = {}
  for name, value in pairs(fields or {}) do body[#body + 1] = encoded(name) .. "=" .. encoded(value) end
  body = table.concat(body, "&")
  headers = headers or {}
  local lines = { ("%s %s HTTP/1.1"):format(method, path), "Host: " .. (headers.Host or "127.0.0.1:" .. server.port), "Connection: close",
                  "Content-Type: application/x-www-form-urlencoded" }
  if headers["Transfer-Encoding"] == "chunked" then
    local chunks = {}
    for at = 1, #body, 100 do
      local piece = body:sub(at, at + 99)
      chunks[#chunks + 1] = ("%x\r\n%s\r\n"):format(#piece, piece)
    end
    body = table.concat(chunks) .. "0\r\n\r\n"
  else
    lines[#lines + 1] = "Content-Length: " .. #body
  end
  for name, value in pairs(headers) do
    if name ~= "Host" then lines[#lines + 1] = name .. ": " .. value end
  end
  local socket, answer, closed = uv.new_tcp(), "", false
  local function close()
    if not closed then socket:close() end
    closed = true
  end
  socket:connect("127.0.0.1", server.port, function(err)
    if err then return close() end
    socket:write(table.concat(lines, "\r\n") .. "\r\n\r\n" .. body)
    socket:read_start(function(_, data)
      if not data then return close() end
      answer = answer .. data
    end)
  end)
  return function()
    wait_until(function() return closed end, "an answer")
    uv.run "nowait"
    return parsed(answer)
  end
end

--- Sends a request, and waits for the answer.
function website.ask(...) return website.send(...)() end

return website
