-- Hooks for traces: on_wait, on_grant, on_timeout, on_error, on_release, and on_lost beside them. Each
-- acquisition is told of from its beginning to its end, once each, in the state and the coroutine that
-- call; and what a hook does wrong leaves nothing locked.

local hierlock = require "hierlock"
local support = require "spec.support"
local loops = require "spec.support.loops"

local NAMES = { "on_wait", "on_grant", "on_timeout", "on_error", "on_release", "on_lost" }

-- Options with hooks that write down their events: {name, event, ...}; a hook's further work may be given by name.
-- `told()` gives the names, since it was last called.
local function recorder(also)
  local self = { heard = {}, options = {} }
  for _, name in ipairs(NAMES) do
    self.options[name] = function(...)
      self.heard[#self.heard + 1] = { name, ... }
      local extra = also and also[name]
      if extra then extra(...) end
    end
  end
  function self.told()
    local list = {}
    for i, call in ipairs(self.heard) do list[i] = call[1]:sub(4) end
    self.last, self.heard = self.heard, {}
    return table.concat(list, " ")
  end
  return self
end

local R1 = { "u1", "a1", "r1" }
local R1_NAMED = { user = "u1", account = "a1", resource = "r1" }

describe("hooks", function()
  local opened

  before_each(function() opened = {} end)
  after_each(function()
    support.close_peers()
    for _, one in ipairs(opened) do one:close() end
    opened = nil -- the hooks of the last spec keep its handles
  end)

  local function open_on(store, options)
    opened[#opened + 1] = support.open(store, options)
    return opened[#opened]
  end

  local function specs(store)
    local function open(options) return open_on(store, options) end

    it("hear of an acquisition from its beginning to its release, by one table", function()
      local seen
      local trace = recorder { on_wait = function(event)
        seen = { event.call, event.label, event.mode, event.targets[1], event.timeout, event.waited }
        event.span = "mine"
      end }
      local manager = open(trace.options)
      local handle = assert(manager:acquire(R1, { label = "l", timeout = 5 }))
      assert.same({ "acquire", "l", "exclusive", R1_NAMED, 5 }, seen)
      assert.equal("wait grant", trace.told())
      local event = trace.last[1][2]
      assert.equal(event, trace.last[2][2])
      assert.equal(handle, trace.last[2][3])
      assert.equal("mine", event.span)
      assert.equal(handle.token, event.token)
      assert.equal(handle.kind, event.kind)
      assert.equal(handle.waited, event.waited)
      assert.is_nil(event.held)
      support.sleep(0.02)
      handle:release()
      assert.equal("release", trace.told())
      assert.equal(event, trace.last[1][2])
      assert.equal("release", event.by)
      assert.is_true(event.held >= 0.0199 and event.held < 5, event.held)
      handle:release()
      handle:release { confirm = true }
      handle = nil -- luacheck: ignore
      support.collect()
      manager:stats()
      assert.equal("", trace.told())
    end)

    it("hear why it was not granted", function()
      local trace = recorder()
      local manager, other = open(trace.options), open()
      local held = assert(other:acquire({ "u1", "a1" }))
      local handle, err = manager:acquire(R1, { timeout = 0.03 })
      assert.is_nil(handle)
      assert.equal("wait timeout", trace.told())
      assert.equal(err, trace.last[2][3])
      assert.equal(trace.last[1][2], trace.last[2][2])
      assert.equal("timeout", err.code)
      assert.same(err.holders, trace.last[2][3].holders)
      assert.equal("timeout", select(2, manager:acquire(R1, { timeout = 0 })).code)
      assert.equal("wait timeout", trace.told())
      held:release { confirm = true }
      assert(manager:acquire(R1))
      assert.equal("wait grant", trace.told())
    end)

    it("hear of whatever releases, once, and of the collector at the next call", function()
      local trace = recorder()
      local manager = open(trace.options)
      assert(manager:acquire(R1))
      assert.equal("wait grant", trace.told())
      trace.last = nil
      support.collect()
      assert.equal("", trace.told())
      support.wait_until(function() manager:stats() return #trace.heard > 0 end, "on_release")
      assert.equal("release", trace.told())
      assert.equal("collector", trace.last[1][2].by)

      assert.equal(5, manager:with(R1, function() return 5 end))
      assert.equal("wait grant release", trace.told())
      assert.is_false(pcall(manager.with, manager, R1, function() error "x" end))
      assert.equal("wait grant release", trace.told())
      if _VERSION >= "Lua 5.4" then
        load [[ local manager, target = ... do local handle <close> = assert(manager:acquire(target)) end ]] (manager, R1)
        assert.equal("wait grant release", trace.told())
        assert.equal("scope", trace.last[3][2].by)
      end
      local handle = assert(manager:acquire(R1))
      local all = assert(manager:acquire_all { { "v1" }, { user = "v2", account = "a", mode = "shared" } })
      assert.same({ { user = "v1" }, { user = "v2", account = "a", mode = "exclusive" } }, trace.heard[3][2].targets)
      trace.told()
      manager:close()
      assert.equal("release release", trace.told())
      assert.equal("manager", trace.last[1][2].by)
      assert.is_false(handle:is_held() or all:is_held())
      handle:release()
      assert.equal("", trace.told())
    end)

    it("hear of a pending when its result is taken, or when it is cancelled", function()
      local trace = recorder()
      local manager = open(trace.options)
      local pending = manager:start(R1)
      assert.equal("wait", trace.told())
      local handle = assert(pending:wait())
      assert.equal("grant", trace.told())
      assert.equal(handle, trace.last[1][3])
      handle:release()
      assert.equal("release", trace.told())

      pending = manager:start(R1)
      pending:cancel()
      assert.equal("wait error", trace.told())
      assert.equal("cancelled", trace.last[2][3].code)
      pending:wait()
      pending = nil -- luacheck: ignore
      support.collect()
      manager:stats()
      assert.equal("", trace.told())

      assert(manager:start(R1))
      support.collect()
      support.wait_until(function() manager:stats() return #trace.heard == 2 end, "on_error")
      assert.equal("wait error", trace.told())

      handle = assert(manager:acquire(R1))
      local other = open(trace.options)
      trace.told()
      pending = other:start(R1, { timeout = 0.02 })
      assert.is_nil((pending:wait()))
      assert.equal("wait timeout", trace.told())
      pending = other:start(R1)
      other:close()
      assert.equal("wait error", trace.told())
      assert.equal("cancelled", select(2, pending:wait()).code)
      assert.equal("", trace.told())
      handle:release()
    end)

    it("do not spoil a lock when they raise or yield: it is not locked, or it is released", function()
      for name, chunk in pairs { raises = function() error({ "mine" }) end, yields = function() coroutine.yield(1) end } do
        local which
        local trace = recorder()
        local options = {}
        for _, hook in ipairs(NAMES) do
          options[hook] = function(...)
            trace.options[hook](...)
            if which == hook then chunk() end
          end
        end
        local manager, other = open(options), open()
        local function free()
          local got = assert(other:acquire(R1, { timeout = 5 }))
          got:release { confirm = true }
          assert.equal(0, manager:stats().held)
        end
        local function fails(fn)
          local thread = coroutine.create(fn)
          local ok, raised = coroutine.resume(thread)
          assert.is_false(ok, name)
          if name == "raises" then assert.same({ "mine" }, raised) else assert.matches("attempt to yield", raised) end
        end

        which = "on_wait"
        fails(function() manager:acquire(R1) end)
        assert.equal("wait", trace.told())
        fails(function() manager:start(R1) end)
        fails(function() manager:with(R1, function() end) end)
        which = nil
        free()
        trace.told()

        which = "on_grant"
        fails(function() manager:acquire(R1) end)
        assert.equal("wait grant", trace.told())
        which = nil
        free()
        assert.equal("release", trace.told())
        assert.equal("error", trace.last[1][2].by)
        which = "on_grant"
        fails(function() manager:start(R1):wait() end)
        which = nil
        free()
        assert.equal("wait grant release", trace.told())

        local handle = assert(manager:acquire(R1))
        which = "on_release"
        fails(function() handle:release() end)
        which = nil
        assert.equal("wait grant release", trace.told())
        free()
        assert.is_true(handle:release())

        handle = assert(other:acquire(R1))
        which = "on_timeout"
        fails(function() manager:acquire(R1, { timeout = 0 }) end)
        which = nil
        assert.equal("wait timeout", trace.told())
        handle:release { confirm = true }
        free()
      end
    end)

    it("may call hierlock, which calls no hooks then", function()
      local manager
      local function lock() assert(manager:acquire { "own" }):release() end
      local trace = recorder { on_wait = lock, on_grant = lock, on_release = lock, on_timeout = lock }
      manager = open(trace.options)
      local other = assert(open():acquire { "u2" })
      assert(manager:acquire(R1)):release()
      assert.equal("wait grant release", trace.told())
      assert.is_nil((manager:acquire({ "u2" }, { timeout = 0 })))
      assert.equal("wait timeout", trace.told())
      other:release()
      assert.equal(manager:stats().held, 0)
    end)

    it("may release what was acquired outside of them", function()
      local manager, handle
      local trace = recorder { on_wait = function() if handle then handle:release() end end }
      manager = open(trace.options)
      handle = assert(manager:acquire(R1))
      local same = assert(manager:acquire(R1)) -- else it would wait for itself
      assert.equal("wait grant wait grant", trace.told())
      same:release() -- and tells what was released before
      assert.equal("release release", trace.told())
    end)

    it("may close the manager", function()
      for _, hook in ipairs { "on_wait", "on_grant", "on_release" } do
        local manager
        local trace = recorder { [hook] = function() manager:close() end }
        manager = open(trace.options)
        local ok, handle = pcall(manager.acquire, manager, R1)
        assert.equal(hook ~= "on_wait", ok)
        if ok then handle:release() end
        support.collect()
        assert.is_truthy(assert(open():acquire(R1, { timeout = 5 })):release { confirm = true })
      end
    end)

    it("are each thread's own", function()
      local thread = support.thread(store)
      assert.same("wait grant release", (thread:call([[
        local dsn, options = ...
        local names = {}
        for _, hook in ipairs { "on_wait", "on_grant", "on_release" } do
          options[hook] = function() names[#names + 1] = hook:sub(4) end
        end
        local own = assert(hierlock.open(dsn, options))
        for _ = 1, 20 do assert(own:acquire { "thread" }):release() end
        own:close()
        assert(#names == 60)
        return table.concat(names, " ", 58)
      ]], store.dsn, store.options)))
    end)

    it("run in the coroutine that waits", function()
      for _, name in ipairs(loops.names) do
        local loop = loops[name]()
        local where, threads = {}, {}
        local trace = recorder {
          on_wait = function() where[#where + 1] = coroutine.running() end,
          on_grant = function() where[#where + 1] = coroutine.running() end,
        }
        trace.options.loop = loop.option
        local manager, blocker = open(trace.options), open()
        local held = assert(blocker:acquire(R1))
        local done = 0
        for i = 1, 2 do
          loop.spawn(function()
            threads[i] = coroutine.running()
            assert(manager:acquire(R1)):release()
            done = done + 1
          end)
        end
        assert.equal("wait wait", trace.told())
        held:release()
        support.wait_until(function() loop.step() return done == 2 end, "both")
        assert.equal("grant release grant release", trace.told())
        assert.equal(where[1], threads[1])
        assert.equal(where[2], threads[2])
        assert.is_true(where[3] ~= where[4] and (where[3] == threads[1] or where[3] == threads[2]))
        assert.is_nil(select(2, pcall(loop.close)))
        manager:close()
      end
    end)
  end

  support.each_store(specs)
  support.on_redis(specs)
  support.on_sqlite(specs)
  support.on_memcached(specs)

  support.each_leasing_store(function(plain)
    local store = support.leased(plain)
    setup(function() store.prepare() end)

    it("hear of leases: revoked, over, handed over", function()
      local trace = recorder()
      local manager, other = open_on(store, trace.options), open_on(store)
      local handle = assert(manager:acquire(R1, { ttl = 30, owner = "me" }))
      assert.equal("me", trace.heard[1][2].owner)
      assert.equal(30, trace.heard[1][2].ttl)
      assert.equal("lease", trace.heard[2][2].kind)
      assert.equal("wait grant", trace.told())
      assert.equal(1, assert(other:revoke({ target = R1, owner = "me" }, { by = "op", reason = "why" })))
      assert.equal("lost", select(2, handle:refresh()).code)
      manager:stats()
      assert.equal("lost release", trace.told())
      assert.equal(handle, trace.last[1][2])
      assert.equal("op", trace.last[1][3].revoked_by)
      assert.equal(trace.last[1][4], trace.last[2][2]) -- the event
      assert.equal("lost", trace.last[2][2].by)
      handle:release()
      assert.equal("", trace.told())

      handle = assert(manager:acquire(R1, { ttl = 30 }))
      local text = assert(handle:export())
      assert.equal("wait grant release", trace.told())
      assert.equal("export", trace.last[3][2].by)
      handle = assert(manager:import(text))
      assert.equal("wait grant", trace.told())
      assert.equal("import", trace.last[1][2].call)
      assert.same(R1_NAMED, trace.last[1][2].targets[1])
      handle:release { confirm = true }
      assert.equal("release", trace.told())
      assert.is_nil((manager:import(text)))
      assert.equal("wait error", trace.told())

      local raising = open_on(store, { on_release = function() error "by the hook" end })
      handle = assert(raising:acquire(R1, { ttl = 30 }))
      assert.is_false((pcall(handle.export, handle)))
      assert.is_true(handle:check())
      assert.is_true(handle:release { confirm = true }) -- and nothing stays locked
      assert(manager:acquire(R1, { timeout = 0 })):release { confirm = true }
      trace.told()

      local ttl = store.name == "memcached" and 2 or 0.2
      handle = assert(manager:acquire(R1, { ttl = ttl }))
      assert.equal("wait grant", trace.told())
      support.wait_until(function() -- what remains is rounded down: the loss is told behind it
        manager:stats()
        return trace.told() == "lost" -- a refresh may have it back
      end, "its end")
      handle:release()
      assert.is_truthy(("release"):find(trace.told(), 1, true))
    end)
  end)

  support.each_connection(function(store)
    it("hear of a lock that was lost, and then of its end", function()
      local trace = recorder()
      local manager = open_on(store, trace.options)
      local handle = assert(manager:acquire(R1))
      trace.told()
      store.kill(store.transactions()[1])
      support.wait_until(function() manager:stats() return #trace.heard > 0 end, "on_lost")
      assert.equal("lost release", trace.told())
      assert.equal(handle, trace.last[1][2])
      assert.equal(1, manager:stats().levels[3].holds.count)
      handle:release()
      assert.equal("", trace.told())
      -- Or found by the release itself.
      handle = assert(manager:acquire(R1))
      trace.told()
      store.kill(store.transactions()[1])
      support.wait_until(function() return not handle:release { confirm = true } or #trace.heard > 0 end, "the loss")
      manager:stats()
      assert.matches("release", trace.told())
      manager:stats()
      assert.equal("", trace.told())
    end)
  end)

  support.each_store(function(store)
    it("hear of an extend as of a wait of its own", function()
      local trace = recorder()
      local manager, other = open_on(store, trace.options), open_on(store)
      local handle = assert(manager:acquire(R1))
      local blocker = assert(other:acquire { "u3" })
      trace.told()
      assert.is_true(handle:extend({ "u2" }, { label = "more" }))
      assert.equal("wait grant", trace.told())
      assert.equal("extend", trace.last[1][2].call)
      assert.equal("more", trace.last[1][2].label)
      assert.same({ { user = "u2" } }, trace.last[1][2].targets)
      assert.equal(handle, trace.last[2][3])
      assert.is_nil((handle:extend({ "u3" }, { timeout = 0 })))
      assert.equal("wait timeout", trace.told())
      handle:release()
      assert.equal("release", trace.told())
      assert.equal("acquire", trace.last[1][2].call)
      blocker:release()
    end)
  end)

  it("are functions, else it is misuse; others are unknown options", function()
    for _, name in ipairs(NAMES) do
      local ok, message = pcall(hierlock.open, "null:", { [name] = {} })
      assert.is_false(ok)
      assert.matches(name .. " must be a function, not table", message)
    end
    assert.is_false(pcall(hierlock.open, "null:", { on_waiting = print }))
    local manager = assert(hierlock.open("null:"))
    opened = { manager }
    assert.is_false(pcall(manager.acquire, manager, R1, { on_wait = print }))
  end)

  it("need not all be there", function()
    for _, name in ipairs { "on_wait", "on_grant", "on_release" } do
      local n = 0
      local manager = assert(hierlock.open("null:", { [name] = function() n = n + 1 end }))
      assert(manager:acquire(R1)):release()
      assert.equal(1, n)
      manager:acquire(R1) -- collected
      support.collect()
      manager:close()
      assert.equal(2, n)
    end
  end)

  it("keep nothing from the collector once it is told", function()
    local weak = setmetatable({}, { __mode = "k" })
    local manager = assert(hierlock.open("null:", {
      on_wait = function(event) weak[event] = true end,
      on_grant = function(_, handle) weak[handle] = true end,
    }))
    opened = { manager }
    for _ = 1, 50 do assert(manager:acquire(R1)):release() end
    for _ = 1, 50 do manager:acquire(R1) end
    for _ = 1, 50 do manager:start(R1) end
    for _ = 1, 3 do
      support.collect()
      manager:stats()
    end
    support.collect()
    assert.is_nil(next(weak))
  end)

  it("hear of each call once, whatever becomes of it", function()
    local store = support.stores[1]
    store.prepare()
    local heard, wrong = { wait = 0, grant = 0, outcome = 0, release = 0 }, {}
    local function step(name, before, after)
      return function(event)
        if event.state ~= before then wrong[#wrong + 1] = name .. " after " .. tostring(event.state) end
        local extended = name == "grant" and event.call == "extend"
        event.state = extended and "done" or after
        local what = extended and "extended" or name
        heard[what] = (heard[what] or 0) + 1
        if before == "waits" then heard.outcome = heard.outcome + 1 end
      end
    end
    local manager = open_on(store, {
      timeout = 0.005, on_wait = step("wait", nil, "waits"), on_grant = step("grant", "waits", "held"),
      on_timeout = step("timeout", "waits", "done"), on_error = step("error", "waits", "done"),
      on_release = step("release", "held", "done"),
    })
    local handles, pendings = {}, {}
    local function some(list) return list[math.random(6)] end
    local function put(list, value) list[math.random(6)] = value end
    local function target() return { "u" .. math.random(3), math.random(2) == 1 and "a" or nil } end
    local calls = {
      function() put(handles, manager:acquire(target())) end,
      function() put(handles, manager:acquire(target(), { ttl = math.random(3) == 1 and 0.004 or 5 })) end,
      function() put(pendings, manager:start(target())) end,
      function() put(pendings, nil) end,
      function() put(handles, nil) end,
      function() if some(pendings) then put(handles, some(pendings):wait(0.01)) end end,
      function() if some(pendings) then some(pendings):cancel() end end,
      function() if some(handles) then some(handles):release { confirm = math.random(2) == 1 } end end,
      function() if some(handles) then some(handles):extend(target(), { timeout = 0 }) end end,
      function() if some(handles) then some(handles):refresh() end end,
      function() if some(handles) then some(handles):to_lease { ttl = 1 } end end,
      function()
        local text = some(handles) and some(handles):export()
        if text then put(handles, manager:import(text)) end
      end,
      function() manager:with(target(), function() error "x" end) end,
      function() collectgarbage() end,
    }
    -- Some are misuse: what a pending has given it gives no more.
    for _ = 1, 800 do pcall(calls[math.random(#calls)]) end
    handles, pendings = {}, {} -- luacheck: ignore
    support.collect()
    manager:close()
    assert.same({}, wrong)
    assert.is_true(heard.wait > 100 and heard.timeout > 0 and heard.release > 20)
    assert.equal(heard.wait, heard.outcome)
    assert.equal(heard.grant, heard.release)
  end)

  it("are not called in a forked child for what its parent does", function()
    local peer = support.process(support.stores[1])
    local parent, child = peer:call([[
      local fork, names = require "hierlock_spec.fork", {}
      local options = {}
      for _, hook in ipairs { "on_wait", "on_grant", "on_release", "on_error" } do
        options[hook] = function() names[#names + 1] = hook:sub(4) end
      end
      local own = assert(hierlock.open("null:", options))
      local handle, pending = assert(own:acquire { "u" }), own:start { "u" }
      names = {}
      local pid = fork.fork()
      if pid == 0 then
        handle:release()
        handle, pending = nil, nil
        collectgarbage() collectgarbage()
        own:stats()
        own:close()
        os.exit(#names)
      end
      local status = fork.wait(pid)
      assert(pending:wait()):release()
      handle:release()
      return table.concat(names, " "), status
    ]])
    assert.equal("grant release release", parent)
    assert.equal(0, child)
  end)
end)
