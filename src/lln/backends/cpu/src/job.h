/* What is to be done, by whom, and in which scratch memory. */
#ifndef LLN_JOB_H
#define LLN_JOB_H

#include <pthread.h>
#include <stdlib.h>

#include "guard.h"
#include "product.h"

#define TILE 64
/* What tiles and the arrays of a step can hold: `why_not` refuses more. */
#define MAX_WIDTH 256
#define MAX_BLOCK 1024

/* A tensor (B, heads, tokens, features); strides in elements, the last dimension contiguous. */
typedef struct {
    void *data;
    int64_t batch, head, token;
} Tensor;

/* alpha or beta: a float for each (batch, head, token), with strides of 0 where it is the same. */
typedef struct {
    float *data;
    int64_t batch, head, token;
} Scale;

/* Filled by `binding.py`, which packs the fields in this order; 8 bytes each. */
typedef struct {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    int64_t type, threads, is_causal, block_size; /* block_size 0: no blocks */
    int64_t with_lln, match_alpha, match_beta;    /* match_*: to be computed here and written to the Scale */
    Tensor query, key, value, output;
    uint8_t *keep_query, *keep_key; /* (B, tokens) bool, contiguous; NULL: all */
    Scale alpha, beta;
    /* (B, H, 2, D): the largest key of each feature, and the log of the sum of exp(beta (k - largest)). Together they are
       the log-mass L, but apart they stay exact where L is large. (B, H, D, Dv): the mean values. For the way back. */
    float *mass, *values;
    /* the matching curve: log s² over log variance, rows for key counts; or the line of `linear` */
    float *curve;
    int64_t curve_rows, curve_columns; /* 0 rows: the line */
    double log_start, log_ratio, log_first_count, log_count_ratio, line_a, line_b;
    /* backward only */
    Tensor grad_output, grad_query, grad_key, grad_value;
    float *grad_alpha, *grad_beta; /* (B, H, tokens) contiguous, or NULL */
    int64_t is_window; /* `block_size` is that of a window around each token */
    Scale key_weight;  /* log-weights of the keys, added to all features of beta k; NULL: none. Not with match_* */
    float *grad_weight; /* (B, H, keys) contiguous, or NULL; backward only */
} Job;

/* What a state keeps of its tokens (`lln.LLNState`); all tensors are contiguous. */
typedef struct {
    float *mass, *values;            /* (B, H, D) the log-mass L, (B, H, D, V) the mean values S */
    int64_t *count;                  /* (B) kept tokens */
    double *query_sums, *key_sums;   /* (B, H, 3): PrefixSums */
    void *recent_key, *recent_value; /* (B, H_k, C, D or V): kept token t at place t % C; NULL without blocks */
} State;

/* The next tokens of a state. `job` describes the tokens; its `block_size` is C, and where alpha or beta is not to be
   matched its Scale has one for each (batch, head). */
typedef struct {
    Job job;
    Tensor near;         /* the attention inside the block; data NULL: `job.output` is the mean of both */
    int64_t output_type; /* of `job.output` and `near` */
    State before, after; /* the same pointers: in place */
} Advance;

typedef struct {
    const Job *job;
    int32_t *query_order, *key_order; /* (B, tokens): kept tokens first, then the others; NULL: as they come */
    int64_t *query_count, *key_count; /* (B): how many are kept */
    int64_t chunks;                   /* pieces that the tokens of each head are cut into */
    float *parts;                     /* what the pieces hand over */
    int64_t failed;                   /* out of memory */
    int64_t taken;                    /* pieces of work that some thread has begun */
    long floats;                      /* of scratch memory for each thread; 0: scratch_floats() */
} Plan;

/* Scratch memory of a thread. It is passed by value: what a function takes of it is free again when it returns. */
typedef struct {
    float *next;
#ifdef GUARDED
    float *end; /* of the memory, guard zones included */
    long left;  /* floats that an ordinary build has left, which has no guard zones */
#endif
} Scratch;

INLINE long padded(long width) { return (width + LANES - 1) / LANES * LANES; }
/* Rows of scratch tiles lie a cache line further apart than needed, or rows would share few sets of the cache. */
INLINE long row_of(long width) { return padded(width) + 16; }
INLINE long at_most(long x, long y) { return x < y ? x : y; }
INLINE long at_least(long x, long y) { return x > y ? x : y; }

#ifdef GUARDED
/* Leave access to the floats that are taken now and to none behind them: there are a guard zone and the parts of
   functions that have returned. The extent is what was asked for, not what it is rounded up to: callers that load and
   store whole vectors ask for whole vectors. */
