"""Threads that work during a run."""

from __future__ import annotations

import threading
from typing import Self


class Beside(threading.Thread):
    """A thread that runs while its context lasts. Its `run` returns soon after `ending` is set."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ending = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.join()
