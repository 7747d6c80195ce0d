"""A store is committed or freed, and a lease released, in several turns of the loop: sessions and daemons that end
between two of them leave nothing half done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.testing.process import ROOT, module
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.e2e.daemons import make_daemon
from tests.e2e.rank import Keys, Rank, new_keys
from tests.e2e.sender import asked_of, blocks_of_one, fields
from tests.e2e.steps import STEP, HeldSteps, program
from tests.server.scene import Scene

pytestmark = pytest.mark.slow

Make = Callable[..., Daemon]
Spawn = Callable[..., subprocess.Popen[str]]

LAST = STEP - 20
"""Of what is admitted step by step, what comes first: the last keys."""

KEYS = 4 * STEP + LAST
MISS, HIT, PENDING = KeyState.MISS, KeyState.HIT, KeyState.PENDING


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), KEYS)


@pytest.fixture
def folder() -> Path:
    """The daemon's, which it takes with it."""
    return Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))


@pytest.fixture
def ends(folder: Path) -> HeldSteps:
    """Holds stores that are committed or freed."""
    return HeldSteps(folder / "ends")


@pytest.fixture
def requests(folder: Path) -> HeldSteps:
    """Holds what is reserved, and leases that end."""
    return HeldSteps(folder / "requests")


@pytest.fixture
def make(folder: Path, ends: HeldSteps, requests: HeldSteps) -> Iterator[Make]:
    """A daemon that can be held, with a memory file; audited and stopped at the end, if it lives."""
    made: list[Daemon] = []

    def start(*settings: str, faults: str = "") -> Daemon:
        pool = f"memory.pool_file={folder / 'pool'}"
        made.append(make_daemon(folder, pool, *settings, faults=faults, program=program(ends, requests)))
        return made[0]

    yield start
    for daemon in made:
        daemon.finish()


