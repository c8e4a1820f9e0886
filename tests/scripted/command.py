"""A training that is no program of ours, without torch: it sends the events of a checked command,
with numbers that it makes up. `python command.py [CASE ...]`, with any of these, or with some in
SCRIPTED_CASES:

steps=N: so many, 8 otherwise. gradient@STEP:WORKER, momentum@STEP:WORKER: one bit of it flips.
weights, batch, order: first weights, batches with other random numbers, batches with equal ones
differ in all workers. `weights` and `batch` heed MODEL_CHECK_SEED; `reseed`: as `batch`, but does
not. varies:WORKER: what it calls again gives other bits.
silent: it tells nothing. breaks@STEP:WORKER: nobody watches it any more behind that step.
short:WORKER: it does one step less.
once: a flip is of the run alone. strays:WORKER: that one differs from step 1 on where it is
computed again. writes: it writes out-WORKER where it starts. beside: another
process of it trains, too. source=TEXT: what its file holds. exits=N: its exit code, not told.
"""

import json
import os
import re
import select
import socket
import sys
import time
import zlib

from model_check.utils.fingerprint import column_weight, row_weight

WORKER = os.environ["MODEL_CHECK_WORKER"]
SEED = os.environ.get("MODEL_CHECK_SEED")
TENSORS = ("embed.weight", "blocks.0.weight", "head.weight")
BIT = row_weight(0) * column_weight(7) << 9
STATE = ("momentum_buffer", "weights")


def case(name: str) -> str | None:
    """What stands behind it; None: it was not given. `@STEP:WORKER`: nothing on other workers."""
    for each in (*sys.argv[1:], *os.environ.get("SCRIPTED_CASES", "").split()):
        match = re.fullmatch(rf"{name}(?:=(\w+)|@(\d+):(\w+)|:(\w+))?", each)
        if match is not None:
            number, step, of_step, of_all = match.groups()
            who = of_step or of_all
            return None if who not in (None, WORKER) else number or step or ""
    return None


def made_up(*parts: object) -> int:
    text = repr(parts).encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text, 1)


def is_again() -> bool:
    return "MODEL_CHECK_REPLAY" in os.environ


def own(*names: str) -> str:
    """Differs between workers in these cases, unless a seed is heeded."""
    if any(case(name) is not None for name in ("order", "reseed") if name in names):
        return WORKER
    is_asked_for = any(case(name) is not None for name in names)
    return WORKER if is_asked_for and SEED is None else ""


class Told:
    """The socket to the supervisor, and what it has allowed."""

    def __init__(self) -> None:
        self.socket = socket.socket(fileno=int(os.environ["MODEL_CHECK_EVENTS_FD"]))
        self.credit = -1 if os.environ.get("MODEL_CHECK_HELD") else 1 << 40
        self.may_go = not os.environ.get("MODEL_CHECK_HELD")
        self.kept: dict[int, dict[str, dict[str, int]]] = {}
        self.done = 0
        self.rest = b""

    def emit(self, kind: str, **event: object) -> None:
        line = {"kind": kind, "t": time.monotonic_ns()} | event
        try:
            self.socket.sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            self.credit, self.may_go = 1 << 40, True

    def vectors(self, step: int) -> None:
        found = {
            quantity: {name: f"{value % (1 << 64):x}" for name, value in tensors.items()}
            for quantity, tensors in self.kept.get(step, {}).items()
        }
        sizes = {name: (4096, 32) for name in (*TENSORS, "0")}
        self.emit("vectors", step=step, fp=found, sizes=sizes)

    def wait(self, is_over) -> None:
        while not is_over():
            select.select([self.socket], [], [], 0.25)
            self.hear()
            self.emit("beat")

    def hear(self) -> None:
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            self.credit, self.may_go = 1 << 40, True
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if command["kind"] == "credit":
                self.credit = command["step"]
            elif command["kind"] == "vectors":
                self.vectors(command["step"])
            elif command["kind"] == "dump":
                self.emit("kept", step=self.done, of_step=command["of_step"])
            else:
                self.may_go = True


