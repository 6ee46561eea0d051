--- `hierlock ps`, as an operator runs it, on every store: holders, waiters and their blockers, session locks and
-- leases, whatever texts they wrote. How soon, and at whose cost: bench/ps_cost_spec.lua.
-- Parts: stores

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

local HOST, PID = uv.os_gethostname(), uv.os_getpid()
local COLUMNS = 14
-- What the command makes of a text is the same on every store, so that most texts and widths are for the embedded one.
local EACH_OF_THEM = { "a/b, 100%\27[31m\n日本, ..." }
local HOSTILE = {
  "\27[31mred\27]0;mine\7", "one\ntwo\r\nthree\8\8", "\194\15531m", "\226\128\174gnp.exe", "\255\254\192\175", "a  b ", "$(id);`id`",
  "bucket (1, 2)", "advisory lock 1 of the server's process 2", "a, b", "...", ("\27[2J"):rep(262144),
}

after_each(program.close)

local function lines_of(text)
  local list = {}
  for line in text:gmatch "([^\n]*)\n" do list[#list + 1] = line end
  return list
end

local function split(line)
  local cells = {}
  for cell in (line .. "  "):gmatch "(.-)  +" do cells[#cells + 1] = cell end
  return cells
end

describe("the command line of ps", function()
  it("is refused with 64 and a line when it is wrong, before anything is connected to", function()
    for _, arguments in ipairs { { "" }, { "u1//r1" }, { "u%zz" }, { "u1", "u2" }, { "--jsn" }, { "--levels", "a,,b" } } do
      local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "ps", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
  end)

  it("may contain no password, which `ps` would show", function()
    local said = assert_status(64, run(nil, "ps", "--dsn", "mysql://u:sEcReT@127.0.0.1:1/d"))
    assert.matches("--ask-password", said.err, 1, true)
    assert.is_nil((said.out .. said.err):find("sEcReT", 1, true))
  end)

  it("says in a line that a store is not there; on null: nobody holds anything", function()
    assert.matches("^hierlock: %C+\n$", assert_status(69, run("mysql://u@127.0.0.1:1/d", "ps")).err)
    local said = assert_status(0, run("null:", "ps"))
    assert.equal("", said.out .. said.err)
    assert.equal("[]\n", assert_status(0, run("null:", "ps", "--json")).out)
  end)
end)

support.each_leasing_store(function(store)
  local manager, peer
  local named = store.lists_by_root -- it lists what a target names

  before_each(function()
    manager = support.open(store, { application = "the shop" })
    peer = support.process(store, { application = "the till" })
  end)

  after_each(function()
    manager:close() -- first: a peer that waits for it ends when it has been granted
    manager = nil
    support.close_peers()
    if not store.leases_only then return end
    -- A killed holder is listed there until its time is up.
    local observer = support.open(store)
    local ended, why = pcall(support.wait_until, function() return #assert(observer:holders { "u1" }) == 0 end, "the end of who was killed", 60)
    observer:close()
    assert(ended, why)
  end)

  local function decoded(...)
    -- MariaDB shows an old picture to those who look more often.
    if store.dialect == "mariadb" then support.sleep(0.11) end
    local said = assert_status(0, run(store.dsn, "ps", "--json", ...))
    local found, _, err = json.decode(said.out)
    assert.is_nil(err)
    return found
  end

  -- Lists all holders; where a target has to be named, the holders of the specs' target.
  local function all() return decoded(named and "u1" or nil) end

  local function hold(target, options) return assert(manager:acquire(target, options)) end

  local function wait(target, options)
    peer:acquire("waits", "acquire", target, options)
    support.wait_for_waiters(store, target)
  end

  -- The only one of that target and state.
  local function entry(list, target, waiting)
    local found
    for _, one in ipairs(list) do
      if one.target == target and one.waiting == waiting then
        assert.is_nil(found)
        found = one
      end
    end
    return assert(found, target .. " is not listed")
  end

  it("lists who holds and who waits, sorted by target, and for whom", function()
    local handle = hold({ "u1", "a1", "r1" }, { label = "a sale" })
    wait({ "u1", "a1" }, { label = "closing" })
    local said = assert_status(0, run(store.dsn, "ps", unpack(named and { "u1" } or {})))
    assert.equal("", said.err)
    assert.is_nil(said.out:find "[^ -~\n]")
    local lines = lines_of(said.out)
    assert.equal(2, #lines)
    local waiter, holder = split(lines[1]), split(lines[2])
    assert.equal(COLUMNS, #waiter)
    assert.equal(COLUMNS, #holder)
    assert.same({ "u1/a1", "waits", "exclusive", "-" }, { unpack(waiter, 1, 4) })
    assert.same({ "the till", HOST, ("%d"):format(peer.pid), "closing" }, { unpack(waiter, 6, 9) })
    assert.equal(("the shop %d@%s"):format(PID, HOST), waiter[12])
    assert.same({ "u1/a1/r1", "holds", "exclusive", handle.kind }, { unpack(holder, 1, 4) })
    assert.same({ "the shop", HOST, ("%d"):format(PID), "a sale" }, { unpack(holder, 6, 9) })
    assert.matches("^%d%d%d%d%-%d%d%-%d%dT%d%d:%d%d:%d%dZ$", holder[10])
    assert.equal("-", holder[12])
    if handle.kind == "lease" then
      assert.equal("the shop", holder[5])
      assert.matches("^%d+ s$", holder[11])
      assert.equal(32, #holder[14])
    end
  end)

  it("lists the same as JSON, with times in seconds", function()
    local handle = hold({ "u1", "a1", "r1" }, { label = 'a "label"\\ü', mode = "shared" })
    wait({ "u1", "a1", "r1" }, { label = "w" })
    local found = all()
    assert.equal(2, #found)
    local holder, waiter = entry(found, "u1/a1/r1", false), entry(found, "u1/a1/r1", true)
    assert.equal(holder, found[1])
    assert.is_true(math.abs(holder.since - os.time()) < support.DEADLINE)
    assert.same({ "shared", handle.kind, "the shop", HOST, PID, 'a "label"\\ü' },
      { holder.mode, holder.kind, holder.application, holder.host, holder.pid, holder.label })
    assert.same({ "exclusive", "the till", HOST, peer.pid, "w" },
      { waiter.mode, waiter.application, waiter.host, waiter.pid, waiter.label })
    for _, name in ipairs { "kind", "remaining", "id" } do assert.is_nil(waiter[name]) end
    assert.is_nil(holder.waits_for)
    assert.equal(1, waiter.waits_for_count)
    assert.equal(1, #waiter.waits_for)
    for _, name in ipairs { "target", "kind", "owner", "application", "host", "pid", "session", "id" } do
      assert.equal(holder[name], waiter.waits_for[1][name])
    end
    if store.server and not store.leases_only then
      assert.truthy(tonumber(holder.session))
      assert.truthy(tonumber(waiter.session))
    end
  end)

  it("lists what keeps others from the target: above it, on it and below it", function()
    local one, two = hold { "u1", "a1", "r1" }, hold { "u1", "a2" }
    local three = hold { "u2" }
    local function targets(...)
      local list = {}
      for i, found in ipairs(decoded(...)) do list[i] = found.target end
      return list
    end
    support.wait_until(function() return #targets "u1" == 2 and #targets "u2" == 1 end, "all that is held")
    assert.same({ "u1/a1/r1", "u1/a2" }, targets "u1")
    assert.same({ "u1/a1/r1" }, targets "u1/a1")
    assert.same({ "u1/a2" }, targets "u1/a2/r7")
    assert.same({ "u2" }, targets "u2/a/b")
    assert.same({}, targets "u3")
    if named then
      assert.matches("name a target", assert_status(78, run(store.dsn, "ps")).err, 1, true)
    else
      assert.same({ "u1/a1/r1", "u1/a2", "u2" }, targets())
    end
    assert.matches("none of 1 to 3", assert_status(64, run(store.dsn, "ps", "a/b/c/d")).err)
    for _, handle in ipairs { one, two, three } do assert(handle:release { confirm = true }) end
    support.wait_until(function() return #targets "u1" == 0 end, "an empty list")
  end)

  it("names for a waiter of several targets each who is in its way, and counts them", function()
    for i = 1, 12 do support.keep(hold { "u1", "a" .. i }) end
    peer:acquire("waits", "acquire_all", { { "u1" }, { "u2" } })
    support.wait_for_waiters(store, { "u1" })
    local waiter = entry(decoded("u1"), "u1, u2", true)
    assert.equal(12, waiter.waits_for_count)
    assert.equal(10, #waiter.waits_for)
    assert.equal(12, entry(all(), "u1, u2", true).waits_for_count)
  end)

  it("lists each target of several so that it can be asked for", function()
    for _, id in ipairs(store.name == "embedded" and { "a/b", "100%", "a, b", "\27[31m\n", "日本", ", ", "..." } or EACH_OF_THEM) do
      local handle = assert(manager:acquire_all { { "u1", id, "r1" }, { "u1", id, "r2" } })
      support.wait_until(function() return #all() == 1 end, "what is held")
      local target = all()[1].target
      local first, second = target:match "^(.-), (.*)$"
      assert.same({ target }, { decoded("--", first)[1].target })
      assert.same({ target }, { decoded("--", second)[1].target })
      assert(handle:release { confirm = true })
    end
  end)

  it("writes nothing that a terminal would obey, whatever holders have written", function()
    for i, text in ipairs(HOSTILE) do support.keep(hold({ "u1", "a" .. i, text:sub(1, 1024) }, { label = text })) end
    peer:acquire("waits", "acquire", { "u1" }, { label = HOSTILE[1] })
    support.wait_for_waiters(store, { "u1" })
    local said = assert_status(0, run(store.dsn, "ps", "u1"))
    assert.equal(#HOSTILE + 1, #lines_of(said.out))
    assert.is_nil(said.out:find "[^ -~\n]")
    for _, line in ipairs(lines_of(said.out)) do assert.equal(COLUMNS, #split(line)) end
    assert.equal(#HOSTILE + 1, #decoded "u1")
    for _, arguments in ipairs { { "u1" }, store.name == "embedded" and { "u1", "--json" } or nil } do
      local out = assert_status(0, program.on_terminal(store.dsn, 80, "ps", unpack(arguments)).join()).out
      assert.is_nil((out:gsub("\r\n", ""):match ".?.?.?.?[%c\127].?.?.?.?"))
      for _, text in ipairs { "\194\155", "\226\128\174", "\255" } do assert.is_nil(out:find(text, 1, true)) end
    end
  end)

  it("is a table on a terminal, of any width, and says all of it", function()
    local handle = hold({ "u1", "an account", "r1" }, { label = "what they do with it" })
    wait({ "u1", "an account" }, { label = "and they" })
    for _, width in ipairs(store.name == "embedded" and { 220, 120, 80, 60, 42 } or { 80 }) do
      local out = assert_status(0, program.on_terminal(store.dsn, width, "ps", "u1").join()).out:gsub("\r", "")
      assert.matches("^TARGET", out)
      for _, line in ipairs(lines_of(out)) do assert.is_true(#line <= math.max(width, 60), out) end
      for _, text in ipairs { "u1/an account/r1", "exclusive", "what they do with it", "the shop", "the till", handle.kind,
                              ("%d"):format(PID), ("the shop %d@%s"):format(PID, HOST) } do
        assert.matches(text, out, 1, true)
      end
    end
  end)

  it("prints nothing where nobody holds anything, and on a terminal a word", function()
    -- On Memcached a waiter whose process was killed is listed until its time is up.
    local said = assert_status(0, run(store.dsn, "ps", "nobody's"))
    assert.equal("", said.out .. said.err)
    local terminal = program.on_terminal(store.dsn, 80, "ps", "nobody's")
    assert.equal("nobody holds or waits\r\n", assert_status(0, terminal.join()).out)
  end)
end)

support.each_leasing_store(function(store)
  if store.lists_by_root then return end -- there all holders of a root are in one document

  local manager

  after_each(function()
    support.close_peers()
    if manager then
      -- A crowd that ends on a busy machine leaves leases to their end.
      if store.leases_only then assert(manager:revoke { owner = "crowd" }) end
      manager:close()
    end
    manager = nil
  end)

  it("lists a thousand holders in less than a second, or fewer in less", function()
    -- Each session is a connection, and expensive for a server: so there are fewer of them. A look that grows with
    -- the square of their number may then take as much less.
    local holders = store.server and not store.leases_only and 200 or 1000
    local limit = (holders / 1000) ^ 2
    manager = support.open(store)
    local crowd, held = support.process(store, { pool_size = 1000, hold_timeout = 600 }), 0
    while held < holders do -- in steps, as a peer has to answer in time
      held = crowd:call([[
        local first, last, ttl = ...
        for i = first, last do handles[i] = assert(manager:acquire({ "crowd" .. i, "a", "r" }, { mode = "shared", ttl = ttl, owner = ttl and "crowd" })) end
        return last
      ]], held + 1, held + 50, store.leases_only and 600 or nil)
    end
    support.wait_until(function() -- MariaDB shows an old picture
      return select(2, assert_status(0, run(store.dsn, "ps")).out:gsub("\n", "")) == holders
    end, "all of them in the list", 60)
    local observer = support.process(store)
    support.wait_until(function() -- the machine may be busy
      support.sleep(0.15)
      local n, took = observer:call [[
        local begun = support.now()
        local holders = assert(manager:holders())
        return #holders, support.now() - begun
      ]]
      return n == holders and took < limit
    end, "a fast look", 60)
  end)

  it("names a hundred at most to who waited in vain", function()
    manager = support.open(store)
    local crowd = support.process(store, { pool_size = 128, hold_timeout = 600 })
    crowd:call([[
      for i = 1, 110 do handles[i] = assert(manager:acquire({ "crowd", "a" .. i }, { mode = "shared", ttl = ..., owner = ... and "crowd" })) end
    ]], store.leases_only and 600 or nil)
    local err
    support.wait_until(function() -- the machine may be too busy to look
      support.sleep(0.11) -- MariaDB shows an old picture to those who look more often
      err = select(2, manager:acquire({ "crowd" }, { timeout = 0 }))
      return err.holders
    end, "the holders")
    assert.is_true(#err.holders <= 100, #err.holders .. " are named")
    assert.is_false(err.holders[1].waiting)
  end)
end)
