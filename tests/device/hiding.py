"""Python processes that lack some of the ways to copy, as installations without a compiler and sandboxes do."""

from __future__ import annotations

from pathlib import Path

HIDDEN = {("native",): "process_vm", ("native", "process_vm"): "bounce"}
"""What is hidden, and what is used instead."""

_SITE = """
import ctypes, sys
hidden = {hidden!r}
sys.modules["kvoffloadd.native._native"] = None  # to import it raises ImportError
class Sandbox(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "process_vm_readv" and "process_vm" in hidden:
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = Sandbox
"""


def hide(folder: Path, hidden: tuple[str, ...]) -> dict[str, str]:
    """The environment of such processes; `folder` is to last as long as they."""
    (folder / "sitecustomize.py").write_text(_SITE.format(hidden=hidden))
    return {"PYTHONPATH": str(folder)}
