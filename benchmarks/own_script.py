"""What `run.sh check -- COMMAND` costs, and whether it is right about a person's own script.

    python -m benchmarks.own_script --mode overhead|varies|clean|flips

overhead: steps that are watched and steps that are not, in turns, and the time to the first step.
varies: an operation that differs by chance in each worker: nobody may be accused.
clean: the five scripts of examples/own, healthy, beside busy processes: no alarm may come. Those
whose packages are missing are left out; PYTHONPATH brings them.
flips: single bits: by the comparison of a run, and by torch_validator's tolerances.
Ends with 1 where a result is not as it should be.
"""

import argparse
import sys

from benchmarks.own import flips, launched, overhead


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mode", choices=("overhead", "varies", "clean", "flips"), required=True)
    parser.add_argument("--runs", type=int, default=20, help="varies, clean: of each")
    parser.add_argument("--p", type=float, default=0.5, help="varies: how likely a call differs")
    parser.add_argument("--where", choices=("forward", "backward"), default="forward")
    parser.add_argument("--busy", type=int, default=2, help="clean: processes that compute beside")
    parser.add_argument("--n", type=int, default=200, help="flips: how many")
    parser.add_argument("--seed", type=int, default=0, help="flips: draws them")
    parser.add_argument("--blocks", type=int, default=20, help="overhead: pairs of blocks of steps")
    parser.add_argument("--starts", type=int, default=10, help="overhead: starts of each kind")
    asked = parser.parse_args()
    match asked.mode:
        case "varies":
            return launched.varies(asked.p, asked.where, asked.runs)
        case "clean":
            return launched.clean(asked.runs, asked.busy)
        case "flips":
            return flips.main(asked.n, asked.seed)
    overhead.start(asked.starts)
    overhead.steps(asked.blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
