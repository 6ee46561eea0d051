--- Shared by the specs: the stores that they run on, peers that hold or await locks in other processes and threads,
-- and waiting for conditions.
--
-- Stores come from the environment, as spec/support/servers.sh sets it; MYSQL_DSN
-- names a server of the user's instead. A store that cannot be had is reported
-- as pending, with the reason; where HIERLOCK_REQUIRE names it, that is a failure.

local uv = require "luv"
local hierlock = require "hierlock"

local support = {}

-- For showing that something *stays* blocked, where nothing can be looked at.
support.STAYS_BLOCKED = 0.15
-- For what must happen, on a busy machine; nothing waits for as long as this.
support.DEADLINE = 20

function support.now() return uv.hrtime() / 1e9 end
-- luv takes a negative time for weeks.
function support.sleep(seconds) uv.sleep(math.max(math.floor(seconds * 1000 + 0.5), 0)) end

--- Collects all that the program cannot reach any more. Compiled code of LuaJIT goes first: a loop that was compiled
-- for one function keeps that function, and its upvalues.
function support.collect()
  local jit = rawget(_G, "jit")
  if jit then jit.flush() end
  for _ = 1, 3 do collectgarbage() end
end

--- Waits until condition() is true, and returns its result; fails after so many seconds, or DEADLINE.
function support.wait_until(condition, what, patience)
  local deadline, pause = support.now() + (patience or support.DEADLINE), 0.002
  repeat
    local result = condition()
    if result then return result end
    support.sleep(pause)
    pause = math.min(pause * 1.2, 0.01) -- looking costs a server something
  until support.now() > deadline
  error("gave up waiting for " .. (what or "a condition"), 2)
end

--- Runs luv's loop until condition() is true, which only the loop's events make true: asleep between them. false: it is
-- not so after these seconds.
function support.run_until(seconds, condition)
  local deadline = support.now() + seconds
  uv.run "nowait"
  if condition() then return true end
  local timer = uv.new_timer()
  uv.update_time()
  timer:start(math.max(math.ceil(seconds * 1000), 0), 10, function() end)
  local done
  repeat
    uv.run "once"
    done = condition()
  until done or support.now() >= deadline
  timer:close()
  uv.run "nowait"
  return done
end

--- Tries until the failure names all who were in the way, and returns that failure. A store has 50 ms to tell, which a
-- busy one exceeds; it may have named some by then. try(): returns nil and the failure.
function support.told(try)
  return support.wait_until(function()
    local handle, failure = try()
    assert(handle == nil, "nothing was in the way")
    return failure.holders and #failure.holders > 0 and not failure.holders_unknown and failure
  end, "holders in the error")
end

-- How many tries, and for how long, a wait has to end in time, see ends_in_time.
local TRIES, PATIENCE = 40, 30

--- Fails unless a try ends so many seconds after its time, at most. The machine may be busy, so the best try counts,
-- less the best lateness of the mere sleeps beside them. Fails at once when a single try ends early: that has no
-- excuse. wait(seconds): waits without success, checks how the wait ended, and returns how long it took. store:
-- where the time runs, on a server or here.
function support.ends_in_time(store, seconds, late, wait)
  local control = support.process(nil)
  control:call("handles.sql = ... and support.sql_connection(...)", store.bare_dsn)
  local patience = support.now() + PATIENCE
  local best, machine, tries = math.huge, math.huge, 0
  repeat
    control:start([[
      local seconds = ...
      local start = support.now()
      if handles.sql then
        handles.sql:query(handles.sql.postgresql and "SELECT pg_sleep(%.6f)" or "SELECT SLEEP(%.6f)", seconds)
      else
        support.sleep(seconds)
      end
      return support.now() - start - seconds
    ]], seconds)
    local elapsed = wait(seconds)
    assert(elapsed >= seconds, ("%.6f s is too early"):format(elapsed))
    best = math.min(best, elapsed - seconds)
    machine = math.min(machine, math.max(control:result(), 0))
    tries = tries + 1
    if best <= late + machine then return control:close() end
  until tries == TRIES or support.now() > patience
  error(("%.6f s is too late, the best of %d tries; the machine itself was %.6f s late"):format(
    best, tries, machine), 2)
end

-- ---------------------------------------------------------------- stores

