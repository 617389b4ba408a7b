"""Block sizes of kernels: where a kernel that was not told finds them.

Order: what the caller gives as `config=`, then `with tuned(result)`, then the table shipped for the chip
(`configs/*.json`), then the kernel's own heuristic. All of it belongs to the key of JAX's caches: inside another
`tuned`, or compiled for another chip, a jitted function is traced again.

>>> entry = Entry("symmetric_product", "pallas_tpu.forward", {"n": 256, "k": 256}, {"block": 128, "block_k": 128})
>>> with tuned(TuningResult("v5e", "static", (entry,))):
...     lookup("symmetric_product", "pallas_tpu.forward", {"n": 256, "k": 256})
{'block': 128, 'block_k': 128}
>>> lookup("symmetric_product", "pallas_tpu.forward", {"n": 256, "k": 256}) is None
True
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax

from kernels_pallas import chips

Scalar: TypeAlias = str | int | float | bool | None

FORMAT = 1
"""Version of the JSON that `TuningResult.to_json` writes."""

METHODS = ("static", "measured")
IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The block sizes of one kernel for one case.

    Attributes:
      operation: Folder of the operation.
      kernel: Implementation and pass, such as "pallas_tpu.forward".
      key: The case as the kernel describes it: JSON scalars by name.
      config: Fields of the kernel's config.
      cost: What it costs: estimated cycles where static, seconds where measured; None if unknown.
      heuristic_cost: The same for the kernel's heuristic.
    """

    operation: str
    kernel: str
    key: Mapping[str, Scalar]
    config: Mapping[str, int]
    cost: int | float | None = None
    heuristic_cost: int | float | None = None

    def __post_init__(self) -> None:
        implementation, dot, name = self.kernel.partition(".")
        if implementation not in IMPLEMENTATIONS or not dot or not name:
            raise ValueError(f"kernel must be like 'pallas_tpu.forward', got {self.kernel!r}")
        if not self.operation.isidentifier():
            raise ValueError(f"operation must be the name of an operation, got {self.operation!r}")
        for cost in (self.cost, self.heuristic_cost):
            if cost is not None and not 0 <= cost < float("inf"):
                raise ValueError(f"cost must be a finite number of at least 0, got {cost!r}")
        object.__setattr__(self, "key", MappingProxyType(dict(self.key)))
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))

    @property
    def case(self) -> tuple[str, str, str]:
        """What `lookup` compares."""
        return self.operation, self.kernel, _canonical(self.key)

    def __hash__(self) -> int:
        return hash((self.case, _canonical(self.config)))


@dataclasses.dataclass(frozen=True)
class TuningResult:
    """Block sizes found for one chip; a shipped table holds one.

    Attributes:
      chip: The chip, one of `chips.CHIPS`.
      method: "static" (the compiler's cycle estimates) or "measured".
      entries: One for every kernel and case.
    """

    chip: str
    method: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        if self.chip not in chips.CHIPS:
            raise ValueError(f"chip must be one of {', '.join(chips.CHIPS)}, got {self.chip!r}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if len(self.configs) < len(self.entries):
            raise ValueError("entries must have one entry for every kernel and key, got two for one of them")

    @functools.cached_property
    def configs(self) -> dict[tuple[str, str, str], Mapping[str, int]]:
        """Configs by `Entry.case`."""
        return {entry.case: entry.config for entry in self.entries}

    def merged(self, other: "TuningResult") -> "TuningResult":
        """This result with the entries of `other` added, those for the same case replaced.

        Raises:
          ValueError: Results of different chips or methods.
        """
        for name in ("chip", "method"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"{name} must be {getattr(self, name)!r}, got {getattr(other, name)!r}")
        entries = {entry.case: entry for entry in (*self.entries, *other.entries)}
        return dataclasses.replace(self, entries=tuple(sorted(entries.values(), key=lambda entry: entry.case)))

    def to_json(self) -> str:
        """The result as JSON text, which `from_json` reads."""
        entries = [
            {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(entry).items()} for entry in self.entries
        ]
        lines = ",\n  ".join(json.dumps(entry, sort_keys=True, allow_nan=False) for entry in entries)
        head = json.dumps({"format": FORMAT, "chip": self.chip, "method": self.method})[:-1]
        return f'{head}, "entries": [\n  {lines}\n]}}\n'

    @staticmethod
    def from_json(text: str) -> "TuningResult":
        """Reads what `to_json` wrote.

        Raises:
          ValueError: Not JSON, another version, a key that is missing or unknown, values of another kind.
        """
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"text must be JSON: {error}") from None
        _check_keys("result", record, {"format": int, "chip": str, "method": str, "entries": list})
        if record["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {record['format']!r}")
        entries = []
        for item in record["entries"]:
            required = {"operation": str, "kernel": str, "key": dict, "config": dict}
            _check_keys("entry", item, required, {"cost": _NUMBER, "heuristic_cost": _NUMBER})
            _check_values("key", item["key"], Scalar)
            _check_values("config", item["config"], int)
            entries.append(Entry(**item))
        return TuningResult(record["chip"], record["method"], tuple(entries))


