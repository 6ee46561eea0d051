--- A TCP proxy before a server, in the spec's own process: it counts what a client sends, can keep the server's
-- answers back, and can change them. The proxy works while the spec waits for a peer (which runs luv's loop); so the
-- client has to be a process of its own.

local sql = require "spec.support.sql"
local uv = require "luv"

local proxy = {}

-- The first byte of a command, as the protocol numbers them.
local COMMANDS = {
  [1] = "quit", [3] = "query", [14] = "ping", [22] = "prepare", [23] = "execute",
  [25] = "close statement", [26] = "reset statement",
}

-- Notes a client's commands: whole packets whose sequence number is 0. Returns the rest of the buffer.
local function note_commands(buffer, found)
  while #buffer >= 4 do
    local a, b, c, sequence = buffer:byte(1, 4)
    local size = a + b * 256 + c * 65536
    if #buffer < 4 + size then break end
    if sequence == 0 then
      local number = buffer:byte(5)
      local name = COMMANDS[number] or tostring(number)
      -- libmysqlclient says first that the query has no attributes, in one set.
      found(name, name == "query" and buffer:sub(6, 4 + size):gsub("^%z\1", "") or nil)
    end
    buffer = buffer:sub(5 + size)
  end
  return buffer
end

-- Notes the commands of PostgreSQL's protocol: a client's first message has no type.
local MESSAGES = { Q = "query", X = "quit", p = "password" }

local function note_messages(buffer, found)
  while #buffer >= 8 do
    local untyped = buffer:byte(1) == 0
    local a, b, c, d = buffer:byte(untyped and 1 or 2, untyped and 4 or 5)
    local size = ((a * 256 + b) * 256 + c) * 256 + d + (untyped and 0 or 1)
    if #buffer < size then break end
    if untyped then
      local code = buffer:sub(5, 8)
      found(code == "\4\210\22\46" and "cancel" or code == "\0\3\0\0" and "log in" or "negotiate")
    else
      local name = MESSAGES[buffer:sub(1, 1)] or buffer:sub(1, 1)
      found(name, name == "query" and buffer:sub(6, size - 1) or nil)
    end
    buffer = buffer:sub(size + 1)
  end
  return buffer
end

-- Notes the commands of Redis' protocol: arrays of strings. A command's name is its first word, in small letters.
local function note_arrays(buffer, found)
  while true do
    local n, at = buffer:match "^%*(%d+)\r\n()"
    if not n then return buffer end
    local words = {}
    for i = 1, tonumber(n) do
      local size, from = buffer:match("^%$(%d+)\r\n()", at)
      if not size or #buffer < from + size + 1 then return buffer end
      words[i] = buffer:sub(from, from + size - 1)
      at = from + size + 2
    end
    found(words[1]:lower(), table.concat(words, " ", 2))
    buffer = buffer:sub(at)
  end
end

-- Other protocols' commands are not noted.
local function note_nothing() return "" end

--- Opens a proxy before the server of a store. rewrite(data, first): what the client is told instead of the server's
-- data; first: it is the greeting. tls: the DSN's parameter (tls, sslmode), "off" unless said; with another no
-- commands are seen. own_port: the proxy's; any that is free unless said. Returns a table: `dsn`, for clients;
-- `commands`, a list of {name, text, connection}; `hold(n [, bytes])`, which keeps the answers of the n-th
-- connection back until `let(n)`, all but the first so many bytes; `detain(n [, passes])`, which keeps back what the
-- client of the n-th connection says, all but the next so many times, or from that text on, until `deliver(n)`,
-- though that has ended meanwhile; `drip(n, ms)`: from then on the answers of the n-th connection come in single bytes, each so much later
-- than the one before; without n, the answers of all later connections; `freeze()`: nothing more goes through the
-- connections that there are, in either direction, and none ends; `leave(n)`: ends the n-th connection for its client, if
-- that has not ended it; `cut()`: likewise, and new ones get no answer
-- either; `refuse(n)`: only so many more connections are let through, and others are ended at once; `delay(ms)`:
-- each answer comes so much later; `turns`: how often a client has said something after an answer, or at first;
-- `sent`: all that clients have said; `close()`.
function proxy.open(store, rewrite, tls, own_port)
  local self = { commands = {}, connections = {}, turns = 0, sent = "" }
  local server = uv.new_tcp()
  local port = tonumber(store.dsn:match(":(%d+)[/)]") or store.dsn:match(":(%d+)$"))
  assert(server:bind("127.0.0.1", own_port or 0))
  self.dsn = store.dsn:gsub(":" .. port, ":" .. server:getsockname().port, 1)
  if not store.leases_only then
    self.dsn = sql.with_param(self.dsn, store.table and "tls=" .. (tls or "off") or "sslmode=" .. (tls or "disable"))
  end
  local note = store.name == "redis" and note_arrays or store.leases_only and note_nothing or store.table and note_commands or note_messages

  local function accept()
    local n = #self.connections + 1
    local connection = { client = uv.new_tcp(), upstream = uv.new_tcp(), kept = {}, passes = 0 }
    local client, upstream = connection.client, connection.upstream
    local function finish()
      for _, handle in pairs { client, upstream, connection.timer } do
        if not handle:is_closing() then handle:close() end
      end
    end
    local function tell(data)
      if data ~= "" and not client:is_closing() then client:write(data) end
    end
    local buffer, first = "", true
    self.connections[n] = connection
    assert(server:accept(client))
    connection.finish, connection.tell = finish, tell
    if self.drips then self.drip(n, self.drips) end
    if self.allowed then
      if self.allowed == 0 then return finish() end
      self.allowed = self.allowed - 1
    end
    upstream:connect("127.0.0.1", port, function(err)
      if err then return finish() end
      client:read_start(function(_, data)
        if self.is_cut or connection.frozen then return end
        if connection.text and data and data:find(connection.text, 1, true) then
          connection.text, connection.detained = nil, {}
        end
        if connection.detained and connection.spared > 0 then
          connection.spared = connection.spared - 1
        elseif connection.detained then
          connection.detained[#connection.detained + 1] = data
          return
        end
        if not data then return finish() end
        if connection.answered then self.turns = self.turns + 1 end
        connection.answered = false
        self.sent = self.sent .. data
        buffer = tls and "" or note(buffer .. data, function(name, text)
          self.commands[#self.commands + 1] = { name = name, text = text, connection = n }
        end)
        if not upstream:is_closing() then upstream:write(data) end
      end)
      upstream:read_start(function(_, data)
        if self.is_cut or connection.frozen or (connection.held and not data) then return end
        if not data then return finish() end
        if rewrite then data = rewrite(data, first) end
        first, connection.answered = false, true
        if connection.held then
          tell(data:sub(1, connection.passes))
          connection.kept[#connection.kept + 1] = data:sub(connection.passes + 1)
          connection.passes = math.max(0, connection.passes - #data)
        elseif connection.timer then
          for i = 1, #data do connection.kept[#connection.kept + 1] = data:sub(i, i) end
        elseif self.late then
          local timer = uv.new_timer()
          timer:start(self.late, 0, function()
            timer:close()
            tell(data)
          end)
        else
          tell(data)
        end
      end)
    end)
  end
  assert(server:listen(16, accept))

  function self.cut() self.is_cut = true end
  function self.freeze()
    for _, connection in ipairs(self.connections) do connection.frozen = true end
  end
  function self.refuse(n) self.allowed = n end
  function self.delay(ms) self.late = ms end
  function self.hold(n, bytes)
    local connection = self.connections[n]
    connection.held, connection.passes = true, bytes or 0
  end
  function self.let(n)
    local connection = self.connections[n]
    connection.held = false
    connection.tell(table.concat(connection.kept))
    connection.kept = {}
  end
  function self.detain(n, passes)
    local connection, from = self.connections[n], type(passes) == "string"
    connection.text = from and passes or nil
    connection.detained, connection.spared = not from and {} or nil, not from and passes or 0
  end
  function self.leave(n)
    local client = self.connections[n].client
    if not client:is_closing() then client:close() end
  end
  --- Returns when the server has begun to answer, or has ended the connection.
  function self.deliver(n)
    local connection = self.connections[n]
    local said = table.concat(connection.detained)
    connection.detained = nil
    if said == "" then return end
    connection.answered = false
    if not connection.upstream:is_closing() then connection.upstream:write(said) end
    while not connection.answered and not connection.upstream:is_closing() do uv.run "once" end
  end
  function self.drip(n, ms)
    if not n then
      self.drips = ms
      return
    end
    local connection = self.connections[n]
    connection.timer = uv.new_timer()
    connection.timer:start(ms, ms, function()
      if #connection.kept > 0 then connection.tell(table.remove(connection.kept, 1)) end
    end)
  end
  --- The commands since the last call, as "name" or, of queries, the text.
  function self.take()
    -- The server's side may not yet have read what the peer sent before it was done.
    for _ = 1, 3 do uv.run("nowait") end
    local list = {}
    for i, command in ipairs(self.commands) do list[i] = command.text or command.name end
    self.commands = {}
    return list
  end
  function self.close()
    for _, connection in ipairs(self.connections) do connection.finish() end
    if not server:is_closing() then server:close() end
    uv.run("nowait")
  end
  return self
end

return proxy
