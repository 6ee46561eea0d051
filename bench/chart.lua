-- Draws what compare.lua measured, as an SVG: a line for each peer, a dot on a
-- logarithmic axis for each of the two medians, a stroke between the quartiles. It
-- has a ground of its own and follows the reader's preference of light or dark.

local WIDTH, ROW, TOP, LEFT, GAP = 980, 22, 104, 296, 70
local PANEL = (WIDTH - LEFT - 2 * GAP) / 2

local STYLE = [[
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 } .on { font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.end { text-anchor: end } .middle { text-anchor: middle }
.ground { fill: #ffffff } .grid { stroke: #d0d7de } .peer { fill: #57606a; stroke: #57606a } .ours { fill: #0969da; stroke: #0969da }
.polls { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .ground { fill: #0d1117 } .grid { stroke: #30363d }
  .peer { fill: #9198a1; stroke: #9198a1 } .ours { fill: #4493f8; stroke: #4493f8 }
  .polls { fill: #0d1117 }
}]]

local function escape(text)
  return (text:gsub("[&<>]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;" }))
end

-- all: the peers, with cycle and handover; lines: below the picture; time: says one
return function(all, lines, time)
  local out = {}
  local function put(format, ...) out[#out + 1] = format:format(...) end
  local function text(x, y, class, content)
    put('<text x="%.0f" y="%.0f" class="%s">%s</text>', x, y, class, escape(content))
  end

  -- The axis: whole decades, the same for both panels.
  local least, most = math.huge, 0
  for _, peer in ipairs(all) do
    if not peer.missing then
      least = math.min(least, peer.cycle[1], peer.handover[1])
      most = math.max(most, peer.cycle[3], peer.handover[3])
    end
  end
  local first, last = math.floor(math.log(least) / math.log(10)), math.ceil(math.log(most) / math.log(10))
  local function x_of(us, left)
    return left + (math.log(us) / math.log(10) - first) / (last - first) * PANEL
  end

  local headings, on = 0, nil
  for _, peer in ipairs(all) do
    if peer.on ~= on then headings = headings + 1 end
    on = peer.on
  end
  local bottom = TOP + (#all + headings) * ROW
  local height = bottom + 44 + 16 * #lines

  local panels = { { LEFT, "acquire + release while nobody else wants it", "cycle" },
                   { LEFT + PANEL + GAP, "hand-over: from release to the waiter's return", "handover" } }
  for _, panel in ipairs(panels) do
    local left = panel[1]
    text(left, TOP - 32, "", panel[2])
    for decade = first, last do
      local x = x_of(10 ^ decade, left)
      put('<path d="M%.1f %d V%d" class="grid"/>', x, TOP - 4, bottom)
      text(x, TOP - 10, "small middle", time(10 ^ decade):gsub("%.0", ""))
      text(x, bottom + 14, "small middle", time(10 ^ decade):gsub("%.0", ""))
    end
  end

  local y = TOP
  on = nil
  for _, peer in ipairs(all) do
    if peer.on ~= on then
      on = peer.on
      y = y + ROW
      text(16, y - 6, "on", on)
    end
    y = y + ROW
    local ours = peer.name:find("^hierlock")
    text(28, y - 6, ours and "on" or "", peer.name)
    if peer.missing then
      text(LEFT + 8, y - 6, "small", "not run: " .. peer.missing)
    else
      text(LEFT - 16, y - 6, "small end", peer.takes .. ", " .. peer.client)
      for _, panel in ipairs(panels) do
        local q = peer[panel[3]]
        local x, middle = x_of(q[2], panel[1]), y - 10
        put('<path d="M%.1f %d H%.1f" class="%s" stroke-width="2"/>', x_of(q[1], panel[1]), middle,
            x_of(q[3], panel[1]), ours and "ours" or "peer")
        put('<circle cx="%.1f" cy="%d" r="4" stroke-width="2" class="%s%s"/>', x, middle, ours and "ours" or "peer",
            panel[3] == "handover" and peer.polls and " polls" or "")
        text(x_of(q[3], panel[1]) + 9, y - 6, "small", time(q[2]))
      end
    end
  end
  for i, line in ipairs(lines) do text(16, bottom + 24 + 16 * i, "small", line) end

  return ([[
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">
<style>%s</style>
<rect width="100%%" height="100%%" rx="6" class="ground"/>
<text x="16" y="28" class="title">How long a lock takes</text>
<text x="16" y="46" class="small">Dots: medians; strokes: quartiles; rings: the waiter polls. Logarithmic: each grid line is ten times the one before.</text>
%s
</svg>
]]):format(WIDTH, height, WIDTH, height, "How long a lock takes; the table beside it says the same", STYLE,
           table.concat(out, "\n"))
end
