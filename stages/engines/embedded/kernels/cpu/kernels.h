/* Shared by kernels.c, gemm.c and drafts.c: noise and products (numbers.h has the arithmetic). */

#ifndef STAGELINE_KERNELS_H
#define STAGELINE_KERNELS_H

#include "numbers.h"

enum { LINE = 64 }; /* bytes of a cache line */

/* Prefetches a cache line into the second-level cache, so that waiting for it does not hold up plain loads. */
INLINE void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }

/* log(1 + w) for -1 < w < 0, precise where w is small: log(u) w / (u - 1) with u = 1 + w rounded. */
INLINE float log1p_(float w) {
    float u = 1.0f + w, d = u - 1.0f;
    float ratio = w / (d == 0.0f ? 1.0f : d);
    return d == 0.0f ? w : log_(u) * ratio;
}

/* u - 1 of the uniform variate u of one token. This and the next functions equal those of sampling.py. */
INLINE float below_one(uint32_t word, uint32_t low, uint32_t high) {
    uint32_t x = (word ^ low) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + high) * 0x846ca68bu;
    x = (x ^ (x >> 16)) & 0x7fffffffu;
    return ((float)(int32_t)x + 0.5f) * (float)(-(1.0 - 0x1p-24) * 0x1p-31);
}

INLINE float gumbel_at(float w) { return -log_(-log1p_(w)); }

/* Standard Gumbel noise of one token. */
INLINE float gumbel(uint32_t word, uint32_t low, uint32_t high) { return gumbel_at(below_one(word, low, high)); }

/* An upper bound of gumbel_at(w): -log(-log(1 + w)) < -log(-w) <= -log 2^floor(log2 -w). As 0.7 > log 2 and w is at
 * most -2^-33, the difference is more than the rounding errors. */
INLINE float gumbel_bound(float w) {
    return 0.7f * (float)(127 - (int32_t)(bits_of(w) << 1 >> 24)) + 0.01f;
}

/* The use of a product: store it, in either dtype, or add it to float32 numbers. */
enum { STORE = 0, ADD = 1 };

/* A packed weight [out, in]; see gemm.c. `native.py` has the same record. */
struct weight {
    const void *tiles;
    int64_t out, in;
    int dtype;
};

/* One thread's share of to [rows, out] = x [rows, in] W^T, x in the weight's dtype. The shares of all threads make up
 * the whole. `after`: the weight of the next product, or null; its beginning is prefetched. */
void product_share(const void *x, const struct weight *weight, const struct weight *after, int64_t rows, void *to,
                   int to_dtype, int then, int thread, int threads);

/* One thread's share of out [rows, width] = silu(gate) up, from gate_up [rows, 2 width]. All threads wait at its
 * end. */
void gate_share(const void *gate_up, int from_dtype, void *out, int dtype, int rows, int width);

#endif
