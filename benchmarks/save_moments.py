"""Does `--resume auto` go on from the last good state, at whatever moment a save was cut short?

    python -m benchmarks.save_moments [--rounds 200] [--seed 0] [--only N] [--tree CHECKOUT]
        [--kinds kill,term,ENOSPC,EDQUOT,EIO,EFBIG,full,inodes] [--formats pt,async,sharded]

A round is a run that saves after each step, each second one, or only at its end, keeps all files or
the newest 1 or 2, and meets a fault at one call to the file system (`file_calls.c`), which is drawn
by its kind:

    kill, term                  SIGKILL or SIGTERM before or after the call, for the worker, its
                                launcher, or both
    ENOSPC, EDQUOT, EIO, EFBIG  the call fails so, once, or with all later ones that need room
    full, inodes                a real file system with too little room (needs root)

The formats: `.pt` by hand, with training.async_save=false and true, and sharded, a job of 2 ranks.
The directory is empty; or it holds a run that this one resumes; or it holds a run of the same or of
other settings that this one does not resume, whose files are then kept as `last.earlier.pt`.

Then the disk has room again, and the same command goes on with `--resume auto`. It must begin at
the newest state that was whole, and end with the states of an undisturbed run, to the bit. Faults:

    exit        the run that met the fault ended with a code that is not documented, or a traceback
    broken      a checkpoint does not load
    lost        a file of the earlier run is gone (`lost last`: that with its last state)
    left        temporary files: after an error, or, a minute old, after the next run
    forgot      it began at step 0, although a state was there
    older       it began at an older state than the last one that was whole
    refused     it would not go on
    bits        a state or a loss is not the undisturbed run's
    end         the resumed run did not leave its last state, or more files than it should keep

`missed`: the run came to no such moment. It is judged all the same.
"""

import argparse
import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkpoint_runs import (
    CHECKPOINTS,
    MANIFEST,
    Broken,
    Done,
    Lab,
    Owner,
    Saved,
    checkpoints_below,
    leftovers_below,
    parser_of,
    read,
)

KINDS = ("kill", "term", "ENOSPC", "EDQUOT", "EIO", "EFBIG", "full", "inodes")
DISKS = ("full", "inodes")
FORMATS = ("pt", "async", "sharded")
PRIORS = ("none", "resumed", "same", "other")
ERRNO = {"ENOSPC": 28, "EDQUOT": 122, "EIO": 5, "EFBIG": 27}
ROOM = ("create", "write", "sync", "rename", "mkdir")
FAILING = {"EFBIG": ("write",), "EIO": ("create", "write", "sync", "rename")}
"""The calls that an error can come from; the others': ROOM."""
SIGNALS = {"kill": 9, "term": 15}
OWN, OTHER = Owner(11, 1e-3), Owner(12, 1e-3)
PRIOR_STEPS, STEPS, ALL_STEPS = 4, 8, 10
IN_NAMESPACE = "SAVE_MOMENTS_NAMESPACE"
CODES = {"term": (143, -15)}
"""Documented ends; of the kinds that fail with an error 2, and of a kill any."""


class Fault(NamedTuple):
    kind: str
    text: str


