"""What looks like a secret is masked, and nothing else. The forms in real runs:
`tests/e2e/test_secrets.py`."""

import json
import os
import subprocess
import sys
import textwrap
import time
from base64 import b64encode, encodebytes
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from model_check.config.fields import all_fields
from model_check.utils.secrets import look_again, masked, masked_argv, masked_values
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
        "bypass=true compass=north OLDPWD=/x is_bypass=1 num_passes=3 bandpass=3 lowpass=1",
        "8fb11198539f8a6d032ae8fb11198539f8a6d032 6fa459ea-ee8a-3ca4-894e-db77e160355e",
        "/home/AUser/projects/LanguageModels/OpenWebTextCorpus2/shards/train/Part0001",
        "0x1.91eb851eb851fp+1 GPU-8f2c41aa 0000:3b:00.0 12:30:45:123:4 fe80:1234:ab:cd:ef",
        b64encode(b"-----BEGIN CERTIFICATE-----\n" + bytes(range(60))).decode(),
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
        "my.json: training.api_key: no such setting; did you mean training.max_steps?",
        "HF_TOKEN  not set -> only gated models need it",
        "basic training, bearer of news",
        "PASS: equal",
        "PASS: 8 GPUs agree bit for bit in 60 of 60 steps (exit code 0)",
        "num_tokens: 4096\ntokenizer: bpe\nkey: 3",
        "-----BEGIN CERTIFICATE-----\nMIIC\n-----END CERTIFICATE-----",
    ],
)
def test_messages_about_secrets_stay_readable(message: str) -> None:
    assert masked(message) == message


def private_key(kind: str = "RSA PRIVATE KEY", num_lines: int = 3) -> str:
    lines = [f"Line{n}OfTheKey{'+/Ab' * 12}" for n in range(num_lines)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, "Last3==", f"-----END {kind}-----"])


