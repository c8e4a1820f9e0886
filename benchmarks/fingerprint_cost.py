"""What do fingerprints cost? `python -m benchmarks.fingerprint_cost [PASSES]`.

The tensors of a step of the `cpu` preset (5.65 million values), once for each of the seven
quantities that have its size, as fp32 and bf16; by torch's operators and by the kernel that
fingerprint_for chooses. Beside them x.sum(), which reads each value, too. Medians; on a GPU, where
there is one.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from model_check.forensics.fingerprint import Fingerprint, eager_fingerprint, fingerprint_for

SHAPES = [(8192, 256)] * 2 + [(256, 256), (128, 256), (128, 256), (256, 256), (256,), (256,)] * 2
SHAPES += [(688, 256), (688, 256), (256, 688)] * 2 + [(256,)]
NUM_QUANTITIES = 7
"""Weights and two moments before the update and after it; gradients."""


def by_sum(tensors: Sequence[Tensor], first_rows: Sequence[int] | None = None) -> Tensor:
    return torch.stack([x.sum() for x in tensors])


def ns_a_value(fingerprint: Fingerprint, quantities: list[list[Tensor]], passes: int) -> float:
    num_values = sum(x.numel() for tensors in quantities for x in tensors)
    times = []
    for _ in range(passes + 1):
        began = time.perf_counter()
        sums = [fingerprint(tensors) for tensors in quantities]
        sums[-1].tolist()  # sync
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) / num_values * 1e9


def kernels(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    fast = fingerprint_for(device)
    print(f"{device}: {fast.name} {fast.obstacle}")
    return {"x.sum()": by_sum, fast.name: fast, "eager": eager_fingerprint}


def measure(device: torch.device, passes: int) -> None:
    for name, kernel in kernels(device).items():
        for dtype in (torch.float32, torch.bfloat16):
            quantities = [
                [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
                for _ in range(NUM_QUANTITIES)
            ]
            ns = ns_a_value(kernel, quantities, passes if name != "eager" else 3)
            ms = ns * sum(x.numel() for tensors in quantities for x in tensors) / 1e6
            about = f"{torch.get_num_threads()} threads, {dtype}"
            print(f"  {about:26} {name:8} {ns:6.3f} ns a value {ms:7.2f} ms a step")


def main() -> None:
    passes = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        measure(torch.device("cpu"), passes)
    if torch.cuda.is_available():
        measure(torch.device("cuda"), passes)


if __name__ == "__main__":
    main()
