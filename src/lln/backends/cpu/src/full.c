#include "full.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "near.h"

/* Queries come in their order, but with blocks in that of the blocks: kept tokens first. */
INLINE const int32_t *output_order(const Plan *plan, long b) {
    return plan->job->block_size ? key_order(plan, b) : NULL;
}

void largest_weighted(const Plan *plan, long b, long h, long first, long end, float *maximum, Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, vector = padded(D), group = h / (job->heads / job->key_heads);
    float *keys = take(&scratch, TILE * row_of(D)), *row = take(&scratch, vector);
    float *nan_marker = take_zeros(&scratch, vector), beta = scale_of(&job->beta, b, h, 0);
    for (long i = 0; i < vector; i++) maximum[i] = MASKED;
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(job->type, head_of(&job->key, job->type, b, group), job->key.token, key_order(plan, b), start,
                      rows, D, keys);
        for (long r = 0; r < rows; r++) {
            float weight = scale_of(&job->key_weight, b, h, token_at(key_order(plan, b), start + r));
            weigh_key(vector, beta, weight, k.data + r * k.row, row);
            for (long i = 0; i < vector; i += LANES) {
                store(maximum + i, larger(load(maximum + i), load(row + i)));
                store(nan_marker + i, load(nan_marker + i) + load(k.data + r * k.row + i) * 0.f + weight * 0.f);
            }
        }
    }
    for (long i = 0; i < vector; i++) maximum[i] += nan_marker[i];
}

const float *read_weights(const Plan *plan, long b, long h, long first, long count, float *to) {
    const Job *job = plan->job;
    if (!is_weighted(job)) return NULL;
    for (long r = 0; r < count; r++) to[r] = scale_of(&job->key_weight, b, h, token_at(key_order(plan, b), first + r));
    return to;
}

/* e = exp(beta (k - maximum)) of some keys, and its sums over tokens added to `mass`. */
static void weigh_keys(long rows, long vector, float beta, const float *weights, const float *maximum, Rows keys,
                       float *tile, long row, float *mass) {
    for (long r = 0; weights && r < rows; r++)
        key_distances(vector, beta, weights[r], keys.data + r * keys.row, maximum, tile + r * row);
    for (long i = 0; i < vector; i += LANES) {
        vf from = load(maximum + i), sum = broadcast(0.f);
        for (long r = 0; r < rows; r++) {
            vf e = exponential(weights ? smaller(load(tile + r * row + i), broadcast(FARTHEST))
                                       : (load(keys.data + r * keys.row + i) - from) * beta);
            store(tile + r * row + i, e);
            sum += e;
        }
        store(mass + i, load(mass + i) + sum);
    }
}

void share_keys(long rows, long vector, float beta, const float *weights, const float *maximum, const float *log_sum,
                Rows keys, float *tile, long row) {
    for (long r = 0; weights && r < rows; r++) {
        key_distances(vector, beta, weights[r], keys.data + r * keys.row, maximum, tile + r * row);
        for (long i = 0; i < vector; i += LANES) {
            vf b = load(tile + r * row + i) - load(log_sum + i);
            store(tile + r * row + i, exponential(smaller(b, broadcast(FARTHEST))));
        }
    }
    for (long r = 0; !weights && r < rows; r++)
        for (long i = 0; i < vector; i += LANES) {
            vf b = (load(keys.data + r * keys.row + i) - load(maximum + i)) * beta - load(log_sum + i);
            store(tile + r * row + i, exponential(b));
        }
}

Rows without_unusable_padding(const Job *job, const uint8_t *keep, long b, const int32_t *order, long first, long count,
                              Rows queries, float *spare, uint8_t *blanked) {
    if (blanked) memset(blanked, 0, count);
    if (!keep) return queries;
    long row = row_of(job->width), vector = padded(job->width);
    for (long r = 0; r < count; r++) {
        if (keep[b * job->queries + token_at(order, first + r)] || !is_unusable(queries.data + r * queries.row, vector))
            continue;
        if (queries.data != spare) {
            for (long i = 0; i < count; i++)
                memcpy(spare + i * row, queries.data + i * queries.row, vector * sizeof(float));
            queries = (Rows){spare, row};
        }
        memset(spare + r * row, 0, vector * sizeof(float));
        if (blanked) blanked[r] = 1;
    }
    return queries;
}

void sum_keys(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    if (has_form(job)) {
        sum_form_keys(plan, b, h, first, end, 0, memory, scratch);
        return;
    }
    long type = job->type, D = job->width, V = job->value_width, group = h / (job->heads / job->key_heads);
    long k_row = row_of(D), v_row = row_of(V);
    float *keys = take(&scratch, TILE * k_row), *values = take(&scratch, TILE * v_row);
    float beta = scale_of(&job->beta, b, h, 0), weights[TILE];
    memset(memory.mass, 0, (padded(D) + (first < end ? 0 : D * v_row)) * sizeof(float));
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k =
            view(type, head_of(&job->key, type, b, group), job->key.token, key_order(plan, b), start, rows, D, keys);
        Rows v = view(type, head_of(&job->value, type, b, group), job->value.token, key_order(plan, b), start, rows, V,
                      values);
        weigh_keys(rows, padded(D), beta, read_weights(plan, b, h, start, rows, weights), memory.maximum, k, keys,
                   k_row, memory.mass);
        Ahead next = tile_after(type, head_of(&job->value, type, b, group), job->value.token, key_order(plan, b),
                                start + rows, end, V);
        multiply_transposed_and_fetch(D, padded(V), rows, keys, k_row, v.data, v.row, memory.values, v_row,
                                      start > first, &next);
    }
}

