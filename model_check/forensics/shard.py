"""A tensor that ranks share: what of it lies here, and where in the whole. Any other tensor lies
here, all of it. Torch's DTensor is known by its methods: to import it takes two seconds."""

from typing import Any

from torch import Tensor


def own_values(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of `tensor`, any shape: its rows that lie here, perhaps none. The
    memory itself, detached."""
    shared: Any = tensor.detach()
    return shared.to_local() if is_shared(tensor) else shared  # type: ignore[no-any-return]


def flat(tensor: Tensor) -> Tensor:
    """Its values in a row, as they lie in memory: a view, where they lie there without gaps."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.reshape(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether its values fill a piece of memory, each place once, in whichever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_shared(tensor: Tensor) -> bool:
    """Returns whether `tensor`, of any shape, is a DTensor."""
    return hasattr(tensor, "placements")


def first_of(tensor: Tensor) -> int:
    """Returns the number of its first value that lies here, in memory order of the whole (any
    shape): 0 where all do. Rows are divided as torch.chunk does."""
    shared: Any = tensor
    for dim, placement in enumerate(shared.placements if is_shared(tensor) else ()):
        if placement.is_shard():
            rows, mesh = tensor.shape[0], shared.device_mesh
            rows_each = -(-rows // mesh.size(dim))
            first_row = min(rows, rows_each * mesh.get_local_rank(dim))
            return first_row * (tensor.numel() // rows) if rows else 0
    return 0


def fill(tensor: Tensor, whole: Tensor) -> None:
    """Copies into `tensor` what of `whole` lies here: the same shape, any dtype and device."""
    values, first = own_values(tensor), first_of(tensor)
    values.copy_(whole.reshape(-1)[first : first + values.numel()].view_as(values))


def named_part(name: str, tensor: Tensor) -> str:
    """`norm.weight[256:512]`: its values that lie here; its name where all of them do."""
    if not is_shared(tensor):
        return name
    first = first_of(tensor)
    return f"{name}[{first}:{first + own_values(tensor).numel()}]"
