"""A storage that writes the model's files again before it starts: SGLang has loaded them by then."""

from __future__ import annotations

import os
import shutil
from typing import Any

from kvoffloadd.integrations.sglang.storage import KVOffloaddStorage
from tests.sglang.engine import REWRITE


class RewritingStorage(KVOffloaddStorage):
    """Ours, late."""

    def __init__(self, *arguments: Any) -> None:
        """Takes the arguments that SGLang passes."""
        source, target = os.environ[REWRITE].split(":")
        shutil.copytree(source, target, dirs_exist_ok=True)
        super().__init__(*arguments)
