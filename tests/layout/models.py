"""Models whose layouts are known in figures."""

from __future__ import annotations

from dataclasses import replace

from kvoffloadd.layout import (
    FLASH_NHD,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    State,
)


def layer(
    heads: int = 2, size: int = 8, *, block: int = 4, backend: Backend | int = FLASH_NHD, **more: object
) -> Attention:
    """A small attention layer."""
    options: dict[str, object] = {"dtype": "bfloat16", **more}
    return Attention(block, heads, size, backend=backend, **options)  # type: ignore[arg-type]


def one_group(specs: dict[str, LayerSpec]) -> tuple[LayerGroup, ...]:
    return (LayerGroup(0, tuple(specs)),)


def named(prefix: str, count: int, spec: LayerSpec) -> dict[str, LayerSpec]:
    return {f"{prefix}{at}": spec for at in range(count)}


def gpt_oss(
    backend: Backend, *, tensor_parallel: int = 1, block: int = 16
) -> tuple[dict[str, LayerSpec], tuple[LayerGroup, ...]]:
    """gpt-oss-20b: 12 sliding layers and 12 full ones, in turn."""
    full = Attention(block, 8 // tensor_parallel, 64, "bfloat16", backend)
    sliding = replace(full, kind=LayerKind.SLIDING, window=128)
    specs: dict[str, LayerSpec] = {f"layers.{at}": full if at % 2 else sliding for at in range(24)}
    groups = tuple(LayerGroup(at, tuple(name for name in list(specs)[at::2])) for at in range(2))
    return specs, groups


def gemma_2b(num_groups: int) -> tuple[dict[str, LayerSpec], tuple[LayerGroup, ...]]:
    """gemma-2-2b: 26 layers of 4 heads of 256, in one or two groups."""
    full = Attention(16, 4, 256, "bfloat16", FLASH_NHD)
    sliding = replace(full, kind=LayerKind.SLIDING, window=4096) if num_groups > 1 else full
    specs: dict[str, LayerSpec] = {f"layers.{at}": full if at % 2 else sliding for at in range(26)}
    groups = tuple(LayerGroup(at, tuple(list(specs)[at::num_groups])) for at in range(num_groups))
    return specs, groups


def mamba(conv: tuple[int, ...] = (3, 6), ssm: tuple[int, ...] = (2, 4), *, block: int = 16, padded: int = 0) -> Mamba:
    """A Mamba layer: conv in bf16, ssm in fp32."""
    return Mamba(block, (State(conv, "bfloat16"), State(ssm, "float32")), padded)
