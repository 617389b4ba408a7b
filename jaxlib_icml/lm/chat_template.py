"""Runs a chat template that nobody vouches for, on messages that nobody vouches for.

A template is a Jinja program from a model's files. It runs in Jinja's immutable sandbox, cut down to what chat
templates use: named filters, tests and methods, no includes, no recursion through loops. Every value it makes,
every turn of a loop and every call is charged to a budget that grows with the messages, so that it ends after a
few seconds at most and cannot fill the memory.

The template never holds a message's text. It holds a placeholder of characters that occur nowhere else;
methods and filters answer for the text behind it (``content | trim`` is a placeholder of the trimmed text), and
the result is cut at the placeholders. So it is always known which characters the template wrote and which came
with a message.
"""

import contextvars
import datetime
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

try:
    import jinja2
    import jinja2.ext
    import jinja2.filters
    import jinja2.nodes
    import jinja2.runtime
    import jinja2.sandbox
    import jinja2.tests
    import jinja2.utils
    import jinja2.visitor
except ImportError as error:
    raise ImportError("chat templates need the package jinja2: pip install 'jaxlib-icml[lm]'") from error

from jaxlib_icml.lm.chat_placeholders import RUN, TEXT_METHODS, TEXT_QUERIES, Refused, Run, Segment

__all__ = ["run_template"]

MAX_TEMPLATE_CHARACTERS = 100_000
_BUDGET = 3_000_000
_BUDGET_PER_MESSAGE = 20_000
_BUDGET_PER_CHARACTER = 20
_CALL_WEIGHT = 100
_MAX_RANGE = 100_000

