"""Downloads the wheels that a GPU machine lacks for `make gpu-check`, in the versions of requirements-dev.lock.

Nothing but Python and a driver is expected there; torch is used where it is. The project's own compiled helpers, which
need a compiler and Python's headers, come along as this machine has built them (`make venv`).
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
PACKAGES = (
    "aiofiles", "cuda-bindings", "hypothesis", "msgpack", "msgspec", "numpy", "prometheus-client", "psutil", "pytest",
    "pytest-asyncio", "pytest-timeout", "rich", "uvloop", "xxhash",
)  # fmt: skip
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64")
BYTES_MAX = 64 << 20
"""More would mean that something crept in."""


def add_helpers(folder: Path) -> int:
    """Returns how many there are: those that are not older than their sources. Any later Python on this kind of machine
    can load them (the stable ABI).
    """
    found = [helper for helper in (ROOT / "kvoffloadd").rglob("*.abi3.so") if _is_new(helper)]
    for helper in found:
        place = folder / HELPERS / helper.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(helper, place)
    return len(found)


def _is_new(helper: Path) -> bool:
    source = helper.with_name(helper.name.replace(".abi3.so", ".c"))
    return source.exists() and helper.stat().st_mtime >= source.stat().st_mtime


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
    helpers = add_helpers(arguments.folder)
    wheels = sorted(arguments.folder.glob("*.whl"))
    total = sum(wheel.stat().st_size for wheel in wheels)
    print(
        f"gpu-bundle: {len(wheels)} wheels for Python {arguments.python_version}, {total / (1 << 20):.1f} MiB, and "
        f"{helpers} compiled helpers" + ("" if helpers else ": build them with `make venv`, else figures are slower")
    )
    if total > BYTES_MAX:
        print(f"gpu-bundle: more than {BYTES_MAX >> 20} MiB", file=sys.stderr)
        return 1
    return 0
