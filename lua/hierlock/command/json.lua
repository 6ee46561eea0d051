--- Encodes the output of --json: an array of objects, with a line for each. Needs dkjson, which the rest of the
-- command does without.

local text = require "hierlock.command.text"

local json = {}

--- The module; nil, err where it is not installed: to be known before anything is done.
function json.encoder()
  local ok, encoder = pcall(require, "dkjson")
  if ok then return encoder end
  return nil, { code = "store", message =
    "--json needs the Lua module dkjson: luarocks install dkjson, or apt-get install lua-dkjson" }
end

--- Each field of an object, null where it has none; bytes that are not UTF-8 become \xNN.
-- @param encoder of `json.encoder`
-- @tparam {string,...} fields in their order
-- @tparam table object its values: strings, numbers, booleans, and lists of such objects that `json.object` has made
function json.object(encoder, fields, object)
  local made = {}
  for _, name in ipairs(fields) do
    local value = object[name]
    if value == nil then value = encoder.null end
    made[name] = type(value) == "string" and text.utf8(value) or value
  end
  return setmetatable(made, { __jsonorder = fields })
end

--- The text of such objects.
function json.array(encoder, objects)
  local lines = {}
  for i, object in ipairs(objects) do lines[i] = encoder.encode(object) end
  return #lines == 0 and "[]\n" or "[\n" .. table.concat(lines, ",\n") .. "\n]\n"
end

return json
