-- Draws what load.lua measured, as an SVG: panels of lines. Both axes are logarithmic;
-- a 0 stands at the left end. Ground and colours are as in chart.lua.

local svg = require "bench.svg"

local WIDTH, COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 980, 2, 400, 170
local LEFT, TOP, GAP_X, GAP_Y = 66, 84, 76, 100
local CLASSES = { "ours", "second", "third" }

local STYLE = [[
.line { fill: none; stroke-width: 2 } .second { fill: #bc4c00; stroke: #bc4c00 } .third { fill: #8250df; stroke: #8250df }
.line.ours, .line.second, .line.third { fill: none }
@media (prefers-color-scheme: dark) { .second { fill: #f0883e; stroke: #f0883e } .third { fill: #bc8cff; stroke: #bc8cff }
  .line.ours, .line.second, .line.third { fill: none } }]]

local function short(n)
  if n >= 1000 and n % 100 == 0 then return ("%gk"):format(n / 1000) end
  return ("%g"):format(n)
end

local function log(n) return math.log(n) / math.log(10) end

return function(panels)
  local out = svg.new()
  for i, panel in ipairs(panels) do
    local left = LEFT + (i - 1) % COLUMNS * (PANEL_WIDTH + GAP_X)
    local top = TOP + math.floor((i - 1) / COLUMNS) * (PANEL_HEIGHT + GAP_Y)
    local least, most, low, high = math.huge, 0, math.huge, 0
    for _, series in ipairs(panel.series) do
      for k, x in ipairs(series.x) do
        if x > 0 then least = math.min(least, x) end
        most = math.max(most, x)
        low, high = math.min(low, series[panel.of][k]), math.max(high, series[panel.of][k])
      end
    end
    out.text(left, top - 14, "on", panel.title .. " (" .. panel.y .. ")")
    if most > 0 then
      local zero = panel.series[1].x[1] == 0 and 0.5 or 0 -- decades for the 0
      local first, last = log(least) - zero, log(most)
      local bottom, ceiling = math.floor(log(low)), math.ceil(log(high))
      if ceiling == bottom then ceiling = bottom + 1 end
      local function x_of(x) return left + (x > 0 and log(x) - first or 0) / (last - first) * PANEL_WIDTH end
      local function y_of(y) return top + PANEL_HEIGHT - (log(y) - bottom) / (ceiling - bottom) * PANEL_HEIGHT end
      for decade = bottom, ceiling do
        local y = y_of(10 ^ decade)
        out.put('<path d="M%.1f %.1f H%.1f" class="grid"/>', left, y, left + PANEL_WIDTH)
        out.text(left - 8, y + 4, "small end", short(10 ^ decade))
      end
      for _, x in ipairs(panel.series[1].x) do
        out.text(x_of(x), top + PANEL_HEIGHT + 16, "small middle", short(x))
      end
      out.text(left + PANEL_WIDTH / 2, top + PANEL_HEIGHT + 34, "small middle", panel.x)
      for s, series in ipairs(panel.series) do
        local points = {}
        for k, x in ipairs(series.x) do points[k] = ("%.1f %.1f"):format(x_of(x), y_of(series[panel.of][k])) end
        out.put('<path d="M%s" class="line %s"/>', table.concat(points, " L"), CLASSES[s])
        for _, point in ipairs(points) do
          out.put('<circle cx="%s" cy="%s" r="3" class="%s"/>', point:match("^(%S+) "), point:match(" (%S+)$"), CLASSES[s])
        end
        if #panel.series > 1 then
          out.put('<circle cx="%.1f" cy="%.1f" r="4" class="%s"/>', left + 6 + (s - 1) * 130, top + PANEL_HEIGHT + 50, CLASSES[s])
          out.text(left + 16 + (s - 1) * 130, top + PANEL_HEIGHT + 54, "small", series.name)
        end
      end
    else
      out.text(left, top + 20, "small", "not measured: there was no such server")
    end
  end
  local height = TOP + math.ceil(#panels / COLUMNS) * (PANEL_HEIGHT + GAP_Y)
  return out.document(WIDTH, height, "Load and limits", "Both axes are logarithmic.", STYLE)
end