KEY = private_key()
_, _, KEY_WITHOUT_BEGIN = KEY.partition("\n")
KEY_WITHOUT_END, _, _ = KEY.rpartition("\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *(
            (private_key(kind), "***")
            for kind in (
                "PRIVATE KEY",
                "EC PRIVATE KEY",
                "OPENSSH PRIVATE KEY",
                "ENCRYPTED PRIVATE KEY",
                "PGP PRIVATE KEY BLOCK",
                "OpenVPN Static key V1",
            )
        ),
        (f"TLS={KEY}", "TLS=***"),
        (f"TLS_KEY={KEY}", "TLS_KEY=***"),
        (f"tls_key: |\n{textwrap.indent(KEY, '  ')}\nport: 1", "tls_key: ***\nport: 1"),
        (json.dumps({"private_key": KEY, "a": "b"}), '{"private_key": ***, "a": "b"}'),
        (json.dumps({"pem": KEY, "a": "b"}), '{"pem": "***", "a": "b"}'),
        (json.dumps(json.dumps({"pem": KEY})), r'"{\"pem\": \"***\"}"'),
        (repr(KEY.splitlines()), "['***']"),
        ("\n".join(map(repr, KEY.splitlines())), "'***'"),
        (textwrap.indent(KEY, "    "), "    ***"),
        (textwrap.indent(KEY, "INFO: the key "), "INFO: the key ***"),
        (KEY.replace("\n", "\r\n"), "***"),
        (KEY.replace("\n", " "), "***"),
        ("\n".join(KEY.split()), "***"),
        (repr(KEY.split()), "['***']"),
        (KEY_WITHOUT_BEGIN, "***"),
        (textwrap.indent(KEY_WITHOUT_BEGIN, "  "), "  ***"),
        (KEY_WITHOUT_BEGIN.replace("\n", "\\n"), "***"),
        (KEY_WITHOUT_END, "***"),
        (KEY_WITHOUT_END.replace("\n", "\\n"), "***"),
        (KEY[:-40].replace("\n", " "), "***"),
        (KEY.replace("---\nL", "---\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,0\n\nL")[:-40], "***"),
        (f"client-key-data: {b64encode(KEY.encode()).decode()}", "client-key-data: ***"),
        (encodebytes(KEY.encode()).decode(), "***\n"),
        ("Private-Lines: 2\nShort1\nShort2==\nPrivate-MAC: 1", "***\nPrivate-MAC: 1"),
        (f"{KEY} and {KEY}", "*** and ***"),
        (f"{KEY_WITHOUT_END}\n{KEY}", "***\n***"),
        ("no -----BEGIN PRIVATE KEY----- in the file", "no *** in the file"),
    ],
)
def test_a_private_key_is_masked_whole_also_where_an_end_of_it_is_missing(
    text: str, shown: str
) -> None:
    assert masked(f"it said:\n{text}\nand went on") == f"it said:\n{shown}\nand went on"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "PGPASS=a SMTPPASS=b userPwd=c dbpwd=d ROOTPW=e RUBYPASS=f SSHKEY=g A_TOKEN_B64=h",
            "PGPASS=*** SMTPPASS=*** userPwd=*** dbpwd=*** ROOTPW=*** RUBYPASS=*** SSHKEY=***"
            " A_TOKEN_B64=***",
        ),
        ("a:\n  password: |\n    b c\n\n    d\n  port: 1", "a:\n  password: ***\n  port: 1"),
        ("- password: >-\n    b c\n    d\nport: 1", "- password: ***\nport: 1"),
        ("user: a\npassword: b\nport: 1", "user: a\npassword: ***\nport: 1"),
        ('password: "a\n  b"\nport: 1', "password: ***\nport: 1"),
        ('password = """\na\nb"""', "password = ***"),
        ("[x]\r\nsecret_access_key = a\r\ny = 1", "[x]\r\nsecret_access_key = ***\r\ny = 1"),
        ("machine a\nlogin b\npassword c", "machine a\nlogin b\npassword ***"),
        ("db.host:5432:base:me:a-b", "db.host:5432:base:me:***"),
        ("- name: DB_PASSWORD\n  value: a", "- name: DB_PASSWORD\n  value: ***"),
        ('{"name": "DB_PASSWORD",\n "value": "a"}', '{"name": "DB_PASSWORD",\n "value": ***}'),
        (r'"{\"password\": \"it\'s a\"}"', r'"{\"password\": ***}"'),
        (r"{'password': 'it\'s a'}", "{'password': ***}"),
        ("AGE-SECRET-KEY-1QQQQQQ", "***"),
    ],
)
def test_a_value_is_masked_after_its_name_also_on_lines_of_its_own(text: str, shown: str) -> None:
    assert masked(text) == shown


def masked_beside(variable: str, value: str, text: str) -> str:
    """What a process with this variable shows of `text`."""
    with mock.patch.dict(os.environ, {variable: value}):
        look_again()
        shown = masked(text)
    look_again()
    return shown


QUOTED = """it's "qu\u00f6ted" x7y8z9"""
SERVICE = json.dumps({"type": "service", "private_key": KEY, "client_secret": "x7y8z9"})


