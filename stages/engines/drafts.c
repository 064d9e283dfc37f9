/* The draft head on CPUs (draft_head.py has the formulas, and the same in plain torch): all positions of all drafts in
 * one call. What it guesses decides how fast rows are made and nothing else. */

#include <math.h>
#include <omp.h>
#include <stdint.h>

#include "kernels.h"

/* to [2 width] = x / rms(x), then the embedding of the token before. */
INLINE void feed(const float *x, const float *embedded, void *to, int64_t at, int dtype, int width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < width; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)width + 0x1p-23f);
    for (int i = 0; i < width; i++) store(to, at + i, dtype, x[i] * scale);
    for (int i = 0; i < width; i++) store(to, at + width + i, dtype, embedded[i]);
}

/* The index of the largest of `count` scores; `margin`: how far it is ahead of the second. Overwrites the scores. */
INLINE int64_t best_of(float *scores, int count, float *margin) {
    float best = -INFINITY, second = -INFINITY;
    int64_t chosen = 0;
#pragma omp simd reduction(max : best)
    for (int i = 0; i < count; i++) best = scores[i] > best ? scores[i] : best;
    while (chosen < count - 1 && scores[chosen] != best) chosen++;
    scores[chosen] = -INFINITY;
#pragma omp simd reduction(max : second)
    for (int i = 0; i < count; i++) second = scores[i] > second ? scores[i] : second;
    *margin = best - second;
    return chosen;
}

/* slots [rows, depth + 1]: in the first column the slot of each row's last token; the guesses go into the others. state
 * [rows, C] is moved on; embedding [R + 1, C]; words [R], temperatures [rows], keys [rows, depth, 2] of the noise; slots
 * that row r cannot get at position p: banned[j] for banned_from[r depth + p] <= j < banned_from[r depth + p + 1];
 * margins [rows, depth]. Room: fed [rows, 2 C] and gated [rows, C] in the weights' dtype, projected [rows, 2 C], scores
 * [rows, R]. */
void draft(const struct weight *up, const struct weight *down, const struct weight *out, const float *embedding,
           const uint32_t *words, int rows, int depth, const float *temperatures, const uint32_t *keys,
           const int64_t *banned, const int64_t *banned_from, float *state, int64_t *slots, float *margins, void *fed,
           float *projected, void *gated, float *scores) {
    int dtype = up->dtype, width = (int)down->out, count = (int)out->out;
#pragma omp parallel
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int position = 0; position < depth; position++) {
#pragma omp for schedule(static)
            for (int row = 0; row < rows; row++) {
                const float *embedded = embedding + slots[(int64_t)row * (depth + 1) + position] * width;
                feed(state + (int64_t)row * width, embedded, fed, 2 * (int64_t)row * width, dtype, width);
            }
            product_share(fed, up, rows, projected, FLOAT32, STORE, thread, threads);
#pragma omp barrier
            gate_share(projected, FLOAT32, gated, dtype, rows, width);
            product_share(gated, down, rows, state, FLOAT32, ADD, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int row = 0; row < rows; row++)
                for (int64_t i = 0, at = (int64_t)row * width; i < width; i++) store(fed, at + i, dtype, state[at + i]);
            product_share(fed, out, rows, scores, FLOAT32, STORE, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int row = 0; row < rows; row++) {
                float *s = scores + (int64_t)row * count, temperature = temperatures[row];
                int64_t at = (int64_t)row * depth + position;
                uint32_t low = keys[2 * at], high = keys[2 * at + 1];
                if (temperature > 0.0f)
                    for (int i = 0; i < count; i++) s[i] += temperature * gumbel(words[i], low, high);
                for (int64_t j = banned_from[at]; j < banned_from[at + 1]; j++) s[banned[j]] = -INFINITY;
                slots[(int64_t)row * (depth + 1) + position + 1] = best_of(s, count, margins + at);
            }
        }
    }
}
