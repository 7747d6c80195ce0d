"""Environment variables of an engine, judged: does one decide what is in a KV cache?

Deny by default: each that has the engine's prefix, is set, and is in no table counts, whatever the engine or a plug-in
makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HarmlessVariables:
    """Why variables are left out. `names`: without the prefix of all."""

    names: frozenset[str]
    reason: str

    @classmethod
    def of(cls, names: str, reason: str) -> HarmlessVariables:
        """`names`: with spaces in between."""
        return cls(frozenset(names.split()), reason)


class JudgedVariables:
    """Those of one engine. `prefix`: of all its variables."""

    def __init__(self, prefix: str, left_out: Iterable[HarmlessVariables]) -> None:
        self.prefix = prefix
        self._left_out = frozenset(prefix + name for one in left_out for name in one.names)
        # Kubernetes tells containers of each service: of those whose names begin with the engine's, in such variables.
        self._of_a_service = re.compile(
            rf"{prefix}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
        )

    def told_by(self, environ: Mapping[str, str]) -> list[tuple[str, str]]:
        """Name and value of each variable that counts, by name."""
        return sorted((name, value) for name, value in environ.items() if self.counts(name))

    def counts(self, name: str) -> bool:
        """All of the engine's do that nobody has judged otherwise."""
        return name.startswith(self.prefix) and name not in self._left_out and not self._of_a_service.fullmatch(name)
