"""How fast does a model of ours go on with a text, beside transformers.generate with its weights?

    python -m benchmarks.generate [--rounds N] [--tokens N] [--threads N]

Both take the likeliest token, with a cache of keys and values, in one process, in turns; a round
compares its own times. Their tokens must be equal.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from transformers import LlamaForCausalLM

from model_check.attention import sdpa
from model_check.config.schema import ModelSettings, Settings, TrainingSettings
from model_check.config.shape import geometry
from model_check.export import export
from model_check.generate.generate import next_tokens
from model_check.generate.sampling import Sampling
from model_check.init import build_model
from model_check.model import Llama

VOCABULARY = 8192
SHAPE = ModelSettings(
    num_layers=8,
    hidden_size=512,
    intermediate_size=1376,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=VOCABULARY,
    init_std=0.1,
)
PROMPT = torch.randint(0, VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(1))


def both() -> tuple[Llama, LlamaForCausalLM]:
    settings = Settings(model=SHAPE, training=TrainingSettings(context_length=2048))
    ours = build_model(settings, geometry(SHAPE, VOCABULARY), sdpa, torch.device("cpu")).eval()
    state = {"schema": 2, "model": ours.state_dict(), "settings": msgspec.to_builtins(settings)}
    with tempfile.TemporaryDirectory() as place:
        torch.save(state, Path(place) / "last.pt")
        export(Path(place) / "last.pt", Path(place) / "out")
        return ours, LlamaForCausalLM.from_pretrained(Path(place) / "out").eval()


def by_us(model: Llama, num: int) -> list[int]:
    tokens = next_tokens(model, PROMPT[0].tolist(), Sampling(temperature=0))
    return [next(tokens) for _ in range(num)]


@torch.inference_mode()
def by_transformers(model: LlamaForCausalLM, num: int) -> list[int]:
    made = model.generate(
        PROMPT, max_new_tokens=num, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(made[0, PROMPT.shape[1] :].tolist())


def timed(call: Callable[[], list[int]]) -> tuple[float, list[int]]:
    began = time.perf_counter()
    tokens = call()
    return time.perf_counter() - began, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    names = parser.parse_args()
    torch.set_num_threads(names.threads)
    ours, theirs = both()
    calls = {
        "ours": lambda: by_us(ours, names.tokens),
        "transformers": lambda: by_transformers(theirs, names.tokens),
    }
    for call in calls.values():
        call()
    rates: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(names.rounds):
        order = sorted(calls, reverse=bool(number % 2))
        told = {name: timed(calls[name]) for name in order}
        assert told["ours"][1] == told["transformers"][1], "other tokens"
        for name, (seconds, _) in told.items():
            rates[name].append(names.tokens / seconds)
    ratios = [a / b for a, b in zip(rates["ours"], rates["transformers"], strict=True)]
    for name, values in rates.items():
        print(f"{name}: {statistics.median(values):.0f} tokens/s")
    print(
        f"ratio, median of {names.rounds} rounds: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
