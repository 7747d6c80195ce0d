"""Every cap: what is above it is refused with `limit` or `busy`, changes nothing, and is taken once there is room."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator

import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.errors import LimitError
from kvoffloadd.server.peers.account import Accounts
from kvoffloadd.server.session.registration import NAMED_COST, PLAN_BASE
from kvoffloadd.testing.leaks import UID
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields, RawPeer
from tests.e2e.daemons import Hold
from tests.server.scene import FULL, Scene, ids, keys

Start = Callable[..., Daemon]
LEASES = 2 * LEASE_KEYS + 8
"""Two leases of eight keys."""


@pytest.fixture
def capped(standing: Start, hold: Hold) -> Daemon:
    """Small caps, and copies that can be held."""
    return standing(
        "limits.sessions=4", "limits.jobs=3", "limits.jobs_per_session=2", "limits.mapped_bytes=1MiB", "limits.fds=4",
        f"limits.leases={LEASES}", "limits.keys_per_request=16", "limits.tensors_per_registration=2",
        faults=hold.fault,
    )  # fmt: skip


@pytest.fixture
def scene(capped: Daemon) -> Scene:
    made = Scene(capped, "caps")
    made.settle()
    return made


@pytest.fixture
def memory() -> Iterator[int]:
    """512 KiB: two of them are more than what the scene leaves."""
    fd = os.memfd_create("caps")
    os.ftruncate(fd, 1 << 19)
    yield fd
    os.close(fd)


def test_a_charge_is_made_whole_or_not_at_all() -> None:
    account = Accounts({"job_bytes": 100, "jobs": 1}).of(UID)
    account.charge(job_bytes=60, jobs=1)
    for excess in ({"job_bytes": 10, "jobs": 1}, {"jobs": 0, "job_bytes": 41}):
        with pytest.raises(LimitError):
            account.charge(**excess)
        assert account.used == {"job_bytes": 60, "jobs": 1}
    account.refund(job_bytes=60, jobs=1)
    assert account.used == {"job_bytes": 0, "jobs": 0}


def test_what_all_users_have_together_is_shared() -> None:
    """Only root and the daemon's own user may take what the next one needs."""
    accounts = Accounts({"fds": 900}, {"mappings": 1000}, {UID})
    trusted, first, second = (accounts.of(uid) for uid in (UID, UID + 1, UID + 2))
    first.charge(mappings=500, fds=500)
    with pytest.raises(
        LimitError, match=rf"^uid {UID + 1} uses 500 mappings; 1 more would exceed its share of the 1000"
    ):
        first.charge(mappings=1)
    second.charge(mappings=250)
    with pytest.raises(LimitError, match=r"vm\.max_map_count"):
        second.charge(mappings=1, fds=1)
    trusted.charge(mappings=250)
    with pytest.raises(LimitError):
        trusted.charge(mappings=1)
    with pytest.raises(LimitError):
        accounts.of(UID + 3).charge(mappings=1)
    first.refund(mappings=500)
    trusted.charge(mappings=499)
    second.charge(mappings=0)
    assert second.used == {"mappings": 250}
    for account in (trusted, first, second):
        account.refund(**account.used)
    assert accounts.leaks() == []


