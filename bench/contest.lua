-- The parts of a fair comparison: clients that wait for their turn, rounds that
-- alternate, medians. All compared clients take turns in short rounds, so that a busy
-- machine is busy for all. This file knows nothing of locks; client.c describes
-- the conversation with a client.

local uv = require "luv"
local unpack = table.unpack or unpack

local contest = { rounds = tonumber(os.getenv("BENCH_ROUNDS") or 21) }

-- The values at a quarter, half and three quarters of the sorted list, the
-- least and the greatest.
function contest.quartiles(values)
  local sorted = {}
  for i, value in ipairs(values) do sorted[i] = value end
  table.sort(sorted)
  local function at(part) return sorted[math.max(1, math.ceil(#sorted * part))] end
  return at(1 / 4), at(1 / 2), at(3 / 4), sorted[1], sorted[#sorted]
end

function contest.median(values)
  return (select(2, contest.quartiles(values)))
end

-- How much memory this process has.
function contest.rss_kib()
  local file = assert(io.open("/proc/self/statm"))
  local pages = tonumber(file:read("*a"):match("^%d+ (%d+)"))
  file:close()
  return pages * 4
end

-- A program that answers each line by a line. cpu: the CPU to run on, or nil.
function contest.client(name, command, args, cpu)
  local input, output, buffer, ended = uv.new_pipe(false), uv.new_pipe(false), "", nil
  if cpu then
    args = { "-c", cpu, command, unpack(args) }
    command = "taskset"
  end
  local handle = assert(uv.spawn(command, { args = args, stdio = { input, output, 2 } }, function(status, signal)
    ended = ("%s ended: status %d, signal %d"):format(name, status, signal)
  end))
  output:read_start(function(_, data) buffer = buffer and buffer .. (data or "") end)
  local self = { name = name, results = {} }
  function self.start(line) input:write(line .. "\n") end
  function self.answer()
    while not buffer:find("\n") do
      assert(not ended, ended)
      uv.run("once")
    end
    local line
    line, buffer = buffer:match("^([^\n]*)\n(.*)$")
    return line
  end
  function self.ask(line)
    self.start(line)
    return self.answer()
  end
  -- So many cycles; how long one took, in microseconds.
  function self.cycles(n) return tonumber(self.ask(n)) end
  function self.close()
    buffer = false
    input:close()
    output:close()
    handle:close()
    uv.run("nowait")
  end
  return self
end

-- Each client's results: the microseconds of a cycle, for each round. A round has
-- so many cycles, or as many as take so many milliseconds.
function contest.alternate(clients, cycles, ms)
  for _, c in ipairs(clients) do
    local one = c.cycles(cycles or 100) -- warm up
    c.turn = cycles or math.max(1, math.floor(ms * 1000 / one))
  end
  for _ = 1, contest.rounds do
    for _, c in ipairs(clients) do c.results[#c.results + 1] = c.cycles(c.turn) end
  end
end

-- A hand-over of the lock, in microseconds: from the holder's call of release to
-- the waiter's return. The waiter waits for at least so many milliseconds.
function contest.handover(holder, waiter, ms)
  while true do
    holder.ask("take")
    waiter.start("take")
    uv.sleep(ms + 1)
    holder.start("give")
    uv.sleep(1) -- not to get in their way
    local released = tonumber(holder.answer())
    local began, got = waiter.answer():match("^(%d+) (%d+)$")
    waiter.ask("give")
    assert(tonumber(got) > released, holder.name .. " does not exclude")
    -- Another process may have had the waiter's CPU, so that it did not begin
    -- to wait in time.
    if released - tonumber(began) >= ms * 1e6 then return (tonumber(got) - released) / 1e3 end
  end
end

return contest
