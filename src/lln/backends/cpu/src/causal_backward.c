/* Gradients of causal LLN attention. */
#include "causal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Gradients of the pair weights of a tile: grads (value)ᵀ, less its mean, over the sum of weights; lower triangle. */
static void pair_gradients(const Causal *t, Rows grads, long V, float *value_T, float *pairs) {
    long square = row_of(TILE), rows = t->rows;
    transpose(rows, V, padded(rows), t->value.data, t->value.row, value_T, square);
    for (long from = 0; from < rows; from += 16) {
        long count = at_most(16, rows - from);
        multiply(count, padded(from + count), V, grads.data + from * grads.row, grads.row, value_T, square,
                 pairs + from * square, square, 0);
    }
}

void causal_queries_backward(const Plan *plan, long b, long h, long first, long end, Memory before,
                             const Memory *memory_grad, History past, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
         square = row_of(TILE);
    long vector = padded(D), wide = padded(V), tiles = 0;
    float weight = job->block_size ? 0.5f : 1.f;
    float *maximum = take(&scratch, vector), *mass = take(&scratch, vector), *values_T = take(&scratch, V * row);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square),
          *pairs = take(&scratch, TILE * square);
    float *grad_phi = take(&scratch, TILE * row);
    memcpy(maximum, before.maximum, vector * sizeof(float));
    memcpy(mass, before.mass, vector * sizeof(float));
    transpose(D, V, vector, before.values, v_row, values_T, row);
    if (memory_grad) clear_memory(job, *memory_grad);
    Causal t = causal_begin_head(job, b, h, maximum, 0, &scratch);
    for (long start = first; start < end; start += t.rows) {
        causal_tile(plan, b, h, start, end, 0, &t, scratch);
        past.starts[tiles] = start;
        memcpy(past.maximum + tiles * vector, maximum, vector * sizeof(float));
        tiles++;
        if (t.fades) {
            fade_columns(1, t.fade, mass, 0, vector);
            fade_columns(V, t.fade, values_T, row, vector);
        }
        Rows g =
            view(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, t.rows, V, grads);
        Rows to =
            output_rows(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, D, grad_phi);
        multiply(t.rows, vector, V, g.data, g.row, values_T, row, grad_phi, row, 0);
        pair_gradients(&t, g, V, value_T, pairs);
        for (long r = 0; r < t.rows; r++) {
            float sum = weight_sum(&t, r, mass, row, square, vector), inverse = sum == 0.f ? 0.f : weight / sum;
            float *d = grad_phi + r * row, *p = pairs + r * square, *w = t.weights + r * square;
            vf dot = broadcast(0.f);
            for (long i = 0; i < vector; i += LANES) dot += load(t.phi + r * row + i) * load(d + i);
            for (long j = r + 1; j < padded(r + 1); j++) p[j] = 0.f;
            vf inside = broadcast(0.f);
            for (long j = 0; j < padded(r + 1); j += LANES) inside += load(w + j) * load(p + j);
            float mean = sum == 0.f ? 0.f : (total_of(dot) + total_of(inside)) / sum;
            past.inverse[start + r] = inverse;
            past.mean[start + r] = mean;
            for (long i = 0; i < vector; i += LANES) store(d + i, (load(d + i) - load(mass + i) * mean) * inverse);
            for (long j = 0; j <= r; j++) p[j] = (p[j] - mean) * inverse;
            for (long j = r + 1; j < padded(at_most(r / 16 * 16 + 16, t.rows)); j++) p[j] = 0.f;
        }
        multiply_lower(t.rows, vector, pairs, square, (Rows){t.psi, row}, grad_phi, row);
        for (long r = 0; r < t.rows; r++) {
            float alpha = scale_of(&job->alpha, b, h, start + r), *q = t.query.data + r * t.query.row;
            vf with_query = broadcast(0.f);
            if (t.form.query) /* before the loop below, which may write over grad_phi */
                for (long i = 0; job->grad_alpha && i < vector; i += LANES)
                    with_query -= load(t.phi + r * row + i) * load(grad_phi + r * row + i) * load(t.form.query + i);
            for (long i = 0; i < vector; i += LANES) {
                vf grad = load(t.phi + r * row + i) * load(grad_phi + r * row + i);
                with_query += grad * load(q + i);
                store(to.data + r * to.row + i, t.blanked[r] ? broadcast(0.f) : grad * alpha);
            }
            if (job->grad_alpha)
                job->grad_alpha[(b * job->heads + h) * job->queries + start + r] = total_of(with_query);
        }
        store_rows(type, head_of(&job->grad_query, type, b, h), job->grad_query.token, NULL, start, t.rows, D, to);
        add_tile_mass(&t, mass, row, vector);
        multiply_transposed(V, vector, t.rows, t.value.data, t.value.row, t.psi, row, values_T, row, 1);
        if (!memory_grad) continue;
        for (long i = 0; i < vector; i += LANES)
            store(t.fade + i, exponential(load(before.maximum + i) - load(maximum + i)));
        fade_columns(t.rows, t.fade, t.phi, row, vector);
        for (long r = 0; r < t.rows; r++) {
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            for (long j = 0; j < wide; j += LANES) store(grads + r * v_row + j, load(g.data + r * g.row + j) * inverse);
            for (long i = 0; i < vector; i += LANES)
                store(memory_grad->mass + i,
                      load(memory_grad->mass + i) + load(t.phi + r * row + i) * (inverse * mean));
        }
        multiply_transposed(D, wide, t.rows, t.phi, row, grads, v_row, memory_grad->values, v_row, 1);
    }
    past.starts[tiles] = end;
    *past.tiles = tiles;
}

