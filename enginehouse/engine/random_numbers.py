"""Random numbers as a function of (seed, position): nothing is shared, so nothing depends on batch mates."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_WEYL = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same for the same seed and position on every machine.

    Neighbouring seeds and neighbouring positions give unrelated numbers.
    """
    stream = _mix((seed & _MASK) + _WEYL)
    return (_mix(stream + (position + 1) * _WEYL) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014), with the constants of Stafford's variant 13."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
