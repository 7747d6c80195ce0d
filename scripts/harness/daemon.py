"""A daemon as a child process on a private socket, with guests, and what must be true at its end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvoffloadd.errors import ClientError
from kvoffloadd.testing.daemon import KVOFFLOADD, OwnDaemon
from kvoffloadd.testing.leaks import OBSERVER_ALONE, in_use, more_than
from kvoffloadd.testing.process import DaemonError, bad_entries, mapped_memfds, open_fds, rss_anon_bytes
from kvoffloadd.testing.wait import until
from scripts.harness.peer import RawPeer

Guest = TypeVar("Guest")


class Daemon(OwnDaemon):
    """`expected_in_log`: a pattern of the errors that were asked for."""

    def __init__(
        self,
        folder: Path,
        memory: int | str,
        settings: Mapping[str, str] | None = None,
        faults: str = "",
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = KVOFFLOADD,
    ) -> None:
        super().__init__(folder, memory, settings, faults, options=options, environment=environment, program=program)
        self.expected_in_log = "(?!)"
        self.guests: list[Any] = []

    def __exit__(self, *_: object) -> None:
        self.leave_guests()
        super().__exit__()

    def destroy(self) -> None:
        """Whatever state it is in, with its folder."""
        self.leave_guests()
        self.kill()
        shutil.rmtree(self.socket.parent, ignore_errors=True)

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

    # --- what it reports ---

    def state(self) -> dict[str, Any]:
        """What a request that is refused may not change."""
        status = self.status()
        kept = ("memory", "cache", "transfers", "running", "devices", "accounts", "instances", "namespaces")
        return {name: status[name] for name in kept} | {
            "sessions": [{**session, "requests": 0} for session in sorted(status["sessions"], key=_number)]
        }

    def sessions(self) -> list[dict[str, Any]]:
        """All but the observer's own."""
        return [session for session in self.status()["sessions"] if session["role"] != "observer"]

    def gpus(self) -> list[dict[str, Any]]:
        """Returns what it reports of the GPUs in use."""
        return [device for kind, device in self.status()["devices"].items() if kind.startswith("cuda:")]

    def await_pinned(self) -> None:
        """Waits until all of the memory tier is pinned, which the first registration of a GPU's memory has begun."""
        until(lambda: self._pinned_bytes() == self.status()["memory"]["capacity_bytes"], "all is pinned")

    def _pinned_bytes(self) -> int:
        return max((int(gpu["pinned_bytes"]) for gpu in self.gpus()), default=0)

    # --- what the kernel reports ---

    def mapped(self, name: str) -> int:
        """Mappings of memfds of this name."""
        return mapped_memfds(self.pid, name)[name]

    def open_fds(self) -> int:
        return len(open_fds(self.pid))

    def rss_anon_bytes(self) -> int:
        return rss_anon_bytes(self.pid)

    # --- the audit ---

    def audit(self) -> None:
        """Checks that no session is left, nothing is charged or held, the self-audit finds nothing, the log has no bug.

        Raises DaemonError; TimeoutError: something is not given back.
        """
        self.leave_guests()
        until(lambda: not self._left(), "all that sessions used is given back, and nothing is left")
        if findings := self.verify(payloads=True):
            raise DaemonError(f"the self-audit has found: {'; '.join(findings)}\n{self.tail()}")
        self.check_log()

    def _left(self) -> list[str]:
        return more_than(OBSERVER_ALONE, in_use(self.status()))

    def check_log(self) -> None:
        """Checks that the log shows no bug. Raises DaemonError."""
        bad = [entry for entry in bad_entries(self.log_path) if not re.search(self.expected_in_log, entry)]
        if bad:
            raise DaemonError(f"the log reports a bug: {bad}\n{self.log()}")

    def finish(self) -> None:
        """Audit it, then end it in order. Raises what `audit` does."""
        try:
            if self.alive:
                self.audit()
                if (status := self.stop()) != 0 or self.socket.exists():
                    raise DaemonError(f"it ended with status {status}, or left its socket:\n{self.log()}")
            self.check_log()
        finally:
            self.destroy()


def _number(session: dict[str, Any]) -> int:
    return int(session["session"])
