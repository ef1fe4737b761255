"""How models write calls, and which of the ways is a model's own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

FormatName = Literal["hermes", "llama3", "mistral", "generic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls: a marker, then JSON with a name and arguments, then an end.

    A forced answer is `opening`, calls joined by `separator`, `closing`, and each call is
    `before_name NAME before_arguments ARGUMENTS after_arguments`. What a model writes freely may differ in white
    space, and may have a list of calls where one is expected.
    """

    name: FormatName
    marker: str
    """Text that begins a call, wherever it stands. A special token in some models."""
    end: str = ""
    """Text that follows a call, and is no content."""
    is_bare: bool = False
    """A call may also begin the output, or follow a call, without the marker."""
    opening: str = ""
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    closing: str = ""
    opening_is_marker: bool = False
    """The forced answer begins with the marker, as a special token where the model has it as one."""
    in_template: bool = True
    """The model's template shows tools, calls and results; otherwise messages of ours do."""


HERMES = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    end="</tool_call>",
    before_name='<tool_call>\n{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}\n</tool_call>",
    separator="\n",
)
"""Hermes, Qwen 2.5 and 3: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, one for each call."""

GENERIC = ToolFormat(
    name="generic",
    marker=HERMES.marker,
    end=HERMES.end,
    before_name=HERMES.before_name,
    before_arguments=HERMES.before_arguments,
    after_arguments=HERMES.after_arguments,
    separator=HERMES.separator,
    in_template=False,
)
"""The same text for models whose template knows no tools: a system message of ours explains it."""

LLAMA3 = ToolFormat(
    name="llama3",
    marker="<|python_tag|>",
    is_bare=True,
    before_name='{"name": "',
    before_arguments='", "parameters": ',
    after_arguments="}",
    separator="; ",
)
"""Llama 3.1 to 3.3: the whole answer is `{"name": …, "parameters": {…}}`, sometimes after a tag."""

MISTRAL = ToolFormat(
    name="mistral",
    marker="[TOOL_CALLS]",
    opening="[",
    before_name='{"name": "',
    before_arguments='", "arguments": ',
    after_arguments="}",
    separator=", ",
    closing="]",
    opening_is_marker=True,
)
"""Mistral with its v1 to v7 tokenizers: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`."""

FORMATS: dict[str, ToolFormat] = {fmt.name: fmt for fmt in (HERMES, LLAMA3, MISTRAL, GENERIC)}

_KNOWS_TOOLS = re.compile(r"\btools\b")
_LLAMA_CALL = re.compile(r'"parameters\\?": ')


def choose_format(template: str | None, setting: str = "auto") -> ToolFormat:
    """The format of a model with this chat template (its Jinja source), unless `setting` names another."""
    if setting != "auto":
        return FORMATS[setting]
    if template is None or _KNOWS_TOOLS.search(template) is None:
        return GENERIC
    if HERMES.marker in template:
        return HERMES
    # Newer templates write `[TOOL_CALLS]name[ARGS]{…}`, which is another format.
    if MISTRAL.marker in template and "[ARGS]" not in template:
        return MISTRAL
    if "ipython" in template and _LLAMA_CALL.search(template) is not None:
        return LLAMA3
    return GENERIC
