"""Reading a Hugging Face `config.json`: options are taken with their type checked, or refused by name.

An option that changes the computation and is not implemented must never be skipped: the model would load and
answer nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.errors import CorruptModelError, UnsupportedModelError
from enginehouse.runtime.config import RopeConfig
from enginehouse.runtime.ops.native import MAX_HEAD_DIM, MAX_HEADS_PER_KV_HEAD


class HFOptions:
    """Typed access to one configuration. Every error names the option and the model type."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options
        self.model_type = str(options.get("model_type"))

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; None or absent gives `default`. Raises `CorruptModelError`."""
        value = self.options.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CorruptModelError(
                f"{self.model_type} configuration: {name} is {value!r}, not a positive integer"
            )
        return value

    def number(self, name: str, default: float) -> float:
        """A finite positive number. Raises `CorruptModelError`."""
        return _positive(self.options.get(name), default, f"{self.model_type} configuration: {name}")

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; None or absent gives `default`."""
        value = self.options.get(name)
        return default if value is None else bool(value)

    def choice(self, name: str, default: str, supported: Sequence[str]) -> str:
        """One of the strings we implement. Raises `UnsupportedModelError`."""
        value = self.options.get(name) or default
        if value not in supported:
            raise UnsupportedModelError(
                f"{self.model_type} with {name}={value!r} is not supported; supported: {', '.join(supported)}"
            )
        return str(value)

    def require(self, name: str, expected: object) -> None:
        """Refuses every value of `name` but the `expected` one, and absence. Raises `UnsupportedModelError`."""
        value = self.options.get(name)
        if value is not None and value != expected:
            raise UnsupportedModelError(
                f"{self.model_type} with {name}={value!r} is not supported; only {name}={expected!r} is"
            )

    def divided(self, total_name: str, total: int, parts_name: str, parts: int) -> int:
        """`total / parts`, which must be whole. Raises `CorruptModelError`."""
        if total % parts:
            raise CorruptModelError(
                f"{self.model_type} configuration: {total_name} {total} is no multiple of {parts_name} {parts}"
            )
        return total // parts

    def check_heads(self, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
        """Refuses head counts and widths that the attention kernel has no room for."""
        self.divided("num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedModelError(
                f"{self.model_type} with head_dim={head_dim} is not supported; at most {MAX_HEAD_DIM} is"
            )
        if num_heads > MAX_HEADS_PER_KV_HEAD * num_kv_heads:
            raise UnsupportedModelError(
                f"{self.model_type} with {num_heads} query heads on num_key_value_heads={num_kv_heads} is not "
                f"supported; at most {MAX_HEADS_PER_KV_HEAD} query heads can share one"
            )

    def max_context(self, default: int, window: int | None) -> int:
        """`max_position_embeddings`, limited to the sliding window.

        Up to the window's length sliding and full attention are the same, so that the shorter context is
        served exactly, without an attention that slides.
        """
        context = self.integer("max_position_embeddings", default)
        return context if window is None else min(context, window)

    def sliding_window(self, *, enabled: bool, default: int | None) -> int | None:
        """The window in tokens when some layer uses one, else None. Raises `UnsupportedModelError`."""
        layer_types = set(self.options.get("layer_types") or ())
        unknown = layer_types - {"full_attention", "sliding_attention"}
        if unknown:
            raise UnsupportedModelError(
                f"{self.model_type} with layer type {sorted(unknown)[0]!r} is not supported"
            )
        if not enabled and "sliding_attention" not in layer_types:
            return None
        if "sliding_window" in self.options and self.options["sliding_window"] is None:
            return None
        return self.integer("sliding_window", default)

    def rope(self, head_dim: int, default_theta: float) -> RopeConfig:
        """RoPE from `rope_parameters` (newer) or `rope_theta` and `rope_scaling`.

        Raises `UnsupportedModelError` for a scaling that is not implemented, naming it.
        """
        parameters = self.options.get("rope_parameters") or {}
        scaling = {**(self.options.get("rope_scaling") or {}), **parameters}
        label = f"{self.model_type} configuration: RoPE"
        theta = _positive(
            parameters.get("rope_theta", self.options.get("rope_theta")), default_theta, f"{label} theta"
        )
        for name in ("partial_rotary_factor", "rotary_pct"):
            rotated = scaling.get(name, self.options.get(name))
            if rotated is not None and rotated != 1:
                raise UnsupportedModelError(f"{self.model_type} with {name}={rotated!r} is not supported")
        if head_dim % 2:
            raise CorruptModelError(f"{label} needs an even head_dim, not {head_dim}")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "default":
            return RopeConfig(theta=theta)
        if kind == "linear":
            return RopeConfig(
                theta=theta,
                scaling="linear",
                factor=_positive(scaling.get("factor"), None, f"{label} factor"),
            )
        if kind == "llama3":
            return self._llama3(theta, scaling, label)
        if kind == "factors":
            return self._factors(theta, scaling, head_dim, label)
        raise UnsupportedModelError(
            f"RoPE scaling {kind!r} of {self.model_type} is not supported; supported: default, linear, llama3"
        )

    def _llama3(self, theta: float, scaling: Mapping[str, Any], label: str) -> RopeConfig:
        original = scaling.get("original_max_position_embeddings")
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=_positive(scaling.get("factor"), None, f"{label} factor"),
            low_freq_factor=_positive(scaling.get("low_freq_factor"), 1.0, f"{label} low_freq_factor"),
            high_freq_factor=_positive(scaling.get("high_freq_factor"), 4.0, f"{label} high_freq_factor"),
            original_max_context=int(_positive(original, None, f"{label} original_max_position_embeddings")),
        )

    def _factors(self, theta: float, scaling: Mapping[str, Any], head_dim: int, label: str) -> RopeConfig:
        factors = tuple(
            _positive(factor, None, f"{label} factors") for factor in scaling.get("factors") or ()
        )
        if len(factors) != head_dim // 2:
            raise CorruptModelError(
                f"{label} has {len(factors)} factors; head_dim {head_dim} needs half as many"
            )
        return RopeConfig(theta=theta, scaling="factors", factors=factors)


def _positive(value: object, default: float | None, label: str) -> float:
    if value is None:
        value = default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise CorruptModelError(f"{label} is {value!r}, not a positive number")
    return float(value)
