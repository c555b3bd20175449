"""Key names and the Lua scripts, one atomic step each. Both the blocking and the asyncio side run these.

Every script answers `{status, detail...}`; `ok` and `same` (a repeated call that had already been done) are success.
Values under a run's `agent_r3:{run}:` prefix (the braces keep a run on one node of a cluster):

    demand          groups the trainer has asked for so far             next       index of the next unclaimed group
    claims          hash: group index -> worker, incarnation, token,    published  hash: group index -> worker,
                    time of the claim                                              incarnation
    groups          stream of finished groups, consumer group `trainer` events     stream that wakes waiting workers
    policy          hash: version, weights                              roles      hash: role -> time, payload
    traj:<id>       hash: owner, index, group_id, task_id, length, end  turns:<id> list of turn records
    members:<index> set: ids of trajectories opened for a group

A trajectory is owned by the process (incarnation) that opened it, which works on it only while it holds the claim of
its group: else the answer is `{lost, holder, how}`. Times are the server's, in seconds of the epoch.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """Key names of one run."""

    run: str

    def _key(self, name: str) -> str:
        return f"agent_r3:{{{self.run}}}:{name}"

    @property
    def demand(self) -> str:
        return self._key("demand")

    @property
    def next(self) -> str:
        return self._key("next")

    @property
    def claims(self) -> str:
        return self._key("claims")

    @property
    def published(self) -> str:
        return self._key("published")

    @property
    def groups(self) -> str:
        return self._key("groups")

    @property
    def events(self) -> str:
        return self._key("events")

    @property
    def policy(self) -> str:
        return self._key("policy")

    @property
    def roles(self) -> str:
        return self._key("roles")

    def trajectory(self, trajectory_id: str) -> str:
        return self._key(f"traj:{trajectory_id}")

    def turns(self, trajectory_id: str) -> str:
        return self._key(f"turns:{trajectory_id}")

    def members(self, index: int | str) -> str:
        return self._key(f"members:{index}")


_LOST = """
local function lost(claims, published, index, owner)
  local claim = redis.call('HGET', claims, index)
  if claim and string.match(claim, '\\n(.-)\\n') == owner then return nil end
  local holder = claim or redis.call('HGET', published, index)
  if not holder then return {'lost', '', 'free'} end
  return {'lost', string.match(holder, '^(.-)\\n'), claim and 'claimed' or 'published'}
end
"""


def _for_holders(script: str) -> str:
    """With the function `lost`: nil while process `owner` holds the claim of group `index`, else the answer."""
    return _LOST + script


# KEYS traj, turns, members, claims, published; ARGV owner, id, group_id, task_id, group index
OPEN = _for_holders("""
local gone = lost(KEYS[4], KEYS[5], ARGV[5], ARGV[1])
if gone then return gone end
if redis.call('HGET', KEYS[1], 'owner') == ARGV[1] then
  local held = redis.call('HMGET', KEYS[1], 'group_id', 'task_id', 'length')
  if held[1] == ARGV[3] and held[2] == ARGV[4] and held[3] == '0' then return {'same'} end
  return {'exists', held[1], held[2], held[3]}
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'index', ARGV[5], 'group_id', ARGV[3], 'task_id', ARGV[4], 'length', 0)
redis.call('SADD', KEYS[3], ARGV[2])
return {'ok'}
""")

# KEYS traj, turns, claims, published; ARGV owner, index, start, stop, record, group index ('' when not known)
APPEND = _for_holders("""
local gone = ARGV[6] ~= '' and lost(KEYS[3], KEYS[4], ARGV[6], ARGV[1])
if gone then return gone end
local held = redis.call('HMGET', KEYS[1], 'owner', 'length', 'end')
if not held[1] then return {'missing'} end
if held[1] ~= ARGV[1] then return {'owner'} end
local turns = redis.call('LLEN', KEYS[2])
local index = tonumber(ARGV[2])
if index < turns then
  if redis.call('LINDEX', KEYS[2], index) == ARGV[5] then return {'same'} end
  return {'differs', tostring(turns), held[2]}
end
if held[3] then return {'ended', tostring(turns), held[2]} end
if index ~= turns or held[2] ~= ARGV[3] then return {'place', tostring(turns), held[2]} end
redis.call('RPUSH', KEYS[2], ARGV[5])
redis.call('HSET', KEYS[1], 'length', ARGV[4])
return {'ok'}
""")

# KEYS traj, turns, claims, published; ARGV owner, end, group index ('' when not known)
FINISH = _for_holders("""
local gone = ARGV[3] ~= '' and lost(KEYS[3], KEYS[4], ARGV[3], ARGV[1])
if gone then return gone end
local held = redis.call('HMGET', KEYS[1], 'owner', 'end')
if not held[1] then return {'missing'} end
if held[1] ~= ARGV[1] then return {'owner'} end
if held[2] then
  if held[2] == ARGV[2] then return {'same'} end
  return {'differs', held[2]}