KeyGradients key_gradients(const Job *job, long b, long key_head, float *buffer) {
    long type = job->type, vector = padded(job->width), wide = padded(job->value_width);
    KeyGradients to = {{buffer, vector}, {buffer + job->keys * vector, wide}};
    if (is_direct(type, NULL, job->width))
        to.keys = (Rows){(float *)head_of(&job->grad_key, type, b, key_head), job->grad_key.token};
    if (is_direct(type, NULL, job->value_width))
        to.values = (Rows){(float *)head_of(&job->grad_value, type, b, key_head), job->grad_value.token};
    return to;
}

void store_key_gradients(const Job *job, long b, long key_head, long first, long end, KeyGradients from) {
    Rows keys = {from.keys.data + first * from.keys.row, from.keys.row};
    Rows values = {from.values.data + first * from.values.row, from.values.row};
    store_rows(job->type, head_of(&job->grad_key, job->type, b, key_head), job->grad_key.token, NULL, first,
               end - first, job->width, keys);
    store_rows(job->type, head_of(&job->grad_value, job->type, b, key_head), job->grad_value.token, NULL, first,
               end - first, job->value_width, values);
}

/* dk of a tile of a form from the gradients of psi, which become those of b; and the gradients of beta and weights. */
static void causal_form_gradients(const Job *job, long b, long h, long start, Causal *t, float *grads, Rows to,
                                  int add) {
    long row = row_of(job->width), vector = padded(job->width);
    float sums[TILE];
    for (long r = 0; r < t->rows; r++) {
        float *d = grads + r * row;
        vf sum = broadcast(0.f);
        sums[r] = 0.f;
        if (!is_kept(job, b, start + r)) {
            memset(d, 0, vector * sizeof(float));
            memset(t->keys.shares + r * row, 0, vector * sizeof(float));
            continue;
        }
        for (long i = 0; i < vector; i += LANES) {
            vf grad = load(t->psi + r * row + i) * load(d + i);
            sum += grad;
            store(d + i, grad);
        }
        sums[r] = total_of(sum);
        long at = (b * job->heads + h) * job->keys + start + r;
        if (job->grad_beta) job->grad_beta[at] = form_beta_gradient(job, &t->form, t->key, &t->keys, grads, sums[r], r);
        if (job->grad_weight) job->grad_weight[at] = sums[r];
    }
    form_key_gradients(job, &t->form, t->rows, t->key, &t->keys, grads, sums, to, add, NULL);
}

