"""Checks, by where layers lie, that vLLM's canonical caches have all bytes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffloadd.errors import UsageError


@dataclass(frozen=True, slots=True)
class Span:
    """A layer's tensor. `blocks`: of the kernels, a whole number of them makes one of vLLM's; `address` of the first;
    each has elements over `block_bytes` and begins `stride_bytes` after the one before.
    """

    address: int
    blocks: int
    block_bytes: int
    stride_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> Span:
        """Returns the span of `tensor`: a torch tensor with blocks as its first dimension, as all of vLLM's have."""
        item = tensor.element_size()
        inner = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
        last = sum((size - 1) * stride for size, stride in inner)
        return cls(tensor.data_ptr(), int(tensor.shape[0]), (last + 1) * item, tensor.stride(0) * item)

    def lies_in(self, rows: Any, page_bytes: int) -> bool:
        """Returns whether each block's bytes are among the first `page_bytes` of its row. `rows`: int8 (num_blocks,
        page).
        """
        count, pitch = int(rows.shape[0]), rows.stride(0) * rows.element_size()
        kernel_blocks = self.blocks // count
        offset = self.address - rows.data_ptr()
        end = offset + (kernel_blocks - 1) * self.stride_bytes + self.block_bytes
        in_step = count == 1 or kernel_blocks * self.stride_bytes == pitch
        return self.blocks == kernel_blocks * count and in_step and offset >= 0 and end <= page_bytes


def check_covered(
    layers: Sequence[str], refs: Sequence[Any], tensors: Sequence[Any], spans: Mapping[str, Sequence[Span]]
) -> None:
    """Checks that every byte of a group's layers is in a page that vLLM names: others would be neither stored nor
    loaded.

    `layers`, `refs`, `tensors`: a group's names, its CanonicalKVCacheRefs and the CanonicalKVCacheTensors that those
    point to. A layer without spans is not known, and not checked. Raises UsageError, naming the layer.
    """
    for layer in layers:
        for span in spans.get(layer, ()):
            if not any(span.lies_in(tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs):
                raise UsageError(
                    f"layer {layer}: vLLM's offloading names pages that do not have all bytes of its KV cache, so "
                    "that what is loaded would be incomplete; choose another KV cache layout "
                    "(VLLM_KV_CACHE_LAYOUT=LBHNC keeps each layer in a tensor of its own)"
                )
