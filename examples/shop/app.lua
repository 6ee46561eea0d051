-- The requests, and their answers.
--
--   409   another user was first: what has changed        423   another user has it just now: who
--   422   what you typed cannot be                        303   done; look there
--   413   more than a form has                            421   asked by another name than its own (nginx.conf)
--   503   the database or the locks do not answer now     403, 404, 405, 500

local rows = require "hierlock.rows"
local data = require "shop.data"
local pages = require "shop.pages"
local ways = require "shop.ways"

local function random(bytes)
  local file = assert(io.open("/dev/urandom", "rb"))
  local text = file:read(bytes)
  file:close()
  return (text:gsub(".", function(byte) return ("%02x"):format(byte:byte()) end))
end

-- The secret that signs the forms' fields. nginx makes it before the workers, and anew at a reload: then a user must
-- open an old form again.
local SECRET = random(16)

-- The token in forms without a row: a page of another site cannot read it.
local FORM = random(16)

local NIGHT = 5 -- seconds that the batch comes back to what was put aside

local function reply(status, body, headers) return { status = status, body = body, headers = headers or {} } end

local function redirect(where) return reply(303, "", { Location = where }) end

local function not_found() return reply(404, pages.problem("Not found", "There is nothing here.")) end

-- ---------------------------------------------------------------- errors

local RETRY = { ["Retry-After"] = 1 }

-- For an err that is not about the user's action. typed: the text that the
-- user would lose.
local function failure(err, typed)
  ngx.log(ngx.ERR, tostring(err.message or err))
  if err.code == "unknown" then
    return reply(503, pages.problem("Perhaps", "The database did not say whether that was done. Look before you do it again.", typed), RETRY)
  elseif err.retryable or err.code == "connection" or err.code == "lost" then
    return reply(503, pages.problem("Not now", "The shop cannot do that just now. Try again in a moment.", typed), RETRY)
  end
  return reply(500, pages.problem("Sorry", "The shop cannot do that. The log says why.", typed))
end

-- The answer to an err of a way. changed(err): the answer if another user was first.
local function answer_to(err, typed, changed)
  if err.code == "refused" or err.code == "stale" then
    if err.gone then return not_found() end
    if err.current then data.numbers(err.current) end
    return changed(err)
  elseif err.code == "timeout" then
    return reply(423, pages.held(err.holders, typed), RETRY)
  end
  if err.code == "connection" or err.code == "unknown" or err.code == "lost" then data.close() end
  return failure(err, typed)
end

-- ----------------------------------------------------------------- forms

local function whole(text, least, most)
  local number = type(text) == "string" and #text < 10 and text:find "^%d+$" and tonumber(text)
  return number and number >= least and number <= most and number or nil
end

local function purpose(id) return "product " .. id end

--- The part of a row that its form carries.
local function sealed(product)
  return rows.seal(SECRET, purpose(product.id),
                   { name = product.name, price = product.price, stock = product.stock, version = product.version })
end

local function seen_in(request) return rows.open(SECRET, purpose(request.id), request.post.seen) end

local function forged()
  return reply(403, pages.problem("Open it anew", "This form was not one of ours, or it is from before the shop was started again."))
end

-- -------------------------------------------------------------- customers

local GET, POST = {}, {}

local DONE = {
  bought = "Thank you. The message is on its way.", way = "From now on it is done so.", reset = "Everything is as in the beginning.",
  saved = "Saved.", delivered = "It is in the stock.", night = "The batch has run.",
}

-- The state of the shop that every page shows.
local function state(done) return { way = data.way(), orders = data.orders(), done = DONE[done], form = FORM } end

GET["/"] = function(request) return reply(200, pages.shop(state(request.done), data.products(), function() return random(16) end)) end

POST["/buy"] = function(request)
  local post = request.post
  local id, number, ref = whole(post.id, 1, 1e6), whole(post.number, 1, 1000), tostring(post.ref)
  if not id or not number or not ref:find "^%x+$" or #ref ~= 32 then
    return reply(422, pages.problem("How many?", "Say how many packets, from 1 to 1000."))
  end
  if data.order(ref) then return redirect "/?done=bought" end -- the form was sent twice
  local ran, ok, err = pcall(ways[data.way()].buy, ref, id, number)
  if not ran then
    if data.order(ref) then return redirect "/?done=bought" end -- at the same moment
    error(ok, 0)
  end
  if ok then return redirect "/?done=bought" end
  return answer_to(err, { Packets = number }, function()
    if err.code == "stale" then
      return reply(409, pages.problem("Others were first", "So many buy this just now that you were not among the first. Try again.",
                                      { Packets = number }), RETRY)
    end
    return reply(409, pages.sold_out(state(), err.current, number))
  end)
