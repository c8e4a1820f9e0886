"""Every parameter and gradient in one file that needs only pickle and numpy to read."""

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from model_check.forensics.shard import named_part, own_values
from model_check.utils.files import replacing

_PROTOCOL = 4  # tensors above 4 GiB, and any Python 3 reads it


def dump_tensors(path: Path, model: nn.Module) -> None:
    """Write `{"parameters": {name: array}, "gradients": {name: array}}`, bfloat16 as float32. Of a
    sharded model `name[first:end]`: the values that lie here.

    On a GPU both copies pass through host memory at once. Raises OSError; a file appears whole.
    """
    named = list(model.named_parameters())
    content = {
        "parameters": {named_part(name, p): _to_numpy(p) for name, p in named},
        "gradients": {named_part(n, p): _to_numpy(p.grad) for n, p in named if p.grad is not None},
    }
    with replacing(path) as file:
        pickle.dump(content, file, protocol=_PROTOCOL)


def _to_numpy(tensor: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    tensor = own_values(tensor)
    if tensor.dtype == torch.bfloat16:  # numpy has no such type
        tensor = tensor.float()
    return tensor.cpu().numpy()
