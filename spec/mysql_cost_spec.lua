--- The cost of acquiring and releasing at a server: round trips, prepared statements, and no writes.
-- Parts: stores

local proxy = require "spec.support.proxy"
local support = require "spec.support"

local function resources(n)
  local list = {}
  for i = 1, n do list[i] = "r" .. i end
  return list
end

support.each_server(function(store)
  local opened, between

  before_each(function() opened = {} end)
  after_each(function()
    for _, manager in ipairs(opened) do manager:close() end
    support.close_peers()
    if between then between.close() end
    between = nil
  end)

  local function open(...)
    local manager = support.open(store, ...)
    opened[#opened + 1] = manager
    return manager
  end

  describe("round trips", function()
    local peer

    -- A peer behind a proxy. The peer's first connection belongs to `open`.
    local function behind_proxy(options)
      between = proxy.open(store)
      peer = support.process(store, options, between.dsn)
      between.take()
    end

    local function lock_and_unlock(times, options)
      return peer:call([[
        local times, options = ...
        for _ = 1, times do
          local handle = assert(manager:acquire({"u1", "a1", "r1"}, options))
          assert(handle:release())
        end
        return true
      ]], times, options)
    end

    -- Until all sessions have prepared the statement: the first time each one sends it as text.
    local function warm_up()
      support.wait_until(function()
        lock_and_unlock(6)
        return not table.concat(between.take()):gsub("execute", ""):gsub("ROLLBACK", ""):find "%S"
      end, "prepared statements")
    end

    -- A session tells the server its time limits again when less time is left than they say, by a few milliseconds:
    -- a busy machine may take that long between two steps. So the work is repeated until no such command is seen.
    -- Returns the commands.
    local function undisturbed(fn)
      local commands
      for _ = 1, 40 do
        commands = fn()
        local text = table.concat(commands, " ")
        if not text:find("max_execution_time=", 1, true) and not text:find("max_statement_time=", 1, true) then break end
      end
      return commands
    end

    it("are at most three to log in, with the looks at server and table, and one for the first lock",
       function()
      -- Where the library waits as it likes, the last look is a trip of its own, which can be given up.
      local turns = support.does_not_tell_waits() and 4 or 3
      behind_proxy() -- the server remembers the password by now
      between.turns = 0
      peer:call([[
        handles.manager = assert(hierlock.open(...))
        return true
      ]], between.dsn, { buckets = store.options.buckets })
      assert.is_true(between.turns <= turns, between.turns .. " to log in")
      between.turns = 0
      peer:call([[
        handles.h = assert(handles.manager:acquire {"u1", "a1", "r1"})
        return true
      ]])
      assert.equal(1, between.turns)
    end)

    it("have a second at least to look at the server, however short a manager waits", function()
      between = proxy.open(store)
      peer = support.process(store, { timeout = 0 }, between.dsn)
      local texts = table.concat(between.take(), "\n")
      local ms = tonumber(texts:match("max_execution_time=([%d.]+)")) or
        tonumber(texts:match("SET SESSION.-max_statement_time=([%d.]+)")) * 1000
      assert.is_true(ms >= 1000, texts)
    end)

    it("do not keep a wait from being short: a new connection over a slow line is made, and used", function()
      behind_proxy()
      peer:acquire("h", "acquire", { "u1" }):result() -- its connection was made by `open`
      between.delay(120)
      for i, timeout in ipairs { 0.2, 0.05, 0 } do
        assert.is_true(peer:acquire("h" .. i, "acquire", { "v" .. i }, { timeout = timeout }):result())
      end
      between.delay(0)
    end)

    it("may take long: what connecting has taken before, it may take again", function()
      behind_proxy()
      between.delay(400)
      assert.is_true(peer:call([[
        handles.manager = assert(hierlock.open(...))
        handles.h = assert(handles.manager:acquire {"u1"})
        handles.i = assert(handles.manager:acquire({"u2"}, {timeout = 0.2}))
        return true
      ]], between.dsn, { buckets = store.options.buckets }))
      between.delay(0)
    end)

    it("are one to acquire, and none to wait for on release", function()
      behind_proxy()
      warm_up()
      local commands = undisturbed(function()
        lock_and_unlock(5)
        return between.take()
      end)
      local expected = {}
      for i = 1, 5 do expected[2 * i - 1], expected[2 * i] = "execute", "ROLLBACK" end
      assert.same(expected, commands)
    end)

    it("are not waited for on release, nor by the next acquisition", function()
      behind_proxy()
      warm_up()
      peer:call([[
        handles.h = assert(manager:acquire {"u1", "a1", "r1"})
        return true
      ]])
      local last = between.commands[#between.commands]
      assert.equal("execute", last.name)
      between.hold(last.connection)
      assert.is_true(peer:call("return handles.h:release()"))
      -- The rollback goes through, its answer does not; another session is used.
      assert.is_true(peer:call([[
        handles.h = assert(manager:acquire({"u1", "a1", "r1"}, {timeout = 3}))
        return true
      ]]))
      assert.not_equal(last.connection, between.commands[#between.commands].connection)
      between.let(last.connection)
      assert.is_true(peer:release("h"))
    end)

    it("are one for a shape that comes once, as text; later it is prepared, once", function()
      local shapes, seen
      undisturbed(function()
        if between then
          peer:close()
          between.close()
        end
        behind_proxy { pool_size = 1 }
        lock_and_unlock(1, { mode = "shared" })
        between.take()
        local all = {}
        shapes = {}
        for i = 1, 4 do
          lock_and_unlock(1)
          local commands = between.take()
          assert.equal("ROLLBACK", commands[#commands])
          shapes[i] = commands[1]:find("SELECT", 1, true) and "text" or table.concat(commands, " ", 1, #commands - 1)
          for _, command in ipairs(commands) do all[#all + 1] = command end
        end
        seen = all
        return all
      end)
      assert.same({ "text", "prepare execute", "execute", "execute" }, shapes, table.concat(seen, "\n"))
    end)

    it("do not grow when each call has another timeout", function()
      behind_proxy()
      warm_up()
      for i = 1, 6 do
        lock_and_unlock(1, { timeout = i + 0.25 })
        local commands = between.take()
        assert.equal(2, #commands)
        assert.equal("ROLLBACK", commands[2])
      end
    end)

    if store.name == "mariadb" then
      it("are not more for a try, which brings a limit of its own after a very short wait", function()
        behind_proxy { pool_size = 1 }
        warm_up()
        lock_and_unlock(1, { timeout = 0 })
        lock_and_unlock(1, { timeout = 0.05 })
        between.take()
        lock_and_unlock(1, { timeout = 0 })
        local commands = between.take()
        assert.equal(2, #commands)
        local limit = tonumber(commands[1]:match("max_statement_time=([%d.]+)"))
        assert.is_true(limit and limit >= 0.5, commands[1])
      end)
    end

    it("are none to look whether a lock stands, and one to be sure", function()
      behind_proxy()
      warm_up()
      peer:acquire("h", "acquire", { "u1", "a1", "r1" }):result()
      between.take()
      assert.is_true(peer:call("return handles.h:is_held() and handles.h:remaining() > 1"))
      assert.same({}, between.take())
      assert.is_true(peer:call("return handles.h:check()"))
      assert.equal(1, #between.take())
      peer:release("h")
    end)
  end)

  describe("acquiring and releasing", function()
    -- Statements of the whole server (MySQL also counts rows), and the changes to the table. The spec's own looking
    -- is no INSERT, UPDATE or DELETE either.
    local function writes()
      local counters = {}
      for _, row in ipairs(store.sql():query([[
          SHOW GLOBAL STATUS WHERE Variable_name IN ('Com_insert','Com_insert_select',
          'Com_update','Com_update_multi','Com_delete','Com_delete_multi','Com_replace',
          'Com_replace_select','Com_load','Handler_update','Handler_delete',
          'Innodb_rows_inserted','Innodb_rows_updated','Innodb_rows_deleted')]])) do
        counters[row[1]] = row[2]
      end
      local row = store.sql():query([[
        SELECT COUNT_FETCH, COUNT_WRITE FROM performance_schema.table_io_waits_summary_by_table
        WHERE OBJECT_SCHEMA=DATABASE() AND OBJECT_NAME='%s']], store.table)[1]
      counters.written = row[2]
      return counters, tonumber(row[1])
    end

    it("write nothing, 200 times", function()
      local manager = open()
      local before, read_before = writes()
      assert.is_truthy(before.Com_insert)
      for i = 1, 200 do
        assert(manager:acquire({ "u1", "a1", "r" .. i }, { label = "l" .. i })):release()
      end
      local after, read_after = writes()
      assert.same(before, after)
      assert.is_true(read_after >= read_before + 600, "the server does not count")
    end)

    it("keep few prepared statements, however many shapes there are", function()
      local function prepared()
        return tonumber(store.sql():query("SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'")[1][2])
      end
      local before = prepared()
      local manager = open()
      for _ = 1, 4 do
        for n = 1, 24 do
          for _ = 1, 4 do
            assert(manager:acquire_resources("u1", "a1", resources(n))):release()
          end
        end
      end
      local while_open = prepared() - before
      assert.is_true(while_open > 0, "nothing was prepared")
      assert.is_true(while_open <= 16, while_open .. " statements for two sessions")
      manager:close()
      support.wait_until(function() return prepared() <= before end, "the statements' end") -- those of earlier managers may end meanwhile
    end)
  end)
end)
