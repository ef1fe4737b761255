// Checks the kernels against plain loops, with nothing but libc: for machines that can run a program and no Python,
// such as an emulated Arm processor. Prints the instruction set and a hash of every result: machines with fused
// multiply-add must print the same hash. Exits with 1 when a result is wrong.
#include "../enginehouse/runtime/ops/kernels/ops.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *enginehouse_instruction_set(void);
void enginehouse_linear(const struct activation *, const struct linear_weight *, float *, int64_t, int64_t, int64_t);
void enginehouse_norm(const float *, const float *, const float *, float, int64_t, const struct activation *, float *,
                      int64_t, int64_t);
void enginehouse_map(int64_t, const float *, int64_t, const struct activation *, int64_t, int64_t);
int64_t enginehouse_rope_and_store(float *, const int32_t *, const int64_t *, const float *, const float *, int64_t,
                                   int64_t, const float *, const float *, float, const struct kv_layer *, int64_t,
                                   int64_t, int64_t);
int64_t enginehouse_attention(const float *, const struct kv_layer *, const struct attention_batch *, float, float *,
                              int64_t, int64_t, int64_t);

static uint64_t hash = 14695981039346656037u;
static int num_failures;
static uint32_t random_state = 1;

static uint32_t next_random(void) { return (random_state = random_state * 1664525 + 1013904223) >> 8; }

static float random_float(void) { return (float)next_random() / (1 << 23) - 1; }

static float *random_floats(int64_t count) {
    float *values = malloc((size_t)count * sizeof(float));
    for (int64_t i = 0; i < count; i++) values[i] = random_float() * 3;
    return values;
}

static void *zeros(int64_t size) { return calloc((size_t)size, 1); }

static void add_to_hash(const void *data, int64_t size) {
    for (int64_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
}

static void check(const char *what, double actual, double expected, double tolerance) {
    if (fabs(actual - expected) <= tolerance * (1 + fabs(expected))) return;
    if (num_failures++ < 20) printf("WRONG %s: %.9g, expected %.9g\n", what, actual, expected);
}

static struct activation new_activation(int64_t rows, int64_t width, bool is_int8) {
    int64_t groups = (width + GROUP - 1) / GROUP;
    struct activation a = {.width = width, .num_groups = groups, .scale = zeros(rows * groups * 4),
                           .sum = zeros(rows * groups * 4), .wide = zeros(rows * groups * GROUP * 2)};
    if (is_int8) {
        a.quantized = zeros(rows * groups * GROUP);
    } else {
        a.values = zeros(rows * width * 4);
    }
    return a;
}

// --- Linear layers ---------------------------------------------------------------------------------------

static struct linear_weight new_weight(int64_t outputs, int64_t inputs, bool is_int8) {
    int64_t panels = (outputs + PANEL - 1) / PANEL, groups = (inputs + GROUP - 1) / GROUP;
    struct linear_weight w = {.out_features = outputs, .in_features = inputs, .is_int8 = is_int8,
                              .bias = random_floats(panels * PANEL)};
    if (!is_int8) {
        w.data = random_floats(panels * inputs * PANEL);
        return w;
    }
    int8_t *data = malloc((size_t)(panels * groups * GROUP * PANEL));
    uint16_t *scale = malloc((size_t)(panels * groups * PANEL * 2));
    for (int64_t i = 0; i < panels * groups * GROUP * PANEL; i++) data[i] = (int8_t)((int)(next_random() % 255) - 127);
    for (int64_t i = 0; i < panels * groups * PANEL; i++) scale[i] = (uint16_t)(0x3c00 + next_random() % 128);
    w.data = data, w.scale = scale;
    return w;
}

static double expected_int8(const struct activation *a, const struct linear_weight *w, int64_t row, int64_t output) {
    int64_t panel = output / PANEL, lane = output % PANEL;
    double total = 0;
    for (int64_t group = 0; group < a->num_groups; group++) {
        const int8_t *data = (const int8_t *)w->data + (panel * a->num_groups + group) * GROUP * PANEL;
        const int8_t *input = a->quantized + (row * a->num_groups + group) * GROUP;
        int32_t dot = 0;
        for (int k = 0; k < GROUP; k++) dot += input[k] * data[(k / 4 * PANEL + lane) * 4 + k % 4];
        uint32_t bits = (uint32_t)w->scale[(panel * a->num_groups + group) * PANEL + lane] << 16;
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        total += (double)dot * a->scale[row * a->num_groups + group] * scale;
    }
    return total + w->bias[output];
}

static double expected_fp32(const struct activation *a, const struct linear_weight *w, int64_t row, int64_t output) {
    const float *data = (const float *)w->data + output / PANEL * w->in_features * PANEL + output % PANEL;
    double total = w->bias[output];
    for (int64_t k = 0; k < w->in_features; k++) total += (double)a->values[row * a->width + k] * data[k * PANEL];
    return total;
}

static void test_linear(int64_t rows, int64_t outputs, int64_t inputs, bool is_int8) {
    struct linear_weight w = new_weight(outputs, inputs, is_int8);
    struct activation a = new_activation(rows, inputs, is_int8), single = new_activation(1, inputs, is_int8);
    float *x = random_floats(rows * inputs), *out = zeros(rows * outputs * 4), *alone = zeros(outputs * 4);
    enginehouse_map(0, x, inputs, &a, rows, 2);
    enginehouse_linear(&a, &w, out, rows, 0, 3);
    add_to_hash(out, rows * outputs * 4);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t n = 0; n < outputs; n++) {
            double expected = is_int8 ? expected_int8(&a, &w, row, n) : expected_fp32(&a, &w, row, n);
            check(is_int8 ? "int8 linear" : "fp32 linear", out[row * outputs + n], expected, 2e-4);
        }
        enginehouse_map(0, x + row * inputs, inputs, &single, 1, 1);
        enginehouse_linear(&single, &w, alone, 1, 0, 1);
        if (memcmp(alone, out + row * outputs, (size_t)outputs * 4) != 0) check("row alone, bits", 1, 0, 0);
    }
}

