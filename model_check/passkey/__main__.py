"""Can a kind of attention bring back what stood far away? `run.sh passkey` trains small models of
each kind to repeat a key that noise surrounds, and tells how often they do, by its distance."""

import json
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict

from model_check.config.arguments import Parser
from model_check.config.schema import Settings
from model_check.errors import EXIT_PASS, EXIT_SIGNAL_BASE, ConfigError, ModelCheckError
from model_check.passkey.pool import results_of
from model_check.passkey.task import ARMS, DEPTHS, VOCABULARY, Result, settings_of
from model_check.utils.cores import usable_cores
from model_check.utils.garbage import leave
from model_check.utils.standard_streams import complain, open_missing_streams, put

_EXAMPLES = """\
examples:
  bash run.sh passkey                               every kind, 3 seeds each
  bash run.sh passkey --arms full,infini --seeds 1
  bash run.sh passkey training.context_length=128   more segments to remember
  bash run.sh passkey --json > passkey.json
"""


def table(results: Sequence[Result], arms: Sequence[str]) -> list[str]:
    """Means over the seeds, with the least and the most in brackets where there are several."""
    crossed = sorted({number for result in results for number in result.by_segments})
    titles = [f"depth {depth:g}" for depth in DEPTHS] + [f"{n} segments" for n in crossed]
    lines = ["".join([f"{'attention':14}", *(f"{title:>18}" for title in titles), f"{'s':>7}"])]
    for arm in arms:
        own = [result for result in results if result.arm == arm]
        columns = [[result.by_depth[depth] for result in own] for depth in DEPTHS]
        columns += [[result.by_segments[n] for result in own] for n in crossed]
        seconds = statistics.fmean(result.seconds for result in own)
        cells = "".join(f"{_spread(column):>18}" for column in columns)
        lines.append(f"{arm:14}{cells}{seconds:7.0f}")
    return lines


def _spread(shares: Sequence[float]) -> str:
    """`0.98 (0.95-1.00)`"""
    mean = f"{statistics.fmean(shares):.2f}"
    return mean if len(shares) == 1 else f"{mean} ({min(shares):.2f}-{max(shares):.2f})"


def _parser() -> Parser:
    parser = Parser(prog="run.sh passkey", description=__doc__, epilog=_EXAMPLES)
    parser.add_argument("--arms", default=",".join(ARMS), metavar="A,B", help=", ".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="models an arm (3)")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="tests a place (64)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("settings", nargs="*", metavar="section.key=value")
    return parser


def main(argv: Sequence[str]) -> int:
    open_missing_streams()
    try:
        names = _parser().read(argv)
        arms = _arms(names.arms)
        if min(names.seeds, names.rows) < 1:
            raise ConfigError("--seeds and --rows: at least 1")
        settings = settings_of(arms[0], 0, names.settings)
        _tell(settings, arms, names.seeds)
        results = []
        jobs = usable_cores()
        for result in results_of(arms, range(names.seeds), names.settings, names.rows, jobs):
            results.append(result)
            told = f"{result.arm}, seed {result.seed}: loss {result.loss:.4f}, {result.seconds} s"
            complain(told)
        results.sort(key=lambda result: (arms.index(result.arm), result.seed))
        if names.json:
            put(json.dumps([asdict(result) for result in results], indent=2))
        else:
            put("\n".join([*table(results, arms), _about(settings)]))
    except ModelCheckError as error:
        complain(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:
        return EXIT_SIGNAL_BASE + signal.SIGPIPE
    except KeyboardInterrupt:
        complain("stopped by SIGINT")
        return EXIT_SIGNAL_BASE + signal.SIGINT
    return EXIT_PASS


def _about(settings: Settings) -> str:
    return (
        f"share of right digits, guessing: 0.10; one key in {settings.training.context_length} "
        f"tokens of {VOCABULARY} kinds. At 8 billion parameters others did not get Infini-attention"
        " to work (Hugging Face blog, A failed experiment)"
    )


def _arms(text: str) -> list[str]:
    """Raises ConfigError."""
    arms = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if others := [arm for arm in arms if arm not in ARMS] or (not arms and [text]):
        raise ConfigError(f"--arms: no {others[0]!r}; there are {', '.join(ARMS)}")
    return arms


def _tell(settings: Settings, arms: Sequence[str], num_seeds: int) -> None:
    training = settings.training
    count = f"{len(arms) * num_seeds} models of {training.max_steps} steps"
    complain(f"passkey: {', '.join(arms)}, {num_seeds} seeds: {count}")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    leave(main(sys.argv[1:]))
