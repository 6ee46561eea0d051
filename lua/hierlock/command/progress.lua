--- Progress of long work, on standard error: on a terminal a bar that is drawn
-- anew in its place, otherwise a plain line now and then. Measures the rate over
-- the last seconds, so that what an earlier run has done does not flatter it.

local uv = require "luv"

local progress = {}
progress.__index = progress

local REDRAW = 0.1      -- s
local PLAIN_LINES = 10  -- s between two lines where there is no terminal
local WINDOW = 10       -- s over which the rate is measured

local function now() return uv.hrtime() / 1e9 end

--- 1234567 as "1,234,567".
function progress.number(n)
  return (("%.0f"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", ""))
end

local function duration(seconds)
  local minutes, hours = math.floor(seconds / 60), math.floor(seconds / 3600)
  seconds = math.floor(seconds % 60)
  if hours == 0 then return ("%d:%02d"):format(minutes, seconds) end
  return ("%d:%02d:%02d"):format(hours, minutes % 60, seconds)
end

local function terminal_width()
  local pipe = io.popen("stty size 2>/dev/null </dev/tty")
  local width = pipe and pipe:read("*a"):match("^%d+ (%d+)")
  if pipe then pipe:close() end
  width = tonumber(width) or 0
  return width > 0 and math.min(width, 100) or 80
end

--- A bar for `total` rows. quiet: it shows nothing.
function progress.new(total, quiet)
  local self = setmetatable({ total = total, quiet = quiet, samples = {} }, progress)
  self.terminal = uv.guess_handle(2) == "tty" and os.getenv("TERM") ~= "dumb"
  if self.terminal and not quiet then self.width = terminal_width() end
  self.shown = self.terminal and 0 or now()
  return self
end

-- Rows per second, nil before anything can be said.
function progress:rate()
  local first, last = self.samples[1], self.samples[#self.samples]
  if not first or last.time - first.time < 0.2 then return end
  return (last.done - first.done) / (last.time - first.time)
end

function progress:text(done, what)
  local rate = self:rate()
  return ("%s of %s rows, %d %%%s%s"):format(
    progress.number(done), progress.number(self.total), math.floor(done / self.total * 100),
    rate and (", %s/s"):format(progress.number(rate)) or "",
    rate and rate > 0 and done < self.total and (", %s left"):format(duration((self.total - done) / rate)) or ""),
    what or ""
end

function progress:draw(done, what)
  local text, label = self:text(done, what)
  if not self.terminal then
    io.stderr:write(label, label ~= "" and ": " or "", text, "\n")
    return
  end
  local line = label ~= "" and label .. " " or ""
  local room = self.width - 1 - #line - #text - 3
  if room >= 10 then
    local filled = math.floor(done / self.total * room)
    line = line .. "[" .. ("#"):rep(filled) .. ("."):rep(room - filled) .. "] "
  end
  io.stderr:write("\r", (line .. text):sub(1, self.width - 1), "\27[K")
  self.drawn = true
end

--- `done` rows are there; `what` is being worked on.
function progress:update(done, what)
  local time = now()
  local samples = self.samples
  samples[#samples + 1] = { time = time, done = done }
  while samples[3] and time - samples[2].time > WINDOW do table.remove(samples, 1) end
  if self.quiet or time - self.shown < (self.terminal and REDRAW or PLAIN_LINES) then return end
  self.shown = time
  self:draw(done, what)
end

--- Takes the bar away, for something else to be written.
function progress:clear()
  if self.drawn then io.stderr:write("\r\27[K") end
  self.drawn = false
end

--- A line of its own, above the bar.
function progress:say(message)
  self:clear()
  if not self.quiet then io.stderr:write(message, "\n") end
end

--- Leaves the bar as it is; the next output begins a line.
function progress:finish(done, what)
  if not self.quiet and done then self:draw(done, what) end
  if self.drawn then io.stderr:write("\n") end
  self.drawn = false
end

return progress
