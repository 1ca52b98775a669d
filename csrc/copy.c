/* copy.c - see copy.h.
 *
 * A run is cut into units of about UNIT_BYTES that the threads take from a counter, in order, so
 * that groups finish in order and no thread waits for another.  A unit is either some bytes of one
 * block (group larger than a unit) or several whole blocks (group smaller than a unit).
 *
 * A helper that wakes late finds the job withdrawn and sleeps on: the caller waits only for
 * helpers that took the job (num_busy).
 */
#define _GNU_SOURCE
#include "copy.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Taking a unit costs about 0.1 us, moving it 25 us or more; and 16 threads still share one block
 * of 4 MiB evenly. */
#define UNIT_BYTES (256u << 10)
/* Shorter runs stay in the cache: the write-combining buffers would be flushed half full. */
#define STREAM_MIN_BYTES 1024u

typedef struct group {
    uint32_t first, end;         /* segments */
    uint64_t num_bytes;          /* of one block */
    uint64_t units_per_block;    /* 1 when blocks_per_unit > 1 */
    uint64_t blocks_per_unit;
} group;

struct copy_plan {
    copy_slots slots;
    copy_segment *segments;
    uint64_t *starts;            /* of a segment within its group's bytes of a block */
    group *groups;
    uint32_t num_segments, num_groups;
};

typedef struct job {
    const copy_plan *plan;       /* NULL: plain copy */
    int direction;
    const int64_t *blocks;
    const int32_t *slots;
    uint64_t n;
    const int *event_fds;
    uint64_t *first_unit;        /* [num_groups + 1] */
    _Atomic uint64_t *units_left;
    uint8_t *plain_to;
    const uint8_t *plain_from;
    uint64_t plain_bytes;
    uint64_t num_units;
    _Atomic uint64_t next_unit;
    atomic_bool signal_failed;
} job;

struct copy_crew {
    pthread_mutex_t run_lock;    /* held for a whole run */
    pthread_mutex_t lock;        /* the fields below */
    pthread_cond_t work, idle;
    job *current;
    uint64_t job_number;
    uint32_t num_busy, num_helpers;
    bool stop;
    bool stream;                 /* the processor has the instructions of stream_copy */
    pthread_t helpers[];
};

/* -- moving bytes -------------------------------------------------------------------------- */

#if defined(__x86_64__)
/* Stores past the cache: neither side is read again soon, and an ordinary store would first read
 * the line it overwrites. */
__attribute__((target("avx2"))) static void stream_copy(uint8_t *to, const uint8_t *from, uint64_t n)
{
    uint64_t head = (uint64_t)(-(uintptr_t)to & 31);
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 128; to += 128, from += 128, n -= 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from);
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + 96));
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
        _mm256_stream_si256((__m256i *)(to + 64), c);
        _mm256_stream_si256((__m256i *)(to + 96), d);
    }
    memcpy(to, from, n);
}

static bool can_stream(void) { return __builtin_cpu_supports("avx2"); }
/* Streamed stores are not ordered by a release store; this orders them. */
static void stream_fence(void) { _mm_sfence(); }
#else
static void stream_copy(uint8_t *to, const uint8_t *from, uint64_t n) { memcpy(to, from, n); }
static bool can_stream(void) { return false; }
static void stream_fence(void) { }
#endif

static void copy_bytes(const copy_crew *crew, uint8_t *to, const uint8_t *from, uint64_t n)
{
    if (crew->stream && n >= STREAM_MIN_BYTES)
        stream_copy(to, from, n);
    else
        memcpy(to, from, n);
}

static uint8_t *at(uint64_t address) { return (uint8_t *)(uintptr_t)address; }

/* Bytes [begin, end) of group g of block number i of the job. */
static void move_range(const copy_crew *crew, const job *j, const group *g, uint64_t i, uint64_t begin,
                       uint64_t end)
{
    const copy_plan *plan = j->plan;
    uint32_t s = g->first;
    for (uint32_t above = g->end; above - s > 1;) {      /* last segment that starts at or before begin */
        uint32_t middle = s + (above - s) / 2;
        if (plan->starts[middle] <= begin)
            s = middle;
        else
            above = middle;
    }
    uint8_t *slot = at(plan->slots.slots) + (uint64_t)j->slots[i] * plan->slots.slot_stride;
    for (; begin < end; s++) {
        const copy_segment *segment = &plan->segments[s];
        uint64_t skip = begin - plan->starts[s], n = segment->num_bytes - skip;
        if (n > end - begin)
            n = end - begin;
        uint8_t *engine = at(segment->engine) + (uint64_t)j->blocks[i] * segment->block_stride + skip;
        uint8_t *host = slot + segment->slot_offset + skip;
        if (j->direction == COPY_TO_SLOTS)
            copy_bytes(crew, host, engine, n);
        else
            copy_bytes(crew, engine, host, n);
        begin += n;
    }
}

