"""Determines which attention heads a rank has, so that engines of several tensor-parallel sizes share what they
store.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.errors import UsageError
from kvoffloadd.layout.spec import LayerKind


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a group: `held` of `parts` parts, from `part` on. `writes`: of its replicas, it stores."""

    parts: int
    part: int
    held: int
    writes: bool


def share_of(kind: LayerKind, total_heads: int, rank: int, ranks: int, parts: int = 0) -> Share:
    """Returns the share of a tensor-parallel rank. With more ranks than heads several have the same head, as they all
    have MLA's latent.

    `parts`: as many as the largest engine has ranks, if engines of several sizes share a namespace: each part is an
    equal range of heads, and a rank of a smaller engine holds several. 0: as many as there are ranks here.

    Raises UsageError where heads, parts and ranks do not divide, and for Mamba and opaque layers, which have no heads.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} of {ranks}")
    if kind in (LayerKind.MAMBA, LayerKind.OPAQUE):
        what = "Mamba states" if kind is LayerKind.MAMBA else "opaque layers"
        raise UsageError(f"{what} can't be shared across tensor-parallel sizes: they are not heads")
    if kind is LayerKind.MLA:
        return Share(1, 0, 1, rank == 0)
    shards = min(ranks, total_heads)
    if ranks % shards or total_heads % shards:
        raise UsageError(f"{total_heads} heads can't be split over {ranks} ranks")
    parts = parts or shards
    if parts % shards or total_heads % parts:
        raise UsageError(
            f"{total_heads} heads over {ranks} ranks can't be {parts} parts: each rank must hold whole parts, and each "
            f"part whole heads; {total_heads} parts always can"
        )
    replicas, held = ranks // shards, parts // shards
    return Share(parts, rank // replicas * held, held, rank % replicas == 0)
