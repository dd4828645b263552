/* Gradients of softmax attention inside blocks or windows. */
#include "near.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

/* Gradients of keys or of values that are summed over the queries that attend to them: in the result where that is made
   of rows of floats, or else in scratch rows for the places base ... top. */
typedef struct {
    const Tensor *tensor;
    long width, base, top;
    Rows rows;
    int direct;
} Sums;

static Sums sums_begin(const Job *job, const Tensor *tensor, long b, long key_head, const int32_t *order, long first,
                       long end, long width, int add, Scratch *scratch) {
    Sums sums = {tensor, width, 0, 0, {0}, is_direct(job->type, order, width)};
    if (!sums.direct) {
        sums.rows = (Rows){take(scratch, near_size(job) * row_of(width)), row_of(width)};
        return sums;
    }
    sums.rows = (Rows){(float *)head_of(tensor, job->type, b, key_head), tensor->token};
    for (long p = first; !add && p < end; p++) memset(sums.rows.data + p * sums.rows.row, 0, width * sizeof(float));
    return sums;
}

/* Make `from` ... `to` the places that are summed. Sums of places before `from` are complete, and are written if they
   lie between `first` and `end`. */
static void sums_move(const Job *job, Sums *sums, long b, long key_head, const int32_t *order, long first, long end,
                      long from, long to, int add, float *spare) {
    if (sums->direct) return;
    long row = sums->rows.row, done = at_most(from, sums->top), last = at_most(done, end);
    for (long p = at_least(sums->base, first); p < last; p += TILE)
        store_or_add_rows(job->type, head_of(sums->tensor, job->type, b, key_head), sums->tensor->token, order, p,
                          at_most(TILE, last - p), sums->width, sums->rows.data + (p - sums->base) * row, row, add,
                          spare);
    memmove(sums->rows.data, sums->rows.data + (done - sums->base) * row, (sums->top - done) * row * sizeof(float));
    long kept = sums->top - done;
    memset(sums->rows.data + kept * row, 0, (to - from - kept) * row * sizeof(float));
    sums->base = from;
    sums->top = to;
}

/* Add wᵀ times the rows of some queries to the sums of the keys of a window that lie between `first` and `end`. */
static void sums_add(Sums *sums, Window window, long first, long end, const float *weights, long depth, Rows rows) {
    long from = at_least(window.first, first), to = at_most(window.end, end);
    if (from >= to) return;
    multiply(to - from, padded(sums->width), depth, weights + (from - window.first) * STRIP_ROW, STRIP_ROW, rows.data,
             rows.row, sums->rows.data + (from - sums->base) * sums->rows.row, sums->rows.row, 1);
}

/* Gradients of log-sum-exp of some queries, zeros where there are none. */
static void read_lse_gradients(const Job *job, long b, long h, const int32_t *order, long first, long count,
                               float *to) {
    const float *from = lse_of(job, job->grad_lse, b, h);
    for (long r = 0; r < count; r++) to[r] = from ? from[token_at(order, first + r)] : 0.f;
}

/* Gradients of weighted means of columns and of log-sum-exp, in place of those of their weights: p (d - mean of d +
   that of the log-sum-exp) times `scale`. The mean is taken off in two steps, the second of what the first has left:
   dq of a key that is large and has nearly all weight is its product with a small difference. */
INLINE void softmax_columns_backward(const int vectors, long keys, float scale, float weight, const float *of_lse,
                                     const float *p, float *d) {
    vf mean[2], rest[2];
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) mean[v] = rest[v] = broadcast(0.f);
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++)
            mean[v] += load(p + j * STRIP_ROW + v * LANES) * load(d + j * STRIP_ROW + v * LANES);
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) mean[v] /= weight;
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            long at = j * STRIP_ROW + v * LANES;
            vf apart = load(d + at) - mean[v];
            rest[v] += load(p + at) * apart;
            store(d + at, apart);
        }
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v++) rest[v] = rest[v] / weight - load(of_lse + v * LANES);
    for (long j = 0; j < keys; j++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            long at = j * STRIP_ROW + v * LANES;
            store(d + at, load(p + at) * (load(d + at) - rest[v]) * scale);
        }
}

