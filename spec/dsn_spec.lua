-- Data source names: which are understood, which are refused with what word, and that no password is ever shown.
-- spec/core/test_core.c checks the parts of a DSN; this spec checks the view of a program. Port 1 has no server, so
-- a DSN of MySQL that was understood ends in `connection`.

local hierlock = require "hierlock"
local support = require "spec.support"

local MARKER = "SECRETMARKER"
local BUILT = pcall(require, "hierlock.store.mysql")

local function fails(dsn)
  local manager, err = hierlock.open(dsn, { timeout = 1 })
  if manager then manager:close() end
  assert.is_nil(manager, dsn)
  assert.is_true(hierlock.is_error(err))
  return err
end

local function urlencode(text)
  return (text:gsub("[^%w]", function(c) return ("%%%02x"):format(c:byte()) end))
end

describe("a DSN that is understood", function()
  local function understood(title, dsn, shown)
    it("may be " .. title, function()
      local err = fails(dsn)
      assert.equal(BUILT and "connection" or "store", err.code, tostring(err))
      if BUILT and shown then assert.matches(shown, err.message, 1, true) end
    end)
  end

  understood("mysql://", "mysql://u:p@127.0.0.1:1/db", "127.0.0.1")
  understood("mariadb://", "mariadb://u:p@127.0.0.1:1/db", "127.0.0.1")
  understood("in capitals, as for its scheme", "MySQL://u:p@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL without user", "mysql://127.0.0.1:1/db", "127.0.0.1")
  understood("a URL without password", "mysql://u@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL with an empty password", "mysql://u:@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL with IPv6", "mysql://u:p@[::1]:1/db", "::1")
  understood("a URL with percent signs in every part",
    "mysql://%75:%70@%31%32%37.0.0.1:1/%64%62?%74%61%62%6c%65=%74", "127.0.0.1")
  understood("a URL with an encoded odd password",
    "mysql://u:" .. urlencode(":@/?%#&=+ ") .. "@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL with ':' and '@' in the password", "mysql://u:a:b@c@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL with a socket", "mysql://u:p@/db?socket=/nonexistent/hierlock.sock", "/nonexistent/hierlock.sock")
  understood("a URL with every parameter", "mysql://u:p@127.0.0.1:1/db?tls=off&tls_ca=/x&tls_cert=/x&tls_key=/x"
    .. "&connect_timeout=1.5&table=t_$1", "127.0.0.1")
  understood("a URL whose '?' or '&' has nothing behind it", "mysql://u:p@127.0.0.1:1/db?table=t&", "127.0.0.1")
  understood("of Go's form", "u:p@tcp(127.0.0.1:1)/db", "127.0.0.1")
  understood("of Go's form with IPv6", "u:p@tcp([::1]:1)/db", "::1")
  understood("of Go's form without password", "u@tcp(127.0.0.1:1)/db", "127.0.0.1")
  understood("of Go's form without user", "tcp(127.0.0.1:1)/db", "127.0.0.1")
  understood("of Go's form with a socket", "u:p@unix(/nonexistent/hierlock.sock)/db", "/nonexistent/hierlock.sock")
  for _, password in ipairs { "a:b", "a@b", "a/b", "a?b", "a%b", "100%", "a(b", "a)b", "@tcp(", "a@tcp(x)/y", ":@/?%&=" } do
    understood("of Go's form with the plain password " .. password, "u:" .. password .. "@tcp(127.0.0.1:1)/db", "127.0.0.1")
  end
  for _, parameter in ipairs { "parseTime=true", "multiStatements=true", "loc=UTC", "loc=Europe%2FBerlin",
                               "charset=utf8mb4,utf8", "collation=utf8mb4_bin", "interpolateParams=true" } do
    understood("of Go's form with " .. parameter, "u:p@tcp(127.0.0.1:1)/db?" .. parameter, "127.0.0.1")
  end

  for _, dsn in ipairs { "null:", "NULL:", "file:%s", "file:%s/", "file://%s", "FILE:%s" } do
    it("may be " .. dsn:format("/directory"), function()
      local directory = support.stores[1].directory
      local manager, err = hierlock.open(dsn:format(directory), { buckets = support.stores[1].options.buckets })
      assert.is_truthy(manager, tostring(err))
      manager:close()
    end)
  end
  it("may name a directory with percent signs", function()
    local directory = support.stores[1].directory .. "/a%?b c"
    local manager = assert(hierlock.open("file:" .. urlencode(directory)))
    manager:close()
    assert.is_truthy(io.open(directory .. "/control", "rb")):close()
  end)
end)

