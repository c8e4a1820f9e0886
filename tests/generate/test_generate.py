"""`run.sh generate`: beside transformers, from every place that holds a model, with bad input."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

from model_check.attention import sdpa
from model_check.config.schema import (
    InfiniSettings,
    ModelSettings,
    RopeScaling,
    Settings,
    TrainingSettings,
)
from model_check.config.shape import geometry
from model_check.data.tokenizers.tokenizer import byte_letters
from model_check.engine.checkpoint import packed
from model_check.errors import ConfigError
from model_check.export import export
from model_check.generate.__main__ import main
from model_check.generate.generate import Ended, generate, next_tokens, prompt_ids
from model_check.generate.sampling import Sampler, Sampling, StopText
from model_check.generate.text_model import TextModel, read_text_model
from model_check.init import build_model

END = 256
CPU = torch.device("cpu")
GREEDY = Sampling(temperature=0)
CONTEXT = 64
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "tied": {"num_kv_heads": 1, "tie_word_embeddings": True},
    "scaled": {"rope_scaling": RopeScaling(factor=4.0, original_context_length=32)},
}
INFINI = {"attention": "infini", "infini": InfiniSettings(segment_length=16)}


def bytes_tokenizer(vocab_size: int = 257) -> str:
    """Each byte is a token; then the end token, and more that nothing gives."""
    vocab = {letter: number for number, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", *(f"<{n}>" for n in range(257, vocab_size))])
    return str(tokenizer.to_str())


def words_tokenizer(vocab_size: int) -> str:
    """Each token is a word of its own vocabulary."""
    vocab = {str(number): number for number in range(vocab_size - 1)}
    raw = Tokenizer(models.WordLevel(vocab | {"<|endoftext|>": vocab_size - 1}, unk_token="0"))
    raw.add_special_tokens(["<|endoftext|>"])
    return str(raw.to_str())


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint with its tokenizer; its weights are random, and large enough for an opinion."""

    def make(tokenizer: str | None = None, **model: Any) -> Path:
        shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 172}
        shape |= {"num_heads": 4, "num_kv_heads": 4, "vocab_size": 257, "init_std": 0.2}
        settings = Settings(
            model=ModelSettings(**shape | model),
            training=TrainingSettings(context_length=CONTEXT),
        )
        made = build_model(settings, geometry(settings.model, 257), sdpa, CPU)
        state = {
            "schema": 2,
            "model": made.state_dict(),
            "settings": msgspec.to_builtins(settings),
            "tokenizer": packed((tokenizer or bytes_tokenizer()).encode()),
        }
        torch.save(state, tmp_path / "last.pt")
        return tmp_path / "last.pt"

    return make


def text_model(path: Path) -> TextModel:
    return read_text_model(path, CPU, None)


def text(path: Path, prompt: str, sampling: Sampling = GREEDY, **more: Any) -> str:
    pieces = generate(text_model(path), prompt, sampling, **{"max_tokens": 20} | more)
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_likeliest_tokens_are_those_of_transformers(
    trained: Callable[..., Path], tmp_path: Path, variant: dict[str, Any]
) -> None:
    checkpoint = trained(**variant)
    export(checkpoint, tmp_path / "out")
    ours, exported = text_model(checkpoint), text_model(tmp_path / "out")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    draw = torch.Generator().manual_seed(7)
    for length in range(1, 51):
        prompt = torch.randint(0, 256, (1, length), generator=draw)
        num = min(12, CONTEXT - length)
        expected = theirs.generate(
            prompt, max_new_tokens=num, do_sample=False, eos_token_id=None, pad_token_id=END
        )[0, length:].tolist()
        for model in (ours.model, exported.model):
            tokens = next_tokens(model, prompt[0].tolist(), GREEDY)
            assert [next(tokens) for _ in expected] == expected


