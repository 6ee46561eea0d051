--- Programs that lock the same rows by SQL of their own, on connections of their own driver, and ours exclude each
-- other. They are the existing deployments, which count the buckets themselves, and programs that use plan:sql.

local hierlock = require "hierlock"
local support = require "spec.support"

local TABLE = "hierlock_spec_foreign"
local BUCKETS = 10000000
local R1, R2 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }

-- FNV-1a, 32 bits, as in draft-eastlake-fnv; in whole numbers below 2^53, and nothing
-- of ours.
local function fnv1a(text)
  local hash = 2166136261
  for i = 1, #text do
    local low, byte, power = hash % 256, text:byte(i), 1
    local mixed = 0
    for _ = 1, 8 do
      if low % 2 ~= byte % 2 then mixed = mixed + power end
      low, byte, power = (low - low % 2) / 2, (byte - byte % 2) / 2, power * 2
    end
    hash = hash - hash % 256 + mixed
    hash = (hash * 403 + hash % 256 * 16777216) % 4294967296 -- the prime: 2^24 + 403
  end
  return hash
end

local LEVELS = { "user", "account", "resource" }

local function bucket(path)
  return fnv1a(LEVELS[#path] .. ":" .. table.concat(path, ":")) % BUCKETS
end

local function rows_of(path)
  local rows = {}
  for i = 1, #path do
    local node = {}
    for j = 1, i do node[j] = path[j] end
    rows[i] = { level = i - 1, bucket = bucket(node) }
  end
  return rows
end

describe("the buckets that existing deployments use", function()
  local known = { { { "u1" }, 3142546 }, { { "u1", "a1" }, 5156936 }, { R1, 185732 },
                  { R2, 518589 } }
  for _, case in ipairs(known) do
    local path, expected = case[1], case[2]
    it("are ours: " .. table.concat(path, "/"), function()
      assert.equal(expected, bucket(path))
      local rows = hierlock.plan({ path }):rows()
      assert.equal(expected, rows[#rows].bucket)
    end)
  end

  it("are ours for any ids", function()
    for i = 1, 300 do
      local path = { "user " .. i, ("\1\255:%"):rep(i % 7 + 1), tostring(i * 7919) }
      for j, row in ipairs(hierlock.plan({ path }):rows()) do
        assert.equal(rows_of(path)[j].bucket, row.bucket)
      end
    end
  end)
end)

support.each_server(function(store)
  local opened, foreign

  setup(function()
    -- The table as it was made before there was any hierlock; nothing records its buckets.
    local sql = store.sql()
    sql:query("DROP TABLE IF EXISTS " .. TABLE)
    sql:query([[CREATE TABLE %s (level TINYINT NOT NULL, bucket INT NOT NULL,
                PRIMARY KEY (level, bucket)) ENGINE=InnoDB]], TABLE)
    for _, path in ipairs { R1, R2, { "u1", "a2", "r1" }, { "u2", "a1", "r1" } } do
      for _, row in ipairs(rows_of(path)) do
        sql:query("INSERT IGNORE INTO %s VALUES (%d,%d)", TABLE, row.level, row.bucket)
      end
    end
  end)
  teardown(function() store.sql():query("DROP TABLE " .. TABLE) end)

  before_each(function()
    opened = {}
    foreign = support.foreign(store)
  end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
  end)

  local function open()
    local manager = assert(hierlock.open(store.bare_dsn .. "?table=" .. TABLE, { timeout = 15 }))
    opened[#opened + 1] = manager
    return manager
  end

  -- Locks as the deployments do. Does not wait; the result is the number of rows.
  local function foreign_lock(path)
    local shared = store.dialect == "mariadb" and "LOCK IN SHARE MODE" or "FOR SHARE"
    local queries = { "SET innodb_lock_wait_timeout=15", "START TRANSACTION" }
    for i, row in ipairs(rows_of(path)) do
      queries[i + 2] = ("SELECT bucket FROM %s WHERE level=%d AND bucket=%d %s"):format(
        TABLE, row.level, row.bucket, i == #path and "FOR UPDATE" or shared)
    end
    return foreign:start([[
      local n = 0
      for _, query in ipairs(...) do
        local rows = handles.sql:query(query)
        n = n + (type(rows) == "table" and #rows or 0)
      end
      return n
    ]], queries)
  end

  -- Their path, our path, and whether the two conflict.
  local pairs_of_paths = {
    { R1, R1, true },
    { R1, R2, false },
    { R1, { "u1", "a1" }, true },
    { R1, { "u1" }, true },
    { R1, { "u1", "a2" }, false },
    { R1, { "u2" }, false },
    { { "u1", "a1" }, R1, true },
    { { "u1", "a1" }, { "u1", "a2", "r1" }, false },
    { { "u1" }, { "u1", "a2", "r1" }, true },
    { { "u1" }, { "u2", "a1", "r1" }, false },
  }

  for _, case in ipairs(pairs_of_paths) do
    local theirs, ours, conflict = case[1], case[2], case[3]
    local verb = conflict and " excludes " or " admits "
    local names = { table.concat(theirs, "/"), table.concat(ours, "/") }

    it("a foreign " .. names[1] .. verb .. "our " .. names[2], function()
      local manager = open()
      assert.equal(#theirs, foreign_lock(theirs):result())
      local handle, err = manager:acquire(ours, { timeout = conflict and 0 or 5 })
      assert.equal(conflict, handle == nil)
      if conflict then
        assert.equal("timeout", err.code)
        foreign:query("COMMIT")
        handle = assert(manager:acquire(ours, { timeout = 5 }))
      end
      assert.is_true(handle:release { confirm = true })
    end)

    it("our " .. names[2] .. verb .. "a foreign " .. names[1], function()
      local handle = assert(open():acquire(ours))
      foreign_lock(theirs)
      assert.equal(conflict, foreign:stays_blocked())
      assert.is_true(handle:release())
      assert.equal(#theirs, foreign:result())
    end)
  end

  describe("plan:sql", function()
    local function locked_by_plan(targets, options)
      local plan = hierlock.plan(targets, options)
      local query = plan:sql(store.dialect, TABLE)
      foreign:query("START TRANSACTION")
      local rows = assert(foreign:query((query:gsub("%%", "%%%%"))))
      return plan:verify(#rows)
    end

    it("in a transaction of another driver excludes ours, until its end", function()
      assert.is_true(locked_by_plan { R1, R2 })
      local manager = open()
      for _, target in ipairs { R1, R2, { "u1", "a1" }, { "u1" } } do
        local handle, err = manager:acquire(target, { timeout = 0 })
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
      end
      assert(manager:acquire { "u1", "a2", "r1" }):release { confirm = true }
      foreign:query("ROLLBACK")
      assert(manager:acquire({ "u1" }, { timeout = 5 })):release()
    end)

    it("with shared targets admits our shared ones, and no exclusive one", function()
      assert.is_true(locked_by_plan({ R1 }, { mode = "shared" }))
      local manager = open()
      assert(manager:acquire(R1, { mode = "shared", timeout = 5 })):release { confirm = true }
      local handle, err = manager:acquire(R1, { timeout = 0 })
      assert.is_nil(handle)
      assert.equal("timeout", err.code)
      foreign:query("COMMIT")
    end)

    it("waits for ours", function()
      local handle = assert(open():acquire(R2))
      local plan = hierlock.plan { R1, R2 }
      foreign:query("START TRANSACTION")
      foreign:send(plan:sql(store.dialect, TABLE))
      assert.is_true(foreign:stays_blocked())
      handle:release()
      assert.is_true(plan:verify(#foreign:result()))
      foreign:query("COMMIT")
    end)

    it("whose rows are not all there is found out by verify", function()
      local ok, err = locked_by_plan { R1, { "u1", "a1", "nowhere" } }
      foreign:query("ROLLBACK")
      assert.is_nil(ok)
      assert.equal("not_provisioned", err.code)
    end)
  end)

  describe("a foreign holder", function()
    it("is shown to those who ask, and to those who waited in vain, if the server tells", function()
      -- MariaDB tells of those only who tell of themselves.
      local expected = store.dialect == "mysql" and { { foreign.pid, false } } or {}
      local function shown(holders)
        local list = {}
        for i, holder in ipairs(holders) do list[i] = { holder.pid, holder.waiting } end
        return list
      end
      local manager = open()
      assert.equal(3, foreign_lock(R1):result())
      assert.same(expected, shown(assert(manager:holders(R1))))
      -- Above all it does not name the waiter that gave up.
      for _ = 1, 6 do
        local handle, err = manager:acquire(R1, { timeout = 0.15 })
        assert.is_nil(handle)
        -- The err has no holders where the server was too slow to say.
        if err.holders then assert.same(expected, shown(err.holders)) end
      end
      foreign:query("COMMIT")
      assert.same({}, manager:holders(R1))
    end)
  end)
end)
