--- A table that would not exclude is refused, and is told apart from trouble that
-- passes: missing rows, a missing table, another engine, other buckets and levels.

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local TABLE = "hierlock_spec_own"
local BUCKETS = 100
local TARGET = { user = "u1", account = "a1", resource = "r1" }

-- Rewrites the server's data, without the row of its first answer from a table.
local function without_the_first_row(name)
  local done = false
  return function(data)
    if done or not data:find(name, 1, true) then return data end
    local kept, inside, at = {}, false, 1
    while at <= #data do
      local a, b, c, sequence = data:byte(at, at + 3)
      local size = a + b * 256 + c * 65536
      local body = data:sub(at + 4, at + 3 + size)
      inside = inside or body:find(name, 1, true) -- it names the table in each column
      if inside and not done and not body:find(name, 1, true) and body:byte() ~= 0xFE then
        done = true
      else
        kept[#kept + 1] = data:sub(at, at + 2) .. string.char(sequence - (done and 1 or 0)) .. body
      end
      at = at + 4 + size
    end
    return table.concat(kept)
  end, function() return done end
end

support.each_server(function(store)
  local opened

  before_each(function()
    opened = {}
    support.provision(store.sql(), TABLE, BUCKETS)
  end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    store.sql():query("DROP TABLE IF EXISTS " .. TABLE)
    store.sql():query("DROP VIEW IF EXISTS " .. TABLE .. "_view")
    store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
  end)

  local function own_dsn(name) return store.bare_dsn .. "?table=" .. (name or TABLE) end

  local function open(options, dsn)
    local manager, err = hierlock.open(dsn or own_dsn(), options or { buckets = BUCKETS })
    opened[#opened + 1] = manager
    return manager, err
  end

  local function assert_refused(code, manager, err)
    assert.is_nil(manager)
    assert.equal(code, err.code, tostring(err))
    assert.is_false(err.retryable)
    return err
  end

  describe("a missing row", function()
    local nodes = { [0] = { user = "u1" }, { user = "u1", account = "a1" }, TARGET }
    for level = 0, 2 do
      for _, prepared in ipairs { false, true } do
        it("on level " .. level .. " is told by level, bucket and node" ..
           (prepared and ", also by a prepared statement" or ""), function()
          local manager = assert(open())
          for _ = 1, prepared and 6 or 0 do assert(manager:acquire(TARGET)):release() end
          local row = hierlock.plan({ TARGET }, { buckets = BUCKETS }):rows()[level + 1]
          store.sql():query("DELETE FROM %s WHERE level=%d AND bucket=%d", TABLE, level, row.bucket)
          local err = assert_refused("not_provisioned", manager:acquire(TARGET))
          assert.truthy(err.message:find(("level %d, bucket %d"):format(level, row.bucket), 1, true),
                        err.message)
          assert.truthy(err.message:find("hierlock provision", 1, true))
          assert.same(nodes[level], err.target)
        end)
      end
    end

    it("leaves nothing locked, and nothing is wrong once it is there", function()
      local manager = assert(open())
      local row = hierlock.plan({ TARGET }, { buckets = BUCKETS }):rows()[3]
      store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, row.bucket)
      for _ = 1, 4 do
        assert_refused("not_provisioned", manager:acquire(TARGET))
        local user = assert(assert(open()):acquire({ user = "u1" }, { timeout = 2 }))
        assert.is_true(user:release { confirm = true })
      end
      store.sql():query("INSERT INTO %s VALUES (2,%d)", TABLE, row.bucket)
      local handle = assert(manager:acquire(TARGET))
      assert.is_true(handle:release { confirm = true })
    end)

    it("is found among many, in whichever statement it is", function()
      local ids = {}
      for i = 1, 90 do ids[i] = "r" .. i end
      local manager = assert(open())
      local rows = hierlock.plan({ { user = "u1", account = "a1", resources = ids } },
                                 { buckets = BUCKETS }):rows()
      local row = rows[#rows]
      store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, row.bucket)
      local err = assert_refused("not_provisioned", manager:acquire_resources("u1", "a1", ids))
      assert.truthy(err.message:find("level 2, bucket " .. row.bucket, 1, true), err.message)
    end)

    it("fails an extension, and the handle goes on holding what it held", function()
      local manager = assert(open())
      local handle = assert(manager:acquire(TARGET))
      local other = { user = "u1", account = "a1", resource = "r2" }
      local row = hierlock.plan({ other }, { buckets = BUCKETS }):rows()[3]
      store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, row.bucket)
      assert_refused("not_provisioned", handle:extend(other))
      assert.is_true(handle:check())
      local none, err = assert(open()):acquire(TARGET, { timeout = 0 })
      assert.is_nil(none)
      assert.equal("timeout", err.code)
      assert.is_true(handle:release { confirm = true })
    end)
  end)

  describe("the table", function()
    it("is missed when opening, with the command that makes it", function()
      local err = assert_refused("not_provisioned", open(nil, own_dsn("hierlock_spec_none")))
      assert.truthy(err.message:find("hierlock_spec_none", 1, true))
      assert.truthy(err.message:find("hierlock provision", 1, true))
    end)

    it("is missed when it was dropped later", function()
      local manager = assert(open())
      for _ = 1, 6 do assert(manager:acquire(TARGET)):release { confirm = true } end
      store.sql():query("DROP TABLE " .. TABLE)
      assert_refused("not_provisioned", manager:acquire(TARGET))
    end)

    it("must be of InnoDB: no other engine locks rows", function()
      for _, engine in ipairs { "MyISAM", "MEMORY" } do
        store.sql():query("ALTER TABLE %s ENGINE=%s", TABLE, engine)
        local err = assert_refused("unsafe_server", open())
        assert.truthy(err.message:lower():find(engine:lower(), 1, true))
      end
    end)

    local function alter(engine) store.sql():query("ALTER TABLE %s ENGINE=%s", TABLE, engine) end

    -- All ways to ask: as text, prepared, shared, waiting or not.
    local function ask(manager, fn)
      for _, options in ipairs { {}, { mode = "shared" }, { timeout = 0 }, { timeout = 0.5 },
                                 { timeout = 0, mode = "shared" } } do
        fn(manager:acquire(TARGET, options))
        fn(manager:acquire(TARGET, options))
      end
    end

    local function assert_granted(handle, err)
      assert.is_nil(err)
      handle:release { confirm = true }
    end

    it("grants nothing any more when it becomes one without transactions; again, once it is " ..
       "mended", function()
      local warm, cold = assert(open()), assert(open())
      for _ = 1, 3 do ask(warm, assert_granted) end
      for _, engine in ipairs { "MyISAM", "MEMORY" } do
        alter(engine)
        for _, manager in ipairs { warm, cold } do
          ask(manager, function(handle, err)
            assert_refused("unsafe_server", handle, err)
            assert.truthy(err.message:lower():find(engine:lower(), 1, true), err.message)
          end)
        end
        alter("InnoDB")
        for _, manager in ipairs { warm, cold } do ask(manager, assert_granted) end
      end
    end)

    if store.name == "mariadb" then
      it("grants nothing any more ten seconds after it became one of Aria, which claims " ..
         "transactions; again, once it is mended", function()
        local warm, cold = assert(open()), assert(open())
        for _ = 1, 3 do ask(warm, assert_granted) end
        alter("Aria")
        support.sleep(10.1) -- what is promised
        for _, manager in ipairs { warm, cold } do
          ask(manager, function(handle, err)
            assert_refused("unsafe_server", handle, err)
            assert.truthy(err.message:lower():find("aria", 1, true), err.message)
          end)
        end
        alter("InnoDB")
        for _, manager in ipairs { warm, cold } do ask(manager, assert_granted) end
      end)
    end

    it("must be a table, not a view", function()
      store.sql():query("CREATE VIEW %s_view AS SELECT * FROM %s", TABLE, TABLE)
      assert_refused("not_provisioned", open(nil, own_dsn(TABLE .. "_view")))
    end)

    it("may be altered and filled anew while nobody holds locks", function()
      local manager = assert(open())
      for round = 1, 4 do
        assert(manager:acquire(TARGET)):release { confirm = true }
        assert(manager:acquire(TARGET)):release { confirm = true }
        store.sql():query("ALTER TABLE %s COMMENT='round %d'", TABLE, round)
      end
    end)
  end)

  describe("an ALTER TABLE that waits for a transaction", function()
    it("keeps newcomers, for no longer than their timeout", function()
      local manager = assert(open())
      for _ = 1, 6 do assert(manager:acquire(TARGET)):release { confirm = true } end
      local reader, alterer = support.foreign(store), support.foreign(store)
      reader:query("START TRANSACTION")
      assert(reader:query("SELECT * FROM %s LIMIT 1", TABLE))
      alterer:send("ALTER TABLE %s COMMENT='altered'", TABLE)
      support.wait_until(function()
        return #store.sql():query([[SELECT 1 FROM information_schema.PROCESSLIST
          WHERE ID=%d AND STATE LIKE '%%metadata lock%%']], alterer.id) == 1
      end, "the ALTER TABLE")
      for _, timeout in ipairs { 0.5, 0, 0.3 } do
        local begun = support.now()
        local handle, err = manager:acquire(TARGET, { timeout = timeout })
        local took = support.now() - begun
        assert.is_nil(handle)
        assert.equal("timeout", err.code)
        assert.is_true(took > timeout - 0.01 and took < timeout + 1.5, took .. " s")
      end
      reader:query("COMMIT")
      assert(alterer:result())
      assert(manager:acquire(TARGET)):release { confirm = true }
    end)
  end)

  describe("a missing row of hundreds", function()
    for title, range in pairs { first = "bucket < 50", last = "bucket >= 950" } do
      it("is found, be it among the " .. title, function()
        local buckets, resources = 1000, {}
        store.sql():query("DROP TABLE %s", TABLE)
        store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
        support.provision(store.sql(), TABLE, buckets)
        for i = 1, 600 do resources[i] = "r" .. i end
        local manager = assert(open { buckets = buckets })
        assert(manager:acquire_resources("u1", "a1", resources)):release { confirm = true }
        store.sql():query("DELETE FROM %s WHERE level=2 AND %s", TABLE, range)
        local handle, err = manager:acquire_resources("u1", "a1", resources)
        assert.is_nil(handle)
        assert.equal("not_provisioned", err.code)
      end)
    end
  end)

  describe("the record of what the table is for", function()
    local wrong = {
      ["other buckets"] = { buckets = BUCKETS + 1 },
      ["fewer levels"] = { buckets = BUCKETS, levels = { "user", "account" } },
      ["more levels"] = { buckets = BUCKETS, levels = { "user", "account", "resource", "part" } },
      ["other names"] = { buckets = BUCKETS, levels = { "user", "account", "thing" } },
      ["the levels in another order"] = { buckets = BUCKETS,
                                          levels = { "account", "user", "resource" } },
      ["the defaults, said in so many words"] = { buckets = 10000000, levels = { "user", "account", "resource" } },
    }
    for title, options in pairs(wrong) do
      it("refuses a program that counts on " .. title, function()
        assert_refused("mismatch", open(options))
      end)
    end

    it("admits the program that names the same levels", function()
      assert(open { buckets = BUCKETS, levels = { "user", "account", "resource" } })
    end)

    it("decides what the program leaves open", function()
      local bucket = hierlock.plan({ { "u1" } }, { buckets = BUCKETS }):rows()[1].bucket
      for _, options in ipairs { {}, { buckets = BUCKETS }, { levels = { "user", "account", "resource" } } } do
        local manager = assert(open(options))
        local handle = assert(manager:acquire_user "u1")
        -- The first row is that very row.
        local root = store.sql()
        root:query("BEGIN")
        local free = root:try(("SELECT 1 FROM %s WHERE level=0 AND bucket=%d FOR UPDATE NOWAIT"):format(TABLE, bucket))
        root:query("ROLLBACK")
        assert.is_falsy(free)
        handle:release { confirm = true }
        manager:close()
      end
      store.sql():query("UPDATE hier_lock_meta SET levels='tenant,folder,thing' WHERE table_name='%s'", TABLE)
      finally(function()
        store.sql():query("UPDATE hier_lock_meta SET levels='user,account,resource' WHERE table_name='%s'", TABLE)
      end)
      local manager = assert(open {})
      assert.equal(2, assert(manager:acquire { tenant = "t", folder = "f", thing = "x" }).level)
      assert.is_false(pcall(manager.acquire, manager, { user = "u1" }))
      manager:close()
    end)

    it("is compared at each connection, also where the first has decided", function()
      local manager = assert(open { pool_size = 4 })
      local first = assert(manager:acquire_user "u1")
      store.sql():query("UPDATE hier_lock_meta SET buckets=%d WHERE table_name='%s'", BUCKETS + 1, TABLE)
      finally(function()
        store.sql():query("UPDATE hier_lock_meta SET buckets=%d WHERE table_name='%s'", BUCKETS, TABLE)
      end)
      assert_refused("mismatch", manager:acquire_user "u2")
      assert.is_true(first:is_held())
      manager:close()
    end)

    it("that does not know the table stands for the defaults", function()
      store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
      assert(open {})
      assert_refused("mismatch", open { buckets = BUCKETS })
      assert_refused("mismatch", open { levels = { "tenant", "folder" } })
    end)

    it("that is not seen at first, as by a KILL QUERY, does not stand for the defaults", function()
      local rewrite, is_cut = without_the_first_row "hier_lock_meta"
      local between = proxy.open(store, rewrite)
      finally(function() between.close() end)
      local peer = support.process(nil)
      local dsn = between.dsn:gsub("table=[%w_]+", "table=" .. TABLE)
      local code, message = peer:call([[
        local manager, err = hierlock.open(...)
        if not manager then return err.code, err.message end
        assert(manager:acquire_user("u1")):release { confirm = true }
        manager:close()
      ]], dsn, { buckets = BUCKETS })
      assert.is_nil(code, message)
      assert.is_true(is_cut())
    end)

    it("that is not there at all stands for the defaults, too", function()
      local root = store.root() or pending("no administrator here")
      root:query("CREATE DATABASE hierlock_spec_other")
      finally(function() root:query("DROP DATABASE hierlock_spec_other") end)
      root:query("CREATE TABLE hierlock_spec_other.%s LIKE mgl_test.%s", TABLE, TABLE)
      root:query("INSERT INTO hierlock_spec_other.%s VALUES (0,3142546)", TABLE)
      local dsn = store.root_dsn .. "hierlock_spec_other?table=" .. TABLE
      local manager = assert(open({}, dsn))
      assert(manager:acquire_user("u1")):release { confirm = true }
      assert_refused("mismatch", open({ buckets = BUCKETS }, dsn))
      manager:close()
    end)
  end)
end)
