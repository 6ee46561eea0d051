--- Exclusive control of business data: each way against each trouble, by real programs side by side, on
-- every server; what each write and each error path says. Transactions: rows_transaction_spec.lua; a COMMIT without an
-- answer, and what isolation levels let happen: rows_trouble_spec.lua.

local core = require "hierlock.core"
local rows = require "hierlock.rows"
local support = require "spec.support"
local with = require "spec.support.rows"
local tables = require "spec.support.rows_tables"

local PRODUCT, MESSAGE, TABLES = tables.PRODUCT, tables.MESSAGE, tables.TABLES
local TIMED = { [PRODUCT] = { timestamp = "updated_at" } }
local UNMARKED = {}

tables.each(function(self)
  local kind, by, connect, query = self.kind, self.by, self.connect, self.query
  local value, program, assert_fails = self.value, self.program, self.assert_fails
  local db
  before_each(function() db = self.db end)

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

  it("takes a table's name with its schema", function()
    local schema = ({ sqlite = "main", postgresql = "testuser" })[kind] or self.dsn():match "/([^/?]*)$"
    assert.equal("Tea", db:read(schema .. "." .. PRODUCT, 1).name)
  end)

  if by == "pgmoon" then
    it("refuses a session in which backslashes escape", function()
      query "SET standard_conforming_strings = off"
      assert_fails("unsupported", db:read(PRODUCT, 1))
    end)
  end

  -- --------------------------------------------------------------- misuse

  it("raises for misuse, at the caller's place", function()
    local cases = {
      { "options are empty", function() db:update(PRODUCT, 1, { stock = 1 }, { version = nil }) end },
      { "nothing says", function() db:update(PRODUCT, 1, { stock = 1 }) end },
      { "unknown option 'vresion'", function() db:update(PRODUCT, 1, { stock = 1 }, { vresion = 1 }) end },
      { "plain name", function() db:update(PRODUCT, 1, { ["stock=1,price"] = 1 }, { version = 1 }) end },
      { "column must be a plain name, not 'stock.price'", function() db:update(PRODUCT, 1, { ["stock.price"] = 1 }, { version = 1 }) end },
      { "plain name", function() db:read("a b", 1) end },
      { "plain name", function() db:read("a;b.c", 1) end },
      { "key must have values only", function() db:read(PRODUCT, { id = rows.null }) end },
      { "key is missing", function() db:read(PRODUCT, {}) end },
      { "NaN", function() db:update(PRODUCT, 1, { stock = 0 / 0 }, { version = 1 }) end },
      { 'where must be a table such as {"stock >= %?", 5}, not string$', function() db:delete(PRODUCT, 1, { where = "stock >= 5" }) end },
      { 'where must be a list such as {"stock >= %?", 5}$', function() db:delete(PRODUCT, 1, { where = { stock = 5 } }) end },
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
