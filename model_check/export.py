"""Write a checkpoint as a directory that transformers' `LlamaForCausalLM.from_pretrained` loads:
`run.sh export CHECKPOINT OUT_DIR`. `model.init_from` reads such directories, too."""

import json
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor

from model_check.config.arguments import Parser
from model_check.config.attention import KINDS
from model_check.config.geometry import HF_KEYS, HF_SCALING_KEYS, LLAMA
from model_check.config.schema import ModelSettings, Settings
from model_check.config.shape import EMBEDDING, geometry, hf_name, parameters
from model_check.data.read.manifest import (
    LONGEST,
    TOKENIZER,
    ViewManifest,
    hold_view,
    read_manifest,
    read_tokenizer,
    short,
    store_of,
)
from model_check.data.sources.chat import TEMPLATE, ChatTemplate, chat_of
from model_check.data.sources.declared import CONFIG as TOKENIZER_CONFIG
from model_check.data.sources.declared import declared_in
from model_check.data.tokenizers.marks import Marks, end_of_answers, marks_of
from model_check.data.tokenizers.tokenizer import TextTokenizer, document_in, parse
from model_check.engine.checkpoint import not_ours, read_checkpoint, settings_of, tokenizer_of
from model_check.engine.saving.lineage import newest_in
from model_check.errors import (
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    ConfigError,
    ModelCheckError,
    StorageError,
)
from model_check.utils.files import read_whole, sync
from model_check.utils.garbage import leave
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import complain, open_missing_streams, put
from model_check.utils.words import few, printable_lines

CONFIG = "config.json"
_EXAMPLES = """\
examples:
  bash run.sh export .checkpoints/gpu0/last.pt OUT
  bash run.sh export .checkpoints/gpu0 OUT          the newest of a directory
  bash run.sh export last.pt OUT --dtype bfloat16
  bash run.sh export .checkpoints/step_500 OUT      of --mode fsdp
"""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 5 * 10**9,
    tokenizer: Path | None = None,
) -> list[Path]:
    """The files of a new directory `out`; it appears whole or not at all. Raises StorageError,
    CheckpointError, ConfigError, DataError.

    `tokenizer`: a tokenizer.json to put in; None: the run's, which the checkpoint holds; of an
    older one, where its token cache still exists. Beside it lies what transformers' AutoTokenizer
    needs.
    """
    try:
        checkpoint = newest_in(checkpoint)
    except OSError as error:
        raise ConfigError(f"{checkpoint}: cannot be read: {error.strerror}") from error
    state = read_checkpoint(checkpoint)
    settings = settings_of(state, checkpoint)
    _refuse_other_names(state, settings.model, checkpoint)
    if not KINDS[settings.model.attention].is_llama:
        raise ConfigError(
            f"{checkpoint}: model.attention = {settings.model.attention}: transformers' LLaMA has "
            "no such attention, and would compute other numbers with these weights"
        )
    weights = {
        str(hf_name(name)): value.to(_DTYPES[dtype]).contiguous()
        for name, value in state["model"].items()
    }
    with _new_directory(out) as beside:
        content = _tokenizer(state, settings, checkpoint, tokenizer)
        vocab_size = len(state["model"][EMBEDDING.name])
        config = config_json(settings, vocab_size, dtype)
        if content is not None:
            place, chat = tokenizer or checkpoint, chat_of(state.get("chat"), checkpoint)
            kept = state.get("end_token")
            end_token = kept if tokenizer is None else declared_in(tokenizer.parent).end
            raw = parse(document_in(content, place), place)
            text_tokenizer = TextTokenizer(raw, str(place), end_token)
            config |= _ids_of_marks(text_tokenizer, settings, chat)
            (beside / TOKENIZER).write_bytes(content)
            _write_tokenizer_config(beside, settings, marks_of(text_tokenizer, settings), chat)
        _write_json(beside / CONFIG, config)
        _write_weights(beside, weights, max_shard_bytes)
    return sorted(out.iterdir())


def _ids_of_marks(
    tokenizer: TextTokenizer, settings: Settings, chat: ChatTemplate | None
) -> dict[str, Any]:
    """What a config.json says of the tokens that begin and end a text. Raises DataError."""
    marks = marks_of(tokenizer, settings)
    ends = [tokenizer.end_id, *end_of_answers(tokenizer, chat).ids]
    return {
        "bos_token_id": marks.begin and marks.begin.id,
        "eos_token_id": ends if len(ends) > 1 else ends[0],
    }


