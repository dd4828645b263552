/* Gradients of LLN attention of every query to every kept key. */
#include "full.h"

#include <stdint.h>
#include <string.h>

#include "threads.h"

void attend_memory_backward(const Plan *plan, long b, long h, long first, long end, float *memory_grad,
                            Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, q_row = row_of(D), v_row = row_of(V),
         vector = padded(D);
    float weight = job->block_size ? 0.5f : 1.f, alpha = scale_of(&job->alpha, b, h, 0);
    float *grad_mass = memory_grad, *grad_values = memory_grad + vector;
    const float *maximum = mass_of(job, b, h);
    float *mass = read_mass(job, b, h, maximum, maximum + D, &scratch), *values = read_values(job, b, h, &scratch);
    float *values_T = take(&scratch, V * q_row);
    float *queries = take(&scratch, TILE * q_row), *shares = take(&scratch, TILE * q_row);
    float *grads = take(&scratch, TILE * v_row), *grad_shares = take(&scratch, TILE * q_row);
    uint8_t blanked[TILE];
    Form form = read_form(job, b, h, &scratch);
    float weights[TILE];
    for (long r = 0; r < TILE; r++) weights[r] = weight;
    transpose(D, V, vector, values, v_row, values_T, q_row);
    memset(memory_grad, 0, memory_grad_floats(job) * sizeof(float));
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows q = view(type, head_of(&job->query, type, b, h), job->query.token, NULL, start, rows, D, queries);
        q = without_unusable_padding(job, job->keep_query, b, NULL, start, rows, q, queries, blanked);
        Rows g =
            view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, rows, V, grads);
        Rows to = output_rows(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, D,
                              grad_shares);
        if (form.query) centered_softmax(rows, vector, alpha, form.query, mass, weights, q, shares, q_row);
        else feature_softmax(rows, vector, alpha, mass, weight, q, shares, q_row);
        multiply(rows, vector, V, g.data, g.row, values_T, q_row, grad_shares, q_row, 0);
        multiply_transposed(D, padded(V), rows, shares, q_row, g.data, g.row, grad_values, v_row, 1);
        for (long r = 0; r < rows; r++) {
            float *s = shares + r * q_row, *d = grad_shares + r * q_row;
            vf sum = broadcast(0.f), rest = broadcast(0.f), with_query = broadcast(0.f);
            for (long i = 0; i < vector; i += LANES) sum += load(s + i) * load(d + i);
            float mean = total_of(sum) / weight; /* taken off in two steps: what is left of it would be times alpha */
            for (long i = 0; i < vector; i += LANES) rest += load(s + i) * (load(d + i) - mean);
            float left = total_of(rest) / weight;
            if (form.query) /* not in the loop below, which may write over d: this is not often wanted */
                for (long i = 0; job->grad_alpha && i < vector; i += LANES)
                    with_query -= load(s + i) * (load(d + i) - mean - left) * load(form.query + i);
            for (long i = 0; i < vector; i += LANES) {
                vf grad = load(s + i) * (load(d + i) - mean - left);
                store(grad_mass + i, load(grad_mass + i) + grad);
                with_query += grad * load(q.data + r * q.row + i);
                store(to.data + r * to.row + i, blanked[r] ? broadcast(0.f) : grad * alpha);
            }
            if (job->grad_alpha)
                job->grad_alpha[(b * job->heads + h) * job->queries + start + r] = total_of(with_query);
        }
        store_rows(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, rows, D, to);
    }
}

