"""Tell a person what a dossier holds: who, when, what was found, which tensors, whether they are
whole; and, beside that of a healthy worker, which bits differ."""

import io
import signal
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from model_check.config.arguments import Parser
from model_check.errors import EXIT_PASS, EXIT_SIGNAL_BASE, EXIT_USAGE, ModelCheckError
from model_check.events import Break, NonFinite, again
from model_check.forensics.compare import Difference, TensorDifference, Value, compared
from model_check.forensics.manifest import (
    COMPARED_KINDS,
    DIFFERENCE,
    MANIFEST,
    DamagedError,
    DossierError,
    Kept,
    LeftOut,
    Manifest,
    Statistics,
    places,
    read_manifest,
    tensors_path,
    verify,
)
from model_check.utils.garbage import leave
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import complain, open_missing_streams, put
from model_check.utils.words import few, listed, printable_lines

EXIT_DAMAGED = 1
_COLUMNS = 80
_LONGEST = 160
"""Characters of a value that is shown as it is."""
_EPILOG = """examples:
  bash run.sh forensics RUN_DIR/dossier/gpu3
  bash run.sh forensics RUN_DIR/dossier/gpu3 RUN_DIR/dossier/gpu0

Exit codes: 0 the dossier is whole, 1 its tensors are damaged, 2 no dossier."""


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    # A name may have characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        names = _parser().read(argv)
        directory, other = _directory(names.dossier), names.other and _directory(names.other)
        manifest = read_manifest(directory)
        peers = [other] if other else list(_peers(directory, manifest))
        damage = _damage(directory, manifest)
        is_sound = damage is None and not (other and _damage(other, read_manifest(other)))
        for line in told(directory, manifest, damage):
            _print(line)
        for peer in peers:
            for line in beside(compared(directory, peer, manifest)):
                _print(line)
    except ModelCheckError as error:
        complain(f"error: {error}")
        return EXIT_USAGE
    # `| head` has read enough.
    except BrokenPipeError:
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    return EXIT_PASS if is_sound else EXIT_DAMAGED


def told(directory: Path, manifest: Manifest, damage: str | None) -> Iterator[str]:
    """All but the comparison. `damage`: of the file of tensors."""
    run = f" of run {manifest.run}" if manifest.run else ""
    step = "?" if manifest.step is None else manifest.step
    yield f"{manifest.worker}: {manifest.kind}, found at step {step}{run}"
    if odd := _odd_beside(directory, manifest):
        yield f"the healthy one beside {odd}: what differs there, as it should be"
    if manifest.state_after is not None:
        yield f"weights and moments: after {manifest.state_after} optimizer steps{_later(manifest)}"
    yield from _finding(manifest)
    yield _file(manifest, damage)
    if manifest.shortened:
        yield f"shortened: {manifest.shortened}"
    yield from _kept(manifest.tensors)
    yield from _left_out(manifest.left_out)
    if manifest.absent:
        yield f"of the fault, but not there: {few(manifest.absent)}"


def beside(difference: Difference) -> Iterator[str]:
    """The comparison with a peer."""
    yield ""
    if difference.not_comparable is not None:
        yield f"not compared with {difference.peer or 'the other'}: {difference.not_comparable}"
        return
    equal, num = difference.num_equal, len(difference.tensors)
    yield f"beside {difference.peer}: {num} tensors differ, {equal} have the same bits"
    for name, tensor in difference.tensors.items():
        yield from _differing(name, tensor)
    if difference.not_compared:
        yield f"not compared: {len(difference.not_compared)}"
        for why, names in _by_reason(difference.not_compared).items():
            yield f"  {why}: {few(names)}"


def _parser() -> Parser:
    prog = f"{COMMAND} forensics"
    parser = Parser(prog=prog, description=__doc__, epilog=_EPILOG)
    parser.add_argument("dossier", type=Path, metavar="DOSSIER", help="its directory")
    parser.add_argument(
        "other",
        nargs="?",
        type=Path,
        metavar="OTHER",
        help="that of a worker to compare with; else its peers in the run directory",
    )
    return parser


def _directory(path: Path) -> Path:
    return path.parent if path.name == MANIFEST else path


def _peers(directory: Path, manifest: Manifest) -> Iterator[Path]:
    """Dossiers beside it in which another worker holds the same state of the same run."""
    if manifest.run is None or manifest.kind not in COMPARED_KINDS:
        return
    for path in _beside(directory, MANIFEST):
        try:
            other = read_manifest(path.parent)
        except DossierError:
            continue
        is_same = (other.run, other.state_after) == (manifest.run, manifest.state_after)
        if is_same and other.kind in COMPARED_KINDS and other.worker != manifest.worker:
            yield path.parent


def _odd_beside(directory: Path, manifest: Manifest) -> str | None:
    """The workers that were compared with this one, which is healthy."""
    odd: dict[str, None] = {}
    for path in _beside(directory, DIFFERENCE):
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = msgspec.json.decode(path.read_bytes(), type=Difference)
            if (found.peer, found.state_after) == (manifest.worker, manifest.state_after):
                odd[found.odd] = None
    return listed(list(odd)) if odd else None


def _beside(directory: Path, name: str) -> list[Path]:
    """The files of that name in the other dossiers of the run; a worker with several has set the
    earlier ones aside."""
    root = directory.absolute().parent
    found = sorted([*root.glob(f"*/{name}"), *root.glob(f"*/earlier*/{name}")])
    return [path for path in found if path.parent != directory.absolute()]


