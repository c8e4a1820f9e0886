"""The driver and its GPUs as the probe sees them: what hides or occupies them, how they are."""

from collections.abc import Collection, Sequence

from launcher.devices import NO_GPU_VALUES, Machine
from launcher.doctor.finding import DASH, Finding, fail, ok, told, told_both, warn, warn_if
from launcher.gpus.choose import choose, why_busy, why_unusable
from launcher.gpus.codes import MISSING, WITHOUT
from launcher.gpus.probe import BrokenGpu, Gpu
from launcher.gpus.reservation import default_lock_dir, who_can_delete
from launcher.gpus.visible import pinnable, titles
from launcher.telemetry.health import Record, symptoms, symptoms_now, throttle_reasons
from launcher.telemetry.kernel_log import UNLISTED, Logged, unlisted
from model_check.config.derived import failing_severities
from model_check.config.schema import LaunchSettings
from model_check.errors import EXIT_HEALTH, EXIT_NO_GPU, ModelCheckError
from model_check.events import Counters, Telemetry

_FIND_IT = f"{MISSING}, or correct CUDA_VISIBLE_DEVICES"


def taken(machine: Machine, gpus: str) -> tuple[list[Gpu], list[Finding]]:
    """The GPUs that a run would use, and why it would use none. `gpus`: the setting."""
    if gpus.strip() == "all" or not machine.snapshot.gpus:
        return machine.visible, []
    try:
        return choose(gpus, machine.visible, machine.snapshot.gpus), []
    except ModelCheckError as error:
        return [], [fail("chosen GPUs", str(error), "", error.exit_code)]


def check_gpus(machine: Machine, launch: LaunchSettings, used: Sequence[Gpu]) -> list[Finding]:
    """What this machine has, and which of it a run would use (`used`). A FAIL would keep a run with
    these settings from starting."""
    snapshot, findings = machine.snapshot, []
    if snapshot.driver_version:
        served = told(snapshot.cuda_driver_version)
        findings.append(ok("driver", f"{snapshot.driver_version}, serves CUDA {served}"))
    if not snapshot.gpus:
        return [*findings, check_none(machine, launch)]
    needed = machine.broken(launch.gpus, launch.expect_gpus)
    findings += [_broken(gpu, gpu in needed) for gpu in snapshot.broken]
    for device in pinnable(snapshot.gpus):
        findings.append(_gpu(device, device in machine.visible, device in used))
    findings.append(check_mask(machine, launch))
    if (who := who_can_delete()) is not None:
        found = f"{default_lock_dir()}: {who} can delete reservations"
        advice = f"chown root {default_lock_dir()}; chmod 1777 {default_lock_dir()}"
        findings.append(warn("GPU locks", found, advice))
    notes = (*snapshot.notes, machine.order_note())
    return findings + [warn("GPUs", note, "") for note in notes if note]


def check_none(machine: Machine, launch: LaunchSettings) -> Finding:
    """A machine with a driver should have GPUs: a run would not take its CPU for them. Nor would
    one that asks for GPUs."""
    snapshot = machine.snapshot
    found = f"none: {snapshot.reason or 'no reason given'}"
    has_driver = snapshot.driver_version is not None and machine.mask_value not in NO_GPU_VALUES
    asks = launch.expect_gpus is not None or launch.gpus.strip() != "all" or launch.require_idle
    if has_driver or asks:
        return fail("GPUs", found, f"{MISSING}; {WITHOUT}", EXIT_NO_GPU)
    names = machine.unused_mask() or "launch.expect_gpus=N makes this a FAIL"
    return warn("GPUs", found, f"runs train small CPU workers; {names}")


def check_unlisted(
    machine: Machine, launch: LaunchSettings, logged: Sequence[Logged]
) -> list[Finding]:
    """What the kernel log tells of GPUs that NVML does not list. One that is gone is a FAIL where
    all are asked for, unless it may be one of those that NVML counts and knows no address of."""
    snapshot, findings = machine.snapshot, []
    if snapshot.driver_version is None:
        return []
    is_asked = launch.gpus.strip() == "all" and not (snapshot.broken or snapshot.notes)
    for each in unlisted(snapshot.gpus, logged):
        found = f"PCI {each.address}, {UNLISTED}: {each.symptom.figure}"
        is_hard = each.symptom.severity.lower() in failing_severities(launch)
        if each.is_gone and is_hard and is_asked:
            findings.append(fail("kernel log", found, each.symptom.cure, EXIT_HEALTH))
        else:
            findings.append(warn("kernel log", found, each.symptom.cure))
    return findings