class Scenario(NamedTuple):
    kind: str
    form: str
    prior: str
    interval: int | None
    keep: int | None
    has_notice: bool
    """training.save_on_signal"""
    moment: dict[str, str]
    """For file_calls.c."""
    room: float
    """Of a real file system: for so many files of a checkpoint."""

    def arguments(self, steps: int, owner: Owner = OWN) -> list[str]:
        values = {"save_interval": self.interval, "keep_last": self.keep, "max_steps": steps}
        values |= {"save_last": True, "async_save": self.form == "async"}
        values |= {"save_on_signal": self.has_notice}
        given = [f"training.{key}={_word(value)}" for key, value in values.items()]
        return [*owner.arguments, *given]

    @property
    def num_saves(self) -> int:
        """Of an undisturbed run, its last state included."""
        start = PRIOR_STEPS if self.prior == "resumed" else 0
        return 1 + ((STEPS - start) // self.interval if self.interval else 0)

    @property
    def launcher(self) -> str:
        return "fsdp" if self.form == "sharded" else "hand"

    def __str__(self) -> str:
        limit = f", room for {self.room:.2f} files" if self.kind in DISKS else ""
        words = " ".join(f"{key}={value}" for key, value in self.moment.items())
        return f"{self.form}, prior {self.prior}, {' '.join(self.arguments(STEPS))}; {words}{limit}"


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if any(kind in DISKS for kind in options.kinds):
        _enter_namespace()
    numbers = range(options.rounds) if options.only is None else [options.only]
    began, table = time.monotonic(), Counter[tuple[str, str, str]]()
    kinds = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="save_moments_") as scratch:
        lab = Lab(Path(scratch), options.tree)
        campaign = Campaign(lab, options)
        with ThreadPoolExecutor(options.jobs) as pool:
            plays = pool.map(campaign.play, numbers)
            for number, (drawn, where, found) in zip(numbers, plays, strict=True):
                kinds.update({fault.kind for fault in found})
                end = "bad" if found else "good"
                table[drawn.kind, drawn.form, end] += 1
                table[drawn.kind, drawn.form, "missed"] += where is None
                if found or options.only is not None:
                    _print_round(number, drawn, where, found)
    _print_table(table, options)
    print("; ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())) or "no fault")
    print(f"seed {options.seed}, {len(numbers)} rounds, {time.monotonic() - began:.0f} s")
    return 1 if kinds else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, 200)
    for name, words in (("kinds", KINDS), ("formats", FORMATS), ("priors", PRIORS)):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), default=list(words))
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("no real disk is filled: that needs root")
        options.kinds = [kind for kind in options.kinds if kind not in DISKS]
    return options


def _enter_namespace() -> None:
    """Mounts of ours are seen by nobody else, and go with us."""
    if IN_NAMESPACE not in os.environ:
        command = ["unshare", "--mount", sys.executable, "-m", "benchmarks.save_moments"]
        os.execvpe("unshare", [*command, *sys.argv[1:]], {**os.environ, IN_NAMESPACE: "1"})


def _print_round(number: int, drawn: Scenario, where: str | None, found: Sequence[Fault]) -> None:
    print(f"round {number}, {drawn.kind} at {where or 'no moment'}\n    {drawn}")
    for fault in found or [Fault("good", "no fault")]:
        print(f"    {fault.kind}: {fault.text}", flush=True)


def _print_table(table: Counter[tuple[str, str, str]], options: argparse.Namespace) -> None:
    print(f"\n{'':10}" + "".join(f"{form:>26}" for form in options.formats))
    for kind in options.kinds:
        cells = []
        for form in options.formats:
            good, bad, missed = (table[kind, form, end] for end in ("good", "bad", "missed"))
            cells.append(f"{good + bad}: {good} good {bad} bad" + f" ({missed})" * bool(missed))
        print(f"{kind:10}" + "".join(f"{cell:>26}" for cell in cells))
    print("(in brackets: of these, missed)")


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower()


