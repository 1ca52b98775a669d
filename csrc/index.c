/* index.c - the verbs match, release and reset, and what all verbs share.  allocate.c and insert.c
 * have the others.
 *
 * Every verb is a sequence of batches: lock, at most RS_BATCH units of work, commit, unlock.  Each
 * batch leaves a valid tree (I1..I12), so a verb that is killed, or gives up with BUSY, between two
 * batches has simply done less.  A reset's drain comes before any other eviction.
 */
#include "core.h"

#include <string.h>

/* Lock-free tries of a walk before it is done under the lock. */
#define WALK_TRIES 4

/* -- shared by the verbs -------------------------------------------------------------------- */

static void drop_orphan_locked(rs_client *c)
{
    if (atomic_exchange_explicit(&c->orphan_insert_pin, 0, memory_order_relaxed))
        rs_insert_pin_move_locked(&c->v, c->v.me, RS_NONE, 0);
}

int rs_verb_begin(rs_client *c)
{
    int rc = rs_alive(c);
    if (rc == RS_OK)
        rc = rs_lock(c, RS_NONE);
    if (rc == RS_OK && rs_ld(&c->orphan_insert_pin))
        drop_orphan_locked(c);
    return rc;
}

int rs_verb_end(rs_client *c, int rc)
{
    int commit = rs_commit_locked(&c->v);
    rs_unlock(c);
    return commit != RS_OK ? commit : rc;
}

/* Evict the listed leaf s. */
static void evict_leaf_locked(rs_view *v, rs_slot s, uint32_t reason)
{
    rs_pool_view *p = &v->pool[RS_FULL];
    uint32_t level = rs_ld(&p->level[s]), stamp = rs_ld(&p->placed[s]);
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (rs_has(v, k) && rs_ld(&v->side[k].is_end[s]))
            rs_end_drop_locked(v, k, s, reason);
    rs_leave_locked(v, RS_FULL, s);
    rs_slot parent = rs_unlink_locked(v, s, reason);
    if (!RS_IS_ROOT(parent) && rs_evictable(v, parent))
        rs_enter_old_locked(v, RS_FULL, parent, level, stamp);
}

uint32_t rs_full_evict_locked(rs_view *v, uint32_t n, uint32_t reason, uint32_t *steps)
{
    uint32_t num = 0;
    while (num < n && !v->corrupt) {
        rs_slot s = rs_victim_locked(v, RS_FULL, steps);
        if (s == RS_NONE)
            break;
        evict_leaf_locked(v, s, reason);
        num++;
    }
    return num;
}

/* A listed leaf of an old root, or RS_NONE.  They stand at the old ends, before all leaves of the
 * current root: those enter young, and nothing else is evicted while a drain is pending. */
static rs_slot old_root_leaf(rs_view *v)
{
    rs_pool_view *p = &v->pool[RS_FULL];
    for (uint32_t level = 0; level < rs_policy_levels(v->config.evict_policy); level++) {
        rs_slot s = rs_ld(&p->shm->lists.head[level]);
        if (s == RS_NONE)
            continue;
        s = rs_bound(v, s, p->capacity);
        if (rs_ld(&p->gen[s]) != rs_ld(&v->hdr->current_root))
            return s;
    }
    return RS_NONE;
}

bool rs_drain_locked(rs_view *v)
{
    if (!rs_ld(&v->hdr->draining))
        return true;
    for (uint32_t num = 0; num < RS_BATCH && !v->corrupt; num++) {
        if (rs_journal_room(v) < v->plan.journal_worst)
            return false;
        rs_slot s = old_root_leaf(v);
        if (s == RS_NONE) {
            rs_set32(v, &v->hdr->draining, 0);
            return true;
        }
        evict_leaf_locked(v, s, RS_REASON_RESET);
    }
    return false;
}

