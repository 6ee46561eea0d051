-- A nightly batch beside the users of an online screen.
--
-- Shows: the batch locks account by account, each for as long as that account
-- takes; had it locked the user u1, every screen would wait for all of them. The
-- batch puts off an account that a user works on, and comes back to it at the end.
-- The screen waits for at most a second, and then names the holder, from
-- err.holders.
--
-- Not to be copied blindly: err.holders is a picture of a moment ago; show it to
-- people, decide nothing by it. The list is absent if the store does not show
-- holders (on MySQL the program needs a privilege). os.execute stands for work.
--
-- Run it: account a1 takes the batch two seconds. The screen gives up on a1 after a
-- second, and meanwhile gets a2.
--
--     lua examples/nightly.lua batch a1 2 a2 0 a3 0 | {
--       read line; echo "$line"
--       lua examples/nightly.lua screen a1
--       lua examples/nightly.lua screen a2
--       cat
--     }

local hierlock = require "hierlock"

io.stdout:setvbuf("line")
local role = arg[1]
local manager, failure = hierlock.open(nil, { application = role })
if not manager then error(tostring(failure), 0) end

local function batch(accounts)
  local failed = false
  for _, timeout in ipairs { 0.5, 60 } do
    local put_off = {}
    for _, account in ipairs(accounts) do
      local options = { timeout = timeout, label = "interest" }
      local ok, err = manager:with({ "u1", account.id }, options, function()
        print("batch: works on " .. account.id)
        os.execute("sleep " .. account.seconds)
        return true
      end)
      if not ok and err.code == "timeout" then
        put_off[#put_off + 1] = account
      elseif not ok then
        print("batch: " .. account.id .. " is not done: " .. err)
        failed = true
      end
    end
    accounts = put_off
  end
  for _, account in ipairs(accounts) do print("batch: " .. account.id .. " is not done") end
  return not failed and #accounts == 0
end

local function screen(account)
  local options = { timeout = 1, label = "statement" }
  local ok, err = manager:with({ "u1", account }, options, function(handle)
    print(("screen: has %s, after %.1f s"):format(account, handle.waited))
    return true
  end)
  if ok then return true end
  if err.code ~= "timeout" then error(tostring(err), 0) end
  print("screen: " .. account .. " is in use. Please try again later.")
  for _, holder in ipairs(err.holders or {}) do
    if not holder.waiting then
      -- The store knows less about a program without hierlock.
      print(("screen: in use by %s (%s), process %s on %s, since %s"):format(
        holder.application, holder.label or "?", holder.pid or "?", holder.host,
        holder.since and os.date("%H:%M:%S", math.floor(holder.since)) or "?"))
    end
  end
  return false
end

local ok
if role == "batch" then
  local accounts = {}
  for i = 2, #arg, 2 do accounts[#accounts + 1] = { id = arg[i], seconds = arg[i + 1] } end
  ok = batch(accounts)
else
  ok = screen(arg[2])
end
manager:close()
os.exit(ok and 0 or 1)
