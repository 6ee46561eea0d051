--- `hierlock matrix`, as an operator runs it: it draws what the rule says, on every store, and shows where a store
-- does not exclude; its page, in a browser.

local uv = require "luv"
local chromium = require "spec.support.chromium"
local program = require "spec.support.command"
local support = require "spec.support"

local run, assert_status = program.run, program.assert_status

-- The rule's table; both: the two go together, wait: the second waits.
local RULE = [[
held                      A    B    C    D    E    F    G    H
A  u1        exclusive wait wait wait wait wait wait wait both
B  u1/a1     exclusive wait wait both wait wait wait wait both
C  u1/a2     exclusive wait both wait both both both both both
D  u1/a1/r1  exclusive wait wait both wait wait both both both
E  u1/a1/r1  shared    wait wait both wait both both both both
F  u1/a1/r2  exclusive wait wait both both both wait wait both
G  u1/a1/r2  shared    wait wait both both both wait both both
H  u2        exclusive both both both both both both both wait
]]

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

-- The nodes have other ids each time, and two may fall into one bucket: then matrix says so, and is asked again.
local function matrix(...)
  local said
  for _ = 1, 5 do
    said = run(...)
    if not said.out:find("two nodes in one bucket", 1, true) then break end
  end
  return said
end

it("the command line of matrix is refused with 64 and a line when it is wrong", function()
  for _, arguments in ipairs { { "--htm", "x" }, { "a", "b" }, { "--levels", "a,,b" }, { "mysql://u:sEcReT@127.0.0.1:1/d" } } do
    local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "matrix", (table.unpack or unpack)(arguments))) -- luacheck: ignore
    assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
    assert.equal("", said.out)
  end
  assert_status(69, run("mysql://u@127.0.0.1:1/d", "matrix"))
end)

support.each_leasing_store(function(plain)
  local store = support.leased(plain)
  setup(function() store.prepare() end)

  it("finds what the rule says, by really locking, and leaves nothing behind", function()
    local manager = support.open(store)
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true } -- of a space that is used
    local said = assert_status(0, matrix(store.dsn, "matrix"))
    assert.equal("", said.err)
    assert.truthy(said.out:find(RULE, 1, true), said.out)
    assert.matches("\n64 pairs were taken in [%d.]+ ms: 34 went together, 30 waited, all as the rule says\n$", said.out)
    if not store.lists_by_root then assert.same({}, assert(manager:leases())) end
  end)
end)

describe("hierlock matrix", function()
  it("does not hide that a store does not exclude, and exits with 1", function()
    local said = assert_status(1, run("null:", "matrix"))
    assert.matches("A and A: WENT TOGETHER, AND MUST NOT", said.out, 1, true)
    assert.matches("30 not as the rule says\n", said.out, 1, true)
    assert.matches("\nand 25 more\n", said.out, 1, true)
  end)

  it("knows any number of levels", function()
    local name = directory()
    for _, levels in ipairs { "a", "a,b", "l1,l2,l3,l4,l5,l6,l7,l8,l9,l10,l11,l12,l13,l14,l15,l16" } do
      local said = assert_status(0, run("file:" .. name .. #levels, "matrix", "--levels", levels))
      at_end(function() os.execute("rm -rf " .. name .. #levels) end)
      assert.matches("all as the rule says\n$", said.out)
    end
  end)

  it("fits a terminal, in colours, unless NO_COLOR is set", function()
    local dsn = "file:" .. directory()
    for _, columns in ipairs { 40, 80 } do
      local self = program.on_terminal(dsn, columns, "matrix")
      assert_status(0, self.join())
      assert.truthy(self.out:find(columns == 80 and "\27[32mboth\27[0m" or "\27[32m+\27[0m", 1, true))
      for line in self.out:gsub("\27%[[%d;]*m", ""):gmatch "\n(%u  [^\r\n]+)\r?\n" do assert.is_true(#line <= columns, line) end
    end
    uv.os_setenv("NO_COLOR", "1")
    at_end(function() uv.os_unsetenv "NO_COLOR" end)
    local self = program.on_terminal(dsn, 80, "matrix")
    assert_status(0, self.join())
    assert.is_nil(self.out:find("\27", 1, true))
  end)

  it("says when it cannot write its page", function()
    local said = assert_status(74, run("file:" .. directory(), "matrix", "--html", "/nonexistent/page.html"))
    assert.matches("cannot write the page", said.err)
  end)

  support.unless_missing(chromium.missing(), "chromium", function()
    it("writes a page that a browser shows as it is meant, on a wide and on a narrow screen", function()
      local name = directory()
      os.execute("mkdir " .. name)
      assert_status(0, run("file:" .. name .. "/locks", "matrix", "--levels", "user,<b>account</b>,resource", "--html", name .. "/page.html"))
      local browser = chromium.start(name .. "/profile")
      at_end(function() browser:stop() end)
      local page = browser:page(1100, 800)
      page:go("file://" .. name .. "/page.html")
      page:wait_for "Why it is so"
      local function count(selector) return page:run(("document.querySelectorAll('%s').length"):format(selector)) end
      assert.equal(64, count "td")
      assert.equal(34, count "td.both")
      assert.equal(30, count "td.wait")
      assert.equal(0, count "td.odd")
      assert.equal(0, count "pre b b") -- a level's name is no markup
      assert.equal("While u1 is held exclusively, a request for u1/<1, exclusive, waits.", page:run "document.querySelectorAll('td')[1].title"
        :gsub("u1/%a+1", "u1/<1"):gsub("u1/n1", "u1/<1"))
      -- Pairs that go together look different from pairs that wait; nothing is wider than the screen.
      assert.not_equal(page:run "getComputedStyle(document.querySelector('td.both')).backgroundColor",
        page:run "getComputedStyle(document.querySelector('td.wait')).backgroundColor")
      assert.truthy(#page:picture("png") > 10000)
      page.width = 380
      page:size(800)
      assert.is_true(page:run "document.documentElement.scrollWidth <= 380")
    end)
  end)
end)
