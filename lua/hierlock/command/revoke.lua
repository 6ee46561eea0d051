--- hierlock revoke: ends leases of others. Lists them, asks, and then ends each listed lease by its id: a lease
-- granted between the list and the answer stays.

local ending = require "hierlock.command.ending"
local listing = require "hierlock.command.listing"
local lookup = require "hierlock.command.lookup"
local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"

local revoke = {
  summary = "End leases of others.",
  description = "Ends leases of any holder: those that block a lock on the target (on the node, above it and below it), " ..
    "those of an owner, or a single one. Also ends expired leases, as a refresh could revive them. Their nodes are " ..
    "free at once; each holder learns of it at its next call. Cannot end session locks.",
}

local NONE = 1 -- the exit status when none was ended

function revoke.options(parser)
  lookup.options(parser)
  parser:option("--id", "Only this lease."):argname "ID"
  ending.options(parser)
end

local function check(arguments)
  local named = 0
  for _, name in ipairs { "target", "owner", "id" } do named = named + (arguments[name] and 1 or 0) end
  if named ~= 1 then return lookup.usage "one of TARGET, --owner and --id must say which leases to end" end
  return ending.check(arguments)
end

-- Ends each of them; {ended, gone}, both lists of leases; nil, err and that, when it could not go on.
local function end_each(manager, found, options, watch)
  local done = { ended = {}, gone = {} }
  for _, lease in ipairs(found) do
    if watch.look() then return done end
    local n, err = manager:revoke({ id = lease.id }, options)
    if not n then return nil, err, done end
    local list = n > 0 and done.ended or done.gone
    list[#list + 1] = lease
  end
  return done
end

-- Tells the fate of the leases; true; nil, err.
local function report(done, found)
  local ended, gone, lines = done.ended, done.gone, {}
  if #gone > 0 then
    lines[1] = ("%s had ended by then, %s:\n%s"):format(text.count(#gone, "lease"), ending.whose(gone), listing.leases:for_output(gone))
  end
  if #ended > 0 then
    lines[#lines + 1] = ("%s ended, %s%s\n"):format(text.count(#ended, "lease"), ending.whose(ended),
      #ended + #gone < #found and (", and %d not"):format(#found - #ended - #gone) or "")
  else
    lines[#lines + 1] = "no lease ended\n"
  end
  return terminal.write(table.concat(lines))
end

-- Lists the leases that are to be ended, asks, and ends them: an exit status; nil, err.
local function finish(manager, arguments, found, watch)
  local ok, err = terminal.write(listing.leases:for_output(found))
  if not ok then return nil, err end
  local question = #found == 1 and "End this lease?" or ("End these %d leases?"):format(#found)
  if not arguments.yes and not terminal.confirms(question, watch) then
    if watch.hit then error("interrupted!", 0) end
    terminal.write "no lease ended\n"
    return NONE
  end
  local done, failed, so_far = end_each(manager, found, { by = arguments.by or ending.operator(), reason = arguments.reason }, watch)
  ok, err = report(done or so_far, found)
  if not done or not ok then return nil, failed or err end
  if watch.hit then error("interrupted!", 0) end
  return #done.ended > 0 and 0 or NONE
end

function revoke.run(arguments)
  local filter, manager, found, ok, err
  ok, err = check(arguments)
  if not ok then return nil, err end
  filter, err = lookup.filter(arguments)
  if not filter then return nil, err end
  -- Include leases whose time is up: their holders could come back by a refresh.
  filter.over = true
  manager, err = lookup.open(arguments, "revoke")
  if not manager then return nil, err end
  found, err = lookup.find(manager, filter)
  if not found then return nil, err end
  if #found == 0 then
    ok, err = terminal.write "no lease ended: there was none\n"
    return ok and NONE, err
  end
  local watch = terminal.interruptions()
  local ran, status, failure = pcall(finish, manager, arguments, found, watch)
  watch.close()
  manager:close()
  if not ran then error(status, 0) end
  return status, failure
end

return revoke
