"""A trainer without torch, for tests of the launcher: a real process that starts in 40 ms.

It speaks the real protocol (inherited socket, step lines, credit, vectors, dump and go, signals,
exit codes) and plays `debug.drill`, with numbers that it makes up: equal on every worker, until a
fault makes them differ as in a real run. tests/e2e/test_scripted.py holds its events against those
of a real one.

Environment, each a JSON object with worker names as keys unless said otherwise:
DRILLS: the worker's own drill. IN_REPLAY: the same, for replays alone. IN_ROUND: round -> the same.
SETTINGS: a setting of its own. DETAILS: what its build phase says besides. DETAILS_IN_REPLAY: what
it says there in a replay.
ENDS: [exit code, message] of a failure before its first step.
ENDS_AFTER_TRIALS: the same, when it has told its build phase.
ENDS_AFTER: [step, exit code, message] of one behind that step.
PRINTS: a line that it prints before its first step.
VARYING: `P SEED [WORKER]` (no JSON): with probability P a pass gives other bits, on each worker (or
that one) others.
STOPS_AFTER: `WORKER STEP`: it sends itself SIGSTOP behind that step.
LATE: `WORKER SECONDS`: it tells its NaN, or that its state changed, so much later.
DIES_WHEN_ASKED, DIES_WHEN_KEEPING, HANGS_WHEN_KEEPING, LINGERS: a worker's name.
RESTS: seconds that every worker sleeps after each step.
"""

import faulthandler
import json
import math
import os
import re
import select
import signal
import socket
import sys
import time
import zlib
from pathlib import Path

from model_check.utils.fingerprint import column_weight, row_weight

WORKER = os.environ.get("MODEL_CHECK_WORKER", "CPU0")
RUN_DIR = Path(os.environ.get("MODEL_CHECK_RUN_DIR", "."))
STACKS_SIGNAL = 41
MODULUS = 1 << 64
MASK = (1 << 52) - 1
BEAT_S = 0.25
NUM_KEPT = 8
DRILL = re.compile(
    r"(?P<kind>\w+)@(?P<step>\d+)"
    r"(?::(?P<worker>(?!always$)[A-Za-z]+\d*)(?::(?P<name>(?!always$)[A-Za-z_][\w.]*)"
    r"(?::(?P<number>\d+))?|:(?P<factor>\d+(?:\.\d+)?)x)?)?(?P<always>:always)?"
)
PARAMETERS = ("tok_embed.weight", "layers.0.attention_norm.weight", "layers.0.attention.wq.weight")
PARAMETERS += ("layers.0.feed_forward.w2.weight", "norm.weight", "output.weight")
MODULES = ("tok_embed", "layers.0", "norm")
DEFAULT_PARAMETER, DEFAULT_BIT = "layers.0.feed_forward.w2.weight", 16
NUM_VALUES = 2048
FLOWS = ("forward", "backward")
STATE = ("weights", "exp_avg", "exp_avg_sq")
CONTENT = "state.json"


class Ended(Exception):
    """The worker's end: its exit code and what `done` says."""

    def __init__(self, code: int, error: str | None = None, early: str | None = None) -> None:
        self.code, self.error, self.early = code, error, early


class Requests:
    """The signals that came; a wait ends when one does."""

    def __init__(self) -> None:
        self.stop = self.notice = 0
        self._read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._note)
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._note)
        signal.signal(signal.SIGUSR1, self._note)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1, signal.SIGUSR2))

    def _note(self, signum: int, _frame: object) -> None:
        if signum == signal.SIGUSR1:
            self.notice = signum
        elif os.environ.get("LINGERS") == WORKER:
            os.write(1, f"{WORKER} lingers\n".encode())
        else:
            self.stop = signum

    def wait(self, seconds: float, *fds: int) -> None:
        ready, _, _ = select.select([self._read, *fds], [], [], max(0.0, seconds))
        if self._read in ready:
            os.read(self._read, 4096)


def mixed(*parts: object) -> int:
    """64 bits that depend on all of `parts`."""
    text = repr(parts).encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text, 1)


