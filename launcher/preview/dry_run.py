"""The plan in words or JSON: what would be started, where, with which environment."""

import json
import os
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from launcher.compare.compare import tagged
from launcher.compare.comparison import Comparison, asked_of, seeds_of
from launcher.devices import Hold
from launcher.gpus.probe import GpuProbe
from launcher.launch import Launch, make_launch
from launcher.output.printer import LAUNCHER_PREFIX
from launcher.plan import WorkerSpec, plan_prepare
from launcher.verdict.comparison import TrialRecord
from model_check.config.derived import in_short
from model_check.config.memory import describe_size
from model_check.utils.secrets import masked_argv, masked_values


def describe(launch: Launch, *, as_json: bool) -> str:
    """Every process that a run would start. Starts, makes and reserves nothing."""
    rows = _rows(launch)
    if as_json:
        return json.dumps(_document(launch, rows), indent=2)
    lines = [f"device {launch.loaded.device} ({launch.picked.why}); would start:"]
    if not launch.arguments.command:
        loaded, num_ranks = launch.loaded, launch.context.num_ranks or 1
        size = describe_size(loaded.settings, loaded.device, num_ranks)
        lines[:0] = [f"training: {in_short(loaded.settings, num_ranks)}", f"model: {size}"]
    lines[:0] = launch.picked.notes
    for row in rows:
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in row["env"].items())
        lines += [
            f"{row['name']}:",
            f"  {env}",
            f"  {shlex.join(row['argv'])}",
            f"  > {row['log']}",
        ]
    return "\n".join(f"{LAUNCHER_PREFIX}{line}" for line in lines)


def describe_comparison(comparison: Comparison, probe: GpuProbe, *, as_json: bool) -> str:
    """`describe` for each training, in the order in which they would begin."""
    turns = [
        [(trial, _launch(trial, comparison, probe)) for trial in turn] for turn in comparison.turns
    ]
    if as_json:
        plan = {
            "schema": 1,
            "kind": "comparison_plan",
            "arms": list(comparison.loaded),
            "seeds": seeds_of(comparison.common.settings),
            "differing": msgspec.to_builtins(comparison.differing),
            "notes": list(comparison.picked.notes),
            "turns": [[_document(each, _rows(each)) for _, each in turn] for turn in turns],
        }
        return json.dumps(masked_values(plan), indent=2)
    notes = [f"[launcher] {note}" for note in comparison.picked.notes]
    told = [
        tagged(line, trial.tag)
        for turn in turns
        for trial, launch in turn
        for line in describe(launch, as_json=False).split("\n")
    ]
    return "\n".join([*notes, f"[launcher] {comparison.order}", *told])


def _launch(trial: TrialRecord, comparison: Comparison, probe: GpuProbe) -> Launch:
    arguments = replace(
        comparison.arguments,
        request=asked_of(trial, comparison, comparison.common.settings.launch.deadline_s),
        run_dir=comparison.run_dir / trial.directory,
        level="",
        is_alone=False,
    )
    launch = make_launch(arguments, probe, comparison.environ, Hold.LOOK)
    return replace(launch, context=replace(launch.context, comparison=comparison.run_dir))


def _document(launch: Launch, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    plan = {
        "schema": 1,
        "kind": "plan",
        "device": launch.loaded.device,
        "why": launch.picked.why,
        "notes": list(launch.picked.notes),
        "preset": launch.loaded.preset,
        "run_dir": str(launch.context.run_dir),
        "grace_s": launch.limits.grace_s,
        "hang_timeout_s": launch.limits.silence_s,
        "repeat": launch.loaded.settings.launch.repeat,
        "soak_s": launch.loaded.settings.launch.soak_s,
        "processes": list(rows),
    }
    return dict(masked_values(plan))


def _rows(launch: Launch) -> list[dict[str, Any]]:
    """Every process."""
    specs = [] if launch.arguments.command else [plan_prepare(launch.context)]
    return [_row(spec) for spec in (*specs, *launch.specs)]


def _row(spec: WorkerSpec) -> dict[str, Any]:
    changed = {n: v for n, v in sorted(spec.env.items()) if os.environ.get(n) != v}
    return {
        "name": spec.name,
        "argv": masked_argv(spec.argv),
        "env": changed,
        "log": str(spec.log_path),
        "cpus": sorted(spec.cpus),
    }
