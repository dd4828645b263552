#include "moments.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tile.h"

#define SMALLEST_SIGMA 1e-30
#define MAX_SCORE_VARIANCE 1e6

/* A tile's part in the moments of `columns` vectors of features. It leaves the tile centred, and what its mean and that
   of the tiles before differ by as one more row, whose square is what the covariance gains by putting them together. */
INLINE void measure_columns(const int columns, long at, long count, float before, int covariance, Moments m, Rows from,
                            float *tile, long row) {
    vf maximum[2], least[2], sum[2], origin[2];
#pragma GCC unroll 2
    for (int c = 0; c < columns; c++) {
        maximum[c] = least[c] = origin[c] = load(from.data + at + c * LANES);
        sum[c] = broadcast(0.f);
    }
    for (long r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int c = 0; c < columns; c++) {
            vf x = load(from.data + r * from.row + at + c * LANES);
            maximum[c] = larger(maximum[c], x);
            least[c] = smaller(least[c], x);
            x -= origin[c];
            sum[c] += x;
            if (covariance) store(tile + r * row + at + c * LANES, x);
        }
    for (int c = 0; c < columns; c++) {
        long i = at + c * LANES;
        store(m.maximum + i, larger(load(m.maximum + i), maximum[c]));
        vi huge = (maximum[c] > LARGEST_ENTRY) | (least[c] < -LARGEST_ENTRY) | (sum[c] != sum[c]);
        int any = 0;
        for (int j = 0; j < LANES; j++) any |= huge[j];
        if (any) { /* start again with bounded entries, and check whether all are finite */
            vf bounded = smaller(larger(origin[c], broadcast(-LARGEST_ENTRY)), broadcast(LARGEST_ENTRY)),
               nan_marker = load(m.nan_marker + i);
            sum[c] = broadcast(0.f);
            for (long r = 0; r < count; r++) {
                vf x = load(from.data + r * from.row + i);
                nan_marker += x * 0.f;
                x = smaller(larger(x, broadcast(-LARGEST_ENTRY)), broadcast(LARGEST_ENTRY)) - bounded;
                if (covariance) store(tile + r * row + i, x);
                sum[c] += x;
            }
            origin[c] = bounded;
            store(m.nan_marker + i, nan_marker);
        }
        if (!covariance) continue;
        vf centre = sum[c] / (float)count, mean = load(m.mean + i), apart = centre + origin[c] - mean;
        for (long r = 0; r < count; r++) store(tile + r * row + i, load(tile + r * row + i) - centre);
        store(tile + count * row + i, apart * sqrtf(before * (count / (before + count))));
        store(m.mean + i, before > 0 ? mean + apart * (count / (before + count)) : centre + origin[c]);
    }
}

void measure(const Job *job, const char *head, long stride, const int32_t *order, long first, long end, int covariance,
             Moments m, Scratch scratch) {
    long width = job->width, vector = padded(width), row = row_of(width);
    float *tile = take(&scratch, (TILE + 1) * row), *spare = take(&scratch, TILE * row);
    int varies = end - first > 1;
    memset(m.count, 0, (16 + 3 * vector) * sizeof(float));
    for (long i = 0; i < vector; i++) m.maximum[i] = MASKED;
    for (long start = first; start < end; start += TILE) {
        long count = at_most(TILE, end - start);
        float before = *m.count;
        Rows from = view(job->type, head, stride, order, start, count, width, spare);
        long i = 0;
        for (; i + 2 * LANES <= vector; i += 2 * LANES)
            measure_columns(2, i, count, before, covariance, m, from, tile, row);
        if (i < vector) measure_columns(1, i, count, before, covariance, m, from, tile, row);
        Ahead next = tile_after(job->type, head, stride, order, start + count, end, width);
        if (covariance && varies) gram(vector, count + (before > 0), tile, row, m.covariance, row, before > 0, &next);
        *m.count = before + count;
    }
}

/* That of fewer than two tokens, which is zero. */
static void clear_covariance(long width, Moments m) {
    memset(m.covariance, 0, padded(width) * row_of(width) * sizeof(float));
}

void merge_moments(long width, Moments m, Moments other) {
    long vector = padded(width), row = row_of(width);
    float before = *m.count, after = before + *other.count;
    if (*other.count == 0) return;
    if (before < 2) clear_covariance(width, m);
    if (*other.count < 2) clear_covariance(width, other);
    float share = *other.count / after, weight = before * share;
    for (long i = 0; i < width; i++) {
        float *to = m.covariance + i * row, *from = other.covariance + i * row;
        float apart = (other.mean[i] - m.mean[i]) * weight;
        for (long j = i / LANES * LANES; j < vector; j += LANES)
            store(to + j, load(to + j) + load(from + j) + (load(other.mean + j) - load(m.mean + j)) * apart);
    }
    for (long i = 0; i < vector; i += LANES) {
        vf mean = load(m.mean + i);
        store(m.mean + i, before > 0 ? mean + (load(other.mean + i) - mean) * share : load(other.mean + i));
        store(m.maximum + i, larger(load(m.maximum + i), load(other.maximum + i)));
        store(m.nan_marker + i, load(m.nan_marker + i) + load(other.nan_marker + i));
    }
    *m.count = after;
}

