"""Models by name, whole or as small as a test machine holds: fewer layers, smaller heads, the same structure."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from kvoffloadd.planner import ModelConfig, read_model
from kvoffloadd.planner.heads import Heads
from kvoffloadd.planner.states import DeltaHeads, LightningHeads, LinearHeads, MambaHeads, Recurrent, ShortConv
from kvoffloadd.testing.process import ROOT
from scripts.harness.published import CONFIGS

FILES = {path.stem: path for path in sorted((ROOT / "tests" / "planner" / "data").glob("*.json"))}
NAMES = tuple(sorted({*FILES, *CONFIGS}))
"""Those in `tests/planner/data` and `published`."""
EACH_KIND = 3
"""Layers of each kind that a small model has by default; and one layer more, so that groups are uneven."""
HEADS, HEAD_SIZE, STATE_HEADS = 2, 16, 4
WINDOW_TOKENS, CHUNK_TOKENS = 72, 64
"""A window that ends within a block; a chunk of whole ones."""


@functools.cache
def named(name: str) -> ModelConfig:
    """A model of NAMES, whole."""
    if name in FILES:
        return read_model(FILES[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
        return read_model(path)


def small(model: ModelConfig, kv_heads: int = HEADS, each_kind: int = EACH_KIND) -> ModelConfig:
    """Its first layers, with few small heads and states, a short window. DeepSeek V4's entries stay as they are."""
    layers = _few_layers(model, each_kind)
    return replace(
        model,
        kinds=model.kinds[:layers],
        ratios=model.ratios[:layers],
        kv_heads=min(model.kv_heads, kv_heads),
        head_size=model.head_size if model.ratios else min(model.head_size, HEAD_SIZE),
        full_heads=model.full_heads and Heads(min(model.full_heads.count, kv_heads), 2 * HEAD_SIZE),
        indexed=tuple(at for at in model.indexed if at < layers),
        window=min(model.window, WINDOW_TOKENS),
        chunk=min(model.chunk, CHUNK_TOKENS),
        linear=_few_states(model.linear),
    )


def _few_layers(model: ModelConfig, each_kind: int) -> int:
    """Returns the fewest that have `each_kind` of each kind, or all there are, and one more."""
    indexed = [at in model.indexed for at in range(len(model.kinds))]
    kinds = list(zip(model.kinds, model.ratios or model.kinds, indexed, strict=True))
    wanted = {kind: min(each_kind, count) for kind, count in Counter(kinds).items()}
    layers = next(at for at in range(len(kinds) + 1) if Counter(kinds[:at]) >= Counter(wanted))
    return min(layers + 1, len(kinds))


def _few_states(linear: Recurrent | None) -> Recurrent | None:
    match linear:
        case DeltaHeads() | LightningHeads():
            return replace(linear, heads=STATE_HEADS, head_size=HEAD_SIZE)
        case LinearHeads():
            return replace(linear, key_heads=HEADS, value_heads=STATE_HEADS, key_size=HEAD_SIZE, value_size=HEAD_SIZE)
        case MambaHeads():
            return replace(
                linear,
                heads=STATE_HEADS,
                head_size=HEAD_SIZE,
                inner=STATE_HEADS * HEAD_SIZE,
                state_size=HEAD_SIZE,
                groups=min(linear.groups, HEADS),
            )
        case ShortConv():
            return replace(linear, channels=STATE_HEADS * HEAD_SIZE)
    return None
