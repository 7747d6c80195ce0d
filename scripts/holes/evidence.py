"""A worker's calls and the answers, and what it writes down when bytes are wrong."""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from scripts.holes.memory import WrongBlock
from scripts.holes.texts import PAYLOAD_BYTES

CALLS = 500
SHOWN_BYTES = 32
RUNS = 20
FILES_MAX = 50
"""Of a worker: what goes wrong all the time need not be written down all the time."""


class Journal:
    """The latest calls of one worker, and for each block what it was used for last. `who`: names the files."""

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder
        self._who = who
        self._written = 0
        self._calls: deque[dict[str, Any]] = deque(maxlen=CALLS)
        self._uses: dict[int, dict[str, Any]] = {}

    def note(self, call: str, **details: Any) -> None:
        """A call or an answer; details that JSON can hold."""
        self._calls.append({"at_s": round(time.monotonic(), 6), "call": call, **details})

    def used(self, block: int, **details: Any) -> None:
        """What a block was used for, and how that ended."""
        self._uses[block] = details

    def write(self, wrong: list[WrongBlock], what: str) -> Path | None:
        """A JSON file that names each wrong block, and an .npz next to it with their bytes. None: enough is written."""
        if self._written == FILES_MAX:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._who}-{self._written}.json"
        self._written += 1
        record = {
            "what": what,
            "at_s": round(time.monotonic(), 6),
            "blocks": [self._described(one) for one in wrong],
            "calls": list(self._calls),
        }
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        arrays = {f"{kind}_{one.block}": getattr(one, kind) for one in wrong for kind in ("before", "expected", "seen")}
        np.savez_compressed(path.with_suffix(".npz"), **arrays)
        return path

    def _described(self, wrong: WrongBlock) -> dict[str, Any]:
        at = np.flatnonzero(wrong.differs)
        starts = at[np.flatnonzero(np.diff(at, prepend=-2) > 1)]
        shown = slice(int(at[0]), int(at[0]) + SHOWN_BYTES)
        return {
            "block": wrong.block,
            "wrong_bytes": wrong.wrong_bytes,
            "first_offset": int(at[0]),
            "last_offset": int(at[-1]),
            "runs": len(starts),
            "run_offsets": starts[:RUNS].tolist(),
            "zero_bytes": int((wrong.seen[at] == 0).sum()),
            "bytes_as_before": int((wrong.seen[at] == wrong.before[at]).sum()),
            "behind_the_payload": int((at >= PAYLOAD_BYTES).sum()),
            "expected": wrong.expected[shown].tobytes().hex(),
            "seen": wrong.seen[shown].tobytes().hex(),
            "used_for": self._uses.get(wrong.block),
        }
