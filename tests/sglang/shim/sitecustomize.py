"""Fits SGLang's stock wheel to a CPU: Python imports this first in each process with this folder on its PYTHONPATH.

The wheel names packages that are not here. `torchvision`: configs of image models import it, no test calls it.
`sgl_kernel`: kernels; SGLang on a CPU without AMX takes none of them, but imports their names. `datasets`: its kit for
tests imports it. Here they are made up: whatever is imported from them is there, and raises when it is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MADE_UP = ("torchvision", "sgl_kernel", "datasets")
_WITHOUT = "sgl_kernel.scalar_type"  # SGLang does without it where it can't be imported


class MadeUp:
    """Anything: a class to derive from, an enumeration's member, a function that may be named and not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> MadeUp:
        if name.startswith("__"):
            raise AttributeError(name)
        return MadeUp(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is made up: there is none on a CPU")

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)


class MadeUpModule(ModuleType):
    """A package that has every module and name."""

    __path__: list[str] = []  # noqa: RUF012  what makes a module a package
    __version__ = "0.0"

    def __getattr__(self, name: str) -> MadeUp:
        # Kernels for CPUs alone: SGLang tries to import others, and does without those that it does not find.
        if name.startswith("__") or (self.__name__.startswith("sgl_kernel") and not name.endswith("_cpu")):
            raise AttributeError(name)
        return MadeUp(f"{self.__name__}.{name}")


class Finder(MetaPathFinder, Loader):
    """Finds what is made up."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Finds these packages and everything below them."""
        if name.partition(".")[0] not in _MADE_UP or name == _WITHOUT:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty one, which makes up its names."""
        return MadeUpModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


sys.meta_path.append(Finder())  # after those that find what is installed
