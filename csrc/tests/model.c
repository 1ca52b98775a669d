/* model.c - see model.h. */
#include "model.h"

#include <string.h>

static int parent_of(rs_slot parent)
{
    if (RS_IS_ROOT(parent))
        return -1 - (int)(parent - RS_ROOT_BASE);
    return parent == RS_NONE ? INT32_MIN : (int)parent;
}

static void load_block(model *m, const rs_view *v, rs_slot s)
{
    const rs_pool_view *pool = &v->pool[RS_FULL];
    model_block *b = &m->full[s];
    *b = (model_block){.state = rs_ld(&pool->state[s]), .side = {NO_SLOT, NO_SLOT, NO_SLOT}};
    if (b->state != RS_SLOT_FREE)
        b->gen = rs_ld(&pool->gen[s]);
    if (b->state == RS_SLOT_STAGED)
        b->owner = rs_ld(&pool->owner[s]);
    if (b->state != RS_SLOT_PUBLISHED)
        return;
    b->parent = parent_of(rs_ld(&v->node[s].parent));
    b->hash = rs_ld(&v->node[s].hash);
    b->pins = (int)rs_ld(&v->pin_count[s]);
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
        if (!m->capacity[k])
            continue;
        b->side[k] = (int)rs_ld(&v->side[k].slot[s]);
        b->side_pins[k] = (int)rs_ld(&v->side[k].pins[s]);
        b->is_end[k] = rs_ld(&v->side[k].is_end[s]);
    }
}

static void load_side(model *m, const rs_view *v, int k, rs_slot s)
{
    const rs_pool_view *pool = &v->pool[k];
    model_side *x = &m->side[k][s];
    *x = (model_side){.state = rs_ld(&pool->state[s]), .block = NO_SLOT};
    if (x->state == RS_SLOT_STAGED) {
        x->owner = rs_ld(&pool->owner[s]);
        x->gen = rs_ld(&pool->gen[s]);
    }
    if (x->state == RS_SLOT_PUBLISHED)
        x->block = (int)rs_ld(&pool->block[s]);
}

void model_load(model *m, const rs_view *v)
{
    memset(m, 0, sizeof(*m));
    m->root = (int)rs_ld(&v->hdr->current_root);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        m->capacity[k] = (int)v->pool[k].capacity;
        m->window[k] = (int)v->pool[k].window;
        CHECK(m->capacity[k] <= MODEL_SLOTS);
    }
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        load_block(m, v, (rs_slot)s);
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        for (int s = 0; s < m->capacity[k]; s++)
            load_side(m, v, k, (rs_slot)s);
}

void model_compare(const model *m, const model *a)
{
    CHECK_EQ(m->root, a->root);
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (memcmp(&m->full[s], &a->full[s], sizeof(m->full[s])) != 0)
            FAIL("full slot %d: state %d, owner %d, gen %d, parent %d, hash %#llx, pins %d, side %d %d, side pins %d %d, "
                 "ends %d %d; expected %d, %d, %d, %d, %#llx, %d, %d %d, %d %d, %d %d", s, a->full[s].state,
                 a->full[s].owner, a->full[s].gen, a->full[s].parent, (unsigned long long)a->full[s].hash,
                 a->full[s].pins, a->full[s].side[1], a->full[s].side[2], a->full[s].side_pins[1],
                 a->full[s].side_pins[2], a->full[s].is_end[1], a->full[s].is_end[2], m->full[s].state,
                 m->full[s].owner, m->full[s].gen, m->full[s].parent, (unsigned long long)m->full[s].hash,
                 m->full[s].pins, m->full[s].side[1], m->full[s].side[2], m->full[s].side_pins[1],
                 m->full[s].side_pins[2], m->full[s].is_end[1], m->full[s].is_end[2]);
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        for (int s = 0; s < m->capacity[k]; s++)
            if (memcmp(&m->side[k][s], &a->side[k][s], sizeof(m->side[k][s])) != 0)
                FAIL("component %d slot %d: state %d, owner %d, gen %d, block %d; expected %d, %d, %d, %d", k, s,
                     a->side[k][s].state, a->side[k][s].owner, a->side[k][s].gen, a->side[k][s].block,
                     m->side[k][s].state, m->side[k][s].owner, m->side[k][s].gen, m->side[k][s].block);
}

