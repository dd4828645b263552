#include "near.h"

#include <math.h>
#include <stdint.h>

Near near_begin(const Job *job, Scratch *scratch) {
    Near near = {0};
    if (!job->block_size) return near;
    if (job->is_window) {
        near.keys = take(scratch, near_size(job) * row_of(job->width));
        near.spare = take(scratch, near_size(job) * row_of(job->value_width));
        near.queries_T = take(scratch, job->width * STRIP_ROW);
        near.weights = take(scratch, near_size(job) * STRIP_ROW);
        return near;
    }
    long row = row_of(near_size(job));
    near.keys_T = take(scratch, job->width * row);
    near.spare = take(scratch, near_size(job) * row_of(job->value_width));
    near.weights = take(scratch, TILE * row);
    near.nonfinite = (uint8_t *)take(scratch, near_size(job) / (long)sizeof(float) + 1);
    return near;
}

void near_softmax(long rows, long keys, long seen, long step, float scale, float weight, float *scores, long row,
                  float *lse) {
    long vector = padded(keys);
    for (long r = 0; r < rows; r++, scores += row) {
        long limit = step ? seen + r : seen, stop = padded(limit);
        for (long j = limit; j < vector; j++) scores[j] = MASKED;
        vf maximum = broadcast(MASKED), sum = broadcast(0.f);
        for (long j = 0; j < stop; j += LANES) maximum = larger(maximum, load(scores + j));
        float top = largest_of(maximum);
        for (long j = 0; j < stop; j += LANES) {
            vf e = exponential((load(scores + j) - top) * scale);
            store(scores + j, e);
            sum += e;
        }
        /* all scores that count are -inf: 0 times infinity makes the row NaN, as in softmax */
        float total = top == MASKED ? 0.f : total_of(sum), share = weight / total;
        if (lse) lse[r] = top * scale + logf(total);
        for (long j = 0; j < stop; j += LANES) store(scores + j, load(scores + j) * share);
        for (long j = stop; j < vector; j += LANES) store(scores + j, broadcast(0.f));
    }
}

/* All bits set in the lanes first ... end of a row, of which this is vector `v`. */
INLINE vi lanes_between(int v, long first, long end) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = v * LANES + i;
    return (lane >= (int)at_most(at_least(first, 0), STRIP)) & (lane < (int)at_most(at_least(end, 0), STRIP));
}

/* Columns of softmax(scores / sqrt(D)) times `weight`, in place. There is a row for each key and a column for each
   query; row j counts for the columns first + j ... end + j and is 0 elsewhere, whatever the scores are there. `lse`
   (or NULL) gets the log-sum-exp of each column. */
INLINE void softmax_columns(const int vectors, long keys, long first, long end, float scale, float weight,
                            float *scores, float *lse) {
    vf top[2], sum[2], share[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) {
        top[v] = broadcast(MASKED);
        sum[v] = broadcast(0.f);
    }
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            vi seen = lanes_between(v, first + j, end + j);
            vf x = load(scores + j * STRIP_ROW + v * LANES);
            top[v] = larger(top[v], (vf)(((vi)x & seen) | ((vi)broadcast(MASKED) & ~seen)));
        }
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            float *at = scores + j * STRIP_ROW + v * LANES;
            vf e = (vf)((vi)exponential((load(at) - top[v]) * scale) & lanes_between(v, first + j, end + j));
            store(at, e);
            sum[v] += e;
        }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) share[v] = weight / sum[v];
    for (int i = 0; lse && i < vectors * LANES; i++)
        lse[i] = top[i / LANES][i % LANES] * scale + logf(sum[i / LANES][i % LANES]);
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            float *at = scores + j * STRIP_ROW + v * LANES;
            store(at, load(at) * share[v]);
        }
}

void window_weights(const Job *job, Window window, long first, long rows, Rows keys, Rows queries, float weight,
                    float *queries_T, float *weights, float *lse) {
    long from = window.first - first, count = window.end - window.first;
    long begin = from - window_after(job), end = from + window_before(job) + 1;
    float scale = 1.f / sqrtf(job->width);
    transpose(rows, job->width, padded(rows), queries.data, queries.row, queries_T, STRIP_ROW);
    multiply(count, padded(rows), job->width, keys.data, keys.row, queries_T, STRIP_ROW, weights, STRIP_ROW, 0);
    if (rows > LANES) softmax_columns(2, count, begin, end, scale, weight, weights, lse);
    else softmax_columns(1, count, begin, end, scale, weight, weights, lse);
}

