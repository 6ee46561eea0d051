--- `hierlock explain`, as an operator runs it, on every store: that it tells what an acquisition locks.

local support = require "spec.support"
local program = require "spec.support.command"
local hierlock = require "hierlock"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

after_each(program.close)

-- Returns the command's table, a list of lists; and all of its output.
local function explained(dsn, ...)
  local said = assert_status(0, run(dsn, "explain", ...))
  assert.equal("", said.err)
  assert.is_nil(said.out:find "[^ -~\n]")
  local rows = {}
  for line in said.out:gmatch "\n(%d+  [^\n]*)" do
    local cells = {}
    for cell in (line .. "  "):gmatch "(.-)  +" do cells[#cells + 1] = cell end
    rows[#rows + 1] = cells
  end
  return rows, said.out
end

describe("the command line of explain", function()
  it("is refused with 64 and a line when it is wrong", function()
    for _, arguments in ipairs { {}, { "" }, { "u1//r1" }, { "u1/a/b/c" }, { "u1", "--held", "x" }, { "u1", "--held", "-1" },
                                 { "u1", "--held", "1.5" }, { "u1", "--held", "inf" } } do
      local said = assert_status(64, run("null:", "explain", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
    assert.matches("--ask-password", assert_status(64, run(nil, "explain", "u1", "--dsn", "mysql://u:x@h/d")).err, 1, true)
    assert_status(69, run("mysql://u@127.0.0.1:1/d", "explain", "u1"))
  end)

  it("tells of the usual tree without a store", function()
    local rows, all = explained("null:", "u1/a1/r1")
    assert.same({ { "1", "0 user", "3142546", "shared", "u1" }, { "2", "1 account", "5156936", "shared", "u1/a1" },
                  { "3", "2 resource", "185732", "exclusive", "u1/a1/r1" } }, rows)
    assert.matches("levels user, account, resource; on each level 10,000,000 buckets.", all, 1, true)
    assert.matches("while others hold 1,000 locks.* 0.0001, 1 in 10,000%.\n", all)
    assert.equal("shared", explained("null:", "--shared", "u1/a1/r1")[3][4])
    assert.equal("0 shop", explained("null:", "--levels", "shop,till", "s1/t1")[1][2])
  end)

  it("says what is intended in a directory whose programs know that", function()
    local dsn = support.asked[1].dsn
    local function modes(rows)
      local list = {}
      for i, row in ipairs(rows) do list[i] = row[4] end
      return list
    end
    assert.same({ "IX", "IX", "exclusive" }, modes(explained(dsn, "u1/a1/r1")))
    assert.same({ "IS", "shared" }, modes(explained(dsn, "--shared", "u1/a1")))
    assert.matches("No two of these", select(2, explained(dsn, "--shared", "u1", "u1/a1/r1", "u1/a1")), 1, true)
    assert.matches("u1/a1/r1 is in u1", select(2, explained(dsn, "u1", "u1/a1/r1")), 1, true)
  end)

  it("says which targets exclude each other, and why", function()
    local _, all = explained("null:", "u1/a1/r1", "u1", "u2", "u2/x", "u1", "u3/a/b")
    assert.matches("\nu1/a1/r1 and u1 exclude each other: u1/a1/r1 is in u1.\n", all, 1, true)
    assert.matches("\nu1 and u1 are the same node.\n", all, 1, true)
    assert.matches("\nu2 and u2/x exclude each other: u2/x is in u2.\n", all, 1, true)
    assert.is_nil(all:find "u3/a/b and" or all:find "and u3/a/b")
    assert.matches("No two of these targets exclude each other.", select(2, explained("null:", "u1/a1/r1", "u1/a1/r2")), 1, true)
    assert.matches("No two of", select(2, explained("null:", "--shared", "u1/a1/r1", "u1/a1/r1")), 1, true)
    -- docs/locking.md: two pairs of two buckets.
    _, all = explained("null:", "u1/a1/r10746", "u1/a1/r1979", "u1/a1/r10747", "u1/a1/r1978")
    local by_chance = {}
    for pair in all:gmatch "\n(%C- and %C-) exclude each other by chance: %C- have the same row%." do by_chance[#by_chance + 1] = pair end
    local expected = {}
    local function bucket(id) return hierlock.plan({ { "u1", "a1", id } }):rows()[3].bucket end
    local ids = { "r10746", "r1979", "r10747", "r1978" }
    for i = 1, 4 do
      for k = i + 1, 4 do
        if bucket(ids[i]) == bucket(ids[k]) then expected[#expected + 1] = ("u1/a1/%s and u1/a1/%s"):format(ids[i], ids[k]) end
      end
    end
    assert.is_true(#expected > 0)
    assert.same(expected, by_chance)
  end)

  it("knows the odds", function()
    local odds = require("hierlock.command.explain").odds
    for _, case in ipairs { { 1, 1, 10 }, { 2, 30, 100 }, { 1, 1000, 1e7 }, { 5, 100000, 1e7 } } do
      local exclusive, others, buckets = unpack(case)
      local exact = 1 - (1 - 1 / buckets) ^ (exclusive * others)
      assert.is_true(math.abs(odds(exclusive, others, buckets) / exact - 1) < 1e-6)
    end
    assert.equal(0, odds(0, 1000, 10))
    assert.equal(0, odds(1, 0, 1))
    assert.equal(1, odds(1, 1, 1))
    assert.is_true(math.abs(odds(1, 1e6, 2 ^ 60) * 2 ^ 60 / 1e6 - 1) < 1e-6)
    assert.matches("at most 0%.\n", select(2, explained("null:", "--held", "0", "u1")))
  end)

  it("writes nothing that a terminal would obey, and many targets", function()
    for _, id in ipairs { "\27[31m\n", "\255\254", "a, b", "\226\128\174x" } do
      local target = "u1/" .. id:gsub("[^%w ]", function(c) return ("%%%02X"):format(c:byte()) end)
      local out = assert_status(0, program.on_terminal("null:", 80, "explain", target).join()).out
      assert.is_nil((out:gsub("\r\n", ""):match ".?.?.?.?[%c\127].?.?.?.?"))
      assert.matches("2      1 account  %d+ +exclusive  u1/", out)
    end
    local many = {}
    for i = 1, 300 do many[i] = "u1/a1/r" .. i end
    assert.equal(302, #explained("null:", unpack(many)))
    many[301] = "u1"
    assert.matches("\nAnd 200 more pairs.\n", select(2, explained("null:", unpack(many))), 1, true)
  end)
end)

support.each_leasing_store(function(store)
  local manager

  before_each(function() manager = support.open(store) end)
  after_each(function() manager:close() end)

  it("explains what is locked", function()
    local targets = { { "u1", "a1", "r1" }, { "u1", "a1" }, { "u2", "a/b" } }
    local rows, all = explained(store.dsn, "u1/a1/r1", "u1/a1", "u2/a%2Fb")
    local plan = manager:plan(targets)
    local expected = plan:rows()
    assert.equal(#expected, #rows)
    for i, row in ipairs(expected) do
      assert.equal(("%d"):format(i), rows[i][1])
      assert.equal(("%d"):format(row.level), rows[i][2]:match "^%d+")
      assert.equal(row.mode, rows[i][4])
      if not row.key then assert.equal(("%.0f"):format(row.bucket), rows[i][3]) end
    end
    assert.same({ u1 = true, u2 = true }, { [rows[1][5]] = true, [rows[2][5]] = true })
    if store.table then
      local sql = assert(all:match "\n  (%(SELECT [^\n]*)\n")
      local connection = store.sql()
      connection:query "BEGIN"
      local found = connection:query(sql)
      connection:query "ROLLBACK"
      for i, row in ipairs(found) do assert.same({ rows[i][2]:match "^%d+", rows[i][3] }, { tostring(row[1]), tostring(row[2]) }) end
      assert.equal(#rows, #found)
    elseif store.dialect == "postgresql" then
      local sql, at = assert(all:match "\n  (SELECT [^\n]*)\n"), 1
      for i, row in ipairs(rows) do
        assert.equal(expected[i].key, row[3])
        at = assert(sql:find(("'%s'"):format(row[3]), at, true))
      end
      -- The server's own word.
      local handle = assert(manager:acquire_all(targets))
      local held = {}
      for _, lock in ipairs(store.sql():query [[SELECT (classid::int8 << 32) | objid::int8, mode FROM pg_locks
          WHERE locktype = 'advisory' AND objsubid = 1]]) do held[tostring(lock[1])] = lock[2] end
      for _, row in ipairs(rows) do assert.equal(row[4] == "shared" and "ShareLock" or "ExclusiveLock", held[row[3]]) end
      handle:release()
    elseif store.name == "redis" then
      local handle = assert(manager:acquire_all(targets))
      for _, row in ipairs(rows) do
        assert.equal("zset", store.cli("-n", store.dsn:match "/(%d+)%f[^%d][^/]*$", "TYPE", "hierlock:" .. row[3]))
      end
      handle:release()
    elseif store.name == "sqlite" then
      for i, row in ipairs(rows) do assert.equal(expected[i].key, row[3]) end
    end
  end)
end)
