"""Real stores of one kind on the hosts of a lab, and the engines that use them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.harness.enginehost import EngineHost
from scripts.harness.lab import Host, Lab
from scripts.harness.stores import Master, MooncakeStore, Valkey

MEMORY_BYTES = 64 << 20


@dataclass
class Cluster:
    """Stores of one kind with `MEMORY_BYTES`, and engines of the test's that use them."""

    kind: str
    lab: Lab
    folder: Path
    settings: Callable[[Host], dict[str, Any]]
    stores: list[Any] = field(default_factory=list)
    _engines: ExitStack = field(default_factory=ExitStack)

    def engine(self, host: int = 0, settings: dict[str, Any] | None = None) -> EngineHost:
        """Starts an engine on one of the lab's hosts, which ends with the test. `settings`: in place of some of the
        cluster's.
        """
        where = self.lab.hosts[host]
        made = EngineHost(where, self.kind, {**self.settings(where), **(settings or {})}, self.folder)
        return self._engines.enter_context(made)

    def leave(self) -> None:
        """End the engines."""
        self._engines.close()


def make_cluster(
    kind: str, lab: Lab, folder: Path, stack: ExitStack, *options: str, memory_bytes: int = MEMORY_BYTES
) -> Cluster:
    """`options`: flags of the master, or words of Valkey's command. Store: on the last host, master: hub."""
    if kind == "memory":
        settings = {"directory": str(folder / "objects"), "capacity_bytes": memory_bytes}
        return Cluster(kind, lab, folder, lambda _: settings)
    if kind == "mooncake":
        master = stack.enter_context(Master(lab.hub, folder, *options))
        store = stack.enter_context(MooncakeStore(lab.hosts[-1], folder, master, f"{memory_bytes >> 20}MB"))
        return Cluster(kind, lab, folder, lambda host: {"master": master.place, "host": host.address}, [store, master])
    server = stack.enter_context(Valkey(lab.hosts[-1], folder, *options, memory=f"{memory_bytes >> 20}mb"))
    return Cluster(kind, lab, folder, lambda _: {"url": f"redis://{server.place}"}, [server])
