"""What models are asked and where their answers end: the texts of EvalPlus 0.3.1."""

from __future__ import annotations

import ast
import warnings

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown"
    " code block:"
)
RESPONSE = (
    "Below is a Python script with a self-contained function that solves the problem and passes"
    " corresponding tests:"
)
_STOPS = ("<|endoftext|>", "<|endofmask|>", "</s>", "\nif __name__", "\ndef main(", "\nprint(")
_FENCE = "\n```\n"
_BASE_STOPS = {
    "humaneval": ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert "),
    "mbpp": ('\n"""', "\nassert"),
}


def completion(prompt: str) -> str:
    """The text a base model continues."""
    return prompt.strip() + "\n"


def question(prompt: str) -> str:
    """The user's message to a chat model."""
    return f"{INSTRUCTION}\n```\n{prompt.strip()}\n```\n"


def answer_start() -> str:
    """What the assistant's answer is made to begin with, where that can be chosen."""
    return f"{RESPONSE}\n```python\n"


def stops(family: str, chat: bool) -> tuple[str, ...]:
    """Strings that end an answer.

    Args:
        family: `humaneval` or `mbpp`.
        chat: whether the answer is a chat message.
    """
    return (*_STOPS, _FENCE) if chat else _STOPS + _BASE_STOPS[family]


def cut(text: str, ends: tuple[str, ...], begin: int = 0) -> str | None:
    """`text` before the first of `ends`, or None when it holds none.

    A fence inside a docstring ends nothing.

    Args:
        begin: where to start looking.
    """
    found = [(i, end) for end in ends if (i := text.find(end, begin)) >= 0]
    if not found:
        return None
    at, end = min(found)
    if end == _FENCE and _in_string(text[:at]):
        return cut(text, ends, at + 1)
    return text[:at]


def _in_string(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(code)
    except SyntaxError as error:
        return "unterminated triple-quoted" in error.msg
    except (ValueError, RecursionError, MemoryError):
        pass
    return False
