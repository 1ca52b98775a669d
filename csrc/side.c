/* side.c - SWA and MAMBA slots that hang on the blocks of the tree.
 *
 * A side slot belongs to one block.  An insert that ends at block p - 1 makes that block an END once
 * and raises `cover` of the last min(W, p) blocks: cover counts the windows that need the block's
 * side slot.  Dropping the end lowers them again; a side slot that nothing covers and nothing pins is
 * freed.  (A pin may end between two ends, and FULL eviction may take the block of the end below it.)
 *
 *      block   0   1   2   3   4   5   6   7        W = 3
 *      end                     E           E
 *      cover   0   0   1   1   1   1   1   1        two windows: 2-4 and 5-7
 *
 * The length of a window needs no bookkeeping: it is W blocks up, or up to the root.  MAMBA is the
 * same with W = 1.  The pool's eviction lists hold the side slots of ends.
 */
#include "core.h"

/* The next block up, or RS_NONE above the first. */
static rs_slot up(rs_view *v, rs_slot block)
{
    rs_slot parent = rs_ld(&v->node[block].parent);
    return RS_IS_ROOT(parent) ? RS_NONE : rs_bound(v, parent, v->pool[RS_FULL].capacity);
}

static void attach_slot(rs_view *v, uint32_t component, rs_slot block, rs_slot s)
{
    rs_set8(v, &v->pool[component].state[s], RS_SLOT_PUBLISHED);
    rs_set32(v, &v->pool[component].block[s], block);
    rs_set32(v, &v->side[component].slot[block], s);
    rs_event_locked(v, RS_EVENT_STORED, RS_REASON_NONE, component, rs_ld(&v->node[block].hash), rs_ld(&v->node[block].parent));
}

static void detach_slot(rs_view *v, uint32_t component, rs_slot block, uint32_t reason)
{
    rs_pool_view *p = &v->pool[component];
    rs_slot s = rs_bound(v, rs_ld(&v->side[component].slot[block]), p->capacity);
    rs_set32(v, &v->side[component].slot[block], RS_NONE);
    rs_set32(v, &p->block[s], RS_NONE);
    rs_slot_free_locked(v, component, s);
    rs_add64(v, &p->shm->evicted[reason], 1);
    rs_event_locked(v, RS_EVENT_REMOVED, reason, component, rs_ld(&v->node[block].hash), rs_ld(&v->node[block].parent));
}

static void detach_if_unused(rs_view *v, uint32_t component, rs_slot block, uint32_t reason)
{
    const rs_side_view *side = &v->side[component];
    if (rs_ld(&side->cover[block]) || rs_ld(&side->pins[block]) || rs_ld(&side->slot[block]) == RS_NONE)
        return;
    rs_unlink_begin_locked(v);
    detach_slot(v, component, block, reason);
}

static void make_end(rs_view *v, uint32_t component, rs_slot last)
{
    rs_side_view *side = &v->side[component];
    if (rs_ld(&side->is_end[last])) {
        rs_raw(&v->last_access[last], rs_ld(&v->hdr->clock));
        return;
    }
    rs_set8(v, &side->is_end[last], 1);
    rs_slot block = last;
    for (uint32_t i = 0; i < v->pool[component].window && block != RS_NONE; i++) {
        rs_add32(v, &side->cover[block], 1);
        block = up(v, block);
    }
    rs_enter_young_locked(v, component, rs_bound(v, rs_ld(&side->slot[last]), v->pool[component].capacity), false);
}

void rs_side_insert_locked(rs_view *v, uint32_t component, const int32_t *path, uint32_t num_blocks,
                           const int32_t *slots, uint32_t m, int32_t *unused, uint32_t *num_unused)
{
    rs_side_view *side = &v->side[component];
    uint32_t first = num_blocks - rs_min(v->pool[component].window, num_blocks), num_attached = 0;
    for (uint32_t i = 0; i < m; i++) {
        uint32_t at = num_blocks - m + i;
        rs_slot block = (rs_slot)path[at];
        if (at < first || rs_ld(&side->slot[block]) != RS_NONE) {
            unused[(*num_unused)++] = slots[i];
            continue;
        }
        attach_slot(v, component, block, (rs_slot)slots[i]);
        num_attached++;
    }
    if (num_attached)
        rs_published_locked(v, component, num_attached);
    if (m)
        make_end(v, component, (rs_slot)path[num_blocks - 1]);
}

void rs_end_drop_locked(rs_view *v, uint32_t component, rs_slot block, uint32_t reason)
{
    rs_side_view *side = &v->side[component];
    rs_unlink_begin_locked(v);
    rs_leave_locked(v, component, rs_bound(v, rs_ld(&side->slot[block]), v->pool[component].capacity));
    rs_set8(v, &side->is_end[block], 0);
    for (uint32_t i = 0; i < v->pool[component].window && block != RS_NONE; i++) {
        rs_add32(v, &side->cover[block], -1);
        detach_if_unused(v, component, block, reason);
        block = up(v, block);
    }
}

void rs_side_pin_locked(rs_view *v, uint32_t component, rs_slot deepest, int delta)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t i = 0, num_changed = 0;
    for (rs_slot block = deepest; i < p->window && block != RS_NONE; i++) {
        rs_a32 *pins = &v->side[component].pins[block];
        uint32_t old = rs_ld(pins);
        rs_set32(v, pins, old + (uint32_t)delta);
        num_changed += (old == 0) != (rs_ld(pins) == 0);
        if (delta < 0)
            detach_if_unused(v, component, block, RS_REASON_CAPACITY);
        block = up(v, block);
    }
    rs_add32(v, &p->shm->num_pins, delta * (int)i);
    rs_add32(v, &p->shm->num_pinned, delta * (int)num_changed);
}

static bool window_pinned(rs_view *v, uint32_t component, rs_slot end)
{
    rs_slot block = end;
    for (uint32_t i = 0; i < v->pool[component].window && block != RS_NONE; i++) {
        if (rs_ld(&v->side[component].pins[block]))
            return true;
        block = up(v, block);
    }
    return false;
}

uint32_t rs_side_evict_locked(rs_view *v, uint32_t component, uint32_t n, uint32_t reason, uint32_t *steps)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t free_before = rs_ld(&p->shm->num_free);
    while (rs_ld(&p->shm->num_free) - free_before < n && !v->corrupt) {
        rs_slot s = rs_victim_locked(v, component, steps);
        if (s == RS_NONE)
            break;
        rs_slot end = rs_bound(v, rs_ld(&p->block[s]), v->pool[RS_FULL].capacity);
        if (window_pinned(v, component, end))
            rs_pass_over_locked(v, component, s);
        else
            rs_end_drop_locked(v, component, end, reason);
    }
    return rs_ld(&p->shm->num_free) - free_before;
}
