"""What is printed to a full disk, to nobody, or in an encoding that lacks its characters."""

import json
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from launcher.completion import options_of
from launcher.verbs import RUN, VERBS, Verb
from tests.deadline import DEADLINE_S
from tests.in_process import answer_of

ROOT = Path(__file__).parents[2]
PRINT = [
    ("config", "show", "--device", "cpu"),
    ("--dry-run", "--device", "cpu"),
    ("doctor", "--device", "cpu"),
    ("report", "--help"),
]


def start(
    cwd: Path, *arguments: str | bytes, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=stdout,
        stderr=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )


def answered(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """`start`, in this process, for what starts nothing."""
    done = answer_of(*arguments, cwd=cwd, env={**os.environ, **env})
    out, err = done.stdout.encode(), done.stderr.encode()
    return subprocess.CompletedProcess(arguments, done.returncode, out, err)


def nobody() -> int:
    """The writing end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("arguments", PRINT, ids=lambda arguments: arguments[0])
def test_a_full_disk_is_told_in_a_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = start(tmp_path, *arguments, stdout=full)
    os.close(full)
    assert done.returncode == 2
    assert done.stderr == b"[launcher] error: standard output: No space left on device\n"


@pytest.mark.parametrize("arguments", PRINT, ids=lambda arguments: arguments[0])
def test_a_reader_who_is_gone_ends_it_as_sigpipe_would(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    pipe = nobody()
    done = start(tmp_path, *arguments, stdout=pipe)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        ("prepare", "--gc"),
        ("watch", "run"),
        ("forensics", "--version"),
        ("train", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)
def test_programs_that_the_launcher_becomes_end_as_it_does(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """And what it draws with a library."""
    (tmp_path / ".cache/datasets").mkdir(parents=True)
    if "run" in arguments:
        assert start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "true").returncode == 0
    for stream, code in ((os.open("/dev/full", os.O_WRONLY), 2), (nobody(), 141)):
        done = start(tmp_path, *arguments, stdout=stream)
        os.close(stream)
        told = b"error: standard output: No space left on device\n" if code == 2 else b""
        assert (done.returncode, done.stderr.removeprefix(b"[launcher] ")) == (code, told)


def test_nothing_is_told_of_the_phase_of_a_command(tmp_path: Path) -> None:
    assert start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "true").returncode == 0
    assert b"waiting" not in start(tmp_path, "watch", "run").stdout


@pytest.mark.parametrize("verb", [(), ("prepare",), ("forensics",)])
def test_an_error_that_nobody_reads_keeps_its_exit_code(
    tmp_path: Path, verb: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "launcher", *verb, "--no-such-option"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for stream in (nobody(), os.open("/dev/full", os.O_WRONLY)):
        done = subprocess.run(command, cwd=tmp_path, env=env, stderr=stream, timeout=DEADLINE_S)
        os.close(stream)
        assert done.returncode == 2


def test_config_has_help_under_each_of_its_names(tmp_path: Path) -> None:
    asked = (("config", "--help"), ("help", "config"), ("config", "show", "-h"))
    shown = {answered(tmp_path, *arguments).stdout for arguments in asked}
    assert len(shown) == 1
    assert shown.pop().startswith(b"usage: run.sh config show ")


def test_a_command_of_any_bytes_runs_and_is_kept_readably(tmp_path: Path) -> None:
    done = start(tmp_path, "--device", "cpu", "--run-dir", b"r\xff", "--", "printf", b"%s", b"\xfe")
    assert done.returncode == 0, done.stdout + done.stderr
    directory = tmp_path / os.fsdecode(b"r\xff")
    assert (directory / "cpu0.log").read_bytes() == b"\xfe"
    for name in ("run.json", "report.json"):
        document = json.loads((directory / name).read_bytes())
        assert document.get("run", document)["command"][-1] == "\\udcfe"
    assert b"\\udcfe" in (directory / "report.html").read_bytes()
    again = start(tmp_path, "report", b"r\xff")
    assert again.returncode == 0, again.stderr


def test_what_the_terminals_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    assert start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "true").returncode == 0
    done = start(tmp_path, "report", "run", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"\\u2500" in done.stdout


def test_a_report_that_cannot_be_written_is_told_all_the_same(tmp_path: Path) -> None:
    start(tmp_path, "--device", "cpu", "--run-dir", "run", "--", "sh", "-c", "exit 7")
    (tmp_path / "run" / "report.json").unlink()
    (tmp_path / "run" / "report.json").mkdir()
    done = start(tmp_path, "report", "run")
    assert done.returncode == 7, done.stderr
    assert b"[launcher] no report: run/report.json: cannot write" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(b"(exit code 7)")


@pytest.mark.parametrize(
    "verb", [("--dry-run",), ("doctor",), ("history",), ("prepare",), ("--", "true")]
)
def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, verb: tuple[str, ...]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'rmdir "$PWD"; exec "{sys.executable}" -P -m launcher "$@"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *verb],
        cwd=gone,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"[launcher] error: the working directory is gone (No such file")


def test_verbs_become_the_programs_that_they_name(tmp_path: Path) -> None:
    helped = start(tmp_path, "prepare", "--help")
    assert (helped.returncode, helped.stderr) == (0, b"")
    assert b"--verify" in helped.stdout
    refused = start(tmp_path, "prepare", "--no-such-option")
    assert refused.returncode == 2
    assert refused.stderr.startswith(b"error: --no-such-option: no such option")
    missing = start(tmp_path, "export", "nowhere.pt", "out")
    assert missing.returncode == 2, missing.stderr
    assert b"nowhere.pt" in missing.stderr


@pytest.mark.parametrize(
    "verb", [RUN, *(verb for verb in VERBS.values() if verb.name != "help")], ids=lambda v: v.name
)
def test_every_help_has_examples_fits_80_columns_and_lists_what_tab_offers(
    tmp_path: Path, verb: Verb
) -> None:
    ask = start if verb.program or verb.name == "replay" else answered
    done = ask(tmp_path, *verb.name.split(), "--help")
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert lines[0].startswith("usage: ")
    examples = list(takewhile(bool, lines[lines.index("examples:") + 1 :]))
    assert all(line.startswith(("  bash run.sh ", "  ./train_")) for line in examples), examples
    assert max(map(len, lines)) <= 80
    listed = [line[2:].partition("  ")[0] for line in lines if line.startswith("  -")]
    assert {*re.findall("--[a-z-]+", " ".join(listed))} == {*options_of(verb)}


@pytest.mark.parametrize("verb", ["", "doctor"])
def test_help_is_a_verb_too(tmp_path: Path, verb: str) -> None:
    asked = (["help", *verb.split()], [*verb.split(), "--help"])
    helped, meant = (answered(tmp_path, *each) for each in asked)
    assert (helped.returncode, helped.stdout) == (0, meant.stdout)


def test_gpus_that_are_not_there_are_refused_with_a_next_step(tmp_path: Path) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    none = answered(tmp_path, "--gpus", "auto", "--dry-run", **hidden)
    assert none.returncode == 69
    assert (
        b"; --device cpu, without --gpus, trains on the CPU, `bash run.sh doctor` looks"
        in none.stderr
    )
    (tmp_path / "single_gpu.json").write_text('{"system": {"device": "cuda"}}')
    for asked in (("--device", "cuda"), ("system.device=cuda",), ("--config", "single_gpu.json")):
        none = answered(tmp_path, *asked, "--dry-run", **hidden)
        assert none.returncode == 69
        shown = "" if "=" in asked[0] else f"{asked[0 if asked[1] == 'cuda' else 1]}: "
        assert none.stderr.startswith(f"[launcher] error: {shown}system.device = cuda: ".encode())
    malformed = answered(tmp_path, "--gpus", "0,a", "--dry-run", **hidden)
    assert malformed.returncode == 2
    assert b"'a' is not a GPU" in malformed.stderr


def test_two_names_of_one_setting_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = answered(tmp_path, "max_steps=5", "max_iters=6", "--dry-run")
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "training.max_steps and training.max_iters are the same setting" in line


def test_the_model_of_the_framework_document_is_printed(tmp_path: Path) -> None:
    sizes = ("--hidden_size", "768", "--num_layers", "12", "--num_heads", "12")
    done = answered(tmp_path, *sizes, "--vocab_size", "32000", "--verbose", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert b"[launcher] model: 134,105,856 parameters; a worker takes" in done.stdout
    assert b"[launcher] --verbose changes nothing: the logs hold every line\n" in done.stdout


def test_a_named_flash_attention_falls_back_in_the_plan_alone_with_one_line(tmp_path: Path) -> None:
    done = answered(tmp_path, "--dry-run", "attention_backend=flash_attn", "--device", "cpu")
    (line,) = [line for line in done.stdout.decode().splitlines() if "flash" in line]
    assert line == "[launcher] flash_attn falls back to sdpa: flash_attn needs a CUDA GPU, not cpu"


def test_more_cpu_workers_than_any_machine_has_are_refused(tmp_path: Path) -> None:
    done = start(tmp_path, "--workers", "99999999", "--device", "cpu", "--", "true")
    assert done.returncode == 2
    assert b"launch.workers = '99999999'" in done.stderr


def test_a_setting_of_any_bytes_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"data": {"dataset": "\\ud800"}}')
    for arguments in ((b"data.dataset=/tmp/\xff",), ("--config", "half.json")):
        done = start(tmp_path, "--device", "cpu", *arguments)
        assert done.returncode == 2
        assert done.stderr.count(b"\n") == 1
        assert b"not valid UTF-8" in done.stderr


def test_the_trainers_own_help_fits_80_columns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "pretrain_main.py"), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert [line for line in shown.splitlines() if len(line) > 80] == []
