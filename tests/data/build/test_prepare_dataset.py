"""The command line of prepare_dataset.py."""

import json
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest

from model_check.data.sources.midi import NOTE, write_notes
from tests.data.lab import ROOT, Lab, build_here, start_builder
from tests.deadline import DEADLINE_S


def test_the_result_file_says_what_was_built_and_then_found(lab: Lab) -> None:
    text, result = lab.text(), lab.dir / "data.json"
    hits = []
    for _ in range(2):
        code, output = build_here(lab.cache, text, "--result", str(result))
        assert code == 0, output
        hits.append(json.loads(result.read_text()).pop("hit"))
    found = json.loads(result.read_text())
    assert hits == [False, True]
    assert found["schema"] == 1
    assert found["dataset"] == "notes.txt"
    assert found["path"] == str(lab.views()[0])
    assert found["vocab_size"] <= 300
    assert found["num_sequences"] == (found["num_tokens"] - 1) // 16


def test_a_hit_imports_nothing_heavy(lab: Lab) -> None:
    text = lab.text()
    lab.prepare(text)
    code = (
        "import sys; from pathlib import Path; from tests.data.lab import settings_for;"
        "from model_check.data.build.prepare import prepare;"
        f"assert prepare(settings_for(Path({str(lab.cache)!r}), {str(text)!r}), print).hit;"
        "heavy = 'torch numpy tokenizers datasets huggingface_hub urllib.request'.split();"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_who_stops_reading_what_it_says_ends_it_without_a_traceback(lab: Lab) -> None:
    lab.cache.mkdir()
    builder = start_builder(lab.cache, "embedded", "--list")
    assert builder.process.stdout is not None
    builder.process.stdout.close()
    assert builder.process.wait(DEADLINE_S) == 128 + signal.SIGPIPE


def test_a_name_that_the_terminal_cannot_show_is_escaped(lab: Lab) -> None:
    text = lab.text(name="\u5b57.txt")
    environ = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    code, output = start_builder(lab.cache, text, environ=environ).finish()
    assert code == 0, output
    assert r"\u5b57.txt" in output


def test_a_misspelt_setting_is_one_line_and_exit_code_2(lab: Lab) -> None:
    code, output = build_here(lab.cache, lab.text(), "data.num_sample=3")
    assert code == 2
    assert output.startswith("error: ")
    assert "did you mean data.num_samples" in output
    assert output.count("\n") == 1


def test_a_text_too_short_for_one_sequence_is_refused(lab: Lab) -> None:
    code, output = build_here(lab.cache, lab.text("tiny"), "training.context_length=64")
    assert code == 2
    assert "are too few for one sequence of training.context_length = 64" in output


def test_a_result_that_cannot_be_written_is_said(lab: Lab) -> None:
    blocked = lab.text("a file", "blocked") / "data.json"
    code, output = build_here(lab.cache, lab.text(), "--result", str(blocked))
    assert code == 2
    assert f"error: --result {blocked}: cannot be written" in output


@pytest.mark.midi
def test_a_folder_of_midi_is_named_by_one_option(lab: Lab) -> None:
    rows = [(8 * n, 4, 40 + n, 79) for n in range(40)]
    (lab.dir / "music").mkdir()
    write_notes(lab.dir / "music" / "a.mid", np.array(rows, NOTE))
    lab.text("a text beside it", "music/readme.txt")
    arguments = ["--preset=cpu", f"data.cache_dir={lab.cache}", "training.context_length=16"]
    program = [sys.executable, str(ROOT / "prepare_dataset.py"), *arguments]
    command = [*program, "--midi", str(lab.dir / "music")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "with tokenizer midi" in done.stdout


def test_a_folder_without_midi_is_refused(lab: Lab) -> None:
    lab.text(name="texts/a.txt")
    for place in (lab.dir / "texts", lab.dir / "gone.mid"):
        code, output = build_here(lab.cache, "auto", "--midi", str(place))
        assert code == 2
        assert output == f"error: --midi {place}: no MIDI file (.mid, .midi) there\n"


def test_closed_streams_are_no_error(lab: Lab) -> None:
    """Nor does what a library writes end in a file that took the number of one."""
    text, result = lab.text(), lab.dir / "data.json"
    arguments = [f"data.cache_dir={lab.cache}", f"data.dataset={text}", "data.tokenizer=bpe"]
    arguments += ["data.bpe_vocab_size=300", "training.context_length=16", f"--result={result}"]
    command = shlex.join([sys.executable, str(ROOT / "prepare_dataset.py"), *arguments])
    for closed in (">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(f"{command} {closed}", shell=True, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(result.read_text())["schema"] == 1
