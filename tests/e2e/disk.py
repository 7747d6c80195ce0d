"""A daemon with a disk tier, and what a test does to its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Group, GroupKind, KeyState, Outcome, Ref
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import is_segment_name
from kvoffloadd.storage.disk.format import RECORD_MAGIC, decode_records, decode_segment_header, record_pages
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.damage import flip
from scripts.harness.disk import is_idle
from tests.e2e.rank import Keys, Rank

MIB = 1 << 20
SETTINGS = ("disk.min_free_bytes=0", "disk.retry_s=0.2")


def disk_settings(*roots: tuple[Path, int]) -> tuple[str, ...]:
    """`disk.roots`, in bytes, and what makes small tests quick."""
    tables = ", ".join(f'{{ path = "{path}", capacity = {size} }}' for path, size in roots)
    return (f"disk.roots=[{tables}]", *SETTINGS)


def disk(daemon: Daemon) -> dict[str, Any]:
    """The disk's part of `status`."""
    found: dict[str, Any] = daemon.status()["disk"]
    return found


def root_state(daemon: Daemon, number: int = 0) -> str:
    """How a root is doing."""
    return str(disk(daemon)["roots"][number]["state"])


def demoted(daemon: Daemon, keys: int) -> None:
    """Wait until this number of keys is on disk."""
    until(lambda: disk(daemon)["keys"] >= keys, f"{keys} keys are on disk")


def idle(daemon: Daemon) -> None:
    """Wait until nothing waits to be written, or is being written."""
    # Twice: a key may be on its way from the one to the other.
    until(lambda: all(is_idle(daemon.status()) for _ in range(2)), "all is written")


# --- keys ---


def group_of(payload_bytes: int, parts: int = 1, part: int = 0) -> tuple[Group, ...]:
    """One group whose payloads have this size."""
    return (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 0, payload_bytes),), parts=parts, part=part),)


def store_all(rank: Rank, keys: Keys, at_once: int = 64) -> None:
    """Store them all, some at a time."""
    for start in range(0, len(keys), at_once):
        assert rank.store_keys(keys[start : start + at_once]).outcome is Outcome.DONE


def store_on_disk(daemon: Daemon, rank: Rank, keys: Keys, at_once: int = 64) -> None:
    """Store all, some at a time, and wait each time until they are on disk."""
    for start in range(0, len(keys), at_once):
        before = disk(daemon)["demoted"]["keys"]
        batch = keys[start : start + at_once]
        assert rank.store_keys(batch).outcome is Outcome.DONE
        _count_up(daemon, before + len(batch))
        idle(daemon)  # the count has keys, too, that are written again since their segment was given up


def _count_up(daemon: Daemon, least: int) -> None:
    until(lambda: disk(daemon)["demoted"]["keys"] >= least, f"{least} keys have been demoted")


def only_on_disk(rank: Rank, keys: Keys, at_once: int = 1024) -> Keys:
    """Those of the keys that are on disk and not in memory."""
    states = np.concatenate([rank.states(keys[at : at + at_once]) for at in range(0, len(keys), at_once)])
    on_disk: Keys = keys[states == KeyState.PENDING]
    return on_disk


def served(
    rank: Rank, keys: Keys, at_once: int = 64, *, writes_wrong: bool = False
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Load all the keys, some at a time: which came. Asserts that what came is right, and the rest was left alone, but
    with `writes_wrong` for the blocks of keys that failed: a copy may have found out that they are wrong.
    """
    came = np.zeros(len(keys), bool)
    for start in range(0, len(keys), at_once):
        batch = keys[start : start + at_once]
        blocks = rank.blocks_of(0, 0, len(batch))
        rank.wipe()
        result = rank.load({0: (batch, blocks)})
        assert result.outcome in (Outcome.DONE, Outcome.PARTIAL), result
        good = np.ones(len(batch), bool)
        if result.outcome is Outcome.PARTIAL:
            good[result.failed[0]] = False
        assert rank.wrong(0, batch[good], blocks[good]) == 0
        rank.wipe_loaded(0, blocks if writes_wrong else blocks[good])
        assert rank.clean()
        came[start : start + len(batch)] = good
    return came


# --- files ---


def segments(root: Path) -> list[Path]:
    """Its files."""
    return sorted((root / "segments").iterdir())


@dataclass(frozen=True)
class Record:
    """Where a key's record lies. `payload_bytes` follow the header page."""

    key: bytes
    path: Path
    page: int
    payload_bytes: int

    @property
    def covered_bytes(self) -> int:
        """Bytes from its beginning whose loss is a loss: the header page and the payload, without the padding."""
        return PAGE_BYTES + self.payload_bytes

    @property
    def end_page(self) -> int:
        """The first page behind it."""
        return self.page + int(record_pages(np.array([self.payload_bytes]))[0])

    def flip(self, position: int) -> None:
        """Damage one byte of it."""
        flip(self.path, self.page * PAGE_BYTES + position)


def records(root: Path) -> dict[bytes, Record]:
    """All records of all segments, by key; the newest segment's of those that are there twice."""
    found: dict[bytes, Record] = {}
    numbers: dict[bytes, int] = {}
    for path in segments(root):
        if not is_segment_name(path.name):
            continue
        pages = np.fromfile(path, np.uint8)
        pages = pages[: len(pages) // PAGE_BYTES * PAGE_BYTES].reshape(-1, PAGE_BYTES)
        header = decode_segment_header(pages[0])
        if hasattr(header, "value"):
            continue  # made, but the write of its header failed
        likely = np.flatnonzero(pages[:, :8].copy().view("<u8")[:, 0] == RECORD_MAGIC)
        heads, valid = decode_records(pages[likely], header.uuid)
        number = header.number
        for page, head in zip(likely[valid].tolist(), heads[valid], strict=True):
            key = head["key"].tobytes()
            if numbers.get(key, -1) <= number:
                numbers[key] = number
                found[key] = Record(key, path, page, int(head["payload_bytes"]))
    return found


def records_of(root: Path, keys: Keys) -> list[Record]:
    """Returns the record of each of the keys."""
    known = records(root)
    return [known[key.tobytes()] for key in keys]


def flip_each(wanted: Sequence[Record], positions: Sequence[int]) -> None:
    """Damage one byte of each record."""
    for record, position in zip(wanted, positions, strict=True):
        record.flip(position)


class Switch:
    """The faults of a daemon's disks, see tiers/disk/faults.py; none at first."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "switch"

    def set(self, *lines: str) -> None:
        """Plants these faults, and no others, from now on."""
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines), encoding="utf-8")
        new.replace(self.path)
