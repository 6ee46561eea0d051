--- The store of examples/store, which `make` builds as a stranger would: see docs/adding-a-store.md.

local folder = { leases_only = true, unbucketed = true, example = true }

function folder.make(store, support)
  store.directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY")) .. "/folder"
  store.dsn = "store+folder:" .. store.directory
  support.observed(store)
end

return folder
