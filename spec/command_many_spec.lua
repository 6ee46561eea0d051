--- `hierlock ps` and `hierlock kill` of a target below which hundreds hold and hundreds wait: what they say is whole, and
-- is said soon. A thousand holders, and what a look costs: bench/ps_cost_spec.lua.

local hierlock = require "hierlock"
local support = require "spec.support"
local sql = require "spec.support.sql"
local program = require "spec.support.command"
local json = require "dkjson"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack

-- Each session is a connection, of the 500 that the servers allow.
local EACH = 200
-- Seconds, on a busy machine. Where the lists of locks, of waits and of names were joined without an index, `ps` took
-- four times as long for twice as many, and the server's limit for the question ended it.
local SOON = 10

after_each(program.close)

-- Returns the names of as many accounts below the root, none of which has a bucket in common with another, nor has its
-- resource.
local function accounts(buckets)
  local names, seen, i = {}, {}, 0
  while #names < EACH do
    i = i + 1
    local rows = hierlock.plan({ { "crowd", "a" .. i, "r" } }, { buckets = buckets }):rows()
    local account, resource = "1 " .. rows[2].bucket, "2 " .. rows[3].bucket
    if not seen[account] and not seen[resource] then
      seen[account], seen[resource] = true, true
      names[#names + 1] = "a" .. i
    end
  end
  return names
end

support.each_connection(function(store)
  -- Without TLS, or the peers would mostly log in.
  local without_tls = store.dsn and sql.with_param(store.dsn, store.table and "tls=off" or "sslmode=disable")
  local names, holder, waiter

  setup(function() names = accounts(store.options.buckets or 10000) end)

  before_each(function()
    local options = { pool_size = EACH + 10, application = "a holder" }
    holder = support.process(store, options, without_tls)
    options.application = "a waiter"
    waiter = support.process(store, options, without_tls)
    -- In steps, as a peer has to answer in time. Each step waits for different nodes.
    for first = 1, EACH, 50 do
      local some = { unpack(names, first, first + 49) }
      holder:call([[
        for _, name in ipairs(...) do handles[#handles + 1] = assert(manager:acquire({ "crowd", name, "r" }, { timeout = 30 })) end
      ]], some)
      waiter:call([[
        pendings = pendings or {}
        for _, name in ipairs(...) do pendings[#pendings + 1] = assert(manager:start({ "crowd", name }, { timeout = 300 })) end
      ]], some)
    end
  end)

  after_each(function() support.close_peers() end)

  -- What one asks says, and how long it took.
  local function asked(...)
    local began = support.now()
    local said = assert_status(0, run(store.dsn, ...))
    local took = support.now() - began
    assert.is_true(took < SOON, ("%s took %.1f s"):format((...), took))
    return said.out
  end

  -- By state and path: who is listed, and for whom the waiters wait.
  local function listed()
    local found, n = { holds = {}, waits = {} }, 0
    for _, one in ipairs(assert(json.decode(asked("ps", "crowd", "--json")))) do
      found[one.waiting and "waits" or "holds"][one.target] = one
      n = n + 1
    end
    return found, n
  end

  it("all are listed, each waiter with its blocker, and all holders are ended", function()
    local found, n
    support.wait_until(function() -- MariaDB shows an old picture
      support.sleep(0.11)
      found, n = listed()
      return n == 2 * EACH
    end, "all of them in the list", 60)
    for _, name in ipairs(names) do
      local held, waits = found.holds["crowd/" .. name .. "/r"], found.waits["crowd/" .. name]
      assert.equal("a holder", held and held.application, name)
      assert.equal("a waiter", waits and waits.application, name)
      assert.equal(1, waits.waits_for_count, name)
      assert.equal(held.session, waits.waits_for[1].session, name)
    end
    local said = asked("kill", "crowd", "--yes")
    assert.matches(("\n%d locks ended, of a holder"):format(EACH), said, 1, true)
    assert.equal(EACH, waiter:call [[
      local granted = 0
      for _, pending in ipairs(pendings) do
        if pending:wait(20) then granted = granted + 1 end
      end
      return granted
    ]])
  end)
end)