def test_a_text_ends_with_every_token_that_its_model_declares(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """What training ended documents with, and each id of config.json and generation_config.json."""
    checkpoint = trained(bytes_tokenizer(260), vocab_size=260)
    state = torch.load(checkpoint)
    torch.save(state | {"end_token": "<258>"}, checkpoint)
    assert text_model(checkpoint).end_ids == {258}
    out = tmp_path / "out"
    export(checkpoint, out)
    declared = [json.loads((out / f).read_text()) for f in ("config.json", "tokenizer_config.json")]
    assert (declared[0]["eos_token_id"], declared[1]["eos_token"]) == (258, "<258>")
    assert text_model(out).end_ids == {258}
    (out / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    (out / "config.json").write_text(json.dumps(declared[0] | {"eos_token_id": 256}))
    assert text_model(out).end_ids == {256, 257, 258, 259}
    (out / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ConfigError, match=r"generation_config\.json: not the generation_config"):
        text_model(out)


def test_tokens_that_were_added_to_a_tokenizer_need_no_model_that_knows_them(
    trained: Callable[..., Path], tmp_path: Path
) -> None:
    """As transformers: of another model is one whose own vocabulary does not fit."""
    out = tmp_path / "out"
    export(trained(), out)
    (out / "tokenizer.json").write_text(bytes_tokenizer(259))
    assert text(out, "ab") == text(tmp_path / "last.pt", "ab")
    (out / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<258>yes")
    with pytest.raises(ConfigError, match=r"the prompt has '<258>', a token .*the model knows 257"):
        prompt_ids(text_model(out), "ab")
    small = tmp_path / "small"
    small.mkdir()
    export(trained(vocab_size=257), small / "out")
    (small / "out" / "tokenizer.json").write_text(words_tokenizer(300))
    with pytest.raises(ConfigError, match="it is another model's"):
        text_model(small / "out")


def test_one_token_after_the_other_is_the_whole_at_once(trained: Callable[..., Path]) -> None:
    for model in ({}, INFINI, {**INFINI, "attention": "local"}):
        ours = text_model(trained(**model)).model
        tokens, made = next_tokens(ours, [1, 2, 3], GREEDY), []
        for _ in range(40):
            made.append(next(tokens))
        whole = torch.tensor([[1, 2, 3, *made]])
        assert ours(whole)[0, 2:-1].argmax(-1).tolist() == made


def test_segments_have_no_longest_text_and_full_attention_has(trained: Callable[..., Path]) -> None:
    *_, last = generate(text_model(trained(**INFINI)), "ab", GREEDY, max_tokens=3 * CONTEXT)
    assert last.num_tokens > CONTEXT
    assert last.ended is not Ended.CONTEXT
    full = text_model(trained())
    *_, last = generate(full, "ab", GREEDY, max_tokens=3 * CONTEXT)
    assert (last.ended, last.num_tokens) == (Ended.CONTEXT, CONTEXT + 1 - 3)


def test_equal_seeds_give_equal_texts(trained: Callable[..., Path]) -> None:
    path = trained()
    one, same, other = (text(path, "a", Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other


def test_characters_come_whole(trained: Callable[..., Path]) -> None:
    model = text_model(trained())
    decode = model.tokenizer.decoder()
    ids = model.tokenizer.encode(["a€"])[0]
    assert [decode(token) for token in ids] == ["a", "", "", "€"]
    assert decode(END) == ""


def test_only_the_likeliest_are_drawn() -> None:
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])
    for sampling, left in (
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_k=9), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.6), {1}),
        (Sampling(1.0, top_p=0.7), {1, 3}),
        (Sampling(0.01), {1}),
        (Sampling(0.0), {1}),
    ):
        sampler = Sampler(sampling)
        drawn = {sampler.pick(scores) for _ in range(500)}
        assert drawn <= left
        assert drawn == left or sampling.top_k == 9


def test_shares_are_those_of_a_softmax() -> None:
    scores = torch.tensor([0.0, 3.0, 1.0])
    sampler = Sampler(Sampling(2.0))
    torch.testing.assert_close(sampler.shares(scores), (scores / 2).softmax(0))
    counts = torch.bincount(torch.tensor([sampler.pick(scores) for _ in range(4000)]))
    assert (counts / 4000 - (scores / 2).softmax(0)).abs().max() < 0.04


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["abc", "def"], ["cd"], "ab"),
        (["ab", "c", "xyz"], ["abd", "xy"], "abc"),
        (["aaa", "ab"], ["aab"], "aa"),
        (["one", " two"], [], "one two"),
        (["one", " tw"], [" two"], "one tw"),
    ],
)
def test_a_stop_text_is_found_wherever_pieces_end(
    pieces: list[str], stops: list[str], shown: str
) -> None:
    stop = StopText(stops)
    text = "".join(stop.feed(piece) for piece in pieces if stop.found is None)
    assert text + stop.rest() == shown


def test_a_text_begins_as_in_training(trained: Callable[..., Path]) -> None:
    assert prompt_ids(text_model(trained()), "a") == [END, *bytes_of("a")]


