-- Lets many clients use the shop at once, in each of its ways, and counts the errors. These are packets sold without
-- stock, deliveries missing in the stock, overwritten prices of the batch, and messages sent twice. Then measures the sales per
-- second of each way.
--
-- Needs Debian's lua-argparse, lua-http and lua-dkjson. The shop begins anew for it. Run it from the source tree while the shop
-- runs, with the shop's variables:
--
--     export LUA_PATH="examples/?.lua;lua/?.lua;lua/?/init.lua;;" LUA_CPATH="build/luajit/?.so;;"
--     luajit examples/shop/load.lua
--
-- Exit status: 1 if anything went wrong in a way other than "none".

local argparse = require "argparse"
local cqueues = require "cqueues"
local ffi = require "ffi"
local client = require "http.client"
local new_headers = require "http.headers".new

local TIMEOUT = 20 -- of a request, s
local PRODUCTS, STOCK, DEARER = 5, 5, 10 -- as the shop begins
local TRIES = 100

local parser = argparse("load.lua", "Lets many use the shop at once, and counts what goes wrong.")
parser:option("--host", "Where the shop is.", "127.0.0.1")
parser:option("--port", "Its port.", "8081"):convert(tonumber)
parser:option("--ways", "Which ways, with commas.", "none,conditional,optimistic,pessimistic,hierlock")
parser:option("--clients", "How many at once.", "8"):convert(tonumber)
parser:option("--rounds", "How often each trouble is looked for.", "10"):convert(tonumber)
parser:option("--workers", "How many send messages at once.", "4"):convert(tonumber)
parser:option("--seconds", "How long sales are counted, twice for each way.", "2"):convert(tonumber)
parser:option("--json", "A file for the numbers.")
local options = parser:parse()

-- -------------------------------------------------------------- requests

