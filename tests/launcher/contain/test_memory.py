"""What control groups tell of memory, as files of both versions."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from launcher.contain.memory import Membership, MemoryRoom, OomCount, memory_room, oom_count

GIB = 1 << 30
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 0\nmax 7\noom 4\noom_kill 2\noom_group_kill 0\n"


def cgroup(tmp_path: Path, membership: str, files: Mapping[str, object]) -> Membership:
    (tmp_path / "cgroup").write_text(membership)
    for name, content in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return Membership(tmp_path / "cgroup", tmp_path / "fs")


# -- the kernel's count of OOM kills


def count_of(tmp_path: Path, membership: str, files: Mapping[str, object]) -> OomCount | None:
    return oom_count(cgroup(tmp_path, membership, files))


def test_version_2(tmp_path: Path) -> None:
    files = {"job/step/memory.events": V2, "job/step/memory.max": "2147483648\n"}
    found = count_of(tmp_path, "0::/job/step\n", files)
    assert found == OomCount(2, 2 << 30)
    assert found.describe() == "the cgroup counted an OOM kill (limit 2.0 GiB)"


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    membership = "5:devices:/\n4:cpu,memory:/job\n0::/\n"
    files = {"memory/job/memory.oom_control": V1, "memory/job/memory.limit_in_bytes": "67108864\n"}
    found = count_of(tmp_path, membership, files)
    assert found == OomCount(3, 64 << 20)
    assert found.describe().endswith("(limit 64 MiB)")


@pytest.mark.parametrize(("name", "text"), [("max", "max\n"), ("max", "9223372036854771712\n")])
def test_a_limit_that_is_none(tmp_path: Path, name: str, text: str) -> None:
    found = count_of(tmp_path, "0::/\n", {"memory.events": V2, f"memory.{name}": text})
    assert found == OomCount(2, None)
    assert found.describe() == "the cgroup counted an OOM kill (no limit)"


def test_a_container_that_sees_the_hosts_path_but_its_own_mount(tmp_path: Path) -> None:
    files = {"memory/memory.oom_control": V1}
    assert count_of(tmp_path, "4:memory:/docker/4f1e\n", files) == OomCount(3, None)
    assert count_of(tmp_path, "0::/../../kubepods/4f1e\n", {"memory.events": V2}) is not None


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/job\n", {}),
        ("", {}),
        ("nonsense\n4:memory\n", {}),
        ("4:memory:/\n", {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}),
        ("0::/\n", {"memory.events": "oom_kill -\n"}),
    ],
)
def test_where_there_is_no_counter_nothing_is_known(
    tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    assert count_of(tmp_path, membership, files) is None


def test_no_file_at_all(tmp_path: Path) -> None:
    assert oom_count(Membership(tmp_path / "cgroup", tmp_path / "fs")) is None


# -- how much memory they leave


def test_page_cache_that_can_be_dropped_counts_as_left(tmp_path: Path) -> None:
    files = {
        "job/memory.max": 8 * GIB,
        "job/memory.current": 6 * GIB,
        "job/memory.stat": f"anon 1\ninactive_file {4 * GIB}\nactive_file 7",
    }
    assert memory_room(cgroup(tmp_path, "0::/job\n", files)) == MemoryRoom(8 * GIB, 6 * GIB)


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    files = {
        "a/memory.max": 4 * GIB,
        "a/memory.current": 3 * GIB,
        "a/b/memory.max": 16 * GIB,
        "a/b/memory.current": 1 * GIB,
        "a/b/c/memory.max": "max",
        "a/b/c/memory.current": 1,
    }
    assert memory_room(cgroup(tmp_path, "0::/a/b/c\n", files)) == MemoryRoom(4 * GIB, 1 * GIB)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {"memory.max": 2 * GIB, "memory.current": GIB}
    assert memory_room(cgroup(tmp_path, "0::/docker/4711\n", files)) == MemoryRoom(2 * GIB, GIB)


def test_room_in_version_1(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": 2 * GIB,
        "memory/job/memory.usage_in_bytes": 2 * GIB,
        "memory/job/memory.stat": f"total_inactive_file {GIB}",
        "memory/memory.limit_in_bytes": 9223372036854771712,
        "memory/memory.usage_in_bytes": 1,
    }
    membership = "5:devices:/\n4:cpu,memory:/job\n0::/\n"
    assert memory_room(cgroup(tmp_path, membership, files)) == MemoryRoom(2 * GIB, GIB)


def test_no_limit_and_no_cgroup_are_no_room(tmp_path: Path) -> None:
    unlimited = cgroup(tmp_path, "0::/\n", {"memory.max": "max", "memory.current": 1})
    assert memory_room(unlimited) is None
    assert memory_room(Membership(tmp_path / "none", tmp_path)) is None
