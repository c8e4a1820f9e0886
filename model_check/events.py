"""The events that a worker sends, and those about its GPU: typed, one JSON object a line. The
worker and the supervisor share this file.

Floats that are compared travel as hex text (`float.hex`), never as decimal text; NaN and
infinities are the strings "nan", "inf", "-inf", which `float.fromhex` reads back. Times are
CLOCK_MONOTONIC nanoseconds: comparable between processes of one machine.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import msgspec

from model_check.utils.fingerprint import describe_flip, label

STACKS_SIGNAL = "stacks_signal"
"""A key of a phase's detail: the number of the signal at which the worker writes its stacks."""

_READ_BYTES = 1 << 16
PhaseName = Literal["import", "build", "compile", "train", "eval", "save"]
Scalar = str | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | float | bool | None


MonotonicNs = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""CLOCK_MONOTONIC, nanoseconds."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    t: MonotonicNs = 0
    """Stamped by the writer."""


class Phase(_Event, frozen=True, kw_only=True, tag="phase"):
    """The worker enters a phase. Each phase has its own limit of normal silence."""

    name: PhaseName
    detail: dict[str, Scalar] = {}


# What `float.hex()` writes, within the range of a double: `float.fromhex` reads it without error.
ExactFloat = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^(nan|-?inf|-?0x[01](\.[0-9a-f]{1,13})?p"
        r"(\+(\d{1,3}|10[01]\d|102[0-3])|-(\d{1,3}|10[0-6]\d|107[0-4])))$"
    ),
]
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,16}$")]
"""A fingerprint, hex."""
Natural = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
"""Numbers of events are bounded: what reads them may make a float of any, and add them up."""
Milliseconds = Annotated[float, msgspec.Meta(ge=0, lt=2.0**53)]
ExitCode = Annotated[int, msgspec.Meta(ge=0, le=255)]


class Step(_Event, frozen=True, kw_only=True, tag="step"):
    """One finished optimizer step. `loss` and `grad_norm` are exact bits, as `float.hex()`."""

    step: Natural
    loss: ExactFloat | None
    """None: a command called no backward pass of a single value."""
    grad_norm: ExactFloat
    lr: float
    ms: Milliseconds
    """Wall time of the step, milliseconds."""
    tokens: Natural
    """Tokens that this step trained on, all micro-batches together."""
    busy_ms: Milliseconds | None = None
    """What it kept its device busy, milliseconds: by the GPU's own clock, or the CPU time of this
    process. None: not measured."""
    fp: dict[str, Sum] = {}
    """The roll-up of each quantity's fingerprints (see utils.fingerprint.QUANTITIES); only
    what the slot of this step covers."""
    taken: str = ""
    """Which tensors those cover: only equal ones can be compared."""
    repeated: bool | None = None
    """Of the first step: whether its forward and backward pass gave equal bits when it was computed
    twice. None: it was computed once."""
    own_loss: ExactFloat | None = None
    """This rank's share of `loss`, which is then the sum of all; None: it trains alone."""
    wait_ms: Milliseconds | None = None
    """How long this rank waited for the others; None: it trains alone."""


class Vectors(_Event, frozen=True, kw_only=True, tag="vectors"):
    """The fingerprints of one step, each tensor by itself: the answer to AskVectors, and of the
    last step without being asked."""

    step: Natural
    fp: dict[str, dict[str, Sum]] = {}
    """Quantity -> tensor -> fingerprint. Empty: the step is not known (any more)."""
    sizes: dict[str, tuple[Natural, Natural]] = {}
    """Tensor of a parameter or a site -> its number of values, and the bits of each."""


class Break(_Event, frozen=True, kw_only=True, tag="break"):
    """A weight, a buffer or a moment of AdamW has changed between two updates: nothing here did
    that."""

    step: Natural
    """The step whose update found it changed."""
    quantity: str
    """`weights`, `exp_avg`, `exp_avg_sq`"""
    tensor: str
    num_tensors: Natural = 1
    """All that have changed; `tensor` is the first, in the order of the model."""
    since: Natural | None = None
    """After the update of this step it was as it had to be."""
    found: list[tuple[Natural, Natural]] = []
    """(element, bit) of the flipped bit; several where the sums leave a choice, none where more
    than one value has changed."""
    is_finite: bool = True
    """Whether all that it keeps is finite."""

    @property
    def kept_as(self) -> str:
        """What a dossier calls the tensor."""
        return f"{self.quantity}/{self.tensor}"

    @property
    def what(self) -> str:
        """`layers.0.attention.wq.weight changed (bit 9 of value 77) after the update of step 6`"""
        more = f" and {self.num_tensors - 1} more" if self.num_tensors > 1 else ""
        since = "the start" if self.since is None else f"the update of step {self.since}"
        became = "" if self.is_finite else ", to what is not finite,"
        return (
            f"{label(self.quantity, self.tensor)}{more} changed ({describe_flip(self.found)})"
            f"{became} after {since}"
        )


