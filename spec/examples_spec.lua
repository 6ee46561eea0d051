-- The examples, each run by the command lines that its opening comment prints, as a user would type them: `lua` is
-- the Lua that the specs run on, `cc` takes no warning, and files are made in a scratch directory that looks like a
-- checkout.
-- Parts: stores

local uv = require "luv"
local hierlock = require "hierlock"
local support = require "spec.support"

local TABLE = "hierlock_spec_examples"
-- All that the examples lock. A table for the default number of buckets, which is
-- what programs open that say nothing else, needs only these of its rows.
local TARGETS = { { "u1", "a1", "r1" }, { "u1", "a2" }, { "u1", "a3" }, { "u2", "a1" }, { "theatre", "tonight" },
                  { "airline", "LH1" }, { "airline", "LH2" } }
for job = 1, 12 do TARGETS[#TARGETS + 1] = { "queue", "mail", job } end

-- ----------------------------------------------------------- command lines

local function file_lines(name)
  local lines = {}
  for line in io.lines(name) do lines[#lines + 1] = line end
  return lines
end

-- The lines that the opening comment prints, indented, under the paragraph that begins so.
local function printed(example, beginning)
  local lines, state = {}, "before"
  for _, line in ipairs(file_lines("examples/" .. example)) do
    local text = line:match("^%-%- ?(.*)$") or line:match("^ %* ?(.*)$")
    if state == "before" and text and text:sub(1, #beginning) == beginning then
      state = "paragraph"
    elseif state ~= "before" and text and text:find("^    ") then
      state = "commands"
      lines[#lines + 1] = text:sub(5)
    elseif state == "commands" then
      break
    end
  end
  assert(#lines > 0, example .. " does not say: " .. beginning)
  return table.concat(lines, "\n")
end

local function quoted(text) return "'" .. text:gsub("'", [['\'']]) .. "'" end

local function shell(text)
  local ok = os.execute(text)
  assert(ok == true or ok == 0, text)
end

local BUILD = assert((os.getenv("LUA_CPATH") or ""):match("^(.-)/%?%.so"), "run the specs by `make spec`")
local scratch, running

-- The client library's, in the order in which the Makefile looks for it.
local FIND_CONFIG = "$(command -v ${MYSQL_CONFIG:-mysql_config} || command -v mariadb_config)"

local function make_scratch()
  local pipe = assert(io.popen("mktemp -d " .. quoted(BUILD .. "/examples-XXXXXX")))
  scratch = pipe:read("*l")
  pipe:close()
  shell(([[
    set -e; root=$PWD; build=%s; cd %s
    mkdir bin build tmp
    ln -s "$root/examples" "$root/csrc" "$root/lua" .
    ln -s "$build" build/lua5.4
    ln -s "$(command -v "$HIERLOCK_LUA")" bin/lua
    config=%s || true; test -z "$config" || ln -s "$config" bin/mariadb_config
    # As the library was built (a sanitizer's flags); a preloaded one is not for cc.
    printf '#!/bin/sh\nunset LD_PRELOAD\nexec %%s -Werror %%s "$@"\n' "$(command -v ${CC:-cc})" "$CFLAGS" >bin/cc
    chmod +x bin/cc
  ]]):format(quoted(BUILD), quoted(scratch), FIND_CONFIG))
end

-- Runs shell commands in the scratch directory. The result has `output`, the text so far on both streams, and `at`,
-- when each line of it came.
local function start(commands, dsn)
  local self = { output = "", lines = {}, at = {} }
  local pipe, open, exited = uv.new_pipe(false), true, false
  local text = ([[
    exec 2>&1; cd %s
    export PATH="$PWD/bin:$PATH" TMPDIR="$PWD/tmp" HIERLOCK_DSN=%s
  ]]):format(quoted(scratch), quoted(dsn)) .. commands
  local process, pid = assert(uv.spawn("/bin/sh", {
    args = { "-c", text },
    stdio = { nil, pipe },
    detached = true, -- a group of its own, see self.kill
  }, function(code, signal)
    exited, self.status = true, signal == 0 and code or 128 + signal
  end))
  local rest = ""
  pipe:read_start(function(_, data)
    if not data then
      open = false
      return
    end
    self.output, rest = self.output .. data, rest .. data
    rest = rest:gsub("([^\n]*)\n", function(line)
      self.lines[#self.lines + 1] = line
      self.at[#self.at + 1] = support.now()
      return ""
    end)
  end)
  function self.has_ended()
    uv.run("nowait")
    return exited and not open
  end
  --- Waits until a line matches; returns when it came.
  function self.wait_for(pattern)
    return support.wait_until(function()
      local ended = self.has_ended()
      for i, line in ipairs(self.lines) do
        if line:find(pattern) then return self.at[i] end
      end
      if ended then error("it ended without " .. pattern .. ":\n" .. self.output, 0) end
    end, pattern .. " in:\n" .. self.output)
  end
  --- Waits for the end; returns the output and the exit status.
  function self.finish()
    local ended, why = pcall(support.wait_until, self.has_ended, "the end of " .. commands)
    if not ended then error(why .. "\n" .. self.output, 2) end
    return self.output, self.status
  end
  function self.close()
    if not self.has_ended() then uv.kill(-pid, "sigkill") end
    support.wait_until(self.has_ended, "the end of " .. commands)
    pipe:close()
    process:close()
    uv.run("nowait")
  end
  running[#running + 1] = self
  return self
end

local function count(text, pattern)
  local _, n = text:gsub(pattern, "")
  return n
end

-- The one file or directory that `mktemp` has made.
local function temporary()
  local pipe = assert(io.popen("ls -d " .. quoted(scratch) .. "/tmp/*"))
  local names = pipe:read("*a")
  pipe:close()
  return assert(names:match("^(%C+)\n$"), names)
end

local function write_file(name, text)
  local file = assert(io.open(name, "w"))
  assert(file:write(text))
  assert(file:close())
end

-- From now on the work of the examples, `sleep`, is not done before go_on.
local function hold_work()
  write_file(scratch .. "/bin/sleep", [[#!/bin/sh
PATH=${PATH#*:} # without this one
cd "$TMPDIR/.." && touch "busy.$$"
until test -e go; do sleep 0.01; done
]])
  shell("chmod +x " .. quoted(scratch .. "/bin/sleep"))
end

-- Waits until so many have begun to work.
local function wait_for_work(n)
  support.wait_until(function()
    local pipe = assert(io.popen("cd " .. quoted(scratch) .. " && echo busy.*"))
    local names = pipe:read("*a")
    pipe:close()
    return count(names, "busy%.%d") == n
  end, n .. " at work")
end

local function go_on() write_file(scratch .. "/go", "") end

-- ------------------------------------------------------------------ tests

describe("the examples", function()
  it("are all in the index", function()
    local index = table.concat(file_lines("examples/README.md"), "\n")
    local pipe = assert(io.popen("ls examples"))
    for name in pipe:lines() do
      if name ~= "README.md" then
        assert(index:find("](" .. name .. ")", 1, true), "examples/README.md does not name " .. name)
      end
    end
    pipe:close()
  end)

  it("find the library as the index says", function()
    running = {}
    make_scratch()
    local index = table.concat(file_lines("examples/README.md"), "\n")
    local export = assert(index:match("\n    (export [^\n]*)"))
    local process = start("unset LUA_PATH LUA_CPATH\n" .. export .. "\nlua -e 'print(require(\"hierlock\")._VERSION)'", "null:")
    local output, status = process.finish()
    process.close()
    shell("rm -rf " .. quoted(scratch))
    assert.equal(hierlock._VERSION .. "\n", output)
    assert.equal(0, status)
  end)

  it("say in words why the store cannot be opened", function()
    running = {}
    make_scratch()
    for _, command in ipairs { "transfer.lua . 1", "nightly.lua screen a1", "queue.lua done A 1", "luv_watch.lua A hold",
                               "cqueues_server.lua 1", "demo.lua worker file:/dev/null/locks A", "retry.lua seats A 1" } do
      local process = start("touch done seats; lua examples/" .. command, "file:/dev/null/locks")
      local output, status = process.finish()
      assert.matches("store: [^\n]*/dev/null/locks", output)
      assert.equal(1, status)
    end
    for _, process in ipairs(running) do process.close() end
    shell("rm -rf " .. quoted(scratch))
  end)

  support.each_store(function(store)
    local dsn, manager
    local is_postgresql = store.dialect == "postgresql" -- which needs no table for the locks
    local has_table = store.server and not is_postgresql

    setup(function()
      if store.server then dsn = store.bare_dsn end
      -- For the accounts of attached.lua. Since 15, ordinary users may not create tables in public.
      if is_postgresql then store.root():query("GRANT CREATE ON SCHEMA public TO testuser") end
      if not has_table then return end
      dsn = dsn .. "?table=" .. TABLE
      local sql, values, seen = store.sql(), {}, {}
      sql:query("DROP TABLE IF EXISTS " .. TABLE)
      sql:query("CREATE TABLE " .. TABLE ..
                " (level TINYINT NOT NULL, bucket INT NOT NULL, PRIMARY KEY (level, bucket)) ENGINE=InnoDB")
      for _, row in ipairs(hierlock.plan(TARGETS):rows()) do
        local value = ("(%d,%d)"):format(row.level, row.bucket)
        if not seen[value] then values[#values + 1] = value end
        seen[value] = true
      end
      sql:query("INSERT INTO " .. TABLE .. " VALUES " .. table.concat(values, ","))
    end)

    teardown(function()
      if has_table then store.sql():query("DROP TABLE " .. TABLE) end
      if is_postgresql then store.root():query("REVOKE CREATE ON SCHEMA public FROM testuser") end
    end)

    before_each(function()
      running = {}
      make_scratch()
      if not store.server then dsn = "file:" .. scratch .. "/locks" end
      manager = assert(hierlock.open(dsn, { application = "spec" }))
    end)

    after_each(function()
      for _, process in ipairs(running) do process.close() end
      manager:close()
      shell("rm -rf " .. quoted(scratch))
    end)

    local function run(commands, other_dsn) return start(commands, other_dsn or dsn).finish() end

    -- Lists the waiters and the holders of rows of the target.
    local function look(target)
      if store.dialect == "mariadb" then support.sleep(0.11) end -- it shows an old picture before
      local waiting, holding = {}, {}
      for _, holder in ipairs(assert(manager:holders(target))) do
        table.insert(holder.waiting and waiting or holding, holder)
      end
      return waiting, holding
    end

    local function wait_for_waiters(target, n)
      support.wait_until(function() return #look(target) >= n end, n .. " waiters")
    end

    describe("transfer", function()
      it("loses no money, whoever else transfers meanwhile", function()
        -- So that all of them begin at once.
        local gate = assert(manager:acquire { "u1" })
        local process = start(printed("transfer.lua", "Run it:"), dsn)
        wait_for_waiters({ "u1" }, 4)
        gate:release()
        local output, status = process.finish()
        assert.equal(0, status)
        assert.equal(4, count(output, "100 of 100 transfers done"), output)
        local sum, tokens = 0, {}
        for account, balance, token in output:gmatch("(u%d/a%d) (%-?%d+) (%x+)\n") do
          assert.equal(16, #token)
          assert.is_true(tonumber(balance) >= 0)
          tokens[account], sum = token, sum + balance
        end
        assert.is_truthy(tokens["u1/a1"] and tokens["u1/a2"] and tokens["u2/a1"])
        assert.equal(300, sum)
        -- A transfer writes one token with two accounts: the last one's is in two.
        assert.is_true(tokens["u1/a1"] == tokens["u1/a2"] or tokens["u1/a1"] == tokens["u2/a1"] or
                       tokens["u1/a2"] == tokens["u2/a1"])
      end)

      it("writes nothing over what a later holder wrote", function()
        local name = scratch .. "/u1-a1"
        write_file(name, "u1/a1 55 ffffffffffffffff\n")
        local output, status = run("lua examples/transfer.lua . 6")
        assert.matches("fenced off", output)
        assert.matches("2 of 6 transfers done", output) -- those between the other two
        assert.equal(1, status)
        assert.same({ "u1/a1 55 ffffffffffffffff" }, file_lines(name))
      end)
    end)

    if store.server then
      describe("attached", function()
        before_each(function() store.sql():query("DROP TABLE IF EXISTS example_account") end)
        after_each(function() store.sql():query("DROP TABLE IF EXISTS example_account") end)

        local lines = printed("attached.lua", "Run it:")

        it("loses no money, in transactions of its own", function()
          local output, status = run(lines)
          assert.equal(0, status, output)
          assert.equal(4, count(output, "100 of 100 transfers done"), output)
          local sum, accounts = 0, 0
          for balance in output:gmatch("u%d/a%d\t(%-?%d+)\n") do
            assert.is_true(tonumber(balance) >= 0)
            sum, accounts = sum + balance, accounts + 1
          end
          assert.same({ 3, 300 }, { accounts, sum })
        end)

        it("waits for those who hold an account by a handle", function()
          assert.equal("", (run(lines:match("^[^\n]*"))))
          local gate = assert(manager:acquire { "u1", "a2" })
          local process = start("lua examples/attached.lua transfer 1", dsn)
          support.wait_for_waiters(store)
          assert.equal("", process.output)
          gate:release()
          assert.equal("1 of 1 transfers done\n", (process.finish()))
        end)
      end)
    end

    describe("nightly", function()
      it("lets the screen in beside the batch, and tells it after a second who is in the way", function()
        local output, status
        for _ = 1, 5 do
          os.remove(scratch .. "/go")
          hold_work()
          local process = start(printed("nightly.lua", "Run it:"), dsn)
          local locked, refused = process.wait_for("works on a1"), process.wait_for("a1 is in use")
          -- The start-up time of a screen that need not wait: the machine may be busy.
          local start_up = process.wait_for("screen: has a2, after 0%.%d s") - refused
          go_on()
          output, status = process.finish()
          assert.equal(0, status)
          local waited = refused - locked -- and a process was started
          assert(waited > 0.9 and waited < 2 + 2 * start_up, "the screen waited for " .. waited .. " s")
          -- On a busy machine the server may need more than the 50 ms that a caller is kept for the names.
          if output:find("in use by", 1, true) then break end
        end
        assert.matches("screen: in use by batch %(interest%), process %d+ on %S+, since %d%d:%d%d:%d%d", output)
        assert.matches("batch: works on a2\nbatch: works on a3\n$", output)
      end)

      if has_table then
        it("shows a holder who says nothing of himself", function()
          local rows = hierlock.plan({ { "u1", "a1" } }):rows()
          local row = rows[#rows]
          store.sql():query("START TRANSACTION")
          store.sql():query("SELECT * FROM %s WHERE level=%d AND bucket=%d FOR UPDATE", TABLE, row.level, row.bucket)
          finally(function() store.sql():query("ROLLBACK") end)
          support.wait_until(function() -- the machine may be too busy to look
            local output, status = run("lua examples/nightly.lua screen a1")
            assert.equal(1, status)
            assert.matches("^screen: a1 is in use[^\n]*\n", output)
            -- On MariaDB, only those who use hierlock can be seen.
            return store.dialect == "mariadb" or output:find("\nscreen: in use by .- %(%?%), .-, since [^\n]*\n$")
          end, "the holder to be shown")
        end)
      end

      it("puts off an account that somebody works on", function()
        local output, status
        for _ = 1, 4 do
          local handle = assert(manager:acquire { "u1", "a2" })
          local process = start("lua examples/nightly.lua batch a2 0 a3 0", dsn)
          local patience = support.now() + 6
          support.wait_until(function()
            return process.has_ended() or process.output ~= "" or support.now() > patience
          end)
          handle:release()
          output, status = process.finish()
          assert.equal(0, status)
          -- On a busy machine it gets a3 too late, or begins when a2 is free.
          if output ~= "batch: works on a2\nbatch: works on a3\n" then break end
        end
        assert.equal("batch: works on a3\nbatch: works on a2\n", output)
      end)
    end)

    if has_table then
      it("run on a table that was provisioned with fewer buckets", function()
        local process = start([[
          touch done seats; mkdir bank
          lua examples/queue.lua done A 1 && lua examples/nightly.lua screen a1 && lua examples/transfer.lua bank 1 &&
          lua examples/retry.lua seats A 1 && lua examples/attached.lua open && lua examples/attached.lua transfer 1
          status=$?; lua examples/attached.lua close; exit $status]], store.dsn)
        local output, status = process.finish()
        assert.equal(0, status, output)
        assert.matches("1 of 1 transfers done\n.*1 of 1 transfers done\n", output)
      end)
    end

    describe("queue", function()
      -- With one job, the other two wait for the end of the one who does it.
      for _, jobs in ipairs { 12, 1 } do
        it(("has each of %d jobs done once, though a worker is killed in the middle of one"):format(jobs), function()
          hold_work()
          local process = start(printed("queue.lua", "Run it:"):gsub(" 12 ", " " .. jobs .. " "), dsn)
          wait_for_work(3)
          local _, holding = look { "queue" }
          assert.equal(math.min(jobs, 3), #holding)
          local victim = holding[1]
          local job = assert(victim.path:match("^queue/mail/(%d+)$"))
          assert.same({}, file_lines(temporary()))
          uv.kill(victim.pid, "sigkill")
          go_on()
          local output, status = process.finish()
          assert.equal(0, status, output)

          local by, n = {}, 0
          for _, line in ipairs(file_lines(temporary())) do
            local number, name = line:match("^(%d+) (%a)$")
            assert.is_nil(by[number], "job " .. number .. " was done twice")
            by[number], n = "worker " .. name, n + 1
          end
          assert.equal(jobs, n)
          assert.not_equal(victim.application, by[job])
        end)
      end
    end)

    describe("retry", function()
      it("gets each request done once, after pauses that differ", function()
        local gate = assert(manager:acquire { "theatre" })
        local process = start(printed("retry.lua", "Run it:"), dsn)
        for _, name in ipairs { "A", "B", "C", "D" } do process.wait_for("^" .. name .. ": timeout.*again in") end
        gate:release()
        local output, status = process.finish()
        assert.equal(0, status)

        local sold, seen, seats = 0, {}, 0
        for n in output:gmatch("%a: sold (%d+)") do sold = sold + n end
        assert.equal(20, sold)
        for _, request in ipairs(file_lines(temporary())) do
          assert.is_nil(seen[request], request .. " was sold twice")
          seen[request], seats = true, seats + 1
        end
        assert.equal(20, seats)

        local pauses, different = {}, 0
        for name, pause in output:gmatch("(%a): timeout[^\n]-again in ([%d.]+) s") do
          if not pauses[name] then
            pauses[name] = pause
            if not pauses[pause] then different = different + 1 end
            pauses[pause] = true
          end
        end
        assert(different > 1, "all of them paused for as long:\n" .. output)
      end)

      it("gives up after its patience", function()
        local gate = assert(manager:acquire { "theatre" })
        local began = support.now()
        write_file(scratch .. "/seats", "")
        local output, status = run("lua examples/retry.lua seats A 2")
        local seconds = support.now() - began
        gate:release()
        assert.equal(1, status)
        assert.matches("A: gave up: timeout", output)
        assert(seconds > 0.9 and seconds < 4, "it gave up after " .. seconds .. " s")
      end)

      if store.server then
        it("tries again when the lock was lost, and still does each request once", function()
          hold_work()
          write_file(scratch .. "/seats", "")
          local process = start("lua examples/retry.lua seats A 10", dsn)
          wait_for_work(1)
          support.sleep(0.11) -- MariaDB shows an old picture before
          local running_now = store.sql():query(is_postgresql
            and "SELECT pid FROM pg_stat_activity WHERE state='idle in transaction'"
            or "SELECT trx_mysql_thread_id FROM information_schema.INNODB_TRX")
          assert.equal(1, #running_now)
          store.sql():query(is_postgresql and "SELECT pg_terminate_backend(%d)" or "KILL %d", running_now[1][1])
          support.wait_until(function() return not select(2, look { "theatre", "tonight" })[1] end, "its end")
          go_on()
          local output, status = process.finish()
          assert.equal(0, status)
          -- On a busy machine it may meet its own last lock, which the server still has.
          output = output:gsub("A: timeout: [^\n]*; again in [^\n]*\n", "")
          assert.matches("^A: lost: [^\n]*; again in [^\n]*\nA: sold 20\n$", output)
          local expected = {}
          for seat = 1, 20 do expected[seat] = "A" .. seat end
          assert.same(expected, file_lines(scratch .. "/seats"))
        end)
      end

      it("does not try again what cannot succeed", function()
        local hopeless, code = "file:/dev/null/locks", "store"
        if has_table then hopeless, code = store.bare_dsn .. "?table=" .. TABLE .. "_none", "not_provisioned" end
        write_file(scratch .. "/seats", "")
        local output, status = run("lua examples/retry.lua seats A 10", hopeless)
        assert.matches("^A: gave up: " .. code, output)
        assert.equal(1, status)
      end)
    end)

    describe("cqueues_server", function()
      it("serves both flights at once, and each seat once", function()
        local probe = uv.new_tcp()
        assert(probe:bind("127.0.0.1", 0))
        local port = probe:getsockname().port
        probe:close()
        uv.run "nowait"
        local lines = "export PORT=" .. port .. "\n" .. printed("cqueues_server.lua", "Run it:")
        local function longest_of(output)
          local longest = 0
          for seconds in output:gmatch("seat %d, after ([%d.]+) s") do longest = math.max(longest, tonumber(seconds)) end
          return longest
        end
        -- Run one after the other they take twice as long: 0.8 s, and more on a busy machine.
        support.wait_until(function()
          local output, status = run(lines)
          assert.equal(0, status)
          local seats = {}
          for flight, seat in output:gmatch("(LH%d): seat (%d)") do
            assert.is_nil(seats[flight .. seat], output)
            seats[flight .. seat] = true
          end
          for _, flight in ipairs { "LH1", "LH2" } do
            for seat = 1, 4 do assert.is_true(seats[flight .. seat], output) end
          end
          assert.matches("server: 8 bookings, %d of them waited", output)
          local longest = longest_of(output)
          return longest < 0.8 or longest < 0.75 * longest_of(run((lines:gsub("LH2", "LH1"))))
        end, "a run in less time than one flight takes")
      end)
    end)

    describe("luv_watch", function()
      it("goes on while it waits, and gives up in time", function()
        local output, status = run(printed("luv_watch.lua", "Run it:"))
        assert.equal(0, status)
        assert.matches("A: works\n", output)
        assert.matches("B: gave up: cancelled\n", output)
        -- A says that it is done when the server has confirmed it: C may have the report by then.
        assert.matches("C: waits for [%d.]+ s\n.*C: got it after %d[%d.]* s\n.*C: works\n.*C: done\n", output)
        assert(manager:acquire({ "u1" }, { timeout = 1 })):release()
      end)
    end)

    describe("locked.c", function()
      local function compile()
        if not store.server then return printed("locked.c", "Run it,") end
        return printed("locked.c", is_postgresql and "With PostgreSQL, too" or "With MySQL, too") .. "\n" .. printed("locked.c", "Run it,"):match("([^\n]*)$")
      end

      it("compiles without a warning, and runs a command under the lock", function()
        local output, status = run(compile())
        assert.equal("nobody else is in u1/a1 now\n", output)
        assert.equal(0, status)
        -- The inner one is refused, as the outer one holds the account.
        support.wait_until(function()
          output, status = run("build/locked u1/a1 1 build/locked u1/a1/r1 0 echo entered")
          assert.equal(75, status)
          local named = output:find "u1/a1 is held by locked %(build/locked%), process %d+"
          assert.is_true(named ~= nil or output:find "not known: " ~= nil, output) -- a busy server tells too late
          return named
        end)
        assert.matches("locked: timeout: u1/a1/r1", output)
        assert.not_matches("entered", output)
        assert(manager:acquire({ "u1" }, { timeout = 0 })):release()

        for command, expected in pairs {
          ["u1 1 sh -c 'exit 3'"] = 3,
          ["u1 1 sh -c 'kill -9 $$'"] = 137,
          ["u1 1 no-such-command"] = 127,
          ["u1//r1 1 true"] = 69,
          ["u1/a1/r1/x 1 true"] = 69,
          ["u1 soon true"] = 64,
          ["u1 1"] = 64,
        } do
          assert.equal(expected, select(2, run("build/locked " .. command)), command)
        end
      end)
    end)
  end)
end)
