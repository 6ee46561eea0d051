--- The MySQL store's assumptions about its servers, seen on the bare servers through another driver: not one line of
-- ours runs here. Each title is an assumption; the day a server changes it, this file says so.

local support = require "spec.support"
local unpack = table.unpack or unpack -- luacheck: ignore

local TABLE, LIST = "hierlock_spec_bare", "hierlock_spec_list"
local BUCKETS = 20

support.each_server(function(store)
  local a, b, observer
  local shared -- FOR SHARE, as the server says it

  setup(function()
    local sql = store.sql()
    shared = store.dialect == "mariadb" and "LOCK IN SHARE MODE" or "FOR SHARE"
    sql:query("DROP TABLE IF EXISTS %s, %s", TABLE, LIST)
    support.provision(sql, TABLE, BUCKETS)
    sql:query("CREATE TABLE %s LIKE %s", LIST, TABLE)
    local values = {}
    for i = 1, 300 do values[i] = "(0," .. i .. ")" end
    sql:query("INSERT INTO %s VALUES %s", LIST, table.concat(values, ","))
  end)
  teardown(function()
    store.sql():query("DROP TABLE IF EXISTS %s, %s", TABLE, LIST)
    store.sql():query("DELETE FROM hier_lock_meta WHERE table_name='%s'", TABLE)
  end)

  local function program(isolation)
    local foreign = support.foreign(store)
    foreign:query("SET autocommit=0")
    foreign:query("SET SESSION TRANSACTION ISOLATION LEVEL %s", isolation or "READ COMMITTED")
    foreign:query("SET innodb_lock_wait_timeout=20")
    return foreign
  end

  before_each(function() a, b, observer = program(), program(), program() end)
  after_each(support.close_peers)

  local function row(bucket, clause, level, columns)
    return ("(SELECT %s FROM %s WHERE level=%d AND bucket=%d %s)"):format(
      columns or "bucket", TABLE, level or 0, bucket, clause)
  end

  local function exclusive(bucket, level) return row(bucket, "FOR UPDATE", level) end

  local function is_waiting() return store.waiting() >= 1 end
  local function nobody_waits() return store.waiting() == 0 end

  local function free(bucket, level)
    local rows = assert(observer:query(row(bucket, "FOR UPDATE SKIP LOCKED", level)))
    observer:query("ROLLBACK")
    return #rows == 1
  end

  -- The rows 1 to n of a level that are free, as "1 2 5".
  local function free_rows(n)
    local list = {}
    for i = 1, n do if free(i) then list[#list + 1] = i end end
    return table.concat(list, " ")
  end

  local function wait_for(condition) support.wait_until(condition, "the state of the wait") end

  -- a holds row 1; b holds row 2 and has failed to get row 1 by `query`.
  local function fail(query, before)
    assert(a:query(exclusive(1)))
    for _, statement in ipairs(before or {}) do assert(b:query(statement)) end
    assert(b:query(exclusive(2)))
    local begun = support.now()
    local rows, number = b:query(query)
    assert.is_nil(rows)
    return number, support.now() - begun
  end

  describe("the parts of a UNION ALL", function()
    for _, isolation in ipairs { "READ COMMITTED", "REPEATABLE READ" } do
      it("are locked strictly from left to right, shared and exclusive mixed: " .. isolation, function()
        local parts = { row(1, shared), row(2, "FOR UPDATE"), row(4, shared), row(3, "FOR UPDATE") }
        local order = { 1, 2, 4, 3 }
        local left = { "2 3 4", "3 4", "3", "" }
        b = program(isolation)
        for i, blocked in ipairs(order) do
          assert(a:query(exclusive(blocked)))
          b:send(table.concat(parts, " UNION ALL "))
          wait_for(is_waiting)
          assert.equal(left[i], free_rows(4))
          a:query("ROLLBACK")
          assert.equal(4, #assert(b:result()))
          b:query("ROLLBACK")
        end
      end)

      it("lock the rows that are asked for, no other one and no gap: " .. isolation, function()
        local one, adder = program(isolation), program(isolation)
        adder:query("SET innodb_lock_wait_timeout=1")
        for _, clause in ipairs { "FOR UPDATE", shared } do
          store.sql():query("DELETE FROM %s WHERE bucket IN (4,6)", TABLE)
          for _ = 1, 2 do -- as text each; the second time the rows are in memory
            assert.equal(3, #assert(one:query(table.concat(
              { row(3, clause), row(5, clause), row(7, clause) }, " UNION ALL "))))
            assert.equal("1 2 8 9", free_rows(9))
            assert(adder:query("INSERT INTO %s VALUES (0,4),(0,6)", TABLE))
            adder:query("ROLLBACK")
            one:query("ROLLBACK")
          end
          store.sql():query("INSERT INTO %s VALUES (0,4),(0,6),(1,4),(1,6),(2,4),(2,6)", TABLE)
        end
      end)
    end

    it("need parentheses, and MariaDB's own word for FOR SHARE", function()
      local function number(query)
        local rows, errno = b:query(query)
        b:query("ROLLBACK")
        return rows and 0 or errno
      end
      local bare = row(1, shared):sub(2, -2) .. " UNION ALL " .. row(2, "FOR UPDATE"):sub(2, -2)
      assert.equal(1064, number(bare))
      assert.equal(store.dialect == "mariadb" and 1064 or 0, number(row(1, "FOR SHARE")))
      assert.equal(0, number(row(1, "LOCK IN SHARE MODE")))
    end)
  end)

  -- MySQL's plan for a statement of a known shape; see csrc/stores/mysql/statement.c.
  if store.dialect == "mysql" then
    describe("a join of look-ups", function()
      local modes = { "SHARE", "UPDATE", "SHARE", "UPDATE" }
      -- Builds a join of the four rows (0, bucket), taken in the order of the list.
      local function join(buckets, columns, tag, nowait)
        local tables, where, locks = {}, {}, {}
        for i, bucket in ipairs(buckets) do
          tables[i] = ("%s r%d"):format(TABLE, i)
          where[i] = ("r%d.level=0 AND r%d.bucket=%d"):format(i, i, bucket)
          locks[i] = ("FOR %s OF r%d%s"):format(modes[i], i, nowait and " NOWAIT" or "")
        end
        if tag then where[1] = where[1] .. (" AND (@hierlock_spec:='%s') IS NOT NULL"):format(tag) end
        return ("SELECT %s FROM %s WHERE %s %s"):format(columns or "1", table.concat(tables, " STRAIGHT_JOIN "),
                                                       table.concat(where, " AND "), table.concat(locks, " "))
      end
      local order = { 1, 2, 4, 3 }

      for _, how in ipairs { "as text", "prepared" } do
        it("is locked strictly from left to right, shared and exclusive mixed, " .. how, function()
          local left = { "2 3 4", "3 4", "3", "" }
          for i, blocked in ipairs(order) do
            assert(a:query(exclusive(blocked)))
            if how == "prepared" then
              assert(b:query("PREPARE statement FROM \"%s\"", join(order, nil, "join")))
              b:send("EXECUTE statement")
            else
              b:send(join(order, nil, "join"))
            end
            wait_for(is_waiting)
            assert.equal(left[i], free_rows(4))
            a:query("ROLLBACK")
            assert.equal(1, #assert(b:result()))
            b:query("ROLLBACK")
          end
        end)
      end

      it("gives one row when all are there, and none when one is missing", function()
        assert.equal(1, #assert(b:query(join(order))))
        for i = 1, 4 do
          local buckets = { unpack(order) }
          buckets[i] = BUCKETS + 5
          assert.same({}, b:query(join(buckets)))
        end
      end)

      it("locks what is asked for, no other row and no gap", function()
        store.sql():query("DELETE FROM %s WHERE bucket IN (4,6)", TABLE)
        finally(function()
          b:query("ROLLBACK")
          store.sql():query("INSERT INTO %s VALUES (0,4),(0,6),(1,4),(1,6),(2,4),(2,6)", TABLE)
        end)
        assert.equal(1, #assert(b:query(join { 3, 5, 7, 8 })))
        assert.equal("1 2 9", free_rows(9))
        assert(observer:query("INSERT INTO %s VALUES (0,4),(0,6)", TABLE))
        observer:query("ROLLBACK")
      end)

      it("shows its tag while it waits for its first row", function()
        assert(a:query(exclusive(1)))
        b:send(join(order, nil, "first"))
        wait_for(is_waiting)
        assert.equal(1, tonumber(store.sql():query([[SELECT COUNT(*) FROM performance_schema.user_variables_by_thread
          WHERE VARIABLE_NAME='hierlock_spec' AND VARIABLE_VALUE='first']])[1][1]))
        a:query("ROLLBACK")
        assert(b:result())
      end)

      it("evaluates UUID_SHORT() and read_only after the last wait", function()
        local root = store.root() or pending("no administrator here")
        finally(function() root:query("SET GLOBAL read_only=OFF") end)
        assert(a:query(exclusive(3)))
        b:send(join(order, "UUID_SHORT(), CONCAT(@@global.read_only) NOT IN ('0','OFF')"))
        wait_for(is_waiting)
        local between = observer:query("SELECT UUID_SHORT()")[1][1]
        root:query("SET GLOBAL read_only=ON")
        a:query("ROLLBACK")
        local after = b:result()[1]
        assert.is_true(after[1] > between and #after[1] == #between)
        assert.equal("1", after[2])
      end)

      it("ends at once with NOWAIT, and in time with max_execution_time", function()
        local number, took = fail(join(order, nil, nil, true))
        assert.equal(3572, number)
        assert.is_true(took < 1)
        a:query("ROLLBACK")
        b:query("ROLLBACK")
        number, took = fail(join(order), { "SET SESSION max_execution_time=300" })
        assert.equal(3024, number)
        assert.is_true(took > 0.29 and took < 1.3, took .. " s")
      end)
    end)
  end

  describe("other ways to lock many rows", function()
    it("lock in another order: SELECT (subquery), (subquery)", function()
      assert(a:query(exclusive(2)))
      b:send("SELECT %s,%s,%s", row(1, shared), row(2, shared), row(3, "FOR UPDATE"))
      wait_for(is_waiting)
      assert.not_equal("3", free_rows(3)) -- it would be, were they taken from the left
      a:query("ROLLBACK")
      assert(b:result())
    end)

    it("may wait for rows that nobody asked for: a long IN list", function()
      local asked = {}
      for i = 1, 150 do asked[i] = i end -- MariaDB 10.11 scans from 60 on, 11.8 from 100 on
      assert(a:query("SELECT bucket FROM %s WHERE level=0 AND bucket=299 FOR UPDATE", LIST))
      local rows = b:query("SELECT bucket FROM %s WHERE level=0 AND bucket IN (%s) FOR UPDATE NOWAIT",
                           LIST, table.concat(asked, ","))
      assert.is_nil(rows)
    end)
  end)

  describe("a row that is missing", function()
    for _, isolation in ipairs { "READ COMMITTED", "REPEATABLE READ" } do
      it("is no error, and keeps nobody from a row: " .. isolation, function()
        local one, two = program(isolation), program(isolation)
        store.sql():query("DELETE FROM %s WHERE level=0 AND bucket=5", TABLE)
        finally(function()
          one:query("ROLLBACK")
          store.sql():query("INSERT INTO %s VALUES (0,5)", TABLE)
        end)
        for _, clause in ipairs { "FOR UPDATE", shared } do
          for _, bucket in ipairs { 5, BUCKETS + 5 } do
            assert.same({}, one:query(row(bucket, clause)))
            assert.same({}, two:query(row(bucket, clause)))
          end
          two:query("ROLLBACK")
          assert.equal("1 2 3 4 6 7 8 9", free_rows(9))
        end
      end)
    end
  end)

  describe("a locking read", function()
    it("begins a transaction by itself when autocommit is off", function()
      assert(a:query(exclusive(1)))
      assert.is_false(free(1))
      a:query("ROLLBACK")
      assert.is_true(free(1))
    end)

    it("sets a user variable of its WHERE before it waits, visible to others", function()
      local function shown(text)
        return tonumber(store.sql():query([[
          SELECT COUNT(*) FROM performance_schema.user_variables_by_thread
          WHERE VARIABLE_NAME='hierlock_spec' AND VARIABLE_VALUE='%s']], text)[1][1])
      end
      local query = ("(SELECT bucket FROM %s WHERE level=0 AND bucket=1 AND " ..
                     "(@hierlock_spec:=%s) IS NOT NULL FOR UPDATE)")
      assert(a:query(query, TABLE, "'holds'"))
      assert.equal(1, shown("holds")) -- it is idle
      b:send(query, TABLE, "0x7761697473")
      wait_for(is_waiting)
      assert.equal(1, shown("waits"))
      a:query("ROLLBACK")
      assert(b:result())
    end)

    it("evaluates UUID_SHORT() and SYSDATE(6) after the wait, NOW(6) before it", function()
      local columns = "UUID_SHORT(), SYSDATE(6), NOW(6)"
      assert(a:query(exclusive(1)))
      b:send(row(1, "FOR UPDATE", 0, columns))
      wait_for(is_waiting)
      local between = observer:query("SELECT UUID_SHORT(), SYSDATE(6)")[1]
      a:query("ROLLBACK")
      local after = b:result()[1]
      assert.is_true(after[1] > between[1] and #after[1] == #between[1])
      assert.is_true(after[2] > between[2])
      assert.is_true(after[3] < between[2])
    end)

    it("gets the second of the server's start and a counter from UUID_SHORT()", function()
      local row_ = observer:query([[SELECT UUID_SHORT() >> 24 & 0xFFFFFFFF,
        UUID_SHORT() & 0xFFFFFF, UUID_SHORT() & 0xFFFFFF, UNIX_TIMESTAMP()]])[1]
      local uptime = observer:query("SHOW GLOBAL STATUS LIKE 'Uptime'")[1][2]
      assert.is_true(math.abs(row_[4] - uptime - row_[1]) <= 3)
      assert.equal(1, row_[3] - row_[2])
    end)
  end)

  describe("the end of a wait", function()
    -- Each: the error, the limit in seconds and the statement that ends a wait.
    local limits = {
      mysql = {
        { 3024, 0.3, "(SELECT /*+ MAX_EXECUTION_TIME(300) */ bucket FROM %s WHERE level=0 AND " ..
                     "bucket=1 FOR UPDATE)" },
        { 3024, 0.3, "(SELECT bucket FROM %s WHERE level=0 AND bucket=1 FOR UPDATE)",
          "SET SESSION max_execution_time=300" },
        { 3572, 0, "(SELECT bucket FROM %s WHERE level=0 AND bucket=1 FOR UPDATE NOWAIT)" },
      },
      mariadb = {
        { 1969, 0.3, "SET STATEMENT max_statement_time=0.3 FOR (SELECT bucket FROM %s WHERE " ..
                     "level=0 AND bucket=1 FOR UPDATE)" },
        { 1969, 0.3, "(SELECT bucket FROM %s WHERE level=0 AND bucket=1 FOR UPDATE)",
          "SET SESSION max_statement_time=0.3" },
        { 1205, 0, "(SELECT bucket FROM %s WHERE level=0 AND bucket=1 FOR UPDATE NOWAIT)" },
      },
    }
    for _, limit in ipairs(limits[store.name]) do
      local number, seconds, query, before = limit[1], limit[2], limit[3], limit[4]
      it(("comes after %.1f s with error %d, and keeps the earlier rows: %s"):format(
           seconds, number, before or query), function()
        local seen, took = fail(query:format(TABLE), { before })
        assert.equal(number, seen)
        assert.is_true(took > seconds - 0.01 and took < seconds + 1, took .. " s")
        assert.is_false(free(2))
        b:query("ROLLBACK")
        assert.is_true(free(2))
      end)
    end

    it("comes by innodb_lock_wait_timeout in whole seconds, and keeps the earlier rows", function()
      local seen, took = fail(exclusive(1), { "SET SESSION innodb_lock_wait_timeout=1" })
      assert.equal(1205, seen)
      assert.is_true(took > 0.9 and took < 3, took .. " s")
      assert.is_false(free(2))
      b:query("SET SESSION innodb_lock_wait_timeout=0")
      assert.equal(store.dialect == "mysql" and "1" or "0",
                   b:query("SELECT @@innodb_lock_wait_timeout")[1][1])
    end)

    it("comes by KILL QUERY of the same user, at once, with 1317, and keeps the earlier rows",
       function()
      assert(a:query(exclusive(1)))
      assert(b:query(exclusive(2)))
      b:send(exclusive(1))
      wait_for(is_waiting)
      local begun = support.now()
      assert(observer:query("KILL QUERY %d", b.id))
      local rows, number = b:result()
      assert.is_nil(rows)
      assert.equal(1317, number)
      assert.is_true(support.now() - begun < 0.5)
      assert.is_false(free(2))
    end)

    it("comes by deadlock with 1213, and has given back everything", function()
      assert(a:query(exclusive(1)))
      assert(b:query(exclusive(2)))
      b:send(exclusive(1))
      wait_for(is_waiting)
      a:send(exclusive(2))
      local rows_a, number_a = a:result()
      local rows_b, number_b = b:result()
      assert.equal(1213, number_a or number_b)
      assert.is_true((rows_a == nil) ~= (rows_b == nil))
      local winner = rows_a and a or b
      winner:query("ROLLBACK")
      assert.equal("1 2", free_rows(2))
    end)

    it("comes by lock_wait_timeout for newcomers when an ALTER TABLE waits", function()
      assert(a:query("SELECT * FROM %s LIMIT 1", TABLE))
      observer:send("ALTER TABLE %s COMMENT='x'", TABLE)
      wait_for(function()
        return #store.sql():query([[SELECT 1 FROM information_schema.PROCESSLIST
          WHERE ID=%d AND STATE LIKE '%%metadata lock%%']], observer.id) == 1
      end)
      b:query("SET SESSION lock_wait_timeout=1")
      local rows, number = b:query(exclusive(1))
      assert.is_nil(rows)
      assert.equal(1205, number)
      a:query("ROLLBACK")
      assert(observer:result())
    end)
  end)

  describe("wait_timeout", function()
    it("frees the locks of an idle session, on time; a sign of life renews it, and waiting for " ..
       "a lock does not count", function()
      local waiter = program()
      for _, one in ipairs { a, b, waiter } do one:query("SET SESSION wait_timeout=1") end
      assert(observer:query(exclusive(3)))
      waiter:send(exclusive(3))
      assert(a:query(exclusive(1)))
      assert(b:query(exclusive(2)))
      local function is_free(bucket) -- the observer holds something
        return #store.sql():query(row(bucket, "FOR UPDATE SKIP LOCKED")) == 1
      end
      local begun = support.now()
      while support.now() - begun < 1.6 do
        b:query("DO 0")
        support.sleep(0.1)
        if support.now() - begun < 0.8 then assert.is_false(is_free(1)) end
      end
      assert.is_true(is_free(1))
      assert.is_false(is_free(2))
      observer:query("ROLLBACK")
      assert.equal(1, #assert(waiter:result()))
    end)
  end)

  describe("a client that died", function()
    it("while waiting stays in the queue until its own timeout, with its earlier rows", function()
      assert(a:query(exclusive(1)))
      assert(b:query("SET SESSION innodb_lock_wait_timeout=1"))
      assert(b:query(exclusive(2)))
      b:send(exclusive(1))
      wait_for(is_waiting)
      b:signal("sigkill")
      support.sleep(support.STAYS_BLOCKED)
      assert.is_true(is_waiting())
      assert.is_false(free(2))
      wait_for(nobody_waits)
      wait_for(function() return free(2) end)
      assert.is_false(free(1))
    end)

    it("while idle is noticed at once, and its rows are free", function()
      assert(a:query(exclusive(1)))
      a:signal("sigkill")
      wait_for(function() return free(1) end)
    end)
  end)

  describe("the queue for a row", function()
    it("does not let new shared requests pass a waiting exclusive one", function()
      assert(a:query(row(1, shared)))
      b:send(exclusive(1))
      wait_for(is_waiting)
      observer:send(row(1, shared))
      assert.is_true(observer:stays_blocked())
      a:query("ROLLBACK")
      assert(b:result())
      b:query("ROLLBACK")
      assert(observer:result())
    end)

    local function served_in_order()
      assert(a:query(exclusive(1)))
      local waiters, order = {}, {}
      for i = 1, 4 do
        waiters[i] = program()
        waiters[i]:send(row(1, "FOR UPDATE", 0, "SYSDATE(6)"))
        wait_for(function() return store.waiting() >= i end)
      end
      a:query("ROLLBACK")
      for i = 1, 4 do
        order[i] = assert(waiters[i]:result())[1][1]
        waiters[i]:query("ROLLBACK")
        assert.is_true(i == 1 or order[i - 1] < order[i])
      end
    end
    if store.name == "mariadb" then it("is served in the order of coming", served_in_order) end
  end)

  describe("a read-only server", function()
    it("grants shared locks, which protect nothing; to administrators exclusive ones, too", function()
      local root = store.root() or pending("no administrator here")
      local schema = store.sql():query("SELECT DATABASE()")[1][1]
      root:query("SET GLOBAL read_only=ON")
      finally(function() root:query("SET GLOBAL read_only=OFF") end)
      assert.equal(1, #assert(a:query(row(1, shared))))
      root:query("START TRANSACTION")
      assert.equal(1, #root:query((row(2, "FOR UPDATE"):gsub(TABLE, schema .. "." .. TABLE))))
      root:query("ROLLBACK")
    end)
  end)

  describe("the privilege to lock", function()
    it("is SELECT; for exclusive locks MySQL wants UPDATE, DELETE or LOCK TABLES besides", function()
      local root = store.root() or pending("no administrator here")
      local schema = store.sql():query("SELECT DATABASE()")[1][1]
      root:query("CREATE USER hierlock_spec@'%' IDENTIFIED BY 'x'")
      finally(function() root:query("DROP USER hierlock_spec@'%'") end)
      root:query("GRANT SELECT ON %s.%s TO hierlock_spec@'%%'", schema, TABLE)
      local dsn = store.bare_dsn:gsub("//.-@", "//hierlock_spec:x@")
      local function number(clause)
        local connection = support.sql_connection(dsn) -- it remembers what it may
        local rows, errno = support.try_query(connection, row(1, clause))
        connection:close()
        return rows and 0 or errno
      end
      local refused = store.dialect == "mysql" and 1142 or 0
      assert.same({ refused, 0 }, { number("FOR UPDATE"), number(shared) })
      for _, privilege in ipairs { "UPDATE ON %s.%s", "DELETE ON %s.%s", "LOCK TABLES ON %s.*" } do
        root:query("GRANT " .. privilege .. " TO hierlock_spec@'%%'", schema, TABLE)
        assert.same({ 0, 0 }, { number("FOR UPDATE"), number(shared) }, privilege)
        root:query("REVOKE " .. privilege .. " FROM hierlock_spec@'%%'", schema, TABLE)
      end
    end)
  end)

  describe("a plain read of what is committed during the wait, in READ COMMITTED,", function()
    local GATE = "hierlock_spec_gate"
    setup(function()
      store.sql():query("CREATE TABLE IF NOT EXISTS %s (g INT PRIMARY KEY, n BIGINT UNSIGNED NOT NULL, till DATETIME(6)) ENGINE=InnoDB", GATE)
    end)
    teardown(function() store.sql():query("DROP TABLE %s", GATE) end)
    before_each(function() store.sql():query("REPLACE INTO %s VALUES (1, 0, UTC_TIMESTAMP(6))", GATE) end)

    local gate = ("(SELECT n FROM %s WHERE g=1)"):format(GATE)
    local function prepared(statement)
      return function(program_)
        assert(program_:query(("PREPARE s FROM '%s'"):format(statement)))
        return "EXECUTE s"
      end
    end

    -- Returns the statement's result, as "0 1 1", or the error's number; while the statement waits for a row, 1 is
    -- committed.
    local function read(statement)
      if type(statement) == "function" then statement = statement(b) end
      assert(a:query(exclusive(2)))
      assert(a:query(("UPDATE %s SET n=1"):format(GATE)))
      b:send(statement)
      wait_for(is_waiting)
      a:query "COMMIT"
      local values, rows, errno = {}, b:result()
      for i, row_ in ipairs(rows or {}) do values[i] = table.concat(row_, ",") end
      b:query "ROLLBACK"
      return rows and table.concat(values, " ") or errno
    end

    local one, two
    before_each(function()
      one, two = row(1, shared, 0, "7"), row(2, "FOR UPDATE", 0, "7")
    end)

    it("sees it as the last part of a union, as text and prepared", function()
      local union = one .. " UNION ALL " .. two .. " UNION ALL " .. gate
      assert.equal("7 7 1", read(union))
      store.sql():query("UPDATE %s SET n=0", GATE)
      assert.equal("7 7 1", read(prepared(union)))
    end)

    it("misses it as an earlier part, and behind one", function()
      assert.equal("0 7 7", read(gate .. " UNION ALL " .. one .. " UNION ALL " .. two))
      store.sql():query("UPDATE %s SET n=0", GATE)
      assert.equal("7 0 7 0", read(one .. " UNION ALL " .. gate .. " UNION ALL " .. two .. " UNION ALL " .. gate))
    end)

    if store.name == "mysql" then
      it("sees it as the last table of a join of look-ups, and not as the first", function()
        local join = "SELECT g.n FROM %s STRAIGHT_JOIN %s WHERE r.level=0 AND r.bucket=2 AND g.g=1 FOR UPDATE OF r"
        local r, g = TABLE .. " r", GATE .. " g"
        assert.equal("1", read(prepared(join:format(r, g))))
        store.sql():query("UPDATE %s SET n=0", GATE)
        assert.equal("0", read(prepared(join:format(g, r))))
      end)
    end

    it("misses it in REPEATABLE READ with an older snapshot, where a locking read sees it or is refused", function()
      b:query "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
      assert(b:query(("SELECT n FROM %s"):format(GATE)))
      assert.equal("7 0", read(two .. " UNION ALL " .. gate))
      store.sql():query("UPDATE %s SET n=0", GATE)
      assert(b:query(("SELECT n FROM %s"):format(GATE)))
      -- MariaDB 11.6 and later refuse to lock a row that is newer than the transaction's snapshot.
      local refuses = #store.sql():query "SHOW VARIABLES WHERE Variable_name='innodb_snapshot_isolation' AND Value='ON'" > 0
      assert.equal(refuses and 1020 or "7 1", read(two .. " UNION ALL " .. gate:gsub("%)$", " " .. shared .. ")")))
    end)

    it("shows a time that is up, while a DELETE that looks at it waits for who changes it, and finds it changed", function()
      assert(a:query(("UPDATE %s SET till=UTC_TIMESTAMP(6)+INTERVAL 60 SECOND"):format(GATE)))
      assert.equal("1", observer:query(("SELECT COUNT(*) FROM %s WHERE till<=UTC_TIMESTAMP(6)"):format(GATE))[1][1])
      b:send(("DELETE FROM %s WHERE g=1 AND till<=UTC_TIMESTAMP(6)"):format(GATE))
      wait_for(is_waiting)
      a:query "COMMIT"
      b:result()
      assert.equal("1", b:query(("SELECT COUNT(*) FROM %s"):format(GATE))[1][1])
      b:query "ROLLBACK"
    end)
  end)

  describe("a statement that looks and sleeps by turns", function()
    local WATCHED = "hierlock_spec_watched"
    setup(function()
      store.sql():query("CREATE TABLE IF NOT EXISTS %s (b INT, id INT, PRIMARY KEY (b, id)) ENGINE=InnoDB", WATCHED)
    end)
    teardown(function() store.sql():query("DROP TABLE %s", WATCHED) end)
    before_each(function() store.sql():query("REPLACE INTO %s VALUES (7, 1)", WATCHED) end)

    local LOOK = "WITH RECURSIVE look(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM look WHERE n<%d AND " ..
      "IF(SLEEP(0.01),0,(SELECT COUNT(*) FROM %s r WHERE look.n>0 AND (r.b=7)))) SELECT MAX(n) INTO @looks FROM look"

    -- Returns how many looks it took, of so many, while the row is deleted. The deletion must not wait.
    local function looks(isolation, most)
      b:query("SET autocommit=1")
      b:query("SET SESSION TRANSACTION ISOLATION LEVEL %s", isolation)
      b:send(LOOK, most, WATCHED)
      wait_for(function()
        return observer:query("SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'WITH RECURSIVE look%%'")[1][1] == "1"
      end)
      a:query("SET innodb_lock_wait_timeout=1")
      assert(a:query("DELETE FROM %s", WATCHED))
      local seen = b:result() and tonumber(b:query("SELECT @looks")[1][1])
      a:query "ROLLBACK"
      return seen
    end

    it("sees in READ UNCOMMITTED what others delete meanwhile, also before the COMMIT, and keeps no row locked", function()
      assert.is_true(looks("READ UNCOMMITTED", 900) < 900)
    end)

    it("sees nothing of it in READ COMMITTED", function() assert.equal(100, looks("READ COMMITTED", 100)) end)

    it("looks as often as its session allows", function()
      b:query("SET %s=1001", store.name == "mariadb" and "max_recursive_iterations" or "cte_max_recursion_depth")
      assert(b:query((LOOK:gsub("0%.01", "0")), 1000, WATCHED))
      assert.equal("1000", b:query("SELECT @looks")[1][1])
    end)
  end)
end)
