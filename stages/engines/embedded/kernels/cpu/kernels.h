/* What kernels.c, gemm.c and drafts.c share: numbers in float32 and bfloat16, e^x, logarithms, noise, products. */

#ifndef STAGELINE_KERNELS_H
#define STAGELINE_KERNELS_H

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1 };
enum { LINE = 64 }; /* bytes of a cache line */

/* Bytes of a number. */
INLINE int64_t size_of(int dtype) { return dtype == BFLOAT16 ? 2 : 4; }

/* Asks for a cache line, into the second-level cache: what waits for it does not hold up plain loads. */
INLINE void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }

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

/* The bits of the nearest bfloat16, of two the even one; NaN stays NaN. */
INLINE uint32_t rounded(float x) {
    uint32_t bits = bits_of(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
}

INLINE void store(void *to, int64_t i, int dtype, float x) {
    if (dtype == BFLOAT16)
        ((uint16_t *)to)[i] = (uint16_t)rounded(x);
    else
        ((float *)to)[i] = x;
}

/* e^x for |x| <= 87, clamped there (Cephes' expf, about 1 ulp): plain arithmetic, so that loops of it are vectorised. */
INLINE float exp_(float x) {
    /* as bits: of a choice compilers make paths of their own, with the constants worked into what follows, and execute
     * both; e^87 is where that ends in denormal numbers, each of which may cost hundreds of cycles */
    uint32_t below = -(uint32_t)(x < -87.0f), above = -(uint32_t)(x > 87.0f);
    x = float_of((bits_of(x) & ~(below | above)) | (bits_of(-87.0f) & below) | (bits_of(87.0f) & above));
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

/* u - 1 of the uniform variate of one token: noise.py's function, word for word, as are those after it. */
INLINE float below_one(uint32_t word, uint32_t low, uint32_t high) {
    uint32_t x = (word ^ low) * 0x7feb352du;
    x = ((x ^ (x >> 15)) + high) * 0x846ca68bu;
    x = (x ^ (x >> 16)) & 0x7fffffffu;
    return ((float)(int32_t)x + 0.5f) * (float)(-(1.0 - 0x1p-24) * 0x1p-31);
}

INLINE float gumbel_at(float w) { return -log_(-log1p_(w)); }

/* Standard Gumbel noise of one token. */
INLINE float gumbel(uint32_t word, uint32_t low, uint32_t high) { return gumbel_at(below_one(word, low, high)); }

/* Never below gumbel_at(w): -log(-log(1 + w)) < -log(-w) <= -log 2^floor(log2 -w), and 0.7 > log 2 leaves more than
 * rounding takes, as w is never above -2^-33. */
INLINE float gumbel_bound(float w) {
    return 0.7f * (float)(127 - (int32_t)(bits_of(w) << 1 >> 24)) + 0.01f;
}

/* What becomes of a product: stored, in either dtype, or added to float32 numbers. */
enum { STORE = 0, ADD = 1 };

/* A packed weight [out, in]; see gemm.c. `native.py` has the same. */
struct weight {
    const void *tiles;
    int64_t out, in;
    int dtype;
};

/* One thread's share of to [rows, out] = x [rows, in] W^T, x in the weight's dtype. The shares of all
 * threads make the whole. `after`: the weight of the next product, or null; its beginning is fetched meanwhile. */
void product_share(const void *x, const struct weight *weight, const struct weight *after, int64_t rows, void *to,
                   int to_dtype, int then, int thread, int threads);

/* gate_up [rows, 2 width] -> out [rows, width] = silu(gate) up. One thread's share; all wait at its end. */
void gate_share(const void *gate_up, int from_dtype, void *out, int dtype, int rows, int width);

#endif
