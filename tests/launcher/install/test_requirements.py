"""Which version of a package this interpreter would import."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from launcher.install.requirements import installed


def test_the_version_is_what_the_metadata_tells() -> None:
    for package in ("numpy", "msgspec", "PyYAML"):
        assert installed(package) == importlib.metadata.version(package)


def test_what_is_not_installed_has_no_version() -> None:
    assert installed("no_such_package") is None


def test_the_first_directory_of_the_path_counts_and_what_is_no_directory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, first, second = tmp_path / "lib.zip", tmp_path / "first", tmp_path / "second"
    archive.write_bytes(b"")
    for directory, name, version in (
        (first, "torch", "2.11.0a0+nv25.12"),
        (second, "torch", "2.0"),
        (second, "torch-geometric", "1.0"),
    ):
        info = directory / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(archive), "gone", str(first), str(second)])
    assert installed("torch") == "2.11.0a0+nv25.12"
