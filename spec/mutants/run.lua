-- Changes one thing in one line, chosen at random, and looks whether a check fails: a comparison, a constant, an
-- operator, a condition, or a statement that is left out. spec/planted holds the bugs that its authors thought of;
-- this program finds the lines that no check looks at.
--
--   lua5.4 spec/mutants/run.lua N SEED [FILE…]      as `make mutants` runs it
--
-- N mutants of the files that git knows below csrc and lua, or of FILE… only. SEED repeats the choice. The program
-- works in a copy of the tree and uses the servers that the environment names. The program prints a line for
-- each mutant, the rate of each area, and the diff of each survivor. `spec/mutants/equivalent` lists survivors that
-- change nothing. A check is a C test or a spec file of the table below. Without a mutant each check must pass; with
-- one it finds the mutant when it fails, crashes, or needs three times as long as before: twice, as a busy machine
-- fails once.

local checks = dofile("spec/mutants/checks.lua")
local work = assert(os.getenv("MUTANTS_WORK"), "make mutants sets MUTANTS_WORK")
local lua = os.getenv("LUA") or "lua5.4"

local function read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read("a")
end

local function write(path, text)
  local file <close> = assert(io.open(path, "wb"))
  assert(file:write(text))
end

local function lines_of(command)
  local pipe <close> = assert(io.popen(command))
  local lines = {}
  for line in pipe:lines() do lines[#lines + 1] = line end
  return lines
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Runs a command in the copy. Returns whether it succeeded and how many seconds it took.
local function run(command, limit)
  local began = os.time()
  local ok = os.execute(("cd %s && timeout --kill-after=5 %d %s >%s 2>&1 </dev/null"):format(
    quoted(work .. "/tree"), limit, command, quoted(work .. "/log")))
  return ok == true, os.time() - began
end

-- ------------------------------------------------------------------ changes

-- {pattern, what stands there instead}
local function rules(own)
  for _, rule in ipairs {
    { "==", own.unequal }, { own.unequal, "==" }, { " <= ", " < " }, { " >= ", " > " }, { " < ", " <= " }, { " > ", " >= " },
    { " %+ ", " - " }, { " %- ", " + " }, { "%f[%w_]true%f[^%w_]", "false" }, { "%f[%w_]false%f[^%w_]", "true" },
    { "%f[%w_.]%d+%f[^%w_.]", function(number)
      local value = math.tointeger(tonumber(number))
      return value and ("%d"):format(value + 1)
    end },
  } do own[#own + 1] = rule end
  return own
end
local languages = {
  c = rules { unequal = "!=", { " && ", " || " }, { " || ", " && " }, { "if %(", negates = true } },
  lua = rules { unequal = "~=", { " and ", " or " }, { " or ", " and " }, { "%f[%w_]not ", "" } },
}

local statements = {
  c = { "^%s+[%w_>.%-]+%(.*%);$", "^%s+%(void%)[%w_>.%-]+%(.*%);$", "^%s+[%w_>.%-%[%]]+ [+|&-]?= .*;$" },
  lua = { "^%s+[%w_.:]+%(.*%)$", "^%s+[%w_.%[%]]+ = [^{(]*$" },
}

-- `if (a) b` becomes `if (!(a)) b`; nil where the condition goes on in the next line.
local function negated(line)
  local before, condition, after = line:match("^(.-if )(%b())(.*)$")
  return before and before .. "(!" .. condition .. ")" .. after
end

-- Lists every changed form of a line.
local function changes(line, language)
  local found = {}
  for _, rule in ipairs(languages[language]) do
    local at = 1
    while true do
      local first, last = line:find(rule[1], at)
      if not first then break end
      local quotes = select(2, line:sub(1, first):gsub('"', ""))
      if rule.negates then
        found[#found + 1] = negated(line)
      elseif quotes % 2 == 0 then
        local new = rule[2]
        if type(new) == "function" then new = new(line:sub(first, last)) end
        if new then found[#found + 1] = line:sub(1, first - 1) .. new .. line:sub(last + 1) end
      end
      at = last + 1
    end
  end
  for _, pattern in ipairs(statements[language]) do
    if line:find(pattern) and not line:find("^%s+return") then found[#found + 1] = line:match("^%s+") .. ";" end
  end
  return found
end

-- Lists the numbers of a file's lines of code that can be changed.
local function candidates(path)
  local language = path:match("%.([ch])$") and "c" or "lua"
  local found, number, comment = {}, 0, false
  for line in (read(path) .. "\n"):gmatch("(.-)\n") do
    number = number + 1
    local begins = line:find("/%*") ~= nil
    if language == "c" and begins then comment = true end
    local code = not comment and not line:find("^%s*%-%-") and not line:find("^#") and not line:find("_Static_assert")
    if language == "c" and line:find("%*/") then comment = false end
    if code and #changes(line, language) > 0 then
      found[#found + 1] = { path = path, number = number, line = line, language = language }
    end
  end
  return found
end

-- ------------------------------------------------------------------- checks

local function area_of(path)
  for _, area in ipairs(checks) do
    if path:find(area.files) then return area end
  end
end

local function command_of(check)
  local test = check:match("^core:(.*)$")
  if test then return ("make -s test-core LUA=%s CORE_TESTS=build/%s/%s"):format(lua, lua, test) end
  local file, filter = check:match("^(%S+)%s*(.*)$")
  return ("make -s spec LUA=%s SPECS=spec/%s_spec.lua BUSTED_FLAGS=\"--no-keep-going %s\""):format(lua, file,
    filter ~= "" and "--filter='" .. filter .. "'" or "")
end

local limits = {}
-- The seconds that a check may take: three times its time without a mutant.
local function limit_of(check)
  if not limits[check] then
    local ok, took = run(command_of(check), 600)
    if not ok then ok, took = run(command_of(check), 600) end
    if not ok then
      io.stderr:write(read(work .. "/log"):sub(-3000))
      error("without a mutant this check does not pass: " .. check, 0)
    end
    limits[check] = 10 + 3 * took
  end
  return limits[check]
end

-- ------------------------------------------------------------------ mutants

local function equivalents()
  local known = {}
  for line in (read("spec/mutants/equivalent")):gmatch("[^\n]+") do
    local change = line:match("^(csrc/.-)%s+#%s") or line:match("^(lua/.-)%s+#%s")
    if change then known[change] = true end
  end
  return known
end

local function trimmed(text) return (text:gsub("^%s+", ""):gsub("%s+$", "")) end

-- Changes that line in the copy. Returns what restores the file.
local function mutate(place, new)
  local target = work .. "/tree/" .. place.path
  local text, lines = read(target), {}
  for line in text:gmatch("[^\n]*\n?") do lines[#lines + 1] = line end
  lines[place.number] = new .. "\n"
  write(target, table.concat(lines))
  return function() write(target, text) end
end

-- The check that finds the mutant in the copy; nil: no check does. "build": it cannot be built. A warning of the
-- compiler counts, as `make lint` fails by it.
local function found_by(area)
  local build = ("make -s -j2 LUA=%s CFLAGS='-O2 -g %%s' spec-built"):format(lua)
  if not run(build:format "-Werror", 300) then return run(build:format "", 300) and "a warning" or "build" end
  for _, check in ipairs(area.checks) do
    local command, limit = command_of(check), limit_of(check)
    if not run(command, limit) and not run(command, limit) then return check end
  end
end

local function main(n, seed, ...)
  io.stdout:setvbuf "line"              -- it runs for hours
  math.randomseed(seed)
  local files = #{ ... } > 0 and { ... } or lines_of("git ls-files 'csrc/*.c' 'csrc/*.lua' 'lua/*.lua'")
  local places = {}
  for _, path in ipairs(files) do
    if not area_of(path) then error("no check is named for " .. path .. " in spec/mutants/checks.lua", 0) end
    for _, place in ipairs(candidates(path)) do places[#places + 1] = place end
  end
  local known, rates, survivors, made = equivalents(), {}, {}, 0
  while made < n and #places > 0 do
    local place = table.remove(places, math.random(#places))
    local forms = changes(place.line, place.language)
    local new = forms[math.random(#forms)]
    local change = ("%s: %s => %s"):format(place.path, trimmed(place.line), trimmed(new))
    local area = area_of(place.path)
    if not known[change] and new ~= place.line then
      for _, check in ipairs(area.checks) do limit_of(check) end
      local restore = mutate(place, new)
      local check = found_by(area)
      restore()
      if check ~= "build" then
        made = made + 1
        local rate = rates[area.name] or { found = 0, all = 0 }
        rates[area.name] = rate
        rate.all = rate.all + 1
        if check then rate.found = rate.found + 1 else survivors[#survivors + 1] = { place = place, change = change } end
        print(("%3d/%d  %-9s %s:%d  %s"):format(made, n, check and "found" or "SURVIVES", place.path, place.number,
          check or change))
      end
    end
  end
  print()
  for _, survivor in ipairs(survivors) do print(survivor.place.path .. ":" .. survivor.place.number .. "\n  " .. survivor.change) end
  local found = 0
  for _, area in ipairs(checks) do
    local rate = rates[area.name]
    if rate then
      found = found + rate.found
      print(("%-12s %d of %d"):format(area.name, rate.found, rate.all))
    end
  end
  print(("%d found, %d survive, SEED=%d"):format(found, #survivors, seed))
end

main(math.tointeger(tonumber(arg[1])), math.tointeger(tonumber(arg[2])), table.unpack(arg, 3))
