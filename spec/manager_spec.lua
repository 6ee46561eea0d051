-- Managers: opening, the default one of the module, closing in every way, and their reports. on_lost and the specs
-- with servers are elsewhere.

local hierlock = require "hierlock"
local support = require "spec.support"

local embedded = support.stores[1]

describe("a manager", function()
  local managers = {}
  local function open(options, dsn)
    local manager = dsn and assert(hierlock.open(dsn, options)) or support.open(embedded, options)
    managers[#managers + 1] = manager
    return manager
  end
  after_each(function()
    while #managers > 0 do table.remove(managers):close() end
  end)

  local function is_free(target)
    local handle = open():acquire(target, { timeout = 0 })
    if handle then handle:release() end
    return handle ~= nil
  end

  describe("when opened", function()
    it("waits as long as its timeout says, unless the call has one of its own", function()
      local held = assert(open():acquire { "m1" })
      local manager = open { timeout = 0.05 }
      for timeout, least in pairs { [false] = 0.05, [0.1] = 0.1, [0] = 0 } do
        local before = support.now()
        local _, err = manager:acquire({ "m1" }, timeout and { timeout = timeout } or nil)
        local took = support.now() - before
        assert.equal("timeout", err.code)
        assert.is_true(took >= least - 0.002 and took < least + 1, took)
      end
      held:release()
    end)

    it("has the levels user, account and resource by default", function()
      local handle = assert(open():acquire { user = "m1", account = "a", resource = "r" })
      assert.equal(2, handle.level)
      handle:release()
    end)

    it("can have levels of its own, and then their keys", function()
      local manager = open({ levels = { "tenant", "project", "run", "step" } }, "file:" .. embedded.directory .. "/levels")
      local handle = assert(manager:acquire { tenant = "t", project = "p", run = "r", steps = { "1", "2" } })
      assert.equal(3, handle.level)
      assert.same({ { tenant = "t", project = "p", run = "r", step = "1" }, { tenant = "t", project = "p", run = "r", step = "2" } },
                  handle.targets)
      assert.equal("timeout", select(2, manager:acquire({ tenant = "t" }, { timeout = 0 })).code)
      local other = assert(manager:acquire({ "t", "p", "r", "3" }, { mode = "shared", timeout = 0 }))
      assert.equal("shared", other.mode)
      for method, n in pairs { acquire_user = 1, acquire_account = 2, acquire_resource = 3 } do
        local ok, message = pcall(manager[method], manager, "t", n > 1 and "p" or nil, n > 2 and "r" or nil)
        assert.is_false(ok)
        assert.matches("'user'", message)
      end
      local ok, message = pcall(manager.acquire_resources, manager, "t", "p", { "r" })
      assert.is_false(ok)
      assert.matches("'user'", message)
      ok, message = pcall(manager.acquire, manager, { user = "t" })
      assert.is_false(ok)
      assert.matches("unknown key 'user'", message)
    end)

    it("can have the default levels' names at other places, and then refuses their methods", function()
      local manager = open({ levels = { "account", "user" } }, "null:")
      assert.is_false(pcall(manager.acquire_user, manager, "u"))
      assert.is_false(pcall(manager.acquire_account, manager, "u", "a"))
      assert.is_truthy(manager:acquire { account = "a", user = "u" })
    end)

    it("can have one level, or sixteen", function()
      local names, target = {}, {}
      for i = 1, 16 do names[i], target[i] = "l" .. i, i end
      local handle = assert(open({ levels = names }, "file:" .. embedded.directory .. "/deep"):acquire(target))
      assert.equal(15, handle.level)
      handle = assert(open({ levels = { "lock" } }, "file:" .. embedded.directory .. "/flat"):acquire({ lock = "x" }, { mode = "shared" }))
      assert.same({ 0, "shared" }, { handle.level, handle.mode })
    end)

    it("is refused on a space with other buckets or levels", function()
      open() -- the first one decides of them
      for option, value in pairs { buckets = 123, levels = { "user", "account" } } do
        local options = { buckets = embedded.options.buckets }
        options[option] = value
        local manager, err = hierlock.open(embedded.dsn, options)
        assert.is_nil(manager)
        assert.equal("mismatch", err.code)
      end
    end)

    it("shows its application and the label to observers, and by default the program's name", function()
      local handle = assert(open({ application = "an \1application" }):acquire({ "m1", "a" }, { label = "a\nlabel" }))
      local seen = assert(open():holders { "m1" })
      assert.equal(1, #seen)
      assert.equal([[an \x01application]], seen[1].application)
      assert.matches("^a.+label$", seen[1].label)
      assert.is_nil(seen[1].label:find("\n"))
      handle:release()
      support.keep(assert(open():acquire { "m1" }))
      assert.is_true(#assert(open():holders { "m1" })[1].application > 0)
    end)

    it("may be told to block, by the option loop", function()
      assert(open({ loop = "block" }):acquire { "m1" })
    end)

    it("shares a directory with others of its process, which exclude each other", function()
      local many = {}
      for i = 1, 50 do many[i] = open() end
      local handle = assert(many[1]:acquire { "m1" })
      for i = 2, 50 do assert.equal("timeout", select(2, many[i]:acquire({ "m1" }, { timeout = 0 })).code) end
      many[1]:close()
      assert.is_false(handle:is_held())
      for i = 2, 50 do assert(many[i]:acquire({ "m1" }, { timeout = 0 })):release() end
    end)
  end)

  describe("when closed", function()
    local function held_by(manager)
      return support.keep(assert(manager:acquire { "m1", "a", "r1" })),
        support.keep(assert(manager:acquire({ "m1", "a", "r2" }, { mode = "shared" })))
    end

    it("releases everything, once and for all", function()
      local manager = open()
      held_by(manager)
      assert.is_false(is_free { "m1" })
      assert.is_true(manager:close())
      assert.is_true(is_free { "m1" })
      assert.is_true(manager:close())
    end)

    it("leaves handles that are released", function()
      local manager = open()
      local handle = held_by(manager)
      manager:close()
      assert.is_false(handle:is_held())
      assert.equal(0, handle:remaining())
      assert.equal("released", select(2, handle:check()).code)
      assert.equal("released", select(2, handle:extend { "m2" }).code)
      assert.is_true(handle:release())
      assert.is_true(handle:release { confirm = true })
      assert.matches("released", tostring(handle))
      assert.equal("exclusive", handle.mode)
      assert.equal(16, #handle.token)
      assert.equal("m1", handle.targets[1].user)
      assert.is_true(is_free { "m2" })
    end)

    it("does not touch what others hold", function()
      local kept = assert(open():acquire { "m2" })
      local manager = open()
      held_by(manager)
      manager:close()
      assert.is_true(kept:check())
      assert.is_false(is_free { "m2" })
    end)

    it("is closed by the collector, and then releases", function()
      do
        local manager = support.open(embedded)
        manager:acquire { "m1" }
        manager:acquire { "m2" }
      end
      support.collect()
      assert.is_true(is_free { "m1" } and is_free { "m2" })
    end)

    it("is not collected while one of its handles lives", function()
      local handle = assert(support.open(embedded):acquire { "m1" })
      support.collect()
      assert.is_true(handle:is_held())
      assert.is_false(is_free { "m1" })
      handle:release()
    end)

    it("gives a handle's lock back with the handle", function()
      local manager = open()
      assert(manager:acquire { "m1" })
      support.collect()
      assert.is_true(is_free { "m1" })
      assert.equal(0, manager:stats().held)
    end)

    if _VERSION >= "Lua 5.4" then
      it("is closed by the end of the scope of a <close> variable, and so is a handle", function()
        local run = load([[
          local manager, is_free, fail = ...
          local m <close> = manager
          do
            local handle <close> = assert(m:acquire { "m1" })
            local extra <close> = assert(m:acquire { "m2" })
            extra:release()
            if fail then error("failed", 0) end
          end
          assert(is_free { "m1" })
          assert(m:acquire { "m1" })
          return m:stats().held
        ]])
        assert.equal(1, run(open(), is_free))
        assert.is_true(is_free { "m1" })
        assert.same({ false, "failed" }, { pcall(run, open(), is_free, true) })
        assert.is_true(is_free { "m1" })
      end)
    end

    it("can be closed while a <close> or collector comes later", function()
      local manager = open()
      manager:close()
      manager = nil -- luacheck: ignore
      support.collect()
    end)
  end)

  describe("counts", function()
    it("what it has done, in stats", function()
      local manager, other = open(), open()
      local handle = assert(manager:acquire { "m1" })
      support.keep(assert(manager:acquire { "m2" }))
      assert.equal("timeout", select(2, manager:acquire({ "m1" }, { timeout = 0.02 })).code)
      assert.equal("timeout", select(2, handle:extend({ "m2" }, { timeout = 0 })).code)
      handle:release()
      handle:release()
      local stats = manager:stats()
      assert.same({ 2, 1, 1, 0, 0, 0, 0, 0 }, { stats.acquired, stats.released, stats.held, stats.waiting, stats.deadlocks,
                                               stats.lost, stats.errors, stats.cancelled })
      assert.equal(2, stats.timeouts)
      assert.is_true(stats.wait_seconds >= 0.015 and stats.wait_seconds < 5, stats.wait_seconds)
      assert.equal(0, other:stats().acquired)
    end)

    it("grants that had to wait", function()
      local peer = support.process(embedded)
      finally(support.close_peers)
      assert.is_true(peer:acquire("h", "acquire", { "m1" }):result())
      peer:start([[
        support.wait_until(function() return #manager:holders { "m1" } == 2 end)
        support.sleep(0.01) -- for the clocks
        handles.h:release()
        return true
      ]])
      local manager = open()
      local handle = assert(manager:acquire { "m1" })
      assert.is_true(peer:result())
      assert.is_true(handle.waited > 0)
      assert.equal(1, manager:stats().waited)
      assert.is_true(math.abs(manager:stats().wait_seconds - handle.waited) < 0.01)
    end)
  end)

  it("plans as it locks, with its levels and buckets", function()
    local manager = open()
    local plan = manager:plan({ { "m1", "a" } }, { mode = "shared" })
    assert.same({ levels = { "user", "account", "resource" }, buckets = embedded.options.buckets }, plan:layout())
    assert.same(hierlock.plan({ { "m1", "a" } }, { buckets = embedded.options.buckets }):rows(), plan:rows())
    assert.equal("hierlock.plan (m1/a)", tostring(plan))
    assert.is_nil(plan:rows()[1].key)
    local other = open({ levels = { "shop", "till" } }, "null:")
    assert.same({ "shop", "till" }, other:plan({ { shop = "s" } }):layout().levels)
    assert.has_error(function() manager:plan { { "a", "b", "c", "d" } } end)
    manager:close()
    assert.has_error(function() manager:plan { { "a" } } end)
  end)

  describe("tells by holders", function()
    it("who holds and awaits what an exclusive lock would wait for", function()
      local peer = support.process(embedded, { application = "peer" })
      finally(support.close_peers)
      local manager = open { application = "here" }
      local handle = assert(manager:acquire({ "m1", "a", "r" }, { mode = "shared", label = "l" }))
      support.keep(assert(manager:acquire { "m2" }))
      peer:acquire("h", "acquire", { "m1", "a" }, { label = "waits" })
      support.wait_until(function() return embedded.waiting({ "m1" }) == 1 end)
      local seen = {}
      for _, holder in ipairs(assert(manager:holders { "m1" })) do seen[holder.application] = holder end
      local now = os.time()
      for name, expected in pairs { here = { label = "l", path = "m1/a/r", mode = "shared", waiting = false },
                                    peer = { label = "waits", path = "m1/a", mode = "exclusive", waiting = true, pid = peer.pid } } do
        for field, value in pairs(expected) do assert.equal(value, seen[name][field], name .. "." .. field) end
        assert.is_true(math.abs(seen[name].since - now) < 60)
        assert.is_true(seen[name].pid > 0)
        assert.is_string(seen[name].host)
      end
      handle:release()
      assert.is_true(peer:result())
    end)

    it("all who hold or await anything, without a target", function()
      local peer = support.process(embedded, { application = "peer" })
      finally(support.close_peers)
      local manager = open { application = "here" }
      support.keep(assert(manager:acquire { "m2" }))
      assert.is_true(peer:acquire("h", "acquire", { "m3, m2/x" }):result())
      peer:start [[ return handles.h:extend { "m2", "a" } ]]
      support.wait_until(function() return embedded.waiting { "m2" } == 1 end)
      local lines = {}
      for i, holder in ipairs(assert(manager:holders())) do
        lines[i] = ("%s %s %s"):format(holder.application, holder.waiting and "awaits" or "holds", holder.path)
        assert.is_string(holder.session)
      end
      table.sort(lines)
      -- An id with a comma can be told from two targets.
      assert.same({ "here holds m2", "peer awaits m3%2C m2%2Fx, m2/a", "peer holds m3%2C m2%2Fx" }, lines)
      assert.same({}, open({}, "null:"):holders())
    end)

    it("nobody, where nobody is", function()
      assert.same({}, open():holders { "m1", "a" })
      assert.same({}, open({}, "null:"):holders { "m1" })
    end)
  end)
end)

describe("the default manager", function()
  it("is opened at first use, shared by all functions of the module, and opened again when closed", function()
    local directory = embedded.directory .. "/default"
    local output, status = support.run(([[
      local hierlock = require "hierlock"
      assert(not io.open("%s/control"), "opened too early")
      local a = assert(hierlock.acquire({ "u1" }))
      local function refused(handle, err) assert(not handle and err.code == "timeout") end
      local try = { timeout = 0 }
      refused(hierlock.acquire_user("u1", try))
      refused(hierlock.acquire_account("u1", "a", try))
      refused(hierlock.acquire_resource("u1", "a", "r", try))
      refused(hierlock.acquire_resources("u1", "a", { "r" }, try))
      refused(hierlock.acquire_all({ { "u1" } }, try))
      refused(hierlock.with({ "u1" }, try, print))
      assert(#hierlock.holders { "u1" } == 1)
      a:release()
      assert(hierlock.acquire_user("u1")):release()
      assert(hierlock.acquire_account("u1", "a")):release()
      assert(hierlock.acquire_resource("u1", "a", "r")):release()
      assert(hierlock.acquire_resources("u1", "a", { "r", "s" })):release()
      assert(hierlock.acquire_all { { "u1" }, { "u2", "a" } }):release()
      assert(hierlock.with({ "u1" }, function() return "done" end) == "done")
      assert(io.open("%s/control")):close()
      io.write("fine")
    ]]):format(directory, directory), "HIERLOCK_DSN='file:" .. directory .. "'")
    assert.equal("fine", output)
    assert.equal(0, status)
  end)

  it("is nil, err where it cannot be opened, and is tried again", function()
    local output = support.run([[
      local hierlock = require "hierlock"
      for _, name in ipairs { "acquire", "acquire_user", "acquire_account", "acquire_resource", "acquire_resources", "acquire_all", "holders" } do
        local nothing, err = hierlock[name]("u")
        assert(nothing == nil and err.code == "dsn", name)
      end
      io.write(select(2, hierlock.with({ "u" }, print)).code)
    ]], "HIERLOCK_DSN=nonsense")
    assert.equal("dsn", output)
  end)
end)

describe("the store null:", function()
  it("grants everything at once, for tests of other programs", function()
    local manager = assert(hierlock.open("null:"))
    local handles, last = {}, ""
    for i = 1, 100 do
      handles[i] = assert(manager:acquire({ "u1" }, { timeout = 0 }))
      assert.is_true(handles[i]:is_held() and handles[i]:check() and handles[i]:extend { "u2" })
      assert.equal(math.huge, handles[i]:remaining())
      assert.is_true(handles[i].token > last)
      last = handles[i].token
    end
    assert.equal(100, manager:stats().held)
    manager:close()
    for i = 1, 100 do assert.is_false(handles[i]:is_held()) end
  end)

  it("begins its tokens with the second of the first, so that they grow from process to process", function()
    local before = os.time()
    local token = support.run [[
      io.write(assert(assert(require("hierlock").open("null:")):acquire { "u1" }).token)
    ]]
    local second = tonumber(token:sub(1, 8), 16)
    assert.is_true(before <= second and second <= os.time(), token)
  end)
end)