class Metrics(_Event, frozen=True, kw_only=True, tag="metrics"):
    """Speed and memory over the steps since the last such event. None: not known."""

    step: Natural
    """The last step that it covers."""
    tokens_per_s: float | None = None
    mfu_full: float | None = None
    """Model FLOPs utilisation, 0 to 1, counting attention to every token; see
    hooks.observe.mfu."""
    mfu_causal: float | None = None
    """The same, counting attention to earlier tokens alone."""
    data_wait: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Share of the time that steps waited for their batches."""
    memory_bytes: Natural
    """Allocated on the device, or the resident set on a CPU."""
    peak_memory_bytes: Natural
    loss_scale: float | None = None
    """With float16."""
    gates: list[list[float]] | None = None
    """With Infini-attention, [layers][query heads]: the memory's share of each head's output."""


class Evaluation(_Event, frozen=True, kw_only=True, tag="eval"):
    """The loss on one validation split."""

    step: Natural
    """Optimizer steps done before this evaluation."""
    split: str
    loss: ExactFloat
    """Mean over the split's targets, or over those of its first `training.eval_batches` batches."""
    perplexity: float | None = None
    """exp(loss); None where that is not finite."""
    tokens: Natural
    """Targets that counted."""
    tokens_per_s: float | None = None
    token_accuracy: float | None = None
    """Of training.stage=prompt_target: the share of targets that were the likeliest token, each
    after the right ones before it, 0 to 1."""
    exact_match: float | None = None
    """The share of examples whose targets all were: what greedy decoding gives whole, 0 to 1."""
    examples: Natural | None = None
    """Examples that counted."""
    best: bool = False
    """The lowest loss on `training.best_split` so far."""


class Sample(_Event, frozen=True, kw_only=True, tag="sample"):
    """What the model says to a prompt."""

    step: Natural
    """Optimizer steps done before."""
    prompt: str
    text: str
    """What follows the prompt."""


class Beat(_Event, frozen=True, kw_only=True, tag="beat"):
    """Still alive, within a long operation that has no events of its own: every BEAT_S."""


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first tensor of a step that is not finite, in the order of computation."""

    direction: Literal["forward", "backward", "state"]
    """`state`: it was there before the step: a weight, a buffer, a moment of the optimizer."""
    module: str
    """Its maker, or its owner: `layers.3.attention.wq`; `loss` is the cross entropy."""
    tensor: str
    """What it is to that module: `output`, `gradient of input`, `weight`, `gradient of weight`."""
    shape: list[int]
    num_nan: Natural
    num_inf: Natural
    first: list[int]
    """The index of the first value that is not finite."""
    low: ExactFloat | None = None
    """The other values lie between `low` and `high`; None: there are none, or it is unknown."""
    high: ExactFloat | None = None
    by_position: bool = False
    """Counted during the step itself, whose tensors are gone: `shape`, `num_nan`, `num_inf` and
    `first` count positions (tokens) of all micro-batches, and `module` is a whole block."""

    @property
    def place(self) -> str:
        """`layers.3.attention.wq (forward: its output)`; `gradient of its weight` elsewhere."""
        what, of, whose = self.tensor.rpartition(" of ")
        return f"{self.module} ({self.direction}: {what}{of}its {whose})"

    @property
    def counts(self) -> str:
        """`1 NaN of 32,768 values, first at [0, 3, 5], others -1.2e+00 to 3.4e+00`"""
        kinds = (("NaN", self.num_nan), ("Inf", self.num_inf))
        if not self.shape:
            return next((f"it is {kind}" for kind, count in kinds if count), "not counted")
        each = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count)
        unit = "positions" if self.by_position else "values"
        if not each:  # the tensor was gone before anybody counted
            return f"{math.prod(self.shape):,} {unit}, not counted"
        text = f"{each} of {math.prod(self.shape):,} {unit}, first at {self.first}"
        if self.low is None or self.high is None:
            return text
        low, high = float.fromhex(self.low), float.fromhex(self.high)
        return f"{text}, others {low:.1e} to {high:.1e}"


def again(repeated: bool | None) -> str:
    """Whether a fault came again when its step was computed again, for the end of a sentence."""
    if repeated is None:
        return ""
    return "; it came again" if repeated else "; it did not come again"


class NonFinite(_Event, frozen=True, kw_only=True, tag="nonfinite"):
    """A loss, a gradient or a weight that is NaN or infinite."""

    step: Natural
    where: Literal["loss", "gradient", "weight"]
    loss: ExactFloat | None
    grad_norm: ExactFloat
    names: list[str] = []
    """Parameters that are not finite, or whose gradients are not, in model order."""
    origin: Origin | None = None
    """Where it was born, as far as it is known by now; a later event of the step may know more."""
    repeated: bool | None = None
    """Whether it came again when the step was computed again; None: not tried (yet)."""
    evidence_bytes: Natural = 0
    """How much is written now, before the worker ends."""


class Evidence(_Event, frozen=True, kw_only=True, tag="evidence"):
    """A file that explains a failure."""

    path: str
    what: str


class Saved(_Event, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint is whole, under its name."""

    step: Natural
    """Optimizer steps that were done."""
    path: str
    content: str
    """What `utils.checkpoint_names.content_of` gives as long as the same checkpoint is there."""


