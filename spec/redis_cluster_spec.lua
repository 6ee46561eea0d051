-- Redis Cluster: three masters, of which the first has a replica, on loopback. Calls go to the master of their root's
-- slot; what moves or fails over costs time, never a second holder.
-- Parts: no_two_in_while promoted_replica

local hierlock = require "hierlock"
local program = require "spec.support.command"
local redis_cli = require "spec.support.redis_cli"
local socket = require "socket"
local stress = require "spec.support.stress"
local support = require "spec.support"
local uv = require "luv"

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

local function shell(command)
  local pipe = io.popen("unset LD_PRELOAD; " .. command .. " 2>&1")
  local text = pipe:read "*a"
  pipe:close()
  return (text:gsub("%s+$", ""))
end

local function eventually(what, fn)
  local deadline = support.now() + 60
  repeat
    local result = fn()
    if result then return result end
    socket.sleep(0.1)
  until support.now() > deadline
  error(what .. " does not come")
end

describe("redis cluster", function()
  local nodes, directory, managers = {}, nil, {}

  local function cli(i, words)
    local list = {}
    for word in words:gmatch "%S+" do list[#list + 1] = word == "''" and "" or word end
    return (redis_cli("127.0.0.1", nodes[i].port, nil, list):gsub("%s+$", ""))
  end

  -- Below the ports that others choose (spec/support/servers.sh, the kernel), as is the bus's: port + 10000.
  local function free_port()
    for _ = 1, 100 do
      local port = math.random(2000, 9999)
      local a, b = socket.bind("127.0.0.1", port), socket.bind("127.0.0.1", port + 10000)
      if a then a:close() end
      if b then b:close() end
      if a and b then return port end
    end
    error "no port is free"
  end

  local function start(i)
    local node = nodes[i]
    shell(("redis-server --port %d --bind 127.0.0.1 --cluster-enabled yes --cluster-node-timeout 1500 --save '' "
      .. "--dir %s --cluster-config-file %s/nodes-%d.conf --cluster-require-full-coverage no --daemonize yes "
      .. "--pidfile %s/%d.pid"):format(node.port, directory, directory, i, directory, i))
    eventually("the server", function() return cli(i, "PING") == "PONG" end)
    node.pid = cli(i, "INFO server"):match "process_id:(%d+)"
    node.id = cli(i, "CLUSTER MYID")
  end

  local function open(options, params)
    local all = { timeout = 10 }
    for k, v in pairs(options or {}) do all[k] = v end
    local dsn = ("redis://127.0.0.1:%d/?%s"):format(nodes[options and options.at or 2].port, params or "quarantine=0")
    all.at = nil
    local manager, err = hierlock.open(dsn, all)
    if manager then managers[#managers + 1] = manager end
    return manager, err
  end

  -- The slot of a lease's tree, and a root that the node serves.
  local function slot_of_held(i)
    local key = cli(i, "KEYS *:leases"):match "[^\n]+"
    return key and tonumber(cli(i, ("CLUSTER KEYSLOT %s"):format(key)):match "%d+")
  end

  local function root_at(i, manager)
    for n = 1, 1000 do
      local root = { ("root%d"):format(n) }
      local before = tonumber((cli(i, "DBSIZE"):match "%d+"))
      local held = assert(manager:acquire(root, { ttl = 3 }))
      local grew = tonumber((cli(i, "DBSIZE"):match "%d+")) > before and slot_of_held(i)
      assert(held:release { confirm = true })
      if grew then return root, grew end
    end
  end

  -- Anew each time: they kill nodes and move slots.
  before_each(function()
    managers = {}
    directory = shell "mktemp -d"
    math.randomseed(uv.hrtime() % 2147483647) -- another part of this file may begin in the same second
    for i = 1, 4 do
      nodes[i] = { port = free_port() }
      start(i)
    end
    for i, range in ipairs { "0 5460", "5461 10922", "10923 16383" } do
      assert.equal("OK", cli(i, "CLUSTER ADDSLOTSRANGE " .. range))
      cli(i, "CLUSTER SET-CONFIG-EPOCH " .. i)
    end
    for i = 2, 4 do cli(i, "CLUSTER MEET 127.0.0.1 " .. nodes[1].port) end
    for i = 1, 4 do
      eventually("the cluster", function()
        local info = cli(i, "CLUSTER INFO")
        return info:find "cluster_state:ok" and info:find "cluster_known_nodes:4" and info:find "cluster_slots_ok:16384"
      end)
    end
    eventually("the replica", function() return cli(4, "CLUSTER REPLICATE " .. nodes[1].id) == "OK" end)
    eventually("its link", function() return cli(4, "INFO replication"):find "master_link_status:up" end)
  end)

  after_each(function()
    for _, manager in ipairs(managers) do manager:close() end
    for _, node in ipairs(nodes) do if node.pid then shell("kill -9 " .. node.pid) end end
    shell("rm -rf '" .. directory .. "'")
  end)

  it("is looked at by hierlock doctor, at whichever node, and not settled by it", function()
    local function doctor(i, ...)
      local said = program.run(("redis://127.0.0.1:%d/?quarantine=0&prefix=doctor"):format(nodes[i].port), "doctor", ...)
      program.close()
      assert.equal(0, said.status, said.out .. said.err)
      assert.matches("ok       cluster +a node of one, with 16384 of 16384 slots served", said.out)
      return said.out
    end
    for i = 1, 3 do assert.matches("unseen   opens", doctor(i), 1, true) end
    doctor(1, "--levels", "a,b")
    for i = 1, 3 do assert.matches("ok       a lock +taken, seen to exclude", doctor(i)) end
    cli(3, "CLUSTER DELSLOTS 16383")
    local said = program.run(("redis://127.0.0.1:%d/?quarantine=0"):format(nodes[3].port), "doctor")
    program.close()
    assert.equal(1, said.status, said.out)
    assert.matches("wrong    cluster +a node of one, with 16383 of 16384 slots served", said.out)
    local shows = shell(said.out:match "mend: (redis%-cli[^\n]* CLUSTER NODES)\n")
    for i = 1, 4 do assert.truthy(shows:find(nodes[i].id, 1, true), shows) end
    shell(("echo yes | redis-cli --cluster fix 127.0.0.1:%d"):format(nodes[3].port))
    eventually("the slot", function() return cli(3, "CLUSTER INFO"):find "cluster_slots_ok:16384" end)
    doctor(3)
  end)

  it("serves roots of all masters, refuses calls over several, and looks over all", function()
    local manager, other = assert(open()), assert(open { at = 4 })
    local held = {}
    for i = 1, 12 do held[i] = assert(manager:acquire({ "u" .. i, "a", "r" }, { ttl = 60, owner = "me" })) end
    for i = 1, 12 do assert_code("timeout", other:acquire({ "u" .. i }, { timeout = 0 })) end
    for i = 1, 3 do assert.truthy(slot_of_held(i), "node " .. i) end
    assert.equal(12, #assert(other:leases()))
    local err = assert_code("unsupported", other:acquire_all { { "x" }, { "y" } })
    assert.truthy(err.message:find("2 roots", 1, true), err.message)
    for i = 1, 6 do assert.is_true(held[i]:refresh()) end
    local pending = assert(other:start({ "u1" }, { ttl = 60 }))
    eventually("the waiter", function() return #assert(manager:holders { "u1" }) == 2 end)
    assert(held[1]:release())
    assert(assert(pending:wait(5)):release { confirm = true })
    assert.equal(11, assert(other:revoke { owner = "me" }))
    assert_code("lost", held[2]:refresh())
    assert.equal(0, #assert(other:leases()))
    assert_code("unsupported", open { interoperate = "symfony" })
  end)

  it("moves a slot under a lease and a waiter without a second holder", function()
    local manager, other = assert(open()), assert(open())
    local root, slot = root_at(2, manager)
    local held = assert(manager:acquire(root, { ttl = 60 }))
    local pending = assert(other:start(root, { ttl = 60, timeout = 60 }))
    eventually("the waiter", function() return #assert(manager:holders(root)) == 2 end)
    local function set(i, words) assert.equal("OK", cli(i, ("CLUSTER SETSLOT %d %s"):format(slot, words))) end
    set(3, "IMPORTING " .. nodes[2].id)
    set(2, "MIGRATING " .. nodes[3].id)
    -- Moves the slot key by key; no caller gets the lock meanwhile.
    while true do
      local key = cli(2, ("CLUSTER GETKEYSINSLOT %d 1"):format(slot)):match "[^\n]+"
      if not key then break end
      local third = assert(open())
      local ok = third:acquire(root, { timeout = 0 })
      assert.is_nil(ok)
      local said = cli(2, ("MIGRATE 127.0.0.1 %d %s 0 5000"):format(nodes[3].port, key))
      assert.truthy(said == "OK" or said == "NOKEY", said)
    end
    assert_code("connection", assert(open()):acquire(root, { timeout = 0 }))
    set(3, "NODE " .. nodes[3].id)
    set(2, "NODE " .. nodes[3].id)
    set(1, "NODE " .. nodes[3].id)
    assert_code("timeout", manager:acquire(root, { timeout = 0 }))
    eventually("the refresh", function() return held:refresh() end)
    assert_code("timeout", manager:acquire(root, { timeout = 0 }))
    assert(held:release { confirm = true })
    assert(assert(pending:wait(5)):release { confirm = true })
  end)

  it("lets no two in while slots move to and fro, whatever else happens to their clients", function()
    local manager = assert(open())
    local place, turn = {}, 0
    for n = 0, 1 do -- the roots that the stress has
      local held = assert(manager:acquire({ "u" .. n }, { ttl = 30 }))
      for i = 1, 3 do
        local slot = slot_of_held(i)
        if slot then place[#place + 1] = { slot = slot, at = i } end
      end
      assert(held:release { confirm = true })
    end
    assert.equal(2, #place)
    local function move(one, to)
      local function set(i, words) assert.equal("OK", cli(i, ("CLUSTER SETSLOT %d %s"):format(one.slot, words))) end
      set(to, "IMPORTING " .. nodes[one.at].id)
      set(one.at, "MIGRATING " .. nodes[to].id)
      eventually("the last key", function()
        local keys = cli(one.at, ("CLUSTER GETKEYSINSLOT %d 20"):format(one.slot))
        if keys == "" then return true end
        local said = cli(one.at, ("MIGRATE 127.0.0.1 %d '' 0 5000 KEYS %s"):format(nodes[to].port, keys:gsub("\n", " ")))
        assert.truthy(said == "OK" or said == "NOKEY", said)
      end)
      for _, i in ipairs { to, one.at, 6 - to - one.at } do set(i, "NODE " .. nodes[to].id) end
      one.at = to
    end
    stress.run(("redis://127.0.0.1:%d/?quarantine=0"):format(nodes[2].port), directory .. "/stress", 15, 100, function()
      turn = turn + 1
      local one = place[turn % 2 + 1]
      move(one, one.at % 3 + 1)
      socket.sleep(math.random() * 0.5)
    end)
    assert.is_true(turn > 2, turn)
  end)

  it("grants nothing on a promoted replica for the quarantine, and serves the other masters meanwhile", function()
    local manager = assert(open({}, "quarantine=4&prefix=promoted"))
    local root = root_at(1, manager)
    local elsewhere = root_at(3, manager)
    local held = assert(manager:acquire(root, { ttl = 60 }))
    -- A master answers before its replica has the record, and a busy machine may run us in between.
    local written = tonumber(cli(1, "INFO replication"):match "master_repl_offset:(%d+)")
    eventually("the replication", function()
      return tonumber(cli(4, "INFO replication"):match "slave_repl_offset:(%d+)") >= written
    end)
    shell("kill -9 " .. nodes[1].pid)
    nodes[1].pid = nil
    assert(assert(manager:acquire(elsewhere)):release { confirm = true })
    eventually("the promotion", function() return cli(4, "INFO replication"):find "role:master" end)
    eventually("the state", function() return cli(2, "CLUSTER INFO"):find "cluster_state:ok" end)
    local other = assert(open({}, "quarantine=4&prefix=promoted"))
    eventually("the refusal", function()
      local ok, err = other:acquire(root, { timeout = 0 })
      assert.is_nil(ok)
      return err.code == "timeout"
    end)
    eventually("the refresh", function()
      local ok, err = held:refresh()
      return ok or assert.not_equal("lost", err.code, err.message) and nil
    end)
    assert(held:release { confirm = true })
    -- The lock is free, and yet no caller gets it: something else may have been forgotten.
    assert_code("timeout", other:acquire(root, { timeout = 0.5 }))
  end)

  it("says that a slot's master is down, goes on with the others, and through them", function()
    local manager = assert(open())
    local root, elsewhere = root_at(2, manager), root_at(3, manager)
    shell("kill -9 " .. nodes[2].pid)
    nodes[2].pid = nil
    local err = assert_code("connection", manager:acquire(root, { timeout = 0 }))
    assert.is_true(err.retryable)
    eventually("the others", function()
      local held = manager:acquire(elsewhere, { timeout = 0 })
      return held and held:release { confirm = true }
    end)
  end)
end)
