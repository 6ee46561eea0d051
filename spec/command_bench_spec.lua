--- `hierlock bench`, as an operator runs it: it measures on every store, reports its figures, and leaves nothing
-- behind. The speed of a store does not matter here.

local uv = require "luv"
local json = require "dkjson"
local program = require "spec.support.command"
local support = require "spec.support"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack -- luacheck: ignore

local undo

before_each(function() undo = {} end)
after_each(function()
  program.close()
  for i = #undo, 1, -1 do undo[i]() end
end)

local function at_end(fn) undo[#undo + 1] = fn end

local function directory()
  local name = os.tmpname()
  os.remove(name)
  at_end(function() os.execute("rm -rf " .. name) end)
  return name
end

it("the command line of bench is refused with 64 and a line when it is wrong", function()
  for _, arguments in ipairs {
    { "--seconds", "0" }, { "--seconds", "x" }, { "--seconds", "nan" }, { "--pool-size", "0" }, { "--pool-size", "1.5" }, { "--pool-size", "1001" },
    { "a", "b" }, { "--levels", "a,,b" }, { "mysql://u:sEcReT@127.0.0.1:1/d" },
  } do
    local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "bench", unpack(arguments)))
    assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
    assert.equal("", said.out)
  end
  assert_status(69, run("mysql://u@127.0.0.1:1/d", "bench"))
end)

support.each_leasing_store(function(plain)
  local store = support.leased(plain)
  setup(function() store.prepare() end)

  it("measures alone, side by side and on one node, and leaves nothing behind", function()
    local manager = support.open(store)
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true } -- of a space that is used
    local said = assert_status(0, run(store.dsn, "bench", "--json", "--seconds", "0.15", "--pool-size", "3"))
    assert.matches("^takes locks in a tree of its own, which nobody else uses", said.err)
    local found = assert(json.decode(said.out))
    assert.equal(3, found.pool_size)
    assert.equal(4, #found.parts)
    for _, part in ipairs(found.parts) do
      assert.is_true(part.grants > 0 and part.failed == 0, said.out)
      assert.is_true(part.seconds >= 0.15)
      assert.is_true(math.abs(part.grants_per_second * part.seconds - part.grants) < 0.01)
      assert.is_true(part.best > 0 and part.best <= part.median and part.median <= part.p90 and part.p90 <= part.p99 and
        part.p99 <= part.p999 and part.p999 <= part.worst, said.out)
      local sum = 0
      for _, bar in ipairs(part.histogram) do sum = sum + bar.share end
      assert.is_true(math.abs(sum - 1) < 1e-6)
    end
    if store.lists_by_root then return end
    support.wait_until(function() return not assert(manager:leases())[1] end, "the last releases")
  end)
end)

describe("hierlock bench", function()
  it("prints figures and bars of ASCII, and no progress, where there is no terminal", function()
    local said = assert_status(0, run("file:" .. directory(), "bench", "--seconds", "0.1", "--pool-size", "2"))
    assert.is_nil(said.out:find "[^ -~\n]")
    assert.is_nil(said.err:find "\r")
    for _, name in ipairs { "alone", "side by side", "one pool, one node", "many programs, one node" } do
      assert.matches("\n" .. name .. "  [%w ,;]+\n  %d+ grants/s\n  median [%d.]+ %ws, 90 %% ", said.out)
    end
    assert.matches("\n +< [%d.]+ %ws  #+ +[%d.]+ %%\n", said.out)
    assert.equal("", assert_status(0, run("null:", "bench", "--quiet", "--seconds", "0.05")).err)
  end)

  it("shows its progress on a terminal, and fits it", function()
    for _, columns in ipairs { 60, 100 } do
      local self = program.on_terminal("file:" .. directory(), columns, "bench", "--seconds", "0.3", "--pool-size", "2")
      assert_status(0, self.join())
      assert.matches("\r1 of 4, alone: %d+ %%, %d+ grants\27%[K", self.out)
      assert.matches("\r4 of 4, many programs, one node: ", self.out, 1, true)
      assert.truthy(self.out:find("█", 1, true))
      for line in self.out:gsub("\27%[[%d;]*%a", ""):gmatch "\n +([<m][^\r\n]+)\r?\n" do
        assert.is_true(#line:gsub("[\128-\191]", "") + 2 <= columns, line)
      end
    end
  end)

  it("ends at Ctrl-C with what it has seen, and lets go", function()
    local dsn = "file:" .. directory()
    local self = program.on_terminal(dsn, 80, "bench", "--seconds", "60", "--pool-size", "3")
    self.shows "1 of 4, alone"
    self.type "\3"
    assert_status(130, self.join())
    assert.matches("grants/s", self.out)
    assert.is_nil(self.out:find("side by side", 1, true))
    self = program.on_terminal(dsn, 80, "bench", "--seconds", "1", "--pool-size", "3")
    self.shows "3 of 4"
    self.type "\3"
    assert_status(130, self.join())
    assert.truthy(self.out:find("one pool, one node", 1, true))
  end)

  it("says what failed: a limit of the server's, in the part that meets it", function()
    local store
    for _, one in ipairs(support.stores) do
      if one.table and one.root and one.root() then store = one end
    end
    if not store then return pending "no administrator here" end
    store.prepare()
    store.sql() -- counts
    local again = store.limit_connections()
    at_end(again)
    local said = run(store.dsn, "bench", "--seconds", "0.2", "--pool-size", "4", "--json")
    assert.equal(0, said.status, said.err)
    local found = assert(json.decode(said.out))
    assert.is_true(found.parts[4].failed > 0 or found.parts[2].failed > 0)
    assert.matches("connection", found.parts[4].error or found.parts[2].error)
  end)

  it("takes no node that anybody else uses", function()
    local dsn = "file:" .. directory()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    local handle = assert(manager:acquire { "u1" })
    assert_status(0, run(dsn, "bench", "--seconds", "0.05", "--quiet"))
    assert.is_true(handle:is_held())
    assert(uv.fs_stat(dsn:sub(6)))
    assert(handle:release())
  end)
end)
