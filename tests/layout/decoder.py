"""A small decoder that remembers nothing but what it wrote through its layers' tensors, one token at a time.

Each token is a separate sequence of operations, over copies of what it looks at, so that equal values in memory make
equal logits, bit for bit, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from kvoffloadd.layout import Attention, LayerGroup, LayerKind, LayerSpec, Mamba
from scripts.harness.paged import keys_and_values

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

VOCABULARY, HIDDEN, INNER = 211, 48, 96
QUERIES_PER_HEAD = 2
LATENT_HEADS = 4
BYTE_STEPS, BYTE_ZERO = 16, 128
HEAD_STATES = 3
"""Dimensions of a state that each head has: head, value, key."""

Tables = Mapping[int, Sequence[int]]
"""Group -> the block that holds its n-th tokens."""

Weight = Callable[..., Any]
"""Of a shape, scaled so that its products are as large as what they are products of."""


class _Attention:
    """Grouped queries; a bias that grows with distance shows where a token is.

    Positions in the keys would not do: blocks that changed places would look the same.
    """

    def __init__(self, spec: Attention, layer: Any, weight: Weight) -> None:
        self._spec = spec
        self._keys, self._values = keys_and_values(layer, spec)
        width = spec.num_kv_heads * spec.head_size
        self._query, self._out = weight(HIDDEN, QUERIES_PER_HEAD * width), weight(QUERIES_PER_HEAD * width, HIDDEN)
        self._key, self._value = weight(HIDDEN, width), weight(HIDDEN, width)
        slopes = 0.08 * 0.5 ** torch.arange(spec.num_kv_heads * QUERIES_PER_HEAD)
        self._slopes = slopes.view(spec.num_kv_heads, QUERIES_PER_HEAD, 1)
        self._sink = weight(1, spec.num_kv_heads, QUERIES_PER_HEAD, 1)[0]

    def _places(self, tokens: Any, table: Sequence[int]) -> tuple[Any, Any]:
        """Kernel block and place in it of each of these tokens."""
        spec = self._spec
        page = spec.block_size // spec.kernel_blocks
        blocks = torch.tensor(table)[tokens // spec.block_size]
        return blocks * spec.kernel_blocks + tokens % spec.block_size // page, tokens % page

    def __call__(self, x: Any, position: int, table: Sequence[int]) -> Any:
        heads, size = self._spec.num_kv_heads, self._spec.head_size
        here = self._places(torch.tensor([position]), table)
        self._keys[here] = (x @ self._key).view(1, heads, size).to(self._keys.dtype)
        self._values[here] = (x @ self._value).view(1, heads, size).to(self._values.dtype)
        seen = torch.arange(max(0, position + 1 - self._spec.window) if self._spec.window else 0, position + 1)
        pages = self._places(seen, table)
        keys, values = self._keys[pages].float().contiguous(), self._values[pages].float().contiguous()
        query = (x @ self._query).view(heads, QUERIES_PER_HEAD, size)
        scores = torch.einsum("hqd,thd->hqt", query, keys) / size**0.5 - self._slopes * (position - seen)
        weights = torch.cat([scores, self._sink], -1).softmax(-1)[..., :-1]  # the sink takes a share, and gives nothing
        return torch.einsum("hqt,thd->hqd", weights, values).reshape(-1) @ self._out


class _Latent:
    """One vector for each entry of some tokens, which is key and, but for its last quarter, value of all heads. It is
    written with the entry's last token. Of bytes, each is a number of steps.
    """

    def __init__(self, spec: Attention, layer: Any, weight: Weight) -> None:
        self._spec = spec
        self._latents = layer
        self._value_size = spec.head_size - spec.head_size // 4
        self._latent = weight(HIDDEN, spec.head_size)
        self._query = weight(HIDDEN, LATENT_HEADS * spec.head_size)
        self._out = weight(LATENT_HEADS * self._value_size, HIDDEN)
        self._slopes = 0.08 * 0.5 ** torch.arange(LATENT_HEADS)[:, None]

    def __call__(self, x: Any, position: int, table: Sequence[int]) -> Any:
        tokens = self._spec.tokens_per_entry
        size, done = self._spec.block_size // tokens, (position + 1) // tokens
        if (position + 1) % tokens == 0:
            self._write(table[(done - 1) // size], (done - 1) % size, x @ self._latent)
        first = max(0, position + 1 - self._spec.window) // tokens if self._spec.window else 0
        seen = torch.arange(first, done)
        latents = self._read(torch.tensor(table)[seen // size], seen % size)
        query = (x @ self._query).view(LATENT_HEADS, -1)
        scores = query @ latents.T / self._spec.head_size**0.5 - self._slopes * (done - seen)
        return (scores.softmax(-1) @ latents[:, : self._value_size]).reshape(-1) @ self._out

    def _write(self, block: int, at: int, latent: Any) -> None:
        if self._latents.dtype == torch.uint8:
            latent = (latent * BYTE_STEPS + BYTE_ZERO).round().clamp(0, 255)
        self._latents[block, at] = latent.to(self._latents.dtype)

    def _read(self, blocks: Any, at: Any) -> Any:
        latents = self._latents[blocks, at].float().contiguous()
        return (latents - BYTE_ZERO) / BYTE_STEPS if self._latents.dtype == torch.uint8 else latents


class _DeltaNet:
    """A convolution, then a state for each head that forgets, and corrects what it has under a key."""

    def __init__(self, spec: Mamba, layer: Sequence[Any], weight: Weight) -> None:
        self._block_size = spec.block_size
        self._conv, self._state = layer
        (taps, channels), (self._heads, values, self._key_size) = (state.shape for state in spec.states)
        self._sizes = [(channels - self._heads * values) // 2] * 2 + [self._heads * values]
        self._enter, self._taps = weight(HIDDEN, channels), weight(taps + 1, channels)
        self._gates, self._leave = weight(HIDDEN, 2 * self._heads), weight(self._heads * values, HIDDEN)

    def _per_head(self, u: Any) -> Any:
        shared = u.view(-1, self._key_size)
        return torch.nn.functional.normalize(shared, dim=-1).repeat_interleave(self._heads // len(shared), 0)

    def __call__(self, x: Any, position: int, table: Sequence[int]) -> Any:
        block, before = table[position // self._block_size], table[max(position - 1, 0) // self._block_size]
        conv, state = (
            (one[before] if position else torch.zeros(one.shape[1:])).float() for one in (self._conv, self._state)
        )
        recent = torch.cat([conv, (x @ self._enter)[None]])
        query, key, value = torch.nn.functional.silu((recent * self._taps).sum(0)).split(self._sizes)
        query, key = self._per_head(query), self._per_head(key)
        keep, learn = torch.sigmoid(x @ self._gates).view(2, self._heads, 1)
        state = keep[..., None] * state
        wrong = value.view(self._heads, -1) - torch.einsum("hvk,hk->hv", state, key)
        state = state + torch.einsum("hv,hk->hvk", learn * wrong, key)
        self._conv[block], self._state[block] = recent[1:], state
        return torch.einsum("hvk,hk->hv", state, query).reshape(-1) @ self._leave


class _Mamba:
    """A convolution over the last tokens, then a recurrent state. Both lie in the block of the token that they follow:
    a block's states are those after its last token.
    """

    def __init__(self, spec: Mamba, layer: Sequence[Any], weight: Weight) -> None:
        self._block_size = spec.block_size
        self._conv, self._ssm = layer
        (taps, channels), (_, size) = (state.shape for state in spec.states)
        self._enter, self._gate, self._leave = (
            weight(HIDDEN, channels),
            weight(HIDDEN, channels),
            weight(channels, HIDDEN),
        )
        self._taps, self._step = weight(taps + 1, channels), weight(channels, channels)
        self._write, self._read = weight(channels, size), weight(channels, size)
        self._decay = torch.linspace(0.02, 0.4, size)

    def __call__(self, x: Any, position: int, table: Sequence[int]) -> Any:
        block = table[position // self._block_size]
        if position:
            before = table[(position - 1) // self._block_size]
            conv, ssm = self._conv[before].float(), self._ssm[before].float()
        else:
            conv, ssm = torch.zeros(self._conv.shape[1:]), torch.zeros(self._ssm.shape[1:])
        recent = torch.cat([conv, (x @ self._enter)[None]])
        u = torch.nn.functional.silu((recent * self._taps).sum(0))
        step = torch.nn.functional.softplus(u @ self._step)[:, None]
        ssm = torch.exp(-step * self._decay) * ssm + step * u[:, None] * (u @ self._write)
        self._conv[block], self._ssm[block] = recent[1:], ssm
        return (ssm @ (u @ self._read)) * torch.nn.functional.silu(x @ self._gate) @ self._leave


def _mixer(spec: LayerSpec, layer: Any, weight: Weight) -> Callable[[Any, int, Sequence[int]], Any]:
    if isinstance(spec, Attention):
        return _Latent(spec, layer, weight) if spec.kind is LayerKind.MLA else _Attention(spec, layer, weight)
    assert isinstance(spec, Mamba)
    return (_DeltaNet if len(spec.states[1].shape) == HEAD_STATES else _Mamba)(spec, layer, weight)


class Decoder:
    """Random weights, greedy tokens. `layers`: what an engine's layers read and write, in the model's order."""

    def __init__(
        self, specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup], layers: Mapping[str, Any], seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Any:
            return torch.randn(shape, generator=generator) / shape[0] ** 0.5

        group_of = {layer: group.group for group in groups for layer in group.layers}
        self._embedding = torch.randn((VOCABULARY, HIDDEN), generator=generator)
        self._layers = [
            (
                group_of[name],
                _mixer(spec, layers[name], weight),
                weight(HIDDEN, INNER),
                weight(INNER, HIDDEN),
            )
            for name, spec in specs.items()
        ]
        self._head = weight(HIDDEN, VOCABULARY)

    def step(self, token: int, position: int, tables: Tables) -> Any:
        """Logits of what follows this token."""
        x = self._embedding[token]
        for group, mix, up, down in self._layers:
            x = x + mix(_normed(x), position, tables[group])
            x = x + torch.nn.functional.silu(_normed(x) @ up) @ down
        return _normed(x) @ self._head

    def prefill(self, prompt: Sequence[int], tables: Tables, start: int = 0) -> Any:
        """Logits behind the prompt, whose first `start` tokens are in memory."""
        logits = None
        for position in range(start, len(prompt)):
            logits = self.step(prompt[position], position, tables)
        return logits

    def generate(self, prompt: Sequence[int], tables: Tables, count: int, start: int = 0) -> tuple[list[int], Any]:
        """`count` tokens, and the logits (count, vocabulary) of each."""
        logits = [self.prefill(prompt, tables, start)]
        tokens = [int(logits[0].argmax())]
        while len(tokens) < count:
            logits.append(self.step(tokens[-1], len(prompt) + len(tokens) - 1, tables))
            tokens.append(int(logits[-1].argmax()))
        return tokens, torch.stack(logits)


def _normed(x: Any) -> Any:
    return x * torch.rsqrt(x.square().mean() + 1e-6)
