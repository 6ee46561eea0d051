-- Update locks: one beside those who share, who alone may become exclusive. On every store, for session locks
-- and for leases.
-- Parts: stores

local hierlock = require "hierlock"
local command = require "spec.support.command"
local proxy = require "spec.support.proxy"
local support = require "spec.support"
local uv = require "luv"

local USER, ACCOUNT, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local ELSEWHERE = { "u1", "a2", "r1" }

-- By the store: what can be for update. The others refuse.
local HAVE = {
  embedded = { session = true, lease = true },
  intentions = { session = true, lease = true },
  postgresql = { session = true, lease = true },
  mysql = { session = true, lease = true },
  mariadb = { session = true, lease = true },
  sqlite = { lease = true },
  redis = { lease = true },
  memcached = { lease = true },
  quorum = { lease = true },
}

-- Sessions of these give back no single row.
local KEEPS = { mysql = true, mariadb = true }

-- An upgrade waits at one store of these after the other; meanwhile others have a majority.
local PASSED = { quorum = true }

-- On a busy machine a server may not answer a try within its 0.2 s. Then the call has changed nothing, or undoes what it
-- has, and the caller asks again.
local function answered(call)
  local ok, err
  for _ = 1, 5 do
    ok, err = call()
    if ok or err.code ~= "connection" then break end
  end
  return ok, err
end

local TRY = [[
  local target, options = ...
  local handle, err
  for _ = 1, 5 do -- as answered() does
    handle, err = manager:acquire(target, options)
    if handle or err.code ~= "connection" then break end
  end
  if not handle then return err.code end
  assert(handle:release { confirm = true })
  return true
]]

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

local function with(options, kind)
  local all = { ttl = kind == "lease" and 60 or nil }
  for k, v in pairs(options or {}) do all[k] = v end
  return all
end

