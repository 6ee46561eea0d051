-- The grants and refreshes of a quorum for each combination of three stores' answers.
-- Parts: grants_by_majority grants_by_all refreshes_by_majority_where_one_says_slow refreshes_by_majority refreshes_by_all_where_one_says_slow

local stores = require "spec.support.quorum"
local support = require "spec.support"

local R1, R2 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local LONG = 60

describe("a quorum", function()
  before_each(stores.begin)
  after_each(stores.finish)

  -- How many of n stores have to grant.
  local NEED = { majority = 2, all = 3 }

  local STATES = { "yes", "no", "error", "slow", "expired" }

  -- A spec for each state of the first store: calls fn(states) for each combination of three.
  local function it_where_each_says(title, fn)
    for _, first in ipairs(STATES) do
      it(title .. " where one says " .. first .. ", whatever two other stores say", function()
        local seen = 0
        for _, second in ipairs(STATES) do
          for _, third in ipairs(STATES) do
            fn { first, second, third }
            seen = seen + 1
          end
        end
        assert.equal(25, seen)
      end)
    end
  end

  local function tally(states)
    local n = { yes = 0, no = 0, error = 0, slow = 0, expired = 0 }
    for _, state in ipairs(states) do n[state] = n[state] + 1 end
    return n
  end

  for _, strategy in ipairs { "majority", "all" } do
    it_where_each_says("grants by " .. strategy, function(states)
      stores.fresh()
      local what = table.concat(states, " ")
      local manager = stores.manager(strategy)
      for i, state in ipairs(states) do
        local one = stores.single(i)
        support.wait_until(function() -- on a busy machine a short one may be over when it is granted
          local handle, lost = one:acquire(state == "yes" and R2 or R1,
            { ttl = state == "expired" and 0.05 or LONG, auto_release = false })
          assert(handle or (state == "expired" and lost.code == "lost"), tostring(lost))
          return handle and support.keep(handle)
        end)
      end
      if tally(states).expired > 0 then support.sleep(0.06) end
      for i, state in ipairs(states) do
        if state == "error" then stores.fail(i) elseif state == "slow" then stores.slow(i) end
      end
      local n, start = tally(states), support.now()
      local handle, err = manager:acquire(R1, { ttl = LONG, timeout = 0 })
      local took = support.now() - start
      assert.is_true(took < 3.5, what .. " took " .. took)
      if n.yes + n.expired >= NEED[strategy] then
        assert.is_true(handle ~= nil, what .. ": " .. tostring(err))
        assert.is_true(took < 0.9, what .. " took " .. took)
        assert.is_true(handle:is_held())
      else
        assert.is_nil(handle, what)
        local spare = 3 - NEED[strategy]
        -- Where both codes are right, the first answer decides.
        if n.error > spare and n.no + n.slow == 0 then
          assert.equal("store", err.code, what .. ": " .. tostring(err)) -- what the embedded store says then
        elseif n.error + n.slow == 0 then
          assert.equal("timeout", err.code, what .. ": " .. tostring(err))
        end
        -- Nothing of it is left.
        for i, state in ipairs(states) do
          if state == "yes" or state == "expired" then
            support.wait_until(function()
              return #assert(stores.single(i):leases { target = R1 }) == 0
            end, what)
          end
        end
      end
      stores.done()
    end)

    it_where_each_says("refreshes by " .. strategy, function(states)
      stores.fresh()
      local what = table.concat(states, " ")
      local manager = stores.manager(strategy)
      local n = tally(states)
      local handle = assert(manager:acquire(R1, { ttl = n.expired > 0 and 0.3 or LONG, timeout = 0 }))
      for i = 1, 3 do
        support.wait_until(function() return stores.records(i) == 1 or handle:remaining() == 0 end, what)
      end
      if n.expired > 0 then support.sleep(0.32) end
      for i, state in ipairs(states) do
        if state == "no" and n.expired == 0 then
          assert.equal(1, stores.single(i):revoke { target = R1 })
          assert(stores.single(i):leases())
          stores.empty(i)
        elseif state == "no" then -- somebody has had it
          local other = stores.single(i)
          assert(assert(other:acquire(R1, { timeout = 0 })):release { confirm = true })
        elseif state == "error" then
          stores.fail(i)
        elseif state == "slow" then
          stores.slow(i)
        end
      end
      local start = support.now()
      local ok, err = handle:refresh(LONG)
      local took = support.now() - start
      assert.is_true(took < 2.5, what .. " took " .. took)
      if n.yes + n.expired >= NEED[strategy] then
        assert.is_true(ok, what .. ": " .. tostring(err))
        assert.is_true(handle:remaining() > LONG - 3, what)
        -- A store that has lost the lease gets it again.
        for i, state in ipairs(states) do
          -- By that refresh; or by the next one, where the store did not answer in time.
          if state == "no" then
            support.wait_until(function() return stores.records(i) == 1 or not assert(handle:refresh(LONG)) end, what)
          end
        end
      else
        assert.is_nil(ok, what)
        local known = n.error + n.slow <= 3 - NEED[strategy] -- else that may be heard first
        if n.no > 3 - NEED[strategy] and known then
          assert.equal("lost", err.code, what .. ": " .. tostring(err))
        elseif n.no <= 3 - NEED[strategy] and err.code == "lost" then
          error(what .. ": " .. tostring(err))
        end
      end
      stores.done()
    end)
  end
end)
