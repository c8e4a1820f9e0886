"""The plan in words or JSON: what would be started, where, with which environment."""

import json
import shlex
from typing import Any

from launcher.launch import Launch
from launcher.plan import WorkerSpec, plan_prepare
from model_check.config.memory import describe_size
from model_check.utils.secrets import masked_argv, masked_values


def describe(launch: Launch, *, as_json: bool) -> str:
    """Every process that a run would start. Starts, makes and reserves nothing."""
    specs = [] if launch.arguments.command else [plan_prepare(launch.context)]
    specs += launch.specs
    rows = [_row(spec, launch) for spec in specs]
    if as_json:
        plan = {
            "schema": 1,
            "device": launch.loaded.device,
            "why": launch.picked.why,
            "notes": list(launch.picked.notes),
            "preset": launch.loaded.preset,
            "run_dir": str(launch.context.run_dir),
            "grace_s": launch.limits.grace_s,
            "hang_timeout_s": launch.limits.silence_s,
            "repeat": launch.loaded.settings.launch.repeat,
            "soak_s": launch.loaded.settings.launch.soak_s,
            "processes": rows,
        }
        return json.dumps(masked_values(plan), indent=2)
    lines = [f"device {launch.loaded.device} ({launch.picked.why}); would start:"]
    if not launch.arguments.command:
        size = describe_size(launch.loaded.settings, launch.loaded.device)
        lines.insert(0, f"model: {size}")
    lines[:0] = launch.picked.notes
    for row in rows:
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in row["env"].items())
        lines += [
            f"{row['name']}:",
            f"  {env}",
            f"  {shlex.join(row['argv'])}",
            f"  > {row['log']}",
        ]
    return "\n".join(f"[launcher] {line}" for line in lines)


def _row(spec: WorkerSpec, launch: Launch) -> dict[str, Any]:
    inherited = launch.context.environ
    changed = {n: v for n, v in sorted(spec.env.items()) if inherited.get(n) != v}
    return {
        "name": spec.name,
        "argv": masked_argv(spec.argv),
        "env": changed,
        "log": str(spec.log_path),
        "cpus": sorted(spec.cpus),
    }
