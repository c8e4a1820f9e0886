"""The file of the history: who may have made it, what becomes of it when a write fails, and that no
run suffers from it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.history import gpu_history
from launcher.history.gpu_history import GpuHistory, Memory, path_of
from model_check.errors import StorageError
from tests.deadline import DEADLINE_S
from tests.in_process import answer_of
from tests.launcher.verdict.test_judge import RECORD
from tests.launcher.verdict.test_past import GPU, UUID, judgement, past

ROOT = Path(__file__).parents[3]
THEIRS = 4711
LAUNCHER = (sys.executable, "-P", "-m", "launcher")

Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "history.jsonl"


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A real run of a command on CPU workers."""

    def run(*arguments: str, command: str = "true", **more: Any) -> Any:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}
        log_dir = f"logging.log_dir={tmp_path}"
        more.setdefault("cwd", tmp_path)
        return subprocess.run(
            [*LAUNCHER, "--device", "cpu", log_dir, *arguments, "--", "sh", "-c", command],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            **more,
        )

    return run


def remember(history: GpuHistory, run_dir: str = "/runs/now") -> Memory:
    """Of a run in which GPU3 had a transient fault."""
    memory = Memory(history, replace(RECORD, run_dir=run_dir, gpus={"GPU3": GPU}))
    memory.recall(["GPU3"])
    memory.remember(judgement(run_dir=run_dir).result)
    return memory


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


Child = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def child(path: Path) -> Iterator[Child]:
    """Starts a process that is up, and does something with the history when a line reaches it."""
    start = (
        "import sys; from pathlib import Path\n"
        "from launcher.history import gpu_history\n"
        "from tests.launcher.verdict.test_past import past\n"
        "history, run = gpu_history.GpuHistory(Path(sys.argv[1])), past()\n"
        "print('up', flush=True); sys.stdin.readline()\n"
    )
    with ExitStack() as stack:

        def begin(code: str) -> "subprocess.Popen[str]":
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", start + code, str(path)],
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert said(process) == "up\n"
            return process

        yield begin


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


# Where it is


def test_the_default_is_root_s_or_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("/var/lib/model-check/history.jsonl")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert path_of(None, {"XDG_STATE_HOME": "/state"}) == root
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert path_of(None, {"XDG_STATE_HOME": "/state"}) == Path("/state/model-check/history.jsonl")
    at_home = Path("/home/a/.local/state/model-check/history.jsonl")
    assert path_of(None, {"HOME": "/home/a"}) == at_home
    assert path_of(None, {"HOME": "/home/a", "XDG_STATE_HOME": "relative"}) == at_home


def test_a_setting_names_another_place_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert path_of("", {}) is None
    assert path_of("~/h.jsonl", {}) == Path("/home/a/h.jsonl")
    assert path_of("h.jsonl", {}) == Path.cwd() / "h.jsonl"


# What it holds


def test_what_was_appended_is_read_again_the_oldest_first(path: Path) -> None:
    history = GpuHistory(path)
    assert [*history.runs()] == []
    first, second = past("1"), past("2", cause="line\nbreak \udcff", uuid=None)
    history.append([first])
    history.append([second, first])
    read = [*history.runs()]
    assert read == [first, replace(second, cause="line\nbreak \\udcff"), first]
    assert history.lack is None


def test_it_is_for_its_user_alone_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        GpuHistory(path).append([past()])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_lines_that_are_torn_or_of_a_newer_version_are_left_out_and_counted(path: Path) -> None:
    history = GpuHistory(path)
    history.append([past("1"), past("2")])
    whole = path.read_bytes()
    newer = b'{"schema":2,"what":"else"}\n'
    same_keys = whole.splitlines()[0].replace(b'"schema":1', b'"schema":2') + b"\n"
    wild = b'\xff"\n' + b"\n" + b"[" * 100_000 + b"\n" + b"x" * (3 << 20) + b"\n"
    path.write_bytes(newer + same_keys + wild + whole + whole[:50])
    assert [run.time for run in history.runs()] == ["1", "2"]
    assert history.lack is not None
    assert "lines left out: torn, or of a newer version" in history.lack


