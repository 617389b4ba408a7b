"""A strict, bounded reader of JSON from untrusted files.

`json.loads` builds whatever the file describes before anyone can look at it (lists of a hundred million empty lists,
integers of a million digits). Here the caller asks for what the format allows, one value at a time, so nothing else
is ever allocated and every complaint can say where it is.
"""

import re
from collections.abc import Iterator
from json.decoder import JSONDecodeError, scanstring  # type: ignore[attr-defined]
from typing import NoReturn

_SPACE = re.compile(r"[ \t\n\r]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)(?![0-9.eE])")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9.eE])|true|false|null")
_MAX_INTEGER = (1 << 63) - 1
_MAX_DEPTH = 16


def clip(text: str) -> str:
    """The text quoted and escaped for a message, shortened if long."""
    return repr(text) if len(text) <= 120 else f"{text[:100]!r}... ({len(text)} characters)"


class Scanner:
    """A position in a JSON text; every method skips white space, reads one thing and moves on.

    Args:
      text: the JSON text.
      where: what is being read (file, tensor); begins every message. May be reassigned on the way.

    >>> scanner = Scanner('{"shape": [2, 3]}', "x.safetensors")
    >>> [(key, list(scanner.integers())) for key in scanner.members()]
    [('shape', [2, 3])]
    """

    def __init__(self, text: str, where: str):
        self.text = text
        self.where = where
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        """Raises the ValueError."""
        raise ValueError(f"{self.where}: {what}")

    def unexpected(self, wanted: str) -> NoReturn:
        """Raises the ValueError for something else than what the format asks for."""
        found = self.text[self.position : self.position + 20]
        at = f"at character {self.position}"
        self.fail(f"expected {wanted} {at}, " + (f"found {found!r}" if found else "found the end"))

    def _skip_space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # the pattern matches nothing, too
        self.position = match.end()

    def next_is(self, sign: str) -> bool:
        """Whether the next sign is this one, which is then consumed."""
        if not self.text.startswith(sign, self.position):
            self._skip_space()
            if not self.text.startswith(sign, self.position):
                return False
        self.position += len(sign)
        return True

    def expect(self, sign: str) -> None:
        """Consumes this sign."""
        if not self.next_is(sign):
            self.unexpected(repr(sign))

    def string(self) -> str:
        """A string without lone surrogates."""
        if not self.next_is('"'):
            self.unexpected("a string")
        try:
            value, self.position = scanstring(self.text, self.position, True)
            value.encode("utf-8")
        except JSONDecodeError as error:
            self.fail(f"bad string: {error.msg} at character {error.pos}")
        except UnicodeEncodeError:
            self.fail(f"string {clip(value)} holds half a surrogate pair")
        return value

    def integer(self) -> int:
        """An integer between 0 and 2^63 - 1."""
        self._skip_space()
        match = _INTEGER.match(self.text, self.position)
        if match is None:
            self.unexpected("an integer")
        digits = match.group()
        if digits.startswith("-"):
            self.fail(f"negative number {clip(digits)}")
        if len(digits) > 19 or int(digits) > _MAX_INTEGER:
            self.fail(f"number {clip(digits)} is too large")
        self.position = match.end()
        return int(digits)

    def members(self) -> Iterator[str]:
        """The keys of an object, none twice; the caller reads the value after each."""
        self.expect("{")
        seen: set[str] = set()
        while not (self.next_is("}") if not seen else self._ends("}")):
            key = self.string()
            if key in seen:
                self.fail(f"key {clip(key)} is given twice")
            seen.add(key)
            self.expect(":")
            yield key

    def integers(self) -> Iterator[int]:
        """The integers of a list."""
        self.expect("[")
        first = True
        while not (self.next_is("]") if first else self._ends("]")):
            first = False
            yield self.integer()

    def _ends(self, sign: str) -> bool:
        if self.next_is(sign):
            return True
        if not self.next_is(","):
            self.unexpected(f"',' or {sign!r}")
        return False

    def skip(self, depth: int = 0) -> None:
        """Checks any one value and forgets it."""
        if depth > _MAX_DEPTH:
            self.fail(f"nested deeper than {_MAX_DEPTH}")
        if self.next_is('"'):
            self.position -= 1
            self.string()
        elif self.next_is("{"):
            self.position -= 1
            for _ in self.members():
                self.skip(depth + 1)
        elif self.next_is("["):
            ended = self.next_is("]")
            while not ended:
                self.skip(depth + 1)
                ended = self._ends("]")
        else:
            match = _SCALAR.match(self.text, self.position)
            if match is None:
                self.unexpected("a value")
            self.position = match.end()

    def end(self) -> None:
        """Nothing but white space follows."""
        self._skip_space()
        if self.position != len(self.text):
            self.unexpected("the end")
