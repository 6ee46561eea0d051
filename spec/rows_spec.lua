--- Exclusive control of business data: each way against each trouble, by real programs side by side, on
-- every server; what each error path says; what a COMMIT without an answer is called.

local core = require "hierlock.core"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local rows = require "hierlock.rows"
local support = require "spec.support"
local with = require "spec.support.rows"

local PRODUCT, MESSAGE, SENT = "hierlock_rows_product", "hierlock_rows_message", "hierlock_rows_sent"
local TABLES = { [PRODUCT] = { version = "version" } }
local TIMED = { [PRODUCT] = { timestamp = "updated_at" } }
local UNMARKED = {}

local SCHEMA = {
  [PRODUCT] = "id INTEGER PRIMARY KEY, name VARCHAR(40), stock INTEGER, price INTEGER, note VARCHAR(40), version INTEGER NOT NULL, " ..
    "updated_at %s",
  [MESSAGE] = "id INTEGER PRIMARY KEY, status VARCHAR(10) NOT NULL, attempts INTEGER NOT NULL, version INTEGER NOT NULL",
  [SENT] = "id %s PRIMARY KEY, message INTEGER NOT NULL",
}
local TIME = { mysql = "DATETIME(6)", mariadb = "DATETIME(6)", postgresql = "TIMESTAMP(6)", sqlite = "TEXT" }
local SERIAL = { mysql = "INTEGER AUTO_INCREMENT", mariadb = "INTEGER AUTO_INCREMENT", postgresql = "SERIAL", sqlite = "INTEGER" }

-- The servers, and a database in a file.
local function each(fn)
  support.each_connection(function(store)
    local function dsn() return store.bare_dsn end
    describe("LuaSQL,", function() fn(store.name, dsn, store, store.name) end)
    if store.name ~= "postgresql" then return end
    -- Outside of nginx it needs openssl.rand for logging in.
    if pcall(require, "pgmoon") and pcall(require, "openssl.rand") then
      describe("pgmoon,", function() fn(store.name, dsn, store, "pgmoon") end)
    else
      pending "pgmoon is not on the package path (HIERLOCK_DRIVERS), or openssl.rand is not"
    end
  end)
  describe("on sqlite:", function()
    fn("sqlite", function() return os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "-rows.db" end, nil, "sqlite")
  end)
end

