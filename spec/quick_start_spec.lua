--- The quick start of docs/waiting.md, as it is printed there: its nginx.conf is started, and asked what its
-- command lines ask. Only ports and the names of the database are the spec's own.
--
-- nginx's Lua is LuaJIT, so these specs are for LuaJIT. Where lua-resty-mysql is not on the package path, its part is
-- pending, and says so.
if not rawget(_G, "jit") then return pending "quick_start: skipped: needs LUAS=luajit" end

local uv = require "luv"
local hierlock = require "hierlock"
local support = require "spec.support"

local DATABASE = "hierlock_quick_start"
local NGINX = "/usr/sbin/nginx"

local function exists(name)
  local file = io.open(name, "rb")
  return file and file:close() and true
end

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

-- ------------------------------------------------------------ the output

local printed = assert(read_file("docs/waiting.md"):match("\n## Quick start.-\n(.-)\n## "), "there is no quick start")

-- The blocks of a language, in their order.
local function blocks(language)
  local found = {}
  for text in printed:gmatch("\n```" .. language .. "\n(.-\n)```\n") do found[#found + 1] = text end
  assert(#found > 0, "the quick start has no block of " .. language)
  return found
end

-- The paths that its curl asks for, by their first word.
local function paths()
  local found = {}
  for path in table.concat(blocks "sh"):gmatch("curl http://127%.0%.0%.1:8080(/[%w/]+)") do
    found[path:match("^/(%l+)")] = path
  end
  return found
end

-- Exactly once.
local function replace(text, old, new)
  local from, to = text:find(old, 1, true)
  assert(from, "the quick start does not say: " .. old)
  return text:sub(1, from - 1) .. new .. text:sub(to + 1)
end

describe("the quick start of nginx", function()
  it("names the packages that the specs of nginx need", function()
    local needed, command = read_file("spec/support/deps.sh"), blocks("sh")[1]
    for _, package_name in ipairs { "gcc", "libc6-dev", "make", "pkg-config", "libmariadb-dev", "luajit2", "libluajit2-5.1-dev",
                                    "nginx", "libnginx-mod-http-lua", "lua-resty-core" } do
      for _, text in ipairs { needed, command } do
        assert.is_truthy((text:gsub("[%s;]", "  ") .. " "):find(" " .. package_name .. " ", 1, true), package_name)
      end
    end
  end)

  if not exists(NGINX) or not exists("/usr/lib/nginx/modules/ngx_http_lua_module.so") then
    local missing = "Debian's nginx with Lua cannot be had here (nginx, libnginx-mod-http-lua)"
    local required = " " .. (os.getenv("HIERLOCK_REQUIRE") or "") .. " "
    if required:find(" nginx ", 1, true) then
      it("has an nginx", function() error(missing) end)
    else
      pending(missing)
    end
    return
  end

  support.each_store(function(store)
    local directory, process, exited, port, dsn, manager
    local has_table = store.server and store.dialect ~= "postgresql"

    local function wait_until(condition, what)
      return support.wait_until(function()
        uv.run "nowait"
        return condition()
      end, what)
    end

    local function said() return read_file(directory .. "/output") end

    -- Two, told apart while both are there.
    local function free_ports()
      local probes, ports = { uv.new_tcp(), uv.new_tcp() }, {}
      for i, probe in ipairs(probes) do
        assert(probe:bind("127.0.0.1", 0))
        ports[i] = probe:getsockname().port
      end
      for _, probe in ipairs(probes) do probe:close() end
      uv.run "nowait"
      return ports[1], ports[2]
    end

    -- Asks, and does not wait: when the answer has come, it has `status` and `body`.
    local function ask(path)
      local tcp, self, text = uv.new_tcp(), {}, ""
      local function close()
        if not tcp:is_closing() then tcp:close() end
        self.closed = true
      end
      tcp:connect("127.0.0.1", port, function(err)
        if err then return close() end
        tcp:write(("GET %s HTTP/1.0\r\nHost: localhost\r\n\r\n"):format(path))
        tcp:read_start(function(_, data)
          if data then text = text .. data return end
          self.status, self.body = tonumber(text:match("^HTTP/1.1 (%d+)")), text:match("\r\n\r\n(.*)$")
          close()
        end)
      end)
      return self
    end

    local function answer(request)
      wait_until(function() return request.closed end, "an answer\n" .. said())
      return request
    end

    local function get(path) return answer(ask(path)) end

    setup(function()
      directory, exited = assert(uv.fs_mkdtemp("/tmp/hierlock-nginx-XXXXXX")), false
      local backend
      port, backend = free_ports()
      local config = blocks("nginx")[1]
      config = config:gsub("127%.0%.0%.1:8080", "127.0.0.1:" .. port):gsub("127%.0%.0%.1:8081", "127.0.0.1:" .. backend)
      dsn = store.server and store.bare_dsn or "file:" .. directory .. "/locks"
      if has_table then
        local root = store.root()
        if not root then return end
        root:query("DROP DATABASE IF EXISTS " .. DATABASE)
        root:query("CREATE DATABASE " .. DATABASE)
        root:query("USE " .. DATABASE)
        support.provision(root, "hier_lock_buckets", 100)
        for statement in blocks("sql")[1]:gmatch("(.-);\n") do
          if not statement:find("^GRANT") then root:query(statement) end
        end
        local user, password, host, server_port = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/")
        root:query(("GRANT ALL ON %s.* TO %s@'%%'"):format(DATABASE, user))
        config = replace(config, 'host = "127.0.0.1", port = 3306, database = "shop", user = "app", password = "secret"',
          ("host = %q, port = %d, database = %q, user = %q, password = %q"):format(host, server_port, DATABASE, user, password))
        dsn = store.bare_dsn:gsub("/[^/]*$", "/" .. DATABASE)
      end
      local file = assert(io.open(directory .. "/nginx.conf", "w"))
      file:write(config)
      file:close()

      local environment = { "HIERLOCK_DSN=" .. dsn }
      for name, value in pairs(uv.os_environ()) do
        if name ~= "HIERLOCK_DSN" then environment[#environment + 1] = name .. "=" .. value end
      end
      local output = assert(uv.fs_open(directory .. "/output", "w", 384))
      -- Workers of root's nginx run as user nobody, which may not enter this checkout.
      process = assert(uv.spawn(NGINX, {
        args = { "-p", directory, "-e", "stderr", "-c", "nginx.conf", uv.getuid() == 0 and "-g" or nil, "user root;" },
        stdio = { nil, output, output },
        env = environment,
      }, function() exited = true end))
      uv.fs_close(output)
      wait_until(function() return exited or exists(directory .. "/nginx.pid") and get("/").status end, "nginx")
      assert(not exited, said())
      manager = assert(hierlock.open(dsn, { timeout = 15 }))
    end)

    teardown(function()
      if manager then manager:close() end
      if process then
        if not exited then process:kill("sigterm") end
        wait_until(function() return exited end, "nginx's end")
        process:close()
        uv.run "nowait"
      end
      os.execute("rm -rf '" .. directory .. "'")
      if has_table and store.root() then store.root():query("DROP DATABASE IF EXISTS " .. DATABASE) end
    end)

    -- A request that waits: as the server sees it, or the embedded store's directory.
    local function wait_for_waiter(target)
      wait_until(function()
        if store.server then return store.waiting() > 0 end
        for _, holder in ipairs(assert(manager:holders(target))) do
          if holder.waiting then return true end
        end
      end, "a waiter\n" .. said())
    end

    local function assert_held(...)
      local handle, err = manager:acquire({ ... }, { timeout = 0 })
      assert.is_nil(handle)
      assert.equal("timeout", err.code)
    end

    if has_table and not store.root() then
      pending "no administrator here"
      return
    end

    it("holds the account in access until the backend has answered", function()
      local mine = assert(manager:acquire { "u1", "a1" })
      local request = ask(paths().proxy)
      wait_for_waiter { "u1", "a1" }
      assert.is_falsy(request.closed)
      mine:release()
      assert.equal("from the backend\n", answer(request).body, said())
      assert(manager:acquire { "u1", "a1" }):release()
    end)

    it("lets the second of two requests for one account wait for the first", function()
      local path = paths().content
      local one = ask(path)
      wait_until(function()
        local free = manager:acquire({ "u1", "a1" }, { timeout = 0 })
        if free then free:release { confirm = true } end
        return not free
      end, "the first request")
      local two = ask(path)
      local waited, token = answer(one).body:match("^waited ([%d.]+) s, token (%x+)\n$")
      local later, greater = answer(two).body:match("^waited ([%d.]+) s, token (%x+)\n$")
      assert(tonumber(later) > tonumber(waited), said())
      assert(greater > token)
    end)

    it("says 503 when the account stays held", function()
      local mine = assert(manager:acquire { "u1", "a1" })
      local request = get(paths().content)
      mine:release()
      assert.equal(503, request.status)
      assert.matches("timeout: u1/a1", said())
    end)

    if has_table then
      for _, name in ipairs { "resty.mysql", "resty.sha256" } do
        if not package.searchpath(name, package.path) then
          pending("the quick start's transaction: lua-resty-mysql is not on the package path: " .. name)
          return
        end
      end

      it("transfers in a transaction of its own, behind who holds one of the accounts", function()
        local path = paths().transfer
        local user, from, to = path:match("^/transfer/(%w+)/(%w+)/(%w+)$")
        local mine = assert(manager:acquire { user, to })
        local request = ask(path)
        wait_for_waiter()
        assert.is_falsy(request.closed)
        mine:release()
        assert.equal("transferred\n", answer(request).body, said())
        for _ = 1, 2 do assert.equal("transferred\n", get(path).body, said()) end
        local balances = {}
        for _, row in ipairs(store.root():query("SELECT id, balance FROM %s.account", DATABASE)) do
          balances[row[1]] = tonumber(row[2])
        end
        assert.same({ [from] = 70, [to] = 130 }, balances)
        assert(manager:acquire({ user })):release()
      end)

      it("transfers nothing when it is not granted", function()
        local path = paths().transfer
        local user, from = path:match("^/transfer/(%w+)/(%w+)/%w+$")
        local mine = assert(manager:acquire { user, from })
        assert.equal(503, get(path).status)
        assert_held(user, from)
        mine:release()
        assert.equal("70", tostring(store.root():query("SELECT balance FROM %s.account WHERE id='%s'", DATABASE, from)[1][1]))
        assert(manager:acquire({ user })):release()
      end)
    end
  end)
end)
