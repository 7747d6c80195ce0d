"""Where metrics are scraped: who can, and what a slow or greedy scraper does."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import socket
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.cache.stats.missreasons import REASONS
from kvoffloadd.errors import ConfigError
from kvoffloadd.metrics import endpoint as module
from kvoffloadd.metrics.endpoint import Endpoint, bind
from kvoffloadd.testing.process import DaemonError
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.daemon import Daemon
from tests.e2e.rank import Rank


def ask(address: Any, path: str = "/metrics", header: str = "") -> tuple[int, str, str]:
    """Status, headers, body. `address`: a path, or host and port."""
    ip = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    family = socket.AF_UNIX if isinstance(address, str) else ip
    with socket.socket(family) as peer:
        peer.settimeout(HANG_S)
        peer.connect(address)
        peer.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
        answer = b"".join(iter(lambda: peer.recv(65536), b"")).decode()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]) if head else 0, head, body


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def small() -> dict[str, Any]:
    """The least that is a status."""
    counters: dict[str, Any] = dict.fromkeys(
        (
            "jobs", "not_done", "keys", "bytes", "seconds", "descriptors", "copies", "keys_failed", "keys_cancelled",
            "keys_expired", "keys_bad",
        ),
        0,
    ) | {"took_s": {"sum": 0.0, "counts": {"inf": 0}}}  # fmt: skip
    cache = (
        "keys", "index_bytes", "unsealed", "parts_reserved", "parts_committed", "parts_aborted", "parts_sealed",
        "keys_evicted", "keys_cleared", "keys_deleted", "keys_corrupt", "keys_adopted", "parts_not_adopted",
        "keys_without_space", "keys_soon", "keys_done", "keys_touched", "slabs_taken_over", "events_lost",
    )  # fmt: skip
    retention = (
        "claims", "claims_made", "claims_expired", "memory_keys", "memory_bytes", "disk_keys", "disk_bytes",
        "claims_lapsed", "claims_cut", "keys_unkept", "disk_claims_lapsed", "disk_claims_cut", "disk_keys_unkept",
    )  # fmt: skip
    server = (
        "sessions", "sessions_refused", "requests", "errors", "busy", "peers_killed", "drains_late", "log_lines_lost",
    )  # fmt: skip
    return {
        "version": "1", "uptime_s": 1.0, "draining": False, "lookups": [], "namespaces": [], "lanes": {},
        "memory": {f"{use}_bytes": 0 for use in ("capacity", "used", "free", "unassigned", "tail")},
        "cache": dict.fromkeys(cache, 0), "transfers": {"store": counters, "load": counters},
        "retention": dict.fromkeys(retention, 0),
        "quotas": [],
        "clears": {"unrecorded": 0, "places": []}, "deletions": {"unrecorded": 0, "tombstone_bytes": 0},
        "running": {"jobs": 0}, "quarantine": {"jobs": 0, "bytes": 0},
        "leases": {"read": 0, "keys": 0, "write": 0, "parts": 0}, "slow_jobs": [],
        "loop": {"worst_lag_s": 0.0, "recent_lag_s": 0.0, "late_s": 0.0, "late_beats": {"inf": 0}},
        "server": dict.fromkeys(server, 0), "open_sessions": {}, "sessions": [], "instances": 0, "devices": {},
    }  # fmt: skip


async def taken() -> dict[str, Any]:
    return small()


@pytest.fixture
async def serve(socket_dir: Path) -> AsyncIterator[Callable[..., str]]:
    """`serve()` -> the path of an endpoint on this test's loop."""
    made: list[Endpoint] = []

    def start(snapshot: Callable[[], Awaitable[dict[str, Any]]] = taken) -> str:
        path = str(socket_dir / f"metrics{len(made)}.sock")
        made.append(Endpoint(bind(path), asyncio.get_running_loop(), snapshot))
        made[-1].start()
        return path

    yield start
    for one in made:
        await one.close()
    assert not os.listdir(socket_dir)