class Kept(_Event, frozen=True, kw_only=True, tag="kept"):
    """The state is saved as evidence, as far as it could be; where it is, `evidence` has said."""

    step: Natural
    """Optimizer steps that were done."""
    of_step: Natural | None = None
    """The step of the fault for which it is kept; None: an older worker does not say."""


class Note(_Event, frozen=True, kw_only=True, tag="note"):
    """Something a person should know: a fallback, a repair, a warning."""

    text: str
    unwatched: Natural | None = None
    """The process of a command that trains beside the one whose steps are told; None: this is about
    something else."""


class Finished(_Event, frozen=True, kw_only=True, tag="finished"):
    """All steps are done and told. The last evaluation and the last checkpoint may follow; then the
    worker stays until it hears Go, and ends with `done`."""


class Done(_Event, frozen=True, kw_only=True, tag="done"):
    """The worker's last event. A worker that ends without it died without giving a reason."""

    exit_code: ExitCode
    error: str | None = None
    """The message of the failure, one line or more; None: it succeeded."""
    early: str | None = None
    """Why a worker that succeeded stopped before its last step: somebody asked for it."""
    steps: Natural = 0
    loss_first: ExactFloat | None = None
    loss_last: ExactFloat | None = None
    tokens_per_s: float | None = None
    """Over all steps but the first, which includes the warm-up."""
    peak_memory_bytes: Natural | None = None
    """Peak of the device's allocator, or the peak resident set on a CPU."""
    peer_lost: bool = False
    """It could not go on because of another rank, which is the cause."""


Event = (
    Phase
    | Step
    | Vectors
    | Break
    | Metrics
    | Evaluation
    | Sample
    | Beat
    | NonFinite
    | Evidence
    | Saved
    | Kept
    | Note
    | Finished
    | Done
)


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """What the supervisor tells a worker, over the same socket, read between two steps."""


class Credit(_Command, frozen=True, kw_only=True, tag="credit"):
    """Steps up to this one may begin. A worker that never hears of credit is held by nobody."""

    step: Natural


class AskVectors(_Command, frozen=True, kw_only=True, tag="vectors"):
    """Send the Vectors of this step."""

    step: Natural


class Dump(_Command, frozen=True, kw_only=True, tag="dump"):
    """Keep the state as evidence, as it is when so many steps are done, or now if they are; then
    say Kept."""

    step: Natural
    of_step: Natural
    """The step of the fault."""
    tensors: list[str] = []
    """Those to keep first, as a dossier calls them: `weights/layers.0.attention.wq.weight`."""


class Go(_Command, frozen=True, kw_only=True, tag="go"):
    """Nobody needs this worker any more: it may end."""


Command = Credit | AskVectors | Dump | Go


class Watched(_Event, frozen=True, kw_only=True, tag="watched"):
    """A GPU is watched from here on: the first line of its file."""

    uuid: str
    interval_s: float
    schema: int


class Telemetry(_Event, frozen=True, kw_only=True, tag="telemetry"):
    """One sample of a worker's GPU. None (absent): the device does not report it (N/A); never 0."""

    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    """The limit in force."""
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    memory_mhz: int | None = None
    utilization_percent: int | None = None
    """Share of the last moments (a sixth of a second to a second) in which a kernel ran."""
    memory_used_mib: int | None = None
    clocks_event_reasons: int | None = None
    """Why the clocks are not higher at this moment: the bits of nvmlClocksEventReason*."""
    pcie_gen: int | None = None
    """Generation of the link at this moment: an idle link is slower."""
    pcie_width: int | None = None


