"""Locks on GPUs between launchers: real processes, real signals, real flock."""

import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.gpus.probe import Gpu, GpuProcess
from launcher.gpus.reservation import (
    LOCK_DIR,
    default_lock_dir,
    holders,
    look_auto,
    reserve,
    reserve_auto,
)
from model_check.errors import NoGpuError, StorageError
from model_check.utils.lock import try_lock
from tests.deadline import DEADLINE_S
from tests.launcher.gpus.conftest import ROOT, Box
from tests.nvml_fake.build import fake_gpu

NOBODY = 65534

HOLD = """
import os, sys
from pathlib import Path
import filelock
from launcher.gpus.probe import Gpu
from launcher.gpus.reservation import reserve
if "BECOME" in os.environ:  # only now: another user may not even read the modules
    os.setgid(int(os.environ["BECOME"]))
    os.setuid(int(os.environ["BECOME"]))
held = reserve([Gpu(0, uuid, "GPU") for uuid in sys.argv[2:]], Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

HOLD_AUTO = """
import sys
from launcher.gpus.probe import NvmlProbe
from launcher.gpus.reservation import reserve_auto
gpus, held = reserve_auto(int(sys.argv[1]), lambda: NvmlProbe(deadline_s=20.0).snapshot().gpus)
print("held", *(gpu.index for gpu in gpus), flush=True)
sys.stdin.read()
"""


def gpu(index: int, **fields: object) -> Gpu:
    idle: dict[str, object] = {"total_mib": 81559, "used_mib": 4, "processes": ()}
    return Gpu(index, f"GPU-{index}", "NVIDIA H100", **(idle | fields))  # type: ignore[arg-type]


def _made(lock_dir: Path) -> list[Path]:
    """The lock file of GPU 0, which an earlier launcher made."""
    reserve([gpu(0)], lock_dir).close()
    return list(lock_dir.iterdir())


@contextmanager
def running(
    code: str, *arguments: object, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`code` in a fresh interpreter that ends when its standard input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def said(process: subprocess.Popen[str]) -> list[str]:
    """The words of its next line; it must come within the deadline."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
    assert ready, "nothing was said"
    return process.stdout.readline().split()


def test_a_reserved_gpu_is_refused_and_the_holder_is_named(tmp_path: Path) -> None:
    with running(HOLD, tmp_path, "GPU-0") as holder:
        assert said(holder) == ["held"]
        with pytest.raises(
            NoGpuError, match=rf"GPU 0 \(GPU-0\) is reserved by pid {holder.pid} \("
        ):
            reserve([gpu(0)], tmp_path)
        reserve([gpu(1)], tmp_path).close()


