--- Prometheus' own parser of its text format, and its linter of metrics: promtool, of Debian's package
-- prometheus.

local promtool = {}

-- Runs `promtool check` with such arguments, %s being the name of a file with the text: its exit status (0: fine)
-- and its output.
local function check(arguments, text)
  local name = os.tmpname()
  local file = assert(io.open(name, "wb"))
  file:write(text)
  file:close()
  local pipe = assert(io.popen(("unset LD_PRELOAD; promtool check %s 2>&1; echo \"=$?\""):format(arguments:format(name))))
  local output, status = pipe:read("*a"):match("^(.-)=(%d+)\n$")
  pipe:close()
  os.remove(name)
  if status == "127" then error("promtool cannot be had here (Debian: prometheus)") end
  return tonumber(status), output
end

--- A text of metrics; the output is "" where there is no complaint.
function promtool.check(text) return check("metrics <%s", text) end

--- Rules for alarms, in YAML.
function promtool.check_rules(text) return check("rules %s", text) end

return promtool