// --- Row operations --------------------------------------------------------------------------------------

static void test_rows(int64_t width) {
    enum { ROWS = 3 };
    float *x = random_floats(ROWS * 2 * width), *weight = random_floats(width), *bias = random_floats(width);
    struct activation out = new_activation(ROWS, width, false);
    enginehouse_norm(x, weight, bias, 1e-5f, width, &out, NULL, ROWS, 2);
    add_to_hash(out.values, ROWS * width * 4);
    for (int64_t row = 0; row < ROWS; row++) {
        const float *from = x + row * width;
        double mean = 0, variance = 0;
        for (int64_t i = 0; i < width; i++) mean += from[i] / (double)width;
        for (int64_t i = 0; i < width; i++) variance += (from[i] - mean) * (from[i] - mean) / (double)width;
        for (int64_t i = 0; i < width; i++)
            check("layer norm", out.values[row * width + i],
                  (from[i] - mean) / sqrt(variance + 1e-5) * weight[i] + bias[i], 1e-4);
    }
    for (int function = 1; function <= 4; function++) {
        enginehouse_map(function, x, width, &out, ROWS, 2);
        add_to_hash(out.values, ROWS * width * 4);
        for (int64_t i = 0; i < ROWS * width; i++) {
            double v = function == 1 ? x[i / width * 2 * width + i % width] : x[i];
            double y = 0.79788456080286536 * (v + 0.044715 * v * v * v);
            double expected[] = {0, v / (1 + exp(-v)) * x[i / width * 2 * width + width + i % width], v > 0 ? v : 0,
                                 0.5 * v * (1 + erf(v / sqrt(2))), 0.5 * v * (1 + tanh(y))};
            check("activation function", out.values[i], expected[function], 1e-5);
        }
    }
}

// --- Attention -------------------------------------------------------------------------------------------

enum { TOKENS = 75, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 40, BLOCKS = 4 };
#define WIDTH ((HEADS + 2 * KV_HEADS) * HEAD_DIM)

static double expected_attention(const float *qkv, int row, int head, int dim) {
    double score[TOKENS], largest = -INFINITY, total = 0, sum = 0;
    const float *query = qkv + row * WIDTH + head * HEAD_DIM;
    int kv_head = head / (HEADS / KV_HEADS);
    for (int t = 0; t <= row; t++) {
        const float *key = qkv + t * WIDTH + (HEADS + kv_head) * HEAD_DIM;
        score[t] = 0;
        for (int i = 0; i < HEAD_DIM; i++) score[t] += (double)query[i] * key[i] * 0.1;
        if (score[t] > largest) largest = score[t];
    }
    for (int t = 0; t <= row; t++) {
        double weight = exp(score[t] - largest);
        total += weight;
        sum += weight * qkv[t * WIDTH + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + dim];
    }
    return sum / total;
}

static void test_attention(bool is_half) {
    int64_t padded = (HEAD_DIM + 15) / 16 * 16, element = is_half ? 2 : 4;
    int64_t k_size = BLOCKS * KV_HEADS * HEAD_DIM * BLOCK * element, v_size = BLOCKS * KV_HEADS * BLOCK * padded * element;
    struct kv_layer kv = {malloc((size_t)k_size), malloc((size_t)v_size), BLOCKS, KV_HEADS, HEAD_DIM, padded, is_half};
    memset(kv.k, 0xff, (size_t)k_size); // NaN, in both formats
    memset(kv.v, 0xff, (size_t)v_size);
    const int32_t table[] = {2, 0, 3};
    int32_t row_seq[TOKENS] = {0}, positions[TOKENS];
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++) positions[i] = i, slots[i] = table[i / BLOCK] * BLOCK + i % BLOCK;
    float *qkv = random_floats(TOKENS * WIDTH), *out = zeros(TOKENS * HEADS * HEAD_DIM * 4);
    if (enginehouse_rope_and_store(qkv, positions, slots, NULL, NULL, 0, 0, NULL, NULL, 0, &kv, HEADS, TOKENS, 2) != 0)
        check("rope_and_store", 1, 0, 0);
    struct attention_batch batch = {row_seq, positions, table, 3};
    enginehouse_attention(qkv, &kv, &batch, 0.1f, out, HEADS, TOKENS, 2);
    add_to_hash(out, TOKENS * HEADS * HEAD_DIM * 4);
    for (int row = 0; row < TOKENS; row++)
        for (int head = 0; head < HEADS; head++)
            for (int dim = 0; dim < HEAD_DIM; dim++)
                check("attention", out[(row * HEADS + head) * HEAD_DIM + dim],
                      expected_attention(qkv, row, head, dim), is_half ? 5e-3 : 1e-5);
}

int main(void) {
    for (int is_int8 = 0; is_int8 <= 1; is_int8++) {
        test_linear(1, 16, 64, is_int8);
        test_linear(7, 37, 100, is_int8);
        test_linear(19, 70, 192, is_int8);
    }
    test_rows(64);
    test_rows(101);
    test_attention(false);
    test_attention(true);
    printf("%s %016llx %s\n", enginehouse_instruction_set(), (unsigned long long)hash, num_failures ? "FAILED" : "ok");
    return num_failures != 0;
}
