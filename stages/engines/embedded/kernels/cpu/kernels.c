/* The operations of a decoding pass besides the matrix products, for CPUs: residual + norm, rotary embedding with paged
 * attention, the gate of the MLP, and the keyed draw of a token. With gemm.c's products they also make the two halves
 * of a block, in one call each. `native.py` calls this file; `reference.py` has the same functions in plain torch, and
 * protocol.py describes them.
 *
 * Determinism: one thread computes all of a token's numbers, in an order that depends only on the model's sizes and the
 * token's position. They are the same bits in any batch, with any number of threads, wherever the keys are, and whether
 * the token is decoded alone, with drafts, or as part of a prompt. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define BLOCK 16 /* positions in a block of the cache: protocol.BLOCK_TOKENS */
/* Maximum number of heads, of one token or of several tokens of one row, that read keys and values together. Four sums
 * of each head stay in registers. */
#ifdef __AVX512F__
#define LANES 6
#else
#define LANES 4
#endif
#define NOINLINE static __attribute__((noinline)) /* compiled once, not into each caller, which saves seconds */
#define CHUNK 1024 /* logits processed at a time: their buffer stays in the first-level cache */

/* Numbers of one position, or one number of each position of a block. */
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2), may_alias));

/* Loads a vector of numbers, from number i on. */
INLINE vec load_vec(const void *from, int64_t i, int dtype) {
    if (dtype == FLOAT32) return *(const vec *)((const float *)from + i);
    return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)from + i), words) << 16);
}

/* out = x / rms(x) * weight, one row. */
INLINE void norm_row(const float *x, const float *weight, float eps, void *out, int64_t to, int dtype, int width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)width + eps);
    if (dtype == BFLOAT16)
        for (int i = 0; i < width; i++) store(out, to + i, BFLOAT16, x[i] * scale * weight[i]);
    else
        for (int i = 0; i < width; i++) store(out, to + i, FLOAT32, x[i] * scale * weight[i]);
}

/* x [rows, width] += delta (unless null), then out = x / rms(x) * weight. */
void add_norm(float *x, const void *delta, int delta_dtype, const float *weight, float eps, void *out, int out_dtype,
              int rows, int width) {
#pragma omp parallel for schedule(static) if ((int64_t)rows * width > 32768)
    for (int row = 0; row < rows; row++) {
        int64_t at = (int64_t)row * width;
        float *xs = x + at;
        if (delta && delta_dtype == BFLOAT16)
            for (int i = 0; i < width; i++) xs[i] += load(delta, at + i, BFLOAT16);
        else if (delta)
            for (int i = 0; i < width; i++) xs[i] += load(delta, at + i, FLOAT32);
        norm_row(xs, weight, eps, out, at, out_dtype, width);
    }
}

/* to = silu(gate) up, `count` numbers of one row. */
INLINE void gate_part(const void *gate, const void *up, int from_dtype, int64_t from, void *out, int dtype, int64_t to,
                      int count) {
    for (int i = 0; i < count; i++) {
        float g = load(gate, from + i, from_dtype);
        store(out, to + i, dtype, g / (1.0f + exp_(-g)) * load(up, from + i, from_dtype));
    }
}

void gate_share(const void *gate_up, int from_dtype, void *out, int dtype, int rows, int width) {
    enum { PART = 256 };
    int parts = (width + PART - 1) / PART;
    int64_t size = size_of(from_dtype);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < (int64_t)rows * parts; i++) {
        int64_t row = i / parts, first = i % parts * PART, from = row * 2 * width + first, to = row * width + first;
        int count = width - first < PART ? (int)(width - first) : PART;
        const char *up = (const char *)gate_up + width * size;
        if (from_dtype == BFLOAT16)
            gate_part(gate_up, up, BFLOAT16, from, out, dtype, to, count);
        else if (dtype == BFLOAT16)
            gate_part(gate_up, up, FLOAT32, from, out, BFLOAT16, to, count);
        else
            gate_part(gate_up, up, FLOAT32, from, out, FLOAT32, to, count);
    }
}

void gate(const void *gate_up, void *out, int dtype, int rows, int width) {
#pragma omp parallel if ((int64_t)rows * width > 16384)
    gate_share(gate_up, dtype, out, dtype, rows, width);
}

