--- Checks that the stores in files share: rights, file system, space, and what a container hides. Opens none of the
-- store's files.

local core = require "hierlock.core"
local subject_of = require "hierlock.command.examine.subject"
local uv = require "luv"

local files = {}

local LEAST = 4 * 2 ^ 20 -- bytes, and as many files, that should be free
local LEAST_FILES = 100
local TMPFS, OVERLAY = 0x01021994, 0x794C7630

local function band_022(mode) -- whether the group or others may write
  return math.floor(mode / 16) % 2 == 1, math.floor(mode / 2) % 2 == 1
end

--- Permissions as chmod(1) has them.
function files.mode(stat) return ("%04o"):format(stat.mode % 4096) end

--- Whether the group, and others, may write.
function files.shared(stat) return band_022(stat.mode) end

--- A word for a shell, which is the same wherever it is shown: without a character that a terminal might obey or lack.
function files.word(word)
  if word:find "^[%w/._+:@-]+$" then return word end
  if not word:find "[^ -~]" then return "'" .. word:gsub("'", [['\'']]) .. "'" end
  local format = word:gsub("[\\%%]", "%0%0"):gsub("'", [['\'']]):gsub("[^ -~]", function(c) return ("\\%03o"):format(c:byte()) end)
  return ([["$(printf '%s')"]]):format(format)
end

--- Quotes a path for a command, which would take a leading dash for an option.
function files.quoted(path) return files.word((path:gsub("^%-", "./-"))) end

--- The directory that a path is in.
function files.parent_of(path)
  local parent = path:gsub("/+$", ""):match "^(.*)/[^/]*$"
  return parent == nil and "." or parent == "" and "/" or parent
end

--- A line that only root and one user can run; where this is another, it is said before.
-- @int owner the user, 0: root alone
function files.by_owner(owner, line)
  local uid = subject_of.user()
  if uid == 0 or uid == owner then return { line } end
  return { owner == 0 and "as root:" or ("as root, or user %d:"):format(owner), line }
end

--- The lines that make a directory for this user, and those above it; nil where that would not help.
function files.made(path)
  local base = files.parent_of(path)
  while not uv.fs_lstat(base) do base = files.parent_of(base) end
  local stat, may = uv.fs_stat(base), uv.fs_access(base, "w")
  if not stat or stat.type ~= "directory" or not uv.fs_access(base, "x") or (subject_of.user() == 0 and not may) then return nil end
  local line = ("install -d -m 0700 -o %d %s"):format(subject_of.user(), files.quoted(path))
  return may and line or files.by_owner(0, line)
end

local function mib(n) return ("%.0f MiB"):format(n / 2 ^ 20) end

--- Checks the file system that the path is on.
function files.system(found, path)
  local why = "Locks on a network file system would not keep out the programs of other machines."
  local system, err = uv.fs_statfs(path)
  if not system then return found:add("file system", "unseen", err, why) end
  local remote = core.remote_kind(system.type)
  found:add("file system", remote and "wrong" or "ok", remote or system.type == TMPFS and "tmpfs: leases end with the machine's run" or
    "one of this machine's", why, "name a directory of this machine's own in the DSN")
  local free, inodes = system.bavail * system.bsize, system.ffree
  local few = system.files > 0 and inodes < LEAST_FILES
  found:add("space", (free < LEAST or few) and "wrong" or "ok", mib(free) .. " free" .. (few and (", for %.0f files"):format(inodes) or ""),
    "Without room, no program can lock.",
    { "make room; what there is is shown by:", ("df -h %s; df -i %s"):format(files.quoted(path), files.quoted(path)) })
end

--- Checks that a file of the store's has not been mounted by its own name, apart from its directory.
function files.mounted(found, path)
  local parent = (uv.fs_realpath(path) or path):match "^(.*)/[^/]*$"
  if not core.is_mount_point(uv.fs_realpath(path) or path) then return end
  found:add("mount", "wrong", path .. " is mounted by its own name", "Programs outside use the same file with other files beside it.",
    ("mount the directory that the file is in: docker run -v DIRECTORY:%s ..."):format(files.quoted(parent)))
end

--- Checks whether programs outside of a container would come to another place. private: a directory that each
-- container has for itself.
function files.container(found, path, private)
  local system = uv.fs_statfs(path)
  if not (uv.fs_stat "/.dockerenv" or uv.fs_stat "/run/.containerenv") then return end
  local alone = private or (system and system.type == OVERLAY)
  found:add("container", alone and "warning" or "ok", alone and "this is one, and nothing is mounted there" or "this is one, and the files are mounted",
    "Programs exclude each other only where they come to the same files; a container has its own, unless they are mounted.",
    private and "docker run --ipc=host ..., or name a directory that is mounted in each container"
      or ("docker run -v %s:%s ..., in each container that is to be kept out"):format(files.quoted(path), files.quoted(path)))
end

return files
