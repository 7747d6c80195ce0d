#!/usr/bin/env python3
"""Makes the venv of `make gpu-check`, without a network: this Python's packages, and on top the bundle's wheels.

    python3 -m scripts.gpu.environment VENV BUNDLE

Works for a Python that is itself a venv's, and for one without ensurepip.
"""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from pathlib import Path


def main() -> int:
    folder, bundle = Path(sys.argv[1]), Path(sys.argv[2])
    wheels = sorted(bundle.glob("*.whl"))
    if not wheels:
        print(f"gpu-check: no wheels in {bundle}: run `make gpu-bundle` where there is a network", file=sys.stderr)
        return 1
    venv.create(folder, system_site_packages=True, clear=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    # A venv made from a venv sees the packages of the Python below, but not those of the venv.
    known = [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]
    (packages / "machine.pth").write_text("".join(f"{path}\n" for path in known), encoding="utf-8")
    install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", str(packages)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *install]
    return subprocess.run([*pip, *map(str, wheels)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
