"""`run.sh doctor`: what of this machine is fine, what is not, what to do. Changes nothing, asks no
network, imports no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.checkup.cgroups import check_cgroups
from launcher.checkup.finding import Finding
from launcher.checkup.gpus import ask, check_gpus
from launcher.checkup.health import check_health
from launcher.checkup.machine import check_machine
from launcher.checkup.packages import check_packages
from launcher.checkup.storage import check_storage
from launcher.gpus.probe import GpuProbe, Snapshot
from launcher.gpus.visible import pinnable, visible
from launcher.telemetry.monitor import look
from launcher.verdict.health import Record
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

    `settings`: where token caches lie (relative to `cwd` or absolute), how many GPUs to expect.
    """
    snapshot, findings = ask(probe)
    if snapshot is not None:
        expected = settings.launch.expect_gpus
        findings = [*check_gpus(snapshot, environ, expected), *_health(snapshot, environ, look)]
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


def _health(snapshot: Snapshot, environ: Mapping[str, str], look: Look) -> list[Finding]:
    devices = {device.label: device for gpu in snapshot.gpus for device in pinnable(gpu)}
    if not devices:
        return []
    left = visible(snapshot.gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    records = look({label: device.uuid for label, device in devices.items()})
    return [
        check_health(device, records[label], is_visible=device in left)
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
