"""A worker that has done everything right so far, and a guard that what comes then changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.server.scene import Scene


@pytest.fixture
def scene(daemon: Daemon) -> Scene:
    """Makes a scene on the daemon that tests share, in a separate namespace."""
    made = Scene(daemon, os.urandom(8).hex())
    made.settle()
    return made


@pytest.fixture
def unchanged(scene: Scene) -> Iterator[Scene]:
    """The scene; at the end its daemon's state must be what it was, its session must work, the audit find nothing."""
    before = scene.daemon.state()
    yield scene
    # Descriptors and mappings of a request that failed go in the background.
    until(lambda: scene.daemon.state() == before, f"the state is again {before}; it is {scene.daemon.state()}")
    assert scene.daemon.verify() == ()
    assert scene.peer.ok("lookup", groups=[{"group": 0, "keys": bytes(32)}])["states"] == [b"\0"]
