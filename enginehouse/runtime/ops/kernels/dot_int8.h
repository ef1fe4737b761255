// The integer dot product of one group: sums[row] = Σ over 64 inputs of a[row] · w, for 16 outputs, one version for
// each instruction set. Integer sums are exact, so the versions agree and may add in any order.
#ifndef ENGINEHOUSE_DOT_INT8_H
#define ENGINEHOUSE_DOT_INT8_H

#include "simd.h"

struct dot_group {
    const int8_t *weight;     // [16 quarters][16 outputs][4 inputs]
    const int8_t *input;      // [rows][64] at a distance of
    int64_t input_stride;     // elements between rows
    const int16_t *wide;      // the same inputs as 16-bit values, where there is WIDE_INPUTS
    const int32_t *input_sum; // one a row, at a distance of
    int64_t input_sum_stride; // elements between rows
};

#define QUARTERS (GROUP / 4)
#define MAX_DOT_ROWS 8

// DOT_ROWS: rows of a full tile; DOT_TAIL_ROWS: the most rows of a tile that is not full.
#if defined(SIMD_AVX512)
#define DOT_NAME "avx512vnni"
#define DOT_ROWS 8
#define DOT_TAIL_ROWS 7
#elif defined(SIMD_AVX2) && defined(__AVXVNNI__)
#define DOT_NAME "avxvnni"
#define DOT_ROWS 4
#define DOT_TAIL_ROWS 4
#elif defined(SIMD_AVX2)
#define DOT_NAME "avx2"
#define DOT_ROWS 8
#define DOT_TAIL_ROWS 4
#elif defined(SIMD_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define DOT_NAME "neon-dotprod"
#define DOT_ROWS 4
#define DOT_TAIL_ROWS 4
#elif defined(SIMD_NEON)
#define DOT_NAME "neon"
#define DOT_ROWS 2
#define DOT_TAIL_ROWS 2
#else
#define DOT_NAME "generic"
#define DOT_ROWS 2
#define DOT_TAIL_ROWS 2
#endif

ALWAYS_INLINE int32_t four_bytes(const void *from) {
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

// AVX2 has no exact product of signed bytes. For few rows: vpmaddubsw multiplies unsigned by signed bytes and adds
// pairs in 16 bits, and |w| · (a with the sign of w) is the same product; 2 · 127 · 127 fits, so it never saturates,
// which w + 128 would.
ALWAYS_INLINE void dot_few_rows(int rows, ints sums[], struct dot_group g) {
    __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) sums[row] = splat_int(0);
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

// For eight rows the sign costs more than widening: weights become 16-bit values by shifts, once for all rows, and
// inputs were stored as such when they were quantised. A 32-bit lane holds an output's inputs 0 to 3 as bytes: shifts
// leave the pairs (0, 2) and (1, 3), which is the order of the stored inputs. Eight outputs at a time, because then
// the sums stay in registers.
ALWAYS_INLINE void dot_half_of_8_rows(ints sums[], struct dot_group g, int half) {
    __m256i sum[8];
#pragma GCC unroll 8
    for (int row = 0; row < 8; row++) sum[row] = _mm256_setzero_si256();
    for (int quarter = 0; quarter < QUARTERS; quarter++) {
        __m256i bytes = _mm256_loadu_si256((const __m256i *)(g.weight + quarter * PANEL * 4 + half * 32));
        __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
#pragma GCC unroll 8
        for (int row = 0; row < 8; row++) {
            const int16_t *input = g.wide + row * g.input_stride + quarter * 4;
            __m256i even_input = _mm256_set1_epi32(four_bytes(input));
            __m256i odd_input = _mm256_set1_epi32(four_bytes(input + 2));
            sum[row] = _mm256_add_epi32(sum[row], _mm256_madd_epi16(even_input, even));
            sum[row] = _mm256_add_epi32(sum[row], _mm256_madd_epi16(odd_input, odd));
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < 8; row++) sums[row].part[half] = (int_part)sum[row];
}

ALWAYS_INLINE void dot_group(int rows, ints sums[], struct dot_group g) {
    if (rows < 8) {
        dot_few_rows(rows, sums, g);
        return;
    }
    dot_half_of_8_rows(sums, g, 0);
    dot_half_of_8_rows(sums, g, 1);
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