@pytest.mark.parametrize("torn", [1, 50, -1])
def test_a_line_is_whole_behind_one_that_a_killed_launcher_left(path: Path, torn: int) -> None:
    history = GpuHistory(path)
    history.append([past("1"), past("2")])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:torn])
    history.append([past("3")])
    times = [run.time for run in history.runs()]
    assert times == (["1", "2", "3"] if torn == -1 else ["1", "3"])
    assert path.read_bytes().startswith(first + second[:torn] + b"\n")


def test_no_secret_gets_into_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GpuHistory(path).append([past(cause="said: curl https://me:hunter22@host --token=abc")])
    assert "hunter22" not in path.read_text()
    assert "***" in path.read_text()


# Several at once, and cut short


def test_launchers_that_append_at_once_lose_no_line(path: Path, child: Child) -> None:
    code = "for _ in range(20): history.append([run] * 3)"
    children = [child(code) for _ in range(4)]
    for process in children:
        go(process)
    assert [process.wait(DEADLINE_S) for process in children] == [0] * 4
    assert len(lines_of(path)) == 4 * 20 * 3


def test_what_a_launcher_that_was_killed_had_locked_is_free(path: Path, child: Child) -> None:
    code = (
        "gpu_history._append = lambda fd, lines: ("
        "gpu_history.os.write(fd, lines[:99]), print('half', flush=True), sys.stdin.readline())\n"
        "history.append([run])"
    )
    GpuHistory(path).append([past("1")])
    launcher = child(code)
    go(launcher)
    assert said(launcher) == "half\n"
    launcher.send_signal(signal.SIGKILL)
    launcher.wait(DEADLINE_S)
    history = GpuHistory(path)
    history.append([past("2")])
    assert [run.time for run in history.runs()] == ["1", "2"]
    assert history.num_unread == 1


def test_who_keeps_the_lock_is_not_waited_for_for_ever(
    path: Path, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_history, "_LOCK_S", 0.0)
    code = (
        "gpu_history._append = lambda *_: (print('has it', flush=True), sys.stdin.readline())\n"
        "history.append([run])"
    )
    holder = child(code)
    go(holder)
    assert said(holder) == "has it\n"
    with pytest.raises(StorageError, match="another process keeps it locked"):
        GpuHistory(path).append([past()])
    go(holder)
    assert holder.wait(DEADLINE_S) == 0
    GpuHistory(path).append([past()])


def test_a_disk_that_fills_up_leaves_what_was_there(small_disk: Path) -> None:
    path = small_disk / "history.jsonl"
    history = GpuHistory(path)
    history.append([past("1")])
    before = path.read_bytes()
    (small_disk / "rest").write_bytes(b"x" * (900 << 10))
    with pytest.raises(StorageError, match="No space left on device"):
        history.append([past("2")] * 1000)
    assert path.read_bytes() == before
    history.append([past("3")])
    assert [run.time for run in history.runs()] == ["1", "3"]


def test_a_limit_of_file_sizes_leaves_what_was_there(path: Path, child: Child) -> None:
    GpuHistory(path).append([past("1")])
    before = path.read_bytes()
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"
        "try: history.append([run] * 9)\n"
        "except gpu_history.StorageError as error: print(error)"
    )
    limited = child(code)
    out, _ = limited.communicate("go\n", timeout=DEADLINE_S)
    assert limited.returncode == 0
    assert "cannot be written" in out
    assert path.read_bytes() == before


