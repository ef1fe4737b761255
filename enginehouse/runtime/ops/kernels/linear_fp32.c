// Linear layers in fp32: a panel of 16 outputs at a time, all rows in tiles while the panel is in the cache.
#include "linear.h"
#include "product.h"

void linear_fp32_panels(const struct linear_task *task, int64_t first_panel, int64_t end_panel) {
    int64_t width = task->weight->in_features;
    float result[TILE_ROWS * PANEL];
    for (int64_t panel = first_panel; panel < end_panel; panel++) {
        const float *data = (const float *)task->weight->data + panel * width * PANEL;
        for (int64_t row = 0; row < task->rows; row += TILE_ROWS) {
            int64_t left = task->rows - row, rows = left < TILE_ROWS ? left : TILE_ROWS;
            struct product p = {task->input->values + row * width, width, data, PANEL, width, result, PANEL};
            product_rows((int)rows, 1, false, false, p);
            for (int64_t i = 0; i < rows; i++) finish_outputs(task, row + i, panel, load(result + i * PANEL));
        }
    }
}
