-- PHP programs with Symfony Lock, for specs: see symfony.php.

local support = require "spec.support"

local symfony = {}

local function encode(word)
  return (tostring(word):gsub("[^%w_.~-]", function(c) return ("%%%02X"):format(c:byte()) end))
end

-- The autoloader of Debian's php-symfony-lock; or of another version.
local AUTOLOAD = os.getenv("HIERLOCK_SYMFONY") or "/usr/share/php/Symfony/Component/Lock/autoload.php"

--- Why there is no PHP here; nil where there is.
function symfony.missing()
  local file = io.open(AUTOLOAD)
  if not file then return "there is no Symfony Lock here: spec/support/deps.sh test" end
  file:close()
end

--- A process that uses Symfony Lock on the store of the DSN, which is Symfony's. ask(verb, ...) does not
-- wait; result() does; call(...) is both.
function symfony.process(dsn)
  local self = support.process(nil, nil, nil, { "env", "-u", "LD_PRELOAD", "php", "spec/support/symfony.php", dsn, AUTOLOAD })
  function self:ask(...)
    local words = { ... }
    for i, word in ipairs(words) do words[i] = encode(word) end
    self:write(table.concat(words, " "))
    return self
  end
  function self:call(...) return self:ask(...):result() end
  assert(self:call "version")
  return self
end

return symfony
