/* Matrix products for decoding on CPUs: weights are packed once into the order in which they are read, and multiplied
 * by few rows (or many: prompts). `compile.py` compiles this file together with the others.
 *
 * A packed weight [out, in] is a sequence of tiles. A tile holds TILE outputs: for every step along `in` (one number in
 * float32, a pair of neighbours in bfloat16) the numbers of the TILE outputs side by side. Padding is 0: outputs that
 * fill up the last tile, and the second number of a pair if `in` is odd.
 *
 * Determinism: an element of the result is one chain of multiply-adds along `in`, from the first number to the last, on
 * one thread. It has the same bits whatever other rows the product has, at any place among them and with any number of
 * threads. A CPU with matrix registers (Intel's AMX) adds 32 products of bfloat16 at a time to the chain, for one row
 * as for many; its results equal those of other CPUs in nearly all elements, but not in all. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#if defined(__linux__) && defined(__AMX_BF16__) && defined(__AVX512F__)
#define HAS_MATRIX_REGISTERS
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"

/* LANES: numbers in a vector register. VECTORS registers make a tile. ROWS rows are multiplied with it at a time, so
 * that their sums (ROWS * VECTORS registers) and one step of the tile stay in registers. */
#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 3, ROWS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, VECTORS = 2, ROWS = 5 };
#else
enum { LANES = 4, VECTORS = 4, ROWS = 5 };
#endif
enum {
    TILE = LANES * VECTORS,
    STEP = 4 * TILE,      /* bytes of a step of a tile */
    GROUP = 4,            /* steps between groups of prefetches */
    STREAMS = 3,          /* places to prefetch from in turn; hardware reads ahead at each, within a page */
    PANEL = 144,          /* steps that all rows take before the next ones, so that this part of a tile stays in the
                             fastest cache */
    SIDE = 16,            /* rows of a matrix register (below), and of a block of sums there */
    SHARED_ROWS = 64,     /* a multiple of SIDE: rows that one thread multiplies with a tile at a time */
};

LAYOUT(weight, AT(weight, tiles), AT(weight, out), AT(weight, in), AT(weight, dtype))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t steps_of(int64_t in, int dtype) { return dtype == BFLOAT16 ? (in + 1) / 2 : in; }

INLINE int64_t tiles_of(int64_t out) { return (out + TILE - 1) / TILE; }

int64_t packed_bytes(int64_t out, int64_t in, int dtype) { return tiles_of(out) * steps_of(in, dtype) * STEP; }

/* ---- packing ---- */

/* Reads steps first .. first + count of one row of a weight. Returns their largest magnitude, as bits; numbers that are
 * not finite are larger than all finite ones. */
INLINE uint32_t read_steps(const void *row, int from_dtype, int to_dtype, int64_t in, int64_t first, int count,
                           uint32_t *steps) {
    uint32_t largest = 0;
    if (to_dtype == FLOAT32) {
        for (int i = 0; i < count; i++) {
            uint32_t number = bits_of(load(row, first + i, from_dtype)), magnitude = number & 0x7fffffffu;
            steps[i] = number;
            largest = magnitude > largest ? magnitude : largest;
        }
        return largest;
    }
    int whole = (int)least(count, in / 2 - first);
    for (int i = 0; i < whole; i++) {
        uint32_t low = rounded(load(row, 2 * (first + i), from_dtype));
        uint32_t high = rounded(load(row, 2 * (first + i) + 1, from_dtype));
        uint32_t a = low << 16 & 0x7fffffffu, b = high << 16 & 0x7fffffffu;
        steps[i] = low | high << 16;
        a = a > b ? a : b;
        largest = a > largest ? a : largest;
    }
    if (whole < count) {
        uint32_t low = rounded(load(row, in - 1, from_dtype)), a = low << 16 & 0x7fffffffu;
        steps[whole] = low;
        largest = a > largest ? a : largest;
    }
    return largest;
}