class Counters(_Event, frozen=True, kw_only=True, tag="counters"):
    """The lifelong counters of a GPU at one moment: the difference of two samples tells what
    happened in between. None: the device does not report it (N/A)."""

    energy_mj: int | None = None
    power_violation_ns: int | None = None
    """Time below the requested clocks, because of the power limit."""
    thermal_violation_ns: int | None = None
    sw_thermal_ns: int | None = None
    """Time slowed down by the driver because of heat."""
    hw_thermal_ns: int | None = None
    """Time slowed down by the hardware itself because of heat."""
    power_brake_ns: int | None = None
    """Time slowed down because the power supply signalled it."""
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    ecc_corrected_total: int | None = None
    ecc_uncorrected_total: int | None = None
    """Over the life of the board."""
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    """Rows of memory that were replaced after errors of that kind."""
    remap_pending: bool | None = None
    """A row waits for a reset to be replaced."""
    remap_failed: bool | None = None
    """A row could not be replaced."""
    pcie_replays: int | None = None
    pcie_max_gen: int | None = None
    pcie_max_width: int | None = None
    """The best link that this GPU can have in this slot."""
    nvlink_errors: int | None = None
    """Replays, recoveries and CRC errors of all links."""
    power_default_limit_w: float | None = None
    """The board's own power limit."""
    fabric_ready: bool | None = None
    """Whether the NVLink fabric has taken it in; None: it belongs to none."""
    watches_xids: bool | None = None
    """Whether the driver reports the Xids of this GPU."""


class Xid(_Event, frozen=True, kw_only=True, tag="xid"):
    """The driver reported an error of this GPU."""

    xid: Natural


class Trouble(_Event, frozen=True, kw_only=True, tag="trouble"):
    """NVML could not answer a call that it should; sent once for each code."""

    call: str
    code: int | None = None
    """NVML's code of the error; None: there is none."""
    text: str
    lost: bool = False
    """This GPU is given up: no more events of it will come."""


GpuEvent = Watched | Telemetry | Counters | Xid | Trouble
"""What the launcher's telemetry reports about a worker's GPU during a run."""


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    read = msgspec.json.Decoder(kind).decode

    def decode(line: bytes) -> Any:
        try:
            return read(line)
        # It is not UTF-8, or nested without end: no errors of msgspec's own.
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(str(error)) from error

    return decode


decode: Callable[[bytes], Event] = _decoder(Event)
"""Reads one line; raises msgspec.DecodeError (ValidationError included) when it is not an event."""
decode_gpu: Callable[[bytes], GpuEvent] = _decoder(GpuEvent)
"""`decode`, for a line about a GPU."""
decode_command: Callable[[bytes], Command] = _decoder(Command)
"""`decode`, for a line to a worker."""


def encode_command(command: Command) -> bytes:
    """One line, newline included."""
    return msgspec.json.encode(command) + b"\n"


def encode(event: Event | GpuEvent) -> bytes:
    """One line, newline included; `t` is stamped now when it is 0."""
    if event.t == 0:
        event = msgspec.structs.replace(event, t=time.monotonic_ns())
    try:
        return msgspec.json.encode(event) + b"\n"
    except UnicodeEncodeError:  # a path that is not UTF-8, or a message that names one
        return msgspec.json.encode(readable(msgspec.to_builtins(event))) + b"\n"


def readable(value: Any) -> Any:
    """`value`, with each byte that is not UTF-8 written as `\\udcff`. Commands and file names may
    hold such bytes; JSON and HTML may not."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {readable(key): readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [readable(item) for item in value]
    return value


class EventSink:
    """A worker's end of the inherited socket `events_fd`: its events go to the supervisor, commands
    come back. Without a supervisor (None), and when it is gone, events are dropped and the training
    goes on."""

    def __init__(self, events_fd: int | None, *, is_held: bool = False) -> None:
        """`is_held`: the supervisor will say which steps may begin."""
        self.is_held = is_held
        self._socket: socket.socket | None = None
        self._rest = b""
        # The variable may be inherited without the socket: by a child of a worker, or a shell.
        with suppress(OSError):
            if events_fd is not None:
                self._socket = socket.socket(fileno=events_fd)
                self._socket.setblocking(True)

    @property
    def fd(self) -> int | None:
        """Readable when commands have come; None: nobody is there (any more)."""
        return None if self._socket is None else self._socket.fileno()

    def emit(self, event: Event) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(encode(event))
        except (BrokenPipeError, ConnectionResetError):
            self.close()

    def commands(self) -> list[Command]:
        """What the supervisor said since the last call; never waits. Lines that are no command are
        skipped."""
        *lines, self._rest = (self._rest + self._receive()).split(b"\n")
        found: list[Command] = []
        for line in lines:
            with suppress(msgspec.DecodeError):
                found.append(decode_command(line))
        return found

    def close(self) -> None:
        """As if the supervisor were gone."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _receive(self) -> bytes:
        if self._socket is None:
            return b""
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        except OSError:  # it died with events unread, or this is no socket
            data = b""
        if not data:
            self.close()
        return data
