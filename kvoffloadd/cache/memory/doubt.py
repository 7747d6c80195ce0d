"""Defines how far the keys of a namespace are valid where hosts share a store: another host may have cleared it."""

from __future__ import annotations

import enum


class Doubt(enum.IntEnum):
    """Names the keys of a namespace that do not hit, though they are in memory.

    NONE: all keys hit. INHERITED: keys from before this run do not, since no round of the shared store has reported yet
    what other hosts have cleared. ALL: no key does, since the last round is too long ago though the store answers, or
    since the store has lost its records of clears.
    """

    NONE = 0
    INHERITED = 1
    ALL = 2