void finish_memory(const Plan *plan, long b, long h, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long count = plan->key_count[b];
    if (has_form(job) && count && needs_exact(job, memory)) sum_form_keys(plan, b, h, 0, count, 1, memory, scratch);
    long D = job->width, V = job->value_width, row = row_of(V);
    for (long i = 0; i < D; i++) {
        float share = count ? 1.f / memory.mass[i] : 0.f, *values = memory.values + i * row;
        memory.maximum[i] = count ? memory.maximum[i] : 0.f;
        memory.mass[i] = count ? logf(memory.mass[i]) : MASKED;
        for (long j = 0; j < V; j += LANES) store(values + j, load(values + j) * share);
    }
}

void keep_memory(const Job *job, long b, long h, Memory memory) {
    if (!job->values) return;
    float *maximum = mass_of(job, b, h), *values = job->values + (b * job->heads + h) * job->width * job->value_width;
    memcpy(maximum, memory.maximum, job->width * sizeof(float));
    memcpy(maximum + job->width, memory.mass, job->width * sizeof(float));
    for (long i = 0; i < job->width; i++)
        memcpy(values + i * job->value_width, memory.values + i * row_of(job->value_width),
               job->value_width * sizeof(float));
}

float *read_mass(const Job *job, long b, long h, const float *maximum, const float *log_sum, Scratch *scratch) {
    float *mass = take_filled(scratch, padded(job->width), MASKED), beta = scale_of(&job->beta, b, h, 0);
    if (is_weighted(job) ||
        has_form(job)) { /* what all features have in common may be large: it goes before rounding */
        double top = 2. * MASKED;
        for (long i = 0; i < job->width; i++)
            if ((double)maximum[i] + log_sum[i] > top) top = (double)maximum[i] + log_sum[i];
        for (long i = 0; i < job->width; i++)
            if (log_sum[i] != MASKED) mass[i] = (float)((double)maximum[i] + log_sum[i] - top);
        return mass;
    }
    for (long i = 0; i < job->width; i++)
        if (log_sum[i] != MASKED) mass[i] = maximum[i] * beta + log_sum[i];
    return mass;
}

float *read_values(const Job *job, long b, long h, Scratch *scratch) {
    float *values = take(scratch, job->width * row_of(job->value_width));
    const float *from = job->values + (b * job->heads + h) * job->width * job->value_width;
    read_tile(FLOAT32, (const char *)from, job->value_width, NULL, 0, job->width, job->value_width, values,
              row_of(job->value_width));
    return values;
}

void attend_memory(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, q_row = row_of(D), v_row = row_of(V);
    long step = step_of(job), in_blocks = job->block_size ? plan->key_count[b] : 0;
    float weight = job->block_size && job->with_lln ? 0.5f : 1.f;
    float *mass = NULL, *values = memory.values, alpha = 0.f, weights[TILE], lse[TILE];
    Form form = {0};
    if (job->with_lln) {
        form = read_form(job, b, h, &scratch);
        mass = read_mass(job, b, h, memory.maximum, memory.mass, &scratch);
        alpha = scale_of(&job->alpha, b, h, 0);
    }
    for (long r = 0; r < TILE; r++) weights[r] = weight;
    float *queries = take(&scratch, TILE * q_row), *output = take(&scratch, TILE * v_row);
    const int32_t *order = output_order(plan, b);
    Near near = near_begin(job, &scratch);
    for (long start = first; start < end; start += step) {
        long stop = at_most(start + step, end);
        for (long from = start; from < stop; from += TILE) {
            long rows = at_most(TILE, stop - from), inside = at_most(rows, at_least(in_blocks - from, 0));
            Rows q = view(type, head_of(&job->query, type, b, h), job->query.token, order, from, rows, D, queries);
            q = without_unusable_padding(job, job->keep_query, b, order, from, rows, q, queries, NULL);
            Rows out = output_rows(type, head_of(&job->output, type, b, h), job->output.token, order, from, V, output);
            if (inside)
                near_attend(plan, b, h, from, from + inside, q, weight, out, job->near_lse ? lse : NULL, &near,
                            scratch);
            for (long r = 0; job->near_lse && r < rows; r++)
                lse_of(job, job->near_lse, b, h)[token_at(order, from + r)] = r < inside ? lse[r] : 0.f;
            if (job->with_lln) {
                if (form.query) centered_softmax(rows, padded(D), alpha, form.query, mass, weights, q, queries, q_row);
                else feature_softmax(rows, padded(D), alpha, mass, weight, q, queries, q_row);
                if (inside) multiply(inside, padded(V), D, queries, q_row, values, v_row, out.data, out.row, 1);
                Ahead next =
                    tile_after(type, head_of(&job->query, type, b, h), job->query.token, order, from + rows, end, D);
                multiply_and_fetch(rows - inside, padded(V), D, queries + inside * q_row, q_row, values, v_row,
                                   out.data + inside * out.row, out.row, 0, &next);
            } else {
                for (long r = inside; r < rows; r++) memset(out.data + r * out.row, 0, V * sizeof(float));
            }
            store_rows(type, head_of(&job->output, type, b, h), job->output.token, order, from, rows, V, out);
        }
    }
}
