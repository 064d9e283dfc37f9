/* Conversions of float32 and bfloat16, e^x and logarithms for kernels in C: plain arithmetic, which compilers
 * vectorise. */

#ifndef STAGELINE_NUMBERS_H
#define STAGELINE_NUMBERS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1 };

/* Return the size of a number in bytes. */
INLINE int64_t size_of(int dtype) { return dtype == BFLOAT16 ? 2 : 4; }

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

/* Return the bits of the bfloat16 nearest to x. Of two equally near ones it is the even one. NaN stays NaN. */
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

/* Return e^x, with x clamped to -87 .. 87 (Cephes' expf, about 1 ulp). Plain arithmetic, so that compilers vectorise
 * loops of it. */
INLINE float exp_(float x) {
    /* x is clamped by bit masks. From a condition, compilers would make two paths with the constants folded in, and
     * execute both. The path for -87 ends in denormal numbers, each of which may cost hundreds of cycles. */
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

/* Return the natural logarithm of a positive normal number (Cephes' logf, about 1 ulp). */
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

/* Define the function `layout_NAME` of a struct that Python builds too. The function writes `space` numbers: the
 * offsets of the named fields in their order, the struct's size, -1, and then -2 as often as there is space.
 * `compile.py` compares these numbers with the layout in Python. */
#define LAYOUT(record, ...) \
    void layout_##record(int64_t *to, int space) { \
        const int64_t layout[] = {__VA_ARGS__, (int64_t)sizeof(struct record), -1}; \
        for (int i = 0; i < space; i++) to[i] = i < (int)(sizeof(layout) / sizeof(layout[0])) ? layout[i] : -2; \
    }
#define AT(record, field) (int64_t)offsetof(struct record, field)

#endif