describe("a DSN of PostgreSQL", function()
  if not pcall(require, "hierlock.store.postgresql") then return pending("the PostgreSQL store is not built") end

  local function understood(title, dsn, shown)
    it("may be " .. title, function()
      local err = fails(dsn)
      assert.equal("connection", err.code, tostring(err))
      assert.matches(shown, err.message, 1, true)
      assert.is_nil(tostring(err):find(MARKER, 1, true))
    end)
  end

  understood("postgresql://", "postgresql://u:" .. MARKER .. "@127.0.0.1:1/db", '"127.0.0.1", port 1 ')
  understood("postgres://", "postgres://u:p@127.0.0.1:1/db", "127.0.0.1")
  understood("a URL with IPv6", "postgresql://u:p@[::1]:1/db", "::1")
  understood("a URL with percent signs in every part",
    "postgresql://%75:%70@%31%32%37.0.0.1:1/%64%62?%73%73lmode=%64isable", "127.0.0.1")
  understood("a URL with a directory of sockets", "postgresql://u:p@%2Fnonexistent:1/db", "/nonexistent/.s.PGSQL.1")
  understood("a URL with a host as a parameter", "postgresql:///db?host=/nonexistent&port=1", "/nonexistent/.s.PGSQL.1")
  understood("a URL with several hosts", "postgresql://u:p@127.0.0.1:1,127.0.0.2:2,[::1]:3/db", '"::1", port 3 ')
  understood("a URL with ssl=true, as JDBC has it", "postgresql://127.0.0.1:1/db?ssl=true", "127.0.0.1")
  understood("a list", "host=127.0.0.1 port=1 dbname=db user=u password=" .. MARKER, '"127.0.0.1", port 1 ')
  understood("a list with spaces and quotes", [[  user = 'a \'b\\ c' password='x y' port=1 host = 127.0.0.1 ]], "127.0.0.1")
  understood("a list with several hosts", "host=127.0.0.1,127.0.0.2 port=1,2", '"127.0.0.2", port 2 ')

  local function refused(title, dsn, word)
    it(title .. " is refused, and the message says so", function()
      local err = fails(dsn)
      assert.equal("dsn", err.code, tostring(err))
      assert.matches(word, err.message)
      assert.is_nil(tostring(err):find(MARKER, 1, true))
    end)
  end

  refused("with an unknown parameter", "postgresql://u:p@127.0.0.1:1/db?time_out=3", "'time_out'")
  refused("a list with an unknown parameter", "host=127.0.0.1 table=x", "'table'")
  refused("with a parameter of MySQL's", "postgresql://u:p@127.0.0.1:1/db?tls=off", "'tls'")
  refused("with a parameter twice", "host=127.0.0.1 host=127.0.0.1", "'host' stands twice")
  refused("a list without '='", "host=127.0.0.1 " .. MARKER, "key=value")
  refused("a list with a quote that has no end", "host=127.0.0.1 password='" .. MARKER, "'password'.*without its end")
  refused("with a bad port", "postgresql://u:p@127.0.0.1:x/db", "port")
  refused("with a bad port of the second host", "postgresql://u:p@127.0.0.1:1,127.0.0.1:0/db", "port")
  refused("with a plain '@' behind a '/'", "postgresql://u:a/b" .. MARKER .. "@127.0.0.1/db", "write '@' as '%%40'")
  refused("with a bad connect_timeout", "postgresql://127.0.0.1:1/db?connect_timeout=soon", "connect_timeout")

  it("leaves to libpq what it does not say", function()
    local output = support.run([[print(require("hierlock").open("postgresql://"))]], "PGHOST=127.0.0.1 PGPORT=1")
    assert.matches('"127.0.0.1", port 1 ', output, 1, true)
  end)
end)

