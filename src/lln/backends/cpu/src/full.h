/* LLN attention of every query to every kept key, in the two-softmax form of `plain.py`, and its gradients. */
#ifndef LLN_FULL_H
#define LLN_FULL_H

#include "moments.h"
#include "near.h"

INLINE const int32_t *key_order(const Plan *plan, long b) {
    return plan->key_order ? plan->key_order + b * plan->job->keys : NULL;
}

INLINE const int32_t *query_order(const Plan *plan, long b) {
    return plan->query_order ? plan->query_order + b * plan->job->queries : NULL;
}

/* Queries come in their order, but with blocks in that of the blocks: kept tokens first. */
INLINE const int32_t *output_order(const Plan *plan, long b) { return plan->job->block_size ? key_order(plan,
                                                                                                        b) : NULL; }

/* What is kept of some keys: sums over them of e = exp(beta (k - most)), and of that times the values. */
typedef struct {
    float *most, *mass, *values;
} Memory;

INLINE long memory_floats(const Job *job) { return 2 * padded(job->width) + job->width * row_of(job->value_width); }

INLINE Memory memory_at(float *memory, const Job *job) {
    long vector = padded(job->width);
    return (Memory){memory, memory + vector, memory + 2 * vector};
}

/* Keys with log-weights, b = beta k + w. Both terms may be large and cancel, so b is summed in doubles, and measured
   there from `most`, the largest b rounded to a float: the distance is exact to a float, whatever the size of b. At the
   largest b itself it is no more than the rounding of `most`, which is at most 16 up to EXACT. From there on distances
   are those of rounded b, which are 0 at the largest. */
#define EXACT 268435456.f
#define FARTHEST 20.f /* no distance is larger than 16, but for features beyond the last */
#define HALF (LANES / 2)

typedef float vh __attribute__((vector_size(HALF * 4)));
typedef int32_t vhi __attribute__((vector_size(HALF * 4)));
typedef double vd __attribute__((vector_size(HALF * 8)));
typedef float vh_anywhere __attribute__((vector_size(HALF * 4), aligned(4), may_alias));

INLINE vd load_doubles(const float *p) { return __builtin_convertvector((vh) * (const vh_anywhere *)p, vd); }
INLINE vh rounded(vd x) { return __builtin_convertvector(x, vh); }

INLINE int is_weighted(const Job *job) { return job->key_weight.data != NULL; }

/* b of a key, rounded. */
INLINE void weigh_key(long vector, double beta, double weight, const float *key, float *to) {
    for (long i = 0; i < vector; i += HALF) *(vh_anywhere *)(to + i) = rounded(load_doubles(key + i) * beta + weight);
}

/* b - most of a key. */
INLINE void key_distances(long vector, double beta, double weight, const float *key, const float *most, float *to) {
    for (long i = 0; i < vector; i += HALF) {
        vd b = load_doubles(key + i) * beta + weight;
        vh from = *(const vh_anywhere *)(most + i), near = rounded(b - load_doubles(most + i)), far = rounded(b) - from;
        vhi exact = (from < EXACT) & (from > -EXACT);
        *(vh_anywhere *)(to + i) = (vh)(((vhi)near & exact) | ((vhi)far & ~exact));
    }
}

/* The largest b of each feature among the keys at places first ... end, or NaN where a key or its weight is not
   finite. */
static void largest_weighted(const Plan *plan, long b, long h, long first, long end, float *most, Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, vector = padded(D), group = h / (job->heads / job->key_heads);
    float *keys = take(&scratch, TILE * row_of(D)), *row = take(&scratch, vector);
    float *shows = take_zeros(&scratch, vector), beta = scale_of(&job->beta, b, h, 0);
    for (long i = 0; i < vector; i++) most[i] = ABSENT;
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(job->type, head_of(&job->key, job->type, b, group), job->key.token, key_order(plan, b), start,
                      rows, D, keys);
        for (long r = 0; r < rows; r++) {
            float weight = scale_of(&job->key_weight, b, h, token_at(key_order(plan, b), start + r));
            weigh_key(vector, beta, weight, k.data + r * k.row, row);
            for (long i = 0; i < vector; i += LANES) {
                store(most + i, larger(load(most + i), load(row + i)));
                store(shows + i, load(shows + i) + load(k.data + r * k.row + i) * 0.f + weight * 0.f);
            }
        }
    }
    for (long i = 0; i < vector; i++) most[i] += shows[i];
}

