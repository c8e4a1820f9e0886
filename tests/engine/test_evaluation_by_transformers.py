"""The validation loss that a run reports, against the same text's loss by transformers alone."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from model_check.events import Evaluation
from model_check.export import export
from tests.engine.conftest import Trained

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


def loss_of_documents(exported: Path, documents: list[str]) -> tuple[float, int]:
    """The same for documents that do not see each other: of each window of CONTEXT tokens every
    piece of a document is read on its own."""
    model = LlamaForCausalLM.from_pretrained(exported)
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    (end_id,) = tokenizer.get_added_tokens_decoder()
    each = [[*tokenizer.encode(d, add_special_tokens=False).ids, end_id] for d in documents]
    ends = [sum(map(len, each[: n + 1])) for n in range(len(each))]
    ids = [token for document in each for token in document]
    total, num_labels = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, CONTEXT):
            last = min(start + CONTEXT + 1, len(ids))
            borders = [start, *(end for end in ends if start < end < last), last]
            for begin, end in pairwise(borders):
                if end - begin > 1:
                    piece = torch.tensor([ids[begin:end]])
                    total += model(piece, labels=piece).loss.item() * (end - begin - 1)
                    num_labels += end - begin - 1
    return total / num_labels, num_labels


def evaluated(
    train: Callable[..., Trained], directory: Path, batch_size: int, *data: str
) -> Evaluation:
    """What the trainer says of its validation text; its model lies in `exported`."""
    worker = train(
        *data,
        f"training.batch_size={batch_size}",
        f"training.context_length={CONTEXT}",
        "training.eval_interval=4",
        "training.save_last=true",
    )
    assert worker.exit_code == 0, worker.output
    (evaluation,) = [event for event in worker.events if isinstance(event, Evaluation)]
    shutil.rmtree(directory / "exported", ignore_errors=True)
    export(directory / ".checkpoints" / "last.pt", directory / "exported")
    return evaluation


def test_with_masked_documents_it_is_that_of_each_document_alone(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    documents = [" ".join(TEXT.splitlines()[n : n + 1 + n % 9]) for n in range(30)]
    rows = (json.dumps({"text": document}) for document in documents)
    (tmp_path / "own.jsonl").write_text("\n".join(rows))
    data = ("data.validation=own=own.jsonl", "data.document_masking=true")
    for batch_size in (1, 3):
        evaluation = evaluated(train, tmp_path, batch_size, *data)
        loss, num_labels = loss_of_documents(tmp_path / "exported", documents)
        assert evaluation.tokens == num_labels
        assert float.fromhex(evaluation.loss) == pytest.approx(loss, rel=1e-6)


def test_the_validation_loss_is_that_of_transformers_on_the_same_text(
    train: Callable[..., Trained], tmp_path: Path
) -> None:
    (tmp_path / "own.txt").write_text(TEXT)
    for batch_size in (1, 3):
        evaluation = evaluated(train, tmp_path, batch_size, "data.validation=own=own.txt")
        loss, num_labels = loss_by_transformers(tmp_path / "exported")
        assert evaluation.tokens == num_labels
        assert float.fromhex(evaluation.loss) == pytest.approx(loss, rel=1e-6)
