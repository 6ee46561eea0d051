--- The pictures of docs/checkout.md: `make screenshots`. The example runs as in its specs, and three people use it, each in a
-- browser of his own.

local checkout = require "spec.support.checkout"
local chromium = require "spec.support.chromium"
local picture = require "spec.support.picture"

local server = checkout.start()
local browser = chromium.start(server.directory .. "/profile")

local function log_in(login, administrator)
  local page = browser:page(820)
  page:go("http://127.0.0.1:" .. server.port .. "/")
  page:wait_for "Log in"
  page:type("input[name=login]", login)
  if administrator then page:click "input[type=checkbox]" end
  page:click "button.main"
  page:wait_for "Customers"
  return page
end

local ok, err = pcall(function()
  local clerk1, clerk2, admin1 = log_in "clerk1", log_in "clerk2", log_in("admin1", true)
  clerk2:click "td.action button"
  clerk2:wait_for "yours until"
  clerk1:click("td.action button", 2)
  clerk1:wait_for "yours until"
  clerk1:go("http://127.0.0.1:" .. server.port .. "/")
  clerk1:wait_for "in use by clerk2"
  picture(clerk1, "checkout-list")

  clerk2:type("textarea", "\nFrom May on: also on Sundays.")
  picture(clerk2, "checkout-editor")

  admin1:go("http://127.0.0.1:" .. server.port .. "/customer/1")
  admin1:wait_for "Take it away"
  admin1:type("input[name=reason]", "lunch")
  picture(admin1, "checkout-administrator")
  admin1:click "button.danger"
  admin1:wait_for "It is free now."
  clerk2:click "#save"
  clerk2:wait_for "admin1 took it from you: lunch"
  picture(clerk2, "checkout-lost")
end)
browser:stop()
server:stop()
if not ok then error(err, 0) end
