--- The space of buckets of one table as SQL: what it should be, what is there,
-- and the statements that make it so. sql/ says the same for people to run by
-- hand. Decides nothing, prints nothing.

local space = {}
space.__index = space

space.DEFAULT_BUCKETS = 10000000
space.DEFAULT_LEVELS = { "user", "account", "resource" }
--- A chunk has at most so many rows: 1,000 numbers crossed with themselves.
space.CHUNK_MAX = 1000000

function space.new(connection)
  return setmetatable({ connection = connection, table = connection:table() }, space)
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

-- -------------------------------------------------------------- what is there

--- Looks at the two tables: {engine, buckets, levels, empty}. engine is nil
-- where there is no table; buckets and levels are nil where nothing is recorded.
-- nil, err.
function space:look()
  local found = {}
  local engine, err = first_value(self:query(
    "SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = '%s'", self.table))
  if engine == nil then return nil, err end
  found.engine = engine or nil
  local recorded
  recorded, err = self:query("SELECT buckets, levels FROM hier_lock_meta WHERE table_name = '%s'", self.table)
  if recorded and recorded[1] then
    found.buckets, found.levels = tonumber(recorded[1][1]), {}
    for name in recorded[1][2]:gmatch("[^,]+") do found.levels[#found.levels + 1] = name end
  elseif not recorded and err.code ~= "not_provisioned" then
    return nil, err
  end
  found.empty = true
  if engine then
    local row
    row, err = first_value(self:query("SELECT level FROM %s LIMIT 1", self.table))
    if row == nil then return nil, err end
    found.empty = not row
  end
  return found
end

--- How many of the buckets first .. last of a level are there. Locks nothing.
function space:count(level, first, last)
  local n, err = first_value(self:query("SELECT COUNT(*) FROM %s WHERE level = %d AND bucket BETWEEN %d AND %d",
    self.table, level, first, last))
  return tonumber(n), err
end

--- How many rows lie outside of the space: left by a larger one, perhaps.
function space:surplus(buckets, levels)
  local n, err = first_value(self:query(
    "SELECT COUNT(*) FROM %s WHERE level < 0 OR level >= %d OR bucket < 0 OR bucket >= %d", self.table, levels, buckets))
  return tonumber(n), err
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

--- The statements that make the two tables, where they are missing.
function space:schema()
  return {
    ("CREATE TABLE IF NOT EXISTS %s (\n" ..
     "  level  TINYINT NOT NULL,\n" ..
     "  bucket INT NOT NULL,\n" ..
     "  PRIMARY KEY (level, bucket)\n" ..
     ") ENGINE=InnoDB"):format(self.table),
    "CREATE TABLE IF NOT EXISTS hier_lock_meta (\n" ..
    "  table_name VARCHAR(64) NOT NULL PRIMARY KEY,\n" ..
    "  buckets    INT UNSIGNED NOT NULL,\n" ..
    "  levels     VARCHAR(1100) NOT NULL\n" ..
    ") ENGINE=InnoDB",
  }
end

--- The statement that records what the table is for.
function space:record(buckets, levels)
  return ("INSERT INTO hier_lock_meta (table_name, buckets, levels)\nVALUES ('%s', %d, %s)"):format(
    self.table, buckets, literal(table.concat(levels, ",")))
end

--- The statement that makes the buckets first .. last of a level, CHUNK_MAX at
-- most. In the order of the primary key, as pages that are filled in order are
-- filled to the brim: the table is half as large as in any other. By numbers up
-- to 999, crossed: MySQL ends a recursive query after 1,000. some: a part of them is
-- there, and may be locked; INSERT IGNORE would wait for whoever holds such a
-- row, and this does not.
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

--- The same for a server that logs statements, where the above would wait for
-- rows that are locked: the missing rows by name, in statements of PIECE rows; nil, err.
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
  return ("CONCAT('hierlock', SHA2(CONCAT(DATABASE(), '.%s'), 224))"):format(self.table)
end

--- Waits so many seconds until nobody else provisions this table: true, or false
-- and the connection that does; nil, err. Ends with the connection.
function space:lock(seconds)
  local got, err = first_value(self:query("SELECT GET_LOCK(%s, %d)", lock_name(self), seconds))
  if got == nil then return nil, err end
  if got == "1" then return true end
  return false, (first_value(self:query("SELECT IS_USED_LOCK(%s)", lock_name(self))))
end

return space
