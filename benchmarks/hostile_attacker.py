"""The other user of `benchmarks.hostile_user`: the place that both share, and the attacks."""

import fcntl
import hashlib
import json
import os
import pickle
import random
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

from model_check.utils.files import read_whole
from tests.data.canary import NAMES, Watch, make_private
from tests.e2e.conftest import TINY
from tests.nvml_fake.build import build, fake_gpu, scenario

VICTIM, ATTACKER, GROUP = 61_111, 61_112, 61_113
NUM_TEXTS = 5
LONG_TEXT = 1
"""This one is remembered by its hash (`.memo`), since it is longer than 1 MiB."""
MOST_HELD_S = 1.0
STORM_S, CALM_S = 1.0, 6.0
"""Attacks come in storms: a command that begins in between gets far before it meets one."""
_LONGEST_COPY = 16 << 20


@dataclass(frozen=True)
class Place:
    """What both users reach, and what only the victim may."""

    root: Path

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    @property
    def roots_of_runs(self) -> tuple[Path, Path]:
        """As /tmp, and as a sticky directory of a group."""
        return self / "tmp", self / "team"


def make_place(root: Path) -> Place:
    place = Place(root)
    root.chmod(0o755)
    _directory(place / "tmp", 0o1777)
    _directory(place / "locks", 0o1777)
    _directory(place / "pwned", 0o1777)
    _directory(place / "team", 0o3770, 0, GROUP)
    for name in ("cache", "prepared", "work"):
        _directory(place / name, 0o2770, VICTIM, GROUP)
    _directory(place / "tmp/checkpoints", 0o1777)
    for private in ("home/private", "etc"):
        make_private(place / private)
    for path in (place / "home", place / "etc"):
        path.chmod(0o700)
        for each in (path, *path.rglob("*")):
            os.chown(each, VICTIM, VICTIM)
    _write_texts(place / "texts")
    (place / "tiny.json").write_text(json.dumps(TINY))
    (place / "gpus").write_text(scenario(fake_gpu(i, utilization=0) for i in range(2)))
    build(root)
    return place


def _directory(path: Path, mode: int, owner: int = 0, group: int = 0) -> None:
    path.mkdir()
    os.chown(path, owner, group)
    path.chmod(mode)


def _write_texts(directory: Path) -> None:
    directory.mkdir()
    dice = random.Random(1)
    words = [f"word{number}" for number in range(400)]
    for number in range(NUM_TEXTS):
        documents = 6000 if number == LONG_TEXT else 60
        lines = [
            json.dumps({"text": " ".join(dice.choices(words, k=30))}) for _ in range(documents)
        ]
        (directory / f"{number}.jsonl").write_text("\n".join(lines))


def become(uid: int) -> None:
    os.setgroups([GROUP])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


