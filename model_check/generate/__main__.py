"""Text out of a trained model: `run.sh generate CHECKPOINT --prompt TEXT`. The text comes on
standard output as it is made, all else on standard error."""

import json
import math
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from model_check.config.arguments import Parser
from model_check.config.prompts import read_prompts
from model_check.errors import (
    EXIT_PASS,
    EXIT_SIGNAL_BASE,
    ConfigError,
    ModelCheckError,
    NoGpuError,
    UsageError,
)
from model_check.generate.chat import Conversation, questions
from model_check.generate.generate import Ended, Piece, generate, text_after
from model_check.generate.music import check_music, prompt_with, write_music
from model_check.generate.sampling import Sampling
from model_check.generate.text_model import TextModel, read_text_model
from model_check.utils.garbage import leave
from model_check.utils.project_files import COMMAND
from model_check.utils.standard_streams import complain, open_missing_streams, put
from model_check.utils.words import printable_lines

_EXAMPLES = """\
examples:
  bash run.sh generate .checkpoints/cpu0/last.pt --prompt "Once upon a time"
  bash run.sh generate .checkpoints --temperature 0 --prompt "def "
  bash run.sh generate EXPORTED_DIR --prompts prompts.txt > texts.jsonl
  bash run.sh generate .checkpoints/cpu0/last.pt --chat
  bash run.sh generate MUSIC.pt --prompt-midi begins.mid --midi goes_on.mid

A model that was fine-tuned on messages has a chat template: the prompt is then a user's message,
and --chat keeps a whole conversation.

CHECKPOINT: a file, a directory of checkpoints (the newest of it), or one with config.json and
safetensors, as `run.sh export` makes it and transformers loads it.
"""