# --- the place ----------------------------------------------------------------------------------------


def test_a_socket_is_for_user_and_group_alone(socket_dir: Path) -> None:
    path = socket_dir / "metrics.sock"
    with bind(str(path)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ConfigError, match="another process listens"):
            bind(str(path))
    with bind(str(path)):
        pass  # the stale one was taken


def test_what_is_no_socket_is_left_alone(socket_dir: Path) -> None:
    path = socket_dir / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        bind(str(path))
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="can't be used"):
        bind("/no/such/folder/metrics.sock")


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="can't be used"):
        bind(f"localhost:{taken.getsockname()[1]}")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6")
async def test_all_addresses_are_those_of_both_families() -> None:
    for _ in range(50):
        with suppress(ConfigError):  # another process has taken the port meanwhile
            listener = bind(f"[::]:{free_port()}")
            break
    port = listener.getsockname()[1]
    endpoint = Endpoint(listener, asyncio.get_running_loop(), taken)
    endpoint.start()
    try:
        assert (await asyncio.to_thread(ask, ("127.0.0.1", port)))[0] == 200
        assert (await asyncio.to_thread(ask, ("::1", port)))[0] == 200
    finally:
        await endpoint.close()


# --- hosts --------------------------------------------------------------------------------------------


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of an endpoint at all IPv4 addresses of this host, where 127.0.0.2 and so on stand for other hosts."""
    listener = socket.create_server(("0.0.0.0", 0))
    endpoint = Endpoint(listener, asyncio.get_running_loop(), taken)
    endpoint.start()
    yield listener.getsockname()[1]
    await endpoint.close()


def connect(host: str, port: int) -> socket.socket:
    """Connects from this address."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(host, 0))
    peer.settimeout(HANG_S)
    return peer


async def test_a_silent_host_keeps_no_other_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses its own places, even where another host's connection is older and as silent."""
    monkeypatch.setattr(module, "PEER_S", 600.0)  # no connection ends for another reason
    quiet = await asyncio.to_thread(connect, "127.0.0.3", port)
    crowd: list[socket.socket] = []

    def come(count: int) -> None:
        crowd.extend(connect("127.0.0.2", port) for _ in range(count))

    def served(peer: socket.socket) -> bytes:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        return peer.recv(12)

    await asyncio.to_thread(come, 3 * module.PEERS_MAX)
    assert await asyncio.to_thread(crowd[0].recv, 1) == b"", "the crowd's own oldest"
    assert await asyncio.to_thread(served, quiet) == b"HTTP/1.1 200"
    assert await asyncio.to_thread(served, crowd[-1]) == b"HTTP/1.1 200", "it is not shut out, either"
    for peer in (quiet, *crowd):
        peer.close()


