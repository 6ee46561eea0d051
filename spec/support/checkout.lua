--- Runs examples/checkout by the line that it prints, on a port, a store and data of its own; and people who use it
-- over HTTP, as browsers do: with a cookie, and with what a page's forms contain.

local uv = require "luv"
local support = require "spec.support"

local checkout = {}

local CONFIG = "examples/checkout/nginx.conf"
local MODULE = "/usr/lib/nginx/modules/ngx_http_lua_module.so"

--- Why nginx with Lua cannot be run here, or nil.
function checkout.missing()
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
local function printed()
  return assert(read(CONFIG):match("\n# Run it: .-\n#     ([^\n]+)\n"), CONFIG .. " does not say how to run it")
end

local function try(self)
  if self.process then self.process:close() end
  self.port, self.exit, self.process = free_port(), nil, nil
  local text, n = read(CONFIG):gsub("127%.0%.0%.1:8080", "127.0.0.1:" .. self.port)
  assert(n >= 1)
  local file = assert(io.open(self.directory .. "/nginx.conf", "w"))
  file:write((text:gsub("/tmp/hierlock%-checkout", self.directory .. "/hierlock-checkout")))
  file:close()
  local output = assert(uv.fs_open(self.directory .. "/output", "w", 384))
  local command = printed():gsub(CONFIG:gsub("%p", "%%%0"), self.directory .. "/nginx.conf")
  local environment = { "PATH=/usr/sbin:/usr/bin:/bin", "PWD=" .. uv.cwd(), "HIERLOCK_DSN=" .. self.dsn,
                        "CHECKOUT_DATABASE=" .. self.database, "CHECKOUT_TTL=" .. self.ttl }
  self.process, self.pid = assert(uv.spawn("/bin/sh", {
    args = { "-c", "exec " .. command }, env = environment, stdio = { nil, nil, output },
  }, function(code, signal) self.exit = { code = code, signal = signal } end))
  uv.fs_close(output)
  -- It is written once the port is its own; until then, somebody else may answer there.
  local pid_file = self.directory .. "/hierlock-checkout.pid"
  wait_until(function() return self.exit or uv.fs_stat(pid_file) and checkout.ask(self, "GET", "/login") end, "nginx")
end

local function start_on_free_port(self)
  for _ = 1, 3 do -- another program may take the port before nginx does
    try(self)
    if not self.exit or not self:output():find("Address already in use", 1, true) then break end
  end
  if self.exit then error("nginx does not start: " .. self:output()) end
end

--- Starts it. ttl: seconds (900); dsn: by default an embedded store of its own.
function checkout.start(options)
  options = options or {}
  -- The workers, who are nobody if root runs the specs, make the store and the data. Not longer than nginx bears.
  local directory = assert(uv.fs_mkdtemp "/dev/shm/hierlock-spec-XXXXXX")
  uv.fs_chmod(directory, tonumber("777", 8))
  local self = setmetatable({ directory = directory, ttl = options.ttl or 900, dsn = options.dsn or "file:" .. directory .. "/locks",
                              database = directory .. "/hierlock-checkout/data.db" }, server_class)
  local ok, why = pcall(start_on_free_port, self)
  if not ok then
    self:stop()
    error(why, 0)
  end
  return self
end

function server_class:output() return read(self.directory .. "/output") end

--- Its workers' pids: the master's children.
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
-- lower case); or nothing if there is none.
function checkout.send(server, method, path, fields, headers)
  local body = {}
  for name, value in pairs(fields or {}) do body[#body + 1] = encoded(name) .. "=" .. encoded(value) end
  body = table.concat(body, "&")
  local lines = { ("%s %s HTTP/1.1"):format(method, path), "Host: 127.0.0.1:" .. server.port, "Connection: close",
                  "Content-Type: application/x-www-form-urlencoded", "Content-Length: " .. #body }
  for name, value in pairs(headers or {}) do lines[#lines + 1] = name .. ": " .. value end
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

--- The same, and waits.
function checkout.ask(...) return checkout.send(...)() end

-- ------------------------------------------------------------------ people

local person_class = {}
person_class.__index = person_class

--- Somebody in front of a browser of his own, who is not logged in yet.
function server_class:person() return setmetatable({ server = self }, person_class) end

--- Somebody who is.
function server_class:log_in(login, administrator)
  local person = self:person()
  assert(person:post("/login", { login = login, administrator = administrator and 1 or "" }) == 303)
  person:get "/"
  return person
end

local function ask(self, method, path, fields, headers)
  local all = { Cookie = self.cookie }
  for name, value in pairs(headers or {}) do all[name] = value end
  local status, page, found = checkout.ask(self.server, method, path, fields, all)
  assert(status, "no answer")
  local cookie = found["set-cookie"]
  if cookie then self.cookie = cookie:match "^[^;]*" end
  self.form = page:match 'name="form" value="(%x+)"' or self.form
  self.lease = page:match 'name="lease" value="(%x+)"' or self.lease
  self.token = page:match 'name="token" value="(%x+)"' or self.token
  return status, page, found
end

function person_class:get(path, headers) return ask(self, "GET", path, nil, headers) end

--- Sends a form, with what each of the pages' forms contains unless the fields say otherwise. Who takes a customer sees
-- the editor, as a browser goes where it is sent.
function person_class:post(path, fields, headers)
  local all = { form = self.form, token = self.token }
  for name, value in pairs(fields or {}) do all[name] = value end
  local status, page, found = ask(self, "POST", path, all, headers)
  if status == 303 and path:find "/take$" then ask(self, "GET", found.location) end
  return status, page, found
end

--- Starts a post, and does not wait; returns what waits for the answer.
function person_class:send(path)
  return checkout.send(self.server, "POST", path, { form = self.form, token = self.token }, { Cookie = self.cookie })
end

return checkout
