// What the int8 and the fp32 linear layers share.
#ifndef ENGINEHOUSE_LINEAR_H
#define ENGINEHOUSE_LINEAR_H

#include "simd.h"

struct linear_task {
    const struct activation *input;
    const struct linear_weight *weight;
    float *out; // [rows][out_features]
    int64_t rows;
    int64_t num_panels;
    int64_t panels_per_item;
    bool accumulate;
};

void linear_int8_panels(const struct linear_task *task, int64_t first_panel, int64_t end_panel);
void linear_fp32_panels(const struct linear_task *task, int64_t first_panel, int64_t end_panel);

// Adds the bias and writes (or adds) a panel's 16 outputs of one row; the last panel may be narrower.
ALWAYS_INLINE void finish_outputs(const struct linear_task *task, int64_t row, int64_t panel, floats value) {
    int64_t num_outputs = task->weight->out_features, column = panel * PANEL, left = num_outputs - column;
    float *to = task->out + row * num_outputs + column;
    if (task->weight->bias) value = add(value, load(task->weight->bias + column));
    if (left >= PANEL) {
        store(to, task->accumulate ? add(load(to), value) : value);
        return;
    }
    if (task->accumulate) value = add(load_first(to, left), value);
    store_first(to, value, left);
}

#endif
