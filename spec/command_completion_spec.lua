--- The completion of the command line in a shell, run in that shell.

local program = require "spec.support.command"
local support = require "spec.support"

local run, assert_status = program.run, program.assert_status

local file

before_each(function() file = os.tmpname() end)
after_each(function()
  program.close()
  os.execute(("rm -rf %s %s.d"):format(file, file))
end)

local function write(text)
  local opened = assert(io.open(file, "w"))
  opened:write(text)
  opened:close()
end

local function output(command, ...)
  local pipe = io.popen(("unset LD_PRELOAD; " .. command):format(...))
  local text = pipe:read "*a"
  pipe:close()
  return text
end

describe("completion", function()
  it("in bash knows subcommands and their options, and asks no server", function()
    write(assert_status(0, run("mysql://u:sEcReT@127.0.0.1:1/d", "--completion", "bash")).out)
    local function completed(line, last)
      return output([[bash -c 'source %s; COMP_WORDS=(%s "%s"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _hierlock; echo "${COMPREPLY[@]}"']],
        file, line, last)
    end
    assert.equal("doctor\n", completed("hierlock", "doc"))
    assert.equal("revoke\n", completed("hierlock", "rev"))
    assert.equal("--pool-size --processes\n", completed("hierlock doctor", "--p"))
    assert.equal("--html\n", completed("hierlock matrix", "--h" .. "t"))
  end)

  it("in zsh knows them, too, and shows nothing of the environment", function()
    local said = assert_status(0, run("mysql://u:sEcReT@127.0.0.1:1/d", "--completion", "zsh")).out
    write(said)
    assert.equal("", output("zsh -n %s 2>&1", file))
    assert.is_nil(said:find("sEcReT", 1, true))
    assert.is_nil(said:find "[^\\]%$HIERLOCK") -- the shell would put its value there
    -- zsh completes on a terminal only, with functions that it finds in a directory.
    output("mkdir %s.d && cp %s %s.d/_hierlock", file, file, file)
    local opened = assert(io.open(file, "w"))
    opened:write(([==[
      zmodload zsh/zpty
      zpty z zsh -f -i
      zpty -w z "PS1='>'; fpath=(%s.d \$fpath); autoload -Uz compinit && compinit -u -D; echo re''ady"
      zpty -r z said '*ready*'
      zpty -w -n z $'hierlock bench --po\t'
      zpty -r z said '*--pool-size*' && echo completed
      zpty -d z
    ]==]):format(file))
    opened:close()
    local text = output("timeout %d zsh -f %s 2>&1", support.DEADLINE, file)
    assert.matches("completed\n", text, 1, true)
  end)

  it("is refused for another shell, with 64", function() assert_status(64, run("null:", "--completion", "csh")) end)
end)
