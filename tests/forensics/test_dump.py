"""The dump: plain pickle and numpy, as the documents' sample code reads it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from model_check.forensics.dump import dump_tensors
from tests.deadline import DEADLINE_S

SAMPLE = """
import pickle
import sys
import numpy as np

with open(sys.argv[1], 'rb') as f:
    debug_data = pickle.load(f)

for name, param in debug_data['parameters'].items():
    if np.isnan(param).any():
        print(f"{name} has NaN values")

for name, grad in debug_data['gradients'].items():
    if np.isnan(grad).any():
        nan_ratio = np.isnan(grad).sum() / grad.size
        print(f"{name}: {nan_ratio*100:.1f}% NaN")

print({str(a.dtype) for part in debug_data.values() for a in part.values()})
print('torch' in sys.modules)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_loads_without_torch_as_the_documented_sample_does(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = nn.Linear(4, 2, dtype=dtype)
    model.weight.grad = torch.zeros(2, 4, dtype=dtype)
    model.weight.grad[0] = float("nan")
    path = tmp_path / "debug" / "nan_debug_step_0.pkl"
    dump_tensors(path, model)
    command = [sys.executable, "-c", SAMPLE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.splitlines() == ["weight: 50.0% NaN", "{'float32'}", "False"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]
