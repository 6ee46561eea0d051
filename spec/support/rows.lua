--- Shared by the specs of hierlock.rows: servers with a database of LuaSQL's, SQLite among them; programs in
-- processes of their own, each with a connection.

local rows = require "hierlock.rows"
local support = require "spec.support"

local with = {}

local sqlite

-- pgmoon's, with what the specs use of LuaSQL's.
local function connect_pgmoon(dsn)
  local user, password, host, port, database = dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
  local connection = require "pgmoon".new { user = user, password = password, host = host, port = port, database = database }
  assert(connection:connect())
  local adapter = {}
  function adapter.execute(_, text)
    local result, message = connection:query(text)
    if not result then return nil, message end
    if result == true or result.affected_rows and not result[1] then return result == true and 0 or result.affected_rows end
    local i = 0
    return {
      fetch = function()
        i = i + 1
        local row, list = result[i], {}
        for _, value in pairs(row or {}) do list[#list + 1] = value end -- of one column, mostly
        return row and list
      end,
      close = function() end,
    }
  end
  function adapter.close(_) connection:disconnect() end
  return connection, adapter
end

-- A connection and a db. kind: a server's, "sqlite", where dsn is the file, or "pgmoon", to PostgreSQL.
function with.connect(kind, dsn, options)
  local connection
  if kind == "pgmoon" then
    local own, adapter = connect_pgmoon(dsn)
    return rows.pgmoon(own, options), adapter
  end
  if kind == "sqlite" then
    sqlite = sqlite or require("luasql.sqlite3").sqlite3()
    connection = assert(sqlite:connect(dsn))
  else
    local user, password, host, port, database = dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    local environment = kind == "postgresql" and support.luasql_postgresql() or support.luasql()
    connection = assert(environment:connect(database, user, password, host, tonumber(port)))
  end
  return rows.luasql(connection, options), connection
end

--- All rows of a query, each a list; or nil, message.
function with.query(connection, text)
  local cursor, message = connection:execute(text)
  if not cursor then return nil, message end
  if type(cursor) == "number" then return cursor end
  local list = {}
  for row in function() return cursor:fetch({}, "n") end do
    if next(row) == nil then break end -- LuaSQL 2.8, where SQLite has none
    list[#list + 1] = row
  end
  cursor:close()
  return list
end

--- Another program: db, connection and `rows` are known to its chunks.
function with.program(kind, dsn, options)
  local peer = support.process(nil)
  peer:call([[
    handles.with, handles.rows = require "spec.support.rows", require "hierlock.rows"
    handles.db, handles.connection = handles.with.connect(...)
  ]], kind, dsn, options)
  -- Runs a chunk that sees db, connection, rows, query; its arguments are `...`.
  function peer.begin(_, chunk, ...)
    return peer:start("local db, connection, rows = handles.db, handles.connection, handles.rows " ..
      "local function query(text) return assert(handles.with.query(connection, text)) end " .. chunk, ...)
  end
  function peer.run(_, chunk, ...) return peer:begin(chunk, ...):result() end
  return peer
end

return with
