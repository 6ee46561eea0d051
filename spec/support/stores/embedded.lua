--- The embedded store, in the directory of the spec's run. This store is the first of support.stores.

local embedded = {}

function embedded.make(store, support)
  store.directory = assert(os.getenv("HIERLOCK_SPEC_DIRECTORY"), "run the specs by `make spec`")
  store.dsn, store.options.buckets = "file:" .. store.directory, 10000
  support.observed(store)
end

return embedded
