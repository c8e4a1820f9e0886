"""Two real users of one shared cache: `python -m tests.data.hostile ROLE PLACE UID SECONDS SEED`.

ROLE `victim` prepares data again and again, with other keys, and says of each preparation how it
ended: one JSON object a line. ROLE `attacker` lays links, pipes and directories wherever it can,
and says at its end how often which attack came off. Both start as root, import what they need and
become UID: neither needs to read this checkout afterwards.
"""

import contextlib
import io
import json
import os
import random
import select
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

NUM_TEXTS = 12
CACHE, PREPARED, PRIVATE, TEXTS = "cache", "prepared", "home/private", "texts"
_NUM_KINDS = 12
"""Of what the victim does: seven with a wish, the rest plain preparations."""
_MIN_PREPARATIONS = 100
"""However slow the machine is: each kind of attack then meets a preparation."""
_CALM_S = 0.005


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def victim(place: Path, uid: int, seconds: float, seed: int) -> None:
    _import_what_is_imported_late(place)
    os.environ["HOME"] = str(place / "home")
    os.chdir(place / "home")
    become(uid)
    choice = random.Random(seed)
    end, done = time.monotonic() + seconds, 0
    while time.monotonic() < end or done < _MIN_PREPARATIONS:
        done += 1
        arguments = _arguments(place, choice)
        print(json.dumps({"begins": arguments}), flush=True)
        code, said = _run(arguments)
        print(json.dumps({"arguments": arguments, "code": code, "said": said}), flush=True)