/* Rotates one head of `qkv` by the angles of its position, into `to`. */
INLINE void rotate(const void *qkv, int dtype, int64_t at, int dim, const float *cosine, const float *sine, float *to) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = load(qkv, at + i, dtype), b = load(qkv, at + half + i, dtype);
        to[i] = a * cosine[i] - b * sine[i];
        to[half + i] = b * cosine[i] + a * sine[i];
    }
}

/* Number of blocks that hold this many positions. */
INLINE int blocks_for(int positions) { return (positions + BLOCK - 1) / BLOCK; }

/* The reads of one head of one token, and the place of its results; weights [longest], for its softmax. */
struct lane {
    const float *q;
    const char **keys, **values; /* blocks by position */
    float *weights, sum;
    int length;
    int64_t to; /* in `out` */
};

/* Blocks of keys, or of values. */
struct blocks {
    const char *const *at;
    int count;
};

/* Lanes that are read together: heads of one token, or of several tokens of one row. They share the keys and values of
 * the first `common` positions (all positions, or whole blocks). */
struct reading {
    struct lane lane[LANES];
    int lanes, common;
};

/* Scores of the positions in blocks from .. to - 1, which all lanes share. A block of keys is [dim, BLOCK], so that its
 * 16 scores are computed side by side. Prefetches the block's values, which have as many bytes. */
INLINE void score_blocks(int lanes, const struct lane *lane, int from, int to, int dim, int cache) {
    float scale = 1.0f / sqrtf((float)dim);
    int64_t row_bytes = BLOCK * size_of(cache);
    for (int b = from; b < to; b++) {
        const char *key = lane->keys[b], *ahead = lane->values[b];
        vec s[LANES][4] = {0};
        int i = 0;
        for (; i + 4 <= dim; i += 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                if (j * row_bytes % LINE == 0) fetch(ahead + (i + j) * row_bytes);
                vec numbers = load_vec(key, (i + j) * BLOCK, cache);
#pragma GCC unroll 6
                for (int l = 0; l < lanes; l++) s[l][j] += lane[l].q[i + j] * numbers;
            }
        for (; i < dim; i++)
            for (int l = 0; l < lanes; l++) s[l][0] += lane[l].q[i] * load_vec(key, i * BLOCK, cache);
#pragma GCC unroll 6
        for (int l = 0; l < lanes; l++)
            *(vec *)(lane[l].weights + b * BLOCK) = ((s[l][0] + s[l][1]) + (s[l][2] + s[l][3])) * scale;
    }
}

/* weights = e^(score - largest score), not normalised. */
NOINLINE void exponentiate_scores(struct lane *lane) {
    float *w = lane->weights, largest = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int t = 0; t < lane->length; t++) largest = w[t] > largest ? w[t] : largest;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < lane->length; t++) {
        w[t] = exp_(w[t] - largest);
        sum += w[t];
    }
    lane->sum = sum;
}

/* sums += weight times value over positions from .. to - 1, for 64 numbers from `first` on. A block of values is
 * [BLOCK, dim], shared by all lanes. Prefetches one block of `ahead` per block that is read. */
INLINE void weigh_values(int lanes, const struct lane *lane, int from, int to, int first, int dim, int cache,
                         struct blocks ahead, vec sums[][4]) {
    int64_t row_bytes = dim * size_of(cache);
    vec here[LANES][4];
#pragma GCC unroll 6
    for (int l = 0; l < lanes; l++) memcpy(here[l], sums[l], sizeof(here[l]));
    for (int b = from / BLOCK; b * BLOCK < to; b++) {
        int start = b * BLOCK < from ? from : b * BLOCK, end = b * BLOCK + BLOCK < to ? b * BLOCK + BLOCK : to;
        int64_t at = (start - b * BLOCK) * dim + first;
        const char *next = b < ahead.count ? ahead.at[b] : NULL;
        for (int t = start; t < end; t++, at += dim) {
            for (int64_t line = 0; next && line < row_bytes; line += LINE) fetch(next + line);
            if (next) next += row_bytes;
            vec numbers[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) numbers[v] = load_vec(lane->values[b], at + v * BLOCK, cache);
#pragma GCC unroll 6
            for (int l = 0; l < lanes; l++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) here[l][v] += lane[l].weights[t] * numbers[v];
        }
    }
#pragma GCC unroll 6
    for (int l = 0; l < lanes; l++) memcpy(sums[l], here[l], sizeof(here[l]));
}

