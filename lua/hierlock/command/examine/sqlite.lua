--- Checks the file of the SQLite store. Opens it only as programs do (see trial.lua): a process that closes a
-- descriptor of the file loses its locks on it.

local files = require "hierlock.command.examine.files"
local uv = require "luv"

local sqlite = {}

local LONG_LOG = 64 * 2 ^ 20 -- bytes

local quoted = files.quoted

local BESIDE = { "", "-wal", "-shm", "-hierlock" } -- what a database consists of

-- Whether the file is of hierlock's making, by what lies beside it: then its rights may be changed for hierlock's sake.
local function is_ours(path) return uv.fs_stat(path .. "-hierlock") ~= nil end

--- Works like the function of hierlock.command.examine.mysql.
function sqlite.examine(subject, found)
  local path, ok = subject.path, pcall(require, "hierlock.store.sqlite")
  local parent, why = files.parent_of(path), "All programs that are to exclude each other come to this file."
  if not ok then
    found:add("file", "wrong", "the SQLite store is not built or cannot be loaded", why,
      "install SQLite (apt-get install libsqlite3-0), or build hierlock with it (apt-get install libsqlite3-dev)")
    return false
  end
  subject.leases_tried = false -- the lock is one
  subject.unopened, subject.lock_denied = "name another file in the DSN: sqlite:/var/lib/mine/locks.db", "name another file in the DSN"
  local stat = uv.fs_stat(path)
  local may, beside = uv.fs_access(path, "rw"), uv.fs_access(parent, "wx")
  if stat and stat.type ~= "file" then
    found:add("file", "wrong", path .. " is no regular file", why, "name another file in the DSN")
    return false
  elseif not stat and not beside then
    found:add("file", "wrong", path .. " is not there, and cannot be made", why,
      not uv.fs_stat(parent) and files.made(parent) or "name a file in a directory of this user's")
    return false
  end
  found:add("file", "ok", path .. (stat and "" or " is not there yet: the first program makes it"), why)
  subject.unsettled = not stat or stat.size == 0
  if stat then
    local why_rights = "Its log is written beside it; who can read it finds the secrets of exported leases."
    local group = files.shared(stat)
    local open, owner = {}, stat.uid
    for _, suffix in ipairs(BESIDE) do
      local one = uv.fs_stat(path .. suffix)
      if one and one.mode % 8 ~= 0 then
        open[#open + 1] = quoted(path .. suffix)
        if one.uid ~= owner then owner = 0 end
      end
    end
    if not may then
      found:add("rights", "wrong", ("this user may not write it: mode %s, of user %d"):format(files.mode(stat), stat.uid), why_rights,
        "let this user read and write it, or name another file in the DSN")
    elseif not beside then
      found:add("rights", "wrong", "this user may not write in " .. parent, why_rights, "name a file in a directory of this user's")
    else
      found:add("rights", open[1] and "warning" or "ok",
        "mode " .. files.mode(stat) .. (open[1] and ": everybody may read it, or what is beside it" or group and ", shared with a group" or ""),
        why_rights, is_ours(path) and files.by_owner(owner, "chmod o= " .. table.concat(open, " ")) or "name a file of hierlock's own in the DSN")
    end
    local real = uv.fs_realpath(path) or path
    local why_names = "SQLite names its log after the name of the file: programs that use another name would not be kept out."
    found:add("names", stat.nlink > 1 and "wrong" or "ok", ("%d"):format(stat.nlink), why_names,
      { "remove the others, of which this shows those in its directory:",
        ("find %s -xdev -samefile %s"):format(quoted(files.parent_of(real)), quoted(real)) })
    files.mounted(found, path)
  end
  files.container(found, parent)
  files.system(found, parent)
  local log = uv.fs_stat(path .. "-wal")
  local long = log and log.size > LONG_LOG
  found:add("log", long and "warning" or "ok", log and ("%.1f MiB"):format(log.size / 2 ^ 20) or "none yet",
    "A long log makes each look-up slow; some program keeps a transaction open.",
    { "end that transaction; then:", ("sqlite3 %s 'PRAGMA wal_checkpoint(TRUNCATE)'"):format(quoted(path)) })
  local relaxed = (subject.dsn:lower()):find "[?&]synchronous=normal"
  found:add("durability", relaxed and "warning" or "ok", relaxed and "synchronous=normal" or "each change is on the disk",
    "A power failure may take back what was done in the last moments: an exported lease, say.", "leave synchronous=normal out of the DSN")
  return true
end

return sqlite
