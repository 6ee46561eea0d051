--- A worker of soak in Lua: coroutines under an event loop, cqueues' or luv's. They acquire, look whether they hold,
-- extend, and end it in all the ways that Lua has: release, leaving a scope, an error, `with`, the collector,
-- closing the manager. Records note their acts, as for a worker in C; the checker makes no difference.

local soak = require "hierlock_spec.soak"
local hierlock = require "hierlock"

local COROUTINES <const> = 40
local POOL <const> = 16 -- so few that some wait for a connection

local round = math.tointeger(arg[3])
local run = soak.attach(arg[1], math.tointeger(arg[2]), round)
local roll, now, count = soak.roll, soak.now, soak.count
local function percent(n) return roll(100) < n end

-- --------------------------------------------------------------------- loops

local loops = {}

function loops.cqueues()
  local cqueues = require "cqueues"
  local queue = cqueues.new()
  return {
    spawn = function(fn) queue:wrap(fn) end,
    sleep = cqueues.sleep,
    run = function() assert(queue:loop()) end,
  }
end

function loops.luv()
  local uv = require "luv"
  return {
    spawn = function(fn) assert(coroutine.resume(coroutine.create(fn))) end,
    sleep = function(seconds)
      local thread, timer = coroutine.running(), uv.new_timer()
      timer:start(math.ceil(seconds * 1000), 0, function()
        timer:close()
        assert(coroutine.resume(thread))
      end)
      coroutine.yield()
    end,
    run = function() uv.run() end,
  }
end

local loop_name = round // 2 % 2 == 0 and "cqueues" or "luv"
local loop = loops[loop_name]()
local sleep = loop.sleep

-- ------------------------------------------------------------------- managers

local managers = {} -- of each: its manager, and when it was closed
local told = setmetatable({}, { __mode = "k" })

local function node_target(node, mode)
  local user, account, resource = soak.names(node)
  return { user = user, account = account, resource = resource, mode = mode }
end

