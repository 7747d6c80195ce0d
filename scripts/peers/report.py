"""What was measured, as JSON and as a table on the terminal."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffloadd.linux.mounts import file_system_of
from kvoffloadd.testing.figures import print_grid
from kvoffloadd.units import format_bytes
from scripts.peers.cases import REST_S, RunPlan
from scripts.peers.figures import FIGURES, Figure, Samples, spread
from scripts.peers.peers import Peer


def machine(disk: Path) -> dict[str, str]:
    """What it runs on, as the kernel reports it."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    total = re.search(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "processor": cpu[1] if cpu else platform.machine(),
        "processors": str(len(os.sched_getaffinity(0))),
        "memory": format_bytes(int(total[1]) << 10) if total else "?",
        "kernel": platform.release(),
        "file system of the disk": file_system_of(disk),
        "load when it began": f"{os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
    }


def result_of(
    plan: RunPlan,
    peers: Sequence[Peer],
    rounds: int,
    command: str,
    found: Mapping[str, Any],
) -> dict[str, Any]:
    """Names that stay. `found`: `machine`, `samples`, `notes`, `facts` and `versions` by system."""
    samples: dict[str, Samples] = found["samples"]
    return {
        "command": command,
        "rounds": rounds,
        "machine": found["machine"],
        "work": {
            "prompt_tokens": plan.tokens,
            "prompt_bytes": plan.prompt_bytes,
            "chunk_tokens": plan.chunk_tokens,
            "chunk_bytes": plan.model.chunk_bytes,
            "layers": plan.model.layers,
            "row_bytes": plan.model.block_bytes,
            "prompts": plan.jobs,
            "threads": plan.threads,
            "rest_s": REST_S,
            "lookup_token_bytes": plan.thin.token_bytes,
            "asks": plan.asks,
        },
        "systems": {
            peer.name: {
                "title": peer.title,
                "versions": found["versions"].get(peer.name, {}),
                "figures": {name: spread(values) for name, values in samples[peer.name].items()},
                "samples": samples[peer.name],
                "notes": found["notes"][peer.name],
                "facts": found["facts"].get(peer.name, {}),
            }
            for peer in peers
        },
    }


def _cell(figure: Figure, system: Mapping[str, Any]) -> str:
    found = system["figures"].get(figure.name)
    return "-" if found is None else figure.shown(found["median"])


def had(result: Mapping[str, Any]) -> list[Figure]:
    """Figures that any system has."""
    return [one for one in FIGURES if any(one.name in system["figures"] for system in result["systems"].values())]


def show(result: Mapping[str, Any]) -> None:
    """Medians; what has none, and what was found out, below."""
    systems = result["systems"]
    print_grid(
        f"medians of {result['rounds']} rounds",
        ("", "", *systems),
        ((one.name, one.unit, *(_cell(one, system) for system in systems.values())) for one in had(result)),
        texts=2,
    )
    for name, system in systems.items():
        for case, note in {**system["notes"], **system["facts"]}.items():
            print(f"{name}: {case}: {note}")
