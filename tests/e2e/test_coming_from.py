"""docs/coming-from.md and docs/compare.md, held to their word: each command is typed, each name
held beside ours."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.arguments import parse_run
from model_check.config.fields import setting_of
from model_check.config.load import Loaded, load
from model_check.config.shape import geometry
from model_check.engine.console import Console
from model_check.engine.metrics import Meter
from model_check.engine.stop import StopSignal
from model_check.errors import ModelCheckError, NoGpuError
from model_check.events import EventSink
from model_check.utils.worker_env import WorkerEnv
from pretrain_main import Process, task_of
from tests.deadline import DEADLINE_S
from tests.e2e.conftest import ROOT
from tests.e2e.starts import Ended, Start, run_each
from tests.engine.conftest import make_run
from tests.nvml_fake.build import build, environment, fake_gpu, scenario

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
GUIDE = (ROOT / "docs" / "compare.md").read_text()
PROGRAMS = ("run.sh", "train_gpu.sh", "train_auto_gpu.sh", "pretrain_main.py", "prepare_dataset.py")
STARTS = ("bash run.sh", "./train_", "python3 ", "CUDA_VISIBLE_DEVICES=")
VERBS = (["doctor"], ["prepare"])
HEADS = ("command", "name", "key", "size", "file", "checkpoint field", "there", "paper")
"""What the left column of a table lists; a test below holds the rows of each."""
NO_COMMAND = ("not needed", "the same", "`tensorboard --logdir tensorboard_logs`")
"""How the answer to a command begins where nothing of ours is to be typed."""
WITH_SHELL = ('bash run.sh 2>&1 | grep "GPU2"', "./train_gpu.sh 3 --debug", "./train_auto_gpu.sh")
"""Those that a shell runs; tests/shell/test_start.py holds what the scripts make of arguments."""
MADE = (
    ".",
    "tensorboard_logs/",
    "processed_data/",
    "checkpoints/",
    "training.",
    "system.",
    "logging.",
    "baseline_",
)
GPUS_AND_NO_CUDA = 69
READY = (
    "prepared",
    "path/to/preprocessed/data",
    "path/to/existing/preprocessed/data",
    "path/to/data",
    "preprocessed_data",
)
"""Prepared directories that the pages name."""
Place = tuple[Path, dict[str, str]]
SMALL = (
    "num_layers=1 hidden_size=32 num_heads=2 model.vocab_size=null batch_size=1 context_length=32 "
    "grad_accum_nums=1 max_steps=1 dataset=texts tokenizer=bpe bpe_vocab_size=512 num_samples=8"
)


def spans(cell: str) -> list[str]:
    return [span.replace(r"\|", "|") for span in re.findall(r"`([^`]+)`", cell)]


def rows(head: str) -> list[tuple[str, str]]:
    """The cells of all tables of the page with that head."""
    found: list[tuple[str, str]] = []
    inside = False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells or cells[0] in (f"{head} there", head):
            inside = bool(cells)
        elif inside and set(line) - set("|- "):
            found.append((cells[0], cells[1]))
    return found


def commands() -> list[str]:
    typed = [
        line.partition("  #")[0]
        for block in re.findall(r"```bash\n(.*?)```", PAGE + GUIDE, re.S)
        for line in block.splitlines()
    ]
    typed += [span for _, right in rows("command") for span in spans(right)]
    return list(dict.fromkeys(c for c in typed if c.startswith(STARTS)))


def run(command: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env={**os.environ, "MODEL_CHECK_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1", **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A checkout with every file that the commands name, beside eight GPUs of a fake driver."""
    path = tmp_path_factory.mktemp("coming_from")
    for program in PROGRAMS:
        (path / program).symlink_to(ROOT / program)
    write_settings(path)
    for texts in ("texts", "raw_text_data", "path/to/raw/data"):
        (path / texts).mkdir(parents=True)
        (path / texts / "a.txt").write_text("some words of a text " * 500)
    (prepare,) = (c for c in commands() if c.startswith("python3 prepare_dataset.py --input"))
    done = run(prepare.replace("--num_workers 8", "--num_workers 1"), path)
    assert done.returncode == 0, done.stderr
    for ready in READY:
        shutil.copytree(path / "processed_data", path / ready)
    (path / "checkpoints").mkdir()
    make_run(
        path / "checkpoints",
        training__max_steps=1,
        training__save_last="true",
        training__context_length=2048,
    )()
    (path / "checkpoints" / "last.pt").rename(path / "checkpoints" / "checkpoint_step_50000.pt")
    file = path / "scenario"
    file.write_text(scenario([fake_gpu(index) for index in range(8)]))
    box = environment(build(path), file)
    return path, {**box, "MODEL_CHECK_LOCK_DIR": str(path / "locks")}


