--- The SQL that `hierlock provision --leases` runs on PostgreSQL: the tables of leases and their gate, as
-- sql/postgresql_leases.sql has them.

local server = require "hierlock.command.server"
local terminal = require "hierlock.command.terminal"

local leases = {}

local GRANTS = [[
GRANT SELECT, INSERT, UPDATE, DELETE ON public.hier_lock_leases, public.hier_lock_lease_rows TO %s;
GRANT SELECT, UPDATE ON SEQUENCE public.hier_lock_gate TO %s;
]]

--- The SQL; role: who may use leases, as SQL names it, or nil.
function leases.postgresql(role)
  local grants = role and GRANTS:format(role, role) or ""
  return (require("hierlock.store.postgresql").sql:gsub("\nCOMMIT;.*", function() return "\n" .. grants .. "COMMIT" end))
end

--- hierlock provision --leases, on PostgreSQL: an exit status; nil, err.
function leases.provision(wanted, arguments)
  local role = arguments.grant_to
  if role and role ~= "PUBLIC" then role = '"' .. role:gsub('"', '""') .. '"' end
  local sql = leases.postgresql(role)
  local ok, err
  if arguments.dry_run then
    ok, err = terminal.write(sql, ";\n")
    return ok and 0, err
  end
  local connection
  connection, err = server.connect(wanted, "provision")
  if not connection then return nil, err end
  local rows
  rows, err = connection:query(sql)
  connection:close()
  if not rows then return nil, err end
  ok, err = terminal.write(("postgresql: %s has tables for leases%s\n"):format(wanted.where,
    role and (", which %s may use"):format(arguments.grant_to) or ""))
  return ok and 0, err
end

local LOOK = [[
SELECT to_regclass('public.' || name) IS NOT NULL, CASE WHEN to_regclass('public.' || name) IS NULL THEN NULL
  WHEN name = 'hier_lock_gate' THEN has_sequence_privilege(to_regclass('public.' || name), 'SELECT')
  ELSE has_table_privilege(to_regclass('public.' || name), 'SELECT') AND has_table_privilege(to_regclass('public.' || name), 'UPDATE')
    AND has_table_privilege(to_regclass('public.' || name), 'DELETE') END, name
FROM unnest(ARRAY['hier_lock_leases', 'hier_lock_lease_rows', 'hier_lock_gate']) name]]

--- hierlock verify, on PostgreSQL: says what there is, by say(line); whether it is as it should be; nil, err.
function leases.verify(wanted, say)
  local connection, err = server.connect(wanted, "verify", server.COUNT)
  if not connection then return nil, err end
  local rows
  rows, err = connection:query(LOOK)
  connection:close()
  if not rows then return nil, err end
  local there, usable = 0, 0
  for _, row in ipairs(rows) do
    if row[1] == "t" then there = there + 1 end
    if row[2] == "t" then usable = usable + 1 end
  end
  if there == 0 then
    say "postgresql: no tables for leases; to make them: hierlock provision --leases"
  elseif there < #rows then
    say "postgresql: some of the tables for leases are missing; to mend it: hierlock provision --leases"
  elseif usable < there then
    say "postgresql: there are leases, and this role may not see them; hierlock provision --leases --grant-to ROLE"
  else
    say "postgresql: it has tables for leases"
  end
  return there == 0 or usable == #rows
end

return leases
