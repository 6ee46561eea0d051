-- What acquire + release cost one worker of nginx while no other wants the lock: hierlock's embedded store beside
-- lua-resty-lock, which locks one name in a table of this nginx.
--
--   make bench-worker       BENCH_ROUNDS; RESTY_LOCK: a checkout of github.com/openresty/lua-resty-lock
local contest = require "bench.contest"
local uv = require "luv"

local PORT = 18081
local CYCLES = 50000 -- a round of each; nginx's clock has milliseconds

local CONFIG = [[
load_module /usr/lib/nginx/modules/ndk_http_module.so;
load_module /usr/lib/nginx/modules/ngx_http_lua_module.so;
daemon off; worker_processes 1; user root; pid nginx.pid; error_log error.log warn;
events { worker_connections 64; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  lua_package_path "%s";
  lua_package_cpath "%s";
  lua_shared_dict locks 4m;
  init_worker_by_lua_block {
    local hierlock = require "hierlock"
    local null, file = assert(hierlock.open "null:"), assert(hierlock.open "file:%s/locks")
    local names, paths = {}, {}
    for i = 1, 2000 do names[i], paths[i] = "u" .. i .. "/a/r", { "u" .. i, "a", "r" } end
    local lease = { ttl = 10 }
    local present, resty = pcall(require, "resty.lock")
    ways = {
      null = function(i) assert(null:acquire(paths[i])):release() end,
      file = function(i) assert(file:acquire(paths[i])):release() end,
      lease = function(i) assert(file:acquire(paths[i], lease)):release() end,
      resty = present and function(i)
        local lock = resty:new "locks"
        assert(lock:lock(names[i]))
        assert(lock:unlock())
      end,
    }
  }
  server {
    listen 127.0.0.1:%d;
    location / { content_by_lua_block {
      local way, n = ways[ngx.var.arg_way], tonumber(ngx.var.arg_n)
      if not way then return ngx.say("-") end
      ngx.update_time()
      local start = ngx.now()
      for i = 1, n do way(i %% 2000 + 1) end
      ngx.update_time()
      ngx.say((ngx.now() - start) * 1e6 / n)
    } }
  }
}
]]

local WAYS = {
  { "resty", "lua-resty-lock, one name of this nginx" },
  { "null", "hierlock, the null store, which grants everything" },
  { "file", "hierlock, embedded, three rows, for all programs of the machine" },
  { "lease", "hierlock, embedded, a lease of three rows" },
}

local directory = assert(uv.fs_mkdtemp((os.getenv "TMPDIR" or "/dev/shm") .. "/hierlock-bench-XXXXXX"))
local resty = os.getenv "RESTY_LOCK"
local file = assert(io.open(directory .. "/nginx.conf", "w"))
file:write(CONFIG:format(package.path .. (resty and ";" .. resty .. "/lib/?.lua" or ""), package.cpath, directory, PORT))
file:close()
assert(uv.fs_mkdir(directory .. "/locks", tonumber("700", 8)))

local ended
local nginx = assert(uv.spawn("/usr/sbin/nginx", { args = { "-p", directory, "-c", "nginx.conf" }, stdio = { nil, nil, 2 } },
                              function() ended = true end))

-- Microseconds of a cycle; nil: it cannot be had.
local function measure(way, n)
  local pipe = assert(io.popen(("curl -sS --retry 20 --retry-connrefused --retry-delay 1 'http://127.0.0.1:%d/?way=%s&n=%d'")
    :format(PORT, way, n)))
  local said = pipe:read "*l"
  pipe:close()
  return tonumber(said), assert(said, "nginx does not answer")
end

local results = {}
for _, way in ipairs(WAYS) do
  results[way[1]] = {}
  measure(way[1], CYCLES) -- warm up
end
for _ = 1, contest.rounds do
  for _, way in ipairs(WAYS) do table.insert(results[way[1]], (measure(way[1], CYCLES))) end
end
print("| acquire + release in a worker of nginx | µs (quartiles) |\n|---|---|")
for _, way in ipairs(WAYS) do
  local times = results[way[1]]
  local low, median, high = contest.quartiles(times)
  print(("| %s | %s |"):format(way[2], times[1] and ("%.2f (%.2f to %.2f)"):format(median, low, high) or
    "not run: RESTY_LOCK names no checkout of github.com/openresty/lua-resty-lock"))
end
nginx:kill "sigterm"
while not ended do uv.run "once" end
os.execute("rm -rf " .. directory)
