"""GPUs whose driver does wrong, but lets the daemon live: jobs end right or with a reason, and no byte is wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.errors import RemoteError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.gpu_rank import HOST, Where
from tests.e2e.rank import HYBRID, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]

MIB = 1 << 20
SLOW_LINK = {"faults": f"link_bytes_per_s={2 * MIB}"}
KINDS = ("one", "each", "chunks")


def rank_of(daemon: Daemon, **options: object) -> Rank:
    """Closed at the end."""
    found: Rank = daemon.welcome(Rank(daemon.socket, **options))  # type: ignore[arg-type]
    return found


@pytest.fixture
def slow(start_daemon: Start) -> Daemon:
    """A link of 2 MiB/s each way, which is seen in chunks of 64 KiB."""
    return start_daemon("copy.chunk_bytes=64KiB", driver=SLOW_LINK)


# --- a slow link ---------------------------------------------------------------------------------------------------


def test_a_deadline_between_two_chunks_ends_a_store(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 256)
    rank = rank_of(slow, num_blocks=256)
    result = rank.store_keys(keys, deadline_s=0.15)
    assert result.outcome is Outcome.EXPIRED
    assert 0 < result.bytes < 256 * 4096
    assert rank.states(keys) == [KeyState.MISS] * 256


def test_a_load_does_not_wait_for_stores(slow: Daemon, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = rank_of(slow, num_blocks=600)
    keys = new_keys(rng, 8)
    rank.store_keys(keys)
    job = rank.begin_store({0: (new_keys(rng, 512), rank.blocks_of(0, 8, 512))})
    assert rank.load({0: (keys, rank.blocks_of(0, 540, 8))}, expedited=True).outcome is Outcome.DONE
    assert not job.done
    assert rank.wrong(0, keys, rank.blocks_of(0, 540, 8)) == 0
    assert rank.wait(job).outcome is Outcome.DONE


def test_an_expedited_load_overtakes_the_others(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 256)
    rank = rank_of(slow, num_blocks=600)
    rank.store_keys(keys)
    rank.wipe()
    long = rank.client.load(rank.registration, {0: (keys, rank.blocks_of(0, 0, 256))})
    assert rank.load({0: (keys[:8], rank.blocks_of(0, 300, 8))}, expedited=True).outcome is Outcome.DONE
    assert not long.done
    assert rank.wait(long).outcome is Outcome.DONE
    assert rank.wrong(0, keys, rank.blocks_of(0, 0, 256)) == rank.wrong(0, keys[:8], rank.blocks_of(0, 300, 8)) == 0


def test_a_cancelled_job_gives_its_blocks_back_after_the_running_chunks(slow: Daemon, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 256)
    rank = rank_of(slow, num_blocks=256)
    job = rank.begin_store({0: (keys, rank.blocks_of(0, 0, 256))})
    until(lambda: slow.gpus()[0]["store_running"] > 0, "the first chunk is being copied")
    rank.client.cancel(job)
    result = rank.wait(job)
    assert result.outcome is Outcome.CANCELLED
    assert result.bytes < 256 * 4096
    assert slow.gpus()[0]["copies"] == 0
    assert rank.states(keys) == [KeyState.MISS] * 256


# --- calls that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [2, 7])
def test_submissions_that_fail(start_daemon: Start, seed: int, every: int) -> None:
    """A batch that is refused is copied one by one; where that is refused, too, the job fails with the reason."""
    rng = np.random.default_rng(seed)
    daemon = start_daemon(driver={"faults": f"fail_submit_every={every}"})
    rank = rank_of(daemon)
    daemon.await_pinned()  # until then there are no batches
    outcomes = []
    for _ in range(20):
        keys = new_keys(rng, 4)
        stored = rank.store_keys(keys)
        outcomes.append(stored)
        assert rank.states(keys) == [KeyState.HIT if stored.outcome is Outcome.DONE else KeyState.MISS] * 4
        rank.wipe()
        blocks = rank.blocks_of(0, 20, 4)
        loaded = rank.load({0: (keys, blocks)})
        outcomes.append(loaded)
        if loaded.outcome is Outcome.DONE:
            assert rank.wrong(0, keys, blocks) == 0
    failed = [result for result in outcomes if result.outcome is Outcome.FAILED]
    assert all("CUDA_ERROR_INVALID_VALUE" in result.reason for result in failed)
    assert {result.outcome for result in outcomes} <= {Outcome.DONE, Outcome.FAILED, Outcome.PARTIAL}
    assert any(result.outcome is Outcome.DONE for result in outcomes)
    assert daemon.gpus()[0]["batch_failures"] > 0
    assert bool(failed) == (every == 2)


@pytest.mark.parametrize("how", ["no_batch", "cuda.batch=false"])
def test_one_call_for_each_copy(start_daemon: Start, seed: int, how: str) -> None:
    daemon = start_daemon(driver={"faults": how}) if how == "no_batch" else start_daemon(how)
    rng = np.random.default_rng(seed)
    rank = rank_of(daemon, groups=HYBRID)
    wanted = {group: (new_keys(rng, 6), rank.blocks_of(group, 20 * group, 6)) for group in range(3)}
    assert rank.store(wanted).outcome is Outcome.DONE
    rank.wipe()
    assert rank.load(wanted).outcome is Outcome.DONE
    assert [rank.wrong(group, *wanted[group]) for group in range(3)] == [0, 0, 0]
    for group in range(3):
        rank.wipe_loaded(group, wanted[group][1])
    assert rank.clean()
    assert daemon.gpus()[0]["batch_failures"] == 0


@pytest.mark.parametrize("fault", [*(f"open_error={code}" for code in (1, 201, 400, 801, 999)), "dead_exporter"])
def test_a_handle_that_the_driver_does_not_open(start_daemon: Start, seed: int, fault: str) -> None:
    """Others go on whatever the driver's error is, even if elsewhere its number means that a GPU is lost."""
    rng = np.random.default_rng(seed)
    daemon = start_daemon(driver={"faults": fault})
    others = rank_of(daemon, where=Where(kind="chunks"))
    rank = rank_of(daemon, where=Where(kind="one"), register=False)
    with pytest.raises(RemoteError, match=r"run both as one user, in a common PID namespace") as caught:
        rank.client.register(rank.cache)
    assert caught.value.code == "bad_memory"
    assert others.store_keys(new_keys(rng, 4)).outcome is Outcome.DONE
    assert rank_of(daemon, where=HOST).store_keys(new_keys(rng, 4)).outcome is Outcome.DONE


