-- The customers, and the sessions of those who have logged in, in SQLite. Raises what SQLite says.
--
-- The session here, on the server, keeps the text of a person's lease. The text never goes to the browser: a
-- person with the text has the customer. A browser keeps only the session's id, which ends with the log-out.

local luasql = require "luasql.sqlite3"

local data = {}

local PATH = os.getenv("CHECKOUT_DATABASE") or "/tmp/hierlock-checkout/data.db"
local SESSION_SECONDS = 12 * 3600

local SCHEMA = {
  [[CREATE TABLE IF NOT EXISTS customer (id INTEGER PRIMARY KEY, name TEXT NOT NULL, phone TEXT NOT NULL,
      note TEXT NOT NULL, token TEXT NOT NULL DEFAULT '')]],
  [[CREATE TABLE IF NOT EXISTS session (id TEXT PRIMARY KEY, login TEXT NOT NULL, administrator INTEGER NOT NULL,
      form TEXT NOT NULL, since INTEGER NOT NULL)]],
  [[CREATE TABLE IF NOT EXISTS taken (session TEXT NOT NULL, customer INTEGER NOT NULL, text TEXT NOT NULL,
      PRIMARY KEY (session, customer))]],
}

local CUSTOMERS = {
  { "Ada's Bakery", "030 5550 117", "Bread at six, rolls at seven.\nBack door, please." },
  { "Harbour Hotel", "040 5550 142", "Invoices by the month.\nAsk for Mrs Lindqvist." },
  { "Kaspar & Sons", "089 5550 101", "Pays late, but pays." },
  { "Municipal Library", "0221 5550 199", "Closed on Mondays." },
  { "Zoë's Bicycles", "0711 5550 163", "Delivers by herself." },
}

local connection

-- Each ? is one of the values: a number, or a string in quotes. (LuaSQL 2.6 has no parameters.)
local function run(statement, ...)
  local values, n = { ... }, 0
  statement = statement:gsub("%?", function()
    n = n + 1
    local value = values[n]
    if type(value) == "number" then return ("%d"):format(value) end
    return "'" .. value:gsub("'", "''") .. "'"
  end)
  local result, err = connection:execute(statement)
  if not result then error(err, 0) end
  if type(result) == "number" then return result end
  local rows = {}
  repeat
    local row = result:fetch({}, "a")
    if row and not next(row) then row = nil end -- LuaSQL 2.8, where there is none
    rows[#rows + 1] = row
  until not row
  result:close()
  return rows
end

-- In a worker: a connection does not survive a fork.
local function open()
  connection = assert(luasql.sqlite3():connect(PATH))
  run "PRAGMA busy_timeout = 2000" -- the other worker writes
  run "BEGIN IMMEDIATE"
  for _, statement in ipairs(SCHEMA) do run(statement) end
  if run("SELECT count(*) AS n FROM customer")[1].n == 0 then
    for _, customer in ipairs(CUSTOMERS) do
      run("INSERT INTO customer (name, phone, note) VALUES (?, ?, ?)", customer[1], customer[2], customer[3])
    end
  end
  run "COMMIT"
end

local function query(...)
  if not connection then open() end
  return run(...)
end

-- ------------------------------------------------------------- customers

function data.customers() return query "SELECT * FROM customer ORDER BY name" end
function data.customer(id) return query("SELECT * FROM customer WHERE id = ?", id)[1] end

--- Fences off the earlier holder: from now on its writes are refused. Call it before the new holder reads the
-- customer. False: a holder with a later token was here.
function data.fence(id, token)
  return query("UPDATE customer SET token = ? WHERE id = ? AND token <= ?", token, id, token) == 1
end

--- False: fenced off.
function data.save(id, customer, token)
  return query("UPDATE customer SET name = ?, phone = ?, note = ?, token = ? WHERE id = ? AND token <= ?",
               customer.name, customer.phone, customer.note, token, id, token) == 1
end

-- -------------------------------------------------------------- sessions

local function random()
  local file = assert(io.open("/dev/urandom", "rb"))
  local bytes = file:read(16)
  file:close()
  return (bytes:gsub(".", function(byte) return ("%02x"):format(byte:byte()) end))
end

--- The session of that id; or nil, if it does not exist or began half a day ago.
function data.session(id)
  return query("SELECT * FROM session WHERE id = ? AND since >= ?", id, os.time() - SESSION_SECONDS)[1]
end

--- A new session; returns its id. `form` is what its forms must contain: another site does not know it.
function data.log_in(login, administrator)
  query("DELETE FROM session WHERE since < ?", os.time() - SESSION_SECONDS)
  query "DELETE FROM taken WHERE session NOT IN (SELECT id FROM session)"
  local id = random()
  query("INSERT INTO session VALUES (?, ?, ?, ?, ?)", id, login, administrator and 1 or 0, random(), os.time())
  return id
end

--- Ends all sessions of a person.
function data.log_out(login)
  query("DELETE FROM taken WHERE session IN (SELECT id FROM session WHERE login = ?)", login)
  query("DELETE FROM session WHERE login = ?", login)
end

--- The text of the lease by which a session has a customer, or nil.
function data.taken(session, id)
  local row = query("SELECT text FROM taken WHERE session = ? AND customer = ?", session.id, id)[1]
  return row and row.text
end

--- False: the session has ended meanwhile.
function data.take(session, id, text)
  return query("REPLACE INTO taken SELECT id, ?, ? FROM session WHERE id = ?", id, text, session.id) == 1
end

function data.forget(session, id) query("DELETE FROM taken WHERE session = ? AND customer = ?", session.id, id) end

return data
