--- hierlock explain: what an acquisition of some targets would lock, in which order and how; which of them exclude each
-- other; how likely a false conflict is. Locks nothing.

local listing = require "hierlock.command.listing"
local lookup = require "hierlock.command.lookup"
local progress = require "hierlock.command.progress"
local server = require "hierlock.command.server"
local space = require "hierlock.command.space"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local waits = require "hierlock.command.waits"

local explain = {
  summary = "Say what an acquisition of targets would lock, and how.",
  description = "Says which rows an acquisition of all targets would lock, in their order: level, bucket or key, mode; and by " ..
    "which statement or script. Says which targets exclude each other, when different programs want them, and why; " ..
    "and how likely a false conflict is. Asks the store for its levels and buckets, and locks nothing.",
}

local HASH_BITS = 60
local NODES_SHOWN, PAIRS_SHOWN = 3, 100
local SHARED, EXCLUSIVE = "shared", "exclusive"

-- How a store locks the rows, where it does so without SQL.
local TAKES = {
  file = "A claim for each bucket is written into the table that programs share, in this order: see csrc/stores/embedded/format.h.",
  null = "Nothing is locked: it grants at once.",
  sqlite = "A transaction, BEGIN IMMEDIATE, looks into hierlock_rows for these keys, and adds them: see csrc/stores/sqlite/grant.c.",
  redis = "The script take.lua adds the lease to a sorted set for each, whose key is the DSN's prefix (hierlock), a colon and the key " ..
    "above: see csrc/stores/redis/scripts.",
  memcached = "A cas adds the lease to the document of each root, which has the rows of all its leases: see csrc/stores/memcached/take.c.",
  quorum = "Each member is asked for the same rows, in its own way.",
}

local function held(given)
  local value = tonumber(given)
  if value and value >= 0 and value < 1e15 and value % 1 == 0 then return value end
  return nil, "--held must be a whole number, 0 or more"
end

function explain.options(parser)
  parser:argument("targets", "Nodes, as u1/a1/r1; %2F stands for a slash in an id, %25 for a %."):args "+":argname "TARGET"
  parser:flag("--shared", "Lock for readers: other readers may hold the same node.")
  parser:option("--held", "For the odds of a false conflict: how many locks others hold. Default: 1000.")
    :argname "N":convert(held):default "1000"
  lookup.store_options(parser)
end

-- A plan's targets in the form that people see.
local function shown(plan) return (tostring(plan):gsub("^[^(]*%(", ""):gsub("%)$", "")) end

-- Lists for each node, the root first, its name and its row.
local function path_of(manager, ids, mode)
  local nodes, prefix = {}, {}
  local rows = manager:plan({ ids }, { mode = mode }):rows()
  for i, row in ipairs(rows) do
    prefix[i] = ids[i]
    nodes[i] = { name = shown(manager:plan { prefix }), row = row }
  end
  return nodes
end

local function row_name(row) return row.key or ("%d.%.0f"):format(row.level, row.bucket) end

-- The key of a row in the form of the store's documents.
local function key_of(store, row)
  if not row.key then return ("%.0f"):format(row.bucket) end
  return (store == "redis" or store == "memcached") and row.node or row.key
end

