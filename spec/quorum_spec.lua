-- A quorum of stores: its grants, refreshes and releases when single stores refuse, fail, do not answer, have
-- forgotten everything, or come back.

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local stores = require "spec.support.quorum"
local support = require "spec.support"
local uv = require "luv"

local R1, R2 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local LONG, SHORT = 60, 0.15

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

describe("a quorum", function()
  local open, dsns, quorum, single, records = stores.open, stores.dsns, stores.manager, stores.single, stores.records
  local fail, mend, empty, all_gone, slow, go_on = stores.fail, stores.mend, stores.empty, stores.all_gone, stores.slow, stores.go_on

  before_each(stores.begin)
  after_each(stores.finish)

  -- -------------------------------------------------------------- opening

  it("is told by a list of DSNs; what cannot be one is refused", function()
    local three = quorum()
    assert.truthy(tostring(three):find("open", 1, true))
    three:close()
    for _, wrong in ipairs { {}, { 17 }, { "file:/a", 17, "file:/b" }, { x = "file:/a" }, { "file:/a\0b", "null:", "file:/c" } } do
      assert.is_false((pcall(hierlock.open, wrong)))
    end
    assert.is_false((pcall(hierlock.open, dsns(), { quorum = "most" })))
    assert.is_false((pcall(hierlock.open, dsns(), { quorum = true })))
    assert.is_false((pcall(hierlock.open, "file:/a", { quorum = "all" })))
    local two = { dsns()[1], dsns()[2] }
    assert.truthy(assert_code("dsn", hierlock.open(two)).message:find("2 stores are no majority of anything", 1, true))
    assert(open(two, { quorum = "all" }))
    assert_code("dsn", hierlock.open { two[1], two[2], two[1] })
    assert.truthy(assert_code("dsn", hierlock.open { two[1], two[2], "nonsense" }))
    local err = assert_code("dsn", hierlock.open { two[1], two[2], "file:relative" })
    assert.truthy(err.message:find("store 3 of the quorum: the directory 'relative' is not absolute", 1, true), err.message)
    err = assert_code("unsupported", hierlock.open { two[1], two[2], "null:" })
    assert.truthy(err.message:find("store 3 of the quorum", 1, true), err.message)
  end)

  it("shows no password in what it says", function()
    local list = dsns()
    list[2], list[3] = "postgresql://me:topsecret@127.0.0.1:1/x", "postgresql://me:topsecret@127.0.0.1:2/y"
    local err = assert_code("connection", hierlock.open(list))
    assert.is_nil(err.message:find("topsecret", 1, true))
    -- The embedded one may not have been opened when both are refused.
    assert.matches("[23] of 3 stores could not be opened: .*postgresql at 127%.0%.0%.1:1", err.message)
  end)

  it("opens while a minority cannot be reached, and says so when that is a majority", function()
    local list = dsns()
    list[2] = "postgresql://127.0.0.1:1/x"
    local manager = assert(open(list))
    local handle = assert(manager:acquire(R1, { ttl = LONG, timeout = 0 }))
    assert.is_true(handle:release { confirm = true })
    assert_code("connection", hierlock.open(list, { quorum = "all" }))
  end)

  it("refuses stores with different spaces", function()
    assert(open("file:" .. stores.directories[3], { buckets = 77 })):close()
    local err = assert_code("mismatch", hierlock.open(dsns()))
    assert.truthy(err.message:find("of the quorum", 1, true), err.message)
  end)

  it("of four stores takes three", function()
    stores.fresh(4)
    local one, two = quorum(), quorum()
    assert(assert(one:acquire(R1, { timeout = 0 })):release { confirm = true })
    fail(1)
    assert(assert(one:acquire(R1, { timeout = 0 })):release { confirm = true })
    fail(2)
    assert.is_nil((one:acquire(R1, { timeout = 0 })))
    -- A split that could be two halves.
    mend(1)
    mend(2)
    for i = 1, 2 do assert(single(i):acquire(R1, { ttl = LONG, auto_release = false })) end
    assert_code("timeout", two:acquire(R1, { timeout = 0 }))
  end)

  -- --------------------------------------------------------- waiting, order

  it("keeps out every other majority, and lets in who waits when it goes", function()
    local one, two = quorum(), quorum()
    local handle = assert(one:acquire(R1, { ttl = LONG }))
    assert_code("timeout", two:acquire(R1, { timeout = 0 }))
    assert_code("timeout", two:acquire(R1, { timeout = 0.2 }))
    local pending = assert(two:start(R1, { timeout = 10 }))
    support.sleep(0.3)
    assert.is_false(pending:done())
    local start = support.now()
    assert(handle:release { confirm = true })
    local second = assert(pending:wait())
    assert.is_true(support.now() - start < 1)
    assert.is_true(second.token > handle.token)
  end)

  it("that is waited for in vain, or cancelled, leaves nothing behind", function()
    local one, two = quorum(), quorum()
    local handle = assert(one:acquire(R1, { ttl = LONG }))
    local pending = assert(two:start(R1, { timeout = 10 }))
    support.sleep(0.1)
    local start = support.now()
    pending:cancel()
    assert_code("cancelled", pending:wait())
    assert.is_true(support.now() - start < 1)
    assert(handle:release { confirm = true })
    assert(assert(one:acquire(R1, { timeout = 0 })):release { confirm = true })
  end)

  it("that was not granted leaves nothing at a store that has granted its part", function()
    local manager = quorum()
    local others = {}
    for i = 2, 3 do others[i] = assert(single(i):acquire(R1, { ttl = LONG })) end
    for _, timeout in ipairs { 0, 0.2 } do
      assert_code("timeout", manager:acquire(R1, { ttl = LONG, timeout = timeout }))
      support.wait_until(function() return records(1) == 0 end, "its end")
    end
    local waiting = assert(manager:start(R1, { ttl = LONG, timeout = 10 }))
    support.wait_until(function() return records(1) == 1 end, "its first part")
    waiting:cancel()
    assert_code("cancelled", waiting:wait())
    support.wait_until(function() return records(1) == 0 end, "its end")
    for i = 2, 3 do assert(others[i]:release { confirm = true }) end
    assert(assert(manager:acquire(R1, { timeout = 0 })):release { confirm = true })
  end)

  it("that was released, or not granted, leaves nothing at a store that grants its part late", function()
    local manager = quorum()
    assert(assert(manager:acquire(R1, { timeout = 0 })):release { confirm = true })
    for _, others in ipairs { false, true } do
      local held = {}
      all_gone()
      for i = 1, others and 2 or 0 do held[i] = assert(single(i):acquire(R1, { ttl = LONG })) end
      slow(3)
      local handle, err = manager:acquire(R1, { ttl = LONG, timeout = 0 })
      if handle then assert(handle:release()) else assert_code("timeout", handle, err) end
      assert.equal(others, handle == nil)
      go_on(3)
      support.sleep(support.STAYS_BLOCKED)
      support.wait_until(function() return records(3) == 0 end, "its end")
      for i = 1, #held do assert(held[i]:release { confirm = true }) end
    end
    assert(assert(manager:acquire(R1, { timeout = 0 })):release { confirm = true })
  end)

  it("is given up at any moment, also while a store is about to be asked", function()
    local list = {}
    for i, directory in ipairs(stores.directories) do list[i] = "sqlite:" .. directory end
    local manager = assert(open(list))
    local handle = assert(manager:acquire(R1, { ttl = LONG }))
    for round = 1, 600 do
      local all = {}
      -- The request is over when two have refused: the third may be about to be asked.
      for i = 1, 4 do all[i] = assert(manager:start(R1, { timeout = round % 8 == 0 and 10 or 0 })) end
      for i = 1, 4 do
        if round % 8 == 0 then all[i]:cancel() end
        assert.is_nil((all[i]:wait()))
      end
    end
    assert(handle:release { confirm = true })
    assert(assert(manager:acquire(R1, { timeout = 10 })):release { confirm = true })
  end)

  for _, late in ipairs { "dropped", "granted and given back" } do
    it(("that its process released is %s late, though the process ends at once"):format(late), function()
      local peer = support.process(nil)
      peer:call("handles.manager = assert(hierlock.open(...))", dsns())
      peer:call [[ assert(assert(handles.manager:acquire({ "u1", "a1", "r2" }, { ttl = 60 })):release { confirm = true }) ]]
      local acquire = [[ handles.lease = assert(handles.manager:acquire({ "u1", "a1", "r1" }, { ttl = 60 })) ]]
      if late == "dropped" then
        peer:call(acquire)
        support.wait_until(function() return records(3) == 1 end, "its third part")
        slow(3)
      else
        slow(3)
        peer:call(acquire)
      end
      peer:start "assert(handles.lease:release()) os.exit(0)"
      support.sleep(support.STAYS_BLOCKED)
      go_on(3)
      support.wait_until(function()
        uv.run "nowait"
        return peer.exited
      end, "the end of the process")
      for i = 1, 3 do assert.equal(0, records(i), i) end
    end)
  end

  it("that was released is made anew nowhere, though a store answers a refresh late that it has lost", function()
    local manager = quorum()
    for _ = 1, 6 do -- the order of what the store is asked at once is chance
      local handle = assert(manager:acquire(R1, { ttl = 0.2, timeout = 1 }))
      for i = 1, 3 do support.wait_until(function() return records(i) == 1 end) end
      support.sleep(0.22)
      assert(assert(single(3):acquire(R1, { timeout = 0 })):release { confirm = true })
      slow(3)
      assert(handle:refresh(LONG))
      assert(handle:release())
      go_on(3)
      for i = 1, 3 do support.wait_until(function() return records(i) == 0 end) end
      support.sleep(support.STAYS_BLOCKED)
      for i = 1, 3 do assert.equal(0, records(i), i) end
    end
  end)

  -- A store's answer that it has dropped a try is no answer to the release.
  it("that was given back at two stores while it was waited for is not taken for released there later", function()
    local manager, strangers = quorum(), {}
    local function lock(i) strangers[i] = assert(single(i):acquire(R1, { ttl = LONG, timeout = 5 })) end
    local function let(i) assert(strangers[i]:release { confirm = true }) end
    lock(1)
    lock(2)
    local waiting = assert(manager:start(R1, { ttl = 0.6, timeout = 20 }))
    support.sleep(0.3) -- the third is tried, and given back
    lock(3)
    let(2)
    support.sleep(1.2) -- so is the second: all are tried once a second at least
    let(1)
    local handle = assert(waiting:wait(20))
    support.sleep(0.7)
    lock(1)
    lock(2)
    assert_code("lost", handle:release { confirm = true })
  end)

  -- A store's part of a try is no lease of the quorum yet.
  it("that is waited for is not counted by who revokes its part at one store", function()
    local manager, other = quorum(), quorum()
    local strangers = {}
    for i = 2, 3 do strangers[i] = assert(single(i):acquire(R1, { ttl = LONG })) end
    local waiting = assert(manager:start(R1, { ttl = LONG, timeout = 10, owner = "alice" }))
    support.wait_until(function() return records(1) == 1 end, "its part")
    assert.equal(0, other:revoke({ owner = "alice" }, { by = "admin" }))
    for i = 2, 3 do assert(strangers[i]:release { confirm = true }) end
    assert(waiting:wait(10))
  end)

  it("is waited for by many without a deadlock, and each gets it", function()
    local peers = {}
    for i = 1, 4 do peers[i] = support.process(nil) end
    for _, peer in ipairs(peers) do
      peer:start([[
        local dsns, target = ...
        local manager = assert(hierlock.open(dsns))
        for _ = 1, 25 do
          local handle = assert(manager:acquire(target, { timeout = 18 }))
          assert(handle:release { confirm = true })
        end
        manager:close()
        return true
      ]], dsns(), R1)
    end
    for _, peer in ipairs(peers) do assert.is_true(peer:result()) end
  end)

  it("is had of the others while a record that nobody owns is left at one store", function()
    local manager, first = quorum(), single(1)
    assert(first:acquire(R1, { ttl = LONG, auto_release = false }))
    local start = support.now()
    assert(manager:acquire(R1, { timeout = 5 }))
    assert.is_true(support.now() - start < 1)
  end)

  it("is not waited for longer where one store does not answer", function()
    local manager = quorum()
    assert(assert(manager:acquire(R1)):release { confirm = true })
    all_gone()
    slow(1)
    for _ = 1, 5 do
      local start = support.now()
      assert(assert(manager:acquire(R1, { timeout = 0 })):release())
      assert.is_true(support.now() - start < 0.5)
    end
    go_on(1)
    support.wait_until(function() return records(1) == 0 end)
  end)

  it("leaves no more than some questions at a store that does not answer, and drops there later what was released", function()
    local function threads()
      local file = assert(io.open("/proc/self/status"))
      local n = tonumber(file:read("*a"):match("Threads:%s*(%d+)"))
      file:close()
      return n
    end
    local manager = quorum()
    local handle = assert(manager:acquire(R2, { ttl = LONG }))
    support.wait_until(function() return records(1) == 1 end)
    local before, most = threads(), 0
    slow(1)
    for _ = 1, 600 do
      -- On a busy machine one of the others may need more than its second, too; then it is asked once more.
      support.wait_until(function()
        local ok, err = handle:refresh()
        assert(ok or err.code == "timeout" or err.code == "connection", tostring(err))
        return ok
      end, "a refresh")
      most = math.max(most, threads() - before)
    end
    assert.is_true(most < 30, most .. " threads more")
    for _ = 1, 100 do assert(assert(manager:acquire(R1)):release()) end
    assert(handle:release())
    go_on(1)
    support.wait_until(function() return records(1) == 0 end)
  end)

  it("that was released while a store failed is dropped there when the store works again, though nothing else is asked", function()
    local manager = quorum()
    local one, two = assert(manager:acquire(R1, { ttl = LONG })), assert(manager:acquire(R2, { ttl = LONG }))
    support.wait_until(function() return records(3) == 2 end)
    fail(3)
    support.sleep(0.05) -- an embedded store looks every 10 ms; before, it would still drop them
    assert(one:release { confirm = true })
    assert(two:release())
    support.sleep(0.05) -- the store is asked meanwhile, in vain: no caller is told
    mend(3)
    support.wait_until(function() return records(3) == 0 end, "the end of its records")
  end)

  support.on_redis(function(store)
    -- On a busy machine a peer is killed before the store has heard that it goes. The next list of stores would be refused.
    after_each(function()
      stores.finish()
      store.cli "flushall"
    end)

    it("is asked for once more when a part that it was granted was revoked meanwhile", function()
      local redis = store.dsn -- with quarantine=0: it may have been emptied
      local list = { redis, "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] }
      local manager, observer = assert(open(list, { quorum = "all" })), assert(open(redis))
      local stranger = assert(assert(open(list[3])):acquire(R1, { ttl = LONG }))
      local waiting = assert(manager:start(R1, { ttl = 0.6, timeout = 8 }))
      support.wait_until(function() return #assert(observer:leases { target = R1 }) == 1 end, "its part")
      assert(observer:revoke({ target = R1 }, { by = "ops" }))
      support.sleep(0.5) -- what it was granted long ago is refreshed meanwhile
      assert(stranger:release { confirm = true })
      local handle, err = waiting:wait(8)
      assert.is_true(handle ~= nil or err.code == "connection", tostring(err))
      if handle then assert(handle:release { confirm = true }) end
    end)

    it("that a store granted late is dropped there, though the store did not hear of that at first", function()
      local between = proxy.open(store)
      local list = { "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2], between.dsn }
      local observer, peer = assert(open(store.dsn)), support.process(nil)
      local target = { "u" .. uv.hrtime() } -- a run that failed has left another
      local function parts() return #assert(observer:leases { target = target }) end
      peer:call([[ handles.manager = assert(require("hierlock").open(...)) ]], list)
      for n = 1, #between.connections do between.hold(n) end
      peer:call([[ handles.lease = assert(handles.manager:acquire(...)) ]], target, { ttl = LONG })
      peer:call([[ assert(handles.lease:release()) ]])
      support.wait_until(function() uv.run("nowait") return parts() == 1 end, "the grant")
      for n = 1, #between.connections do
        between.detain(n)
        between.let(n)
      end
      local function is_told()
        for _, connection in ipairs(between.connections) do
          if connection.detained and #connection.detained > 0 then return true end
        end
      end
      support.wait_until(function() uv.run("nowait") return is_told() end, "the drop")
      for _, connection in ipairs(between.connections) do connection.finish() end
      support.wait_until(function() uv.run("nowait") return parts() == 0 end, "the end of what it granted")
      peer:close()
      between.close()
    end)

    it("that was healed in vain at a store is dropped there once it was released and the store answers again", function()
      local between = proxy.open(store)
      local files = { "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] }
      local observer, peer, others = assert(open(store.dsn)), support.process(nil), {}
      local target = { "u" .. uv.hrtime() } -- a run that failed has left another
      local function parts() return assert(observer:leases { target = target }) end
      for i, dsn in ipairs(files) do others[i] = assert(assert(open(dsn)):acquire(target, { ttl = LONG })) end
      peer:call([[ handles.manager = assert(require("hierlock").open(...)) ]], { between.dsn, files[1], files[2] })
      peer:call([[ handles.pending = handles.manager:start(...) ]], target, { ttl = 9, timeout = LONG })
      local function is_answered()
        for _, connection in ipairs(between.connections) do
          if not connection.answered then return false end
        end
        return true
      end
      support.wait_until(function() uv.run("nowait") return #parts() == 1 and is_answered() end, "the grant of one")
      between.refuse(0)
      for _, connection in ipairs(between.connections) do connection.finish() end
      local tries = #between.connections
      -- Its refresh fails, so it is given back, in vain.
      support.wait_until(function() uv.run("nowait") return #between.connections >= tries + 2 end, "the drop")
      for _, other in ipairs(others) do assert(other:release()) end
      peer:call([[ handles.lease = assert(handles.pending:wait()) ]])
      tries = #between.connections
      support.wait_until(function() uv.run("nowait") return #between.connections > tries end, "the healing")
      peer:call([[ assert(handles.lease:release { confirm = true }) ]])
      between.refuse(nil)
      local left
      support.wait_until(function()
        uv.run("nowait")
        local part = parts()[1]
        left = part and part.remaining or left
        return not part
      end, "the end of its record")
      assert.is_true(left == nil or left > 0.5, "its time was up")
      peer:close()
      between.close()
    end)

    it("that was waited for longer than its ttl is dropped at a store that did not hear that it was given up", function()
      local between = proxy.open(store)
      local files = { "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] }
      local observer, peer, others = assert(open(store.dsn)), support.process(nil), {}
      local target = { "u" .. uv.hrtime() } -- a run that failed has left another
      local function part() uv.run("nowait") return assert(observer:leases { target = target })[1] end
      for i, dsn in ipairs(files) do others[i] = assert(assert(open(dsn)):acquire(target, { ttl = LONG })) end
      peer:call([[ handles.manager = assert(hierlock.open(...)) ]], { between.dsn, files[1], files[2] })
      local start = support.now()
      peer:call([[ handles.pending = handles.manager:start(...) ]], target, { ttl = 3, timeout = LONG })
      support.wait_until(function() return part() and support.now() > start + 3.1 end, "its part, which is refreshed")
      between.refuse(0)
      for _, connection in ipairs(between.connections) do connection.finish() end
      assert.equal("cancelled", peer:call [[
        handles.pending:cancel()
        return select(2, handles.pending:wait()).code
      ]])
      between.refuse(nil)
      local left
      support.wait_until(function()
        local found = part()
        left = found and found.remaining or left
        return not found
      end, "the end of its record")
      assert.is_true(left == nil or left > 0.3, "its time was up")
      for _, other in ipairs(others) do assert(other:release()) end
      peer:close()
      between.close()
    end)

    -- Two heirs of one text, with the same list of stores. The first heir's connections to Redis are the first ones.
    local function heirs()
      local between, made = proxy.open(store), {}
      finally(function()
        support.close_peers()
        between.close()
      end)
      local list = { between.dsn, "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] }
      local target = { "u" .. uv.hrtime() } -- a run that failed has left another
      for _, name in ipairs { "one", "two" } do
        local heir = support.process(nil)
        heir:call([[
          local list, name, target = ...
          handles.manager = assert(hierlock.open(list, { application = name }))
          assert(assert(handles.manager:acquire(target, { ttl = 60 })):release { confirm = true })
        ]], list, name, { "warm" .. name })
        made[name] = heir
        made.first = made.first or #between.connections
      end
      local text = made.two:call("return assert(assert(handles.manager:acquire(..., { ttl = 60 })):export())", target)
      local observer = assert(open(store.dsn))
      local function record() uv.run("nowait") return assert(observer:leases { target = target })[1] end
      support.wait_until(record, "the grant of the store behind the proxy")
      made.id = record().id
      return between, made, text, record
    end
    local IMPORT = "handles.lease = assert(handles.manager:import(...)) return true"

    local function assert_is_twos(one, two, record)
      assert.equal("lost", one:call [[ return select(2, handles.lease:refresh()).code ]])
      assert.equal("two", assert(record(), "the store has dropped the record of the later import").application)
      assert.is_true(two:call [[ return handles.lease:refresh() and handles.lease:release { confirm = true } ]])
      support.wait_until(function() return not record() end, "the end of its record")
    end

    it("belongs to the later import, though a store reads the earlier one's last", function()
      local between, heir, text, record = heirs()
      for i = 1, heir.first do between.detain(i) end
      assert.is_true(heir.one:call(IMPORT, text))
      assert.is_true(heir.two:call(IMPORT, text))
      assert.equal("two", record().application)
      for i = 1, heir.first do between.deliver(i) end
      local till = support.now() + 0.5
      while support.now() < till do assert.equal("two", record().application) end
      assert_is_twos(heir.one, heir.two, record)
    end)

    it("belongs to the later import, though the earlier one heals it at a store that was down", function()
      local between, heir, text, record = heirs()
      between.refuse(0)
      for i = 1, heir.first do between.connections[i].finish() end
      assert.is_true(heir.one:call(IMPORT, text))
      assert.is_true(heir.two:call(IMPORT, text))
      assert.equal("two", record().application)
      local before = #between.connections
      between.refuse(nil)
      support.wait_until(function()
        uv.run("nowait")
        for _, command in ipairs(between.commands) do
          local connection = between.connections[command.connection]
          if command.connection > before and (command.text or ""):find(heir.id, 1, true) and connection.answered then return true end
        end
      end, "the healing")
      assert_is_twos(heir.one, heir.two, record)
    end)

    -- Three databases of one server, each behind a proxy of its own: one heir's question can wait at each, while the
    -- other's passes.
    it("is not believed by two heirs that import it at once while a store is down", function()
      local ways, list, heir = {}, {}, {}
      finally(function()
        support.close_peers()
        for _, way in ipairs(ways) do way.close() end
      end)
      for i = 1, 3 do
        local dsn = store.dsn:gsub("/0%?", ("/%d?"):format(i))
        ways[i] = proxy.open(setmetatable({ dsn = dsn }, { __index = store }))
        list[i] = ways[i].dsn
      end
      local target, mine = { "u" .. uv.hrtime() }, {}
      for number, name in ipairs { "one", "two", "giver" } do
        heir[number], mine[number] = support.process(nil), {}
        local before = {}
        for i, way in ipairs(ways) do before[i] = #way.connections end
        heir[number]:call([[
          local list, name, target = ...
          handles.manager = assert(hierlock.open(list, { application = name }))
          assert(assert(handles.manager:acquire(target, { ttl = 60 })):release { confirm = true })
        ]], list, name, { "warm" .. name })
        for i, way in ipairs(ways) do mine[number][i] = { before[i] + 1, #way.connections } end
      end
      local text = heir[3]:call("return assert(assert(handles.manager:acquire(..., { ttl = 60 })):export())", target)
      ways[3].refuse(0)
      for _, connection in ipairs(ways[3].connections) do connection.finish() end
      local function each(number, i, method)
        for n = mine[number][i][1], mine[number][i][2] do ways[i][method](n) end
      end
      local function is_kept(number, i)
        uv.run("nowait")
        for n = mine[number][i][1], mine[number][i][2] do
          local kept = ways[i].connections[n].detained
          if kept and #kept > 0 then return true end
        end
      end
      local observer = {}
      local function is_had(number, i)
        observer[i] = observer[i] or assert(open((store.dsn:gsub("/0%?", ("/%d?"):format(i)))))
        uv.run("nowait")
        local found = assert(observer[i]:leases { target = target })[1]
        return found and found.application == (number == 1 and "one" or "two")
      end
      -- The first store hears the one before the two, the second store the two before the one.
      each(2, 1, "detain")
      each(1, 2, "detain")
      local START = [[
        local lease, err = handles.manager:import(...)
        handles.lease = lease
        return lease and "imported" or err.code
      ]]
      for number, other in ipairs { 2, 1 } do
        assert.is_falsy(is_had(number, number))
        heir[number]:start(START, text)
        support.wait_until(function() return is_had(number, number) and is_kept(number, other) end, "its first half")
      end
      each(1, 2, "deliver")
      assert.equal("imported", (heir[1]:result()))
      each(2, 1, "deliver")
      assert.equal("lost", (heir[2]:result()))
      -- The text is as good as it was.
      assert.equal("imported", (heir[2]:call(START, text)))
      assert.is_true(heir[2]:call [[ return handles.lease:refresh() ]])
      assert.equal("lost", heir[1]:call [[ return select(2, handles.lease:refresh()).code ]])
      assert.is_true(heir[2]:call [[ return handles.lease:release { confirm = true } ]])
    end)

    it("that its stores have dropped is released, though one of them could not say so twice", function()
      local between, lost
      -- The second answer says that the record is not there any more.
      between = proxy.open(store, function(data)
        if lost or data ~= "*2\r\n:1\r\n$4\r\ngone\r\n" then return data end
        lost = true
        for _, connection in ipairs(between.connections) do connection.finish() end
        return ""
      end)
      local observer, peer = assert(open(store.dsn)), support.process(nil)
      local target = { "u" .. uv.hrtime() } -- a run that failed has left another
      peer:call([[ handles.manager = assert(hierlock.open(..., { quorum = "all" })) ]],
        { "sqlite:" .. stores.directories[1], between.dsn })
      peer:call([[ handles.lease = assert(handles.manager:acquire(...)) ]], target, { ttl = LONG })
      for n = 1, #between.connections do between.hold(n) end
      peer:start [[
        local ok, err = handles.lease:release { confirm = true }
        return ok, err and err.message
      ]]
      support.wait_until(function() uv.run("nowait") return not observer:leases { target = target }[1] end, "its drop")
      for _, connection in ipairs(between.connections) do connection.finish() end
      local ok, message = peer:result()
      assert.is_true(lost)
      assert.is_true(ok, message)
      peer:close()
      between.close()
    end)
  end)

  -- -------------------------------------------------------------- its life

  it("is believed for ttl less the time it took, 1 % and 2 ms", function()
    local handle = assert(quorum():acquire(R1, { ttl = 10 }))
    local left = handle:remaining()
    assert.is_true(left <= 10 - 0.1 - 0.002 and left > 9, left)
    assert(handle:refresh(20))
    left = handle:remaining()
    assert.is_true(left <= 20 - 0.2 - 0.002 and left > 19, left)
  end)

  it("is believed from the first store's grant on, however late the last one answers", function()
    local manager = quorum "all"
    assert(assert(manager:acquire(R1, { timeout = 0 })):release { confirm = true })
    slow(3)
    local waiting = assert(manager:start(R1, { ttl = LONG, timeout = 10 }))
    support.wait_until(function() return records(1) == 1 and records(2) == 1 end, "their grants")
    local start = support.now()
    support.sleep(0.3)
    go_on(3)
    local handle = assert(waiting:wait(10))
    local took = support.now() - start
    assert.is_true(handle:remaining() <= LONG - LONG / 100 - took + 0.01, handle:remaining())
  end)

  it("is held as long as a majority's records last, whichever stores answer", function()
    local list = {}
    for i = 1, 3 do list[i] = "sqlite:" .. stores.directories[i] end
    local function end_at(i)
      support.process(nil):call([[
        local database = assert(require("luasql.sqlite3").sqlite3():connect((...)))
        assert(database:execute "UPDATE hierlock_leases SET till = 1, till_unix = 1")
        database:close()
      ]], stores.directories[i])
    end
    local handle = assert(assert(open(list)):acquire(R1, { ttl = LONG }))
    for i = 1, 3 do
      support.wait_until(function() return #assert(assert(open(list[i])):leases()) == 1 end, "its grant at store " .. i)
    end
    for out = 1, 3 do
      local path = stores.directories[out]
      os.execute(("mv %s %s-gone && mkdir %s"):gsub("%%s", path))
      assert(handle:check())
      os.execute(("rmdir %s && mv %s-gone %s"):gsub("%%s", path))
    end
    end_at(1)
    assert(handle:check())
    end_at(2)
    assert_code("lost", handle:check())
  end)

  describe("asks its stores for a lease that it has", function()
    local handle

    -- The store answers 0.6 s later.
    local function late(i)
      local peer = support.process(nil)
      peer:call([[
        handles.manager = assert(hierlock.open("file:" .. ...))
        require("hierlock_spec.stall").begin(... .. "/control")
      ]], stores.directories[i])
      peer:start([[ support.sleep(0.6) require("hierlock_spec.stall").finish(... .. "/control") ]], stores.directories[i])
    end

    before_each(function()
      handle = assert(quorum():acquire(R1, { ttl = LONG }))
      for i = 1, 3 do support.wait_until(function() return records(i) == 1 end, "its grant at store " .. i) end
    end)
    after_each(function() handle = nil end)

    -- Calls it, and looks whether it returned before the late store answered.
    local function call(method, early)
      local start = support.now()
      local ok, err = handle[method](handle)
      local took = support.now() - start
      if early then assert.is_true(took < 0.5, took) else assert.is_true(took > 0.3, took) end
      return ok, err
    end

    for _, method in ipairs { "refresh", "check" } do
      it("in a " .. method .. ": one that fails is made up for by one that answers late", function()
        fail(1)
        late(2)
        assert(call(method, false))
      end)

      it("in a " .. method .. ": one that has lost it is made up for by one that answers late", function()
        empty(1)
        late(2)
        local ok, err = call(method, false)
        assert(ok, tostring(err))
      end)

      it("in a " .. method .. ": when two fail, the third is not waited for", function()
        fail(1)
        fail(2)
        late(3)
        assert.is_nil((call(method, true)))
      end)

      it("in a " .. method .. ": when two have lost it, the third is not waited for", function()
        empty(1)
        empty(2)
        late(3)
        assert_code("lost", call(method, true))
      end)

      it("in a " .. method .. ": the third is not waited for when two have it", function()
        late(3)
        assert(call(method, true))
      end)

      it("in a " .. method .. ": when one fails and one has lost it, the third says which it is", function()
        fail(1)
        empty(2)
        late(3)
        local _, err = call(method, false)
        assert.equal("store", err.code, err.message)
      end)
    end
  end)

  it("is listed with the time that a majority has it for, whichever store has it for longest", function()
    local handle = assert(quorum():acquire(R1, { ttl = 60 }))
    for i = 1, 3 do support.wait_until(function() return records(i) == 1 end) end
    fail(1)
    assert(handle:refresh(100))
    fail(2)
    assert_code("store", handle:refresh(200))
    mend(1)
    mend(2)
    local left = assert(quorum():leases { target = R1 })[1].remaining
    assert.is_true(left > 60 and left <= 100, left)
  end)

  it("is made to hold at a store that was emptied, so that another one may be emptied later", function()
    local manager, other = quorum(), quorum()
    local handle = assert(manager:acquire(R1, { ttl = LONG }))
    for i = 1, 3 do
      empty(i)
      assert(handle:refresh())
      support.wait_until(function() return records(i) == 1 end)
      assert_code("timeout", other:acquire(R1, { timeout = 0 }))
    end
    assert.is_true(handle:release { confirm = true })
    assert(other:acquire(R1, { timeout = 0 }))
  end)

  it("stands on all stores soon after its grant, however many wanted it, so that one may be emptied", function()
    local manager, other = quorum(), quorum()
    -- Like another program's try that was granted a part.
    local part = assert(single(3):acquire(R1, { ttl = LONG }))
    local handle = assert(manager:acquire(R1, { ttl = LONG, timeout = 0 }))
    assert.is_true(part:release { confirm = true })
    support.wait_until(function() return single(3):leases()[1] end)
    empty(1)
    assert_code("timeout", other:acquire(R1, { timeout = 0 }))
    assert.is_true(handle:release { confirm = true })
    assert(other:acquire(R1, { timeout = 0 }))
  end)

  it("comes to stand on a store that was down at its grant, without a refresh", function()
    local manager, other = quorum(), quorum()
    fail(2)
    local handle = assert(manager:acquire(R1, { ttl = LONG, timeout = 0 }))
    mend(2)
    support.wait_until(function() return records(2) == 1 end)
    empty(3)
    assert_code("timeout", other:acquire(R1, { timeout = 0 }))
    assert.is_true(handle:release { confirm = true })
    all_gone()
  end)

  it("is not granted with a part that was lost while others were waited for", function()
    local manager, blockers = quorum(), {}
    for i = 2, 3 do blockers[i] = assert(single(i):acquire(R1, { ttl = LONG })) end
    local waiting = assert(manager:start(R1, { ttl = 0.6, timeout = 3 }))
    support.wait_until(function() return records(1) == 1 end, "its first part")
    empty(1)
    assert(single(1):acquire(R1, { ttl = LONG, auto_release = false }))
    -- By then the part was to be refreshed.
    support.sleep(0.5)
    assert(blockers[2]:release { confirm = true })
    assert_code("timeout", waiting:wait(10))
  end)

  it("is not granted with a part of a store that failed while others were waited for", function()
    local manager, strangers = quorum(), {}
    for i = 2, 3 do strangers[i] = assert(single(i):acquire(R1, { ttl = LONG })) end
    local waiting = assert(manager:start(R1, { ttl = 0.6, timeout = 20 }))
    support.wait_until(function() return records(1) == 1 end, "its first part")
    fail(1)
    support.sleep(0.7) -- the part's time is up
    assert(strangers[2]:release { confirm = true })
    support.sleep(support.STAYS_BLOCKED)
    assert.is_false(waiting:done())
    assert(strangers[3]:release { confirm = true })
    assert.is_true(assert(waiting:wait(20)):is_held())
    mend(1)
  end)

  it("is lost when a majority has forgotten it, and the rest goes", function()
    local manager = quorum()
    local handle = assert(manager:acquire(R1, { ttl = LONG }))
    empty(1)
    empty(2)
    assert_code("lost", handle:refresh())
    assert.is_false(handle:is_held())
    support.wait_until(function() return records(3) == 0 end)
  end)

  it("has tokens that grow, whichever majority grants", function()
    local before = ""
    for round = 1, 30 do
      local manager = quorum()
      local out = round % 3 + 1
      fail(out)
      local handle = assert(manager:acquire(R1, { timeout = 0 }))
      assert.is_true(handle.token > before, handle.token .. " after " .. before)
      before = handle.token
      assert(handle:release { confirm = true })
      mend(out)
      -- Far ahead of the others.
      if round == 5 then
        for _ = 1, 500 do assert(assert(single(1):acquire(R2)):release()) end
      end
      manager:close()
    end
  end)

  -- Makes a database file there.
  local function far_ahead(path)
    assert(open("sqlite:" .. path))
    support.process(nil):call([[
      local database = assert(require("luasql.sqlite3").sqlite3():connect((...)))
      assert(database:execute "UPDATE hierlock SET counter = 3 * 60 * 60 * 1000000 + ]] .. os.time() .. [[000000")
      database:close()
    ]], path)
  end

  -- Is granted while each of those stores in turn is another's.
  local function assert_tokens_grow(list, outs)
    local manager, before = assert(open(list)), ""
    for _, out in ipairs(outs) do
      local stranger = assert(assert(open(list[out])):acquire(R1, { timeout = 10 }))
      local handle = assert(manager:acquire(R1, { timeout = 10 }))
      assert.is_true(handle.token > before, handle.token .. " after " .. before)
      before = handle.token
      assert(handle:release { confirm = true })
      assert(stranger:release { confirm = true })
    end
  end

  -- It grants first with one of the others, and then those grant.
  for ahead, outs in ipairs { { 3, 1, 2, 1, 3 }, { 1, 3, 2, 3, 1 } } do
    it("has tokens that grow, though database file " .. ahead .. " of its stores is far ahead of its clock", function()
      local list = {}
      for i = 1, 3 do list[i] = "sqlite:" .. stores.directories[i] end
      far_ahead(stores.directories[ahead])
      assert_tokens_grow(list, outs)
    end)
  end

  support.on_memcached(function(store)
    it("is granted though one store cannot be told the highest token, and another fails", function()
      local manager = assert(open { store.dsn, "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] })
      os.execute(("mv %s %s-gone && mkdir %s"):gsub("%%s", stores.directories[2]))
      assert(assert(manager:acquire(R1, { timeout = 1 })):release { confirm = true })
    end)

    it("keeps its record there while it waits for another store", function()
      local dsn, there = "sqlite:" .. stores.directories[1], assert(open(store.dsn))
      local stranger = assert(assert(open(dsn)):acquire(R1))
      local manager = assert(open({ store.dsn, dsn }, { quorum = "all" }))
      local pending = assert(manager:start(R1, { ttl = 1, timeout = 30 }))
      support.wait_until(function() return #assert(there:leases { target = R1 }) == 1 end, "its first part")
      for _ = 1, 75 do -- the caller refreshes it meanwhile, several times
        assert.equal(1, #assert(there:leases { target = R1 }))
        support.sleep(0.02)
      end
      assert(stranger:release { confirm = true })
      assert(assert(pending:wait(30)):release { confirm = true })
    end)

    it("has tokens that grow, though a store that cannot be told the highest is of the majority", function()
      far_ahead(stores.directories[2])
      assert_tokens_grow({ store.dsn, "sqlite:" .. stores.directories[2], "sqlite:" .. stores.directories[3] }, { 3, 2, 3, 2 })
    end)
  end)

  it("is handed over as a text that holds at each store, and keeps its token", function()
    local one, two = quorum(), quorum(nil, { application = "the heir" })
    local handle = assert(one:acquire(R1, { ttl = LONG }))
    local token, text = handle.token, assert(handle:export())
    fail(2)
    local taken = assert(two:import(text))
    assert.equal(token, taken.token)
    mend(2) -- with the record as it was
    support.wait_until(function()
      assert(taken:refresh())
      return assert(single(2):leases())[1].application == "the heir"
    end, "the third store told")
    fail(1)
    support.wait_until(function() return taken:refresh() end, "its answer")
    mend(1)
    assert(taken:release { confirm = true })
    assert_code("lost", one:import(text))
  end)

  for _, how in ipairs { "fails", "does not answer" } do
    it("is handed over again when an import had one store alone, as each other one " .. how, function()
      local one, other = quorum(), quorum()
      local handle = assert(one:acquire(R1, { ttl = LONG }))
      for i = 1, 3 do support.wait_until(function() return records(i) == 1 end, "its part") end
      local text = assert(handle:export())
      for round = 1, 4 do
        for i = 2, 3 do (how == "fails" and fail or slow)(i) end
        local none, err = (round % 2 == 0 and one or other):import(text, { ttl = LONG })
        assert.is_nil(none)
        assert.is_true(err.code == "connection" or err.code == "timeout" or err.code == "store", err.code)
        for i = 2, 3 do (how == "fails" and mend or go_on)(i) end
        assert_code("timeout", one:acquire(R1, { timeout = 0 }))
      end
      -- An import does not wait for a store that has not answered yet since it was silent. Its record may name an
      -- earlier import, and stays then.
      local probe = assert(other:acquire(R2, { ttl = LONG }))
      for i = 1, 3 do support.wait_until(function() return records(i) == 2 end, "its answer") end
      assert(probe:release { confirm = true })
      for i = 1, 3 do support.wait_until(function() return records(i) == 1 end, "the end of the probe") end
      local taken = assert(other:import(text))
      for _ = 1, 10 do
        assert(taken:refresh())
        support.sleep(0.02)
      end
      assert.equal(handle.token, taken.token)
      assert(taken:release { confirm = true })
      all_gone()
    end)
  end

  it("is listed with who imported it, though the first store was not told", function()
    local one, other, heir = quorum(), quorum(), support.process(nil)
    heir:call([[ handles.manager = assert(require("hierlock").open(..., { application = "the heir" })) ]], dsns())
    local text = assert(assert(one:acquire(R1, { ttl = LONG })):export())
    support.wait_until(function() return records(1) == 1 end, "its first part") -- two parts are a quorum
    fail(1)
    heir:call([[ handles.lease = assert(handles.manager:import(...)) ]], text)
    heir:signal "sigkill" -- so nobody tells the store later
    mend(1)
    assert.equal("quorum", assert(single(1):leases())[1].application)
    local function assert_heir(list)
      assert.equal(1, #list)
      assert.equal("the heir", list[1].application)
    end
    assert_heir(assert(other:leases()))
    assert_heir(assert(other:holders(R1)))
    -- Of two that answer each names another.
    fail(3)
    assert_heir(assert(other:leases()))
    mend(3)
  end)

  it("is listed once, and revoked everywhere that can be reached", function()
    local manager, other = quorum(), quorum()
    local handle = assert(manager:acquire(R1, { ttl = LONG, owner = "alice" }))
    assert(single(1):acquire(R2, { ttl = LONG, owner = "stray", auto_release = false }))
    local list = assert(other:leases())
    assert.equal(1, #list)
    assert.equal("alice", list[1].owner)
    assert.equal(1, #other:holders(R1))
    fail(3)
    assert.equal(1, other:revoke({ owner = "alice" }, { by = "admin", reason = "lunch" }))
    assert.equal("admin", assert_code("lost", handle:refresh()).revoked_by)
    mend(3)
  end)

  it("lists who waits, for whichever store it is", function()
    local second = assert(single(2):acquire(R1, { ttl = LONG }))
    local third = assert(single(3):acquire(R1, { ttl = LONG }))
    local pending = assert(quorum():start(R1, { ttl = LONG, timeout = support.DEADLINE, label = "for the second" }))
    support.wait_until(function() return records(1) == 1 end, "the part of the first store")
    local observer = quorum()
    support.wait_until(function()
      for _, one in ipairs(assert(observer:holders(R1))) do
        if one.waiting and one.label == "for the second" then return true end
      end
    end, "the waiter")
    assert(second:release { confirm = true })
    assert(third:release { confirm = true })
    assert(assert(pending:wait(support.DEADLINE)):release { confirm = true })
  end)

  it("is renewed while its process lives where no ttl was given, and released by its end", function()
    local peer = support.process(nil)
    peer:call([[
      handles.manager = assert(hierlock.open(..., { hold_timeout = 1 }))
      handles.lock = assert(handles.manager:acquire({ "u1", "a1", "r1" }))
      handles.dsns = ...
    ]], dsns())
    support.sleep(1.5)
    assert_code("timeout", quorum():acquire(R1, { timeout = 0 }))
    peer:call "handles.manager:close()"
    assert(quorum():acquire(R1, { timeout = 2 }))
    assert_code("unsupported", quorum():acquire(R2):to_lease { ttl = 1 })
  end)

  it("ends by itself when its process is killed", function()
    local peer = support.process(nil)
    peer:call([[
      handles.manager = assert(hierlock.open(...))
      handles.lock = assert(handles.manager:acquire({ "u1", "a1", "r1" }, { ttl = 1 }))
    ]], dsns())
    peer:signal "sigkill"
    local start = support.now()
    assert(quorum():acquire(R1, { timeout = 10 }))
    assert.is_true(support.now() - start < 3)
  end)

  it("is over when its time is up, and can be taken again", function()
    local one, two = quorum(), quorum()
    local handle = assert(one:acquire(R1, { ttl = SHORT }))
    support.sleep(SHORT + 0.02)
    assert.is_false(handle:is_held())
    assert(two:acquire(R1, { timeout = 0 }))
    assert_code("lost", handle:refresh())
  end)

  -- ---------------------------------------------------------- update locks

  local UPDATE = { mode = "update", ttl = LONG }

  -- In which mode each store has the lease, as "exclusive update -".
  local function modes()
    local list = {}
    for i in ipairs(stores.directories) do
      local lease = assert(single(i):leases({ target = R1 }))[1]
      list[i] = lease and lease.mode or "-"
    end
    return table.concat(list, " ")
  end

  local function modes_become(expected)
    support.wait_until(function() return modes() == expected end, expected)
  end

  it("upgrades at a majority; a store that has not done so counts no more, until it is made anew", function()
    local manager, other = quorum(), quorum()
    local handle = assert(manager:acquire(R1, UPDATE))
    modes_become "update update update"
    slow(3)
    assert.is_true(handle:upgrade { timeout = 5 })
    assert.equal("exclusive", handle.mode)
    go_on(3)
    -- The store has heard of the upgrade late, or hears of it at a refresh.
    support.wait_until(function()
      assert(handle:refresh())
      return modes() == "exclusive exclusive exclusive"
    end)
    -- So another one may forget it.
    empty(1)
    assert_code("timeout", other:acquire(R1, { mode = "shared", timeout = 0 }))
    assert(handle:refresh())
    modes_become "exclusive exclusive exclusive"
    assert.is_true(handle:downgrade())
    modes_become "update update update"
    assert(assert(other:acquire(R1, { mode = "shared", timeout = 0 })):release { confirm = true })
    assert.is_true(handle:release { confirm = true })
    modes_become "- - -"
  end)

  it("is exclusive where an upgrade came late, though it was downgraded and upgraded since", function()
    local handle, other = assert(quorum():acquire(R1, UPDATE)), quorum()
    modes_become "update update update"
    slow(3)
    assert.is_true(handle:upgrade { timeout = 5 })
    assert.is_true(handle:downgrade())
    assert.is_true(handle:upgrade { timeout = 5 })
    go_on(3)
    support.wait_until(function()
      assert(handle:refresh())
      return modes() == "exclusive exclusive exclusive"
    end)
    empty(1)
    assert.is_true(handle:refresh())
    for _ = 1, 3 do assert_code("timeout", other:acquire(R1, { mode = "shared", timeout = 0 })) end
    for i = 2, 3 do assert_code("timeout", single(i):acquire(R1, { mode = "shared", timeout = 0 })) end
  end)

  it("is lost when the majority that has upgraded has forgotten it", function()
    local handle = assert(quorum():acquire(R1, UPDATE))
    modes_become "update update update"
    -- The reader blocks only at the third store, whose part says nothing of readers.
    local reader = assert(single(3):acquire(R1, { mode = "shared", ttl = LONG }))
    assert.is_true(handle:upgrade { timeout = 5 })
    assert.matches("^exclusive exclusive", modes())
    empty(1)
    assert_code("lost", handle:refresh())
    assert.is_false(handle:is_held())
    assert(reader:release { confirm = true })
    modes_become "- - -"
  end)

  -- The belief of its holder must not outlast what the stores that are left have.
  for _, call in ipairs { "refresh", "upgrade", "downgrade" } do
    it("is believed no longer than by what is left of it, when a store has lost it: " .. call, function()
      local manager, ttl, reader = quorum(), 40, nil
      local handle = assert(manager:acquire(R1, { mode = "update", ttl = ttl }))
      modes_become "update update update"
      if call == "downgrade" then
        assert.is_true(handle:upgrade { timeout = 5 })
        modes_become "exclusive exclusive exclusive"
        assert(handle:refresh())
      end
      local first = support.now()
      support.sleep(0.5)
      fail(3)
      assert(handle:refresh())
      mend(3)
      assert.is_true(handle:remaining() > first + ttl - support.now())
      empty(1)
      if call == "upgrade" then
        reader = assert(single(2):acquire(R1, { mode = "shared", ttl = LONG }))
        assert_code("timeout", handle:upgrade { timeout = 0 })
      elseif call == "refresh" then
        fail(3)
        assert.is_nil((handle:refresh()))
        mend(3)
      else
        assert(handle:downgrade())
      end
      assert.is_true(handle:remaining() <= first + ttl - support.now())
      assert.is_true(handle:is_held())
      if reader then assert(reader:release { confirm = true }) end
      assert(handle:refresh())
      assert.is_true(handle:remaining() > first + ttl - support.now())
      assert(handle:release { confirm = true })
    end)
  end

  it("is made exclusive where it was not upgraded, when that can be", function()
    local handle = assert(quorum():acquire(R1, UPDATE))
    modes_become "update update update"
    local reader = assert(single(3):acquire(R1, { mode = "shared", ttl = LONG }))
    assert.is_true(handle:upgrade { timeout = 5 })
    assert(reader:release { confirm = true })
    support.wait_until(function()
      assert(handle:refresh())
      return modes() == "exclusive exclusive exclusive"
    end)
    empty(1)
    assert(handle:refresh())
    assert_code("timeout", quorum():acquire(R1, { mode = "shared", timeout = 0 }))
    assert(handle:release { confirm = true })
    modes_become "- - -"
  end)

  it("that is not upgraded in time is for update everywhere again", function()
    local peer, other = support.process(nil), quorum()
    peer:call([[
      handles.manager = assert(hierlock.open(...))
      handles.u = assert(handles.manager:acquire({ "u1", "a1", "r1" }, { mode = "update", ttl = 60 }))
    ]], dsns())
    modes_become "update update update"
    -- Two of three are in its way.
    local readers = {}
    for i = 1, 2 do readers[i] = assert(single(i):acquire(R1, { mode = "shared", ttl = LONG })) end
    for _, timeout in ipairs { 0, 0.2 } do
      local code, mode = peer:call([[
        local ok, err = handles.u:upgrade { timeout = ... }
        return ok or err.code, handles.u.mode
      ]], timeout)
      assert.equal("timeout", code)
      assert.equal("update", mode)
      support.wait_until(function()
        for i = 1, 3 do
          local reader = single(i):acquire(R1, { mode = "shared", timeout = 0 })
          if not reader then return false end
          assert(reader:release { confirm = true })
        end
        return true
      end, "a reader at each store")
      assert(assert(other:acquire(R1, { mode = "shared", timeout = 0 })):release { confirm = true })
    end
    peer:start "return handles.u:upgrade()"
    assert.is_true(peer:stays_blocked())
    assert(readers[2]:release { confirm = true })
    assert.is_true(peer:result())
    assert_code("timeout", other:acquire(R1, { mode = "shared", timeout = 0 }))
  end)

  -- Redis is told the mode of each row; the embedded store and SQLite take that of the lease.
  support.on_redis(function(store)
    it("that is not upgraded in time is for update again on Redis", function()
      finally(function()
        stores.finish()
        store.cli "flushall"
      end)
      local list = { store.dsn, "sqlite:" .. stores.directories[1], "sqlite:" .. stores.directories[2] }
      local update = assert(assert(open(list)):acquire(R1, { mode = "update", ttl = LONG }))
      for i = 2, 3 do assert(assert(open(list[i])):acquire(R1, { mode = "shared", ttl = LONG, auto_release = false })) end
      local reader = assert(open(list[1]))
      for _, timeout in ipairs { 0, 0.2 } do
        assert_code("timeout", update:upgrade { timeout = timeout })
        assert(assert(reader:acquire(R1, { mode = "shared", timeout = 10 })):release { confirm = true })
      end
    end)
  end)

  -- Processes that read R1 again and again until `enough` is called, which says how often each did.
  local function readers_start(n)
    local readers, stop = {}, stores.directories[1] .. "-enough"
    for i = 1, n do
      readers[i] = support.process(nil)
      readers[i]:call("handles.manager = assert(hierlock.open(...))", dsns())
      readers[i]:start([[
        local stop, n = ..., 0
        repeat
          local reader = assert(handles.manager:acquire({ "u1", "a1", "r1" }, { mode = "shared", ttl = 60, timeout = 20 }))
          n = n + 1
          support.sleep(0.002 * (n % 3))
          reader:release { confirm = true } -- which nobody confirms whose majority had the store that is down
          local file = io.open(stop)
          if file then file:close() end
        until file
        return n
      ]], stop)
    end
    return function()
      assert(io.open(stop, "w")):close()
      for i, peer in ipairs(readers) do readers[i] = peer:result() end
      return readers
    end
  end

  for _, down in ipairs { false, 3 } do
    it(("is upgraded though readers come without end%s"):format(down and ", where a store is down" or ""), function()
      local handle, other = assert(quorum():acquire(R1, UPDATE)), quorum()
      modes_become "update update update"
      local enough = readers_start(4)
      if down then fail(down) end
      for _ = 1, 60 do
        assert.is_true(handle:upgrade { timeout = 20 })
        assert_code("timeout", other:acquire(R1, { mode = "shared", timeout = 0 }))
        assert.is_true(handle:downgrade())
      end
      for _, n in ipairs(enough()) do assert.is_true(n > 0) end
      assert(handle:release { confirm = true })
    end)
  end

  it("lets readers into a later store while its upgrade waits for an earlier one", function()
    local peer = support.process(nil)
    peer:call([[
      handles.manager = assert(hierlock.open(...))
      handles.u = assert(handles.manager:acquire({ "u1", "a1", "r1" }, { mode = "update", ttl = 60 }))
    ]], dsns())
    modes_become "update update update"
    fail(3)
    local one, two = single(1), single(2)
    -- The later store grants before the earlier one refuses, or it does not.
    for _ = 1, 20 do
      local first = assert(one:acquire(R1, { mode = "shared", ttl = LONG }))
      peer:start "return handles.u:upgrade() and handles.u:downgrade()"
      support.wait_until(function()
        for _, each in ipairs(assert(one:holders(R1))) do if each.waiting then return true end end
      end, "the upgrade at the first store")
      assert(assert(two:acquire(R1, { mode = "shared", timeout = 10 })):release { confirm = true })
      assert(first:release { confirm = true })
      assert.is_true(peer:result())
    end
  end)

  it("is for update again, though a store was silent in its downgrade", function()
    local handle = assert(quorum():acquire(R1, UPDATE))
    modes_become "update update update"
    assert.is_true(handle:upgrade { timeout = 5 })
    slow(2)
    assert.is_true(handle:downgrade())
    go_on(2)
    support.wait_until(function()
      assert(handle:refresh())
      return modes() == "update update update"
    end)
  end)
end)
