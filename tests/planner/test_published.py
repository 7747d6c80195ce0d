"""What published models keep, against sums made by hand. One rank; blocks of 16 tokens unless the model sets them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cli.plan import plan_json, print_plan
from kvoffloadd.client import Client, NamespaceSpec, Outcome
from kvoffloadd.errors import ConfigError
from kvoffloadd.layout import TRITON_NHD, Attention, LayerKind
from kvoffloadd.planner import CapacityPlan, PlanInputs, Rank, make_plan, read_model
from kvoffloadd.planner.layouts import possible_layouts
from scripts.harness.daemon import Daemon
from scripts.harness.published import CONFIGS
from tests.planner.models import GIB, changed


def path_of(folder: Path, name: str, **keys: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | keys), encoding="utf-8")
    return path


def plan(folder: Path, name: str, **terms: Any) -> CapacityPlan:
    inputs = PlanInputs(memory_bytes=64 * GIB, **terms)
    return make_plan(read_model(path_of(folder, name)), inputs)


@dataclass(frozen=True)
class Group:
    """`payload`: bytes of a block of the group on one rank."""

    kind: str
    layers: int
    payload: int
    window: int = 0
    block: int = 0


FULL, SLIDING, CHUNKED, MLA, MAMBA = "full", "sliding", "chunked", "mla", "mamba"

EXPECTED: dict[str, tuple[int, int, int, list[Group]]] = {
    # (bytes of a token and layer, bytes of a state, tokens of a block, groups)
    # A token: 2 (K and V) x KV heads x head size x 2 bytes. A block of a group: 16 x that x layers.
    "llama-3.3-70b": (4096, 0, 16, [Group(FULL, 80, 5_242_880)]),  # 2*8*128*2; 16*4096*80
    "llama-4-maverick": (  # 2*8*128*2; 36 chunked, 12 full: groups of 12: 16*4096*12
        4096, 0, 16, [*[Group(CHUNKED, 12, 786_432, 8192)] * 3, Group(FULL, 12, 786_432)],
    ),
    "qwen2.5-7b": (2048, 0, 16, [Group(FULL, 28, 917_504)]),  # 2*4*128*2; 16*2048*28
    "qwen3-8b": (4096, 0, 16, [Group(FULL, 36, 2_359_296)]),  # 16*4096*36
    "qwen3-32b": (4096, 0, 16, [Group(FULL, 64, 4_194_304)]),  # 16*4096*64
    "qwen3-30b-a3b": (2048, 0, 16, [Group(FULL, 48, 1_572_864)]),  # 16*2048*48
    "qwen3-235b-a22b": (2048, 0, 16, [Group(FULL, 94, 3_080_192)]),  # 16*2048*94
    # 2*2*256*2. Convolution 3 * (2*16*128 + 32*128) * 2 = 49,152; recurrent 32*128*128*2 = 1,048,576.
    # 1,097,728 / (16*2048) = 33.5: blocks of 34*16. 36 states, 12 full: 12*1,097,728 and 12*544*2048.
    "qwen3-next-80b-a3b": (
        2048, 1_097_728, 544, [*[Group(MAMBA, 12, 13_172_736)] * 3, Group(FULL, 12, 13_369_344)],
    ),
    "gpt-oss-120b": (  # 2*8*64*2; 16*2048*18
        2048, 0, 16, [Group(SLIDING, 18, 589_824, 128), Group(FULL, 18, 589_824)],
    ),
    "gemma-2-27b": (  # 2*16*128*2; 16*8192*23
        8192, 0, 16, [Group(SLIDING, 23, 3_014_656, 4096), Group(FULL, 23, 3_014_656)],
    ),
    # Every sixth of 62 is full: 10; 52 sliding dealt out over ceil(52/10) = 6 groups. 131,072 a layer.
    "gemma-3-27b": (
        8192, 0, 16,
        [
            *[Group(SLIDING, 9, 1_179_648, 1024)] * 4,
            *[Group(SLIDING, 8, 1_048_576, 1024)] * 2,
            Group(FULL, 10, 1_310_720),
        ],
    ),
    # The last 15 of 35 have no separate cache: 16 sliding and 4 full. 2*2*256*2; 16*2048*4.
    "gemma-3n-e4b": (2048, 0, 16, [*[Group(SLIDING, 4, 131_072, 512)] * 4, Group(FULL, 4, 131_072)]),
    "mistral-small-3.2": (4096, 0, 16, [Group(FULL, 40, 2_621_440)]),  # 16*4096*40
    "mixtral-8x7b": (4096, 0, 16, [Group(FULL, 32, 2_097_152)]),  # 16*4096*32
    "deepseek-r1": (1152, 0, 16, [Group(MLA, 61, 1_124_352)]),  # (512+64)*2; 16*1152*61
    # With each latent a key of the index: 128 of fp8 and one scale of 4 bytes. 64*(1152 + 132)*61.
    "deepseek-v3.2": (1152, 0, 64, [Group(MLA, 122, 5_012_736)]),
    # An entry: 448 fp8 + 64*2 + 8 = 584. Layers: 2 with a window alone, 21 of ratio 4, 20 of ratio 128.
    # Windows, 64*584 a layer: dealt out by 22, which wastes least for 43, 21 and 20 layers. Entries of 256 tokens:
    # 21 * 64*584, 21 indexes * 64*132, 20 * 2*584. States of ratio 4: (2*2*512 + 2*2*128) floats of 4 tokens, 21 times;
    # of ratio 128: 2*512 floats of 8 tokens, 20 times.
    "deepseek-v4-flash": (
        584, 0, 256,
        [
            Group(MLA, 22, 822_272, 128, 64),
            Group(MLA, 21, 784_896, 128, 64),
            Group(MLA, 62, 985_664, 0, 256),
            Group(MLA, 42, 860_160, 8, 4),
            Group(MLA, 20, 655_360, 128, 8),
        ],
    ),
    # As Flash. 61 windows by 31, which wastes least for 61, 30 and 31 layers. Entries of 256 tokens: 30 * 64*584,
    # 30 * 64*132, 31 * 2*584. States of ratio 128: 2*512 floats of 8 tokens, 31 times; of ratio 4: 2*2*(512 + 128)
    # floats of 4 tokens, 30 times.
    "deepseek-v4-pro": (
        584, 0, 256,
        [
            Group(MLA, 31, 1_158_656, 128, 64),
            Group(MLA, 30, 1_121_280, 128, 64),
            Group(MLA, 91, 1_410_928, 0, 256),
            Group(MLA, 31, 1_015_808, 128, 8),
            Group(MLA, 60, 1_228_800, 8, 4),
        ],
    ),
    "glm-5": (1152, 0, 64, [Group(MLA, 156, 6_409_728)]),  # as DeepSeek V3.2: 64*(1152 + 132)*78
    # An index in layers 0, 1, 2 and each fourth from 6 to 74: 21. 64*(1152*78 + 132*21)
    "glm-5.2": (1152, 0, 64, [Group(MLA, 99, 5_928_192)]),
    # Sliding 2*16*256*2, full 2*4*512*2 = 8192: half of it, so that its blocks have twice the tokens. 50 and 10 layers.
    "gemma-4-31b": (
        16_384, 0, 32, [*[Group(SLIDING, 10, 2_621_440, 1024, 16)] * 5, Group(FULL, 10, 2_621_440)],
    ),
    # Sliding 2*8*256*2, full 2*2*512*2 = 4096. 25 and 5 layers: 5*16*8192 and 5*32*4096.
    "gemma-4-26b-a4b": (
        8192, 0, 32, [*[Group(SLIDING, 5, 655_360, 1024, 16)] * 5, Group(FULL, 5, 655_360)],
    ),
    # Convolution 3 * 3*32*128 * 2 = 73,728; state in float32 32*128*128*4 = 2,097,152. 2,170,880 / (128*1152) = 14.7:
    # blocks of 15*128. 20 states in groups of 7, as there are 7 latents: 7*2,170,880, 6*2,170,880, 7*1920*1152.
    "kimi-linear-48b-a3b": (
        1152, 2_170_880, 1920,
        [*[Group(MAMBA, 7, 15_196_160)] * 2, Group(MAMBA, 6, 13_025_280), Group(MLA, 7, 15_482_880)],
    ),
    "glm-4.6": (4096, 0, 16, [Group(FULL, 92, 6_029_312)]),  # 16*4096*92
    "kimi-k2": (1152, 0, 16, [Group(MLA, 61, 1_124_352)]),  # as DeepSeek V3
    "minimax-m2": (4096, 0, 16, [Group(FULL, 62, 4_063_232)]),  # 16*4096*62
    # 2*4*128*2, and in 57 layers a key of the index of 128*2. Blocks of 128: 128*(60*2048 + 57*256)
    "minimax-m3": (2048, 0, 128, [Group(FULL, 117, 17_596_416)]),
    # 2*8*128*2. 12 full, 33 sliding dealt out over three groups: 16*4096*12 and 16*4096*11
    "step-3.5-flash": (4096, 0, 16, [Group(FULL, 12, 786_432), *[Group(SLIDING, 11, 720_896, 512)] * 3]),
    "longcat-flash": (1152, 0, 16, [Group(MLA, 56, 1_032_192)]),  # two in each of 28 layers: 16*1152*56
    # 2*4*128*2. State 32*128*128*2 = 1,048,576: 32 times 16*2048, so that blocks have 32*16. 28 states in groups of 4,
    # as there are 4 full: 4*1,048,576 and 4*512*2048
    "ring-flash-linear-2.0": (
        2048, 1_048_576, 512, [*[Group(MAMBA, 4, 4_194_304)] * 7, Group(FULL, 4, 4_194_304)],
    ),
    "minicpm3-4b": (15_360, 0, 16, [Group(FULL, 62, 15_237_120)]),  # 2*40*(64 + 32)*2; 16*15360*62
    "phi-4": (5120, 0, 16, [Group(FULL, 40, 3_276_800)]),  # 2*10*128*2; 16*5120*40
    # Convolution 3 * (2*4096 + 2*128) * 2 = 50,688; state 128*64*128*2 = 2,097,152. 2,147,840 / (16*4096) = 32.8:
    # blocks of 33*16. 36 states in groups of 4, as there are 4 full: 4*2,147,840 and 4*528*4096.
    "granite-4.0-h-small": (
        4096, 2_147_840, 528, [*[Group(MAMBA, 4, 8_591_360)] * 9, Group(FULL, 4, 8_650_752)],
    ),
    # Convolution 3 * (128*64 + 2*8*128) * 2 = 61,440; state in float32 128*64*128*4 = 4,194,304. 4,255,744 / 65,536 =
    # 64.9: blocks of 65*16. 24 states, 4 full, the other 24 layers keep nothing: 4*4,255,744 and 4*1040*4096.
    "nemotron-h-8b": (
        4096, 4_255_744, 1040, [*[Group(MAMBA, 4, 17_022_976)] * 6, Group(FULL, 4, 17_039_360)],
    ),
    # A convolution keeps 2*2048*2, less than a block of 16*2048. 10 and 6: groups of 6, 10 dealt out over two.
    "lfm2-1.2b": (2048, 8192, 16, [*[Group(MAMBA, 5, 40_960)] * 2, Group(FULL, 6, 196_608)]),
    # Convolution 3 * (3072 + 2*256) * 2 = 21,504; state 24*128*256*2 = 1,572,864. 2*2*128*2 a token: 1,594,368 /
    # (16*1024) = 97.3: blocks of 98*16. Each layer has both: 44*1568*1024 and 44*1,594,368.
    "falcon-h1-7b": (1024, 1_594_368, 1568, [Group(FULL, 44, 70_647_808), Group(MAMBA, 44, 70_152_192)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_by_hand(tmp_path: Path, name: str) -> None:
    token, state, block, groups = EXPECTED[name]
    found = plan(tmp_path, name)
    assert (found.rank.token_bytes, found.rank.state_bytes, found.layout.block_tokens) == (token, state, block)
    numbers = plan_json(found)["groups"]
    shown = [(one["kind"], len(one["layers"]), one["payload_bytes"], one["window_tokens"]) for one in numbers]
    assert shown == [(one.kind, one.layers, one.payload, one.window) for one in groups]
    sizes = [found.layout.spec(group).block_size for group in range(found.layout.num_groups)]
    assert sizes == [one.block or block for one in groups]
    for layout in found.layouts:
        if layout.pack_size == 1:
            assert layout.payloads == found.layout.payloads


@pytest.mark.parametrize("name", CONFIGS)
def test_every_plan_can_be_shown(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, name, tp=2)
    print_plan(found)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert found.held[0].tokens > 0
    assert json.loads(json.dumps(plan_json(found)))["recommended"]["layout"] == found.recommended.name


# --- DeepSeek V3.2 and V4 ---


def test_latents_with_an_index_in_fp8(tmp_path: Path) -> None:
    """512 + 4*4 + 64*2 bytes of a latent, 128 + 4 of its index: 64*(656 + 132)*61."""
    found = plan(tmp_path, "deepseek-v3.2", kv_dtype="fp8")
    assert (found.rank.token_bytes, found.layout.payloads) == (656, (3_076_352,))
    assert plan(tmp_path, "deepseek-v3.2", block_size=65).layout.block_tokens == 128


def test_sizes_that_have_no_fp8(tmp_path: Path) -> None:
    odd = read_model(path_of(tmp_path, "deepseek-v3.2", kv_lora_rank=256))
    assert Rank(odd, 1, 64).token_bytes == 2 * (256 + 64)
    with pytest.raises(
        ConfigError, match=r"--kv-dtype fp8: engines keep only latents of 512 \+ 64 elements in this dtype"
    ):
        Rank(odd, 1, 64, "fp8")
    with pytest.raises(ConfigError, match="head_dim is not understood: only entries of 512 elements are known"):
        read_model(path_of(tmp_path, "deepseek-v4-flash", head_dim=256))


def test_an_index_is_in_the_same_descriptor_where_rows_are_packed(tmp_path: Path) -> None:
    found = plan(tmp_path, "deepseek-v3.2")
    assert {layout.name: layout.descriptors for layout in found.layouts} == {
        "a tensor a layer, blocks first": (122,),
        "cross-layer": (2,),  # a tensor for each page size
        "packed rows": (1,),
    }
    assert found.recommended.name == "packed rows"
    assert found.parts == (1,)


@pytest.mark.parametrize(
    ("name", "default"),
    [("deepseek-v3.2", True), ("deepseek-v4-flash", True), ("glm-5", True), ("kimi-k2", False), ("gemma-4-31b", False)],
)
def test_when_rows_are_packed_by_default(
    tmp_path: Path, name: str, default: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where each group's layers are of one kind, and pages of several sizes."""
    found = plan(tmp_path, name)
    print_plan(found)
    line = f'"packed rows": engines that have it use it {"by default" if default else "on request"}'
    assert line in capsys.readouterr().out
    assert plan_json(found)["rows_by_default"] is default


