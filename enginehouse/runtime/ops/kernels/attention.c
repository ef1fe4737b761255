// Rotary embedding, writing the KV cache, and causal attention over KV blocks.
//
// Each (query, head) walks its sequence's blocks in order with an online softmax. Work is one tile of query rows of
// the same sequence by one KV head: the heads and rows of a tile share the loads of keys and values, and do nothing
// else together, so a row's bits are the same in any tile.
#include "product.h"

#include <stdlib.h>

// --- Rotary embedding and cache write --------------------------------------------------------------------

struct store_task {
    float *qkv; // [rows][(num_heads + 2 num_kv_heads) · head_dim]
    const int32_t *positions;
    const int64_t *slots;
    const float *cos, *sin; // [positions][half] or NULL
    const float *q_norm, *k_norm;
    const struct kv_layer *kv;
    int64_t half;
    int64_t num_heads;
    int64_t rows;
    int64_t rows_per_item;
    float eps;
};

static void normalise_head(float *x, const float *weight, float eps, int64_t width) {
    floats squares = splat(0.0f);
    for (int64_t at = 0; at < width; at += 16) {
        floats value = load_first(x + at, width - at);
        squares = fused(value, value, squares);
    }
    floats inverse = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / (float)width + eps));
    for (int64_t at = 0; at < width; at += 16) {
        int64_t count = width - at;
        floats value = mul(mul(load_first(x + at, count), inverse), load_first(weight + at, count));
        store_first(x + at, value, count);
    }
}

static void rotate_head(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t at = 0; at < half; at += 16) {
        int64_t count = half - at;
        floats first = load_first(x + at, count), second = load_first(x + half + at, count);
        floats c = load_first(cos + at, count), s = load_first(sin + at, count);
        store_first(x + at, sub(mul(first, c), mul(second, s)), count);
        store_first(x + half + at, add(mul(second, c), mul(first, s)), count);
    }
}

static void store_key(const struct kv_layer *kv, int64_t head, int64_t slot, const float *key) {
    int64_t start = ((slot / BLOCK) * kv->num_kv_heads + head) * kv->head_dim * BLOCK + slot % BLOCK;
    if (!kv->is_half) {
        float *to = (float *)kv->k + start;
        for (int64_t i = 0; i < kv->head_dim; i++) to[i * BLOCK] = key[i];
        return;
    }
    uint16_t *to = (uint16_t *)kv->k + start;
    for (int64_t at = 0; at < kv->head_dim; at += 16) {
        int64_t count = kv->head_dim - at < 16 ? kv->head_dim - at : 16;
        uint16_t half[16];
        store_half(half, load_first(key + at, count));
        for (int64_t i = 0; i < count; i++) to[(at + i) * BLOCK] = half[i];
    }
}

static void store_value(const struct kv_layer *kv, int64_t head, int64_t slot, const float *value) {
    int64_t row = ((slot / BLOCK) * kv->num_kv_heads + head) * BLOCK + slot % BLOCK;
    for (int64_t at = 0; at < kv->head_dim; at += 16) {
        floats x = load_first(value + at, kv->head_dim - at);
        int64_t to = row * kv->padded_dim + at;
        if (kv->is_half) {
            store_half((uint16_t *)kv->v + to, x);
        } else {
            store((float *)kv->v + to, x);
        }
    }
}

static void store_row(const struct store_task *task, int64_t row) {
    int64_t head_dim = task->kv->head_dim, num_kv_heads = task->kv->num_kv_heads;
    float *x = task->qkv + row * (task->num_heads + 2 * num_kv_heads) * head_dim;
    int64_t angle = task->cos ? task->positions[row] * task->half : 0;
    for (int64_t head = 0; head < task->num_heads + num_kv_heads; head++) {
        const float *norm = head < task->num_heads ? task->q_norm : task->k_norm;
        if (norm) normalise_head(x + head * head_dim, norm, task->eps, head_dim);
        if (task->cos) rotate_head(x + head * head_dim, task->cos + angle, task->sin + angle, task->half);
    }
    const float *keys = x + task->num_heads * head_dim, *values = keys + num_kv_heads * head_dim;
    for (int64_t head = 0; head < num_kv_heads; head++) {
        store_key(task->kv, head, task->slots[row], keys + head * head_dim);
        store_value(task->kv, head, task->slots[row], values + head * head_dim);
    }
}

