"""An example: arithmetic with a calculator.

The model may write ``calc(12*34)``; the calculator answers with the value in a message of its own,
and the model continues. A turn without a call is the final answer: reward 1 when its last number is
the answer, else 0.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from mindspeed_rl.core.types import Prompt
from mindspeed_rl.environments.chat import answer_tokens
from mindspeed_rl.environments.types import Observation
from mindspeed_rl.rewards.answers import extract_last_number, lenient_match

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CALL = re.compile(r"calc\(([^\n]*)\)")
_MAX_CHARS = 200
_MAX_EXPONENT = 64
_MAX_DIGITS = 30
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression, or ``error: REASON`` for the model to read."""
    if len(expression) > _MAX_CHARS:
        return "error: too long"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return "error: not an expression"
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"
    if isinstance(value, int) and abs(value) < 10**_MAX_DIGITS:
        return str(value)
    return f"{float(value):.10g}" if abs(value) < 1e300 else "error: too large"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and (abs(second) > _MAX_EXPONENT or abs(first) > 1e6):
                raise ValueError("too large")
            value = _BINARY[type(op)](first, second)
            if isinstance(value, complex):
                raise ValueError("not a real number")
            return value
    raise ValueError("only numbers, + - * / // % ** and brackets")


class Calculator:
    """The calculator in the conversation of one sample."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._answer = ""

    def reset(self, prompt: Prompt) -> Observation:
        self._answer = prompt.answer
        return Observation()

    def step(self, token_ids: tuple[int, ...]) -> Observation:
        """Answer the last call with its value; without a call, judge the final answer."""
        text = str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
        calls: list[str] = _CALL.findall(text)
        if token_ids[-1] not in self._tokenizer.all_special_ids:
            return Observation(reward=0.0)  # cut off: every token that ends a turn is a special one
        if calls:
            answer = answer_tokens(self._tokenizer, calculate(calls[-1]))
            return Observation(answer, reward=0.0)  # unless a final answer follows
        right = extract_last_number(text) is not None and lenient_match(text, self._answer)
        return Observation(done=True, reward=float(right))


make = Calculator
