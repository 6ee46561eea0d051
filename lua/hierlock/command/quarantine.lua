--- Whether a Redis grants nothing for a while, as it has forgotten its earlier grants:
-- csrc/stores/redis/scripts/amnesia.lua. Nothing is held or awaited then, so observers would see an idle store.
-- The look changes nothing.

local quarantine = {}

--- A function that tells for how long nothing is granted, as a sentence; nil: it has nothing to tell. On Redis Cluster,
-- where each slot has such a time of its own, only a request is told.
-- @tparam table wanted as from server.parse
-- @tparam string application shown in the server's list of clients
function quarantine.watch(wanted, application)
  local connection
  if wanted.store ~= "redis" or wanted.dsn:find "[?&]quarantine=0%f[^%d.]" then return function() end end
  local key = (wanted.dsn:match "[?&]prefix=([^&]*)" or "hierlock") .. ":memory"
  local function ask(...)
    connection = connection or require("hierlock.store.redis").connect(wanted.dsn, application)
    local reply = connection and connection:command(...)
    if connection and not reply then
      connection:close()
      connection = nil
    end
    return reply
  end
  return function()
    local memory, time = ask("HMGET", key, "run", "until"), ask "TIME"
    local run = (ask("INFO", "server") or ""):match "run_id:(%x+)"
    if type(memory) ~= "table" or type(time) ~= "table" or not run or not memory[1] then return nil end
    local left = (tonumber(memory[2]) or 0) / 1000 - tonumber(time[1])
    if memory[1]:sub(1, #run) ~= run or left <= 0 then return nil end
    return ("nothing is granted for %.0f s more: the server has forgotten what it had granted"):format(math.ceil(left))
  end
end

return quarantine
