"""Memory of this process that a GPU's context may copy from and to."""

from __future__ import annotations

import os

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.errors import DeviceError, MemoryKindError, ResourceError
from kvoffloadd.model import U8Array
from kvoffloadd.sharedmem import Mapping, create_memfd


class PinnedBuffer:
    """Registered with the current context until `free`. `array`: u8, all of it."""

    def __init__(self, driver: Driver, name: str, size_bytes: int) -> None:
        """`name`: of the memfd. Blocks.

        Raises:
            DeviceError: the driver refuses it.
            ResourceError: this process can't have so much.
        """
        self._driver = driver
        try:
            fd = create_memfd(name, size_bytes)
            try:
                self._mapping = Mapping.map_fd(fd, size_bytes)
            finally:
                os.close(fd)
        except (OSError, MemoryKindError) as error:  # the second: mmap refuses, but for want of addresses
            raise ResourceError(f"{name}, {size_bytes} bytes: {error}") from error
        self.address = self._mapping.address
        self.array: U8Array = self._mapping.array()
        try:
            driver.call("cuMemHostRegister", self.address, size_bytes, 0)
        except DeviceError:
            self._mapping.close()
            raise

    def free(self) -> None:
        """Blocks; the context must be current, and nothing may use the memory.

        Raises:
            CudaError: the GPU can't be used any more.
        """
        self._driver.call("cuMemHostUnregister", self.address)
        self._mapping.close()
