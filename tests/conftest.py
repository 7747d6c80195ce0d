"""Fixtures that every test may use."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import socketpath
from kvoffloadd.testing.wait import slowness
from scripts.harness.daemon import Daemon
from scripts.threads import SWITCH_VARIABLE
from tests.e2e import gpu_rank
from tests.e2e.daemons import Hold, make_daemon
from tests.e2e.rank import Rank
from tests.e2e.small_rows import roundtrip

SEED_VARIABLE = "KVOFFLOADD_TEST_SEED"
SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(1 << 32))
os.environ[SEED_VARIABLE] = str(SEED)  # of all processes of this run

for variable in (socketpath.VARIABLE, socketpath.UID_VARIABLE):
    os.environ.pop(variable, None)  # the daemon of whoever runs the tests is none of theirs

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script, and then in all children
    signal.signal(signal.SIGINT, signal.default_int_handler)

if SWITCH_VARIABLE in os.environ:
    sys.setswitchinterval(float(os.environ[SWITCH_VARIABLE]))

with suppress(ImportError):  # vLLM's venv, and a GPU machine's, have none
    from hypothesis import settings

    settings.register_profile("any machine", deadline=None)  # an example's time shows nothing about the code
    settings.load_profile("any machine")

Audit = Callable[[], list[str]]

OTHER_UID = 63_000
"""Not 65534, which in a container without root stands for many users."""

STANDING_SETTINGS = (f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666")
"""Of the daemon that tests share."""


_DISK = "the disk tier reads and writes the arena, whatever device copies to and from it"
_MEMFDS = "counts mappings by the names of memfds; test_cuda_memory and test_cuda_ends have the GPU's"
HOST_ONLY = {
    "test_between_steps": "what takes several turns is the cache's and the sessions', whatever device copies",
    "test_verified_loads": "loads to GPUs are not verified with the daemon's defaults",
    "test_bugs": "what is planted lies in the cache and before it",
    "test_disk_capacity": _DISK,
    "test_disk_chaos": _DISK,
    "test_disk_clear": _DISK,
    "test_disk_corruption": _DISK,
    "test_disk_faults": _DISK,
    "test_disk_foreign": _DISK,
    "test_disk_kill": _DISK,
    "test_disk_mounts": _DISK,
    "test_disk_pins": _DISK,
    "test_disk_threads": _DISK,
    "test_kill": _MEMFDS,
    "test_random_claims": "claims are of keys, wherever ranks lie; the long run takes its time once",
    "test_registrations": _MEMFDS,
    "test_remote": "the store's agent reads and writes the arena, whatever device copies to and from it",
    "test_slot_sizes": "slabs are the arena's, whatever device copies to and from them",
    "test_verification": "what is verified is the arena; its planted faults are the host device's",
}
"""Modules of end-to-end tests whose ranks lie in shared memory alone. The others with ranks run on both devices."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """End-to-end tests with ranks run once with these in shared memory, and once with them on a GPU in software."""
    package, _, name = metafunc.module.__name__.rpartition(".")
    uses_ranks = any(value is Rank or value is roundtrip for value in vars(metafunc.module).values())
    if package != "tests.e2e" or name in HOST_ONLY or not uses_ranks:
        return
    missing = gpu_rank.why_no_cuda()
    cuda = pytest.param("cuda", marks=pytest.mark.skipif(bool(missing), reason=missing))
    metafunc.parametrize("device", [cuda] if name.startswith("test_cuda_") else ["host", cuda], indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where ranks lie, in this process and those that it starts: "host" or "cuda"."""
    if hasattr(request, "param"):
        monkeypatch.setenv(gpu_rank.DEVICE_VARIABLE, request.param)
    return gpu_rank.device()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how to repeat this run's random choices."""
    terminalreporter.write_line(f"random seed: {SEED} (repeat with {SEED_VARIABLE}={SEED})")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The limit of a test is for hangs alone: on a busy machine it is longer."""
    limit_s = float(config.getini("timeout"))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(limit_s * slowness()))


@pytest.fixture
def seed() -> int:
    """The run's seed: for numpy, for other processes."""
    return SEED


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Equal in each test of a run, so that tests repeat alone."""
    return random.Random(seed)


@pytest.fixture(autouse=True)
def audits() -> Iterator[list[Audit]]:
    """Append a `check()` of what the test built: it must find nothing wrong when the test ends."""
    checks: list[Audit] = []
    yield checks
    findings = [finding for check in checks for finding in check()]
    assert findings == []


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A private directory with a short path: a socket's path may have 107 bytes, pytest's own directories are long."""
    with tempfile.TemporaryDirectory(prefix="kvo-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start_daemon() -> Iterator[Callable[..., Daemon]]:
    """`start_daemon("section.key=value", memory="32MiB", faults="", driver=None)` -> a real daemon of the test's own.

    At the end each is audited and stopped (`Daemon.finish`).
    """
    with ExitStack() as stack:

        def start(*settings: str, **options: Any) -> Daemon:
            folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
            daemon = make_daemon(folder, *settings, **options)
            stack.callback(daemon.finish)
            return daemon

        yield start


@pytest.fixture(scope="session")
def hold() -> Iterator[Hold]:
    """Holds copies of daemons with `faults=hold.fault`. One for all tests, so that they can share such a daemon."""
    with tempfile.TemporaryDirectory(prefix="kvo-hold-", dir="/tmp") as folder:
        yield Hold(Path(folder) / "hold")


@pytest.fixture(scope="session")
def standing_daemons() -> Iterator[dict[tuple[str, ...], Daemon]]:
    """Daemons that tests use one after the other, by what they were started with."""
    held: dict[tuple[str, ...], Daemon] = {}
    with ExitStack() as stack:
        yield held
        for daemon in held.values():
            stack.callback(daemon.finish)


@pytest.fixture
def standing(standing_daemons: dict[tuple[str, ...], Daemon], device: str) -> Iterator[Callable[..., Daemon]]:
    """Does what `start_daemon` does, but the daemon is shared with other tests that ask for the same; audited and
    emptied at the end of each.
    """
    lent: dict[tuple[str, ...], Daemon] = {}

    def lend(*settings: str, memory: str = "32MiB", faults: str = "") -> Daemon:
        name = (*settings, memory, faults, device)
        if name not in standing_daemons:
            folder = Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp"))
            folder.chmod(0o755)  # tests connect as other users
            standing_daemons[name] = make_daemon(folder, *settings, memory=memory, faults=faults)
        lent[name] = standing_daemons[name]
        return lent[name]

    yield lend
    for name, daemon in lent.items():
        try:
            daemon.audit()
            daemon.clear()
        except BaseException:
            # The next test is not to suffer for this one.
            standing_daemons.pop(name).destroy()
            raise


@pytest.fixture
def daemon(standing: Callable[..., Daemon]) -> Daemon:
    """A real daemon that tests share, empty; audited at the end."""
    return standing(*STANDING_SETTINGS)
