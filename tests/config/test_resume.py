"""Which settings may differ when a run is resumed. Pure."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model_check.config.fields import all_fields
from model_check.config.load import Request, load
from model_check.config.resume import KEYS, changes, check_resume, forbidden, settings_digest
from model_check.config.schema import Settings
from model_check.errors import ConfigError

# Rule -> section -> keys, as --resume has treated them since before a setting carried its rule.
RULES = {
    "must_equal": {
        "model": "num_layers hidden_size intermediate_size num_heads num_kv_heads head_dim "
        "vocab_size rope_theta rms_norm_eps tie_word_embeddings",
        "model.rope_scaling": "factor low_freq_factor high_freq_factor original_context_length",
        "training": "batch_size grad_accum_nums global_batch_size context_length",
        "data": "document_tokens document_masking",
        "system": "seed",
    },
    "tell": {
        "model": "attention_backend",
        "training": "max_steps learning_rate min_lr warmup_steps lr_schedule wsd_decay_share "
        "max_grad_norm weight_decay adam_beta1 adam_beta2 adam_eps use_amp precision compile "
        "gradient_checkpointing loss_chunk_rows",
        "system": "deterministic num_threads",
    },
    "silent": {
        "model": "model_path geometry init_from init_std",
        "training": "num_workers save_interval keep_last save_last save_best async_save "
        "save_on_signal resume resume_anyway eval_interval eval_batches best_split "
        "sample_interval sample_prompts sample_length",
        "data": "dataset dataset_config split text_column tokenizer bpe_vocab_size num_samples "
        "stride tail validation output_dir force_preprocess cache_dir verify offline "
        "hub_timeout_s num_proc tokenizer_backend",
        "system": "device device_id checkpoint_dir",
        "logging": "log_interval log_dir tensorboard tensorboard_dir wandb wandb_project "
        "tail_lines",
        "debug": "dump_tensors drill profile_steps",
        "launch": "gpus require_idle workers mode grace_s telemetry_interval_s expect_gpus "
        "fail_on fail_on_health hang_timeout_s history_file",
    },
}
RULE_OF = {
    f"{section}.{key}": rule
    for rule, sections in RULES.items()
    for section, keys in sections.items()
    for key in keys.split()
}


def settings(*overrides: str) -> Settings:
    return load(Request(preset="cpu", overrides=overrides), lambda: False).settings


def saved(*overrides: str) -> dict[str, Any]:
    tree: dict[str, Any] = msgspec.to_builtins(settings(*overrides))
    return tree


def saved_with_another(name: str) -> dict[str, Any]:
    """The default settings with another value for `name`."""
    tree: dict[str, Any] = msgspec.to_builtins(Settings())
    *sections, key = name.split(".")
    node = tree
    for section in sections:
        node = node[section]
    match node[key]:
        case bool(value):
            node[key] = not value
        case int(value) | float(value):
            node[key] = value + 1
        case _:
            node[key] = 64
    return tree


def test_every_setting_says_what_a_resume_makes_of_it() -> None:
    unmarked = [f.name for f in all_fields().values() if f.on_resume not in RULES]
    assert unmarked == [], "schema.py: MUST_EQUAL, TELL or SILENT"
    assert {name: f.on_resume for name, f in all_fields().items() if name in RULE_OF} == RULE_OF


def test_what_must_equal_of_the_model_is_its_architecture() -> None:
    later = {"rope_scaling", "attention", "infini"}
    assert set(KEYS) == {*RULES["must_equal"]["model"].split(), *later}


@pytest.mark.parametrize(
    ("attention", "override", "is_refused"),
    [
        ("infini", "segment_length=8", True),
        ("infini", "update=delta", True),
        ("infini", "gate_init=1", False),
        ("infini", "gate_lr=0.5", False),
        ("local", "segment_length=8", True),
    ],
)
def test_segments_and_the_memory_are_part_of_the_architecture(
    attention: str, override: str, is_refused: bool
) -> None:
    kind, length = f"model.attention={attention}", "model.infini.segment_length"
    others = [] if override.startswith("segment_length") else [f"{length}=16"]
    now = settings(kind, *others, f"model.infini.{override}")
    assert bool(forbidden(saved(kind, f"{length}=16"), now)) is is_refused
    assert forbidden(saved(), now), "full attention is another model"


@pytest.mark.parametrize(("name", "rule"), RULE_OF.items())
def test_a_resume_follows_the_rule_of_each_setting(name: str, rule: str) -> None:
    another = saved_with_another(name)
    refused, told = forbidden(another, Settings()), changes(another, Settings())
    assert (bool(refused), bool(told)) == (rule == "must_equal", rule == "tell")


@pytest.mark.parametrize(
    "override",
    [
        "training.batch_size=7",
        "training.grad_accum_nums=3",
        "training.context_length=64",
        "system.seed=1",
        "data.document_masking=true",
    ],
)
def test_what_makes_the_next_batches_other_ones_is_forbidden(override: str) -> None:
    (text,) = forbidden(saved(), settings(override))
    assert text.startswith(override.partition("=")[0])
    assert text.endswith(f"-> {override.partition('=')[2]}")
    assert changes(saved(), settings(override)) == []


@pytest.mark.parametrize(
    "override",
    [
        "logging.log_interval=9",
        "training.save_interval=2",
        "training.keep_last=2 training.save_interval=2",
        "training.eval_interval=2 data.validation=a=0.1",
        "training.num_workers=0",
        "training.resume=auto",
        "system.checkpoint_dir=elsewhere",
        "system.device=cpu",
        "data.cache_dir=elsewhere",
        "debug.dump_tensors=true",
        "launch.workers=5",
    ],
)
def test_what_changes_no_step_is_not_worth_a_word(override: str) -> None:
    assert forbidden(saved(), settings(*override.split())) == []
    assert changes(saved(), settings(*override.split())) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.max_steps=60", "training.max_steps 30 -> 60"),
        ("training.learning_rate=0.1", "training.learning_rate 0.001 -> 0.1"),
        ("training.max_grad_norm=null", "training.max_grad_norm 1.0 -> null"),
        ("model.attention_backend=eager", "model.attention_backend auto -> eager"),
        ("system.deterministic=false", "system.deterministic true -> false"),
    ],
)
def test_what_makes_the_steps_other_ones_on_purpose_is_told(override: str, told: str) -> None:
    assert forbidden(saved(), settings(override)) == []
    assert changes(saved(), settings(override)) == [told]


def test_a_setting_that_an_older_checkpoint_does_not_know_had_its_default() -> None:
    older = saved()
    del older["training"]["adam_eps"], older["system"]["deterministic"]
    assert changes(older, settings()) == []
    assert changes(older, settings("training.adam_eps=0.1")) == ["training.adam_eps 1e-08 -> 0.1"]


def test_a_path_at_which_there_is_nothing_is_refused(tmp_path: Path) -> None:
    for fine in (None, "auto", str(tmp_path)):
        check_resume(fine)
    with pytest.raises(ConfigError, match=r"training\.resume = .*gone\.pt: no such file"):
        check_resume(str(tmp_path / "gone.pt"))
    with pytest.raises(ConfigError, match=r"training\.resume = x+: File name too long"):
        check_resume("x" * 300)


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    own = tmp_path / "gpu0"
    own.mkdir()
    names = ["step_2.pt", "step_9.pt", "nan_grad_step_3.pt", "last.earlier.pt", "step_10.pt"]
    for age, name in enumerate(reversed(names)):
        (own / name).touch()
        os.utime(own / name, (100 - age, 100 - age))
    with pytest.raises(ConfigError) as refused:
        check_resume(str(tmp_path / "checkpoint_step_10.pt"))
    newest = f"; there are {own}/step_10.pt, {own}/step_9.pt, {own}/step_2.pt"
    assert f"{newest} (auto: the newest" in str(refused.value)
    (own / "last.pt").touch()
    with pytest.raises(ConfigError, match=r"are \S+last.pt, \S+10.pt, \S+9.pt and 1 more \(auto"):
        check_resume(str(own / "step_5.pt"))


def test_runs_that_begin_with_other_weights_have_another_digest() -> None:
    one = settings_digest(settings())
    assert settings_digest(settings("launch.workers=3", "training.save_last=true")) == one
    others = [settings("model.init_std=0.03"), settings("model.init_from=weights.pt")]
    assert len({one, *map(settings_digest, others)}) == 3
