"""Real stores, and engines on hosts of a lab."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.harness.lab import Lab, why_not_isolated
from scripts.harness.stores import why_no_mooncake, why_no_valkey
from tests.remote.cluster import Cluster, make_cluster
from tests.remote.site import Site, Start

HOSTS = 3
_NUMBERS = itertools.count()

ENGINES = [
    "memory",
    pytest.param("mooncake", marks=pytest.mark.remote),
    pytest.param("valkey", marks=pytest.mark.remote),
]
_WHY_NOT: dict[str, Callable[[], str]] = {"memory": str, "mooncake": why_no_mooncake, "valkey": why_no_valkey}


@pytest.fixture(scope="session")
def remote_folder() -> Iterator[Path]:
    """Makes a folder for logs."""
    with tempfile.TemporaryDirectory(prefix="kvo-remote-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def standing_clusters(remote_folder: Path) -> Iterator[dict[str, Cluster]]:
    """Makes clusters on the loopback device, one of each kind."""
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(remote_folder, HOSTS, isolated=False))
        made: dict[str, Cluster] = {}

        class Made(dict[str, Cluster]):
            def __missing__(self, kind: str) -> Cluster:
                folder = remote_folder / kind
                folder.mkdir()
                made[kind] = self[kind] = make_cluster(kind, lab, folder, stack)
                return made[kind]

        yield Made()


@pytest.fixture(params=ENGINES)
def cluster(request: pytest.FixtureRequest, standing_clusters: dict[str, Cluster]) -> Iterator[Cluster]:
    """Returns a cluster of each kind of engine, shared with other tests: use names that begin with `prefix`."""
    if reason := _WHY_NOT[request.param]():
        pytest.skip(reason)
    cluster = standing_clusters[request.param]
    yield cluster
    cluster.leave()


@pytest.fixture
def prefix() -> str:
    """Returns a prefix of names that no other test has."""
    return f"kvo1/test{next(_NUMBERS)}/"


@pytest.fixture
def make_isolated(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """`make_isolated("mooncake", *options)`: a cluster of the test's own on hosts that can be cut off."""
    with ExitStack() as stack:

        def make(kind: str, *options: str) -> Cluster:
            if reason := why_not_isolated():
                pytest.skip(reason)
            return make_own(kind, tmp_path, stack, options, isolated=True)

        yield make


@pytest.fixture
def make_loopback(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """The same on the loopback device."""
    with ExitStack() as stack:
        yield lambda kind, *options: make_own(kind, tmp_path, stack, options, isolated=False)


def make_own(kind: str, folder: Path, stack: ExitStack, options: Sequence[str], *, isolated: bool) -> Cluster:
    """Ended with `stack`."""
    if reason := _WHY_NOT[kind]():
        pytest.skip(reason)
    lab = stack.enter_context(Lab(folder, HOSTS, isolated=isolated))
    cluster = make_cluster(kind, lab, folder, stack, *options)
    stack.callback(cluster.leave)
    return cluster


@pytest.fixture
def site(make_isolated: Callable[..., Cluster], start_daemon: Start, tmp_path: Path) -> Callable[[str], Site]:
    return lambda kind: Site(make_isolated(kind), start_daemon, tmp_path)
