"""What vLLM publishes, for those who route requests, of what the daemon has."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.e2e.disk import disk_settings, idle
from tests.vllm.conftest import StartDaemon, StartEngine
from tests.vllm.engine import Prompts, VllmEngine, by_connector, prompts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

COUNT, BLOCK, CHUNK = 4, 32, 64
WHOLE = 501 // CHUNK
TOLD_S = 30.0
# Of an engine in a separate process, as it is served: it makes no step when it has nothing to do.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}


class ReplayingRouter:
    """Who has all that was published replayed, since a subscriber may miss the beginning.

    `on_gpu`: every block that the engine has computed; `in_daemon`: what is in the daemon's memory now, by hash;
    `on_disk`: the same of its disks.
    """

    def __init__(self, folder: Path) -> None:
        zmq = importlib.import_module("zmq")
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events",
            "replay_endpoint": f"ipc://{folder}/replay",
        }
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(self.config["replay_endpoint"])
        self._heard = 0
        self.on_gpu: set[bytes] = set()
        self.in_daemon: dict[bytes, dict[str, Any]] = {}
        self.on_disk: dict[bytes, dict[str, Any]] = {}
        self.removed: list[bytes] = []

    def listen(self) -> None:
        self._socket.send_multipart((b"", self._heard.to_bytes(8, "big")))
        while True:
            assert self._socket.poll(TOLD_S * 1000), "no answer from the publisher"
            *_, number, payload = self._socket.recv_multipart()
            if not payload:
                return
            self._heard = int.from_bytes(number, "big") + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        hashes = event.get("block_hashes", [])
        if event["type"] == "BlockStored" and event["medium"] == "GPU":
            self.on_gpu.update(hashes)
        elif event["type"] == "BlockStored":
            assert event["locality"] == "LOCAL"
            self._tiers[event["medium"]].update(dict.fromkeys(hashes, event))
        elif event["type"] == "BlockRemoved" and event["medium"] != "GPU":
            if event["medium"] == "CPU":
                self.removed += hashes
            for one in hashes:
                self._tiers[event["medium"]].pop(one, None)
        elif event["type"] == "AllBlocksCleared":
            self.in_daemon.clear()
            self.on_disk.clear()

    @property
    def _tiers(self) -> dict[str, dict[bytes, dict[str, Any]]]:
        return {"CPU": self.in_daemon, "STORAGE": self.on_disk}

    def hears(self, fact: Callable[[], object], what: str) -> None:
        def heard() -> object:
            self.listen()
            return fact()

        until(heard, what, TOLD_S)

    def close(self) -> None:
        self._socket.close(0)


@pytest.fixture
def router(socket_dir: Path) -> Iterator[ReplayingRouter]:
    found = ReplayingRouter(socket_dir)
    yield found
    found.close()


@pytest.fixture
def asked() -> Prompts:
    """4 prompts of 501 tokens."""
    return prompts(11, COUNT)


def start(start_engine: StartEngine, daemon: Daemon, router: ReplayingRouter, **extra: Any) -> VllmEngine:
    connector = by_connector(daemon.socket, CHUNK, **extra)
    return start_engine("dense", connector=connector, kv_events_config=router.config, environment=ENVIRONMENT)


def test_stored_and_removed(
    start_daemon: StartDaemon, start_engine: StartEngine, router: ReplayingRouter, asked: Prompts
) -> None:
    """Events have all that a router wants to know of blocks; they come without another request, and again after a
    reset.
    """
    daemon = start_daemon(memory="256MiB")
    engine = start(start_engine, daemon, router, self_describing_kv_events=True)
    every = COUNT * WHOLE * CHUNK // BLOCK
    for _ in range(2):
        epoch = daemon.status()["namespaces"][0]["epoch"]
        engine.generate(asked, max_tokens=1)
        router.hears(lambda: len(router.in_daemon) == every, f"{every} blocks are stored")
        assert router.in_daemon.keys() <= router.on_gpu
        for event in router.in_daemon.values():
            assert (len(event["block_hashes"]), event["block_size"]) == (CHUNK // BLOCK, BLOCK)
            assert len(event["token_ids"]) == CHUNK
        lasts = {event["block_hashes"][-1] for event in router.in_daemon.values()}
        engine.reset(connector=True)
        until(lambda: daemon.status()["namespaces"][0]["epoch"] > epoch, "the daemon has heard of it")  # noqa: B023
        engine.generate(prompts(0, 1, 8), max_tokens=1)  # the engine publishes the daemon's events in a step
    router.hears(lambda: lasts.issubset(router.removed) and not router.in_daemon, "all of it is removed")


def test_what_others_have_stored(
    start_daemon: StartDaemon, start_engine: StartEngine, router: ReplayingRouter, asked: Prompts
) -> None:
    """Engines of one namespace publish what any of them has stored, before they started or since; by hash alone."""
    daemon = start_daemon(memory="256MiB")
    other = start_engine("dense", connector=by_connector(daemon.socket, CHUNK))
    other.generate(asked[:2], max_tokens=1)
    other.generate(prompts(0, 1, 33))  # what was computed is stored in later steps
    until(lambda: daemon.status()["cache"]["keys"] == 2 * WHOLE, "all is stored")
    other.close()
    engine = start(start_engine, daemon, router)
    engine.generate(prompts(0, 1, 100), max_tokens=1)  # from a request it learns how long hashes are
    own = 100 // CHUNK
    router.hears(lambda: len(router.in_daemon) == 2 * WHOLE + own, "what was there is told")

    def as_it_was() -> bool:
        router.listen()
        return len(router.in_daemon) == 2 * WHOLE + own

    throughout(as_it_was, "that is all", 0.3)
    before = set(router.in_daemon)
    engine.generate(asked[:2], max_tokens=1)
    router.hears(lambda: before - router.on_gpu == set(), "its names are those of the engine's blocks")
    daemon.kill()

    def nothing_left() -> bool:
        engine.generate(prompts(1, 1, 8), max_tokens=1)
        return not router.in_daemon

    router.hears(nothing_left, "a daemon that is dead has nothing")


def test_keys_on_disk_are_in_storage(
    start_daemon: StartDaemon, start_engine: StartEngine, router: ReplayingRouter, asked: Prompts, tmp_path: Path
) -> None:
    """They are there beside memory, and alone after a restart of the daemon. As it was gone, vLLM has forgotten all but
    the names of the keys, each that of its last block.
    """
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 256 << 20)), memory="256MiB")
    engine = start(start_engine, daemon, router, self_describing_kv_events=True)
    every = COUNT * WHOLE * CHUNK // BLOCK
    engine.generate(asked, max_tokens=1)
    router.hears(lambda: len(router.in_daemon) == every, f"{every} blocks are stored")
    idle(daemon)

    def steps_until(fact: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            engine.generate(prompts(1, 1, 8), max_tokens=1)  # a step, in which the engine publishes
            return fact()

        router.hears(holds, what)

    steps_until(lambda: router.on_disk.keys() >= router.in_daemon.keys() != set(), "they are on disk, too")
    assert len(router.on_disk) == every
    assert all(event["token_ids"] for event in router.on_disk.values())
    lasts = {event["block_hashes"][-1] for event in router.on_disk.values()}
    daemon.kill()
    daemon.start()
    steps_until(lambda: not router.in_daemon and router.on_disk.keys() == lasts, "they are on disk alone")
