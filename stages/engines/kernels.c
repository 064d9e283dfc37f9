/* What lies between the matrix products of a decoding pass, for CPUs: residual + norm, rotary embedding with paged
 * attention, the gate of the MLP, and the keyed draw of a token. `native_kernels.py` compiles and calls this file;
 * `torch_kernels.py` computes the same functions in plain torch and says what each means.
 *
 * Determinism: one thread computes all of a token's numbers in an order that only sizes of the model and the token's
 * own position decide. So they are the same bits in any batch, with any number of threads, wherever the keys lie, and
 * whether a token is decoded alone, with drafts, or as part of a prompt. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16 /* positions of a block of the cache: kv_cache.BLOCK_TOKENS */
#define CHUNK 1024 /* logits worked on at a time: their buffer stays in the first-level cache */
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* One number of each position of a block, or 16 numbers of one position. */
typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));

INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float load(const void *from, int64_t i, int dtype) {
    return dtype == BFLOAT16 ? float_of((uint32_t)((const uint16_t *)from)[i] << 16) : ((const float *)from)[i];
}

/* Rounds to nearest even; NaN stays NaN. */
INLINE void store(void *to, int64_t i, int dtype, float x) {
    if (dtype == BFLOAT16) {
        uint32_t bits = bits_of(x);
        uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
        ((uint16_t *)to)[i] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (uint16_t)rounded;
    } else {
        ((float *)to)[i] = x;
    }
}

/* e^x for |x| <= 87, clamped there (Cephes' expf, about 1 ulp): plain arithmetic, so that loops of it are vectorised. */
INLINE float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * float_of((uint32_t)((int32_t)n + 127) << 23);
}

/* Natural logarithm of a positive normal number (Cephes' logf, about 1 ulp). */
INLINE float log_(float x) {
    uint32_t bits = bits_of(x);
    int32_t exponent = (int32_t)(bits - 0x3f3504f3u) >> 23; /* the rest of x lies in [sqrt(1/2), sqrt(2)) */
    float f = float_of(bits - ((uint32_t)exponent << 23)) - 1.0f;
    float e = (float)exponent, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z - e * 2.12194440e-4f - 0.5f * z;
    return f + p + e * 0.693359375f;
}

/* log(1 + w) for -1 < w < 0, precise where w is small: log(u) w / (u - 1) with u = 1 + w rounded. */
INLINE float log1p_(float w) {
    float u = 1.0f + w, d = u - 1.0f;
    float ratio = w / (d == 0.0f ? 1.0f : d);
    return d == 0.0f ? w : log_(u) * ratio;
}

/* x [rows, width] += delta (none where null), then out = x / rms(x) * weight. */
void add_norm(float *x, const void *delta, int delta_dtype, const float *weight, float eps, void *out, int out_dtype,
              int rows, int width) {
#pragma omp parallel for schedule(static) if ((int64_t)rows * width > 32768)
    for (int row = 0; row < rows; row++) {
        float *xs = x + (int64_t)row * width;
        if (delta) {
            int64_t from = (int64_t)row * width;
            if (delta_dtype == BFLOAT16)
                for (int i = 0; i < width; i++) xs[i] += load(delta, from + i, BFLOAT16);
            else
                for (int i = 0; i < width; i++) xs[i] += load(delta, from + i, FLOAT32);
        }
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < width; i++) sum += xs[i] * xs[i];
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        int64_t to = (int64_t)row * width;
        if (out_dtype == BFLOAT16)
            for (int i = 0; i < width; i++) store(out, to + i, BFLOAT16, xs[i] * scale * weight[i]);
        else
            for (int i = 0; i < width; i++) store(out, to + i, FLOAT32, xs[i] * scale * weight[i]);
    }
}

INLINE void gate_row(const void *from, void *to, int64_t row, int width, int dtype) {
    for (int i = 0; i < width; i++) {
        float g = load(from, row * 2 * width + i, dtype), up = load(from, row * 2 * width + width + i, dtype);
        store(to, row * width + i, dtype, g / (1.0f + exp_(-g)) * up);
    }
}

