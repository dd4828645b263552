#include "step.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "threads.h"
#include "tile.h"

void renew_recent(const Advance *a, long b, long group, const int32_t *order, long first, long end) {
    const Job *job = &a->job;
    long C = job->block_size, bytes = bytes_of(job->type), head = b * job->key_heads + group;
    const Tensor *tokens[2] = {&a->near_key, &job->value};
    const void *before[2] = {a->before.recent_key, a->before.recent_value};
    void *after[2] = {a->after.recent_key, a->after.recent_value};
    for (int i = 0; i < 2; i++) {
        long row = (i ? job->value_width : a->near_width) * bytes;
        char *to = (char *)after[i] + head * C * row;
        if (before[i] != after[i]) memcpy(to, (const char *)before[i] + head * C * row, C * row);
        const char *from = head_of(tokens[i], job->type, b, group);
        for (long place = at_least(first, end - C); place < end; place++)
            memcpy(to + (a->before.count[b] + place) % C * row,
                   from + token_at(order, place) * tokens[i]->token * bytes, row);
    }
}

/* `vectors` columns of S: S = S (1 - share) + share v, and out = sum over features of weight S. */
INLINE void step_columns(const int vectors, long D, long V, const float *before, float *after, const float *share,
                         const float *weight, const float *value, float *out) {
    v8 v[4], sum[4];
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) {
        v[c] = *(const v8 *)(value + 8 * c);
        sum[c] = (v8){0};
    }
    for (long i = 0; i < D; i++) {
        float old = 1.f - share[i], new = share[i], w = weight[i];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) {
            v8 s = *(const v8 *)(before + i * V + 8 * c) * old + v[c] * new;
            *(v8 *)(after + i * V + 8 * c) = s;
            sum[c] += s * w;
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < vectors; c++) *(v8 *)(out + 8 * c) = sum[c];
}

/* exp(x - the largest) for `vector` floats, a multiple of LANES, in place; returns the sum and the largest. */
INLINE float weigh_row(float *row, long vector, float *largest) {
    vf maximum = broadcast(2.f * MASKED), sum = broadcast(0.f);
    for (long i = 0; i < vector; i += LANES) maximum = larger(maximum, load(row + i));
    float top = *largest = largest_of(maximum);
    for (long i = 0; i < vector; i += LANES) {
        vf e = exponential(load(row + i) - top);
        store(row + i, e);
        sum += e;
    }
    return total_of(sum);
}

/* The sum over features of exp(beta (k - top)) for a row that is padded, and the largest feature. */
INLINE float feature_sum(long D, const float *key, float beta, float *top) {
    float row[MAX_WIDTH];
    long vector = padded(D);
    *top = key[0];
    for (long i = 1; i < D; i++) *top = key[i] > *top ? key[i] : *top;
    for (long i = 0; i < vector; i += LANES) store(row + i, exponential((load(key + i) - *top) * beta));
    for (long i = D; i < vector; i++) row[i] = 0.f;
    vf sum = broadcast(0.f);
    for (long i = 0; i < vector; i += LANES) sum += load(row + i);
    return total_of(sum);
}

/* L = log(exp(L) + exp(b)) in place, and the share that the key has of it, where b = beta k + weight, in the unbiased
   form less the log of the sum of exp(beta k). There the largest feature is taken off both, so that they are small. */
INLINE void step_mass(const Job *job, const float *key, float beta, float weight, float *mass, float *share) {
    float total[MAX_WIDTH], top = 0.f;
    long D = job->width, vector = padded(D);
    if (not_finite(key, vector) || weight * 0.f != 0.f) beta = NAN; /* a key of -inf would weigh nothing */
    if (has_form(job)) weight -= logf(feature_sum(D, key, beta, &top));
    for (long i = 0; i < vector; i += LANES) {
        vf b = (load(key + i) - top) * beta + weight, old = load(mass + i), maximum = larger(b, old);
        vf new = exponential(b - maximum), sum = new + exponential(old - maximum);
        store(share + i, new / sum);
        store(total + i, sum);
        store(mass + i, maximum);
    }
    for (long i = 0; i < D; i++) mass[i] += logf(total[i]);
}