/* -- questions ---------------------------------------------------------------------------------- */

int model_depth(const model *m, int slot)
{
    int depth = 0;
    while ((slot = m->full[slot].parent) >= 0)
        depth++;
    return depth;
}

int model_child(const model *m, int parent, uint64_t hash)
{
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (m->full[s].state == RS_SLOT_PUBLISHED && m->full[s].parent == parent && m->full[s].hash == hash)
            return s;
    return NO_SLOT;
}

int model_walk(const model *m, const uint64_t *hashes, int n, int *slots)
{
    int at = -1 - m->root, hit = 0;
    for (; hit < n; hit++) {
        at = model_child(m, at, hashes[hit]);
        if (at == NO_SLOT)
            break;
        slots[hit] = at;
    }
    return hit;
}

static bool window_served(const model *m, int component, const int *slots, int p)
{
    for (int i = p - 1; i >= 0 && i >= p - m->window[component]; i--)
        if (m->full[slots[i]].side[component] == NO_SLOT)
            return false;
    return true;
}

int model_joint(const model *m, uint32_t mask, const int *slots, int hit)
{
    for (int p = hit; p > 0; p--) {
        bool ok = true;
        for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
            if (mask & 1u << k)
                ok = ok && window_served(m, k, slots, p);
        if (ok)
            return p;
    }
    return 0;
}

/* Is block within the window that ends at end? */
static bool in_window(const model *m, int component, int end, int block)
{
    for (int i = 0, at = end; i < m->window[component] && at >= 0; i++, at = m->full[at].parent)
        if (at == block)
            return true;
    return false;
}

int model_cover(const model *m, int component, int block)
{
    int cover = 0;
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        cover += m->full[s].is_end[component] && in_window(m, component, s, block);
    return cover;
}

bool model_window_pinned(const model *m, int component, int end)
{
    for (int i = 0, at = end; i < m->window[component] && at >= 0; i++, at = m->full[at].parent)
        if (m->full[at].side_pins[component])
            return true;
    return false;
}

int model_count(const model *m, int component, int state)
{
    int num = 0;
    for (int s = 0; s < m->capacity[component]; s++)
        num += (component == RS_FULL ? m->full[s].state : m->side[component][s].state) == state;
    return num;
}

static bool pinned_at_or_below(const model *m, int slot)
{
    if (m->full[slot].pins)
        return true;
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (m->full[s].state == RS_SLOT_PUBLISHED && m->full[s].parent == slot && pinned_at_or_below(m, s))
            return true;
    return false;
}

/* Kept by its own pin, or by an end that may not go. */
static bool side_is_held(const model *m, int component, int block)
{
    if (m->full[block].side_pins[component])
        return true;
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (m->full[s].is_end[component] && in_window(m, component, s, block) && model_window_pinned(m, component, s))
            return true;
    return false;
}

int model_evictable(const model *m, int component)
{
    int num = 0;
    for (int s = 0; s < m->capacity[component]; s++) {
        if (component == RS_FULL)
            num += m->full[s].state == RS_SLOT_PUBLISHED && !pinned_at_or_below(m, s);
        else
            num += m->side[component][s].state == RS_SLOT_PUBLISHED &&
                   !side_is_held(m, component, m->side[component][s].block);
    }
    return num;
}

/* -- changes ------------------------------------------------------------------------------------ */

static void pin_window(model *m, int slot, uint32_t mask, int delta)
{
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        for (int i = 0, at = slot; (mask & 1u << k) && i < m->window[k] && at >= 0; i++, at = m->full[at].parent)
            m->full[at].side_pins[k] += delta;
}

/* Free side slots that nothing covers and nothing pins.  Returns how many. */
static int sweep_side(model *m, int component)
{
    int num = 0;
    for (int s = 0; s < m->capacity[component]; s++) {
        int block = m->side[component][s].block;
        if (m->side[component][s].state != RS_SLOT_PUBLISHED || m->full[block].side_pins[component] ||
            model_cover(m, component, block))
            continue;
        m->full[block].side[component] = NO_SLOT;
        m->side[component][s] = (model_side){.state = RS_SLOT_FREE, .block = NO_SLOT};
        num++;
    }
    return num;
}