def test_blocks_of_several_lengths(tmp_path: Path) -> None:
    """The 600 tokens fill whole blocks of 64, 64, 256, 4 and 8; a restore ends after 512 of them.

    Before it: a window's last 127 tokens are in 2 blocks of 64, or 16 of 8, the last 7 in 2 blocks of 4.
    """
    layout = plan(tmp_path, "deepseek-v4-flash").layout
    assert layout.stored_blocks(600) == (9, 9, 2, 150, 75)
    assert layout.needed_blocks(600) == (2, 2, 2, 2, 16)
    assert layout.clipped_blocks(600) == (3, 3, 2, 3, 17)


def test_what_a_tier_holds_of_blocks_of_several_lengths(tmp_path: Path) -> None:
    """256 tokens are 4 blocks of each of two groups, 1, 64 and 32 of the others: 105 keys."""
    held = plan(tmp_path, "deepseek-v4-flash").held[0]
    assert (held.keys, held.tokens) == (105 * held.blocks, 256 * held.blocks)
    assert held.index_bytes == 92 * held.keys


def test_the_dtype_that_is_kept(tmp_path: Path) -> None:
    """DeepSeek V4 is kept in fp8 unless asked for otherwise, DeepSeek V3.2 only if asked for."""
    cases: list[tuple[str, dict[str, str], str]] = [
        ("deepseek-v4-flash", {}, "uint8"),
        ("deepseek-v4-flash", {"kv_dtype": "bfloat16"}, "bfloat16"),
        ("deepseek-v3.2", {}, "bfloat16"),
        ("deepseek-v3.2", {"kv_dtype": "fp8"}, "uint8"),
    ]
    for name, terms, dtype in cases:
        assert plan_json(plan(tmp_path, name, **terms))["rank"]["kv_dtype"] == dtype