-- A callback may use the library as it likes; this one does.
local function on_lost(handle, err)
  if handle.kind == "lease" then return end -- perhaps its time is up, and a refresh restores it
  if told[handle] then soak.complain("on_lost was called twice") end
  told[handle] = true
  if handle:is_held() then soak.complain("on_lost, and it is held") end
  if err.code ~= "lost" then soak.complain("on_lost was told of " .. tostring(err)) end
  handle:release()
  if handle:remaining() ~= 0 then soak.complain("on_lost, and it has time left") end
  local other = managers[1 + roll(#managers)]
  if other and not other.closed then
    other.manager:stats()
    -- Of no node of the tree, as no record tells of it: the checker has to see all who want a lease's nodes.
    local pending = other.manager:start({ user = "callback" }, { timeout = 0 })
    if pending and percent(50) then pending:cancel() end
  end
  collectgarbage("step")
end

local function open()
  while not soak.stopping() do
    local began = now()
    local manager, err = hierlock.open(run.dsn, {
      loop = loop_name, buckets = run.buckets, hold_timeout = run.hold_timeout,
      pool_size = POOL, application = "soak", on_lost = on_lost,
    })
    if manager then
      count("opens")
      return { manager = manager, leases = {} }
    end
    if err.code ~= "connection" and not soak.killed(err.errno, tostring(err)) and not soak.allows(err.code, began) then
      soak.complain("cannot open: " .. tostring(err))
    end
    if coroutine.isyieldable() then sleep(0.1) end
  end
end

-- -------------------------------------------------------------------- choices

-- Chooses as targets_choose in worker.c: {node, mode, …} and the argument of acquire_all.
local function choose_targets(few)
  local mood, kind = soak.mood(), roll(100)
  local n = kind < 50 and 1 + roll(3) or kind < 96 and 2 + roll(19) or 1 + roll(200)
  local shared = percent(50) and 80 or 30
  local inner, elsewhere = 8, n > 20 and 3 or 10
  local account = roll(soak.USERS * soak.ACCOUNTS)
  if mood == "large" then
    n = kind < 88 and 1 + roll(200) or 1 + roll(3)
    shared, inner, elsewhere = kind < 88 and 100 or 0, 0, 50
  end
  if mood == "narrow" then account = roll(soak.ACCOUNTS) end
  if few or mood == "narrow" then n = 1 + roll(3) end
  local nodes, targets = {}, {}
  for i = 1, n do
    local mode = percent(shared) and "shared" or "exclusive"
    local level = roll(100 + 3 * n)
    if mood ~= "narrow" and percent(elsewhere) then account = roll(soak.USERS * soak.ACCOUNTS) end
    local node = soak.FIRST_RESOURCE + account * soak.RESOURCES + roll(mood == "narrow" and 6 or soak.RESOURCES)
    if level < inner // 4 then node = roll(mood == "narrow" and 1 or soak.USERS)
    elseif level < inner then node = soak.FIRST_ACCOUNT + account end
    nodes[2 * i - 1], nodes[2 * i] = node, mode == "shared" and soak.HL_SHARED or soak.HL_EXCLUSIVE
    targets[i] = node_target(node, mode)
  end
  return nodes, targets
end

-- Chooses for the calls that take one target: a node, or resources of one account. And its mode.
local function choose_target(few)
  local nodes = choose_targets(few)
  local node, mode = nodes[1], nodes[2]
  local name = mode == soak.HL_SHARED and "shared" or "exclusive"
  if node < soak.FIRST_RESOURCE or percent(50) then return { node, mode }, node_target(node), name end
  local target, list, first = node_target(node), {}, node - (node - soak.FIRST_RESOURCE) % soak.RESOURCES
  nodes = {}
  for i = 1, few and 1 + roll(3) or 1 + roll(soak.RESOURCES) do
    node = first + roll(soak.mood() == "narrow" and 6 or soak.RESOURCES)
    nodes[2 * i - 1], nodes[2 * i] = node, mode
    list[i] = node_target(node).resource
  end
  return nodes, { user = target.user, account = target.account, resources = list }, name
end

-- Not long: a coroutine that waits cannot be called to rest.
local function choose_timeout()
  local kind = roll(100)
  return kind < 10 and 0 or kind < 30 and 1 + roll(50) or kind < 60 and 50 + roll(450) or 500 + roll(1500)
end

local function choose_hold(self, lock)
  local kind = roll(1000)
  -- One coroutine holds for longer than a lease, so that the lease must be renewed.
  if self.number == 1 and percent(25) and lock.handle.mode == "shared" then
    return math.floor(run.hold_timeout * (1000 + roll(1000))) * 1000000
  end
  if run.proxied and kind < 30 then return roll(math.floor(3 * run.hold_timeout * 1000)) * 1000000 end
  return (kind < 700 and roll(2000) or kind < 990 and roll(20000) or kind < 999 and roll(200000) or roll(4000000)) * 1000
end

-- ---------------------------------------------------------------------- a lock

-- Notes the error of a call. `ours`: we have cancelled it, or closed its manager.
local function refused(record, err, ours, ending)
  local counter = ({ timeout = "timeouts", cancelled = "cancels", deadlock = "deadlocks", busy = "busy",
                     lost = "lost", connection = "failed" })[err.code]
  if counter then count(counter)
  elseif soak.allows(err.code, soak.called(record), soak.is_lease(record)) then count("failed")
  elseif err.code ~= "released" then soak.complain("a call failed with " .. err.code .. ": " .. tostring(err)) end
  if err.code == "cancelled" and not ours and not soak.killed(err.errno, tostring(err)) then
    soak.complain("`cancelled`, and nobody did: " .. tostring(err))
  end
  soak.ended(record, ours and "cancelled" or "refused", ending or now(), err.code, tostring(err))
end

-- A lock: its handle, its records, how it ended, and when that began.
local function sample(lock)
  local before = now()
  local held = lock.handle:is_held()
  count("samples")
  if held then
    for _, record in ipairs(lock.records) do soak.held(record, before) end
  end
  return held
end

-- See classic.c. Other coroutines run meanwhile.
local function update(lock)
  local node = soak.exclusive(lock.records[1 + roll(#lock.records)])
  if not node or not sample(lock) then return end
  local element, counter, set = soak.read(node)
  sleep(roll(3) / 1000)
  soak.write(node, element, counter, set)
  count("updates")
  if sample(lock) then soak.confirm(node, element, counter, set) end
end

local function extend(self, lock)
  local nodes, target, mode = choose_target(soak.mood() ~= "large" or percent(90))
  local timeout = percent(20) and 0 or roll(400)
  local record = soak.call(self.number, self.manager_number, "extend", lock.number, timeout, run.proxied, nodes,
                           lock.handle.token)
  if not record then return end
  count("extends")
  -- A stranger who ends it while it waits.
  if percent(10) then
    local after = roll(200) / 1000
    loop.spawn(function()
      sleep(after)
      if lock.extending ~= record then return end
      lock.ending = now()
      lock.handle:release()
    end)
  end
  lock.extending = record
  local ok, err = lock.handle:extend(target, { timeout = timeout / 1000, mode = mode })
  lock.extending = nil
  local ours = lock.ending or self.manager.closed
  if ok and not ours then
    soak.granted(record, lock.handle.token)
    lock.records[#lock.records + 1] = record
  else
    refused(record, err or { code = "released" }, ours, ours)
  end
end

-- Holds for a while. Nothing to be told afterwards but lock.how, lock.ending.
local function hold(self, lock)
  soak.granted(lock.records[1], lock.handle.token)
  local till = now() + choose_hold(self, lock)
  repeat
    if percent(5) then
      local before = now()
      local left = lock.handle:remaining()
      for _, record in ipairs(lock.records) do soak.promised(record, before, left) end
    end
    if percent(20) then update(lock) end
    if run.extends and percent(4) and #lock.records < 4 and lock.handle:is_held() then extend(self, lock) end
    if not sample(lock) then
      lock.how = (lock.ending or self.manager.closed) and "closed" or "lost"
      if lock.how == "lost" then count("lost") end
      lock.ending = lock.ending or self.manager.closed or now()
      return
    end
    if percent(3) then setmetatable({}, { __gc = function() lock.handle:is_held() end }) end
    sleep(roll(3) / 1000)
  until now() > till or soak.pausing() or soak.stopping()
end

local function over(lock, how)
  for _, record in ipairs(lock.records) do soak.ended(record, lock.how or how, lock.ending) end
end

local function after_release(lock)
  if lock.handle:is_held() then soak.complain("is_held after it was released") end
  if lock.handle:release() ~= true then soak.complain("a second release is not true") end
end

-- The ways in which a lock ends. Each ends what hold() began.
local ends = {}

function ends.release(_, lock)
  lock.ending = lock.ending or now()
  local _, err = lock.handle:release(percent(20) and { confirm = true } or nil)
  over(lock, err and "lost" or "released")
  after_release(lock)
end

local function collect(lock)
  local weak = setmetatable({ lock.handle }, { __mode = "v" })
  lock.handle = nil
  for _ = 1, 50 do
    collectgarbage("step", 100)
    if not weak[1] then break end
    sleep(0.001)
  end
  if weak[1] then collectgarbage() end
  if weak[1] then soak.complain("nobody has the handle, and it is not collected") end
end

function ends.collect(_, lock)
  lock.ending = lock.ending or now()
  collect(lock)
  over(lock, "freed")
end

local ways = {
  function(self, lock) hold(self, lock) ends.release(self, lock) end,
  function(self, lock) hold(self, lock) ends.collect(self, lock) end,
  -- The scope ends.
  function(self, lock)
    do
      local _ <close> = lock.handle
      hold(self, lock)
      lock.ending = lock.ending or now()
    end
    over(lock, "freed")
    after_release(lock)
  end,
  -- An error leaves it.
  function(self, lock)
    local raised = {}
    local _, err = pcall(function()
      local _ <close> = lock.handle
      hold(self, lock)
      lock.ending = lock.ending or now()
      error(raised)
    end)
    if err ~= raised then error(err, 0) end
    over(lock, "freed")
    after_release(lock)
  end,
}

-- ------------------------------------------------------------------ acquiring

-- Each gives handle, or nil, err, ours, ending. All but the first take one target.
local acquires = {}

function acquires.all(self, targets, options) return self.manager.manager:acquire_all(targets, options) end

function acquires.one(self, target, options) return self.manager.manager:acquire(target, options) end

function acquires.start(self, target, options)
  local manager = self.manager
  local pending <close> = assert(manager.manager:start(target, options))
  local cancel_at = percent(20) and now() + roll(200) * 1000000
  while not pending:done() do
    if cancel_at and now() > cancel_at then
      local ending = now()
      if percent(50) then pending:cancel() end -- or it is closed, here
      return nil, { code = "cancelled" }, true, ending
    end
    sleep(0.001)
  end
  return pending:wait()
end

local function begin(self, kind)
  self.manager = managers[self.manager_number]
  local nodes, targets, mode = (kind == "all" and choose_targets or choose_target)(false)
  local timeout = choose_timeout()
  local record, number = soak.call(self.number, self.manager_number, kind == "start" and "start" or "acquire", 0, timeout,
                                   run.proxied, nodes)
  if not record then return end
  count("calls")
  return record, number, targets, { timeout = timeout / 1000, mode = mode }
end

local function acquire(self)
  local kind = percent(40) and "start" or percent(40) and "one" or "all"
  local record, number, targets, options = begin(self, kind)
  if not record then return end
  local handle, err, ours, ending = acquires[kind](self, targets, options)
  if not handle then return refused(record, err, ours or self.manager.closed, ending) end
  return { handle = handle, records = { record }, number = number }
end

local function acquire_with(self)
  local record, number, target, options = begin(self, "with")
  if not record then return end
  local lock = { records = { record }, number = number }
  local ok, err = self.manager.manager:with(target, options, function(handle)
    lock.handle = handle
    hold(self, lock)
    lock.ending = lock.ending or now()
    return true
  end)
  if not lock.handle then return refused(record, err, self.manager.closed) end
  if not ok and err.code ~= "lost" then soak.complain("with: " .. tostring(err)) end
  over(lock, ok and "released" or "lost")
  after_release(lock)
end

-- -------------------------------------------------------------------- leases

-- Does the work of lease.c, with the binding: see soak.h for the notes. A lock is a table as above, and `ttl` its
-- own, in ms.
local leases = {}

local function ttl_choose()
  local kind = roll(100)
  return kind < 60 and 50 + roll(250) or kind < 90 and 300 + roll(700) or 1000 + roll(soak.TTL_MOST - 999)
end

local function lease_options(lock, ttl)
  lock.ttl, lock.refreshes, lock.stays = ttl, percent(25), percent(10)
  local owner = roll(soak.OWNERS)
  return { ttl = ttl / 1000, auto_refresh = lock.refreshes, auto_release = not lock.stays, owner = "o" .. owner,
           label = tostring(lock.number) }, owner
end

local function lease_promised(lock)
  local before = now()
  local left = lock.handle:remaining()
  for _, record in ipairs(lock.records) do soak.promised(record, before, left) end
end

local function lease_each(lock, what, ...)
  for _, record in ipairs(lock.records) do soak[what](record, ...) end
end

-- The holder hears that the lease is lost.
local function lease_told(lock, err, at, ttl)
  count("lost")
  lease_each(lock, "told", at, ttl, err.revoked_by)
  for _, record in ipairs(lock.records) do soak.ended(record, "lost", now(), "lost", tostring(err)) end
end

local function lease_failed(lock, what, err, at)
  local closed = lock.closes.closed and (err.code == "released" or err.code == "cancelled")
  count("failed")
  if err.code ~= "connection" and err.code ~= "timeout" and err.code ~= "busy" and not closed
    and not soak.allows(err.code, at, true) and not soak.killed(err.errno, tostring(err)) then
    soak.complain(what .. " of a lease failed with " .. err.code .. ": " .. tostring(err))
  end
end

-- False: it is lost, and its records have ended.
local function lease_refresh(lock, was_over)
  local own = percent(60)
  local ttl = own and lock.ttl or ttl_choose()
  local at = now()
  lease_each(lock, "asks", at, ttl)
  local ok, err
  if own then ok, err = lock.handle:refresh() else ok, err = lock.handle:refresh(ttl / 1000) end
  if not ok then
    if err.code == "lost" then lease_told(lock, err, at, ttl) return false end
    lease_failed(lock, "a refresh", err, at)
    return true
  end
  count("refreshes")
  if was_over then count("restored") end
  lease_each(lock, "sure", at)
  lease_each(lock, "expires", ttl)
  lease_promised(lock)
  return true
end

-- All that a holder does until it is told of a loss (false), or it is time to end it.
local function lease_hold(lock)
  local till = now() + (percent(80) and roll(3000) or roll(2000 * lock.ttl)) * 1000
  local late
  lease_each(lock, "expires", lock.ttl)
  lease_promised(lock)
  repeat
    if lock.closes.closed then return true end
    local held = sample(lock)
    if held then
      late = nil
      if percent(20) then lease_promised(lock) end
      if percent(2) and not lease_refresh(lock, false) then return false end
      if not lock.refreshes and lock.handle:remaining() <= 0.004 and percent(50) and not lease_refresh(lock, false) then return false end
    elseif not late then
      count("over")
      late = now() + roll(percent(50) and 30 or 600) * 1000000
    elseif now() > late and not lease_refresh(lock, true) then
      return false
    end
    sleep(roll(3) / 1000)
  until (held and now() > till) or soak.pausing() or soak.stopping()
  return true
end

local function lease_end(lock)
  local ending = now()
  local how = roll(soak.pausing() and 10 or 30)
  if lock.closes.closed then
    for _, record in ipairs(lock.records) do soak.ended(record, lock.stays and "left" or "closed", ending) end
  elseif how < 3 and #lock.records == 1 then
    local text, err = lock.handle:export()
    if not text then
      if err.code == "lost" then return lease_told(lock, err, ending, 0) end
      lease_failed(lock, "an export", err, ending)
      lease_each(lock, "yields")
    else
      count("exports")
      if lock.handle:is_held() then soak.complain("is_held after an export") end
      soak.put(lock.records[1], text, lock.ttl)
    end
    soak.ended(lock.records[1], text and "exported" or "left", ending)
  elseif how == 3 then
    if not lock.stays then lease_each(lock, "yields") end
    collect(lock)
    for _, record in ipairs(lock.records) do soak.ended(record, lock.stays and "left" or "freed", ending) end
  else
    lease_each(lock, "yields")
    local ok, err = lock.handle:release(percent(20) and { confirm = true } or nil)
    if not ok and err.code == "lost" then return lease_told(lock, err, ending, 0) end
    if not ok then lease_failed(lock, "a release", err, ending) end
    for _, record in ipairs(lock.records) do soak.ended(record, ok and "released" or "left", ending) end
  end
end

local function lease_live(lock)
  count("leases")
  lock.closes.leases[lock] = true
  if lease_hold(lock) then lease_end(lock) end
  lock.closes.leases[lock] = nil
end

function leases.acquire(self)
  local kind = percent(60) and "one" or "all"
  local record, number, targets, options = begin(self, kind)
  if not record then return end
  local lock = { records = { record }, number = number, closes = self.manager }
  local more, owner = lease_options(lock, ttl_choose())
  for name, value in pairs(more) do options[name] = value end
  soak.lease(record, lock.ttl, owner, lock.refreshes, lock.stays)
  local handle, err, ours, ending = acquires[kind](self, targets, options)
  if not handle then return refused(record, err, ours or self.manager.closed, ending) end
  soak.granted(record, handle.token)
  lock.handle = handle
  return lease_live(lock) -- no variable here has the handle any more
end

function leases.import(self)
  self.manager = managers[self.manager_number]
  local record = soak.call(self.number, self.manager_number, "acquire", 0, 10000, run.proxied, {})
  if not record then return end
  local lock = { records = { record }, closes = self.manager }
  local given = percent(30) and 0 or ttl_choose()
  lock.refreshes, lock.stays = percent(25), percent(10)
  local text, ttl, number, token = soak.take(record, given, lock.refreshes, lock.stays)
  if not text then return soak.discard(record) end
  count("calls")
  lock.ttl, lock.number = ttl, number
  -- The manager may be closed when it has been granted, and before this coroutine hears of it: then it is released.
  lock.closes.leases[lock] = true
  local handle, err = self.manager.manager:import(text, { ttl = given > 0 and given / 1000 or nil, auto_refresh = lock.refreshes,
                                                          auto_release = not lock.stays })
  if not handle then
    lock.closes.leases[lock] = nil
    if err.code == "lost" then soak.told(record, soak.called(record), ttl, err.revoked_by) end
    return refused(record, err, self.manager.closed)
  end
  count("imports")
  soak.granted(record, handle.token)
  soak.sure(record, soak.called(record))
  if handle.token ~= token then soak.complain("an import changes the token from " .. token .. " to " .. handle.token) end
  lock.handle = handle
  return lease_live(lock)
end

-- A session for a moment, and a lease from then on.
function leases.convert(self)
  local record, number, target, options = begin(self, "one")
  if not record then return end
  local handle, err, ours, ending = acquires.one(self, target, options)
  if not handle then return refused(record, err, ours or self.manager.closed, ending) end
  local lock = { handle = handle, records = { record }, number = number, closes = self.manager }
  soak.granted(record, handle.token)
  sample(lock)
  sleep(roll(2) / 1000)
  local more, owner = lease_options(lock, ttl_choose())
  soak.lease(record, lock.ttl, owner, lock.refreshes, lock.stays, true)
  local at = now()
  soak.asks(record, at, lock.ttl)
  local ok
  ok, err = handle:to_lease(more)
  if ok then
    count("converted")
    soak.sure(record, at)
    return lease_live(lock)
  end
  soak.unlease(record)
  if err.code ~= "lost" and err.code ~= "released" then lease_failed(lock, "to_lease", err, at) end
  lock.ending = now()
  handle:release()
  soak.ended(record, self.manager.closed and "closed" or "lost", lock.ending)
end

local lease_ways = { leases.acquire, leases.acquire, leases.acquire, leases.import, leases.convert }

-- ----------------------------------------------------------------- coroutines

local at_rest, alive = 0, 0

local function rest()
  at_rest = at_rest + 1
  if at_rest == COROUTINES then soak.rest(true) end
  while soak.pausing() and not soak.stopping() do sleep(0.002) end
  if at_rest == COROUTINES then soak.rest(false) end
  at_rest = at_rest - 1
end

local function life(number)
  local self = { number = number, manager_number = 1 + number % #managers }
  while not soak.stopping() do
    if soak.pausing() then rest() end
    local closed = managers[self.manager_number].closed
    if closed then sleep(0.005)
    elseif run.leases and percent(40) then lease_ways[1 + roll(#lease_ways)](self)
    elseif percent(15) then acquire_with(self)
    else
      local lock = acquire(self)
      if lock then ways[1 + roll(#ways)](self, lock) end
    end
    sleep(roll(10) / 1000)
  end
end

-- Closes the last manager, whatever is under way. Opening another blocks the loop, so not where the
-- network is slow.
local function closing()
  local n = #managers
  while not soak.stopping() do
    sleep(0.5 + roll(3000) / 1000)
    if run.proxied or soak.pausing() then goto continue end
    managers[n].closed = now()
    for lock in pairs(managers[n].leases) do
      if not lock.stays then
        for _, record in ipairs(lock.records) do soak.yields(record) end
      end
    end
    managers[n].manager:close()
    sleep(roll(50) / 1000)
    managers[n] = open() or managers[n]
    ::continue::
  end
end

local function spawn(fn, ...)
  local arguments = table.pack(...)
  alive = alive + 1
  loop.spawn(function()
    local ok, err = xpcall(fn, debug.traceback, table.unpack(arguments))
    alive = alive - 1
    if not ok then
      io.stderr:write(tostring(err), "\n")
      soak.complain((tostring(err):gsub("\n.*", "")))
      os.exit(3)
    end
  end)
end

for i = 1, 3 do managers[i] = open() end
if #managers == 3 then
  for number = 1, COROUTINES do spawn(life, number) end
  spawn(closing)
  loop.run()
  if alive ~= 0 then soak.complain(alive .. " coroutines did not end") end
end
for _, one in ipairs(managers) do one.manager:close() end
