// One small matrix product, c[rows][vectors · 16] = a[rows][depth] · b[depth][vectors · 16] (+ c): the heart of fp32
// linear layers, of attention scores (a query by a block of keys) and of attention outputs (probabilities by
// values). Each output is one chain of fused multiply-adds over the depth, in order, whatever the tile.
#ifndef ENGINEHOUSE_PRODUCT_H
#define ENGINEHOUSE_PRODUCT_H

#include "simd.h"

struct product {
    const float *a;
    int64_t a_stride; // floats between rows of a
    const void *b;    // float or half
    int64_t b_stride; // elements between rows of b
    int64_t depth;
    float *c;
    int64_t c_stride;
};

#define MAX_TILE_ROWS 8
#define MAX_TILE_VECTORS 2

// `rows`, `vectors`, `is_half` and `accumulate` are constants wherever this is inlined.
ALWAYS_INLINE void product_tile(int rows, int vectors, bool is_half, bool accumulate, struct product p) {
    floats sum[MAX_TILE_ROWS][MAX_TILE_VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            sum[row][v] = accumulate ? load(p.c + row * p.c_stride + v * 16) : splat(0.0f);
    for (int64_t k = 0; k < p.depth; k++) {
        floats b[MAX_TILE_VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            int64_t at = k * p.b_stride + v * 16;
            b[v] = is_half ? load_half((const uint16_t *)p.b + at) : load((const float *)p.b + at);
        }
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            floats a = splat(p.a[row * p.a_stride + k]);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sum[row][v] = fused(a, b[v], sum[row][v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) store(p.c + row * p.c_stride + v * 16, sum[row][v]);
}

// Sixteen-lane columns that fit in the registers beside six rows.
#if defined(SIMD_AVX512)
#define TILE_VECTORS 2
#else
#define TILE_VECTORS 1
#endif
#define TILE_ROWS 6

// Any number of rows up to TILE_ROWS.
ALWAYS_INLINE void product_rows(int rows, int vectors, bool is_half, bool accumulate, struct product p) {
    switch (rows) {
    case 1: product_tile(1, vectors, is_half, accumulate, p); break;
    case 2: product_tile(2, vectors, is_half, accumulate, p); break;
    case 3: product_tile(3, vectors, is_half, accumulate, p); break;
    case 4: product_tile(4, vectors, is_half, accumulate, p); break;
    case 5: product_tile(5, vectors, is_half, accumulate, p); break;
    default: product_tile(6, vectors, is_half, accumulate, p); break;
    }
}

#endif
