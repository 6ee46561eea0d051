-- The requests: who may make them, and their answers.
--
--   423   another user has the customer           409   you had it, and have it no more
--   401   you are not logged in                   403   you may not; or the form is of another site
--   422   what you typed cannot be                303   done; look there
--   413   more than a form has                    421   asked by another name than its own (nginx.conf)
--   503   the store does not answer now           404, 405, 500

local data = require "checkout.data"
local locks = require "checkout.locks"
local pages = require "checkout.pages"

local function reply(status, body, headers) return { status = status, body = body, headers = headers or {} } end

-- For editor.js, which shows it as text.
local function word(status, text) return reply(status, text, { ["Content-Type"] = "text/plain; charset=utf-8" }) end

local function redirect(where, cookie) return reply(303, "", { Location = where, ["Set-Cookie"] = cookie }) end

-- Answers that are none of the pages; session: nil without one.
local function problem(status, session, title, text, typed, headers)
  return reply(status, pages.problem(session, title, text, typed), headers)
end

local function logged_out(request) return problem(401, nil, "You are logged out", "Log in again, please.", request.typed) end

local function not_found(session) return problem(404, session, "Not found", "There is nothing here.") end

-- An err of hierlock that is about the store, and not about the customer.
local function failure(request, err)
  ngx.log(ngx.ERR, tostring(err)) -- as text: of a table, nginx would log "unknown error"
  if err.retryable then
    return problem(503, request.session, "Not now", "The locks cannot be reached. Try again in a moment.", request.typed,
                   { ["Retry-After"] = 1 })
  end
  return problem(500, request.session, "Sorry", "The locks cannot be used. The log says why.", request.typed)
end

-- The text typed into the editor, without control characters and carriage returns.
local function typed(post)
  local customer = {}
  for name, most in pairs { name = 100, phone = 40, note = 2000 } do
    local value = type(post[name]) == "string" and post[name] or ""
    value = value:gsub("%c", function(c) return c == "\n" and name == "note" and c or "" end)
    customer[name] = value
    if #value > 4 * most then customer.wrong = "That is too long." end -- most: characters, of 4 bytes at most
  end
  if not customer.name:find "%S" then customer.wrong = "A customer needs a name." end
  return customer
end

-- The session has lost the customer: says why, once.
local function lost(request, err)
  if err.code ~= "lost" then return failure(request, err) end
  local holder_of, trouble = locks.holders()
  if not holder_of then return failure(request, trouble) end
  local session, customer = request.session, request.customer
  local holder = holder_of(customer.id)
  local why = pages.why_lost(err, holder)
  if request.action == "renew" then return word(409, why) end -- and the page tells it again
  data.forget(session, customer.id)
  return reply(409, pages.customer(session, customer, holder, why, nil, request.typed))
end

local function not_taken(request)
  local why = "You do not have it any more."
  if request.action == "renew" then return word(409, why) end
  local holder_of, err = locks.holders()
  if not holder_of then return failure(request, err) end
  local customer = request.customer
  return reply(409, pages.customer(request.session, customer, holder_of(customer.id), why, nil, request.typed))
end

-- The form comes from an older window of the same person, who has given the customer back since, and taken it again.
-- In between another person may have changed the customer, so that window does not show the values that it would
-- overwrite.
local function of_before(request)
  local why = "You have opened it again since, in another window."
  if request.action == "renew" then return word(409, why) end
  return problem(409, request.session, request.customer.name, why, request.typed)
end

-- Keeps the customer for longer, if the session still has it and the form, if any, is of this lease; returns the
-- lease's token and text, or nil and the answer.
local function keep(request)
  local text = data.taken(request.session, request.customer.id)
  if not text then return nil, not_taken(request) end
  local token, err = locks.keep(text)
  if not token then return nil, lost(request, err) end
  if request.post and request.post.token ~= token then return nil, of_before(request) end
  return token, text
end

-- ------------------------------------------------------------ log in, log out

