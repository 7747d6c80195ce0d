"""`scripts gpu_check` itself: what it makes of parts that end badly, and what it writes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.testing.process import ROOT
from scripts.gpu import RESULTS_VARIABLE
from scripts.gpu.__main__ import verdict_of
from scripts.gpu.bench_contact import STEPS
from scripts.gpu.environment import MACHINES_BINDINGS
from scripts.gpu.parts import Ended, Part
from scripts.gpu.plot import bandwidth
from scripts.gpu.report import write
from scripts.gpu.workerprocess import WorkerError
from scripts.harness.daemon import Daemon
from tests.gpu.conftest import StartWorker
from tests.gpu.layouts import PLAIN

LIMIT_S, CONTACT_S = 50.0, 250.0

# In a separate process: it ends all of its children.
_RUN = """
import json, os, sys
from pathlib import Path
from scripts.gpu import parts
parts.adopt_orphans()
part = parts.Part("it", "It", [sys.executable, "-c", sys.argv[1]], 9, **json.loads(sys.argv[4]))
ended = parts.run(part, float(sys.argv[2]), os.environ, Path(sys.argv[3]))
names = "state", "remark", "figures", "cases", "last_lines", "daemon_lines", "seconds"
print(json.dumps({name: getattr(ended, name) for name in names}))
"""
_LEAVE_BEHIND = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, file=sys.stderr, flush=True)
time.sleep(600)
"""


def run(program: str, log: Path, limit_s: float = 10.0, **options: bool) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, program, str(limit_s), str(log), json.dumps(options)],
        env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("program", "state", "remark"),
    [
        ("print('{\"a\": 1}')", "ran", ""),
        ("print('[]')", "failed", "printed no result"),
        ("raise SystemExit(3)", "failed", "exit status 3"),
        ("import os; os.kill(os.getpid(), 11)", "crashed", "signal 11"),
    ],
)
def test_how_a_part_ends(program: str, state: str, remark: str, tmp_path: Path) -> None:
    ended = run(program, tmp_path / "log")
    assert ended["state"] == state
    assert remark in ended["remark"]
    assert ended["figures"] == ({"a": 1} if state == "ran" else {})


def test_a_part_that_hangs_ends_with_all_that_it_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = run(_LEAVE_BEHIND, log, limit_s=0.7)
    assert ended["state"] == "timed out"
    assert ended["seconds"] < LIMIT_S / 2
    left = int(log.read_text().split()[-1])
    assert not Path(f"/proc/{left}").exists()


# As where the driver holds a process in the kernel: SIGKILL does not end it.
_KEPT = """
import subprocess, sys
from pathlib import Path
from scripts.gpu import parts
parts.TERM_S, parts._end_group, parts._end_orphans = 0.2, lambda _: None, lambda _: None
with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
    print(parts._await(child, 0.2, parts._Reader(Path(sys.argv[1]), print)), child.returncode)
    child.kill()
"""