static void sweep(model *m, int removed[3])
{
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        removed[k] += sweep_side(m, k);
}

static void free_block(model *m, int slot)
{
    m->full[slot] = (model_block){.state = RS_SLOT_FREE, .side = {NO_SLOT, NO_SLOT, NO_SLOT}};
}

void model_pin_add(model *m, int client, rs_pin pin, int slot, uint32_t mask)
{
    CHECK(m->num_pins < MODEL_PINS);
    m->pins[m->num_pins++] = (model_pin){client, pin, slot, mask};
    m->full[slot].pins++;
    pin_window(m, slot, mask, 1);
}

void model_pin_drop(model *m, int index)
{
    model_pin *p = &m->pins[index];
    int removed[3] = {0};
    m->full[p->slot].pins--;
    pin_window(m, p->slot, p->mask, -1);
    *p = m->pins[--m->num_pins];
    sweep(m, removed);
}

/* A leaf of an old root that nothing pins, or NO_SLOT. */
static int old_leaf(const model *m)
{
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (m->full[s].state == RS_SLOT_PUBLISHED && m->full[s].gen != m->root && !pinned_at_or_below(m, s))
            return s;
    return NO_SLOT;
}

void model_drain(model *m)
{
    int removed[3] = {0}, num_slots = 0, slots[MODEL_SLOTS], s;
    /* All that go, first: side slots are swept while their blocks still have their parents. */
    model copy = *m;
    while ((s = old_leaf(&copy)) != NO_SLOT) {
        free_block(&copy, s);
        slots[num_slots++] = s;
    }
    for (int i = 0; i < num_slots; i++)
        memset(m->full[slots[i]].is_end, 0, sizeof(m->full[slots[i]].is_end));
    sweep(m, removed);
    for (int i = 0; i < num_slots; i++)
        free_block(m, slots[i]);
}

void model_forget_client(model *m, int client, int owner)
{
    for (int i = m->num_pins; i-- > 0;)
        if (m->pins[i].client == client)
            model_pin_drop(m, i);
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (m->full[s].state == RS_SLOT_STAGED && m->full[s].owner == owner)
            free_block(m, s);
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        for (int s = 0; s < m->capacity[k]; s++)
            if (m->side[k][s].state == RS_SLOT_STAGED && m->side[k][s].owner == owner)
                m->side[k][s] = (model_side){.state = RS_SLOT_FREE, .block = NO_SLOT};
    model_drain(m);
}

static bool is_gone(const model *m, const model *actual, int s)
{
    return m->full[s].state == RS_SLOT_PUBLISHED && actual->full[s].state != RS_SLOT_PUBLISHED;
}

static void take_ends(model *m, const model *actual, int k, uint32_t may_evict)
{
    for (int s = 0; s < m->capacity[RS_FULL]; s++) {
        bool gone = is_gone(m, actual, s);
        if (!m->full[s].is_end[k] || (!gone && actual->full[s].is_end[k]))
            continue;
        if (!gone) {
            CHECK(may_evict & 1u << k);
            CHECK(!model_window_pinned(m, k, s));
        }
        m->full[s].is_end[k] = 0;
    }
}

void model_take_evictions(model *m, const model *actual, uint32_t may_evict, int removed[3])
{
    removed[0] = removed[1] = removed[2] = 0;
    for (int s = 0; s < m->capacity[RS_FULL]; s++) {
        if (!is_gone(m, actual, s))
            continue;
        removed[RS_FULL]++;
        CHECK(may_evict & RS_MASK_FULL);
        CHECK_EQ(m->full[s].pins, 0);
        for (int t = 0; t < m->capacity[RS_FULL]; t++)
            if (m->full[t].state == RS_SLOT_PUBLISHED && m->full[t].parent == s)
                CHECK(is_gone(m, actual, t)); /* leaves first */
    }
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (m->capacity[k])
            take_ends(m, actual, k, may_evict);
    sweep(m, removed);
    for (int s = 0; s < m->capacity[RS_FULL]; s++)
        if (is_gone(m, actual, s))
            free_block(m, s);
}
