"""What happens in a round, drawn from its seed: who misbehaves, and which signals fall. Pure."""

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Literal, get_args

MISCHIEF = str(Path(__file__).with_name("mischief.py"))
TO_END_WITH = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGQUIT)
DEADLY = (
    *(Signals.SIGKILL, Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGTERM),
    *(Signals.SIGINT, Signals.SIGHUP, Signals.SIGPIPE, Signals.SIGUSR1),
)
WAYS = (
    *("session", "orphan", "deaf", "quiet", "shell", "chatter", "bare", "brief"),
    *("hop", "leap"),  # fork and end, again and again: a new pid whenever somebody looks
    *("nuls", "setuid"),
)
_HIDING = ("bare", "setuid")
"""In a session of its own, such a child is known by its descent alone, or by its cgroup."""
_HARMLESS = ("session", "orphan", "deaf", "quiet", "shell", "chatter", "brief", "setuid")

Theme = Literal["any", "job", "flood", "terminal", "escape"]
"""`any`: everything at once, of which little can be promised. Of the others each has one fault and
a promise of its own (`promises`), among workers that do no harm: the whole job is signalled; a
worker fails in a flood of NUL bytes; the supervisor leads the session of a terminal, and no shell
is above; it is killed, and its workers have children that only a cgroup tells as ours."""
Target = Literal["supervisor", "somebody", "guardian", "job", "terminal"]
Order = Literal["workers first", "launcher first", "random order"]
Terminal = Literal["file", "blocked", "closed", "tty"]


@dataclass(frozen=True)
class Injection:
    """Signals to send, one after the other, some time after the injection before. To a `terminal`
    they are keys (Ctrl-C, Ctrl-Z, ...), and SIGHUP is its end."""

    after_s: float
    target: Target
    signals: tuple[Signals, ...]
    pick: int = 0
    """Of `somebody`: which of those who are known by then, modulo their number. Of a `job`: the
    seed of its random order."""
    order: Order = "launcher first"
    """Of a `job`."""


@dataclass(frozen=True)
class Round:
    """One supervised run and all that goes wrong in it."""

    seed: str
    theme: Theme
    commands: dict[str, tuple[str, ...]]
    with_events: tuple[str, ...]
    grace_s: float
    silence_s: float
    terminal: Terminal
    injections: tuple[Injection, ...]

    @property
    def needs_cgroup(self) -> bool:
        """Whether only a cgroup of version 2 holds everybody: a child that has left its session and
        its environment or its user, when nothing descends from the supervisor any more."""
        actions = "+".join(action for name in self.commands for action in self.actions(name))
        return _kills_supervisor(self.injections) and any(way in actions for way in _HIDING)

    @property
    def mischief(self) -> tuple[str, ...]:
        """The kinds that a storm counts."""
        actions = "+".join(action for name in self.commands for action in self.actions(name))
        found = {
            "job-wide signals": any(i.target == "job" for i in self.injections),
            "floods of NUL bytes": "nuls" in actions,
            "orphaned terminals": self.terminal == "tty",
            "setuid children": "setuid" in actions,
        }
        return tuple(kind for kind, is_there in found.items() if is_there)

    def actions(self, name: str) -> Sequence[str]:
        """What a worker does; nothing for a command that is none of ours."""
        argv = self.commands[name]
        return argv[argv.index(MISCHIEF) + 2 :] if MISCHIEF in argv else ()


def draw(seed: str) -> Round:
    """The round of this seed, the same on every machine."""
    dice = random.Random(seed)
    names = [f"W{i}" for i in range(dice.choice((1, 2, 2, 3, 3, 4)))]
    themes: tuple[Theme, ...] = ("job", "flood", "terminal", "escape")
    theme: Theme = "any" if dice.random() < 0.6 else dice.choice(themes)
    if theme == "any":
        return _storm(dice, seed, names)
    return Round(
        seed=seed,
        theme=theme,
        commands=_peaceful(dice, theme, names),
        with_events=_some(dice, names),
        grace_s=dice.choice((0.05, 0.2, 0.4)),
        silence_s=0.0,
        terminal="tty" if theme == "terminal" else "file",
        injections=_the_fault(dice, theme),
    )


