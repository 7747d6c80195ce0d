"""Whether memory fits into a machine and its cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.memorylimits import (
    check_huge_pages_fit,
    check_memory_fits,
    has_memory_limit,
    page_table_bytes,
    worker_totals,
)

MIB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": "MemTotal:       9000 kB\nMemAvailable:       8192 kB\n"}


def test_memory_fits_mem_available(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO)
    check_memory_fits(8 * MIB, root)
    with pytest.raises(ConfigError, match=r"8388609 \(8.00 MiB\): only 8 MiB are available \(MemAvailable\)"):
        check_memory_fits(8 * MIB + 1, root)


def test_memory_fits_what_may_be_committed(tmp_path: Path) -> None:
    meminfo = {"proc/meminfo": MEMINFO["proc/meminfo"] + "CommitLimit:      6144 kB\nCommitted_AS:     2048 kB\n"}
    check_memory_fits(8 * MIB, machine(tmp_path, {**meminfo, "proc/sys/vm/overcommit_memory": "1\n"}))
    root = machine(tmp_path, {**meminfo, "proc/sys/vm/overcommit_memory": "2\n"})
    check_memory_fits(4 * MIB, root)
    with pytest.raises(ConfigError, match=r"only 4 MiB are available \(CommitLimit, .*overcommit_memory = 2"):
        check_memory_fits(4 * MIB + 1, root)


def test_what_workers_may_have_together(tmp_path: Path) -> None:
    root = machine(
        tmp_path, MEMINFO | {"proc/sys/vm/max_map_count": "65530\n", "proc/self/status": "VmPTE:\t  12 kB\n"}
    )
    assert worker_totals(root) == {"mappings": 65530 - 8191, "page_table_bytes": (9000 << 10) // 64}
    assert page_table_bytes(root) == 12 << 10
    mount = "sys/fs/cgroup"
    files = {f"{mount}/memory.max": f"{4 * MIB}", f"{mount}/memory.current": f"{MIB}", "proc/self/cgroup": "0::/\n"}
    root = machine(tmp_path, files | {"proc/sys/vm/max_map_count": "1000\n"})
    assert worker_totals(root) == {"mappings": 0, "page_table_bytes": 4 * MIB // 64}


@pytest.mark.parametrize(("limit", "limited"), [(f"{2 * MIB}", True), (f"{(1 << 63) - 4096}", False), ("max", False)])
def test_whether_a_cgroup_limits_memory(tmp_path: Path, limit: str, limited: bool) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {f"{mount}/memory.limit_in_bytes": limit, f"{mount}/memory.usage_in_bytes": "0"}
    root = machine(tmp_path, {**MEMINFO, "proc/self/cgroup": "4:memory:/box\n", **files})
    assert has_memory_limit(root) is limited


def test_memory_fits_any_ancestors_cgroup_limit(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/system.slice"
    root = machine(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/system.slice/kvoffloadd.service\n",
            f"{group}/memory.max": f"{4 * MIB}\n",
            f"{group}/memory.current": f"{3 * MIB}\n",
            f"{group}/memory.stat": f"anon 7\ninactive_file {MIB}\n",
            f"{group}/kvoffloadd.service/memory.max": "max\n",
            f"{group}/kvoffloadd.service/memory.current": "4096\n",
        },
    )
    check_memory_fits(2 * MIB, root)
    with pytest.raises(ConfigError, match=r"only 2 MiB are available .*cgroup .*/system.slice"):
        check_memory_fits(2 * MIB + 4096, root)


def limited(tmp_path: Path, unit: dict[str, str], above: dict[str, str]) -> Path:
    """A machine with 60 GiB, and cgroups of version 2 with these files: a unit's, and that of the slice above it."""
    group, used = "sys/fs/cgroup/system.slice", {"memory.current": f"{MIB}\n", "memory.max": "max\n"}
    return machine(tmp_path, {
        "proc/meminfo": f"MemAvailable: {60 << 20} kB\n",
        "proc/self/cgroup": "0::/system.slice/kvoffloadd.service\n",
        **{f"{group}/{name}": text for name, text in {**used, **above}.items()},
        **{f"{group}/kvoffloadd.service/{name}": text for name, text in {**used, **unit}.items()},
    })  # fmt: skip


@pytest.mark.parametrize("whose", ["the unit's", "the slice's"])
def test_memory_above_which_the_kernel_throttles_does_not_fit(tmp_path: Path, whose: str) -> None:
    high = {"memory.high": f"{4 * MIB}\n"}
    root = limited(tmp_path, *((high, {}) if whose == "the unit's" else ({}, high)))
    check_memory_fits(3 * MIB, root)
    assert has_memory_limit(root)
    with pytest.raises(ConfigError, match=r"only 3 MiB are available \(cgroup .*/system.slice.*, memory\.high\)"):
        check_memory_fits(3 * MIB + 4096, root)


def test_the_lower_of_two_limits_holds(tmp_path: Path) -> None:
    root = limited(tmp_path, {"memory.high": f"{4 * MIB}\n", "memory.max": f"{3 * MIB}\n"}, {})
    with pytest.raises(ConfigError, match=r"only 2 MiB are available \(cgroup .*/kvoffloadd.service, memory\.max\)"):
        check_memory_fits(3 * MIB, root)


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert not has_memory_limit(limited(tmp_path, {"memory.high": "max\n"}, {"memory.high": "max\n"}))