-- The rows of all targets in their order, as lines of a table.
local function table_of(rows, paths, layout, store)
  local names = {}
  for _, path in ipairs(paths) do
    for _, node in ipairs(path) do
      local key = row_name(node.row)
      names[key] = names[key] or {}
      if not names[key][node.name] then
        names[key][node.name] = true
        table.insert(names[key], node.name)
      end
    end
  end
  local lines = {}
  for i, row in ipairs(rows) do
    local nodes = names[row_name(row)]
    lines[i] = { order = i, level = ("%d %s"):format(row.level, layout.levels[row.level + 1]), key = key_of(store, row), mode = row.intention or row.mode,
                 nodes = table.concat(nodes, ", ", 1, math.min(#nodes, NODES_SHOWN)) ..
                   (#nodes > NODES_SHOWN and (" and %d more"):format(#nodes - NODES_SHOWN) or "") }
  end
  return lines
end

local function columns(bucketed)
  local key = bucketed and "BUCKET" or "KEY"
  return listing.new({ { "ORDER", "LEVEL", key, "MODE", "NODES" } }, {
    ORDER = { of = function(line) return ("%d"):format(line.order) end },
    LEVEL = { of = function(line) return line.level end },
    [key] = { of = function(line) return line.key end },
    NODES = { of = function(line) return line.nodes end },
  })
end

-- Why two targets exclude each other; nil: they do not.
local function collision(a, b)
  for i = 1, #a do
    for k = 1, #b do
      local mine, its = a[i], b[k]
      if row_name(mine.row) == row_name(its.row) and waits.conflict(mine.row, its.row) then
        local last, its_last = a[#a].name, b[#b].name
        if last == its_last then return "are the same node" end
        if mine.name == its.name then return ("exclude each other: %s is in %s"):format(
          #a > #b and last or its_last, #a > #b and its_last or last) end
        return ("exclude each other by chance: %s and %s have the same row"):format(mine.name, its.name)
      end
    end
  end
end

local function collisions(paths)
  local lines, more = {}, 0
  for i = 1, #paths do
    for k = i + 1, #paths do
      local why = collision(paths[i], paths[k])
      if why and #lines < PAIRS_SHOWN then
        lines[#lines + 1] = ("%s and %s %s."):format(paths[i][#paths[i]].name, paths[k][#paths[k]].name, why)
      elseif why then
        more = more + 1
      end
    end
  end
  if more > 0 then lines[#lines + 1] = ("And %d more pairs."):format(more) end
  if #lines == 0 and #paths > 1 then lines[1] = "No two of these targets exclude each other." end
  return lines
end

--- How likely it is that one of so many exclusive rows falls together with one of so many others' nodes.
function explain.odds(exclusive, others, buckets)
  local expected = exclusive * others / buckets
  -- Where 1 - 1 / buckets can be told from 1.
  if buckets < 2 ^ 40 and buckets > 1 then expected = -exclusive * others * math.log(1 - 1 / buckets) end
  if buckets == 1 then return exclusive * others > 0 and 1 or 0 end
  return expected < 1e-8 and expected or 1 - math.exp(-expected)
end

local function odds_line(rows, others, buckets)
  local exclusive = 0
  for _, row in ipairs(rows) do exclusive = exclusive + (row.mode == EXCLUSIVE and 1 or 0) end
  local odds = explain.odds(exclusive, others, buckets)
  return ("False conflicts: while others hold %s locks, each on a node of its own on these levels, the odds that one of them " ..
    "is in the way by chance are at most %s."):format(progress.number(others),
      odds == 0 and "0" or ("%.2g, 1 in "):format(odds) .. (odds > 1e-9 and progress.number(1 / odds) or ("%.2g"):format(1 / odds)))
end

-- Lines that tell how the rows are locked; nil, err.
local function statement(wanted, plan)
  if wanted.store == "postgresql" then return { "A session locks them by", "  " .. plan:sql "postgresql" } end
  if wanted.store ~= "mysql" then return { TAKES[wanted.store] } end
  local connection, err = server.connect(wanted, "explain", server.ANSWER)
  if not connection then return nil, err end
  local version, found
  version, err = connection:query "SELECT VERSION()"
  local sizes = space.new(connection)
  if version then found, err = sizes:look() end
  connection:close()
  if not found then return nil, err end
  local dialect = version[1][1]:find "MariaDB" and "mariadb" or "mysql"
  return { "A session locks them by", "  " .. plan:sql(dialect, sizes.name, found.leased or false) }
end

local function describe(arguments, manager, wanted, targets)
  local mode = arguments.shared and SHARED or EXCLUSIVE
  local plan = manager:plan(targets, { mode = mode })
  local rows, paths = plan:rows(), {}
  for i, ids in ipairs(targets) do paths[i] = path_of(manager, ids, mode) end
  local how, err = statement(wanted, plan)
  if not how then return nil, err end
  local layout = plan:layout()
  local ascii = not (terminal.shows() and terminal.takes_utf8())
  local lines = {}
  local function add(list, before)
    for _, line in ipairs(list) do lines[#lines + 1] = (before or "") .. text.safe(line, ascii) end
    lines[#lines + 1] = ""
  end
  add { ("Store %s, levels %s; on each level %s."):format(wanted.store, table.concat(layout.levels, ", "),
    layout.buckets and progress.number(layout.buckets) .. " buckets" or ("keys of %d bits"):format(HASH_BITS)) }
  lines[#lines + 1] = columns(layout.buckets):lines(table_of(rows, paths, layout, wanted.store), math.huge, ascii)
  add(how)
  add(collisions(paths))
  lines[#lines + 1] = odds_line(rows, arguments.held, layout.buckets or 2 ^ HASH_BITS)
  lines[#lines + 1] = ""
  return (table.concat(lines, "\n"):gsub("\n\n\n", "\n\n"))
end

function explain.run(arguments)
  local targets = {}
  for i, argument in ipairs(arguments.targets) do
    local target, err = lookup.target(argument)
    if not target then return nil, err end
    targets[i] = target
  end
  local manager, wanted = lookup.open(arguments, "explain")
  if not manager then return nil, wanted end
  local ok, lines, err = pcall(describe, arguments, manager, wanted, targets)
  manager:close()
  if not ok then return lookup.misuse(lines) end
  if not lines then return nil, err end
  ok, err = terminal.write(lines)
  return ok and 0, err
end

return explain
