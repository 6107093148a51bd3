"""The small changes that tools/mutants.py makes to a module: where they are, and what becomes of the source.

Operators of comparison, arithmetic and logic become others, numbers grow by one, slices move by one, the first two
arguments of a call change places, and `raise`, `continue`, `break` and `not` go away. The text of messages (f-strings),
annotations, decorators and asserts are not changed.
"""

from __future__ import annotations

import ast
import dataclasses

SYMMETRIC = ("min", "max", "minimum", "array_equal")  # functions that do not mind the order of their arguments
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
COMPARISONS |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "//", "/": "*", "//": "*", "%": "//", "**": "*"}
ARITHMETIC |= {"<<": ">>", ">>": "<<", "|": "&", "&": "|"}
SYMBOLS: dict[type[ast.AST], str] = {}
SYMBOLS |= {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is"}
SYMBOLS |= {ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}
SYMBOLS |= {ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.LShift: "<<", ast.RShift: ">>"}
SYMBOLS |= {ast.BitOr: "|", ast.BitAnd: "&", ast.And: "and", ast.Or: "or"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change: the characters [start, end) of the module's source become `text`."""

    module: str  # below src/router_replay
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def lines(self, source: str) -> tuple[str, str]:
        """The statement's first touched line to its last, before and after, as one line each."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        after = source[first : self.start] + self.text + source[self.end : last]
        return " ".join(source[first:last].split()), " ".join(after.split())


class Finder(ast.NodeVisitor):
    """Collects the mutants of one module."""

    def __init__(self, module: str, source: str) -> None:
        self.module, self.source = module, source
        self.starts = [0]  # of each line, in characters
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(source))

    # -- places ---------------------------------------------------------------------------------

    def at(self, line: int, column: int) -> int:
        """ast counts columns in bytes."""
        text = self.source[self.starts[line - 1] : self.starts[line]]
        return self.starts[line - 1] + len(text.encode()[:column].decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)  # type: ignore

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))]

    def add(self, start: int, end: int, text: str) -> None:
        line = self.source.count("\n", 0, start) + 1
        self.mutants.append(Mutant(self.module, line, start, end, text))

    def replace(self, node: ast.AST, text: str) -> None:
        self.add(*self.span(node), text)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """The operator stands between its operands, perhaps beside brackets and line breaks."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = self.source.find(old, start, end)
        if found >= 0:
            self.add(found, found + len(old), new)

    # -- kinds of change ------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            symbol = SYMBOLS[type(op)]
            self.between(left, right, symbol, COMPARISONS[symbol])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """One change for the whole chain: half a chain would need brackets."""
        symbol = SYMBOLS[type(node.op)]
        start, end = self.span(node)
        parts = [self.text(value) for value in node.values]
        if not any("\n" in part for part in parts):
            self.add(start, end, (" or " if symbol == "and" else " and ").join(f"({part})" for part in parts))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        symbol = SYMBOLS.get(type(node.op))
        if symbol in ARITHMETIC and not any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right)):
            self.between(node.left, node.right, symbol, ARITHMETIC[symbol])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        symbol = SYMBOLS[type(node.op)]
        if not isinstance(node.value, ast.List):
            self.between(node.target, node.value, f"{symbol}=", f"{ARITHMETIC[symbol]}=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if not isinstance(node.op, ast.UAdd) and not isinstance(node.operand, ast.Constant):
            self.replace(node, f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace(node, str(node.value + 1))
        elif isinstance(node.value, float):
            self.replace(node, repr(node.value * 2 + 1))

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace(node, "pass")  # what stands inside is text

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace(node, "pass")

    def visit_Call(self, node: ast.Call) -> None:
        if len(node.args) >= 2 and not any(isinstance(one, ast.Starred) for one in node.args[:2]):
            first, second = node.args[:2]
            if ast.dump(first) != ast.dump(second) and not _is_name_of(node, *SYMMETRIC, "isinstance"):
                middle = self.source[self.span(first)[1] : self.span(second)[0]]
                self.add(self.span(first)[0], self.span(second)[1], self.text(second) + middle + self.text(first))
        if _is_name_of(node, "isinstance"):
            self.visit(node.args[0])  # `str & bytes` is no type
        else:
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":  # of zip: it guards what cannot happen
            self.visit(node.value)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant | ast.UnaryOp):  # -4 is changed below
                self.replace(bound, f"{self.text(bound)} + 1")
        self.generic_visit(node)

    # -- what is left alone ---------------------------------------------------------------------

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)


def _is_name_of(call: ast.Call, *names: str) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    return name in names
