--- The pages are true. Each function that Lua can call has its documentation, and nothing else has; links lead
-- somewhere; code compiles. The SQL for administrators runs, and the user that it makes can lock; the table of odds
-- follows its formula.

local attach = require "hierlock.attach"
local hierlock = require "hierlock"
local data = require "hierlock.rows"
local support = require "spec.support"

local function read_file(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

local function run(command)
  local pipe = assert(io.popen("{ " .. command .. " ; } 2>&1; echo \"=$?\""))
  local text = pipe:read("*a")
  pipe:close()
  local output, status = text:match("^(.*)=(%d+)\n$")
  return output, tonumber(status)
end

local function lines(text) return (text .. "\n"):gmatch("(.-)\r?\n") end

-- ------------------------------------------------------------- reference

describe("the reference", function()
  local items

  setup(function()
    -- By the Lua at hand: Debian's script looks for others, which may not be there. Our own modules are not
    -- to be found.
    local output, status = run("unset LUA_CPATH LD_PRELOAD; LUA_PATH='./?.lua;;' " .. os.getenv("HIERLOCK_LUA") ..
                               " /usr/bin/ldoc --all --fatalwarnings --filter spec.support.ldoc.dump .")
    assert(status == 0, "ldoc (Debian: lua-ldoc) fails: " .. output)
    items = {}
    for kind, name, returns, text in output:gmatch("item\t([^\t\n]*)\t([^\t\n]*)\t([^\t\n]*)\t([^\n]*)") do
      items[name] = { kind = kind, returns = tonumber(returns), text = text }
    end
  end)

  -- The functions that the library binds: name in the reference -> function.
  local function bound()
    local found = {}
    local core = require "hierlock.core"
    for name, value in pairs(hierlock) do
      if type(value) == "function" then found[name] = value end
    end
    for name, value in pairs(core) do
      if type(value) == "function" and not found[name] then found["core." .. name] = value end
    end
    for name, value in pairs(attach) do found[name] = value end
    for name, value in pairs(data) do
      if type(value) == "function" then found["rows." .. name] = value end
    end
    return found
  end

  -- A class has its methods in __index, which is a table, or a C function's upvalue
  -- (and Lua 5.1 does not show those).
  local attached = attach.luasql { execute = function() end }
  local db = data.luasql(setmetatable({
    execute = function(_, text) return text:find "^SELECT" and { fetch = function() end, close = function() end } or 0 end,
  }, { __tostring = function() return "SQLite3 connection" end }))
  local claim
  db:transaction(function() claim = assert(db:claim("message", { where = { "1=1" } })) end)

  local function methods(class)
    local ours = ({ attached = attached, db = db, claim = claim })[class]
    if ours then return getmetatable(ours).__index end
    local index = debug.getregistry()["hierlock." .. class].__index
    if type(index) == "table" then return index end
    return select(2, debug.getupvalue(index, 1))
  end

  local classes = { "manager", "handle", "plan", "pending", "attached", "db", "claim" }

  local function missing(names)
    local list = {}
    for name in pairs(names) do
      local item = items[name]
      if not item or not item.kind:find("function") or item.text:match("^%s*$") then list[#list + 1] = name end
    end
    table.sort(list)
    return list
  end

  it("begins with what it is about, and names acquire before what comes after it", function()
    local name = os.tmpname()
    os.remove(name)
    local output, status = run("unset LUA_CPATH LD_PRELOAD; LUA_PATH='./?.lua;;' " .. os.getenv("HIERLOCK_LUA") ..
                               " /usr/bin/ldoc --fatalwarnings --dir " .. name .. " .")
    local page = status == 0 and read_file(name .. "/modules/hierlock.html")
    os.execute("rm -rf " .. name)
    assert(page, output)
    local place = 0
    for _, text in ipairs { "while I change this account", 'href="#acquire"', 'href="#with"', 'href="#manager:acquire"',
                            'href="#manager:close"', 'href="#manager:with"', 'href="#handle:release"' } do
      place = assert(page:find(text, place + 1, true), text)
    end
  end)

  it("has every function of the module", function() assert.same({}, missing(bound())) end)

  for _, class in ipairs(classes) do
    local table_ = methods(class)
    if table_ or _VERSION ~= "Lua 5.1" then
      it("has every method of a " .. class, function()
        local names = {}
        for name in pairs(table_) do names[class .. ":" .. name] = true end
        assert.is_truthy(next(names))
        assert.same({}, missing(names))
      end)
    end
  end

  it("knows all classes", function()
    local internal = { error = true, holders = true, store = true, default_manager = true, anchors = true,
                       agent = true, strands = true }
    for _, class in ipairs(classes) do internal[class] = true end
    for key in pairs(debug.getregistry()) do
      local class = type(key) == "string" and key:match("^hierlock%.(.*)")
      if class and not class:find "^connection" then assert.is_true(internal[class] or false, class) end
    end
  end)

  it("has nothing that does not exist", function()
    local functions = bound()
    local manager = assert(hierlock.open("null:"))
    local objects = { manager = manager, attached = attached, db = db, claim = claim,
                      handle = assert(manager:acquire { "u1" }), plan = hierlock.plan { { "u1" } },
                      pending = assert(manager:start { "u1" }) }
    for name, item in pairs(items) do
      local class, member = name:match("^(%l+)[:.](.+)$")
      if item.kind == "field" then
        assert.is_not_nil(objects[class][member], name)
      elseif item.kind:find("function") and objects[class] then
        assert.equal("function", type(objects[class][member]), name)
      elseif item.kind:find("function") then
        assert.equal("function", type(functions[name]), name)
      end
    end
    manager:close()
  end)

  it("says what each function returns", function()
    for name, item in pairs(items) do
      if item.kind:find("function") and name ~= "core.misuse" then
        assert.is_true(item.returns > 0, name)
      end
    end
  end)

  it("names every option, counter, code and field", function()
    -- quoted: in backticks, as are words in prose; else as the name of a parameter.
    local function names(item, word, quoted)
      local pattern = quoted and "`" .. word .. "`" or "%f[%w_]" .. word .. "%f[^%w_]"
      assert.truthy(items[item].text:find(pattern), item .. ": " .. word)
    end
    for _, option in ipairs { "timeout", "hold_timeout", "levels", "buckets", "pool_size", "application",
                              "on_lost", "on_wait", "on_grant", "on_timeout", "on_error", "on_release", "loop",
                              "own_handles", "check_order", "warn_unreleased", "units" } do
      -- A known option: a wrong value raises, and does not say that the option is unknown.
      local _, message = pcall(hierlock.open, "null:", { [option] = io.stdout })
      assert.is_nil(message:find("unknown option"), message)
      names("open", option)
    end
    local manager = assert(hierlock.open("null:"))
    for counter in pairs(manager:stats()) do names("manager:stats", counter, true) end
    manager:close()
    for code in read_file("csrc/core/error.c"):gmatch("{HL_%u+[%u_]*, %l+, \"([%l_]+)\"}") do
      if code ~= "ok" and code ~= "misuse" and code ~= "memory" then names("err", code, true) end
    end
    for _, field in ipairs { "code", "message", "retryable", "errno", "sqlstate", "target", "holders", "revoked_by",
                             "reason" } do
      names("err", field)
    end
    for _, field in ipairs { "application", "host", "pid", "label", "path", "mode", "since", "waiting", "kind", "owner",
                             "id", "remaining" } do
      names("manager:holders", field, true)
      if field ~= "waiting" then names("manager:leases", field, true) end
    end
  end)
end)

-- ------------------------------------------------------- links and code

local pages = { "README.md", "CONTRIBUTING.md", "CHANGELOG.md" }
for name in lines((run("ls docs/*.md"))) do
  if name:find("%.md$") then pages[#pages + 1] = name end
end

-- The parts of a page: prose, without code; and fenced code, { language, code, line }.
local function parts(name)
  local prose, code, block = {}, {}, nil
  local number = 0
  for line in lines(read_file(name)) do
    number = number + 1
    local fence = line:match("^%s*```(.*)$")
    if fence and block then
      block = nil
    elseif fence then
      block = { language = fence, line = number }
      code[#code + 1] = block
    elseif block then
      block[#block + 1] = line
    else
      prose[#prose + 1] = line
    end
  end
  assert(not block, name .. " has a fence that does not end")
  for _, one in ipairs(code) do one.text = table.concat(one, "\n") end
  return prose, code
end

-- Makes anchors of headings, as GitHub does.
local function anchors(name)
  local found = {}
  for _, line in ipairs((parts(name))) do
    local heading = line:match("^#+%s+(.-)%s*$")
    if heading then
      heading = heading:gsub("%[(.-)%]%(.-%)", "%1"):lower():gsub("[^%w%s_\128-\255-]", ""):gsub("%s", "-")
      local anchor, n = heading, 0
      while found[anchor] do
        n = n + 1
        anchor = heading .. "-" .. n
      end
      found[anchor] = true
    end
  end
  return found
end

local function exists(name)
  local file = io.open(name, "rb")
  if file then file:close() end
  return file ~= nil
end

describe("the pages", function()
  for _, page in ipairs(pages) do
    it("have links that lead somewhere: " .. page, function()
      local folder = page:match("^(.*/)") or ""
      local text = table.concat((parts(page)), "\n"):gsub("`[^`\n]*`", "")
      for target in text:gmatch("%]%(([^)%s]+)%)") do
        if not target:find("^%a+:") then
          local path, anchor = target:match("^([^#]*)#?(.*)$")
          local file = path == "" and page or folder .. path
          while file:find("[^/]+/%.%./") do file = file:gsub("[^/]+/%.%./", "", 1) end
          assert.is_true(exists(file), page .. ": " .. target)
          -- A rock has these directories, and not what lies beside them.
          local packed = ({ docs = true, sql = true, examples = true, csrc = true })[file:match "^(%l+)/"]
          if page:find "^docs/" then assert.is_true(packed or false, page .. ": " .. target .. " is in no rock") end
          if anchor ~= "" then assert.is_true(anchors(file)[anchor] or false, page .. ": " .. target) end
        end
      end
    end)

    it("have Lua code that compiles: " .. page, function()
      local _, code = parts(page)
      for _, block in ipairs(code) do
        if block.language:match("^lua") then
          local text = block.text
          if _VERSION < "Lua 5.4" then text = text:gsub("<close>", "") end
          local chunk, message = (loadstring or load)(text, "=" .. page) -- luacheck: ignore
          assert.is_truthy(chunk, ("line %d: %s"):format(block.line, tostring(message)))
        end
      end
    end)
  end

  it("have Lua code that runs: docs/faq.md", function()
    local directory = os.tmpname()
    os.remove(directory)
    finally(function() os.execute("rm -rf " .. directory) end)
    for _, block in ipairs((select(2, parts("docs/faq.md")))) do
      local chunk = assert((loadstring or load)("local manager = ...\n" .. block.text, "=docs/faq.md")) -- luacheck: ignore
      local manager = assert(hierlock.open("file:" .. directory, { timeout = 5 }))
      local ok, message = pcall(chunk, manager)
      manager:close()
      assert(ok, ("line %d: %s"):format(block.line, tostring(message)))
    end
  end)

  it("are all linked from another one", function()
    local linked = {}
    for _, page in ipairs(pages) do
      for target in read_file(page):gmatch("%]%(([^)%s#]+)") do
        linked[(target:gsub("^.*/", ""))] = page
      end
    end
    for _, page in ipairs(pages) do
      if page:find("^docs/") then assert.is_truthy(linked[page:match("[^/]+$")], page .. " is linked from nowhere") end
    end
  end)

  it("name in docs/planted*.md each bug that `make planted` plants, and each can still be planted", function()
    local page, names = "", {}
    for path in run("ls docs/planted*.md"):gmatch("%S+") do page = page .. read_file(path) end
    for path in run("ls spec/planted/*/*.patch"):gmatch("%S+") do
      local name = path:match("([^/]*)%.patch$")
      assert.is_nil(names[name], name .. " is there twice")
      names[name] = true
      assert.is_truthy(page:find("| `" .. name .. "` |", 1, true), name)
    end
    -- All patches share a shell, as there are hundreds.
    local output, status = run('(for each in spec/planted/*/*.patch; do patch -p1 -F0 -s --dry-run <"$each" || { echo "$each"; exit 1; }; done)')
    assert(status == 0, output)
    for name in page:gmatch("\n| `([%w-]+)` |") do assert.is_true(names[name], name) end
    assert.is_truthy(next(names))
  end)

  it("name in docs/security.md and docs/false-servers.md, for each claim, specs and tests that are there", function()
    local n = 0
    for file, title in (read_file("docs/security.md") .. read_file("docs/false-servers.md")):gmatch("`(spec/[%w_/]+%.%l+): ([^`\n]+)`") do
      n = n + 1
      assert.is_truthy(read_file(file):find(title, 1, true), file .. ": " .. title)
    end
    assert.is_true(n > 30)
  end)

  it("have a heading for each error code in docs/troubleshooting.md", function()
    local found = anchors("docs/troubleshooting.md")
    for code in read_file("csrc/core/error.c"):gmatch("{HL_%u+[%u_]*, %l+, \"([%l_]+)\"}") do
      if code ~= "ok" and code ~= "misuse" and code ~= "memory" then assert.is_true(found[code] or false, code) end
    end
  end)
end)

-- ------------------------------------------------------------------ odds

describe("the odds of a false conflict", function()
  local function shown(p)
    local text = ("%.3g"):format(p * 100)
    if text:find("e") then text = ("%.6f"):format(p * 100):gsub("0+$", "") end
    return text .. " %"
  end

  local function odds(n, m)
    local any = 1
    for _ = 1, 10 do any = any * (1 - n / m) end
    return { n / m, 1 - any, 1 - (1 - 1 / m) ^ n }
  end

  it("are in docs/locking.md what the formula says", function()
    local rows, expected = {}, {}
    for line in lines(read_file("docs/locking.md")) do
      if line:find("^| [%d,]+ | [%d.]+ %%") then rows[#rows + 1] = line end
    end
    for _, n in ipairs { 10, 100, 1000, 10000, 100000 } do
      local row = { (("%d"):format(n):reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", "")) }
      for _, m in ipairs { 10000000, 100000 } do
        for _, p in ipairs(odds(n, m)) do row[#row + 1] = shown(p) end
      end
      expected[#expected + 1] = "| " .. table.concat(row, " | ") .. " |"
    end
    assert.same(expected, rows)
  end)

  -- Holds n resources of n accounts, asks for others, and counts who meets a stranger, by
  -- the buckets that the library gives them.
  local styles = {
    ["user7, account7, resource7"] = function(i) return { "user" .. i % 97, "account" .. i, "resource" .. i } end,
    ["numbers"] = function(i) return { i % 5000, i, i } end,
    ["hexadecimal"] = function(i)
      local hex = ("%08x"):format(i * 40503 % 4294967296)
      return { "u" .. i % 997, hex .. "-acct", hex .. "-4f1e-8d3a" }
    end,
  }
  for style, id in pairs(styles) do
    it("are so for ids such as " .. style, function()
      local m, n, tries = 100000, 2000, 40000
      local held = { {}, {} }
      local function rows(i) return hierlock.plan({ id(i) }, { buckets = m }):rows() end
      local i, count = 0, 0
      while count < n do -- two that hold cannot be in one bucket
        i = i + 1
        assert(i < 2 * n, "the buckets are not spread")
        local r = rows(i)
        if not held[2][r[3].bucket] then
          held[1][r[2].bucket], held[2][r[3].bucket] = true, true
          count = count + 1
        end
      end
      local met = { 0, 0 }
      for j = 1, tries do
        local r = rows(1000000 + j)
        if held[2][r[3].bucket] then met[1] = met[1] + 1 end
        if held[1][r[2].bucket] then met[2] = met[2] + 1 end
      end
      local p = odds(n, m)
      for k, expected in ipairs { p[1], p[3] } do
        local seen = met[k] / tries
        assert.is_true(math.abs(seen - expected) < 0.15 * expected, ("%s: %f, not %f"):format(k, seen, expected))
      end
    end)
  end
end)

-- ---------------------------------------------------- SQL, on each server

support.each_server(function(store)
  describe("the SQL of the pages for operators", function()
    local DATABASE = "shop"
    local root, dsn

    local function clean()
      root:query("DROP DATABASE IF EXISTS " .. DATABASE)
      root:query("DROP USER IF EXISTS app@'%'")
    end

    setup(function()
      root = store.root()
      if not root then return end
      clean()
      root:query("CREATE DATABASE " .. DATABASE)
      root:query("USE " .. DATABASE)
      support.provision(root, "hier_lock_buckets", 100)
      dsn = store.bare_dsn:gsub("//.-@", "//app:secret@"):gsub("/[^/]*$", "/" .. DATABASE)
    end)
    teardown(function()
      if root then clean() end
    end)

    local function blocks(page, section)
      local found, within = {}, false
      local _, code = parts(page)
      local number = 0
      for line in lines(read_file(page)) do
        number = number + 1
        local heading = line:match("^## (.*)$")
        if heading then within = heading == section end
        for _, block in ipairs(code) do
          local language = " " .. block.language .. " "
          if within and block.line == number and language:find(" " .. store.dialect .. " ", 1, true) then
            found[#found + 1] = block
          end
        end
      end
      return found
    end

    local function execute(page, section)
      local results = {}
      for _, block in ipairs(blocks(page, section)) do
        for statement in (block.text .. "\n"):gmatch("(.-);\n") do
          results[#results + 1] = root:query(statement)
        end
      end
      assert.is_true(#results > 0, "no SQL in " .. page .. ": " .. section)
      return results
    end

    it("gives a user what it needs, to lock and to see, and no more", function()
      if not root then pending("no administrator here") end
      local opened = {}
      finally(function() for _, manager in ipairs(opened) do manager:close() end end)
      local function open()
        opened[#opened + 1] = assert(hierlock.open(dsn, { buckets = 100 }))
        return opened[#opened]
      end
      execute("docs/operations.md", "Privileges")
      local manager = open()
      local handle = assert(manager:acquire({ "u1", "a1" }, { label = "a label" }))
      local other = open()
      local holders = assert(other:holders { "u1" })
      assert.equal("a label", holders[1] and holders[1].label)
      local err = support.told(function() return other:acquire({ "u1" }, { timeout = 0 }) end)
      assert.equal("u1/a1", err.holders[1].path)

      local shown = execute("docs/monitoring.md", "From the server")
      assert.truthy(shown[1][1][4]:find("u1/a1", 1, true))
      assert.is_true(#execute("docs/failover.md", "Fail-over")[1] >= 1)
      handle:release { confirm = true }

      local connection = support.sql_connection(dsn)
      for _, statement in ipairs { "INSERT INTO hier_lock_buckets VALUES (9,9)", "DELETE FROM hier_lock_buckets",
                                   "DELETE FROM hier_lock_meta", "SELECT * FROM mysql.user" } do
        assert.is_nil((connection:try(statement)), statement)
      end
      connection:close()
    end)

    it("counts the rows of the table", function()
      if not root then pending("no administrator here") end
      for level, row in ipairs(execute("docs/operations.md", "The table")[1]) do
        assert.same({ level - 1, 100, 0, 99 }, { tonumber(row[1]), tonumber(row[2]), tonumber(row[3]), tonumber(row[4]) })
      end
    end)

    it("switches read_only and alters the table, with a limit", function()
      if not root then pending("no administrator here") end
      finally(function() root:query("SET GLOBAL read_only = 0") end)
      execute("docs/failover.md", "Backups, ALTER, read_only")
    end)
  end)
end)