/* Writes rows from .. from + lanes of a weight to a tile, beginning at `lane`. */
INLINE uint32_t pack_lanes(const void *rows, int from_dtype, int to_dtype, int64_t in, uint32_t *tile, int lane,
                           int lanes) {
    enum { WIDTH = 16 };
    uint32_t block[TILE][WIDTH], largest = 0;
    int64_t steps = steps_of(in, to_dtype), row_bytes = in * size_of(from_dtype);
    for (int64_t first = 0; first < steps; first += WIDTH) {
        int whole = first + WIDTH <= (to_dtype == BFLOAT16 ? in / 2 : in);
        int count = (int)least(WIDTH, steps - first);
        for (int l = 0; l < lanes; l++) {
            const char *row = (const char *)rows + l * row_bytes;
            uint32_t part = whole ? read_steps(row, from_dtype, to_dtype, in, first, WIDTH, block[l])
                                  : read_steps(row, from_dtype, to_dtype, in, first, count, block[l]);
            largest = part > largest ? part : largest;
        }
        for (int i = 0; i < count; i++) {
            uint32_t *to = tile + (first + i) * TILE + lane;
            if (lanes == TILE)
                for (int l = 0; l < TILE; l++) to[l] = block[l][i];
            else
                for (int l = 0; l < lanes; l++) to[l] = block[l][i];
        }
    }
    return largest;
}

/* Writes `rows` rows of a weight [rows, in] to a packed one [out, in], beginning at its row `at`. Returns 1 if all
 * numbers are finite after rounding. */
int pack(const void *from, int from_dtype, int64_t rows, int64_t in, void *to, int to_dtype, int64_t at, int64_t out) {
    int64_t tile_numbers = steps_of(in, to_dtype) * TILE, row_bytes = in * size_of(from_dtype);
    uint32_t largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest) if (rows * in > 16384)
    for (int64_t t = at / TILE; t < tiles_of(at + rows); t++) {
        int64_t first = t * TILE > at ? t * TILE : at, last = least((t + 1) * TILE, at + rows);
        const void *source = (const char *)from + (first - at) * row_bytes;
        uint32_t *tile = (uint32_t *)to + t * tile_numbers, part;
        int lane = (int)(first - t * TILE), lanes = (int)(last - first);
        if (from_dtype == FLOAT32 && to_dtype == FLOAT32)
            part = pack_lanes(source, FLOAT32, FLOAT32, in, tile, lane, lanes);
        else if (from_dtype == FLOAT32)
            part = pack_lanes(source, FLOAT32, BFLOAT16, in, tile, lane, lanes);
        else if (to_dtype == FLOAT32)
            part = pack_lanes(source, BFLOAT16, FLOAT32, in, tile, lane, lanes);
        else
            part = pack_lanes(source, BFLOAT16, BFLOAT16, in, tile, lane, lanes);
        largest = part > largest ? part : largest;
        if (last == out)
            for (int64_t i = 0; i < steps_of(in, to_dtype); i++)
                memset(tile + i * TILE + lane + lanes, 0, 4 * (size_t)(TILE - lane - lanes));
    }
    return largest < 0x7f800000u;
}

/* Unpacks a weight [out, in], in its dtype. */
void unpack(const void *from, int dtype, int64_t out, int64_t in, void *to) {
    int64_t steps = steps_of(in, dtype);
#pragma omp parallel for schedule(static) if (out * in > 16384)
    for (int64_t row = 0; row < out; row++) {
        const uint32_t *tile = (const uint32_t *)from + row / TILE * steps * TILE + row % TILE;
        for (int64_t i = 0; i < in; i++)
            if (dtype == BFLOAT16)
                ((uint16_t *)to)[row * in + i] = (uint16_t)(tile[i / 2 * TILE] >> (i % 2 * 16));
            else
                ((uint32_t *)to)[row * in + i] = tile[i * TILE];
    }
}

/* ---- products ---- */

/* sums += x * weight over one step, for each number (pair) of x. */
INLINE vec step_product(vec sum, uint32_t x, vec weight, int dtype) {
    if (dtype == FLOAT32) return sum + float_of(x) * weight; /* contracted to one multiply-add */
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)weight);
#else
    bits pair = (bits)weight;
    sum = sum + float_of(x << 16) * (vec)(pair << 16);
    return sum + float_of(x & 0xffff0000u) * (vec)(pair & 0xffff0000u);
#endif
}

INLINE uint32_t bits_at(const char *x) {
    uint32_t number;
    memcpy(&number, x, 4);
    return number;
}

/* sums [rows, TILE] += x [rows, ..] times `steps` steps of a tile. For each GROUP of steps, prefetches `lines` cache
 * lines from `ahead` on. `rows` and `dtype` are constants where this is inlined. */
