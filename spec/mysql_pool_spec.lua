--- Connections of a manager: their number, their reuse, and the error when there are no more.

local hierlock = require "hierlock"
local support = require "spec.support"

support.each_server(function(store)
  local opened

  before_each(function() opened = {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
  end)

  local function open(...)
    local manager = support.open(store, ...)
    opened[#opened + 1] = manager
    return manager
  end

  -- Counts connections as the server does.
  local function connections(application)
    return tonumber(store.sql():query([[
      SELECT COUNT(*) FROM performance_schema.session_connect_attrs
      WHERE ATTR_NAME='program_name' AND ATTR_VALUE='%s']], application)[1][1])
  end

  describe("a manager", function()
    it("has one connection for each lock that is held, and no more than pool_size", function()
      local manager = open { pool_size = 5, application = "pool spec" }
      local handles = {}
      for i = 1, 5 do
        handles[i] = assert(manager:acquire { "u" .. i })
        assert.equal(i, connections("pool spec"))
        assert.is_true(manager:stats().connections == i and manager:stats().held == i)
      end
      local none, err = manager:acquire { "u6" }
      assert.is_nil(none)
      assert.equal("busy", err.code)
      assert.equal(5, connections("pool spec"))
      for _, handle in ipairs(handles) do assert.is_true(handle:release { confirm = true }) end
      assert(manager:acquire { "u6" }):release()
      assert.is_true(connections("pool spec") <= 5)
    end)

    it("gives back the place of a call that was cancelled before it began", function()
      local manager = open { pool_size = 2 }
      -- On a busy machine a worker begins nearly each of them before the cancellation.
      for i = 1, 1000 do manager:start({ "u" .. i }):cancel() end
      for _ = 1, 2 do
        local handle = assert(assert(manager:start({ "u1" }, { timeout = 10 })):wait(10))
        assert(handle:release { confirm = true })
      end
    end)

    it("says at once that it is busy when its own thread holds all locks, however it got them", function()
      local manager = open { pool_size = 2 }
      local first, second = assert(manager:acquire { "u1" }), assert(assert(manager:start { "u2" }):wait(10))
      local begun = support.now()
      local none, err = manager:acquire({ "u3" }, { timeout = 10 })
      assert.is_nil(none)
      assert.equal("busy", err.code)
      assert.is_true(err.retryable)
      assert.is_true(support.now() - begun < 2)
      assert.is_true(manager:stats().busy == 1)
      assert.is_true(first:release())
      local third = assert(manager:acquire { "u3" })
      assert.is_true(second:is_held() and third:is_held())
      second:release()
      third:release()
    end)

    it("that acquires and releases in turn uses two connections", function()
      local manager = open { application = "turns spec" }
      for i = 1, 100 do assert(manager:acquire { "u1", "a1", "r" .. i }):release() end
      assert.is_true(connections("turns spec") <= 2)
      assert.is_true(manager:stats().connections <= 2)
      assert.is_true(manager:stats().errors == 0)
    end)

    it("with one connection alone acquires and releases in turn, too", function()
      local manager = open { pool_size = 1, application = "single spec" }
      for i = 1, 100 do assert(manager:acquire { "u1", "a1", "r" .. i }):release() end
      assert.equal(1, connections("single spec"))
      local none, err = manager:acquire({ "u1" }, { timeout = 0 })
      if none then none:release() else error(err) end
    end)

    it("can look who holds a lock although its pool is full", function()
      local manager = open { pool_size = 1, application = "full spec" }
      local handle = assert(manager:acquire({ "u1" }, { label = "the only one" }))
      local holders = assert(manager:holders { "u1" })
      assert.equal(1, #holders)
      assert.equal("the only one", holders[1].label)
      handle:release()
    end)

    it("takes its connections with it when it is closed, and when it is collected", function()
      for _, ending in ipairs { "close", "collect" } do
        local name = ending .. " spec"
        local manager = support.open(store, { application = name })
        local handle = assert(manager:acquire { "u1" })
        assert(manager:acquire { "u2" }):release()
        assert.is_true(connections(name) >= 1)
        if ending == "close" then
          manager:close()
          assert.is_false(handle:is_held())
        end
        manager, handle = nil, nil -- luacheck: ignore
        support.collect()
        support.wait_until(function() return connections(name) == 0 end, "the connections' end")
        assert(open():acquire({ "u1" }, { timeout = 2 })):release()
      end
    end)

    it("is served by the server's last free connections, or says that there are none", function()
      local root = store.root() or pending("no administrator here")
      local before = root:query("SELECT @@GLOBAL.max_connections")[1][1]
      finally(function() root:query("SET GLOBAL max_connections=" .. before) end)
      local manager = open()
      local first = assert(manager:acquire { "u1" })
      root:query("SET GLOBAL max_connections=10")
      local handles, err = {}, nil
      for i = 1, 12 do
        handles[i], err = manager:acquire({ "v" .. i }, { timeout = 1 })
        if not handles[i] then break end
      end
      assert.truthy(err, "ten connections served more than ten locks")
      assert.equal("connection", err.code)
      assert.is_true(err.retryable)
      assert.is_true(first:is_held())
      for _, handle in ipairs(handles) do assert.is_true(handle:release { confirm = true }) end
      assert(manager:acquire { "v1" }):release()
      first:release()
    end)

    it("says that it may be tried again when its account has no connection left", function()
      local root = store.root() or pending("no administrator here")
      local user = "hierlock_few@'127.0.0.1'"
      root:query("CREATE USER %s IDENTIFIED BY 'few' WITH MAX_USER_CONNECTIONS 1", user)
      finally(function() root:query("DROP USER " .. user) end)
      root:query("GRANT SELECT, INSERT, UPDATE, DELETE ON %s.* TO %s", store.bare_dsn:match "//.*/([^?]*)", user)
      local dsn = store.dsn:gsub("//.-@", "//hierlock_few:few@")
      local manager = assert(hierlock.open(dsn, store.options))
      opened[#opened + 1] = manager
      local first = assert(manager:acquire { "u1" })
      local none, err = manager:acquire({ "u2" }, { timeout = 1 })
      assert.is_nil(none)
      assert.matches("max_user_connections", err.message)
      assert.equal("connection", err.code)
      assert.is_true(err.retryable)
      assert(first:release { confirm = true })
      assert(manager:acquire { "u2" }):release()
    end)
  end)
end)
