"""Other names of settings: alone, as options, in files; two of one setting; the pair of batches."""

from pathlib import Path

import pytest

from launcher.arguments import parse_run
from model_check.config.aliases import ABSENT, ALIASES, UNNEEDED, VALUES
from model_check.config.derived import precision
from model_check.config.fields import _names_by_leaf, all_fields, full_name, nearest
from model_check.config.load import Loaded, Request, load
from model_check.errors import ConfigError, ModelCheckError

PIANO = """\
optimizer:
  gradient_accumulation_steps: 16  # micro batches a step
  max_iters: 300000
  weight_decay: 0.1
  grad_clip: 1.0

lr:
  learning_rate: 8e-5
  min_lr: 8e-6
  warmup_iters: 1000
  decay_lr: true  # false: the rate stays

system:
  dtype: float16  # a comment ends a value
  compile: true
  data_workers: 64
"""


def typed(*argv: str) -> Loaded:
    return load(parse_run(argv, {}).request, lambda: False)


def refusal(*argv: str) -> str:
    with pytest.raises(ModelCheckError) as caught:
        typed(*argv)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


TWO_NAMES = [
    ("max_steps=5", "max_iters=6"),
    ("training.max_steps=5", "optimizer.max_iters=5"),
    ("--max-steps=5", "training.max_iters=6"),
    ("--max-steps=5", "--max-iters=6"),
    ("--max_iters=5", "optimizer.max_iters=6"),
    ("training.batch_size=2", "data.batch_size=2"),
    ("--batch_size=2", "data.batch_size=2"),
    ("lr.decay_lr=true", "training.lr_schedule=cosine"),
    ("--save_dir=a", "out_dir=b"),
    ("init_from=scratch_next_token", "model.init_from=x"),
    ("--init-from=scratch", "init_from=x.pt"),
    ("--config=a.json", "--config-file=b.json"),
    ("--preset=debug", "--config-name=debug"),
]


@pytest.mark.parametrize("pair", TWO_NAMES, ids=" ".join)
@pytest.mark.parametrize("step", [1, -1], ids=["", "reversed"])
def test_two_names_of_one_setting_on_a_command_line_are_refused(
    pair: tuple[str, str], step: int
) -> None:
    message = refusal(*pair[::step])
    for word in pair:
        key = word.partition("=")[0]
        assert key.replace("_", "-") in message or full_name(key) in message


@pytest.mark.parametrize(
    ("pair", "note"),
    [
        (("max_steps=5", "training.max_steps=6"), "training.max_steps=6 takes the place of "),
        (("training.max_steps=6", "--max-steps=7"), "--max-steps 7 takes the place of training."),
        (("--max-steps=7", "--max-steps=6"), "--max-steps 6 takes the place of --max-steps 7"),
        (("init_from=scratch", "init_from=x.pt"), "model.init_from=x.pt takes the place of "),
    ],
)
def test_the_later_of_two_values_counts_and_is_told(pair: tuple[str, str], note: str) -> None:
    found = typed(*pair)
    assert [each for each in found.notes if each.startswith(note)]


def test_a_value_given_again_is_that_value() -> None:
    found = typed("--max-steps=6", "training.max_steps=6")
    assert (found.settings.training.max_steps, found.notes) == (6, ())


@pytest.mark.parametrize("step", [1, -1], ids=["", "reversed"])
@pytest.mark.parametrize(
    "pair",
    [
        ("training.batch_size=128", "training.micro_batch_size=32"),
        ("batch_size=128", "micro_batch_size=32"),
        ("data.batch_size=128", "micro_batch_size=32"),
        ("--batch_size=128", "--micro_batch_size=32"),
        ("--batch-size=128", "training.micro_batch_size=32"),
        ("training.global_batch_size=128", "--micro-batch-size=32"),
    ],
    ids=" ".join,
)
def test_a_batch_beside_a_micro_batch_is_that_of_a_step(pair: tuple[str, str], step: int) -> None:
    training = typed(*pair[::step]).settings.training
    assert (training.batch_size, training.global_batch_size) == (32, 128)


