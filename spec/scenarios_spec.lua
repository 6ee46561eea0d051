-- The seven scenarios of docs/scenarios.md, on every store. The second of each pair acts in another process, in
-- another thread, and in another coroutine of the same thread: one that tries again and one that waits under each
-- loop. The specs look whether a caller waits.

local hierlock = require "hierlock"
local support = require "spec.support"

-- ------------------------------------------------------- the second of two

-- Another process, thread or coroutine of a loop: asks, and waits.
local function blocking(start)
  return function(store)
    local peer = start(store)
    local self = {}
    function self.ask(_, target) peer:acquire("lock", "acquire", target) end
    function self.is_seen_waiting(_, target) support.wait_for_waiters(store, target) end
    --- Waits for the grant; returns its token.
    function self.is_granted()
      local granted, token = peer:result()
      assert.is_true(granted)
      return token
    end
    function self.still_holds() assert.is_true(peer:call("return handles.lock:check()")) end
    function self.release() assert.is_true(peer:release("lock")) end
    return self
  end
end

-- A coroutine of this thread without a loop: tries, yields, tries again.
local function trying(_, manager)
  local self, asking, handle = {}, nil, nil
  function self.ask(_, target)
    asking = coroutine.create(function()
      repeat
        local err
        handle, err = manager:acquire(target, { timeout = 0 })
        if not handle then
          assert.equal("timeout", err.code)
          coroutine.yield()
        end
      until handle
    end)
    assert(coroutine.resume(asking))
  end
  function self.is_seen_waiting()
    for _ = 1, 3 do assert(coroutine.resume(asking)) end
    assert.equal("suspended", coroutine.status(asking))
  end
  function self.is_granted()
    if coroutine.status(asking) == "suspended" then assert(coroutine.resume(asking)) end
    assert.equal("dead", coroutine.status(asking))
    return handle.token
  end
  function self.still_holds() assert(handle:check()) end
  function self.release() assert(handle:release { confirm = true }) end
  return self
end

local SECONDS = { { "another coroutine", trying } }
for _, kind in ipairs(support.peer_kinds) do
  SECONDS[#SECONDS + 1] = { "another " .. kind[1], blocking(kind[2]) }
end

-- -------------------------------------------------------- scenarios 1 to 5

local U1, A1, R1 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }

local SCENARIOS = {
  { "1. the same resource twice: the second waits until the first is released",
    { R1, R1, waits = true } },
  { "2. two resources of one account: both are held at the same time",
    { R1, { "u1", "a1", "r2" } } },
  { "3. an account and its resource: whichever comes second waits",
    { A1, R1, waits = true }, { R1, A1, waits = true } },
  { "4. a user and its account or resource: whichever comes second waits",
    { U1, A1, waits = true }, { A1, U1, waits = true },
    { U1, R1, waits = true }, { R1, U1, waits = true } },
  { "5. different users: nobody waits, whatever the nodes are called",
    { U1, { "u2" } }, { A1, { "u2", "a1" } }, { R1, { "u2", "a1", "r1" } }, { U1, { "u2", "a1", "r1" } } },
}

local function play(manager, second, step)
  local held, asked = step[1], step[2]
  local handle = assert(manager:acquire(held))
  second:ask(asked)
  if step.waits then
    second:is_seen_waiting(asked)
    local token = handle.token
    assert(handle:release { confirm = true })
    assert.is_true(second:is_granted() > token, "the later token is the greater one")
  else
    second:is_granted()
    second:still_holds()
    assert(handle:check())
    assert(handle:release { confirm = true })
  end
  second:release()
end

-- ------------------------------------------------------------- scenario 6

local EXTEND = [[
  local target, timeout = ...
  local ok, err = handles.lock:extend(target, { timeout = timeout })
  return { ok = ok, code = err and err.code, errno = err and err.errno, held = handles.lock:is_held() },
    tostring(err)
]]

local R2 = { "u1", "a1", "r2" }

-- first holds R1 and waits for R2; second holds R2.
local function half_a_circle(store, first, second)
  assert.is_true(first:acquire("lock", "acquire", R1):result())
  assert.is_true(second:acquire("lock", "acquire", R2):result())
  first:start(EXTEND, R2)
  support.wait_for_waiters(store, R2)
end