def write_settings(path: Path) -> None:
    custom = {
        "model": {
            "model_path": "meta-llama/Llama-3.1-8B-Instruct",
            "num_layers": 8,
            "attention_backend": "flash_attn",
        },
        "training": {
            "batch_size": 4,
            "learning_rate": 5e-6,
            "max_steps": 500,
            "context_length": 4096,
        },
        "system": {"device": "cuda", "seed": 42},
    }
    single = {
        "system": {"device": "cuda", "device_id": 0},
        "training": {"batch_size": 4, "grad_accum_nums": 8},
    }
    test = '{"training": {"batch_size": 8, // one GPU\n "grad_accum_nums": 4, "num_workers": 8}}'
    (path / "my.yaml").write_text("training: {max_steps: 20}\n")
    (path / "nanotron.yaml").write_text("general: {seed: 7}\nparallelism: {dp: 8}\n")
    (path / "custom_config.json").write_text(json.dumps(custom))
    (path / "single_gpu.json").write_text(json.dumps(single))
    for name in ("my_config.json", "test_config.json", "debug_config.json"):
        (path / name).write_text(test)
    (path / "scripts" / "config").mkdir(parents=True)
    for name in ("tiny_test_config.yaml", "custom_infini_config_gpu.yaml"):
        text = "training: {max_steps: 20, learning_rate: 1e-3, weight_decay: 0.01}\n"
        (path / "scripts" / "config" / name).write_text(text)


def test_the_commands_are_found() -> None:
    assert len(commands()) > 40


def test_each_table_is_held_by_a_test() -> None:
    lines = PAGE.splitlines()
    tables = [lines[number - 1] for number, line in enumerate(lines) if line.startswith("|---")]
    heads = {table.split("|")[1].strip().removesuffix(" there") for table in tables}
    assert heads == {*HEADS}


@pytest.mark.parametrize(("there", "ours"), rows("command"))
def test_each_command_has_one_that_is_typed(there: str, ours: str) -> None:
    assert spans(there)
    assert ours.startswith(NO_COMMAND) or {*spans(ours)} & {*commands(), "bash run.sh"}


def dry_runs() -> dict[str, list[str]]:
    """Each start of the launcher that the pages show -> its arguments."""
    scripts: dict[str, list[str]] = {
        "bash run.sh": [],
        "./train_gpu.sh": ["--gpu"],
        "./train_auto_gpu.sh": ["--gpus", "auto"],
    }
    found = {}
    for command in commands():
        words = command.partition(" 2>&1")[0].split()
        script = " ".join(words[: 1 + (words[0] == "bash")])
        rest = words[len(script.split()) :]
        if script in scripts and rest[:1] not in VERBS:
            found[command] = [*scripts[script], *rest, "--dry-run"]
    return found


@pytest.fixture(scope="module")
def ended(place: Place) -> dict[str, Ended]:
    """What each of these starts came to."""
    path, box = place
    starts = {command: Start(path, arguments) for command, arguments in dry_runs().items()}
    ours = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return run_each(starts, {**os.environ, **ours, **box})


@pytest.mark.parametrize("command", dry_runs())
def test_each_start_is_planned(ended: dict[str, Ended], command: str) -> None:
    code, shown = ended[command]
    assert code == 0, shown
    assert "GPU" in shown


@pytest.mark.parametrize("command", WITH_SHELL)
def test_a_shell_takes_what_is_typed(place: Place, command: str) -> None:
    path, box = place
    assert command in commands()
    program, _, rest = command.partition(" 2>&1")
    done = run(f"{program} --dry-run" + (f" 2>&1{rest}" if rest else ""), path, **box)
    assert done.returncode == 0, done.stderr
    assert "GPU" in done.stdout


@pytest.mark.parametrize("command", ["bash run.sh doctor", "bash run.sh doctor --quick"])
def test_each_look_at_the_machine_is_taken(place: Place, command: str) -> None:
    assert command in commands()
    done = run(command, place[0])
    assert done.returncode in (0, GPUS_AND_NO_CUDA), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_preparation_by_hand_is_taken_and_looked_after(place: Place) -> None:
    """The other one made what many commands train on."""
    for command, more in (
        ("python3 prepare_dataset.py", SMALL),
        ("bash run.sh prepare --verify", ""),
    ):
        assert command in commands()
        done = run(f"{command} {more}", place[0])
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [c for c in commands() if "pretrain_main.py" in c])
def test_each_training_by_hand_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(place[0])
    variables, _, arguments = command.partition("python3 pretrain_main.py")
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    argv = [*arguments.split(), *SMALL.split()]
    process = Process(WorkerEnv.from_environ(), EventSink(None), Console(), StopSignal(), Meter())
    try:
        task = task_of(argv, process)
    except NoGpuError:
        assert variables or "single_gpu" in command or "custom_config" in command
        return
    assert task.settings.training.batch_size == 1