class Attacker:
    """Takes a name, and mostly gives it back a moment later, so that the victim goes on to the
    next one."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.dice = random.Random(seed)
        self.tried: Counter[tuple[str, str]] = Counter()
        self.succeeded: Counter[tuple[str, str]] = Counter()
        self.opened: set[str] = set()
        """Private files of the victim's that this user could open."""
        self._watch: Watch | None = None

    def attack_until(self, stop: Event) -> None:
        look_again = 0.0
        while not stop.is_set():
            if time.monotonic() % (STORM_S + CALM_S) > STORM_S:
                self._clear_the_way()
                time.sleep(0.05)
                continue
            if time.monotonic() > look_again:
                self._start_watching()
                self._try_to_open_all()
                look_again = time.monotonic() + 2
            with suppress(OSError, LookupError, ValueError):  # refused, or no such thing is there
                self._attack()

    def _attack(self) -> None:
        fresh = [Path(line.partition(" ")[2]) for line in self._seen()]
        if fresh and self.dice.random() < 0.7:
            path = self.dice.choice(fresh)
            kind = self._kind_of(path)
        else:
            kind = self.dice.choice(list(KINDS))
            names = list(KINDS[kind](self))
            if not names:
                return
            path = self.dice.choice(names)
        trick = self.dice.choice(TRICKS)
        self.tried[kind, trick.__name__] += 1
        if trick in ON_WHAT_IS_THERE:
            trick(self, path)
            self.succeeded[kind, trick.__name__] += 1
        else:
            self._plant(kind, trick, path)

    def _plant(self, kind: str, trick: "Trick", path: Path) -> None:
        away = path.with_name(f"away-{self.dice.randrange(1 << 40):x}")
        was_there = False
        with suppress(OSError):
            os.rename(path, away)
            was_there = True
        try:
            trick(self, path, away)
            self.succeeded[kind, trick.__name__] += 1
            time.sleep(self.dice.expovariate(200))
        finally:
            if self._gives_back(path, trick):
                _remove(path)
                if was_there:
                    with suppress(OSError):
                        os.rename(away, path)
            elif self.dice.random() < 0.5:
                _remove(away)

    def _gives_back(self, path: Path, trick: "Trick") -> bool:
        """Else it stays, for the victim to set aside, or to choose another name."""
        if _is_entry(path):
            return self.dice.random() < (0.3 if trick in (Attacker.copy, Attacker.forge) else 0.9)
        return self.dice.random() < 0.9

    def _clear_the_way(self) -> None:
        """Entries and runs apart, nothing of ours stays where the victim cannot choose another
        name: the first attack would be the last."""
        fixed = ("cache", "prepared", "work", "locks", "tmp/checkpoints", "cache/.locks")
        for path in (path for name in fixed for path in names_in(self.place / name)):
            with suppress(OSError):
                if not _is_entry(path) and path.lstat().st_uid == ATTACKER:
                    _remove(path)

    # Which names there are, and will be

    def _start_watching(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        shared = ("cache", "cache/tokens", "cache/.locks", "tmp", "team", "locks", "work")
        with suppress(AssertionError):  # one of them is away
            self._watch = Watch(*(self.place / name for name in shared))

    def _seen(self) -> list[str]:
        with suppress(OSError):
            return self._watch.seen() if self._watch else []
        return []

    def _kind_of(self, path: Path) -> str:
        where = {
            "tokens": "store",
            ".locks": "lock",
            "locks": "GPU lock",
            "work": "working directory",
            "tmp": "run directory",
            "team": "run directory",
        }
        return where.get(path.parent.name, "cache")

    def locks(self) -> Iterator[Path]:
        """And the status files that will stand beside them."""
        for path in names_in(self.place / "cache/.locks"):
            yield path
            yield path.with_name(path.name.replace(".lock", ".status.json"))

    def run_directories(self) -> Iterator[Path]:
        """Also those that a launcher which starts now will make."""
        for root in self.place.roots_of_runs:
            yield from names_in(root)
            for pid in _processes_of(VICTIM):
                stamp = time.strftime(
                    "%Y%m%d_%H%M%S", time.localtime(time.time() + self.dice.randrange(2))
                )
                yield root / f"model_check_logs_{pid}_{stamp}"

    def checkpoints(self) -> Iterator[Path]:
        for root in (self.place / "tmp/checkpoints", self.place / "work/.checkpoints"):
            yield root / self.dice.choice(["cpu0", "cpu1"])
            for directory in names_in(root):
                name = self.dice.choice(["last.pt", "step_2.pt", "step_4.pt"])
                yield from (directory / name, directory / f".{name}.{'0' * 16}.tmp")
                yield from names_in(directory)

    def working_directory(self) -> Iterator[Path]:
        ours = ".env .logs .logs/latest .checkpoints .cache config.json"
        imported = "torch.py json.py types.py sitecustomize.py launcher model_check"
        yield from (self.place / "work" / name for name in f"{ours} {imported}".split())

    def files_in(self, directory: str) -> Iterator[Path]:
        for entry in names_in(self.place / directory):
            yield from names_in(entry)

    # What is done to a name

    def link(self, path: Path, away: Path) -> None:
        """To a private file or directory, or to a name in one that does not exist yet."""
        private = self.dice.choice([self.place / "home/private", self.place / "etc"])
        names = ("", "deep", "new", path.name, *NAMES)
        os.symlink(private / self.dice.choice(names), path)

    def hard_link(self, path: Path, away: Path) -> None:
        os.link(self.place / "etc" / self.dice.choice(NAMES), path)

    def hard_link_of_an_entry(self, path: Path, away: Path) -> None:
        os.link(self.dice.choice(list(self.files_in("cache/tokens"))), path)

    def pipe(self, path: Path, away: Path) -> None:
        os.mkfifo(path, 0o666)

    def device(self, path: Path, away: Path) -> None:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))

    def link_to_a_device(self, path: Path, away: Path) -> None:
        os.symlink(self.dice.choice(["/dev/zero", "/dev/full", "/dev/stdin"]), path)

    def socket(self, path: Path, away: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))

    def directory(self, path: Path, away: Path) -> None:
        """Full of links and pipes under the names that ours have."""
        path.mkdir()
        path.chmod(self.dice.choice([0o755, 0o777, 0o2777]))
        for name in ("manifest.json", "unfinished.json", "tokens-00000.bin", "last.pt", "run.json"):
            self.dice.choice([self.link, self.pipe, self.text])(path / name, away)

    def empty_directory(self, path: Path, away: Path) -> None:
        path.mkdir()
        path.chmod(0o777)

    def deep_directory(self, path: Path, away: Path) -> None:
        os.makedirs(path / "/".join(["d"] * 200))

    def huge(self, path: Path, away: Path) -> None:
        path.touch()
        os.truncate(path, 1 << 40)

    def text(self, path: Path, away: Path) -> None:
        """Text, JSON and settings that no parser expects."""
        texts = (
            "",
            "[" * 4096,
            '{"pid": 1e999, "user": "x", "host": "y", "since": 0}',
            '{"pid": 1, "host": "\\u001b[2J", "progress": {"a": ["b"]}, "since": "\\ud800"}',
            "HF_TOKEN=stranger\nWANDB_API_KEY=stranger\n",
            f"open({str(self.place / 'pwned/python')!r}, 'w')",
            "\0\xff" * 999,
        )
        path.write_text(self.dice.choice(texts))
        path.chmod(0o666)

    def code(self, path: Path, away: Path) -> None:
        """A pickle that runs a command."""
        path.write_bytes(pickle.dumps(_Command(f"touch {self.place}/pwned/pickle")))
        path.chmod(0o666)

    def copy(self, path: Path, away: Path) -> None:
        """The same content, but ours."""
        if stat.S_ISDIR(away.lstat().st_mode):
            path.mkdir()
            path.chmod(0o755)
            for file in names_in(away):
                (path / file.name).write_bytes(read_whole(file, _LONGEST_COPY))
        else:
            path.write_bytes(read_whole(away, _LONGEST_COPY))

    def forge(self, path: Path, away: Path) -> None:
        """Other tokens, and a manifest with their checksums."""
        self.copy(path, away)
        tokens, manifest = path / "tokens-00000.bin", path / "manifest.json"
        content = bytes(tokens.stat().st_size)
        document = json.loads(manifest.read_bytes())
        document["files"][tokens.name]["sha256"] = hashlib.sha256(content).hexdigest()
        tokens.write_bytes(content)
        manifest.write_text(json.dumps(document))

    def swap(self, path: Path) -> None:
        """With a neighbour of its kind."""
        others = [p for p in names_in(path.parent) if _is_entry(p) == _is_entry(path) and p != path]
        other = self.dice.choice(others)
        away = path.with_name(f"away-{self.dice.randrange(1 << 40):x}")
        os.rename(path, away)
        os.rename(other, path)
        os.rename(away, other)
        if _is_entry(path) and self.dice.random() < 0.5:
            return
        time.sleep(self.dice.expovariate(200))
        for source, target in ((path, away), (other, path), (away, other)):
            os.rename(source, target)

    def delete(self, path: Path) -> None:
        _remove(path)
        if os.path.lexists(path):
            raise PermissionError(path)

    def truncate(self, path: Path) -> None:
        os.truncate(path, self.dice.choice([0, 7]))

    def edit(self, path: Path) -> None:
        self._write(path, os.O_RDWR, self.dice.randbytes(8))

    def append(self, path: Path) -> None:
        self._write(path, os.O_WRONLY | os.O_APPEND, b"\0" * 99)

    def _write(self, path: Path, flags: int, content: bytes) -> None:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)

    def change_mode(self, path: Path) -> None:
        path.chmod(self.dice.choice([0, 0o444, 0o777]))

    def change_times(self, path: Path) -> None:
        os.utime(path, (self.dice.choice([0, 1 << 33]),) * 2)

    def hold(self, path: Path) -> None:
        """Its lock, for a while."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(self.dice.uniform(0, MOST_HELD_S))
        finally:
            os.close(descriptor)

    def _try_to_open_all(self) -> None:
        """Files of runs, and checkpoints."""
        for root in (*self.place.roots_of_runs, self.place / "work"):
            for parent, _, names in os.walk(root):
                for name in names:
                    path = os.path.join(parent, name)
                    with suppress(OSError):
                        if _is_plain_of_victim(os.lstat(path)):
                            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW))
                            self.opened.add(path)


@dataclass
class _Command:
    line: str

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.line,)


Trick = Callable[..., None]
ON_WHAT_IS_THERE: tuple[Trick, ...] = (
    Attacker.swap,
    Attacker.delete,
    Attacker.truncate,
    Attacker.edit,
    Attacker.append,
    Attacker.change_mode,
    Attacker.change_times,
    Attacker.hold,
)
TRICKS: tuple[Trick, ...] = (
    *[Attacker.link] * 4,
    *[Attacker.swap] * 3,
    *[Attacker.copy, Attacker.forge] * 2,
    *(Attacker.hard_link, Attacker.hard_link_of_an_entry, Attacker.pipe, Attacker.device),
    *(Attacker.link_to_a_device, Attacker.socket, Attacker.directory, Attacker.empty_directory),
    *(Attacker.deep_directory, Attacker.huge, Attacker.text, Attacker.code),
    *ON_WHAT_IS_THERE,
)
KINDS: dict[str, Callable[[Attacker], Iterator[Path]]] = {
    "cache": lambda self: names_in(self.place / "cache"),
    "entry's file": lambda self: self.files_in("cache"),
    "store": lambda self: names_in(self.place / "cache/tokens"),
    "store's file": lambda self: self.files_in("cache/tokens"),
    "lock": Attacker.locks,
    "memo": lambda self: names_in(self.place / "cache/.memo"),
    "prepared": lambda self: names_in(self.place / "prepared"),
    "prepared data": lambda self: self.files_in("prepared"),
    "run directory": Attacker.run_directories,
    "run's file": lambda self: (p for d in self.run_directories() for p in names_in(d)),
    "checkpoint": Attacker.checkpoints,
    "working directory": Attacker.working_directory,
    "GPU lock": lambda self: names_in(self.place / "locks"),
}


def names_in(directory: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (directory / name for name in os.listdir(directory))


def _is_entry(path: Path) -> bool:
    """A view or a store."""
    return "__" in path.name or path.parent.name == "tokens"


def _processes_of(uid: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.stat().st_uid == uid:
                yield int(path.name)


def _is_plain_of_victim(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == VICTIM


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
