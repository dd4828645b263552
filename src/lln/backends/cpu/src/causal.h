/* Causal LLN attention: tile by tile, with what came before a tile in a memory of constant size.

   With phi = exp(alpha q) and psi = exp(beta k), out_i = sum of (phi_i . psi_j) v_j over j <= i, divided by the sum of
   the weights. All that is exponentiated is measured from `maximum`, the largest beta k so far, the end of the tile
   included: psi' = exp(beta k - maximum) is at most 1, and phi' = exp(alpha q + maximum - the largest of that). A query
   early in the tile has a smaller one than `maximum`; so a tile ends before a key that exceeds what its first query has
   seen by more than REACH, and no sum of weights is smaller than exp(-REACH). Tiles of one token are the worst case,
   for keys that grow and grow. A token that is not finite is a tile of its own, so that it does not reach earlier ones.

   Where heads are too few for the threads, a head is cut into chunks: each begins with the memory of those before it,
   which are read once more for that. */
#ifndef LLN_CAUSAL_H
#define LLN_CAUSAL_H

#include <stdint.h>
#include <string.h>

#include "form.h"

/* A tile and what is computed of it. */
typedef struct {
    long rows;
    float *phi, *psi, *psi_T, *weights; /* (rows x D), (rows x D), (D x rows), (rows x rows) */
    float *maximum, *fade;              /* (D): the largest beta k up to its end, and exp(maximum before - maximum) */
    int fades;                          /* whether any `fade` is not 1 */
    Rows query, key, value;
    uint8_t blanked[TILE]; /* which queries count as zeros */
    float *query_spare, *key_spare, *value_spare;
    Form form;
    FormKeys keys; /* of a form, `logs` in place of psi */
} Causal;

INLINE int is_kept(const Job *job, long b, long token) {
    return !job->keep_key || job->keep_key[b * job->keys + token];
}

/* Buffers for the tiles of a head, and its form. `maximum`: of what came before; it is kept up to date there.
   `shares`: those of its keys are computed, too. */
Causal causal_begin_head(const Job *job, long b, long h, float *maximum, int shares, Scratch *scratch);

/* The tile from `start` on: its keys, its queries and the weights of its pairs. With `is_fixed` it ends at `end`, and
   otherwise before the first token that does not fit. */
void causal_tile(const Plan *plan, long b, long h, long start, long end, int is_fixed, Causal *t, Scratch scratch);

/* c (+)= w b for the lower triangle w. */
void multiply_lower(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row);

/* c += wᵀ b for the lower triangle w: row j of c takes rows j ... of b. */
void multiply_lower_transposed(long rows, long width, const float *w, long w_row, Rows b, float *c, long c_row);

/* The sum of the weights of a query: phi . mass + those inside the tile. */
INLINE float weight_sum(const Causal *t, long r, const float *mass, long row, long square, long vector) {
    vf sum = broadcast(0.f);
    for (long i = 0; i < vector; i += LANES) sum += load(t->phi + r * row + i) * load(mass + i);
    for (long j = 0; j < padded(r + 1); j += LANES) sum += load(t->weights + r * square + j);
    return total_of(sum);
}

INLINE void fade_rows(long rows, const float *fade, float *matrix, long row, long width) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < width; j += LANES) store(matrix + i * row + j, load(matrix + i * row + j) * fade[i]);
}

INLINE void fade_columns(long rows, const float *fade, float *matrix, long row, long vector) {
    for (long i = 0; i < rows; i++)
        for (long j = 0; j < vector; j += LANES)
            store(matrix + i * row + j, load(matrix + i * row + j) * load(fade + j));
}

INLINE void add_tile_mass(const Causal *t, float *mass, long row, long vector) {
    for (long i = 0; i < vector; i += LANES) {
        vf sum = load(mass + i);
        for (long r = 0; r < t->rows; r++) sum += load(t->psi + r * row + i);
        store(mass + i, sum);
    }
}

INLINE void clear_memory(const Job *job, Memory memory) {
    for (long i = 0; i < padded(job->width); i++) memory.maximum[i] = MASKED;
    memset(memory.mass, 0, (padded(job->width) + job->width * row_of(job->value_width)) * sizeof(float));
}

/* The memory of the tokens first ... end alone. */
void causal_sum_keys(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch);

/* Add the memory of earlier tokens to that of later ones. */
void causal_precede(const Job *job, Memory earlier, Memory later);

/* The output of the tokens first ... end, which come after those of `memory` and are added to it. */
void causal_attend(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch);

void causal_head(const Plan *plan, long b, long h, Scratch scratch);

/* What the backward pass of the queries of a chunk keeps for that of its keys, for each token of the head and each tile
   of the chunk. */
typedef struct {
    float *inverse, *mean; /* 1 / the sum of weights; the mean of the gradient under the weights */
    int64_t *tiles;        /* how many */
    int64_t *starts;       /* of the tiles, and the end */
    float *maximum;        /* (tiles x padded width) */
} History;

/* Enough for tiles of one token; memory that is not used is never touched. */
INLINE long history_floats(const Job *job, long chunks) {
    return part_stride(2 * (job->keys + 2 * chunks)) + 2 * part_stride(job->keys) + job->keys * padded(job->width);
}

INLINE History history_at(float *buffer, const Job *job, long first, long chunk, long chunks) {
    int64_t *tiles = (int64_t *)buffer + first + 2 * chunk;
    float *inverse = after_parts(buffer, 1, 2 * (job->keys + 2 * chunks)), *mean = after_parts(inverse, 1, job->keys);
    return (History){inverse, mean, tiles, tiles + 1, after_parts(mean, 1, job->keys) + first * padded(job->width)};
}

/* dq of the tokens first ... end, their history, and in `memory_grad` (or NULL) the gradients of the memory of the keys
   before `first`: phi times the gradient over the sum of weights, and phi times its mean. */
void causal_queries_backward(const Plan *plan, long b, long h, long first, long end, Memory before,
                             const Memory *memory_grad, History past, Scratch scratch);

/* Where dk and dv of a key head are summed over the heads that share it: in the result, or in `buffer` if that is not
   made of rows of floats. */
typedef struct {
    Rows keys, values;
} KeyGradients;

INLINE long key_gradients_floats(const Job *job) {
    int direct = is_direct(job->type, NULL, job->width) && is_direct(job->type, NULL, job->value_width);
    return direct ? 0 : job->keys * (padded(job->width) + padded(job->value_width));
}

KeyGradients key_gradients(const Job *job, long b, long key_head, float *buffer);
void store_key_gradients(const Job *job, long b, long key_head, long first, long end, KeyGradients from);

/* dk and dv of a chunk, from the last tile to the first, added to rows of floats; `first`: there is nothing yet.
   `after` is the gradient of their memory from the queries after the chunk, or NULL. */
void causal_keys_backward(const Plan *plan, long b, long h, History past, const Memory *after, KeyGradients sums,
                          int first, Scratch scratch);

/* Add the memory gradients of later chunks, which are measured from the end of this one, to those of a chunk. */
void causal_add_later_gradients(const Job *job, Memory before, Memory before_next, Memory memory_grad,
                                Memory memory_grad_next);

/* Gradients of a key head and its query heads; 1 if there was no memory. */
int causal_backward(const Plan *plan, long b, long key_head, Scratch scratch);

#endif