end
if redis.call('LLEN', KEYS[2]) == 0 then return {'empty'} end
redis.call('HSET', KEYS[1], 'end', ARGV[2])
return {'ok'}
""")

# KEYS traj, turns; ARGV owner, id, prefix of members. One that this owner does not hold stays.
DROP = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'index')
if held[1] ~= ARGV[1] then return {'same'} end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SREM', ARGV[3] .. held[2], ARGV[2])
return {'ok'}
"""

# KEYS claims, next, demand, roles; ARGV worker, incarnation, token, stale after seconds, prefixes of members, traj and
# turns, indices that this incarnation works on...  What is free is, lowest first: claims of this worker that it does
# not work on (of an earlier incarnation, or of a call whose answer was lost), and claims of a worker whose last
# heartbeat says that it has stopped, or which has given no sign of life, a heartbeat or the claim, for too long; after
# them the next index. What was opened for it goes.
CLAIM = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local works_on = {}
for i = 8, #ARGV do works_on[ARGV[i]] = true end
local function is_free(index, worker, incarnation, claimed)
  if worker == ARGV[1] then return incarnation ~= ARGV[2] or not works_on[index] end
  local seen, beat = tonumber(claimed), redis.call('HGET', KEYS[4], 'worker/' .. worker)
  beat = beat and cjson.decode(beat)
  if beat and beat.time >= seen then
    if beat.payload.state == 'stopped' then return true end
    seen = beat.time
  end
  return now - seen > tonumber(ARGV[4])
end
local claims = redis.call('HGETALL', KEYS[1])
local free, holder = nil, ''
for i = 1, #claims, 2 do
  local index = claims[i]
  local worker, incarnation, token, claimed = string.match(claims[i + 1], '^(.-)\\n(.-)\\n(.-)\\n(.+)$')
  if incarnation == ARGV[2] and token == ARGV[3] then return {'same', index} end
  if (not free or tonumber(index) < free) and is_free(index, worker, incarnation, claimed) then
    free, holder = tonumber(index), worker
  end
end
if not free then
  free = tonumber(redis.call('GET', KEYS[2]) or '0')
  if free >= tonumber(redis.call('GET', KEYS[3]) or '0') then return {'none'} end
  redis.call('SET', KEYS[2], free + 1)
end
local index = tostring(free)
for _, id in ipairs(redis.call('SMEMBERS', ARGV[5] .. index)) do redis.call('DEL', ARGV[6] .. id, ARGV[7] .. id) end
redis.call('DEL', ARGV[5] .. index)
redis.call('HSET', KEYS[1], index, table.concat({ARGV[1], ARGV[2], ARGV[3], string.format('%.3f', now)}, '\\n'))
return {'ok', index, holder}
"""

# KEYS claims, published, groups, members; ARGV index, worker, owner, group_id, group, seconds, prefix of traj, prefix
# of turns, ids...  What else was opened for the group goes.
PUBLISH = _for_holders("""
local me = ARGV[2] .. '\\n' .. ARGV[3]
local gone = lost(KEYS[1], KEYS[2], ARGV[1], ARGV[3])
if gone then return redis.call('HGET', KEYS[2], ARGV[1]) == me and {'same'} or gone end
local kept = {}
for i = 9, #ARGV do
  local held = redis.call('HMGET', ARGV[7] .. ARGV[i], 'owner', 'group_id', 'end')
  if held[1] ~= ARGV[3] or held[2] ~= ARGV[4] then return {'foreign', ARGV[i]} end
  if not held[3] then return {'unfinished', ARGV[i]} end
  kept[ARGV[i]] = true
end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  if not kept[id] then redis.call('DEL', ARGV[7] .. id, ARGV[8] .. id) end
end
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[3], '*', 'group', ARGV[5], 'seconds', ARGV[6])
redis.call('HSET', KEYS[2], ARGV[1], me)
redis.call('HDEL', KEYS[1], ARGV[1])
return {'ok'}
""")

# KEYS roles; ARGV role, payload, and for a role of which there is one: token of the process, which is in its payload as
# well, and seconds after which the role of a silent process is free
BEAT = """
local time = redis.call('TIME')
local now = string.format('%s.%06d', time[1], tonumber(time[2]))
local held = ARGV[3] and redis.call('HGET', KEYS[1], ARGV[1])
if held then
  held = cjson.decode(held)
  local by, state = held.payload, held.payload.state
  local ended = state == 'done' or state == 'stopped'
  if by.token ~= ARGV[3] and not ended and tonumber(now) - held.time <= tonumber(ARGV[4]) then
    return {'held', tostring(by.host), tostring(by.pid)}
  end
end
redis.call('HSET', KEYS[1], ARGV[1], '{"time":' .. now .. ',"payload":' .. ARGV[2] .. '}')
return {'ok'}
"""

# KEYS groups, then the keys of acknowledged trajectories; ARGV consumer group, entry ids...
ACK = """
for i = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
return {'ok'}
"""

# KEYS demand, next, claims, published, groups; ARGV position, consumer group
RESET = """
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[1])
redis.call('XGROUP', 'CREATE', KEYS[5], ARGV[2], '0', 'MKSTREAM')
return {'ok'}
"""
