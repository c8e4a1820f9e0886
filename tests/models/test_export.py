"""Weights in and out: what transformers loads, and what is taken from it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, processors
from transformers import AutoTokenizer, LlamaForCausalLM

from model_check.attention import sdpa
from model_check.config.geometry import geometry_values
from model_check.config.schema import ModelSettings, RopeScaling, Settings
from model_check.config.shape import geometry
from model_check.data.read.manifest import ViewManifest, hash_of, short, to_bytes
from model_check.engine.checkpoint import packed, tokenizer_of
from model_check.errors import CheckpointError, ConfigError, StorageError
from model_check.export import export, main
from model_check.hf import load_weights
from model_check.init import build_model
from model_check.model import Llama

Make = Callable[..., Settings]
SCALING = RopeScaling(factor=4.0, original_context_length=32)
VARIANTS: list[dict[str, Any]] = [
    {"rope_scaling": SCALING},
    {"rope_scaling": None, "num_kv_heads": 1},
    {"rope_scaling": SCALING, "tie_word_embeddings": True, "num_kv_heads": 4},
    {"rope_scaling": None, "head_dim": 32},
    {"rope_scaling": None, "intermediate_size": None, "num_kv_heads": None},
]
NAMES = ["llama3 scaling", "one key head", "tied", "wide heads", "sizes that follow"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def built(settings: Settings) -> Llama:
    shape = geometry(settings.model, 257)
    return build_model(settings, shape, sdpa, torch.device("cpu"))


def saved(model: Llama, settings: Settings, path: Path) -> Path:
    """A checkpoint with what the export reads of one."""
    state = {"schema": 2, "model": model.state_dict(), "settings": msgspec.to_builtins(settings)}
    torch.save(state, path)
    return path


def tokens() -> torch.Tensor:
    return torch.randint(0, 257, (2, 64), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_transformers_loads_an_export_and_computes_the_same(
    settings: Make, tmp_path: Path, variant: dict[str, Any]
) -> None:
    wanted = settings(init_std=0.1, **variant)
    ours = built(wanted)
    export(saved(ours, wanted, tmp_path / "last.pt"), tmp_path / "out")
    theirs, told = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert (ours(tokens()) - theirs(tokens()).logits).abs().max() <= 2e-5


@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_what_transformers_saves_is_taken_bit_for_bit(
    settings: Make, tmp_path: Path, variant: dict[str, Any]
) -> None:
    source = settings(seed=1, **variant)
    export(saved(built(source), source, tmp_path / "last.pt"), tmp_path / "first")
    LlamaForCausalLM.from_pretrained(tmp_path / "first").save_pretrained(
        tmp_path / "theirs", max_shard_size="50KB"
    )
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    values = geometry_values(str(tmp_path / "theirs"), offline=True)
    model = msgspec.convert(msgspec.to_builtins(source.model) | values, ModelSettings)
    ours = built(msgspec.structs.replace(source, model=model))
    for parameter in ours.parameters():
        parameter.data.zero_()
    load_weights(ours, model, tmp_path / "theirs")
    for name, value in built(source).state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_a_large_export_is_split_with_an_index(settings: Make, tmp_path: Path) -> None:
    wanted = settings()
    checkpoint = saved(built(wanted), wanted, tmp_path / "last.pt")
    files = export(checkpoint, tmp_path / "out", max_shard_bytes=100_000, dtype="bfloat16")
    assert "model.safetensors.index.json" in {file.name for file in files}
    theirs, told = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert theirs.dtype == torch.bfloat16
    load_weights(built(wanted), wanted.model, tmp_path / "out")


def test_another_geometry_is_told_in_one_message(settings: Make, tmp_path: Path) -> None:
    source = settings(num_layers=2)
    export(saved(built(source), source, tmp_path / "last.pt"), tmp_path / "out")
    narrow = settings(num_layers=1, hidden_size=32, rope_theta=10.0)
    with pytest.raises(ConfigError, match="hidden_size 32 here, 64 there") as caught:
        load_weights(built(narrow), narrow.model, tmp_path / "out")
    assert "rope_theta 10.0 here, 500000.0 there" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_unexpected_and_other_shapes_are_named(settings: Make, tmp_path: Path) -> None:
    source = settings(num_layers=2)
    export(saved(built(source), source, tmp_path / "last.pt"), tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    other = settings(num_layers=1, intermediate_size=100)
    model = built(other)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.\S+, .* and 5 more unexpected") as e:
        load_weights(model, other.model, tmp_path / "out")
    assert "mlp.up_proj.weight [172, 64] (here [100, 64])" in str(e.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_directory_that_does_not_say_which_model_it_holds_is_refused(
    settings: Make, tmp_path: Path
) -> None:
    source = settings()
    export(saved(built(source), source, tmp_path / "last.pt"), tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    other = settings(rope_theta=10.0)
    with pytest.raises(ConfigError, match=r"has no config\.json, and shapes do not tell its heads"):
        load_weights(built(other), other.model, tmp_path / "out")


def test_an_untied_model_tells_that_the_weights_are_tied(settings: Make, tmp_path: Path) -> None:
    source = settings(tie_word_embeddings=True)
    export(saved(built(source), source, tmp_path / "last.pt"), tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    untied = settings()
    with pytest.raises(ConfigError, match=r"lm_head\.weight.*tie_word_embeddings=true"):
        load_weights(built(untied), untied.model, tmp_path / "out")


VIEW = ViewManifest(
    hash=hash_of({}),
    key={},
    tokens=f"tokens/{short(hash_of({}))}",
    tokens_hash=hash_of({}),
    context_length=1,
    num_sequences=0,
    num_tokens=0,
    vocab_size=3,
    dataset="text",
    tokenizer="bpe",
)


def with_a_begin_token(raw: Tokenizer) -> None:
    """As Llama's tokenizers: it puts `<s>` before every text."""
    raw.add_special_tokens(["<s>"])
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])


