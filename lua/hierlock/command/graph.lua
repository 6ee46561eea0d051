--- hierlock graph: draws each waiter and the holders that it waits for, as a graph for Graphviz. Changes nothing.

local uv = require "luv"
local lookup = require "hierlock.command.lookup"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local waits = require "hierlock.command.waits"

local graph = {
  summary = "Draw who waits for whom.",
  description = "Writes the wait-for graph in the language DOT of Graphviz: waiters, the holders that they wait for, and the targets " ..
    "of each; of the whole space, or only those that block a lock on the target. If the name of the output file ends in " ..
    ".svg, .png or .pdf, Graphviz draws the graph.",
}

local DRAWN = { svg = true, png = true, pdf = true }
local LABEL_MAX = 80 -- bytes of a line of a label

function graph.options(parser)
  lookup.target_option(parser)
  parser:option("-o --output", "Into this file: drawn by Graphviz as .svg, .png or .pdf say; else DOT. Default: to standard output.")
    :argname "FILE"
  lookup.store_options(parser)
end

-- Cuts a line to at most LABEL_MAX bytes, without splitting a character.
local function cut(line)
  if #line <= LABEL_MAX then return line end
  local n = LABEL_MAX - 3
  while line:find("^[\128-\191]", n + 1) do n = n - 1 end
  return line:sub(1, n) .. "..."
end

-- Joins lines into a quoted DOT label: ASCII only, other characters as character references, and nothing that DOT
-- interprets.
local function quoted(lines)
  local parts = {}
  for i, line in ipairs(lines) do
    line = cut(text.safe(line)):gsub("&", "&amp;"):gsub("[\\\"]", "\\%0")
    parts[i] = text.map(line, function(code) return code and code > 0x7E and ("&#%d;"):format(code) end)
  end
  return '"' .. table.concat(parts, "\\n") .. '"'
end

local function describe(entries)
  local first = entries[1]
  local lines = { waits.name(first) }
  for _, entry in ipairs(entries) do
    lines[#lines + 1] = ("%s %s, %s%s"):format(entry.waiting and "waits for" or "holds", entry.path, entry.mode,
      entry.kind == "lease" and entry.remaining and ", " .. text.duration(entry.remaining) .. " left" or "")
    if entry.label then lines[#lines + 1] = entry.label end
  end
  return quoted(lines)
end

-- Makes one node for each session that waits or is waited for.
local function nodes_of(entries)
  local concerned, nodes, of = {}, {}, {}
  local sessions = {}
  for _, entry in ipairs(entries) do
    if entry.waiting then
      concerned[entry] = true
      for _, other in ipairs(entry.waits_for) do concerned[other] = true end
    end
  end
  for _, entry in ipairs(entries) do
    if concerned[entry] then
      local key = entry.session and ("%s/%s/%s"):format(entry.session, entry.pid or "", entry.host)
      local node = key and sessions[key]
      if not node then
        node = { name = ("n%d"):format(#nodes + 1) }
        nodes[#nodes + 1] = node
        if key then sessions[key] = node end
      end
      node[#node + 1] = entry
      of[entry] = node
    end
  end
  return nodes, of
end

--- DOT; nothing in it but ASCII.
-- @tparam {table,...} entries as from waits.find
function graph.dot(entries)
  local nodes, of = nodes_of(entries)
  local lines = { "digraph hierlock {", '  rankdir="LR";', '  node [shape="box"];' }
  local edges = {}
  for _, node in ipairs(nodes) do
    local waiting = false
    for _, entry in ipairs(node) do waiting = waiting or entry.waiting end
    lines[#lines + 1] = ("  %s [label=%s%s];"):format(node.name, describe(node), waiting and ', style="dashed"' or "")
    for _, entry in ipairs(node) do
      for _, other in ipairs(entry.waits_for or {}) do
        edges[#edges + 1] = ("  %s -> %s;"):format(node.name, of[other].name)
      end
      local more = entry.waits_for and entry.waits_for_count - #entry.waits_for or 0
      if more > 0 then
        lines[#lines + 1] = ('  %s_more [label="%d more", shape="plaintext"];'):format(node.name, more)
        edges[#edges + 1] = ("  %s -> %s_more;"):format(node.name, node.name)
      end
    end
  end
  for _, edge in ipairs(edges) do lines[#lines + 1] = edge end
  lines[#lines + 1] = "}\n"
  return table.concat(lines, "\n")
end

local function failure(message, ...)
  return nil, { code = "output", message = message:format(...), retryable = false }
end

-- Has Graphviz draw it; true; nil, err.
local function draw(dot, format, file)
  local input, said, ended = uv.new_pipe(false), uv.new_pipe(false), nil
  local message = ""
  local process, err = uv.spawn("dot", { args = { "-T" .. format, "-o", file }, stdio = { input, nil, said } },
    function(status, signal) ended = { status, signal } end)
  if not process then
    input:close()
    said:close()
    uv.run()
    return nil, { code = "store", retryable = false, message =
      ("to draw it needs the program dot of Graphviz: apt-get install graphviz (%s)"):format(err) }
  end
  said:read_start(function(_, data)
    message = message .. (data or "")
    if not data then said:close() end
  end)
  input:write(dot)
  input:shutdown(function() input:close() end)
  while not ended or not said:is_closing() do uv.run "once" end
  process:close()
  uv.run()
  if ended[1] == 0 and ended[2] == 0 then return true end
  return failure("cannot draw into %s: %s", text.safe(file), text.safe(message:match "[^\n]*", true))
end

local function write(dot, file)
  local out, message = io.open(file, "wb")
  if not out then return failure("cannot write: %s", message) end
  local ok, closed, why
  ok, message = out:write(dot)
  closed, why = out:close()
  if not ok or not closed then return failure("cannot write: %s", message or why) end
  return true
end

function graph.run(arguments)
  local target, manager, found, err
  if arguments.target then
    target, err = lookup.target(arguments.target)
    if not target then return nil, err end
  end
  manager, err = lookup.open(arguments, "graph")
  if not manager then return nil, err end
  local unseen
  found, unseen = lookup.holders(manager, target)
  if found then waits.find(manager, found) end
  manager:close()
  if not found then return nil, unseen end
  local file, done = arguments.output
  local format = file and (file:match "%.(%w+)$" or ""):lower()
  if not file then
    done, err = terminal.write(graph.dot(found))
  elseif DRAWN[format] then
    done, err = draw(graph.dot(found), format, file)
  else
    done, err = write(graph.dot(found), file)
  end
  if done and unseen then return nil, unseen end
  return done and 0, err
end

return graph