def test_a_process_that_nothing_ends_costs_its_part_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KEPT, str(tmp_path / "rows")]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as waits:
        try:
            assert waits.communicate(timeout=LIMIT_S)[0].split() == ["None", "None"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(waits.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outcomes", "state"), [((), "timed out"), (("passed",), "cut short"), (("passed", "failed"), "timed out")]
)
def test_tests_are_cut_short_only_if_some_have_passed(outcomes: tuple[str, ...], state: str, tmp_path: Path) -> None:
    rows = [{"test": "one", "outcome": outcome, "seconds": 0, "reason": "", "properties": {}} for outcome in outcomes]
    program = f"import time; from scripts.gpu.results import keep; [keep(row) for row in {rows}]; time.sleep(600)"
    assert run(program, tmp_path / "log", limit_s=5.0, tests=True, may_be_cut=True)["state"] == state


def test_a_row_that_was_cut_costs_that_row_alone(tmp_path: Path) -> None:
    whole, cut = '{"case": {"rows": 1}}\\n', '{"case": {"rows": 2}'
    program = f"import os; os.write(os.open(os.environ['{RESULTS_VARIABLE}'], 65), b'{whole}{cut}'); os.abort()"
    ended = run(program, tmp_path / "log")
    assert (ended["state"], ended["cases"]) == ("crashed", [{"rows": 1}])


_CUT = """
import sys, time
from scripts.gpu.bench import BenchRun, parser
sys.argv[1:] = []
BenchRun(parser(""), needs_gpu=False).done({"rows": 4096, "gb_per_s": 12.5})
print("about to hang", file=sys.stderr, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_what_came_before_the_end_stays(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of another part\n")
    ended = run(_CUT, log, limit_s=5.0)
    assert ended["state"] == "timed out"
    assert ended["cases"] == [{"rows": 4096, "gb_per_s": 12.5}]
    assert ended["last_lines"][-1] == "about to hang"
    assert "of another part" not in ended["last_lines"]


_STOPPED = """
import sys, time
from scripts.gpu.bench import BenchRun, cut_short, parser, table
sys.argv[1:] = ["--json"]
run = BenchRun(parser(""), needs_gpu=False)
with cut_short():
    run.done({"rows": 4096})
    print("daemon: what a daemon logged", file=sys.stderr, flush=True)
    time.sleep(600)
run.tell([table("rows", ["rows"], [[4096]])])
"""


@pytest.mark.slow
def test_a_benchmark_that_is_asked_to_end_says_what_it_has(tmp_path: Path) -> None:
    ended = run(_STOPPED, tmp_path / "log", limit_s=5.0)
    assert ended["state"] == "cut short"
    assert ended["figures"]["tables"][0]["rows"] == [[4096]]
    assert ended["daemon_lines"] == ["daemon: what a daemon logged"]
    assert ended["daemon_lines"][0] not in ended["last_lines"]


@pytest.mark.slow
def test_a_worker_that_fails_says_how_and_goes_on(start_worker: StartWorker, gpu_daemon: Daemon) -> None:
    worker = start_worker(gpu_daemon)
    with pytest.raises(WorkerError, match=r"(?s)^AttributeError: .*no_such_thing.*Traceback.*worker"):
        worker.call("no_such_thing")
    with pytest.raises(WorkerError, match=r"^AttributeError"):
        worker.call("share")  # it has not begun
    worker.begin("ipc", PLAIN.size_bytes, PLAIN.tensors)
    worker.call("share")


@pytest.mark.soak
def test_what_the_machine_says_is_never_fatal(tmp_path: Path) -> None:
    """A driver that opens no memory and makes no batches: lines with its errors, and all other steps."""
    command = [sys.executable, "-m", "scripts.gpu.bench_contact", "--quick", "--json"]
    environment = {**os.environ, "SOFTCUDA_FAULTS": "open_error=999,no_batch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=CONTACT_S)
    cases = {case.pop("step"): case for case in json.loads(done.stdout)["cases"]}
    assert list(cases) == list(STEPS)
    assert cases["entries"]["cuMemcpyBatchAsync, 12080"] == "not there"
    assert cases["context"]["another process's, MiB of the GPU"] == 0
    assert cases["sharing"]["open"] == "CUDA_ERROR_UNKNOWN"
    assert cases["sharing"]["chunks' bytes"].startswith("CUDA_SUCCESS, right")
    assert cases["sharing"]["context works after all"] is True
    assert all("failed" not in case for case in cases.values()), cases


@pytest.mark.slow
def test_without_a_driver_every_step_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.gpu.bench_contact", "--quick", "--json", "--steps", "memory", "context"]
    environment = {**os.environ, "SOFTCUDA_FAULTS": "init_error=100"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=CONTACT_S)
    cases = {case.pop("step"): case for case in json.loads(done.stdout)["cases"]}
    assert list(cases) == ["memory", "context"]
    assert "CUDA_ERROR_NO_DEVICE" in cases["context"]["failed"]
    assert "MemAvailable" in cases["memory"]["at first"]


@pytest.mark.parametrize("soft", [True, False])
def test_wrong_bytes_are_a_problem_with_any_driver(soft: bool) -> None:
    arguments = argparse.Namespace(soft=soft, quick=True)
    ended = Ended(Part("paths", "Paths", ["true"], 1), "ran", cases=[{"wrong_bytes": 0}])
    assert verdict_of([ended], arguments, complete=True)[1]
    ended.cases.append({"wrong_bytes": 3})
    words, good = verdict_of([ended], arguments, complete=True)
    assert not good
    assert "paths: 3 wrong bytes" in words


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def environment_from(bundle: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.gpu.environment", str(venv), str(bundle)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S)


@pytest.mark.slow
def test_the_environment_is_the_bundle_before_what_the_machine_has(tmp_path: Path) -> None:
    """This excludes numpy, which the rest of the machine's packages were built for. No pip is needed."""
    bundle, venv = tmp_path / "bundle", tmp_path / "venv"
    wheel(bundle, "msgspec-0.0.1", {"msgspec/__init__.py": "__version__ = 'of the bundle'"})
    wheel(bundle, "numpy-0.0.1", {"numpy/__init__.py": "__version__ = 'of the bundle'"})
    wheel(bundle, "cuda_bindings-0.0.1", {"cuda/bindings/__init__.py": "__version__ = 'of the bundle'"})
    assert environment_from(bundle, venv).returncode == 0
    program = (
        "import cuda.bindings, msgspec, numpy; print(*(one.__version__ for one in (cuda.bindings, msgspec, numpy)))"
    )
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def versions(**variables: str) -> str:
        command = [str(venv / "bin" / "python"), "-c", program]
        return subprocess.run(command, env=bare | variables, capture_output=True, text=True, check=True).stdout.strip()

    own = importlib.metadata.version("cuda-bindings")
    assert versions() == f"of the bundle of the bundle {np.__version__}"
    assert versions(PYTHONPATH=str(venv / MACHINES_BINDINGS)) == f"{own} of the bundle {np.__version__}"


@pytest.mark.slow
def test_a_python_that_has_everything_needs_no_bundle(tmp_path: Path) -> None:
    assert environment_from(tmp_path, tmp_path / "venv").returncode == 0
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", "import cuda.bindings, pytest_asyncio"]
    assert subprocess.run(command, check=False).returncode == 0


def test_a_wheel_that_is_not_just_unpacked_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path / "bundle", "odd-1", {"odd-1.data/purelib/odd.py": ""})
    done = environment_from(tmp_path / "bundle", tmp_path / "venv")
    assert done.returncode == 1
    assert "odd-1-py3-none-any.whl can't be unpacked as it is" in done.stderr