class _State(NamedTuple):
    """What block sizes depend on; hashable, part of the key of JAX's caches."""

    results: tuple[TuningResult, ...] = ()
    tables: bool = True
    chip: str | None = None
    asked: object = None  # see `asked_by`


_STATE = jax.make_user_context(_State())


class _Asked(Exception):
    """Carries what was looked up out of a trace."""


def active() -> _State:
    """What block sizes depend on at this moment besides the call itself; hashable."""
    return _STATE.value


def tuned(result: TuningResult) -> AbstractContextManager[None]:
    """Inside, kernels take the block sizes of `result` where it has some for their case, whatever the chip.

    Results nest, the innermost comes first. Jitted functions are traced again where they were not in this context.

    Args:
      result: From `tuner.tune` or `TuningResult.from_json`.

    Returns:
      A context manager.
    """
    return _changed(lambda state: state._replace(results=(result, *state.results)))


def only_heuristics() -> AbstractContextManager[None]:
    """Inside, kernels that are not told their block sizes choose them by heuristic."""
    return _changed(lambda state: state._replace(results=(), tables=False))


def for_chip(chip: str) -> AbstractContextManager[None]:
    """Inside, kernels take the block sizes of `chip`, whatever this machine has."""
    return _changed(lambda state: state._replace(chip=chip))


def asked_by(function: Callable[..., Any], *args: Any) -> tuple[str, str, dict[str, Scalar]] | None:
    """The first (operation, kernel, key) that a function looks up; what comes after it is not traced.

    Args:
      function: What `jax.eval_shape` takes.
      *args: Its arguments.

    Returns:
      None if it looks nothing up.
    """
    try:
        with _changed(lambda state: state._replace(asked=object())):
            jax.eval_shape(lambda *args: function(*args), *args)  # traced again whatever was traced before
    except _Asked as found:
        operation, kernel, key = found.args
        return operation, kernel, key
    return None


@contextmanager
def _changed(change: Any) -> Iterator[None]:
    with _STATE(change(_STATE.value)):
        yield


def chip() -> str | None:
    """The chip that kernels are compiled for: that of `for_chip`, else this machine's; None if it is none we know."""
    return active().chip or chips.present()


def lookup(operation: str, kernel: str, key: Mapping[str, Scalar]) -> dict[str, int] | None:
    """The block sizes of a kernel that was not told any.

    Args:
      operation: Folder of the operation.
      kernel: Implementation and pass, such as "pallas_tpu.forward".
      key: The case: JSON scalars by name.

    Returns:
      Fields of the kernel's config; None: no context and no table has this case, the kernel's heuristic decides.
    """
    state = active()
    if state.asked is not None:
        raise _Asked(operation, kernel, dict(key))
    case = (operation, kernel, _canonical(key))
    for result in state.results:
        if case in result.configs:
            return dict(result.configs[case])
    table = shipped(chip()) if state.tables else None
    found = None if table is None else table.configs.get(case)
    return None if found is None else dict(found)


@functools.cache
def shipped(chip: str | None) -> TuningResult | None:
    """The table that comes with this package for `chip`, None if there is none."""
    if chip is None:
        return None
    path = resources.files("kernels_pallas") / "configs" / f"{chip}.json"
    return TuningResult.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None


def _canonical(mapping: Mapping[str, Any]) -> str:
    return json.dumps(dict(mapping), sort_keys=True)


_NUMBER = int | float | None


def _check_keys(
    what: str, record: Any, required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises a ValueError unless `record` has these keys, with values of these types."""
    if not isinstance(record, dict):
        raise ValueError(f"{what} must be an object, got {record!r}")
    types = {**required, **optional}
    if unknown := sorted(set(record) - set(types)):
        raise ValueError(f"{what} has unknown keys {unknown}; allowed: {sorted(types)}")
    if absent := sorted(set(required) - set(record)):
        raise ValueError(f"{what} must have the keys {absent}")
    for name, value in record.items():
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise ValueError(f"{name} must be {_JSON_NAMES[types[name]]}, got {value!r}")


_JSON_NAMES = {int: "an integer", str: "a string", list: "a list", dict: "an object", _NUMBER: "a number"}


def _check_values(what: str, record: Mapping[str, Any], kind: Any) -> None:
    for name, value in record.items():
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{what} must hold {'integers' if kind is int else 'JSON scalars'}, got {name}={value!r}")
