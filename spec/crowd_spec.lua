-- A crowd of coroutines that come, go and give up at random, with an administrator who kills sessions. There are
-- never two holders at once, no wait lasts for ever, and at the end nothing is left locked.
local support = require "spec.support"
local has_cqueues, cqueues = pcall(require, "cqueues")

-- The crowd goes on for SECONDS, and on a busy machine until there were enough grants, or for PATIENCE.
local COROUTINES, SECONDS, PATIENCE = 200, 5, 60
local NODES = { { "crowd" }, { "crowd", "a1" }, { "crowd", "a1", "r1" }, { "crowd", "a1", "r2" }, { "crowd", "a2", "r1" } }

-- Whether a lock on one node excludes one on the other.
local function related(a, b)
  for i = 1, math.min(#a, #b) do
    if a[i] ~= b[i] then return false end
  end
  return true
end

support.each_store(function(store)
  local managers

  before_each(function()
    managers = {}
    -- Each wait that is given up costs a connection: without TLS, or the crowd would mostly log in.
    local params = store.table and "tls=off" or store.server and "sslmode=disable" or nil
    for i = 1, 2 do managers[i] = support.open(store, { pool_size = 8, loop = has_cqueues and "cqueues" or nil }, params) end
  end)
  after_each(function()
    for _, manager in ipairs(managers) do manager:close() end
    support.close_peers()
  end)

  it("#crowd never lets two in, and leaves nothing locked", function()
    assert(has_cqueues, "lua-cqueues is needed")
    local seed = os.time()
    math.randomseed(seed)
    local holding, overlaps, grants, unexpected, ended = {}, {}, 0, {}, 0
    local loop = cqueues.new()
    local began = support.now()
    local function is_over()
      local elapsed = support.now() - began
      return elapsed > PATIENCE or (elapsed > SECONDS and grants > COROUTINES)
    end

    -- Seen from outside of the library; a handle that was lost may overlap with the next one.
    local function enter(node, shared, handle)
      grants = grants + 1
      local me = { node = node, shared = shared, handle = handle }
      for other in pairs(holding) do
        if related(node, other.node) and not (shared and other.shared) and other.handle:is_held() and
           handle:is_held() then
          overlaps[#overlaps + 1] = table.concat(node, "/") .. " with " .. table.concat(other.node, "/")
        end
      end
      holding[me] = true
      return function() holding[me] = nil end
    end

    local function expected(err)
      local code = err.code
      if code == "timeout" or code == "cancelled" or code == "busy" or code == "lost" or
         code == "connection" or code == "deadlock" or code == "released" then return end
      unexpected[#unexpected + 1] = tostring(err)
    end

    local function one_round(manager)
      local node = NODES[math.random(#NODES)]
      local shared = #node == 3 and math.random(3) == 1
      local options = { timeout = math.random(0, 400) / 1000, mode = shared and "shared" or "exclusive" }
      local what = math.random(10)
      local handle, err
      if what == 1 then -- started and dropped
        manager:start(node, options)
        return
      elseif what == 2 then -- started and cancelled
        local pending = manager:start(node, options)
        cqueues.sleep(math.random() / 50)
        pending:cancel()
        handle, err = pending:wait(0)
        if handle then unexpected[#unexpected + 1] = "granted though cancelled" end
      elseif what == 3 then -- given up by a time-out of the loop's own
        local pending = manager:start(node, options)
        cqueues.poll(pending, math.random() / 20)
        if pending:done() then handle, err = pending:wait(0) else pending:cancel() return end
      else
        handle, err = manager:acquire(node, options)
      end
      if not handle then
        if err then expected(err) end
        return
      end
      local leave = enter(node, shared, handle)
      if math.random(2) == 1 then cqueues.sleep(math.random() / 200) end
      if math.random(20) == 1 then
        local extended, why = handle:extend({ "crowd", "a9", "r" .. math.random(3) }, { timeout = 0.05 })
        if not extended then expected(why) end
      end
      leave()
      if math.random(10) > 1 then
        local released, why = handle:release { confirm = math.random(4) == 1 }
        if not released then expected(why) end
      end -- else the collector's
    end

    for i = 1, COROUTINES do
      loop:wrap(function()
        while not is_over() do
          one_round(managers[i % #managers + 1])
          cqueues.sleep(math.random() / 100)
        end
        ended = ended + 1
      end)
    end
    if store.server then
      loop:wrap(function()
        while not is_over() do
          cqueues.sleep(0.2)
          local sessions = store.sessions()
          local victim = sessions[math.random(math.max(#sessions, 1))]
          if victim then store.kill(victim) end
        end
      end)
    end
    loop:wrap(function()
      while not is_over() do
        cqueues.sleep(0.05)
        collectgarbage()
      end
    end)
    local ran, why = loop:loop(PATIENCE + support.DEADLINE)
    assert(ran, why)
    local message = ("seed %d, %d of %d ended, %d grants in %.0f s"):format(
      seed, ended, COROUTINES, grants, support.now() - began)
    assert.equal(COROUTINES, ended, message)
    assert.same({}, overlaps, message)
    assert.same({}, unexpected, message)
    assert.is_true(grants > COROUTINES, message)

    -- Nothing is left: neither held, nor waiting, nor locked for others.
    support.wait_until(function()
      collectgarbage()
      local held = 0
      for _, manager in ipairs(managers) do held = held + manager:stats().held end
      return held == 0
    end, "the end of all locks")
    for _, manager in ipairs(managers) do assert.equal(0, manager:stats().waiting) end
    local observer = support.open(store)
    local handle, err = observer:acquire({ "crowd" }, { timeout = 5 })
    assert(handle, err)
    handle:release { confirm = true }
    observer:close()
  end)
end)
