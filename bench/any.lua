-- Measures how fast a work queue hands over: threads take the first free target of n, and give it back at
-- once. Usage:
--     lua bench/any.lua DSN TARGETS THREADS SECONDS
-- TARGETS = 1 is `acquire`, to compare with.

local thread = require "cqueues.thread"

local dsn, n, workers, seconds = arg[1], tonumber(arg[2]), tonumber(arg[3]), tonumber(arg[4])

local function work(connection, dsn, n, seconds, path, cpath) -- luacheck: ignore 431
  package.path, package.cpath = path, cpath
  local now = require "cqueues".monotime
  local manager = assert(require "hierlock".open(dsn))
  local targets, granted, longest = {}, 0, 0
  for i = 1, tonumber(n) do targets[i] = { "queue", "a", "r" .. i } end
  local start = now()
  local at = start
  while at - start < tonumber(seconds) do
    local handle = assert(#targets == 1 and manager:acquire(targets[1]) or manager:acquire_any(targets))
    longest = math.max(longest, now() - at)
    handle:release()
    granted, at = granted + 1, now()
  end
  manager:close()
  connection:write(("%d %f\n"):format(granted, longest))
  connection:flush()
end

local threads, all, longest, least = {}, 0, 0, math.huge
for i = 1, workers do
  threads[i] = { thread.start(work, dsn, tostring(n), tostring(seconds), package.path, package.cpath) }
end
for _, each in ipairs(threads) do
  local granted, wait = each[2]:read("*l"):match "(%S+) (%S+)"
  all, longest, least = all + granted, math.max(longest, tonumber(wait)), math.min(least, tonumber(granted))
  each[1]:join()
end
print(("%d targets, %d threads: %.0f grants/s, longest wait %.0f ms; a thread got %d at least, %.0f on average"):format(
  n, workers, all / seconds, longest * 1000, least, all / workers))
