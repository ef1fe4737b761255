// Operations on one row at a time: norms, activation functions, embeddings. Each ends by writing its row in the form
// the next linear layer reads, so int8 quantisation costs no pass of its own.
#include "rotate.h"

#define PARALLEL_ELEMENTS 16384 // below this many elements waking other threads costs more than it saves

struct row_task {
    const float *x;
    const float *weight;
    const float *bias;
    float eps;
    int64_t width; // of the result
    int64_t rows;
    int64_t rows_per_item;
    const struct activation *out; // or
    float *out_values;
    void (*row)(const struct row_task *task, int64_t row);
};

static void run_rows(const void *context, int64_t item) {
    const struct row_task *task = context;
    int64_t end = (item + 1) * task->rows_per_item;
    if (end > task->rows) end = task->rows;
    for (int64_t row = item * task->rows_per_item; row < end; row++) task->row(task, row);
}

static void run_row_task(struct row_task *task, int64_t num_threads) {
    bool is_small = task->rows * task->width < PARALLEL_ELEMENTS || num_threads < 2;
    int64_t num_items = is_small ? 1 : 4 * num_threads;
    task->rows_per_item = (task->rows + num_items - 1) / num_items;
    run_parallel(run_rows, task, num_items, num_threads);
}

// --- Writing a row ---------------------------------------------------------------------------------------

// 64 values, rotated, to int8 with one scale. Comparing magnitudes as integers orders them like floats and puts
// infinities and NaNs on top, so a group that holds one is noticed: it becomes zeros with a NaN scale.
ALWAYS_INLINE void quantize_group(const floats original[4], const struct activation *out, int64_t group) {
    floats value[4] = {original[0], original[1], original[2], original[3]};
    rotate_group(value);
    ints mask = splat_int(0x7fffffff), largest = splat_int(0);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) largest = greater_int(largest, and_int(as_ints(value[i]), mask));
    int32_t maximum_bits = max_lanes_int(largest);
    float maximum;
    memcpy(&maximum, &maximum_bits, sizeof maximum);
    bool is_finite = maximum_bits < 0x7f800000, is_usable = is_finite && maximum >= 1e-30f;
    out->scale[group] = is_usable ? maximum * (1.0f / 127) : is_finite ? 0.0f : __builtin_nanf("");
    floats inverse = splat(is_usable ? 127.0f / maximum : 0.0f);
    ints total = splat_int(0);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        ints rounded = is_usable ? round_to_ints(mul(value[i], inverse)) : splat_int(0);
        total = add_int(total, rounded);
        store_bytes(out->quantized + group * GROUP + 16 * i, rounded);
#if defined(WIDE_INPUTS)
        store_wide(out->wide + group * GROUP + 16 * i, rounded);
#endif
    }
    out->sum[group] = sum_lanes_int(total);
}

// Walks a row of `width` values in groups of 64; `expression` gives the sixteen values at index `at`, of which the
// first `count` exist. What it gives for the rest is replaced by zeros.
#define WRITE_ROW(task, row, expression)                                                                           \
    do {                                                                                                           \
        int64_t width_ = (task)->width, start_ = 0;                                                                \
        floats value_[4];                                                                                          \
        for (; start_ + GROUP <= width_; start_ += GROUP) {                                                        \
            _Pragma("GCC unroll 4") for (int i_ = 0; i_ < 4; i_++) {                                               \
                const int64_t at = start_ + 16 * i_, count = 16;                                                   \
                value_[i_] = (expression);                                                                         \
                (void)count;                                                                                       \
            }                                                                                                      \
            write_group((task), (row), start_, value_);                                                            \
        }                                                                                                          \
        if (start_ == width_) break;                                                                               \
        for (int i_ = 0; i_ < 4; i_++) {                                                                           \
            int64_t at = start_ + 16 * i_, count = width_ - at;                                                    \
            if (count > 16) count = 16;                                                                            \
            value_[i_] = splat(0.0f);                                                                              \
            if (count > 0) {                                                                                       \
                floats all_ = (expression);                                                                        \
                memcpy(&value_[i_], &all_, (size_t)count * sizeof(float));                                         \
            }                                                                                                      \
        }                                                                                                          \
        write_last_group((task), (row), start_, value_);                                                           \
    } while (0)

ALWAYS_INLINE void write_group(const struct row_task *task, int64_t row, int64_t start, const floats value[4]) {
    const struct activation *out = task->out;
    if (out && out->quantized) {
        quantize_group(value, out, row * out->num_groups + start / GROUP);
        return;
    }
    float *to = (out ? out->values : task->out_values) + row * task->width + start;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(to + 16 * i, value[i]);
}

