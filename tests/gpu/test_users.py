"""Workers and daemons of different users: it works, or an error explains what to change. The report shows which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.gpu.workerprocess import GpuWorker, WorkerError
from scripts.harness.daemon import Daemon
from tests.e2e.users import needs_root
from tests.gpu.conftest import Record
from tests.gpu.layouts import INSIDE
from tests.gpu.test_memory import DONE, KEYS, loads_right

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_root]

ONE, OTHER = 65532, 65533


@contextmanager
def daemon_of(folder: Path, uid: int) -> Iterator[Path]:
    """The socket of a daemon of that user, which everybody may use."""
    folder.chmod(0o755)
    settings = {
        "server.allowed_uids": f"[0,{ONE},{OTHER}]",
        "cuda.ipc_uids": f"[{ONE},{OTHER}]",
        "server.socket_mode": "0o666",
        "memory.slab_bytes": "4MiB",
    }
    daemon = Daemon(folder, "64MiB", settings, program=("-m", "tests.gpu._daemon_of", str(uid), str(folder)))
    try:
        daemon.start()
        yield daemon.socket
    finally:
        assert daemon.stop() == 0, daemon.log()


@pytest.mark.parametrize(("worker_uid", "daemon_uid"), [(ONE, 0), (0, ONE), (ONE, OTHER), (ONE, ONE)], ids=str)
def test_across_users(
    socket_dir: Path,
    tmp_path: Path,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
    worker_uid: int,
    daemon_uid: int,
) -> None:
    monkeypatch.setenv("KVOFFLOADD_DAEMON_UID", str(daemon_uid))  # anybody can make the socket's folder, in /tmp
    with daemon_of(socket_dir, daemon_uid) as path:
        for kind in ("ipc", "vmm"):
            worker = GpuWorker(path, tmp_path / "worker.log", uid=worker_uid)
            try:
                worker.begin(kind, INSIDE.size_bytes, INSIDE.tensors)
                outcome = shares(worker)
            finally:
                worker.kill()
            record_property(f"{kind}, worker {worker_uid}, daemon {daemon_uid}", outcome)
            if outcome != "works":
                assert worker_uid != daemon_uid
                assert "run both as one user" in outcome


def shares(worker: GpuWorker) -> str:
    """Works, with the right bytes; or why not."""
    try:
        worker.call("share")
    except WorkerError as error:
        return str(error)
    worker.call("fill", keys=KEYS, blocks=list(range(40)))
    assert worker.call("store", keys=KEYS, blocks=list(range(40))) == DONE
    assert loads_right(worker, KEYS, list(range(63, 23, -1)))
    return "works"