def _broken(gpu: BrokenGpu, is_needed: bool) -> Finding:
    if not is_needed:
        return warn(f"GPU{gpu.index}", gpu.why, "")
    cure = "the other GPUs can be used: choose them with --gpus"
    return fail(f"GPU{gpu.index}", gpu.why, cure, EXIT_NO_GPU)


def _gpu(gpu: Gpu, is_visible: bool, is_used: bool) -> Finding:
    found = f"{gpu.name}, {_memory(gpu)}, {told(gpu.utilization_percent)} % used, "
    found += f"{told(gpu.temperature_c)} C{'' if is_visible else ' (hidden)'}"
    unusable, busy = why_unusable(gpu), why_busy(gpu)
    if unusable is not None and is_used:
        return fail(gpu.label, f"{found}; it {unusable}", "choose others with --gpus", EXIT_NO_GPU)
    if unusable is not None and is_visible:
        return warn(gpu.label, f"{found}; it {unusable}", "")
    if busy is not None:
        return warn(gpu.label, f"{found}; busy: {busy}", "--gpus auto takes the freest")
    return ok(gpu.label, found)


def _memory(gpu: Gpu) -> str:
    if gpu.free_mib is None or gpu.total_mib is None:
        return f"memory {DASH}"
    return f"{gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"


def check_mask(machine: Machine, launch: LaunchSettings) -> Finding:
    """What CUDA_VISIBLE_DEVICES leaves, and whether a run with these settings has enough."""
    name, value, read = "visible GPUs", machine.mask_value, machine.mask
    num, expect_gpus = len(read.devices), launch.expect_gpus
    if expect_gpus is not None and num < expect_gpus:
        found = f"launch.expect_gpus = {expect_gpus}, found {num}: {titles(read.devices)}"
        return fail(name, "; ".join(filter(None, [found, read.lacks])), _FIND_IT, EXIT_NO_GPU)
    if read.lacks and expect_gpus is None and launch.gpus.strip() == "all":
        return fail(name, read.lacks, _FIND_IT, EXIT_NO_GPU)
    if value is None:
        return ok(name, "all: CUDA_VISIBLE_DEVICES is not set")
    labels = ", ".join(gpu.label for gpu in read.devices)
    found = f"{labels or 'none'}: CUDA_VISIBLE_DEVICES={value!r}"
    if num and (said := read.lacks or read.ignores):
        return warn(name, f"{labels}: {said}", "")
    if num:
        return ok(name, found)
    if value not in NO_GPU_VALUES:
        return fail(name, found, "correct CUDA_VISIBLE_DEVICES", EXIT_NO_GPU)
    return warn(name, found, "unset CUDA_VISIBLE_DEVICES to use the GPUs")


def check_health(gpu: Gpu, record: Record, fail_on: Collection[str]) -> Finding:
    """The state of a GPU's memory, clocks and link, from what telemetry told of it in one look. A
    symptom whose severity is in `fail_on` is a FAIL."""
    name = f"{gpu.label} health"
    counters, sample = record.counters or Counters(), record.sample or Telemetry()
    found_symptoms = symptoms(gpu.label, record.health())
    advice = [str(symptom) for symptom in (*found_symptoms, *symptoms_now(record))]
    found, what_to_do = _describe(counters, sample), "; ".join(advice)
    if any(symptom.severity.lower() in fail_on for symptom in found_symptoms):
        return fail(name, found, what_to_do, EXIT_HEALTH)
    return warn_if(bool(advice), name, found, what_to_do)


def _describe(counters: Counters, sample: Telemetry) -> str:
    errors = told_both(counters.ecc_corrected, counters.ecc_uncorrected)
    in_life = told_both(counters.ecc_corrected_total, counters.ecc_uncorrected_total)
    rows = told_both(counters.remapped_corrected, counters.remapped_uncorrected)
    states = [("pending", counters.remap_pending), ("failed", counters.remap_failed)]
    rows += "".join(f", {state}" for state, is_so in states if is_so)
    link = told_both(sample.pcie_gen, sample.pcie_width, between=" x")
    most = told_both(counters.pcie_max_gen, counters.pcie_max_width, between=" x")
    return (
        f"ECC errors (corrected/uncorrected) {errors} since load, {in_life} in its life; "
        f"remapped rows {rows}; clocks: {_clocks(sample.clocks_event_reasons)}; "
        f"PCIe gen {link} of {most}"
    )


def _clocks(bits: int | None) -> str:
    return DASH if bits is None else ", ".join(throttle_reasons(bits)) or "free"