-- A store is a file of spec/support/stores, whose name is the store's. The file returns a table:
--
--   server           it is a server of those that spec/support/servers.sh starts
--   leases_only      it has no session locks
--   example          it is no store of hierlock's: only the specs that ask for it run on it
--   asked            of a store's other kind: only the specs that ask for it run on it (on_NAME, and each_store)
--   subtrees         a shared lock on an inner node shares what is below it
--   table            it has buckets in a table of this name: MySQL's kind
--   unbucketed       no two nodes are one row, or one number, by chance
--   whole_seconds    its leases last whole seconds
--   lists_by_root    it lists those who hold nodes of one root
--   dialect          how it is spoken to: mysql and mariadb (known when a spec has prepared the store), postgresql
--   themes           of server_spec.lua, by their names: why the store has it not, or true, or what the theme needs:
--     restart        keeps: leases are there afterwards
--     forget         empty(store): has the server forget all
--     cut            quit: what a client says last; recall: words of what takes a grant back that was not answered;
--                    resumes: such a grant is found again by who asked for it
--   make(store, support)
--
-- What a spec is given as `store` has all of these, and `name`, and what make adds where it is not as usual:
--
--   dsn, options     what specs open managers with
--   missing          why it cannot be had here
--   prepare()        before the first spec of a file
--   waiting(target)  how many requests wait, for that target at least
--   directory        where its files are
--   sessions(busy), transactions(waiting), kill(id), limit_connections()
--                    of those with sessions: mysql.lua has each with its meaning
--
--   silences         ways to make it silent: { title, silence(), speak() }; `leases`: only those who use leases hear nothing
--
-- A server has also bare_dsn, root_dsn, control, sql(), root(), close_connections(), command(verb), stop(),
-- continue() and silenced_by(lock, unlock): see below.

-- For acquisitions without a time-out of their own: less than DEADLINE, so that a peer whose wait fails says so.
local TIMEOUT = 15

local sql = require "spec.support.sql"

for _, name in ipairs { "column", "luasql", "luasql_postgresql", "sql_connection" } do support[name] = sql[name] end

