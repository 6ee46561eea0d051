--- PostgreSQL: session locks and leases.

local sql = require "spec.support.sql"

local postgresql = {
  server = true, unbucketed = true, dialect = "postgresql",
  themes = {
    hang = true, restart = { keeps = true }, forget = "it keeps its tables",
    cut = { quit = "X\0\0\0\4", recall = "ON CONFLICT" },
  },
}

--- Makes the tables of leases on PostgreSQL, as `hierlock provision --leases` does, for all.
function postgresql.lease_tables(root)
  root:query((require("hierlock.command.lease_tables").postgresql("PUBLIC")))
end

-- A log-in costs a processor twice as much with TLS. So only those specs have it of which TLS is a part: PostgreSQL's own;
-- those that wait without blocking, as libpq may have read what its socket no longer shows; and those that look at how
-- long all takes on a connection as programs have it. Others come without, to the same server and by the same library.
local WITH_TLS = {}
for _, name in ipairs { "attach", "crowd", "hooks", "loop", "manager", "nginx", "pending", "security", "states", "stores", "with" } do
  WITH_TLS[name] = true
end

local function is_with_tls()
  for i = 1, #(arg or {}) do
    local name = arg[i]:match "([%w_]+)_spec%.lua$"
    if name and (WITH_TLS[name] or name:find "^postgresql") then return true end
  end
  return false
end

function postgresql.make(store)
  -- A server of the user's is come to as its DSN says.
  if store.control and not is_with_tls() then store.dsn = sql.with_param(store.bare_dsn, "sslmode=disable") end
  for _, name in ipairs { "hier_lock_leases", "hier_lock_lease_rows" } do
    store.silenced_by(("BEGIN; LOCK TABLE public.%s IN ACCESS EXCLUSIVE MODE"):format(name), "ROLLBACK")
  end
  -- As in mysql.lua.
  local SESSIONS = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
  function store.sessions(busy)
    return sql.column(store.sql():query(SESSIONS .. " AND usename = current_user" .. (busy and " AND state = 'active'" or "")))
  end
  function store.transactions(waiting)
    return sql.column(store.root():query(SESSIONS .. " AND usename = 'testuser'" ..
      (waiting and " AND wait_event_type = 'Lock'" or " AND xact_start IS NOT NULL")))
  end
  function store.kill(id) (store.root() or store.sql()):query("SELECT pg_terminate_backend(%s)", id) end
  -- `more`: so many more connections; else one.
  function store.limit_connections(more)
    local root = store.root()
    root:query("ALTER ROLE testuser CONNECTION LIMIT %d",
               root:query("SELECT COUNT(*) FROM pg_stat_activity WHERE usename = 'testuser'")[1][1] + (more or 1))
    return function() root:query "ALTER ROLE testuser CONNECTION LIMIT -1" end
  end
  function store.waiting()
    -- Waiters that have their locks and wait for a lease say so.
    return tonumber(store.sql():query("SELECT (SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted) + " ..
      "(SELECT COUNT(*) FROM pg_stat_activity WHERE query ~ '^/[*]hierlock1[|][0-9]+[|][0-9]+[|][sx]w[|]' AND NOT EXISTS " ..
      "(SELECT FROM pg_locks l WHERE l.pid = pg_stat_activity.pid AND NOT l.granted))")[1][1])
  end
  function store.prepare()
    if store.prepared then return end
    store.prepared = true
    if not store.root() then return end
    -- Leases of an earlier file would keep the gate open.
    store.root():query "DROP TABLE IF EXISTS public.hier_lock_leases, public.hier_lock_lease_rows"
    postgresql.lease_tables(store.root())
  end
end

return postgresql
