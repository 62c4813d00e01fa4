-- Delete final rows past their keep_until, after noting in their leases how far that went. Returns how many.
-- KEYS[1]: how every key begins. ARGV: at most how many.
local base, time = KEYS[1], redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local runs = redis.call('ZRANGEBYSCORE', base .. 'final', '-inf', now, 'LIMIT', 0, ARGV[1])
for _, run in ipairs(runs) do
  local key = base .. 'run:' .. run
  local row = redis.call('HMGET', key, 'lease', 'token', 'slot_at', 'job')
  local lease, token, slot_at, job = unpack(row)
  if lease then  -- else something other than this script has deleted the row
    lease = base .. 'lease:' .. lease
    redis.call('HSETNX', lease, 'token', token)
    local through = tonumber(redis.call('HGET', lease, 'pruned_through') or 0)
    if tonumber(slot_at) > through then redis.call('HSET', lease, 'pruned_through', slot_at) end
    redis.call('ZREM', base .. 'job:' .. job, run)
  end
  redis.call('DEL', key)
  redis.call('ZREM', base .. 'runs', run)
  redis.call('ZREM', base .. 'final', run)
end
return #runs
