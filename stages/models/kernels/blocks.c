/* A trained transformer block's operations between its matrix products, on a CPU: norms, the gate of the MLP, splitting
 * and rotating queries, keys and values, adding residuals and gradients. Each reads its inputs once and writes its
 * outputs once. `blocks.py` calls this file, defines the functions, and computes them in plain torch.
 *
 * Determinism: the order of every sum depends on sizes alone, not on the number of threads. */

#include <math.h>
#include <stddef.h>

#include "numbers.h"

/* Number of parts that the rows are cut into for a norm weight's gradient: summed within each part, then over parts in
 * order. */
enum { PARTS = 16 };

/* Sum of products of two rows, vectorised. */
INLINE float dot(const float *a, const float *b, int width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; i++) sum += a[i] * b[i];
    return sum;
}

INLINE void norm_row(const float *x, const void *weight, int weight_dtype, float scale, void *out, int64_t to,
                     int out_dtype, int width) {
#pragma omp simd
    for (int i = 0; i < width; i++) store(out, to + i, out_dtype, x[i] * scale * load(weight, i, weight_dtype));
}

/* out = x scale weight with scale = 1 / rms(x). The scales are written for the backward pass. */
void norm(const float *x, const void *weight, int weight_dtype, float eps, void *out, int out_dtype, float *scales,
          int64_t rows, int width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *xs = x + row * width;
        float scale = scales[row] = 1.0f / sqrtf(dot(xs, xs, width) / (float)width + eps);
        if (weight_dtype == FLOAT32)
            norm_row(xs, weight, FLOAT32, scale, out, row * width, FLOAT32, width);
        else if (out_dtype == FLOAT32)
            norm_row(xs, weight, BFLOAT16, scale, out, row * width, FLOAT32, width);
        else
            norm_row(xs, weight, BFLOAT16, scale, out, row * width, BFLOAT16, width);
    }
}

INLINE void norm_gradient_row(const void *grad, int64_t from, int grad_dtype, const float *x, const void *weight,
                              int weight_dtype, float scale, float *dx, float *sum, int width) {
    float inner = 0.0f;
#pragma omp simd reduction(+ : inner)
    for (int i = 0; i < width; i++) inner += load(grad, from + i, grad_dtype) * load(weight, i, weight_dtype) * x[i];
    float pull = inner * scale * scale / (float)width;
#pragma omp simd
    for (int i = 0; i < width; i++) {
        float g = load(grad, from + i, grad_dtype);
        dx[i] = scale * (g * load(weight, i, weight_dtype) - x[i] * pull);
        sum[i] += g * (x[i] * scale);
    }
}

/* With n = x scale and h = grad weight:   dx = scale (h - n mean(h n))   and   dweight = sum over rows of grad n.
 * dx is written; dweight is added to, and may be null. `parts`: PARTS x width numbers of scratch. */
void norm_gradient(const void *grad, int grad_dtype, const float *x, const void *weight, int weight_dtype,
                   const float *scales, float *dx, float *dweight, float *parts, int64_t rows, int width) {
#pragma omp parallel for schedule(static, 1)
    for (int part = 0; part < PARTS; part++) {
        float *sum = parts + (int64_t)part * width;
        memset(sum, 0, sizeof(float) * (size_t)width);
        for (int64_t row = rows * part / PARTS; row < rows * (part + 1) / PARTS; row++) {
            int64_t at = row * width;
            if (weight_dtype == FLOAT32)
                norm_gradient_row(grad, at, FLOAT32, x + at, weight, FLOAT32, scales[row], dx + at, sum, width);
            else if (grad_dtype == FLOAT32)
                norm_gradient_row(grad, at, FLOAT32, x + at, weight, BFLOAT16, scales[row], dx + at, sum, width);
            else
                norm_gradient_row(grad, at, BFLOAT16, x + at, weight, BFLOAT16, scales[row], dx + at, sum, width);
        }
    }
    if (!dweight) return;
    for (int part = 0; part < PARTS; part++)
        for (int i = 0; i < width; i++) dweight[i] += parts[(int64_t)part * width + i];
}

INLINE void gate_row(const void *gate_up, int64_t from, void *out, int64_t to, int dtype, int width) {
#pragma omp simd
    for (int i = 0; i < width; i++) {
        float g = load(gate_up, from + i, dtype), s = 1.0f / (1.0f + exp_(-g));
        store(out, to + i, dtype, g * s * load(gate_up, from + width + i, dtype));
    }
}

/* gate_up [rows, 2 width] -> out [rows, width] = silu(gate) up. */
void gate(const void *gate_up, void *out, int dtype, int64_t rows, int width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        if (dtype == BFLOAT16)
            gate_row(gate_up, row * 2 * width, out, row * width, BFLOAT16, width);
        else
            gate_row(gate_up, row * 2 * width, out, row * width, FLOAT32, width);
    }
}

