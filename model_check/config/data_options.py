"""The options about data that every entry point shares, as the settings that they stand for."""

import argparse
from pathlib import Path
from typing import Any

from model_check.config.prepared_dir import read_metadata
from model_check.errors import UsageError

DEFAULT_OUTPUT_DIR = "preprocessed_data"

Flags = dict[str, tuple[str, Any]]
"""Dotted name -> (flag, value)."""


def add_data_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    ready = "a prepared directory to train from (data.dataset)"
    add("--preprocessed-data", "--data-dir", metavar="DIR", help=ready)
    raw = "text to prepare (data.dataset), and to train from"
    add("--raw-data", "--input-dir", metavar="PATH", help=raw)
    out = f"where --raw-data is prepared to (data.output_dir, {DEFAULT_OUTPUT_DIR})"
    add("--output-dir", metavar="DIR", help=out)
    add("--force-preprocess", action="store_true", help="prepare again (data.force_preprocess)")
    add("--offline-mode", action="store_true", help="never ask the hub (data.offline)")


def data_flags(names: argparse.Namespace) -> Flags:
    """Raises UsageError for options that do not go together, paths that do not exist, or a
    directory that is not a prepared one."""
    if names.force_preprocess and names.preprocessed_data and names.raw_data is None:
        raise UsageError("--force-preprocess: give the text to prepare again too (--raw-data PATH)")
    if names.raw_data and names.preprocessed_data and not names.force_preprocess:
        raise UsageError(
            "--raw-data and --preprocessed-data: give one; with --force-preprocess the text is "
            "prepared into the directory again"
        )
    flags = _places(names.raw_data, names.preprocessed_data, names.output_dir)
    if names.force_preprocess:
        flags["data.force_preprocess"] = ("--force-preprocess", "true")
    if names.offline_mode:
        flags["data.offline"] = ("--offline-mode", "true")
    return flags


def _places(raw: str | None, ready: str | None, output: str | None) -> Flags:
    if ready is not None and output is not None:
        raise UsageError("--preprocessed-data and --output-dir name the same thing: give one")
    if raw is not None:
        _must_exist("--raw-data", raw)
        target = ready or output or DEFAULT_OUTPUT_DIR
        flag = "--output-dir" if ready is None else "--preprocessed-data"
        return {"data.dataset": ("--raw-data", raw), "data.output_dir": (flag, target)}
    if ready is not None:
        _must_exist("--preprocessed-data", ready)
        if read_metadata(Path(ready).expanduser()) is None:
            raise UsageError(
                f"--preprocessed-data {ready}: not a prepared directory (no metadata.json); "
                "--raw-data PATH prepares one"
            )
        return {"data.dataset": ("--preprocessed-data", ready)}
    return {} if output is None else {"data.output_dir": ("--output-dir", output)}


def _must_exist(option: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise UsageError(f"{option} {path}: no such file or directory")