static void guard_rest(Scratch *scratch, long floats) {
    long whole = (floats + 15) / 16 * 16;
    if (floats > scratch->left || whole + GUARD > scratch->end - scratch->next) {
        fprintf(stderr, "take: %ld floats asked for, scratch_floats() leaves %ld, %ld with MOST_GUARDS guard zones\n",
                floats, scratch->left, (long)(scratch->end - scratch->next));
        abort();
    }
    forbid(scratch->next, scratch->end);
    permit(scratch->next, floats);
    scratch->left -= whole;
}
#endif

INLINE float *take(Scratch *scratch, long floats) {
    float *taken = scratch->next;
#ifdef GUARDED
    guard_rest(scratch, floats);
#endif
    scratch->next += (floats + 15) / 16 * 16 + GUARD;
    return taken;
}

/* Floats from one of several equal parts of an allocation to the next. */
INLINE long apart(long floats) { return floats + GUARD; }

/* What follows `count` parts in memory; guarded, no access to the guard zones between them. */
INLINE float *behind(float *parts, long count, long floats) {
#ifdef GUARDED
    for (long i = 0; i < count; i++) forbid(parts + i * apart(floats) + floats, parts + (i + 1) * apart(floats));
#endif
    return parts + count * apart(floats);
}

INLINE float *take_zeros(Scratch *scratch, long floats) {
    float *taken = take(scratch, floats);
    memset(taken, 0, floats * sizeof(float));
    return taken;
}

INLINE float *take_filled(Scratch *scratch, long floats, float value) {
    float *taken = take(scratch, floats);
    for (long i = 0; i < floats; i++) taken[i] = value;
    return taken;
}

INLINE char *head_of(const Tensor *x, long type, long batch, long head) {
    return (char *)x->data + (batch * x->batch + head * x->head) * bytes_of(type);
}

INLINE float scale_of(const Scale *x, long batch, long head, long token) {
    return x->data[batch * x->batch + head * x->head + token * x->token];
}

INLINE long token_at(const int32_t *order, long place) { return order ? order[place] : place; }

/* Tokens at places `first` ... of a head as rows of floats; what lies between `width` and the next vector is zero. */
INLINE void read_typed(const long type, const char *head, long stride, const int32_t *order, long first, long count,
                       long width, float *to, long row) {
    for (long r = 0; r < count; r++, to += row) {
        read_row(type, head + token_at(order, first + r) * stride * bytes_of(type), width, to);
        for (long i = width; i < padded(width); i++) to[i] = 0.f;
    }
}

static void read_tile(long type, const char *head, long stride, const int32_t *order, long first, long count,
                      long width, float *to, long row) {
    if (type == FLOAT32) read_typed(FLOAT32, head, stride, order, first, count, width, to, row);
    else if (type == BFLOAT16) read_typed(BFLOAT16, head, stride, order, first, count, width, to, row);
    else read_typed(FLOAT16, head, stride, order, first, count, width, to, row);
}

static void write_tile(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                       const float *from, long row) {
    for (long r = 0; r < count; r++, from += row) {
        void *to = head + token_at(order, first + r) * stride * bytes_of(type);
        if (type == FLOAT32) write_row(FLOAT32, from, width, to);
        else if (type == BFLOAT16) write_row(BFLOAT16, from, width, to);
        else write_row(FLOAT16, from, width, to);
    }
}

/* Rows of floats: of a tile, or of a tensor as it lies in memory. */
typedef struct {
    float *data;
    long row;
} Rows;

INLINE int is_direct(long type, const int32_t *order, long width) {
    return type == FLOAT32 && !order && width == padded(width);
}

/* Tokens at places `first` ... of a head: where they lie if they are floats in sequence, else copied to `spare`. */
static Rows view(long type, const char *head, long stride, const int32_t *order, long first, long count, long width,
                 float *spare) {
    if (is_direct(type, order, width)) return (Rows){(float *)head + first * stride, stride};
    read_tile(type, head, stride, order, first, count, width, spare, row_of(width));
    return (Rows){spare, row_of(width)};
}

/* The tile after the one that ends at place `end`, or nothing where tokens are picked. */
INLINE Ahead tile_after(long type, const char *head, long stride, const int32_t *order, long end, long last,
                        long width) {
    long rows = order ? 0 : at_most(TILE, last - end);
    return (Ahead){head + end * stride * bytes_of(type), stride * bytes_of(type), width * bytes_of(type), rows};
}

/* Room for results at places `first` ...: their own, or `spare`, from which `put` brings them there. */
static Rows room(long type, char *head, long stride, const int32_t *order, long first, long width, float *spare) {
    if (is_direct(type, order, width)) return (Rows){(float *)head + first * stride, stride};
    return (Rows){spare, row_of(width)};
}

