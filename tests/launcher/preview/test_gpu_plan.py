"""`--dry-run --gpu-model`: a plan for a GPU that is not here."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.arguments import parse_run
from launcher.preview.gpu_plan import describe_on_model
from model_check.config.gpu_models import GPU_MODELS, gpu_model
from model_check.errors import EXIT_USAGE, ConfigError, UsageError


def plan(*argv: str) -> str:
    return describe_on_model(parse_run(["--dry-run", *argv], {}))


def document(*argv: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan("--json", *argv))
    return found


def test_the_default_run_on_an_h100() -> None:
    text = plan("--gpu-model", "H100")
    assert "H100 (NVIDIA H100 80GB HBM3), preset production: computed, not measured" in text
    assert "1,923,125,248 parameters, 9.997 GFLOP a token" in text
    assert "81.9 TFLOP a step" in text
    assert "of 79.6 GiB there: it fits" in text
    assert "step: about 224 ms for 8,192 tokens, 36,634 tokens/s, MFU 37.0%" in text


@pytest.mark.parametrize("gpu", [gpu.short for gpu in GPU_MODELS])
def test_every_gpu_of_the_table_has_a_plan_that_fits(gpu: str) -> None:
    found = document("--gpu-model", gpu)
    step = found["step"]
    assert found["fits"]
    assert step["ms"] == pytest.approx(sum(row["ms"] for row in step["operators"]))
    assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["ms"] * 1000)
    peak = found["gpu"]["tflops"] * 1e12
    rate = step["tokens_per_s"] * found["flops_per_token"]["full"]
    assert step["mfu"]["full"] == pytest.approx(rate / peak)
    assert 0.2 < step["mfu"]["full"] < 0.6
    assert found["memory_bytes"]["total"] <= found["gpu"]["memory_mib"] << 20


def test_what_does_not_fit_is_said_with_a_way_out() -> None:
    argv = ("--gpu-model", "L4", "--preset", "production", "training.batch_size=4")
    assert not document(*argv)["fits"]
    assert "IT DOES NOT FIT: lower training.batch_size (4)" in plan(*argv)


def test_a_gpu_that_shares_the_model_holds_a_shard() -> None:
    argv = ("--gpu-model", "H100", "--mode", "fsdp", "--preset", "production")
    alone, shared = plan(*argv), plan(*argv, "launch.fsdp.shard_size=8")
    assert "as if it held the whole model: launch.fsdp.shard_size says how many share it" in alone
    assert "for one GPU of 8 that share the model" in shared
    assert "as if it held" not in shared
    memory = document(*argv, "launch.fsdp.shard_size=8")["memory_bytes"]
    assert memory["moments"] * 8 == pytest.approx(document(*argv)["memory_bytes"]["moments"])


def test_settings_move_the_plan_as_they_move_a_step() -> None:
    def ms(*settings: str) -> float:
        step = document("--gpu-model", "H100", "--preset", "production", *settings)["step"]
        return float(step["ms"] / step["tokens"])

    assert ms("system.deterministic=false") < ms()
    assert ms("training.compile=true") < ms()
    assert ms("training.grad_accum_nums=8") < ms()
    assert ms("training.gradient_checkpointing=true") > ms()
    assert ms("model.attention_backend=eager") > 1.4 * ms()
    assert ms("model.attention=local") < ms()


def test_a_step_takes_as_long_as_the_host_needs_to_launch_its_kernels() -> None:
    """The preset `train`: 736 launches were counted with these logits, 439 compiled."""
    argv = ("--gpu-model", "H100", "--preset", "train", "model.vocab_size=4096")
    step = document(*argv)["step"]
    assert step["launches"] == pytest.approx(736, rel=0.01)
    assert document(*argv, "training.compile=true")["step"]["launches"] == pytest.approx(439, 0.02)
    assert step["ms"] == step["host_ms"] == pytest.approx(15 * step["launches"] / 1000)
    assert "the host bounds it: about 732 kernel launches at 15 us take 11 ms, the " in plan(*argv)
    assert "host bounds it" not in plan("--gpu-model", "H100", "--preset", "production")


def test_products_of_few_rows_take_the_time_that_their_weights_take_to_move() -> None:
    argv = ("--gpu-model", "H100", "--preset", "production", "training.context_length=7")
    once, four = (
        document(*argv, f"training.grad_accum_nums={n}")["step"]["operators"][0] for n in (1, 4)
    )
    num_multiplied = 1_923_125_248 - 128_256 * 4096 - 9 * 4096  # not the embedding, nor norms
    assert once["name"] == "products"
    assert once["bytes"] == 6 * num_multiplied
    assert once["ms"] == pytest.approx(6 * num_multiplied / 2.8e12 * 1000)
    assert four["ms"] == pytest.approx(4 * once["ms"])


def test_float32_has_memory_and_no_time() -> None:
    argv = ("--gpu-model", "H100", "training.precision=fp32")
    assert document(*argv)["step"] is None
    assert "no peak is known here for training.precision=fp32" in plan(*argv)


@pytest.mark.parametrize("name", ["h100", "NVIDIA H100 80GB HBM3", "H-100"])
def test_a_name_may_be_spelt_as_people_spell_it(name: str) -> None:
    assert gpu_model(name).short == "H100"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--dry-run", "--gpu-model", "H10"], "did you mean H100?"),
        (["--dry-run", "--gpu-model", "banana"], "known are A100-40GB, A100"),
        (["--dry-run", "--gpu-model", ""], "--gpu-model '': no figures of such a GPU"),
        (["--dry-run", "--gpu-model", "H100", "--mode", "compare"], "one training"),
        (["--gpu-model", "H100"], "with --dry-run it plans"),
        (["--dry-run", "--gpu-model", "H100", "--", "true"], "your own command"),
        (["--dry-run", "--gpu-model", "H100", "system.device=cpu"], "system.device is cpu"),
        (
            ["--dry-run", "--gpu-model", "H100", "--arm", "a", "--arm", "b", "seed=1"],
            "one training",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        describe_on_model(parse_run(argv, {}))
    assert said in str(raised.value)
    assert raised.value.exit_code == EXIT_USAGE


def test_settings_that_cannot_act_are_refused_as_in_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cudnn's backward pass is not deterministic"):
        plan("--gpu-model", "H100", "model.attention_backend=cudnn")