def trained_on_a_cache(
    wanted: Settings,
    root: Path,
    change: Callable[[Tokenizer], None] = lambda raw: None,
    **of_data: Any,
) -> Path:
    """A checkpoint whose run had this token cache, with a tokenizer of its own."""
    store = root / "cache" / VIEW.tokens
    view = root / "cache" / f"text__{short(VIEW.hash)}"
    store.mkdir(parents=True)
    view.mkdir()
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "</s>": 2}, []))
    tokenizer.add_special_tokens(["</s>"])
    change(tokenizer)
    tokenizer.save(str(store / "tokenizer.json"))
    (view / "manifest.json").write_bytes(to_bytes(VIEW))
    data = msgspec.structs.replace(wanted.data, cache_dir=str(root / "cache"), **of_data)
    state = {
        "schema": 2,
        "model": built(wanted).state_dict(),
        "settings": msgspec.to_builtins(msgspec.structs.replace(wanted, data=data)),
        "data": {"cache": VIEW.hash},
    }
    torch.save(state, root / "last.pt")
    return root / "last.pt"


def test_an_export_brings_the_tokenizer_of_its_token_cache(settings: Make, tmp_path: Path) -> None:
    export(trained_on_a_cache(settings(), tmp_path), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer("ab</s>")["input_ids"] == [0, 1, 2]
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True).replace(" ", "") == "ab"


@pytest.mark.parametrize(
    ("of_data", "init_from", "begin"),
    [
        ({}, None, "</s>"),
        ({"document_masking": True}, None, None),
        ({"document_tokens": "begin_end"}, None, "<s>"),
        ({"document_tokens": "begin_end", "document_masking": True}, None, "<s>"),
        ({}, "organisation/llama", "<s>"),
        ({"document_masking": True}, "organisation/llama", "<s>"),
    ],
)
def test_an_export_says_what_begins_a_document_for_this_model(
    settings: Make, tmp_path: Path, of_data: dict[str, Any], init_from: str | None, begin: str
) -> None:
    wanted = settings(init_from=init_from)
    checkpoint = trained_on_a_cache(wanted, tmp_path, with_a_begin_token, **of_data)
    given = tmp_path / "cache" / VIEW.tokens / "tokenizer.json"
    for out, named in ((tmp_path / "own", None), (tmp_path / "given", given)):
        export(checkpoint, out, tokenizer=named)
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert (tokenizer.bos_token, tokenizer.eos_token) == (begin, "</s>")
        model = LlamaForCausalLM.from_pretrained(out)
        ids = {"<s>": 3, "</s>": 2, None: None}
        assert (model.config.bos_token_id, model.config.eos_token_id) == (ids[begin], 2)
        assert model.generation_config.bos_token_id == ids[begin]
        prompt = tokenizer("ab", return_tensors="pt")
        assert prompt["input_ids"].tolist() == [[3, 0, 1]]
        assert model.generate(**prompt, max_new_tokens=2, pad_token_id=2).shape[1] > 3


def test_a_model_of_strange_documents_has_no_begin_token_to_claim(
    settings: Make, tmp_path: Path
) -> None:
    for name, masked, begin in (("plain", False, 2), ("masked", True, None)):
        root = tmp_path / name
        export(trained_on_a_cache(settings(), root, document_masking=masked), root / "out")
        model = LlamaForCausalLM.from_pretrained(root / "out")
        assert (model.config.bos_token_id, model.config.eos_token_id) == (begin, 2)


def test_others_may_read_an_export_as_they_may_read_any_new_file(
    settings: Make, tmp_path: Path
) -> None:
    files = export(trained_on_a_cache(settings(), tmp_path), tmp_path / "out")
    (tmp_path / "new").touch()
    assert {file.stat().st_mode for file in files} == {(tmp_path / "new").stat().st_mode}


