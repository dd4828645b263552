/* Rows of tensors as rows of floats. */
#ifndef LLN_TILE_H
#define LLN_TILE_H

#include <stdint.h>

#include "job.h"
#include "product.h"

/* Tokens at places `first` ... of a head as rows of floats; what lies between `width` and the next vector is zero. */
void read_tile(long type, const char *head, long stride, const int32_t *order, long first, long count, long width,
               float *to, long row);

void write_tile(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                const float *from, long row);

/* Rows of floats: of a tile, or of a tensor as it lies in memory. */
typedef struct {
    float *data;
    long row;
} Rows;

INLINE int is_direct(long type, const int32_t *order, long width) {
    return type == FLOAT32 && !order && width == padded(width);
}

/* Tokens at places `first` ... of a head: where they lie if they are floats in sequence, else copied to `spare`. */
Rows view(long type, const char *head, long stride, const int32_t *order, long first, long count, long width,
          float *spare);

/* The tile after the one that ends at place `end`, or nothing where tokens are picked. */
INLINE Ahead tile_after(long type, const char *head, long stride, const int32_t *order, long end, long last,
                        long width) {
    long rows = order ? 0 : at_most(TILE, last - end);
    return (Ahead){head + end * stride * bytes_of(type), stride * bytes_of(type), width * bytes_of(type), rows};
}

/* Where the results at places `first` ... are computed: in place, or in `spare`, which `store_rows` copies to them. */
Rows output_rows(long type, char *head, long stride, const int32_t *order, long first, long width, float *spare);

void store_rows(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                Rows from);

INLINE Rows rows_from(Rows rows, long first) { return (Rows){rows.data + first * rows.row, rows.row}; }

/* Write rows, or add them to what is there. */
void store_or_add_rows(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                       float *rows, long row, int add, float *spare);

#endif
