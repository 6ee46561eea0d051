-- Memcached's own matters: its missing promises, and that it keeps the others; hostile items; several servers; the
-- server flushed. leases_spec.lua and server_spec.lua have what it shares with other stores.

local uv = require "luv"
local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local U1, A1, R1, R2 = { "u1" }, { "u1", "a1" }, { "u1", "a1", "r1" }, { "u1", "a1", "r2" }
local LONG = 60

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

describe("Memcached", function()
  support.on_memcached(function(store)
    local manager, other, opened

    local function open(options, params)
      opened[#opened + 1] = support.open(store, options, params)
      return opened[#opened]
    end

    before_each(function()
      opened = {}
      store.say "flush_all"
      manager, other = open { application = "the holder" }, open { application = "the other" }
    end)

    after_each(function()
      support.close_peers()
      for _, one in ipairs(opened) do one:close() end
      store.say "flush_all"
      manager, other, opened = nil, nil, nil
    end)

    -- Tries once. On a busy machine the server may not answer in the 0.2 s that a try has for that: then once more.
    local function try(one, target, ttl)
      for tries = 1, 30 do
        local handle, err = one:acquire(target, { timeout = 0, ttl = ttl })
        if handle or err.code ~= "connection" or tries == 30 then return handle, err end
      end
    end

    local function free(target) return assert(assert(try(other, target)):release { confirm = true }) end
    local function taken(target) return assert_code("timeout", try(other, target)) end

    -- The keys of the n documents that there are, in order. The crawler, which lists keys, may be busy.
    local function document_keys(n)
      local keys
      support.wait_until(function()
        keys = {}
        for line in store.say("lru_crawler metadump all"):gmatch "[^\n]+" do
          keys[#keys + 1] = line:gsub("%%3A", ":"):match "key=(hierlock:root:%x+)"
        end
        return #keys == n
      end, "the documents")
      table.sort(keys)
      return keys
    end

    local function document_key() return document_keys(1)[1] end

    -- Lists the keys of liveness items.
    local function live_keys()
      local keys = {}
      for line in store.say("lru_crawler metadump all"):gmatch "[^\n]+" do
        local key = line:gsub("%%3A", ":"):match "key=(hierlock:live:%x+)"
        if key and store.say("mg " .. key) ~= "EN" then keys[#keys + 1] = key end
      end
      return keys
    end

    -- ------------------------------------------------------------- its clock

    it("keeps a lease for its ttl at least, in whole seconds, and for three more at most", function()
      for _, ttl in ipairs { 0.3, 1, 1.4 } do
        support.sleep(0.6) -- the last one has ended with a second of the server's
        local start = support.now()
        local handle = support.keep(assert(manager:acquire(R1, { ttl = ttl })))
        assert(assert(other:acquire(R1, { timeout = 10 })):release { confirm = true })
        local waited = support.now() - start
        assert.is_true(waited >= ttl, waited)
        assert.is_true(waited < math.ceil(ttl) + 3 + 4, waited)
        assert_code("lost", handle:refresh())
      end
    end)

    -- The server reads the time once a second, cut to whole ones, by a timer that drifts. When it drifts over the end of
    -- a second, the time jumps by two. Here that is brought about, by two stops without any request to be answered.
    it("keeps a lease for its ttl though the server's clock jumps by two seconds", function()
      local pipe = io.popen(store.control .. " pid")
      local pid = tonumber(pipe:read "*l")
      pipe:close()
      finally(function() uv.kill(pid, "sigcont") end)
      local function sleep_to(second) support.sleep(second - support.now()) end
      for _ = 1, 2 do
        local second = math.floor(support.now()) + 2
        assert(uv.kill(pid, "sigstop")) -- the next tick comes with the end of this stop
        sleep_to(second + 0.9)
        assert(uv.kill(pid, "sigcont"))
        sleep_to(second + 1.75)
        local start = support.now()
        local handle = support.keep(assert(manager:acquire(R1, { ttl = 1 })))
        assert(uv.kill(pid, "sigstop")) -- the one after it, after the end of a second
        sleep_to(second + 2.02)
        assert(uv.kill(pid, "sigcont"))
        assert(assert(other:acquire(R1, { timeout = 10 })):release { confirm = true })
        local waited = support.now() - start
        assert.is_true(waited >= 1, waited)
        assert_code("lost", handle:refresh())
      end
    end)

    -- It counts seconds from a start that it has rounded, and may be ahead of the client's clock.
    it("has tokens grow after it has lost its data, also while its clock is ahead", function()
      local between = proxy.open(store, function(data)
        return (data:gsub("STAT time (%d+)", function(time) return ("STAT time %d"):format(time + 2) end))
      end)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      local last = ""
      for _ = 1, 30 do -- some of them in one millisecond
        local token = peer:call([[
          local handle = assert(manager:acquire({ "u1" }, { ttl = 9 }))
          assert(handle:release { confirm = true })
          return handle.token
        ]])
        assert.is_true(token > last, token .. " after " .. last)
        last = token
        store.say "flush_all"
      end
    end)

    it("refuses a ttl that it would take for a date", function()
      local month = 30 * 86400
      assert.truthy(assert_code("unsupported", manager:acquire(R1, { ttl = month })).message:find("30 days", 1, true))
      local handle = assert(manager:acquire(R1, { ttl = month - 3 }))
      assert.is_true(manager:leases({ target = R1 })[1].remaining > month - 10)
      assert_code("unsupported", handle:refresh(month))
      assert.is_true(handle:check())
    end)

    -- --------------------------------------------------------------- what it has not

    it("has no extend, and says who has", function()
      local handle = assert(manager:acquire(R1))
      assert.equal("lease", handle.kind)
      assert_code("unsupported", handle:extend(R2))
      assert_code("unsupported", handle:to_lease { ttl = 1 })
      assert.is_true(handle:check())
    end)

    it("lists by root, and says so where none is named", function()
      support.keep(assert(manager:acquire(R1, { ttl = LONG, owner = "alice" })))
      support.keep(assert(manager:acquire({ "u2" }, { ttl = LONG, owner = "alice" })))
      for _, filter in ipairs { {}, { owner = "alice" } } do
        assert.truthy(assert_code("unsupported", manager:leases(filter)).message:find("name a target", 1, true))
      end
      assert_code("unsupported", manager:revoke { owner = "alice" })
      assert.equal(1, #manager:leases { target = U1 })
      assert.equal(1, #manager:leases { target = { "u2" }, owner = "alice" })
      assert.equal(0, manager:revoke { id = ("0"):rep(32) })
    end)

    it("shows a lease of several roots at each, and once", function()
      local handle = assert(manager:acquire_all({ R1, { "u2", "a1" }, { "u3" } }, { ttl = LONG }))
      for _, root in ipairs { "u1", "u2", "u3" } do assert.equal(1, #other:leases { target = { root } }) end
      taken { "u3", "x" }
      taken { "u2" }
      local text = assert(handle:export())
      handle = assert(other:import(text))
      assert.is_true(handle:check())
      assert.equal(1, other:revoke({ target = { "u3" } }, { by = "admin" }))
      assert.equal("admin", assert_code("lost", handle:refresh()).revoked_by)
      for _, root in ipairs { "u1", "u2", "u3" } do free { root } end
    end)

    it("gives one of several roots a token that later ones of each exceed", function()
      for _ = 1, 3 do assert(assert(manager:acquire { "u3" }):release { confirm = true }) end
      local all = assert(manager:acquire_all { { "u1" }, { "u2" }, { "u3" } })
      assert(all:release { confirm = true })
      for _, root in ipairs { "u1", "u2", "u3" } do
        local one = assert(other:acquire { root })
        assert.is_true(one.token > all.token)
        assert(one:release { confirm = true })
      end
    end)

    -- -------------------------------------------------------------- what is left over

    it("keeps no more than the document, and that does not grow", function()
      local size
      for i = 1, 300 do
        assert(assert(manager:acquire({ "u1", "a1", "r" .. i }, { ttl = LONG })):release { confirm = true })
        local n = #store.say("gets " .. document_key())
        size = math.max(size or 0, n)
      end
      assert.is_true(size < 2000, size)
      assert.same({}, live_keys())
      for _ = 1, 3 do
        local handle = assert(manager:acquire(R1, { ttl = LONG }))
        assert_code("timeout", other:acquire(R1, { timeout = 0.05 }))
        assert(handle:release { confirm = true })
      end
      assert.same({}, live_keys())
    end)

    it("asks nobody whether those live that it has released itself, also hundreds of others since", function()
      local N = 200
      local function cycles()
        for i = 1, N do assert(assert(manager:acquire { "u" .. i, "a", "r" }):release()) end
      end
      local function reads() return tonumber(store.say("stats"):match "STAT cmd_get (%d+)") end
      cycles()
      local before = reads()
      cycles()
      -- A document each; of the liveness items only of those whose place in its memory others have taken.
      assert.is_true(reads() - before < 1.5 * N, reads() - before)
    end)

    it("takes any bytes for ids, of any length", function()
      local odd = { { "a b\r\n\0", ("x"):rep(1024), "\255" }, { "delete x\r\nflush_all\r\n" }, { ("y"):rep(1024) } }
      for _, target in ipairs(odd) do
        local handle = assert(manager:acquire(target, { ttl = LONG, label = "a\r\nb\0", owner = "o\r\nset x 0 0 1" }))
        taken(target)
        assert.equal(1, #manager:leases { target = target })
        assert.equal("o\r\nset x 0 0 1", manager:leases({ target = target })[1].owner)
        assert(handle:release { confirm = true })
        free(target)
      end
    end)

    it("ends a wait on time though others write its root all the time", function()
      assert(assert(manager:acquire(R1, { ttl = LONG })):release { confirm = true })
      local key = document_key()
      local peers = {}
      for i = 1, 4 do
        peers[i] = support.process(nil)
        peers[i]:start([[
          local host, port, key, seconds = ...
          local socket, now = assert(require("socket").connect(host, port)), require("socket").gettime
          assert(socket:send(("get %s\r\n"):format(key)))
          local size = tonumber(assert(socket:receive "*l"):match " (%d+)$")
          local data = assert(socket:receive(size))
          local all = ("set %s 0 0 %d noreply\r\n%s\r\n"):format(key, size, data):rep(20)
          local stop = now() + seconds
          while now() < stop do assert(socket:send(all)) end
          socket:shutdown "send"
          socket:receive "*a" -- until the server has read all, and would write this root no more
        ]], store.host, store.port, key, 2)
      end
      support.sleep(0.3)
      for _, timeout in ipairs { 0, 0.1, 0.2, 0.1 } do
        local start = support.now()
        local handle, err = manager:acquire(R1, { timeout = timeout })
        local took = support.now() - start
        assert.is_true(took < (timeout > 0 and timeout or 1) + 0.8, took)
        -- A server that is as busy may also answer too late: `connection`.
        if handle then assert(handle:release()) else assert.is_true(err.retryable, tostring(err)) end
      end
      for _, peer in ipairs(peers) do peer:result() end
    end)

    it("says it clearly when a tree does not fit into an item", function()
      local handle = assert(manager:acquire(R1, { ttl = LONG }))
      local names = {}
      for i = 1, 120000 do names[i] = "n" .. i end
      local err = assert_code("store", manager:acquire_resources("u1", "a2", names, { ttl = LONG, timeout = 10 }))
      assert.truthy(err.message:find("does not fit into an item", 1, true), err.message)
      assert.is_true(handle:check())
      free { "u1", "a2" }
    end)

    -- ------------------------------------------------------------------ hostile items

    it("takes garbage in its keys for an error, and nothing else", function()
      local handle = assert(manager:acquire(R1, { ttl = LONG }))
      local key = document_key()
      local function put(name, value) store.say(("set %s 0 0 %d\r\n"):format(name, #value) .. value) end -- Lua 5.1 ends %s at a \0
      local head = "HLD1" .. ("\0"):rep(8)
      for _, bad in ipairs {
        "", "x", "HLD1", "HLD2 as a later version has it", head, head .. "\255\255\255\255", head .. "\0\0\0\1" .. ("\0"):rep(53), head .. "\0\0\0\0\0",
        head .. "\0\0\0\1" .. ("i"):rep(48) .. "\1\255\255\255\255" .. ("r"):rep(10),
        head .. "\0\0\0\1" .. ("i"):rep(48) .. "\1\0\0\0\1\99\1" .. ("b"):rep(8),
        head .. "\0\0\0\1" .. ("i"):rep(48) .. "\1\0\0\0\1\0\9" .. ("b"):rep(8), ("z"):rep(100000) } do
        put(key, bad)
        local said = assert_code("store", try(other, R1)).message
        -- The item may be of a later version, and no message may ask for its deletion.
        local ours = bad:sub(1, 3) == "HLD"
        assert.matches(ours and "made by another version of hierlock" or "not of hierlock's making", said)
        assert.equal(not ours, said:find("delete", 1, true) ~= nil)
        assert_code("store", other:leases { target = R1 })
        assert_code("store", other:revoke { target = R1 })
        assert_code("store", handle:check())
        assert_code("store", handle:refresh())
      end
      store.say("delete " .. key)
      assert_code("lost", handle:refresh())
      handle = assert(manager:acquire(R1, { ttl = LONG }))
      local live = live_keys()[1]
      for _, bad in ipairs { "", "4:HLL1", "4:HLL1999999999999:x", "4:HLL11:0", "4:HLL11:04:abcd", ("9"):rep(5000) } do
        put(live, bad)
        taken(R1) -- presence counts
        assert_code("store", handle:refresh())
        assert_code("store", other:leases { target = R1 })
      end
      assert.is_true(handle:release { confirm = true })
      free(R1)
    end)

    it("refuses a space of somebody else's, other levels, another list of servers", function()
      local function refused(code, what, params, options)
        local one, err = hierlock.open(store.dsn .. "?prefix=" .. params, options)
        assert_code(code, one, err)
        assert.truthy(err.message:find(what, 1, true), err.message)
      end
      store.say "set p1:space 0 0 5\r\nhello"
      refused("mismatch", "not of hierlock's making", "p1")
      store.say(("set p2:space 0 0 %d\r\n%s"):format(#"hierlock1 2-0123456789abcdef user", "hierlock1 2-0123456789abcdef user"))
      refused("mismatch", "another list of servers", "p2")
      store.say(("set p4:space 0 0 %d\r\n%s"):format(#"hierlock2 x", "hierlock2 x"))
      refused("mismatch", "another version of hierlock", "p4")
      hierlock.open(store.dsn .. "?prefix=p3", { levels = { "x", "y" } }):close()
      refused("mismatch", "leave out `levels`", "p3", { levels = { "x", "z" } })
      local one = assert(hierlock.open(store.dsn .. "?prefix=p3"))
      assert(assert(one:acquire { x = "1", y = "2" }):release { confirm = true })
      one:close()
    end)

    it("keeps spaces with other prefixes apart", function()
      local handle = assert(manager:acquire(R1))
      local one = open({}, "prefix=elsewhere")
      assert(assert(try(one, R1)):release { confirm = true })
      assert.is_true(handle:check())
    end)

    it("understands its DSNs, and says what is wrong with others", function()
      for dsn, what in pairs {
        ["memcached://u:p@h"] = "without a log-in", ["memcached://h/db"] = "?prefix=", ["memcached://h,"] = "empty server",
        ["memcached://h,h:11211"] = "twice", ["memcached://h:x"] = "port", ["memcached://h?time_out=1"] = "'time_out'",
        ["memcached://h?prefix=a%20b"] = "prefix", ["memcached://h?connect_timeout=soon"] = "connect_timeout" } do
        local err = assert_code("dsn", hierlock.open(dsn))
        assert.truthy(err.message:find(what, 1, true), err.message)
      end
      assert_code("connection", hierlock.open "memcached://127.0.0.1:1")
      assert_code("connection", hierlock.open("memcached://127.0.0.1:1," .. store.host .. ":" .. store.port))
      assert_code("mismatch", hierlock.open("memcached://" .. store.host .. ":" .. store.port .. ",127.0.0.1:1"))
    end)

    -- ------------------------------------------------------- when it forgets

    it("says to those who ask for a lease that the connection is the matter when the server is silent", function()
      local calls = {
        refresh = function(_, handle) return handle:refresh() end,
        check = function(_, handle) return handle:check() end,
        release = function(_, handle) return handle:release { confirm = true } end,
        holders = function(one) return one:holders(U1) end,
      }
      local managers, handles, said = {}, {}, {}
      for name in pairs(calls) do
        managers[name] = open { pool_size = 1 }
        handles[name] = assert(managers[name]:acquire({ name }, { ttl = 3, auto_refresh = false }))
      end
      finally(store.continue)
      store.stop()
      for name, call in pairs(calls) do
        local ok, err = call(managers[name], handles[name])
        said[name] = not ok and err.code
      end
      store.continue()
      assert.same({ refresh = "connection", check = "connection", release = "connection", holders = "connection" }, said)
    end)

    it("tells a holder whose document alone was forgotten, at his refresh", function()
      local handle = assert(manager:acquire(R1, { ttl = LONG }))
      store.say("delete " .. document_key())
      local taken_ = assert(try(other, R1, LONG))
      assert_code("lost", handle:refresh())
      assert.is_true(taken_:refresh())
      assert.equal(1, #live_keys())
      local again = support.keep(assert(manager:acquire(R2, { ttl = LONG })))
      store.say("delete " .. document_key())
      assert_code("lost", again:release { confirm = true })
    end)

    it("calls no release `lost` whose waiter was let in before its answer", function()
      for _ = 1, 100 do
        local handle = assert(manager:acquire(R1, { ttl = LONG }))
        local pending = assert(manager:start(R1, { ttl = LONG }))
        support.wait_for_waiters(store, R1)
        support.sleep(0.03) -- then it looks often
        assert(handle:release { confirm = true })
        assert(assert(pending:wait(5)):release { confirm = true })
      end
    end)

    -- A manager strikes its own released leases out without a question, perhaps before the server reads the release;
    -- all the same, the lease was unbroken until its release.
    it("calls no release `lost` because others of its manager strike it out before the server has read it", function()
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      peer:call([[
        handles.lease = assert(manager:acquire(..., { ttl = 60 }))
        handles.pending = assert(manager:start(..., { ttl = 60 }))
      ]], R1)
      support.wait_until(function()
        uv.run "nowait"
        return store.waiting(R1) > 0
      end, "the waiter, over one connection; so the release goes over another")
      peer:call [[
        assert(handles.lease:release { confirm = true })
        handles.lease = assert(handles.pending:wait(5))
      ]]
      local before = manager:leases({ target = R1 })[1].id
      for i = 1, #between.connections do between.hold(i) end
      peer:call("handles.pending = assert(manager:start(..., { ttl = 60, timeout = 10 }))", R1)
      local asks, releases
      support.wait_until(function()
        uv.run "nowait"
        for i, one in ipairs(between.connections) do if #one.kept > 0 then asks = i end end
        return asks
      end, "the answer of the document to the waiter")
      for i = 1, #between.connections do
        if i ~= asks then
          between.let(i)
          between.detain(i)
        end
      end
      peer:start "return handles.lease:release { confirm = true }"
      support.wait_until(function()
        uv.run "nowait"
        for i, one in ipairs(between.connections) do if one.detained and #one.detained > 0 then releases = i end end
        return releases
      end, "the release")
      between.let(asks)
      support.wait_until(function()
        uv.run "nowait"
        local lease = manager:leases({ target = R1 })[1]
        return lease and lease.id ~= before or store.waiting(R1) > 0
      end, "the next grant, or a place in the queue")
      between.deliver(releases)
      assert.is_true(peer:result())
      assert.is_true(peer:call "return handles.pending:wait(5):check()")
    end)

    -- Clients that read the document strike out every entry that does not live.
    it("has the item of one that lives before the document that names him, however late it answers", function()
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      assert.is_true(peer:call("return assert(manager:acquire(...)):release { confirm = true }", R1))
      local function document()
        local line = store.say("gets " .. document_key()):match "^[^\n\r]+"
        local size, version = line:match " (%d+) (%d+)$"
        return version, #line + size + #"\r\n\r\nEND\r\n"
      end
      local before, answer = document()
      -- The peer reads the document, and hears nothing more.
      for i = 1, #between.connections do between.hold(i, answer) end
      peer:start("handles.lease = manager:acquire(..., { ttl = 60, timeout = 10 }) return handles.lease ~= nil", R1)
      support.wait_until(function()
        uv.run "nowait"
        return document() ~= before
      end, "that it is written")
      taken(R1)
      for i = 1, #between.connections do between.let(i) end
      assert.is_true(peer:result())
      taken(R1)
    end)

    it("strikes a lease that its caller has given up out at each root, before the server reads the last grant", function()
      local between = proxy.open(store)
      finally(function() between.close() end)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      local targets = { { "u1" }, { "u2" } }
      assert.is_true(peer:call("return assert(manager:acquire_all(..., { ttl = 60 })):release { confirm = true }", targets))
      local last = document_keys(2)[2] -- in locking order
      for i = 1, #between.connections do between.detain(i, "cas " .. last) end
      peer:start("return select(2, manager:acquire_all(..., { ttl = 60, timeout = 0 })).code", targets)
      local late
      support.wait_until(function()
        uv.run "nowait"
        for i, one in ipairs(between.connections) do late = one.detained and i or late end
        return late
      end, "the last grant")
      for _, one in ipairs(between.connections) do one.text = nil end
      local said = #between.sent
      assert.equal("connection", peer:result())
      support.wait_until(function()
        uv.run "nowait"
        return between.sent:find("delete hierlock:live:", said + 1, true) and #live_keys() == 0
      end, "the end of the lease")
      local upstream = between.connections[late].upstream
      between.deliver(late)
      upstream:write "quit\r\n"
      support.wait_until(function()
        uv.run "nowait"
        return upstream:is_closing()
      end, "the server to read all of it")
      for _, target in ipairs(targets) do free(target) end
    end)

    it("understands answers that come a byte at a time", function()
      free(R1) -- so that there is a document
      local between = proxy.open(store)
      finally(function() between.close() end)
      between.drip(nil, 1)
      local peer = support.process(setmetatable({ dsn = between.dsn }, { __index = store }))
      assert.is_true(peer:call([[
        local handle = assert(manager:acquire(..., { ttl = 60 }))
        assert(#assert(manager:leases { target = ... }) == 1)
        return assert(handle:check()) and assert(handle:refresh()) and assert(handle:release { confirm = true })
      ]], R1))
    end)

    -- --------------------------------------------------------------- several servers

    -- Two servers of the spec's own: their addresses, and what ends one of them.
    local function two_servers()
      local at, handles, ended = {}, {}, 0
      for i = 1, 2 do
        local probe = assert(require("socket").bind("127.0.0.1", 0))
        local _, port = probe:getsockname()
        probe:close()
        at[i] = "127.0.0.1:" .. port
        handles[i] = assert(uv.spawn("memcached", { args = { "-u", "nobody", "-l", "127.0.0.1", "-p", port, "-U", "0" } },
          function() ended = ended + 1 end))
        support.wait_until(function()
          local socket = require("socket").connect("127.0.0.1", tonumber(port))
          return socket and socket:close()
        end, "memcached")
      end
      local function stop(i)
        if not handles[i] then return end
        local before = ended
        handles[i]:kill "sigkill"
        handles[i] = nil
        repeat uv.run "once" until ended > before
      end
      finally(function() stop(1) stop(2) end)
      return at, stop
    end

    it("distributes the roots over several servers, and moves none of a server that is down", function()
      local at, stop = two_servers()
      local servers = { at[1] .. "," .. at[2], at[2] .. "," .. at[1] }
      local one, two = assert(hierlock.open("memcached://" .. servers[1])), assert(hierlock.open("memcached://" .. servers[2]))
      opened[#opened + 1], opened[#opened + 2] = one, two
      assert_code("mismatch", hierlock.open("memcached://" .. at[1]))
      local handles, targets = {}, {}
      for i = 1, 40 do
        targets[i] = { "u" .. i, "a" }
        handles[i] = assert(one:acquire(targets[i], { ttl = LONG }))
      end
      for i = 1, 40 do
        assert_code("timeout", try(two, { "u" .. i }))
        local found = two:leases { target = { "u" .. i } }
        assert.equal(1, #found)
        if i % 2 == 0 then
          assert.equal(1, two:revoke({ id = found[1].id }, { by = "admin" }))
          assert.equal("admin", assert_code("lost", handles[i]:refresh()).revoked_by)
        else
          assert.is_true(handles[i]:refresh())
          assert.is_true(handles[i]:release { confirm = true })
        end
      end
      local many = {}
      for i = 1, 40 do many[i] = { "v" .. i } end
      local all = assert(one:acquire_all(many, { ttl = LONG }))
      for i = 1, 40 do assert_code("timeout", try(two, many[i])) end
      all = assert(two:import((assert(all:export()))))
      assert.is_true(all:refresh() and all:check())
      assert.is_true(all:release { confirm = true })
      stop(2)
      local codes = { connection = 0, granted = 0 }
      for i = 1, 40 do
        local handle, err = one:acquire(targets[i], { timeout = 0.5 })
        local code = handle and "granted" or err.code
        codes[code] = codes[code] + 1
        if handle then assert(handle:release { confirm = true }) end
      end
      assert.is_true(codes.connection > 5 and codes.granted > 5, codes.connection .. " " .. codes.granted)
    end)

    -- -------------------------------------------------------------- many at once

    it("lets one in at a time, in the order in which they came, when they die as well", function()
      local handle = assert(manager:acquire(A1, { ttl = LONG }))
      local peers = {}
      for i = 1, 4 do
        peers[i] = support.process(store)
        peers[i]:acquire("lock", "acquire", R1)
        support.wait_for_waiters(store, R1, i)
      end
      peers[2]:signal "sigkill"
      assert(handle:release { confirm = true })
      assert.is_true(peers[1]:result())
      assert.is_true(peers[3]:stays_blocked() and peers[4]:stays_blocked())
      peers[1]:release "lock"
      assert.is_true(peers[3]:result()) -- once the dead one is known to be
      assert.is_true(peers[4]:stays_blocked())
      peers[3]:release "lock"
      assert.is_true(peers[4]:result())
      peers[4]:release "lock"
    end)

    it("lets no two in, of many who take, cancel and are killed", function()
      local file = os.tmpname()
      finally(function() for _, name in ipairs { "", ".r1", ".r2" } do os.remove(file .. name) end end)
      local RUN = [[
        local file, seed, seconds = ...
        math.randomseed(seed)
        local ends, n = support.now() + seconds, 0
        while support.now() < ends do
          local handle, err = manager:acquire({ "u1", "a1", "r" .. math.random(2) },
            { ttl = 20, timeout = math.random() < 0.3 and math.random() * 0.02 or 5, mode = "exclusive" })
          if handle then
            n = n + 1
            local name = file .. "." .. handle.targets[1].resource
            local mark = assert(io.open(name, "r+") or io.open(name, "w+"))
            local inside = mark:read "*l" or ""
            mark:close()
            if inside ~= "" then return "two are in: " .. inside end
            mark = assert(io.open(name, "w")) mark:write(seed, "\n") mark:close()
            if math.random() < 0.2 then support.sleep(0.05) end
            mark = assert(io.open(name, "w")) mark:close()
            if not handle:is_held() then return "lost" end
            handle:release()
          elseif err.code ~= "timeout" and err.code ~= "connection" then -- a busy machine may not answer in time
            return tostring(err)
          end
        end
        return n
      ]]
      local peers = {}
      for i = 1, 6 do
        peers[i] = support.process(store)
        peers[i]:start(RUN, file, i, 3)
      end
      local all = 0
      for i = 1, 6 do
        local n = peers[i]:result()
        assert.is_number(n, n)
        all = all + n
      end
      assert.is_true(all > 6, all)
      free(U1)
    end)
  end)
end)