INLINE void multiply(int rows, int dtype, const char *x, int64_t row_bytes, const char *tile, int64_t steps,
                     const char *ahead, int lines, float *sums) {
    vec sum[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sum[r][v] = *(const vec *)(sums + r * TILE + v * LANES);
    int streams = lines % STREAMS == 0 ? STREAMS : lines % 2 == 0 ? 2 : 1, each = lines / streams;
    int64_t stream_stride = (steps + GROUP - 1) / GROUP * each * LINE;
    for (int64_t step = 0; step < steps;) {
        for (int line = 0; line < each; line++, ahead += LINE)
            for (int stream = 0; stream < streams; stream++) fetch(ahead + stream * stream_stride);
        for (int64_t end = least(step + GROUP, steps); step < end; step++, tile += STEP) {
            vec weight[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) weight[v] = ((const vec *)tile)[v];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                uint32_t number = bits_at(x + r * row_bytes + 4 * step);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) sum[r][v] = step_product(sum[r][v], number, weight[v], dtype);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *(vec *)(sums + r * TILE + v * LANES) = sum[r][v];
}

INLINE void multiply_rows(int rows, int dtype, const char *x, int64_t row_bytes, const char *tile, int64_t steps,
                          const char *ahead, int lines, float *sums) {
#define CASE(n) \
    case n: multiply(n <= ROWS ? n : ROWS, dtype, x, row_bytes, tile, steps, ahead, lines, sums); break
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
    }
#undef CASE
}

#ifdef HAS_MATRIX_REGISTERS

enum { BLOCK_STEPS = SIDE, BLOCK_BYTES = 4 * SIDE }; /* steps of a tile in a register; their bytes in a row of x */
_Static_assert(VECTORS == 3, "three registers take the sums of a tile");

static int matrix_registers;

/* Asks Linux for the matrix registers, which a process does not have by default. */
__attribute__((constructor)) static void ask_for_matrix_registers(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    matrix_registers = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

/* Registers 0-5 for sums [rows, SIDE], 6 for x [rows, 2 steps], 7 for weights [steps, 2 SIDE]. */
INLINE void shape_registers(int rows, int steps) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape __attribute__((aligned(64))) = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.rows[i] = (uint8_t)(i == 7 ? steps : rows), shape.row_bytes[i] = BLOCK_BYTES;
    shape.row_bytes[6] = (uint16_t)(4 * steps);
    _tile_loadconfig(&shape);
}

INLINE void fetch_block(const char *from) {
#pragma GCC unroll 16
    for (int line = 0; line < BLOCK_STEPS; line++) fetch(from + line * LINE);
}

/* `multiply` for one or two blocks of rows. The second block begins `second` rows after the first in x, and SIDE
 * rows after it in sums. Takes `blocks` times as many steps as the registers are shaped for. Unless `ahead` is null,
 * prefetches as many bytes from there as it reads of the tile. */
INLINE void multiply_blocks(int two, const char *x, int64_t row_bytes, int64_t second, const char *tile, int64_t blocks,
                            const char *ahead, float *sums) {
    float *more = sums + SIDE * TILE;
    _tile_loadd(0, sums, STEP);
    _tile_loadd(1, sums + LANES, STEP);
    _tile_loadd(2, sums + 2 * LANES, STEP);
    if (two) {
        _tile_loadd(3, more, STEP);
        _tile_loadd(4, more + LANES, STEP);
        _tile_loadd(5, more + 2 * LANES, STEP);
    }
    int64_t stream_stride = blocks * BLOCK_STEPS * LINE;
    for (int64_t block = 0; block < blocks; block++, x += BLOCK_BYTES, tile += BLOCK_STEPS * STEP) {
        _tile_loadd(6, x, row_bytes);
        _tile_loadd(7, tile, STEP);
        _tile_dpbf16ps(0, 6, 7);
        if (ahead) fetch_block(ahead);
        _tile_loadd(7, tile + LINE, STEP);
        _tile_dpbf16ps(1, 6, 7);
        if (ahead) fetch_block(ahead + stream_stride);
        _tile_loadd(7, tile + 2 * LINE, STEP);
        if (ahead) fetch_block(ahead + 2 * stream_stride), ahead += BLOCK_STEPS * LINE;
        _tile_dpbf16ps(2, 6, 7);
        if (two) {
            _tile_loadd(6, x + second * row_bytes, row_bytes);
            _tile_dpbf16ps(5, 6, 7);
            _tile_loadd(7, tile + LINE, STEP);
            _tile_dpbf16ps(4, 6, 7);
            _tile_loadd(7, tile, STEP);
            _tile_dpbf16ps(3, 6, 7);
        }
    }
    _tile_stored(0, sums, STEP);
    _tile_stored(1, sums + LANES, STEP);
    _tile_stored(2, sums + 2 * LANES, STEP);
    if (two) {
        _tile_stored(3, more, STEP);
        _tile_stored(4, more + LANES, STEP);
        _tile_stored(5, more + 2 * LANES, STEP);
    }
}

/* sums [rows, TILE] += x [rows, ..] times `steps` steps of a tile of bfloat16, in blocks of SIDE rows. A short last
 * block begins earlier and computes some sums twice; these have places of their own until `move_last_sums`. */
static void multiply_all(const char *x, int64_t row_bytes, int64_t rows, const char *tile, int64_t steps,
                         const char *ahead, float *sums) {
    int64_t whole = steps / BLOCK_STEPS, rest = steps % BLOCK_STEPS, side = least(rows, SIDE);
    for (int part = 0; part < 2; part++) {
        int64_t blocks = part ? rest > 0 : whole;
        if (!blocks) continue;
        shape_registers((int)side, part ? (int)rest : BLOCK_STEPS);
        for (int64_t row = 0; row < rows; row += 2 * SIDE, ahead = NULL) {
            int64_t first = least(row, rows - side), second = least(row + SIDE, rows - side) - first;
            const char *from = x + first * row_bytes;
            if (row + SIDE < rows)
                multiply_blocks(1, from, row_bytes, second, tile, blocks, ahead, sums + row * TILE);
            else
                multiply_blocks(0, from, row_bytes, second, tile, blocks, ahead, sums + row * TILE);
        }
        x += whole * BLOCK_BYTES, tile += whole * BLOCK_STEPS * STEP;
    }
}

/* Moves the last block's sums to their places, over those that were computed twice. */
INLINE void move_last_sums(int64_t rows, float *sums) {
    int64_t begin = rows / SIDE * SIDE, twice = rows > SIDE && rows % SIDE ? SIDE - rows % SIDE : 0;
    float *to = sums + begin * TILE;
    if (twice) memmove(to, to + twice * TILE, sizeof(float) * TILE * (size_t)(rows - begin));
}

#else
static const int matrix_registers = 0;
#endif

/* Chooses whether products of bfloat16 use matrix registers (`wanted` 0: no, for comparisons). Returns 1 if they do. */
int use_matrix_registers(int wanted) {
#ifdef HAS_MATRIX_REGISTERS
    matrix_registers = 0;
    if (wanted) ask_for_matrix_registers();
#else
    (void)wanted;
#endif
    return matrix_registers;
}

/* sums [rows, TILE] = x [rows, in] times one tile; `next` is the tile that is read after it. */
INLINE void multiply_tile(int dtype, const char *x, int64_t rows, int64_t in, const char *tile, const char *next,
                          float *sums) {
    int64_t row_bytes = in * size_of(dtype), whole = dtype == BFLOAT16 ? in / 2 : in;
    int64_t parts = (rows + ROWS - 1) / ROWS, small = rows / parts, larger = rows % parts;
    memset(sums, 0, sizeof(float) * TILE * (size_t)((rows + SIDE - 1) / SIDE * SIDE));
    /* prefetch the next tile in equal parts, so that memory and arithmetic are always busy */
    int lines = next ? (int)((GROUP * STEP / LINE + parts - 1) / parts) : 0;
    for (int64_t start = 0; start < whole; start += PANEL) {
        int64_t steps = least(PANEL, whole - start), row = 0;
#ifdef HAS_MATRIX_REGISTERS
        if (dtype == BFLOAT16 && matrix_registers) {
            multiply_all(x + 4 * start, row_bytes, rows, tile + start * STEP, steps,
                         next ? next + start * STEP : NULL, sums);
            continue;
        }
#endif
        for (int64_t part = 0; part < parts; part++) {
            int count = (int)(small + (part < larger));
            const char *ahead = next + start * STEP + part * ((steps + GROUP - 1) / GROUP) * lines * LINE;
            multiply_rows(count, dtype, x + row * row_bytes + 4 * start, row_bytes, tile + start * STEP, steps, ahead,
                          lines, sums + row * TILE);
            row += count;
        }
    }
#ifdef HAS_MATRIX_REGISTERS
    if (dtype == BFLOAT16 && matrix_registers) move_last_sums(rows, sums);
#endif
    if (dtype == BFLOAT16 && in % 2)
        for (int64_t row = 0; row < rows; row++) {
            uint16_t last;
            memcpy(&last, x + row * row_bytes + 2 * (in - 1), 2);
            vec *sum = (vec *)(sums + row * TILE);
            for (int v = 0; v < VECTORS; v++)
                sum[v] = step_product(sum[v], last, ((const vec *)(tile + whole * STEP))[v], BFLOAT16);
        }
}

INLINE void put_tile(const float *sums, int64_t rows, int64_t out, int64_t first, char *to, int to_dtype, int then) {
    int width = (int)least(TILE, out - first);
    for (int64_t row = 0; row < rows; row++, sums += TILE) {
        int64_t at = row * out + first;
        if (then == ADD)
            for (int i = 0; i < width; i++) ((float *)to)[at + i] += sums[i];
        else if (to_dtype == BFLOAT16)
            for (int i = 0; i < width; i++) store(to, at + i, BFLOAT16, sums[i]);
        else
            memcpy((float *)to + at, sums, sizeof(float) * (size_t)width);
    }
}

/* Index of a thread's first item. */
INLINE int64_t first_of(int64_t items, int thread, int threads) { return items * thread / threads; }

/* Address of the first tile that a thread will read. */
INLINE const char *first_tile(const struct weight *weight, int thread, int threads) {
    if (!weight) return NULL;
    int64_t tiles = tiles_of(weight->out), first = first_of(tiles, thread, threads);
    return (const char *)weight->tiles + first * steps_of(weight->in, weight->dtype) * STEP;
}

static void share(int dtype, const char *x, const struct weight *weight, const struct weight *after, int64_t rows,
                  char *to, int to_dtype, int then, int thread, int threads) {
    float sums[SHARED_ROWS * TILE] __attribute__((aligned(64)));
    int64_t in = weight->in, tiles = tiles_of(weight->out), tile_bytes = steps_of(in, dtype) * STEP;
    int64_t groups = (rows + SHARED_ROWS - 1) / SHARED_ROWS, items = tiles * groups;
    int64_t first = first_of(items, thread, threads), last = first_of(items, thread + 1, threads);
    for (int64_t item = first; item < last; item++) {
        int64_t t = item / groups, row = item % groups * SHARED_ROWS, count = least(SHARED_ROWS, rows - row);
        const char *tile = (const char *)weight->tiles + t * tile_bytes;
        const char *next = item + 1 < last ? tile + tile_bytes : first_tile(after, thread, threads);
        if (groups > 1) next = NULL; /* the same tile is used again, from the cache */
        multiply_tile(dtype, x + row * in * size_of(dtype), count, in, tile, next, sums);
        put_tile(sums, count, weight->out, t * TILE, to + row * weight->out * size_of(to_dtype), to_dtype,
                 then);
    }
#ifdef HAS_MATRIX_REGISTERS
    if (dtype == BFLOAT16 && matrix_registers) _tile_release();
#endif
}

void product_share(const void *x, const struct weight *weight, const struct weight *after, int64_t rows, void *to,
                   int to_dtype, int then, int thread, int threads) {
    if (weight->dtype == BFLOAT16)
        share(BFLOAT16, x, weight, after, rows, to, to_dtype, then, thread, threads);
    else
        share(FLOAT32, x, weight, after, rows, to, to_dtype, then, thread, threads);
}

/* to [rows, out] = x [rows, in] W^T. */
void product(const void *x, const struct weight *weight, int64_t rows, void *to, int to_dtype) {
#pragma omp parallel if (rows * weight->out * weight->in > 65536)
    product_share(x, weight, NULL, rows, to, to_dtype, STORE, omp_get_thread_num(), omp_get_num_threads());
}
