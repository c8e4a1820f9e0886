"""`run.sh doctor --quick`: what NVML and the history hold against each GPU, within ten seconds.

For a health check beside other people's jobs: no CUDA, no network, no file is written. Whatever may
never return (the driver, a disk) is asked by child processes that are not waited for.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from msgspec.structs import replace

from launcher.devices import Machine
from launcher.doctor.finding import Finding, fail, warn
from launcher.doctor.gpus import check_mask, check_none, check_unlisted
from launcher.doctor.quick_answer import Answer, Checked, Fault, Figures, document_of, lines_of
from launcher.gpus.choose import auto_count, choose, why_unusable
from launcher.gpus.probe import BrokenGpu, Gpu, NvmlProbe
from launcher.history.gpu_history import path_of
from launcher.history.reading import Held, Reading
from launcher.telemetry.health import Record, symptoms, symptoms_now
from launcher.telemetry.kernel_log import Logged, against, read_kernel_log
from launcher.telemetry.monitor import look
from launcher.verdict.severity import Severity, Symptom
from model_check.config.derived import failing_severities
from model_check.config.schema import LaunchSettings
from model_check.errors import EXIT_HEALTH, EXIT_NO_GPU, ModelCheckError
from model_check.events import Counters, Telemetry, Trouble

_CALL_S = 3.0
"""For one call of NVML."""
_PROBE_S, _ALL_S = 6.0, 8.0
"""From the start: until NVML has listed the GPUs, and until everything is known. The rest of the
ten seconds is for starting, and for ending what does not answer."""
_GRAVITY = [None, *Severity]


def quick(
    environ: Mapping[str, str],
    launch: LaunchSettings,
    *,
    as_json: bool,
    write: Callable[[str], None],
) -> int:
    """Write a summary and a table of GPUs, or one JSON document. Returns the exit code of the worst
    fault: 69 for a GPU that is missing or does not answer, 22 for a severity of launch.fail_on."""
    end = time.monotonic() + _ALL_S
    path = path_of(launch.history_file, environ)
    reading = Reading(path) if path else None
    machine = Machine(NvmlProbe(_CALL_S, _PROBE_S), environ)
    logged = read_kernel_log()
    devices, gpus, checks = _present(machine, launch, logged)
    records = look({gpu.label: gpu.uuid for gpu in devices}, _CALL_S, end - time.monotonic())
    held = reading.result(end) if reading else Held({}, None)
    if held.problem is not None:
        checks.append(warn("history", held.problem, ""))
    fail_on = failing_severities(launch)
    for gpu in devices:
        past = [("kernel log", symptom) for _, symptom in against([gpu], logged)]
        past += [("history", held.against[gpu.uuid])] if gpu.uuid in held.against else []
        gpus.append(_checked(gpu, records[gpu.label], past, fail_on))
    answer = Answer(sorted(gpus, key=_place), checks)
    write(document_of(answer) if as_json else "\n".join(lines_of(answer)))
    return answer.exit_code


# What there is


def _present(
    machine: Machine, launch: LaunchSettings, logged: Sequence[Logged]
) -> tuple[list[Gpu], list[Checked], list[Finding]]:
    """The GPUs to look at; those that do not answer; and what there is to tell of neither."""
    try:
        snapshot = machine.snapshot
        lost = check_unlisted(machine, launch, logged)
        if not snapshot.gpus:
            return [], [], [check_none(machine, launch), *lost]
        devices = _devices(machine, launch.gpus)
    except ModelCheckError as error:
        return [], [], [fail("GPUs", str(error), "", error.exit_code)]
    needed = machine.broken(launch.gpus, launch.expect_gpus)
    broken = [_unanswered(gpu, gpu in needed) for gpu in snapshot.broken]
    mask = check_mask(machine, launch)
    notes = [warn("GPUs", note, "") for note in snapshot.notes]
    return devices, broken, [*([mask] if mask.status != "ok" else []), *notes, *lost]


def _devices(machine: Machine, selector: str) -> list[Gpu]:
    """Those that `selector` (launch.gpus) names; `auto`: as `all`. That somebody uses one is no
    fault. Raises UsageError and NoGpuError."""
    visible, physical = map(_as_idle, (machine.visible, machine.snapshot.gpus))
    is_all = selector.strip() == "all" or auto_count(selector)
    return visible if is_all else choose(selector, visible, physical)


def _as_idle(gpus: Sequence[Gpu]) -> list[Gpu]:
    return [replace(gpu, processes=None) for gpu in gpus]


def _unanswered(gpu: BrokenGpu, is_needed: bool) -> Checked:
    """A GPU of which NVML has no more than its number."""
    _, _, why = gpu.why.rpartition(" cannot be used: ")
    figure, _, cure = why.partition("; ")
    fault = Fault("nvml", None, figure, cure, EXIT_NO_GPU if is_needed else 0)
    return Checked(f"GPU{gpu.index}", None, None, None, [fault])


def _place(gpu: Checked) -> list[int]:
    """`GPU10.1` comes after `GPU9`."""
    return [int(number) for number in gpu.gpu.removeprefix("GPU").split(".")]


# What speaks against it


def _checked(
    gpu: Gpu, record: Record, past: Sequence[tuple[str, Symptom]], fail_on: Collection[str]
) -> Checked:
    """`past`: symptoms of before, and where they are from."""
    found = [("nvml", symptom) for symptom in (*_symptoms(gpu, record), *symptoms_now(record))]
    faults = [_fault(source, symptom, fail_on) for source, symptom in (*found, *past)]
    if (why := why_unusable(gpu)) is not None:
        faults.append(Fault("nvml", None, f"it {why}", "", EXIT_NO_GPU))
    faults += _unanswered_calls(record)
    # Of several as grave the first one: NVML now, then the past.
    faults.sort(key=lambda fault: (-fault.exit_code, _GRAVITY.index(fault.severity)))
    return Checked(gpu.label, gpu.uuid, gpu.name, gpu.pci_bus_id, faults, _figures(gpu, record))


def _figures(gpu: Gpu, record: Record) -> Figures:
    sample, counters = record.sample or Telemetry(), record.counters or Counters()
    remapped = (counters.remapped_corrected, counters.remapped_uncorrected)
    rows = [num for num in remapped if num is not None]
    return Figures(
        gpu.used_mib,
        gpu.total_mib,
        sample.temperature_c,
        sample.power_w,
        sample.utilization_percent,
        counters.ecc_uncorrected,
        sum(rows) if rows else None,
    )


def _symptoms(gpu: Gpu, record: Record) -> list[Symptom]:
    """By the rules of a run. What did not answer is no MONITOR here, and told by itself."""
    health = record.health()
    if not (trouble := _silences(record)):
        return symptoms(gpu.label, health)
    assert health is not None
    answered = [each for each in health.trouble if each not in trouble]
    found = symptoms(gpu.label, replace(health, trouble=answered))
    return [symptom for symptom in found if symptom.is_hard]


def _silences(record: Record) -> list[Trouble]:
    health = record.health()
    return [each for each in health.trouble if each.code is None] if health else []


def _unanswered_calls(record: Record) -> Iterator[Fault]:
    for trouble in _silences(record):
        is_call = trouble.call.startswith("nvml")
        figure = f"no answer from {trouble.call}" if is_call else trouble.text
        yield Fault("nvml", None, figure, trouble.text if is_call else "", EXIT_NO_GPU)


def _fault(source: str, symptom: Symptom, fail_on: Collection[str]) -> Fault:
    """An Xid of the kernel log is of before: the GPU may have been reset since then."""
    severity = Severity.MONITOR if source == "kernel log" else symptom.severity
    figure = f"{symptom.figure} in the kernel log" if source == "kernel log" else symptom.figure
    exit_code = EXIT_HEALTH if severity.lower() in fail_on else 0
    return Fault(source, severity, figure, symptom.cure, exit_code)