void sum_keys_backward(const Plan *plan, long b, long key_head, long first, long end, const float *memory_grad,
                       float *own, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, k_row = row_of(D), v_row = row_of(V),
         vector = padded(D);
    long groups = job->heads / job->key_heads;
    const int32_t *order = key_order(plan, b);
    float *keys = take(&scratch, TILE * k_row), *shares = take(&scratch, TILE * k_row);
    float *values = take(&scratch, TILE * v_row), *grad_shares = take(&scratch, TILE * k_row);
    float *grad_keys = take(&scratch, TILE * k_row), *grad_values = take(&scratch, TILE * v_row);
    float *constant = take(&scratch, vector), *grads_T = take(&scratch, V * k_row);
    float *maximum = take(&scratch, vector), *log_sum = take(&scratch, vector), weights[TILE];
    Form form = {0};
    FormKeys tile = {.row = k_row};
    if (has_form(job)) {
        tile.shares = take(&scratch, TILE * k_row);
        for (long i = 0; i < groups * D; i++) /* as in `share_form_keys` */
            if (mass_of(job, b, key_head * groups + i / D)[i % D] != mass_of(job, b, key_head * groups + i / D)[0]) {
                tile.logs = take(&scratch, TILE * k_row);
                break;
            }
    }
    Scratch rest = scratch;
    for (long start = first; start < end; start += TILE) {
        long rows = at_most(TILE, end - start);
        Rows k = view(type, head_of(&job->key, type, b, key_head), job->key.token, order, start, rows, D, keys);
        Rows v = view(type, head_of(&job->value, type, b, key_head), job->value.token, order, start, rows, V, values);
        Rows to_k = output_rows(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order, start, D,
                                grad_keys);
        Rows to_v = output_rows(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order, start,
                                V, grad_values);
        for (long g = 0; g < groups; g++) {
            long h = key_head * groups + g;
            const float *grad_mass = memory_grad + g * part_stride(memory_grad_floats(job)),
                        *grad_sums = grad_mass + vector;
            float beta = scale_of(&job->beta, b, h, 0);
            if (groups > 1 || start == first) {
                scratch = rest;
                form = read_form(job, b, h, &scratch);
                const float *largest = mass_of(job, b, h);
                memcpy(maximum, largest, D * sizeof(float));
                memcpy(log_sum, largest + D, D * sizeof(float));
                float *memory = read_values(job, b, h, &scratch), *memory_T = take(&scratch, V * k_row);
                for (long i = D; i < vector; i++) maximum[i] = log_sum[i] = 0.f;
                transpose(D, V, vector, grad_sums, v_row, grads_T, k_row);
                transpose(D, V, vector, memory, v_row, memory_T, k_row);
                for (long i = 0; i < vector; i += LANES) {
                    vf sum = broadcast(0.f); /* in the order of `multiply`: one key that is all there is cancels it */
                    for (long j = 0; j < V; j++) sum += load(memory_T + j * k_row + i) * load(grads_T + j * k_row + i);
                    store(constant + i, load(grad_mass + i) - sum);
                }
            }
            if (has_form(job)) {
                weigh_form_keys(plan, &form, b, h, order, start, 0, rows, k, &tile);
                share_form_keys(job, rows, maximum, log_sum, &tile, shares);
            } else
                share_keys(rows, vector, beta, read_weights(plan, b, h, start, rows, weights), maximum, log_sum, k,
                           shares, k_row);
            multiply(rows, vector, V, v.data, v.row, grads_T, k_row, grad_shares, k_row, 0);
            multiply(rows, padded(V), D, shares, k_row, grad_sums, v_row, to_v.data, to_v.row, g > 0);
            float *centers = job->sample_centers ? own + g * part_stride(memory_grad_floats(job)) + centers_place(job)
                                                 : NULL;
            float sums[TILE];
            for (long r = 0; has_form(job) && r < rows; r++) {
                float *d = grad_shares + r * k_row;
                vf sum = broadcast(0.f);
                for (long i = 0; i < vector; i += LANES) {
                    vf grad = load(shares + r * k_row + i) * (load(d + i) + load(constant + i));
                    sum += grad;
                    store(d + i, grad);
                }
                sums[r] = total_of(sum);
                long at = (b * job->heads + h) * job->keys + token_at(order, start + r);
                if (job->grad_beta)
                    job->grad_beta[at] = form_beta_gradient(job, &form, k, &tile, d - r * k_row, sums[r], r);
                if (job->grad_weight) job->grad_weight[at] = sums[r];
            }
            if (has_form(job)) form_key_gradients(job, &form, rows, k, &tile, grad_shares, sums, to_k, g > 0, centers);
            for (long r = 0; !has_form(job) && r < rows; r++) {
                float *s = shares + r * k_row, *d = grad_shares + r * k_row, *to = to_k.data + r * to_k.row;
                vf with_key = broadcast(0.f), sum = broadcast(0.f);
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
        store_rows(type, head_of(&job->grad_key, type, b, key_head), job->grad_key.token, order, start, rows, D, to_k);
        store_rows(type, head_of(&job->grad_value, type, b, key_head), job->grad_value.token, order, start, rows, V,
                   to_v);
    }
}

void spread_centers(const Plan *plan, long b, long key_head, long chunk, const float *memory_grad, long next,
                    Scratch scratch) {
    const Job *job = plan->job;
    long D = job->width, vector = padded(D), groups = job->heads / job->key_heads, C = plan->chunks;
    long queries = plan->query_count[b], keys = plan->key_count[b];
    float *row = take(&scratch, vector), *of_keys = take_zeros(&scratch, vector),
          *spare = take(&scratch, TILE * row_of(D));
    for (long g = 0; g < groups; g++) {
        const float *own = memory_grad + g * part_stride(memory_grad_floats(job));
        float alpha = scale_of(&job->alpha, b, key_head * groups + g, 0);
        for (long i = 0; i < vector; i++) row[i] = -alpha * own[i];
        for (long c = 0; c < C; c++)
            for (long i = 0; i < vector; i++) {
                row[i] += own[c * next + centers_place(job) + i];
                of_keys[i] += own[c * next + centers_place(job) + vector + i];
            }
        for (long i = 0; i < vector; i++) row[i] /= at_least(queries, 1);
        add_to_rows(job, &job->grad_query, b, key_head * groups + g, query_order(plan, b),
                    chunk_start(queries, chunk, C, TILE), chunk_start(queries, chunk + 1, C, TILE), row, spare);
    }
    for (long i = 0; i < vector; i++) of_keys[i] /= at_least(keys, 1);
    add_to_rows(job, &job->grad_key, b, key_head, key_order(plan, b), chunk_start(keys, chunk, C, TILE),
                chunk_start(keys, chunk + 1, C, TILE), of_keys, spare);
}