@pytest.mark.parametrize("name", ["a tensor a layer, blocks first", "cross-layer", "packed rows"])
def test_a_daemon_counts_blocks_of_several_lengths(daemon: Daemon, tmp_path: Path, name: str, seed: int) -> None:
    """Six layers of DeepSeek V4, 512 tokens of them: what is stored, and what a restore needs."""
    pytest.importorskip("torch", reason="torch is not installed: it is the engine's")
    path = path_of(tmp_path, "deepseek-v4-flash", num_hidden_layers=6)
    found, _ = possible_layouts(Rank(read_model(path), 1, 16), num_blocks=400)
    layout = next(one for one in found if one.name == name)
    rng = np.random.default_rng(seed)
    stored, needed = layout.stored_blocks(512), layout.needed_blocks(512)
    ids = np.split(rng.permutation(400).astype(np.uint32)[: sum(stored)], np.cumsum(stored)[:-1])
    keys = [rng.integers(0, 256, (count, 32), dtype=np.uint8) for count in stored]
    with Client(daemon.socket, namespace=NamespaceSpec(model="planned", layout=name)) as client:
        client.connect()
        registration = client.register(layout.plan.allocate("host").cache.kv_cache())
        for direction, blocks in (("store", stored), ("load", needed)):
            before = daemon.status()["transfers"][direction]
            wanted = {
                group: (keys[group][len(keys[group]) - count :], ids[group][len(ids[group]) - count :])
                for group, count in enumerate(blocks)
            }
            job = client.store(registration, wanted) if direction == "store" else client.load(registration, wanted)
            assert client.wait(job, 15).outcome == Outcome.DONE
            after = daemon.status()["transfers"][direction]
            moved = {counter: after[counter] - before[counter] for counter in ("descriptors", "bytes", "keys")}
            assert moved == {
                "descriptors": layout.descriptors_of(blocks),
                "bytes": sum(count * each for count, each in zip(blocks, layout.payloads, strict=True)),
                "keys": sum(blocks),
            }