def _write_tokenizer_config(
    directory: Path, settings: Settings, marks: Marks, chat: ChatTemplate | None
) -> None:
    config = tokenizer_config_json(settings, marks)
    if chat is not None:
        (directory / TEMPLATE).write_text(chat.text, encoding="utf-8")
        named = {"bos_token": chat.begin_token, "eos_token": chat.end_token}
        config |= {name: token for name, token in named.items() if token is not None}
    _write_json(directory / TOKENIZER_CONFIG, config)


def config_json(settings: Settings, vocab_size: int, dtype: str) -> dict[str, Any]:
    """transformers' config.json, in the keys that its versions 4 and 5 both read."""
    model = settings.model
    given = msgspec.to_builtins(model)
    # What follows where it is not given: a null means nothing to transformers.
    sizes = given | msgspec.to_builtins(geometry(model, vocab_size))
    context, scaling = settings.training.context_length, model.rope_scaling
    longest = int(scaling.factor * scaling.original_context_length) if scaling else context
    return {
        "architectures": ["LlamaForCausalLM"],
        **LLAMA,
        **{hf_key: sizes[key] for key, hf_key in HF_KEYS.items()},
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": model.init_std,
        "max_position_embeddings": max(context, longest),
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            **{hf_key: getattr(scaling, key) for key, hf_key in HF_SCALING_KEYS.items()},
        },
        "rope_theta": model.rope_theta,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def tokenizer_config_json(settings: Settings, marks: Marks) -> dict[str, Any]:
    """transformers' tokenizer_config.json; the rest is in tokenizer.json."""
    names = {"bos_token": marks.begin, "eos_token": marks.end}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings.training.context_length,
        **{name: mark.token for name, mark in names.items() if mark is not None},
    }


def _refuse_other_names(state: Mapping[str, Any], model: ModelSettings, path: Path) -> None:
    """Raises CheckpointError for weights that are not those of the model that the settings name."""
    rows = parameters(model)
    if others := sorted(state["model"].keys() ^ {row.name for row in rows}):
        raise not_ours(path, f"its weights are not those of its settings: {few(others)}")


def _tokenizer(
    state: Mapping[str, Any], settings: Settings, checkpoint: Path, given: Path | None
) -> bytes | None:
    """What is put in; None: there is none. Raises CheckpointError, DataError, OSError."""
    if given is not None:
        return read_whole(given, LONGEST)
    held = tokenizer_of(state, checkpoint, LONGEST)
    return held or _tokenizer_of_run(state.get("data"), settings.data.cache_dir)


def _tokenizer_of_run(data: object, cache_dir: str) -> bytes | None:
    """The tokenizer.json of the run's token cache; None where the cache is gone. Raises
    DataError."""
    key = short(str(data.get("cache", ""))) if isinstance(data, dict) else ""
    for path in Path(cache_dir).glob(f"*__{key}") if key else ():
        with suppress(FileNotFoundError), hold_view(path) as held:
            return read_tokenizer(store_of(path, read_manifest(held, ViewManifest)))
    return None


@contextmanager
def _new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory beside `out` that becomes `out`. Raises StorageError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StorageError(f"{out}: exists and is not an empty directory: export to a new one")
    beside = out.with_name(f".{out.name}.exporting")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for file in beside.iterdir():
            sync(file)
        beside.replace(out)
        sync(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write_weights(directory: Path, weights: dict[str, Tensor], max_shard_bytes: int) -> None:
    """One file; numbered ones with an index where it would exceed `max_shard_bytes`. With the mode
    of any new file: safetensors makes files that only their owner can read."""
    metadata = {"format": "pt"}
    save_torch_state_dict(weights, directory, max_shard_size=max_shard_bytes, metadata=metadata)
    mode = stat.S_IMODE((directory / CONFIG).stat().st_mode)
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _parser() -> Parser:
    usage = f"{COMMAND} export CHECKPOINT OUT_DIR [OPTIONS]"
    parser = Parser(usage=usage, description=__doc__, epilog=_EXAMPLES)
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a file or a sharded one"
    )
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help="a new or empty directory")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32")
    parser.add_argument("--tokenizer", type=Path, metavar="TOKENIZER.json", help="to put in")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, metavar="GB")
    return parser


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    try:
        names = _parser().read(argv)
        files = export(
            names.checkpoint,
            names.out,
            dtype=names.dtype,
            max_shard_bytes=int(names.max_shard_gb * 1e9),
            tokenizer=names.tokenizer,
        )
        found = ", ".join(file.name for file in files)
        put(printable_lines(f"exported {names.checkpoint} to {names.out}: {found}"))
        if not any(file.name == TOKENIZER for file in files):
            put(
                f"without {TOKENIZER}: this checkpoint holds none, and the token cache of its run "
                "is gone; --tokenizer FILE puts one in"
            )
    except ModelCheckError as error:
        complain(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    return EXIT_PASS


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
