"""Placeholders for the texts of messages, and the budget of one rendering of a chat template.

A template holds placeholders of characters that occur nowhere else. What it does to one is done to the text
behind it, and gives a placeholder of the result; comparisons see the text itself, because their outcome is
not written. Every value is charged with its size when it is made.
"""

import contextvars
import itertools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

__all__ = ["RUN", "TEXT_METHODS", "TEXT_QUERIES", "Refused", "Run", "Segment"]

_MAX_INTEGER = 2**63

TEXT_METHODS = frozenset(
    [
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition", "removeprefix"),
        *("removesuffix", "replace", "join", "upper", "lower", "title", "capitalize", "swapcase", "casefold"),
    ]
)
TEXT_QUERIES = frozenset(
    [
        *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalpha", "isdigit", "isalnum"),
        *("isspace", "isupper", "islower", "isnumeric", "isdecimal", "isascii", "istitle", "isidentifier"),
    ]
)


class Segment(NamedTuple):
    """Part of a rendered chat.

    Attributes:
      text: its characters.
      message: the index of the message they came with; None if the template wrote them.
    """

    text: str
    message: int | None


class Refused(ValueError):
    """What a template asked for and does not get."""


class Run:
    """The placeholders and the budget of one rendering."""

    def __init__(self, used: set[str], budget: int, writable: tuple[type, ...]) -> None:
        # Private-use characters: no case, no white space, no digit, so that text functions leave them alone.
        free = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        signs = list(itertools.islice((chr(point) for point in free if chr(point) not in used), 17))
        if len(signs) < 17:
            raise ValueError("messages use nearly all private-use characters: none is left to stand for their text")
        self._mark, self._digits = signs[0], signs[1:]
        self._pattern = re.compile(f"{self._mark}([{''.join(self._digits)}]+){self._mark}")
        self._alphabet = frozenset(signs)
        self._texts: list[tuple[str, int]] = []
        self._left = budget
        self._writable = writable

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise Refused("takes too long or writes too much for these messages")

    def hide(self, text: str, message: int) -> str:
        """A placeholder for text that came with a message."""
        if not text:
            return ""
        self.spend(len(text))
        self._texts.append((text, message))
        return self._mark + "".join(self._digits[int(digit, 16)] for digit in f"{len(self._texts) - 1:x}") + self._mark

    def _lookup(self, digits: str) -> tuple[str, int]:
        index = int("".join(f"{self._digits.index(sign):x}" for sign in digits[:16]), 16)
        if index >= len(self._texts):
            raise Refused("makes up text of messages that do not exist")
        return self._texts[index]

    def whole(self, value: Any) -> tuple[str, int] | None:
        """Text and message, if the value is one placeholder and nothing else."""
        match = self._pattern.fullmatch(value) if isinstance(value, str) and self._mark in value else None
        return match and self._lookup(match[1])

    def reveal(self, value: Any) -> Any:
        """The value with texts in place of placeholders: for comparisons, never for output."""
        if isinstance(value, str):
            text = self._pattern.sub(lambda match: self._lookup(match[1])[0], value) if self._mark in value else value
            self.spend(len(text))
            return text
        if isinstance(value, list | tuple):
            self.measure(value)
            return type(value)([self.reveal(item) for item in value])
        if isinstance(value, dict):
            self.measure(value)
            return {self.reveal(key): self.reveal(item) for key, item in value.items()}
        return value

    def cut(self, text: str) -> list[tuple[str, int | None]]:
        parts: list[tuple[str, int | None]] = []
        end = 0
        for match in self._pattern.finditer(text):
            parts += [(text[end : match.start()], None), self._lookup(match[1])]
            end = match.end()
        parts.append((text[end:], None))
        return [part for part in parts if part[0]]

    def segments(self, rendered: str) -> list[Segment]:
        try:
            parts = self.cut(rendered)
        except Refused as error:
            raise ValueError(f"chat template: {error}") from None
        if any(message is None and not self._alphabet.isdisjoint(text) for text, message in parts):
            raise ValueError("chat template: cuts the text of a message apart in a way that cannot be followed")
        return [Segment(*part) for part in parts]

    def measure(self, value: Any) -> None:
        """Charges a value's size as if it were written out."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.spend(1 + len(item))
            elif isinstance(item, dict):
                self.spend(1 + 2 * len(item))
                stack += [*item, *item.values()]
            elif isinstance(item, list | tuple):
                self.spend(1 + len(item))
                stack += item
            else:
                self.spend(1 + (len(item) if hasattr(item, "__len__") else 0))

    def as_text(self, value: Any) -> str:
        """A value as a template writes it; only of types whose text is known to be short or is charged."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, list | tuple | dict):
                self.measure(item)
                stack += [*item, *item.values()] if isinstance(item, dict) else item
            elif not isinstance(item, self._writable):
                raise Refused(f"writes an object of type {type(item).__name__}")
        text = str(value)
        self.spend(1 + len(text))
        return text

    def strip(self, value: str, characters: str | None, left: bool, right: bool) -> str:
        """``strip`` of a text that the template made of its own characters and placeholders."""
        parts = self.cut(value)

        def shorten(position: int, method: Callable[..., str]) -> None:
            while parts:
                text, message = parts[position]
                text = method(text, characters)
                parts[position] = (text, message)
                if text:
                    return
                del parts[position]

        if left:
            shorten(0, str.lstrip)
        if right:
            shorten(-1, str.rstrip)
        return "".join(text if message is None else self.hide(text, message) for text, message in parts)

    def method(self, value: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of a text, answering for the text behind a placeholder."""
        self.measure(value)
        if name in TEXT_QUERIES:
            return getattr(self.reveal(value), name)(*(self.reveal(arg) for arg in args), **kwargs)
        if name not in TEXT_METHODS:
            raise Refused(f"may not use the method {name!r} of a string")
        if name == "join":
            return self.join(*args, separator=value)
        whole = self.whole(value)
        if whole is None:
            if self._mark in value and name in ("strip", "lstrip", "rstrip") and len(args) <= 1 and not kwargs:
                return self.strip(value, args[0] if args else None, name != "rstrip", name != "lstrip")
            return self._apply(value, name, args, kwargs)
        text, message = whole
        result = self._apply(text, name, tuple(self.reveal(arg) for arg in args), kwargs)
        if isinstance(result, str):
            return self.hide(result, message)
        return type(result)([self.hide(part, message) for part in result])

    def _apply(self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "replace" and len(args) >= 2 and all(isinstance(arg, str) for arg in args[:2]):
            self.spend(len(text) + text.count(args[0]) * len(args[1]))
        result = getattr(text, name)(*args, **kwargs)
        self.measure(list(result) if isinstance(result, tuple) else result)
        return result

    def join(self, items: Iterable[Any], *, separator: str = "") -> str:
        parts = []
        for item in self.listed(items):
            self.spend(len(separator))
            parts.append(self.as_text(item))
        return separator.join(parts)

    def to_json(self, value: Any, ensure_ascii: bool, indent: int | None, separators: Any, sort_keys: bool) -> str:
        if not (indent is None or (isinstance(indent, int) and 0 <= indent <= 8)):
            raise Refused(f"tojson: indent must lie in [0, 8], got {str(indent)[:40]}")
        if separators is not None:
            separators = tuple(str(separator) for separator in separators)
            if len(separators) != 2 or max(map(len, separators)) > 8:
                raise Refused("tojson: separators must be two short strings")
        self.as_text(value)

        def escaped(item: Any) -> Any:
            if isinstance(item, str):
                # Written into a JSON string as a placeholder, so its text has to be what JSON would make of it.
                parts = self.cut(item) if self._mark in item else []
                self.spend(12 * sum(len(text) for text, message in parts if message is not None))
                return (
                    "".join(
                        text
                        if message is None
                        else self.hide(json.dumps(text, ensure_ascii=ensure_ascii)[1:-1], message)
                        for text, message in parts
                    )
                    or item
                )
            if isinstance(item, dict):
                return {escaped(key) if isinstance(key, str) else key: escaped(entry) for key, entry in item.items()}
            return [escaped(entry) for entry in item] if isinstance(item, list | tuple) else item

        text = json.dumps(escaped(value), ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        self.spend(len(text))
        if ensure_ascii:
            text = re.sub(r"[^\x00-\x7f]", lambda m: m[0] if m[0] in self._alphabet else json.dumps(m[0])[1:-1], text)
        return text

    def listed(self, value: Any) -> list[Any]:
        """What a loop, ``list`` or ``join`` goes through."""
        whole = self.whole(value)
        if whole is not None:
            text, message = whole
            return [self.hide(character, message) for character in text]
        if isinstance(value, str | list | tuple | dict | range):
            self.spend(len(value))
        items = list(value)
        self.spend(len(items))
        return items

    def arithmetic(self, operator: str, left: Any, right: Any) -> Any:
        """An intercepted operator: ``+``, ``*``, ``%`` or ``**``; only sums are defined for texts and lists."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if not numbers:
            if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                self.spend(len(left) + len(right))
                result = left + right  # type: ignore[operator]
                self.measure(result)
                return result
            raise Refused(f"may not compute {type(left).__name__} {operator} {type(right).__name__}")
        if max(abs(left), abs(right)) > _MAX_INTEGER or (operator == "**" and (abs(right) > 64 or abs(left) > 1000)):
            raise Refused(f"computes {operator} with too large a number")
        functions: dict[str, Callable[[Any, Any], Any]] = {
            "+": lambda a, b: a + b,
            "*": lambda a, b: a * b,
            "%": lambda a, b: a % b,
            "**": lambda a, b: a**b,
        }
        return functions[operator](left, right)


RUN: contextvars.ContextVar[Run] = contextvars.ContextVar("RUN")