def typed(text: str) -> Loaded:
    return load(parse_run(text.split(), {}).request, lambda: True)


def given(loaded: Loaded) -> set[str]:
    """The settings that the preset did not give."""
    plain = typed("").sources
    return {name for name, source in loaded.sources.items() if source != plain[name]}


@pytest.mark.parametrize(("there", "ours"), rows("name"))
def test_each_name_means_what_stands_beside_it(
    place: Place, monkeypatch: pytest.MonkeyPatch, there: str, ours: str
) -> None:
    monkeypatch.chdir(place[0])
    (left,) = spans(there)
    if ours.startswith("refused"):
        with pytest.raises(ModelCheckError) as caught:
            typed(left)
        assert caught.value.exit_code == 2
        assert spans(ours) or ours.removeprefix("refused: ") in str(caught.value)
        assert [span for span in spans(ours) if span not in str(caught.value)] == []
        return
    loaded = typed(left)
    if ours.startswith("changes nothing: "):
        (note,) = loaded.notes
        assert ours.removeprefix("changes nothing: ").partition(";")[0].replace("`", "") in note
        assert loaded.settings == typed("").settings
    else:
        wanted = typed(spans(ours)[0])
        assert loaded.settings == wanted.settings
        assert given(loaded) == given(wanted)
        assert given(loaded) or loaded.preset != typed("").preset
        assert [*map(about, loaded.notes)] == [*map(about, wanted.notes)]


def about(note: str) -> str:
    """A note without the name that was given."""
    return note[note.index("system.checkpoint_dir = ") :]


@pytest.mark.parametrize(("there", "ours"), rows("key"))
def test_each_key_is_that_setting(there: str, ours: str) -> None:
    assert setting_of(spans(there)[0]) == spans(ours)[0]


@pytest.mark.parametrize(("paper", "file"), rows("paper"))
def test_each_paper_is_named_where_it_is_used(paper: str, file: str) -> None:
    number = re.search(r"arXiv ([0-9.]+)", paper)
    assert number
    source = " ".join((ROOT / spans(file)[0]).read_text().split())
    assert f"arXiv {number[1]}" in source


SIZES = re.search(r"these have ([0-9, and]+) million parameters", PAGE)


@pytest.mark.parametrize("number", range(5))
def test_each_size_is_the_same_model(number: int) -> None:
    assert SIZES
    millions = int(re.findall("[0-9]+", SIZES[1])[number])
    for cell in rows("size")[number]:
        model = typed(f"{spans(cell)[0]} model.vocab_size=null").settings.model
        assert round(geometry(model, 32000).num_parameters / 1e6) == millions


@pytest.mark.parametrize(("there", "ours"), rows("file"))
def test_each_file_is_there(there: str, ours: str) -> None:
    if ours.startswith("none: "):
        return
    names = spans(ours) or (spans(there) if ours.startswith("the same") else [])
    for name in names:
        if name.startswith(MADE):
            continue
        assert (ROOT / name).exists(), name


def test_each_field_lies_in_a_checkpoint(place: Place) -> None:
    path, _ = place
    file = path / "checkpoints" / "checkpoint_step_50000.pt"
    checkpoint = torch.load(file, weights_only=True)
    named = [
        span
        for there, ours in rows("checkpoint field")
        for span in spans(there if ours.startswith("the same") else ours)
    ]
    assert len(named) > 10
    assert set(named) <= {*checkpoint}


@pytest.mark.parametrize(
    "word",
    [
        word
        for left, _ in rows("there")
        for word in spans(left)
        if ("=" in word or word.startswith("--")) and " " not in word and "..." not in word
    ],
)
def test_what_is_not_here_is_refused_by_name(word: str) -> None:
    if word.startswith("--node"):
        return  # an option of torchrun
    with pytest.raises(ModelCheckError) as caught:
        typed(word)
    assert caught.value.exit_code == 2
    assert "did you mean" not in str(caught.value)


def test_the_readme_names_the_pages() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(docs/coming-from.md)" in readme
    assert "(docs/compare.md)" in readme
