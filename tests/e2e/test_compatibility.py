"""The release before this one: its daemon with today's client, its client with today's daemon, and what it left behind.

The wire, the disk format and the arena file are the same on both sides, so each takes over from the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import digest_layers
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk_settings, group_of, idle, only_on_disk, served, store_all
from tests.e2e.rank import Rank, new_keys

pytestmark = pytest.mark.slow

BEFORE = "ef862f4e6ba4e0d30f65c76545a1af15611255b6"
"""The commit before the redesign."""

HAND_OVER = """
import sys
sys.path[0] = {!r}
import kvoffloadd
kvoffloadd.__file__.startswith(sys.path[0]) or sys.exit("another package")
from kvoffloadd.cli import main
sys.exit(main())
"""
Start = Callable[..., Daemon]
SIDES = ("before", "now")


@pytest.fixture(scope="session")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that commit's package, without its C helper: numpy does the work."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed: what was before can't be had")
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE, "kvoffloadd"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this checkout does not have commit {BEFORE[:7]}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@pytest.fixture
def program(before: Path) -> dict[str, tuple[str, ...]]:
    """What Python runs as a daemon, by side."""
    return {"before": ("-c", HAND_OVER.format(str(before))), "now": ("-m", "kvoffloadd")}


@pytest.fixture
def arena_file(tmp_path: Path) -> Iterator[Path]:
    """Where memory files lie, if there is such a place."""
    path = Path(f"/dev/shm/kvoffloadd-test-compatibility-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        path = tmp_path / "pool"
    yield path
    path.unlink(missing_ok=True)


def test_todays_client_with_the_daemon_before(
    start_daemon: Start, program: dict[str, tuple[str, ...]], seed: int
) -> None:
    daemon = start_daemon(program=program["before"])
    keys = new_keys(np.random.default_rng(seed), 200)
    (group,) = group_of(9000)
    ref = replace(group.refs[0], dtype="bfloat16", layers=digest_layers(["l0"]))
    rank = daemon.welcome(Rank(daemon.socket, [replace(group, refs=[ref])]))
    store_all(rank, keys)
    assert served(rank, keys).all()
    lease = rank.client.pin({0: keys}).lease
    rank.client.release(lease)
    assert rank.client.drain(20.0).unsealed == 0
    cleared = rank.client.clear(wait_s=1.0)
    assert (cleared.keys, cleared.unrecorded) == (200, ())
    assert not served(rank, keys).any()


CLIENT = """
import sys
sys.path[0] = sys.argv[1]
import numpy as np
import kvoffloadd
from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Outcome, Ref, SharedTensor
assert kvoffloadd.__file__.startswith(sys.argv[1])
tensor = SharedTensor.allocate(num_blocks=64, page_bytes=8192)
group = Group(group=0, kind=GroupKind.FULL, tokens_per_key=16, refs=[Ref(tensor=0, offset=0, length=8192)])
rng = np.random.default_rng(int(sys.argv[3]))
keys, blocks = rng.integers(0, 256, (64, 32), dtype=np.uint8), np.arange(64)
with Client(sys.argv[2], namespace=NamespaceSpec(model="before"), role="worker") as client:
    registration = client.register(KvCache([tensor], [group]))
    tensor.array[:] = rng.integers(0, 256, tensor.array.shape, dtype=tensor.array.dtype)
    wanted = tensor.array.copy()
    assert client.wait(client.store(registration, {0: (keys, blocks)}), 20.0).outcome is Outcome.DONE
    found = client.pin({0: keys})
    assert found.boundaries[0] == 64 * 16
    tensor.array[:] = 0
    assert client.wait(client.load(registration, {0: (keys, blocks)}, lease=found.lease), 20.0).outcome is Outcome.DONE
    assert (tensor.array == wanted).all()
    client.release(found.lease)
    client.drain(20.0)
    assert client.clear().keys == 64
    assert len(client.lookup({0: keys}).boundaries) == 0
print("right")
"""


def test_the_client_before_with_todays_daemon(start_daemon: Start, before: Path, seed: int) -> None:
    daemon = start_daemon()
    command = [sys.executable, "-c", CLIENT, str(before), str(daemon.socket), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr


@pytest.mark.parametrize(("first", "second"), [SIDES, SIDES[::-1]])
def test_what_one_left_the_other_serves(
    start_daemon: Start,
    program: dict[str, tuple[str, ...]],
    arena_file: Path,
    tmp_path: Path,
    seed: int,
    first: str,
    second: str,
) -> None:
    """What is in memory is taken over from the arena file, what is on disk alone is found there."""
    settings = (f"memory.pool_file={arena_file}", *disk_settings((tmp_path, 64 * MIB)))
    daemon = start_daemon(*settings, memory="4MiB", program=program[first])
    keys = new_keys(np.random.default_rng(seed), 600)  # 9,000 bytes each: more than memory has room for
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    for at in range(0, len(keys), 100):
        store_all(rank, keys[at : at + 100])
        idle(daemon)
    assert len(only_on_disk(rank, keys)) > 100
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.program = program[second]
    daemon.start()
    assert daemon.status()["cache"]["keys_adopted"] > 100
    rank = daemon.welcome(Rank(daemon.socket, group_of(9000)))
    assert len(only_on_disk(rank, keys)) > 100
    assert served(rank, keys).all()
