--- Checks a Redis or Valkey: its role, its data's durability, and the user's rights. Asks INFO, which programs need,
-- too, and commands that an administrator may have left open: CONFIG GET, ACL WHOAMI.

local core = require "hierlock.core"
local files = require "hierlock.command.examine.files"

local unpack = table.unpack or unpack -- luacheck: ignore

local redis = {}

local LOOPBACK = { localhost = true, ["127.0.0.1"] = true, ["::1"] = true }
local SLOTS = 16384
local NEARLY = 0.9 -- of maxmemory
local SEEN = 1000  -- keys that are looked at, to see whose they are

-- Counts, among some of the keys, the keys that begin otherwise.
local FOREIGN = [[
local n = 0
for _, key in ipairs(redis.call('SCAN', '0', 'COUNT', ARGV[2])[2]) do
  if key:sub(1, #ARGV[1]) ~= ARGV[1] then n = n + 1 end
end
return n]]

-- The options of redis-cli for parameters of the DSN.
local TLS_FILES = { { "tls_ca", "cacert" }, { "tls_cert", "cert" }, { "tls_key", "key" } }

local WHY_REACHED = "Nothing can be locked on a server that cannot be reached."

local function parameter(subject, name)
  local value = subject.dsn:match("[?&]" .. name .. "=([^&]*)")
  return value and (value:gsub("%%(%x%x)", function(hex) return string.char(tonumber(hex, 16)) end))
end

local function denied(err) return err.message:find "NOPERM" or err.message:find "ACL failure" or err.message:find "can't run this command" end

-- redis-cli asks for the password, as whatever stands on a command line is shown to everybody.
local function command_line(self, words)
  local subject, said = self.subject, self.subject.said
  -- The sentinels know which server is the master now.
  if subject.sentinels then return "on the master: redis-cli " .. words end
  local parts = { "redis-cli", said.socket and "-s " .. files.quoted(said.socket)
    or ("-h %s -p %d"):format(files.word(said.host or "127.0.0.1"), said.port ~= 0 and said.port or 6379) }
  if self.encrypted then
    parts[#parts + 1] = parameter(subject, "tls") == "required" and "--tls --insecure" or "--tls"
    for _, each in ipairs(TLS_FILES) do
      local path = parameter(subject, each[1])
      if path then parts[#parts + 1] = ("--%s %s"):format(each[2], files.quoted(path)) end
    end
  end
  local named = self.user and self.user ~= "default"
  if named and self.administers then parts[#parts + 1] = "--user " .. files.word(self.user) end
  if named or self.password then parts[#parts + 1] = "--askpass" end
  parts[#parts + 1] = words
  return table.concat(parts, " ")
end

-- The lines that say this to the server, for a user who may.
local function commands(self, ...)
  local lines = { not self.administers and "as the user default, or, with --user, as another who may:" or nil }
  for _, words in ipairs { ... } do lines[#lines + 1] = command_line(self, words) end
  return lines
end

-- Like commands, for settings as "NAME VALUE", and so that they last. hierlock may change them on a server for locks
-- alone.
local function config(self, ...)
  local settings = { ... }
  if self.shared then
    return ("a server for locks alone; what others keep on this one would come under %s, too"):format(table.concat(settings, ", "))
  end
  for i, each in ipairs(settings) do settings[i] = "CONFIG SET " .. each end
  if self.info.config_file ~= "" then settings[#settings + 1] = "CONFIG REWRITE" end
  local lines = commands(self, unpack(settings))
  if self.info.config_file == "" then lines[#lines + 1] = "start the server with the same, so that it lasts: it has no configuration file" end
  return lines
end

local function setting(self, name)
  local reply, err = self.connection:command("CONFIG", "GET", name)
  if not reply then return nil, err end
  return type(reply) == "table" and reply[2]
end

-- "ok", or "wrong" where the store would refuse a server for what INFO says in this field.
local function judge(self, name)
  local facts = { redis_version = "7.0", role = "master", maxmemory_policy = "noeviction" }
  facts[name] = self.info[name] or ""
  return core.judge("redis", facts) and "ok" or "wrong"
end

local function role(self, found)
  local info = self.info
  found:add("version", judge(self, "redis_version"), (info.server_name or "redis") .. " " .. (info.valkey_version or info.redis_version or "unknown"),
    "Older servers lack commands that the protocol is made of.", "install Redis 6.2 or later, or Valkey")
  found:add("replica", judge(self, "role"), info.role == "master" and "no" or "it follows " .. (info.master_host or "another"),
    "A replica takes no locks, and knows late of those of its master.",
    { "name the master in the DSN; or, if this one is to be the master:", unpack(commands(self, "REPLICAOF NO ONE")) })
  local why = "Each tree is on one node of a cluster: while that is down, its nodes cannot be locked."
  if info.cluster_enabled ~= "1" then return found:add("cluster", "ok", "none", why) end
  local state, err = self.connection:command("CLUSTER", "INFO")
  if not state then return found:add("cluster", "unseen", err.message, why) end
  local well, slots = tostring(state):find "cluster_state:ok" and true, tonumber(tostring(state):match "cluster_slots_ok:(%d+)") or 0
  found:add("cluster", (well and slots == SLOTS) and "ok" or "wrong", ("a node of one, with %d of %d slots served"):format(slots, SLOTS), why,
    { "start the nodes that this shows as failed; redis-cli --cluster fix gives slots that no node has to one:",
      unpack(commands(self, "CLUSTER NODES")) })
end

local function memory(self, found)
  local info = self.info
  local policy, most, used = info.maxmemory_policy or "unknown", tonumber(info.maxmemory) or 0, tonumber(info.used_memory) or 0
  found:add("eviction", judge(self, "maxmemory_policy"), "maxmemory-policy " .. policy,
    "A lock that is evicted when memory is short is granted to another program while its holder believes in it.", config(self, "maxmemory-policy noeviction"))
  local full = most > 0 and used > most * NEARLY
  found:add("memory", full and "warning" or "ok", most == 0 and "no limit" or ("%.0f of %.0f MiB used"):format(used / 2 ^ 20, most / 2 ^ 20),
    "Where memory is full, no lock is granted (OOM).", config(self, "maxmemory 0"))
end

local function persistence(self, found)
  local info = self.info
  local why = "After a restart that lost data, Redis grants nothing for a while (quarantine), and the holders hear late that they lost their locks."
  if info.aof_enabled == "1" then
    local sync, err = setting(self, "appendfsync")
    if not sync then
      local mends = denied(err) and self.user and commands(self, ("ACL SETUSER %s '+config|get'"):format(files.word(self.user)))
      if mends then mends[#mends + 1] = "and, so that it lasts, ACL SAVE on a server with an aclfile, CONFIG REWRITE on another" end
      found:add("persistence", "unseen", "an append-only file, and how it is written is not shown: " .. err.message, why, mends)
    elseif sync == "always" and setting(self, "no-appendfsync-on-rewrite") ~= "no" then
      found:add("persistence", "warning", "an append-only file, written always, but not while it is rewritten", why,
        config(self, "no-appendfsync-on-rewrite no"))
    else
      found:add("persistence", sync == "always" and "ok" or "warning", "an append-only file, written " .. sync, why, config(self, "appendfsync always"))
    end
    if info.aof_last_write_status and info.aof_last_write_status ~= "ok" then
      found:add("append-only file", "wrong", "it cannot be written", "A server that cannot write refuses to grant (MISCONF).", "make room on the server's disk")
    end
  else
    found:add("persistence", "warning", "none that keeps each lock", why, config(self, "appendonly yes", "appendfsync always"))
  end
  if info.rdb_last_bgsave_status and info.rdb_last_bgsave_status ~= "ok" then
    found:add("snapshots", "warning", "the last one failed", "With stop-writes-on-bgsave-error such a server grants nothing (MISCONF).",
      { "make room on the server's disk; then:", unpack(commands(self, "BGSAVE")) })
  end
  local replicas = tonumber(info.connected_slaves) or 0
  local wait = tonumber(parameter(self.subject, "wait_replicas")) or 0
  if wait > 0 or replicas > 0 then
    found:add("replicas", wait > replicas and "wrong" or wait == 0 and "warning" or "ok",
      ("%d are connected; a lock waits for %d"):format(replicas, wait),
      "A replica that takes over has only the locks that it was sent before.",
      wait > replicas and "start the replicas that are missing, or mend wait_replicas= in the DSN" or "in the DSN: wait_replicas=1")
  end
end

local function connections(self, found)
  local info, subject = self.info, self.subject
  local most, used = tonumber(info.maxclients), tonumber(info.connected_clients) or 1
  local why = "A request that waits has a connection, and each program one by which it is woken."
  if not most then
    local reply, err = setting(self, "maxclients")
    most = tonumber(reply)
    if not most then return found:add("maxclients", "unseen", err and err.message or "it is not shown", why) end
  end
  local wanted = (subject.pool_size + 1) * subject.processes
  found:add("maxclients", wanted > most and "wrong" or wanted > most - used + 1 and "warning" or "ok",
    ("%d at most, %d of others now; %d pools of %d want %d"):format(most, used - 1, subject.processes, subject.pool_size, wanted), why,
    config(self, ("maxclients %.0f"):format(wanted + used + 32)))
  local idle = tonumber((setting(self, "timeout")))
  if idle and idle > 0 then
    found:add("time-outs", "warning", ("timeout %d s"):format(idle), "Idle connections of the pool are ended, and the next lock has to connect anew.",
      config(self, "timeout 0"))
  end
end

local function access(self, found)
  local said = self.subject.said
  local near = said.socket or not said.host or LOOPBACK[said.host]
  found:add("TLS", (near or self.encrypted) and "ok" or "warning", self.encrypted and "yes" or near and "none, and the server is on this machine" or "none",
    "Without TLS, who is on the way reads the password and may end and forge locks.", "a DSN that begins with rediss://")
  found:add("log-in", (self.password or near) and "ok" or "warning", self.user and "as " .. self.user or "done",
    "Who reaches the server and needs no password can take, end and forge every lock.",
    "give the programs a user of their own: docs/security.md has the ACL SETUSER for it")
end

local function connect(subject)
  local ok, store = pcall(require, "hierlock.store.redis")
  if not ok then return nil, { code = "store", message = "the Redis store is not built or cannot be loaded: " .. store } end
  return store.connect(subject.dsn, subject.application)
end

local function unreached(err)
  if err.message:find "not built" then return "install hiredis (apt-get install libhiredis0.14), or build hierlock with it (apt-get install libhiredis-dev)" end
  if err.code == "connection" and not err.retryable then return "check user and password in the DSN" end
  if err.message:find "max number of clients" then
    return "end programs that keep connections, then redis-cli can connect, too: CONFIG SET maxclients; or raise it in the server's file and restart it"
  end
  return "start the server, or mend host, port or socket in the DSN"
end

-- Whether no program has used the store yet. In a cluster another node may know.
local function unsettled(subject, connection)
  local key = (subject.dsn:match "[?&]prefix=([^&]*)" or "hierlock") .. ":levels"
  local levels, err = connection:command("GET", key)
  local place = not levels and err and err.message:match "MOVED %d+ (%S+:%d+)"
  local scheme, rest = subject.dsn:match "^(%a+://)(.*)$"
  if place and scheme then
    local authority = rest:match "^[^/?]*"
    local node = connect { dsn = scheme .. (authority:match "^.*@" or "") .. place .. rest:sub(#authority + 1), application = subject.application }
    if node then
      levels = node:command("GET", key)
      node:close()
    end
  end
  return levels == false
end

-- Whether the user may change settings; an old server does not tell, and is taken to let him.
local function administers(connection, user)
  local reply, err = connection:command("ACL", "DRYRUN", user or "default", "CONFIG", "SET", "timeout", "0")
  return reply == "OK" or not reply and not denied(err)
end

-- Whether others than this space keep keys there, or that cannot be seen.
local function is_shared(self)
  local said, prefix = self.subject.said, (parameter(self.subject, "prefix") or "hierlock") .. ":"
  local own = "db" .. (parameter(self.subject, "database") or said.database or "0")
  for name in pairs(self.info) do
    if name:find "^db%d+$" and name ~= own then return true end
  end
  return self.connection:command("EVAL", FOREIGN, "0", prefix, tostring(SEEN)) ~= 0
end

--- Works like the function of hierlock.command.examine.mysql.
function redis.examine(subject, found)
  local connection, err = connect(subject)
  local text
  if connection then
    text, err = connection:command "INFO"
    if not text then connection:close() end
  end
  if not text then
    found:add("reached", "wrong", err.message, WHY_REACHED, unreached(err))
    return false
  end
  local self = { connection = connection, subject = subject, info = {} }
  for name, value in tostring(text):gmatch "([%w_]+):([^\r\n]*)" do self.info[name] = self.info[name] or value end
  subject.unsettled = unsettled(subject, connection)
  local user = connection:command("ACL", "WHOAMI")
  self.user = type(user) == "string" and user or subject.said.user
  self.password = subject.said.password or os.getenv "REDISCLI_AUTH" ~= nil
  self.encrypted = subject.dsn:lower():find "^rediss[:+]" ~= nil or subject.dsn:lower():find "^valkeys[:+]" ~= nil
  self.administers, self.shared = administers(connection, self.user), is_shared(self)
  subject.leases_tried = false -- the lock is one
  subject.lock_denied = "let the user do what docs/security.md lists"
  subject.unopened = subject.lock_denied
  found:add("reached", "ok", subject.where .. (self.user and ", as " .. self.user or ""), WHY_REACHED)
  if self.info.loading == "1" then
    found:add("loading", "warning", "the server is loading its data", "It grants nothing until it has.", "wait, and ask again")
  end
  role(self, found)
  memory(self, found)
  persistence(self, found)
  connections(self, found)
  access(self, found)
  if found.counts.wrong > 0 then subject.unopened = "mend what is wrong above" end
  connection:close()
  return true
end

return redis
