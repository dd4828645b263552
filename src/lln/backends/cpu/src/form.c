#include "form.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SMALLEST_MASS 1e-24f

/* Rows of A = softmax(alpha (q - center) + mass), each times its weight. */
INLINE void softmax_rows(const int count, const int vectors, float alpha, const float *center, const float *mass,
                         const float *weights, const float *query, long query_row, float *to, long row) {
    float sums[2], alphas[2] = {alpha, alpha};
    weigh_centered(count, vectors, alphas, center, mass, query, query_row, to, row, sums);
    for (int r = 0; r < count; r++) {
        float share = weights[r] / sums[r];
        for (int i = 0; i < vectors; i++) store(to + r * row + i * LANES, load(to + r * row + i * LANES) * share);
    }
}

void feature_softmax(long rows, long vector, float alpha, const float *mass, float weight, Rows queries, float *tile,
                     long row) {
    int vectors = (int)(vector / LANES);
    float weights[2] = {weight, weight};
    long r = 0;
    for (; r + 2 <= rows; r += 2) {
        const float *query = queries.data + r * queries.row;
        if (vectors == 64 / LANES)
            softmax_rows(2, 64 / LANES, alpha, NULL, mass, weights, query, queries.row, tile + r * row, row);
        else softmax_rows(2, vectors, alpha, NULL, mass, weights, query, queries.row, tile + r * row, row);
    }
    for (; r < rows; r++)
        softmax_rows(1, vectors, alpha, NULL, mass, weights, queries.data + r * queries.row, queries.row,
                     tile + r * row, row);
}

void centered_softmax(long rows, long vector, float alpha, const float *center, const float *mass, const float *weights,
                      Rows queries, float *tile, long row) {
    int vectors = (int)(vector / LANES);
    long r = 0;
    for (; r + 2 <= rows; r += 2) {
        const float *query = queries.data + r * queries.row;
        if (vectors == 64 / LANES)
            softmax_rows(2, 64 / LANES, alpha, center, mass, weights + r, query, queries.row, tile + r * row, row);
        else softmax_rows(2, vectors, alpha, center, mass, weights + r, query, queries.row, tile + r * row, row);
    }
    for (; r < rows; r++)
        softmax_rows(1, vectors, alpha, center, mass, weights + r, queries.data + r * queries.row, queries.row,
                     tile + r * row, row);
}

Form read_form(const Job *job, long b, long h, Scratch *scratch) {
    long vector = padded(job->width);
    Form form = {0};
    if (!has_form(job)) return form;
    form.query = take_zeros(scratch, vector);
    form.key = take_zeros(scratch, vector);
    form.column = take_zeros(scratch, vector);
    form.none = take_filled(scratch, vector, MASKED);
    memset(form.none, 0, job->width * sizeof(float));
    if (job->form != DECOMPOSED) return form;
    memcpy(form.query, head_of(&job->center_query, FLOAT32, b, h), job->width * sizeof(float));
    memcpy(form.key, head_of(&job->center_key, FLOAT32, b, h / (job->heads / job->key_heads)),
           job->width * sizeof(float));
    for (long i = 0; i < job->width; i++) form.column[i] = form.query[i] / sqrtf(job->width);
    return form;
}

/* One key or two. */
INLINE void weigh_form_rows(const int count, const int vectors, const int logs, const int shares, const Form *form,
                            const float *key, long key_row, long first, FormKeys *to) {
    vf maximum[2], nan_marker[2], sum[2], dot[2];
    float top[2], *z = (logs ? to->logs : to->shares) + first * to->row, *e = to->shares + first * to->row;
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) {
        maximum[r] = broadcast(2.f * MASKED);
        nan_marker[r] = sum[r] = dot[r] = broadcast(0.f);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf k = load(key + r * key_row + i * LANES), apart = k - load(form->key + i * LANES);
            vf x = apart * to->beta[first + r] + load(form->none + i * LANES);
            dot[r] += apart * load(form->column + i * LANES);
            nan_marker[r] += k * 0.f;
            maximum[r] = larger(maximum[r], x);
            store(z + r * to->row + i * LANES, x);
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) {
        top[r] = largest_of(maximum[r]) + total_of(nan_marker[r]);
        to->weight[first + r] = total_of(dot[r]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf x = load(z + r * to->row + i * LANES) - top[r], y = exponential(x);
            if (logs) store(z + r * to->row + i * LANES, x);
            if (shares) store(e + r * to->row + i * LANES, y);
            sum[r] += y;
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) to->total[first + r] = total_of(sum[r]);
}

