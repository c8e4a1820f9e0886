"""The real `pretrain_main.py`: exit codes, signals, evidence, the last word. In
a process of its own where the process is the point."""

import os
import pickle
import pstats
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from model_check.engine.checkpoint import read_checkpoint, tokenizer_of
from model_check.engine.console import Console
from model_check.engine.metrics import Meter
from model_check.engine.stop import StopSignal
from model_check.events import Done, Evidence, NonFinite, Phase, Step
from model_check.utils.worker_env import WorkerEnv
from pretrain_main import Process, ending_of
from tests.deadline import DEADLINE_S
from tests.engine.conftest import Kept, Trained, Worker, at_first, signalled

Start = Callable[..., Worker]
Train = Callable[..., Trained]
WQ = "layers.0.attention.wq.weight"


def last_word(worker: Worker | Trained) -> Done:
    last = worker.events[-1]
    assert isinstance(last, Done), worker.output
    return last


def bits(worker: Worker | Trained) -> list[tuple[str, str]]:
    return [(e.loss, e.grad_norm) for e in worker.events if isinstance(e, Step)]


def wait_for_a_step(worker: Worker) -> None:
    assert any(isinstance(event, Step) for event in worker.listen()), worker.output


def test_two_workers_give_the_same_bits_and_unprefixed_lines(train: Train) -> None:
    both = [
        train(MODEL_CHECK_WORKER=name, MODEL_CHECK_NUM_WORKERS="2") for name in ("CPU0", "CPU1")
    ]
    for worker in both:
        assert worker.exit_code == 0, worker.output
        phases = [e.name for e in worker.events if isinstance(e, Phase)]
        assert phases == ["import", "build", "train"]
        done = last_word(worker)
        assert (done.exit_code, done.error, done.steps) == (0, None, 4)
        assert (done.loss_first, done.loss_last) == (bits(worker)[0][0], bits(worker)[-1][0])
        assert done.tokens_per_s is not None
        assert done.tokens_per_s > 0
        assert done.peak_memory_bytes is not None
        assert done.peak_memory_bytes > 2**26
        steps = [line for line in worker.output.splitlines() if line.startswith("Step [")]
        assert len(steps) == 4, worker.output
    assert len(bits(both[0])) == 4
    assert bits(both[0]) == bits(both[1])


def test_alone_under_a_profiler_it_prefixes_its_own_lines(start: Start, tmp_path: Path) -> None:
    worker = start(prefix=("-m", "cProfile", "-o", "run.prof"), GPU_RANK="3")
    worker.finish()
    lines = worker.output.splitlines()
    assert all(line.startswith("[CPU0] ") for line in lines), worker.output
    assert [line.split(" | ")[0] for line in lines if "| Loss" in line] == [
        f"[CPU0] Step [{n}/4]" for n in range(4)
    ]
    assert last_word(worker).exit_code == 0
    profile = pstats.Stats(str(tmp_path / "run.prof")).stats  # type: ignore[attr-defined]
    called = {name for _, _, name in profile}
    assert "train_step" in called
    files = {file for file, _, _ in profile}
    for slow in ("torch/_dynamo/", "torch/_inductor/", "/transformers/", "/datasets/"):
        assert not [file for file in files if slow in file], "a slow start"


def test_nan_ends_with_exit_code_20_the_block_and_the_evidence(
    train: Train, tmp_path: Path
) -> None:
    worker = train(
        f"debug.drill=nan@2:GPU1:{WQ}",
        "debug.dump_tensors=true",
        MODEL_CHECK_WORKER="GPU1",
        MODEL_CHECK_NUM_WORKERS="2",
    )
    assert worker.exit_code == 20, worker.output
    assert len(bits(worker)) == 2
    directory = Path(".checkpoints") / "gpu1"
    files = [directory / "nan_grad_step_2.pt", directory / "debug" / "nan_debug_step_2.pkl"]
    block = worker.output[worker.output.index("=" * 80) :].splitlines()
    assert block[1] == "NaN GRADIENT DETECTED [GPU 1]"
    assert block[3] == "Step: 2"
    assert block[5] == "Gradient Norm: nan"
    assert block[10] == "⚠️  Gradients with NaN (1 layers):"
    assert block[11] == f"  • {WQ} (shape: torch.Size([32, 32]))"
    assert block[13:18] == [
        "    NaN count: 1/1024",
        "",
        "Total layers with NaN gradients: 1",
        f"Affected layers: ['{WQ}']",
        "=" * 40,
    ]
    dossier = directory / "dossier" / "manifest.json"
    assert block[18] == ""
    born = "Born in layers.0.attention.wq (backward: gradient of its weight): 1 NaN of 1,024 values"
    assert block[19].startswith(f"{born}, first at [0, 0], others ")
    assert block[19].endswith("; it did not come again")
    assert block[20:23] == [
        f"Dossier saved: {dossier}",
        f"Checkpoint saved: {files[0]}",
        f"Debug tensors saved: {files[1]}",
    ]
    assert block[23:] == [f"error: {last_word(worker).error}"]
    assert [e.names for e in worker.events if isinstance(e, NonFinite)] == [[WQ], [WQ]]
    evidence = [e.path for e in worker.events if isinstance(e, Evidence)]
    assert sorted(evidence) == sorted(str(tmp_path / path) for path in (*files, dossier))
    dump = pickle.loads((tmp_path / files[1]).read_bytes())
    assert [n for n, g in dump["gradients"].items() if not np.isfinite(g).all()] == [WQ]
    weights = torch.load(tmp_path / files[0], weights_only=True)["model"]
    for name, value in dump["parameters"].items():
        assert np.array_equal(value, weights[name].numpy()), name
        assert np.isfinite(value).all(), name


