"""Files of others, damaged or odd, through the real commands:

    python -m benchmarks.odd_inputs [--cases 2000] [--commands 100] [--kind rows] [--seed 1]

Each case is one file of a good input, changed at random: bytes (cut, flipped, another encoding,
packed, a page in place of it), JSON (a value of another kind, a key lost or twice), or a file that
was odd from the start. Cases run in children forked from a warm process, some again as whole
commands. A case is wrong where a command

- ends with anything but 0 or 2 (75: nothing is left to compare);
- ends with 2 and not with one line `error: ...`, or with 0 and such a line;
- prints a traceback;
- takes 1 GiB, or 30 s and 50 ms for each answer to a prompt.

Wrong cases are printed with what repeats them (`--seed S --only KIND:NUMBER`); the exit code is 1.
"""

import argparse
import contextlib
import gzip
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.odd_changes import WORDS, Chance, damage

ROOT = Path(__file__).parents[1]
LONGEST_S, MOST_BYTES = 30.0, 1 << 30
ANSWER_S = 0.05
CODES = (0, 2, 75)
SMALL = (
    *("training.context_length=64", "training.batch_size=2", "training.use_amp=false"),
    *("data.num_proc=1", "data.cache_dir=cache"),
)
TRAINED = ("training.max_steps=1", "--device", "cpu")


class Case(NamedTuple):
    """A changed input, in a directory of its own."""

    module: str
    """What runs it in a child: `module.main(arguments)`."""
    arguments: list[str]
    command: list[str]
    """The same for `run.sh`."""
    change: str


# The kinds: each makes a good input in the current directory, changes it, and says what runs it.


def config(good: Path, chance: Chance) -> Case:
    names = ("settings.yaml", "settings.json", "settings.toml", "model/config.json")
    name = chance.choice(names)
    shutil.copytree(good / "config", ".", dirs_exist_ok=True)
    change = damage(Path(name), chance)
    given = ["model.geometry=model"] if name.startswith("model") else ["--config", name]
    arguments = ["config", "show", "--device", "cpu", *given]
    return Case("launcher.cli", arguments, arguments, change)


def tokenizer(good: Path, chance: Chance) -> Case:
    shutil.copytree(good / "tokenizer", "t")
    shutil.copy(good / "examples" / "chat.jsonl", "chat.jsonl")
    shutil.copy(good / "rows" / "text.txt", "text.txt")
    names = ("tokenizer.json",) * 3 + (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
    )
    change = damage(Path("t", chance.choice(names)), chance)
    asked = ["data.dataset=text.txt"]
    if chance.random() < 0.5:
        asked = ["data.dataset=chat.jsonl", "training.stage=prompt_target"]
    return _prepared([*asked, "data.tokenizer=t"], change)


def rows(good: Path, chance: Chance) -> Case:
    shutil.copytree(good / "rows", "rows")
    shutil.copytree(good / "examples", "examples")
    path = chance.choice([*sorted(Path("rows").iterdir()), *sorted(Path("examples").iterdir())])
    change = damage(path, chance)
    asked = [f"data.dataset={path}", f"data.tokenizer={good / 'tokenizer'}"]
    if chance.random() < 0.2:
        asked[0] = f"data.dataset={path.parent}"
    if path.parent.name == "examples":
        asked.append("training.stage=prompt_target")
    if chance.random() < 0.3:
        asked.append("data.validation=val=0.2")
    return _prepared(asked, change)


def dotenv(good: Path, chance: Chance) -> Case:
    """Read for the token of a hub that answers, and where a tokenizer comes from it."""
    Path(".env").write_bytes((good / "dotenv").read_bytes())
    shutil.copy(good / "rows" / "text.txt", "text.txt")
    change = damage(Path(".env"), chance)
    return _prepared(
        ["data.dataset=text.txt", "data.tokenizer=model", "model.model_path=acme/tiny"], change
    )