describe("a DSN of another maker's store", function()
  it("finds its module, and leaves the rest to it", function()
    local directory = os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "/of-folder"
    local manager = assert(hierlock.open("store+folder:" .. directory))
    assert.equal("lease", assert(manager:acquire { "u1" }).kind)
    manager:close()
    local err = fails("store+folder:" .. directory .. "?x=1")
    assert.equal("dsn", err.code)
    assert.matches("'x'", err.message)
  end)

  it("is refused where there is no such module, or no name", function()
    local err = fails "store+nothing:/x"
    assert.equal("store", err.code)
    assert.matches("store+nothing", err.message, 1, true)
    package.preload["hierlock.store.alias"] = function() return require "hierlock.store.folder" end
    assert.matches("no store 'store+alias': its module has the store 'store+folder'", fails("store+alias:/x").message, 1, true)
    for _, dsn in ipairs { "store+:/x", "store+Folder:/x", "store+a-b:/x", "store+folder", "store+" .. ("a"):rep(41) .. ":/x",
                           "store+u:SECRETMARKER@tcp(127.0.0.1:1)/d" } do
      err = fails(dsn)
      assert.is_true(err.code == "dsn" or err.code == "store", dsn)
      assert.is_nil(err.message:find("SECRETMARKER", 1, true))
    end
  end)

  it("names one of sixteen stores that a process may use", function()
    local output = support.run [[
      local hierlock = require "hierlock"
      for i = 1, 18 do print(i, select(2, hierlock.open("store+other" .. i .. ":")).code) end
      print("again", select(2, hierlock.open("store+other1:")).code)
    ]]
    assert.matches("16%s+store\n17%s+dsn\n18%s+dsn\nagain%s+store\n", output)
  end)
end)

