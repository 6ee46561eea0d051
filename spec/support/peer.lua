-- A process that holds or awaits locks for a spec: see support.serve.
local dsn, options = arg[1], (loadstring or load)("return " .. arg[2])()
io.stdout:setvbuf("line")
local support = require "spec.support"
local function write_line(line) io.stdout:write(line, "\n") end
if dsn ~= "" then
  local ready = false
  local read_line = function()
    if not ready then
      ready = true
      write_line("{n=2,[1]=true,[2]=true}")
    end
    return io.stdin:read("*l")
  end
  local ok, err = pcall(support.serve, read_line, write_line, dsn, options)
  if not ok then write_line("{n=2,[1]=false,[2]=" .. support.encode(tostring(err)) .. "}") end
else
  support.serve(function() return io.stdin:read("*l") end, write_line)
end