@pytest.mark.parametrize(
    ("variable", "value", "text", "shown"),
    [
        ("A_SECRET", "first line\nsecond line\n", "a: first line", "a: ***"),
        ("A_SECRET", "first line\nsecond line\n", "second line.", "***."),
        ("A_SECRET", "first line\r\nb\r\nthird", "first line\nb\nthird", "***"),
        ("A_SECRET", "first line\\nsecond line", "second line", "***"),
        ("A_SECRET", "first line\nb", repr(["first line\nb"]), "['***']"),
        ("A_SECRET", "first line\nb", json.dumps("first line\nb"), '"***"'),
        ("A_SECRET", "  padded\t\n", "a padded.", "a ***."),
        ("A_SECRET", '"in quotes"', "in quotes", "***"),
        ("A_SECRET", "tab\tinside", "tab\tinside", "***"),
        ("A_SECRET", QUOTED, QUOTED, "***"),
        ("A_SECRET", QUOTED, repr([QUOTED]), "['***']"),
        ("A_SECRET", QUOTED, json.dumps(QUOTED), '"***"'),
        ("A_SECRET", QUOTED, json.dumps(QUOTED, ensure_ascii=False), '"***"'),
        ("A_SECRET", QUOTED, "'" + QUOTED.replace("'", "'\\''") + "'", "'***'"),
        ("A_SECRET", "b\udcfcrger", "b\ufffdrger", "***"),
        ("A_SECRET", "a/b+c d=", "GET /?x=a%2Fb%2Bc%20d%3D&y", "GET /?x=***&y"),
        ("A_SECRET", "x7y8z9", b64encode(b"x7y8z9\n").decode(), "***=="),
        ("PGPASS", "x7y8z9", "x7y8z9", "***"),
        ("SSH_KEY", KEY, KEY.splitlines()[2], "***"),
        ("IDENTITY", KEY, KEY.splitlines()[2], "***"),
        ("SSH_KEY", KEY.replace("\n", " "), KEY.splitlines()[2], "***"),
        ("SSH_KEY", KEY, private_key("RSA PRIVATE KEY", 5), "***"),
        ("GOOGLE_CREDENTIALS", SERVICE, KEY.splitlines()[2], "***"),
        ("APPLICATION", SERVICE, "x7y8z9", "***"),
        ("OPTIONS", "-Dx=y -Ddb.password=x7y8z9", "y x7y8z9", "y ***"),
    ],
)
def test_a_secret_of_the_environment_is_masked_by_its_lines_and_as_texts_quote_it(
    variable: str, value: str, text: str, shown: str
) -> None:
    assert masked_beside(variable, value, text) == shown


def test_a_key_that_a_shell_split_into_arguments_is_masked() -> None:
    argv = ["tool", "--key", *KEY.split(), "--port", "1"]
    assert set(masked_argv(argv)) == {"tool", "--key", "***", "--port", "1"}
    assert masked_argv(["-d", f"a: {KEY}", ""]) == ["-d", "a: ***", ""]


HOSTILE = [
    *("a", "-", " ", "\n", '"', "\\", "a.", "a:", "abc ", "-a", "a-", " -p", " -u", "://", "://a:"),
    *("token", "pass=", "pass='", 'pass="\\', 'password":"', "password: ", "password: |\n\n"),
    *("password: |\n  a\n", 'x"\\', "bearer ", "login a password ", "host:5432:", "Authorization:"),
    *("eyJ-", "eyJaaaaa.", "sk-", "hf-", "xoxb-", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----"),
    *("-----END PRIVATE KEY-----", "-----END PRIVATE KEY-----\naaaa\n", "LS0tLS1CRUdJTi"),
]


@pytest.mark.parametrize("mask", [masked, lambda text: masked_argv([text])])
@pytest.mark.parametrize("part", HOSTILE)
def test_the_time_grows_with_the_length_of_a_text_and_no_faster(
    part: str, mask: Callable[[str], object]
) -> None:
    """A second at the very most: at a quadratic one these 128 KiB take half a minute."""
    text = part * ((1 << 17) // len(part))
    before = time.process_time()
    mask(text)
    assert time.process_time() - before < 5


def test_no_setting_of_ours_has_a_secret_name() -> None:
    values = {name: "some value" for name in all_fields()}
    assert masked_values(values) == values


def test_in_a_document_the_key_names_the_secret() -> None:
    document = {"env": {"API_KEY": "a", "PATH": "b"}, "list": ["TOKEN=c", 4, None]}
    masked_document = {"env": {"API_KEY": "***", "PATH": "b"}, "list": ["TOKEN=***", 4, None]}
    document |= {"passwords": ["a", ["b"]], "hf_ABCDEFGHIJKLMN": 1, "pass": {"PASS": 3}}
    masked_document |= {"passwords": ["***", ["***"]], "***": 1, "pass": {"PASS": 3}}
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


def test_a_key_of_our_own_documents_is_a_name() -> None:
    """Of settings that differ: a report that is made again must say which."""
    document = {"mismatch": {"key": "settings", "api_key": "sk-live-123456789"}}
    assert masked_values(document)["mismatch"] == {"key": "settings", "api_key": "***"}
