"""The harness's KV caches in planned layouts: what refs move is what the layers' views show, in every model."""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import pytest

from kvoffloadd.model import U8Array
from kvoffloadd.testing.process import ROOT, search_path
from scripts.harness.arrangement import Arrangement
from scripts.harness.models import NAMES
from scripts.harness.planned import (
    LAYOUTS,
    NoSuchLayoutError,
    PlannedGeometry,
    model_named,
    planned_geometries,
    possible,
)

STATES = "qwen3-next-80b-a3b"


@functools.cache
def made(name: str, ranks: int = 1, plant: str = "") -> list[PlannedGeometry]:
    return planned_geometries(name, model_named(name), 0, ranks=ranks, plant=plant)


def arranged(geometry: PlannedGeometry, layout: str, rank: int = 0) -> Arrangement:
    return geometry.arrange(rank, 0, np.random.default_rng(0), layout=layout)


def filled(arrangement: Arrangement, group: int, contents: U8Array) -> list[U8Array]:
    """Returns all tensors. Block 1 has these contents, written through the layers' views."""
    rows = [np.zeros((one.num_blocks, one.stride_bytes), np.uint8) for one in arrangement.layouts]
    start = 0
    for piece in arrangement.pieces[group]:
        view = piece.over(rows[piece.tensor])
        view[1] = contents[start : start + piece.block_bytes].reshape(view.shape[1:])
        start += piece.block_bytes
    assert start == len(contents)
    return rows


def payload(arrangement: Arrangement, number: int, rows: list[U8Array], block: int = 1) -> U8Array:
    """What a daemon takes of a block, run by run."""
    (group,) = (one for one in arrangement.groups if one.group == number)
    runs = []
    for ref in group.refs:
        row = rows[arrangement.order[ref.tensor]][block]
        runs += [row[ref.offset + at * ref.stride :][: ref.length] for at in range(ref.count)]
    return np.concatenate(runs)


@pytest.mark.parametrize("name", NAMES)
def test_refs_move_all_bytes_of_the_layers_and_no_others(name: str, seed: int) -> None:
    """And layouts of one namespace have the same payloads."""
    rng = np.random.default_rng(seed)
    ran: list[str] = []
    for geometry in made(name):
        for shape in geometry.groups:
            # No zero, which is what untouched bytes are.
            contents = rng.integers(1, 256, shape.payload_bytes(0), np.uint8)
            payloads = []
            for layout in geometry.layouts:
                arrangement = arranged(geometry, layout)
                rows = filled(arrangement, shape.number, contents)
                payloads.append(payload(arrangement, shape.number, rows))
                assert np.array_equal(np.sort(payloads[-1]), np.sort(contents))
                assert sum(int((one != 0).sum()) for one in rows) == len(contents)
            assert all(np.array_equal(one, payloads[0]) for one in payloads)
        ran += geometry.layouts
    assert sorted(ran) == sorted(possible(made(name)[0].of)[0])


def test_what_is_scaled_down_keeps_its_structure() -> None:
    """19 layers of Gemma 3: 16 sliding ones on 3 slots are 6 groups, the last two of 2 layers; and 3 full ones."""
    gemma, *others = made("gemma-3-4b")
    assert [one.layouts for one in others] == [("heads-first",), ("kv-apart",)]
    sizes = {shape.number: shape.payload_bytes(0) // 2048 for shape in gemma.groups}
    assert sizes == {0: 3, 1: 3, 2: 3, 3: 3, 4: 2, 5: 2, 6: 3}
    shared, packed = made(STATES)
    assert (shared.layouts, packed.layouts) == (("by-layer", "cross-layer", "packed-rows"), ("packed-pages",))
    assert (shared.step_tokens, packed.step_tokens) == (32, 16)


def test_ranks_have_parts() -> None:
    for name in ("gemma-3-4b", STATES, "deepseek-r1"):
        for geometry in made(name, ranks=2):
            held = {shape.part_of_rank for shape in geometry.groups}
            assert held == {(0, 0) if name == "deepseek-r1" else (0, 1)}
            groups = arranged(geometry, geometry.layouts[0], rank=1).groups
            assert {(group.part, group.parts) for group in groups} == {(held.pop()[1], len(geometry.groups[0].parts))}


@pytest.mark.parametrize("plant", ["refs", "slots"])
def test_planted_refs_are_wrong_ones(plant: str) -> None:
    for right, wrong in zip(made(STATES), made(STATES, plant=plant), strict=True):
        for layout in right.layouts:
            one, other = arranged(right, layout).groups, arranged(wrong, layout).groups
            assert any(a.refs != b.refs for a, b in zip(one, other, strict=True))
            if plant == "refs":
                assert [a.payload_bytes for a in one] == [b.payload_bytes for b in other]


def test_a_layout_that_a_model_can_not_have() -> None:
    with pytest.raises(NoSuchLayoutError, match="gemma-3-4b can't be laid out as packed-pages: they are for models"):
        planned_geometries("gemma-3-4b", model_named("gemma-3-4b"), 0, layouts=("packed-pages",))


def test_no_torch_is_needed() -> None:
    """Where torch can't be imported: the demo's venv has none."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from scripts.harness.planned import model_named, planned_geometries\n"
        f"for one in planned_geometries({STATES!r}, model_named({STATES!r}), 0):\n"
        "    for layout in one.layouts:\n"
        "        print(one.arrange(0, 0, np.random.default_rng(0), layout=layout).name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": search_path()}, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    assert sorted(done.stdout.split()) == sorted({*LAYOUTS} - {"heads-first", "kv-apart"})  # states have neither
