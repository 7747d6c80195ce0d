"""Every check of a layout's bytes is done twice: by hand, and through a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

import pytest

from scripts.harness.daemon import Daemon


@pytest.fixture(autouse=True)
def through_a_daemon(daemon: Daemon) -> Iterator[None]:
    if find_spec("torch") is None:
        yield
        return
    from tests.layout.oracle import MOVERS, ByDaemon

    MOVERS.append(partial(ByDaemon, daemon.socket))
    yield
    MOVERS.pop()
