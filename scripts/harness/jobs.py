"""A job that is open, and what it is about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.client import Client, Job, Registration
from kvoffloadd.model import NO_BLOCK, BoolArray, Direction, I64Array, U8Array
from scripts.harness.groupshape import GroupShape
from scripts.harness.kvmemory import KvMemory

Epoch = tuple[str, int]
"""The daemon's run, and how often the namespace was cleared in it."""


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One group's keys in a job: u8 (keys, key_bytes), and blocks (keys, blocks_per_key); `first`: see `Client`."""

    group: GroupShape
    part: int
    keys: U8Array
    blocks: I64Array
    first: int

    @property
    def wanted(self) -> I64Array:
        """The blocks, flat, without those that are not wanted."""
        flat = self.blocks.reshape(-1)
        wanted: I64Array = flat[flat != NO_BLOCK]
        return wanted

    def bytes_of(self, keys: BoolArray) -> int:
        """What some of the keys move."""
        block_bytes = self.group.payload_bytes(self.part) // self.group.blocks_per_key
        return block_bytes * int((self.blocks[keys] != NO_BLOCK).sum())


@dataclass(slots=True, eq=False)
class Rank:
    """One session and its KV cache."""

    number: int
    client: Client
    memory: KvMemory
    registration: Registration


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job whose blocks are the daemon's: those `taken`, for a load those of them that its shares name.

    `hurried`: its deadline may pass; `leased`: all its keys must be there, or be reserved; unless the namespace was
    cleared since `epoch`. `took_s`: from the call to the end, if that was waited for. `on_disk[s]`: which keys of
    share s were not in memory when they were asked for, and on disk, but for `others` of all of them, which others
    were storing.
    """

    job: Job
    rank: Rank
    memory: KvMemory
    shares: list[Share]
    taken: list[I64Array]
    began: float
    hurried: bool
    leased: bool
    epoch: Epoch
    on_disk: Sequence[BoolArray] = ()
    others: int = 0
    cancelled: bool = False
    took_s: float = 0.0

    @property
    def is_load(self) -> bool:
        return self.job.direction is Direction.LOAD
