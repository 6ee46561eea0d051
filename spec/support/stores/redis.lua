--- Redis or Valkey: it has only leases.

local redis = { server = true, leases_only = true, unbucketed = true }

function redis.make(store)
  store.host, store.port = store.dsn:match "@([^:/]+):(%d+)"
  function store.sql() error "Redis has no SQL" end
  function store.root() end
  --- The output of redis-cli, as the administrator.
  function store.cli(...)
    local words = {}
    for i, word in ipairs { ... } do words[i] = "'" .. tostring(word):gsub("'", "'\\''") .. "'" end
    local pipe = io.popen(("unset LD_PRELOAD; REDISCLI_AUTH=rootpassword redis-cli -h %s -p %s %s 2>&1"):format(
      store.host, store.port, table.concat(words, " ")))
    local text = pipe:read "*a"
    pipe:close()
    return (text:gsub("\n$", ""))
  end
end

return redis
