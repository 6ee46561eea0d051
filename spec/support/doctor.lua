--- What the specs of `hierlock doctor` share: they examine a store, and obey the lines that the doctor prints.

local assert = require "luassert"
local json = require "dkjson"
local program = require "spec.support.command"
local uv = require "luv"

local run, assert_status = program.run, program.assert_status

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

-- Obeys the lines as an administrator: statements by sql(line), commands by the shell. Lines in words are left to
-- the spec, but for a server's options: restart(options) where they want one. Returns how many lines there were, and
-- the options.
function doctor.follow(dsn, finding, sql, restart)
  local done, options = 0, {}
  for _, line in ipairs(finding.mend) do
    if line:find ";$" then
      sql(line)
    elseif line:find "^hierlock " then
      assert_status(0, program.run_line(dsn, line))
    elseif line:find "in my.cnf, below %[mysqld%]" then
      options[#options + 1] = line:gsub("^.-: ", "--"):gsub(" = ", "=")
    elseif line:find "^on the command line .*: %-c " then
      options[#options + 1] = line:match ": (%-c .*)"
    elseif line:find "^then restart the server" and restart then
      restart(table.concat(options, " "))
    elseif line:find "^redis%-cli " then
      -- The command asks for the password of the user that it names.
      local password = line:find(" --user ", 1, true) and dsn:match "//[^:/]*:([^@]*)@" or "rootpassword"
      doctor.shell(("printf '%%s\\n' '%s' | %s"):format(password, line))
    elseif line:find "^chmod " or line:find "^chown " or line:find "^rm " or line:find "^install " or line:find "^sqlite3 " then
      doctor.shell(line)
    else
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
