-- How the rooms of the house stand to each other: csrc/README.md draws it.

-- Where make has put the objects of the modules that this Lua loads.
local OBJECTS = package.cpath:match("([^;]*/build/[^;]*)/%?%.so") .. "/obj"

local function lines(command, ...)
  local pipe = assert(io.popen(command:format(...)))
  local text = pipe:read "*a"
  assert(pipe:close(), command:format(...))
  return text:gmatch("[^\n]+")
end

-- A table: file -> set of the files whose functions or variables it uses.
local function uses(folders)
  local defined, graph, wanted = {}, {}, {}
  local paths = {}
  for path in lines("find %s -name '*.o'", OBJECTS .. "/" .. table.concat(folders, " " .. OBJECTS .. "/")) do
    paths[#paths + 1] = path
    graph[path:sub(#OBJECTS + 2, -3)] = {}
  end
  for line in lines("nm --print-file-name --extern-only %s", table.concat(paths, " ")) do
    local path, kind, symbol = line:match("^(.-):.*(%a) (%S+)$")
    local name = path:sub(#OBJECTS + 2, -3)
    if kind == "U" then wanted[#wanted + 1] = { name, symbol } else defined[symbol] = name end
  end
  for _, each in ipairs(wanted) do
    local other = defined[each[2]]
    if other and other ~= each[1] then graph[each[1]][other] = true end
  end
  assert(next(graph), "no objects in " .. OBJECTS)
  return graph
end

-- A circle as a list of names, or nil.
local function circle(graph)
  local state, path = {}, {}
  local function visit(name)
    path[#path + 1] = name
    state[name] = "open"
    for other in pairs(graph[name]) do
      if state[other] == "open" then
        path[#path + 1] = other
        return path
      elseif not state[other] then
        local found = visit(other)
        if found then return found end
      end
    end
    state[name] = "done"
    path[#path] = nil
  end
  for name in pairs(graph) do
    local found = not state[name] and visit(name)
    if found then return found end
  end
end

describe("csrc", function()
  for _, room in ipairs {
    "core", "lua", "stores/mysql", "stores/postgresql", "stores/redis", "stores/sqlite", "stores/memcached",
    "stores/quorum", "stores/embedded", "stores/sql", "stores/machine", "stores/judge",
  } do
    it("has no circle in " .. room, function()
      local found = circle(uses { room })
      assert.is_nil(found, found and table.concat(found, " -> "))
    end)
  end

  it("has a map that names each file", function()
    -- The map, and the headers of each folder and those below it.
    local maps = { ["csrc/README.md"] = assert(io.open "csrc/README.md"):read "*a" }
    for header in lines "find csrc -name '*.h'" do maps[header] = assert(io.open(header)):read "*a" end
    for path in lines "find csrc -name '*.c'" do
      local folder, name = path:match "^(.*/)(.-)$"
      local quoted, named = "%f[%w_]" .. name:gsub("%.", "%%.")
      for map, text in pairs(maps) do
        named = named or (map == "csrc/README.md" or map:sub(1, #folder) == folder) and text:find(quoted)
      end
      assert.truthy(named, path)
    end
  end)

  it("passes six parameters at most", function()
    local seen = 0
    for path in lines "find csrc -name '*.[ch]'" do
      local text = "\n" .. assert(io.open(path)):read("*a"):gsub("/%*.-%*/", "")
      for name, parameters in text:gmatch "\n%a[%w_ *]*[ *]([%w_]+)(%b())" do
        local _, commas = parameters:sub(2, -2):gsub("%b()", ""):gsub(",", "")
        assert.is_true(commas < 6, path .. ": " .. name)
        seen = seen + 1
      end
    end
    assert.is_true(seen > 2000)
  end)

  it("has no function of more than sixty lines", function()
    local seen = 0
    for path in lines "find csrc -name '*.c'" do
      local number, name, begun = 0, nil, nil
      for line in assert(io.open(path)):lines() do
        number = number + 1
        if line:find "^%a[^;]*%(" then name, begun = line:match "([%w_]+)%(", number end
        if begun and line == "}" then
          assert.is_true(number - begun < 60, ("%s: %s has %d lines"):format(path, name, number - begun + 1))
          begun, seen = nil, seen + 1
        end
      end
    end
    assert.is_true(seen > 1500, tostring(seen))
  end)

  it("has no line of more than a hundred columns", function()
    local seen = 0
    for path in lines "find csrc -name '*.[ch]'" do
      local number = 0
      for line in assert(io.open(path)):lines() do
        number = number + 1
        -- A character of UTF-8 is its first byte and those of 0x80 to 0xBF.
        local columns = #line:gsub("[\128-\191]", "")
        assert.is_true(columns <= 100, ("%s:%d has %d columns"):format(path, number, columns))
      end
      seen = seen + number
    end
    assert.is_true(seen > 30000, tostring(seen))
  end)

  it("locks the gate of PostgreSQL by the keys that sql/ has", function()
    local header = assert(io.open "csrc/stores/postgresql/postgresql_store.h"):read "*a"
    local keys = header:match '#define HL__PG_GATE_KEYS "([^"]*)"'
    local sql = assert(io.open "sql/postgresql_leases.sql"):read "*a"
    assert.equal(keys, sql:match "pg_advisory_xact_lock%(([%d, ]+)%);\nSELECT setval")
  end)

  it("has a core that uses nothing of the stores but the operations of those that are in it", function()
    for name, others in pairs(uses { "core", "stores/embedded", "stores/null", "stores/quorum" }) do
      for other in pairs(others) do
        if name:find("^core/") and other:find("^stores/") then
          assert.equal("core/open", name, other)
        end
      end
    end
  end)

  local function declared()
    local header = assert(io.open "csrc/core/hierlock.h"):read "*a"
    local names = {}
    for name in header:gsub("/%*.-%*/", ""):gmatch "[%s*](hl_[%l_]+)%(" do names[#names + 1] = name end
    assert.is_true(#names > 80)
    return names
  end

  it("has a public header that strict compilers take, of C99 and of C++", function()
    for compiler, standard in pairs { cc = "c99", ["c++"] = "c++17" } do
      if os.execute("command -v " .. compiler .. " >/dev/null") then
        local language = compiler == "cc" and "c" or compiler
        local said = lines("%s -std=%s -pedantic -Wall -Wextra -Werror -fsyntax-only -x %s csrc/core/hierlock.h 2>&1 || true",
          compiler, standard, language)
        assert.is_nil(said())
      end
    end
  end)

  it("has a test that calls each public function with NULL", function()
    local test = assert(io.open "spec/core/test_misuse.c"):read "*a"
    for _, name in ipairs(declared()) do
      local takes_pointers = not name:find "^hl_version$" and not name:find "^hl_[%l_]+_name$" and name ~= "hl_agent_new" and
        name ~= "hl_histogram_bound_us" or name == "hl_layout_name"
      assert.truthy(not takes_pointers or test:find("%f[%w_]" .. name .. "%([^\n]-NULL"), name)
    end
  end)
end)
