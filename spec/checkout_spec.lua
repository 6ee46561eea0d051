-- The example of check-out, examples/checkout: a real nginx with two workers, started by the line that the example
-- prints. Two people and an administrator use it over HTTP, and in a browser. nginx's Lua is LuaJIT, and it loads
-- the very module that is tested; so these specs are for LuaJIT.
if not rawget(_G, "jit") then return pending "checkout: skipped: needs LUAS=luajit" end

local hierlock = require "hierlock"
local checkout = require "spec.support.checkout"
local chromium = require "spec.support.chromium"
local support = require "spec.support"

local SHORT = 0.4 -- a time to live that is waited for
local BAKERY, HOTEL = "/customer/1", "/customer/2"
local TYPED = { name = "Ada's Bakery", phone = "1", note = "new" }

describe("the example of check-out", function()
  support.unless_missing(checkout.missing(), "nginx", function()
    local server, clerk1, clerk2

    local function start(options)
      if server then server:stop() end
      server = nil
      server = checkout.start(options)
      return server
    end

    teardown(function() if server then server:stop() end end)

    -- The state of a customer, as the list shows it.
    local function state(person, path)
      local status, page = person:get "/"
      assert.equal(200, status)
      return page:match('href="' .. path .. '">[^\n]-<span class="state %l+">(.-)</span>')
    end

    local function has(page, text) assert(page:find(text, 1, true), text .. " is not in\n" .. page) end
    local function has_not(page, text) assert(not page:find(text, 1, true), text .. " is in\n" .. page) end

    -- Reads rows of the example's SQLite database.
    local function rows(query)
      local connection = assert(require("luasql.sqlite3").sqlite3():connect(server.database))
      assert(connection:execute "PRAGMA busy_timeout = 5000"):close() -- a worker may be writing
      local cursor = assert(connection:execute(query))
      local found = {}
      if type(cursor) ~= "number" then
        for row in function() return cursor:fetch({}, "a") end do found[#found + 1] = row end
        cursor:close()
      end
      connection:close()
      return found
    end

    support.each_store(function(store)
      store = support.leased(store)
      -- An embedded store is in a directory that the workers make, as they may be another user.
      local dsn = store.server and store.dsn or nil
      setup(function() store.prepare() end)
      teardown(function() -- its connections, too
        if server then server:stop() end
        server = nil
      end)

      describe("with enough time", function()
        setup(function() start { dsn = dsn } end)
        before_each(function()
          clerk1, clerk2 = server:log_in "clerk1", server:log_in "clerk2"
          rows "UPDATE customer SET name = 'Ada''s Bakery', phone = '030 5550 117', note = 'Rolls' WHERE id = 1"
        end)
        after_each(function()
          for _, login in ipairs { "clerk1", "clerk2", "admin1" } do
            assert.equal(303, (server:log_in(login):post "/logout"))
          end
          assert.is_nil(server:output():find "lua entry thread aborted", server:output())
        end)

        it("lists who has what, since when and until when", function()
          assert.equal("free", state(clerk2, BAKERY))
          assert.equal(303, (clerk1:post(BAKERY .. "/take")))
          local since, till = state(clerk2, BAKERY):match "^in use by clerk1 since (%d%d:%d%d), until (%d%d:%d%d)$"
          local now = os.time()
          local function recent(text, ago)
            return text == os.date("%H:%M", now - ago) or text == os.date("%H:%M", now - ago - 20)
          end
          assert.is_true(recent(since, 0), since)
          assert.is_true(recent(till, -900), till)
          assert.matches("^yours until %d%d:%d%d$", state(clerk1, BAKERY))
          assert.equal("free", state(clerk2, HOTEL))
        end)

        it("lets one edit, and answers 423 to the other", function()
          local status, _, headers = clerk1:post(BAKERY .. "/take")
          assert.same({ 303, BAKERY }, { status, headers.location })
          local page
          status, page = clerk1:get(BAKERY)
          assert.equal(200, status)
          has(page, "<textarea")
          status, page = clerk2:post(BAKERY .. "/take")
          assert.equal(423, status)
          has(page, "in use by clerk1 since")
          has_not(page, "<textarea")
          has_not(page, "Take it away") -- that is an administrator's
          assert.equal(303, (clerk1:post(BAKERY .. "/take"))) -- a second click
          assert.equal(303, (clerk2:post(HOTEL .. "/take")))
        end)

        it("saves, and gives back", function()
          clerk1:post(BAKERY .. "/take")
          local status, _, headers = clerk1:post(BAKERY .. "/save", { name = "Ada's Bread", phone = "1", note = "a\r\nb\0" })
          assert.same({ 303, "/?done=saved" }, { status, headers.location })
          assert.equal("free", state(clerk2, BAKERY))
          local customer = rows("SELECT * FROM customer WHERE id = 1")[1]
          assert.same({ "Ada's Bread", "a\nb" }, { customer.name, customer.note })
          assert.equal(16, #customer.token)
          assert.equal(303, (clerk2:post(BAKERY .. "/take")))
          local _, page = clerk2:get(BAKERY)
          has(page, 'value="Ada&#39;s Bread"')
        end)

        it("gives back without saving", function()
          clerk1:post(BAKERY .. "/take")
          local status, _, headers = clerk1:post(BAKERY .. "/back", TYPED)
          assert.same({ 303, "/?done=back" }, { status, headers.location })
          assert.equal("free", state(clerk2, BAKERY))
          assert.equal("Rolls", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("saves nothing of one who has not taken it, and shows what he typed", function()
          local status, page = clerk1:post(BAKERY .. "/save", { name = "x", phone = "1", note = "my work" })
          assert.equal(409, status)
          has(page, "You do not have it any more.")
          has(page, "my work")
          assert.equal(409, (clerk1:post(BAKERY .. "/renew")))
          assert.equal("Rolls", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("saves nothing from a window of before, when the same session has taken it again", function()
          clerk1:post(BAKERY .. "/take")
          local before = { token = clerk1.token, name = "Ada's Bakery", phone = "1", note = "typed in a window of before" }
          clerk1:post(BAKERY .. "/back") -- in another window
          clerk2:post(BAKERY .. "/take")
          assert.equal(303, (clerk2:post(BAKERY .. "/save", { name = "Ada's Bakery", phone = "1", note = "of clerk2" })))
          clerk1:post(BAKERY .. "/take")
          local status, page = clerk1:post(BAKERY .. "/save", before)
          assert.equal(409, status)
          has(page, "typed in a window of before")
          has(page, "You have opened it again since, in another window.")
          assert.equal("of clerk2", rows("SELECT note FROM customer WHERE id = 1")[1].note)
          local said
          status, said = clerk1:post(BAKERY .. "/renew", before)
          assert.same({ 409, "You have opened it again since, in another window." }, { status, said })
          assert.equal(409, (clerk1:post(BAKERY .. "/back", before)))
          -- The other window has it still.
          status, page = clerk1:get(BAKERY)
          assert.equal(200, status)
          has(page, "of clerk2</textarea>")
          assert.equal(200, (clerk1:post(BAKERY .. "/renew")))
          -- A refused form can be mended in its window.
          assert.equal(422, (clerk1:post(BAKERY .. "/save", { name = " ", phone = "1", note = "x" })))
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
        end)

        it("keeps it when what was typed cannot be saved", function()
          clerk1:post(BAKERY .. "/take")
          for _, customer in ipairs { { name = " ", phone = "1", note = "my work" }, { name = "x", phone = ("9"):rep(500), note = "my work" } } do
            local status, page = clerk1:post(BAKERY .. "/save", customer)
            assert.equal(422, status)
            has(page, "my work</textarea>")
          end
          assert.matches("^yours", state(clerk1, BAKERY))
        end)

        it("renews while somebody types", function()
          clerk1:post(BAKERY .. "/take")
          local manager = assert(hierlock.open(server.dsn))
          finally(function() manager:close() end)
          local function remaining() return manager:leases({ owner = "clerk1" })[1].remaining end
          -- Act as if the lease was renewed long ago.
          local text = rows("SELECT text FROM taken")[1].text
          assert(manager:import(text, { ttl = 60, auto_release = false }))
          assert.is_true(remaining() <= 60)
          local status, said, headers = clerk1:post(BAKERY .. "/renew")
          assert.equal(200, status)
          assert.matches("^yours until %d%d:%d%d$", said)
          assert.equal("text/plain; charset=utf-8", headers["content-type"])
          assert.is_true(remaining() > 800)
          -- Each other look at the page renews it, too.
          assert(manager:import(text, { ttl = 60, auto_release = false }))
          assert.equal(200, (clerk1:get(BAKERY)))
          assert.is_true(remaining() > 800)
        end)

        it("never sends the text of a lease to a browser", function()
          local _, page, headers = clerk1:post(BAKERY .. "/take")
          local text = rows("SELECT text FROM taken")[1].text
          assert.matches("^hl1%-", text)
          local all = { page }
          for _, path in ipairs { "/", BAKERY } do
            for _, person in ipairs { clerk1, clerk2 } do all[#all + 1] = select(2, person:get(path)) end
          end
          for _, value in pairs(headers) do all[#all + 1] = value end
          all[#all + 1] = select(2, clerk1:post(BAKERY .. "/renew"))
          has_not(table.concat(all, "\n"), text:sub(1, 20))
        end)

        it("goes on when somebody else has imported the text: the later one has it", function()
          clerk1:post(BAKERY .. "/take")
          local manager = assert(hierlock.open(server.dsn))
          finally(function() manager:close() end)
          local text = rows("SELECT text FROM taken")[1].text
          local stranger = assert(manager:import(text, { auto_release = false }))
          assert.equal(200, (clerk1:post(BAKERY .. "/renew")))
          local ok, err = stranger:check()
          assert.is_nil(ok)
          assert.equal("lost", err.code)
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
          assert.equal("free", state(clerk1, BAKERY))
        end)

        it("lets an administrator take it away, and tells the clerk by whom and why", function()
          clerk1:post(BAKERY .. "/take")
          local admin = server:log_in("admin1", true)
          local _, page = admin:get(BAKERY)
          has(page, "Take it away")
          local status, _, headers = admin:post(BAKERY .. "/free", { lease = admin.lease, reason = "lunch" })
          assert.same({ 303, BAKERY .. "?freed=yes" }, { status, headers.location })
          assert.equal("free", state(clerk2, BAKERY))

          local said
          status, said = clerk1:post(BAKERY .. "/renew")
          assert.same({ 409, "admin1 took it from you: lunch" }, { status, said })
          assert.equal(303, (clerk2:post(BAKERY .. "/take")))
          status, page = clerk1:post(BAKERY .. "/save", { name = "x", phone = "1", note = "my work" })
          assert.equal(409, status)
          has(page, "admin1 took it from you: lunch")
          has(page, "my work")
          has(page, "in use by clerk2")
          -- Once.
          status, page = clerk1:get(BAKERY)
          assert.equal(200, status)
          has_not(page, "lunch")
          assert.matches("^in use by clerk2", state(clerk1, BAKERY))
          assert.equal("Rolls", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("tells the clerk also when he gives back what was taken away", function()
          clerk1:post(BAKERY .. "/take")
          local admin = server:log_in("admin1", true)
          admin:get(BAKERY)
          admin:post(BAKERY .. "/free", { lease = admin.lease, reason = "lunch" })
          local status, page = clerk1:post(BAKERY .. "/back")
          assert.equal(409, status)
          has(page, "admin1 took it from you: lunch")
          local _, _, headers = clerk1:post(BAKERY .. "/back") -- he knows
          assert.equal("/?done=back", headers.location)
        end)

        it("takes nothing from one whom the administrator has not seen", function()
          clerk1:post(BAKERY .. "/take")
          local admin = server:log_in("admin1", true)
          admin:get(BAKERY)
          clerk1:post(BAKERY .. "/back")
          clerk2:post(BAKERY .. "/take")
          local _, _, headers = admin:post(BAKERY .. "/free", { lease = admin.lease, reason = "lunch" })
          assert.equal(BAKERY .. "?freed=no", headers.location)
          assert.equal(200, (clerk2:post(BAKERY .. "/renew")))
        end)

        it("lets nobody else take it away, nor without a reason", function()
          clerk1:post(BAKERY .. "/take")
          local admin = server:log_in("admin1", true)
          admin:get(BAKERY)
          assert.equal(403, (clerk2:post(BAKERY .. "/free", { lease = admin.lease, reason = "mine" })))
          assert.equal(422, (admin:post(BAKERY .. "/free", { lease = admin.lease, reason = "" })))
          assert.equal(422, (admin:post(BAKERY .. "/free", { lease = admin.lease, reason = ("x"):rep(128) })))
          assert.equal(422, (admin:post(BAKERY .. "/free", { reason = "lunch" })))
          assert.equal(200, (clerk1:post(BAKERY .. "/renew")))
        end)

        it("gives back at log-out all that somebody has, in all of his browsers", function()
          local elsewhere = server:log_in "clerk1"
          clerk1:post(BAKERY .. "/take")
          elsewhere:post(HOTEL .. "/take")
          local status, page = elsewhere:post(BAKERY .. "/take")
          assert.equal(423, status)
          has(page, "You have it in another browser.")
          clerk2:post("/customer/3/take")
          assert.equal(303, (clerk1:post "/logout"))
          assert.equal("free", state(clerk2, BAKERY))
          assert.equal("free", state(clerk2, HOTEL))
          assert.matches("^yours", state(clerk2, "/customer/3"))
          local _, _, headers = elsewhere:get "/"
          assert.equal("/login", headers.location)
          status, page = elsewhere:post(HOTEL .. "/save", { name = "x", phone = "1", note = "my work" })
          assert.equal(401, status)
          has(page, "my work")
        end)

        it("ends a session by its age", function()
          assert.equal(200, (clerk1:get "/"))
          rows "UPDATE session SET since = since - 12 * 3600 - 1 WHERE login = 'clerk1'"
          local status, _, headers = clerk1:get "/"
          assert.same({ 303, "/login" }, { status, headers.location })
          assert.equal(401, (clerk1:post(BAKERY .. "/take")))
        end)

        it("leaves nothing to one who logs out while he takes it", function()
          for i = 1, 15 do
            local clerk = server:log_in "clerk1"
            local first = clerk:send(i % 2 == 0 and "/logout" or BAKERY .. "/take")
            local second = clerk:send(i % 2 == 0 and BAKERY .. "/take" or "/logout")
            local statuses = { (first()), (second()) }
            assert.equal("free", state(clerk2, BAKERY), table.concat(statuses, " "))
          end
        end)

        it("takes two clicks at the same moment for one", function()
          for _ = 1, 3 do -- each costs a look at the holders, of which a manager allows ten in a second
            local first, second = clerk1:send(BAKERY .. "/take"), clerk1:send(BAKERY .. "/take")
            assert.same({ 303, 303 }, { (first()), (second()) })
            has(select(2, clerk1:get(BAKERY)), "<textarea")
            assert.equal(303, (clerk1:post(BAKERY .. "/back")))
          end
        end)

        it("keeps out a program that locks the customer, and says so where it has it", function()
          local manager = assert(hierlock.open(server.dsn, { application = "nightly" }))
          finally(function() manager:close() end)
          local handle = assert(manager:acquire({ "office", "customer" }, { timeout = 5 }))
          if store.dialect == "mariadb" then support.sleep(0.11) end -- it shows an old picture before
          local status, page = clerk1:post(BAKERY .. "/take")
          assert.equal(423, status)
          has(page, "in use by nightly since")
          assert(handle:release { confirm = true })
          -- A lease on all customers is one on each of them.
          handle = assert(manager:acquire({ "office" }, { timeout = 5, ttl = 60, owner = "stocktaking" }))
          assert.matches("^in use by stocktaking since", state(clerk1, HOTEL))
          assert.equal(423, (clerk1:post(BAKERY .. "/take")))
          assert(handle:release { confirm = true })
          assert.equal(303, (clerk1:post(BAKERY .. "/take")))
        end)

        it("goes on after a reload", function()
          clerk1:post(BAKERY .. "/take")
          server:reload()
          assert.matches("^in use by clerk1", state(clerk2, BAKERY))
          assert.equal(423, (clerk2:post(BAKERY .. "/take")))
          assert.equal(200, (clerk1:post(BAKERY .. "/renew")))
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
          assert.equal("new", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("goes on after a restart", function()
          clerk1:post(BAKERY .. "/take")
          server:restart()
          assert.equal(423, (clerk2:post(BAKERY .. "/take")))
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
        end)

        it("goes on after a worker was killed", function()
          clerk1:post(BAKERY .. "/take")
          for pid in pairs(server:workers()) do assert(require("luv").kill(pid, "sigkill")) end
          support.wait_until(function() return checkout.ask(server, "GET", "/login") end, "new workers")
          assert.equal(423, (clerk2:post(BAKERY .. "/take")))
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
        end)

        it("escapes what people write", function()
          local evil = [["><script>alert('1')</script>&]]
          clerk1:post(BAKERY .. "/take")
          assert.equal(303, (clerk1:post(BAKERY .. "/save", { name = evil, phone = evil, note = "</textarea>" .. evil })))
          clerk1:post(BAKERY .. "/take")
          local admin = server:log_in("admin1", true)
          admin:get(BAKERY)
          local pages = {}
          for _, path in ipairs { "/", BAKERY } do
            for _, person in ipairs { clerk1, clerk2, admin } do pages[#pages + 1] = select(2, person:get(path)) end
          end
          admin:post(BAKERY .. "/free", { lease = admin.lease, reason = evil })
          pages[#pages + 1] = select(2, clerk1:post(BAKERY .. "/save", { name = evil, phone = evil, note = evil }))
          has(pages[#pages], "admin1 took it from you: &quot;&gt;&lt;script&gt;alert(&#39;1&#39;)")
          for _, page in ipairs(pages) do
            has(page, "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&amp;")
            has_not(page, "<script>")
          end
          -- Names cannot have any.
          assert.equal(422, (server:person():post("/login", { login = evil })))
          assert.equal(422, (server:person():post("/login", { login = "" })))
        end)

        it("takes no form but its own", function()
          clerk1:post(BAKERY .. "/take")
          for _, form in ipairs { "", clerk2.form } do
            for _, path in ipairs { BAKERY .. "/save", BAKERY .. "/back", HOTEL .. "/take", "/logout" } do
              assert.equal(403, (clerk1:post(path, { form = form, name = "x" })))
            end
          end
          for _, origin in ipairs { "http://evil.example", "null" } do
            assert.equal(403, (clerk1:post(BAKERY .. "/back", {}, { Origin = origin })))
            assert.equal(403, (server:person():post("/login", { login = "clerk1" }, { Origin = origin })))
          end
          assert.equal(303, (clerk1:post(BAKERY .. "/back", {}, { Origin = "http://127.0.0.1:" .. server.port })))
          local _, _, headers = server:person():post("/login", { login = "clerk1" })
          assert.matches("; HttpOnly; SameSite=Strict", headers["set-cookie"], 1, true)
        end)

        it("answers what it cannot do by its number", function()
          assert.equal(404, (clerk1:get "/nothing"))
          assert.equal(404, (clerk1:get "/customer/99"))
          assert.equal(404, (clerk1:get(BAKERY .. "/nothing")))
          assert.equal(404, (clerk1:get "/customer/1x"))
          assert.equal(404, (clerk1:post "/customer/1take"))
          assert.equal(404, (clerk1:get("/customer/" .. ("9"):rep(400))))
          local status, _, headers = clerk1:get(BAKERY .. "/take")
          assert.same({ 405, "POST" }, { status, headers.allow })
          status, _, headers = clerk1:post "/"
          assert.same({ 405, "GET, HEAD" }, { status, headers.allow })
          status = checkout.ask(server, "DELETE", BAKERY)
          assert.equal(405, status)
          status, _, headers = checkout.ask(server, "GET", BAKERY)
          assert.same({ 303, "/login" }, { status, headers.location })
          status = checkout.ask(server, "POST", BAKERY .. "/take", { form = clerk1.form })
          assert.equal(401, status)
          status = clerk1:post(BAKERY .. "/save", { name = ("x"):rep(70000) })
          assert.equal(413, status)
          status = clerk1:post(BAKERY .. "/save", { name = ("x"):rep(64 * 1024 - 100) }, { ["Transfer-Encoding"] = "chunked" })
          assert.equal(413, status)
          assert.equal(421, (clerk1:get("/", { Host = "elsewhere.example" })))
        end)
      end)

      describe("with little time", function()
        setup(function() start { dsn = dsn, ttl = SHORT } end)
        before_each(function() clerk1, clerk2 = server:log_in "clerk1", server:log_in "clerk2" end)
        after_each(function()
          for _, login in ipairs { "clerk1", "clerk2" } do server:log_in(login):post "/logout" end
        end)

        local function wait_free()
          support.wait_until(function() return state(clerk2, BAKERY) == "free" end, "the end of the lease")
        end

        it("is free when the time is up, and whoever had it is told who has it now", function()
          clerk1:post(BAKERY .. "/take")
          wait_free()
          local manager = assert(hierlock.open(server.dsn))
          finally(function() manager:close() end)
          local later = assert(manager:acquire({ "office", "customer", 1 }, { ttl = 60, timeout = 5, owner = "clerk2" }))
          local status, said = clerk1:post(BAKERY .. "/renew")
          assert.equal(409, status)
          assert.matches("^Your time was up, and clerk2 has it since %d%d:%d%d%.$", said)
          local page
          status, page = clerk1:post(BAKERY .. "/save", { name = "x", phone = "1", note = "my work" })
          assert.equal(409, status)
          has(page, "Your time was up, and clerk2 has it since")
          has(page, "my work")
          assert(later:release { confirm = true })
        end)

        it("tells whoever had it, if somebody has had it and given it back", function()
          clerk1:post(BAKERY .. "/take")
          wait_free()
          clerk2:post(BAKERY .. "/take")
          assert.equal(303, (clerk2:post(BAKERY .. "/back")))
          local status, page = clerk1:get(BAKERY)
          assert.equal(409, status)
          has(page, "Your time was up, and somebody else has had it since.")
          has(page, ">Edit</button>")
        end)

        it("is still his who had it, when nobody has had it since", function()
          clerk1:post(BAKERY .. "/take")
          wait_free()
          local status, page = clerk1:get(BAKERY)
          assert.equal(200, status)
          has(page, "Your time was up, but nobody has had it since: it is yours again.")
          wait_free()
          assert.equal(303, (clerk1:post(BAKERY .. "/save", TYPED)))
          assert.equal("new", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("fences off who had it before, as soon as another one has it", function()
          local function token() return rows("SELECT token FROM customer WHERE id = 1")[1].token end
          clerk1:post(BAKERY .. "/take")
          local before = token()
          assert.matches("^%x+$", before)
          wait_free()
          clerk2:post(BAKERY .. "/take")
          assert.is_true(token() > before) -- though nothing was saved yet
        end)
      end)
    end)

    it("saves nothing of one who is fenced off, and shows what he typed", function()
      start()
      clerk1 = server:log_in "clerk1"
      clerk1:post(BAKERY .. "/take")
      rows "UPDATE customer SET token = 'ffffffffffffffff' WHERE id = 1"
      local status, page = clerk1:post(BAKERY .. "/save", { name = "x", phone = "1", note = "my work" })
      assert.equal(409, status)
      has(page, "my work")
      assert.not_equal("my work", rows("SELECT note FROM customer WHERE id = 1")[1].note)
      assert.equal("free", state(clerk1, BAKERY))
      -- Nor does he take it: who would save nothing, need not type.
      assert.equal(500, (clerk1:post(BAKERY .. "/take")))
      assert.matches("was the store replaced?", server:output(), 1, true)
      assert.equal("free", state(clerk1, BAKERY))
    end)

    it("gives back, though another request of the same person renews it at that very moment", function()
      -- The moment is between the import and the release: here something is done then.
      start()
      clerk1 = server:log_in "clerk1"
      clerk1:post(BAKERY .. "/take")
      local text = rows("SELECT text FROM taken")[1].text
      local manager, open, imports = assert(hierlock.open(server.dsn)), hierlock.open, 0
      local slow = {}
      function slow.import(_, ...)
        local handle, err = manager:import(...)
        imports = imports + 1
        if imports == 1 then assert.equal(200, (clerk1:post(BAKERY .. "/renew"))) end
        return handle, err
      end
      finally(function()
        hierlock.open, _G.ngx = open, nil
        manager:close()
      end)
      hierlock.open, _G.ngx = function() return slow end, { now = os.time }
      assert.is_true(dofile("examples/checkout/locks.lua").give_back(text))
      assert.equal(2, imports)
      assert.equal("free", state(clerk1, BAKERY))
    end)

    it("says what is wrong with a store that has no leases, or cannot be opened", function()
      start { dsn = "null:" }
      local status, page = server:log_in("clerk1"):get "/"
      assert.equal(500, status)
      has(page, "The locks cannot be used.")
      assert.matches("unsupported: ", server:output())
      start { dsn = "mysql://nobody:nothing@127.0.0.1:1/nowhere?connect_timeout=1" }
      local headers
      status, page, headers = server:log_in("clerk1"):get "/"
      assert.equal(503, status)
      assert.equal("1", headers["retry-after"])
      has(page, "The locks cannot be reached.")
      assert.matches("connection: ", server:output())
      assert.is_nil(server:output():find("nothing@", 1, true))
    end)

    -- ------------------------------------------------------------ a browser

    describe("in a browser", function()
      support.unless_missing(chromium.missing(), "chromium", function()
        local browser

        -- Logs a person in, in a browser of their own.
        local function log_in(login, administrator)
          local page = browser:page()
          page:go("http://127.0.0.1:" .. server.port .. "/")
          page:wait_for "Log in"
          page:type("input[name=login]", login)
          if administrator then page:click "input[type=checkbox]" end
          page:click "button.main"
          page:wait_for "Customers"
          return page
        end

        local function open(options)
          start(options)
          browser = chromium.start(server.directory .. "/profile")
        end

        after_each(function()
          if browser then browser:stop() end
          browser = nil
        end)

        it("shows one to the other, and tells the clerk whose work was taken away", function()
          open { ttl = 3 } -- so that typing renews after one second
          local clerk, other, admin = log_in "clerk1", log_in "clerk2", log_in("admin1", true)
          clerk:click "td.action button" -- Ada's Bakery
          clerk:wait_for "yours until"
          other:run "location.reload()"
          other:wait_for "in use by clerk1 since"
          other:click "td.action a"
          other:wait_for "Look again"

          admin:run "location.reload()"
          admin:wait_for "in use by clerk1"
          admin:click "td.action a"
          admin:wait_for "Take it away"
          -- Meanwhile clerk1 types, which renews; but not at each key.
          local keys = 0
          local function renewals()
            return clerk:run "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/renew')).length"
          end
          support.wait_until(function()
            clerk:type("textarea", " x")
            keys = keys + 1
            return renewals() >= 2
          end, "renewals")
          assert.is_true(keys > 10, keys)
          assert.equal("state yours", clerk:run "document.querySelector('#state').className")
          admin:type("input[name=reason]", "lunch")
          admin:click "button.danger"
          admin:wait_for "It is free now."

          support.wait_until(function()
            clerk:type("textarea", " y")
            return clerk:run "document.querySelector('#state').className" == "state lost"
          end, "the clerk to be told")
          clerk:wait_for "admin1 took it from you: lunch"
          assert.is_true(clerk:run "document.querySelector('#save').disabled")
          assert.matches(" x y", clerk:run "document.querySelector('textarea').value") -- his work is still there

          other:click ".button"
          other:wait_for "free"
          other:click "button.main"
          other:wait_for "yours until"
          other:type("textarea", "\nby clerk2")
          other:click "button.main"
          other:wait_for "Saved, and given back."
          assert.matches("by clerk2$", rows("SELECT note FROM customer WHERE id = 1")[1].note)
        end)

        it("says that the time is up, and takes it back by typing", function()
          open { ttl = 1 }
          local clerk = log_in "clerk1"
          clerk:click "td.action button"
          clerk:wait_for "your time is up"
          -- The message is not shown for long: note every text from now on.
          clerk:run [[
            shown = []
            new MutationObserver(() => shown.push(state.textContent)).observe(state, { childList: true })
          ]]
          clerk:type("textarea", "x")
          support.wait_until(function() return clerk:run "shown.length >= 2" end, "the renewal, and its end")
          assert.matches("^yours until %d%d:%d%d|your time is up: ", clerk:run "shown.join('|')")
          clerk:click "#save"
          clerk:wait_for "Saved, and given back."
        end)
      end)
    end)
  end)
end)