class Sender:
    """The child `tests.e2e.sender`, a session in the namespace of `salt`."""

    def __init__(self, daemon: Daemon, salt: str, instance: bytes) -> None:
        command = module("tests.e2e.sender", str(daemon.socket), salt, instance.hex(), str(KEYS))
        self._daemon = daemon
        self._child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._said() == "ready"

    def ask(self, kind: str) -> int:
        """Returns the lease."""
        return self._tell(f"ask {kind}")

    def begin(self, kind: str, lease: int = 0) -> None:
        """Begins a request without waiting for the reply."""
        self._tell(f"begin {kind} {lease}")

    def kill(self) -> None:
        """Returns when the daemon has seen it."""
        self.close()
        until(lambda: f"of pid {self._child.pid} ends: the peer died" in self._daemon.log(), "the daemon has seen it")

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _tell(self, line: str) -> int:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{line}\n")
        self._child.stdin.flush()
        return int(self._said())

    def _said(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def count(daemon: Daemon, name: str) -> int:
    """Returns a counter of the cache since its start."""
    return int(daemon.status()["cache"][name])


def in_use(daemon: Daemon) -> dict[str, int]:
    """What is charged for jobs and leases."""
    used = daemon.status()["accounts"].get(str(os.getuid()), {})
    return {name: used[name] for name in ("jobs", "job_bytes", "leases") if name in used}


def begun(daemon: Daemon, name: str) -> None:
    """Wait until the first step of a store's end is done; the audit finds nothing."""
    until(lambda: count(daemon, name) > 0, f"{name}: a step is done")
    assert count(daemon, name) == STEP
    assert daemon.verify() == ()


def nothing_left(daemon: Daemon) -> bool:
    """Returns whether nothing is left of the victim: no job, no lease, no memory, no session."""
    status = daemon.status()
    leases = sum(used.get("leases", 0) for used in status["accounts"].values())
    return not (status["running"]["jobs"] or leases or daemon.mapped("victim"))


def kill(daemon: Daemon, victim: subprocess.Popen[str]) -> None:
    """kill -9 between two steps. The job goes on, and keeps what it uses; the audit finds nothing."""
    victim.kill()
    victim.wait()
    until(lambda: f"of pid {victim.pid} ends: " in daemon.log(), "the daemon has seen it")
    throughout(lambda: daemon.status()["running"]["jobs"] == 1 and daemon.mapped("victim") == 1, "its job lives", 0.1)
    assert daemon.verify() == ()


# --- a worker is killed ----------------------------------------------------------------------------------------------


def test_a_worker_killed_while_its_store_is_committed(make: Make, spawn: Spawn, ends: HeldSteps, keys: Keys) -> None:
    """All bytes had been copied, so all keys are kept, and are right; nothing else of the worker is."""
    daemon = make()
    bystander = daemon.welcome(Rank(daemon.socket, num_blocks=KEYS))
    with ends:
        victim = spawn(daemon, "store", keys)
        begun(daemon, "parts_committed")
        kill(daemon, victim)
        assert bystander.states(keys) == [PENDING] * (KEYS - STEP) + [HIT] * STEP, "a prompt's beginning comes last"
    until(lambda: nothing_left(daemon), "nothing of it is left")
    assert bystander.states(keys) == [HIT] * KEYS
    assert bystander.loads_right(keys)
    until(lambda: count(daemon, "unsealed") == 0, "all is sealed")
    assert count(daemon, "parts_sealed") == KEYS


def test_a_worker_killed_while_its_failed_store_is_freed(make: Make, spawn: Spawn, ends: HeldSteps, keys: Keys) -> None:
    daemon = make(faults="fail_every=1")
    bystander = daemon.welcome(Rank(daemon.socket))
    with ends:
        victim = spawn(daemon, "store", keys)
        begun(daemon, "parts_aborted")
        kill(daemon, victim)
        assert bystander.states(keys) == [PENDING] * (KEYS - STEP) + [MISS] * STEP
    until(lambda: nothing_left(daemon), "nothing of it is left")
    assert bystander.states(keys) == [MISS] * KEYS
    assert daemon.status()["memory"]["used_bytes"] == 0


def test_a_goodbye_while_a_store_is_committed(make: Make, ends: HeldSteps) -> None:
    """It is answered behind the store's end, which the worker hears of."""
    daemon = make()
    scene = Scene(daemon, "goodbye")
    before = count(daemon, "parts_committed")
    job = scene.new_job()
    with ends:
        scene.peer.ok("store", job=job, registration=scene.registration, groups=blocks_of_one(KEYS))
        until(lambda: count(daemon, "parts_committed") == before + STEP, "a step is done")
        bye = scene.peer.begin("bye")
        throughout(lambda: daemon.sessions() and daemon.mapped("bad_input") == 1, "its session waits", 0.1)
    completed, done = scene.peer.end()
    assert (completed["type"], completed["job"], completed["outcome"]) == ("completed", job, "done")
    assert (done["type"], done["seq"]) == ("done", bye)
    until(lambda: not daemon.sessions() and daemon.mapped("bad_input") == 0, "nothing of it is left")


# --- a clear ---------------------------------------------------------------------------------------------------------


def test_a_clear_while_a_store_is_committed(make: Make, ends: HeldSteps) -> None:
    """The worker saw the store as running: what was committed before the clear is not there either."""
    daemon = make()
    scene = Scene(daemon, "clear")
    before, job = count(daemon, "parts_committed"), scene.new_job()
    with ends:
        scene.peer.ok("store", job=job, registration=scene.registration, groups=blocks_of_one(KEYS))
        until(lambda: count(daemon, "parts_committed") == before + STEP, "a step is done")
        scene.stranger().ok("clear")
        assert daemon.verify() == ()
    completed = scene.peer.completed(job)
    assert completed["outcome"] == "partial"
    assert np.frombuffer(completed["failed"][0], "<u4").tolist() == list(range(KEYS))
    assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [bytes(KEYS)]
    assert daemon.status()["memory"]["used_bytes"] == 0


# --- the daemon ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drain_s", [600, 0.05], ids=["drains", "drains no longer"])
def test_a_daemon_that_is_stopped_while_a_store_is_committed(
    make: Make, ends: HeldSteps, keys: Keys, drain_s: float
) -> None:
    """The worker hears of the store's end, and the next daemon has all of it."""
    daemon = make(f"server.drain_s={drain_s}")
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=KEYS, reconnect=False))
    with ends:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, KEYS))})
        begun(daemon, "parts_committed")
        daemon.signal(signal.SIGTERM)
        until(lambda: "draining: 1 jobs" in daemon.log(), "the drain has begun")
        if drain_s < 1:
            until(lambda: "ends: the daemon shuts down" in daemon.log(), "it waits no longer")
        throughout(lambda: daemon.alive, "it waits for the job", 0.1)
    assert rank.wait(job).outcome is Outcome.DONE
    assert daemon.wait() == 0
    daemon.leave_guests()
    daemon.start()
    assert count(daemon, "keys_adopted") == KEYS
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=KEYS))
    assert rank.loads_right(keys)