INLINE void weigh_form_tile(const int logs, const int shares, const Form *form, long first, long end, long vector,
                            Rows keys, FormKeys *to) {
    int vectors = (int)(vector / LANES);
    long r = first;
    for (; r + 2 <= end; r += 2) {
        const float *key = keys.data + r * keys.row;
        if (vectors == 64 / LANES) weigh_form_rows(2, 64 / LANES, logs, shares, form, key, keys.row, r, to);
        else weigh_form_rows(2, vectors, logs, shares, form, key, keys.row, r, to);
    }
    for (; r < end; r++) weigh_form_rows(1, vectors, logs, shares, form, keys.data + r * keys.row, 0, r, to);
}

void weigh_form_keys(const Plan *plan, const Form *form, long b, long h, const int32_t *order, long start, long first,
                     long end, Rows keys, FormKeys *to) {
    const Job *job = plan->job;
    long vector = padded(job->width), each = job->is_causal;
    for (long r = first; r < end; r++) to->beta[r] = scale_of(&job->beta, b, h, each ? token_at(order, start + r) : 0);
    if (to->logs && to->shares) weigh_form_tile(1, 1, form, first, end, vector, keys, to);
    else if (to->logs) weigh_form_tile(1, 0, form, first, end, vector, keys, to);
    else weigh_form_tile(0, 1, form, first, end, vector, keys, to);
    for (long r = first; r < end; r++) {
        if (job->key_weight.data) to->weight[r] += scale_of(&job->key_weight, b, h, token_at(order, start + r));
        to->weight[r] += to->weight[r] * 0.f;
        if (to->logs) to->log_total[r] = logf(to->total[r]);
    }
}

/* exp(w - top) / total of some keys: what makes p exp(w - top) of `shares`. */
INLINE void column_factors(long rows, const FormKeys *keys, float top, float *to) {
    for (long r = 0; r < rows; r++) to[r] = keys->weight[r] - top;
    for (long r = rows; r < padded(rows); r++) to[r] = 0.f;
    for (long r = 0; r < rows; r += LANES) store(to + r, exponential(load(to + r)));
    for (long r = 0; r < rows; r++) to[r] /= keys->total[r];
}

void sum_form_keys(const Plan *plan, long b, long h, long first, long end, int exact, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, group = h / (job->heads / job->key_heads);
    long k_row = row_of(D), v_row = row_of(V), vector = padded(D);
    Form form = read_form(job, b, h, &scratch);
    float *keys = take(&scratch, TILE * k_row), *values = take(&scratch, TILE * v_row), factors[TILE], top = MASKED;
    FormKeys tile = {.shares = keys, .row = k_row};
    if (exact) tile = (FormKeys){.logs = take(&scratch, TILE * k_row), .row = k_row};
    const int32_t *order = key_order(plan, b);
    const char *head = head_of(&job->key, type, b, group);
    memset(memory.mass, 0, (vector + (first < end ? 0 : D * v_row)) * sizeof(float));
    for (long i = 0; i < vector; i++) memory.maximum[i] = MASKED;
    for (long start = first; exact && start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(type, head, job->key.token, order, start, rows, D, keys);
        weigh_form_keys(plan, &form, b, h, order, start, 0, rows, k, &tile);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < vector; i += LANES) {
                vf x = load(tile.logs + r * k_row + i) - tile.log_total[r] + tile.weight[r];
                store(memory.maximum + i, larger(load(memory.maximum + i), x));
            }
    }
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(type, head, job->key.token, order, start, rows, D, keys);
        Rows v = view(type, head_of(&job->value, type, b, group), job->value.token, order, start, rows, V, values);
        weigh_form_keys(plan, &form, b, h, order, start, 0, rows, k, &tile);
        for (long r = 0; exact && r < rows; r++) {
            form_distances(vector, &tile, r, memory.maximum, NULL, keys + r * k_row);
            factors[r] = 1.f;
        }
        float largest = tile.weight[0];
        for (long r = 1; r < rows; r++) largest = tile.weight[r] > largest ? tile.weight[r] : largest;
        if (!exact && largest > top) {
            float fade = expf(top - largest);
            for (long i = 0; start > first && i < vector; i++) memory.mass[i] *= fade;
            for (long i = 0; start > first && i < D * v_row; i += LANES)
                store(memory.values + i, load(memory.values + i) * fade);
            top = largest;
        }
        if (!exact) column_factors(rows, &tile, top, factors);
        for (long i = 0; i < vector; i += LANES) {
            vf sum = broadcast(0.f);
            for (long r = 0; r < rows; r++) {
                vf e = load(keys + r * k_row + i) * factors[r];
                store(keys + r * k_row + i, e);
                sum += e;
            }
            store(memory.mass + i, load(memory.mass + i) + sum);
        }
        Ahead next =
            tile_after(type, head_of(&job->value, type, b, group), job->value.token, order, start + rows, end, V);
        multiply_transposed_and_fetch(D, padded(V), rows, keys, k_row, v.data, v.row, memory.values, v_row,
                                      start > first, &next);
    }
    for (long i = 0; !exact && i < vector; i++) memory.maximum[i] = top;
}