static void write_last_group(const struct row_task *task, int64_t row, int64_t start, const floats value[4]) {
    const struct activation *out = task->out;
    if (out && out->quantized) {
        quantize_group(value, out, row * out->num_groups + start / GROUP);
        return;
    }
    float *to = (out ? out->values : task->out_values) + row * task->width + start;
    int64_t left = task->width - start;
    for (int i = 0; i < 4 && left > 0; i++, left -= 16) store_first(to + 16 * i, value[i], left < 16 ? left : 16);
}

ALWAYS_INLINE floats load_up_to(const float *from, int64_t count) {
    return count == 16 ? load(from) : load_first(from, count);
}

// --- Norms -----------------------------------------------------------------------------------------------

static void rms_norm_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width, *weight = task->weight;
    int64_t width = task->width, whole = width & ~(int64_t)15;
    floats squares = splat(0.0f);
    for (int64_t at = 0; at < whole; at += 16) squares = fused(load(x + at), load(x + at), squares);
    if (whole < width) {
        floats last = load_first(x + whole, width - whole);
        squares = fused(last, last, squares);
    }
    float mean = sum_lanes(squares) / (float)width;
    floats inverse = splat(1.0f / __builtin_sqrtf(mean + task->eps));
    WRITE_ROW(task, row, mul(mul(load_up_to(x + at, count), inverse), load_up_to(weight + at, count)));
}

static void layer_norm_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width, *weight = task->weight, *bias = task->bias;
    int64_t width = task->width, whole = width & ~(int64_t)15;
    floats sum = splat(0.0f), squares = splat(0.0f);
    for (int64_t at = 0; at < whole; at += 16) sum = add(sum, load(x + at));
    if (whole < width) sum = add(sum, load_first(x + whole, width - whole));
    floats mean = splat(sum_lanes(sum) / (float)width);
    for (int64_t at = 0; at < whole; at += 16) {
        floats centred = sub(load(x + at), mean);
        squares = fused(centred, centred, squares);
    }
    if (whole < width) {
        floats centred = splat(0.0f), all = sub(load_first(x + whole, width - whole), mean);
        memcpy(&centred, &all, (size_t)(width - whole) * sizeof(float));
        squares = fused(centred, centred, squares);
    }
    float variance = sum_lanes(squares) / (float)width;
    floats inverse = splat(1.0f / __builtin_sqrtf(variance + task->eps));
    WRITE_ROW(task, row,
              add(mul(mul(sub(load_up_to(x + at, count), mean), inverse), load_up_to(weight + at, count)),
                  load_up_to(bias + at, count)));
}

EXPORT void enginehouse_norm(const float *x, const float *weight, const float *bias, float eps, int64_t width,
                             const struct activation *out, float *out_values, int64_t rows, int64_t num_threads) {
    struct row_task task = {.x = x, .weight = weight, .bias = bias, .eps = eps, .width = width, .rows = rows,
                            .out = out, .out_values = out_values, .row = bias ? layer_norm_row : rms_norm_row};
    run_row_task(&task, num_threads);
}

// --- Activation functions --------------------------------------------------------------------------------

static void prepare_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width;
    WRITE_ROW(task, row, load_up_to(x + at, count));
}

static void silu_mul_row(const struct row_task *task, int64_t row) {
    const float *gate = task->x + row * 2 * task->width, *up = gate + task->width;
    WRITE_ROW(task, row, ({
                  floats g = load_up_to(gate + at, count);
                  mul(mul(g, sigmoid(g)), load_up_to(up + at, count));
              }));
}

static void relu_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width;
    WRITE_ROW(task, row, greater_of(splat(0.0f), load_up_to(x + at, count)));
}

// 1 - erf(|z|) = poly(t) · e^(-z²), t = 1 / (1 + 0.3275911 |z|): Abramowitz and Stegun 7.1.26, error 1.5e-7.
ALWAYS_INLINE floats gelu(floats x) {
    floats magnitude = as_floats(and_int(as_ints(x), splat_int(0x7fffffff)));
    floats z = mul(magnitude, splat(0.70710678f));
    floats t = divide(splat(1.0f), fused(z, splat(0.3275911f), splat(1.0f)));
    floats poly = fused(splat(1.061405429f), t, splat(-1.453152027f));
    poly = fused(poly, t, splat(1.421413741f));
    poly = fused(poly, t, splat(-0.284496736f));
    poly = mul(fused(poly, t, splat(0.254829592f)), t);
    floats tail = mul(poly, exponential(sub(splat(0.0f), mul(z, z))));
    floats half_tail = mul(splat(0.5f), mul(magnitude, tail)); // |x| · (1 - Φ(|x|))
    return sub(greater_of(splat(0.0f), x), half_tail);
}

