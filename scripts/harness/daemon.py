"""A real daemon in a process of its own, what the kernel says of it, and what must be true when a test is done."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from tests import softcuda
from tests.e2e import gpu_rank
from tests.e2e.raw import RawPeer
from tests.e2e.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 20.0
STOP_S = 15.0
Guest = TypeVar("Guest")
UID = os.getuid()


class Daemon:
    """`kvoffloadd serve` in `folder`. `settings`: "section.key=value". Started by the constructor.

    `driver`: of its GPUs, arguments of `softcuda.environment`. Where ranks are on GPUs, planted delays are theirs, too.
    """

    def __init__(
        self,
        folder: Path,
        *settings: str,
        memory: str = "32MiB",
        faults: str = "",
        driver: Mapping[str, Any] | None = None,
    ) -> None:
        self._environment = {**os.environ, **_driver(faults, driver)}
        self.socket = folder / "kvo.sock"
        self.log_path = folder / "daemon.log"
        self._command = [
            *(sys.executable, "-m", "kvoffloadd", "serve", "--socket", str(self.socket), "--memory", memory),
            *(word for setting in ("memory.slab_bytes=1MiB", *settings) for word in ("--set", setting)),
            *(("--faults", faults) if faults else ()),
        ]
        self.guests: list[Any] = []
        self.expected_in_log = "(?!)"
        self.start()

    # --- its life ---

    def start(self) -> None:
        """Start it, again after an end, and wait until it answers."""
        if hasattr(self, "_observer"):
            self._leave()
        self.child = self.start_anyhow()
        end = time.monotonic() + START_S
        while True:
            self._observer = Client(self.socket, namespace=None, role="observer", connect_deadline_s=0.0)
            try:
                self._observer.connect()
            except ClientError:
                assert self.child.poll() is None, self.log()
                assert time.monotonic() < end, self.log()
                time.sleep(0.01)
            else:
                return

    def start_anyhow(self) -> subprocess.Popen[bytes]:
        """The same command, whose answer nobody waits for."""
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def run_another(self) -> subprocess.CompletedProcess[str]:
        """The same command once more, while this one lives, to its end."""
        return subprocess.run(self._command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=START_S)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """Exit status; negative: the signal that killed it."""
        try:
            return self.child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the daemon did not end within {deadline_s} s:\n{self.log()}") from None

    def stop(self) -> int:
        """SIGTERM and wait."""
        self._leave()
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL; returns when the kernel has taken everything from it."""
        self.child.kill()
        self.child.wait()
        self._leave()

    def destroy(self) -> None:
        """Whatever state it is in."""
        self.leave_guests()
        self.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)

    def _leave(self) -> None:
        with suppress(ClientError):
            self._observer.close(1.0, force=True)

    # --- guests: closed before the daemon is looked at for the last time ---

    def peer(self) -> RawPeer:
        """A raw connection without a hello."""
        return self.welcome(RawPeer(self.socket))

    def welcome(self, guest: Guest) -> Guest:
        """Close this at the end, too."""
        self.guests.append(guest)
        return guest

    def leave_guests(self) -> None:
        """Close all of them, the last first."""
        while self.guests:
            guest = self.guests.pop()
            if hasattr(guest, "open_jobs"):
                with suppress(ClientError):
                    guest.close(5.0, force=True)
            else:
                guest.close()

    # --- what it says ---

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def status(self) -> dict[str, Any]:
        return self._observer.status()

    def state(self) -> dict[str, Any]:
        """What a request that is refused may not change."""
        status = self.status()
        kept = ("memory", "cache", "transfers", "running", "devices", "accounts", "instances", "namespaces")
        return {name: status[name] for name in kept} | {
            "sessions": [{**session, "requests": 0} for session in sorted(status["sessions"], key=_number)]
        }

    def verify(self, *, payloads: bool = False) -> tuple[str, ...]:
        """Findings."""
        return self._observer.verify(payloads=payloads, deadline_s=20.0).findings

    def clear(self) -> None:
        """All namespaces."""
        self._observer.clear(everything=True)

    def ping_s(self) -> float:
        """How long a bystander's ping takes."""
        begun = time.monotonic()
        self._observer.ping()
        return time.monotonic() - begun

    def sessions(self) -> list[dict[str, Any]]:
        """All but the observer's own."""
        return [session for session in self.status()["sessions"] if session["role"] != "observer"]

    # --- what the kernel says ---

    def mapped(self, name: str) -> int:
        """Mappings of memfds of this name."""
        maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
        return Counter(re.findall(r"/memfd:(\S+)", maps))[name]

    def gpu_mappings(self) -> int:
        """Mappings of workers' GPU memory, which the software driver has as memfds of its own."""
        gpu_rank.needs_soft("counting mappings")
        maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace")
        return maps.count("/memfd:softcuda-")

    def gpus(self) -> list[dict[str, Any]]:
        """What it says of the GPUs in use."""
        return [device for kind, device in self.status()["devices"].items() if kind.startswith("cuda:")]

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def rss_anon_bytes(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"^RssAnon:\s+(\d+) kB$", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    # --- the audit ---

    def audit(self) -> None:
        """Nobody is left, nothing is charged or held, the self-audit finds nothing, the log tells of no bug."""
        self.leave_guests()
        until(lambda: self._rest() == {}, f"all that sessions used is given back; left: {self._rest()}")
        assert self.verify(payloads=True) == ()
        self.check_log()

    def _rest(self) -> dict[str, Any]:
        """What is in use beside the observer's own session."""
        status = self.status()
        accounts = {uid: {**used} for uid, used in status["accounts"].items()}
        accounts[str(UID)]["sessions"] -= 1
        for used in accounts.values():
            used.pop("groups", 0)  # they go with their keys
        rest = {
            "accounts": {uid: {k: n for k, n in used.items() if n} for uid, used in accounts.items()},
            "instances": status["instances"] - 1,
            "jobs": status["running"]["jobs"],
            "holds": status["running"]["holds"],
            "unsealed": status["cache"]["unsealed"],
            "mapped_bytes": sum(device["mapped_bytes"] for device in status["devices"].values()),
            "copies": sum(device["copies"] for device in status["devices"].values()),
            "sessions": len(status["sessions"]) - 1,
        }
        rest["accounts"] = {uid: used for uid, used in rest["accounts"].items() if used}
        return {name: value for name, value in rest.items() if value}

    def check_log(self) -> None:
        """No bug of ours has shown itself. `expected_in_log`: a pattern of lines that the test has asked for."""
        log = "\n".join(line for line in self.log().splitlines() if not re.search(self.expected_in_log, line))
        wrong = re.search(r"Traceback|\bERROR\b|CRITICAL|never awaited|never retrieved", log)
        assert wrong is None, self.log()

    def finish(self) -> None:
        """Audit it, then end it in order."""
        try:
            if self.alive:
                self.audit()
                assert self.stop() == 0, self.log()
                assert not self.socket.exists()
            self.check_log()
        finally:
            self.destroy()


def _driver(faults: str, driver: Mapping[str, Any] | None) -> dict[str, str]:
    if driver is None and gpu_rank.device() == "host":
        return {}
    asked = dict(driver or {})
    planted = [asked.pop("faults")] if asked.get("faults") else []
    planted += [f"delay_copies_ns={round(float(delay) * 1e9)}" for delay in re.findall(r"delay_s=([\d.]+)", faults)]
    if planted or asked:
        gpu_rank.needs_soft("what is planted")
    return softcuda.environment(",".join(planted), **asked) if gpu_rank.is_soft() else {}


def _number(session: dict[str, Any]) -> int:
    return int(session["session"])