describe("a DSN of Symfony Lock's StoreFactory", function()
  -- How it ends: opened, or a server that is not there was asked for; else, what the message says to write instead.
  local OPEN, ASKED = true, "connection"
  local forms = {
    ["flock"] = OPEN,
    ["flock://DIRECTORY"] = OPEN,
    ["flock://relative"] = "flock:///directory",
    ["flock:/directory"] = "flock:///directory",
    ["semaphore"] = "flock",
    ["in-memory"] = "file:",
    ["null"] = OPEN,
    ["pgsql+advisory://u:SECRETMARKER@127.0.0.1:1/d?serverVersion=15&charset=utf8"] = ASKED,
    ["postgres+advisory://u:SECRETMARKER@127.0.0.1:1/d"] = ASKED,
    ["postgresql+advisory://u:SECRETMARKER@127.0.0.1:1/d"] = ASKED,
    ["pgsql+advisory:host=127.0.0.1;port=1;dbname=d"] = ASKED,
    ["postgresql+advisory:host=h;dbname=d"] = "pgsql+advisory:host=",
    ["postgres+advisory:host=h;dbname=d"] = "pgsql+advisory:host=",
    ["postgres://u:SECRETMARKER@127.0.0.1:1/d"] = ASKED,
    ["pgsql:host=h;dbname=d"] = "pgsql+advisory:",
    ["pgsql://u:SECRETMARKER@h/d"] = "pgsql+advisory:",
    ["mysql:host=h;dbname=d"] = "mysql://user:password@host/database",
    ["mysql2://u:SECRETMARKER@h/d"] = "mysql://user:password@host/database",
    ["redis://127.0.0.1:1"] = ASKED,
    ["redis://:SECRETMARKER@127.0.0.1:1/2"] = ASKED,
    ["rediss://127.0.0.1:1"] = ASKED,
    ["valkey://127.0.0.1:1"] = ASKED,
    ["valkeys://127.0.0.1:1"] = ASKED,
    ["redis://SECRETMARKER@127.0.0.1:1"] = "redis://:password@host",
    ["redis:///var/run/redis.sock"] = "redis+unix://",
    ["redis://SECRETMARKER@/var/run/redis.sock/2"] = "redis+unix://",
    ["redis:///redis.sock"] = "redis+unix://",
    ["redis:///2?unheard=1"] = "unheard",
    ["redis://:SECRETMARKER@/2?unheard=1"] = "unheard",
    ["redis://h?dbindex=2"] = "database",
    ["redis:?host[h1]&host[h2:6379]"] = 'redis://host:6379 with interoperate = "symfony"',
    ["redis:?host[h1:26379]&redis_sentinel=service"] = "redis+sentinel://host:26379,host:26379?service=name",
    ["rediss:?host[h1]"] = "rediss://host:6379",
    ["valkey:?host[h1]"] = "valkey://host:6379",
    ["valkeys:?host[h1]"] = "valkeys://host:6379",
    ["memcached://127.0.0.1:1"] = ASKED,
    ["memcached://u:SECRETMARKER@h"] = "without a log-in",
    ["memcached:///var/run/memcached.sock"] = "memcached://host:11211",
    ["memcached:?host[h1]&host[h2]"] = "memcached://host:11211",
    ["sqlite:DIRECTORY/locks.db"] = OPEN,
    ["sqlite://DIRECTORY/locks.db"] = OPEN,
    ["sqlite::memory:"] = "sqlite:/path/to/file",
    ["sqlite:///:memory:"] = "sqlite:/path/to/file",
    ["sqlite3:///locks.db"] = "sqlite:/path",
    ["mongodb://h/d?collection=c"] = "postgresql://",
    ["mongodb+srv://u:SECRETMARKER@h/d"] = "postgresql://",
    ["zookeeper://h1:2181,h2:2181"] = "postgresql://",
    ["dynamodb://default/t?secret_key=SECRETMARKER"] = "postgresql://",
    ["mssql://u:SECRETMARKER@h/d"] = "postgresql://",
    ["sqlsrv:Server=h"] = "postgresql://",
    ["oci:dbname=d"] = "postgresql://",
    ["oci8://u:SECRETMARKER@h/d"] = "postgresql://",
    ["pdo_oci://u:SECRETMARKER@h/d"] = "postgresql://",
  }
  for dsn, ends in pairs(forms) do
    it(dsn .. (ends == OPEN and " is opened" or ends == ASKED and " asks for that server" or " is refused, and the message says what to write"), function()
      local manager, err = hierlock.open((dsn:gsub("DIRECTORY", support.stores[1].directory)), { timeout = 1 })
      local missing = not manager and err.code == "store" and err.message:match "hierlock%.store%.%a+"
      if manager then manager:close() end
      if missing then return pending(missing .. " is not built") end
      if ends == OPEN then
        assert.is_truthy(manager, tostring(err))
        return
      end
      assert.is_nil(manager)
      assert.is_nil(tostring(err):find(MARKER, 1, true))
      assert.equal(ends == ASKED and "connection" or "dsn", err.code, err.message)
      if ends ~= ASKED then assert.is_truthy(err.message:find(ends, 1, true), err.message) end
    end)
  end

  it("that is opened where Symfony keeps a table keeps nobody of Symfony's out, and says so where that is wanted", function()
    for _, dsn in ipairs { "mysql://u:p@127.0.0.1:1/d", "sqlite:/nowhere/x", "memcached://127.0.0.1:1", "null" } do
      local manager, err = hierlock.open(dsn, { interoperate = "symfony" })
      assert.is_nil(manager)
      if err.code ~= "store" then assert.equal("unsupported", err.code, err.message) end
    end
  end)
end)

