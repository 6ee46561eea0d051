--- Checks a list of Memcacheds, in their text protocol, which knows no log-in.

local core = require "hierlock.core"
local uv = require "luv"

local memcached = {}

local PATIENCE = 5000 -- ms
local NEARLY = 0.9    -- of the memory
local PORT = 11211
local LOOPBACK = { localhost = true, ["127.0.0.1"] = true, ["::1"] = true }

-- Sends commands whose answers end with END, and returns the statistics in them: name -> value; nil, why.
local function ask(host, port, commands)
  local got, ended, why = "", false, nil
  local address, failure = uv.getaddrinfo(host, tostring(port), { socktype = "stream" })
  if not address or not address[1] then return nil, failure or "the name is not known" end
  local tcp, timer = uv.new_tcp(), uv.new_timer()
  local function finish(reason)
    why, ended = why or reason, true
    uv.stop()
  end
  timer:start(PATIENCE, 0, function() finish "no answer in time" end)
  tcp:connect(address[1].addr, port, function(refused)
    if refused then return finish(refused) end
    tcp:write(table.concat(commands, "\r\n") .. "\r\n")
    tcp:read_start(function(err, data)
      if err or not data then return finish(err or "the server has closed the connection") end
      got = got .. data
      local _, ends = got:gsub("END\r\n", "")
      if ends >= #commands then
        why = nil
        ended = true
        uv.stop()
      end
    end)
  end)
  while not ended do uv.run() end
  timer:close()
  tcp:close()
  uv.run "nowait"
  if why then return nil, why end
  local facts = { space = got:find("\nVALUE ", 1, true) ~= nil }
  for name, value in got:gmatch "STAT (%S+) ([^\r\n]*)" do facts[name] = facts[name] or value end
  return facts
end

local function number(text) return tonumber(text) or 0 end

local function look(subject, found, host, port, several)
  local name = several and (" of %s:%d"):format(host, port) or ""
  local space = (subject.dsn:match "[?&]prefix=([^&]*)" or "hierlock") .. ":space"
  local facts, why = ask(host, port, { "stats", "stats settings", "get " .. space })
  local why_reached = "The roots that a server has cannot be locked while it is down: they never move to another one."
  if not facts then
    found:add("reached" .. name, "wrong", why, why_reached, "start the server, or mend host or port in the DSN")
    return false
  end
  subject.unsettled = subject.unsettled or not facts.space
  found:add("reached" .. name, "ok", ("%s:%d, up for %s s"):format(host, port, facts.uptime or "?"), why_reached)
  local new = core.judge("memcached", { version = facts.version })
  found:add("version" .. name, new and "ok" or "wrong", facts.version or "unknown", "Older servers lack the meta commands that the protocol is made of.",
    "install Memcached 1.6 or later")
  local cas = core.judge("memcached", { version = "1.6", cas_enabled = facts.cas_enabled })
  found:add("compare and swap" .. name, cas and "ok" or "wrong", cas and "on" or "off",
    "Each change of who holds what is a compare-and-swap; without it two could be granted.", "start memcached without -C")
  local evicted, used, most = number(facts.evictions), number(facts.bytes), number(facts.limit_maxbytes)
  local more = ("a Memcached for locks alone, or start memcached with -m %.0f"):format(2 * most / 2 ^ 20)
  found:add("eviction" .. name, evicted > 0 and "warning" or "ok", ("%.0f items so far"):format(evicted),
    "An item that is evicted when memory is short may be a lock, which another program then gets.",
    more)
  found:add("memory" .. name, most > 0 and used > most * NEARLY and "warning" or "ok", ("%.0f of %.0f MiB used"):format(used / 2 ^ 20, most / 2 ^ 20),
    "Where memory is full, items are evicted.", more)
  local clients, limit = number(facts.curr_connections), number(facts.max_connections)
  local wanted = subject.pool_size * subject.processes
  found:add("connections" .. name, wanted > limit and "wrong" or wanted > limit - clients and "warning" or "ok",
    ("%.0f at most, %.0f now; %d pools of %d want %d"):format(limit, clients, subject.processes, subject.pool_size, wanted),
    "Each request under way has a connection to each server; where none is left, acquiring fails.",
    ("start memcached with -c %.0f"):format(wanted + clients + 32))
  local where = facts.inter or ""
  local open = where == "" or where == "NULL" or where:find "0%.0%.0%.0" or where:find "::$"
  found:add("access" .. name, open and not LOOPBACK[where] and "warning" or "ok", open and "listens on all addresses" or "listens on " .. where,
    "Who reaches the port can read, end and forge every lock: there is no log-in.", ("start memcached with -l %s"):format(host))
  return true
end

--- Works like the function of hierlock.command.examine.mysql.
function memcached.examine(subject, found)
  local servers, all = {}, true
  for each in (subject.said.host .. ","):gmatch "([^,]+)," do servers[#servers + 1] = each end
  for _, each in ipairs(servers) do
    local host, port = each:match "^(.*):(%d+)$"
    host, port = (host or each):gsub("^%[(.*)%]$", "%1"), tonumber(port) or PORT
    all = look(subject, found, host, port, #servers > 1) and all
  end
  found:add("durability", "warning", "none, whatever the settings",
    "Memcached forgets: a restart, a flush or an eviction ends locks without a word.",
    "for locks that spare work it is good enough; where one keeps data right, use another store")
  subject.leases_tried = false -- the lock is one
  subject.unopened = "start memcached on each server of the list, without -C"
  subject.lock_denied = subject.unopened
  return all
end

return memcached