double matched_spread(const Job *job, double variance, double keys) {
    if (variance > MAX_SCORE_VARIANCE) variance = MAX_SCORE_VARIANCE;
    if (job->curve_rows == 0) {
        double spread = (variance - job->line_b) / job->line_a;
        return spread < 0 ? 0 : spread;
    }
    if (!(variance > 0)) return variance;
    double row = 0,
           column = (log(variance < 1.1754944e-38 ? 1.1754944e-38 : variance) - job->log_start) / job->log_ratio;
    if (job->curve_rows > 1) {
        row = (log(keys < 1 ? 1 : keys) - job->log_first_count) / job->log_count_ratio;
        row = row < 0 ? 0 : row > job->curve_rows - 1 ? job->curve_rows - 1 : row;
    }
    double last = job->curve_columns - 1, inside = column < 0 ? 0 : column > last ? last : column;
    long top = at_most((long)row, at_least(job->curve_rows - 2, 0)),
         left = at_most((long)inside, job->curve_columns - 2);
    long bottom = at_most(top + 1, job->curve_rows - 1);
    double down = row - top, right = inside - left;
    const float *upper = job->curve + top * job->curve_columns + left;
    const float *lower = job->curve + bottom * job->curve_columns + left;
    double log_spread = (upper[0] * (1 - right) + upper[1] * right) * (1 - down);
    log_spread += (lower[0] * (1 - right) + lower[1] * right) * down;
    if (job->form != PAPER && column < 0) { /* `lln.matching.curves._narrow` */
        double below = column * job->log_ratio, limit = log(2 * sqrt(job->width)) + job->log_start / 2;
        double gap = log_spread - limit, power = 0.45 / (fabs(gap) > 1e-9 ? fabs(gap) : 1e-9);
        return exp(limit + below / 2 + gap * exp(below * (power < 0.5 ? power : 0.5)));
    }
    return exp(log_spread + (column - inside) * job->log_ratio);
}

float divided(double share, double sigma) { return sigma <= SMALLEST_SIGMA ? 0.f : (float)(share / sigma); }

/* Variance of the entries within features and between their means, and the root mean square of all. */
static void entry_moments(long width, Moments m, double *sigma, double *unit) {
    long row = row_of(width), varies = *m.count > 1;
    double count = *m.count > 0 ? *m.count : 1, within = 0, sum = 0, squares = 0, raw = 0;
    for (long i = 0; i < width; i++) {
        double apart = (double)m.mean[i] - m.mean[0];
        if (varies) within += m.covariance[i * row + i];
        sum += apart;
        squares += apart * apart;
        raw += (double)m.mean[i] * m.mean[i];
    }
    within /= count * width;
    double between = squares / width - (sum / width) * (sum / width);
    *sigma = sqrt(within + (between > 0 ? between : 0));
    *unit = sqrt(within + raw / width);
    if (*unit < SMALLEST_SIGMA) *unit = SMALLEST_SIGMA;
}

void center_moments(const Job *job, Tensor center, long b, long head, int keep, Moments m) {
    float *at = (float *)head_of(&center, FLOAT32, b, head);
    if (keep && job->sample_centers) memcpy(at, m.mean, job->width * sizeof(float));
    for (long i = 0; i < job->width; i++) m.mean[i] = job->sample_centers ? 0.f : m.mean[i] - at[i];
}

void match(const Job *job, Moments q, Moments k, float *alpha, float *beta) {
    long width = job->width, vector = padded(width), row = row_of(width);
    double sigma_q, sigma_k, unit_q, unit_k;
    entry_moments(width, q, &sigma_q, &unit_q);
    entry_moments(width, k, &sigma_k, &unit_k);
    if (*q.count < 2 && *k.count > 1) clear_covariance(width, q);
    float nan_marker = 0;
    for (long i = 0; i < vector; i++) nan_marker += q.nan_marker[i] + k.nan_marker[i];
    float inverse_q = (float)(1 / unit_q), inverse_k = (float)(1 / unit_k);
    double count_q = *q.count > 0 ? *q.count : 1, count_k = *k.count > 0 ? *k.count : 1, within = 0;
    for (long i = 0; i < width && *k.count > 1; i++) { /* the scores of one key do not vary */
        float *cq = q.covariance + i * row, *ck = k.covariance + i * row;
        float mean = q.mean[i] * inverse_q, diagonal_q = cq[i], diagonal_k = ck[i];
        vf sum = broadcast(0.f);
        for (long j = i / LANES * LANES; j <= i; j++) cq[j] = ck[j] = 0.f; /* the diagonal is added below, once */
        for (long j = i / LANES * LANES; j < vector; j += LANES) {
            vf x = load(ck + j) * (float)(1 / count_k) * inverse_k * inverse_k;
            vf y = load(cq + j) * (float)(1 / count_q) * inverse_q * inverse_q;
            sum += x * (y + mean * (load(q.mean + j) * inverse_q));
        }
        float x = diagonal_k * (float)(1 / count_k) * inverse_k * inverse_k;
        float y = diagonal_q * (float)(1 / count_q) * inverse_q * inverse_q;
        within += 2.0 * total_of(sum) + x * (y + mean * mean);
    }
    double product = unit_q * unit_k > LARGEST_ENTRY ? LARGEST_ENTRY : unit_q * unit_k;
    double variance = (within < 0 ? 0 : within) * product * product / width + nan_marker;
    double spread = matched_spread(job, variance, *k.count);
    double share = sqrt(spread / 2);
    if (alpha) *alpha = divided(share, sigma_q + nan_marker);
    if (beta) *beta = divided(share, sigma_k + nan_marker);
}