/* Log-weights of the keys at places first ...; NULL if there are none. */
static const float *read_weights(const Plan *plan, long b, long h, long first, long count, float *to) {
    const Job *job = plan->job;
    if (!is_weighted(job)) return NULL;
    for (long r = 0; r < count; r++) to[r] = scale_of(&job->key_weight, b, h, token_at(key_order(plan, b), first + r));
    return to;
}

/* e = exp(beta (k - most)) of some keys, and its sums over tokens added to `mass`. */
static void weigh_keys(long rows, long vector, float beta, const float *weights, const float *most, Rows keys,
                       float *tile, long row, float *mass) {
    for (long r = 0; weights && r < rows; r++)
        key_distances(vector, beta, weights[r], keys.data + r * keys.row, most, tile + r * row);
    for (long i = 0; i < vector; i += LANES) {
        vf from = load(most + i), sum = same(0.f);
        for (long r = 0; r < rows; r++) {
            vf e = exponential(weights ? smaller(load(tile + r * row + i), same(FARTHEST))
                                       : (load(keys.data + r * keys.row + i) - from) * beta);
            store(tile + r * row + i, e);
            sum += e;
        }
        store(mass + i, load(mass + i) + sum);
    }
}

/* B = exp(beta (k - most) - log_sum), the shares of all keys that these have: measured from the largest key as in
   `weigh_keys`, because beta k - L loses what the rounding of a large L takes away. */
static void share_keys(long rows, long vector, float beta, const float *weights, const float *most,
                       const float *log_sum, Rows keys, float *tile, long row) {
    for (long r = 0; weights && r < rows; r++) {
        key_distances(vector, beta, weights[r], keys.data + r * keys.row, most, tile + r * row);
        for (long i = 0; i < vector; i += LANES) {
            vf b = load(tile + r * row + i) - load(log_sum + i);
            store(tile + r * row + i, exponential(smaller(b, same(FARTHEST))));
        }
    }
    for (long r = 0; !weights && r < rows; r++)
        for (long i = 0; i < vector; i += LANES) {
            vf b = (load(keys.data + r * keys.row + i) - load(most + i)) * beta - load(log_sum + i);
            store(tile + r * row + i, exponential(b));
        }
}

/* Queries of padding that are not finite, or so large that they would not be once they are scaled, count as zeros, so that 0 times NaN reaches no gradient: the tile as it is, or
   a copy of it in `spare` without them. `blanked` tells which rows those are. */
static Rows without_odd_padding(const Job *job, const uint8_t *keep, long b, const int32_t *order, long first,
                                long count, Rows queries, float *spare, uint8_t *blanked) {
    if (blanked) memset(blanked, 0, count);
    if (!keep) return queries;
    long row = row_of(job->width), vector = padded(job->width);
    for (long r = 0; r < count; r++) {
        if (keep[b * job->queries + token_at(order, first + r)] || !is_odd(queries.data + r * queries.row, vector))
            continue;
        if (queries.data != spare) {
            for (long i = 0; i < count; i++) memcpy(spare + i * row, queries.data + i * queries.row, vector * sizeof(float));
            queries = (Rows){spare, row};
        }
        memset(spare + r * row, 0, vector * sizeof(float));
        if (blanked) blanked[r] = 1;
    }
    return queries;
}

/* The memory of the keys at places first ... end. */
static void remember(const Plan *plan, long b, long h, long first, long end, Memory memory, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, group = h / (job->heads / job->key_heads);
    long k_row = row_of(D), v_row = row_of(V);
    float *keys = take(&scratch, TILE * k_row), *values = take(&scratch, TILE * v_row);
    float beta = scale_of(&job->beta, b, h, 0), weights[TILE];
    memset(memory.mass, 0, (padded(D) + (first < end ? 0 : D * v_row)) * sizeof(float));
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(type, head_of(&job->key, type, b, group), job->key.token, key_order(plan, b), start, rows, D,
                      keys);
        Rows v = view(type, head_of(&job->value, type, b, group), job->value.token, key_order(plan, b), start, rows, V,
                      values);
        weigh_keys(rows, padded(D), beta, read_weights(plan, b, h, start, rows, weights), memory.most, k, keys, k_row,
                   memory.mass);
        Ahead next = tile_after(type, head_of(&job->value, type, b, group), job->value.token, key_order(plan, b),
                                start + rows, end, V);
        multiply_transposed_and_fetch(D, padded(V), rows, keys, k_row, v.data, v.row, memory.values, v_row,
                                      start > first, &next);
    }
}

