-- hierlock beside other locks (peers.lua), in one run. Measures acquire + release
-- without contention, and the time from a release to the waiter's return. Prints a
-- table, in Markdown, and draws it (chart.lua).

local uv = require "luv"
local contest = require "bench.contest"
local chart = require "bench.chart"

local SVG = assert(os.getenv("BENCH_SVG"), "run it by `make bench`")
local ROUND_MS, WAIT_MS, HANDOVERS = 20, 5, 3 -- of a round; at least; in a round

-- With two CPUs, a server has the first and its clients the second, as if on
-- machines of their own. Without a server, the releasing process has the
-- first.
local two_cpus = #uv.cpu_info() > 1

local function open(peer)
  local function client(cpu)
    return contest.client(peer.name, peer.command, peer.args, two_cpus and cpu)
  end
  if two_cpus and peer.pid then os.execute("taskset -a -p -c 0 " .. peer.pid .. " >/dev/null") end
  peer.taker, peer.giver, peer.handovers = client("1"), client(peer.pid and "1" or "0"), {}
end

local function measure(peers)
  local takers = {}
  for i, peer in ipairs(peers) do
    open(peer)
    takers[i] = peer.taker
  end
  contest.alternate(takers, nil, ROUND_MS)
  for _ = 1, contest.rounds * HANDOVERS do
    for _, peer in ipairs(peers) do
      -- The release comes at any point between two tries of a polling waiter.
      local pause = WAIT_MS + math.random(0, peer.polls or peer.varies or 0)
      table.insert(peer.handovers, contest.handover(peer.giver, peer.taker, pause))
    end
  end
  for _, peer in ipairs(peers) do
    peer.cycle = { contest.quartiles(peer.taker.results) }
    peer.handover = { contest.quartiles(peer.handovers) }
    peer.taker.close()
    peer.giver.close()
  end
end

-- ----------------------------------------------------------------- words

local function time(us)
  if us < 9.95 then return ("%.1f µs"):format(us) end
  if us < 995 then return ("%.0f µs"):format(us) end
  return ("%.1f ms"):format(us / 1000)
end

local function quartiles(q)
  return ("%s (%s to %s)"):format(time(q[2]), time(q[1]), time(q[3]))
end

-- The machine and the run, as lines.
local function circumstances()
  local file = io.open("/etc/os-release")
  local system = file and file:read("*a"):match('PRETTY_NAME="([^"]*)"') or uv.os_uname().sysname
  if file then file:close() end
  local cpus = uv.cpu_info()
  return {
    ("%s: %d × %s, %s, Linux %s. %s."):format(os.date("!%Y-%m-%d"), #cpus, cpus[1].model, system, uv.os_uname().release:match("^[%d.]+"),
      rawget(_G, "jit") and jit.version or _VERSION), -- luacheck: ignore 113
    ("Medians (quartiles) of %d rounds that alternate; a hand-over %d times. Unix sockets. %s"):format(
      contest.rounds, contest.rounds * HANDOVERS,
      two_cpus and "A server has one CPU, its clients another." or "One CPU for all."),
  }
end

-- The locks that were not run, and the packages that they need: the bench
-- installs nothing.
local function print_missing(all)
  local packages, listed = {}, {}
  for _, peer in ipairs(all) do
    for package in (peer.missing or ""):gsub("^needs ", ""):gmatch("[%w-]+") do
      if peer.missing:find("^needs ") and not listed[package] then
        packages[#packages + 1] = package
        listed[package] = true
      end
    end
  end
  if #packages > 0 then
    print("\nTo run them all, on Debian or Ubuntu (RUNLEVEL=1: no service is started):\n" ..
          "  RUNLEVEL=1 apt-get install --no-install-recommends " .. table.concat(packages, " "))
  end
end

local function print_table(all, lines)
  local rows = { { "on", "lock", "client", "takes", "acquire + release", "hand-over", "waiter" } }
  for _, peer in ipairs(all) do
    rows[#rows + 1] = peer.missing
      and { peer.on, peer.name, "", "", "not run: " .. peer.missing, "", "" }
      or { peer.on, peer.name, peer.client, peer.takes, quartiles(peer.cycle), quartiles(peer.handover),
           peer.polls and ("polls, %d ms"):format(peer.polls) or "is woken" }
  end
  print()
  for i, row in ipairs(rows) do
    print("| " .. table.concat(row, " | ") .. " |")
    if i == 1 then print(("|---"):rep(#row) .. "|") end
  end
  print()
  for _, line in ipairs(lines) do print(line) end
  print()
  local told = {}
  for _, peer in ipairs(all) do
    if not told[peer.name] then print(("- **%s**: %s."):format(peer.name, peer.means)) end
    told[peer.name] = true
  end
end

return function()
  math.randomseed(1)
  local all, present = require "bench.peers", {}
  for _, peer in ipairs(all) do
    if not peer.missing then present[#present + 1] = peer end
  end
  measure(present)
  local lines = circumstances()
  print_table(all, lines)
  print_missing(all)
  local file = assert(io.open(SVG, "w"))
  file:write(chart(all, lines, time))
  file:close()
  print("\nDrawn: " .. SVG)
end
