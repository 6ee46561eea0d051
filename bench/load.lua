-- Load and limits: throughput and waits when many clients want one node; how many
-- locks a process can hold; how many coroutines can wait. Prints tables, and draws
-- them (BENCH_LOAD_SVG).

local uv = require "luv"
local hierlock = require "hierlock"
local contest = require "bench.contest"
local draw = require "bench.load_chart"
local servers = require "bench.mysql"

local LUA = os.getenv("HIERLOCK_LUA") or "lua5.4"
local FILES = assert(os.getenv("BENCH_FILES"), "run it by `make bench`")
-- The number of buckets: so large that few names share one.
local MANY = 10000000
local SECONDS = 3
-- Cycles that are not counted: connections are made, files are opened.
local WARM = 4000

local function embedded(name) return "file:" .. FILES .. "/" .. name end

local function say(...) print((("  "):rep(1) .. ("%12s"):rep(select("#", ...))):format(...)) end

-- ------------------------------------------------------------ contention

-- Clients that want one account, each a process: grants per second, and the
-- waits of a client.
local function contention(name, dsn, buckets)
  local clients, series = {}, { name = name, x = {}, throughput = {}, unfair = {} }
  print(("\n%s: clients that want one account all the time, for %d s"):format(name, SECONDS))
  say("clients", "grants/s", "median ms", "longest ms", "ratio")
  for power = 0, 8 do
    local n = 2 ^ power
    while #clients < n do
      clients[#clients + 1] = contest.client("client", LUA, { "bench/load_client.lua", dsn, tostring(buckets) })
    end
    uv.sleep(200)
    local at = uv.hrtime() + 0.3e9
    for i = 1, n do clients[i].start(("%d %d"):format(at, at + SECONDS * 1e9)) end
    local waits = {}
    for i = 1, n do
      for wait in clients[i].answer():gmatch("%d+") do waits[#waits + 1] = tonumber(wait) / 1e3 end
    end
    local _, median, _, _, longest = contest.quartiles(waits)
    local i = #series.x + 1
    series.x[i], series.throughput[i], series.unfair[i] = n, #waits / SECONDS, longest / median
    say(("%d"):format(n), ("%.0f"):format(#waits / SECONDS), ("%.2f"):format(median), ("%.1f"):format(longest),
        ("%.1f"):format(longest / median))
  end
  for _, client in ipairs(clients) do client.close() end
  return series
end

-- ------------------------------------------------------------------ held

-- The time of a cycle while the manager holds more and more locks.
local function held(name, dsn, options, steps)
  local manager = assert(hierlock.open(dsn, options))
  local handles, tried, before = {}, 0, contest.rss_kib()
  local series = { name = name, x = {}, cycle = {} }
  print("\n" .. name .. ": acquire + release of a resource while the process holds others")
  say("held", "us", "KiB each")
  for _, step in ipairs(steps) do
    while #handles < step do
      tried = tried + 1
      handles[#handles + 1] = manager:acquire_resource("other" .. tried, "a", "r", { timeout = 0 })
    end
    local times, at = {}, 0
    while #times < 2000 + WARM do
      at = at + 1
      local began = uv.hrtime()
      local handle = manager:acquire { "user" .. at, "account", "resource" } -- nil: it shares a bucket with a held one
      if handle then
        handle:release()
        times[#times + 1] = (uv.hrtime() - began) / 1e3
      end
    end
    local median = contest.median({ (table.unpack or unpack)(times, WARM + 1) })
    series.x[#series.x + 1], series.cycle[#series.cycle + 1] = step, median
    say(("%d"):format(step), ("%.1f"):format(median),
        step > 0 and ("%.2f"):format((contest.rss_kib() - before) / step) or "")
  end
  manager:close()
  return series
end

-- --------------------------------------------------------------- waiting

local function descriptors_at_most()
  local file = assert(io.open("/proc/self/limits"))
  local limit = file:read("*a"):match("Max open files%s+(%d+)")
  file:close()
  return tonumber(limit)
end

-- So many coroutines of a loop wait for an account; then the account is released, and
-- each coroutine gets it and gives it back. Returns how long the loop stood still at most.
local function waiting(counts)
  local series = { name = "embedded, luv", x = {}, stall = {}, total = {} }
  print("\nembedded: coroutines of one loop that wait for one account, then get it one after the other")
  say("waiting", "in all s", "stall ms")
  for _, count in ipairs(counts) do
    count = math.min(count, descriptors_at_most() - 500) -- luv wants one for each that waits
    local dsn = embedded("waiting")
    local other = assert(hierlock.open(dsn))
    local manager = assert(hierlock.open(dsn, { loop = "luv", timeout = 600 }))
    local blocker = assert(other:acquire { "user", "account" })
    local stall, last, left = 0, uv.hrtime(), count
    local heart = uv.new_timer()
    heart:start(1, 1, function()
      local now = uv.hrtime()
      stall, last = math.max(stall, (now - last) / 1e6 - 1), now
    end)
    local function each()
      local handle = assert(manager:acquire { "user", "account" })
      handle:release()
      left = left - 1
    end
    local began, started = uv.hrtime(), 0
    -- Starts the coroutines in turns, as a program's requests come, and not all at once.
    local starter = uv.new_idle()
    starter:start(function()
      for _ = 1, math.min(50, count - started) do
        started = started + 1
        assert(coroutine.resume(coroutine.create(each)))
      end
      if started == count then
        starter:close()
        blocker:release()
      end
    end)
    while left > 0 do uv.run("once") end
    local total = (uv.hrtime() - began) / 1e9
    heart:close()
    uv.run("nowait")
    manager:close()
    other:close()
    local i = #series.x + 1
    series.x[i], series.stall[i], series.total[i] = count, math.max(stall, 0.01), total
    say(("%d"):format(count), ("%.2f"):format(total), ("%.1f"):format(stall))
  end
  return series
end

-- ------------------------------------------------------------------- all

return function()
  local contended = { contention("embedded", embedded("contention"), MANY) }
  for _, kind in ipairs { "mysql", "mariadb" } do
    local server = servers[kind]
    if server then
      server.root("SET GLOBAL max_connections = 2500")
      local name = (kind == "mysql" and "MySQL " or "MariaDB ") .. server.version
      contended[#contended + 1] = contention(name, server.hierlock("tcp")[2], server.hierlock("tcp")[3])
    end
  end
  -- The servers first: what the other gives back to the system would count for less than nothing there.
  local of_server = {}
  if servers.mysql then
    of_server[1] = held("MySQL " .. servers.mysql.version, servers.mysql.hierlock("tcp")[2],
                        { buckets = tonumber(servers.mysql.hierlock("tcp")[3]), pool_size = 2100 },
                        { 0, 100, 250, 500, 1000, 2000 })
  end
  local of_process = { held("embedded", embedded("held"), { buckets = MANY },
                            { 0, 1000, 3000, 10000, 30000, 100000 }) }
  local waited = waiting { 100, 1000, 5000, 10000, 20000 }
  local path = os.getenv("BENCH_LOAD_SVG")
  local file = assert(io.open(path, "w"))
  file:write(draw {
    { title = "Grants per second, of one account", x = "clients", y = "per s", of = "throughput", series = contended },
    { title = "Longest wait / median wait", x = "clients", y = "ratio", of = "unfair", series = contended },
    { title = "acquire + release, embedded", x = "locks that the process holds", y = "µs", of = "cycle", series = of_process },
    { title = "acquire + release, MySQL", x = "sessions that hold a lock", y = "µs", of = "cycle", series = of_server },
    { title = "All of them got it", x = "waiting coroutines", y = "s", of = "total", series = { waited } },
    { title = "Longest stall of their loop", x = "waiting coroutines", y = "ms", of = "stall", series = { waited } },
  })
  file:close()
  print("\ndrawn: " .. path)
end
