"""Tests what a soak of several hosts learns of clears: sentinels see what is older, and daemons survive a vandal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.agentwire.names import marker_name, pointer_name
from kvoffloadd.cache.remote.era import Era, decode_era, encode_era, new_era
from kvoffloadd.client import NamespaceSpec
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.disk import ManifestTrap
from scripts.harness.lab import Host
from scripts.soak.sentinel import PAYLOAD_BYTES, Sentinel, contents, read
from scripts.soak.sentinels import Sentinels, TrialPlan, fingerprint_of
from scripts.soak.vandal import Vandal
from tests.e2e.sharedstore import SharedStore

KEYS = np.random.default_rng(1).integers(0, 256, (8, 32), np.uint8)
SPEC = NamespaceSpec(model="sentinel")


def test_payloads_tell_their_version() -> None:
    payloads = np.concatenate([contents(KEYS[:4], 3), contents(KEYS[4:], 7)])
    assert payloads.shape == (8, PAYLOAD_BYTES)
    assert read(KEYS, payloads).versions.tolist() == [3] * 4 + [7] * 4
    payloads[1, -1] ^= 1
    payloads[6, 0] ^= 1
    found = read(KEYS, payloads)
    assert (found.versions.tolist(), found.wrong) == ([3] * 3 + [7] * 3, 2)
    assert read(KEYS[::-1], contents(KEYS, 3)).wrong == 8, "another key's"


def test_a_sentinel_loads_what_was_stored(daemon: Daemon) -> None:
    engine = daemon.welcome(Sentinel(daemon.socket, SPEC, "kvo-sentinel"))
    assert not len(engine.load(KEYS, wait=True).versions)
    engine.store(KEYS[:6], 2)
    assert engine.load(KEYS, wait=True).versions.tolist() == [2] * 6
    engine.client.clear()
    assert not len(engine.load(KEYS, wait=True).versions)


@contextmanager
def sentinels(tmp_path: Path, *daemons: Daemon) -> Iterator[Sentinels]:
    hosts = cast(
        Any, [SimpleNamespace(daemon=daemon, go_down=lambda *, killed, d=daemon: d.kill()) for daemon in daemons]
    )
    rng = np.random.default_rng(1)
    made = Sentinels(hosts, ManifestTrap(tmp_path / "root"), tmp_path / "pool", rng, 60.0, lambda: None, 60.0)
    try:
        yield made
    finally:
        made.close()


def test_what_is_served_after_a_clear_is_counted(daemon: Daemon, tmp_path: Path) -> None:
    """A daemon that got no clear stands in for one that does not obey: what it serves counts too."""
    with sentinels(tmp_path, daemon) as made:
        made._look_at(0, 1)
        made._look_at(0, 1)
        assert made.report.fresh > 0
        assert json.loads(json.dumps(made.report.as_json()))["trials"] == {}
        assert made.report.served == 0
        watched = made.watched[1]
        watched.version = watched.floors[0] = watched.version + 1
        made._look_at(0, 1)
        assert made.report.served == len(watched.keys)
        assert watched.name in made.report.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        TrialPlan(0, clears=True, down=False, closed=False, killed=False, forgets=False, spoilt=False),
        TrialPlan(1, clears=True, down=True, closed=False, killed=True, forgets=False, spoilt=False),
        TrialPlan(1, clears=True, down=False, closed=True, killed=True, forgets=False, spoilt=False),
        TrialPlan(1, clears=False, down=True, closed=False, killed=True, forgets=False, spoilt=False),
    ],
    ids=lambda plan: plan.name,
)
def test_trials(store: SharedStore, start_daemon: Any, tmp_path: Path, plan: TrialPlan) -> None:
    """Two hosts have nothing but memory: the one that was down finds what the other one has put into the store."""
    with sentinels(tmp_path, *(start_daemon(*store.settings()) for _ in range(2))) as made:
        made._trial(plan)
        report = made.report
    assert (report.served, report.wrong, report.errors) == (0, 0, [])
    assert dict(report.trials) == {plan.name: 1}
    cleared = len(made.watched) if plan.clears else 0
    assert report.clears == len(report.heard_s) == cleared
    assert bool(report.kept) is not plan.clears


@pytest.fixture
def store(tmp_path: Path) -> SharedStore:
    return SharedStore(tmp_path)


def test_a_vandal_and_a_daemon_that_goes_on(store: SharedStore, start_daemon: Any, tmp_path: Path) -> None:
    """Every act, in turn: the daemon agrees with the store again when the vandal has left, and nothing has ended."""
    daemon = start_daemon(*store.settings())
    engine = daemon.welcome(Sentinel(daemon.socket, SPEC, "kvo-sentinel"))
    name = fingerprint_of(SPEC)
    vandal = Vandal(Host("127.0.0.1"), "memory", {"directory": str(store.path)}, tmp_path, np.random.default_rng(2))
    vandal._client = vandal._connected()
    until(lambda: any(daemon.status()["remote"]["eras"].values()), "it is in an era")
    try:
        for what, act in vandal._acts:
            for _ in range(3):
                engine.store(KEYS, 1)
                act(name)
            assert daemon.alive, what
        vandal._call("remove", [place for _, place in vandal._lasting])
        until(lambda: any(daemon.status()["remote"]["eras"].values()), "it is in an era again")
        until(lambda: "remote" not in engine.client.clear(wait_s=1.0).unrecorded, "and clears")
    finally:
        vandal.close()


def test_a_vandal_reads_the_path_that_daemons_take(tmp_path: Path) -> None:
    vandal = Vandal(Host("127.0.0.1"), "memory", {"directory": str(tmp_path)}, tmp_path, np.random.default_rng(2))
    name = fingerprint_of(SPEC)
    vandal._client = vandal._connected()
    try:
        era = new_era(Era(5, bytes(8)))
        vandal._write(pointer_name(name), encode_era(name, era))
        vandal._write(marker_name(name, era.generation, era.id), encode_era(name, era))
        assert vandal._path(name) == [era]
        vandal._chain(name)
        path = vandal._path(name)
        assert len(path) > 20
        assert path == sorted(path)
        assert decode_era(name, vandal._client.read(pointer_name(name))) == era
    finally:
        vandal.close()
