"""Which attention kernels this machine has, which pass their trial, how long it takes, and which
kernels of CUDA run: the first thing to ask a new GPU.

    python -m benchmarks.attention_trial [--self-test]

A row for each backend, with determinism and without: the trial is the one of a worker's start, on
the heads of the production preset. The names of CUDA's kernels come from a profile, which a worker
does not take: CUPTI, once started, stays. `--self-test`: on a CPU, whose numbers mean nothing.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from model_check.attention import backend
from model_check.config.backends import BACKENDS
from model_check.engine.kernels import KernelNeeds, choose_attention
from model_check.errors import ModelCheckError
from model_check.kernels import AttentionShape
from model_check.utils.trials import PASSED

PRODUCTION = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, time=8192)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--self-test", action="store_true")
    options = parser.parse_args()
    if not (options.self_test or torch.cuda.is_available()):
        print("no usable GPU (--self-test takes the CPU)")
        return 69
    device = torch.device("cpu" if options.self_test else "cuda")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}", end=", ")
    print(f"cuDNN {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    for deterministic in (True, False):
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
        for documents in (False, True):
            needs = KernelNeeds(device, torch.bfloat16, deterministic, documents)
            for name in ("auto", *BACKENDS):
                with as_at_a_start():
                    print(row(name, needs), flush=True)
    return 0


@contextmanager
def as_at_a_start() -> Iterator[None]:
    """Which kernels torch may take, and in which order, are switches of the process: a worker
    chooses once, and the choice of one row must not decide the next one's."""
    order, cudnn = torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch._C._set_sdp_priority_order(order)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


def row(name: str, needs: KernelNeeds) -> str:
    bits = "same bits" if needs.deterministic else "any bits"
    label = f"{name:<13}{bits:<10}{'documents' if needs.documents else '':<10}"
    started = time.perf_counter()
    try:
        chosen = choose_attention(name, needs, PRODUCTION, {})
    except ModelCheckError as error:
        return f"{label} no: {error}"
    seconds = time.perf_counter() - started
    kernels = ", ".join(cuda_kernels(chosen.name, needs)) or chosen.kernel
    failed = {trial: shown for trial, shown in chosen.trials.items() if shown != PASSED}
    failures = "".join(f"; {trial}: it {shown}" for trial, shown in failed.items())
    return f"{label} {chosen.name} in {seconds:.2f} s: {kernels} {chosen.package or ''}{failures}"


def cuda_kernels(name: str, needs: KernelNeeds) -> list[str]:
    """Of a forward and a backward pass, those whose names tell of attention."""
    if needs.device.type != "cuda" or needs.documents:
        return []
    attend = backend(name, deterministic=needs.deterministic)
    q, k, v = (drawn(heads, needs) for heads in (32, 8, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend(q, k, v, None).sum().backward()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    words = ("flash", "attn", "attention", "fmha", "sdpa")
    return [each[:90] for each in names if any(word in each.lower() for word in words)]


def drawn(num_heads: int, needs: KernelNeeds) -> Tensor:
    sizes = (1, num_heads, 2048, 128)
    return torch.randn(sizes, device=needs.device, dtype=needs.dtype, requires_grad=True)


if __name__ == "__main__":
    raise SystemExit(main())
