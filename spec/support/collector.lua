-- A helper for busted (`make collector`): from now on a whole collection runs wherever Lua looks whether it is time
-- for a step, inside of the binding, too. An object that is not anchored there does not survive it.

if _VERSION >= "Lua 5.4" then
  collectgarbage("incremental", 1, 1000, 63) -- a step ends with the cycle
else
  collectgarbage("setstepmul", _VERSION == "Lua 5.1" and 0 or 1000000000) -- 0: without a limit
end
collectgarbage("setpause", 0) -- and the next cycle begins at once
