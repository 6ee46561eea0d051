--- Servers on which locks would be granted and protect nothing are refused: read-only ones, nodes of a cluster with
-- several primaries, servers too old or of another kind, and servers behind a proxy that hands connections on. Real
-- servers are started or set so; for old versions and TiDB a real server's name is changed on the way.

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local TARGET = { "u1", "a1", "r1" }

local function as_version(version)
  return function(data, first)
    local at = not first and data:find("\7version", 1, true)
    if not at then return data end
    local size = data:byte(at - 4)
    local row = "\7version" .. string.char(#version) .. version
    return data:sub(1, at - 5) .. string.char(#row, 0, 0) .. data:sub(at - 1, at - 1) .. row ..
           data:sub(at + size)
  end
end

-- The greeting gives the number of the connection; this changes it to another's.
local function as_another_connection(data, first)
  if not first then return data end
  local at = data:find("\0", 6, true) + 1
  return data:sub(1, at - 1) .. string.char((data:byte(at) + 1) % 256) .. data:sub(at + 1)
end

support.each_server(function(store)
  local opened, between, restore

  before_each(function() opened, restore = {}, {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    if between then between.close() end
    between = nil
    for _, fn in ipairs(restore) do fn() end
  end)

  local function try(dsn)
    local manager, err = hierlock.open(dsn or store.dsn, { buckets = store.options.buckets })
    opened[#opened + 1] = manager
    return manager, err
  end

  local function root_dsn()
    if not store.root_dsn then pending("no administrator here") end
    return store.root_dsn .. store.bare_dsn:match("/([^/?]*)$") .. "?table=" .. store.table
  end

  local function assert_refused(part, object, err)
    assert.is_nil(object)
    assert.equal("unsafe_server", err.code, tostring(err))
    assert.is_false(err.retryable)
    assert.truthy(err.message:lower():find(part, 1, true), err.message)
  end

  -- SET GLOBAL, until the end of the spec.
  local function set(name, value, after)
    local root = store.root() or pending("no administrator here")
    table.insert(restore, 1, function() root:query("SET GLOBAL %s=%s", name, after) end)
    root:query("SET GLOBAL %s=%s", name, value)
    return function() root:query("SET GLOBAL %s=%s", name, after) end
  end

  -- Another start, with these options, until the end of the spec.
  local function restart(options)
    assert(store.control)
    restore[1] = function()
      store.command("kill") -- quicker than leaving a group in order
      store.command("start")
    end
    store.command("restart", options)
  end

  describe("a read-only server", function()
    for _, name in ipairs(store.name == "mysql" and { "read_only", "super_read_only" } or
                          { "read_only" }) do
      it("is refused: " .. name, function()
        local off = set(name, "ON", "OFF")
        assert_refused("read-only", try())
        assert_refused("read-only", try(root_dsn()))
        off()
        set("read_only", "OFF", "OFF")
        assert(assert(try()):acquire(TARGET)):release { confirm = true }
      end)

      it("is refused when it becomes so while we are connected: " .. name, function()
        set("read_only", "OFF", "OFF")
        local managers = { assert(try()), assert(try(root_dsn())), assert(try()) }
        for i = 1, 2 do -- the third has locked nothing yet
          for _ = 1, 6 do
            assert(managers[i]:acquire(TARGET)):release { confirm = true }
            assert(managers[i]:acquire(TARGET, { mode = "shared" })):release { confirm = true }
          end
        end
        local off = set(name, "ON", "OFF")
        for _, manager in ipairs(managers) do
          for _, options in ipairs { { mode = "exclusive" }, { mode = "shared" }, { timeout = 0 },
                                     { timeout = 0, mode = "shared" } } do
            assert_refused("read-only", manager:acquire(TARGET, options))
          end
        end
        off()
        set("read_only", "OFF", "OFF")
        for _, manager in ipairs(managers) do
          assert(manager:acquire(TARGET)):release { confirm = true }
        end
      end)
    end

    it("is refused for an extension, too, and the handle keeps what it has", function()
      local manager = assert(try(root_dsn()))
      local handle = assert(manager:acquire(TARGET))
      set("read_only", "ON", "OFF")
      assert_refused("read-only", handle:extend { "u1", "a1", "r2" })
      handle:release()
    end)

    it("is refused: innodb_read_only", function()
      if not store.control then pending("the server is not ours to start") end
      restart("--innodb-read-only=ON")
      assert_refused("read-only", try())
      assert_refused("read-only", try(root_dsn()))
    end)
  end)

  local galera = store.name == "mariadb" and function()
    it("is refused: Galera", function()
      if not store.control then pending("the server is not ours to start") end
      local library = "/usr/lib/galera/libgalera_smm.so"
      if not io.open(library) then pending("Galera is not installed") end
      restart("--wsrep-on=ON --wsrep-provider=" .. library .. " " ..
              "--wsrep-cluster-address=gcomm:// --binlog-format=ROW --innodb-autoinc-lock-mode=2 " ..
              "--wsrep-provider-options=gmcast.listen_addr=tcp://127.0.0.1:0")
      local state = store.sql():query("SHOW GLOBAL STATUS LIKE 'wsrep_cluster_status'")
      assert.equal("Primary", state[1][2]) -- it really is one, of one node
      assert_refused("galera", try())
      assert_refused("galera", try(root_dsn()))
    end)
  end

  local group_replication = store.name == "mysql" and function()
    it("is refused: group replication, unless the group has a single primary", function()
      if not store.control then pending("the server is not ours to start") end
      local port = store.dsn:match(":(%d+)/")
      restart("--plugin-load-add=group_replication.so --server-id=7 --gtid-mode=ON " ..
              "--enforce-gtid-consistency=ON --log-bin=binlog --group-replication-start-on-boot=OFF " ..
              "--group-replication-group-name=aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa " ..
              "--group-replication-communication-stack=MYSQL --group-replication-bootstrap-group=ON " ..
              "--group-replication-recovery-get-public-key=ON " ..
              "--group-replication-local-address=127.0.0.1:" .. port)
      local root = store.root()
      local user, password = store.root_dsn:match("//(.-):(.-)@")
      root:query("START GROUP_REPLICATION USER='%s', PASSWORD='%s'", user, password)
      local states = root:query("SELECT MEMBER_STATE FROM performance_schema.replication_group_members")
      assert.same({ { "ONLINE" } }, states)
      local manager = assert(try())
      assert(manager:acquire(TARGET)):release { confirm = true }

      root:query("SELECT group_replication_switch_to_multi_primary_mode()")
      table.insert(restore, 1, function() root:query("RESET PERSIST") end)
      assert_refused("primaries", try())
      assert_refused("primaries", try(root_dsn()))
    end)
  end

  describe("a cluster with several primaries", galera or group_replication)

  describe("what is behind a proxy", function()
    -- A peer, because the proxy works while we wait for one; the code and message, or
    -- "open" when a lock could be had.
    local function seen_through(rewrite)
      between = proxy.open(store, rewrite)
      local peer = support.process(nil)
      local result, message = peer:call([[
        local manager, err = hierlock.open(...)
        if not manager then return err.code, err.message end
        assert(manager:acquire {"u1", "a1", "r1"}):release {confirm = true}
        manager:close()
        return "open"
      ]], between.dsn, { buckets = store.options.buckets })
      between.close()
      between = nil
      return result, message
    end

    it("is taken as it is when nothing is changed on the way", function()
      assert.equal("open", (seen_through()))
    end)

    it("is not asked in the very words that ProxySQL answers by itself", function()
      local asked
      between = proxy.open(store)
      support.process(nil):call("assert(hierlock.open(...)):close()", between.dsn, { buckets = store.options.buckets })
      for _, command in ipairs(between.commands) do
        local text = command.text or ""
        assert.is_nil(text:upper():match("^%s*SELECT%s+CONNECTION_ID%(%)%s*$"))
        asked = asked or text:find("CONNECTION_ID()", 1, true)
      end
      assert.is_truthy(asked)
    end)

    it("is refused when it is another connection than the greeting said", function()
      local code, message = seen_through(as_another_connection)
      assert.equal("unsafe_server", code)
      assert.truthy(message:find("proxy", 1, true))
    end)

    local versions = {
      mysql = {
        ["5.7.44-log"] = "too old", ["5.6.51"] = "too old", ["8.0.11-TiDB-v7.5.0"] = "TiDB",
        ["5.7.25-TiDB-v6.1.0"] = "TiDB", ["8.0.0"] = true, ["8.4.3-3"] = true, ["10.0.1"] = true,
      },
      mariadb = {
        ["10.5.29-MariaDB-log"] = "too old", ["5.5.68-MariaDB"] = "too old",
        ["10.6.0-MariaDB"] = true, ["11.4.2-MariaDB-log"] = true, ["12.0.1-MariaDB"] = true,
      },
    }
    for version, expected in pairs(versions[store.name]) do
      it("is " .. (expected == true and "taken" or "refused") .. " as version " .. version,
         function()
        local code, message = seen_through(as_version(version))
        if expected == true then return assert.equal("open", code, message) end
        assert.equal("unsafe_server", code)
        assert.truthy(message:find(expected, 1, true), message)
        assert.truthy(message:find(version, 1, true), message)
      end)
    end
  end)
end)
