-- The packages that symfony.php and redis_lock.py need, and whether this
-- machine has them.

local symfony = {}

local function output(command)
  local pipe = io.popen(command .. " 2>/dev/null")
  local text = pipe:read("*a")
  pipe:close()
  return text
end

--- Why symfony.php cannot run: the packages that it needs; false if it can.
-- @param extension of PHP, or something that it comes with anyway
-- @param package that has it
function symfony.missing(extension, package)
  local lock, loaded = output("php -r '@include \"Symfony/Component/Lock/autoload.php\"; " ..
    "echo (int) class_exists(\"Symfony\\Component\\Lock\\LockFactory\"), (int) extension_loaded($argv[1]);' " ..
    extension):match("^(%d)(%d)$")
  return lock ~= "1" and "needs php-cli php-symfony-lock" or loaded ~= "1" and "needs " .. package
end

--- Why redis-py cannot run.
function symfony.lacks_redis_py()
  return output("/usr/bin/python3 -c 'import redis; print(1)'") ~= "1\n" and "needs python3-redis"
end

return symfony
