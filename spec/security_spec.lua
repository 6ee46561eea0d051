--- The claims of docs/security.md and docs/false-servers.md, where no other spec shows them: servers that are not what they seem, bad
-- certificates, the power to block, see and end others' locks, and texts of strangers.

local uv = require "luv"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"
local with_param = require("spec.support.sql").with_param

local USER, PASSWORD = "hierlock_secure", "Geheim-4711"

-- The outcome of a client, in a process of its own, as the servers below work while we wait for one. The outcome is
-- "open" when it could lock, or else the code, the message, and whether trying again may help.
local function seen(dsn, options)
  return support.process(nil):call([[
    local manager, err = hierlock.open(...)
    if not manager then return err.code, err.message, err.retryable end
    local handle, refusal = manager:acquire({"u1", "a1", "r1"}, {timeout = 3})
    if not handle then return refusal.code, refusal.message, refusal.retryable end
    handle:release {confirm = true}
    manager:close()
    return "open"
  ]], dsn, options)
end

-- ------------------------------------------------------------ a hostile server

-- A packet of the servers' protocol.
local function packet(sequence, text)
  local n = #text
  return string.char(n % 256, math.floor(n / 256) % 256, math.floor(n / 65536), sequence) .. text
end

local OK = "\0\0\0\2\0\0\0"
local TLS = 8 -- in the second byte of the flags

-- A server's first message. flags: of its second byte; version: of its own.
local function greeting(flags, version)
  return packet(0, "\10" .. (version or "8.4.0") .. "\0\1\0\0\0" .. "abcdefgh" .. "\0" ..
    string.char(0x0D, 0xA2 + (flags or 0)) .. "\45\2\0" .. "\8\0" .. "\21" .. ("\0"):rep(10) ..
    "ijklmnopqrst\0" .. "mysql_native_password\0")
end

