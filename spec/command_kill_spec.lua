--- `hierlock kill`, as an operator runs it, on every store: it ends the named locks, and no others; and it needs
-- privileges.

local uv = require "luv"
local support = require "spec.support"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

local QUESTION = "[y/N] "

after_each(program.close)

describe("the command line of kill", function()
  it("is refused with 64 and a line when it is wrong, before anything is connected to", function()
    for _, arguments in ipairs { { "--yes" }, { "", "--yes" }, { "u1//r1", "--yes" }, { "u1", "u2", "--yes" }, { "u1" },
                                 { "--owner", "", "--yes" }, { "--session", "", "--yes" }, { "u1", "--signal", "STOP", "--yes" },
                                 { "u1", "--yes", "--by", ("x"):rep(64) }, { "u1", "--yes", "--reason", "" } } do
      local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "kill", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
    assert.matches("--ask-password", assert_status(64, run(nil, "kill", "u1", "--yes", "--dsn", "mysql://u:x@h/d")).err, 1, true)
    assert_status(69, run("mysql://u@127.0.0.1:1/d", "kill", "u1", "--yes"))
    assert.equal("no lock ended: there was none\n", assert_status(1, run("null:", "kill", "u1", "--yes")).out)
  end)
end)

support.each_leasing_store(function(store)
  local manager, peer
  local sessions = not store.leases_only
  local embedded = store.name == "embedded"

  before_each(function()
    manager = support.open(store, { application = "the shop" })
    peer = support.process(store, { application = "the till" })
  end)

  after_each(function()
    support.close_peers()
    manager:close()
    manager = nil
  end)

  local function holders(target)
    if store.dialect == "mariadb" then support.sleep(0.11) end -- it shows an old picture to those who look more often
    local list = {}
    for i, holder in ipairs(assert(manager:holders(target))) do list[i] = holder.application .. " " .. holder.path end
    table.sort(list)
    return list
  end

  local function wait_for_holders(target, expected)
    support.wait_until(function() return table.concat(holders(target), ";") == expected end, expected)
  end

  -- A lock of the peer's, which others see.
  local function hold(name, target, options)
    assert.is_true(peer:acquire(name, "acquire", target, options):result())
    support.wait_until(function() return #holders(target) > 0 end, "the holder")
  end

  local function is_lost(name)
    local _, code = peer:call([[ local ok, err = handles[...]:check() return ok, err and err.code ]], name)
    return code == "lost"
  end

  local function kill(...) return run(store.dsn, "kill", "--yes", ...) end

  if not embedded then
    it("ends what keeps others from the target, says whose, and nothing else", function()
      hold("below", { "u1", "a1", "r1" })
      hold("beside", { "u1", "a2" })
      local said = assert_status(0, kill "u1/a1")
      assert.equal("", said.err)
      assert.matches("^u1/a1/r1  holds  exclusive  [^\n]*the till[^\n]*\n1 lock ended, of the till " .. peer.pid .. "@[^\n]*\n$", said.out)
      assert.is_true(is_lost "below")
      assert.is_false(is_lost "beside")
      local handle = assert(manager:acquire({ "u1", "a1" }, { timeout = 5 }))
      assert(handle:release { confirm = true })
      -- Above it.
      assert_status(0, kill "u1/a2/r9")
      assert.is_true(is_lost "beside")
      assert.matches("no lock ended: there was none", assert_status(1, kill "u1").out, 1, true)
    end)

    it("leaves those alone who only wait: they get it", function()
      hold("h", { "u1" })
      local pending = assert(manager:start({ "u1", "a1" }))
      support.wait_for_waiters(store, { "u1" })
      assert_status(0, kill "u1")
      local handle = assert(pending:wait(10))
      assert.is_true(is_lost "h")
      assert.is_true(handle:check())
      handle:release()
    end)

    it("ends what an owner holds, of a session lock an application", function()
      hold("one", { "u1", "a1" })
      local mine = assert(manager:acquire { "u1", "a2" })
      assert_status(1, kill("u1", "--owner", "somebody"))
      support.wait_until(function() return #holders { "u1" } == 2 end, "both")
      local said = assert_status(0, kill("--owner", "the till", store.lists_by_root and "u1" or nil))
      assert.matches("1 lock ended, of the till", said.out, 1, true)
      assert.is_true(is_lost "one")
      assert.is_true(mine:check())
      mine:release()
    end)

    if sessions then
      it("leaves a lock alone that its session has taken while the command connected", function()
        hold("old", { "u1" })
        local greetings = 0
        local between = proxy.open(store, function(data, first)
          greetings = greetings + (first and 1 or 0)
          return data
        end)
        between.delay(100)
        local command = program.start(between.dsn, "kill", "--yes", "u1")
        -- The manager has one; the second is to end sessions.
        command.until_true(function() return greetings == 2 end, "the connection that ends sessions")
        assert(peer:call [[ return handles.old:release { confirm = true } ]])
        assert.is_true(peer:acquire("new", "acquire", { "u1" }):result())
        command.join()
        between.close()
        assert.matches("1 lock had ended by then, of the till", command.out, 1, true)
        assert_status(1, command)
        assert.is_false(is_lost "new")
      end)
    end

    it("asks on a terminal, and ends just what was listed and still is there", function()
      hold("one", { "u1", "a1" })
      local gone = assert(manager:acquire { "u1", "a2" })
      support.wait_until(function() return #holders { "u1" } == 2 end, "both")
      for _, no in ipairs { "n\n", "\n", "\4" } do
        local terminal = program.on_terminal(store.dsn, 160, "kill", "u1")
        terminal.shows("End these 2 locks? " .. QUESTION)
        terminal.type(no)
        assert.matches("\r\nno lock ended\r\n$", assert_status(1, terminal.join()).out)
      end
      assert.is_false(is_lost "one")
      local terminal = program.on_terminal(store.dsn, 160, "kill", "u1")
      terminal.shows(QUESTION)
      assert(gone:release { confirm = true })
      support.sleep(0.02) -- another time of request
      local again = assert(manager:acquire { "u1", "a2" })
      support.wait_until(function() return #holders { "u1" } == 2 end, "both")
      terminal.type "y\n"
      local out = assert_status(0, terminal.join()).out
      assert.matches("1 lock had ended by then, of the shop", out, 1, true)
      assert.matches("1 lock ended, of the till", out, 1, true)
      assert.is_true(is_lost "one")
      assert.is_true(again:check())
      assert(again:release { confirm = true })
      support.wait_until(function() return #holders { "u1" } == 0 end, "nobody")
      assert.matches("--yes", assert_status(64, run(store.dsn, "kill", "u1")).err, 1, true)
      terminal = program.on_terminal(store.dsn, 80, "kill", "u1")
      assert_status(1, terminal.join())
    end)

    it("ends nothing after Ctrl-C", function()
      hold("one", { "u1" })
      local terminal = program.on_terminal(store.dsn, 120, "kill", "u1")
      terminal.shows(QUESTION)
      terminal.type "\3"
      assert_status(130, terminal.join())
      assert.is_false(is_lost "one")
    end)
  end

  it("tells the holder of a lease who has ended it, and why", function()
    if store.table then return end -- this space has none; see support.leased
    local lease = assert(manager:acquire({ "u1" }, { ttl = 60, owner = "anna" }))
    assert_status(0, kill("u1", "--owner", "anna", "--by", "the admin", "--reason", "closing time"))
    local _, err = lease:check()
    assert.same({ "lost", "the admin", "closing time" }, { err.code, err.revoked_by, err.reason })
  end)

  it("leaves alone those who wait: they get what is ended", function()
    hold("h", { "u1" })
    local blocked = support.process(store, { application = "the other" })
    blocked:acquire("w", "acquire", { "u1", "a1" })
    if sessions then
      support.wait_until(function() return #holders { "u1" } == 2 end, "the waiter")
    else
      support.wait_for_waiters(store, { "u1" })
    end
    local said = assert_status(0, kill("u1", unpack(embedded and { "--signal", "KILL" } or {})))
    assert.matches("\n1 lock ended, of the till", said.out, 1, true)
    assert.is_nil(said.out:find("the other", 1, true))
    assert.is_true(blocked:result())
  end)

  if sessions and not embedded then
    it("ends a session by the name that ps shows, also while it waits", function()
      hold("h", { "u1" })
      local blocked = support.process(store, { application = "the other" })
      blocked:acquire("w", "acquire", { "u1", "a1" })
      support.wait_for_waiters(store, { "u1" })
      local session
      holders { "u1" }
      for _, holder in ipairs(assert(manager:holders())) do if holder.waiting then session = holder.session end end
      assert.matches("^%d+$", session)
      assert_status(1, kill("--session", session .. "0"))
      local said = assert_status(0, kill("--session", session))
      assert.matches("u1/a1  waits", said.out, 1, true)
      local ok, code = blocked:result()
      assert.is_nil(ok)
      assert.equal("connection", code)
      assert.is_false(is_lost "h")
    end)

    it("says which privilege it lacks", function()
      if not store.root() then return end
      hold("h", { "u1" })
      local root, name = store.root(), "hlkill"
      if store.dialect == "postgresql" then
        root:query("DROP ROLE IF EXISTS %s", name)
        root:query("CREATE ROLE %s LOGIN PASSWORD 'x'", name)
        finally(function() root:query("DROP ROLE %s", name) end)
      else
        root:query("DROP USER IF EXISTS %s@'%%'", name)
        root:query("CREATE USER %s@'%%' IDENTIFIED BY 'x'", name)
        local database = store.bare_dsn:match "/([^/?]+)[^/]*$"
        root:query("GRANT SELECT, UPDATE ON %s.* TO %s@'%%'", database, name)
        root:query("GRANT SELECT ON performance_schema.* TO %s@'%%'", name)
        root:query("GRANT PROCESS ON *.* TO %s@'%%'", name)
        finally(function() root:query("DROP USER %s@'%%'", name) end)
      end
      local dsn = store.dsn:gsub("//[^:]+:[^@]+@", "//" .. name .. ":x@")
      local said = assert_status(77, run(dsn, "kill", "--yes", "u1"))
      assert.matches(store.dialect == "postgresql" and "pg_signal_backend" or "CONNECTION[_ ]ADMIN", said.err)
      assert.matches("^hierlock: %C+\n$", said.err)
      assert.matches("no lock ended\n$", said.out)
      assert.is_false(is_lost "h")
    end)
  end

  if embedded then
    it("says which process holds a session lock, and signals it only when that is said", function()
      hold("h", { "u1", "a1" })
      local said = assert_status(1, kill "u1")
      assert.matches(("u1/a1 of the till %d@%s not ended: held by process %d on "):format(peer.pid, uv.os_gethostname(), peer.pid),
        said.out, 1, true)
      assert.matches("\nno lock ended\n$", said.out)
      assert.is_false(is_lost "h")
      hold("more", { "u1", "a2" })
      said = assert_status(0, kill("u1", "--signal", "KILL"))
      assert.matches("\n2 locks ended, of the till", said.out, 1, true)
      wait_for_holders({ "u1" }, "")
    end)

    it("ends the session that is named, and no other process' first one", function()
      hold("h", { "u1" })
      local other = support.process(store, { application = "the other" })
      assert.is_true(other:acquire("h", "acquire", { "u2" }):result())
      local session
      for _, holder in ipairs(assert(manager:holders())) do
        if holder.application == "the till" then session = holder.session end
      end
      assert_status(1, kill("--session", "0", "--signal", "KILL"))
      local said = assert_status(0, kill("--session", session, "--signal", "KILL"))
      assert.matches("\n1 lock ended, of the till", said.out, 1, true)
      wait_for_holders({ "u1" }, "")
      assert.is_true(other:call "return handles.h:check()")
    end)

    it("ends leases, and says that a process keeps its lock when it does not heed the signal", function()
      assert.is_true(peer:call [[
        local signal = require("luv").new_signal()
        signal:start("sigterm", function() end)
        handles.signal = signal
        return true
      ]])
      hold("h", { "u1", "a1" })
      local lease = assert(manager:acquire({ "u1", "a2" }, { ttl = 60, owner = "anna" }))
      local said = assert_status(0, kill("u1", "--signal", "TERM"))
      assert.matches("u1/a1 of the till .* not ended: it has been told to end, and has not yet\n1 lock ended, of anna", said.out)
      local _, err = lease:check()
      assert.equal("lost", err.code)
      assert.is_false(is_lost "h")
    end)

    it("signals no process that only a record names", function()
      hold("h", { "u1" })
      local victim = support.process(nil)
      local function little(number)
        local out = {}
        for i = 1, 8 do out[i], number = string.char(number % 256), math.floor(number / 256) end
        return table.concat(out)
      end
      -- The peer's slot, in which another program may write, says the victim's pid. Sizes as in format.h.
      local SLOTS, SLOT, COUNT, PID = 4096 + 128 * 64, 256, 1024, 8
      local fd = assert(uv.fs_open(store.directory .. "/control", "r+", 384))
      local written = 0
      for i = 1, COUNT - 1 do
        local at = SLOTS + i * SLOT
        local slot = uv.fs_read(fd, SLOT, at)
        if slot:byte(1) == 1 and slot:sub(PID + 1, PID + 8) == little(peer.pid) then
          written = written + uv.fs_write(fd, little(victim.pid), at + PID)
        end
      end
      uv.fs_close(fd)
      assert.is_true(written > 0)
      local said = assert_status(77, kill("u1", "--signal", "KILL"))
      assert.matches(("process %d cannot be seen to use"):format(victim.pid), said.err, 1, true)
      assert.is_true(victim:call "return true")
      assert.is_false(is_lost "h")
    end)
  end
end)
