// out = a · weightᵀ + bias: splits the panels of outputs over the threads.
#include "linear.h"

static void run_panels(const void *context, int64_t item) {
    const struct linear_task *task = context;
    int64_t first = item * task->panels_per_item, end = first + task->panels_per_item;
    if (end > task->num_panels) end = task->num_panels;
    if (task->weight->is_int8) {
        linear_int8_panels(task, first, end);
    } else {
        linear_fp32_panels(task, first, end);
    }
}

#define ITEMS_PER_THREAD 4 // so that a thread that started late, or was interrupted, delays the others little

EXPORT void enginehouse_linear(const struct activation *input, const struct linear_weight *weight, float *out,
                               int64_t rows, int64_t accumulate, int64_t num_threads) {
    struct linear_task task = {.input = input, .weight = weight, .out = out, .rows = rows,
                               .num_panels = (weight->out_features + PANEL - 1) / PANEL,
                               .accumulate = accumulate != 0};
    int64_t num_items = num_threads > 1 ? ITEMS_PER_THREAD * num_threads : 1;
    task.panels_per_item = (task.num_panels + num_items - 1) / num_items;
    num_items = (task.num_panels + task.panels_per_item - 1) / task.panels_per_item;
    run_parallel(run_panels, &task, num_items, num_threads);
}
