-- The pages.

local templates = require "html"

local html, joined, NOTHING = templates.fill, templates.joined, templates.NOTHING

local pages = {}

local WAYS = {
  { "none", "no control" }, { "conditional", "conditional" }, { "optimistic", "optimistic" }, { "pessimistic", "pessimistic" },
  { "hierlock", "hierlock" },
}

--- Cents as people write them.
function pages.money(cents)
  return ("%d.%02d"):format(math.floor(cents / 100), cents % 100)
end

local money = pages.money

-- ---------------------------------------------------------------- frame

-- state: nil on pages of an error.
local function page(title, state, body)
  local bar = NOTHING
  if state then
    local options = {}
    for i, way in ipairs(WAYS) do
      options[i] = html(way[1] == state.way and '<option value="{way}" selected>{text}</option>' or '<option value="{way}">{text}</option>',
                        { way = way[1], text = way[2] })
    end
    bar = html([[
<form method="post" action="/way" class="bar"><input type="hidden" name="form" value="{form}"><label for="way">Control</label>
<select id="way" name="way">{options}</select> <button>Use it</button>
<button formaction="/reset">Begin anew</button></form>
{done}]], { options = joined(options), form = state.form,
      done = state.done and html('<p class="notice good" role="status">{text}</p>\n', { text = state.done }) or NOTHING })
  end
  return html([[
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="/style.css">
<link rel="stylesheet" href="/shop.css">
</head>
<body>
<header><a class="home" href="/">Tea by the packet</a><nav><a href="/">Shop</a> <a href="/clerk">Office</a></nav></header>
<main>
<h1>{title}</h1>
{bar}{body}
</main>
</body>
</html>
]], { title = title, bar = bar, body = body }).html
end

local function bad(text) return html('<p class="notice bad" role="status">{text}</p>\n', { text = text }) end

