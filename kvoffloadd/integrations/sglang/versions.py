"""Checks the version of SGLang. Its storage interface changes with its releases: those that were not tried are
refused.
"""

from __future__ import annotations

from importlib import metadata

SUPPORTED = ("0.5.23",)


def check() -> str:
    """Returns the whole version of the installed SGLang. Raises ImportError if there is none, or it is not
    supported.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ImportError("kvoffloadd.integrations.sglang needs SGLang, which is not installed") from None
    found = version.split("+")[0]
    if found not in SUPPORTED:
        raise ImportError(f"kvoffloadd supports SGLang {', '.join(SUPPORTED)}; installed is {version}")
    return version
