"""The bits of several nodes, compared step by step. Pure.

Ranks of one node are compared there, with all evidence. Here a node has one voice, that of ranks
that agree with each other.
"""

from collections.abc import Mapping, Sequence

from launcher.nodes.messages import Bits, Failure, Hello
from launcher.verdict.alone import minority
from model_check.errors import EXIT_DISAGREEMENT, EXIT_UNNAMED
from model_check.utils.fingerprint import QUANTITIES
from model_check.utils.words import listed


class Comparison:
    """Holds a step until every node of its kind has told it: memory grows with stragglers only."""

    def __init__(self) -> None:
        self.num_agreed = 0
        """Steps at which the nodes of a kind had the same bits."""
        self._waiting: dict[tuple[str, int], dict[int, Mapping[str, str]]] = {}

    def take(self, bits: Bits, hellos: Mapping[int, Hello]) -> Failure | None:
        """What this report settles: a difference, if there is one."""
        kind = hellos[bits.node].kind
        equals = {node for node, hello in hellos.items() if hello.kind == kind}
        if kind is None or len(equals) < 2:
            return None
        told = self._waiting.setdefault((kind, bits.step), {})
        told[bits.node] = bits.values
        if told.keys() != equals:
            return None
        self._waiting.pop((kind, bits.step))
        if names := _differing(told):
            return _failure(bits.step, names[0], told, hellos)
        self.num_agreed += 1
        return None


def _differing(told: Mapping[int, Mapping[str, str]]) -> Sequence[str]:
    """The quantities that differ, causes before effects; of those that all have told."""
    shared = set.intersection(*(set(values) for values in told.values()))
    found = {name for name in shared if len({values[name] for values in told.values()}) > 1}
    return sorted(found, key=[*QUANTITIES, *sorted(found)].index)


def _failure(
    step: int, name: str, told: Mapping[int, Mapping[str, str]], hellos: Mapping[int, Hello]
) -> Failure:
    """Odd by strict majority of the nodes, or nobody."""
    odd = sorted(minority({node: values[name] for node, values in told.items()}))
    if not odd:
        names = listed([hellos[node].name for node in sorted(told)])
        cause = f"{names} differ in their {name} at step {step}, and none is in the majority"
        return Failure(min(told), None, step, cause, EXIT_UNNAMED, is_compared=True)
    workers = hellos[odd[0]].workers
    worker = workers[0] if len(odd) == len(workers) == 1 else None
    names = "" if worker else f"{listed([hellos[node].name for node in odd])}: "
    cause = f"{names}other {name} than {len(told) - len(odd)} other nodes at step {step}"
    return Failure(odd[0], worker, step, cause, EXIT_DISAGREEMENT, is_compared=True)
