-- A work queue without a queue server: locks decide which worker does which job.
--
-- Shows: a worker tries each job with timeout = 0 and goes on to the next when
-- another worker has it. When a worker is killed, its lock is free at once, and
-- another worker does its job. A worker reads whether a job is done only after
-- its lock was granted: before, another worker may just be finishing the job.
--
-- Not to be copied blindly: each job is done exactly once only because its effect
-- and the mark that it is done are one and the same short write. Where they are two
-- (send a mail, then mark it), a worker killed in between has the mail sent twice: no
-- lock can help there. And is_held only narrows the gap in which a lock could be
-- lost unseen; where jobs end in a table, let a unique key on the job close it.
--
-- Run it: three workers share twelve jobs. Kill any of them (kill -9) meanwhile.
--
--     done=$(mktemp)
--     for name in A B C; do lua examples/queue.lua "$done" $name 12 & done; wait
--     sort -n "$done"

local hierlock = require "hierlock"

local done_file, name, count = arg[1], arg[2], tonumber(arg[3])
local manager, failure = hierlock.open(nil, { application = "worker " .. name })
if not manager then error(tostring(failure), 0) end

local function done_jobs()
  local done = {}
  for line in io.lines(done_file) do done[tonumber(line:match("^%d+"))] = true end
  return done
end

local function work(job, handle)
  os.execute("sleep 0.1")
  if not handle:is_held() then return end
  -- A single write at the file's end: the file has all of it, or nothing.
  local file = assert(io.open(done_file, "a"))
  assert(file:write(job, " ", name, "\n"))
  assert(file:close())
end

-- Whether anything was done, or nil and an err.
local function try(job)
  local handle, err = manager:acquire_resource("queue", "mail", job, { timeout = 0 })
  if not handle then
    if err.code == "timeout" then return false end -- another worker has it
    return nil, err
  end
  local fresh = not done_jobs()[job]
  if fresh then work(job, handle) end
  handle:release()
  return fresh
end

repeat
  local all_done, progress = true, false
  local done = done_jobs()
  for job = 1, count do
    if not done[job] then
      all_done = false
      local ok, err = try(job)
      if ok == nil then error(tostring(err), 0) end
      progress = progress or ok
    end
  end
  -- The rest is in others' hands; they may die, so look again.
  if not all_done and not progress then os.execute("sleep 0.05") end
until all_done
manager:close()
