"""The Jinja environment that chat templates run in.

A template comes with a model, so it is somebody else's program. Jinja's immutable sandbox keeps it from Python's
internals and from changing its input; on top of that this module bounds its time and memory: every loop turn and
every call looks at the clock, and operations that can grow a value are checked before they run. What templates
expect beyond Jinja (`tojson` without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`, loop
controls) is what Hugging Face's template documentation names.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_VALUE_CHARS = 64_000_000
"""No string or list that a template makes may be longer."""
_MAX_WIDTH = 100_000
_MAX_INT_BITS = 4096
_WIDE_FORMAT = re.compile(r"\d{6,}")
_WIDTH_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "tojson", "round")
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            *(
                "capitalize",
                "casefold",
                "center",
                "count",
                "endswith",
                "expandtabs",
                "find",
                "format",
                "format_map",
            ),
            *("index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower"),
            *(
                "isnumeric",
                "isprintable",
                "isspace",
                "istitle",
                "isupper",
                "join",
                "ljust",
                "lower",
                "lstrip",
            ),
            *(
                "partition",
                "removeprefix",
                "removesuffix",
                "replace",
                "rfind",
                "rindex",
                "rjust",
                "rpartition",
            ),
            *(
                "rsplit",
                "rstrip",
                "split",
                "splitlines",
                "startswith",
                "strip",
                "swapcase",
                "title",
                "upper",
                "zfill",
            ),
        }
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
"""Methods of Python's own types that templates may call. Whatever is not here (all of `bytes` and of numbers, too)
could grow a value unseen, or take its time inside one call that no clock can end."""

_deadline_s: ContextVar[float] = ContextVar("chat_template_deadline", default=float("inf"))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Within the block, templates of this thread or task raise `SecurityError` after `seconds`."""
    token = _deadline_s.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline_s.reset(token)


def check_time() -> str:
    """Raise `SecurityError` when the time is over."""
    if time.monotonic() > _deadline_s.get():
        raise SecurityError("the chat template takes too long")
    return ""


class ChatTemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja for chat templates. Immutable once made; templates compiled from it may run in several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.check_time = check_time
        self.bounded_concat = _bounded_concat
        for name in _WIDTH_FILTERS:
            self.filters[name] = _bounded_width(self.filters[name])
        self.filters["tojson"] = _bounded_width(_tojson)
        self.filters["join"] = _bounded_join(self.filters["join"])
        self.filters["replace"] = _bounded_replace(self.filters["replace"])
        self.filters["format"] = _bounded_format(self.filters["format"])
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _with_checks(super()._parse(source, name, filename))

    def call(self, context: Any, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Sandboxed call, with the clock and the growth of strings under watch."""
        check_time()
        owner = getattr(callee, "__self__", None)
        if type(owner).__module__ == "builtins" and owner is not None:
            _check_method(owner, callee.__name__, args, kwargs)
        return super().call(context, callee, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's stand-in for `str.format` and `format_map`, with its widths checked first."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The intercepted operators, refused when their result would be huge."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "+":
            if hasattr(left, "__len__") and hasattr(right, "__len__"):
                _check_length(len(left) + len(right))
        elif isinstance(left, str):
            _check_format(left, right)
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _with_checks(template: nodes.Template) -> nodes.Template:
    """Put a look at the clock into every loop, and route `~` through a bounded function."""
    for loop in template.find_all(nodes.For):
        tick = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
    _replace_concats(template)
    return template


def _replace_concats(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(node, name, _concat_call(value))
        elif isinstance(value, list):
            setattr(node, name, [_concat_call(v) if isinstance(v, nodes.Concat) else v for v in value])
    for child in node.iter_child_nodes():
        _replace_concats(child)


def _concat_call(concat: nodes.Concat) -> nodes.Call:
    function = nodes.EnvironmentAttribute("bounded_concat")
    return nodes.Call(function, concat.nodes, [], None, None, lineno=concat.lineno)


def _bounded_concat(*parts: object) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


# --- bounds ------------------------------------------------------------------------------------------------


def _check_length(length: int) -> None:
    if length > MAX_VALUE_CHARS:
        raise SecurityError(f"the chat template makes a value of {length} characters or items")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise SecurityError("the chat template makes a huge number")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for value, count in ((left, right), (right, left)):
        if isinstance(count, int) and hasattr(value, "__len__"):
            _check_length(len(value) * count)


def _check_format(pattern: str, values: Any) -> None:
    """Refuse printf and str.format patterns with six-digit or starred widths."""
    if _WIDE_FORMAT.search(pattern) or ("*" in pattern and "%" in pattern):
        raise SecurityError("the chat template formats with a huge width")
    items = values if isinstance(values, tuple) else (values,)
    longest = max((len(item) for item in items if isinstance(item, str)), default=0)
    _check_length(len(pattern) + (pattern.count("%") + pattern.count("{")) * longest)


def _check_widths(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_WIDTH:
            raise SecurityError(f"the chat template asks for a width of {value}")


def _check_method(owner: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset())
    if name not in allowed:
        raise SecurityError(f"the chat template calls {type(owner).__name__}.{name}, which is not allowed")
    if isinstance(owner, str):
        _check_growth(owner, name, (*args, *kwargs.values()))


def _check_growth(text: str, name: str, values: tuple[Any, ...]) -> None:
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths(values)
        if name == "expandtabs":
            _check_length(len(text) * max((v for v in values if isinstance(v, int)), default=8))
    elif name == "replace" and len(values) >= 2:
        _check_replacement(text, values[0], values[1])
    elif name == "join" and values:
        _join_length(text, values[0])


def _check_replacement(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        occurrences = text.count(old) if old else len(text) + 1
        _check_length(len(text) + occurrences * len(new))


def _join_length(separator: str, items: Any) -> None:
    if isinstance(items, list | tuple):
        _check_length(sum(len(i) for i in items if isinstance(i, str)) + len(separator) * len(items))


def _bounded_width(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_widths((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _bounded_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        items = list(value)
        _join_length(str(d), items)
        return function(eval_ctx, items, d, attribute)

    return bounded


def _bounded_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(eval_ctx: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_replacement(str(s), str(old), str(new))
        return function(eval_ctx, s, old, new, count)

    return bounded


def _bounded_format(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(value), (*args, *kwargs.values()))
        return function(value, *args, **kwargs)

    return bounded


# --- what Hugging Face gives templates ---------------------------------------------------------------------


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
