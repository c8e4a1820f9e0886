"""The hub on the loopback interface, through the real huggingface_hub and datasets."""

import gzip
import importlib.util
import io
import json
import re
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from model_check.data.build.choose import choose
from model_check.data.cache.memo import Memo
from model_check.data.sources import hub as hub_module
from model_check.data.sources.embedded import EmbeddedSource
from model_check.data.sources.hub_text import import_datasets
from model_check.data.tokenizers.trained import TrainedTokenizer
from model_check.errors import DataError
from tests.data.lab import (
    COMMIT,
    WORDS,
    Answer,
    FakeHub,
    Lab,
    build_here,
    settings_for,
    start_builder,
    write_tokenizer,
)

SECRET = "hf_thisIsASecretOfNobody"
MODEL = ("data.tokenizer=model", "model.model_path=acme/tiny")
GATED = Answer(403, headers={"X-Error-Code": "GatedRepo"})


@pytest.fixture
def environ(lab: Lab, hub: FakeHub) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(lab.dir / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def serve_tokenizer(lab: Lab, hub: FakeHub) -> None:
    path = write_tokenizer(lab.dir / "served.json")
    hub.repos["models/acme/tiny"] = {"tokenizer.json": path.read_bytes()}


def serve_wikitext(hub: FakeHub) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    rows = ["", " = One = \n", WORDS * 9, " = = Part = = \n", WORDS * 9, " = Two = \n", WORDS * 9]
    table = io.BytesIO()
    parquet.write_table(pa.table({"text": rows}), table)
    card = (
        "---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n  - split: train\n"
        "    path: wikitext-2-raw-v1/train-*\n---\n"
    )
    hub.repos["datasets/Salesforce/wikitext"] = {
        "README.md": card.encode(),
        "wikitext-2-raw-v1/train-00000-of-00001.parquet": table.getvalue(),
    }


def build(
    lab: Lab, dataset: object, *arguments: str, environ: Mapping[str, str]
) -> tuple[int, str]:
    return start_builder(lab.cache, dataset, *arguments, environ=environ).finish()


def error_of(ended: tuple[int, str]) -> str:
    """The one line of a refusal."""
    code, output = ended
    assert code == 2, output
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert "Traceback" not in output
    assert SECRET not in output
    return errors[0]


def test_a_tokenizer_comes_from_the_hub_and_later_from_its_cache(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    serve_tokenizer(lab, hub)
    text = lab.text()
    code, output = build(lab, text, *MODEL, environ=environ)
    assert code == 0, output
    assert "vocabulary 280" in output
    assert "data: documents end with </s>, by its name: no tokenizer_config.json" in output
    hub.stop()
    code, output = build(lab, text, *MODEL, environ=environ)
    assert code == 0, output
    assert "data: found notes.txt" in output


def test_the_hub_is_reached_through_a_proxy(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    serve_tokenizer(lab, hub)
    proxied = {**environ, "HF_ENDPOINT": "http://hub.invalid", "http_proxy": hub.endpoint}
    code, output = build(lab, lab.text(), *MODEL, environ=proxied)
    assert code == 0, output


@pytest.mark.parametrize("variable", ["ALL_PROXY", "all_proxy", "https_proxy"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_proxy_of_socks_is_asked_and_not_the_name_server(
    monkeypatch: pytest.MonkeyPatch, variable: str, *, is_installed: bool
) -> None:
    """The name may be known there alone."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        hub_module.importlib.util,
        "find_spec",
        lambda name: (is_installed or None) if name == "socksio" else find(name),
    )
    monkeypatch.setattr(hub_module.socket, "getaddrinfo", known_here(socket.getaddrinfo))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        monkeypatch.setenv(variable, f"socks5h://127.0.0.1:{port}")
        answer = hub_module._ask("https://hub.invalid", 5.0)
        assert answer == (None if is_installed else MISSING)
        monkeypatch.setenv("no_proxy", "hub.invalid")
        assert hub_module._ask("https://hub.invalid", 5.0) == "its name cannot be resolved"
        monkeypatch.delenv("no_proxy")
    if is_installed:
        gone = hub_module._ask("https://hub.invalid", 5.0)
        assert gone == f"its proxy 127.0.0.1:{port}: connection refused"


MISSING = "socks5h:// proxies need a package: pip install socksio"


def known_here(resolve: Callable[..., Any]) -> Callable[..., Any]:
    def getaddrinfo(host: str, *arguments: Any, **more: Any) -> Any:
        if host == "hub.invalid":
            raise socket.gaierror(-2, "Name or service not known")
        return resolve(host, *arguments, **more)

    return getaddrinfo


@pytest.mark.parametrize(
    ("refused", "answer", "token", "message"),
    [
        ("/acme/tiny", GATED, "", r"acme/tiny: is gated: accept its terms at \S+/acme/tiny, then "),
        ("/acme/tiny", GATED, SECRET, r"is gated, and your token has no access to it: ask for it"),
        (
            "/api/models/acme/tiny",
            Answer(404, headers={"X-Error-Code": "RepoNotFound"}),
            "",
            r"acme/tiny: no such model at http://127.0.0.1:\d+, or it is private and needs HF_",
        ),
        (
            "/api/models/acme/tiny",
            Answer(401, headers={"X-Error-Message": "Invalid credentials in Authorization header"}),
            SECRET,
            r"refuses your token \(HTTP 401\)",
        ),
        (
            "/api/models/acme/tiny",
            Answer(429, headers={"Retry-After": "77"}),
            "",
            r"asks to slow down \(HTTP 429\): try again in 77 s",
        ),
        ("/api/models/acme/tiny", Answer(500), "", r"failed to give it \(HTTP 500\)"),
    ],
)
def test_every_refusal_has_a_message_of_its_own(
    lab: Lab,
    hub: FakeHub,
    environ: dict[str, str],
    refused: str,
    answer: Answer,
    token: str,
    message: str,
) -> None:
    serve_tokenizer(lab, hub)
    hub.refusals[refused] = answer
    given = {**environ, "HF_TOKEN": token} if token else environ
    assert re.search(message, error_of(build(lab, lab.text(), *MODEL, environ=given)))


def test_a_repository_without_a_tokenizer_is_named(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    hub.repos["models/acme/tiny"] = {"config.json": b"{}"}
    assert "acme/tiny: has no tokenizer.json" in error_of(
        build(lab, lab.text(), *MODEL, environ=environ)
    )


def test_offline_makes_no_request_and_names_the_cache(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    error = error_of(build(lab, lab.text(), *MODEL, environ={**environ, "HF_HUB_OFFLINE": "1"}))
    assert f"its tokenizer.json is not in {lab.dir / 'hf' / 'hub'}, and offline was asked" in error
    assert hub.requests == []


def test_a_hub_that_never_answers_costs_one_probe(lab: Lab, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and says nothing
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        given = {**environ, "HF_ENDPOINT": endpoint}
        error = error_of(build(lab, "c4", "data.hub_timeout_s=0.3", environ=given))
    assert f"c4: was never prepared here, and {endpoint} does not answer (waited 0.3 s)" in error


def test_a_refused_connection_is_not_called_waiting(lab: Lab, environ: dict[str, str]) -> None:
    given = {**environ, "HF_ENDPOINT": "http://127.0.0.1:9"}
    error = error_of(build(lab, "c4", environ=given))
    assert "http://127.0.0.1:9 does not answer (connection refused)" in error


def test_a_name_that_cannot_be_resolved_is_said(lab: Lab, environ: dict[str, str]) -> None:
    error = error_of(build(lab, "c4", environ={**environ, "HF_ENDPOINT": "http://hub.invalid"}))
    assert "does not answer (its name cannot be resolved)" in error


def test_c4_is_streamed_and_only_as_far_as_it_is_needed(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    pytest.importorskip("datasets")
    card = (
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n"
        "    path: en/c4-train.*.json.gz\n---\n"
    )
    pages = (f"page {number} {WORDS * 40}" for number in range(500))
    rows = "".join(json.dumps({"text": page, "url": "u"}) + "\n" for page in pages)
    files = {f"en/c4-train.{n:05}-of-00009.json.gz": gzip.compress(rows.encode()) for n in range(9)}
    hub.repos["datasets/allenai/c4"] = {"README.md": card.encode(), **files}
    tokenizer = write_tokenizer(lab.dir / "tokenizer.json")  # training one would read 16 MB
    given = ("data.num_samples=20", f"data.tokenizer={tokenizer}")
    code, output = build(lab, "c4", *given, environ=environ)
    assert code == 0, output
    assert "data: prepared allenai/c4: 20 sequences, 321 tokens" in output
    fetched = {path for path in files if any(path in request for request in hub.requests)}
    assert len(fetched) < len(files)


def test_a_token_in_dotenv_is_used_and_printed_nowhere(
    lab: Lab, hub: FakeHub, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_tokenizer(lab, hub)
    hub.refusals["/acme/tiny"] = GATED
    lab.text(f"# tokens\nWANDB_API_KEY=x\nexport HF_TOKEN='{SECRET}'\n", ".env")
    monkeypatch.chdir(lab.dir)
    error = error_of(build(lab, lab.text(), *MODEL, environ=environ))
    assert "is gated, and your token has no access to it" in error


def test_no_token_reaches_a_file(lab: Lab, hub: FakeHub, environ: dict[str, str]) -> None:
    serve_tokenizer(lab, hub)
    given = {**environ, "HF_TOKEN": SECRET}
    result = lab.dir / "cache" / "result.json"
    code, output = build(lab, lab.text(), *MODEL, "--result", str(result), environ=given)
    assert code == 0, output
    files = [path for path in lab.dir.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in output


def test_wikitext_is_read_by_articles_at_a_pinned_commit(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    serve_wikitext(hub)
    code, output = build(lab, "auto", environ=environ)
    assert code == 0, output
    assert "data: prepared Salesforce/wikitext" in output
    (store,) = lab.stores()
    manifest = (store / "manifest.json").read_text()
    assert f'"commit": "{COMMIT}"' in manifest
    assert '"num_documents": 2' in manifest
    hub.stop()
    code, output = build(lab, "wikitext", environ=environ)
    assert code == 0, output
    assert "data: found Salesforce/wikitext" in output


def test_a_gated_dataset_says_where_to_ask(lab: Lab, hub: FakeHub, environ: dict[str, str]) -> None:
    serve_wikitext(hub)
    hub.refusals["/api/datasets/Salesforce/wikitext/auth-check"] = GATED
    error = error_of(build(lab, "wikitext", environ=environ))
    assert f"is gated: accept its terms at {hub.endpoint}/datasets/Salesforce/wikitext" in error


def test_without_the_datasets_package_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install 'datasets>=4' pyarrow"):
        import_datasets()


def test_an_unknown_configuration_of_a_dataset_is_refused(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    serve_wikitext(hub)
    error = error_of(build(lab, "wikitext", "data.dataset_config=nonsense", environ=environ))
    assert "Salesforce/wikitext" in error
    assert "wikitext-2-raw-v1" in error


def test_a_dataset_that_is_not_there_never_falls_back(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    error = error_of(build(lab, "acme/nothing", environ=environ))
    here = "data.dataset = 'acme/nothing': no such file or directory here; on the hub: "
    assert f"{here}acme/nothing: no such dataset" in error


def test_a_misspelt_name_of_ours_is_suggested_when_the_hub_does_not_know_it(
    lab: Lab, hub: FakeHub, environ: dict[str, str]
) -> None:
    error = error_of(build(lab, "wikitxt", environ=environ))
    assert "wikitxt: no such dataset" in error
    assert error.endswith("; did you mean data.dataset=wikitext?")


def test_auto_without_an_answer_is_embedded_and_says_why(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # restored afterwards: choosing offline sets it
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    settings = settings_for(lab.cache, "auto", "data.tokenizer=auto")
    source, tokenizer, _ = choose(settings, Memo(lab.cache), lab.said.append)
    assert isinstance(source, EmbeddedSource)
    assert isinstance(tokenizer, TrainedTokenizer)
    (line,) = lab.said
    assert line.startswith("data: embedded text")
    assert "http://127.0.0.1:9 does not answer" in line


def test_a_path_that_is_not_there_is_not_asked_of_the_hub(lab: Lab) -> None:
    code, output = build_here(lab.cache, Path("./nowhere.txt"))
    assert code == 2
    assert "data.dataset = 'nowhere.txt': no such file or directory" in output
    with pytest.raises(DataError, match="'nowhere/': no such file or directory"):
        choose(settings_for(lab.cache, "nowhere/"), Memo(lab.cache), lab.said.append)


@pytest.mark.parametrize("name", ["nowhere", "nowhere/texts"])
def test_a_name_that_is_neither_here_nor_on_the_hub_may_be_either(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError) as caught:
        choose(settings_for(lab.cache, name), Memo(lab.cache), lab.said.append)
    assert f"'{name}': no such file or directory here; on the hub: {name}" in str(caught.value)
    assert "http://127.0.0.1:9 does not answer" in str(caught.value)
