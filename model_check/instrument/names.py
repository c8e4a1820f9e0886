"""What the parameters of an optimizer are called, where nobody tells the model."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from torch import nn

_WRAPPERS = ("_orig_mod", "module")
"""The only child of what torch.compile and DDP make."""
UNHOOKED = (nn.TransformerEncoderLayer,)
"""In its evaluation mode it takes a slower way, by other kernels, if it or a part is hooked."""
MOST_SEARCHES = 16
"""A search takes a tenth of a second: a script that makes an optimizer for each parameter waits no
more than for so many that find nothing new."""
_HAND_ON = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d
"""What makes no value that is not finite."""


class Root(NamedTuple):
    """A model."""

    outer: nn.Module
    """As the script calls it: within its wrappers."""
    inner: nn.Module


class Roots:
    """The models of this process."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[nn.Module]] = []
        self._num_repeated = self._num_in_vain = 0
        """Searches for what was known, and those that found nothing."""

    def of(self, parameters: Iterable[nn.Parameter]) -> list[Root]:
        """Finds the outermost modules that hold one of the parameters. What is known may be within
        a wrapper by now."""
        ids = {id(parameter) for parameter in parameters}
        tops = [top for ref in self._known if (top := ref()) is not None and _holds(top, ids)]
        if (self._num_repeated if tops else self._num_in_vain) < MOST_SEARCHES:
            self._num_repeated += bool(tops)
            tops = _search(ids)
            self._num_in_vain += not tops
            within = {id(module) for top in tops for module in top.modules()}
            known = [ref for ref in self._known if ref() is not None and id(ref()) not in within]
            self._known = [*known, *map(weakref.ref, tops)]
        return [root_of(top) for top in tops]


def _search(ids: Set[int]) -> list[nn.Module]:
    # Not isinstance: that asks an object for its class, which may be a lazy one's own code.
    modules: list[nn.Module] = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    # One that is being made may have none yet.
    children = {id(child) for m in modules for child in vars(m).get("_modules", {}).values()}
    tops = [module for module in modules if id(module) not in children]
    return [top for top in tops if _holds(top, ids)]


def _holds(module: nn.Module, ids: Set[int]) -> bool:
    return any(id(p) in ids for p in module.parameters())


def root_of(module: nn.Module) -> Root:
    return Root(module, unwrapped(module, _WRAPPERS))


def unwrapped(module: nn.Module, wrappers: Sequence[str]) -> nn.Module:
    children = dict(module.named_children())
    while len(children) == 1 and not vars(module)["_parameters"]:
        ((name, child),) = children.items()
        if name not in wrappers:
            break
        module, children = child, dict(child.named_children())
    return module


def named(parameters: Iterable[nn.Parameter], roots: Sequence[Root]) -> dict[str, nn.Parameter]:
    """Of several models each name begins with the model's class."""
    found: dict[int, str] = {}
    for root, prefix in zip(roots, _prefixes(roots), strict=True):
        for name, parameter in root.inner.named_parameters():
            parts = (part for part in name.split(".") if part != "_orig_mod")
            found.setdefault(id(parameter), prefix + ".".join(parts))
    pairs = ((found.get(id(p), f"parameter {number}"), p) for number, p in enumerate(parameters))
    return dict(pairs)


def sites_of(roots: Sequence[Root]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the blocks of each model by their names: the modules of its outermost lists."""
    for root, prefix in zip(roots, _prefixes(roots), strict=True):
        lists: list[str] = []
        for name, module in _hooked_modules(root.inner):
            is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1
            if is_list and not any(f"{name}.".startswith(f"{outer}.") for outer in lists if outer):
                if "" in lists:
                    break
                lists.append(name)
                for number, block in enumerate(module.children()):
                    if not isinstance(block, UNHOOKED):
                        yield f"{prefix}{name}.{number}" if name else f"{prefix}{number}", block


def _hooked_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields those that are, or are within, none of UNHOOKED."""
    unhooked = {
        id(m) for each in model.modules() if isinstance(each, UNHOOKED) for m in each.modules()
    }
    yield from ((n, m) for n, m in model.named_modules() if id(m) not in unhooked)


def leaves_of(roots: Sequence[Root]) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields the modules of each model that have no other within, and that compute: name, module,
    and whether it has a parameter that is trained and no other leaf's."""
    modules = {id(m): m for root in roots for m in root.inner.modules()}.values()
    uses = Counter(id(p) for m in modules for p in vars(m)["_parameters"].values())
    for root, prefix in zip(roots, _prefixes(roots), strict=True):
        for name, module in _hooked_modules(root.inner):
            if name and not (vars(module)["_modules"] or isinstance(module, _HAND_ON)):
                own = vars(module)["_parameters"].values()
                trained = (p for p in own if p is not None and p.requires_grad)
                yield prefix + name, module, any(uses[id(p)] == 1 for p in trained)


def _prefixes(roots: Sequence[Root]) -> list[str]:
    is_one = len({id(root.inner) for root in roots}) < 2
    kinds = [type(root.inner).__name__ for root in roots]
    numbers = [kinds[:n].count(kind) for n, kind in enumerate(kinds)]
    if is_one:
        return [""] * len(roots)
    return [
        f"{kind}.{number}." if kinds.count(kind) > 1 else f"{kind}."
        for kind, number in zip(kinds, numbers, strict=True)
    ]
