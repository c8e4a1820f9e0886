"""The validation loss that a run reports, against the same text's loss by transformers alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from model_check.events import Evaluation
from model_check.export import export
from tests.engine.conftest import Worker

CONTEXT = 64
TEXT = "\n".join(
    f"On day {n} the box held {n * n % 17} units, of which {n % 5} had failed; {n % 7} was odd."
    for n in range(160)
)
"""No multiple of the context when tokenized, so the last window is padded."""


def loss_by_transformers(exported: Path) -> tuple[float, int]:
    """The mean loss over all tokens of TEXT but the first, and how many they are. Each is predicted
    once, from what stands before it in its window of CONTEXT tokens."""
    model = LlamaForCausalLM.from_pretrained(exported)
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    (end_id,) = tokenizer.get_added_tokens_decoder()
    ids = [*tokenizer.encode(TEXT, add_special_tokens=False).ids, end_id]
    assert (len(ids) - 1) % CONTEXT != 0
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, CONTEXT):
            window = torch.tensor([ids[start : start + CONTEXT + 1]])
            mean: float = model(window, labels=window).loss.item()  # it shifts the labels itself
            total += mean * (window.shape[1] - 1)
    return total / (len(ids) - 1), len(ids) - 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_validation_loss_is_that_of_transformers_on_the_same_text(
    start: Callable[..., Worker], tmp_path: Path, batch_size: int
) -> None:
    (tmp_path / "own.txt").write_text(TEXT)
    worker = start(
        "data.validation=own=own.txt",
        f"training.batch_size={batch_size}",
        f"training.context_length={CONTEXT}",
        "training.eval_interval=4",
        "training.save_last=true",
    )
    assert worker.finish() == 0, worker.output
    (evaluation,) = [event for event in worker.events if isinstance(event, Evaluation)]
    export(tmp_path / ".checkpoints" / "last.pt", tmp_path / "exported")
    loss, num_labels = loss_by_transformers(tmp_path / "exported")
    assert evaluation.tokens == num_labels
    assert float.fromhex(evaluation.loss) == pytest.approx(loss, rel=1e-6)
