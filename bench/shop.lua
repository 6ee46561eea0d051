-- Compares the ways of examples/shop on each database: the errors, and the sales per second. Prints a table for
-- docs/exclusive-control.md, and draws it.
--
--   make bench-shop        BENCH_SECONDS: of each run; BENCH_SHOP_SVG: where the picture goes
local json = require "dkjson"
local support = require "spec.support"
local svg = require "bench.svg"
local website = require "spec.support.website"

local SECONDS = tonumber(os.getenv "BENCH_SECONDS") or 5
local WAYS = { "none", "conditional", "optimistic", "pessimistic", "hierlock" }

-- The counts of the load script for a shop with this database; dsn: the store
-- of the locks.
local function measure(dsn, database)
  local server = website.start("shop", dsn, function(directory)
    return { SHOP_DATABASE = database or "sqlite:" .. directory .. "/hierlock-shop/data.db",
             SHOP_MAIL = directory .. "/hierlock-shop/mail" }
  end)
  local variables = "HIERLOCK_DSN='" .. server.dsn .. "'"
  for name, value in pairs(server.variables) do variables = variables .. (" %s='%s'"):format(name, value) end
  local file = server.directory .. "/numbers"
  variables = variables .. " LUA_PATH='examples/?.lua;lua/?.lua;lua/?/init.lua;;' LUA_CPATH='build/luajit/?.so;;'"
  local pipe = assert(io.popen(("%s luajit examples/shop/load.lua --port %d --seconds %d --json %s"):format(
    variables, server.port, SECONDS, file)))
  local said = pipe:read "*a"
  pipe:close()
  local numbers = io.open(file)
  local found = numbers and json.decode(numbers:read "*a")
  if numbers then numbers:close() end
  server:stop()
  return assert(found, said)
end

-- ------------------------------------------------------------ the picture

local WIDTH, PANEL_WIDTH, LEFT, TOP, ROW, GAP = 980, 330, 110, 84, 34, 60

local STYLE = [[
.second { fill: #bc4c00; stroke: none } .ours { stroke: none }
@media (prefers-color-scheme: dark) { .second { fill: #f0883e } }]]

local function picture(results)
  local out, height = svg.new(), TOP
  for i, result in ipairs(results) do
    local left = LEFT + (i - 1) % 2 * (PANEL_WIDTH + LEFT + 40)
    local top = TOP + math.floor((i - 1) / 2) * (#WAYS * ROW + GAP)
    local most = 0
    for _, it in ipairs(result) do most = math.max(most, it.all, it.one) end
    out.text(left, top - 12, "on", result.name)
    for w, it in ipairs(result) do
      local y = top + (w - 1) * ROW
      out.text(left - 8, y + 19, "end", it.way)
      for k, class in ipairs { "ours", "second" } do
        local n = k == 1 and it.all or it.one
        local width = n / most * (PANEL_WIDTH - 60)
        out.put('<rect x="%d" y="%d" width="%.1f" height="11" class="%s"/>', left, y + (k - 1) * 13 + 2, width, class)
        out.text(left + width + 6, y + (k - 1) * 13 + 12, "small", ("%.0f"):format(n))
      end
    end
    height = math.max(height, top + #WAYS * ROW + GAP)
  end
  out.put('<rect x="%d" y="%d" width="11" height="11" class="ours"/>', LEFT, height - 32)
  out.text(LEFT + 18, height - 22, "small", "eight customers want five products")
  out.put('<rect x="%d" y="%d" width="11" height="11" class="second"/>', LEFT + 290, height - 32)
  out.text(LEFT + 308, height - 22, "small", "all want the same")
  return out.document(WIDTH, height, "Sales per second, by the way that they are controlled",
                      "examples/shop: 8 customers, 4 workers of nginx, a price takes 2 ms", STYLE)
end

-- ------------------------------------------------------------------ all

local results = {}

local function add(name, dsn, database)
  io.stderr:write(name, "\n")
  local result = measure(dsn, database)
  result.name = name
  results[#results + 1] = result
end

add "SQLite"
for _, store in ipairs(support.stores) do
  local root = store.server and not store.missing and store.root()
  if root then
    store.prepare()
    if store.dialect == "postgresql" then root:query "CREATE SCHEMA testuser AUTHORIZATION testuser" end
    add(({ mysql = "MySQL", mariadb = "MariaDB", postgresql = "PostgreSQL" })[store.name], store.dsn, store.bare_dsn)
  end
end

print "| | way | packets | deliveries | prices | messages | sales/s, different products | sales/s, one product | of these refused/s |"
print "|---|---|---|---|---|---|---|---|---|"
for _, result in ipairs(results) do
  for i, it in ipairs(result) do
    print(("| %s | %s | %d | %d | %d | %d | %.0f | %.0f | %.0f |"):format(i == 1 and result.name or "", it.way, it.packets, it.deliveries, it.prices,
      it.messages, it.all, it.one, it.refused))
  end
end
local path = os.getenv "BENCH_SHOP_SVG" or "build/shop.svg"
local file = assert(io.open(path, "w"))
assert(file:write(picture(results)))
assert(file:close())
print("\n" .. path)