local function encoded(text)
  return (tostring(text):gsub("[^%w._-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- The value of a field of a page's form, or nil.
local function field_in(page, name)
  local value = page:match('name="' .. name .. '"[^>]- value="([^"]+)"')
  return value and value:gsub("&quot;", '"'):gsub("&lt;", "<"):gsub("&gt;", ">"):gsub("&#39;", "'"):gsub("&amp;", "&")
end

-- The token in the forms of the office and of the control.
local function form_of(one) return (assert(field_in(select(2, one:get "/"), "form"))) end

local function seal_in(page) return (assert(field_in(page, "seen"), page)) end

local browser_class = {}
browser_class.__index = browser_class

-- A client with a connection of its own.
local function browser()
  return setmetatable({ connection = assert(client.connect({ host = options.host, port = options.port, tls = false, version = 1.1 }, TIMEOUT)) },
                      browser_class)
end

-- Status and page.
function browser_class:ask(method, path, fields)
  local headers, body = new_headers(), {}
  for name, value in pairs(fields or {}) do body[#body + 1] = encoded(name) .. "=" .. encoded(value) end
  body = table.concat(body, "&")
  headers:append(":method", method)
  headers:append(":path", path)
  headers:append(":authority", options.host .. ":" .. options.port)
  headers:append("content-type", "application/x-www-form-urlencoded")
  headers:append("content-length", tostring(#body))
  local stream = self.connection:new_stream()
  assert(stream:write_headers(headers, false, TIMEOUT))
  assert(stream:write_chunk(body, true, TIMEOUT))
  local answer = assert(stream:get_headers(TIMEOUT))
  return tonumber(answer:get ":status"), assert(stream:get_body_as_string(TIMEOUT))
end

function browser_class:get(path) return self:ask("GET", path) end

local SECONDS_TO_WAIT = { [423] = 0.05, [503] = 0.05 }

-- Sends a form. If another client has the row, it tries again; if the row has changed, it sends the form of the
-- answer, as a person would after a look. Returns the last status, the page, and the number of tries.
function browser_class:post(path, fields)
  for try = 1, TRIES do
    local status, page = self:ask("POST", path, fields)
    local again = SECONDS_TO_WAIT[status]
    local seal = status == 409 and fields.seen and field_in(page, "seen")
    if seal then
      fields.seen, fields.price = seal, fields.price and field_in(page, "price")
    elseif again then
      cqueues.sleep(again * (1 + math.random()))
    else
      if status >= 500 then error(page, 0) end
      return status, page, try
    end
  end
  error("after many tries it is still in use: " .. path, 0)
end

function browser_class:close() self.connection:close() end

local function new_ref()
  local text = {}
  for i = 1, 4 do text[i] = ("%08x"):format(math.random(0, 2 ^ 31)) end
  return table.concat(text)
end


-- The public page: stock and price by product.
local function products(one)
  local _, page = one:get "/"
  local stock, price = {}, {}
  for cents, packets, id in page:gmatch '<td class="number">([%d.]+)</td><td class="number"><span class="state %l+">(%-?%d+)</span>.-name="id" value="(%d+)"' do
    stock[tonumber(id)], price[tonumber(id)] = tonumber(packets), math.floor(cents * 100 + 0.5)
  end
  assert(#stock == PRODUCTS, page)
  return stock, price
end

-- Calls fn(browser, i) for so many clients at once, and waits for all.
local function together(n, fn)
  local queue = cqueues.new()
  for i = 1, n do
    queue:wrap(function()
      local one = browser()
      fn(one, i)
      one:close()
    end)
  end
  assert(queue:loop())
end

-- -------------------------------------------------------------- troubles

local function begin_anew(way)
  together(1, function(one)
    local form = form_of(one)
    assert(one:post("/reset", { form = form }) == 303)
    assert(one:post("/way", { way = way, form = form }) == 303)
  end)
end

-- All clients want the last five packets, of each product. Returns how many packets were sold
-- without stock.
local function last_packets()
  together(options.clients, function(one)
    for id = 1, PRODUCTS do one:post("/buy", { id = id, number = STOCK, ref = new_ref() }) end
  end)
  local wrong = 0
  together(1, function(one)
    for _, packets in ipairs((products(one))) do wrong = wrong + math.max(0, -packets) end
  end)
  return wrong
end

-- Each clerk has looked at the stock, and adds ten packets. Returns how many packets are
-- missing.
local function deliveries()
  local pages = {}
  together(options.clients, function(one, i) pages[i] = select(2, one:get "/clerk/1") end)
  together(options.clients, function(one, i)
    assert(one:post("/clerk/1/deliver", { seen = seal_in(pages[i]), number = 10 }) == 303)
  end)
  local missing
  together(1, function(one) missing = STOCK + 10 * options.clients - products(one)[1] end)
  return missing
end

-- Clerks have opened all products when two batches compute the prices, and save new names meanwhile. Returns how many
-- of the batches' prices were overwritten.
local function screens()
  local pages, before, wrong = {}, nil, 0
  together(PRODUCTS, function(one, id)
    pages[id] = select(2, one:get("/clerk/" .. id))
    if id == 1 then before = select(2, products(one)) end
  end)
  together(PRODUCTS + 2, function(one, id)
    if id > PRODUCTS then
      assert(one:post("/night", { form = form_of(one) }) == 303)
    else
      cqueues.sleep(0.02 * math.random())
      local price = field_in(pages[id], "price")
      assert(one:post("/clerk/" .. id .. "/save", { seen = seal_in(pages[id]), name = "Tea " .. id, price = price }) == 303)
    end
  end)
  together(1, function(one)
    local _, price = products(one)
    for id = 1, PRODUCTS do
      if price[id] ~= before[id] + 2 * DEARER then wrong = wrong + 1 end
    end
  end)
  return wrong
end

-- Several workers send the messages of all orders. Returns how many messages were sent again, and how many were not
-- sent.
local function messages()
  local running = {}
  for i = 1, options.workers do running[i] = assert(io.popen("luajit examples/shop/batch.lua messages 2>&1")) end
  for _, one in ipairs(running) do
    local said = one:read "*a"
    one:close()
    if not said:find "^%d+ messages sent\n$" then error(said, 0) end
  end
  local seen, twice = {}, 0
  for ref in io.lines(os.getenv "SHOP_MAIL" or "/tmp/hierlock-shop/mail") do
    if seen[ref] then twice = twice + 1 end
    seen[ref] = true
  end
  return twice
end

-- Returns the sales per second, of a single product or of all, and the number of
-- orders.
local function sales(of)
  together(of, function(one, id)
    local _, page = one:get("/clerk/" .. id)
    assert(one:post("/clerk/" .. id .. "/deliver", { seen = seal_in(page), number = 100000 }) == 303)
  end)
  local ends, sold, refused = cqueues.monotime() + options.seconds, 0, 0
  together(options.clients, function(one, i)
    while cqueues.monotime() < ends do
      local status = one:post("/buy", { id = (i - 1) % of + 1, number = 1, ref = new_ref() })
      if status == 303 then sold = sold + 1 else refused = refused + 1 end
    end
  end)
  return sold / options.seconds, refused / options.seconds
end

-- ---------------------------------------------------------------- report

ffi.cdef "int isatty(int);"
local on_terminal = ffi.C.isatty(2) == 1

-- Shows the present step; without one, clears the line.
local function progress(way, what)
  if not on_terminal then return end
  io.stderr:write("\r\27[K", way and way .. ": " .. what or "")
  io.stderr:flush()
end

local function measure(way)
  local result = { way = way, packets = 0, deliveries = 0, prices = 0 }
  for round = 1, options.rounds do
    progress(way, ("round %d of %d"):format(round, options.rounds))
    begin_anew(way)
    result.packets = result.packets + last_packets()
    begin_anew(way)
    result.deliveries = result.deliveries + deliveries()
    result.prices = result.prices + screens()
  end
  progress(way, "sales")
  begin_anew(way)
  result.all = sales(PRODUCTS)
  begin_anew(way)
  result.one, result.refused = sales(1)
  progress(way, "messages")
  result.messages = messages()
  return result
end

math.randomseed(os.time())
local results, wrong = {}, false
print(("%d clients, %d rounds, %d workers\n"):format(options.clients, options.rounds, options.workers))
print "               what went wrong                            sales per second"
print "way            packets  deliveries  prices  messages      all products  one product  of these refused"
for way in options.ways:gmatch "[^,]+" do
  local it = measure(way)
  results[#results + 1] = it
  progress()
  print(("%-13s %8d %11d %7d %9d %17.0f %12.0f %17.0f"):format(way, it.packets, it.deliveries, it.prices, it.messages, it.all, it.one, it.refused))
  io.stdout:flush()
  wrong = wrong or way ~= "none" and it.packets + it.deliveries + it.prices + it.messages > 0
end
if options.json then
  local file = assert(io.open(options.json, "w"))
  assert(file:write(require("dkjson").encode(results, { indent = true }), "\n"))
  assert(file:close())
end
os.exit(wrong and 1 or 0)
