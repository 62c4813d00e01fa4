-- Leases that somebody holds, those first that end first, each with the row it holds; the clock comes first.
-- KEYS[1]: how every key begins. ARGV: 'expired' or 'all'; at most how many (-1: no limit).
local base, time = KEYS[1], redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local latest = ARGV[1] == 'expired' and now or '+inf'
local found = {time}
for _, name in ipairs(redis.call('ZRANGEBYSCORE', base .. 'held', '-inf', latest, 'LIMIT', 0, ARGV[2])) do
  local lease = base .. 'lease:' .. name
  local run = redis.call('HGET', lease, 'run')
  found[#found + 1] = {name, redis.call('HGETALL', lease), run and redis.call('HGETALL', base .. 'run:' .. run) or {}}
end
return found