/* to = read / sum, `count` numbers. */
NOINLINE void store_read(const float *read, float sum, int count, void *out, int64_t to, int dtype) {
    for (int i = 0; i < count; i++) store(out, to + i, dtype, read[i] / sum);
}

/* Scores of the positions that only one lane has; compiled once. */
NOINLINE void score_rest(const struct lane *lane, int common, int dim, int cache) {
    int from = common / BLOCK, to = blocks_for(lane->length);
    if (cache == BFLOAT16)
        score_blocks(1, lane, from, to, dim, BFLOAT16);
    else
        score_blocks(1, lane, from, to, dim, FLOAT32);
}

NOINLINE void weigh_rest(const struct lane *lane, int common, int first, int dim, int cache, vec sums[][4]) {
    struct blocks none = {NULL, 0};
    if (cache == BFLOAT16)
        weigh_values(1, lane, common, lane->length, first, dim, BFLOAT16, none, sums);
    else
        weigh_values(1, lane, common, lane->length, first, dim, FLOAT32, none, sums);
}

/* Reads the last numbers of a head, fewer than 64. */
NOINLINE void weigh_tail(const struct lane *lane, int first, int dim, int cache, void *out, int dtype) {
    float read[64] = {0};
    for (int t = 0; t < lane->length; t++) {
        const char *values = lane->values[t / BLOCK];
        for (int i = first; i < dim; i++) read[i - first] += lane->weights[t] * load(values, t % BLOCK * dim + i, cache);
    }
    store_read(read, lane->sum, dim - first, out, lane->to + first, dtype);
}

/* softmax(q K^T / sqrt(dim)) V of each lane over its positions 0 .. length-1. Keys and values that all lanes share are
 * read once; meanwhile the blocks of `ahead` are prefetched. Each lane's numbers are computed in the same order
 * whatever the other lanes are. `lanes` is the reading's. */
INLINE void read_lanes(int lanes, struct reading *reading, struct blocks ahead, int dim, int cache, void *out, int dtype) {
    struct lane *lane = reading->lane;
    struct blocks none = {NULL, 0};
    int common = reading->common;
    score_blocks(lanes, lane, 0, blocks_for(common), dim, cache);
    for (int l = 0; l < lanes; l++) {
        if (lane[l].length > common) score_rest(lane + l, common, dim, cache);
        exponentiate_scores(lane + l);
    }
    int first = 0;
    for (; first + 64 <= dim; first += 64) {
        vec sums[LANES][4] = {0};
        weigh_values(lanes, lane, 0, common, first, dim, cache, first ? none : ahead, sums);
        for (int l = 0; l < lanes; l++) {
            if (lane[l].length > common) weigh_rest(lane + l, common, first, dim, cache, sums + l);
            store_read((const float *)sums[l], lane[l].sum, 64, out, lane[l].to + first, dtype);
        }
    }
    for (int l = 0; l < lanes && first < dim; l++) weigh_tail(lane + l, first, dim, cache, out, dtype);
}

/* The tokens of a pass, and the cache of one block of the model: tables [rows, table_width]; keys [blocks, kv_heads,
 * dim, BLOCK] and values [blocks, kv_heads, BLOCK, dim] in the dtype `cache`. cells, starts, paths [.., path_width]:
 * the `TreePaths` of protocol.py, or null. */
struct context {
    const float *cosines, *sines;
    const int64_t *positions;
    const int32_t *rows, *tables;
    char *keys, *values;
    const int64_t *cells, *starts, *paths;
    int cache, table_width, path_width, longest, heads, kv_heads, dim;
};
LAYOUT(context, AT(context, cosines), AT(context, sines), AT(context, positions), AT(context, rows),
       AT(context, tables), AT(context, keys), AT(context, values), AT(context, cells), AT(context, starts),
       AT(context, paths), AT(context, cache), AT(context, table_width), AT(context, path_width),
       AT(context, longest), AT(context, heads), AT(context, kv_heads), AT(context, dim))

