--- Leases, or holders, as lines for people. On a terminal: a header and a table; where that is too narrow, the
-- table has fewer columns, and the rest follows below each line, in words. Elsewhere: a line for
-- each, nothing but ASCII, with two or more spaces between the columns and never in one.

local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"

local listing = {}
listing.__index = listing

local GAP = "  "     -- between two columns
local INDENT = "    " -- of what follows below

local YEAR_10000 = 253402300800

local function held_since(lease, ascii)
  if not lease.since then return "" end
  -- A record that hierlock has not made may hold any number.
  if lease.since < 0 or lease.since >= YEAR_10000 then return ("%.0f"):format(lease.since) end
  -- The machine's own time zone for who looks at it; the same everywhere for who keeps it.
  return os.date(ascii and "!%Y-%m-%dT%H:%M:%SZ" or "%Y-%m-%d %H:%M:%S", math.floor(lease.since))
end

--- Each fact about a lease or a holder, by the name of its column. words: the fact's form in the text below a line.
listing.columns = {
  TARGET = { of = function(lease) return lease.path end, words = "%s" },
  MODE = { of = function(lease) return lease.mode end, words = "%s" },
  KIND = { of = function(lease) return lease.kind end, words = "%s" },
  STATE = { of = function(lease) return lease.waiting and "waits" or "holds" end, words = "%s" },
  OWNER = { of = function(lease) return lease.owner end, words = "owner %s" },
  LABEL = { of = function(lease) return lease.label end, words = "label %s" },
  APPLICATION = { of = function(lease) return lease.application end, words = "application %s" },
  HOST = { of = function(lease) return lease.host end, words = "host %s" },
  PID = { of = function(lease) return lease.pid and ("%d"):format(lease.pid) end, words = "pid %s" },
  SINCE = { of = held_since, words = "since %s" },
  REMAINING = { of = function(lease) return lease.remaining and text.duration(lease.remaining) end, words = "%s left" },
  SESSION = { of = function(lease) return lease.session end, words = "session %s" },
  ID = { of = function(lease) return lease.id end, words = "id %s" },
}

--- A kind of listing.
-- @tparam {{string,...},...} layouts the names of the columns that are in the table, from the widest layout, which has all,
--   to the narrowest
-- @tparam[opt] table columns more of them, or others
function listing.new(layouts, columns)
  local self = setmetatable({ columns = {}, layouts = {} }, listing)
  local numbers = {}
  for i, name in ipairs(layouts[1]) do
    local column = columns and columns[name] or listing.columns[name]
    self.columns[i], numbers[name] = { name = name, of = column.of, words = column.words }, i
  end
  for k, layout in ipairs(layouts) do
    self.layouts[k] = {}
    for i, name in ipairs(layout) do self.layouts[k][i] = numbers[name] end
  end
  return self
end

-- Never two spaces side by side, nor one at an end: they separate.
local function cell(value, ascii)
  value = text.safe(value or "", ascii)
  if value:find "  " or value:find "^ " or value:find " $" then
    value = value:gsub("^ ", "\\x20"):gsub(" $", "\\x20"):gsub(" ( +)", function(more) return " " .. ("\\x20"):rep(#more) end)
  end
  return value == "" and "-" or value
end

local function pad(value, width) return value .. (" "):rep(width - text.width(value)) end

-- The rest of a lease, with commas, broken at them where the width ends.
local function words(all, row, shown, width, lines)
  local line = ""
  local said = {}
  for i, column in ipairs(all) do
    if not shown[i] and row[i] ~= "-" then said[#said + 1] = column.words:format(row[i]) end
  end
  for i, piece in ipairs(said) do
    if i < #said then piece = piece .. "," end
    if line ~= "" and #INDENT + text.width(line) + 1 + text.width(piece) > width then
      lines[#lines + 1] = INDENT .. line
      line = piece
    else
      line = line == "" and piece or line .. " " .. piece
    end
  end
  if line ~= "" then lines[#lines + 1] = INDENT .. line end
end

local function widths(rows, columns)
  local list, total = {}, -#GAP
  for k, i in ipairs(columns) do
    list[k] = 0
    for _, row in ipairs(rows) do list[k] = math.max(list[k], text.width(row[i])) end
    total = total + list[k] + #GAP
  end
  return list, total
end

local function line_of(row, columns, list)
  local parts = {}
  for k, i in ipairs(columns) do parts[k] = k < #columns and pad(row[i], list[k]) or row[i] end
  return table.concat(parts, GAP)
end

--- The lines, each with its end.
-- @tparam {table,...} leases as from lookup.find
-- @tparam[opt] number width of the terminal; nil: it is none
-- @bool[opt] ascii nothing else can be shown
-- @treturn string
function listing:lines(leases, width, ascii)
  local header, rows, lines = {}, {}, {}
  ascii = ascii or not width
  for i, column in ipairs(self.columns) do header[i] = column.name end
  for n, lease in ipairs(leases) do
    rows[n] = {}
    for i, column in ipairs(self.columns) do rows[n][i] = cell(column.of(lease, not width), ascii) end
  end
  if width then table.insert(rows, 1, header) end
  local columns, list, total
  for _, layout in ipairs(width and self.layouts or { self.layouts[1] }) do
    columns = layout
    list, total = widths(rows, layout)
    if not width or total <= width then break end
  end
  local shown = {}
  for _, i in ipairs(columns) do shown[i] = true end
  for _, row in ipairs(rows) do
    lines[#lines + 1] = line_of(row, columns, list)
    if width and row ~= header then words(self.columns, row, shown, width, lines) end
  end
  lines[#lines + 1] = ""
  return table.concat(lines, "\n")
end

--- Returns the lines for standard output: as wide as the terminal, or in full where the output is no terminal.
function listing:for_output(leases)
  if not terminal.shows() then return self:lines(leases) end
  return self:lines(leases, terminal.width(), not terminal.takes_utf8())
end

listing.leases = listing.new {
  { "TARGET", "MODE", "OWNER", "LABEL", "APPLICATION", "HOST", "PID", "SINCE", "REMAINING", "ID" },
  { "TARGET", "MODE", "OWNER", "LABEL", "REMAINING" }, { "TARGET", "OWNER", "REMAINING" }, { "TARGET" },
}

return listing
