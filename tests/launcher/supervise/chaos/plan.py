"""What happens in a round, drawn from its seed: who misbehaves, and which signals fall. Pure."""

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Literal

MISCHIEF = str(Path(__file__).with_name("mischief.py"))
TO_END_WITH = (Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGQUIT)
DEADLY = (
    *(Signals.SIGKILL, Signals.SIGSEGV, Signals.SIGABRT, Signals.SIGTERM),
    *(Signals.SIGINT, Signals.SIGHUP, Signals.SIGPIPE, Signals.SIGUSR1),
)
WAYS = (
    *("session", "orphan", "deaf", "quiet", "shell", "chatter", "bare", "brief"),
    *("hop", "leap"),  # fork and end, again and again: a new pid whenever somebody looks
)

Target = Literal["supervisor", "somebody", "guardian"]
Terminal = Literal["file", "blocked", "closed"]


@dataclass(frozen=True)
class Injection:
    """Signals to send, one after the other, some time after the injection before."""

    after_s: float
    target: Target
    signals: tuple[Signals, ...]
    pick: int = 0
    """Of `somebody`: which of those who are known by then, modulo their number."""


@dataclass(frozen=True)
class Round:
    """One supervised run and all that goes wrong in it."""

    seed: str
    commands: dict[str, tuple[str, ...]]
    with_events: tuple[str, ...]
    grace_s: float
    silence_s: float
    terminal: Terminal
    injections: tuple[Injection, ...]

    @property
    def kills_supervisor(self) -> bool:
        return _kills_supervisor(self.injections)

    def actions(self, name: str) -> Sequence[str]:
        """What a worker does; nothing for a command that is none of ours."""
        argv = self.commands[name]
        return argv[argv.index(MISCHIEF) + 2 :] if MISCHIEF in argv else ()


def draw(seed: str) -> Round:
    """The round of this seed, the same on every machine."""
    dice = random.Random(seed)
    names = [f"W{i}" for i in range(dice.choice((1, 2, 2, 3, 3, 4)))]
    injections = _injections(dice)
    # Whoever has left its session AND its environment is known by its descent alone, and when the
    # supervisor is dead there is nothing to descend from: docs/supervisor.md, Limits.
    ways = WAYS
    if _kills_supervisor(injections):
        ways = tuple(way for way in WAYS if way != "bare")
    return Round(
        seed=seed,
        commands={name: _command(dice, name, ways) for name in names},
        with_events=tuple(name for name in names if dice.random() < 0.6),
        grace_s=dice.choice((0.05, 0.2, 0.4)),
        silence_s=dice.choice((0.0, 0.0, 0.0, 0.0, 0.4)),
        terminal=dice.choice(("file", "file", "file", "blocked", "closed")),
        injections=injections,
    )


def _command(dice: random.Random, name: str, ways: Sequence[str]) -> tuple[str, ...]:
    kind = dice.random()
    if kind < 0.03:
        return ("no-such-command", "x")
    if kind < 0.05:
        return ("/etc/passwd",)
    if kind < 0.15:
        return ("/bin/sh", "-c", _shell(dice))
    actions = [_action(dice, ways) for _ in range(dice.randint(0, 5))]
    return (sys.executable, "-I", "-S", MISCHIEF, name, *actions, *_ending(dice))


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


def _action(dice: random.Random, ways: Sequence[str]) -> str:
    return dice.choice(
        (
            *(f"say:{dice.randint(1, 60)}", f"bars:{dice.randint(2, 40)}", "half"),
            *(f"binary:{dice.randint(1, 9000)}", f"flood:{dice.randint(1, 12)}"),
            *("close", "deaf", "stop", f"polite:{dice.choice((0, 0, 5))}"),
            *(f"nap:{dice.randint(1, 60)}", f"events:{_event_kind(dice)}"),
            *(_child(dice, ways) for _ in range(4)),
        )
    )


def _event_kind(dice: random.Random) -> str:
    return dice.choice(("beats", "beats", "garbage", "torn", "huge", "nan", "0", "20"))


def _child(dice: random.Random, ways: Sequence[str]) -> str:
    return "child:" + "+".join(sorted(dice.sample(ways, dice.randint(1, 4))))


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
    if dice.random() < 0.45:
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