/* Finds the blocks of keys and values of key/value head k that token n reads, in order of position. If its last keys
 * are not in place, their blocks are assembled in `patched`: space for path_width / BLOCK + 2 blocks of keys, then of
 * values. */
static void find_blocks(const struct context *c, int n, int k, const char **keys, const char **values, char *patched) {
    int dim = c->dim, length = (int)c->positions[n] + 1;
    int64_t size = BLOCK * dim * size_of(c->cache), stride = c->kv_heads * size;
    const int32_t *table = c->tables + (int64_t)c->rows[n] * c->table_width;
    for (int b = 0; b * BLOCK < length; b++) {
        keys[b] = c->keys + table[b] * stride + k * size;
        values[b] = c->values + table[b] * stride + k * size;
    }
    if (!c->cells || c->starts[n] >= length) return;
    char *patched_values = patched + (c->path_width / BLOCK + 2) * size;
    for (int b = (int)c->starts[n] / BLOCK, i = 0; b * BLOCK < length; b++, i++) {
        memcpy(patched + i * size, keys[b], (size_t)size);
        memcpy(patched_values + i * size, values[b], (size_t)size);
        keys[b] = patched + i * size, values[b] = patched_values + i * size;
    }
    for (int t = (int)c->starts[n]; t < length; t++) {
        int64_t cell = c->paths[(int64_t)n * c->path_width + t - c->starts[n]], from = cell % BLOCK, to = t % BLOCK;
        int64_t block = table[cell / BLOCK] * stride + k * size;
        const char *key = c->keys + block, *value = c->values + block;
        for (int i = 0; i < dim; i++) {
            store((char *)keys[t / BLOCK], i * BLOCK + to, c->cache, load(key, i * BLOCK + from, c->cache));
            store((char *)values[t / BLOCK], to * dim + i, c->cache, load(value, from * dim + i, c->cache));
        }
    }
}

/* One thread's memory for reading keys and values: attention weights of one reading, and the blocks of two readings. */
struct workspace {
    float *weights;
    char *patched;
    const char **keys, **values;
    size_t weights_each, patched_each, blocks_each;
};

/* Sets `failed` if out of memory. The caller frees `weights`. */
static struct workspace make_workspace(const struct context *c, int *failed) {
    struct workspace space = {.blocks_each = (size_t)blocks_for(c->longest)};
    space.weights_each = space.blocks_each * BLOCK;
    size_t block_bytes = (size_t)(BLOCK * c->dim * size_of(c->cache)), pointers = 2 * space.blocks_each;
    if (c->cells) space.patched_each = 2 * (size_t)(c->path_width / BLOCK + 2) * block_bytes;
    size_t floats = LANES * space.weights_each, patched = 2 * LANES * space.patched_each;
    space.weights = malloc(sizeof(float) * floats + patched + sizeof(char *) * 2 * LANES * pointers);
    if (space.weights) {
        space.patched = (char *)(space.weights + floats);
        space.keys = (const char **)(space.patched + patched);
        space.values = space.keys + 2 * LANES * space.blocks_each;
    } else {
#pragma omp atomic write
        *failed = 1;
    }
    return space;
}

/* The division of the work: an item is one key/value head, or LANES of the heads that share it, of `together`
 * tokens. */
struct items {
    int num, together, parts, each; /* tokens; parts of a key/value head; items of the same tokens */
};

static struct items make_items(const struct context *c, int num) {
    int group = c->heads / c->kv_heads, parts = (group + LANES - 1) / LANES;
    return (struct items){num, parts == 1 ? LANES / group : 1, parts, c->kv_heads * parts};
}

/* Returns a thread's first item. The items are divided so that all threads read about the same number of positions.
 * For thread number `threads` (one after the last), returns the number of items. */
