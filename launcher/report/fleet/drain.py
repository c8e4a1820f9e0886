"""`report --drain`: the commands that take the nodes with a condemned GPU out of service, for a
person or a script to run. Runs none. Pure.

Only what is ISOLATE or RESET becomes a command. A worker that is suspected and not replayed becomes
a comment with the command that decides.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from launcher.verdict.fleet import Finding, FleetResult, FleetRun
from launcher.verdict.fleet_merge import is_condemned, name_of
from launcher.verdict.results import Verdict
from launcher.verdict.severity import Repeat, Severity, in_words
from model_check.utils.project_files import PROGRAM
from model_check.utils.words import printable

# A host name. Slurm reads others as lists of nodes (node[1-9]), kubectl some as options.
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_ALL = ("all",)
"""Slurm's word for all nodes."""
_LONGEST = 240
"""Characters of a reason: `sinfo -R` and `kubectl describe` show it in a line."""
_ANNOTATION = "model-check/drain-reason"


def drain_lines(result: FleetResult) -> Iterator[str]:
    """A shell script: commands, and comments."""
    hard: dict[str, list[Finding]] = {}
    last_run: dict[str, FleetRun] = {}
    newest = _newest_runs(result.runs)
    for finding in result.findings:
        if is_condemned(finding):
            own = result.runs[finding.run]
            run = newest.get(finding.device.uuid or "", own)
            if (node := _machine(run)) != _machine(own):
                yield _comment(f"{_machine(own)}: {finding.device.uuid} was in {node} later")
            hard.setdefault(node, []).append(finding)
            last_run.setdefault(node, run)
    for node, findings in hard.items():
        yield from _of_node(last_run[node], findings)
    yield from _not_yet(result.findings, {*hard})
    if not hard:
        yield "# no node is to be drained: nothing here is ISOLATE or RESET"


def _newest_runs(runs: Sequence[FleetRun]) -> dict[str, FleetRun]:
    """UUID -> the last run of that GPU, by the clocks of its machines: somebody may have put it
    into another one. Without pods whose node is not known."""
    newest: dict[str, FleetRun] = {}
    for run in sorted(runs, key=lambda each: each.started_s or 0.0):
        if not _is_pod_alone(run):
            newest |= {w.device.uuid: run for w in run.workers if w.device.uuid}
    return newest


def _is_pod_alone(run: FleetRun) -> bool:
    """Whether it ran in a pod, on nobody knows which node."""
    return run.scheduler == "kubernetes" and run.node is None


def _machine(run: FleetRun | Finding) -> str:
    return run.node or run.host


def _of_node(run: FleetRun, findings: Sequence[Finding]) -> Iterator[str]:
    node, scheduler, reason = _machine(run), run.scheduler, _reason(findings)
    if _is_pod_alone(run):
        yield _comment(
            f"{run.host} is a pod: its node is not known (give the pod NODE_NAME by the "
            f"downward API, spec.nodeName): {reason}"
        )
        return
    if not _NODE.fullmatch(node) or node.lower() in _ALL:
        yield _comment(f"{node!a} is no name of a node: {reason}")
        return
    yield _comment(f"{node}: {reason}")
    if scheduler in ("slurm", None):
        yield shlex.join(
            ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"]
        )
    if scheduler is None:
        yield _comment("or, where Kubernetes runs it:")
    if scheduler in ("kubernetes", None):
        lines = (
            ["kubectl", "cordon", node],
            ["kubectl", "annotate", "node", node, "--overwrite", f"{_ANNOTATION}={reason}"],
            ["kubectl", "drain", node, "--ignore-daemonsets"],
        )
        yield from (shlex.join(line) for line in lines)


def _not_yet(findings: Sequence[Finding], drained: set[str]) -> Iterator[str]:
    for each in findings:
        if each.seen == "dead":
            yield _comment(f"not known: {name_of(each)}: {each.what}")
        is_named = each.verdict is Verdict.SUSPECT and each.severity is Severity.MONITOR
        node = _machine(each)
        if is_named and each.worker is not None and node not in drained:
            yield _comment(f"not yet: {node}: {_short(each)}. {_what_next(each, each.worker)}")


def _what_next(finding: Finding, worker: str) -> str:
    if finding.repeat is Repeat.TRANSIENT:
        return "The next time, it is ISOLATE"
    again = shlex.join(["replay", finding.directory, worker])
    return f"Does it come again? {PROGRAM} {again}"


def _reason(findings: Sequence[Finding]) -> str:
    text = "; ".join(dict.fromkeys(map(_short, findings)))
    text = f"model_check: {text}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _short(finding: Finding) -> str:
    """One line, without what a shell, `scontrol` or a comment would read otherwise."""
    device = finding.device
    serial = f"serial {device.serial}" if device.serial else None
    known = ", ".join(filter(None, [device.uuid, device.pci_bus_id, serial]))
    who = f"{finding.worker or 'run'} ({known})" if known else f"{finding.worker or 'run'}"
    drill = f"DRILL {finding.drill}: " if finding.drill else ""
    severity = finding.severity
    words = severity and in_words(severity, finding.cause_class, finding.repeat)
    return printable(f"{drill}{who}: {words or finding.verdict}: {finding.what}")


def _comment(text: str) -> str:
    return f"# {printable(text)}"
