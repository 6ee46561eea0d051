--- A table's buckets as SQL: the wanted state, the present state, and the statements that lead from
-- one to the other. sql/ says the same for people to run by hand. Decides nothing, prints nothing.

local core = require "hierlock.core"
local hierlock = require "hierlock"

local space = {}
space.__index = space

space.DEFAULT_BUCKETS = 10000000
space.DEFAULT_LEVELS = { "user", "account", "resource" }
--- A chunk has at most so many rows: 1,000 numbers crossed with themselves.
space.CHUNK_MAX = 1000000

--- Rows of the gate: the core looks for one of these.
space.GATES = core.mysql_gates

-- The mark before the levels in the record of a space with leases: programs that know of no leases refuse it.
local LEASED = "leases:"

--- self.name is the space, as the DSN names it; self.table the table of its buckets, which
-- has that name unless there are leases.
function space.new(connection)
  local name = connection:table()
  local stem = name:gsub("_buckets$", "")
  return setmetatable({ connection = connection, name = name, table = name, stem = stem }, space)
end

--- From now on it is one with leases. Older programs do not find its buckets.
function space:lease()
  self.leased = true
  self.table = self.stem .. "_nodes"
end

--- The tables of leases: a list of {name, primary key, rows that it must have}.
function space:lease_tables()
  return { { self.stem .. "_leases", "id" }, { self.stem .. "_leased", "level, bucket, x, id" },
    { self.stem .. "_gate", "g", space.GATES } }
end

--- A list of rows, or how many were changed; nil, err. query(format, ...)
function space:query(query, ...)
  if select("#", ...) > 0 then query = query:format(...) end
  return self.connection:query(query)
end

local function first_value(rows, err)
  if not rows then return nil, err end
  return rows[1] and rows[1][1] or false
end

local function literal(text)
  if text:find("^[%w_, .-]*$") then return "'" .. text .. "'" end
  return "_utf8mb4 X'" .. text:gsub(".", function(c) return ("%02X"):format(c:byte()) end) .. "'"
end

-- -------------------------------------------------------------- the present state

--- The engine of a table, false where there is no table; nil, err.
function space:engine(name)
  return first_value(self:query(
    "SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '%s'", name))
end

-- A space with leases that has lost its record: connected programs lock its rows, and a table of the space's own name
-- would let others lock beside them. nil: this is none; else the error. The rows do not tell the names of the levels, and
-- programs with other names lock other rows: so its mend is the record only where `wanted` has the names.
local function orphan(self, wanted)
  local stem = self.stem
  if not self:engine(stem .. "_nodes") or not self:engine(stem .. "_leases") or self:engine(self.name) then return nil end
  local levels = first_value(self:query("SELECT MAX(level) + 1 FROM %s_nodes", stem))
  local buckets = levels and first_value(self:query("SELECT MAX(bucket) + 1 FROM %s_nodes WHERE level >= 0", stem))
  if not buckets then return nil end
  self:lease()
  local err = { code = "mismatch", retryable = false, message = ("hier_lock_meta has no record of %s, but there are %s_nodes " ..
    "and its leases, in which programs may hold locks: record again how many buckets it has, and its levels"):format(self.name, stem) }
  if not wanted.levels or #wanted.levels ~= tonumber(levels) then
    err.mend = ("the names of its %d levels are not known; give those that its programs have, by --levels"):format(levels)
    return err
  end
  err.mend = { self:schema()[2], self:record(wanted.buckets or buckets, wanted.levels) }
  local meta = ("`%s`.hier_lock_meta"):format(first_value(self:query "SELECT DATABASE()"))
  for i, statement in ipairs(err.mend) do err.mend[i] = statement:gsub("%s+", " "):gsub("hier_lock_meta", meta, 1) .. ";" end
  return err
end

