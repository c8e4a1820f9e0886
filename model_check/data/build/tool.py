"""The data preparation tool: options of prepare_dataset.py that make a prepared directory.

`--input_dir D --output_dir O --tokenizer_type bpe --vocab_size 32000 --max_length 2048 --stride N
--num_workers 8`: each stands for a setting.
"""

import argparse

from model_check.config.arguments import Flags, given_flags
from model_check.errors import UsageError

_TOKENIZERS = ("bpe", "wordpiece", "tiktoken")

_SETTINGS = {
    "tokenizer_type": "data.tokenizer",
    "vocab_size": "data.bpe_vocab_size",
    "max_length": "training.context_length",
    "num_workers": "data.num_proc",
}


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("making a prepared directory").add_argument
    kinds = "bpe, wordpiece (both trained on the text), tiktoken or tiktoken:ENCODING"
    add("--tokenizer-type", metavar="KIND", help=kinds)
    add("--vocab-size", metavar="N", help="of bpe and wordpiece (data.bpe_vocab_size)")
    add("--max-length", metavar="T", help="tokens in a sequence (training.context_length)")
    overlap = "tokens that neighbouring sequences share (0); data.stride is the rest, T - N"
    add("--stride", metavar="N", help=overlap)
    add("--num-workers", metavar="N", help="processes that tokenize (data.num_proc)")


def tool_flags(names: argparse.Namespace) -> Flags:
    """The settings that the options stand for. Raises UsageError for impossible values."""
    flags = given_flags(names, _SETTINGS)
    _check_tokenizer(names.tokenizer_type, names.vocab_size)
    if names.stride is not None:
        flags["data.stride"] = ("--stride", _stride_of(names.stride, names.max_length))
    if names.raw_data is not None or names.output_dir is not None:
        # Whether a model has room for the vocabulary is checked when one is trained.
        flags["model.vocab_size"] = ("--output-dir", "null")
    return flags


def _check_tokenizer(kind: str | None, vocab_size: str | None) -> None:
    if kind is None:
        return
    if kind.partition(":")[0] not in _TOKENIZERS:
        raise UsageError(f"--tokenizer-type {kind}: it is one of {', '.join(_TOKENIZERS)}")
    if vocab_size is not None and kind.startswith("tiktoken"):
        raise UsageError(f"--vocab-size is for bpe and wordpiece: {kind} has its own vocabulary")


def _stride_of(overlap: str, max_length: str | None) -> str:
    """--stride is the overlap of sequences, data.stride the distance of their starts."""
    if max_length is None:
        raise UsageError("--stride: give --max-length too, of which it is a part")
    if not (overlap.isdecimal() and max_length.isdecimal() and int(overlap) < int(max_length)):
        raise UsageError(
            f"--stride {overlap}: tokens that neighbours share, from 0 to --max-length - 1"
        )
    return str(int(max_length) - int(overlap))