def test_the_pair_means_the_same_in_a_file_and_across_sources(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("training: {micro_batch_size: 32, batch_size: 128}")
    whole = typed("--config", str(file)).settings.training
    assert (whole.batch_size, whole.global_batch_size) == (32, 128)
    smaller = typed("--config", str(file), "batch_size=64").settings.training
    assert (smaller.batch_size, smaller.global_batch_size) == (32, 64)
    file.write_text("training: {batch_size: 128, global_batch_size: null}")
    above = typed("--config", str(file), "--micro-batch-size=32").settings.training
    assert (above.batch_size, above.global_batch_size) == (32, 128)


def test_a_micro_batch_alone_is_the_batch() -> None:
    training = typed("--micro_batch_size", "32").settings.training
    assert (training.batch_size, training.global_batch_size) == (32, None)


def test_batches_that_do_not_divide_are_told_with_those_that_do() -> None:
    message = refusal("batch_size=128", "micro_batch_size=48")
    assert message.endswith(
        "is not a multiple of batch_size = 48 (96 and 144 would be); 32 divides it"
    )
    refusal("batch_size=8", "micro_batch_size=4", "global_batch_size=8")
    refusal(f"batch_size={2**31 - 1}", f"micro_batch_size={2**31 - 2}")


def test_a_setting_may_lack_its_section_in_a_file_and_on_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("max_iters: 7\nout_dir: there\ninit_from: scratch_next_token\n")
    loaded = typed("--config", str(file), "context_size=64", "factor=4")
    assert loaded.settings.training.max_steps == 7
    assert loaded.settings.system.checkpoint_dir == "there"
    assert loaded.settings.model.init_from is None
    assert loaded.sources["training.context_length"] == "training.context_size=64"


def test_a_name_that_could_mean_two_settings_is_refused_with_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ALIASES, "data.max_steps", "data.num_samples")
    _names_by_leaf.cache_clear()
    try:
        message = refusal("max_steps=3")
    finally:
        _names_by_leaf.cache_clear()
    assert message.startswith("max_steps: could mean training.max_steps or data.max_steps")


def test_every_setting_is_clear_without_its_section() -> None:
    for name in (*all_fields(), *ALIASES):
        found = full_name(name.rpartition(".")[2])
        assert ALIASES.get(found, found) == ALIASES.get(name, name)


def test_names_that_change_nothing_or_are_missing_hide_no_setting() -> None:
    known = {*all_fields(), *ALIASES}
    keys = {name.rpartition(".")[2] for name in known}
    assert not {*UNNEEDED} & keys
    assert not {*UNNEEDED, *ABSENT} & known
    assert all(ALIASES.get(name, name) in all_fields() for name in VALUES)


def test_the_piano_trainers_sample_loads_whole(tmp_path: Path) -> None:
    file = tmp_path / "piano.yaml"
    file.write_text(PIANO)
    loaded = typed("--config", str(file))
    training = loaded.settings.training
    assert (training.global_grad_accum_nums, training.max_steps, training.weight_decay) == (
        16,
        300000,
        0.1,
    )
    assert (training.max_grad_norm, training.learning_rate, training.min_lr) == (1.0, 8e-5, 8e-6)
    assert (training.warmup_steps, training.lr_schedule) == (1000, "cosine")
    assert (training.precision, training.compile, training.num_workers) == ("float16", True, 64)
    assert not loaded.notes
    file.write_text(PIANO.replace("decay_lr: true", "decay_lr: false").replace("min_lr", "#"))
    assert typed("--config", str(file)).settings.training.lr_schedule == "constant"


def test_the_piano_trainers_commands_are_understood() -> None:
    debug = typed("--config-name=debugging-pretraining")
    assert debug.preset == "debug"
    whole = typed(
        "--config-name=gpt2_pretraining",
        "data.batch_size=32",
        "optimizer.gradient_accumulation_steps=8",
        "data.context_size=2048",
        "init_from=scratch_next_token",
    )
    training = whole.settings.training
    assert (whole.preset, training.batch_size) == ("train", 32)
    assert training.global_grad_accum_nums == 8
    assert whole.settings.model.init_from is None
    assert typed("init_from=piano.pt").settings.model.init_from == "piano.pt"
    keys = ("eval_interval=5", "eval_steps=3", "run_name=r", "ddp.backend=nccl")
    saving = ("out_dir=o", "training.save_last=true")
    rest = typed(*keys, *saving, "stage=next_token_pretraining", "data.validation=v=0.1")
    assert rest.settings.training.eval_batches == 3
    assert rest.settings.system.checkpoint_dir == "o"
    assert [note.partition(" ")[0] for note in rest.notes] == ["run_name", "ddp.backend"]
    assert rest.settings.training.stage == "next_token"


