"""One job of a session: its request after the checks, and its charges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvoffloadd.cache.jobs.job import Job
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.progress import Progress
from kvoffloadd.model import U32Array, U64Array
from kvoffloadd.server.session.registration import RegisteredGroup, Registration


@dataclass(frozen=True, slots=True, eq=False)
class GroupJob:
    """One group's share of a job, after the checks."""

    keyspace: Keyspace
    registered: RegisteredGroup
    keys: U64Array  # (n, WORDS)
    blocks: U32Array  # (n, blocks_per_key)
    first: int  # position of the first key in its prompt


class Charge(NamedTuple):
    """Bytes that a job is charged until its end."""

    outbox_bytes: int  # reserved in the outbox for its completion
    job_bytes: int  # charged to its uid for the memory that it holds


@dataclass(slots=True, eq=False)
class SessionJob:
    """One store or load of a peer."""

    id: int
    registration: Registration
    charge: Charge
    remark: str = ""  # for the `reason` of a job without failures
    job: Job | None = None  # once it is under way
    counted: list[tuple[Progress, int]] = field(default_factory=list)  # its number in each `Progress` that counts it
