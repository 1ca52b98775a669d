/* copy.h - moves blocks between engine memory and slots of the SlotStore with a crew of threads.
 *
 * A slot holds one block, contiguous.  In the engine's memory the same block is scattered; a plan
 * lists its segments:
 *
 *     engine   segment.engine + block * segment.block_stride     ---- num_bytes ---->
 *     slot     slots + slot * slot_stride + segment.slot_offset  ---- num_bytes ---->
 *
 * Segments are gathered in groups (a layer of a rank, or everything).  Groups are moved in order,
 * and each may be announced on an eventfd as soon as its bytes are in place.
 *
 * The caller vouches for the plan's addresses; block ids and slots are checked here on each run.
 */
#ifndef RADIXSHM_COPY_H
#define RADIXSHM_COPY_H

#include <stdint.h>

/* CDEF-BEGIN */
enum { COPY_TO_SLOTS = 0, COPY_FROM_SLOTS = 1 };
enum { COPY_OK = 0, COPY_EBLOCK = -1, COPY_ESLOT = -2, COPY_ENOMEM = -3, COPY_ESIGNAL = -4 };

typedef struct copy_segment {
    uint64_t engine;             /* address of block 0 */
    uint64_t block_stride;
    uint64_t num_bytes;
    uint64_t slot_offset;
    uint32_t group;              /* ascending along the array, without gaps, from 0 */
} copy_segment;

typedef struct copy_slots {
    uint64_t slots;              /* address of slot 0 */
    uint64_t slot_stride;
    int64_t num_slots;
    int64_t num_blocks;          /* of the engine memory that has the fewest */
} copy_slots;

typedef struct copy_plan copy_plan;
typedef struct copy_crew copy_crew;

/* Returns NULL when memory is short or the array is empty or its groups are out of order. */
copy_plan *copy_plan_new(const copy_segment *segments, uint32_t num_segments, const copy_slots *slots);
void copy_plan_free(copy_plan *plan);
uint32_t copy_plan_groups(const copy_plan *plan);

/* A crew of num_threads, of which the caller of copy_run is one.  NULL: errno says why. */
copy_crew *copy_crew_new(uint32_t num_threads);
void copy_crew_free(copy_crew *crew);

/* Move block blocks[i] to or from slot slots[i], for each i < n.  event_fds: NULL, or an eventfd
 * (or -1) per group.  Returns COPY_EBLOCK or COPY_ESLOT with *bad = the first bad i, nothing moved
 * and nothing signalled; COPY_ESIGNAL when everything was moved but an eventfd took no signal.
 * A crew runs one call at a time, a second caller waits; a plan may run on several crews at once. */
int copy_run(copy_crew *crew, const copy_plan *plan, int direction, const int64_t *blocks,
             const int32_t *slots, uint64_t n, const int *event_fds, uint64_t *bad);

/* Rows that a GPU's copy engine moves with one command per block. */
typedef struct copy_rows {
    uint64_t engine;             /* address of row 0 of block 0 */
    uint64_t block_stride;
    uint64_t engine_pitch;       /* from one row to the next */
    uint64_t slot_offset;
    uint64_t slot_pitch;
    uint64_t width, height;      /* bytes of a row, rows */
} copy_rows;

/* Queue the rows of blocks blocks[i] and slots slots[i], i < n, on a stream of the calling thread's
 * CUDA context.  memcpy_2d is the address of the driver's cuMemcpy2DAsync_v2 (so that building needs
 * no CUDA).  The caller has checked the ids.  Returns the driver's first error, 0 if there was none. */
int copy_enqueue(uint64_t memcpy_2d, uint64_t stream, int direction, const copy_rows *rows,
                 uint32_t num_rows, uint64_t slots_address, uint64_t slot_stride,
                 const int64_t *blocks, const int32_t *slots, uint64_t n);

/* The same for segments, of which each is a copy of its own, in as few driver calls as possible.
 * memcpy_batch is the address of cuMemcpyBatchAsync_v2, or of cuMemcpyBatchAsync of CUDA 12, whose
 * parameter that tells the failed copy (has_fail_index) is ignored. */
int copy_enqueue_batch(uint64_t memcpy_batch, int has_fail_index, uint64_t stream, int direction,
                       const copy_segment *segments, uint32_t num_segments, uint64_t slots_address,
                       uint64_t slot_stride, const int64_t *blocks, const int32_t *slots, uint64_t n);

/* memcpy of num_bytes by the crew: the limit that copy_run is measured against. */
void copy_plain(copy_crew *crew, uint64_t to, uint64_t from, uint64_t num_bytes);
/* CDEF-END */

#endif
