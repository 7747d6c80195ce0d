"""Which prefixes can be restored: as SGLang's own storages count them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.integrations.sglang.prefixes import Needed, leading, restorable, run_lengths

PAGES = st.integers(0, 12)


@given(data=st.data(), pages=PAGES, trailing=st.integers(0, 4))
def test_a_prefix_has_all_that_it_needs(data: st.DataObject, pages: int, trailing: int) -> None:
    flags = st.lists(st.booleans(), min_size=pages, max_size=pages)
    kv, side = data.draw(flags), data.draw(flags)
    found = restorable({"kv": np.array(kv, bool), "swa": np.array(side, bool)}, [Needed("swa", trailing)])

    def of_side(length: int) -> bool:
        return all(side[max(0, length - trailing) if trailing else 0 : length])

    longest = next((at for at, there in enumerate(kv) if not there), pages)
    assert found.lengths == tuple(length for length in range(1, longest + 1) if of_side(length))
    assert found.pages == max(found.lengths, default=0)
    assert found.by_pool.get("kv", 0) == longest
    assert found.by_pool.get("swa", 0) == max((n for n in range(1, longest + 1) if of_side(n)), default=0)


@given(flags=st.lists(st.booleans(), max_size=20))
def test_runs_and_the_first_gap(flags: list[bool]) -> None:
    there = np.array(flags, bool)
    runs = run_lengths(there)
    expected = 0
    for at, flag in enumerate(flags):
        expected = expected + 1 if flag else 0
        assert runs[at] == expected
    assert leading(there) == (flags.index(False) if False in flags else len(flags))
