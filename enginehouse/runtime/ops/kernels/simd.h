// Sixteen float or int32 lanes as one value, on any instruction set: one AVX-512 register, two of AVX2, four of
// SSE2 or NEON. Everything is computed in these sixteen lanes and in the same order on every machine, and
// multiply-adds are fused only where the source says `fused` (the build turns contraction off). So AVX2, AVX-512
// and NEON give the same bits; only machines without fused multiply-add differ in the last one.
#ifndef ENGINEHOUSE_SIMD_H
#define ENGINEHOUSE_SIMD_H

#include "ops.h"

#include <stdbool.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define SIMD_AVX512 1
#define LANES 16
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SIMD_AVX2 1
#define LANES 8
#if !defined(__AVXVNNI__)
#define WIDE_INPUTS 1 // its int8 kernels read inputs as 16-bit values: see dot_int8.h
#endif
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define SIMD_NEON 1
#define LANES 4
#include <arm_neon.h>
#else
#define LANES 4
#endif

#define PARTS (16 / LANES)
#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

typedef float float_part __attribute__((vector_size(LANES * 4)));
typedef int32_t int_part __attribute__((vector_size(LANES * 4)));
typedef uint32_t uint_part __attribute__((vector_size(LANES * 4)));
typedef uint16_t short_part __attribute__((vector_size(LANES * 2)));
typedef int8_t byte_part __attribute__((vector_size(LANES)));

typedef struct {
    float_part part[PARTS];
} floats;
typedef struct {
    int_part part[PARTS];
} ints;

// --- Loads and stores ------------------------------------------------------------------------------------

// Part by part: a copy of the whole structure would go through memory.
typedef float_part loose_part __attribute__((aligned(4), may_alias));

ALWAYS_INLINE floats load(const float *from) {
    floats out;
    EACH_PART out.part[i] = *(const loose_part *)(from + i * LANES);
    return out;
}

ALWAYS_INLINE void store(float *to, floats a) { EACH_PART *(loose_part *)(to + i * LANES) = a.part[i]; }

// The first `count` lanes, all if there are sixteen or more; the others are zero.
ALWAYS_INLINE floats load_first(const float *from, int64_t count) {
    if (count >= 16) return load(from);
    floats out = {0};
    memcpy(&out, from, (size_t)count * sizeof(float));
    return out;
}

ALWAYS_INLINE void store_first(float *to, floats a, int64_t count) {
    if (count >= 16) {
        store(to, a);
        return;
    }
    memcpy(to, &a, (size_t)count * sizeof(float));
}

ALWAYS_INLINE floats splat(float value) {
    floats out;
    EACH_PART out.part[i] = value - (float_part){0};
    return out;
}

ALWAYS_INLINE ints splat_int(int32_t value) {
    ints out;
    EACH_PART out.part[i] = value - (int_part){0};
    return out;
}

ALWAYS_INLINE ints as_ints(floats a) {
    ints out;
    EACH_PART out.part[i] = (int_part)a.part[i];
    return out;
}

ALWAYS_INLINE floats as_floats(ints a) {
    floats out;
    EACH_PART out.part[i] = (float_part)a.part[i];
    return out;
}

// --- Arithmetic ------------------------------------------------------------------------------------------

#define BINARY(type, name, expression)                                                                             \
    ALWAYS_INLINE type name(type a, type b) {                                                                      \
        EACH_PART a.part[i] = expression;                                                                          \
        return a;                                                                                                  \
    }
BINARY(floats, add, a.part[i] + b.part[i])
BINARY(floats, sub, a.part[i] - b.part[i])
BINARY(floats, mul, a.part[i] * b.part[i])
BINARY(floats, divide, a.part[i] / b.part[i])
BINARY(ints, add_int, a.part[i] + b.part[i])
BINARY(ints, sub_int, a.part[i] - b.part[i])
BINARY(ints, and_int, a.part[i] & b.part[i])

ALWAYS_INLINE ints less_floats(floats a, floats b) {
    ints out;
    EACH_PART out.part[i] = a.part[i] < b.part[i];
    return out;
}

// a where it is greater, else b: with a NaN on either side the answer is b, as in x86's own instruction.
#if defined(SIMD_AVX512)
BINARY(floats, greater_of, (float_part)_mm512_max_ps((__m512)a.part[i], (__m512)b.part[i]))
BINARY(floats, lesser_of, (float_part)_mm512_min_ps((__m512)a.part[i], (__m512)b.part[i]))
BINARY(ints, greater_int, (int_part)_mm512_max_epi32((__m512i)a.part[i], (__m512i)b.part[i]))
#elif defined(SIMD_AVX2)
BINARY(floats, greater_of, (float_part)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]))
BINARY(floats, lesser_of, (float_part)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]))
BINARY(ints, greater_int, (int_part)_mm256_max_epi32((__m256i)a.part[i], (__m256i)b.part[i]))
#else
#define CHOOSE(type, test, a, b) ((type)(((test) & (int_part)(a)) | (~(test) & (int_part)(b))))
BINARY(floats, greater_of, CHOOSE(float_part, a.part[i] > b.part[i], a.part[i], b.part[i]))
BINARY(floats, lesser_of, CHOOSE(float_part, a.part[i] < b.part[i], a.part[i], b.part[i]))
BINARY(ints, greater_int, CHOOSE(int_part, a.part[i] > b.part[i], a.part[i], b.part[i]))
#endif