static int first_item(const struct context *c, struct items items, int thread, int threads) {
    int64_t total = 0, before = 0;
    for (int n = 0; n < items.num; n++) total += c->positions[n] + 1;
    int64_t begin = (total * items.each * thread + threads - 1) / threads;
    int item = 0;
    for (int n = 0; n < items.num; n += items.together, item += items.each) {
        int64_t cost = 0;
        for (int t = n; t < n + items.together && t < items.num; t++) cost += c->positions[t] + 1;
        if (thread < threads && before + cost * items.each > begin) return item + (int)((begin - before + cost - 1) / cost);
        before += cost * items.each;
    }
    return item;
}

/* Returns the number of positions, from the first on, for which all tokens of a reading have the same keys, in whole
 * blocks. */
static int common_positions(const struct lane *lane, int tokens, int count) {
    int shortest = lane->length, b = 0;
    if (tokens == 1) return shortest;
    for (int t = 1; t < tokens; t++) shortest = lane[t * count].length < shortest ? lane[t * count].length : shortest;
    for (; (b + 1) * BLOCK <= shortest; b++)
        for (int t = 1; t < tokens; t++)
            if (lane[t * count].keys[b] != lane->keys[b]) return b * BLOCK;
    return b * BLOCK;
}

/* A thread's progress: the next token of its next item. */
struct cursor {
    int item, last, n;
};

/* Prepares the thread's next reading; returns 0 if there is none. `half`: part of the workspace, 0 or 1. */
static int next_reading(const struct context *c, struct items items, const float *queries, struct workspace space,
                        int half, struct cursor *at, struct reading *reading) {
    if (at->item >= at->last) return 0;
    int group = c->heads / c->kv_heads, k = at->item % items.each / items.parts, part = at->item % items.parts;
    int h = k * group + part * LANES, count = group - part * LANES < LANES ? group - part * LANES : LANES;
    int begin = at->item / items.each * items.together, end = begin + items.together, n = begin + at->n, tokens = 1;
    end = end < items.num ? end : items.num;
    while (n + tokens < end && c->rows[n + tokens] == c->rows[n]) tokens++;
    for (int t = 0; t < tokens; t++) {
        size_t place = (size_t)(half * LANES + t);
        const char **keys = space.keys + place * space.blocks_each, **values = space.values + place * space.blocks_each;
        find_blocks(c, n + t, k, keys, values, space.patched + place * space.patched_each);
        for (int l = t * count; l < (t + 1) * count; l++) {
            int64_t head = ((int64_t)(n + t) * c->heads + h + l - t * count) * c->dim;
            float *weights = space.weights + (size_t)l * space.weights_each;
            int length = (int)c->positions[n + t] + 1;
            reading->lane[l] = (struct lane){queries + head, keys, values, weights, 0.0f, length, head};
        }
    }
    reading->lanes = tokens * count;
    reading->common = common_positions(reading->lane, tokens, count);
    at->n += tokens;
    if (n + tokens >= end) at->item++, at->n = 0;
    return 1;
}

/* Writes the keys and values of token n to the cache, and its rotated queries to `queries`. `turned`: space [dim]. */
INLINE void write_token(const void *qkv, int dtype, int n, const struct context *c, float *queries, float *turned) {
    int heads = c->heads, kv_heads = c->kv_heads, dim = c->dim, half = dim / 2;
    int64_t position = c->positions[n], at = (int64_t)n * (heads + 2 * kv_heads) * dim;
    const float *cosine = c->cosines + position * half, *sine = c->sines + position * half;
    int64_t cell = c->cells ? c->cells[n] : position, offset = cell % BLOCK;
    int32_t block = c->tables[(int64_t)c->rows[n] * c->table_width + cell / BLOCK];
    for (int h = 0; h < heads; h++)
        rotate(qkv, dtype, at + (int64_t)h * dim, dim, cosine, sine, queries + ((int64_t)n * heads + h) * dim);
    for (int k = 0; k < kv_heads; k++) {
        int64_t to = ((int64_t)block * kv_heads + k) * BLOCK * dim, value = at + (int64_t)(heads + kv_heads + k) * dim;
        rotate(qkv, dtype, at + (int64_t)(heads + k) * dim, dim, cosine, sine, turned);
        for (int i = 0; i < dim; i++) store(c->keys, to + i * BLOCK + offset, c->cache, turned[i]);
        for (int i = 0; i < dim; i++) store(c->values, to + offset * dim + i, c->cache, load(qkv, value + i, dtype));
    }
}

