-- Apply each change that matches, whole and independently of the others. Returns each lease's token afterwards, or false.
-- KEYS[1]: how every key begins. ARGV: one change each, as JSON; its numbers are decimal strings.
local base, time = KEYS[1], redis.call('TIME')
local now = time[1] * 1000000 + time[2]

-- Lua's own conversion keeps 14 of the 16 digits of a time in microseconds.
local function digits(number)
  return string.format('%.0f', number)
end

local function token_after(move)
  local row = redis.call('HMGET', base .. 'lease:' .. move.name, 'token', 'holder', 'expires_at', 'hold_until')
  if tonumber(row[1]) ~= tonumber(move.token) or (row[2] or nil) ~= move.holder then return nil end
  local live = row[3] and tonumber(row[3]) > now
  local open = not live and now >= tonumber(row[4] or 0)
  local judged = {any = true, live = live, over = not live, open = open}
  if not judged[move.condition] then return nil end
  local last = tonumber(row[1] or 0)
  return move.grows and math.max(last + 1, now) or last
end

local function matches(move)
  local row = redis.call('HMGET', base .. 'run:' .. move.run, 'state', 'token')
  return (row[1] or nil) == move.was and tonumber(row[2]) == tonumber(move.token)
end

local function write(key, move, token)
  local values = {}
  local function put(field, value) values[#values + 1] = field; values[#values + 1] = value end
  if token then put('token', digits(token)) end
  for field, value in pairs(move.set) do put(field, value) end
  for field, offset in pairs(move.after) do put(field, digits(now + tonumber(offset))) end
  redis.call('HSET', key, unpack(values))
  if #move.drop > 0 then redis.call('HDEL', key, unpack(move.drop)) end
end

local function index(name, member, score)
  if score then redis.call('ZADD', base .. name, score, member) else redis.call('ZREM', base .. name, member) end
end

local function write_lease(move, token)
  local key = base .. 'lease:' .. move.name
  write(key, move, token)
  index('held', move.name, redis.call('HGET', key, 'expires_at'))
end

local function write_run(move, token)
  local key = base .. 'run:' .. move.run
  write(key, move, move.granted and token)
  local row = redis.call('HMGET', key, 'slot_at', 'job', 'lease', 'state', 'keep_until')
  local slot_at, waiting = row[1], row[4] == 'waiting'
  index('runs', move.run, slot_at)
  index('job:' .. row[2], move.run, slot_at)
  index('waiting:' .. row[3], move.run, waiting and slot_at)
  index('open', move.run, (waiting or row[4] == 'running') and slot_at)
  index('final', move.run, row[5])
end

local function apply(change)
  local token = 0
  if change.lease then token = token_after(change.lease) end
  if not token then return false end
  for _, move in ipairs(change.runs) do
    if not matches(move) then return false end
  end
  if change.lease then write_lease(change.lease, token) end
  for _, move in ipairs(change.runs) do write_run(move, token) end
  return digits(token)
end

local answers = {}
for place, change in ipairs(ARGV) do answers[place] = apply(cjson.decode(change)) end
return answers
