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
  -- over: "socket" or "tcp"
  function self.bare(mode, over)
    return { "mode=" .. mode, over == "socket" and "socket=" .. socket or "host=" .. host, "port=" .. port,
             "user=" .. user, "password=" .. password, "db=" .. database, "buckets=" .. BUCKETS }
  end
  function self.hierlock(over)
    local url = over == "socket"
      and ("mysql://%s:%s@/%s?socket=%s"):format(user, password, database, socket)
      or ("mysql://%s:%s@%s:%s/%s?tls=off"):format(user, password, host, port, database)
    return { "bench/loop.lua", url, BUCKETS }
  end
  function self.symfony()
    return { "bench/symfony.php", "pdo", ("mysql:unix_socket=%s;dbname=%s"):format(socket, database), user, password }
  end
  return self
end

-- mysql.mysql, mysql.mariadb: a server, or nil where there is none. Made at first use.
return setmetatable({}, { __index = function(servers, kind)
  servers[kind] = open(kind)
  return rawget(servers, kind)
end })
