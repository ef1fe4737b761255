// Structures shared with Python (ctypes mirrors them in layout.py) and the functions the library exports.
// Every field is eight bytes wide, so no compiler can pad them differently.
#ifndef ENGINEHOUSE_OPS_H
#define ENGINEHOUSE_OPS_H

#include <stdint.h>

#define GROUP 64 // inputs that share a scale
#define PANEL 16 // outputs computed together
#define BLOCK 32 // tokens in a KV block
#define MAX_HEAD_DIM 256

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

struct activation {
    int8_t *quantized; // [rows][num_groups * GROUP], or NULL: fp32
    int16_t *wide;     // the same values, for kernels that want them wider, in the order 0, 2, 1, 3 of each four
    float *scale;      // [rows][num_groups]
    int32_t *sum;      // [rows][num_groups]
    float *values;     // [rows][width], or NULL: int8
    int64_t width;
    int64_t num_groups;
};

struct linear_weight {
    const void *data;      // int8 [panels][k/4][16][4] or float [panels][k][16]
    const uint16_t *scale; // bfloat16 [panels][num_groups][16]
    const float *bias;     // [panels * 16] or NULL
    int64_t out_features;
    int64_t in_features;
    int64_t is_int8;
};

struct kv_layer {
    void *k; // [num_blocks][num_kv_heads][head_dim][BLOCK]
    void *v; // [num_blocks][num_kv_heads][BLOCK][padded_dim]
    int64_t num_blocks;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t padded_dim;
    int64_t is_half;
};

struct attention_batch {
    const int32_t *row_seq;
    const int32_t *positions;
    const int32_t *block_tables;
    int64_t max_blocks;
};

// Calls task(context, item) for every item below num_items, on at most num_threads threads including the caller,
// and returns when all are done. Which thread computes an item is not defined; tasks must not care.
void run_parallel(void (*task)(const void *context, int64_t item), const void *context, int64_t num_items,
                  int64_t num_threads);

#endif
