--- Redis or Valkey: it has only leases.

local redis_cli = require "spec.support.redis_cli"

local redis = {
  server = true, leases_only = true, unbucketed = true,
  themes = {
    hang = true, restart = { keeps = false }, cut = { quit = "QUIT\r\n" },
    forget = { empty = function(store) store.cli "FLUSHALL" end },
  },
}

function redis.make(store)
  store.host, store.port = store.dsn:match "@([^:/]+):(%d+)"
  function store.sql() error "Redis has no SQL" end
  function store.root() end
  --- The output of redis-cli, as the administrator.
  function store.cli(...) return redis_cli(store.host, store.port, "rootpassword", { ... }) end
end

return redis
