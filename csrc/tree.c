/* tree.c - match, link, unlink.  Takes no lock and knows no policy.
 *
 * MATCH.  From the current root: the next slot first (with runs of consecutive slots the walk is
 * sequential memory), then the child hint, else the hash table, for the entry with this hash and this
 * parent.  Where slots jump, the walk works in windows: all buckets of a window are prefetched, then
 * all chain heads, then resolved, so that the cache misses of a window overlap.
 *
 * Readers take no lock.  Argument (with lock.c's SEQUENCE and layout.h's THE TREE):
 *   R1  A reader that sees parent[s] == p (acquire) sees the hash and side slots stored before it:
 *       link stores them first.
 *   R2  A slot changes its meaning only after an unlink, and an unlink makes the sequence odd
 *       before its first store.  A walk whose sequence was even at its start and unchanged at its
 *       end read, at each step, the fields of one life of that slot.
 *   R3  Indices are bounded by private capacities and chains by the capacity, so a walk on moving
 *       or garbage data ends; garbage with an unchanged sequence is corruption, else it is a retry.
 */
#include "core.h"

#define WINDOW 32u               /* blocks whose misses overlap; the core tracks about 12-48 misses */
#define RUN_WINDOW 256u          /* blocks between two looks at the sequence where slots are consecutive */
#define CHECK_LINKS 32u          /* chain links between two looks at the sequence */
#define JUMPS_TO_PROBE 4u        /* steps of a window that were not to the next slot */
#define UNLINK_AHEAD 8u          /* unlinks that take about as long as a miss */
#define WAIT_SPINS 2000u         /* for an odd sequence: a batch that unlinks takes a few us */

static inline uint32_t bucket_of(uint64_t hash, uint32_t bucket_bits)
{
    return (uint32_t)((hash * 0x9e3779b97f4a7c15ull) >> (64 - bucket_bits));
}

uint32_t rs_bucket(const rs_view *v, uint64_t hash) { return bucket_of(hash, v->plan.bucket_bits); }

static inline bool is_block(const rs_view *v, rs_slot s, uint64_t hash, rs_slot parent)
{
    return rs_ld_acq(&v->node[s].parent) == parent && rs_ld(&v->node[s].hash) == hash;
}

static bool seq_is(const rs_view *v, uint64_t seq)
{
    atomic_thread_fence(memory_order_acquire);
    return rs_ld(&v->hdr->seq) == seq;
}

/* Follow a chain from s.  RS_NONE: not there; *rc tells a broken walk. */
static rs_slot follow(const rs_view *v, rs_slot s, uint64_t hash, rs_slot parent, uint64_t seq, int *rc)
{
    uint32_t capacity = v->pool[RS_FULL].capacity;
    for (uint32_t links = 0; s != RS_NONE; links++) {
        if (s >= capacity || links > capacity) {
            *rc = seq_is(v, seq) ? RS_ECORRUPT : RS_EBUSY;
            return RS_NONE;
        }
        if (is_block(v, s, hash, parent))
            return s;
        if (links % CHECK_LINKS == CHECK_LINKS - 1 && !seq_is(v, seq)) {
            *rc = RS_EBUSY;
            return RS_NONE;
        }
        s = rs_ld_acq(&v->node[s].next);
    }
    return RS_NONE;
}

/* Where a walk stands. */
typedef struct cursor {
    rs_slot at;                  /* block reached, or the root */
    uint32_t depth;
    uint32_t swa_run;            /* consecutive blocks up to here that carry an SWA slot */
    bool missed;                 /* the next block is not there */
    int rc;
} cursor;

/* Account for block s at depth; w->common_hit follows what all components can serve. */
static inline void step(const rs_view *v, rs_walk *w, cursor *c, rs_slot s)
{
    w->slots[c->depth++] = (int32_t)s;
    c->at = s;
    if (w->mask == RS_MASK_FULL)
        return;
    bool ok = true;
    if (w->mask & RS_MASK_SWA) {
        c->swa_run = rs_ld_acq(&v->side[RS_SWA].slot[s]) != RS_NONE ? c->swa_run + 1 : 0;
        ok = c->swa_run >= rs_min(v->pool[RS_SWA].window, c->depth);
    }
    if (w->mask & RS_MASK_MAMBA)
        ok = ok && rs_ld_acq(&v->side[RS_MAMBA].slot[s]) != RS_NONE;
    if (ok)
        w->common_hit = c->depth;
}

