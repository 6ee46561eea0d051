--- hierlock ps: who holds and who waits, session locks and leases. Changes nothing.

local json = require "hierlock.command.json"
local listing = require "hierlock.command.listing"
local lookup = require "hierlock.command.lookup"
local quarantine = require "hierlock.command.quarantine"
local terminal = require "hierlock.command.terminal"
local waits = require "hierlock.command.waits"

local ps = {
  summary = "List holders and waiters, and the holders that each waits for.",
  description = "Lists holders and waiters, with session locks and leases: all of the space, or only those that block a " ..
    "lock on the target (on the node, above it and below it). Also says for whom each waits. " ..
    "On Memcached a target is needed.",
}

function ps.options(parser)
  lookup.target_option(parser)
  lookup.store_options(parser)
  parser:flag("--json", "Print an array of JSON objects; times are in seconds.")
end

local FIELDS = { "target", "mode", "kind", "waiting", "owner", "application", "host", "pid", "label", "since", "remaining",
                 "session", "id", "waits_for", "waits_for_count" }
local NAMES = { "target", "kind", "owner", "application", "host", "pid", "session", "id" }

local function first_name(entry) return entry.waiting and waits.first(entry) or "" end

--- Layouts for the entries that waits.find returns.
ps.listing = listing.new({
  { "TARGET", "STATE", "MODE", "KIND", "OWNER", "APPLICATION", "HOST", "PID", "LABEL", "SINCE", "REMAINING", "WAITS FOR",
    "SESSION", "ID" },
  { "TARGET", "STATE", "MODE", "KIND", "OWNER", "APPLICATION", "HOST", "PID", "LABEL", "SINCE", "REMAINING", "WAITS FOR" },
  { "TARGET", "STATE", "MODE", "OWNER", "APPLICATION", "PID", "REMAINING", "WAITS FOR" },
  { "TARGET", "STATE", "MODE", "APPLICATION", "PID", "WAITS FOR" },
  { "TARGET", "STATE", "APPLICATION" },
  { "TARGET", "STATE" },
  { "TARGET" },
}, { ["WAITS FOR"] = { of = first_name, words = "for %s" } })

local function named(entry) return setmetatable({ target = entry.path }, { __index = entry }) end

local function encode(encoder, found)
  local objects = {}
  for i, entry in ipairs(found) do
    local object = named(entry)
    if entry.waiting then
      object.waits_for = setmetatable({}, { __jsontype = "array" })
      for k, other in ipairs(entry.waits_for) do object.waits_for[k] = json.object(encoder, NAMES, named(other)) end
    end
    objects[i] = json.object(encoder, FIELDS, object)
  end
  return json.array(encoder, objects)
end

function ps.run(arguments)
  local target, encoder, manager, wanted, found, err
  if arguments.target then
    target, err = lookup.target(arguments.target)
    if not target then return nil, err end
  end
  if arguments.json then
    encoder, err = json.encoder()
    if not encoder then return nil, err end
  end
  manager, wanted = lookup.open(arguments, "ps")
  if not manager then return nil, wanted end
  local unseen
  found, unseen = lookup.holders(manager, target)
  if found then waits.find(manager, found) end
  manager:close()
  if not found then return nil, unseen end
  local ok, notice = true, quarantine.watch(wanted, "hierlock ps")()
  if notice then io.stderr:write(notice, "\n") end
  if encoder then
    ok, err = terminal.write(encode(encoder, found))
  elseif #found > 0 then
    ok, err = terminal.write(ps.listing:for_output(found))
  elseif terminal.shows() then
    io.stderr:write "nobody holds or waits\n"
  end
  if unseen then return nil, unseen end
  return ok and 0, err
end

return ps