def test_a_history_of_a_hundred_megabytes_is_read_in_little_memory(
    path: Path, child: Child
) -> None:
    GpuHistory(path).append([past()])
    line = path.read_bytes()
    path.write_bytes(line * (100_000_000 // len(line)))
    code = (
        "import resource\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(sum(1 for _ in history.runs()))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    out, _ = child(code).communicate("go\n", timeout=DEADLINE_S)
    count, more_kib = map(int, out.split())
    assert count == 100_000_000 // len(line)
    assert more_kib < 20 << 10


def test_one_that_is_too_large_to_read_is_still_added_to(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = GpuHistory(path)
    history.append([past()])
    monkeypatch.setattr(gpu_history, "_LARGEST", 10)
    remembered = remember(history)
    assert remembered.faults == {}
    assert "larger than 10 bytes" in (remembered.problem or "")
    assert len(lines_of(path)) == 2


# Who may have made it


def planted(path: Path, what: str, mine: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    match what:
        case "a link":
            path.symlink_to(mine)
        case "a link to nothing":
            path.symlink_to(mine.parent / "none")
        case "a pipe":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/full")
        case "a file in place of the directory":
            path.parent.rmdir()
            path.parent.touch()


PLANTS = (
    *("a link", "a link to nothing", "a pipe", "a directory", "a device"),
    "a file in place of the directory",
)


@pytest.mark.parametrize("what", PLANTS)
def test_what_is_no_plain_file_is_told_and_left_alone(
    tmp_path: Path, path: Path, what: str
) -> None:
    mine = tmp_path / "bashrc"
    mine.write_text("precious")
    planted(path, what, mine)
    remembered = remember(GpuHistory(path))
    assert remembered.faults == {}
    assert remembered.problem is not None
    assert str(path) in remembered.problem
    assert mine.read_text() == "precious"
    assert not (tmp_path / "none").exists()


@pytest.mark.root
@pytest.mark.parametrize("what", ["file", "hard link", "link on the way", "directory"])
def test_what_another_user_laid_ready_is_not_used(tmp_path: Path, path: Path, what: str) -> None:
    mine = tmp_path / "mine" / "history.jsonl"
    GpuHistory(mine).append([past()])
    before = mine.read_bytes()
    shared = path.parent
    shared.mkdir()
    match what:
        case "file":
            shared.chmod(0o1777)
            path.write_bytes(before)
            os.chown(path, THEIRS, THEIRS)
        case "hard link":
            shared.chmod(0o1777)
            path.hardlink_to(mine)
        case "link on the way":
            shared.chmod(0o1777)
            path = shared / "way" / "history.jsonl"
            path.parent.symlink_to(mine.parent)
            os.lchown(path.parent, THEIRS, THEIRS)
        case "directory":
            shared.chmod(0o1777)
            path = shared / "theirs" / "history.jsonl"
            path.parent.mkdir()
            path.write_bytes(before)
            os.chown(path.parent, THEIRS, THEIRS)
    remembered = remember(GpuHistory(path))
    assert remembered.faults == {}
    assert "another user" in (remembered.problem or "")
    assert mine.read_bytes() == before


@pytest.mark.root
def test_in_a_private_directory_of_root_a_file_of_another_user_was_put_by_root(
    path: Path,
) -> None:
    history = GpuHistory(path)
    history.append([past()])
    os.chown(path, THEIRS, THEIRS)
    history.append([past()])
    assert len([*history.runs()]) == 2


# A run


def test_each_worker_of_each_run_has_a_line(path: Path, launch: Launch) -> None:
    to = f"launch.history_file={path}"
    assert launch(to, "--workers", "2").returncode == 0
    failing = 'test "$MODEL_CHECK_WORKER" = CPU1 && exit 7; exec sleep 1000'
    assert launch(to, "--workers", "2", command=failing).returncode == 7
    assert launch(to, "--workers", "1", env={"MODEL_CHECK_HISTORY_FILE": ""}).returncode == 0
    rows = lines_of(path)
    verdicts = [(row["worker"], row["verdict"], row["exit_code"]) for row in rows]
    assert verdicts[:2] == [("CPU0", "PASS", 0), ("CPU1", "PASS", 0)]
    assert verdicts[2:4] == [("CPU0", "STOPPED", 7), ("CPU1", "FAIL", 7)]
    assert [row["is_drill"] for row in rows] == [False] * 5
    assert {row["host"] for row in rows} == {os.uname().nodename}
    assert {row["uuid"] for row in rows} == {None}
    assert all(Path(row["run_dir"], "report.json").exists() for row in rows)


def test_runs_that_end_at_once_are_all_kept(path: Path, launch: Launch) -> None:
    to = f"launch.history_file={path}"
    command = [*LAUNCHER, "--device", "cpu", "--workers", "3", to]
    runs = [
        subprocess.Popen(
            [*command, f"logging.log_dir={path.parents[1]}", "--", "true"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert [run.wait(DEADLINE_S) for run in runs] == [0] * 4
    rows = lines_of(path)
    assert len({(row["run_dir"], row["worker"]) for row in rows}) == len(rows) == 12


@pytest.mark.parametrize("what", PLANTS)
def test_a_history_that_cannot_be_kept_costs_a_run_one_line(
    tmp_path: Path, path: Path, launch: Launch, what: str
) -> None:
    mine = tmp_path / "bashrc"
    mine.write_text("precious")
    planted(path, what, mine)
    to = f"launch.history_file={path}"
    done = launch(to, "--workers", "1", command="exit 7")
    assert done.returncode == 7, done.stdout
    (told,) = [line for line in done.stdout.splitlines() if "history:" in line]
    assert told.startswith(f"[launcher] history: {path} cannot be written: ")
    assert "Traceback" not in done.stdout


@pytest.mark.root
def test_another_user_is_told_that_it_may_not_write_there(path: Path, child: Child) -> None:
    GpuHistory(path).append([past()])
    before = path.read_bytes()
    path.parents[1].chmod(0o755)
    code = (
        "import os; from tests.launcher.history.test_gpu_history import remember\n"
        "os.setresuid(4711, 4711, 4711)\n"
        "print(remember(history).problem)"
    )
    out, _ = child(code).communicate("go\n", timeout=DEADLINE_S)
    assert out.startswith(f"{path} cannot be written: Permission denied (")
    assert path.read_bytes() == before


def test_a_working_directory_that_goes_during_the_run_takes_no_history_with_it(
    tmp_path: Path, path: Path, launch: Launch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    to = "launch.history_file=../kept/history.jsonl"
    done = launch(to, "--workers", "1", command='rm -r "$PWD"', cwd=gone)
    assert (done.returncode, gone.exists()) == (0, False), done.stdout
    assert len(lines_of(path)) == 1


def test_an_empty_setting_keeps_none(tmp_path: Path, launch: Launch) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert launch("launch.history_file=", env=state).returncode == 0
    assert launch(env=state | {"MODEL_CHECK_HISTORY_FILE": ""}).returncode == 0
    assert not (tmp_path / "state").exists()


def test_settings_that_are_loaded_again_keep_their_history(path: Path, launch: Launch) -> None:
    launch(f"launch.history_file={path}", "--workers", "1")
    (row,) = lines_of(path)
    config = Path(row["run_dir"]) / "config.json"
    assert launch("--config", str(config), "--workers", "1").returncode == 0
    assert len(lines_of(path)) == 1  # this suite's MODEL_CHECK_HISTORY_FILE= is over a file
    env = {name: value for name, value in os.environ.items() if "HISTORY" not in name}
    done = subprocess.run(
        [*LAUNCHER, "--config", str(config), "--workers", "1", "--", "true"],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0
    assert len(lines_of(path)) == 2


def test_a_report_that_is_made_again_adds_no_line(path: Path, launch: Launch) -> None:
    launch(f"launch.history_file={path}", "--workers", "1")
    (row,) = lines_of(path)
    env = {**os.environ, "MODEL_CHECK_HISTORY_FILE": str(path)}
    again = answer_of("report", row["run_dir"], cwd=path.parent, env=env)
    assert again.returncode == 0
    assert len(lines_of(path)) == 1


# What it changes


def test_the_second_run_with_a_transient_fault_finds_the_first(path: Path) -> None:
    history = GpuHistory(path)
    first = remember(history, "/runs/first")
    assert (first.faults, first.problem) == ({}, None)
    second = remember(history)
    assert str(second.faults["GPU3"]).startswith("the second time: first ")
    assert str(second.faults["GPU3"]).endswith(", /runs/first")
    assert {line["uuid"] for line in lines_of(path)} == {UUID}


def test_a_run_without_a_transient_fault_reads_no_history(path: Path) -> None:
    path.mkdir(parents=True)
    memory = Memory(GpuHistory(path), RECORD)
    assert (memory.recall([]), memory.recall(["CPU0"]), memory.problem) == ({}, {}, None)


def test_lines_that_were_left_out_are_told_where_they_may_matter(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"schema": 2}\n')
    remembered = remember(GpuHistory(path))
    assert "1 lines left out" in (remembered.problem or "")
    assert len(lines_of(path)) == 2
