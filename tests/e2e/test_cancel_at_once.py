"""A job and its cancel in one write, where the job's signal has come long before."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from scripts.harness.daemon import Daemon
from scripts.harness.peer import frame
from tests.server.scene import FULL, Scene

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_cancel_right_behind_its_job_ends_the_job_alone(start_daemon: Start, kind: str) -> None:
    daemon = start_daemon()
    scene = Scene(daemon, "cancel at once")
    fd = create_memfd("signal", 4096)
    try:
        os.pwrite(fd, struct.pack("<Q", 5), 0)
        (signal,) = scene.peer.attach([fd])
    finally:
        os.close(fd)
    registration = scene.peer.ok("register", tensors=[scene.tensor], groups=[FULL], signals=[signal])["registration"]
    scene.peer.ok("store", **scene.job())
    for number in range(20):
        job = scene.job(registration=registration, ready={"signal": 0, "offset": 0, "value": 1})
        asked = frame({"type": kind, "seq": 900 + 2 * number, **job})
        scene.peer.send(asked + frame({"type": "cancel", "seq": 901 + 2 * number, "job": job["job"]}))
    scene.peer.ok("ping")
    assert daemon.alive