def used(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["accounts"][str(UID)]
    return found


def test_sessions(capped: Daemon) -> None:
    peers = [capped.peer() for _ in range(3)]  # the observer is the fourth
    for peer in peers:
        peer.hello()
    assert "4 of 4 sessions" in capped.peer().turned_away("limit")
    assert used(capped) == {"sessions": 4}
    peers[0].close()
    until(lambda: used(capped)["sessions"] == 3, "the session is given back")
    capped.peer().hello()


def test_sessions_without_a_hello_count(capped: Daemon) -> None:
    silent = [capped.peer() for _ in range(3)]
    until(lambda: used(capped)["sessions"] == 4, "they are accepted")
    assert "sessions" in capped.peer().turned_away("limit")
    for peer in silent:
        peer.close()
    until(lambda: used(capped)["sessions"] == 1, "they are gone")


def second_rank(scene: Scene) -> tuple[RawPeer, int]:
    """Opens another session with a separate registration."""
    other = scene.session()
    fd = os.memfd_create("caps_second")
    os.ftruncate(fd, 1 << 16)
    (allocation,) = other.attach([fd])
    os.close(fd)
    tensors = [{**scene.tensor, "allocation": allocation, "num_blocks": 8}]
    return other, int(other.ok("register", tensors=tensors, groups=[FULL])["registration"])


def test_jobs_of_a_session_and_of_a_user(scene: Scene, hold: Hold) -> None:
    other, registration = second_rank(scene)
    loads = [scene.job(groups=[{"group": 0, "keys": keys(n), "blocks": ids(n)}]) for n in (1, 2, 3)]
    with hold:
        for load in loads[:2]:
            scene.peer.ok("load", **load)
        assert "2 jobs are under way in this session" in scene.peer.refused("limit", "load", **loads[2])
        other.ok("load", **{**loads[2], "registration": registration})
        fourth = {**loads[2], "registration": registration, "job": 77}
        assert "3 of 3 jobs" in other.refused("limit", "load", **fourth)
        other.refused("limit", "store", **{**fourth, "groups": [{"group": 0, "keys": keys(9), "blocks": ids(0)}]})
        assert used(scene.daemon)["jobs"] == 3
    for load in loads[:2]:
        assert scene.peer.completed(load["job"])["outcome"] == "done"
    assert other.completed(loads[2]["job"])["outcome"] == "done"
    assert other.ok("lookup", groups=[{"group": 0, "keys": keys(9)}])["states"] == [b"\0"]
    other.ok("load", **fourth)
    assert other.completed(77)["outcome"] == "done"


def test_a_job_id_in_use(scene: Scene, hold: Hold) -> None:
    load = scene.job(groups=[{"group": 0, "keys": keys(1), "blocks": ids(5)}])
    with hold:
        scene.peer.ok("load", **load)
        before = scene.daemon.state()
        assert "is in use" in scene.peer.refused("duplicate", "load", **load)
        store = {**load, "groups": [{"group": 0, "keys": keys(9), "blocks": ids(6)}]}
        scene.peer.refused("duplicate", "store", **store)
        assert {**scene.daemon.state(), "devices": 0} == {**before, "devices": 0}
    assert scene.peer.completed(load["job"])["outcome"] == "done"
    scene.peer.ok("load", **load)  # free again
    assert scene.peer.completed(load["job"])["outcome"] == "done"


def test_mapped_bytes(scene: Scene, memory: int) -> None:
    before = scene.daemon.state()
    assert "mapped_bytes" in scene.peer.refused("limit", "attach", rights=[memory] * 2, kind="shm", fds=2)
    until(lambda: scene.daemon.state() == before, "nothing is mapped, nothing is charged")
    until(lambda: scene.daemon.mapped("caps") == 0, "nothing is mapped")
    assert scene.peer.attach([memory])


def test_descriptors(scene: Scene) -> None:
    fd = os.memfd_create("caps_small")
    os.ftruncate(fd, 4096)
    before = scene.daemon.state()
    assert "of 4 fds" in scene.peer.refused("limit", "attach", rights=[fd] * 4, kind="shm", fds=4)
    until(lambda: scene.daemon.state() == before, "nothing is mapped, nothing is charged")
    assert len(scene.peer.attach([fd] * 3)) == 3
    os.close(fd)


def asked(*numbers: int) -> Fields:
    return {"groups": [{"group": 0, "keys": keys(*numbers)}]}


def test_leases(scene: Scene) -> None:
    peer = scene.peer
    lease = peer.ok("pin", **asked(1, 2, 3, 4))["lease"]
    before = scene.daemon.state()
    peer.refused("limit", "reserve", **asked(5, 6, 7, 8, 9))
    assert peer.ok("lookup", **asked(5))["states"] == [b"\0"]
    assert scene.daemon.state() == before
    reserved = peer.ok("reserve", **asked(5, 6, 7))["lease"]
    assert "leases" in peer.refused("limit", "pin", **asked(1, 2))
    assert used(scene.daemon)["leases"] == 2 * LEASE_KEYS + 7
    peer.ok("release", lease=lease)
    peer.ok("release", lease=reserved)
    assert "leases" not in used(scene.daemon)
    peer.ok("release", lease=peer.ok("pin", **asked(1, 2, 3, 4, 1, 2, 3, 4))["lease"])


def test_a_lease_that_has_been_filled(scene: Scene) -> None:
    """It is there until its release, and counts."""
    peer = scene.peer
    lease = peer.ok("reserve", **asked(5, 6))["lease"]
    for number in (5, 6):
        job = scene.job(lease=lease, groups=[{"group": 0, "keys": keys(number), "blocks": ids(number)}])
        peer.ok("store", **job)
        assert peer.completed(job["job"])["outcome"] == "done"
    assert used(scene.daemon)["leases"] == LEASE_KEYS
    assert scene.daemon.status()["leases"] == {"read": 0, "keys": 0, "write": 1, "parts": 0}
    peer.ok("pin", **asked(1))
    peer.refused("limit", "pin", **asked(*[2] * 8))
    peer.ok("release", lease=lease)
    peer.ok("pin", **asked(*[2] * 7))
    assert used(scene.daemon)["leases"] == 2 * LEASE_KEYS + 8


def test_keys_of_a_request(scene: Scene) -> None:
    peer = scene.peer
    before = scene.daemon.state()
    for tag in ("lookup", "prefetch", "touch", "pin", "reserve"):
        assert "the cap is 16" in peer.refused("limit", tag, **asked(*range(100, 117)))
    both = [{"group": n, "keys": keys(*range(100, 109))} for n in (0, 1)]
    peer.refused("limit", "lookup", groups=both)
    many = [{"group": 0, "keys": keys(*range(100, 117)), "blocks": ids(*[0] * 17)}]
    for tag in ("store", "load"):
        assert "the cap is 16" in peer.refused("limit", tag, **scene.job(groups=many))
    assert scene.daemon.state() == before
    peer.ok("lookup", **asked(*range(100, 116)))


def test_tensors_of_a_registration(scene: Scene) -> None:
    before = scene.daemon.state()
    assert "the cap is 2" in scene.peer.refused("limit", "register", tensors=[scene.tensor] * 3, groups=[])
    assert scene.daemon.state() == before
    scene.peer.ok("register", tensors=[scene.tensor] * 2, groups=[])


def test_descriptors_of_plans(daemon: Daemon) -> None:
    """They are the daemon's own memory, and small requests can ask for much: two frames for 80 MiB, a loop for all."""
    scene = Scene(daemon, "plans")
    scene.settle()
    before = daemon.rss_anon_bytes()
    page = (1 << 16) - 1
    fine = {"tensor": 0, "offset": 0, "length": 1, "count": page // 2, "stride": 2}
    tensor = {**scene.tensor, "num_blocks": 1, "page_bytes": page, "stride_bytes": page}
    groups = [{**FULL, "group": 10 + n, "blocks_per_key": 32, "refs": [fine]} for n in range(200)]
    state = daemon.state()
    assert "descriptors" in scene.peer.refused("limit", "register", tensors=[tensor], groups=groups)
    assert daemon.state() == state
    made = []
    while (reply := scene.peer.ask("register", tensors=[tensor], groups=groups[:2]))["type"] == "registered":
        made.append(reply["registration"])
        assert len(made) < 20
    assert (reply["code"], used(daemon)["descriptors"] <= 1 << 23) == ("limit", True)
    assert daemon.rss_anon_bytes() - before < 512 << 20
    for number in made:
        scene.peer.ok("unregister", registration=number)
    assert used(daemon)["descriptors"] < 1000


def test_allocations_that_a_registration_names(daemon: Daemon) -> None:
    """It goes on naming them without a group, too."""
    scene = Scene(daemon, "named")
    scene.settle()
    before = used(daemon)["descriptors"]
    number = scene.peer.ok("register", tensors=[scene.tensor] * 100, groups=[])["registration"]
    assert used(daemon)["descriptors"] - before == PLAN_BASE + 100 * NAMED_COST
    scene.peer.ok("unregister", registration=number)
    assert used(daemon)["descriptors"] == before


@pytest.mark.slow
def test_what_jobs_hold(start_daemon: Start) -> None:
    """Block ids and slots of jobs under way are the daemon's own memory, and counted until each job has ended."""
    daemon = start_daemon("limits.job_bytes=1MiB")
    scene = Scene(daemon, "held")
    scene.settle()
    signal = os.memfd_create("held_signal")
    os.ftruncate(signal, 4096)
    (flags,) = scene.peer.attach([signal])
    made = scene.peer.ok("register", tensors=[scene.tensor], groups=[FULL], signals=[flags])["registration"]
    wanted = {"group": 0, "keys": keys(1, *range(2000, 8000)), "blocks": ids(15, *[0xFFFFFFFF] * 6000)}
    ready = {"signal": 0, "offset": 0, "value": 1}
    first = scene.job(groups=[wanted], registration=made, ready=ready, deadline_s=60.0)
    second = scene.job(groups=[wanted])
    stored = {"group": 0, "keys": keys(*range(2000, 8000)), "blocks": ids(*[0] * 6000)}
    scene.peer.ok("load", **first)
    held = used(daemon)["job_bytes"]
    assert 6000 * 100 < held < 1 << 20
    before = daemon.state()
    for tag, groups in (("load", [wanted]), ("store", [stored])):
        assert f"uses {held} of 1048576 job_bytes" in scene.peer.refused("limit", tag, **{**second, "groups": groups})
    assert daemon.state() == before
    os.pwrite(signal, b"\1", 0)
    os.close(signal)
    assert scene.peer.completed(first["job"])["outcome"] == "partial"
    assert "job_bytes" not in used(daemon)
    scene.peer.ok("load", **second)
    assert scene.peer.completed(second["job"])["outcome"] == "partial"


def test_jobs_that_wait_hold_no_descriptors(daemon: Daemon) -> None:
    """20 loads of 2 Mi descriptors each wait for a signal: descriptors alone would be a gigabyte."""
    scene = Scene(daemon, "waiting")
    scene.settle()
    page = 1 << 20  # 512 Ki runs of one byte
    memory, signal = os.memfd_create("waiting"), os.memfd_create("waiting_signal")
    os.ftruncate(memory, 4 * page)
    os.ftruncate(signal, 4096)
    held, flags = scene.peer.attach([memory, signal])
    fine = {"tensor": 0, "offset": 0, "length": 1, "count": page // 2, "stride": 2}
    tensor = {"allocation": held, "offset": 0, "num_blocks": 4, "page_bytes": page, "stride_bytes": page}
    groups = [{**FULL, "group": 9, "refs": [fine]}]
    made = scene.peer.ok("register", tensors=[tensor], groups=groups, signals=[flags])["registration"]
    job = {"registration": made, "groups": [{"group": 9, "keys": keys(1, 2, 3, 4), "blocks": ids(0, 1, 2, 3)}]}
    os.pwrite(memory, bytes(range(256)) * (4 * page // 256), 0)
    scene.peer.ok("store", job=1, **job)
    assert scene.peer.completed(1)["outcome"] == "done"
    os.pwrite(memory, bytes(4 * page), 0)
    before = daemon.rss_anon_bytes()
    for number in range(2, 22):
        scene.peer.ok("load", job=number, **job, ready={"signal": 0, "offset": 0, "value": 1}, deadline_s=60.0)
    assert daemon.rss_anon_bytes() - before < 64 << 20
    assert used(daemon)["job_bytes"] < 20 << 21
    for number in range(3, 22):
        scene.peer.ok("cancel", job=number)
    os.pwrite(signal, b"\1", 0)
    outcomes = {number: scene.peer.completed(number)["outcome"] for number in range(2, 22)}
    assert outcomes == {number: "done" if number == 2 else "cancelled" for number in outcomes}
    assert os.pread(memory, 4 * page, 0) == bytes(n if n % 2 == 0 else 0 for n in range(256)) * (4 * page // 256)
    os.close(memory)
    os.close(signal)


def test_groups_of_a_namespace(daemon: Daemon) -> None:
    scene = Scene(daemon, "groups")
    scene.settle()
    state = daemon.state()
    groups = [{"group": 100 + n, "kind": "full", "tokens_per_key": 16} for n in range(254)]
    assert "256 groups" in scene.peer.refused("limit", "register", tensors=[], groups=groups)
    assert daemon.state() == state
    scene.peer.ok("register", tensors=[], groups=groups[:253])


def none(count: int, first: int = 0) -> list[Fields]:
    """Returns groups whose parts this rank does not have."""
    return [{"group": first + n, "kind": "full", "tokens_per_key": 16} for n in range(count)]


@pytest.mark.slow
def test_groups_of_a_user(start_daemon: Start) -> None:
    """All namespaces count; the groups of a namespace without sessions and keys are given back."""
    daemon = start_daemon("limits.groups=8")
    peers = [daemon.peer() for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.hello(namespace={"model": f"m{number}"})
    peers[0].ok("register", tensors=[], groups=none(5))
    before = daemon.state()
    assert "has 5 of 8 groups; 4 more would exceed its cap" in peers[1].refused(
        "limit", "register", tensors=[], groups=none(4)
    )
    assert daemon.state() == before
    peers[1].ok("register", tensors=[], groups=none(3))
    assert used(daemon)["groups"] == 8
    peers[0].ok("register", tensors=[], groups=none(5))  # the same again: nothing is new
    peers[2].refused("limit", "register", tensors=[], groups=none(1))
    for _ in range(5):
        peers[1].ok("clear")
    assert used(daemon)["groups"] == 8, "what had no keys is gone at once"
    peers[0].ok("bye")
    until(lambda: used(daemon)["groups"] == 3, "the groups of a namespace that nobody uses are given back")
    peers[2].ok("register", tensors=[], groups=none(5))


def test_a_clear_that_is_over_the_cap_changes_nothing(start_daemon: Start) -> None:
    """What was cleared counts until nothing holds it any more; a clear has as much room again."""
    daemon = start_daemon("limits.groups=2")
    peer = daemon.peer()
    peer.hello(namespace={"model": "m"})
    fd = os.memfd_create("clears")
    os.ftruncate(fd, 4096)
    (allocation,) = peer.attach([fd])
    os.close(fd)
    tensor = {"allocation": allocation, "offset": 0, "num_blocks": 1, "page_bytes": 4096, "stride_bytes": 4096}
    ref = {"tensor": 0, "offset": 0, "length": 4096}
    groups = [{**group, "refs": [ref]} for group in none(2)]
    registration = peer.ok("register", tensors=[tensor], groups=groups)["registration"]
    wanted = [{"group": group, "keys": keys(1)} for group in (0, 1)]

    def store_and_pin(job: int) -> int:
        shares = [{**share, "blocks": ids(0)} for share in wanted]
        peer.ok("store", job=job, registration=registration, groups=shares)
        assert peer.completed(job)["outcome"] == "done"
        return int(peer.ok("pin", groups=wanted)["lease"])

    held = store_and_pin(1)
    peer.ok("clear")
    assert peer.ok("lookup", groups=wanted)["states"] == [b"\0", b"\0"]
    store_and_pin(2)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")
    before = daemon.state()
    assert "has 4 of 4 groups" in peer.refused("limit", "clear")
    assert daemon.state() == before
    assert peer.ok("lookup", groups=wanted)["states"] == [b"\1", b"\1"]
    peer.ok("release", lease=held)
    assert used(daemon)["groups"] == 2
    peer.ok("clear")
    assert peer.ok("lookup", groups=wanted)["states"] == [b"\0", b"\0"]


def test_requests_that_wait(scene: Scene, hold: Hold) -> None:
    """64 may be under way; the next is `busy` and has changed nothing: an unregister leaves its registration."""
    load = scene.job(groups=[{"group": 0, "keys": keys(1), "blocks": ids(5)}])
    with hold:
        scene.peer.ok("load", **load)
        waiting = [scene.peer.begin("drain", deadline_s=60.0) for _ in range(64)]
        refusal = scene.peer.ask("unregister", registration=scene.registration)
        assert (refusal["code"], refusal["retryable"]) == ("busy", True)
        scene.peer.ok("ping")
    assert scene.peer.completed(load["job"])["outcome"] == "done"
    assert {scene.peer.answer(seq)["type"] for seq in waiting} == {"drained"}
    scene.peer.ok("load", **load)
    assert scene.peer.completed(load["job"])["outcome"] == "done"
    scene.peer.ok("unregister", registration=scene.registration)
    assert scene.daemon.mapped("bad_input") == 0


@pytest.mark.slow
def test_completions_that_nobody_reads(start_daemon: Start, hold: Hold) -> None:
    """What a completion may need is set aside at admission: above the outbox's size a job is `busy`, not lost."""
    daemon = start_daemon("limits.outbox_bytes=64KiB", faults=hold.fault)
    scene = Scene(daemon, "caps")
    # One hit, whose copy is held, and many misses, whose names need room in the completion.
    wanted = {"group": 0, "keys": keys(1, *range(2000, 3999)), "blocks": ids(15, *[0xFFFFFFFF] * 1999)}
    jobs: list[int] = []
    with hold:
        while (reply := scene.peer.ask("load", **(job := scene.job(groups=[wanted]))))["type"] == "accepted":
            jobs.append(job["job"])
        assert len(jobs) == (64 << 10) // (512 + 8 + 8000)
        assert (reply["code"], reply["retryable"]) == ("busy", True)
    for number in jobs:
        assert scene.peer.completed(number)["outcome"] == "partial"
    scene.peer.ok("load", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "partial"
    assert daemon.status()["server"]["busy"] == 1


@pytest.mark.slow
def test_a_hello_needs_no_more_descriptors_than_the_connection(start_daemon: Start) -> None:
    """The daemon's own pidfd goes with every welcome; for that there is one, not one each."""
    daemon = start_daemon()
    peer = daemon.peer()
    until(lambda: daemon.status()["accounts"][str(UID)]["sessions"] == 2, "it is accepted")
    highest = max(int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd"))
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    free = set(range(highest)) - {int(name) for name in os.listdir(f"/proc/{daemon.pid}/fd")}
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (min(free, default=highest + 1), before[1]))
    try:
        assert peer.hello()["type"] == "welcome"
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)
