--- Memcached: it has only leases, of whole seconds, and lists them by root.


local memcached = {
  server = true, leases_only = true, unbucketed = true, whole_seconds = true, lists_by_root = true,
  themes = {
    hang = true, restart = { keeps = false }, cut = { quit = "quit\r\n", resumes = true },
    forget = { empty = function(store) store.say "flush_all" end },
  },
}

function memcached.make(store)
  store.host, store.port = store.dsn:match "//([^:/]+):(%d+)"
  function store.sql() error "Memcached has no SQL" end
  --- The server's answer to a command of the text protocol (all of what comes at once).
  function store.say(command)
    local socket = assert(require("socket").connect(store.host, tonumber(store.port)))
    socket:settimeout(5)
    local dumps = command:find "metadump" -- another thread answers, and takes nothing meanwhile
    assert(socket:send(command .. (dumps and "\r\n" or "\r\nmn\r\n")))
    local lines = {}
    for line in function() return (assert(socket:receive "*l")) end do
      if line == (dumps and "END" or "MN") then break end
      lines[#lines + 1] = line
    end
    socket:close()
    return table.concat(lines, "\n")
  end
end

return memcached
