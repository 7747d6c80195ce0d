"""`kvoffloadd doctor` reports each thing that can be wrong with a host, with its remedy. Hosts are made of files."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import config, socketpath
from kvoffloadd.doctor import Diagnosis, Host, Verdict, examine, places, system
from kvoffloadd.doctor.gpus import check_gpus
from kvoffloadd.doctor.host import NAMESPACES_OF_THE_HOST
from kvoffloadd.doctor.system import check_holes, check_kernel, check_limits, check_loads, check_memory, check_shm
from kvoffloadd.errors import DeviceError
from kvoffloadd.linux.sockets import is_listening
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.opening import Abilities
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.daemon import Daemon

GIB = 1 << 30


def chosen(**values: str) -> config.Config:
    """A config with these values, by "section__key"."""
    return config.load(None, {name.replace("__", "."): value for name, value in values.items()})


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A healthy one."""
    root = tmp_path / "host"
    files = {
        "proc/meminfo": "MemAvailable: 67108864 kB\n",
        "proc/self/status": "Mems_allowed_list: 0\n",
        "proc/self/mountinfo": "",
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    (root / "dev/shm").mkdir(parents=True)
    (root / "dev/shm").chmod(0o1777)
    (root / "run/systemd/system").mkdir(parents=True)
    return Host(root=root, uid=os.geteuid(), kernel="6.16.1")


def only(diagnoses: Iterator[Diagnosis], subject: str) -> Diagnosis:
    found = [one for one in diagnoses if one.subject == subject]
    assert len(found) == 1, found
    return found[0]


# --- all of it, on this machine ---------------------------------------------------------------------------


def doctor(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd", "doctor", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * HANG_S,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_this_machine_can_run_the_daemon(socket_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(0o700)
    code, out = doctor(
        "--socket", str(socket_dir / "k.sock"), "--memory", "16MiB", "--disk", f"{root}=8MiB", "--json",
        "--set", "disk.min_free_bytes=0",
    )  # fmt: skip
    report = json.loads(out)
    assert (code, report["good"]) == (0, True), out
    assert {"kernel", "socket", "memory tier", "/dev/shm", "GPUs", f"disk {root}"} <= {
        one["subject"] for one in report["checks"]
    }
    assert not list(root.iterdir()), "the probe's file is gone, and a root that was new still is"


def test_problems_are_told_and_set_the_exit_status(socket_dir: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[memory]\ncapacity = 1\n")
    code, out = doctor("--config", str(wrong), "--socket", str(socket_dir / "k.sock"))
    assert code == 1
    assert "unknown key" in out and "did you mean capacity_bytes?" in out and "1 problem" in out


@pytest.mark.slow
def test_a_daemon_that_runs_is_no_problem(socket_dir: Path) -> None:
    daemon = Daemon(socket_dir, 16 << 20)
    daemon.start()
    try:
        code, out = doctor("--socket", str(daemon.socket), "--memory", "16MiB")
    finally:
        daemon.kill()
    assert code == 0, out
    assert "a daemon answers there" in out


def test_remedies_are_never_missing(host: Host) -> None:
    """What is no problem needs none, all else has one."""
    for one in examine(chosen(remote__engine="valkey", valkey__url="redis://127.0.0.1:1"), host):
        assert bool(one.remedy) == (one.verdict != Verdict.OK), one


# --- the kernel and its limits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "verdict", "message"),
    [
        ("5.14.0-362.el9", Verdict.PROBLEM, "5.14"),
        ("5.15.0", Verdict.OK, "memory.huge_bytes is not known"),
        ("6.16.0", Verdict.OK, "Linux 6.16.0"),
        ("what", Verdict.PROBLEM, "what"),
    ],
)
def test_kernels(host: Host, kernel: str, verdict: Verdict, message: str) -> None:
    found = only(check_kernel(replace(host, kernel=kernel)), "kernel")
    assert found.verdict == verdict
    assert message in found.found


def test_limits(host: Host) -> None:
    few = only(check_limits(chosen(), replace(host, descriptors=1024)), "file descriptors")
    assert few.verdict == Verdict.NOTE
    assert "limits.fds = 768" in few.remedy
    assert only(check_limits(chosen(), replace(host, memlock_bytes=0)), "locked memory").verdict == Verdict.OK
    rdma = chosen(
        remote__engine="mooncake", mooncake__master="h:1", mooncake__host="h", mooncake__protocol="rdma"
    )  # fmt: skip
    assert only(check_limits(rdma, replace(host, memlock_bytes=8 << 20)), "locked memory").verdict == Verdict.PROBLEM
    assert only(check_limits(rdma, host), "locked memory").verdict == Verdict.OK


def test_shared_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    place = host.root / "dev/shm"
    if os.statvfs(place).f_blocks * os.statvfs(place).f_frsize > GIB:
        assert only(check_shm(host), "/dev/shm").verdict == Verdict.OK
    place.chmod(0o755)
    assert "mode=1777" in only(check_shm(host), "/dev/shm").remedy
    place.chmod(0o1777)
    real = os.statvfs(place)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, *tuple(real)[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    found = only(check_shm(host), "/dev/shm")
    assert found.verdict == Verdict.NOTE
    assert "64 MiB of 64 MiB" in found.found
    monkeypatch.undo()
    place.rmdir()
    assert only(check_shm(host), "/dev/shm").verdict == Verdict.PROBLEM


@pytest.mark.parametrize(
    ("verify_loads", "hashes", "verdict", "message"),
    [
        ("auto", True, Verdict.OK, "to shared memory, while they are copied; not to GPUs"),
        ("auto", False, Verdict.NOTE, "the compiled helper is not in use"),
        ("true", True, Verdict.OK, "to shared memory while they are copied; to GPUs before"),
        ("true", False, Verdict.OK, "to shared memory before they are copied; to GPUs before"),
        ("false", True, Verdict.OK, "memory.verify_loads = false"),
        ("false", False, Verdict.OK, "memory.verify_loads = false"),
    ],
)
def test_what_is_verified_of_loads(
    verify_loads: str, hashes: bool, verdict: Verdict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "copy_payloads", object() if hashes else None)
    found = only(check_loads(chosen(memory__verify_loads=verify_loads).memory), "verified loads")
    assert found.verdict == verdict
    assert message in found.found


def test_memory(host: Host) -> None:
    fits = list(check_memory(chosen(memory__capacity_bytes="64GiB").memory, host, is_running=False))
    assert all(one.verdict == Verdict.OK for one in fits), fits
    large = chosen(memory__capacity_bytes="65GiB").memory
    assert only(check_memory(large, host, is_running=False), "memory tier").verdict == Verdict.PROBLEM
    assert only(check_memory(large, host, is_running=True), "memory tier").verdict == Verdict.OK
    reserved = chosen(memory__huge_pages="reserved").memory
    assert "huge pages of 2 MiB" in only(check_memory(reserved, host, is_running=False), "memory tier").found
    assert (
        only(check_memory(chosen(memory__numa="[7]").memory, host, is_running=False), "NUMA").verdict == Verdict.PROBLEM
    )


def test_huge_pages_that_the_kernel_denies(host: Host) -> None:
    (host.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").write_text("advise [never]\n")
    found = only(check_memory(chosen().memory, host, is_running=False), "huge pages")
    assert found.verdict == Verdict.NOTE
    assert "write advise to it" in found.found
    off = chosen(memory__huge_pages="off").memory
    assert only(check_memory(off, host, is_running=False), "huge pages").verdict == Verdict.OK


def test_memory_that_a_cgroup_limits(host: Host) -> None:
    assert not list(check_holes(chosen().copy, host, has_userfaultfd=False)), "nothing limits it"
    group = host.root / "sys/fs/cgroup/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(8 * GIB))
    (group / "memory.current").write_text("0")
    (host.root / "proc/self/cgroup").write_text("0::/box\n")
    assert not list(check_holes(chosen().copy, host, has_userfaultfd=True))
    assert "userfaultfd" in only(check_holes(chosen().copy, host, has_userfaultfd=False), "memory limit").remedy


# --- GPUs ------------------------------------------------------------------------------------------------


class FakeDriver:
    bindings_version = "13.5.0"

    def __init__(self, count: int = 2) -> None:
        self._count = count

    def call(self, name: str) -> int:
        return {"cuDeviceGetCount": self._count, "cuDriverGetVersion": 13010}[name]


def no_driver() -> Any:
    raise DeviceError("cuda-bindings is not installed")


@pytest.fixture
def gpu_host(host: Host) -> Host:
    (host.root / "dev/nvidiactl").touch()
    (host.root / "dev/nvidia-uvm").touch()
    return host


def test_gpus(gpu_host: Host) -> None:
    config = chosen()
    found = list(check_gpus(config, gpu_host, FakeDriver))
    assert all(one.verdict == Verdict.OK for one in found), found
    assert found[0].found == "2 found, CUDA 13.1, cuda-bindings 13.5.0"
    missing = only(check_gpus(config, gpu_host, no_driver), "GPUs")
    assert (missing.verdict, "cuda13" in missing.remedy) == (Verdict.PROBLEM, True)
    assert only(check_gpus(config, gpu_host, lambda: FakeDriver(0)), "GPUs").verdict == Verdict.PROBLEM
    hidden = replace(gpu_host, environment={"CUDA_VISIBLE_DEVICES": "0"})
    assert only(check_gpus(config, hidden, FakeDriver), "GPUs").verdict == Verdict.NOTE
    assert only(check_gpus(chosen(cuda__enabled="false"), gpu_host, no_driver), "GPUs").verdict == Verdict.OK


def test_no_gpu_is_no_problem(host: Host) -> None:
    assert only(check_gpus(chosen(), host, no_driver), "GPUs").verdict == Verdict.OK


def test_namespaces_of_a_container(gpu_host: Host) -> None:
    contained = replace(gpu_host, namespaces={**NAMESPACES_OF_THE_HOST, "pid": 4026532281})
    found = only(check_gpus(chosen(), contained, FakeDriver), "namespaces")
    assert (found.verdict, "--pid=host" in found.remedy) == (Verdict.NOTE, True)


def test_a_module_that_is_not_loaded(gpu_host: Host) -> None:
    (gpu_host.root / "dev/nvidia-uvm").unlink()
    assert "modules-load.d" in only(check_gpus(chosen(), gpu_host, FakeDriver), "nvidia-uvm").remedy


def test_ways_of_copying_that_are_left_out(gpu_host: Host, tmp_path: Path) -> None:
    config = chosen(server__socket=str(tmp_path / "kvo.sock"))
    config.server.trials.write_text("batch\tNVRM version: 580.1\nruns\t\n")
    found = only(check_gpus(config, gpu_host, FakeDriver), "ways of copying")
    assert (found.verdict, "names batch, runs" in found.found) == (Verdict.NOTE, True)
    assert f"remove {config.server.trials}" in found.remedy
    config.server.trials.write_text("")
    assert all(one.verdict == Verdict.OK for one in check_gpus(config, gpu_host, FakeDriver))


# --- places ------------------------------------------------------------------------------------------------


def test_sockets(host: Host, socket_dir: Path) -> None:
    path = socket_dir / "k.sock"
    assert only(places.check_socket(path, host, is_running=False), "socket").verdict == Verdict.OK
    path.write_text("no socket")
    assert "is not a socket" in only(places.check_socket(path, host, is_running=False), "socket").found
    path.unlink()
    made = only(places.check_socket(socket_dir / "new/deeper/k.sock", host, is_running=False), "socket")
    assert made.verdict == Verdict.OK, "the daemon makes the directory"
    beside = only(places.check_socket(Path("/proc/version/k.sock"), host, is_running=False), "socket")
    assert beside.verdict == Verdict.PROBLEM
    # As a folder that may not be looked into, which root has none of: the kernel does not say whether it is there.
    hidden = only(places.check_socket(socket_dir / ("x" * 300) / "k.sock", host, is_running=False), "socket")
    assert hidden.subject == "socket"


def test_the_directory_of_a_service_before_its_first_start(
    host: Host, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tmpfiles.d has made it, and it is root's until the service starts. Elsewhere it would be a problem."""
    monkeypatch.setattr(socketpath, "SERVICE_FOLDER", socket_dir)
    monkeypatch.setattr("os.access", lambda *_: False)
    path = socket_dir / "k.sock"
    assert only(places.check_socket(path, host, is_running=False), "socket").verdict == Verdict.NOTE
    (host.root / "run/systemd/system").rmdir()
    assert only(places.check_socket(path, host, is_running=False), "socket").verdict == Verdict.PROBLEM
    monkeypatch.setattr(socketpath, "SERVICE_FOLDER", socket_dir / "other")
    (host.root / "run/systemd/system").mkdir()
    assert only(places.check_socket(path, host, is_running=False), "socket").verdict == Verdict.PROBLEM


def test_a_socket_that_another_daemon_is_about_to_have(host: Host, socket_dir: Path) -> None:
    import fcntl

    with open(socket_dir / "k.sock.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = only(places.check_socket(socket_dir / "k.sock", host, is_running=False), "socket")
    assert found.verdict == Verdict.PROBLEM


def test_whether_somebody_listens(socket_dir: Path) -> None:
    path = socket_dir / "k.sock"
    assert not is_listening(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not is_listening(path)
        listener.listen(0)
        assert is_listening(path)
    assert not is_listening(path), "left by a dead process"


def test_disk_roots(host: Host, tmp_path: Path) -> None:
    def found(path: Path, *, capacity: str = "8MiB", **values: str) -> list[Diagnosis]:
        disk = chosen(
            disk__roots=f'[{{path="{path}", capacity="{capacity}"}}]', **{"disk__min_free_bytes": "0", **values}
        ).disk
        return list(places.check_disks(disk, host))

    assert found(tmp_path / "new")[0].found.endswith("the daemon creates it")
    assert [one.verdict for one in found(tmp_path / "new", capacity="4000TiB")] == [Verdict.OK, Verdict.NOTE]
    assert found(tmp_path / "no/such")[0].verdict == Verdict.PROBLEM
    root = tmp_path / "root"
    root.mkdir(0o755)
    assert "name a directory of its own" in found(root)[0].found
    root.chmod(0o700)
    assert found(root)[0].verdict == Verdict.OK
    assert found(root, capacity="4000TiB")[0].verdict == Verdict.NOTE
    assert found(root, disk__min_free_bytes="4000TiB")[0].verdict == Verdict.NOTE
    (tmp_path / "file").touch()
    assert (found(tmp_path / "file")[0].verdict, found(tmp_path / "file")[0].found) == (
        Verdict.PROBLEM,
        "is not a directory",
    )
    fd = os.open(root, os.O_RDONLY)
    mount = re.findall(r"mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_text())[0]
    os.close(fd)
    (host.root / "proc/self/mountinfo").write_text(f"{mount} 1 0:25 / / rw - nfs4 server:/x rw\n")
    assert any("nfs4" in one.found for one in found(root))


def test_a_directory_with_other_things_is_not_to_be_taken_from_others(host: Host, tmp_path: Path) -> None:
    """One example is the directory /."""

    def remedy(path: Path) -> str:
        return next(places.check_disks(chosen(disk__roots=f'[{{path="{path}", capacity="8MiB"}}]').disk, host)).remedy

    root = tmp_path / "root"
    (root / "segments").mkdir(0o755, parents=True)
    assert remedy(root).endswith(f" {root}")
    (root / "etc").mkdir()
    assert remedy(root).endswith(f" {root}/kvoffloadd")
    (tmp_path / "link").symlink_to(root)
    found = next(places.check_disks(chosen(disk__roots=f'[{{path="{tmp_path}/link", capacity="8MiB"}}]').disk, host))
    assert (found.verdict, found.found) == (Verdict.PROBLEM, f"is a symbolic link: name the directory itself, {root}")
    assert found.remedy == f'set path = "{root}" in disk.roots'


def test_what_a_file_system_lacks_is_told(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    disk = chosen(disk__roots=f'[{{path="{tmp_path}", capacity="8MiB"}}]').disk
    lacking = [Abilities(direct=True, allocates=False), Abilities(direct=True, in_place=False)]
    monkeypatch.setattr(places, "probe", lambda *_: lacking.pop(0))
    monkeypatch.setattr(places, "file_system", lambda *_: "btrfs")
    assert "no fallocate(2)" in " ".join(one.found for one in places.check_disks(disk, host))
    assert "NOCOW" in " ".join(one.found for one in places.check_disks(disk, host))


def test_a_disk_that_hangs_is_told(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(places, "_check_root", lambda *_: end.wait(HANG_S) and ())
    disk = chosen(disk__roots=f'[{{path="{tmp_path}", capacity="8MiB"}}]').disk
    try:
        found = list(places.check_disks(disk, host, answer_s=0.05))
    finally:
        end.set()
    assert "does not answer" in found[0].found


def tried(root: Path, host: Host) -> Diagnosis:
    """The only problem of a start on this root."""
    (found,) = places.try_disks(chosen(disk__roots=f'[{{path="{root}", capacity="8MiB"}}]').disk, host)
    assert found.verdict == Verdict.PROBLEM
    return found


@pytest.mark.parametrize(
    ("part", "how", "found"),
    [
        ("segments", "entered", "{} has mode 755, so that other users may enter it"),
        ("segments", "file", "{}: Not a directory"),
        ("segments", "link", "{} is a symbolic link"),
        ("lock", "directory", "{}: Is a directory"),
        ("lock", "link", "{}: Too many levels of symbolic links"),
    ],
)
def test_what_is_wrong_in_a_root_is_not_mended_by_making_the_root(
    host: Host, tmp_path: Path, part: str, how: str, found: str
) -> None:
    root = tmp_path / "root"
    root.mkdir(0o700)
    made = root / part
    if how == "link":
        made.symlink_to(tmp_path)
    elif how == "file":
        made.touch()
    else:
        made.mkdir(0o700)
        made.chmod(0o755)
    one = tried(root, host)
    assert one.found == f"can't be opened: {found.format(made)}"
    assert one.remedy == "name another directory, or empty this one"


@pytest.mark.parametrize(
    ("call", "number", "where", "remedy"),
    [
        ("make_directory", errno.EIO, "", "name another directory, or check dmesg, SMART and the mount"),
        ("make_directory", errno.EROFS, "", "name another directory, or check dmesg, SMART and the mount"),
        ("make_directory", errno.ENOSPC, "", "free space there, or name another directory"),
        ("make_directory", errno.EACCES, "", "install -d -m 700 -o {user} {root}"),
        ("make_directory", errno.ENAMETOOLONG, "", "name another directory"),
        ("lock", errno.ENOLCK, "lock", "name another directory, or check dmesg, SMART and the mount"),
        ("open", errno.EACCES, "lock", "name another directory, or empty this one"),
    ],
)
def test_what_the_system_refuses_has_its_own_remedy(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, where: str, remedy: str
) -> None:
    root = tmp_path / "root"
    named = {"make_directory": [str(root)], "lock": [], "open": ["lock"]}[call]

    def refuse(*_: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number), *named)

    monkeypatch.setattr(Files, call, refuse)
    one = tried(root, host)
    path = f"{root / where}: " if where else ""
    assert one.found == f"can't be opened: {path}{os.strerror(number)}"
    assert one.remedy == remedy.format(user=places._user(host.uid), root=root)


def test_a_directory_above_that_is_gone_can_be_made(host: Host, tmp_path: Path) -> None:
    assert tried(tmp_path / "gone/root", host).remedy.startswith("install -d -m 700 -o ")
    assert tried(Path("/proc/root"), host).remedy == "name another directory"


def test_what_fails_in_a_check_is_told_as_what_it_is(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an error of the system nor a bug is a disk that does not answer."""
    disk = chosen(disk__roots=f'[{{path="{tmp_path}", capacity="8MiB"}}]').disk
    errors = [OSError(errno.EIO, "I/O error"), TimeoutError(errno.ETIMEDOUT, "timed out"), KeyError("a bug")]

    def fail(*_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(places, "_check_root", fail)
    for reason in ("I/O error", "timed out"):
        (found,) = places.check_disks(disk, host)
        assert (found.verdict, found.found) == (Verdict.PROBLEM, f"can't be checked: {reason}")
    with pytest.raises(KeyError, match="a bug"):
        list(places.check_disks(disk, host))


def test_warm_restarts(host: Host, tmp_path: Path) -> None:
    memory = chosen(memory__capacity_bytes="16MiB").memory
    assert only(places.check_pool(memory, host, is_running=False), "warm restart").verdict == Verdict.OK
    (host.root / "run/systemd/system").rmdir()
    assert only(places.check_pool(memory, host, is_running=False), "warm restart").verdict == Verdict.NOTE

    def pool(path: Path, capacity: str = "16MiB") -> Diagnosis:
        memory = chosen(memory__capacity_bytes=capacity, memory__pool_file=f'"{path}"').memory
        return only(places.check_pool(memory, host, is_running=False), "pool file")

    assert pool(tmp_path / "pool").verdict == Verdict.OK
    assert pool(tmp_path / "pool", "4000TiB").verdict == Verdict.PROBLEM
    assert pool(tmp_path / "no/pool").verdict == Verdict.PROBLEM
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert "Is a directory" in pool(tmp_path / "folder").found
    assert "name too long" in pool(tmp_path / ("x" * 300)).found
    assert pool(tmp_path / "pipe").subject == "pool file", "its writer is not waited for"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "alone" in pool(tmp_path / "open/pool").found


def test_metrics(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        assert only(places.check_metrics(listen, is_running=False), "metrics").verdict == Verdict.PROBLEM
        assert only(places.check_metrics(listen, is_running=True), "metrics").verdict == Verdict.OK
    assert only(places.check_metrics("", is_running=False), "metrics").verdict == Verdict.NOTE


def test_metrics_that_other_hosts_can_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for is_running in (False, True):
        exposed, place = places.check_metrics(f"0.0.0.0:{port}", is_running=is_running)
        assert (exposed.verdict, place.verdict) == (Verdict.NOTE, Verdict.OK)
        assert "without a password" in exposed.found
    *_, place = places.check_metrics("192.0.2.1:9477", is_running=False)
    assert (place.verdict, place.remedy) == (Verdict.PROBLEM, "choose another address of this host in metrics.listen")


def test_users(host: Host) -> None:
    served = chosen(server__allowed_uids="[1001, 1002]")
    assert "1001, 1002" in only(places.check_account(served, replace(host, uid=1000)), "user").found
    assert only(places.check_account(served, replace(host, uid=0)), "user").verdict == Verdict.NOTE


def test_a_user_who_stands_for_many(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socketpath, "unmapped_uid", lambda: 65534)
    found = only(places.check_account(chosen(), replace(host, uid=65534)), "user")
    assert found.verdict == Verdict.PROBLEM
    assert found.found == "uid 65534 stands for every user without a number in this user namespace"


# --- the remote tier ---------------------------------------------------------------------------------------


def remote(host: Host, **values: str) -> dict[str, Diagnosis]:
    from kvoffloadd.doctor.remote import check_remote

    return {one.subject: one for one in check_remote(chosen(**values), host)}


def test_the_agents_interpreter(host: Host, tmp_path: Path) -> None:
    valkey = {"remote__engine": "valkey", "valkey__url": "redis://127.0.0.1:1"}
    assert remote(host, **valkey)["agent"].verdict == Verdict.OK
    assert remote(host, **valkey, remote__python='"/no/python"')["agent"].verdict == Verdict.PROBLEM
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 0.0.1\n")
    other.chmod(0o700)
    found = remote(host, **valkey, remote__python=f'"{other}"')["agent"]
    assert "has kvoffloadd 0.0.1" in found.found
    other.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no kvoffloadd' >&2\nexit 1\n")
    assert "no kvoffloadd" in remote(host, **valkey, remote__python=f'"{other}"')["agent"].found


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://h", "h:6379"),
        ("valkey://h", "h:6379"),
        ("valkeys://me@h:7000/3", "h:7000"),
        ("rediss://[::1]:1", "::1:1"),
    ],
)
def test_where_the_store_is(host: Host, monkeypatch: pytest.MonkeyPatch, url: str, place: str) -> None:
    def refuse(place: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("kvoffloadd.doctor.remote._connect", refuse)
    found = remote(host, remote__engine="valkey", valkey__url=url)["remote store"]
    assert found.verdict == Verdict.PROBLEM
    assert found.found.startswith(f"{place}:")


def test_whether_the_store_is_reached(host: Host, socket_dir: Path, tmp_path: Path) -> None:
    assert (
        remote(host, remote__engine="valkey", valkey__url="redis://127.0.0.1:1")["remote store"].verdict
        == Verdict.PROBLEM
    )
    with socket.socket(socket.AF_UNIX) as store:
        store.bind(str(socket_dir / "valkey"))
        store.listen()
        found = remote(host, remote__engine="valkey", valkey__url=f"unix://{socket_dir}/valkey")
    assert found["remote store"].verdict == Verdict.OK
    secret = tmp_path / "password"
    secret.write_text("hush")
    secret.chmod(0o644)
    files = {"remote__engine": "valkey", "valkey__url": "redis://127.0.0.1:1", "valkey__password_file": f'"{secret}"'}
    assert "chmod 600" in remote(host, **files)["valkey.password_file"].remedy
    secret.unlink()
    assert remote(host, **files)["valkey.password_file"].verdict == Verdict.PROBLEM


def test_no_remote_tier(host: Host) -> None:
    assert remote(host)["remote tier"].verdict == Verdict.OK
