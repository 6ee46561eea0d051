--- hierlock top: who holds and who waits, looked at again and again: the hottest nodes, the longest waits, and how
-- much is granted. Changes nothing.

local lookup = require "hierlock.command.lookup"
local quarantine = require "hierlock.command.quarantine"
local screen = require "hierlock.command.screen"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local uv = require "luv"
local waits = require "hierlock.command.waits"

local top = {
  summary = "Watch holders and waiters.",
  description = "Shows the nodes with the most waiters, the longest waits and the holders, and draws them anew each second. On a " ..
    "terminal keys sort the list and end it; elsewhere one picture follows another. Misses locks that are granted and " ..
    "released between two looks, so there are more grants than the rates say. A wait that ceased failed, or got such a lock.",
}

local GAP = "  "
local WINDOW = 10 -- s over which rates are measured
local HOTTEST = 5 -- nodes, at least: a third of the rows beside the head

-- The keys, and by what each sorts.
local function longest_waits(a, b)
  if a.waiting ~= b.waiting then return a.waiting end
  return a.since < b.since
end
local function longest_held(a, b)
  if a.waiting ~= b.waiting then return not a.waiting end
  return a.since < b.since
end
local function by_target(a, b) return a.place < b.place end
local SORTS = {
  w = { name = "longest waits", before = longest_waits },
  h = { name = "longest held", before = longest_held },
  t = { name = "target", before = by_target },
}
local KEYS = "q quit  w longest waits  h longest held  t target  space now"

function top.options(parser)
  parser:argument("target", "Only what is in the way of this node, as u1/a1/r1; %2F stands for a slash in an id, %25 for a %."):args "?"
  parser:option("-d --delay", "Seconds between two looks. Default: 1."):argname "SECONDS":convert(lookup.seconds("--delay", 0.1))
  parser:option("-n --count", "End after so many looks. Default: on a terminal never, elsewhere after one."):argname "N"
    :convert(lookup.whole("-n", 1))
  parser:option("-s --sort", "Begin sorted by: waits, held, target. Default: waits."):argname "KEY"
    :choices { "waits", "held", "target" }
  lookup.store_options(parser)
end

-- ------------------------------------------------------------------ the picture

-- Names the lock by all that is visible outside its process.
local function name_of(holder)
  return table.concat({ holder.path, holder.mode, holder.host or "", tostring(holder.pid or ""), holder.session or "",
    holder.id or "", holder.application or "", holder.label or "" }, "\0")
end

-- Counts the events between two looks. A wait that has gone was granted if a lock of its name is held that was not
-- held before. Otherwise the wait has failed, or its lock was given back before the second look.
local function changes(before, now)
  local granted, waited, ceased, new = 0, 0, 0, {}
  for key, holder in pairs(now.held) do
    if not before.held[key] then
      granted = granted + 1
      new[holder.name] = (new[holder.name] or 0) + 1
    end
  end
  for key in pairs(now.waiting) do
    if not before.waiting[key] then waited = waited + 1 end
  end
  for key, holder in pairs(before.waiting) do
    if not now.waiting[key] then
      local grants = new[holder.name] or 0
      if grants == 0 then ceased = ceased + 1 else new[holder.name] = grants - 1 end
    end
  end
  return { granted, waited, ceased }
end

local history = {}
history.__index = history

local function new_history() return setmetatable({ samples = {} }, history) end

