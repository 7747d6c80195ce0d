"""What the tests' conftest reads for `threads`."""

from __future__ import annotations

SWITCH_VARIABLE = "KVOFFLOADD_TEST_SWITCH_S"
"""How long a thread of Python runs before another one may."""
