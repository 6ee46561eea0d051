-- The pages.

local templates = require "html"

local html, joined, NOTHING = templates.fill, templates.joined, templates.NOTHING

local pages = {}

local function clock(time) return os.date("%H:%M", time) end

-- -------------------------------------------------------------- words

-- The holder is a lease, or another program's lock, which has no end; not every store knows more.
local function in_use(holder)
  local text = "in use by " .. (holder.owner or holder.application or "?")
  if holder.since then text = ("%s since %s"):format(text, clock(holder.since)) end
  if holder.remaining then text = ("%s, until %s"):format(text, clock(ngx.time() + holder.remaining)) end
  return text
end

local function state(session, holder)
  if not holder then return html('<span class="state free">free</span>', {}) end
  if holder.owner == session.login then
    return html('<span class="state yours">yours until {till}</span>', { till = clock(ngx.time() + holder.remaining) })
  end
  return html('<span class="state used">{text}</span>', { text = in_use(holder) })
end

--- The message for a person who has lost a customer, as plain text. holder: the present holder,
-- or nil.
function pages.why_lost(err, holder)
  if err.revoked_by then
    return err.revoked_by .. " took it from you" .. (err.reason and ": " .. err.reason or "")
  elseif holder then
    return ("Your time was up, and %s has it since %s."):format(holder.owner, clock(holder.since))
  end
  return "Your time was up, and somebody else has had it since."
end

-- -------------------------------------------------------------- frame

local function page(title, session, body)
  local who = session and html([[
<form method="post" action="/logout"><input type="hidden" name="form" value="{form}">
<span class="who">{login}{role}</span> <button class="quiet">Log out</button></form>]], {
    form = session.form, login = session.login, role = session.administrator == 1 and ", administrator" or "",
  }) or NOTHING
  return html([[
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="/style.css">
</head>
<body>
<header><a class="home" href="/">The office</a>{who}</header>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
]], { title = title, who = who, body = body }).html
end

local function notice(kind, text)
  if not text then return NOTHING end
  return html('<p class="notice {kind}" role="status">{text}</p>\n', { kind = kind, text = text })
end

-- The typed text that could not be saved.
local function unsaved(typed)
  if not typed then return NOTHING end
  return html([[
<section class="card unsaved"><h2>Typed, but not saved</h2>
<dl><dt>Name</dt><dd>{name}</dd><dt>Phone</dt><dd>{phone}</dd><dt>Note</dt><dd class="text">{note}</dd></dl></section>
]], typed)
end

-- A form with a single button.
local function button(session, action, text, class)
  return html('<form method="post" action="{action}"><input type="hidden" name="form" value="{form}">' ..
              '<button class="{class}">{text}</button></form>',
              { action = action, form = session.form, text = text, class = class or "" })
end

-- --------------------------------------------------------------- pages

function pages.login(why)
  return page("Log in", nil, html([[
{why}<form class="card" method="post" action="/login">
<label>Name <input name="login" required maxlength="32" pattern="[A-Za-z0-9][A-Za-z0-9._\-]*" autofocus autocomplete="username"></label>
<label class="check"><input type="checkbox" name="administrator" value="1"> as an administrator</label>
<div class="buttons"><button class="main">Log in</button></div>
<p class="hint">A demonstration: there are no passwords, and you are who you say you are.</p>
</form>
]], { why = notice("bad", why) }))
end

--- done: the operation just done, or nil.
function pages.list(session, customers, holder_of, done)
  local rows = {}
  for i, customer in ipairs(customers) do
    local holder, path = holder_of(customer.id), "/customer/" .. customer.id
    local action
    if not holder then
      action = button(session, path .. "/take", "Edit")
    else
      action = html('<a href="{path}">{text}</a>', { path = path, text = holder.owner == session.login and "Go on" or "Look" })
    end
    rows[i] = html('<tr><td><a href="{path}">{name}</a></td><td class="phone">{phone}</td><td>{state}</td><td class="action">{action}</td></tr>\n', {
      path = path, name = customer.name, phone = customer.phone, state = state(session, holder), action = action,
    })
  end
  return page("Customers", session, html([[
{done}<table class="card">
<thead><tr><th>Name</th><th class="phone">Phone</th><th>State</th><th></th></tr></thead>
<tbody>
{rows}</tbody>
</table>
]], { done = notice("good", done), rows = joined(rows) }))
end

--- A customer that the session has not taken. bad, good: a message, or nil; typed: the text that could not be saved.
function pages.customer(session, customer, holder, bad, good, typed)
  local path = "/customer/" .. customer.id
  local below
  if not holder then
    below = button(session, path .. "/take", "Edit", "main")
  elseif holder.id and session.administrator == 1 then
    below = html([[
<form method="post" action="{path}/free" class="row"><input type="hidden" name="form" value="{form}">
<input type="hidden" name="lease" value="{lease}">
<label>Reason <input name="reason" required maxlength="100"></label> <button class="danger">Take it away</button></form>
]], { path = path, form = session.form, lease = holder.id })
  elseif holder.owner == session.login then
    below = html('<p class="hint">You have it in another browser. Logging out gives it back.</p>', {})
  else
    below = html('<a class="button" href="{path}">Look again</a>', { path = path })
  end
  return page(customer.name, session, html([[
{bad}{good}{typed}<section class="card">{heading}
<p>{state}</p>
<dl><dt>Phone</dt><dd>{phone}</dd><dt>Note</dt><dd class="text">{note}</dd></dl>
<div class="buttons">{below}</div>
</section>
]], { bad = notice("bad", bad), good = notice("good", good), typed = unsaved(typed), state = state(session, holder),
      heading = typed and html("<h2>As it is now</h2>", {}) or NOTHING, phone = customer.phone, note = customer.note, below = below }))
end

--- A customer that the session has taken, with that token: until ttl seconds from now, or longer, as editor.js
-- renews it.
function pages.editor(session, customer, token, ttl, bad, good)
  return page(customer.name, session, html([[
{bad}{good}<form class="card" method="post" action="{path}/save" data-renew="{path}/renew" data-ttl="{ttl}">
<input type="hidden" name="form" value="{form}"><input type="hidden" name="token" value="{token}">
<p><span class="state yours" id="state" role="status">yours until {till}</span></p>
<label>Name <input name="name" required maxlength="100" value="{name}"></label>
<label>Phone <input name="phone" maxlength="40" value="{phone}"></label>
<label>Note <textarea name="note" rows="5" maxlength="2000">
{note}</textarea></label>
<div class="buttons"><button class="main" id="save">Save</button>
<button formaction="{path}/back" formnovalidate>Give back without saving</button></div>
</form>
<script src="/editor.js"></script>
]], { bad = notice("bad", bad), good = notice("good", good), path = "/customer/" .. customer.id, ttl = ttl, form = session.form, token = token,
      till = clock(ngx.time() + ttl), name = customer.name, phone = customer.phone, note = customer.note }))
end

--- Something else went wrong.
function pages.problem(session, title, text, typed)
  return page(title, session, html("{typed}<p>{text}</p>\n<p><a href=\"/\">Back to the list</a></p>\n",
                                   { text = text, typed = unsaved(typed) }))
end

return pages
