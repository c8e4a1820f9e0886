"""The memory that is predicted for a CPU worker beside the peak of a real one, shape by shape.

    python -m benchmarks.memory_estimate [NAME ...]

A row: predicted MiB, measured MiB (VmHWM, as the worker's last event tells it), their ratio. A
GPU's allocator is another one: of its prediction only the activations are held against anything
(tests/models/test_memory_estimate.py).
"""

import sys
import tempfile
from pathlib import Path

from model_check.config.load import Request, load
from model_check.config.memory import estimate_memory
from tests.models.test_memory_estimate import TINY, peak_of_a_worker

LONG, EIGHT = "training.context_length=512", "training.batch_size=8"
WIDE = ("model.hidden_size=512", "model.intermediate_size=1376")
SHAPES = {
    "cpu preset": (),
    "one micro-batch of 512": (LONG,),
    "two micro-batches": (LONG, "training.grad_accum_nums=2"),
    "bf16": (LONG, "training.use_amp=true"),
    "bf16, two micro-batches": (LONG, "training.use_amp=true", "training.grad_accum_nums=2"),
    "bf16, wide": (*WIDE, "training.use_amp=true"),
    "documents": (LONG, "data.document_masking=true"),
    "eager": (LONG, "model.attention_backend=eager"),
    "local": ("training.context_length=1024", "model.attention=local"),
    "infini": ("training.context_length=1024", "model.attention=infini"),
    "wide": WIDE,
    "deep": ("model.num_layers=8", "training.batch_size=4"),
    "tiny geometry": (*TINY, LONG, EIGHT),
    "the same, recomputed": (*TINY, LONG, EIGHT, "training.gradient_checkpointing=true"),
}


def main() -> int:
    directory = Path(tempfile.mkdtemp())
    text = directory / "text.txt"
    text.write_text(" ".join(map(str, range(20_000))))
    common = (
        *("data.tokenizer=bpe", "data.bpe_vocab_size=400", "model.vocab_size=8192"),
        *(f"data.dataset={text}", f"data.cache_dir={directory}/cache"),
        *("training.max_steps=3", "system.num_threads=1"),
    )
    print("| shape | predicted MiB | measured | ratio |\n|---|---|---|---|", file=sys.stderr)
    ratios = []
    for name, overrides in SHAPES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        request = Request(preset="cpu", overrides=(*common, *overrides))
        settings = load(request, lambda: False).settings
        predicted = estimate_memory(settings, "cpu").total
        measured = peak_of_a_worker(settings, directory)
        ratios.append(predicted / measured)
        row = f"| {name} | {predicted / 2**20:.0f} | {measured / 2**20:.0f} | {ratios[-1]:.3f} |"
        print(row, file=sys.stderr)
    return 0 if all(0.9 <= ratio <= 1.1 for ratio in ratios) else 1


if __name__ == "__main__":
    raise SystemExit(main())
