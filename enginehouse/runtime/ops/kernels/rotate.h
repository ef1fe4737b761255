// A group of 64 values times the orthonormal Walsh-Hadamard matrix (entries ±1/8), which is its own inverse. One
// outlier is spread over the group, so that it no longer decides the int8 step of its neighbours.
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

// In place, distances 32, 16, 8, 4, 2, 1: the order quantization.py adds in.
ALWAYS_INLINE void rotate_group(floats value[4]) {
    floats a = add(value[0], value[2]), b = add(value[1], value[3]);
    floats c = sub(value[0], value[2]), d = sub(value[1], value[3]);
    value[0] = add(a, b), value[1] = sub(a, b);
    value[2] = add(c, d), value[3] = sub(c, d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        value[i] = mul(butterfly_1(butterfly_2(butterfly_4(butterfly_8(value[i])))), splat(0.125f));
}

#endif