describe("a DSN that is refused", function()
  local function refused(title, dsn, word)
    it(title .. ", and the message says so", function()
      local err = fails(dsn)
      assert.equal("dsn", err.code, tostring(err))
      assert.is_false(err.retryable)
      assert.matches(word, err.message)
    end)
  end

  refused("is empty", "", "empty")
  refused("has no scheme", "nonsense", "scheme")
  refused("has an unknown scheme", "pg://u:p@h/db",
    "unknown scheme 'pg' in the DSN: mysql, mariadb, postgresql, postgres, redis, rediss, redis%+unix, redis%+sentinel, valkey, valkeys, sqlite, " ..
    "memcached, file, null and quorum are known")
  refused("names no database", "mysql://u:p@127.0.0.1:1", "database")
  refused("names no database behind its '/'", "mysql://u:p@127.0.0.1:1/", "database")
  refused("has a '/' in its database", "mysql://u:p@127.0.0.1:1/a/b", "database")
  for _, port in ipairs { "0", "65536", "99999999999999999999", "-1", "1x", "", "x" } do
    refused("has the port '" .. port .. "'", "mysql://u:p@127.0.0.1:" .. port .. "/db", "port")
    refused("has the port '" .. port .. "' in Go's form", "u:p@tcp(127.0.0.1:" .. port .. ")/db", "port")
  end
  refused("has '[' without ']'", "mysql://u:p@[::1/db", "'%['")
  for _, part in ipairs { { "user", "%s:p@h/db" }, { "password", "u:%s@h/db" }, { "host", "u:p@%s/db" },
                          { "database", "u:p@h/%s" }, { "value", "u:p@h/db?table=%s" } } do
    refused("has half a percent sign in its " .. part[1], "mysql://" .. part[2]:format("a%2"), part[1])
    refused("has a bad percent sign in its " .. part[1], "mysql://" .. part[2]:format("%zz"), part[1])
    refused("has a NUL byte in its " .. part[1], "mysql://" .. part[2]:format("a%00b"), "NUL")
  end
  refused("has a NUL byte in its directory", "file:/tmp/a%00b", "NUL")
  refused("has a raw NUL byte", "null:\0", "NUL")
  refused("has a raw NUL byte in the middle", "mysql://u:p@127.0.0.1:1/db\0x", "NUL")
  refused("has an unknown parameter", "mysql://u:p@127.0.0.1:1/db?time_out=3", "'time_out'")
  refused("has an unknown parameter in Go's form", "u:p@tcp(127.0.0.1:1)/db?allowOldPasswords=1", "'allowOldPasswords'")
  refused("has a parameter twice", "mysql://u:p@127.0.0.1:1/db?table=a&table=b", "'table'")
  refused("has a parameter without value", "mysql://u:p@127.0.0.1:1/db?table", "parameter")
  refused("has a bad table", "mysql://u:p@127.0.0.1:1/db?table=a-b", "table")
  refused("has a bad tls", "mysql://u:p@127.0.0.1:1/db?tls=maybe", "tls")
  refused("wants to verify without a CA", "mysql://u:p@127.0.0.1:1/db?tls=verify-identity", "tls_ca")
  refused("has a bad connect_timeout", "mysql://u:p@127.0.0.1:1/db?connect_timeout=soon", "connect_timeout")
  refused("has an infinite connect_timeout", "mysql://u:p@127.0.0.1:1/db?connect_timeout=inf", "connect_timeout")
  for _, password in ipairs { "a?b", "a/b", "p@ss:w/rd", "p:12/w", "12/w", "/", "?", "a/b?c", "a?b/c", "[x/y" } do
    refused("has the unencoded password " .. password, "mysql://u:" .. password .. "@127.0.0.1:1/db",
      "password write '@' as '%%40', ':' as '%%3A', '/' as '%%2F', '%?' as '%%3F', '#' as '%%23' and '%%' as '%%25'")
  end
  refused("has a plain '@' in its database", "mysql://u:p@127.0.0.1:1/a@b", "database or parameter write '@' as '%%40'")
  refused("has a plain '@' in a parameter", "mysql://u:p@127.0.0.1:1/db?tls_ca=a@b", "database or parameter write '@' as '%%40'")
  refused("has a password without '@' and a host", "mysql://u:secret/db", "port.*password end with '@'")
  refused("has IPv6 without brackets", "mysql://u:p@::1/db", "port.*IPv6 address stands in %[ %]")
  refused("has a plain '/' in a parameter of Go's form", "u:p@tcp(127.0.0.1:1)/db?tls_ca=/etc/ca.pem",
    "in a parameter write '/' as '%%2F'")
  refused("has an unknown address in Go's form", "u:p@udp(127.0.0.1:1)/db", "address")
  refused("has '(' without ')' in Go's form", "u:p@tcp(127.0.0.1:1/db", "tcp%(host")
  refused("has a relative socket in Go's form", "u:p@unix(sock)/db", "unix")
  refused("has no '/' in Go's form", "u:p@tcp(127.0.0.1:1)", "/database")
  refused("has a parameter behind file:", "file:/tmp/x?mode=0700", "'mode'")
  refused("has a parameter behind null:", "null:?a=b", "'a'")
  refused("has something behind null:", "null:x", "null:")
  refused("has a host behind file:", "file://host/x", "file:")
end)