/* The blocks whose slots follow one another: parent and hash prove a guess, so nothing but those two
 * arrays is read, and no load waits for the one before it. */
static inline void walk_run(const rs_view *v, rs_walk *w, cursor *c, uint32_t end)
{
    const rs_node_shm *node = v->node;
    const uint64_t *hashes = w->hashes;
    int32_t *slots = w->slots;
    uint32_t depth = c->depth, capacity = v->pool[RS_FULL].capacity;
    rs_slot s = c->at + 1;
    if (w->mask != RS_MASK_FULL) {
        while (c->depth < end && s < capacity && is_block(v, s, hashes[c->depth], s - 1))
            step(v, w, c, s++);
        return;
    }
    while (depth < end && s < capacity && rs_ld_acq(&node[s].parent) == s - 1 && rs_ld(&node[s].hash) == hashes[depth])
        slots[depth++] = (int32_t)s++;
    c->depth = depth;
    c->at = s - 1;
}

/* Up to end by runs and child hints; returns early where hints jump. */
static uint32_t walk_hints(const rs_view *v, rs_walk *w, cursor *c, uint32_t end)
{
    uint32_t capacity = v->pool[RS_FULL].capacity, jumps = 0;
    while (c->depth < end && jumps < JUMPS_TO_PROBE) {
        if (c->at < capacity) {
            walk_run(v, w, c, end);
            if (c->depth == end)
                break;
        }
        uint64_t hash = w->hashes[c->depth];
        rs_slot s = c->at < capacity ? rs_ld_acq(&v->child[c->at]) : RS_NONE;
        if (s >= capacity || !is_block(v, s, hash, c->at)) {
            s = follow(v, rs_ld_acq(&v->bucket[rs_bucket(v, hash)]), hash, c->at, w->seq, &c->rc);
            c->missed = s == RS_NONE;
            if (c->missed)
                break;
        }
        jumps++;
        step(v, w, c, s);
    }
    return jumps;
}

/* One window through the hash table with overlapping misses; returns non-sequential steps.  What the
 * window is worked with stands in locals: behind an atomic access the compiler loads a field anew. */
static uint32_t walk_probes(const rs_view *v, rs_walk *w, cursor *c, uint32_t end)
{
    const rs_a32 *bucket = v->bucket;
    const rs_node_shm *node = v->node;
    const uint64_t *hashes = w->hashes + c->depth;
    uint32_t capacity = v->pool[RS_FULL].capacity, bits = v->plan.bucket_bits, n = end - c->depth, jumps = 0;
    rs_slot at[WINDOW], parent = c->at;
    int32_t *slots = w->slots + c->depth;
    bool full_only = w->mask == RS_MASK_FULL;
    for (uint32_t i = 0; i < n; i++)
        __builtin_prefetch((const void *)&bucket[bucket_of(hashes[i], bits)]);
    for (uint32_t i = 0; i < n; i++) {
        rs_slot head = rs_ld(&bucket[bucket_of(hashes[i], bits)]);
        at[i] = head < capacity ? head : 0; /* slot 0 will do: what stands there is compared below */
        __builtin_prefetch(&node[at[i]]);
    }
    for (uint32_t i = 0; i < n; i++) { /* one link further where another block comes first */
        const rs_node_shm *head = &node[at[i]];
        rs_slot next = rs_ld(&head->next);
        if (rs_ld(&head->hash) != hashes[i] && next < capacity) {
            at[i] = next;
            __builtin_prefetch(&node[next]);
        }
    }
    uint32_t i = 0;
    for (; i < n; i++) {
        rs_slot s = at[i];
        if (rs_ld_acq(&node[s].parent) != parent || rs_ld(&node[s].hash) != hashes[i]) {
            s = follow(v, rs_ld_acq(&bucket[bucket_of(hashes[i], bits)]), hashes[i], parent, w->seq, &c->rc);
            if (s == RS_NONE) {
                c->missed = true;
                break;
            }
        }
        jumps += s != parent + 1;
        parent = s;
        if (full_only)
            slots[i] = (int32_t)s;
        else
            step(v, w, c, s);
    }
    if (full_only) {
        c->depth += i;
        c->at = parent;
    }
    return jumps;
}

static void walk_tree(const rs_view *v, rs_walk *w, cursor *c)
{
    uint32_t jumps = 0;
    while (c->depth < w->num_hashes && !c->missed && c->rc == RS_OK) {
        bool probe = jumps >= JUMPS_TO_PROBE;
        uint32_t end = c->depth + rs_min(probe ? WINDOW : RUN_WINDOW, w->num_hashes - c->depth);
        jumps = probe ? walk_probes(v, w, c, end) : walk_hints(v, w, c, end);
        if (c->rc == RS_OK && !seq_is(v, w->seq))
            c->rc = RS_EBUSY;
    }
}

