"""An engine as far as a GPU's time goes: torch kernels in a loop, in a process of its own.

    python -m scripts.gpu.kernels '{"cpu": false}'    (then a line {"kind": "matmul" or "memory", "seconds": S} each)

It answers {"per_s": kernels per second}. `cpu`: the loop runs on the CPU, and means nothing (software driver).
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

IN_FLIGHT = 8


class Kernels:
    """Operands, ready to be used."""

    def __init__(self, cpu: bool) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._cuda = not cpu
        device, size = ("cuda", 8192) if self._cuda else ("cpu", 64)
        self._a = self._torch.randn(size, size, device=device).to(self._torch.bfloat16)
        self._b = self._torch.empty_like(self._a)
        self._kinds: dict[str, Callable[[], object]] = {"matmul": self._multiply, "memory": self._move}

    def _multiply(self) -> None:
        self._torch.matmul(self._a, self._a, out=self._b)

    def _move(self) -> None:
        self._b.copy_(self._a)

    def per_s(self, kind: str, seconds: float) -> float:
        """Kernels per second, in a loop that lasts about so long."""
        launch, count = self._kinds[kind], 0
        self._finish()
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            for _ in range(IN_FLIGHT):
                launch()
            self._finish()
            count += IN_FLIGHT
        return count / (time.perf_counter() - begun)

    def _finish(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def main() -> None:
    """Answers until its input ends."""
    kernels = Kernels(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"per_s": kernels.per_s(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
