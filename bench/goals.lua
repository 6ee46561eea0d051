-- The goals of speed and size: each store against its lower bound. peers.lua
-- compares hierlock with other locks.

local uv = require "luv"
local contest = require "bench.contest"
local servers = require "bench.mysql"
local symfony = require "bench.symfony"

local CLIENTS = assert(os.getenv("BENCH_CLIENTS"), "run it by `make bench`")
local BARE = CLIENTS .. "/bare"
local LUA = os.getenv("HIERLOCK_LUA") or "lua5.4"
local FILES = os.getenv("BENCH_FILES")

local median = contest.median
local goals = {}

local function show(clients, reference)
  local base = median(reference.results)
  for _, c in ipairs(clients) do
    local _, middle, _, least, most = contest.quartiles(c.results)
    print(("  %-44s %8.1f us  (%.1f to %.1f)  x%.2f"):format(c.name, middle, least, most, middle / base))
  end
end

-- what: a promised ratio, at most (or at least) limit
local function verdict(what, value, limit, at_least)
  local ok = at_least and value >= limit or not at_least and value <= limit
  print(("  %-58s %6.2f  (%s %.2f: %s)"):format(what, value, at_least and "at least" or "at most", limit,
                                                 ok and "met" or "MISSED"))
end

local function alternate(clients, cycles)
  contest.alternate(clients, cycles)
  for _, c in ipairs(clients) do c.close() end
end

-- --------------------------------------------------------------- servers

local function pin(server, cpu) os.execute(("taskset -a -p -c %s %s >/dev/null"):format(cpu, server.pid)) end

local function on_server(name)
  local server = servers[name]
  if not server then return print(name .. ": no server; left out") end

  local function compare(over, placement, client_cpu, server_cpu)
    pin(server, server_cpu)
    local function bare(mode, label)
      return contest.client(label, BARE, server.bare(mode, over), client_cpu)
    end
    local ours = contest.client("hierlock, from Lua", LUA, server.hierlock(over), client_cpu)
    local rows = bare("rows", "bare C: one prepared statement, two sessions")
    local getlock = bare("getlock", "bare C: GET_LOCK + RELEASE_LOCK (one name)")
    local design = bare("design", "bare C: SET, START, three SELECTs, ROLLBACK")
    local all = { ours, rows, getlock, design }
    alternate(all, 300)
    print(("\n%s over %s, client and server %s"):format(name, over, placement))
    show(all, rows)
    local time = median(ours.results)
    verdict("hierlock / bare C", time / median(rows.results), 1.15)
    verdict("hierlock / GET_LOCK", time / median(getlock.results), 0.8)
    verdict("design's sequence / hierlock", median(design.results) / time, 6, true)
  end
  for _, over in ipairs { "tcp", "socket" } do
    compare(over, "on two CPUs", "1", "0")
    compare(over, "on one CPU", "0", "0")
  end
end

-- Leases beside the same packets from C; sessions of a space with leases beside sessions of a space
-- without.
local function leases_on(name)
  local server = servers[name]
  if not server then return end
  pin(server, "0")
  server.lease()
  local ours = contest.client("a lease by hierlock, from Lua", LUA, server.leased("tcp", "0", "lease"), "1")
  local bare = contest.client("a lease by bare C: the same packets", BARE, server.leased_bare "tcp", "1")
  alternate({ ours, bare }, 100)
  print(("\nleases on %s over tcp, client and server on two CPUs"):format(name))
  show({ ours, bare }, bare)
  verdict("a lease by hierlock / bare C", median(ours.results) / median(bare.results), 1.25)
  -- In so few buckets the locks of these clients would block the clients
  -- above.
  local refreshed = contest.client("refresh", LUA, server.leased("tcp", "0", "refresh"), "1")
  local imported = contest.client("export and import", LUA, server.leased("tcp", "0", "import"), "1")
  alternate({ refreshed, imported }, 100)
  show({ refreshed, imported }, ours)
  local without = contest.client("a session, in a space without leases", LUA, server.hierlock "tcp", "1")
  local within = contest.client("a session, in a space with leases", LUA, server.leased("tcp"), "1")
  local beside = contest.client("a session, beside 10,000 leases", LUA, server.crowded "tcp", "1")
  local clients = { without, within, beside }
  alternate(clients, 300)
  print ""
  show(clients, without)
  verdict("in a space with leases / without", median(within.results) / median(without.results), 1.15)
  verdict("beside 10,000 leases / without", median(beside.results) / median(without.results), 1.15)