// a · b + c with one rounding, where the machine can.
ALWAYS_INLINE floats fused(floats a, floats b, floats c) {
#if defined(SIMD_AVX512)
    EACH_PART c.part[i] = (float_part)_mm512_fmadd_ps((__m512)a.part[i], (__m512)b.part[i], (__m512)c.part[i]);
#elif defined(SIMD_AVX2)
    EACH_PART c.part[i] = (float_part)_mm256_fmadd_ps((__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
#elif defined(SIMD_NEON)
    EACH_PART c.part[i] =
        (float_part)vfmaq_f32((float32x4_t)c.part[i], (float32x4_t)a.part[i], (float32x4_t)b.part[i]);
#else
    EACH_PART c.part[i] = a.part[i] * b.part[i] + c.part[i];
#endif
    return c;
}

// Lanes of a where the mask's lane is -1, lanes of b where it is 0.
ALWAYS_INLINE floats choose(ints mask, floats a, floats b) {
    EACH_PART a.part[i] =
        (float_part)((mask.part[i] & (int_part)a.part[i]) | (~mask.part[i] & (int_part)b.part[i]));
    return a;
}

ALWAYS_INLINE floats to_floats(ints a) {
    floats out;
    EACH_PART out.part[i] = __builtin_convertvector(a.part[i], float_part);
    return out;
}

// Nearest integer, ties to even, for magnitudes below 2^22: adding 1.5 · 2^23 leaves the integer in the low bits.
ALWAYS_INLINE ints round_to_ints(floats a) {
    floats shifter = splat(12582912.0f);
    return sub_int(as_ints(add(a, shifter)), as_ints(shifter));
}

// --- Across lanes, always halving: 16, 8, 4, 2, 1 ----------------------------------------------------------

typedef float float_quad __attribute__((vector_size(16)));
typedef int32_t int_quad __attribute__((vector_size(16)));

// The four quarters of a value, by instructions: through memory a quarter would be read before it has arrived.
#if defined(SIMD_AVX512)
#define QUARTER(quad, a, i) (quad) _mm512_extracti32x4_epi32((__m512i)(a).part[0], i)
#elif defined(SIMD_AVX2)
#define QUARTER(quad, a, i) (quad) _mm256_extracti128_si256((__m256i)(a).part[(i) / 2], (i) % 2)
#else
#define QUARTER(quad, a, i) (quad)(a).part[i]
#endif

#define REDUCE(type, vector, quad, name, combine, combine_lane)                                                    \
    ALWAYS_INLINE type name(vector a) {                                                                            \
        quad low = combine(QUARTER(quad, a, 0), QUARTER(quad, a, 2));                                              \
        quad high = combine(QUARTER(quad, a, 1), QUARTER(quad, a, 3));                                             \
        quad all = combine(low, high);                                                                             \
        type even = combine_lane(all[0], all[2]), odd = combine_lane(all[1], all[3]);                              \
        return combine_lane(even, odd);                                                                            \
    }
#define PLUS(a, b) ((a) + (b))
#define LARGER(a, b) ((a) > (b) ? (a) : (b))
#define LARGER_FLOATS(a, b) ((float_quad)((((a) > (b)) & (int_quad)(a)) | (~((a) > (b)) & (int_quad)(b))))
#define LARGER_INTS(a, b) ((((a) > (b)) & (a)) | (~((a) > (b)) & (b)))
REDUCE(float, floats, float_quad, sum_lanes, PLUS, PLUS)
REDUCE(float, floats, float_quad, max_lanes, LARGER_FLOATS, LARGER)
REDUCE(int32_t, ints, int_quad, sum_lanes_int, PLUS, PLUS)
REDUCE(int32_t, ints, int_quad, max_lanes_int, LARGER_INTS, LARGER)

// --- Other number formats --------------------------------------------------------------------------------

ALWAYS_INLINE floats load_bfloat16(const uint16_t *from) {
    ints out;
    EACH_PART {
        short_part bits;
        memcpy(&bits, from + i * LANES, sizeof bits);
        out.part[i] = (int_part)(__builtin_convertvector(bits, uint_part) << 16);
    }
    return as_floats(out);
}

ALWAYS_INLINE floats load_half(const uint16_t *from) {
    floats out;
#if defined(SIMD_AVX512)
    out.part[0] = (float_part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(SIMD_AVX2)
    EACH_PART out.part[i] = (float_part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i * LANES)));
#elif defined(SIMD_NEON)
    EACH_PART out.part[i] = (float_part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i * LANES)));