/* gate_up [rows, 2 width] -> out [rows, width] = silu(gate) up. */
void gate(const void *gate_up, void *out, int dtype, int rows, int width) {
#pragma omp parallel for schedule(static) if ((int64_t)rows * width > 16384)
    for (int row = 0; row < rows; row++) {
        if (dtype == BFLOAT16)
            gate_row(gate_up, out, row, width, BFLOAT16);
        else
            gate_row(gate_up, out, row, width, FLOAT32);
    }
}

/* One head of `qkv` -> to, turned by the angles of its position. */
INLINE void rotate(const void *qkv, int dtype, int64_t at, int dim, const float *cosine, const float *sine, float *to) {
    int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = load(qkv, at + i, dtype), b = load(qkv, at + half + i, dtype);
        to[i] = a * cosine[i] - b * sine[i];
        to[half + i] = b * cosine[i] + a * sine[i];
    }
}

/* softmax(q K^T / sqrt(dim)) V over positions 0 .. length-1 of one head, its blocks named by `table`. A block of keys is
 * [dim, BLOCK], so that its 16 scores are made side by side; one of values [BLOCK, dim]. */
INLINE void read_head(const float *q, const float *keys, const float *values, const int32_t *table, int64_t head,
                      int64_t block_stride, int length, int dim, float *weights, void *out, int64_t out_at, int dtype) {
    float scale = 1.0f / sqrtf((float)dim), largest = -INFINITY, sum = 0.0f;
    for (int b = 0; b * BLOCK < length; b++) {
        const vec *key = (const vec *)(keys + table[b] * block_stride + head * BLOCK * dim);
        vec s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
        int i = 0;
        for (; i + 4 <= dim; i += 4) {
            s0 += q[i] * key[i];
            s1 += q[i + 1] * key[i + 1];
            s2 += q[i + 2] * key[i + 2];
            s3 += q[i + 3] * key[i + 3];
        }
        for (; i < dim; i++) s0 += q[i] * key[i];
        *(vec *)(weights + b * BLOCK) = ((s0 + s1) + (s2 + s3)) * scale;
    }
#pragma omp simd reduction(max : largest)
    for (int t = 0; t < length; t++) largest = weights[t] > largest ? weights[t] : largest;
#pragma omp simd reduction(+ : sum)
    for (int t = 0; t < length; t++) {
        weights[t] = exp_(weights[t] - largest);
        sum += weights[t];
    }
    if (dim == 64) { /* stays in four registers */
        vec r0 = {0}, r1 = {0}, r2 = {0}, r3 = {0};
        for (int t = 0; t < length; t++) {
            const vec *value = (const vec *)(values + table[t / BLOCK] * block_stride + (head * BLOCK + t % BLOCK) * 64);
            float w = weights[t];
            r0 += w * value[0];
            r1 += w * value[1];
            r2 += w * value[2];
            r3 += w * value[3];
        }
        float read[64];
        memcpy(read, &r0, 64), memcpy(read + 16, &r1, 64), memcpy(read + 32, &r2, 64), memcpy(read + 48, &r3, 64);
        for (int i = 0; i < 64; i++) store(out, out_at + i, dtype, read[i] / sum);
        return;
    }
    float read[dim];
    for (int i = 0; i < dim; i++) read[i] = 0.0f;
    for (int t = 0; t < length; t++) {
        const float *value = values + table[t / BLOCK] * block_stride + (head * BLOCK + t % BLOCK) * dim;
        float w = weights[t];
        for (int i = 0; i < dim; i++) read[i] += w * value[i];
    }
    for (int i = 0; i < dim; i++) store(out, out_at + i, dtype, read[i] / sum);
}

/* qkv [num, heads + 2 kv_heads, dim]; tables [rows, width]; keys [blocks, kv_heads, dim, BLOCK]; values [blocks, kv_heads,
 * BLOCK, dim]; queries: room for [num, heads, dim]; out [num, heads, dim]. All tokens are written before any is read.
 * Returns 1 if out of memory. */