def test_an_export_never_overwrites_and_leaves_no_half(settings: Make, tmp_path: Path) -> None:
    wanted = settings()
    checkpoint = saved(built(wanted), wanted, tmp_path / "last.pt")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").write_text("")
    with pytest.raises(StorageError, match="not an empty directory"):
        export(checkpoint, tmp_path / "taken")
    with pytest.raises(StorageError, match="cannot be written"):
        export(checkpoint, tmp_path / "out", tokenizer=tmp_path / "nowhere.json")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "last.pt"}


def test_the_command_tells_what_it_wrote(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = settings()
    checkpoint = saved(built(wanted), wanted, tmp_path / "last.pt")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 0
    assert "config.json, model.safetensors" in capsys.readouterr().out
    (tmp_path / "text.pt").write_text("not a checkpoint")
    assert main([str(tmp_path / "text.pt"), str(tmp_path / "b")]) == 2
    assert "not a checkpoint of Model Check" in capsys.readouterr().err


def test_a_damaged_checkpoint_or_one_of_another_version_is_never_exported(
    settings: Make, tmp_path: Path
) -> None:
    wanted = settings()
    model = built(wanted)
    checkpoint = saved(model, wanted, tmp_path / "last.pt")
    content = checkpoint.read_bytes()
    at = content.index(model.tok_embed.weight.detach().numpy().tobytes()[:64])
    checkpoint.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(CheckpointError, match=r"damaged: .* does not match its checksum"):
        export(checkpoint, tmp_path / "out")
    state = {"schema": 2, "model": model.state_dict(), "settings": {"model": {"num_moons": 2}}}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ConfigError, match=r"another version: .*num_moons"):
        export(tmp_path / "other.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_setting_that_this_version_has_no_more_does_not_keep_a_model_from_its_user(
    settings: Make, tmp_path: Path
) -> None:
    wanted = settings()
    checkpoint = saved(built(wanted), wanted, tmp_path / "last.pt")
    state = torch.load(checkpoint, weights_only=True)
    state["settings"]["training"]["bf16_copies"] = False
    state["settings"]["model"]["attention_backend"] = "flash_attn_3"
    torch.save(state, checkpoint)
    export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_a_checkpoint_with_other_contents_is_never_exported(settings: Make, tmp_path: Path) -> None:
    checkpoint = saved(built(settings()), settings(), tmp_path / "last.pt")
    state = torch.load(checkpoint, weights_only=True)
    del state["settings"]["data"]
    torch.save(state | {"data": [1]}, checkpoint)
    export(checkpoint, tmp_path / "out")
    for name, change in {"head.weight": torch.zeros(2), "norm.weight": "x"}.items():
        torch.save(state | {"model": state["model"] | {name: change}}, checkpoint)
        with pytest.raises(CheckpointError, match=r"last\.pt: not a checkpoint of Model Check: "):
            export(checkpoint, tmp_path / "new")
    torch.save(state | {"model": {}}, checkpoint)
    with pytest.raises(CheckpointError, match=r"weights are not those of its settings: .* more"):
        export(checkpoint, tmp_path / "new")


def test_an_export_brings_the_tokenizer_of_the_checkpoint(settings: Make, tmp_path: Path) -> None:
    """Its token cache is gone, or on another machine."""
    path = trained_on_a_cache(settings(), tmp_path)
    content = (tmp_path / "cache" / VIEW.tokens / "tokenizer.json").read_bytes()
    shutil.rmtree(tmp_path / "cache")
    torch.save(torch.load(path) | {"tokenizer": packed(content)}, path)
    export(path, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == content
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab</s>")["input_ids"] == [0, 1, 2]


def test_an_export_without_a_tokenizer_says_so(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trained_on_a_cache(settings(), tmp_path)
    shutil.rmtree(tmp_path / "cache")
    assert main([str(path), str(tmp_path / "out")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("without tokenizer.json: this checkpoint holds none")
    assert last.endswith("--tokenizer FILE puts one in")


@pytest.mark.parametrize(
    "held", [torch.zeros(9, dtype=torch.uint8), torch.zeros(0), packed(b"{}" * 99)[:-4], "text", 7]
)
def test_a_damaged_tokenizer_is_no_traceback(
    settings: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], held: object
) -> None:
    path = trained_on_a_cache(settings(), tmp_path)
    torch.save(torch.load(path) | {"tokenizer": held}, path)
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert "its tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_unpacks_without_end_is_refused(tmp_path: Path) -> None:
    state = {"tokenizer": packed(bytes(1 << 20))}
    with pytest.raises(CheckpointError, match="cut off, or too long"):
        tokenizer_of(state, tmp_path, most_bytes=1 << 10)
