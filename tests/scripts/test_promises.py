"""What a job's end may say, as stress scripts judge it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.client import JobResult, KeyState, Outcome
from scripts.harness.promises import broken_in_result


def broken(
    copied_bytes: int, outcome: Outcome, failed: list[int], *, is_load: bool = True, leased: bool = False
) -> list[str]:
    """Returns what is broken in a job with five keys of 10 bytes that were all there."""
    state = KeyState.HIT if is_load else KeyState.RESERVED
    share = SimpleNamespace(bytes_of=lambda rows: 10 * int(np.count_nonzero(rows)))
    opened: Any = SimpleNamespace(
        job="job", shares=[share], is_load=is_load, leased=leased, hurried=False, cancelled=False
    )
    valid = np.isin(np.arange(5), failed, invert=True)
    result = SimpleNamespace(
        outcome=outcome, bytes=copied_bytes, states=[np.full(5, state, np.uint8)], failed=[np.array(failed, np.uint32)],
        valid=lambda _: valid,
    )  # fmt: skip
    return broken_in_result(opened, cast(JobResult, result), may_miss=True, closing=False)


@pytest.mark.parametrize("copied_bytes", [30, 40, 50])
def test_what_the_copy_has_found_wrong_may_have_been_copied(copied_bytes: int) -> None:
    assert broken(copied_bytes, Outcome.PARTIAL, [1, 3]) == []


@pytest.mark.parametrize(
    ("copied_bytes", "outcome", "failed", "is_load"),
    [
        (20, Outcome.PARTIAL, [1, 3], True),
        (60, Outcome.PARTIAL, [1, 3], True),
        (40, Outcome.DONE, [], True),
        (40, Outcome.DONE, [], False),
    ],
)
def test_nothing_else_was(copied_bytes: int, outcome: Outcome, failed: list[int], is_load: bool) -> None:
    assert "bytes were copied" in broken(copied_bytes, outcome, failed, is_load=is_load)[0]
