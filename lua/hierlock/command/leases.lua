--- hierlock leases: who holds which leases of a space. Changes nothing.

local listing = require "hierlock.command.listing"
local lookup = require "hierlock.command.lookup"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"

local leases = {
  summary = "List the leases of a space.",
  description = "Lists the leases whose time is not up: of the whole space, or those that keep others from locking " ..
    "the target: on the node, above it and below it. Session locks are not among them.",
}

function leases.options(parser)
  lookup.options(parser)
  parser:flag("--json", "Print an array of JSON objects; times are in seconds.")
end

local FIELDS = { "target", "mode", "owner", "label", "application", "host", "pid", "since", "remaining", "id" }

local function encoder()
  local ok, json = pcall(require, "dkjson")
  if ok then return json end
  return nil, { code = "store", message =
    "--json needs the Lua module dkjson: luarocks install dkjson, or apt-get install lua-dkjson" }
end

-- An array, with a line for each lease.
local function encode(json, found)
  local lines = {}
  for i, lease in ipairs(found) do
    local object = { target = lease.path, since = lease.since or json.null, remaining = lease.remaining, pid = lease.pid or json.null }
    for _, name in ipairs(FIELDS) do
      object[name] = object[name] or lease[name] or json.null
      if type(object[name]) == "string" then object[name] = text.utf8(object[name]) end
    end
    lines[i] = json.encode(object, { keyorder = FIELDS })
  end
  return #lines == 0 and "[]\n" or "[\n" .. table.concat(lines, ",\n") .. "\n]\n"
end

function leases.run(arguments)
  local filter, json, manager, found, err
  filter, err = lookup.filter(arguments)
  if not filter then return nil, err end
  if arguments.json then
    json, err = encoder()
    if not json then return nil, err end
  end
  manager, err = lookup.open(arguments, "leases")
  if not manager then return nil, err end
  found, err = lookup.find(manager, filter)
  manager:close()
  if not found then return nil, err end
  local ok = true
  if json then
    ok, err = terminal.write(encode(json, found))
  elseif #found > 0 then
    ok, err = terminal.write(listing.for_output(found))
  elseif terminal.shows() then
    io.stderr:write "no leases\n"
  end
  return ok and 0, err
end

return leases
