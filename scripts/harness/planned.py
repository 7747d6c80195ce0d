"""KV caches of models in the layouts of `kvoffloadd.layout`: their groups, and each layer's own view of the memory.

Bytes are written and compared through the layers' views, as kernels would; refs and tensors are those that the layout
registers. An error in either is bytes that are not what they must be. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvoffloadd.client import Group, GroupKind, Ref
from kvoffloadd.layout import Attention, LayerKind, LayerSpec, Mamba, View, share_of
from kvoffloadd.layout.geometry import Rows
from kvoffloadd.layout.spec import item_bytes
from kvoffloadd.planner import Layout, ModelConfig
from kvoffloadd.planner.layouts import (
    BLOCKS,
    CROSS_LAYER,
    HEADS_FIRST,
    KV_APART,
    PAGES,
    PER_LAYER,
    ROWS,
    possible_layouts,
)
from kvoffloadd.planner.rank import Rank
from scripts.harness.arrangement import Arrangement, Piece
from scripts.harness.geometry import BLOCK_TOKENS, Geometry, blocks_in
from scripts.harness.groupshape import GroupShape, RefShape
from scripts.harness.models import named, small
from scripts.harness.places import Layout as Tensor

PACK_SIZE = 2
LAYOUTS = {
    "by-layer": PER_LAYER,
    "cross-layer": CROSS_LAYER,
    "heads-first": HEADS_FIRST,
    "kv-apart": KV_APART,
    "packed-pages": PAGES.format(PACK_SIZE),
    "packed-rows": ROWS,
}
"""Names on command lines, and the planner's."""
KEY_BYTES = 32
PROMPT_KEYS, PROMPT_STEPS = 400, (2, 24)
"""About how many keys a prompt has at most, in all groups; and how many steps of `step_tokens`."""
SHIFT_BYTES = 8


class NoSuchLayoutError(Exception):
    """The model can't have this layout."""


@functools.lru_cache(maxsize=64)
def possible(rank: Rank, num_blocks: int = BLOCKS) -> tuple[dict[str, Layout], dict[str, str]]:
    """Layouts of a rank by their names here; and why others are impossible."""
    found, refused = possible_layouts(rank, PACK_SIZE, num_blocks)
    by_name = {layout.name: layout for layout in found}
    why = {name: refused.get(name, refused.get("packed pages", "")) for name in LAYOUTS if LAYOUTS[name] not in by_name}
    return {name: by_name[planned] for name, planned in LAYOUTS.items() if planned in by_name}, why


@dataclass(frozen=True, slots=True)
class PlannedGeometry(Geometry):
    """A model's namespace, shared by `layouts`, in which a key's payload is the same. `of`: a rank of the model.

    `plant`: "refs": refs are registered some bytes behind their place, where there is room for that; "slots": two
    groups' refs are exchanged.
    """

    of: Rank = field(kw_only=True)
    layouts: tuple[str, ...] = field(kw_only=True)
    plant: str = field(kw_only=True, default="")

    def row_bytes(self, layout: str) -> int:
        """What a block takes of a rank's memory, in all tensors."""
        return possible(self.of)[0][layout].plan.block_bytes

    def arrange(
        self, rank: int, memory_bytes: int, rng: np.random.Generator, *, padded: bool = True, layout: str = ""
    ) -> Arrangement:
        """Arranges a rank in `layout`, or in the first there is. Nothing is padded but what the layout pads."""
        name = layout or self.layouts[0]
        return self.arrange_blocks(rank, blocks_in(memory_bytes, self.row_bytes(name)), name)

    def arrange_blocks(self, rank: int, num_blocks: int, layout: str) -> Arrangement:
        """Arranges `num_blocks` blocks of a rank in `layout`."""
        return _arranged(self, rank, layout, possible(self.of, num_blocks)[0][layout])


def model_named(name: str, kv_heads: int = 0) -> ModelConfig:
    """Returns one of NAMES, scaled down."""
    return small(named(name), kv_heads) if kv_heads else small(named(name))


def planned_geometries(
    name: str, model: ModelConfig, number: int, *, layouts: tuple[str, ...] = (), ranks: int = 1, plant: str = ""
) -> list[PlannedGeometry]:
    """A namespace for each set of the model's layouts that share payloads; `number` is the first one's. `layouts`: only
    these. Raises NoSuchLayoutError for one that the model can't have.
    """
    rank = Rank(model, ranks, BLOCK_TOKENS)
    found, refused = possible(rank)
    for layout in layouts:
        if layout in refused:
            raise NoSuchLayoutError(f"{name} can't be laid out as {layout}: {refused[layout]}")
    alike: dict[object, list[str]] = {}
    for layout in layouts or tuple(found):
        alike.setdefault(_payload_order(found[layout]), []).append(layout)
    return [
        _geometry(f"{name}-{number + at}", number + at, rank, found[names[0]], tuple(names), plant)
        for at, names in enumerate(alike.values())
    ]


def _payload_order(layout: Layout) -> object:
    """What two layouts must have in common for the same payloads: blocks, groups, their layers' order in memory, and
    the order of what a layer has.

    By backends and where the layers' views begin, not by the refs: those are under test.
    """
    plan = layout.plan
    begin = {name: min((view.memory, view.offset) for view in views) for name, views in plan.views.items()}
    groups = tuple(tuple(sorted(group.layers, key=begin.__getitem__)) for group in plan.groups)
    backends = frozenset(spec.backend for spec in plan.specs.values() if isinstance(spec, Attention))
    return groups, backends, tuple(sorted((name, spec.block_size) for name, spec in plan.specs.items()))


