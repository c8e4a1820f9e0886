"""Whatever transformers loads from a directory, in whichever order it was saved there, we load: the
same tensors."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from model_check.attention import sdpa
from model_check.config.geometry import geometry_values
from model_check.config.schema import ModelSettings
from model_check.config.shape import geometry, hf_name
from model_check.errors import ConfigError
from model_check.hf import INDEX, OLDER, OLDER_INDEX, SETS, WEIGHTS, load_weights, sample_of
from model_check.init import build_model
from model_check.model import Llama

Make = Callable[..., Any]
Save = Callable[[LlamaForCausalLM, Path], object]
SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def llama(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    made: Any = LlamaConfig
    return LlamaForCausalLM(made(**SIZES, initializer_range=0.2, tie_word_embeddings=tied))


def in_one(model: LlamaForCausalLM, out: Path) -> None:
    model.save_pretrained(out)


def in_shards(model: LlamaForCausalLM, out: Path) -> None:
    model.save_pretrained(out, max_shard_size="20KB")


def pickled(model: LlamaForCausalLM, out: Path) -> None:
    """As transformers 4 did."""
    model.config.save_pretrained(out)
    torch.save(model.state_dict(), out / OLDER)


def pickled_in_shards(model: LlamaForCausalLM, out: Path) -> None:
    model.config.save_pretrained(out)
    names = sorted(model.state_dict())
    files = {name: f"pytorch_model-{n % 2 + 1:05}-of-00002.bin" for n, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: model.state_dict()[name] for name in names if files[name] == file}
        torch.save(part, out / file)
    (out / OLDER_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def by_safetensors(model: LlamaForCausalLM, out: Path) -> None:
    """Of a tied head one name is left, as accelerate's save_model leaves it."""
    model.config.save_pretrained(out)
    save_model(model, str(out / WEIGHTS))


def inner(model: LlamaForCausalLM, out: Path) -> None:
    """A LlamaModel's: no name begins with `model.`; its head is tied."""
    model.model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (out / "config.json").write_text(json.dumps(config))


