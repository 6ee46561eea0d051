--- What the specs of `hierlock doctor` share: they examine a store, and obey the lines that the doctor prints.

local assert = require "luassert"
local json = require "dkjson"
local program = require "spec.support.command"
local uv = require "luv"

local run, assert_status = program.run, program.assert_status
local unpack = table.unpack or unpack -- luacheck: ignore

local doctor = {}

local undo = {}

--- Undoes what a spec's at_end said: after each spec.
function doctor.clean_up()
  program.close()
  for i = #undo, 1, -1 do undo[i]() end
  undo = {}
end

function doctor.at_end(fn) undo[#undo + 1] = fn end

-- Returns the doctor's findings by name, and the exit status.
function doctor.findings_of(said)
  local object, _, err = json.decode(said.out)
  assert.is_nil(err, said.out .. said.err)
  local found = { verdict = object.verdict }
  for i, finding in ipairs(object.findings) do
    assert.is_nil(found[finding.check], finding.check .. " comes twice")
    assert.truthy(#finding.why > 0 and #finding.found > 0, finding.check)
    assert.is_true(finding.status == "ok" or finding.mend[1] ~= nil or finding.status == "unseen", finding.check .. " has nothing that mends it")
    found[finding.check], found[i] = finding, finding
  end
  assert.equal(found.verdict == "wrong" and 1 or 0, said.status, said.out .. said.err)
  return found
end

function doctor.examine(dsn, ...) return doctor.findings_of(run(dsn, "doctor", "--json", ...)) end

function doctor.status_of(found, check) return found[check] and found[check].status or "absent" end

function doctor.assert_finding(status, found, check)
  assert.equal(status, doctor.status_of(found, check), check .. ": " .. json.encode(found[check] or found))
end

function doctor.shell(line)
  local ok = os.execute("unset LD_PRELOAD; exec >/dev/null 2>&1; " .. line)
  assert(ok == true or ok == 0, line)
end

-- ------------------------------------------------- which mends there are

local SETS = { set = true, set_anew = true, alter = true }
-- Lines in words that say a setting, and where it is to be made.
local IN_WORDS = { "my%.cnf", "^on the command line", "^take %%s out of", "^CONFIG REWRITE$", "start memcached with" }
-- Commands of a shell that mend. Others only show.
local SHELL = { "^chmod ", "^chown ", "^install %-d ", "^rm ", "^sqlite3 " }

local function finds(text, patterns)
  for _, pattern in ipairs(patterns) do if text:find(pattern) then return true end end
  return false
end

local function is_line(text)
  return finds(text, IN_WORDS) or finds(text, SHELL) or text:find "^%u%u+ .*;" ~= nil
end

-- The texts in double quotes.
local function literals(code) return code:gmatch '"([^"\n]*)"' end

-- Every line that an examination can print and that can be obeyed literally, by its text in the code. A setting that
-- several lines make is "set NAME", or "set name, VALUE" where the code has names in a variable.
-- kind: a file of lua/hierlock/command/examine.
local function printable(kind, found)
  local file = assert(io.open(("lua/hierlock/command/examine/%s.lua"):format(kind)))
  local code = ("\n" .. file:read "*a"):gsub("\n%s*%-%-[^\n]*", ""):gsub('"%s*%.%.%s*"', "")
  file:close()
  for text in literals(code) do if is_line(text) then found[text] = true end end
  for name, setting, to in code:gmatch "%f[%w_]([%w_]+)%(self, ([^,\n]+), ([^\n]*)" do
    local names = {}
    for text in literals(setting) do names[#names + 1] = text end
    if SETS[name] and names[1] then
      found["set " .. table.concat(names, "|")] = true
    elseif SETS[name] and to:find '^"' then
      found["set name, " .. to:match '^"[^"]*"'] = true
    end
  end
  for name, before in pairs { commands = "", config = "CONFIG SET " } do
    for arguments in code:gmatch("%f[%w_]" .. name .. "(%b())") do
      if arguments:find "^%(self, " then
        for text in literals(arguments) do found[before .. text] = true end
      end
    end
  end
  for words in code:gmatch 'subject%.command *([("][^\n]*)' do
    for text in literals(words:match "^%b()" or words:match '^"[^"]*"') do found["hierlock " .. text] = true end
  end
end

-- The pattern of a text that string.format fills in, without what a line says to its reader.
local function pattern_of(text)
  local pattern = text:gsub("; %-%- .*", ";"):gsub("%%[%d.]*%a", "\1"):gsub("[%^$()%%.%[%]*+?-]", "%%%0"):gsub("\1", ".*")
  return pattern:find ";$" and "^" .. pattern .. "$" or pattern
end

-- Whether the line sets one of the names, which "|" separates.
local function sets(line, names)
  for name in names:gmatch "[^|]+" do
    if line:find("%f[%w_]" .. name .. " = ") and line:find "^%u+ " or line:find("-c " .. name .. "=", 1, true) then return true end
  end
  return false
end

-- The lines that this spec has obeyed.
local obeyed = {}

local function has_obeyed(key, name)
  local setting = name ~= "" and name or key:match "^set ([%w_|]+)$"
  for _, line in ipairs(obeyed) do
    if setting and sets(line, setting) then return true end
    if not setting and key:find "^hierlock " and line == key then return true end
    if not setting and not key:find "^hierlock " and line:find(pattern_of(key)) then return true end
  end
  return false
end

--- Says which spec obeys which of the lines that the doctor can print for a kind of store. kinds: one or more files of
-- lua/hierlock/command/examine, separated by spaces. elsewhere: lines that other specs obey, with a reason. Behind
-- it: for each `describe` of its own, which busted does not enter where a filter leaves it out, the keys that are claimed
-- there alone.
-- Returns obeying(keys, fn), a function for `it`: calls fn, which must have obeyed these lines then. A key is a text as
-- in the code, or { "set name, VALUE", NAME… }. Also returns all_obeyed(), to be called when all specs have been
-- declared: fails when no spec has the key of a line, or when no line has a spec's key. So neither the order of specs
-- matters nor which of them run.
function doctor.obedience(kinds, elsewhere, ...)
  local lines, claimed, inner = {}, {}, { ... }
  for kind in kinds:gmatch "%S+" do printable(kind, lines) end
  local function obeying(keys, fn)
    for _, key in ipairs(keys) do claimed[type(key) == "table" and key[1] or key] = true end
    return function(...)
      obeyed = {}
      fn(...)
      for _, key in ipairs(keys) do
        local text, names = key, { "" }
        if type(key) == "table" then text, names = key[1], { unpack(key, 2) } end
        for _, name in ipairs(names) do
          assert(has_obeyed(text, name), ("%s %s: not obeyed, but\n%s"):format(text, name, table.concat(obeyed, "\n")))
        end
      end
    end
  end
  local function all_obeyed()
    local wrong = {}
    for _, keys in ipairs(inner) do
      local entered = false
      for _, key in ipairs(keys) do entered = entered or claimed[key] end
      for _, key in ipairs(entered and {} or keys) do claimed[key] = true end
    end
    for key in pairs(lines) do
      if not claimed[key] and not elsewhere[key] then wrong[#wrong + 1] = "no spec obeys: " .. key end
    end
    for key in pairs(claimed) do
      if not lines[key] then wrong[#wrong + 1] = "is never printed: " .. key end
    end
    for key in pairs(elsewhere) do
      if not lines[key] or claimed[key] then wrong[#wrong + 1] = "is no line that others obey: " .. key end
    end
    table.sort(wrong)
    assert(not wrong[1], table.concat(wrong, "\n"))
  end
  return obeying, all_obeyed
end

-- Obeys the lines as an administrator: statements by sql(line), commands by the shell. Lines in words are left to
-- the spec, but for a server's options: restart(options) where they want one. Returns how many lines there were, and
-- the options.
function doctor.follow(dsn, finding, sql, restart)
  local done, options = 0, {}
  for _, line in ipairs(finding.mend) do
    obeyed[#obeyed + 1] = line
    if line:find ";$" then
      sql(line)
    elseif line:find "^hierlock " then
      assert_status(0, program.run_line(dsn, line))
    elseif line:find "in my.cnf, below %[mysqld%]" then
      options[#options + 1] = line:gsub("^.-: ", "--"):gsub(" = ", "=")
    elseif line:find "^on the command line .*: %-c " then
      options[#options + 1] = line:match ": (%-c .*)"
    elseif line:find "start memcached with" then
      options[#options + 1] = line:match "start memcached with (.*)" -- without: no option
    elseif line:find "^take %S+ out of PGOPTIONS$" then
      uv.os_unsetenv "PGOPTIONS"
    elseif line:find "^then restart the server" and restart then
      restart(table.concat(options, " "))
    elseif line:find "^redis%-cli " then
      -- The command asks for the password of the user that it names.
      local password = line:find(" --user ", 1, true) and dsn:match "//[^:/]*:([^@]*)@" or "rootpassword"
      doctor.shell(("printf '%%s\\n' '%s' | %s"):format(password, line))
    elseif finds(line, SHELL) then
      doctor.shell(line)
    else
      obeyed[#obeyed] = nil
      done = done - 1
    end
    done = done + 1
  end
  return done, table.concat(options, " ")
end

-- Examines a store as another user, which needs root.
function doctor.examined_by(user, at, options, limits)
  -- A copy of the command, where everybody may read it.
  local out, copy = os.tmpname(), os.tmpname()
  doctor.at_end(function() os.remove(out) doctor.shell("rm -r " .. copy) end)
  local modules
  for place in package.cpath:gmatch "([^;]+)/%?%.so" do
    if not modules and uv.fs_stat(place .. "/hierlock/core.so") then modules = place end
  end
  doctor.shell(("rm %s; mkdir %s && cp -r lua '%s/hierlock' %s && chmod -R a+rX %s"):format(copy, copy, modules, copy, copy))
  doctor.shell("chmod 0644 " .. out)
  local words = (limits or "true") .. ("; cd %s; HIERLOCK_DSN='%s' LUA_PATH='lua/?.lua;lua/?/init.lua;;' LUA_CPATH='?.so;;' " ..
    "setpriv --reuid=%d --regid=65534 --clear-groups %s lua/hierlock/command/main.lua doctor --json %s >%s; echo $? >>%s")
    :format(copy, at, user, program.interpreter, options or "", out, out)
  os.execute(words)
  local file = assert(io.open(out))
  local text = file:read "*a"
  file:close()
  return doctor.findings_of { out = text:gsub("%d+\n$", ""), err = "", status = tonumber(text:match "(%d+)\n$") }
end

return doctor
