"""What looks like a secret is masked, and nothing else. The forms in real runs:
`tests/e2e/test_secrets.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_check.config.fields import all_fields
from model_check.utils.secrets import masked, masked_argv, masked_values
from tests.deadline import DEADLINE_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["data.hf_token=hf_abcdefghijk"], ["data.hf_token=***"]),
        (["--api-key=xyz"], ["--api-key=***"]),
        (["--token", "s3cr3t", "next"], ["--token", "***", "next"]),
        (["env", "WANDB_API_KEY=0123", "sh"], ["env", "WANDB_API_KEY=***", "sh"]),
        (["bash", "-c", "A=1 API_KEY=b train -x 2"], ["bash", "-c", "A=1 API_KEY=*** train -x 2"]),
        (["sh", "-c", "mysql -p 'a b' -h x"], ["sh", "-c", "mysql -p *** -h x"]),
        (["curl", "-u", "me:pw", "x"], ["curl", "-u", "***", "x"]),
        (["hf_ABCDEFGHIJKLMN"], ["***"]),
        (["sk-abc123def"], ["***"]),
        (["-H", "Authorization: Bearer abc"], ["-H", "Authorization: Bearer ***"]),
        (["postgres://u:pw@host/db"], ["postgres://***@host/db"]),
    ],
)
def test_secrets_of_a_command_line_are_masked(argv: list[str], kept: list[str]) -> None:
    assert masked_argv(argv) == kept


@pytest.mark.parametrize(
    "argument",
    [
        "training.max_tokens=5",
        "tokenizer=bpe",
        "training.max_steps=3",
        "data.validation=held_out=0.01",
        "debug.drill=nan@3:CPU1:layers.1.feed_forward.w2.weight",
        "hf-internal-testing/tiny-random-Llama",
        "/data/hf_datasets/sk-wiki-2023-texts",
        "https://host:8080/@user/a@b",
        "mkdir -p /data/out && ssh -p 2222 host",
        "monkey=3 num_tokens=4096",
    ],
)
def test_what_is_no_secret_stays(argument: str) -> None:
    assert masked_argv([argument]) == [argument]
    assert masked(argument) == argument


def test_options_that_only_look_like_secrets_stay() -> None:
    argv = ["--tokenizer", "bpe", "--max-tokens", "512", "-p", "8080", "mkdir", "-p", "/data"]
    assert masked_argv(argv) == argv


@pytest.mark.parametrize(
    "message",
    [
        "acme/tiny: is gated: accept its terms at https://hub/acme/tiny, then export HF_TOKEN=...",
        "'foo': not an option, and not section.key=value (for example training.max_steps=20)",
        "my.json: training.api_key: no such setting; did you mean 'training.max_steps'?",
        "HF_TOKEN  not set -> only gated models need it",
        "basic training, bearer of news",
    ],
)
def test_messages_about_secrets_stay_readable(message: str) -> None:
    assert masked(message) == message


def test_no_setting_of_ours_has_a_secret_name() -> None:
    values = {name: "some value" for name in all_fields()}
    assert masked_values(values) == values


def test_in_a_document_the_key_names_the_secret() -> None:
    document = {"env": {"API_KEY": "a", "PATH": "b"}, "list": ["TOKEN=c", 4, None]}
    masked_document = {"env": {"API_KEY": "***", "PATH": "b"}, "list": ["TOKEN=***", 4, None]}
    assert masked_values(document) == masked_document


def told(code: str, *argv: str, **environ: str) -> str:
    """What a fresh process with this command line and environment prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"from model_check.utils.secrets import *; {code}", *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return done.stdout + done.stderr


def test_what_the_process_was_given_is_masked_wherever_it_stands() -> None:
    environ = {"DB_PASS": "it's x7y8z9", "URL": "http://me:pw%2Fd1@host", "AN_KEY": "short"}
    text = "a x7y8z9 it's x7y8z9 pw%2Fd1 short hunter22 \\\"it's x7y8z9\\\""
    code = f'print(masked("{text}"))'
    shown = told(code, "--password", "hunter22", **environ)
    assert shown == 'a x7y8z9 *** *** short *** "***"\n'


def test_a_variable_that_names_a_file_hides_nothing(tmp_path: Path) -> None:
    assert told(f"print(masked('{tmp_path}'))", PRIVATE_KEY=str(tmp_path)) == f"{tmp_path}\n"


def test_log_records_and_the_last_traceback_are_masked() -> None:
    code = (
        "import logging; mask_others(); logging.error('GET %s', 'http://u:pw@host');"
        " logging.error('%d', 'x'); raise ValueError('TOKEN=abc')"
    )
    shown = told(code)
    assert "GET http://***@host" in shown
    assert "ValueError: TOKEN=***" in shown
    assert "pw@" not in shown
