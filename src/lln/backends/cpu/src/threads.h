/* Work that is shared by the threads of torch. */
#ifndef LLN_THREADS_H
#define LLN_THREADS_H

#include "scratch.h"

typedef void (*Work)(Plan *, long thread, long threads, Scratch *);

#define EACH(index, thread, threads, total) for (long index = thread; index < (total); index += threads)
/* The same for work that shares nothing: a free thread takes the next item, so that none waits for a busy core. */
#define NEXT(index, plan, total)                                                                                       \
    for (long index; (index = __atomic_fetch_add(&(plan)->taken, 1, __ATOMIC_RELAXED)) < (total);)

void wait_for_all(long threads);
void run(Plan *plan, Work work);

/* In how many pieces to cut each head so that all threads have about the same to do; the same for the same job. Work
   that is cut takes `toll` times as long in all. */
long choose_chunks(long heads, long tokens, long threads, double toll);

/* Tokens of piece `chunk`: whole tiles, or whole blocks, so that the cut moves no tile. */
INLINE long chunk_start(long tokens, long chunk, long chunks, long step) {
    long steps = (tokens + step - 1) / step;
    return at_most(tokens, steps * chunk / chunks * step);
}

#endif