static void move_unit(const copy_crew *crew, const job *j, const group *g, uint64_t unit)
{
    if (g->units_per_block > 1) {
        uint64_t begin = unit % g->units_per_block * UNIT_BYTES, end = begin + UNIT_BYTES;
        move_range(crew, j, g, unit / g->units_per_block, begin, end < g->num_bytes ? end : g->num_bytes);
        return;
    }
    uint64_t first = unit * g->blocks_per_unit, last = first + g->blocks_per_unit;
    for (uint64_t i = first; i < last && i < j->n; i++)
        move_range(crew, j, g, i, 0, g->num_bytes);
}

static void move_plain(const job *j, uint64_t unit)
{
    uint64_t share = (j->plain_bytes + j->num_units - 1) / j->num_units, begin = unit * share;
    if (begin < j->plain_bytes)
        memcpy(j->plain_to + begin, j->plain_from + begin,
               share < j->plain_bytes - begin ? share : j->plain_bytes - begin);
}

/* -- running a job ------------------------------------------------------------------------- */

static void signal_group(job *j, uint32_t g)
{
    static const uint64_t one = 1;
    if (j->event_fds == NULL || j->event_fds[g] < 0)
        return;
    if (write(j->event_fds[g], &one, sizeof one) != sizeof one)
        atomic_store(&j->signal_failed, true);
}

static void take_units(const copy_crew *crew, job *j)
{
    uint64_t unit;
    uint32_t g = 0;
    while ((unit = atomic_fetch_add_explicit(&j->next_unit, 1, memory_order_relaxed)) < j->num_units) {
        if (j->plan == NULL) {
            move_plain(j, unit);
            continue;
        }
        while (unit >= j->first_unit[g + 1])
            g++;
        move_unit(crew, j, &j->plan->groups[g], unit - j->first_unit[g]);
        stream_fence();
        if (atomic_fetch_sub_explicit(&j->units_left[g], 1, memory_order_acq_rel) == 1)
            signal_group(j, g);
    }
}

static void *help(void *argument)
{
    copy_crew *crew = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&crew->lock);
    while (!crew->stop) {
        if (crew->current == NULL || crew->job_number == seen) {
            pthread_cond_wait(&crew->work, &crew->lock);
            continue;
        }
        job *j = crew->current;
        seen = crew->job_number;
        crew->num_busy++;
        pthread_mutex_unlock(&crew->lock);
        take_units(crew, j);
        pthread_mutex_lock(&crew->lock);
        if (--crew->num_busy == 0)
            pthread_cond_signal(&crew->idle);
    }
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