class Drill:
    """`debug.drill`, as far as this worker plays it."""

    kind, step, name, number, factor, always = "", -1, "", None, 1.5, False

    def __init__(self, text: str | None, is_replay: bool) -> None:
        match = DRILL.fullmatch(text or "")
        if match is None or (match["worker"] or "all").upper() not in ("ALL", WORKER):
            return
        self.always = match["always"] is not None
        if is_replay and not self.always:
            return
        self.kind, self.step = match["kind"], int(match["step"])
        self.name = match["name"] or DEFAULT_PARAMETER
        self.number = None if match["number"] is None else int(match["number"])
        self.factor = float(match["factor"] or 1.5)

    @property
    def bit(self) -> int:
        return DEFAULT_BIT if self.number is None else self.number

    @property
    def moment(self) -> tuple[str, str]:
        """The state that a flip turns over: its quantity and tensor."""
        first, _, rest = self.name.partition(".")
        if self.kind != "flip_moment":
            return "weights", self.name
        return (first, rest) if first in STATE else ("exp_avg", self.name)


class Numbers:
    """The made-up numbers of one worker. `taint` is what has gone wrong in it so far: equal taints
    give equal bits."""

    def __init__(self, seed: object, taint: str) -> None:
        self.seed, self.taint = seed, taint
        self.loss = self.grad_norm = 0.0
        self.before = self.state(-1)
        self.kept: dict[int, dict[str, dict[str, int]]] = {}

    def _value(self, step: int, quantity: str, tensor: str) -> int:
        return mixed(self.seed, step, quantity, tensor, self.taint)

    def state(self, step: int) -> dict[str, dict[str, int]]:
        return {q: {t: self._value(step, q, t) for t in PARAMETERS} for q in STATE}

    def take(self, step: int, drill: Drill | None) -> None:
        """Compute the step, with the fault of `drill` in it."""
        if drill is not None and drill.kind == "flip_activation":
            self.taint += f"|{drill.kind}@{step}"
        self.loss = 6.5 - 0.01 * step + (self._value(step, "loss", "") & MASK) * 2.0**-60
        self.grad_norm = 1.0 + (self._value(step, "grad_norm", "") & MASK) * 2.0**-60
        flows = {q: {m: self._value(step, q, m) for m in MODULES} for q in FLOWS}
        if drill is not None and drill.kind == "flip_activation":
            healthy = Numbers(self.seed, self.taint.rpartition("|")[0])
            flows["forward"]["tok_embed"] = healthy._value(step, "forward", "tok_embed")
        flows |= {q: {t: self._value(step, q, t) for t in PARAMETERS} for q in ("gradients",)}
        flows["grad_norms"] = {t: self._value(step, "grad_norms", t) for t in PARAMETERS}
        left = self.state(step)
        if drill is not None and drill.kind == "flip_gradient":
            flows["gradients"][drill.name] += row_weight(0) * column_weight(0) << drill.bit
            for found in (flows["grad_norms"], *left.values()):
                found[drill.name] += 1 << 40
            self.taint += f"|{drill.kind}@{step}:{drill.name}:{drill.bit}"
        flows |= {f"before.{q}": tensors for q, tensors in self.before.items()}
        self.kept[step] = flows | left
        self.kept.pop(step - NUM_KEPT, None)
        self.before = left

    def roll_ups(self, step: int) -> dict[str, str]:
        return {q: f"{sum(ts.values()) % MODULUS:016x}" for q, ts in self.kept[step].items()}

    def vectors(self, step: int) -> dict[str, object]:
        found = {
            q: {t: f"{v % MODULUS:016x}" for t, v in tensors.items()}
            for q, tensors in self.kept.get(step, {}).items()
        }
        sizes = {t: (NUM_VALUES, 32) for t in (*PARAMETERS, *MODULES)} if found else {}
        return {"kind": "vectors", "step": step, "fp": found, "sizes": sizes}