@pytest.mark.parametrize("number", [1, 801, 999])
def test_a_chunk_that_the_driver_does_not_import(start_daemon: Start, seed: int, number: int) -> None:
    daemon = start_daemon(driver={"faults": f"import_error={number}"})
    others = rank_of(daemon, where=Where(kind="one"))
    rank = rank_of(daemon, where=Where(kind="chunks"), register=False)
    with pytest.raises(RemoteError, match="can't map this chunk") as caught:
        rank.client.register(rank.cache)
    assert caught.value.code == "bad_memory"
    assert others.store_keys(new_keys(np.random.default_rng(seed), 4)).outcome is Outcome.DONE


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        ("init_error=100", "/dev/nvidia"),
        ("init_error=304", "/dev/nvidia"),
        ("init_error=999", "CUDA_ERROR_UNKNOWN"),
        ("context_error=46", "compute mode"),
        ("context_error=2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("no_host_pointers", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"),
    ],
)
def test_a_gpu_that_can_not_be_used(start_daemon: Start, seed: int, fault: str, hint: str) -> None:
    """Its workers' error gives the reason and what to look at; the daemon is there for the others."""
    daemon = start_daemon(driver={"faults": fault})
    rank = rank_of(daemon, register=False)
    for _ in range(2):
        with pytest.raises(RemoteError, match=rf"can't use this GPU: .*{hint}") as caught:
            rank.client.register(rank.cache)
        assert caught.value.code == "bad_memory"
    assert rank_of(daemon, where=HOST).store_keys(new_keys(np.random.default_rng(seed), 4)).outcome is Outcome.DONE


def test_submissions_that_take_long(start_daemon: Start, seed: int) -> None:
    """A fiftieth of a second for each copy of a batch: the loop does not wait for them."""
    daemon = start_daemon(driver={"faults": "submit_ns=20000000"})
    rank = rank_of(daemon, num_blocks=256)
    rng = np.random.default_rng(seed)
    blocks = np.arange(0, 256, 2)  # with gaps, so that nothing is merged
    keys = new_keys(rng, 128)
    job = rank.begin_store({0: (keys, blocks)})
    until(lambda: daemon.gpus()[0]["store_running"] > 0, "it is being submitted")
    daemon.ping_s()
    assert not job.done
    assert rank.wait(job).outcome is Outcome.DONE
    rank.wipe()
    assert rank.load({0: (keys[:8], blocks[8:16])}).outcome is Outcome.DONE
    assert rank.wrong(0, keys[:8], blocks[8:16]) == 0


# --- bytes that are wrong ------------------------------------------------------------------------------------------


def test_planted_corruption_is_seen_by_those_who_compare(start_daemon: Start, seed: int) -> None:
    """What the tests here compare with finds what a driver can do to bytes."""
    rank = rank_of(start_daemon(driver={"faults": "corrupt_every=9"}))
    keys = new_keys(np.random.default_rng(seed), 24)
    rank.store_keys(keys)
    rank.wipe()
    assert rank.load({0: (keys, rank.blocks_of(0, 0, 24))}).outcome is Outcome.DONE
    assert 3 <= rank.wrong(0, keys, rank.blocks_of(0, 0, 24)) <= 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("faults", ["jitter_ns=1000000", "jitter_ns=100000,queue_depth=2"])
def test_every_kind_of_memory_on_a_driver_that_takes_its_time(
    start_daemon: Start, seed: int, faults: str, kind: str
) -> None:
    """It does so in copies, and in the calls that submit them, behind which all others wait."""
    rng = np.random.default_rng(seed)
    rank = rank_of(start_daemon(driver={"faults": faults}), groups=HYBRID, where=Where(kind=kind))
    wanted = {group: (new_keys(rng, 6), rank.blocks_of(group, 20 * group, 6)) for group in range(3)}
    assert rank.store(wanted).outcome is Outcome.DONE
    rank.wipe()
    assert rank.load(wanted).outcome is Outcome.DONE
    assert [rank.wrong(group, *wanted[group]) for group in range(3)] == [0, 0, 0]
    for group in range(3):
        rank.wipe_loaded(group, wanted[group][1])
    assert rank.clean()