end

-- ----------------------------------------------------------------- clerks

GET["/clerk"] = function(request) return reply(200, pages.clerk(state(request.done), data.products())) end

GET.product = function(request)
  return reply(200, pages.product(state(request.done), request.product, sealed(request.product)))
end

POST.save = function(request)
  local seen, post = seen_in(request), request.post
  if not seen then return forged() end
  local typed = { name = type(post.name) == "string" and post.name:gsub("%c", "") or "" }
  local cents = type(post.price) == "string" and post.price:match "^%d+%.%d%d$"
  typed.price = cents and whole(cents:gsub("%.", ""), 1, 1e6)
  if not typed.name:find "%S" or #typed.name > 100 or not typed.price then
    return reply(422, pages.problem("What is it?", "A product has a name, and a price such as 4.50.", { Name = typed.name, Price = post.price }))
  end
  local ok, err = ways[data.way()].save(request.id, typed, seen)
  if ok then return redirect("/clerk/" .. request.id .. "?done=saved") end
  return answer_to(err, { Name = typed.name, Price = pages.money(typed.price) }, function()
    return reply(409, pages.changed(state(), err.current, seen, typed, sealed(err.current)))
  end)
end

POST.deliver = function(request)
  local seen, number = seen_in(request), whole(request.post.number, 1, 100000)
  if not seen then return forged() end
  if not number then return reply(422, pages.problem("How many?", "Say how many packets have come, from 1 to 100000.")) end
  local ok, err = ways[data.way()].deliver(request.id, number, seen)
  if ok then return redirect("/clerk/" .. request.id .. "?done=delivered") end
  return answer_to(err, { Packets = number }, function()
    return reply(409, pages.changed(state(), err.current, seen, { number = number }, sealed(err.current)))
  end)
end

POST["/night"] = function()
  local done, left = ways.nightly(data.way(), NIGHT)
  if not done then return answer_to(left, nil, function() return failure(left) end) end
  if #left > 0 then return reply(423, pages.night(done, left), RETRY) end
  return redirect "/clerk?done=night"
end

-- ---------------------------------------------------------------- control

POST["/way"] = function(request)
  for _, name in ipairs(ways.NAMES) do
    if name == request.post.way then
      data.set_way(name)
      return redirect "/?done=way"
    end
  end
  return reply(422, pages.problem("Which way?", "There is none of that name."))
end

POST["/reset"] = function()
  data.reset()
  return redirect "/?done=reset"
end

-- --------------------------------------------------------------- requests

-- Requests that change the shop for all.
local CONTROL = { ["/way"] = true, ["/reset"] = true, ["/night"] = true }

-- A browser says which site a form came from. The forms of this shop come
-- from here.
local function is_foreign()
  local origin = ngx.var.http_origin
  return origin and origin:match "^https?://(.*)$" ~= ngx.var.http_host
end

local function answer(method)
  if method ~= "POST" and method ~= "GET" then
    return reply(405, pages.problem("Not so", "This is not done so."), { Allow = "GET, HEAD, POST" })
  end
  local path, request = ngx.var.uri, { done = ngx.var.arg_done }
  if method == "POST" then
    if is_foreign() then return reply(403, pages.problem("No", "This form was not one of ours.")) end
    ngx.req.read_body()
    -- nginx learns the size of a chunked body as it comes, and puts what its buffer does not hold into a file.
    if ngx.req.get_body_file() then return reply(413, pages.problem("Too much", "No form is so long.")) end
    request.post = ngx.req.get_post_args(10)
    if CONTROL[path] and request.post.form ~= FORM then return forged() end
  end
  local id, action = path:match "^/clerk/(%d+)(.*)$"
  local name = id and (action == "" and "product" or action:match "^/(%l+)$") or path
  local handler = (method == "POST" and POST or GET)[name]
  if not handler then return not_found() end
  local ready, err = data.ready()
  if not ready then return failure(err) end
  if id then
    request.id = whole(id, 1, 1e6)
    request.product = request.id and data.product(request.id)
    if not request.product then return not_found() end
  end
  return handler(request)
end

return function()
  local method = ngx.req.get_method()
  local ran, replied = pcall(answer, method == "HEAD" and "GET" or method)
  if not ran then -- what the database said to a plain statement: is it there at all?
    data.close()
    replied = failure { code = "connection", message = replied }
  end
  ngx.status = replied.status
  ngx.header["Content-Type"] = "text/html; charset=utf-8"
  ngx.header["Cache-Control"] = "no-store" -- the browser's button "back" is to ask again, too
  for name, value in pairs(replied.headers) do ngx.header[name] = value end
  ngx.print(replied.body)
end
