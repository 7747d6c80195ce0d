"""What memory held before the daemon ended, in a systemd that keeps it."""

from __future__ import annotations

import subprocess

import pytest

from tests.service.conftest import SERVICE
from tests.service.container import Container
from tests.service.test_systemd import main_pid, python, restarted

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

KEYS = 48
WORKER = f"""
import sys
from pathlib import Path
import numpy as np
from tests.e2e.rank import Rank, new_keys
keys = new_keys(np.random.default_rng(5), {KEYS})
with Rank(Path("/run/kvoffloadd/kvoffloadd.sock"), num_blocks={KEYS + 16}) as rank:
    if sys.argv[1] == "store":
        rank.store_keys(keys)
        drained = rank.client.drain(deadline_s=20)
        print("sealed" if drained.unsealed == 0 else drained)
    else:
        held = max(rank.client.lookup({{0: keys.tobytes()}}).boundaries, default=0)
        print(held, held > 0 and rank.loads_right(keys))
"""


def work(container: Container, what: str) -> str:
    done = subprocess.run(
        python(container, "-c", WORKER, what), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("signal", ["KILL", "ABRT", ""])
def test_what_was_sealed_is_served_by_the_next_one(signal: str, service: Container) -> None:
    """This holds after a kill, after what the watchdog does, and after `systemctl restart`."""
    assert work(service, "store") == "sealed"
    pid = main_pid(service)
    if signal:
        service.run("kill", f"-{signal}", str(pid))
    else:
        service.run("systemctl", "restart", SERVICE)
    restarted(service, pid, 1 if signal else 0)
    assert work(service, "load") == f"{KEYS * 16} True"
    assert f"{KEYS} keys were taken over" in service.journal(SERVICE)
    assert service.show(SERVICE, "NFileDescriptorStore") == {"NFileDescriptorStore": "1"}


def test_a_stop_lets_the_memory_go(service: Container) -> None:
    assert work(service, "store") == "sealed"
    service.run("systemctl", "stop", SERVICE)
    assert service.show(SERVICE, "NFileDescriptorStore") == {"NFileDescriptorStore": "0"}
    service.run("systemctl", "start", SERVICE)
    assert work(service, "load") == "0 False"
