--- SQLite, in a database file of its own; where this Lua has the module.

local uv = require "luv"

local sqlite = {
  leases_only = true, unbucketed = true,
  themes = { hang = true, restart = "it has no server", forget = "it has no server", cut = "it has no server" },
}

function sqlite.make(store, support)
  if not pcall(require, "hierlock.store.sqlite") then
    store.missing = "the SQLite store is not built"
    return
  end
  store.directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY")) .. "/sqlite"
  store.dsn = "sqlite:" .. store.directory .. "/leases.db?synchronous=normal"
  function store.prepare() uv.fs_mkdir(store.directory, 448) end
  support.observed(store)
  local writer
  store.silences[1] = { title = "another program writes", silence = function()
    writer = assert(require("luasql.sqlite3").sqlite3():connect(store.directory .. "/leases.db"))
    assert(writer:execute "BEGIN EXCLUSIVE")
  end, speak = function()
    writer:execute "ROLLBACK"
    writer:close()
  end }
end

return sqlite
