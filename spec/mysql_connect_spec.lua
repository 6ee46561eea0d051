--- Getting to a server: the forms of a DSN, TLS, credentials, option files, and that
-- no password is ever told. Which servers are refused is in mysql_refusals_spec.

local uv = require "luv"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local USER, PASSWORD = "hierlock_spec", "p@s:s/w?r#d%&=' x"

local function encoded(text)
  return (text:gsub("[^%w]", function(c) return ("%%%02X"):format(c:byte()) end))
end

local function write_file(name, text)
  local file = assert(io.open(name, "w"))
  file:write(text)
  file:close()
end

-- A host that offers no TLS: what a server says of itself, without that flag.
local function without_tls(data, first)
  if not first then return data end
  local position = data:find("\0", 6, true) + 4 + 8 + 1 + 2 -- id, challenge, filler
  local flags = data:byte(position)
  if flags % 16 >= 8 then flags = flags - 8 end
  return data:sub(1, position - 1) .. string.char(flags) .. data:sub(position + 1)
end

-- Whether the client library can log in without its plugins.
local logged_in = {}

support.each_server(function(store)
  local environment = "HIERLOCK_" .. store.name:upper()
  local user, password, host, port, database =
    (store.bare_dsn or ""):match("//(.-):(.-)@(.-):(%d+)/([^?]*)")
  local scratch, between, opened

  before_each(function() opened = {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    if between then between.close() end
    if scratch then os.execute("rm -rf " .. scratch) end
    if store.root() then store.root():query("DROP USER IF EXISTS " .. USER .. "@'%'") end
    between, scratch = nil, nil
  end)

  local function directory()
    scratch = os.tmpname()
    os.remove(scratch)
    os.execute("mkdir " .. scratch)
    return scratch
  end

  local function options(more)
    local all = { buckets = store.options.buckets }
    for name, value in pairs(more or {}) do all[name] = value end
    return all
  end

  local function try(dsn, more)
    local manager, err = hierlock.open(dsn, options(more))
    opened[#opened + 1] = manager
    return manager, err
  end

  -- Shows that the manager locks the same rows as the store's own.
  local function assert_locks(manager)
    local ours = support.open(store)
    opened[#opened + 1] = ours
    local handle = assert(manager:acquire { "u1", "a1", "r1" })
    local none, err = ours:acquire({ "u1", "a1", "r1" }, { timeout = 0 })
    assert.is_nil(none)
    assert.equal("timeout", err.code)
    assert.is_true(handle:release { confirm = true })
  end

  local function url(parameters, fields)
    fields = fields or {}
    return ("mysql://%s:%s@%s:%s/%s?table=%s%s"):format(fields.user or user,
      fields.password or password, fields.host or host, fields.port or port, database,
      store.table, parameters and "&" .. parameters or "")
  end

  local function make_user(requirement)
    local root = store.root() or pending("no administrator here")
    root:query("CREATE USER %s@'%%' IDENTIFIED BY '%s' %s", USER, (PASSWORD:gsub("'", "''")),
               requirement or "")
    root:query("GRANT ALL ON %s.* TO %s@'%%'", database, USER)
    return { user = USER, password = encoded(PASSWORD) }
  end

  describe("a DSN", function()
    local function forms()
      local go = "%s:%s@tcp(%s:%s)/%s?table=%s"
      local socket = os.getenv(environment .. "_SOCKET")
      return {
        ["mysql://"] = url(),
        ["mariadb://"] = url():gsub("^mysql", "mariadb"),
        ["the Go driver's form"] = go:format(user, password, host, port, database, store.table),
        ["the Go driver's form with its parameters"] = go:format(user, password, host, port,
          database, store.table) .. "&parseTime=true&multiStatements=true&loc=Local" ..
          "&charset=utf8mb4&collation=utf8mb4_bin&interpolateParams=true",
        ["a socket as parameter"] = socket and
          url("socket=" .. encoded(socket), { host = "localhost" }),
        ["a socket in the Go driver's form"] = socket and
          ("%s:%s@unix(%s)/%s?table=%s"):format(user, password, socket, database, store.table),
        ["everything percent-encoded"] = ("mysql://%s:%s@%s:%s/%s?table=%s"):format(
          encoded(user), encoded(password), encoded(host), port, encoded(database),
          encoded(store.table)),
      }
    end
    for _, title in ipairs { "mysql://", "mariadb://", "the Go driver's form",
                             "the Go driver's form with its parameters", "a socket as parameter",
                             "a socket in the Go driver's form", "everything percent-encoded" } do
      it("leads to the same locks: " .. title, function()
        local dsn = forms()[title] or pending("no socket here")
        assert_locks(assert(try(dsn)))
      end)
    end

    it("carries any password, percent-encoded in a URL and as it is in the Go form", function()
      local account = make_user()
      assert_locks(assert(try(url(nil, account))))
      assert_locks(assert(try(("%s:%s@tcp(%s:%s)/%s?table=%s"):format(
        USER, PASSWORD, host, port, database, store.table))))
    end)

    it("with an unknown parameter is refused by that name", function()
      local manager, err = try(url("tabel=x"))
      assert.is_nil(manager)
      assert.equal("dsn", err.code)
      assert.is_false(err.retryable)
      assert.truthy(err.message:find("tabel", 1, true))
    end)

    it("may leave host, user and password to an option file", function()
      local home = directory()
      write_file(home .. "/.my.cnf", ("[spec-group]\nhost=%s\nport=%s\nuser=%s\npassword=%s\n")
        :format(host, port, user, password))
      local output, status = support.run(([[
        local hierlock = require "hierlock"
        local manager = assert(hierlock.open(%q, {buckets = %d}))
        assert(manager:acquire {"u1", "a1", "r1"}):release {confirm = true}
        manager:close()
        local none, err = hierlock.open(%q, {buckets = %d})
        print(none, err.code)
      ]]):format("mysql:///" .. database .. "?my_cnf_group=spec-group&table=" .. store.table,
        store.options.buckets,
        "mysql:///" .. database .. "?connect_timeout=1&my_cnf_group=no-such-group&table=" ..
        store.table, store.options.buckets),
        "HOME=" .. home)
      assert.equal(0, status, output)
      assert.equal("nil\tconnection\n", output)
    end)
  end)

  describe("credentials", function()
    it("that are refused are an error that trying again does not mend", function()
      local manager, err = try(url(nil, { password = "Not-The-Password" }))
      assert.is_nil(manager)
      assert.equal("connection", err.code)
      assert.is_false(err.retryable)
      assert.equal(1045, err.errno)
      assert.equal("28000", err.sqlstate)
    end)

    -- Connector/C without its plugins cannot log in to MySQL, libmysqlclient 9
    -- not to MariaDB.
    it("that the client library does not know are one, too", function()
      local output = support.run(([[
        local manager, err = require("hierlock").open(%q, {buckets = %d})
        print(manager and "opened" or err.code, err and err.retryable, err and err.errno, err and err.message)
      ]]):format(url(), store.options.buckets), "MARIADB_PLUGIN_DIR=/nowhere LIBMYSQL_PLUGIN_DIR=/nowhere")
      local unknown = output:find("^connection\tfalse\tnil\t.*plugin.*hierlock was built with cannot log in")
        or output:find("^connection\tfalse\t1045\t.*Plugin") -- as Connector/C has it
      assert.is_truthy(unknown or output:find("^opened"), output)
      logged_in[store.name] = not unknown
      assert.is_falsy(logged_in.mysql and logged_in.mariadb)
    end)

    it("do not show in any text", function()
      local secret = "Geheim-4711"
      local account = { password = secret }
      local texts = {}
      for _, dsn in ipairs {
        url(nil, account), url("tabel=x", account), url("tls=perhaps", account),
        url(nil, { password = secret, port = "0" }), url(nil, { password = secret, port = "x" }),
        url(nil, { password = secret .. "%zz" }), url(nil, { password = secret .. "?a/b" }),
        url(nil, { password = secret .. "@" .. secret, host = "[::1" }),
        "mysqll://" .. user .. ":" .. secret .. "@" .. host .. "/" .. database,
        user .. ":" .. secret .. "@tcp(" .. host, user .. ":" .. secret,
        user .. ":" .. secret .. "@tcp(" .. host .. ":x)/" .. database,
        url("tls_ca=/nowhere&tls=verify-ca", account), url("socket=/nowhere", account),
      } do
        local manager, err = try(dsn)
        assert.is_nil(manager)
        for _, value in pairs(err) do texts[#texts + 1] = tostring(value) end
        texts[#texts + 1] = tostring(err) .. ("" .. err)
      end
      local manager = assert(try(url()))
      local handle = assert(manager:acquire { "u1", "a1", "r1" })
      for _, text in ipairs(texts) do
        assert.is_nil(text:find(secret, 1, true), text)
      end
      for _, object in ipairs { manager, handle } do
        assert.is_nil(tostring(object):find(password, 1, true))
      end
      handle:release()
    end)

    it("need few privileges; one that is missing is told", function()
      local account = make_user()
      local root = store.root()
      root:query("REVOKE ALL ON %s.* FROM %s@'%%'", database, USER)
      root:query("GRANT SELECT ON %s.%s TO %s@'%%'", database, store.table, USER)
      root:query("GRANT SELECT ON %s.hier_lock_meta TO %s@'%%'", database, USER)
      if store.dialect == "mysql" then
        local manager = assert(try(url(nil, account)))
        local handle, err = manager:acquire { "u1", "a1", "r1" }
        assert.is_nil(handle)
        assert.equal("store", err.code)
        assert.equal(1142, err.errno)
        assert.matches("; GRANT UPDATE ON %S*" .. store.table .. "%S* to it$", err.message)
        root:query("GRANT UPDATE ON %s.%s TO %s@'%%'", database, store.table, USER)
      end
      assert_locks(assert(try(url(nil, account))))
    end)
  end)

  local ca = os.getenv(environment .. "_CA")

  describe("TLS", function()

    local function another_ca()
      local name = directory()
      local made = os.execute(("openssl req -x509 -days 2 -noenc -newkey ec -pkeyopt " ..
        "ec_paramgen_curve:prime256v1 -subj '/CN=another CA' -keyout %s/key -out %s/ca.pem " ..
        "2>/dev/null"):format(name, name))
      assert(made == true or made == 0)
      return name .. "/ca.pem"
    end

    for _, mode in ipairs { "off", "preferred", "required", "verify-ca", "verify-identity" } do
      local encrypts = mode ~= "off"
      it("is " .. (encrypts and "used" or "not used") .. " with tls=" .. mode, function()
        if not ca then pending("no certificate here") end
        local parameters = "tls=" .. mode .. (mode:find("verify") and "&tls_ca=" .. ca or "")
        assert_locks(assert(try(url(parameters))))
        -- A user who may only come over TLS shows whether it is.
        local account = make_user("REQUIRE SSL")
        local manager, err = try(url(parameters, account))
        assert.equal(encrypts, manager ~= nil)
        if not encrypts then
          assert.equal("connection", err.code)
          assert.is_false(err.retryable)
        end
      end)
    end

    it("is refused under tls=verify-ca and verify-identity when the CA is another", function()
      if not ca then pending("no certificate here") end
      local other = another_ca()
      for _, mode in ipairs { "verify-ca", "verify-identity" } do
        local manager, err = try(url("tls=" .. mode .. "&tls_ca=" .. other))
        assert.is_nil(manager)
        assert.equal("connection", err.code)
      end
    end)

    it("looks at the host's name under tls=verify-identity, and only there", function()
      if not ca then pending("no certificate here") end
      local elsewhere = { host = "127.1" } -- the same address; the certificate does not say so
      assert(try(url("tls=verify-ca&tls_ca=" .. ca, elsewhere)))
      local manager, err = try(url("tls=verify-identity&tls_ca=" .. ca, elsewhere))
      assert.is_nil(manager)
      assert.equal("connection", err.code)
    end)

    it("needs a CA to verify by", function()
      for _, mode in ipairs { "verify-ca", "verify-identity" } do
        local manager, err = try(url("tls=" .. mode))
        assert.is_nil(manager)
        assert.equal("dsn", err.code)
        assert.truthy(err.message:find("tls_ca", 1, true))
      end
    end)

    it("is not given up silently when the server offers none", function()
      if not ca then pending("no certificate here") end
      between = proxy.open(store, without_tls)
      local peer = support.process(nil)
      local expected = { off = "open", preferred = "open", required = "connection",
                         ["verify-ca"] = "connection", ["verify-identity"] = "connection" }
      local seen = {}
      for mode in pairs(expected) do
        local dsn = between.dsn:gsub("tls=off", "tls=" .. mode) ..
                    (mode:find("verify") and "&tls_ca=" .. ca or "")
        seen[mode] = peer:call([[
          local dsn, options = ...
          local manager, err = hierlock.open(dsn, options)
          if not manager then return err.code end
          local handle = assert(manager:acquire {"u1", "a1", "r1"})
          handle:release {confirm = true}
          manager:close()
          return "open"
        ]], dsn, options())
      end
      assert.same(expected, seen)
    end)

    -- A new user, as servers remember the passwords that they have seen.
    it("is not given up with the password: preferred never sends it in clear text, and what " ..
       "requires TLS says nothing at all to a server without", function()
      if not ca then pending("no certificate here") end
      between = proxy.open(store, without_tls, "preferred")
      local peer = support.process(nil)
      for _, parameters in ipairs { "tls=preferred", "tls=preferred&tls_ca=" .. ca, "tls=required",
                                    "tls=verify-ca&tls_ca=" .. ca, "tls=verify-identity&tls_ca=" .. ca } do
        local account = make_user()
        account.port = between.dsn:match(":(%d+)/")
        between.sent = ""
        local opened_it, message = peer:call([[
          local manager, err = hierlock.open(...)
          if not manager then return false, err.code .. ": " .. err.message end
          assert(manager:acquire {"u1", "a1", "r1"}):release {confirm = true}
          manager:close()
          return true
        ]], url(parameters, account), options())
        assert.is_nil(between.sent:find(PASSWORD, 1, true), parameters)
        if parameters:find("preferred") then
          assert.is_true(opened_it, message)
          assert.is_truthy(between.sent:find(USER, 1, true))
        else
          assert.is_false(opened_it)
          assert.matches("^connection: ", message)
          assert.equal("", between.sent, parameters)
        end
        store.root():query("DROP USER " .. USER .. "@'%'")
      end
    end)
  end)

  describe("the process", function()
    it("keeps what it does with SIGPIPE, and outlives a connection that ended, also over TLS", function()
      local account = make_user()
      local output, status = support.run(([[
        local hierlock = require "hierlock"
        local function ignored()
          local mask = io.open("/proc/self/status"):read("*a"):match("SigIgn:%%s*(%%x+)")
          return math.floor(tonumber(mask:sub(-4), 16) / 4096) %% 2
        end
        local before = ignored()
        local manager = assert(hierlock.open(%q, {buckets = %d}))
        local handles = {}
        for i = 1, 4 do handles[i] = assert(manager:acquire {"u" .. i}) end
        for i = 1, 2 do assert(handles[i]:release {confirm = true}) end
        print(before, ignored())
        local other = require("hierlock.store.mysql").connect(%q, "spec")
        for _, row in ipairs(other:query("SELECT ID FROM information_schema.PROCESSLIST WHERE " ..
                                         "USER='%s' AND ID<>CONNECTION_ID()")) do
          other:query("KILL " .. row[1])
        end
        for i = 3, 4 do handles[i]:release() end
        for i = 1, 4 do handles[i] = assert(manager:acquire {"u" .. i}) end
        manager:close()
        print "alive"
      ]]):format(url("tls=preferred", account), store.options.buckets, url("tls=preferred", account), USER),
        "env --default-signal=PIPE")
      assert.equal(0, status, output)
      assert.equal("0\t0\nalive\n", output)
    end)

    support.it_where_waits_are_told("does not hand a connection that is being made to the programs that it starts", function()
      between = proxy.open(store)
      local peer = support.process(nil)
      local before = peer:call([[
        local dsn, options = ...
        function sockets()
          local list = io.popen("ls -l /proc/self/fd")
          local _, n = list:read("*a"):gsub("socket:", "")
          list:close()
          return n
        end
        manager = assert(hierlock.open(dsn, options))
        handles.h = assert(manager:acquire {"u1"})
        return sockets()
      ]], between.dsn, options())
      between.freeze()
      between.drip(nil, 1000000)
      assert.equal(before, peer:call([[
        handles.p = assert(manager:start({"u2"}, {timeout = 9}))
        local deadline = support.now() + 5
        local function all() -- ours, those of programs not among them
          local n = 0
          for name in io.popen("ls -l /proc/$PPID/fd 2>/dev/null"):lines() do
            if name:find("socket:") then n = n + 1 end
          end
          return n
        end
        local first = all()
        while all() == first and support.now() < deadline do support.sleep(0.01) end
        return sockets()
      ]]))
      peer:call("handles.p:cancel() return true")
    end)
  end)

  describe("a server that cannot be reached", function()
    it("is an error that may pass", function()
      local manager, err = try(url(nil, { port = "1" }))
      assert.is_nil(manager)
      assert.equal("connection", err.code)
      assert.is_true(err.retryable)
    end)

    support.it_where_waits_are_told("is given up after connect_timeout when it speaks too slowly, whatever it is about to say",
       function()
      for _, tls in ipairs { "off", ca and "required" or "preferred" } do
        between = proxy.open(store, nil, tls)
        between.drip(nil, 100)
        local code, took = support.process(nil):call([[
          local begun = support.now()
          local manager, err = hierlock.open(...)
          return manager and "open" or err.code, support.now() - begun
        ]], between.dsn .. "&connect_timeout=1", options())
        assert.equal("connection", code)
        assert.is_true(took < 4, took .. " s")
        between.close()
        between = nil
      end
    end)

    -- MySQL's thread that executes a KILL closes the socket of the killed one, whose thread may be about to write to it.
    support.it_where_waits_are_told("is tried again when it begins with an answer to another connection", function()
      for _, answer in ipairs { "\23\3\3\0\28" .. ("x"):rep(28), "\7\0\0\1\0\0\0\2\0\0\0" } do
        local n = 0
        between = proxy.open(store, function(data, first)
          n = n + (first and 1 or 0)
          return first and n == 1 and answer .. data or data
        end)
        assert.equal("open", support.process(nil):call([[
          local manager, err = hierlock.open(...)
          if not manager then return tostring(err) end
          manager:close()
          return "open"
        ]], between.dsn, options()))
        between.close()
        between = nil
      end
    end)

    it("is given up after connect_timeout when it does not say a word", function()
      local silent = uv.new_tcp()
      finally(function() silent:close() uv.run("nowait") end)
      assert(silent:bind("127.0.0.1", 0))
      assert(silent:listen(8, function() end))
      local begun = support.now()
      local manager, err = try(url("connect_timeout=1", { port = silent:getsockname().port }))
      local took = support.now() - begun
      assert.is_nil(manager)
      assert.equal("connection", err.code)
      assert.is_true(err.retryable)
      assert.is_true(took < 3, took .. " s")
    end)
  end)
end)
