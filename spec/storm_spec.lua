-- Very many waiters for one lease, in queues of their own: their cost to the server, and that all of them are
-- granted.
-- Parts: stores

local support = require "spec.support"

-- The number of each kind, and of managers: sharing waiters of one manager wait behind the first. STORM: so many in
-- all; prints its observations.
local ALL = tonumber(os.getenv "STORM" or 100)
local SHARED = 10
local LEASES = math.floor((ALL - SHARED) / 2)
local EXCLUSIVE = ALL - SHARED - LEASES
-- So many a second, of all of them together, and of as many that look for themselves.
local QUERIES_MOST, LOOKERS_MOST = 100, 3
local WATCHED, TIMEOUT, PATIENCE = 1.5, 120, 30
local USER = "storm" .. math.floor(support.now())

support.each_connection(function(server)
  local store = support.leased(server)
  local holder, managers

  setup(function() store.prepare() end)
  before_each(function()
    managers = {}
    holder = support.open(store)
  end)
  after_each(function()
    for _, manager in ipairs(managers) do manager:close() end
    holder:close()
  end)

  local function open(options)
    managers[#managers + 1] =
      support.open(store, options, store.dialect == "postgresql" and "sslmode=disable" or "tls=off")
    return managers[#managers]
  end

  -- Each in a node of its own below the user, or all in one, which they share.
  local function start_all()
    local pendings, manager = {}, open { pool_size = ALL }
    for i = 1, EXCLUSIVE + LEASES do
      pendings[i] = assert(manager:start({ USER, "a" .. i, "r" .. i },
                                         { timeout = TIMEOUT, ttl = i > EXCLUSIVE and TIMEOUT or nil }))
    end
    for _ = 1, SHARED do
      pendings[#pendings + 1] = assert(open():start({ USER, "shared", "r" }, { timeout = TIMEOUT, mode = "shared" }))
    end
    return pendings
  end

  -- So many statements were executed a second; where the server counts none, so many sessions executed any.
  local function queries()
    local sql = store.root() or store.sql()
    if store.dialect == "postgresql" then
      sql:query([[CREATE TEMP TABLE storm AS SELECT pid, query_start FROM pg_stat_activity
        WHERE usename = 'testuser']])
      support.sleep(WATCHED)
      local changed = sql:query([[SELECT count(*) FROM pg_stat_activity a JOIN storm USING (pid)
        WHERE a.query_start > storm.query_start]])[1][1]
      sql:query "DROP TABLE storm"
      return tonumber(changed)
    end
    local function count()
      return tonumber(sql:query("SHOW GLOBAL STATUS LIKE 'Questions'")[1][2])
    end
    local before = count()
    support.sleep(WATCHED)
    return (count() - before) / WATCHED
  end

  it("cost the server no more than one", function()
    local lease = assert(holder:acquire({ USER }, { ttl = TIMEOUT }))
    local pendings = start_all()
    -- Connecting costs queries, too; so silence says that all wait.
    local seen
    support.wait_until(function()
      seen = queries()
      return seen <= (store.dialect == "postgresql" and LOOKERS_MOST or QUERIES_MOST)
    end, "silence", PATIENCE)
    for _, pending in ipairs(pendings) do
      if pending:done() then error(select(2, pending:wait())) end
    end
    assert(lease:release { confirm = true })
    local began = support.now()
    -- Two nodes may share a bucket: so each is released before the next is waited for.
    support.wait_until(function()
      for i = #pendings, 1, -1 do
        if pendings[i]:done() then
          local handle, err = pendings[i]:wait()
          assert(handle, err)
          assert(handle:release())
          table.remove(pendings, i)
        end
      end
      return #pendings == 0
    end, "all of them")
    if os.getenv "STORM" then print(ALL, seen, support.now() - began) end
  end)

  -- The first looks for both.
  it("are kept out by none of them that is stopped", function()
    local lease = assert(holder:acquire({ USER }, { ttl = TIMEOUT }))
    local first = support.process(store)
    finally(support.close_peers)
    first:acquire("h", "acquire", { USER, "a1", "r1" }, { timeout = TIMEOUT })
    support.wait_until(function() return store.waiting { USER, "a1", "r1" } == 1 end, "the first")
    support.sleep(0.1) -- until it looks
    local second = assert(open():start({ USER, "a2", "r2" }, { timeout = 30 }))
    support.wait_until(function()
      return tonumber((store.root() or store.sql()):query(store.dialect == "postgresql"
        and "SELECT count(*) FROM pg_locks WHERE locktype='advisory' AND NOT granted"
        or "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE='User lock'")[1][1]) == 1
    end, "the second")
    first:signal "sigstop"
    assert(lease:release { confirm = true })
    local began = support.now()
    local handle = assert(second:wait())
    assert.is_true(support.now() - began < 20)
    handle:release()
    first:signal "sigcont"
    assert.is_true(first:result())
    first:release "h"
  end)
end)
