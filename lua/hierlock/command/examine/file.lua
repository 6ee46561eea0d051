--- Checks the directory of the embedded store.

local files = require "hierlock.command.examine.files"
local subject_of = require "hierlock.command.examine.subject"
local uv = require "luv"

local file = {}

local LISTED = 3 -- names that are shown

local quoted = files.quoted

local parent_of = files.parent_of

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
  local group, others = files.shared(stat)
  local may, closed = uv.fs_access(path, "rwx"), math.floor(stat.mode / 64) % 8 ~= 7
  local function change(line)
    if not is_ours(path) then return "name a directory for hierlock alone in the DSN" end
    if uid ~= 0 and uid ~= stat.uid then return ("have user %d give it to a group of those who lock, and close it to others"):format(stat.uid) end
    return line .. " " .. quoted(path)
  end
  if not named and stat.uid ~= uid then
    found:add("rights", "wrong", ("it belongs to user %d"):format(stat.uid), why,
      "name a directory for hierlock alone in the DSN, or have that user remove this one")
  elseif not named and (group or others) then
    found:add("rights", "wrong", "others may write there: mode " .. files.mode(stat), why, change "chmod 0700")
  elseif not may then
    found:add("rights", "wrong", ("this user may not write there: mode %s, of user %d"):format(files.mode(stat), stat.uid), why,
      stat.uid == uid and closed and change "chmod u+rwx"
        or "run the program as that user, put this user into a group that may write there, or name another directory")
  elseif uid == 0 and stat.uid ~= 0 then
    found:add("rights", "warning", ("it belongs to user %d, and this is root: what root makes there keeps that user out"):format(stat.uid), why,
      ("run what uses it as that user: setpriv --reuid=%d ..."):format(stat.uid))
  elseif others then
    found:add("rights", "warning", "everybody may write there: mode " .. files.mode(stat), why, change "chmod o-w")
  else
    found:add("rights", "ok", "mode " .. files.mode(stat) .. (named and "" or (": the locks of user %d alone"):format(uid)),
      named and why or "Programs of other users have other locks. Programs of several users name one directory: file:/run/shop-locks.")
  end
end

-- The mode that the store gives its files. Accounts that may write the directory may use them; other accounts may
-- not even read them.
local function mode_for(directory)
  local group, others = files.shared(directory)
  return "06" .. (group and 6 or 0) .. (others and 6 or 0)
end

-- Commands that make hierlock's files usable again. chown must not follow a link that another account has put there
-- meanwhile.
local function share(path, directory, names, stats)
  local lines, strangers, all = {}, false, all_quoted(path, names)
  for _, stat in ipairs(stats) do strangers = strangers or stat.uid ~= directory.uid or stat.gid ~= directory.gid end
  if strangers then lines = files.by_owner(0, ("chown -h %d:%d %s"):format(directory.uid, directory.gid, all)) end
  for _, line in ipairs(files.by_owner(directory.uid, ("chmod %s %s"):format(mode_for(directory), all))) do lines[#lines + 1] = line end
  return lines
end

local function contents(found, path, directory)
  local scan, err = uv.fs_scandir(path)
  local why = "They are not hierlock's: is the directory used for something else?"
  if not scan then return found:add("other files", "unseen", err, why) end
  local strange, barred, stats = {}, {}, {}
  for name in function() return uv.fs_scandir_next(scan) end do
    local stat = uv.fs_lstat(path .. "/" .. name)
    local passing = name:find "^tmp%-%d+%-%x+$" -- of a process; the store removes them
    local lasting = name == "control"
    if stat and (stat.type ~= "file" or not (passing or lasting)) then
      strange[#strange + 1] = name
    elseif stat and lasting and not uv.fs_access(path .. "/" .. name, "rw") then
      barred[#barred + 1], stats[#stats + 1] = name, stat
    end
  end
  if barred[1] and uv.fs_access(path, "rwx") then
    found:add("files", "wrong", "this user may not write " .. listed(barred), "Each lock is written there.",
      share(path, directory, barred, stats))
  end
  if strange[1] then
    found:add("other files", "warning", listed(strange), why, "move them elsewhere, or name a directory for hierlock alone in the DSN")
  end
end

-- A directory that was made with intentions=on says so by the number of its format (csrc/stores/embedded/format.h).
local function intentions(found, path)
  local control = io.open(path .. "/control", "rb")
  local head = control and control:read(12) or ""
  if control then control:close() end
  if not head:find "^hlctl\n\r%z%z?%z?%z?\4" then return end
  found:add("intentions", "ok", "its programs know them: a shared lock on an inner node shares what is below it",
    "The directory was made with intentions=on. A quorum refuses it, and so do programs of earlier versions.")
end

--- Works like the function of hierlock.command.examine.mysql.
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
      files.made(path) or subject.unopened)
    if not may then return false end
    subject.unsettled = true
    files.system(found, parent)
    files.container(found, parent, not named)
    return true
  end
  if not stat or stat.type ~= "directory" or (link.type == "link" and not named) then
    found:add("directory", "wrong", path .. (link.type == "link" and " is a symbolic link" or " is no directory"), why,
      not named and link.type == "link" and files.by_owner(link.uid, "rm " .. quoted(path)) or subject.unopened)
    return false
  end
  found:add("directory", "ok", path, why)
  subject.unsettled = not uv.fs_stat(path .. "/control")
  rights(found, path, stat, named)
  files.mounted(found, path .. "/control")
  files.container(found, path, not named)
  files.system(found, path)
  contents(found, path, stat)
  intentions(found, path)
  return true
end

return file
