-- Requests that contend for a few accounts, in nginx with two workers, beside blocking
-- clients in C (clients.c), as many, in two processes; alternately, on each store.
-- And how long others wait meanwhile for a page that needs no lock.
--
--   make bench-nginx        BENCH_SECONDS: of each run; BENCH_ROUNDS
local support = require "spec.support"
local uv = require "luv"

local CLIENTS, ACCOUNTS, OTHERS = 200, 10, 10
local SECONDS = tonumber(os.getenv("BENCH_SECONDS") or 5)
local ROUNDS = tonumber(os.getenv("BENCH_ROUNDS") or 3)
local PORT = 18080
local PACED = "-s bench/pace.lua" -- a hundred pages a second for each connection

local CONFIG = [[
load_module /usr/lib/nginx/modules/ndk_http_module.so;
load_module /usr/lib/nginx/modules/ngx_http_lua_module.so;
daemon off; worker_processes 2; user root; pid nginx.pid; error_log error.log warn;
events { worker_connections 2048; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  keepalive_requests 100000000;
  lua_package_path "%s";
  lua_package_cpath "%s";
  lua_check_client_abort on;
  init_worker_by_lua_block {
    manager = assert(require("hierlock").open(%q, { buckets = %d }))
    math.randomseed(ngx.worker.pid())
  }
  server {
    listen 127.0.0.1:%d reuseport;
    location = /lock { content_by_lua_block {
      local handle = assert(manager:acquire_account("u", "a" .. math.random(%d)))
      handle:release()
      ngx.say("done")
    } }
    location = /page { content_by_lua_block { ngx.say("page") } }
  }
}
]]

local function lines_of(command)
  local pipe = assert(io.popen(command .. " 2>&1"))
  local text = pipe:read("*a")
  pipe:close()
  return text
end

local function wrk(connections, seconds, path, script)
  return ("wrk --latency -t 1 -c %d -d %ds %s http://127.0.0.1:%d/%s"):format(connections, seconds, script or "", PORT, path)
end

-- Blocking clients, while others ask for the page, too: sections a second.
local function clients(store)
  local command = ("HIERLOCK_DSN='%s' %s %d %d %d %d"):format(store.dsn, os.getenv("BENCH_CLIENTS"),
    CLIENTS / 2, ACCOUNTS, SECONDS, store.options.buckets)
  local sum, n = 0, 0
  for rate in lines_of(("%s >/dev/null & %s & %s; wait"):format(
    wrk(OTHERS, SECONDS + 1, "page", PACED), command, command)):gmatch("%d+") do
    sum, n = sum + rate, n + 1
  end
  assert(n == 2, "clients failed")
  return sum
end

local function milliseconds(text, percent)
  local number, unit = text:match("\n%s+" .. percent .. "%%%s+([%d.]+)(%a+)")
  return tonumber(number) * ({ us = 1e-3, ms = 1, s = 1e3 })[unit]
end

local function failures(text)
  local n = 0
  for errors in (text:match("Socket errors:[^\n]*") or ""):gmatch("%d+") do n = n + errors end
  return n + (text:match("Non%-2xx or 3xx responses: (%d+)") or 0)
end

-- Requests: sections a second, failures, p99 of the page.
local function requests()
  local both = lines_of(("(%s | sed 's/^/page:/') & %s; wait"):format(
    "sleep 1; " .. wrk(OTHERS, SECONDS, "page", PACED), wrk(CLIENTS, SECONDS + 2, "lock")))
  local page, lock = {}, {}
  for line in both:gmatch("[^\n]+") do
    local text = line:match("^page:(.*)$")
    if text then page[#page + 1] = text else lock[#lock + 1] = line end
  end
  page, lock = table.concat(page, "\n"), table.concat(lock, "\n")
  return {
    rate = tonumber(lock:match("Requests/sec:%s+([%d.]+)")), failed = failures(lock) + failures(page),
    lock = milliseconds(lock, 99), page = milliseconds(page, 99), pages = tonumber(page:match("Requests/sec:%s+([%d.]+)")),
  }
end

for _, store in ipairs(support.stores) do
  if not store.missing then
    store.prepare()
    local directory = assert(uv.fs_mkdtemp("/tmp/hierlock-bench-XXXXXX"))
    local file = assert(io.open(directory .. "/nginx.conf", "w"))
    file:write(CONFIG:format(package.path, package.cpath, store.dsn, store.options.buckets, PORT, ACCOUNTS))
    file:close()
    local ended
    local process = assert(uv.spawn("/usr/sbin/nginx", { args = { "-p", directory, "-c", "nginx.conf" } },
                                    function() ended = true end))
    support.sleep(1)
    for _ = 1, ROUNDS do
      local blocking, served = clients(store), requests()
      print(("%-8s C %6.0f/s   nginx %6.0f/s   ratio %.2f   failed %d   p99 lock %.1f ms   p99 page %.2f ms (%.0f/s)"):format(
        store.name, blocking, served.rate, served.rate / blocking, served.failed, served.lock, served.page, served.pages))
    end
    process:kill("sigterm")
    while not ended do uv.run("once") end
    io.write(lines_of("grep -v notice " .. directory .. "/error.log | head -3"))
    os.execute("rm -rf " .. directory)
  end
end
