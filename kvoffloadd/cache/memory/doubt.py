"""How far what a namespace holds may be believed, where hosts share a store: another host may have cleared it."""

from __future__ import annotations

import enum


class Doubt(enum.IntEnum):
    """What of a namespace does not hit, though it is there.

    NONE: all hits. INHERITED: what was stored before this run does not, since no look at the shared store has told yet
    what other hosts have cleared. ALL: nothing does, since the last look is too long ago though the store answers, or
    since the store has lost what tells of clears.
    """

    NONE = 0
    INHERITED = 1
    ALL = 2
