"""The self-audit on request: the conservation laws, and the payloads against their checksums."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.parts import PartState
from kvoffloadd.tiers.hashing import hash_payloads

if TYPE_CHECKING:
    import asyncio

    from kvoffloadd.model import I64Array, U64Array
    from kvoffloadd.server.context import Context

CHUNK_PARTS = 256
FINDINGS_MAX = 1000
URGENT = 1


async def verify(context: Context, *, payloads: bool) -> tuple[list[str], int, int]:
    """Findings, slots in use, payloads hashed. Changes nothing; the daemon serves on meanwhile."""
    findings = context.check()
    columns = context.cache.entries.parts
    slots = int(np.count_nonzero(columns.state))
    hashed = 0
    sealed = np.flatnonzero(columns.state == PartState.SEALED) if payloads else np.zeros(0, np.int64)
    for start in range(0, len(sealed), CHUNK_PARTS):
        parts = sealed[start : start + CHUNK_PARTS]
        parts = parts[columns.state[parts] == PartState.SEALED]
        wrong = await _wrong_payloads(context, parts)
        hashed += len(parts)
        findings += [f"payload: part record {part} does not match its checksum" for part in wrong.tolist()]
    return findings[:FINDINGS_MAX], slots, hashed


async def _wrong_payloads(context: Context, parts: I64Array) -> I64Array:
    """Those of the sealed parts that do not match; one that is evicted meanwhile is not judged."""
    columns, cache = context.cache.entries.parts, context.cache
    generations, expected = columns.generation[parts], columns.digest[parts]
    work = partial(hash_payloads, cache.payload_addresses(parts), cache.payload_bytes(parts))
    hashed: asyncio.Future[U64Array] = context.loop.create_future()

    def done(result: U64Array | BaseException) -> None:
        if hashed.done():
            return  # whoever asked is gone
        if isinstance(result, BaseException):
            hashed.set_exception(result)
        else:
            hashed.set_result(result)

    context.hash_lane.submit(work, done, urgent=URGENT)
    differs: np.ndarray[tuple[int], np.dtype[np.bool_]] = (await hashed != expected).any(axis=1)
    same = (columns.generation[parts] == generations) & (columns.state[parts] == PartState.SEALED)
    wrong: I64Array = parts[differs & same]
    return wrong
