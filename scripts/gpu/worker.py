"""A worker with a KV cache on a GPU, as a child process that carries out one command after the other.

    python -m scripts.gpu.worker OPTIONS    (a JSON object; then a line of JSON with "call" and its arguments each)

It answers {"value": ...} or {"error": "Class: message"}, with a traceback unless it is a KvOffloadError, and goes on;
the first line, {"value": "ready"}, comes unasked.
"""

from __future__ import annotations

import codecs
import ctypes
import importlib
import json
import os
import sys
import time
import traceback
from typing import Any

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.client import Client, GpuTensor, Group, GroupKind, Job, KvCache, NamespaceSpec, Ref, Timeline
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.testing.figures import KEY_BYTES, keys_of
from scripts.harness.gpu import Gpu
from scripts.harness.gpumemory import CacheMemory, Gate, Rows

WAIT_S = 30.0
_DUMPABLE = 4


class WorkerCommands:
    """The commands that it knows. Keys are numbers; key i of `keys` goes to, or comes from, block i of `blocks`."""

    def __init__(self, socket: str, ordinal: int = 0) -> None:
        self._socket = socket
        self._ordinal = ordinal
        self._jobs: list[Job] = []

    # --- its memory ---

    def begin(
        self, kind: str, size_bytes: int, tensors: list[list[int]], first_torch: bool = False, later: bool = True
    ) -> None:
        """Allocate memory and connect, but share nothing yet. `later`: for `fill_later` and `read_later`."""
        if first_torch:  # so that its context is torch's doing, as in an engine
            importlib.import_module("torch").zeros(1, device=f"cuda:{self._ordinal}")
        self._gpu = Gpu(self._ordinal)
        self._memory = CacheMemory(self._gpu, kind, size_bytes, [Rows(*one) for one in tensors])
        self._timeline = Timeline(self._gpu.stream)
        self._gate = Gate(self._gpu)
        self._pinned = Pinned(size_bytes if later else 4096)
        model = f"rows of {[rows.page_bytes for rows in self._memory.rows]}"
        self._client = Client(self._socket, namespace=NamespaceSpec(model=model, key_bytes=KEY_BYTES))
        self._client.connect()

    def share(self) -> list[int]:
        """Adopt the tensors and register them. Where each begins in its allocation."""
        tensors = [GpuTensor.adopt(one) for one in self._memory.adoptable]
        refs = [Ref(number, 0, rows.page_bytes) for number, rows in enumerate(self._memory.rows)]
        group = Group(0, GroupKind.FULL, 16, refs=refs)
        self._registration = self._client.register(KvCache(tensors, [group], [self._timeline]))
        return [tensor.offset for tensor in tensors]

    def unshare(self) -> None:
        """End the registration."""
        self._client.unregister(self._registration)

    def share_and_unshare(self, times: int) -> None:
        """Again and again."""
        for _ in range(times):
            self.share()
            self.unshare()

    def free_bytes(self) -> int:
        """Returns the free bytes of the GPU."""
        return self._gpu.free_bytes()

    def fill(self, keys: list[int], blocks: list[int]) -> None:
        """Compute blocks; done when it returns."""
        self._memory.expect(keys, blocks)
        self._memory.upload()

    def wipe(self) -> None:
        """Every byte becomes another."""
        self._memory.wipe()
        self._memory.upload()

    def expect(self, keys: list[int], blocks: list[int]) -> None:
        """What a load must bring."""
        self._memory.expect(keys, blocks)

    def wrong_bytes(self) -> int:
        """Counts the wrong bytes in all of the memory."""
        return self._memory.wrong_bytes()

    # --- jobs ---

    def begin_store(self, keys: list[int], blocks: list[int], signal: bool = False) -> int:
        """The job's number here."""
        return self._begin(self._client.store, keys, blocks, signal)

    def begin_load(self, keys: list[int], blocks: list[int], signal: bool = False) -> int:
        """The job's number here."""
        return self._begin(self._client.load, keys, blocks, signal)

    def _begin(self, start: Any, keys: list[int], blocks: list[int], signal: bool) -> int:
        ready = self._timeline.signal() if signal else None
        self._jobs.append(start(self._registration, {0: (keys_of(np.array(keys)), np.array(blocks))}, ready=ready))
        return len(self._jobs) - 1

    def wait(self, job: int, limit_s: float = WAIT_S) -> list[str]:
        """Its outcome, and why."""
        result = self._client.wait(self._jobs[job], limit_s)
        return [str(result.outcome.value), result.reason]

    def is_done(self, job: int) -> bool:
        """Returns whether the job is done, without waiting."""
        self._client.ping()  # what the daemon has sent before is read
        return self._jobs[job].done

    def store(self, keys: list[int], blocks: list[int]) -> list[str]:
        return self.wait(self.begin_store(keys, blocks))

    def load(self, keys: list[int], blocks: list[int]) -> list[str]:
        return self.wait(self.begin_load(keys, blocks))

    # --- order ---

    def close_gate(self) -> None:
        """What is queued on the stream from here on waits."""
        self._gate.close()

    def open_gate(self) -> None:
        """It goes on."""
        self._gate.open()

    def fill_later(self, keys: list[int], blocks: list[int]) -> None:
        """Queue a producer of these blocks."""
        self._memory.expect(keys, blocks)
        self._memory.upload_later(self._pinned)

    def read_later(self) -> None:
        """Queue a reader of all memory."""
        self._memory.download_later(self._pinned)

    def read_wrong_bytes(self) -> int:
        """What the reader has found other than expected at present. Waits for it."""
        self._gpu.synchronize()
        size = self._memory.expected.nbytes
        return int((self._pinned.array[:size] != self._memory.expected).sum())

    def compute(self, seconds: float) -> None:
        """Queue torch kernels for about so long."""
        torch = importlib.import_module("torch")
        with torch.cuda.stream(torch.cuda.ExternalStream(self._gpu.stream)):
            operand = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
            torch.matmul(operand, operand)
            self._gpu.synchronize()
            begun = time.monotonic()
            for _ in range(20):
                torch.matmul(operand, operand)
            self._gpu.synchronize()
            for _ in range(int(20 * seconds / (time.monotonic() - begun))):
                torch.matmul(operand, operand)
        self._gpu.use()

    def signal_latencies(self, count: int) -> list[float]:
        """Seconds from `signal` on an idle stream until this process sees it."""
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            ready = self._timeline.signal()
            while not ready.reached:
                pass
            found.append(time.perf_counter() - begun)
        return found

    def end(self) -> None:
        self._client.close(WAIT_S, force=True)


def become(uid: int) -> None:
    """Everything that the driver needs of files has been loaded; the GPU has not been touched."""
    importlib.import_module("cuda.bindings.driver")
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    codecs.lookup("ascii")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(_DUMPABLE, 1, 0, 0, 0)  # as a process that began as this user


def main() -> None:
    """Answers until its input ends."""
    options = json.loads(sys.argv[1])
    os.environ.update(options.get("variables", {}))
    if options.get("uid"):
        become(options["uid"])
    worker = WorkerCommands(options["socket"])
    print(json.dumps({"value": "ready"}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"value": getattr(worker, question.pop("call"))(**question)}
        except Exception as error:  # noqa: BLE001  the caller gets the reason
            ours = isinstance(error, KvOffloadError)
            answer = {"error": f"{type(error).__name__}: {error}" + ("" if ours else f"\n{traceback.format_exc()}")}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
