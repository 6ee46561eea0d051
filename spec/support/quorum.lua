-- Embedded stores of a quorum, three unless said, each in a directory of its own: their contents, and their
-- failures. before_each(quorum.begin), after_each(quorum.finish).

local hierlock = require "hierlock"
local stall = require "hierlock_spec.stall"
local support = require "spec.support"
local uv = require "luv"

local ROOT = support.stores[1].directory .. "/q"
local quorum, count = {}, 0

function quorum.open(dsn, options)
  local manager, err = hierlock.open(dsn, options)
  quorum.opened[#quorum.opened + 1] = manager
  return manager, err
end

function quorum.dsns()
  local list = {}
  for i, directory in ipairs(quorum.directories) do list[i] = "file:" .. directory end
  return list
end

function quorum.manager(strategy, options)
  local all = { quorum = strategy, application = "quorum" }
  for k, v in pairs(options or {}) do all[k] = v end
  return assert(quorum.open(quorum.dsns(), all))
end

-- The store itself, as those see it who know nothing of a quorum.
function quorum.single(i) return assert(quorum.open("file:" .. quorum.directories[i])) end

function quorum.records(i) return #assert(quorum.single(i):leases()) end

-- A file stands where the directory was. A request meanwhile may make the directory anew, so it is taken out until a
-- file is there.
function quorum.fail(i)
  local name = quorum.directories[i]
  local stat = uv.fs_lstat(name)
  if stat and stat.type == "link" then -- it was mended before
    os.execute((": > %s-file; mv -T %s-file %s"):format(name, name, name))
    return
  end
  os.execute(("rm -rf %s-gone; mv -T %s %s-gone"):format(name, name, name))
  repeat
    os.execute(("rm -rf %s; : > %s"):format(name, name))
    local file = io.open(name, "a")
    if file then file:close() end
  until file
end

-- In one step, by a link: between two, who heals a lease would make the directory anew, and be told that it is there.
function quorum.mend(i)
  local name = quorum.directories[i]
  os.execute(("ln -s %s-gone %s-link; mv -T %s-link %s"):format(name, name, name, name))
end

-- At once: who heals a lease there may make it anew.
function quorum.empty(i)
  os.execute(("mv -T %s %s-old; rm -rf %s-old"):format(quorum.directories[i], quorum.directories[i], quorum.directories[i]))
end

function quorum.all_gone()
  for i = 1, #quorum.directories do support.wait_until(function() return quorum.records(i) == 0 end, "the end of all records") end
end

-- This process stands still in its table, as others see it.
function quorum.slow(i)
  quorum.single(i)
  quorum.locked[i] = quorum.directories[i] .. "/control"
  stall.begin(quorum.locked[i])
end

function quorum.go_on(i)
  stall.finish(quorum.locked[i])
  quorum.locked[i] = nil
end

function quorum.fresh(n)
  count = count + 1
  quorum.directories = {}
  for i = 1, n or 3 do quorum.directories[i] = ("%s%d-%d"):format(ROOT, count, i) end
end

function quorum.done()
  for i in pairs(quorum.locked) do quorum.go_on(i) end
  for _, manager in ipairs(quorum.opened) do manager:close() end
  quorum.opened = {}
  os.execute(("rm -rf %s%d-* 2>/dev/null"):format(ROOT, count))
end

function quorum.begin()
  quorum.opened, quorum.locked = {}, {}
  quorum.fresh()
end

function quorum.finish()
  support.close_peers()
  quorum.done()
end

return quorum