static void run_job(copy_crew *crew, job *j)
{
    pthread_mutex_lock(&crew->run_lock);
    if (j->num_units > 1 && crew->num_helpers > 0) {
        pthread_mutex_lock(&crew->lock);
        crew->current = j;
        crew->job_number++;
        pthread_cond_broadcast(&crew->work);
        pthread_mutex_unlock(&crew->lock);
    }
    take_units(crew, j);
    pthread_mutex_lock(&crew->lock);
    crew->current = NULL;
    while (crew->num_busy > 0)
        pthread_cond_wait(&crew->idle, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    pthread_mutex_unlock(&crew->run_lock);
}

static int check_ids(const copy_plan *plan, const int64_t *blocks, const int32_t *slots, uint64_t n,
                     uint64_t *bad)
{
    for (uint64_t i = 0; i < n; i++) {
        *bad = i;
        if (blocks[i] < 0 || blocks[i] >= plan->slots.num_blocks)
            return COPY_EBLOCK;
        if (slots[i] < 0 || slots[i] >= plan->slots.num_slots)
            return COPY_ESLOT;
    }
    return COPY_OK;
}

int copy_run(copy_crew *crew, const copy_plan *plan, int direction, const int64_t *blocks,
             const int32_t *slots, uint64_t n, const int *event_fds, uint64_t *bad)
{
    int rc = check_ids(plan, blocks, slots, n, bad);
    if (rc != COPY_OK)
        return rc;
    job j = {.plan = plan, .direction = direction, .blocks = blocks, .slots = slots, .n = n,
             .event_fds = event_fds};
    j.first_unit = calloc(plan->num_groups + 1, sizeof *j.first_unit);
    j.units_left = calloc(plan->num_groups, sizeof *j.units_left);
    if (j.first_unit == NULL || j.units_left == NULL) {
        free(j.first_unit);
        free(j.units_left);
        return COPY_ENOMEM;
    }
    for (uint32_t g = 0; g < plan->num_groups; g++) {
        const group *of = &plan->groups[g];
        uint64_t units = (n + of->blocks_per_unit - 1) / of->blocks_per_unit * of->units_per_block;
        j.first_unit[g + 1] = j.first_unit[g] + units;
        atomic_init(&j.units_left[g], units);
        if (units == 0)
            signal_group(&j, g);
    }
    j.num_units = j.first_unit[plan->num_groups];
    run_job(crew, &j);
    free(j.first_unit);
    free(j.units_left);
    return atomic_load(&j.signal_failed) ? COPY_ESIGNAL : COPY_OK;
}

void copy_plain(copy_crew *crew, uint64_t to, uint64_t from, uint64_t num_bytes)
{
    job j = {.plain_to = at(to), .plain_from = at(from), .plain_bytes = num_bytes};
    j.num_units = crew->num_helpers + 1;
    run_job(crew, &j);
}

/* -- plans and crews ----------------------------------------------------------------------- */

static bool groups_in_order(const copy_segment *segments, uint32_t num_segments)
{
    if (num_segments == 0 || segments[0].group != 0)
        return false;
    for (uint32_t s = 1; s < num_segments; s++)
        if (segments[s].group - segments[s - 1].group > 1)       /* unsigned: also a step back */
            return false;
    return true;
}

static void fill_groups(copy_plan *plan)
{
    for (uint32_t s = 0; s < plan->num_segments; s++) {
        group *g = &plan->groups[plan->segments[s].group];
        if (g->end == 0)
            g->first = s;
        plan->starts[s] = g->num_bytes;
        g->num_bytes += plan->segments[s].num_bytes;
        g->end = s + 1;
    }
    for (uint32_t i = 0; i < plan->num_groups; i++) {
        group *g = &plan->groups[i];
        g->blocks_per_unit = g->num_bytes < UNIT_BYTES && g->num_bytes > 0 ? UNIT_BYTES / g->num_bytes : 1;
        g->units_per_block = g->num_bytes > UNIT_BYTES ? (g->num_bytes + UNIT_BYTES - 1) / UNIT_BYTES : 1;
    }
}

copy_plan *copy_plan_new(const copy_segment *segments, uint32_t num_segments, const copy_slots *slots)
{
    if (!groups_in_order(segments, num_segments))
        return NULL;
    copy_plan *plan = calloc(1, sizeof *plan);
    if (plan == NULL)
        return NULL;
    plan->slots = *slots;
    plan->num_segments = num_segments;
    plan->num_groups = segments[num_segments - 1].group + 1;
    plan->segments = malloc(num_segments * sizeof *segments);
    plan->starts = calloc(num_segments, sizeof *plan->starts);
    plan->groups = calloc(plan->num_groups, sizeof *plan->groups);
    if (plan->segments == NULL || plan->starts == NULL || plan->groups == NULL) {
        copy_plan_free(plan);
        return NULL;
    }
    memcpy(plan->segments, segments, num_segments * sizeof *segments);
    fill_groups(plan);
    return plan;
}

void copy_plan_free(copy_plan *plan)
{
    if (plan == NULL)
        return;
    free(plan->segments);
    free(plan->starts);
    free(plan->groups);
    free(plan);
}

uint32_t copy_plan_groups(const copy_plan *plan) { return plan->num_groups; }

copy_crew *copy_crew_new(uint32_t num_threads)
{
    uint32_t num_helpers = num_threads > 1 ? num_threads - 1 : 0;
    copy_crew *crew = calloc(1, sizeof *crew + num_helpers * sizeof crew->helpers[0]);
    if (crew == NULL)
        return NULL;
    pthread_mutex_init(&crew->run_lock, NULL);
    pthread_mutex_init(&crew->lock, NULL);
    pthread_cond_init(&crew->work, NULL);
    pthread_cond_init(&crew->idle, NULL);
    crew->stream = can_stream();
    for (; crew->num_helpers < num_helpers; crew->num_helpers++) {
        int error = pthread_create(&crew->helpers[crew->num_helpers], NULL, help, crew);
        if (error != 0) {
            copy_crew_free(crew);
            errno = error;
            return NULL;
        }
    }
    return crew;
}

void copy_crew_free(copy_crew *crew)
{
    if (crew == NULL)
        return;
    pthread_mutex_lock(&crew->lock);
    crew->stop = true;
    pthread_cond_broadcast(&crew->work);
    pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->num_helpers; i++)
        pthread_join(crew->helpers[i], NULL);
    pthread_cond_destroy(&crew->idle);
    pthread_cond_destroy(&crew->work);
    pthread_mutex_destroy(&crew->lock);
    pthread_mutex_destroy(&crew->run_lock);
    free(crew);
}