def test_v4_in_bfloat16(tmp_path: Path) -> None:
    """Entries of 512*2 bytes; its index and states stay as they are. 21*64*1024 + 21*64*132 + 20*2*1024."""
    found = plan(tmp_path, "deepseek-v4-flash", kv_dtype="bfloat16")
    assert (found.rank.token_bytes, found.layout.payloads[2]) == (1024, 1_376_256 + 177_408 + 40_960)
    with pytest.raises(ConfigError, match="--kv-dtype float32: engines keep this model's cache in fp8 or bfloat16"):
        plan(tmp_path, "deepseek-v4-flash", kv_dtype="float32")
    with pytest.raises(ConfigError, match="layers that compress tokens need the hybrid cache manager"):
        plan(tmp_path, "deepseek-v4-flash", hybrid=False)


# --- heads of two sizes ---


@pytest.mark.parametrize(
    ("tp", "sliding", "full"),
    [
        (1, (16, 256, 16), (4, 512, 32)),
        (4, (4, 256, 16), (1, 512, 32)),
        (8, (2, 256, 16), (1, 512, 16)),  # two ranks have the same head of full layers: as much as of sliding ones
        (16, (1, 256, 32), (1, 512, 16)),
    ],
)
def test_pages_are_equal_whatever_the_heads(
    tmp_path: Path, tp: int, sliding: tuple[int, int, int], full: tuple[int, int, int]
) -> None:
    """The parameters are, of each: heads, their size, tokens of a block."""
    rank = Rank(read_model(path_of(tmp_path, "gemma-4-31b")), tp, 16)
    specs = rank.specs(TRITON_NHD)
    found = [spec for spec in (specs["layers.0"], specs["layers.5"]) if isinstance(spec, Attention)]
    assert [(spec.num_kv_heads, spec.head_size, spec.block_size) for spec in found] == [sliding, full]
    assert len({spec.page_bytes for spec in specs.values()}) == 1
    assert (rank.parts(LayerKind.SLIDING), rank.parts(LayerKind.FULL)) == (min(tp, 16), min(tp, 4))


