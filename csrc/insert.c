/* insert.c - publishing staged slots.
 *
 * FULL, in batches of RS_BATCH positions (one lock hold each):
 *   1  the first batch verifies the walk of what is there already (or walks again under the lock);
 *   2  positions below the hit are redundant: their slots are recycled (or kept, if asked to);
 *   3  positions above it are linked, after a look whether somebody linked them meanwhile;
 *   4  the batch ends with the insert pin on the deepest block done, so that the path is still
 *      there when the next batch comes; the last batch drops it.
 * A reset between two batches ends the insert with STALE_GENERATION.
 *
 * A side insert is one batch: a window without its end would break I8.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

typedef struct job {
    rs_client *c;
    const uint64_t *hashes;
    const int32_t *slots;
    uint32_t n, m, start, flags, component;
    rs_insert_result *out;
    int32_t *unused;
    int32_t path[1];             /* n entries: the blocks of the hit, then what was linked */
} job;

/* Recycle slots[0..n), which this insert checked; after BUSY only *num_done of them. */
static int recycle(job *j, const int32_t *slots, uint32_t n, uint32_t *num_done)
{
    for (*num_done = 0; *num_done < n;) {
        uint32_t num = rs_min(n - *num_done, RS_BATCH);
        int rc = rs_verb_begin(j->c);
        if (rc != RS_OK)
            return rc;
        rs_unstage_locked(&j->c->v, j->c->v.me, j->component, slots + *num_done, num);
        rc = rs_verb_end(j->c, RS_OK);
        if (rc != RS_OK)
            return rc;
        *num_done += num;
    }
    return RS_OK;
}

/* Nothing (more) is published: all slots from position done on are unused. */
static int reject(job *j, uint32_t error, uint32_t done)
{
    rs_insert_result *out = j->out;
    uint32_t earlier = out->num_unused, num_done, left = j->m - done;
    bool keep = j->flags & RS_INSERT_KEEP_UNUSED;
    memcpy(j->unused + earlier, j->slots + done, left * sizeof *j->slots);
    if (keep && error != RS_INSERT_STALE_GENERATION)
        left = 0;
    int rc = recycle(j, j->slots + done, left, &num_done);
    if (rc == RS_EBUSY) { /* the rest is still staged, and reported so */
        out->num_unused += num_done;
        out->error = RS_INSERT_BUSY;
        return RS_OK;
    }
    out->num_unused = earlier + j->m - done;
    out->num_inserted = 0;
    out->error = error;
    if (rc == RS_OK && keep && error == RS_INSERT_STALE_GENERATION)
        rc = recycle(j, j->unused, earlier, &num_done); /* kept by earlier batches; stale always recycles */
    return rc == RS_EBUSY ? RS_OK : rc;
}

static bool stale(const rs_view *v, uint32_t component, const int32_t *slots, uint32_t n)
{
    const rs_a8 *gen = v->pool[component].gen;
    uint32_t root = rs_ld(&v->hdr->current_root);
    for (uint32_t i = 0; i < n; i++)
        if (rs_ld(&gen[slots[i]]) != root)
            return true;
    return false;
}

/* Make w exact under the lock. */
static int settle_walk(rs_client *c, rs_walk *w, bool walked)
{
    if (walked && rs_walk_current(&c->v, w))
        return RS_OK;
    int rc = rs_walk_path(&c->v, w);
    return rc == RS_EBUSY ? RS_ECORRUPT : rc;
}

/* Where a FULL insert stands between batches. */
typedef struct progress {
    uint32_t done;               /* positions start .. start + done - 1 are settled */
    uint32_t hit;                /* blocks known to be there when the insert began */
    rs_slot at;                  /* block start + done - 1, or hit - 1, or the root */
    uint32_t depth;              /* blocks up to and including `at` */
    bool pinned;                 /* insert_pin holds `at` */
} progress;

static void finish_leaf_locked(rs_view *v, rs_slot s)
{
    if (rs_evictable(v, s))
        rs_enter_young_locked(v, RS_FULL, s, false);
}

/* Link slots[0..num) below p->at.  Returns how many; stops early at a block that is there. */
static uint32_t link_run_locked(job *j, progress *p, const int32_t *slots, uint32_t num)
{
    rs_view *v = &j->c->v;
    if (!RS_IS_ROOT(p->at) && rs_evictable(v, p->at))
        rs_leave_locked(v, RS_FULL, p->at);
    rs_link_locked(v, slots, j->hashes + p->depth, num, p->at);
    p->at = (rs_slot)slots[num - 1];
    p->depth += num;
    rs_published_locked(v, RS_FULL, num);
    finish_leaf_locked(v, p->at);
    j->out->num_inserted += num;
    return num;
}