INLINE const float *recent_row(const void *head, long type, long place, long width, float *spare) {
    if (type == FLOAT32) return (const float *)head + place * width;
    read_tile(type, head, width, NULL, place, 1, width, spare, 0);
    return spare;
}

/* Softmax attention of a token to its block or window: its own key and value, whose place is `here`, and those at the
   places before it, or at all others if a window is filled. */
static void step_near(const Advance *a, long b, long group, const float *query, const float *key, const float *value,
                      float *out, float *lse) {
    const Job *job = &a->job;
    long D = a->near_width, V = job->value_width, C = job->block_size, head = b * job->key_heads + group;
    long here = a->before.count[b] % C, seen = job->is_window && a->before.count[b] >= C ? C : here + 1;
    const char *keys = (const char *)a->before.recent_key + head * C * D * bytes_of(job->type);
    const char *values = (const char *)a->before.recent_value + head * C * V * bytes_of(job->type);
    float weights[MAX_BLOCK], spare[MAX_WIDTH], scale = 1.f / sqrtf(D), top;
    for (long j = 0; j < seen; j++) {
        const float *k = j == here ? key : recent_row(keys, job->type, j, D, spare);
        v8 sum = {0};
        for (long i = 0; i < D; i += 8) sum += *(const v8 *)(query + i) * *(const v8 *)(k + i);
        weights[j] = (sum[0] + sum[4] + (sum[1] + sum[5]) + (sum[2] + sum[6] + (sum[3] + sum[7]))) * scale;
    }
    for (long j = seen; j < padded(seen); j++) weights[j] = MASKED;
    float total = weigh_row(weights, padded(seen), &top), share = 1.f / total;
    *lse = top + logf(total);
    memset(out, 0, V * sizeof(float));
    for (long j = 0; j < seen; j++) {
        const float *v = j == here ? value : recent_row(values, job->type, j, V, spare);
        for (long i = 0; i < V; i += 8) *(v8 *)(out + i) += *(const v8 *)(v + i) * (weights[j] * share);
    }
}

/* dq and dk of the decomposed form in place of q and k; returns m_q . dk / sqrt(D). */
static float center_token(const Job *job, long b, long h, float *query, float *key) {
    const float *center_query = (const float *)head_of(&job->center_query, FLOAT32, b, h);
    const float *center_key = (const float *)head_of(&job->center_key, FLOAT32, b, h / (job->heads / job->key_heads));
    v8 dot = {0};
    for (long i = 0; i < job->width; i += 8) {
        v8 center = *(const v8 *)(center_query + i), apart = *(v8 *)(key + i) - *(const v8 *)(center_key + i);
        dot += center * apart;
        *(v8 *)(query + i) -= center;
        *(v8 *)(key + i) = apart;
    }
    return (dot[0] + dot[4] + (dot[1] + dot[5]) + (dot[2] + dot[6] + (dot[3] + dot[7]))) / sqrtf(job->width);
}

