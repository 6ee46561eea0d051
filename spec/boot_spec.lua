-- Leases on a machine that has just been started: its clocks say next to nothing, and a part of the ttl is more than that.

local support = require "spec.support"

-- The shell command that follows it runs where the clocks have just begun.
local BEGINNING = "unshare --time --monotonic -$(cut -d. -f1 /proc/uptime) --boottime -$(cut -d. -f1 /proc/uptime)"

-- A hundredth of it is more than the time since the start as long as the specs run.
local TTL = 7 * 86400

local function missing()
  local said, status = support.run("os.exit(tonumber(io.open('/proc/uptime'):read('n')) < 60)", BEGINNING)
  return status ~= 0 and "this machine gives no time namespace: " .. said or nil
end

describe("where the clocks have just begun", function()
  support.unless_missing(missing(), "unshare", function()
    local STORES = { "quorum", "sqlite", "embedded" }

    -- The specs of leases on that store, which have begun.
    local function begin(store)
      local directory = os.getenv("HIERLOCK_SPEC_DIRECTORY") .. "/beginning-" .. store
      local command = { "mkdir -m 700 ", directory, " && env -u MYSQL_DSN -u HIERLOCK_REQUIRE" }
      for _, server in ipairs { "MYSQL", "MARIADB", "POSTGRESQL", "REDIS", "MEMCACHED" } do
        command[#command + 1] = " -u HIERLOCK_" .. server .. "_DSN"
      end
      command[#command + 1] = (" HIERLOCK_SPEC_TTL=%d HIERLOCK_SPEC_DIRECTORY=%s "):format(TTL, directory)
      command[#command + 1] = BEGINNING .. " " .. (os.getenv("HIERLOCK_LUA") or "lua") ..
                              " /usr/bin/busted --no-auto-insulate --lazy -o plainTerminal spec/leases_spec.lua"
      command[#command + 1] = " --filter='on " .. store .. ":'"
      return assert(io.popen(table.concat(command) .. " 2>&1"))
    end

    -- They run side by side, as they wait for most of their time.
    local running = {}
    setup(function() for _, store in ipairs(STORES) do running[store] = begin(store) end end)
    teardown(function() for _, pipe in pairs(running) do pipe:close() end end)

    for _, store in ipairs(STORES) do
      it("a lease does what it does elsewhere, on " .. store, function()
        local said = running[store]:read "*a"
        local count = tonumber(said:match "(%d+) successes / 0 failures / 0 errors / 0 pending" or 0)
        assert.is_true(count > 40, said)
      end)
    end
  end)
end)

-- A time namespace shifts CLOCK_BOOTTIME, by which leases end.
describe("where a container's clock is another one", function()
  support.unless_missing(missing(), "unshare", function()
    local function try(store, ttl, before)
      return support.run(([[
        local manager = assert(require("hierlock").open "%s")
        local lease, err = manager:acquire({ "u1" }, { ttl = %g, timeout = 0, auto_release = false })
        print(lease and "granted" or err.code)
      ]]):format(store, ttl), before)
    end

    -- Calls check(store, here, there) for a lease that is taken outside and wanted in the container, and the other way round.
    local function each_way(kind, shift, check)
      local container = "unshare --time --boottime " .. shift
      for _, at in ipairs { { "", container }, { container, "" } } do
        local path = os.getenv "HIERLOCK_SPEC_DIRECTORY" .. "/shifted"
        support.run(("os.execute 'rm -rf %s && mkdir -m 700 %s'"):format(path, path))
        check(kind .. ":" .. path .. (kind == "sqlite" and "/one.db" or ""), at[1], at[2])
      end
    end

    for _, kind in ipairs { "file", "sqlite" } do
      for _, shift in ipairs { "86400", "-$(cut -d. -f1 /proc/uptime)" } do
        it(("a lease keeps the others out there and outside, on %s, with %s"):format(kind, shift), function()
          each_way(kind, shift, function(store, here, there)
            assert.equal("granted\n", (try(store, 60, here)))
            assert.equal("timeout\n", (try(store, 60, there)))
            assert.equal("timeout\n", (try(store, 60, here)))
          end)
        end)

        it(("a lease is over there and outside when its time is up, on %s, with %s"):format(kind, shift), function()
          each_way(kind, shift, function(store, here, there)
            assert.equal("granted\n", (try(store, 0.3, here)))
            support.wait_until(function() return try(store, 0.3, there) == "granted\n" end, "the end of the lease", 10)
          end)
        end)
      end
    end
  end)
end)
