--- The SQL of hierlock.rows: names, values, conditions, in each dialect. Internal.

local core = require "hierlock.core"

local sql = {}

-- The class of expressions, and SQL's NULL, for which Lua has no value.
local expression = { __name = "hierlock.expression" }
sql.null = setmetatable({}, { __tostring = function() return "NULL" end })

function sql.is_null(value)
  local ngx = rawget(_G, "ngx")
  return value == sql.null or (ngx ~= nil and ngx.null ~= nil and value == ngx.null)
end

--- A piece of SQL with values. list: {text, value, …}; n: how many there are, the text included.
function sql.expr(list, n)
  local text = list[1]
  if type(text) ~= "string" or not text:find "%S" then core.misuse "an expression must begin with its SQL, a string" end
  local _, places = text:gsub("%?", "")
  if places ~= n - 1 then
    core.misuse(("the SQL has %d place(s) for values, and there are %d: %s"):format(places, n - 1, text))
  end
  return setmetatable({ n = n, (table.unpack or unpack)(list, 1, n) }, expression)
end

--- {text, value, …} as a caller writes it, or an expression.
function sql.condition(value, what)
  if getmetatable(value) == expression then return value end
  if type(value) ~= "table" then core.misuse(what .. ' must be a table such as {"stock >= ?", 5}, not ' .. type(value)) end
  local n = 0
  for k in pairs(value) do
    if type(k) ~= "number" then core.misuse(what .. ' must be a list such as {"stock >= ?", 5}') end
    n = math.max(n, k)
  end
  return sql.expr(value, n)
end

function sql.is_expression(value) return getmetatable(value) == expression end

local function check_name(name, what)
  if type(name) ~= "string" or #name > 64 or not name:find "^[%a_][%w_]*$" then
    core.misuse(("%s must be a plain name, not %s"):format(what, type(name) == "string" and "'" .. name .. "'" or type(name)))
  end
end

--- Quotes a name, as it is stored: quoted names are not folded. A table's name may include its schema.
function sql.name(self, name, what)
  local mark = (self.dialect == "mysql" or self.dialect == "mariadb") and "`" or '"'
  if what == "table" and type(name) == "string" then
    local schema, table_name = name:match "^([^.]*)%.([^.]*)$"
    if schema then return sql.name(self, schema, "schema") .. "." .. sql.name(self, table_name, "name of a table") end
  end
  check_name(name, what or "column")
  return mark .. name .. mark
end

local function number(value)
  if value ~= value or value == math.huge or value == -math.huge then core.misuse "a value must not be NaN or infinite" end
  if math.floor(value) == value and math.abs(value) < 2 ^ 63 then
    if math.type and math.type(value) == "integer" then return tostring(value) end -- luacheck: ignore 143
    if math.abs(value) <= 2 ^ 53 then return ("%.0f"):format(value) end
  end
  -- The shortest that is the same number; whatever the locale's point is.
  for digits = 14, 17 do
    local shown = ("%%.%dg"):format(digits):format(value)
    if tonumber(shown) == value then return (shown:gsub(",", ".")) end
  end
end

local function text(self, value)
  if value:find("%z") then
    if self.dialect == "postgresql" then core.misuse "PostgreSQL has no text with NUL bytes; say decode(?, 'hex')" end
    if self.dialect == "sqlite" then
      return "CAST(X'" .. value:gsub(".", function(c) return ("%02X"):format(c:byte()) end) .. "' AS TEXT)"
    end
  end
  return self.quote(value)
end

--- A value, as the driver escapes it, or an expression's SQL.
function sql.value(self, value)
  local kind = type(value)
  if getmetatable(value) == expression then return sql.fill(self, value) end
  if sql.is_null(value) then return "NULL" end
  if kind == "number" then return number(value) end
  if kind == "boolean" then return value and "TRUE" or "FALSE" end
  if kind == "string" then return text(self, value) end
  core.misuse("a value must be a string, a number, a boolean, rows.null or rows.expr(…), not " .. kind)
end

function sql.fill(self, expr)
  local i = 1
  return (expr[1]:gsub("%?", function()
    i = i + 1
    return sql.value(self, expr[i])
  end))
end

-- MySQL and MariaDB compare text with a number as numbers, and every text that is none is 0. Quoted, the number is
-- compared as what the column is.
local function exact(self, value)
  local is = sql.value(self, value)
  if type(value) == "number" and (self.dialect == "mysql" or self.dialect == "mariadb") then return "'" .. is .. "'" end
  return is
