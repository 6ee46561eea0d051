-- hierlock.prometheus: the text exposition format, read by Prometheus' own parser (promtool), and by a small
-- one here that is as strict about what the values say.

local hierlock = require "hierlock"
local support = require "spec.support"
local promtool = require "spec.support.promtool"

-- Fails where promtool finds anything wrong with it, or anything to complain of.
local function checked(text)
  assert.same({ 0, "" }, { promtool.check(text) })
  return text
end

-- The value of a series, written as the text has it.
local function value(text, series)
  for line in text:gmatch "[^\n]+" do
    local name, number = line:match "^(.+) (%S+)$"
    if name == series then return tonumber(number) end
  end
end

describe("hierlock.prometheus", function()
  local opened

  local function open(options)
    opened[#opened + 1] = assert(hierlock.open("null:", options))
    return opened[#opened]
  end

  before_each(function() opened = {} end)
  after_each(function() for _, manager in ipairs(opened) do manager:close() end end)

  local function specs(store)
    it("says what stats says, of a manager that has done something", function()
      local manager, other = support.open(store), support.open(store)
      opened = { manager, other }
      local held = assert(manager:acquire { "h1" })
      assert(manager:acquire { "h2", "a1" }):release()
      assert.equal("timeout", select(2, other:acquire({ "h1" }, { timeout = 0.02 })).code)
      for _, one in ipairs(opened) do
        local text, stats = checked(hierlock.prometheus(one)), one:stats()
        for _, counter in ipairs { "acquired", "waited", "released", "timeouts", "deadlocks", "cancelled", "busy", "lost",
                                   "errors", "reconnects" } do
          assert.equal(stats[counter], value(text, "hierlock_" .. counter .. "_total"), counter)
        end
        for _, gauge in ipairs { "held", "waiting", "connections" } do
          assert.equal(stats[gauge], value(text, "hierlock_" .. gauge), gauge)
        end
        for _, level in ipairs(stats.levels) do
          for which, name in pairs { waits = "wait", holds = "hold" } do
            local histogram, sum = level[which], 0
            local series = ("hierlock_%s_seconds_%%s{level=\"%s\"%%s}"):format(name, level.name)
            for i, bound in ipairs(stats.bounds) do
              sum = sum + histogram.buckets[i]
              assert.equal(sum, value(text, series:format("bucket", (',le="%g"'):format(bound))), bound)
            end
            assert.equal(histogram.count, value(text, series:format("bucket", ',le="+Inf"')))
            assert.equal(histogram.count, value(text, series:format("count", "")))
            assert.is_true(math.abs(histogram.seconds - value(text, series:format("sum", ""))) < 1e-9)
          end
        end
      end
      held:release()
    end)
  end
  support.each_store(specs)
  support.on_redis(specs)
  support.on_sqlite(specs)
  support.on_memcached(specs)

  it("is of the default manager, where none is given", function()
    local run, status = support.run([[
      local hierlock = require "hierlock"
      assert(hierlock.acquire { "u" }):release()
      io.write(hierlock.prometheus())
    ]], "HIERLOCK_DSN=null: ")
    assert.equal(0, status, run)
    assert.equal(1, value(checked(run), "hierlock_acquired_total"))
  end)

  it("says why there is no default manager, and takes options beside none", function()
    local run, status = support.run([[
      local hierlock = require "hierlock"
      local text, err = hierlock.prometheus(nil, { prefix = "shop" })
      io.write(text or "nothing", " ", err and err.code or "")
    ]], "HIERLOCK_DSN=nonsense: ")
    assert.equal(0, status, run)
    assert.equal("nothing dsn", run)
    run, status = support.run('io.write(require("hierlock").prometheus(nil, { prefix = "shop" }))', "HIERLOCK_DSN=null: ")
    assert.equal(0, status, run)
    assert.equal(0, value(checked(run), "shop_acquired_total"))
  end)

  it("has a prefix and labels of the caller's, in a fixed order", function()
    local manager = open()
    assert(manager:acquire { "u" }):release()
    local text = checked(hierlock.prometheus(manager, { prefix = "shop_locks", labels = { worker = 7, host = "a" } }))
    assert.equal(1, value(text, 'shop_locks_acquired_total{host="a",worker="7"}'))
    assert.equal(1, value(text, 'shop_locks_wait_seconds_count{host="a",worker="7",level="user"}'))
    assert.is_nil(text:find("hierlock", 1, true))
  end)

  it("escapes what a label may have: whatever bytes", function()
    local hostile = { 'quote" back\\slash new\nline', 'x"} 1\nevil_total 5', "", "\0", "\r", "\127\1", "}", "{", " ", "# HELP x y",
                      "\240\159\148\146 \195\169", "\255", "\195", "\195\40", "\192\128", "\237\160\128", "\244\144\128\128",
                      "\226\130", "\128", "a\240\159\148" }
    for _, bytes in ipairs(hostile) do
      local manager = open()
      assert(manager:acquire { "u" }):release()
      local text = checked(hierlock.prometheus(manager, { labels = { a = bytes } }))
      assert.is_nil(text:find("\nevil_total", 1, true))
      local _, lines = text:gsub("\n", "")
      local _, usual = hierlock.prometheus(manager):gsub("\n", "")
      assert.equal(usual, lines)
    end
    local text = hierlock.prometheus(open(), { labels = { a = 'q" b\\ n\n', b = "\255x\195\169" } })
    assert.equal(0, value(text, 'hierlock_held{a="q\\" b\\\\ n\\n",b="\239\191\189x\195\169"}'))
    -- Names of levels have nearly any bytes, too.
    local manager = open { levels = { 'a"b\\', "c\255", "d" } }
    assert(manager:acquire { "u", "v" }):release()
    text = checked(hierlock.prometheus(manager))
    assert.equal(1, value(text, 'hierlock_wait_seconds_count{level="c\239\191\189"}'))
    assert.equal(0, value(text, 'hierlock_wait_seconds_count{level="a\\"b\\\\"}'))
  end)

  it("puts texts and managers together, and adds up what has the same labels", function()
    local one, other = open(), open { levels = { "user", "room" } }
    for _ = 1, 3 do assert(one:acquire { "u" }):release() end
    for _ = 1, 4 do assert(other:acquire { "u", "r" }):release() end
    local text = checked(hierlock.prometheus({ one, other }))
    assert.equal(7, value(text, "hierlock_acquired_total"))
    assert.equal(3, value(text, 'hierlock_wait_seconds_count{level="user"}'))
    assert.equal(4, value(text, 'hierlock_wait_seconds_bucket{level="room",le="+Inf"}'))

    local a = hierlock.prometheus(one, { labels = { worker = "a b" } })
    local b = hierlock.prometheus(other, { labels = { worker = "b" } })
    text = checked(hierlock.prometheus { a, b, a })
    assert.equal(6, value(text, 'hierlock_acquired_total{worker="a b"}'))
    assert.equal(4, value(text, 'hierlock_acquired_total{worker="b"}'))
    assert.equal(1, select(2, text:gsub("# TYPE hierlock_hold_seconds histogram", "")))
    assert.equal(a, hierlock.prometheus { a })
    assert.equal(text, hierlock.prometheus { text })
    assert.equal("", hierlock.prometheus {})
    local c = hierlock.prometheus(one, { prefix = "other" })
    text = checked(hierlock.prometheus { c, b })
    assert.equal(3, value(text, "other_acquired_total"))
  end)

  it("is of threads and processes together", function()
    local store = support.stores[1]
    store.prepare()
    local peers = { support.thread(store), support.thread(store), support.process(store) }
    finally(support.close_peers)
    local texts, names = {}, {}
    for i, peer in ipairs(peers) do
      names[i] = os.tmpname()
      peer:start([[
        local i, name = ...
        for _ = 1, 10 * i do assert(manager:acquire { "t" .. i, "a" }):release() end
        local file = assert(io.open(name, "wb"))
        file:write(hierlock.prometheus(manager, { labels = { peer = i } }))
        file:close()
        return true
      ]], i, names[i])
    end
    for i, peer in ipairs(peers) do
      assert.is_true(peer:result())
      local file = assert(io.open(names[i], "rb"))
      texts[i] = file:read("*a")
      file:close()
      os.remove(names[i])
    end
    local text = checked(hierlock.prometheus(texts))
    for i = 1, 3 do assert.equal(10 * i, value(text, ('hierlock_hold_seconds_count{peer="%d",level="account"}'):format(i))) end
  end)

  it("has alarms in docs/observability.md that Prometheus accepts, about metrics that there are", function()
    local file = assert(io.open("docs/observability.md", "rb"))
    local page = file:read("*a")
    file:close()
    local rules = assert(page:match("\n```yaml\n(.-\n)```\n"))
    assert.same({ 0 }, { (promtool.check_rules(rules)) })
    local text, named = hierlock.prometheus(open()), 0
    for metric in page:gmatch("%f[%w_]hierlock_[%l_]+") do
      if not metric:find "_metrics$" then
        named = named + 1
        assert.is_truthy(text:find("# TYPE " .. metric:gsub("_bucket$", "") .. " ", 1, true), metric)
      end
    end
    assert.is_true(named > 20)
    for metric in text:gmatch "# TYPE (%S+)" do assert.is_truthy(page:find("`" .. metric .. "`", 1, true), metric) end
    local series, levels = select(2, text:gsub("\n[^#\n]", "")), 3
    assert.is_truthy(page:find(("%d with the default levels"):format(series), 1, true), series)
    assert.equal(series, 13 + levels * 54)
  end)

  it("raises what is misuse, at the caller's position", function()
    local manager = open()
    local closed = open()
    closed:close()
    for text, fn in pairs {
      ["source must be a manager"] = function() hierlock.prometheus("x") end,
      ["number 2 of the list must be a manager or a text, not number"] = function() hierlock.prometheus { manager, 5 } end,
      ["a text in the list is none of"] = function() hierlock.prometheus { "hello 1\n" } end,
      ["text in the list is none of"] = function() hierlock.prometheus { "# HELP a b\n# TYPE a counter\na x\n" } end,
      ["unknown option 'lables'"] = function() hierlock.prometheus(manager, { lables = {} }) end,
      ["options must be a table"] = function() hierlock.prometheus(manager, "x") end,
      ["prefix must be"] = function() hierlock.prometheus(manager, { prefix = "1x" }) end,
      ["prefix must be of"] = function() hierlock.prometheus(manager, { prefix = "a b" }) end,
      ["labels must be a table"] = function() hierlock.prometheus(manager, { labels = 1 }) end,
      ["a label cannot be named 'le'"] = function() hierlock.prometheus(manager, { labels = { le = "1" } }) end,
      ["a label's name must be"] = function() hierlock.prometheus(manager, { labels = { ["a-b"] = "1" } }) end,
      ["label's name must be"] = function() hierlock.prometheus(manager, { labels = { __x = "1" } }) end,
      ["name must be of letters"] = function() hierlock.prometheus(manager, { labels = { "1" } }) end,
      ["the label a must be a string or a number, not boolean"] = function() hierlock.prometheus(manager, { labels = { a = true } }) end,
      ["the manager is closed"] = function() hierlock.prometheus(closed) end,
    } do
      local ok, message = pcall(fn)
      assert.is_false(ok, text)
      assert.is_truthy(message:find(text, 1, true), message)
      assert.is_truthy(message:find("prometheus_spec.lua:", 1, true), message)
    end
  end)
end)
