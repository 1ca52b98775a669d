/* evict.c - which slot goes next: the eviction lists and the policies over them.
 *
 * Every pool has up to RS_MAX_LEVELS lists, each from old to young.  The FULL lists hold the
 * evictable leaves, a side pool's lists the window ends (I10).  Readers only store last_access, so
 * recency is settled lazily: an entry found at the old end with last_access newer than its stamp
 * (`placed`) was used meanwhile; it moves to the young end of the level that the policy names, else
 * it is the victim.  Each look costs O(1), and an entry is looked at once per use.
 *
 *      level 1:  old [ 5 ][ 9 ] young          victims come from the old end of
 *      level 0:  old [ 3 ][ 7 ][ 2 ] young     the lowest level that has any
 *
 * A policy is a row of POLICIES:
 *   lru    one level; used entries go to its young end
 *   fifo   one level; use does not matter
 *   slru   two levels; a use promotes to the protected one, which holds at most 4/5 of the entries
 *   lfu    eight levels; each use promotes by one, and every few evictions the oldest unused entry
 *          of the highest level steps down, so that old fame fades
 * To add one: a row here, its name in radixshm.h, and the Python enum.
 */
#include "core.h"

typedef struct policy {
    uint8_t num_levels;
    bool second_chance;
    uint8_t protected_fifths;    /* share of all entries that levels above 0 may hold, in fifths; 5: no limit */
    uint8_t fade_every;          /* evictions between two steps down; 0: never */
} policy;

static const policy POLICIES[RS_NUM_POLICIES] = {
    [RS_LRU] = {1, true, 5, 0},
    [RS_LFU] = {8, true, 5, 8},
    [RS_SLRU] = {2, true, 4, 0},
    [RS_FIFO] = {1, false, 5, 0},
};

static const policy *policy_of(const rs_view *v) { return &POLICIES[v->config.evict_policy]; }

uint32_t rs_policy_levels(uint32_t p) { return POLICIES[p].num_levels; }

static uint32_t level_of(rs_view *v, const rs_pool_view *p, rs_slot s)
{
    return rs_bound(v, rs_ld(&p->level[s]), policy_of(v)->num_levels);
}

/* Put s between prev and next of its level's list; either may be NONE. */
static void splice(rs_view *v, rs_pool_view *p, rs_slot s, uint32_t level, rs_slot prev, rs_slot next)
{
    rs_lists_shm *lists = &p->shm->lists;
    rs_set32(v, &p->list_prev[s], prev);
    rs_set32(v, &p->list_next[s], next);
    rs_set32(v, prev == RS_NONE ? &lists->head[level] : &p->list_next[rs_bound(v, prev, p->capacity)], s);
    rs_set32(v, next == RS_NONE ? &lists->tail[level] : &p->list_prev[rs_bound(v, next, p->capacity)], s);
    rs_add32(v, &lists->count[level], 1);
    rs_set8(v, &p->level[s], (uint8_t)level);
    v->dirty = true;
}

static void push_young(rs_view *v, rs_pool_view *p, rs_slot s, uint32_t level)
{
    splice(v, p, s, level, rs_ld(&p->shm->lists.tail[level]), RS_NONE);
}

void rs_leave_locked(rs_view *v, uint32_t component, rs_slot s)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t level = level_of(v, p, s);
    rs_lists_shm *lists = &p->shm->lists;
    rs_slot prev = rs_ld(&p->list_prev[s]), next = rs_ld(&p->list_next[s]);
    rs_set32(v, prev == RS_NONE ? &lists->head[level] : &p->list_next[rs_bound(v, prev, p->capacity)], next);
    rs_set32(v, next == RS_NONE ? &lists->tail[level] : &p->list_prev[rs_bound(v, next, p->capacity)], prev);
    rs_set32(v, &p->list_prev[s], RS_NONE);
    rs_set32(v, &p->list_next[s], RS_NONE);
    rs_add32(v, &lists->count[level], -1);
}

/* The block whose last_access counts for s. */
static rs_slot block_of(rs_view *v, uint32_t component, rs_slot s)
{
    if (component == RS_FULL)
        return s;
    return rs_bound(v, rs_ld(&v->pool[component].block[s]), v->pool[RS_FULL].capacity);
}

/* Keep the levels above 0 within the policy's share: the oldest protected entry steps down.  Not
 * while a drain is pending: it relies on old roots' leaves standing before all others. */
