--- hierlock kill: ends what others hold, session locks and leases. The command lists the holders, asks, looks again,
-- and ends only the listed holders that are still there. Holders that came meanwhile stay.

local core = require "hierlock.core"
local uv = require "luv"
local ending = require "hierlock.command.ending"
local lookup = require "hierlock.command.lookup"
local ps = require "hierlock.command.ps"
local server = require "hierlock.command.server"
local subject_of = require "hierlock.command.examine.subject"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local waits = require "hierlock.command.waits"

local kill = {
  summary = "End session locks and leases of other programs.",
  description = "Ends the locks that block the target (on the node, above it and below it), the locks of an owner, or one session. " ..
    "Revokes leases; has the server end the connection of a session lock. The holder's next call reports the lock lost; its " ..
    "program goes on working until then. An embedded session lock belongs to a process, which gets a signal only with --signal.",
}

local NONE = 1 -- the exit status when nothing was ended
-- s for a holder to go, ms between two looks: MariaDB shows an old picture to those who look more often than every 100.
local PATIENCE, PAUSE = 5, 120
local SIGNALS = { HUP = true, INT = true, KILL = true, QUIT = true, TERM = true }
-- Error codes of MySQL and MariaDB; an SQLSTATE of PostgreSQL.
local NO_SUCH_THREAD, NOT_OWNER, ACCESS_DENIED = 1094, 1095, 1227
local INSUFFICIENT_PRIVILEGE = "42501"

function kill.options(parser)
  lookup.target_option(parser)
  parser:option("--owner", "Only leases of this owner, and session locks of this application."):argname "OWNER"
  parser:option("--session", "Only this session, as `hierlock ps` shows it, also while it waits."):argname "SESSION"
  parser:option("--signal", "On an embedded store: send HUP, INT, KILL, QUIT or TERM to the holding process."):argname "NAME"
  lookup.store_options(parser)
  ending.options(parser)
end

local function check(arguments)
  if not (arguments.target or arguments.owner or arguments.session) then
    return lookup.usage "TARGET, --owner or --session must say what to end"
  elseif arguments.owner == "" or arguments.session == "" then
    return lookup.usage "--owner and --session must not be empty"
  elseif arguments.signal and not SIGNALS[arguments.signal] then
    return lookup.usage "--signal must be HUP, INT, KILL, QUIT or TERM"
  end
  return ending.check(arguments)
end

-- ---------------------------------------------------------- which ones

-- Whether the arguments name it.
local function is_named(arguments, holder)
  if arguments.session then
    if holder.session ~= arguments.session or holder.kind == "lease" then return false end
  elseif holder.waiting then
    return false
  end
  return not arguments.owner or (holder.owner or holder.application) == arguments.owner
end