local GET, POST = {}, {} -- by path, or by what follows the customer's

local function login(request)
  local name = request.post.login
  if type(name) ~= "string" or #name > 32 or not name:find "^%w[%w._-]*$" then
    return reply(422, pages.login "A name is made of letters, digits, dots and dashes.")
  end
  local id = data.log_in(name, request.post.administrator == "1")
  -- HttpOnly: no script reads it. Strict: it does not come with a form of another site. With https, add Secure.
  return redirect("/", "checkout=" .. id .. "; Path=/; HttpOnly; SameSite=Strict")
end

POST["/logout"] = function(request)
  local who = request.session.login
  -- First: if another request of the same person is just taking a customer, it then finds no session and gives
  -- the customer back, or the lease is there to be given back.
  data.log_out(who)
  request.session = nil
  local count, err = locks.give_back_all(who)
  if not count then return failure(request, err) end
  return redirect("/login", "checkout=; Path=/; Max-Age=0")
end

-- ------------------------------------------------------------------ list

local DONE = { saved = "Saved, and given back.", back = "Given back. Nothing was changed." }

GET["/"] = function(request)
  local holder_of, err = locks.holders()
  if not holder_of then return failure(request, err) end
  return reply(200, pages.list(request.session, data.customers(), holder_of, DONE[ngx.var.arg_done]))
end

-- ------------------------------------------------------------- a customer

local FREED = { yes = "It is free now. Who had it is told by his next click or key.", no = "It was free already." }

GET.look = function(request)
  local holder_of, err = locks.holders() -- before it is kept
  if not holder_of then return failure(request, err) end
  local session, customer = request.session, request.customer
  local holder = holder_of(customer.id)
  if not data.taken(session, customer.id) then
    return reply(200, pages.customer(session, customer, holder, nil, FREED[ngx.var.arg_freed]))
  end
  local token, refused = keep(request)
  if not token then return refused end
  local good = not holder and "Your time was up, but nobody has had it since: it is yours again." or nil
  return reply(200, pages.editor(session, customer, token, locks.ttl, nil, good))
end

-- Two clicks at one moment: the first takes the customer, and may not be done yet, so wait until it is. A server may
-- show the first as a session lock of this program, which has no owner.
local function first_click(session, id, holder)
  local may_be_ours = not holder or holder.owner == session.login or
    holder.kind == "session" and holder.application == locks.application
  if not may_be_ours then return false end
  for _ = 1, 20 do
    if data.taken(session, id) then return true end
    ngx.sleep(0.02)
  end
end

POST.take = function(request)
  local session, id = request.session, request.customer.id
  local here = "/customer/" .. id
  if data.taken(session, id) then return redirect(here) end -- a second click
  local text, token = locks.take(id, session.login)
  if not text then
    local err = token
    if err.code ~= "timeout" then return failure(request, err) end
    local holder_of, trouble = locks.holders()
    if not holder_of then return failure(request, trouble) end
    local holder = holder_of(id) or err.holders and err.holders[1] -- a program's lock is in no list of leases
    if first_click(session, id, holder) then return redirect(here) end
    local why = holder and "Somebody else has it." or "It was in use. Try again."
    return reply(423, pages.customer(session, request.customer, holder, why))
  end
  -- An earlier holder that does not know yet that its time is up cannot write any more.
  if not data.fence(id, token) then
    locks.give_back(text)
    error("the tokens of the store are older than those of the data: was the store replaced?")
  end
  if not data.take(session, id, text) then
    locks.give_back(text)
    return logged_out(request)
  end
  return redirect(here)
end

POST.renew = function(request)
  local token, refused = keep(request)
  if not token then return refused end
  return word(200, "yours until " .. os.date("%H:%M", ngx.time() + locks.ttl))
end

