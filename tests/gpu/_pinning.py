"""A process that registers memory which it was handed with the driver, and copies through a GPU.

python -m tests.gpu._pinning FD BYTES (write | read)
"""

from __future__ import annotations

import sys

import numpy as np

from kvoffloadd.bench.gpu import Pinned
from kvoffloadd.client.memory.gpu import driver
from scripts.harness.gpu import Gpu, GpuBuffer
from scripts.harness.gpumemory import content


def main() -> None:
    """`write`: noise, by way of the GPU, and stays alive. `read`: how many bytes are not that noise."""
    fd, size_bytes, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    gpu = Gpu()
    memory, buffer = Pinned(size_bytes, fd), GpuBuffer(gpu, size_bytes)
    noise = content(7, 7, size_bytes)
    if what == "write":
        buffer.upload(0, noise)
        driver().call("cuCtxSynchronize")
        driver().call("cuMemcpyDtoHAsync", memory.address, buffer.address, size_bytes, gpu.stream)
        gpu.synchronize()
        print("written", flush=True)
        sys.stdin.read()
        return
    buffer.upload_later(0, memory.array)
    gpu.synchronize()
    wrong = int((buffer.download(0, size_bytes) != noise).sum()) + int((memory.array != noise).sum())
    print(wrong + int(np.count_nonzero(noise) == 0), flush=True)
    memory.close()


if __name__ == "__main__":
    main()
