"""What every round must keep, whatever went wrong in it. Each check yields what was broken."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from launcher.output.view import MAX_LINE_BYTES
from model_check.errors import exit_code_of
from model_check.utils.requests import REQUESTS
from tests.launcher.supervise.chaos.mischief import payload
from tests.launcher.supervise.chaos.plan import Round
from tests.launcher.supervise.chaos.play import Played, entries, num_discarded_stops

EXIT_HANG = 124
_CONTROL = {*range(32), 127} - {ord("\t")}
_CONFESSIONS = {"events:20": 20, "events:nan": 20}
_PROMPT_S = 0.1
"""A job that is signalled within half of the supervisor's hold: longer gaps are the harness's own,
on a busy machine, and prove nothing."""
_CANNOT_START = {"no-such-command": 127, "/etc/passwd": 126}


def broken_promises(played: Played) -> list[str]:
    """All of them, in words; empty: the round was clean."""
    found = list(_nobody_is_left(played))
    if played.result is None:
        found += _only_a_kill_ends_the_supervisor(played)
    else:
        found += _the_process_is_as_before(played.result)
        found += _the_ends_are_told_as_they_were(played, played.result["outcome"])
        found += _the_exit_code_is_the_culprits(played, played.result["outcome"])
        found += _the_themes_promise_is_kept(played, played.result["outcome"])
        found += _the_terminal_is_readable(played)
    for name in played.plan.commands:
        found += _the_bytes_are_complete(played, name)
    return found + list(_nothing_went_wrong_inside(played))


def _nobody_is_left(played: Played) -> Iterator[str]:
    for who in played.left:
        yield f"left behind: {who}"


def _only_a_kill_ends_the_supervisor(played: Played) -> Iterator[str]:
    if Signals.SIGKILL not in played.sent_to_us or played.returncode != -Signals.SIGKILL:
        yield f"the supervisor ended by itself with {played.returncode} (hung: {played.hung})"


def _the_process_is_as_before(result: dict[str, Any]) -> Iterator[str]:
    for what, before in result["before"].items():
        if result["after"][what] != before:
            yield f"{what} were {before} and are {result['after'][what]}"


def _the_ends_are_told_as_they_were(played: Played, outcome: dict[str, Any]) -> Iterator[str]:
    """A return code is one that the worker meant, or the signal that we know hit it."""
    if outcome["leftovers"]:
        yield f"leftovers {outcome['leftovers']}"
    for record in outcome["workers"]:
        code = record["returncode"]
        if code is None:
            if record["pid"] is not None:
                yield f"{record['name']} has no return code"
            continue
        allowed = _possible_ends(played, record)
        if allowed is not None and code not in allowed:
            yield f"{record['name']} ended with {code}, possible were {sorted(allowed)}"


def _possible_ends(played: Played, record: dict[str, Any]) -> set[int] | None:
    """None: anything, of a command that keeps no books."""
    name = record["name"]
    program = played.plan.commands[name][0]
    if program in _CANNOT_START:
        allowed = {_CANNOT_START[program]} | {-signum for signum in played.sent_to_all}
    elif not played.plan.actions(name):
        return None
    else:
        allowed = _meant_to_end(played, name) | {-signum for signum in _signals_to(played, name)}
    if record["stopped_by_us"]:
        allowed |= {-Signals.SIGTERM, -Signals.SIGKILL}
    return allowed


def _meant_to_end(played: Played, name: str) -> set[int]:
    return {int(code) for worker, code, _ in _rows(played.dir / "ends") if worker == name}


def _signals_to(played: Played, name: str) -> set[Signals]:
    """What we sent it or the whole job, and what the supervisor passed on."""
    pids = [e.pid for e in entries(played.dir) if e.worker == name and e.role == "leader"]
    sent = {signum for pid in pids for signum in played.sent_to.get(pid, ())}
    sent |= played.sent_to_all
    return sent | (played.sent_to_us & {Signals.SIGUSR1, Signals.SIGUSR2})


def _the_exit_code_is_the_culprits(played: Played, outcome: dict[str, Any]) -> Iterator[str]:
    end, code = outcome["end"], outcome["exit_code"]
    if end["reason"] is None:
        if code != 0 or any(record["returncode"] != 0 for record in outcome["workers"]):
            yield f"no reason to stop, exit code {code}, and yet {outcome['workers']}"
        return
    if code == 0:
        yield f"the run ended with {code}, the reason says {end}"
    records = {record["name"]: record for record in outcome["workers"]}
    culprits = [records[name] for name in (*end["culprits"], *end["tied"])]
    allowed = {exit_code for culprit in culprits for exit_code in _blame(played, culprit)}
    if not culprits:
        allowed = {128 + signum for signum in played.sent_to_us if signum in REQUESTS}
    elif played.plan.silence_s > 0:
        allowed.add(EXIT_HANG)
    if code not in allowed:
        yield f"the run ended with {code}, {end} allows {sorted(allowed)}"


def _blame(played: Played, culprit: dict[str, Any]) -> Iterator[int]:
    if not culprit["stopped_by_us"]:
        yield exit_code_of(culprit["returncode"])
    for action in played.plan.actions(culprit["name"]):
        if action in _CONFESSIONS:
            yield _CONFESSIONS[action]


def _the_themes_promise_is_kept(played: Played, outcome: dict[str, Any]) -> Iterator[str]:
    match played.plan.theme:
        case "job" if played.gap_s < _PROMPT_S:
            yield from _nobody_is_blamed(played, outcome)
        case "terminal":
            yield from _nobody_is_blamed(played, outcome)
            if Signals.SIGTSTP in played.sent_to_us and num_discarded_stops(played) == 0:
                yield "a Ctrl-Z that nobody could take back was not discarded"
        case "flood":
            if outcome["end"]["culprits"] != [name := who_fails(played.plan)]:
                yield f"{name} failed, and {outcome['end']['culprits']} are blamed"
            if not _was_said(played, f"{name} failed first"):
                yield f"nothing was said of the failure of {name}"


def _nobody_is_blamed(played: Played, outcome: dict[str, Any]) -> Iterator[str]:
    """A run that is told to end, and does. Its workers may have ended well just before."""
    end, allowed = outcome["end"], {128 + signum for signum in played.sent_to_us}
    if end["culprits"] or end["tied"]:
        yield f"a request ended the run, and workers are blamed: {end}"
    if end["exit_code"] not in allowed:
        yield f"the run ended with {end['exit_code']}, its requests allow {sorted(allowed)}"


def _was_said(played: Played, text: str) -> bool:
    return text in _read(played.dir / "launcher.log").decode()


def who_fails(plan: Round) -> str:
    """The one worker of a peaceful round that does not stay."""
    return next(name for name in plan.commands if plan.actions(name)[-1] != "stay")


def news_s(played: Played) -> float | None:
    """From the end of the worker that failed in a flood to the supervisor's word of it; None: this
    round has no such worker."""
    if played.plan.theme != "flood" or played.result is None:
        return None
    name = who_fails(played.plan)
    ended = [float(at) for worker, _, at in _rows(played.dir / "ends") if worker == name]
    told = [at for at, text in played.result["said"] if text.startswith(f"{name} failed first")]
    return min(told) - min(ended) if told and ended else None


def _the_bytes_are_complete(played: Played, name: str) -> Iterator[str]:
    """The log is what its worker wrote, in order; of what it surely wrote nothing is missing,
    unless the supervisor was killed with bytes in its pipes."""
    actions = played.plan.actions(name)
    if not actions:
        return
    log = _read(played.dir / f"{name}.log")
    mine = log.replace(b"\0", b"")
    full = _all_output(actions)
    if not full.startswith(mine):
        yield f"{name}.log is not what {name} wrote: {len(mine)} bytes of {len(full)}"
    if played.result is None:
        return
    if len(mine) < (written := _counted(played, f"{name}.written")):
        yield f"{name}.log has {len(mine)} bytes, {written} were written"
    if log.count(0) < (written := _counted(played, f"{name}.*.zeros")):
        yield f"{name}.log has {log.count(0)} bytes of children, {written} were written"
    sent, kept = _counted(played, f"{name}.sent"), len(_read(played.dir / f"{name}.events"))
    if kept < sent:
        yield f"{name}.events has {kept} bytes, {sent} were sent"


def _all_output(actions: Sequence[str]) -> bytes:
    pieces = []
    for action in actions:
        verb, _, argument = action.partition(":")
        if verb == "close":
            break
        pieces += payload(verb, int(argument) if argument.isdigit() else 0)
    return b"".join(pieces)


def _counted(played: Played, pattern: str) -> int:
    return sum(int(path.read_text() or 0) for path in played.dir.glob(pattern))


def _the_terminal_is_readable(played: Played) -> Iterator[str]:
    for line in _read(played.dir / "terminal").split(b"\n")[:-1]:
        if len(line) >= MAX_LINE_BYTES:
            yield f"a line of {len(line)} bytes on the terminal"
        if not line.startswith((b"[W", b"[launcher] ")) or _CONTROL & set(line):
            yield f"the terminal shows {line[:200]!r}"


def _nothing_went_wrong_inside(played: Played) -> Iterator[str]:
    for path in (played.dir / "launcher.log", played.dir.parent / "stderr"):
        text = _read(path).decode(errors="replace")
        if "Traceback" in text or (path.name == "stderr" and text):
            yield f"{path.name}: {text[-3000:]}"


def told(played: Played, broken: list[str]) -> str:
    """A broken round, for people: how to see it again, what was planned, what was seen."""
    plan = played.plan
    lines = [f"round {plan.seed} broke its promises:", *(f"  - {what}" for what in broken)]
    lines += [f"  {name}: {' '.join(argv[-9:])}" for name, argv in plan.commands.items()]
    lines += [f"  {injection}" for injection in plan.injections]
    lines += [f"  {plan.theme}: grace {plan.grace_s}, silence {plan.silence_s}, {plan.terminal}"]
    lines += ["  " + json.dumps(played.result["outcome"])] if played.result else []
    lines += ["  " + line for line in _read(played.dir / "launcher.log").decode().splitlines()]
    return "\n".join(lines)


def _rows(path: Path) -> list[list[str]]:
    return [line.split() for line in _read(path).decode().splitlines()]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
