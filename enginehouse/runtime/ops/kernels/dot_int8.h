// The integer dot product of one group: sums[row] = Σ over 64 inputs of a[row] · w, for 16 outputs, one version for
// each instruction set. Integer sums are exact, so the versions agree and may add in any order.
#ifndef ENGINEHOUSE_DOT_INT8_H
#define ENGINEHOUSE_DOT_INT8_H

#include "simd.h"

struct dot_group {
    const int8_t *weight;       // [16 quarters][16 outputs][4 inputs]
    const int8_t *input;        // [rows][64] at a distance of
    int64_t input_stride;       // bytes between rows
    const int32_t *input_sum;   // one a row, at a distance of
    int64_t input_sum_stride;   // elements between rows
};

#define QUARTERS (GROUP / 4)
#define MAX_DOT_ROWS 8

#if defined(SIMD_AVX512)
#define DOT_NAME "avx512vnni"
#define DOT_ROWS 8
#elif defined(SIMD_AVX2) && defined(__AVXVNNI__)
#define DOT_NAME "avxvnni"
#define DOT_ROWS 4
#elif defined(SIMD_AVX2)
#define DOT_NAME "avx2"
#define DOT_ROWS 4
#elif defined(SIMD_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define DOT_NAME "neon-dotprod"
#define DOT_ROWS 4
#elif defined(SIMD_NEON)
#define DOT_NAME "neon"
#define DOT_ROWS 2
#else
#define DOT_NAME "generic"
#define DOT_ROWS 2
#endif

ALWAYS_INLINE int32_t four_bytes(const int8_t *from) {
    int32_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

#if defined(SIMD_AVX512) || defined(__AVXVNNI__)

// vpdpbusd multiplies unsigned by signed bytes: weights become w + 128 (their top bit flipped) and the sum starts at
// -128 · Σa. Few rows use several sums each, because one would wait for the instruction's own latency.
ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
    enum { MAX_CHAINS = 4 };
    int chains = rows >= 4 ? 1 : rows >= 2 ? 2 : MAX_CHAINS;
    ints chain[MAX_DOT_ROWS][MAX_CHAINS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        chain[row][0] = splat_int(g.input_sum[row * g.input_sum_stride] * -128);
#pragma GCC unroll 4
        for (int c = 1; c < chains; c++) chain[row][c] = splat_int(0);
    }
#pragma GCC unroll 16
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        const int8_t *weight = g.weight + quarter * PANEL * 4;
        int c = quarter % chains;
#if defined(SIMD_AVX512)
        __m512i w = _mm512_xor_si512(_mm512_loadu_si512(weight), _mm512_set1_epi8(-128));
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            __m512i a = _mm512_set1_epi32(four_bytes(g.input + row * g.input_stride + quarter * 4));
            chain[row][c].part[0] = (int_part)_mm512_dpbusd_epi32((__m512i)chain[row][c].part[0], w, a);
        }
#else
        const __m256i *halves = (const __m256i *)weight;
        __m256i flip = _mm256_set1_epi8(-128);
        __m256i w0 = _mm256_xor_si256(_mm256_loadu_si256(halves), flip);
        __m256i w1 = _mm256_xor_si256(_mm256_loadu_si256(halves + 1), flip);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            __m256i a = _mm256_set1_epi32(four_bytes(g.input + row * g.input_stride + quarter * 4));
            int_part *sum = chain[row][c].part;
            sum[0] = (int_part)_mm256_dpbusd_avx_epi32((__m256i)sum[0], w0, a);
            sum[1] = (int_part)_mm256_dpbusd_avx_epi32((__m256i)sum[1], w1, a);
        }
#endif
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        sums[row] = chain[row][0];
#pragma GCC unroll 4
        for (int c = 1; c < chains; c++) sums[row] = add_int(sums[row], chain[row][c]);
    }
}

#elif defined(SIMD_AVX2)

// vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits. |w| · (a with the sign of w) is the same
// product, and 2 · 127 · 127 fits: it never saturates, which w + 128 would.
ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = splat_int(0);
    __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 2
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        const __m256i *weight = (const __m256i *)(g.weight + quarter * PANEL * 4);
        __m256i w0 = _mm256_loadu_si256(weight), w1 = _mm256_loadu_si256(weight + 1);
        __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            __m256i a = _mm256_set1_epi32(four_bytes(g.input + row * g.input_stride + quarter * 4));
            __m256i pairs0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(a, w0));
            __m256i pairs1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(a, w1));
            sums[row].part[0] += (int_part)_mm256_madd_epi16(pairs0, ones);
            sums[row].part[1] += (int_part)_mm256_madd_epi16(pairs1, ones);
        }
    }
}

#elif defined(SIMD_NEON) && defined(__ARM_FEATURE_DOTPROD)

ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = splat_int(0);
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        const int8_t *weight = g.weight + quarter * PANEL * 4;
        int8x16_t w[4] = {vld1q_s8(weight), vld1q_s8(weight + 16), vld1q_s8(weight + 32), vld1q_s8(weight + 48)};
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            int32_t bits = four_bytes(g.input + row * g.input_stride + quarter * 4);
            int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(bits));
            EACH_PART sums[row].part[i] = (int_part)vdotq_s32((int32x4_t)sums[row].part[i], w[i], a);
        }
    }
}

#elif defined(SIMD_NEON)

ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = splat_int(0);
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            int32_t bits = four_bytes(g.input + row * g.input_stride + quarter * 4);
            int8x8_t a = vreinterpret_s8_s32(vdup_n_s32(bits));
            EACH_PART {
                int8x16_t w = vld1q_s8(g.weight + quarter * PANEL * 4 + i * 16);
                int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), a));
                int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), a));
                sums[row].part[i] += (int_part)vpaddq_s32(low, high);
            }
        }
    }
}

#else

ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
    for (int row = 0; row < rows; row++) {
        int32_t lane[PANEL] = {0};
        for (int quarter = 0; quarter < QUARTERS; quarter++) {
            const int8_t *weight = g.weight + quarter * PANEL * 4;
            const int8_t *a = g.input + row * g.input_stride + quarter * 4;
            for (int output = 0; output < PANEL; output++)
                for (int i = 0; i < 4; i++) lane[output] += weight[output * 4 + i] * a[i];
        }
        memcpy(&sums[row], lane, sizeof lane);
    }
}

#endif
#endif
