--- A headless Chromium, driven by its DevTools protocol through a pipe: no port, no WebSocket, no package but Debian's
-- `chromium`. Each page is of a profile of its own, as of another person's browser.

local uv = require "luv"
local json = require "dkjson"
local support = require "spec.support"

local chromium = {}

--- Where it is, or nil.
function chromium.find()
  for _, name in ipairs { os.getenv "HIERLOCK_CHROMIUM" or "/usr/bin/chromium", "/usr/bin/chromium-browser" } do
    local file = io.open(name, "rb")
    if file then
      file:close()
      return name
    end
  end
end

--- Why Chromium is missing, or nil.
function chromium.missing() return not chromium.find() and "Chromium cannot be had here (Debian: chromium)" or nil end

local browser_class, page_class = {}, {}
browser_class.__index, page_class.__index = browser_class, page_class

-- ---------------------------------------------------------------- browser

--- Starts one. directory: of the caller's, who removes it, for all that it writes.
function chromium.start(directory)
  local self = setmetatable({ answers = {}, last = 0, output = "" }, browser_class)
  local stderr, rest = uv.new_pipe(false), ""
  assert(uv.fs_mkdir(directory, 448))
  self.stdin, self.stdout = uv.new_pipe(false), uv.new_pipe(false)
  self.pipes = { stderr, self.stdin, self.stdout }
  self.process, self.pid = assert(uv.spawn(chromium.find(), {
    args = { "--headless", "--remote-debugging-pipe", "--user-data-dir=" .. directory, "--hide-scrollbars",
             "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             uv.getuid() == 0 and "--no-sandbox" or nil },
    env = { "PATH=/usr/bin:/bin", "HOME=" .. directory, "TMPDIR=" .. directory },
    stdio = { nil, nil, stderr, self.stdin, self.stdout },
    detached = true, -- a group of its own, to be ended as a whole
  }, function() self.exit = true end))
  stderr:read_start(function(_, data) self.output = self.output .. (data or "") end)
  self.stdout:read_start(function(_, data)
    rest = rest .. (data or "")
    -- No pattern: of a picture it would look at each rest, to its end.
    local from, ends = 1, rest:find("\0", 1, true)
    while ends do
      local answer = assert(json.decode(rest:sub(from, ends - 1)))
      if answer.id then self.answers[answer.id] = answer end
      from = ends + 1
      ends = rest:find("\0", from, true)
    end
    rest = rest:sub(from)
  end)
  return self
end

--- Calls a method of the protocol, and returns its result. session: of a page.
function browser_class:call(method, params, session)
  self.last = self.last + 1
  local id = self.last
  local message = { id = id, method = method, sessionId = session, params = params }
  self.stdin:write(json.encode(message) .. "\0")
  local answer = support.wait_until(function()
    uv.run "nowait"
    if self.exit then error("Chromium has ended: " .. self.output, 0) end
    return self.answers[id]
  end, "Chromium's answer to " .. method)
  self.answers[id] = nil
  if answer.error then error(method .. ": " .. tostring(answer.error.message), 2) end
  return answer.result
end

function browser_class:stop()
  if not self.exit then uv.kill(-self.pid, "sigkill") end
  support.wait_until(function()
    uv.run "nowait"
    return self.exit
  end, "Chromium to end")
  for _, pipe in ipairs(self.pipes) do pipe:close() end
  self.process:close()
  uv.run "nowait"
end

-- ------------------------------------------------------------------- page

--- A page in a new profile. width, height: of the window, in CSS pixels.
function browser_class:page(width, height)
  local context = self:call("Target.createBrowserContext").browserContextId
  local target = self:call("Target.createTarget", { url = "about:blank", browserContextId = context }).targetId
  local session = self:call("Target.attachToTarget", { targetId = target, flatten = true }).sessionId
  local page = setmetatable({ browser = self, session = session, width = width or 900 }, page_class)
  page:call("Page.enable")
  page:size(height or 600)
  return page
end

function page_class:call(method, params) return self.browser:call(method, params, self.session) end

function page_class:size(height)
  self:call("Emulation.setDeviceMetricsOverride",
            { width = self.width, height = height, deviceScaleFactor = 1.5, mobile = false })
end

--- The value of an expression of JavaScript; of a promise, its result.
function page_class:run(expression)
  local result = self:call("Runtime.evaluate", { expression = expression, returnByValue = true, awaitPromise = true })
  if result.exceptionDetails then
    error(expression .. ": " .. (result.exceptionDetails.exception.description or result.exceptionDetails.text), 2)
  end
  return result.result.value
end

--- Waits until the text that is shown contains this.
function page_class:wait_for(text)
  local shown
  local ok = pcall(support.wait_until, function()
    -- Between two pages there is no document.
    local there, value = pcall(self.run, self, "document.readyState === 'complete' && document.body.innerText")
    shown = there and value or shown
    return there and value and value:find(text, 1, true)
  end)
  if not ok then error(("the page does not say %q, but:\n%s"):format(text, tostring(shown)), 2) end
end

function page_class:go(url) self:call("Page.navigate", { url = url }) end

--- Puts the cursor into what a selector finds, at its end, and types, as a person does.
function page_class:type(selector, text)
  assert(self:run(("(e => { if (e) { e.focus(); e.selectionStart = e.value.length } return !!e })(document.querySelector(%s))")
    :format(json.encode(selector))), selector)
  self:call("Input.insertText", { text = text })
end

--- Clicks with the mouse where what a selector finds is; n: the n-th of them.
function page_class:click(selector, n)
  local at = self:run(("(e => { if (!e) return; e.scrollIntoView({ block: 'center' }); const r = e.getBoundingClientRect();" ..
    "return { x: r.x + r.width / 2, y: r.y + r.height / 2 } })(document.querySelectorAll(%s)[%d])"):format(
    json.encode(selector), (n or 1) - 1))
  assert(at, selector)
  for _, kind in ipairs { "mousePressed", "mouseReleased" } do
    self:call("Input.dispatchMouseEvent", { type = kind, x = at.x, y = at.y, button = "left", clickCount = 1 })
  end
end

--- A picture of all of the page, as high as it is, in base64.
function page_class:picture(format, quality)
  self:size(100)
  self:size(self:run "document.documentElement.scrollHeight")
  return self:call("Page.captureScreenshot", { format = format, quality = quality }).data
end

return chromium
