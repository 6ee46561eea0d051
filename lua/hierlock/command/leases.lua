--- hierlock leases: who holds which leases of a space. Changes nothing.

local json = require "hierlock.command.json"
local listing = require "hierlock.command.listing"
local lookup = require "hierlock.command.lookup"
local terminal = require "hierlock.command.terminal"

local leases = {
  summary = "List the leases of a space.",
  description = "Lists the leases whose time is not up: all of the space, or only those that block a lock on the target " ..
    "(on the node, above it and below it). Session locks are not listed.",
}

function leases.options(parser)
  lookup.options(parser)
  parser:flag("--json", "Print an array of JSON objects; times are in seconds.")
end

local FIELDS = { "target", "mode", "owner", "label", "application", "host", "pid", "since", "remaining", "id" }

local function encode(encoder, found)
  local objects = {}
  for i, lease in ipairs(found) do
    objects[i] = json.object(encoder, FIELDS, setmetatable({ target = lease.path }, { __index = lease }))
  end
  return json.array(encoder, objects)
end

function leases.run(arguments)
  local filter, encoder, manager, found, err
  filter, err = lookup.filter(arguments)
  if not filter then return nil, err end
  if arguments.json then
    encoder, err = json.encoder()
    if not encoder then return nil, err end
  end
  manager, err = lookup.open(arguments, "leases")
  if not manager then return nil, err end
  found, err = lookup.find(manager, filter)
  manager:close()
  if not found then return nil, err end
  local ok = true
  if encoder then
    ok, err = terminal.write(encode(encoder, found))
  elseif #found > 0 then
    ok, err = terminal.write(listing.leases:for_output(found))
  elseif terminal.shows() then
    io.stderr:write "no leases\n"
  end
  return ok and 0, err
end

return leases