end

--- Whether a column has just this value. Text is the same only by every letter, whatever the column's
-- collation says; NULL is the same as NULL.
function sql.same(self, column, value)
  local name, is = sql.name(self, column), exact(self, value)
  if self.dialect == "postgresql" then return name .. " IS NOT DISTINCT FROM " .. is end
  if self.dialect == "sqlite" then return name .. " IS " .. is .. (type(value) == "string" and " COLLATE BINARY" or "") end
  if type(value) ~= "string" then return name .. " <=> " .. is end
  return ("%s <=> CONVERT(%s USING utf8mb4) COLLATE utf8mb4_bin AND CHAR_LENGTH(%s)=CHAR_LENGTH(%s)"):format(name, is, name, is)
end

function sql.sorted(set)
  local names = {}
  for name in pairs(set) do
    check_name(name, "column")
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end

--- The row of a key: a value of the table's one key column, or {column = value, …}.
function sql.key(self, table_name, key)
  local columns = self.tables[table_name] and self.tables[table_name].key or "id"
  if type(columns) == "string" then columns = { columns } end
  local parts = {}
  if type(key) ~= "table" then
    if columns[2] then core.misuse "key must be a table: the table has a key of several columns" end
    key = { [columns[1]] = key }
  end
  for i, column in ipairs(sql.sorted(key)) do
    local value = key[column]
    if sql.is_null(value) or sql.is_expression(value) then core.misuse "key must have values only" end
    if type(value) == "boolean" and self.dialect ~= "postgresql" then core.misuse "key must be a number or a string, not a boolean" end
    parts[i] = sql.name(self, column) .. "=" .. exact(self, value)
  end
  if not parts[1] then core.misuse "key is missing" end
  return table.concat(parts, " AND ")
end

--- The key columns of a table.
function sql.key_columns(self, table_name)
  local columns = self.tables[table_name] and self.tables[table_name].key or "id"
  return type(columns) == "table" and columns or { columns }
end

function sql.columns(self, columns)
  if columns == nil then return "*" end
  if type(columns) ~= "table" or not columns[1] then core.misuse "columns must be a list of names" end
  local parts = {}
  for i, column in ipairs(columns) do parts[i] = sql.name(self, column) end
  return table.concat(parts, ",")
end

function sql.order(self, order)
  if order == nil then return "" end
  local parts = {}
  for i, each in ipairs(type(order) == "table" and order or { order }) do
    local column, way = tostring(each):match "^(%S+)%s*(%a*)$"
    way = way and way:upper()
    if not column or (way ~= "" and way ~= "ASC" and way ~= "DESC") then
      core.misuse 'order must be a column, "column DESC", or a list of them'
    end
    parts[i] = sql.name(self, column) .. (way ~= "" and " " .. way or "")
  end
  return " ORDER BY " .. table.concat(parts, ",")
end

--- The clause behind a SELECT that locks. On SQLite the transaction has locked everything.
function sql.lock(self, options)
  if self.dialect == "sqlite" or not options.lock then return "" end
  local words = options.lock == "update" and " FOR UPDATE"
    or self.dialect == "mariadb" and " LOCK IN SHARE MODE" or " FOR SHARE"
  if options.skip_locked then return words .. " SKIP LOCKED" end
  if options.wait == 0 then return words .. " NOWAIT" end
  return words
end

-- How fine the clock is that a time was read from, in µs, as its text shows.
local function step(value)
  local digits = type(value) == "string" and #(value:match "%.(%d+)" or "") or 0
  return 10 ^ (6 - math.min(digits, 6))
end

--- The new time of a timestamp column: the server's time, or the present value and one step of the column's
-- precision, whichever is later. So two writers never leave the same time. value: the value that was read, or nil.
function sql.later(self, column, value)
  local name, micros = sql.name(self, column), step(value)
  if self.dialect == "postgresql" then
    return ("GREATEST(clock_timestamp(),%s+INTERVAL '%.0f microseconds')"):format(name, micros)
  elseif self.dialect == "sqlite" then
    return ("max(strftime('%%Y-%%m-%%d %%H:%%M:%%f','now'),strftime('%%Y-%%m-%%d %%H:%%M:%%f',%s,'+%.3f seconds'))"):format(
      name, math.max(micros / 1e6, 0.001))
  end
  return ("GREATEST(NOW(6),%s+INTERVAL %.0f MICROSECOND)"):format(name, micros)
end

return sql