static void store_rows(const void *context, int64_t item) {
    const struct store_task *task = context;
    int64_t end = (item + 1) * task->rows_per_item;
    if (end > task->rows) end = task->rows;
    for (int64_t row = item * task->rows_per_item; row < end; row++) store_row(task, row);
}

#define MIN_STORE_ROWS 16 // fewer rows are done before another thread has woken up

// Returns -1, having touched nothing, when a position or a slot does not exist.
EXPORT int64_t enginehouse_rope_and_store(float *qkv, const int32_t *positions, const int64_t *slots,
                                          const float *cos, const float *sin, int64_t half, int64_t max_positions,
                                          const float *q_norm, const float *k_norm, float eps,
                                          const struct kv_layer *kv, int64_t num_heads, int64_t rows,
                                          int64_t num_threads) {
    for (int64_t row = 0; row < rows; row++) {
        if (slots[row] < 0 || slots[row] >= kv->num_blocks * BLOCK) return -1;
        if (cos && (positions[row] < 0 || positions[row] >= max_positions)) return -1;
    }
    struct store_task task = {qkv, positions, slots, cos, sin, q_norm, k_norm, kv, half, num_heads, rows, rows, eps};
    // Of a long prompt a block's cache lines stay with one thread; a few rows are most likely of many sequences.
    if (rows > 2 * BLOCK) {
        task.rows_per_item = BLOCK;
    } else if (rows >= MIN_STORE_ROWS) {
        task.rows_per_item = (rows + num_threads - 1) / num_threads;
    }
    run_parallel(store_rows, &task, (rows + task.rows_per_item - 1) / task.rows_per_item, num_threads);
    return 0;
}

// --- Attention -------------------------------------------------------------------------------------------

#define MAX_QUERIES 24 // query vectors (rows · heads of a group) in a tile, a multiple of TILE_ROWS

struct query_tile {
    int32_t first_row;
    int32_t num_rows;
};

struct attention_task {
    const float *qkv;
    const struct kv_layer *kv;
    const struct attention_batch *batch;
    const struct query_tile *tiles;
    float *out;
    int64_t qkv_width;
    int64_t num_heads;
    int64_t heads_per_kv_head;
    int64_t num_tiles;
    float scale;
};

// What a tile of queries has gathered from the blocks seen so far.
struct softmax_state {
    float query[MAX_QUERIES * MAX_HEAD_DIM]; // scaled; stride head_dim
    float sum[MAX_QUERIES * MAX_HEAD_DIM];   // Σ probability · value; stride padded_dim
    float probability[MAX_QUERIES * BLOCK];
    float largest[MAX_QUERIES];
    floats weight[MAX_QUERIES]; // Σ probability, by lane
    float key_block[MAX_HEAD_DIM * BLOCK];
    float value_block[MAX_HEAD_DIM * BLOCK];
};

// A block's keys and values of one head.
struct block_view {
    const void *key;
    const void *value;
    int64_t head_dim;
    int64_t padded_dim;
    bool is_half;
};

ALWAYS_INLINE void multiply(int rows, int64_t width, bool is_half, bool accumulate, struct product p) {
    int64_t element = is_half ? 2 : 4, column = 0;
    struct product part = p;
    for (; column + TILE_VECTORS * 16 <= width; column += TILE_VECTORS * 16) {
        part.b = (const char *)p.b + column * element;
        part.c = p.c + column;
        product_rows(rows, TILE_VECTORS, is_half, accumulate, part);
    }
    for (; column < width; column += 16) {
        part.b = (const char *)p.b + column * element;
        part.c = p.c + column;
        product_rows(rows, 1, is_half, accumulate, part);
    }
}

static void multiply_half(int rows, int64_t width, bool accumulate, struct product p) {
    if (accumulate) {
        multiply(rows, width, true, true, p);
    } else {
        multiply(rows, width, true, false, p);
    }
}

static void multiply_float(int rows, int64_t width, bool accumulate, struct product p) {
    if (accumulate) {
        multiply(rows, width, false, true, p);
    } else {
        multiply(rows, width, false, false, p);
    }
}

static void multiply_queries(int64_t num_queries, int64_t width, bool is_half, bool accumulate, struct product p) {
    for (int64_t query = 0; query < num_queries; query += TILE_ROWS) {
        int64_t left = num_queries - query;
        int rows = (int)(left < TILE_ROWS ? left : TILE_ROWS);
        if (is_half) {
            multiply_half(rows, width, accumulate, p);
        } else {
            multiply_float(rows, width, accumulate, p);
        }
        p.a += rows * p.a_stride;
        p.c += rows * p.c_stride;
    }
}

