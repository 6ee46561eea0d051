-- Which two requests may hold at once: every kind of pair of nodes that the rule
-- tells apart, and the modes of a resource. The first holder is here, the second
-- in another process.

local hierlock = require "hierlock"
local support = require "spec.support"

local user1, user2 = { "u1" }, { "u2" }
local account11, account12 = { "u1", "a1" }, { "u1", "a2" }
local resource111, resource112 = { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local resource121, resource211 = { "u1", "a2", "r1" }, { "u2", "a1", "r1" }

-- The holder, the second request, and whether it waits or is granted.
local PAIRS = {
  { "a resource", resource111, "the same resource", resource111, waits = true },
  { "a resource", resource111, "another resource of the account", resource112 },
  { "a resource", resource111, "another account", account12 },
  { "a resource", resource111, "a resource of another account", resource121 },
  { "a resource", resource111, "another user", user2 },
  { "a resource", resource111, "a resource of another user", resource211 },
  { "an account", account11, "its resource", resource111, waits = true },
  { "a resource", resource111, "its account", account11, waits = true },
  { "an account", account11, "the same account", account11, waits = true },
  { "an account", account11, "another account of the user", account12 },
  { "a user", user1, "its account", account11, waits = true },
  { "an account", account11, "its user", user1, waits = true },
  { "a user", user1, "its resource", resource111, waits = true },
  { "a resource", resource111, "its user", user1, waits = true },
  { "a user", user1, "another user", user2 },
  { "an account with a colon", { "u1", "1:a1" }, "one whose ids, joined, are the same text", { "u1:1", "a1" }, waits = true },
}

local MODES = {
  { "shared", "shared" },
  { "shared", "exclusive", waits = true },
  { "exclusive", "shared", waits = true },
  { "exclusive", "exclusive", waits = true },
}

describe("compatibility", function()
  it("is shown with ids that share no bucket, so that only the rule makes anybody wait", function()
    local seen = {}
    for _, target in ipairs { user1, user2, account11, account12,
                              resource111, resource112, resource121, resource211 } do
      local rows = hierlock.plan({ target }, { buckets = support.stores[1].options.buckets }):rows()
      local own = rows[#rows].level .. "." .. rows[#rows].bucket
      assert.is_nil(seen[own])
      seen[own] = true
    end
  end)

  support.each_store(function(store)
    local manager, peer

    before_each(function()
      manager = support.open(store)
      peer = support.process(store)
    end)

    after_each(function()
      support.close_peers()
      manager:close()
    end)

    local function second_waits(held, asked, held_mode, asked_mode)
      local handle = assert(manager:acquire(held, { mode = held_mode }))
      peer:acquire("second", "acquire", asked, { mode = asked_mode })
      support.wait_for_waiters(store, asked)
      assert(handle:release { confirm = true })
      assert.is_true(peer:result())
    end

    local function second_is_granted(held, asked, held_mode, asked_mode)
      local handle = assert(manager:acquire(held, { mode = held_mode }))
      assert.is_true(peer:acquire("second", "acquire", asked, { mode = asked_mode, timeout = 0 }):result())
      assert.is_true(handle:check())
    end

    for _, pair in ipairs(PAIRS) do
      local title = ("while %s is held, %s %s"):format(pair[1], pair[3],
        pair.waits and "waits until it is released" or "is granted at once")
      it(title, function() (pair.waits and second_waits or second_is_granted)(pair[2], pair[4]) end)
    end

    for _, pair in ipairs(MODES) do
      local title = ("while a resource is held %s, a request for it %s %s"):format(pair[1], pair[2],
        pair.waits and "waits until it is released" or "is granted at once")
      it(title, function()
        (pair.waits and second_waits or second_is_granted)(resource111, resource111, pair[1], pair[2])
      end)
    end

    it("a shared resource keeps its account from being taken", function()
      second_waits(resource111, account11, "shared")
    end)

    it("an account keeps its resource from being shared", function()
      second_waits(account11, resource111, nil, "shared")
    end)

    for _, inner in ipairs { { "user", user1 }, { "account", account11 } } do
      it(("mode=\"shared\" on a%s is exclusive, and the handle says so")
        :format(inner[1] == "user" and " user" or "n account"), function()
        local handle = assert(manager:acquire(inner[2], { mode = "shared" }))
        assert.equal("exclusive", handle.mode)
        handle:release { confirm = true }
        second_waits(inner[2], inner[2], "shared", "shared")
      end)
    end

    it("mode=\"shared\" on a resource is shared, and the handle says so", function()
      local handle = assert(manager:acquire(resource111, { mode = "shared" }))
      assert.equal("shared", handle.mode)
      handle:release { confirm = true }
      assert.equal("exclusive", assert(manager:acquire(resource111)).mode)
    end)
  end, true)
end)
