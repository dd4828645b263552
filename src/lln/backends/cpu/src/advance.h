/* The next tokens of a state: their outputs, and the state after them.

   Several go tile by tile through `causal_attend`, with the state as the memory of what came before; one token goes
   through step.c. */
#ifndef LLN_ADVANCE_H
#define LLN_ADVANCE_H

#include "scratch.h"

/* Several tokens. Recent ones are replaced when no head needs the old ones any more. */
void advance_heads(Plan *plan, long thread, long threads, Scratch *scratch);

/* Scratch of one thread: that of causal attention, the tiles of the new tokens and the copy of `Neighbours`, of at most
   twice as many tokens as a window has. */
long advance_floats(const Advance *a);

#endif