-- The typed values of a request that failed: { label = text, … }.
local function unsaved(typed)
  if not typed then return NOTHING end
  local items, names = {}, {}
  for name in pairs(typed) do names[#names + 1] = name end
  table.sort(names)
  for i, name in ipairs(names) do items[i] = html("<dt>{name}</dt><dd>{value}</dd>", { name = name, value = typed[name] or "" }) end
  return html('<section class="card unsaved"><h2>Typed, but not done</h2>\n<dl>{items}</dl></section>\n', { items = joined(items) })
end

local function stock(product)
  local number = product.stock
  return html('<span class="state {class}">{number}</span>', { class = number < 0 and "lost" or number == 0 and "used" or "free", number = number })
end

-- ---------------------------------------------------------------- pages

--- ref(): a new order's name, for each form.
function pages.shop(state, products, ref)
  local rows = {}
  for i, product in ipairs(products) do
    rows[i] = html([[
<tr><td>{name}</td><td class="number">{price}</td><td class="number">{stock}</td>
<td class="action"><form method="post" action="/buy"><input type="hidden" name="id" value="{id}"><input type="hidden" name="ref" value="{ref}">
<input type="number" name="number" min="1" max="1000" value="1" required aria-label="Packets of {name}"> <button class="main">Buy</button></form></td></tr>
]], { name = product.name, price = money(product.price), stock = stock(product), id = product.id, ref = ref() })
  end
  return page("Tea", state, html([[
<table class="card">
<thead><tr><th>Tea</th><th class="number">Price</th><th class="number">Packets left</th><th></th></tr></thead>
<tbody>
{rows}</tbody>
</table>
<p class="hint">Orders: {new} to be confirmed, {sending} being confirmed, {sent} confirmed.</p>
]], { rows = joined(rows), new = state.orders.new, sending = state.orders.sending, sent = state.orders.sent }))
end

--- Another customer has bought the packets.
function pages.sold_out(state, product, number)
  local left = product.stock
  return page(product.name, state, html([[
{bad}<section class="card"><p>You wanted {number}. There {are} {left} left.</p><p><a class="button" href="/">Back to the shop</a></p></section>
]], { bad = bad "Not enough of it is left.", number = number, left = left, are = left == 1 and "is" or "are" }))
end

function pages.clerk(state, products)
  local rows = {}
  for i, product in ipairs(products) do
    rows[i] = html('<tr><td><a href="/clerk/{id}">{name}</a></td><td class="number">{price}</td><td class="number">{stock}</td></tr>\n',
                   { id = product.id, name = product.name, price = money(product.price), stock = stock(product) })
  end
  return page("Office", state, html([[
<table class="card">
<thead><tr><th>Product</th><th class="number">Price</th><th class="number">Packets left</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
<form method="post" action="/night"><input type="hidden" name="form" value="{form}"><button>Run the nightly batch: all prices + 0.10</button></form>
]], { rows = joined(rows), form = state.form }))
end

local function editor(product, seal, name, price)
  return html([[
<form class="card" method="post" action="/clerk/{id}/save">
<input type="hidden" name="seen" value="{seal}">
<label>Name <input name="name" required maxlength="100" value="{name}"></label>
<label>Price <input name="price" required pattern="\d+\.\d\d" value="{price}"></label>
<div class="buttons"><button class="main" id="save">Save</button></div>
</form>
]], { id = product.id, seal = seal, name = name, price = price })
end

local function delivery(product, seal, number)
  return html([[
<form class="card row" method="post" action="/clerk/{id}/deliver">
<input type="hidden" name="seen" value="{seal}">
<p>In stock: {stock}</p>
<label>Delivered <input type="number" name="number" min="1" max="100000" value="{number}" required></label>
<button id="deliver">Add</button>
</form>
]], { id = product.id, seal = seal, stock = stock(product), number = number })
end

--- A clerk's screen. seal: the sealed field of its forms.
function pages.product(state, product, seal)
  return page(product.name, state,
              joined { editor(product, seal, product.name, money(product.price)), delivery(product, seal, 10) })
end

--- Another user has changed the product since the form was made: shows the values that the clerk saw and typed, the
-- present values, and the form again with the present values.
function pages.changed(state, product, seen, typed, seal)
  local lines = {}
  local function line(label, name, show)
    local was, now = show(seen[name]), show(product[name])
    lines[#lines + 1] = html('<tr class="{class}"><th>{label}</th><td>{was}</td><td>{typed}</td><td>{now}</td></tr>\n', {
      class = was ~= now and "differs" or "", label = label, was = was, now = now, typed = typed[name] and show(typed[name]) or "",
    })
  end
  line("Name", "name", tostring)
  line("Price", "price", money)
  line("Packets", "stock", function(number) return ("%d"):format(number) end)
  return page(product.name, state, joined {
    bad "Somebody else has changed it since you opened it. Nothing was saved.",
    html([[
<table class="card changed">
<thead><tr><th></th><th>You saw</th><th>You typed</th><th>It is now</th></tr></thead>
<tbody>
{lines}</tbody>
</table>
]], { lines = joined(lines) }),
    typed.number and delivery(product, seal, typed.number) or
      editor(product, seal, typed.name, money(typed.price == seen.price and product.price or typed.price)),
  })
end

-- -------------------------------------------------------- what went wrong

local function held_by(holders)
  local holder = holders and holders[1]
  if not holder then return "Somebody else is at it." end
  return ("It is in use: %s%s."):format(holder.label or holder.application or "another program",
                                        holder.since and os.date(", since %H:%M:%S", holder.since) or "")
end

--- Another holder has the product just now. holders: the holders, where they
-- are known.
function pages.held(holders, typed)
  return page("In use", nil, html("{bad}{typed}<p>Go back, and try again in a moment.</p>\n", { bad = bad(held_by(holders)), typed = unsaved(typed) }))
end

--- The cases that the batch could not do.
function pages.night(done, left)
  local items = {}
  for i, case in ipairs(left) do
    items[i] = html("<li>{name}: {why}</li>\n", { name = case.product.name, why = held_by(case.holders) })
  end
  return page("Not all prices", nil, html("{bad}<section class=\"card\"><ul>\n{items}</ul></section>\n<p><a href=\"/clerk\">Back to the office</a></p>\n", {
    bad = bad(("%d prices were computed, %d were not:"):format(done, #left)), items = joined(items),
  }))
end

--- Something else went wrong.
function pages.problem(title, text, typed)
  return page(title, nil, html("{typed}<p>{text}</p>\n<p><a href=\"/\">Back to the shop</a></p>\n", { text = text, typed = unsaved(typed) }))
end

return pages
