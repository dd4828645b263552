/* Statistics of queries and keys, and the alpha and beta that follow from them: `lln.matching.moments` in one pass. */
#ifndef LLN_MOMENTS_H
#define LLN_MOMENTS_H

#include <stdint.h>

#include "scratch.h"

#define LARGEST_ENTRY 1e15f

/* Statistics of some tokens of a head. All arrays are (padded width), the covariance has rows of `row_of(width)`. */
typedef struct {
    float *count;                /* one float, the number of tokens; the rest follows it in memory */
    float *mean, *covariance;    /* covariance: sums over tokens, the upper triangle; not written for fewer than two */
    float *maximum, *nan_marker; /* the largest entry of each feature, unbounded; 0, or NaN if one was not finite */
} Moments;

INLINE long moments_floats(long width) { return 16 + 3 * padded(width) + padded(width) * row_of(width); }

INLINE Moments moments_at(float *memory, long width) {
    long vector = padded(width);
    Moments m = {memory, memory + 16, memory + 16 + 3 * vector, memory + 16 + vector, memory + 16 + 2 * vector};
    return m;
}

/* Moments of the tokens at places first ... end; without `covariance` only the largest entries and `nan_marker`. */
void measure(const Job *job, const char *head, long stride, const int32_t *order, long first, long end, int covariance,
             Moments m, Scratch scratch);

/* Moments of two sets of tokens together, in the first. */
void merge_moments(long width, Moments m, Moments other);

/* s² for a variance of the scores and a number of keys: `lln.matching.curves.matched_spread`. */
double matched_spread(const Job *job, double variance, double keys);

float divided(double share, double sigma);

/* Moments of centred tokens: of those around the centres of the decomposed form, which are means of the sample or
   given. Means are written to `center` with `keep`. */
void center_moments(const Job *job, Tensor center, long b, long head, int keep, Moments m);

/* alpha and beta of a head (eq. 10) from the moments of its queries and keys; uses up their covariances. */
void match(const Job *job, Moments q, Moments k, float *alpha, float *beta);

#endif
