-- Leases on MySQL and MariaDB, as far as they differ from other stores' leases: the gate, the trips, the privileges,
-- the view of older programs, and the leftovers when a connection or a server goes down in the middle.
-- leases_spec.lua and server_spec.lua have the duties of every store.
-- Parts: stores

local uv = require "luv"
local attach = require "hierlock.attach"
local hierlock = require "hierlock"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local R1 = { "u1", "a1", "r1" }
local LONG = 60

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

support.each_server(function(server)
  local store = support.leased(server)
  local stem, manager

  local function sql(query, ...) return store.sql():query(query, ...) end
  local function first(query, ...) return sql(query, ...)[1][1] end
  local function leases() return tonumber(first("SELECT COUNT(*) FROM %s_leases WHERE revoked=0", stem)) end
  local function rows() return tonumber(first("SELECT COUNT(*) FROM %s_leased", stem)) end
  local function gates() return tonumber(first("SELECT SUM(n) FROM %s_gate", stem)) end
  local function clean()
    sql("DELETE FROM %s_leases", stem)
    sql("DELETE FROM %s_leased", stem)
    -- An update of all 65,536 rows costs MySQL a second.
    local open = support.column(sql("SELECT g FROM %s_gate WHERE n<>0", stem))
    if open[1] then sql("UPDATE %s_gate SET n=0 WHERE g IN (%s)", stem, table.concat(open, ",")) end
  end

  setup(function()
    store.prepare()
    stem = store.stem
    clean()
  end)
  before_each(function() manager = support.open(store) end)
  after_each(function()
    program.close()
    support.close_peers()
    manager:close()
    clean()
  end)

  local function waiter(options)
    local peer = support.process(store)
    peer:acquire("lock", "acquire", R1, options)
    support.wait_for_waiters(store, R1)
    return peer
  end

  -- They go together, and those that are locked keep none of the others, wherever they stand among them. To wait for
  -- these, and for each alone, takes longer than a program that ends waits.
  it("that were released before exit() are gone, though a stranger keeps the records of some locked", function()
    local peer, stranger = support.process(store), support.foreign(store)
    peer:call "for i = 1, 8 do handles[i] = assert(manager:acquire({ 'u1', 'a1', 'r' .. i }, { ttl = 60 })) end"
    local LOCKED = "path IN ('u1/a1/r2', 'u1/a1/r3', 'u1/a1/r4')"
    stranger:query "START TRANSACTION"
    for _, row in ipairs(sql("SELECT HEX(id) FROM %s_leases WHERE %s", stem, LOCKED)) do
      stranger:query("SELECT 1 FROM %s_leases WHERE id=0x%s FOR UPDATE", stem, row[1])
    end
    peer:start "for i = 1, 8 do handles[i]:release() end os.exit(0)"
    support.wait_until(function()
      return first("SELECT COUNT(*) FROM %s_leases WHERE NOT %s", stem, LOCKED) == "0"
    end, "the others are gone")
    stranger:query "ROLLBACK"
  end)

  -- The first release waits for a row while the program ends; the others go together, behind it, and two of them when
  -- they are not locked any more. The one that the batch has got then is what another wants who keeps the other.
  it("that were released before exit() are gone, though a deadlock rolls their batch back", function()
    local peer, one, two, three = support.process(store), support.foreign(store), support.foreign(store), support.foreign(store)
    peer:call "for i = 1, 8 do handles[i] = assert(manager:acquire({ 'u1', 'a1', 'r' .. i }, { ttl = 60 })) end"
    local others = ("%s_leases WHERE path<>'u1/a1/r1'"):format(stem)
    local least, greatest = first("SELECT HEX(MIN(id)) FROM " .. others), first("SELECT HEX(MAX(id)) FROM " .. others)
    local function lock(by, id) by:query("SELECT 1 FROM %s_leases WHERE id=0x%s FOR UPDATE", stem, id) end
    local function deletes(what)
      support.wait_until(function()
        return first("SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'DELETE %%%s%%'", what) ~= "0"
      end, what)
    end
    one:query "START TRANSACTION"
    lock(one, first("SELECT HEX(id) FROM %s_leases WHERE path='u1/a1/r1'", stem))
    two:query "START TRANSACTION"
    two:query("DELETE FROM %s_gate WHERE g<1000", stem) -- the server rolls back who has changed less
    lock(two, greatest)
    three:query "START TRANSACTION"
    lock(three, least)
    peer:start "for i = 1, 8 do handles[i]:release() end os.exit(0)"
    deletes "l,r FROM"
    support.sleep(0.2)
    one:query "ROLLBACK"
    deletes("l,r FROM%l.id IN (0x" .. ("_"):rep(32) .. ",0x") -- those that were locked
    three:query "ROLLBACK" -- the batch is the next
    lock(two, least)
    two:query "ROLLBACK"
    support.wait_until(function() return leases() == 0 end)
  end)

  -- After a wait of 5 ms, all by the same connection; each is kept waiting for longer than that.
  describe("for update", function()
    local updated = support.updated(server, true)

    setup(function() updated.prepare() end)
    before_each(function()
      for _, name in ipairs { "leases", "leased" } do sql("DELETE FROM %s_%s", updated.stem, name) end
    end)

    for _, call in ipairs { "refresh", "check", "downgrade" } do
      it("whose upgrade a replica lacked when it took over is lost for its holder by " .. call, function()
        local one = support.open(updated)
        finally(function() one:close() end)
        local handle = assert(one:acquire(R1, { ttl = LONG, mode = "update", auto_refresh = false }))
        local before = sql("SELECT token, mode FROM %s_leases", updated.stem)[1]
        local shared = sql("SELECT level, bucket FROM %s_leased WHERE x=0", updated.stem)
        assert.is_true(handle:upgrade { timeout = 0 })
        sql("UPDATE %s_leases SET token=%s, mode='%s'", updated.stem, before[1], before[2])
        for _, row in ipairs(shared) do
          sql("UPDATE %s_leased SET x=0 WHERE level=%s AND bucket=%s", updated.stem, row[1], row[2])
        end
        assert_code("lost", handle[call](handle))
        assert.is_false(handle:is_held())
        for _, name in ipairs { "leases", "leased" } do
          assert.equal("0", first("SELECT COUNT(*) FROM %s_%s", updated.stem, name))
        end
      end)
    end
  end)

  it("looks with a limit of its own after a short wait", function()
    local stranger = support.process(store)
    assert(stranger:call("handles.lock = assert(manager:acquire(...)) return true", R1))
    local peer = support.process(store, { pool_size = 1 })
    peer:call "handles.lease = assert(manager:acquire({ 'u2' }, { ttl = 60 }))"
    for _, call in ipairs { "manager:leases()", "manager:holders({ 'u2' })", "handles.lease:check()" } do
      assert.equal("timeout", peer:call([[
        handles.lease = handles.lease or assert(manager:acquire({ 'u2' }, { ttl = 60 }))
        local _, err = manager:acquire(..., { timeout = 0.005 })
        return err.code
      ]], R1))
      local root = store.root()
      root:query("LOCK TABLES %s.%s_leases WRITE", store.database or "mgl_test", stem)
      peer:start("local ok, err = " .. call .. " return not not ok, tostring(err)")
      local blocked = peer:stays_blocked()
      root:query "UNLOCK TABLES"
      local ok, err = peer:result()
      assert.is_true(blocked, call .. ": " .. err)
      assert.is_true(ok, call .. ": " .. err)
    end
  end)

  describe("that is waited for", function()
    -- The median of the seconds from the end of a lease to the return of its waiter. `other`: another waiter of its
    -- manager has the lookout.
    local function hand_over(finish, other)
      local times, peer = {}, support.process(store)
      if other then
        assert(manager:acquire({ "u2" }, { ttl = LONG }))
        peer:call "handles.other = manager:start({ 'u2' }, { timeout = 60 }) support.sleep(0.5)"
      end
      for i = 1, 5 do
        local lease = assert(manager:acquire(R1, { ttl = LONG }))
        peer:start([[
          local handle = assert(manager:acquire(..., { timeout = 60, ttl = 60 }))
          local now = support.now()
          assert(handle:release { confirm = true })
          return now]], R1)
        support.wait_for_waiters(store, R1)
        support.sleep(0.2 + i / 100)
        assert(finish == "revoke" and manager:revoke { target = R1 } or lease:release { confirm = true })
        local ended = support.now()
        times[i] = assert(peer:result()) - ended
      end
      peer:close()
      table.sort(times)
      return times[3]
    end

    -- The statement by which the server looks lasts for a second.
    it("wakes its waiter soon, however it ends", function()
      for _, seconds in ipairs { hand_over "release", hand_over "revoke", hand_over("release", true) } do
        assert.is_true(seconds < 0.1, seconds .. " s")
      end
    end)

    local function questions() return tonumber(sql("SHOW GLOBAL STATUS LIKE 'Questions'")[1][2]) end
    local function questions_in(seconds)
      local before = questions()
      support.sleep(seconds)
      return questions() - before
    end

    it("costs the server few queries, whatever its limits, and no more while a deletion waits for its COMMIT", function()
      local root = store.root()
      local limits = not root and {} or server.name == "mariadb" and { max_recursive_iterations = 10, max_statement_time = 0.3 }
        or { cte_max_recursion_depth = 10, max_execution_time = 300 }
      finally(function()
        for name in pairs(limits) do root:query("SET GLOBAL %s=DEFAULT", name) end
      end)
      for name, value in pairs(limits) do root:query("SET GLOBAL %s=%s", name, tostring(value)) end
      local lease = assert(manager:acquire(R1, { ttl = LONG, auto_refresh = false }))
      local peer = waiter { timeout = 60 }
      -- A server that is too busy to look in time is polled meanwhile.
      support.wait_until(function() return questions_in(2) <= 6 end, "two seconds with few queries", 30)
      local stranger = support.foreign(store)
      stranger:query "START TRANSACTION"
      stranger:query("DELETE FROM %s_leased", stem)
      local n = questions_in(2)
      assert.is_true(n < 500, n .. " queries")
      stranger:query "ROLLBACK"
      assert.is_true(peer:stays_blocked())
      assert(lease:release { confirm = true })
      assert.is_true(peer:result())
    end)

    it("is waited for on one more connection, which the manager keeps; without it the waiter polls", function()
      local lease, peer = assert(manager:acquire(R1, { ttl = LONG })), support.process(store, { pool_size = 1 })
      local function wait()
        peer:start("return assert(manager:acquire(..., { timeout = 60 })):release { confirm = true }", R1)
        local seen
        support.wait_until(function()
          seen = sql("SELECT id FROM information_schema.processlist WHERE info LIKE 'WITH RECURSIVE look%%'")
          return #seen == 1
        end)
        return seen[1][1]
      end
      local id = wait()
      assert(lease:release { confirm = true })
      assert(peer:result())
      lease = assert(manager:acquire(R1, { ttl = LONG }))
      assert.equal(id, wait())
      sql("KILL %s", id)
      support.sleep(0.1)
      assert.is_true(peer:stays_blocked())
      assert(lease:release { confirm = true })
      assert(peer:result())
    end)

    it("keeps no call beyond its time, and none that is given up", function()
      local lease = assert(manager:acquire(R1, { ttl = LONG }))
      local peer = support.process(store)
      local code, took = peer:call([[
        local begun = support.now()
        local _, err = manager:acquire(..., { timeout = 0.6 })
        return err.code, support.now() - begun]], R1)
      assert.equal("timeout", code)
      assert.is_true(took >= 0.6 and took < 1.2, took .. " s")
      assert.is_true(peer:call([[
        local pending = manager:start(..., { timeout = 60 })
        support.sleep(0.5)
        local begun = support.now()
        pending:cancel()
        manager:close()
        return support.now() - begun < 0.6]], R1))
      assert(lease:release { confirm = true })
    end)
  end)

  describe("the gate", function()
    it("is seen by those who wait while the first lease comes", function()
      for _, options in ipairs { {}, { ttl = LONG } } do
        -- A statement is prepared when it is used again.
        local peer = support.process(store)
        peer:call([[
          for _ = 1, 3 do assert(assert(manager:acquire(...)):release { confirm = true }) end
        ]], R1)
        clean()
        local session = assert(manager:acquire(R1))
        peer:acquire("lock", "acquire", R1, options)
        support.wait_for_waiters(store, R1)
        assert.equal(0, gates())
        assert(session:to_lease { ttl = LONG })
        assert.equal(1, gates())
        assert.is_true(peer:stays_blocked())
        assert(session:release { confirm = true })
        assert.is_true(peer:result())
        peer:release "lock"
        peer:close()
      end
    end)

    it("is seen by an extend, whose transaction is older than the lease", function()
      local session = assert(manager:acquire { "u1", "a2" })
      local peer = support.process(store)
      assert.is_true(peer:call("handles.lock = assert(manager:acquire(..., { ttl = 60 })) return true", R1))
      assert_code("timeout", session:extend(R1, { timeout = 0 }))
      assert.is_true(session:check())
      assert(session:release { confirm = true })
    end)

    it("is shut again, by and by, when there are no leases below its roots any more", function()
      local lease = assert(manager:acquire(R1, { ttl = LONG }))
      assert.equal(1, gates())
      for _ = 1, 200 do assert(assert(manager:acquire { "u1", "a1", "r2" }):release()) end
      assert.equal(1, gates())
      assert(lease:release { confirm = true })
      support.wait_until(function()
        for _ = 1, 20 do assert(assert(manager:acquire(R1)):release()) end
        return gates() == 0
      end)
      assert.is_true(assert(manager:acquire(R1, { ttl = LONG })):check())
    end)

    it("is opened at each root of a lease that has several", function()
      local roots = {}
      for i = 1, 4 do roots[i] = { "u" .. i } end
      local lease = assert(manager:acquire_all(roots, { ttl = LONG }))
      assert.equal(#roots, gates())
      for _, root in ipairs(roots) do assert_code("timeout", manager:acquire(root, { timeout = 0 })) end
      assert(lease:release { confirm = true })
    end)

    -- With more buckets than gates some gates have two; the last one counts, too.
    it("stays open for a lease at the last of its buckets", function()
      local buckets, gates_in_all = 100003, 65536
      local wide = stem .. "_wide_buckets"
      local function drop()
        for _, suffix in ipairs { "nodes", "leases", "leased", "gate" } do
          sql("DROP TABLE IF EXISTS %s_%s", stem .. "_wide", suffix)
        end
        sql("DELETE FROM hier_lock_meta WHERE table_name='%s'", wide)
      end
      drop()
      local one
      finally(function()
        if one then one:close() end
        drop()
      end)
      local levels = { "user" } -- only these have gates
      support.provision_leases(store.sql(), wide, buckets, levels)
      -- Two users: one at the last bucket of a gate, the other at the bucket before it, of the same gate.
      local user_at, first_of, last_of = {}
      local function gate_of(bucket) return math.floor(bucket * gates_in_all / buckets) end
      for i = 1, 100000 do
        local user = "u" .. i
        local bucket = hierlock.plan({ { user } }, { buckets = buckets, levels = levels }):rows()[1].bucket
        user_at[bucket] = user
        for last = bucket, bucket + 1 do
          local gate = gate_of(last)
          if user_at[last] and user_at[last - 1] and gate_of(last - 1) == gate and gate_of(last + 1) > gate then
            first_of, last_of = user_at[last - 1], user_at[last]
          end
        end
        if first_of then break end
      end
      one = assert(hierlock.open((store.dsn:gsub("table=[%w_]+", "table=" .. wide)), { buckets = buckets, levels = levels, timeout = 5 }))
      local lease = assert(one:acquire({ last_of }, { ttl = LONG }))
      for _ = 1, 200 do assert(assert(one:acquire { first_of }):release()) end -- each may shut the gate
      assert_code("timeout", one:acquire({ last_of }, { timeout = 0 }))
      assert.is_true(lease:check())
    end)

    it("whose row is missing lets nobody in", function()
      assert(assert(manager:acquire(R1, { ttl = LONG })):release { confirm = true })
      local gate = first("SELECT g FROM %s_gate WHERE n<>0", stem)
      sql("DELETE FROM %s_gate WHERE g=%s", stem, gate)
      finally(function() sql("INSERT INTO %s_gate VALUES (%s, 0)", stem, gate) end)
      for _ = 1, 3 do
        assert_code("not_provisioned", manager:acquire(R1))
        assert_code("not_provisioned", manager:acquire(R1, { ttl = LONG }))
      end
      local _, err = manager:acquire(R1)
      assert.matches(("a row is missing in table %s_gate; run `hierlock provision`"):format(stem), err.message, 1, true)
      assert.equal(0, leases())
    end)

    it("whose rows are made again lets nobody pass a lease", function()
      local lease = assert(manager:acquire(R1, { ttl = LONG }))
      sql("DELETE FROM %s_gate WHERE n<>0 OR g<1000", stem)
      local said = program.run(store.dsn, "provision", "--quiet")
      assert.equal(0, said.status, said.err)
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      assert_code("timeout", support.open(store):acquire(R1, { timeout = 0, ttl = LONG }))
      assert(lease:release { confirm = true })
    end)
  end)

  it("that are many do not keep a manager from being closed, each for a while", function()
    local one = support.open(store)
    for i = 1, 100 do support.keep(assert(one:acquire({ "u1", "a1", "r" .. i }, { ttl = LONG, mode = "shared" }))) end
    local start = support.now()
    one:close()
    local took = support.now() - start
    assert.is_true(took < 2, took) -- 40 ms for each, when answers were not read
    assert.equal(0, leases())
  end)

  describe("a session", function()
    local between
    before_each(function() between = proxy.open(store) end)
    after_each(function() between:close() end)

    local function statements(between_store, code, ...)
      local peer = support.process(between_store)
      peer:call([[
        for _ = 1, 15 do assert(assert(manager:acquire(...)):release { confirm = true }) end
      ]], R1)
      between.take()
      peer:call(code, ...)
      return between.take()
    end
    -- The list of whichever try has at most n statements: a session tells the server its time limits again when less
    -- time is left than they say, by a few milliseconds, and a busy machine may take that long between two steps.
    local function at_most(n, ...)
      local list
      for _ = 1, 10 do
        list = statements(...)
        if #list <= n then break end
      end
      return list
    end
    local CYCLE = "assert(assert(manager:acquire(...)):release { confirm = true })"

    it("takes one trip where there are no leases, and two where there may be some", function()
      local behind = setmetatable({ dsn = between.dsn }, { __index = store })
      assert.same({ "execute", "ROLLBACK" }, at_most(2, behind, CYCLE, R1))
      local lease = assert(manager:acquire({ "u1", "a9" }, { ttl = LONG }))
      local list = at_most(3, behind, CYCLE, R1)
      assert.equal(3, #list, table.concat(list, "\n"))
      assert.equal("execute", list[1])
      assert.truthy(list[2]:find("_leased r ", 1, true))
      assert.equal("ROLLBACK", list[3])
      assert(lease:release { confirm = true })
    end)

    it("a lease is taken, refreshed and given back in one trip each, and imported in two", function()
      local behind = setmetatable({ dsn = between.dsn }, { __index = store })
      local lease = assert(manager:acquire({ "u1", "a9" }, { ttl = LONG }))
      local token = lease.token
      local list = at_most(3, behind, [[
        local lease = assert(manager:acquire(..., { ttl = 60 }))
        assert(lease:refresh())
        assert(lease:release { confirm = true })
      ]], R1)
      assert.equal(3, #list, table.concat(list, "\n"))
      list = statements(behind, "lease = assert(manager:import(...))", assert(lease:export()))
      assert.equal(2, #list, table.concat(list, "\n"))
      lease = assert(manager:import(assert(manager:acquire({ "u1", "a8" }, { ttl = LONG })):export()))
      assert.is_true(lease.token > token)
      assert(lease:release { confirm = true })
    end)
  end)

  describe("in a space without leases, a session", function()
    it("is asked for none", function()
      local between = proxy.open(server)
      finally(function() between:close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = server }))
      peer:call("for _ = 1, 3 do assert(assert(manager:acquire(...)):release { confirm = true }) end", R1)
      local text = table.concat(between.take(), "\n")
      assert.is_nil(text:find("_gate", 1, true))
      assert.is_nil(text:find("_leased", 1, true))
    end)
  end)

  describe("those who wait below an ancestor that is leased exclusively", function()
    it("have one of them look, and are all let in when it is released", function()
      local lease = assert(manager:acquire({ "u1" }, { ttl = LONG }))
      local peers = {}
      for i = 1, 8 do
        peers[i] = support.process(store)
        peers[i]:acquire("lock", "acquire", { "u1", "a1", "r" .. i }, { timeout = 30, ttl = i % 2 == 0 and LONG or nil })
      end
      support.wait_for_waiters(store, { "u1" }, 8)
      local function said() return tonumber(sql("SHOW GLOBAL STATUS LIKE 'Questions'")[1][2]) end
      -- A single waiter looks every 12 to 25 ms; eight would do so 160 times and more in half a second.
      support.wait_until(function()
        local before = said()
        support.sleep(0.5)
        return said() - before < 120
      end)
      assert(lease:release { confirm = true })
      for _, peer in ipairs(peers) do assert.is_true(peer:result()) end
      for _, peer in ipairs(peers) do peer:release "lock" end
    end)

    it("go on where the server takes a second and a half for an answer", function()
      local lease = assert(manager:acquire({ "u1" }, { ttl = LONG }))
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:acquire("lock", "acquire", R1, { timeout = 30 })
      support.wait_until(function() -- and asks again and again from then on
        uv.run "nowait"
        return store.waiting(R1) == 1
      end, "the waiter")
      support.sleep(1.5) -- the proxy stands still meanwhile
      assert(lease:release { confirm = true })
      assert.is_true(peer:result())
      peer:release "lock"
    end)
  end)

  it("whose bucket row is missing is refused with that, on a new connection, too", function()
    local lease = assert(manager:acquire({ "u1", "a9" }, { ttl = LONG }))
    sql("DELETE FROM %s_nodes WHERE level = 2", stem)
    finally(function() assert.equal(0, program.run(store.dsn, "provision", "--quiet").status) end)
    local fresh = support.open(store)
    -- The next lease is locked and recorded in one trip.
    assert(assert(fresh:acquire { "u1", "a1" }):release { confirm = true })
    for _ = 1, 3 do assert_code("not_provisioned", fresh:acquire(R1, { ttl = LONG })) end
    assert.equal(1, leases())
    assert(lease:release { confirm = true })
  end)

  -- Such a deadlock occurs beside a program's own transaction that has passed the records of leases.
  for _, what in ipairs { "handles.lease:release { confirm = true }", "manager:revoke { target = { 'u1' } }" } do
    it(("%s is made again when the server has chosen it as a deadlock's victim"):format(what:match ":(%a+)"), function()
      local peer = support.process(store)
      peer:call("handles.lease = assert(manager:acquire(..., { ttl = 60 }))", R1)
      local other = support.foreign(store)
      finally(function() other:close() end)
      assert(other:query "SET autocommit=0")
      -- The transaction has changed more than the peer, and so is not the victim.
      assert(other:query(("UPDATE %s_gate SET n=1-n WHERE g>=65000"):format(stem)))
      assert(other:query(("SELECT id FROM %s_leased FORCE INDEX (id) WHERE id>'' FOR UPDATE"):format(stem)))
      peer:start(("local ok, err = %s return ok or err.code"):format(what))
      support.wait_until(function() return #store.transactions(true) > 0 end, "the peer, which waits")
      assert(other:query(("SELECT id FROM %s_leases FOR UPDATE"):format(stem)))
      assert(other:query "ROLLBACK")
      local done = peer:result()
      assert.is_true(done == true or done == 1, done)
      assert.equal(0, rows())
    end)
  end

  it("is kept with a hash of its secret, which those who may read the table do not learn", function()
    local text = assert(assert(manager:acquire(R1, { ttl = LONG })):export())
    local digits = text:sub(5):gsub("-", "+"):gsub("_", "/")
    local whole = first("SELECT HEX(FROM_BASE64('%s'))", digits .. ("="):rep(-#digits % 4))
    local id, kept = first("SELECT HEX(id) FROM %s_leases", stem), first("SELECT HEX(secret) FROM %s_leases", stem)
    assert.truthy(whole:find(id, 1, true))
    assert.equal(32, #kept)
    assert.is_nil(whole:find(kept, 1, true))
    assert(assert(manager:import(text)):release { confirm = true })
  end)

  describe("a record whose time is up", function()
    it("that is imported while it is being deleted is lost, and nobody is a deadlock's victim", function()
    local text = assert(assert(manager:acquire(R1, { ttl = LONG })):export())
    local peer, other = support.process(store), support.sql_connection(store.bare_dsn)
    finally(function() other:close() end)
    other:query "BEGIN"
    other:query("SELECT id FROM %s_leases FOR UPDATE", stem)
    -- On a connection that has locked something, statements do not commit themselves.
    peer:call "assert(assert(manager:acquire { 'u2' }):release { confirm = true })"
    peer:start("local handle, err = manager:import(...) return handle and true or err.code", text)
    support.wait_until(function() return #store.transactions(true) > 0 end, "the import, which waits for the record")
    other:query("DELETE l,r FROM %s_leases l LEFT JOIN %s_leased r ON r.id=l.id", stem, stem)
    other:query "COMMIT"
    assert.equal("lost", peer:result())
    peer:close()
  end)

  it("and that is just being refreshed is not passed", function()
      local lease = assert(manager:acquire(R1, { ttl = 0.3, auto_release = false }))
      -- Another session is in the middle of a refresh: the lease will be unbroken.
      local refreshing = support.foreign(store)
      refreshing:query("SET autocommit=0")
      support.sleep(0.35)
      assert(refreshing:query(("UPDATE %s_leases SET till=TIMESTAMPADD(SECOND,60,UTC_TIMESTAMP(6)),turn=turn+1"):format(stem)))
      local peer = support.process(store)
      peer:acquire("lock", "acquire", R1, { timeout = 20 })
      assert.is_true(peer:stays_blocked())
      refreshing:query "COMMIT"
      assert.is_true(peer:stays_blocked())
      assert.is_true(lease:refresh())
      assert(lease:release { confirm = true })
      assert.is_true(peer:result())
    end)

    it("goes as a whole", function()
      support.wait_until(function() -- on a busy machine so short a one may be over when it is granted
        local handle, lost = manager:acquire_resources("u1", "a1", { "r1", "r2", "r3" }, { ttl = 0.1, auto_release = false })
        assert(handle or lost.code == "lost", tostring(lost))
        return handle
      end)
      assert.same({ 1, 5 }, { leases(), rows() })
      support.sleep(0.15)
      assert(manager:acquire(R1, { timeout = 0 }))
      assert.same({ 0, 0 }, { leases(), rows() })
    end)
  end)

  it("a lease is granted all the same, once, when the answer to a COMMIT in steps never comes", function()
    local between = proxy.open(store)
    finally(function() between.close() end)
    local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
    peer:call("assert(assert(manager:acquire(...)):release { confirm = true })", R1)
    local before = #between.connections
    local gatekeeper = support.foreign(store)
    gatekeeper:query "SET autocommit=0"
    assert(gatekeeper:query(("UPDATE %s_gate SET n=1"):format(stem)))
    peer:acquire("lock", "acquire", R1, { ttl = LONG, timeout = 20 })
    support.wait_until(function() -- it has locked, and waits for the gate
      uv.run "nowait"
      for _, command in ipairs(between.commands) do
        if command.text and command.text:find("UPDATE " .. stem .. "_gate", 1, true) then return true end
      end
    end)
    for n = 1, #between.connections do between.hold(n) end
    gatekeeper:query "COMMIT"
    support.wait_until(function()
      uv.run "nowait"
      return leases() == 1
    end)
    local id = first("SELECT HEX(id) FROM %s_leases WHERE revoked=0", stem)
    for n = 1, before do between.connections[n].finish() end
    local granted, err = peer:result()
    assert.is_true(granted, err and err.message)
    assert.equal(1, leases())
    assert.equal(3, rows())
    -- Messages that are still under way of the first try, or of its end, do not meet it.
    assert.not_equal(id, first("SELECT HEX(id) FROM %s_leases WHERE revoked=0", stem))
    assert.is_true(peer:call "return handles.lock:check()")
    peer:release "lock"
    support.wait_until(function() return leases() == 0 end)
    assert.equal(0, rows())
  end)

  describe("a connection that is killed", function()
    it("while a lease is waited for leaves no record, and the wait goes on or fails", function()
      local lease = assert(manager:acquire(R1, { ttl = LONG }))
      local peer = waiter { ttl = LONG, timeout = 10 }
      for _, id in ipairs(store.sessions()) do store.kill(id) end
      assert(lease:release { confirm = true })
      local granted, err = peer:result()
      if not granted then assert.equal("connection", type(err) == "table" and err.code or err) end
      assert.equal(granted and 1 or 0, leases())
    end)

    it("does nothing to a lease", function()
      local lease = assert(manager:acquire(R1, { ttl = LONG }))
      for _, id in ipairs(store.sessions()) do store.kill(id) end
      assert.is_true(lease:refresh())
      for _, id in ipairs(store.sessions()) do store.kill(id) end
      assert.is_true(lease:check())
      for _, id in ipairs(store.sessions()) do store.kill(id) end
      assert(lease:release { confirm = true })
      assert.same({ 0, 0 }, { leases(), rows() })
    end)
  end)

  describe("hierlock.attach in a space with update rows", function()
    local updated = support.updated(server, true)
    local managers, connections, attached
    local function clear()
      for _, name in ipairs { "leases", "leased" } do sql("DELETE FROM %s_%s", updated.stem, name) end
    end
    setup(function() updated.prepare() end)
    before_each(function()
      clear()
      managers, connections, attached = {}, {}, {}
      local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
      for i = 1, 2 do
        managers[i] = support.open(updated)
        connections[i] = assert(support.luasql():connect(database, user, password, host, tonumber(port)))
        attached[i] = attach.luasql(connections[i], { table = updated.table, timeout = 0 })
      end
    end)
    after_each(function()
      for i = 1, 2 do
        connections[i]:close()
        managers[i]:close()
      end
      clear()
    end)
    local function run(i, query) assert(connections[i]:execute(query)) end

    it("is kept out by a lease, whatever else the request is for", function()
      local other = { "u2", "a1", "r1", mode = "update" }
      local lease = assert(managers[1]:acquire(R1, { ttl = LONG }))
      run(1, "START TRANSACTION")
      assert_code("timeout", attached[1]:acquire_all { other, R1 })
      run(1, "ROLLBACK")
      assert(lease:release { confirm = true })
      lease = assert(managers[1]:acquire(R1, { ttl = LONG, mode = "update" }))
      run(1, "START TRANSACTION")
      assert_code("timeout", attached[1]:acquire(R1, { mode = "update" }))
      run(1, "ROLLBACK")
      run(1, "START TRANSACTION")
      assert.is_true(attached[1]:acquire_all { { "u1", "a1", "r1", mode = "shared" }, other })
      run(1, "ROLLBACK")
      assert.is_true(lease:check())
    end)

    -- Two managers and two transactions ask at random for some nodes: sessions, leases, and locks of the transaction.
    it("excludes and is excluded, in random use", function()
      local seed = math.floor(support.now() * 1e6) % 2147483648
      local function random(n) -- 1 to n
        seed = (seed * 16807 + 11) % 2147483647
        return seed % n + 1
      end
      local first_seed, grants, overlaps = seed, 0, {}
      local held = {} -- a list of { owner, nodes = { { ids, mode }, … }, handle }
      local function conflict(a, b)
        for i = 1, math.min(#a.ids, #b.ids) do
          if a.ids[i] ~= b.ids[i] then return false end
        end
        if #a.ids ~= #b.ids or #a.ids < 3 then return true end
        return a.mode ~= "shared" and b.mode ~= "shared" or a.mode == "exclusive" or b.mode == "exclusive"
      end
      local function targets()
        local list, nodes = {}, {}
        for i = 1, random(3) do
          local ids = { "u" .. random(2), "a" .. random(2), "r" .. random(2) }
          if random(5) == 1 then ids[3] = nil end
          local mode = ids[3] and ({ "shared", "update", "exclusive" })[random(3)] or "exclusive"
          nodes[i] = { ids = ids, mode = mode }
          list[i] = { ids[1], ids[2], ids[3], mode = mode }
        end
        return list, nodes
      end
      local function note(owner, nodes, handle)
        grants = grants + 1
        for _, other in ipairs(held) do
          for _, theirs in ipairs(other.owner ~= owner and other.nodes or {}) do
            for _, ours in ipairs(nodes) do
              if conflict(ours, theirs) and (not other.handle or other.handle:check()) then
                overlaps[#overlaps + 1] = table.concat({ owner, ours.mode, table.concat(ours.ids, "/"), "beside",
                                                         other.owner, theirs.mode, table.concat(theirs.ids, "/") }, " ")
              end
            end
          end
        end
        held[#held + 1] = { owner = owner, nodes = nodes, handle = handle }
      end
      local function finish(i)
        run(i, random(2) == 1 and "COMMIT" or "ROLLBACK")
        for at = #held, 1, -1 do
          if held[at].owner == "transaction " .. i then table.remove(held, at) end
        end
        run(i, "START TRANSACTION")
      end
      for i = 1, 2 do run(i, "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED") end
      for i = 1, 2 do run(i, "START TRANSACTION") end
      for round = 1, 300 do
        local i, what = random(2), random(6)
        local list, nodes = targets()
        if what <= 2 then
          -- A request that records a lease waits for a second, whatever its time-out, where a transaction has the
          -- gate.
          if what == 1 then
            for each = 1, 2 do finish(each) end
          end
          local handle = managers[i]:acquire_all(list, { timeout = 0, ttl = what == 1 and LONG or nil })
          if handle then note("handle " .. round, nodes, handle) end
        elseif what <= 4 then
          if attached[i]:acquire_all(list) then note("transaction " .. i, nodes) else finish(i) end
        elseif what == 5 then
          finish(i)
        elseif held[1] then
          local at = random(#held)
          if held[at].handle then assert(table.remove(held, at).handle:release { confirm = true }) end
        end
      end
      assert.same({}, overlaps, "seed " .. first_seed)
      assert.is_true(grants > 30, grants .. " grants, seed " .. first_seed)
    end)
  end)

  describe("hierlock.attach", function()
    local connection, locks
    before_each(function()
      local user, password, host, port, database = store.bare_dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/([^?]*)")
      connection = assert(support.luasql():connect(database, user, password, host, tonumber(port)))
      locks = attach.luasql(connection, { table = store.table, timeout = 5 })
    end)
    after_each(function() connection:close() end)
    local function run(query) return assert(connection:execute(query)) end

    it("is kept out by leases, also in an older view, and keeps them out", function()
      for _, earlier in ipairs { "START TRANSACTION", "START TRANSACTION WITH CONSISTENT SNAPSHOT" } do
        run(earlier)
        local lease = assert(manager:acquire(R1, { ttl = LONG }))
        -- MariaDB 11.6+ refuses to lock a row that is newer than the transaction's view.
        local refuses = #store.sql():query "SHOW VARIABLES WHERE Variable_name='innodb_snapshot_isolation' AND Value='ON'" > 0
        assert_code(refuses and earlier:find "SNAPSHOT" and "deadlock" or "timeout", locks:acquire(R1))
        run "ROLLBACK"
        run "START TRANSACTION"
        assert.is_true(locks:acquire { "u1", "a1", "r2" })
        assert_code("timeout", manager:acquire({ "u1", "a1", "r2" }, { ttl = LONG, timeout = 0 }))
        run "ROLLBACK"
        run "START TRANSACTION"
        assert_code("timeout", locks:acquire_all { { "u2" }, { "u1", "a1" } })
        run "ROLLBACK"
        assert.is_true(lease:release { confirm = true })
        run "START TRANSACTION"
        assert.is_true(locks:acquire_all { { "u2" }, { "u1", "a1" } })
        run "COMMIT"
      end
    end)

    it("keeps others from recording leases below the same root, who are told in time, and lose nothing", function()
      run "START TRANSACTION"
      assert.is_true(locks:acquire(R1))
      local other = { "u1", "a2" }
      local start = support.now()
      assert_code("timeout", manager:acquire(other, { ttl = LONG, timeout = 0.5 }))
      assert.is_true(support.now() - start < 2.5)
      local brief = support.open(store, { timeout = 0.5 })
      local session = assert(brief:acquire(other))
      start = support.now()
      assert_code("timeout", session:to_lease { ttl = LONG })
      assert.is_true(support.now() - start < 2.5)
      assert.is_true(session:check())
      run "COMMIT"
      assert.is_true(session:to_lease { ttl = LONG })
      assert.is_true(session:release { confirm = true })
      brief:close()
    end)

    it("keeps nobody from refreshing and releasing what is not in its way", function()
      local near, far = assert(manager:acquire({ "u1", "a2" }, { ttl = LONG })), assert(manager:acquire({ "u2" }, { ttl = LONG }))
      run "START TRANSACTION"
      assert.is_true(locks:acquire(R1))
      for _, lease in ipairs { near, far } do
        assert.is_true(lease:refresh())
        assert.is_true(lease:release { confirm = true })
      end
      run "ROLLBACK"
    end)

    it("keeps no session waiting that finds the gate open for no lease", function()
      assert(assert(manager:acquire(R1, { ttl = LONG })):release { confirm = true })
      run "START TRANSACTION"
      assert.is_true(locks:acquire { "u1", "a1", "r2" })
      local slowest = 0
      for _ = 1, 150 do -- each shuts the gate by a chance of 1 in 32
        local start = support.now()
        local session = assert(manager:acquire(R1, { timeout = 0 }))
        slowest = math.max(slowest, support.now() - start)
        session:release()
      end
      run "ROLLBACK"
      assert.is_true(slowest < 0.8, slowest)
    end)

    it("has its like in plan:sql, which is kept out where there may be leases", function()
      local plan = hierlock.plan({ R1, { "u2" } }, { buckets = store.options.buckets })
      local statement = plan:sql(store.dialect, store.table, true)
      local function count()
        run "START TRANSACTION"
        local cursor, n = run(statement), 0
        while cursor:fetch {} do n = n + 1 end
        cursor:close()
        return n
      end
      local n = count()
      assert.equal(#plan:rows() + 2, n)
      assert.is_true(plan:verify(n))
      assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
      run "ROLLBACK"
      local lease = assert(manager:acquire({ "u2", "a7" }, { ttl = LONG }))
      n = count()
      assert_code("not_provisioned", plan:verify(n))
      run "ROLLBACK"
      assert(lease:release { confirm = true })
      assert.is_false((pcall(plan.sql, plan, store.dialect, store.table, 1)))
    end)

    -- A call on a lease that is over waits 170 ms for the server's answer, which a busy machine may exceed: then the
    -- call says `connection`.
    local function assert_lost(lease)
      support.wait_until(function()
        local _, err = lease:refresh()
        return err.code ~= "connection" and assert.equal("lost", err.code)
      end, "the server's answer")
    end

    it("takes the time from the server, whatever the program has set it to", function()
      for _, timestamp in ipairs { "UNIX_TIMESTAMP()+7200", "UNIX_TIMESTAMP()-7200", "UNIX_TIMESTAMP()+86400*180" } do
        for _, zone in ipairs { "+00:00", "-11:00" } do
          local lease = assert(manager:acquire(R1, { ttl = LONG }))
          run("SET time_zone='" .. zone .. "',timestamp=" .. timestamp)
          run "START TRANSACTION"
          assert_code("timeout", locks:acquire(R1))
          run "ROLLBACK"
          local set, why = lease:refresh(0.05)
          assert(set or why.code == "lost", tostring(why)) -- lost: the answer came when the time was up
          support.sleep(0.1)
          run "SET timestamp=DEFAULT"
          run "START TRANSACTION"
          assert.is_true(locks:acquire(R1))
          run "COMMIT"
          assert_lost(lease)
        end
      end
    end)

    it("takes what a lease held whose time is up, if it commits", function()
      local lease = assert(manager:acquire(R1, { ttl = 0.1, auto_release = false }))
      support.sleep(0.15)
      run "START TRANSACTION"
      assert.is_true(locks:acquire(R1))
      run "ROLLBACK"
      assert.is_true(lease:refresh())
      assert.is_true(lease:refresh(0.1))
      support.sleep(0.15)
      run "START TRANSACTION"
      assert.is_true(locks:acquire(R1))
      run "COMMIT"
      assert_lost(lease)
      assert.same({ 0, 0 }, { leases(), rows() })
    end)
  end)

  if server.root_dsn then
    it("leases are there in spite of the administrator's defaults", function()
      local root, restore = store.root(), {}
      local function set(name, value)
        local before = root:query("SELECT @@GLOBAL." .. name)[1][1]
        restore[#restore + 1] = ("SET GLOBAL %s=%s"):format(name, tonumber(before) and before or "'" .. before .. "'")
        root:query("SET GLOBAL %s=%s", name, value)
      end
      finally(function()
        for _, query in ipairs(restore) do root:query(query) end
      end)
      local mariadb = server.dialect == "mariadb"
      set("sql_mode", mariadb and "'ORACLE,NO_BACKSLASH_ESCAPES,EMPTY_STRING_IS_NULL'" or "'ANSI,NO_BACKSLASH_ESCAPES'")
      set("autocommit", "0")
      set("completion_type", "2")
      set("innodb_lock_wait_timeout", "1")
      set("sql_safe_updates", "1")
      set("time_zone", "'-11:00'")
      set(mariadb and "tx_isolation" or "transaction_isolation", "'SERIALIZABLE'")
      set(mariadb and "tx_read_only" or "transaction_read_only", "1")
      local one, other = support.open(store), support.open(store)
      for _ = 1, 3 do
        local lease = assert(one:acquire(R1, { ttl = LONG, owner = "\195\188\"'\\" }))
        assert_code("timeout", other:acquire(R1, { timeout = 0 }))
        assert_code("timeout", other:acquire(R1, { timeout = 0, ttl = LONG }))
        assert.is_true(lease:refresh(2 * LONG))
        local listed = other:leases { owner = "\195\188\"'\\" }
        assert.equal(1, #listed)
        assert.is_true(math.abs(listed[1].remaining - 2 * LONG) < 10)
        lease = assert(other:import(assert(lease:export())))
        assert.is_true(lease:release { confirm = true })
      end
      one:close()
      other:close()
    end)

    describe("the least privileges", function()
      local function user(grants)
        local root, database = store.root(), first "SELECT DATABASE()"
        root:query "DROP USER IF EXISTS leaser"
        root:query "CREATE USER leaser IDENTIFIED BY 'leaserpassword'"
        for name, privileges in pairs(grants) do
          root:query("GRANT %s ON %s.%s TO leaser", privileges, database, name)
        end
        local dsn = store.dsn:gsub("//[^@]*@", "//leaser:leaserpassword@")
        return hierlock.open(dsn, store.options)
      end
      after_each(function() store.root():query "DROP USER IF EXISTS leaser" end)

      local function grants(more)
        local list = {
          hier_lock_meta = "SELECT",
          [stem .. "_nodes"] = server.dialect == "mariadb" and "SELECT" or "SELECT,UPDATE",
          [stem .. "_gate"] = "SELECT,UPDATE",
          [stem .. "_leases"] = "SELECT,INSERT,UPDATE,DELETE",
          [stem .. "_leased"] = "SELECT,INSERT,DELETE",
        }
        for name, privileges in pairs(more or {}) do list[name] = privileges end
        return list
      end

      it("of those who take leases are few", function()
        local one = assert(user(grants()))
        local lease = assert(one:acquire(R1, { ttl = LONG }))
        assert_code("timeout", manager:acquire(R1, { timeout = 0 }))
        assert(lease:refresh())
        local text = assert(lease:export())
        lease = assert(one:import(text))
        assert.equal(1, #one:leases())
        assert.equal(1, one:revoke { target = R1 })
        local session = assert(one:acquire(R1))
        assert(session:to_lease { ttl = 0.1, auto_release = false })
        support.sleep(0.15)
        assert(assert(one:acquire(R1, { timeout = 0 })):release { confirm = true })
        assert_code("lost", lease:check())
        one:close()
      end)

      it("of those who only lock in sessions are fewer", function()
        local one = assert(user(grants {
          [stem .. "_gate"] = "SELECT", [stem .. "_leases"] = "SELECT,DELETE", [stem .. "_leased"] = "SELECT,DELETE",
        }))
        local lease = assert(manager:acquire(R1, { ttl = 0.2, auto_release = false }))
        assert_code("timeout", one:acquire(R1, { timeout = 0 }))
        support.sleep(0.25)
        assert(assert(one:acquire(R1)):release { confirm = true })
        assert_code("lost", lease:check())
        assert_code("store", one:acquire(R1, { ttl = LONG }))
        assert.equal(0, leases())
        one:close()
      end)
    end)
  end
end)
