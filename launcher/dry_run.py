"""The plan in words or JSON: what would be started, where, with which environment."""

import json
import shlex
from typing import Any

from launcher.launch import Session
from launcher.plan import WorkerSpec, plan_prepare
from model_check.config.memory import describe_size


def describe(session: Session, *, as_json: bool) -> str:
    """Every process that a run would start; nothing was started, made or reserved."""
    specs = [] if session.arguments.command else [plan_prepare(session.around)]
    specs += session.specs
    rows = [_row(spec, session) for spec in specs]
    if as_json:
        plan = {
            "schema": 1,
            "device": session.loaded.device,
            "why": session.picked.why,
            "notes": list(session.picked.notes),
            "preset": session.loaded.preset,
            "run_dir": str(session.around.run_dir),
            "grace_s": session.limits.grace_s,
            "hang_timeout_s": session.limits.silence_s,
            "processes": rows,
        }
        return json.dumps(plan, indent=2)
    lines = [f"device {session.loaded.device} ({session.picked.why}); would start:"]
    if not session.arguments.command:
        size = describe_size(session.loaded.settings, session.loaded.device)
        lines.insert(0, f"model: {size}")
    lines[:0] = session.picked.notes
    for row in rows:
        env = " ".join(f"{name}={shlex.quote(value)}" for name, value in row["env"].items())
        lines += [
            f"{row['name']}:",
            f"  {env}",
            f"  {shlex.join(row['argv'])}",
            f"  > {row['log']}",
        ]
    return "\n".join(f"[launcher] {line}" for line in lines)


def _row(spec: WorkerSpec, session: Session) -> dict[str, Any]:
    inherited = session.around.environ
    changed = {n: v for n, v in sorted(spec.env.items()) if inherited.get(n) != v}
    return {
        "name": spec.name,
        "argv": list(spec.argv),
        "env": changed,
        "log": str(spec.log_path),
        "cpus": sorted(spec.cpus),
    }
