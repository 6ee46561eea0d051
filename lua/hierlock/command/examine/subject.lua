--- The store that is examined, as the files beside this one have it. The fields: dsn, said (the result of core.dsn),
-- store, path, where (for people), command(words) (another subcommand's command line). From the arguments come
-- levels, buckets, pool_size, processes, quick, quiet. A store of a quorum has leases_wanted.

local core = require "hierlock.core"
local uv = require "luv"

local subject = {}

local REDIS_PORT = 6379

--- Whether the DSN names sentinels, who name the server.
local function by_sentinels(dsn) return dsn:lower():find "^%a+%+sentinel:" ~= nil end

--- The directory that is this user's alone: of the embedded store where its DSN names none; else nil.
function subject.own_directory(said)
  return said.store == "file" and not said.path and ("/dev/shm/hierlock-%d"):format(subject.user()) or nil
end

--- Where it is, for people: what core.dsn says of it, what server.parse says, and the DSN.
function subject.place(said, where, dsn)
  if said.store == "file" then return said.path or subject.own_directory(said) end
  if said.store == "memcached" then return said.host end
  if said.store == "redis" then
    if by_sentinels(dsn) then return ("the master that %s name, database %s"):format(said.host or "the sentinels", said.database or "0") end
    return ("%s, database %s"):format(said.socket or ("%s:%d"):format(said.host or "127.0.0.1", said.port ~= 0 and said.port or REDIS_PORT),
      said.database or "0")
  end
  if said.store == "quorum" then return "a quorum" end
  if said.store == "null" then return "the store that grants everything" end
  return said.path or where or said.host and ("%s:%d"):format(said.host, said.port) or "the default server"
end

--- The number of the user whose rights this process has.
function subject.user() return uv.fs_stat("/proc/self").uid end

--- wanted: from server.parse, or another subject. dsn: instead of its own.
function subject.new(wanted, dsn)
  local self = {}
  for name, value in pairs(wanted) do self[name] = value end
  if dsn then self.dsn, self.where = dsn, nil end
  self.said = core.dsn(self.dsn)
  if not self.said then return nil end
  self.store, self.path = self.said.store, self.said.path
  self.sentinels = by_sentinels(self.dsn)
  self.where = subject.place(self.said, self.where, self.dsn)
  return self
end

return subject
