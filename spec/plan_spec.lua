-- Plans: which rows a target needs, in which order and mode, and the SQL that
-- locks them. No store is involved. The buckets are compared with a second
-- implementation of the hash, because other programs compute them, too.

local hierlock = require "hierlock"

local BUCKETS = 10000000
local DEFAULT_LEVELS = { "user", "account", "resource" }

-- XOR of a number below 2^32 with a byte; Lua 5.1 has no operators for bits.
local function xor_byte(number, byte)
  local low, result, bit = number % 256, 0, 1
  local high = number - low
  for _ = 1, 8 do
    if low % 2 ~= byte % 2 then result = result + bit end
    low, byte, bit = math.floor(low / 2), math.floor(byte / 2), bit * 2
  end
  return high + result
end

-- FNV-1a: the prime is 2^24 + 403, in two steps because 2^53 is the limit.
local function fnv1a(text)
  local hash = 2166136261
  for i = 1, #text do
    hash = xor_byte(hash, text:byte(i))
    hash = (hash % 256 * 16777216 + hash * 403) % 4294967296
  end
  return hash
end

local function bucket(levels, ids, n, buckets)
  return fnv1a(levels[n] .. ":" .. table.concat(ids, ":", 1, n)) % buckets
end

local function random_id()
  local bytes = {}
  for i = 1, math.random(1, 40) do bytes[i] = string.char(math.random(0, 255)) end
  return table.concat(bytes)
end

local function rows_of(targets, options) return hierlock.plan(targets, options):rows() end

local function names(n)
  local list = {}
  for i = 1, n do list[i] = "level" .. i end
  return list
end

