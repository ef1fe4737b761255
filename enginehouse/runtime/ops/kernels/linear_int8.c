// Linear layers in int8: y = Σ over groups, in order, of (scale of a · scale of w) · exact integer dot product.
//
// A panel of 16 outputs (24 KiB at 1536 inputs) stays in the first-level cache while all rows pass by in tiles. The
// floating-point sum over groups has one order in every tile, so a row's bits do not depend on its neighbours.
#include "dot_int8.h"
#include "linear.h"

// With few rows the processor's own prefetching keeps up and hints cost 10 %. Once a panel takes longer than the
// prefetcher looks ahead, asking for the next one gains up to a quarter.
#define PREFETCH_BYTES 9216
#if defined(SIMD_AVX512)
#define PREFETCH_ROWS 4
#else
#define PREFETCH_ROWS 8
#endif
#define INTO_SECOND_LEVEL 2

EXPORT const char *enginehouse_instruction_set(void) { return DOT_NAME; }

// `rows` is a constant wherever this is inlined.
ALWAYS_INLINE void int8_tile(int rows, const struct linear_task *task, int64_t panel, int64_t row, bool prefetch) {
    const struct activation *input = task->input;
    int64_t num_groups = input->num_groups, width = num_groups * GROUP;
    const int8_t *weight = (const int8_t *)task->weight->data + panel * width * PANEL;
    const uint16_t *weight_scale = task->weight->scale + panel * num_groups * PANEL;
    const float *input_scale = input->scale + row * num_groups;
    floats total[MAX_DOT_ROWS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) total[i] = splat(0.0f);
    int64_t start = row * width;
    struct dot_group g = {weight, input->quantized + start, width, input->wide + start, input->sum + row * num_groups,
                          num_groups};
    for (int64_t group = 0; group < num_groups; group++) {
        if (prefetch)
            for (int line = 0; line < GROUP * PANEL; line += 64)
                __builtin_prefetch(g.weight + PREFETCH_BYTES + line, 0, INTO_SECOND_LEVEL);
        ints dot[MAX_DOT_ROWS];
        dot_group(rows, dot, g);
        floats scale = load_bfloat16(weight_scale + group * PANEL);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            floats both = mul(splat(input_scale[i * num_groups + group]), scale);
            total[i] = fused(to_floats(dot[i]), both, total[i]);
        }
        g.weight += GROUP * PANEL;
        g.input += GROUP;
        g.wide += GROUP;
        g.input_sum++;
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) finish_outputs(task, row + i, panel, total[i]);
}

static void int8_panel(const struct linear_task *task, int64_t panel) {
    for (int64_t row = 0, rows; row < task->rows; row += rows) {
        int64_t left = task->rows - row;
        rows = left >= DOT_ROWS ? DOT_ROWS : left > DOT_TAIL_ROWS ? DOT_TAIL_ROWS : left;
        bool prefetch = row == 0 && rows >= PREFETCH_ROWS;
        switch (rows) {
        case 1: int8_tile(1, task, panel, row, prefetch); break;
        case 2: int8_tile(2, task, panel, row, prefetch); break;
        case 3: int8_tile(3, task, panel, row, prefetch); break;
        case 4: int8_tile(4, task, panel, row, prefetch); break;
#if DOT_TAIL_ROWS > 4
        case 5: int8_tile(5, task, panel, row, prefetch); break;
        case 6: int8_tile(6, task, panel, row, prefetch); break;
        case 7: int8_tile(7, task, panel, row, prefetch); break;
#endif
        default: int8_tile(DOT_ROWS, task, panel, row, prefetch); break;
        }
    }
}

void linear_int8_panels(const struct linear_task *task, int64_t first_panel, int64_t end_panel) {
    for (int64_t panel = first_panel; panel < end_panel; panel++) int8_panel(task, panel);
}