-- Lists the holders that the arguments name; also, as lookup.holders, the err that says why the list may be
-- incomplete; nil, err.
local function find(manager, arguments, target)
  local all, err = lookup.holders(manager, target)
  if not all then return nil, err end
  local found = {}
  for _, holder in ipairs(waits.find(manager, all)) do
    if is_named(arguments, holder) then found[#found + 1] = holder end
  end
  return found, err
end

-- Whether b is the same lock or lease as a, and not a later lock of the same session. A session known only by the
-- beginning of its transaction shows a row only while another session waits for it.
local function is_same(a, b)
  if a.id or b.id then return a.id == b.id end
  return waits.same_session(a, b) and a.since == b.since and (a.path == b.path or (a.since and not a.pid))
end

local function is_among(holder, list)
  for _, other in ipairs(list) do
    if is_same(holder, other) then return true end
  end
  return false
end

-- ------------------------------------------------------------ how it ends

local function refused(message, ...)
  return nil, { code = "privilege", message = message:format(...), retryable = false }
end

local function kill_on_mysql(connection, holder)
  local ok, err = connection:query(("KILL CONNECTION %s"):format(holder.session))
  if ok or err.errno == NO_SUCH_THREAD then return true end
  if err.errno == NOT_OWNER or err.errno == ACCESS_DENIED then
    return refused("session %s is of another user: to end it, this one needs the privilege CONNECTION_ADMIN (on MariaDB " ..
      "CONNECTION ADMIN); or be the user of that session (%s)", holder.session, err.message)
  end
  return nil, err
end

local function kill_on_postgresql(connection, holder)
  local ok, err = connection:query(("SELECT pg_terminate_backend(%s)"):format(holder.session))
  if ok then return true end
  if err.sqlstate == INSUFFICIENT_PRIVILEGE then
    return refused("session %s is of another role: to end it, this one must be a member of that role or of pg_signal_backend, " ..
      "and a superuser for a superuser's (%s)", holder.session, err.message)
  end
  return nil, err
end

local KILLS = { mysql = kill_on_mysql, postgresql = kill_on_postgresql }

-- Whether the process has a file of the store's directory open. The record alone proves nothing: another process may
-- have written it.
local function uses(pid, directory)
  local wanted = uv.fs_stat(directory)
  local list = wanted and uv.fs_scandir(("/proc/%d/fd"):format(pid))
  for name in function() return list and uv.fs_scandir_next(list) end do
    local link = uv.fs_readlink(("/proc/%d/fd/%s"):format(pid, name))
    local found = link and uv.fs_stat(link:match "^(/.*)/[^/]*$" or "/")
    if found and found.ino == wanted.ino and found.dev == wanted.dev then return true end
  end
  return false
end

local function advise(holder)
  return ("held by process %d on %s: end that, or say --signal TERM"):format(holder.pid or 0, text.safe(holder.host, true))
end

local function signal(wanted, holder, name)
  local pid = holder.pid or 0
  local directory = wanted.path or subject_of.own_directory { store = "file" }
  if holder.host ~= uv.os_gethostname() then
    return refused("%s is held by a process on %s, which is another machine or container: signal it there",
      text.safe(holder.path, true), text.safe(holder.host, true))
  elseif pid <= 1 or pid ~= math.floor(pid) or not uses(pid, directory) then
    return refused("process %.0f cannot be seen to use %s: only its user, or root, may signal it", pid, text.safe(directory, true))
  end
  local ok, err = uv.kill(pid, "sig" .. name:lower())
  if not ok then return refused("process %d cannot be signalled: %s; its user, or root, can", pid, err) end
  return true
end

-- Ends one, as far as it can be told at once; true; false, why it cannot; nil, err.
local function end_one(run, holder)
  local store = run.wanted.store
  if holder.kind == "lease" then
    local n, err = run.manager:revoke({ id = holder.id }, { by = run.by, reason = run.arguments.reason })
    return n and true or nil, err
  elseif KILLS[store] then
    if not tostring(holder.session):find "^%d+$" then return false, "its session cannot be told" end
    return KILLS[store](run.connection, holder)
  elseif store == "file" then
    if not run.arguments.signal then return false, advise(holder) end
    local ok, err = signal(run.wanted, holder, run.arguments.signal)
    if ok then run.signalled[holder.pid] = true end
    return ok, err
  end
  return false, "it waits for a lease, and ends by itself"
end

-- Until those have gone that were told to end, or PATIENCE is over. True; nil, err.
local function wait_for_end(run)
  local patience = uv.hrtime() / 1e9 + PATIENCE
  while true do
    local found, err = find(run.manager, run.arguments, run.target)
    if not found then return nil, err end
    local rest = {}
    for _, holder in ipairs(run.told) do table.insert(is_among(holder, found) and rest or run.ended, holder) end
    run.told = rest
    if #rest == 0 then return true end
    if uv.hrtime() / 1e9 > patience then break end
    uv.sleep(PAUSE)
  end
  for _, holder in ipairs(run.told) do table.insert(run.left, { holder, "it has been told to end, and has not yet" }) end
  return true
end

-- Connects for what the server is to end: before it is looked whether that is still there, as it may take a while.
local function connect(run, listed)
  for _, holder in ipairs(KILLS[run.wanted.store] and listed or {}) do
    if holder.kind ~= "lease" then
      local err
      run.connection, err = server.connect(run.wanted, "kill", server.ANSWER)
      return run.connection ~= nil, err
    end
  end
  return true
end

-- Whether it ends with another that has been told to: one of its session, or of its process.
local function is_told(run, holder)
  if holder.kind == "lease" then return false end
  for _, other in ipairs(run.told) do
    if waits.same_session(holder, other) or (run.signalled[holder.pid] and holder.pid == other.pid and holder.host == other.host) then
      return true
    end
  end
  return false
end

-- Ends each, looking again now and then, as telling many takes its time;
-- into run.ended, run.gone and run.left, the last with why. True; nil, err when it could not go on.
local function end_each(run, listed, watch)
  local ok, err = connect(run, listed)
  if not ok then return nil, err end
  local now, failed
  local looked = -math.huge
  for _, holder in ipairs(listed) do
    if watch.look() then break end
    if uv.hrtime() / 1e6 - looked > PAUSE then
      now, err = find(run.manager, run.arguments, run.target)
      if not now then
        failed = err
        break
      end
      looked = uv.hrtime() / 1e6
    end
    if is_told(run, holder) then
      table.insert(run.told, holder)
    elseif is_among(holder, now) then
      local told, why = end_one(run, holder)
      if told == nil then
        failed = why
        break
      end
      if told then table.insert(run.told, holder) else table.insert(run.left, { holder, why }) end
    else
      table.insert(run.gone, holder)
    end
  end
  ok, err = wait_for_end(run)
  if failed or not ok then return nil, failed or err end
  return true
end

-- ------------------------------------------------------------- the report

local function report(run)
  local lines = {}
  if #run.gone > 0 then
    lines[1] = ("%s had ended by then, %s:\n%s"):format(text.count(#run.gone, "lock"), ending.whose(run.gone, waits.name),
      ps.listing:for_output(run.gone))
  end
  for _, left in ipairs(run.left) do
    lines[#lines + 1] = ("%s of %s not ended: %s\n"):format(text.safe(left[1].path, true), text.safe(waits.name(left[1]), true), left[2])
  end
  lines[#lines + 1] = #run.ended == 0 and "no lock ended\n" or
    ("%s ended, %s\n"):format(text.count(#run.ended, "lock"), ending.whose(run.ended, waits.name))
  return terminal.write(table.concat(lines))
end

local function finish(run, listed, watch)
  local ok, err = terminal.write(ps.listing:for_output(listed))
  if not ok then return nil, err end
  local question = #listed == 1 and "End this lock?" or ("End these %d locks?"):format(#listed)
  if not run.arguments.yes and not terminal.confirms(question, watch) then
    if watch.hit then error("interrupted!", 0) end
    terminal.write "no lock ended\n"
    return NONE
  end
  local done, failed = end_each(run, listed, watch)
  ok, err = report(run)
  if not done or not ok then return nil, failed or err end
  if watch.hit then error("interrupted!", 0) end
  return #run.ended > 0 and 0 or NONE
end

function kill.run(arguments)
  local target, listed, ok, err
  ok, err = check(arguments)
  if not ok then return nil, err end
  if arguments.target then
    target, err = lookup.target(arguments.target)
    if not target then return nil, err end
  end
  local manager, wanted = lookup.open(arguments, "kill")
  if not manager then return nil, wanted end
  wanted.path = (core.dsn(arguments.dsn) or {}).path
  listed, err = find(manager, arguments, target)
  if not listed then return nil, err end
  if #listed == 0 and err then return nil, err end
  if #listed == 0 then
    ok, err = terminal.write "no lock ended: there was none\n"
    return ok and NONE, err
  end
  local run = { manager = manager, wanted = wanted, arguments = arguments, target = target,
                by = arguments.by or ending.operator(), signalled = {}, told = {}, ended = {}, gone = {}, left = {} }
  local watch = terminal.interruptions()
  local ran, status, failure = pcall(finish, run, listed, watch)
  watch.close()
  if not ran then error(status, 0) end
  -- A session that was named is seen as a whole; what else holds the target, or is the owner's, may not be.
  if status == 0 and err and not arguments.session then return nil, err end
  return status, failure
end

return kill