int needs_exact(const Job *job, Memory memory) {
    for (long i = 0; i < job->width; i++)
        if (memory.mass[i] < SMALLEST_MASS) return 1;
    return 0;
}

void join_memories(const Job *job, Memory memory, Memory other) {
    float maximum = memory.maximum[0] > other.maximum[0] ? memory.maximum[0] : other.maximum[0];
    float own = expf(memory.maximum[0] - maximum), others = expf(other.maximum[0] - maximum);
    for (long i = padded(job->width); i < memory_floats(job); i++)
        memory.maximum[i] = memory.maximum[i] * own + other.maximum[i] * others;
    for (long i = 0; i < padded(job->width); i++) memory.maximum[i] = maximum;
}

void share_form_keys(const Job *job, long rows, const float *maximum, const float *log_sum, const FormKeys *keys,
                     float *tile) {
    long vector = padded(job->width), row = keys->row;
    float factors[TILE];
    int exact = 0;
    for (long i = 1; i < job->width; i++) exact |= maximum[i] != maximum[0];
    for (long r = 0; exact && r < rows; r++) form_distances(vector, keys, r, maximum, log_sum, tile + r * row);
    if (exact) return;
    column_factors(rows, keys, maximum[0], factors);
    for (long i = 0; i < vector; i += LANES) {
        vf inverse = exponential(smaller(-load(log_sum + i), broadcast(60.f)));
        for (long r = 0; r < rows; r++)
            store(tile + r * row + i, load(keys->shares + r * row + i) * inverse * factors[r]);
    }
}

void form_key_gradients(const Job *job, const Form *form, long rows, Rows keys, const FormKeys *tile,
                        const float *grads, const float *sums, Rows to, int add, float *centers) {
    long vector = padded(job->width), row = tile->row;
    float scale = 1.f / sqrtf(job->width), shares[TILE];
    for (long r = 0; r < rows; r++) shares[r] = sums[r] == 0.f ? 0.f : sums[r] / tile->total[r];
    for (long i = 0; i < vector; i += LANES) {
        vf column = load(form->column + i), center = load(form->key + i), of_query = broadcast(0.f),
           of_key = broadcast(0.f);
        for (long r = 0; r < rows; r++) {
            vf grad = (load(grads + r * row + i) - load(tile->shares + r * row + i) * shares[r]) * tile->beta[r];
            if (centers) {
                of_query += (load(keys.data + r * keys.row + i) - center) * sums[r];
                of_key += grad;
            }
            grad += column * sums[r];
            float *at = to.data + r * to.row + i;
            store(at, add ? load(at) + grad : grad);
        }
        if (!centers) continue;
        store(centers + i, load(centers + i) + of_query * scale);
        store(centers + vector + i, load(centers + vector + i) - of_key);
    }
}

float form_beta_gradient(const Job *job, const Form *form, Rows keys, const FormKeys *tile, const float *grads,
                         float sum, long r) {
    vf with_key = broadcast(0.f);
    float share = sum / tile->total[r];
    for (long i = 0; i < padded(job->width); i += LANES) {
        long at = r * tile->row + i;
        vf k = load(keys.data + r * keys.row + i) - load(form->key + i);
        with_key += (load(grads + at) - load(tile->shares + at) * share) * k;
    }
    return total_of(with_key);
}

void add_to_rows(const Job *job, const Tensor *x, long b, long head, const int32_t *order, long first, long end,
                 const float *row, float *spare) {
    long width = job->width, type = job->type, tile = row_of(width);
    char *at = head_of(x, type, b, head);
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows to = {(float *)at + start * x->token, x->token};
        int direct = is_direct(type, order, width);
        if (!direct) {
            read_tile(type, at, x->token, order, start, rows, width, spare, tile);
            to = (Rows){spare, tile};
        }
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < padded(width); i += LANES)
                store(to.data + r * to.row + i, load(to.data + r * to.row + i) + load(row + i));
        if (!direct) write_tile(type, at, x->token, order, start, rows, width, spare, tile);
    }
}