// Scores of one query to probabilities relative to the largest score so far. Scores from `count` on are replaced,
// not added to, so whatever a stale key gave cannot matter.
ALWAYS_INLINE void update_softmax(struct softmax_state *state, int64_t query, int64_t count, int64_t padded_dim) {
    float *score = state->probability + query * BLOCK;
    float lane_index[BLOCK];
    for (int i = 0; i < BLOCK; i++) lane_index[i] = (float)i;
    floats limit = splat((float)count), lowest = splat(-__builtin_inff());
    floats low = load(score), high = load(score + 16);
    ints low_valid = splat_int(-1), high_valid = splat_int(-1);
    if (count < BLOCK) {
        low_valid = less_floats(load(lane_index), limit);
        high_valid = less_floats(load(lane_index + 16), limit);
        low = choose(low_valid, low, lowest);
        high = choose(high_valid, high, lowest);
    }
    float largest = max_lanes(greater_of(low, high));
    if (largest > state->largest[query]) {
        floats shrink = exponential(splat(state->largest[query] - largest));
        state->largest[query] = largest;
        state->weight[query] = mul(state->weight[query], shrink);
        float *sum = state->sum + query * padded_dim;
        for (int64_t at = 0; at < padded_dim; at += 16) store(sum + at, mul(load(sum + at), shrink));
    }
    floats top = splat(state->largest[query]);
    low = exponential(sub(low, top));
    high = exponential(sub(high, top));
    if (count < BLOCK) {
        low = choose(low_valid, low, splat(0.0f));
        high = choose(high_valid, high, splat(0.0f));
    }
    store(score, low);
    store(score + 16, high);
    state->weight[query] = add(state->weight[query], add(low, high));
}

// Lets queries first..end see the first `count` tokens of a block.
static void attend(struct softmax_state *state, int64_t first, int64_t end, int64_t count,
                   const struct block_view *block) {
    int64_t head_dim = block->head_dim, padded_dim = block->padded_dim;
    struct product scores = {state->query + first * head_dim, head_dim, block->key, BLOCK, head_dim,
                             state->probability + first * BLOCK, BLOCK};
    multiply_queries(end - first, BLOCK, block->is_half, false, scores);
    for (int64_t query = first; query < end; query++) update_softmax(state, query, count, padded_dim);
    struct product values = {state->probability + first * BLOCK, BLOCK, block->value, padded_dim, count,
                             state->sum + first * padded_dim, padded_dim};
    multiply_queries(end - first, padded_dim, block->is_half, true, values);
}

static void widen(float *to, const uint16_t *from, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) store(to + i, load_half(from + i));
}

// A block that many queries read is converted to fp32 once.
static struct block_view view_block(const struct attention_task *task, struct softmax_state *state, int64_t block,
                                    int64_t kv_head, int64_t num_queries, int64_t count) {
    const struct kv_layer *kv = task->kv;
    int64_t element = kv->is_half ? 2 : 4, head = block * kv->num_kv_heads + kv_head;
    struct block_view view = {(const char *)kv->k + head * kv->head_dim * BLOCK * element,
                              (const char *)kv->v + head * BLOCK * kv->padded_dim * element, kv->head_dim,
                              kv->padded_dim, kv->is_half != 0};
    if (kv->is_half && num_queries > TILE_ROWS) {
        widen(state->key_block, view.key, kv->head_dim * BLOCK);
        widen(state->value_block, view.value, count * kv->padded_dim);
        view = (struct block_view){state->key_block, state->value_block, kv->head_dim, kv->padded_dim, false};
    }
    return view;
}

static void start_tile(const struct attention_task *task, struct softmax_state *state, struct query_tile tile,
                       int64_t kv_head) {
    int64_t head_dim = task->kv->head_dim, heads = task->heads_per_kv_head, query = 0;
    for (int64_t row = 0; row < tile.num_rows; row++) {
        const float *from = task->qkv + (tile.first_row + row) * task->qkv_width + kv_head * heads * head_dim;
        for (int64_t i = 0; i < heads * head_dim; i++)
            state->query[row * heads * head_dim + i] = from[i] * task->scale;
        for (int64_t head = 0; head < heads; head++, query++) {
            state->largest[query] = -__builtin_inff();
            state->weight[query] = splat(0.0f);
        }
    }
    memset(state->sum, 0, (size_t)(query * task->kv->padded_dim) * sizeof(float));
}

