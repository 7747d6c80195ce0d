"""A linker that kills the daemon once SGLang knows that its next pages are on their way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvoffloadd.integrations.sglang.linker import KVOffloaddLinker
from tests.sglang.engine import VICTIM


class KillingLinker(KVOffloaddLinker):
    """Kills the daemon before a load, and does all else as our linker does."""

    def _begin_load(self, rid: str, transfers: list[Any]) -> Any:
        load = self._pages.load

        def kill_and_load(*arguments: Any) -> Any:
            file = Path(os.environ[VICTIM])
            with suppress(FileNotFoundError):
                victim = int(file.read_text(encoding="utf-8"))
                file.unlink()
                os.kill(victim, signal.SIGKILL)
            return load(*arguments)

        found: Callable[..., Any] = kill_and_load
        self._pages.load = found  # type: ignore[method-assign]
        try:
            begun = super()._begin_load(rid, transfers)
            if begun is not None:
                begun.exception()
            return begun
        finally:
            self._pages.load = load  # type: ignore[method-assign]
