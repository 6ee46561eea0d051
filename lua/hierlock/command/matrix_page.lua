--- Writes the page of `hierlock matrix --html`. The page needs no scripts and nothing from elsewhere, and explains
-- itself.

local text = require "hierlock.command.text"

local page = {}

local ESCAPES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;" }
local function html(words) return (text.safe(words):gsub('[&<>"]', ESCAPES)) end

local STYLE = [[
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2026; --quiet: #5b6470; --line: #d5dae1;
  --both: #d8f0dd; --both-ink: #10562a; --wait: #fbdcd8; --wait-ink: #8a1c10; --odd: #7a1fa2; }
@media (prefers-color-scheme: dark) { :root { --ground: #16191e; --ink: #e6e9ee; --quiet: #9aa4b1; --line: #343b45;
  --both: #153d23; --both-ink: #a6e3b8; --wait: #4b1c17; --wait-ink: #f6b7ae; --odd: #d59cf0; } }
body { margin: 2rem auto; padding: 0 1rem; max-width: 62rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 44rem; } .quiet { color: var(--quiet); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: center; }
th { font-weight: 600; } th[scope=row] { text-align: left; white-space: nowrap; }
th small { display: block; font-weight: 400; color: var(--quiet); }
.both { background: var(--both); color: var(--both-ink); } .wait { background: var(--wait); color: var(--wait-ink); }
.odd { outline: 3px solid var(--odd); outline-offset: -3px; font-weight: 700; }
.key { padding: .1rem .5rem; } pre, code { font-family: "DejaVu Sans Mono", monospace; } pre { line-height: 1.35; margin: .4rem 0; }
]]

-- The tree of the nodes, drawn with lines.
local function tree(requests)
  local children, roots, seen = {}, {}, {}
  for _, request in ipairs(requests) do
    if not seen[request.node] then
      seen[request.node] = true
      local parent, name = request.node:match "^(.*)/([^/]*)$"
      local list = parent and (children[parent] or {}) or roots
      if parent then children[parent] = list end
      list[#list + 1] = { path = request.node, name = name or request.node, level = request.level }
    end
  end
  local lines = {}
  local function draw(list, lead, top)
    for i, each in ipairs(list) do
      local last = i == #list
      lines[#lines + 1] = ('%s<b>%s</b>  <span class="quiet">%s</span>'):format(top and "" or lead .. (last and "└─ " or "├─ "),
        html(each.name), html(each.level))
      draw(children[each.path] or {}, top and "" or lead .. (last and "   " or "│  "), false)
    end
  end
  draw(roots, "", true)
  return table.concat(lines, "\n")
end

local function sentence(held, asked, granted)
  return ("While %s is held %s, a request for %s, %s, %s."):format(held.node, held.mode == "shared" and "shared" or "exclusively",
    asked.node, asked.mode, granted and "is granted at once" or "waits")
end

local function rows(found, odd)
  local lines = { '<thead><tr><th scope="col">held \\ asked for</th>' }
  for _, request in ipairs(found.requests) do
    lines[#lines + 1] = ('<th scope="col">%s<small>%s</small></th>'):format(html(request.node), request.mode)
  end
  lines[#lines + 1] = "</tr></thead>\n<tbody>"
  for i, held in ipairs(found.requests) do
    lines[#lines + 1] = ('<tr><th scope="row">%s<small>%s</small></th>'):format(html(held.node), held.mode)
    for j, asked in ipairs(found.requests) do
      local granted = found.granted[i][j]
      lines[#lines + 1] = ('<td class="%s%s" title="%s">%s</td>'):format(granted and "both" or "wait", odd[i .. " " .. j] and " odd" or "",
        html(sentence(held, asked, granted)), granted and "both" or "wait")
    end
    lines[#lines + 1] = "</tr>"
  end
  lines[#lines + 1] = "</tbody>"
  return table.concat(lines, "\n")
end

local PAGE = [[
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>hierlock: which locks go together</title>
<style>
%s</style>
</head>
<body>
<h1>Which locks go together</h1>
<p>Each cell is what happened when two programs really asked %s: one held the lock of the row, the other asked, without waiting,
for the lock of the column. <span class="key both">both</span> had them side by side; or the second would have had to
<span class="key wait">wait</span>.</p>
<div class="wide"><table>
%s
</table></div>
<p class="quiet">%s.</p>
%s<h2>The tree</h2>
<p>The nodes are those of a small tree, of the levels %s. <code>%s</code> is a node, with all above it in its name.</p>
<pre>%s</pre>
<h2>Why it is so</h2>
<p>Who locks a node locks it, and holds a <em>shared</em> lock on every node above it. Shared locks go together; an exclusive one goes
with nothing. So two requests collide where one node is the other, or lies above it: whoever has <code>%s</code> keeps out all who want
anything below it, and whoever works below it keeps out who wants it whole. Sisters never meet but above, where both only share.</p>
<p>On the deepest level a lock may be shared, too: readers of one %s go together, and keep its writers out. On a level above,
<code>mode = "shared"</code> is taken exclusively, as a shared lock there could not keep writers out of what lies below.</p>
<p class="quiet">Made by <code>hierlock matrix --html</code> on %s. The nodes were its own: nobody else's locks were touched.</p>
</body>
</html>
]]

--- Writes the page. True; nil, err.
function page.write(name, found, matrix)
  local odd, oddities, levels = {}, {}, {}
  for _, pair in ipairs(found.odd) do
    odd[pair[1] .. " " .. pair[2]] = true
    local held, asked = found.requests[pair[1]], found.requests[pair[2]]
    oddities[#oddities + 1] = ("<p><strong>%s (%s) and %s (%s): %s</strong></p>\n"):format(html(held.node), held.mode, html(asked.node), asked.mode,
      html(matrix.oddity(pair[3])))
  end
  for i, level in ipairs(found.names) do levels[i] = html(level) end
  local deepest
  for _, request in ipairs(found.requests) do deepest = deepest or #request.ids == #found.names and request.node end
  local content = PAGE:format(STYLE, html("on " .. found.where), rows(found, odd), html(matrix.summed_up(found)), table.concat(oddities),
    table.concat(levels, ", "), html(deepest), tree(found.requests), html(found.requests[1].node), levels[#levels], os.date "!%Y-%m-%d, %H:%M UTC")
  local file, why = io.open(name, "wb")
  local ok = file
  if file then
    ok, why = file:write(content)
    local closed, failure = file:close()
    if ok and not closed then ok, why = nil, failure end
  end
  if ok then return true end
  return nil, { code = "output", message = "cannot write the page: " .. why, retryable = false }
end

return page
