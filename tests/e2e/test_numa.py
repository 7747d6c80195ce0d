"""Tests where the memory tier's pages come from, by the kernel's report on a real daemon. One node is enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.testing.process import DaemonError
from scripts.harness.daemon import Daemon

Start = Callable[..., Daemon]

if not Path("/proc/self/numa_maps").exists():
    pytest.skip("this kernel knows no NUMA", allow_module_level=True)


def pool_policy(daemon: Daemon) -> str:
    """The policy of the arena."""
    lines = Path(f"/proc/{daemon.pid}/numa_maps").read_text(encoding="utf-8").splitlines()
    return next(line.split()[1] for line in lines if "kvoffloadd-arena" in line)


@pytest.mark.slow
def test_memory_is_spread_over_nodes_that_are_asked_for(start_daemon: Start) -> None:
    daemon = start_daemon("memory.numa=[0]")
    assert pool_policy(daemon) == "interleave:0"
    assert daemon.says("spread over NUMA nodes 0")


@pytest.mark.parametrize("asked", ["auto", "off"])
def test_a_machine_with_one_node_is_left_alone(start_daemon: Start, asked: str) -> None:
    if Path("/sys/devices/system/node/node1").exists() and asked == "auto":
        pytest.skip("this machine has several")
    daemon = start_daemon(f"memory.numa={asked}")
    assert pool_policy(daemon) == "default"
    assert "NUMA" not in daemon.log()


def test_nodes_without_memory_are_refused(start_daemon: Start) -> None:
    with pytest.raises(DaemonError, match=r"memory\.numa = \[0, 1000\]: node 1000 has no memory .*; these have: 0"):
        start_daemon("memory.numa=[0,1000]")
