/* allocate.c - the verbs allocate, recycle and evict.
 *
 * Allocation evicts what it needs in the same lock hold that stages it, so that nobody else takes
 * what was freed.  A path is evicted from its tail, and the result is sorted: it is a run again.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

/* Looks at list entries per batch: second chances cost as much as evictions. */
#define BATCH_STEPS (2 * RS_BATCH)

/* -- allocate ------------------------------------------------------------------------------- */

static uint32_t evict_locked(rs_view *v, uint32_t component, uint32_t n, uint32_t reason, uint32_t *steps)
{
    if (component == RS_FULL)
        return rs_full_evict_locked(v, n, reason, steps);
    return rs_side_evict_locked(v, component, n, reason, steps);
}

static uint32_t num_listed(rs_view *v, uint32_t component)
{
    const rs_pool_view *p = &v->pool[component];
    uint64_t num = 0;
    for (uint32_t level = 0; level < RS_MAX_LEVELS; level++)
        num += rs_ld(&p->shm->lists.count[level]);
    v->corrupt |= num > p->capacity;
    return num > p->capacity ? p->capacity : (uint32_t)num;
}

/* The looks that a call may still spend on victims.  Readers may touch entries as fast as they are
 * looked at, so looks are limited: twice round the lists as they were, and twice what is wanted. */
typedef struct hunt {
    uint32_t wanted;
    uint64_t steps_left;
    bool started, exhausted;     /* exhausted: nothing is left to evict, or no look */
} hunt;

static uint32_t hunt_locked(rs_view *v, uint32_t component, uint32_t n, uint32_t reason, hunt *h)
{
    if (!h->started) {
        h->steps_left = 2ull * num_listed(v, component) + 2ull * h->wanted + BATCH_STEPS;
        h->started = true;
    }
    uint32_t given = h->steps_left < BATCH_STEPS ? (uint32_t)h->steps_left : BATCH_STEPS, steps = given;
    uint32_t num = evict_locked(v, component, n, reason, &steps);
    h->steps_left -= given - steps;
    h->exhausted = h->steps_left == 0 || (num < n && steps > 0 && !v->full);
    return num;
}

/* One batch: 1 = go on, 0 = that was all. */
static int allocate_batch(rs_view *v, uint32_t component, uint32_t n, int32_t *out, uint32_t *got, hunt *h)
{
    if (!rs_drain_locked(v))
        return 1;
    uint32_t want = rs_min(n - *got, RS_BATCH), num_free = rs_ld(&v->pool[component].shm->num_free);
    if (num_free < want)
        hunt_locked(v, component, want - num_free, RS_REASON_CAPACITY, h);
    if (rs_journal_room(v) < 6 * RS_BATCH + 16) /* runs of one slot, the counters, the commit */
        return 1; /* what was evicted stays free for the next batch, or for others */
    uint32_t staged = rs_stage_locked(v, component, want, out + *got);
    *got += staged;
    num_free = rs_ld(&v->pool[component].shm->num_free);
    v->corrupt |= staged == 0 && num_free > 0; /* the bitmap denies what the counter says */
    return *got < n && !(h->exhausted && num_free == 0);
}

/* Side pools are all or none: what cannot fit is refused before anything is evicted for it. */
static bool can_fit_locked(const rs_view *v, uint32_t component, uint32_t n)
{
    const rs_pool_view *p = &v->pool[component];
    uint64_t held = (uint64_t)rs_ld(&p->shm->num_staged) + rs_ld(&p->shm->num_pinned);
    return component == RS_FULL || held + n <= p->capacity;
}

static int compare_slots(const void *a, const void *b)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

static int give_back(rs_client *c, uint32_t component, const int32_t *slots, uint32_t *n)
{
    uint32_t done = 0;
    int rc = rs_recycle(c, component, slots, *n, &done);
    memmove((void *)slots, slots + done, (*n - done) * sizeof *slots);
    *n -= done; /* not 0 after BUSY: the caller owns what is left */
    return rc;
}

static int allocate_loop(rs_client *c, uint32_t component, uint32_t n, int32_t *out, uint32_t *got)
{
    hunt h = {.wanted = n};
    int rc = RS_OK, more = 1;
    bool first = true;
    while (more && rc == RS_OK) {
        rc = rs_verb_begin(c);
        if (rc != RS_OK)
            break;
        if (first && !can_fit_locked(&c->v, component, n))
            more = 0;
        uint32_t before = *got;
        if (more)
            more = allocate_batch(&c->v, component, n, out, got, &h);
        first = false;
        rc = rs_verb_end(c, RS_OK);
        if (rc != RS_OK)
            *got = before; /* that batch was rolled back */
    }
    return rc;
}