INLINE void gate_gradient_row(const void *grad, int64_t from, const void *gate_up, void *to, int64_t at, int dtype,
                              int width) {
#pragma omp simd
    for (int i = 0; i < width; i++) {
        float g = load(gate_up, at + i, dtype), u = load(gate_up, at + width + i, dtype), d = load(grad, from + i, dtype);
        float s = 1.0f / (1.0f + exp_(-g));
        store(to, at + i, dtype, d * u * s * (1.0f + g * (1.0f - s)));
        store(to, at + width + i, dtype, d * g * s);
    }
}

/* With s = sigmoid(gate):   dgate = grad up s (1 + gate (1 - s))   and   dup = grad gate s. */
void gate_gradient(const void *grad, const void *gate_up, void *to, int dtype, int64_t rows, int width) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        if (dtype == BFLOAT16)
            gate_gradient_row(grad, row * width, gate_up, to, row * 2 * width, BFLOAT16, width);
        else
            gate_gradient_row(grad, row * width, gate_up, to, row * 2 * width, FLOAT32, width);
    }
}

/* Places of a token's heads in its row of `row` numbers: head n begins at  first + n / per * stride + n % per * dim. */
struct heads {
    int64_t row, first, stride;
    int32_t per, count, dim;
};
LAYOUT(heads, AT(heads, row), AT(heads, first), AT(heads, stride), AT(heads, per), AT(heads, count), AT(heads, dim))

INLINE int64_t head_at(const struct heads *heads, int64_t token, int n) {
    return token * heads->row + heads->first + n / heads->per * heads->stride + (int64_t)(n % heads->per) * heads->dim;
}

/* Copy one head. c and s: cosines and sines of the token's position, dim / 2 each, or null for no rotation. */
INLINE void take_head(const void *from, int64_t at, int dtype, const float *c, const float *s, float *to, int dim) {
    int half = dim / 2;
    if (!c) {
#pragma omp simd
        for (int i = 0; i < dim; i++) to[i] = load(from, at + i, dtype);
        return;
    }
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float a = load(from, at + i, dtype), b = load(from, at + half + i, dtype);
        to[i] = a * c[i] - b * s[i];
        to[half + i] = b * c[i] + a * s[i];
    }
}

/* Some heads of every token -> out [tokens, count, dim], float32, rotated by the angles of the token's position.
 * Cosines and sines are [positions, dim / 2], or null for no rotation. */
void take_heads(const void *from, int dtype, struct heads heads, const float *cosines, const float *sines,
                const int64_t *positions, float *out, int64_t tokens) {
    int half = heads.dim / 2;
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cosines ? cosines + positions[token] * half : NULL, *s = c ? sines + positions[token] * half : NULL;
        float *to = out + token * heads.count * heads.dim;
        for (int n = 0; n < heads.count; n++, to += heads.dim) {
            if (dtype == BFLOAT16)
                take_head(from, head_at(&heads, token, n), BFLOAT16, c, s, to, heads.dim);
            else
                take_head(from, head_at(&heads, token, n), FLOAT32, c, s, to, heads.dim);
        }
    }
}

INLINE void put_head(const float *grad, const float *c, const float *s, void *to, int64_t at, int dtype, int dim) {
    int half = dim / 2;
    if (!c) {
#pragma omp simd
        for (int i = 0; i < dim; i++) store(to, at + i, dtype, grad[i]);
        return;
    }
#pragma omp simd
    for (int i = 0; i < half; i++) {
        float a = grad[i], b = grad[half + i];
        store(to, at + i, dtype, a * c[i] + b * s[i]);
        store(to, at + half + i, dtype, b * c[i] - a * s[i]);
    }
}

/* The reverse of take_heads: rotate gradients of heads back and write them to the places of the heads. In `grad` head n
 * of a token begins at token * grad_token + n * grad_head. */
void put_heads(const float *grad, int64_t grad_token, int64_t grad_head, void *to, int dtype, struct heads heads,
               const float *cosines, const float *sines, const int64_t *positions, int64_t tokens) {
    int half = heads.dim / 2;
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *c = cosines ? cosines + positions[token] * half : NULL, *s = c ? sines + positions[token] * half : NULL;
        for (int n = 0; n < heads.count; n++) {
            const float *from = grad + token * grad_token + n * grad_head;
            if (dtype == BFLOAT16)
                put_head(from, c, s, to, head_at(&heads, token, n), BFLOAT16, heads.dim);
            else
                put_head(from, c, s, to, head_at(&heads, token, n), FLOAT32, heads.dim);
        }
    }
}

/* out = x + y, where y may be bfloat16. `out` may be x. */
void add(const float *x, const void *y, int y_dtype, float *out, int64_t count) {
    if (y_dtype == BFLOAT16) {
#pragma omp parallel for simd schedule(static) if (count > 32768)
        for (int64_t i = 0; i < count; i++) out[i] = x[i] + load(y, i, BFLOAT16);
    } else {
#pragma omp parallel for simd schedule(static) if (count > 32768)
        for (int64_t i = 0; i < count; i++) out[i] = x[i] + load(y, i, FLOAT32);
    }
}