def test_a_lock_file_deleted_before_it_is_locked_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of the directory deletes it between our opening and our locking."""
    (lock,) = _made(tmp_path)
    deleted = iter([True])

    def delete_then_lock(descriptor: int) -> bool:
        if next(deleted, False):
            lock.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr("launcher.gpus.reservation.try_lock", delete_then_lock)
    with reserve([gpu(0)], tmp_path):
        monkeypatch.undo()
        with running(HOLD, tmp_path, "GPU-0") as other:
            assert other.wait(DEADLINE_S) != 0, "two launchers have the GPU"


def test_a_lock_file_that_is_always_deleted_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def delete_then_lock(descriptor: int) -> bool:
        for path in tmp_path.iterdir():
            path.unlink()
        return try_lock(descriptor)

    monkeypatch.setattr("launcher.gpus.reservation.try_lock", delete_then_lock)
    with pytest.raises(StorageError, match="somebody deletes it again and again"):
        reserve([gpu(0)], tmp_path)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    with running(HOLD, tmp_path, "GPU-0") as holder:
        assert said(holder) == ["held"]
        holder.send_signal(signal.SIGKILL)
        holder.wait(DEADLINE_S)
        reserve([gpu(0)], tmp_path).close()


def test_children_do_not_inherit_the_reservation(tmp_path: Path) -> None:
    reservation = reserve([gpu(0)], tmp_path)
    with running("import sys; print('up', flush=True); sys.stdin.read()") as child:
        assert said(child) == ["up"]
        reservation.close()
        reserve([gpu(0)], tmp_path).close()


def test_all_or_nothing(tmp_path: Path) -> None:
    with reserve([gpu(1)], tmp_path):
        with pytest.raises(NoGpuError, match="GPU 1"):
            reserve([gpu(2), gpu(1), gpu(0)], tmp_path)
        reserve([gpu(0), gpu(2)], tmp_path).close()


def test_released_gpus_can_be_reserved_again(tmp_path: Path) -> None:
    with reserve([gpu(0)], tmp_path) as reservation:
        pass
    reservation.close()
    with reserve([gpu(0)], tmp_path):
        pass


def test_lock_files_serve_all_users_whatever_the_umask_and_stay(tmp_path: Path) -> None:
    lock_dir = tmp_path / "locks"
    before = os.umask(0o077)
    try:
        reserve([gpu(0)], lock_dir).close()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    (file,) = lock_dir.iterdir()
    assert file.name == "GPU-0.lock"
    assert stat.S_IMODE(lock_dir.stat().st_mode) == 0o1777
    assert stat.S_IMODE(file.stat().st_mode) == 0o666
    content = json.loads(file.read_text())
    assert content["pid"] == os.getpid()
    assert set(content) == {"pid", "user", "host", "since"}


@pytest.mark.root
@pytest.mark.parametrize("first_user", ["root", "nobody"])
def test_users_respect_each_others_reservations(first_user: str) -> None:
    with tempfile.TemporaryDirectory() as directory:  # tmp_path lies where only its owner may go
        os.chmod(directory, 0o777)
        lock_dir = Path(directory) / "locks"
        if first_user == "root":
            reserve([gpu(0)], lock_dir).close()
        with running(HOLD, lock_dir, "GPU-0", env=os.environ | {"BECOME": str(NOBODY)}) as holder:
            assert said(holder) == ["held"]
            owner = 0 if first_user == "root" else NOBODY
            assert (lock_dir / "GPU-0.lock").stat().st_uid == owner
            with pytest.raises(NoGpuError, match=rf"pid {holder.pid} \(nobody, since "):
                reserve([gpu(0)], lock_dir)
        reserve([gpu(0)], lock_dir).close()


@pytest.mark.root
def test_another_users_lock_file_can_be_locked(tmp_path: Path) -> None:
    reserve([gpu(0)], tmp_path / "locks").close()
    os.chown(tmp_path / "locks" / "GPU-0.lock", NOBODY, NOBODY)
    with reserve([gpu(0)], tmp_path / "locks"):
        pass


def test_a_link_laid_by_somebody_else_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "GPU-0.lock").symlink_to(victim)
    os.link(victim, locks / "GPU-1.lock")
    os.mkfifo(locks / "GPU-2.lock")
    (tmp_path / "alias").symlink_to(locks)
    for index in range(3):
        with pytest.raises(StorageError, match=f"GPU-{index}.lock: cannot serve as a lock"):
            reserve([gpu(index)], locks)
    with pytest.raises(StorageError, match="cannot serve as a lock"):
        reserve([gpu(3)], tmp_path / "alias")
    assert victim.read_text() == "precious"


def test_a_lock_directory_that_cannot_be_is_told_with_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=LOCK_DIR):
        reserve([gpu(0)], tmp_path / "file" / "locks")


def test_a_lock_file_with_strange_content_still_locks(tmp_path: Path) -> None:
    nested, endless = "[" * 4096, '{"pid": 1e999, "user": "u", "host": "h", "since": "s"}'
    for content in ("", "not json", "[]", '{"pid": "x"}', '{"pid": 1}', "\xff", nested, endless):
        with reserve([gpu(0)], tmp_path):
            (tmp_path / "GPU-0.lock").write_text(content, encoding="latin-1")
            with pytest.raises(NoGpuError, match="reserved by another launcher"):
                reserve([gpu(0)], tmp_path)
    with reserve([gpu(0)], tmp_path):
        forged = {"pid": 1, "user": "\x1b[2Jroot\n", "host": "h", "since": "now"}
        (tmp_path / "GPU-0.lock").write_text(json.dumps(forged))
        with pytest.raises(NoGpuError) as error:
            reserve([gpu(0)], tmp_path)
        assert str(error.value).isprintable()


def test_the_lock_directory_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK_DIR, str(tmp_path / "mine"))
    with reserve([gpu(0)]):
        assert (tmp_path / "mine" / "GPU-0.lock").exists()
    monkeypatch.delenv(LOCK_DIR)
    assert default_lock_dir().name in {"model_check", "model_check_locks"}


def views(*moments: Sequence[Gpu]) -> Callable[[], Sequence[Gpu]]:
    """What is seen at each look; the last moment stays."""
    remaining = list(moments)
    return lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0]


def test_auto_takes_the_next_freest_when_the_freest_is_reserved(tmp_path: Path) -> None:
    gpus = [gpu(0), gpu(1, used_mib=20000), gpu(2, used_mib=10000)]
    with reserve([gpu(0)], tmp_path):
        chosen, reservation = reserve_auto(1, views(gpus), tmp_path)
    assert [g.index for g in chosen] == [2]
    reservation.close()


def test_auto_gives_a_gpu_back_that_got_busy_meanwhile(tmp_path: Path) -> None:
    idle = [gpu(0), gpu(1)]
    busy = [gpu(0, used_mib=30000, processes=(GpuProcess(4711, 30000),)), gpu(1)]
    chosen, reservation = reserve_auto(1, views(idle, busy), tmp_path)
    assert [g.index for g in chosen] == [1]
    reserve([gpu(0)], tmp_path).close()
    reservation.close()


def test_auto_gives_up_when_every_gpu_gets_busy_at_each_look(tmp_path: Path) -> None:
    idle = [gpu(0), gpu(1)]
    first, second = [gpu(0, used_mib=30000), gpu(1)], [gpu(0), gpu(1, used_mib=30000)]
    with pytest.raises(NoGpuError, match="faster than they can be reserved"):
        reserve_auto(1, views(idle, first, second, first), tmp_path)
    reserve(idle, tmp_path).close()


def test_auto_on_a_busy_machine_shares_the_freest(tmp_path: Path) -> None:
    gpus = [gpu(0, used_mib=60000), gpu(1, used_mib=20000)]
    chosen, reservation = reserve_auto(1, views(gpus), tmp_path)
    assert [g.index for g in chosen] == [1]
    reservation.close()


def test_auto_tells_who_holds_the_others_when_too_few_are_left(tmp_path: Path) -> None:
    with (
        reserve([gpu(1)], tmp_path),
        pytest.raises(NoGpuError, match=rf"2 wanted, 1 free; GPU 1 .*pid {os.getpid()} "),
    ):
        reserve_auto(2, views([gpu(0), gpu(1)]), tmp_path)
    reserve([gpu(0), gpu(1)], tmp_path).close()


def test_auto_keeps_nothing_when_the_second_look_fails(tmp_path: Path) -> None:
    looks = iter([[gpu(0)]])

    def look() -> Sequence[Gpu]:
        for gpus in looks:
            return gpus
        raise NoGpuError("the driver hangs")

    with pytest.raises(NoGpuError, match="hangs"):
        reserve_auto(1, look, tmp_path)
    reserve([gpu(0)], tmp_path).close()


def test_a_look_passes_over_what_others_hold_and_leaves_nothing_behind(tmp_path: Path) -> None:
    gpus, locks = [gpu(0), gpu(1), gpu(2, used_mib=900)], tmp_path / "locks"
    assert look_auto(2, gpus, locks) == gpus[:2]
    assert not locks.exists()
    with running(HOLD, locks, "GPU-0") as holder:
        said(holder)
        assert look_auto(2, gpus, locks) == gpus[1:]
        (line,) = holders(gpus, locks)
        assert line.startswith(f"GPU 0 (GPU-0) is reserved by pid {holder.pid} (")
        with pytest.raises(NoGpuError, match=r"auto: 3 wanted, 2 free; GPU 0 .* is reserved by"):
            look_auto(3, gpus, locks)
    reserve(gpus, locks).close()  # the looks hold nothing


def test_launchers_at_once_get_different_gpus(box: Callable[..., Box], tmp_path: Path) -> None:
    env = box([fake_gpu(index) for index in range(3)]).env | {LOCK_DIR: str(tmp_path / "locks")}
    with (
        running(HOLD_AUTO, 1, env=env) as first,
        running(HOLD_AUTO, 2, env=env) as second,
    ):
        words = [said(first), said(second)]
        assert [w[0] for w in words] == ["held", "held"]
        indices = sorted(index for _, *picked in words for index in picked)
        assert indices == ["0", "1", "2"]
