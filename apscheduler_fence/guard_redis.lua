-- Run commands if the token is not stale, at one instant. Returns what came of it, then details.
-- KEYS[1]: the resource's fence. ARGV: lease, token, execution ID, operation or '', for how many ms to remember that;
-- then each command as the number of its words and the words.
local fence, lease, token, execution, operation = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
if tonumber(token) > now + 86400000000 then return {'early', string.format('%.0f', now)} end

local row = redis.call('HMGET', fence, 'token:' .. lease, 'execution:' .. lease)
local highest = tonumber(row[1] or 0)
if tonumber(token) < highest or (tonumber(token) == highest and row[2] ~= execution) then return {'stale', row[1]} end

local applied = operation ~= '' and fence .. '\t' .. execution .. '\t' .. operation
if applied and redis.call('EXISTS', applied) == 1 then return {'applied'} end
redis.call('HSET', fence, 'token:' .. lease, token, 'execution:' .. lease, execution)
if applied then redis.call('SET', applied, token, 'PX', ARGV[5]) end

local replies, at = {}, 6
while at <= #ARGV do
  local last = at + ARGV[at]
  local reply = redis.pcall(unpack(ARGV, at + 1, last))
  if type(reply) == 'table' and reply.err then
    if applied and #replies == 0 then redis.call('DEL', applied) end  -- nothing has been done yet
    return {'failed', #replies, reply.err}
  end
  replies[#replies + 1], at = reply, last + 1
end
return {'done', replies}