end

function goals.mysql() on_server("mysql") leases_on("mysql") end
function goals.mariadb() on_server("mariadb") leases_on("mariadb") end
function goals.leases() leases_on("mysql") leases_on("mariadb") end

-- The server of bench/servers.sh, which is reached by a socket alone.
function goals.postgresql()
  local directory, pid = os.getenv "BENCH_POSTGRESQL", os.getenv "BENCH_POSTGRESQL_PID"
  if not directory then return print "postgresql: no server; left out" end
  local program, target = CLIENTS .. "/postgresql", "host=" .. directory .. " user=bench dbname=postgres"
  local function compare(placement, client_cpu, server_cpu)
    pin({ pid = pid }, server_cpu)
    local url = "postgresql://bench@/postgres?host=" .. directory
    local ours = contest.client("hierlock, from Lua", LUA, { "bench/loop.lua", url }, client_cpu)
    local rows = contest.client("bare C: three numbers in one trip, two sessions", program, { "rows", target }, client_cpu)
    local lock = contest.client("bare C: pg_advisory_lock + unlock (one number)", program, { "lock", target }, client_cpu)
    alternate({ ours, rows, lock }, 300)
    print(("\npostgresql over a socket, client and server %s"):format(placement))
    show({ ours, rows, lock }, rows)
    verdict("hierlock / bare C", median(ours.results) / median(rows.results), 1.2)
  end
  -- The gate belongs to a database, so clients beside a lease have a database
  -- of their own.
  local function leases(placement, client_cpu, server_cpu)
    pin({ pid = pid }, server_cpu)
    local sql = require("hierlock.command.lease_tables").postgresql()
    for _, database in ipairs { "postgres", "leased" } do
      if database == "leased" then
        os.execute(("createdb -h %s -U bench leased 2>/dev/null"):format(directory))
      end
      local connection = assert(require("hierlock.store.postgresql").connect(
        ("postgresql://bench@/%s?host=%s"):format(database, directory), "bench"))
      assert(connection:query(sql))
      connection:close()
    end
    local url = "postgresql://bench@/%s?host=" .. directory
    local ours = contest.client("a lease by hierlock, from Lua", LUA,
      { "bench/loop.lua", url:format "postgres", "10000000", "0", "lease" }, client_cpu)
    local bare = contest.client("a lease by bare C: the same packets", program, { "lease", target }, client_cpu)
    local leased = { ours, bare }
    for label, how in pairs { refresh = "refresh", ["export and import"] = "import" } do
      leased[#leased + 1] = contest.client(label, LUA,
        { "bench/loop.lua", url:format "postgres", "10000000", "0", how }, client_cpu)
    end
    alternate(leased, 300)
    print(("\nleases on postgresql over a socket, client and server %s"):format(placement))
    show(leased, bare)
    verdict("a lease by hierlock / bare C", median(ours.results) / median(bare.results), 1.25)
    -- A new manager closes the gate that the leases above have opened.
    local closing = assert(require("hierlock").open(url:format "postgres"))
    assert(closing:leases())
    closing:close()
    local without = contest.client("a session where there is no lease", LUA, { "bench/loop.lua", url:format "postgres" }, client_cpu)
    local beside = contest.client("a session beside a lease", LUA,
      { "bench/loop.lua", url:format "leased", "10000000", "0", "beside" }, client_cpu)
    alternate({ without, beside }, 300)
    print ""
    show({ without, beside }, without)
    verdict("beside a lease / without", median(beside.results) / median(without.results), 1.15)
  end
  compare("on two CPUs", "1", "0")
  compare("on one CPU", "0", "0")
  leases("on two CPUs", "1", "0")
end

-- Half a millisecond there and back: two machines in one building.
local LINE_US = 250