#else
    EACH_PART {
        short_part bits;
        memcpy(&bits, from + i * LANES, sizeof bits);
        uint_part wide = __builtin_convertvector(bits, uint_part);
        uint_part magnitude = (wide & 0x7fff) << 13;
        // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals.
        uint_part value = (uint_part)((float_part)magnitude * 0x1p112f);
        uint_part special = (uint_part)(magnitude >= (0x7c00u << 13));
        out.part[i] = (float_part)(value | (special & 0x7f800000u) | (wide & 0x8000) << 16);
    }
#endif
    return out;
}

#if !defined(SIMD_AVX512) && !defined(SIMD_AVX2) && !defined(SIMD_NEON)
// Nearest half-precision number, ties to even; beyond the range it is infinity.
ALWAYS_INLINE uint16_t half_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { // subnormal: the sum's low bits are the result in units of 2^-24
        float shifted;
        memcpy(&shifted, &magnitude, sizeof shifted);
        shifted += 0.5f;
        memcpy(&magnitude, &shifted, sizeof magnitude);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}
#endif

ALWAYS_INLINE void store_half(uint16_t *to, floats a) {
#if defined(SIMD_AVX512)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(SIMD_AVX2)
    EACH_PART _mm_storeu_si128((__m128i *)(to + i * LANES),
                               _mm256_cvtps_ph((__m256)a.part[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(SIMD_NEON)
    EACH_PART vst1_u16(to + i * LANES, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a.part[i])));
#else
    float lane[16];
    memcpy(lane, &a, sizeof lane);
    for (int i = 0; i < 16; i++) to[i] = half_from_float(lane[i]);
#endif
}

#if defined(SIMD_AVX2)
// Sixteen 16-bit values in order; each lane must fit.
ALWAYS_INLINE __m256i narrow_to_shorts(ints a) {
    __m256i mixed = _mm256_packs_epi32((__m256i)a.part[0], (__m256i)a.part[1]);
    return _mm256_permute4x64_epi64(mixed, 0xd8);
}
#endif

#if defined(WIDE_INPUTS)
// As 16-bit values, in the order 0, 2, 1, 3 of each four.
ALWAYS_INLINE void store_wide(int16_t *to, ints a) {
    __m256i shorts = narrow_to_shorts(a);
    shorts = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(shorts, 0xd8), 0xd8);
    _mm256_storeu_si256((__m256i *)to, shorts);
}
#endif

ALWAYS_INLINE void store_bytes(int8_t *to, ints a) {
#if defined(SIMD_AVX512)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)a.part[0]));
#elif defined(SIMD_AVX2)
    __m256i shorts = narrow_to_shorts(a);
    __m128i low = _mm256_castsi256_si128(shorts), high = _mm256_extracti128_si256(shorts, 1);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(low, high));
#else
    EACH_PART {
        byte_part bytes = __builtin_convertvector(a.part[i], byte_part);
        memcpy(to + i * LANES, &bytes, sizeof bytes);
    }
#endif
}

// --- Functions -------------------------------------------------------------------------------------------

// e^x for x in [-87, 88], clamped outside, NaN for NaN; exactly 1 at 0. x = n·ln 2 + r with |r| <= ln 2 / 2, and
// e^r = 1 + r + r²·q(r) with a quartic q fitted for the smallest relative error (3e-9, below float's own 6e-8).
ALWAYS_INLINE floats exponential(floats x) {
    x = greater_of(splat(-87.0f), lesser_of(splat(88.0f), x));
    ints n = round_to_ints(mul(x, splat(1.44269504f)));
    floats whole = to_floats(n);
    floats r = fused(whole, splat(-0.693145752f), x); // ln 2 in two parts: the first has 15 bits, so n · it is exact
    r = fused(whole, splat(-1.42860677e-6f), r);
    floats q = fused(splat(1.38145e-3f), r, splat(8.36875e-3f));
    q = fused(q, r, splat(4.166839e-2f));
    q = fused(q, r, splat(1.666652e-1f));
    q = fused(q, r, splat(4.9999993e-1f));
    floats power = add(fused(mul(r, r), q, r), splat(1.0f));
    ints exponent;
    EACH_PART exponent.part[i] = (n.part[i] + 127) << 23;
    return mul(power, as_floats(exponent));
}

ALWAYS_INLINE floats sigmoid(floats x) {
    floats one = splat(1.0f);
    return divide(one, add(one, exponential(sub(splat(0.0f), x))));
}

#endif
