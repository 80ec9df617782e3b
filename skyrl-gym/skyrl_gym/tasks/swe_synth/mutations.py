"""Small bugs: copies of a function's source with one operator or number changed."""

import ast
import copy

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.FloorDiv,
}


def mutants(source: str) -> list[str]:
    """Return every source that differs from `source`, as `ast.unparse` writes it, by one small bug."""
    tree = ast.parse(source)
    original = ast.unparse(tree)
    sources = []
    for index in range(sum(1 for _ in ast.walk(tree))):
        for variant in (0, 1):
            changed = copy.deepcopy(tree)
            node = next(node for i, node in enumerate(ast.walk(changed)) if i == index)
            if _mutate(node, variant) and (text := ast.unparse(changed)) != original:
                sources.append(text)
    return list(dict.fromkeys(sources))


def _mutate(node: ast.AST, variant: int) -> bool:
    """Change a node in place. Return False if it has no such variant."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += (1, -1)[variant]
        return True
    if variant:
        return False
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        node.op = _OPERATORS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    else:
        return False
    return True