def test_heads_of_two_sizes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(tmp_path, "gemma-4-31b", tp=8)
    print_plan(found)
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 KV heads of 256 (sliding) and 1 KV head of 512 (full), bfloat16, 2 KiB a token and layer" in shown
    assert "2 ranks have the same KV head where layers have 4: one of them stores it" in found.assumed
    heads = plan_json(found)["rank"]["heads"]
    assert heads == {"sliding": {"count": 2, "size": 256}, "full": {"count": 1, "size": 512}}


@pytest.mark.parametrize(
    ("keys", "heads"),
    [
        ({"attention_k_eq_v": False}, (16, 512)),  # then full layers have as many
        ({"num_global_key_value_heads": None}, (16, 512)),
        ({"global_head_dim": None}, (4, 512)),  # what the class has
    ],
)
def test_heads_of_full_layers(tmp_path: Path, keys: dict[str, object], heads: tuple[int, int]) -> None:
    found = read_model(changed(tmp_path, "gemma-4-31b", **keys)).heads(LayerKind.FULL)
    assert (found.count, found.size) == heads


def test_heads_of_two_sizes_that_are_refused(tmp_path: Path) -> None:
    odd = read_model(changed(tmp_path, "gemma-4-31b", num_key_value_heads=12, num_attention_heads=48))
    with pytest.raises(ConfigError, match=r"2048 or 3072 elements of K for a token: blocks of whole tokens can't make"):
        Rank(odd, 1, 16)
    with pytest.raises(ConfigError, match="heads of two sizes need the hybrid cache manager"):
        plan(tmp_path, "gemma-4-31b", hybrid=False)
    with pytest.raises(ConfigError, match=r"16 KV heads .*, 4 KV heads of full layers can't be split over 32 ranks"):
        Rank(read_model(changed(tmp_path, "gemma-4-31b", num_attention_heads=48)), 32, 16)
    with pytest.raises(ConfigError, match="use_bidirectional_attention = 'all': it is an encoder"):
        read_model(changed(tmp_path, "gemma-4-31b", use_bidirectional_attention="all"))
    with pytest.raises(ConfigError, match="global_head_dim is not understood: its full layers have heads of another"):
        read_model(path_of(tmp_path, "gemma-2-27b", global_head_dim=256))


