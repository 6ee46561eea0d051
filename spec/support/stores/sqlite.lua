--- SQLite, in a database file of its own; where this Lua has the module.

local uv = require "luv"

local sqlite = { leases_only = true, unbucketed = true }

function sqlite.make(store, support)
  if not pcall(require, "hierlock.store.sqlite") then
    store.missing = "the SQLite store is not built"
    return
  end
  store.directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY")) .. "/sqlite"
  store.dsn = "sqlite:" .. store.directory .. "/leases.db?synchronous=normal"
  function store.prepare() uv.fs_mkdir(store.directory, 448) end
  support.observed(store)
end

return sqlite
