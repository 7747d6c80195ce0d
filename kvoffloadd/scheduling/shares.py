"""Limits what one user may have of a resource that all users of the daemon share.

No user may have more than then remains for the others. A single user may thus have a half, the second a quarter, and so
on: something always remains for the next user, and no fixed number of users has to be known. The rule is that of
dynamic thresholds for shared buffers (Choudhury and Hahne, 1998) with the factor 1.
"""

from __future__ import annotations


def share_left(total: int, used_by_all: int, used_by_user: int) -> int:
    """Returns how much more a user may have that has `used_by_user` of the total that all have. At least 0."""
    return max(0, (total - used_by_all - used_by_user) // 2)
