/* alpha and beta of causal attention: those of each token from the tokens up to it, as `lln.moments.prefix_moments`. */
#ifndef LLN_PREFIX_H
#define LLN_PREFIX_H

#include "moments.h"

/* Entries of a token: the sums that `moments.PrefixSums` has. */
INLINE void add_entries(const float *row, long width, double *sums) {
    vf shows = same(0.f), sum = same(0.f), squares = same(0.f);
    float origin = row[0] > LARGEST_ENTRY ? LARGEST_ENTRY : row[0] < -LARGEST_ENTRY ? -LARGEST_ENTRY : row[0];
    float lanes[LANES];
    long whole = width / LANES * LANES;
    for (long i = 0; i < width; i += LANES) {
        vf raw = load(row + i), x = smaller(larger(raw, same(-LARGEST_ENTRY)), same(LARGEST_ENTRY)) - origin;
        if (i == whole) { /* beyond the last feature: as the first */
            store(lanes, x);
            for (long j = width - whole; j < LANES; j++) lanes[j] = 0.f;
            x = load(lanes);
        }
        shows += raw * 0.f;
        sum += x;
    }
    float centre = total_of(sum) / width;
    for (long i = 0; i < width; i += LANES) {
        vf x = smaller(larger(load(row + i), same(-LARGEST_ENTRY)), same(LARGEST_ENTRY)) - origin - centre;
        if (i == whole) {
            store(lanes, x);
            for (long j = width - whole; j < LANES; j++) lanes[j] = 0.f;
            x = load(lanes);
        }
        squares += x * x;
    }
    double mean = (double)origin + centre + total_of(shows);
    sums[0] += mean;
    sums[1] += mean * mean;
    sums[2] += total_of(squares) / width;
}

static float sigma_of_sums(const double *sums, double count) {
    double mean = sums[0] / count, between = sums[1] / count - mean * mean;
    return (float)sqrt(sums[2] / count + (between < 0 ? 0 : between));
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
static void match_sums(const Job *job, const PrefixSums *sums, float *alpha, float *beta) {
    double count = sums->count > 0 ? sums->count : 1;
    float sigma_q = sigma_of_sums(sums->query, count), sigma_k = sigma_of_sums(sums->key, count);
    double product = (double)sigma_q * sigma_k > LARGEST_ENTRY ? LARGEST_ENTRY : (double)sigma_q * sigma_k;
    double share = sqrt(matched_spread(job, product * product, sums->count) / 2);
    *alpha = divided(share, sigma_q);
    *beta = divided(share, sigma_k);
}

/* Add the tokens first ... end to `sums`; with `decide`, alpha and beta of each from the tokens up to it. */
static void match_prefixes(const Plan *plan, long b, long h, long first, long end, int decide, PrefixSums *sums,
                           Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, row = row_of(D), group = h / (job->heads / job->key_heads);
    float *queries = take(&scratch, TILE * row), *keys = take(&scratch, TILE * row);
    float alpha = 0.f, beta = 0.f;
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        read_tile(type, head_of(&job->query, type, b, h), job->query.token, NULL, start, rows, D, queries, row);
        read_tile(type, head_of(&job->key, type, b, group), job->key.token, NULL, start, rows, D, keys, row);
        for (long r = 0; r < rows; r++) {
            if (!job->keep_key || job->keep_key[b * job->keys + start + r]) {
                sums->count += 1;
                add_entries(queries + r * row, D, sums->query);
                add_entries(keys + r * row, D, sums->key);
            }
            if (!decide) continue;
            match_sums(job, sums, &alpha, &beta);
            long token = start + r;
            if (job->match_alpha) job->alpha.data[b * job->alpha.batch + h * job->alpha.head + token * job->alpha.token]
                    = alpha;
            if (job->match_beta) job->beta.data[b * job->beta.batch + h * job->beta.head + token * job->beta.token] =
                    beta;
        }
    }
}

#endif
