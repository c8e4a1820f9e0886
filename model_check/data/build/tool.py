"""The data preparation tool: options of prepare_dataset.py that make a prepared directory.

`--input_dir D --output_dir O --tokenizer_type bpe --vocab_size 32000 --max_length 2048 --stride N
--num_workers 8`: each stands for a setting.
"""

import argparse
from pathlib import Path

from msgspec.structs import replace

from model_check.config.arguments import Flags, KeepSetting, given
from model_check.config.load import Request
from model_check.data.sources.midi_files import is_music
from model_check.errors import UsageError

_TOKENIZERS = ("bpe", "wordpiece", "tiktoken")
_KIND, _VOCABULARY, _LENGTH = "data.tokenizer", "data.bpe_vocab_size", "training.context_length"


def add_tool_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("making a prepared directory").add_argument
    kinds = "bpe, wordpiece (both trained on the text), tiktoken or tiktoken:ENCODING"
    add("--tokenizer-type", dest=_KIND, action=KeepSetting, metavar="KIND", help=kinds)
    size = f"of bpe and wordpiece ({_VOCABULARY})"
    add("--vocab-size", dest=_VOCABULARY, action=KeepSetting, metavar="N", help=size)
    length = f"tokens in a sequence ({_LENGTH})"
    add("--max-length", dest=_LENGTH, action=KeepSetting, metavar="T", help=length)
    overlap = "tokens that neighbouring sequences share (0); data.stride is the rest, T - N"
    add("--stride", metavar="N", help=overlap)
    num_proc = "processes that tokenize (data.num_proc)"
    add("--num-workers", dest="data.num_proc", action=KeepSetting, metavar="N", help=num_proc)
    music = "a folder of MIDI files: data.dataset=DIR data.tokenizer=midi"
    parser.add_argument("--midi", type=Path, metavar="DIR", help=music)


def tool_flags(names: argparse.Namespace) -> Flags:
    """The settings that follow from the options; from --stride: `with_stride`. Raises UsageError
    for impossible values."""
    flags: Flags = {}
    _check_tokenizer(given(names, _KIND), given(names, _VOCABULARY))
    if names.raw_data is not None or names.output_dir is not None:
        # Whether a model has room for the vocabulary is checked when one is trained.
        flags["model.vocab_size"] = ("--output-dir", "null")
    return flags | _of_music(names)


def _of_music(names: argparse.Namespace) -> Flags:
    """Raises UsageError, DataError."""
    folder: Path | None = names.midi
    if folder is None:
        return {}
    if given(names, _KIND) is not None:
        raise UsageError("--midi and --tokenizer-type: give one of them")
    if not folder.exists() or not is_music(folder, beside_text=True):
        raise UsageError(f"--midi {folder}: no MIDI file (.mid, .midi) there")
    return {"data.dataset": ("--midi", str(folder)), _KIND: ("--midi", "midi")}


def with_stride(request: Request, overlap: str, max_length: int) -> Request:
    """--stride is the overlap of sequences, data.stride the distance of their starts. `max_length`:
    what `request` asks for, by whatever name, or the default. Raises UsageError."""
    if not (overlap.isdecimal() and int(overlap) < max_length):
        raise UsageError(
            f"--stride {overlap}: tokens that neighbours share, from 0 to --max-length - 1 "
            f"({max_length - 1})"
        )
    flags = {**request.flags, "data.stride": ("--stride", str(max_length - int(overlap)))}
    return replace(request, flags=flags)


def _check_tokenizer(kind: str | None, vocab_size: str | None) -> None:
    if kind is None:
        return
    if kind.partition(":")[0] not in _TOKENIZERS:
        raise UsageError(f"--tokenizer-type {kind}: it is one of {', '.join(_TOKENIZERS)}")
    if vocab_size is not None and kind.startswith("tiktoken"):
        raise UsageError(f"--vocab-size is for bpe and wordpiece: {kind} has its own vocabulary")
