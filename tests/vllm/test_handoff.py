"""One engine computes prompts, another one answers them, and computes the last token of each alone."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from tests.e2e import disk
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import COUNT, Prompts, by_chunks, by_connector, cached, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True}
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
AS_LATE = {"linear": {"prefix_match_unit": 4}}
"""Options of a reference that computes the last token by itself, too: in bfloat16 it matters."""


@pytest.mark.parametrize(
    ("kind", "blocks", "whole"),
    [("dense", 1, 480), ("dense", 4, 384), ("hybrid", 1, 480), ("linear", 1, 480), ("conv", 1, 480)],
)
def test_the_last_token_alone_is_computed(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    blocks: int,
    whole: int,
) -> None:
    """500 of 501 tokens are loaded; `whole` where no more is asked for, and for a prompt that goes on; none where the
    salt is another one, and once the daemon is dead.
    """
    daemon = start_daemon(memory="256MiB")
    prefill, decode = (start_engine(kind, connector=by_chunks(daemon.socket, blocks)) for _ in range(2))
    prefill.generate(asked, max_tokens=1, params=PREFILL)
    settle(daemon, prefill)
    longer = [[*prompt, 7] for prompt in asked]
    for prompts, params, hit in ((asked, None, whole), (longer, DECODE, whole), (asked, DECODE, 500)):
        answer = decode.generate_anew(prompts, params=params)
        assert cached(answer) == [hit] * COUNT
        assert tokens(answer) == reference(kind, prompts, **(AS_LATE.get(kind, {}) if hit == 500 else {}))
    assert cached(decode.generate_anew(asked, salt="a", params=DECODE)) == [0] * COUNT
    assert daemon.status()["transfers"]["load"]["not_done"] == 0
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    answer = decode.generate_anew(asked, params=DECODE)
    assert cached(answer) == [0] * COUNT
    assert tokens(answer) == reference(kind, asked)


@pytest.mark.parametrize("kind", ["dense", "linear"])
@pytest.mark.parametrize("kept", ["in memory", "on disk"])
def test_a_daemon_restarted_in_between(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    tmp_path: Path,
    kept: str,
    kind: str,
) -> None:
    """The next daemon serves tails as it serves other keys: from the memory that one that was killed has left, or from
    disk. A disk that fails under it costs the request nothing but the computation.
    """
    switch = disk.Switch(tmp_path)
    settings: tuple[str, ...] = (f"memory.pool_file={tmp_path / 'pool'}",)
    if kept == "on disk":
        settings = disk.disk_settings((tmp_path / "disk", 512 * disk.MIB))
    daemon = start_daemon(*settings, memory="256MiB", faults=f"disk={switch.path}")
    prefill = start_engine(kind, connector=by_chunks(daemon.socket, 1))
    prefill.generate(asked, max_tokens=1, params=PREFILL)
    settle(daemon, prefill)
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all has its checksum")
    prefill.close()
    if kept == "on disk":
        disk.idle(daemon)
        daemon.stop()
    else:
        daemon.kill()
    daemon.start()
    decode = start_engine(kind, connector=by_chunks(daemon.socket, 1))
    expected = reference(kind, asked, **AS_LATE.get(kind, {}))
    answer = decode.generate_anew(asked, params=DECODE)
    assert cached(answer) == [500] * COUNT
    assert tokens(answer) == expected
    if kept == "on disk":
        daemon.leave_guests()
        daemon.stop()
        daemon.start()
        decode.await_connection()
        switch.set("read=EIO")
        answer = decode.generate_anew(asked, params=DECODE)
        assert cached(answer) == [0] * COUNT
        assert tokens(answer) == reference(kind, asked)


def test_ranks_hand_over_their_parts(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    """A tail hits when all ranks have stored their part. One engine takes over from itself: two want four cores."""
    daemon = start_daemon(memory="256MiB")
    engine = start_engine(
        "dense",
        connector=by_connector(daemon.socket),
        environment={**MULTIPROCESS, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        tensor_parallel_size=2,
    )
    computed = engine.generate(asked, params=PREFILL)
    settle(daemon, engine)
    answer = engine.generate_anew(asked, params=DECODE)
    assert cached(answer) == [500] * COUNT
    assert tokens(answer) == tokens(computed)