def _geometry(
    name: str, number: int, rank: Rank, layout: Layout, layouts: tuple[str, ...], plant: str
) -> PlannedGeometry:
    plan = layout.plan
    groups = tuple(_shape(group.group, [plan.specs[layer] for layer in group.layers], rank) for group in plan.groups)
    step = math.lcm(*(group.tokens_per_key for group in groups))
    keys = sum(step // group.tokens_per_key for group in groups)
    least, most = PROMPT_STEPS
    prompt_tokens = step * min(max(PROMPT_KEYS // keys, least), most)
    return PlannedGeometry(
        name, number, KEY_BYTES, rank.tp, 0, True, groups, prompt_tokens, of=rank, layouts=layouts, plant=plant
    )


def _shape(number: int, specs: list[LayerSpec], rank: Rank) -> GroupShape:
    """A block is a key. Of payloads only the size is known here: where they lie is the layout's."""
    first = specs[0]
    held = tuple(_part(first.kind, rank, at) for at in range(rank.tp))
    payload_bytes = sum(spec.payload_bytes for spec in specs)
    return GroupShape(
        number=number,
        kind=GroupKind(first.group_kind),
        tokens_per_key=first.block_size,
        window_keys=first.window_keys(first.block_size),
        blocks_per_key=1,
        parts=((RefShape(0, payload_bytes),),) * (max(held) + 1),
        part_of_rank=held,
    )


def _part(kind: LayerKind, rank: Rank, number: int) -> int:
    return number if kind is LayerKind.MAMBA else share_of(kind, rank.model.heads(kind).count, number, rank.tp).part


# --- memory ----------------------------------------------------------------------------------------------------------


def _arranged(geometry: PlannedGeometry, rank: int, name: str, layout: Layout) -> Arrangement:
    """Tensors, refs and views are the plan's."""
    plan = layout.plan
    registered = plan.canonical.rows
    rows = sorted(registered, key=lambda one: (one.memory, one.offset))
    tensors = tuple(Tensor(plan.num_blocks, one.page_bytes, one.stride_bytes) for one in rows)
    shapes = {shape.number: shape for shape in geometry.groups}
    groups = tuple(
        replace(group, parts=len(shapes[group.group].parts), part=shapes[group.group].part_of_rank[rank] or 0)
        for group in plan.canonical.groups
    )
    if geometry.plant:
        groups = _with_wrong_refs(groups, [one.page_bytes for one in registered], geometry.plant)
    return Arrangement(
        name=name,
        num_blocks=plan.num_blocks,
        layouts=tensors,
        order=tuple(rows.index(one) for one in registered),
        groups=groups,
        pieces={
            group.group: tuple(
                piece
                for layer in group.layers
                for view in plan.views[layer]
                for piece in _pieces(view, plan.specs[layer], rows)
            )
            for group in plan.groups
        },
    )


def _pieces(view: View, spec: LayerSpec, rows: Sequence[Rows]) -> Iterator[Piece]:
    """What a layer's view, or that of one of its states, has of each block: kernel blocks, the other dimensions in the
    order in which the backend indexes them, and the bytes of an element. K and V are two, where they lie apart.
    """
    item = item_bytes(view.dtype)
    dims = [(size, stride * item) for size, stride in zip(view.shape, view.strides, strict=True)]
    count, pitch = dims.pop(0 if isinstance(spec, Mamba) else spec.block_dim)
    blocks, kernel_blocks = count // spec.kernel_blocks, spec.kernel_blocks
    apart = next((dim for dim in dims if dim[0] > 1 and dim[1] > pitch), (1, 0))
    within = [dim for dim in dims if dim is not apart]
    shape, strides = zip((blocks, kernel_blocks * pitch), (kernel_blocks, pitch), *within, (item, 1), strict=True)
    for number in range(apart[0]):
        offset = view.offset + number * apart[1]
        at = max(at for at, one in enumerate(rows) if (one.memory, one.offset) <= (view.memory, offset))
        yield Piece(at, offset - rows[at].offset, shape, strides)


def _with_wrong_refs(groups: tuple[Group, ...], pages: list[int], plant: str) -> tuple[Group, ...]:
    if plant == "refs":
        return tuple(replace(group, refs=_shifted(group.refs, pages)) for group in groups)
    one = groups[0]
    other = next((group for group in groups if group.refs != one.refs), one)
    exchanged = {one.group: other.refs, other.group: one.refs}
    return tuple(replace(group, refs=exchanged.get(group.group, group.refs)) for group in groups)


def _shifted(refs: Sequence[Ref], pages: list[int]) -> tuple[Ref, ...]:
    """Each SHIFT_BYTES behind its place, but for those with another ref behind them, or the page's end."""
    taken = {(ref.tensor, ref.offset) for ref in refs}
    return tuple(
        replace(ref, offset=ref.offset + SHIFT_BYTES)
        if ref.end + SHIFT_BYTES <= pages[ref.tensor]
        and not any(tensor == ref.tensor and ref.offset < offset < ref.end + SHIFT_BYTES for tensor, offset in taken)
        else ref
        for ref in refs
    )
