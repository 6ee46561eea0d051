-- Changes one thing in one line, chosen at random, and looks whether a check fails: a comparison, a constant, an
-- operator, a condition, or a statement that is left out. spec/planted holds the bugs that its authors thought of;
-- this program finds the lines that no check looks at.
--
--   lua5.4 spec/mutants/run.lua N SEED FILE…      as `make mutants` runs it
--
-- N mutants of the C and Lua files among FILE…, chosen by SEED. The program works in a copy of the tree and uses the
-- servers that the environment names. The program prints a line for each mutant, the rate of each area, and each
-- survivor. `spec/mutants/equivalent` lists survivors that change nothing. A mutant that is compiled to the same code
-- is not counted either.
--
-- A check is a C test or a spec file of spec/mutants/checks.lua. A check finds the mutant when it fails, crashes, or
-- needs three times as long as before: twice, as a busy machine fails once. Then the check must pass without a mutant,
-- in a second copy of the tree, or it is left out. A check that runs no spec would pass for ever: the program ends with
-- an error that has its command. The check with the fewest seconds for each mutant that it can be
-- expected to find runs first: MUTANTS_NOTES says how long each check took and what it found. MUTANTS_RESULTS keeps
-- each result, so that a run with the same SEED goes on after a break.
--
-- MUTANTS_LIMIT: after so many seconds the checks of a mutant are broken off, and it is printed as undecided. A later
-- run with a higher limit, or none, tries its checks again.

local checks = dofile("spec/mutants/checks.lua")
local work = assert(os.getenv("MUTANTS_WORK"), "make mutants sets MUTANTS_WORK")
local notes_path, results_path = assert(os.getenv("MUTANTS_NOTES")), assert(os.getenv("MUTANTS_RESULTS"))
local lua = os.getenv("LUA") or "lua5.4"
local most_seconds = tonumber(os.getenv("MUTANTS_LIMIT") or "") or math.huge

local function read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read("a")
end

local function write(path, text)
  local file <close> = assert(io.open(path, "wb"))
  assert(file:write(text))
end

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Appends to a file, or makes it.
local function append(path, text)
  local file <close> = assert(io.open(path, "ab"))
  assert(file:write(text, "\n"))
end

