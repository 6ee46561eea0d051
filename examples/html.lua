-- HTML for the examples with pages. A template escapes every value that another template has not made, so an
-- example cannot forget to.

local ENTITIES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["'"] = "&#39;" }

local html = {}

--- A piece of HTML, a table with the field `html`: the template with each {name} replaced.
function html.fill(template, values)
  return { html = (template:gsub("{(%w+)}", function(name)
    local value = values[name]
    if type(value) == "table" then return value.html end
    assert(value ~= nil, name)
    return (tostring(value):gsub("[&<>\"']", ENTITIES))
  end)) }
end

html.NOTHING = html.fill("", {})

--- Several pieces as one.
function html.joined(pieces)
  local texts = {}
  for i, piece in ipairs(pieces) do texts[i] = piece.html end
  return { html = table.concat(texts) }
end

return html
