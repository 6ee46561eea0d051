--- The terminal of a person: whether there is one, how wide it is, which characters it shows; a question, and Ctrl-C.

local uv = require "luv"

local terminal = {}

local IN, OUT = 0, 1
local EPIPE = 32

--- Whether a person sees the output at once.
function terminal.shows() return uv.guess_handle(OUT) == "tty" end

--- Whether that person can answer, too.
function terminal.answers() return terminal.shows() and uv.guess_handle(IN) == "tty" end

--- The terminal's columns; 80 where it does not say.
function terminal.width()
  local tty = uv.new_tty(OUT, false)
  local width = tty and tty:get_winsize() or 0
  if tty then
    tty:close()
    uv.run "nowait"
  end
  return width > 0 and width or 80
end

--- Whether it takes UTF-8, by the environment's word.
function terminal.takes_utf8()
  for _, name in ipairs { "LC_ALL", "LC_CTYPE", "LANG" } do
    local locale = os.getenv(name)
    if locale and locale ~= "" then return locale:lower():find("utf%-?8") ~= nil end
  end
  return false
end

--- Whether it shows colours, and who sits there wants them (https://no-color.org).
function terminal.takes_colours()
  return terminal.shows() and os.getenv "TERM" ~= "dumb" and (os.getenv "NO_COLOR" or "") == ""
end

--- Watches for Ctrl-C, so that it ends nothing in the middle: watch.hit is true after one. Lua's own handler raises
-- at any point. watch:look() notes an interruption; watch:close() ends the watch.
function terminal.interruptions()
  local watch, signal = { hit = false }, uv.new_signal()
  signal:start("sigint", function()
    watch.hit = true
    uv.stop()
  end)
  function watch.look()
    uv.run "nowait"
    return watch.hit
  end
  function watch.close()
    signal:close()
    uv.run "nowait"
  end
  return watch
end

--- Writes to standard output, at once. True; nil, err. A closed pipe is no error: its reader has had enough.
function terminal.write(...)
  local ok, message, number = io.stdout:write(...)
  if ok then ok, message, number = io.stdout:flush() end
  if ok or number == EPIPE then return true end
  return nil, { code = "output", message = "cannot write: " .. message, retryable = false }
end

--- Asks a question that is answered by yes or no; the end of the input is a no.
-- @string question
-- @param watch of `terminal.interruptions`: a Ctrl-C ends the wait
-- @treturn boolean whether the answer was yes
function terminal.confirms(question, watch)
  terminal.write(question, " [y/N] ")
  local tty, typed, ended = uv.new_tty(IN, true), "", false
  tty:read_start(function(_, data)
    typed, ended = typed .. (data or ""), not data
    if ended or typed:find "\n" then uv.stop() end
  end)
  while not ended and not typed:find "\n" and not watch.hit do uv.run() end
  tty:close()
  watch.look()
  local answer = typed:match "^([^\n]*)\n"
  if not answer or watch.hit then terminal.write "\n" end
  answer = answer and answer:lower():match "^%s*(.-)%s*$"
  return not watch.hit and (answer == "y" or answer == "yes")
end

return terminal
