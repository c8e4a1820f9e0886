"""A golden file is written whole; one that is damaged, or hostile, is one message."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from launcher import run_dir
from launcher.report.golden import read_golden, write_golden
from launcher.report.rebuild import rebuild
from launcher.verdict.golden import Golden
from launcher.verdict.record import RunEnd
from model_check.errors import StorageError, UsageError
from model_check.events import Done, Finished, Phase, Step, Vectors, encode
from tests.launcher.report.test_rebuild import written
from tests.launcher.verdict.test_golden import DETAIL, golden, other, step
from tests.launcher.verdict.test_judge import RECORD, ended

NAMES = ("GPU0", "GPU1", "GPU2")
EVIL = "\x1b[2J\n[launcher] PASS: forged <script>"


def finished(
    directory: Path, names: tuple[str, ...] = NAMES, steps: int = 8, **changes: Any
) -> Path:
    """A run that passed. `changes`: in run.json."""
    record = replace(
        RECORD,
        steps=steps,
        workers=list(names),
        groups=dict.fromkeys(names, "H100 80 GiB"),
        end=RunEnd(exit_code=0),
        ended=tuple(map(ended, names)),
        healths={},
    )
    directory.mkdir(exist_ok=True)
    run_dir.write(directory / "run.json", msgspec.to_builtins(replace(record, **changes)))
    for name in names:
        tell(directory, name, [step(number) for number in range(steps)])
    return directory


def tell(directory: Path, name: str, steps: list[Step]) -> None:
    last = Vectors(step=len(steps) - 1, fp={"weights": {"a": "aa"}})
    done = Done(exit_code=0, steps=len(steps), tokens_per_s=1000.0)
    events = [Phase(name="build", detail=DETAIL), *steps, last, Finished(), done]
    (directory / f"{name.lower()}.events.jsonl").write_bytes(b"".join(map(encode, events)))


def report(*argv: str | Path) -> tuple[int, list[str]]:
    said: list[str] = []
    return rebuild(list(map(str, argv)), said.append), said


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "golden.json"
    code, said = report(finished(tmp_path / "run"), "--write-golden", path)
    assert code == 0
    assert said[-1] == f"[launcher] golden file {path}: 8 steps of GPU0, GPU1 and GPU2"
    found = read_golden(path)
    assert [each.step for each in found.steps] == list(range(8))
    assert found.last == Vectors(step=7, fp={"weights": {"a": "aa"}})
    assert (found.step_ms, found.tokens_per_s) == (100.0, 1000.0)
    assert found.source.forced is None
    assert found.key["torch"] == "2.13.0"
    code, said = report(tmp_path / "run", "--golden", path)
    assert code == 0
    assert "[launcher] golden: all 3: equal in 8 of 8 steps" in said


@pytest.mark.parametrize(
    ("changes", "lack"),
    [
        ({"drill": "nan@2"}, r"it is a drill \(nan@2\)"),
        ({"names": ("GPU0", "GPU1")}, "GPU0 and GPU1 agreed, and 3 are needed"),
        ({"names": ("GPU0",)}, "one worker, and 3 are needed"),
        ({"end": RunEnd(exit_code=7)}, r"its verdict is INCONCLUSIVE \(exit code 7\)"),
    ],
)
def test_what_is_missing_is_told_and_kept_where_it_is_forced(
    tmp_path: Path, changes: dict[str, Any], lack: str
) -> None:
    run, path = finished(tmp_path / "run", **changes), tmp_path / "golden.json"
    with pytest.raises(UsageError, match=f"{lack}.*Run 3 workers or more.*--force"):
        report(run, "--write-golden", path)
    assert not path.exists()
    assert not (run / "report.json").exists()
    report(run, "--write-golden", path, "--force")
    forced = read_golden(path).source.forced
    assert forced is not None
    assert forced.startswith(lack.replace("\\", ""))


def test_steps_in_which_they_differ_are_left_out(tmp_path: Path) -> None:
    run, path = finished(tmp_path / "run"), tmp_path / "golden.json"
    tell(run, "GPU1", [*(step(number) for number in range(5)), other(5)])
    with pytest.raises(UsageError, match="5 of 8 steps were compared"):
        report(run, "--write-golden", path)
    report(run, "--write-golden", path, "--force")
    assert len(read_golden(path).steps) == 5
    assert read_golden(path).last is None


def test_events_with_a_torn_line_are_one_message(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    for name in NAMES:
        tell(run, name, [step(0), step(1), step(3), step(4)])
    with pytest.raises(UsageError, match="its steps do not follow each other"):
        report(run, "--write-golden", tmp_path / "golden.json", "--force")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"steps": None}, "a command of your own ran there"),
        ({"not_compared": "system.deterministic is false"}, "system.deterministic is false"),
    ],
)
def test_bits_that_prove_nothing_are_never_written(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    run = finished(tmp_path / "run")
    document = json.loads((run / "run.json").read_text()) | changes
    (run / "run.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"no golden file can be made of this run: {why}"):
        report(run, "--write-golden", tmp_path / "golden.json", "--force")


def test_an_older_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    path.mkdir()
    with pytest.raises(StorageError, match=r"golden.json: cannot write the golden file"):
        write_golden(path, golden())
    assert os.listdir(tmp_path) == ["golden.json"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--golden", "g"), "give one run directory"),
        (("r", "--golden", "g", "--write-golden", "h"), "give one of them"),
        (("r", "s", "--write-golden", "g"), "takes one run directory"),
        (("r", "--force"), "--force goes with --write-golden"),
        (("r", "--gold", "g"), "--gold: no such option; did you mean --golden"),
    ],
)
def test_what_does_not_go_together_is_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rebuild(argv, print)


def as_file(path: Path, **changes: Any) -> Path:
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(golden()) | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, r"a golden file of another version \(schema 2\)"),
        ({"schema": "1"}, "damaged, or no golden file"),
        ({"steps": []}, "damaged, or no golden file"),
        ({"steps": [step(0), step(2)]}, "its steps do not follow each other"),
        ({"steps": [step(0), step(0)]}, "its steps do not follow each other"),
        ({"steps": [{"kind": "step", "step": -1}]}, "damaged"),
        ({"step_ms": 0}, r"damaged.*`\$.step_ms`"),
        ({"key": {"torch": []}}, r"damaged.*`\$.key"),
        ({"source": {}}, r"damaged.*`\$.source`"),
        ({"last": {"kind": "vectors", "step": 1, "fp": {"weights": {"a": EVIL}}}}, "damaged"),
    ],
)
def test_a_damaged_file_is_one_message(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = as_file(tmp_path / "golden.json", **changes)
    with pytest.raises(UsageError, match=message) as caught:
        read_golden(path)
    assert str(path) in str(caught.value)


def test_what_is_no_file_is_one_message(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text('{"schema": ' + "[" * 100_000)
    (tmp_path / "bytes").write_bytes(b'{"schema": 1, "key": "\xff"}')
    for name in ("pipe", "deep", "bytes", "absent", "."):
        with pytest.raises(UsageError, match="no golden file"):
            read_golden(tmp_path / name)


def test_a_hostile_file_forges_nothing(tmp_path: Path) -> None:
    hostile = replace(
        golden(),
        key={EVIL: EVIL, "torch": EVIL},
        source=replace(
            golden().source, host=EVIL, run_dir=EVIL, workers=[EVIL], versions={EVIL: EVIL}
        ),
    )
    run, path = finished(tmp_path / "run"), tmp_path / "golden.json"
    path.write_bytes(msgspec.json.encode(hostile))
    code, said = report(run, "--golden", path)
    assert code == 75
    assert not any("\n" in line or "\x1b" in line for line in said), said
    assert not any(line.startswith("[launcher] PASS") for line in said)
    assert "<script" not in (run / "report.html").read_text()
    assert "[2J" in (run / "report.html").read_text()


def test_a_report_that_names_other_workers_is_one_message(tmp_path: Path) -> None:
    found = {"file": "g", "source": golden().source, "workers": []}
    run = written(tmp_path, golden=msgspec.to_builtins(found))
    with pytest.raises(UsageError, match="`golden` names other workers"):
        rebuild([str(run)], print)


def test_a_file_masks_secrets(tmp_path: Path) -> None:
    path = tmp_path / "golden.json"
    source = replace(golden().source, run_dir="/r/WANDB_API_KEY=abcdef123456")
    write_golden(path, replace(golden(), source=source))
    assert "abcdef123456" not in path.read_text()
    assert isinstance(read_golden(path), Golden)