/* Slots of the window before common_hit; false: garbage was read. */
static bool gather_side(const rs_view *v, rs_walk *w)
{
    bool ok = true;
    if (w->common_hit == 0)
        return ok;
    if (w->mask & RS_MASK_SWA) {
        w->num_swa = rs_min(v->pool[RS_SWA].window, w->common_hit);
        for (uint32_t i = 0; i < w->num_swa; i++) {
            int32_t block = w->slots[w->common_hit - w->num_swa + i];
            w->swa_slots[i] = (int32_t)rs_ld(&v->side[RS_SWA].slot[block]);
            ok &= (uint32_t)w->swa_slots[i] < v->pool[RS_SWA].capacity;
        }
    }
    if (w->mask & RS_MASK_MAMBA) {
        w->mamba_slot = (int32_t)rs_ld(&v->side[RS_MAMBA].slot[w->slots[w->common_hit - 1]]);
        ok &= (uint32_t)w->mamba_slot < v->pool[RS_MAMBA].capacity;
    }
    return ok;
}

int rs_walk_path(const rs_view *v, rs_walk *w)
{
    uint32_t spins = 0;
    do
        w->seq = rs_ld_acq(&v->hdr->seq);
    while ((w->seq & 1) && ++spins < WAIT_SPINS);
    w->full_hit = w->common_hit = w->num_swa = 0;
    w->mamba_slot = -1;
    if (w->seq & 1)
        return RS_EBUSY;
    w->root = rs_ld_acq(&v->hdr->current_root);
    if (w->root >= RS_NUM_ROOTS)
        return RS_ECORRUPT;
    cursor c = {.at = RS_ROOT(w->root), .rc = RS_OK};
    walk_tree(v, w, &c);
    if (c.rc != RS_OK)
        return c.rc;
    w->full_hit = c.depth;
    bool ok = true;
    if (w->mask == RS_MASK_FULL)
        w->common_hit = c.depth;
    else
        ok = gather_side(v, w);
    if (!seq_is(v, w->seq))
        return RS_EBUSY;
    return ok ? RS_OK : RS_ECORRUPT;
}

bool rs_walk_current(const rs_view *v, const rs_walk *w)
{
    return rs_ld(&v->hdr->seq) == w->seq && rs_ld(&v->hdr->current_root) == w->root;
}

rs_slot rs_lookup_locked(rs_view *v, uint64_t hash, rs_slot parent)
{
    int rc = RS_OK;
    rs_slot s = follow(v, rs_ld(&v->bucket[rs_bucket(v, hash)]), hash, parent, rs_ld(&v->hdr->seq), &rc);
    if (rc != RS_OK)
        v->corrupt = true;
    return s;
}

/* Words that linking one block changes: state, parent, bucket, and the parent's child and num_children
 * (a root's refs are one word). */
#define LINK_WORDS 5u

/* Journal what linking a chain of n slots will change.  false: no room. */
static bool log_links(rs_view *v, const int32_t *slots, const uint32_t *buckets, uint32_t n, rs_slot parent)
{
    const rs_node_shm *node = v->node;
    const rs_a32 *bucket = v->bucket, *child = v->child, *num_children = v->num_children;
    const rs_a8 *state = v->pool[RS_FULL].state;
    const uint8_t *base = v->base;
    rs_jentry_shm *e = rs_log_begin(v, n * LINK_WORDS);
    if (!e)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        rs_slot s = (rs_slot)slots[i];
        const rs_a32 *head = &bucket[buckets[i]];
        e = rs_log_word(e, base, &state[s], 1, rs_ld(&state[s]));
        e = rs_log_word(e, base, &node[s].parent, 4, rs_ld(&node[s].parent));
        e = rs_log_word(e, base, head, 4, rs_ld(head));
        if (RS_IS_ROOT(parent)) {
            const rs_a32 *refs = &v->hdr->root_refs[parent - RS_ROOT_BASE];
            e = rs_log_word(e, base, refs, 4, rs_ld(refs));
        } else {
            e = rs_log_word(e, base, &child[parent], 4, rs_ld(&child[parent]));
            e = rs_log_word(e, base, &num_children[parent], 4, rs_ld(&num_children[parent]));
        }
        parent = s;
    }
    rs_log_end(v, e);
    return true;
}

