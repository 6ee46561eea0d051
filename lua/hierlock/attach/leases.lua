--- Leases in the way of what `hierlock.attach` locks, on MySQL and MariaDB.
--
-- The program's transaction may have fixed its view long ago, so nothing is read here but by
-- locking reads, which see the present. A lease that is in the way is not waited for: the
-- transaction would keep its row, and so its holder from giving it back.

local leases = {}

-- The mark before the levels in the record of a space with leases: as in hierlock.command.space.
local MARK = "leases:"
-- The level of a gate's row in what the statement of a plan returns.
local GATE = -1

--- Splits the levels in hier_lock_meta: returns the levels, and whether the space has leases.
function leases.read(levels)
  if levels:sub(1, #MARK) == MARK then return levels:sub(#MARK + 1), true end
  return levels, false
end

--- The stem with which the names of a space's tables begin.
function leases.stem(name) return (name:gsub("_buckets$", "")) end

--- The table of the buckets.
function leases.rows(name, leased) return leased and leases.stem(name) .. "_nodes" or name end

--- Whether `plan:verify` missed nothing but gates: all bucket rows came back, and there may be leases.
-- field(row, position, name)
function leases.possible(rows, plan, field)
  local buckets = 0
  for _, row in ipairs(rows) do
    if tonumber(field(row, 1, "level")) ~= GATE then buckets = buckets + 1 end
  end
  return buckets == #plan:rows()
end

-- How long a lease lasts, in microseconds, as SQL. UTC_TIMESTAMP is what the program has set by SET timestamp,
-- if it has, and SYSDATE is not; but that shows the session's time zone, and jumps with its summer time. A lease is
-- over when both say so.
local LASTS = "GREATEST(TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)," ..
  "TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)-TIMESTAMPDIFF(MICROSECOND,NOW(6),SYSDATE(6)))"

--- Looks, at the rows that `sql`, the statement of a plan, has locked. query(sql) returns rows, or nil and what the driver
-- says. Deletes those whose time is up, in the program's transaction. True; false: one is in the way; nil, and what the
-- driver says.
function leases.pass(self, sql, query, field)
  local stem = leases.stem(self.table)
  local shared = self.dialect == "mariadb" and "LOCK IN SHARE MODE" or "FOR SHARE"
  -- Each by itself: a scan of several would lock the records beside them, too, in REPEATABLE READ.
  local looks = {}
  for level, bucket, lock in sql:gmatch "level=(-?%d+) AND bucket=(%d+) (%u+ %u+)" do
    looks[#looks + 1] = ("(SELECT HEX(l.id) AS id,%s AS lasts FROM %s_leased r STRAIGHT_JOIN %s_leases l ON l.id=r.id " ..
      "WHERE r.level=%s AND r.bucket=%s%s %s)"):format(LASTS, stem, stem, level, bucket,
      lock == "FOR UPDATE" and "" or " AND r.x=1", shared)
  end
  local rows, message, errno, sqlstate = query(table.concat(looks, " UNION ALL "))
  if not rows then return nil, message, errno, sqlstate end
  for _, row in ipairs(rows) do
    if tonumber(field(row, 2, "lasts")) > 0 then return false end
  end
  for _, row in ipairs(rows) do
    local ok
    ok, message, errno, sqlstate = query(("DELETE l,r FROM %s_leases l LEFT JOIN %s_leased r ON r.id=l.id WHERE l.id=0x%s")
      :format(stem, stem, field(row, 1, "id")))
    if not ok then return nil, message, errno, sqlstate end
  end
  return true
end

return leases
