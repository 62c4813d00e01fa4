-- One look at a lease: the clock, its row, the slot's row, the row it holds, its oldest waiting row.
-- KEYS[1]: how every key begins. ARGV: the lease's name; the slot's row.
local base, time = KEYS[1], redis.call('TIME')
local lease = base .. 'lease:' .. ARGV[1]

local function row(run)
  return run and redis.call('HGETALL', base .. 'run:' .. run) or {}
end

local oldest = redis.call('ZRANGE', base .. 'waiting:' .. ARGV[1], 0, 0)[1]
return {time, redis.call('HGETALL', lease), row(ARGV[2]), row(redis.call('HGET', lease, 'run')), row(oldest)}
