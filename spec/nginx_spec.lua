-- hierlock in nginx: a real one with two workers, of the machine's own (Debian's libnginx-mod-http-lua, or
-- OpenResty: HIERLOCK_NGINX names it), and real clients. The chunk to run there, and its phase, come with the
-- request. nginx's Lua is LuaJIT, and it loads the very module that is tested; so these specs are for LuaJIT.
if not rawget(_G, "jit") then return pending "nginx: skipped: needs LUAS=luajit" end

local uv = require "luv"
local support = require "spec.support"
local proxy = require "spec.support.proxy"
local promtool = require "spec.support.promtool"

local MODULES = "/usr/lib/nginx/modules/"

local function find_nginx()
  for _, name in ipairs { os.getenv("HIERLOCK_NGINX") or "", "/usr/sbin/nginx", "/usr/local/openresty/nginx/sbin/nginx" } do
    local file = name ~= "" and io.open(name, "rb")
    if file then
      file:close()
      local lua = io.open(MODULES .. "ngx_http_lua_module.so", "rb")
      if lua then lua:close() end
      if lua or name:find("openresty") then return name, lua ~= nil end
    end
  end
end

local NGINX, as_module = find_nginx()

-- Waits as support.wait_until, while sockets and processes go on.
local function wait_until(condition, what)
  return support.wait_until(function()
    uv.run("nowait")
    return condition()
  end, what)
end

-- ------------------------------------------------------------------- nginx