-- The server sees the circle, and ends it: at once, or after deadlock_timeout. A thread that closes a circle inside
-- its process is told before it asks the server.
local function deadlock_on_a_server(store, manager, first, second, within)
  half_a_circle(store, first, second)
  second:start(EXTEND, R1)
  local of_first, message_of_first = first:result()
  local of_second, message_of_second = second:result()
  local victim, survivor, of_victim, of_survivor = first, second, of_first, of_second
  if of_first.ok then victim, survivor, of_victim, of_survivor = second, first, of_second, of_first end

  local message = victim == first and message_of_first or message_of_second
  assert.same({ code = "deadlock", errno = not within and store.table and 1213 or nil, held = false }, of_victim)
  assert.same({ ok = true, held = true }, of_survivor)
  -- The picture of the server may be a tenth of a second old: then the survivor still waits.
  -- On a busy machine the store may not tell within 50 ms who is in the way; the message then says so.
  local known = within and "waited for in a circle: u1/a1/r%d is held by another thread" or "u1/a1/r%d is [%a ]+ by .*%(pid %d+ on "
  if within or not message:find("the store did not tell in time", 1, true) then assert.matches(known, message) end
  assert.equal(1, victim:call("return manager:stats().deadlocks"))
  assert.equal(0, victim:call("return manager:stats().held"))
  assert.equal(0, survivor:call("return manager:stats().deadlocks"))
  assert.is_true(survivor:release("lock"))
  -- The victim's locks are free, though it has not released anything.
  assert(manager:acquire(U1, { timeout = 0 }))
end

-- Nothing looks for circles: the caller with the shorter patience gives up, and keeps its locks; the other gets no
-- further until they are released.
local function deadlock_by_timeout(store, first, second)
  half_a_circle(store, first, second)
  local of_second = second:call(EXTEND, R1, 0.2)
  assert.same({ code = "timeout", held = true }, of_second)
  assert.is_true(first:stays_blocked())
  assert.is_true(second:release("lock"))
  assert.same({ ok = true, held = true }, first:result())
end

-- ------------------------------------------------------------- scenario 7

-- Lists of resources under u1/a1, in the order of their ids. The resources of a pair fall in the same two buckets,
-- in opposite order: a program that locks by id deadlocks.
local KNOWN = { { "r10746", "r1978" }, { "r10747", "r1979" } }

local function buckets_of(list, buckets)
  local found = {}
  for i, resource in ipairs(list) do
    found[i] = hierlock.plan({ { "u1", "a1", resource } }, { buckets = buckets }):rows()[3].bucket
  end
  return found
end

-- Pairs for a store without buckets; the numbers have as many digits.
local function keys_of(list)
  local found = {}
  for i, resource in ipairs(list) do
    found[i] = hierlock.plan({ { "u1", "a1", resource } }):sql("postgresql"):match(".*'(%d+)'")
  end
  return found
end