void causal_keys_backward(const Plan *plan, long b, long h, History past, const Memory *after, KeyGradients sums,
                          int first, Scratch scratch) {
    const Job *job = plan->job;
    long type = job->type, D = job->width, V = job->value_width, row = row_of(D), v_row = row_of(V),
         square = row_of(TILE);
    long vector = padded(D), wide = padded(V);
    /* sums over later queries, over their sums of weights: phi times the gradient, and phi times its mean */
    float *later = take_zeros(&scratch, D * v_row), *later_T = take(&scratch, V * row),
          *later_mean = take_zeros(&scratch, vector), *its_maximum = take(&scratch, vector);
    float *grads = take(&scratch, TILE * v_row), *value_T = take(&scratch, V * square),
          *pairs = take(&scratch, TILE * square);
    float *grad_psi = take(&scratch, TILE * row), *grad_value = take(&scratch, TILE * v_row);
    if (after) {
        memcpy(later_mean, after->mass, vector * sizeof(float));
        memcpy(later, after->values, D * v_row * sizeof(float));
    }
    Causal t = causal_begin_head(job, b, h, its_maximum, 1, &scratch);
    for (long tile = *past.tiles - 1; tile >= 0; tile--) {
        long start = past.starts[tile];
        const float *maximum = past.maximum + tile * vector;
        if (tile + 1 < *past.tiles) {
            for (long i = 0; i < vector; i += LANES)
                store(t.fade + i, exponential(load(maximum + i) - load(maximum + vector + i)));
            fade_columns(1, t.fade, later_mean, 0, vector);
            fade_rows(D, t.fade, later, v_row, wide);
        }
        memcpy(t.maximum, maximum, vector * sizeof(float));
        causal_tile(plan, b, h, start, past.starts[tile + 1], 1, &t, scratch);
        transpose(D, V, vector, later, v_row, later_T, row);
        read_tile(type, head_of(&job->grad_output, type, b, h), job->grad_output.token, NULL, start, t.rows, V, grads,
                  v_row);
        Rows g = {grads, v_row};
        multiply(t.rows, vector, V, t.value.data, t.value.row, later_T, row, grad_psi, row, 0);
        multiply(t.rows, wide, D, t.psi, row, later, v_row, grad_value, v_row, 0);
        pair_gradients(&t, g, V, value_T, pairs);
        for (long r = 0; r < t.rows; r++) {
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            float *p = pairs + r * square, *w = t.weights + r * square, *d = grad_psi + r * row;
            for (long j = 0; j <= r; j++) {
                p[j] = (p[j] - mean) * inverse;
                w[j] *= inverse;
            }
            for (long j = r + 1; j < t.rows; j++) p[j] = w[j] = 0.f;
            for (long i = 0; i < vector; i += LANES) store(d + i, load(d + i) - load(later_mean + i));
        }
        multiply_lower_transposed(t.rows, vector, pairs, square, (Rows){t.phi, row}, grad_psi, row);
        multiply_lower_transposed(t.rows, wide, t.weights, square, g, grad_value, v_row);
        if (has_form(job))
            causal_form_gradients(job, b, h, start, &t, grad_psi,
                                  (Rows){sums.keys.data + start * sums.keys.row, sums.keys.row}, !first);
        for (long r = 0; r < t.rows; r++) {
            float beta = scale_of(&job->beta, b, h, start + r), *k = t.key.data + r * t.key.row;
            float *to_k = sums.keys.data + (start + r) * sums.keys.row,
                  *to_v = sums.values.data + (start + r) * sums.values.row;
            vf with_key = broadcast(0.f), sum = broadcast(0.f);
            int kept = is_kept(job, b, start + r);
            for (long i = 0; !has_form(job) && i < vector; i += LANES) {
                vf grad = kept ? load(t.psi + r * row + i) * load(grad_psi + r * row + i) : broadcast(0.f);
                if (kept) with_key += grad * load(k + i);
                sum += grad;
                store(to_k + i, first ? grad * beta : load(to_k + i) + grad * beta);
            }
            for (long j = 0; j < wide; j += LANES) {
                vf grad = kept ? load(grad_value + r * v_row + j) : broadcast(0.f);
                store(to_v + j, first ? grad : load(to_v + j) + grad);
            }
            long at = (b * job->heads + h) * job->keys + start + r;
            if (job->grad_beta && !has_form(job)) job->grad_beta[at] = total_of(with_key);
            if (job->grad_weight && !has_form(job)) job->grad_weight[at] = total_of(sum);
            float inverse = past.inverse[start + r], mean = past.mean[start + r];
            for (long j = 0; j < wide; j += LANES) store(grads + r * v_row + j, load(grads + r * v_row + j) * inverse);
            for (long i = 0; i < vector; i += LANES)
                store(later_mean + i, load(later_mean + i) + load(t.phi + r * row + i) * (inverse * mean));
        }
        multiply_transposed(D, wide, t.rows, t.phi, row, grads, v_row, later, v_row, 1);
    }
}

void causal_add_later_gradients(const Job *job, Memory before, Memory before_next, Memory memory_grad,
                                Memory memory_grad_next) {
    long v_row = row_of(job->value_width);
    for (long i = 0; i < job->width; i++) {
        float fade = expf(before.maximum[i] - before_next.maximum[i]);
        memory_grad.mass[i] += memory_grad_next.mass[i] * fade;
        for (long j = 0; j < padded(job->value_width); j++)
            memory_grad.values[i * v_row + j] += memory_grad_next.values[i * v_row + j] * fade;
    }
}

int causal_backward(const Plan *plan, long b, long key_head, Scratch scratch) {
    const Job *job = plan->job;
    long groups = job->heads / job->key_heads;
    float *buffer = malloc((part_stride(history_floats(job, 1)) + key_gradients_floats(job)) * sizeof(float));
    if (!buffer) return 1;
    Memory nothing = memory_at(take(&scratch, memory_floats(job)), job);
    clear_memory(job, nothing);
    History past = history_at(buffer, job, 0, 0, 1);
    KeyGradients sums = key_gradients(job, b, key_head, after_parts(buffer, 1, history_floats(job, 1)));
    for (long g = 0; g < groups; g++) {
        long h = key_head * groups + g;
        causal_queries_backward(plan, b, h, 0, job->keys, nothing, NULL, past, scratch);
        causal_keys_backward(plan, b, h, past, NULL, sums, g == 0, scratch);
    }
    store_key_gradients(job, b, key_head, 0, job->keys, sums);
    free(buffer);
    return 0;
}
