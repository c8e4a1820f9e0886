"""How much memory control groups leave, as files of both versions."""

from pathlib import Path

from launcher.contain.memory_cgroup import Membership
from launcher.contain.memory_room import MemoryRoom, memory_room

GIB = 1 << 30


def cgroup(tmp_path: Path, membership: str, files: dict[str, object]) -> Membership:
    (tmp_path / "cgroup").write_text(membership)
    for name, content in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return Membership(tmp_path / "cgroup", tmp_path / "fs")


def test_page_cache_that_can_be_dropped_counts_as_left(tmp_path: Path) -> None:
    files = {
        "job/memory.max": 8 * GIB,
        "job/memory.current": 6 * GIB,
        "job/memory.stat": f"anon 1\ninactive_file {4 * GIB}\nactive_file 7",
    }
    assert memory_room(cgroup(tmp_path, "0::/job\n", files)) == MemoryRoom(8 * GIB, 6 * GIB)


def test_the_tightest_of_all_groups_above_counts(tmp_path: Path) -> None:
    files: dict[str, object] = {
        "a/memory.max": 4 * GIB,
        "a/memory.current": 3 * GIB,
        "a/b/memory.max": 16 * GIB,
        "a/b/memory.current": 1 * GIB,
        "a/b/c/memory.max": "max",
        "a/b/c/memory.current": 1,
    }
    assert memory_room(cgroup(tmp_path, "0::/a/b/c\n", files)) == MemoryRoom(4 * GIB, 1 * GIB)


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files: dict[str, object] = {"memory.max": 2 * GIB, "memory.current": GIB}
    assert memory_room(cgroup(tmp_path, "0::/docker/4711\n", files)) == MemoryRoom(2 * GIB, GIB)


def test_version_1(tmp_path: Path) -> None:
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
