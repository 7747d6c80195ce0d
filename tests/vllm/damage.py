"""Stored bytes that go bad, in the memory of a daemon that serves."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.integrations.vllm.worker import KeysLoadStoreSpec
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.arenafile import _HEADER as HEADER
from kvoffloadd.storage.arenafile import NAMES_BYTES, RECORD_WORDS, arena_offset
from kvoffloadd.testing.wait import until

Choose = Callable[[Sequence[tuple[int, list[bytes]]]], tuple[int, bytes]]
"""Of what is about to be loaded, each group's keys: which one is to be damaged."""


def damage(pid: int, group: int, key: bytes) -> None:
    """Flip a bit of a key's payload, once that has its checksum. The daemon has known no other namespace, and has not
    cleared this one: keyspaces have the numbers of groups then.
    """
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if "kvoffloadd-arena" in os.readlink(entry):
                _damage(np.memmap(entry, np.uint8, "r+"), group, key)
                return
    raise AssertionError("the daemon has no arena")


def _damage(whole: Any, group: int, key: bytes) -> None:
    _, _, _, capacity_bytes, slab_bytes, _ = HEADER.unpack(whole[: HEADER.size].tobytes())
    pages, slab_pages = capacity_bytes // PAGE_BYTES, slab_bytes // PAGE_BYTES
    at = PAGE_BYTES + 2 * NAMES_BYTES
    slabs = whole[at : at + -(-pages // slab_pages) * 4].view(np.uint32)
    at += -(-slabs.nbytes // PAGE_BYTES) * PAGE_BYTES
    records = whole[at : at + 8 * RECORD_WORDS * pages].view(np.uint64).reshape(pages, RECORD_WORDS)

    def places() -> list[int]:
        same = (records[:, :4] == np.frombuffer(key, np.uint64)).all(axis=1) & (records[:, -1] != 0)
        found: list[int] = np.flatnonzero(same & (records[:, 6] & np.uint64(0xFFFF) == group)).tolist()
        return found

    (place,) = until(places, "the payload has its checksum")
    slab, size = place // slab_pages, int(slabs[place // slab_pages])
    page = slab * slab_pages + (place - slab * slab_pages) * size
    arena = whole[arena_offset(capacity_bytes, slab_bytes) :]
    payload = arena[page * PAGE_BYTES : (page + size) * PAGE_BYTES]
    payload[np.flatnonzero(payload)[0]] ^= 0x10


def _of_most(groups: Sequence[tuple[int, list[bytes]]]) -> tuple[int, list[bytes]]:
    return max(groups, key=lambda one: len(one[1]))


def _first(groups: Sequence[tuple[int, list[bytes]]]) -> tuple[int, bytes]:
    group, keys = _of_most(groups)
    return group, keys[0]


def _middle(groups: Sequence[tuple[int, list[bytes]]]) -> tuple[int, bytes]:
    group, keys = _of_most(groups)
    return group, keys[len(keys) // 2]


def _end(groups: Sequence[tuple[int, list[bytes]]]) -> tuple[int, bytes]:
    group, keys = _of_most(groups)
    return group, keys[-1]


def _window(groups: Sequence[tuple[int, list[bytes]]]) -> tuple[int, bytes]:
    group, keys = min((one for one in groups if one[1]), key=lambda one: len(one[1]))
    return group, keys[-1]


CHOICES: Mapping[str, Choose] = {"first": _first, "middle": _middle, "end": _end, "window": _window}
"""The first key, that in the middle and that at the end of the group that loads most keys; and that at the end of the
group that loads fewest: a window's, or a state.
"""


def damaging(submit: Callable[..., bool], pid: int, choose: Choose, loads: int = 1) -> Callable[..., bool]:
    """`KVOffloaddWorker.submit_load`, which damages a key of each prompt before its first `loads` loads."""
    begun: dict[bytes, int] = {}

    def submit_load(worker: Any, job: int, source: KeysLoadStoreSpec, *others: Any, **named: Any) -> bool:
        _group, keys = _of_most(source.groups)
        begun[keys[0]] = begun.get(keys[0], 0) + 1
        if begun[keys[0]] <= loads:
            damage(pid, *choose(source.groups))
        return submit(worker, job, source, *others, **named)

    return submit_load
