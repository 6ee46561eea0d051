--- `hierlock graph`, as an operator runs it, on every store, read by Graphviz.

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

local HOST, PID = uv.os_gethostname(), uv.os_getpid()
local directory = assert(os.getenv "HIERLOCK_SPEC_DIRECTORY")

after_each(program.close)

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local all = file:read "*a"
  file:close()
  return all
end

-- Reads the graph as Graphviz does: {label = {labels of its blockers}}; and the DOT.
local function drawn(dsn, ...)
  local said = assert_status(0, run(dsn, "graph", ...))
  assert.equal("", said.err)
  assert.is_nil(said.out:find "[^ -~\n]")
  local name = directory .. "/graph.dot"
  local file = assert(io.open(name, "w"))
  file:write(said.out)
  file:close()
  local pipe = io.popen(("dot -Tjson0 '%s' 2>&1"):format(name))
  local found = assert(json.decode(pipe:read "*a"))
  pipe:close()
  os.remove(name)
  local graph, labels = {}, {}
  for _, node in ipairs(found.objects or {}) do
    local label = node.label:gsub("\\(.)", function(c) return c == "n" and "\n" or c end):gsub("&#252;", "ü"):gsub("&amp;", "&")
    labels[node._gvid] = label
    assert.is_nil(graph[label])
    graph[label] = {}
  end
  for _, edge in ipairs(found.edges or {}) do table.insert(graph[labels[edge.tail]], labels[edge.head]) end
  for _, list in pairs(graph) do table.sort(list) end
  return graph, said.out
end

describe("the command line of graph", function()
  it("is refused with 64 and a line when it is wrong", function()
    for _, arguments in ipairs { { "" }, { "u1//r1" }, { "u1", "u2" }, { "-o" } } do
      assert.matches("\nhierlock: %C+\n", "\n" .. assert_status(64, run("null:", "graph", unpack(arguments))).err)
    end
    assert.matches("--ask-password", assert_status(64, run(nil, "graph", "--dsn", "mysql://u:x@h/d")).err, 1, true)
    assert_status(69, run("mysql://u@127.0.0.1:1/d", "graph"))
  end)

  it("says so when it cannot write, or there is no Graphviz", function()
    for _, name in ipairs { "/nonexistent/x.svg", "/nonexistent/x.dot", "/dev/full" } do
      local said = assert_status(74, run("null:", "graph", "-o", name))
      assert.matches("^hierlock: cannot %C+\n$", said.err)
      assert.equal("", said.out)
    end
    local pipe = io.popen(("lua=$(command -v '%s'); PATH=/nonexistent HIERLOCK_DSN=null: \"$lua\" lua/hierlock/command/main.lua " ..
      "graph -o '%s/x.svg' 2>&1; echo \"=$?\""):format(program.interpreter, directory))
    assert.matches("^hierlock: [^\n]*Graphviz[^\n]*\n=70\n$", pipe:read "*a")
    pipe:close()
  end)
end)

support.each_leasing_store(function(store)
  local manager, peer
  local all = store.lists_by_root and { "u1" } or {}

  before_each(function()
    manager = support.open(store, { application = "the shop" })
    peer = support.process(store, { application = "the till" })
  end)

  after_each(function()
    support.close_peers()
    manager:close()
    manager = nil
  end)

  local function mine(lines) return ("the shop %d@%s\n%s"):format(PID, HOST, lines) end
  local function its(lines) return ("the till %d@%s\n%s"):format(peer.pid, HOST, lines) end

  -- Without how long a lease lasts, which changes.
  local function lasting(graph)
    local list = {}
    local function plain(label) return (label:gsub(", %d+ s left", "")) end
    for label, others in pairs(graph) do
      list[plain(label)] = {}
      for i, other in ipairs(others) do list[plain(label)][i] = plain(other) end
    end
    return list
  end

  it("shows who waits, for whom, and what each holds or wants; and nobody else", function()
    support.keep(assert(manager:acquire({ "u1", "a1", "r1" }, { label = "a sale" })))
    support.keep(assert(manager:acquire({ "u1", "a2" }, { mode = "shared" })))
    support.keep(assert(manager:acquire { "u2" }))
    peer:acquire("waits", "acquire", { "u1", "a1" }, { label = 'ü & "<b>" \\n {x|y}' })
    support.wait_for_waiters(store, { "u1", "a1" })
    local graph, dot
    -- A waiter of an earlier spec that was killed may be seen for a while, where only time ends it.
    support.wait_until(function()
      local n = 0
      graph, dot = drawn(store.dsn, unpack(all))
      for _ in pairs(graph) do n = n + 1 end
      return n == 2
    end, "two nodes")
    local holder = mine "holds u1/a1/r1, exclusive\na sale"
    local waiter = its 'waits for u1/a1, exclusive\nü & "<b>" \\n {x|y}'
    assert.is_nil(dot:find("u2", 1, true))
    assert.matches("&#252; &amp; \\\"<b>\\\" \\\\n {x|y}", dot, 1, true)
    assert.same({ [holder] = {}, [waiter] = { holder } }, lasting(graph))
    -- What Graphviz draws is the same on every store.
    for _, format in ipairs(store.name == "embedded" and { "svg", "png", "pdf", "dot" } or { "svg" }) do
      local name = ("%s/a graph's.%s"):format(directory, format)
      local words = { "-o", name, unpack(all) }
      local said = assert_status(0, run(store.dsn, "graph", unpack(words)))
      assert.equal("", said.out .. said.err)
      local made = read_file(name)
      os.remove(name)
      if format == "svg" then
        assert.matches("<svg", made, 1, true)
        assert.matches("the till " .. ("%d"):format(peer.pid), made, 1, true)
      else
        assert.equal(({ png = "\137PNG", pdf = "%PDF", dot = "digr" })[format], made:sub(1, 4))
      end
    end
  end)

  it("counts those who are too many", function()
    for i = 1, 12 do support.keep(assert(manager:acquire { "u1", "a" .. i })) end
    peer:acquire("waits", "acquire", { "u1" })
    support.wait_for_waiters(store, { "u1" })
    support.wait_until(function()
      local graph = drawn(store.dsn, "u1")
      local others = graph[its "waits for u1, exclusive"]
      return others and #others == 11 and graph["2 more"]
    end, "all who are in the way")
  end)

  if store.name == "embedded" then
    it("shows a session that holds something and waits for more as one", function()
      support.keep(assert(manager:acquire { "m2" }))
      assert.is_true(peer:acquire("h", "acquire", { "m1" }):result())
      peer:start [[ return handles.h:extend { "m2", "a" } ]]
      support.wait_for_waiters(store, { "m2" })
      local pending = assert(manager:start { "m1", "x" })
      support.wait_for_waiters(store, { "m1" })
      local holder, between = mine "holds m2, exclusive", its "holds m1, exclusive\nwaits for m1, m2/a, exclusive"
      local graph = drawn(store.dsn)
      assert.same({ [holder] = {}, [between] = { holder }, [mine "waits for m1/x, exclusive"] = { between } }, graph)
      pending:cancel()
    end)
  end
end)
