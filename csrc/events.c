/* events.c - the ring of stored, removed and cleared blocks.
 *
 * A writer (the lock holder) fills the entry at ev_pos, its number cleared first and stored last;
 * nobody may read it until the batch has committed and ev_head moved past it.  A batch that is
 * rolled back leaves its entries above ev_head: they are overwritten by the next.
 *
 *      ... | committed, readable | being written |
 *                            ev_head          ev_pos
 *
 * A reader copies an entry below ev_head, then looks at the number again: another number than the
 * one asked for means the ring went round meanwhile, and the reader starts over at the oldest entry.
 */
#include "core.h"

void rs_event_locked(rs_view *v, uint32_t kind, uint32_t reason, uint32_t component, uint64_t hash, rs_slot parent)
{
    if (v->plan.event_capacity == 0)
        return;
    rs_event_shm *e = &v->events[v->ev_pos & (v->plan.event_capacity - 1)];
    uint64_t has_parent = parent < v->pool[RS_FULL].capacity;
    uint64_t me = v->me & 0xffff;
    rs_raw(&e->number, 0);
    atomic_thread_fence(memory_order_release); /* cleared before any other field changes */
    rs_raw(&e->hash, hash);
    rs_raw(&e->parent_hash, has_parent ? rs_ld(&v->node[parent].hash) : 0);
    rs_raw(&e->what, kind | reason << 8 | component << 16 | has_parent << 24 | me << 32);
    rs_raw(&e->incarnation, me < v->config.max_clients ? rs_ld(&v->clients[me].incarnation) : 0);
    v->ev_pos++;
    atomic_store_explicit(&e->number, v->ev_pos, memory_order_release);
}

void rs_events_stored_locked(rs_view *v, const uint64_t *hashes, uint32_t n, rs_slot parent)
{
    rs_event_shm *events = v->events;
    uint64_t mask = v->plan.event_capacity - 1, position = v->ev_pos, me = v->me & 0xffff;
    uint64_t has_parent = parent < v->pool[RS_FULL].capacity, parent_hash = has_parent ? rs_ld(&v->node[parent].hash) : 0;
    uint64_t incarnation = me < v->config.max_clients ? rs_ld(&v->clients[me].incarnation) : 0;
    if (v->plan.event_capacity == 0)
        return;
    for (uint32_t i = 0; i < n; i++) {
        rs_event_shm *e = &events[position++ & mask];
        rs_raw(&e->number, 0);
        atomic_thread_fence(memory_order_release); /* as in rs_event_locked() */
        rs_raw(&e->hash, hashes[i]);
        rs_raw(&e->parent_hash, parent_hash);
        rs_raw(&e->what, RS_EVENT_STORED | (uint64_t)RS_FULL << 16 | has_parent << 24 | me << 32);
        rs_raw(&e->incarnation, incarnation);
        atomic_store_explicit(&e->number, position, memory_order_release);
        has_parent = 1;
        parent_hash = hashes[i];
    }
    v->ev_pos = position;
}

uint64_t rs_event_head(const rs_client *c) { return rs_ld_acq(&c->v.hdr->ev_head); }

/* Copy entry `position`; false when it is not (or no longer) there. */
static bool copy_event(const rs_view *v, uint64_t position, rs_event *out)
{
    rs_event_shm *e = &v->events[position & (v->plan.event_capacity - 1)];
    if (rs_ld_acq(&e->number) != position + 1)
        return false;
    uint64_t what = rs_ld(&e->what);
    *out = (rs_event){.number = position, .hash = rs_ld(&e->hash), .parent_hash = rs_ld(&e->parent_hash),
                      .kind = what & 0xff, .reason = what >> 8 & 0xff, .component = what >> 16 & 0xff,
                      .has_parent = what >> 24 & 1, .client = what >> 32 & 0xffff,
                      .incarnation = (uint32_t)rs_ld(&e->incarnation)};
    atomic_thread_fence(memory_order_acquire);
    return rs_ld(&e->number) == position + 1;
}

int rs_events(rs_client *c, uint64_t *cursor, rs_event *out, uint32_t max, uint32_t *num, uint32_t *overflow)
{
    const rs_view *v = &c->v;
    uint64_t capacity = v->plan.event_capacity, head = rs_event_head(c);
    *num = *overflow = 0;
    if (rs_forked(c))
        return RS_EFORKED;
    if (capacity == 0 || *cursor == head)
        return RS_OK;
    if (*cursor > head || head - *cursor > capacity) {
        *overflow = 1;
        *cursor = head > capacity ? head - capacity : 0;
    }
    while (*cursor < head && *num < max) {
        if (copy_event(v, *cursor, &out[*num])) {
            (*num)++;
            (*cursor)++;
            continue;
        }
        if (*num) /* deliver what is contiguous; the next call reports the gap */
            break;
        *overflow = 1;
        (*cursor)++;
    }
    return RS_OK;
}