/* Hand over what makes the log-mass L and the mean values S of a head. */
static void keep_memory(const Job *job, long b, long h, long count, Memory memory) {
    float *most = job->mass + (b * job->heads + h) * 2 * job->width, *log_sum = most + job->width,
          *values = job->values + (b * job->heads + h) * job->width * job->value_width;
    for (long i = 0; i < job->width; i++) {
        float share = count ? 1.f / memory.mass[i] : 0.f;
        const float *from = memory.values + i * row_of(job->value_width);
        most[i] = count ? memory.most[i] : 0.f;
        log_sum[i] = count ? logf(memory.mass[i]) : ABSENT;
        for (long j = 0; j < job->value_width; j++) values[i * job->value_width + j] = from[j] * share;
    }
}

/* L of a head, filled up so that features beyond the last get no weight. */
static float *read_mass(const Job *job, long b, long h, Scratch *scratch) {
    float *mass = take_filled(scratch, padded(job->width), ABSENT), beta = scale_of(&job->beta, b, h, 0);
    const float *most = job->mass + (b * job->heads + h) * 2 * job->width, *log_sum = most + job->width;
    if (is_weighted(job)) { /* what all features have in common may be large: it is taken away before L is rounded */
        double top = 2. * ABSENT;
        for (long i = 0; i < job->width; i++)
            if ((double)most[i] + log_sum[i] > top) top = (double)most[i] + log_sum[i];
        for (long i = 0; i < job->width; i++)
            if (log_sum[i] != ABSENT) mass[i] = (float)((double)most[i] + log_sum[i] - top);
        return mass;
    }
    for (long i = 0; i < job->width; i++)
        if (log_sum[i] != ABSENT) mass[i] = most[i] * beta + log_sum[i];
    return mass;
}

static float *read_values(const Job *job, long b, long h, Scratch *scratch) {
    float *values = take(scratch, job->width * row_of(job->value_width));
    const float *from = job->values + (b * job->heads + h) * job->width * job->value_width;
    read_typed(FLOAT32, (const char *)from, job->value_width, NULL, 0, job->width, job->value_width, values,
               row_of(job->value_width));
    return values;
}

/* exp(alpha q + mass - the largest of that) of one query or two, and the sums. Two at once: each waits for its
   maximum. */
INLINE void weigh_queries(const int count, const int vectors, const float *alpha, const float *mass, const float *query,
                          long query_row, float *to, long row, float *sums) {
    vf most[2], shows[2], sum[2];
    float top[2];
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) {
        most[r] = same(2.f * ABSENT);
        shows[r] = sum[r] = same(0.f);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf q = load(query + r * query_row + i * LANES), z = q * alpha[r] + load(mass + i * LANES);
            shows[r] += q * 0.f; /* NaN where the query is not finite, which an exponential could hide */
            most[r] = larger(most[r], z);
            store(to + r * row + i * LANES, z);
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) top[r] = largest_of(most[r]) + total_of(shows[r]);
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++)
#pragma GCC unroll 2
        for (int r = 0; r < count; r++) {
            vf e = exponential(load(to + r * row + i * LANES) - top[r]);
            store(to + r * row + i * LANES, e);
            sum[r] += e;
        }
#pragma GCC unroll 2
    for (int r = 0; r < count; r++) sums[r] = total_of(sum[r]);
}

/* Rows of A = softmax(alpha q + mass) times `weight`. */
INLINE void softmax_rows(const int count, const int vectors, float alpha, const float *mass, float weight,
                         const float *query, long query_row, float *to, long row) {
    float sums[2], alphas[2] = {alpha, alpha};
    weigh_queries(count, vectors, alphas, mass, query, query_row, to, row, sums);
    for (int r = 0; r < count; r++) {
        float share = weight / sums[r];
        for (int i = 0; i < vectors; i++) store(to + r * row + i * LANES, load(to + r * row + i * LANES) * share);
    }
}

static void feature_softmax(long rows, long vector, float alpha, const float *mass, float weight, Rows queries,
                            float *tile, long row) {
    int vectors = (int)(vector / LANES);
    long r = 0;
    for (; r + 2 <= rows; r += 2) {
        const float *query = queries.data + r * queries.row;
        if (vectors == 64 / LANES) softmax_rows(2, 64 / LANES, alpha, mass, weight, query, queries.row, tile + r * row,
                                                row);
        else softmax_rows(2, vectors, alpha, mass, weight, query, queries.row, tile + r * row, row);
    }
    for (; r < rows; r++)
        softmax_rows(1, vectors, alpha, mass, weight, queries.data + r * queries.row, queries.row, tile + r * row, row);
}

