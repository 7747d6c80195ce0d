"""The worker's side of layouts: presents an engine's memory, however allocated, as canonical tensors and refs.

`canonicalise` takes an engine's tensors; `cross_layers`, `packed_pages` and `packed_rows` plan memory for an engine
that lets us allocate. Importing this loads no torch.
"""

from kvoffloadd.layout.backend import (
    FLASH_HND,
    FLASH_NHD,
    FLASHINFER_HND,
    LATENT,
    PACKED_HND,
    PACKED_NHD,
    TRITON_HND,
    TRITON_NHD,
    Backend,
)
from kvoffloadd.layout.cache import CanonicalCache, canonicalise
from kvoffloadd.layout.canonical import Canonical, canonical_geometry
from kvoffloadd.layout.crosslayer import cross_layers
from kvoffloadd.layout.geometry import Rows, View
from kvoffloadd.layout.heads import Share, share_of
from kvoffloadd.layout.packing import packed_block_size, packed_pages
from kvoffloadd.layout.plan import HOST, Allocated, Plan, TensorPlan
from kvoffloadd.layout.reach import Reach, clip, descriptors
from kvoffloadd.layout.rows import packed_rows, uniform_type
from kvoffloadd.layout.spec import Attention, LayerGroup, LayerKind, LayerSpec, Mamba, Opaque, State, layer_kind

__all__ = [
    "FLASHINFER_HND",
    "FLASH_HND",
    "FLASH_NHD",
    "HOST",
    "LATENT",
    "PACKED_HND",
    "PACKED_NHD",
    "TRITON_HND",
    "TRITON_NHD",
    "Allocated",
    "Attention",
    "Backend",
    "Canonical",
    "CanonicalCache",
    "LayerGroup",
    "LayerKind",
    "LayerSpec",
    "Mamba",
    "Opaque",
    "Plan",
    "Reach",
    "Rows",
    "Share",
    "State",
    "TensorPlan",
    "View",
    "canonical_geometry",
    "canonicalise",
    "clip",
    "cross_layers",
    "descriptors",
    "layer_kind",
    "packed_block_size",
    "packed_pages",
    "packed_rows",
    "share_of",
    "uniform_type",
]