int attend(const void *qkv, int dtype, int num, int heads, int kv_heads, int dim, const float *cosines,
           const float *sines, const int64_t *positions, const int32_t *rows, const int32_t *tables, int width,
           float *keys, float *values, float *queries, int longest, void *out) {
    int64_t block_stride = (int64_t)kv_heads * BLOCK * dim;
    int group = heads / kv_heads, half = dim / 2, failed = 0;
#pragma omp parallel if ((int64_t)num * longest * heads > 2048)
    {
        float *weights = malloc(sizeof(float) * (size_t)(longest + BLOCK));
        float turned[dim];
        if (!weights) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int n = 0; n < num; n++) {
            int64_t position = positions[n], at = (int64_t)n * (heads + 2 * kv_heads) * dim;
            const float *cosine = cosines + position * half, *sine = sines + position * half;
            int32_t block = tables[(int64_t)rows[n] * width + position / BLOCK];
            int64_t offset = position % BLOCK;
            for (int h = 0; h < heads; h++)
                rotate(qkv, dtype, at + (int64_t)h * dim, dim, cosine, sine, queries + ((int64_t)n * heads + h) * dim);
            for (int k = 0; k < kv_heads; k++) {
                int64_t to = block * block_stride + (int64_t)k * BLOCK * dim;
                int64_t value = at + (int64_t)(heads + kv_heads + k) * dim;
                rotate(qkv, dtype, at + (int64_t)(heads + k) * dim, dim, cosine, sine, turned);
                for (int i = 0; i < dim; i++) keys[to + i * BLOCK + offset] = turned[i];
                for (int i = 0; i < dim; i++) values[to + offset * dim + i] = load(qkv, value + i, dtype);
            }
        }
#pragma omp for schedule(dynamic, 8)
        for (int i = 0; i < num * heads; i++) {
            if (failed) continue;
            int n = i / heads, h = i % heads;
            const int32_t *table = tables + (int64_t)rows[n] * width;
            const float *query = queries + (int64_t)i * dim;
            int length = (int)positions[n] + 1;
            int64_t head = h / group, to = (int64_t)i * dim;
            if (dim == 64) /* known at compile time */
                read_head(query, keys, values, table, head, block_stride, length, 64, weights, out, to, dtype);
            else
                read_head(query, keys, values, table, head, block_stride, length, dim, weights, out, to, dtype);
        }
        free(weights);
    }
    return failed;
}

/* Standard Gumbel noise of one token: noise.py's function, word for word. */
INLINE float gumbel(uint32_t word, uint32_t low, uint32_t high) {
    uint32_t x = (word ^ low) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + high) * 0x846ca68bu;
    x = (x ^ (x >> 16)) & 0x7fffffffu;
    float w = ((float)(int32_t)x + 0.5f) * (float)(-(1.0 - 0x1p-24) * 0x1p-31);
    return -log_(-log1p_(w));
}

/* Per row of logits [rows, vocab]: the arg max of log p + noise (of log p alone at temperature 0), and its log p. */
void choose(const float *logits, const float *temperatures, const uint32_t *keys, const uint32_t *words, int rows,
            int vocab, int64_t *tokens, float *logprobs) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int row = 0; row < rows; row++) {
        const float *l = logits + (int64_t)row * vocab;
        float temperature = temperatures[row] > 0.0f ? temperatures[row] : 1.0f;
        uint32_t low = keys[2 * row], high = keys[2 * row + 1];
        float largest = -INFINITY, best = -INFINITY, scaled[CHUNK], noisy[CHUNK];
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < vocab; i++) largest = l[i] > largest ? l[i] : largest;
        largest /= temperature;
        double sum = 0.0;
        int chosen = 0;
        for (int start = 0; start < vocab; start += CHUNK) {
            int count = vocab - start < CHUNK ? vocab - start : CHUNK;
            float part = 0.0f, top = -INFINITY;
            for (int i = 0; i < count; i++) scaled[i] = l[start + i] / temperature;
#pragma omp simd reduction(+ : part)
            for (int i = 0; i < count; i++) part += exp_(scaled[i] - largest);
            sum += part;
            if (temperatures[row] > 0.0f)
                for (int i = 0; i < count; i++) noisy[i] = scaled[i] + gumbel(words[start + i], low, high);
            else
                memcpy(noisy, scaled, sizeof(float) * (size_t)count);
#pragma omp simd reduction(max : top)
            for (int i = 0; i < count; i++) top = noisy[i] > top ? noisy[i] : top;
            if (top > best) {
                best = top;
                for (int i = 0; i < count; i++)
                    if (noisy[i] == top) {
                        chosen = start + i;
                        break;
                    }
            }
        }
        tokens[row] = chosen;
        logprobs[row] = l[chosen] / temperature - largest - (float)log(sum);
    }
}
