-- The effects of a fork on a lock, on every store: a child has none of its parent's locks, and keeps none for it.

local uv = require "luv"
local support = require "spec.support"

local R1 = { "u1", "a1", "r1" }

-- A release must reach a waiter so soon.
local PROMPT = 1.5

-- In a peer: acquires, forks, and lets the child do this. Returns the child's pid.
local function fork_and(body)
  return [[
    local fork = require "hierlock_spec.fork"
    handles.lock = assert(manager:acquire(...))
    local pid = fork.fork()
    if pid == 0 then
      local ok, err = pcall(function() ]] .. body .. [[ end)
      if not ok then io.stderr:write("in the child: ", tostring(err), "\n") end
      fork.exit(ok and 0 or 1)
    end
    return pid
  ]]
end

-- In the same peer: the child's exit status, and whether the parent still holds.
local WAIT = [[
  local status = require("hierlock_spec.fork").wait(...)
  return status, handles.lock:is_held(), (handles.lock:check())
]]

local CHILDREN = {
  { "ends by os.exit", "os.exit(0)" },
  { "ends by os.exit and closes its Lua state", "os.exit(0, true)" },
  { "ends by _exit", "fork.exit(0)" },
  { "collects its copy of the handle", "handles.lock = nil collectgarbage() collectgarbage()" },
  { "closes its copy of the manager", "manager:close() handles.lock = nil collectgarbage()" },
  { "looks at the counters, which begin anew", [[
    local stats = manager:stats()
    assert(stats.held == 0 and stats.acquired == 0 and stats.connections == 0, "its parent's")
    for _, level in ipairs(stats.levels) do assert(level.waits.count == 0 and level.holds.count == 0, "its parent's") end
  ]] },
  { "releases its copy of the handle, which is dead", [[
    local lock = handles.lock
    assert(lock:is_held() == false and lock:remaining() == 0)
    for _, method in ipairs { "release", "check" } do
      local ok, err = lock[method](lock)
      assert(ok == nil and err.code == "released", method)
    end
    local ok, err = lock:extend { "u1", "a1", "r2" }
    assert(ok == nil and err.code == "released", "extend")
  ]] },
  { "uses the manager, which works afresh", [[
    local lock = assert(manager:acquire({ "u1", "a1", "r2" }, { timeout = 5 }))
    assert(lock:check())
    local none, err = manager:acquire({ "u1", "a1", "r1" }, { timeout = 0 })
    assert(none == nil, "it got what its parent holds")
    assert(err.code == "timeout", err)
    assert(lock:release { confirm = true })
    assert(manager:stats().acquired == 1)
  ]] },
}

describe("a fork", function()
  support.each_store(function(store)
    local manager, orphan

    before_each(function()
      orphan = nil
      manager = support.open(store)
    end)

    after_each(function()
      if orphan then uv.kill(orphan, "sigkill") end
      support.close_peers()
      manager:close()
    end)

    for _, child in ipairs(CHILDREN) do
      it(("leaves a lock with its holder when a forked child %s"):format(child[1]), function()
        local peer = support.process(store)
        orphan = peer:call(fork_and(child[2]), R1)
        local status, is_held, checked = peer:call(WAIT, orphan)
        orphan = nil
        assert.equal(0, status)
        assert.is_true(is_held)
        assert.is_true(checked)
        local none, err = manager:acquire(R1, { timeout = 0 })
        assert.is_nil(none)
        assert.equal("timeout", err.code)
        assert.is_true(peer:release("lock"))
        assert(manager:acquire({ "u1" }, { timeout = 0 }))
      end)
    end

    it("leaves a wait with the parent, whom the child's own cancelled wait does not concern", function()
      local blocker = assert(manager:acquire(R1))
      local peer = support.process(store)
      local status = peer:call([[
        local fork = require "hierlock_spec.fork"
        handles.pending = assert(manager:start(..., { timeout = 60 }))
        support.sleep(0.3)
        local pid = fork.fork()
        if pid > 0 then return (fork.wait(pid)) end
        local pending = assert(manager:start(..., { timeout = 60 }))
        local ok = not pending:wait(0.3)
        pending:cancel()
        manager:close()
        os.exit(ok and 0 or 1)
      ]], R1)
      assert.equal(0, status)
      support.wait_for_waiters(store, R1)
      peer:call "handles.pending:cancel()"
      support.wait_until(function() return store.waiting(R1) == 0 end, "the end of the wait")
      assert.is_true(blocker:release { confirm = true })
      assert(manager:acquire({ "u1" }, { timeout = 2 })):release()
    end)

    it("leaves a pending with the parent, whatever the child does with its copy", function()
      local blocker = assert(manager:acquire(R1))
      local peer = support.process(store)
      local status, readable = peer:call([[
        local fork, uv = require "hierlock_spec.fork", require "luv"
        local target = ...
        handles.pending = assert(manager:start(target, { timeout = 60 }))
        local fd = handles.pending:fd()
        local pid = fork.fork()
        if pid == 0 then
          local pending = handles.pending
          local ok = pcall(function()
            assert(pending:done())
            local none, err = pending:wait(0)
            assert(none == nil and err.code == "released", err)
            pending:cancel()
            handles.pending, pending = nil, nil
            collectgarbage()
            collectgarbage()
          end)
          os.exit(ok and 0 or 1, true)
        end
        local ended = fork.wait(pid)
        local poll, readable = uv.new_poll(fd), false
        poll:start("r", function() readable = true end)
        uv.run("nowait")
        poll:close()
        uv.run("nowait")
        return ended, readable or handles.pending:done()
      ]], R1)
      assert.equal(0, status)
      assert.is_false(readable)
      assert.is_true(blocker:release { confirm = true })
      assert.is_true(peer:call "handles.lock = handles.pending:wait(20) return handles.lock ~= nil and handles.lock:is_held()")
      local none = manager:acquire(R1, { timeout = 0 })
      assert.is_nil(none)
    end)

    it("gives a lock back when its holder is killed, though a forked child lives on", function()
      local holder = support.process(store)
      orphan = holder:call(fork_and("support.sleep(support.DEADLINE)"), R1)
      local peer = support.process(store)
      peer:acquire("lock", "acquire", R1)
      support.wait_for_waiters(store, R1)
      holder:signal("sigkill")
      local start = support.now()
      assert.is_true(peer:result())
      assert.is_true(support.now() - start < PROMPT)
      assert.equal(0, uv.kill(orphan, 0))
    end)
  end)
end)

describe("a forked child", function()
  support.each_leasing_store(function(store)
    after_each(support.close_peers)

    -- What counts it is not there under a sanitizer, whose own allocator comes first.
    it("frees nothing that it has inherited: a thread of the parent may have been in its middle", function()
      local peer = support.process(nil, nil, nil, support.preloaded "frees")
      assert.equal(0, peer:call([[
        local fork, frees = require "hierlock_spec.fork", require "hierlock_spec.frees"
        local dsn, options, target = ...
        local manager = assert(hierlock.open(dsn, options))
        local handle = assert(manager:acquire(target))
        collectgarbage "stop"
        local pid = fork.fork()
        if pid == 0 then
          frees.begin()
          fork.exit(manager:stats().acquired == 0 and frees.count())
        end
        local status = fork.wait(pid)
        assert(handle:release { confirm = true })
        manager:close()
        return status
      ]], store.dsn, store.options or {}, R1))
    end)
  end)
end)
