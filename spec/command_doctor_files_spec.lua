--- `hierlock doctor` on the stores that are files, as an operator runs it: see command_doctor_spec.lua.
-- Parts: sqlite

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"
local doctor = require "spec.support.doctor"
local program = require "spec.support.command"

local run, assert_status = program.run, program.assert_status
local at_end, findings_of, examine, status_of, assert_finding, shell, follow, examined_by =
  doctor.at_end, doctor.findings_of, doctor.examine, doctor.status_of, doctor.assert_finding, doctor.shell, doctor.follow, doctor.examined_by

after_each(doctor.clean_up)

describe("a directory", function()
  local obeying, all_obeyed = doctor.obedience("file files trial", {
    ["hierlock provision"] = true, -- command_doctor_spec.lua
    ["hierlock leases"] = true, -- shows
  })
  teardown(all_obeyed)
  local directory, dsn

  before_each(function()
    directory = os.tmpname()
    os.remove(directory)
    dsn = "file:" .. directory
    assert_status(0, run(dsn, "doctor", "--levels", "user,account,resource"))
    at_end(function() shell("rm -rf " .. directory) end)
  end)

  local function assert_mended(check, status, at)
    local found = examine(at or dsn)
    assert_finding(status, found, check)
    assert.is_true(follow(at or dsn, found[check], error) > 0)
    found = examine(at or dsn)
    assert.is_true(status_of(found, check) == "ok" or not found[check], json.encode(found[check]))
  end

  it("in which everybody may write is named, and closed by the line", obeying({ "chmod o-w" }, function()
    shell("chmod 0777 " .. directory)
    assert_mended("rights", "warning")
  end))

  it("that no program has used yet is settled by the line", obeying({ "hierlock doctor --levels user,account,resource" }, function()
    assert_mended("opens", "unseen", dsn .. "/unused")
  end))

  it("in the place of this user's own that others may write is closed by the line", obeying({ "chmod 0700" }, function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    local own = "/dev/shm/hierlock-54321"
    at_end(function() shell("rm -rf " .. own) end)
    shell(("mkdir -m 0777 %s; chown 54321 %s"):format(own, own))
    local found = examined_by(54321, "file:")
    assert_finding("wrong", found, "rights")
    assert.equal(1, follow(dsn, found.rights, error))
    assert_finding("ok", examined_by(54321, "file:"), "rights")
  end))

  it("that its owner has closed to himself is opened by the line", obeying({ "chmod u+rwx" }, function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell(("chown 65534 %s; chmod 0500 %s"):format(directory, directory))
    local found = examined_by(65534, dsn)
    assert_finding("wrong", found, "rights")
    assert.equal(1, follow(dsn, found.rights, error))
    assert_finding("ok", examined_by(65534, dsn), "rights")
  end))

  it("is told to be changed only where it is hierlock's", function()
    shell(": >" .. directory .. "/x; mkdir -m 0777 " .. directory .. "/y; : >" .. directory .. "/y/z")
    for place, check in pairs { ["/x"] = "directory", ["/y"] = "rights" } do
      local found = examine(dsn .. place)
      assert.not_equal("ok", status_of(found, check))
      for _, line in ipairs(found[check].mend) do assert.matches("^name a", line) end
    end
  end)

  it("of another user is named to root", function()
    if uv.getuid() ~= 0 then return end
    shell("chown 65534 " .. directory)
    local found = examine(dsn)
    assert_finding("warning", found, "rights")
    assert.matches("belongs to user 65534", found.rights.found, 1, true)
  end)

  it("that is none, or in which one cannot be made, is named", obeying({ "install -d -m 0700 -o %d %s" }, function()
    shell(": >" .. directory .. "/x")
    for _, place in ipairs { "/x", "/x/y", "/x/y/z" } do
      local found = examine(dsn .. place)
      assert_finding("wrong", found, "directory")
      assert.matches("^name another directory", found.directory.mend[1])
    end
    shell("rm " .. directory .. "/x; mkdir " .. directory .. "/y")
    assert_finding("ok", examine(dsn .. "/y/z"), "directory")
    assert.is_nil(uv.fs_stat(directory .. "/y/z"))
    assert_mended("directory", "wrong", dsn .. "/a/b c")
  end))

  it("whose programs know intentions says so", function()
    assert.is_nil(examine(dsn).intentions)
    assert_status(0, run(dsn .. "/i?intentions=on", "doctor", "--levels", "user,account,resource"))
    for _, parameter in ipairs { "", "?intentions=on" } do
      assert_finding("ok", examine(dsn .. "/i" .. parameter), "intentions")
    end
    assert_finding("wrong", examine(dsn .. "?intentions=on"), "opens")
  end)

  it("that only root can make is made for the user by the line", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell("chmod 0755 " .. directory)
    for _, place in ipairs { "/c", "/d/e" } do
      local found = examined_by(65534, dsn .. place)
      assert_finding("wrong", found, "directory")
      assert.equal("as root:", found.directory.mend[1])
      assert.equal(1, follow(dsn, found.directory, error))
      found = examined_by(65534, dsn .. place, "--levels user,account")
      assert_finding("ok", found, "directory")
      assert_finding("ok", found, "a lock")
    end
    -- The other user cannot enter that directory, whoever owns it.
    shell("chmod 0700 " .. directory)
    assert.matches("^name another directory", examined_by(65534, dsn .. "/f").directory.mend[1])
  end)

  it("of any name has lines that a shell reads as that name, wherever they are shown", function()
    for _, name in ipairs { "-h4 a", "it's", "a\nb", "str\195\164nge %s\\", "\27[31m$(false)`" } do
      local place = name:find "^%-" and name or directory .. "/" .. name
      local at = "file:" .. place:gsub("%%", "%%25")
      at_end(function() shell("rm -rf ./-h4*") end)
      -- An unused store, named by an argument.
      local opens = findings_of(run(nil, "doctor", "--json", at)).opens
      assert.equal("unseen", opens.status)
      shell(("hierlock() { %s lua/hierlock/command/main.lua \"$@\"; }; %s"):format(program.interpreter, opens.mend[1]))
      assert_finding("ok", examine(at), "a lock")
      assert(uv.fs_chmod(place, tonumber("777", 8)))
      assert_mended("rights", "warning", at)
      assert(uv.fs_chmod(place, tonumber("777", 8)))
      local said = assert_status(0, run(at, "doctor"))
      shell(assert(said.out:match "mend: (chmod [^\n]*)\n", said.out))
      assert.equal(tonumber("775", 8), assert(uv.fs_stat(place)).mode % 512)
    end
  end)

  it("with what others have put into it is named, and nobody is told to delete that", function()
    shell(("mkdir \"%s/it's\""):format(directory))
    local found = examine(dsn)
    assert_finding("warning", found, "other files")
    assert.equal(0, follow(dsn, found["other files"], error))
    shell(("rmdir \"%s/it's\""):format(directory))
    assert_finding("absent", examine(dsn), "other files")
  end)

  -- A process of another container is not seen, but may live.
  it("is freed of what killed programs left by the store itself, and of no lock of a living one", function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    local handle = assert(manager:acquire { "u1" })
    shell(("touch -d '1 hour ago' %s/tmp-999999999-0123456789abcdef"):format(directory))
    local pipe = io.popen(("unset LD_PRELOAD; HIERLOCK_DSN=%s unshare -pf%s %s lua/hierlock/command/main.lua doctor --json"):format(dsn,
      uv.getuid() == 0 and "" or "r", program.interpreter))
    local said = pipe:read "*a"
    pipe:close()
    assert_finding("ok", findings_of { out = said, err = "", status = 0 }, "a lock")
    assert.is_nil(uv.fs_stat(directory .. "/tmp-999999999-0123456789abcdef"))
    assert.equal(1, #assert(manager:holders { "u1" }))
    assert(handle:release())
  end)

  it("that a user may not use is named to him", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell("chmod 0711 " .. directory)
    local found = examined_by(65534, dsn)
    assert_finding("wrong", found, "rights")
    assert_finding("wrong", found, "opens")
    -- Closed to others it would be closed to him.
    shell("chmod 0777 " .. directory)
    found = examined_by(65534, dsn)
    assert_finding("warning", found, "rights")
    assert.matches("^have user 0 give it to a group", found.rights.mend[1])
  end)

  -- The directory's owner may have programs that lock in it.
  it("of another user, in the place of this user's own, is not said to be removed", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    shell "mkdir -m 0700 /dev/shm/hierlock-54321"
    at_end(function() shell "rmdir /dev/shm/hierlock-54321" end)
    local found = examined_by(54321, "file:")
    assert.equal("it belongs to user 0", found.rights.found)
    assert.matches("^name a directory for hierlock alone", found.rights.mend[1])
  end)

  it("with files that a user may not write is mended by the lines, as the store makes its files", obeying({ "chown -h %d:%d %s", "chmod %s %s" }, function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    for _, case in ipairs { { "0755", "0600" }, { "0775", "0660" } } do
      local group = case[1] == "0775"
      shell(("chmod %s %s; chown %s %s"):format(case[1], directory, group and "12345:65534" or "65534:65534", directory))
      shell(("chown 0:0 %s/*; chmod 0600 %s/*"):format(directory, directory))
      local found = examined_by(65534, dsn)
      assert_finding("wrong", found, "files")
      assert.equal("as root:", found.files.mend[1])
      assert.equal(2, follow(dsn, found.files, error))
      found = examined_by(65534, dsn)
      assert_finding("absent", found, "files")
      assert_finding("ok", found, "a lock")
      assert.equal(tonumber(case[2], 8), assert(uv.fs_stat(directory .. "/control")).mode % 512)
    end
  end))

  it("in the place of this user's own that is a link is not told to be removed by another", obeying({ "rm " }, function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    local own = "/dev/shm/hierlock-54321"
    at_end(function() shell("rm -rf " .. own) end)
    for _, owner in ipairs { 54321, 0 } do
      shell(("ln -s %s %s; chown -h %d %s"):format(directory, own, owner, own))
      local found = examined_by(54321, "file:")
      assert_finding("wrong", found, "directory")
      assert.equal(owner == 0 and "as root:" or "rm " .. own, found.directory.mend[1])
      assert.equal(1, follow(dsn, found.directory, error))
      assert_finding("ok", examined_by(54321, "file:"), "directory")
    end
    shell(": >" .. own)
    assert.matches("^name another", examined_by(54321, "file:").directory.mend[1])
  end))

  it("on a full file system is named, and the line shows what there is", function()
    local words = ("HIERLOCK_DSN=%s %s lua/hierlock/command/main.lua doctor --json --levels a,b"):format(dsn, program.interpreter)
    local function among(size, line)
      local pipe = io.popen(("unset LD_PRELOAD; exec unshare -m%s sh -c 'mount -t tmpfs -o size=%s tmpfs %s && %s'"):format(
        uv.getuid() == 0 and "" or "r", size, directory, line or words))
      local said = pipe:read "*a"
      pipe:close()
      return said
    end
    local said = among "1m"
    local found = findings_of { out = said, err = "", status = 1 }
    assert_finding("wrong", found, "space")
    assert.matches("1.0M.*tmpfs", among("1m", found.space.mend[2]))
    assert_finding("ok", findings_of { out = among "8m", err = "", status = 0 }, "space")
  end)

  it("on a network file system would be named", function()
    local core = require "hierlock.core"
    assert.equal("NFS", core.remote_kind(0x6969))
    assert.equal("SMB", core.remote_kind(0xFE534D42))
    assert.is_nil(core.remote_kind(0x01021994))
  end)

  it("of a quorum is looked at like each of its stores", function()
    local several = ("quorum:majority;file:%s/1;file:%s/2;file:%s/3"):format(directory, directory, directory)
    assert_finding("unseen", examine(several), "opens")
    local found = examine(several, "--levels", "a,b")
    assert_finding("ok", found, "a lock")
    shell("chmod 0777 " .. directory .. "/2")
    found = examine(several)
    assert_finding("warning", found, "2: rights")
    assert_finding("ok", found, "3: rights")
    local four = several .. (";file:%s/4"):format(directory)
    assert_finding("warning", examine(four), "number of stores")
  end)

  it("of a quorum that names one store twice is wrong", function()
    local several = ("quorum:majority;file:%s/1;file:%s/2;file:%s/./1"):format(directory, directory, directory)
    assert_finding("ok", examine(("quorum:majority;file:%s/1;file:%s/2;file:%s/3"):format(directory, directory, directory), "--levels", "a,b"), "a lock")
    local found = examine(several)
    assert_finding("wrong", found, "opens")
    assert.matches("are one store", found.opens.found)
    assert.matches("each once", found.opens.mend[1])
  end)
end)

support.on_sqlite(function(store)
  local obeying, all_obeyed = doctor.obedience("sqlite", {})
  teardown(all_obeyed)
  local file, dsn

  before_each(function()
    file = store.directory .. "/doctor.db"
    dsn = "sqlite:" .. file
    at_end(function() shell("rm -f " .. file .. "*") end)
    assert_finding("unseen", examine(dsn), "opens")
    assert.is_nil(uv.fs_stat(file))
    assert_finding("ok", examine(dsn, "--levels", "user,account,resource"), "a lock")
  end)

  it("names a file that everybody may read, or its log, and the line closes them", obeying({ "chmod o= " }, function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true }
    for _, which in ipairs { "", "-wal", "*" } do
      shell(("chmod 0644 %s%s"):format(file, which))
      local found = examine(dsn)
      assert_finding("warning", found, "rights")
      assert.equal(1, follow(dsn, found.rights, error))
      assert_finding("ok", examine(dsn), "rights")
      shell(("test -z \"$(find %s* -perm /007)\""):format(file))
    end
  end))

  it("says who can close a file of another user's", function()
    if uv.getuid() ~= 0 then return pending "needs root, to be another user" end
    local directory = os.tmpname()
    at_end(function() shell("rm -rf " .. directory) end)
    shell(("rm %s; mkdir -m 0777 %s"):format(directory, directory))
    local at = "sqlite:" .. directory .. "/a/b.db"
    shell(("chmod 0755 %s"):format(directory))
    local found = examined_by(65534, at)
    assert_finding("wrong", found, "file")
    assert.equal("as root:", found.file.mend[1])
    assert.equal(1, follow(dsn, found.file, error))
    assert_finding("ok", examined_by(65534, at, "--levels a,b"), "a lock")
    shell(("chown 12345 %s/a/b.db; chmod 0666 %s/a/b.db"):format(directory, directory))
    found = examined_by(65534, at)
    assert_finding("warning", found, "rights")
    assert.equal("as root, or user 12345:", found.rights.mend[1])
  end)

  it("names a long log, and the line shortens it", obeying({ "sqlite3 %s 'PRAGMA wal_checkpoint(TRUNCATE)'" }, function()
    local manager = assert(require("hierlock").open(dsn))
    at_end(function() manager:close() end)
    assert(manager:acquire { "u1" }):release { confirm = true }
    shell(("truncate -s 70M %s-wal"):format(file))
    local found = examine(dsn)
    assert_finding("warning", found, "log")
    shell(("truncate -s 70M %s-wal"):format(file)) -- a program that has locked meanwhile may have shortened it
    assert.equal(1, follow(dsn, found.log, error))
    assert_finding("ok", examine(dsn), "log")
  end))

  it("has nobody change the rights of a file that is not hierlock's", function()
    shell(": >" .. file .. "0; chmod 0644 " .. file .. "0")
    local found = examine(dsn .. "0")
    assert_finding("warning", found, "rights")
    assert.matches("^name a file", found.rights.mend[1])
  end)

  it("names a file with two names, one of another program, none at all, and a DSN that lets changes be forgotten", function()
    shell(("ln %s %s2; ln -s %s %s3"):format(file, file, file, file))
    for _, name in ipairs { file, file .. "3" } do
      local found = examine("sqlite:" .. name)
      assert_finding("wrong", found, "names")
      local pipe = io.popen(found.names.mend[2])
      local shown = {}
      for line in pipe:lines() do shown[line] = true end
      pipe:close()
      assert.same({ [file] = true, [file .. "2"] = true }, shown)
    end
    shell(("rm %s2"):format(file))
    assert_finding("ok", examine(dsn), "names")
    shell(("mkdir %s2"):format(file))
    at_end(function() shell("rm -rf " .. file .. "2") end)
    assert_finding("wrong", examine("sqlite:" .. file .. "2"), "file")
    assert_finding("wrong", examine("sqlite:" .. file .. "2/a/b"), "file")
    assert_finding("warning", examine(dsn .. "?synchronous=normal"), "durability")
    shell(("echo 'this is none, and long enough to be taken for one, were it not for its first bytes' >%s2/x"):format(file))
    assert_finding("wrong", examine("sqlite:" .. file .. "2/x"), "opens")
  end)

  it("names a file that was mounted by its own name", function()
    local pipe = io.popen(([[unshare -m%s sh -c 'mount --bind "$0" "$0"; HIERLOCK_DSN="$1" exec %s lua/hierlock/command/main.lua doctor --json' %s %s]])
      :format(uv.getuid() == 0 and "" or "r", program.interpreter, file, dsn))
    local found = assert(json.decode(pipe:read "*a"))
    pipe:close()
    for _, finding in ipairs(found.findings) do found[finding.check] = finding end
    assert_finding("wrong", found, "mount")
    assert_finding("wrong", found, "opens")
  end)
end)
