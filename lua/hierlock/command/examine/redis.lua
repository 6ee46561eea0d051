--- What can be wrong with a Redis or Valkey: its role, what it forgets, and what this user may do. Asks INFO, which
-- programs need, too, and what else an administrator may have left open: CONFIG GET, ACL WHOAMI.

local redis = {}

local LOOPBACK = { localhost = true, ["127.0.0.1"] = true, ["::1"] = true }
local OLDEST = 602
local SLOTS = 16384
local NEARLY = 0.9 -- of maxmemory

local WHY_REACHED = "Nothing can be locked on a server that cannot be reached."

local function command_line(self, words)
  local said = self.subject.said
  -- Which one that is now, the sentinels know.
  if self.subject.sentinels then return "on the master: redis-cli " .. words end
  local place = said.socket and "-s " .. said.socket or ("-h %s -p %d"):format(said.host or "127.0.0.1", said.port ~= 0 and said.port or 6379)
  return ("redis-cli %s %s"):format(place, words)
end

-- To set it, and so that it lasts.
local function config(self, name, to)
  return { command_line(self, ("CONFIG SET %s %s"):format(name, to)), command_line(self, "CONFIG REWRITE") }
end

local function setting(self, name)
  local reply, err = self.connection:command("CONFIG", "GET", name)
  if not reply then return nil, err end
  return type(reply) == "table" and reply[2]
end

local function role(self, found)
  local info = self.info
  local major, minor = (info.redis_version or ""):match "^(%d+)%.(%d+)"
  local new = major and tonumber(major) * 100 + tonumber(minor) >= OLDEST
  found:add("version", new and "ok" or "wrong", (info.server_name or "redis") .. " " .. (info.valkey_version or info.redis_version or "unknown"),
    "Older servers lack commands that the protocol is made of.", "install Redis 6.2 or later, or Valkey")
  found:add("replica", info.role == "master" and "ok" or "wrong", info.role == "master" and "no" or "it follows " .. (info.master_host or "another"),
    "A replica takes no locks, and knows late of those of its master.",
    { "name the master in the DSN; or, if this one is to be the master:", command_line(self, "REPLICAOF NO ONE") })
  local why = "Each tree is on one node of a cluster: while that is down, its nodes cannot be locked."
  if info.cluster_enabled ~= "1" then return found:add("cluster", "ok", "none", why) end
  local state, err = self.connection:command("CLUSTER", "INFO")
  if not state then return found:add("cluster", "unseen", err.message, why) end
  local well, slots = tostring(state):find "cluster_state:ok" and true, tonumber(tostring(state):match "cluster_slots_ok:(%d+)") or 0
  found:add("cluster", (well and slots == SLOTS) and "ok" or "wrong", ("a node of one, with %d of %d slots served"):format(slots, SLOTS), why,
    command_line(self, "CLUSTER NODES") .. " shows which nodes to start, and redis-cli --cluster fix what nobody serves")
end

local function memory(self, found)
  local info = self.info
  local policy, most, used = info.maxmemory_policy or "unknown", tonumber(info.maxmemory) or 0, tonumber(info.used_memory) or 0
  found:add("eviction", policy == "noeviction" and "ok" or "wrong", "maxmemory-policy " .. policy,
    "A lock that is evicted when memory is short is granted to somebody else while its holder believes in it.", config(self, "maxmemory-policy", "noeviction"))
  local full = most > 0 and used > most * NEARLY
  found:add("memory", full and "warning" or "ok", most == 0 and "no limit" or ("%.0f of %.0f MiB used"):format(used / 2 ^ 20, most / 2 ^ 20),
    "Where memory is full, no lock is granted (OOM).", config(self, "maxmemory", "0"))
end

local function persistence(self, found)
  local info = self.info
  local why = "What a restart forgets is granted to nobody for a while (quarantine), and its holders hear late that it is lost."
  if info.aof_enabled == "1" then
    local sync, err = setting(self, "appendfsync")
    if not sync then
      found:add("persistence", "unseen", "an append-only file, and how it is written is not shown: " .. err.message, why,
        command_line(self, "ACL SETUSER " .. (self.user or "USER") .. " '+config|get'"))
    else
      found:add("persistence", sync == "always" and "ok" or "warning", "an append-only file, written " .. sync, why, config(self, "appendfsync", "always"))
    end
    if info.aof_last_write_status and info.aof_last_write_status ~= "ok" then
      found:add("append-only file", "wrong", "it cannot be written", "A server that cannot write refuses to grant (MISCONF).", "make room on the server's disk")
    end
  else
    local mends = config(self, "appendonly", "yes")
    table.insert(mends, 2, command_line(self, "CONFIG SET appendfsync always"))
    found:add("persistence", "warning", "none that keeps each lock", why, mends)
  end
  if info.rdb_last_bgsave_status and info.rdb_last_bgsave_status ~= "ok" then
    found:add("snapshots", "warning", "the last one failed", "With stop-writes-on-bgsave-error such a server grants nothing (MISCONF).",
      { "make room on the server's disk; then:", command_line(self, "BGSAVE") })
  end
  local replicas = tonumber(info.connected_slaves) or 0
  local wait = tonumber(self.subject.dsn:match "[?&]wait=(%d+)") or 0
  if wait > 0 or replicas > 0 then
    found:add("replicas", wait > replicas and "wrong" or wait == 0 and "warning" or "ok",
      ("%d are connected; a lock waits for %d"):format(replicas, wait),
      "A replica that takes over has only the locks that it was sent before.",
      wait > replicas and "start the replicas that are missing, or mend wait= in the DSN" or "in the DSN: wait=1")
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
    config(self, "maxclients", tostring(wanted + used + 32)))
  local idle = tonumber((setting(self, "timeout")))
  if idle and idle > 0 then
    found:add("time-outs", "warning", ("timeout %d s"):format(idle), "Idle connections of the pool are ended, and the next lock has to connect anew.",
      config(self, "timeout", "0"))
  end
end

local function access(self, found)
  local said = self.subject.said
  local near = said.socket or not said.host or LOOPBACK[said.host]
  local encrypted = self.subject.dsn:lower():find "^rediss[:+]" ~= nil or self.subject.dsn:lower():find "^valkeys[:+]" ~= nil
  found:add("TLS", (near or encrypted) and "ok" or "warning", encrypted and "yes" or near and "none, and the server is on this machine" or "none",
    "Without TLS, who is on the way reads the password and may end and forge locks.", "a DSN that begins with rediss://")
  found:add("log-in", (said.password or os.getenv "REDISCLI_AUTH" or near) and "ok" or "warning", self.user and "as " .. self.user or "done",
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

-- Whether nobody has used the store yet. In a cluster another node may know.
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

--- As hierlock.command.examine.mysql has it.
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
  connection:close()
  return true
end

return redis
