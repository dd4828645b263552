#include "threads.h"

/* Threads are those of torch: its OpenMP library has these functions, or else everything runs in one thread. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel omp_parallel;
static void (*omp_barrier)(void);
static int (*omp_thread)(void);
static int (*omp_team)(void);

typedef struct {
    Plan *plan;
    Work work;
} Team;

static void work_in_team(void *argument) {
    Team *team = argument;
    long floats = team->plan->floats ? team->plan->floats : scratch_floats(team->plan->job);
    float *memory = own_scratch(floats + MAX_GUARDS * GUARD);
    Scratch scratch = {0};
    if (memory) scratch = begin_scratch(memory, floats);
    else team->plan->failed = 1;
    int alone = !omp_parallel || team->plan->job->threads < 2;
    team->work(team->plan, alone ? 0 : omp_thread(), alone ? 1 : omp_team(), memory ? &scratch : NULL);
}

void wait_for_all(long threads) {
    if (threads > 1) omp_barrier();
}

void run(Plan *plan, Work work) {
    Team team = {plan, work};
    if (omp_parallel && plan->job->threads > 1) omp_parallel(work_in_team, &team, (unsigned)plan->job->threads, 0);
    else work_in_team(&team);
}

long choose_chunks(long heads, long tokens, long threads, double toll) {
    long maximum = at_least(1, at_most(threads, tokens / (2 * TILE))), best = 1;
    double least = 0;
    for (long chunks = 1; chunks <= maximum; chunks++) {
        long rounds = (heads * chunks + threads - 1) / threads;
        double time = (double)rounds / chunks * (chunks > 1 ? toll : 1.);
        if (chunks > 1 && time >= 0.85 * least) continue; /* more pieces are worth it if they save a good deal */
        least = time;
        best = chunks;
    }
    return best;
}

EXPORT void lln_use_threads(Parallel parallel, void (*barrier)(void), int (*thread)(void), int (*team)(void)) {
    omp_parallel = parallel;
    omp_barrier = barrier;
    omp_thread = thread;
    omp_team = team;
}