_OTHER_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("get", "items", "keys", "values"),
    list: ("index", "count"),
    tuple: ("index", "count"),
}
# Objects of Jinja whose attributes a template may read: a loop's counters, a namespace's variables.
_OPEN_OBJECTS = (jinja2.runtime.LoopContext, jinja2.utils.Namespace)
# Jinja's own; all take time and space in proportion to what they are given.
_LIST_FILTERS = (
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "sort",
    "unique",
    "min",
    "max",
    "dictsort",
    "items",
)
_TYPE_TESTS = (
    *("defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "true", "false"),
    *("mapping", "iterable", "sequence", "odd", "even", "divisibleby", "filter", "test", "callable"),
)
_COMPARISONS = (
    *("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=", "gt", "greaterthan", ">", "ge", ">="),
    *("in", "upper", "lower"),
)


def run_template(source: str, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any]) -> list[Segment]:
    """Renders messages through a chat template.

    Args:
      source: the Jinja template.
      messages: per message its fields; all but "role" are hidden from the template.
      variables: what the template knows besides ``messages``, such as ``bos_token``.

    Returns:
      What was rendered, in order.

    Raises:
      ValueError: the template is too long, is malformed, uses what it may not, takes too long, cuts a
        placeholder apart, or raises an error of its own.
    """
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ValueError(f"template has {len(source)} characters, at most {MAX_TEMPLATE_CHARACTERS} are allowed")
    hidden = [text for message in messages for name, text in message.items() if name != "role"]
    used = set(source).union(*hidden, *(str(value) for value in variables.values()))
    budget = _BUDGET + _BUDGET_PER_MESSAGE * len(messages) + _BUDGET_PER_CHARACTER * sum(map(len, hidden))
    run = Run(used, budget, writable=(str, int, float, type(None), jinja2.Undefined))
    shown = [
        {name: text if name == "role" else run.hide(text, index) for name, text in message.items()}
        for index, message in enumerate(messages)
    ]
    token = RUN.set(run)
    try:
        # Compiled where there is no run, so that nothing is computed, uncharged, ahead of time.
        program = contextvars.Context().run(_compile, source)
        rendered = "".join(program.generate(**variables, messages=shown))
    except Refused as error:
        raise ValueError(f"chat template: {error}") from None
    except Exception as error:  # whatever a hostile template can provoke
        raise ValueError(f"chat template: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        RUN.reset(token)
    return run.segments(rendered)


def _joined(value: Any, d: Any = "", attribute: Any = None) -> str:
    run = RUN.get()
    items = run.listed(value)
    if attribute is not None:
        raise Refused("join: attribute is not supported, use map(attribute=...)")
    return run.join(items, separator=run.as_text(d))


def _text_filter(method: str) -> Callable[..., Any]:
    def apply(value: Any, *args: Any, **kwargs: Any) -> Any:
        run = RUN.get()
        return run.method(run.as_text(value), method, args, kwargs)

    return apply


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return RUN.get().to_json(value, bool(ensure_ascii), indent, separators, bool(sort_keys))


def _element(position: int) -> Callable[[Any], Any]:
    def take(value: Any) -> Any:
        items = RUN.get().listed(value)
        return items[position] if items else jinja2.Undefined("no item in an empty sequence")

    return take


def _number(kind: Callable[[Any], Any]) -> Callable[..., Any]:
    def convert(value: Any, default: Any = 0) -> Any:
        try:
            return kind(RUN.get().reveal(value))
        except (TypeError, ValueError, OverflowError):
            return default

    return convert


def _rounded(value: Any, precision: int = 0) -> Any:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise Refused(f"round: precision must lie in [-20, 20], got {str(precision)[:40]}")
    return round(float(value), precision)


def _titled(value: Any) -> str:
    run = RUN.get()
    text = run.as_text(value)
    whole = run.whole(text)
    title: Callable[[str], str] = jinja2.filters.do_title
    return title(text) if whole is None else run.hide(title(whole[0]), whole[1])


def _length(value: Any) -> int:
    return len(RUN.get().reveal(value) if isinstance(value, str) else value)


def _reversed(value: Any) -> Any:
    run = RUN.get()
    if isinstance(value, str):
        return run.join(run.listed(value)[::-1])
    return run.listed(value)[::-1]


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    run = RUN.get()
    text = run.as_text(value)
    whole = run.whole(text)
    content = text if whole is None else whole[0]
    space = width if isinstance(width, str) else " " * min(int(width), 100)
    lines = content.splitlines() or [""]
    run.spend(len(content) + len(lines) * (len(space) + 1))
    rest = [space + line if blank or line else line for line in lines[1:]]
    result = "\n".join([(space if first else "") + lines[0], *rest])
    return result if whole is None else run.hide(result, whole[1])


def _charged(function: Any, reveal: bool) -> Callable[..., Any]:
    """One of Jinja's own filters or tests, with its arguments charged (and, for tests, revealed)."""

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> Any:
        run = RUN.get()
        for arg in args:
            run.measure(arg)
        return function(*(run.reveal(arg) for arg in args) if reveal else args, **kwargs)

    return apply


# Steps that the compiler below puts into the program. Their names hold a space: no template can call them.
def _loop_items(value: Any, weight: int) -> Any:
    run = RUN.get()
    items = [] if isinstance(value, jinja2.Undefined) else run.listed(value)
    return _Loop(run, items, weight)


class _Loop:
    """The items of a loop; each turn is charged with the size of the loop's body."""

    def __init__(self, run: Run, items: list[Any], weight: int) -> None:
        self._run, self._items, self._weight = run, items, weight

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Any:
        for item in self._items:
            self._run.spend(self._weight)
            yield item


def _container(value: Any) -> Any:
    RUN.get().measure(value)
    return value


def _compared(value: Any) -> Any:
    run = RUN.get()
    run.measure(value)
    return run.reveal(value)


def _concatenated(values: list[Any]) -> str:
    return RUN.get().join(values)


def _sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    run = RUN.get()
    whole = run.whole(value)
    if whole is not None:
        return run.hide(whole[0][start:stop:step], whole[1])
    result = value[start:stop:step]
    run.spend(len(result))
    return result


def _raise_exception(message: Any) -> None:
    raise Refused(f"refuses these messages: {str(RUN.get().reveal(message))[:300]}")


def _strftime_now(pattern: Any) -> str:
    if not isinstance(pattern, str) or len(pattern) > 100:
        raise Refused("strftime_now needs a short pattern")
    return datetime.datetime.now().strftime(pattern)


def _range(*args: Any) -> range:
    result = range(*args)
    if len(result) > _MAX_RANGE:
        raise Refused(f"range has {len(result)} numbers, at most {_MAX_RANGE} are allowed")
    return result


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    """The template as a program whose every loop, call and new value is charged to the current `Run`."""
    environment = _Environment()
    tree = environment.parse(source)
    weights = [_weigh(node) for node in tree.find_all((jinja2.nodes.Macro, jinja2.nodes.CallBlock))]
    environment.call_weight = max(weights, default=1)
    tree = _Guard().visit(tree).set_environment(environment)
    code = environment.compile(tree, name="chat_template", filename="<chat template>")
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _weigh(node: Any) -> int:
    """About the work of running a part of the program once."""
    weight = 0
    stack = [node]
    while stack:
        item = stack.pop()
        value = item.data if isinstance(item, jinja2.nodes.TemplateData) else getattr(item, "value", None)
        weight += 1 + (len(value) if isinstance(value, str) else 0)
        stack += item.iter_child_nodes()
    return weight


def _step(name: str, value: Any, *args: Any) -> Any:
    return jinja2.nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _Guard(jinja2.visitor.NodeTransformer):
    """Puts the charging steps into the program and refuses what chat templates do not need."""

    def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        refused = (
            jinja2.nodes.Include,
            jinja2.nodes.Import,
            jinja2.nodes.FromImport,
            jinja2.nodes.Extends,
            jinja2.nodes.Block,
        )
        if isinstance(node, (*refused, jinja2.nodes.EvalContextModifier)):
            raise Refused(f"may not use {type(node).__name__.lower()} (line {node.lineno})")
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: Any) -> Any:
        if node.recursive:
            raise Refused(f"may not use a recursive loop (line {node.lineno})")
        weight = sum(map(_weigh, node.body)) + (_weigh(node.test) if node.test else 0)
        node = self.generic_visit(node)
        node.iter = _step("loop items", node.iter, jinja2.nodes.Const(weight))
        return node

    def visit_Concat(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return _step("text concatenated", jinja2.nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: Any) -> Any:
        return _step("new container", self.generic_visit(node))

    visit_Dict = visit_List

    def visit_Tuple(self, node: Any) -> Any:
        node = self.generic_visit(node)
        return _step("new container", node) if node.ctx == "load" else node

    def visit_Compare(self, node: Any) -> Any:
        node = self.generic_visit(node)
        node.expr = _step("value compared", node.expr)
        for operand in node.ops:
            operand.expr = _step("value compared", operand.expr)
        return node

    def visit_Getitem(self, node: Any) -> Any:
        node = self.generic_visit(node)
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return node
        bounds = [part or jinja2.nodes.Const(None) for part in (node.arg.start, node.arg.stop, node.arg.step)]
        return _step("text sliced", node.node, *bounds)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the model's own words for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "%", "**"))
    call_weight = 1

    def __init__(self) -> None:
        extensions = [jinja2.ext.loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=self._written, extensions=extensions
        )
        functions = {
            "range": _range,
            "dict": dict,
            "namespace": jinja2.utils.Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self._functions = tuple(functions.values())
        self.globals = functions
        self.filters = _filters()
        self.tests = {name: _charged(self.tests[name], reveal=False) for name in _TYPE_TESTS}
        self.tests |= {name: _charged(jinja2.tests.TESTS[name], reveal=True) for name in _COMPARISONS}

    @staticmethod
    def _written(value: Any) -> str:
        return RUN.get().as_text(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, str):
            return attr in TEXT_METHODS or attr in TEXT_QUERIES
        return isinstance(obj, _OPEN_OBJECTS) or attr in _OTHER_METHODS.get(type(obj), ())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise Refused(f"may not use {attribute[:80]!r} of an object of type {type(obj).__name__}")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return RUN.get().arithmetic(operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, str) and isinstance(argument, int):
            run = RUN.get()
            whole = run.whole(obj)
            if whole is not None and -len(whole[0]) <= argument < len(whole[0]):
                return run.hide(whole[0][argument], whole[1])
            return obj[argument] if whole is None and -len(obj) <= argument < len(obj) else self.undefined()
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = RUN.get()
        run.spend(1)
        owner = getattr(obj, "__self__", None)
        # Jinja hands its own variables on to functions that want the context.
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if isinstance(obj, types.BuiltinMethodType) and isinstance(owner, str):
            return run.method(owner, obj.__name__, args, given)
        if isinstance(obj, jinja2.runtime.Macro):
            run.spend(_CALL_WEIGHT + self.call_weight)
        elif not (
            any(obj is function for function in self._functions)
            or isinstance(obj, jinja2.Undefined)
            or isinstance(owner, (*_OTHER_METHODS, jinja2.runtime.LoopContext))
        ):
            raise Refused(f"may not call an object of type {type(obj).__name__}")
        for value in (*args, *given.values(), *([] if owner is None else [owner])):
            run.measure(value)
        result = super().call(context, obj, *args, **kwargs)
        run.measure(list(result) if isinstance(result, type({}.items()) | type({}.values())) else result)
        return result


def _filters() -> dict[str, Callable[..., Any]]:
    filters: dict[str, Callable[..., Any]] = {
        name: _charged(jinja2.filters.FILTERS[name], reveal=False) for name in _LIST_FILTERS
    }
    filters |= {name: _text_filter(name) for name in ("upper", "lower", "capitalize", "replace")}
    filters |= {
        "trim": _text_filter("strip"),
        "title": _titled,
        "default": jinja2.filters.FILTERS["default"],
        "d": jinja2.filters.FILTERS["d"],
        "length": _length,
        "count": _length,
        "int": _number(int),
        "float": _number(float),
        "abs": jinja2.filters.FILTERS["abs"],
        "round": _rounded,
        "string": lambda value: RUN.get().as_text(value),
        "safe": lambda value: RUN.get().as_text(value),
        "list": lambda value: RUN.get().listed(value),
        "first": _element(0),
        "last": _element(-1),
        "reverse": _reversed,
        "join": _joined,
        "indent": _indent,
        "tojson": _to_json,
        "loop items": _loop_items,
        "new container": _container,
        "value compared": _compared,
        "text concatenated": _concatenated,
        "text sliced": _sliced,
    }
    return filters
