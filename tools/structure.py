"""Measures how the source tree reads: ``python tools/structure.py [SRC]``.

Prints modules, lines of code, lines and branches of functions, module sizes, small modules with one importer,
import circles, why-comments, names to avoid and the lines of the tests beside SRC. Package ``__init__`` files are
not counted as modules.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

AVOIDED = ("found", "told", "said")
PACKAGE = "posttrain"


def read_modules(src: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    modules = {}
    for path in sorted((src / PACKAGE).rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(tree: ast.Module, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a module imports when it runs: those for type checking only are left out."""
    type_only = {
        id(node)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
        for node in ast.walk(statement)
    }
    targets = set()
    for node in ast.walk(tree):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                targets.add(full if full in modules else node.module)
        elif isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names if alias.name in modules)
    return targets


def sibling_circles(imports: dict[str, set[str]]) -> list[str]:
    """Strongly connected siblings of every package, as ``package: a, b``."""
    graphs: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, targets in imports.items():
        for target in targets:
            left, right = module.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
            if depth is not None:
                graphs[".".join(left[:depth])][left[depth]].add(right[depth])
    circles = []
    for package, graph in sorted(graphs.items()):
        reachable = {start: _reachable(graph, start) for start in graph}
        groups = {
            frozenset(other for other in reach if start in reachable.get(other, ())) | {start}
            for start, reach in reachable.items()
            if start in reach
        }
        circles += [f"{package}: {', '.join(sorted(group))}" for group in groups if len(group) > 1]
    return circles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    stack = list(graph.get(start, ()))
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += graph.get(node, ())
    return seen


def comment_lines(text: str) -> int:
    """Lines with a comment, without those that only instruct a tool."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|pragma|!)", token.string):
            lines.add(token.start[0])
    return len(lines)


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that hold a token of code: no blank lines, no docstrings, no lines with a comment alone."""
    lines: set[int] = set()
    passed = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in passed:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def functions(trees: Iterable[ast.Module]) -> list[tuple[int, int]]:
    """Lines and branches of every function: conditions, loops, handlers, cases and boolean operators."""
    branches = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.BoolOp, ast.match_case, ast.comprehension)
    return [
        (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            sum(isinstance(inner, branches) for inner in ast.walk(node)),
        )
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def avoided_names(tree: ast.Module) -> int:
    """How often a variable, parameter, function or attribute is called by a name to avoid."""
    count = 0
    for node in ast.walk(tree):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        count += isinstance(name, str) and name in AVOIDED
    return count


def main() -> None:
    """Print the measurements."""
    src = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src"
    modules = read_modules(src)
    texts = {module: path.read_text(encoding="utf-8") for module, path in modules.items()}
    trees = {module: ast.parse(text) for module, text in texts.items()}
    imports = {module: imports_of(tree, modules) - {module} for module, tree in trees.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports.items():
        for target in targets:
            importers[target].add(module)
    lines = {module: text.count("\n") for module, text in texts.items()}
    files = [module for module, path in modules.items() if path.name != "__init__.py"]
    single = [module for module in files if len(importers[module]) == 1]
    small = [module for module in single if lines[module] < 40]
    sizes = [lines[module] for module in files]
    total = sum(lines.values())
    circles = sibling_circles(imports)
    trainer = f"{PACKAGE}.train.trainer"
    comments = sum(map(comment_lines, texts.values()))
    print(f"files                          {len(modules)}, {len(files)} without __init__")
    print(f"lines                          {total}")
    print(f"lines of code                  {sum(code_lines(text, trees[name]) for name, text in texts.items())}")
    for title, numbers in zip(("lines", "branches"), zip(*functions(trees.values()), strict=True), strict=True):
        tail = statistics.quantiles(numbers, n=20)[-1]
        title = f"{title} a function"
        print(
            f"{title:<30} mean {statistics.mean(numbers):.2f}, median {statistics.median(numbers):.0f}, 95% {tail:.0f}"
        )
    test_lines = [path.read_text(encoding="utf-8").count("\n") for path in sorted((src.parent / "tests").rglob("*.py"))]
    print(f"lines of tests                 {sum(test_lines)} in {len(test_lines)} files")
    print(f"module size                    median {statistics.median(sizes):.0f}, largest {max(sizes)}")
    print(f"under 40 lines                 {sum(size < 40 for size in sizes)}, with one importer {len(small)}")
    print(f"with a single importer         {len(single)} of {len(files)}: {100 * len(single) / len(files):.0f}%")
    print(f"circles between siblings       {len(circles)}")
    statements = _import_statements(trees[trainer])
    own = [statement for statement in statements if ast.unparse(statement).startswith(f"from {PACKAGE}.")]
    print(f"imports of trainer.py          {len(own)} of the package, {len(statements)} with those of libraries")
    print(f"lines with a comment           {comments}: {100 * comments / total:.1f}%")
    print(f"{', '.join(AVOIDED)} as names       {sum(map(avoided_names, trees.values()))}")
    for title, rows in (("circle", circles), ("small, one importer", small), ("over 400 lines", _large(lines))):
        for row in rows:
            print(f"  {title}: {row}")


def _import_statements(tree: ast.Module) -> list[ast.stmt]:
    return [statement for statement in tree.body if isinstance(statement, ast.Import | ast.ImportFrom)]


def _large(lines: dict[str, int]) -> list[str]:
    return [f"{module} {count}" for module, count in lines.items() if count > 400]


if __name__ == "__main__":
    main()
