"""Do the tests notice a wrong line? `python -m benchmarks.mutations --seed 1 --count 40`.

Draws mutations of function bodies in launcher/ and model_check/ (a comparison flipped, a statement
dropped, a number off by one, another constant), runs the suite once to see which tests execute each
of the lines, and then those tests for each mutation. With `--old TREE`, a checkout of an older
state, each survivor is tried with the tests of that tree that execute its line, too: what is killed
there was lost on the way.

Everything happens in copies of the tree below `--work`; the suite is `pytest -m "not slow"`.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "model_check")
FLIPPED = {"==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
FLIPPED |= {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
OPERATORS = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
OPERATORS |= {ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not"}
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise)
KINDS = ("comparison flipped", "statement dropped", "off by one", "other constant")
NUM_PROCESSES = 3
TIMEOUT_S = 60
"""Of one test: a wrong line, or one that is noted, may make it hang."""
MOST_TESTS = 150
"""Of a line that more tests execute, so many are drawn."""

RECORDS = """\
import os
def _record(number):
    pid = os.getpid()
    while pid > 1:
        try:
            test = open(f"{PLACE}/current-{pid}").read()
        except OSError:
            try:
                pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
            except OSError:
                return
            continue
        with open(f"{PLACE}/line-{number}", "a") as file:
            file.write(test + "\\n")
        return
_record(NUMBER)
"""
"""Notes that the test above this process executes line NUMBER."""

PLUGIN = """\
import os
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    with open(f"{os.environ['MUTATION_HITS']}/current-{os.getpid()}", "w") as file:
        file.write(item.nodeid)
    return (yield)