/* -- copy engines of a GPU ----------------------------------------------------------------- */

/* CUDA_MEMCPY2D_v2 of the driver API, whose ABI is fixed. */
typedef struct memcpy_side {
    size_t x_bytes, y;
    unsigned int memory_type;
    const void *host;
    uint64_t device;
    void *array;
    size_t pitch;
} memcpy_side;

typedef struct memcpy_2d {
    memcpy_side from, to;
    size_t width, height;
} memcpy_2d;

enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };
_Static_assert(sizeof(memcpy_2d) == 128, "CUDA_MEMCPY2D_v2 has 128 bytes");

int copy_enqueue(uint64_t memcpy_2d_address, uint64_t stream, int direction, const copy_rows *rows,
                 uint32_t num_rows, uint64_t slots_address, uint64_t slot_stride,
                 const int64_t *blocks, const int32_t *slots, uint64_t n)
{
    int (*enqueue)(const memcpy_2d *, void *) = (int (*)(const memcpy_2d *, void *))(uintptr_t)memcpy_2d_address;
    for (uint64_t i = 0; i < n; i++) {
        for (const copy_rows *r = rows; r < rows + num_rows; r++) {
            memcpy_side engine = {.memory_type = MEMORY_DEVICE, .pitch = r->engine_pitch,
                                  .device = r->engine + (uint64_t)blocks[i] * r->block_stride};
            memcpy_side slot = {.memory_type = MEMORY_HOST, .pitch = r->slot_pitch,
                                .host = at(slots_address + (uint64_t)slots[i] * slot_stride + r->slot_offset)};
            memcpy_2d copy = {.from = engine, .to = slot, .width = r->width, .height = r->height};
            if (direction == COPY_FROM_SLOTS)
                copy.from = slot, copy.to = engine;
            int error = enqueue(&copy, at(stream));
            if (error != 0)
                return error;
        }
    }
    return 0;
}

/* Copies of one driver call: the copy engine works on one call while the next is prepared. */
enum { BATCH_COPIES = 128 };

/* CUmemcpyAttributes: sources are read in the stream's order, no hints. */
typedef struct memcpy_attributes {
    int source_order;
    int hints[4];
    unsigned int flags;
} memcpy_attributes;

typedef struct batch {
    uint64_t to[BATCH_COPIES], from[BATCH_COPIES];
    size_t sizes[BATCH_COPIES];
    size_t num_copies;
} batch;

typedef int (*memcpy_batch)(const uint64_t *, const uint64_t *, const size_t *, size_t, const memcpy_attributes *,
                            const size_t *, size_t, void *);
typedef int (*memcpy_batch_12)(const uint64_t *, const uint64_t *, const size_t *, size_t,
                               const memcpy_attributes *, const size_t *, size_t, size_t *, void *);

static int flush_batch(uint64_t function, int has_fail_index, uint64_t stream, batch *b)
{
    static const memcpy_attributes attributes = {.source_order = 1};
    static const size_t first = 0;       /* the attributes hold from this copy on */
    size_t num_copies = b->num_copies, failed;
    b->num_copies = 0;
    if (num_copies == 0)
        return 0;
    if (has_fail_index)
        return ((memcpy_batch_12)(uintptr_t)function)(b->to, b->from, b->sizes, num_copies, &attributes,
                                                      &first, 1, &failed, at(stream));
    return ((memcpy_batch)(uintptr_t)function)(b->to, b->from, b->sizes, num_copies, &attributes, &first, 1,
                                               at(stream));
}

int copy_enqueue_batch(uint64_t function, int has_fail_index, uint64_t stream, int direction,
                       const copy_segment *segments, uint32_t num_segments, uint64_t slots_address,
                       uint64_t slot_stride, const int64_t *blocks, const int32_t *slots, uint64_t n)
{
    batch b;
    b.num_copies = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t slot = slots_address + (uint64_t)slots[i] * slot_stride;
        for (const copy_segment *s = segments; s < segments + num_segments; s++) {
            uint64_t engine = s->engine + (uint64_t)blocks[i] * s->block_stride;
            uint64_t host = slot + s->slot_offset;
            b.to[b.num_copies] = direction == COPY_TO_SLOTS ? host : engine;
            b.from[b.num_copies] = direction == COPY_TO_SLOTS ? engine : host;
            b.sizes[b.num_copies++] = s->num_bytes;
            int error = b.num_copies < BATCH_COPIES ? 0 : flush_batch(function, has_fail_index, stream, &b);
            if (error != 0)
                return error;
        }
    }
    return flush_batch(function, has_fail_index, stream, &b);
}
