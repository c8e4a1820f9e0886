"""A resume takes only what fits: each part of a checkpoint that does not fit is refused by name,
and the run that wanted to resume stays as it was."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_check.engine.rng import rng_states
from model_check.engine.saving.resume import resume
from model_check.engine.saving.saver import Saver
from model_check.engine.sharded.shards import own_sums
from model_check.engine.sharded.together import Together
from model_check.engine.sharded.writing import write_shards
from model_check.errors import EXIT_USAGE, CheckpointError
from model_check.forensics.fingerprint import fingerprint_for
from model_check.utils.checkpoint_names import COMMON, MANIFEST
from tests.engine.conftest import FakeSource, Run, make_run
from tests.engine.saving.test_resume import flat, pop, put
from tests.engine.saving.test_sharded import alone  # noqa: F401 (a fixture)

Change = Callable[[dict[str, Any]], object]
MakeRun = Callable[..., Run]
SETTINGS: dict[str, Any] = {
    "training__save_interval": 2,
    "training__eval_interval": 2,
    "splits": {"full": lambda: [FakeSource().random(100)]},
    "data": {"content": "abc"},
}
HALF = {"training__use_amp": "true", "training__precision": "fp16"}


@dataclass(frozen=True)
class Place:
    """A checkpoint after 4 steps, and a run that could resume it."""

    path: Path
    other: Run
    common: dict[str, Any]
    tensors: dict[str, Tensor]

    def refuses(self, path: Path, words: str) -> None:
        state = self.other.trainer.state
        saver = Saver(state.settings.training, state, fingerprint_for(torch.device("cpu")))
        before = snapshot(self.other)
        with pytest.raises(CheckpointError, match=words) as caught:
            resume(state, str(path), saver)
        text = str(caught.value)
        assert text.startswith(str(path))
        assert "\n" not in text
        assert len(text) < 1000
        assert caught.value.exit_code == EXIT_USAGE
        assert snapshot(self.other).keys() == before.keys()
        for name, value in snapshot(self.other).items():
            same = torch.equal(value, before[name]) if isinstance(value, Tensor) else None
            assert same or value == before[name], name


def snapshot(run: Run) -> dict[str, Any]:
    state = run.trainer.state
    live = {
        "tensors": {name: t.clone() for name, t in state.weights_and_moments().items()},
        "num_steps": state.optimizer.num_steps.clone(),
        "loss_scale": dict(state.optimizer.loss_scale.state_dict())
        if state.optimizer.loss_scale
        else {},
        "rng": rng_states(),
        "progress": asdict(state.progress) | {"since": str(state.progress.since)},
        "threads": torch.get_num_threads(),
    }
    return dict(flat(live))


def make_place(directory: Path, **changes: Any) -> Place:
    run = make_run(directory, **SETTINGS, **changes)()
    other = make_run(directory / "other", **SETTINGS, **changes)
    state = run.trainer.state
    common = state.capture(4, run.meter.loss_last) | {"kept": ["step_2.pt"]}
    return Place(directory / "step_4.pt", other, common, state.weights_and_moments())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("half"), **HALF)


def change_each(change: Callable[[Tensor], Any], *path: Any) -> Change:
    """Change the tensor at `path`; where a name is `*`, all of them."""

    def act(tree: Any, names: tuple[Any, ...] = path) -> None:
        first, *rest = names
        for key in list(tree) if first == "*" else [first]:
            if rest:
                act(tree[key], tuple(rest))
            else:
                tree[key] = change(tree[key])

    return act


def rename(old: Any, new: Any, *path: Any) -> Change:
    def act(saved: dict[str, Any]) -> None:
        for key in path:
            saved = saved[key]
        saved[new] = saved.pop(old)

    return act


def update(**values: Any) -> Change:
    return lambda saved: saved.update(values)


def one(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:1].clone()


def swap_w1_and_w2(saved: dict[str, Any]) -> None:
    model = saved["model"]
    one, other = (f"layers.0.feed_forward.w{number}.weight" for number in (1, 2))
    model[one], model[other] = model[other], model[one]


def nested_in_itself(saved: dict[str, Any]) -> None:
    saved["optimizer"]["more"] = saved["optimizer"]


WQ, NORM, MOMENTS = "layers.0.attention.wq.weight", "norm.weight", ("optimizer", "state")
STEP = (*MOMENTS, 3, "step")

TENSORS: dict[str, tuple[Change, str]] = {
    "a weight is missing": (pop("model", NORM), r"weights/norm\.weight missing"),
    "a weight too many": (put(torch.ones(32), "model", "output2.weight"), r"output2\.weight unex"),
    "a weight with another name": (rename(NORM, "Norm", "model"), "norm.weight missing.*Norm unex"),
    "two weights change places": (swap_w1_and_w2, r"feed_forward\.w1\.weight is float32 \[32, 64"),
    "a weight of one value": (change_each(one, "model", NORM), r"norm\.weight is float32 \[1\]"),
    "a weight that is a scalar": (
        put(torch.ones(()), "model", NORM),
        r"norm.weight is float32 \[\]",
    ),
    "a weight with one dimension more": (
        change_each(lambda t: t[None], "model", NORM),
        r"norm\.weight is float32 \[1, 32\], not float32 \[32\]",
    ),
    "a weight in bfloat16": (change_each(Tensor.bfloat16, "model", WQ), "wq.weight is bfloat16"),
    "weights in bfloat16": (change_each(Tensor.bfloat16, "model", "*"), "is bfloat16.*and 8 more"),
    "a weight in float16": (change_each(Tensor.half, "model", NORM), r"norm\.weight is float16"),
    "a weight in float64": (change_each(Tensor.double, "model", NORM), r"norm\.weight is float64"),
    "a weight of integers": (change_each(Tensor.int, "model", NORM), r"norm\.weight \(int32\)"),
    "a complex weight": (
        change_each(lambda t: t.to(torch.complex64), "model", NORM),
        r"norm\.weight \(complex64\)",
    ),
    "a weight in float8": (
        change_each(lambda t: t.to(torch.float8_e4m3fn), "model", NORM),
        r"norm\.weight \(float8_e4m3fn\)",
    ),
    "a sparse weight": (change_each(Tensor.to_sparse, "model", WQ), r"wq\.weight \(sparse"),
    "a weight without values": (
        change_each(lambda t: t.to("meta"), "model", WQ),
        r"wq\.weight \(on meta\)",
    ),
    "a moment of one value": (
        change_each(one, *MOMENTS, 0, "exp_avg"),
        r"exp_avg/tok_embed\.weight is float32 \[1\], not float32 \[31, 32\]",
    ),
    "a second moment of one value": (
        change_each(one, *MOMENTS, 10, "exp_avg_sq"),
        r"exp_avg_sq/norm\.weight is float32 \[1\]",
    ),
    "a moment that is a scalar": (
        change_each(Tensor.mean, *MOMENTS, 0, "exp_avg"),
        r"exp_avg/tok_embed\.weight is float32 \[\]",
    ),
    "a moment of one row": (
        change_each(lambda t: t[:1].clone(), *MOMENTS, 0, "exp_avg"),
        r"exp_avg/tok_embed\.weight is float32 \[1, 32\]",
    ),
    "a moment of one column": (
        change_each(lambda t: t[:, :1].clone(), *MOMENTS, 0, "exp_avg_sq"),
        r"exp_avg_sq/tok_embed\.weight is float32 \[31, 1\]",
    ),
    "a transposed moment": (
        change_each(lambda t: t.t().contiguous(), *MOMENTS, 0, "exp_avg"),
        r"exp_avg/tok_embed\.weight is float32 \[32, 31\]",
    ),
    "moments in bfloat16": (
        change_each(Tensor.bfloat16, *MOMENTS, "*", "exp_avg"),
        r"exp_avg/tok_embed\.weight is bfloat16",
    ),
    "a moment in float64": (
        change_each(Tensor.double, *MOMENTS, 5, "exp_avg_sq"),
        r"exp_avg_sq/layers\.0\.attention\.wo\.weight is float64|exp_avg_sq/\S+ is float64",
    ),
    "a moment of integers": (change_each(Tensor.long, *MOMENTS, 0, "exp_avg"), r"exp_avg \(int64"),
    "a moment of truth": (change_each(Tensor.bool, *MOMENTS, 0, "exp_avg"), r"exp_avg \(bool\)"),
    "a sparse moment": (change_each(Tensor.to_sparse, *MOMENTS, 0, "exp_avg"), "exp_avg .sparse"),
    "no moments of a weight": (pop(*MOMENTS, 2), r"exp_avg/layers\.0\S+ missing|missing"),
    "moments of a weight too many": (
        put({n: torch.zeros(()) for n in ("step", "exp_avg", "exp_avg_sq")}, *MOMENTS, 99),
        "step/99, exp_avg/99, exp_avg_sq/99 unexpected",
    ),
    "moments from number 1 on": (rename(0, 12, *MOMENTS), r"exp_avg/12.* unexpected"),
    "moments with texts for numbers": (
        rename(0, "0", *MOMENTS),
        "Expected `int`, got `str`.*state",
    ),
    "moments of AMSGrad": (
        put(torch.zeros(32), *MOMENTS, 10, "max_exp_avg_sq"),
        r"max_exp_avg_sq/norm\.weight unexpected",
    ),
    "an optimizer within itself": (nested_in_itself, "not a checkpoint.*recursion"),
}

COUNTS: dict[str, tuple[Change, str]] = {
    "the optimizer has done 1000 steps": (
        change_each(lambda t: t.fill_(1000), *MOMENTS, "*", "step"),
        r"step/tok_embed\.weight is float32 \[\] 1000, not float32 \[\] 4",
    ),
    "it has done none": (change_each(lambda t: t * 0, *STEP), r"step/\S+ is float32 \[\] 0, not"),
    "one weight is a step ahead": (change_each(lambda t: t + 1, *STEP), r"step/\S+ is .* 5, not"),
    "half a step": (change_each(lambda t: t + 0.5, *STEP), r"step/\S+ is float32 \[\] 4\.5"),
    "a step less than none": (change_each(lambda t: -t, *STEP), r"step/\S+ is float32 \[\] -4"),
    "a step for each value": (
        change_each(lambda t: t.repeat(3), *STEP),
        r"step/\S+ is float32 \[3",
    ),
    "a step in float64": (change_each(Tensor.double, *STEP), r"step/\S+ is float64"),
    "a step of integers": (change_each(Tensor.int, *STEP), r"state\.3\.step \(int32\)"),
    "a step that is NaN": (change_each(lambda t: t * torch.nan, *STEP), r"not finite: \S+3\.step"),
    "the checkpoint has done 5 steps": (update(step=5), "step is 5, not 4"),
    "it has done 10^15": (update(step=10**15), "step is 1000000000000000, not 4"),
    "it has done 10^400": (update(step=10**400), r"Expected `int` <= .* at `\$\.step`"),
    "its step is 4.0": (update(step=4.0), r"got `float` - at `\$\.step`"),
    "a position of 10^15": (
        put(10**15, "loader", "sequences"),
        r"loader\.sequences is 1000000000000000, not 8",
    ),
    "a position of 2^63": (put(2**63, "loader", "sequences"), r"at `\$\.loader\.sequences`"),
    "one sequence too many": (put(9, "loader", "sequences"), r"loader\.sequences is 9, not 8"),
    "no sequence": (put(0, "loader", "sequences"), r"loader\.sequences is 0, not 8"),
    "less than none": (put(-8, "loader", "sequences"), r"at `\$\.loader\.sequences`"),
    "an older position beside it": (put(4, "loader", "position"), r"loader\.position unexpected"),
    "an older position of 10^15": (
        put({"position": 10**15}, "loader"),
        r"loader\.sequences is 2000000000000000, not 8",
    ),
    "counts since a later step": (
        put({"step": 5, "sequences": 10, "tokens": 160}, "since"),
        r"since is .*, not the counts",
    ),
    "counts since no step": (
        put({"step": 0, "sequences": 10**15, "tokens": 0}, "since"),
        r"since is .*; loader\.sequences is 8, not 1000000000000008",
    ),
    "a token too many": (update(total_tokens=129), "total_tokens is 129, not 128"),
    "tokens of another length": (update(total_tokens=256), "total_tokens is 256, not 128"),
    "ranks that were not there": (update(num_ranks=2), r"loader\.sequences is 8, not 16"),
    "random states of ranks that were not there": (
        lambda saved: saved.update(rng_of_ranks=[saved["rng"]] * 2),
        "rng_of_ranks is list of 2, not one for each of 1 ranks",
    ),
    "too few random states": (
        lambda saved: saved.update(num_ranks=3, rng_of_ranks=[saved["rng"]] * 2),
        "rng_of_ranks is list of 2, not one for each of 3 ranks",
    ),
    "a million threads": (update(num_threads=10**6), r"`\$\.num_threads`"),
    "no thread": (update(num_threads=0), r"`\$\.num_threads`"),
    "the best at a later step": (update(best_step=1000), "best_step is .*1000], not a split"),
    "the best at no step": (update(best_step=None), "best_step is .*None], not a split"),
    "the best of no split": (
        update(best_split="x"),
        "best_split, .*'x'.*, not a split of val_loss",
    ),
    "a best loss of NaN": (update(best_val_loss=float("nan")), r"best_val_loss.* is \[.*nan"),
    "a best loss of -5": (update(best_val_loss=-5.0), r"best_val_loss.* is \[.*-5\.0"),
    "a best loss that was none": (
        update(best_step=4, best_val_loss=9.0),
        r"best_val_loss.* is \[.*9\.0",
    ),
    "a loss of -5": (put(-5.0, "val_loss", "full"), r"val_loss\.full is -5\.0"),
    "a split that is not evaluated": (
        put(3.0, "val_loss", "other"),
        "val_loss of other, which this run does not evaluate",
    ),
    "a later step is kept": (update(kept=["step_6.pt"]), r"kept is \['step_6\.pt'\], not differe"),
    "a file elsewhere is kept": (update(kept=["../step_2.pt"]), r"kept is \['\.\./step_2"),
    "a file that is no step is kept": (update(kept=["last.pt"]), r"kept is \['last\.pt'\]"),
    "a step is kept twice": (update(kept=["step_2.pt"] * 2), "kept is .*, not different names"),
    "a learning rule of others": (
        put((0.5, 0.95), "optimizer", "param_groups", 0, "betas"),
        r"optimizer\.param_groups\.0\.betas\.0 is 0\.5, not 0\.9",
    ),
    "another decay": (
        put(0.2, "optimizer", "param_groups", 0, "weight_decay"),
        r"param_groups\.0\.weight_decay is 0\.2, not 0\.1",
    ),
    "norms that are decayed": (
        put(0.1, "optimizer", "param_groups", 1, "weight_decay"),
        r"param_groups\.1\.weight_decay is 0\.1, not 0\.0",
    ),
    "weights of another group": (
        lambda saved: saved["optimizer"]["param_groups"][0]["params"].reverse(),
        r"param_groups\.0\.params\.0 is",
    ),
    "a group too few": (pop("optimizer", "param_groups", 1), "param_groups is list of 1|param_gr"),
    "no groups": (pop("optimizer", "param_groups"), r"optimizer\.param_groups missing"),
    "a scale that no run of float32 has": (
        put(
            {"value": torch.tensor(65536.0), "num_good": torch.zeros(())}, "optimizer", "loss_scale"
        ),
        r"optimizer\.loss_scale is .*, not None",
    ),
}

OTHERS: dict[str, tuple[Change, str]] = {
    "no python rng": (
        pop("rng", "python"),
        r"rng is .*, not a random state \(KeyError: 'python'\)",
    ),
    "short python rng": (put([3, [1, 2], None], "rng", "python"), "rng is .*, not a random state"),
    "a word of python's below 0": (put(-1, "rng", "python", 1, 7), "rng is|rng.python.1.7 is -1"),
    "a torch rng of floats": (put(torch.zeros(3), "rng", "torch"), "rng is .*RNG state must be"),
    "a torch rng that is cut": (
        change_each(lambda t: t[:100].clone(), "rng", "torch"),
        "rng is .*, not a random state",
    ),
    "a numpy rng of words": (put("x", "rng", "numpy"), "rng is .*, not a random state"),
    "numpy's keys in float": (
        change_each(lambda t: t + 0.5, "rng", "numpy", "state", "key"),
        r"rng\.numpy\.state\.key is float32 \[624\]",
    ),
    "numpy's keys below 0": (
        change_each(lambda t: -1 - t, "rng", "numpy", "state", "key"),
        r"rng\.numpy\.state\.key has other values",
    ),
    "too many of numpy's keys": (
        change_each(lambda t: t.repeat(2), "rng", "numpy", "state", "key"),
        r"rng\.numpy\.state\.key is int64 \[1248\], not int64 \[624\]|\[1248\]",
    ),
    "numpy's position behind its keys": (
        put(10**6, "rng", "numpy", "state", "pos"),
        r"rng is .*position 1000000 of 624",
    ),
    "two states of GPUs": (
        put([torch.zeros(16, dtype=torch.uint8)] * 2, "rng", "cuda"),
        r"rng\.cuda is list of 2|rng\.cuda is .*, not the state of at most one GPU",
    ),
    "a GPU's state of floats": (put([torch.zeros(16)], "rng", "cuda"), r"rng\.cuda is .*, not the"),
    "another geometry": (
        put(64, "model_cfg", "hidden_size"),
        r"model_cfg\.hidden_size is 64, not 32",
    ),
    "other heads": (put(4, "model_cfg", "num_heads"), r"model_cfg\.num_heads is 4, not 2"),
    "settings of another geometry": (
        put(48, "settings", "model", "intermediate_size"),
        r"model_cfg\.intermediate_size is 64, not 48",
    ),
    "a tied head in the settings": (
        put(True, "settings", "model", "tie_word_embeddings"),
        r"model_cfg\.tie_word_embeddings is False, not True",
    ),
    "settings of another batch size": (
        put(4, "settings", "training", "batch_size"),
        r"loader\.sequences is 8, not 16",
    ),
    "settings without a batch size": (
        put(None, "settings", "training", "batch_size"),
        r"settings are damaged: Expected `int`.*batch_size",
    ),
    "infini-attention that is a number": (put(7, "settings", "model", "infini"), "are damaged"),
    "data of lists": (put([1], "data", "content"), r"`\$\.data"),
    "a tokenizer that is no stream": (
        update(tokenizer=torch.zeros(9, dtype=torch.uint8)),
        "its tokenizer",
    ),
    "a tokenizer of words": (update(tokenizer="x"), r"`\$\.tokenizer`"),
    "a chat template of numbers": (update(chat={"x": 7}), r"`\$\.chat"),
    "a logger that keeps lists": (update(logging={"wandb_id": [1]}), r"`\$\.logging"),
    "a schema of 2.0": (update(schema=2.0), r"another version \(schema float"),
    "a schema of tensors": (update(schema=torch.tensor([2, 2])), r"version \(schema Tensor"),
    "a tensor for the data": (update(data=torch.zeros(3)), "not a checkpoint of Model Check"),
    "shards in a file": (update(shards={}), "it names shards"),
}

SCALES: dict[str, tuple[Change, str]] = {
    "no scale": (put(None, "optimizer", "loss_scale"), r"optimizer\.loss_scale is None"),
    "a scale of none": (put({}, "optimizer", "loss_scale"), "loss_scale.value, .*num_good missing"),
    **{
        f"a scale of {value}": (
            put(torch.tensor(value), "optimizer", "loss_scale", "value"),
            r"loss_scale\.value",
        )
        for value in (0.0, -2.0, 3.0, 2.0**-3, 2.0**40, float("inf"), float("nan"))
    },
    **{
        f"{value} good steps": (
            put(torch.tensor(value), "optimizer", "loss_scale", "num_good"),
            r"loss_scale\.num_good is .*, not a float32 count up to 4",
        )
        for value in (5.0, -1.0, 0.5)
    },
    "a scale in float64": (
        change_each(Tensor.double, "optimizer", "loss_scale", "value"),
        r"loss_scale\.value is float64",
    ),
    "a scale for each value": (
        change_each(lambda t: t.repeat(2), "optimizer", "loss_scale", "value"),
        r"loss_scale\.value is float32 \[2\]",
    ),
}

FILES = TENSORS | COUNTS | OTHERS


def changed(place: Place, tmp_path: Path, change: Change) -> Path:
    saved = torch.load(place.path, weights_only=True)
    change(saved)
    path = tmp_path / "step_4.pt"
    torch.save(saved, path)
    return path


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_does_not_fit_is_refused_by_name(
    plain: Place, tmp_path: Path, what: str
) -> None:
    change, words = FILES[what]
    plain.refuses(changed(plain, tmp_path, change), words)


@pytest.mark.parametrize("what", SCALES)
def test_a_loss_scale_that_does_not_fit_is_refused_by_name(
    half: Place, tmp_path: Path, what: str
) -> None:
    change, words = SCALES[what]
    half.refuses(changed(half, tmp_path, change), words)


def test_a_file_with_the_name_of_another_step_is_refused(plain: Place, tmp_path: Path) -> None:
    plain.refuses(shutil.copy(plain.path, tmp_path / "step_8.pt"), "step is 4, not 8")


def older(saved: dict[str, Any]) -> None:
    """As the first version with this schema wrote it."""
    for key in (
        "since",
        "num_threads",
        "num_ranks",
        "rng_of_ranks",
        "kept",
        "tokenizer",
        "chat",
        "loss",
    ):
        del saved[key]
    saved["loader"] = {"position": 4}
    del saved["model_cfg"]["attention"]
    del saved["optimizer"]["loss_scale"]
    del saved["settings"]["launch"], saved["settings"]["training"]["compile"]
    saved["settings"]["training"]["gone_since"] = 7


@pytest.mark.parametrize("change", [lambda saved: None, older], ids=["of now", "older"])
def test_a_file_that_fits_goes_on_to_the_same_bits(
    plain: Place, tmp_path: Path, change: Change
) -> None:
    whole = make_run(tmp_path / "whole", **SETTINGS, training__max_steps=6)()
    path = changed(plain, tmp_path, change)
    rest = make_run(tmp_path / "rest", **SETTINGS, training__max_steps=6, training__resume=path)()
    assert rest.bits() == whole.bits()[4:]
    ours, theirs = (
        torch.load(tmp_path / name / "step_6.pt", weights_only=True) for name in ("rest", "whole")
    )
    assert (ours["loader"], ours["since"]) == (theirs["loader"], theirs["since"])
    assert ours["total_tokens"] == theirs["total_tokens"] == 6 * 2 * 16


def test_counts_go_on_behind_a_resume_with_another_batch_size(tmp_path: Path) -> None:
    """Which they are checked against, too."""
    saving = {"training__save_interval": 2}
    make_run(tmp_path, **saving)()
    more = {"training__batch_size": 3, "training__max_steps": 6}
    first = {"training__resume": tmp_path / "step_4.pt", "training__resume_anyway": "true"}
    make_run(tmp_path, **saving, **more, **first)()
    path = tmp_path / "step_6.pt"
    saved = torch.load(path, weights_only=True)
    since = {"step": 4, "sequences": 8, "tokens": 128}
    assert (saved["loader"], saved["since"]) == ({"sequences": 8 + 2 * 3}, since)
    assert saved["total_tokens"] == (8 + 2 * 3) * 16
    again = make_run(tmp_path, training__batch_size=3, training__resume=path)
    assert again.trainer.state.progress.sequences == 14
    del saved["since"]  # an older version did not write it
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match=r"loader\.sequences is 14, not 18.*resume_anyway"):
        make_run(tmp_path, training__batch_size=3, training__resume=path)
    anyway = {"training__batch_size": 3, "training__resume_anyway": "true"}
    run = make_run(tmp_path, **anyway, training__resume=path)
    assert run.trainer.state.progress.since.sequences == 14


# -- sharded


@pytest.fixture(scope="module")
def write(plain: Place, alone: Together) -> Callable[..., Path]:  # noqa: F811
    def sharded(
        path: Path, change: Change | None = None, common: Mapping[str, Any] | None = None
    ) -> Path:
        """A sharded checkpoint whose tensors or common part were changed before it was written."""
        tensors = dict(plain.tensors)
        if change is not None:
            change(tensors)
        optimizer = plain.common["optimizer"] | {"state": {}, "step": torch.tensor(4.0)}
        usual = plain.common | {"model": {}, "optimizer": optimizer}
        sums = own_sums(tensors, fingerprint_for(torch.device("cpu")))
        write_shards(path, usual | (common or {}), tensors, sums, alone)
        return path

    return sharded


def rewrite_common(path: Path, change: Change) -> None:
    """With its checksum."""
    (file,) = path.glob(f"*/{COMMON}")
    common = torch.load(file, weights_only=True)
    change(common)
    torch.save(common, file)
    content = file.read_bytes()
    entry = {"size": len(content), "sha256": sha256(content).hexdigest()}
    rewrite_manifest(path, put(entry, "files", COMMON))


def rewrite_manifest(path: Path, change: Change) -> None:
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))


SHARDED: dict[str, tuple[Change, str]] = {
    "weights in bfloat16": (
        change_each(Tensor.bfloat16, "weights/norm.weight"),
        r"weights/norm\.weight is bfloat16 \[32\], not float32",
    ),
    "a moment of one value": (
        change_each(one, "exp_avg/norm.weight"),
        r"exp_avg/norm\.weight is float32 \[1\]",
    ),
    "a moment in float64": (
        change_each(Tensor.double, "exp_avg_sq/norm.weight"),
        r"exp_avg_sq/norm\.weight is float64",
    ),
    "a transposed moment": (
        change_each(lambda t: t.t().contiguous(), "exp_avg/tok_embed.weight"),
        r"exp_avg/tok_embed\.weight is float32 \[32, 31\]",
    ),
    "no moment of a weight": (pop("exp_avg/norm.weight"), r"exp_avg/norm\.weight missing"),
    "no second moment": (pop("exp_avg_sq/norm.weight"), r"exp_avg_sq/norm\.weight missing|exp_avg"),
    "a weight too many": (
        put(torch.ones(3), "weights/other.weight"),
        r"weights/other\.weight unexpected",
    ),
    "a weight with another name": (
        rename("weights/norm.weight", "weights/Norm"),
        r"weights/norm\.weight missing",
    ),
    "a moment with another name": (
        rename("exp_avg/norm.weight", "exp_avg/Norm"),
        r"exp_avg/norm\.weight missing",
    ),
    "gradients": (put(torch.ones(3), "gradients/norm.weight"), "names the tensor gradients/norm"),
}
COMMONS: dict[str, tuple[Change, str]] = {
    "the optimizer has done 1000 steps": (
        put(torch.tensor(1000.0), "optimizer", "step"),
        r"optimizer\.step is float32 \[\] 1000, not float32 \[\] 4",
    ),
    "a step for each value": (
        put(torch.full((2,), 4.0), "optimizer", "step"),
        r"optimizer\.step is float32 \[2\]",
    ),
    "no step of the optimizer": (pop("optimizer", "step"), "step"),
    "another step than the shards": (update(step=5), "manifest.step is 4, not 5"),
    "other ranks than the shards": (update(num_ranks=2), r"manifest\.world\.ranks is 1, not 2"),
    "a position of 10^15": (put(10**15, "loader", "sequences"), r"loader\.sequences is 10+, not 8"),
    "weights beside the shards": (
        update(model={"norm.weight": torch.ones(32)}),
        r"common\.pt has tensors beside the shards: model",
    ),
    "moments beside the shards": (
        put({0: {}}, "optimizer", "state"),
        r"common\.pt has tensors beside the shards: optimizer\.state",
    ),
    "a short python rng": (put([3, [1, 2], None], "rng", "python"), "rng is .*, not a random sta"),
}
MANIFESTS: dict[str, tuple[Change, str]] = {
    "another step": (update(step=5), r"manifest\.step is 5, not 4"),
    "three ranks": (update(world={"ranks": 3}), r"manifest\.world\.ranks is 3, not 1"),
    "a mesh of other ranks": (
        update(world={"ranks": 1, "mesh": {"shard": 4}}),
        r"damaged: a mesh .* is not one of 1 ranks",
    ),
    "a file of a further rank": (
        put({"size": 1, "sha256": ""}, "files", "shard-00002-model-00001-of-00001.safetensors"),
        "damaged: it names files of more ranks than 1",
    ),
    "no sum": (
        lambda manifest: manifest["tensors"]["weights/norm.weight"]["chunks"][0].pop("sum"),
        r"manifest\.json: damaged: .*sum",
    ),
    "another dtype": (
        put("bfloat16", "tensors", "weights/norm.weight", "dtype"),
        r"shard-\S+: damaged: weights/norm\.weight",
    ),
}


@pytest.mark.parametrize("what", SHARDED)
def test_shards_that_do_not_fit_are_refused_by_name(
    plain: Place, write: Callable[..., Path], tmp_path: Path, what: str
) -> None:
    change, words = SHARDED[what]
    plain.refuses(write(tmp_path / "step_4", change), words)


@pytest.fixture(scope="module")
def sharded(write: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sharded") / "step_4")


@pytest.mark.parametrize("what", COMMONS)
def test_the_rest_of_a_sharded_checkpoint_that_does_not_fit_is_refused_by_name(
    plain: Place, sharded: Path, tmp_path: Path, what: str
) -> None:
    change, words = COMMONS[what]
    rewrite_common(shutil.copytree(sharded, tmp_path / "step_4"), change)
    plain.refuses(tmp_path / "step_4", words)


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_refused_by_name(
    plain: Place, sharded: Path, tmp_path: Path, what: str
) -> None:
    change, words = MANIFESTS[what]
    rewrite_manifest(shutil.copytree(sharded, tmp_path / "step_4"), change)
    plain.refuses(tmp_path / "step_4", words)


def test_a_directory_with_the_name_of_another_step_is_refused(
    plain: Place, sharded: Path, tmp_path: Path
) -> None:
    plain.refuses(shutil.copytree(sharded, tmp_path / "step_8"), "step is 4, not 8")
    run = make_run(tmp_path / "rest", **SETTINGS, training__resume=sharded)
    assert run.trainer.state.progress.step == 4
