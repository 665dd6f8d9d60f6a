"""Expectations as text: arithmetic and comparisons over metrics, evaluated without ``eval``.

``ratio(basic.jct_s, dualpath.jct_s) >= 1.8`` names metrics by system and key; hyphens of a system's name are written
as underscores. An experiment names a variant first (``mixed.basic.jct_s <= 1.05 * alone.basic.jct_s``).

Allowed: numbers, names, ``+ - * /``, chained comparisons, ``and``/``or``/``not``, and the functions ratio, min, max,
abs. Anything else is refused with the text that was not understood.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from testbed.errors import ConfigError

_BINARY: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARE: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _ratio(a: float, b: float) -> float:
    return a / b


_FUNCTIONS: Mapping[str, Callable[..., float]] = {"ratio": _ratio, "min": min, "max": max, "abs": abs}
_GRAMMAR = ast.expr_context | ast.boolop | ast.And | ast.Or | ast.Not | ast.USub | ast.UAdd
_LONGEST = 1000


class UnknownMetricError(ConfigError):
    """The expression names a metric that this run does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Whether the claim holds, and the value of the left side of its first comparison."""

    holds: bool
    measured: float


def check_expression(text: str) -> None:
    """Parse an expectation, to find its faults before anything runs.

    Raises:
        ConfigError: not a comparison, or something that is not allowed.
    """
    _check(_parse(text), text)


def check_figure(text: str) -> None:
    """Parse what is to give a number, compared with nothing.

    Raises:
        ConfigError: a comparison, or something that is not allowed.
    """
    tree = _parse(text)
    if any(isinstance(node, ast.Compare) for node in ast.walk(tree)):
        raise ConfigError(f"expression {text!r} is a comparison, but a number is wanted.")
    _check_allowed(tree, text)


def systems_named(text: str) -> set[str]:
    """Systems (in an experiment: variants) that an expectation speaks of (names before the first dot)."""
    return {name.partition(".")[0] for name in names_in(text)}


def names_in(text: str) -> list[str]:
    """The metrics that an expression names, each once, in order.

    Raises:
        ConfigError: it is no expression.
    """
    return list(dict.fromkeys(ast.unparse(node) for node in _names(_parse(text))))


def with_first(text: str, placeholder: str, name: str) -> str:
    """The expression with another name for ``placeholder`` wherever a metric starts with it."""
    tree = _parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == placeholder:
            node.id = name
    return ast.unparse(tree)


def with_numbers(text: str, metrics: Mapping[str, float]) -> str:
    """The expression with four digits in the place of every metric that is there."""
    return ast.unparse(_Numbers(metrics).visit(_parse(text)))


def figure(text: str, metrics: Mapping[str, float]) -> float:
    """The number that an expression gives; NaN where it divides by nothing.

    Raises:
        ConfigError: as ``check_figure``; UnknownMetricError for a name that is not there.
    """
    check_figure(text)
    try:
        return _value(_parse(text), metrics, text)
    except ZeroDivisionError:
        return float("nan")


def evaluate(text: str, metrics: Mapping[str, float]) -> Evaluation:
    """Evaluate an expectation over flat metrics (``{"basic.jct_s": 31.2}``).

    Raises:
        ConfigError: as ``check_expression``; UnknownMetricError for a name that is not there.
    """
    tree = _parse(text)
    _check(tree, text)
    try:
        holds = bool(_value(tree, metrics, text))
        measured = next(
            float(_value(node.left, metrics, text)) for node in ast.walk(tree) if isinstance(node, ast.Compare)
        )
    except ZeroDivisionError:
        return Evaluation(holds=False, measured=float("nan"))
    return Evaluation(holds=holds, measured=measured)


def _parse(text: str) -> ast.expr:
    try:
        if len(text) > _LONGEST:
            raise SyntaxError
        return ast.parse(" ".join(text.split()), mode="eval").body  # a claim may take several lines
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ConfigError(f"expectation {text[:80]!r} is not an expression.") from None


def _check(tree: ast.expr, text: str) -> None:
    if not any(isinstance(node, ast.Compare) for node in ast.walk(tree)):
        raise ConfigError(f"expectation {text!r} compares nothing; write for example basic.jct_s > dualpath.jct_s.")
    _check_allowed(tree, text)


class _Numbers(ast.NodeTransformer):
    """Puts numbers where metrics are named."""

    def __init__(self, metrics: Mapping[str, float]) -> None:
        self._metrics = metrics

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit a node of any kind."""
        if isinstance(node, ast.Attribute | ast.Name) and (name := ast.unparse(node)) in self._metrics:
            return ast.Name(id=f"{self._metrics[name]:.4g}")
        return super().generic_visit(node)


def _names(tree: ast.AST) -> Iterator[ast.Attribute | ast.Name]:
    """Whole dotted names, without those of functions."""
    if isinstance(tree, ast.Attribute | ast.Name):
        yield tree
        return
    inner = tree.args if isinstance(tree, ast.Call) else ast.iter_child_nodes(tree)
    for node in inner:
        yield from _names(node)


def _check_allowed(tree: ast.expr, text: str) -> None:
    for node in ast.walk(tree):
        allowed = isinstance(
            node,
            ast.Compare | ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Name | ast.Attribute | _GRAMMAR,
        )
        if isinstance(node, ast.operator):
            allowed = type(node) in _BINARY
        elif isinstance(node, ast.cmpop):
            allowed = type(node) in _COMPARE
        elif isinstance(node, ast.Constant):
            allowed = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        elif isinstance(node, ast.Call):
            allowed = _is_function_call(node)
        if not allowed:
            what = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise ConfigError(f"expectation {text!r}: {what!r} is not allowed in one.")


def _is_function_call(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
        return False
    return len(node.args) == 2 if node.func.id == "ratio" else bool(node.args)


def _value(node: ast.expr, metrics: Mapping[str, float], text: str) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            if name not in metrics:
                raise UnknownMetricError(f"expectation {text!r}: this run has no metric {name!r}.")
            return metrics[name]
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, metrics, text)
            return float(not inner) if isinstance(op, ast.Not) else -inner if isinstance(op, ast.USub) else inner
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_value(left, metrics, text), _value(right, metrics, text))
        case ast.BoolOp(op=op, values=values):
            truths = [bool(_value(v, metrics, text)) for v in values]
            return float(all(truths) if isinstance(op, ast.And) else any(truths))
        case ast.Compare(left=left, ops=ops, comparators=others):
            sides = [_value(side, metrics, text) for side in (left, *others)]
            return float(all(_COMPARE[type(op)](a, b) for op, a, b in zip(ops, sides, sides[1:], strict=False)))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return float(_FUNCTIONS[name](*(_value(a, metrics, text) for a in arguments)))
    raise ConfigError(f"expectation {text!r}: {ast.unparse(node)!r} is not allowed in one.")