class Worker:
    def __init__(self, argv: list[str]) -> None:
        self.requests = Requests()
        self.replay_to = int(argv[argv.index("--replay-to") + 1]) if "--replay-to" in argv else None
        fd = os.environ.get("MODEL_CHECK_EVENTS_FD")
        self.socket = socket.socket(fileno=int(fd)) if fd else None
        self.rest = b""
        self.credit = -1 if os.environ.get("MODEL_CHECK_HELD") else None
        self.may_go = self.is_finished = False
        self.dumps: list[dict[str, object]] = []
        self.num_done = self.first_step = 0
        self.losses: list[float] = []
        self.best_loss = math.inf
        self.settings = self._settings(argv)

    def _settings(self, argv: list[str]) -> dict[str, dict[str, object]]:
        settings = json.loads(Path(argv[argv.index("--config") + 1]).read_text())
        others = [of_worker("SETTINGS"), *(a for a in argv if re.match(r"[a-z]+\.", a))]
        for name, _, text in (other.partition("=") for other in others if other):
            section, _, key = name.partition(".")
            try:
                settings[section][key] = json.loads(text)
            except ValueError:
                settings[section][key] = text
        return settings

    @property
    def drill(self) -> Drill:
        in_round = json.loads(os.environ.get("IN_ROUND", "{}")).get(RUN_DIR.name, {})
        text = of_worker("DRILLS") or in_round.get(WORKER) or self.settings["debug"]["drill"]
        if self.replay_to is not None:
            text = of_worker("IN_REPLAY") or text
        return Drill(text, self.replay_to is not None)

    def emit(self, **event: object) -> None:
        if self.socket is None:
            return
        kind = {"kind": event.pop("kind"), "t": time.monotonic_ns()}
        try:
            self.socket.sendall(json.dumps(kind | event, separators=(",", ":")).encode() + b"\n")
        except OSError:
            self._supervisor_is_gone()

    def say(self, text: str) -> None:
        """What only one rank of a job prints."""
        print(text, flush=True)

    def _supervisor_is_gone(self) -> None:
        self.socket, self.credit, self.may_go = None, None, True

    # -- what the supervisor says

    def hear(self) -> None:
        if self.socket is None:
            return
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._supervisor_is_gone()
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, command: dict[str, object]) -> None:
        match command["kind"]:
            case "credit":
                self.credit = command["step"]
            case "vectors":
                if os.environ.get("DIES_WHEN_ASKED") == WORKER:
                    wait_for_answers()
                    os.kill(os.getpid(), signal.SIGKILL)
                self.emit(**self.numbers.vectors(command["step"]))
            case "dump":
                self.dumps.append(command)
            case "go":
                self.may_go = True

    def serve(self) -> None:
        self.hear()
        for dump in [d for d in self.dumps if self.num_done >= d["step"] or self.is_finished]:
            self.dumps.remove(dump)
            self.keep("difference", dump["of_step"])

    def wait(self, is_over, hear=None) -> None:
        hear = hear or self.serve
        hear()
        beat_at = time.monotonic() + BEAT_S
        while not is_over() and not self.requests.stop and not self.asked_to_save:
            self.requests.wait(beat_at - time.monotonic(), *([self.socket] if self.socket else []))
            if time.monotonic() >= beat_at:
                self.emit(kind="beat")
                beat_at = time.monotonic() + BEAT_S
            hear()

    @property
    def asked_to_save(self) -> bool:
        return bool(self.requests.notice) and bool(self.settings["training"]["save_on_signal"])

    def check(self) -> None:
        if signum := self.requests.stop:
            name = signal.Signals(signum).name
            text = f"stopped by {name} after {len(self.losses)} steps"
            print(text, flush=True)
            raise Ended(128 + signum, text)
        if self.asked_to_save:
            self.save("last.pt")
            text = f"ended early by SIGUSR1, after {self.num_done} of {self.max_steps} steps"
            print(text, flush=True)
            raise Ended(0, early=text)

    # -- what it leaves

    def keep(self, kind: str, of_step: int, event: dict[str, object] | None = None) -> None:
        """An evidence directory without tensors."""
        if os.environ.get("DIES_WHEN_KEEPING") == WORKER:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("HANGS_WHEN_KEEPING") == WORKER:
            print(f"{WORKER} hangs", flush=True)
            while True:
                signal.pause()
        path = RUN_DIR / "dossier" / WORKER.lower() / "manifest.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"schema": 1, "worker": WORKER, "run": RUN_DIR.name, "kind": kind, "step": of_step}
        about |= {"state_after": self.num_done, "event": event or {}, "file": None, "bytes": 0}
        about |= {"sha256": None, "tensors": {}, "left_out": {}}
        path.write_text(json.dumps(about))
        print(f"Dossier saved: {path}", flush=True)
        self.emit(kind="evidence", path=str(path), what="dossier")
        if kind != "nonfinite":
            self.emit(kind="kept", step=self.num_done, of_step=of_step)

    def save(self, name: str) -> None:
        self.emit(kind="phase", name="save")
        path = self._write(name)
        self.emit(kind="saved", step=self.num_done, path=str(path), content=content_of(path))
        self.emit(kind="phase", name="train")

    def evidence(self, name: str) -> None:
        self.emit(kind="evidence", path=str(self._write(name)), what="checkpoint")

    def _write(self, name: str) -> Path:
        path = self._place() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {"step": self.num_done, "taint": self.numbers.taint}
        import zipfile  # 10 ms, which most tests do not need

        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(CONTENT, json.dumps(held | {"of": settings_hash(self.settings)}))
        print(f"Checkpoint saved: {path}", flush=True)
        return path.absolute()

    def _place(self) -> Path:
        directory = Path(self.settings["system"]["checkpoint_dir"])
        return directory if os.environ.get("MODEL_CHECK_HAS_PLACE") else directory / WORKER.lower()

    # -- the training

    @property
    def max_steps(self) -> int:
        return int(self.settings["training"]["max_steps"])

    def run(self) -> None:
        faulthandler.register(
            STACKS_SIGNAL, file=(RUN_DIR / f"{WORKER.lower()}.stacks.txt").open("a")
        )
        detail = {"schema": 1, "stacks_signal": STACKS_SIGNAL}
        self.emit(kind="phase", name="import", detail=detail)
        if failure := of_worker("ENDS"):
            code, text = failure
            print(f"error: {text}", flush=True)
            raise Ended(code, text)
        self._begin()
        end = self.max_steps if self.replay_to is None else self.replay_to + 1
        for step in range(self.first_step, end):
            self.check()
            self.serve()
            self.wait(lambda at=step: self.may_go or self.credit is None or at <= self.credit)
            self.check()
            if self.may_go and self.socket is not None:
                text = "ended early: the run goes on without this worker"
                print(text, flush=True)
                raise Ended(0, early=text)
            self._step(step)
        self._finish()

    def _begin(self) -> None:
        settings, taint, resumed = self.settings, "", settings_hash(self.settings)
        detail: dict[str, object] = {"device": "cpu", "torch": "2.13.0+cpu", "deterministic": True}
        detail |= {"device_name": "Scripted CPU", "math_environ": None, "isa": "AVX2"}
        detail |= {"num_threads": settings["system"]["num_threads"] or 1, "num_parameters": 42080}
        detail |= {"flops_per_token": 159744.0, "dtype": "float32", "settings": resumed}
        detail |= {"data": "cb122f331bb8632e", "fingerprints": "full, schema 1"}
        detail |= {"attention_candidates": "sdpa, eager", "attention_backend": "sdpa"}
        detail |= {"attention_reason": "scripted", "attention_kernel": "ScriptedAttention"}
        detail |= {"attention_package": None, "optimizer": "fused"}
        detail |= {"trial of fused AdamW": "passed", "trial of attention kernel sdpa": "passed"}
        said = of_worker("DETAILS_IN_REPLAY") if self.replay_to is not None else None
        said = of_worker("DETAILS") if said is None else said
        self.emit(kind="phase", name="build", detail=detail | (said or {}))
        if failure := of_worker("ENDS_AFTER_TRIALS"):
            print(f"error: {failure[1]}", flush=True)
            raise Ended(*failure)
        self.say("Scripted CPU, no torch: 42,080 parameters, float32, attention sdpa")
        if line := of_worker("PRINTS"):
            print(line, flush=True)
        beginning: dict[str, object] = {}
        if path := self._checkpoint():
            found = read_checkpoint(path)
            self.first_step = self.num_done = found["step"]
            taint, content = found["taint"], content_of(path)
            beginning = {"first_step": self.first_step, "resumed": str(path)}
            beginning |= {"resumed_content": content}
        self.numbers = Numbers(what_decides(settings), taint)
        self.numbers.before = self.numbers.state(self.first_step - 1)
        self.emit(kind="phase", name="train", **({"detail": beginning} if beginning else {}))

    def _checkpoint(self) -> Path | None:
        resume = self.settings["training"]["resume"]
        if resume in (None, "null"):
            return None
        if resume != "auto":
            return Path(str(resume).replace("{worker}", WORKER.lower()))
        saved = self._place().glob("*.pt")
        found = [(read_checkpoint(path)["step"], path) for path in saved]
        return max(found)[1] if found else None

    def _step(self, step: int) -> None:
        drill = self.drill
        acts = drill if drill.step == step else None
        started_at = time.monotonic()
        if acts is not None:
            self._act(acts)
        self.meet()
        changed = (
            acts if acts is not None and acts.kind in ("flip", "flip_moment", "burst") else None
        )
        if changed is not None:
            quantity, tensor = changed.moment
            before = self.numbers.before[quantity]
            before[tensor] += row_weight(0) * column_weight(0) << changed.bit
            self.numbers.taint += f"|{changed.kind}@{step}"
        repeated = self._vary(step)
        self.numbers.take(step, acts)
        self.num_done = step + 1
        if acts is not None and acts.kind in ("nan", "inf", "loss_nan"):
            self._not_finite(acts)
        self._tell(step, drill, repeated, (time.monotonic() - started_at) * 1000)
        if changed is not None:
            self._changed(changed, step)
        self._after(step)

    def _act(self, drill: Drill) -> None:
        match drill.kind:
            case "raise":
                text = f"RuntimeError: drill: raised at step {drill.step}"
                print(f"Traceback (most recent call last):\n{text}", flush=True)
                if self.replay_to is None and self.num_done > self.first_step:
                    self.emit(kind="phase", name="save")
                    self.evidence("error.pt")
                raise Ended(1, text)
            case "exit7":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while not self.requests.stop:
                    self.requests.wait(1000)
                self.check()

    def meet(self) -> None:
        """A rank waits here for the others (`ranks.py`)."""

    def _vary(self, step: int) -> bool | None:
        repeated = True if step == 0 else None
        varying = os.environ.get("VARYING", "").split()
        if varying and WORKER in (varying[2:] or [WORKER]):
            probability, seed = varying[:2]
            import random

            again = os.getpid() if self.replay_to is not None else ""
            if random.Random(f"{seed} {WORKER} {again} {step}").random() < float(probability):
                self.numbers.taint += f"|{WORKER}{again}@{step}"
                repeated = False if step == 0 else None
        return repeated

    def _tell(self, step: int, drill: Drill, repeated: bool | None, ms: float) -> None:
        loss, norm = self.numbers.loss, self.numbers.grad_norm
        training = self.settings["training"]
        tokens, lr = int(training["batch_size"]) * int(training["context_length"]), 1e-3
        slower = drill.factor if drill.kind == "slow" and step >= drill.step else 1.0
        event: dict[str, object] = {"kind": "step", "step": step, "loss": loss.hex()}
        event |= {"grad_norm": norm.hex(), "lr": lr, "ms": round(ms + 5 * slower, 3)}
        event |= {"tokens": tokens, "busy_ms": 4 * slower, "fp": self.numbers.roll_ups(step)}
        event |= {"taken": "all, all of 1"} | ({} if repeated is None else {"repeated": repeated})
        self.emit(**event)
        self.losses.append(loss)
        line = f"Step [{step}/{self.max_steps}] | Loss: {loss:.4f} | LR: {lr:.2e} | "
        self.say(f"{line}Grad Norm: {norm:.4f} | ETA: 0:00")
        rate = {} if len(self.losses) == 1 else {"tokens_per_s": 6000.0, "data_wait": 0.01}
        memory = {"memory_bytes": 1 << 28, "peak_memory_bytes": 1 << 28}
        self.emit(kind="metrics", step=step, **rate, **memory, **gates(self.settings["model"]))

    def _evaluate(self) -> None:
        """Tells a loss for each validation split."""
        validation = self.settings["data"]["validation"] or ""
        self.emit(kind="phase", name="eval")
        for number, split in enumerate(re.findall(r"(\w+)=", validation)):
            loss = self.numbers.loss + 0.5 + number
            best = {"best": True} if number == 0 and loss < self.best_loss else {}
            self.best_loss = loss if best else self.best_loss
            event = {"step": self.num_done, "split": split, "loss": loss.hex(), "tokens": 64}
            self.emit(kind="eval", **event, perplexity=math.exp(loss), tokens_per_s=6000.0, **best)
            self.say(f"Eval [{self.num_done}] {split} | Loss: {loss:.4f}")
        self.emit(kind="phase", name="train")

    def _after(self, step: int) -> None:
        time.sleep(float(os.environ.get("RESTS", 0)))
        if os.environ.get("STOPS_AFTER") == f"{WORKER} {step}" and self.replay_to is None:
            os.kill(os.getpid(), signal.SIGSTOP)
        if (failure := of_worker("ENDS_AFTER")) and failure[0] == step:
            print(f"error: {failure[2]}", flush=True)
            raise Ended(failure[1], failure[2])
        if (every := self.settings["training"]["eval_interval"]) and self.num_done % every == 0:
            self._evaluate()
        interval = self.settings["training"]["save_interval"]
        if interval and self.num_done % interval == 0 and self.replay_to is None:
            self.save(f"step_{self.num_done}.pt")

    def _be_late(self) -> None:
        late = os.environ.get("LATE", "").split()
        if late and late[0] == WORKER:
            time.sleep(float(late[1]))

    def _not_finite(self, drill: Drill) -> None:
        module, step = drill.name.removesuffix(".weight"), drill.step
        kinds = {"num_nan": int(drill.kind != "inf"), "num_inf": int(drill.kind == "inf")}
        origin = {"direction": "backward", "module": module, "tensor": "gradient of weight"}
        origin |= {"shape": [32, 64], **kinds, "first": [0, 0]}
        origin |= {"low": "-0x1.0p-9", "high": "0x1.0p-9"}
        event: dict[str, object] = {"kind": "nonfinite", "step": step, "where": "gradient"}
        event |= {"loss": self.numbers.loss.hex(), "grad_norm": "nan", "names": [drill.name]}
        event |= {"origin": origin}
        self.num_done = step
        self._be_late()
        self.emit(**event, evidence_bytes=1 << 20)
        print(f"NaN GRADIENT DETECTED [{WORKER[:3]} {WORKER[3:]}]\nStep: {step}", flush=True)
        self.emit(kind="phase", name="save")
        event |= {"repeated": drill.always}
        self.emit(**event, evidence_bytes=1 << 20)
        again = "came again" if drill.always else "did not come again"
        if self.replay_to is None:
            self.keep("nonfinite", step, {k: v for k, v in event.items() if k != "kind"})
            self.evidence(f"nan_grad_step_{step}.pt")
        text = f"step {step}, {WORKER}: gradient not finite, born in {module}; it {again}"
        print(f"error: {text}", flush=True)
        raise Ended(20, text)

    def _changed(self, drill: Drill, step: int) -> None:
        quantity, tensor = drill.moment
        event: dict[str, object] = {"kind": "break", "step": step, "quantity": quantity}
        event |= {"tensor": tensor} | ({"since": step - 1} if step > self.first_step else {})
        event |= {} if drill.kind == "burst" else {"found": [[0, drill.bit]]}
        self._be_late()
        self.emit(**event)
        found = f"bit {drill.bit} of value 0" if "found" in event else "more than one bit"
        what = tensor if quantity == "weights" else f"the {quantity} of {tensor}"
        text = f"{what} changed ({found}) before step {step}: nothing in this program did that"
        if self.replay_to is None:
            if self.credit is not None:
                self.wait(lambda: bool(self.dumps) or self.may_go or not self.socket, self.hear)
            until = min(int(self.dumps[0]["step"]), self.max_steps) if self.dumps else 0
            for at in range(self.num_done, until):
                self.numbers.take(at, None)
                self.num_done = at + 1
            if not self.requests.stop:
                self.keep("break", step, {k: v for k, v in event.items() if k != "kind"})
        print(f"error: {text}", flush=True)
        raise Ended(21, text)

    def _finish(self) -> None:
        self.check()
        if self.num_done > self.first_step:
            self.emit(**self.numbers.vectors(self.num_done - 1))
        self.is_finished = True
        self.emit(kind="finished")
        if self.settings["training"]["save_last"] and self.replay_to is None:
            self.save("last.pt")
        self.wait(lambda: self.may_go or self.credit is None or self.socket is None)
        first, last = (self.losses or [0.0])[0], (self.losses or [0.0])[-1]
        losses = f"loss {first:.4f} -> {last:.4f}"
        self.say(
            f"Trained {len(self.losses)} steps: {losses}, 6,000 tokens/s, peak memory 0.25 GiB"
        )
        raise Ended(0)

    def tell_end(self, end: Ended) -> None:
        event: dict[str, object] = {"kind": "done", "exit_code": end.code}
        event |= {} if end.error is None else {"error": end.error}
        event |= {} if end.early is None else {"early": end.early}
        event |= {"steps": len(self.losses)} if self.losses else {}
        if self.losses:
            event |= {"loss_first": self.losses[0].hex(), "loss_last": self.losses[-1].hex()}
            event |= {"tokens_per_s": 6000.0}
        self.emit(**event, peak_memory_bytes=1 << 28)


