/* garbage.h - a region with bytes overwritten, and everything that may be done to it. */
#ifndef RS_TEST_GARBAGE_H
#define RS_TEST_GARBAGE_H

#include "harness.h"

/* Patches a well-filled region as the input says and runs every entry point on it, attached before
 * and after.  Any result will do, but each call must return, within its memory and in time. */
void garbage_try(const uint8_t *input, size_t num_bytes);

#endif
