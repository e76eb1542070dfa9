"""All mutants of a module, as cosmic-ray makes them.

A mutant is one operator of cosmic-ray at one of its places in the source. Some change nothing and are left out: in
annotations (the sources postpone their evaluation; cosmic-ray itself leaves out only those of assignments), unions of
types, the bare `*` of a parameter list, equality in place of identity, those that the compiler refuses or warns of, and
those that compile to the same tree. The last two are found when a mutant is drawn.

Mutants inside `assert` statements are a population of their own. An assertion of the core is itself a test, and never
false in a program without bugs: no run of such a program can tell it from a weaker one.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import NodeOrLeaf

UNION = "ReplaceBinaryOperator_BitOr_"  # outside functions and classes `|` joins types
SAME = ("ReplaceComparisonOperator_Is_Eq", "ReplaceComparisonOperator_IsNot_NotEq")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One operator at one of its places: the `occurrence`-th of the module, counted from 0."""

    module: str
    operator: str
    occurrence: int
    line: int
    column: int
    where: str  # the function or class
    in_assert: bool

    @property
    def name(self) -> str:
        """Names it in reports and on the command line."""
        return f"{self.module}:{self.line}:{self.column}:{self.operator}:{self.occurrence}"


def path_of(root: Path, module: str) -> Path:
    return root / (module.replace(".", "/") + ".py")


def mutants_of(root: Path, module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of the operators' names and of the source."""
    nodes = list(ast_nodes(get_ast(path_of(root, module).read_text())))
    found = []
    for name, operator in _operators():
        places = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, (node, (line, column)) in enumerate(places):
            where = ASTQuery(node).get_definition_name() or ""
            if not (_in_annotation(node) or _is_marker(node) or (where == "" and name.startswith(UNION))):
                found.append(Mutant(module, name, occurrence, line, column, where, _in_assert(node)))
    return found


def mutated(root: Path, mutant: Mutant) -> str | None:
    """The mutated source; None if that is no program, or the same one."""
    source = path_of(root, mutant.module).read_text()
    changed = mutate_code(source, get_operator(f"core/{mutant.operator}")(), mutant.occurrence)
    if changed is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compile(changed, mutant.module, "exec")
    except (SyntaxError, SyntaxWarning):
        return None
    return None if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)) else changed


def difference(source: str, changed: str) -> list[str]:
    """The lines that differ, as in a diff without context."""
    lines = difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def _operators() -> Iterator[tuple[str, Operator]]:
    """Those that need no arguments; the others replace variables that a person names."""
    for name in sorted(operator_names()):
        operator = get_operator(name)
        short = name.removeprefix("core/")
        if not operator.arguments() and short not in SAME:
            yield short, operator()


def _in_annotation(node: NodeOrLeaf) -> bool:
    parent = node.parent
    while parent is not None:
        kind = parent.type
        if kind == "annassign" and node is parent.children[1]:
            return True
        if kind in ("param", "funcdef") and node is parent.annotation:
            return True
        if kind == "tfpdef" and node is parent.children[-1]:
            return True
        node, parent = parent, parent.parent
    return False


def _is_marker(node: NodeOrLeaf) -> bool:
    """The `*` between positional and keyword parameters, which cosmic-ray takes for a multiplication."""
    return node.type == "operator" and node.parent is not None and node.parent.type == "parameters"


def _in_assert(node: NodeOrLeaf | None) -> bool:
    while node is not None and node.type != "assert_stmt":
        node = node.parent
    return node is not None
