--- What can be wrong with the directory of the embedded store.

local files = require "hierlock.command.examine.files"
local subject_of = require "hierlock.command.examine.subject"
local uv = require "luv"

local file = {}

local YOUNG = 60    -- s: a file that is being made
local LEVELS = 3    -- where nothing else is said
local LISTED = 3    -- names that are shown
local OTHERS = 32   -- descriptors that a program has besides, at least

local quoted = files.quoted

local function parent_of(path)
  local parent = path:gsub("/+$", ""):match "^(.*)/[^/]*$"
  return parent == nil and "." or parent == "" and "/" or parent
end

local function listed(names)
  local shown = {}
  for i = 1, math.min(#names, LISTED) do shown[i] = names[i] end
  return table.concat(shown, ", ") .. (#names > LISTED and (" and %d more"):format(#names - LISTED) or "")
end

local function all_quoted(path, names)
  local words = {}
  for i, name in ipairs(names) do words[i] = quoted(path .. "/" .. name) end
  return table.concat(words, " ")
end

-- Whether hierlock's files are in it, or none: then its rights may be changed for hierlock's sake.
local function is_ours(path)
  local scan = uv.fs_scandir(path)
  return uv.fs_stat(path .. "/control") ~= nil or (scan and uv.fs_scandir_next(scan) == nil)
end

local function rights(found, path, stat, named)
  local why = "Who may write there may lock, and block others; who may not can use none of it."
  local uid = subject_of.user()
  local own = uid == 0 or stat.uid == uid
  local group, others = files.shared(stat)
  local may = uv.fs_access(path, "rwx")
  local function change(how) return is_ours(path) and "chmod " .. how .. " " .. quoted(path) or "name a directory for hierlock alone in the DSN" end
  if not named and stat.uid ~= uid then
    found:add("rights", "wrong", ("it belongs to user %d"):format(stat.uid), why,
      "name a directory for hierlock alone in the DSN, or have that user remove this one")
  elseif not named and (group or others) then
    found:add("rights", "wrong", "others may write there: mode " .. files.mode(stat), why, change "0700")
  elseif not may then
    found:add("rights", "wrong", ("this user may not write there: mode %s, of user %d"):format(files.mode(stat), stat.uid), why,
      own and change "u+rwx" or "run the program as that user, put this user into a group that may write there, or name another directory")
  elseif uid == 0 and stat.uid ~= 0 then
    found:add("rights", "warning", ("it belongs to user %d, and this is root: what root makes there keeps that user out"):format(stat.uid), why,
      ("run what uses it as that user: setpriv --reuid=%d ..."):format(stat.uid))
  elseif others then
    found:add("rights", "warning", "everybody may write there: mode " .. files.mode(stat), why, change "o-w")
  else
    found:add("rights", "ok", "mode " .. files.mode(stat) .. (named and "" or (": the locks of user %d alone"):format(uid)),
      named and why or "Programs of other users have other locks. Programs of several users name one directory: file:/run/shop-locks.")
  end
end

local function is_alive(pid)
  local _, _, name = uv.kill(pid, 0)
  return name ~= "ESRCH"
end

local function contents(found, path)
  local scan, err = uv.fs_scandir(path)
  local why = "What processes have left behind takes room until the next program that opens the store removes it."
  if not scan then return found:add("left-over files", "unseen", err, why) end
  local stale, strange, barred = {}, {}, {}
  local now = os.time()
  for name in function() return uv.fs_scandir_next(scan) end do
    local stat = uv.fs_lstat(path .. "/" .. name)
    local pid = tonumber(name:match "^who%-(%d+)%-%x+$" or name:match "^tmp%-(%d+)%-%x+$")
    if pid then
      if stat and not is_alive(pid) and now - stat.mtime.sec > YOUNG then stale[#stale + 1] = name end
    elseif name == "control" or name == "leases" or name:find "^rows%-%x+$" then
      if stat and stat.type ~= "file" then
        strange[#strange + 1] = name
      elseif stat and not uv.fs_access(path .. "/" .. name, "rw") then
        barred[#barred + 1] = name
      end
    elseif stat then
      strange[#strange + 1] = name
    end
  end
  found:add("left-over files", stale[1] and "warning" or "ok", stale[1] and listed(stale) or "none", why, "rm -f " .. all_quoted(path, stale))
  if barred[1] then
    found:add("files", "wrong", "this user may not write " .. listed(barred), "Each lock is a range of bytes in one of these files.",
      ("chmod --reference=%s %s; chmod a-x %s"):format(quoted(path), all_quoted(path, barred), all_quoted(path, barred)))
  end
  if strange[1] then
    found:add("other files", "warning", listed(strange), "They are not hierlock's: is the directory used for something else?",
      "move them elsewhere, or name a directory for hierlock alone in the DSN")
  end
end

local function descriptors(subject, found)
  local limits = io.open "/proc/self/limits"
  local text = limits and limits:read "*a" or ""
  if limits then limits:close() end
  local limit = text:match "Max open files%s+(%d+)"
  local why = "A process has a descriptor for each file in which it holds something, and one for each wait."
  if not limit then return found:add("descriptors", "ok", "no limit is seen", why) end
  local levels = subject.levels and #subject.levels or LEVELS
  local wanted = subject.pool_size * (levels + 1) + OTHERS
  limit = tonumber(limit)
  found:add("descriptors", wanted > limit and "warning" or "ok", ("%d at most; %d locks at a time want some %d"):format(limit, subject.pool_size, wanted),
    why, ("ulimit -n %d"):format(wanted))
end

--- As hierlock.command.examine.mysql has it.
function file.examine(subject, found)
  local path, named = subject.where, subject.path ~= nil
  local why = "All programs that are to exclude each other come to this directory."
  local link, stat = uv.fs_lstat(path), uv.fs_stat(path)
  subject.unopened = "name another directory in the DSN: file:/var/lib/mine/locks"
  subject.lock_denied = subject.unopened
  if not link then
    local parent = parent_of(path)
    local may = uv.fs_access(parent, "wx")
    found:add("directory", may and "ok" or "wrong",
      path .. (may and " is not there yet: the first program makes it" or " is not there, and cannot be made"), why,
      uv.fs_stat(parent) and ("install -d -m 0700 -o %d %s"):format(subject_of.user(), quoted(path)) or "mkdir -p " .. quoted(parent))
    if not may then return false end
    subject.unsettled = true
    files.system(found, parent)
    files.container(found, parent, not named)
    descriptors(subject, found)
    return true
  end
  if not stat or stat.type ~= "directory" or (link.type == "link" and not named) then
    found:add("directory", "wrong", path .. (link.type == "link" and " is a symbolic link" or " is no directory"), why,
      named and subject.unopened or "rm " .. quoted(path))
    return false
  end
  found:add("directory", "ok", path, why)
  subject.unsettled = not uv.fs_stat(path .. "/control")
  rights(found, path, stat, named)
  files.mounted(found, path .. "/control")
  files.container(found, path, not named)
  files.system(found, path)
  contents(found, path)
  descriptors(subject, found)
  return true
end

return file