static void gelu_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width;
    WRITE_ROW(task, row, gelu(load_up_to(x + at, count)));
}

// ½x(1 + tanh(y)) = x · sigmoid(2y), y = √(2/π) · (x + 0.044715 x³).
ALWAYS_INLINE floats gelu_new(floats x) {
    floats cube = mul(mul(x, x), x);
    floats inner = mul(splat(1.59576912f), fused(splat(0.044715f), cube, x));
    return mul(x, sigmoid(inner));
}

static void gelu_new_row(const struct row_task *task, int64_t row) {
    const float *x = task->x + row * task->width;
    WRITE_ROW(task, row, gelu_new(load_up_to(x + at, count)));
}

// `function` is an index of this table; native.py has the same order.
static void (*const row_functions[])(const struct row_task *, int64_t) = {prepare_row, silu_mul_row, relu_row,
                                                                          gelu_row, gelu_new_row};

EXPORT void enginehouse_map(int64_t function, const float *x, int64_t width, const struct activation *out,
                            int64_t rows, int64_t num_threads) {
    struct row_task task = {.x = x, .width = width, .rows = rows, .out = out, .row = row_functions[function]};
    run_row_task(&task, num_threads);
}

// --- Tables ----------------------------------------------------------------------------------------------

// The exported functions return -1, having touched nothing, when an index lies outside its table.
static bool are_valid(const int32_t *indices, int64_t rows, int64_t limit) {
    for (int64_t row = 0; row < rows; row++)
        if (indices[row] < 0 || indices[row] >= limit) return false;
    return true;
}

EXPORT int64_t enginehouse_add_rows(const float *table, int64_t table_rows, const int32_t *indices, float *out,
                                    int64_t width, int64_t rows) {
    if (!are_valid(indices, rows, table_rows)) return -1;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = table + indices[row] * width;
        float *to = out + row * width;
        for (int64_t i = 0; i < width; i++) to[i] += from[i];
    }
    return 0;
}

EXPORT int64_t enginehouse_copy_rows(const float *table, int64_t table_rows, const int32_t *indices, float *out,
                                     int64_t width, int64_t rows) {
    if (!are_valid(indices, rows, table_rows)) return -1;
    for (int64_t row = 0; row < rows; row++)
        memmove(out + row * width, table + indices[row] * width, (size_t)width * sizeof(float));
    return 0;
}

static void embed_int8(const struct linear_weight *weight, int64_t panel, int64_t lane, float *out) {
    int64_t width = weight->in_features, num_groups = (width + GROUP - 1) / GROUP;
    const int8_t *data = (const int8_t *)weight->data + panel * num_groups * GROUP * PANEL + lane * 4;
    const uint16_t *scales = weight->scale + panel * num_groups * PANEL + lane;
    for (int64_t group = 0; group < num_groups; group++, data += GROUP * PANEL) {
        uint32_t bits = (uint32_t)scales[group * PANEL] << 16;
        float scale, buffer[GROUP];
        memcpy(&scale, &bits, sizeof scale);
        for (int k = 0; k < GROUP; k++) buffer[k] = (float)data[k / 4 * PANEL * 4 + k % 4] * scale;
        floats value[4] = {load(buffer), load(buffer + 16), load(buffer + 32), load(buffer + 48)};
        unrotate_group(value);
        for (int i = 0; i < 4; i++) store(buffer + 16 * i, value[i]);
        int64_t start = group * GROUP, count = width - start < GROUP ? width - start : GROUP;
        memcpy(out + start, buffer, (size_t)count * sizeof(float));
    }
}

EXPORT int64_t enginehouse_embed(const struct linear_weight *weight, const int32_t *tokens, float *out,
                                 int64_t rows) {
    int64_t width = weight->in_features;
    if (!are_valid(tokens, rows, weight->out_features)) return -1;
    for (int64_t row = 0; row < rows; row++) {
        int64_t panel = tokens[row] / PANEL, lane = tokens[row] % PANEL;
        float *to = out + row * width;
        if (weight->is_int8) {
            embed_int8(weight, panel, lane, to);
            continue;
        }
        const float *data = (const float *)weight->data + panel * width * PANEL + lane;
        for (int64_t k = 0; k < width; k++) to[k] = data[k * PANEL];
    }
    return 0;
}
