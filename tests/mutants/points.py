"""The mutants of a source file: small changes of its syntax tree, each of which a test should see.

Left out is what changes no behaviour that is promised: docstrings, annotations, decorators,
assertions, also those of ``zip``, log lines, ``__repr__``, f-strings, the arguments of exceptions,
and numbers that a module gives a name.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
NEGATED = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)  # by the change above already
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
}
UNSEEN = {"annotation", "returns", "decorator_list", "type_params", "msg", "exc", "cause"}  # fields
TEXTS = ("__repr__", "__str__", "__rich__")
LOGS = ("log", "_log", "logging", "warnings")
COMPILERS = ("kernel", "njit", "intrinsic")
NUMBERS = {ast.Constant, ast.Name, ast.Load, ast.BinOp, ast.Tuple, *ARITHMETIC, ast.Pow}
SHORT = 60  # characters of a statement in a mutant's name


@dataclass(frozen=True)
class Mutant:
    """A change at one place of a file.

    Attributes:
        number: of the points of its file.
        first, last: lines of its statement, of a compound one its head.
        inside: of a function, and so not run when the module is imported.
        compiled: of a function that a compiler takes, which no tracer sees.
    """

    path: str
    line: int
    column: int
    kind: str
    before: str
    after: str
    number: int
    first: int
    last: int
    inside: bool
    compiled: bool

    @property
    def name(self) -> str:
        """The same for the same source."""
        place = f"{self.path}:{self.line}:{self.column}"
        return f"{place} {self.kind} {self.before!r} -> {self.after!r}"


Change = tuple[ast.expr | ast.stmt, str, str, str, Callable[[], None]]
# where, kind, before, after, and what changes the tree


def _text(node: ast.AST) -> str:
    """A node's source, in a line."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."


def _sign(operator: ast.cmpop | ast.operator) -> str:
    """An operator's source."""
    left, right = ast.Name("a"), ast.Name("b")
    if isinstance(operator, ast.cmpop):
        return ast.unparse(ast.Compare(left, [operator], [right]))[2:-2]
    return ast.unparse(ast.BinOp(left, operator, right))[2:-2]


def _called(node: ast.AST) -> str:
    """The dotted name that a call calls."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _unseen(node: ast.AST) -> bool:
    """Whether nothing in a node is mutated."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.keyword(arg="strict"):
            return True
        case ast.FunctionDef(name=name):
            return name in TEXTS
        case ast.If(test=test):
            return ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(targets=[target], value=value):
            return ast.unparse(target).isupper() and not {*map(type, ast.walk(value))} - NUMBERS
        case ast.Expr(value=ast.Call() as call):
            return _called(call).removeprefix("self.").partition(".")[0].lower() in LOGS
    return _called(node).endswith(("Error", "Exception"))


