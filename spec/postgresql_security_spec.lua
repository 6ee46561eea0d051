--- The claims of docs/security.md and docs/false-servers.md about PostgreSQL, where no other spec shows them: servers
-- that are not what they seem, the bytes that are sent to them, and the powers of other roles on a real server.
-- Parts: without_end postgresql

local uv = require "luv"
local attach = require "hierlock.attach"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local USER, PASSWORD = "hierlock_secure", "Geheim-4711"
local R1 = { "u1", "a1", "r1" }

-- The outcome of a client, in a process of its own, as the servers below work while we wait for one. The outcome is
-- "open" when it could lock, or else the code, the message, whether trying again may help; and how long it took.
local function seen(dsn, options, timeout)
  return support.process(nil):call([[
    local dsn, options, timeout = ...
    local start = support.now()
    local function ends(...) return support.now() - start, ... end
    local manager, err = hierlock.open(dsn, options)
    if not manager then return ends(err.code, err.message, err.retryable) end
    start = support.now()
    local handle, refusal = manager:acquire({ "u1", "a1", "r1" }, { timeout = timeout or 1 })
    if not handle then return ends(refusal.code, refusal.message, refusal.retryable) end
    return ends("open")
  ]], dsn, options, timeout)
end

-- ------------------------------------------------------------ a hostile server

