-- The state of a handle after an extension, on every store: its token, its look to others, and whether it is still
-- held when the extension failed.

local support = require "spec.support"

local A, B = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }

describe("a handle that was extended", function()
  support.each_store(function(store)
    local managers

    local function open(options, params)
      managers[#managers + 1] = support.open(store, options, params)
      return managers[#managers]
    end

    before_each(function() managers = {} end)
    after_each(function()
      for _, manager in ipairs(managers) do manager:close() end
      support.close_peers()
    end)

    it("has a token that is greater than those of all who held what it holds now", function()
      local first, second = open(), open()
      local handle = assert(first:acquire(A))
      local other = assert(second:acquire(B))
      local earlier = other.token
      other:release { confirm = true }
      assert(handle:extend(B))
      assert.is_true(handle.token > earlier)
      local token = handle.token
      handle:release { confirm = true }
      assert.is_true(assert(second:acquire(B)).token > token)
    end)

    it("is shown with all that it holds, and after a failure with no more", function()
      local holder, blocker, observer = open(), open(), open()
      local C = { "u1", "a2", "r3" }
      local handle = assert(holder:acquire(A, { label = "it" }))
      assert(handle:extend(B, { label = "it" }))
      support.sleep(store.dialect == "mariadb" and 0.11 or 0)
      for _, target in ipairs { A, B } do
        local holders = assert(observer:holders(target))
        assert.equal(1, #holders)
        assert.equal("it", holders[1].label)
      end
      local blocked = assert(blocker:acquire(C))
      for _ = 1, 2 do
        local ok, err = handle:extend(C, { timeout = 0.05 })
        assert.is_nil(ok)
        assert.equal("timeout", err.code)
      end
      blocked:release { confirm = true }
      support.sleep(store.dialect == "mariadb" and 0.11 or 0)
      for _, found in ipairs(assert(observer:holders(C))) do
        assert.is_nil(found.path:find("r3", 1, true), found.path)
      end
      assert.equal(1, #assert(observer:holders(A)))
      assert.is_true(handle:is_held())
    end)

    if not store.server then return end

    it("is held after an extension that waited for longer than hold_timeout", function()
      local holder, blocker = open { hold_timeout = 1 }, open()
      local handle = assert(holder:acquire(A))
      assert(support.process(store):acquire("b", "acquire", B):result())
      local ok, err = handle:extend(B, { timeout = 1.6 })
      assert.is_nil(ok)
      assert.equal("timeout", err.code)
      assert.is_true(handle:is_held())
      assert.is_true(handle:check())
      assert.equal("timeout", select(2, blocker:acquire(A, { timeout = 0 })).code)
    end)

    -- MySQL's NOWAIT and its time limit never do that.
    if store.name ~= "mariadb" then return end

    it("is lost when the server ends the whole transaction for a timeout", function()
      finally(function()
        managers = {}
        store.command("restart")
      end)
      store.command("restart", "--innodb-rollback-on-timeout=ON")
      local holder, blocker = open(), open()
      local handle = assert(holder:acquire(A))
      support.keep(assert(blocker:acquire(B)))
      local ok, err = handle:extend(B, { timeout = 0 })
      assert.is_nil(ok)
      assert.equal("lost", err.code)
      assert.is_false(handle:is_held())
      assert(blocker:acquire(A, { timeout = 5 }))
      for _, manager in ipairs(managers) do manager:close() end
    end)
  end)
end)

describe("a server's connection", function()
  support.each_connection(function(store)
    after_each(support.close_peers)

    it("is not kept by a program that a holder has started, when the holder is killed", function()
      local peer = support.process(store, { hold_timeout = 30 })
      assert.is_true(peer:acquire("h", "acquire", A):result())
      -- posix_spawn, for which no atfork handler runs (luv may fork, for which they do)
      local pid = peer:call [[
        handles.pipe = io.popen("echo $$; exec sleep 60")
        return tonumber(handles.pipe:read("*l"))
      ]]
      finally(function() os.execute("kill " .. pid) end)
      peer:signal("sigkill")
      local manager = support.open(store)
      local start = support.now()
      assert(manager:acquire(A, { timeout = 10 })):release()
      assert.is_true(support.now() - start < 3)
      manager:close()
    end)

    if not store.table then return end

    it("is waited for no longer than a second beyond the timeout, also when a table is locked", function()
      local first = support.open(store, { timeout = 10 })
      local kept = assert(first:acquire(A)) -- so that the next one has to connect
      local sql = support.sql_connection(store.bare_dsn)
      sql:query("LOCK TABLES hier_lock_meta WRITE")
      finally(function()
        sql:close()
        first:close()
      end)
      local start = support.now()
      local handle, err = first:acquire({ "u9" }, { timeout = 0 })
      assert.is_nil(handle)
      assert.equal("connection", err.code)
      assert.matches("LOCK TABLES", err.message)
      assert.is_true(support.now() - start < 3)
      assert.is_true(kept:is_held())
    end)

    it("does without prepared statements where the server has no room for more", function()
      local root = store.root() or pending("no administrator here")
      local before = root:query("SELECT @@GLOBAL.max_prepared_stmt_count")[1][1]
      finally(function() root:query("SET GLOBAL max_prepared_stmt_count=" .. before) end)
      root:query("SET GLOBAL max_prepared_stmt_count=0")
      local manager = support.open(store)
      for _ = 1, 6 do assert(manager:acquire(A, { timeout = 5 })):release() end
      manager:close()
    end)
  end)
end)

describe("on_lost", function()
  support.each_connection(function(store)
    -- The handles are kept in `handles`, as the loss of a collected handle is not reported.
    local function kill(manager, n, handles)
      for i = 1, n do handles[i] = assert(manager:acquire { "lost", "a", "r" .. i }) end
      for _, id in ipairs(store.sessions()) do store.kill(id) end
      support.wait_until(function()
        for _, handle in ipairs(handles) do
          if handle:is_held() then return false end
        end
        return true
      end, "the loss")
      store.connection = nil
    end

    it("may close the manager: then the call that told it says so", function()
      if not store.root() then pending("no administrator here") end
      local manager
      manager = support.open(store, { on_lost = function() manager:close() end })
      local handles = {}
      local ok, err = pcall(kill, manager, 1, handles)
      if not ok then assert.matches("closed", tostring(err)) end
      ok, err = pcall(manager.acquire, manager, { "lost" })
      assert.is_false(ok)
      assert.matches("the manager is closed", tostring(err))
    end)

    it("is called for each, also when it raises for one", function()
      if not store.root() then pending("no administrator here") end
      local told, manager = 0
      manager = support.open(store, { on_lost = function()
        told = told + 1
        error("no")
      end })
      local handles = {}
      pcall(kill, manager, 4, handles)
      support.wait_until(function() -- the rest of them may not have ended yet
        pcall(manager.stats, manager)
        return told >= 4
      end, "the losses")
      for _ = 1, 20 do pcall(manager.stats, manager) end
      assert.equal(4, told)
      manager:close()
    end)
  end)
end)

describe("a finalizer", function()
  it("may close the manager while it acquires", function()
    local hierlock = require "hierlock"
    for _ = 1, 50 do
      local manager = assert(hierlock.open("null:"))
      do
        local closer = newproxy and newproxy(true) -- luacheck: ignore
        if closer then
          getmetatable(closer).__gc = function() manager:close() end
        else
          setmetatable({}, { __gc = function() manager:close() end })
        end
      end
      collectgarbage("restart")
      for i = 1, 2000 do
        local ok, err = pcall(manager.acquire, manager, { "u" .. i })
        if not ok then
          assert.matches("the manager is closed", tostring(err))
          break
        end
      end
      manager:close()
    end
  end)
end)
