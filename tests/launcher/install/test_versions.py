"""Versions for the record agree with those that the metadata tells."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from launcher.install.versions import versions


def test_the_names_of_directories_tell_what_the_metadata_tells() -> None:
    for package in ("numpy", "msgspec", "psutil"):
        assert versions([package]) == {package: importlib.metadata.version(package)}


def test_what_is_not_installed_has_no_version() -> None:
    assert versions(["no_such_package"]) == {"no_such_package": None}


def test_the_first_directory_of_the_path_counts_and_what_is_no_directory_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, first, second = tmp_path / "lib.zip", tmp_path / "first", tmp_path / "second"
    archive.write_bytes(b"")
    (first / "torch-2.11.0a0+nv25.12.dist-info").mkdir(parents=True)
    (second / "torch-2.0.dist-info").mkdir(parents=True)
    (second / "torch-geometric").mkdir()
    monkeypatch.setattr(sys, "path", [str(archive), "gone", str(first), str(second)])
    assert versions(["torch"]) == {"torch": "2.11.0a0+nv25.12"}