-- Listens, greets, and answers each time that a client has said something by the next one of the
-- answers, and ends after the last. `sent`: all that clients have said.
local function fake(first, answers)
  local self = { sent = "", connections = {} }
  local server = uv.new_tcp()
  assert(server:bind("127.0.0.1", 0))
  self.port = server:getsockname().port
  assert(server:listen(16, function()
    local client, n = uv.new_tcp(), 0
    assert(server:accept(client))
    self.connections[#self.connections + 1] = client
    client:write(first)
    client:read_start(function(_, data)
      if not data or client:is_closing() then return client:is_closing() or client:close() end
      self.sent, n = self.sent .. data, n + 1
      if answers[n] then client:write(answers[n]) else client:close() end
    end)
  end))
  function self.dsn(parameters)
    return ("mysql://%s:%s@127.0.0.1:%d/shop?connect_timeout=2&%s"):format(USER, PASSWORD, self.port, parameters)
  end
  function self.close()
    for _, client in ipairs(self.connections) do
      if not client:is_closing() then client:close() end
    end
    server:close()
    uv.run("nowait")
  end
  return self
end

describe("a hostile server", function()
  if not pcall(require, "hierlock.store.mysql") then return pending("the store is not built here") end
  local server
  after_each(function()
    support.close_peers()
    if server then server.close() end
    server = nil
  end)

  local function ask(parameters, first, answers)
    if server then server.close() end
    server = fake(first, answers)
    local code, message, retryable = seen(server.dsn(parameters))
    assert.is_nil(message:find(PASSWORD, 1, true))
    assert.is_nil(message:find("[^\32-\126]"), message)
    return code, message, retryable
  end

  local full = { packet(2, "\254caching_sha2_password\0abcdefghijklmnopqrst\0"), packet(4, "\1\4") }

  it("does not get the password by asking for it in clear text, where there is no TLS", function()
    for title, asks in pairs {
      mysql_clear_password = { packet(2, "\254mysql_clear_password\0") },
      dialog = { packet(2, "\254dialog\0\4Password: ") },
      mysql_old_password = { packet(2, "\254") },
      caching_sha2_password = full,
      sha256_password = { packet(2, "\254sha256_password\0abcdefghijklmnopqrst\0") },
    } do
      for _, parameters in ipairs { "tls=off", "tls=preferred" } do
        local code, message, retryable = ask(parameters, greeting(), asks)
        assert.equal("connection", code)
        assert.truthy(server.sent:find(USER, 1, true))
        assert.is_nil(server.sent:find(PASSWORD, 1, true), title .. " with " .. parameters)
        if not title:find("sha") and not support.does_not_tell_waits() then
          assert.is_false(retryable, title .. ": " .. message)
        end
      end
    end
  end)

  local function after(text) return (text:gsub("^(...).", "%1\1")) end
  -- The flag of TLS is missing in each, or cannot be found; some libraries go on all the same.
  local strips = {
    ["as usual"] = greeting(),
    ["with a version that is too long"] = greeting(0, ("8"):rep(600)),
    ["with a version without end"] = packet(0, "\10" .. ("8"):rep(40)),
    ["without flags"] = packet(0, "\0108.4.0\0\1\0\0\0abcdefgh\0"),
    ["as an older one"] = packet(0, "\9" .. greeting():sub(6)),
    ["after an empty packet"] = packet(0, "") .. after(greeting()),
    ["after a report of progress"] = packet(0, "\255\255\255\1\1\1\0\0\0\1a") .. after(greeting()),
    ["after an error"] = packet(0, "\255\16\4#08004Too many") .. after(greeting()),
  }
  for title, first in pairs(strips) do
    it("hears nothing from who requires TLS when it greets without: " .. title, function()
      local ca = os.getenv("HIERLOCK_MYSQL_CA") or os.getenv("HIERLOCK_MARIADB_CA")
      for _, parameters in ipairs { "tls=required", ca and "tls=verify-ca&tls_ca=" .. ca,
                                    ca and "tls=verify-identity&tls_ca=" .. ca } do
        -- libmysqlclient takes the report of progress for an error of the server's.
        assert.matches(title:find("progress") and "^[cs]" or "^connection$", (ask(parameters, first, full)))
        assert.equal("", server.sent, parameters)
      end
      for _, parameters in ipairs { "tls=off", "tls=preferred" } do
        assert.matches(title:find("progress") and "^[cs]" or "^connection$", (ask(parameters, first, full)))
        assert.is_nil(server.sent:find(PASSWORD, 1, true), parameters)
      end
    end)
  end

  it("that is something else is told nothing, and what it says is quoted", function()
    if support.does_not_tell_waits() then return end -- the library says what it thinks
    local code, message = ask("tls=preferred", "SSH-2.0-OpenSSH_9.2\27[31m\r\n", full)
    assert.equal("connection", code)
    assert.matches('does not greet as MySQL or MariaDB does: it begins with "SSH-2.0-OpenSSH_"', message, 1, true)
    assert.equal("", server.sent)
    assert.matches([["HTTP/1.1 400\x0d\x0aA "]], select(2, ask("tls=off", "HTTP/1.1 400\r\nA bad request", full)), 1, true)
  end)

  it("is told neither user nor password when it offers TLS and then has none", function()
    for _, parameters in ipairs { "tls=preferred", "tls=required" } do
      assert.equal("connection", (ask(parameters, greeting(TLS), full)))
      assert.is_nil(server.sent:find(USER, 1, true), parameters)
      assert.is_nil(server.sent:find(PASSWORD, 1, true), parameters)
    end
  end)

  it("gets no file of the program's by answering a query with a request for one", function()
    local name, text = os.tmpname(), "for the program's eyes only"
    finally(function() os.remove(name) end)
    local file = assert(io.open(name, "w"))
    file:write(text)
    file:close()
    local code = ask("tls=off", greeting(), { packet(2, OK), packet(1, "\251" .. name) })
    assert.equal("connection", code)
    assert.truthy(server.sent:find("SELECT", 1, true))
    assert.is_nil(server.sent:find(text, 1, true))
  end)
end)

-- --------------------------------------------------------------- real servers

support.each_connection(function(store)
  local postgresql, opened = store.name == "postgresql", {}
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    opened = {}
  end)

  describe("a certificate", function()
    local ca = os.getenv("HIERLOCK_" .. store.name:upper() .. "_CA")
    local directory = ca and ca:match("^(.*)/")

    local function sh(command)
      local status = os.execute(("cd '%s' && { %s; } >/dev/null 2>&1"):format(directory, command))
      assert(status == true or status == 0, command)
    end
    local function reload()
      if not postgresql then
        store.root():query(store.dialect == "mysql" and "ALTER INSTANCE RELOAD TLS" or "FLUSH SSL")
        return
      end
      -- The server reloads in its own time; a new session knows whether it has.
      local function loaded()
        local sql = support.sql_connection(store.bare_dsn)
        local at = sql:query("SELECT extract(epoch FROM pg_conf_load_time())")[1][1]
        sql:close()
        return at
      end
      local before = loaded()
      store.root():query "SELECT pg_reload_conf()"
      support.wait_until(function() return loaded() ~= before end, "the new certificate")
    end
    -- The store's own name of a mode.
    local function parameters(mode)
      if not postgresql then return "tls=" .. mode .. (mode ~= "required" and "&tls_ca=" .. ca or "") end
      return "sslmode=" .. (({ required = "require", ["verify-identity"] = "verify-full" })[mode] or mode) ..
        (mode ~= "required" and "&sslrootcert=" .. ca or "")
    end

    local NAMES = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    local sign = "printf '%s' > hostile.ext && openssl req -new -key key.pem -subj /CN=localhost -out hostile.csr && " ..
      "openssl x509 -req -in hostile.csr -extfile hostile.ext -out cert.pem "
    local by_our_ca = "-CA ca.pem -CAkey ca-key.pem -CAcreateserial "
    -- OpenSSL of before 3.4 knows no dates here, and later ones no days that are over.
    local of_yesterday = sign:format(NAMES) .. by_our_ca .. "-days -1 || openssl x509 -req -in hostile.csr -extfile hostile.ext " ..
      "-out cert.pem " .. by_our_ca .. "-not_before 20200101000000Z -not_after 20200102000000Z"
    -- Which modes take a server that shows it.
    local cases = {
      { "that is good", sign:format(NAMES) .. by_our_ca .. "-days 2", { "required", "verify-ca", "verify-identity" } },
      { "that has expired", of_yesterday, { "required" }, true },
      { "that is for another host", sign:format("subjectAltName=DNS:elsewhere.example") .. by_our_ca .. "-days 2",
        { "required", "verify-ca" } },
      { "that is signed by itself", sign:format(NAMES) .. "-signkey key.pem -days 2", { "required" } },
      { "that another CA has signed", "openssl req -x509 -days 2 -noenc -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 " ..
        "-subj '/CN=hierlock test CA' -keyout hostile.key -out hostile.ca && " ..
        sign:format(NAMES) .. "-CA hostile.ca -CAkey hostile.key -CAcreateserial -days 2", { "required" }, true },
    }
    for _, case in ipairs(cases) do
      local title, make, taken_by, refused_by_mysql = (table.unpack or unpack)(case)
      -- MySQL presents no such certificate to any client.
      if not (refused_by_mysql and store.name == "mysql") then it(title .. " is taken under " .. table.concat(taken_by, ", ") .. " alone", function()
        if not ca or not io.open(directory .. "/ca-key.pem") then pending("the server is not this machine's") end
        sh("cp -p cert.pem cert.good")
        finally(function()
          sh("mv cert.good cert.pem; rm -f hostile.* *.srl")
          reload()
        end)
        sh(make)
        reload()
        local takes = {}
        for _, mode in ipairs(taken_by) do takes[mode] = true end
        for _, mode in ipairs { "required", "verify-ca", "verify-identity" } do
          local manager, err = hierlock.open(with_param(store.dsn, parameters(mode)), { buckets = store.options.buckets })
          opened[#opened + 1] = manager
          assert.equal(takes[mode] or false, manager ~= nil, mode .. ": " .. tostring(err))
          if err then assert.equal("connection", err.code) end
        end
      end) end
    end
  end)
end)

support.each_server(function(store)
  local user, password, host, port, database =
    (store.bare_dsn or ""):match("//(.-):(.-)@(.-):(%d+)/([^?]*)")
  local opened, between
  before_each(function() opened = {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    if between then between.close() end
    between = nil
    if store.root() then store.root():query("DROP USER IF EXISTS " .. USER .. "@'%'") end
  end)

  local function open(parameters, options)
    local all = { buckets = store.options.buckets }
    for name, value in pairs(options or {}) do all[name] = value end
    local manager, err = hierlock.open(parameters and with_param(store.dsn, parameters) or store.dsn, all)
    opened[#opened + 1] = manager
    return manager, err
  end

  -- Another user of the server, who has just these privileges, and a connection of his.
  local function stranger(...)
    local root = store.root() or pending("no administrator here")
    root:query("CREATE USER %s@'%%' IDENTIFIED BY '%s'", USER, PASSWORD)
    for _, privilege in ipairs { ... } do root:query("GRANT %s TO %s@'%%'", privilege, USER) end
    local dsn = ("mysql://%s:%s@%s:%s/%s"):format(USER, PASSWORD, host, port, database)
    return support.foreign { bare_dsn = dsn }, dsn .. "?table=" .. store.table
  end
  local function reads(name) return ("SELECT ON %s.%s"):format(database, name) end

  describe("another user of the server", function()
    it("who may only read the table can keep others out: shared on MySQL, exclusively on MariaDB", function()
      local manager = assert(open())
      local reader = stranger(reads(store.table))
      local row = hierlock.plan({ { "u1" } }, { buckets = store.options.buckets }):rows()[1]
      local sql = ("SELECT * FROM %s WHERE level=0 AND bucket=%d "):format(store.table, row.bucket)
      reader:query("START TRANSACTION")
      if store.dialect == "mysql" then
        assert.equal(1142, select(2, reader:query(sql .. "FOR UPDATE")))
        assert.equal(1, #reader:query(sql .. "FOR SHARE"))
      else
        assert.equal(1, #reader:query(sql .. "FOR UPDATE"))
      end
      assert.equal("timeout", select(2, manager:acquire({ "u1" }, { timeout = 0 })).code)
      reader:query("ROLLBACK")
      assert(manager:acquire({ "u1" }, { timeout = 5 })):release { confirm = true }
    end)

    it("who may not read it can neither lock nor keep out", function()
      local other, dsn = stranger(("SELECT ON %s.hier_lock_meta"):format(database))
      for _, statement in ipairs { "SELECT * FROM %s FOR UPDATE", "SELECT * FROM %s LOCK IN SHARE MODE",
                                   "LOCK TABLES %s READ", "LOCK TABLES %s WRITE", "DROP TABLE %s",
                                   "ALTER TABLE %s COMMENT 'x'" } do
        local rows, errno = other:query(statement, store.table)
        assert.is_nil(rows)
        assert.is_truthy(({ [1142] = true, [1044] = true })[errno], statement .. ": " .. tostring(errno))
      end
      local manager, err = hierlock.open(dsn, { buckets = store.options.buckets })
      opened[1] = manager
      assert.is_nil(manager)
      assert.equal("not_provisioned", err.code)
    end)

    it("sees neither labels nor programs, and ends nobody's connection", function()
      local handle = assert(open()):acquire({ "u1", "a1" }, { label = "not for strangers" })
      local id = support.wait_until(function()
        support.sleep(0.11)
        local rows = store.sql():query([[
          SELECT t.PROCESSLIST_ID FROM performance_schema.user_variables_by_thread u
          JOIN performance_schema.threads t ON t.THREAD_ID = u.THREAD_ID
          WHERE u.VARIABLE_NAME = 'hierlock' AND LOCATE('not for strangers', u.VARIABLE_VALUE) > 0]])
        return rows[1] and tonumber(rows[1][1])
      end, "the holder")
      local other, dsn = stranger(reads(store.table), reads("hier_lock_meta"))
      for _, statement in ipairs { "SELECT * FROM performance_schema.user_variables_by_thread",
                                   "SELECT * FROM performance_schema.session_connect_attrs",
                                   "SELECT * FROM information_schema.INNODB_TRX" } do
        local rows = other:query(statement)
        assert.is_nil(support.encode(rows):find("not for strangers", 1, true))
        assert.is_true(not rows or #rows == 0, statement)
      end
      local list = other:query("SHOW PROCESSLIST")
      for _, row in ipairs(list) do assert.equal(USER, row[2]) end
      assert.equal(1095, select(2, other:query("KILL %d", id))) -- not the owner
      local manager = assert(hierlock.open(dsn, { buckets = store.options.buckets }))
      opened[#opened + 1] = manager
      assert.equal("store", select(2, manager:holders { "u1", "a1" }).code)
      assert.is_true(handle:check())
      -- A session of that user can end it.
      store.sql():query("KILL %d", id)
      assert.equal("lost", select(2, handle:check()).code)
    end)
  end)

  it("nothing of ids, labels, names of programs or keys stands in a statement", function()
    between = proxy.open(store)
    local evil = "x'); DROP TABLE %s; -- \\\" `" .. store.table
    support.process(nil):call([[
      local dsn, evil, buckets = ...
      local manager = assert(hierlock.open(dsn, {buckets = buckets, application = evil}))
      for _ = 1, 3 do -- as text, then prepared
        local handle = assert(manager:acquire({evil, evil, evil}, {label = evil}))
        assert(handle:extend({evil, evil, evil .. "2"}, {label = evil}))
        assert(manager:holders {evil})
        handle:release {confirm = true}
      end
      manager:close()
    ]], between.dsn, evil, store.options.buckets)
    local queries = 0
    for _, command in ipairs(between.commands) do
      if command.text then
        queries = queries + 1
        assert.is_nil(command.text:find("DROP", 1, true), command.text)
      end
    end
    assert.is_true(queries > 5)
    assert.equal(tostring(3 * store.options.buckets),
                 store.sql():query("SELECT COUNT(*) FROM %s", store.table)[1][1]:match("%d+"))
  end)

  it("no text of an object has the password, and neither have counters and holders", function()
    local manager = assert(open())
    local handle = assert(manager:acquire { "u1", "a1" })
    local texts = { tostring(manager), tostring(handle), support.encode(manager:stats()),
                    support.encode(assert(manager:holders { "u1" })) }
    for _, text in ipairs(texts) do assert.is_nil(text:find(password, 1, true), text) end
    assert.is_string(user)
  end)
end)

-- ------------------------------------------------------------ the embedded store

describe("another user of the machine", function()
  if uv.getuid() ~= 0 then return pending("only root can be another user") end
  local UID = 1000000 + uv.os_getpid() % 1000000
  local directory, manager
  -- "yes" when he can. He need not be able to come to the directory's parents.
  local function can(command)
    local pipe = assert(io.popen(("cd %s && setpriv --reuid=%d --regid=%d --clear-groups sh -c '%s' >/dev/null 2>&1 && echo yes")
      :format(directory, UID, UID, command)))
    local answer = pipe:read("*a")
    pipe:close()
    return answer == "yes\n"
  end
  local function files(pattern)
    local pipe = assert(io.popen(("cd %s && ls -d %s"):format(directory, pattern)))
    local list = {}
    for name in pipe:lines() do list[#list + 1] = name end
    pipe:close()
    return list
  end
  local function made(mode)
    directory = support.stores[1].directory .. "/security"
    assert(os.execute(("mkdir -m %s %s"):format(mode, directory)))
    manager = assert(hierlock.open("file:" .. directory))
    support.keep(assert(manager:acquire { "u1" }))
    assert.same({ "control" }, files("*"))
  end
  after_each(function()
    support.close_peers()
    manager:close()
    os.execute("rm -rf " .. directory)
  end)

  it("who may only read the directory sees names of files, and can neither read, lock nor change one", function()
    made "0755"
    assert.is_true(can "ls | grep -q control")
    for _, name in ipairs(files "*") do
      for _, command in ipairs { "cat %s", ": >>%s", "flock -n -s %s true", "rm -f %s && ! test -e %s", "mv %s x" } do
        assert.is_false(can((command:gsub("%%s", name))), command:format(name, name))
      end
    end
    assert.is_false(can ": > new")
    -- That user can lock the directory itself as its programs do, which harms no caller.
    assert.is_false(can "flock -n -x . true")
    local blocker = assert(io.popen(("cd %s && exec setpriv --reuid=%d --clear-groups flock -s . sh -c 'echo; read x'")
      :format(directory, UID), "w"))
    assert(manager:acquire({ "u2" }, { timeout = 0 })):release()
    assert(hierlock.open("file:" .. directory)):close()
    blocker:write("\n")
    blocker:close()
  end)

  it("who may not even do that gets nothing, which is how the directory is made", function()
    made "0700"
    assert.is_false(can "ls")
    for _, name in ipairs(files "*") do assert.is_false(can("cat " .. name)) end
  end)

  it("who shares a directory with everybody, sticky, can lock all of a file, and remove none of others", function()
    made "1777"
    local control = "control"
    assert.is_true(can("test -r " .. control .. " -a -w " .. control))
    assert.is_false(can("rm -f " .. control))
    assert.is_false(can("mv " .. control .. " x"))
    assert.is_true(can ": > new && rm new")
    assert.is_true(can ": > tmp-1-1")
    assert(manager:acquire({ "u2" }, { timeout = 0 })):release()
    -- This is what nothing forbids: to cut the control file. See docs/security.md.
    assert.is_true(can("truncate -c -s 0 " .. control))
    support.sleep(0.05) -- a touch before the next look at the file would end this process
    local handle, err = manager:acquire({ "u3" }, { timeout = 0 })
    assert.is_nil(handle)
    assert.matches("truncated", err.message)
  end)
end)