def test_inf_is_caught_alone_too(train: Train, tmp_path: Path) -> None:
    worker = train("debug.drill=inf@1")
    assert worker.exit_code == 20, worker.output
    assert "[CPU0] Inf GRADIENT DETECTED [CPU 0]\n" in worker.output
    assert "[CPU0] Checkpoint saved: .checkpoints/nan_grad_step_1.pt\n" in worker.output
    assert not (tmp_path / ".checkpoints" / "debug").exists()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_ends_it_cleanly(train: Train, signum: int, code: int) -> None:
    worker = train("--max-steps", "100000", on_event=signalled(Step, signum))
    assert worker.exit_code == code, worker.output
    done = last_word(worker)
    assert (done.exit_code, done.steps) == (code, len(bits(worker)))
    assert "Traceback" not in worker.output
    assert worker.output.splitlines()[-1] == f"[CPU0] {done.error}"


LOSES_A_SIGNAL = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(1000):
                    pass
            except BaseException:  # as C code does that imports something optional
                pass
            raise ImportError("cannot load module more than once per process")

sys.meta_path.insert(0, Finder())
"""


def test_a_signal_that_an_import_lost_still_ends_it_cleanly(start: Start, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOSES_A_SIGNAL)
    worker = start(PYTHONPATH=str(tmp_path))
    assert worker.finish() == 143, worker.output
    assert "Traceback" not in worker.output
    assert last_word(worker).error == "stopped by SIGTERM after 0 steps"


def test_a_worker_that_hangs_is_ended_at_once_by_a_second_signal(start: Start) -> None:
    worker = start("debug.drill=hang@1")
    wait_for_a_step(worker)
    worker.process.send_signal(signal.SIGTERM)
    worker.process.send_signal(signal.SIGINT)
    assert worker.finish() in (130, 143), worker.output
    assert last_word(worker).steps == 1
    assert "Traceback" not in worker.output


def test_an_unexpected_error_is_told_with_its_traceback_and_a_checkpoint(train: Train) -> None:
    raising = train("debug.drill=raise@1")
    assert raising.exit_code == 1
    assert "[CPU0] Traceback" in raising.output
    assert last_word(raising).error == "RuntimeError: drill: raised at step 1"
    assert re.search(
        r"^\[CPU0\] Checkpoint saved: \.checkpoints/.*error\.pt$", raising.output, re.M
    )


def test_drills_of_the_process_end_it_as_they_say(start: Start) -> None:
    leaving, killed = (start(f"debug.drill={kind}@1") for kind in ("exit7", "kill"))
    assert (leaving.finish(), killed.finish()) == (7, -signal.SIGKILL)
    for silent in (leaving, killed):
        assert not isinstance(silent.events[-1], Done), "it said something after its end"


@pytest.mark.parametrize(
    ("environ", "prefix"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, "[GPU3] "),
        ({"GPU_RANK": "7"}, "[GPU7] "),
        ({}, ""),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8f3a"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"GPU_RANK": "3", "MODEL_CHECK_WORKER": "GPU3"}, ""),
    ],
    ids=str,
)
def test_an_error_before_the_device_is_known_names_the_gpu_of_the_environment(
    train: Train, environ: dict[str, str], prefix: str
) -> None:
    worker = train("--nonsense", **environ)
    assert worker.exit_code == 2
    assert worker.output == f"{prefix}error: --nonsense: no such option (--help lists them)\n"


def test_a_checkpoint_carries_the_tokenizer_of_its_data(train: Train, tmp_path: Path) -> None:
    worker = train("training.save_last=true", "training.max_steps=1")
    assert worker.exit_code == 0, worker.output
    path = tmp_path / ".checkpoints" / "last.pt"
    content = tokenizer_of(read_checkpoint(path), path, 1 << 20)
    assert content is not None
    assert Tokenizer.from_str(content.decode()).get_vocab_size() == 512


def test_a_reader_that_leaves_ends_it_without_a_traceback(start: Start) -> None:
    worker = start("--max-steps", "100000")
    wait_for_a_step(worker)
    assert worker.process.stdout is not None
    worker.process.stdout.close()
    for _ in worker.listen():
        pass
    assert worker.process.wait(timeout=DEADLINE_S) == 141
    assert last_word(worker).exit_code == 141


def test_a_notice_that_comes_while_it_starts_kills_nobody_and_is_not_lost(start: Start) -> None:
    worker = start("training.save_on_signal=true", prefix=("-X", "importtime"))
    assert worker.process.stdout is not None
    assert any(line.endswith(" msgspec\n") for line in worker.process.stdout)
    worker.process.send_signal(signal.SIGUSR1)
    output = worker.process.stdout.read()  # before the events, which are few
    assert worker.finish() == 0, output
    assert last_word(worker).early == "ended early by SIGUSR1: 1 of 4 steps, saved"
    assert len(bits(worker)) == 1


def test_a_notice_that_nobody_asked_for_ends_nothing(train: Train) -> None:
    worker = train(on_event=signalled(Phase, signal.SIGUSR1))
    assert worker.exit_code == 0, worker.output
    assert last_word(worker).early is None
    assert len(bits(worker)) == 4


def test_it_trains_without_standard_streams(start: Start) -> None:
    worker = start(redirect="<&- >&- 2>&-")
    assert worker.finish() == 0, worker.output
    assert len(bits(worker)) == 4
    assert last_word(worker).error is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("training.max_step=3", "no such setting; did you mean training.max_steps?"),
        ("debug.drill=nan@9", "step 9 is never reached"),
        ("--max-stesp=3", "no such option; did you mean --max-steps"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(train: Train, argument: str, message: str) -> None:
    worker = train(argument)
    assert worker.exit_code == 2
    (line,) = worker.output.splitlines()
    assert message in line
    assert message in (last_word(worker).error or "")


def test_torch_is_not_imported_for_a_mistake(start: Start) -> None:
    worker = start("debug.drill=nan@9", prefix=("-X", "importtime"))
    assert worker.finish() == 2
    assert "step 9 is never reached" in worker.output
    assert "| torch\n" not in worker.output


def test_no_more_threads_is_one_line_that_names_the_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    process = Process(WorkerEnv.from_environ({}), Kept(), Console(), StopSignal(), Meter())
    ending = ending_of(RuntimeError("can't start new thread"), process)
    assert ending.exit_code == 1
    told = capsys.readouterr().err.splitlines()
    assert told == [f"error: {ending.error}"]
    assert "(ulimit -u)" in told[0]


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, "MASTER_PORT = ''"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "29500"}, "RANK = ''"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_PORT": "29500"}, "RANK = 2: WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE = 'two'"),
    ],
)
def test_a_place_among_ranks_that_is_none_is_one_line_and_exit_code_2(
    train: Train, place: dict[str, str], wrong: str
) -> None:
    worker = train(**place)
    assert worker.exit_code == 2
    assert f"[CPU0] error: {wrong}" in worker.output.splitlines()[-1]
    assert "Traceback" not in worker.output


@pytest.mark.parametrize("place", [{"WORLD_SIZE": "1"}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_alone_needs_no_address(train: Train, place: dict[str, str]) -> None:
    assert train("--max-steps=1", **place).exit_code == 0


def test_a_gpu_that_is_not_there_is_told_with_exit_code_69(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker = train("system.device=cuda", CUDA_VISIBLE_DEVICES="")
    assert worker.exit_code == 69, worker.output
    assert "sees no GPU" in worker.output.splitlines()[-1]


@pytest.mark.parametrize("name", ["tokens-00000.bin", "documents.bin"])
def test_a_file_of_the_cache_that_is_cut_off_in_mid_run_is_named(
    train: Train, tmp_path: Path, name: str
) -> None:
    def cut_off(_: socket.socket) -> None:
        (file,) = (tmp_path / "own").glob(f"tokens/*/{name}")
        os.truncate(file, 0)

    worker = train(
        *("--max-steps=100000", "data.document_masking=true"),
        on_event=at_first(Step, cut_off),
        DATASET_CACHE_DIR=str(tmp_path / "own"),
    )
    (file,) = (tmp_path / "own").glob(f"tokens/*/{name}")
    assert worker.exit_code == 2, worker.output
    assert f"{file}: was cut off while in use: 0 of" in worker.output
    assert "Traceback" not in worker.output


SIGNAL_AT_EACH_LINE = """
import os, signal, sys
import pretrain_main
from model_check.errors import BrokenStateError

def train(task, process):
    raise BrokenStateError("a weight changed")

pretrain_main.task_of = lambda argv, process: None
pretrain_main.train = train
OURS = {"heeded", "deferred", "__enter__", "__exit__", "cause_of", "ending_of", "last_word"}

def end_with_a_signal_at(line):
    failed, left = False, line
    def trace(frame, event, arg):
        nonlocal failed, left
        failed |= frame.f_code is train.__code__
        failed &= frame.f_code.co_name != "emit" or frame.f_back.f_code.co_name != "main"
        if frame.f_code.co_name not in OURS:
            return None
        if event in ("call", "line") and failed:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return trace
    sys.settrace(trace)
    try:
        return pretrain_main.main([]), left
    finally:
        sys.settrace(None)

line, left = 0, 0
while left <= 0:
    line += 1
    code, left = end_with_a_signal_at(line)
    print(code, flush=True)
"""


def test_no_signal_at_any_line_after_a_failure_hides_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_EACH_LINE],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = done.stdout.split()
    assert len(codes) > 10
    assert set(codes) == {"21"}
    assert done.stderr.splitlines() == ["error: a weight changed"] * len(codes)