def _storm(dice: random.Random, seed: str, names: Sequence[str]) -> Round:
    return Round(
        seed=seed,
        theme="any",
        commands={name: _command(dice, name) for name in names},
        with_events=_some(dice, names),
        grace_s=dice.choice((0.05, 0.2, 0.4)),
        silence_s=dice.choice((0.0, 0.0, 0.0, 0.0, 0.4)),
        terminal=dice.choice(("file", "file", "file", "blocked", "closed")),
        injections=_injections(dice),
    )


def _some(dice: random.Random, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if dice.random() < 0.6)


def _peaceful(
    dice: random.Random, theme: Theme, names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Workers that stay; in a flood, one of them fails."""
    commands = {name: [_harmless(dice) for _ in range(dice.randint(0, 3))] for name in names}
    for actions in commands.values():
        if theme == "escape":
            actions[:] = [_hidden(dice) for _ in range(dice.randint(1, 2))]
        elif theme == "job" and dice.random() < 0.5:
            actions.insert(0, "courteous")
        actions.append("stay")
    if theme == "flood":
        flood = dice.choice(("child:nuls", "child:nuls+session", "nuls:64"))
        for name in dice.sample(names, dice.randint(1, len(names))):
            commands[name].insert(0, flood)
        commands[dice.choice(names)][-1:] = [f"nap:{dice.randint(20, 200)}", _failure(dice)]
    return {name: _mischief(name, actions) for name, actions in commands.items()}


def _harmless(dice: random.Random) -> str:
    ways = sorted(dice.sample(_HARMLESS, dice.randint(1, 3)))
    children = "child:" + "+".join(ways)
    return dice.choice((f"say:{dice.randint(1, 60)}", "half", "events:beats", children, children))


def _hidden(dice: random.Random) -> str:
    ways = {"session", dice.choice(_HIDING), *dice.sample(("orphan", "deaf", "quiet"), 2)}
    return "child:" + "+".join(sorted(ways))


def _failure(dice: random.Random) -> str:
    return dice.choice((f"exit:{dice.randint(1, 255)}", f"die:{int(dice.choice(DEADLY))}"))


def _the_fault(dice: random.Random, theme: Theme) -> tuple[Injection, ...]:
    """The one that befalls a peaceful round."""
    moment = _moment(dice)
    match theme:
        case "job":
            return (_to_the_job(dice, moment),)
        case "terminal":
            stops = [_stop(dice) for _ in range(dice.randint(0, 3))]
            end = dice.choice((Signals.SIGINT, Signals.SIGQUIT, Signals.SIGHUP))
            return (*stops, Injection(moment, "terminal", (end,)))
        case "escape":
            return (Injection(moment, "supervisor", (Signals.SIGKILL,)),)
    return ()


def _to_the_job(dice: random.Random, moment: float) -> Injection:
    signum, order = dice.choice(TO_END_WITH), dice.choice(get_args(Order))
    return Injection(moment, "job", (signum,), dice.randrange(1000), order)


def _stop(dice: random.Random) -> Injection:
    target: Target = "terminal" if dice.random() < 0.5 else "supervisor"
    return Injection(_moment(dice), target, (Signals.SIGTSTP,))


def _mischief(name: str, actions: Iterable[str]) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", MISCHIEF, name, *actions)


def _command(dice: random.Random, name: str) -> tuple[str, ...]:
    kind = dice.random()
    if kind < 0.03:
        return ("no-such-command", "x")
    if kind < 0.05:
        return ("/etc/passwd",)
    if kind < 0.15:
        return ("/bin/sh", "-c", _shell(dice))
    actions = [_action(dice) for _ in range(dice.randint(0, 5))]
    return _mischief(name, (*actions, *_ending(dice)))


def _shell(dice: random.Random) -> str:
    code = dice.choice((0, 0, 3, 126))
    return dice.choice(
        (
            f"echo hello; (trap '' TERM; sleep 1000) & exit {code}",
            f"setsid sh -c 'sleep 1000 & sleep 1000' & sleep 0.1; exit {code}",
            "trap '' TERM; while :; do sleep 0.05; done",
            f"trap 'exit {code}' TERM; printf partial; sleep 1000 & wait",
            "kill -9 $$",
            "kill -STOP $$; exit 4",
        )
    )


def _action(dice: random.Random) -> str:
    return dice.choice(
        (
            *(f"say:{dice.randint(1, 60)}", f"bars:{dice.randint(2, 40)}", "half"),
            *(f"binary:{dice.randint(1, 9000)}", f"flood:{dice.randint(1, 12)}"),
            *("close", "deaf", "stop", f"polite:{dice.choice((0, 0, 5))}"),
            *("courteous", f"nuls:{dice.randint(1, 8)}"),
            *(f"nap:{dice.randint(1, 60)}", f"events:{_event_kind(dice)}"),
            *(_child(dice) for _ in range(4)),
        )
    )


def _event_kind(dice: random.Random) -> str:
    return dice.choice(("beats", "beats", "garbage", "torn", "huge", "nan", "0", "20"))


def _child(dice: random.Random) -> str:
    return "child:" + "+".join(sorted(dice.sample(WAYS, dice.randint(1, 4))))


def _ending(dice: random.Random) -> tuple[str, ...]:
    nap = f"nap:{dice.randint(0, 120)}"
    match dice.choice(("well", "well", "well", "badly", "dead", "stays", "stays")):
        case "well":
            return (nap, "exit:0")
        case "badly":
            return (nap, f"exit:{dice.randint(1, 255)}")
        case "dead":
            return (nap, f"die:{int(dice.choice(DEADLY))}")
    return ("stay",)


def _injections(dice: random.Random) -> tuple[Injection, ...]:
    """Ends with what surely ends a run: signals to stop, repeated by the impatient."""
    several = [_injection(dice) for _ in range(dice.choice((0, 0, 1, 1, 2, 3)))]
    if not _kills_supervisor(several) and dice.random() < 0.1:  # without both, nothing is promised
        several.append(Injection(_moment(dice), "guardian", (Signals.SIGKILL,)))
    last = dice.choice(TO_END_WITH)
    often = dice.choice((1, 1, 2, 10))
    return (*several, Injection(_moment(dice) + 0.2, "supervisor", (last,) * often))


def _injection(dice: random.Random) -> Injection:
    moment, pick = _moment(dice), dice.randrange(1000)
    kind = dice.random()
    if kind < 0.05:
        return _to_the_job(dice, moment)
    if kind < 0.45:
        signum = dice.choice((Signals.SIGKILL, Signals.SIGSTOP, Signals.SIGTERM))
        return Injection(moment, "somebody", (signum,), pick)
    signals = dice.choice(
        (
            *((signum,) for signum in TO_END_WITH),
            *((Signals.SIGUSR1,), (Signals.SIGUSR2, Signals.SIGUSR1)),
            *((Signals.SIGSTOP,), (Signals.SIGTSTP,), (Signals.SIGCONT,)),
            *((Signals.SIGTSTP, Signals.SIGCONT), (Signals.SIGCONT, Signals.SIGTSTP)),
            *((Signals.SIGKILL,), (Signals.SIGKILL,)),
        )
    )
    return Injection(moment, "supervisor", signals)


def _kills_supervisor(injections: Iterable[Injection]) -> bool:
    return any(i.target == "supervisor" and Signals.SIGKILL in i.signals for i in injections)


def _moment(dice: random.Random) -> float:
    """Often while the workers start, sometimes when all is settled."""
    return dice.choice((dice.uniform(0, 0.03), dice.uniform(0, 0.15), dice.uniform(0.1, 0.4)))