def computed(step: int, taint: str) -> dict[str, dict[str, int]]:
    first = own("weights")
    batch = own("batch", "order", "reseed")

    def tensors(quantity: str, at: int) -> dict[str, int]:
        return {n: made_up(quantity, at, n, taint, first, batch) for n in TENSORS}

    before = {f"before.{q}": tensors(q, step - 1) for q in STATE if step or q == "weights"}
    if step == 0:
        before["before.weights"] = {n: made_up("weights", n, first) for n in TENSORS}
    flows = {"forward": tensors("forward", step), "gradients": tensors("gradients", step)}
    after = {quantity: tensors(quantity, step) for quantity in STATE}
    return {"inputs": {"0": made_up("inputs", step, batch)}} | before | flows | after


def called_again() -> dict[str, object]:
    """What came of the calls of the last step, made again."""
    bits = WORKER if case("varies") is not None else "equal"
    return {"calls bits 2": bits, "calls bits 4": bits}


def train(told: Told) -> None:
    last = os.environ.get("MODEL_CHECK_STOP_AFTER")
    num_steps = int(case("steps") or 8) - (case("short") is not None)
    taint = ""
    for step in range(num_steps):
        told.wait(lambda at=step: told.may_go or at <= told.credit)
        found = computed(step, taint)
        loss = 5.0 - 0.1 * step + made_up(step, taint) * 2.0**-70
        flips = case("once") is None or not is_again()
        if case("strays") is not None and is_again() and step == 1:
            found["gradients"][TENSORS[1]] += BIT
        if flips and (at := case("gradient")) and int(at) == step:
            found["gradients"][TENSORS[1]] += BIT
            taint = f"{WORKER}@{step}"
            found |= {q: computed(step, taint)[q] for q in STATE}
        if flips and (at := case("momentum")) and int(at) == step:
            found["momentum_buffer"][TENSORS[1]] += BIT
        told.kept[step] = found
        rolled = {q: f"{sum(each.values()) % (1 << 64):x}" for q, each in found.items()}
        rolled["rng.torch"] = f"{made_up(step, own('weights', 'batch', 'reseed')):x}"
        told.emit(
            "step", step=step, loss=loss.hex(), grad_norm=(1.0).hex(), lr=0.1, ms=2.0, tokens=64,
            fp=rolled, taken="all, all of 1",
        )  # fmt: skip
        told.done = step + 1
        if (at := case("breaks")) and int(at) == step:
            told.emit("note", text=f"not watched from step {told.done} on: RuntimeError: test")
            told.emit("note", text="no fingerprint is taken of the odd of weight")
            told.emit("finished")
            return
        if last is not None and int(last) == step:
            if is_again():
                told.emit("phase", name="train", detail=called_again())
            break
    told.vectors(told.done - 1)
    told.emit("finished")
    told.wait(lambda: told.may_go)
    told.emit("done", exit_code=0, steps=told.done)


def main() -> None:
    print(f"trains on {WORKER}", flush=True)
    if case("writes") is not None:
        with open(f"out-{WORKER}", "a") as out:
            out.write("a training\n")
    if case("silent") is not None or not os.environ.get("MODEL_CHECK_INSTRUMENT"):
        return
    told = Told()
    detail = {
        "device_name": "Scripted CPU",
        "num_threads": 1,
        "torch": "2.13.0",
        "dtype": "float32",
    }
    detail |= {"deterministic": False, "fingerprints": "full, schema 1", "settings": "0123"}
    detail["source command.py"] = case("source") or "4567"
    told.emit("phase", name="import", detail={"schema": 1})
    told.emit("phase", name="build", detail=detail | {"optimizer": "SGD"})
    told.emit("phase", name="train")
    if case("beside") is not None:
        told.emit("note", text="another process trains, too", unwatched=os.getpid() + 1)
    train(told)
    print("trained", flush=True)
    sys.exit(int(case("exits") or 0))


main()
