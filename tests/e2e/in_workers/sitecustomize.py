"""Python reads this when its directory is on PYTHONPATH: faults that no one drill can make.

Most tests of the launcher need no real trainer, and so none of this: tests/scripted has the same.

DRILLS: JSON, worker -> its own drill. IN_REPLAY: the same, in replays alone. IN_ROUND: JSON, round
-> the same, in that one alone. SETTINGS: JSON, worker -> a setting of its own.
VARYING: `P SEED [WORKER]`, and with probability P the output of the first block has one bit turned
over, in each worker (or that one) another one, each time that it is computed; the file
WORKER.varied in the run directory counts them. LATE: `WORKER SECONDS`, that worker tells its NaN,
or that its state changed, so much later. LINGERS: the worker that tells SIGTERM and does not heed
it. RESTS: seconds that each worker sleeps after each step, so that many of them cost no CPU. FIRST:
`WORKER batch|loss once|always`: its first step begins with another token, or its loss has one bit
turned over (once: not in its rehearsal); always: in each replay, too. KERNEL: JSON, worker -> what
torch's attention does there in its backward pass: `nan`, `hang`.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

# torchrun's ranks have a number alone.
WORKER = os.environ.get("MODEL_CHECK_WORKER", f"CPU{os.environ.get('RANK')}")


def main() -> None:
    for variable in ("DRILLS", *(["IN_REPLAY"] if "--replay-to" in sys.argv else [])):
        if drill := json.loads(os.environ.get(variable, "{}")).get(WORKER):
            sys.argv.append(f"debug.drill={drill}")
    in_round = json.loads(os.environ.get("IN_ROUND", "{}"))
    if drill := in_round.get(Path(os.environ.get("MODEL_CHECK_RUN_DIR", "")).name, {}).get(WORKER):
        sys.argv.append(f"debug.drill={drill}")
    if setting := json.loads(os.environ.get("SETTINGS", "{}")).get(WORKER):
        sys.argv.append(setting)
    varying = os.environ.get("VARYING", "").split()
    if varying and WORKER in (varying[2:] or [WORKER]):
        probability, seed = varying[:2]
        again = os.getpid() if "--replay-to" in sys.argv else ""
        vary(float(probability), random.Random(f"{seed} {WORKER} {again}"))
    if (late := os.environ.get("LATE", "").split()) and late[0] == WORKER:
        tell_late(float(late[1]))
    if os.environ.get("LINGERS") == WORKER:
        linger()
    if rest_s := os.environ.get("RESTS"):
        rest(float(rest_s))
    first = os.environ.get("FIRST", "").split()
    if first and first[0] == WORKER and (first[2] == "always" or "--replay-to" not in sys.argv):
        spoil_first_step(*first[1:])
    if fault := json.loads(os.environ.get("KERNEL", "{}")).get(WORKER):
        err_in_attention(fault)


def spoil_first_step(what: str, how_often: str) -> None:
    import torch

    from model_check import train

    gather, train_step, backward = train.gather, train.train_step, train.backward
    is_due = [how_often == "always"]

    def gathered(*arguments: Any, **options: Any) -> Any:
        data = gather(*arguments, **options)
        if what == "batch" and data.step == 0:
            data.micro_batches[0][0][0, 0] ^= 1
        return data

    def trained(context: Any, data: Any, *others: Any) -> Any:
        is_due[0] |= data.step == 0
        result = train_step(context, data, *others)
        is_due[0] = False
        return result

    def passed(*arguments: Any) -> Any:
        loss = backward(*arguments)
        if what == "loss" and is_due[0]:
            loss = (loss.reshape(1).view(torch.int32) ^ 8).view(loss.dtype)[0]
        return loss

    train.gather, train.train_step, train.backward = gathered, trained, passed  # type: ignore[assignment]


def err_in_attention(fault: str) -> None:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention

    def erring(q: Any, k: Any, v: Any, **options: Any) -> Any:
        # Not of the keys themselves: the trial calls it several times with the same ones.
        seen = k.view_as(k)
        if seen.requires_grad:
            seen.register_hook(lambda gradient: spoilt(gradient, fault))
        return attend(q, seen, v, **options)

    torch.nn.functional.scaled_dot_product_attention = erring


def spoilt(gradient: Any, fault: str) -> Any:
    import torch

    if fault == "hang":
        time.sleep(1000)
    values = gradient.clone(memory_format=torch.contiguous_format).view(-1)
    values[random.randrange(len(values))] = float("nan")
    return values.view_as(gradient)


def vary(probability: float, dice: random.Random) -> None:
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    first_block: list[torch.nn.Module] = []

    def spoil(module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        if type(module).__name__ == "Block" and not first_block:
            first_block.append(module)
        if [module] != first_block or dice.random() >= probability:
            return None
        count()
        other = output.clone()
        values = other.data.view(torch.int32).view(-1)
        values[dice.randrange(len(values))] ^= 1 << dice.randrange(23)
        return other

    register_module_forward_hook(spoil)


def count() -> None:
    with (Path(os.environ["MODEL_CHECK_RUN_DIR"]) / f"{WORKER}.varied").open("a") as file:
        file.write("x")


def linger() -> None:
    from model_check.engine.stop import StopSignal

    # No print: the signal may come in one, which refuses a second.
    StopSignal._on_stop = lambda *_: os.write(1, f"{WORKER} lingers\n".encode())  # type: ignore[method-assign, assignment]


def rest(seconds: float) -> None:
    from model_check.events import Event, EventSink, Step

    told = EventSink.emit

    def emit(sink: EventSink, event: Event) -> None:
        told(sink, event)
        if isinstance(event, Step):
            time.sleep(seconds)

    EventSink.emit = emit  # type: ignore[method-assign]


def tell_late(seconds: float) -> None:
    from model_check.events import Break, Event, EventSink, NonFinite

    told = EventSink.emit

    def emit(sink: EventSink, event: Event) -> None:
        if isinstance(event, Break) or (isinstance(event, NonFinite) and event.origin is None):
            time.sleep(seconds)
        told(sink, event)

    EventSink.emit = emit  # type: ignore[method-assign]


if WORKER and Path(sys.argv[0]).name == "pretrain_main.py":
    main()
