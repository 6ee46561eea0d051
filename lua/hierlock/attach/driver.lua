--- The drivers that hierlock.attach and hierlock.rows know, each as a function query(sql, wait). The function returns
-- the rows, each a list or a table by name, or another true value; on failure nil, message, errno, sqlstate. A
-- driver for PostgreSQL gives the message only, and the SQLSTATE 08006 where it knows that the message is not the
-- server's. For MySQL no errno means that the connection is of no use any more. `affected_rows` of the result: how
-- many rows a statement has written, as the driver counts. wait: ms for which the server may be silent. LuaSQL's
-- rows are lists, unless `shape` is "a": by name. Internal.
--
-- A driver of OpenResty's that gives up waiting leaves the connection open, and the answer still comes: the next
-- question would get it. So whenever the server has not answered, the connection is closed. The driver's own next query
-- fails then, and no pool takes the connection.

local driver = {}

-- In nginx a driver gives up after its own limit, and closes the connection. So the limit is raised while the server
-- may be silent, if we know which limit to restore.
local SOCKET_SLACK = 5000
local SOCKET_LONGEST = 2147483647 -- ngx takes no more

-- query(sql) with a longer limit while it waits; set(ms) sets it. socket_timeout: seconds, what
-- the program has set, or nil.
local function patient(query, set, socket_timeout)
  if not socket_timeout then return query end
  return function(sql, wait)
    if not wait then return query(sql) end
    set(math.min(math.max(wait + SOCKET_SLACK, socket_timeout * 1000), SOCKET_LONGEST))
    local rows, message, errno, sqlstate = query(sql)
    set(socket_timeout * 1000)
    return rows, message, errno, sqlstate
  end
end

-- -------------------------------------------------------------- LuaSQL

-- All rows, or nil, message. has_ghosts: LuaSQL 2.8 gives an empty table for SQLite's "no row". Such a table looks
-- like a row that is NULL in each column: a caller that may meet one asks for a column that is never NULL.
local function luasql_run(connection, sql, shape, has_ghosts)
  local cursor, message = connection:execute(sql)
  if not cursor then return nil, tostring(message) end
  if type(cursor) == "number" then return { affected_rows = cursor } end
  local rows = {}
  local row
  repeat
    row, message = cursor:fetch({}, shape or "n")
    if row and has_ghosts and next(row) == nil then row = nil end
    rows[#rows + 1] = row
  until not row
  cursor:close()
  if message then return nil, tostring(message) end -- SQLite's come one by one
  return rows
end

-- LuaSQL has messages only. The server is asked for the rest; who does not answer is
-- gone. Cleared at once: where there is nothing to tell, the variables stay as they are.
local function luasql_diagnose(connection, message)
  if connection:execute("GET CURRENT DIAGNOSTICS CONDITION 1 @hierlock_errno=MYSQL_ERRNO," ..
                        "@hierlock_sqlstate=RETURNED_SQLSTATE") then
    local rows = luasql_run(connection, "SELECT @hierlock_errno,@hierlock_sqlstate")
    local row = rows and rows[1]
    connection:execute("SET @hierlock_errno=NULL,@hierlock_sqlstate=NULL")
    if row and row[1] then return nil, message, tonumber(row[1]), row[2] end
  end
  return nil, message
end

function driver.luasql_mysql(connection, shape)
  return function(sql)
    local rows, message = luasql_run(connection, sql, shape)
    if rows then return rows end
    return luasql_diagnose(connection, (message:gsub("^LuaSQL: error executing query%. MySQL: ", "")))
  end
end

-- Without the severity, and the line feed at the end.
local function postgresql_message(message) return (message:gsub("^%u+:%s*", ""):gsub("%s+$", "")) end

function driver.luasql_postgresql(connection, shape)
  return function(sql)
    local rows, message = luasql_run(connection, sql, shape)
    if rows then return rows end
    return nil, postgresql_message((message:gsub("^LuaSQL: [^.]*%. PostgreSQL: ", "")))
  end
end

function driver.luasql_sqlite(connection, shape)
  return function(sql)
    local rows, message = luasql_run(connection, sql, shape, true)
    if rows then return rows end
    return nil, (message:gsub("^LuaSQL: ", ""))
  end
end

-- --------------------------------------------------------- of OpenResty

-- Closes a connection on which an answer may still be on its way. close: the name of the driver's method.
local function drop(db, close)
  local ok, closed = pcall(db[close], db)
  if not (ok and closed) and db.sock then pcall(db.sock.close, db.sock) end
end

function driver.resty_mysql(db, socket_timeout)
  return patient(function(sql)
    local rows, message, errno, sqlstate = db:query(sql)
    if rows then return rows end
    if not errno then drop(db, "close") end
    return nil, message, errno, sqlstate
  end, function(ms) db:set_timeout(ms) end, socket_timeout)
end

--- Returns pgmoon's query function, and a function that closes the connection.
function driver.pgmoon(db, socket_timeout)
  local function close()
    drop(db, "disconnect")
    -- LuaSocket still gives what it has read of a connection that is closed: an answer to the next question.
    while db.sock_type == "luasocket" and db.sock:receive(1) do end -- luacheck: ignore 542
  end
  return patient(function(sql)
    local result, message, _, answered = db:query(sql)
    if not result then
      message = tostring(message)
      -- Behind a message of the server, in whatever language, it says how many statements were carried out.
      if answered then return nil, postgresql_message(message) end
      close()
      return nil, message, nil, "08006"
    end
    -- For several statements the result is a list of results, and `message` their number.
    if type(message) == "number" and message > 1 then result = result[message] end
    return result
  end, function(ms) db:settimeout(ms) end, socket_timeout), close
end

return driver
