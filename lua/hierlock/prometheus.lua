--- Writes the counts of managers as a text that Prometheus reads: its text exposition format 0.0.4
-- (https://prometheus.io/docs/instrumenting/exposition_formats/). Made of manager:stats() alone.

local core = require "hierlock.core"

-- The fields of stats(), in the order of the text: name there, name and type here, help.
local METRICS = {
  { "acquired", "acquired_total", "counter", "Acquisitions that were granted." },
  { "waited", "waited_total", "counter", "Of those, the ones that took 2 ms or longer." },
  { "released", "released_total", "counter", "Locks that were released." },
  { "timeouts", "timeouts_total", "counter", "Acquisitions and extensions that were not granted in time." },
  { "deadlocks", "deadlocks_total", "counter", "Acquisitions and extensions that the store ended as victims of a deadlock." },
  { "cancelled", "cancelled_total", "counter", "Acquisitions that were cancelled." },
  { "busy", "busy_total", "counter", "Acquisitions for which there was no connection or no thread." },
  { "lost", "lost_total", "counter", "Locks that were lost while they were held." },
  { "errors", "errors_total", "counter", "Acquisitions that failed otherwise." },
  { "reconnects", "reconnects_total", "counter", "Stale connections that were replaced unseen." },
  { "held", "held", "gauge", "Locks that are held." },
  { "waiting", "waiting", "gauge", "Calls that wait." },
  { "connections", "connections", "gauge", "Connections to the store." },
}
local HISTOGRAMS = {
  { "waits", "wait_seconds", "How long acquisitions waited, granted or not, by the level of their deepest target." },
  { "holds", "hold_seconds", "For how long was held what is not held any more, by the level of its deepest target." },
}

-- ----------------------------------------------------------------- labels

-- How many bytes the UTF-8 character at i has; nil where no character begins (RFC 3629).
local function character_size(text, i)
  local a, b = text:byte(i, i + 1)
  if a < 0x80 then return 1 end
  local size = a >= 0xc2 and a < 0xe0 and 2 or a >= 0xe0 and a < 0xf0 and 3 or a >= 0xf0 and a < 0xf5 and 4
  if not size or not text:find("^[\128-\191]" .. ("[\128-\191]"):rep(size - 2), i + 1) then return nil end
  local least = a == 0xe0 and 0xa0 or a == 0xf0 and 0x90 or 0x80
  local most = a == 0xed and 0x9f or a == 0xf4 and 0x8f or 0xbf
  return b >= least and b <= most and size or nil
end

-- The format is UTF-8: a byte that belongs to no character becomes U+FFFD.
local function as_utf8(text)
  if not text:find("[\128-\255]") then return text end
  local parts, i = {}, 1
  while i <= #text do
    local size = character_size(text, i)
    parts[#parts + 1] = size and text:sub(i, i + size - 1) or "\239\191\189"
    i = i + (size or 1)
  end
  return table.concat(parts)
end

local ESCAPES = { ["\\"] = "\\\\", ['"'] = '\\"', ["\n"] = "\\n" }

local function label(name, value) return ('%s="%s"'):format(name, (as_utf8(value):gsub('[\\"\n]', ESCAPES))) end

-- `a="1",b="2"`, in the order of the names; "" without labels.
local function labels_text(labels)
  local list = {}
  if labels == nil then return "" end
  if type(labels) ~= "table" then core.misuse("labels must be a table, not " .. type(labels)) end
  for name, value in pairs(labels) do
    if type(name) ~= "string" or not name:find("^[%a_][%w_]*$") or name:find("^__") then
      core.misuse("a label's name must be of letters, digits and _, and not begin with a digit or __")
    elseif name == "level" or name == "le" then
      core.misuse(("a label cannot be named '%s': there is one of hierlock's own"):format(name))
    elseif type(value) ~= "string" and type(value) ~= "number" then
      core.misuse(("the label %s must be a string or a number, not %s"):format(name, type(value)))
    end
    list[#list + 1] = label(name, tostring(value))
  end
  table.sort(list)
  return table.concat(list, ",")
end

-- ------------------------------------------------------------------- text

-- Digits, whatever the locale has for a decimal point.
local function number(value) return (("%.14g"):format(value):gsub(",", ".")) end

-- A text while it is made: families in order, each with its samples; a sample that comes again is added to the
-- first.
local function new_text() return { families = {}, values = {} } end

local function family(text, name, kind, help)
  local found = text.families[name]
  if not found then
    found = { name = name, kind = kind, help = help }
    text.families[name], text.families[#text.families + 1] = found, found
  end
  return found
end

local function add(text, fam, sample, value)
  if not text.values[sample] then fam[#fam + 1] = sample end
  text.values[sample] = (text.values[sample] or 0) + value
end

local function finish(text)
  local lines = {}
  for _, fam in ipairs(text.families) do
    lines[#lines + 1] = ("# HELP %s %s"):format(fam.name, fam.help)
    lines[#lines + 1] = ("# TYPE %s %s"):format(fam.name, fam.kind)
    for _, sample in ipairs(fam) do lines[#lines + 1] = sample .. " " .. number(text.values[sample]) end
  end
  lines[#lines + 1] = ""
  return table.concat(lines, "\n")
end

local function sample_name(name, ...)
  local list = {}
  for i = 1, select("#", ...) do
    local part = select(i, ...)
    if part ~= "" then list[#list + 1] = part end
  end
  return #list == 0 and name or name .. "{" .. table.concat(list, ",") .. "}"
end

local function add_histogram(text, fam, bounds, labels, histogram)
  local sum = 0
  for i, count in ipairs(histogram.buckets) do
    sum = sum + count
    local le = label("le", bounds[i] and number(bounds[i]) or "+Inf")
    add(text, fam, sample_name(fam.name .. "_bucket", labels, le), sum)
  end
  add(text, fam, sample_name(fam.name .. "_sum", labels), histogram.seconds)
  add(text, fam, sample_name(fam.name .. "_count", labels), histogram.count)
end

local function add_manager(text, manager, prefix, labels)
  local stats = manager:stats()
  for _, metric in ipairs(METRICS) do
    local fam = family(text, prefix .. metric[2], metric[3], metric[4])
    add(text, fam, sample_name(fam.name, labels), stats[metric[1]])
  end
  for _, metric in ipairs(HISTOGRAMS) do
    local fam = family(text, prefix .. metric[2], "histogram", metric[3])
    for _, level in ipairs(stats.levels) do
      local level_label = label("level", level.name)
      add_histogram(text, fam, stats.bounds, labels == "" and level_label or labels .. "," .. level_label, level[metric[1]])
    end
  end
end

-- Adds a text that this module has made, perhaps in another process.
local function add_text(text, other)
  local current, help
  for line in other:gmatch "[^\n]+" do
    local name, rest = line:match "^# HELP (%S+) (.*)$"
    if name then
      help = { name, rest }
    elseif line:find "^# TYPE " then
      local kind
      name, kind = line:match "^# TYPE (%S+) (%S+)$"
      current = name and help and help[1] == name and family(text, name, kind, help[2])
    else
      local sample, value = line:match "^(.+) (%S+)$"
      value = tonumber(value)
      if not current or not sample or not value then core.misuse("a text in the list is none of hierlock.prometheus") end
      add(text, current, sample, value)
    end
  end
end

-- ---------------------------------------------------------------- options

local OPTIONS = { prefix = true, labels = true }

local function read_options(options)
  if options == nil then options = {} end
  if type(options) ~= "table" then core.misuse("options must be a table, not " .. type(options)) end
  for name in pairs(options) do
    if not OPTIONS[name] then core.misuse(("unknown option '%s'"):format(tostring(name))) end
  end
  local prefix = options.prefix == nil and "hierlock" or options.prefix
  if type(prefix) ~= "string" or not prefix:find "^[%a_:][%w_:]*$" then
    core.misuse("prefix must be of letters, digits, _ and :, and not begin with a digit")
  end
  return prefix .. "_", labels_text(options.labels)
end

local prometheus = {}

function prometheus.text(source, options)
  local prefix, labels = read_options(options)
  local sources = core.is_manager(source) and { source } or source
  if type(sources) ~= "table" then
    core.misuse("source must be a manager, or a list of managers and texts, not " .. type(source))
  end
  local text = new_text()
  for i, one in ipairs(sources) do
    if core.is_manager(one) then
      add_manager(text, one, prefix, labels)
    elseif type(one) == "string" then
      add_text(text, one)
    else
      core.misuse(("number %d of the list must be a manager or a text, not %s"):format(i, type(one)))
    end
  end
  return finish(text)
end

return prometheus