-- The servers' protocol: numbers, and messages.
local function int(n, size)
  local bytes = {}
  for i = size, 1, -1 do
    bytes[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  return table.concat(bytes)
end
local function message(kind, text) return kind .. int(#text + 4, 4) .. text end
local function authentication(n, text) return message("R", int(n, 4) .. (text or "")) end
local function complete(tag) return message("C", tag .. "\0") end
local function fields(n) return message("T", int(n, 2) .. ("c\0" .. ("\0"):rep(9) .. "\25\255\255\255\255\255\255\0\0"):rep(n)) end
local function row(...)
  local list = {}
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    list[i] = value and int(#value, 4) .. value or "\255\255\255\255"
  end
  return message("D", int(#list, 2) .. table.concat(list))
end
local function report(kind, severity, state, text)
  return message(kind, ("S%s\0V%s\0C%s\0M%s\0\0"):format(severity, severity, state, text))
end
local function failure(state, text) return report("E", "ERROR", state, text or "no") end
local NOTICE = report("N", "NOTICE", "00000", "hello")
local IDLE, BEGUN = message("Z", "I"), message("Z", "T")

local BACKEND = "4711"
local GREETING = authentication(0) .. message("S", "server_version\00015.3\0") .. message("S", "client_encoding\0UTF8\0") ..
  message("K", int(4711, 4) .. "abcd") .. IDLE
local function verified(...) return complete("SET"):rep(8) .. fields(9) .. row(...) .. complete("SELECT 1") .. IDLE end
local VERIFIED = verified("PostgreSQL 15.3", "f", BACKEND, "f", nil, nil, nil, "a", "t")
local SET = complete("SET") .. IDLE
local PARSED, BOUND = message("1", ""), message("2", "")
-- Before the answer to a try, and after it.
local BEGIN = PARSED .. BOUND .. message("n", "") .. complete("BEGIN") .. PARSED .. BOUND
local function granted(...) return BEGIN .. fields(select("#", ...)) .. row(...) .. complete("SELECT 1") .. PARSED .. BEGUN end
local GRANTED = granted("0", "1234567890", BACKEND, "0")

-- Listens, and answers each message of a client by the next of the answers. An answer is a text, or a function that
-- is given a write(text), or false: nothing is said, and nothing ends. After the last it ends. `sent`: all bytes
-- from clients. answers.connect_timeout: of its DSN, in seconds; 2 unless said.
local function fake(answers)
  local self = { sent = "", handles = {}, tls = answers.tls }
  local server = uv.new_tcp()
  assert(server:bind("127.0.0.1", 0))
  self.port = server:getsockname().port
  assert(server:listen(16, function()
    local client, n = uv.new_tcp(), 0
    assert(server:accept(client))
    self.handles[#self.handles + 1] = client
    client:read_start(function(_, data)
      if not data or client:is_closing() then return client:is_closing() or client:close() end
      -- A request for GSS or TLS is answered by no. To cancel: no word.
      self.sent, n = self.sent .. data, n + 1
      if #data == 8 and data:find("^%z%z%z\8\4\210\22[/0]") and not self.tls then
        n = n - 1
        return client:write("N")
      end
      local answer = answers[n]
      if type(answer) == "function" then
        answer(function(text) return client:is_closing() or client:write(text) end, self, client)
      elseif answer then
        client:write(answer)
      elseif answer == nil then
        client:close()
      end
    end)
  end))
  function self.dsn(parameters)
    return ("postgresql://%s:%s@127.0.0.1:%d/shop?connect_timeout=%d&gssencmode=disable&%s"):format(
      USER, PASSWORD, self.port, answers.connect_timeout or 2, parameters or "sslmode=disable")
  end
  function self.close()
    for _, handle in ipairs(self.handles) do
      if not handle:is_closing() then handle:close() end
    end
    server:close()
    uv.run("nowait")
  end
  return self
end

-- Says it again and again, without an end, and always more than has been heard.
local function without_end(text, before)
  local much = text:rep(math.ceil(65536 / #text))
  return function(write, self, client)
    write(before or "")
    local timer = uv.new_timer()
    self.handles[#self.handles + 1] = timer
    timer:start(1, 1, function()
      if client:is_closing() then return timer:is_closing() or timer:close() end
      while client:get_write_queue_size() < 2 ^ 20 do client:write(much) end
    end)
  end
end

describe("a hostile server of PostgreSQL's kind", function()
  if not pcall(require, "hierlock.store.postgresql") then return pending("the store is not built here") end
  local server
  after_each(function()
    support.close_peers()
    if server then server.close() end
    server = nil
  end)

  local function ask(answers, parameters, timeout)
    if server then server.close() end
    server = fake(answers)
    local took, code, text, retryable = seen(server.dsn(parameters), { hold_timeout = 10 }, timeout)
    if text then
      assert.is_nil(text:find(PASSWORD, 1, true))
      assert.is_nil(text:find("[^\32-\126]"), text)
    end
    return code, text, retryable, took
  end

  it("is believed when it answers what a server would: so what follows shows something", function()
    assert.equal("open", (ask { GREETING, VERIFIED, SET, GRANTED }))
  end)

  it("is refused with a code of its own, whatever code it says itself", function()
    for _, state in ipairs { "55P03", "57014", "40P01", "00000", "01000", "25P02", "XX000", "@\27[3" } do
      for _, answers in ipairs {
        { report("E", "FATAL", state, "no") },
        { GREETING, failure(state) .. IDLE },
        { GREETING, report("E", "FATAL", state, "no") },
      } do
        local code, text = ask(answers)
        assert.truthy(({ connection = true, store = true })[code], state .. ": " .. tostring(code) .. " " .. tostring(text))
      end
    end
  end)

  it("does not get the password by asking for it in clear text, where there is no TLS and libpq can refuse", function()
    local known = select(2, seen("postgresql://u@127.0.0.1:1/d?require_auth=none")) ~= "dsn"
    for _, parameters in ipairs { "sslmode=disable", "sslmode=prefer", "sslmode=allow" } do
      local code, text = ask({ authentication(3), GREETING, VERIFIED, SET, GRANTED }, parameters)
      assert.truthy(server.sent:find(USER, 1, true))
      if known then
        assert.equal("connection", code)
        assert.matches("password", text)
        assert.is_nil(server.sent:find(PASSWORD, 1, true), parameters)
      else
        assert.truthy(server.sent:find(PASSWORD, 1, true), "docs/false-servers.md: an older libpq gives it")
      end
    end
    if not known then return end
    -- A caller that asks for it explicitly has it.
    assert.equal("open", (ask({ authentication(3), GREETING, VERIFIED, SET, GRANTED }, "sslmode=disable&require_auth=password")))
    assert.truthy(server.sent:find(PASSWORD, 1, true))
  end)

  -- Answers of a server to a request for TLS.
  for title, answer in pairs {
    ["that it has none"] = "N",
    ["by an error"] = failure("08P01"),
    ["by an error, and goes on"] = failure("08P01") .. GREETING,
    ["that it has none, and goes on"] = "N" .. GREETING,
    ["that it has, and goes on without"] = "S" .. GREETING,
    ["that it has, and then has none"] = "S",
    ["nonsense"] = "HTTP/1.1 400 Bad Request\r\n\r\n",
  } do
    it("hears nothing from who requires TLS when it says " .. title, function()
      local ca = os.getenv "HIERLOCK_POSTGRESQL_CA"
      for _, parameters in ipairs { "sslmode=require", ca and "sslmode=verify-ca&sslrootcert=" .. ca,
                                    ca and "sslmode=verify-full&sslrootcert=" .. ca } do
        local code = ask({ tls = true, answer, GREETING, GREETING, GREETING }, parameters)
        assert.truthy(({ connection = true, store = true })[code])
        assert.is_nil(server.sent:find(USER, 1, true), parameters)
        assert.is_nil(server.sent:find(PASSWORD, 1, true), parameters)
      end
    end)
  end

  local V = { "PostgreSQL 15.3", "f", BACKEND, "f", nil, nil, nil, "a", "t" }
  local function changed(i, value)
    local values = { (table.unpack or unpack)(V, 1, 9) }
    values[i] = value
    return verified((table.unpack or unpack)(values, 1, 9))
  end

  for title, answer in pairs {
    ["no rows"] = IDLE,
    ["an empty set"] = fields(9) .. complete("SELECT 0") .. IDLE,
    ["too few columns"] = fields(2) .. row("a", "b") .. complete("SELECT 1") .. IDLE,
    ["no version"] = changed(1, nil),
    ["no process"] = changed(3, nil),
    ["the process of another"] = changed(3, "4712"),
    ["a request for a file"] = message("G", "\0\0\0") .. IDLE,
    ["a file"] = message("H", "\0\0\0") .. message("d", "text") .. message("c", "") .. IDLE,
    ["both ways"] = message("W", "\0\0\0"),
    ["a message of no length"] = "D\0\0\0\0",
    ["a message of a negative length"] = "D\255\255\255\255",
    ["a message that is too short for its columns"] = fields(9) .. message("D", int(9, 2)) .. IDLE,
    ["rows without columns"] = row("a") .. IDLE,
    ["a field that is longer than its row"] = fields(9) .. message("D", int(9, 2) .. int(2 ^ 30, 4) .. "abc") .. IDLE,
    ["an unknown message"] = message("?", "abc") .. IDLE,
    ["text"] = "HTTP/1.1 400 Bad Request\r\n\r\n",
  } do
    it("is refused, and in time, when it answers the look at it with " .. title, function()
      local code, text, _, took = ask { GREETING, answer }
      assert.truthy(({ connection = true, unsafe_server = true })[code], tostring(code) .. ": " .. tostring(text))
      assert.is_true(took < 6, took)
    end)
  end

  for title, answer in pairs {
    ["nothing but that it is idle"] = IDLE,
    ["that a transaction is open, and no rows"] = BEGUN,
    ["a grant outside of a transaction"] = (GRANTED:gsub("Z%z%z%z\5T", "Z\0\0\0\5I")),
    ["a grant in a transaction that has failed"] = (GRANTED:gsub("Z%z%z%z\5T", "Z\0\0\0\5E")),
    ["one column"] = granted("0"),
    ["NULLs"] = granted(nil, nil, nil, nil),
    ["no token"] = granted("0", nil, BACKEND, "0"),
    ["no gate"] = granted("0", "1", BACKEND, nil),
    ["a gate that is neither open nor closed"] = granted("0", "1", BACKEND, "3"),
    ["the process of another"] = granted("0", "1", "4712", "0"),
    ["a standby"] = granted("0", "1", "0", "0"),
    ["an empty set"] = BEGIN .. fields(4) .. complete("SELECT 0") .. PARSED .. BEGUN,
    ["no columns"] = BEGIN .. fields(0) .. row() .. complete("SELECT 1") .. PARSED .. BEGUN,
    ["more ends than there are beginnings"] = BEGUN .. BEGUN .. BEGUN .. GRANTED,
    ["an answer too much"] = PARSED:rep(20) .. BOUND:rep(20) .. complete("X"):rep(20) .. BEGUN,
    ["a request for a file"] = message("G", "\0\0\0") .. BEGUN,
    ["a file"] = message("H", "\0\0\0") .. message("d", "text") .. message("c", "") .. BEGUN,
    ["both ways"] = message("W", "\0\0\0") .. BEGUN,
    ["a request to go on"] = message("s", "") .. BEGUN,
    ["an unknown message"] = message("?", "abc") .. BEGUN,
    ["rows without columns"] = row("0", "1", BACKEND, "0") .. BEGUN,
    ["two errors"] = failure("XX000") .. failure("XX000") .. message("Z", "E"),
    ["three errors, and no end"] = failure("XX000"):rep(3),
    ["an error, and a grant"] = failure("XX000") .. GRANTED,
    ["more results than there are statements"] = BEGIN .. complete("BEGIN"):rep(8),
    ["a message of a length that cannot be, behind its rows"] =
      BEGIN .. fields(4) .. row("0", "1", BACKEND, "0") .. "C\0\0\0\1SELECT 1\0" .. PARSED .. BEGUN,
    ["an error without a field"] = message("E", "\0") .. message("Z", "E"),
    ["an error that is not ended"] = message("E", "SERROR") .. message("Z", "E"),
    ["an authentication"] = authentication(3) .. BEGUN,
    ["one half"] = GRANTED:sub(1, 60),
  } do
    it("has granted nothing, and in time, when it answers a request with " .. title, function()
      local code, text, _, took = ask { GREETING, VERIFIED, SET, answer, IDLE, IDLE }
      assert.truthy(({ connection = true, unsafe_server = true, store = true })[code], tostring(code) .. ": " .. tostring(text))
      assert.is_true(took < 6, took)
    end)
  end

  -- ------------------------------------------------------------- without an end

  for title, answers in pairs {
    ["of notices, as a greeting"] = { without_end(NOTICE) },
    ["of settings, as a greeting"] = { without_end(message("S", "a\0b\0"), authentication(0)) },
    ["of notices, when it is looked at"] = { GREETING, without_end(NOTICE) },
    ["of results, when it is looked at"] = { GREETING, without_end(complete "SET") },
    ["of rows, when it is looked at"] = { GREETING, without_end(row(("x"):rep(100)), fields(1)) },
    ["of notices, to a request"] = { GREETING, VERIFIED, SET, without_end(NOTICE) },
    ["of settings, to a request"] = { GREETING, VERIFIED, SET, without_end(message("S", "a\0b\0")) },
    ["of notices, when its answer is half"] = { GREETING, VERIFIED, SET, without_end(NOTICE, BEGIN) },
    ["of rows, to a request"] = { GREETING, VERIFIED, SET, without_end(row("0", "1", BACKEND, "0"), BEGIN .. fields(4)) },
    ["of results, to a request"] = { GREETING, VERIFIED, SET, without_end(complete "BEGIN" .. PARSED .. BOUND, BEGIN) },
  } do
    it("keeps nobody longer than his time by an answer without end, " .. title, function()
      answers.connect_timeout = 1 -- for so long, both are as busy as they can be
      local code, _, _, took = ask(answers, nil, 0.2)
      assert.equal("connection", code)
      assert.is_true(took < 6, took)
    end)
  end

  for title, answers in pairs {
    ["as a greeting"] = { false },
    ["behind its greeting"] = { GREETING, false },
    ["to a request"] = { GREETING, VERIFIED, SET, false },
    ["in the middle of an answer"] = { GREETING, VERIFIED, SET, GRANTED:sub(1, 40), false },
  } do
    it("keeps nobody longer than his time by its silence, " .. title, function()
      local code, _, _, took = ask(answers)
      assert.equal("connection", code)
      assert.is_true(took < 7, took)
    end)
  end
end)

-- --------------------------------------------------------------- real servers

support.on_postgresql(function(store)
  local managers, undo
  local function open(options, dsn)
    local all = {}
    for name, value in pairs(store.options) do all[name] = value end
    for name, value in pairs(options or {}) do all[name] = value end
    local manager, err = hierlock.open(dsn or store.dsn, all)
    managers[#managers + 1] = manager
    return manager, err
  end
  -- Runs SQL as the administrator; `back` takes it back.
  local function administrate(sql, back)
    local root = store.root() or pending("no administrator here")
    if back then table.insert(undo, 1, back) end
    for statement in sql:gmatch "[^;]+" do root:query(statement) end
  end
  -- Another role, and a connection of its own.
  local function stranger()
    administrate(("CREATE ROLE %s LOGIN PASSWORD '%s'"):format(USER, PASSWORD), "DROP OWNED BY " .. USER .. ";DROP ROLE " .. USER)
    local bare = store.bare_dsn:gsub("//[^@]+@", "//" .. USER .. ":" .. PASSWORD .. "@", 1)
    return support.foreign { bare_dsn = bare }, (store.dsn:gsub("//[^@]+@", "//" .. USER .. ":" .. PASSWORD .. "@", 1))
  end

  before_each(function() managers, undo = {}, {} end)
  after_each(function()
    support.close_peers()
    for _, manager in ipairs(managers) do manager:close() end
    for _, sql in ipairs(undo) do
      for statement in sql:gmatch "[^;]+" do store.root():query(statement) end
    end
  end)

  local function excludes()
    local one, other = assert(open { hold_timeout = 5 }), assert(open())
    local handle = assert(one:acquire(R1))
    assert(handle:extend { "u2" })
    assert.equal("timeout", select(2, other:acquire(R1, { timeout = 0 })).code)
    assert.equal("timeout", select(2, other:acquire({ "u2" }, { timeout = 0.1 })).code)
    support.sleep(0.15)
    assert.is_true(handle:check())
    handle:release { confirm = true }
    assert(other:acquire(R1, { timeout = 0 })):release { confirm = true }
  end

  -- The powers of the owner of the database, or of a schema in it, over names.
  it("is not led astray by functions of the same names in the role's path", function()
    local evil = {}
    for _, name in ipairs { "pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared" } do
      evil[#evil + 1] = ("CREATE FUNCTION evil.%s(int8) RETURNS bool LANGUAGE sql AS 'SELECT true'"):format(name)
    end
    for _, name in ipairs { "pg_advisory_xact_lock", "pg_advisory_xact_lock_shared" } do
      evil[#evil + 1] = ("CREATE FUNCTION evil.%s(int8) RETURNS void LANGUAGE sql AS 'SELECT'"):format(name)
    end
    evil[#evil + 1] = "CREATE FUNCTION evil.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true'"
    evil[#evil + 1] = "CREATE FUNCTION evil.wrong(int8,int8) RETURNS int8 LANGUAGE sql AS 'SELECT 0::int8'"
    evil[#evil + 1] = "CREATE OPERATOR evil.* (FUNCTION=evil.wrong,LEFTARG=int8,RIGHTARG=int8)"
    evil[#evil + 1] = "CREATE VIEW evil.pg_locks AS SELECT 1 AS pid"
    evil[#evil + 1] = "GRANT USAGE ON SCHEMA evil TO PUBLIC"
    evil[#evil + 1] = "ALTER ROLE testuser SET search_path=evil,pg_catalog"
    administrate("CREATE SCHEMA evil;" .. table.concat(evil, ";"), "ALTER ROLE testuser RESET ALL;DROP SCHEMA evil CASCADE")
    excludes()
    local handle = assert(open():acquire(R1, { label = "seen" }))
    assert.equal("seen", assert(open():holders(R1))[1].label)
    handle:release()
  end)

  -- A role that may make functions in a schema of the path (before PostgreSQL 15 every role may, in public) can
  -- offer one that fits a literal better.
  it("is not led astray in the program's own transaction, nor by a plan's SQL", function()
    local evil = {}
    for _, name in ipairs { "pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared" } do
      evil[#evil + 1] = ("CREATE FUNCTION public.%s(text) RETURNS bool LANGUAGE sql AS 'SELECT true'"):format(name)
    end
    for _, name in ipairs { "pg_advisory_xact_lock", "pg_advisory_xact_lock_shared" } do
      evil[#evil + 1] = ("CREATE FUNCTION public.%s(text) RETURNS void LANGUAGE sql AS 'SELECT'"):format(name)
    end
    local back = {}
    for i, sql in ipairs(evil) do back[i] = "DROP FUNCTION " .. sql:match "FUNCTION ([^)]*%))" end
    administrate(table.concat(evil, ";"), table.concat(back, ";"))
    local manager = assert(open())
    local user, password, host, port, database = store.bare_dsn:match "^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)"
    local connection = assert(support.luasql_postgresql():connect(database, user, password, host, tonumber(port)))
    finally(function() connection:close() end)
    for _, timeout in ipairs { 0, 5 } do
      assert(connection:execute "BEGIN")
      assert.is_true(attach.luasql(connection):acquire(R1, { timeout = timeout }))
      assert.equal("timeout", select(2, manager:acquire(R1, { timeout = 0 })).code)
      assert(connection:execute "ROLLBACK")
    end
    assert(connection:execute "BEGIN")
    assert(connection:execute(hierlock.plan({ R1 }):sql "postgresql"))
    assert.equal("timeout", select(2, manager:acquire(R1, { timeout = 0 })).code)
    assert(connection:execute "ROLLBACK")
  end)

  for _, setting in ipairs {
    "statement_timeout='50ms'", "lock_timeout='1ms'", "idle_in_transaction_session_timeout='50ms'",
    "transaction_timeout='50ms'", "default_transaction_read_only=on", "default_transaction_isolation='serializable'",
    "default_transaction_deferrable=on", "client_encoding='SJIS'", "standard_conforming_strings=off",
    "backslash_quote=on", "escape_string_warning=on", "row_security=off", "extra_float_digits=-15", "DateStyle='German'",
    "IntervalStyle='iso_8601'", "TimeZone='Asia/Kathmandu'", "client_min_messages='debug5'", "log_statement='all'",
    "log_min_duration_statement=0", "plan_cache_mode='force_custom_plan'", "plan_cache_mode='force_generic_plan'",
    "jit_above_cost=0", "force_parallel_mode=on", "debug_parallel_query=on", "debug_print_plan=on", "track_activities=off",
    "client_connection_check_interval='1ms'", "tcp_keepalives_idle=1", "synchronous_commit=off", "deadlock_timeout='1ms'",
    "enable_seqscan=off", "exit_on_error=off", "session_replication_role='replica'",
  } do
    it("excludes whatever the role's settings are: " .. setting, function()
      local root = store.root() or pending("no administrator here")
      if not root:try("ALTER ROLE testuser SET " .. setting) then return end -- of another version
      undo[1] = "ALTER ROLE testuser RESET ALL"
      excludes()
    end)
  end

  it("excludes whatever a trigger of the database's does to the session when it begins", function()
    local root = store.root() or pending("no administrator here")
    if tonumber(root:query("SHOW server_version_num")[1][1]) < 170000 then return end -- there are none
    administrate("CREATE SCHEMA evil;GRANT USAGE ON SCHEMA evil TO PUBLIC;" ..
      "CREATE FUNCTION evil.pg_try_advisory_xact_lock(int8) RETURNS bool LANGUAGE sql AS 'SELECT true'", "DROP SCHEMA evil CASCADE")
    local settings = {}
    for name, value in pairs { search_path = "evil,pg_catalog", statement_timeout = "50ms", transaction_timeout = "50ms",
                               default_transaction_read_only = "on", idle_in_transaction_session_timeout = "50ms" } do
      settings[#settings + 1] = ("PERFORM set_config('%s','%s',false)"):format(name, value)
    end
    undo[1] = "DROP EVENT TRIGGER evil;DROP SCHEMA evil CASCADE"
    root:query("CREATE FUNCTION evil.begin() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN %s; END $$", table.concat(settings, ";"))
    root:query "CREATE EVENT TRIGGER evil ON login EXECUTE FUNCTION evil.begin()"
    excludes()
  end)

  it("another role sees neither labels nor statements, and ends nobody's session; the same role can", function()
    local handle = assert(assert(open()):acquire(R1, { label = "not for strangers" }))
    local id = store.transactions()[1]
    local other, dsn = stranger()
    for _, sql in ipairs { "SELECT * FROM pg_stat_activity", "SELECT * FROM pg_locks", "SELECT * FROM pg_prepared_statements" } do
      assert.is_nil(support.encode(other:query(sql)):find("not for strangers", 1, true), sql)
    end
    assert.is_nil((other:query("SELECT pg_terminate_backend(%s)", id)))
    assert.is_nil((other:query("SELECT pg_cancel_backend(%s)", id)))
    local seen_by_them = assert(assert(open(nil, dsn)):holders(R1))
    assert.equal(1, #seen_by_them)
    assert.equal("", seen_by_them[1].label or "")
    assert.is_true(handle:check())
    store.sql():query("SELECT pg_terminate_backend(%s)", id)
    assert.equal("lost", select(2, handle:check()).code)
  end)

  it("who may connect can keep others out, and who may not cannot", function()
    local manager = assert(open())
    local other, dsn = stranger()
    local key = hierlock.plan({ { "u1" } }):sql("postgresql"):match "'(%d+)'"
    other:query("BEGIN;SELECT pg_advisory_xact_lock(%s)", key)
    assert.equal("timeout", select(2, manager:acquire({ "u1" }, { timeout = 0 })).code)
    other:query "ROLLBACK"
    -- The keys of another database are others.
    local elsewhere = support.foreign { bare_dsn = (store.bare_dsn:gsub("/[^/]*$", "/postgres")) }
    elsewhere:query("BEGIN;SELECT pg_advisory_xact_lock(%s)", key)
    assert(manager:acquire({ "u1" }, { timeout = 0 })):release { confirm = true }
    administrate("REVOKE CONNECT ON DATABASE mgl_test FROM PUBLIC;GRANT CONNECT ON DATABASE mgl_test TO testuser",
      "REVOKE CONNECT ON DATABASE mgl_test FROM testuser;GRANT CONNECT ON DATABASE mgl_test TO PUBLIC")
    local refused, err = open(nil, dsn)
    assert.is_nil(refused)
    assert.equal("connection", err.code)
    assert.equal("42501", err.sqlstate)
    assert.matches("permission denied for database", err.message)
    assert.is_false(err.retryable)
    assert(open())
  end)

  it("a role that may not call what locks is told so, and holds nothing", function()
    local LOCKS = "FUNCTION pg_catalog.pg_try_advisory_xact_lock(int8),pg_catalog.pg_try_advisory_xact_lock_shared(int8)," ..
      "pg_catalog.pg_advisory_xact_lock(int8),pg_catalog.pg_advisory_xact_lock_shared(int8)"
    local manager = assert(open())
    administrate("REVOKE EXECUTE ON " .. LOCKS .. " FROM PUBLIC", "GRANT EXECUTE ON " .. LOCKS .. " TO PUBLIC")
    for _ = 1, 3 do
      local handle, err = manager:acquire(R1)
      assert.is_nil(handle)
      assert.equal("store", err.code)
      assert.equal("42501", err.sqlstate)
      assert.matches("permission denied for function pg_[try_]*advisory_xact_lock", err.message)
      assert.is_false(err.retryable)
      support.wait_until(function()
        return store.root():query("SELECT count(*) FROM pg_locks WHERE locktype='advisory'")[1][1] == "0"
      end, "nothing held")
    end
    administrate("GRANT EXECUTE ON " .. LOCKS .. " TO testuser", "REVOKE EXECUTE ON " .. LOCKS .. " FROM testuser")
    assert(manager:acquire(R1)):release { confirm = true } -- the same session
  end)

  it("what another program says of itself is escaped and cut", function()
    local manager = assert(open())
    local key = hierlock.plan({ { "u1" } }):sql("postgresql"):match "'(%d+)'"
    for _, says in ipairs {
      "1|2|x|%1B]0;owned%07|%0D%0Ahost|%C2%9B31m%E2%80%AE|%00path%FF",
      "-9999999999999999999|99999999999999999999999|z|\27]0;owned\7|\r\nhost|\194\15531m|%",
      "1|2|x|" .. ("%1B"):rep(300), ("|"):rep(900), "", "x",
    } do
      local other = support.foreign(store)
      other:query("SET application_name='\27[31m'")
      other:query("BEGIN")
      other:query("/*hierlock1|%s*/SELECT pg_advisory_xact_lock(%s)", says, key)
      local holders = assert(manager:holders { "u1" })
      assert.equal(1, #holders)
      for name, value in pairs(holders[1]) do
        if type(value) == "string" then
          assert.is_nil(value:find("[%c\127]"), name)
          assert.is_nil(value:find("\194[\128-\159]"), name)
          assert.is_nil(value:find("\226\128\174"), name)
          assert.is_true(#value < 256, name)
        end
      end
      other:query "ROLLBACK"
      other:close()
    end
  end)

  it("nothing of ids, labels and names of programs stands in a statement but in its comment, which none can end", function()
    local between = proxy.open(store)
    finally(function() between.close() end)
    local evil = "x'); */ DROP TABLE x; -- /* \\\" \0"
    support.process(nil):call([[
      local dsn, evil = ...
      local manager = assert(hierlock.open(dsn, { application = evil:gsub("%z", "") }))
      for _ = 1, 3 do
        local handle = assert(manager:acquire({ evil, evil, evil }, { label = evil }))
        assert(handle:extend({ evil, evil, evil .. "2" }, { label = evil }))
        assert(manager:holders { evil })
        handle:release { confirm = true }
      end
      manager:close()
    ]], between.dsn, evil)
    local rest, comments = between.sent:gsub("/%*hierlock1|[^*]*%*/", "")
    assert.is_true(comments >= 6, comments)
    -- The program's name is a parameter of the log-in, too.
    assert.is_nil(rest:gsub("application_name%z[^%z]*%z", ""):find("DROP", 1, true))
  end)

  it("no text of an object has the password, and neither have counters and holders", function()
    local manager = assert(open())
    local handle = assert(manager:acquire(R1))
    for _, text in ipairs { tostring(manager), tostring(handle), support.encode(manager:stats()),
                            support.encode(assert(manager:holders { "u1" })) } do
      assert.is_nil(text:find("testpassword", 1, true), text)
    end
  end)
end)
