"""The self-audit on request: checks the conservation laws, and payloads and records against their checksums."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.model import DROPPED, I64Array
from kvoffloadd.scheduling.lanes import BACKGROUND
from kvoffloadd.server.context import Context
from kvoffloadd.storage.hashing import hash_payloads, in_turns

log = logging.getLogger(__name__)

CHUNK_PARTS = 256
FINDINGS_MAX = 1000


@dataclass(slots=True)
class AuditRun:
    """The findings, and the number of items checked."""

    findings: list[str] = field(default_factory=list)
    slots: int = 0
    payloads: int = 0
    records: int = 0


async def verify(context: Context, *, payloads: bool, disk: bool, repair: bool) -> AuditRun:
    """Runs the self-audit while the daemon continues to serve. Drops keys with payloads in memory that do not match,
    and verifies all further loads once the books are wrong. Records on disk are checked at each read anyway; with
    `repair`, bad ones are dropped now.
    """
    audit = AuditRun()
    await _check_books(context, audit)
    if audit.findings and context.jobs.verify_loads is not True:
        # Only a checksum reveals a place that two keys share by mistake.
        log.critical("the self-audit found errors: from now on payloads are verified at each load; restart the daemon")
        context.jobs.verify_loads = True
    columns = context.cache.entries.parts
    audit.slots = int(np.count_nonzero(columns.state[: columns.runs.used]))
    sealed = (
        np.flatnonzero(columns.state[: columns.runs.used] == PartState.SEALED) if payloads else np.zeros(0, np.int64)
    )
    for start in range(0, len(sealed), CHUNK_PARTS):
        parts = sealed[start : start + CHUNK_PARTS]
        parts = parts[columns.state[parts] == PartState.SEALED]
        for turn in in_turns(parts, context.cache.entries.payload_bytes(parts)):
            present = turn[columns.state[turn] == PartState.SEALED]  # other parts may be gone since the previous turn
            wrong = await _wrong_payloads(context, present)
            audit.payloads += len(present)
            audit.findings += [f"payload: part record {n} does not match its checksum{DROPPED}" for n in wrong.tolist()]
            context.jobs.drop(columns.row[wrong])
    if disk and context.disk is not None:
        audit.records, findings = await context.disk.scrub.run(repair=repair)
        audit.findings += findings
    del audit.findings[FINDINGS_MAX:]
    return audit


async def _check_books(context: Context, audit: AuditRun) -> None:
    try:
        for found in context.audit():
            audit.findings += found
            await asyncio.sleep(0)
    except (LookupError, ValueError) as error:  # a number in the books refers to a missing entry
        log.exception("the self-audit could not be completed")
        audit.findings.append(f"the tables are damaged, so not everything could be checked: {error!r}")


async def _wrong_payloads(context: Context, parts: I64Array) -> I64Array:
    """Returns the sealed parts that do not match their checksums; skips parts that are evicted meanwhile."""
    columns, cache = context.cache.entries.parts, context.cache
    generations, expected = columns.generation[parts], columns.digest[parts]
    sizes = cache.entries.payload_bytes(parts)
    work = partial(hash_payloads, cache.entries.payload_addresses(parts), sizes)
    hashed = await context.hash_lane.perform(work, flow=BACKGROUND, cost_bytes=int(sizes.sum()))
    differs: np.ndarray[tuple[int], np.dtype[np.bool_]] = (hashed != expected).any(axis=1)
    same = (columns.generation[parts] == generations) & (columns.state[parts] == PartState.SEALED)
    wrong: I64Array = parts[differs & same]
    return wrong
