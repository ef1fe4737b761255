"""Where a JSON value ends in text that arrives in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INTERESTING = re.compile(r'["{}\[\]]')
_STRING_END = re.compile(r'["\\]')


@dataclass(slots=True)
class JsonScan:
    """Follows brackets and strings of one object or array, so that each character is looked at once.

    It finds the end of a value that is valid; whether it is, a parser must say.
    """

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def push(self, text: str, start: int = 0) -> int | None:
        """Go on with `text[start:]`; the index behind the value's last character, or None if more must come.

        The first character ever pushed must be a bracket.
        """
        position = start
        while position < len(text):
            if self.escaped:
                self.escaped = False
                position += 1
                continue
            found = (_STRING_END if self.in_string else _INTERESTING).search(text, position)
            if found is None:
                return None
            position = found.end()
            char = found[0]
            if char == "\\":
                self.escaped = True
            elif char == '"':
                self.in_string = not self.in_string
            elif char in "{[":
                self.depth += 1
            else:
                self.depth -= 1
                if self.depth == 0:
                    return position
        return None
