-- The throw-away MySQL and MariaDB servers that spec/support/servers.sh has told
-- the environment of: provisioned, and how each client is pointed to them.

local BUCKETS = "10000"

local function shell(command)
  local pipe = assert(io.popen(command))
  local output = pipe:read("*a")
  pipe:close()
  return output
end

local function open(kind)
  local environment = "HIERLOCK_" .. kind:upper()
  local dsn = os.getenv(environment .. "_DSN")
  if not dsn then return nil end
  local user, password, host, port, database = dsn:match("^%a+://(.-):(.-)@(.-):(%d+)/(.*)$")
  local socket = os.getenv(environment .. "_SOCKET")
  local version = shell(("(cat sql/schema.sql sql/provision.sql; echo \"CALL hier_lock_provision(%s, 'user,account,resource', 50000);" ..
                         " SELECT VERSION();\") | " ..
                         "$(command -v mariadb || command -v mysql) -N -h%s -P%s -u%s -p%s %s | tail -n 1")
                        :format(BUCKETS, host, port, user, password, database))
  local self = { pid = os.getenv(environment .. "_PID"), version = assert(version:match("^[%d.]+")) }
  self.host, self.port = host, port
  -- over: "socket" or "tcp"; or the port of a line to the server
  function self.bare(mode, over)
    return { "mode=" .. mode, over == "socket" and "socket=" .. socket or "host=" .. host,
             "port=" .. (tonumber(over) or port),
             "user=" .. user, "password=" .. password, "db=" .. database, "buckets=" .. BUCKETS }
  end
  function self.hierlock(over)
    local url = over == "socket"
      and ("mysql://%s:%s@/%s?socket=%s"):format(user, password, database, socket)
      or ("mysql://%s:%s@%s:%s/%s?tls=off"):format(user, password, host, tonumber(over) or port, database)
    return { "bench/loop.lua", url, BUCKETS }
  end
  -- Spaces with leases, beside the plain space. BARE is for bare clients, whose gates are never closed; CROWDED is
  -- for many leases.
  local LEASED, BARE, CROWDED = "bench_leased", "bench_bare", "bench_crowded"
  local buckets = { [LEASED] = BUCKETS, [BARE] = BUCKETS, [CROWDED] = "100000" }
  -- 10,000 leases of a hundred users, for an hour.
  local CROWD = [[
INSERT INTO hier_leases (id, secret, holder, till, turn, since, token, mode, owner, label, path, application, host, pid, revoked)
  SELECT UNHEX(LEFT(SHA2(bucket, 256), 32)), "", "", UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, 0, UTC_TIMESTAMP(6), 1, 0,
    "bench", "", "u/a/r", "bench", "host", 1, 0 FROM hier_nodes WHERE level = 2 AND bucket < 10000;
INSERT INTO hier_leased (level, bucket, x, id)
  SELECT level, IF(level = 0, n % 100, n), level = 2, UNHEX(LEFT(SHA2(n, 256), 32)) FROM
    (SELECT bucket n FROM hier_nodes WHERE level = 0 AND bucket < 10000) leases,
    (SELECT DISTINCT level FROM hier_nodes WHERE bucket = 0) levels;
UPDATE hier_gate SET n = 1 WHERE g BETWEEN 0 AND 100]]
  --- Makes the spaces, once; from then on the three functions below can be
  -- used.
  local made = false
  function self.lease()
    if made then return end
    made = true
    for space, n in pairs(buckets) do
      shell(("HIERLOCK_DSN='%s%s?table=%s_buckets' %s lua/hierlock/command/main.lua provision --quiet --leases --buckets %s"):format(
        os.getenv(environment .. "_ROOT_DSN"), database, space, os.getenv("HIERLOCK_LUA") or "lua5.4", n))
    end
    self.root(("USE %s; "):format(database) .. CROWD:gsub("hier", CROWDED))
    self.root(("GRANT SELECT, INSERT, UPDATE, DELETE ON %s.* TO %s"):format(database, user))
  end
  function self.leased_bare(over)
    local arguments = self.bare("lease", over)
    arguments[#arguments + 1] = "table=" .. BARE
    return arguments
  end
  local function leased(space, over, ...)
    local arguments = self.hierlock(over)
    arguments[2] = ("%s%stable=%s_buckets"):format(arguments[2], arguments[2]:find("?", 1, true) and "&" or "?", space)
    arguments[3] = buckets[space]
    for _, argument in ipairs { ... } do arguments[#arguments + 1] = argument end
    return arguments
  end
  -- The further arguments are loop.lua's: the number of held locks, and the
  -- kind.
  function self.leased(over, ...) return leased(LEASED, over, ...) end
  function self.crowded(over, ...) return leased(CROWDED, over, ...) end
  function self.symfony()
    return { "bench/symfony.php", "pdo", ("mysql:unix_socket=%s;dbname=%s"):format(socket, database), user, password }
  end
  --- A statement, as the administrator.
  function self.root(sql)
    local root, secret = os.getenv(environment .. "_ROOT_DSN"):match("^%a+://(.-):(.-)@")
    local output = shell(("$(command -v mariadb || command -v mysql) -h%s -P%s -u%s -p%s -e '%s' && echo done")
                         :format(host, port, root, secret, sql))
    assert(output:find "done", "the administrator's statement failed")
  end
  return self
end

-- mysql.mysql, mysql.mariadb: a server, or nil without one. Made at first use.
return setmetatable({}, { __index = function(servers, kind)
  servers[kind] = open(kind)
  return rawget(servers, kind)
end })
