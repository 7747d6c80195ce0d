"""Which vLLM this is, and whether the adapter knows it.

vLLM's offloading interface is experimental and changes with every release, so an unknown one is refused rather than
guessed at.
"""

from __future__ import annotations

import importlib

SUPPORTED = ("0.32",)
"""Releases by major and minor number."""


def release(version: str) -> str:
    """Major and minor number of a version: "0.32.0+cpu" -> "0.32"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check() -> str:
    """The installed release. Raises ImportError if there is no vLLM, or one that is not supported."""
    version = str(importlib.import_module("vllm").__version__)
    if release(version) not in SUPPORTED:
        named = ", ".join(f"{one}.x" for one in SUPPORTED)
        raise ImportError(f"kvoffloadd supports vLLM {named}; installed is {version}")
    return release(version)
