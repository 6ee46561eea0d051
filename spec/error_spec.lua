-- Error values: their fields, how they are shown, and that is_error tells them from everything else. The specs of
-- the calls check which call gives which code; this one checks the table of codes against the codes that a single
-- process can bring about.

local hierlock = require "hierlock"
local support = require "spec.support"

local embedded = support.stores[1]

describe("an error", function()
  local managers = {}
  local function open(options)
    managers[#managers + 1] = support.open(embedded, options)
    return managers[#managers]
  end
  after_each(function()
    while #managers > 0 do table.remove(managers):close() end
  end)

  -- code = { retryable, how to get one }
  local made = {
    timeout = { true, function()
      local handle = assert(open():acquire { "e1" })
      local _, err = open():acquire({ "e1" }, { timeout = 0 })
      handle:release()
      return err
    end },
    released = { false, function()
      local handle = assert(open():acquire { "e1" })
      handle:release()
      return select(2, handle:check())
    end },
    not_provisioned = { false, function() return select(2, hierlock.plan({ { "e1" } }):verify(0)) end },
    mismatch = { false, function() open() return select(2, hierlock.open(embedded.dsn, { buckets = 7 })) end },
    dsn = { false, function() return select(2, hierlock.open("nonsense")) end },
    store = { false, function() return select(2, hierlock.open("file:/nonexistent/directory")) end },
    connection = { true, function() return select(2, hierlock.open("mysql://u:p@127.0.0.1:1/db")) end },
    lost = { true, function()
      local directory = embedded.directory .. "/error-lost"
      managers[#managers + 1] = assert(hierlock.open("file:" .. directory))
      local handle = assert(managers[#managers]:acquire { "e1" })
      assert(os.remove(directory .. "/control"))
      return select(2, handle:release { confirm = true })
    end },
  }
  if not pcall(require, "hierlock.store.mysql") then made.connection = nil end

  for code, case in pairs(made) do
    it("of code " .. code .. (case[1] and " may" or " need not") .. " be tried again", function()
      local err = case[2]()
      assert.is_true(hierlock.is_error(err), tostring(err))
      assert.equal(code, err.code)
      assert.equal(case[1], err.retryable)
      assert.is_string(err.message)
      assert.is_nil(err.message:find("[%c]"), "not one line")
      if code ~= "connection" then
        assert.is_nil(err.errno)
        assert.is_nil(err.sqlstate)
      end
    end)
  end

  it("names its target as the caller would", function()
    local err = made.timeout[2]()
    assert.same({ user = "e1" }, err.target)
    local manager = open()
    local handle = assert(manager:acquire_resource("e1", "a\0", 7))
    local _, other = manager:acquire_resource("e1", "a\0", 7, { timeout = 0 })
    assert.same({ user = "e1", account = "a\0", resource = "7" }, other.target)
    handle:release()
  end)

  it("names no target where several were asked for", function()
    local manager = open()
    local handle = assert(manager:acquire { "e1" })
    local _, err = manager:acquire_all({ { "e1" }, { "e2" } }, { timeout = 0 })
    assert.equal("timeout", err.code)
    assert.is_nil(err.target)
    handle:release()
  end)

  it("of a timeout tells who holds it", function()
    local manager = open { application = "the holder" }
    local handle = assert(manager:acquire({ "e1" }, { label = "a label" }))
    local other = open()
    local err = support.told(function() return other:acquire({ "e1" }, { timeout = 0 }) end)
    assert.equal(1, #err.holders)
    assert.equal("the holder", err.holders[1].application)
    assert.equal("a label", err.holders[1].label)
    assert.equal("e1", err.holders[1].path)
    assert.is_false(err.holders[1].waiting)
    handle:release()
  end)

  it("of an extend names what was asked for, and who holds it", function()
    local manager = open()
    local first, second = assert(manager:acquire { "e1" }), assert(manager:acquire { "e2" })
    local err = support.told(function() return first:extend({ user = "e2" }, { timeout = 0 }) end)
    assert.equal("timeout", err.code)
    assert.same({ user = "e2" }, err.target)
    assert.equal("e2", err.holders[1].path)
    first:release()
    second:release()
  end)

  local err = select(2, hierlock.open("nonsense"))
  it("is shown as its code and message", function()
    assert.equal("dsn: " .. err.message, tostring(err))
  end)
  it("can be put together with strings, numbers and other errors", function()
    assert.equal("got " .. tostring(err), "got " .. err)
    assert.equal(tostring(err) .. "!", err .. "!")
    assert.equal(tostring(err) .. "1", err .. 1)
    assert.equal(tostring(err) .. tostring(err), err .. err)
    assert.equal("a" .. tostring(err) .. "b", "a" .. err .. "b")
  end)
  it("can be raised, and caught unchanged", function()
    local ok, caught = pcall(error, err)
    assert.is_false(ok)
    assert.equal(err, caught)
  end)
  it("can be shown whatever has become of its fields", function()
    for _, fields in ipairs { {}, { code = 1, message = {} }, { code = "c" }, { message = true } } do
      local broken = setmetatable(fields, getmetatable(err))
      assert.is_string(tostring(broken))
      assert.is_string(broken .. "x")
    end
  end)
end)

describe("is_error", function()
  it("is true of errors", function()
    assert.is_true(hierlock.is_error(select(2, hierlock.open("nonsense"))))
  end)
  it("is false of everything else", function()
    local values = { {}, { code = "timeout", message = "m" }, setmetatable({}, {}), setmetatable({}, { __index = function() error() end }),
      "timeout", 1, true, false, print, io.stdout, coroutine.create(function() end), hierlock.plan { { "u" } }, hierlock.open("null:") }
    for _, value in ipairs(values) do assert.is_false(hierlock.is_error(value)) end
    assert.is_false(hierlock.is_error(nil))
    assert.is_false(hierlock.is_error())
  end)
end)
