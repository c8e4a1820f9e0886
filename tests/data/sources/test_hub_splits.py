"""A hub dataset's own validation split, through the real huggingface_hub and datasets."""

import io
import json

import pytest

from model_check.data.read.token_cache import TokenCache
from tests.data.lab import FakeHub, Lab, start_builder


def table_of(text: str) -> bytes:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    parquet.write_table(pa.table({"text": [f"{text} {n} " * 20 for n in range(9)]}), file)
    return file.getvalue()


def test_a_split_of_the_hub_validates(lab: Lab, hub: FakeHub) -> None:
    pytest.importorskip("datasets")
    card = (
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: train-*\n  - split: checked\n    path: checked-*\n---\n"
    )
    hub.repos["datasets/acme/notes"] = {
        "README.md": card.encode(),
        "train-00000-of-00001.parquet": table_of("learn"),
        "checked-00000-of-00001.parquet": table_of("verify"),
    }
    result = lab.dir / "result.json"
    code, output = start_builder(
        lab.cache,
        "acme/notes",
        "data.validation=own=split:checked,held=0.2",
        *("--result", str(result)),
        environ={
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(lab.dir / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        },
    ).finish()
    assert code == 0, output
    found = json.loads(result.read_text())
    counts = {name: split["num_documents"] for name, split in found["splits"].items()}
    assert counts == {"train": 7, "own": 9, "held": 2}
    assert hub.requests.count("HEAD /") == 1  # asked once whether it answers
    assert hub.requests.count("GET /api/datasets/acme/notes") == 1  # and once for the commit
    assert TokenCache.open(lab.cache / found["path"], "full").splits == ("train", "own", "held")
