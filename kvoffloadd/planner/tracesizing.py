"""Works out what caches of several sizes would have hit of a trace, by miniature simulations of the daemon's policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvoffloadd.cache.curve.curve import REFERENCES_MIN, Curve, Estimate
from kvoffloadd.cache.curve.prompt import AskedKeys
from kvoffloadd.cache.policy import DEFAULT_POLICY, create_policy
from kvoffloadd.planner.sizing import SizeHits, Sizing
from kvoffloadd.planner.trace import RequestTrace, mixed

SAMPLES = 3
"""The number of simulations of each size, with other keys in the sample."""


def size_for(
    trace: RequestTrace,
    token_bytes: float,
    memory_bytes: int,
    disk_bytes: int,
    policy: str = DEFAULT_POLICY,
    *,
    samples: int = SAMPLES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Sizing:
    """Simulates the trace at each size. `token_bytes`: what a token takes, on all ranks. `progress`: is called with the
    number of references simulated so far, and of all. Raises ConfigError where the trace contradicts itself, or for an
    unknown policy.
    """
    trace.check_lengths()
    key_bytes, total = max(1, round(token_bytes * trace.block_tokens)), trace.references
    runs, done = [], 0
    for seed in range(samples):
        curve = Curve(partial(create_policy, policy), memory_bytes, disk_bytes)
        for request in trace.requests:
            if len(request.blocks):
                prompt = [AskedKeys(mixed(request.blocks, seed), trace.block_tokens, key_bytes)]
                curve.ask(prompt)
                curve.store(prompt)
                done += len(request.blocks)
                progress(done, samples * total)
        runs.append(curve.estimates())
    unique = trace.unique_blocks
    return Sizing(
        policy, memory_bytes, disk_bytes,
        tuple(_joined(estimates, total) for estimates in zip(*runs, strict=True)),
        requests=len(trace.requests), tokens=total * trace.block_tokens,
        # A block stands for all before it, so that it hits whenever it was asked for before.
        ceiling=1 - unique / total, all_bytes=unique * key_bytes,
    )  # fmt: skip


def _joined(estimates: Sequence[Estimate], references: int) -> SizeHits:
    """Returns the mean of several samples. Its margin is two standard errors of one sample: as it tells it, or as the
    samples differ, whichever is larger.
    """
    first = estimates[0]
    ratios = [one.hit_ratio for one in estimates if one.hit_ratio is not None]
    known = len(ratios) == len(estimates) and references >= REFERENCES_MIN
    told = float(np.sqrt(np.mean([one.error**2 for one in estimates])))
    spread = float(np.std(ratios, ddof=1)) if len(ratios) > 1 else 0.0
    return SizeHits(
        first.memory_bytes, first.disk_bytes, float(np.mean(ratios)) if known else None,
        2 * max(told, spread), min(one.rate for one in estimates),
    )  # fmt: skip