def of_worker(variable: str) -> object:
    return json.loads(os.environ.get(variable, "{}")).get(WORKER)


def settings_hash(settings: dict[str, dict[str, object]]) -> str:
    """What must be equal for workers to be compared."""
    training = {k: v for k, v in settings["training"].items() if k != "resume"}
    return (
        f"{mixed(settings['model'], training, settings['data'], settings['system']['seed']):016x}"
    )


def what_decides(settings: dict[str, dict[str, object]]) -> tuple[object, ...]:
    """What the numbers of a run depend on."""
    training = [settings["training"][key] for key in ("learning_rate", "batch_size")]
    return settings["system"]["seed"], settings["model"], *training


def gates(model: dict[str, object]) -> dict[str, object]:
    """What the metrics of Infini-attention tell besides."""
    if model["attention"] != "infini":
        return {}
    share = 1 / (1 + math.exp(-model["infini"]["gate_init"]))
    return {"gates": [[share] * model["num_heads"]] * model["num_layers"]}


def content_of(path: Path) -> str:
    # 20 ms, of which workers that save nothing need none.
    from model_check.utils import checkpoint_names

    return checkpoint_names.content_of(path)


def read_checkpoint(path: Path) -> dict[str, object]:
    """What `save` wrote: an archive, as a real one is."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read(CONTENT))


def wait_for_answers() -> None:
    """Until the others have answered, or for less than their launcher waits."""
    until = time.monotonic() + 1.5
    others = [p for p in RUN_DIR.glob("*.events.jsonl") if not p.name.startswith(WORKER.lower())]
    while time.monotonic() < until:
        if all('"kind":"vectors"' in path.read_text() for path in others):
            return
        time.sleep(0.01)


def main(make: type[Worker] = Worker) -> None:
    worker = make(sys.argv[1:])
    try:
        worker.run()
    except Ended as end:
        worker.tell_end(end)
        sys.stdout.flush()
        os._exit(end.code)


if __name__ == "__main__":
    if "RANK" in os.environ:
        from tests.scripted.ranks import main
    main()
