/* Softmax attention inside blocks of kept tokens: LLN's companion for what is near. */
#ifndef LLN_NEAR_H
#define LLN_NEAR_H

#include <math.h>

#include "job.h"

/* The block that is at hand: its keys transposed and its values, and the weights of a tile of queries. */
typedef struct {
    long stop; /* the place after its last token; 0: none yet */
    float *keys_T, *weights, *spare;
    Rows values;
    uint8_t *odd; /* causal: which values are not finite */
    int any_odd;
} Near;

INLINE long near_size(const Job *job) { return at_most(job->block_size, job->keys); }

static Near near_begin(const Job *job, Scratch *scratch) {
    Near near = {0};
    if (!job->block_size) return near;
    long row = row_of(near_size(job));
    near.keys_T = take(scratch, job->width * row);
    near.spare = take(scratch, near_size(job) * row_of(job->value_width));
    near.weights = take(scratch, TILE * row);
    near.odd = (uint8_t *)take(scratch, near_size(job) / (long)sizeof(float) + 1);
    return near;
}

/* Rows of softmax(scores / sqrt(D)) times `weight`, in place; row r sees `seen`, or with `step` 1 `seen + r` keys. */
static void near_softmax(long rows, long keys, long seen, long step, float scale, float weight, float *scores,
                         long row) {
    long vector = padded(keys);
    for (long r = 0; r < rows; r++, scores += row) {
        long limit = step ? seen + r : seen, stop = padded(limit);
        for (long j = limit; j < vector; j++) scores[j] = ABSENT;
        vf most = same(ABSENT), sum = same(0.f);
        for (long j = 0; j < stop; j += LANES) most = larger(most, load(scores + j));
        float top = largest_of(most);
        for (long j = 0; j < stop; j += LANES) {
            vf e = exponential((load(scores + j) - top) * scale);
            store(scores + j, e);
            sum += e;
        }
        float share = weight / total_of(sum);
        for (long j = 0; j < stop; j += LANES) store(scores + j, load(scores + j) * share);
        for (long j = stop; j < vector; j += LANES) store(scores + j, same(0.f));
    }
}

/* output = weight times the attention of the queries at places first ... end. */
static void near_attend(const Plan *plan, long b, long h, long first, long end, Rows queries, float weight, Rows output,
                        Near *near, Scratch scratch) {
    const Job *job = plan->job;
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
            near->any_odd = 0;
            for (long j = 0; job->is_causal && j < keys; j++)
                near->any_odd |= near->odd[j] = not_finite(near->values.data + j * near->values.row, padded(job->value_width));
            near->stop = stop;
        }
        if (near->any_odd) /* a later value weighs 0, yet 0 times NaN is NaN: go no further than the next one */
            for (long r = 1; r < rows; r++)
                if (near->odd[first - start + r]) rows = r;
        multiply(rows, padded(keys), job->width, queries.data, queries.row, near->keys_T, row, near->weights, row, 0);
        long seen = job->is_causal ? first - start + 1 : keys, depth = job->is_causal ? seen + rows - 1 : keys;
        near_softmax(rows, keys, seen, job->is_causal, 1.f / sqrtf(job->width), weight, near->weights, row);
        multiply(rows, padded(job->value_width), depth, near->weights, row, near->values.data, near->values.row,
                 output.data, output.row, 0);
        first += rows;
        queries.data += rows * queries.row;
        output.data += rows * output.row;
    }
}

/* Write rows, or add them to what is there. */
static void give(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                 float *rows, long row, int add, float *spare) {
    if (add) {
        read_tile(type, head, stride, order, first, count, width, spare, row);
        for (long r = 0; r < count; r++)
            for (long i = 0; i < padded(width); i += LANES)
                store(rows + r * row + i, load(rows + r * row + i) + load(spare + r * row + i));
    }
    write_tile(type, head, stride, order, first, count, width, rows, row);
}

/* Gradients of the blocks at places first ... end of a key head, for all of its query heads; `add`: to what is there.
   */
static void near_backward(const Plan *plan, long b, long key_head, long first, long end, float weight, int add,
                          Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, groups = job->heads / job->key_heads;
    long size = near_size(job), row = row_of(size), q_row = row_of(D), v_row = row_of(V), most = at_least(q_row, v_row);
    const int32_t *order = plan->key_order ? plan->key_order + b * job->keys : NULL;
    float scale = 1.f / sqrtf(D);
    float *keys = take(&scratch, size * q_row), *values = take(&scratch, size * v_row);
    float *keys_T = take(&scratch, D * row), *values_T = take(&scratch, V * row);
    float *grad_keys = take(&scratch, size * q_row), *grad_values = take(&scratch, size * v_row);
    float *queries = take(&scratch, TILE * q_row), *grads = take(&scratch, TILE * v_row);
    float *grad_queries = take(&scratch, TILE * q_row), *spare = take(&scratch, TILE * most);
    float *weights = take(&scratch, TILE * row), *grad_weights = take(&scratch, TILE * row);
    for (long start = first; start < end; start += job->block_size) {
        long count = at_most(job->block_size, end - start);
        Rows k = view(type, head_of(&job->key, type, b, key_head), job->key.token, order, start, count, D, keys);
        Rows v = view(type, head_of(&job->value, type, b, key_head), job->value.token, order, start, count, V, values);
        transpose(count, D, padded(count), k.data, k.row, keys_T, row);
        transpose(count, V, padded(count), v.data, v.row, values_T, row);
        memset(grad_keys, 0, count * q_row * sizeof(float));
        memset(grad_values, 0, count * v_row * sizeof(float));
        for (long h = key_head * groups; h < (key_head + 1) * groups; h++) {
            for (long from = start; from < start + count; from += TILE) {
                long rows = at_most(TILE, start + count - from), seen = job->is_causal ? from - start + 1 : count;
                Rows q = view(type, head_of(&job->query, type, b, h), job->query.token, order, from, rows, D, queries);
                Rows g = view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, order, from, rows,
                              V, grads);
                multiply(rows, padded(count), D, q.data, q.row, keys_T, row, weights, row, 0);
                near_softmax(rows, count, seen, job->is_causal, scale, weight, weights, row);
                multiply(rows, padded(count), V, g.data, g.row, values_T, row, grad_weights, row, 0);
                multiply_transposed(count, padded(V), rows, weights, row, g.data, g.row, grad_values, v_row, 1);
                for (long r = 0; r < rows; r++) {
                    float *p = weights + r * row, *d = grad_weights + r * row;
                    vf sum = same(0.f);
                    for (long j = 0; j < padded(count); j += LANES) sum += load(p + j) * load(d + j);
                    float mean = total_of(sum) / weight;
                    for (long j = 0; j < padded(count); j += LANES)
                        store(d + j, load(p + j) * (load(d + j) - mean) * scale);
                }
                multiply_transposed(count, padded(D), rows, grad_weights, row, q.data, q.row, grad_keys, q_row, 1);
                multiply(rows, padded(D), count, grad_weights, row, k.data, k.row, grad_queries, q_row, 0);
                give(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, order, from, rows, D,
                     grad_queries, q_row, add, spare);
            }
        }
        for (long from = 0; from < count; from += TILE) {
            long rows = at_most(TILE, count - from);
            give(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order, start + from, rows, D,
                 grad_keys + from * q_row, q_row, add, spare);
            give(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order, start + from, rows,
                 V, grad_values + from * v_row, v_row, add, spare);
        }
    }
}

#endif
