"""What one user may have of something that all users of the daemon share.

Nobody may have more than what is then left for the others. One user alone may thus have a half, the second a quarter,
and so on: something is left for whoever comes next, and no fixed number of users has to be known. The rule is that of
dynamic thresholds for shared buffers (Choudhury and Hahne, 1998) with the factor 1.
"""

from __future__ import annotations


def share_left(total: int, used_by_all: int, used_by_user: int) -> int:
    """How much more a user may have, who has `used_by_user` of what all have together. At least 0."""
    return max(0, (total - used_by_all - used_by_user) // 2)
