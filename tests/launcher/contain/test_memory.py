"""The kernel's count of OOM kills, as files of both versions of cgroups."""

from pathlib import Path

import pytest

from launcher.contain.memory import CgroupOom, OomCount
from launcher.contain.memory_cgroup import Membership

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
V2 = "low 0\nhigh 0\nmax 7\noom 4\noom_kill 2\noom_group_kill 0\n"


def cgroup(tmp_path: Path, membership: str, files: dict[str, str]) -> CgroupOom:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CgroupOom(Membership(tmp_path / "cgroup", tmp_path / "fs"))


def test_version_2(tmp_path: Path) -> None:
    files = {"job/step/memory.events": V2, "job/step/memory.max": "2147483648\n"}
    found = cgroup(tmp_path, "0::/job/step\n", files).read()
    assert found == OomCount(2, 2 << 30)
    assert found.describe() == "the cgroup counted an OOM kill (limit 2.0 GiB)"


def test_version_1_beside_an_empty_version_2(tmp_path: Path) -> None:
    membership = "5:devices:/\n4:cpu,memory:/job\n0::/\n"
    files = {"memory/job/memory.oom_control": V1, "memory/job/memory.limit_in_bytes": "67108864\n"}
    found = cgroup(tmp_path, membership, files).read()
    assert found == OomCount(3, 64 << 20)
    assert found.describe().endswith("(limit 64 MiB)")


@pytest.mark.parametrize(("name", "text"), [("max", "max\n"), ("max", "9223372036854771712\n")])
def test_a_limit_that_is_none(tmp_path: Path, name: str, text: str) -> None:
    found = cgroup(tmp_path, "0::/\n", {"memory.events": V2, f"memory.{name}": text}).read()
    assert found == OomCount(2, None)
    assert found.describe() == "the cgroup counted an OOM kill (no limit)"


def test_a_container_that_sees_the_hosts_path_but_its_own_mount(tmp_path: Path) -> None:
    files = {"memory/memory.oom_control": V1}
    assert cgroup(tmp_path, "4:memory:/docker/4f1e\n", files).read() == OomCount(3, None)
    assert cgroup(tmp_path, "0::/../../kubepods/4f1e\n", {"memory.events": V2}).read() is not None


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
    assert cgroup(tmp_path, membership, files).read() is None


def test_no_file_at_all(tmp_path: Path) -> None:
    assert CgroupOom(Membership(tmp_path / "cgroup", tmp_path / "fs")).read() is None