INLINE void read_out(struct reading *reading, struct blocks ahead, const struct context *c, void *out, int dtype) {
#define CASE(few) \
    case few: \
        if (c->cache == BFLOAT16) /* known at compile time */ \
            read_lanes(few, reading, ahead, c->dim, BFLOAT16, out, dtype); \
        else \
            read_lanes(few, reading, ahead, c->dim, FLOAT32, out, dtype); \
        break
    switch (reading->lanes) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
#if LANES > 4
        CASE(5);
        CASE(6);
#endif
    }
#undef CASE
}

/* One thread's share of the attention; all threads wait at its end. qkv [num, heads + 2 kv_heads, dim]; queries: space
 * for [num, heads, dim]; out [num, heads, dim]. All tokens are written before any is read. While the thread reads, it
 * prefetches the keys of its next reading. */
static void attend_share(const void *qkv, int dtype, int num, const struct context *c, float *queries, void *out,
                         int out_dtype, struct workspace space, const int *failed) {
    float turned[c->dim];
#pragma omp for schedule(static)
    for (int n = 0; n < num; n++) write_token(qkv, dtype, n, c, queries, turned);
    if (!*failed) {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads(), half = 0;
        struct items items = make_items(c, num);
        struct cursor at = {first_item(c, items, thread, threads), first_item(c, items, thread + 1, threads), 0};
        struct reading readings[2];
        int has_next = next_reading(c, items, queries, space, half, &at, readings);
        while (has_next) {
            struct reading *now = readings + half, *next = readings + (half ^= 1);
            has_next = next_reading(c, items, queries, space, half, &at, next);
            struct blocks ahead = {has_next ? next->lane->keys : NULL, has_next ? blocks_for(next->common) : 0};
            read_out(now, ahead, c, out, out_dtype);
        }
    }
#pragma omp barrier
}

/* Returns 1 if out of memory. */
int attend(const void *qkv, int dtype, int num, const struct context *context, float *queries, void *out) {
    int failed = 0;
#pragma omp parallel if ((int64_t)num * context->longest * context->heads > 2048)
    {
        struct workspace space = make_workspace(context, &failed);
        attend_share(qkv, dtype, num, context, queries, out, dtype, space, &failed);
        free(space.weights);
    }
    return failed;
}

/* One block of the model: norms, weights, and its part of the cache. */
struct block {
    const float *attention_norm, *mlp_norm;
    const struct weight *qkv, *out, *gate_up, *down;
    char *keys, *values;
    const float *qkv_bias, *q_norm, *k_norm; /* null if the model has none; both norms or neither */
};
LAYOUT(block, AT(block, attention_norm), AT(block, mlp_norm), AT(block, qkv), AT(block, out), AT(block, gate_up),
       AT(block, down), AT(block, keys), AT(block, values), AT(block, qkv_bias), AT(block, q_norm), AT(block, k_norm))

/* Memory for the intermediate results of a block, for `num` tokens: in the weights' dtype, normed (as wide as the
 * widest input of the weights that it is multiplied with), read (as out's input) and gated (as down's input);
 * projected, as wide as qkv's or gate_up's output; queries [num, heads, dim]. */
struct buffers {
    void *normed;
    float *projected, *queries;
    void *read, *gated;
};
LAYOUT(buffers, AT(buffers, normed), AT(buffers, projected), AT(buffers, queries), AT(buffers, read),
       AT(buffers, gated))

/* One thread's share of out = x / rms(x) * norm, each [num, width]. All threads wait at its end. */
INLINE void norm_share(const float *x, const float *norm, float eps, int num, int width, void *out, int dtype) {
#pragma omp for schedule(static)
    for (int n = 0; n < num; n++) norm_row(x + (int64_t)n * width, norm, eps, out, (int64_t)n * width, dtype, width);
}

/* Adds the biases to qkv [num, heads + 2 kv_heads, dim] and norms each head of queries and keys, if the model has
 * biases or norms. One thread's share: the tokens whose keys it writes next, so that no thread has to wait. */
