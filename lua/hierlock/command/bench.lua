--- hierlock bench: grants per second, and how long each takes, on this store, from here, with this pool.

local encoders = require "hierlock.command.json"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local trials = require "hierlock.command.trials"
local uv = require "luv"

local bench = {
  summary = "Measure grants per second, and how long each takes, on a store.",
  description = "Measures how many locks a store grants per second to this machine, and how long each grant takes: alone, side by side, " ..
    "and all on one node. The tree has a root of its own, so no other program waits for it, but the store is busy.",
}

local SECONDS, CLIENTS = 2, 8
local REDRAW = 100      -- ms
local PATIENCE = 30     -- s, that a request waits
local TICK = 20         -- ms, in which the end of a phase is noticed
local WIDEST, NARROWEST = 40, 10 -- bars of the histogram
local SAMPLES_MAX = 1000000 -- that are kept of a phase

function bench.options(parser)
  trials.options(parser)
  parser:option("--seconds", "How long each of the four parts takes."):convert(tonumber):default(tostring(SECONDS)):argname "SECONDS"
  parser:option("--pool-size", "Connections of the manager, and clients that use it at once."):convert(tonumber):default(tostring(CLIENTS))
    :argname "N"
  parser:flag("-q --quiet", "Show no progress.")
  parser:flag("--json", "Print a JSON object; times are in seconds.")
end

-- ------------------------------------------------------------------- measuring

local function now() return uv.hrtime() / 1e9 end

local function sampling() return { n = 0, total = 0, worst = 0, best = math.huge, failed = 0 } end

local function note(found, seconds)
  found.n = found.n + 1
  found.total = found.total + seconds
  found.worst, found.best = math.max(found.worst, seconds), math.min(found.best, seconds)
  if found.n <= SAMPLES_MAX then found[found.n] = seconds end
end

local function fail(found, err)
  found.failed = found.failed + 1
  found.err = found.err or err
end

-- Acquires locks one after the other, as a program without a loop does.
local function alone(found, managers, seconds, show, watch)
  local start, id = now(), 0
  local drawn = 0
  while now() - start < seconds and not watch.hit do
    id = id + 1
    local began = now()
    local handle, err = managers[1]:acquire(managers.target(1, id), { timeout = PATIENCE })
    local ended = now()
    if handle then
      note(found, ended - began)
      handle:release()
    else
      fail(found, err)
      if found.failed > 3 then break end
    end
    if ended - drawn > REDRAW / 1000 then
      drawn = ended
      show(found, ended - start)
      watch.look()
    end
  end
  return now() - start
end

-- So many clients at once, under the loop; client i asks managers[i], or the only one. shared: all for one node.
local function together(found, managers, clients, seconds, shared, show, watch)
  local start, running, polls = now(), 0, {}
  local over = false
  local begin

  local function granted(i, pending, began)
    local handle, err = pending:wait(0)
    if handle then
      -- Waiters that are left when the time is up give up, and are not counted.
      if not over then note(found, now() - began) end
      handle:release()
    elseif not over then
      fail(found, err)
    end
    if found.failed > 3 then over = true end
    begin(i, found.n)
  end

  function begin(i, id)
    running = running - 1
    if over or now() - start >= seconds or watch.hit then return end
    local began = now()
    local manager = managers[i] or managers[1]
    local pending, err = manager:start(managers.target(shared and 1 or i, shared and 0 or id), { timeout = PATIENCE })
    if not pending then return fail(found, err) end
    running = running + 1
    local fd
    fd, err = pending:fd()
    if not fd then
      running = running - 1
      return fail(found, err)
    end
    local poll = assert(uv.new_poll(fd))
    polls[poll] = pending
    poll:start("r", function()
      if not pending:done() then return end
      polls[poll] = nil
      poll:close()
      granted(i, pending, began)
    end)
  end

  for i = 1, clients do
    running = running + 1
    begin(i, 0)
  end
  local timer, drawn = uv.new_timer(), 0
  timer:start(TICK, TICK, function()
    local elapsed = now() - start
    if elapsed * 1000 - drawn > REDRAW then
      drawn = elapsed * 1000
      show(found, elapsed)
    end
    over = over or elapsed >= seconds or watch.hit
    if not over then return end
    for poll, pending in pairs(polls) do
      poll:close()
      pending:cancel()
    end
    polls, running = {}, 0
  end)
  while running > 0 and not over do uv.run "once" end
  local elapsed = now() - start
  over = true
  for poll, pending in pairs(polls) do
    poll:close()
    pending:cancel()
  end
  timer:close()
  uv.run "nowait"
  return elapsed