int rs_drain_all(rs_client *c)
{
    bool done = false;
    while (!done) {
        int rc = rs_verb_begin(c);
        if (rc != RS_OK)
            return rc;
        done = rs_drain_locked(&c->v);
        rc = rs_verb_end(c, RS_OK);
        if (rc != RS_OK)
            return rc;
    }
    return RS_OK;
}

/* -- match ---------------------------------------------------------------------------------- */

int rs_walk_optimistic(rs_client *c, rs_walk *w)
{
    int rc = RS_EBUSY;
    for (int i = 0; i < WALK_TRIES && rc == RS_EBUSY; i++) {
        if (i)
            rs_count(c, RS_C_WALK_RETRIES, 1);
        rc = rs_walk_path(&c->v, w);
    }
    return rc;
}

static int walk_under_lock(rs_client *c, rs_walk *w)
{
    rs_count(c, RS_C_WALKS_LOCKED, 1);
    int rc = rs_walk_path(&c->v, w);
    return rc == RS_EBUSY ? RS_ECORRUPT : rc; /* nobody else moves the sequence now */
}

static void touch(rs_view *v, const rs_walk *w, uint32_t flags)
{
    if (w->common_hit && !(flags & RS_QUERY_NO_META))
        rs_raw(&v->last_access[w->slots[w->common_hit - 1]], rs_ld(&v->hdr->clock));
}

/* Walk and pin in one consistent step. */
static int match_and_pin(rs_client *c, rs_walk *w, uint32_t flags, rs_match_result *out)
{
    rs_view *v = &c->v;
    int rc = rs_walk_optimistic(c, w);
    if (rc != RS_OK && rc != RS_EBUSY)
        return rc;
    if (rc == RS_OK && w->common_hit == 0)
        return RS_OK;
    bool walked = rc == RS_OK;
    rc = rs_verb_begin(c);
    if (rc != RS_OK)
        return rc;
    if (!walked || !rs_walk_current(v, w))
        rc = walk_under_lock(c, w);
    if (rc == RS_OK && w->common_hit) {
        if (rs_pin_room_locked(v)) {
            touch(v, w, flags);
            rs_pin_take_locked(v, (rs_slot)w->slots[w->common_hit - 1], w->common_hit, w->mask, &out->pin);
        } else {
            out->status = RS_STATUS_PIN_LIMIT;
        }
    }
    return rs_verb_end(c, rc);
}

static int match_only(rs_client *c, rs_walk *w, uint32_t flags)
{
    int rc = rs_walk_optimistic(c, w);
    if (rc == RS_EBUSY) {
        rc = rs_verb_begin(c);
        if (rc != RS_OK)
            return rc;
        rc = rs_verb_end(c, walk_under_lock(c, w));
    }
    if (rc == RS_OK)
        touch(&c->v, w, flags);
    return rc;
}

static void count_match(rs_client *c, const rs_walk *w, const rs_match_result *out)
{
    rs_count(c, RS_C_QUERIES, 1);
    for (uint32_t k = 0; k < RS_NUM_COMPONENTS; k++) {
        if (k != RS_FULL && !(w->mask & 1u << k))
            continue;
        uint32_t hit = k == RS_FULL ? out->full_hit : out->common_hit;
        if (hit)
            rs_count(c, RS_C_HIT_FULL + k, hit);
        if (hit < w->num_hashes)
            rs_count(c, RS_C_MISS_FULL + k, w->num_hashes - hit);
    }
    if (out->pin.valid)
        rs_count(c, RS_C_PINS_TAKEN, 1);
    if (out->status == RS_STATUS_PIN_LIMIT)
        rs_count(c, RS_C_PIN_LIMITS, 1);
}

static int check_mask(const rs_client *c, uint32_t mask)
{
    if (mask == 0 || mask >= 1u << RS_NUM_COMPONENTS)
        return RS_EINVAL;
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if ((mask & 1u << k) && !rs_has(&c->v, k))
            return RS_ENOCOMPONENT;
    return RS_OK;
}

