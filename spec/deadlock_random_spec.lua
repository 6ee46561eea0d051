-- Threads and processes nest at random on the embedded store. Each notes its requests, grants and releases. A
-- checker that knows nothing of ours makes the waits-for graph: a `deadlock` needs a circle in it, and no circle
-- lasts.

local support = require "spec.support"
local uv = require "luv"

-- How long a circle may last: inside a process it ends at once; else after a second, and after three more where the
-- victim had seen another circle first. The rest is for a machine that is busy.
local ONE_PROCESS, PROCESSES = tonumber(os.getenv "HIERLOCK_RANDOM_LIMIT") or 2, 6
local SECONDS, PEERS, NODES = tonumber(os.getenv "HIERLOCK_RANDOM_SECONDS") or 6, 6, 5

-- Runs in the peer. Lines: when, what, which handle, and of a request its time-out, mode and nodes (0: above all).
local PEER = [[
  local path, seed, seconds, nodes = ...
  local now = function() return require("luv").hrtime() / 1e9 end
  local file = assert(io.open(path, "w"))
  file:setvbuf "no"
  local function note(...)
    file:write(table.concat({ ("%.6f"):format(now()), ... }, " "), "\n")
  end
  local state = seed * 7919 + 17
  local function random(n)
    state = (state * 16807) % 2147483647
    return math.floor(state / 2147483647 * n) + 1
  end
  local timeouts = { 0, 0.3, 1.5, 9, 9 }
  local held, count, ends, told = {}, 0, now() + seconds, 0
  local function target(k) return k == 0 and { "s" } or { "s", "a", "n" .. k } end
  local function request()
    local n, mode, list, targets = random(6) == 1 and 2 or 1, random(3) == 1 and "shared" or "exclusive", {}, {}
    if random(15) == 1 then
      list[1] = 0
    else
      for i = 1, n do list[i] = random(nodes) end
    end
    for i, k in ipairs(list) do targets[i] = target(k) end
    return targets, mode, table.concat(list, ",")
  end
  while now() < ends do
    local choice = #held >= 3 and 9 or random(10)
    if choice <= 6 then
      local targets, mode, text = request()
      local timeout, any = timeouts[random(#timeouts)], random(6) == 1
      local extended = not any and #held > 0 and random(5) == 1 and held[random(#held)] or nil
      count = count + 1
      local id = extended and extended.id or count
      note(any and "any" or extended and "extend" or "ask", id, timeout, mode, text)
      local options, handle, err = { timeout = timeout, mode = mode }, nil, nil
      if any then
        handle, err = manager:acquire_any(targets, options)
      elseif extended then
        handle, err = extended.handle:extend(targets[1], options)
        text = text:match "%d+"
      else
        handle, err = manager:acquire_all(targets, options)
      end
      if not handle and err.code ~= "timeout" and err.code ~= "deadlock" then error(tostring(err)) end
      if any and handle then
        local got = handle.targets[1].resource
        text = got and got:match "%d+" or "0"
      end
      note(handle and "got" or err.code, id, mode, text, err and err.message or "")
      if err and err.code == "deadlock" then told = told + 1 end
      if handle and not extended then held[#held + 1] = { id = id, handle = handle } end
      if extended and not extended.handle:is_held() then
        note("released", id)
        for i = #held, 1, -1 do if held[i] == extended then table.remove(held, i) end end
      elseif err and err.code == "deadlock" then
        choice = 10 -- as a program would
      end
    end
    if choice > 6 and #held > 0 then
      local all = choice == 10
      for _ = 1, all and #held or 1 do
        local one = table.remove(held, random(#held))
        note("release", one.id)
        if random(8) == 1 then
          one.handle = nil
          collectgarbage()
          collectgarbage()
        else
          one.handle:release()
        end
        note("released", one.id)
      end
    end
    if random(4) == 1 then require("luv").sleep(random(20)) end
  end
  for _, one in ipairs(held) do
    note("release", one.id)
    one.handle:release()
    note("released", one.id)
  end
  file:close()
  return count, told
]]

-- Nodes above the deepest level are locked exclusively, even by requests for shared.
local function conflict(a, b)
  local both_shared = a.mode == "shared" and b.mode == "shared"
  for _, i in ipairs(a.nodes) do
    for _, j in ipairs(b.nodes) do
      if i == 0 or j == 0 or i == j and not both_shared then return true end
    end
  end
  return false
end

-- The waits and holds of a peer, with the times between which each was so for sure, and perhaps. killed, gone: when it
-- was about to be killed, and had ended.
local function read(path, peer, killed, gone, waits, holds)
  local wait, live, held = nil, {}, {} -- held: ids
  local function nodes(text)
    local list = {}
    for k in text:gmatch "%d+" do list[#list + 1] = tonumber(k) end
    return list
  end
  for line in io.lines(path) do
    local at, what, id, rest = line:match "^(%S+) (%S+) (%S+) ?(.*)$"
    at = tonumber(at)
    if what == "ask" or what == "any" or what == "extend" then
      local timeout, mode, text = rest:match "^(%S+) (%S+) (%S+)$"
      if what == "extend" then text = text:match "%d+" end
      wait = { peer = peer, id = id, what = what, timeout = tonumber(timeout), mode = mode, nodes = nodes(text), from = at,
               nested = next(held) ~= nil, sure_till = killed or math.huge, till = gone or math.huge }
      waits[#waits + 1] = wait
    elseif what == "release" or what == "released" then
      for _, hold in ipairs(live[id] or {}) do
        hold.sure_till = math.min(hold.sure_till, at)
        if what == "released" then hold.till = at end
      end
      if what == "released" then held[id] = nil end
    else
      wait.sure_till, wait.till, wait.result, wait.message = at, at, what, rest:match "^%S+ %S+ (.+)$"
      if what == "got" then
        local mode, text = rest:match "^(%S+) (%S+)"
        live[id], held[id] = live[id] or {}, true
        local hold = { peer = peer, id = id, mode = mode, nodes = nodes(text), from = wait.from, sure_from = at,
                       sure_till = killed or math.huge, till = gone or math.huge }
        table.insert(live[id], hold)
        holds[#holds + 1] = hold
      elseif wait.what == "extend" and what == "deadlock" then
        for _, hold in ipairs(live[id] or {}) do hold.sure_till = math.min(hold.sure_till, wait.from) end
      end
    end
  end
end

-- Whether a circle goes through the wait at that time, for sure or perhaps. None goes through the short ones, nor through
-- those of a peer that holds nothing; but a peer may still have what it has dropped or lost.
local function waits_at(wait, at, sure)
  if wait.what == "any" or wait.timeout < 1 or (sure and not wait.nested) then return false end
  return wait.from <= at and at <= (sure and wait.sure_till or wait.till)
end

-- What the peer of a wait asks its store to extend is not in the way of that.
local function is_own(wait, hold) return wait.what == "extend" and hold.peer == wait.peer and hold.id == wait.id end

-- For which of its nodes a request waits for sure at that time; nil: that is not known. Another peer's request for all
-- may keep it from its nodes, and the circle may not go through that.
local function waits_for(wait, at, waits, holds)
  local found
  for _, other in ipairs(waits) do
    if other.peer ~= wait.peer and other.from <= at and at <= other.till and not waits_at(other, at, true) then
      for _, k in ipairs(other.nodes) do if k == 0 then return nil end end
    end
  end
  for _, k in ipairs(wait.nodes) do
    local one = { mode = wait.mode, nodes = { k } }
    for _, list in ipairs { waits, holds } do
      for _, other in ipairs(list) do
        if other.peer ~= wait.peer and other.from <= at and at <= other.till and conflict(one, other) then
          if found and found ~= k then return nil end
          found = k
        end
      end
    end
  end
  return found
end

-- Whether the wait is in a circle for sure at that time: its members, by their peers; nil: it may be in none.
local function circle_at(start, at, waits, holds)
  local seen, queue, i = {}, { start }, 1
  while queue[i] do
    local wait = queue[i]
    local node = waits_for(wait, at, waits, holds)
    for _, hold in ipairs(node and holds or {}) do
      if not is_own(wait, hold) and hold.sure_from <= at and at < hold.sure_till and
        conflict({ mode = wait.mode, nodes = { node } }, hold) then
        if hold.peer == start.peer then return queue end
        if not seen[hold.peer] then
          for _, other in ipairs(waits) do
            if other.peer == hold.peer and waits_at(other, at, true) then
              seen[hold.peer] = true
              queue[#queue + 1] = other
              break
            end
          end
        end
      end
    end
    i = i + 1
  end
end

-- Whether a request that wants the node must wait for another one, which waits for the node `at`: for what that has
-- already (others of its nodes, the nodes above), and for its place in the queue.
local function waits_for_request(mode, node, other, at)
  local want, place, has = { mode = mode, nodes = { node } }, { mode = other.mode, nodes = { at } }, {}
  for _, k in ipairs(other.nodes) do if k ~= at then has[#has + 1] = k end end
  return node == 0 and at ~= 0 or conflict(want, { mode = other.mode, nodes = has }), conflict(want, place)
end

-- Whether the wait may be in a circle at that time. A request takes its nodes one after the other, in an order that is
-- not known here; so it may wait for any one of them, and have the rest.
local function perhaps_circle_at(start, at, waits, holds)
  for _, first in ipairs(start.nodes) do
    local seen, queue, i = {}, {}, 1
    local function follow(wait, node)
      local key = wait.peer .. " " .. node
      if not seen[key] then queue[#queue + 1] = { wait = wait, node = node } end
      seen[key] = true
    end
    follow(start, first)
    while queue[i] do
      local wait, node = queue[i].wait, queue[i].node
      local holders = {}
      for _, hold in ipairs(holds) do
        if not is_own(wait, hold) and hold.from <= at and at <= hold.till and
          conflict({ mode = wait.mode, nodes = { node } }, hold) then
          holders[hold.peer] = true
        end
      end
      if holders[start.peer] then return true end
      for _, other in ipairs(waits) do
        if other.peer ~= wait.peer and waits_at(other, at) then
          for _, k in ipairs(other.nodes) do
            local has, before = waits_for_request(wait.mode, node, other, k)
            if other == start and has and k == first then return true end
            if other ~= start and (has or before or holders[other.peer]) then follow(other, k) end
          end
        end
      end
      i = i + 1
    end
  end
  return false
end

-- Lists the requests and locks during a wait, for the reader of a failure.
local function around(wait, waits, holds)
  local lines = {}
  for name, list in pairs { waited = waits, held = holds } do
    for _, one in ipairs(list) do
      if one.from <= wait.till and one.till >= wait.from then
        lines[#lines + 1] = ("%.6f to %.6f: peer %d, handle %s %s %s, %s%s"):format(one.from, one.till, one.peer, one.id, name,
          table.concat(one.nodes, ","), one.mode, one.what and (" (%s for %g s: %s)"):format(one.what, one.timeout, one.result) or "")
      end
    end
  end
  table.sort(lines)
  return ": " .. tostring(wait.message) .. "\n" .. table.concat(lines, "\n")
end

local function any_is_vain(wait, holds)
  for _, node in ipairs(wait.nodes) do
    local vain = false
    for _, hold in ipairs(holds) do
      if hold.peer == wait.peer and hold.sure_from <= wait.from and wait.from < hold.sure_till and
        conflict({ mode = wait.mode, nodes = { node } }, hold) then
        vain = true
      end
    end
    if not vain then return false end
  end
  return true
end

describe("deadlocks at random", function()
  after_each(support.close_peers)

  for _, kinds in ipairs { "threads", "processes", "both" } do
    it("of " .. kinds .. " are told exactly where the waits make a circle", function()
      local store = setmetatable({
        dsn = support.stores[1].dsn .. "/random-" .. kinds,
        options = {},
      }, { __index = support.stores[1] })
      local directory = support.stores[1].directory .. "/"
      local seed = tonumber(os.getenv "HIERLOCK_RANDOM_SEED") or uv.hrtime() % 100000
      local peers, paths, killed, gone = {}, {}, {}, {}
      for i = 1, PEERS do
        local thread = kinds == "threads" or kinds == "both" and i % 2 == 0
        peers[i] = (thread and support.thread or support.process)(store)
        peers[i].threaded = thread
        paths[i] = directory .. "random-" .. kinds .. "-" .. i
        peers[i]:start(PEER, paths[i], seed + i, SECONDS, NODES)
      end
      if not peers[1].threaded then
        support.sleep(SECONDS / 2)
        killed[1] = support.now()
        peers[1]:signal "sigkill"
        gone[1] = support.now()
      end
      for i, peer in ipairs(peers) do
        if not killed[i] then assert.is_true(peer:result() > 0) end
      end
      local waits, holds, told, lasting = {}, {}, 0, 0
      for i, path in ipairs(paths) do read(path, i, killed[i], gone[i], waits, holds) end
      for _, wait in ipairs(waits) do
        local name = ("seed %d, peer %d, handle %s at %.6f"):format(seed, wait.peer, wait.id, wait.from)
        if wait.result == "deadlock" then
          told = told + 1
          local found = wait.what == "any" and any_is_vain(wait, holds)
          found = found or perhaps_circle_at(wait, wait.from, waits, holds) or
            perhaps_circle_at(wait, wait.till, waits, holds)
          for _, list in ipairs { waits, holds } do
            for _, one in ipairs(list) do
              if not found and one.from >= wait.from and one.from <= wait.till then
                found = perhaps_circle_at(wait, one.from, waits, holds)
              end
            end
          end
          assert.truthy(found, name .. " was told of a deadlock, and there was no circle" .. (found and "" or around(wait, waits, holds)))
        elseif wait.what ~= "any" and wait.timeout >= 1 then
          -- Looked at from its begin on, in steps: a circle of the very same waits.
          local since, first = nil, nil
          local till = math.min(wait.sure_till, wait.from + 20)
          for at = wait.from, till, 0.1 do
            local circle = circle_at(wait, at, waits, holds)
            local key = {}
            for _, one in ipairs(circle or {}) do key[#key + 1] = one.peer .. ":" .. one.from end
            key = circle and table.concat(key, " ")
            if key ~= first then since, first = at, key end
            local together = true
            for _, one in ipairs(circle or {}) do together = together and peers[one.peer].threaded end
            local limit = together and ONE_PROCESS or PROCESSES
            if first then lasting = math.max(lasting, at - since) end
            if first and at - since >= limit then
              local members = {}
              for _, one in ipairs(circle) do
                members[#members + 1] = ("peer %d: %s %s, %s of %s for %g s since %.6f"):format(one.peer, one.what, one.id,
                  one.mode, table.concat(one.nodes, ","), one.timeout, one.from)
              end
              error(name .. " was in a circle that lasted: " .. table.concat(members, "; ") .. around(wait, waits, holds))
            end
          end
        end
      end
      if os.getenv "HIERLOCK_RANDOM_SAYS" then
        print(("%s: %d requests, %d told, the longest circle %.1f s"):format(kinds, #waits, told, lasting))
      end
      assert.is_true(#waits > 0 and #holds > 0)
    end)
  end
end)
