/* Which thread computes what: whole heads, or heads in chunks whose results are merged in their order. */
#ifndef LLN_HEADS_H
#define LLN_HEADS_H

#include "threads.h"

typedef struct {
    long batch, head, chunk;
} Item;

INLINE Item item_at(long index, long heads, long chunks) {
    return (Item){index / chunks / heads, index / chunks % heads, index % chunks};
}

/* A head at a time: nothing is shared. */
void whole_heads(Plan *plan, long thread, long threads, Scratch *scratch);

/* Where heads share keys or are cut into chunks: in steps, with a barrier after each. */
void chunked_heads(Plan *plan, long thread, long threads, Scratch *scratch);

INLINE long chunk_of(const Plan *plan, long chunk) { return chunk_start(plan->job->keys, chunk, plan->chunks, TILE); }

/* The memory of every chunk of a head but the last, ... */
void causal_sum_chunk(Plan *plan, long index, Scratch scratch);

/* ... and then the memories are joined, so that each chunk has that of all before it. */
void causal_join_chunks(Plan *plan, long head);

/* Causal attention where heads are too few for the threads: every chunk after the first needs the memory of those
   before. */
void causal_chunked_heads(Plan *plan, long thread, long threads, Scratch *scratch);

/* Gradients of whole key heads and the query heads that share them: first of the queries, with dL and dS, then of the
   keys; blocks last, added to what is there. */
void whole_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch);

/* The same in steps, with a barrier after each, where heads are cut into chunks. */
void chunked_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch);

void causal_chunked_heads_backward(Plan *plan, long thread, long threads, Scratch *scratch);

/* Floats of the results of all chunks. */
long causal_parts(const Plan *plan);

long causal_parts_backward(const Plan *plan);

#endif
