--- `hierlock leases` and `hierlock revoke`, as an operator runs them, on every store that has leases. They list
-- leases safely, whatever texts the holders wrote; they end the named leases, and no others.
-- Parts: stores

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

local LONG = 251 -- s, of a lease that is not waited for
local PID = ("%d"):format(uv.os_getpid())
local QUESTION = "[y/N] "
-- Texts that a holder may write: a terminal's commands, lines, a turned direction, no UTF-8, too much of it.
local HOSTILE = {
  "\27[31mred\27]0;mine\7", "one\ntwo\r\nthree\8\8", "\194\15531m", "\226\128\174gnp.exe", "\255\254\192\175", "a  b ", "$(id);`id`",
  "\226\128\168", "\243\160\128\129x", ("\27[2J"):rep(262144),
}

after_each(program.close)

-- What the command makes of a text is the same on every store, so that most texts and widths are for the embedded one.
local EACH_OF_THEM = { "-a/b, 100%\27[31m\n\255\254日本%2F '\"$(id)" }

local function lines_of(text)
  local list = {}
  for line in text:gmatch "([^\n]*)\n" do list[#list + 1] = line end
  return list
end

-- The columns of a line: two spaces or more separate them.
local function split(line)
  local cells = {}
  for cell in (line .. "  "):gmatch "(.-)  +" do cells[#cells + 1] = cell end
  return cells
end

describe("the command line of leases and revoke", function()
  it("is refused with 64 and a line when it is wrong, before anything is connected to", function()
    for _, arguments in ipairs {
      { "leases", "" }, { "leases", "u1//r1" }, { "leases", "/u1" }, { "leases", "u1/" }, { "leases", "u%zz" }, { "leases", "u%4" },
      { "leases", "u1", "u2" }, { "leases", "--owner", "" }, { "leases", "--owner", ("x"):rep(128) }, { "leases", "--ownr", "x" },
      { "leases", "--levels", "a,,b" }, { "revoke", "--yes" }, { "revoke", "u1", "--owner", "x", "--yes" },
      { "revoke", "--id", "12", "--yes" }, { "revoke", "--id", ("g"):rep(32), "--yes" }, { "revoke", "u1", "--yes", "--by", "" },
      { "revoke", "u1", "--yes", "--by", ("x"):rep(64) }, { "revoke", "u1", "--yes", "--reason", ("x"):rep(128) },
      { "revoke", "u1" },
    } do
      local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
  end)

  it("may contain no password, which `ps` would show", function()
    for _, name in ipairs { "leases", "revoke" } do
      local said = assert_status(64, run(nil, name, "u1", "--dsn", "mysql://u:sEcReT@127.0.0.1:1/d", name == "revoke" and "--yes" or nil))
      assert.matches("--ask-password", said.err, 1, true)
      assert.is_nil((said.out .. said.err):find("sEcReT", 1, true))
    end
  end)

  it("says in a line that a store has no leases, or is not there", function()
    for status, dsn in pairs { [78] = "null:", [69] = "mysql://u@127.0.0.1:1/d" } do
      for _, arguments in ipairs { { "leases" }, { "leases", "--json" }, { "revoke", "u1", "--yes" } } do
        local said = assert_status(status, run(dsn, unpack(arguments)))
        assert.matches("^hierlock: %C+\n$", said.err)
        assert.equal("", said.out)
      end
    end
  end)
end)

support.each_store(function(plain)
  local store = support.leased(plain)
  local manager

  setup(function() store.prepare() end)

  before_each(function() manager = support.open(store, { application = "the shop" }) end)

  after_each(function()
    support.close_peers()
    for _, lease in ipairs(assert(manager:leases { over = true })) do manager:revoke { id = lease.id } end
    manager:close()
    manager = nil
  end)

  local function hold(target, options)
    local all = { ttl = LONG, timeout = 0, auto_release = false }
    for k, v in pairs(options or {}) do all[k] = v end
    return assert(manager:acquire(target, all))
  end

  local function leases(...) return run(store.dsn, "leases", ...) end
  local function revoke(...) return run(store.dsn, "revoke", "--yes", ...) end

  local function decoded(...)
    local said = assert_status(0, leases("--json", ...))
    local found, _, err = json.decode(said.out)
    assert.is_nil(err)
    return found
  end

  local function targets(...)
    local list = {}
    for i, lease in ipairs(decoded(...)) do list[i] = lease.target end
    return list
  end

  describe("hierlock leases", function()
    it("lists what there is to know, sorted by target, in columns of ASCII, without a header", function()
      hold({ "u1", "a1", "r2" }, { owner = "anna", label = "editing an article" })
      hold({ "u1-", "a1" }, { owner = "bob" })
      hold({ "u1", "a1", "r1" }, { owner = "ü", mode = "shared", ttl = 90000 })
      local said = assert_status(0, leases())
      assert.equal("", said.err)
      assert.is_nil(said.out:find "[^ -~\n]")
      local lines, host = lines_of(said.out), uv.os_gethostname()
      assert.equal(3, #lines)
      local first, second, third = split(lines[1]), split(lines[2]), split(lines[3])
      assert.same({ "u1/a1/r1", "shared", "\\xc3\\xbc", "-", "the shop", host, PID }, { unpack(first, 1, 7) })
      assert.same({ "u1/a1/r2", "exclusive", "anna", "editing an article" }, { unpack(second, 1, 4) })
      assert.same({ "u1-/a1", "exclusive", "bob", "-" }, { unpack(third, 1, 4) })
      assert.matches("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%dZ$", first[8])
      assert.equal("1 d 0 h", first[9])
      assert.matches("^4 min 1?%d s$", second[9])
      assert.matches("^%x+$", first[10])
      assert.equal(32, #first[10])
      for _, line in ipairs(lines) do
        assert.equal(lines[1]:find("the shop", 1, true), line:find("the shop", 1, true))
        assert.equal(#lines[1] - 31, line:find "%x+$")
      end
    end)

    it("lists the same as JSON, with times in seconds", function()
      hold({ "u1", "a1", "r1" }, { owner = "müller", label = 'a "label"\\', mode = "shared" })
      hold({ "u2" })
      local wanted = assert(manager:leases { owner = "müller" })[1]
      local found = decoded()
      assert.equal(2, #found)
      local lease = found[1]
      assert.is_true(lease.remaining <= LONG and lease.remaining > LONG - support.DEADLINE)
      assert.equal(wanted.since, lease.since)
      lease.remaining, lease.since = nil, nil
      assert.same({ target = "u1/a1/r1", mode = "shared", owner = "müller", label = 'a "label"\\', application = "the shop",
                    host = wanted.host, pid = uv.os_getpid(), id = wanted.id }, lease)
      assert.is_nil(found[2].label)
      assert.same({}, decoded("u3"))
    end)

    it("lists those that keep others from the target: above it, on it and below it; and those of an owner", function()
      hold({ "u1", "a1", "r1" }, { owner = "anna" })
      hold({ "u1", "a2" }, { owner = "bob" })
      hold({ "u2" }, { owner = "anna" })
      assert.same({ "u1/a1/r1", "u1/a2" }, targets("u1"))
      assert.same({ "u1/a1/r1" }, targets("u1/a1"))
      assert.same({ "u1/a2" }, targets("u1/a2/r7"))
      assert.same({ "u2" }, targets("u2/a/b"))
      assert.same({ "u1/a1/r1", "u2" }, targets("--owner", "anna"))
      assert.same({ "u1/a1/r1" }, targets("u1", "--owner", "anna"))
      assert.same({}, targets("--owner", "ann"))
      assert.matches("none of 1 to 3", assert_status(64, leases "a/b/c/d").err)
    end)

    it("writes each target so that it can be asked for", function()
      for _, id in ipairs(store.name == "embedded" and
        { "a/b", "100%", "a b", "\27[31m\n", "\255\254", "日本", "a, b", "%2F", "-x", "'\"$(id)" } or EACH_OF_THEM) do
        hold { "u1", id, "r1" }
        local target = targets("u1")[1]
        assert.same({ target }, targets("--", target))
        assert.is_nil(target:find "%c")
        hold { "u1", id .. "/r1", "r1" }
        assert_status(0, revoke("--", target))
        assert.equal(1, #targets("u1"))
        assert_status(0, revoke "u1")
      end
    end)

    if store.unbucketed then
      it("takes the levels that it is told, where the store records none", function()
        local other = support.open(store, { levels = { "shop", "article" } })
        assert(other:acquire({ "s1", "a1" }, { ttl = LONG, timeout = 0, auto_release = false }))
        other:close()
        assert.same({}, targets("s1/a1"))
        assert.same({ "s1/a1" }, targets("s1/a1", "--levels", "shop,article"))
        assert_status(1, revoke "s1")
        assert_status(0, revoke("s1", "--levels", "shop,article"))
      end)
    end

    it("prints nothing where there are none, and on a terminal a word", function()
      local said = assert_status(0, leases())
      assert.equal("", said.out .. said.err)
      local terminal = program.on_terminal(store.dsn, 80, "leases")
      assert.equal("no leases\r\n", assert_status(0, terminal.join()).out)
    end)

    it("writes nothing that a terminal would obey, whatever holders have written", function()
      for i, text in ipairs(HOSTILE) do
        hold({ "u" .. i, text:sub(1, 1024) }, { owner = text:sub(1, 127), label = text })
      end
      local said = assert_status(0, leases())
      assert.equal(#HOSTILE, #lines_of(said.out))
      assert.is_nil(said.out:find "[^ -~\n]")
      for _, line in ipairs(lines_of(said.out)) do assert.equal(10, #split(line)) end
      assert.equal(#HOSTILE, #decoded())
      for _, arguments in ipairs { { "leases" }, { "leases", "--json" }, { "revoke", "--yes", "--owner", HOSTILE[1] } } do
        local out = assert_status(0, program.on_terminal(store.dsn, 80, unpack(arguments)).join()).out
        assert.is_nil((out:gsub("\r\n", ""):match ".?.?.?.?[%c\127].?.?.?.?"))
        for _, text in ipairs { "\194\155", "\226\128\174", "\226\128\168", "\255" } do assert.is_nil(out:find(text, 1, true)) end
      end
    end)

    it("is a table on a terminal, aligned also where characters are wide", function()
      hold({ "u1" }, { owner = "anna", label = "日本語" })
      hold({ "u2" }, { owner = "e\204\129", label = "plain" })
      local lines = lines_of((assert_status(0, program.on_terminal(store.dsn, 80, "leases").join()).out:gsub("\r", "")))
      local at = lines[1]:find "REMAINING"
      assert.matches("^TARGET  MODE       OWNER  LABEL   REMAINING$", lines[1])
      assert.equal(at + #"日本語" - 6, lines[2]:find "4 min")
      for n = 3, #lines do
        local found = lines[n]:find "4 min"
        if found then assert.equal(at + #"\204\129", found) else assert.matches("^    %w", lines[n]) end
      end
      -- All of it in one line, where there is room.
      lines = lines_of((assert_status(0, program.on_terminal(store.dsn, 200, "leases").join()).out:gsub("\r", "")))
      assert.equal(3, #lines)
      assert.matches("^TARGET +MODE +OWNER +LABEL +APPLICATION +HOST +PID +SINCE +REMAINING +ID$", lines[1])
    end)

    it("fits a terminal of any width, and says all of it", function()
      hold({ "u1", "an account", "r1" }, { owner = "somebody else", label = "what they do with it" })
      for _, width in ipairs(store.name == "embedded" and { 120, 80, 60, 50, 42 } or { 60 }) do
        local out = assert_status(0, program.on_terminal(store.dsn, width, "leases").join()).out:gsub("\r", "")
        for _, line in ipairs(lines_of(out)) do assert.is_true(#line <= width, out) end
        for _, text in ipairs { "u1/an account/r1", "exclusive", "somebody else", "what they do with it", "the shop",
                                PID, "4 min", decoded()[1].id } do
          assert.matches(text, out, 1, true)
        end
      end
    end)

    it("lists a thousand in less than a second", function()
      -- Shared, as two may be in one bucket.
      for i = 1, 1000 do hold({ "u", "a", "r" .. i }, { owner = "o" .. i % 7, mode = "shared" }) end
      local best = math.huge
      for _ = 1, 10 do -- the machine may be busy
        local began = support.now()
        local said = assert_status(0, leases())
        best = math.min(best, support.now() - began)
        assert.equal(1000, #lines_of(said.out))
        if best < 1 then break end
      end
      assert.is_true(best < 1, ("it took %.2f s"):format(best))
      assert.equal(143, #targets("--owner", "o1"))
    end)

    it("lists the lease of a process that was killed, and none that is over", function()
      local peer = support.process(store, { application = "the victim" })
      assert(peer:call [[ handles.long = assert(manager:acquire({ "u1" }, { ttl = 250, owner = "dead" })) return true ]])
      assert(peer:call [[ handles.short = assert(manager:acquire({ "u2" }, { ttl = 0.2, owner = "dead" })) return true ]])
      local pid = peer.pid
      peer:signal "sigkill"
      support.wait_until(function() return #targets("--owner", "dead") == 1 end)
      local found = decoded()[1]
      assert.same({ "u1", "dead", "the victim", pid }, { found.target, found.owner, found.application, found.pid })
      assert_status(0, revoke "u1")
      assert.same({}, targets())
    end)

    it("says so when what it writes cannot be written", function()
      hold { "u1" }
      local function into(where, arguments)
        local pipe = assert(io.popen(("{ HIERLOCK_DSN='%s' %s lua/hierlock/command/main.lua %s %s; } 2>&1"):format(
          store.dsn, program.interpreter, arguments, where)))
        local said = pipe:read "*a"
        pipe:close()
        return said
      end
      for _, arguments in ipairs { "leases", "leases --json", "revoke --yes u1" } do
        assert.matches("^hierlock: cannot write: [^\n]*\n=74\n$", into('>/dev/full; echo "=$?"', arguments))
        -- A reader that reads no further has had enough.
        assert.equal("", into("| :", (arguments:gsub("u1", "u2"))))
      end
      assert.same({ "u1" }, targets())
    end)
  end)

  describe("hierlock revoke", function()
    it("ends what keeps others from the target, says whose, and tells the holders why", function()
      local below = hold({ "u1", "a1", "r1" }, { owner = "anna" })
      local beside = hold({ "u1", "a2" }, { owner = "bob" })
      local said = assert_status(0, revoke("u1/a1", "--by", "the admin", "--reason", "closing time"))
      local lines = lines_of(said.out)
      assert.matches("^u1/a1/r1  exclusive  anna", lines[1])
      assert.equal("1 lease ended, of anna", lines[2])
      local ok, err = below:check()
      assert.is_nil(ok)
      assert.same({ "lost", "the admin", "closing time" }, { err.code, err.revoked_by, err.reason })
      assert.is_true(beside:check())
      assert.same({ "u1/a2" }, targets())
      -- Above it.
      assert_status(0, revoke "u1/a2/r1")
      assert.same({}, targets())
    end)

    it("ends those of an owner, and one by its id", function()
      for i = 1, 3 do hold({ "u" .. i }, { owner = "anna" }) end
      hold({ "u4" }, { owner = "bob" })
      local id = decoded("u2")[1].id
      assert_status(0, revoke("--id", id:upper()))
      assert.same({ "u1", "u3", "u4" }, targets())
      assert.matches("\n2 leases ended, of anna\n$", assert_status(0, revoke("--owner", "anna")).out)
      assert.same({ "u4" }, targets())
    end)

    it("ends those whose time is up, which a refresh would have back", function()
      local handle = hold({ "u1" }, { owner = "anna", ttl = 0.05 })
      support.wait_until(function() return #assert(manager:leases()) == 0 end, "its end")
      local said = assert_status(0, revoke("--owner", "anna", "--by", "personnel"))
      assert.matches("^u1  exclusive  anna  .*  0%.0 s  %x+\n1 lease ended, of anna\n$", said.out)
      local _, err = handle:refresh()
      assert.same({ "lost", "personnel" }, { err.code, err.revoked_by })
    end)

    it("names several owners by how much they had", function()
      for i = 1, 9 do hold({ "u", "a" .. i }, { owner = "o" .. math.ceil(i * i / 12) }) end
      assert.matches("\n9 leases ended, 3 of o1, 2 of o3, 1 of o2, 1 of o5, 1 of o6, 1 of others\n$", assert_status(0, revoke "u").out)
    end)

    it("exits with 1 when there was none to end, and ends nothing else", function()
      hold({ "u1" }, { owner = "anna" })
      for _, arguments in ipairs { { "u2" }, { "--owner", "bob" }, { "--id", ("0"):rep(32) } } do
        local said = assert_status(1, revoke(unpack(arguments)))
        assert.equal("no lease ended: there was none\n", said.out)
        assert.equal("", said.err)
      end
      assert.same({ "u1" }, targets())
    end)

    it("is done in the name of who has logged in, unless another one is said", function()
      local pipe = io.popen "logname 2>/dev/null || id -un"
      local name = pipe:read "*l"
      pipe:close()
      local handle = hold { "u1" }
      assert_status(0, revoke "u1")
      local _, err = handle:check()
      assert.equal(name, err.revoked_by)
      assert.is_nil(err.reason)
    end)

    it("takes any text for a reason, and hands none on that a terminal would obey", function()
      local handle = hold { "u1" }
      assert_status(0, revoke("u1", "--by", "\27[31mme\n", "--reason", "\255\254\27]0;x\7\n"))
      local _, err = handle:check()
      assert.equal("lost", err.code)
      assert.is_nil(tostring(err):find "%c")
    end)

    if store.server then -- where it takes a while
      it("stops after Ctrl-C between two of them, and says how many were ended", function()
        for i = 1, 300 do hold({ "u", "a", "r" .. i }, { owner = "anna", mode = "shared" }) end
        local command = program.start(store.dsn, "revoke", "--yes", "u")
        command.until_true(function() return command.out:find "\n" end, "the list")
        uv.kill(command.pid, "sigstop")
        local then_left = #targets()
        uv.kill(command.pid, "sigint")
        uv.kill(command.pid, "sigcont")
        local said = assert_status(130, command.join())
        local ended, left = said.out:match "\n(%d+) leases? ended, of anna, and (%d+) not\n$"
        if not ended then ended, left = said.out:match "\n(n)o lease ended\n$" and 0, 300 end
        assert.equal(300, ended + left)
        assert.equal(tonumber(left), #targets())
        -- The server may have had one more request when the command stood still.
        assert.is_true(then_left - left <= 2, ("%d were left at Ctrl-C, and %s at the end"):format(then_left, left))
        assert.equal("", said.err)
      end)
    end

    describe("on a terminal", function()
      local function asked(...)
        local terminal = program.on_terminal(store.dsn, 100, "revoke", ...)
        terminal.shows(QUESTION)
        return terminal
      end

      it("lists, asks, and ends what was listed", function()
        hold({ "u1" }, { owner = "anna" })
        for _, yes in ipairs { "y\n", "YES\n", " y \n" } do
          hold({ "u2" }, { owner = "bob" })
          local terminal = asked "u2"
          assert.matches("^TARGET.-\r\nu2 .-bob.-\r\nEnd this lease%? ", terminal.out)
          assert.same({ "u1", "u2" }, targets())
          terminal.type(yes)
          assert.matches("\r\n1 lease ended, of bob\r\n$", assert_status(0, terminal.join()).out)
          assert.same({ "u1" }, targets())
        end
      end)

      it("ends nothing unless the answer is yes", function()
        hold { "u1" }
        hold { "u2" }
        for _, no in ipairs { "n\n", "\n", "yy\n", "no\ny\n", "\ny\n", "ye\n", "\4" } do
          local terminal = program.on_terminal(store.dsn, 100, "revoke", "--owner", "the shop")
          terminal.shows("End these 2 leases? " .. QUESTION)
          terminal.type(no)
          assert.matches("\r\nno lease ended\r\n$", assert_status(1, terminal.join()).out)
        end
        assert.equal(2, #targets())
      end)

      it("ends nothing after Ctrl-C", function()
        hold { "u1" }
        local terminal = asked "u1"
        terminal.type "\3"
        assert_status(130, terminal.join())
        assert.same({ "u1" }, targets())
      end)

      it("ends what was listed and nobody else, and says who had gone by then", function()
        local gone = hold({ "u1", "a1" }, { owner = "anna" })
        hold({ "u1", "a2" }, { owner = "bob" })
        local terminal = asked "u1"
        assert(gone:release { confirm = true })
        hold({ "u1", "a1" }, { owner = "carl" })
        hold({ "u1", "a3" }, { owner = "bob" })
        terminal.type "y\n"
        local out = assert_status(0, terminal.join()).out
        assert.matches("\r\n1 lease had ended by then, of anna:\r\nTARGET.-\r\nu1/a1 .-anna.-\r\n1 lease ended, of bob\r\n$", out)
        assert.same({ "u1/a1", "u1/a3" }, targets())
        assert.equal("carl", decoded()[1].owner)
      end)

      it("exits with 1 when all had gone by then", function()
        local gone = hold { "u1" }
        local terminal = asked "u1"
        assert(gone:release { confirm = true })
        terminal.type "y\n"
        assert.matches("no lease ended\r\n$", assert_status(1, terminal.join()).out)
      end)

      it("does not ask with --yes, and does not end anything where nobody could answer", function()
        hold { "u1" }
        assert.matches("--yes", assert_status(64, run(store.dsn, "revoke", "u1")).err, 1, true)
        assert.same({ "u1" }, targets())
        local terminal = program.on_terminal(store.dsn, 100, "revoke", "u1", "-y")
        assert.is_nil(assert_status(0, terminal.join()).out:find(QUESTION, 1, true))
        assert.same({}, targets())
      end)

      it("says so when the store has gone by then", function()
        if not store.control then return end -- of no server, or of one that is not ours to stop
        hold { "u1" }
        local terminal = asked "u1"
        store.command "stop"
        finally(function() store.command "start" end)
        terminal.type "y\n"
        local out = assert_status(69, terminal.join()).out
        assert.matches("\r\nno lease ended\r\nhierlock: [^\r\n]*\r\n$", out)
      end)

      if store.server then
        it("asks for the password, and shows it to nobody", function()
          hold { "u1" }
          local password = store.dsn:match "//[^:]+:([^@]+)@"
          local terminal = program.on_terminal(nil, 100, "leases", "-p", "--dsn", (store.dsn:gsub(":[^:@/]+@", "@")))
          terminal.shows "Password: "
          terminal.type(password .. "\n")
          local out = assert_status(0, terminal.join()).out
          assert.matches("\r\nu1 ", out)
          assert.is_nil(out:find(password, 1, true))
        end)
      end
    end)
  end)
end)

support.each_server(function(store)
  it("says that a space has no leases, and how it gets them", function()
    for _, arguments in ipairs { { "leases" }, { "revoke", "u1", "--yes" } } do
      local said = assert_status(78, run(store.dsn, unpack(arguments)))
      assert.matches("hierlock provision --leases", said.err, 1, true)
    end
  end)
end)
