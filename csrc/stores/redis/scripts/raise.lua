-- Whatever is granted from now on, in any tree, has a token beyond this one.
local least, memory = tonumber(ARGV[3]), ARGV[4]
if least > tonumber(redis.call('HGET', memory, 'least') or 0) then redis.call('HSET', memory, 'least', text(least)) end
return { 1 }