end

-- ------------------------------------------------------------------- the report

local function duration(seconds)
  if seconds < 0.001 then return ("%.0f us"):format(seconds * 1e6) end
  if seconds < 1 then return ("%.1f ms"):format(seconds * 1e3) end
  return ("%.2f s"):format(seconds)
end

local function percentile(found, share)
  return found[math.max(1, math.ceil(#found * share))]
end

local SHARES = { { "median", 0.5 }, { "90 %", 0.9 }, { "99 %", 0.99 }, { "99.9 %", 0.999 } }

-- Powers of two of microseconds: { from, share }.
local function histogram(found)
  local counts, least, most = {}, math.huge, 0
  for i = 1, #found do
    local power = math.max(0, math.floor(math.log(math.max(found[i], 1e-9) * 1e6) / math.log(2)))
    counts[power] = (counts[power] or 0) + 1
    least, most = math.min(least, power), math.max(most, power)
  end
  local list = {}
  for power = least, most do list[#list + 1] = { 2 ^ power / 1e6, (counts[power] or 0) / #found } end
  return list
end

local function lines_of(phase, width, utf8, colours)
  local function paint(code, words) return colours and "\27[" .. code .. "m" .. words .. "\27[0m" or words end
  local lines = {}
  local rate = phase.n / phase.seconds
  lines[1] = ("%s  %s"):format(paint("1", phase.name), phase.what)
  if phase.n == 0 then
    lines[2] = "  nothing was granted" .. (phase.err and ": " .. phase.err.code .. ": " .. phase.err.message or "")
    return lines
  end
  lines[2] = ("  %s grants/s"):format(paint("1;36", ("%.0f"):format(rate)))
  local parts = {}
  for _, share in ipairs(SHARES) do parts[#parts + 1] = share[1] .. " " .. duration(percentile(phase, share[2])) end
  parts[#parts + 1] = "worst " .. duration(phase.worst)
  lines[3] = "  " .. table.concat(parts, ", ")
  if #lines[3] > width then
    lines[3] = "  " .. table.concat(parts, ", ", 1, 3) .. ","
    lines[4] = "  " .. table.concat(parts, ", ", 4)
  end
  local bars = histogram(phase)
  local greatest = 0
  for _, bar in ipairs(bars) do greatest = math.max(greatest, bar[2]) end
  local room = math.max(NARROWEST, math.min(WIDEST, width - 24))
  for _, bar in ipairs(bars) do
    local n = math.floor(bar[2] / greatest * room + 0.5)
    if bar[2] > 0 and n == 0 then n = 1 end
    lines[#lines + 1] = ("  %9s  %s%s %5.1f %%"):format("< " .. duration(bar[1] * 2), paint("32", (utf8 and "█" or "#"):rep(n)),
      (" "):rep(room - n), bar[2] * 100)
  end
  if phase.failed > 0 then
    lines[#lines + 1] = ("  %d failed: %s: %s"):format(phase.failed, phase.err.code, phase.err.message)
  end
  return lines
end

local KEYS = { "store", "pool_size", "seconds", "parts", "name", "grants", "failed", "grants_per_second", "best", "median", "p90", "p99", "p999", "worst",
  "histogram", "from", "share", "error" }

local function encoded(json, store, size, phases)
  local parts = {}
  for i, phase in ipairs(phases) do
    local bars = {}
    for k, bar in ipairs(phase.n > 0 and histogram(phase) or {}) do bars[k] = { from = bar[1], share = bar[2] } end
    parts[i] = {
      name = phase.name, grants = phase.n, failed = phase.failed, seconds = phase.seconds, grants_per_second = phase.n / phase.seconds,
      best = phase.n > 0 and phase.best or nil, worst = phase.n > 0 and phase.worst or nil,
      median = percentile(phase, 0.5), p90 = percentile(phase, 0.9), p99 = percentile(phase, 0.99), p999 = percentile(phase, 0.999),
      histogram = setmetatable(bars, { __jsontype = "array" }),
      error = phase.err and text.utf8(phase.err.code .. ": " .. phase.err.message) or nil,
    }
  end
  return json.encode({ store = text.utf8(store.where), pool_size = size, parts = parts }, { keyorder = KEYS }) .. "\n"
end

-- ------------------------------------------------------------------------ all of it

local function check(arguments)
  local seconds, size = arguments.seconds, arguments.pool_size
  if not (seconds and seconds > 0 and seconds <= 3600) then return nil, "--seconds must be more than 0, and 3600 at most" end
  if not (size and size >= 1 and size <= 1000 and size == math.floor(size)) then return nil, "--pool-size must be a whole number of 1 to 1000" end
  return true
end

-- Opens many managers with one connection each, as many programs would; nil, err.
local function strangers(store, n, into)
  for i = 1, n do
    local manager, err = store.open { pool_size = 1 }
    if not manager then return nil, err end
    into[i] = manager
  end
  return true
end

local PARTS = {
  { name = "alone", what = "one client, each time another node" },
  { name = "side by side", what = "%d clients of one pool, each with nodes of its own" },
  { name = "one pool, one node", what = "%d clients of one pool; they stand in line in the program" },
  { name = "many programs, one node", what = "%d clients with a connection each; they stand in line at the store" },
}

local function measure(store, arguments, show, watch, phases)
  local size, opened = arguments.pool_size, {}
  local manager, err = store.open { pool_size = size }
  if not manager then return nil, err end
  local names
  names, err = trials.levels(manager, store.root)
  local function target(i, id)
    local ids = { ("%s %d"):format(store.root, i) }
    for level = 2, #names do ids[level] = ("%d"):format(level == #names and id or 1) end
    if #names == 1 then ids[1] = ids[1] .. " " .. id end
    return ids
  end
  for i, part in ipairs(names and PARTS or {}) do
    local found = sampling()
    found.name, found.what = part.name, part.what:format(size)
    local function report(...) show(i, part.name, ...) end
    local managers = { manager, target = target }
    if i == 1 then
      found.seconds = alone(found, managers, arguments.seconds, report, watch)
    elseif i < 4 then
      found.seconds = together(found, managers, size, arguments.seconds, i == 3, report, watch)
    else
      managers = { target = target }
      local ok
      ok, err = strangers(store, size, opened)
      for k, each in ipairs(opened) do managers[k] = each end
      if not ok then
        found.seconds = 1
        fail(found, err)
        err = nil
      else
        found.seconds = together(found, managers, size, arguments.seconds, true, report, watch)
      end
    end
    found.seconds = math.max(found.seconds, 1e-6)
    table.sort(found)
    phases[i] = found
    if i == 1 and found.n == 0 and found.err then
      names, err = nil, found.err
      break
    end
    if watch.hit then break end
  end
  for _, each in ipairs(opened) do each:close() end
  manager:close()
  return names, err
end

local INTERRUPTED = 130

function bench.run(arguments)
  local ok, err, json = check(arguments)
  if not ok then return nil, { code = "dsn", message = err, retryable = false } end
  if arguments.json then
    json, err = encoders.encoder()
    if not json then return nil, err end
  end
  local store
  store, err = trials.store(arguments, "bench")
  if not store then return nil, err end
  local on_terminal = uv.guess_handle(2) == "tty" and os.getenv "TERM" ~= "dumb"
  if not arguments.quiet then
    io.stderr:write("takes locks in a tree of its own, which nobody else uses; takes some ", ("%.0f"):format(4 * arguments.seconds), " s\n")
  end
  local function show(i, name, found, elapsed)
    if arguments.quiet or not on_terminal then return end
    io.stderr:write(("\r%d of %d, %s: %.0f %%, %d grants\27[K"):format(i, #PARTS, name, math.min(100, elapsed / arguments.seconds * 100), found.n))
  end
  local watch, phases = terminal.interruptions(), {}
  ok, err = measure(store, arguments, show, watch, phases)
  watch.close()
  if on_terminal and not arguments.quiet then io.stderr:write "\r\27[K" end
  if not ok then return nil, err end
  local output
  if json then
    output = encoded(json, store, arguments.pool_size, phases)
  else
    local shown = terminal.shows()
    local ascii = not (shown and terminal.takes_utf8())
    local lines = { text.safe(store.where, ascii) }
    for _, phase in ipairs(phases) do
      for _, line in ipairs(lines_of(phase, shown and terminal.width() or 80, not ascii, terminal.takes_colours())) do lines[#lines + 1] = line end
    end
    lines[#lines + 1] = ""
    output = table.concat(lines, "\n")
  end
  ok, err = terminal.write(output)
  if not ok then return nil, err end
  return watch.hit and INTERRUPTED or 0
end

return bench
