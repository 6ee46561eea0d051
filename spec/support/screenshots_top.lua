--- The picture of docs/monitoring.md: `make screenshots`. Programs of a small shop lock on the embedded store, each a process
-- on a host with a name of its own, and wait for each other; `hierlock top` runs in tmux, and what its terminal then shows
-- is drawn by a browser.

local chromium = require "spec.support.chromium"
local support = require "spec.support"
local uv = require "luv"

local COLUMNS, ROWS = 138, 32
local DIRECTORY = assert(os.getenv "HIERLOCK_SPEC_DIRECTORY") .. "/shop"
local DSN = "file:" .. DIRECTORY
local SOCKET = ("hierlock-picture-%d"):format(uv.os_getpid())
local PICTURE = "docs/top.webp"

-- Each process: its host, application, locks, and then its waits. Processes that wait for each other come in this
-- order.
local PROGRAMS = {
  { host = "web1", application = "shop", holds = { { "anna", "orders", "1041", label = "pay" }, { "bert", "orders", "977", label = "pay" } } },
  { host = "night", application = "billing", holds = { { "anna", "invoices", label = "monthly run" }, { "dora", label = "close account" } } },
  { host = "desk", application = "office", holds = { { "carl", "address", owner = "emma", ttl = 900, label = "edit" },
    { "bert", "address", owner = "fred", ttl = 420, label = "edit" } } },
  { host = "web2", application = "shop", holds = { { "carl", "orders", "1102", label = "pay" } },
    waits = { { "anna", "invoices", "2024-05", label = "show" }, { "dora", "orders", "3", label = "pay" } } },
  { host = "web3", application = "shop", holds = { { "gina", "orders", "81", label = "pay" } },
    waits = { { "anna", "orders", "1041", label = "cancel" }, { "carl", "address", label = "edit" } } },
  { host = "night", application = "export", waits = { { "anna", label = "year" } } },
  { host = "night", application = "cleaner", waits = { { "anna", "orders", label = "old carts" } }, holds = { { "hugo", "carts", label = "old carts" } } },
  { host = "web1", application = "shop", waits = { { "anna", "orders", "1050", label = "pay" } } },
}

local PROGRAM = [[
  local hierlock = require "hierlock"
  local program = ...
  local manager = assert(hierlock.open(program.dsn, { application = program.application, timeout = math.huge }))
  local kept = {}
  local function target(ids) return { (table.unpack or unpack)(ids) } end
  local function options(ids)
    return { label = ids.label, owner = ids.owner, ttl = ids.ttl }
  end
  for _, ids in ipairs(program.holds or {}) do kept[#kept + 1] = assert(manager:acquire(target(ids), options(ids))) end
  for _, ids in ipairs(program.waits or {}) do kept[#kept + 1] = assert(manager:start(target(ids), options(ids))) end
  io.stdout:write "ready\n"
  io.stdout:flush()
  io.stdin:read "*a"
  os.exit(0)
]]

-- A table as Lua.
local function literal(value)
  if type(value) ~= "table" then return type(value) == "string" and ("%q"):format(value) or tostring(value) end
  local parts = {}
  for key, each in pairs(value) do parts[#parts + 1] = ("[%s]=%s"):format(literal(key), literal(each)) end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function quoted(word) return "'" .. word:gsub("'", [['\'']]) .. "'" end

local interpreter = os.getenv "HIERLOCK_LUA" or "lua"

local function start(program)
  program.dsn = DSN
  local self = { input = uv.new_pipe(false), output = uv.new_pipe(false) }
  local script = ("hostname %s && exec %s -e %s"):format(program.host, interpreter,
    quoted(("(loadstring or load)(%s)(%s)"):format(literal(PROGRAM), literal(program))))
  local arguments = { "--uts", "sh", "-c", script }
  if uv.getuid() ~= 0 then table.insert(arguments, 1, "--map-root-user") end
  self.process = assert(uv.spawn("unshare", { args = arguments, stdio = { self.input, self.output, 2 } }, function() self.ended = true end))
  local said = ""
  self.output:read_start(function(_, data) said = said .. (data or "") end)
  support.wait_until(function()
    uv.run "nowait"
    return said:find "ready" or self.ended
  end, program.application)
  assert(not self.ended, program.application .. " has ended")
  return self
end

local function tmux(...)
  local words = { "tmux", "-L", SOCKET, "-f", "/dev/null" }
  for i = 1, select("#", ...) do words[#words + 1] = quoted((select(i, ...))) end
  local pipe = io.popen(table.concat(words, " "))
  local said = pipe:read "*a"
  pipe:close()
  return said
end

local HTML = [[<!DOCTYPE html><meta charset="utf-8"><style>
body { margin: 0; background: #1c1f24; }
pre { margin: 0; padding: 12px 14px; color: #d6d9de; font: 13px/1.35 "DejaVu Sans Mono", monospace; }
i { font-style: normal; background: #d6d9de; color: #1c1f24; }
b { color: #fff; }
</style><pre>%s</pre>]]

-- Turns tmux' screen, with its sequences for looks, into HTML.
local function html_of(shown)
  local bold, reverse = false, false
  local body = shown:gsub("%s+$", ""):gsub("[&<]", { ["&"] = "&amp;", ["<"] = "&lt;" }):gsub("\27%[([%d;]*)m", function(looks)
    local tags = (reverse and "</i>" or "") .. (bold and "</b>" or "")
    for look in (looks == "" and "0" or looks):gmatch "%d+" do
      if look == "0" then bold, reverse = false, false end
      if look == "1" then bold = true end
      if look == "7" then reverse = true end
    end
    return tags .. (bold and "<b>" or "") .. (reverse and "<i>" or "")
  end)
  return HTML:gsub("%%s", function() return body end)
end

local programs, browser = {}, nil
local ok, err = pcall(function()
  assert(uv.fs_mkdir(DIRECTORY, 448))
  for i, program in ipairs(PROGRAMS) do
    programs[i] = start(program)
    support.sleep(0.4) -- so that they have not all begun at once
  end
  -- The path of the directory must not show: the command runs in it.
  tmux("new-session", "-d", "-x", tostring(COLUMNS), "-y", tostring(ROWS),
    ("cd %s && exec env TERM=screen LC_ALL=C.UTF-8 HIERLOCK_DSN=file:shop LUA_PATH=%s LUA_CPATH=%s %s %s/lua/hierlock/command/main.lua top"):format(
      quoted(DIRECTORY .. "/.."), quoted(os.getenv "LUA_PATH"), quoted(os.getenv "LUA_CPATH"), interpreter, uv.cwd()))
  support.wait_until(function() return tmux("capture-pane", "-p"):find "seen per second" end, "top")
  local shown = tmux("capture-pane", "-e", "-p", "-N")
  browser = chromium.start(DIRECTORY .. "-profile")
  local page = browser:page(1140)
  page:run("document.open(); document.write(" .. require("dkjson").encode((html_of(shown))) .. "); document.close()")
  page:wait_for "WAITS FOR"
  local pipe = assert(io.popen("base64 --decode >" .. PICTURE, "w"))
  pipe:write(page:picture("webp", 40))
  pipe:close()
  print(PICTURE)
end)
tmux "kill-server"
if browser then browser:stop() end
for _, program in ipairs(programs) do
  program.process:kill "sigkill"
  for _, handle in ipairs { program.process, program.input, program.output } do handle:close() end
end
uv.run "nowait"
if not ok then error(err, 0) end
