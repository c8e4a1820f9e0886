"""Whom does the weighing of replays (launcher/verdict/alone.py) accuse? A simulation, no run.

`python -m benchmarks.alone [--draws N] [--seed N]`

- varies: a kernel that varies on all workers alike; each pass is wrong with probability q. Somebody
  was alone with other bits in the run; FAIL would take an innocent GPU out of service.
- marginal: one device that is wrong in a share p of its passes, beside healthy ones.
- two rules that were tried before: "eight wrong in a row, one clean frees", and "wrong once more
  beside healthy ones that were right".
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

from launcher.verdict.alone import Tally

IN_A_ROW = 8
Pass = tuple[bool, int]
"""Whether the suspect was wrong, and how many healthy ones were."""
Rule = Callable[[Iterator[Pass], int], str]


def weighed(passes: Iterator[Pass], num_healthy: int) -> str:
    wrong, times, right = 0, 0, num_healthy
    while True:
        is_wrong, others = next(passes)
        times, wrong, right = times + 1, wrong + is_wrong, right + num_healthy - others
        if others:
            return "INVALID" if others > 1 else "23"
        tally = Tally(wrong, times, right, num_healthy)
        if not tally.is_open:
            return "FAIL" if tally.convicts else "unsettled" if wrong else "transient"


def in_a_row(passes: Iterator[Pass], _num_healthy: int) -> str:
    for _ in range(IN_A_ROW):
        is_wrong, others = next(passes)
        if others:
            return "INVALID"
        if not is_wrong:
            return "transient"
    return "FAIL"


def once_more(passes: Iterator[Pass], _num_healthy: int) -> str:
    is_wrong, others = next(passes)
    return "INVALID" if others else "FAIL" if is_wrong else "transient"


RULES: dict[str, Rule] = {"weighed": weighed, "8 in a row": in_a_row, "once more": once_more}
OUTCOMES = ("FAIL", "unsettled", "transient", "23", "INVALID")


def drawn(dice: random.Random, of_suspect: float, of_others: float, num: int) -> Iterator[Pass]:
    while True:
        others = sum(dice.random() < of_others for _ in range(num))
        yield dice.random() < of_suspect, others


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=37)
    options = parser.parse_args()
    dice, began = random.Random(options.seed), time.monotonic()
    print(f"| rule | healthy | wrong | {' | '.join(OUTCOMES)} |\n|{'---|' * (len(OUTCOMES) + 3)}")
    worst = Counter[str]()
    for name, rule in RULES.items():
        for num in (1, 2, 4, 7):
            for q in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5):
                found = Counter(rule(drawn(dice, q, q, num), num) for _ in range(options.draws))
                worst[name] = max(worst[name], found["FAIL"])
                show(name, num, f"all, {q:g}", found, options.draws)
            for p in (0.02, 0.2, 0.6, 0.9, 1.0):
                found = Counter(rule(drawn(dice, p, 0.0, num), num) for _ in range(options.draws))
                show(name, num, f"it, {p:g}", found, options.draws)
    for name, most in worst.items():
        print(f"{name}: FAIL where all vary in {most / options.draws:.2%} at most")
    print(f"{options.draws:,} draws each, seed {options.seed}, {time.monotonic() - began:.0f} s")


def show(rule: str, num: int, wrong: str, found: Counter[str], draws: int) -> None:
    shares = (f"{found[outcome] / draws:.2%}" for outcome in OUTCOMES)
    print(f"| {rule} | {num} | {wrong} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
