-- A server with one thread and many coroutines, on cqueues: it books seats over TCP.
--
-- Shows: in a coroutine of cqueues, acquire yields by itself, no option is needed. While
-- some clients wait for a flight, the server serves clients of another flight. If many
-- clients want the same flight, the first waits at the store, the others in line.
--
-- Not to be copied blindly: the seats are in memory, so this one server could do
-- without a lock that other processes see. If your seats are in a database, read and
-- write them there, and compare the token. And the server notices a client that goes
-- away while it waits only when its turn comes.
--
-- Run it: eight clients at once, four for each of two flights. A booking takes 0.1 s, so
-- all of them take 0.4 s.
--
--     lua examples/cqueues_server.lua 8 &
--     lua examples/cqueues_server.lua book LH1 LH1 LH1 LH1 LH2 LH2 LH2 LH2; wait

local cqueues = require "cqueues"
local socket = require "cqueues.socket"
local hierlock = require "hierlock"

local HOST, PORT = "127.0.0.1", tonumber(os.getenv "PORT" or 18081)

-- ---------------------------------------------------------------- server

local seats = {}

local function book(manager, flight)
  local handle, err = manager:acquire({ "airline", flight }, { timeout = 5 })
  if not handle then return "sorry: " .. err.code end
  local seat = (seats[flight] or 0) + 1
  cqueues.sleep(0.1) -- without the lock, others would read the same number now
  seats[flight] = seat
  local ok, lost = handle:release()
  if not ok then return "sorry: " .. lost.code end
  return ("%s: seat %d"):format(flight, seat)
end

local function serve(count)
  local manager, err = hierlock.open(nil, { application = "booking" })
  if not manager then error(tostring(err), 0) end
  local controller = cqueues.new()
  controller:wrap(function()
    local listener = assert(socket.listen(HOST, PORT))
    for _ = 1, count do
      local client = listener:accept()
      controller:wrap(function()
        client:write(book(manager, client:read "*l"), "\n")
        client:close()
      end)
    end
    listener:close()
  end)
  assert(controller:loop())
  local stats = manager:stats()
  print(("server: %d bookings, %d of them waited"):format(stats.acquired, stats.waited))
  manager:close()
end

-- --------------------------------------------------------------- clients

local function connect()
  for _ = 1, 100 do -- the server may just be starting
    local connection = socket.connect(HOST, PORT)
    connection:onerror(function(_, _, code) return code end) -- not raised
    if connection:connect() then return connection end
    connection:close()
    cqueues.sleep(0.05)
  end
  error "nobody listens"
end

local function ask(flights)
  local controller = cqueues.new()
  for _, flight in ipairs(flights) do
    controller:wrap(function()
      local connection = connect()
      local began = cqueues.monotime()
      connection:write(flight, "\n")
      local answer = connection:read "*l"
      print(("%s, after %.1f s"):format(answer, cqueues.monotime() - began))
      connection:close()
    end)
  end
  assert(controller:loop())
end

if arg[1] == "book" then
  ask { (table.unpack or unpack)(arg, 2) }
else
  serve(assert(tonumber(arg[1])))
end