/* `near_backward` with a window around each token. Only the gradients at places first ... end are written. Queries just
   before and after attend to some of these keys as well, so their weights are computed here, too: once more than in the
   chunk that they belong to, but no chunk adds to what another one writes. */
static void window_backward(const Plan *plan, long b, long key_head, long first, long end, float weight, int add,
                            Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, groups = job->heads / job->key_heads;
    long size = near_size(job), q_row = row_of(D), v_row = row_of(V);
    const int32_t *order = plan->key_order ? plan->key_order + b * job->keys : NULL;
    float scale = 1.f / sqrtf(D);
    float *keys = take(&scratch, size * q_row), *values = take(&scratch, size * v_row);
    float *queries = take(&scratch, TILE * q_row), *grads = take(&scratch, TILE * v_row);
    float *queries_T = take(&scratch, D * STRIP_ROW), *grads_T = take(&scratch, V * STRIP_ROW);
    float *weights = take(&scratch, size * STRIP_ROW), *grad_weights = take(&scratch, size * STRIP_ROW);
    float *grad_queries = take(&scratch, STRIP * q_row), *spare = take(&scratch, TILE * at_least(q_row, v_row));
    float of_lse[TILE + STRIP] = {0};
    if (first >= end) return;
    Sums to_keys = sums_begin(job, &job->grad_key, b, key_head, order, first, end, D, add, &scratch);
    Sums to_values = sums_begin(job, &job->grad_value, b, key_head, order, first, end, V, add, &scratch);
    long last = at_most(end + window_before(job), plan->key_count[b]);
    for (long tile = at_least(first - window_after(job), 0); tile < last; tile += TILE) {
        long stop = at_most(tile + TILE, last);
        Window all = window_of(plan, b, tile, stop);
        long count = all.end - all.first;
        Rows k = view(type, head_of(&job->key, type, b, key_head), job->key.token, order, all.first, count, D, keys);
        Rows v =
            view(type, head_of(&job->value, type, b, key_head), job->value.token, order, all.first, count, V, values);
        int nonfinite = any_not_finite(count, k, padded(D)) | any_not_finite(count, v, padded(V));
        sums_move(job, &to_keys, b, key_head, order, first, end, all.first, all.end, add, spare);
        sums_move(job, &to_values, b, key_head, order, first, end, all.first, all.end, add, spare);
        for (long h = key_head * groups; h < (key_head + 1) * groups; h++) {
            Rows q =
                view(type, head_of(&job->query, type, b, h), job->query.token, order, tile, stop - tile, D, queries);
            Rows g = view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, order, tile,
                          stop - tile, V, grads);
            read_lse_gradients(job, b, h, order, tile, stop - tile, of_lse);
            char *to = head_of(&job->grad_query, type, b, h);
            int direct = is_direct(type, order, D);
            /* a single query where something is not finite: as in `window_attend` */
            long step = nonfinite || any_not_finite(stop - tile, q, padded(D)) ||
                                any_not_finite(stop - tile, g, padded(V))
                            ? 1
                            : STRIP;
            for (long from = tile; from < stop; from += step) {
                long rows = at_most(step, stop - from);
                Window window = window_of(plan, b, from, from + rows);
                long seen = window.end - window.first;
                Rows key = rows_from(k, window.first - all.first), value = rows_from(v, window.first - all.first);
                Rows query = rows_from(q, from - tile), grad = rows_from(g, from - tile);
                window_weights(job, window, from, rows, key, query, weight, queries_T, weights, NULL);
                transpose(rows, V, padded(rows), grad.data, grad.row, grads_T, STRIP_ROW);
                multiply(seen, padded(rows), V, value.data, value.row, grads_T, STRIP_ROW, grad_weights, STRIP_ROW, 0);
                const float *own_lse = of_lse + (from - tile);
                if (rows > LANES) softmax_columns_backward(2, seen, scale, weight, own_lse, weights, grad_weights);
                else softmax_columns_backward(1, seen, scale, weight, own_lse, weights, grad_weights);
                sums_add(&to_values, window, first, end, weights, rows, grad);
                sums_add(&to_keys, window, first, end, grad_weights, rows, query);
                long own = at_least(from, first), others = at_most(from + rows, end);
                if (own >= others) continue;
                Rows out = {grad_queries, q_row};
                if (direct) out = (Rows){(float *)to + own * job->grad_query.token, job->grad_query.token};
                multiply_transposed(others - own, padded(D), seen, grad_weights + own - from, STRIP_ROW, key.data,
                                    key.row, out.data, out.row, direct && add);
                if (!direct)
                    store_or_add_rows(type, to, job->grad_query.token, order, own, others - own, D, out.data, q_row,
                                      add, spare);
            }
        }
    }
    sums_move(job, &to_keys, b, key_head, order, first, end, to_keys.top, to_keys.top, add, spare);
    sums_move(job, &to_values, b, key_head, order, first, end, to_values.top, to_values.top, add, spare);
}