def bytes_of(text: str) -> list[int]:
    return list(Tokenizer.from_str(bytes_tokenizer()).encode(text).ids)


def said(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    told = capfd.readouterr()
    return code, told.out, told.err


def test_a_text_goes_to_standard_output_alone(
    trained: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    path = trained()
    code, out, err = said(capfd, str(path), "--prompt=ab", "--temperature=0", "--max-tokens=5")
    assert (code, out) == (0, text(path, "ab", max_tokens=5) + "\n")
    assert err.startswith("5 tokens, max tokens; ")
    in_directory = said(capfd, str(path.parent), "--prompt=ab", "--temperature=0", "--max-tokens=5")
    assert in_directory[1] == out


def test_prompts_of_a_file_give_a_line_each(
    trained: Callable[..., Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, prompts = trained(), tmp_path / "prompts.txt"
    prompts.write_text("ab\n\ncd\n")
    code, out, _ = said(capfd, str(path), f"--prompts={prompts}", "--temperature=0")
    documents = [json.loads(line) for line in out.splitlines()]
    assert (code, [each["prompt"] for each in documents]) == (0, ["ab", "cd"])
    assert documents[0]["text"] == text(path, "ab", max_tokens=200)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--prompt", "a" * 70), "the prompt has 71 tokens, and the model's context is 64"),
        (("--prompt=a", "--prompts=x"), "give --prompt TEXT, or --prompts FILE"),
        ((), "give --prompt TEXT, or --prompts FILE"),
        (("--prompts=nowhere",), "--prompts nowhere: cannot be read: No such file"),
        (("--prompt=a", "--temperature=-1"), "--temperature -1.0: out of range"),
        (("--prompt=a", "--temperature=nan"), "--temperature nan: out of range"),
        (("--prompt=a", "--top-p=0"), "--top-p 0.0: out of range"),
        (("--prompt=a", "--max-tokens=0"), "--max-tokens 0: out of range"),
        (("--prompt=a", "--device=tpu"), "--device tpu: auto, cuda or cpu"),
        (("--prompt=a", "--tokenizer=nowhere"), "nowhere: cannot be read as a tokenizer"),
        (("--prompt=a", "--tokenizer=large.json"), "a tokenizer of 300 tokens, and the model kno"),
        (("--prompt=a", "--top=3"), "no such option"),
    ],
)
def test_bad_input_is_one_message(
    trained: Callable[..., Path],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    told: str,
) -> None:
    path = trained()
    monkeypatch.chdir(path.parent)
    (path.parent / "large.json").write_text(words_tokenizer(300))
    code, out, err = said(capfd, str(path), *argv)
    assert (code, out) == (2, "")
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_place_without_a_model_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "above" / "cpu0").mkdir(parents=True)
    (tmp_path / "above" / "cpu0" / "last.pt").write_text("x")
    (tmp_path / "x.pt").write_text("x")
    (tmp_path / "step_4" / ("0" * 16)).mkdir(parents=True)
    for name, content in (("not_text", b'{"a":"\xff"}'), ("endless", b'{"a":' + b"[" * 100_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(content)
    for name, told in (
        ("step_4", "step_4: not a checkpoint: its save was not finished"),
        ("not_text", "config.json"),
        ("endless", "config.json"),
        ("nowhere", "no such checkpoint"),
        (
            "empty",
            "holds no last.pt or step_N.pt, nor a sharded last or step_N",
        ),
        ("torn", "config.json"),
        ("above", f"; {tmp_path}/above/cpu0 has some"),
        ("x.pt", "x.pt"),
    ):
        code, _, err = said(capfd, str(tmp_path / name), "--prompt=a")
        assert code == 2, err
        assert told in err
        assert len(err.splitlines()) == 1


def test_a_model_without_a_begin_token_needs_a_word(trained: Callable[..., Path]) -> None:
    model = text_model(trained())
    assert prompt_ids(model, "") == [END]
    bare = replace(model, begin_id=None)
    with pytest.raises(Exception, match="the prompt is empty"):
        prompt_ids(bare, "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_whose_scores_are_no_numbers_says_so(
    trained: Callable[..., Path], capfd: pytest.CaptureFixture[str], temperature: float
) -> None:
    path = trained()
    state = torch.load(path)
    state["model"]["output.weight"].fill_(3e38)
    torch.save(state, path)
    code, _, err = said(capfd, str(path), "--prompt=a", f"--temperature={temperature}")
    assert (code, err) == (20, "error: the model's scores for the next token are not finite\n")
