--- The whole of a terminal as one picture, which is drawn again and again, and the keys that are typed at it. The
-- terminal shows its former contents again at the end: after a key, a signal, an error, and while the program is
-- stopped (Ctrl-Z).

local terminal = require "hierlock.command.terminal"
local text = require "hierlock.command.text"
local uv = require "luv"

local screen = {}
screen.__index = screen

-- xterm's control sequences, which other terminals know or ignore: its other buffer, without a cursor and without
-- wrapped lines; and a change that is to be shown at once (mode 2026).
local ENTER, LEAVE = "\27[?1049h\27[?25l\27[?7l", "\27[?7h\27[?25h\27[?1049l"
local BEGIN, FINISH = "\27[?2026h", "\27[?2026l"
local CTRL_C, CTRL_D, CTRL_L, CTRL_Z, CTRL_BACKSLASH = "\3", "\4", "\12", "\26", "\28"
local ENDING = { "sigint", "sigterm", "sighup", "sigquit" }
local SIGNALLED = 128

-- The picture takes the terminal, or gives it back.
function screen:enter()
  self.tty:set_mode(1) -- raw: each key comes at once, and is not shown
  self.drawn = {}
  terminal.write(ENTER)
end

function screen:leave()
  terminal.write(LEAVE)
  self.tty:set_mode(0)
end

-- The next wait returns, with a key or a reason.
function screen:tell(what)
  self.told[#self.told + 1] = what
  if self.waiting then uv.stop() end
end

function screen:stop()
  self:leave()
  uv.kill(uv.os_getpid(), "sigstop")
end

local function hear(self, name, fn)
  local signal = uv.new_signal()
  signal:start(name, fn)
  self.handles[#self.handles + 1] = signal
end

--- Takes the terminal. The caller has checked that there is one: `terminal.answers`.
function screen.open()
  local self = setmetatable({ tty = assert(uv.new_tty(0, true)), out = assert(uv.new_tty(1, false)), handles = {}, told = {} }, screen)
  for _, name in ipairs(ENDING) do
    hear(self, name, function() self.status = SIGNALLED + uv.constants[name:upper()] self:tell "end" end)
  end
  hear(self, "sigwinch", function() self.drawn = {} self:tell "resized" end)
  hear(self, "sigtstp", function() self:stop() end)
  hear(self, "sigcont", function() self:enter() self:tell "resized" end)
  self:enter()
  self.tty:read_start(function(_, data)
    if not data then
      self.status = 0
      return self:tell "end"
    end
    -- An escape begins a key without a letter; nothing is bound to such keys.
    for key in data:gsub("\27%[[%d;]*.?", ""):gmatch "." do
      if key == CTRL_C or key == CTRL_D or key == CTRL_BACKSLASH then
        self.status = key == CTRL_C and SIGNALLED + uv.constants.SIGINT or 0
        self:tell "end"
      elseif key == CTRL_Z then
        self:stop()
      elseif key == CTRL_L then
        self.drawn = {}
        self:tell "resized"
      else
        self:tell(key)
      end
    end
  end)
  return self
end

--- The terminal's columns and rows.
function screen:size()
  local columns, rows = self.out:get_winsize()
  return (columns or 0) > 0 and columns or 80, (rows or 0) > 0 and rows or 24
end

--- Shows these lines from the first row on; those that do not fit are cut. Writes only the changes.
-- @tparam {string,...} lines safe text; those in `lines.bold` and `lines.reverse`, sets of their numbers, stand out
-- @treturn[1] boolean true
-- @treturn[2] nil
-- @treturn[2] table an error of `terminal.write`
function screen:draw(lines)
  local columns, rows = self:size()
  local changes = {}
  for row = 1, rows do
    local line = text.cut(lines[row] or "", columns)
    if lines[row] and lines.reverse and lines.reverse[row] then
      line = "\27[7m" .. line .. (" "):rep(columns - text.width(line)) .. "\27[0m"
    elseif line ~= "" and lines.bold and lines.bold[row] then
      line = "\27[1m" .. line .. "\27[0m"
    end
    if line ~= self.drawn[row] then
      -- To erase behind a line that ends in the last column would erase its end.
      changes[#changes + 1] = ("\27[%d;1H\27[K%s"):format(row, line)
      self.drawn[row] = line
    end
  end
  if #changes == 0 then return true end
  return terminal.write(BEGIN, table.concat(changes), FINISH)
end

--- Waits for a key.
-- @number seconds at most
-- @treturn ?string the key; "resized": the picture is to be drawn anew; "end": it has to end, with
--   `self.status`; nil: the time is over
function screen:wait(seconds)
  local over = false
  local timer = uv.new_timer()
  uv.update_time()
  timer:start(math.floor(seconds * 1000), 0, function()
    over = true
    if self.waiting then uv.stop() end
  end)
  self.waiting = true
  while not over and #self.told == 0 do uv.run() end
  self.waiting = false
  timer:close()
  return table.remove(self.told, 1)
end

--- Gives the terminal back.
function screen:close()
  self:leave()
  for _, handle in ipairs(self.handles) do handle:close() end
  self.tty:close()
  self.out:close()
  uv.run "nowait"
end

return screen
