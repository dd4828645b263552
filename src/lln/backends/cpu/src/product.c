#include "product.h"

#define ROWS 6

INLINE void fetch(Ahead *ahead) {
    if (!ahead) return;
    for (int i = 0; i < 3 && ahead->rows > 0; i++, ahead->rows--, ahead->at += ahead->stride)
        for (long byte = 0; byte < ahead->bytes; byte += 64) __builtin_prefetch(ahead->at + byte, 0, 2);
}

/* c (rows x cols vectors) = or += sum over k of a[row * a_row + k * a_step] b[k] */
INLINE void block(const int rows, const int cols, long depth, const float *a, long a_row, long a_step, const float *b,
                  long b_row, float *c, long c_row, int add) {
    vf sum[ROWS][2];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++) sum[i][j] = add ? load(c + i * c_row + j * LANES) : broadcast(0.f);
    for (long k = 0; k < depth; k++) {
        vf right[2];
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++) right[j] = load(b + k * b_row + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            vf left = broadcast(a[i * a_row + k * a_step]);
#pragma GCC unroll 2
            for (int j = 0; j < cols; j++) sum[i][j] += left * right[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < cols; j++) store(c + i * c_row + j * LANES, sum[i][j]);
}

INLINE void strip(const int cols, long rows, long depth, const float *a, long a_row, long a_step, const float *b,
                  long b_row, float *c, long c_row, int add, Ahead *ahead) {
    long i = 0;
    for (; i + ROWS <= rows; i += ROWS) {
        fetch(ahead);
        block(ROWS, cols, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row, add);
    }
    a += i * a_row;
    c += i * c_row;
    switch (rows - i) {
    case 5: block(5, cols, depth, a, a_row, a_step, b, b_row, c, c_row, add); break;
    case 4: block(4, cols, depth, a, a_row, a_step, b, b_row, c, c_row, add); break;
    case 3: block(3, cols, depth, a, a_row, a_step, b, b_row, c, c_row, add); break;
    case 2: block(2, cols, depth, a, a_row, a_step, b, b_row, c, c_row, add); break;
    case 1: block(1, cols, depth, a, a_row, a_step, b, b_row, c, c_row, add); break;
    }
}

void multiply_and_fetch(long rows, long width, long depth, const float *a, long a_row, const float *b, long b_row,
                        float *c, long c_row, int add, Ahead *ahead) {
    long j = 0;
    for (; j + 2 * LANES <= width; j += 2 * LANES)
        strip(2, rows, depth, a, a_row, 1, b + j, b_row, c + j, c_row, add, ahead);
    if (j < width) strip(1, rows, depth, a, a_row, 1, b + j, b_row, c + j, c_row, add, ahead);
}

void multiply_transposed_and_fetch(long rows, long width, long depth, const float *a, long a_row, const float *b,
                                   long b_row, float *c, long c_row, int add, Ahead *ahead) {
    long j = 0;
    for (; j + 2 * LANES <= width; j += 2 * LANES)
        strip(2, rows, depth, a, 1, a_row, b + j, b_row, c + j, c_row, add, ahead);
    if (j < width) strip(1, rows, depth, a, 1, a_row, b + j, b_row, c + j, c_row, add, ahead);
}

void gram(long width, long depth, const float *a, long a_row, float *c, long c_row, int add, Ahead *ahead) {
    long j = 0;
    for (; j + 2 * LANES <= width; j += 2 * LANES)
        strip(2, j + 2 * LANES, depth, a, 1, a_row, a + j, a_row, c + j, c_row, add, ahead);
    if (j < width) strip(1, j + LANES, depth, a, 1, a_row, a + j, a_row, c + j, c_row, add, ahead);
}

#if LANES == 8 && defined(__AVX__)
/* to (8 x 8) = fromᵀ */
INLINE void transpose_block(const float *from, long from_row, float *to, long to_row) {
    __m256 x[8], y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* rows i and i + 4 side by side, for the left and the right half of the columns */
        __m256 upper = _mm256_loadu_ps(from + i * from_row), lower = _mm256_loadu_ps(from + (i + 4) * from_row);
        x[i] = _mm256_permute2f128_ps(upper, lower, 0x20);
        x[i + 4] = _mm256_permute2f128_ps(upper, lower, 0x31);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 8; half += 4) {
        y[half] = _mm256_unpacklo_ps(x[half], x[half + 1]);
        y[half + 1] = _mm256_unpackhi_ps(x[half], x[half + 1]);
        y[half + 2] = _mm256_unpacklo_ps(x[half + 2], x[half + 3]);
        y[half + 3] = _mm256_unpackhi_ps(x[half + 2], x[half + 3]);
        _mm256_storeu_ps(to + half * to_row, _mm256_shuffle_ps(y[half], y[half + 2], 0x44));
        _mm256_storeu_ps(to + (half + 1) * to_row, _mm256_shuffle_ps(y[half], y[half + 2], 0xee));
        _mm256_storeu_ps(to + (half + 2) * to_row, _mm256_shuffle_ps(y[half + 1], y[half + 3], 0x44));
        _mm256_storeu_ps(to + (half + 3) * to_row, _mm256_shuffle_ps(y[half + 1], y[half + 3], 0xee));
    }
}
#else
INLINE void transpose_block(const float *from, long from_row, float *to, long to_row) {
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

void transpose(long rows, long cols, long rows_filled, const float *from, long from_row, float *to, long to_row) {
    long whole = rows / 8 * 8;
    for (long r = 0; r < whole; r += 8)
        for (long c = 0; c < cols; c += 8)
            transpose_block(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
    for (long c = 0; c < cols; c++) {
        for (long r = whole; r < rows; r++) to[c * to_row + r] = from[r * from_row + c];
        for (long r = rows; r < rows_filled; r++) to[c * to_row + r] = 0.f;
    }
}