def _later(manifest: Manifest) -> str:
    """The state is taken at the end of a step, maybe of a later one than that of the fault."""
    if manifest.step is None or manifest.state_after is None:
        return ""
    late = manifest.state_after - manifest.step - 1
    return f"; gradients: of step {manifest.state_after - 1}, {late} later" if late > 0 else ""


def _damage(directory: Path, manifest: Manifest) -> str | None:
    """What is wrong with the file of tensors."""
    try:
        verify(directory, manifest)
        if (path := tensors_path(directory, manifest)) is not None:
            places(path, manifest)
    except DamagedError as error:
        return str(error)
    return None


def _print(line: str) -> None:
    """At most _COLUMNS wide; nothing of a manifest moves the cursor."""
    text = printable_lines(line).replace("\n", " ")
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    put(textwrap.fill(text, _COLUMNS, subsequent_indent=indent, break_on_hyphens=False))


def _finding(manifest: Manifest) -> list[str]:
    """The event in words, or as it is where this version does not understand it."""
    try:
        return list(_of_event(msgspec.convert(manifest.event, NonFinite | Break)))
    # Numbers of a damaged manifest may exceed what Python prints.
    except (msgspec.ValidationError, ValueError, OverflowError):
        return [f"{name}: {_short(value)}" for name, value in manifest.event.items()]


def _of_event(event: NonFinite | Break) -> Iterator[str]:
    if isinstance(event, Break):
        yield f"found: {event.what}"
        return
    loss = "" if event.loss is None else f"; loss {float.fromhex(event.loss):.4f}"
    yield f"found: {event.where} not finite{loss}"
    if event.origin is not None:
        yield f"born in {event.origin.place}: {event.origin.counts}{again(event.repeated)}"
    if event.names:
        yield f"not finite, or with such gradients: {few(event.names)}"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _file(manifest: Manifest, damage: str | None) -> str:
    if damage is not None:
        return f"DAMAGED: {damage}"
    if manifest.file is None:
        return "no tensors are kept, statistics alone"
    return f"{manifest.file}: {manifest.bytes:,} bytes, checksum holds"


def _kept(tensors: Mapping[str, Kept]) -> Iterator[str]:
    guilty = {name: tensor for name, tensor in tensors.items() if tensor.guilty}
    if guilty:
        yield "tensors of the fault, in the order of computation:"
    for name, tensor in guilty.items():
        yield from _tensor(name, tensor)
        if not tensor.is_whole:
            first, end = tensor.slice
            yield f"    cut: values {first:,} to {end - 1:,} of {tensor.num_values:,} are kept"
    yield f"kept beside them: {len(tensors) - len(guilty)} tensors"
    yield from _spoilt({name: t for name, t in tensors.items() if not t.guilty})


def _left_out(tensors: Mapping[str, LeftOut]) -> Iterator[str]:
    if not tensors:
        return
    yield f"left out, but for their statistics: {len(tensors)} tensors"
    for why, names in _by_reason({name: t.why for name, t in tensors.items()}).items():
        yield f"  {why}: {few(names)}"
    for name, tensor in tensors.items():
        if tensor.guilty:
            yield from _tensor(name, tensor)
    yield from _spoilt({name: t for name, t in tensors.items() if not t.guilty})


def _spoilt(tensors: Mapping[str, Kept | LeftOut]) -> Iterator[str]:
    counted = {name: t.statistics for name, t in tensors.items() if t.statistics is not None}
    if names := [name for name, s in counted.items() if s.first_nonfinite is not None]:
        yield f"  with NaN or Inf: {few(names)}"


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return names


def _tensor(name: str, tensor: Kept | LeftOut) -> Iterator[str]:
    yield f"  {name}  {tensor.dtype} {tensor.shape}"
    yield f"    {_counts(tensor.statistics)}"


def _counts(counted: Statistics | None) -> str:
    if counted is None:
        return "not counted"
    if counted.low is None or counted.high is None or counted.norm is None:
        others = "no other values"
    else:
        others = f"others {counted.low:.3e} to {counted.high:.3e}, norm {counted.norm:.4e}"
    if counted.first_nonfinite is None:
        return f"all finite: {others.removeprefix('others ')}"
    first = counted.first_nonfinite
    return f"{counted.num_nan:,} NaN and {counted.num_inf:,} Inf, first at {first}; {others}"


def _differing(name: str, tensor: TensorDifference) -> Iterator[str]:
    is_guilty = ", of the fault" if tensor.guilty else ""
    yield f"  {name}  {tensor.dtype} {tensor.shape}{is_guilty}"
    yield f"    {tensor.num_differing:,} of {tensor.num_compared:,} values differ"
    counts = (f"bit {bit}: {count:,}" for bit, count in tensor.histogram.items())
    yield f"    which bits: {', '.join(counts)}"
    for value in tensor.first:
        yield f"    {_value(value)}"
    if tensor.num_differing > len(tensor.first):
        yield f"    and {tensor.num_differing - len(tensor.first):,} more"
    if tensor.largest is not None and tensor.largest not in tensor.first:
        yield f"    largest deviation: {_value(tensor.largest)}"


def _value(value: Value) -> str:
    numbers = ""
    if value.odd_value is not None and value.peer_value is not None:
        numbers = f"; {value.odd_value:.6g}, peer {value.peer_value:.6g}"
    return f"{value.index}: {value.odd} xor {value.peer} = {value.xor}, {value.bits}{numbers}"


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
