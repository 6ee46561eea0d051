-- How fast and how small hierlock is. All that is compared runs alternately, in
-- short rounds of one run, and the medians are compared: the machine may be busy,
-- but it is then busy for all.
--
--   make bench            everything
--   bench/run.lua NAME…   embedded, mysql, mariadb

local uv = require "luv"
local unpack = table.unpack or unpack

local ROUNDS = tonumber(os.getenv("BENCH_ROUNDS") or 21)
local BARE = assert(os.getenv("BENCH_BARE"), "run it by `make bench`")
local LUA = os.getenv("HIERLOCK_LUA") or "lua5.4"

local function median(values)
  local sorted = {}
  for i, v in ipairs(values) do sorted[i] = v end
  table.sort(sorted)
  return sorted[math.ceil(#sorted / 2)], sorted[1], sorted[#sorted]
end

-- A program that answers a number by a line: bare, loop.lua, handover.lua.
local function contestant(name, command, args, cpu)
  local input, output, buffer = uv.new_pipe(false), uv.new_pipe(false), ""
  if cpu then
    args = { "-c", cpu, command, unpack(args) }
    command = "taskset"
  end
  local handle = assert(uv.spawn(command, { args = args, stdio = { input, output, 2 } }, function() end))
  output:read_start(function(_, data)
    assert(data or buffer == false, name .. " ended")
    buffer = buffer and buffer .. (data or "")
  end)
  local self = { name = name, results = {} }
  function self.start(n) input:write(n .. "\n") end
  function self.answer()
    while not buffer:find("\n") do uv.run("once") end
    local line
    line, buffer = buffer:match("^([^\n]*)\n(.*)$")
    return tonumber(line) or line
  end
  function self.round(n)
    self.start(n)
    self.results[#self.results + 1] = self.answer()
  end
  function self.close()
    buffer = false
    input:close()
    output:close()
    handle:close()
    uv.run("nowait")
  end
  return self
end

local function alternate(contestants, cycles)
  for _, c in ipairs(contestants) do c.start(cycles) c.answer() end -- warm up
  for _ = 1, ROUNDS do
    for _, c in ipairs(contestants) do c.round(cycles) end
  end
  for _, c in ipairs(contestants) do c.close() end
end

local function show(contestants, reference)
  local base = median(reference.results)
  for _, c in ipairs(contestants) do
    local middle, least, most = median(c.results)
    print(("  %-44s %8.1f us  (%.1f to %.1f)  x%.2f"):format(c.name, middle, least, most, middle / base))
  end
end

-- what: a ratio that is promised, at most (or at least) limit
local function verdict(what, value, limit, at_least)
  local ok = at_least and value >= limit or not at_least and value <= limit
  print(("  %-58s %6.2f  (%s %.2f: %s)"):format(what, value, at_least and "at least" or "at most", limit,
                                                 ok and "met" or "MISSED"))
end

-- --------------------------------------------------------------- servers

local function server(name)
  local dsn = os.getenv("HIERLOCK_" .. name:upper() .. "_DSN")
  if not dsn then return print(name .. ": no server; left out") end
  local user, password, host, port, database = dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/(.*)$")
  local socket = os.getenv("HIERLOCK_" .. name:upper() .. "_SOCKET")
  local pid = os.getenv("HIERLOCK_" .. name:upper() .. "_PID")
  os.execute("mysql_client=$(command -v mariadb || command -v mysql); (echo 'SET @buckets = 10000;'; " ..
             "cat sql/schema.sql sql/provision.sql) | $mysql_client -h" .. host .. " -P" .. port ..
             " -u" .. user .. " -p" .. password .. " " .. database)

  local function compare(over, placement, client_cpu, server_cpu)
    os.execute(("taskset -a -p -c %s %s >/dev/null"):format(server_cpu, pid))
    local where = over == "socket" and "socket=" .. socket or "host=" .. host
    local function bare(mode, label)
      return contestant(label, BARE, { "mode=" .. mode, where, "port=" .. port, "user=" .. user,
                        "password=" .. password, "db=" .. database, "buckets=10000" }, client_cpu)
    end
    local url = over == "socket"
      and ("mysql://%s:%s@/%s?socket=%s"):format(user, password, database, socket)
      or ("mysql://%s:%s@%s:%s/%s?tls=off"):format(user, password, host, port, database)
    local ours = contestant("hierlock, from Lua", LUA, { "bench/loop.lua", url, "10000" }, client_cpu)
    local union = bare("union", "bare C: prepared UNION ALL, two sessions")
    local getlock = bare("getlock", "bare C: GET_LOCK + RELEASE_LOCK (one name)")
    local design = bare("design", "bare C: SET, START, three SELECTs, ROLLBACK")
    local all = { ours, union, getlock, design }
    alternate(all, 300)
    print(("\n%s over %s, client and server %s"):format(name, over, placement))
    show(all, union)
    local time = median(ours.results)
    verdict("hierlock / bare C", time / median(union.results), 1.15)
    verdict("hierlock / GET_LOCK", time / median(getlock.results), 0.8)
    verdict("design's sequence / hierlock", median(design.results) / time, 6, true)
  end
  for _, over in ipairs { "tcp", "socket" } do
    compare(over, "on two CPUs", "1", "0")
    compare(over, "on one CPU", "0", "0")
  end
end

-- -------------------------------------------------------------- embedded

local function rss_kib()
  local file = assert(io.open("/proc/self/statm"))
  local pages = tonumber(file:read("*a"):match("^%d+ (%d+)"))
  file:close()
  return pages * 4
end

local function embedded()
  local directory = assert(uv.fs_mkdtemp("/dev/shm/hierlock-bench-XXXXXX"))
  local dsn = "file:" .. directory
  local hierlock = require "hierlock"
  print("\nembedded, from Lua, random ids")
  local alone = contestant("acquire + release, nothing else held", LUA, { "bench/loop.lua", dsn })
  local crowded = contestant("the same, its process holds 10,000 others", LUA,
                             { "bench/loop.lua", dsn .. "2", "10000000", "10000" })
  alternate({ alone, crowded }, 20000)
  show({ alone, crowded }, alone)
  verdict("acquire + release, us", median(alone.results), 6)
  verdict("with 10,000 held / alone", median(crowded.results) / median(alone.results), 1.5)

  -- Hand-over: the waiter says when it came back, on the clock that we share.
  local manager = assert(hierlock.open(dsn))
  local waiter = contestant("waiter", LUA, { "bench/handover.lua", dsn })
  local times = {}
  for i = 1, 500 do
    local handle = assert(manager:acquire_resource("u", "a", "handover"))
    waiter.start(i)
    repeat
      local waits = false
      for _, h in ipairs(manager:holders { "u", "a", "handover" }) do waits = waits or h.waiting end
    until waits
    uv.sleep(1) -- so that it sleeps, too
    local released = uv.hrtime()
    handle:release()
    times[i] = (waiter.answer() - released) / 1e3
  end
  waiter.close()
  local middle, least, most = median(times)
  print(("  %-44s %8.1f us  (%.1f to %.1f)"):format("hand-over to a waiter in another process", middle, least, most))
  verdict("hand-over, us, median", middle, 100)

  -- Memory.
  collectgarbage()
  local handles, before = {}, rss_kib()
  for i = 1, 10000 do
    handles[#handles + 1] = manager:acquire_resource("m" .. i, "a", "r", { timeout = 0 })
  end
  verdict("KiB for a held handle, of 10,000", (rss_kib() - before) / #handles, 2)
  for _, handle in ipairs(handles) do handle:release() end
  handles = nil -- luacheck: ignore
  local function cycles(n)
    for i = 1, n do manager:acquire_resource("m" .. i % 100, "a", "r"):release() end
    collectgarbage()
    collectgarbage()
    return rss_kib()
  end
  local first = cycles(100000)
  verdict("KiB more after 1,000,000 cycles", cycles(1000000) - first, 256)
  manager:close()
  os.execute("rm -rf " .. directory .. " " .. directory .. "2")
end

-- ------------------------------------------------------------------- run

local run = { embedded = embedded, mysql = function() server("mysql") end,
              mariadb = function() server("mariadb") end }
local names = #arg > 0 and arg or { "embedded", "mysql", "mariadb" }
for _, name in ipairs(names) do
  assert(run[name], "unknown: " .. name)()
end