static void put(long type, char *head, long stride, const int32_t *order, long first, long count, long width,
                Rows from) {
    if (!is_direct(type, order, width)) write_tile(type, head, stride, order, first, count, width, from.data, from.row);
}

/* Tokens that softmax attention needs at once: a block, or the windows of a tile of queries. */
INLINE long near_size(const Job *job) {
    return at_most(job->is_window ? job->block_size - 1 + TILE : job->block_size, job->keys);
}

/* Scratch of one thread, enough for every step: tiles, blocks of softmax attention, and matrices of a head. */
static long scratch_floats(const Job *job) {
    long wide = row_of(at_least(job->width, job->value_width));
    long block = job->block_size ? at_least(near_size(job), TILE) : TILE;
    long block_row = row_of(block);
    return 20 * TILE * wide + 8 * wide * wide + 5 * TILE * block_row + 4 * wide * block_row + 5 * block * wide + 64 *
            wide;
}

/* Threads are those of torch: its OpenMP library hands over these two, or else everything runs in one thread. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel omp_parallel;
static void (*omp_barrier)(void);
static int (*omp_thread)(void);
static int (*omp_team)(void);

typedef void (*Work)(Plan *, long thread, long threads, Scratch *);
typedef struct {
    Plan *plan;
    Work work;
} Team;

/* Each thread keeps its scratch memory for the next job: fresh memory costs more than a short job takes. */
static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

static float *own_scratch(long floats) {
    long *memory = pthread_getspecific(scratch_key); /* its size, and from the next cache line on the floats */
    if (!memory || *memory < floats || GUARD) { /* guarded: afresh, so that it ends where this job's does */
        free(memory);
        memory = malloc((floats + 32) * sizeof(float));
        if (memory) *memory = floats;
        pthread_setspecific(scratch_key, memory);
    }
    return memory ? (float *)(((uintptr_t)memory + 127) & ~(uintptr_t)63) : NULL;
}

static Scratch begin_scratch(float *memory, long floats) {
#ifdef GUARDED
    Scratch scratch = {memory + GUARD, memory + floats + MOST_GUARDS * GUARD, floats};
    forbid(memory, scratch.end);
    return scratch;
#else
    (void)floats;
    return (Scratch){memory};
#endif
}

static void work_in_team(void *argument) {
    Team *team = argument;
    long floats = team->plan->floats ? team->plan->floats : scratch_floats(team->plan->job);
    float *memory = own_scratch(floats + MOST_GUARDS * GUARD);
    Scratch scratch = {0};
    if (memory) scratch = begin_scratch(memory, floats);
    else team->plan->failed = 1;
    int alone = !omp_parallel || team->plan->job->threads < 2;
    team->work(team->plan, alone ? 0 : omp_thread(), alone ? 1 : omp_team(), memory ? &scratch : NULL);
}

#define EACH(index, thread, threads, total) for (long index = thread; index < (total); index += threads)
/* The same for work that shares nothing: whoever is free takes the next, so that no one waits for a disturbed core. */
#define NEXT(index, plan, total) \
    for (long index; (index = __atomic_fetch_add(&(plan)->taken, 1, __ATOMIC_RELAXED)) < (total);)

static void wait_for_all(long threads) {
    if (threads > 1) omp_barrier();
}

static void run(Plan *plan, Work work) {
    Team team = {plan, work};
    pthread_once(&scratch_once, make_scratch_key);
    if (omp_parallel && plan->job->threads > 1) omp_parallel(work_in_team, &team, (unsigned)plan->job->threads, 0);
    else work_in_team(&team);
}

/* In how many pieces to cut each head so that all threads have about the same to do; the same for the same job. Work
   that is cut takes `toll` times as long in all. */
static long choose_chunks(long heads, long tokens, long threads, double toll) {
    long most = at_least(1, at_most(threads, tokens / (2 * TILE))), best = 1;
    double least = 0;
    for (long chunks = 1; chunks <= most; chunks++) {
        long rounds = (heads * chunks + threads - 1) / threads;
        double time = (double)rounds / chunks * (chunks > 1 ? toll : 1.);
        if (chunks > 1 && time >= 0.85 * least) continue; /* more pieces are worth it if they save a good deal */
        least = time;
        best = chunks;
    }
    return best;
}

/* Tokens of piece `chunk`: whole tiles, or whole blocks, so that the cut moves no tile. */
INLINE long chunk_start(long tokens, long chunk, long chunks, long step) {
    long steps = (tokens + step - 1) / step;
    return at_most(tokens, steps * chunk / chunks * step);
}

#endif
