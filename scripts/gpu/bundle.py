"""Downloads the wheels that a GPU machine lacks for `make gpu-check`, in the versions of requirements-dev.lock.

Nothing but Python and a driver is expected there; torch is used where it is. The project's own compiled helper, which
needs a compiler and Python's headers, comes along as this machine has built it (`make venv`).
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = f"helpers-{platform.machine()}"
HELPER = Path("kvoffloadd/native/_native.abi3.so")
PACKAGES = (
    "aiofiles", "cuda-bindings", "hypothesis", "msgpack", "msgspec", "numpy", "prometheus-client", "psutil", "pytest",
    "pytest-asyncio", "pytest-timeout", "rich", "uvloop", "xxhash",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
BYTES_MAX = 64 << 20
"""More would mean that something crept in."""


def add_helper(folder: Path) -> bool:
    """Adds the compiled helper. False: there is none, or its sources have changed since. Any later Python on this kind
    of machine can load it (the stable ABI).
    """
    built, place = ROOT / HELPER, folder / HELPERS / HELPER
    sources = [source.stat().st_mtime for source in built.parent.glob("*.[ch]")]
    if not built.exists() or built.stat().st_mtime < max(sources):
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(built, place)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made anew")
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine (default: %(default)s)")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", arguments.python_version),
        *(word for name in PLATFORMS for word in ("--platform", name)),
        *("--constraint", str(ROOT / "requirements-dev.lock"), "--dest", str(arguments.folder), *PACKAGES),
    ]
    status = subprocess.run(command, check=False).returncode
    if status:
        return status
    has_helper = add_helper(arguments.folder)
    wheels = sorted(arguments.folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(
        f"gpu-bundle: {len(wheels)} wheels for Python {arguments.python_version}, {total / (1 << 20):.1f} MiB, "
        + ("and the compiled helper" if has_helper else "no helper: build it with `make venv`, else figures are slower")
    )
    if total > BYTES_MAX:
        print(f"gpu-bundle: more than {BYTES_MAX >> 20} MiB", file=sys.stderr)
        return 1
    return 0