/* Tokens that are worked on together: a tile, or whole blocks. */
INLINE long step_of(const Job *job) {
    long size = job->block_size && !job->is_window ? near_size(job) : TILE;
    return size >= TILE ? size : TILE / size * size;
}

/* out = A S of the queries at places first ... end, or its mean with the attention inside blocks. */
static void recall(const Plan *plan, long b, long h, long first, long end, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, q_row = row_of(D), v_row = row_of(V);
    long step = step_of(job), in_blocks = job->block_size ? plan->key_count[b] : 0;
    float weight = job->block_size && job->with_lln ? 0.5f : 1.f;
    float *mass = NULL, *values = NULL, alpha = 0.f;
    if (job->with_lln) {
        mass = read_mass(job, b, h, &scratch);
        values = read_values(job, b, h, &scratch);
        alpha = scale_of(&job->alpha, b, h, 0);
    }
    float *queries = take(&scratch, TILE * q_row), *output = take(&scratch, TILE * v_row);
    const int32_t *order = output_order(plan, b);
    Near near = near_begin(job, &scratch);
    for (long start = first; start < end; start += step) {
        long stop = at_most(start + step, end);
        for (long from = start; from < stop; from += TILE) {
            long rows = at_most(TILE, stop - from), inside = at_most(rows, at_least(in_blocks - from, 0));
            Rows q = view(type, head_of(&job->query, type, b, h), job->query.token, order, from, rows, D, queries);
            q = without_odd_padding(job, job->keep_query, b, order, from, rows, q, queries, NULL);
            Rows out = room(type, head_of(&job->output, type, b, h), job->output.token, order, from, V, output);
            if (inside)
                near_attend(plan, b, h, from, from + inside, q, weight, out, &near, scratch);
            if (job->with_lln) {
                feature_softmax(rows, padded(D), alpha, mass, weight, q, queries, q_row);
                if (inside) multiply(inside, padded(V), D, queries, q_row, values, v_row, out.data, out.row, 1);
                Ahead next = tile_after(type, head_of(&job->query, type, b, h), job->query.token, order, from + rows,
                                        end, D);
                multiply_and_fetch(rows - inside, padded(V), D, queries + inside * q_row, q_row, values, v_row,
                                   out.data + inside * out.row, out.row, 0, &next);
            } else {
                for (long r = inside; r < rows; r++) memset(out.data + r * out.row, 0, V * sizeof(float));
            }
            put(type, head_of(&job->output, type, b, h), job->output.token, order, from, rows, V, out);
        }
    }
}

/* What the queries hand to the keys on the way back: dL and dS. */
INLINE long handed_floats(const Job *job) { return padded(job->width) + job->width * row_of(job->value_width); }

/* dq of the queries at places first ... end, and their dL and dS. */
static void recall_backward(const Plan *plan, long b, long h, long first, long end, float *handed, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, q_row = row_of(D), v_row = row_of(V),
            vector = padded(D);
    float weight = job->block_size ? 0.5f : 1.f, alpha = scale_of(&job->alpha, b, h, 0);
    float *grad_mass = handed, *grad_values = handed + vector;
    float *mass = read_mass(job, b, h, &scratch), *values = read_values(job, b, h, &scratch);
    float *values_T = take(&scratch, V * q_row);
    float *queries = take(&scratch, TILE * q_row), *shares = take(&scratch, TILE * q_row);
    float *grads = take(&scratch, TILE * v_row), *grad_shares = take(&scratch, TILE * q_row);
    uint8_t blanked[TILE];
    transpose(D, V, vector, values, v_row, values_T, q_row);
    memset(handed, 0, handed_floats(job) * sizeof(float));
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows q = view(type, head_of(&job->query, type, b, h), job->query.token, NULL, start, rows, D, queries);
        q = without_odd_padding(job, job->keep_query, b, NULL, start, rows, q, queries, blanked);
        Rows g = view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, rows, V,
                      grads);
        Rows to = room(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, D, grad_shares);
        feature_softmax(rows, vector, alpha, mass, weight, q, shares, q_row);
        multiply(rows, vector, V, g.data, g.row, values_T, q_row, grad_shares, q_row, 0);
        multiply_transposed(D, padded(V), rows, shares, q_row, g.data, g.row, grad_values, v_row, 1);
        for (long r = 0; r < rows; r++) {
            float *s = shares + r * q_row, *d = grad_shares + r * q_row;
            vf sum = same(0.f), with_query = same(0.f);
            for (long i = 0; i < vector; i += LANES) sum += load(s + i) * load(d + i);
            float mean = total_of(sum) / weight;
            for (long i = 0; i < vector; i += LANES) {
                vf grad = load(s + i) * (load(d + i) - mean);
                store(grad_mass + i, load(grad_mass + i) + grad);
                with_query += grad * load(q.data + r * q.row + i);
                store(to.data + r * to.row + i, blanked[r] ? same(0.f) : grad * alpha);
            }
            if (job->grad_alpha) job->grad_alpha[(b * job->heads + h) * job->queries + start + r] =
                    total_of(with_query);
        }
        put(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, rows, D, to);
    }
}

