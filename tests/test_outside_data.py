"""Tests decoders with data from outside: from any data of a store, a disk, an earlier run or a peer, each decoder makes
a value within its bounds or raises its own error, and none of that data makes the cache raise. Also:
`test_last_numbers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.cache.disktier import Tier
from tests.outside.changes import Take
from tests.outside.disks import changed_root_segment, manifests, segments
from tests.outside.earlier import names_of_the_arena, saved_claims, saved_states, slot_records
from tests.outside.peers import protocol, replies
from tests.outside.stores import eras, frames_of_the_agent, frames_of_the_daemon, headers
from tests.storage.disk.builders import Folder

FINGERPRINT = b"n" * 16


@dataclass(frozen=True)
class Source:
    take: Take
    times: int


SOURCES = {
    "eras": Source(eras, 2000),
    "headers of objects": Source(headers, 1500),
    "frames of the agent": Source(frames_of_the_agent, 800),
    "frames of the daemon to its agent": Source(frames_of_the_daemon, 1500),
    "manifests": Source(manifests, 1500),
    "saved states": Source(saved_states, 150),
    "saved claims": Source(saved_claims, 150),
    "slot records": Source(slot_records, 60),
    "names of the arena": Source(names_of_the_arena, 40),
    "frames of clients": Source(protocol(by_client=True), 1000),
    "frames of daemons": Source(protocol(by_client=False), 1000),
    "replies": Source(replies, 1000),
}


def fuzz(take: Take, times: int, seed: int) -> None:
    for number in range(times):
        try:
            take(Random(f"{seed} {number}"))
        except BaseException as error:
            error.add_note(f"case {number} of seed {seed}")
            raise


@pytest.mark.parametrize("name", SOURCES)
def test_what_comes_is_within_bounds_or_refused(name: str, seed: int) -> None:
    fuzz(SOURCES[name].take, SOURCES[name].times, seed)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "segments")
    yield made
    made.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_what_segments_say_is_within_bounds_or_refused(folder: Folder, seed: int, sealed: bool) -> None:
    fuzz(segments(folder, sealed), 150, seed)


async def test_a_start_takes_whatever_segments_say(open_tier: Open, seed: int) -> None:  # noqa: F811
    """They go into the catalog, and through lookups, reads, a clear and an end."""
    tier = await open_tier()
    keyspace = tier.keyspace(FINGERPRINT, sizes=(1, 4096))
    await tier.store_away(keyspace, *range(8))
    await tier.close()
    folder = tier.root.path / "segments"
    right = {path: path.read_bytes() for path in folder.iterdir()}
    for number in range(12):
        rng = Random(f"{seed} {number}")
        for path, raw in right.items():
            path.write_bytes(changed_root_segment(rng, raw))
        tier = await open_tier()
        keyspace = tier.keyspace(FINGERPRINT, sizes=(1, 4096))
        assert await tier.fetch(keyspace, *range(8)) == tier.served(keyspace, *range(8)), f"case {number}"
        await tier.store_away(keyspace, *range(8, 12))
        assert tier.audit() == [], f"case {number}"
        await end(tier)


async def end(tier: Tier) -> None:
    await tier.clear()
    await tier.close()
