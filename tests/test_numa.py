"""NUMA nodes of machines that are not at hand, from trees of files as their kernels would show them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.numa import Node, cpus_near, has_policy, interleave, memory_nodes, nodes, parse_list

GPU = "0000:c1:00.0"
SOCKETS = {0: "0-3,8-11", 1: "4-7,12-15"}
ALL_CPUS = range(1 << 12)


@dataclass(frozen=True)
class NumaFiles:
    """Writes one's files below `root`."""

    root: Path

    def has(self, cpus: dict[int, str], *, without_memory: tuple[int, ...] = (), allowed: str = "0-1023") -> Path:
        """Nodes with these CPUs, a GiB each but for those `without_memory`. `allowed`: the process's cpuset.mems."""
        folder = self.root / "sys/devices/system/node"
        for number, listed in cpus.items():
            own = folder / f"node{number}"
            own.mkdir(parents=True)
            (own / "cpulist").write_text(f"{listed}\n")
            kib = 0 if number in without_memory else 1 << 20
            (own / "meminfo").write_text(f"Node {number} MemTotal:       {kib} kB\nNode {number} MemFree:  7 kB\n")
        (folder / "online").write_text(",".join(map(str, cpus)) + "\n")
        (self.root / "proc/self").mkdir(parents=True)
        (self.root / "proc/self/status").write_text(
            f"Name:\tpython\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\nseen:\t1\n"
        )
        return self.root

    def gpu_on(self, node: int) -> None:
        """Adds a GPU, which is on this node according to the firmware."""
        folder = self.root / "sys/bus/pci/devices" / GPU
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")


@pytest.fixture
def machine(tmp_path: Path) -> NumaFiles:
    return NumaFiles(tmp_path)


@pytest.mark.parametrize(
    ("text", "numbers"), [("", ()), ("\n", ()), ("0\n", (0,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("9,2-3", (2, 3, 9))]
)
def test_lists_of_the_kernel(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_list(text) == numbers


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    assert nodes(tmp_path) == ()
    assert memory_nodes("auto", tmp_path) == ()
    assert cpus_near(GPU, ALL_CPUS, tmp_path) == frozenset()


def test_nodes_have_cpus_and_memory(machine: NumaFiles) -> None:
    root = machine.has({0: "0-1", 2: ""}, without_memory=(0,))
    assert nodes(root) == (Node(0, frozenset({0, 1}), 0), Node(2, frozenset(), 1 << 30))


# --- memory ---


def test_one_node_is_left_alone(machine: NumaFiles) -> None:
    root = machine.has({0: "0-15"})
    assert memory_nodes("auto", root) == ()
    assert memory_nodes((0,), root) == (0,), "but as one asks for it"


def test_two_sockets(machine: NumaFiles) -> None:
    root = machine.has(SOCKETS)
    assert memory_nodes("auto", root) == (0, 1)
    assert memory_nodes("off", root) == ()
    assert memory_nodes((1,), root) == (1,)


def test_eight_nodes(machine: NumaFiles) -> None:
    assert memory_nodes("auto", machine.has({n: f"{8 * n}-{8 * n + 7}" for n in range(8)})) == tuple(range(8))


def test_memory_of_gpus_and_of_cxl_is_not_taken_unless_it_is_asked_for(machine: NumaFiles) -> None:
    """Their nodes have no CPUs."""
    root = machine.has({**SOCKETS, 2: "", 10: ""})
    assert memory_nodes("auto", root) == (0, 1)
    assert memory_nodes((0, 2), root) == (0, 2)


def test_one_socket_and_slow_memory_are_left_alone(machine: NumaFiles) -> None:
    assert memory_nodes("auto", machine.has({0: "0-15", 1: ""})) == ()


def test_a_socket_whose_memory_slots_are_empty(machine: NumaFiles) -> None:
    root = machine.has({**SOCKETS, 2: "16-19"}, without_memory=(1,))
    assert memory_nodes("auto", root) == (0, 2)
    with pytest.raises(ConfigError, match=r"memory\.numa = \[1\]: node 1 has no memory .*; these have: 0, 2"):
        memory_nodes((1,), root)


def test_a_cpuset_keeps_nodes_from_this_process(machine: NumaFiles) -> None:
    root = machine.has({n: str(n) for n in range(4)}, allowed="1-2")
    assert memory_nodes("auto", root) == (1, 2)
    with pytest.raises(ConfigError, match="node 3 has no memory that this process may use; these have: 1, 2"):
        memory_nodes((1, 3), root)


# --- CPUs ---


def test_cpus_of_a_gpus_node(machine: NumaFiles) -> None:
    root = machine.has(SOCKETS)
    machine.gpu_on(1)
    assert cpus_near(GPU, ALL_CPUS, root) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cpus_near("0000:01:00.0", ALL_CPUS, root) == frozenset(), "nothing is known of this one"


@pytest.mark.parametrize("node", [-1, 7])
def test_a_gpu_on_no_node(machine: NumaFiles, node: int) -> None:
    root = machine.has(SOCKETS)
    machine.gpu_on(node)
    assert cpus_near(GPU, ALL_CPUS, root) == frozenset()


def test_a_gpu_of_a_machine_with_one_node(machine: NumaFiles) -> None:
    root = machine.has({0: "0-15", 1: ""})
    machine.gpu_on(0)
    assert cpus_near(GPU, ALL_CPUS, root) == frozenset()


def test_a_cpuset_that_is_smaller_than_the_node(machine: NumaFiles) -> None:
    root = machine.has(SOCKETS)
    machine.gpu_on(0)
    assert cpus_near(GPU, {1, 2, 4}, root) == {1, 2}
    assert cpus_near(GPU, {4, 5}, root) == frozenset(), "any CPU rather than none"


# --- system calls ---


def test_what_a_thread_and_its_children_touch_is_spread() -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel knows no NUMA")
    found: list[bool] = []

    def parent() -> None:
        found.append(has_policy())
        interleave([0])
        found.append(has_policy())
        child = threading.Thread(target=lambda: found.append(has_policy()))
        child.start()
        child.join()

    thread = threading.Thread(target=parent)
    thread.start()
    thread.join()
    assert found == [False, True, True]
    assert not has_policy(), "this thread is none of them"
