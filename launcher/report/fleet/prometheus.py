"""`report --prometheus FILE`: a fleet, or one run, in the text form that node_exporter's textfile
collector reads. Pure.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, 0.0.4). No times of
samples: the collector refuses them.
"""

from collections.abc import Callable, Iterator, Mapping

from launcher.verdict.fleet import FleetResult, FleetRun, FleetWorker
from launcher.verdict.fleet_merge import name_of
from model_check.utils.words import printable

Labels = Mapping[str, str]
Sample = tuple[Labels, float]


def prometheus_text(result: FleetResult, now_s: float) -> str:
    """The whole file. `now_s`: seconds since 1970."""
    lines: list[str] = []
    for name, (about, samples) in _metrics(result, now_s).items():
        told = [f"model_check_{name}{_labels(labels)} {_number(v)}" for labels, v in samples]
        if told:
            lines += [f"# HELP model_check_{name} {about}", f"# TYPE model_check_{name} gauge"]
            lines += told
    return "\n".join(lines) + "\n"


def _metrics(result: FleetResult, now_s: float) -> dict[str, tuple[str, list[Sample]]]:
    """Name -> what it is, and its samples. All are gauges: a later file may tell less."""
    return {
        "report_timestamp_seconds": ("When this file was written.", [({}, now_s)]),
        "exit_code": ("Exit code of all runs together; 0: passed.", [({}, result.exit_code)]),
        "verdict": (
            "1 for the verdict of all runs together.",
            [({"verdict": str(result.verdict)}, 1)],
        ),
        "findings": ("What is wrong or to be watched, by kind.", list(_findings(result))),
        "run_exit_code": (
            "Exit code of the run; 0: passed.",
            [(_of_run(run), run.exit_code) for run in result.runs],
        ),
        "run_verdict": (
            "1 for the verdict of the run, with what the merge has found.",
            [({**_of_run(run), **_judged(run, run)}, 1) for run in result.runs],
        ),
        "run_start_timestamp_seconds": ("When the run began.", list(_starts(result))),
        "worker_verdict": (
            "1 for the verdict of the worker's GPU, with its severity.",
            [
                (labels | _judged(w, run) | {"severity": str(w.severity or "")}, 1)
                for labels, w, run in _workers(result)
            ],
        ),
        **_figures(result),
    }


def _figures(result: FleetResult) -> dict[str, tuple[str, list[Sample]]]:
    """Of workers."""
    return {
        "worker_steps": (
            "Optimizer steps that were done.",
            _each(result, lambda w: w.figures.steps),
        ),
        "worker_duration_seconds": (
            "How long the worker ran.",
            _each(result, lambda w: w.figures.duration_s),
        ),
        "worker_tokens_per_second": (
            "Speed over all steps but the first.",
            _each(result, lambda w: w.figures.tokens_per_s),
        ),
        "worker_peak_memory_bytes": (
            "Peak of the device's memory; of a CPU worker, of its own.",
            _each(result, lambda w: w.figures.peak_memory_bytes),
        ),
        "worker_temperature_max_celsius": (
            "The highest temperature of the GPU in the run.",
            _each(result, lambda w: w.figures.temperature_max_c),
        ),
        "worker_speed_ratio": (
            "Speed as a multiple of its equals' in the fleet; below 1 is slower.",
            _each(result, lambda w: w.speed),
        ),
    }


def _findings(result: FleetResult) -> Iterator[Sample]:
    counts: dict[tuple[str, str, str], int] = {}
    for each in result.findings:
        key = (each.seen, str(each.verdict), str(each.severity or ""))
        counts[key] = counts.get(key, 0) + 1
    for (seen, verdict, severity), count in counts.items():
        yield {"seen": seen, "verdict": verdict, "severity": severity}, count


def _starts(result: FleetResult) -> Iterator[Sample]:
    for run in result.runs:
        if (started_s := run.started_s) is not None:
            yield _of_run(run), started_s


def _of_run(run: FleetRun) -> dict[str, str]:
    """Not `instance` and `job`: those are the scraper's own."""
    return {"node": name_of(run), "host": run.host, "run_dir": run.path}


def _judged(of: FleetRun | FleetWorker, run: FleetRun) -> dict[str, str]:
    """Of a run in which a fault was injected, no alarm is real."""
    return {"verdict": str(of.verdict), "drill": run.drill or ""}


def _workers(result: FleetResult) -> Iterator[tuple[dict[str, str], FleetWorker, FleetRun]]:
    for run in result.runs:
        for worker in run.workers:
            device = worker.device
            yield (
                _of_run(run)
                | {"worker": worker.name, "uuid": device.uuid or "", "model": device.name or ""},
                worker,
                run,
            )


def _each(result: FleetResult, value: Callable[[FleetWorker], float | int | None]) -> list[Sample]:
    told = ((labels, value(worker)) for labels, worker, _ in _workers(result))
    return [(labels, number) for labels, number in told if number is not None]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items()) + "}"


def _escaped(text: str) -> str:
    r"""As the format asks: a backslash, a quote, a line end. What is not printable is written as in
    Python, and so is a backslash: else two names could become one, and the collector refuses a file
    with the same series twice."""
    text = printable(text.replace("\\", r"\\"))
    return text.replace("\\", r"\\").replace('"', r"\"")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
