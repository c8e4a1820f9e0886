"""Files of others, damaged or odd, through the real commands:

    python -m benchmarks.odd_inputs [--cases 2000] [--commands 100] [--kind rows] [--seed 1]

Each case is one file of a good input, changed at random: bytes (cut, flipped, another encoding,
packed, a page in place of it), JSON (a value of another kind, a key lost or twice), or a file that
was odd from the start. Cases run in children forked from a warm process, some again as whole
commands. A case is wrong where a command

- ends with anything but 0 or 2 (75: nothing is left to compare);
- ends with 2 and not with one line `error: ...`, or with 0 and such a line;
- prints a traceback;
- takes 30 s or 1 GiB.

Wrong cases are printed with what repeats them (`--seed S --only KIND:NUMBER`); the exit code is 1.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LONGEST_S, MOST_BYTES = 30.0, 1 << 30
CODES = (0, 2, 75)
WORDS = "the model checks every GPU of a box and says which one cannot train "
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>403</body></html>"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
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


Change = Callable[[bytes, random.Random], bytes]


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content) + 1)]


def flip(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 30))):
        if changed:
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def insert(content: bytes, chance: random.Random) -> bytes:
    odd = (
        *(
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            "\u2028\u2029\x85".encode(),
            b"\x1b[2J",
            b"\r",
            b"\t",
        ),
        *(
            "\u200b\u202e".encode(),
            b"\xed\xa0\x80",
            b"\xc3",
            b'"',
            b"{",
            b"]]]",
            b"#",
            b"=",
            b"\n---\n",
        ),
        *(b"\n", b"'", b"!!python/object", b"&a [*a]", b"\\u0000", b"\\ud800", b"%s", b"{{ 1/0 }}"),
    )
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice(odd) * chance.choice((1, 1, 2, 50)) + content[at:]


def repeat(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content) + 1)
    end = min(len(content), begin + chance.choice((1, 10, 1000)))
    return content[:end] + content[begin:end] * chance.choice((1, 5, 1000)) + content[end:]


def drop(content: bytes, chance: random.Random) -> bytes:
    begin = chance.randrange(len(content) + 1)
    return content[:begin] + content[begin + chance.choice((1, 8, 200)) :]


def encode(content: bytes, chance: random.Random) -> bytes:
    text = content.decode(errors="replace")
    name = chance.choice(
        ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis")
    )
    return text.encode(name, errors="replace")


def end_lines(content: bytes, chance: random.Random) -> bytes:
    return content.replace(b"\n", chance.choice((b"\r\n", b"\r", "\u2028".encode(), b"\n\n", b"")))


def pack(content: bytes, chance: random.Random) -> bytes:
    import io
    import tarfile
    import zipfile

    into = io.BytesIO()
    match chance.randrange(3):
        case 0:
            return gzip.compress(content)
        case 1:
            with zipfile.ZipFile(into, "w") as archive:
                archive.writestr("x", content)
        case _:
            with tarfile.open(fileobj=into, mode="w") as tar:
                tar.addfile(tarfile.TarInfo("x"))
    return into.getvalue()


def replace(content: bytes, chance: random.Random) -> bytes:
    whole = (
        *(
            b"",
            b" ",
            b"\n",
            b"null",
            b"[]",
            b"{}",
            b"0",
            b'"text"',
            b"true",
            PAGE,
            POINTER,
            b"\0" * 5000,
        ),
        *(
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"\x80\x04\x95",
            b"\x7fELF" + bytes(100),
            b"PK\x03\x04",
        ),
        *(
            b"\x89PNG\r\n\x1a\n",
            b"%PDF-1.7",
            b"a: &a [*a]",
            b"- " * 5000,
            b"x" * 300_000,
            b"%YAML 1.1\n",
        ),
        json.dumps(
            [json.loads(content)] if content[:1] == b"{" and content[-1:] == b"}" else 1
        ).encode()
        if _is_json(content)
        else b"NaN",
    )
    return chance.choice(whole)


def change_json(content: bytes, chance: random.Random) -> bytes:
    """A value, a key, or the form of JSON; of rows, one row."""
    lines = content.splitlines(keepends=True)
    if not _is_json(content):
        if not lines or not _is_json(lines[0]):
            return flip(content, chance)
        at = chance.randrange(len(lines))
        if not _is_json(lines[at]):
            return flip(content, chance)
        lines[at] = change_json(lines[at].strip(), chance) + b"\n"
        return b"".join(lines)
    document = json.loads(content)
    form = chance.randrange(8)
    if form == 0:
        return json.dumps(document, indent=2).encode()
    if form == 1:
        return json.dumps([document]).encode()
    for _ in range(chance.choice((1, 1, 2))):
        places = list(_places(document))
        if places:
            where, key = chance.choice(places)
            _change(where, key, chance)
    return json.dumps(document, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def _places(value: Any, most: int = 3000) -> Iterator[tuple[Any, Any]]:
    waiting = [value]
    while waiting and most:
        inner = waiting.pop()
        keys: Sequence[Any] = ()
        if isinstance(inner, dict):
            keys = list(inner)
        elif isinstance(inner, list):
            keys = range(len(inner))
        for key in keys:
            most -= 1
            yield inner, key
            waiting.append(inner[key])


def _change(where: Any, key: Any, chance: random.Random) -> None:
    deep: Any = "x"
    for _ in range(chance.choice((3, 500))):
        deep = [deep]
    values = (
        *(
            None,
            True,
            False,
            0,
            -1,
            1,
            2,
            3.5,
            -0.0,
            1e308,
            float("nan"),
            float("inf"),
            2**31,
            2**63,
            2**70,
        ),
        *(
            "",
            " ",
            "0",
            "-1",
            "true",
            "null",
            "auto",
            "\ud800",
            "\0",
            "\u202e",
            "x" * 100_000,
            "/dev/null",
        ),
        *(
            [],
            {},
            [None],
            ["a", 1],
            {"a": 1},
            [[]],
            deep,
            "~",
            "../../etc/passwd",
            "1e3",
            "0x10",
            "1_000",
        ),
    )
    match chance.randrange(4):
        case 0:
            del where[key]
        case 1 if isinstance(where, dict):
            where[chance.choice(("", "x", str(key).upper(), f"{key} ", "\0", "__class__"))] = where[
                key
            ]
        case _:
            where[key] = chance.choice(values)


CHANGES: tuple[Change, ...] = (
    *(cut, flip, insert, repeat, drop, encode, end_lines, pack, replace),
    *(change_json, change_json, change_json, change_json),
)


class Chance(random.Random):
    """Of one case. The first of a kind is the good input as it is."""

    def __init__(self, seed: int, kind: str, number: int) -> None:
        super().__init__(f"{seed} {kind} {number}")
        self.is_good = number == 0


def damage(path: Path, chance: Chance) -> str:
    """Change a file; what was done."""
    if chance.is_good:
        return "nothing"
    if chance.random() < 0.05:
        path.unlink()
        match kind := chance.choice(
            ("directory", "dangling", "circle", "/dev/null", "/dev/zero", "gone")
        ):
            case "directory":
                path.mkdir()
            case "dangling":
                path.symlink_to("nowhere")
            case "circle":
                path.symlink_to(path)
            case "gone":
                pass
            case device:
                path.symlink_to(device)
        return f"{path.name}: {kind}"
    names = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        change = chance.choice(CHANGES)
        path.write_bytes(change(path.read_bytes(), chance))
        names.append(change.__name__)
    return f"{path.name}: {', '.join(names)}"


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
    import pyarrow as pa
    import pyarrow.parquet
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.data.lab import write_tokenizer

    for name in ("config/model", "tokenizer", "rows", "examples"):
        (good / name).mkdir(parents=True)
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
    (good / "config" / "settings.json").write_text(json.dumps(settings))
    (good / "config" / "settings.yaml").write_text(
        "model:\n  num_layers: 2\n  rope_theta: 5.0e5\ntraining:\n  adam_beta2: 0.95\n"
        "  compile: no\ndata: {dataset: embedded, validation: val=0.01}\nlogging:\n  wandb: off\n"
    )
    (good / "config" / "settings.toml").write_text(
        "[model]\nnum_layers = 2\n[training]\nmax_steps = 20\nadam_beta2 = 0.95\n"
        '[data]\ndataset = "embedded"\n[logging]\nwandb = "off"\n'
    )
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    write_tokenizer(good / "tokenizer" / "tokenizer.json", vocab_size=300)
    (good / "tokenizer" / "chat_template.jinja").write_text(template)
    declared = {"eos_token": "</s>", "bos_token": None, "chat_template": template}
    (good / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({**declared, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (good / "tokenizer" / "special_tokens_map.json").write_text(
        '{"eos_token": {"content": "</s>"}}'
    )
    _write_rows(good, pa)
    (good / "dotenv").write_text(
        "# tokens\nexport HF_TOKEN='hf_abcdefghijklmnop'\nWANDB_API_KEY=\"x y\"\nOTHER = 1 # no\n"
    )
    (good / "prompts.txt").write_text(f"{WORDS}\nsecond\n\n  third \u4e2d\u6587\n")
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


def _write_rows(good: Path, pa: Any) -> None:
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


def warm(good: Path) -> None:
    """Import what the commands import, and start no thread."""
    import importlib

    for name in (
        *("datasets", "huggingface_hub", "pyarrow.parquet", "torch", "tokenizers", "transformers"),
        *(
            "filelock",
            "json5",
            "yaml",
            "dotenv",
            "tiktoken",
            "safetensors",
            "jinja2",
            "launcher.cli",
        ),
        *("launcher.options", "prepare_dataset", "pretrain_main", "model_check.generate.__main__"),
        *("model_check.engine.assembly", "model_check.data.sources.chat", "launcher.config_show"),
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


class Ended(NamedTuple):
    code: int
    """Negative: by a signal."""
    output: str
    seconds: float
    memory: int
    """Bytes that were resident at most; 0: not measured."""


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
            signal.alarm(int(LONGEST_S))
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
    took_s = time.monotonic() - began
    text = output.read_text(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), text, took_s, used.ru_maxrss * 1024)


def run_command(case: Case, output: Path) -> Ended:
    began = time.monotonic()
    with output.open("wb") as file:
        child = subprocess.Popen(
            ["bash", str(ROOT / "run.sh"), *case.command],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(LONGEST_S)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = output.read_text(errors="replace")
    return Ended(child.returncode, text, time.monotonic() - began, 0)


def wrong(ended: Ended) -> str | None:
    """What is wrong with an end; None: nothing."""
    errors = [line for line in ended.output.splitlines() if "error: " in line[:60]]
    if ended.seconds >= LONGEST_S or ended.code == -signal.SIGALRM:
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


def serve(good: Path) -> str:
    """A hub with a tokenizer, in a process that ends with this one; its address."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.data.lab import FakeHub\n"
        "hub = FakeHub()\n"
        "files = {p.name: p.read_bytes() for p in Path(sys.argv[1]).iterdir()}\n"
        "hub.repos['models/acme/tiny'] = files\n"
        "print(hub.endpoint, flush=True)\nsys.stdin.read()\nhub.stop()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(good / "tokenizer")],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    globals()["_hub"] = child
    return child.stdout.readline().strip()


def part(names: argparse.Namespace, good: Path, index: int) -> int:
    """One of the warm processes, with its share of the cases."""
    warm(good)
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
        os.environ |= {
            "HF_ENDPOINT": serve(good),
            "HF_HOME": str(good / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        if names.only:
            warm(good)
            kind, _, number = names.only.rpartition(":")
            with tempfile.TemporaryDirectory() as place:
                Runner(good, names.seed, Path(place) / "case").run(
                    kind, int(number), whole=names.whole, show=True
                )
                os.chdir(ROOT)
            return 0
        again = [sys.executable, "-m", "benchmarks.odd_inputs", *sys.argv[1:], "--good", str(good)]
        with ThreadPoolExecutor(names.processes) as pool:
            ends = pool.map(
                lambda index: subprocess.run([*again, "--part", str(index)], cwd=ROOT).returncode,
                range(names.processes),
            )
            return max(ends)


if __name__ == "__main__":
    sys.exit(main())
