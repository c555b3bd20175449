"""Key names and the Lua scripts, one atomic step each. Both the blocking and the asyncio side run these.

Every script answers `{status, detail...}`; `ok` and `same` (a repeated call that had already been done) are success.
Values under a run's `agent_r3:{run}:` prefix (the braces keep a run on one node of a cluster):

    demand          groups the trainer has asked for so far             next       index of the next unclaimed group
    claims          hash: group index -> worker, incarnation, token     published  bitmap by group index
    groups          stream of finished groups, consumer group `trainer` events     stream that wakes waiting workers
    policy          hash: version, weights                              roles      hash: role -> heartbeat
    traj:<id>       hash: owner, group_id, task_id, length, end         turns:<id> list of turn records
    members:<group> set: ids of trajectories opened for a group
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

    def members(self, group_id: str) -> str:
        return self._key(f"members:{group_id}")


# KEYS traj, turns, members; ARGV owner, id, group_id, task_id
OPEN = """
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner == ARGV[1] then
  local held = redis.call('HMGET', KEYS[1], 'group_id', 'task_id', 'length')
  if held[1] == ARGV[3] and held[2] == ARGV[4] and held[3] == '0' then return {'same'} end
  return {'exists', held[1], held[2], held[3]}
end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'group_id', ARGV[3], 'task_id', ARGV[4], 'length', 0)
redis.call('SADD', KEYS[3], ARGV[2])
return {'ok'}
"""

# KEYS traj, turns; ARGV owner, index, start, stop, record
APPEND = """
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
"""

# KEYS traj, turns; ARGV owner, end
FINISH = """
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
"""

# KEYS traj, turns; ARGV owner, id, prefix of members. One that this owner does not hold stays.
DROP = """
local held = redis.call('HMGET', KEYS[1], 'owner', 'group_id')
if held[1] ~= ARGV[1] then return {'same'} end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('SREM', ARGV[3] .. held[2], ARGV[2])
return {'ok'}
"""

# KEYS claims, next, demand; ARGV worker, incarnation, token. A claim is held as worker \n incarnation \n token.
CLAIM = """
local mine = ARGV[1] .. '\\n' .. ARGV[2] .. '\\n'
local claims = redis.call('HGETALL', KEYS[1])
local left = nil
for i = 1, #claims, 2 do
  if claims[i + 1] == mine .. ARGV[3] then return {'same', claims[i]} end
  local worker, incarnation = string.match(claims[i + 1], '^(.-)\\n(.-)\\n')
  if worker == ARGV[1] and incarnation ~= ARGV[2] and (not left or tonumber(claims[i]) < left) then
    left = tonumber(claims[i])
  end
end
if not left then
  local next_index = tonumber(redis.call('GET', KEYS[2]) or '0')
  if next_index >= tonumber(redis.call('GET', KEYS[3]) or '0') then return {'none'} end
  redis.call('SET', KEYS[2], next_index + 1)
  left = next_index
end
redis.call('HSET', KEYS[1], left, mine .. ARGV[3])
return {'ok', tostring(left)}
"""

# KEYS claims, published, groups, members; ARGV index, worker, incarnation, owner, group_id, group, seconds,
# prefix of traj, prefix of turns, ids...  What else was opened for the group (left by a dead worker) goes.
PUBLISH = """
if redis.call('GETBIT', KEYS[2], ARGV[1]) == 1 then return {'same'} end
local claim = redis.call('HGET', KEYS[1], ARGV[1])
if not claim then return {'unclaimed'} end
local mine = ARGV[2] .. '\\n' .. ARGV[3] .. '\\n'
if string.sub(claim, 1, #mine) ~= mine then return {'owner', string.match(claim, '^(.-)\\n')} end
local kept = {}
for i = 10, #ARGV do
  local held = redis.call('HMGET', ARGV[8] .. ARGV[i], 'owner', 'group_id', 'end')
  if held[1] ~= ARGV[4] or held[2] ~= ARGV[5] then return {'foreign', ARGV[i]} end
  if not held[3] then return {'unfinished', ARGV[i]} end
  kept[ARGV[i]] = true
end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  if not kept[id] then redis.call('DEL', ARGV[8] .. id, ARGV[9] .. id) end
end
redis.call('DEL', KEYS[4])
redis.call('XADD', KEYS[3], '*', 'group', ARGV[6], 'seconds', ARGV[7])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('SETBIT', KEYS[2], ARGV[1], 1)
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
