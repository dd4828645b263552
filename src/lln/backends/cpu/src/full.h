/* LLN attention of every query to every kept key, in the two-softmax form of `lln.backends.torch`, and its gradients.
 */
#ifndef LLN_FULL_H
#define LLN_FULL_H

#include <stdint.h>

#include "form.h"

/* Keys with log-weights, b = beta k + w. Both terms may be large and cancel, so b is summed in doubles, and measured
   there from `maximum`, the largest b rounded to a float: the distance is exact to a float, whatever the size of b. At
   the largest b itself it is no more than the rounding of `maximum`, which is at most 16 up to EXACT. From there on
   distances are those of rounded b, which are 0 at the largest. */
#define EXACT 268435456.f
#define HALF (LANES / 2)

typedef float vh __attribute__((vector_size(HALF * 4)));
typedef int32_t vhi __attribute__((vector_size(HALF * 4)));
typedef double vd __attribute__((vector_size(HALF * 8)));
typedef float vh_anywhere __attribute__((vector_size(HALF * 4), aligned(4), may_alias));

INLINE vd load_doubles(const float *p) { return __builtin_convertvector((vh) * (const vh_anywhere *)p, vd); }
INLINE vh rounded(vd x) { return __builtin_convertvector(x, vh); }

/* Other forms have no beta k that could cancel with a weight: see form.h. */
INLINE int is_weighted(const Job *job) { return job->key_weight.data != NULL && job->form == PAPER; }

/* b of a key, rounded. */
INLINE void weigh_key(long vector, double beta, double weight, const float *key, float *to) {
    for (long i = 0; i < vector; i += HALF) *(vh_anywhere *)(to + i) = rounded(load_doubles(key + i) * beta + weight);
}

/* b - maximum of a key. */
INLINE void key_distances(long vector, double beta, double weight, const float *key, const float *maximum, float *to) {
    for (long i = 0; i < vector; i += HALF) {
        vd b = load_doubles(key + i) * beta + weight;
        vh from = *(const vh_anywhere *)(maximum + i), near = rounded(b - load_doubles(maximum + i)),
           far = rounded(b) - from;
        vhi exact = (from < EXACT) & (from > -EXACT);
        *(vh_anywhere *)(to + i) = (vh)(((vhi)near & exact) | ((vhi)far & ~exact));
    }
}

/* The largest b of each feature among the keys at places first ... end, or NaN where a key or its weight is not
   finite. */
void largest_weighted(const Plan *plan, long b, long h, long first, long end, float *maximum, Scratch scratch);

/* Log-weights of the keys at places first ...; NULL if there are none. */
const float *read_weights(const Plan *plan, long b, long h, long first, long count, float *to);

/* B = exp(beta (k - maximum) - log_sum), the shares of all keys that these have: measured from the largest key as in
   `weigh_keys`, because beta k - L loses what the rounding of a large L takes away. */
void share_keys(long rows, long vector, float beta, const float *weights, const float *maximum, const float *log_sum,
                Rows keys, float *tile, long row);

/* Queries of padding that are not finite, or so large that they would not be once they are scaled, count as zeros, so
   that 0 times NaN reaches no gradient: the tile as it is, or a copy of it in `spare` without them. `blanked` is
   which rows those are. */
Rows without_unusable_padding(const Job *job, const uint8_t *keep, long b, const int32_t *order, long first, long count,
                              Rows queries, float *spare, uint8_t *blanked);

/* The memory of the keys at places first ... end. */
void sum_keys(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch);

/* Make the mean values S and, instead of their mass, log_sum = L - beta maximum of what was summed over the keys. */
void finish_memory(const Plan *plan, long b, long h, Memory memory, Scratch scratch);

/* Pass a finished memory to the backward pass, if there is to be one. */
void keep_memory(const Job *job, long b, long h, Memory memory);

/* L of a head, filled up so that features beyond the last get no weight. */
float *read_mass(const Job *job, long b, long h, const float *maximum, const float *log_sum, Scratch *scratch);

float *read_values(const Job *job, long b, long h, Scratch *scratch);

/* Tokens that are worked on together: a tile, or whole blocks. */
INLINE long step_of(const Job *job) {
    long size = job->block_size && !job->is_window ? near_size(job) : TILE;
    return size >= TILE ? size : TILE / size * size;
}

/* out = A S of the queries at places first ... end for a finished memory, or the mean of that and the attention inside
   blocks. */
void attend_memory(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch);

/* Gradients of a memory, dL and dS, summed over queries; behind them those of the centres, m_q and m_k. */
INLINE long centers_place(const Job *job) { return padded(job->width) + job->width * row_of(job->value_width); }
INLINE long memory_grad_floats(const Job *job) {
    return centers_place(job) + (job->sample_centers ? 2 * padded(job->width) : 0);
}

/* dq of the queries at places first ... end, and their dL and dS. */
void attend_memory_backward(const Plan *plan, long b, long h, long first, long end, float *memory_grad,
                            Scratch scratch);

/* dk and dv of the keys at places first ... end of a key head, given dL and dS of all its query heads. Gradients
   of the centres are written to `own`, which has the layout of `memory_grad`. */
void sum_keys_backward(const Plan *plan, long b, long key_head, long first, long end, const float *memory_grad,
                       float *own, Scratch scratch);

/* Means of the sample are part of the function: add their gradients to those of the kept tokens, an equal part to each.
   `memory_grad` is that of the first query head of a key head and of the first chunk, `next` the floats from one chunk
   to the next. */
void spread_centers(const Plan *plan, long b, long key_head, long chunk, const float *memory_grad, long next,
                    Scratch scratch);

#endif
