"""A CUDA driver without a GPU: `libcuda.so.1` in software, for tests of what runs against NVIDIA's. See README.md."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

LIBRARY = "libcuda.so.1"
FLAGS = (
    "-O2", "-std=gnu11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra",
    "-Werror", f"-Wl,-soname,{LIBRARY}", "-Wl,-z,nodelete",
)  # fmt: skip

_FOLDER = Path(__file__).parent

_COMPILER = "cc"


class SoftCudaError(Exception):
    """It can't be built, or not be used as it was asked to be."""


class Counters(ctypes.Structure):
    """What a process has done so far, and what it holds now: softcuda_counters in softcuda.h."""

    copies: int
    batches: int
    pitched: int
    pitched_batches: int
    bytes_to_device: int
    bytes_to_host: int
    bytes_within_device: int
    handles_opened: int
    handles_closed: int
    live_allocations: int
    live_opened: int
    live_mappings: int
    live_reservations: int
    live_registrations: int
    live_streams: int
    live_events: int
    misuses: int
    staged_copies: int
    engine_batches: int

    _fields_ = tuple((name, ctypes.c_uint64) for name in __annotations__)


class SoftCuda:
    """The extras that only tests call, in this process, whose libcuda.so.1 is softcuda."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.softcuda_delay.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        library.softcuda_spin_until.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        library.softcuda_counters.argtypes = [ctypes.POINTER(Counters)]
        library.softcuda_counters.restype = None

    def delay(self, stream: int, seconds: float) -> None:
        """Makes the stream busy for so long, as a kernel does.

        Raises:
            SoftCudaError: the driver refuses.
        """
        _check("softcuda_delay", self._library.softcuda_delay(stream, round(seconds * 1e9)))

    def spin_until(self, stream: int, address: int, value: int) -> None:
        """Makes the stream wait until the u64 at the host address is at least `value`.

        Raises:
            SoftCudaError: the driver refuses.
        """
        _check("softcuda_spin_until", self._library.softcuda_spin_until(stream, address, value))

    def counters(self) -> Counters:
        """What this process has done so far, and what it holds now."""
        counters = Counters()
        self._library.softcuda_counters(ctypes.byref(counters))
        return counters


def build() -> Path:
    """The library's path; compiles it where that has not been done yet.

    Raises:
        SoftCudaError: there is no compiler, it fails, or the folder for the result is someone else's.
    """
    path = _cache_folder() / LIBRARY
    if not path.exists():
        _compile(path)
    return path


def environment(faults: str = "", **settings: int | str) -> dict[str, str]:
    """The variables to start a process with, so that it runs on softcuda: `environment("jitter_ns=5", devices=1)`.

    Raises:
        SoftCudaError: see `build`.
    """
    folder = str(build().parent)
    before = os.environ.get("LD_LIBRARY_PATH")
    variables = {"LD_LIBRARY_PATH": f"{folder}:{before}" if before else folder}
    if faults:
        variables["SOFTCUDA_FAULTS"] = faults
    return variables | {f"SOFTCUDA_{name.upper()}": str(value) for name, value in settings.items()}


def load() -> SoftCuda:
    """Loads softcuda into this process: from here on, a request for libcuda.so.1 gets it.

    Raises:
        SoftCudaError: see `build`; or this process has another driver already.
    """
    path = build()
    library = ctypes.CDLL(LIBRARY) if _is_loaded(LIBRARY) else ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    if not hasattr(library, "softcuda_counters"):
        raise SoftCudaError(f"softcuda: {LIBRARY} of this process is a real driver")
    return SoftCuda(library)


def _is_loaded(library: str) -> bool:
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _check(call: str, code: int) -> None:
    if code:
        raise SoftCudaError(f"{call}: CUDA error {code}")


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.[ch]"))


def _cache_folder() -> Path:
    """Named after all that the library is made from: a changed source is a new folder."""
    digest = hashlib.sha256(repr((_COMPILER, FLAGS)).encode())
    for source in _sources():
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    name = f"kvoffloadd-softcuda-{os.getuid()}-{digest.hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)
    # The place is known to everyone: what another user has put there must not be loaded.
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        raise SoftCudaError(f"softcuda: {folder} is not this user's own folder")
    return folder


def _compile(path: Path) -> None:
    """Two processes may do so at once: each makes a separate file, and the last rename wins."""
    sources = [str(source) for source in _sources() if source.suffix == ".c"]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / LIBRARY
        try:
            subprocess.run(
                [_COMPILER, *FLAGS, *sources, "-o", str(made)], check=True, capture_output=True, text=True, timeout=120
            )
        except FileNotFoundError:
            raise SoftCudaError(f"softcuda: no C compiler: {_COMPILER}") from None
        except subprocess.CalledProcessError as error:
            raise SoftCudaError(f"softcuda: {_COMPILER} failed:\n{error.stderr}") from None
        made.rename(path)
