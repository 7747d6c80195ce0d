"""A storage before which somebody writes the model's files again: SGLang has loaded them by then."""

from __future__ import annotations

import os
import shutil
from typing import Any

from kvoffloadd.integrations.sglang.storage import KVOffloaddStorage

FROM_TO = "KVOFFLOADD_TEST_REWRITE"
"""Folders, with a colon between: files of the first are put into the second."""


class RewritingStorage(KVOffloaddStorage):
    """Ours, late."""

    def __init__(self, *arguments: Any) -> None:
        """As SGLang makes it."""
        source, target = os.environ[FROM_TO].split(":")
        shutil.copytree(source, target, dirs_exist_ok=True)
        super().__init__(*arguments)
