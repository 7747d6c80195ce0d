"""An engine as far as a GPU's time goes: kernels in a loop, in a separate process.

    python -m scripts.gpu.kernels '{"cpu": false}'    (then a line {"kind": "matmul" or "memory", "seconds": S} each)

It prints {"kinds": [...]} first: `matmul` and `memory` by torch; where torch is not installed `fill` by the driver.
Then it answers {"per_s": kernels per second}. `cpu`: torch's loop runs on the CPU, and means nothing (software driver).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from scripts.harness.gpu import Gpu, GpuBuffer

IN_FLIGHT = 8
MATRIX, CPU_MATRIX = 8192, 64
FILLED_BYTES, CPU_FILLED_BYTES = 1 << 30, 1 << 20


class Kernels:
    """What can be launched, by kind, and how all that was launched is waited for."""

    def __init__(self, kinds: dict[str, Callable[[], object]], finish: Callable[[], object]) -> None:
        self.kinds = kinds
        self._finish = finish

    def per_s(self, kind: str, seconds: float) -> float:
        """Kernels per second, in a loop that lasts about so long."""
        launch, count = self.kinds[kind], 0
        self._finish()
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            for _ in range(IN_FLIGHT):
                launch()
            self._finish()
            count += IN_FLIGHT
        return count / (time.perf_counter() - begun)


def of_torch(cpu: bool) -> Kernels:
    """Matrix products, and copies within the GPU's memory."""
    torch: Any = importlib.import_module("torch")
    device, size = ("cpu", CPU_MATRIX) if cpu else ("cuda", MATRIX)
    a = torch.randn(size, size, device=device).to(torch.bfloat16)
    b = torch.empty_like(a)
    kinds = {"matmul": lambda: torch.matmul(a, a, out=b), "memory": lambda: b.copy_(a)}
    return Kernels(kinds, (lambda: None) if cpu else torch.cuda.synchronize)


def of_driver(cpu: bool) -> Kernels:
    """Memory is filled, which the GPU's processors do."""
    gpu = Gpu()
    memory = GpuBuffer(gpu, CPU_FILLED_BYTES if cpu else FILLED_BYTES)
    return Kernels({"fill": lambda: memory.set_later(0, memory.size_bytes, 1)}, gpu.synchronize)


def main() -> None:
    """Answers until its input ends."""
    make = of_torch if importlib.util.find_spec("torch") else of_driver
    kernels = make(**json.loads(sys.argv[1]))
    print(json.dumps({"kinds": list(kernels.kinds)}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"per_s": kernels.per_s(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