def _prepared(asked: list[str], change: str) -> Case:
    arguments = ["--preset", "cpu", *SMALL, *asked]
    return Case("prepare_dataset", arguments, ["prepare", *arguments], change)


def weights(good: Path, chance: Chance) -> Case:
    source = chance.choice(sorted((good / "weights").iterdir()))
    shutil.copytree(source, "w")
    shutil.copy(good / "rows" / "text.txt", "text.txt")
    names = [path.name for path in sorted(Path("w").iterdir()) if path.name != "tokenizer.json"]
    change = f"{source.name}: {damage(Path('w', chance.choice(names)), chance)}"
    place = "w/model.safetensors" if source.name == "one" and chance.random() < 0.3 else "w"
    arguments = ["--preset", "cpu", *SMALL, *TRAINED]
    arguments += ["model.geometry=w", f"model.init_from={place}", "data.dataset=text.txt"]
    one = ["--workers", "1", "launch.replay_s=0", "launch.history_file="]
    return Case("pretrain_main", arguments, [*arguments, *one], change)


def prompts(good: Path, chance: Chance) -> Case:
    shutil.copy(good / "prompts.txt", "prompts.txt")
    change = damage(Path("prompts.txt"), chance)
    arguments = [str(good / "weights" / "one"), "--prompts", "prompts.txt", "--max-tokens", "2"]
    return Case("model_check.generate.__main__", arguments, ["generate", *arguments], change)


KINDS: dict[str, Callable[[Path, Chance], Case]] = {
    "config": config,
    "tokenizer": tokenizer,
    "weights": weights,
    "rows": rows,
    "prompts": prompts,
    ".env": dotenv,
}


def make_good(good: Path) -> None:
    """Inputs of each kind that every command takes. In a process of its own: what forks must have
    no threads."""
    from tests.data.lab import write_tokenizer

    for name in ("config/model", "tokenizer", "rows", "examples"):
        (good / name).mkdir(parents=True)
    write_tokenizer(good / "tokenizer" / "tokenizer.json", vocab_size=300)
    _write_settings(good / "config")
    _write_declared(good / "tokenizer")
    _write_rows(good)
    _write_weights(good)
    (good / "dotenv").write_text(
        "# tokens\nexport HF_TOKEN='hf_abcdefghijklmnop'\nWANDB_API_KEY=\"x y\"\nOTHER = 1 # no\n"
    )
    (good / "prompts.txt").write_text(f"{WORDS}\nsecond\n\n  third \u4e2d\u6587\n")


def _write_settings(place: Path) -> None:
    settings = {
        "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "rope_theta": 5e5},
        "training": {
            "max_steps": 20,
            "learning_rate": 3e-4,
            "compile": False,
            "adam_beta2": 0.95,
        },
        "data": {"dataset": "embedded", "validation": "val=0.01"},
        "logging": {"wandb": "off", "log_interval": 5},
    }
    (place / "settings.json").write_text(json.dumps(settings))
    (place / "settings.yaml").write_text(
        "model:\n  num_layers: 2\n  rope_theta: 5.0e5\ntraining:\n  adam_beta2: 0.95\n"
        "  compile: no\ndata: {dataset: embedded, validation: val=0.01}\nlogging:\n  wandb: off\n"
    )
    (place / "settings.toml").write_text(
        "[model]\nnum_layers = 2\n[training]\nmax_steps = 20\nadam_beta2 = 0.95\n"
        '[data]\ndataset = "embedded"\n[logging]\nwandb = "off"\n'
    )


