"""GGUF's block formats decoded one value at a time, straight from their definitions (ggml-common.h).

Slow and plain on purpose: an oracle that shares no code with the decoder under test.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

Decoder = Callable[[bytes], list[float]]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def half(block: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", block, offset)[0])


def low_then_high(quants: bytes) -> list[int]:
    """32 four-bit values: the low halves of 16 bytes, then the high halves."""
    return [byte & 15 for byte in quants] + [byte >> 4 for byte in quants]


def decode_q4_0(block: bytes) -> list[float]:
    scale = half(block, 0)
    return [scale * (q - 8) for q in low_then_high(block[2:18])]


def decode_q4_1(block: bytes) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    return [scale * q + minimum for q in low_then_high(block[4:20])]


def fifth_bits(block: bytes, offset: int) -> list[int]:
    bits = struct.unpack_from("<I", block, offset)[0]
    return [(bits >> index & 1) << 4 for index in range(32)]


def decode_q5_0(block: bytes) -> list[float]:
    scale = half(block, 0)
    quants = zip(low_then_high(block[6:22]), fifth_bits(block, 2), strict=True)
    return [scale * ((low | high) - 16) for low, high in quants]


def decode_q5_1(block: bytes) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2)
    quants = zip(low_then_high(block[8:24]), fifth_bits(block, 4), strict=True)
    return [scale * (low | high) + minimum for low, high in quants]


def decode_q8_0(block: bytes) -> list[float]:
    scale = half(block, 0)
    return [scale * q for q in struct.unpack_from("<32b", block, 2)]


def decode_q2_k(block: bytes) -> list[float]:
    scales, quants = block[:16], block[16:80]
    scale, minimum = half(block, 80), half(block, 82)
    values = []
    for index in range(256):
        part, within = divmod(index, 128)
        shift, position = divmod(within, 32)
        quant = quants[32 * part + position] >> (2 * shift) & 3
        pair = scales[index // 16]
        values.append(scale * (pair & 15) * quant - minimum * (pair >> 4))
    return values


def decode_q3_k(block: bytes) -> list[float]:
    mask, quants, packed = block[:32], block[32:96], block[96:108]
    scale = half(block, 108)
    values = []
    for index in range(256):
        part, within = divmod(index, 128)
        shift, position = divmod(within, 32)
        low = quants[32 * part + position] >> (2 * shift) & 3
        has_high = mask[position] >> (4 * part + shift) & 1
        group = index // 16
        nibble = packed[group] & 15 if group < 8 else packed[group - 8] >> 4
        upper = packed[8 + group % 4] >> (2 * (group // 4)) & 3
        values.append(scale * ((nibble | upper << 4) - 32) * (low - (0 if has_high else 4)))
    return values


def scale_and_minimum(packed: bytes, group: int) -> tuple[int, int]:
    """Six-bit scale and minimum of one of 8 groups, from 12 bytes (Q4_K, Q5_K)."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    upper_scale, upper_minimum = packed[group - 4] >> 6, packed[group] >> 6
    return packed[group + 4] & 15 | upper_scale << 4, packed[group + 4] >> 4 | upper_minimum << 4


def decode_q4_k(block: bytes) -> list[float]:
    scale, minimum, packed, quants = half(block, 0), half(block, 2), block[4:16], block[16:144]
    values = []
    for index in range(256):
        group, position = divmod(index, 32)
        byte = quants[32 * (group // 2) + position]
        quant = byte >> 4 if group % 2 else byte & 15
        factor, offset = scale_and_minimum(packed, group)
        values.append(scale * factor * quant - minimum * offset)
    return values


def decode_q5_k(block: bytes) -> list[float]:
    scale, minimum, packed = half(block, 0), half(block, 2), block[4:16]
    high, quants = block[16:48], block[48:176]
    values = []
    for index in range(256):
        group, position = divmod(index, 32)
        byte = quants[32 * (group // 2) + position]
        quant = (byte >> 4 if group % 2 else byte & 15) | (high[position] >> group & 1) << 4
        factor, offset = scale_and_minimum(packed, group)
        values.append(scale * factor * quant - minimum * offset)
    return values


def decode_q6_k(block: bytes) -> list[float]:
    low, high, scales, scale = (
        block[:128],
        block[128:192],
        struct.unpack_from("<16b", block, 192),
        half(block, 208),
    )
    values = []
    for index in range(256):
        part, within = divmod(index, 128)
        quarter, position = divmod(within, 32)
        byte = low[64 * part + 32 * (quarter % 2) + position]
        nibble = byte >> 4 if quarter >= 2 else byte & 15
        upper = high[32 * part + position] >> (2 * quarter) & 3
        values.append(scale * scales[index // 16] * ((nibble | upper << 4) - 32))
    return values


def decode_iq4_nl(block: bytes) -> list[float]:
    scale = half(block, 0)
    return [scale * IQ4_VALUES[q] for q in low_then_high(block[2:18])]


def decode_iq4_xs(block: bytes) -> list[float]:
    scale, upper, lower, quants = (
        half(block, 0),
        struct.unpack_from("<H", block, 2)[0],
        block[4:8],
        block[8:136],
    )
    values = []
    for group in range(8):
        factor = (lower[group // 2] >> (4 * (group % 2)) & 15) | (upper >> (2 * group) & 3) << 4
        part = low_then_high(quants[16 * group : 16 * group + 16])
        values += [scale * (factor - 32) * IQ4_VALUES[q] for q in part]
    return values


# Name -> (decoder, bytes a block, offsets of fp16 numbers in a block).
BLOCK_TYPES: dict[str, tuple[Decoder, int, tuple[int, ...]]] = {
    "Q4_0": (decode_q4_0, 18, (0,)),
    "Q4_1": (decode_q4_1, 20, (0, 2)),
    "Q5_0": (decode_q5_0, 22, (0,)),
    "Q5_1": (decode_q5_1, 24, (0, 2)),
    "Q8_0": (decode_q8_0, 34, (0,)),
    "Q2_K": (decode_q2_k, 84, (80, 82)),
    "Q3_K": (decode_q3_k, 110, (108,)),
    "Q4_K": (decode_q4_k, 144, (0, 2)),
    "Q5_K": (decode_q5_k, 176, (0, 2)),
    "Q6_K": (decode_q6_k, 210, (208,)),
    "IQ4_NL": (decode_iq4_nl, 18, (0,)),
    "IQ4_XS": (decode_iq4_xs, 136, (0,)),
}
