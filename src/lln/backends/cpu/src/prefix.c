#include "prefix.h"

#include <math.h>

#include "form.h"

static float sigma_of_sums(const double *sums, double count) {
    double mean = sums[0] / count, between = sums[1] / count - mean * mean;
    return (float)sqrt(sums[2] / count + (between < 0 ? 0 : between));
}

void match_sums(const Job *job, const PrefixSums *sums, float *alpha, float *beta) {
    double count = sums->count > 0 ? sums->count : 1;
    float sigma_q = sigma_of_sums(sums->query, count), sigma_k = sigma_of_sums(sums->key, count);
    double product = (double)sigma_q * sigma_k > LARGEST_ENTRY ? LARGEST_ENTRY : (double)sigma_q * sigma_k;
    double share = sqrt(matched_spread(job, product * product, sums->count) / 2);
    *alpha = divided(share, sigma_q);
    *beta = divided(share, sigma_k);
}

/* Tokens first ... of a head as rows of floats, less their centre (or NULL). */
INLINE void read_centered(const Job *job, const Tensor *x, long b, long head, long first, long rows,
                          const float *center, float *to, long row) {
    const char *from = head_of(x, job->type, b, head);
    if (!center) {
        read_tile(job->type, from, x->token, NULL, first, rows, job->width, to, row);
        return;
    }
    Rows tokens = view(job->type, from, x->token, NULL, first, rows, job->width, to);
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < padded(job->width); i += LANES)
            store(to + r * row + i, load(tokens.data + r * tokens.row + i) - load(center + i));
}

void match_prefixes(const Plan *plan, long b, long h, long first, long end, int want_scales, PrefixSums *sums,
                    Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, row = row_of(D), group = h / (job->heads / job->key_heads);
    float *queries = take(&scratch, TILE * row), *keys = take(&scratch, TILE * row);
    float alpha = 0.f, beta = 0.f;
    Form form = {0};
    if (job->form == DECOMPOSED) form = read_form(job, b, h, &scratch);
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        read_centered(job, &job->query, b, h, start, rows, form.query, queries, row);
        read_centered(job, &job->key, b, group, start, rows, form.key, keys, row);
        for (long r = 0; r < rows; r++) {
            if (!job->keep_key || job->keep_key[b * job->keys + start + r]) {
                sums->count += 1;
                add_entries(queries + r * row, D, sums->query);
                add_entries(keys + r * row, D, sums->key);
            }
            if (!want_scales) continue;
            match_sums(job, sums, &alpha, &beta);
            long token = start + r;
            if (job->match_alpha)
                job->alpha.data[b * job->alpha.batch + h * job->alpha.head + token * job->alpha.token] = alpha;
            if (job->match_beta)
                job->beta.data[b * job->beta.batch + h * job->beta.head + token * job->beta.token] = beta;
        }
    }
}