def test_a_daemon_that_is_stopped_while_a_failed_store_is_freed(make: Make, ends: HeldSteps, keys: Keys) -> None:
    daemon = make(faults="fail_every=1")
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=KEYS, reconnect=False))
    with ends:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, KEYS))})
        begun(daemon, "parts_aborted")
        daemon.signal(signal.SIGTERM)
        until(lambda: "draining: 1 jobs" in daemon.log(), "the drain has begun")
    assert rank.wait(job).outcome is Outcome.FAILED
    assert daemon.wait() == 0
    daemon.leave_guests()
    daemon.start()
    assert (count(daemon, "keys_adopted"), daemon.status()["memory"]["used_bytes"]) == (0, 0)


def test_a_daemon_that_is_killed_while_a_store_is_committed(make: Make, ends: HeldSteps, keys: Keys) -> None:
    """The worker has no report that anything is stored, and the next daemon has none of it."""
    daemon = make()
    rank = daemon.welcome(Rank(daemon.socket, num_blocks=KEYS, reconnect=False))
    with ends:
        job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, KEYS))})
        begun(daemon, "parts_committed")
        daemon.kill()
        assert rank.wait(job).outcome is Outcome.LOST
    daemon.leave_guests()
    daemon.start()
    assert (count(daemon, "keys_adopted"), daemon.status()["memory"]["used_bytes"]) == (0, 0)
    assert daemon.welcome(Rank(daemon.socket)).states(keys) == [MISS] * KEYS


# --- leases ----------------------------------------------------------------------------------------------------------


def charged(daemon: Daemon) -> int:
    """Returns what leases are charged."""
    return in_use(daemon).get("leases", 0)


def test_a_lease_that_two_sessions_release(make: Make, requests: HeldSteps) -> None:
    """The second finds some of it left. The first is killed before it is answered: its release goes on all the same."""
    daemon = make()
    scene = Scene(daemon, "two releases")
    first = daemon.welcome(Sender(daemon, scene.salt, scene.instance))
    lease = scene.peer.ok("reserve", groups=asked_of(KEYS))["lease"]
    assert charged(daemon) == LEASE_KEYS + KEYS
    with requests:
        first.begin("release", lease)
        until(lambda: daemon.status()["leases"]["parts"] == KEYS - STEP, "the first step is done")
        first.kill()
        assert daemon.verify() == ()
        again = scene.peer.begin("release", lease=lease)
        until(lambda: daemon.status()["leases"]["parts"] == KEYS - 2 * STEP, "one more is")
        assert daemon.verify() == ()
    assert scene.peer.answer(again)["type"] == "done"
    scene.peer.refused("bad_lease", "release", lease=lease)
    assert (daemon.status()["leases"]["parts"], charged(daemon)) == (0, 0)
    assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [bytes(KEYS)]


def test_a_release_whose_sender_is_killed_goes_on(make: Make, requests: HeldSteps) -> None:
    """The lease is the instance's, which lives."""
    daemon = make()
    scene = Scene(daemon, "released")
    first = daemon.welcome(Sender(daemon, scene.salt, scene.instance))
    lease = scene.peer.ok("reserve", groups=asked_of(KEYS))["lease"]
    with requests:
        first.begin("release", lease)
        until(lambda: daemon.status()["leases"]["parts"] == KEYS - STEP, "the first step is done")
        first.kill()
        until(lambda: len(daemon.sessions()) == 1, "its session is gone")
    until(lambda: charged(daemon) == 0, "the lease is, too")
    scene.peer.refused("bad_lease", "release", lease=lease)


@pytest.mark.parametrize("kind", ["pin", "reserve"])
def test_an_instance_that_is_killed_while_its_lease_is_released(make: Make, requests: HeldSteps, kind: str) -> None:
    """What is left of it is also the instance's end to release, and each row and slot goes once."""
    daemon = make()
    scene = Scene(daemon, "release and end")
    if kind == "pin":
        job = scene.job(groups=blocks_of_one(KEYS))
        scene.peer.ok("store", **job)
        assert scene.peer.completed(job["job"])["outcome"] == "done"
    holder = daemon.welcome(Sender(daemon, scene.salt, os.urandom(16)))
    lease = holder.ask(kind)
    left = {"pin": "keys", "reserve": "parts"}[kind]
    with requests:
        holder.begin("release", lease)
        until(lambda: daemon.status()["leases"][left] == KEYS - STEP, "the first step is done")
        holder.kill()
        until(lambda: daemon.status()["leases"][left] == KEYS - 2 * STEP, "its end has begun")
        assert daemon.verify() == ()
    until(lambda: charged(daemon) == 0, "nothing is held any more")
    assert daemon.status()["leases"][left] == 0
    assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [bytes([int(kind == "pin")]) * KEYS]


