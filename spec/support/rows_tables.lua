--- The tables of the specs of hierlock.rows, on each server and in a file of SQLite, with a connection to them.

local assert = require "luassert"
local hierlock = require "hierlock"
local support = require "spec.support"
local with = require "spec.support.rows"

local tables = {}

local PRODUCT, MESSAGE, SENT = "hierlock_rows_product", "hierlock_rows_message", "hierlock_rows_sent"
tables.PRODUCT, tables.MESSAGE, tables.SENT = PRODUCT, MESSAGE, SENT
-- As hierlock.rows is told of them.
local TABLES = { [PRODUCT] = { version = "version" } }
tables.TABLES = TABLES

local SCHEMA = {
  [PRODUCT] = "id INTEGER PRIMARY KEY, name VARCHAR(40), stock INTEGER, price INTEGER, note VARCHAR(40), version INTEGER NOT NULL, " ..
    "updated_at %s",
  [MESSAGE] = "id INTEGER PRIMARY KEY, status VARCHAR(10) NOT NULL, attempts INTEGER NOT NULL, version INTEGER NOT NULL",
  [SENT] = "id %s PRIMARY KEY, message INTEGER NOT NULL",
}
local TIME = { mysql = "DATETIME(6)", mariadb = "DATETIME(6)", postgresql = "TIMESTAMP(6)", sqlite = "TEXT" }
local SERIAL = { mysql = "INTEGER AUTO_INCREMENT", mariadb = "INTEGER AUTO_INCREMENT", postgresql = "SERIAL", sqlite = "INTEGER" }

-- The servers, and a database in a file.
local function each_database(busted, fn)
  support.each_connection(function(store)
    local function dsn() return store.bare_dsn end
    busted.describe("LuaSQL,", function() fn(store.name, dsn, store, store.name) end)
    if store.name ~= "postgresql" then return end
    -- Outside of nginx it needs openssl.rand for logging in.
    if pcall(require, "pgmoon") and pcall(require, "openssl.rand") then
      busted.describe("pgmoon,", function() fn(store.name, dsn, store, "pgmoon") end)
    else
      busted.pending "pgmoon is not on the package path (HIERLOCK_DRIVERS), or openssl.rand is not"
    end
  end, busted)
  busted.describe("on sqlite:", function()
    fn("sqlite", function() return os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "-rows.db" end, nil, "sqlite")
  end)
end

--- Calls fn(self) in a `describe` of each database. self: kind, by (which library), store (nil: SQLite), dsn();
-- connect(options), which returns a db and its connection, closed after the spec; query(text, ...), value(column, id) of a
-- product, program(options), a process with a db; assert_fails(code, ok, err). In a spec: db and connection. Product 1
-- is tea, of which there are five packets; product 2 is rice, of which there is none.
function tables.each(fn)
  local busted = support.environment_of(fn)
  each_database(busted, function(kind, dsn, store, by)
    local opened
    local self = { kind = kind, dsn = dsn, store = store, by = by }
    local is_mysql = kind == "mysql" or kind == "mariadb"

    function self.connect(options)
      local new, its = with.connect(by, dsn(), options)
      opened[#opened + 1] = its
      return new, its
    end

    function self.query(text, ...)
      if select("#", ...) > 0 then text = text:format(...) end
      return assert(with.query(self.connection, text))
    end

    function self.value(column, id)
      local found = self.query("SELECT %s FROM %s WHERE id=%d", column, PRODUCT, id or 1)[1]
      return found and (tonumber(found[1]) or found[1])
    end

    function self.program(options) return with.program(by, dsn(), options or { tables = TABLES }) end

    busted.setup(function()
      opened = {}
      -- Where PostgreSQL looks first: in public its users may make nothing.
      if kind == "postgresql" then store.root():query "CREATE SCHEMA testuser AUTHORIZATION testuser" end
      self.db, self.connection = self.connect { tables = TABLES }
      for name, columns in pairs(SCHEMA) do
        self.query("DROP TABLE IF EXISTS %s", name)
        columns = columns:gsub("updated_at %%s", "updated_at " .. TIME[kind]):gsub("id %%s", "id " .. SERIAL[kind])
        self.query("CREATE TABLE %s (%s)%s", name, columns, is_mysql and " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4" or "")
      end
      self.connection:close()
    end)
    busted.teardown(function()
      self.db, self.connection = self.connect()
      for name in pairs(SCHEMA) do self.query("DROP TABLE IF EXISTS %s", name) end
      self.connection:close()
      if kind == "postgresql" then store.root():query "DROP SCHEMA IF EXISTS testuser CASCADE" end
      if kind == "sqlite" then os.remove(dsn()) end
    end)

    busted.before_each(function()
      opened = {}
      self.db, self.connection = self.connect { tables = TABLES, timeout = 15 }
      for name in pairs(SCHEMA) do self.query("DELETE FROM %s", name) end
      self.query("INSERT INTO %s (id,name,stock,price,note,version,updated_at) VALUES (1,'Tea',5,10,NULL,1,'2020-01-01 00:00:00.000000')", PRODUCT)
      self.query("INSERT INTO %s (id,name,stock,price,note,version,updated_at) VALUES (2,'Rice',0,20,'n',1,'2020-01-01 00:00:00.000000')", PRODUCT)
    end)
    busted.after_each(function()
      support.close_peers()
      for _, each_one in ipairs(opened) do each_one:close() end
    end)

    function self.assert_fails(code, ok, err)
      assert.is_nil(ok)
      assert.is_true(hierlock.is_error(err))
      assert.equal(code, err.code, tostring(err))
      return err
    end

    fn(self)
  end)
end

return tables