local function over_line(name)
  local server = servers[name]
  if not server then return print(name .. ": no server; left out") end
  pin(server, "0")
  local line = contest.client("line", CLIENTS .. "/line", { server.host, server.port, tostring(LINE_US) }, "0")
  local port = line.answer()
  local ours = contest.client("hierlock, from Lua", LUA, server.hierlock(port), "1")
  local rows = contest.client("bare C: one prepared statement, two sessions", BARE, server.bare("rows", port), "1")
  local getlock = contest.client("bare C: GET_LOCK + RELEASE_LOCK (one name)", BARE, server.bare("getlock", port), "1")
  alternate({ ours, rows, getlock }, 100)
  print(("\n%s over a line of %.1f ms there and back, client and server on two CPUs"):format(name, 2 * LINE_US / 1000))
  show({ ours, rows, getlock }, getlock)
  verdict("hierlock / bare C", median(ours.results) / median(rows.results), 1.15)
  verdict("hierlock / GET_LOCK", median(ours.results) / median(getlock.results), 0.6)
  line.close()
end

function goals.line()
  over_line("mysql")
  over_line("mariadb")
end

-- -------------------------------------------------------------- embedded

local function memory(manager)
  collectgarbage()
  local handles, before = {}, contest.rss_kib()
  for i = 1, 10000 do
    handles[#handles + 1] = manager:acquire_resource("m" .. i, "a", "r", { timeout = 0 })
  end
  verdict("KiB for a held handle, of 10,000", (contest.rss_kib() - before) / #handles, 2)
  for _, handle in ipairs(handles) do handle:release() end
  handles = nil -- luacheck: ignore
  local function cycles(n)
    for i = 1, n do manager:acquire_resource("m" .. i % 100, "a", "r"):release() end
    collectgarbage()
    collectgarbage()
    return contest.rss_kib()
  end
  local first = cycles(100000)
  verdict("KiB more after 1,000,000 cycles", cycles(1000000) - first, 256)
end

function goals.embedded()
  local dsn = "file:" .. FILES .. "/embedded"
  local function client(name, ...) return contest.client(name, LUA, { "bench/loop.lua", ... }) end
  print("\nembedded, from Lua, random ids")
  local alone = client("acquire + release, nothing else held", dsn)
  local crowded = client("the same, its process holds 10,000 others", dsn .. "2", "10000000", "10000")
  local leased = client("a lease, acquire + release", dsn .. "3", "10000000", "0", "lease")
  local refreshed = client("refresh", dsn .. "3", "10000000", "0", "refresh")
  local imported = client("export and import", dsn .. "3", "10000000", "0", "import")
  local all = { alone, crowded, leased, refreshed, imported }
  alternate(all, 20000)
  show(all, alone)
  verdict("acquire + release, us", median(alone.results), 6)
  verdict("with 10,000 held / alone", median(crowded.results) / median(alone.results), 1.5)

  local holder, waiter = client("holder", dsn), client("waiter", dsn)
  local times = {}
  for i = 1, 500 do times[i] = contest.handover(holder, waiter, 1) end
  holder.close()
  waiter.close()
  local _, middle, _, least, most = contest.quartiles(times)
  print(("  %-44s %8.1f us  (%.1f to %.1f)"):format("hand-over to a waiter in another process", middle, least, most))
  verdict("hand-over, us, median", middle, 100)

  local manager = assert(require "hierlock".open(dsn))
  memory(manager)
  manager:close()
end

-- ------------------------------------------------- stores with leases only

-- The time of a round: long enough for a client's caches to be warm again.
local ROUND_MS = 50

-- The hand-overs of so many rounds, in microseconds. Clients that poll are met at any point between two tries.
local function handovers(name, client, rounds, polls)
  local holder, waiter, times = client("holder"), client("waiter"), {}
  for i = 1, rounds do times[i] = contest.handover(holder, waiter, 5 + (polls and math.random(0, polls) or 0)) end
  holder.close()
  waiter.close()
  local _, middle, _, least, most = contest.quartiles(times)
  print(("  %-44s %8.1f us  (%.1f to %.1f)"):format("hand-over, " .. name, middle, least, most))
  return middle
end

-- Runs all clients in turn. A client that cannot run here is { name, missing = why }. The others are
-- { name, command, arguments, bare = the name of its floor, limit, polls = ms between two tries,
-- hands_over = how often, goal = at most so many microseconds }.
local function beside(title, cpu, all)
  local clients, by_name = {}, {}
  local function client(one, name) return contest.client(name or one.name, one[1], one[2], cpu) end
  for _, one in ipairs(all) do
    if not one.missing then
      clients[#clients + 1] = client(one)
      by_name[one.name] = clients[#clients]
    end
  end
  contest.alternate(clients, nil, ROUND_MS)
  for _, c in ipairs(clients) do c.close() end
  print("\n" .. title)
  show(clients, by_name[all[1].bare])
  for _, one in ipairs(all) do
    if one.missing then print(("  %-44s not run: %s"):format(one.name, one.missing)) end
    if one.bare then
      local ratio = median(by_name[one.name].results) / median(by_name[one.bare].results)
      verdict(one.name .. " / bare C", ratio, one.limit)
    end
  end
  for _, one in ipairs(all) do
    if one.hands_over and not one.missing then
      local middle = handovers(one.name:match "^[^,]+", function(name) return client(one, name) end, one.hands_over, one.polls)
      if one.goal then verdict("hand-over, us, median", middle, one.goal) end
    end
  end
end

local SENT, WAITED = "hierlock, release not waited for", "hierlock, release waited for"
local BARE_SENT, BARE_WAITED = "bare C, release not waited for", "bare C, release waited for"

local function loop(dsn, how, interoperate) return { "bench/loop.lua", dsn, "10000000", "0", how, interoperate } end

-- Without it PHP is left out, with a message.
local function php(store, extension, package, ...)
  return { "php", { "bench/symfony.php", ... }, name = "Symfony " .. store .. ", PHP, one name",
           missing = symfony.missing(extension, package) }
end

local function polling(client, times)
  client.polls, client.hands_over = 100, times
  return client
end

-- The server of bench/servers.sh; without a pause, though it has begun only now.
function goals.redis()
  local socket, pid = os.getenv "BENCH_REDIS", os.getenv "BENCH_REDIS_PID"
  if not socket then return print "redis: no server; left out" end
  if not uv.fs_stat(CLIENTS .. "/redis") then return print "redis: needs libhiredis-dev; left out" end
  pin({ pid = pid }, "0")
  local dsn = "redis+unix://" .. socket .. "?quarantine=0"
  beside("a lease of three nodes on redis over a socket, client and server on two CPUs", "1", {
    { LUA, loop(dsn, "sent"), name = SENT, bare = BARE_SENT, limit = 1.2, hands_over = 200, goal = 1000 },
    { CLIENTS .. "/redis", { socket, "sent" }, name = BARE_SENT },
    { LUA, loop(dsn, "lease"), name = WAITED, bare = BARE_WAITED, limit = 1.2 },
    { CLIENTS .. "/redis", { socket, "lease" }, name = BARE_WAITED },
    polling({ CLIENTS .. "/redis", { socket, "recipe" }, name = "bare C: SET NX, one name" }, 60),
    { LUA, loop(dsn, "sent", "symfony"), name = "hierlock with Symfony, release not waited for", hands_over = 200, goal = 1000 },
    polling({ "/usr/bin/python3", { "bench/redis_lock.py", socket }, name = "redis-py's Lock, Python, one name",
              missing = symfony.lacks_redis_py() }, 60),
    polling(php("RedisStore", "redis", "php-redis", "redis", socket), 60),
  })
  -- From hierlock to PHP and back: each polls the other's lock in its own way.
  local theirs = php("RedisStore", "redis", "php-redis", "redis", socket)
  if theirs.missing then return end
  for _, giver in ipairs { "Symfony", "hierlock" } do
    local function client(role)
      if (role == "holder") == (giver == "Symfony") then return contest.client(role, theirs[1], theirs[2], "1") end
      return contest.client(role, LUA, loop(dsn, "sent", "symfony"), "1")
    end
    handovers(giver == "Symfony" and "from Symfony to hierlock" or "from hierlock to Symfony", client, 100, 100)
  end
end

-- The server of spec/support/servers.sh.
function goals.memcached()
  local dsn, pid = os.getenv "HIERLOCK_MEMCACHED_DSN", os.getenv "HIERLOCK_MEMCACHED_PID"
  if not dsn then return print "memcached: no server; left out" end
  pin({ pid = pid }, "0")
  local host, port = dsn:match "^memcached://([^:]+):(%d+)"
  local bare = CLIENTS .. "/memcached"
  beside("a lease of three nodes on memcached over tcp, client and server on two CPUs", "1", {
    { LUA, loop(dsn, "sent"), name = SENT, bare = BARE_SENT, limit = 1.3, hands_over = 200 },
    { bare, { host, port, "sent" }, name = BARE_SENT },
    { LUA, loop(dsn, "lease"), name = WAITED, bare = BARE_WAITED, limit = 1.3 },
    { bare, { host, port, "lease" }, name = BARE_WAITED },
    polling(php("MemcachedStore", "memcached", "php-memcached", "memcached", host, port), 60),
  })
end

-- BENCH_SQLITE: a directory on a disk, whose speed makes up most of the time.
function goals.sqlite()
  local directory = os.getenv "BENCH_SQLITE" or FILES
  for _, synchronous in ipairs { "full", "normal" } do
    local file = ("%s/%s-%d"):format(directory, synchronous, uv.os_getpid())
    -- A file for each client: in a common file, one client's writes would make the
    -- others' caches stale.
    local function dsn(name) return ("sqlite:%s-%s.db?synchronous=%s"):format(file, name, synchronous) end
    for _, name in ipairs { "waited", "sent", "bare" } do assert(require("hierlock").open(dsn(name))):close() end
    local all = {
      { LUA, loop(dsn "waited", "lease"), name = WAITED, bare = BARE_WAITED, limit = 1.3, hands_over = 200 },
      { CLIENTS .. "/sqlite", { file .. "-bare.db", synchronous }, name = BARE_WAITED },
      { LUA, loop(dsn "sent", "sent"), name = SENT },
    }
    if synchronous == "full" then -- as PHP has it
      all[#all + 1] = polling(php("PdoStore", "pdo_sqlite", "php-sqlite3", "pdo", "sqlite:" .. file .. "-symfony.db"), 60)
    end
    beside("a lease of three nodes on sqlite, synchronous=" .. synchronous, nil, all)
    os.execute(("rm -f %s*"):format(file))
  end
end

-- --------------------------------------------------------------- waiting

-- The cost of `start` and `wait` instead of blocking, and of a waiting
-- coroutine.
local function waiting(name, dsn)
  print("\n" .. name .. ", waiting without blocking")
  local function client(label, ...) return contest.client(label, LUA, { "bench/loop.lua", dsn, "10000", "0", ... }) end
  local blocking, started = client("acquire + release"), client("start + wait + release", "start")
  alternate({ blocking, started }, 300)
  show({ blocking, started }, blocking)
  verdict("start + wait beyond acquire, us", median(started.results) - median(blocking.results), 40)

  local cqueues = require "cqueues"
  local manager = assert(require "hierlock".open(dsn, { loop = "cqueues", buckets = 10000 }))
  local held = assert(manager:acquire { "w" })
  local queue, n = cqueues.new(), 0
  local function add(count)
    for _ = 1, count do
      queue:wrap(function()
        assert(manager:acquire { "w" }):release()
        n = n + 1
      end)
    end
    for _ = 1, 3 do assert(queue:step(0)) end
    collectgarbage()
    collectgarbage()
    return contest.rss_kib()
  end
  local before = add(10)
  local after = add(900)
  -- Only for the first store: later stores reuse memory that was freed before.
  if name == "embedded" then verdict("KiB for a waiting coroutine, of 900", (after - before) / 900, 4) end
  verdict("connections of its manager meanwhile", manager:stats().connections, 2)
  held:release()
  assert(queue:loop())
  assert(n == 910)
  manager:close()
end

function goals.waiting()
  waiting("embedded", "file:" .. FILES .. "/waiting")
  for _, name in ipairs { "mysql", "mariadb" } do
    if servers[name] then waiting(name, servers[name].hierlock("tcp")[2]) end
  end
end

return goals