static void demote_surplus(rs_view *v, rs_pool_view *p)
{
    rs_lists_shm *lists = &p->shm->lists;
    uint32_t fifths = policy_of(v)->protected_fifths;
    if (fifths == 5 || rs_ld(&v->hdr->draining))
        return;
    uint64_t upper = rs_ld(&lists->count[1]), all = upper + rs_ld(&lists->count[0]);
    rs_slot s = rs_ld(&lists->head[1]);
    if (upper * 5 <= all * fifths || s == RS_NONE)
        return;
    s = rs_bound(v, s, p->capacity);
    rs_leave_locked(v, (uint32_t)(p - v->pool), s);
    push_young(v, p, s, 0);
}

static uint32_t promoted(const rs_view *v, uint32_t level)
{
    return rs_min(level + 1, policy_of(v)->num_levels - 1u);
}

void rs_enter_young_locked(rs_view *v, uint32_t component, rs_slot s, bool used)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t now = rs_ld(&v->hdr->clock);
    rs_set32(v, &p->placed[s], now);
    rs_raw(&v->last_access[block_of(v, component, s)], now);
    push_young(v, p, s, used ? promoted(v, level_of(v, p, s)) : 0);
    if (used)
        demote_surplus(v, p);
}

void rs_enter_old_locked(rs_view *v, uint32_t component, rs_slot s, uint32_t level, uint32_t stamp)
{
    rs_pool_view *p = &v->pool[component];
    level = rs_bound(v, level, policy_of(v)->num_levels);
    rs_set32(v, &p->placed[s], stamp);
    splice(v, p, s, level, RS_NONE, rs_ld(&p->shm->lists.head[level]));
}

void rs_pass_over_locked(rs_view *v, uint32_t component, rs_slot s)
{
    /* The highest level: left in the lowest, it would stand before all entries of higher ones. */
    rs_leave_locked(v, component, s);
    push_young(v, &v->pool[component], s, policy_of(v)->num_levels - 1u);
}

/* Clock values wrap; entries idle for 2^31 batches may be taken for used once. */
static bool used_since_placed(rs_view *v, uint32_t component, rs_slot s)
{
    uint32_t last = rs_ld(&v->last_access[block_of(v, component, s)]);
    return (int32_t)(last - rs_ld(&v->pool[component].placed[s])) > 0;
}

static void second_chance(rs_view *v, uint32_t component, rs_slot s)
{
    rs_pool_view *p = &v->pool[component];
    uint32_t level = promoted(v, level_of(v, p, s));
    rs_leave_locked(v, component, s);
    rs_set32(v, &p->placed[s], rs_ld(&v->last_access[block_of(v, component, s)]));
    push_young(v, p, s, level);
    demote_surplus(v, p);
}

static void fade(rs_view *v, uint32_t component)
{
    rs_pool_view *p = &v->pool[component];
    const policy *rule = policy_of(v);
    uint32_t ticks = rs_ld(&p->shm->ticks) + 1;
    rs_set32(v, &p->shm->ticks, ticks);
    if (ticks % rule->fade_every)
        return;
    for (uint32_t level = rule->num_levels; level-- > 1;) {
        rs_slot s = rs_ld(&p->shm->lists.head[level]);
        if (s == RS_NONE)
            continue;
        s = rs_bound(v, s, p->capacity);
        bool used = used_since_placed(v, component, s);
        rs_leave_locked(v, component, s);
        rs_set32(v, &p->placed[s], rs_ld(&v->last_access[block_of(v, component, s)]));
        push_young(v, p, s, used ? level : level - 1);
        return;
    }
}

static rs_slot oldest(rs_view *v, const rs_pool_view *p)
{
    for (uint32_t level = 0; level < policy_of(v)->num_levels; level++) {
        rs_slot s = rs_ld(&p->shm->lists.head[level]);
        if (s != RS_NONE)
            return rs_bound(v, s, p->capacity);
    }
    return RS_NONE;
}

rs_slot rs_victim_locked(rs_view *v, uint32_t component, uint32_t *steps)
{
    rs_pool_view *p = &v->pool[component];
    const policy *rule = policy_of(v);
    while (*steps > 0 && !v->corrupt) {
        rs_slot s = oldest(v, p);
        if (s == RS_NONE)
            return RS_NONE;
        v->full = rs_journal_room(v) < v->plan.journal_worst;
        if (v->full)
            break;
        (*steps)--;
        if (!rule->second_chance || !used_since_placed(v, component, s)) {
            if (rule->fade_every)
                fade(v, component);
            return s;
        }
        second_chance(v, component, s);
    }
    return RS_NONE;
}