/* dk and dv of the keys at places first ... end of a key head, given dL and dS of all its query heads. */
static void remember_backward(const Plan *plan, long b, long key_head, long first, long end, const float *handed,
                              Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, k_row = row_of(D), v_row = row_of(V),
            vector = padded(D);
    long groups = job->heads / job->key_heads;
    const int32_t *order = key_order(plan, b);
    float *keys = take(&scratch, TILE * k_row), *shares = take(&scratch, TILE * k_row);
    float *values = take(&scratch, TILE * v_row), *grad_shares = take(&scratch, TILE * k_row);
    float *grad_keys = take(&scratch, TILE * k_row), *grad_values = take(&scratch, TILE * v_row);
    float *constant = take(&scratch, vector), *grads_T = take(&scratch, V * k_row);
    float *most = take(&scratch, vector), *log_sum = take(&scratch, vector), weights[TILE];
    Scratch rest = scratch;
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(type, head_of(&job->key, type, b, key_head), job->key.token, order, start, rows, D, keys);
        Rows v = view(type, head_of(&job->value, type, b, key_head), job->value.token, order, start, rows, V, values);
        Rows to_k = room(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order, start, D,
                         grad_keys);
        Rows to_v = room(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order, start, V,
                         grad_values);
        for (long g = 0; g < groups; g++) {
            long h = key_head * groups + g;
            const float *grad_mass = handed + g * apart(handed_floats(job)), *grad_memory = grad_mass + vector;
            float beta = scale_of(&job->beta, b, h, 0);
            if (groups > 1 || start == first) {
                scratch = rest;
                const float *largest = job->mass + (b * job->heads + h) * 2 * D;
                memcpy(most, largest, D * sizeof(float));
                memcpy(log_sum, largest + D, D * sizeof(float));
                float *memory = read_values(job, b, h, &scratch);
                for (long i = 0; i < D; i++) {
                    vf sum = same(0.f);
                    for (long j = 0; j < padded(V); j += LANES)
                        sum += load(memory + i * v_row + j) * load(grad_memory + i * v_row + j);
                    constant[i] = grad_mass[i] - total_of(sum);
                }
                for (long i = D; i < vector; i++) constant[i] = most[i] = log_sum[i] = 0.f;
                transpose(D, V, vector, grad_memory, v_row, grads_T, k_row);
            }
            share_keys(rows, vector, beta, read_weights(plan, b, h, start, rows, weights), most, log_sum, k, shares,
                       k_row);
            multiply(rows, vector, V, v.data, v.row, grads_T, k_row, grad_shares, k_row, 0);
            multiply(rows, padded(V), D, shares, k_row, grad_memory, v_row, to_v.data, to_v.row, g > 0);
            for (long r = 0; r < rows; r++) {
                float *s = shares + r * k_row, *d = grad_shares + r * k_row, *to = to_k.data + r * to_k.row;
                vf with_key = same(0.f), sum = same(0.f);
                for (long i = 0; i < vector; i += LANES) {
                    vf grad = load(s + i) * (load(d + i) + load(constant + i));
                    with_key += grad * load(k.data + r * k.row + i);
                    sum += grad;
                    store(to + i, g ? load(to + i) + grad * beta : grad * beta);
                }
                long at = (b * job->heads + h) * job->keys + token_at(order, start + r);
                if (job->grad_beta) job->grad_beta[at] = total_of(with_key);
                if (job->grad_weight) job->grad_weight[at] = total_of(sum);
            }
        }
        put(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order, start, rows, D, to_k);
        put(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order, start, rows, V, to_v);
    }
}

#endif