def _parser() -> Parser:
    usage = f"{COMMAND} generate CHECKPOINT --prompt TEXT [OPTIONS]"
    parser = Parser(usage=usage, description=__doc__, epilog=_EXAMPLES)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="see below")
    add("--prompt", metavar="TEXT", help="what the text begins with")
    file = "a prompt a line; the texts come as JSON, one a line"
    add("--prompts", type=Path, metavar="FILE", help=file)
    add("--chat", action="store_true", help="talk to the model: each line of input is a turn")
    add("--system", metavar="TEXT", help="the system's message, before the turns of --chat")
    add("--max-tokens", type=int, default=200, metavar="N", help="the longest text (200)")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (0.8)")
    add("--top-k", type=int, default=0, metavar="K", help="of the K likeliest; 0: of all (0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="of the likeliest with share P (1)")
    add("--seed", type=int, default=0, metavar="N", help="another one, another text (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable")
    raw = "the prompt as it is, without the model's chat template"
    add("--raw", action="store_true", help=raw)
    add("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json, where none is held")
    add("--device", default="auto", metavar="KIND", help="auto | cuda | cpu")
    notes = "write the notes of the prompt (behind its GENAI) and of the text as a MIDI file"
    add("--midi", type=Path, metavar="FILE", help=notes)
    piece = "a MIDI file follows --prompt; after a TASK_ in that, GENAI follows it"
    add("--prompt-midi", type=Path, metavar="FILE", help=piece)
    add("--prompt-notes", type=int, metavar="N", help="only its first N notes; else all")
    add("--json", action="store_true", help="a line of JSON for each text")
    return parser


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    try:
        names = _parser().read(argv)
        sampling = _sampling(names)
        prompts = list(_prompts(names))
        text_model = read_text_model(names.checkpoint, _device(names.device), names.tokenizer)
        if names.raw:
            text_model = replace(text_model, chat=None)
        elif text_model.chat is not None and not names.chat:
            how = "asked by the model's chat template (--raw: the prompt as it is)"
            complain(how)
        if names.midi is not None or names.prompt_midi is not None:
            check_music(text_model)
        if names.chat:
            _chat(names, text_model, sampling)
        for prompt in prompts:
            pieces = generate(
                text_model, prompt, sampling, max_tokens=names.max_tokens, stops=names.stop
            )
            as_json = names.json or names.prompts is not None
            text = _print_json(prompt, pieces) if as_json else _stream(pieces)
            if names.midi is not None:
                complain(write_music(names.midi, prompt, text))
    except ModelCheckError as error:
        complain(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_SIGNAL_BASE + signal.SIGINT
    return EXIT_PASS


def _chat(names: Namespace, text_model: TextModel, sampling: Sampling) -> None:
    """Answers each question on standard input. Raises UsageError, ConfigError, NonFiniteError."""
    conversation = Conversation(text_model, names.system, names.max_tokens)
    for question in questions(conversation):
        try:
            ids = conversation.ask(question)
        except ConfigError as error:
            complain(str(error))
            continue
        pieces = text_after(
            text_model, ids, sampling, max_tokens=names.max_tokens, stops=names.stop
        )
        text = _print_json(question, pieces) if names.json else _answer(pieces)
        conversation.answered(question, text)


def _answer(pieces: Iterator[Piece]) -> str:
    """Of a conversation: what cut it off, if anything did, follows on standard error."""
    text, last = _show(pieces)
    if last.ended is not Ended.END_TOKEN:
        complain(f"({last.ended} after {last.num_tokens} tokens)")
    return text


def _stream(pieces: Iterator[Piece]) -> str:
    """To a person, or into a pipe; how long it took follows on standard error."""
    began = time.monotonic()
    text, last = _show(pieces)
    took_s = time.monotonic() - began
    rate = f"{last.num_tokens / took_s:,.0f} tokens/s" if took_s > 0 else ""
    complain(f"{last.num_tokens} tokens, {last.ended}; {rate}")
    return text


def _show(pieces: Iterator[Piece]) -> tuple[str, Piece]:
    """Prints each piece as it comes. Returns the text and the last piece."""
    is_seen, whole = sys.stdout.isatty(), ""
    for piece in pieces:
        whole += piece.text
        put(printable_lines(piece.text) if is_seen else piece.text, end="")
    put("")
    return whole, piece


def _print_json(prompt: str, pieces: Iterator[Piece]) -> str:
    text = ""
    for piece in pieces:
        text += piece.text
    document = {"prompt": prompt, "text": text, "tokens": piece.num_tokens, "ended": piece.ended}
    put(json.dumps(document, ensure_ascii=False))
    return text


def _prompts(names: Namespace) -> Iterator[str]:
    """Empty for a conversation. Raises UsageError."""
    if names.chat:
        _check_chat(names)
        return
    if names.system is not None:
        raise UsageError("--system: it is for --chat")
    is_one = names.prompt is not None or names.prompt_midi is not None
    if is_one == (names.prompts is not None):
        raise UsageError(
            "generate: give --prompt TEXT, or --prompts FILE, or --chat (of music: --prompt-midi "
            "FILE)"
        )
    if names.prompts is not None and names.midi is not None:
        raise UsageError("--midi: is one file, so it takes one prompt (--prompt TEXT)")
    if names.prompt_midi is not None:
        yield prompt_with(names.prompt or "", names.prompt_midi, names.prompt_notes)
        return
    if names.prompt is not None:
        yield names.prompt
        return
    yield from read_prompts(names.prompts, "--prompts")


def _check_chat(names: Namespace) -> None:
    """Raises UsageError for an option that a conversation has no use for."""
    others = ("prompt", "prompts", "raw", "midi", "prompt_midi", "prompt_notes")
    if given := [name for name in others if getattr(names, name) not in (None, False)]:
        option = given[0].replace("_", "-")
        raise UsageError(f"--chat: takes its prompts from standard input, so --{option} is unused")


def _sampling(names: Namespace) -> Sampling:
    """Raises UsageError."""
    limits = {
        "--max-tokens": names.max_tokens >= 1,
        "--temperature": 0 <= names.temperature < math.inf,
        "--top-k": names.top_k >= 0,
        "--top-p": 0 < names.top_p <= 1,
        "--prompt-notes": names.prompt_notes is None or names.prompt_notes >= 1,
        "--seed": 0 <= names.seed < 2**63,
    }
    if wrong := [option for option, holds in limits.items() if not holds]:
        value = getattr(names, wrong[0].removeprefix("--").replace("-", "_"))
        raise UsageError(f"{wrong[0]} {value}: out of range (--help tells what it is)")
    return Sampling(names.temperature, names.top_k, names.top_p, names.seed)


def _device(asked: str) -> torch.device:
    """Raises UsageError and NoGpuError."""
    if asked not in ("auto", "cuda", "cpu"):
        raise UsageError(f"--device {asked}: auto, cuda or cpu")
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise NoGpuError("--device cuda: torch finds no GPU here")
    return torch.device("cuda" if has_gpu and asked != "cpu" else "cpu")


if __name__ == "__main__":
    # `| head`: its reader is gone. Not in `main`, whose caller may have pipes of its own.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    leave(main(sys.argv[1:]))
