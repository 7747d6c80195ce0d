"""What a load of 32k tokens asks of a driver by each way of copying: sums made by hand, and a daemon that counts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import Client, KvCache, NamespaceSpec, Outcome
from kvoffloadd.config import Config, CopyConfig, CudaConfig
from kvoffloadd.planner import Rank
from kvoffloadd.planner.layouts import CROSS_LAYER, KV_APART, PER_LAYER, Layout, possible_layouts
from scripts.harness.copies import WAYS, counted
from scripts.harness.daemon import Daemon
from scripts.harness.models import named
from scripts.harness.places import GpuPlace
from scripts.harness.places import Layout as TensorLayout
from tests.e2e import gpu_rank
from tests.e2e.daemons import make_daemon
from tests.planner.operations import Operations, load_operations

DOCUMENT = Path(__file__).parents[2] / "docs" / "PLANNING.md"
TOKENS = 32_768
MIB = 1 << 20


def layout_of(name: str, tp: int, layout: str = PER_LAYER, num_blocks: int = 2) -> Layout:
    found, _ = possible_layouts(Rank(named(name), tp, 16), num_blocks=num_blocks)
    return next(one for one in found if one.name == layout)


def test_llama_3_1_70b_on_8_ranks() -> None:
    """80 rows of 16*2*128*2 = 8,192 bytes a block, 2,048 blocks: 163,840 rows of 80*8,192 = 655,360 bytes a block.

    They are planned 102 blocks at a time, which is what 64 MiB hold: 2,048 = 20*102 + 8. 102*80 = 8,160 rows take 8
    batches of 1,024, 8*80 take 1: 20*8 + 1. A block's rows are one run.
    """
    assert load_operations(layout_of("llama-3.3-70b", 8), TOKENS) == Operations(
        descriptors=163_840, copies=163_840, batches=161, runs=2048, rest=0
    )


def test_deepseek_v3() -> None:
    """61 latents of 16*576*2 = 18,432 bytes a block, 1,124,352 in all, 2,048 blocks: 124,928 rows.

    64 MiB hold 59 blocks: 2,048 = 34*59 + 42. 59*61 = 3,599 rows take 4 batches, 42*61 = 2,562 take 3: 34*4 + 3.
    """
    assert load_operations(layout_of("deepseek-r1", 8), TOKENS) == Operations(
        descriptors=124_928, copies=124_928, batches=139, runs=2048, rest=0
    )


def test_gpt_oss_120b_on_8_ranks() -> None:
    """18 rows of 16*2*64*2 = 4,096 bytes a block in each of two groups. All 2,048 blocks of the full one, and the last
    8 of windows of 128 tokens: 2,056*18 = 37,008 rows, 144.56 MiB, which are planned at once.

    Three chunks of 12,336 rows take 13 batches each. Runs are sought in pieces of whole blocks.
    """
    assert load_operations(layout_of("gpt-oss-120b", 8), TOKENS) == Operations(
        descriptors=37_008, copies=37_008, batches=39, runs=2056, rest=0
    )


def test_qwen_3_next_on_2_ranks() -> None:
    """Rows of 544*2*256*2 = 557,056 bytes, 12 to a block: 60 blocks of 544 tokens; and the last states of three groups,
    (3*4,096 + 16*128*128)*2 = 548,864 bytes, 12 each. 63*12 = 756 rows, 420,839,424 bytes, 401.3 MiB, planned at once.

    Seven chunks of 60,119,918 bytes, one batch each, are cut within six rows. Runs are sought in pieces of whole
    blocks.
    """
    assert load_operations(layout_of("qwen3-next-80b-a3b", 2), TOKENS) == Operations(
        descriptors=756, copies=756 + 6, batches=7, runs=63, rest=0
    )


def test_k_and_v_apart() -> None:
    """Twice as many rows of half the size, 160 to a block; they are as evenly apart. 102*160 rows take 16 batches."""
    assert load_operations(layout_of("llama-3.3-70b", 8, KV_APART), TOKENS) == Operations(
        descriptors=327_680, copies=327_680, batches=20 * 16 + 2, runs=2048, rest=0
    )


def test_one_row_a_block() -> None:
    """2,048 rows of 640 KiB, 102 in 64 MiB; a batch for each of 21 pieces. Nothing lies evenly apart."""
    found = load_operations(layout_of("llama-3.3-70b", 8, CROSS_LAYER), TOKENS)
    assert (found.descriptors, found.runs, found.rest) == (2048, 0, 2048)


def test_less_than_a_block() -> None:
    nothing = Operations(descriptors=0, copies=0, batches=0, runs=0, rest=0)
    assert load_operations(layout_of("llama-3.3-70b", 8), 15) == nothing


DOCUMENTED = {
    "Llama-3.1-70B, 8": ("llama-3.3-70b", 8),
    "DeepSeek-V3, 8": ("deepseek-r1", 8),
    "gpt-oss-120b, 8": ("gpt-oss-120b", 8),
    "gpt-oss-120b, 1": ("gpt-oss-120b", 1),
    "Qwen3-Next, 2": ("qwen3-next-80b-a3b", 2),
}


@pytest.mark.parametrize("label", DOCUMENTED)
def test_the_document_has_these(label: str) -> None:
    """Models under the names of others that are built alike."""
    found, row_bytes = operations_and_row(*DOCUMENTED[label])
    line = f"| {label} | {row_bytes:,} | {found.copies:,} | {found.batches:,} | {found.runs:,} + {found.rest:,} |"
    assert line in DOCUMENT.read_text(encoding="utf-8").splitlines()


def operations_and_row(name: str, tp: int) -> tuple[Operations, int]:
    layout = layout_of(name, tp)
    row_bytes = max(ref.length for group in layout.plan.canonical.groups for ref in group.refs)
    return load_operations(layout, TOKENS), row_bytes


# --- as a daemon counts ---

SMALL = Config(copy=CopyConfig(chunk_bytes=2 * MIB), cuda=CudaConfig(batch_descriptors=300))
"""So that less than 32k tokens are many chunks."""
CASES = [("llama-3.3-70b", PER_LAYER, 400), ("gpt-oss-120b", PER_LAYER, 1600), ("deepseek-r1", CROSS_LAYER, 200)]
"""Of each: its tokens."""


@pytest.fixture(scope="module", params=list(WAYS))
def forced(request: pytest.FixtureRequest) -> Iterator[tuple[str, Daemon]]:
    """A way of copying, and a daemon that has no other."""
    if why := gpu_rank.why_no_cuda():
        pytest.skip(why)
    way: str = request.param
    sizes = {
        "memory.slab_bytes": "4MiB",
        "copy.chunk_bytes": str(SMALL.copy.chunk_bytes),
        "cuda.batch_descriptors": str(SMALL.cuda.batch_descriptors),
    }
    gpu_rank.extras()
    settings = [f"{name}={value}" for name, value in {**WAYS[way], **sizes}.items()]
    daemon = make_daemon(Path(tempfile.mkdtemp(prefix="kvo-", dir="/tmp")), *settings, driver={})
    yield way, daemon
    daemon.finish()


@pytest.mark.parametrize(("name", "which", "tokens"), CASES)
def test_a_daemon_counts_as_many(forced: tuple[str, Daemon], name: str, which: str, tokens: int, seed: int) -> None:
    """The load is to blocks and from slots that lie anywhere; one rank's part is all that a key has."""
    way, daemon = forced
    planned = load_operations(layout_of(name, 8, which), tokens, SMALL)
    blocks = layout_of(name, 8, which).needed_blocks(tokens)
    layout = layout_of(name, 8, which, num_blocks=2 * sum(blocks))
    rng = np.random.default_rng(seed)
    ids = np.split(2 * rng.permutation(sum(blocks)), np.cumsum(blocks)[:-1])
    wanted = {
        group: (rng.integers(0, 256, (count, 32), np.uint8), ids[group]) for group, count in enumerate(blocks) if count
    }
    with Client(daemon.socket, namespace=NamespaceSpec(model=name), deadline_s=30.0) as client:
        registration = client.register(_kv_cache(layout, rng))
        assert client.wait(client.store(registration, wanted), 30.0).outcome is Outcome.DONE
        orders = {group: rng.permutation(len(keys)) for group, (keys, _) in wanted.items()}
        shuffled = {group: (keys[orders[group]], blocks) for group, (keys, blocks) in wanted.items()}
        before = {**daemon.status()["transfers"]["load"], **counted(daemon.status())}
        assert client.wait(client.load(registration, shuffled), 30.0).outcome is Outcome.DONE
        after = {**daemon.status()["transfers"]["load"], **counted(daemon.status())}
        client.clear()
    moved = {count: after[count] - before[count] for count in after if isinstance(after[count], int)}
    assert moved["descriptors"] == planned.descriptors
    assert moved["pitched_copies"] == (planned.runs if way == "pitched" else 0)
    if way == "dma":
        assert moved["copies"] == planned.copies


def _kv_cache(layout: Layout, rng: np.random.Generator) -> KvCache:
    """Makes a KV cache of one allocation, as the layout has it."""
    rows = layout.plan.canonical.rows
    place = GpuPlace(
        gpu_rank.gpu(), [TensorLayout(one.num_blocks, one.page_bytes, one.stride_bytes) for one in rows], rng, "dense"
    )
    return KvCache(place.tensors, layout.plan.canonical.groups)
