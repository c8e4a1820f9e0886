"""Bash itself completes what people type."""

import subprocess

import pytest

from launcher.arguments import options_of_run
from launcher.completion import completion

ASK = """
COMP_WORDS=(run.sh "$@") COMP_CWORD=$#
_model_check && printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*typed: str) -> list[str]:
    script = completion(options_of_run()) + ASK
    command = ["bash", "--noprofile", "--norc", "-c", script, "bash", *typed]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["doc"], ["doctor"]),
        (["--req"], ["--require-idle"]),
        (["train", "texts/", "training.max_s"], ["training.max_steps="]),
        (["--preset", "fine"], ["finetune"]),
        (["check", ""], ["quick", "full", "burnin"]),
        (["nothing-like-it"], []),
        (["data.dataset", "=", "t"], []),
        (["generate", "--pre"], []),
    ],
)
def test_the_tab_key_offers_verbs_options_settings_and_presets(
    typed: list[str], offered: list[str]
) -> None:
    assert completed(*typed) == offered