/* One token of a head. */
static void step_head(const Advance *a, long b, long h) {
    const Job *job = &a->job;
    long type = job->type, D = job->width, V = job->value_width, head = b * job->heads + h, vector = padded(D);
    long groups = job->heads / job->key_heads, group = h / groups;
    int kept = !job->keep_key || job->keep_key[b];
    float q[MAX_WIDTH], k[MAX_WIDTH], v[MAX_WIDTH], mass[MAX_WIDTH], share[MAX_WIDTH] = {0}, weight[MAX_WIDTH];
    float far[MAX_WIDTH], near[MAX_WIDTH] = {0}, alpha, beta, top, lse = 0.f;
    read_tile(a->far_type, head_of(&job->query, a->far_type, b, h), 0, NULL, 0, 1, D, q, 0);
    read_tile(a->far_type, head_of(&job->key, a->far_type, b, group), 0, NULL, 0, 1, D, k, 0);
    read_tile(type, head_of(&job->value, type, b, group), 0, NULL, 0, 1, V, v, 0);
    int nonfinite = not_finite(q, vector);
    if (!kept) { /* whatever it holds leaves no trace */
        memset(v, 0, sizeof(v));
        if (nonfinite) memset(q, 0, sizeof(q));
    }
    float column = job->form == DECOMPOSED ? center_token(job, b, h, q, k) : 0.f;
    PrefixSums sums = read_sums(a, b, h);
    if (kept) {
        sums.count += 1;
        add_entries(q, D, sums.query);
        add_entries(k, D, sums.key);
    }
    write_sums(a, b, h, &sums);
    if (job->match_alpha || job->match_beta) match_sums(job, &sums, &alpha, &beta);
    if (!job->match_alpha) alpha = scale_of(&job->alpha, b, h, 0);
    if (!job->match_beta) beta = scale_of(&job->beta, b, h, 0);
    if (nonfinite && kept) alpha = NAN; /* an entry of -inf would weigh nothing */

    memcpy(mass, a->before.mass + head * D, D * sizeof(float));
    for (long i = D; i < vector; i++) mass[i] = MASKED;
    if (job->key_weight.data) column += scale_of(&job->key_weight, b, h, 0);
    if (kept) step_mass(job, k, beta, column, mass, share);
    memcpy(a->after.mass + head * D, mass, D * sizeof(float));
    for (long i = 0; i < vector; i += LANES) store(weight + i, load(q + i) * alpha + load(mass + i));
    for (long i = D; i < vector; i++) weight[i] = 2.f * MASKED;
    float inverse = 1.f / weigh_row(weight, vector, &top);
    for (long i = 0; i < vector; i += LANES) store(weight + i, load(weight + i) * inverse);
    const float *before = a->before.values + head * D * V;
    float *after = a->after.values + head * D * V;
    long j = 0;
    for (; j + 32 <= V; j += 32) step_columns(4, D, V, before + j, after + j, share, weight, v + j, far + j);
    for (; j < V; j += 8) step_columns(1, D, V, before + j, after + j, share, weight, v + j, far + j);

    if (job->block_size) {
        if (kept) {
            read_tile(type, head_of(&a->near_query, type, b, h), 0, NULL, 0, 1, a->near_width, q, 0);
            read_tile(type, head_of(&a->near_key, type, b, group), 0, NULL, 0, 1, a->near_width, k, 0);
            step_near(a, b, group, q, k, v, near, &lse);
        }
        if (job->near_lse) job->near_lse[head] = lse;
        if (h % groups == 0) renew_recent(a, b, group, NULL, 0, kept); /* the place of the new token is not read */
        if (!a->near.data)
            for (long i = 0; i < V; i += 8) *(v8 *)(far + i) = (*(v8 *)(far + i) + *(v8 *)(near + i)) * 0.5f;
        else write_tile(a->output_type, head_of(&a->near, a->output_type, b, h), 0, NULL, 0, 1, V, near, 0);
    }
    write_tile(a->output_type, head_of(&job->output, a->output_type, b, h), 0, NULL, 0, 1, V, far, 0);
}

/* Counts come last: until then every head reads how many tokens there were. */
static void step_counts(const Advance *a) {
    for (long b = 0; b < a->job.batch; b++)
        a->after.count[b] = a->before.count[b] + (!a->job.keep_key || a->job.keep_key[b]);
}

void step_all(const Advance *a) {
    for (long i = 0; i < a->job.batch * a->job.heads; i++) step_head(a, i / a->job.heads, i % a->job.heads);
    step_counts(a);
}

void step_heads(Plan *plan, long thread, long threads, Scratch *scratch) {
    const Advance *a = (const Advance *)plan->job;
    (void)scratch;
    EACH(i, thread, threads, a->job.batch * a->job.heads) step_head(a, i / a->job.heads, i % a->job.heads);
    wait_for_all(threads);
    if (thread == 0) step_counts(a);
}
