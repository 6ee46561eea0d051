--- Locks inside the program's own transaction with lua-resty-mysql, in a real nginx with one worker: a waiting
-- request lets others run. The chunk to run there comes with the request.
--
-- Debian has no package of lua-resty-mysql; where HIERLOCK_DRIVERS has none (CONTRIBUTING.md), this is pending, and says so.

local uv = require "luv"
local attach = require "hierlock.attach"
local hierlock = require "hierlock"
local support = require "spec.support"

local TABLE = "hierlock_spec_attach"
local DATA = "hierlock_spec_attach_data"
local BUCKETS = 1000
local R1 = { "u1", "a1", "r1" }
local MODULES = "/usr/lib/nginx/modules/"
local NGINX = os.getenv("HIERLOCK_NGINX") or "/usr/sbin/nginx"

local function exists(name)
  local file = io.open(name, "rb")
  return file and file:close() and true
end

-- nginx's Lua is LuaJIT, and so must be ours: elsewhere there is nothing to run.
if not rawget(_G, "jit") then return pending "attach_nginx: skipped: needs LUAS=luajit" end

local function missing()
  if not exists(NGINX) then return "there is no nginx (HIERLOCK_NGINX)" end
  for _, name in ipairs { "resty.mysql", "resty.sha256" } do
    if not package.searchpath(name, package.path) then return "lua-resty-mysql is not on the package path (HIERLOCK_DRIVERS): " .. name end
  end
end

-- nginx's own path of modules: the same.
local CONFIG = [[
%s
daemon off; master_process off; pid nginx.pid; error_log error.log info;
events { worker_connections 256; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  lua_package_path "%s"; lua_package_cpath "%s";
  init_by_lua_block {
    attach, hierlock = require "hierlock.attach", require "hierlock"
    options = { table = "%s", buckets = %d, timeout = 15 }
    -- Opens a new connection, in a transaction, and attaches to it.
    function connect(more)
      local db = assert(require("resty.mysql"):new())
      db:set_timeout(20000)
      assert(db:connect { host = "%s", port = %d, database = "%s", user = "%s", password = "%s" })
      assert(db:query "START TRANSACTION")
      local all = {}
      for k, v in pairs(options) do all[k] = v end
      for k, v in pairs(more or {}) do all[k] = v end
      return db, attach.resty_mysql(db, all)
    end
  }
  server {
    listen unix:%s/socket;
    location / {
      content_by_lua_block {
        ngx.req.read_body()
        local ok, result = pcall(assert(loadstring(ngx.req.get_body_data(), "=request")))
        ngx.print((ok and "" or "raised: ") .. tostring(result))
      }
    }
  }
}
]]

