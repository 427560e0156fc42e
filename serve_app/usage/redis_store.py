"""Usage kept in Redis, where several clusters count against the same budgets.

The same `Store` as the SQLite one, and what routers that share it need beside it: the spending of
all. One script books a batch, so it is there as a whole or not at all. It is as durable as that
Redis is: with `appendonly yes` its death loses a second at most. Knows neither HTTP nor Ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain

import redis

from router.ledger import Entry, Journal
from router.messages import GpuTime
from router.store import GPU, HOUR_S, KEPT_S, MICROS, MOST_KEPT, SUMS, UsageRow, gpu_times, sums_of

PREFIX = "{fairstream}:"
"""Of all keys. The braces keep them on one node of a Redis cluster, as a script wants them."""
TIMEOUT_S = 2.0

_BOOK = """
local prefix, now, hour = KEYS[1], tonumber(ARGV[1]), ARGV[2]

local function add(member, sums)
    redis.call('ZADD', prefix .. 'hours', hour, member)
    for name, amount in pairs(sums) do
        redis.call('HINCRBY', prefix .. 'usage:' .. member, name, amount)
    end
end

for _, entry in ipairs(cjson.decode(ARGV[3])) do
    local id, member, sums, micro_dollars, accounts = unpack(entry)
    if redis.call('ZADD', prefix .. 'booked', 'NX', now, id) == 1 then
        add(member, sums)
        for _, account in ipairs(accounts) do
            redis.call('HINCRBY', prefix .. 'spent', account, micro_dollars)
        end
    end
end
for _, refused in ipairs(cjson.decode(ARGV[4])) do
    add(unpack(refused))
end
for field, micros in pairs(cjson.decode(ARGV[5])) do
    local known = redis.call('HGET', prefix .. 'gpu', field)
    if not known or tonumber(known) < tonumber(micros) then
        redis.call('HSET', prefix .. 'gpu', field, micros)
    end
end
redis.call('ZREMRANGEBYSCORE', prefix .. 'booked', '-inf', '(' .. now - tonumber(ARGV[6]))
redis.call('ZREMRANGEBYRANK', prefix .. 'booked', 0, -1 - tonumber(ARGV[7]))
for at = 8, #ARGV, 2 do
    local ingress, requests = ARGV[at], ARGV[at + 1]
    if requests == '' then
        redis.call('HDEL', prefix .. 'running', ingress)
        redis.call('ZREM', prefix .. 'told', ingress)
    else
        redis.call('HSET', prefix .. 'running', ingress, requests)
        redis.call('ZADD', prefix .. 'told', now, ingress)
    end
end
"""
# Amounts travel as strings: Lua would write a large number with 14 digits.


class RedisStore:
    """A `Store`. Unlike entries, refusals are counted again where the answer to a batch was lost
    and the batch is told again. Raises redis.RedisError where Redis does not answer, and OSError
    where a budget cannot be told."""

    shared = True

    def __init__(self, url: str, password: str | None = None) -> None:
        """Connects when first needed. `password` is for a URL that has none. Raises ValueError for
        what is no URL of a Redis."""
        self._db = redis.Redis.from_url(
            url,
            password=password,
            decode_responses=True,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
        )
        self._script = self._db.register_script(_BOOK)

    def book(self, journal: Journal, now: float) -> None:
        """See `Store`."""
        hour = int(now) // HOUR_S * HOUR_S
        entries = [_told(entry, hour) for entry in journal.entries]
        refused = [
            (_packed(hour, *key), {"refused": str(count)}) for key, count in journal.refused.items()
        ]
        gpu = {
            _packed(replica, hour, name): str(micros)
            for replica, times in gpu_times(journal.gpu).items()
            for name, micros in zip(GPU, times, strict=True)
        }
        values = (json.dumps(value) for value in (entries, refused, gpu))
        running = chain.from_iterable(journal.running.items())
        self._script(keys=[PREFIX], args=[int(now), hour, *values, KEPT_S, MOST_KEPT, *running])

    def recent(self) -> set[str]:
        """See `Store`; of all clusters together."""
        try:
            return set(self._db.zrange(f"{PREFIX}booked", 0, -1))
        except redis.RedisError as error:
            raise _silent(error) from error

    def lost(self, before: float) -> dict[str, str]:
        """See `Store`; of all clusters together."""
        names = self._db.zrange(f"{PREFIX}told", "-inf", f"({before}", byscore=True)
        told = self._db.hmget(f"{PREFIX}running", names) if names else []
        return {name: requests for name, requests in zip(names, told, strict=True) if requests}

    def spent(self, tenant: str, window: str) -> int:
        """See `Store`."""
        return self.spending([(tenant, window)])[0]

    def spending(self, accounts: Sequence[tuple[str, str]]) -> list[int]:
        """See `Store`; what all clusters spent together."""
        if not accounts:
            return []
        fields = [_packed(*account) for account in accounts]
        try:
            amounts = self._db.hmget(f"{PREFIX}spent", fields)
        except redis.RedisError as error:
            raise _silent(error) from error
        return [int(amount or 0) for amount in amounts]

    def usage(self, start: float, end: float, tenant: str | None = None) -> list[UsageRow]:
        """See `Store`."""
        found = self._db.zrange(f"{PREFIX}hours", start, f"({end}", byscore=True)
        keys = [(hour, name, model) for hour, name, model in map(json.loads, found)]
        keys = [key for key in keys if tenant in (None, key[1])]
        with self._db.pipeline(transaction=False) as asked:
            for key in keys:
                asked.hgetall(f"{PREFIX}usage:{_packed(*key)}")
            return [
                UsageRow(hour, name, model, {each: int(sums.get(each, 0)) for each in SUMS})
                for (hour, name, model), sums in zip(keys, asked.execute(), strict=True)
            ]

    def gpu(self, start: float, end: float) -> GpuTime:
        """See `Store`."""
        told: Mapping[str, str] = self._db.hgetall(f"{PREFIX}gpu")
        sums = dict.fromkeys(GPU, 0)
        for at, sign in ((start, -1), (end, 1)):
            newest: dict[tuple[str, str], int] = {}
            for field, micros in told.items():
                replica, hour, name = json.loads(field)
                if hour < at:
                    newest[replica, name] = max(int(micros), newest.get((replica, name), 0))
            for (_, name), micros_before in newest.items():
                sums[name] += sign * micros_before
        return GpuTime(*(sums[name] / MICROS for name in GPU))

    def close(self) -> None:
        self._db.close()


def _silent(error: redis.RedisError) -> OSError:
    return OSError(f"the Redis that keeps usage does not answer: {error}")


def _told(entry: Entry, hour: int) -> tuple[object, ...]:
    """As the script takes it."""
    sums = {name: str(amount) for name, amount in sums_of(entry).items() if amount}
    accounts = [_packed(entry.tenant, window) for window in entry.windows]
    member = _packed(hour, entry.tenant, entry.model)
    return entry.request_id, member, sums, str(entry.micro_dollars), accounts


def _packed(*parts: object) -> str:
    """One name of several, whatever they contain."""
    return json.dumps(parts)