/* The stores, journaled by log_links().  Readers may meet each as soon as it is made. */
static void store_link(rs_view *v, rs_slot s, uint64_t hash, rs_a32 *head, rs_slot parent, uint32_t now)
{
    rs_node_shm *node = &v->node[s];
    if (!RS_PLANTED(LATE_HASH))
        rs_raw(&node->hash, hash);
    rs_raw(&node->next, rs_ld(head));
    rs_raw(&v->last_access[s], now);
    rs_raw(&v->pool[RS_FULL].state[s], RS_SLOT_PUBLISHED);
    atomic_store_explicit(&node->parent, parent, memory_order_release); /* R1: last of the fields */
    if (RS_PLANTED(LATE_HASH))
        rs_raw(&node->hash, hash);
    atomic_store_explicit(head, s, memory_order_release);
    if (RS_IS_ROOT(parent)) {
        rs_a32 *refs = &v->hdr->root_refs[parent - RS_ROOT_BASE];
        rs_raw(refs, rs_ld(refs) + 1);
    } else {
        atomic_store_explicit(&v->child[parent], s, memory_order_release);
        rs_raw(&v->num_children[parent], rs_ld(&v->num_children[parent]) + 1);
    }
}

void rs_link_locked(rs_view *v, const int32_t *slots, const uint64_t *hashes, uint32_t n, rs_slot parent)
{
    uint32_t buckets[RS_BATCH], bits = v->plan.bucket_bits, now = rs_ld(&v->hdr->clock);
    const rs_a32 *bucket = v->bucket;
    for (uint32_t i = 0; i < n; i++) { /* buckets are scattered: let their misses overlap */
        buckets[i] = bucket_of(hashes[i], bits);
        __builtin_prefetch((const void *)&bucket[buckets[i]], 1);
    }
    if (!log_links(v, slots, buckets, n, parent))
        return;
    rs_events_stored_locked(v, hashes, n, parent);
    for (uint32_t i = 0; i < n; i++) {
        rs_slot s = (rs_slot)slots[i];
        store_link(v, s, hashes[i], &v->bucket[buckets[i]], parent, now);
        parent = s;
    }
}

static void unchain(rs_view *v, rs_slot s)
{
    if (RS_PLANTED(MISSING_UNLINK))
        return;
    uint32_t capacity = v->pool[RS_FULL].capacity;
    rs_a32 *link = &v->bucket[rs_bucket(v, rs_ld(&v->node[s].hash))];
    for (uint32_t links = 0; rs_ld(link) != s; links++) {
        rs_slot at = rs_ld(link);
        if (at >= capacity || links > capacity) {
            v->corrupt = true;
            return;
        }
        link = &v->node[at].next;
    }
    rs_set32(v, link, rs_ld(&v->node[s].next));
}

rs_slot rs_unlink_locked(rs_view *v, rs_slot s, uint32_t reason)
{
    rs_unlink_begin_locked(v);
    rs_slot parent = rs_ld(&v->node[s].parent);
    uint64_t hash = rs_ld(&v->node[s].hash);
    if (s >= UNLINK_AHEAD) /* in a run, the victim after the next few: start its bucket's miss now */
        __builtin_prefetch((const void *)&v->bucket[rs_bucket(v, rs_ld(&v->node[s - UNLINK_AHEAD].hash))], 1);
    if (!RS_IS_ROOT(parent))
        parent = rs_bound(v, parent, v->pool[RS_FULL].capacity);
    rs_set32(v, &v->node[s].parent, RS_NONE);
    unchain(v, s);
    rs_set32(v, &v->child[s], RS_NONE);
    if (RS_IS_ROOT(parent)) {
        rs_add32(v, &v->hdr->root_refs[parent - RS_ROOT_BASE], -1);
    } else {
        if (rs_ld(&v->child[parent]) == s)
            rs_set32(v, &v->child[parent], RS_NONE);
        if (RS_PLANTED(PLAIN_STORE))
            rs_raw(&v->num_children[parent], rs_ld(&v->num_children[parent]) - 1);
        else
            rs_add32(v, &v->num_children[parent], -1);
    }
    rs_slot_free_locked(v, RS_FULL, s);
    rs_add64(v, &v->pool[RS_FULL].shm->evicted[reason], 1);
    rs_event_locked(v, RS_EVENT_REMOVED, reason, RS_FULL, hash, parent);
    return parent;
}