-- Whether the second waits, by the rule alone.
local function conflict(a, b, subtrees)
  for level = 1, math.min(#a.target, #b.target) do
    if a.target[level] ~= b.target[level] then return false end
  end
  local shared = (a.mode == "shared" and 1 or 0) + (b.mode == "shared" and 1 or 0)
  if subtrees and shared == 2 then return false end
  if #a.target ~= #b.target or #a.target < 3 then return true end
  return a.mode == "exclusive" or b.mode == "exclusive" or shared == 0
end

local REQUESTS = {}
for _, target in ipairs { USER, ACCOUNT, R1, R2, ELSEWHERE } do
  for _, mode in ipairs { "shared", "update", "exclusive" } do
    REQUESTS[#REQUESTS + 1] = { target = target, mode = mode }
  end
end

local function kinds_of(store)
  return store.leases_only and { "lease" } or { "session", "lease" }
end

describe("an update lock", function()
  support.each_leasing_store(function(plain)
    for _, kind in ipairs(kinds_of(plain)) do
      describe(("(a %s)"):format(kind), function()
        local store = support.updated(plain, kind == "lease")
        local has = (HAVE[store.name] or {})[kind]
        local opened, manager

        local function open(options)
          opened[#opened + 1] = support.open(store, options)
          return opened[#opened]
        end

        local function acquire(target, mode, options)
          options = with(options, kind)
          options.mode = mode
          return manager:acquire(target, options)
        end

        setup(function() store.prepare() end)

        before_each(function()
          opened = {}
          manager = open { application = "the holder" }
        end)

        after_each(function()
          support.close_peers()
          if kind == "lease" then open():revoke { target = USER } end
          for _, one in ipairs(opened) do one:close() end
          opened, manager = nil, nil
        end)

        if not has then
          it("is not to be had, and the store says so", function()
            assert_code("unsupported", acquire(R1, "update"))
            local handle = assert(acquire(R1, "shared"))
            assert.is_true(handle:check())
            assert.is_true(handle:release { confirm = true })
          end)
          return
        end

        local function try(peer, target, mode, timeout)
          return peer:call(TRY, target, with({ mode = mode, timeout = timeout or 0 }, kind))
        end

        local function peer_has(peer, name, target, mode)
          assert.is_true(peer:acquire(name, "acquire", target, with({ mode = mode }, kind)):result())
        end

        it("conflicts with what the table says", function()
          local peer = support.process(store)
          local wrong = {}
          for _, held in ipairs(REQUESTS) do
            local handle = assert(acquire(held.target, held.mode))
            for _, asked in ipairs(REQUESTS) do
              local expected = conflict(held, asked, plain.subtrees) and "timeout" or true
              if try(peer, asked.target, asked.mode) ~= expected then
                wrong[#wrong + 1] = ("%s of %s while %s of %s"):format(asked.mode, table.concat(asked.target, "/"),
                  held.mode, table.concat(held.target, "/"))
              end
            end
            assert(handle:release { confirm = true })
          end
          assert.same({}, wrong)
        end)

        it("says so, and on an inner level that it is exclusive", function()
          local handle = assert(acquire(R1, "update"))
          assert.equal("update", handle.mode)
          assert.matches("update u1/a1/r1, held", tostring(handle), 1, true)
          assert.is_true(handle:upgrade())
          assert.equal("exclusive", handle.mode)
          assert.is_true(handle:upgrade())
          assert(handle:release { confirm = true })
          local inner = assert(acquire(ACCOUNT, "update"))
          assert.equal("exclusive", inner.mode)
          assert.is_true(inner:upgrade())
          assert.is_true(inner:downgrade())
          assert.equal("exclusive", inner.mode)
        end)

        it("is needed for an upgrade", function()
          local handle = assert(acquire(R1, "exclusive"))
          assert.has_error(function() handle:upgrade() end)
          assert.has_error(function() handle:downgrade() end)
          assert.is_true(handle:check())
          assert(handle:release { confirm = true })
          local gone = assert(acquire(R1, "update"))
          assert(gone:release { confirm = true })
          assert_code("released", gone:upgrade())
          assert_code("released", gone:downgrade())
          assert.has_error(function() assert(acquire(R2, "update")):upgrade { label = "x" } end)
        end)

        it("is shown to others", function()
          local handle = assert(acquire(R1, "update", { label = "it" }))
          local observer = open()
          local function shown()
            support.sleep(store.dialect == "mariadb" and 0.11 or 0)
            local holders = assert(observer:holders(R1))
            assert.equal(1, #holders)
            assert.equal("it", holders[1].label)
            return holders[1].mode
          end
          assert.equal("update", shown())
          assert(handle:upgrade())
          assert.equal("exclusive", shown())
          if not KEEPS[store.name] or kind == "lease" then
            assert(handle:downgrade())
            assert.equal("update", shown())
          end
        end)

        for _, peers in ipairs(support.peer_kinds) do
          it(("becomes exclusive when those who share it have gone, and nobody comes meanwhile (a %s)"):format(peers[1]),
            function()
            local upgrader, reader = peers[2](store), support.process(store)
            peer_has(upgrader, "u", R1, "update")
            peer_has(reader, "r", R1, "shared")
            upgrader:start "local ok, err = handles.u:upgrade() return ok or err.message"
            assert.is_true(upgrader:stays_blocked())
            if not PASSED[store.name] then assert.equal("timeout", try(reader, R1, "shared")) end
            assert.is_true(reader:release("r"))
            assert.is_true(upgrader:result())
            assert.equal("exclusive", upgrader:call "return handles.u.mode")
            assert.equal("timeout", try(reader, R1, "shared"))
            if KEEPS[store.name] and kind == "session" then
              assert.equal("unsupported", upgrader:call "return select(2, handles.u:downgrade()).code")
            else
              assert.is_true(upgrader:call "return handles.u:downgrade()")
              assert.equal("update", upgrader:call "return handles.u.mode")
              assert.is_true(try(reader, R1, "shared"))
              assert.equal("timeout", try(reader, R1, "update"))
              assert.is_true(upgrader:call "return handles.u:upgrade()")
            end
            assert.equal("timeout", try(reader, R1, "shared"))
            assert.is_true(upgrader:release("u"))
            assert.is_true(try(reader, R1, "exclusive"))
          end)
        end

        it("does not wait for the next one who wants the same", function()
          local second = support.process(store)
          local handle = assert(acquire(R1, "update"))
          second:acquire("s", "acquire", R1, with({ mode = "update" }, kind))
          assert.is_true(second:stays_blocked())
          assert.is_true(handle:upgrade { timeout = 5 })
          assert(handle:release { confirm = true })
          assert.is_true(second:result())
          assert.is_true(second:call "return handles.s:upgrade { timeout = 5 }")
        end)

        it("passes those who wait for it", function()
          local reader, writer, second = support.process(store), support.process(store), support.process(store)
          local handle = assert(acquire(R1, "update"))
          writer:acquire("w", "acquire", R1, with({}, kind))
          second:acquire("s", "acquire", R1, with({ mode = "update" }, kind))
          assert.is_true(writer:stays_blocked())
          assert.is_true(second:stays_blocked())
          assert.is_true(handle:upgrade { timeout = 5 })
          assert.equal("timeout", try(reader, R1, "shared"))
          assert(handle:release { confirm = true })
          local first, last = writer, second
          local function done(peer) return not peer:stays_blocked() end
          if done(second) then first, last = second, writer end
          assert.is_true(first:result())
          assert.is_true(first:release(first == writer and "w" or "s"))
          assert.is_true(last:result())
        end)

        it("passes those who wait for what is above it, too", function()
          local above, reader = support.process(store), support.process(store)
          local handle = assert(acquire(R1, "update"))
          above:acquire("a", "acquire", ACCOUNT, with({ timeout = 20 }, store.leases_only and kind))
          assert.is_true(above:stays_blocked())
          assert.is_true(handle:upgrade { timeout = 5 })
          assert.equal("timeout", try(reader, R1, "shared"))
          local token = handle.token
          assert(handle:release { confirm = true })
          assert.is_true(above:result())
          assert.is_true(above:call "return handles.a.token" > token)
        end)

        if kind == "lease" then
          it("is waited for by sessions, and by those who hand on what they get", function()
            local waiter, session = support.process(store), support.process(store)
            local handle = assert(acquire(R1, "update"))
            waiter:acquire("w", "acquire", R1, with({}, kind))
            session:acquire("s", "acquire", R1, { timeout = 10 })
            assert.is_true(waiter:stays_blocked())
            assert.is_true(session:stays_blocked())
            assert.is_true(handle:upgrade { timeout = 5 })
            assert.is_true(handle:downgrade())
            assert.is_true(waiter:stays_blocked())
            assert.is_true(handle:upgrade { timeout = 5 })
            assert(handle:release { confirm = true })
            local first
            repeat -- each of them gives up in time
              first = not session:stays_blocked() and session or not waiter:stays_blocked() and waiter
            until first
            assert.is_true(first:result())
            if first == session then
              assert.is_true(session:release("s"))
              assert.is_true(waiter:result())
            end
            assert.is_true(waiter:call [[
              local again = assert(manager:import(assert(handles.w:export())))
              assert(again.mode == "exclusive")
              return again:release { confirm = true }
            ]])
            if first == waiter then assert.is_true(session:result()) end
          end)
        end

        it("is what it was after an upgrade that was not granted in time", function()
          local reader = support.process(store)
          local handle = assert(acquire(R1, "update"))
          peer_has(reader, "r", R1, "shared")
          for _, timeout in ipairs { 0, 0.2 } do
            local err = assert_code("timeout", answered(function() return handle:upgrade { timeout = timeout } end))
            for _, holder in ipairs(err.holders or {}) do
              assert.equal("shared", holder.mode)
            end
            assert.equal("update", handle.mode)
            assert.is_true(handle:check())
            assert.is_true(try(reader, R1, "shared"))
            assert.equal("timeout", try(reader, R1, "update"))
            assert.equal("timeout", try(reader, R1, "exclusive"))
          end
          assert.is_true(reader:release("r"))
          assert.is_true(handle:upgrade { timeout = 5 })
          assert.equal("timeout", try(reader, R1, "shared"))
        end)

        it("has a greater token as soon as it is exclusive", function()
          local handle = assert(acquire(R1, "update"))
          local before = handle.token
          assert(handle:upgrade())
          assert.is_true(handle.token > before)
          local upgraded = handle.token
          assert(handle:release { confirm = true })
          assert.is_true(assert(acquire(R1)).token > upgraded)
        end)

        -- Such as one whose connection was cut behind a proxy or a machine that hung.
        it("is not shared again by a downgrade of before the upgrade that the server reads late", function()
          if kind == "session" or not store.server then return end
          local between = proxy.open(store)
          finally(function() between.close() end)
          local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
          peer:call([[
            handles.u = assert(manager:acquire(..., { mode = "update", ttl = 60 }))
            assert(handles.u:upgrade { timeout = 5 })
          ]], R1)
          local before = #between.connections
          for i = 1, before do between.detain(i) end
          between.refuse(0)
          peer:start "return select(2, handles.u:downgrade()).code"
          local late
          support.wait_until(function()
            uv.run "nowait"
            for i = 1, before do late = #between.connections[i].detained > 0 and i or late end
            return late
          end, "the downgrade")
          for i = 1, before do between.leave(i) end
          assert.equal("connection", peer:result())
          between.refuse(1000)
          -- The upgrade finds the lock exclusive still.
          assert.is_true(peer:call "return handles.u:upgrade { timeout = 5 }")
          between.deliver(late)
          assert_code("timeout", acquire(R1, "shared", { timeout = 0 }))
          assert.is_true(peer:call "return handles.u:check()")
          assert.is_true(peer:call "return handles.u:release { confirm = true }")
        end)

        it("is shared by a downgrade, though an upgrade that failed was carried out late", function()
          if kind == "session" or not store.server or store.name == "memcached" then return end
          local between = proxy.open(store)
          finally(function() between.close() end)
          for _, form in ipairs { "blocking", "pending" } do
            local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }),
              form == "pending" and { loop = "luv" } or nil)
            peer:call("handles.u = assert(manager:acquire(..., { mode = 'update', ttl = 60 }))", R1)
            local n, late = #between.connections, nil
            -- What locks the rows comes before what changes the record, where these are two trips.
            for i = 1, n do between.detain(i, store.name == "postgresql" and "held AS" or store.table and "r.x=1" or 0) end
            between.refuse(0)
            peer:start "return select(2, handles.u:upgrade { timeout = 5 }).code"
            support.wait_until(function()
              uv.run "nowait"
              for i = 1, n do late = #(between.connections[i].detained or "") > 0 and i or late end
              return late
            end, "the upgrade")
            for i = 1, n do between.leave(i) end
            assert.equal("connection", peer:result())
            between.refuse(1000)
            between.deliver(late)
            support.wait_until(function()
              local listed = manager:leases { target = R1 }
              return listed and listed[1] and listed[1].mode == "exclusive"
            end, "an exclusive lease")
            if form == "blocking" then
              assert.is_true(peer:call "return handles.u.mode == 'update' and handles.u:downgrade()")
            else
              peer:call [[
                local uv = require "luv"
                local ok, err
                coroutine.wrap(function() ok, err = handles.u:downgrade() end)()
                while ok == nil and err == nil do uv.run "once" end
                assert(ok, err)
              ]]
            end
            assert(assert(acquire(R1, "shared", { timeout = 0 })):release { confirm = true })
            -- And is what it was.
            assert.is_true(peer:call "return handles.u:check()")
            assert_code("timeout", acquire(R1, "update", { timeout = 0 }))
            peer:call "assert(handles.u:release { confirm = true })"
            between.close()
            between = proxy.open(store)
          end
        end)

        it("is freed when its holder is killed, before, in and after an upgrade", function()
          if kind == "lease" then return end
          for _, moment in ipairs { "before", "in", "after" } do
            local holder, reader = support.process(store), support.process(store)
            peer_has(holder, "u", R1, "update")
            if moment == "in" then
              peer_has(reader, "r", R1, "shared")
              holder:start "return handles.u:upgrade()"
              assert.is_true(holder:stays_blocked())
            elseif moment == "after" then
              assert.is_true(holder:call "return handles.u:upgrade()")
            end
            holder:signal("sigkill")
            if moment == "in" then assert.is_true(reader:release("r")) end
            local next_one = assert(acquire(R1, "update", { timeout = 15 }))
            assert(next_one:upgrade { timeout = 15 })
            assert(next_one:release { confirm = true })
            support.close_peers()
          end
        end)

        it("may be one of several targets, which are upgraded together", function()
          local peer = support.process(store)
          local handle = assert(manager:acquire_all({
            { "u1", "a1", "r1", mode = "update" },
            { "u1", "a1", "r2", mode = "shared" },
            { "u1", "a1", "r3", mode = "update" },
          }, with({}, kind)))
          assert.equal("update", handle.mode)
          assert.is_true(try(peer, R1, "shared"))
          assert.is_true(handle:upgrade())
          assert.equal("timeout", try(peer, R1, "shared"))
          assert.is_true(try(peer, R2, "shared"))
          assert.equal("timeout", try(peer, { "u1", "a1", "r3" }, "shared"))
          assert.equal("exclusive", handle.mode)
        end)

        it("that fails after some of several targets gives these back, or says at a downgrade that they may stay", function()
          local peer, reader = support.process(store), support.process(store)
          local r3, kept, keeps = { "u1", "a1", "r3" }, 0, KEEPS[store.name] and kind == "session"
          for first, last in pairs { [R1] = r3, [r3] = R1 } do -- one of the two comes first in the order
            local handle = assert(manager:acquire_all({ first, last }, with({ mode = "update" }, kind)))
            peer_has(reader, "r", last, "shared")
            assert_code("timeout", handle:upgrade { timeout = 0.2 })
            assert.equal("update", handle.mode)
            if try(peer, first, "shared") ~= true then kept = kept + 1 end
            if keeps then assert_code("unsupported", handle:downgrade()) else assert(handle:downgrade()) end
            assert.equal("update", handle.mode)
            assert.is_true(reader:release("r"))
            assert.is_true(handle:upgrade())
            assert.equal("exclusive", handle.mode)
            assert(handle:release { confirm = true })
          end
          assert.equal(keeps and 1 or 0, kept)
        end)

        if kind == "session" then
          it("may come by an extend", function()
            local peer = support.process(store)
            local handle = assert(acquire(R2, "shared"))
            assert(handle:extend(R1, { mode = "update" }))
            assert.equal("timeout", try(peer, R1, "update"))
            assert.is_true(try(peer, R1, "shared"))
            assert(handle:upgrade())
            assert.equal("timeout", try(peer, R1, "shared"))
            assert.is_true(try(peer, R2, "shared"))
          end)
        end

        if kind == "lease" then
          it("is handed over as what it is", function()
            local peer = support.process(store)
            local handle = assert(acquire(R1, "update"))
            local second = assert(manager:import(assert(handle:export())))
            assert.equal("update", second.mode)
            assert.is_true(try(peer, R1, "shared"))
            assert(second:upgrade())
            local third = assert(manager:import(assert(second:export())))
            assert.equal("exclusive", third.mode)
            assert.equal("timeout", try(peer, R1, "shared"))
            assert(third:refresh())
            assert(third:downgrade())
            assert.is_true(try(peer, R1, "shared"))
            assert.equal("timeout", try(peer, R1, "update"))
            assert(third:release { confirm = true })
            assert.is_true(try(peer, R1, "exclusive"))
          end)
        end

        it("excludes in random use, also when processes are killed", function()
          local SECONDS, N = 2, 5
          local files, peers, killed = {}, {}, {}
          local function begin(i)
            -- Beside leases, where there are both, sessions.
            local own = kind == "lease" and not store.leases_only and i % 2 == 0 and "session" or kind
            files[#files + 1] = os.tmpname()
            peers[i] = support.process(store)
            peers[i]:start([[
              local file, target, until_ns, kind, seed, keeps = ...
              local uv = require "luv"
              math.randomseed(seed)
              local out = assert(io.open(file, "w"))
              out:setvbuf "no"
              local now = uv.hrtime
              -- Writes the span of a lock: as late and as early as the peer knows.
              local function span(mode, from, to) out:write(mode, " ", from, " ", to, "\n") end
              -- A busy machine may answer later than a call waits for it, now and then.
              local late = 0
              local function answered_late(err)
                late = late + 1
                return err.code == "connection" and late < 5
              end
              while now() < until_ns do
                local options = { mode = ({ "shared", "update", "update", "exclusive" })[math.random(4)],
                                  timeout = math.random() < 0.3 and 0 or 1, ttl = kind == "lease" and 60 or nil }
                local handle, err = manager:acquire(target, options)
                if not handle then
                  assert(err.code == "timeout" or answered_late(err), err.message)
                else
                  local mode, from = handle.mode, now()
                  if math.random() < 0.5 then uv.sleep(math.random(3)) end
                  if mode == "update" and math.random() < 0.7 then
                    local to = now()
                    local ok, why = handle:upgrade { timeout = math.random() < 0.3 and 0 or 0.5 }
                    if ok then
                      span("update", from, to)
                      mode, from = "exclusive", now()
                      if math.random() < 0.5 then uv.sleep(1) end
                      to = now()
                      if not keeps and math.random() < 0.5 then
                        assert(handle:downgrade())
                        span(mode, from, to)
                        mode, from = "update", now()
                        if math.random() < 0.5 then uv.sleep(1) end
                      end
                    else
                      local told = why.code == "timeout" or why.code == "deadlock"
                      assert(told or answered_late(why), why.message)
                      if why.code ~= "timeout" then mode = nil end
                    end
                  end
                  if mode then span(mode, from, now()) end
                  handle:release { confirm = true }
                end
              end
              out:close()
              return true
            ]], files[#files], R1, uv.hrtime() + SECONDS * 1e9, own, math.random(1e6),
              KEEPS[store.name] and own == "session" or false)
          end
          for i = 1, N do begin(i) end
          -- A lease goes on when its process is killed: no other would get anything.
          for i = 1, kind == "session" and 2 or 0 do
            support.sleep(0.3)
            peers[i]:signal("sigkill")
            killed[i] = true
          end
          for i = 1, N do
            if not killed[i] then assert.is_true(peers[i]:result()) end
          end
          local spans = {}
          for _, file in ipairs(files) do
            for line in io.lines(file) do
              local mode, from, to = line:match "^(%a+) ([%d.e+]+) ([%d.e+]+)$"
              if mode then spans[#spans + 1] = { mode, tonumber(from), tonumber(to) } end
            end
            os.remove(file)
          end
          table.sort(spans, function(a, b) return a[2] < b[2] end)
          local seen, wrong = {}, 0
          for i, a in ipairs(spans) do
            seen[a[1]] = true
            for j = i + 1, #spans do
              local b = spans[j]
              if b[2] >= a[3] then break end
              if a[1] == "exclusive" or b[1] == "exclusive" or a[1] == b[1] and a[1] == "update" then wrong = wrong + 1 end
            end
          end
          assert.equal(0, wrong)
          assert.same({ shared = true, update = true, exclusive = true }, seen)
        end)

        it("never leads those who upgrade into a deadlock, nor loses a change", function()
          local file = os.tmpname()
          local ROUNDS, handle = 40, io.open(file, "w")
          handle:write("0")
          handle:close()
          finally(function() os.remove(file) end)
          local peers = {}
          for i = 1, 3 do
            peers[i] = support.process(store)
            peers[i]:start([[
              local file, target, rounds, options = ...
              local function read()
                local f = assert(io.open(file)) local n = tonumber(f:read("*a")) f:close() return n
              end
              options.timeout = 60
              for round = 1, rounds do
                options.mode = "update"
                local update = assert(manager:acquire(target, options))
                local before = assert(read())
                assert(update:upgrade { timeout = 60 })
                assert(update.mode == "exclusive")
                assert(read() == before, "somebody has changed it")
                local f = assert(io.open(file, "w")) f:write(before + 1) f:close()
                assert(update:release { confirm = true })
                options.mode = "shared"
                local shared = assert(manager:acquire(target, options))
                local n = assert(read())
                assert(n > before and read() == n, "it changes while it is shared")
                assert(shared:release { confirm = true })
              end
              return true
            ]], file, R1, ROUNDS, with({}, kind))
          end
          for i = 1, 3 do assert.is_true(peers[i]:result()) end
          local f = io.open(file)
          local n = f:read("*a")
          f:close()
          assert.equal(tostring(3 * ROUNDS), n)
        end)
      end)
    end
  end, false, "intentions")
end)

describe("a table", function()
  support.each_connection(function(store)
    if not store.table then return end
    local TABLE = "hierlock_spec_upgradable_buckets"
    local dsn = store.bare_dsn .. "?table=" .. TABLE

    local function clean()
      store.sql():query("DROP TABLE IF EXISTS " .. TABLE)
      store.sql():try("DELETE FROM hier_lock_meta WHERE table_name = '" .. TABLE .. "'")
    end

    before_each(clean)
    after_each(clean)

    local function run(...)
      local ran = command.run(dsn, ...)
      return ran.status, ran.out .. ran.err
    end

    it("without update rows locks nothing for update, and says how to add them", function()
      assert.equal(0, (run("provision", "--buckets", "1000", "--quiet")))
      local manager = assert(hierlock.open(dsn))
      finally(function() manager:close() end)
      for _, options in ipairs { {}, { timeout = 0 } } do
        options.mode = "update"
        for _ = 1, 3 do -- also when the statement has been prepared
          local err = assert_code("not_provisioned", manager:acquire(R1, options))
          assert.matches("hierlock provision --updates", err.message, 1, true)
          assert.same({ "u1", "a1", "r1" }, { err.target.user, err.target.account, err.target.resource })
        end
      end
      local handle = assert(manager:acquire(R2))
      assert_code("not_provisioned", handle:extend(R1, { mode = "update" }))
      assert.is_true(handle:check())
      assert(handle:release { confirm = true })
      assert.is_true(assert(manager:acquire(R1, { mode = "shared" })):release { confirm = true })
      local status, said = run("verify", "--quiet")
      assert.equal(0, status, said)
      assert.is_nil(said:find("updates", 1, true))

      status, said = run("provision", "--updates", "--quiet")
      assert.equal(0, status, said)
      assert.matches("4,000 rows, 1,000 of them new", said, 1, true)
      handle = assert(manager:acquire(R1, { mode = "update" }))
      assert.is_true(handle:upgrade())
      assert(handle:release { confirm = true })
      status, said = run("verify", "--quiet")
      assert.equal(0, status, said)
      assert.matches("updates +resource +1,000 rows +complete", said)
      assert.equal(0, (run("provision", "--quiet")))

      store.sql():query("DELETE FROM " .. TABLE .. " WHERE level = -126 AND bucket BETWEEN 10 AND 19")
      status, said = run("verify", "--quiet")
      assert.equal(1, status, said)
      assert.matches("missing: 10-19", said, 1, true)
      assert.matches("hierlock provision --updates", said, 1, true)
      assert.equal(0, (run("provision", "--updates", "--quiet")))
      assert.equal(0, (run("verify", "--quiet")))
    end)
  end)
end)

describe("a lock for update of a store that grants everything", function()
  it("is had, and may become exclusive and go back", function()
    local manager = assert(hierlock.open "null:")
    local handle = assert(manager:acquire(R1, { mode = "update" }))
    assert.is_true(handle:upgrade())
    assert.is_true(handle:downgrade())
    assert.is_true(handle:release { confirm = true })
    manager:close()
  end)
end)
