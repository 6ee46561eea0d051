-- The example of a shop, examples/shop: a real nginx with four workers, started by the line that the example prints.
-- Customers, clerks, batches and workers act at once, in each of its ways; each error has its page; and the same in
-- a browser. With hierlock.rows by itself, each way against each trouble is in rows_spec.lua.
--
-- nginx's Lua is LuaJIT, and it loads the very module that is tested; so these specs are for LuaJIT.
if not rawget(_G, "jit") then return pending "shop: skipped: needs LUAS=luajit" end

local hierlock = require "hierlock"
local chromium = require "spec.support.chromium"
local support = require "spec.support"
local uv = require "luv"
local website = require "spec.support.website"

local WAYS = { "none", "conditional", "optimistic", "pessimistic", "hierlock" }
local CLIENTS, STOCK = 6, 5

describe("the example of a shop", function()
  support.unless_missing(website.missing(), "nginx", function()
    local server

    teardown(function() if server then server:stop() end end)

    local function start(dsn, database, wait)
      if server then server:stop() end
      server = nil
      server = website.start("shop", dsn, function(directory)
        return { SHOP_DATABASE = database or "sqlite:" .. directory .. "/hierlock-shop/data.db", SHOP_WAIT = wait or 20,
                 SHOP_MAIL = directory .. "/hierlock-shop/mail" }
      end)
    end

    local function has(page, text) assert(page:find(text, 1, true), text .. " is not in\n" .. page) end

    local ENTITIES = { amp = "&", lt = "<", gt = ">", quot = '"' }

    -- The contents of a field of the page's form.
    local function field(page, name)
      local value = assert(page:match('name="' .. name .. '"[^>]- value="([^"]*)"'), name .. " is not in\n" .. page)
      return (value:gsub("&(%a+);", ENTITIES):gsub("&#39;", "'"))
    end

    local function get(path, headers) return website.ask(server, "GET", path, nil, headers) end
    local CONTROL = { ["/way"] = true, ["/reset"] = true, ["/night"] = true }

    local function post(path, fields, headers)
      fields = fields or {}
      if CONTROL[path] then fields.form = fields.form or field(select(2, get "/"), "form") end
      return website.ask(server, "POST", path, fields, headers)
    end

    local function new_ref()
      return (assert(uv.random(16)):gsub(".", function(byte) return ("%02x"):format(byte:byte()) end))
    end

    -- Stock and price of a product, as all see them.
    local function product(id)
      local _, page = get("/clerk/" .. id)
      return tonumber(page:match 'In stock: <span class="state %l+">(%-?%d+)<'), field(page, "price")
    end

    local function orders()
      local _, page = get "/"
      local new, sending, sent = page:match "Orders: (%d+) to be confirmed, (%d+) being confirmed, (%d+) confirmed"
      return tonumber(new), tonumber(sending), tonumber(sent)
    end

    local function begin_anew(way)
      assert.equal(303, (post "/reset"))
      assert.equal(303, (post("/way", { way = way })))
    end

    -- Sends forms at one moment; returns how often each status was answered, and the answers.
    local function at_once(requests)
      local answers, count = {}, {}
      for i, request in ipairs(requests) do answers[i] = website.send(server, "POST", request[1], request[2]) end
      for i, wait in ipairs(answers) do
        answers[i] = { wait() }
        local status = answers[i][1]
        count[status] = (count[status] or 0) + 1
      end
      return count, answers
    end

    local function times(n, make)
      local list = {}
      for i = 1, n do list[i] = make(i) end
      return list
    end

    -- Starts a program of the example. Returns a function that waits for it and returns its output.
    local function program(name, ...)
      local environment = { "PATH=/usr/bin:/bin", "LUA_PATH=examples/?.lua;lua/?.lua;lua/?/init.lua;;", "LUA_CPATH=build/luajit/?.so;;",
                            "HIERLOCK_DSN=" .. server.dsn }
      for variable, value in pairs(server.variables) do environment[#environment + 1] = variable .. "=" .. value end
      local output, exit, said = uv.new_pipe(false), nil, ""
      local process = assert(uv.spawn("/bin/sh", { args = { "-c", 'exec luajit "$0" "$@" 2>&1', "examples/shop/" .. name, ... },
                                                   env = environment, stdio = { nil, output } }, function(code) exit = code end))
      output:read_start(function(_, data) said = said .. (data or "") end)
      return function()
        support.wait_until(function() uv.run "nowait" return exit end, name, 120)
        process:close()
        output:close()
        uv.run "nowait"
        assert.equal(0, exit, said)
        return said
      end
    end

    local function batch(...) return program("batch.lua", ...) end

    local function mail()
      local list, twice, seen = {}, 0, {}
      for ref in io.lines(server.variables.SHOP_MAIL) do
        list[#list + 1] = ref
        if seen[ref] then twice = twice + 1 end
        seen[ref] = true
      end
      return #list, twice
    end

    -- The forms of many who have looked at a product.
    local function screens(id)
      return times(CLIENTS, function() return select(2, get("/clerk/" .. id)) end)
    end

    -- --------------------------------------------------------- the troubles

    -- Without control, trouble is a matter of luck: try until it is seen.
    local function troubles()
      it("without control sells what is not there, loses deliveries and prices, and sends twice", function()
        begin_anew "none"
        support.wait_until(function()
          post "/reset"
          at_once(times(CLIENTS, function() return { "/buy", { id = 1, number = STOCK, ref = new_ref() } } end))
          return product(1) < 0
        end, "a stock below zero")

        post "/reset"
        local pages = screens(2)
        for i = 1, 2 do assert.equal(303, (post("/clerk/2/deliver", { seen = field(pages[i], "seen"), number = 10 }))) end
        assert.equal(STOCK + 10, (product(2)))

        pages = screens(3)
        assert.equal(303, (post "/night"))
        assert.equal(303, (post("/clerk/3/save", { seen = field(pages[1], "seen"), name = "Mint", price = field(pages[1], "price") })))
        assert.equal("3.20", (select(2, product(3))))

        support.wait_until(function()
          post "/reset"
          post("/clerk/4/deliver", { seen = field(screens(4)[1], "seen"), number = 1000 })
          at_once(times(40, function() return { "/buy", { id = 4, number = 1, ref = new_ref() } } end))
          local batches = times(3, function() return batch "messages" end)
          for _, wait in ipairs(batches) do wait() end
          local all, twice = mail()
          assert.equal(40, all - twice)
          return twice > 0
        end, "a message that is sent twice")
      end)

      for _, way in ipairs(WAYS) do
        if way ~= "none" then
          it(way .. ": sells what there is, and no more", function()
            for _ = 1, 3 do
              begin_anew(way)
              local count = at_once(times(CLIENTS, function() return { "/buy", { id = 1, number = STOCK, ref = new_ref() } } end))
              assert.same({ [303] = 1, [409] = CLIENTS - 1 }, count)
              assert.equal(0, (product(1)))
              count = at_once(times(CLIENTS, function() return { "/buy", { id = 2, number = 1, ref = new_ref() } } end))
              assert.equal(STOCK - count[303], (product(2)))
              assert.is_true(count[303] == STOCK or way == "optimistic" and count[303] > 0, count[303]) -- many tries in vain
              assert.equal(1 + count[303], (orders()))
            end
          end)

          it(way .. ": has all deliveries in the stock", function()
            begin_anew(way)
            local pages, expected = screens(1), STOCK + 10 * CLIENTS
            local forms = times(CLIENTS, function(i) return { "/clerk/1/deliver", { seen = field(pages[i], "seen"), number = 10 } } end)
            repeat
              local _, answers = at_once(forms)
              forms = {}
              for _, answer in ipairs(answers) do
                if answer[1] ~= 303 then
                  assert.equal(409, answer[1], answer[2])
                  assert.equal("10", field(answer[2], "number"))
                  forms[#forms + 1] = { "/clerk/1/deliver", { seen = field(answer[2], "seen"), number = 10 } }
                end
              end
              assert.is_true(#forms == 0 or way == "optimistic")
            until #forms == 0
            assert.equal(expected, (product(1)))
          end)

          it(way .. ": overwrites no price that two batches have computed, and says what has changed", function()
            begin_anew(way)
            local pages = screens(3)
            local running = { batch "prices", batch "prices" }
            for _, wait in ipairs(running) do assert.equal("5 prices computed, 0 not\n", wait()) end
            for i = 1, CLIENTS do
              local status, page = post("/clerk/3/save", { seen = field(pages[i], "seen"), name = "Peppermint", price = field(pages[i], "price") })
              assert.equal(409, status)
              has(page, "Somebody else has changed it since you opened it. Nothing was saved.")
              has(page, '<tr class="differs"><th>Price</th><td>3.20</td><td>3.20</td><td>3.40</td></tr>')
              assert.same({ "Peppermint", "3.40" }, { field(page, "name"), field(page, "price") })
              if i == CLIENTS then -- he goes on with the form of the answer; but a batch runs once more
                assert.equal("5 prices computed, 0 not\n", batch "prices"())
                for _, answer in ipairs { 409, 303 } do
                  status, page = post("/clerk/3/save", { seen = field(page, "seen"), name = field(page, "name"), price = field(page, "price") })
                  assert.equal(answer, status)
                end
              end
            end
            assert.equal("3.50", (select(2, product(3))))
            has(select(2, get "/"), "<td>Peppermint</td>")
          end)

          it(way .. ": sends each message once, by several workers", function()
            begin_anew(way)
            post("/clerk/1/deliver", { seen = field(screens(1)[1], "seen"), number = 1000 })
            local count = at_once(times(30, function() return { "/buy", { id = 1, number = 1, ref = new_ref() } } end))
            local running, sent = times(3, function() return batch "messages" end), 0
            for _, wait in ipairs(running) do sent = sent + wait():match "^(%d+) messages sent\n$" end
            local all, twice = mail()
            assert.same({ count[303], count[303], 0 }, { sent, all, twice })
            assert.same({ 0, 0, count[303] }, { orders() })
          end)
        end
      end

      it("is used by its load script, which finds nothing but without control", function()
        local said = program("load.lua", "--port", tostring(server.port), "--rounds", "2", "--seconds", "0.5",
                             "--json", server.directory .. "/numbers")()
        for _, way in ipairs(WAYS) do
          local packets, deliveries, prices, messages, all = said:match("\n" .. way .. " +(%d+) +(%d+) +(%d+) +(%d+) +(%d+)")
          assert(all, said)
          local wrong = packets + deliveries + prices + messages
          assert.is_true(tonumber(all) > 0, said)
          assert.is_true(way == "none" and wrong > 0 or way ~= "none" and wrong == 0, said)
        end
        local file = assert(io.open(server.directory .. "/numbers"))
        local numbers = require("dkjson").decode(file:read "*a")
        file:close()
        assert.same({ "none", 5 }, { numbers[1].way, #numbers })
      end)
    end

    describe("on SQLite", function()
      setup(start)
      troubles()

      it("holds an order to be one, however often its form is sent", function()
        begin_anew "conditional"
        local form = { id = 1, number = 2, ref = new_ref() }
        assert.same({ [303] = 4 }, (at_once(times(4, function() return { "/buy", form } end))))
        assert.equal(303, (post("/buy", form)))
        assert.equal(STOCK - 2, (product(1)))
        assert.equal(1, (orders()))
      end)

      it("tells how many are left", function()
        begin_anew "conditional"
        local status, page = post("/buy", { id = 1, number = 7, ref = new_ref() })
        assert.equal(409, status)
        has(page, "You wanted 7. There are 5 left.")
      end)

      it("refuses forms that are not its own", function()
        begin_anew "optimistic"
        local page = screens(1)[1]
        local seal = field(page, "seen")
        for _, seen in ipairs { "", "x", seal .. "0", (seal:gsub("stock=n5", "stock=n9")), field(screens(2)[1], "seen") } do
          assert.equal(403, (post("/clerk/1/save", { seen = seen, name = "x", price = "1.00" })))
          assert.equal(403, (post("/clerk/1/deliver", { seen = seen, number = 1 })))
        end
        assert.equal(403, (post("/reset", {}, { Origin = "http://elsewhere.example" })))
        for _, path in ipairs { "/way", "/reset", "/night" } do assert.equal(403, (post(path, { form = "x", way = "none" }))) end
        assert.equal(421, (get("/", { Host = "elsewhere.example:" .. server.port })))
        assert.same({ 422, 422, 422, 422 }, {
          (post("/buy", { id = 1, number = 0, ref = new_ref() })), (post("/buy", { id = 1, number = 1, ref = "x" })),
          (post("/clerk/1/save", { seen = seal, name = " ", price = "1.00" })), (post("/clerk/1/deliver", { seen = seal, number = "-3" })),
        })
        assert.equal(422, (post("/way", { way = "NAMES" })))
        assert.same({ 404, 404, 404 }, { (get "/nothing"), (get "/clerk/99"), (post("/buy", { id = 99, number = 1, ref = new_ref() })) })
        assert.equal(405, (website.ask(server, "DELETE", "/")))
        assert.equal(STOCK, (product(1)))
      end)

      it("answers 413 to a form that is too long, and keeps its connection to the database", function()
        begin_anew "conditional"
        local _, errors = server:output():gsub("%[error%]", "")
        assert.equal(413, (website.ask(server, "POST", "/buy", { id = ("1"):rep(70000) })))
        assert.equal(413, (website.ask(server, "POST", "/buy", { id = ("1"):rep(64 * 1024 - 100) }, { ["Transfer-Encoding"] = "chunked" })))
        assert.equal(303, (post("/buy", { id = 1, number = 1, ref = new_ref() })))
        assert.equal(errors + 1, select(2, server:output():gsub("%[error%]", ""))) -- nginx's own, of the first
      end)

      it("escapes what people type", function()
        begin_anew "conditional"
        local page = screens(1)[1]
        assert.equal(303, (post("/clerk/1/save", { seen = field(page, "seen"), name = "<b>'\"&tea", price = "4.50" })))
        for _, path in ipairs { "/", "/clerk", "/clerk/1" } do
          page = select(2, get(path))
          has(page, "&lt;b&gt;&#39;&quot;&amp;tea")
          assert.is_nil(page:find("<b>", 1, true))
        end
      end)
    end)

    -- ----------------------------------------------------------- who has it

    it("says who has it, and puts aside what the batch cannot have", function()
      start(nil, nil, 0.3)
      begin_anew "hierlock"
      local manager = assert(hierlock.open(server.dsn))
      local stock = assert(manager:acquire({ "shop", "stock", 1 }, { label = "stocktaking" }))
      local price = assert(manager:acquire({ "shop", "price", 2 }, { label = "a clerk's screen" }))
      local status, page, headers = post("/buy", { id = 1, number = 1, ref = new_ref() })
      assert.same({ 423, "1" }, { status, headers["retry-after"] })
      has(page, "It is in use: stocktaking, since ")
      assert.equal(303, (post("/buy", { id = 2, number = 1, ref = new_ref() }))) -- its stock is free
      status, page = post "/night"
      assert.equal(423, status)
      has(page, "4 prices were computed, 1 were not:")
      has(page, "<li>Black tea: It is in use: a clerk&#39;s screen, since ")
      local running = batch "prices" -- this one comes back for longer
      assert.is_true(stock:release())
      assert.is_true(price:release { confirm = true })
      assert.equal("5 prices computed, 0 not\n", running())
      assert.equal("4.00", (select(2, product(2))))
      manager:close()
    end)

    it("answers 423 while another transaction has the row, and 503 when the database cannot be had", function()
      start(nil, nil, 0.3)
      begin_anew "pessimistic"
      local path = server.variables.SHOP_DATABASE:match "^sqlite:(.*)$"
      local connection = assert(require("luasql.sqlite3").sqlite3():connect(path))
      assert(connection:execute "BEGIN IMMEDIATE")
      local status, page = post("/buy", { id = 1, number = 1, ref = new_ref() })
      assert.equal(423, status)
      has(page, "Somebody else is at it.")
      assert(connection:execute "ROLLBACK")
      connection:close()
      assert.equal(303, (post("/buy", { id = 1, number = 1, ref = new_ref() })))
      start(nil, "mysql://nobody:nothing@127.0.0.1:1/nowhere")
      local headers
      status, page, headers = get "/"
      assert.same({ 503, "1" }, { status, headers["retry-after"] })
      has(page, "The shop cannot do that just now.")
      assert.is_nil(page:find("nothing", 1, true))
    end)

    -- ---------------------------------------------------------- the servers

    support.each_store(function(store)
      if not store.server or not store.root() then return end -- a server of the user's
      setup(function()
        if store.dialect == "postgresql" then store.root():query "CREATE SCHEMA testuser AUTHORIZATION testuser" end
        start(store.dsn, store.bare_dsn)
      end)
      teardown(function() -- its connections, too
        if server then server:stop() end
        server = nil
        if store.dialect == "postgresql" then
          store.root():query "DROP SCHEMA IF EXISTS testuser CASCADE"
        else
          for _, name in ipairs { "product", "order", "setting" } do store.sql():query("DROP TABLE IF EXISTS shop_" .. name) end
        end
      end)
      troubles()
    end)

    -- ------------------------------------------------------------ a browser

    describe("in a browser", function()
      support.unless_missing(chromium.missing(), "chromium", function()
        local browser

        setup(function()
          start()
          browser = chromium.start(server.directory .. "/chromium")
        end)
        teardown(function() browser:stop() end)
        before_each(function() begin_anew "none" end)

        local function open(path)
          local page = browser:page()
          page:go("http://127.0.0.1:" .. server.port .. path)
          page:wait_for "Control"
          return page
        end

        it("is switched to a way, sells, and says how many are left", function()
          local customer = open "/"
          customer:run "document.querySelector('#way').value = 'conditional'"
          customer:click "form.bar button"
          customer:wait_for "From now on it is done so."
          assert.equal("conditional", customer:run "document.querySelector('#way').value")
          customer:run "document.querySelector('input[name=number]').value = '4'"
          customer:click "td.action button"
          customer:wait_for "Thank you."
          assert.equal("1", customer:run "document.querySelector('td .state').innerText")
          customer:run "document.querySelector('input[name=number]').value = '4'"
          customer:click "td.action button"
          customer:wait_for "There is 1 left."
        end)

        it("shows a clerk what has changed under his hands", function()
          post("/way", { way = "optimistic" })
          local clerk, night = open "/clerk/1", open "/clerk"
          night:click("button", 3)
          night:wait_for "The batch has run."
          clerk:type("input[name=name]", ", 100 g")
          clerk:click "#save"
          clerk:wait_for "Somebody else has changed it since you opened it."
          assert.equal("Green tea, 100 g", clerk:run "document.querySelector('input[name=name]').value")
          assert.equal("4.60", clerk:run "document.querySelector('input[name=price]').value")
          assert.equal(1, clerk:run "document.querySelectorAll('.differs').length")
          clerk:click "#save"
          clerk:wait_for "Saved."
          assert.equal("4.60", (select(2, product(1))))
          clerk.width = 380
          clerk:size(800)
          assert.is_true(clerk:run "document.documentElement.scrollWidth <= 380")
        end)
      end)
    end)
  end)
end)
