-- Acquires and releases a resource, the given number of times, to count the instructions of a cycle. The
-- count is the difference of two runs under callgrind, of hierlock's own functions. In a shell:
--
--   count() {
--     valgrind --tool=callgrind --callgrind-out-file=/tmp/cycle.out lua5.4 bench/cycle.lua "$@" >/dev/null 2>&1
--     callgrind_annotate --auto=no --threshold=100 /tmp/cycle.out | grep csrc/ | tr -d , | awk '{ n += $1 } END { print n }'
--   }
--   echo $((($(count 12000) - $(count 2000)) / 10000))     # a DSN, and options of open in Lua, may follow the number

local times, dsn = tonumber(arg[1]), arg[2] or "null:"
local options = (loadstring or load)("return " .. (arg[3] or "nil"))() -- luacheck: ignore
local manager = assert(require("hierlock").open(dsn, options))
local target = { "u1", "a1", "r1" }
local function cycles()
  for _ = 1, times do assert(manager:acquire(target)):release() end
end
if options and options.loop then coroutine.wrap(cycles)() else cycles() end -- {loop=error}: it never waits
manager:close()
