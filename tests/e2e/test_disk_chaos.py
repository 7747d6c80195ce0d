"""Everything at once: two engines on a small memory and two small disks, which fail, vanish, and are cleared meanwhile.

Whatever happens, what is loaded is right, and in the end all is well again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import NamespaceSpec, Outcome
from kvoffloadd.errors import RemoteError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, Switch, disk, disk_settings, root_state, segments
from tests.e2e.rank import HYBRID, Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
FAULTS = (
    "write=EIO", "read=EIO", "sync=EIO", "allocate=ENOSPC", "open=EACCES", "write_delay_s=0.02", "read_delay_s=0.02",
    "allocate_delay_s=0.1", "sync_delay_s=0.1", "unlink=EIO", "write=EROFS",
)  # fmt: skip
GROUPS = (0, 1, 2)


class ChaosEngine:
    """Stores, loads, pins and clears its own namespace, at random."""

    def __init__(self, daemon: Daemon, name: str, seed: int) -> None:
        self.rank = daemon.welcome(Rank(daemon.socket, HYBRID, namespace=NamespaceSpec(model=name), num_blocks=200))
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.lots: list[tuple[int, Keys]] = []
        self.loaded = self.wrong = 0
        self.error: BaseException | None = None

    def run(self, until_s: float) -> None:
        try:
            while time.monotonic() < until_s:
                self.random.choices((self.store, self.load, self.pin, self.clear), (8, 8, 3, 0.3))[0]()
        except BaseException as error:  # noqa: BLE001  the test reports it
            self.error = error

    def store(self) -> None:
        group, count = self.random.choice(GROUPS), self.random.randint(1, 40)
        keys = new_keys(self.rng, count)
        self.lots = [*self.lots[-40:], (group, keys)]
        self.rank.store_keys(keys, group)

    def some(self) -> tuple[int, Keys]:
        return self.random.choice(self.lots) if self.lots else (0, new_keys(self.rng, 1))

    def load(self) -> None:
        group, keys = self.some()
        blocks = self.rank.blocks_of(group, 0, len(keys))
        deadline_s = self.random.choice((0.01, 10.0))
        job = self.rank.client.load(self.rank.registration, {group: (keys, blocks)}, deadline_s=deadline_s)
        if self.random.random() < 0.1:
            with suppress(RemoteError):  # it has ended
                self.rank.client.cancel(job)
        self.check(group, keys, blocks, job)

    def check(self, group: int, keys: Keys, blocks: np.ndarray, job: object) -> None:
        result = self.rank.wait(job)  # type: ignore[arg-type]
        if result.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            return
        good = np.ones(len(keys), bool)
        if result.outcome is Outcome.PARTIAL:
            good[result.failed[0]] = False
        self.loaded += int(good.sum())
        self.wrong += self.rank.wrong(group, keys[good], blocks[good])

    def pin(self) -> None:
        group, keys = self.some()
        found = self.rank.client.pin({group: keys})
        if self.random.random() < 0.7:
            found = self.rank.client.wait_ready(found, HANG_S)
            if found.lease:
                hits = keys[found.states[0] == 1]
                blocks = self.rank.blocks_of(group, 0, len(hits))
                job = self.rank.client.load(self.rank.registration, {group: (hits, blocks)}, lease=found.lease)
                self.check(group, hits, blocks, job)
        if found.lease:
            self.rank.client.release(found.lease)

    def clear(self) -> None:
        self.rank.client.clear(wait_s=0.0)
        cleared, self.lots = self.lots[-3:], []
        for group, keys in cleared:
            assert self.rank.states(keys, group) == [0] * len(keys)


def trouble(switch: Switch, roots: list[Path], chance: random.Random) -> None:
    """One more thing that goes wrong."""
    what = chance.random()
    if what < 0.5:
        switch.set(*chance.sample(FAULTS, chance.randint(1, 2)))
    elif what < 0.6:
        root = chance.choice(roots)
        root.rename(root.with_suffix(".away"))
        time.sleep(chance.random())
        root.with_suffix(".away").rename(root)
    elif what < 0.8:
        for path in chance.sample(found := segments(chance.choice(roots)), min(2, len(found))):
            with path.open("r+b") as stream:
                stream.seek(chance.randrange(MIB // 2))
                stream.write(chance.randbytes(chance.randrange(1, 20_000)))
    else:
        switch.set()


@pytest.mark.parametrize("seconds", [4, pytest.param(120, marks=[pytest.mark.soak, pytest.mark.timeout(300)])])
def test_everything_at_once(start_daemon: Start, tmp_path: Path, seed: int, seconds: int) -> None:
    switch = Switch(tmp_path)
    bounds = [(tmp_path / "one", 4 * MIB), (tmp_path / "two", 8 * MIB)]
    daemon = start_daemon(*disk_settings(*bounds), "disk.flush_s=1", memory="2MiB", faults=f"disk={switch.path}")
    engines = [ChaosEngine(daemon, f"chaos {number}", seed + number) for number in range(2)]
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=engine.run, args=(end,)) for engine in engines]
    for thread in threads:
        thread.start()
    chance = random.Random(seed)
    slowest = 0.0
    while time.monotonic() < end:
        trouble(switch, [root for root, _ in bounds], chance)
        slowest = max(slowest, daemon.ping_s())
        time.sleep(chance.random() * 0.5)
    switch.set()
    for thread in threads:
        thread.join()
    for engine in engines:
        if engine.error:
            raise engine.error
        assert engine.wrong == 0
        assert engine.loaded > 0
    assert slowest < HANG_S
    until(lambda: root_state(daemon) == root_state(daemon, 1) == "ok", "all is well again")
    engines[0].rank.client.clear()
    assert daemon.verify(payloads=True) == ()
    keys = new_keys(engines[0].rng, 40)
    engines[0].rank.store_keys(keys)
    until(lambda: disk(daemon)["backlog_bytes"] == 0, "nothing waits")
    assert engines[0].rank.loads_right(keys)
