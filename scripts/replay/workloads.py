"""Synthetic workloads: requests whose prompts come back as those of chats, agents, tenants or floods do.

Each takes a random generator and returns requests, as `trace` has them. All blocks of a request are of one tenant: its
number is their ids' divided by `TENANT_IDS`. Tenants can be different users, with payloads of different sizes.
"""

from __future__ import annotations

import heapq
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from kvoffloadd.model import I64Array
from scripts.replay.trace import load_trace

REQUESTS = 12_000
PROMPT_BLOCKS = 16
TENANT_IDS = 1 << 40


class Workload(Protocol):
    """Makes about `requests` requests."""

    def __call__(self, random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]: ...


def zipf(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Whole prompts, drawn by Zipf's law with exponent 0.9 from 6,000."""
    weights = np.arange(1, 6001) ** -0.9
    return _prompts(random.choice(6000, requests, p=weights / weights.sum()))


def uniform(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Whole prompts, each of 4,000 as likely as any other."""
    return _prompts(random.integers(0, 4000, requests))


def loop(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """3,000 prompts in turn, again and again: what LRU is worst at."""
    return _prompts(np.arange(requests) % 3000)


def scan(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Hot prompts, drawn by Zipf's law from 1,000, and as many of another tenant that never come back."""
    weights = np.arange(1, 1001) ** -1.0
    hot = random.choice(1000, requests, p=weights / weights.sum())
    return _prompts(np.where(random.random(requests) < 0.5, hot, _prompt_of(1) + np.arange(requests)))


def shift(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Zipf's law over 2,000 prompts, other ones after each quarter of the requests."""
    weights = np.arange(1, 2001) ** -0.9
    drawn = random.choice(2000, requests, p=weights / weights.sum())
    return _prompts(drawn + 2000 * (np.arange(requests) * 4 // requests))


def chat(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """100 conversations at a time under one shared prefix; a turn adds 4 blocks and is the last with chance 0.3."""
    prefix = list(range(4))
    next_id = 4
    prompts: list[list[int]] = [[] for _ in range(100)]
    made = []
    for _ in range(requests):
        which = int(random.integers(0, 100))
        prompts[which] = prompts[which] or prefix
        prompts[which] = [*prompts[which], *range(next_id, next_id + 4)]
        next_id += 4
        made.append(np.array(prompts[which], np.int64))
        if random.random() < 0.3:
            prompts[which] = []
    return made


def agents(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """60 agents of 6 kinds, each kind with a prefix of 16 blocks. A turn adds 1 to 6 blocks; the last has chance 0.04.
    The next one follows at once (exponential, mean 1), but after one in twelve a person is waited for (mean 60).
    """
    prefixes = [list(range(16 * kind, 16 * kind + 16)) for kind in range(6)]
    next_id = 16 * len(prefixes)
    prompts: list[list[int]] = [[] for _ in range(60)]
    due = [(float(when), which) for which, when in enumerate(random.exponential(10.0, len(prompts)))]
    heapq.heapify(due)
    made = []
    for _ in range(requests):
        now, which = heapq.heappop(due)
        prompt = prompts[which] or prefixes[int(random.integers(0, len(prefixes)))]
        added = int(random.integers(1, 7))
        prompts[which] = [*prompt, *range(next_id, next_id + added)]
        next_id += added
        made.append(np.array(prompts[which], np.int64))
        if random.random() < 0.04:
            prompts[which] = []
        pause_s = 60.0 if random.random() < 1 / 12 else 1.0
        heapq.heappush(due, (now + float(random.exponential(pause_s)), which))
    return made


def rag(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """A document of 800, drawn by Zipf's law, behind a shared prefix; then a question that never comes back."""
    weights = np.arange(1, 801) ** -0.8
    documents = random.choice(800, requests, p=weights / weights.sum())
    prefix = np.arange(2)
    bodies = 2 + documents[:, None] * 12 + np.arange(12)
    questions = 2 + 800 * 12 + np.arange(requests)[:, None] * 2 + np.arange(2)
    return [np.concatenate((prefix, *parts)) for parts in zip(bodies, questions, strict=True)]


def sweep(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Hot prompts, drawn by Zipf's law from 600; after each 2,000 requests 1,000 others are asked for in a row, always
    the same (a batch that is run again and again).
    """
    weights = np.arange(1, 601) ** -0.9
    drawn = random.choice(600, requests, p=weights / weights.sum())
    in_batch = np.arange(requests) % 3000 - 2000
    return _prompts(np.where(in_batch >= 0, 600 + in_batch, drawn))


def drift(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Any of 300 prompts; with each fourth request one of them is replaced by a new one."""
    newest = 300 + np.arange(requests) // 4
    return _prompts(newest - random.integers(0, 300, requests))


def tenants(random: np.random.Generator, requests: int = REQUESTS) -> list[I64Array]:
    """Three of unlike size: one in 20 requests is any of 40 prompts, eight are by Zipf's law of 3,000, and eleven are
    of 60 conversations whose turns add 4 blocks; one in ten is the last.
    """
    weights = np.arange(1, 3001) ** -0.9
    few = random.integers(0, 40, requests)
    many = _prompt_of(1) + random.choice(3000, requests, p=weights / weights.sum())
    which = random.random(requests)
    made = _prompts(np.where(which < 0.05, few, many))
    next_id = 2 * TENANT_IDS
    talks: list[list[int]] = [[] for _ in range(60)]
    for at in np.flatnonzero(which >= 0.45).tolist():
        talk = int(random.integers(0, len(talks)))
        talks[talk] = [*talks[talk], *range(next_id, next_id + 4)]
        next_id += 4
        made[at] = np.array(talks[talk], np.int64)
        if random.random() < 0.1:
            talks[talk] = []
    return made


def flood(random: np.random.Generator, requests: int = REQUESTS, *, rate: int) -> list[I64Array]:
    """Any of 100 prompts; after a tenth of them, `rate` of another tenant that never come back follow each."""
    useful = requests // (1 + rate)
    alone = useful // 10
    times = np.where(np.arange(useful) < alone, 1, 1 + rate)
    is_useful = np.zeros(int(times.sum()), bool)
    is_useful[np.cumsum(times) - times] = True
    numbers = _prompt_of(1) + np.arange(len(is_useful))
    numbers[is_useful] = random.integers(0, 100, useful)
    return _prompts(numbers)


FLOODS: dict[str, Workload] = {f"flood-{rate}": partial(flood, rate=rate) for rate in (1, 5, 20)}
WORKLOADS: dict[str, Workload] = {
    **{make.__name__: make for make in (zipf, uniform, loop, scan, shift, chat, agents, rag, sweep, drift, tenants)},
    **FLOODS,
}
"""By name."""


def requests_of(load: str, seed: int, count: int = REQUESTS) -> list[I64Array]:
    """Reads the requests of a workload by its name, or of a file with a trace. Raises ConfigError."""
    if load in WORKLOADS:
        return WORKLOADS[load](np.random.default_rng(seed), count)
    return load_trace(Path(load))


def tenants_in(load: str, requests: list[I64Array]) -> I64Array:
    """The number of each request's tenant, from 0 on. Traces have one."""
    if load not in WORKLOADS:
        return np.zeros(len(requests), np.int64)
    numbers: I64Array = np.unique([ids[0] // TENANT_IDS for ids in requests], return_inverse=True)[1]
    return numbers


def _prompt_of(tenant: int) -> int:
    """The number of a tenant's first prompt."""
    return tenant * TENANT_IDS // PROMPT_BLOCKS


def _prompts(numbers: I64Array) -> list[I64Array]:
    return list(numbers[:, None] * PROMPT_BLOCKS + np.arange(PROMPT_BLOCKS))
