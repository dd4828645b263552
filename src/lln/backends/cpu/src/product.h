/* Matrix products of tiles that lie in cache: blocks of ROWS x 2 vectors are summed in registers. */
#ifndef LLN_PRODUCT_H
#define LLN_PRODUCT_H

#include "vector.h"

/* Rows of memory that will be read soon: products fetch them into the cache on the way, a few with each block. */
typedef struct {
    const char *at;
    long stride, bytes, rows;
} Ahead;

/* c (rows x width) = a b, or += with `add`; a is (rows x depth), b (depth x width), width a multiple of LANES. */
void multiply_and_fetch(long rows, long width, long depth, const float *a, long a_row, const float *b, long b_row,
                        float *c, long c_row, int add, Ahead *ahead);

INLINE void multiply(long rows, long width, long depth, const float *a, long a_row, const float *b, long b_row,
                     float *c, long c_row, int add) {
    multiply_and_fetch(rows, width, depth, a, a_row, b, b_row, c, c_row, add, NULL);
}

/* c (rows x width) = or += aᵀ b; a is (depth x rows), b (depth x width). */
void multiply_transposed_and_fetch(long rows, long width, long depth, const float *a, long a_row, const float *b,
                                   long b_row, float *c, long c_row, int add, Ahead *ahead);

INLINE void multiply_transposed(long rows, long width, long depth, const float *a, long a_row, const float *b,
                                long b_row, float *c, long c_row, int add) {
    multiply_transposed_and_fetch(rows, width, depth, a, a_row, b, b_row, c, c_row, add, NULL);
}

/* The upper triangle of c (width x width) = or += aᵀ a; beside the diagonal some of the lower one is written, too. */
void gram(long width, long depth, const float *a, long a_row, float *c, long c_row, int add, Ahead *ahead);

/* to (cols x rows) = fromᵀ (rows x cols), with zeros up to `rows_filled`; cols is a multiple of 8. */
void transpose(long rows, long cols, long rows_filled, const float *from, long from_row, float *to, long to_row);

#endif
