-- rediss://: which certificates it trusts, and that everything goes over it as it does without. The server has no
-- port for TLS before.

local hierlock = require "hierlock"
local socket = require "socket"
local support = require "spec.support"

local U1, R1 = { "u1" }, { "u1", "a1", "r1" }
local PROMPT = 0.5

local function assert_code(code, ok, err)
  assert.is_nil(ok)
  assert.equal(code, err.code, err.message)
  return err
end

describe("rediss://", function()
  support.on_redis(function(store)
    local ca = os.getenv "HIERLOCK_REDIS_CA"
    local port, opened

    local function set(name, value) assert.equal("OK", store.cli("CONFIG", "SET", name, value)) end

    -- host: which the certificate names, unless said.
    local function dsn(params, host)
      return ("rediss://testuser:testpassword@%s:%s/0?quarantine=0%s"):format(host or "127.0.0.1", port, params or "")
    end

    local function open(params, host, options)
      local manager, err = hierlock.open(dsn(params, host), options or { timeout = 10 })
      opened[#opened + 1] = manager
      return manager, err
    end

    setup(function()
      local directory = ca:match "^(.*)/"
      local probe = assert(socket.bind("127.0.0.1", 0))
      port = select(2, probe:getsockname())
      probe:close()
      set("tls-auth-clients", "optional")
      assert.equal("OK", store.cli("CONFIG", "SET", "tls-cert-file", directory .. "/cert.pem", "tls-key-file", directory .. "/key.pem",
        "tls-ca-cert-file", ca))
      set("tls-port", port)
    end)

    teardown(function() set("tls-port", "0") end)

    before_each(function() opened = {} end)

    after_each(function()
      support.close_peers()
      for _, manager in ipairs(opened) do manager:close() end
    end)

    it("locks, waits, is woken, refreshes and hands over", function()
      local manager, other = assert(open("&tls_ca=" .. ca)), assert(open("&tls_ca=" .. ca))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      assert_code("timeout", other:acquire(U1, { timeout = 0 }))
      local pending = assert(other:start(U1, { ttl = 60 }))
      support.wait_for_waiters(store, U1)
      assert.is_true(handle:refresh())
      local start = support.now()
      assert(handle:release { confirm = true })
      local taken = assert(pending:wait(5))
      assert.is_true(support.now() - start < PROMPT, support.now() - start)
      local heir = assert(manager:import((assert(taken:export()))))
      assert.is_true(heir:check())
      assert.is_true(heir:release { confirm = true })
      assert.equal(0, manager:stats().reconnects)
    end)

    it("is the same space as without it", function()
      local manager, plain = assert(open("&tls_ca=" .. ca)), assert(support.open(store))
      opened[#opened + 1] = plain
      local handle = assert(manager:acquire(R1))
      assert_code("timeout", plain:acquire(R1, { timeout = 0 }))
      assert(handle:release { confirm = true })
    end)

    it("takes what does not fit into one record of TLS", function()
      local manager, targets = assert(open("&tls_ca=" .. ca)), {}
      for i = 1, 3000 do targets[i] = { "u" .. i % 7, "a" .. i % 91, "r" .. i } end
      local handle = assert(manager:acquire_all(targets, { ttl = 60 }))
      assert.is_true(handle:check())
      assert.is_true(#assert(manager:holders(targets[1])) > 0)
      assert.is_true(handle:release { confirm = true })
    end)

    it("survives a fork: the child is born without it, and the parent goes on", function()
      local peer = support.process(nil)
      assert.is_true(peer:call([[
        local fork = require "hierlock_spec.fork"
        local manager = assert(hierlock.open(...))
        local handle = assert(manager:acquire({ "u1" }, { ttl = 60 }))
        local pid = fork.fork()
        if pid == 0 then
          handle = nil
          manager:close()
          os.exit(0, true)
        end
        local status = fork.wait(pid)
        local checked = handle:check()
        assert(handle:release { confirm = true })
        manager:close()
        return status == 0 and checked
      ]], dsn("&tls_ca=" .. ca)))
    end)

    it("lets a process end while its threads connect and wait", function()
      local handle = assert(assert(open("&tls_ca=" .. ca)):acquire(R1, { ttl = 60 }))
      for i = 1, 20 do
        local output, status = support.run(([[
          local hierlock = require "hierlock"
          local plain = assert(hierlock.open(%q)) -- whose threads are there first
          local manager = assert(hierlock.open(%q))
          local pending = {}
          for i = 1, 5 do pending[i] = assert((i == 1 and plain or manager):start({ "u1", "a1", "r1" })) end
          require("luv").sleep(%d)
          os.exit(7, %s)
        ]]):format(store.dsn, dsn("&tls_ca=" .. ca), i, tostring(i % 2 == 0)))
        assert.same({ "", 7 }, { output, status })
      end
      assert.is_true(handle:release { confirm = true })
    end)

    it("is told of a server that ends every connection", function()
      local manager = assert(open("&tls_ca=" .. ca))
      local handle = assert(manager:acquire(R1, { ttl = 60 }))
      store.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
      assert.is_true(handle:is_held())
      assert.is_true(handle:refresh())
      assert.is_true(handle:release { confirm = true })
    end)

    it("believes a certificate by its CA and the host in it, unless it is told otherwise", function()
      local err = assert_code("connection", open())
      assert.matches("certificate", err.message)
      assert.is_false(err.retryable)
      assert(open "&tls=required")
      assert(open("&tls=verify-ca&tls_ca=" .. ca, "127.1")) -- the same address; the certificate does not say so
      err = assert_code("connection", open("&tls_ca=" .. ca, "127.1"))
      assert.matches("certificate", err.message)
      assert(open("&tls=verify-identity&tls_ca=" .. ca, "localhost"))
    end)

    it("shows a certificate of its own where the server wants one", function()
      set("tls-auth-clients", "yes")
      finally(function() set("tls-auth-clients", "optional") end)
      local directory = ca:match "^(.*)/"
      assert_code("connection", open("&tls_ca=" .. ca))
      local manager = assert(open(("&tls_ca=%s&tls_cert=%s/ca.pem&tls_key=%s/ca-key.pem"):format(ca, directory, directory)))
      assert(assert(manager:acquire(R1)):release { confirm = true })
    end)

    it("says what is wrong with its parameters and files", function()
      assert_code("dsn", open "&tls=perhaps")
      assert_code("dsn", open "&tls_key=/nowhere")
      assert_code("dsn", hierlock.open((store.dsn .. "&tls_ca=" .. ca)))
      for _, params in ipairs { "&tls_ca=/nowhere", "&tls_cert=/nowhere", "&tls_ca=/etc/passwd" } do
        local err = assert_code("connection", open(params))
        assert.matches("TLS: cannot read", err.message)
        assert.is_false(err.retryable)
      end
    end)

    it("gives up in time where nobody speaks TLS, or nobody at all", function()
      local start = support.now()
      assert_code("connection", hierlock.open((store.dsn:gsub("^redis:", "rediss:") .. "&connect_timeout=1")))
      assert.is_true(support.now() - start < 3)
      local silent = assert(socket.bind("127.0.0.1", 0))
      finally(function() silent:close() end)
      start = support.now()
      local err = assert_code("connection", hierlock.open(("rediss://127.0.0.1:%s/?connect_timeout=1"):format(select(2, silent:getsockname()))))
      assert.matches("in time", err.message)
      assert.is_true(support.now() - start >= 1 and support.now() - start < 3)
    end)
  end)
end)