each(function(kind, dsn, store, by)
  local db, connection, opened
  local is_mysql = kind == "mysql" or kind == "mariadb"

  local function connect(options)
    local new, its = with.connect(by, dsn(), options)
    opened[#opened + 1] = its
    return new, its
  end

  local function query(text, ...)
    if select("#", ...) > 0 then text = text:format(...) end
    return assert(with.query(connection, text))
  end

  local function value(column, id)
    local found = query("SELECT %s FROM %s WHERE id=%d", column, PRODUCT, id or 1)[1]
    return found and (tonumber(found[1]) or found[1])
  end

  local function program(options) return with.program(by, dsn(), options or { tables = TABLES }) end

  setup(function()
    opened = {}
    -- Where PostgreSQL looks first: in public its users may make nothing.
    if kind == "postgresql" then store.root():query "CREATE SCHEMA testuser AUTHORIZATION testuser" end
    db, connection = connect { tables = TABLES }
    for name, columns in pairs(SCHEMA) do
      query("DROP TABLE IF EXISTS %s", name)
      columns = columns:gsub("updated_at %%s", "updated_at " .. TIME[kind]):gsub("id %%s", "id " .. SERIAL[kind])
      query("CREATE TABLE %s (%s)%s", name, columns, is_mysql and " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4" or "")
    end
    connection:close()
  end)
  teardown(function()
    db, connection = connect()
    for name in pairs(SCHEMA) do query("DROP TABLE IF EXISTS %s", name) end
    connection:close()
    if kind == "postgresql" then store.root():query "DROP SCHEMA IF EXISTS testuser CASCADE" end
    if kind == "sqlite" then os.remove(dsn()) end
  end)

  before_each(function()
    opened = {}
    db, connection = connect { tables = TABLES, timeout = 15 }
    for name in pairs(SCHEMA) do query("DELETE FROM %s", name) end
    query("INSERT INTO %s (id,name,stock,price,note,version,updated_at) VALUES (1,'Tea',5,10,NULL,1,'2020-01-01 00:00:00.000000')", PRODUCT)
    query("INSERT INTO %s (id,name,stock,price,note,version,updated_at) VALUES (2,'Rice',0,20,'n',1,'2020-01-01 00:00:00.000000')", PRODUCT)
  end)
  after_each(function()
    support.close_peers()
    for _, each_one in ipairs(opened) do each_one:close() end
  end)

  local function assert_fails(code, ok, err)
    assert.is_nil(ok)
    assert.is_true(hierlock.is_error(err))
    assert.equal(code, err.code, tostring(err))
    return err
  end

  it("asks for the settings of its connection once", function()
    local sent = 0
    local ask = db.query
    db.query = function(...)
      sent = sent + 1
      return ask(...)
    end
    assert(db:read(PRODUCT, 1))
    sent = 0
    assert(db:read(PRODUCT, 1))
    assert.equal(1, sent)
  end)

  -- ------------------------------------------------- the three troubles

  -- Takes n of product 1; true, or nil, code. Each is a chunk of a program.
  local BUY = {
    condition = [[
      local ok, err = db:update(..., 1, { stock = rows.expr("stock - ?", n) }, { where = { "stock >= ?", n } })
    ]],
    lock = [[
      local ok, err = db:transaction({ retries = 20 }, function()
        local row, err = db:read(PRODUCT, 1, { lock = "update", wait = 15 })
        if not row then return nil, err end
        if tonumber(row.stock) < n then return nil, { code = "refused" } end
        return db:update(PRODUCT, 1, { stock = row.stock - n }, { version = row.version })
      end)
    ]],
    version = [[
      local ok, err
      repeat
        local row = assert(db:read(PRODUCT, 1))
        if tonumber(row.stock) < n then
          ok, err = nil, { code = "refused" }
        else
          ok, err = db:update(PRODUCT, 1, { stock = row.stock - n }, { version = row.version })
        end
      until ok or err.code ~= "stale"
    ]],
    timestamp = [[
      local ok, err
      repeat
        local row = assert(db:read(PRODUCT, 1))
        if tonumber(row.stock) < n then
          ok, err = nil, { code = "refused" }
        else
          ok, err = db:update(PRODUCT, 1, { stock = row.stock - n }, { timestamp = row.updated_at })
        end
      until ok or err.code ~= "stale"
    ]],
    old = [[
      local ok, err
      repeat
        local row = assert(db:read(PRODUCT, 1, { columns = { "stock", "note" } }))
        if tonumber(row.stock) < n then
          ok, err = nil, { code = "refused" }
        else
          ok, err = db:update(PRODUCT, 1, { stock = row.stock - n }, { old = row, columns = { "stock", "note" } })
        end
      until ok or err.code ~= "stale"
    ]],
  }

  local function buy_chunk(way)
    return "local PRODUCT, n, times = ... local bought, refused = 0, 0 for _ = 1, times do " ..
      BUY[way]:gsub("update%(%.%.%.,", "update(PRODUCT,") ..
      " if ok then bought = bought + 1 elseif err.code == 'refused' then refused = refused + 1 " ..
      "else error(err.code .. ': ' .. tostring(err.message)) end end " ..
      "return bought, refused"
  end

  for way in pairs(BUY) do
    local described = ({ timestamp = TIMED, old = UNMARKED })[way] or TABLES

    it("sells the last five packets of tea once, by " .. way, function()
      local one, two = program { tables = described }, program { tables = described }
      one:begin(buy_chunk(way), PRODUCT, 5, 1)
      two:begin(buy_chunk(way), PRODUCT, 5, 1)
      local first, second = one:result(), two:result()
      assert.equal(1, first + second)
      assert.equal(0, value "stock")
    end)

    it("keeps the stock above zero and loses no purchase, by " .. way, function()
      query("UPDATE %s SET stock=47 WHERE id=1", PRODUCT)
      local peers, bought, refused = {}, 0, 0
      for i = 1, 3 do
        peers[i] = program { tables = described }
        peers[i]:begin(buy_chunk(way), PRODUCT, 3, 8)
      end
      for i = 1, 3 do
        local b, r = peers[i]:result()
        bought, refused = bought + b, refused + r
      end
      assert.equal(15, bought)
      assert.equal(9, refused)
      assert.equal(2, value "stock")
    end)
  end

  it("shows the trouble when nobody minds: an update is lost", function()
    local one, two = program { tables = UNMARKED }, program { tables = UNMARKED }
    local read = "local row = assert(db:read(..., 1)) handles.stock = row.stock"
    one:run(read, PRODUCT)
    two:run(read, PRODUCT)
    local write = "local t = ... return db:transaction(function() return db:update(t, 1, { stock = handles.stock + 10 }) end)"
    assert.equal(1, one:run(write, PRODUCT))
    assert.equal(1, two:run(write, PRODUCT))
    assert.equal(15, value "stock")
  end)

  describe("a number that was read a while ago", function()
    for way, options in pairs {
      version = "{ version = handles.row.version }", timestamp = "{ timestamp = handles.row.updated_at }",
      old = "{ old = handles.row, columns = { 'stock' } }", where = "{ where = { 'stock = ?', tonumber(handles.row.stock) } }",
    } do
      it("is not written over another delivery, by " .. way, function()
        local described = ({ timestamp = TIMED, version = TABLES })[way] or UNMARKED
        local one, two = program { tables = described }, program { tables = described }
        for _, peer in ipairs { one, two } do peer:run("handles.row = assert(db:read(..., 1))", PRODUCT) end
        local write = "local ok, err = db:update(..., 1, { stock = handles.row.stock + 10 }, " .. options .. ") " ..
          "return ok, err and err.code, err and tonumber(err.current.stock), err and err.gone"
        assert.equal(1, one:run(write, PRODUCT))
        local ok, code, current, gone = two:run(write, PRODUCT)
        assert.is_nil(ok)
        assert.equal(way == "where" and "refused" or "stale", code)
        assert.equal(15, current)
        assert.is_nil(gone)
        assert.equal(15, value "stock")
      end)
    end

    it("is added to by all, where the server adds", function()
      local peers = {}
      for i = 1, 3 do
        peers[i] = program():begin([[
          local t = ...
          for _ = 1, 10 do assert(db:transaction({ retries = 50 }, function()
            return db:update(t, 1, { stock = rows.expr "stock + 1" })
          end)) end
        ]], PRODUCT)
      end
      for i = 1, 3 do peers[i]:result() end
      assert.equal(35, value "stock")
      assert.equal(31, value "version")
    end)
  end)

  describe("a screen that is saved after a batch", function()
    local SECRET = ("s"):rep(32)

    it("is stale by a sealed version, which another process opens", function()
      local clerk = program()
      local form = clerk:run("local t, s = ... local row = assert(db:read(t, 1)) return rows.seal(s, 'product 1', { version = row.version })",
                             PRODUCT, SECRET)
      program():run([[
        local t = ...
        assert(db:update(t, 1, { price = rows.expr "price * 2" }, { where = { "id = ?", 1 } }))
      ]], PRODUCT)
      local code, price, name = program():run([[
        local t, s, form = ...
        local seen = assert(rows.open(s, "product 1", form))
        local ok, err = db:update(t, 1, { price = 11, name = "Green tea" }, { version = seen.version })
        assert(not ok)
        return err.code, tonumber(err.current.price), err.current.name
      ]], PRODUCT, SECRET, form)
      assert.same({ "stale", 20, "Tea" }, { code, price, name })
      assert.equal(20, value "price")
    end)

    it("is stale by old values, though the batch knows nothing of versions", function()
      local row = assert(db:read(PRODUCT, 1, { columns = { "price", "name", "note" } }))
      program():run("query('UPDATE ' .. ... .. ' SET price=20 WHERE id=1')", PRODUCT)
      local err = assert_fails("stale", db:update(PRODUCT, 1, { name = "Green tea" }, { old = row, columns = { "price", "name", "note" } }))
      assert.equal(20, tonumber(err.current.price))
    end)

    it("says that there is nothing any more", function()
      query("DELETE FROM %s WHERE id=1", PRODUCT)
      local err = assert_fails("stale", db:update(PRODUCT, 1, { price = 11 }, { version = 1 }))
      assert.is_true(err.gone)
      assert.is_nil(err.current)
      assert.is_false(err.retryable)
      err = assert_fails("refused", db:update(PRODUCT, 1, { price = 11 }, { where = { "stock > 0" } }))
      assert.is_true(err.gone)
    end)
  end)

  -- ------------------------------------------------------------- writing

  describe("an update", function()
    it("that changes nothing is 1, by each way", function()
      for _, options in ipairs { { version = 1 }, { where = { "stock = ?", 5 } }, { old = { price = 10 }, columns = { "price", "note" } } } do
        query("UPDATE %s SET version=1 WHERE id=1", PRODUCT)
        assert.equal(1, db:update(PRODUCT, 1, { stock = 5 }, options))
      end
      local plain = connect { tables = UNMARKED }
      for _, options in ipairs { { where = { "stock = ?", 5 } }, { old = { price = 10 }, columns = { "price", "note" } } } do
        assert.equal(1, plain:update(PRODUCT, 1, { stock = 5 }, options))
        assert.equal(1, plain:transaction(function() return plain:update(PRODUCT, 1, { stock = 5 }, options) end))
      end
      assert.equal(1, plain:transaction(function() return plain:update(PRODUCT, 1, { stock = 5 }) end))
    end)

    it("makes the version one more, and the timestamp later than it was", function()
      assert.equal(1, db:update(PRODUCT, 1, { stock = 5 }, { version = "1" }))
      assert.equal(2, value "version")
      local timed = connect { tables = TIMED }
      query("UPDATE %s SET updated_at='2999-01-01 00:00:00.000' WHERE id=1", PRODUCT)
      local before = timed:read(PRODUCT, 1).updated_at
      assert.equal(1, timed:update(PRODUCT, 1, { stock = 5 }, { timestamp = before }))
      local after = timed:read(PRODUCT, 1).updated_at
      assert.is_true(after > before, after .. " after " .. before)
      assert_fails("stale", timed:update(PRODUCT, 1, { stock = 5 }, { timestamp = before }))
      assert.equal(1, timed:touch(PRODUCT, 1, { timestamp = after }))
      assert.is_true(timed:read(PRODUCT, 1).updated_at > after)
    end)

    it("compares text by every letter, and NULL with NULL", function()
      local columns = { "name", "note" }
      for _, name in ipairs { "tea", "Tea ", "T\195\169a" } do
        query("UPDATE %s SET name='%s' WHERE id=1", PRODUCT, name)
        assert_fails("stale", db:update(PRODUCT, 1, { price = 1 }, { old = { name = "Tea" }, columns = columns }))
        assert.equal(1, db:update(PRODUCT, 1, { price = 1 }, { old = { name = name, note = rows.null }, columns = columns }))
      end
      assert_fails("stale", db:update(PRODUCT, 2, { price = 1 }, { old = { name = "Rice" }, columns = columns }))
      assert_fails("stale", db:update(PRODUCT, 1, { price = 1 }, { old = { note = "n" }, columns = { "note" } }))
    end)

    it("writes what it was given, whatever that looks like", function()
      for _, text in ipairs { "a'b", "\\", "\\' OR 1=1 -- ", 'x"y`z', "?", "%s", "100%" } do
        assert.equal(1, db:update(PRODUCT, 1, { name = text }, { where = { "name <> ? OR name = ?", text, "?" } }))
        assert.equal(text, db:read(PRODUCT, 1).name)
      end
      assert.equal("Rice", db:read(PRODUCT, 2).name)
      assert.equal(1, db:update(PRODUCT, 1, { note = rows.null, price = -3 }, { where = { "name = ?", "100%" } }))
      local row = db:read(PRODUCT, { id = 1 }, { columns = { "note", "price" } })
      assert.is_nil(row.note)
      assert.equal(-3, tonumber(row.price))
      assert.same({}, db:read(PRODUCT, 1, { columns = { "note" } })) -- and not "no row"
      assert.is_false(db:read(PRODUCT, 99, { columns = { "note" } }))
    end)

    it("tells stale from refused, where both are asked for", function()
      local refused = assert_fails("refused", db:update(PRODUCT, 1, { stock = 1 }, { version = 1, where = { "stock > 5" } }))
      assert.equal(5, tonumber(refused.current.stock))
      assert.is_nil(refused.current.hierlock_same)
      assert_fails("stale", db:update(PRODUCT, 1, { stock = 1 }, { version = 2, where = { "stock = 5" } }))
    end)

    it("sees the present where it failed, in a transaction with an older view", function()
      local err = assert_fails(kind == "sqlite" and "stale" or "stale", db:transaction({ isolation = "read committed" }, function()
        assert(db:read(PRODUCT, 1))
        if kind ~= "sqlite" then program():run("assert(db:update(..., 1, { stock = 77 }, { version = 1 }))", PRODUCT) end
        return db:update(PRODUCT, 1, { stock = 6 }, { version = kind == "sqlite" and 9 or 1 })
      end))
      assert.equal(kind == "sqlite" and 5 or 77, tonumber(err.current.stock))
    end)
  end)

  it("deletes what is as it was read, and touches the root of an aggregate", function()
    assert.equal(1, db:touch(PRODUCT, 1, { version = 1 }))
    assert_fails("stale", db:touch(PRODUCT, 1, { version = 1 }))
    assert_fails("stale", db:delete(PRODUCT, 1, { version = 1 }))
    assert_fails("refused", db:delete(PRODUCT, 1, { where = { "stock = 0" } }))
    assert.equal(1, db:delete(PRODUCT, 1, { version = 2 }))
    assert.is_true(assert_fails("stale", db:delete(PRODUCT, 1, { version = 2 })).gone)
    assert.equal(1, db:touch(PRODUCT, 2))
    assert.equal(2, value("version", 2))
  end)

  -- -------------------------------------------------------- transactions

  describe("a transaction", function()
    local function set(stock) return db:update(PRODUCT, 1, { stock = stock }) end

    it("commits what fn did, and passes its results on", function()
      assert.same({ 1, nil, "x" }, { db:transaction(function() assert(set(9)) return 1, nil, "x" end) })
      assert.equal(9, value "stock")
      assert.same({}, { db:transaction(function() assert(set(8)) end) })
      assert.equal(8, value "stock")
    end)

    it("is undone where fn fails or raises, and what it raised goes on", function()
      local ok, err = db:transaction(function() assert(set(9)) return nil, "no" end)
      assert.same({ nil, "no" }, { ok, err })
      local raised = { "mine" }
      local _, same = pcall(db.transaction, db, function() assert(set(9)) error(raised) end)
      assert.equal(raised, same)
      local _, text = pcall(db.transaction, db, function() assert(set(9)) error "broken" end)
      assert.truthy(text:find("broken", 1, true) and text:find "traceback")
      assert.equal(5, value "stock")
    end)

    it("undoes only an inner call that fails", function()
      assert.is_true(db:transaction(function()
        assert(set(6))
        assert_fails("stale", db:transaction(function()
          assert(db:update(PRODUCT, 2, { stock = 99 }))
          return db:update(PRODUCT, 1, { stock = 7 }, { version = 77 })
        end))
        assert.is_false(pcall(db.transaction, db, function() assert(set(8)) error "no" end))
        assert.equal(1, db:transaction(function() return db:update(PRODUCT, 2, { price = 3 }) end))
        return true
      end))
      assert.same({ 6, 0, 3 }, { value "stock", value("stock", 2), value("price", 2) })
    end)

    it("says at its end that it had ended before, or that it has failed", function()
      local ok, err = db:transaction(function()
        assert(set(9))
        if kind == "postgresql" then
          connection:execute "SELECT 1/0"
        else
          assert(connection:execute "ROLLBACK")
        end
        return true
      end)
      assert_fails("lost", ok, err)
      assert.equal(5, value "stock")
      assert.equal(1, db:transaction(function() return set(6) end))
    end)

    it("says at its end that the program has ended it, whatever it has begun since", function()
      for _, own in ipairs { { "ROLLBACK" }, { "COMMIT" }, { "ROLLBACK", "BEGIN" }, { "COMMIT", "BEGIN" } } do
        local other = connect { tables = TABLES }
        local its = opened[#opened]
        local ok, err = other:transaction(function()
          assert(other:update(PRODUCT, 1, { stock = 9 }))
          for _, text in ipairs(own) do assert(its:execute(text)) end
          assert(other:update(PRODUCT, 1, { price = 77 }))
          return true
        end)
        assert_fails("lost", ok, err)
        assert.equal("the transaction had ended before its COMMIT; it was not carried out as a whole", err.message)
        assert.equal(1, other:transaction(function() return other:update(PRODUCT, 1, { stock = 5, price = 10 }) end))
      end
    end)

    it("is undone where its coroutine is closed", function()
      if not coroutine.close then return end -- luacheck: ignore 143
      local thread = coroutine.create(function()
        db:transaction(function()
          assert(set(9))
          coroutine.yield()
        end)
      end)
      assert(coroutine.resume(thread))
      assert(coroutine.close(thread)) -- luacheck: ignore 143
      assert.equal(1, db:update(PRODUCT, 2, { stock = 3 }, { where = { "1=1" } }))
      connection:close()
      db, connection = connect { tables = TABLES }
      assert.same({ 5, 3 }, { value "stock", value("stock", 2) })
    end)

    it("is over where fn raises because the program has closed the connection", function()
      local own, its = with.connect(by, dsn(), { tables = TABLES })
      assert.is_false(pcall(own.transaction, own, function()
        assert(own:update(PRODUCT, 1, { stock = 9 }))
        its:close()
        error "closed"
      end))
      assert.is_nil(own.transacted)
      support.wait_until(function() return db:transaction(function() return db:read(PRODUCT, 1, { lock = "update" }) end) end)
      assert.equal(5, value "stock")
    end)

    it("calls fn again after a failure that passes, as often as it may", function()
      local _, passing = core.failure("deadlock", "by the spec")
      for _, case in ipairs { { 0, 1 }, { 3, 4 } } do
        local calls = 0
        assert_fails("deadlock", db:transaction({ retries = case[1] }, function()
          calls = calls + 1
          assert(set(9))
          return nil, passing
        end))
        assert.equal(case[2], calls)
        assert.equal(5, value "stock")
      end
      local calls = 0
      assert.is_true(db:transaction({ retries = 3 }, function()
        calls = calls + 1
        if calls < 3 then error(passing) end
        return true
      end))
      assert.equal(3, calls)
      for _, code in ipairs { "connection", "unknown", "lost", "stale", "store" } do
        local _, err = core.failure("store", "by the spec")
        err.code, calls = code, 0
        assert_fails(code, db:transaction({ retries = 3 }, function() calls = calls + 1 return nil, err end))
        assert.equal(1, calls)
      end
    end)
  end)

  -- ------------------------------------------------------------ locks

  -- Locks product 1 until told to let it go.
  local function hold(way)
    local peer = program()
    peer:run([[
      local t, way = ...
      handles.work = coroutine.wrap(function()
        -- pcall in Lua 5.1 cannot be yielded across: so by hand.
        connection:execute(way.begin)
        assert(connection:execute(way.lock)):close()
        coroutine.yield()
        connection:execute "COMMIT"
      end)
      handles.work()
    ]], PRODUCT, { begin = kind == "sqlite" and "BEGIN IMMEDIATE" or "BEGIN",
                   lock = ("SELECT * FROM %s WHERE id=1%s"):format(PRODUCT, kind == "sqlite" and "" or way or " FOR UPDATE") })
    function peer.let(_) return peer:run "handles.work()" end
    return peer
  end

  describe("a lock", function()
    it("keeps another one out until the end", function()
      local peer = program()
      assert.is_true(db:transaction(function()
        local row = assert(db:read(PRODUCT, 1, { lock = "update" }))
        peer:begin([[
          local t = ...
          return db:transaction(function()
            local row, err = db:read(t, 1, { lock = "update", wait = 15 })
            if not row then return nil, err end
            return tonumber(row.stock)
          end)
        ]], PRODUCT)
        assert.is_true(peer:stays_blocked())
        return db:update(PRODUCT, 1, { stock = row.stock + 1 }) == 1
      end))
      assert.equal(6, peer:result())
    end)

    it("is given up in time, to the millisecond, and the transaction goes on", function()
      local other, waited = hold(), nil
      local limited = connect { tables = TABLES, timeout = 0.3 }
      local ok, err = limited:transaction(function()
        if kind ~= "sqlite" then assert(limited:update(PRODUCT, 2, { stock = 3 })) end
        local started = support.now()
        local row, reason = limited:read(PRODUCT, 1, { lock = "update", wait = 0.3 })
        waited = support.now() - started
        assert_fails("timeout", row, reason)
        assert.is_true(waited >= 0.299 and waited < 5, tostring(waited))
        assert.is_true(reason.retryable)
        assert_fails("timeout", limited:read(PRODUCT, 1, { lock = "update", wait = 0 }))
        assert.is_false(limited:read(PRODUCT, 1, { lock = "update", skip_locked = true }))
        return true
      end)
      if kind == "sqlite" then
        assert_fails("timeout", ok, err) -- where it begins
      else
        assert.is_true(ok, tostring(err))
        assert.equal(3, value("stock", 2))
      end
      other:let()
      assert.equal("Tea", limited:transaction(function() return limited:read(PRODUCT, 1, { lock = "update", wait = 0 }).name end))
    end)

    it("leaves the limit of a session what it was", function()
      if kind ~= "postgresql" then return end
      assert.is_true(db:transaction(function()
        query "SET LOCAL statement_timeout='7s'"
        assert(db:read(PRODUCT, 1, { lock = "update", wait = 2 }))
        assert.equal("7s", query("SHOW statement_timeout")[1][1])
        return true
      end))
    end)

    it("is shared by readers, and keeps writers out", function()
      local mine = kind == "mariadb" and " LOCK IN SHARE MODE" or " FOR SHARE"
      local other = hold(mine)
      local limited = connect { tables = TABLES, timeout = 0.1 }
      local ok, err = limited:transaction(function()
        assert(limited:read(PRODUCT, 1, { lock = "share", wait = 0 }))
        assert(limited:read(PRODUCT, 1, { lock = "share", wait = 0.2 }))
        assert(limited:read(PRODUCT, 1, { lock = "share", skip_locked = true }))
        assert_fails("timeout", limited:read(PRODUCT, 1, { lock = "update", wait = 0 }))
        return true
      end)
      if kind == "sqlite" then assert_fails("timeout", ok, err) else assert.is_true(ok, tostring(err)) end
      other:let()
    end)
  end)

  if kind ~= "sqlite" then
    it("a deadlock is tried again, and both get through", function()
      local chunk = [[
        local t, first, second = ...
        local calls = 0
        local ok, err = db:transaction({ retries = 20 }, function()
          calls = calls + 1
          local row, err = db:read(t, first, { lock = "update", wait = 15 })
          if not row then return nil, err end
          if calls == 1 then support.wait_until(function()
            local n = query("SELECT COUNT(*) FROM " .. t .. "_gate")[1][1]
            if calls == 1 and not handles.told then
              handles.told = true
              assert(handles.other.connection:execute("INSERT INTO " .. t .. "_gate VALUES (" .. first .. ")"))
            end
            return tonumber(query("SELECT COUNT(*) FROM " .. t .. "_gate")[1][1]) == 2 or tonumber(n) == 2
          end) end
          row, err = db:read(t, second, { lock = "update", wait = 15 })
          if not row then return nil, err end
          return db:update(t, second, { stock = row.stock + 1 })
        end)
        return ok, err and err.code, calls
      ]]
      query("DROP TABLE IF EXISTS %s_gate", PRODUCT)
      query("CREATE TABLE %s_gate (id INTEGER)", PRODUCT)
      local peers = { program(), program() }
      for i, peer in ipairs(peers) do
        peer:run("handles.other = {} local d _, handles.other.connection = handles.with.connect(...)", by, dsn())
        if is_mysql then peer:run "query 'SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED'" end
        peer:begin(chunk, PRODUCT, i, 3 - i)
      end
      local ok_one, code_one, calls_one = peers[1]:result()
      local ok_two, code_two, calls_two = peers[2]:result()
      query("DROP TABLE %s_gate", PRODUCT)
      assert.same({ 1, 1 }, { ok_one, ok_two }, tostring(code_one) .. tostring(code_two))
      assert.is_true(calls_one + calls_two >= 3)
      assert.same({ 6, 1 }, { value "stock", value("stock", 2) })
    end)
  end

  if kind == "postgresql" then
    it("a failed serialization is a deadlock, and tried again", function()
      local calls, other = 0, program()
      assert.equal(1, db:transaction({ isolation = "repeatable read", retries = 2 }, function()
        calls = calls + 1
        local row = assert(db:read(PRODUCT, 1))
        if calls == 1 then other:run("assert(db:update(..., 1, { stock = 50 }, { version = 1 }))", PRODUCT) end
        local ok, err = db:update(PRODUCT, 1, { stock = row.stock + 1 }, { version = row.version })
        if calls == 1 then
          assert_fails("deadlock", ok, err)
          assert.equal("40001", err.sqlstate)
        end
        return ok, err
      end))
      assert.equal(2, calls)
      assert.equal(51, value "stock")
    end)
  end

  if kind == "mariadb" then
    it("a view that is too old is a deadlock, and tried again (innodb_snapshot_isolation)", function()
      query "SET SESSION innodb_snapshot_isolation=ON"
      local calls, other = 0, program()
      assert.equal(1, db:transaction({ isolation = "repeatable read", retries = 2 }, function()
        calls = calls + 1
        local row = assert(db:read(PRODUCT, 1))
        if calls == 1 then other:run("assert(db:update(..., 1, { stock = 50 }, { version = 1 }))", PRODUCT) end
        local ok, err = db:update(PRODUCT, 1, { stock = row.stock + 1 })
        if calls == 1 then
          assert_fails("deadlock", ok, err)
          assert.equal(1020, err.errno)
        end
        return ok, err
      end))
      assert.equal(2, calls)
      assert.equal(51, value "stock")
    end)
  end

  -- ------------------------------------------------------------ claims

  describe("a claim", function()
    local function fill(n)
      for i = 1, n do query("INSERT INTO %s VALUES (%d,'new',0,1)", MESSAGE, i) end
    end

    it("has no message sent twice, by several batches, some of which fail", function()
      fill(24)
      local peers = {}
      for i = 1, 3 do
        peers[i] = program():begin([[
          local MESSAGE, SENT, me = ...
          local NEW = { "status = ? AND attempts < 9", "new" }
          local sent, turns = 0, 0
          while true do
            local claimed, claim
            local ok, err = db:transaction({ isolation = "read committed", retries = 50 }, function()
              local err
              claimed, claim = nil, nil
              claim, err = db:claim(MESSAGE, { where = NEW, order = "id", limit = 2 })
              if not claim then return nil, err end
              claimed = claim.rows
              for _, row in ipairs(claimed) do
                query("INSERT INTO " .. SENT .. " (message) VALUES (" .. row.id .. ")")
                turns = turns + 1
                if turns % 4 == me then return nil, "a failure of the batch's own" end
                local done, reason = claim:done(row, { status = "sent" })
                if not done then return nil, reason end
              end
              return true
            end)
            if ok and #claimed == 0 then
              if tonumber(query("SELECT COUNT(*) FROM " .. MESSAGE .. " WHERE status='new'")[1][1]) == 0 then return sent end
              support.sleep(0.005)
            elseif ok then
              sent = sent + #claimed
            elseif type(err) == "string" then
              for _, row in ipairs(claimed) do
                local counted, reason = claim:fail(row, { attempts = rows.expr "attempts + 0" })
                assert(counted or reason.code == "refused", tostring(reason))
              end
            else
              error(tostring(err))
            end
          end
        ]], MESSAGE, SENT, i)
      end
      local sent = 0
      for i = 1, 3 do sent = sent + peers[i]:result() end
      assert.equal(24, sent)
      assert.equal(24, tonumber(query("SELECT COUNT(*) FROM %s", SENT)[1][1]))
      assert.equal(24, tonumber(query("SELECT COUNT(DISTINCT message) FROM %s", SENT)[1][1]))
    end)

    local NEW = { where = { "status = ?", "new" }, order = { "id" }, columns = { "status" } }

    it("leaves to others what is claimed", function()
      fill(2)
      local peer = program()
      local id, other = nil, nil
      assert.is_true(db:transaction({ isolation = "read committed" }, function()
        local claim = assert(db:claim(MESSAGE, NEW))
        id = tonumber(claim.rows[1].id)
        if kind ~= "sqlite" then
          other = peer:run([[
            local t, options = ...
            return db:transaction({ isolation = "read committed" }, function() return tonumber(db:claim(t, options).rows[1].id) end)
          ]], MESSAGE, NEW)
        end
        return claim:done(claim.rows[1], { status = "sent" }) == 1
      end))
      assert.equal(1, id)
      if kind ~= "sqlite" then assert.equal(2, other) end
    end)

    it("counts a failure only of what nobody has processed in between", function()
      fill(1)
      local claim
      local function attempt()
        return db:transaction(function()
          claim = assert(db:claim(MESSAGE, NEW))
          return nil, "failed"
        end)
      end
      attempt()
      assert.equal(1, claim:fail(claim.rows[1], { attempts = rows.expr "attempts + 1" }))
      attempt()
      program():run([[
        local t, options = ...
        assert(db:transaction(function()
          local claim = assert(db:claim(t, options))
          return claim:done(claim.rows[1], { status = "sent" })
        end))
      ]], MESSAGE, NEW)
      local err = assert_fails("refused", claim:fail(claim.rows[1], { attempts = rows.expr "attempts + 1", status = "bad" }))
      assert.equal("sent", err.current.status)
      assert.equal("sent", query("SELECT status FROM %s", MESSAGE)[1][1])
      assert.equal(1, tonumber(query("SELECT attempts FROM %s", MESSAGE)[1][1]))
    end)
  end)

  -- ------------------------------------------------- a lost connection

  if store then
    describe("a connection that is lost", function()
      local line, peer

      before_each(function()
        line = proxy.open(store)
        -- The proxy's DSN is for hierlock; the parameters are not for LuaSQL.
        peer = support.process(nil)
        peer:call [[
          handles.with = require "spec.support.rows"
          require("luv").os_setenv("PGSSLMODE", "disable") -- else the proxy sees nothing
          require("luv").os_setenv("PGGSSENCMODE", "disable")
        ]]
        peer:start("handles.db, handles.connection = handles.with.connect(...)", by, (line.dsn:gsub("%?.*", "")), { tables = TABLES })
        support.wait_until(function() require("luv").run "nowait" return #line.connections > 0 end)
        peer:result()
      end)
      after_each(function() line.close() end)

      local BEGIN = [[
        local t, statement = ...
        local db = handles.db
        local calls = 0
        local ok, err = db:transaction({ retries = 5 }, function()
          calls = calls + 1
          local n, err = db:update(t, 1, { stock = 9 }, { version = 1 })
          if not n then return nil, err end
          if statement then return db:update(t, 2, { stock = 9 }) end
          return true
        end)
        return ok, err and err.code, calls, err and err.retryable
      ]]

      -- Keeps the line until the program has said a text, and then does something to it.
      local function when_said(text, act)
        support.wait_until(function() require("luv").run "nowait" return line.sent:find(text, 1, true) end, text)
        act(line.connections[1])
      end

      it("before COMMIT: nothing is written, and it is `connection`", function()
        line.hold(1)
        line.let(1)
        peer:call([[
          local real = handles.db.query
          handles.db.query = function(text, ...)
            if text:find "=9.*WHERE .id.='?2" then handles.connection:close() end
            local ok, a, b, c, d = pcall(real, text, ...)
            if not ok then return nil, "closed: " .. tostring(a), nil, "08006" end
            return a, b, c, d
          end
        ]])
        peer:start(BEGIN, PRODUCT, true)
        assert.same({ nil, "connection", 1, true }, { peer:result() })
        support.wait_until(function() return value("version") == 1 end)
        assert.equal(5, value "stock")
      end)

      it("while COMMIT is on its way: `unknown`, not tried again, and not carried out", function()
        -- The client's COMMIT gets no further than here.
        peer:call [[
          local real = handles.db.query
          handles.db.query = function(text, ...)
            if text:find "COMMIT" then require("luv").sleep(300) end
            return real(text, ...)
          end
        ]]
        peer:start(BEGIN, PRODUCT)
        when_said("=9", function() end)
        support.wait_until(function() require("luv").run "nowait" return line.sent:find(is_mysql and "RELEASE" or "=9", 1, true) end)
        for _ = 1, 20 do require("luv").run "nowait" support.sleep(0.005) end
        line.detain(1)
        for _ = 1, 400 do
          require("luv").run "nowait"
          support.sleep(0.002)
          local detained = line.connections[1].detained
          if detained and #detained > 0 then break end
        end
        assert.truthy(table.concat(line.connections[1].detained):find "COMMIT")
        line.connections[1].finish()
        local ok, code, calls, retryable = peer:result()
        assert.same({ nil, "unknown", 1, false }, { ok, code, calls, retryable })
        assert.equal(5, value "stock")
      end)

      it("before the answer to COMMIT: `unknown`, not tried again, and carried out", function()
        peer:call [[
          local real = handles.db.query
          handles.db.query = function(text, ...)
            if text:find "COMMIT" then require("luv").sleep(300) end
            return real(text, ...)
          end
        ]]
        peer:start(BEGIN, PRODUCT)
        when_said("=9", function() end)
        support.wait_until(function() require("luv").run "nowait" return line.sent:find(is_mysql and "RELEASE" or "=9", 1, true) end)
        for _ = 1, 20 do require("luv").run "nowait" support.sleep(0.005) end
        line.hold(1)
        when_said("COMMIT", function() end)
        support.wait_until(function() require("luv").run "nowait" return #line.connections[1].kept > 0 end, "the answer")
        line.connections[1].finish()
        assert.same({ nil, "unknown", 1, false }, { peer:result() })
        support.wait_until(function() return value "stock" == 9 end, "the COMMIT")
      end)

      it("while a write outside of a transaction has no answer: `unknown`, for it is its own COMMIT", function()
        peer:call([[ assert(handles.db:read(..., 1)) ]], PRODUCT)
        line.hold(1)
        peer:start([[
          local ok, err = handles.db:update(..., 1, { stock = 9 }, { version = 1 })
          return ok, err.code, err.retryable
        ]], PRODUCT)
        support.wait_until(function() require("luv").run "nowait" return #line.connections[1].kept > 0 end, "the answer")
        line.connections[1].finish()
        assert.same({ nil, "unknown", false }, { peer:result() })
        assert.equal(9, value "stock")
      end)
    end)
  end

  -- ----------------------------------------------------- the anomalies

  describe("the isolation levels", function()
    local LEVELS = kind == "sqlite" and { "serializable" } or
      { "read uncommitted", "read committed", "repeatable read", "serializable" }
    -- On or off by the version of the server, unless it is said.
    local SNAPSHOT = "repeatable read, innodb_snapshot_isolation=ON"
    if kind == "mariadb" then LEVELS[#LEVELS + 1] = SNAPSHOT end

    -- A program that does one statement at a time in a transaction; that fails when one fails or waits, and is then over.
    local function session(level)
      local peer = program()
      if is_mysql then
        peer:run "query 'SET innodb_lock_wait_timeout=1'"
        peer:run("query('SET SESSION TRANSACTION ISOLATION LEVEL ' .. ...)", (level:gsub(",.*", "")))
        if kind == "mariadb" then peer:run("query('SET SESSION innodb_snapshot_isolation=' .. ...)", level == SNAPSHOT and 1 or 0) end
      elseif kind == "postgresql" then
        peer:run "query 'SET lock_timeout=300'"
      else
        peer:run "query 'PRAGMA busy_timeout=0'"
      end
      function peer.try(_, text)
        if peer.over then return nil end
        local found = peer:run("local found = handles.with.query(connection, ...) if not found then connection:execute 'ROLLBACK' end return found", text)
        if not found then peer.over = true end
        return found and (type(found) == "table" and tonumber(found[1][1]) or true)
      end
      peer:try(kind == "sqlite" and "BEGIN IMMEDIATE" or kind == "postgresql" and "BEGIN ISOLATION LEVEL " .. level or "START TRANSACTION")
      return peer
    end

    local STOCK = ("SELECT stock FROM %s WHERE id=1"):format(PRODUCT)
    local BOTH = ("SELECT SUM(stock) FROM %s WHERE id IN (1,2)"):format(PRODUCT)
    local COUNT = ("SELECT COUNT(*) FROM %s WHERE price>=10"):format(PRODUCT)
    local function set(id, stock) return ("UPDATE %s SET stock=%d WHERE id=%d"):format(PRODUCT, stock, id) end

    -- Each true, where it happens.
    local ANOMALIES = {
      { "dirty read", function(one, two)
        two:try(set(1, 99))
        return one:try(STOCK) == 99
      end },
      { "non-repeatable read", function(one, two)
        local before = one:try(STOCK)
        two:try(set(1, 99))
        two:try "COMMIT"
        return before == 5 and one:try(STOCK) == 99
      end },
      { "phantom", function(one, two)
        local before = one:try(COUNT)
        two:try(("INSERT INTO %s (id,price,version) VALUES (3,15,1)"):format(PRODUCT))
        two:try "COMMIT"
        return before == 2 and one:try(COUNT) == 3
      end },
      { "lost update", function(one, two)
        local a, b = one:try(STOCK), two:try(STOCK)
        one:try(set(1, (a or 0) + 10))
        one:try "COMMIT"
        two:try(set(1, (b or 0) + 10))
        return two:try "COMMIT" and one:try "SELECT 1" == 1 and value "stock" == 15
      end },
      { "write skew", function(one, two)
        local a, b = one:try(BOTH), two:try(BOTH)
        one:try(set(1, 0))
        two:try(set(2, 7))
        local first, second = one:try "COMMIT", two:try "COMMIT"
        return a == 5 and b == 5 and first and second and value "stock" == 0 and value("stock", 2) == 7
      end },
    }

    -- The claims of docs/isolation.md: for each level, for each anomaly.
    local function documented(level)
      local file = assert(io.open "docs/isolation.md")
      local text = file:read "*a"
      file:close()
      local cells = text:match("\n| " .. kind .. " | " .. level .. " | ([^\n]*) |\n")
      assert(cells, "the table has no line for it")
      local list = {}
      for cell in (cells .. " | "):gmatch "(.-) | " do list[#list + 1] = cell end
      return list
    end

    for _, level in ipairs(LEVELS) do
      it("have these anomalies, as documented: " .. level, function()
        local measured = {}
        for i, anomaly in ipairs(ANOMALIES) do
          query("DELETE FROM %s WHERE id=3", PRODUCT)
          query(set(1, 5))
          query(set(2, 0))
          local one, two = session(level), session(level)
          measured[i] = anomaly[2](one, two) and "yes" or "no"
          for _, peer in ipairs { one, two } do peer:close() end
        end
        assert.equal(table.concat(documented(level), " | "), table.concat(measured, " | "))
      end)
    end
  end)

  it("takes a key for what its column is", function()
    local T = PRODUCT .. "_key"
    query("DROP TABLE IF EXISTS %s", T)
    query("CREATE TABLE %s (id BIGINT PRIMARY KEY, name VARCHAR(20))", T)
    finally(function() query("DROP TABLE %s", T) end)
    for id, name in pairs { [0] = "abc", [1] = "0", [2] = "7 of 9" } do query("INSERT INTO %s VALUES (%d,'%s')", T, id, name) end
    query("INSERT INTO %s VALUES (9223372036854775807,'last'),(9223372036854775806,'last but one')", T)
    local named = connect { tables = { [T] = { key = "name" } }, timeout = 5 }
    local by_id = connect { timeout = 5 }
    if kind ~= "postgresql" then -- which has no such comparison
      assert.equal(1, named:delete(T, 0, { where = { "1=1" } }))
      assert.equal("stale", select(2, named:delete(T, 7, { old = { id = 2 }, columns = { "id" } })).code)
      assert.has_error(function() named:delete(T, false, { where = { "1=1" } }) end)
      assert.has_error(function() by_id:read(T, { id = true }) end)
      assert.equal("4", tostring(query("SELECT COUNT(*) FROM %s", T)[1][1]))
    end
    assert.equal("abc", by_id:read(T, 0).name)
    assert.equal("7 of 9", by_id:read(T, 2, { columns = { "name" } }).name)
    assert.equal(1, by_id:update(T, 2, { name = "nine" }, { old = { id = 2 }, columns = { "id" } }))
    assert.equal("last", by_id:read(T, math.maxinteger or "9223372036854775807").name) -- luacheck: ignore 143
  end)

  it("raises for a text that the connection's character set does not have", function()
    if by == "pgmoon" then return assert_fails("store", db:update(PRODUCT, 1, { name = "\255\254" }, { version = 1 })) end
    local ok, message = pcall(db.update, db, PRODUCT, 1, { name = "\255\254" }, { version = 1 })
    if kind == "postgresql" then
      assert.is_false(ok)
      assert.matches("hierlock: a text is not one in the connection's character set", message)
    end
  end)

  -- --------------------------------------------------------------- misuse

  it("raises for misuse, at the caller's place", function()
    local cases = {
      { "options are empty", function() db:update(PRODUCT, 1, { stock = 1 }, { version = nil }) end },
      { "nothing says", function() db:update(PRODUCT, 1, { stock = 1 }) end },
      { "unknown option 'vresion'", function() db:update(PRODUCT, 1, { stock = 1 }, { vresion = 1 }) end },
      { "plain name", function() db:update(PRODUCT, 1, { ["stock=1,price"] = 1 }, { version = 1 }) end },
      { "plain name", function() db:read("a b", 1) end },
      { "plain name", function() db:read("a;b.c", 1) end },
      { "key must have values only", function() db:read(PRODUCT, { id = rows.null }) end },
      { "key is missing", function() db:read(PRODUCT, {}) end },
      { "NaN", function() db:update(PRODUCT, 1, { stock = 0 / 0 }, { version = 1 }) end },
      { "place%(s%)", function() rows.expr("stock - ?") end },
      { "place%(s%)", function() rows.expr("stock", 5) end },
      { "which is changed, too", function() db:update(PRODUCT, 1, { stock = 1, price = rows.expr "stock * 2" }, { version = 1 }) end },
      { "version is changed by", function() db:update(PRODUCT, 1, { version = 1 }, { version = 1 }) end },
      { "nothing to change", function() connect():update(PRODUCT, 1, {}, { where = { "1=1" } }) end },
      { "inside of db:transaction", function() db:read(PRODUCT, 1, { lock = "update" }) end },
      { "inside of db:transaction", function() db:claim(MESSAGE, { where = { "1=1" } }) end },
      { "isolation must be", function() db:transaction({ isolation = "some" }, function() end) end },
      { "retries must be", function() db:transaction({ retries = -1 }, function() end) end },
      { "fn must be", function() db:transaction {} end },
      { "old and columns", function() db:update(PRODUCT, 1, { stock = 1 }, { old = {} }) end },
      { "with a colon", function() db.read(nil, PRODUCT, 1) end },
    }
    for _, case in ipairs(cases) do
      local ok, message = pcall(case[2])
      assert.is_false(ok, case[1])
      assert.truthy(tostring(message):find("rows_spec.lua:%d+: hierlock: .*" .. case[1]), tostring(message))
    end
    assert.equal(5, value "stock")
  end)
end)

-- ----------------------------------------------------------------- the page

-- Each Lua code of the page that is followed by SQL says just that, on MySQL.
support.each_server(function(store)
  if store.name ~= "mysql" then return end

  it("sends the SQL that docs/exclusive-control.md and docs/batches.md show", function()
    local db, connection = with.connect("mysql", store.bare_dsn, { tables = { product = { version = "version" } } })
    for _, text in ipairs {
      "CREATE TEMPORARY TABLE product (id INT PRIMARY KEY, name VARCHAR(40), stock INT, price INT, version INT)",
      "CREATE TEMPORARY TABLE article (id INT PRIMARY KEY, name VARCHAR(40), stock INT, price INT, updated_at DATETIME(6))",
      "CREATE TEMPORARY TABLE message (id INT PRIMARY KEY, status VARCHAR(10), attempts INT)",
      "INSERT INTO message VALUES (1,'new',0)",
    } do assert(connection:execute(text)) end
    assert(db:read("product", 7) == false)
    local page = ""
    for _, name in ipairs { "docs/exclusive-control.md", "docs/batches.md" } do
      local file = assert(io.open(name))
      page = page .. file:read "*a"
      file:close()
    end
    local sent, shown = {}, 0
    local query = db.query
    db.query = function(text, ...)
      sent[#sent + 1] = text
      return query(text, ...)
    end
    for code, expected in page:gmatch "```lua\n([^`]*)```\n\n```sql\n(.-)```" do
      -- The beginning state, as the text around it says.
      for _, text in ipairs {
        "DELETE FROM product", "DELETE FROM article",
        ("INSERT INTO product VALUES (7,'Tea',%d,10,3)"):format(expected:find "`stock`=10" and 15 or 5),
        "INSERT INTO article VALUES (7,'Tea',5,10,'2026-01-01 10:00:00.123456')",
      } do assert(connection:execute(text)) end
      sent, shown = {}, shown + 1
      local chunk = assert((loadstring or load)("local db, rows, send = ... " .. code .. " return ok, err")) -- luacheck: ignore
      local ok, err = chunk(db, rows, function() return true end)
      assert.is_truthy(ok, tostring(err))
      assert.equal(expected, table.concat(sent, "\n") .. "\n")
    end
    assert.equal(6, shown)
    connection:close()
  end)
end)

-- -------------------------------------------------------------- sealing

describe("a sealed text", function()
  local SECRET, OTHER = ("k"):rep(32), ("l"):rep(32)
  local VALUES = { version = "17", id = 7, price = 0.1, name = "a=b&c.d %\0\255", none = rows.null, yes = true, no = false }

  it("has what was put in", function()
    assert.same(VALUES, rows.open(SECRET, "product 7", rows.seal(SECRET, "product 7", VALUES)))
    assert.same({}, rows.open(SECRET, "", rows.seal(SECRET, "", {})))
  end)

  it("is refused where anything is changed", function()
    local sealed = rows.seal(SECRET, "product 7", VALUES)
    local function forged(...)
      local ok, err = rows.open(...)
      assert.is_nil(ok)
      assert.equal("forged", err.code)
      assert.is_false(err.retryable)
    end
    for i = 1, #sealed do
      for _, other in ipairs { "0", "1", "A" } do
        local changed = sealed:sub(1, i - 1) .. other .. sealed:sub(i + 1)
        if changed ~= sealed then forged(SECRET, "product 7", changed) end
      end
      forged(SECRET, "product 7", sealed:sub(1, i - 1))
    end
    forged(SECRET, "product 8", sealed)
    forged(OTHER, "product 7", sealed)
    for _, text in ipairs { "", ".", "hr1.", "hr1..", sealed .. "0" } do forged(SECRET, "product 7", text) end
    forged(SECRET, "product 7", nil)
  end)

  it("wants a secret that cannot be guessed", function()
    assert.has_error(function() rows.seal("short", "x", {}) end)
    assert.has_error(function() rows.open("short", "x", rows.seal(SECRET, "x", {})) end)
  end)

  it("is signed by HMAC-SHA-256 as RFC 4231 has it, and as others compute it", function()
    local function bytes(n, byte) return string.char(byte):rep(n) end
    assert.equal("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7", core.hmac(bytes(20, 0x0b), "Hi There"))
    assert.equal("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
      core.hmac("Jefe", "what do ya want for nothing?"))
    assert.equal("773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe", core.hmac(bytes(20, 0xaa), bytes(50, 0xdd)))
    assert.equal("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
      core.hmac(bytes(131, 0xaa), "Test Using Larger Than Block-Size Key - Hash Key First"))
    -- Texts of all sizes around a block: the MAC of each, one after the other, as Python's hmac has them.
    local all = {}
    for i = 0, 200 do all[#all + 1] = core.hmac(bytes(i, 107), bytes(i, 116)) end
    assert.equal("7724c9ece4bd7657f7fd7ada5b3510f9e43f794f101dad9ccb1853a46fb0adc2", core.hmac("", table.concat(all)))
  end)
end)
