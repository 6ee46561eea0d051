-- PHP programs with Symfony Lock and ours share one Redis, at random, while programs are killed and stopped,
-- connections are cut, scripts forgotten, the server is killed and started again: no two conflicting holders. Each
-- writes down, in one file, when it held what, by a clock that all processes of the machine have:
--
--   g ID NAME MODE FROM UNTIL   granted: from the return of the call, until then for sure
--   u ID UNTIL                  refreshed
--   e ID AT                     given back: the call begins
--
-- Times are ns. A killed holder may be believed until the last UNTIL. HIERLOCK_HISTORY: for how many seconds.

local uv = require "luv"
local redis_cli = require "spec.support.redis_cli"
local support = require "spec.support"
local symfony = require "spec.support.symfony"

local SECONDS = tonumber(os.getenv "HIERLOCK_HISTORY" or 12)
local TTL = 0.15
local PHPS, OURS = 3, 3
local NAMES = { "u1", "u1/a1", "u1/a1/r1", "u1/a1/r2", "u2/a1/r1" }

local OURS_CHUNK = [[
  local path, key, seconds, ttl, names = ...
  local uv = require "luv"
  math.randomseed(uv.hrtime() % 2147483647)
  local out, granted = assert(io.open(path, "ab")), 0
  out:setvbuf "no"
  local function time(at) return ("%.0f"):format(at) end
  local function grant(handle, ids)
    granted = granted + 1
    local id = key .. "-" .. granted
    local at = uv.hrtime()
    local till = time(at + (handle:remaining() or 0) * 1e9)
    local lines = {}
    for level = 1, #ids do
      local mode = level == #ids and handle.mode == "exclusive" and "x" or "s"
      lines[level] = table.concat({ "g", id .. "." .. level, table.concat(ids, "/", 1, level), mode, time(at), till }, " ") .. "\n"
    end
    out:write(table.concat(lines))
    return id
  end
  local function more(id, ids, word, at)
    local lines = {}
    for level = 1, #ids do lines[level] = ("%s %s.%d %s\n"):format(word, id, level, time(at)) end
    out:write(table.concat(lines))
  end
  local deadline = uv.hrtime() + seconds * 1e9
  while uv.hrtime() < deadline do
    local ids = {}
    for id in names[math.random(#names)]:gmatch "[^/]+" do ids[#ids + 1] = id end
    local lasts = math.random(4) == 1 -- it is refreshed by the manager
    local options = { timeout = math.random(4) == 1 and 1 or math.random() * 0.1, ttl = not lasts and ttl or nil,
                      mode = math.random(3) == 1 and "shared" or nil }
    local handle, pending
    if math.random(5) == 1 then -- perhaps given up
      pending = manager:start(ids, options)
      if pending then
        handle = pending:wait(math.random() * 0.05)
        if not handle then pending:cancel() end
      end
    else
      handle = manager:acquire(ids, options)
    end
    if not handle then
      support.sleep(0.001)
    else
      local id, what = grant(handle, ids), math.random(20)
      if what <= 5 then
        local late = what <= 3 -- or nearly
        for _ = 1, late and 1 or 4 do
          support.sleep(late and (0.8 + math.random() * 0.5) * ttl or ttl * 0.4)
          local ok = lasts and handle:is_held()
          if not lasts then ok = handle:refresh() end
          local at = uv.hrtime()
          local left = ok and handle:remaining()
          if left then more(id, ids, "u", at + left * 1e9) end
          if late then support.sleep(0.01) end
        end
      elseif what <= 8 and not lasts then
        local text = handle:export()
        handle = text and manager:import(text)
        if handle then
          local at = uv.hrtime()
          more(id, ids, "u", at + (handle:remaining() or 0) * 1e9)
        end
      else
        support.sleep(math.random() * 0.006)
      end
      more(id, ids, "e", uv.hrtime())
      if handle then handle:release(math.random(2) == 1 and { confirm = true } or nil) end
    end
  end
  out:close()
  return granted
]]

-- Reads the file: the conflicting holders of a name at the same time, as text; the number of grants of each kind;
-- and how many of both kinds ended while another one wanted it.
local function examine(path)
  local grants, by_name, count = {}, {}, { php = 0, ours = 0 }
  for line in io.lines(path) do
    local verb, id, rest = line:match "^(%l) (%S+) (.*)$"
    assert(verb, line)
    if verb == "g" then
      local name, mode, from, till = rest:match "^(%S+) (%l) (%d+) (%d+)$"
      local grant = { id = id, kind = id:match "^%a+", mode = mode, from = tonumber(from), till = tonumber(till), line = line }
      grants[id] = grant
      by_name[name] = by_name[name] or {}
      table.insert(by_name[name], grant)
      count[grant.kind] = count[grant.kind] + 1
    elseif verb == "u" then
      grants[id].till = math.max(grants[id].till, tonumber(rest))
    else
      grants[id].ended = tonumber(rest)
    end
  end
  local together = {}
  for _, list in pairs(by_name) do
    table.sort(list, function(a, b) return a.from < b.from end)
    local live = {}
    for _, grant in ipairs(list) do
      local rest = {}
      local till = math.min(grant.till, grant.ended or grant.till)
      for _, other in ipairs(live) do
        if other.till > grant.from then
          rest[#rest + 1] = other
          if till > grant.from and (other.mode == "x" or grant.mode == "x") and (other.kind == "ours" or grant.kind == "ours") then
            together[#together + 1] = ("%s | %s, until %.0f: %.3f ms"):format(grant.line, other.line, other.till,
              (math.min(till, other.till) - grant.from) / 1e6)
          end
        end
      end
      grant.till = till
      rest[#rest + 1] = grant
      live = rest
    end
  end
  return together, count
end

-- A server of its own, as a server that was restarted and emptied grants nothing for a while to other specs.
local function new_server()
  local directory, self = assert(os.getenv "HIERLOCK_SPEC_DIRECTORY") .. "/symfony-history", {}
  local function servers(words, options)
    -- A sanitizer is preloaded for us, and not for the server.
    local ok = os.execute(("unset LD_PRELOAD; HIERLOCK_SERVER_OPTIONS='%s' spec/support/servers.sh %s >/dev/null 2>&1"):format(
      options or "", words:format(directory)))
    assert(ok == true or ok == 0, words)
  end
  servers "start '%s' redis"
  local file = assert(io.open(directory .. "/env"))
  local host, port = file:read "*a":match "HIERLOCK_REDIS_ROOT_DSN=[^@]*@([^:]*):(%d+)"
  file:close()
  self.dsn = ("redis://:rootpassword@%s:%s/0"):format(host, port)
  function self.command(verb, options) servers("control '%s' redis " .. verb, options) end
  function self.cli(words)
    local list = {}
    for word in words:gmatch "%S+" do list[#list + 1] = word end
    redis_cli(host, port, "rootpassword", list)
  end
  function self.stop() servers "stop '%s' redis" end
  return self
end

describe("a history of ours and Symfony's on Redis", function()
  local missing = symfony.missing()
  if missing then
    if (" " .. (os.getenv "HIERLOCK_REQUIRE" or "") .. " "):find(" php ", 1, true) then
      it("has PHP", function() error(missing) end)
    else
      pending(missing)
    end
    return
  end

  it("is examined by what finds two that are together", function()
    local path = os.tmpname()
    local function found(...)
      local file = assert(io.open(path, "w"))
      file:write(table.concat({ ... }, "\n"), "\n")
      file:close()
      return #examine(path)
    end
    local theirs = "g php-1 u1 x 100 200"
    assert.equal(1, found(theirs, "g ours-1 u1 s 150 300"))
    assert.equal(1, found("g ours-1 u1 s 50 300", theirs))
    assert.equal(1, found(theirs, "u php-1 250", "g ours-1 u1 x 210 300"))
    assert.equal(0, found(theirs, "e php-1 140", "g ours-1 u1 x 150 300"))
    assert.equal(0, found(theirs, "g ours-1 u1 x 200 300"))
    assert.equal(0, found(theirs, "g ours-1 u2 x 150 300"))
    assert.equal(0, found("g php-1 u1 s 100 200", "g ours-1 u1 s 150 300"))
    assert.equal(2, found("g ours-1 u1 s 0 900", "g ours-2 u1 s 1 2", "g php-1 u1 x 500 600", "g ours-3 u1 x 550 560", "e php-1 520"))
    os.remove(path)
  end)

  support.on_redis(function()
    it("has nobody in it together, whoever is killed or stopped, and whatever the server goes through", function()
      local path = os.tmpname()
      local store = new_server()
      local slots, spawned, answers = {}, 0, 0
      local stopped = {}

      local function begin(slot, seconds)
        spawned = spawned + 1
        if slot <= PHPS then
          local php = symfony.process(store.dsn)
          slots[slot] = php:ask("history", path, "php" .. spawned, seconds, TTL, (table.unpack or unpack)(NAMES)) -- luacheck: ignore
        else
          local ours = support.process(nil, { interoperate = "symfony", hold_timeout = 1 }, store.dsn)
          slots[slot] = ours:start(OURS_CHUNK, path, "ours" .. spawned, seconds, TTL, NAMES)
        end
      end

      local function refill(seconds)
        for slot = 1, PHPS + OURS do
          local one = slots[slot]
          if one and one.exited then
            one:close()
            slots[slot] = nil
          end
          if not slots[slot] then pcall(begin, slot, seconds) end
        end
      end

      local function go_on(all)
        for i = #stopped, 1, -1 do
          if all or math.random(3) == 1 then
            if not stopped[i].exited then stopped[i]:signal "sigcont" end
            table.remove(stopped, i)
          end
        end
      end

      finally(function()
        go_on(true)
        support.close_peers()
        store.stop()
        os.remove(path)
      end)
      store.command("restart", "--appendonly yes --appendfsync always")

      local start = support.now()
      local deadline, restarts = start + SECONDS, 0
      local function left() return math.max(deadline - support.now(), 0.1) end
      refill(left())
      while support.now() < deadline do
        support.sleep(0.05)
        uv.run "nowait"
        go_on(false)
        local victim = slots[math.random(PHPS + OURS)]
        local what = math.random(60)
        if support.now() - start > SECONDS * (restarts + 1) / (SECONDS / 8 + 1) then
          restarts = restarts + 1
          store.command(({ "kill", "stop" })[restarts % 2 + 1])
          go_on(true)
          store.command("start", "--appendonly yes --appendfsync always")
        elseif what <= 2 and victim and not victim.exited then
          victim:signal "sigkill"
        elseif what <= 5 and victim and not victim.exited then
          victim:signal "sigstop"
          stopped[#stopped + 1] = victim
        elseif what == 6 then
          store.cli "SCRIPT FLUSH"
        elseif what == 7 and math.random(3) == 1 then
          store.cli("CLIENT KILL TYPE " .. (math.random(2) == 1 and "normal" or "pubsub"))
        elseif what == 8 then
          store.cli "CLIENT PAUSE 500"
        end
        refill(left())
      end
      go_on(true)
      for slot = 1, PHPS + OURS do
        local one = slots[slot]
        if one and (one.exited or one:read(support.DEADLINE)) then answers = answers + 1 end
      end
      local together, count = examine(path)
      if os.getenv "HIERLOCK_HISTORY" then
        print(("%d s, %d programs, %d restarts: %d grants of names to ours, %d to PHP's, %d together"):format(
          SECONDS, spawned, restarts, count.ours, count.php, #together))
      end
      assert.equal("", table.concat(together, "\n", 1, math.min(#together, 5)))
      assert.equal(PHPS + OURS, answers)
      assert.is_true(count.ours > 20 and count.php > 20, count.ours .. " and " .. count.php)
    end)
  end)
end)