def test_what_the_kernel_gives_back_on_demand_is_free(tmp_path: Path) -> None:
    """MemAvailable counts it; shared memory is no such file, nor are anonymous pages."""
    stat = f"anon {MIB}\nfile {9 * MIB}\nshmem {MIB}\ninactive_file {2 * MIB}\nactive_file {5 * MIB}\n"
    files = {"memory.max": f"{16 * MIB}\n", "memory.current": f"{12 * MIB}\n"}
    root = limited(tmp_path, {**files, "memory.stat": f"{stat}slab_reclaimable {MIB}\nslab {3 * MIB}\n"}, {})
    check_memory_fits(12 * MIB, root)
    with pytest.raises(ConfigError, match="only 12 MiB are available"):
        check_memory_fits(12 * MIB + 4096, root)


def test_what_is_given_back_frees_no_more_than_is_used(tmp_path: Path) -> None:
    """The files are read one after another."""
    files = {"memory.max": f"{4 * MIB}\n", "memory.current": f"{MIB}\n", "memory.stat": f"active_file {2 * MIB}\n"}
    with pytest.raises(ConfigError, match="only 4 MiB are available"):
        check_memory_fits(5 * MIB, limited(tmp_path, files, {}))


def test_page_cache_of_cgroup_v1_is_free(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "memory.limit_in_bytes": f"{8 * MIB}\n",
        "memory.usage_in_bytes": f"{7 * MIB}\n",
        "memory.stat": f"active_file {MIB}\ntotal_active_file {4 * MIB}\ntotal_inactive_file {MIB}\n",
    }
    root = machine(tmp_path, {"proc/self/cgroup": "4:memory:/\n"} | {f"{mount}/{k}": v for k, v in files.items()})
    check_memory_fits(6 * MIB, root)
    with pytest.raises(ConfigError, match=r"only 6 MiB are available .*memory\.limit_in_bytes"):
        check_memory_fits(7 * MIB, root)


def test_memory_fits_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/box\n4:memory:/not/mounted/here\n",
            f"{mount}/memory.limit_in_bytes": f"{2 * MIB}\n",
            f"{mount}/memory.usage_in_bytes": f"{MIB}\n",
        },
    )
    with pytest.raises(ConfigError, match="only 1 MiB are available"):
        check_memory_fits(2 * MIB, root)


def huge(total: int, free: int, **others: int) -> dict[str, str]:
    """The system's pool of huge pages."""
    counts = {"nr_hugepages": total, "free_hugepages": free, **others}
    return {f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}": f"{count}\n" for name, count in counts.items()}


def test_huge_pages_that_are_free_and_promised_to_nobody_fit(tmp_path: Path) -> None:
    root = machine(tmp_path, huge(16, 12, resv_hugepages=2))
    check_huge_pages_fit(20 * MIB, root)
    with pytest.raises(ConfigError, match=r"takes 11 huge pages of 2 MiB, and 10 of 16 .*sysctl vm\.nr_hugepages=17"):
        check_huge_pages_fit(20 * MIB + 1, root)


def test_huge_pages_that_the_kernel_makes_on_demand_fit(tmp_path: Path) -> None:
    root = machine(tmp_path, huge(0, 0, nr_overcommit_hugepages=8, surplus_hugepages=3))
    check_huge_pages_fit(10 * MIB, root)
    with pytest.raises(ConfigError, match="and 5 of 0 are free"):
        check_huge_pages_fit(12 * MIB, root)


@pytest.mark.parametrize(
    ("line", "limit", "usage"),
    [
        ("0::/pod/box", "sys/fs/cgroup/pod/hugetlb.2MB.max", "sys/fs/cgroup/pod/hugetlb.2MB.current"),
        (
            "7:hugetlb:/box",
            "sys/fs/cgroup/hugetlb/hugetlb.2MB.limit_in_bytes",
            "sys/fs/cgroup/hugetlb/hugetlb.2MB.usage_in_bytes",
        ),
    ],
)
def test_huge_pages_that_a_cgroup_forbids(tmp_path: Path, line: str, limit: str, usage: str) -> None:
    """Mapping them gives no error, but a process that touched one would be killed."""
    files = {"proc/self/cgroup": f"{line}\n", limit: f"{8 * MIB}\n", usage: f"{2 * MIB}\n"}
    root = machine(tmp_path, {**huge(16, 16), **files})
    check_huge_pages_fit(6 * MIB, root)
    with pytest.raises(ConfigError, match=r"takes 4 huge pages of 2 MiB, and cgroup .* allows 3 more"):
        check_huge_pages_fit(8 * MIB, root)


def test_huge_pages_of_a_kernel_that_has_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='huge_pages = "reserved": this kernel has no huge pages of 2 MiB'):
        check_huge_pages_fit(1, tmp_path)


def test_memory_of_a_machine_that_tells_nothing_is_not_guessed(tmp_path: Path) -> None:
    check_memory_fits(1 << 50, tmp_path)


def test_memory_of_this_machine() -> None:
    check_memory_fits(4096)
    with pytest.raises(ConfigError):
        check_memory_fits(1 << 60)