async def test_scrapers_of_many_hosts_share_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_S", 3600.0)
    monkeypatch.setattr(module, "PEER_S", 600.0)
    snapshots = 0

    async def counted() -> dict[str, Any]:
        nonlocal snapshots
        snapshots += 1
        return small()

    listener = socket.create_server(("0.0.0.0", 0))
    port = listener.getsockname()[1]
    endpoint = Endpoint(listener, asyncio.get_running_loop(), counted)
    endpoint.start()

    async def scrape(number: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.1.{number}", 0))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer[:12]

    try:
        answers = await asyncio.gather(*map(scrape, range(1, 41)))
    finally:
        await endpoint.close()
    assert set(answers) == {b"HTTP/1.1 200"}
    assert snapshots == 1


async def test_who_does_not_read_the_answer_is_hung_up_on(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_S", 3600.0)  # writing the text takes its time
    lane = {"threads": 1, "queued": 0, "running": 0, "oldest_queued_s": 0.0, "oldest_running_s": 0.0, "busy_s": 0.0}

    async def large() -> dict[str, Any]:
        return small() | {"lanes": {f"lane {number:05}": lane for number in range(4000)}}

    path = serve(large)
    complete = await asyncio.to_thread(ask, path)
    assert (complete[0], len(complete[2]) > 1 << 20) == (200, True)
    monkeypatch.setattr(module, "PEER_S", 1.0)

    def dawdle() -> bytes:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(HANG_S)
            peer.connect(path)
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            first = peer.recv(1)
            time.sleep(3 * module.PEER_S)
            return first + b"".join(iter(lambda: peer.recv(65536), b""))

    assert 0 < len(await asyncio.to_thread(dawdle)) < len(complete[2])


@pytest.mark.parametrize(
    ("one", "another", "alike"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("fd00::1", "fd00::2:3", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_addresses_of_one_host(one: str, another: str, alike: bool) -> None:
    assert (module._host_of((one, 1)) == module._host_of((another, 2))) == alike


@pytest.mark.slow
def test_a_daemon_warns_once_of_what_other_hosts_can_read(start_daemon: Callable[..., Daemon]) -> None:
    port = free_port()
    daemon = start_daemon(f"metrics.listen=0.0.0.0:{port}")
    assert ask(("127.0.0.2", port))[0] == 200
    (warning,) = [line for line in daemon.log().splitlines() if "WARN" in line and "metrics.listen" in line]
    assert f"0.0.0.0:{port}: every host that can connect reads, without a password" in warning


# --- scrapes ------------------------------------------------------------------------------------------


async def test_figures_of_the_loop_are_served_in_both_formats(serve: Callable[..., str]) -> None:
    path = serve()
    status, head, body = await asyncio.to_thread(ask, path)
    assert (status, "text/plain" in head) == (200, True)
    assert "kvoffloadd_draining 0.0" in body
    assert "process_open_fds" in body
    accept = "Accept: application/openmetrics-text; version=1.0.0\r\n"
    status, head, body = await asyncio.to_thread(ask, path, "/metrics", accept)
    assert "application/openmetrics-text" in head
    assert body.endswith("# EOF\n")
    assert (await asyncio.to_thread(ask, path, "/secrets"))[0] == 404
    assert (await asyncio.to_thread(ask, path, "/"))[0] == 200


async def test_the_snapshot_is_taken_on_the_loop(serve: Callable[..., str]) -> None:
    loop = asyncio.get_running_loop()
    seen = []

    async def snapshot() -> dict[str, Any]:
        seen.append(asyncio.get_running_loop())
        return small()

    await asyncio.to_thread(ask, serve(snapshot))
    assert seen == [loop]


async def test_a_snapshot_that_fails_is_no_figure(serve: Callable[..., str]) -> None:
    async def snapshot() -> dict[str, Any]:
        raise ValueError("a bug")

    status, _, body = await asyncio.to_thread(ask, serve(snapshot))
    assert status == 500
    assert "kvoffloadd_" not in body


async def test_silent_scrapers_keep_nobody_out(serve: Callable[..., str]) -> None:
    """They lose their places to who comes later, the oldest first; who has sent a request keeps its own."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def snapshot() -> dict[str, Any]:
        begun.set()
        await may_end.wait()
        return small()

    path = serve(snapshot)
    first = asyncio.ensure_future(asyncio.to_thread(ask, path))
    await begun.wait()
    silent: list[socket.socket] = []

    def come(count: int) -> None:
        for _ in range(count):
            silent.append(socket.socket(socket.AF_UNIX))
            silent[-1].connect(path)
            silent[-1].settimeout(HANG_S)

    await asyncio.to_thread(come, 3 * module.PEERS_MAX)
    may_end.set()
    assert (await first)[0] == 200, "it had sent its request"
    assert (await asyncio.to_thread(ask, path))[0] == 200
    assert all([await asyncio.to_thread(peer.recv, 1) == b"" for peer in silent[: module.PEERS_MAX]])
    for peer in silent:
        peer.close()


async def test_who_loses_its_place_keeps_its_descriptor_until_the_loop_has_let_it_go(serve: Callable[..., str]) -> None:
    """Else the next socket of the daemon may get its number, and never be heard: the loop would think it is watched."""
    path, loop = serve(), asyncio.get_running_loop()
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as others:
        others.bind("")
        others.listen(64)
        others.setblocking(False)
        ours: list[socket.socket] = []

        def accept() -> None:
            peer, _ = others.accept()
            ours.append(peer)
            loop.add_reader(peer, lambda: heard.append(peer.recv(100)))

        loop.add_reader(others, accept)
        theirs: list[socket.socket] = []

        def come(place: Any, sent: bytes = b"") -> None:
            theirs.append(socket.socket(socket.AF_UNIX))
            theirs[-1].connect(place)
            theirs[-1].send(sent)

        for _ in range(module.PEERS_MAX):
            come(path)
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        for number in range(1, 11):  # both come in the same turn
            come(path)
            come(others.getsockname(), b"hello")
            async with asyncio.timeout(HANG_S):
                while len(heard) < number:  # noqa: ASYNC110  the loop's own turns are what is tried
                    await asyncio.sleep(0.001)
        loop.remove_reader(others)
        for peer in ours:
            loop.remove_reader(peer)
        for peer in [*ours, *theirs]:
            peer.close()


async def test_figures_are_written_whoever_asked_first_is_gone(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood takes the places of all before it, but not their work."""
    taken, may_end = 0, asyncio.Event()

    async def snapshot() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        await may_end.wait()
        return small()

    path = serve(snapshot)
    for _ in range(3):
        flood = [asyncio.ensure_future(asyncio.to_thread(ask_quietly, path)) for _ in range(2)]
        monkeypatch.setattr(module, "PEERS_MAX", 2)
        await asyncio.sleep(0.05)
    may_end.set()
    assert 200 in await asyncio.gather(*flood)
    assert taken == 1


async def test_scrapes_of_one_second_share_a_snapshot(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_S", 3600.0)
    taken = 0

    async def snapshot() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return small() | {"uptime_s": float(taken)}

    path = serve(snapshot)
    for version in range(3 * module.FORMATS_MAX):  # each is another format
        accept = f"Accept: application/openmetrics-text; version=1.0.{version}\r\n"
        status, head, body = await asyncio.to_thread(ask, path, "/metrics", accept)
        assert status == 200
        assert ("application/openmetrics-text" in head) == body.endswith("# EOF\n") == (version < module.FORMATS_MAX)
        assert "kvoffloadd_uptime_seconds 1.0\n" in body
    monkeypatch.setattr(module, "SNAPSHOT_S", 0.0)
    assert "kvoffloadd_uptime_seconds 2.0\n" in (await asyncio.to_thread(ask, path))[2]


def ask_quietly(path: str) -> int:
    """The status; 0: turned away."""
    try:
        return ask(path)[0]
    except OSError:
        return 0


# --- a daemon -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_daemon_serves_on_a_port_and_ends_in_order(start_daemon: Callable[..., Daemon]) -> None:
    port = free_port()
    daemon = start_daemon(f"metrics.listen=localhost:{port}")
    status, _, body = ask(("127.0.0.1", port))
    assert status == 200
    assert "kvoffloadd_memory_capacity_bytes 3.3554432e+07" in body
    assert daemon.run_another().returncode == 2
    assert ask(("127.0.0.1", port))[0] == 200
    daemon.leave_guests()
    assert daemon.stop() == 0
    daemon.start()
    assert ask(("127.0.0.1", port))[0] == 200


@pytest.mark.slow
def test_a_daemon_that_can_not_have_its_port_does_not_start(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    assert ask_nobody(daemon)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DaemonError, match=r"metrics\.listen: .* can't be used"):
            start_daemon(f"metrics.listen=localhost:{port}")


def ask_nobody(daemon: Daemon) -> bool:
    """Asks where there is no endpoint, which is the default."""
    return not [name for name in os.listdir(daemon.socket.parent) if "metrics" in name]


@pytest.mark.slow
def test_reasons_are_all_told(start_daemon: Callable[..., Daemon], socket_dir: Path) -> None:
    daemon = start_daemon(f"metrics.listen={socket_dir}/metrics.sock")
    rank: Rank = daemon.welcome(Rank(daemon.socket))
    rank.client.pin({0: os.urandom(32)})
    _, _, body = ask(f"{socket_dir}/metrics.sock")
    for reason in REASONS:
        assert f'reason="{reason}"' in body


async def test_who_sends_a_byte_now_and_then_is_hung_up_on(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is the request's, not a read's."""
    monkeypatch.setattr(module, "PEER_S", 0.3)
    path = serve()

    def trickle() -> int:
        sent = 0
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            while sent < 10_000:
                try:
                    peer.sendall(b"G")
                except OSError:
                    break
                sent += 1
                time.sleep(0.02)
        return sent

    assert 0 < await asyncio.to_thread(trickle) < 10_000
    assert (await asyncio.to_thread(ask, path))[0] == 200


async def test_no_descriptor_for_a_scrape_is_no_busy_loop(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, tries = socket.socket.accept, list[float]()

    def failing(listener: socket.socket) -> tuple[socket.socket, Any]:
        tries.append(time.monotonic())
        if len(tries) <= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    path = serve()
    assert (await asyncio.to_thread(ask, path))[0] == 200
    assert all(after - before > module.RETRY_S / 2 for before, after in itertools.pairwise(tries[:4]))


async def test_a_crowd_at_the_door_leaves_the_loop_its_turns(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is accepted a turn, however many wait: what else is due comes between any two."""
    accept, turns = socket.socket.accept, list[int]()
    turn = 0

    def counting(listener: socket.socket) -> tuple[socket.socket, Any]:
        turns.append(turn)
        return accept(listener)

    async def tick() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(socket.socket, "accept", counting)
    path = serve()
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for peer in crowd:
        peer.connect(path)
    ticking = asyncio.ensure_future(tick())
    while len(turns) < len(crowd):  # noqa: ASYNC110  accepting sets no event
        await asyncio.sleep(0.001)
    ticking.cancel()
    for peer in crowd:
        peer.close()
    assert len(set(turns)) == len(turns)


@pytest.mark.parametrize("turns", range(5))
async def test_a_scrape_at_the_end_leaves_no_socket(socket_dir: Path, turns: int) -> None:
    """One that was accepted just now: sockets left open are warnings, which are errors in tests."""
    path = str(socket_dir / "metrics.sock")
    endpoint = Endpoint(bind(path), asyncio.get_running_loop(), taken)
    endpoint.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        for _ in range(turns):
            await asyncio.sleep(0)
        await endpoint.close()
    gc.collect()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"GET\r\n\r\n", 405),
        (b"\r\n\r\n", 405),
        (b"GET /metrics?name[]=x HTTP/1.0\r\n\r\n", 200),
        (b"GET /metrics HTTP/1.0\nAccept: text/plain\n\n", 200),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 400),  # more than the library reads
        (b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=\xff\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"X" * module.HEAD_BYTES_MAX, 0),
        (b"GET /metr", 0),
    ],
)
async def test_requests_of_strangers(serve: Callable[..., str], request_bytes: bytes, status: int) -> None:
    """None of them ends anything: the next one is served."""
    path = serve()

    def send() -> int:
        with socket.socket(socket.AF_UNIX) as peer, suppress(ConnectionError):
            peer.settimeout(HANG_S)
            peer.connect(path)
            peer.sendall(request_bytes)
            peer.shutdown(socket.SHUT_WR)
            words = peer.recv(65536).split()
            return int(words[1]) if words else 0
        return 0

    assert await asyncio.to_thread(send) == status
    assert (await asyncio.to_thread(ask, path))[0] == 200
