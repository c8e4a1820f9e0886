"""The driver and its GPUs, as the probe sees them, and what hides or occupies them."""

from collections.abc import Mapping

from launcher.checkup.finding import Finding, fail, ok, warn
from launcher.gpus.choose import why_busy, why_unusable
from launcher.gpus.probe import Gpu, GpuProbe, Snapshot
from launcher.gpus.visible import order_note, pinnable, visible
from model_check.errors import EXIT_NO_GPU, ModelCheckError


def ask(probe: GpuProbe) -> tuple[Snapshot | None, list[Finding]]:
    """The GPUs, and what is to be said when they cannot be asked."""
    try:
        return probe.snapshot(), []
    except ModelCheckError as error:  # its text says what to do
        return None, [fail("GPUs", str(error), "", error.exit_code)]


def check_gpus(snapshot: Snapshot, environ: Mapping[str, str]) -> list[Finding]:
    """What this machine has, and what of it a run would use."""
    findings = [_driver(snapshot)] if snapshot.driver_version else []
    if not snapshot.gpus:
        reason = snapshot.reason or "no reason given"
        return [*findings, warn("GPUs", f"none: {reason}", "runs train small CPU workers")]
    cure = "the other GPUs can be used: choose them with --gpus"
    findings += [fail(f"GPU{gpu.index}", gpu.why, cure, EXIT_NO_GPU) for gpu in snapshot.broken]
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    left = visible(snapshot.gpus, mask)
    findings += [_gpu(device, device in left) for gpu in snapshot.gpus for device in pinnable(gpu)]
    findings.append(_mask(mask, left))
    order = order_note(snapshot.gpus, mask, environ.get("CUDA_DEVICE_ORDER"))
    return findings + [warn("GPUs", note, "") for note in (*snapshot.notes, order) if note]


def _driver(snapshot: Snapshot) -> Finding:
    served = snapshot.cuda_driver_version or "N/A"
    return ok("driver", f"{snapshot.driver_version}, serves CUDA {served}")


def _gpu(gpu: Gpu, is_visible: bool) -> Finding:
    found = f"{gpu.name}, {_memory(gpu)}, {_number(gpu.utilization_percent)} % used, "
    found += f"{_number(gpu.temperature_c)} C{'' if is_visible else ' (hidden)'}"
    unusable, busy = why_unusable(gpu), why_busy(gpu)
    if unusable is not None and is_visible:
        return fail(gpu.label, f"{found}; it {unusable}", "choose others with --gpus", EXIT_NO_GPU)
    if busy is not None:
        return warn(gpu.label, f"{found}; busy: {busy}", "--gpus auto takes the freest")
    return ok(gpu.label, found)


def _memory(gpu: Gpu) -> str:
    if gpu.free_mib is None or gpu.total_mib is None:
        return "memory N/A"
    return f"{gpu.free_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB free"


def _number(value: int | None) -> str:
    return "N/A" if value is None else str(value)


def _mask(mask: str | None, left: list[Gpu]) -> Finding:
    name = "visible GPUs"
    if mask is None:
        return ok(name, "all: CUDA_VISIBLE_DEVICES is not set")
    labels = ", ".join(gpu.label for gpu in left)
    found = f"{labels or 'none'}: CUDA_VISIBLE_DEVICES={mask!r}"
    if left:
        return ok(name, found)
    return warn(name, found, "unset CUDA_VISIBLE_DEVICES to use the GPUs")
