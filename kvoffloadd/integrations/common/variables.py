"""Judges an engine's environment variables: does one decide the bytes of a KV cache?

Deny by default: each that has the engine's prefix, is set, and is in no table counts, whatever the engine or a plug-in
makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HarmlessVariables:
    """Variables that are left out, and the reason. `names`: without the common prefix."""

    names: frozenset[str]
    reason: str

    @classmethod
    def of(cls, names: str, reason: str) -> HarmlessVariables:
        """Makes the entry; `names`: separated by spaces."""
        return cls(frozenset(names.split()), reason)


class JudgedVariables:
    """The variables of one engine. `prefix`: of all its variables."""

    def __init__(self, prefix: str, left_out: Iterable[HarmlessVariables]) -> None:
        self.prefix = prefix
        self._left_out = frozenset(prefix + name for group in left_out for name in group.names)
        # Kubernetes describes each service to containers in such variables, also one with a name that begins with the
        # engine's.
        self._of_a_service = re.compile(
            rf"{prefix}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
        )

    def counted(self, environ: Mapping[str, str]) -> list[tuple[str, str]]:
        """Returns name and value of each variable that counts, sorted by name."""
        return sorted((name, value) for name, value in environ.items() if self.counts(name))

    def counts(self, name: str) -> bool:
        """Returns whether a variable counts: each of the engine's does unless it was judged harmless."""
        return name.startswith(self.prefix) and name not in self._left_out and not self._of_a_service.fullmatch(name)
