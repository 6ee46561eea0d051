--- Connections of LuaSQL's, by which specs look at servers and administer them.

local sql = {}

--- The DSN with one parameter more, or with another value of that one.
function sql.with_param(dsn, param)
  local others = dsn:gsub("([?&])" .. param:match "^[%w_]+=" .. "[^&]*&?", "%1"):gsub("[?&]$", "")
  return others .. (others:find("?", 1, true) and "&" or "?") .. param
end

-- The parts of a DSN, either form, that LuaSQL wants.
function sql.dsn_parts(dsn)
  local user, password, host, port, database =
    dsn:match("^%a+://([^:@]*):?([^@]*)@([^:/]*):?(%d*)/([^?]*)")
  if not user then
    user, password, host, port, database = dsn:match("^([^:@]*):?(.-)@tcp%(([^:)]*):?(%d*)%)/([^?]*)")
  end
  assert(user, "the specs need a DSN with user, password, host and port")
  if dsn:find("^%a+://") then
    password = password:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)
  end
  return database, user, password, host, tonumber(port) or 3306
end

--- The first column of rows.
function sql.column(rows)
  local values = {}
  for i, row in ipairs(rows) do values[i] = row[1] end
  return values
end

local luasql, luasql_postgresql

--- LuaSQL's environment: one for the process, never closed. The environment's close() ends the client library
-- (mysql_library_end), while threads of ours may be in it.
function sql.luasql()
  luasql = luasql or require("luasql.mysql").mysql()
  return luasql
end

--- Like sql.luasql, for its driver for PostgreSQL.
function sql.luasql_postgresql()
  luasql_postgresql = luasql_postgresql or require("luasql.postgres").postgres()
  return luasql_postgresql
end

--- A connection of LuaSQL's, for looking and for administration:
-- sql(query, ...) returns a list of rows, each a list; the arguments are put in
-- by string.format.
function sql.sql_connection(dsn)
  local self = { postgresql = dsn:find("^postgres") ~= nil }
  local environment = self.postgresql and sql.luasql_postgresql() or sql.luasql()
  local parts = { sql.dsn_parts(dsn) }
  -- Specs look by it, and it costs less without TLS.
  if self.postgresql then parts[1] = ("dbname=%s sslmode=disable"):format(parts[1]) end
  local connection = assert(environment:connect((table.unpack or unpack)(parts)))
  function self.query(_, query, ...)
    if select("#", ...) > 0 then query = query:format(...) end
    local cursor = assert(connection:execute(query))
    if type(cursor) == "number" then return cursor end
    local rows = {}
    while true do
      local row = cursor:fetch({}, "n")
      if not row then break end
      rows[#rows + 1] = row
    end
    cursor:close()
    return rows
  end
  function self.try(_, query) return connection:execute(query) end
  function self.close(_) connection:close() end
  return self
end

return sql
