--- Run by LDoc (`ldoc --filter spec.support.ldoc.dump`): prints the comments that it has read, one line for each
-- item: type, name, and all of its text. Functions of hierlock.rows have their module before them, as some have the
-- name of a function of hierlock.

local function texts(item)
  local list = { item.summary or "", item.description or "" }
  for _, params in ipairs { item.params or {}, item.ret or {} } do
    for _, text in ipairs(params) do list[#list + 1] = tostring(text) end
  end
  for _, map in pairs(item.params and item.params.map or {}) do list[#list + 1] = tostring(map) end
  for _, sub in pairs(item.subparams or {}) do
    for _, name in ipairs(sub) do list[#list + 1] = tostring(name) end
  end
  return (table.concat(list, " "):gsub("%s+", " "))
end

return {
  dump = function(modules)
    for module in modules:iter() do
      for item in module.items:iter() do
        local name = item.name
        if module.name == "hierlock.rows" and not name:find ":" then name = "rows." .. name:gsub("^rows%.", "") end
        print(table.concat({ "item", item.type, name, item.ret and #item.ret or 0, texts(item) }, "\t"))
      end
    end
  end,
}