static void finish_share(float *qkv, const struct block *block, float eps, int num, const struct context *c) {
    if (!block->qkv_bias && !block->q_norm) return;
    int width = (c->heads + 2 * c->kv_heads) * c->dim, dim = c->dim;
#pragma omp for schedule(static) nowait
    for (int n = 0; n < num; n++) {
        float *row = qkv + (int64_t)n * width;
        for (int i = 0; block->qkv_bias && i < width; i++) row[i] += block->qkv_bias[i];
        for (int h = 0; block->q_norm && h < c->heads + c->kv_heads; h++) {
            float *head = row + h * dim;
            norm_row(head, h < c->heads ? block->q_norm : block->k_norm, eps, head, 0, FLOAT32, dim);
        }
    }
}

/* One thread's share of into [num, width] += attention of the normed x [num, width]. Other threads may still write to
 * `into` at its end. */
static void attention_share(const float *x, const struct block *block, float eps, int num, const struct context *context,
                            const struct buffers *to, float *into, struct workspace space, const int *failed) {
    int thread = omp_get_thread_num(), threads = omp_get_num_threads(), dtype = block->qkv->dtype;
    norm_share(x, block->attention_norm, eps, num, (int)block->qkv->in, to->normed, dtype);
    product_share(to->normed, block->qkv, block->out, num, to->projected, FLOAT32, STORE, thread, threads);
#pragma omp barrier
    finish_share(to->projected, block, eps, num, context);
    attend_share(to->projected, FLOAT32, num, context, to->queries, to->read, dtype, space, failed);
    product_share(to->read, block->out, block->gate_up, num, into, FLOAT32, ADD, thread, threads);
}

/* The same for the MLP. `after`: see product_share. */
static void mlp_share(const float *x, const struct block *block, const struct weight *after, float eps, int num,
                      const struct buffers *to, float *into) {
    int thread = omp_get_thread_num(), threads = omp_get_num_threads(), dtype = block->gate_up->dtype;
    norm_share(x, block->mlp_norm, eps, num, (int)block->gate_up->in, to->normed, dtype);
    product_share(to->normed, block->gate_up, block->down, num, to->projected, FLOAT32, STORE, thread, threads);
#pragma omp barrier
    gate_share(to->projected, FLOAT32, to->gated, dtype, num, (int)block->down->in);
    product_share(to->gated, block->down, after, num, into, FLOAT32, ADD, thread, threads);
}

INLINE int64_t numbers(const struct weight *weight) { return weight->out * weight->in; }

/* The first half of a block. `into` may be x. Returns 1 if out of memory. */
int attention(const float *x, const struct block *block, float eps, int num, const struct context *context,
              const struct buffers *buffers, float *into) {
    int failed = 0;
#pragma omp parallel if (num * numbers(block->qkv) > 65536)
    {
        struct workspace space = make_workspace(context, &failed);
        attention_share(x, block, eps, num, context, buffers, into, space, &failed);
        free(space.weights);
    }
    return failed;
}

/* The second half. */
void mlp(const float *x, const struct block *block, float eps, int num, const struct buffers *buffers, float *into) {
#pragma omp parallel if (num * numbers(block->gate_up) > 65536)
    mlp_share(x, block, NULL, eps, num, buffers, into);
}

/* Passes x [num, width] through all blocks, in place. Returns 1 if out of memory. */
int run_blocks(float *x, const struct block *blocks, int num_blocks, float eps, int num, const struct context *context,
               const struct buffers *buffers) {
    int failed = 0;
#pragma omp parallel if (num * numbers(blocks->gate_up) > 65536)
    {
        struct workspace space = make_workspace(context, &failed);
        struct context here = *context;
        for (const struct block *block = blocks; block < blocks + num_blocks; block++) {
            here.keys = block->keys, here.values = block->values;
            attention_share(x, block, eps, num, &here, buffers, x, space, &failed);
#pragma omp barrier
            mlp_share(x, block, block + 1 < blocks + num_blocks ? block[1].qkv : NULL, eps, num, buffers, x);
#pragma omp barrier
        }
        free(space.weights);
    }
    return failed;
}

/* Updates *best and *chosen with the scaled logits [count] of tokens first, first + 1, ...: the largest logit + noise,
 * and its index, the smaller one if equal. Computes noise only where its bound exceeds *best. */
