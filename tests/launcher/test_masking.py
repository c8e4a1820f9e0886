"""What looks like a secret is neither printed nor kept."""

import pytest

from launcher.run_dir import masked


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["data.hf_token=hf_abcdefghijk"], ["data.hf_token=***"]),
        (["--api-key=xyz"], ["--api-key=***"]),
        (["--token", "s3cr3t", "next"], ["--token", "***", "next"]),
        (["env", "WANDB_API_KEY=0123", "sh"], ["env", "WANDB_API_KEY=***", "sh"]),
        (["hf_ABCDEFGHIJKLMN"], ["***"]),
        (["sk-abc123def"], ["***"]),
        (["-H", "Authorization: Bearer abc"], ["-H", "Authorization: Bearer ***"]),
        (["postgres://u:pw@host/db"], ["postgres://***@host/db"]),
        (["training.max_tokens=5", "tokenizer=bpe"], ["training.max_tokens=5", "tokenizer=bpe"]),
        (["--tokenizer", "bpe"], ["--tokenizer", "bpe"]),
        (["training.max_steps=3"], ["training.max_steps=3"]),
    ],
)
def test_secrets_are_masked_and_nothing_else(argv: list[str], kept: list[str]) -> None:
    assert masked(argv) == kept