-- The rows by the rule, computed in another way than the library does: a table by level and bucket, then sorted.
local function expected_rows(targets, levels, buckets, mode)
  local strongest, list = {}, {}
  for _, target in ipairs(targets) do
    local own = #target < #levels and "exclusive" or target.mode or mode
    for n = 1, #target do
      local key = (n - 1) * 4294967296 + bucket(levels, target, n, buckets)
      local wanted = n == #target and own or "shared"
      if not strongest[key] then list[#list + 1] = key end
      if strongest[key] ~= "exclusive" then strongest[key] = wanted end
    end
  end
  table.sort(list)
  for i, key in ipairs(list) do
    list[i] = { level = math.floor(key / 4294967296), bucket = key % 4294967296, mode = strongest[key] }
  end
  return list
end

describe("the bucket of a node", function()
  local contract = {
    { { "u1" }, 3142546 },
    { { "u1", "a1" }, 5156936 },
    { { "u1", "a1", "r1" }, 185732 },
    { { "u1", "a1", "r2" }, 518589 },
  }
  for _, case in ipairs(contract) do
    it("of " .. table.concat(case[1], "/") .. " is " .. case[2], function()
      local rows = rows_of { case[1] }
      assert.equal(case[2], rows[#rows].bucket)
      assert.equal(#case[1] - 1, rows[#rows].level)
    end)
  end

  it("is FNV-1a of any bytes, by a second implementation", function()
    for _ = 1, 300 do
      local levels, buckets = math.random(1, 6), math.random(1, 2147483647)
      local target = {}
      for i = 1, math.random(1, levels) do target[i] = random_id() end
      local rows = rows_of({ target }, { levels = names(levels), buckets = buckets })
      for n = 1, #target do
        assert.equal(bucket(names(levels), target, n, buckets), rows[n].bucket)
      end
    end
  end)

  it("of an integer is that of its decimal digits", function()
    for _, n in ipairs { 0, 1, -1, 42, 2147483648, 9007199254740991, -9007199254740991 } do
      assert.same(rows_of { { ("%.0f"):format(n) } }, rows_of { { n } })
    end
  end)

  it("depends on every byte of every ancestor", function()
    local seen = {}
    for _, target in ipairs { { "u1", "a1" }, { "u2", "a1" }, { "u1", "a2" }, { "u1\0", "a1" }, { "u1", "\0a1" } } do
      local rows = rows_of { target }
      assert.is_nil(seen[rows[2].bucket])
      seen[rows[2].bucket] = true
    end
  end)
end)

describe("the rows of a plan", function()
  it("are shared for ancestors and exclusive for the node", function()
    assert.same({
      { level = 0, bucket = 3142546, mode = "shared" },
      { level = 1, bucket = 5156936, mode = "shared" },
      { level = 2, bucket = 185732, mode = "exclusive" },
    }, rows_of { { user = "u1", account = "a1", resource = "r1" } })
  end)

  it("are shared throughout for a shared target on the deepest level", function()
    local rows = rows_of({ { "u1", "a1", "r1" } }, { mode = "shared" })
    assert.equal("shared", rows[3].mode)
  end)

  it("are exclusive for a shared target on an inner level, where sharing would keep no writer out", function()
    assert.equal("exclusive", rows_of({ { "u1", "a1" } }, { mode = "shared" })[2].mode)
    assert.equal("exclusive", rows_of({ { "u1" } }, { mode = "shared" })[1].mode)
  end)

  it("take the mode of their own target before that of the options", function()
    assert.equal("shared", rows_of({ { "u1", "a1", "r1", mode = "shared" } }, { mode = "exclusive" })[3].mode)
    assert.equal("exclusive", rows_of({ { "u1", "a1", "r1", mode = "exclusive" } }, { mode = "shared" })[3].mode)
  end)

  it("come in the order of buckets, not of ids", function()
    -- r10746 < r1978 and r10747 < r1979, and they share two buckets crosswise.
    local function order(...)
      local rows = rows_of { { user = "u1", account = "a1", resources = { ... } } }
      return rows[3].bucket, rows[4].bucket
    end
    local first, second = order("r10746", "r1978")
    assert.is_true(first < second)
    assert.same({ first, second }, { order("r1979", "r10747") })
    assert.same({ first, second }, { order("r10747", "r1979") })
  end)

  it("are each there once, in the strongest mode that any target needs", function()
    local targets = { { "u1", "a1", "r1", mode = "shared" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" } }
    local rows = rows_of(targets)
    assert.equal(4, #rows)
    assert.same({ "shared", "exclusive" }, { rows[1].mode, rows[2].mode })
    assert.same({ 185732, "exclusive" }, { rows[3].bucket, rows[3].mode })
  end)

  it("are the same for names, positions and lists", function()
    local named = rows_of { { user = "u1", account = "a1", resource = "r1" }, { user = "u1", account = "a1", resource = "r2" } }
    assert.same(named, rows_of { { "u1", "a1", "r2" }, { "u1", "a1", "r1" } })
    assert.same(named, rows_of { { user = "u1", account = "a1", resources = { "r2", "r1", "r2" } } })
  end)

  it("follow the rule for random targets, in few buckets so that many meet", function()
    for _ = 1, 200 do
      local depth, buckets, targets = math.random(1, 5), math.random(1, 20), {}
      local mode = math.random(2) == 1 and "shared" or "exclusive"
      for i = 1, math.random(1, 12) do
        local target = { mode = ({ "shared", "exclusive" })[math.random(3)] }
        for j = 1, math.random(1, depth) do target[j] = "id" .. math.random(5) end
        targets[i] = target
      end
      assert.same(expected_rows(targets, names(depth), buckets, mode),
                  rows_of(targets, { levels = names(depth), buckets = buckets, mode = mode }))
    end
  end)

  it("do not depend on the order of the targets", function()
    local targets, options = {}, { buckets = 50 }
    for i = 1, 30 do targets[i] = { "u" .. i % 3, "a" .. i % 5, "r" .. i } end
    local rows = rows_of(targets, options)
    for _ = 1, 10 do
      for i = #targets, 2, -1 do
        local j = math.random(i)
        targets[i], targets[j] = targets[j], targets[i]
      end
      assert.same(rows, rows_of(targets, options))
    end
  end)

  it("use the options levels and buckets", function()
    local levels = { "tenant", "project" }
    local rows = rows_of({ { tenant = "t", projects = { "p", "q" } } }, { levels = levels, buckets = 97 })
    assert.same(expected_rows({ { "t", "p" }, { "t", "q" } }, levels, 97, "exclusive"), rows)
  end)

  it("are all in bucket 0 where there is one bucket", function()
    assert.same({ { level = 0, bucket = 0, mode = "exclusive" } },
                rows_of({ { "a" }, { "b" } }, { levels = { "only" }, buckets = 1 }))
  end)

  for _, n in ipairs { 1, 2, 16 } do
    it("can be of " .. n .. " levels", function()
      local target = {}
      for i = 1, n do target[i] = "id" .. i end
      local rows = rows_of({ target }, { levels = names(n) })
      assert.same(expected_rows({ target }, names(n), BUCKETS, "exclusive"), rows)
    end)
  end

  it("can be very many", function()
    local resources = {}
    for i = 1, 10000 do resources[i] = i end
    local rows = rows_of { { user = "u1", account = "a1", resources = resources } }
    for i = 4, #rows do assert.is_true(rows[i - 1].bucket < rows[i].bucket) end
    local distinct, n = {}, 2
    for i = 1, 10000 do
      local b = bucket(DEFAULT_LEVELS, { "u1", "a1", i }, 3, BUCKETS)
      if not distinct[b] then distinct[b], n = true, n + 1 end
    end
    assert.equal(n, #rows)
  end)
end)

describe("the SQL of a plan", function()
  local targets = { { "u1", "a1", "r1" }, { "u1", "a1", "r2", mode = "shared" } }
  local template = "(SELECT level,bucket FROM %TABLE WHERE level=0 AND bucket=3142546 %SHARED)"
    .. " UNION ALL (SELECT level,bucket FROM %TABLE WHERE level=1 AND bucket=5156936 %SHARED)"
    .. " UNION ALL (SELECT level,bucket FROM %TABLE WHERE level=2 AND bucket=185732 FOR UPDATE)"
    .. " UNION ALL (SELECT level,bucket FROM %TABLE WHERE level=2 AND bucket=518589 %SHARED)"
  local function text(shared, name)
    return (template:gsub("%%SHARED", shared):gsub("%%TABLE", name or "hier_lock_buckets"))
  end

  it("is one statement in locking order, for MySQL", function()
    assert.equal(text("FOR SHARE"), hierlock.plan(targets):sql("mysql"))
  end)
  it("writes LOCK IN SHARE MODE for MariaDB, which knows no FOR SHARE", function()
    assert.equal(text("LOCK IN SHARE MODE"), hierlock.plan(targets):sql("mariadb"))
  end)
  it("can be of another table", function()
    for _, name in ipairs { "my_$_table", "t", ("t"):rep(64) } do
      assert.equal(text("FOR SHARE", name), hierlock.plan(targets):sql("mysql", name))
    end
  end)
  it("has one part for one row", function()
    assert.equal("(SELECT level,bucket FROM hier_lock_buckets WHERE level=0 AND bucket=3142546 FOR UPDATE)",
                 hierlock.plan({ { "u1" } }):sql("mysql"))
  end)
  it("has nothing of the ids in it", function()
    local sql = hierlock.plan({ { "'; DROP TABLE x; --", "\0`" } }):sql("mysql")
    assert.is_nil(sql:find("DROP", 1, true))
    assert.is_nil(sql:find("[%z'`]"))
  end)
end)

describe("verify", function()
  local plan = hierlock.plan { { "u1", "a1", "r1" } }
  it("is true when as many rows came back as the plan has", function()
    assert.is_true(plan:verify(3))
  end)
  for _, n in ipairs { 0, 2, 4, 2.5, -1, 0 / 0, math.huge } do
    it("is not_provisioned when " .. n .. " of 3 came back", function()
      local ok, err = plan:verify(n)
      assert.is_nil(ok)
      assert.equal("not_provisioned", err.code)
      assert.is_false(err.retryable)
      assert.matches("provision", err.message)
    end)
  end
end)
