"""A preparation of data that prepares none, beside the scripted trainer.

PREPARES_WHEN: a path, and it begins when that is there. PREPARES_WITH: [exit code, message]."""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    while (path := os.environ.get("PREPARES_WHEN")) and not os.path.exists(path):
        time.sleep(0.01)
    if failure := json.loads(os.environ.get("PREPARES_WITH", "null")):
        print(f"error: {failure[1]}", flush=True)
        sys.exit(failure[0])
    cache = Path(os.environ.get("DATASET_CACHE_DIR", "."), "scripted")
    split = {"num_sequences": 64, "num_documents": 2, "num_tokens": 2049, "num_dropped": 0}
    result = {"schema": 1, "path": str(cache), "dataset": "embedded", "hit": True}
    result |= {"num_tokens": 2049, "num_sequences": 64, "vocab_size": 512}
    Path(sys.argv[sys.argv.index("--result") + 1]).write_text(
        json.dumps(result | {"splits": {"train": split}})
    )
    print("data: found embedded: 64 sequences, scripted", flush=True)
