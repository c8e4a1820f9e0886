"""`run.sh doctor`: what of this machine is fine, what is not, what to do. It only reads: changes
nothing, asks no network, imports no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.devices import Machine
from launcher.doctor.finding import Finding, fail, warn
from launcher.doctor.gpus import check_gpus, check_health, check_unlisted, taken
from launcher.doctor.machine import check_machine
from launcher.doctor.packages import check_packages
from launcher.doctor.storage import check_storage
from launcher.gpus.probe import GpuProbe, Snapshot
from launcher.gpus.visible import pinnable
from launcher.telemetry.health import Record
from launcher.telemetry.kernel_log import against, read_kernel_log
from launcher.telemetry.monitor import look
from model_check.config.derived import failing_severities
from model_check.config.schema import LaunchSettings, Settings
from model_check.errors import ModelCheckError
from model_check.utils.secrets import masked_values

SCHEMA = 1
Look = Callable[[Mapping[str, str]], Mapping[str, Record]]
"""GPU label -> UUID in, GPU label -> what telemetry says of it out."""


def doctor(
    probe: GpuProbe,
    environ: Mapping[str, str],
    cwd: Path,
    settings: Settings,
    *,
    as_json: bool,
    write: Callable[[str], None],
    look: Look = look,
) -> int:
    """Write one line a finding (or one JSON document); returns 0, or what the worst FAIL asks for.

    `settings`: where token caches lie (relative to `cwd` or absolute), which GPUs a run would use,
    how many to expect, and what would fail it: the exit code is that of a run with them.
    """
    machine = Machine(probe, environ)
    snapshot: Snapshot | None = None
    try:
        snapshot = machine.snapshot
    except ModelCheckError as error:  # its text says what to do
        of_gpus = [fail("GPUs", str(error), "", error.exit_code)]
    else:
        of_gpus = _check_gpus(machine, settings.launch, look)
    findings = [
        *check_packages(snapshot),
        *of_gpus,
        *check_machine(),
        *check_storage(environ, cwd, settings),
    ]
    # A broken GPU (69) before a missing package (2): the higher code is the more specific one.
    exit_code = max(finding.exit_code for finding in findings)
    if as_json:
        write(_document(findings, exit_code))
    else:
        for finding in findings:
            write(str(finding))
        write(_summary(findings))
    return exit_code


def _check_gpus(machine: Machine, launch: LaunchSettings, look: Look) -> list[Finding]:
    used, refused = taken(machine, launch.gpus)
    findings = [*check_gpus(machine, launch, used), *refused]
    devices, logged = pinnable(machine.snapshot.gpus), read_kernel_log()
    findings += check_unlisted(machine, launch, logged)
    if not devices:
        return findings
    records = look({device.label: device.uuid for device in devices})
    # The health of a GPU that a run would not use fails nothing.
    fail_on = failing_severities(launch)
    findings += [
        warn(f"{device.label} kernel log", symptom.figure, symptom.cure)
        for device, symptom in against(devices, logged)
    ]
    return findings + [
        check_health(device, records[device.label], fail_on if device in used else ())
        for device in devices
    ]


def _document(findings: Sequence[Finding], exit_code: int) -> str:
    checks = [finding._asdict() for finding in findings]
    for check in checks:
        del check["exit_code"]
    document = {"schema": SCHEMA, "kind": "doctor", "exit_code": exit_code, "checks": checks}
    return json.dumps(masked_values(document), indent=2)


def _summary(findings: Sequence[Finding]) -> str:
    states = [finding.status for finding in findings]
    failed, warned = states.count("FAIL"), states.count("warn")
    if not failed and not warned:
        return f"all {len(states)} checks ok"
    return f"{len(states)} checks: {failed} FAIL, {warned} warn, {states.count('ok')} ok"
