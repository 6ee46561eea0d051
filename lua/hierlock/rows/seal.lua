--- Values that travel through a form and come back as they were: a text with an HMAC-SHA-256. Internal.

local core = require "hierlock.core"
local sql = require "hierlock.rows.sql"

local seal = {}

local PREFIX = "hr1."
local SECRET_LEAST = 16

local function check(secret, purpose)
  if type(secret) ~= "string" or #secret < SECRET_LEAST then
    core.misuse(("secret must be a string of at least %d bytes"):format(SECRET_LEAST))
  end
  if type(purpose) ~= "string" then core.misuse("purpose must be a string, not " .. type(purpose)) end
end

local function encode(text) return (text:gsub("[^%w_]", function(c) return ("%%%02X"):format(c:byte()) end)) end
local function decode(text) return (text:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end)) end

-- The purpose's size stands before it, so that it and the text cannot be divided otherwise.
local function mac(secret, purpose, text)
  return core.hmac(secret, ("hierlock.rows %d:%s%s"):format(#purpose, purpose, text))
end

function seal.seal(secret, purpose, values)
  check(secret, purpose)
  if type(values) ~= "table" then core.misuse("values must be a table, not " .. type(values)) end
  local names, parts = {}, {}
  for name, value in pairs(values) do
    if type(name) ~= "string" then core.misuse "values must be named by strings" end
    names[#names + 1] = name
    local kind = type(value)
    if sql.is_null(value) then
      parts[name] = "z"
    elseif kind == "string" then
      parts[name] = "s" .. encode(value)
    elseif kind == "number" and value == value and math.abs(value) ~= math.huge then
      parts[name] = "n" .. encode(math.type and math.type(value) == "integer" and tostring(value) or ("%.17g"):format(value)) -- luacheck: ignore 143
    elseif kind == "boolean" then
      parts[name] = value and "t" or "f"
    else
      core.misuse(("the value of %s must be a string, a number, a boolean or rows.null"):format(name))
    end
  end
  table.sort(names)
  for i, name in ipairs(names) do names[i] = encode(name) .. "=" .. parts[name] end
  local text = PREFIX .. table.concat(names, "&")
  return text .. "." .. mac(secret, purpose, text)
end

function seal.open(secret, purpose, sealed)
  check(secret, purpose)
  local text, given = tostring(sealed):match "^(.*)%.(%x+)$"
  -- Both are hashed once more, so that the time of comparing tells nothing about how much of it is right.
  if type(sealed) ~= "string" or not text or text:sub(1, #PREFIX) ~= PREFIX
     or core.hmac(secret, given) ~= core.hmac(secret, mac(secret, purpose, text)) then
    local _, err = core.failure("store", "the sealed text was changed, or sealed for something else")
    err.code = "forged"
    return nil, err
  end
  local values = {}
  for name, kind, value in text:sub(#PREFIX + 1):gmatch "([^&=]*)=(%a)([^&]*)" do
    value = decode(value)
    if kind == "n" then value = tonumber(value)
    elseif kind == "z" then value = sql.null
    elseif kind ~= "s" then value = kind == "t" end
    values[decode(name)] = value
  end
  return values
end

return seal