POST.save = function(request)
  local session, customer = request.session, request.typed
  local token, text = keep(request)
  if not token then return text end -- what to answer
  customer.id = request.customer.id
  if customer.wrong then return reply(422, pages.editor(session, customer, token, locks.ttl, customer.wrong)) end
  if not data.save(customer.id, customer, token) then
    locks.give_back(text) -- if it is there at all
    return lost(request, { code = "lost" })
  end
  data.forget(session, customer.id)
  local ok, err = locks.give_back(text)
  if not ok and err.code ~= "lost" then ngx.log(ngx.ERR, tostring(err)) end -- it is saved, and ends by itself
  return redirect "/?done=saved"
end

POST.back = function(request)
  local session, id = request.session, request.customer.id
  if data.taken(session, id) then
    local token, text = keep(request)
    if not token then return text end -- what to answer
    local ok, err = locks.give_back(text)
    if not ok then return lost(request, err) end
    data.forget(session, id)
  end
  return redirect "/?done=back"
end

POST.free = function(request)
  local session, post = request.session, request.post
  if session.administrator ~= 1 then
    return problem(403, session, "Not you", "Only an administrator takes customers from others.")
  end
  local reason = type(post.reason) == "string" and post.reason:gsub("%c", "") or ""
  if reason == "" or #reason > 127 or not tostring(post.lease):find("^%x+$") or #post.lease ~= 32 then
    return problem(422, session, "Why?", "Give a reason, of some hundred letters at most: who has it is to read it.")
  end
  local count, err = locks.take_away(request.customer.id, post.lease, session.login, reason)
  if not count then return failure(request, err) end
  return redirect("/customer/" .. request.customer.id .. "?freed=" .. (count > 0 and "yes" or "no"))
end

-- --------------------------------------------------------------- requests

-- A browser says which site a form came from. The forms of this program come
-- from here.
local function is_foreign()
  local origin = ngx.var.http_origin
  return origin and origin:match "^https?://(.*)$" ~= ngx.var.http_host
end

local function wrong_method(allowed) return problem(405, nil, "Not so", "This is not done so.", nil, { Allow = allowed }) end

local function answer(method)
  local path, request = ngx.var.uri, {}
  if method == "POST" then
    if is_foreign() then return problem(403, nil, "No", "This form was not one of ours.") end
    ngx.req.read_body()
    -- nginx learns the size of a chunked body as it comes, and puts what its buffer does not hold into a file.
    if ngx.req.get_body_file() then return problem(413, nil, "Too much", "No form is so long.") end
    request.post = ngx.req.get_post_args(10)
  elseif method ~= "GET" then
    return wrong_method "GET, HEAD, POST"
  end
  if path == "/login" then return method == "POST" and login(request) or reply(200, pages.login()) end

  local id, action = path:match "^/customer/(%d+)(.*)$"
  if action == "" then request.action = "look" else request.action = action and action:match "^/(%l+)$" or path end
  local handler = (method == "POST" and POST or GET)[request.action]
  if not handler then
    if GET[request.action] then return wrong_method "GET, HEAD" end
    if POST[request.action] then return wrong_method "POST" end
    return not_found()
  end

  if request.action == "save" then request.typed = typed(request.post) end
  local cookie = ngx.var.cookie_checkout
  local session = cookie and data.session(cookie)
  if not session then
    if method == "GET" then return redirect "/login" end
    return logged_out(request)
  end
  request.session = session
  if method == "POST" and request.post.form ~= session.form then
    return problem(403, session, "No", "This form was not one of ours, or it is from before you logged in.", request.typed)
  end
  if id then
    request.customer = #id < 10 and data.customer(tonumber(id))
    if not request.customer then return not_found(session) end
  end
  return handler(request)
end

return function()
  local method = ngx.req.get_method()
  local replied = answer(method == "HEAD" and "GET" or method)
  ngx.status = replied.status
  ngx.header["Content-Type"] = "text/html; charset=utf-8"
  ngx.header["Cache-Control"] = "no-store" -- the browser's button "back" is to ask again, too
  for name, value in pairs(replied.headers) do ngx.header[name] = value end
  ngx.print(replied.body)
end