-- The collector does not run: whatever is released, is released by something else.
local CONFIG = [[
%s
daemon off; master_process on; worker_processes 2; pid nginx.pid; error_log error.log info;
%s
events { worker_connections 2048; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  lua_package_path "%s";
  lua_package_cpath "%s";
  lua_shared_dict shared 1m;
  lua_check_client_abort on;
  lua_max_running_timers 8;
  lua_socket_read_timeout 50ms; # a wait is longer
  %s
  init_by_lua_block {
    collectgarbage("stop")
    timers = 0
    local timer_at = ngx.timer.at
    function ngx.timer.at(...)
      timers = timers + 1
      return timer_at(...)
    end
    hierlock = require "hierlock"
    dsn, options = %q, { buckets = %d, timeout = %d }
    manager = assert(hierlock.open(dsn, options))
    masters = manager:acquire({ "master" }, { timeout = 0 })
    kept = {}
    function run()
      local chunk = ngx.var.arg_chunk or ngx.ctx.chunk
      return assert(loadstring(ngx.unescape_uri(chunk)))()
    end
    function answer() ngx.print(tostring((run()))) ngx.exit(200) end
    -- Like answer, for phases without one: the result is asked for afterwards.
    function remember() ngx.shared.shared:set("remembered", tostring(select(2, pcall(run)))) end
    -- A section that two callers must not be in at once.
    function critical()
      local shared = ngx.shared.shared
      if shared:incr("inside", 1, 0) ~= 1 then shared:incr("overlaps", 1, 0) end
      ngx.sleep(0)
      shared:incr("inside", -1)
      shared:incr("worker " .. ngx.worker.pid(), 1, 0)
    end
  }
  init_worker_by_lua_block {
    local handle = assert(manager:acquire { "worker", ngx.worker.pid() })
    assert(handle:release { confirm = true })
    ngx.shared.shared:set("begun " .. ngx.worker.pid(), true)
  }
  exit_worker_by_lua_block {
    local handle = assert(manager:acquire { "worker", ngx.worker.pid() })
    assert(handle:release { confirm = true })
    ngx.shared.shared:set("gone " .. ngx.worker.pid(), true)
  }
  server {
    listen unix:%s/nginx.sock;
    server_rewrite_by_lua_block { if ngx.var.uri == "/server_rewrite" then answer() end }
    location = /content { content_by_lua_block { answer() } }
    location = /access { access_by_lua_block { answer() } }
    location = /rewrite { rewrite_by_lua_block { answer() } }
    location = /set { set_by_lua_block $x { remember() } return 200; }
    location = /header_filter { header_filter_by_lua_block { remember() } return 200; }
    location = /body_filter { body_filter_by_lua_block { remember() } return 200; }
    location = /log { content_by_lua_block { ngx.ctx.handle = manager:acquire { "log" } ngx.print("logged") }
                      log_by_lua_block { remember() } }
    location = /filtered { content_by_lua_block { ngx.ctx.handle = manager:acquire { "filtered" } ngx.print("filtered") }
                           header_filter_by_lua_block { remember() } }
    location = /exec { content_by_lua_block { manager:acquire { "exec" } ngx.exec("/after") } }
    location = /after { content_by_lua_block { ngx.print("after") } }
    location = /proxied { access_by_lua_block { run() } proxy_pass http://unix:%s/nginx.sock:/content?chunk=$arg_proxied; }
    location = /redirected { access_by_lua_block { run() } content_by_lua_block { ngx.exec("/content", { chunk = ngx.unescape_uri(ngx.var.arg_content) }) } }
    location = /captured { content_by_lua_block { answer() } }
  }
}
]]

local nginx_methods = {}
nginx_methods.__index = nginx_methods

-- more: of the configuration; within: a command that runs nginx, as a list.
local function start(store, more, within)
  local directory = assert(uv.fs_mkdtemp("/tmp/hierlock-nginx-XXXXXX"))
  local self = setmetatable({ directory = directory }, nginx_methods)
  local file = assert(io.open(directory .. "/nginx.conf", "w"))
  file:write(CONFIG:format(
    as_module and ("load_module %sndk_http_module.so; load_module %sngx_http_lua_module.so;"):format(MODULES, MODULES) or "",
    uv.getuid() == 0 and "user root;" or "", package.path, package.cpath, more or "",
    store.dsn, store.options.buckets, store.options.timeout, directory, directory))
  file:close()
  local output = assert(uv.fs_open(directory .. "/output", "w", 384))
  local args = { NGINX, "-p", directory, "-c", "nginx.conf" }
  for i, word in ipairs(within or {}) do table.insert(args, i, word) end
  self.process, self.pid = assert(uv.spawn(table.remove(args, 1), {
    args = args,
    stdio = { nil, output, output },
  }, function(code, signal) self.exit = { code = code, signal = signal } end))
  uv.fs_close(output)
  wait_until(function()
    return self.exit or self:try("/content", "return 1")
  end, "nginx")
  if self.exit then
    local said = self:output()
    self:stop()
    error("nginx does not start: " .. said)
  end
  return self
end

function nginx_methods:read(name)
  local file = assert(io.open(self.directory .. "/" .. name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

function nginx_methods:output() return self:read("output") .. self:read("error.log") end

function nginx_methods:signal(name) assert(uv.kill(self.pid, name)) end

function nginx_methods:wait_for_exit()
  return wait_until(function() return self.exit end, "nginx to end")
end

function nginx_methods:stop()
  if not self.exit then
    self:signal("sigterm")
    self:wait_for_exit()
  end
  os.execute("rm -rf '" .. self.directory .. "'")
end

--- The workers' pids: the master's children.
function nginx_methods:workers()
  local workers, n = {}, 0
  for pid in io.popen("pgrep -P " .. self.pid):lines() do
    workers[tonumber(pid)] = true
    n = n + 1
  end
  return workers, n
end

local function encoded(text)
  return (text:gsub("[^%w]", function(c) return ("%%%02X"):format(c:byte()) end))
end

--- Sends a request and does not wait: when its answer has come, it has `status` and `body`.
function nginx_methods:start(location, chunk)
  local pipe = uv.new_pipe(false)
  local request = { text = {} }
  local function close()
    if not pipe:is_closing() then pipe:close() end
    request.closed = true
  end
  request.close = close
  pipe:connect(self.directory .. "/nginx.sock", function(err)
    if err then request.failed = err return close() end
    pipe:write(("GET %s%schunk=%s HTTP/1.0\r\nHost: localhost\r\n\r\n"):format(
      location, location:find("?", 1, true) and "&" or "?", encoded(chunk or "")))
    pipe:read_start(function(_, data)
      if data then request.text[#request.text + 1] = data return end
      local text = table.concat(request.text)
      request.status = tonumber(text:match("^HTTP/1.1 (%d+)"))
      request.body = text:match("\r\n\r\n(.*)$")
      close()
    end)
  end)
  return request
end

function nginx_methods:try(location, chunk)
  local request = self:start(location, chunk)
  wait_until(function() return request.closed end, "an answer")
  return request.status and request
end

--- Sends a request, and returns its answer.
function nginx_methods:get(location, chunk)
  local request = assert(self:try(location, chunk), "no answer")
  assert(request.status == 200, self:output())
  return request.body
end

function nginx_methods:content(chunk) return self:get("/content", chunk) end

-- ------------------------------------------------------------------- specs

describe("nginx", function()
  if not NGINX then
    local missing = "nginx with Lua cannot be had here (Debian: nginx, libnginx-mod-http-lua; or HIERLOCK_NGINX)"
    local required = " " .. (os.getenv("HIERLOCK_REQUIRE") or "") .. " "
    if required:find(" nginx ", 1, true) then
      it("is there", function() error(missing) end)
    else
      pending(missing)
    end
    return
  end

  support.each_store(function(store)
    local nginx, mine

    -- Starts an nginx that was not reloaded yet, and whose log is empty.
    local function begin_anew()
      nginx:stop()
      nginx = start(store)
    end
    before_each(function()
      mine = support.open(store)
      if nginx and nginx.exit then begin_anew() end
      nginx = nginx or start(store)
      nginx:content [[ ngx.shared.shared:flush_all() ]]
    end)
    after_each(function() mine:close() end)
    teardown(function()
      if nginx then nginx:stop() end
    end)

    -- Checks that a target is free, without the help of the collector.
    local function assert_free(...)
      assert(assert(mine:acquire({ ... })):release { confirm = true })
    end
    local function assert_held(...)
      local handle, err = mine:acquire({ ... }, { timeout = 0 })
      assert.is_nil(handle)
      assert.equal("timeout", err.code)
    end
    local function wait_held(id)
      wait_until(function()
        local handle = mine:acquire({ id }, { timeout = 0 })
        if handle then handle:release { confirm = true } end
        return not handle
      end, id .. " to be held")
    end
    local function wait_done(request)
      wait_until(function() return request.closed end, "an answer")
      return request
    end
    -- Requests of nginx that wait for it, as the store sees them.
    local function wait_waiters(id, n) wait_until(function() return store.waiting { id } >= n end, "a waiter") end
    local function wait_no_waiters(id)
      wait_until(function() return store.waiting { id } == 0 end, "the waiter to be gone")
    end

    it("calls hooks in the request that calls, and tells of one that has ended at the next call", function()
      local OPEN = [[
        if not traced then
          local shared = ngx.shared.shared
          local all = { timeout = 10 }
          for name, value in pairs(options) do all[name] = value end
          for _, hook in ipairs { "on_wait", "on_grant", "on_error", "on_release" } do
            all[hook] = function(event)
              shared:rpush("told", hook .. " " .. (event.request or "") .. (event.by and " by " .. event.by or ""))
              if hook == "on_wait" then event.request = ngx.var.request_method .. ngx.var.arg_n end
            end
          end
          traced = assert(hierlock.open(dsn, all))
        end
      ]]
      local function told()
        local list = {}
        for line in nginx:content([[
          local list = {}
          repeat
            local line = ngx.shared.shared:lpop "told"
            list[#list + 1] = line
          until not line
          return table.concat(list, ",")
        ]]):gmatch "[^,]+" do list[#list + 1] = line end
        return list
      end
      local held = assert(mine:acquire { "waited for" })
      local request = nginx:start("/content?n=1", OPEN .. [[
        assert(traced:acquire { "kept" }) -- until the request ends
        assert(traced:acquire { "waited for" })
        return "both"
      ]])
      wait_waiters("waited for", 1)
      held:release { confirm = true }
      assert.equal("both", wait_done(request).body)
      assert.same({ "on_wait ", "on_grant GET1", "on_wait ", "on_grant GET1" }, told())
      assert_free("kept")
      assert_free("waited for")
      -- Ask both workers, as either may have served the request.
      local list = {}
      wait_until(function()
        nginx:content "if traced then traced:stats() end"
        for _, line in ipairs(told()) do list[#list + 1] = line end
        return #list >= 2
      end, "on_release")
      assert.same({ "on_release GET1 by request", "on_release GET1 by request" }, list)

      -- A request that waits when its client goes away.
      held = assert(mine:acquire { "waited for" })
      request = nginx:start("/content?n=2", OPEN .. [[ traced:acquire { "waited for" } ]])
      wait_waiters("waited for", 1)
      request.close()
      wait_no_waiters("waited for")
      held:release()
      list = {}
      wait_until(function()
        nginx:content "if traced then traced:stats() end"
        for _, line in ipairs(told()) do list[#list + 1] = line end
        return #list >= 2
      end, "on_error")
      assert.same({ "on_wait ", "on_error GET2" }, list)
    end)

    it("never lets two requests in at once, in whichever worker they are", function()
      local done, failed = 0, 0
      local function client(n)
        if n == 0 then
          done = done + 1
          return
        end
        local request = nginx:start("/content", [[
          local handle = assert(manager:acquire { "u", "a" })
          critical()
          handle:release()
        ]])
        local check = uv.new_prepare()
        check:start(function()
          if not request.closed then return end
          check:close()
          if request.status ~= 200 then failed = failed + 1 end
          client(n - 1)
        end)
      end
      for _ = 1, 40 do client(15) end
      wait_until(function() return done == 40 end, "all clients")
      assert.equal(0, failed)
      assert.equal("nil", nginx:content [[ return ngx.shared.shared:get("overlaps") ]])
      local sum, workers = 0, 0
      for pid in pairs((nginx:workers())) do
        local n = tonumber(nginx:content(("return ngx.shared.shared:get('worker %d')"):format(pid))) or 0
        if n > 0 then workers = workers + 1 end
        sum = sum + n
      end
      assert.equal(600, sum)
      assert.equal(2, workers)
    end)

    for _, phase in ipairs { "server_rewrite", "rewrite", "access", "content" } do
      it("lets a worker serve others while a request waits in " .. phase, function()
        local handle = assert(mine:acquire { "u" })
        local request = nginx:start("/" .. phase, [[
          local handle = assert(manager:acquire { "u" })
          return handle.waited > 0 and handle:is_held()
        ]])
        wait_waiters("u", 1)
        local served = {}
        wait_until(function()
          served[nginx:content [[ return ngx.worker.pid() ]]] = true
          local n = 0
          for _ in pairs(served) do n = n + 1 end
          return n == 2
        end, "both workers")
        assert.is_falsy(request.closed)
        handle:release()
        assert.equal("true", wait_done(request).body)
        assert_free("u")
      end)

      it("releases at the end of the request what " .. phase .. " acquired, whoever keeps the handle", function()
        local body = nginx:get("/" .. phase, [[
          kept[1] = assert(manager:acquire { "u" })
          return tostring(kept[1]:is_held()) .. " " .. ngx.worker.pid()
        ]])
        assert_free("u")
        local pid = body:match("^true (%d+)$")
        wait_until(function()
          local state = nginx:content([[ return ngx.worker.pid() == ]] .. pid .. [[ and tostring(kept[1]) ]])
          if state == "false" then return end
          assert.matches("released", state)
          return true
        end, "the same worker")
      end)
    end

    it("waits in a timer, and releases at its end", function()
      local handle = assert(mine:acquire { "u" })
      nginx:content [[
        ngx.timer.at(0, function()
          kept[2] = assert(manager:acquire { "u" })
          ngx.shared.shared:set("timer", kept[2]:is_held() and "held")
        end)
      ]]
      wait_waiters("u", 1)
      handle:release()
      wait_until(function() return nginx:content [[ return ngx.shared.shared:get("timer") ]] == "held" end, "the timer")
      assert_free("u")
    end)

    -- Collects in every worker, whatever they are doing besides.
    local function collect_everywhere()
      local collected, n = {}, 0
      wait_until(function()
        local pid = nginx:content [[ collectgarbage() collectgarbage() collectgarbage("stop") return ngx.worker.pid() ]]
        if not collected[pid] then n = n + 1 end
        collected[pid] = true
        return n == 2
      end, "both workers")
    end

    it("keeps what access acquired until the proxied answer has been sent, whatever the collector thinks", function()
      local request = nginx:start("/proxied?proxied=" .. encoded [[
        while not ngx.shared.shared:get("go on") do ngx.sleep(0.005) end
        return "answered"
      ]], [[ assert(manager:acquire { "u" }) assert(manager:acquire { "v", "a" }) ]])
      wait_held("u")
      wait_held("v")
      collect_everywhere()
      assert_held("u")
      assert_held("v", "a")
      assert.is_falsy(request.closed)
      nginx:content [[ ngx.shared.shared:set("go on", true) ]]
      assert.equal("answered", wait_done(request).body)
      -- Without a collection.
      assert_free("u")
      assert_free("v", "a")
    end)

    it("never lets two requests in at once under a lock of access, with garbage made beside it", function()
      local requests = {}
      for i = 1, 60 do
        requests[i] = nginx:start("/proxied?proxied=" .. encoded [[
          critical()
          collectgarbage()
          collectgarbage("stop")
          return "answered"
        ]], [[ assert(manager:acquire { "u", "a" }) ]])
      end
      for i = 1, 60 do assert.equal("answered", wait_done(requests[i]).body) end
      assert.equal("nil", nginx:content [[ return ngx.shared.shared:get("overlaps") ]])
      assert_free("u")
    end)

    it("keeps it through an internal redirect, in a light thread, in a timer; a subrequest's to the end of its main request", function()
      local check = [[
        collectgarbage() collectgarbage() collectgarbage("stop")
        local other = assert(hierlock.open(dsn, options))
        local nobody = other:acquire({ "u" }, { timeout = 0 })
        other:close()
        return nobody == nil
      ]]
      assert.equal("true", nginx:get("/redirected?content=" .. encoded(check), [[ assert(manager:acquire { "u" }) ]]))
      assert_free("u")
      assert.equal("true", nginx:content([[
        ngx.thread.wait(ngx.thread.spawn(function() assert(manager:acquire { "u" }) end)) ]] .. check))
      assert_free("u")
      assert.equal("true", nginx:content([[
        local done
        assert(ngx.timer.at(0, function()
          assert(manager:acquire { "u" })
          done = (function() ]] .. check .. [[ end)()
        end))
        repeat ngx.sleep(0.005) until done ~= nil
        return done ]]))
      assert_free("u")
      assert.equal("true", nginx:content([[
        local answer = ngx.location.capture("/captured", { args = { chunk = 'manager:acquire { "u" }' } })
        assert(answer.status == 200, answer.body)
      ]] .. check))
      assert_free("u")
    end)

    it("does not keep what was released, however long the request", function()
      assert.equal("true", nginx:content [[
        local seen = setmetatable({}, { __mode = "k" })
        local lasts = assert(manager:acquire { "v" })
        for i = 1, 500 do
          local handle = assert(manager:acquire { "u" })
          seen[handle] = true
          handle:release()
          if i % 100 == 0 then ngx.sleep(0) end
        end
        seen[lasts], lasts = true, nil
        collectgarbage() collectgarbage() collectgarbage("stop")
        local left = 0
        for _ in pairs(seen) do left = left + 1 end
        assert(left > 0 and left < 50, left .. " are left")
        return manager:stats().held >= 1
      ]])
      assert_free("u")
      assert_free("v")
    end)

    it("releases when a request ends by ngx.exit, by an error, or goes elsewhere", function()
      nginx:content [[ manager:acquire { "u" } ngx.exit(200) ]]
      assert_free("u")
      assert.equal(500, nginx:try("/content", [[ manager:acquire { "u" } error("meant to be") ]]).status)
      assert_free("u")
      assert.equal("after", nginx:get("/exec"))
      assert_free("exec")
    end)

    it("releases when `with` is left by ngx.exit, and passes results and errors", function()
      nginx:content [[ manager:with({ "u" }, function() ngx.sleep(0) ngx.exit(200) end) ]]
      assert_free("u")
      assert.equal("7", nginx:content [[ return (manager:with({ "u" }, function() ngx.sleep(0) return 7 end)) ]])
      assert.equal("true", nginx:content [[
        local ok, raised = pcall(manager.with, manager, { "u" }, function() ngx.sleep(0) error("oops") end)
        return not ok and raised:find("oops") ~= nil
      ]])
    end)

    it("releases at once when a client hangs up while its request holds", function()
      local request = nginx:start("/content", [[ kept[3] = assert(manager:acquire { "u" }) ngx.sleep(3600) ]])
      wait_held("u")
      request.close()
      wait_until(function()
        local handle = mine:acquire({ "u" }, { timeout = 0 })
        return handle and handle:release { confirm = true }
      end, "the release")
    end)

    it("stops waiting at once when a client hangs up while its request waits", function()
      local handle = assert(mine:acquire { "u" })
      local requests = {}
      nginx:content [[ ngx.shared.shared:set("begun", 0) ]]
      for i = 1, 6 do
        requests[i] = nginx:start("/content", [[
          ngx.shared.shared:incr("begun", 1)
          manager:acquire({ "u" }, { timeout = math.huge })
        ]])
      end
      -- nginx does not notice a client that hangs up before its request has begun.
      wait_until(function() return nginx:content [[ return ngx.shared.shared:get("begun") ]] == "6" end, "the requests")
      wait_waiters("u", 1)
      for i = 1, 6 do requests[i].close() end
      wait_no_waiters("u")
      handle:release { confirm = true }
      assert_free("u")
      -- No request waits in line either, in neither worker.
      local seen = {}
      wait_until(function()
        local pid, n = nginx:content([[ return ngx.worker.pid() .. " " .. manager:stats().waiting ]]):match("(%d+) (%d+)")
        if n == "0" then seen[pid] = true end
        local count = 0
        for _ in pairs(seen) do count = count + 1 end
        return count == 2
      end, "nobody to wait")
    end)

    it("does not let a light thread that was killed have the lock", function()
      local handle = assert(mine:acquire { "u" })
      local request = nginx:start("/content", [[
        local thread = ngx.thread.spawn(function() manager:acquire({ "u" }, { timeout = math.huge }) end)
        ngx.sleep(0.05)
        ngx.thread.kill(thread)
        ngx.shared.shared:set("killed", true)
        ngx.sleep(3600)
      ]])
      wait_until(function() return nginx:content [[ return ngx.shared.shared:get("killed") ]] == "true" end, "the kill")
      handle:release { confirm = true }
      assert_free("u")
      request.close()
    end)

    it("gives the errors of acquire", function()
      local handle = assert(mine:acquire { "u" })
      assert.equal("timeout", nginx:content [[ return (select(2, manager:acquire({ "u" }, { timeout = 0.05 }))).code ]])
      assert.equal("timeout", nginx:content [[ return (select(2, manager:acquire({ "u" }, { timeout = 0 }))).code ]])
      handle:release()
    end)

    it("extends, checks and confirms without keeping its worker", function()
      local handle = assert(mine:acquire { "v" })
      local request = nginx:start("/content", [[
        local handle = assert(manager:acquire { "u" })
        assert(handle:extend { "v" })
        assert(handle:check())
        assert(handle:release { confirm = true })
        return tostring(handle)
      ]])
      wait_waiters("v", 1)
      for _ = 1, 8 do assert.equal("1", nginx:content [[ return 1 ]]) end
      handle:release()
      assert.matches("released", wait_done(request).body)
      assert_free("v")
    end)

    it("refuses to extend in a phase that cannot wait, and does not lose the lock", function()
      nginx:get("/filtered", [[
        local handle = ngx.ctx.handle
        local said
        for i = 1, 5 do said = tostring(select(2, pcall(handle.extend, handle, { "v" .. i }))) end
        said = said .. "\n" .. tostring(select(2, pcall(handle.check, handle)))
        local ends = os.clock() + 0.05
        while os.clock() < ends do if not handle:is_held() then return "lost" end end
        return said
      ]])
      local said = nginx:content [[ return ngx.shared.shared:get("remembered") ]]
      assert.matches("^[^\n]*nothing can be waited for in nginx's phase header_filter[^\n]*\n[^\n]*nothing can be waited for", said)
      assert_free("filtered")
    end)

    it("says where a call was wrong, and not where we found that out", function()
      local said = nginx:content [[ return select(2, pcall(function() manager:acquire {} end)) ]]
      assert.matches("hierlock: target is empty", said, 1, true)
      assert.not_matches("hierlock/", said, 1, true)
    end)

    for _, phase in ipairs { "set", "header_filter", "body_filter", "log" } do
      it("refuses to acquire in phase " .. phase, function()
        nginx:content [[ ngx.shared.shared:delete("remembered") ]]
        nginx:get("/" .. phase, [[ return manager:acquire { "u" } ]])
        wait_until(function() return nginx:content [[ return ngx.shared.shared:get("remembered") ]] ~= "nil" end, "phase " .. phase)
        assert.matches("^[^\n]*nothing can be waited for in nginx's phase " .. phase, nginx:content [[
          return ngx.shared.shared:get("remembered")
        ]])
        assert_free("u")
      end)
    end

    it("has released already in phase log, where releasing does nothing", function()
      assert.equal("logged", nginx:get("/log", [[
        local handle = ngx.ctx.handle
        return tostring(handle:is_held()) .. tostring(handle:release()) .. tostring(handle)
      ]]))
      wait_until(function()
        return nginx:content([[ return ngx.shared.shared:get("remembered") ]]):find("^falsetrue.*released")
      end, "phase log")
      assert_free("log")
    end)

    it("shares nothing of a manager that was used before the fork", function()
      begin_anew()
      assert_held("master")
      for _ = 1, 8 do
        assert.equal("false released", nginx:content [[
          local err = select(2, masters:check())
          masters:release()
          return tostring(masters:is_held()) .. " " .. err.code
        ]])
        assert.equal("timeout", nginx:content [[ return (select(2, manager:acquire({ "master" }, { timeout = 0 }))).code ]])
      end
      assert_held("master")
    end)

    it("wakes a thousand that are done at once, more than the notifier can say", function()
      local handle = assert(mine:acquire { "u" })
      local request = nginx:start("/content", [[
        local other = assert(hierlock.open(dsn, options))
        local threads, cancelled = {}, 0
        for i = 1, 1000 do
          threads[i] = ngx.thread.spawn(function()
            local _, err = other:acquire({ "u" }, { timeout = math.huge })
            if err.code == "cancelled" then cancelled = cancelled + 1 end
          end)
        end
        ngx.sleep(0.2)
        ngx.update_time()
        local before = ngx.now()
        other:close()
        for i = 1, 1000 do ngx.thread.wait(threads[i]) end
        ngx.update_time()
        return cancelled .. " " .. (ngx.now() - before)
      ]])
      local cancelled, seconds = wait_done(request).body:match("^(%d+) (.*)$")
      assert.equal("1000", cancelled)
      assert.is_true(tonumber(seconds) < 0.5, seconds)
      handle:release()
    end)

    -- Two requests wait in one worker; their locks are released at once. Returns how late the last grant came.
    local function lateness(other)
      local held = { assert(mine:acquire { "w1" }), assert(mine:acquire { "w2" }) }
      local requests = {}
      for i = 1, 4 do
        requests[i] = other:start("/content", ([[
          local handle = assert(manager:acquire({ "w%d" }))
          local at = ngx.now()
          handle:release()
          return at
        ]]):format(i % 2 + 1))
      end
      wait_waiters("w1", 2)
      wait_waiters("w2", 2)
      for _ = 1, 20 do uv.run "nowait" support.sleep(0.005) end
      local seconds, micros = uv.gettimeofday()
      for _, each in ipairs(held) do each:release { confirm = true } end
      local last = 0
      for _, request in ipairs(requests) do last = math.max(last, tonumber(wait_done(request).body)) end
      return last - (seconds + micros / 1e6)
    end

    -- The machine may be busy, so the best try counts. A request that nothing wakes looks a second after it began to wait.
    local function assert_woken(other)
      local best = math.huge
      for _ = 1, 4 do
        best = math.min(best, lateness(other))
        if best < 0.7 then return end
      end
      error(best .. " s is too late")
    end

    it("wakes waiters of each Lua state, where each request has its own", function()
      local other = start(store, "lua_code_cache off;")
      finally(function() other:stop() end)
      assert_woken(other)
    end)

    it("wakes waiters where there is no /proc", function()
      if uv.getuid() ~= 0 then return pending "only root may hide /proc" end
      if not store.table and store.name ~= "postgresql" then return end -- the embedded store looks into /proc
      local other = start(store, nil, { "/usr/bin/unshare", "-m", "/bin/sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh" })
      finally(function() other:stop() end)
      assert_woken(other)
      assert.is_nil(other:output():find("waiting requests are late", 1, true), other:output())
    end)

    if not store.server then -- how a loop listens does not depend on the store
      it("listens once for all that wait in a worker, and keeps no connection", function()
        local function connections(pid)
          local ours, n = {}, 0
          for line in io.lines "/proc/net/unix" do
            local inode = line:match "(%d+) /%S+/hierlock%-%w+/notifier$"
            if inode then ours["socket:[" .. inode .. "]"] = true end
          end
          local found = uv.fs_scandir("/proc/" .. pid .. "/fd")
          for name in function() return uv.fs_scandir_next(found) end do
            if ours[uv.fs_readlink("/proc/" .. pid .. "/fd/" .. name)] then n = n + 1 end
          end
          return n
        end
        local request = nginx:start("/content", [[
          local held, before = assert(manager:acquire { "u" }), timers
          for _ = 1, 3 do
            ngx.thread.spawn(function() assert(manager:acquire { "u" }):release() end)
            ngx.sleep(0.12) -- longer than a timer may take to begin
          end
          ngx.shared.shared:set("pid", ngx.worker.pid())
          while not ngx.shared.shared:get("go on") do ngx.sleep(0.01) end
          held:release()
          while ngx.timer.running_count() > 0 do ngx.sleep(0.01) end
          return timers - before
        ]])
        local pid
        wait_until(function()
          pid = tonumber(nginx:content [[ return ngx.shared.shared:get "pid" ]])
          return pid
        end, "the waiters")
        assert.equal(1, connections(pid))
        nginx:content [[ ngx.shared.shared:set("go on", true) ]]
        assert.equal("1", wait_done(request).body)
        wait_until(function() return connections(pid) == 0 end, "the connection to be closed")
      end)
    end

    it("wakes waiters even where nginx has no timer left for it, and forgets them", function()
      local handle = assert(mine:acquire { "u" })
      local pid = nginx:content [[
        ngx.shared.shared:set("timers", 0)
        for i = 1, 8 do
          ngx.timer.at(0, function()
            -- Of a wait that has failed only the loop could keep anything: a handle is kept until its request ends.
            local own = setmetatable({ assert(hierlock.open(dsn, options)) }, { __mode = "v" })
            assert(select(2, own[1]:acquire({ "u" }, { timeout = 0.2 })).code == "timeout")
            own[1]:close()
            collectgarbage() collectgarbage() collectgarbage("stop")
            ngx.shared.shared:incr("ended", 1, 0)
            if own[1] then ngx.shared.shared:incr("remembered", 1, 0) end
            assert(manager:acquire { "u" }):release()
            ngx.shared.shared:incr("timers", 1)
          end)
        end
        return ngx.worker.pid()
      ]]
      wait_until(function() return nginx:content [[ return ngx.shared.shared:get("ended") ]] == "8" end, "the first waits to end")
      wait_waiters("u", 1)
      handle:release()
      wait_until(function() return nginx:content [[ return ngx.shared.shared:get("timers") ]] == "8" end, "the timers")
      assert.equal("nil", nginx:content [[ return ngx.shared.shared:get("remembered") ]])

      -- Then waiters are woken at once again.
      local woken = 0
      while woken < 3 do
        handle = assert(mine:acquire { "u" })
        local request = nginx:start("/content", ([[
          if ngx.worker.pid() ~= %s then return "another" end
          return manager:acquire({ "u" }).waited
        ]]):format(pid))
        wait_until(function() return request.closed or store.waiting { "u" } > 0 end, "a waiter")
        support.sleep(support.STAYS_BLOCKED)
        handle:release { confirm = true }
        local released = support.now()
        if wait_done(request).body ~= "another" then
          woken = woken + 1
          assert.is_true(support.now() - released < 0.5)
        end
      end
      assert.is_nil(nginx:output():find("waiting requests are late", 1, true), nginx:output())
    end)

    it("lets requests that hold and wait end when it is told to reload, and its workers quit", function()
      local before = nginx:workers()
      local handle = assert(mine:acquire { "u" })
      local waits = nginx:start("/content", [[ return assert(manager:acquire { "u" }):is_held() ]])
      wait_waiters("u", 1)
      local holds = nginx:start("/content", [[
        local handle = assert(manager:acquire { "v" })
        while not ngx.shared.shared:get("go on") do ngx.sleep(0.01) end
        return handle:is_held()
      ]])
      wait_held("v")
      nginx:signal("sighup")
      wait_until(function() return not before[tonumber(nginx:content [[ return ngx.worker.pid() ]])] end, "a new worker")
      assert_held("v")
      nginx:content [[ ngx.shared.shared:set("go on", true) ]]
      handle:release()
      assert.equal("true", wait_done(waits).body)
      assert.equal("true", wait_done(holds).body)
      wait_until(function()
        for pid in pairs((nginx:workers())) do if before[pid] then return false end end
        return true
      end, "the old workers to quit")
      local function all(workers, did)
        for pid in pairs(workers) do
          if nginx:content(("return ngx.shared.shared:get %q"):format(did .. " " .. pid)) ~= "true" then return false end
        end
        return true
      end
      wait_until(function() return all(nginx:workers(), "begun") and all(before, "gone") end,
        "what workers lock when they begin and when they go")
      assert_free("u")
      assert_free("v")
    end)

    it("lets requests that hold and wait end when it is told to quit", function()
      begin_anew()
      local handle = assert(mine:acquire { "u" })
      local waits = nginx:start("/content", [[ return assert(manager:acquire { "u" }):is_held() ]])
      wait_waiters("u", 1)
      nginx:signal("sigquit")
      wait_until(function() return nginx:read("error.log"):find("gracefully shutting down", 1, true) end)
      handle:release()
      assert.equal("true", wait_done(waits).body)
      assert.same({ code = 0, signal = 0 }, nginx:wait_for_exit())
      assert_free("u")
      for line in nginx:read("error.log"):gmatch "[^\n]*%[alert%][^\n]*" do
        assert.matches("lua_max_running_timers", line) -- that was meant to be
      end
    end)

    -- A holder and many waiters, which `stop` ends.
    local function end_all(stop)
      begin_anew()
      local all = { { "v" } }
      for i = 1, 30 do all[i + 1] = { "v" .. i } end
      local handle = assert(mine:acquire_all(all))
      local holds = nginx:start("/content", [[
        manager:acquire { "u" }
        ngx.shared.shared:set("holder", ngx.worker.pid())
        ngx.sleep(3600) ]])
      local waits = nginx:start("/content", [[
        ngx.shared.shared:set("waiter", ngx.worker.pid())
        for i = 1, 30 do ngx.thread.spawn(function() assert(manager:acquire { "v" .. i }) end) end
        manager:acquire { "v" }
        ngx.sleep(3600)
      ]])
      wait_held("u")
      wait_waiters("v", 1)
      wait_waiters("v30", 1)
      stop()
      assert_free("u")
      if not nginx.exit then waits.close() end
      handle:release { confirm = true }
      assert_free("v")
      holds.close()
      waits.close()
    end

    local function worker(role)
      return wait_until(function()
        return tonumber(nginx:content(([[ return ngx.shared.shared:get("%s") ]]):format(role)))
      end, "the worker that is the " .. role)
    end

    it("leaves nothing locked when it is told to stop", function()
      end_all(function()
        nginx:signal("sigterm")
        nginx:wait_for_exit()
      end)
    end)

    -- Told by nginx, it would be killed when it needs longer than 1.6 s, as on a busy machine.
    it("leaves nothing locked when a worker is told to stop, and it ends by itself", function()
      local waiter
      end_all(function()
        waiter = worker("waiter")
        for pid in pairs { [worker("holder")] = true, [waiter] = true } do assert(uv.kill(pid, "sigterm")) end
      end)
      local how = wait_until(function()
        return nginx:read("error.log"):match("worker process " .. waiter .. " exited ([^\n]*)")
      end, "the worker's end")
      assert.equal("with code 0", how)
    end)

    it("leaves nothing locked when a worker is killed", function()
      end_all(function() assert(uv.kill(worker("holder"), "sigkill")) end)
    end)
  end)

  describe("running the example", function()
    local example

    -- Runs the example as its comment prints it, but for the port.
    local function run(dsn, name)
      local directory = assert(uv.fs_mkdtemp("/dev/shm/hierlock-spec-XXXXXX"))
      uv.fs_chmod(directory, tonumber("777", 8)) -- its workers, who are nobody, may make a store
      example = setmetatable({ directory = directory }, nginx_methods)
      local file = assert(io.open("examples/" .. (name or "nginx.conf"), "rb"))
      local text = file:read("*a"):gsub("127%.0%.0%.1:8080", "unix:" .. directory .. "/nginx.sock")
        :gsub("/tmp/hierlock%-nginx", directory .. "/hierlock-nginx")
      file:close()
      if not as_module then text = text:gsub("load_module[^\n]*", "") end
      file = assert(io.open(directory .. "/nginx.conf", "w"))
      file:write(text)
      file:close()
      local output = assert(uv.fs_open(directory .. "/output", "w", 384))
      example.process, example.pid = assert(uv.spawn(NGINX, {
        args = { "-p", uv.cwd(), "-e", "stderr", "-c", directory .. "/nginx.conf" },
        env = { "HIERLOCK_DSN=" .. dsn:format(directory) },
        stdio = { nil, nil, output },
      }, function(code, signal) example.exit = { code = code, signal = signal } end))
      uv.fs_close(output)
      local page = wait_until(function() return example.exit or example:try("/") end, "nginx")
      assert.equal("no lock needed\n", page.body, example:read("output"))
    end

    after_each(function() example:stop() end)

    local function withdraws()
      local answer = example:try("/withdraw?user=u1&account=a1")
      return answer.status == 200 and answer.body:find("^after 0[%d.]* s, with token %x+\n$")
    end

    local function assert_wants_ids()
      for _, query in ipairs { "", "?user=u1", "?user=&account=a1", "?user=u1&account=", "?user=u1&account=" .. ("a"):rep(1025) } do
        assert.equal(400, example:try("/withdraw" .. query).status)
      end
    end

    it("nginx.conf serves", function()
      run "file:%s/store"
      assert.is_truthy(withdraws(), example:read("output"))
      assert_wants_ids()
    end)

    it("nginx_metrics.conf tells Prometheus of all workers", function()
      run("file:%s/store", "nginx_metrics.conf")
      local answer = example:try("/metrics")
      assert.equal(200, answer.status)
      assert.equal("", answer.body) -- nobody has locked anything yet
      assert_wants_ids()
      local done, workers = {}, 0
      -- Each worker does as many as it says, and in the end all are done, whichever worker answers.
      wait_until(function()
        local pid = assert(example:try("/withdraw?user=u1&account=a1").body:match("^worker (%d+)\n$"), example:read("output"))
        if not done[pid] then workers = workers + 1 end
        done[pid] = (done[pid] or 0) + 1
        return workers == 2
      end, "both workers")
      wait_until(function()
        local text = example:try("/metrics").body
        for pid, n in pairs(done) do
          if not text:find(('\nhierlock_acquired_total{pid="%s"} %d\n'):format(pid, n), 1, true) then return false end
        end
        return true
      end, "the numbers of both workers")
      local text = example:try("/metrics").body
      assert.equal(1, select(2, text:gsub("# TYPE hierlock_wait_seconds histogram", "")))
      assert.equal(2, select(2, text:gsub("\nhierlock_hold_seconds_count{pid=\"%d+\",level=\"account\"} %d+", "")))
      assert.same({ 0, "" }, { promtool.check(text) })
    end)

    it("says what is wrong with a store that cannot be opened, and tries again", function()
      run "file:%s/later/store"
      assert.equal(500, example:try("/withdraw?user=u1&account=a1").status)
      assert.matches("store: [^\n]*later/store", example:read("output"))
      assert(uv.fs_mkdir(example.directory .. "/later", 511))
      uv.fs_chmod(example.directory .. "/later", tonumber("777", 8))
      wait_until(withdraws, "the store")
    end)

    support.each_server(function(store)
      it("starts without the server, asks to be tried again later, and finds it when it is there", function()
        local sql, name = store.sql(), "hierlock_spec_nginx"
        sql:query("DROP TABLE IF EXISTS " .. name)
        sql:query("CREATE TABLE " .. name ..
                  " (level TINYINT NOT NULL, bucket INT NOT NULL, PRIMARY KEY (level, bucket)) ENGINE=InnoDB")
        for _, row in ipairs(require("hierlock").plan({ { "u1", "a1" } }):rows()) do
          sql:query(("INSERT INTO %s VALUES (%d, %d)"):format(name, row.level, row.bucket))
        end
        local probe = uv.new_tcp()
        assert(probe:bind("127.0.0.1", 0))
        local port = probe:getsockname().port
        probe:close()
        uv.run "nowait"

        run(store.bare_dsn:gsub(":%d+/", ":" .. port .. "/") .. "?tls=off&table=" .. name)
        for _ = 1, 3 do assert.equal(503, example:try("/withdraw?user=u1&account=a1").status) end
        assert.matches("connection: cannot connect", example:read("output"))
        assert.is_nil(example:read("output"):find("unknown error", 1, true))
        local server = proxy.open(store, nil, nil, port)
        wait_until(withdraws, "the server")
        server.close()
        sql:query("DROP TABLE " .. name)
      end)
    end)
  end)
end)
