-- Which customer is whose: all of the example that is about locks. Functions return nil and an err of hierlock's
-- where something can go wrong.

local hierlock = require "hierlock"

-- How long a customer stays somebody's without a sign of life from him.
local TTL = tonumber(os.getenv("CHECKOUT_TTL")) or 900

local locks = { ttl = TTL, application = "checkout" }

local PATH = { "office", "customer" }

local function target(id) return { PATH[1], PATH[2], id } end

-- Each worker opens its own manager, when a request first needs it. Where that fails, it is tried again a
-- second later; not before, as opening blocks the worker.
local opened, failure
local again = 0

local function manager()
  if not opened and ngx.now() >= again then
    opened, failure = hierlock.open(nil, { application = locks.application })
    again = ngx.now() + 1
  end
  return opened, failure
end

--- Takes a customer for a person. Returns the text by which further requests keep it, and the fencing token.
-- `timeout`: somebody has it. timeout = 0: nobody waits here, neither a person nor a worker.
function locks.take(id, login)
  local store, err = manager()
  if not store then return nil, err end
  local handle
  handle, err = store:acquire(target(id),
    { ttl = TTL, timeout = 0, owner = login, label = "editing", auto_release = false })
  if not handle then return nil, err end
  local token, text = handle.token
  text, err = handle:export() -- from now on the lease belongs to who has the text, and to no process
  if not text then return nil, err end
  return text, token
end

--- Keeps it for another TTL, and returns its token. `lost`: it is somebody else's, or an administrator took it.
-- If its time was up and nobody has had it since, it is kept as well.
function locks.keep(text)
  local store, err = manager()
  if not store then return nil, err end
  local handle
  handle, err = store:import(text, { auto_release = false }) -- refreshes; the text stays good
  if not handle then return nil, err end
  return handle.token
end

--- Gives it back; true.
function locks.give_back(text)
  local store, err = manager()
  if not store then return nil, err end
  local handle, ok
  repeat
    handle, err = store:import(text)
    if not handle then return nil, err end
    ok, err = handle:release { confirm = true }
  -- Lost in between: the person's other request, say a renewal, has imported the same text. Once more; if it is
  -- really gone, the import says so.
  until ok or err.code ~= "lost"
  return ok, err
end

--- A function that returns the lease that a customer is under, or nil: its owner, since (Unix time), remaining
-- (seconds), id. Whoever has leased all customers, or the office, has each of them.
function locks.holders()
  local store, err = manager()
  if not store then return nil, err end
  local leases
  leases, err = store:leases { target = PATH }
  if not leases then return nil, err end
  local by_path = {}
  for _, lease in ipairs(leases) do by_path[lease.path] = lease end
  local office, all = PATH[1], table.concat(PATH, "/")
  return function(id) return by_path[all .. "/" .. id] or by_path[all] or by_path[office] end
end

--- Gives back all that a person has, wherever: he logs out. How many.
function locks.give_back_all(login)
  local store, err = manager()
  if not store then return nil, err end
  return store:revoke({ owner = login }, { by = login, reason = "logged out" })
end

--- Takes a customer from whoever has it by this lease, by its id: not from one who has taken it since the
-- administrator looked. How many.
function locks.take_away(id, lease, by, reason)
  local store, err = manager()
  if not store then return nil, err end
  return store:revoke({ target = target(id), id = lease }, { by = by, reason = reason })
end

return locks
