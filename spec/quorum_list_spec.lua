-- Programs that name different lists of stores: the second is refused. The library does not notice a program that
-- names one of the stores alone, nor an earlier version: `hierlock doctor` of the quorum finds their leases.
-- Parts: stores

local hierlock = require "hierlock"
local json = require "dkjson"
local program = require "spec.support.command"
local support = require "spec.support"

local LONG = 60
local N1, N2 = { "u1", "a1", "r1" }, { "u2" }
local ROOT = support.stores[1].directory .. "/list"

local function quorum_of(dsns)
  local words = {}
  for i, dsn in ipairs(dsns) do words[i] = dsn:gsub("%%", "%%25"):gsub(";", "%%3B") end
  return "quorum:majority;" .. table.concat(words, ";")
end

-- Checks the doctor's finding about the list.
local function assert_status(expected, dsns)
  local said = program.run(quorum_of(dsns), "doctor", "--quick", "--json")
  local object = assert(json.decode(said.out), said.out .. said.err)
  for _, finding in ipairs(object.findings) do
    if finding.check == "one list" then
      assert.equal(expected, finding.status, finding.found)
      return finding.found
    end
  end
  error(said.out .. said.err)
end

support.each_leasing_store(function(plain)
  local store = support.leased(plain)
  if store.name == "quorum" then return end
  local scheme = store.unbucketed and "sqlite" or "file"
  local count, a, b, c, d, e = 0, nil, nil, nil, nil, nil

  -- A store that no program has used.
  local function fresh()
    count = count + 1
    return ("%s:%s%d"):format(scheme, ROOT, count)
  end

  local function start(dsns) return support.process(store, nil, type(dsns) == "table" and quorum_of(dsns) or dsns) end

  local function holder(dsns, target)
    local peer = start(dsns)
    assert(peer:acquire("lease", "acquire", target or N1, { ttl = LONG, owner = "eve" }):result())
    return peer
  end

  setup(store.prepare)

  -- A program that has not opened anything yet.
  local function newcomer() return support.process(nil) end
  -- By majority a program opens without a store that takes long to answer, and looks there later.
  local OPENS = [[
    local dsns, options = ...
    options.quorum = "all"
    local err
    handles.manager, err = hierlock.open(dsns, options)
    if not handles.manager then return nil, err.code, err.message end
    return true
  ]]

  before_each(function()
    a, b, d, e = fresh(), fresh(), fresh(), fresh()
    c = store.server and store.dsn or fresh()
    -- A process may have been killed on a busy machine, or the server may not have answered it at its end. Then it is
    -- present for 30 s more than the longest ttl, plus 2 %.
    support.wait_until(function()
      local opened = newcomer():call(OPENS, { a, b, c }, store.options)
      support.close_peers() -- which waits until this presence has ended
      if not opened then support.sleep(0.5) end -- each look is a program that starts
      return opened
    end, "the presences of the spec before to end", 40 + 1.02 * LONG)
  end)

  after_each(function()
    support.close_peers()
    program.close()
    os.execute(("rm -rf '%s'*"):format(ROOT))
  end)

  if store.lists_by_root then
    it("does not list its leases, so the others are compared", function()
      local peer = holder { a, b, c }
      assert.equal("2 stores list their leases, and all have the same: 1", assert_status("ok", { a, b, c }))
      assert.matches("is at store 3 and not at store 2$", assert_status("warning", { c, d, a }))
      assert(peer:release "lease")
    end)
    return
  end

  local function assert_refused(dsns)
    local ok, code, message = newcomer():call(OPENS, dsns, store.options)
    assert.is_nil(ok)
    assert.equal("mismatch", code)
    return message
  end

  local function assert_kept_out(peer)
    local ok, code = peer:acquire("lease", "acquire", N1, { ttl = LONG, timeout = 0.05 }):result()
    assert.is_nil(ok)
    assert.equal("timeout", code)
  end

  it("is not used by programs with different lists at a time", function()
    local first = holder { a, b, c }
    local message = assert_refused { c, d, e }
    for _, part in ipairs { " is not in the list of the programs that use the other stores: ", a, b, "One list" } do
      assert.truthy(message:find(part, 1, true), message)
    end
    assert_refused { a, b, d }
    assert_refused { c, a, d }
    assert_refused { d, c, e }
    assert.matches(" is used with another list of stores by .- %(process %d+ on .-%): .*One list", assert_refused { a, b, c, d })
    -- The first program is not disturbed, and its list can be used.
    assert(first:release "lease")
    assert(first:acquire("lease", "acquire", N1, { ttl = LONG }):result())
    assert_kept_out(start { b, a, c })
    assert(first:release "lease")
    support.close_peers()
    -- The programs have gone, so the list may be another one.
    local other = holder { c, d, e }
    assert_refused { a, c, b }
    assert(other:release "lease")
  end)

  local function alias(dsn)
    local by_host, n = dsn:gsub("127%.0%.0%.1", "localhost")
    return n > 0 and by_host or (dsn:gsub("/list", "//list"))
  end

  it("names each store once: two names of one store are no two votes", function()
    local holds = holder { a, b, c }
    for _, dsns in ipairs { { a, alias(a), b }, { c, a, alias(c) }, { alias(b), c, b } } do
      assert.matches("are one store, or one is a copy of the other: name each store once", assert_refused(dsns))
    end
    assert(holds:release "lease")
    support.close_peers()
    assert.matches("are one store", assert_refused { c, b, alias(c) })
  end)

  it("is used by programs that name the same stores in another order, and by other names", function()
    local first = holder { a, b, c }
    for _, list in ipairs { { c, b, a }, { alias(c), a, b }, { alias(b), alias(c), alias(a) } } do
      assert_kept_out(start(list))
      assert_refused { list[1], list[2], d }
    end
    assert(first:release "lease")
  end)

  it("may be emptied, and come back", function()
    local first = start { a, b, c }
    local path = a:gsub("^%w+:", "")
    os.execute(("mv -T %s %s-old; rm -rf %s-old; rm -f %s-*"):format(path, path, path, path))
    local second = start { c, a, b }
    assert(second:acquire("lease", "acquire", N1, { ttl = LONG }):result())
    assert_refused { a, d, e }
    assert_kept_out(first)
    assert(second:release "lease")
    assert(first:acquire("lease", "acquire", N1, { ttl = LONG }):result())
    assert(first:release "lease")
  end)

  it("is had by one of two programs that come at once with different lists, and by both with one", function()
    for i = 1, 5 do
      local one, two = newcomer(), newcomer()
      one:start(OPENS, { a, b, c }, store.options)
      two:start(OPENS, i % 2 == 0 and { c, d, e } or { b, c, d }, store.options)
      local first, second = { one:result() }, { two:result() }
      assert.is_true((first[1] or second[1]) and (first[2] or second[2]) == "mismatch", first[3] or second[3])
      support.close_peers()
    end
    local one, two = newcomer(), newcomer()
    one:start(OPENS, { a, b, c }, store.options)
    two:start(OPENS, { c, b, a }, store.options)
    assert.same({ true }, { one:result() })
    assert.same({ true }, { two:result() })
  end)

  if store.name == "redis" then
    it("stops the program that reaches it last, when it was down at first", function()
      store.command "stop"
      local peers = { start { a, b, c }, start { c, d, e } }
      for _, peer in ipairs(peers) do assert(peer:acquire("lease", "acquire", N1, { ttl = LONG }):result()) end
      store.command "start"
      local stopped
      support.wait_until(function()
        for i, peer in ipairs(peers) do
          local ok, code = peer:acquire("other", "acquire", N2, { ttl = LONG, timeout = 0 }):result()
          if ok then assert(peer:release "other") end
          if code == "mismatch" then stopped = i end
        end
        return stopped
      end, "the stop of the second there")
      local other = peers[3 - stopped]
      assert(other:release "lease")
      assert(other:acquire("lease", "acquire", N2, { ttl = LONG }):result())
      assert(other:release "lease")
      assert.equal("mismatch", select(2, peers[stopped]:acquire("other", "acquire", N2, { ttl = LONG, timeout = 0 }):result()))
    end)
  end

  it("is told of a program in whose list one store is another", function()
    local peer = holder { a, b, c }
    assert.matches("is at stores 1, 2 and not at store 3$", assert_status("warning", { c, a, d }))
    assert(peer:release "lease")
  end)

  it("is told of a program that names it alone", function()
    local peer = holder(c)
    assert.matches("is at store 3 and not at stores 1, 2$", assert_status("warning", { a, b, c }))
    assert(peer:release "lease")
  end)

  it("is well with programs that name the same stores, in any order", function()
    local first, second = holder { a, b, c }, holder({ c, a, b }, N2)
    assert.equal("3 stores list their leases, and all have the same: 2", assert_status("ok", { b, c, a }))
    assert(first:release "lease")
    assert(second:release "lease")
  end)

  it("is compared with those that answer", function()
    local peer = holder { b, c, d }
    local down = scheme .. ":/proc/none"
    assert.equal("2 stores list their leases, and all have the same: 1", assert_status("ok", { b, down, c }))
    assert(peer:release "lease")
    assert.matches("^1 of 3 stores", assert_status("unseen", { down, c, down .. "0" }))
  end)

  it("is well when what a store has forgotten is healed, and does not take a waiter's part for a lease", function()
    local dsns = { a, b, c }
    local peer, waiter = holder(dsns), start(dsns)
    local path = a:gsub("^%w+:", "")
    os.execute(("mv -T %s %s-old; rm -rf %s-old; rm -f %s-*"):format(path, path, path, path))
    waiter:start([[ handles.lease = assert(manager:acquire({ "u1", "a1", "r1" }, { ttl = 60, timeout = 60, owner = "waiter" })) ]])
    local manager = assert(hierlock.open(a, store.options))
    support.wait_until(function()
      local found = assert(manager:leases())
      return found[1] and found[1].owner == "waiter"
    end, "the waiter's part")
    manager:close()
    assert.matches("^u1/a1/r1 of eve .* is at stores 2, 3 and not at store 1$", assert_status("warning", dsns))
    assert(peer:release "lease")
    waiter:result()
    assert_status("ok", dsns)
    assert(waiter:release "lease")
  end)
end)