def _import_what_is_imported_late(place: Path) -> None:
    """By doing everything once in a place of root's own."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        (Path(scratch) / TEXTS).symlink_to(place / TEXTS)
        for kind in reversed(range(_NUM_KINDS)):
            code, said = _run(_arguments(Path(scratch), random.Random(1), kind))
            assert code == 0, said


def _arguments(place: Path, choice: random.Random, kind: int | None = None) -> list[str]:
    text = place / TEXTS / f"{choice.randrange(NUM_TEXTS)}.jsonl"
    return [
        *("--preset", "cpu", "data.num_proc=1", "training.context_length=16"),
        *("data.tokenizer=bpe", f"data.bpe_vocab_size={choice.choice([300, 310, 320])}"),
        f"data.cache_dir={place / CACHE}",
        f"data.dataset={text}",
        *_wish(place, choice.randrange(_NUM_KINDS) if kind is None else kind),
    ]


def _wish(place: Path, kind: int) -> list[str]:
    wishes: dict[int, list[str]] = {
        0: ["--list"],
        1: ["--verify"],
        2: ["--gc", "--older-than", "0"],
        3: ["data.force_preprocess=true"],
        4: ["data.verify=full"],
        5: [f"data.output_dir={place / PREPARED}", "data.force_preprocess=true"],
        6: ["data.validation=held=0.3"],
    }
    return wishes.get(kind, [])


def _run(arguments: list[str]) -> tuple[int, str]:
    """(exit code, all that was said): 1 and a traceback as Python ends a program."""
    import prepare_dataset

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            result = Path("result.json").absolute()
            result.unlink(missing_ok=True)
            code = prepare_dataset.main([*arguments, "--result", str(result)])
            if code == 0 and result.exists():
                code = _train(Path(json.loads(result.read_text())["path"]))
        except BaseException:
            traceback.print_exc(file=said)
            code = 1
    return code, said.getvalue()


def _train(path: Path) -> int:
    """All sequences, as a worker reads them, which ends with the same codes."""
    import numpy

    from model_check.data.read.token_cache import TokenCache
    from model_check.errors import ModelCheckError

    try:
        cache = TokenCache.open(path)
        windows = cache.gather(numpy.arange(cache.num_sequences))
    except ModelCheckError as error:
        print(f"error: {error}")
        return error.exit_code
    assert 0 <= windows.min() <= windows.max() < cache.vocab_size
    return 0


class Attacker:
    """Every attack takes a name that the victim may use, and mostly gives it back a moment later,
    so that the victim comes on to the next place."""

    def __init__(self, place: Path, seed: int) -> None:
        self.choice = random.Random(seed)
        self.private = place / PRIVATE
        self.roots = [place / CACHE, place / PREPARED / "dataset", place / PREPARED]
        self.tricks: dict[str, int] = Counter()

    def attack(self) -> None:
        root = self.choice.choice(self.roots)
        names = self._names(root)
        fresh = [path for path in names if path.name.startswith(".tmp-")]
        status = [
            path.with_name(path.name.replace(".lock", ".status.json"))
            for path in self._names(root / ".locks")
            if path.name.endswith(".lock")
        ]
        inner = [p for entry in (*names, *self._names(root / "tokens")) for p in self._names(entry)]
        places = {
            "staging": fresh,
            "directory": [root / name for name in (".locks", "tokens", ".memo", "dataset")],
            "status": status,
            "lock": self._names(root / ".locks"),
            "store": self._names(root / "tokens"),
            "entry": [path for path in names if "__" in path.name],
            "file": inner,
            "left": [root / f".tmp-{self._key(root)}-0badcafe-1-1-{self.choice.randrange(9)}"],
            "metadata": [root / "metadata.json", root / "tokenizer.json"],
        }
        kind = self.choice.choice(["staging"] * (3 if fresh else 0) + list(places))
        if places[kind]:
            self._take(kind, self.choice.choice(places[kind]))

    def _key(self, root: Path) -> str:
        locks = [path.name.removesuffix(".lock") for path in self._names(root / ".locks")]
        return self.choice.choice([*locks, "0123456789abcdef"])

    def _names(self, directory: Path) -> list[Path]:
        try:
            return [directory / name for name in os.listdir(directory)]
        except OSError:
            return []

    def _take(self, kind: str, path: Path) -> None:
        away = path.with_name(f"away-{self.choice.randrange(1 << 40):x}")
        with contextlib.suppress(OSError):
            os.rename(path, away)
        with contextlib.suppress(OSError):
            trick = self.choice.choice([self._link, self._link, self._pipe, self._directory])
            trick(path)
            if kind == "left":
                os.utime(path, (1, 1), follow_symlinks=False)
            self.tricks[f"{kind} {trick.__name__.strip('_')}"] += 1
        time.sleep(self.choice.expovariate(1 / _CALM_S))
        if kind in ("directory", "metadata") or self.choice.random() < 0.8:
            self._give_back(path, away)

    def _give_back(self, path: Path, away: Path) -> None:
        with contextlib.suppress(OSError):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                os.rename(path, path.with_name(f"mine-{self.choice.randrange(1 << 40):x}"))
        with contextlib.suppress(OSError):
            os.rename(away, path)
        time.sleep(self.choice.expovariate(1 / _CALM_S))

    def _link(self, path: Path) -> None:
        names = ("", "canary.txt", "manifest.json", "tokenizer.json", "tokens-00000.bin", "deep")
        os.symlink(self.private / self.choice.choice(names), path)

    def _pipe(self, path: Path) -> None:
        os.mkfifo(path, 0o666)

    def _directory(self, path: Path) -> None:
        os.mkdir(path)
        os.chmod(path, self.choice.choice([0o755, 0o777]))
        for name in ("manifest.json", "unfinished.json", "tokens-00000.bin"):
            self.choice.choice([self._link, self._pipe])(path / name)


def attacker(place: Path, uid: int, seconds: float, seed: int) -> None:
    become(uid)
    hostile = Attacker(place, seed)
    while not select.select([sys.stdin], [], [], 0)[0]:  # closed when the victim has ended
        hostile.attack()
    print(json.dumps(hostile.tricks), flush=True)


def main(role: str, place: str, uid: str, seconds: str, seed: str) -> None:
    {"victim": victim, "attacker": attacker}[role](Path(place), int(uid), float(seconds), int(seed))


if __name__ == "__main__":
    main(*sys.argv[1:])