--- Looks at the two tables: {engine, buckets, levels, empty, leased, unmoved}. `engine` is nil where there is no table;
-- `buckets` and `levels` are nil where nothing is recorded. `unmoved`: leases are wanted, but the buckets still have the
-- name of a space without. Or nil, err. wanted: buckets and levels that its programs have, where they are known.
function space:look(wanted)
  local found = {}
  local recorded, err = self:query("SELECT buckets, levels FROM hier_lock_meta WHERE table_name = '%s'", self.name)
  if recorded and recorded[1] then
    local levels = recorded[1][2]
    found.buckets, found.levels = tonumber(recorded[1][1]), {}
    if levels:sub(1, #LEASED) == LEASED then
      found.leased, levels = true, levels:sub(#LEASED + 1)
      self:lease()
    end
    for name in levels:gmatch("[^,]+") do found.levels[#found.levels + 1] = name end
    local ok, why = pcall(hierlock.plan, { { "x" } }, { levels = found.levels })
    if not ok then
      return nil, { code = "mismatch", retryable = false, message = ("hier_lock_meta records levels of the table %s " ..
        "that cannot be: %s"):format(self.name, (why:gsub("^.*hierlock: ", ""))) }
    end
  elseif not recorded and err.code ~= "not_provisioned" then
    return nil, err
  end
  local lost = not found.buckets and orphan(self, wanted or {})
  if lost then return nil, lost end
  local engine
  engine, err = self:engine(self.table)
  if engine == nil then return nil, err end
  local at = self.table
  if found.leased and not engine then
    at = self.name
    engine, err = self:engine(at)
    if engine == nil then return nil, err end
    found.unmoved = engine and true
  end
  found.engine = engine or nil
  found.empty = true
  if engine then
    local row
    row, err = first_value(self:query("SELECT level FROM %s LIMIT 1", at))
    if row == nil then return nil, err end
    found.empty = not row
  end
  return found
end

-- The tables of a space.
local function tables(name, leased)
  if not leased then return { name } end
  local stem, list = name:gsub("_buckets$", ""), {}
  for i, suffix in ipairs { "_nodes", "_leases", "_leased", "_gate" } do list[i] = stem .. suffix end
  return list
end

--- Another space that has a table of this one's, which is to have leases or not: its name and the
-- table's; nil; nil, nil, err. Each would take the other's rows and leases for its own.
function space:rival(leased)
  local others, err = self:query("SELECT table_name, levels FROM hier_lock_meta WHERE table_name <> '%s'", self.name)
  if not others then return nil, nil, err.code ~= "not_provisioned" and err or nil end
  for _, other in ipairs(others) do
    local theirs = "," .. table.concat(tables(other[1], other[2]:sub(1, #LEASED) == LEASED), ",") .. ","
    for _, name in ipairs(tables(self.name, leased)) do
      if theirs:find("," .. name .. ",", 1, true) then return other[1], name end
    end
  end
  return nil
end

--- How many of the buckets first .. last of a level are there. Locks nothing.
function space:count(level, first, last)
  local n, err = first_value(self:query("SELECT COUNT(*) FROM %s WHERE level = %d AND bucket BETWEEN %d AND %d",
    self.table, level, first, last))
  return tonumber(n), err
end

--- The level of the update rows of a tree with so many levels: the update rows of its deepest nodes.
function space.update_level(levels) return levels - 1 - 128 end

--- Lists the rows outside of the space, left by a larger one, perhaps: {range, rows}, or nil, err. Each range is one
-- of the primary key, so that deleting it locks no rows that programs lock.
function space:surplus(buckets, levels)
  local update, found = space.update_level(levels), {}
  local ranges = { ("level < %d"):format(update), ("level > %d AND level < 0"):format(update), ("level >= %d"):format(levels) }
  local own = { update }
  for level = 0, levels - 1 do own[#own + 1] = level end
  for _, level in ipairs(own) do
    ranges[#ranges + 1] = ("level = %d AND bucket < 0"):format(level)
    ranges[#ranges + 1] = ("level = %d AND bucket >= %d"):format(level, buckets)
  end
  for _, range in ipairs(ranges) do
    local n, err = first_value(self:query("SELECT COUNT(*) FROM %s WHERE %s", self.table, range))
    if not n then return nil, err end
    if tonumber(n) > 0 then found[#found + 1] = { range, tonumber(n) } end
  end
  return found
end

--- The columns of a table's primary key, with commas: "" where it has none; nil, err.
function space:key(name)
  local columns, err = first_value(self:query("SELECT GROUP_CONCAT(COLUMN_NAME ORDER BY SEQ_IN_INDEX SEPARATOR ', ') FROM " ..
    "information_schema.STATISTICS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '%s' AND INDEX_NAME = 'PRIMARY'", name))
  if columns == nil and err then return nil, err end
  return columns and columns:lower() or ""
end

--- The missing buckets among first .. last of a level: a list of ranges
-- {first, last}, at most n of them.
function space:holes(level, first, last, n)
  local rows, err = self:query(
    "SELECT previous + 1, bucket - 1 FROM (" ..
    "SELECT bucket, COALESCE(LAG(bucket) OVER (ORDER BY bucket), %d) AS previous FROM (" ..
    "SELECT bucket FROM %s WHERE level = %d AND bucket BETWEEN %d AND %d UNION ALL SELECT %d) AS there" ..
    ") AS pairs WHERE bucket > previous + 1 ORDER BY bucket LIMIT %d",
    first - 1, self.table, level, first, last, last + 1, n)
  if not rows then return nil, err end
  for i, row in ipairs(rows) do rows[i] = { tonumber(row[1]), tonumber(row[2]) } end
  return rows
end

-- ------------------------------------------------------------- what should be

-- The statement of sql/schema.sql or sql/leases.sql that begins so, with the space's own names.
function space:statement(beginning)
  local sql = ("\n" .. require("hierlock.store.mysql").sql):gsub("[ \n]*%-%-[^\n]*", "")
  local _, at = assert(sql:find("\n" .. beginning, 1, true))
  return (sql:sub(at - #beginning + 1, sql:find(";", at, true) - 1):gsub("hier_lock_(%l+)", function(name)
    if name == "buckets" then return self.table end
    return name ~= "meta" and self.stem .. "_" .. name
  end))
end

local function create(self, ...)
  local statements = {}
  for i, name in ipairs { ... } do statements[i] = self:statement("CREATE TABLE IF NOT EXISTS hier_lock_" .. name) end
  return statements
end

--- The statements that make the two tables, where they are missing.
function space:schema() return create(self, "buckets", "meta") end

--- The statement that records what the table is for.
function space:record(buckets, levels)
  return ("REPLACE INTO hier_lock_meta (table_name, buckets, levels)\nVALUES ('%s', %d, %s)"):format(
    self.name, buckets, literal((self.leased and LEASED or "") .. table.concat(levels, ",")))
end

--- The statements that make the tables of leases, where they are missing.
function space:lease_schema() return create(self, "leases", "leased", "gate") end

--- The statement that fills the gate with its missing rows.
function space:fill_gate() return self:statement "INSERT INTO hier_lock_gate" end

--- How many rows a table has; nil, err.
function space:rows(name)
  local n, err = first_value(self:query("SELECT COUNT(*) FROM %s", name))
  return tonumber(n), err
end

--- The statement by which the buckets leave the name that older programs know. The statement waits for the holders of
-- locks.
function space:move() return ("RENAME TABLE %s TO %s"):format(self.name, self.table) end

--- The statement that makes the buckets first .. last of a level, CHUNK_MAX at most. In the order of the primary key,
-- as pages that are filled in order are filled to the brim: the table is half as large as in any other. By numbers
-- up to 999, crossed: MySQL ends a recursive query after 1,000. some: a part of the rows is there, and may be
-- locked; INSERT IGNORE would wait for the holder of such a row, and this does not.
function space:fill(level, first, last, some)
  local bucket = ("%d + thousand.n * 1000 + one.n"):format(first)
  return ("INSERT INTO %s (level, bucket)\n" ..
    "WITH RECURSIVE digit (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM digit WHERE n < 999)\n" ..
    "SELECT %d, %s AS bucket\n" ..
    "FROM digit AS thousand, digit AS one\n" ..
    "WHERE thousand.n <= %d AND %s <= %d%s\n" ..
    "ORDER BY bucket"):format(self.table, level, bucket, math.floor((last - first) / 1000), bucket, last,
    some and ("\n  AND NOT EXISTS (SELECT 1 FROM %s AS there WHERE there.level = %d AND there.bucket = %s)")
      :format(self.table, level, bucket) or "")
end

--- Does the work of `fill` on a server that logs statements, where `fill` would wait for locked rows: names the
-- missing rows, in statements of PIECE rows; nil, err.
local PIECE = 10000
function space:fill_by_name(level, first, last)
  local holes, err = self:holes(level, first, last, last - first + 1)
  if not holes then return nil, err end
  local statements, rows = {}, {}
  local function flush()
    if not rows[1] then return end
    statements[#statements + 1] = ("INSERT INTO %s (level, bucket)\nVALUES %s"):format(self.table, table.concat(rows, ", "))
    rows = {}
  end
  for _, range in ipairs(holes) do
    for bucket = range[1], range[2] do
      rows[#rows + 1] = ("(%d, %d)"):format(level, bucket)
      if #rows == PIECE then flush() end
    end
  end
  flush()
  return statements
end

-- ---------------------------------------------------------- one at a time

-- Names of GET_LOCK are the whole server's, and of 64 bytes at most.
local function lock_name(self)
  return ("CONCAT('hierlock', SHA2(CONCAT(DATABASE(), '.%s'), 224))"):format(self.name)
end

--- Waits so many seconds until no other connection provisions this table: true, or false and the connection that
-- does; nil, err. Ends with the connection.
function space:lock(seconds)
  local got, err = first_value(self:query("SELECT GET_LOCK(%s, %d)", lock_name(self), seconds))
  if got == nil then return nil, err end
  if got == "1" then return true end
  return false, (first_value(self:query("SELECT IS_USED_LOCK(%s)", lock_name(self))))
end

return space