-- The lines of a file that may not be there.
local function lines_in(path)
  local file <close> = io.open(path, "rb")
  local lines = {}
  if file then
    for line in file:lines() do lines[#lines + 1] = line end
  end
  return lines
end

local clock = require "luv".hrtime
local variables = { "LUA_PATH", "LUA_CPATH" }

-- Runs a command in that copy: "tree", which has the mutant, or "clean". Returns whether it succeeded and how many
-- seconds it took.
local function run(command, limit, copy)
  local began, environment = clock(), ""
  copy = copy or "tree"
  for _, name in ipairs(variables) do
    environment = environment .. name .. "=" .. quoted((os.getenv(name):gsub("/tree/", "/" .. copy .. "/"))) .. " "
  end
  local ok = os.execute(("cd %s && %s timeout --kill-after=5 %d %s >%s 2>&1 </dev/null"):format(
    quoted(work .. "/" .. copy), environment, math.ceil(limit), command, quoted(work .. "/log")))
  return ok == true, (clock() - began) / 1e9
end

-- Runs a check as `run` does. A check that reports no success of a spec or test has not succeeded. Memory that is freed
-- is overwritten at once: a program that goes on to use it mostly crashes, as no sanitizer looks. Returns that the check
-- succeeded, the seconds, and whether it ended well and had run nothing.
local function try(command, limit, copy)
  local ok, took = run("env MALLOC_PERTURB_=165 " .. command, limit, copy)
  local text = read(work .. "/log")
  local successes = tonumber(text:match("(%d+) success") or text:match("%[  PASSED  %] (%d+) test")) or 0
  return ok and successes > 0, took, ok and successes == 0
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
  local test, part = check:match("^core:(%S+)%s*(.*)$")
  if test then return ("sh -c 'make -s build/%s/%s LUA=%s && exec build/%s/%s %s'"):format(lua, test, lua, lua, test, part) end
  local first, with, file, filter = "", lua, check:match("^(%S+)%s*(.*)$")
  if file:find("^luajit:") then
    first, file = "make -s LUA=luajit all && ", file:sub(#"luajit:" + 1)
    with = 'env LUA_CPATH="$PWD/build/luajit/?.so;;" HIERLOCK_LUA=luajit luajit'
  end
  return ("sh -c '%srm -rf %s/specs && mkdir %s/specs && HIERLOCK_SPEC_DIRECTORY=%s/specs exec %s /usr/bin/busted " ..
    "--no-auto-insulate --helper=spec/support/leftovers.lua --no-keep-going %s spec/%s_spec.lua'"):format(first, work, work, work,
    with, filter ~= "" and '--filter="' .. filter .. '"' or "", file)
end

-- By area and check: how many mutants it has met and found; by check: the seconds that it took when it passed.
local met, found, seconds = {}, {}, {}

local function note(area, check, took, finds)
  local key = area .. "\t" .. check
  met[key] = (met[key] or 0) + 1
  if finds then found[key] = (found[key] or 0) + 1 else seconds[check] = took end
end

for _, line in ipairs(lines_in(notes_path)) do
  local area, check, took, finds = line:match("^(.-)\t(.-)\t(.-)\t(.-)$")
  note(area, check, tonumber(took), finds == "found")
end

local function write_note(area, check, took, finds)
  note(area, check, took, finds)
  append(notes_path, ("%s\t%s\t%.1f\t%s"):format(area, check, took, finds and "found" or "passed"))
end

-- The checks of an area in the order in which they are expected to find a mutant soonest.
local function ordered(area)
  local list, cost = {}, {}
  for at, check in ipairs(area.checks) do
    local key = area.name .. "\t" .. check
    list[at] = check
    cost[check] = ((seconds[check] or 5 + at) + 0.3) * ((met[key] or 0) + 2) / ((found[key] or 0) + 0.5)
  end
  table.sort(list, function(a, b) return cost[a] < cost[b] end)
  return list
end

-- Whether a check passes without a mutant; false: it is left out of this run. Said of each once in a run.
local clean = {}
local function passes(check)
  if clean[check] == nil then
    local command = command_of(check)
    local ok, took, idle = try(command, 600, "clean")
    if not ok and not idle then ok, took, idle = try(command, 600, "clean") end
    if idle then error(("this check runs no spec: %s\n%s"):format(check, command), 0) end
    clean[check] = ok
    if ok then
      seconds[check] = took
    else
      io.stderr:write(read(work .. "/log"):sub(-3000), "\nwithout a mutant this check does not pass: ", check, "\n")
    end
  end
  return clean[check]
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

-- Changes that line in the copy. Returns what restores the file and its object.
local function mutate(place, new)
  local target = work .. "/tree/" .. place.path
  local text, lines = read(target), {}
  for line in text:gmatch("[^\n]*\n?") do lines[#lines + 1] = line end
  lines[place.number] = new .. "\n"
  write(target, table.concat(lines))
  return function()
    write(target, text)
    -- Newer than the source, so that it is not compiled again.
    if place.object then write(work .. "/tree/" .. place.object, read(work .. "/clean/" .. place.object)) end
  end, table.concat(lines), text
end

local BUILD = "make -s LUA=" .. lua .. " CFLAGS='-O2 -g %s' %s"

-- Builds the mutant in the copy. Returns nil, or what there is to say of it without a check: "build", as it cannot be
-- built, "same", as the same code comes of it, or "a warning" of the compiler, as `make lint` fails by one.
local function built(place, mutant, text)
  if place.language == "lua" then
    local changed = load(mutant, "=", "t")
    if not changed then return "build" end
    if string.dump(changed, true) == string.dump(load(text, "=", "t"), true) then return "same" end
  else
    if not run(BUILD:format("-Werror", place.object), 300) then
      return run(BUILD:format("", place.object), 300) and "a warning" or "build"
    end
    local stripped = quoted(work) .. "/$copy.o"
    if run(("bash -c 'for copy in tree clean; do objcopy --strip-debug ../$copy/%s %s; done; cmp %s/tree.o %s/clean.o'"):format(
        place.object, stripped, work, work), 60) then return "same" end
  end
  -- Whatever links it. The modules of Lua are read as they are.
  if place.path:find("^csrc/") and not run(BUILD:format("-Werror", "all"), 300) then return "build" end
end

-- The check that finds the mutant in the copy; nil: no check does; "undecided": its time was up before the last check.
local function found_by(area)
  local began = clock()
  for _, check in ipairs(ordered(area)) do
    if (clock() - began) / 1e9 > most_seconds then return "undecided" end
    if clean[check] ~= false then
      local command, limit = command_of(check), seconds[check] and 10 + 3 * seconds[check] or 300
      local ok, took = try(command, limit)
      local finds = not ok and not try(command, limit) and passes(check)
      if finds or ok then write_note(area.name, check, took, finds) end
      if finds then return check end
    end
  end
end

local function main(n, seed, ...)
  io.stdout:setvbuf "line"              -- it runs for hours
  math.randomseed(seed)
  local places = {}
  for _, path in ipairs { ... } do
    if path:find("%.c$") or path:find("%.lua$") then
      if not area_of(path) then error("no check is named for " .. path .. " in spec/mutants/checks.lua", 0) end
      for _, place in ipairs(candidates(path)) do
        place.object = path:find("%.c$") and path:gsub("^csrc", "build/" .. lua .. "/obj"):gsub("%.c$", ".o") or nil
        places[#places + 1] = place
      end
    end
  end
  local results = {}
  for _, line in ipairs(lines_in(results_path)) do
    local change, result = line:match("^(.*)\t(.-)$")
    results[change] = result
  end
  local known, rates, survivors, made = equivalents(), {}, {}, 0
  while made < n and #places > 0 do
    local place = table.remove(places, math.random(#places))
    local forms = changes(place.line, place.language)
    local new = forms[math.random(#forms)]
    local change = ("%s: %s => %s"):format(place.path, trimmed(place.line), trimmed(new))
    local area = area_of(place.path)
    local rate = rates[area.name] or { found = 0, all = 0, same = 0 }
    rates[area.name] = rate
    if known[change] then
      rate.same = rate.same + 1
    elseif new ~= place.line then
      local key, began = place.number .. "\t" .. change, clock()
      local result = results[key]
      if not result or result == "undecided" and most_seconds == math.huge then
        local restore, mutant, text = mutate(place, new)
        result = built(place, mutant, text) or found_by(area) or "SURVIVES"
        restore()
        append(results_path, key .. "\t" .. result)
      end
      if result == "same" then
        rate.same = rate.same + 1
      elseif result ~= "build" then
        made = made + 1
        rate.all = rate.all + 1
        local survives = result == "SURVIVES" or result == "undecided"
        if survives then survivors[#survivors + 1] = { place = place, change = change } else rate.found = rate.found + 1 end
        print(("%3d/%d  %-9s %s:%d  %s  %.0f s"):format(made, n, survives and result or "found", place.path, place.number,
          survives and change or result, (clock() - began) / 1e9))
      end
    end
  end
  print()
  for _, survivor in ipairs(survivors) do print(survivor.place.path .. ":" .. survivor.place.number .. "\n  " .. survivor.change) end
  local total = 0
  for _, area in ipairs(checks) do
    local rate = rates[area.name]
    if rate then
      total = total + rate.found
      print(("%-12s %d of %d, and %d that change nothing"):format(area.name, rate.found, rate.all, rate.same))
      rates[area.name] = nil
    end
  end
  for check, passed in pairs(clean) do
    if not passed then print("left out, as it fails without a mutant: " .. check) end
  end
  print(("%d found, %d survive, SEED=%d"):format(total, #survivors, seed))
end

main(math.tointeger(tonumber(arg[1])), math.tointeger(tonumber(arg[2])), table.unpack(arg, 3))
