/* snapshot.c - private copies of an index, and what operators look at in them.
 *
 * A copy is taken under the lock, or, of a region that nobody uses (its server and clients are
 * dead), through a read-only mapping.  The event ring and spent journal entries are left out.
 */
#include "snapshot.h"

#include <stdlib.h>
#include <string.h>

/* Word by word with atomic loads, because readers store last_access and counters meanwhile. */
static void copy_words(uint8_t *to, const uint8_t *from, uint64_t begin, uint64_t end)
{
    for (uint64_t at = begin; at < end; at += 8) {
        uint64_t word = rs_ld((const rs_a64 *)(from + at));
        memcpy(to + at, &word, 8);
    }
}

static void copy_region(void *mem, const rs_view *v)
{
    uint64_t journal = v->plan.journal.bytes, num_entries = rs_ld_acq(&v->hdr->journal_len);
    if (num_entries > v->plan.journal_capacity)
        num_entries = v->plan.journal_capacity; /* garbage: recovery in the copy refuses it */
    copy_words(mem, v->base, 0, journal + num_entries * sizeof(rs_jentry_shm));
    copy_words(mem, v->base, v->plan.clients.bytes, v->plan.events.bytes);
    copy_words(mem, v->base, v->plan.node.bytes, v->plan.region_bytes);
}

static rs_snapshot *snapshot_new(uint64_t region_bytes)
{
    rs_snapshot *s = calloc(1, sizeof(*s));
    if (s)
        s->mem = aligned_alloc(4096, region_bytes);
    if (s && s->mem) {
        memset(s->mem, 0, region_bytes); /* page faults here, not under the lock */
        return s;
    }
    free(s);
    return NULL;
}

static int sum_pins(rs_snapshot *s)
{
    uint32_t capacity = s->v.pool[RS_FULL].capacity;
    s->pins_below = malloc(capacity * sizeof(*s->pins_below));
    if (!s->pins_below)
        return RS_ENOMEM;
    for (rs_slot i = 0; i < capacity; i++)
        s->pins_below[i] = rs_ld(&s->v.pin_count[i]);
    rs_forest_sum(&s->v, &s->forest, s->pins_below);
    return RS_OK;
}

/* Roll back what the copy caught half-way, then lay out its tree. */
static int snapshot_finish(rs_snapshot *s, uint64_t region_bytes)
{
    int rc = rs_view_init(&s->v, s->mem, region_bytes);
    if (rc == RS_OK)
        rc = rs_recover_locked(&s->v);
    if (rc == RS_OK)
        rc = rs_forest_build(&s->v, &s->forest);
    if (rc == RS_OK)
        rc = sum_pins(s);
    return rc;
}

int rs_snapshot_take(rs_client *c, rs_snapshot **out)
{
    uint64_t region_bytes = c->v.plan.region_bytes;
    *out = NULL;
    if (rs_forked(c))
        return RS_EFORKED;
    rs_snapshot *s = snapshot_new(region_bytes);
    if (!s)
        return RS_ENOMEM;
    int rc = rs_lock(c, RS_NONE);
    if (rc == RS_OK) {
        copy_region(s->mem, &c->v);
        rs_unlock(c);
        rc = snapshot_finish(s, region_bytes);
    }
    if (rc == RS_OK && memcmp(&s->v.plan, &c->v.plan, sizeof(c->v.plan)) != 0)
        rc = RS_ECORRUPT; /* a config that is valid, but not the one this handle attached to */
    if (rc != RS_OK)
        rs_snapshot_free(s);
    else
        *out = s;
    return rc;
}

int rs_snapshot_peek(int fd, rs_snapshot **out)
{
    rs_view v;
    uint64_t map_bytes;
    *out = NULL;
    int rc = rs_map_readonly(fd, &v, &map_bytes);
    if (rc != RS_OK)
        return rc;
    rs_snapshot *s = snapshot_new(v.plan.region_bytes);
    if (s)
        copy_region(s->mem, &v);
    rs_unmap(&v, map_bytes);
    if (!s)
        return RS_ENOMEM;
    rc = snapshot_finish(s, v.plan.region_bytes);
    if (rc != RS_OK)
        rs_snapshot_free(s);
    else
        *out = s;
    return rc;
}

void rs_snapshot_free(rs_snapshot *s)
{
    if (!s)
        return;
    rs_forest_free(&s->forest);
    free(s->pins_below);
    free(s->mem);
    free(s);
}

/* A side slot stays while it is pinned, or while an end that covers it stays; an end stays while any
 * block of its window is pinned. */
