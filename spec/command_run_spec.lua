--- `hierlock run`, as an operator and his crontab run it: what the command gets, what comes of its end, of signals, of
-- lost locks, and of the death of `hierlock` itself.
-- Parts: stores

local uv = require "luv"
local program = require "spec.support.command"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local run, start, assert_status = program.run, program.start, program.assert_status
local unpack = table.unpack or unpack -- luacheck: ignore

local NOT_ACQUIRED, LOST = 75, 76
local U1, A1, R1 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }
-- Says that it runs, and its number; told to end, it says so, and ends or stays.
local OBEYS = [[trap 'echo told; exit 5' TERM; echo "as $$ here"; while :; do sleep 0.02; done]]
local STAYS = [[trap 'echo told' TERM; echo "as $$ here"; while :; do sleep 0.02; done]]

after_each(program.close)

local function runs(self) return self.until_true(function() return self.out:match "as (%d+) here" end, "the command") end
-- Whether a process runs: a zombie does not.
local function is_there(pid)
  local file = io.open("/proc/" .. pid .. "/stat")
  local state = file and file:read("*a"):match "^%d+ %(.*%) (%a)"
  if file then file:close() end
  return state ~= nil and state ~= "Z"
end

describe("the command line of run", function()
  it("is refused with 64 and a line when it is wrong, before anything is connected to", function()
    for _, arguments in ipairs {
      {}, { "u1" }, { "u1", "true" }, { "--", "true" }, { "u1", "--" }, { "u1//r1", "--", "true" }, { "u%zz", "--", "true" },
      { "-t", "x", "u1", "--", "true" }, { "--timeout=-1", "u1", "--", "true" }, { "-t", "nan", "u1", "--", "true" },
      { "--ttl", "0", "u1", "--", "true" }, { "--grace=-1", "u1", "--", "true" }, { "--grace", "inf", "u1", "--", "true" }, { "-E", "256", "u1", "--", "true" },
      { "-E", "1.5", "u1", "--", "true" }, { "--ttl", "4", "--grace", "3", "u1", "--", "true" }, { "--tll", "4", "u1", "--", "true" },
      { "--dsn", "mysql://u:sEcReT@127.0.0.1:1/d", "u1", "--", "true" },
    } do
      local said = assert_status(64, run("mysql://u@127.0.0.1:1/d", "run", unpack(arguments)))
      assert.matches("\nhierlock: %C+\n", "\n" .. said.err)
      assert.equal("", said.out)
    end
  end)

  it("tells what cannot be reached by 69", function()
    local said = assert_status(69, run("mysql://u@127.0.0.1:1/d", "run", "u1", "--", "echo", "ran"))
    assert.equal("", said.out)
  end)

  it("tells what this user may not use by 77", function()
    if uv.getuid() ~= 0 then return pending "needs root, for a directory of another user" end
    local directory = assert(uv.fs_mkdtemp "/dev/shm/hierlock-spec-XXXXXX")
    finally(function() os.execute("rm -rf " .. directory) end)
    assert(uv.fs_chown(directory, 65534, 65534))
    -- As root who may do no more than others: another user may be kept from reading the program itself.
    for _, dsn in ipairs { "file:" .. directory, "file:" .. directory .. "/d", "sqlite:" .. directory .. "/db" } do
      local pipe = assert(io.popen(("HIERLOCK_DSN=%s setpriv --bounding-set=-all %s lua/hierlock/command/main.lua run u1 -- echo ran 2>&1; echo =$?")
        :format(dsn, program.interpreter)))
      assert.matches("^hierlock: %C+\n=77\n$", pipe:read "*a")
      pipe:close()
    end
  end)

  it("keeps $HIERLOCK_DSN from the command, and leaves what takes its store from there no other", function()
    local show = [[echo "<$HIERLOCK_DSN>"; "$@"; echo =$?]]
    local said = assert_status(0, run("null:", "run", "u1", "--", "sh", "-c", show, "sh", program.interpreter,
      "lua/hierlock/command/main.lua", "run", "u2", "--", "true"))
    assert.equal("<withheld-by-hierlock-run://>\n=64\n", said.out)
    assert.equal("<null:>\n=0\n", assert_status(0, run("null:", "run", "--keep-dsn", "u1", "--", "sh", "-c", show)).out)
    assert.equal("<>\n=0\n", assert_status(0, run(nil, "run", "--dsn", "null:", "u1", "--", "sh", "-c", show)).out)
  end)

  it("says to root that the locks of `file:` are root's alone; of a directory's nothing", function()
    local directory = assert(uv.fs_mkdtemp "/dev/shm/hierlock-spec-XXXXXX")
    finally(function() os.execute("rm -rf " .. directory) end)
    local said = assert_status(0, run("file:", "run", "u1", "--", "true")).err
    assert.equal(uv.getuid() == 0, said:match "^hierlock: the locks are root's alone, in /dev/shm/hierlock%-0: %C+\n$" ~= nil, said)
    assert.equal("", assert_status(0, run("file:" .. directory, "run", "u1", "--", "true")).err)
  end)

  it("gives the command each descriptor that it was given itself", function()
    local file = os.tmpname()
    finally(function() os.remove(file) end)
    local out = assert(io.open(file, "w"))
    out:write "text\n"
    out:close()
    for _, given in ipairs { { 3 }, { 4 }, { 9 }, { 3, 5, 7 }, { 3, 4, 5, 6, 7, 8 }, { 4, 5, 6, 7, 8, 9 } } do
      local reads, opens = {}, {}
      for i, number in ipairs(given) do reads[i], opens[i] = "cat <&" .. number, ("%d<%s"):format(number, file) end
      local said = program.run_line("null:", ("hierlock run u1 -- sh -c '%s' %s"):format(table.concat(reads, " && "), table.concat(opens, " ")))
      assert.equal(("text\n"):rep(#given), assert_status(0, said).out)
    end
    -- And none of its own.
    local said = program.run_line("null:", "hierlock run u1 -- sh -c 'for fd in 3 4 5 6 7 8 9; do if [ -e /dev/fd/$fd ]; then echo $fd; fi; done'")
    assert.equal("", assert_status(0, said).out)
  end)

  it("says of a signal that it cannot send", function()
    local denied = [[local process = debug.getregistry().uv_process process = process.__index or process ]] ..
      [[process.kill = function() return nil, "EPERM: operation not permitted", "EPERM" end]]
    local said = program.run_line("null:", ("export LUA_INIT='require \"luv\" %s'; hierlock run u1 -- sh -c 'kill -TERM $PPID; exit 3'"):format(denied))
    assert.equal("hierlock: cannot send the command SIGTERM: EPERM: operation not permitted\n", assert_status(3, said).err)
  end)

  it("ends at --: what follows is the command's own", function()
    local said = assert_status(0, run("null:", "run", "u1", "--", "printf", "<%s>", "--help", "-t", "--", "a b"))
    assert.equal("<--help><-t><--><a b>", said.out)
  end)
end)

support.each_store(function(plain)
  local store = support.leased(plain)
  local manager

  setup(function() store.prepare() end)
  before_each(function() manager = support.open(store, { application = "the shop" }) end)
  after_each(function()
    support.close_peers()
    manager:close()
    manager = nil
  end)

  local function under(...) return run(store.dsn, "run", ...) end
  local function begin(...)
    local self = start(store.dsn, "run", ...)
    return self, runs(self)
  end

  -- The answer to another program that asks for it now.
  local function ask(target, options)
    local all = { timeout = 0 }
    for k, v in pairs(options or {}) do all[k] = v end
    local handle, err = manager:acquire(target, all)
    if handle then assert.is_true(handle:release { confirm = true }) end
    return handle and "free" or err.code, err
  end

  local function wait_until_free(target)
    support.wait_until(function() return ask(target) == "free" end, "the release")
  end

  it("holds the locks while the command runs, and not before or after", function()
    local self, pid = begin("--label", "nightly", "u1/a1", "--", "sh", "-c", OBEYS)
    assert.equal("timeout", ask(A1))
    assert.equal("timeout", ask(R1))
    assert.equal("timeout", ask(U1))
    assert.equal("free", ask { "u1", "a2" })
    -- MariaDB shows an old picture to those who look often.
    local holder = support.wait_until(function()
      support.sleep(0.11)
      return assert(manager:holders(A1))[1]
    end, "the holder")
    assert.equal("hierlock run", holder.application)
    assert.equal("nightly", holder.label)
    assert.equal(self.pid, holder.pid)
    uv.kill(tonumber(pid), "sigterm")
    assert_status(5, self.join())
    assert.equal("free", ask(U1))
  end)

  it("gives the command its descriptors, the token and the targets, and exits as it does", function()
    local handle = assert(manager:acquire(U1))
    local before = handle.token
    assert.is_true(handle:release { confirm = true })
    local said = assert_status(3, under("u1/a%2Fb%20c", "u2", "--", "sh", "-c",
      'echo "$HIERLOCK_TOKEN $HIERLOCK_TARGET"; echo error >&2; exit 3'))
    local token, targets = said.out:match "^(%x+) (.*)\n$"
    assert.equal("u1/a%2Fb%20c u2", targets)
    assert.equal("error\n", said.err)
    assert.equal(16, #token)
    assert.is_true(token > before)
  end)

  it("exits as a shell does when the command cannot be run, or a signal ended it", function()
    assert_status(127, under("u1", "--", "no-such-command"))
    assert_status(126, under("u1", "--", "/etc/passwd"))
    assert_status(128 + 9, under("u1", "--", "sh", "-c", "kill -9 $$"))
    assert.equal("free", ask(U1))
  end)

  it("does not run the command when the locks are not granted in time", function()
    local handle = assert(manager:acquire(U1))
    for status, arguments in pairs {
      [NOT_ACQUIRED] = { "-t", "0" }, [9] = { "-t", "0.05", "-E", "9" }, [0] = { "-t", "0", "--conflict-exit-code", "0" },
    } do
      for _, word in ipairs { "u1/a1", "--", "echo", "ran" } do arguments[#arguments + 1] = word end
      local said = assert_status(status, under(unpack(arguments)))
      assert.equal("", said.out)
      assert.matches("^hierlock: u1/a1 %C+\n$", said.err)
    end
    handle:release()
  end)

  it("takes what it waits for when it is released", function()
    local handle = assert(manager:acquire(A1))
    local self = start(store.dsn, "run", "-t", "inf", "u1/a1/r1", "--", "echo", "ran")
    support.wait_for_waiters(store, A1)
    handle:release()
    assert.equal("ran\n", assert_status(0, self.join()).out)
  end)

  it("lets readers in beside each other", function()
    local one, pid = begin("--shared", "u1/a1/r1", "--", "sh", "-c", OBEYS)
    assert_status(0, under("-t", "0", "--shared", "u1/a1/r1", "--", "true"))
    assert_status(NOT_ACQUIRED, under("-t", "0", "u1/a1/r1", "--", "true"))
    uv.kill(tonumber(pid), "sigterm")
    one.join()
  end)

  it("passes signals on, and does not end before the command", function()
    for _, signal in ipairs { "hup", "usr1", "usr2", "term" } do
      local self = start(store.dsn, "run", "u1", "--", "sh", "-c",
        ("trap 'echo got %s; exit 7' %s; echo \"as $$ here\"; while :; do sleep 0.02; done"):format(signal, signal:upper()))
      runs(self)
      uv.kill(self.pid, "sig" .. signal)
      assert.matches("got " .. signal, assert_status(7, self.join()).out)
    end
    assert.equal("free", ask(U1))
  end)

  it("leaves a signal ignored that it was started to ignore, as by nohup", function()
    local self = start(store.dsn, "run", "--keep-dsn", "u1", "--", "sh", "-c", [[trap '' HUP; echo "nohup $$"; exec "$@"]], "sh",
      program.interpreter, "lua/hierlock/command/main.lua", "run", "u2", "--", "sh", "-c", OBEYS)
    local pid = runs(self)
    uv.kill(tonumber(self.out:match "nohup (%d+)"), "sighup")
    uv.kill(tonumber(pid), "sighup")
    uv.kill(tonumber(pid), "sigterm")
    assert.matches("told", assert_status(5, self.join()).out)
  end)

  it("ends with a signal that comes while it waits, and leaves nothing that waits", function()
    local handle = assert(manager:acquire(U1))
    for signal, status in pairs { sigint = 130, sigterm = 143 } do
      local self = start(store.dsn, "run", "u1", "--", "echo", "ran")
      support.wait_for_waiters(store, U1)
      uv.kill(self.pid, signal)
      assert.equal("", assert_status(status, self.join()).out)
    end
    handle:release()
    wait_until_free(U1)
  end)

  it("gives the command one SIGINT for a Ctrl-C", function()
    local self = program.on_terminal(store.dsn, 80, "run", "u1", "--", "sh", "-c",
      "trap 'n=$((n+1)); echo interrupted $n' INT; trap 'exit 4' TERM; echo \"as $$ here\"; while :; do sleep 0.02; done")
    local pid = runs(self)
    self.type "\3"
    self.shows "interrupted 1"
    uv.kill(tonumber(pid), "sigterm")
    assert_status(4, self.join())
    assert.is_nil(self.out:find "interrupted 2")
  end)

  it("takes a lease, refreshes it, and leaves it only when it dies without a word", function()
    local self = begin("--ttl", "2", "u1/a1", "--", "sh", "-c", OBEYS)
    local lease = assert(manager:leases())[1]
    assert.equal("u1/a1", lease.path)
    assert.equal("sh", lease.label)
    uv.sleep(2500)
    assert.equal("timeout", ask(A1))
    uv.kill(self.pid, "sigkill")
    assert.equal("timeout", ask(A1))
    self.join()
    assert.matches("told", self.out)
    wait_until_free(A1)
  end)

  it("ends the command when it dies without a word itself, one that does not listen, too", function()
    for _, command in ipairs { OBEYS, STAYS } do
      local self, pid = begin("--grace", "1", "u1", "--", "sh", "-c", command)
      uv.kill(self.pid, "sigkill")
      support.wait_until(function() return not is_there(pid) end, "the end of the command")
      assert.matches("told", self.join().out)
      wait_until_free(U1)
    end
  end)

  it("ends the command before another can hold its lease, when it dies without a word itself", function()
    local self, pid = begin("--ttl", "0.9", "u1", "--", "sh", "-c", STAYS)
    uv.kill(self.pid, "sigkill")
    assert(manager:acquire(U1)):release()
    assert.is_false(is_there(pid))
    self.join()
  end)

  it("ends the command within the grace also where programs are slow to start", function()
    local directory = assert(uv.fs_mkdtemp(os.tmpname() .. "-XXXXXX"))
    local file = assert(io.open(directory .. "/sleep", "w"))
    file:write "#!/bin/sh\n/bin/sleep 0.3\nexec /bin/sleep \"$1\"\n"
    file:close()
    assert(uv.fs_chmod(directory .. "/sleep", 493))
    local path = os.getenv "PATH"
    uv.os_setenv("PATH", directory .. ":" .. path)
    local ok, self, pid = pcall(begin, "--grace", "1", "u1", "--", "sh", "-c", STAYS:gsub("sleep", "/bin/sleep"))
    uv.os_setenv("PATH", path)
    assert(ok, self)
    local began = uv.hrtime()
    uv.kill(self.pid, "sigkill")
    support.wait_until(function() return not is_there(pid) end, "the end of the command")
    os.execute("rm -r " .. directory)
    -- One sleep is late by its own start; ten would be late by three seconds.
    assert.is_true((uv.hrtime() - began) / 1e9 < 3)
    self.join()
  end)

  it("ends the command when the lease is revoked, one that does not listen, too", function()
    for _, command in ipairs { OBEYS, STAYS } do
      local self, pid = begin("--ttl", "1.5", "u1", "--", "sh", "-c", command)
      assert.equal(1, manager:revoke({ target = U1 }, { by = "anna" }))
      local said = assert_status(LOST, self.join())
      assert.is_false(is_there(pid))
      assert.matches("told", said.out)
      assert.matches("anna", said.err)
    end
  end)

  if not plain.server then return end

  it("waits on where the server goes, and is back in time", function()
    local handle = assert(manager:acquire(U1))
    local between = proxy.open(store)
    local self = start(between.dsn, "run", "-t", "20", "u1", "--", "echo", "ran")
    self.until_true(function()
      support.sleep(0.11) -- see above
      for _, one in ipairs(assert(manager:holders(U1))) do
        if one.waiting then return true end
      end
    end, "the waiter")
    between.close()
    self.until_true(function() return self.err:find "trying again\n" end, "the second try")
    handle:release()
    local back = proxy.open(store, nil, nil, tonumber(between.dsn:match "127%.0%.0%.1:(%d+)"))
    assert.equal("ran\n", assert_status(0, self.join()).out)
    back.close()
    self = start(between.dsn, "run", "-t", "0", "u1", "--", "echo", "ran")
    assert_status(69, self.join())
    assert.is_nil(self.err:find "trying again")
  end)

  it("ends the command when the connection is ended, one that does not listen, too", function()
    for _, command in ipairs { OBEYS, STAYS } do
      local others = {}
      for _, id in ipairs(store.sessions()) do others[id] = true end
      local self, pid = begin("--grace", "0.3", "u1", "--", "sh", "-c", command)
      for _, id in ipairs(store.sessions()) do
        if not others[id] then store.kill(id) end
      end
      local said = assert_status(LOST, self.join())
      assert.is_false(is_there(pid))
      assert.matches("told", said.out)
    end
  end)

  it("has ended the command before another can hold the locks, when the server is not heard of any more", function()
    local between = proxy.open(store)
    local self = start(between.dsn, "run", "--ttl", "2", "u1", "--", "sh", "-c", STAYS)
    local pid = runs(self)
    between.cut()
    support.wait_until(function()
      if ask(U1) ~= "free" then return false end
      assert.is_false(is_there(pid))
      return true
    end, "the end of the lease")
    assert_status(LOST, self.join())
    between.close()
  end)
end)
