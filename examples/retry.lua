-- How a program tries again until its work is done.
--
-- Shows: the program tries again only after errors with err.retryable. The pauses
-- grow and are random, so that callers that were refused together do not come back
-- together. All tries have one deadline. Each try opens the store if need be, takes
-- the lock, and reads the state afresh.
--
-- Not to be copied blindly: the short timeout, which is here to fail. A longer
-- timeout is better than trying again: a waiter keeps its place in the queue, and is
-- woken at once. Trying again is for errors that waiting does not mend: a broken
-- connection, a deadlock, a lost lock. After `lost` (and any error in the middle) the
-- program cannot know whether the work was done. So each request has an id, and the
-- program looks for this id before it does the work again. The clock os.time counts
-- whole seconds and can jump; take your event loop's clock, and its sleep.
--
-- Run it: four box offices sell twenty seats.
--
--     seats=$(mktemp)
--     for name in A B C D; do lua examples/retry.lua "$seats" $name 10 & done; wait
--     sort "$seats"

local hierlock = require "hierlock"

local seats_file, name, patience = arg[1], arg[2], tonumber(arg[3])
local SEATS = 20
-- Before 5.4, Lua gives every process the same random numbers unless it is seeded.
local urandom = assert(io.open("/dev/urandom", "rb"))
local a, b, c = urandom:read(3):byte(1, 3)
math.randomseed(a * 65536 + b * 256 + c)
urandom:close()

local function sleep(seconds) os.execute(("sleep %.3f"):format(seconds)) end

-- Calls fn until it returns something, or nil and an err that is not worth another
-- try, or `seconds` are over.
local function retry(seconds, fn)
  local deadline, pause = os.time() + seconds, 0.02
  while true do
    local result, err = fn()
    if result then return result end
    local left = deadline - os.time()
    if not err.retryable or left <= 0 then return nil, err end
    local nap = math.min(math.random() * pause, left)
    io.stderr:write(("%s: %s; again in %.3f s\n"):format(name, tostring(err), nap))
    sleep(nap)
    pause = math.min(pause * 2, 1)
  end
end

local manager

-- "sold", "sold out", or nil and err. Two calls for one request sell one seat.
local function sell(request)
  if not manager then
    local err
    manager, err = hierlock.open(nil, { application = "box office " .. name })
    if not manager then return nil, err end
  end
  return manager:with({ "theatre", "tonight" }, { timeout = 0.05 }, function(handle)
    local sold = 0
    for line in io.lines(seats_file) do
      if line == request then return "sold" end
      sold = sold + 1
    end
    if sold == SEATS then return "sold out" end
    sleep(0.02)
    if not handle:is_held() then return end -- `with` returns `lost`
    local file = assert(io.open(seats_file, "a"))
    assert(file:write(request, "\n"))
    assert(file:close())
    return "sold"
  end)
end

local sold = 0
repeat
  local request = name .. sold + 1
  local result, err = retry(patience, function() return sell(request) end)
  if not result then
    print(("%s: gave up: %s"):format(name, tostring(err)))
    os.exit(1)
  end
  if result == "sold" then sold = sold + 1 end
until result == "sold out"
manager:close()
print(("%s: sold %d"):format(name, sold))
