-- The next rows of an index by slot time: {row's name, its score, the row} each.
-- KEYS[1]: how every key begins. ARGV: the index; 'up' or 'down'; the score to begin at; the last row seen, or ''; how many.
-- If the last row seen is gone, rows with its score come again: the caller knows them.
local base, key, up, from, seen = KEYS[1], KEYS[1] .. ARGV[1], ARGV[2] == 'up', ARGV[3], ARGV[4]
local rank = redis.call(up and 'ZRANK' or 'ZREVRANK', key, seen)
local first = rank and rank + 1
if not first and up then first = redis.call('ZCOUNT', key, '-inf', '(' .. from) end
if not first then first = redis.call('ZCOUNT', key, '(' .. from, '+inf') end
local last = first + ARGV[5] - 1
local names = redis.call(up and 'ZRANGE' or 'ZREVRANGE', key, first, last, 'WITHSCORES')
local found = {}
for at = 1, #names, 2 do
  found[#found + 1] = {names[at], names[at + 1], redis.call('HGETALL', base .. 'run:' .. names[at])}
end
return found
