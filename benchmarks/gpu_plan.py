"""What a training step should take, computed and never measured: a table by operator for one GPU,
and a row for each GPU that is known. `run.sh --dry-run --gpu-model` prints the same of one run.

    python -m benchmarks.gpu_plan [--gpu-model H100] [--json] [section.key=value ...]

Products and attention take their FLOPs at a share of the GPU's peak, everything else its bytes at a
share of its memory's speed; `model_check/config/roofline.py` names the source of each share. The
columns are the runs that benchmarks/trainer_gpu.py measures: hold its rows against them.
"""

import argparse
import json

from launcher.gpus.sizes import fitted
from model_check.config.gpu_models import GPU_MODELS, GpuModel, gpu_model
from model_check.config.load import Request, load
from model_check.config.memory import estimate_memory, expected_geometry
from model_check.config.roofline import Plan, plan_step
from model_check.config.schema import Settings

FREE = ("system.deterministic=false",)
COMPILED = (*FREE, "training.compile=true", "training.grad_accum_nums=4")
COLUMNS = {
    "as shipped": (),
    "any kernel": FREE,
    "compiled, 4 micro-batches": COMPILED,
    "the same, batch 4": (*COMPILED, "training.batch_size=4"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--gpu-model", default="H100", help="of the table by operator")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    gpu, overrides = gpu_model(options.gpu_model), tuple(options.overrides)
    columns = {name: plan(gpu, (*more, *overrides)) for name, more in COLUMNS.items()}
    rows = [of_gpu(each, overrides) for each in GPU_MODELS]
    if options.json:
        print(
            json.dumps({"gpu": gpu.name, "columns": by_operator(columns), "gpus": rows}, indent=2)
        )
        return 0
    print_operators(gpu, columns)
    print_gpus(rows)
    return 0


def settings_of(overrides: tuple[str, ...]) -> Settings:
    return load(Request(preset="production", overrides=overrides), lambda: True).settings


def plan(gpu: GpuModel, overrides: tuple[str, ...]) -> Plan:
    settings = settings_of(overrides)
    found = plan_step(settings, expected_geometry(settings), gpu)
    assert found is not None, "no peaks are known for float32"
    return found


def by_operator(columns: dict[str, Plan]) -> dict[str, dict[str, float]]:
    return {
        name: {row.name: row.ms for row in plan.operators}
        | {
            "step_ms": plan.step_ms,
            "tokens_per_s": plan.tokens_per_s,
            "mfu_full": plan.mfu(plan.flops.full),
        }
        for name, plan in columns.items()
    }


def of_gpu(gpu: GpuModel, overrides: tuple[str, ...]) -> dict[str, float | str | bool]:
    """With the preset that a run there would take."""
    request = Request(overrides=overrides)
    loaded, _ = fitted(load(request, lambda: True), request, [gpu.memory_mib / 1024])
    settings = loaded.settings
    found = plan_step(settings, expected_geometry(settings), gpu)
    memory = estimate_memory(settings, "cuda").total
    assert found is not None
    return {
        "gpu": gpu.short,
        "preset": loaded.preset,
        "memory_gib": memory / 2**30,
        "has_gib": gpu.memory_mib / 1024,
        "fits": memory <= gpu.memory_bytes,
        "step_ms": found.step_ms,
        "tokens_per_s": found.tokens_per_s,
        "mfu_full": found.mfu(found.flops.full),
    }


def print_operators(gpu: GpuModel, columns: dict[str, Plan]) -> None:
    print(f"{gpu.name}, preset production: computed, not measured; ms for 8,192 tokens\n")
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    each = by_operator(columns)
    shares = [8192 / plan.tokens for plan in columns.values()]
    names = dict.fromkeys(word_of(row.name) for plan in columns.values() for row in plan.operators)
    for name in names:
        of = [sum(ms for key, ms in each[c].items() if word_of(key) == name) for c in columns]
        print(
            f"| {name} | "
            + " | ".join(f"{x * y:.1f}" for x, y in zip(of, shares, strict=True))
            + " |"
        )
    ends = [
        f"{p.step_ms * s:.0f}; {p.mfu(p.flops.full):.1%}"
        for p, s in zip(columns.values(), shares, strict=True)
    ]
    print("| sum; MFU, full attention | " + " | ".join(ends) + " |\n")


def word_of(name: str) -> str:
    """`attention (sdpa)` and `attention (cudnn)` share a row."""
    return name.partition(" (")[0]


def print_gpus(rows: list[dict[str, float | str | bool]]) -> None:
    print("| GPU, as shipped | preset | memory GiB | step ms | tokens/s | MFU |\n|" + "---|" * 6)
    for row in rows:
        memory = f"{row['memory_gib']:.1f} of {row['has_gib']:.1f}" + ("" if row["fits"] else " NO")
        print(
            f"| {row['gpu']} | {row['preset']} | {memory} | {row['step_ms']:.0f} "
            f"| {row['tokens_per_s']:,.0f} | {row['mfu_full']:.1%} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
