"""Makes labels.json: what TRL's SFTTrainer feeds a model for rows.jsonl. Run by hand, where trl is
installed: `python -m tests.data.trl.make_labels`. Its versions are in the file."""

import json
import tempfile
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROWS, LABELS, TOKENIZER = HERE / "rows.jsonl", HERE / "labels.json", HERE / "tokenizer"
CONTEXT_LENGTH = 80
"""A sequence of ours has one token more, as TRL's max_length counts."""
INSTRUCT = "<|im_end|>"
"""The eos_token of instruct models: it ends a turn, not a text."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows() -> list[dict[str, object]]:
    """Prompt and completion as text, then as messages; some longer than a sequence."""
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "the",
        "lazy",
        "dog",
        "and",
        "runs",
        "home",
        "before",
        "it",
        "rains",
    ]
    plain = [
        {
            "prompt": f"Repeat {count} words:",
            "completion": " " + " ".join(words[number % 7 :][:count]),
        }
        for number, count in enumerate((1, 2, 3, 5, 8, 12, 13, 14))
    ]
    plain += [
        {"prompt": "Two\nlines\n\nthen", "completion": " 1 + 1 = 2\n"},
        {"prompt": "Ünïcödé 中文:", "completion": " é 日本 \U0001f600"},
        {"prompt": "Nothing follows.", "completion": ""},
        {"prompt": "long " * 120, "completion": " end"},
        {"prompt": "short", "completion": " long" * 120},
    ]
    turns = [("user", "Hello there"), ("assistant", "General words"), ("user", "And then?")]
    chats = [
        {
            "prompt": [{"role": role, "content": text} for role, text in turns[:count]],
            "completion": [{"role": "assistant", "content": f"Answer {count}, kindly."}],
        }
        for count in (1, 3)
    ]
    return [*plain, *chats]


def main() -> None:
    import torch

    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    _train_tokenizer()
    names = ("trl", "transformers", "tokenizers", "datasets", "accelerate")
    versions = {name: metadata.version(name) for name in names} | {"torch": torch.__version__}
    made = {"versions": versions, "rows": _labels("<|endoftext|>"), "instruct": _labels(INSTRUCT)}
    LABELS.write_text(json.dumps(made) + "\n")


def _labels(end_token: str) -> list[dict[str, list[int]]]:
    """Where that is the tokenizer's eos_token."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER, eos_token=end_token)
    tokenizer.pad_token = "<|endoftext|>"
    plain, chats = ([r for r in rows() if isinstance(r["prompt"], k)] for k in (str, list))
    labels = []
    with tempfile.TemporaryDirectory() as out:
        for group in (plain, chats):
            config = LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                num_attention_heads=1,
            )  # fmt: skip
            trainer = SFTTrainer(
                model=LlamaForCausalLM(config),
                args=SFTConfig(
                    output_dir=out, max_length=CONTEXT_LENGTH + 1, report_to=[], use_cpu=True,
                    bf16=False, per_device_train_batch_size=1, dataset_num_proc=None,
                ),
                train_dataset=Dataset.from_list(group),
                processing_class=tokenizer,
            )  # fmt: skip
            for row in trainer.train_dataset:
                batch = trainer.data_collator([row])
                labels.append({name: batch[name][0].tolist() for name in ("input_ids", "labels")})
    return labels


def _train_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([json.dumps(row) for row in rows()], trainer)
    TOKENIZER.mkdir(exist_ok=True)
    tokenizer.save(str(TOKENIZER / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
