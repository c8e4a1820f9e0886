"""`--dry-run --gpu-model H100`: what the run would take on a GPU that is not here. Computed from
the settings; it looks for no GPU, and starts nothing."""

import json
from collections.abc import Iterator
from typing import Any

from msgspec.structs import asdict

from launcher.arguments import RunArguments
from launcher.gpus.sizes import fitted
from launcher.levels import duration, run_seconds
from model_check.config.flops import flops_per_token
from model_check.config.gpu_models import GpuModel, gpu_model
from model_check.config.load import Loaded, load
from model_check.config.memory import MemoryEstimate, advice, estimate_memory, expected_geometry
from model_check.config.roofline import LAUNCH_US, Plan, plan_step
from model_check.config.shape import Geometry
from model_check.errors import UsageError

COMPUTED = "computed, not measured"
_ONE = "--gpu-model plans one training: give an arm's settings without --arm and --mode compare"
_GIB = 2**30


def describe_on_model(arguments: RunArguments) -> str:
    """For a person, or JSON. Raises UsageError for a GPU that is not known and for what cannot be
    planned so, ConfigError for settings that cannot act on a GPU."""
    gpu = gpu_model(str(arguments.gpu_model))
    _refuse(arguments)
    loaded = load(arguments.request, lambda: True)
    if loaded.device != "cuda":
        raise UsageError(f"--gpu-model {gpu.short}: system.device is cpu; leave it out")
    if loaded.settings.launch.mode == "compare":
        raise UsageError(_ONE)
    loaded, notes = fitted(loaded, arguments.request, [gpu.memory_mib / 1024])
    plan = GpuPlan(loaded, gpu)
    if arguments.as_json:
        return json.dumps(plan.document(notes), indent=2)
    return "\n".join(f"[launcher] {line}" for line in (*notes, *plan.lines()))


def _refuse(arguments: RunArguments) -> None:
    if not arguments.dry_run:
        raise UsageError("--gpu-model: a run takes the GPUs that are here; with --dry-run it plans")
    if arguments.command:
        raise UsageError("--gpu-model: nothing is known of your own command (`-- COMMAND`)")
    if arguments.arms:
        raise UsageError(_ONE)


class GpuPlan:
    """What one GPU of a kind would do in a step, and hold."""

    def __init__(self, loaded: Loaded, gpu: GpuModel) -> None:
        self.loaded, self.gpu, self.settings = loaded, gpu, loaded.settings
        self.shape: Geometry = expected_geometry(self.settings)
        launch = self.settings.launch
        self.num_shards = (launch.fsdp.shard_size or 1) if launch.mode == "fsdp" else 1
        """As many as the settings tell: nothing says how many GPUs there will be."""
        self.memory: MemoryEstimate = estimate_memory(self.settings, "cuda", self.num_shards)
        self.plan: Plan | None = plan_step(self.settings, self.shape, gpu)
        self.flops = flops_per_token(self.settings, self.shape)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.gpu.memory_bytes

    def lines(self) -> Iterator[str]:
        gpu = self.gpu
        of = f" of {self.num_shards} that share the model" if self.num_shards > 1 else ""
        yield f"{gpu.short} ({gpu.name}), preset {self.loaded.preset}: {COMPUTED}, for one GPU{of}"
        yield f"model: {self.shape.num_parameters:,} parameters, {self._flops()}"
        fits = "it fits" if self.fits else f"IT DOES NOT FIT: {advice(self.settings)}"
        has = f"of {gpu.memory_bytes / _GIB:.1f} GiB there"
        yield f"memory: {self.memory.describe()}; {has}: {fits}"
        if self.settings.launch.mode == "fsdp" and self.num_shards == 1:
            yield "  as if it held the whole model: launch.fsdp.shard_size says how many share it"
        if self.plan is None:
            yield "step: no time: no peak is known here for training.precision=fp32"
            return
        yield from self._of_step(self.plan)

    def _flops(self) -> str:
        full, causal = self.flops.full / 1e9, self.flops.causal / 1e9
        text = f"{full:.3f} GFLOP a token (full attention; {causal:.3f} causal)"
        if self.plan is None:
            return text
        return f"{text}, {full * self.plan.tokens / 1e3:.1f} TFLOP a step"

    def _of_step(self, plan: Plan) -> Iterator[str]:
        full, causal = plan.mfu(self.flops.full), plan.mfu(self.flops.causal)
        yield (
            f"step: about {plan.step_ms:,.0f} ms for {plan.tokens:,} tokens, "
            f"{plan.tokens_per_s:,.0f} tokens/s, MFU {full:.1%} (full attention), "
            f"{causal:.1%} (causal)"
        )
        if plan.host_ms > plan.gpu_ms:
            yield (
                f"  the host bounds it: about {plan.num_launches:,} kernel launches at "
                f"{LAUNCH_US} us take {plan.host_ms:,.0f} ms, the GPU's work {plan.gpu_ms:,.0f} ms"
            )
        if (seconds := run_seconds(self.settings, self.gpu.name)) is not None:
            steps, soak_s = self.settings.training.max_steps, self.settings.launch.soak_s
            again = f", again and again for {duration(soak_s)}" if soak_s else ""
            took = f"about {duration(seconds)} for {steps:,} steps, start and end included"
            yield f"{'round' if soak_s else 'run'}: {took}{again}"
        if self.settings.launch.mode != "replicate":
            yield "  links between GPUs are not counted"
        for row in plan.operators:
            yield f"  {row.name:<32}{row.ms:>9,.1f} ms{row.ms / plan.gpu_ms:>8.1%}"
        yield (
            "by published shares of this GPU's peak and memory speed; clocks, cooling and kernels "
            "decide"
        )

    def document(self, notes: list[str]) -> dict[str, Any]:
        plan = self.plan
        return {
            "schema": 1,
            "kind": "gpu_plan",
            "computed": COMPUTED,
            "gpu": asdict(self.gpu),
            "preset": self.loaded.preset,
            "notes": notes,
            "num_parameters": self.shape.num_parameters,
            "flops_per_token": asdict(self.flops),
            "memory_bytes": asdict(self.memory) | {"total": self.memory.total},
            "fits": self.fits,
            "step": None if plan is None else _step(plan),
        }


def _step(plan: Plan) -> dict[str, Any]:
    return {
        "tokens": plan.tokens,
        "flops": plan.flops.full * plan.tokens,
        "ms": plan.step_ms,
        "launches": plan.num_launches,
        "host_ms": plan.host_ms,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": {name: plan.mfu(value) for name, value in asdict(plan.flops).items()},
        "attention": plan.attention,
        "operators": [asdict(row) for row in plan.operators],
    }
