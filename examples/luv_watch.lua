-- A program on luv that goes on while it waits for a lock, and may give up.
--
-- Shows: with loop = "luv", acquire yields in a coroutine, and libuv's callbacks go on,
-- here a timer that shows the time of the wait. A program that may give up starts the
-- acquisition, and cancels it: the wait ends in the store, too.
--
-- Not to be copied blindly: under luv, an error that a coroutine raises in a callback
-- ends the process. If you make your own poll handle on pending:fd(), close it before
-- the pending is collected: the collection closes the descriptor.
--
-- Run it: A holds the report for two seconds, B gives up soon, C gets it.
--
--     lua examples/luv_watch.lua A hold & sleep 1
--     lua examples/luv_watch.lua B give-up & lua examples/luv_watch.lua C wait; wait

local uv = require "luv"
local hierlock = require "hierlock"

io.stdout:setvbuf "line"
local REPORT = { "u1", "a1", "r1" }
local name, what = arg[1], arg[2]
local manager, failure = hierlock.open(nil, { application = "watch " .. name, loop = "luv" })
if not manager then error(tostring(failure), 0) end

local function say(...) print(name .. ": " .. string.format(...)) end

local function after(ms, fn)
  local timer = uv.new_timer()
  timer:start(ms, 0, function()
    timer:close()
    fn()
  end)
end

-- In a coroutine: others go on.
local function sleep(ms)
  local thread = coroutine.running()
  after(ms, function() assert(coroutine.resume(thread)) end)
  coroutine.yield()
end

-- Shows every 200 ms that the program waits; returns what ends that.
local function watch()
  local timer, seconds = uv.new_timer(), 0
  timer:start(200, 200, function()
    seconds = seconds + 0.2
    say("waits for %.1f s", seconds)
  end)
  return function() timer:close() end
end

local function work(handle)
  say "works"
  sleep(2000)
  handle:release { confirm = true } -- yields, too
  say "done"
end

local programs = {}

programs["hold"] = function()
  local handle, err = manager:acquire(REPORT)
  if not handle then return say("failed: %s", tostring(err)) end
  work(handle)
end

programs["wait"] = function()
  local stop = watch()
  local handle, err = manager:acquire(REPORT, { timeout = 10 })
  stop()
  if not handle then return say("failed: %s", tostring(err)) end
  say("got it after %.1f s", handle.waited)
  work(handle)
end

programs["give-up"] = function()
  local pending, refused = manager:start(REPORT)
  if not pending then return say("failed: %s", tostring(refused)) end
  after(500, function() pending:cancel() end)
  local poll = uv.new_poll(assert(pending:fd()))
  poll:start("r", function()
    poll:close()
    local handle, err = pending:wait()
    if not handle then return say("gave up: %s", err.code) end
    handle:release()
  end)
end

coroutine.wrap(programs[what])()
uv.run()
manager:close()