-- Another such pair, for a number of buckets, made of ids r1, r2 ...
local function find_opposite(buckets)
  local seen, doubles = {}, {}
  for i = 1, 100000 do
    local id = ("r%06d"):format(i)
    local bucket = buckets_of({ id }, buckets)[1]
    if seen[bucket] then
      for _, other in ipairs(doubles) do
        -- seen[bucket] < id share one bucket, other[1] < other[2] another one.
        if seen[bucket] < other[2] and other[1] < id then
          return { { seen[bucket], other[2] }, { other[1], id } }
        end
      end
      doubles[#doubles + 1] = { seen[bucket], id }
    end
    seen[bucket] = seen[bucket] or id
  end
  error("there is no such pair")
end

local function reversed(list) return { list[2], list[1] } end

local ROUNDS = [[
  local lists, rounds = ...
  for i = 1, rounds do
    local handle, err = manager:acquire_resources("u1", "a1", lists[i % #lists + 1])
    if not handle then return ("round %d: %s"):format(i, err.code) end
    handle:release()
  end
  return "all rounds"
]]

-- --------------------------------------------------------------- the specs

describe("scenario", function()
  local OPPOSITES = { KNOWN, find_opposite(support.stores[1].options.buckets) }

  support.each_store(function(store)
    local manager

    before_each(function() manager = support.open(store) end)

    after_each(function()
      support.close_peers()
      manager:close()
    end)

    for _, scenario in ipairs(SCENARIOS) do
      for _, second in ipairs(SECONDS) do
        it(("%s (%s)"):format(scenario[1], second[1]), function()
          local other = second[2](store, manager)
          for i = 2, #scenario do play(manager, other, scenario[i]) end
        end)
      end
    end

    -- Where there are only leases, nothing is extended, and so nothing deadlocks.
    for _, second in ipairs(store.leases_only and {} or support.peer_kinds) do
      it(("6. two that each extend to the other's resource deadlock: one gives way, the other one goes on (each a %s)")
        :format(second[1]), function()
        local a, b = second[2](store, { timeout = 10 }), second[2](store, { timeout = 10 })
        if store.server then
          deadlock_on_a_server(store, manager, a, b, second[1] == "thread")
        else
          deadlock_by_timeout(store, a, b)
        end
      end)
    end

    if not store.leases_only then
    it("6. two that each extend to the other's resource deadlock: one gives way, the other one goes on (coroutines)",
      function()
      local a, b = assert(manager:acquire(R1)), assert(manager:acquire(R2))
      local function extend(handle, target)
        return coroutine.wrap(function()
          while not handle:extend(target, { timeout = 0.02 }) do coroutine.yield("waits") end
          return "granted"
        end)
      end
      local first, second = extend(a, R2), extend(b, R1)
      for _ = 1, 3 do
        assert.equal("waits", first())
        assert.equal("waits", second())
      end
      assert(b:release { confirm = true })
      assert.equal("granted", first())
      assert.is_true(a:is_held())
    end)
    end

    it("7. resources in any order: whoever waits for the first bucket holds nothing of the second", function()
      local other = support.process(store)
      for _, opposite in ipairs(OPPOSITES) do
        for _, list in ipairs { opposite[1], opposite[2], reversed(opposite[1]), reversed(opposite[2]) } do
          local buckets = store.unbucketed and keys_of(list) or buckets_of(list, store.options.buckets)
          local low, high = 1, 2
          if buckets[1] > buckets[2] then low, high = 2, 1 end
          local handle = assert(manager:acquire_resource("u1", "a1", list[low]))
          other:acquire("lock", "acquire_resources", "u1", "a1", list)
          support.wait_for_waiters(store, { "u1", "a1", list[low] })
          -- In a store of leases `other` stands in the queues of both resources, before us.
          if not store.leases_only then
            local free = assert(manager:acquire_resource("u1", "a1", list[high], { timeout = 0 }))
            assert(free:release { confirm = true })
          end
          assert(handle:release { confirm = true })
          assert.is_true(other:result())
          assert.is_true(other:release("lock"))
        end
      end
    end)

    for _, second in ipairs(support.peer_kinds) do
      it(("7. resources in any order: many rounds in opposite orders come to their end (each a %s)"):format(second[1]),
        function()
        local a, b = second[2](store), second[2](store)
        for _, opposite in ipairs(OPPOSITES) do
          a:start(ROUNDS, { opposite[1], reversed(opposite[2]) }, 200)
          b:start(ROUNDS, { opposite[2], reversed(opposite[1]) }, 200)
          assert.equal("all rounds", a:result())
          assert.equal("all rounds", b:result())
        end
        for _, peer in ipairs { a, b } do
          local stats = peer:call("return manager:stats()")
          assert.equal(400, stats.acquired)
          assert.equal(0, stats.deadlocks + stats.timeouts + stats.errors)
        end
      end)
    end

    it("7. resources in any order: two that try in turn both come to it (coroutines)", function()
      for _, opposite in ipairs(OPPOSITES) do
        local function rounds(list)
          return coroutine.wrap(function()
            for _ = 1, 10 do
              local handle
              repeat
                handle = manager:acquire_resources("u1", "a1", list, { timeout = 0 })
                coroutine.yield()
              until handle
              assert(handle:release { confirm = true })
            end
            return "all rounds"
          end)
        end
        local a, b, ended, turns = rounds(opposite[1]), rounds(opposite[2]), {}, 0
        while not (ended[a] and ended[b]) do
          for _, one in ipairs { a, b } do ended[one] = ended[one] or one() end
          turns = turns + 1
          assert.is_true(turns < 1000, "they stand in each other's way for ever")
        end
      end
    end)
  end, true)

  it("7. is shown with ids whose order is the opposite of their buckets'", function()
    local function check(opposite, buckets)
      local one, other = buckets_of(opposite[1], buckets), buckets_of(opposite[2], buckets)
      assert.is_true(opposite[1][1] < opposite[1][2] and opposite[2][1] < opposite[2][2])
      assert.same({ one[2], one[1] }, other)
      assert.are_not.equal(one[1], one[2])
    end
    check(KNOWN, 10000000)
    for _, opposite in ipairs(OPPOSITES) do check(opposite, support.stores[1].options.buckets) end
  end)
end)