# --- an index ---


def test_which_layers_have_an_index_of_their_own(tmp_path: Path) -> None:
    """A list of letters goes before the interval; layers behind its end have one."""
    letters: list[object] = ["FSSF", ["F", "S", "S", "F"]]
    for pattern in letters:
        path = path_of(tmp_path, "glm-5.2", index_topk_pattern=pattern, num_hidden_layers=6)
        assert read_model(path).indexed == (0, 3, 4, 5)
    assert read_model(path_of(tmp_path, "glm-5.2", num_hidden_layers=12)).indexed == (0, 1, 2, 6, 10)
    specs = Rank(read_model(path_of(tmp_path, "glm-5.2", num_hidden_layers=4)), 1, 64).specs(TRITON_NHD)
    assert list(specs) == [
        "layers.0", "layers.0.index", "layers.1", "layers.1.index", "layers.2", "layers.2.index", "layers.3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "keys", "complaint"),
    [
        ("deepseek-v3.2", {"kv_lora_rank": None}, "kv_lora_rank is missing; it must be a whole number above 0"),
        ("glm-5", {"kv_lora_rank": None}, "kv_lora_rank is missing; it must be a whole number above 0"),
        ("deepseek-v3.2", {"index_head_dim": 64}, "index_head_dim = 64 must be a multiple of 128: those share a scale"),
        ("deepseek-v4-flash", {"index_head_dim": 192}, "index_head_dim = 192 must be a multiple of 128"),
        ("glm-5", {"index_topk_pattern": "FXS"}, "index_topk_pattern must be letters, each F or S"),
    ],
)
def test_an_index_that_is_refused(tmp_path: Path, name: str, keys: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_model(path_of(tmp_path, name, **keys))


# --- states ---


@pytest.mark.parametrize(
    ("name", "tp", "shapes"),
    [
        ("granite-4.0-h-small", 2, [(3, 4352), (64, 64, 128)]),  # (8192 + 2*2*128) / 2: a group for each rank
        ("nemotron-h-8b", 4, [(3, 2560), (32, 64, 128)]),  # (8192 + 2*8*128) / 4
        ("lfm2-1.2b", 2, [(2, 1024)]),
        ("kimi-linear-48b-a3b", 4, [(3, 3072), (8, 128, 128)]),
    ],
)
def test_states_are_split(tmp_path: Path, name: str, tp: int, shapes: list[tuple[int, ...]]) -> None:
    rank = Rank(read_model(path_of(tmp_path, name)), tp, 16)
    assert [state.shape for state in rank.states] == shapes


def test_blocks_with_states_are_multiples_of_those_asked_for(tmp_path: Path) -> None:
    """2,147,840 / (64*4096) = 8.2: 9*64 tokens, as vLLM rounds them; 40 is no multiple of 16, so 14*40 = 560 is."""
    assert plan(tmp_path, "granite-4.0-h-small", block_size=64).layout.block_tokens == 576
    assert plan(tmp_path, "granite-4.0-h-small", block_size=40).layout.block_tokens == 560


def test_a_state_that_does_not_divide(tmp_path: Path) -> None:
    model = read_model(path_of(tmp_path, "granite-4.0-h-small", mamba_n_heads=1, mamba_d_head=None))
    with pytest.raises(ConfigError, match=r"1 Mamba heads.* can't be split over 2 ranks"):
        Rank(model, 2, 16)


def test_groups_are_split_or_there_is_one(tmp_path: Path) -> None:
    """vLLM splits the groups of Mamba-2 over the ranks, or repeats a single one; it has no other way."""
    name = "nemotron-h-8b"
    with pytest.raises(ConfigError, match=r"8 Mamba groups can't be split over 16 ranks; --tp 1, 2, 4, 8 would work"):
        Rank(read_model(path_of(tmp_path, name)), 16, 16)
    single = Rank(read_model(path_of(tmp_path, name, n_groups=1)), 16, 16)
    assert single.states[0].shape == (3, (128 * 64 + 2 * 16 * 128) // 16)


def test_a_key_that_is_not_needed_may_be_absent(tmp_path: Path) -> None:
    """LFM2's convolutions have `conv_dim` channels, or as many as the model is wide."""
    bare = read_model(path_of(tmp_path, "lfm2-1.2b", hidden_size=None, head_dim=64))
    assert Rank(bare, 1, 16).states[0].shape == (2, 2048)
    wide = read_model(path_of(tmp_path, "lfm2-1.2b", hidden_size=4096, conv_dim=None))
    assert Rank(wide, 1, 16).states[0].shape == (2, 4096)


@pytest.mark.parametrize(
    ("inside", "complaint"),
    [
        ({"kda_layers": [1]}, "linear_attn_config: kda_layers and full_attn_layers must name each layer from 1 to 27"),
        ({"num_heads": None}, "linear_attn_config: num_heads is missing"),
        ({"use_full_rank_gate": True}, "linear_attn_config: use_full_rank_gate is not understood"),
    ],
)
def test_delta_layers_that_are_refused(tmp_path: Path, inside: dict[str, object], complaint: str) -> None:
    published = CONFIGS["kimi-linear-48b-a3b"]["linear_attn_config"]
    assert isinstance(published, dict)
    with pytest.raises(ConfigError, match=complaint):
        read_model(path_of(tmp_path, "kimi-linear-48b-a3b", linear_attn_config=published | inside))
    with pytest.raises(ConfigError, match="linear_attn_config is not understood: its linear layers are of a kind"):
        read_model(path_of(tmp_path, "qwen3-8b", linear_attn_config=published))


@pytest.mark.parametrize(("heads", "size"), [(129, None), (7, 64), (128, 7)])
def test_heads_that_are_not_the_layer_are_refused(tmp_path: Path, heads: int, size: int | None) -> None:
    """128 heads of 64 are 8,192, twice the hidden size."""
    with pytest.raises(ConfigError, match=f"mamba_n_heads is {heads}: heads of .* do not make the layer's 8192"):
        read_model(path_of(tmp_path, "granite-4.0-h-small", mamba_n_heads=heads, mamba_d_head=size))


def test_the_dtype_of_a_state_is_said_where_it_is_assumed(tmp_path: Path) -> None:
    assert "recurrent states are taken to be float32" in " ".join(plan(tmp_path, "nemotron-h-8b").assumed)
    assert "recurrent states are taken to be bfloat16" in " ".join(plan(tmp_path, "granite-4.0-h-small").assumed)


def test_layers_without_a_cache_of_their_own_are_said(tmp_path: Path) -> None:
    assumed = " ".join(plan(tmp_path, "gemma-3n-e4b").assumed)
    assert "num_kv_shared_layers: the last 15 layers use earlier layers' cache, and are left out" in assumed