def test_the_piano_trainers_second_stage_is_ours() -> None:
    tuned = typed(
        "--config-name=gpt2_piano_finetuning",
        "data.batch_size=32",
        "init_from=midi-gpt2-pretrained-model.pt",
    )
    assert (tuned.preset, tuned.settings.training.batch_size) == ("finetune", 32)
    assert tuned.settings.training.stage == "prompt_target"
    assert typed("stage=piano_task").settings.training.stage == "prompt_target"
    assert "examples/midi/make_tasks.py" in refusal("data.notes_per_record=128")


@pytest.mark.parametrize("dashes", [False, True])
def test_the_options_of_the_framework_document_are_taken(dashes: bool) -> None:
    options = (
        "--save_dir=./checkpoints",
        *("--hidden_size=768", "--num_layers=12", "--num_heads=12", "--num_kv_heads=4"),
        *("--batch_size=128", "--micro_batch_size=32", "--max_steps=100000"),
        *("--learning_rate=3e-4", "--mixed_precision", "--compile_model"),
        *("--eval_interval=500", "--num_workers=8"),
    )
    if dashes:
        options = tuple(option.replace("_", "-") for option in options)
    argv = [word for option in options for word in option.split("=")]
    loaded = typed(*argv, "data.validation=v=0.1")
    model, training = loaded.settings.model, loaded.settings.training
    assert (model.hidden_size, model.num_layers, model.num_heads) == (768, 12, 12)
    assert (model.num_kv_heads, training.eval_interval, training.num_workers) == (4, 500, 8)
    assert (training.learning_rate, precision(training), training.compile) == (3e-4, "bf16", True)
    assert loaded.settings.system.checkpoint_dir == "./checkpoints"
    assert loaded.sources["model.hidden_size"] == "--hidden-size"
    assert typed("--compile_model=false").settings.training.compile is False
    assert typed("--compile_model", "false").settings.training.compile is False
    half = typed("--mixed_precision", "true", "max_steps=3").settings.training
    assert (precision(half), half.max_steps) == ("bf16", 3)


def test_what_another_project_has_to_be_told_is_taken_with_a_line() -> None:
    options = ("--verbose", "--no-gpu-dataloader", "--enable_fused_adam")
    notes = typed(*options, "--max-steps", "3").notes
    assert [note.split()[0] for note in notes] == [o.replace("_", "-") for o in options]
    assert all("changes nothing: " in note for note in notes)
    assert max(len(f"[launcher] {note}") for note in notes) <= 80


def test_their_name_for_full_attention_is_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "infini.yaml"
    file.write_text("model:\n  attention: infini\n")
    assert typed("--config-file", str(file)).settings.model.attention == "infini"
    assert typed("--config-file", str(file), "--disable-infini-attn").settings.model.attention == (
        "full"
    )


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--stride=8",), "--stride: is an option of `run.sh prepare`"),
        (("--tokenizer_type", "bpe"), "--tokenizer-type: is an option of `run.sh prepare`; data"),
        (
            ("--nproc_per_node=4",),
            "--nproc-per-node: is an option of torchrun: `bash run.sh --mode",
        ),
        (("--nnodes=4",), "--nnodes: Slurm says which machines make one job: `srun "),
        (("--node_rank=0",), "--node-rank: Slurm says which machines make one job"),
        (("--master_addr=192.168.1.1",), "--master-addr: Slurm says which machines make"),
        (("--master-port", "29500"), "--master-port: Slurm says which machines make one job"),
        (("launch.mode=FSDP",), "launch.mode = 'FSDP': expected"),
        (("--mode=both",), "launch.mode = 'both': expected"),
        (("--lr", "1e-3"), "--lr: its name here is training.learning_rate"),
        (("training.lr=1e-3",), "training.lr: its name here is training.learning_rate"),
        (("lr=1e-3",), "lr: its name here is training.learning_rate"),
        (("--epochs=3",), "--epochs: there are steps here, and no epochs: training.max_steps"),
        (("training.num_epochs=3",), "training.num_epochs: there are steps here, and no epochs"),
        (("--use_amp", "fp16"), "training.precision=fp16 names the type"),
        (("training.use_amp=bf16",), "training.precision=bf16 names the type"),
        (("--eval_strategy=epoch",), "--eval-strategy: `steps` alone is taken"),
        (("optim=sgd",), "optim: AdamW is the only optimizer"),
        (("--rdzv-id=3",), "--rdzv-id: Slurm says which machines"),
        (("-m", "gpt2.train"), "-m: run.sh trains by itself"),
        (("--output_dir=out",), "--save-dir out (system.checkpoint_dir) is where checkpoints go"),
        (("--mixed_precision", "fp8"), "'fp8': not an option"),
        (("--hidden-size",), "argument --hidden-size: expected one argument"),
        (("--hiden-size=3",), "did you mean --hidden-size?"),
        (("max_step=3",), "did you mean training.max_steps?"),
        (("training.grad_accum=3",), "did you mean training.grad_accum_nums?"),
    ],
)
def test_what_is_not_taken_is_told_truly(argv: tuple[str, ...], told: str) -> None:
    assert told in refusal(*argv)


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("--save-dir", ["--data-dir", "--run-dir"]),
        ("--config-name", ["--config"]),
        ("eval_steps", ["training.max_steps", "training.eval_batches"]),
        ("lr.decay_lr", ["lr.min_lr"]),
        ("training.foo", ["training.compile", "training.precision"]),
    ],
)
def test_a_hint_names_nothing_that_is_merely_written_alike(
    name: str, candidates: list[str]
) -> None:
    assert nearest(name, candidates) is None


