"""`history`: the verb."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.history.gpu_history import GpuHistory
from launcher.verdict.past import against
from tests.in_process import answer_of
from tests.launcher.verdict.test_past import UUID, past

OTHER = "GPU-77aa0000-0000-4000-8000-000000000000"
PASSED: dict[str, Any] = {"verdict": "PASS", "cause": None, "cause_class": None} | dict.fromkeys(
    ("severity", "repeat")
)


def verb(*arguments: str, code: int = 0, **env: str) -> str:
    done = answer_of("history", *arguments, cwd=Path.cwd(), env=dict(os.environ) | env)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert "Traceback" not in said
    return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two runs of two GPUs, a drill of one, and a run on a CPU."""
    path = tmp_path / "history.jsonl"
    both = {"model": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "exit_code": 21}
    for time in ("2026-02-01T08:00:00+01:00", "2026-02-03T09:00:00+01:00"):
        bad = past(time, run_dir=f"/tmp/model_check_logs_{time[:4]}", **both)
        good = past(time, uuid=OTHER, worker="GPU4", run_dir=bad.run_dir, **both | PASSED)
        GpuHistory(path).append([bad, good])
    GpuHistory(path).append([past("2026-02-04T09:00:00+01:00", is_drill=True)])
    cpu = {"uuid": None, "model": None, "worker": "CPU0", "verdict": "INCONCLUSIVE"}
    GpuHistory(path).append([past("2026-02-05T09:00:00+01:00", **cpu)])
    return path


def test_runs_are_listed_newest_last_with_what_each_gpu_did(path: Path) -> None:
    lines = verb("--file", str(path)).splitlines()
    assert lines[:3] == [
        f"history in {path}",
        "2026-02-01 08:00  /tmp/model_check_logs_2026",
        "  GPU3  GPU-5d1c92ab  SUSPECT  MONITOR (hardware, transient)  RTX PRO 6000 Black",
    ]
    assert lines[3].split() == ["GPU4", "GPU-77aa0000", "PASS", *lines[3].split()[3:]]
    heads = [line for line in lines if line.startswith("2026-")]
    assert [line[:16] for line in heads] == sorted(line[:16] for line in heads)
    assert [line.endswith("  DRILL") for line in heads] == [False, False, True, False]
    assert lines[-1] == f"ISOLATE {UUID}: 2 transient since 2026-02-01"
    assert max(map(len, lines[1:])) <= 80


def test_one_gpu_is_asked_for_by_its_uuid_or_its_worker(path: Path) -> None:
    for which in ("GPU-77AA", OTHER, "gpu4"):
        rows = json.loads(verb(which, "--file", str(path), "--json"))["runs"]
        assert [row["uuid"] for row in rows] == [OTHER, OTHER], which
    assert "on box" in verb("CPU0", "--file", str(path))


def test_the_document_holds_every_line_as_it_was_kept(path: Path) -> None:
    path.write_text(f'{path.read_text()}{{"schema": 2}}\n')
    document = json.loads(verb("--json", MODEL_CHECK_HISTORY_FILE=str(path)))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert (document["schema"], document["kind"]) == (1, "history")
    assert document["file"] == str(path)
    assert document["runs"] == kept[:-1]
    assert document["left_out"] == 1
    assert verb("--file", str(path)).splitlines()[-1].startswith(f"{path}: 1 lines left out")


def test_a_gpu_that_it_does_not_know_is_one_message(path: Path) -> None:
    said = verb("GPU-0000", "--file", str(path), code=2)
    assert said == f"[launcher] error: history: {path}: no line of a GPU or worker GPU-0000\n"


def test_an_empty_one_says_where_it_will_be(tmp_path: Path) -> None:
    path = tmp_path / "none" / "history.jsonl"
    assert verb("--file", str(path)) == f"no run yet: the history will be {path}\n"
    assert json.loads(verb("--file", str(path), "--json"))["runs"] == []
    assert not path.parent.exists()
    assert "none is kept" in verb(MODEL_CHECK_HISTORY_FILE="", code=2)


def test_one_that_cannot_be_read_is_one_message(tmp_path: Path) -> None:
    said = verb("--file", str(tmp_path), code=2)
    assert said.startswith(f"[launcher] error: {tmp_path} cannot be read: ")
    assert said.count("\n") == 1


def test_what_would_move_the_cursor_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    GpuHistory(path).append([past(model="\x1b[2J", run_dir="/a\x1b]0;x\x07")])
    assert "\x1b" not in verb("--file", str(path))


def test_a_gpu_is_forgotten_by_a_line_that_says_why(path: Path) -> None:
    before = path.read_text()
    said = verb("forget", UUID[:8], "--because", "replaced, ticket 17", "--file", str(path))
    assert said == f"history: {UUID}: what was before counts no more: replaced, ticket 17\n"
    assert path.read_text().startswith(before)
    lines = verb("--file", str(path)).splitlines()
    assert lines[-2].endswith("  forgotten, what was before counts no more:")
    assert lines[-1] == f"  {UUID}: replaced, ticket 17"
    assert against(GpuHistory(path).runs()) == {}
    assert "DRILL" in verb("--file", str(path))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["GPU-", "--because", "x"], "2 GPUs: GPU-5d1c"),
        (["GPU-none", "--because", "x"], "no line of such a GPU"),
        (["CPU0", "--because", "x"], "no line of such a GPU"),
        ([UUID, "--because", " "], "--because TEXT: why"),
        ([UUID], "--because"),
    ],
)
def test_nothing_is_forgotten_without_one_gpu_and_a_reason(
    path: Path, arguments: list[str], wrong: str
) -> None:
    before = path.read_bytes()
    assert wrong in verb("forget", *arguments, "--file", str(path), code=2)
    assert path.read_bytes() == before
