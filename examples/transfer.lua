-- Transfers between accounts, by several processes at once.
--
-- Shows: a transfer locks both accounts in one call. Two transfers in opposite
-- directions cannot deadlock; they may name the accounts in any order. The fencing
-- token is stored with each balance. So a holder that lost its lock unnoticed (it
-- was stopped for longer than hold_timeout) cannot undo the writes of a later
-- holder.
--
-- Not to be copied blindly: the files. Two of them cannot be written as one, so a
-- crash in between loses money, and a file does not compare tokens while it is
-- written. A database does both: in one transaction, for each account,
--     UPDATE account SET balance = ?, token = ? WHERE id = ? AND token <= ?
-- and ROLLBACK unless each changed a row. Tokens of another store (another DSN) do not
-- compare with these.
--
-- Run it: four processes, 100 transfers each; the three balances sum to 300.
--
--     bank=$(mktemp -d)
--     for i in 1 2 3 4; do lua examples/transfer.lua "$bank" 100 & done; wait
--     cat "$bank"/*

local hierlock = require "hierlock"

local bank, count = arg[1], tonumber(arg[2])
local manager, failure = hierlock.open(nil, { application = "transfer" })
if not manager then error(tostring(failure), 0) end

local function file_of(account) return bank .. "/" .. account[1] .. "-" .. account[2] end

-- An account that has no file yet has the opening balance of 100.
local function read(account)
  local file = io.open(file_of(account))
  if not file then return 100, "" end
  local balance, token = file:read("*a"):match("(%-?%d+) (%x+)\n$")
  file:close()
  return assert(tonumber(balance)), token
end

local function write(account, balance, token)
  local file = assert(io.open(file_of(account), "w"))
  assert(file:write(account[1], "/", account[2], " ", balance, " ", token, "\n"))
  assert(file:close())
end

-- true, or nil and the reason. An error that is raised on the way ends the
-- process, which releases the lock. A program that goes on after errors needs
-- `local handle <close>` (Lua 5.4), or pcall and release.
local function transfer(from, to, amount)
  local handle, err = manager:acquire_all({ from, to }, { timeout = 10, label = "transfer" })
  if not handle then return nil, err end
  -- Read under the lock: values that were read before may have changed.
  local from_balance, from_token = read(from)
  local to_balance, to_token = read(to)
  local done, why = nil, "not enough money"
  if from_token > handle.token or to_token > handle.token then
    why = "fenced off: a later holder has written"
  elseif from_balance >= amount then
    write(from, from_balance - amount, handle.token)
    write(to, to_balance + amount, handle.token)
    done, why = true, nil
  end
  local released, lost = handle:release()
  if not released then return nil, lost end -- it may not have been alone
  return done, why
end

local accounts = { { "u1", "a1" }, { "u1", "a2" }, { "u2", "a1" } }
local failed = 0
for i = 1, count do
  -- To the next account and back to the one before, in turn.
  local from, to = accounts[i % 3 + 1], accounts[(i + 1 + i % 2) % 3 + 1]
  local ok, err = transfer(from, to, i % 7 + 1)
  if not ok then
    io.stderr:write(tostring(err), "\n")
    failed = failed + 1
  end
end
manager:close()
print(("%d of %d transfers done"):format(count - failed, count))
os.exit(failed == 0 and 0 or 1)