def test_a_daemon_that_is_stopped_while_a_lease_is_released(make: Make, requests: HeldSteps) -> None:
    daemon = make()
    scene = Scene(daemon, "release and stop")
    lease = scene.peer.ok("reserve", groups=asked_of(KEYS))["lease"]
    with requests:
        scene.peer.begin("release", lease=lease)
        until(lambda: daemon.status()["leases"]["parts"] == KEYS - STEP, "the first step is done")
        daemon.signal(signal.SIGTERM)
        until(lambda: "ends: the daemon shuts down" in daemon.log(), "it is about to end")
        throughout(lambda: daemon.alive, "it ends the lease first", 0.1)
    assert daemon.wait() == 0


# --- what is admitted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["store", "reserve"])
def test_a_session_that_is_killed_while_its_request_is_admitted(make: Make, requests: HeldSteps, kind: str) -> None:
    """Whatever it had reserved by then is free, and nothing is charged for it."""
    daemon = make()
    scene = Scene(daemon, "admitted")
    victim = daemon.welcome(Sender(daemon, scene.salt, os.urandom(16)))
    with requests:
        victim.begin(kind)
        one_step(daemon, requests)
        assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [bytes(KEYS - LAST) + b"\2" * LAST]
        assert daemon.verify() == ()
        victim.kill()
        until(lambda: len(daemon.sessions()) == 1 and not in_use(daemon), "it is gone, and so is what it had")
        assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [bytes(KEYS)]
        assert daemon.verify() == ()


@pytest.mark.parametrize("kind", ["store", "reserve"])
def test_a_daemon_that_is_stopped_while_a_request_is_admitted(make: Make, requests: HeldSteps, kind: str) -> None:
    daemon = make()
    scene = Scene(daemon, "admitted")
    with requests:
        scene.peer.begin(kind, **fields(scene, kind, KEYS))
        one_step(daemon, requests)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.says("draining: 0 jobs")


def one_step(daemon: Daemon, requests: HeldSteps) -> None:
    """Wait until one step of a request has been reserved, in addition to what `Scene` has stored."""
    requests.pass_until(lambda: count(daemon, "parts_reserved") > 4)
    assert count(daemon, "parts_reserved") == 4 + LAST


# --- what is found ---------------------------------------------------------------------------------------------------


def stored(scene: Scene) -> None:
    job = scene.job(groups=blocks_of_one(KEYS))
    scene.peer.ok("store", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "done"


def finding(daemon: Daemon) -> None:
    """Wait until a load is charged that is no job yet."""
    until(lambda: in_use(daemon).get("jobs") == 1, "its keys are looked for")
    assert daemon.status()["running"]["jobs"] == 0
    assert daemon.verify() == ()


def test_a_session_that_is_killed_while_its_load_is_found(make: Make, requests: HeldSteps) -> None:
    """Nothing is held for it any more, and nothing charged."""
    daemon = make()
    scene = Scene(daemon, "found")
    stored(scene)
    victim = daemon.welcome(Sender(daemon, scene.salt, os.urandom(16)))
    with requests:
        requests.let_pass(2)
        victim.begin("load")
        finding(daemon)
        victim.kill()
        until(lambda: len(daemon.sessions()) == 1 and not in_use(daemon), "it is gone, and so is what it had")
        assert daemon.verify() == ()
    assert scene.peer.ok("lookup", groups=asked_of(KEYS))["states"] == [b"\1" * KEYS]


def test_a_clear_while_a_load_is_found(make: Make, requests: HeldSteps) -> None:
    """It loads nothing of what was cleared, found before or not."""
    daemon = make()
    scene = Scene(daemon, "found and cleared")
    stored(scene)
    with requests:
        requests.let_pass(2)
        job = fields(scene, "load", KEYS)
        load = scene.peer.begin("load", **job)
        finding(daemon)
        scene.stranger().ok("clear")
        assert daemon.verify() == ()
    assert scene.peer.answer(load)["states"] == [bytes(KEYS)]
    completed = scene.peer.completed(job["job"])
    assert np.frombuffer(completed["failed"][0], "<u4").tolist() == list(range(KEYS))
    assert daemon.status()["memory"]["used_bytes"] == 0


def test_a_daemon_that_is_stopped_while_a_load_is_found(make: Make, requests: HeldSteps) -> None:
    daemon = make()
    scene = Scene(daemon, "found")
    stored(scene)
    with requests:
        scene.peer.begin("load", **fields(scene, "load", KEYS))
        finding(daemon)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert daemon.says("draining: 0 jobs")