void near_backward(const Plan *plan, long b, long key_head, long first, long end, float weight, int add,
                   Scratch scratch) {
    const Job *job = plan->job;
    if (job->is_window) {
        window_backward(plan, b, key_head, first, end, weight, add, scratch);
        return;
    }
    long type = job->type, D = job->width, V = job->value_width, groups = job->heads / job->key_heads;
    long size = near_size(job), row = row_of(size), q_row = row_of(D), v_row = row_of(V),
         maximum = at_least(q_row, v_row);
    const int32_t *order = plan->key_order ? plan->key_order + b * job->keys : NULL;
    float scale = 1.f / sqrtf(D);
    float *keys = take(&scratch, size * q_row), *values = take(&scratch, size * v_row);
    float *keys_T = take(&scratch, D * row), *values_T = take(&scratch, V * row);
    float *grad_keys = take(&scratch, size * q_row), *grad_values = take(&scratch, size * v_row);
    float *queries = take(&scratch, TILE * q_row), *grads = take(&scratch, TILE * v_row);
    float *grad_queries = take(&scratch, TILE * q_row), *spare = take(&scratch, TILE * maximum);
    float *weights = take(&scratch, TILE * row), *grad_weights = take(&scratch, TILE * row), of_lse[TILE];
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
                near_softmax(rows, count, seen, job->is_causal, scale, weight, weights, row, NULL);
                read_lse_gradients(job, b, h, order, from, rows, of_lse);
                multiply(rows, padded(count), V, g.data, g.row, values_T, row, grad_weights, row, 0);
                multiply_transposed(count, padded(V), rows, weights, row, g.data, g.row, grad_values, v_row, 1);
                for (long r = 0; r < rows; r++) {
                    float *p = weights + r * row, *d = grad_weights + r * row;
                    vf sum = broadcast(0.f), rest = broadcast(0.f);
                    for (long j = 0; j < padded(count); j += LANES) sum += load(p + j) * load(d + j);
                    float mean = total_of(sum) / weight; /* taken off in two steps, as above */
                    for (long j = 0; j < padded(count); j += LANES) {
                        vf apart = load(d + j) - mean;
                        rest += load(p + j) * apart;
                        store(d + j, apart);
                    }
                    float left = total_of(rest) / weight - of_lse[r];
                    for (long j = 0; j < padded(count); j += LANES)
                        store(d + j, load(p + j) * (load(d + j) - left) * scale);
                }
                multiply_transposed(count, padded(D), rows, grad_weights, row, q.data, q.row, grad_keys, q_row, 1);
                multiply(rows, padded(D), count, grad_weights, row, k.data, k.row, grad_queries, q_row, 0);
                store_or_add_rows(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, order, from, rows,
                                  D, grad_queries, q_row, add, spare);
            }
        }
        for (long from = 0; from < count; from += TILE) {
            long rows = at_most(TILE, count - from);
            store_or_add_rows(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order,
                              start + from, rows, D, grad_keys + from * q_row, q_row, add, spare);
            store_or_add_rows(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order,
                              start + from, rows, V, grad_values + from * v_row, v_row, add, spare);
        }
    }
}
