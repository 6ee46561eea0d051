--- A server that logs statements (binlog_format=STATEMENT) locks no row exclusively in
-- READ COMMITTED, and inserts none. There everything works as elsewhere, in REPEATABLE READ.

local hierlock = require "hierlock"
local support = require "spec.support"

local TABLE = "hierlock_spec_binlog"
local BUCKETS = 3000
local TARGET = { "u1", "a1", "r1" }

support.each_server(function(store)
  if not store.control then
    pending("the server is not ours to start")
    return
  end
  local dsn = store.bare_dsn .. "?table=" .. TABLE
  local opened

  setup(function()
    store.command("restart", "--log-bin=binlog --server-id=7 --binlog-format=STATEMENT")
  end)
  teardown(function()
    store.sql():query("DROP TABLE IF EXISTS " .. TABLE)
    store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
    store.command("restart")
  end)

  local function hierlock_command(verb, arguments)
    local pipe = io.popen(("HIERLOCK_DSN='%s' %s lua/hierlock/command/main.lua %s %s 2>&1; echo \"=$?\""):format(
      dsn, os.getenv("HIERLOCK_LUA") or "lua", verb, arguments or ""))
    local text = pipe:read("*a")
    pipe:close()
    return text:match("=(%d+)\n$"), text
  end

  local function assert_does(verb, arguments)
    local status, text = hierlock_command(verb, arguments)
    assert.equal("0", status, text)
  end

  before_each(function()
    opened = {}
    store.sql():query("DROP TABLE IF EXISTS " .. TABLE)
    store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
    assert_does("provision", "--buckets " .. BUCKETS)
  end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
  end)

  local function open(options)
    options = options or {}
    options.buckets = BUCKETS
    local manager = assert(hierlock.open(dsn, options))
    opened[#opened + 1] = manager
    return manager
  end

  local function bucket(target)
    local rows = hierlock.plan({ target }, { buckets = BUCKETS }):rows()
    return rows[#rows].bucket
  end

  it("really is one", function()
    local rows = store.sql():query(
      "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('log_bin','binlog_format')")
    assert.same({ { "binlog_format", "STATEMENT" }, { "log_bin", "ON" } }, rows)
  end)

  it("grants, excludes and admits as any other, as text and prepared", function()
    local one, two = open(), open()
    for _ = 1, 6 do
      local handle = assert(one:acquire(TARGET))
      local none, err = two:acquire(TARGET, { timeout = 0 })
      assert.is_nil(none)
      assert.equal("timeout", err.code)
      none, err = two:acquire({ "u1" }, { timeout = 0.05, mode = "shared" })
      assert.is_nil(none)
      assert.equal("timeout", err.code)
      local sister = assert(two:acquire({ "u1", "a1", "r2" }, { timeout = 0 }))
      assert(sister:extend({ "u1", "a1", "r3" }, { timeout = 0 }))
      assert.is_true(sister:release { confirm = true })
      assert.is_true(handle:release { confirm = true })
      local readers = { assert(one:acquire(TARGET, { mode = "shared" })),
                        assert(two:acquire(TARGET, { mode = "shared", timeout = 0 })) }
      for _, reader in ipairs(readers) do assert.is_true(reader:release { confirm = true }) end
    end
  end)

  it("locks no other row, and no gap", function()
    local target = { "u9", "a9", "r9" }
    local beside = bucket(target) + 1
    store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, beside)
    for _, mode in ipairs { "exclusive", "shared" } do
      local handle = assert(open():acquire(target, { mode = mode }))
      store.sql():query("SET SESSION innodb_lock_wait_timeout=1")
      store.sql():query("INSERT INTO %s VALUES (2,%d)", TABLE, beside)
      store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, beside)
      assert.is_true(handle:release { confirm = true })
    end
  end)

  it("gives back at once what a request with a missing row has locked, the gap, too", function()
    local manager = open()
    store.sql():query("DELETE FROM %s WHERE level=2 AND bucket=%d", TABLE, bucket(TARGET))
    for _ = 1, 4 do
      local handle, err = manager:acquire(TARGET)
      assert.is_nil(handle)
      assert.equal("not_provisioned", err.code)
      local user = assert(open():acquire({ "u1" }, { timeout = 2 }))
      assert.is_true(user:release { confirm = true })
    end
    store.sql():query("INSERT INTO %s VALUES (2,%d)", TABLE, bucket(TARGET))
    assert(manager:acquire(TARGET)):release { confirm = true }
  end)

  it("is provisioned, and mended without waiting for rows that are locked", function()
    assert_does("verify")
    store.sql():query("DELETE FROM %s WHERE bucket %% 7 = 3 OR (level = 1 AND bucket > 2000)", TABLE)
    local manager, held = open(), {}
    for i = 1, 60 do held[#held + 1] = manager:acquire({ "u" .. i }, { timeout = 0 }) end
    assert.is_true(#held >= 30)
    assert_does("provision", "--chunk 250")
    for _, handle in ipairs(held) do assert.is_true(handle:release { confirm = true }) end
    assert_does("verify")
  end)

  it("takes no locks in a space with leases, which could not be recorded there", function()
    local leased = support.leased(store)
    leased.prepare()
    local manager, err = hierlock.open(leased.dsn, leased.options)
    assert.is_nil(manager)
    assert.equal("unsafe_server", err.code)
    assert.truthy(err.message:find("binlog_format", 1, true), err.message)
  end)
end)