/* Positions whose blocks are there already, up to num of them; their slots go to unused. */
static uint32_t skip_present_locked(job *j, progress *p, const int32_t *slots, uint32_t num)
{
    rs_view *v = &j->c->v;
    uint32_t i = 0;
    for (; i < num; i++) {
        uint32_t position = j->start + p->done + i;
        if (position >= p->hit) {
            rs_slot s = rs_lookup_locked(v, j->hashes[position], p->at);
            if (s == RS_NONE)
                break;
            p->at = s;
            p->depth = position + 1;
        }
        j->unused[j->out->num_unused++] = slots[i];
    }
    if (i && !(j->flags & RS_INSERT_KEEP_UNUSED))
        rs_unstage_locked(v, v->me, RS_FULL, slots, i);
    return i;
}

static void move_pin_locked(job *j, progress *p, bool last)
{
    rs_view *v = &j->c->v;
    bool need = !last && !RS_IS_ROOT(p->at);
    if (!need && !p->pinned)
        return;
    if (need && rs_ld(&v->clients[v->me].insert_pin.slot) == p->at)
        return;
    rs_insert_pin_move_locked(v, v->me, need ? p->at : RS_NONE, p->depth);
    p->pinned = need;
}

/* One batch.  1: more to do, 0: done, < 0: error; *why for results. */
static int full_batch(job *j, rs_walk *w, bool walked, progress *p, uint32_t *why)
{
    rs_view *v = &j->c->v;
    const int32_t *slots = j->slots + p->done;
    uint32_t num = rs_min(j->m - p->done, RS_BATCH);
    if (!rs_slots_are_mine(v, RS_FULL, slots, num))
        return RS_ENOTOWNER;
    if (stale(v, RS_FULL, slots, num)) {
        *why = RS_INSERT_STALE_GENERATION;
        return 0;
    }
    if (p->done == 0 && !p->pinned) {
        int rc = settle_walk(j->c, w, walked);
        if (rc != RS_OK)
            return rc;
        if (w->full_hit < j->start) {
            *why = RS_INSERT_PREFIX_MISSING;
            return 0;
        }
        p->hit = w->full_hit;
        p->depth = p->hit;
        p->at = p->hit ? (rs_slot)j->path[p->hit - 1] : RS_ROOT(w->root);
    }
    if (!RS_IS_ROOT(p->at))
        p->at = rs_bound(v, p->at, v->pool[RS_FULL].capacity);
    uint32_t k = skip_present_locked(j, p, slots, num);
    if (k < num)
        k += link_run_locked(j, p, slots + k, num - k);
    else if (p->done + k == j->m && !RS_IS_ROOT(p->at))
        rs_raw(&v->last_access[p->at], rs_ld(&v->hdr->clock)); /* inserted again: used */
    p->done += k;
    move_pin_locked(j, p, p->done == j->m);
    return p->done < j->m;
}

static int drop_insert_pin(rs_client *c)
{
    int rc = rs_verb_begin(c);
    if (rc == RS_OK) {
        rs_insert_pin_move_locked(&c->v, c->v.me, RS_NONE, 0);
        rc = rs_verb_end(c, RS_OK);
    }
    if (rc == RS_EBUSY) {
        atomic_store(&c->orphan_insert_pin, 1); /* the next verb drops it */
        rc = RS_OK;
    }
    return rc;
}

static int insert_full(job *j)
{
    rs_client *c = j->c;
    rs_walk w = {.hashes = j->hashes, .num_hashes = j->n, .mask = RS_MASK_FULL, .slots = j->path};
    int rc = rs_walk_optimistic(c, &w);
    bool walked = rc == RS_OK;
    if (rc != RS_OK && rc != RS_EBUSY)
        return rc;
    progress p = {.at = RS_ROOT(0)};
    uint32_t why = RS_INSERT_OK;
    do {
        progress before = p;
        rs_insert_result result = *j->out;
        rc = rs_verb_begin(c);
        if (rc == RS_OK)
            rc = full_batch(j, &w, walked, &p, &why);
        else {
            why = rc == RS_EBUSY ? RS_INSERT_BUSY : why;
            break;
        }
        int end = rs_verb_end(c, rc);
        if (end < 0) { /* that batch was rolled back */
            p = before;
            *j->out = result;
        }
        rc = end;
    } while (rc > 0);
    if (p.pinned) {
        int drop = drop_insert_pin(c);
        rc = rc == RS_OK || rc == RS_EBUSY ? (drop == RS_OK ? rc : drop) : rc;
    }
    if (why == RS_INSERT_BUSY) {
        j->out->error = why;
        return RS_OK;
    }
    return rc == RS_OK && why != RS_INSERT_OK ? reject(j, why, p.done) : rc;
}