def _of_expression(node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[Change]:
    """The changes of an expression itself, not of those in it.

    ``put``: puts another node in its place.
    """
    match node:
        case ast.Compare(ops=ops, comparators=comparators):
            for i, (old, right) in enumerate(zip(ops, comparators, strict=True)):
                new = COMPARISONS[type(old)]()
                change = partial(ops.__setitem__, i, new)
                yield right, "comparison", _sign(old), _sign(new), change
        case ast.BoolOp(op=op):
            words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, "boolean", *words, partial(setattr, node, "op", other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not", _text(node), _text(operand), partial(put, operand)
        case ast.Constant(value=bool(value)):
            yield (
                node,
                "constant",
                str(value),
                str(not value),
                partial(put, ast.Constant(not value)),
            )
        case ast.Constant(value=int(value)):
            new_value = ast.Constant(value + 1)
            yield node, "constant", str(value), str(value + 1), partial(put, new_value)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
            texts = (ast.JoinedStr, ast.Constant)
            if any(isinstance(x, texts) and not _is_number(x) for x in (left, right)):
                return
            swapped = ARITHMETIC[type(op)]()
            change = partial(setattr, node, "op", swapped)
            yield right, "arithmetic", _sign(op), _sign(swapped), change


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _of_statement(node: ast.AST, put: Callable[[ast.AST], None]) -> Iterator[Change]:
    """The changes of a statement itself."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            simple = isinstance(test, ast.Compare) and isinstance(test.ops[0], NEGATED)
            negation = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
            endless = isinstance(test, ast.Constant)
            if not (negation or endless or simple and len(test.ops) == 1):
                new = ast.UnaryOp(ast.Not(), test)
                change = partial(setattr, node, "test", new)
                yield test, "condition", _text(test), _text(new), change
        case ast.AugAssign(op=op):
            if type(op) in ARITHMETIC:
                swapped = ARITHMETIC[type(op)]()
                change = partial(setattr, node, "op", swapped)
                yield node.value, "arithmetic", f"{_sign(op)}=", f"{_sign(swapped)}=", change
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            change = partial(setattr, node, "value", ast.Constant(None))
            yield node, "return", _text(node), "return None", change
    if _is_dropped(node):
        yield node, "dropped", _text(node), "pass", partial(put, ast.Pass())


def _is_dropped(node: ast.AST) -> bool:
    """Whether a statement may be missing, as far as the compiler is concerned."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            return True
        case ast.Return(value=None) | ast.Continue() | ast.Break() | ast.Delete():
            return True
        case ast.Assign(targets=targets):
            return any(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
        case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
            return True
    return False


@dataclass(frozen=True)
class _Scope:
    """The place of a node: its statement, and the function around it."""

    first: int = 0
    last: int = 0
    inside: bool = False
    compiled: bool = False

    def into(self, node: ast.AST, field: str) -> _Scope:
        """The scope of a field of a node."""
        scope = self
        if isinstance(node, Function) and field == "body":
            marks = "".join(map(ast.unparse, node.decorator_list))
            compiled = self.compiled or any(mark in marks for mark in COMPILERS)
            scope = replace(scope, inside=True, compiled=compiled)
        if isinstance(node, ast.Lambda) and field == "body":
            scope = replace(scope, inside=True)
        return scope

    def at(self, node: ast.AST) -> _Scope:
        """The scope of a node that may be a statement."""
        if not isinstance(node, ast.stmt):
            return self
        body = getattr(node, "body", None) or getattr(node, "cases", None)
        last = node.end_lineno or node.lineno
        if body:
            first_of_body = getattr(body[0], "lineno", None) or body[0].pattern.lineno
            last = max(node.lineno, first_of_body - 1)
        return replace(self, first=node.lineno, last=last)


def _changes(node: ast.AST, scope: _Scope) -> Iterator[tuple[Change, _Scope]]:
    """The changes of what is in a node."""
    for field, value in ast.iter_fields(node):
        if field in UNSEEN:
            continue
        inner = scope.into(node, field)
        values = value if isinstance(value, list) else [value]
        for i, child in enumerate(values):
            if not isinstance(child, ast.AST) or _unseen(child):
                continue
            put: Callable[[ast.AST], None] = (
                partial(value.__setitem__, i)
                if isinstance(value, list)
                else partial(setattr, node, field)
            )
            place = inner.at(child)
            for change in (*_of_expression(child, put), *_of_statement(child, put)):
                yield change, place
            yield from _changes(child, place)


def mutants(source: str, path: str) -> list[Mutant]:
    """All of a file."""
    return [
        Mutant(path, where.lineno, where.col_offset, kind, before, after, number, **vars(scope))
        for number, ((where, kind, before, after, _), scope) in enumerate(
            _changes(ast.parse(source), _Scope())
        )
    ]


def mutated(source: str, mutant: Mutant, filename: str) -> CodeType:
    """A file's code with one change."""
    tree = ast.parse(source)
    (_, _, _, _, change), _ = next(islice(_changes(tree, _Scope()), mutant.number, None))
    change()
    code: CodeType = compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)
    return code


def sample(found: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """One of each of ``count`` parts of the mutants in their order: so a file has its share."""
    if count >= len(found):
        return list(found)
    choose = random.Random(seed)
    bounds = [i * len(found) // count for i in range(count + 1)]
    return [found[choose.randrange(*pair)] for pair in pairwise(bounds)]
