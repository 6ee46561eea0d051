-- The data of the shop, in SQLite, MySQL, MariaDB or PostgreSQL: one connection for each worker. More would be idle:
-- no request yields between the begin of a transaction and its end.

local hierlock = require "hierlock"
local rows = require "hierlock.rows"

local data = {}

local DATABASE = os.getenv "SHOP_DATABASE" or "sqlite:/tmp/hierlock-shop/data.db"
local MAIL = os.getenv "SHOP_MAIL" or "/tmp/hierlock-shop/mail"

--- Seconds that a request waits for another holder.
data.WAIT = tonumber(os.getenv "SHOP_WAIT") or 2

local OPTIONS = { timeout = data.WAIT, tables = {
  shop_product = { version = "version" },
  shop_order = { key = "ref", version = "version" },
} }

local SCHEMA = {
  [[CREATE TABLE IF NOT EXISTS shop_product (id INTEGER PRIMARY KEY, name VARCHAR(100) NOT NULL,
      price INTEGER NOT NULL, stock INTEGER NOT NULL, version INTEGER NOT NULL)]],
  [[CREATE TABLE IF NOT EXISTS shop_order (ref VARCHAR(32) PRIMARY KEY, product INTEGER NOT NULL, number INTEGER NOT NULL,
      price INTEGER NOT NULL, status VARCHAR(10) NOT NULL, version INTEGER NOT NULL)]],
  "CREATE TABLE IF NOT EXISTS shop_setting (name VARCHAR(20) PRIMARY KEY, value VARCHAR(20) NOT NULL)",
}

-- Prices are in cents.
local PRODUCTS = { { "Green tea", 450 }, { "Black tea", 390 }, { "Mint", 320 }, { "Rooibos", 380 }, { "Oolong", 720 } }
local STOCK = 5

local connection, db, locks

-- --------------------------------------------------------------- connect

local function connect()
  local path = DATABASE:match "^sqlite:(.+)$"
  if path then
    local opened, why = require("luasql.sqlite3").sqlite3():connect(path)
    if opened then
      assert(opened:execute(("PRAGMA busy_timeout = %d"):format(data.WAIT * 1000))):close()
      assert(opened:execute "PRAGMA journal_mode = WAL"):close()
    end
    return opened, why
  end
  local kind, user, password, host, port, name = DATABASE:match "^(%l+)://([^:@]*):?([^@]*)@([^:/]*):?(%d*)/([^?]*)"
  if not kind then error "SHOP_DATABASE is sqlite:/path, mysql://user:password@host:port/database or postgresql://…" end
  if kind == "postgresql" then return require("luasql.postgres").postgres():connect(name, user, password, host, tonumber(port)) end
  return require("luasql.mysql").mysql():connect(name, user, password, host, tonumber(port))
end

-- Each ? is one of the values: a number, or a string in quotes. Raises what the server says.
local function run(statement, ...)
  local values, n = { ... }, 0
  statement = statement:gsub("%?", function()
    n = n + 1
    local value = values[n]
    return type(value) == "number" and ("%d"):format(value) or "'" .. connection:escape(value) .. "'"
  end)
  local result, why = connection:execute(statement)
  if not result then error(why, 0) end
  if type(result) == "number" then return result end
  local found = {}
  repeat
    local row = result:fetch({}, "a")
    if row and not next(row) then row = nil end -- LuaSQL 2.8, where there is none
    found[#found + 1] = row and data.numbers(row)
  until not row
  result:close()
  return found
end

--- The row with its numbers as numbers: drivers have them as text.
function data.numbers(row)
  for name, value in pairs(row) do row[name] = name ~= "ref" and name ~= "name" and tonumber(value) or value end
  return row
end

local function fill()
  run "DELETE FROM shop_order"
  run "DELETE FROM shop_product"
  for id, product in ipairs(PRODUCTS) do
    run("INSERT INTO shop_product (id, name, price, stock, version) VALUES (?, ?, ?, ?, 1)", id, product[1], product[2], STOCK)
  end
end

local failure
local later = 0

--- The manager of locks; or nil, err. Opening blocks the worker: after a failure it tries again a second later, and
-- not before.
function data.locks()
  if not locks and os.time() >= later then
    locks, failure = hierlock.open(nil, { application = "shop" })
    later = os.time() + 1
  end
  return locks, failure
end

local function prepare()
  for _, statement in ipairs(SCHEMA) do run(statement) end
  if not run("SELECT id FROM shop_product WHERE id = 1")[1] then fill() end
  if not run("SELECT value FROM shop_setting WHERE name = 'way'")[1] then
    run "INSERT INTO shop_setting (name, value) VALUES ('way', 'none')"
  end
end

--- Connects, if that is not done yet, and makes the tables; true, or nil and an err.
function data.ready()
  if db then return true end
  local manager, err = data.locks()
  if not manager then return nil, err end
  local handle -- one worker makes the tables, the others wait, and find them
  handle, err = manager:acquire({ "shop", "tables" }, { timeout = 10, label = "connecting" })
  if not handle then return nil, err end
  if not db then -- nor another request of this worker
    connection, err = connect()
    local ok, why = connection ~= nil, err
    if ok then ok, why = pcall(prepare) end
    if ok then
      db = rows.luasql(connection, OPTIONS)
    else
      data.close()
      err = { code = "connection", message = tostring(why), retryable = true }
    end
  end
  handle:release()
  if db then return true end
  return nil, err
end

--- Ends the connection, if there is one: the next request makes a new one.
function data.close()
  if connection then connection:close() end
  connection, db = nil, nil
end

-- ------------------------------------------------------------------ use

--- The db of hierlock.rows.
function data.db() return db end

data.run = run

function data.products() return run "SELECT * FROM shop_product ORDER BY id" end

--- A product as it is now, its numbers as numbers; or nil.
function data.product(id) return run("SELECT * FROM shop_product WHERE id = ?", id)[1] end

function data.order(ref) return run("SELECT * FROM shop_order WHERE ref = ?", ref)[1] end

--- Writes an order, in the transaction of the sale. `ref` comes from the form: a form that is sent twice makes
-- one order.
function data.add_order(ref, product, number, price)
  return run("INSERT INTO shop_order (ref, product, number, price, status, version) VALUES (?, ?, ?, ?, 'new', 1)",
             ref, product, number, price)
end

--- How many orders there are of each status.
function data.orders()
  local count = { new = 0, sending = 0, sent = 0 }
  for _, row in ipairs(run "SELECT status, count(*) AS n FROM shop_order GROUP BY status") do count[row.status] = row.n end
  return count
end

--- Orders whose message is to be sent, at most so many.
function data.new_orders(limit) return run("SELECT * FROM shop_order WHERE status = 'new' ORDER BY ref LIMIT ?", limit) end

function data.way() return run("SELECT value FROM shop_setting WHERE name = 'way'")[1].value end
function data.set_way(way) run("UPDATE shop_setting SET value = ? WHERE name = 'way'", way) end

--- The products as in the beginning, and no orders.
function data.reset()
  fill()
  os.remove(MAIL)
end

--- Sends the customer a message. The message is out at once, and no ROLLBACK takes
-- it back.
function data.send(order)
  local file = assert(io.open(MAIL, "a"))
  file:write(order.ref, "\n") -- in one piece, as it is short
  file:close()
end

return data
