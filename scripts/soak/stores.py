"""The stores that the hosts of a soak share, kept alive as systemd would."""

from __future__ import annotations

import time
from pathlib import Path

from kvoffloadd.testing.process import DaemonError
from scripts.harness.lab import Host, Lab
from scripts.harness.stores import Master, MooncakeStore, StoreProcess, Valkey
from scripts.soak.options import SoakOptions

NOTICED_S = 3
"""When Mooncake's master takes a store for dead."""
LEASE_MS = 2000
"""How long it keeps what was asked for: a soak's clears and evictions are not to wait."""
AGAIN_S = 1.0
READY_S = 60.0


class Stores:
    """Processes by name. One that is dead is started again, unless it must stay down for a while."""

    def __init__(self, options: SoakOptions, lab: Lab, folder: Path) -> None:
        self.starts = 0
        self.by_name: dict[str, StoreProcess] = {}
        self._down_until_s: dict[str, float] = {}
        memory = options.store_bytes >> 20
        if options.engine == "valkey":
            self._valkey = Valkey(lab.hub, folder, memory=f"{memory}mb")
            self.by_name = {"valkey": self._valkey}
            return
        self._master = Master(lab.hub, folder, f"--client_ttl={NOTICED_S}", f"--default_kv_lease_ttl={LEASE_MS}")
        self.by_name = {"master": self._master}
        each = f"{memory // len(lab.hosts)}MB"
        for number, host in enumerate(lab.hosts):
            self.by_name[f"store {number}"] = MooncakeStore(host, folder, self._master, each)

    def settings(self, host: Host) -> dict[str, str]:
        """Returns the settings of a daemon on this host."""
        if "valkey" in self.by_name:
            return {"remote.engine": "valkey", "valkey.url": f"redis://{self._valkey.place}"}
        return {"remote.engine": "mooncake", "mooncake.master": self._master.place, "mooncake.host": host.address}

    def engine_settings(self, host: Host) -> dict[str, str]:
        """Returns the settings of an engine of the agent's on this host."""
        named = self.settings(host).items()
        return {name.partition(".")[2]: value for name, value in named if name != "remote.engine"}

    def start(self) -> None:
        """All of them. Raises DaemonError."""
        for process in self.by_name.values():
            process.start()

    def look(self) -> None:
        """Start those that are dead, and not to be."""
        now = time.monotonic()
        for name, process in self.by_name.items():
            if not process.alive and now >= self._down_until_s.get(name, 0.0):
                self._down_until_s[name] = now + AGAIN_S  # one that can't start tries again after that
                self.starts += 1
                process.launch()

    def kill(self, name: str, seconds: float) -> None:
        """SIGKILL, and down for so long."""
        self.by_name[name].kill()
        self._down_until_s[name] = time.monotonic() + seconds

    def await_all(self) -> None:
        """Waits until all of them answer. Raises DaemonError."""
        until = time.monotonic() + READY_S
        while not all(process.alive and process.is_ready() for process in self.by_name.values()):
            if time.monotonic() > until:
                raise DaemonError("the stores do not come back")
            self.look()
            time.sleep(0.1)

    def close(self) -> None:
        """SIGKILL all."""
        for process in self.by_name.values():
            process.kill()