def test_an_option_is_a_setting_only_where_settings_are_taken(tmp_path: Path) -> None:
    from model_check.config.arguments import Parser

    with pytest.raises(ModelCheckError, match="--max-steps: no such option"):
        Parser(prog="other").read(["--max-steps"])


def test_a_worker_and_the_preparer_take_the_same_options() -> None:
    from model_check.config.arguments import settings_request
    from pretrain_main import parser

    read = settings_request(parser().read(["--hidden_size", "64", "--verbose"]), {})
    loaded = load(read, lambda: False)
    assert loaded.settings.model.hidden_size == 64
    assert loaded.notes


@pytest.mark.parametrize(
    ("argv", "settings"),
    [
        ("--gradient_accumulation_steps 4", "global_grad_accum_nums=4"),
        (
            "--gradient_accumulation_steps 4 --per_device_train_batch_size 2",
            "grad_accum_nums=4 batch_size=2",
        ),
        ("eval_interval=9 --eval_steps 3", "eval_interval=9 eval_batches=3"),
        ("--eval_steps 3 --eval_strategy steps", "eval_interval=3"),
    ],
)
def test_what_one_name_means_to_two_trainers_is_decided_by_its_neighbour(
    argv: str, settings: str
) -> None:
    validation = "data.validation=v=0.1"
    asked = typed(*argv.split(), validation)
    assert asked.settings == typed(*settings.split(), validation).settings
    assert not asked.notes


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (("--bf16",), "bf16"),
        (("--bf16", "True"), "bf16"),
        (("--fp16", "max_steps=3"), "fp16"),
        (("--fp16=false",), "fp32"),
        (("--mixed_precision", "fp16"), "fp16"),
        (("--mixed_precision=no",), "fp32"),
    ],
)
def test_a_precision_is_a_switch_or_a_word(argv: tuple[str, ...], value: str) -> None:
    assert typed(*argv).settings.training.precision == value


def test_a_request_made_by_a_program_is_held_to_the_same() -> None:
    with pytest.raises(ConfigError, match="are the same setting"):
        load(Request(overrides=("max_steps=5", "max_iters=6")), lambda: False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"bf16": true, "fp16": false}', "bf16"),
        ('{"fp16": false, "bf16": true}', "bf16"),
        ('{"fp16": true, "bf16": false}', "fp16"),
        ('{"bf16": false, "fp16": false}', "fp32"),
    ],
)
def test_a_file_may_say_of_both_16_bit_types_whether_they_are_meant(
    tmp_path: Path, text: str, value: str
) -> None:
    (tmp_path / "hf.json").write_text(text)
    assert precision(typed("--config", str(tmp_path / "hf.json")).settings.training) == value
    (tmp_path / "hf.json").write_text('{"bf16": true, "fp16": true}')
    assert "are the same setting" in refusal("--config", str(tmp_path / "hf.json"))
