"""Makes a small task to fine-tune on: letters to sort. `python examples/sorting/make_task.py FILE`

Prompts such as `sort d a c ->`, completions such as ` a c d`. Synthetic, and new for each seed.
"""

import json
import random
import sys
from pathlib import Path

LETTERS = "abcdefgh"
NUM_ROWS = 8000


def row(draw: random.Random) -> dict[str, str]:
    letters = draw.sample(LETTERS, draw.randint(2, 5))
    return {"prompt": f"sort {' '.join(letters)} ->", "completion": f" {' '.join(sorted(letters))}"}


def main(path: Path, seed: int = 0) -> None:
    draw = random.Random(seed)
    path.write_text("".join(json.dumps(row(draw)) + "\n" for _ in range(NUM_ROWS)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
