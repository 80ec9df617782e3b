"""Faults of a source file: its syntax tree with one node changed."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"}
FLIPPED = {"any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """One change of one source line, e.g. `+ → -`."""

    path: str
    """Path of the file under `skyrl_train`."""
    line: int
    text: str
    """The original line."""
    change: str
    source: str
    """The complete file with the fault."""

    @property
    def key(self) -> tuple[str, str, str]:
        """File, original line and change, which identify the fault while the line exists."""
        return self.path, self.text, self.change


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:  # noqa: C901, one case per kind of fault
    """Yield each faulty version of a node, without its position, and a description of the change."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            other = COMPARISONS[type(op)]
            yield f"{type(op).__name__} → {other.__name__}", ast.Compare(node.left, [other()], node.comparators)
        case ast.BinOp(op=op) if type(op) in OPERATORS and not _is_annotation(node):
            swapped = OPERATORS[type(op)]
            yield f"{type(op).__name__} → {swapped.__name__}", ast.BinOp(node.left, swapped(), node.right)
        case ast.BoolOp(op=op):
            junction = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"{type(op).__name__} → {type(junction).__name__}", ast.BoolOp(junction, node.values)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=1)):
            pass  # most often the last of two dimensions, which is 1, too
        case ast.UnaryOp(op=ast.USub() | ast.Not() | ast.Invert()):
            yield f"drop {type(node.op).__name__}", node.operand
        case ast.Name(id=name) if name in NAMES | FLIPPED:
            yield f"{name} → {(NAMES | FLIPPED)[name]}", ast.Name((NAMES | FLIPPED)[name], node.ctx)
        case ast.Attribute(attr=name) if name in NAMES | FLIPPED:
            swapped_name = (NAMES | FLIPPED)[name]
            yield f".{name} → .{swapped_name}", ast.Attribute(node.value, swapped_name, node.ctx)
        case ast.keyword(arg="min" | "max" as name):
            yield f"{name}= → {NAMES[name]}=", ast.keyword(NAMES[name], node.value)
        case ast.Constant(value=bool() as value):
            yield f"{value} → {not value}", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield f"{value} → {value + 1}", ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield f"{value} → {value + 1}", ast.Constant(value + 1)
        case ast.Call(func=ast.Attribute(attr="detach" | "clamp" | "abs" | "clone" as name)):
            yield f"drop .{name}()", node.func.value
        case ast.Return(value=ast.Call(args=[first, *_])) if not isinstance(first, ast.Starred):
            yield "return the first argument", ast.Return(first)
        case ast.If():
            yield "negate if", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop the statement", ast.Pass()


def _is_annotation(node: ast.BinOp) -> bool:
    """Return True for unions of types or with `None`, which no test executes."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.Constant) and side.value is None for side in sides) or all(
        isinstance(side, ast.Name) and side.id[0].isupper() for side in sides
    )


def _executed(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield parent, field, index and node of the tree, except annotations, assertions and error messages."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list") or isinstance(tree, ast.Assert | ast.Raise):
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if isinstance(child, ast.AST):
                yield tree, field, index if isinstance(value, list) else None, child
                yield from _executed(child)


def faults_of(path: Path, root: Path) -> list[Fault]:
    """Return every fault of a source file."""
    source = path.read_text()
    lines, tree = source.splitlines(), ast.parse(source)
    faults = []
    for parent, field, index, node in _executed(tree):
        for change, variant in variants(node):
            if isinstance(parent, ast.JoinedStr | ast.FormattedValue):
                continue
            line = getattr(node, "lineno", 0)
            container = getattr(parent, field)
            _put(parent, field, index, ast.fix_missing_locations(ast.copy_location(copy.deepcopy(variant), node)))
            text = lines[line - 1].strip()
            faults.append(Fault(path.relative_to(root).as_posix(), line, text, change, ast.unparse(tree)))
            setattr(parent, field, container) if index is None else _put(parent, field, index, node)
    return faults


def _put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node
