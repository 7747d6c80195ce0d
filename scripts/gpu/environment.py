"""Makes the venv of `make gpu-check`, without a network: this Python's packages, and on top the bundle's wheels. The
compiled helper that the bundle has is put into the checkout, where it has none or an older one.

    python3 -m scripts.gpu.environment VENV BUNDLE

Works for a Python that is itself a venv's, and for one without pip and ensurepip.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import site
import sys
import venv
import zipfile
from pathlib import Path

from scripts.gpu.bundle import HELPER, HELPERS, ROOT

MACHINES_BINDINGS = "machines-bindings"
"""A folder of the venv with the cuda-bindings that this Python has already: the tests of sharing run with them, too."""

_NEEDED = ("cuda", "msgspec", "numpy", "pytest", "pytest_asyncio", "pytest_timeout")
"""Some of what the bundle brings: a Python that has these needs no bundle."""

_KEPT = ("numpy",)
"""Where this Python has them, the bundle's stay out: what else it has was built for its own."""


def main() -> int:
    folder, bundle = Path(sys.argv[1]), Path(sys.argv[2])
    wheels = sorted(bundle.glob("*.whl"))
    missing = [] if wheels else [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"gpu-check: no wheels in {bundle}, and this Python has no {', '.join(missing)}: run `make gpu-bundle` "
            "where there is a network",
            file=sys.stderr,
        )
        return 1
    venv.create(folder, system_site_packages=True, clear=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    # A venv made from a venv sees the packages of the Python below, but not those of the venv.
    known = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "machine.pth").write_text("".join(f"{path}\n" for path in known), encoding="utf-8")
    for wheel in wheels:
        name = wheel.name.partition("-")[0]
        if name not in _KEPT or importlib.util.find_spec(name) is None:
            _unpack(wheel, packages)
    _put_helper(bundle)
    bundled = {wheel.name.split("-")[1] for wheel in wheels if wheel.name.startswith("cuda_bindings-")}
    _keep_bindings(folder / MACHINES_BINDINGS, bundled)
    return 0


def _unpack(wheel: Path, packages: Path) -> None:
    """A wheel is an archive of what lies in the folder of packages; of other places there is nothing that we need."""
    with zipfile.ZipFile(wheel) as archive:
        misplaced = [name for name in archive.namelist() if ".data/purelib/" in name or ".data/platlib/" in name]
        if misplaced:
            raise SystemExit(f"gpu-check: {wheel.name} can't be unpacked as it is: {misplaced[0]}")
        archive.extractall(packages)


def _put_helper(bundle: Path) -> None:
    """Puts it where there is none, or an older one: that of an earlier bundle. The project works without."""
    helper, place = bundle / HELPERS / HELPER, ROOT / HELPER
    if not helper.exists():
        return
    try:
        if not place.exists() or place.stat().st_mtime < helper.stat().st_mtime:
            shutil.copy2(helper, place)
    except OSError as error:
        print(f"gpu-check: without the compiled helper, since it can't be put there: {error}", file=sys.stderr)


def _keep_bindings(folder: Path, bundled: set[str]) -> None:
    """`cuda` is a namespace: a folder with nothing but its `bindings` goes before the bundle's. None where this Python
    has none, or the bundle's version.
    """
    try:
        version, found = importlib.metadata.version("cuda-bindings"), importlib.util.find_spec("cuda.bindings")
    except ImportError:  # PackageNotFoundError, too
        return
    if version not in bundled and found is not None and found.submodule_search_locations:
        (folder / "cuda").mkdir(parents=True)
        (folder / "cuda" / "bindings").symlink_to(next(iter(found.submodule_search_locations)))


if __name__ == "__main__":
    sys.exit(main())
