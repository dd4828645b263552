#include "tile.h"

#include <stdint.h>

INLINE void read_typed(const long type, const char *head, long stride, const int32_t *order, long first, long count,
                       long width, float *to, long row) {
    for (long r = 0; r < count; r++, to += row) {
        read_row(type, head + token_at(order, first + r) * stride * bytes_of(type), width, to);
        for (long i = width; i < padded(width); i++) to[i] = 0.f;
    }
}

void read_tile(long type, const char *head, long stride, const int32_t *order, long first, long count, long width,
               float *to, long row) {
    if (type == FLOAT32) read_typed(FLOAT32, head, stride, order, first, count, width, to, row);
    else if (type == BFLOAT16) read_typed(BFLOAT16, head, stride, order, first, count, width, to, row);
    else read_typed(FLOAT16, head, stride, order, first, count, width, to, row);
}

void write_tile(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                const float *from, long row) {
    for (long r = 0; r < count; r++, from += row) {
        void *to = head + token_at(order, first + r) * stride * bytes_of(type);
        if (type == FLOAT32) write_row(FLOAT32, from, width, to);
        else if (type == BFLOAT16) write_row(BFLOAT16, from, width, to);
        else write_row(FLOAT16, from, width, to);
    }
}

Rows view(long type, const char *head, long stride, const int32_t *order, long first, long count, long width,
          float *spare) {
    if (is_direct(type, order, width)) return (Rows){(float *)head + first * stride, stride};
    read_tile(type, head, stride, order, first, count, width, spare, row_of(width));
    return (Rows){spare, row_of(width)};
}

Rows output_rows(long type, char *head, long stride, const int32_t *order, long first, long width, float *spare) {
    if (is_direct(type, order, width)) return (Rows){(float *)head + first * stride, stride};
    return (Rows){spare, row_of(width)};
}

void store_rows(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                Rows from) {
    if (!is_direct(type, order, width)) write_tile(type, head, stride, order, first, count, width, from.data, from.row);
}

void store_or_add_rows(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                       float *rows, long row, int add, float *spare) {
    if (add) {
        read_tile(type, head, stride, order, first, count, width, spare, row);
        for (long r = 0; r < count; r++)
            for (long i = 0; i < padded(width); i += LANES)
                store(rows + r * row + i, load(rows + r * row + i) + load(spare + r * row + i));
    }
    write_tile(type, head, stride, order, first, count, width, rows, row);
}
