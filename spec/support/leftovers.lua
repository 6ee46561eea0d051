--- busted's helper (--helper): after each spec file nothing may be left of it. No connection or transaction at a
-- server, no descriptor, thread, child or mapping of this process. The helper waits for things that need a moment to
-- go.

local busted = require "busted"

-- busted asks for a traceback at each `it` that a file declares. Lua's own looks through all modules for the name of each
-- function, which takes longer than many a spec. This one names files and lines alone; specs have Lua's own.
local function traceback(_, level)
  local lines = { "\nstack traceback:" }
  repeat
    level = level + 1
    local info = debug.getinfo(level, "Sl")
    lines[#lines + 1] = info and ("\t%s:%d:"):format(info.short_src, info.currentline):gsub(":%-1:", ":")
  until not info
  return table.concat(lines, "\n")
end

local original = debug.traceback
local function use(fn) rawset(debug, "traceback", fn) end
use(traceback)
busted.subscribe({ "test", "start" }, function() use(original) end)
busted.subscribe({ "test", "end" }, function() use(traceback) end)

local before, since

-- Where memory runs out at any place, a manager stays sometimes, which was seen on a fresh machine
-- only, and is not understood yet.
local UNFINISHED = { ["spec/memory_spec.lua"] = true }

local function read(path)
  local file = io.open(path)
  local text = file and file:read("*a") or ""
  if file then file:close() end
  return text
end

-- The descriptors of this process: what each one leads to.
local function descriptors()
  local uv = require "luv"
  local found = {}
  local names = assert(uv.fs_scandir("/proc/self/fd"))
  for name in function() return uv.fs_scandir_next(names) end do
    found[name] = uv.fs_readlink("/proc/self/fd/" .. name) -- nil: that of scandir itself
  end
  return found
end

local function threads() return tonumber(read("/proc/self/status"):match("Threads:%s*(%d+)")) end

-- The library's own descriptors: files of lock directories, connections, and the signals that a pending is done.
-- Pipes and epoll belong to event loops, which keep them.
local function is_ours(name)
  return name:find("^socket:") or name:find("eventfd", 1, true)
    or name:find(package.loaded["spec.support"].stores[1].directory, 1, true)
end

-- Lists the leftovers at a server.
local function left_at(store)
  local support, found = package.loaded["spec.support"], {}
  local connected, root = pcall(support.sql_connection, store.root_dsn)
  if not connected then return { "it does not answer: " .. tostring(root) } end
  for what, query in pairs(root.postgresql and {
    connection = [[SELECT concat_ws(' ', pid, usename, state, left(query, 60)) FROM pg_stat_activity
      WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()]],
    lock = "SELECT concat_ws(' ', pid, mode, objid) FROM pg_locks WHERE locktype = 'advisory'",
  } or {
    connection = [[SELECT CONCAT_WS(' ', id, user, command, state, LEFT(info, 60)) FROM information_schema.processlist
      WHERE id <> CONNECTION_ID() AND user NOT IN ('event_scheduler', 'system user')]],
    transaction = [[SELECT CONCAT_WS(' ', trx_mysql_thread_id, trx_state, trx_rows_locked, 'rows', LEFT(trx_query, 60))
      FROM information_schema.innodb_trx WHERE trx_mysql_thread_id <> 0]],
  }) do
    for _, row in ipairs(root:query(query)) do found[#found + 1] = what .. " " .. row[1] end
  end
  root:close()
  return found
end

-- Lists all leftovers, a line each; "": nothing.
local function left()
  local support = package.loaded["spec.support"]
  local found = {}
  collectgarbage()
  collectgarbage()
  local loops = package.loaded["cqueues"] and 1 or 0 -- it opens an eventfd once, and keeps it
  for number, name in pairs(descriptors()) do
    local is_new = before.descriptors[number] ~= name
    if is_new and loops > 0 and name:find("eventfd", 1, true) then
      loops = loops - 1
    elseif is_new and is_ours(name) then
      found[#found + 1] = ("descriptor %s: %s, since %q"):format(number, name, since[number .. name] or "the end")
    end
  end
  local of_tools = os.getenv("TSAN_OPTIONS") and 1 or 0 -- ThreadSanitizer's own
  if threads() > before.threads + of_tools then
    found[#found + 1] = ("%d threads, %d before"):format(threads(), before.threads)
  end
  for line in read("/proc/self/maps"):gmatch("[^\n]+") do
    if line:find(support.stores[1].directory, 1, true) then found[#found + 1] = "mapping " .. line end
  end
  for pid in read("/proc/self/task/" .. require("luv").os_getpid() .. "/children"):gmatch("%d+") do
    found[#found + 1] = "child " .. pid .. ": " .. read("/proc/" .. pid .. "/cmdline"):gsub("%z", " ")
  end
  for _, store in ipairs(support.stores) do
    if store.root_dsn and store.prepared then
      for _, what in ipairs(left_at(store)) do found[#found + 1] = store.name .. ": " .. what end
    end
  end
  return table.concat(found, "\n")
end

busted.subscribe({ "file", "start" }, function()
  since = {}
  before = { descriptors = descriptors(), threads = threads() }
end)

-- So that the report can say whose it is.
busted.subscribe({ "test", "end" }, function(test)
  for number, name in pairs(descriptors()) do
    since[number .. name] = since[number .. name] or test.name
  end
end)

busted.subscribe({ "file", "end" }, function(file, parent)
  local support = package.loaded["spec.support"]
  if not support then return end
  support.close_peers()
  for _, store in ipairs(support.stores) do
    if store.close_connections then store.close_connections() end
  end
  -- LuaJIT may keep an unreachable object, and with it the things that a manager leaves to its last handle.
  if UNFINISHED[file.name] or jit then return end -- luacheck: ignore 113
  local patience, what = support.now() + support.DEADLINE, left()
  while what ~= "" and support.now() < patience do
    support.sleep(0.2) -- who asks more often is shown an old picture of transactions
    what = left()
  end
  if what ~= "" then
    busted.publish({ "error", "file" }, file, parent, "left behind:\n" .. what,
                   { short_src = file.name, currentline = 0, traceback = "" })
  end
end)

return true