static void finish_tile(const struct attention_task *task, const struct softmax_state *state, struct query_tile tile,
                        int64_t kv_head) {
    int64_t head_dim = task->kv->head_dim, heads = task->heads_per_kv_head, query = 0;
    for (int64_t row = 0; row < tile.num_rows; row++)
        for (int64_t head = 0; head < heads; head++, query++) {
            float *to = task->out +
                        ((tile.first_row + row) * task->num_heads + kv_head * heads + head) * head_dim;
            const float *sum = state->sum + query * task->kv->padded_dim;
            float inverse = 1.0f / sum_lanes(state->weight[query]);
            for (int64_t i = 0; i < head_dim; i++) to[i] = sum[i] * inverse;
        }
}

static void attend_tile(const void *context, int64_t item) {
    const struct attention_task *task = context;
    struct query_tile tile = task->tiles[task->num_tiles - 1 - item / task->kv->num_kv_heads];
    int64_t kv_head = item % task->kv->num_kv_heads, heads = task->heads_per_kv_head;
    const int32_t *positions = task->batch->positions + tile.first_row;
    const int32_t *table =
        task->batch->block_tables + task->batch->row_seq[tile.first_row] * task->batch->max_blocks;
    struct softmax_state state;
    start_tile(task, &state, tile, kv_head);
    int64_t last = positions[tile.num_rows - 1];
    for (int64_t start = 0; start <= last; start += BLOCK) {
        int64_t count = last + 1 - start < BLOCK ? last + 1 - start : BLOCK;
        struct block_view view =
            view_block(task, &state, table[start / BLOCK], kv_head, tile.num_rows * heads, count);
        // Positions never fall within a tile: the first rows may end inside this block or before it.
        int64_t row = 0;
        while (row < tile.num_rows && positions[row] + 1 - start < BLOCK) {
            int64_t visible = positions[row] + 1 - start, end = row + 1;
            while (end < tile.num_rows && positions[end] == positions[row]) end++;
            if (visible > 0) attend(&state, row * heads, end * heads, visible, &view);
            row = end;
        }
        if (row < tile.num_rows) attend(&state, row * heads, tile.num_rows * heads, BLOCK, &view);
    }
    finish_tile(task, &state, tile, kv_head);
}

// Cuts the rows into tiles: neighbours of one sequence whose positions do not fall.
static int64_t make_tiles(const struct attention_batch *batch, int64_t rows, int64_t max_rows,
                          struct query_tile *tiles) {
    int64_t num_tiles = 0;
    for (int64_t row = 0; row < rows; row++) {
        struct query_tile *last = tiles + num_tiles - 1;
        if (row > 0 && last->num_rows < max_rows && batch->row_seq[row] == batch->row_seq[row - 1] &&
            batch->positions[row] >= batch->positions[row - 1]) {
            last->num_rows++;
        } else {
            tiles[num_tiles++] = (struct query_tile){(int32_t)row, 1};
        }
    }
    return num_tiles;
}

// Returns 0, or -1 when there is no memory for the list of tiles.
EXPORT int64_t enginehouse_attention(const float *qkv, const struct kv_layer *kv, const struct attention_batch *batch,
                                     float scale, float *out, int64_t num_heads, int64_t rows, int64_t num_threads) {
    enum { ON_STACK = 512 };
    struct query_tile on_stack[ON_STACK], *tiles = on_stack;
    if (rows > ON_STACK) tiles = malloc((size_t)rows * sizeof *tiles);
    if (!tiles) return -1;
    int64_t heads = num_heads / kv->num_kv_heads, max_rows = MAX_QUERIES / heads;
    struct attention_task task = {qkv, kv, batch, tiles, out, (num_heads + 2 * kv->num_kv_heads) * kv->head_dim,
                                  num_heads, heads, 0, scale};
    task.num_tiles = make_tiles(batch, rows, max_rows > 1 ? max_rows : 1, tiles);
    run_parallel(attend_tile, &task, task.num_tiles * kv->num_kv_heads, num_threads);
    if (tiles != on_stack) free(tiles);
    return 0;
}