"""


@dataclass(frozen=True)
class Mutation:
    kind: str
    path: str
    line: int
    """Of the statement, from 1."""
    old: str
    new: str
    begin: int
    """Offsets in the file, in bytes."""
    end: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]


def mutations_of(path: Path) -> Iterator[Mutation]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        begin = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return begin, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def made(kind: str, stmt: ast.stmt, begin: int, end: int, new: str) -> Mutation:
        old, name = source[begin:end].decode(), str(path.relative_to(ROOT))
        return Mutation(kind, name, stmt.lineno, old, new, begin, end)

    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    statements = {s for f in functions for s in ast.walk(f) if isinstance(s, ast.stmt)} - {
        *functions
    }
    for stmt in sorted(statements, key=lambda s: s.lineno):
        is_text = isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)
        if is_text or isinstance(stmt, ast.FunctionDef | ast.ClassDef):
            continue
        if source[starts[stmt.lineno - 1] :].lstrip().startswith(b"elif "):
            continue  # no statement can be put before it
        if isinstance(stmt, DROPPED) and source[span(stmt)[0] :][:11] != b"return None":
            yield made("statement dropped", stmt, *span(stmt), "pass")
        for node in own_expressions(stmt):
            begin, end = span(node)
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                first, last = span(node.left)[1], span(node.comparators[0])[0]
                between = source[first:last].decode()
                operator = OPERATORS[type(node.ops[0])]
                if between.strip() == operator:
                    new = between.replace(operator, FLIPPED[operator])
                    yield made("comparison flipped", stmt, first, last, new)
            elif isinstance(node, ast.Constant):
                match node.value:
                    case bool():
                        yield made("other constant", stmt, begin, end, str(not node.value))
                    case int():
                        yield made("off by one", stmt, begin, end, str(node.value + 1))
                    case float():
                        yield made("other constant", stmt, begin, end, repr(node.value * 2 + 1))


def own_expressions(stmt: ast.stmt) -> Iterator[ast.expr]:
    """Those of the statement itself: not of the statements inside, nor of an f-string."""
    todo: list[ast.AST] = list(ast.iter_child_nodes(stmt))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.stmt | ast.JoinedStr | ast.match_case | ast.arguments):
            continue
        if isinstance(node, ast.expr):
            yield node
        todo += ast.iter_child_nodes(node)


def draw(seed: int, count: int, packages: Sequence[str]) -> list[Mutation]:
    """As many of each kind; each of another file, as far as there are enough."""
    dice = random.Random(seed)
    by_kind: defaultdict[str, list[Mutation]] = defaultdict(list)
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for mutation in mutations_of(path):
                by_kind[mutation.kind].append(mutation)
    drawn: list[Mutation] = []
    while len(drawn) < count:
        kind = KINDS[len(drawn) % len(KINDS)]
        mutation = dice.choice(by_kind[kind])
        if mutation.path not in {other.path for other in drawn}:
            drawn.append(mutation)
    return drawn


def copied(tree: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".cache")
    shutil.copytree(tree, to, symlinks=True, ignore=left_out)
    return to


def where(mutation: Mutation, tree: Path) -> int | None:
    """The line of its statement in a tree: an older one may have moved it. None: it is not there,
    or more than once."""
    path = tree / mutation.path
    if not path.exists():
        return None
    wanted = (ROOT / mutation.path).read_text().splitlines()[mutation.line - 1]
    lines = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line == wanted]
    if mutation.line in lines:
        return mutation.line
    return lines[0] if len(lines) == 1 else None


def hits(tree: Path, drawn: list[Mutation], work: Path, paths: list[str]) -> dict[int, list[str]]:
    """Number of a mutation -> the tests of `tree` that execute its statement."""
    noted, copy = work / "hits", copied(tree, work / "instrumented")
    shutil.rmtree(noted, ignore_errors=True)
    noted.mkdir()
    for number, mutation in enumerate(drawn):
        if (line := where(mutation, tree)) is None:
            continue
        record = noted / f"record-{number}.py"
        record.write_text(RECORDS.replace("{PLACE}", str(noted)).replace("NUMBER", str(number)))
        path = copy / mutation.path
        lines = path.read_text().splitlines(keepends=True)
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        lines[line - 1] = f"{indent}exec(open({str(record)!r}).read(), {{}})\n{lines[line - 1]}"
        path.write_text("".join(lines))
    (copy / "hit_plugin.py").write_text(PLUGIN)
    processes = ("-n", str(NUM_PROCESSES), "--dist", "loadfile", "-m", "not slow")
    pytest(copy, "-p", "hit_plugin", *processes, *paths, MUTATION_HITS=str(noted))
    found = {}
    for number in range(len(drawn)):
        file = noted / f"line-{number}"
        found[number] = sorted({*file.read_text().splitlines()}) if file.exists() else []
    return found


def pytest(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TIMEOUT_S}", *arguments]
    ours = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "MODEL_CHECK_VENV": sys.prefix}
    # A file, no pipe: a process that a test left behind would keep that open.
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | ours | env, stdout=said, stderr=subprocess.STDOUT
        )
        said.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, said.read())


def killed_by(
    tree: Path, mutation: Mutation, tests: list[str], work: Path, dice: random.Random
) -> str | None:
    """The first test that fails with the mutation; None: it survives."""
    if not tests:
        return None
    tests = sorted(dice.sample(tests, MOST_TESTS)) if len(tests) > MOST_TESTS else tests
    copy = copied(tree, work / "mutated")
    path = copy / mutation.path
    source = path.read_bytes()
    if source == (ROOT / mutation.path).read_bytes():
        path.write_bytes(mutation.applied(source))
    else:  # the old tree: the same text, in the statement's line
        line = where(mutation, tree)
        lines = source.decode().splitlines(keepends=True)
        assert line is not None
        lines[line - 1] = lines[line - 1].replace(mutation.old, mutation.new, 1)
        path.write_text("".join(lines))
    done = pytest(copy, "-x", "-n", str(NUM_PROCESSES), *tests)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or [f"rc {done.returncode}"])[0] if done.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("/tmp/mutations"))
    parser.add_argument("--old", type=Path, help="a checkout whose tests try the survivors")
    parser.add_argument("--tests", nargs="*", default=[], help="of these paths alone")
    parser.add_argument("--packages", nargs="*", default=PACKAGES, help="to draw from")
    parser.add_argument("--list", action="store_true", help="only draw")
    options = parser.parse_args()
    drawn = draw(options.seed, options.count, options.packages)
    dice = random.Random(options.seed)
    if options.list:
        for number, mutation in enumerate(drawn):
            print(f"{number:2} {mutation.kind}: {mutation.path}:{mutation.line}: ", end="")
            print(f"{mutation.old!r} -> {mutation.new!r}")
        return
    options.work.mkdir(parents=True, exist_ok=True)
    results = tried(ROOT, dict(enumerate(drawn)), options.work, dice, options.tests)
    survivors = {n: drawn[n] for n, killer in results.items() if killer is None}
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} killed", flush=True)
    if options.old and survivors:
        lost = tried(options.old.absolute(), survivors, options.work, dice, options.tests)
        print(f"{sum(killer is not None for killer in lost.values())} of them killed by old tests")
    (options.work / "drawn.json").write_text(json.dumps([asdict(m) for m in drawn], indent=1))


def tried(
    tree: Path,
    mutations: dict[int, Mutation],
    work: Path,
    dice: random.Random,
    paths: list[str],
) -> dict[int, str | None]:
    numbers = list(mutations)
    executed = hits(tree, list(mutations.values()), work, paths)
    results: dict[int, str | None] = {}
    for at, number in enumerate(numbers):
        mutation, tests = mutations[number], executed[at]
        results[number] = killed_by(tree, mutation, tests, work, dice)
        said = results[number] or ("SURVIVED" if tests else "no test executes it")
        print(f"{number:2} {mutation.path}:{mutation.line} {mutation.kind} ", end="")
        print(f"{mutation.old!r} -> {mutation.new!r}: {len(tests)} tests: {said}", flush=True)
    return results


if __name__ == "__main__":
    main()