INLINE void draw_part(const float *scaled, const uint32_t *words, uint32_t low, uint32_t high, int first, int count,
                      float *best, int *chosen) {
    enum { PART = 128 };
    float w[PART], noisy[PART];
    for (int start = 0; start < count; start += PART) {
        int size = count - start < PART ? count - start : PART;
        float bound = -INFINITY, top = -INFINITY;
        for (int i = 0; i < size; i++) w[i] = below_one(words[first + start + i], low, high);
#pragma omp simd reduction(max : bound)
        for (int i = 0; i < size; i++) {
            float most = scaled[start + i] + gumbel_bound(w[i]);
            bound = most > bound ? most : bound;
        }
        if (bound < *best) continue;
        for (int i = 0; i < size; i++) noisy[i] = scaled[start + i] + gumbel_at(w[i]);
#pragma omp simd reduction(max : top)
        for (int i = 0; i < size; i++) top = noisy[i] > top ? noisy[i] : top;
        if (top < *best) continue;
        int at = 0;
        while (at < size - 1 && noisy[at] != top) at++;
        if (top > *best || first + start + at < *chosen) *best = top, *chosen = first + start + at;
    }
}

/* Per row of logits [rows, vocab]: the arg max of log p + noise (of log p alone at temperature 0), and its log p. If
 * `parts` is given, the logits are a part of the vocabulary, and parts [rows, 4] receives per row the numbers for
 * joining the parts: the best logit + noise, that logit, the largest logit, and the sum of e^(logit - largest). */
void choose(const float *logits, const float *temperatures, const uint32_t *keys, const uint32_t *words, int rows,
            int vocab, int64_t *tokens, float *logprobs, double *parts) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int row = 0; row < rows; row++) {
        const float *l = logits + (int64_t)row * vocab;
        float temperature = temperatures[row] > 0.0f ? temperatures[row] : 1.0f;
        uint32_t low = keys[2 * row], high = keys[2 * row + 1];
        float largest = -INFINITY, best = -INFINITY, scaled[CHUNK];
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < vocab; i++) largest = l[i] > largest ? l[i] : largest;
        int likeliest = 0, chosen = 0;
        for (int start = 0; start < vocab; start += CHUNK) { /* single numbers only where it ends */
            int count = vocab - start < CHUNK ? vocab - start : CHUNK, there = 0;
            for (int i = 0; i < count; i++) there |= l[start + i] == largest;
            if (!there) continue;
            for (likeliest = start; l[likeliest] != largest;) likeliest++;
            break;
        }
        largest /= temperature;
        chosen = likeliest;
        best = l[likeliest] / temperature;
        if (temperatures[row] > 0.0f) best += gumbel(words[likeliest], low, high);
        double sum = 0.0;
        for (int start = 0; start < vocab; start += CHUNK) {
            int count = vocab - start < CHUNK ? vocab - start : CHUNK;
            float part = 0.0f;
            for (int i = 0; i < count; i++) scaled[i] = l[start + i] / temperature;
#pragma omp simd reduction(+ : part)
            for (int i = 0; i < count; i++) part += exp_(scaled[i] - largest);
            sum += part;
            if (temperatures[row] > 0.0f) draw_part(scaled, words, low, high, start, count, &best, &chosen);
        }
        tokens[row] = chosen;
        logprobs[row] = l[chosen] / temperature - largest - (float)log(sum);
        if (parts) {
            parts[4 * row] = best, parts[4 * row + 1] = l[chosen] / temperature;
            parts[4 * row + 2] = largest, parts[4 * row + 3] = sum;
        }
    }
}

/* Ends the calling thread's OpenMP helper threads; its next parallel region starts new ones. In GNU's runtime idle
 * helper threads wait actively only while the whole process has no more of them than processors. If the helpers of a
 * thread that multiplied once stayed, every region of the engine's thread would have to put its own to sleep and wake
 * them. */
void end_threads(void) {
#if _OPENMP >= 201811 || (defined(__GNUC__) && __GNUC__ >= 9 && !defined(__clang__)) /* gcc 9 has the call already */
    omp_pause_resource(omp_pause_soft, omp_get_initial_device());
#endif
}
