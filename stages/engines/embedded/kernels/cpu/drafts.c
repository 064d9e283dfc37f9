/* The draft head on CPUs: all positions of all drafts in one call. draft_head.py has the formulas, and the same in
 * plain torch. Its guesses change the speed of generation, not the tokens. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

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

INLINE float largest_of(const float *numbers, int count) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < count; i++) largest = numbers[i] > largest ? numbers[i] : largest;
    return largest;
}

/* Returns the first index of `wanted`, or the last index if no number equals it (NaN). */
INLINE int index_of(const float *numbers, int count, float wanted) {
    int at = 0;
    while (at < count - 1 && numbers[at] != wanted) at++;
    return at;
}

/* Returns the indices of the `wanted` largest of `count` scores, in falling order, and the gap of each to the largest
 * (INFINITY for a score of -INFINITY). Overwrites the scores. */
INLINE void best_of(float *scores, int count, int wanted, int64_t *chosen, float *gaps) {
    enum { PART = 64 };
    int parts = (count + PART - 1) / PART;
    float tops[parts], largest = 0.0f;
    for (int p = 0; p < parts; p++) tops[p] = largest_of(scores + p * PART, count - p * PART < PART ? count - p * PART : PART);
    for (int k = 0; k < wanted; k++) {
        float best = largest_of(tops, parts);
        int p = index_of(tops, parts, best), size = count - p * PART < PART ? count - p * PART : PART;
        float *part = scores + p * PART;
        int at = index_of(part, size, best);
        part[at] = -INFINITY;
        tops[p] = largest_of(part, size);
        if (k == 0) largest = best;
        chosen[k] = p * PART + at, gaps[k] = best == -INFINITY ? INFINITY : largest - best;
    }
}

/* The output of `draft`: for each row and position the `branches` best guesses, [rows, depth, branches]. protocol.py
 * has the same record (`Guessed`); a slot here is a draft id there. */
struct guesses {
    int64_t *slots, *parents, *ranks;
    float *gaps;
};
LAYOUT(guesses, AT(guesses, slots), AT(guesses, parents), AT(guesses, ranks), AT(guesses, gaps))

/* Chooses a row's guesses for one position among the best ones after each of `items` guesses for the position before:
 * those with the smallest gap to the best, summed over their path. `totals` holds the sums of the position before and
 * receives the new ones; scores [items, count]. */
INLINE void choose_guesses(float *scores, int items, int count, int branches, float *totals,
                           const struct guesses *guesses, int64_t at) {
    int wanted = branches > 1 ? branches : 2; /* the gap to the second best is the best one's confidence */
    int64_t slots[items * wanted];
    float gaps[items * wanted], sums[items * wanted], chosen[branches];
    for (int i = 0; i < items; i++) {
        best_of(scores + (int64_t)i * count, count, wanted, slots + i * wanted, gaps + i * wanted);
        for (int k = 0; k < wanted; k++) sums[i * wanted + k] = totals[i] + gaps[i * wanted + k];
    }
    for (int j = 0; j < branches; j++) {
        int best = 0;
        for (int i = 1; i < items * wanted; i++)
            if (sums[i] < sums[best]) best = i;
        int rank = best % wanted;
        guesses->slots[at + j] = slots[best], guesses->parents[at + j] = best / wanted;
        guesses->ranks[at + j] = sums[best] == INFINITY ? -1 : rank;
        guesses->gaps[at + j] = gaps[rank ? best : best + 1];
        chosen[j] = sums[best], sums[best] = INFINITY;
    }
    memcpy(totals, chosen, sizeof(chosen));
}

/* state [rows, C]; slots [rows] of each row's last token; embedding [R + 1, C]; words [R], temperatures [rows] and keys
 * [rows, depth, 2] of the noise. Slots that row r cannot get at position p: banned[j] for banned_from[r depth + p] <= j
 * < banned_from[r depth + p + 1]. Workspace, for n = rows * branches: fed [n, 2 C] and gated [n, C] in the weights'
 * dtype, projected [n, 2 C], scores [n, R], states [2, n, C], totals [rows, branches], noise [rows, R]. */
void draft(const struct weight *up, const struct weight *down, const struct weight *out, const float *embedding,
           const uint32_t *words, int rows, int depth, int branches, const float *temperatures, const uint32_t *keys,
           const int64_t *banned, const int64_t *banned_from, const float *state, const int64_t *slots,
           const struct guesses *guesses, void *fed, float *projected, void *gated, float *scores, float *states,
           float *totals, float *noise) {
    int dtype = up->dtype, width = (int)down->out, count = (int)out->out;
    int64_t half = (int64_t)rows * branches * width;
#pragma omp parallel
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        for (int position = 0; position < depth; position++) {
            int items = position ? branches : 1; /* guesses of a row that are continued */
            const float *before = position > 1 ? states + (position + 1) % 2 * half : states;
            float *now = states + position % 2 * half;
#pragma omp for schedule(static)
            for (int n = 0; n < rows * items; n++) {
                int row = n / items, i = n % items;
                int64_t guess = ((int64_t)row * depth + position - 1) * branches + i;
                const float *from = state + (int64_t)row * width;
                if (position == 1) from = before + (int64_t)row * width;
                if (position > 1) from = before + ((int64_t)row * branches + guesses->parents[guess]) * width;
                memcpy(now + (int64_t)n * width, from, sizeof(float) * (size_t)width);
                int64_t slot = position ? guesses->slots[guess] : slots[row];
                feed(from, embedding + slot * width, fed, 2 * (int64_t)n * width, dtype, width);
            }
            product_share(fed, up, down, rows * items, projected, FLOAT32, STORE, thread, threads);
#pragma omp barrier
            gate_share(projected, FLOAT32, gated, dtype, rows * items, width);
            product_share(gated, down, out, rows * items, now, FLOAT32, ADD, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int n = 0; n < rows * items; n++)
                for (int64_t i = 0, at = (int64_t)n * width; i < width; i++) store(fed, at + i, dtype, now[at + i]);
            product_share(fed, out, position + 1 < depth ? up : NULL, rows * items, scores, FLOAT32, STORE, thread, threads);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int row = 0; row < rows; row++) {
                float *mine = scores + (int64_t)row * items * count, *drawn = noise + (int64_t)row * count;
                float *sums = totals + (int64_t)row * branches, temperature = temperatures[row];
                int64_t at = (int64_t)row * depth + position;
                uint32_t low = keys[2 * at], high = keys[2 * at + 1];
                if (!position) sums[0] = 0.0f;
                if (temperature > 0.0f)
                    for (int i = 0; i < count; i++) drawn[i] = temperature * gumbel(words[i], low, high);
                for (int n = 0; n < items; n++) {
                    float *s = mine + (int64_t)n * count;
                    if (temperature > 0.0f)
                        for (int i = 0; i < count; i++) s[i] += drawn[i];
                    for (int64_t j = banned_from[at]; j < banned_from[at + 1]; j++) s[banned[j]] = -INFINITY;
                }
                choose_guesses(mine, items, count, branches, sums, guesses, at * branches);
            }
        }
    }
}
