-- Draws what compare.lua measured, as an SVG: a line for each peer, a dot on a
-- logarithmic axis for each of the two medians, a stroke between the quartiles.

local svg = require "bench.svg"

local WIDTH, ROW, TOP, LEFT, GAP = 980, 22, 104, 296, 70
local PANEL = (WIDTH - LEFT - 2 * GAP) / 2

-- all: the peers, with cycle and handover; lines: below the picture; time: says one
return function(all, lines, time)
  local out = svg.new()
  local put, text = out.put, out.text

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

  return out.document(WIDTH, height, "How long a lock takes", "Dots: medians; strokes: quartiles; rings: the waiter polls. " ..
                      "Logarithmic: each grid line is ten times the one before.")
end
