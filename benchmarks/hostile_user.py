"""Another user attacks all that we share: `python -m benchmarks.hostile_user [--minutes M]`.

As root. The victim, a user of its own, prepares data in a shared cache, collects and verifies it,
trains two workers on the CPU, reserves fake GPUs, makes reports and asks `doctor`, with the real
commands. Three processes of another user, of the victim's group, take every name that the victim
uses or will use: in the cache, a prepared directory, the directories of runs, checkpoints and GPU
locks, and the working directory. Printed are what was tried, how the victim's commands ended, and
each violation, with which the exit code is 1:

- a private file of the victim's was opened, changed or deleted, or its content lies elsewhere;
- the attacker can open a file of a run, or a checkpoint that was written under umask 077;
- code of the attacker's ran as the victim;
- a command ended with a code that is not documented, with a traceback, or not at all;
- the victim trained on other tokens than a private cache holds, although everything that it read
  was its own and whole. (Tokens of another user are allowed where a line named the user. What was
  replaced between this line and the reading is counted: see SECURITY.md.)

Locks are held for a second at most: to lock for ever is allowed to whoever shares a lock.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.hostile_attacker import (
    ATTACKER,
    GROUP,
    NUM_TEXTS,
    VICTIM,
    Attacker,
    Place,
    become,
    make_place,
    names_in,
)
from model_check.data.read.token_cache import TokenCache
from model_check.errors import ModelCheckError
from tests.data.canary import SECRET, untouched
from tests.nvml_fake.build import environment

ROOT = Path(__file__).parents[1]
NUM_ATTACKERS = 3
VOCABULARIES = (300, 320)
DEADLINE_S = 180.0
"""A limit for hangs alone."""
TOLD = "who can put any tokens there"
DOCUMENTED = (0, 2)
RUN_CODES = (*DOCUMENTED, 69)


@dataclass
class Ledger:
    """What the victim's commands did, and what went wrong."""

    seed: int
    ends: Counter[tuple[str, int]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of what did not end with 0: the error line without names."""
    tokens: Counter[str] = field(default_factory=Counter)
    """How the tokens that were read compare with the reference."""
    violations: list[str] = field(default_factory=list)

    def end(self, what: str, done: "Done", documented: Sequence[int]) -> None:
        self.ends[what, done.code] += 1
        if done.code not in documented:
            self.violate(what, done, f"exit code {done.code}")
        if "Traceback" in done.said or "fault of Model Check" in done.said:
            self.violate(what, done, "a traceback")
        if SECRET in done.said:
            self.violate(what, done, "private text on the terminal")
        if done.code == 2 and not re.search(r"error: |FAIL", done.said):
            self.violate(what, done, "no reason is told")
        if done.code != 0:
            self.reasons[f"{what}: {_reason(done.said)}"] += 1

    def end_all(self) -> None:
        """Each kind of command must have succeeded at least once."""
        for what in {what for what, _ in self.ends}:
            if not self.ends[what, 0]:
                self.violations.append(f"seed {self.seed}, {what}: never succeeded")

    def violate(self, what: str, done: "Done", why: str) -> None:
        command = " ".join(done.command)
        self.violations.append(f"seed {self.seed}, {what}: {why}: {command}\n{done.said[-3000:]}")


def _reason(said: str) -> str:
    errors = [line for line in said.splitlines() if "error: " in line or " FAIL" in line]
    text = (errors or said.splitlines() or ["nothing said"])[-1]
    return re.sub(r"/\S+|[0-9a-f]{6,}|\d+", "*", text)[:110]


@dataclass(frozen=True)
class Done:
    """A command of the victim's that ended."""

    command: Sequence[str]
    code: int
    said: str


class Victim:
    """Real commands, one after the other, each a process of the victim's."""

    def __init__(self, place: Place, ledger: Ledger, seed: int, name: str) -> None:
        self.place = place
        self.ledger = ledger
        self.dice = random.Random(seed)
        self._home = place / "home"
        self._result = self._home / f"{name}.json"
        self._runs: list[Path] = []

    def run(self, *command: str, umask: int = 0o022, cwd: str = "work", **environ: str) -> Done:
        """One that hangs is killed, and a violation."""
        own = {"HOME": str(self._home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        own |= {"PATH": os.environ["PATH"], "MODEL_CHECK_LOCK_DIR": str(self.place / "locks")}
        own["MODEL_CHECK_HISTORY_FILE"] = ""
        process = subprocess.Popen(
            command,
            cwd=self.place / cwd,
            env=own | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            user=VICTIM,
            group=VICTIM,
            extra_groups=[GROUP],
            umask=umask,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            done = Done(command, 124, said)
            self.ledger.violate("any", done, f"no end within {DEADLINE_S:g} s")
            return done
        return Done(command, process.returncode, said)

    def python(self, *arguments: str, **more: object) -> Done:
        return self.run(sys.executable, "-P", *arguments, **more)  # type: ignore[arg-type]

    # Data

    def data_settings(self, cache: Path, text: int, vocabulary: int) -> list[str]:
        return [
            *("--config", str(self.place / "tiny.json"), "data.tokenizer=bpe"),
            *(f"data.dataset={self.place / 'texts'}/{text}.jsonl", "data.num_samples=null"),
            *(f"data.bpe_vocab_size={vocabulary}", f"data.cache_dir={cache}", "data.num_proc=1"),
        ]

    def prepare(self) -> None:
        text, vocabulary = self.dice.randrange(NUM_TEXTS), self.dice.choice(VOCABULARIES)
        what, wish = self.dice.choice(self._wishes())
        settings = self.data_settings(self.place / "cache", text, vocabulary)
        program = str(ROOT / "prepare_dataset.py")
        with suppress(FileNotFoundError):
            self._result.unlink()
        umask = self.dice.choice([0o022, 0o002, 0o077])
        done = self.python(program, *settings, *wish, "--result", str(self._result), umask=umask)
        self.ledger.end(what, done, DOCUMENTED)
        if done.code == 0 and self._result.exists():
            self._compare(done, text, vocabulary, verify="data.verify=full" in wish)

    def _wishes(self) -> list[tuple[str, list[str]]]:
        output = [f"data.output_dir={self.place / 'prepared'}", "data.force_preprocess=true"]
        return [
            *[("prepare", [])] * 4,
            *[("prepare, verify=full", ["data.verify=full"])] * 4,
            ("prepare by force", ["data.force_preprocess=true"]),
            ("prepare a directory", output),
            ("--list", ["--list"]),
            ("--verify", ["--verify"]),
            ("--gc", ["--gc", "--older-than", "0"]),
        ]

    def _compare(self, prepared: Done, text: int, vocabulary: int, *, verify: bool) -> None:
        path = json.loads(self._result.read_text())["path"]
        read = self.python("-m", "benchmarks.hostile_user", "--read", path, cwd="home")
        self.ledger.end("read tokens", read, DOCUMENTED)
        if read.code != 0:
            return
        found = json.loads(read.said)
        if found["tokens"] == REFERENCE[text, vocabulary]:
            verdict = "right"
        elif TOLD in prepared.said:
            verdict = "other tokens, told whose"
        elif set(found["owners"]) - {VICTIM, 0} or not found["whole"]:
            verdict = "replaced after they were taken" if verify else "replaced, only sizes checked"
        else:
            verdict = "WRONG"
            self.ledger.violate("prepare", prepared, f"wrong tokens of our own: {found}")
        self.ledger.tokens[verdict] += 1

    # Runs

    def train(self) -> None:
        text, vocabulary = self.dice.randrange(NUM_TEXTS), self.dice.choice(VOCABULARIES)
        checkpoints = self.dice.choice(["home/checkpoints", "tmp/checkpoints", "work/.checkpoints"])
        scalars = f"logging.tensorboard_dir={self.place / checkpoints / 'scalars'}"
        wishes = [[scalars], ["data.verify=full"], []]
        if checkpoints.startswith("home"):  # elsewhere others decide what is read
            wishes.append(["--resume", "auto"])
        root = self.dice.choice(self.place.roots_of_runs)
        settings = [
            *self.data_settings(self.place / "cache", text, vocabulary),
            *("launch.workers=2", "training.save_interval=2", "training.save_last=true"),
            *(f"system.checkpoint_dir={self.place / checkpoints}", f"logging.log_dir={root}"),
            *self.dice.choice(wishes),
        ]
        umask = self.dice.choice([0o022, 0o077]) if checkpoints.startswith("home") else 0o077
        if self.dice.random() < 0.3:
            done = self.run("bash", str(ROOT / "run.sh"), *settings, umask=umask)
        else:
            done = self.python("-m", "launcher", *settings, umask=umask)
        self.ledger.end("train", done, RUN_CODES)
        directory = self._look_into_run(done)
        if done.code == 0 and directory is not None and "--resume" not in settings:
            self._compare_losses(done, directory, text, vocabulary)

    def _compare_losses(self, done: Done, directory: Path, text: int, vocabulary: int) -> None:
        """Of a run: whose files its workers read can no longer be seen."""
        if losses(directory) == LOSSES[text, vocabulary]:
            verdict = "right"
        else:
            verdict = "told whose" if TOLD in done.said else "replaced after they were taken"
        self.ledger.tokens[f"trained on: {verdict}"] += 1

    def reserve(self) -> None:
        env = environment(self.place.root, self.place / "gpus")
        fake = {name: env[name] for name in ("LD_LIBRARY_PATH", "NVML_FAKE_SCENARIO")}
        root = self.dice.choice(self.place.roots_of_runs)
        gpus = self.dice.choice(["0,1", "1", "auto:1", "auto:2"])
        done = self.python(
            *("-m", "launcher", "--gpus", gpus, f"logging.log_dir={root}", "--", "true"), **fake
        )
        self.ledger.end("reserve GPUs", done, RUN_CODES)
        self._look_into_run(done)

    def _look_into_run(self, done: Done) -> Path | None:
        found = re.search(r"run directory (\S+)", done.said)
        if found is None:
            return None
        directory = Path(found[1])
        self._runs = [*self._runs[-20:], directory]
        for path in (directory, *directory.rglob("*")) if directory.exists() else ():
            status = path.lstat()
            if status.st_uid == ATTACKER and directory.lstat().st_uid == VICTIM:
                self.ledger.violate("train", done, f"the attacker's file in a run: {path}")
        if _is_open_directory_of_victim(directory):
            self.ledger.violate("train", done, f"{directory} is open to others")
        return directory

    def report(self) -> None:
        """On a run of its own, or whatever lies beside them."""
        planted = [p for root in self.place.roots_of_runs for p in names_in(root)]
        if directories := self._runs + planted:
            directory = self.dice.choice(directories)
            done = self.python("-m", "launcher", "report", str(directory))
            self.ledger.end("report", done, (*RUN_CODES, done.code))

    def doctor(self) -> None:
        cache = f"data.cache_dir={self.place / 'cache'}"
        done = self.python("-m", "launcher", "doctor", cache)
        self.ledger.end("doctor", done, RUN_CODES)

    def act_until(self, end: float, actions: Sequence[Callable[[], None]]) -> None:
        while time.monotonic() < end:
            self.dice.choice(actions)()


def _is_open_directory_of_victim(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return (
            status.st_uid == VICTIM
            and stat.S_ISDIR(status.st_mode)
            and bool(status.st_mode & 0o077)
        )
    return False


REFERENCE: dict[tuple[int, int], str] = {}
LOSSES: dict[tuple[int, int], set[float]] = {}


def take_reference(place: Place) -> None:
    """Hashes of the tokens that a private cache holds, and the losses of a training on them."""

    def take(choice: tuple[int, int]) -> None:
        victim = Victim(place, Ledger(0), 0, "reference-{}-{}".format(*choice))
        settings = victim.data_settings(place / "home/cache", *choice)
        result = place / "home" / "reference-{}-{}.json".format(*choice)
        program = str(ROOT / "prepare_dataset.py")
        done = victim.python(program, *settings, "--result", str(result), cwd="home")
        assert done.code == 0, f"uid {VICTIM} cannot run {sys.executable}: {done.said}"
        path = json.loads(result.read_text())["path"]
        read = victim.python("-m", "benchmarks.hostile_user", "--read", path, cwd="home")
        assert read.code == 0, read.said
        REFERENCE[choice] = json.loads(read.said)["tokens"]
        run = place / "home" / "run-{}-{}".format(*choice)
        where = ("--run-dir", str(run), "launch.workers=1")
        done = victim.python("-m", "launcher", *settings, *where, cwd="home")
        assert done.code == 0, done.said
        LOSSES[choice] = losses(run)

    choices = [(text, size) for text in range(NUM_TEXTS) for size in VOCABULARIES]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take, choices))


def losses(run: Path) -> set[float]:
    """The last one of each worker."""
    report = json.loads((run / "report.json").read_text())
    return {worker["loss_last"] for worker in report["workers"]}


def read_tokens(path: Path) -> int:
    """Of all sequences, as a worker reads them: a hash, whose files they lay in, and whether these
    were what the manifest says."""
    import numpy as np

    try:
        cache = TokenCache.open(path, "full")
        windows = cache.gather(np.arange(cache.num_sequences))
    except ModelCheckError as error:
        print(f"error: {error}")
        return error.exit_code
    store = cache.store
    shards = {
        name: shard for name, shard in zip(store.manifest.shard_names(), store._shards, strict=True)
    }
    whole = all(
        hashlib.sha256(shard.read().tobytes()).hexdigest() == store.manifest.files[name].sha256
        for name, shard in shards.items()
    )
    found = [path, store.path, *path.glob("*"), *store.path.glob("*")]
    owners = sorted({p.lstat().st_uid for p in found if os.path.lexists(p)})
    tokens = hashlib.sha256(windows.tobytes()).hexdigest()
    print(json.dumps({"tokens": tokens, "owners": owners, "whole": whole}))
    return 0


# -- the campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        return read_tokens(options.read)
    root = Path(tempfile.mkdtemp(prefix="hostile_user_"))
    try:
        ledger, attackers = campaign(make_place(root), options.minutes * 60, options.seed)
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)
    show(ledger, attackers)
    return 1 if ledger.violations else 0


def campaign(place: Place, seconds: float, seed: int) -> tuple[Ledger, list[Attacker]]:
    take_reference(place)
    ledger, attackers = Ledger(seed), list[Attacker]()
    try:
        with untouched(place / "home/private"), untouched(place / "etc"):
            attackers += _fight(place, ledger, seconds, seed)
    except AssertionError as error:
        ledger.violations.append(f"seed {seed}, private files: {error}")
    ledger.end_all()
    ledger.violations += [f"seed {seed}, exposed: {path}" for a in attackers for path in a.opened]
    ledger.violations += [f"seed {seed}, ran: {path}" for path in (place / "pwned").iterdir()]
    ledger.violations += [f"seed {seed}, copied: {path}" for path in _with_secret(place)]
    return ledger, attackers


def _fight(place: Place, ledger: Ledger, seconds: float, seed: int) -> list[Attacker]:
    processes = multiprocessing.get_context("fork")
    stop, results = processes.Event(), processes.Queue()

    def attack(number: int) -> None:
        become(ATTACKER)
        attacker = Attacker(place, seed * NUM_ATTACKERS + number)
        attacker.attack_until(stop)
        attacker._watch = None
        results.put(attacker)

    started = [processes.Process(target=attack, args=(i,)) for i in range(NUM_ATTACKERS)]
    for process in started:
        process.start()
    end = time.monotonic() + seconds
    data, runs = Victim(place, ledger, seed, "data"), Victim(place, ledger, seed + 1, "runs")
    others = [runs.train] * 5 + [runs.reserve] * 3 + [runs.report, runs.doctor]
    try:
        with ThreadPoolExecutor(2) as pool:
            done = [pool.submit(data.act_until, end, [data.prepare])]
            done += [pool.submit(runs.act_until, end, others)]
        for future in done:
            future.result()
    finally:
        stop.set()
        found = [results.get(timeout=DEADLINE_S) for _ in started]
    return found


def _with_secret(place: Place) -> Iterator[Path]:
    """Files outside that hold the private text."""
    for parent, names, files in os.walk(place.root):
        names[:] = [
            name for name in names if Path(parent, name) not in (place / "home", place / "etc")
        ]
        for name in files:
            path = Path(parent, name)
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > 1 << 30:
                continue
            if SECRET.encode() in path.read_bytes():
                yield path


def show(ledger: Ledger, attackers: Sequence[Attacker]) -> None:
    tried: Counter[tuple[str, str]] = sum((a.tried for a in attackers), Counter())
    succeeded: Counter[tuple[str, str]] = sum((a.succeeded for a in attackers), Counter())
    for number, title in enumerate(("attacked", "attack")):
        print(f"| {title} | tried | succeeded |\n|---|---|---|")
        for name in dict.fromkeys(key[number] for key in sorted(tried)):
            sums = [
                sum(n for key, n in c.items() if key[number] == name) for c in (tried, succeeded)
            ]
            print(f"| {name.replace('_', ' ')} | {sums[0]:,} | {sums[1]:,} |")
        print(f"| all | {tried.total():,} | {succeeded.total():,} |\n")
    codes = sorted({code for _, code in ledger.ends})
    print(f"| victim | {' | '.join(map(str, codes))} |\n|---|{'---|' * len(codes)}")
    for what in dict.fromkeys(what for what, _ in sorted(ledger.ends)):
        print(f"| {what} | {' | '.join(str(ledger.ends[what, code]) for code in codes)} |")
    print("\n| tokens that were read | times |\n|---|---|")
    for verdict, count in ledger.tokens.most_common():
        print(f"| {verdict} | {count} |")
    print("\nreasons:")
    for reason, count in ledger.reasons.most_common(40):
        print(f"{count:5} x {reason}")
    print(f"\n{len(ledger.violations)} violations")
    for violation in ledger.violations:
        print(f"- {violation}")


if __name__ == "__main__":
    sys.exit(main())
