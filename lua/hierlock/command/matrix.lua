--- hierlock matrix: which locks of a small tree go together, found out by really taking each pair of them.

local page = require "hierlock.command.matrix_page"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local trials = require "hierlock.command.trials"
local uv = require "luv"

local matrix = {
  summary = "Take each pair of locks, and show which go together.",
  description = "Takes each pair of locks of a small tree, one after the other, on two connections. Shows which pairs go together, and in " ..
    "which the second lock has to wait. The tree has a root of its own, so no other program waits for it. The exit status is 1 " ..
    "when a pair went together that the rule forbids.",
}

local WRONG = 1
local PATIENCE = 5 -- s, for what is free

function matrix.options(parser)
  trials.options(parser)
  parser:option("--html", "Write a page that explains itself, too."):argname "FILE"
end

-- ------------------------------------------------------------------ the tree

local function letter(name) return name:match "^%a" and name:sub(1, 1) or "n" end

local function node(names, ids)
  local parts = {}
  for i, id in ipairs(ids) do parts[i] = letter(names[i]) .. id end
  return table.concat(parts, "/")
end

-- A path from root to leaf, and beside it another root, another leaf and, where there is a level between, another
-- node there. Nodes on the deepest level are locked in both modes; on another level, shared is exclusive.
local function requests(names)
  local list, depth = {}, #names
  local function add(n, last)
    local ids = {}
    for i = 1, n do ids[i] = i < n and 1 or last end
    for _, mode in ipairs(n == depth and { "exclusive", "shared" } or { "exclusive" }) do
      list[#list + 1] = { ids = ids, mode = mode, level = names[n], node = node(names, ids) }
    end
  end
  for n = 1, depth do
    add(n, 1)
    if n == depth or n == depth - 1 and n > 1 then add(n, 2) end
  end
  if depth > 1 then add(1, 2) end
  return list
end

--- The rule: a node's lock is shared on all that is above it.
local function conflict(a, b)
  for i = 1, math.min(#a.ids, #b.ids) do
    if a.ids[i] ~= b.ids[i] then return false end
  end
  return not (#a.ids == #b.ids and a.mode == "shared" and b.mode == "shared")
end

-- --------------------------------------------------------------- taking them

-- The ids to lock, below a root that no other program uses.
local function target(root, request)
  local ids = {}
  for i, id in ipairs(request.ids) do ids[i] = i == 1 and ("%s %d"):format(root, id) or ("%d"):format(id) end
  return ids
end

-- Whether the second manager is granted its request while the first holds the other; nil, err.
local function goes(second, root, request)
  local handle, err = second:acquire(target(root, request), { timeout = 0, mode = request.mode })
  if handle then
    local ok
    ok, err = handle:release { confirm = true }
    if ok then return true end
  elseif err.code == "timeout" then
    return false
  end
  return nil, err
end

-- found.granted[i][j]: whether the j-th went beside the i-th; found.odd: pairs that the rule has otherwise; nil, err.
local function take_all(found, first, second, root)
  found.granted, found.odd, found.together, found.forbidden = {}, {}, 0, 0
  for i, held in ipairs(found.requests) do
    local handle, err = first:acquire(target(root, held), { timeout = PATIENCE, mode = held.mode })
    if not handle then return nil, err end
    found.granted[i] = {}
    for j, asked in ipairs(found.requests) do
      local granted
      granted, err = goes(second, root, asked)
      if granted == nil then return nil, err end
      found.granted[i][j] = granted
      found.together = found.together + (granted and 1 or 0)
      if granted == conflict(held, asked) then
        found.odd[#found.odd + 1] = { i, j, granted }
        found.forbidden = found.forbidden + (granted and 1 or 0)
      end
    end
    local ok
    ok, err = handle:release { confirm = true }
    if not ok then return nil, err end
  end
  return found
end

-- ------------------------------------------------------------------ drawing

local NAMED = 5 -- oddities
local RED, GREEN, ODD = "31", "32", "1;35"

local function drawn(found, width, ascii, colours)
  local function paint(code, words) return colours and "\27[" .. code .. "m" .. words .. "\27[0m" or words end
  local labels, room, lines = {}, 0, {}
  for i, request in ipairs(found.requests) do
    labels[i] = ("%s  %s"):format(string.char(64 + i), text.safe(request.node, ascii))
    room = math.max(room, text.width(labels[i]))
  end
  local modes = #"exclusive"
  local left = room + 2 + modes
  local words = not width or left + 5 * #labels <= width
  local yes, no, cell = words and "both" or "+", words and "wait" or "-", words and 5 or 2
  local head = "held" .. (" "):rep(left - 4)
  for i = 1, #labels do head = head .. (" "):rep(cell - 1) .. string.char(64 + i) end
  lines[1] = ("%s: the row is held, the column is asked for"):format(text.safe(found.where, ascii))
  lines[2] = head
  local odd = {}
  for _, pair in ipairs(found.odd) do odd[pair[1] * 100 + pair[2]] = true end
  for i, request in ipairs(found.requests) do
    local line = labels[i] .. (" "):rep(room - text.width(labels[i])) .. "  " .. request.mode .. (" "):rep(modes - #request.mode)
    for j = 1, #labels do
      local granted = found.granted[i][j]
      line = line .. " " .. paint(odd[i * 100 + j] and ODD or granted and GREEN or RED, granted and yes or no)
    end
    lines[#lines + 1] = line
  end
  lines[#lines + 1] = ("%s  they go together   %s  the second waits"):format(paint(GREEN, yes), paint(RED, no))
  lines[#lines + 1] = matrix.summed_up(found)
  for i, pair in ipairs(found.odd) do
    if i > NAMED then
      lines[#lines + 1] = ("and %d more"):format(#found.odd - NAMED)
      break
    end
    lines[#lines + 1] = paint(ODD, ("%s and %s: %s"):format(string.char(64 + pair[1]), string.char(64 + pair[2]), matrix.oddity(pair[3])))
  end
  lines[#lines + 1] = ""
  return table.concat(lines, "\n")
end

--- Describes a pair that did not behave as the rule says.
function matrix.oddity(granted)
  return granted and "WENT TOGETHER, AND MUST NOT: this store does not exclude" or
    "waits, and need not: two nodes in one bucket, or another program's lock"
end

--- How it went, in a line.
function matrix.summed_up(found)
  local n = #found.requests * #found.requests
  return ("%d pairs were taken in %.1f ms: %d went together, %d waited, %s"):format(n, found.seconds * 1000, found.together, n - found.together,
    #found.odd == 0 and "all as the rule says" or ("%d not as the rule says"):format(#found.odd))
end

function matrix.run(arguments)
  local store, err = trials.store(arguments, "matrix")
  if not store then return nil, err end
  local first, second, found, ok
  first, err = store.open {}
  if not first then return nil, err end
  second, err = store.open {}
  if second then
    local start = uv.hrtime()
    local names, failure = trials.levels(first, store.root)
    err = failure
    if names then found, err = take_all({ where = store.where, names = names, requests = requests(names) }, first, second, store.root) end
    if found then found.seconds = (uv.hrtime() - start) / 1e9 end
    second:close()
  end
  first:close()
  if not found then return nil, err end
  if terminal.shows() then
    ok, err = terminal.write(drawn(found, terminal.width(), not terminal.takes_utf8(), terminal.takes_colours()))
  else
    ok, err = terminal.write(drawn(found, nil, true, false))
  end
  if ok and arguments.html then ok, err = page.write(arguments.html, found, matrix) end
  if not ok then return nil, err end
  return found.forbidden > 0 and WRONG or 0
end

return matrix
