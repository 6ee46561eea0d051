--- A quorum of three embedded stores.

local quorum = { leases_only = true }

function quorum.make(store, support)
  store.directories, store.options.buckets = {}, 10000
  for i = 1, 3 do store.directories[i] = support.stores[1].directory .. "/quorum" .. i end
  store.dsn = "quorum:majority;file:" .. table.concat(store.directories, ";file:")
end

return quorum
