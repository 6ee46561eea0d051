--- The loop of nginx (ngx_lua, OpenResty): requests and timers wait without keeping their worker from others, and
-- their locks end with them.
--
-- Waiting. A coroutine waits for a semaphore of its own. During a wait, one timer of the worker reads a socket on
-- which the library's threads ring when a pending is done (csrc/lua/notifier.c), and posts the semaphore. So waiting
-- costs no connection of the worker but that one, and no polling. Without a wait there is no timer, and nothing that
-- would keep a worker from quitting.
--
-- The end. A handle lives as long as its request, even when the variable is gone: a phase's local is garbage in the
-- next. And nginx drops the coroutines of a request that is aborted without a word to them. So pendings and
-- handles are tied to the request (csrc/lua/request.c), and cancelled or released by a clean-up handler in C, which
-- nginx calls whenever and however the request ends. The tie stays through an internal redirect, which replaces
-- ngx.ctx. A timer has a request of its own; a subrequest's handler is its main request's.

local base = require "resty.core.base"
local semaphore = require "ngx.semaphore"
local ffi = require "ffi"
local core = require "hierlock.core"

local get_phase, now, tcp, timer_at = ngx.get_phase, ngx.now, ngx.socket.tcp, ngx.timer.at

local loop = {}

-- ----------------------------------------------------------------- phases

local YIELDS = { server_rewrite = true, rewrite = true, access = true, content = true, timer = true }
-- Phases before the first request and after the last: no request waits for this worker.
local BLOCKS = { init = true, init_worker = true, exit_worker = true }

-- ---------------------------------------------------------------- requests

-- Under a name and with types of our own: others may have declared it as well.
ffi.cdef [[ void *hierlock_cleanup_add(void *request, size_t size) __asm__("ngx_http_cleanup_add"); ]]
local cleanup_t = ffi.typeof "struct { void *handler, *data, *next; } *"
local uintptr_t = ffi.typeof "uintptr_t"

-- To the running request, to end with it; returns its arguments.
local function tie(object, ...)
  local request = base.get_request()
  local id = tonumber(ffi.cast(uintptr_t, request))
  if not core.tie(object, id) then
    local cleanup = ffi.cast(cleanup_t, ffi.C.hierlock_cleanup_add(request, 0))
    assert(cleanup ~= nil, "not enough memory")
    cleanup.handler, cleanup.data = core.request(id)
    core.tie(object, id)
  end
  return object, ...
end

-- ----------------------------------------------------------------- waiting

-- The waiters: a pending and its semaphore, by number.
local waiting = {}
local last = 0
-- The timer that listens, or is to do so since `since`: a table of its own, with `runs`
-- once it does.
local listening
-- When it has not begun after as long, nginx has dropped it, for it has limits for timers.
local BEGINS = 0.1
-- After as long a waiter looks by itself, lest it hang while there can be no timer, or
-- no connection for it. Seconds.
local PATIENCE = 1

-- Wakes the waiters that are done. A waiter that no longer waits was a light thread that has been killed.
local function wake(number)
  local waiter = waiting[number]
  if not waiter or not waiter.pending:done() then return end
  waiting[number] = nil
  if waiter.semaphore:count() < 0 then
    waiter.semaphore:post()
  else
    waiter.pending:cancel()
  end
end

local function wake_all()
  local numbers = {}
  for number in pairs(waiting) do numbers[#numbers + 1] = number end
  for _, number in ipairs(numbers) do wake(number) end
end

local function read(socket)
  wake_all() -- those who were done before
  while next(waiting) do
    local digits, err = socket:receive(8)
    if digits then wake(tonumber(digits, 16)) elseif err ~= "timeout" then return nil, err end
    if core.notifier_missed() then wake_all() end
  end
  return true
end

local function listen_now(_, mark)
  if listening ~= mark then return end
  mark.runs = true
  local socket = tcp()
  local address, err = core.notifier_address()
  local ok = address
  if ok then ok, err = socket:connect(address) end
  if ok then ok, err = core.notifier_answer() end
  if ok then ok, err = read(socket) end
  if listening ~= mark then return end
  listening = nil
  core.notifier_end()
  if not ok then ngx.log(ngx.ERR, "hierlock: waiting requests are late, as nothing wakes them: ", err) end
end

local function listen()
  if listening and (listening.runs or now() - listening.since < BEGINS) then return end
  listening = { since = now() }
  if not timer_at(0, listen_now, listening) then listening = nil end
end

local function wait(pending)
  last = last % 0xffffffff + 1
  local number = last
  local waiter = { pending = pending, semaphore = assert(semaphore.new()) }
  waiting[number] = waiter
  core.notifier_watch(pending, number)
  repeat
    listen()
    waiter.semaphore:wait(PATIENCE)
  until pending:done()
  waiting[number] = nil
end

-- ------------------------------------------------------------------- calls

--- Makes a call that may wait, as the phase allows; see hierlock.waiting.
function loop.call(name, blocking, start, self, ...)
  local phase = get_phase()
  if BLOCKS[phase] then return blocking(self, ...) end
  -- Decide before the start: a caller that gives up an `extend` may lose the lock. Only a release need not wait.
  local yields = YIELDS[phase] and ngx.config.subsystem == "http"
  local pending, err
  if yields or name == "release" then
    pending, err = start(self, ...)
    if not core.is_pending(pending) then
      if type(pending) == "userdata" then tie(pending) end -- a handle that was granted at once
      return pending, err
    end
  end
  if not yields then
    if pending then pending:cancel() end
    core.misuse(("nothing can be waited for in nginx's phase %s; a handle can be released there"):format(phase))
  end
  tie(pending)
  if not pending:done() then wait(pending) end
  return tie(pending:wait(0))
end

return loop