static int side_batch(job *j, rs_walk *w, bool walked, uint32_t *why)
{
    rs_view *v = &j->c->v;
    if (!rs_slots_are_mine(v, j->component, j->slots, j->m))
        return RS_ENOTOWNER;
    if (stale(v, j->component, j->slots, j->m)) {
        *why = RS_INSERT_STALE_GENERATION;
        return RS_OK;
    }
    int rc = settle_walk(j->c, w, walked);
    if (rc != RS_OK)
        return rc;
    if (w->full_hit < j->n) {
        *why = RS_INSERT_FULL_PATH_MISSING;
        return RS_OK;
    }
    uint32_t before = j->out->num_unused;
    rs_side_insert_locked(v, j->component, j->path, j->n, j->slots, j->m, j->unused, &j->out->num_unused);
    uint32_t redundant = j->out->num_unused - before;
    if (!(j->flags & RS_INSERT_KEEP_UNUSED))
        rs_unstage_locked(v, v->me, j->component, j->unused + before, redundant);
    j->out->num_inserted = j->m - redundant;
    return RS_OK;
}

/* Slots for blocks before the window are redundant whatever the tree holds; they may be many, so
 * they go first, in batches.  After BUSY the rest is still staged, as rs_insert promises. */
static int skip_before_window(job *j)
{
    uint32_t window = rs_min(j->c->v.pool[j->component].window, j->n), lead = j->m - rs_min(j->m, window);
    while (j->out->num_unused < lead) {
        uint32_t done = j->out->num_unused, num = rs_min(lead - done, RS_BATCH);
        int rc = rs_verb_begin(j->c);
        if (rc != RS_OK)
            return rc;
        bool mine = rs_slots_are_mine(&j->c->v, j->component, j->slots + done, num);
        if (mine && !(j->flags & RS_INSERT_KEEP_UNUSED))
            rs_unstage_locked(&j->c->v, j->c->v.me, j->component, j->slots + done, num);
        rc = rs_verb_end(j->c, mine ? RS_OK : RS_ENOTOWNER);
        if (rc != RS_OK)
            return rc;
        memcpy(j->unused + done, j->slots + done, num * sizeof *j->slots);
        j->out->num_unused += num;
    }
    j->slots += lead;
    j->m -= lead;
    return RS_OK;
}

static int insert_side(job *j)
{
    rs_client *c = j->c;
    rs_walk w = {.hashes = j->hashes, .num_hashes = j->n, .mask = RS_MASK_FULL, .slots = j->path};
    uint32_t why = RS_INSERT_OK;
    bool walked = false;
    int rc = skip_before_window(j);
    if (rc == RS_OK) {
        rc = rs_walk_optimistic(c, &w);
        walked = rc == RS_OK;
        if (walked || rc == RS_EBUSY)
            rc = rs_verb_begin(c);
    }
    if (rc == RS_EBUSY) {
        j->out->error = RS_INSERT_BUSY;
        return RS_OK;
    }
    if (rc != RS_OK)
        return rc;
    rc = rs_verb_end(c, side_batch(j, &w, walked, &why));
    return rc == RS_OK && why != RS_INSERT_OK ? reject(j, why, 0) : rc;
}

static int check_lengths(const job *j)
{
    if (j->component == RS_FULL)
        return j->start <= j->n && j->m == j->n - j->start ? RS_OK : RS_EINVAL;
    return j->start == 0 && j->m <= j->n ? RS_OK : RS_EINVAL;
}

int rs_insert(rs_client *c, uint32_t component, const uint64_t *hashes, uint32_t n, const int32_t *slots,
              uint32_t m, uint32_t start, uint32_t flags, rs_insert_result *out, int32_t *unused)
{
    memset(out, 0, sizeof *out);
    int rc = rs_alive(c);
    if (rc != RS_OK)
        return rc;
    if (!rs_has(&c->v, component))
        return RS_ENOCOMPONENT;
    job *j = malloc(sizeof *j + (size_t)n * sizeof j->path[0]);
    if (!j)
        return RS_ENOMEM;
    *j = (job){.c = c, .hashes = hashes, .slots = slots, .n = n, .m = m, .start = start, .flags = flags,
               .component = component, .out = out, .unused = unused};
    pthread_mutex_lock(&c->insert_mutex);
    rc = check_lengths(j);
    if (rc == RS_OK)
        rc = rs_check_slots(c, component, slots, m);
    if (rc == RS_OK && stale(&c->v, component, slots, m))
        rc = reject(j, RS_INSERT_STALE_GENERATION, 0); /* one stale slot, and nothing is published */
    else if (rc == RS_OK && m > 0)
        rc = component == RS_FULL ? insert_full(j) : insert_side(j);
    pthread_mutex_unlock(&c->insert_mutex);
    free(j);
    return rc;
}
