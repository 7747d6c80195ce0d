"""Real stores as child processes: Mooncake's master and stores, and Valkey or Redis."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Self

from kvoffloadd.testing.process import ROOT, DaemonError, end, spawn, tail
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.lab import Host

_STOP_S = 10.0
_REMOTE_PYTHON = ROOT / "build" / "remote-venv" / "bin" / "python"
_VALKEYS = ("valkey-server", "redis-server")


class StoreProcess:
    """A process on a host of the lab. It is there when the context begins: it listens at `port`, or `ready` is so."""

    def __init__(self, host: Host, port: int, command: list[str], log: Path) -> None:
        self.host, self.port = host, port
        self.log_path = log
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return f"{self.host.address}:{self.port}"

    @property
    def pid(self) -> int:
        """Returns the pid of the run that was started last."""
        if self._child is None:
            raise DaemonError("the store was never started")
        return self._child.pid

    def launch(self) -> subprocess.Popen[bytes]:
        """Start it, without waiting for anything."""
        command = [*self.host.enter, *self._command]
        self._child = spawn(["/usr/bin/env", *command], self.log_path, stdout=subprocess.DEVNULL)
        return self._child

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it, and wait until it is there. Raises DaemonError."""
        child = self.launch()
        until(lambda: child.poll() is not None or self.is_ready(), f"{self._command[0]} is there", HANG_S, every_s=0.02)
        if child.poll() is not None:
            raise DaemonError(f"{self._command[0]} has ended with {child.returncode}:\n{tail(self.log_path)}")

    def is_ready(self) -> bool:
        """Whether it answers."""
        return self._accepts()

    def _accepts(self) -> bool:
        """Whether it accepts connections, asked from its own host."""
        probe = f"exec 3<>/dev/tcp/{self.host.address}/{self.port}"
        done = subprocess.run(
            [*self.host.enter, "bash", "-c", probe], capture_output=True, check=False, timeout=HANG_S
        )  # fmt: skip
        return done.returncode == 0

    def kill(self) -> None:
        """SIGKILL; a stopped one, too."""
        if self._child is not None:
            end(self._child, signal.SIGKILL, _STOP_S)

    def pause(self) -> None:
        """It lives, and does nothing."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)


class Master(StoreProcess):
    """Mooncake's master, on the lab's hub. `options`: further flags of it."""

    def __init__(self, host: Host, folder: Path, *options: str) -> None:
        port, metrics = _free_ports(host, 2)
        command = [
            _binary("mooncake_master"),
            *(f"--rpc_address={host.address}", f"--rpc_port={port}", "--rpc_thread_num=2"),
            *(f"--metrics_host={host.address}", f"--metrics_port={metrics}", "--logtostderr=true"),
            *options,
        ]
        super().__init__(host, port, command, folder / "master.log")


class Etcd(StoreProcess):
    """What several masters agree through on their leader. Its `place` stands for all of them."""

    def __init__(self, host: Host, folder: Path) -> None:
        port, peers = _free_ports(host, 2)
        url, own = f"http://{host.address}:{port}", f"http://{host.address}:{peers}"
        command = [
            *("etcd", "--data-dir", str(folder / "etcd"), "--log-level", "error"),
            *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", own),
        ]
        super().__init__(host, port, command, folder / "etcd.log")

    @property
    def place(self) -> str:
        """Returns the place as a client of Mooncake's takes it."""
        return f"etcd://{super().place}"

    def flags(self) -> tuple[str, ...]:
        """Options of each `Master`. With its log of operations the next leader knows what was stored."""
        backend = ("--ha_backend_type=etcd", f"--ha_backend_connstring={super().place}")
        return ("--enable_ha=true", "--enable_oplog=true", *backend)


class MooncakeStore(StoreProcess):
    """A store that lends `memory` to a master's cluster. It is there when the master has its memory."""

    def __init__(self, host: Host, folder: Path, master: Master | Etcd, memory: str = "64MB") -> None:
        (port,) = _free_ports(host, 1)
        command = [
            _binary("mooncake_client"),
            *(f"--host={host.address}", f"--port={port}", f"--master_server_address={master.place}"),
            *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--global_segment_size={memory}"),
        ]
        super().__init__(host, port, command, folder / f"store-{host.address}-{port}.log")

    def is_ready(self) -> bool:
        """It listens once it has lent its memory."""
        return self._accepts()


class Valkey(StoreProcess):
    """A server that keeps nothing on disk. `options`: further words of its command; "PORT" among them is its port."""

    def __init__(self, host: Host, folder: Path, *options: str, memory: str = "64mb") -> None:
        (port,) = _free_ports(host, 1)
        log = folder / f"valkey-{host.address}-{port}.log"
        command = [
            *(_valkey_server() or "valkey-server", "--bind", host.address, "--port", str(port)),
            *("--save", "", "--appendonly", "no", "--protected-mode", "no"),
            *("--dir", str(folder), "--logfile", str(log)),
            *("--maxmemory", memory, "--maxmemory-policy", "volatile-lru"),
            *(str(port) if option == "PORT" else option for option in options),
        ]
        super().__init__(host, port, command, log)


def remote_python() -> str:
    """The interpreter that has Mooncake: ours, or that of `make test-remote`."""
    ours = importlib.util.find_spec("mooncake") is not None or not _REMOTE_PYTHON.exists()
    return sys.executable if ours else str(_REMOTE_PYTHON)


@cache
def why_no_mooncake(python: str = sys.executable) -> str:
    """Why its package is of no use to this interpreter; empty: it is. A separate process imports it, since it takes
    over signals.
    """
    if not _mooncake(python):
        return "Mooncake is not installed: see `make test-remote`"
    command = [python, "-c", "import mooncake.store"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    if done.returncode:
        return f"Mooncake can't be imported: {done.stderr.strip().splitlines()[-1]} (Debian: apt install libibverbs1)"
    return ""


def why_no_etcd() -> str:
    """Why there is none; empty: there is one."""
    return "" if shutil.which("etcd") else "etcd: not installed (Debian: apt install etcd-server)"


def why_no_valkey() -> str:
    """Why there is no server; empty: there is one."""
    return "" if _valkey_server() else f"{' or '.join(_VALKEYS)}: not installed (Debian: apt install redis-server)"


_PORTS = itertools.count(20001)


def _free_ports(host: Host, count: int) -> list[int]:
    """Returns free ports: in a network namespace, all but those that were given before."""
    if host.enter:
        return list(itertools.islice(_PORTS, count))
    probes = [socket.create_server((host.address, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _valkey_server() -> str | None:
    return next(filter(None, map(shutil.which, _VALKEYS)), None)


@cache
def _mooncake(python: str) -> str:
    """Where the package is; empty: nowhere."""
    program = (
        "import importlib.util as u; s = u.find_spec('mooncake'); print(*s.submodule_search_locations if s else ())"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_S)
    return done.stdout.strip()


def _binary(name: str) -> str:
    folder = _mooncake(remote_python())
    if not folder:
        raise DaemonError(why_no_mooncake())
    return str(Path(folder) / name)
