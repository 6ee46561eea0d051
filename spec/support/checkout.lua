--- Runs examples/checkout on a store and data of its own; and people who use it over HTTP, as browsers do: with a cookie,
-- and with what a page's forms contain.

local website = require "spec.support.website"

local checkout = { missing = website.missing, ask = website.ask, send = website.send }

local person_class = {}
person_class.__index = person_class

local server_methods = {}

--- Starts it. ttl: seconds (900); dsn: by default an embedded store of its own.
function checkout.start(options)
  options = options or {}
  local database
  local server = website.start("checkout", options.dsn, function(directory)
    database = directory .. "/hierlock-checkout/data.db"
    return { CHECKOUT_DATABASE = database, CHECKOUT_TTL = options.ttl or 900 }
  end)
  server.database = database
  for name, method in pairs(server_methods) do server[name] = method end
  return server
end

--- A person in front of a browser of their own, not logged in yet.
function server_methods:person() return setmetatable({ server = self }, person_class) end

--- A person who is logged in.
function server_methods:log_in(login, administrator)
  local person = self:person()
  assert(person:post("/login", { login = login, administrator = administrator and 1 or "" }) == 303)
  person:get "/"
  return person
end

local function ask(self, method, path, fields, headers)
  local all = { Cookie = self.cookie }
  for name, value in pairs(headers or {}) do all[name] = value end
  local status, page, found = website.ask(self.server, method, path, fields, all)
  assert(status, "no answer")
  local cookie = found["set-cookie"]
  if cookie then self.cookie = cookie:match "^[^;]*" end
  self.form = page:match 'name="form" value="(%x+)"' or self.form
  self.lease = page:match 'name="lease" value="(%x+)"' or self.lease
  self.token = page:match 'name="token" value="(%x+)"' or self.token
  return status, page, found
end

function person_class:get(path, headers) return ask(self, "GET", path, nil, headers) end

--- Sends a form, with what each of the pages' forms contains unless the fields say otherwise. A person who takes a
-- customer sees the editor, as a browser follows the redirection.
function person_class:post(path, fields, headers)
  local all = { form = self.form, token = self.token }
  for name, value in pairs(fields or {}) do all[name] = value end
  local status, page, found = ask(self, "POST", path, all, headers)
  if status == 303 and path:find "/take$" then ask(self, "GET", found.location) end
  return status, page, found
end

--- Starts a post, and does not wait; returns what waits for the answer.
function person_class:send(path)
  return website.send(self.server, "POST", path, { form = self.form, token = self.token }, { Cookie = self.cookie })
end

return checkout