def said_to_be_tied(model: LlamaForCausalLM, out: Path) -> None:
    """And has a head of its own."""
    in_one(model, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


WAYS: dict[str, Save] = {
    "one": in_one,
    "shards": in_shards,
    "pickled": pickled,
    "pickled shards": pickled_in_shards,
}
ORDERS: dict[str, Sequence[tuple[Save, bool]]] = {
    **{name: [(save, False)] for name, save in WAYS.items()},
    **{
        f"{one}, then {other}": [(WAYS[one], False), (WAYS[other], False)]
        for one, other in itertools.permutations(WAYS, 2)
    },
    **{f"{name}, tied": [(save, True)] for name, save in WAYS.items()},
    "shards twice": [(in_shards, False), (in_shards, False)],
    "three ways": [(pickled, False), (in_shards, False), (in_one, False)],
    "by safetensors": [(by_safetensors, False)],
    "by safetensors, tied": [(by_safetensors, True)],
    "by safetensors behind shards": [(in_shards, False), (by_safetensors, False)],
    "a LlamaModel, tied": [(inner, True)],
    "a LlamaModel behind shards, tied": [(in_shards, True), (inner, True)],
    "said to be tied": [(said_to_be_tied, False)],
    "said to be tied, behind shards": [(in_shards, False), (said_to_be_tied, False)],
    "a head that is there twice": [(said_to_be_tied, True)],
}


def saved(directory: Path, order: Sequence[tuple[Save, bool]]) -> Path:
    directory.mkdir(exist_ok=True)
    for seed, (save, tied) in enumerate(order):
        save(llama(seed, tied=tied), directory)
    return directory


def loaded(place: Path, said: list[str] | None = None) -> Llama:
    directory = place.parent if place.is_file() else place
    values = geometry_values(str(directory), offline=True)
    settings = msgspec.convert(values, ModelSettings)
    return filled(settings, place, said)


def filled(model: ModelSettings, place: Path, said: list[str] | None = None) -> Llama:
    from model_check.config.schema import Settings

    settings = Settings(model=model)
    made = build_model(settings, geometry(model, 259), sdpa, torch.device("cpu"))
    load_weights(made, model, place, say=[].append if said is None else said.append)
    return made


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_what_transformers_loads_is_loaded(
    tmp_path: Path, order: Sequence[tuple[Save, bool]]
) -> None:
    directory, said = saved(tmp_path / "model", order), list[str]()
    theirs: dict[str, Tensor] = LlamaForCausalLM.from_pretrained(directory).state_dict()
    ours = {str(hf_name(n)): p for n, p in loaded(directory, said).named_parameters()}
    missing = theirs.keys() - ours.keys()
    assert missing <= {"lm_head.weight"}
    if missing:  # tied: theirs has it twice
        assert torch.equal(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"])
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    here = [name for name in SETS if (directory / name).is_file()]
    assert len(said) == (len(here) > 1)
    if said:
        assert f"{here[0]} is taken, as transformers does, not {here[1]}" in said[0]
    assert sample_of(directory) == sample_of(directory)


def test_one_file_of_safetensors_is_taken_alone(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", [(in_shards, False), (in_one, False)])
    file = (directory / WEIGHTS).rename(directory / "best.safetensors")
    ours = loaded(file)
    head = LlamaForCausalLM.from_pretrained(
        saved(tmp_path / "one", [(in_one, False)] * 2)
    ).lm_head.weight
    assert torch.equal(ours.output.weight, head)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 1048576\n"
DAMAGED: dict[str, tuple[str, bytes, str]] = {
    "a git-lfs pointer": (WEIGHTS, LFS, r"it is a git-lfs pointer, .* \(`git lfs pull` fetches it"),
    "a pointer as pickle": (OLDER, LFS, "it is a git-lfs pointer"),
    "a pointer as index": (INDEX, LFS, "it is a git-lfs pointer"),
    "a web page": (WEIGHTS, b"<!DOCTYPE html><html>401</html>", "it is a web page"),
    "a checkpoint of torch": (WEIGHTS, b"PK\x03\x04" + b"\0" * 40, "it is a zip archive"),
    "a GGUF": (WEIGHTS, b"GGUF\x03\0\0\0", "it is a GGUF file"),
    "cut off": (WEIGHTS, b"\x10\0\0\0\0\0\0\0{}", "cannot be read"),
    "empty": (WEIGHTS, b"", "cannot be read"),
    "an empty pickle": (OLDER, b"", "cannot be read"),
    "an index of a list": (INDEX, b"[1]", "cannot be read"),
    "an index of nothing": (INDEX, b"{}", "cannot be read"),
    "an index whose files are gone": (INDEX, b'{"weight_map": {"a": "b.safetensors"}}', "missing"),
    "an index of numbers": (INDEX, b'{"weight_map": {"a": 3}}', "names for a no file of its dir"),
    "an index of no file": (INDEX, b'{"weight_map": {"a": null}}', "names for a no file of its d"),
    "an index that leads out": (INDEX, b'{"weight_map": {"a": "../b"}}', "names for a no file of"),
    "an index that leads away": (INDEX, b'{"weight_map": {"a": "/b"}}', "names for a no file of i"),
    "an index with a list": (INDEX, b'{"weight_map": ["a"]}', "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path: Path, kind: str) -> None:
    directory = saved(tmp_path / "model", [(in_one, False)])
    (directory / WEIGHTS).unlink()
    name, content, expected = DAMAGED[kind]
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        loaded(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def test_a_pickle_that_lacks_what_its_index_names_is_told(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", [(pickled, False)])
    (directory / OLDER).rename(directory / "a.bin")
    index = {"weight_map": {"new": "a.bin"}}
    (directory / OLDER_INDEX).write_text(json.dumps(index))
    for read in (loaded, sample_of):
        with pytest.raises(ConfigError, match="it has no new, which its index names"):
            read(directory)


def test_pickles_that_call_something_are_not_opened(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", [(pickled, False)])

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
            return Path.touch, (Path(tmp_path, "touched"),)  # type: ignore[return-value]

    torch.save({"a": Evil()}, directory / OLDER)
    with pytest.raises(ConfigError, match="cannot be read"):
        loaded(directory)
    assert not (tmp_path / "touched").exists()


def test_no_weights_at_all_names_what_was_looked_for(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", [(in_one, False)])
    (directory / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no weights in it: none of model\.safetensors, .*\.bin"):
        loaded(directory)


def test_a_head_that_the_settings_tie_is_refused_with_the_cure(tmp_path: Path) -> None:
    directory = saved(tmp_path / "model", [(in_one, False)])
    values = geometry_values(str(directory), offline=True) | {"tie_word_embeddings": True}
    with pytest.raises(ConfigError, match=r"lm_head.*needs model\.tie_word_embeddings=false"):
        filled(msgspec.convert(values, ModelSettings), directory)


@pytest.mark.parametrize("scaling", [["llama3", 8], "llama3", 8, True, {"rope_type": "llama3"}])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_of_another_shape_is_an_error_with_file_and_key(
    tmp_path: Path, scaling: Any, key: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", **SIZES, key: scaling}))
    with pytest.raises(
        ConfigError, match=rf"config\.json: {key} (= .*: expected an obj|has no fa)"
    ):
        geometry_values(str(tmp_path), offline=True)
