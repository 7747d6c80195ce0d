"""The software driver in this process, and memory of both sides to copy between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvoffloadd.device.cuda.driver import Driver
from scripts.harness.gpu import Gpu
from tests import softcuda


@pytest.fixture(scope="session")
def extras() -> softcuda.SoftCuda:
    """This process's driver is the software one from here on."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    return softcuda.load()


@pytest.fixture
def gpu(extras: softcuda.SoftCuda) -> Iterator[Gpu]:
    """The first GPU, its context current."""
    made = Gpu()
    yield made
    made.synchronize()


@pytest.fixture
def driver(gpu: Gpu) -> Driver:
    """The daemon's driver."""
    return Driver()
