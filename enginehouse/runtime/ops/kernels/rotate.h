// A group of 64 values times an orthonormal matrix: fixed random signs, then the Walsh-Hadamard matrix with entries
// ±1/8. One outlier is spread over the group, so that it no longer decides the int8 step of its neighbours; without
// the signs a group of equal values would become an outlier itself.
#ifndef ENGINEHOUSE_ROTATE_H
#define ENGINEHOUSE_ROTATE_H

#include "simd.h"

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define PERMUTE(a, ...) __builtin_shufflevector(a, a, __VA_ARGS__)
#endif
#endif
#if !defined(PERMUTE) // GCC before 12
#define PERMUTE(a, ...) __builtin_shuffle(a, (int_part){__VA_ARGS__})
#endif

#if LANES == 16
#define SWAP_1(a) PERMUTE(a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define SWAP_2(a) PERMUTE(a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_4(a) PERMUTE(a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_8(a) PERMUTE(a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define SWAP_1(a) PERMUTE(a, 1, 0, 3, 2, 5, 4, 7, 6)
#define SWAP_2(a) PERMUTE(a, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_4(a) PERMUTE(a, 4, 5, 6, 7, 0, 1, 2, 3)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define SWAP_1(a) PERMUTE(a, 1, 0, 3, 2)
#define SWAP_2(a) PERMUTE(a, 2, 3, 0, 1)
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

// Lanes whose number has the bit `distance` become (partner - lane), the others (partner + lane).
#define BUTTERFLY_IN_PART(distance, swap)                                                                          \
    ALWAYS_INLINE floats butterfly_##distance(floats a) {                                                          \
        const int_part lanes = LANE_NUMBERS;                                                                       \
        const int_part sign = ((lanes & distance) != 0) & INT32_MIN;                                               \
        EACH_PART a.part[i] = swap(a.part[i]) + (float_part)((int_part)a.part[i] ^ sign);                          \
        return a;                                                                                                  \
    }

#define BUTTERFLY_ACROSS_PARTS(distance)                                                                           \
    ALWAYS_INLINE floats butterfly_##distance(floats a) {                                                          \
        floats out;                                                                                                \
        EACH_PART {                                                                                                \
            float_part partner = a.part[i ^ (distance / LANES)];                                                   \
            out.part[i] = i & (distance / LANES) ? partner - a.part[i] : partner + a.part[i];                      \
        }                                                                                                          \
        return out;                                                                                                \
    }

BUTTERFLY_IN_PART(1, SWAP_1)
BUTTERFLY_IN_PART(2, SWAP_2)
#if LANES >= 8
BUTTERFLY_IN_PART(4, SWAP_4)
#else
BUTTERFLY_ACROSS_PARTS(4)
#endif
#if LANES >= 16
BUTTERFLY_IN_PART(8, SWAP_8)
#else
BUTTERFLY_ACROSS_PARTS(8)
#endif

#define SIGNS 0x9e3779b97f4a7c15u // bit i: value i is negated; the golden ratio's digits, as in quantization.py
#define SIGN(i) ((SIGNS) >> (i) & 1 ? INT32_MIN : 0)
#define FOUR_SIGNS(i) SIGN(i), SIGN(i + 1), SIGN(i + 2), SIGN(i + 3)
#define SIXTEEN_SIGNS(i) FOUR_SIGNS(i), FOUR_SIGNS(i + 4), FOUR_SIGNS(i + 8), FOUR_SIGNS(i + 12)

ALWAYS_INLINE void flip_signs(floats value[4]) {
    static const int32_t signs[64] = {SIXTEEN_SIGNS(0), SIXTEEN_SIGNS(16), SIXTEEN_SIGNS(32), SIXTEEN_SIGNS(48)};
#pragma GCC unroll 4
    for (int group = 0; group < 4; group++) {
        ints flips;
        memcpy(&flips, signs + 16 * group, sizeof flips);
        EACH_PART value[group].part[i] = (float_part)((int_part)value[group].part[i] ^ flips.part[i]);
    }
}

// In place, distances 32, 16, 8, 4, 2, 1: the order quantization.py adds in.
ALWAYS_INLINE void hadamard(floats value[4]) {
    floats a = add(value[0], value[2]), b = add(value[1], value[3]);
    floats c = sub(value[0], value[2]), d = sub(value[1], value[3]);
    value[0] = add(a, b), value[1] = sub(a, b);
    value[2] = add(c, d), value[3] = sub(c, d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        value[i] = mul(butterfly_1(butterfly_2(butterfly_4(butterfly_8(value[i])))), splat(0.125f));
}

ALWAYS_INLINE void rotate_group(floats value[4]) {
    flip_signs(value);
    hadamard(value);
}

// The Hadamard matrix is its own inverse, and so are the signs.
ALWAYS_INLINE void unrotate_group(floats value[4]) {
    hadamard(value);
    flip_signs(value);
}

#endif
