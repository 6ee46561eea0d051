--- Checks a PostgreSQL: its settings, the tables of leases, the role's rights. Asks with no more privileges than
-- programs need.

local core = require "hierlock.core"
local server = require "hierlock.command.server"

local postgresql = {}

local LOOPBACK = { localhost = true, ["127.0.0.1"] = true, ["::1"] = true }
local SLOW_DETECTION = 10000 -- ms
local NEW = "13"             -- a version that is no reason to refuse a server
local LEVELS = 3             -- rows of a usual lock, where nothing else is said

local FACTS = [[
SELECT version(), pg_is_in_recovery(), ]] .. core.postgresql_multiple .. [[,
  current_user, current_database(), (SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()),
  (SELECT version FROM pg_stat_ssl WHERE pid = pg_backend_pid()),
  (SELECT COUNT(*) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'),
  (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user), (SELECT datconnlimit FROM pg_database WHERE datname = current_database()),
  CASE WHEN has_schema_privilege('public', 'USAGE') THEN to_regclass('public.hier_lock_token') IS NOT NULL END,
  CASE WHEN has_schema_privilege('public', 'USAGE') THEN has_sequence_privilege(to_regclass('public.hier_lock_token'), 'USAGE') END,
  has_schema_privilege('public', 'USAGE'),
  (SELECT bool_and(has_function_privilege(f, 'EXECUTE')) FROM unnest(ARRAY['pg_try_advisory_xact_lock(bigint)', 'pg_try_advisory_xact_lock_shared(bigint)',
    'pg_advisory_xact_lock(bigint)', 'pg_advisory_xact_lock_shared(bigint)']) f),
  (SELECT COUNT(*) FROM pg_locks),
  (SELECT COUNT(DISTINCT l.pid) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'
    AND a.query = '<insufficient privilege>'), has_schema_privilege('public', 'CREATE')]]

local LEASES = [[
SELECT name, to_regclass('public.' || name) IS NOT NULL, CASE WHEN to_regclass('public.' || name) IS NULL THEN NULL
  WHEN name = 'hier_lock_gate' THEN has_sequence_privilege(to_regclass('public.' || name), 'SELECT')
    AND has_sequence_privilege(to_regclass('public.' || name), 'UPDATE')
  ELSE has_table_privilege(to_regclass('public.' || name), 'SELECT') AND has_table_privilege(to_regclass('public.' || name), 'INSERT')
    AND has_table_privilege(to_regclass('public.' || name), 'UPDATE') AND has_table_privilege(to_regclass('public.' || name), 'DELETE') END
FROM unnest(ARRAY['hier_lock_leases', 'hier_lock_lease_rows', 'hier_lock_gate']) name]]

local HIDDEN = [[
SELECT name FROM unnest(ARRAY['hier_lock_leases', 'hier_lock_lease_rows']) name
WHERE row_security_active(to_regclass('public.' || name))]]

local INDEXES = [[
SELECT name FROM unnest(ARRAY['hier_lock_lease_rows_id', 'hier_lock_lease_rows_exclusive']) name
WHERE to_regclass('public.' || name) IS NULL]]

local function is_true(text) return text == "t" end
local function quoted(name) return '"' .. name:gsub('"', '""') .. '"' end

local RESTART = "then restart the server: pg_ctl restart, or systemctl restart postgresql"
local ANEW = "then have the programs connect anew"

-- Where a setting comes from, that is changed: what stands there goes before what would be said elsewhere.
local function alter(self, name, to, restart)
  local of, role, database = self.sources[name], quoted(self.role), quoted(self.database)
  local whose = of == "database" and "DATABASE " .. database or of == "user" and "ROLE " .. role or
    of == "database user" and ("ROLE %s IN DATABASE %s"):format(role, database) or of == "global" and "ROLE ALL"
  if whose then return { ("ALTER %s SET %s = %s;"):format(whose, name, to), ANEW } end
  if of == "client" then return { ("take %s out of PGOPTIONS"):format(name) } end
  if of == "command line" then
    return { ("on the command line that starts the server, which goes before ALTER SYSTEM: -c %s=%s"):format(name, (to:gsub("'", ""))), RESTART }
  end
  return { ("ALTER SYSTEM SET %s = %s;"):format(name, to), restart and RESTART or "SELECT pg_reload_conf();" }
end

local function see_all(self) return ("GRANT pg_read_all_stats TO %s;"):format(quoted(self.role)) end

-- -------------------------------------------------------------- checks

-- Adds what the store itself would say of these facts.
local function judge(found, check, facts, well, why, mend)
  facts.version = facts.version or NEW
  local safe, err = core.judge("postgresql", facts)
  found:add(check, safe and "ok" or "wrong", safe and well or err.message, why, mend)
end

local function version(self, found)
  judge(found, "version", { version = self.version }, self.version:match "^[^,]*",
    "Older servers, and others that speak its protocol, have other advisory locks, or none.", "install PostgreSQL 13 or later")
  judge(found, "standby", { standby = self.standby }, "no",
    "On a standby locks are granted, but exclude no other program.", "name the primary in the DSN, or all servers with target_session_attrs=primary")
  judge(found, "cluster", { multiple = self.multiple }, "none that can be seen",
    "With several primaries, an advisory lock on one does not hold on the others.", "use a server outside of the cluster for the locks")
end

local function connections(self, found)
  local subject, settings = self.subject, self.settings
  local most = tonumber(settings.max_connections) - tonumber(settings.superuser_reserved_connections) - tonumber(settings.reserved_connections or 0)
  local wanted = subject.pool_size * subject.processes
  local why = "Each lock that is held or awaited has a connection; where none is left, acquiring fails."
  found:add("max_connections", wanted > most and "wrong" or wanted > most - self.others and "warning" or "ok",
    ("%d for all programs, %d of others now; %d pools of %d want %d"):format(most, self.others, subject.processes, subject.pool_size, wanted), why,
    alter(self, "max_connections", tostring(wanted + self.others + tonumber(settings.max_connections) - most + 10), true))
  for _, limit in ipairs {
    { "connections of the role", self.role_limit, ("ALTER ROLE %s CONNECTION LIMIT -1;"):format(quoted(self.role)) },
    { "connections of the database", self.database_limit, ("ALTER DATABASE %s CONNECTION LIMIT -1;"):format(quoted(self.database)) },
  } do
    if limit[2] >= 0 then
      found:add(limit[1], wanted > limit[2] and "wrong" or "ok", ("%d at most; %d are wanted"):format(limit[2], wanted), why, limit[3])
    end
  end
end

local function lock_table(self, found)
  local settings, subject = self.settings, self.subject
  local per = tonumber(settings.max_locks_per_transaction)
  local sessions = tonumber(settings.max_connections) + tonumber(settings.max_prepared_transactions)
  local room, levels = per * sessions, subject.levels and #subject.levels or LEVELS
  local wanted = subject.pool_size * subject.processes * levels
  found:add("max_locks_per_transaction", wanted > room and "wrong" or wanted + self.locks > room / 2 and "warning" or "ok",
    ("room for %d locks on the server, %d taken now; %d locks of %d nodes want %d"):format(room, self.locks,
      subject.pool_size * subject.processes, levels, wanted),
    "All sessions share one table of locks, with tables and indexes in it; where it is full, acquiring fails (53200).",
    alter(self, "max_locks_per_transaction", tostring(math.max(64, 2 * math.ceil((wanted + self.locks) / sessions))), true))
end

local function timeouts(self, found)
  local settings = self.settings
  local slow = tonumber(settings.deadlock_timeout) > SLOW_DETECTION
  found:add("deadlock detection", slow and "warning" or "ok", ("after %d ms"):format(tonumber(settings.deadlock_timeout)),
    "Only extend, and programs with locks of other kinds in the same transaction, can deadlock: they wait so long before it is noticed.",
    alter(self, "deadlock_timeout", "'1s'"))
  local idle = tonumber(settings.idle_session_timeout) or 0
  found:add("time-outs", idle > 0 and "warning" or "ok", idle > 0 and ("idle_session_timeout = %d ms"):format(idle) or "none of the server's disturbs",
    "hierlock's sessions set theirs; idle_session_timeout ends connections of the pool, and the next lock has to connect anew.",
    (self.sources.idle_session_timeout == "database user" or self.sources.idle_session_timeout == "client") and alter(self, "idle_session_timeout", "0") or
      { ("ALTER ROLE %s SET idle_session_timeout = 0;"):format(quoted(self.role)), ANEW })
  local level = settings.default_transaction_isolation
  found:add("isolation", "ok", level, "hierlock's own sessions set theirs, and advisory locks know no isolation; programs that attach have this one.")
  local tracked = settings.track_activities == "on"
  found:add("track_activities", tracked and "ok" or "warning", settings.track_activities,
    "It is how others see who holds a lock: without it, timeouts and `holders` name no one.", alter(self, "track_activities", "on"))
end

local function tls(self, found)
  local host = self.subject.said.host
  local near = not host or host:find "^/" or LOOPBACK[host]
  local sure = self.ssl and (near or self.subject.dsn:find "sslmode=verify%-" or (os.getenv "PGSSLMODE" or ""):find "^verify%-")
  found:add("TLS", (near or sure) and "ok" or "warning",
    not self.ssl and (near and "none, and the server is on this machine" or "none") or
      self.tls_version .. (sure and "" or ", but the server's certificate is not checked: another could answer"),
    "Without TLS, who is on the way reads the ids, and may take the connection over.", "in the DSN: sslmode=verify-full&sslrootcert=/path/to/ca.pem")
end

local function tokens(self, found)
  local why = "A sequence makes fencing tokens that grow whatever becomes of the clock; it must be the same for all."
  judge(found, "tokens", { sequence = self.sequence, sequence_usable = self.sequence_usable },
    self.sequence and "by the sequence public.hier_lock_token" or
      "by the server's clock: there is no sequence public.hier_lock_token (sql/postgresql.sql makes it)", why,
    ("GRANT USAGE ON SEQUENCE public.hier_lock_token TO %s;"):format(quoted(self.role)))
end

local function privileges(self, found)
  local why = "Locks are functions of the server; who may not call them gets none."
  local mend = ("GRANT EXECUTE ON FUNCTION pg_try_advisory_xact_lock(bigint), pg_try_advisory_xact_lock_shared(bigint), " ..
    "pg_advisory_xact_lock(bigint), pg_advisory_xact_lock_shared(bigint) TO %s;"):format(quoted(self.role))
  found:add("privileges", self.functions and "ok" or "wrong", self.functions and "may call what locks" or "may not call what locks", why, mend)
  self.subject.lock_denied = mend
  found:add("other roles", self.unseen > 0 and "warning" or "ok", self.unseen > 0 and
    ("%d sessions have advisory locks, and this role does not see what for"):format(self.unseen) or "have no lock that this role does not see",
    "A role sees what its own sessions say. Timeouts, holders and ps do not name the programs of other roles.", see_all(self))
  self.subject.unprovisioned = "mend what is found above first; docs/postgresql.md has the privileges"
  if not self.public then
    self.subject.unprovisioned = ("GRANT USAGE ON SCHEMA public TO %s;"):format(quoted(self.role))
    found:add("schema public", "warning", "the role may not use it", "Whether there are leases is seen there: who may not look is kept out by none of them.",
      self.subject.unprovisioned)
  end
end

local function leases(self, found)
  local why = "Leases are records in these tables; without them there are session locks only."
  if not self.public then
    self.subject.leases_tried = false
    return found:add("tables of leases", "unseen", "see schema public", why)
  end
  local rows, err = self.connection:query(LEASES)
  self.subject.leases_tried = false
  if not rows then return found:add("tables of leases", "unseen", err.message, why) end
  local there, usable, missing = 0, 0, {}
  for _, row in ipairs(rows) do
    if is_true(row[2]) then there = there + 1 else missing[#missing + 1] = row[1] end
    if is_true(row[3]) then usable = usable + 1 end
  end
  local provision = self.subject.command "provision --leases"
  local grants = {
    ("GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO %s;"):format(quoted(self.role)),
    ("GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO %s;"):format(quoted(self.role)),
  }
  self.subject.leases_denied = grants
  -- Where the role may, the first lease makes them; a doctor does not.
  self.subject.leases_tried = there == #rows
  if there == 0 and self.subject.leases_wanted and not self.makes_leases then
    return found:add("tables of leases", "wrong", "none, and the role may not make them", "Each lock of a quorum is a lease on its stores.", provision)
  end
  if there == 0 then return found:add("tables of leases", "ok", "none: session locks only", why) end
  if #missing > 0 then
    return found:add("tables of leases", "wrong", "missing: " .. table.concat(missing, ", "), why, provision)
  end
  -- Tables of an earlier version have one index less.
  local slow = usable == #rows and self.connection:query(INDEXES) or {}
  if slow[1] then
    found:add("indexes of leases", "warning", "missing: " .. slow[1][1] .. (slow[2] and ", " .. slow[2][1] or ""),
      "Without them, a request below a node reads all leases there.", provision)
  end
  found:add("tables of leases", usable == #rows and "ok" or "wrong", usable == #rows and "there, and may be used" or "the role may not use them", why, grants)
  local hidden = self.connection:query(HIDDEN) or {}
  if hidden[1] then
    self.subject.unprovisioned = ("ALTER ROLE %s BYPASSRLS;"):format(quoted(self.role))
    found:add("row-level security", "wrong", "it is on for " .. hidden[1][1] .. (hidden[2] and ", " .. hidden[2][1] or ""),
      "It could hide leases, so who is subject to it is refused.", self.subject.unprovisioned)
  end
  local settings, ill, mends = self.settings, {}, {}
  for _, name in ipairs { "fsync", "full_page_writes" } do
    if settings[name] ~= "on" then
      ill[#ill + 1] = name .. " = " .. settings[name]
      for _, line in ipairs(alter(self, name, "on")) do mends[#mends + 1] = line end
    end
  end
  if settings.synchronous_commit == "off" then
    ill[#ill + 1] = "synchronous_commit = off"
    for _, line in ipairs(alter(self, "synchronous_commit", "on")) do mends[#mends + 1] = line end
  end
  found:add("durability", ill[1] and "warning" or "ok", ill[1] and table.concat(ill, ", ") or "each commit is on the disk",
    "A lease that a crash of the server forgets is granted to another program while its holder believes in it.", mends)
  if settings.autovacuum ~= "on" then
    found:add("autovacuum", "warning", settings.autovacuum, "Each refresh leaves a dead row, which no process removes.", alter(self, "autovacuum", "on"))
  end
end

-- ----------------------------------------------------------- all of it

local WHY_REACHED = "Nothing can be locked on a server that cannot be reached."

local function connect(subject)
  local ok, store = pcall(require, "hierlock.store.postgresql")
  if not ok then
    return nil, { code = "store", message = "the PostgreSQL store is not built or cannot be loaded: " .. store }
  end
  local connection, err = store.connect(subject.dsn, subject.application)
  if connection then connection:answers_within(server.ANSWER) end
  return connection, err
end

local function unreached(err)
  local said = err.message
  local whose, name = said:match 'too many connections for (%l+) "(.*)"'
  if said:find "not built" then return "install libpq (apt-get install libpq5), or build hierlock with it (apt-get install libpq-dev)" end
  if whose then return ("ALTER %s %s CONNECTION LIMIT -1;"):format(whose:upper(), quoted(name)) end
  if said:find "too many" or said:find "remaining connection slots" then
    return { "close connections that no program needs, or have an administrator raise max_connections", RESTART }
  end
  if said:find "database .* does not exist" then return "make the database that the DSN names" end
  if said:find "password" or said:find "role .* does not exist" or said:find "pg_hba" then
    return "check user and password in the DSN, and pg_hba.conf"
  end
  if said:find "permission denied for database" then return "let the role of the DSN connect to its database, by GRANT CONNECT" end
  return "start the server, or mend host and port in the DSN"
end

--- Works like the function of hierlock.command.examine.mysql.
function postgresql.examine(subject, found)
  local connection, err = connect(subject)
  local settings, facts
  if connection then
    settings, err = connection:query "SELECT name, setting, source FROM pg_settings"
    if settings then facts, err = connection:query(FACTS) end
    if not facts then connection:close() end
  end
  if not facts then
    found:add("reached", "wrong", err.message, WHY_REACHED, unreached(err))
    return false
  end
  local row = facts[1]
  local self = {
    connection = connection, subject = subject, settings = {}, sources = {}, version = row[1], standby = is_true(row[2]),
    multiple = is_true(row[3]), role = row[4], database = row[5], ssl = is_true(row[6]), tls_version = row[7] or "", others = tonumber(row[8]),
    role_limit = tonumber(row[9]) or -1, database_limit = tonumber(row[10]) or -1, sequence = is_true(row[11]), sequence_usable = is_true(row[12]),
    public = is_true(row[13]), functions = is_true(row[14]), locks = tonumber(row[15]), unseen = tonumber(row[16]), makes_leases = is_true(row[17]),
  }
  for _, setting in ipairs(settings) do self.settings[setting[1]], self.sources[setting[1]] = setting[2], setting[3] end
  subject.observers_blind = self.settings.track_activities == "on" and see_all(self) or
    "track_activities = on comes first, see below"
  found:add("reached", "ok", subject.where .. ", as " .. self.role, WHY_REACHED)
  version(self, found)
  privileges(self, found)
  tokens(self, found)
  leases(self, found)
  connections(self, found)
  lock_table(self, found)
  timeouts(self, found)
  tls(self, found)
  local answers, silence = connection:query "SELECT 1"
  connection:close()
  if not answers then
    found:add("answers", "wrong", "it ceased to answer: " .. silence.message, "What was not answered above is not known, and programs wait likewise.",
      "look at the server itself: is its machine out of memory or disk, is it stopped?")
  end
  return answers ~= nil
end

return postgresql