int rs_allocate(rs_client *c, uint32_t component, uint32_t n, int32_t *out, uint32_t *got)
{
    rs_reap_result reaped;
    *got = 0;
    int rc = rs_alive(c);
    if (rc != RS_OK)
        return rc;
    if (!rs_has(&c->v, component))
        return RS_ENOCOMPONENT;
    if (n > c->v.pool[component].capacity)
        return RS_ERANGE;
    if (n == 0)
        return RS_OK;
    (void)rs_reap_if_due(c, RS_CLIENT_REAP_NS, &reaped); /* best effort: allocation reports what it got */
    rc = allocate_loop(c, component, n, out, got);
    if (*got > 1)
        qsort(out, *got, sizeof *out, compare_slots);
    if (*got < n)
        rs_count(c, (rc == RS_EBUSY ? RS_C_BUSY_FULL : RS_C_SHORT_FULL) + component, 1);
    if (component != RS_FULL && *got < n && *got > 0) {
        int back = give_back(c, component, out, got);
        rc = rc != RS_OK ? rc : back;
    }
    return rc;
}

/* -- recycle -------------------------------------------------------------------------------- */

/* Slots as allocate hands them out: ascending, so that none is named twice. */
static bool ascending(const int32_t *slots, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        if (slots[i] <= slots[i - 1])
            return false;
    return true;
}

/* slots are in range. */
static bool any_twice(uint64_t *marks, const int32_t *slots, uint32_t n)
{
    bool twice = false;
    uint32_t i = 0;
    for (; i < n && !twice; i++) {
        uint64_t bit = 1ull << (slots[i] % 64);
        twice = marks[slots[i] / 64] & bit;
        marks[slots[i] / 64] |= bit;
    }
    while (i-- > 0)
        marks[slots[i] / 64] = 0;
    return twice;
}

int rs_check_slots(rs_client *c, uint32_t component, const int32_t *slots, uint32_t n)
{
    if (!rs_has(&c->v, component))
        return RS_ENOCOMPONENT;
    if (!rs_slots_are_mine(&c->v, component, slots, n))
        return RS_ENOTOWNER;
    return ascending(slots, n) || !any_twice(c->marks[component], slots, n) ? RS_OK : RS_EDUPLICATE;
}

static int recycle_batches(rs_client *c, uint32_t component, const int32_t *slots, uint32_t n, uint32_t *num_done)
{
    while (*num_done < n) {
        uint32_t num = rs_min(n - *num_done, RS_BATCH);
        int rc = rs_verb_begin(c);
        if (rc != RS_OK)
            return rc;
        bool mine = rs_slots_are_mine(&c->v, component, slots + *num_done, num);
        if (mine)
            rs_unstage_locked(&c->v, c->v.me, component, slots + *num_done, num);
        rc = rs_verb_end(c, mine ? RS_OK : RS_ENOTOWNER);
        if (rc != RS_OK)
            return rc;
        *num_done += num;
    }
    return RS_OK;
}

int rs_recycle(rs_client *c, uint32_t component, const int32_t *slots, uint32_t n, uint32_t *num_done)
{
    *num_done = 0;
    int rc = rs_alive(c);
    if (rc != RS_OK)
        return rc;
    pthread_mutex_lock(&c->insert_mutex);
    rc = rs_check_slots(c, component, slots, n);
    if (rc == RS_OK)
        rc = recycle_batches(c, component, slots, n, num_done);
    pthread_mutex_unlock(&c->insert_mutex);
    return rc;
}

/* -- evict ---------------------------------------------------------------------------------- */

int rs_evict(rs_client *c, uint32_t component, uint32_t n, uint32_t reason, uint32_t *num_evicted)
{
    hunt h = {.wanted = n};
    *num_evicted = 0;
    if (!rs_has(&c->v, component))
        return RS_ENOCOMPONENT;
    if (reason == RS_REASON_NONE || reason >= RS_NUM_REASONS)
        return RS_EINVAL;
    while (*num_evicted < n && !h.exhausted) {
        int rc = rs_verb_begin(c);
        if (rc != RS_OK)
            return rc;
        uint32_t num = 0;
        if (rs_drain_locked(&c->v))
            num = hunt_locked(&c->v, component, rs_min(n - *num_evicted, RS_BATCH), reason, &h);
        rc = rs_verb_end(c, RS_OK);
        if (rc != RS_OK)
            return rc;
        *num_evicted += num;
    }
    return RS_OK;
}
