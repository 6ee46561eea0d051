-- The shop's batches, as programs beside its users: the nightly prices, and workers that send the messages of orders.
-- Any number of workers may run at a time, on any machines; they follow the way that is chosen on the page.
--
-- Run it from the source tree, with the variables of examples/shop/nginx.conf as the shop has them:
--
--     export LUA_PATH="examples/?.lua;lua/?.lua;lua/?/init.lua;;" LUA_CPATH="build/luajit/?.so;;"
--     luajit examples/shop/batch.lua prices            computes all prices, and ends
--     luajit examples/shop/batch.lua messages          sends all messages, and ends
--     luajit examples/shop/batch.lua messages --stay   sends them as they come, until it is ended

local data = require "shop.data"
local ways = require "shop.ways"

local NIGHT = 60   -- seconds that it comes back to what was put aside
local PAUSE = 0.02 -- seconds, when others have all that is left

local function check(ok, err)
  if ok == nil then error(err.code .. ": " .. tostring(err.message), 0) end
  return ok, err
end

local function prices()
  local done, left = check(ways.nightly(data.way(), NIGHT))
  print(("%d prices computed, %d not"):format(done, #left))
  return #left == 0
end

local function messages(stays)
  local sent = 0
  math.randomseed(os.time() + tonumber((tostring(data):match "0x(%x+)$"):sub(-6), 16))
  while true do
    if check(ways[data.way()].send()) then
      sent = sent + 1
    elseif stays or data.new_orders(1)[1] then
      ways.sleep(PAUSE * (1 + math.random())) -- not all at once
    else
      break
    end
  end
  print(("%d messages sent"):format(sent))
  return true
end

local COMMANDS = { prices = prices, messages = messages }

local command = COMMANDS[arg[1]]
if not command or (arg[2] and (arg[1] ~= "messages" or arg[2] ~= "--stay")) then
  io.stderr:write "usage: luajit examples/shop/batch.lua prices | messages [--stay]\n"
  os.exit(64)
end
check(data.ready())
local ok = command(arg[2] ~= nil)
data.close()
os.exit(ok and 0 or 1, true)
