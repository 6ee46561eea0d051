--- `hierlock top`, as an operator runs it: in a real terminal, tmux's, and elsewhere; on every store.

local uv = require "luv"
local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

local SOCKET = ("hierlock-spec-%d"):format(uv.os_getpid())
local KEYS = "q quit"

-- ------------------------------------------------------------------ a terminal

local function quoted(word) return "'" .. word:gsub("'", [['\'']]) .. "'" end

local function tmux(...)
  local words = { "tmux", "-L", SOCKET, "-f", "/dev/null" }
  for i = 1, select("#", ...) do words[#words + 1] = quoted((select(i, ...))) end
  local pipe = io.popen(table.concat(words, " ") .. " 2>&1")
  local said = pipe:read "*a"
  pipe:close()
  return said
end

local function screen() return tmux("capture-pane", "-p") end

local function shows(text)
  local seen
  local function there()
    seen = screen()
    return seen:find(text, 1, true)
  end
  assert(pcall(support.wait_until, there), ("%s is not on the screen, but:\n%s"):format(text, seen))
end

-- Opens a shell; commands are typed into it.
local function open_terminal(columns, rows)
  local said = tmux("new-session", "-d", "-x", tostring(columns), "-y", tostring(rows),
                    "env PS1='ready> ' TERM=screen LC_ALL=C.UTF-8 bash --norc --noprofile")
  assert.equal("", said)
  shows "ready>"
end

local function types(...) tmux("send-keys", ...) end

local function starts_top(dsn, ...)
  local words = { "HIERLOCK_DSN=" .. quoted(dsn), program.interpreter, "lua/hierlock/command/main.lua", "top" }
  for i = 1, select("#", ...) do words[#words + 1] = quoted((select(i, ...))) end
  types("-l", table.concat(words, " "))
  types "Enter"
  shows(KEYS)
end

-- Checks that top has ended: the shell asks, and the terminal is as it was.
local function ends(status)
  -- The shell throws text away that is typed before it asks.
  support.wait_until(function() return screen():find "ready>%s*$" end, "the shell")
  types("-l", "echo [$?] && stty -a | grep -o '[-]*icanon' && stty -a | grep -o ' [-]*echo '")
  types "Enter"
  shows(("\n[%d]\nicanon\n echo"):format(status))
  assert.is_nil(screen():find(KEYS, 1, true))
  assert.equal("1", tmux("display-message", "-p", "#{cursor_flag}"):match "%d")
  assert.equal("0", tmux("display-message", "-p", "#{alternate_on}"):match "%d")
end

local function close_terminal()
  tmux "kill-server" -- it answers, and ends then
  support.wait_until(function() return tmux "list-sessions":find "^no server running" or tmux "list-sessions":find "^error connecting" end, "no terminal")
end

after_each(function()
  program.close()
  close_terminal()
end)

-- ------------------------------------------------------------------ the command line

describe("the command line of top", function()
  it("is refused with 64 and a line when it is wrong, before anything is connected to", function()
    for _, arguments in ipairs {
      { "" }, { "u1//r1" }, { "u1", "u2" }, { "-d", "0" }, { "-d", "inf" }, { "-d", "x" }, { "-n", "0" }, { "-n", "1.5" }, { "-s", "colour" },
    } do
      local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "top", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
  end)

  it("says in a line that a store is not there, on a terminal too, which it leaves as it was", function()
    assert.matches("^hierlock: %C+\n$", assert_status(69, run("mysql://u@127.0.0.1:1/d", "top")).err)
    open_terminal(100, 20)
    types("-l", "HIERLOCK_DSN=mysql://u@127.0.0.1:1/d " .. program.interpreter .. " lua/hierlock/command/main.lua top")
    types "Enter"
    shows "hierlock: "
    ends(69)
  end)
end)

-- ------------------------------------------------------------------ on a terminal

describe("top on a terminal", function()
  local directory, dsn, manager, handles

  before_each(function()
    directory = assert(uv.fs_mkdtemp "/dev/shm/hierlock-spec-XXXXXX")
    dsn = "file:" .. directory
    manager = assert(require "hierlock".open(dsn, { application = "the shop" }))
    handles = {}
  end)

  after_each(function()
    manager:close()
    manager, handles = nil, nil
    close_terminal() -- a top that still runs would make the directory again
    os.execute("rm -r " .. quoted(directory))
  end)

  local function hold(...) handles[#handles + 1] = assert(manager:acquire(...)) end

  it("shows what changes, sorts by keys, and ends with q", function()
    open_terminal(120, 20)
    hold({ "u2", "a1", "r1" }, { label = "sale" })
    starts_top(dsn, "-d", "0.2")
    shows "u2/a1/r1  exclusive  holds"
    hold { "u1", "a1" }
    shows "2 held, 0 waiting"
    types "h"
    shows "sorted by longest held"
    assert.is_true(screen():find("u2/a1/r1  exclusive", 1, true) < screen():find("u1/a1     exclusive", 1, true))
    types "t"
    shows "sorted by target"
    assert.is_true(screen():find("u1/a1     exclusive", 1, true) < screen():find("u2/a1/r1  exclusive", 1, true))
    local waiter = manager:start { "u1" }
    shows "u1        exclusive  waits"
    assert.matches("u1        exclusive  waits  %S+ s +%- +the shop .*the shop %d+@", screen())
    assert.is_false(waiter:done())
    waiter:cancel()
    for _, handle in ipairs(handles) do handle:release() end
    shows "0 held, 0 waiting"
    types "q"
    ends(0)
  end)

  it("names nodes for which as many wait in the order of their longest waits", function()
    hold { "u1" }
    hold { "u2" }
    local first = manager:start({ "u2", "a1" })
    support.wait_until(function() return #manager:holders { "u2" } == 2 end, "the first who waits")
    support.sleep(0.05) -- another time of request
    local second = manager:start({ "u1", "a1" })
    local nodes
    support.wait_until(function()
      nodes = assert_status(0, run(dsn, "top")).out:match "NODE.-\n(.-)\n\n"
      return select(2, (nodes or ""):gsub(" 1  [%d.]+ s", "")) == 2
    end, "both who wait")
    assert.matches("^u2/a1 +0 +1 .*\nu1/a1 +0 +1 ", nodes)
    first:cancel()
    second:cancel()
  end)

  it("fills the terminal, whatever its size, and no more", function()
    open_terminal(40, 10)
    local written = os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "-written"
    tmux("pipe-pane", "cat >" .. quoted(written))
    for i = 1, 30 do hold { "u" .. i, "\27[2Ja\n", "r" } end
    starts_top(dsn)
    local lines = {}
    for line in screen():gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
    assert.equal(10, #lines)
    assert.matches("^file:", lines[1])
    assert.matches("^q quit", lines[10])
    support.wait_until(function()
      local file, headings = io.open(written), 0
      for heading in (file and file:read "*a" or ""):gmatch "\27%[7m(.-)\27%[0m" do
        assert.equal(40, #heading)
        headings = headings + 1
      end
      if file then file:close() end
      return headings > 0
    end, "a heading")
    tmux "pipe-pane"
    os.remove(written)
    tmux("resize-window", "-x", "100", "-y", "30")
    shows "sorted by longest waits"
    support.wait_until(function() return select(2, screen():gsub("%%1B[[]2Ja%%0A/r", "")) > 15 end, "a full screen: " .. screen())
    types "C-c"
    ends(130)
  end)

  it("gives the terminal back while it is stopped, and at a signal", function()
    open_terminal(100, 20)
    starts_top(dsn)
    types "C-z"
    shows "Stopped"
    assert.is_nil(screen():find(KEYS, 1, true))
    types("-l", "fg")
    types "Enter"
    shows(KEYS)
    local pid = tmux("display-message", "-p", "#{pane_pid}"):match "%d+"
    local child = io.open(("/proc/%s/task/%s/children"):format(pid, pid)):read "*a"
    uv.kill(tonumber(child:match "%d+"), "sigterm")
    support.wait_until(function() return not screen():find(KEYS, 1, true) end, "its end")
    ends(143)
  end)
end)

support.on_redis(function(store)
  it("goes on while the store cannot be asked, and says why", function()
    open_terminal(120, 20)
    starts_top(store.dsn, "-d", "0.2")
    shows "0 held"
    store.command "kill"
    finally(function() store.command "restart" end)
    shows "cannot look: "
    store.command "start"
    support.wait_until(function() return not screen():find("cannot look", 1, true) end, "an answer")
    shows "0 held"
    types "q"
    ends(0)
  end)
end)

-- ------------------------------------------------------------------ elsewhere

support.each_leasing_store(function(store)
  local manager, peer

  before_each(function()
    manager = support.open(store, { application = "the shop" })
    peer = support.process(store, { application = "the till" })
  end)

  after_each(function()
    support.close_peers()
    manager:close()
  end)

  it("prints so many pictures of holders, waiters and rates, in plain ASCII", function()
    local handle = assert(manager:acquire({ "u1", "a1", "r1" }, { label = "a s\195\164le" }))
    peer:acquire("waits", "acquire", { "u1", "a1" }, { label = "closing" })
    support.wait_for_waiters(store, { "u1", "a1" })
    local said = assert_status(0, run(store.dsn, "top", "-n", "2", "-d", "0.1", unpack(store.lists_by_root and { "u1" } or {})))
    assert.equal("", said.err)
    assert.is_nil(said.out:find "[^ -~\n]")
    local first, second = said.out:match "^(.-\n)\n(%C+  %d%d:%d%d:%d%d  each 0.1 s\n.*)$"
    assert.truthy(second, said.out)
    assert.matches("\n1 held, 1 waiting; no rates yet\n", first)
    assert.matches("\n1 held, 1 waiting; seen per second: 0.0 granted, 0.0 began to wait, 0.0 ceased to wait\n", second)
    assert.matches("\nu1/a1 +0 +1 +%d[%d.]* s\n", second)
    assert.matches("\nu1/a1/r1 +1 +0 +%-\n", second)
    assert.matches("\nu1/a1 +exclusive +waits +%C+the till%C+closing +the shop %d+@%C+\n", second)
    assert.matches("\nu1/a1/r1 +exclusive +holds +%C+the shop%C+a s\\xc3\\xa4le +%-\n", second)
    assert(handle:release())
  end)
end)
