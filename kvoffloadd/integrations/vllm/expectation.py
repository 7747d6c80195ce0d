"""Prompts that another engine has just computed: until when their keys are expected, though the daemon has none yet.

vLLM gives an answer out before it plans the stores of the prompt's end: they begin with the engine's next step. The
answer therefore contains its time, and the request that carries it to the second engine waits for the stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COMPUTED_AT = "kvoffloadd.computed_at"
"""The key in `kv_transfer_params` for the time when the first engine has given its answer out, in seconds since
1970.
"""

EXPECTED_S = 1.0
"""How long after that the stores may begin: a step of an engine may take that long."""

_CLOCK_MAX_S = 1e12


def expected_until(params: Mapping[str, Any] | None, clock_s: float, now_s: float) -> float:
    """Returns until when missing keys are expected, as `now_s` counts; 0.0: they are not.

    `params`: a request's `kv_transfer_params`, which come from outside: another clock, or a time in the future, makes
    no request wait for longer than `EXPECTED_S`. `clock_s`: seconds since 1970; `now_s`: of time.monotonic.
    """
    computed_s = (params or {}).get(COMPUTED_AT)
    if isinstance(computed_s, bool) or not isinstance(computed_s, int | float) or not abs(computed_s) < _CLOCK_MAX_S:
        return 0.0  # also for NaN, and for an int that no float holds
    left_s = min(computed_s + EXPECTED_S - clock_s, EXPECTED_S)
    return now_s + left_s if left_s > 0 else 0.0
