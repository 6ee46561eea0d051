-- The common parts of the bench's pictures: a ground, which follows the reader's
-- preference of light or dark, and text.

local svg = {}

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

--- A picture, made of its parts.
function svg.new()
  local parts, self = {}, {}
  function self.put(format, ...) parts[#parts + 1] = format:format(...) end
  function self.text(x, y, class, content)
    self.put('<text x="%.0f" y="%.0f" class="%s">%s</text>', x, y, class, escape(content))
  end
  --- The whole picture. what: its title; how: the line below; style: additional style.
  function self.document(width, height, what, how, style)
    return ([[
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" aria-label="%s">
<style>%s</style>
<rect width="100%%" height="100%%" rx="6" class="ground"/>
<text x="16" y="28" class="title">%s</text>
<text x="16" y="46" class="small">%s</text>
%s
</svg>
]]):format(width, height, width, height, what .. "; the table beside it says the same", STYLE .. (style or ""), what, how,
           table.concat(parts, "\n"))
  end
  return self
end

return svg
