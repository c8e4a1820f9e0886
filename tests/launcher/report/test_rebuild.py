"""run.json is read as it was written; what is damaged is refused in one line."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launcher import run_dir
from launcher.report.rebuild import rebuild
from launcher.verdict.record import RunEnd, RunRecord, WorkerEnd
from model_check.errors import UsageError
from model_check.events import Step, encode
from tests.data.canary import untouched

RECORD = RunRecord(
    command=["--", "true"],
    started_at=datetime(2026, 1, 1, tzinfo=UTC),
    started_ns=1,
    pid=0,
    cwd="/",
    host="h",
    kernel="6",
    python="3.11",
    run_dir="/r",
    preset="cpu",
    device="cpu",
    mode="replicate",
    drill=None,
    steps=None,
    workers=["CPU0"],
    groups={"CPU0": "CPU0"},
    not_compared="a foreign command may train something else on every GPU",
    versions={"torch": None},
    gpus={},
    duration_s=0.1,
    end=RunEnd(exit_code=0),
    ended=(WorkerEnd(name="CPU0", returncode=0, pid=7, stopped_by_us=False, duration_s=0.1),),
    healths={},
)


def written(directory: Path, **changes: Any) -> Path:
    """A run directory whose run.json has these keys changed; None: without the key."""
    document = msgspec.to_builtins(RECORD) | changes
    kept = {key: value for key, value in document.items() if value is not None}
    run_dir.write(directory / "run.json", kept | {"drill": None, "steps": changes.get("steps")})
    return directory


def test_a_run_of_an_older_version_is_rebuilt_without_the_keys_that_it_lacks(
    tmp_path: Path,
) -> None:
    lacking = ("run_dir", "fail_on", "telemetry_interval_s", "notes", "healths")
    older = written(tmp_path, **dict.fromkeys(lacking))
    said: list[str] = []
    assert rebuild([str(older)], said.append) == 0
    assert said[-1] == "[launcher] PASS: CPU0 ended with exit code 0 (exit code 0)"
    run = json.loads((tmp_path / "report.json").read_text())["run"]
    assert not {*lacking, "end", "ended"} & run.keys()
    assert run["command"] == ["--", "true"]


def test_what_the_history_held_is_no_part_of_what_was_asked(tmp_path: Path) -> None:
    faults = {"CPU0": {"count": 1, "first_time": "2026-02-01T08:00:00", "first_run_dir": "/first"}}
    assert rebuild([str(written(tmp_path, earlier_faults=faults))], lambda line: None) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert "earlier_faults" not in report["run"]
    assert (report["workers"][0]["verdict"], report["workers"][0]["cause"]) == ("PASS", None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"another version \(schema 2\)"),
        ({"groups": None}, "missing required field `groups`"),
        ({"steps": "many"}, r"Expected `int \| null`, got `str` - at `\$.steps`"),
        ({"end": {"reason": "r"}}, r"missing required field `exit_code` - at `\$.end`"),
        ({"ended": None}, "`end` and `ended`"),
        ({"ended": (), "end": {"exit_code": 1, "tied": ["CPU0"]}}, "`end` names CPU0"),
        ({"workers": [], "groups": {}}, "`workers` and `groups`"),
        ({"groups": {"CPU1": ""}}, "`workers` and `groups`"),
        (
            {"end": {"exit_code": 1, "culprits": ["CPU1"]}},
            "`end` names CPU1, who is not in `ended`",
        ),
        ({"started_at": "\x1b[2J"}, r"RFC3339 encoded datetime - at `\$.started_at`"),
        ({"started_at": "2026-01-01T00:00:00"}, "timezone"),
        ({"started_ns": 2**80}, r"`\$.started_ns`"),
        ({"duration_s": 1e300}, r"`\$.duration_s`"),
    ],
)
def test_a_damaged_record_is_one_message(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        rebuild([str(written(tmp_path, **changes))], print)
    assert str(tmp_path / "run.json") in str(caught.value)


def test_a_run_whose_data_could_not_be_prepared_is_rebuilt(tmp_path: Path) -> None:
    ended = WorkerEnd(name="prepare", returncode=2, pid=7, stopped_by_us=False, duration_s=0.1)
    end = RunEnd(exit_code=2, culprits=("prepare",))
    run = written(tmp_path, end=msgspec.to_builtins(end), ended=[msgspec.to_builtins(ended)])
    assert rebuild([str(run)], lambda line: None) == 2


def test_what_is_no_record_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        rebuild([str(tmp_path)], print)
    (tmp_path / "run.json").write_text('{"schema": 1')
    with pytest.raises(UsageError, match="damaged, or not a run of ours"):
        rebuild([str(tmp_path)], print)
    for text in ('{"schema": ' + "[" * 100_000, '{"schema": 1, "host": "\udcff"}'):
        (tmp_path / "run.json").write_bytes(os.fsencode(text))
        with pytest.raises(UsageError, match="damaged, or not a run of ours"):
            rebuild([str(tmp_path)], print)


def test_a_worker_whose_name_is_none_of_a_file_is_one_message(tmp_path: Path) -> None:
    for name in ("CPU\0", "../CPU0", "x" * 65):
        run = written(tmp_path, workers=[name], groups={name: "CPU"}, end=None, ended=None)
        with pytest.raises(UsageError, match=r"damaged, .*\$\.workers\[0\]"):
            rebuild([str(run)], print)


@pytest.mark.root
@pytest.mark.parametrize("name", ["run.json", "cpu0.events.jsonl"])
def test_a_link_in_the_run_of_another_user_is_not_read(tmp_path: Path, name: str) -> None:
    run, private = written(tmp_path / "run"), tmp_path / "private"
    private.write_text("{}")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(private)
    os.chown(run / name, 4711, 4711, follow_symlinks=False)
    os.chown(run, 4711, 4711)
    with pytest.raises(UsageError, match="is a link that another user may have made"):
        rebuild([str(run)], print)


@pytest.mark.root
def test_another_users_link_in_place_of_a_run_is_not_followed(tmp_path: Path) -> None:
    run, link = written(tmp_path / "run"), tmp_path / "link"
    link.symlink_to(run)
    tmp_path.chmod(0o1777)
    assert rebuild([str(link)], lambda line: None) == 0
    os.chown(link, 4711, 4711, follow_symlinks=False)
    with untouched(run), pytest.raises(UsageError, match="another user may have made"):
        rebuild([str(link)], print)


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind": "done", "exit_code": 7, "error": ' + b"[" * 100_000,
        b'{"kind": "done", "exit_code": 7, "error": "\xff"}',
        b'{"kind": "done", "exit_code": 7, "t": 1%s}' % (b"0" * 30),
        b'{"kind": "metrics", "step": 0, "loss": "nan", "grad_norm": "nan", "data_wait": 1e308}',
    ],
)
def test_an_event_that_is_damaged_is_passed_over(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "cpu0.events.jsonl").write_bytes(line)
    assert rebuild([str(written(tmp_path))], lambda line: None) == 0


def test_a_killed_run_of_minutes_names_the_one_of_three_that_differs(tmp_path: Path) -> None:
    """Read one file after the other, the first worker would seem to wait a minute for the others,
    and two of three would be compared."""
    names = ["CPU0", "CPU1", "CPU2"]
    groups = dict.fromkeys(names, "g")
    killed = written(tmp_path, workers=names, groups=groups, end=None, ended=None, duration_s=None)
    for name in names:
        steps = [
            Step(
                t=(1 + number * 40) * 10**9,
                step=number,
                loss=(1.5 if name == "CPU1" and number == 1 else 1.0).hex(),
                grad_norm=(1.0).hex(),
                lr=0.1,
                ms=40_000.0,
                tokens=1,
            )
            for number in range(5)
        ]
        (killed / f"{name.lower()}.events.jsonl").write_bytes(b"".join(map(encode, steps)))
    rebuild([str(killed)], [].append)
    rows = json.loads((killed / "report.json").read_text())["workers"]
    assert [row["name"] for row in rows if row["verdict"] == "SUSPECT"] == ["CPU1"]
