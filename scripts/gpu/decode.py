"""A decode loop as an engine's: one token for each of a batch of requests, layer by layer, replayed as a CUDA graph.

The shapes are those of an 8 billion parameter model with grouped attention, with fewer layers, so that it is made in a
second. On the CPU (`device="cpu"`) it is tiny, not captured, and its speed means nothing.
"""

from __future__ import annotations

import importlib
import threading
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Describes the model and its batch."""

    layers: int = 8
    requests: int = 64
    context: int = 1024
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    inner: int = 14336

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


TINY = DecodeSizes(layers=1, requests=2, context=16, heads=2, kv_heads=1, head_dim=8, inner=32)
REPLAYS = 4
"""Steps between two looks at the clock."""


class DecodeLoop:
    """`steps_per_s` of a thread that decodes without a pause while `with` lasts."""

    def __init__(self, device: str) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._cuda = device == "cuda"
        self._sizes = DecodeSizes() if self._cuda else TINY
        dtype = self._torch.bfloat16 if self._cuda else self._torch.float32
        sizes = self._sizes

        def weights(*shape: int) -> Any:
            return self._torch.randn(*shape, device=device, dtype=dtype) / shape[-1] ** 0.5

        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self._layers = [
            (
                weights(width, sizes.hidden),
                weights(sizes.hidden, sizes.hidden),
                weights(2 * sizes.inner, sizes.hidden),
                weights(sizes.hidden, sizes.inner),
            )
            for _ in range(sizes.layers)
        ]
        shape = (sizes.requests, sizes.kv_heads, sizes.context, sizes.head_dim)
        self._kv = [(weights(*shape), weights(*shape)) for _ in range(sizes.layers)]
        self._x = weights(sizes.requests, sizes.hidden)
        self._stream: Any = self._torch.cuda.Stream() if self._cuda else None
        self._graph = self._captured() if self._cuda else None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.steps_per_s = 0.0

    def _step(self) -> None:
        functional, sizes, x = self._torch.nn.functional, self._sizes, self._x
        groups = sizes.heads // sizes.kv_heads
        for (qkv, out, gate_up, down), (keys, values) in zip(self._layers, self._kv, strict=True):
            q = functional.linear(x, qkv)[:, : sizes.hidden].reshape(
                sizes.requests, sizes.kv_heads, groups, sizes.head_dim
            )
            scores = self._torch.softmax(q @ keys.transpose(-1, -2) / sizes.head_dim**0.5, -1)
            x = x + functional.linear((scores @ values).reshape(sizes.requests, sizes.hidden), out)
            gate, up = functional.linear(x, gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
            x = functional.normalize(x, dim=-1)

    def _captured(self) -> Any:
        with self._torch.no_grad(), self._torch.cuda.stream(self._stream):
            for _ in range(3):
                self._step()
            self._stream.synchronize()
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._step()
        return graph

    def _run(self) -> None:
        count, begun = 0, time.perf_counter()
        while not self._stop.is_set():
            if self._graph is None:
                with self._torch.no_grad():
                    self._step()
                count += 1
                continue
            with self._torch.cuda.stream(self._stream):
                for _ in range(REPLAYS):
                    self._graph.replay()
            self._stream.synchronize()
            count += REPLAYS
        self.steps_per_s = count / (time.perf_counter() - begun)

    def __enter__(self) -> DecodeLoop:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join()