/* `near_attend` with a window around each token, for at most a tile of queries. */
static void window_attend(const Plan *plan, long b, long h, long first, long end, Rows queries, float weight,
                          Rows output, float *lse, Near *near) {
    const Job *job = plan->job;
    long type = job->type, V = job->value_width, group = h / (job->heads / job->key_heads);
    const int32_t *order = plan->key_order ? plan->key_order + b * job->keys : NULL;
    Window all = window_of(plan, b, first, end);
    long count = all.end - all.first;
    Rows k =
        view(type, head_of(&job->key, type, b, group), job->key.token, order, all.first, count, job->width, near->keys);
    Rows v =
        view(type, head_of(&job->value, type, b, group), job->value.token, order, all.first, count, V, near->spare);
    /* a key outside the window of a query has a weight of 0, yet 0 times NaN is NaN: a single query has no such keys */
    long step = any_not_finite(count, v, padded(V)) ? 1 : STRIP;
    for (long from = first; from < end; from += step) {
        long rows = at_most(step, end - from);
        Window window = window_of(plan, b, from, from + rows);
        Rows values = rows_from(v, window.first - all.first), out = rows_from(output, from - first);
        float sums[STRIP];
        window_weights(job, window, from, rows, rows_from(k, window.first - all.first),
                       rows_from(queries, from - first), weight, near->queries_T, near->weights, lse ? sums : NULL);
        for (long r = 0; lse && r < rows; r++) lse[from - first + r] = sums[r];
        multiply_transposed(rows, padded(V), window.end - window.first, near->weights, STRIP_ROW, values.data,
                            values.row, out.data, out.row, 0);
    }
}

void near_attend(const Plan *plan, long b, long h, long first, long end, Rows queries, float weight, Rows output,
                 float *lse, Near *near, Scratch scratch) {
    const Job *job = plan->job;
    if (job->is_window) {
        if (first < end) window_attend(plan, b, h, first, end, queries, weight, output, lse, near);
        return;
    }
    long group = h / (job->heads / job->key_heads), size = near_size(job), row = row_of(size);
    const int32_t *order = plan->key_order ? plan->key_order + b * job->keys : NULL;
    while (first < end) {
        long start = first / job->block_size * job->block_size, stop = at_most(start + size, plan->key_count[b]);
        long keys = stop - start, rows = at_most(end, stop) - first;
        if (near->stop != stop) {
            Scratch local = scratch;
            Rows k = view(job->type, head_of(&job->key, job->type, b, group), job->key.token, order, start, keys,
                          job->width, take(&local, size * row_of(job->width)));
            transpose(keys, job->width, padded(keys), k.data, k.row, near->keys_T, row);
            near->values = view(job->type, head_of(&job->value, job->type, b, group), job->value.token, order, start,
                                keys, job->value_width, near->spare);
            near->any_nonfinite = 0;
            for (long j = 0; job->is_causal && j < keys; j++)
                near->any_nonfinite |= near->nonfinite[j] =
                    not_finite(near->values.data + j * near->values.row, padded(job->value_width));
            near->stop = stop;
        }
        if (near->any_nonfinite) /* a later value weighs 0, yet 0 times NaN is NaN: go no further than the next one */
            for (long r = 1; r < rows; r++)
                if (near->nonfinite[first - start + r]) rows = r;
        multiply(rows, padded(keys), job->width, queries.data, queries.row, near->keys_T, row, near->weights, row, 0);
        long seen = job->is_causal ? first - start + 1 : keys, depth = job->is_causal ? seen + rows - 1 : keys;
        near_softmax(rows, keys, seen, job->is_causal, 1.f / sqrtf(job->width), weight, near->weights, row, lse);
        multiply(rows, padded(job->value_width), depth, near->weights, row, near->values.data, near->values.row,
                 output.data, output.row, 0);
        first += rows;
        if (lse) lse += rows;
        queries.data += rows * queries.row;
        output.data += rows * output.row;
    }
}
