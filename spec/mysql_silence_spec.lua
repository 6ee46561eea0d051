--- A connection stands but its server's answers do not come, or only a part of one: behind a proxy that takes all
-- bytes and passes none on. Such a connection costs its own lock, and no other caller anything; an idle one costs
-- nothing.
-- Parts: stores

local hierlock = require "hierlock"
local proxy = require "spec.support.proxy"
local support = require "spec.support"

local TARGET = { user = "u1", account = "a1", resource = "r1" }

-- For what happens within a round trip or two, on a busy machine.
local SOON = 5
-- A new connection waits so long for a table.
local LOCKED = 4

support.each_server(function(store)
  local between

  after_each(function()
    support.close_peers()
    if between then between.close() end
    between = nil
  end)

  it("a connection that waited for a table does not make later calls wait for one as long", function()
    local root = store.root() or pending "no administrator here"
    root:query "CREATE DATABASE hierlock_spec_slow"
    local dsn = store.root_dsn:match "^(.*/)" .. "hierlock_spec_slow"
    local admin = support.sql_connection(dsn)
    local manager
    finally(function()
      admin:close()
      if manager then manager:close() end
      root:query "DROP DATABASE hierlock_spec_slow"
    end)
    support.provision(admin, "hier_lock_buckets", 100)
    local begun = support.now()
    manager = assert(hierlock.open(dsn, { buckets = 100 }))
    local usual = support.now() - begun
    local first = assert(manager:acquire { "u1" })
    admin:query "LOCK TABLES hier_lock_meta WRITE"
    local waits = assert(manager:start({ "u2" }, { timeout = LOCKED + 2 * SOON }))
    support.sleep(LOCKED)
    admin:query "UNLOCK TABLES"
    local second = assert(waits:wait())
    admin:query "LOCK TABLES hier_lock_meta WRITE"
    begun = support.now()
    local none, err = manager:acquire({ "u3" }, { timeout = 0.1 })
    local took = support.now() - begun
    admin:query "UNLOCK TABLES"
    assert.is_nil(none)
    assert.equal("connection", err.code)
    assert.is_true(took < 2 * LOCKED + 10 * usual, took .. " s")
    second:release()
    first:release()
  end)

  for _, tls in ipairs { "off", "required" } do
    describe("a part of an answer and then silence, tls=" .. tls .. ",", function()
      -- In the peer: for so many seconds looks at its handles all the time; returns for
      -- how long each was said to be held, and how long the longest look took.
      local watch = [[
        local seconds = ...
        local begun, held, longest = support.now(), {}, 0
        while support.now() - begun < seconds do
          for name, handle in pairs(handles) do
            local before = support.now()
            if handle:is_held() and handle:remaining() > 0 then held[name] = before - begun end
            longest = math.max(longest, support.now() - before)
          end
          support.sleep(0.01)
        end
        return held, longest
      ]]

      it("costs that lock, and nobody else anything", function()
        between = proxy.open(store, nil, tls)
        local holder = support.process(store, { hold_timeout = 1 }, between.dsn)
        for i, name in ipairs { "first", "second", "well" } do
          assert.is_true(holder:acquire(name, "acquire", { "u1", "a1", "r" .. i }):result())
        end
        between.hold(1, 1)
        between.hold(2, 6)
        local held, longest = holder:start(watch, 2):result()
        for _, name in ipairs { "first", "second" } do
          assert.is_true(held[name] > 0.2 and held[name] < 1.1, held[name] .. " s")
        end
        assert.is_true(held.well > 1.6, held.well .. " s")
        assert.is_true(longest < 0.9, longest .. " s")
        assert.is_true(holder:acquire("other", "acquire", { "u3" }, { timeout = SOON }):result())
        assert.is_true(holder:call("return handles.well:check()"))
        local took = holder:call [[
          local begun = support.now()
          manager:close()
          return support.now() - begun
        ]]
        assert.is_true(took < 3, took .. " s")
        local other = support.process(store)
        assert.is_true(other:acquire("h", "acquire", { "u1" }, { timeout = SOON }):result())
        assert.is_true(other:release("h"))
      end)

      it("does not keep a check beyond the lease", function()
        between = proxy.open(store, nil, tls)
        local holder = support.process(store, { hold_timeout = 1 }, between.dsn)
        assert.is_true(holder:acquire("h", "acquire", TARGET):result())
        between.hold(1, 2)
        local took, code = holder:call [[
          local begun = support.now()
          local ok, err = handles.h:check()
          return support.now() - begun, ok or err.code
        ]]
        assert.is_true(took < 1 + SOON, took .. " s")
        assert.equal("lost", code)
      end)

      -- A waiter that looks now and then would still sleep when the rest comes; it comes at once when a lease is
      -- refreshed or given back.
      it("is waited for asleep, and not looked at again and again", function()
        between = proxy.open(store, nil, tls)
        local holder = support.process(store, { hold_timeout = 1 }, between.dsn)
        assert.is_true(holder:acquire("h", "acquire", TARGET):result())
        between.hold(1, 2)
        local woken, code = holder:call [[
          local function switches()
            for line in io.lines("/proc/self/status") do
              local n = line:match("^voluntary_ctxt_switches:%s*(%d+)")
              if n then return tonumber(n) end
            end
          end
          local before = switches()
          local ok, err = handles.h:check()
          return switches() - before, ok or err.code
        ]]
        assert.equal("lost", code)
        assert.is_true(woken < 50, woken .. " times")
      end)

      it("is no silence when all of it comes at last, byte by byte", function()
        between = proxy.open(store, nil, tls)
        local holder = support.process(store, { hold_timeout = 2 }, between.dsn)
        assert.is_true(holder:acquire("h", "acquire", TARGET):result())
        between.drip(1, 2)
        local held, longest = holder:start(watch, 3):result()
        assert.is_true(held.h > 2.6, held.h .. " s")
        assert.is_true(longest < 0.9, longest .. " s")
        assert.is_true(holder:call("return handles.h:check()"))
        assert.is_true(holder:release("h"))
      end)
    end)
  end

  describe("idle connections that are half open", function()
    -- In a peer: three connections; `free` is run on the last lock of each.
    local function frozen(hold_timeout, free)
      between = proxy.open(store)
      local peer = support.process(store, { hold_timeout = hold_timeout }, between.dsn)
      for i = 1, 3 do
        assert.is_true(peer:acquire("h" .. i, "acquire", { "idle", "a" .. i }):result())
      end
      assert.equal(3, #between.connections)
      return peer, function() return peer:call(free) end
    end
    -- In the peer: acquires and releases until it has worked five times in turn;
    -- returns how often each outcome was, and the first message.
    local work = [[
      local timeout = ...
      local count, message, finish = { ok = 0 }, nil, support.now() + 15
      repeat
        local handle, err = manager:acquire({ "u1", "a1", "r1" }, { timeout = timeout })
        if handle then assert(handle:release { confirm = true }) end
        count[handle and "ok" or err.code] = (count[handle and "ok" or err.code] or 0) + 1
        message = message or err and err.message
      until count.ok == 5 or support.now() > finish
      return count, message
    ]]
    local release = "for i = 1, 3 do assert(handles['h' .. i]:release()) end"

    for _, timeout in ipairs { 0, 0.5, 1.5 } do
      it("with a release on its way fail no acquisition: timeout " .. timeout, function()
        local peer, free = frozen(30, release)
        for n = 1, 3 do between.hold(n) end
        free()
        local count, message = peer:start(work, timeout):result()
        assert.same({ ok = 5 }, count, message)
      end)

      it("that nobody has heard from fail one acquisition at most: timeout " .. timeout, function()
        local count, message
        for _ = 1, 2 do -- on a busy machine a new connection may take too long, too
          if between then
            support.close_peers()
            between.close()
          end
          local peer, free = frozen(30, release:gsub("release%(%)", "release { confirm = true }"))
          free()
          between.freeze()
          count, message = peer:start(work, timeout):result()
          if (count.connection or 0) <= 1 then break end
        end
        assert.equal(5, count.ok, message)
        assert.is_true((count.connection or 0) <= 1, message)
        assert.is_nil(count.timeout, message)
      end)
    end

    it("are closed when a sign of life is not answered", function()
      local peer, free = frozen(1.5, release:gsub("release%(%)", "release { confirm = true }"))
      free()
      between.freeze()
      support.wait_until(function()
        return peer:call("return manager:stats().connections") == 0
      end, "the connections' end")
      assert.same({ ok = 5 }, (peer:start(work, 0):result()))
    end)

    it("do not keep a look for holders", function()
      local peer, free = frozen(30, release)
      for n = 1, 3 do between.hold(n) end
      free()
      local holders, message = peer:call [[
        local holders, err = manager:holders { "u1" }
        return holders and #holders, tostring(err)
      ]]
      assert.equal(0, holders, message)
    end)
  end)
end)
