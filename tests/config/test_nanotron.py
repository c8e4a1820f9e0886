"""Settings files of nanotron: what is taken of one, and what is told."""

from pathlib import Path

import pytest

from launcher.arguments import parse_run
from model_check.config.load import Loaded, load
from model_check.errors import ConfigError

SAMPLE = """\
checkpoints: {checkpoint_interval: 10, checkpoints_path: there, resume_checkpoint_path: null,
  save_initial_state: false}
data_stages:
- name: Stable Training Stage
  start_training_step: 1
  data:
    dataset: {hf_dataset_or_datasets: stas/openwebtext-10k, hf_dataset_config_name: null,
      hf_dataset_splits: train, text_column_name: content}
    num_loading_workers: 2
    seed: 42
- {name: Annealing Phase, start_training_step: 10, data: {dataset: null, seed: 42}}
general: {project: debug, run: tiny_llama_%date_%jobid, seed: 7, step: null}
lighteval: null
logging: {iteration_step_info_interval: 5, log_level: info}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config: {hidden_size: 16, intermediate_size: 64, num_attention_heads: 4,
    num_hidden_layers: 2, num_key_value_heads: 4, rms_norm_eps: 1.0e-05, rope_scaling: null,
    tie_word_embeddings: true, vocab_size: 256}
optimizer:
  clip_grad: 0.5
  learning_rate_scheduler: {learning_rate: 0.0003, lr_decay_steps: 13, lr_decay_style: cosine,
    lr_warmup_steps: 2, min_decay_lr: 1.0e-05}
  optimizer_factory: {adam_beta1: 0.8, adam_beta2: 0.9, adam_eps: 1.0e-07, name: adamW}
  weight_decay: 0.01
parallelism: {dp: 2, pp: 2, tp: 2}
profiler: null
tokenizer: {tokenizer_max_length: null, tokenizer_name_or_path: gpt2}
tokens: {batch_accumulation_per_replica: 3, limit_val_batches: 0, micro_batch_size: 2,
  sequence_length: 256, train_steps: 15, val_check_interval: -1}
"""
OURS = """
system.seed=7 system.checkpoint_dir=there training.save_interval=10
data.dataset=stas/openwebtext-10k data.text_column=content training.num_workers=2
logging.log_interval=5 training.precision=bfloat16 model.init_std=0.025
model.hidden_size=16 model.intermediate_size=64 model.num_heads=4 model.num_layers=2
model.num_kv_heads=4 model.rms_norm_eps=1e-5 model.rope_scaling=null model.rope_theta=10000
model.tie_word_embeddings=true model.vocab_size=256 model.model_path=gpt2
training.max_grad_norm=0.5 training.learning_rate=3e-4 training.lr_schedule=cosine
training.warmup_steps=2 training.min_lr=1e-5 training.adam_beta1=0.8 training.adam_beta2=0.9
training.adam_eps=1e-7 training.weight_decay=0.01 training.grad_accum_nums=3
training.batch_size=2 training.context_length=256 training.max_steps=15
"""


def read(path: Path, text: str, *argv: str) -> Loaded:
    file = path / "nanotron.yaml"
    file.write_text(text)
    return load(parse_run(["--config", str(file), *argv], {}).request, lambda: False)


def test_a_file_of_nanotron_is_read_and_what_is_not_taken_is_one_line(tmp_path: Path) -> None:
    loaded = read(tmp_path, SAMPLE)
    assert loaded.settings == load(parse_run(OURS.split(), {}).request, lambda: False).settings
    (note,) = loaded.notes
    assert note.removeprefix(f"{tmp_path}/nanotron.yaml: ") == (
        "read as a file of nanotron; not taken: checkpoints (save_initial_state), data_stages "
        "(name, start_training_step, seed), general (project, run), logging (log_level), model "
        "(ddp_bucket_cap_mb), optimizer (lr_decay_steps, name), parallelism, data_stages[1] "
        "(--mode ddp or fsdp and --gpus stand for parallelism)"
    )


def test_a_command_line_is_laid_over_a_file_of_nanotron(tmp_path: Path) -> None:
    training = read(tmp_path, SAMPLE, "max_steps=20", "batch_size=4").settings.training
    assert (training.max_steps, training.batch_size) == (20, 4)


@pytest.mark.parametrize(
    ("memory", "ours"),
    [
        ("true", "model.attention=infini model.infini.gate_lr=0.001"),
        ("false", "model.attention=local"),
    ],
)
def test_a_file_of_infini_llama_says_which_attention_holds_text_out_and_asks_for_tensorboard(
    tmp_path: Path, memory: str, ours: str
) -> None:
    text = SAMPLE.replace("val_check_interval: -1", "val_check_interval: 5").replace(
        "optimizer_factory: {adam_beta1: 0.8, adam_beta2: 0.9, adam_eps: 1.0e-07, name: adamW}",
        "adam_beta1: 0.8\n  adam_beta2: 0.9\n  adam_eps: 1.0e-07",
    )
    text += (
        f"infini_attention: {{turn_on_memory: {memory}, segment_length: 64, "
        "balance_factor_lr: 0.001, balance_init_type: zeros}\n"
    )
    asked = f"training.eval_interval=5 data.validation=auto model.infini.segment_length=64 {ours}"
    argv = [*OURS.split(), *asked.split(), "logging.tensorboard=true"]
    wanted = load(parse_run(argv, {}).request, lambda: False)
    assert read(tmp_path, text).settings == wanted.settings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (SAMPLE.replace("train_steps: 15", "train_steps: 0"), "training.max_steps = 0"),
        (SAMPLE.replace("cosine", "1-sqrt"), "training.lr_schedule = '1-sqrt'"),
        ("tokens: {train_stepps: 15}", "tokens.train_stepps: no such setting"),
        ("general: &a {x: *a}\nparallelism: {}", "nested too deeply, or within itself"),
    ],
)
def test_what_a_file_of_nanotron_cannot_mean_is_refused(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)