static int count_pinned_side(const rs_snapshot *s, uint32_t component, uint32_t *out)
{
    const rs_view *v = &s->v;
    const rs_forest *f = &s->forest;
    const rs_side_view *side = &v->side[component];
    uint32_t *pinned_above = calloc(v->pool[RS_FULL].capacity, sizeof(uint32_t));
    uint32_t *held = calloc(v->pool[RS_FULL].capacity, sizeof(uint32_t));
    *out = 0;
    if (pinned_above && held) {
        for (uint32_t i = 0; i < f->num_reached; i++) {
            rs_slot b = f->order[i], parent = rs_ld(&v->node[b].parent), above = f->above[component][b];
            pinned_above[b] = (RS_IS_ROOT(parent) ? 0 : pinned_above[parent]) + (rs_ld(&side->pins[b]) != 0);
            uint32_t in_window = pinned_above[b] - (above == RS_NONE ? 0 : pinned_above[above]);
            if (rs_ld(&side->is_end[b]) && in_window != 0)
                rs_window_mark(f, component, b, held);
        }
        rs_forest_sum(v, f, held);
        for (uint32_t i = 0; i < f->num_reached; i++) {
            rs_slot b = f->order[i];
            *out += (held[b] || rs_ld(&side->pins[b])) && rs_ld(&side->slot[b]) != RS_NONE;
        }
    }
    bool ok = pinned_above && held;
    free(pinned_above);
    free(held);
    return ok ? RS_OK : RS_ENOMEM;
}

int rs_snapshot_summarize(const rs_snapshot *s, rs_snapshot_summary *out)
{
    const rs_view *v = &s->v;
    memset(out, 0, sizeof(*out));
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        for (rs_slot i = 0; i < v->pool[k].capacity; i++) {
            uint8_t state = rs_ld(&v->pool[k].state[i]);
            out->free[k] += state == RS_SLOT_FREE;
            out->staged[k] += state == RS_SLOT_STAGED;
            out->evictable[k] += state == RS_SLOT_PUBLISHED;
        }
    }
    for (rs_slot i = 0; i < v->pool[RS_FULL].capacity; i++) {
        out->num_pins += rs_ld(&v->pin_count[i]);
        out->pinned[RS_FULL] += rs_reached(&s->forest, i) && s->pins_below[i] != 0;
    }
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (rs_has(v, k) && count_pinned_side(s, k, &out->pinned[k]) != RS_OK)
            return RS_ENOMEM;
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        out->evictable[k] -= rs_min(out->evictable[k], out->pinned[k]);
    return RS_OK;
}

static int64_t node_parent(rs_slot parent)
{
    if (RS_IS_ROOT(parent))
        return -1 - (int64_t)(parent - RS_ROOT_BASE);
    return parent == RS_NONE ? INT64_MIN : (int64_t)parent;
}

static void fill_node(const rs_view *v, rs_slot s, uint32_t pins_at_or_below, rs_node *out)
{
    const rs_pool_view *pool = &v->pool[RS_FULL];
    *out = (rs_node){
        .slot = s, .state = rs_ld(&pool->state[s]), .owner = rs_ld(&pool->owner[s]), .gen = rs_ld(&pool->gen[s]),
        .parent = node_parent(rs_ld(&v->node[s].parent)), .hash = rs_ld(&v->node[s].hash),
        .num_children = rs_ld(&v->num_children[s]), .pins = rs_ld(&v->pin_count[s]),
        .last_access = rs_ld(&v->last_access[s]), .pinned_path = pins_at_or_below != 0,
        .side = {-1, -1, -1},
    };
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
        if (!rs_has(v, k))
            continue;
        out->side[k] = (int32_t)rs_ld(&v->side[k].slot[s]);
        out->side_pins[k] = rs_ld(&v->side[k].pins[s]);
        out->cover[k] = rs_ld(&v->side[k].cover[s]);
        out->is_end[k] = rs_ld(&v->side[k].is_end[s]);
    }
}

int rs_snapshot_nodes(const rs_snapshot *s, uint32_t first, rs_node *out, uint32_t max, uint32_t *num)
{
    const rs_view *v = &s->v;
    *num = 0;
    for (rs_slot i = first; i < v->pool[RS_FULL].capacity && *num < max; i++)
        if (rs_ld(&v->pool[RS_FULL].state[i]) != RS_SLOT_FREE)
            fill_node(v, i, s->pins_below[i], &out[(*num)++]);
    return RS_OK;
}