def _write_declared(place: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (place / "chat_template.jinja").write_text(template)
    declared = {"eos_token": "</s>", "bos_token": None, "chat_template": template}
    config = {**declared, "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')


def _write_weights(good: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    (good / "config" / "model" / "config.json").write_text(shape.to_json_string())
    for name, size in (("one", "1GB"), ("shards", "20KB")):
        model.save_pretrained(good / "weights" / name, max_shard_size=size)
    (good / "weights" / "older").mkdir()
    torch.save(model.state_dict(), good / "weights" / "older" / "pytorch_model.bin")
    (good / "weights" / "older" / "config.json").write_text(shape.to_json_string())
    for place in (good / "weights").iterdir():
        shutil.copytree(good / "tokenizer", place, dirs_exist_ok=True)


def _write_rows(good: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    place, examples = good / "rows", good / "examples"
    texts = [f"{number} {WORDS * 9}" for number in range(12)]
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    pairs = [{"prompt": f"{n} a", "completion": WORDS} for n in range(9)]
    chats = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]}
        for n in range(9)
    ]
    (place / "text.txt").write_text("\n\n".join(texts))
    (place / "text.jsonl").write_bytes(lines)
    (place / "packed.jsonl.gz").write_bytes(gzip.compress(lines))
    (place / "packed.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    (examples / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (examples / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    pa.parquet.write_table(pa.table({"text": texts, "n": list(range(12))}), place / "table.parquet")
    pa.parquet.write_table(pa.Table.from_pylist(chats), examples / "chat.parquet")


def warm() -> None:
    """Import what the commands import, and start no thread."""
    for name in (
        *("datasets", "dotenv", "filelock", "huggingface_hub", "jinja2", "json5", "launcher.cli"),
        *("model_check.data.sources.chat", "model_check.engine.assembly", "prepare_dataset"),
        *("model_check.generate.__main__", "pretrain_main", "pyarrow.parquet", "safetensors"),
        *("tiktoken", "tokenizers", "torch", "transformers", "yaml"),
    ):
        importlib.import_module(name)


class Ended(NamedTuple):
    code: int
    """Negative: by a signal."""
    output: str
    seconds: float
    memory: int
    """Bytes that were resident at most, in the largest of its processes."""


def run_child(case: Case, output: Path) -> Ended:
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for target in (1, 2):
                os.dup2(descriptor, target)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            signal.alarm(3 * int(LONGEST_S))
            module = sys.modules[case.module]
            code = module.main(case.arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(pid, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return _ended(status, used, output, began)


def run_command(case: Case, output: Path) -> Ended:
    began = time.monotonic()
    with output.open("wb") as file:
        child = subprocess.Popen(
            ["bash", str(ROOT / "run.sh"), *case.command],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    late = threading.Timer(3 * LONGEST_S, os.killpg, (child.pid, signal.SIGKILL))
    late.start()
    _, status, used = os.wait4(child.pid, 0)
    late.cancel()
    return _ended(status, used, output, began)


def _ended(status: int, used: resource.struct_rusage, output: Path, began: float) -> "Ended":
    code, took_s = os.waitstatus_to_exitcode(status), time.monotonic() - began
    return Ended(code, output.read_text(errors="replace"), took_s, used.ru_maxrss * 1024)


def wrong(ended: Ended) -> str | None:
    """What is wrong with an end; None: nothing."""
    errors = [line for line in ended.output.splitlines() if "error: " in line[:60]]
    allowed_s = LONGEST_S + ANSWER_S * ended.output.count('{"prompt": ')
    if ended.seconds >= allowed_s or ended.code == -signal.SIGALRM:
        return f"{ended.seconds:.0f} s"
    if "Traceback" in ended.output or "Fatal Python error" in ended.output:
        return "a traceback"
    if ended.code not in CODES:
        return f"exit code {ended.code}"
    if ended.memory > MOST_BYTES:
        return f"{ended.memory >> 20} MiB"
    if ended.code == 2 and len(errors) != 1:
        return f"{len(errors)} messages"
    if ended.code == 0 and errors:
        return "an error, and exit code 0"
    return None


class Runner:
    """A warm process and its places."""

    def __init__(self, good: Path, seed: int, place: Path) -> None:
        self.good, self.seed, self.place = good, seed, place
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest_s = 0.0
        self.most = 0

    def run(self, kind: str, number: int, *, whole: bool, show: bool = False) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        (self.place / "cwd").mkdir(parents=True)
        os.chdir(self.place / "cwd")
        case = KINDS[kind](self.good, Chance(self.seed, kind, number))
        ended = (run_command if whole else run_child)(case, self.place / "output")
        what = wrong(ended)
        if number == 0 and ended.code != 0:
            what = what or "the good input is refused"
        self.ends[f"{kind} {ended.code}"] += 1
        self.longest_s, self.most = max(self.longest_s, ended.seconds), max(self.most, ended.memory)
        if show:
            print(case, ended.code, f"{ended.seconds:.1f} s", ended.output, sep="\n")
        if what:
            how = "command" if whole else "child"
            self.wrong.append(f"{kind}:{number} ({how}; {case.change}): {what}")
            print(
                self.wrong[-1], "\n   ", "\n    ".join(ended.output.splitlines()[-6:]), flush=True
            )


@contextlib.contextmanager
def hub(good: Path) -> Iterator[str]:
    """A hub with a tokenizer, in a process of its own; its address."""
    code = (
        "import sys; from tests.data.lab import FakeHub, Path; hub = FakeHub();"
        "files = {p.name: p.read_bytes() for p in Path(sys.argv[1]).iterdir()};"
        "hub.repos['models/acme/tiny'] = files;"
        "print(hub.endpoint, flush=True); sys.stdin.read(); hub.stop()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(good / "tokenizer")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        yield child.stdout.readline().strip()


def part(names: argparse.Namespace, good: Path, index: int) -> int:
    """One of the warm processes, with its share of the cases."""
    warm()
    with tempfile.TemporaryDirectory(prefix="odd-inputs-") as scratch:
        runner = Runner(good, names.seed, Path(scratch) / "case")
        for kind in [names.kind] if names.kind else list(KINDS):
            for number in range(index, names.cases, names.processes):
                runner.run(kind, number, whole=False)
                if number < names.commands:
                    runner.run(kind, number, whole=True)
        os.chdir(ROOT)
    print(f"process {index}: {dict(sorted(runner.ends.items()))}", flush=True)
    most = f"{runner.longest_s:.1f} s, {runner.most >> 20} MiB"
    print(f"  at most {most}; {len(runner.wrong)} wrong", flush=True)
    return 1 if runner.wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000, help="of each kind, in children")
    parser.add_argument(
        "--commands", type=int, default=100, help="of these, also as whole commands"
    )
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one case, with its output")
    parser.add_argument("--whole", action="store_true", help="--only as a whole command")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--good", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    names = parser.parse_args()
    os.environ |= {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
    }
    if names.part is not None:
        return part(names, names.good, names.part)
    with tempfile.TemporaryDirectory(prefix="odd-inputs-good-") as scratch:
        good = Path(scratch)
        code = "import sys, benchmarks.odd_inputs as odd; odd.make_good(odd.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(good)], cwd=ROOT, check=True)
        with hub(good) as endpoint:
            os.environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(good / "hf")}
            return one(names, good) if names.only else all_parts(names.processes, good)


def one(names: argparse.Namespace, good: Path) -> int:
    warm()
    kind, _, number = names.only.rpartition(":")
    with tempfile.TemporaryDirectory() as place:
        runner = Runner(good, names.seed, Path(place) / "case")
        runner.run(kind, int(number), whole=names.whole, show=True)
        os.chdir(ROOT)
    return 1 if runner.wrong else 0


def all_parts(processes: int, good: Path) -> int:
    again = [sys.executable, "-m", "benchmarks.odd_inputs", *sys.argv[1:], "--good", str(good)]
    parts = [
        subprocess.Popen([*again, "--part", str(index)], cwd=ROOT) for index in range(processes)
    ]
    return max(child.wait() for child in parts)


if __name__ == "__main__":
    sys.exit(main())
