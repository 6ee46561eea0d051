--- The answers to observers on a server that does not show its holders: they say what is visible, what is not and by
-- which setting or privilege it would be, and never that there are no holders.

local json = require "dkjson"
local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack -- luacheck: ignore

local CONFIGURATION, NO_LOCK = 78, 1

after_each(program.close)

support.each_server(function(store)
  local manager, peer

  before_each(function()
    if not store.root() then pending "no administrator here" end
  end)

  after_each(function()
    support.close_peers()
    if manager then manager:close() end
    manager = nil
  end)

  local function holders()
    support.sleep(0.11) -- INNODB_TRX shows an old picture to those who look more often
    return manager:holders()
  end

  -- Returns all visible holders, by session; and the err.
  local function seen()
    local found, err = holders()
    local by = {}
    for _, holder in ipairs(found or err.holders or {}) do by[holder.session] = holder end
    return by, err
  end

  local function first(by, waiting, path)
    for _, holder in pairs(by) do
      if holder.waiting == waiting and (not path or holder.path == path) then return holder end
    end
  end

  describe("without performance_schema", function()
    setup(function() if store.root and store.root() then store.command("restart", "--performance-schema=OFF") end end)
    teardown(function() if store.root and store.root() then store.command "restart" end end)

    before_each(function()
      manager = support.open(store)
      peer = support.process(store, { application = "the till" })
    end)

    local function is_lost(name)
      local _, code = peer:call([[ local ok, err = handles[...]:check() return ok, err and err.code ]], name)
      return code == "lost"
    end

    it("shows those who wait, and how many hold what it does not tell", function()
      assert.is_true(peer:acquire("h", "acquire", { "u1", "a1" }):result())
      local waiter = support.process(store, { application = "the queue" })
      waiter:acquire("w", "acquire", { "u1", "a1", "r1" }, { label = "it's \\ his" })
      local waits, by, err
      support.wait_until(function()
        by, err = seen()
        waits = first(by, true, "u1/a1/r1")
        return waits
      end, "the waiter")
      assert.same({ "the queue", waiter.pid, "exclusive", "it's \\ his" },
        { waits.application, waits.pid, waits.mode, (waits.label:gsub("\\x5c", "\\")) })
      assert.same({ "unsupported", false }, { err.code, err.retryable })
      assert.matches("performance_schema is off: .* which rows 1 session holds; set performance_schema=ON", err.message)
      local holds = assert(first(by, false))
      assert.same({ "unknown", nil, store.dialect == "mariadb" and "exclusive" or nil },
        { holds.application, holds.pid, holds.mode })
      assert.is_number(holds.since)

      for _, arguments in ipairs { { "ps" }, { "ps", "u1" }, { "ps", "u7/a7" }, { "ps", "--json" }, { "top" }, { "graph" },
                                   { "kill", "u7", "--yes" }, { "kill", "--owner", "the till", "--yes" } } do
        local said = assert_status(CONFIGURATION, run(store.dsn, unpack(arguments)))
        assert.matches("^hierlock: performance_schema is off: %C+\n$", said.err)
        if arguments[1] ~= "kill" and arguments[2] ~= "u7/a7" then assert.matches("the queue", said.out) end
        if arguments[2] == "--json" then assert.equal(2, #assert(json.decode(said.out))) end
      end
      assert.is_false(is_lost "h")

      -- The session is visible, and can be ended by its number.
      local said = assert_status(0, run(store.dsn, "kill", "--yes", "--session", holds.session))
      assert.matches("\n1 lock ended, of unknown on 127.0.0.1\n$", said.out)
      assert.equal("", said.err)
      assert.is_true(is_lost "h")
      assert.is_true(waiter:result())
    end)

    it("says nobody once nobody is left, and names nobody after a wait in vain", function()
      holders() -- else the old picture still has the lock of the test before
      assert.is_true(peer:acquire("h", "acquire", { "u1" }):result())
      local handle, err = manager:acquire({ "u1", "a1" }, { timeout = 0.05 })
      assert.same({ nil, "timeout", nil }, { handle, err.code, err.holders })
      peer:call "handles.h:release()"
      local found
      support.wait_until(function()
        found = holders()
        return found
      end, "the end of the lock")
      assert.same({}, found)
      assert_status(0, run(store.dsn, "ps"))
      assert_status(NO_LOCK, run(store.dsn, "kill", "u1", "--yes"))
    end)
  end)

  it("names the privilege that an observer lacks", function()
    manager = support.open(store)
    local root, name = store.root(), "hlblind"
    local database = store.bare_dsn:match "/([^/?]+)[^/]*$"
    root:query("DROP USER IF EXISTS %s@'%%'", name)
    root:query("CREATE USER %s@'%%' IDENTIFIED BY 'x'", name)
    finally(function() root:query("DROP USER %s@'%%'", name) end)
    root:query("GRANT SELECT, UPDATE ON %s.* TO %s@'%%'", database, name)
    if store.dialect == "mariadb" then root:query("GRANT SELECT ON performance_schema.* TO %s@'%%'", name) end
    peer = support.process(store)
    assert.is_true(peer:acquire("h", "acquire", { "u1" }):result())
    local dsn = store.dsn:gsub("//[^:]+:[^@]+@", "//" .. name .. ":x@")
    for _, arguments in ipairs { { "ps" }, { "top" }, { "graph" }, { "kill", "u1", "--yes" }, { "kill", "--session", "1", "--yes" } } do
      local said = run(dsn, unpack(arguments))
      assert.is_true(said.status > NO_LOCK, said.out)
      assert.equal("", said.out)
      assert.matches("does not show who holds or waits", said.err)
      assert.matches(store.dialect == "mariadb" and "PROCESS" or "SELECT command denied", said.err)
    end
  end)
end)
