-- Several Lua states in one process, each in a thread and with a manager of its own. No object of one state reaches
-- another one: cqueues passes plain values only, luv copies the bytes of a userdata, which then must not count as a
-- second owner.

local support = require "spec.support"

describe("Lua states in one process", function()
  support.each_store(function(store)
    after_each(support.close_peers)

    it("exclude each other, each with its own manager", function()
      local output, status = support.run(([[
        local uv = require "luv"
        local file = os.tmpname()
        local threads = {}
        for i = 1, 4 do
          threads[i] = uv.new_thread(function(path, cpath, dsn, options, file)
            package.path, package.cpath = path, cpath
            local manager = assert(require("hierlock").open(dsn, (loadstring or load)("return " .. options)()))
            for _ = 1, 25 do
              assert(manager:with({ "u1", "a1" }, function()
                local input = io.open(file)
                local n = tonumber(input:read("*a")) or 0
                input:close()
                local output = io.open(file, "w")
                output:write(n + 1)
                output:close()
              end) == nil)
            end
            manager:close()
          end, package.path, package.cpath, %q, %q, file)
        end
        for _, thread in ipairs(threads) do thread:join() end
        print(io.open(file):read("*a"))
        os.remove(file)
        os.exit(0) -- closing a state that has had threads, luv 1.51 crashes by itself
      ]]):format(store.dsn, support.encode(store.options)))
      assert.equal("100\n", output)
      assert.equal(0, status)
    end)

    it("do not own what luv has copied from another one", function()
      local output, status = support.run(([[
        local uv, hierlock = require "luv", require "hierlock"
        local dsn, options = %q, %q
        local names = { "handle", "pending", "manager" }
        local async
        async = uv.new_async(function(handle, pending, manager)
          local function say(...) print((select(2, pcall(...)):gsub("^.-hierlock: ", "hierlock: "))) end
          say(function() return handle:check() end)
          say(function() return handle:release() end)
          say(function() return pending:wait() end)
          say(function() return manager:acquire({ "u1" }) end)
          handle, pending, manager = nil, nil, nil
          collectgarbage() collectgarbage()
          async:close()
        end)
        local thread = uv.new_thread(function(async, path, cpath, dsn, options)
          package.path, package.cpath = path, cpath
          local manager = assert(require("hierlock").open(dsn, (loadstring or load)("return " .. options)()))
          local handle = assert(manager:acquire { "u1" })
          local pending = assert(manager:start { "u2" })
          async:send(handle, pending, manager)
          while not async:is_closing() do require("luv").sleep(1) end
          assert(handle:check())
          assert(pending:wait():check())
          print "still its own"
          io.stdout:flush()
        end, async, package.path, package.cpath, dsn, options)
        uv.run()
        thread:join()
        collectgarbage()
      ]]):format(store.dsn, support.encode(store.options)))
      assert.equal(table.concat({
        "hierlock: self must be a handle, not one of another Lua state",
        "hierlock: self must be a handle, not one of another Lua state",
        "hierlock: self must be a pending, not one of another Lua state",
        "hierlock: self must be a manager, not one of another Lua state; call it with a colon",
        "still its own",
      }, "\n"), (output:gsub("%s+$", "")))
      assert.equal(0, status)
    end)

    it("cannot be given what another one has by cqueues", function()
      local manager = support.open(store)
      finally(function() manager:close() end)
      local handle = assert(manager:acquire { "u1" })
      local pending = assert(manager:start { "u2" })
      support.wait_until(function() return pending:done() end)
      for _, value in ipairs { manager, handle, pending } do
        assert.is_false(pcall(require("cqueues.thread").start, function() end, value))
      end
      assert.is_true(handle:check())
    end)
  end, true)
end)
