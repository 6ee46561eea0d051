-- The seven scenarios of docs/scenarios.md, live: several processes lock nodes of
-- a tree on the embedded store, and each has a column of its own. The
-- demonstration prints real events; a scenario that goes otherwise ends it with
-- an error.
--
--     make demo                     all of them
--     make demo DEMO='3 6'          some of them
--     make demo DEMO=--help

local uv = require "luv"
local hierlock = require "hierlock"

-- ---------------------------------------------------------------- worker

-- A process of a scenario: reads its orders, and prints the results.
if arg[1] == "worker" then
  local manager, failure = hierlock.open(arg[2], { application = arg[3] })
  if not manager then error(tostring(failure), 0) end
  local handle
  io.stdout:setvbuf("line")
  for line in io.lines() do
    local verb, rest = line:match("^(%S+) ?(.*)$")
    if verb == "release" then
      handle:release()
      print("released")
    else
      local timeout, path = rest:match("^(%S+) (.*)$")
      local target = {}
      for id in path:gmatch("[^/]+") do target[#target + 1] = id end
      if path:find(",") then
        target = { user = target[1], account = target[2], resources = {} }
        for id in path:match("[^/]+$"):gmatch("[^,]+") do table.insert(target.resources, id) end
      end
      local ok, err
      if verb == "extend" then
        ok, err = handle:extend(target, { timeout = tonumber(timeout) })
      else
        ok, err = manager:acquire(target, { timeout = tonumber(timeout) })
        handle = ok or handle
      end
      print(ok and "holds" or err.code)
    end
  end
  os.exit(0)
end

-- ------------------------------------------------------------- scenarios

-- A step has the process, the operation, the node, and the expected result. The
-- process holds the node at once ("holds"), or waits ("waits"), or a waiter gets the
-- node after this step (gets = process).
local scenarios = {
  { "The same resource twice: one after the other",
    { "A", "acquire", "u1/a1/r1", "holds" },
    { "B", "acquire", "u1/a1/r1", "waits" },
    { "A", "release", gets = "B" },
    { "B", "release" } },
  { "Two resources of one account: both at once",
    { "A", "acquire", "u1/a1/r1", "holds" },
    { "B", "acquire", "u1/a1/r2", "holds" },
    { "A", "release" },
    { "B", "release" } },
  { "An account against its resource, both ways",
    { "A", "acquire", "u1/a1", "holds" },
    { "B", "acquire", "u1/a1/r1", "waits" },
    { "A", "release", gets = "B" },
    { "A", "acquire", "u1/a1", "waits" },
    { "B", "release", gets = "A" },
    { "A", "release" } },
  { "A user against an account and a resource of theirs",
    { "A", "acquire", "u1", "holds" },
    { "B", "acquire", "u1/a1", "waits" },
    { "C", "acquire", "u1/a2/r7", "waits" },
    { "A", "release", gets = { "B", "C" } },
    { "B", "release" },
    { "C", "release" } },
  { "Different users: nobody waits",
    { "A", "acquire", "u1", "holds" },
    { "B", "acquire", "u2", "holds" },
    { "C", "acquire", "u3/a1/r1", "holds" },
    { "A", "release" },
    { "B", "release" },
    { "C", "release" } },
  { "Resources taken one by one, out of order: a deadlock, which one of the two is told",
    { "A", "acquire", "u1/a1/r1", "holds" },
    { "B", "acquire", "u1/a1/r2", "holds" },
    { "A", "extend", "u1/a1/r2", "waits" },
    { "B", "extend", "u1/a1/r1", "deadlock", gets = "A" },
    { "A", "release" } },
  { "The same resources in one call, in whatever order: no deadlock",
    { "A", "acquire", "u1/a1/r1,r2", "holds" },
    { "B", "acquire", "u1/a1/r2,r1", "waits" },
    { "A", "release", gets = "B" },
    { "B", "release" } },
}

-- ---------------------------------------------------------------- screen

local colours = uv.guess_handle(1) == "tty" and not os.getenv("NO_COLOR")
local WIDTH = 31

local function colour(code, text) return colours and "\27[" .. code .. "m" .. text .. "\27[0m" or text end

local start
local columns = { A = 0, B = 1, C = 2 }
local marks = { holds = "32", waits = "33", deadlock = "31", releases = "2" }

local function event(who, kind, text)
  local seconds = (uv.hrtime() - start) / 1e9
  io.write(("%7.3f s  "):format(seconds), (" "):rep(columns[who] * WIDTH), colour(marks[kind] or "0", text), "\n")
  io.flush()
end

-- --------------------------------------------------------------- running

local function worker(name, dsn)
  local input, output, buffer = uv.new_pipe(false), uv.new_pipe(false), ""
  local interpreter = os.getenv("HIERLOCK_LUA") or arg[-1] or "lua"
  local process = assert(uv.spawn(interpreter, {
    args = { arg[0], "worker", dsn, name },
    stdio = { input, output, 2 },
  }, function() end))
  output:read_start(function(_, data) buffer = buffer .. (data or "") end)
  local self = {}
  function self.send(line) input:write(line .. "\n") end
  function self.poll()
    uv.run("nowait")
    local line, rest = buffer:match("^([^\n]*)\n(.*)$")
    if line then buffer = rest end
    return line
  end
  function self.answer()
    local deadline = uv.hrtime() + 15e9
    repeat
      local line = self.poll()
      if line then return line end
      uv.sleep(1)
    until uv.hrtime() > deadline
    error(name .. " does not answer")
  end
  function self.close()
    input:close()
    output:close()
    process:close()
    uv.run("nowait")
  end
  return self
end

local function expect(wanted, found)
  if wanted ~= found then error(("expected '%s', but it was '%s'"):format(wanted, found), 0) end
end

-- Looks until `who` waits for the node; returns the holder that it waits for.
local function await_waiting(observer, who, path)
  local target = {}
  for id in path:gmatch("[^/]+") do target[#target + 1] = id:match("^[^,]+") end
  local deadline = uv.hrtime() + 5e9
  repeat
    local waits, blockers = false, {}
    for _, holder in ipairs(assert(observer:holders(target))) do
      if holder.application == who and holder.waiting then
        waits = true
      elseif holder.application ~= who and not holder.waiting then
        blockers[#blockers + 1] = holder.application
      end
    end
    table.sort(blockers)
    if waits then return table.concat(blockers, ", ") end
    uv.sleep(1)
  until uv.hrtime() > deadline
  error(who .. " does not wait", 0)
end

local function run(number, scenario, observer, workers)
  print("\n" .. colour("1", number .. ". " .. scenario[1]))
  print(("           %-" .. WIDTH .. "s%-" .. WIDTH .. "s%s"):format("A", "B", "C"))
  local awaited = {}
  start = uv.hrtime()
  for i = 2, #scenario do
    local step = scenario[i]
    local who, verb, path, outcome = step[1], step[2], step[3], step[4]
    if verb == "release" then
      uv.sleep(400) -- for the eye
      event(who, "releases", "releases")
      workers[who].send("release")
      expect("released", workers[who].answer())
    else
      uv.sleep(150)
      workers[who].send(("%s 10 %s"):format(verb, path))
      if outcome == "waits" then
        local whom = await_waiting(observer, who, path)
        event(who, "waits", ("wants %s, waits for %s"):format(path, whom))
        awaited[who] = { path = path, since = uv.hrtime() }
      elseif outcome == "deadlock" then
        expect("deadlock", workers[who].answer())
        event(who, "deadlock", "deadlock: wants " .. path .. ", holds nothing now")
      else
        expect("holds", workers[who].answer())
        event(who, "holds", "holds " .. path)
      end
    end
    for _, next_one in ipairs(type(step.gets) == "table" and step.gets or { step.gets }) do
      expect("holds", workers[next_one].answer())
      local waited = (uv.hrtime() - awaited[next_one].since) / 1e9
      event(next_one, "holds", ("holds %s (after %.2f s)"):format(awaited[next_one].path, waited))
      awaited[next_one] = nil
    end
  end
end

local function main()
  local chosen = {}
  for _, name in ipairs(arg) do
    local number = tonumber(name)
    if not scenarios[number] then
      print("usage: demo.lua [1-7 ...]    the seven scenarios, or some of them")
      os.exit(name == "--help" and 0 or 2)
    end
    chosen[#chosen + 1] = number
  end
  if #chosen == 0 then
    for i = 1, #scenarios do chosen[i] = i end
  end
  local directory = assert(uv.fs_mkdtemp("/dev/shm/hierlock-demo-XXXXXX"))
  local dsn = "file:" .. directory
  print("Three processes, A, B and C, on the embedded store in " .. directory .. ".")
  local observer, failure = hierlock.open(dsn)
  if not observer then error(tostring(failure), 0) end
  local workers = {}
  for name in pairs(columns) do workers[name] = worker(name, dsn) end
  local ok, err = pcall(function()
    for _, number in ipairs(chosen) do run(number, scenarios[number], observer, workers) end
  end)
  for _, one in pairs(workers) do one.close() end
  observer:close()
  os.execute("rm -rf " .. directory)
  if not ok then
    io.stderr:write("demo: ", tostring(err), "\n")
    os.exit(1)
  end
  print("\nEverything went as docs/scenarios.md says.")
end

main()