int rs_match(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, uint32_t flags,
             rs_match_result *out, int32_t *full_slots, int32_t *swa_slots)
{
    memset(out, 0, sizeof *out);
    out->mamba_slot = -1;
    int rc = rs_alive(c);
    if (rc == RS_OK)
        rc = check_mask(c, mask);
    if (rc == RS_OK && (mask & RS_MASK_SWA) && !swa_slots)
        rc = RS_EINVAL;
    if (rc != RS_OK)
        return rc;
    rs_walk w = {.hashes = hashes, .num_hashes = n, .mask = mask | RS_MASK_FULL, .slots = full_slots,
                 .swa_slots = swa_slots};
    rc = flags & RS_QUERY_LOCK ? match_and_pin(c, &w, flags, out) : match_only(c, &w, flags);
    if (rc == RS_EBUSY) {
        out->status = RS_STATUS_BUSY;
        rc = RS_OK;
    }
    if (rc == RS_OK && out->status == RS_STATUS_OK) {
        out->full_hit = w.full_hit;
        out->common_hit = w.common_hit;
        out->num_swa = w.num_swa;
        out->swa_start = w.common_hit - w.num_swa;
        out->mamba_slot = w.mamba_slot;
    }
    if (rc == RS_OK && !(flags & RS_QUERY_PROBE))
        count_match(c, &w, out);
    return rc;
}

int rs_release(rs_client *c, rs_pin pin, uint32_t *stale)
{
    rs_view *v = &c->v;
    *stale = 0;
    if (!pin.valid)
        return RS_OK;
    int rc = rs_verb_begin(c);
    if (rc != RS_OK)
        return rc;
    bool held = pin.index < v->config.pins_per_client;
    if (held) {
        rs_pin_shm *record = rs_pin_record(v, v->me, pin.index);
        held = rs_ld(&record->slot) != RS_NONE && rs_ld(&record->nonce) == pin.nonce;
    }
    if (held)
        rs_pin_drop_locked(v, v->me, pin.index);
    bool draining = rs_ld(&v->hdr->draining);
    rc = rs_verb_end(c, RS_OK);
    if (rc != RS_OK)
        return rc;
    *stale = !held;
    rs_count(c, held ? RS_C_PINS_RELEASED : RS_C_STALE_RELEASES, 1);
    if (draining) {
        rc = rs_drain_all(c); /* the pin is dropped; BUSY leaves the drain to the next allocation */
        return rc == RS_EBUSY ? RS_OK : rc;
    }
    return RS_OK;
}

/* -- reset ---------------------------------------------------------------------------------- */

/* A root id that nothing refers to; RS_NONE: none. */
static uint32_t unused_root(const rs_view *v)
{
    uint32_t current = rs_ld(&v->hdr->current_root);
    for (uint32_t i = 1; i < RS_NUM_ROOTS; i++) {
        uint32_t g = (current + i) % RS_NUM_ROOTS;
        if (rs_ld(&v->hdr->root_refs[g]) == 0)
            return g;
    }
    return RS_NONE;
}

int rs_reset(rs_client *c)
{
    rs_view *v = &c->v;
    int rc = rs_drain_all(c);
    if (rc == RS_OK)
        rc = rs_verb_begin(c);
    if (rc != RS_OK)
        return rc;
    uint32_t root = unused_root(v);
    if (root == RS_NONE)
        return rs_verb_end(c, RS_EROOTS);
    rs_event_locked(v, RS_EVENT_CLEARED, RS_REASON_RESET, RS_FULL, 0, RS_NONE);
    rs_add64(v, &v->hdr->generation, 1);
    rs_set32(v, &v->hdr->draining, 1);
    rs_set32(v, &v->hdr->current_root, root);
    rc = rs_verb_end(c, RS_OK);
    if (rc != RS_OK)
        return rc;
    rc = rs_drain_all(c);
    return rc == RS_EBUSY ? RS_OK : rc; /* forgotten it is; the next allocation frees the rest */
}
