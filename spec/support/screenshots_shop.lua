--- The pictures of docs/exclusive-control.md: `make screenshots`. The example of a shop runs as in its specs.

local chromium = require "spec.support.chromium"
local hierlock = require "hierlock"
local picture = require "spec.support.picture"
local website = require "spec.support.website"

local server = website.start("shop", nil, function(directory)
  return { SHOP_DATABASE = "sqlite:" .. directory .. "/hierlock-shop/data.db", SHOP_WAIT = 0.3 }
end)
local browser = chromium.start(server.directory .. "/profile")

local function open(path)
  local page = browser:page(820)
  page:go("http://127.0.0.1:" .. server.port .. path)
  page:wait_for "Control"
  return page
end

local ok, err = pcall(function()
  local _, page = website.ask(server, "GET", "/")
  website.ask(server, "POST", "/way", { way = "hierlock", form = page:match 'name="form" value="(%x+)"' })
  local customer, clerk, night = open "/", open "/clerk/1", open "/clerk"
  customer:run "document.querySelector('input[name=number]').value = '5'"
  customer:click "td.action button"
  customer:wait_for "Thank you."
  picture(customer, "shop")

  night:click("button", 3)
  night:wait_for "The batch has run."
  clerk:type("input[name=name]", ", 100 g")
  clerk:click "#save"
  clerk:wait_for "Somebody else has changed it"
  picture(clerk, "shop-changed")

  local manager = assert(hierlock.open(server.dsn))
  local handle = assert(manager:acquire({ "shop", "stock", 2 }, { label = "stocktaking" }))
  customer:click("td.action button", 2)
  customer:wait_for "It is in use"
  picture(customer, "shop-held")
  handle:release()
  manager:close()
end)
browser:stop()
server:stop()
if not ok then error(err, 0) end
