/* The rows of queries and keys that the forms of `lln.forms` are made of.

   Beside the paper's form, keys have a softmax over their features, p = softmax(beta (k - m_k)), and log-weights w, so
   that exp(b) = p exp(w). With `top`, the largest w, p exp(w - top) is at most 1 and at least one entry of each key is
   not small: exponentials need no other reference than the largest entry of their row. Only where a feature is so small
   in all keys that its sum has lost digits (SMALLEST_MASS) is every feature measured from its own largest b instead. */
#ifndef LLN_FORM_H
#define LLN_FORM_H

#include <stdint.h>

#include "scratch.h"
#include "tile.h"

#define FARTHEST 20.f /* distances from a largest b are at most its rounding, but for features beyond the last */

/* What is kept of some keys: sums over them of e = exp(beta (k - maximum)), and of that times the values. */
typedef struct {
    float *maximum, *mass, *values;
} Memory;

INLINE long memory_floats(const Job *job) { return 2 * padded(job->width) + job->width * row_of(job->value_width); }

INLINE Memory memory_at(float *memory, const Job *job) {
    long vector = padded(job->width);
    return (Memory){memory, memory + vector, memory + 2 * vector};
}

/* exp(alpha (q - center) + mass - the largest of that) of one query or two, and the sums; center NULL: none. Two at
   once: each waits for its maximum. */
INLINE void weigh_centered(const int count, const int vectors, const float *alpha, const float *center,
                           const float *mass, const float *query, long query_row, float *to, long row, float *sums) {
    vf maximum[2], nan_marker[2], sum[2];
    float top[2];
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) {
        maximum[r] = broadcast(2.f * MASKED);
        nan_marker[r] = sum[r] = broadcast(0.f);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf q = load(query + r * query_row + i * LANES);
            vf z = (center ? q - load(center + i * LANES) : q) * alpha[r] + load(mass + i * LANES);
            nan_marker[r] += q * 0.f; /* NaN where the query is not finite, which an exponential could remove */
            maximum[r] = larger(maximum[r], z);
            store(to + r * row + i * LANES, z);
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) top[r] = largest_of(maximum[r]) + total_of(nan_marker[r]);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf e = exponential(load(to + r * row + i * LANES) - top[r]);
            store(to + r * row + i * LANES, e);
            sum[r] += e;
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) sums[r] = total_of(sum[r]);
}

INLINE void weigh_queries(const int count, const int vectors, const float *alpha, const float *mass, const float *query,
                          long query_row, float *to, long row, float *sums) {
    weigh_centered(count, vectors, alpha, NULL, mass, query, query_row, to, row, sums);
}

void feature_softmax(long rows, long vector, float alpha, const float *mass, float weight, Rows queries, float *tile,
                     long row);

/* The same of centred rows, with a weight for each. */
void centered_softmax(long rows, long vector, float alpha, const float *center, const float *mass, const float *weights,
                      Rows queries, float *tile, long row);

/* The centres of a head and m_q / sqrt(D), which a key is multiplied with for its weight; zeros where the form has
   none. `none` is 0, and MASKED beyond the last feature. */
typedef struct {
    float *query, *key, *column, *none;
} Form;

Form read_form(const Job *job, long b, long h, Scratch *scratch);

/* A tile of keys. p = shares / total of a row, ln p = logs - ln(total). */
typedef struct {
    float *logs, *shares; /* (rows x D), NULL where they are not wanted */
    long row;
    float beta[TILE], total[TILE];
    float log_total[TILE]; /* with `logs` */
    float weight[TILE];    /* w = m_q . (k - m_k) / sqrt(D) + the given one; that of m_q . k is larger by a constant */
} FormKeys;

/* The keys in rows first ... end of a tile, whose row 0 is at place `start`. Weights that are not finite become NaN. */
void weigh_form_keys(const Plan *plan, const Form *form, long b, long h, const int32_t *order, long start, long first,
                     long end, Rows keys, FormKeys *to);

/* exp(b - maximum) of a key, with b - maximum = ln p + (w - maximum) in this order: neither is rounded to what w is. */
INLINE void form_distances(long vector, const FormKeys *keys, long r, const float *maximum, const float *log_sum,
                           float *to) {
    float log_total = keys->log_total[r], weight = keys->weight[r];
    for (long i = 0; i < vector; i += LANES) {
        vf apart = load(keys->logs + r * keys->row + i) + (weight - load(maximum + i)) - log_total;
        if (log_sum) apart -= load(log_sum + i);
        store(to + i, exponential(smaller(apart, broadcast(FARTHEST))));
    }
}

/* Sums over the keys of p exp(w), and of that times the values: measured from the largest w, or with `exact` from the
   largest b of each feature. */
void sum_form_keys(const Plan *plan, long b, long h, long first, long end, int exact, Memory memory, Scratch scratch);

/* Whether some feature was measured from a reference too far above it. */
int needs_exact(const Job *job, Memory memory);

/* Add the memory of other keys to that of a head. */
void join_memories(const Job *job, Memory memory, Memory other);

/* B = exp(b - maximum - log_sum), the shares of all keys that these have. */
void share_form_keys(const Job *job, long rows, const float *maximum, const float *log_sum, const FormKeys *keys,
                     float *tile);

/* dk from the gradients g of b, whose rows sum to `sums`:

       beta (g - p sum) + sum m_q / sqrt(D)

   With `add` it is added to what is there. `centers` (or NULL) gets the sum over keys of sum (k - m_k) / sqrt(D), for
   m_q, and of minus the first term, for m_k. */
void form_key_gradients(const Job *job, const Form *form, long rows, Rows keys, const FormKeys *tile,
                        const float *grads, const float *sums, Rows to, int add, float *centers);

/* The gradient of beta from that of the b of a key. */
float form_beta_gradient(const Job *job, const Form *form, Rows keys, const FormKeys *tile, const float *grads,
                         float sum, long r);

/* Add a row to those at places first ... end. */
void add_to_rows(const Job *job, const Tensor *x, long b, long head, const int32_t *order, long first, long end,
                 const float *row, float *spare);

#endif
