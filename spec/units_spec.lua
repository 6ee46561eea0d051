-- Units of business data: named, and taken in the order in which they are declared.

local hierlock = require "hierlock"
local support = require "spec.support"

local account, order, invoice = "account", "order", "invoice"

local managers

local function open_on(store, units, check_order, options)
  local all = { units = units, check_order = check_order }
  for name, value in pairs(options or {}) do all[name] = value end
  managers[#managers + 1] = support.open(store, all)
  return managers[#managers]
end

local function collector(reports)
  return function(message) reports[#reports + 1] = message end
end

local function line() return debug.getinfo(2, "l").currentline end

describe("units", function()
  before_each(function() managers = {} end)
  after_each(function()
    for _, manager in ipairs(managers) do manager:close() end
    support.close_peers()
  end)

  support.each_leasing_store(function(store)
    it("are nodes: of one unit and id there is one holder, of the whole unit one of all", function()
      local manager, other = open_on(store, { account, order }), open_on(store)
      local seven = assert(manager:acquire(manager:unit(order, 7)))
      local refused, err = other:acquire({ order, "7" }, { timeout = 0 })
      assert.is_nil(refused)
      assert.equal("timeout", err.code)
      assert(other:acquire({ order, 8 }, { timeout = 0 })):release { confirm = true }
      refused, err = other:acquire({ order }, { timeout = 0 })
      assert.is_nil(refused)
      assert.equal("timeout", err.code)
      assert(seven:release { confirm = true })
      local all = assert(manager:acquire(manager:unit(order)))
      refused = other:acquire({ order, 8 }, { timeout = 0 })
      assert.is_nil(refused)
      assert(all:release { confirm = true })
    end)

    it("are granted in their order, and refused by an error in another, before anything is waited for", function()
      local manager = open_on(store, { account, order, invoice }, "raise")
      local first = assert(manager:acquire(manager:unit(account, 1)))
      local last = assert(manager:acquire(manager:unit(invoice, 3)))
      local acquired = manager:stats().acquired
      local ok, raised = pcall(manager.acquire, manager, manager:unit(order, 2))
      assert.is_false(ok)
      assert.truthy(raised:find("against the declared order", 1, true), raised)
      -- Also where the first of several is free, and so is got by a try.
      ok, raised = pcall(manager.acquire_any, manager, { manager:unit(invoice, 4), manager:unit(order, 2) })
      assert.is_false(ok)
      assert.truthy(raised:find("against the declared order", 1, true), raised)
      assert.equal(acquired, manager:stats().acquired)
      assert.equal(0, manager:stats().waiting)
      assert.is_true(first:is_held() and last:is_held())
      assert(last:release { confirm = true })
      local second = assert(manager:acquire(manager:unit(order, 2)))
      assert(second:release { confirm = true })
      assert(first:release { confirm = true })
    end)

    for _, kind in ipairs(support.peer_kinds) do
      local name, peer = kind[1], kind[2]
      it("are looked at in what a " .. name .. " holds itself, and in nothing else", function()
        local units = { account, order }
        local manager = open_on(store, units, "raise")
        local own = assert(manager:acquire(manager:unit(order, 1)))
        local other = peer(store, { units = units, check_order = "raise" })
        local granted, refused = other:call([[
          local account, order = ...
          local one = assert(manager:acquire(manager:unit(account, 1)))
          local two = assert(manager:acquire(manager:unit(order, 2)))
          assert(one:release { confirm = true })
          local refused = select(2, pcall(manager.acquire, manager, manager:unit(account, 1)))
          assert(two:release { confirm = true })
          local again = assert(manager:acquire(manager:unit(account, 1)))
          assert(again:release { confirm = true })
          return true, refused
        ]], account, order)
        assert.is_true(granted)
        assert.truthy(refused:find("against the declared order", 1, true), refused)
        assert(own:release { confirm = true })
      end)
    end
  end)

  -- ------------------------------------------------------- the reports

  local embedded = support.stores[1]
  local function open(...) return open_on(embedded, ...) end

  -- Runs a chunk as a program of its own, with `manager`; returns its output.
  local function program(chunk, options, environment)
    local output, status = support.run(([[
      local hierlock = require "hierlock"
      local manager = assert(hierlock.open(%q, { buckets = %d, units = { "account", "order" } %s }))
      local function backwards()
        local order = assert(manager:acquire(manager:unit("order", 5)))
        local account = assert(manager:acquire(manager:unit("account", 7)))
        account:release()
        order:release()
      end
      %s
    ]]):format(embedded.dsn, embedded.options.buckets, options or "", chunk), environment)
    return output, status
  end

  it("raise with the lines of both, at the caller's", function()
    local manager = open({ account, order }, "raise")
    local held = assert(manager:acquire(manager:unit(order, 5)))
    local at = line()
    local ok, raised = pcall(function() return assert(manager:acquire(manager:unit(account, 7))) end)
    assert.is_false(ok)
    assert.equal(("spec/units_spec.lua:%d: "):format(at + 1), raised:match("^[^ ]+ "))
    assert.truthy(raised:find(("units_spec.lua:%d while"):format(at + 1), 1, true), raised)
    assert.truthy(raised:find(("since spec/units_spec.lua:%d"):format(at - 1), 1, true), raised)
    assert.truthy(raised:find(order .. "/5", 1, true) and raised:find(account .. "/7", 1, true), raised)
    held:release()
  end)

  it("raise each time, and a report is told once for each pair", function()
    -- The process keeps the reported names: no other spec uses these.
    local first, second, third = "told first", "told second", "told third"
    local reports = {}
    local raises = open({ first, second, third }, "raise")
    local tells = open({ first, second, third }, collector(reports))
    for _ = 1, 3 do
      local held = assert(raises:acquire(raises:unit(third, 5)))
      assert.has_error(function() return raises:acquire(raises:unit(second, 7)) end)
      held:release()
      held = assert(tells:acquire(tells:unit(second, 5)))
      assert(tells:acquire(tells:unit(first, 7))):release()
      held:release()
    end
    tells:stats()
    assert.equal(1, #reports)
    assert.truthy(reports[1]:find("against the declared order", 1, true), reports[1])
    local held = assert(tells:acquire(tells:unit(third, 5)))
    assert(tells:acquire(tells:unit(first, 7))):release()
    held:release()
    tells:stats()
    assert.equal(2, #reports)
  end)

  it("go to stderr unless said, raise with HIERLOCK_CHECK=1, and are not looked at with false", function()
    local output, status = program "backwards() backwards() io.stdout:write 'went on'"
    assert.equal(0, status)
    local _, times = output:gsub("hierlock: [^\n]* against the declared order", "")
    assert.equal(1, times, output)
    assert.truthy(output:find("went on", 1, true), output)

    output, status = program("backwards()", "", "HIERLOCK_CHECK=1")
    assert.equal(1, status)
    assert.truthy(output:find("against the declared order", 1, true), output)

    output, status = program("backwards()", ", check_order = true", "HIERLOCK_CHECK=1")
    assert.equal(0, status)
    assert.truthy(output:find("against the declared order", 1, true), output)

    for _, environment in ipairs { "HIERLOCK_CHECK=1", "HIERLOCK_CHECK=0" } do
      output, status = program("backwards()", ", check_order = false", environment)
      assert.equal("", output)
      assert.equal(0, status)
    end
  end)

  it("are not learnt where nobody has asked for that", function()
    local output, status = program [[
      local x = assert(manager:acquire { "u1" })
      assert(manager:acquire { "u2", "a1" }):release()
      x:release()
      x = assert(manager:acquire { "u2", "a1" })
      assert(manager:acquire { "u1" }):release()
      x:release()
    ]]
    assert.equal("", output)
    assert.equal(0, status)
  end)

  -- ---------------------------------------------------------- what counts

  -- Whether fn(manager) takes an account while it holds an order.
  local function raises(manager, fn)
    local ok, raised = pcall(fn, manager)
    if ok then return false end
    assert.truthy(tostring(raised):find("against the declared order", 1, true), tostring(raised))
    return true
  end

  it("may be taken in any order by one call, and in none by a second one", function()
    local manager = open({ account, order }, "raise")
    local both = assert(manager:acquire_all { manager:unit(order, 5), manager:unit(account, 7) })
    assert.is_true(raises(manager, function() return manager:acquire(manager:unit(account, 8)) end))
    both:release()
    local held = assert(manager:acquire(manager:unit(order, 5)))
    for what, fn in pairs {
      acquire_all = function() return manager:acquire_all { manager:unit(order, 6), manager:unit(account, 7) } end,
      acquire_any = function() return manager:acquire_any { manager:unit(order, 6), manager:unit(account, 7) } end,
      start_any = function() return manager:start_any { manager:unit(order, 6), manager:unit(account, 7) } end,
      start = function() return manager:start(manager:unit(account, 7)) end,
      with = function() return manager:with(manager:unit(account, 7), function() end) end,
      lease = function() return manager:acquire(manager:unit(account, 7), { ttl = 60 }) end,
      whole = function() return manager:acquire(manager:unit(account)) end,
      shared = function() return manager:acquire({ account, 7, 1 }, { mode = "shared" }) end,
      extend = function() return held:extend(manager:unit(account, 7)) end,
      plain = function() return manager:acquire_account(account, 7) end,
    } do
      assert.is_true(raises(manager, fn), what)
      assert.is_true(held:is_held(), what)
      assert.equal(1, manager:stats().held, what)
      assert.equal(0, manager:stats().waiting, what)
    end
    held:release()
  end)

  it("do not matter to those who try once, to other targets, and within a unit", function()
    local manager = open({ account, order }, "raise")
    local held = assert(manager:acquire(manager:unit(order, 5)))
    assert(manager:acquire(manager:unit(account, 7), { timeout = 0 })):release()
    assert(manager:acquire({ "somebody", "else" }, { label = "after" })):release()
    assert(manager:acquire(manager:unit(order, 4))):release()
    held:release()
    held = assert(manager:acquire({ "somebody", "else" }, { label = "before" }))
    assert(manager:acquire(manager:unit(account, 7))):release()
    held:release()
    local once = open({ account, order }, "raise", { timeout = 0 })
    held = assert(once:acquire(once:unit(order, 5)))
    assert(once:acquire(once:unit(account, 7))):release()
    held:release()
  end)

  it("count while they are held, by leases, imports, extends and other managers, too", function()
    local manager, other = open({ account, order }, "raise"), open({ account, order }, "raise")
    local function backwards() return raises(manager, function() return assert(manager:acquire(manager:unit(account, 7))):release() end) end
    local held = assert(other:acquire(manager:unit(order, 5)))
    assert.is_true(backwards())
    held:release()
    assert.is_false(backwards())
    held = assert(manager:acquire(manager:unit(order, 5), { ttl = 60 }))
    assert.is_true(backwards())
    local text = assert(held:export())
    assert.is_false(backwards())
    held = assert(manager:import(text))
    assert.is_true(backwards())
    held:release()
    held = assert(manager:acquire({ "somebody" }, { label = "before" }))
    assert.is_false(backwards())
    assert(held:extend(manager:unit(order, 5)))
    assert.is_true(backwards())
    held:release()
    held = assert(manager:start(manager:unit(order, 5)):wait(support.DEADLINE))
    assert.is_true(backwards())
    held:release()
    held = assert(manager:acquire_any { manager:unit(order, 5), manager:unit(order, 6) })
    assert.is_true(backwards())
    held:release()
    -- A manager that has declared nothing has no units, though it minds coroutines.
    local plain = open(nil, nil, { own_handles = true })
    held = assert(plain:acquire { order, 5 })
    assert.is_false(backwards())
    held:release()
  end)

  it("count for the coroutine that holds them", function()
    local manager = open({ account, order }, "raise")
    local held = assert(manager:acquire(manager:unit(order, 5)))
    local function backwards() assert(manager:acquire(manager:unit(account, 7))):release() end
    assert.is_false(coroutine.wrap(function() return raises(manager, backwards) end)())
    assert.is_true(coroutine.wrap(function()
      local own = assert(manager:acquire(manager:unit(order, 6)))
      local raised = raises(manager, backwards)
      own:release()
      return raised
    end)())
    held:release()
  end)

  it("leave hooks out of a call that raises", function()
    local events = {}
    local manager = open({ account, order }, "raise", {
      on_wait = function() events[#events + 1] = "wait" end,
      on_error = function() events[#events + 1] = "error" end,
      on_release = function() events[#events + 1] = "release" end,
    })
    local held = assert(manager:acquire(manager:unit(order, 5)))
    assert.is_true(raises(manager, function() return manager:acquire(manager:unit(account, 7)) end))
    assert.is_true(raises(manager, function() return held:extend(manager:unit(account, 7)) end))
    held:release()
    support.collect()
    manager:stats()
    assert.same({ "wait", "release" }, events)
  end)

  it("are kinds of their own for check_order: what is declared makes no circle", function()
    -- In a program of its own: a process learns 64 kinds.
    local output, status = program([[
      local function nested(first, second, options, held)
        held = assert(manager:acquire(first, held))
        assert(manager:acquire(second, options)):release()
        held:release()
      end
      local function unit(...) return manager:unit(...) end
      local function say(text) io.stderr:write(text, "\n") end
      -- By levels alone: a user in an account, an account in a user.
      nested(unit "account", unit("order", 5))
      nested(unit("account", 7), unit "order")
      nested(unit("account", 7), unit("order", 5))
      -- Two nodes of one unit in one order.
      nested(unit("order", 5), unit("order", 6))
      nested(unit("order", 5), unit("order", 7))
      say "1"
      nested(unit("order", 6), unit("order", 5))
      say "2"
      nested(unit("order", 5), { "somebody" }, { label = "outside" })
      nested({ "somebody" }, unit("order", 5), nil, { label = "outside" })
      say "3"
      nested(unit("order", 5), unit("account", 7))
      nested(unit("order", 5), unit("account", 7))
    ]], ", check_order = true")
    assert.equal(0, status, output)
    local found = { output:match('^1\nhierlock: locks of one kind %("order" %(unit%)%) are taken in both orders: [^\n]*\n' ..
      '2\nhierlock: locks are taken in a circle of orders: "order" %(unit%)[^\n]*\n' ..
      "3\nhierlock: units are taken against the declared order: [^\n]*\n$") }
    assert.equal(1, #found, output)
  end)

  it("are told by many threads once", function()
    local output = support.run(([[
      local thread = require "cqueues.thread"
      local threads = {}
      for i = 1, 8 do
        threads[i] = thread.start(function(_, i, path, cpath)
          package.path, package.cpath = path, cpath
          local hierlock = require "hierlock"
          local manager = assert(hierlock.open(%q, { buckets = %d, units = { %q, %q } }))
          for _ = 1, 50 do
            local order = assert(manager:acquire(manager:unit(%q, i)))
            assert(manager:acquire(manager:unit(%q, i))):release()
            order:release()
          end
          manager:close()
        end, tostring(i), package.path, package.cpath)
      end
      for i = 1, 8 do assert(threads[i]:join()) end
    ]]):format(embedded.dsn, embedded.options.buckets, account, order, order, account))
    local _, times = output:gsub("against the declared order", "")
    assert.equal(1, times, output)
  end)

  it("are not held by a forked child, which looks at its own", function()
    local peer = support.process(embedded, { units = { account, order }, check_order = "raise" })
    assert.equal(0, peer:call([[
      local account, order = ...
      local fork = require "hierlock_spec.fork"
      handles.order = assert(manager:acquire(manager:unit(order, 1)))
      local pid = fork.fork()
      if pid > 0 then return (fork.wait(pid)) end
      local one = manager:acquire(manager:unit(account, 1))
      local two = one and manager:acquire(manager:unit(order, 2))
      local three = two and pcall(manager.acquire, manager, manager:unit(account, 2))
      fork.exit((not one and 1) or (not two and 2) or (three and 3) or 0)
    ]], account, order))
  end)

  -- ------------------------------------------------------------ the names

  it("are made into targets by their name", function()
    local manager = open { account, order }
    assert.same({ order, "5" }, manager:unit(order, 5))
    assert.same({ order, "5" }, manager:unit(order, "5"))
    assert.same({ order, "5", "line" }, manager:unit(order, 5, "line"))
    assert.same({ order }, manager:unit(order))
    local target = manager:unit(order, 5)
    target.mode = "shared"
    assert(manager:acquire(target)):release()
  end)

  it("raise where a name is none of them, and where an id is none", function()
    local manager = open { account, order }
    for message, call in pairs {
      ["unknown unit 'ordr'"] = function() manager:unit("ordr", 5) end,
      ["name must be a string"] = function() manager:unit(5) end,
      ["account is missing"] = function() manager:unit(order, nil) end,
      ["resource is missing"] = function() manager:unit(order, 5, nil) end,
      ["must not be empty"] = function() manager:unit(order, "") end,
      ["not a float"] = function() manager:unit(order, 5.5) end,
      ["has 2 levels for ids"] = function() manager:unit(order, 5, 6, 7) end,
      ["unknown unit 'order'"] = function() open():unit("order", 5) end,
      ["self must be a manager"] = function() manager.unit(order, 5) end,
    } do
      local ok, raised = pcall(call)
      assert.is_false(ok, message)
      assert.truthy(tostring(raised):find(message, 1, true), raised)
    end
    manager:close()
    assert.has_error(function() manager:unit(order, 5) end)
  end)

  it("are a list of distinct names", function()
    local many = {}
    for i = 1, 65 do many[i] = "unit " .. i end
    for _, wrong in ipairs { "order", 1, {}, { "" }, { 5 }, { "a\0b" }, { "a\nb" }, { "a", "a" }, { ("a"):rep(65) }, { order = 1 },
                             { "a", order = 1 }, { [2] = "a" }, many } do
      local ok, raised = pcall(hierlock.open, "null:", { units = wrong })
      assert.is_false(ok, support.encode(wrong))
      assert.truthy(raised:find("unit", 1, true), raised)
    end
    many[65] = nil
    managers[1] = assert(hierlock.open("null:", { units = many }))
    assert.same({ "unit 64", "1" }, managers[1]:unit("unit 64", 1))
    for _, wrong in ipairs { "raises", 1, {} } do
      assert.has_error(function() hierlock.open("null:", { check_order = wrong }) end)
    end
    assert.has_error(function() hierlock.open("null:", { warn_unreleased = "raise" }) end)
  end)
end)