class Campaign:
    """Draws rounds and plays them. What an earlier run leaves, and which calls a save makes, is
    found once for each kind."""

    def __init__(self, lab: Lab, options: argparse.Namespace) -> None:
        self.lab, self.options = lab, options
        self._priors: dict[tuple[bool, bool, Owner], Path] = {}
        self._calls: dict[tuple[str, str], tuple[dict[str, Counter[str]], int]] = {}
        self._lock = threading.RLock()

    def play(self, number: int) -> tuple[Scenario, str | None, list[Fault]]:
        drawn = self._draw(number)
        place = self.lab.place(f"round{number}")
        with self._prepared(drawn, place) as before:
            arguments = drawn.arguments(STEPS)
            arguments += ["--resume", "auto"] if drawn.prior == "resumed" else []
            run = self.lab.start(drawn.launcher, place, "run", arguments, **drawn.moment).finish()
            judge = Judge(self.lab, drawn, place, before)
            found = list(judge.after_fault(run))
            if drawn.kind in DISKS:
                _mount(place / CHECKPOINTS, "remount,size=1g,nr_inodes=100000")
            _age_leftovers(place)
            arguments = [*drawn.arguments(ALL_STEPS), "--resume", "auto"]
            rest = self.lab.start(drawn.launcher, place, "rest", arguments).finish()
            found += judge.after_resume(rest)
        where = _moment_of(run, drawn.kind)
        shutil.rmtree(place)
        return drawn, where, found

    def _draw(self, number: int) -> Scenario:
        options = self.options
        draw = random.Random(f"{options.seed}/{number}")
        kind = options.kinds[number % len(options.kinds)]
        form = options.formats[number // len(options.kinds) % len(options.formats)]
        prior, interval = draw.choice(options.priors), draw.choice((1, 2, None))
        keep = draw.choice((None, 1, 2)) if interval is not None else None
        has_notice = kind == "term" and form != "sharded" and draw.random() < 0.3
        plan = Scenario(kind, form, prior, interval, keep, has_notice, {}, 0)
        if kind in DISKS:
            most = plan.num_saves if keep is None else keep + 0.95
            return plan._replace(room=draw.uniform(0.02, most))
        return plan._replace(moment=self._draw_moment(draw, plan))

    def _draw_moment(self, draw: random.Random, plan: Scenario) -> dict[str, str]:
        """First the call, then which one: renames are as likely as writes."""
        calls, num_saves = self._calls_of(plan.form, plan.prior)
        rank = draw.choice(sorted(calls))
        possible = calls[rank] if plan.kind in SIGNALS else FAILING.get(plan.kind, ROOM)
        call = draw.choice(sorted(call for call in possible if calls[rank][call]))
        at = draw.randint(1, max(1, calls[rank][call] * plan.num_saves // num_saves))
        moment = {"CALLS_AT": f"{call}:{at}"} | ({"CALLS_RANK": rank} if rank != "-" else {})
        if plan.kind in SIGNALS:
            is_job = plan.form == "sharded"
            whom = draw.choice(("self", "parent", "both")) if is_job else "self"
            when = draw.choice(("before", "after"))
            return moment | {"CALLS_DO": f"signal:{SIGNALS[plan.kind]}:{when}", "CALLS_WHOM": whom}
        lasts = draw.choice(("once", "always")) if plan.kind != "EFBIG" else "once"
        return moment | {"CALLS_DO": f"error:{ERRNO[plan.kind]}:{lasts}"}

    def _calls_of(self, form: str, prior: str) -> tuple[dict[str, Counter[str]], int]:
        """Rank -> the calls of a run that saves after each step, keeps one file, and meets no
        fault; and how often it saves."""
        with self._lock:
            if (form, prior) not in self._calls:
                self._calls[form, prior] = self._count_calls(form, prior)
            return self._calls[form, prior]

    def _count_calls(self, form: str, prior: str) -> tuple[dict[str, Counter[str]], int]:
        place = self.lab.place(f"calls_{form}_{prior}")
        plan = Scenario("calls", form, prior, 1, 1, False, {}, 0)
        self._bring_prior(plan, place / CHECKPOINTS)
        arguments = plan.arguments(STEPS) + ["--resume", "auto"] * (prior == "resumed")
        run = self.lab.start(plan.launcher, place, "run", arguments).finish()
        assert run.code == 0, run.output
        root = re.escape(str(place / CHECKPOINTS))
        pattern = rf"^(\S+) \d+ (\w+) \w+ {root}(.*)"
        found: dict[str, Counter[str]] = {}
        for rank, call, path in re.findall(pattern, run.calls.read_text(), re.M):
            if rank in found or "step_" in path or "last" in path:
                found.setdefault(rank, Counter())[call] += 1
        return found, plan.num_saves

    @contextmanager
    def _prepared(self, drawn: Scenario, place: Path) -> Iterator[dict[str, Path]]:
        """The earlier run's files, by their content."""
        directory = place / CHECKPOINTS
        if drawn.kind not in DISKS:
            self._bring_prior(drawn, directory)
            yield _contents(directory)
            return
        directory.mkdir()
        _mount(directory, self._limit(drawn))
        try:
            self._bring_prior(drawn, directory)
            yield _contents(directory)
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=True)

    def _limit(self, drawn: Scenario) -> str:
        """Room for the earlier run's files, and `drawn.room` further ones."""
        prior = self._prior(drawn, OWN)
        held = [] if drawn.prior == "none" else list(prior.rglob("*"))
        last = [*prior.glob("last/**/*"), prior / "last.pt"]
        kib = sum(_kib(path) for path in held) + drawn.room * sum(_kib(path) for path in last)
        if drawn.kind == "full":
            return f"size={int(kib) + 8}k"
        per_save = 6 if drawn.form == "sharded" else 1
        return f"size=1g,nr_inodes={len(held) + 2 + int(drawn.room * per_save)}"

    def _bring_prior(self, drawn: Scenario, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        if drawn.prior != "none":
            owner = OTHER if drawn.prior == "other" else OWN
            prior = self._prior(drawn, owner)
            subprocess.run(["cp", "-a", f"{prior}/.", str(directory)], check=True)

    def _prior(self, drawn: Scenario, owner: Owner) -> Path:
        """The checkpoints of an earlier run, which saved only its last state if this one does."""
        key = (drawn.form == "sharded", drawn.interval is None, owner)
        with self._lock:
            if key not in self._priors:
                self._priors[key] = self._make_prior(*key)
            return self._priors[key]

    def _make_prior(self, is_sharded: bool, only_last: bool, owner: Owner) -> Path:
        place = self.lab.place(f"prior_{is_sharded}_{only_last}_{owner.seed}")
        form, interval = "sharded" if is_sharded else "pt", None if only_last else 2
        plan = Scenario("prior", form, "none", interval, None, False, {}, 0)
        arguments = plan.arguments(PRIOR_STEPS, owner)
        run = self.lab.start(plan.launcher, place, "run", arguments).finish()
        assert run.code == 0, run.output
        return place / CHECKPOINTS


class Judge:
    """What was there, and what must be there."""

    def __init__(self, lab: Lab, drawn: Scenario, place: Path, before: dict[str, Path]) -> None:
        self.drawn, self.place, self.before = drawn, place, before
        self.directory = place / CHECKPOINTS
        self.undisturbed = lab.undisturbed(drawn.launcher, OWN)
        self.whole: list[Saved] = []
        """Of this run's settings, when it had met its fault."""
        self.least = 0
        """The state at which, or after which, it must go on."""
        self.left: dict[str, Path] = {}
        """By their content, all checkpoints that were there then."""

    def after_fault(self, run: Done) -> Iterator[Fault]:
        saved = yield from self._read_all()
        own = (each for each in saved if each.owner == OWN)
        self.whole = [each for each in own if re.match(r"last|step_", each.name)]  # no error.pt
        completed = self._completed(run)
        if self.drawn.prior == "resumed" or (self.drawn.prior == "same" and not completed):
            completed.add(PRIOR_STEPS)
        self.least = max(completed, default=0)
        self.left = _contents(self.directory)
        yield from self._judge_code(run)
        yield from self._judge_earlier()
        is_error = self.drawn.kind not in SIGNALS
        for path in leftovers_below(self.directory) if is_error else ():
            yield Fault("left", f"{path.relative_to(self.place)}, after an error")

    def _completed(self, run: Done) -> set[int]:
        """Steps of the saves that were renamed into place."""
        pattern = rf"rename done .* -> {re.escape(str(self.directory))}/(?:step_(\d+)|last)"
        text = run.calls.read_text() if run.calls.exists() else ""
        ends = rf"(?:\.pt|/{re.escape(MANIFEST)})$"
        last = [each.step for each in self.whole if each.name == "last"]
        found = set()
        for match in re.finditer(pattern + ends, text, re.M):
            found |= (
                {int(match[1])} if match[1] else set(last if self.drawn.has_notice else [STEPS])
            )
        return found

    def _judge_code(self, run: Done) -> Iterator[Fault]:
        kind, code = self.drawn.kind, run.code
        is_done = any(each.name == "last" and each.step == STEPS for each in self.whole)
        documented = CODES.get(kind, (2,)) if kind != "kill" else (code,)
        if code not in documented and not (code == 0 and (is_done or self.drawn.has_notice)):
            yield Fault("exit", f"{code}: {run.error}")
        if "Traceback" in run.output:
            yield Fault("exit", f"{code}: a traceback: {run.output.splitlines()[-1]}")

    def _judge_earlier(self, when: str = "after the fault") -> Iterator[Fault]:
        """Files of an earlier run that this one has not resumed. A sharded one that was just being
        set aside is set aside by the next run, which is judged, too."""
        is_under_way = any(self.directory.glob(f"last.earlier*/{MANIFEST}.pending"))
        if self.drawn.prior in ("same", "other") and not is_under_way:
            now = _contents(self.directory)
            for content, path in self.before.items():
                if content not in now:
                    is_last = path.name.startswith("last")
                    kind = "lost last" if is_last else "lost"
                    yield Fault(kind, f"{path.relative_to(self.place)}, {when}")

    def _read_all(self) -> Generator[Fault, None, list[Saved]]:
        found = []
        for path in checkpoints_below(self.directory):
            try:
                found.append(read(path))
            except Broken as error:
                yield Fault("broken", str(error))
        return found

    def after_resume(self, run: Done) -> Iterator[Fault]:
        resumed = re.search(r"Resumed from \S+: (\d+) steps done", run.output)
        begun = int(resumed[1]) if resumed else 0
        good = {each.step for each in self.whole}
        told = f"the last good state: {self.least} steps; whole: {sorted(good)}"
        if run.code != 0:
            is_anothers = self.drawn.prior == "other" and not good and run.code == 2
            if not is_anothers or "Traceback" in run.output:
                yield Fault("refused", f"{run.code}: {run.error} ({told})")
            yield from self._judge_earlier("after the next run")
            return
        if begun == 0 and (good or (self.before and "Nothing to resume" in run.output)):
            yield Fault("forgot", told)
        elif begun < self.least:
            yield Fault("older", f"began at step {begun}; {told}")
        yield from self._judge_end(run)
        from_path = self.place / (run.resumed or "")
        is_earlier = any(self.left.get(content) == from_path for content in self.before)
        if not is_earlier:  # a run that goes on from the earlier run's state owns its files
            yield from self._judge_earlier("after the next run")
        for path in leftovers_below(self.directory):
            yield Fault("left", f"{path.relative_to(self.place)}, after the next run")

    def _judge_end(self, run: Done) -> Iterator[Fault]:
        saved = yield from self._read_all()
        own = [each for each in saved if each.owner == OWN]
        if not any(each.name == "last" and each.step == ALL_STEPS for each in own):
            yield Fault("end", "its last state is not there")
        for each in own:
            if each.state != self.undisturbed.states[each.step]:
                yield Fault("bits", f"{each.path.relative_to(self.place)}, step {each.step}")
        if steps := self.undisturbed.differing(run.losses()):
            yield Fault("bits", f"losses of steps {steps}")
        kept = sorted(each.step for each in own if each.name == f"step_{each.step}")
        keep = self.drawn.keep
        if keep is not None and self.drawn.prior != "same" and len(kept) > keep:
            yield Fault("end", f"keeps the steps {kept}, of keep_last={keep}")


def _moment_of(run: Done, kind: str) -> str | None:
    """The call at which the fault came, in words."""
    text = run.calls.read_text() if run.calls.exists() else ""
    which = rf"(\S+) E{ERRNO['ENOSPC']}" if kind in DISKS else r"hit (\S+)"
    root = str(run.calls.parent / CHECKPOINTS)
    found = re.search(rf"^\S+ \d+ {which} {re.escape(root)}(.*)$", text, re.M)
    if found is None:
        return None
    return f"{found[1]} {found[2].replace(root, '').lstrip('/') or CHECKPOINTS}"


def _contents(directory: Path) -> dict[str, Path]:
    """Checksum -> checkpoint. A sharded one is known by its manifest."""
    found = {}
    for path in checkpoints_below(directory):
        file = path / MANIFEST if path.is_dir() else path
        found[hashlib.sha256(file.read_bytes()).hexdigest()] = path
    return found


def _age_leftovers(place: Path) -> None:
    """A minute: the next run removes what is older than 10 s."""
    then = time.time() - 60
    for path in leftovers_below(place / CHECKPOINTS):
        os.utime(path, (then, then))


def _mount(directory: Path, limits: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", limits, "none", str(directory)]
    subprocess.run(command, check=True)


def _kib(path: Path) -> int:
    """As a tmpfs counts it."""
    return -(-path.stat().st_size // 4096) * 4 if path.is_file() else 0


if __name__ == "__main__":
    raise SystemExit(main())