--- Notes the holders seen at a time, in seconds.
function history:add(holders, time)
  local now = { time = time, held = {}, waiting = {}, held_count = 0, waiting_count = 0 }
  for _, holder in ipairs(holders) do
    holder.name = name_of(holder)
    local set = holder.waiting and "waiting" or "held"
    now[set][holder.name .. "\0" .. ("%.3f"):format(holder.since)] = holder
    now[set .. "_count"] = now[set .. "_count"] + 1
  end
  if self.last then
    now.changes = changes(self.last, now)
    self.samples[#self.samples + 1] = { time = time, from = self.last.time, changes = now.changes }
    while self.samples[1].time < time - WINDOW do table.remove(self.samples, 1) end
  end
  self.last = now
end

--- Grants, waits, waits that have ceased in a second; nil before there were two looks.
function history:rates()
  if not self.samples[1] then return end
  local sums, seconds = { 0, 0, 0 }, self.last.time - self.samples[1].from
  for _, sample in ipairs(self.samples) do
    for i = 1, 3 do sums[i] = sums[i] + sample.changes[i] end
  end
  return sums[1] / seconds, sums[2] / seconds, sums[3] / seconds
end

-- Nodes, those first that most wait for, or that are waited for longest.
local function hottest(holders)
  local nodes, list = {}, {}
  for _, holder in ipairs(holders) do
    local paths = holder.path .. ", "
    for path in paths:gmatch(holder.path:find "^bucket %(" and "(.*), " or "(.-), ") do
      local node = nodes[path]
      if not node then
        node = { path = path, held = 0, waiting = 0 }
        nodes[path] = node
        list[#list + 1] = node
      end
      if holder.waiting then
        node.waiting = node.waiting + 1
        node.since = math.min(node.since or holder.since, holder.since)
      else
        node.held = node.held + 1
      end
    end
  end
  table.sort(list, function(a, b)
    if a.waiting ~= b.waiting then return a.waiting > b.waiting end
    if a.since ~= b.since then return (a.since or math.huge) < (b.since or math.huge) end
    if a.held ~= b.held then return a.held > b.held end
    return a.path < b.path
  end)
  return list
end

-- ------------------------------------------------------------------ the picture

-- Columns of text, side by side, each as wide as its widest cell.
local function columns_of(rows)
  local widths, lines = {}, {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do widths[i] = math.max(widths[i] or 0, text.width(cell)) end
  end
  for k, row in ipairs(rows) do
    local cells = {}
    for i, cell in ipairs(row) do cells[i] = i < #row and cell .. (" "):rep(widths[i] - text.width(cell)) or cell end
    lines[k] = table.concat(cells, GAP)
  end
  return lines
end

local function seconds_since(since, now) return text.duration(math.max(now - since, 0)) end

-- A picture as lines, for so many rows; nil: as many as it takes.
local function picture(self, rows, ascii)
  local now, seen = self.now, self.history.last
  local lines, list = { reverse = {}, bold = {} }, {}
  local function cell(value) return text.safe(value and value ~= "" and value or "-", ascii) end
  local function add(line, look)
    lines[#lines + 1] = line
    if look then lines[look][#lines] = true end
  end
  add(("%s  %s  %s"):format(cell(self.where), os.date("%H:%M:%S", math.floor(now)),
    self.failure and cell((self.unseen and "not all is seen: " or "cannot look: ") .. self.failure) or ("each %g s"):format(self.delay)), "bold")
  if not seen then return lines end
  local granted, waited, ceased = self.history:rates()
  add(("%d held, %d waiting; %s"):format(seen.held_count, seen.waiting_count, granted and
    ("seen per second: %.1f granted, %.1f began to wait, %.1f ceased to wait"):format(granted, waited, ceased) or "no rates yet"))
  if self.notice then add(cell(self.notice), "bold") end
  if #self.holders == 0 then return lines end
  add ""

  local nodes = { { "NODE", "HELD", "WAITING", "LONGEST WAIT" } }
  local most = rows and math.max(math.floor((rows - 6) / 3), HOTTEST) or HOTTEST
  for i, node in ipairs(hottest(self.holders)) do
    if i > most then break end
    nodes[i + 1] = { cell(node.path), ("%4d"):format(node.held), ("%7d"):format(node.waiting),
      node.since and seconds_since(node.since, now) or "-" }
  end
  for i, line in ipairs(columns_of(nodes)) do add(line, i == 1 and "reverse") end
  add ""

  for i, holder in ipairs(self.holders) do list[i] = holder end
  table.sort(list, function(a, b)
    if self.sort.before(a, b) then return true end
    return not self.sort.before(b, a) and a.order < b.order
  end)
  local table_of = { { "TARGET", "MODE", "STATE", "FOR", "OWNER", "APPLICATION", "HOST", "PID", "LABEL", "WAITS FOR" } }
  for i, holder in ipairs(list) do
    if rows and #lines + i > rows - 1 then break end
    table_of[i + 1] = { cell(holder.path), holder.mode, holder.waiting and "waits" or "holds", seconds_since(holder.since, now),
      cell(holder.owner), cell(holder.application), cell(holder.host), holder.pid and ("%d"):format(holder.pid) or "-",
      cell(holder.label), cell(holder.waiting and waits.first(holder)) }
  end
  for i, line in ipairs(columns_of(table_of)) do add(line, i == 1 and "reverse" or list[i - 1].waiting and "bold") end
  return lines
end

-- ------------------------------------------------------------------ running

local function look(self)
  local found, err = lookup.holders(self.manager, self.target)
  self.now = uv.gettimeofday()
  if not found then
    self.unseen = nil
    -- The store may be back at the next look.
    if not self.history.last or not err.retryable then return nil, err end
    self.failure = err.message
    return true
  end
  self.unseen = err
  self.failure, self.holders, self.notice = err and err.message, found, self.quarantine()
  waits.find(self.manager, found)
  for i, holder in ipairs(found) do holder.order, holder.since = i, holder.since or self.now end
  self.history:add(found, uv.hrtime() / 1e9)
  return true
end

-- Prints pictures one after the other, without a keyboard.
local function plain(self, count)
  local watch = terminal.interruptions()
  local ascii = not (terminal.shows() and terminal.takes_utf8())
  local ok, err
  count = count or 1
  for i = 1, count do
    if i > 1 then
      local timer = uv.new_timer()
      local over = false
      timer:start(math.floor(self.delay * 1000), 0, function()
        over = true
        uv.stop()
      end)
      while not over and not watch.hit do uv.run() end
      timer:close()
    end
    if watch.hit then break end
    ok, err = look(self)
    if ok then ok, err = terminal.write(table.concat(picture(self, nil, ascii), "\n"), "\n", i < count and "\n" or "") end
    if not ok then break end
  end
  local hit = watch.hit
  watch.close()
  if hit then return 130 end
  return ok and 0, err
end

-- The full terminal, until a key or a signal ends it.
local function live(self, shown, count)
  local ascii, looks, due = not terminal.takes_utf8(), 0, uv.hrtime()
  while true do
    if uv.hrtime() >= due then
      local ok, err = look(self)
      if not ok then return nil, err end
      looks = looks + 1
      due = uv.hrtime() + self.delay * 1e9
    end
    local _, rows = shown:size()
    local lines = picture(self, rows, ascii)
    for i = #lines + 1, rows - 1 do lines[i] = "" end
    lines[rows] = KEYS .. "   sorted by " .. self.sort.name
    lines.bold[rows] = true
    local ok, err = shown:draw(lines)
    if not ok then return nil, err end
    if looks == count then return 0 end
    local key = shown:wait(math.max(due - uv.hrtime(), 0) / 1e9)
    if key == "end" or key == "q" then return shown.status or 0 end
    if key == " " then due = 0 end
    self.sort = SORTS[key] or self.sort
  end
end

function top.run(arguments)
  local target, manager, wanted, err
  if arguments.target then
    target, err = lookup.target(arguments.target)
    if not target then return nil, err end
  end
  manager, wanted = lookup.open(arguments, "top")
  if not manager then return nil, wanted end
  local self = {
    manager = manager, target = target, delay = arguments.delay or 1, history = new_history(), holders = {},
    sort = SORTS[(arguments.sort or "waits"):sub(1, 1)], where = wanted.where,
    quarantine = quarantine.watch(wanted, "hierlock top"),
  }
  local ok, status, failure
  if terminal.answers() and os.getenv "TERM" ~= "dumb" then
    local shown = screen.open()
    ok, status, failure = pcall(live, self, shown, arguments.count)
    shown:close()
  else
    ok, status, failure = pcall(plain, self, arguments.count)
  end
  manager:close()
  if not ok then error(status, 0) end
  if status == 0 and self.unseen then return nil, self.unseen end
  return status, failure
end

return top
