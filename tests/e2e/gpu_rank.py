"""A rank's tensors on a GPU, which in tests is one in software; and which device the tests' ranks are on."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from scripts.gpu import SOFT_VARIABLE
from scripts.harness.gpu import Gpu
from scripts.harness.places import GpuPlace, HostPlace, Layout
from tests import softcuda

DEVICE_VARIABLE = "KVOFFLOADD_TEST_DEVICE"
TAIL = 24
"""Bytes between rows."""


def device() -> str:
    """Returns where ranks lie by default, "host" or "cuda", in this process and those that it starts."""
    return os.environ.get(DEVICE_VARIABLE, "host")


def is_soft() -> bool:
    """Whether GPUs are in software: they are unless the variable is 0."""
    return os.environ.get(SOFT_VARIABLE) != "0"


def needs_soft(what: str) -> None:
    """Skip the test where the GPU is a real one: that can't do this."""
    if not is_soft():
        pytest.skip(f"{what} needs the software driver")


def why_no_cuda() -> str:
    """What is missing for ranks on a GPU in software; empty: nothing."""
    # Other packages, or an empty folder that one left behind, may be named cuda, too.
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "needs cuda-bindings"
    return "" if shutil.which("cc") or not is_soft() else "needs a C compiler"


def gpu(ordinal: int = 0) -> Gpu:
    """Returns one of the driver's GPUs, with a stream. It is in software unless the variable is 0; the process has no
    other driver from then on.
    """
    return _gpus(ordinal)


@functools.cache
def _gpus(ordinal: int) -> Gpu:
    if is_soft():
        extras()
    return Gpu(ordinal)


@functools.cache
def extras() -> softcuda.SoftCuda:
    """Returns the further functions of the software driver."""
    needs_soft("this")
    return softcuda.load()


class Where(NamedTuple):
    """Where a rank's tensors lie: "host" or "cuda" (empty: see `device`), on which GPU, in which of KINDS of memory
    (empty: any).
    """

    device: str = ""
    gpu: int = 0
    kind: str = ""

    def memory(self, num_blocks: int, pages: Sequence[int], name: str) -> HostPlace | GpuPlace:
        """Makes tensors with pages of these sizes; in shared memory each gets a separate memory of this name."""
        layouts = [Layout(num_blocks, page, page + TAIL) for page in pages]
        if (self.device or device()) == "host":
            return HostPlace(layouts, name)
        return GpuPlace(gpu(self.gpu), layouts, np.random.default_rng([num_blocks, *pages]), self.kind)


HOST = Where("host")
