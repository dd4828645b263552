/* alpha and beta of causal attention, those of each token from the tokens up to it:
   `lln.matching.moments.prefix_moments`. */
#ifndef LLN_PREFIX_H
#define LLN_PREFIX_H

#include "moments.h"

/* Entries of a token: the sums that `moments.PrefixSums` has. */
INLINE void add_entries(const float *row, long width, double *sums) {
    vf nan_marker = broadcast(0.f), sum = broadcast(0.f), squares = broadcast(0.f);
    float origin = row[0] > LARGEST_ENTRY ? LARGEST_ENTRY : row[0] < -LARGEST_ENTRY ? -LARGEST_ENTRY : row[0];
    float lanes[LANES];
    long whole = width / LANES * LANES;
    for (long i = 0; i < width; i += LANES) {
        vf raw = load(row + i), x = smaller(larger(raw, broadcast(-LARGEST_ENTRY)), broadcast(LARGEST_ENTRY)) - origin;
        if (i == whole) { /* beyond the last feature: as the first */
            store(lanes, x);
            for (long j = width - whole; j < LANES; j++) lanes[j] = 0.f;
            x = load(lanes);
        }
        nan_marker += raw * 0.f;
        sum += x;
    }
    float centre = total_of(sum) / width;
    for (long i = 0; i < width; i += LANES) {
        vf x = smaller(larger(load(row + i), broadcast(-LARGEST_ENTRY)), broadcast(LARGEST_ENTRY)) - origin - centre;
        if (i == whole) {
            store(lanes, x);
            for (long j = width - whole; j < LANES; j++) lanes[j] = 0.f;
            x = load(lanes);
        }
        squares += x * x;
    }
    double mean = (double)origin + centre + total_of(nan_marker);
    sums[0] += mean;
    sums[1] += mean * mean;
    sums[2] += total_of(squares) / width;
}

/* Sums over the kept tokens up to some place. */
typedef struct {
    double query[3], key[3], count;
} PrefixSums;

INLINE void add_sums(PrefixSums *to, const PrefixSums *from) {
    for (int i = 0; i < 3; i++) {
        to->query[i] += from->query[i];
        to->key[i] += from->key[i];
    }
    to->count += from->count;
}

/* alpha and beta that match the sums of some tokens. */
void match_sums(const Job *job, const PrefixSums *sums, float *alpha, float *beta);

/* Add the tokens first ... end to `sums`; with `want_scales`, alpha and beta of each from the tokens up to it. */
void match_prefixes(const Plan *plan, long b, long h, long first, long end, int want_scales, PrefixSums *sums,
                    Scratch scratch);

#endif