describe("the password", function()
  local templates = {
    "mysql://u:%s@127.0.0.1:1/db", "mariadb://u:%s@127.0.0.1:1/db?zz=1", "mysql://u:%s@127.0.0.1:x/db",
    "mysql://u:%s@127.0.0.1:1", "u:%s@tcp(127.0.0.1:1)/db", "u:%s@tcp(127.0.0.1:1/db", "u:%s@tcp(127.0.0.1:1)/db?zz=1",
    "u:%s@udp(h)/db", "u:%s@unix(x)/db", "u:%s@unix(/nonexistent)/db", "u:%s@tcp(127.0.0.1:1)", "u:%s", "u:%s@", "pg://u:%s@h/db",
    "mysql:u:%s@h/db", "mysql:/u:%s@h/db", "mysql//u:%s@h/db", "u:%s@127.0.0.1:1/db", "mysql://u:%s@[::1/db",
    "mysql://u:%s@127.0.0.1:1/db?a=1&a=2", "mysql://u:%s@127.0.0.1:1/a/b", "u:%s@/db?zz=1", "u:%s@tcp/db?zz=1",
  }
  local around = { "%s", "%%%s", "%s%%", "%%zz%s", "%%00%s", "/%s", "?%s", "?%s=1&%s=1", "?a=%s", "&%s=1", "@%s", ":%s",
                   "x@y?%s", "x@y:%s", "@tcp(%s", "@tcp(x)/%s", ")/%s?", "a/b?%s=1", "x/db?%s=1&%s=1", "[%s", "(%s)", "%%40%s" }
  it("is never in a message, wherever odd characters stand in it", function()
    local shown = {}
    for _, template in ipairs(templates) do
      for _, pattern in ipairs(around) do
        local password = pattern:gsub("%%%%", "\1"):gsub("%%s", MARKER):gsub("\1", "%%")
        local dsn = template:gsub("%%s", function() return password end)
        -- Hosts that would be looked up are not this spec's matter.
        local host = dsn:match("//[^/?]*/") or ""
        if not (dsn:find("^%a+://") and not host:find("127.0.0.1", 1, true) and dsn:find("[?/]" .. MARKER)) then
          local err = fails(dsn)
          if (tostring(err) .. err.message):find(MARKER, 1, true) then
            shown[#shown + 1] = dsn .. " -> " .. tostring(err)
          end
        end
      end
    end
    assert.equal("", table.concat(shown, "\n"))
  end)

  it("is not in the tostring of a manager", function()
    local manager = assert(hierlock.open("null:"))
    assert.matches("^hierlock%.manager", tostring(manager))
    manager:close()
  end)

  support.each_server(function(store)
    local function with_user(password, fn)
      local root = store.root()
      if not root then return pending("only an administrator can make users") end
      root:query("CREATE USER odd@'%' IDENTIFIED BY '" .. password:gsub("['\\]", "\\%0") .. "'")
      root:query("GRANT ALL ON mgl_test.* TO odd@'%'")
      local ok, err = pcall(fn, store.bare_dsn:match("@([^/]+)/"))
      root:query("DROP USER odd@'%'")
      assert(ok, err)
    end
    local password = [[:@/?%#&=+ '"\(x]]
    it("may have any character, in a URL by percent signs, in Go's form as it is", function()
      with_user(password, function(address)
        for _, dsn in ipairs { "mysql://odd:" .. urlencode(password) .. "@" .. address .. "/mgl_test?table=" .. store.table,
                               "odd:" .. password .. "@tcp(" .. address .. ")/mgl_test?table=" .. store.table } do
          local manager = assert(hierlock.open(dsn, store.options))
          assert(manager:acquire({ "dsn" })):release()
          manager:close()
        end
      end)
    end)
    it("is not in the message about a refused login", function()
      with_user(password, function(address)
        local err = fails("mysql://odd:" .. MARKER .. "@" .. address .. "/mgl_test")
        assert.equal("connection", err.code)
        assert.is_false(err.retryable)
        assert.is_number(err.errno)
        assert.is_nil(tostring(err):find(MARKER, 1, true))
      end)
    end)
  end)
end)

describe("random DSNs", function()
  -- The unknown parameter keeps those that happen to be right from a server; no
  -- scheme of a directory is among the letters.
  local pieces = { ":", "/", "@", "?", "&", "=", "%", "%41", "%00", "(", ")", "[", "]", "tcp(", "unix(", "\255", "\1", " ", "u", "0", "9" }
  it("are refused with a word, and never more", function()
    for i = 1, 3000 do
      local text = {}
      for j = 1, math.random(0, 25) do text[j] = pieces[math.random(#pieces)] end
      local dsn = ({ "mysql://", "mariadb://", "", "" })[i % 4 + 1] .. table.concat(text) .. (i % 2 == 0 and "?zz=1" or "/db?zz=1")
      local err = fails(dsn)
      assert.is_truthy(({ dsn = true, connection = true, store = not BUILT })[err.code], dsn .. " -> " .. tostring(err))
      assert.is_nil(err.message:find("[%c]"))
    end
  end)
  it("of a megabyte are refused as well", function()
    for _, c in ipairs { ":", "@", "?", "a", "%", "&a=" } do
      for _, scheme in ipairs { "mysql://", "u:p@tcp(", "" } do
        local err = fails(scheme .. c:rep(2 ^ 20) .. "/db?zz=1")
        assert.equal("dsn", err.code)
        assert.is_true(#err.message < 600)
      end
    end
  end)
end)

describe("without a DSN", function()
  local open = [[
    local manager, err = require("hierlock").open(nil, {buckets = 10000})
    print(manager or err)
    if manager then print(manager:acquire({"dsn"})) manager:close() end ]]
  it("$HIERLOCK_DSN is taken", function()
    local output, status = support.run(open, "HIERLOCK_DSN='pg://x'")
    assert.matches("unknown scheme 'pg'", output)
    assert.equal(0, status)
    local directory = support.stores[1].directory .. "/by-environment"
    output = support.run(open, "HIERLOCK_DSN='file:" .. directory .. "'")
    assert.matches("hierlock.manager %(open%)", output)
    assert.is_truthy(io.open(directory .. "/control", "rb")):close()
  end)
  it("and without a variable, the directory of the user is taken", function()
    local output = support.run([[print(require("hierlock").open())]], "unset HIERLOCK_DSN;")
    assert.matches("hierlock.manager %(open%)", output)
  end)
  it("an argument comes before the variable", function()
    local output = support.run([[print(require("hierlock").open("null:"))]], "HIERLOCK_DSN='pg://x'")
    assert.matches("hierlock.manager %(open%)", output)
  end)
end)

describe("the DSN of a quorum", function()
  it("may have each character of a store's DSN written with a percent sign", function()
    local words = {}
    local directory = support.stores[1].directory:gsub("/", "%%2F")
    for i = 1, 3 do words[i] = ("file%%3A%s%%2Fpercent%d"):format(directory, i) end
    local manager = assert(hierlock.open("quorum:majority;" .. table.concat(words, ";"), { buckets = 10000 }))
    assert(assert(manager:acquire({ "dsn" }, { timeout = 1 })):release())
    manager:close()
  end)
end)