support.each_server(function(store)
  local reason = missing()
  if reason then
    pending("lua-resty-mysql in nginx: " .. reason)
    return
  end

  local directory, process, exited, managers

  local function wait_until(condition, what)
    return support.wait_until(function()
      uv.run("nowait")
      return condition()
    end, what)
  end

  local function read_log()
    local file = io.open(directory .. "/error.log")
    local text = file and file:read("*a") or ""
    if file then file:close() end
    return text
  end

  -- Sends a chunk to run; answer() waits for its result, as a string.
  local function send(chunk)
    local self = { text = "" }
    local pipe = uv.new_pipe(false)
    pipe:connect(directory .. "/socket", function(err)
      if err then
        self.failed = err
        return
      end
      pipe:write(("POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s"):format(#chunk, chunk))
      pipe:read_start(function(_, data)
        if data then self.text = self.text .. data else self.done = true end
      end)
    end)
    function self.is_done()
      uv.run("nowait")
      return self.done or self.failed
    end
    function self.answer()
      wait_until(self.is_done, "nginx's answer\n" .. read_log())
      pipe:close()
      uv.run "nowait"
      if self.failed then return nil, self.failed end
      return (self.text:match("^HTTP/1.1 200.-\r\n\r\n(.*)$") or self.text .. read_log())
    end
    return self
  end

  local function run(chunk) return send(chunk).answer() end

  setup(function()
    local sql = store.sql()
    sql:query("DROP TABLE IF EXISTS %s, %s", TABLE, DATA)
    support.provision(sql, TABLE, BUCKETS)
    sql:query("CREATE TABLE %s (id INT PRIMARY KEY, value INT) ENGINE=InnoDB", DATA)
    sql:query("INSERT INTO %s VALUES (1, 0)", DATA)

    directory, exited = assert(uv.fs_mkdtemp("/tmp/hierlock-nginx-XXXXXX")), false
    local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
    local modules = exists(MODULES .. "ngx_http_lua_module.so") and
      ("load_module %sndk_http_module.so; load_module %sngx_http_lua_module.so;"):format(MODULES, MODULES) or ""
    local file = assert(io.open(directory .. "/nginx.conf", "w"))
    file:write(CONFIG:format(modules, package.path, package.cpath, TABLE, BUCKETS, host, port, database, user, password,
                             directory))
    file:close()
    process = assert(uv.spawn(NGINX, { args = { "-p", directory, "-c", "nginx.conf" }, stdio = { nil, nil, 2 } },
                              function() exited = true end))
    wait_until(function() return exited or exists(directory .. "/nginx.pid") and run "return 1" == "1" end, "nginx")
    assert(not exited, read_log())
  end)

  teardown(function()
    if not exited then process:kill("sigterm") end
    wait_until(function() return exited end, "nginx's end")
    process:close()
    uv.run "nowait" -- luv crashes at the end of a state that has open handles
    os.execute("rm -rf '" .. directory .. "'")
    store.sql():query("DROP TABLE %s, %s", TABLE, DATA)
    store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
  end)

  before_each(function() managers = {} end)
  after_each(function()
    for _, manager in ipairs(managers) do manager:close() end
  end)

  local function open()
    local manager = assert(hierlock.open(store.bare_dsn .. "?table=" .. TABLE, { buckets = BUCKETS, timeout = 15 }))
    managers[#managers + 1] = manager
    return manager
  end

  describe("lua-resty-mysql in nginx", function()
    it("keeps other programs out until COMMIT, and waits for them while others run", function()
      local handle = assert(open():acquire(R1))
      local waiting = send [[
        local db, locks = connect()
        local ok, err = locks:acquire { "u1", "a1" }
        if not ok then return err end
        held = db
        return "locked"
      ]]
      wait_until(function()
        waiting.is_done()
        return store.waiting() == 1
      end, "the wait")
      assert.equal("2", run "return 1 + 1") -- by the only worker
      assert.is_nil(waiting.is_done())
      handle:release()
      assert.equal("locked", waiting.answer())
      -- A connection dies with its request; so does the lock.
      assert(open():acquire(R1, { timeout = 5 }))
    end)

    it("loses no update, with a program that uses LuaSQL", function()
      store.sql():query("UPDATE %s SET value=0", DATA)
      local requests = {}
      for i = 1, 20 do
        requests[i] = send(([[
          local db, locks = connect()
          for _ = 1, 5 do
            assert(locks:acquire { "u1", "a1" })
            local value = assert(db:query "SELECT value FROM %s")[1].value
            ngx.sleep(0.001)
            assert(db:query("UPDATE %s SET value=" .. value + 1))
            assert(db:query "COMMIT")
            assert(db:query "START TRANSACTION")
          end
          return db:close() and "done"
        ]]):format(DATA, DATA))
      end
      local raw = { execute = function(_, query) return store.sql():try(query) end }
      local locks = attach.luasql(raw, { table = TABLE, buckets = BUCKETS })
      for _ = 1, 20 do
        uv.run("nowait")
        store.sql():query("START TRANSACTION")
        assert(locks:acquire { "u1" })
        local value = store.sql():query("SELECT value FROM %s", DATA)[1][1]
        store.sql():query("UPDATE %s SET value=%d", DATA, value + 1)
        store.sql():query("COMMIT")
      end
      for _, request in ipairs(requests) do assert.equal("done", request.answer()) end
      assert.equal("120", store.sql():query("SELECT value FROM %s", DATA)[1][1])
    end)

    it("ends a wait at its timeout, and says what the server said", function()
      local handle = assert(open():acquire(R1))
      local answer = run [[
        local db, locks = connect()
        db:set_compact_arrays(true)
        ngx.update_time()
        local before = ngx.now()
        local ok, err = locks:acquire({ "u1" }, { timeout = 0.3 })
        ngx.update_time()
        local waited = ngx.now() - before
        local _, try = locks:acquire({ "u1" }, { timeout = 0 })
        db:close()
        return table.concat({ tostring(ok), tostring(hierlock.is_error(err)), err.code, err.errno, err.sqlstate, err.target.user,
                              tostring(waited >= 0.3 and waited < 0.55), try.code, try.errno }, " ")
      ]]
      assert.equal(store.dialect == "mysql" and "nil true timeout 3024 HY000 u1 true timeout 3572"
        or "nil true timeout 1969 70100 u1 true timeout 1205", answer)
      handle:release()
    end)

    it("waits longer than the driver would, if it knows its limit", function()
      local handle = assert(open():acquire(R1))
      local request = [[
        local db, locks = connect(%s)
        db:set_timeout(100)
        local _, err = locks:acquire({ "u1" }, { timeout = 0.5 })
        local again, sleep_err = db:query "SELECT SLEEP(0.5)"
        db:close()
        return err.code .. ", " .. tostring(again and "no limit" or sleep_err)
      ]]
      assert.matches("^connection, ", run(request:format ""))
      -- And the driver has its own limit again.
      assert.matches("^timeout, .*timeout$", run(request:format "{ socket_timeout = 0.1 }"))
      handle:release()
      assert.equal("true", run [[
        local db, locks = connect { socket_timeout = 0.1 }
        local ok, err = locks:acquire({ "u1" }, { timeout = math.huge })
        db:close()
        return ok or err]])
    end)

    it("leaves no connection in the pool whose answer is still to come", function()
      local held = assert(open():acquire(R1))
      assert.equal("connection true nil nil", run [[
        local db, locks = connect()
        db:set_timeout(100)
        local _, err = locks:acquire({ "u1", "a1", "r1" }, { timeout = 0.5 })
        ngx.sleep(0.6)
        return table.concat({ err.code, tostring(err.retryable), tostring((db:query "SELECT 1")), tostring((db:set_keepalive())) }, " ")
      ]])
      local dsn = os.getenv "HIERLOCK_POSTGRESQL_DSN"
      if not dsn or not package.searchpath("pgmoon", package.path) then return pending "pgmoon is not on the package path (HIERLOCK_DRIVERS)" end
      local manager = assert(hierlock.open(dsn))
      managers[#managers + 1] = manager
      local other = assert(manager:acquire(R1))
      assert.equal("connection true nil 7", run(([[
        local function pg()
          local db = require "pgmoon".new { user = "%s", password = "%s", host = "%s", port = %d, database = "%s" }
          assert(db:connect())
          return db
        end
        local db = pg()
        db:settimeout(100)
        assert(db:query "BEGIN")
        local _, err = attach.pgmoon(db):acquire({ "u1", "a1", "r1" }, { timeout = 0.5 })
        db:query "ROLLBACK"
        local kept = db:keepalive()
        ngx.sleep(0.6)
        return table.concat({ err.code, tostring(err.retryable), tostring(kept), pg():query("SELECT 7 AS n")[1].n }, " ")
      ]]):format(dsn:match "^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")))
      other:release { confirm = true }
      held:release { confirm = true }
    end)

    it("refuses to lock outside of a transaction, and a missing table", function()
      assert.matches("^raised: request:3: hierlock: no transaction is open", run [[
        local db, locks = connect()
        db:query "COMMIT"
        local ok = locks:acquire { "u1" }
        return ok]])
      assert.matches("^not_provisioned 1146 42S02", run [[
        local db, locks = connect { table = "nonesuch" }
        local _, err = locks:acquire { "u1" }
        return err.code .. " " .. err.errno .. " " .. err.sqlstate]])
    end)
  end)

  -- The spec of hierlock.rows shows its work by LuaSQL. This one shows the driver's own part: values, counts,
  -- silence.
  describe("hierlock.rows by lua-resty-mysql", function()
    local OPEN = ([[
      local rows = require "hierlock.rows"
      local connection = connect()
      assert(connection:query "ROLLBACK")
      local T = "%s_rows"
      local db = rows.resty_mysql(connection, { tables = { [T] = { version = "version" } }, timeout = 10 })
    ]]):format(DATA)

    before_each(function()
      store.sql():query("DROP TABLE IF EXISTS %s_rows", DATA)
      store.sql():query("CREATE TABLE %s_rows (id INT PRIMARY KEY, stock INT, name VARCHAR(40), note VARCHAR(40), version INT) " ..
        "ENGINE=InnoDB DEFAULT CHARSET=utf8mb4", DATA)
      store.sql():query("INSERT INTO %s_rows VALUES (1,5,'Tea',NULL,1),(2,0,'Rice','n',1)", DATA)
    end)
    after_each(function() store.sql():query("DROP TABLE %s_rows", DATA) end)

    local function stock() return tonumber(store.sql():query("SELECT stock FROM %s_rows WHERE id=1", DATA)[1][1]) end

    it("reads, changes and tells what stands there", function()
      assert.equal("nil 1 refused 0 stale 1 1 a'b\\", run(OPEN .. [[
        local said = { tostring(db:read(T, 1).note) }
        local buy = { where = { "stock >= ?", 5 } }
        said[#said + 1] = db:update(T, 1, { stock = rows.expr("stock - ?", 5) }, buy)
        local _, err = db:update(T, 1, { stock = rows.expr("stock - ?", 5) }, buy)
        said[#said + 1] = err.code .. " " .. err.current.stock
        _, err = db:update(T, 1, { stock = 9 }, { version = 1 })
        said[#said + 1] = err.code
        local plain = rows.resty_mysql(connection)
        said[#said + 1] = plain:update(T, 1, { stock = 0 }, { old = { note = ngx.null, name = "Tea" }, columns = { "note", "name" } })
        said[#said + 1] = db:update(T, 1, { name = "a'b\\", note = rows.null }, { version = 2 })
        return table.concat(said, " ") .. " " .. db:read(T, 1).name
      ]]))
    end)

    it("loses no update of requests side by side, by locks and by versions", function()
      local requests = {}
      for i = 1, 6 do
        requests[i] = send(OPEN .. (i % 2 == 0 and [[
          for _ = 1, 5 do
            assert(db:transaction({ retries = 30 }, function()
              local row, err = db:read(T, 1, { lock = "update", wait = 10 })
              if not row then return nil, err end
              ngx.sleep(0.001)
              return db:update(T, 1, { stock = row.stock + 1 })
            end))
          end
          return "done"
        ]] or [[
          for _ = 1, 5 do
            local ok, err
            repeat
              local row = assert(db:read(T, 1))
              ngx.sleep(0.001)
              ok, err = db:update(T, 1, { stock = row.stock + 1 }, { version = row.version })
            until ok or (err.code ~= "stale" and err.code ~= "deadlock")
            if not ok then return tostring(err) end
          end
          return "done"
        ]]))
      end
      for _, request in ipairs(requests) do assert.equal("done", request.answer()) end
      assert.equal(35, stock())
    end)

    it("ends a wait in time, and says `unknown` where the driver gave COMMIT up", function()
      assert.equal("timeout 1", run(OPEN .. [[
        local other = connect()
        assert(other:query("SELECT * FROM " .. T .. " WHERE id=1 FOR UPDATE"))
        local _, err
        local ok = db:transaction(function()
          _, err = db:read(T, 1, { lock = "update", wait = 0.1 })
          return db:update(T, 2, { stock = 1 })
        end)
        other:close()
        return err.code .. " " .. tostring(ok)
      ]]))
      assert.equal("unknown false 1", run(OPEN .. [[
        local query, calls = db.query, 0
        -- The answer to COMMIT takes longer than the driver waits.
        db.query = function(text, ...)
          if text == "COMMIT" then
            connection:set_timeout(50)
            text = "SELECT SLEEP(1)"
          end
          return query(text, ...)
        end
        local ok, err = db:transaction({ retries = 3 }, function()
          calls = calls + 1
          return db:update(T, 1, { stock = 7 })
        end)
        return err.code .. " " .. tostring(err.retryable) .. " " .. calls
      ]]))
    end)

    it("refuses a session in which backslashes are letters", function()
      assert.equal("unsupported", run(OPEN .. [[
        assert(connection:query "SET SESSION sql_mode='NO_BACKSLASH_ESCAPES'")
        local _, err = db:read(T, 1)
        return err.code
      ]]))
    end)
  end)
end)
