"""`run.sh doctor`: what of this machine is fine, what is not, what to do. Changes nothing, asks no
network, imports no torch."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from launcher.doctor.cgroups import check_cgroups
from launcher.doctor.finding import Finding
from launcher.doctor.gpus import ask, check_gpus, taken
from launcher.doctor.health import check_health
from launcher.doctor.machine import check_machine
from launcher.doctor.packages import check_packages
from launcher.doctor.storage import check_storage
from launcher.gpus.probe import Gpu, GpuProbe, Snapshot
from launcher.gpus.visible import pinnable
from launcher.telemetry.health import Record
from launcher.telemetry.monitor import look
from model_check.config.derived import failing_severities
from model_check.config.schema import Settings

SCHEMA = 1
Look = Callable[[Mapping[str, str]], Mapping[str, Record]]
"""GPU label -> UUID; what telemetry says of each."""


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
    snapshot, findings = ask(probe)
    if snapshot is not None:
        used, refused = taken(snapshot, environ, settings.launch.gpus)
        findings = [
            *check_gpus(snapshot, environ, settings.launch, used),
            *refused,
            *_health(snapshot, used, failing_severities(settings.launch), look),
        ]
    findings = [
        *check_packages(snapshot),
        *findings,
        *check_machine(environ),
        check_cgroups(),
        *check_storage(environ, cwd, Path(settings.data.cache_dir)),
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


def _health(
    snapshot: Snapshot, used: Sequence[Gpu], fail_on: Collection[str], look: Look
) -> list[Finding]:
    """Of every GPU; what is wrong with one that a run would not use fails none."""
    devices = {device.label: device for gpu in snapshot.gpus for device in pinnable(gpu)}
    if not devices:
        return []
    records = look({label: device.uuid for label, device in devices.items()})
    return [
        check_health(device, records[label], fail_on if device in used else ())
        for label, device in devices.items()
    ]


def _document(findings: Sequence[Finding], exit_code: int) -> str:
    checks = [
        {"status": f.status, "name": f.name, "found": f.found, "advice": f.advice} for f in findings
    ]
    return json.dumps({"schema": SCHEMA, "exit_code": exit_code, "checks": checks}, indent=2)


def _summary(findings: Sequence[Finding]) -> str:
    states = [finding.status for finding in findings]
    failed, warned = states.count("FAIL"), states.count("warn")
    if not failed and not warned:
        return f"all {len(states)} checks ok"
    return f"{len(states)} checks: {failed} FAIL, {warned} warn, {states.count('ok')} ok"
