--- Collects the findings of `hierlock doctor`, and prints them as lines for people, or as JSON for programs. Asks no
-- store.

local text = require "hierlock.command.text"

local findings = {}
findings.__index = findings

--- From well to ill. "unseen": it could not be looked at, and it is said why.
findings.STATUSES = { "ok", "unseen", "warning", "wrong" }

local COLOURS = { ok = "32", unseen = "36", warning = "33", wrong = "1;31" }
local DIM, BOLD = "2", "1"
local STATUS_WIDTH = #"warning"
local GAP, INDENT = "  ", (" "):rep(2 + #"warning" + 2)
local MEND = "mend: "

--- None yet.
function findings.new() return setmetatable({ counts = { ok = 0, unseen = 0, warning = 0, wrong = 0 } }, findings) end

--- Adds a finding.
-- @string check its name, of a few words
-- @string status of STATUSES
-- @string found the present state
-- @string why it matters, a line
-- @param[opt] mend a command, an SQL statement or, in words, what to do; or a list of these. Only a
--   finding that is not ok needs one
function findings:add(check, status, found, why, mend)
  self.counts[status] = self.counts[status] + 1
  if status == "ok" then mend = nil end
  if type(mend) == "string" then mend = { mend } end
  self[#self + 1] = { check = check, status = status, found = text.utf8(found), why = why, mend = mend or {} }
end

--- The worst status of all.
function findings:verdict()
  for i = #findings.STATUSES, 1, -1 do
    if self.counts[findings.STATUSES[i]] > 0 then return findings.STATUSES[i] end
  end
  return "ok"
end

-- Words, in lines of so many columns; each but the first is put behind `indent`, which counts.
local function wrap(words, width, indent, first)
  local lines, line = {}, first
  local empty = true
  for word in words:gmatch "%S+" do
    if not empty and text.width(line) + 1 + text.width(word) > width then
      lines[#lines + 1], line, empty = line, indent, true
    end
    line, empty = line .. (empty and "" or " ") .. word, false
  end
  lines[#lines + 1] = line
  return lines
end

-- Commands stay in one line: they are to be copied.
local function is_command(mend) return mend:find "^%u%u+ .*;$" or mend:find "^[%l][%w-]* .*%f[%S][-/'\"$%d%u{]" end

--- The findings as lines of text.
-- @tparam[opt] number width of the terminal; nil: no terminal
-- @bool[opt] ascii nothing else can be shown
-- @bool[opt] colours it has them
-- @bool[opt] brief leaves out findings that are ok
function findings:lines(width, ascii, colours, brief)
  local function paint(code, words) return colours and "\27[" .. code .. "m" .. words .. "\27[0m" or words end
  local names, lines = 0, {}
  ascii = ascii or not width
  width = math.max(width or math.huge, 40)
  for _, finding in ipairs(self) do names = math.max(names, #finding.check) end
  for _, finding in ipairs(self) do
    if not (brief and finding.status == "ok") then
      local found = text.safe(finding.found, ascii)
      local head = GAP .. finding.status .. (" "):rep(STATUS_WIDTH - #finding.status) .. GAP
      local check = finding.check .. (" "):rep(names - #finding.check) .. GAP
      local rest = wrap(found, width, INDENT .. (" "):rep(names) .. GAP, head .. check)
      rest[1] = paint(COLOURS[finding.status], head) .. paint(BOLD, check) .. rest[1]:sub(#head + #check + 1)
      for _, line in ipairs(rest) do lines[#lines + 1] = line end
      for _, line in ipairs(wrap(finding.why, width, INDENT, INDENT)) do lines[#lines + 1] = paint(DIM, line) end
      for _, mend in ipairs(finding.mend) do
        local way = text.safe(mend, ascii)
        if is_command(way) then
          lines[#lines + 1] = INDENT .. MEND .. way
        else
          for _, line in ipairs(wrap(way, width, INDENT .. (" "):rep(#MEND), INDENT .. MEND)) do lines[#lines + 1] = line end
        end
      end
    end
  end
  local parts = {}
  for i = #findings.STATUSES, 1, -1 do
    local status = findings.STATUSES[i]
    local count = ("%d %s"):format(self.counts[status], status)
    if self.counts[status] > 0 then parts[#parts + 1] = paint(COLOURS[status], count) end
  end
  lines[#lines + 1] = table.concat(parts, ", ")
  lines[#lines + 1] = ""
  return table.concat(lines, "\n")
end

local KEYS = { "store", "where", "verdict", "findings", "check", "status", "found", "why", "mend" }

--- Encodes the findings as one object, with a line for each.
-- @param json dkjson
function findings:json(json, store, where)
  local list = {}
  for i, finding in ipairs(self) do
    list[i] = json.encode({
      check = finding.check, status = finding.status, found = finding.found, why = finding.why,
      mend = setmetatable(finding.mend, { __jsontype = "array" }),
    }, { keyorder = KEYS })
  end
  local head = json.encode({ store = store, where = text.utf8(where), verdict = self:verdict() }, { keyorder = KEYS })
  return ('%s,"findings":[\n%s\n]}\n'):format(head:sub(1, -2), table.concat(list, ",\n"))
end

return findings
