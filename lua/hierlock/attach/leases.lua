--- Leases in the way of what `hierlock.attach` locks, on MySQL and MariaDB.
--
-- The program's transaction may have fixed its view long ago, so nothing is read here but by
-- locking reads, which see the present. A lease that is in the way is not waited for: the
-- transaction would keep its row, and so its holder from giving it back.

local leases = {}

-- What stands before the levels in the record of a space with leases, and rows of the gate: as in
-- hierlock.command.space.
local MARK, GATES = "leases:", 65536

--- What hier_lock_meta says of the levels, and whether the space has leases.
function leases.read(levels)
  if levels:sub(1, #MARK) == MARK then return levels:sub(#MARK + 1), true end
  return levels, false
end

--- What the names of a space's tables begin with.
function leases.stem(name) return (name:gsub("_buckets$", "")) end

local function shared(self) return self.dialect == "mariadb" and "LOCK IN SHARE MODE" or "FOR SHARE" end

--- The table of the buckets.
function leases.rows(name, leased) return leased and leases.stem(name) .. "_nodes" or name end

-- The gates of a plan's roots, each once.
local function gates(self, plan)
  local list = {}
  for _, row in ipairs(plan:rows()) do
    if row.level > 0 then break end
    local gate = self.buckets <= GATES and row.bucket or math.floor(row.bucket * GATES / self.buckets)
    if list[#list] ~= gate then list[#list + 1] = gate end
  end
  return list
end

--- The parts of the lock statement that read the gate, behind all others; and how many. Each returns -1, or
-- -2 where there may be leases.
function leases.sql(self, plan)
  local parts, list = {}, gates(self, plan)
  for i, gate in ipairs(list) do
    parts[i] = (" UNION ALL (SELECT -1-n,g FROM %s_gate WHERE g=%d %s)"):format(leases.stem(self.table), gate, shared(self))
  end
  return table.concat(parts), #list
end

--- Whether the rows of the lock statement say that there may be some. field(row, position, name)
function leases.possible(rows, field)
  for _, row in ipairs(rows) do
    if tonumber(field(row, 1, "level")) == -2 then return true end
  end
  return false
end

-- How long a lease lasts, in microseconds, as SQL. UTC_TIMESTAMP is what the program has set by SET timestamp,
-- if it has, and SYSDATE is not; but that shows the session's time zone, and jumps with its summer time. A lease is
-- over when both say so.
local LASTS = "GREATEST(TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)," ..
  "TIMESTAMPDIFF(MICROSECOND,UTC_TIMESTAMP(6),l.till)-TIMESTAMPDIFF(MICROSECOND,NOW(6),SYSDATE(6)))"

--- Looks. query(sql) returns rows, or nil and what the driver says. Deletes those whose time is up, in the
-- program's transaction. True; false: one is in the way; nil, and what the driver says.
function leases.pass(self, plan, query, field)
  local stem = leases.stem(self.table)
  -- Each by itself: a scan of several would lock the records beside them, too, in REPEATABLE READ.
  local looks = {}
  for i, row in ipairs(plan:rows()) do
    looks[i] = ("(SELECT HEX(l.id) AS id,%s AS lasts FROM %s_leased r STRAIGHT_JOIN %s_leases l ON l.id=r.id " ..
      "WHERE r.level=%d AND r.bucket=%d%s %s)"):format(LASTS, stem, stem, row.level, row.bucket,
      row.mode == "shared" and " AND r.x=1" or "", shared(self))
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
