--- The embedded store once more, in a directory whose programs know intentions: see docs/locking.md.

local intentions = { asked = true, subtrees = true }

function intentions.make(store, support)
  store.directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY")) .. "/intentions"
  store.dsn, store.options.buckets = "file:" .. store.directory .. "?intentions=on", 10000
  support.observed(store)
end

return intentions
