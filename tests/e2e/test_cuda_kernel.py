"""Small rows by way of a staging buffer and a kernel: the bytes are right, and whatever fails is copied without it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, Ref
from kvoffloadd.trial.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import gpu_rank
from tests.e2e.gpu_rank import Where
from tests.e2e.rank import HYBRID, Rank, new_keys
from tests.e2e.small_rows import KEYS, roundtrip, roundtrips_that_may_fail

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

KERNEL = (
    "cuda.pitched_row_bytes=0",
    "cuda.kernel_row_bytes=1GiB",
    "cuda.kernel_chunk_bytes=1B",
    "cuda.staging_bytes=1MiB",
)
ODD = (
    Group(0, GroupKind.FULL, 16, refs=(Ref(0, 3, 257, 16, 300), Ref(1, 1, 4001)), blocks_per_key=2),
    Group(1, GroupKind.SLIDING, 32, refs=(Ref(1, 4003, 13, 9, 14), Ref(0, 4900, 41)), window_keys=2),
)
"""Rows of odd sizes at odd places."""
LAYOUTS = pytest.mark.parametrize("groups", [ODD, HYBRID], ids=["odd", "hybrid"])


@pytest.fixture(autouse=True)
def needs_software() -> None:
    gpu_rank.needs_soft("the kernel's stand-in for CuPy")


def driver(faults: str = "", **settings: Any) -> dict[str, Any]:
    return {"faults": faults, "cupy": True, **settings}


def kernel_chunks(daemon: Daemon) -> int:
    return int(daemon.gpus()[0]["kernel_chunks"])


@LAYOUTS
@pytest.mark.parametrize("kind", ["one", "each", "chunks"])
def test_every_layout(start_daemon: Start, seed: int, groups: tuple[Group, ...], kind: str) -> None:
    daemon = start_daemon(*KERNEL, driver=driver("packed,jitter_ns=200000,read_early"))
    roundtrip(daemon, groups, seed, kind=kind)
    assert kernel_chunks(daemon) == 2


def test_more_than_a_buffer_holds(start_daemon: Start, seed: int) -> None:
    """Chunks in turn through two buffers, which are written again and again."""
    daemon = start_daemon(*KERNEL, "cuda.staging_bytes=64KiB", driver=driver("jitter_ns=200000"))
    roundtrip(daemon, ODD, seed, keys=64)
    assert kernel_chunks(daemon) > 20


def test_payloads_that_lie_over_the_end_of_a_pinned_piece(start_daemon: Start, seed: int) -> None:
    """What crosses the link in one copy lies within one piece, though rows that lie side by side become one copy."""
    daemon = start_daemon(*KERNEL, "cuda.pin_bytes=84KiB", memory="4MiB", driver=driver())
    roundtrip(daemon, ODD, seed, keys=16)
    assert kernel_chunks(daemon) == 2


def test_one_row_a_key(start_daemon: Start, seed: int) -> None:
    """The sizes of all rows are one number, repeated without memory of its own; payloads are no neighbours."""
    daemon = start_daemon(*KERNEL, driver=driver())
    roundtrip(daemon, (Group(0, GroupKind.FULL, 16, refs=(Ref(0, 8, 3000),)),), seed)
    assert kernel_chunks(daemon) == 2


def test_a_buffer_of_the_least_size(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(*KERNEL, driver=driver())
    for round_ in range(3):
        roundtrip(daemon, ODD, seed + round_)
    assert kernel_chunks(daemon) == 6


@pytest.mark.parametrize("settings", [(), ("cuda.kernel_row_bytes=16KiB",)], ids=["off", "chunks too small"])
def test_not_unless_told_and_worth_it(start_daemon: Start, seed: int, settings: tuple[str, ...]) -> None:
    daemon = start_daemon(*settings, driver=driver())
    roundtrip(daemon, ODD, seed)
    assert kernel_chunks(daemon) == 0


@LAYOUTS
@pytest.mark.parametrize("faults", ["launch_error=1", "launch_error=719", "no_batch,launch_error=1"])
def test_a_kernel_that_is_refused_is_tried_once(
    start_daemon: Start, seed: int, groups: tuple[Group, ...], faults: str
) -> None:
    daemon = start_daemon(*KERNEL, driver=driver(faults))
    for round_ in range(3):
        roundtrip(daemon, groups, seed + round_)
    assert kernel_chunks(daemon) == 0
    until(lambda: daemon.log().count("the kernel for small rows does not work") >= 2, "it is told")  # each way
    assert daemon.log().count("the kernel for small rows does not work") == 2


@pytest.mark.skipif(bool(importlib.util.find_spec("cupy")), reason="CuPy, or what stands in for it, is here")
def test_without_cupy(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(*KERNEL, driver={"faults": ""})
    roundtrip(daemon, ODD, seed)
    assert kernel_chunks(daemon) == 0
    assert daemon.says("CuPy is not installed")


def test_a_gpu_without_room_for_the_buffer(start_daemon: Start, seed: int) -> None:
    daemon = start_daemon(*KERNEL, "cuda.staging_bytes=1GiB", driver=driver(memory_bytes=512 << 20))
    roundtrip(daemon, ODD, seed)
    assert kernel_chunks(daemon) == 0
    assert daemon.says("CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize("every", [3, 8])
def test_submissions_that_fail(start_daemon: Start, seed: int, every: int) -> None:
    daemon = start_daemon(*KERNEL, driver=driver(f"fail_submit_every={every}"))
    roundtrips_that_may_fail(daemon, ODD, seed)


def test_workers_die_while_rows_are_moved(start_daemon: Start, seed: int) -> None:
    """Their memory is unmapped when the kernel has ended: softcuda ends the process of who does so before."""
    daemon = start_daemon(*KERNEL, driver=driver("jitter_ns=20000000"))
    rng = np.random.default_rng(seed)
    for _ in range(5):
        with Rank(daemon.socket, groups=ODD, where=Where("cuda")) as rank:
            keys = {one.group: (new_keys(rng, KEYS), rank.blocks_of(one.group, 20 * one.group, KEYS)) for one in ODD}
            rank.begin_store(keys)
    until(lambda: not daemon.sessions() and daemon.gpus()[0]["mapped_bytes"] == 0, "all is unmapped")
    roundtrip(daemon, ODD, seed)