-- Further fields of a server's store.
local function add_server(store, dsn, root_dsn, control)
  store.bare_dsn, store.dsn, store.root_dsn, store.control = dsn, dsn, root_dsn, control
  --- For looking, and for a table of the spec's own; as the tests' user.
  function store.sql()
    if not store.connection then store.connection = sql.sql_connection(dsn) end
    return store.connection
  end
  --- For what only an administrator may do; nil on a server of the user's.
  function store.root()
    if root_dsn and not store.root_connection then
      store.root_connection = sql.sql_connection(root_dsn)
    end
    return store.root_connection
  end
  function store.close_connections()
    if store.connection then store.connection:close() end
    if store.root_connection then store.root_connection:close() end
    store.connection, store.root_connection = nil, nil
  end
  --- stop, start, restart, kill; a server that is started gets the options, too,
  -- words without spaces, and a library for LD_PRELOAD.
  function store.command(verb, options, preload)
    store.close_connections() -- before: MySQL gives connections two seconds to end by themselves
    -- A sanitizer is preloaded for us, and not for the server.
    local ok = os.execute(("LD_PRELOAD='%s' HIERLOCK_SERVER_OPTIONS='%s' %s %s >/dev/null 2>&1"):format(
      preload or "", options or "", control, verb))
    assert(ok == true or ok == 0, "the server did not " .. verb)
  end
  --- Has these statements of an administrator's make the store silent for leases, and let it speak again.
  function store.silenced_by(lock, unlock)
    if not root_dsn then return end
    table.insert(store.silences, {
      title = "an administrator has said " .. lock, leases = true,
      silence = function() store.root():query(lock) end, speak = function() store.root():query(unlock) end,
    })
  end
  -- All processes of the server: PostgreSQL has one for each session; the first, stopped, makes no more.
  local function processes()
    local pipe = io.popen(control .. " pid")
    local list = { tonumber(pipe:read "*l") }
    pipe:close()
    for name in uv.fs_scandir_next, assert(uv.fs_scandir "/proc") do
      local file = name:find "^%d+$" and io.open("/proc/" .. name .. "/stat")
      local stat = file and file:read "*a" -- nil: the process has ended
      if file then file:close() end
      if tonumber(stat and stat:match "%) %S (%d+)") == list[1] then list[#list + 1] = tonumber(name) end
    end
    return list
  end
  -- A thread that runs stops when it enters the kernel, not when the signal is sent.
  local function is_stopped(pid)
    for task in uv.fs_scandir_next, assert(uv.fs_scandir("/proc/" .. pid .. "/task")) do
      local file = io.open(("/proc/%d/task/%s/stat"):format(pid, task))
      local state = file and file:read "*a" or ") T"
      if file then file:close() end
      if not state:match "%) [TXZ]" then return false end
    end
    return true
  end
  --- Stops the server's processes, which answer nothing until store.continue().
  function store.stop()
    local list = processes()
    for _, pid in ipairs(list) do uv.kill(pid, "sigstop") end
    for _, pid in ipairs(list) do support.wait_until(function() return is_stopped(pid) end, "a stopped server") end
  end
  function store.continue()
    for _, pid in ipairs(processes()) do uv.kill(pid, "sigcont") end
  end
  if not control then return end
  table.insert(store.silences, { title = "its server is stopped", silence = store.stop, speak = store.continue })
end

-- How many of the requests at the target that the observer sees wait.
local function waiters(observer, target)
  local n = 0
  for _, holder in ipairs(assert(observer:holders(target))) do
    if holder.waiting then n = n + 1 end
  end
  return n
end

--- How many requests wait for the target on the store.
function support.waiting(store, target)
  local observer = support.open(store)
  local n = waiters(observer, target)
  observer:close()
  return n
end

--- Has the store count who waits with a manager that stays open until close_peers.
function support.observed(store)
  function store.waiting(target)
    store.observer = store.observer or support.open(store)
    return waiters(store.observer, target)
  end
end

local modules = {}

-- dsn, root_dsn, control: of a server that was started.
local function new_store(name, dsn, root_dsn, control)
  local store = { name = name, options = { timeout = TIMEOUT }, silences = {} }
  for field, value in pairs(modules[name]) do
    if type(value) ~= "function" then store[field] = value end
  end
  if store.server and not dsn then
    store.missing = name .. " cannot be had here: no server was started (see spec/support/servers.sh) and MYSQL_DSN is not set"
    return store
  end
  if store.server then
    store.options.buckets = 10000
    add_server(store, dsn, root_dsn, control)
  end
  function store.prepare() end
  function store.waiting(target) return support.waiting(store, target) end
  modules[name].make(store, support)
  return store
end

-- MySQL or MariaDB: specs for one of them go by the name.
local function server_of_the_user(dsn)
  -- Makes a URL of a DSN in any form: some specs change its parts.
  local function encoded(text)
    return (text:gsub("[^%w_.~-]", function(c) return ("%%%02X"):format(c:byte()) end))
  end
  local database, user, password, host, port = sql.dsn_parts(dsn)
  local connection = sql.sql_connection(dsn)
  local name = connection:query("SELECT VERSION()")[1][1]:find("MariaDB") and "mariadb" or "mysql"
  connection:close()
  return new_store(name, ("%s://%s:%s@%s:%d/%s"):format(
    name, encoded(user), encoded(password), host, port, encoded(database)))
end
--- What busted gives to the spec file that has declared fn: describe, it ..., which are its environment alone.
function support.environment_of(fn)
  if getfenv then return getfenv(fn) end -- luacheck: ignore
  for i = 1, 255 do
    local name, value = debug.getupvalue(fn, i)
    if name == "_ENV" then return value end
  end
end

local function unless_missing(busted, missing, name, fn)
  if not missing then return fn() end
  local required = " " .. (os.getenv("HIERLOCK_REQUIRE") or "") .. " "
  if required:find(" " .. name .. " ", 1, true) then
    busted.it("is there", function() error(missing) end)
  else
    busted.pending(missing)
  end
end

--- Calls fn, which declares specs that need something of this machine. missing: why it cannot be had, or nil; then they
-- are pending, or fail where HIERLOCK_REQUIRE has that name.
function support.unless_missing(missing, name, fn) unless_missing(support.environment_of(fn), missing, name, fn) end

local function each(stores, fn, busted)
  busted = busted or support.environment_of(fn)
  for _, store in ipairs(stores) do
    busted.describe("on " .. store.name .. ":", function()
      unless_missing(busted, store.missing, store.name, function()
        busted.setup(store.prepare)
        fn(store)
      end)
    end)
  end
end

--- Calls fn(store) within a `describe` for every store; the embedded one last, as it keeps
-- many descriptors open, and LuaSocket's select takes none above 1,023. asked: on the `asked` store of that name, too.
function support.each_store(fn, asked)
  local stores = {}
  for i = 2, #support.stores do stores[i - 1] = support.stores[i] end
  stores[#stores + 1] = support.stores[1]
  for _, store in ipairs(support.asked) do
    if store.name == asked then stores[#stores + 1] = store end
  end
  each(stores, fn)
end

--- Like each_store, for every store that has leases, or might have, including stores that have nothing else. examples:
--- on those, too; asked: as for each_store.
function support.each_leasing_store(fn, examples, asked)
  if examples then each(support.examples, fn) end
  each(support.leases_only, fn)
  support.each_store(fn, asked)
end

--- Like each_leasing_store, for those that have themes of server_spec.lua.
function support.each_troubled_store(fn)
  for _, stores in ipairs { support.leases_only, support.stores } do
    for _, store in ipairs(stores) do
      if store.themes then each({ store }, fn) end
    end
  end
end

local function servers(wanted)
  local list = {}
  for _, store in ipairs(support.stores) do
    if store.server and wanted(store) then list[#list + 1] = store end
  end
  return list
end

--- Runs fn on each server of MySQL's kind only.
function support.each_server(fn) each(servers(function(store) return store.table end), fn) end

--- On each server with session locks. busted: the environment of the spec file, where fn is no function of that.
function support.each_connection(fn, busted) each(servers(function() return true end), fn, busted) end

--- Waits until n requests (1 unless said) wait for rows of the target.
function support.wait_for_waiters(store, target, n)
  return support.wait_until(function() return store.waiting(target) >= (n or 1) end, "a waiter")
end

--- Opens a manager on the store; its options, with others added.
function support.open(store, options, dsn_params)
  local all = {}
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local dsn = dsn_params and sql.with_param(store.dsn, dsn_params) or store.dsn
  return assert(hierlock.open(dsn, all))
end

-- ----------------------------------------------------------------- peers

--- A value as Lua source, on one line.
local function encode(value)
  if type(value) == "table" then
    local fields = {}
    for k, v in pairs(value) do
      fields[#fields + 1] = "[" .. encode(k) .. "]=" .. encode(v)
    end
    return "{" .. table.concat(fields, ",") .. "}"
  elseif type(value) == "string" then
    return (("%q"):format(value):gsub("\\\n", "\\n"):gsub("\r", "\\r"):gsub("%z", "\\0"))
  elseif value == math.huge then
    return "math.huge"
  end
  return tostring(value)
end
support.encode = encode

local function encode_all(...)
  local values = { "n=" .. select("#", ...) }
  for i = 1, select("#", ...) do
    values[#values + 1] = "[" .. i .. "]=" .. encode((select(i, ...)))
  end
  return "{" .. table.concat(values, ",") .. "}"
end

local unpack = table.unpack or unpack

local function decode_all(line)
  local values = assert((loadstring or load)("return " .. line))()
  return unpack(values, 1, values.n)
end

-- The environment of a peer's chunks: `manager`, `hierlock`, `support` and a table `handles` to keep things in.
local function environment_for(dsn, options)
  return setmetatable({
    hierlock = hierlock,
    support = support,
    manager = dsn and assert(hierlock.open(dsn, options)),
    handles = {},
  }, { __index = _G })
end

local function load_chunk(text, environment)
  if not setfenv then return load(text, "=peer", "t", environment) end -- luacheck: ignore
  local chunk, err = loadstring(text, "=peer") -- luacheck: ignore
  if chunk then setfenv(chunk, environment) end -- luacheck: ignore
  return chunk, err
end

--- The work of a peer, in its own process or thread: reads requests, each a chunk and its arguments, and writes the
-- chunk's results.
function support.serve(read_line, write_line, dsn, options)
  local environment = environment_for(dsn, options)
  for line in read_line do
    local request = (loadstring or load)("return " .. line)()
    local chunk, err = load_chunk(request[1], environment)
    if chunk then
      write_line(encode_all(pcall(chunk, unpack(request, 2, request.n))))
    else
      write_line(encode_all(false, err))
    end
  end
  if environment.manager then environment.manager:close() end
end

local peer_methods = {}
peer_methods.__index = peer_methods

-- Calls whose result has not come yet.
peer_methods.unanswered = 0

--- No more calls come. Only a process can be told before it is closed.
function peer_methods.finish() end

--- Sends a chunk to be run with the arguments; does not wait.
function peer_methods:start(chunk, ...)
  self.unanswered = self.unanswered + 1
  self:write(encode_all(chunk, ...))
  return self
end

local function checked(ok, ...)
  if ok then return ... end
  local err = ...
  error("in the peer: " .. tostring(type(err) == "table" and err.message or err), 0)
end

--- Waits for the results of the last chunk; raises its error.
function peer_methods:result()
  return checked(decode_all(self:read(support.DEADLINE) or error("the peer does not answer", 2)))
end

--- Whether the last chunk has not returned, also after STAYS_BLOCKED.
function peer_methods:stays_blocked()
  self.line = self.line or self:read(support.STAYS_BLOCKED)
  return self.line == nil
end

function peer_methods:call(chunk, ...) return self:start(chunk, ...):result() end

--- Starts to acquire under the name; the result is true, or nil and the code.
function peer_methods:acquire(name, method, ...)
  return self:start([[
    local name, method = ...
    local handle, err = manager[method](manager, select(3, ...))
    handles[name] = handle
    if not handle then return nil, err.code, err.message end
    return true, handle.token, handle.waited
  ]], name, method, ...)
end

function peer_methods:release(name)
  return self:call([[ local h = handles[...]; handles[...] = nil; return h:release { confirm = true } ]], name)
end

local live = {}

local kept = {}
--- A handle that the spec does not look at again: until close_peers the collector
-- leaves it alone, which would release it.
function support.keep(handle)
  kept[#kept + 1] = handle
  return handle
end

-- Takes one line out of self.buffer.
local function take_line(self)
  local line, rest = self.buffer:match("^([^\n]*)\n(.*)$")
  if line then self.buffer = rest end
  return line
end

--- Starts a peer in another process. command: a list to run instead of our own peer; it is not waited for.
function support.process(store, options, dsn, command)
  local self = setmetatable({ buffer = "", exited = false, unanswered = (store or dsn) and 1 or 0 }, peer_methods)
  local all = {}
  for k, v in pairs(store and store.options or {}) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local input, output = uv.new_pipe(false), uv.new_pipe(false)
  local interpreter = os.getenv("HIERLOCK_LUA") or arg[-1] or "lua"
  local run = command or { interpreter, "spec/support/peer.lua", dsn or store and store.dsn or "", encode(all) }
  self.handle, self.pid = assert(uv.spawn(run[1], {
    args = { unpack(run, 2) },
    stdio = { input, output, 2 },
  }, function() self.exited = true end))
  output:read_start(function(_, data)
    if not data then return end
    self.buffer = self.buffer .. data
    self.unanswered = self.unanswered - select(2, data:gsub("\n", ""))
  end)

  function self:write(line) input:write(line .. "\n") end
  function self:read(seconds)
    if self.line then
      local line = self.line
      self.line = nil
      return line
    end
    local line = take_line(self)
    if not line then
      support.run_until(seconds, function()
        line = take_line(self)
        return line or self.exited and self.buffer == ""
      end)
    end
    return line
  end
  --- Sends a signal ("sigkill", "sigstop" ...); waits for the end after sigkill.
  function self:signal(signal)
    uv.kill(self.pid, signal)
    if signal == "sigkill" then self:join() end
  end
  function self:join()
    if not support.run_until(support.DEADLINE, function() return self.exited end) then
      error("gave up waiting for the peer's end", 2)
    end
  end
  function self:finish()
    if not input:is_closing() then input:close() end
  end
  --- Ends the peer in the ordinary way; a peer that still waits for a lock is killed.
  function self:close()
    live[self] = nil
    self:finish()
    local function ended() return self.exited end
    if not support.run_until(self.unanswered > 0 and 0.2 or 2, ended) then self:signal("sigkill") end
    -- luv crashes at the end of a state that has open handles.
    if not output:is_closing() then output:close() end
    if not self.handle:is_closing() then self.handle:close() end
    uv.run("nowait")
  end
  live[self] = true
  if store or dsn then assert(self:result() == true) end
  return self
end

--- A program that knows nothing of hierlock: a process with a connection of LuaSQL's. send(query) does not wait;
-- result() is then the rows (or the number of rows), or nil, the server's error number and its message. query(...)
-- does both. `id` is the connection's.
function support.foreign(store)
  local self = support.process(nil)
  function self:send(query, ...)
    if select("#", ...) > 0 then query = query:format(...) end
    return self:start("return support.try_query(handles.sql, ...)", query)
  end
  function self:query(...) return self:send(...):result() end
  self.id = self:call([[
    handles.sql = support.sql_connection(...)
    return tonumber(handles.sql:query(handles.sql.postgresql and "SELECT pg_backend_pid()" or "SELECT CONNECTION_ID()")[1][1])
  ]], store.bare_dsn)
  return self
end

--- Runs a query as a foreign program does: rows, or nil, number, message.
function support.try_query(connection, query)
  local cursor, message = connection:try(query)
  if not cursor then
    local shown = not connection.postgresql and connection:try("SHOW ERRORS")
    local row = shown and shown:fetch({}, "n")
    if shown then shown:close() end
    return nil, row and tonumber(row[2]), message
  end
  if type(cursor) == "number" then return cursor end
  local rows = {}
  for row in function() return cursor:fetch({}, "n") end do rows[#rows + 1] = row end
  cursor:close()
  return rows
end

--- A peer in another thread of this process, with a Lua state of its own.
function support.thread(store, options)
  local self = setmetatable({}, peer_methods)
  local all = {}
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local thread, connection = require("cqueues.thread").start(function(socket, path, cpath, dsn, encoded)
    package.path, package.cpath = path, cpath
    local shared = require "spec.support"
    local opened, err = pcall(shared.serve, function() return socket:read("*l") end,
      function(line) socket:write(line, "\n") socket:flush() end,
      dsn, (loadstring or load)("return " .. encoded)())
    if not opened then socket:write("{n=2,false,", ("%q"):format(tostring(err)), "}\n") end
  end, package.path, package.cpath, store.dsn, encode(all))
  connection:setmode("b", "bl")
  function self:write(line)
    connection:write(line, "\n")
    connection:flush()
  end
  function self:read(seconds)
    if self.line then
      local line = self.line
      self.line = nil
      return line
    end
    connection:settimeout(seconds)
    local line = connection:read("*l")
    if not line then connection:clearerr() end
    return line
  end
  function self:close()
    live[self] = nil
    connection:shutdown("w")
    thread:join()
    connection:close()
  end
  live[self] = true
  assert(self:call("return true"))
  return self
end

--- A peer in this thread, with a manager of its own: each of its chunks runs in a
-- coroutine of the loop (a name of spec/support/loops.lua), and yields where it waits.
function support.coroutine(store, options, name)
  local self = setmetatable({}, peer_methods)
  local loop = require("spec.support.loops")[name]()
  local all = { loop = loop.option }
  for k, v in pairs(store.options) do all[k] = v end
  for k, v in pairs(options or {}) do all[k] = v end
  local environment = environment_for(store.dsn, all)
  self.step = loop.step
  function self:start(text, ...)
    local chunk = assert(load_chunk(text, environment))
    -- Copied, as they are for the other peers.
    loop.spawn(function(...) self.line = encode_all(true, chunk(...)) end, decode_all(encode_all(...)))
    return self
  end
  function self:read(seconds)
    local deadline = support.now() + seconds
    while not self.line and support.now() < deadline do
      for peer in pairs(live) do -- it may be waiting for another one of them
        if peer.step then peer.step(0.001) end
      end
    end
    local line = self.line
    self.line = nil
    return line
  end
  function self:close()
    live[self] = nil
    environment.manager:close()
    loop.close()
  end
  live[self] = true
  return self
end

--- Runs a chunk in a Lua process of its own; returns its output, on both streams, and its exit status as a shell says
-- it (128 + n: ended by signal n). before: shell commands and words in front of the interpreter's name.
function support.run(chunk, before)
  local pipe = assert(io.popen(("{ %s %s -e '%s' ; } 2>&1; echo \"=$?\""):format(
    before or "", os.getenv("HIERLOCK_LUA") or "lua", (chunk:gsub("'", [['\'']])))))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.*)=(%d+)\n$")
  return output, tonumber(status)
end

--- The library made of spec/support/NAME.c, for LD_PRELOAD.
function support.library(name)
  return package.cpath:match "([^;]*/build/[^;]*)/%?%.so" .. "/hierlock_spec/" .. name .. ".so"
end

--- For support.process: the command of a peer that has that library of spec/support loaded before all others, after
--- these commands of the shell.
function support.preloaded(name, before)
  return { "/bin/sh", "-c", ([[%s
    export LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}%s"
    exec "$0" spec/support/peer.lua "" "{}"]]):format(before or "", support.library(name)), os.getenv "HIERLOCK_LUA" or arg[-1] }
end

local tells
--- Why this client library cannot do what wants to know when it waits; nil: it can.
function support.does_not_tell_waits()
  tells = tells or support.run [[
    require "hierlock.store.mysql"
    io.write(io.open("/proc/self/maps"):read("*a"):match("libmysqlclient") or "")
  ]]
  return tells ~= "" and "libmysqlclient does not tell when it waits" or nil
end

--- `it` of what needs a client library that tells when it waits; elsewhere it is pending, and says why.
function support.it_where_waits_are_told(name, fn)
  local busted, reason = support.environment_of(fn), support.does_not_tell_waits()
  if reason then busted.pending(name .. ": " .. reason) else busted.it(name, fn) end
end

--- Ends the peers, and forgets the handles, that a spec has left; for after_each.
function support.close_peers()
  kept = {}
  -- All at once: a peer that waits for another's lock ends as soon as that one has.
  for peer in pairs(live) do peer:finish() end
  for peer in pairs(live) do peer:close() end
  -- The embedded store's descriptors go with its last manager.
  for _, stores in ipairs { support.stores, support.leases_only, support.examples, support.asked } do
    for _, store in ipairs(stores) do
      if store.observer then store.observer:close() end
      store.observer = nil
    end
  end
end

-- What the modules of the stores and of the loops give.
local function complete()
  local names = {}
  for file in uv.fs_scandir_next, assert(uv.fs_scandir "spec/support/stores") do
    local name = file:match "^(.*)%.lua$"
    names[#names + 1] = name
    modules[name] = name and require("spec.support.stores." .. name)
  end
  table.sort(names)

  for name, fn in pairs(modules.mysql) do
    if type(fn) == "function" and name ~= "make" then support[name] = fn end
  end
  support.lease_tables = modules.postgresql.lease_tables

  --- Every store with session locks, the embedded one first; those that only have leases; and those that are examples.
  support.stores, support.leases_only, support.examples, support.asked = { new_store "embedded" }, {}, {}, {}
  local mine = os.getenv "MYSQL_DSN"
  if mine then support.stores[2] = server_of_the_user(mine) end
  for _, name in ipairs(names) do
    local module, prefix = modules[name], "HIERLOCK_" .. name:upper()
    local dsn = os.getenv(prefix .. "_DSN")
    -- Beside the user's own server, only those that are there.
    if name ~= "embedded" and not (mine and module.server and (module.table or not dsn)) then
      local list = module.example and support.examples or module.leases_only and support.leases_only
        or module.asked and support.asked or support.stores
      list[#list + 1] = new_store(name, dsn, os.getenv(prefix .. "_ROOT_DSN"), os.getenv(prefix .. "_CONTROL"))
    end
  end

  --- For one store only: on_sqlite, on_redis ….
  for _, name in ipairs(names) do
    support["on_" .. name] = function(fn)
      for _, stores in ipairs { support.stores, support.leases_only, support.examples, support.asked } do
        for _, store in ipairs(stores) do
          if store.name == name then each({ store }, fn) end
        end
      end
    end
  end

  --- The kinds of peers: their names, and how to make each on a store.
  support.peer_kinds = { { "process", support.process }, { "thread", support.thread } }
  for _, name in ipairs(require("spec.support.loops").names) do
    support.peer_kinds[#support.peer_kinds + 1] =
      { "coroutine of " .. name, function(store, options) return support.coroutine(store, options, name) end }
  end
end

-- Peers start by the thousand, and most ask for none of it.
setmetatable(support, { __index = function(_, name)
  setmetatable(support, nil)
  complete()
  return support[name]
end })

return support