def case(row_kib: int, speed: float) -> dict[str, Any]:
    kinds = ("store", "stores", "load", "both", "plain store", "plain load", "plain both")
    return {"name": f"{row_kib} KiB", "row_bytes": row_kib << 10, "gb_per_s": dict.fromkeys(kinds, speed)}


@pytest.mark.parametrize("speeds", [(0.02, 0.3), (12.5, 50.0), (99.0, 101.0)])
def test_the_plot_is_an_image_with_every_line(speeds: tuple[float, float]) -> None:
    image = ET.fromstring(bandwidth([case(4, speeds[0]), case(64, speeds[1])]))
    lines = [one for one in image if one.tag.endswith("polyline")]
    assert len(lines) == 7
    for line in lines:
        heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
        assert 0 < heights[1] <= heights[0] < 420


def test_the_report_tells_of_every_part(tmp_path: Path) -> None:
    def part(name: str) -> Part:
        return Part(name, name.title(), ["true"], 1)

    copy = Ended(part("copy"), "ran", 1.5)
    copy.figures = {
        "cases": [case(4, 1.0)],
        "tables": [{"title": "speeds", "columns": ["rows"], "rows": [["4 | KiB"]]}],
        "bounds": [{"what": "speed", "value": 1, "kind": ">=", "bound": 2, "kept": False}],
    }
    tests = Ended(part("tests"), "failed", 2.0, "1 failed")
    tests.tests = [{"test": "a.py::b", "outcome": "failed", "seconds": 1, "reason": "why\nso", "properties": {"n": 5}}]
    life = Ended(part("life"), "timed out", cases=[{"killed": "ipc"}], last_lines=["| why it hung"])
    life.daemon_lines = ["daemon: all is well"]
    all_ = [copy, tests, Ended(part("e2e"), "not run"), life]
    write(tmp_path, "GPU check", [("gpu", "none")], all_, "All is lost.", [("dmesg", ["NVRM: Xid 79"])])
    report = (tmp_path / "report.md").read_text()
    for text in (
        *("All is lost.", "| 4 \\| KiB |", "MISSED", "n: 5; why ... so |", "| e2e   | not run   |", "bandwidth.svg"),
        *('    {"killed": "ipc"}', "    | why it hung", "    daemon: all is well", "    NVRM: Xid 79"),
    ):
        assert text in report
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["copy", "copy", "tests", "tests", "e2e", "life", "life"]
    assert rows[-1]["case"] == {"killed": "ipc"}


def test_too_few_tests_are_a_failure(tmp_path: Path) -> None:
    """No time for any: nothing is proven."""
    command = [sys.executable, str(ROOT / "scripts"), "gpu_check", "--budget", "0", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "only 0 GPU tests ran and passed" in done.stdout
    assert "of the budget were left" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_helper_that_the_bundle_has_is_put_where_there_is_none(tmp_path: Path) -> None:
    """A machine without a compiler is played by a separate checkout, since this one may have the helper."""
    checkout = tmp_path / "checkout"
    for name in (
        "scripts/__init__.py",
        "scripts/gpu/__init__.py",
        "scripts/gpu/bundle.py",
        "scripts/gpu/environment.py",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    place = Path("kvoffloadd", "native", "_native.abi3.so")
    (checkout / place).parent.mkdir(parents=True)
    for source in ("_native.h", "_native.c"):
        (checkout / place).with_name(source).write_text("")
    program = "import pathlib; from scripts.gpu.bundle import add_helper; print(add_helper(pathlib.Path('bundle')))"
    variables = {**os.environ, "PYTHONPATH": str(checkout)}

    def run_there(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=variables, cwd=checkout, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run_there("-c", program) == "False"
    (checkout / place).write_bytes(b"of a source that is newer")
    os.utime(checkout / place, (0, 0))
    assert run_there("-c", program) == "False"
    (checkout / place).write_bytes(b"as built")
    assert run_there("-c", program) == "True"
    built_s = (checkout / place).stat().st_mtime
    for content, age_s, kept in ((b"", None, False), (b"built here", -1.0, True), (b"of an old bundle", 1.0, False)):
        (checkout / place).unlink()
        if age_s is not None:
            (checkout / place).write_bytes(content)
            os.utime(checkout / place, (built_s - age_s,) * 2)
        run_there("-m", "scripts.gpu.environment", "venv", "bundle")
        assert (checkout / place).read_bytes() == (content if kept else b"as built")
