-- `hierlock doctor` of a quorum finds the programs that name another list of stores, or one of its stores alone: the
-- library does not notice them.

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

-- What doctor says of the list.
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

  -- One that nobody has used.
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

  before_each(function()
    a, b, d, e = fresh(), fresh(), fresh(), fresh()
    c = store.server and store.dsn or fresh()
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

  it("is told of two programs with different lists, which hold one node, whoever came first", function()
    local first, second = holder { a, b, c }, holder { c, d, e }
    local text = assert_status("warning", { c, d, e })
    assert.matches("u1/a1/r1 of eve .- is at store 1 and not at stores 2, 3", text)
    assert.matches("u1/a1/r1 of eve .- is at stores 2, 3 and not at store 1", text) -- where the other one keeps it out
    assert(first:release "lease")
    assert(second:release "lease")
    assert.equal("3 stores list their leases, and all have the same: 0", assert_status("ok", { a, b, c }))
    second = holder({ c, d, e }, N2)
    assert.matches("^u2 of eve .* is at store 3 and not at stores 1, 2$", assert_status("warning", { a, b, c }))
    assert(second:release "lease")
  end)

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

  if store.name == "embedded" then
    it("may change in one store while programs go on, once nobody reaches the old one", function()
      local function is_kept_out(peer)
        local ok, code = peer:acquire("lease", "acquire", N1, { ttl = LONG, timeout = 0.05 }):result()
        assert.is_nil(ok)
        assert.equal("timeout", code)
      end
      local old, path = start { a, b, c }, c:gsub("^%w+:", "")
      os.execute(("mv -T %s %s-gone; : > %s"):format(path, path, path))
      for _, list in ipairs { { a, b, d }, { a, d, b }, { d, b, a } } do
        local new = start(list)
        for _, pair in ipairs { { old, new }, { new, old } } do
          assert(pair[1]:acquire("lease", "acquire", N1, { ttl = LONG }):result())
          is_kept_out(pair[2])
          assert(pair[1]:release "lease")
        end
      end
    end)
  end

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
