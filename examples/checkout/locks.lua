-- All locking of the example: which person has which customer. After an error a function returns nil and an err
-- of hierlock.

local hierlock = require "hierlock"

-- How long a person keeps a customer without a sign of life.
local TTL = tonumber(os.getenv("CHECKOUT_TTL")) or 900

local locks = { ttl = TTL, application = "checkout" }

local PATH = { "office", "customer" }

local function target(id) return { PATH[1], PATH[2], id } end

-- Each worker opens its own manager, when a request first needs it. After a failure it tries again a
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
-- `timeout`: another person has the customer. timeout = 0: neither a person nor a worker waits here.
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

--- Keeps the customer for another TTL, and returns the token. `lost`: another person has it, or an
-- administrator took it. An expired lease is kept as well, if no other person has had the customer since.
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
  -- Lost in between: another request of the person, say a renewal, has imported the same text. Try once more;
  -- if the lease is really gone, the import says so.
  until ok or err.code ~= "lost"
  return ok, err
end

--- A function that returns the lease that a customer is under, or nil: its owner, since (Unix time), remaining
-- (seconds), id. A lease on all customers, or on the office, counts for each customer.
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

--- Gives back all customers of a person who logs out, on any machine. Returns
-- how many.
function locks.give_back_all(login)
  local store, err = manager()
  if not store then return nil, err end
  return store:revoke({ owner = login }, { by = login, reason = "logged out" })
end

--- Ends this lease of a customer, by its id, so that a person who took the customer after the
-- administrator looked keeps it. Returns how many were ended.
function locks.take_away(id, lease, by, reason)
  local store, err = manager()
  if not store then return nil, err end
  return store:revoke({ target = target(id), id = lease }, { by = by, reason = reason })
end

return locks
