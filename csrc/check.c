/* check.c - proof of the invariants I1..I12 (layout.h) on a private copy of an index.
 *
 * One function per invariant.  The copy may hold garbage: every index is bounds-checked, every list
 * and chain is cut at the number of slots it could hold, and each check is one pass over its arrays.
 */
#include "snapshot.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct checker {
    rs_view v;
    const rs_forest *f;
    char *report;
    size_t room;                 /* bytes left in report, the final 0 included */
    int num_violations;
    bool no_memory;
} checker;

__attribute__((format(printf, 2, 3))) static void fail(checker *c, const char *format, ...)
{
    va_list args;
    if (c->num_violations < INT32_MAX)
        c->num_violations++;
    va_start(args, format);
    int length = vsnprintf(c->report, c->room, format, args);
    va_end(args);
    if (length < 0 || (size_t)length + 1 >= c->room) {
        if (c->room)
            *c->report = 0; /* whole lines only */
        c->room = 0;
        return;
    }
    c->report[length] = '\n';
    c->report[length + 1] = 0;
    c->report += length + 1;
    c->room -= (size_t)length + 1;
}

/* Zeroed scratch by slot. */
static void *scratch(checker *c, uint64_t num, size_t size)
{
    void *p = calloc(num ? num : 1, size);
    c->no_memory = c->no_memory || !p;
    return p;
}

static const char *const POOL_NAME[RS_NUM_COMPONENTS] = {"full", "swa", "mamba"};

static bool is_state(const checker *c, int component, rs_slot s, uint32_t state)
{
    const rs_pool_view *pool = &c->v.pool[component];
    return s < pool->capacity && rs_ld(&pool->state[s]) == state;
}

static void check_i1_identity(checker *c)
{
    rs_view v;
    int rc = rs_view_init(&v, c->v.base, c->v.plan.region_bytes);
    if (rc != RS_OK)
        fail(c, "I1 header: %s", rs_error_name(rc));
}

static void check_i2_reaches_root(checker *c)
{
    const rs_view *v = &c->v;
    for (rs_slot s = 0; s < v->pool[RS_FULL].capacity; s++) {
        if (!is_state(c, RS_FULL, s, RS_SLOT_PUBLISHED))
            continue;
        uint32_t gen = rs_ld(&v->pool[RS_FULL].gen[s]);
        if (!rs_reached(c->f, s))
            fail(c, "I2 full slot %u: parent %#x does not lead to a root", s, rs_ld(&v->node[s].parent));
        else if (gen != c->f->root[s])
            fail(c, "I2 full slot %u: gen %u below root %u", s, gen, c->f->root[s]);
    }
}

static int compare_hashes(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void check_i3_unique(checker *c)
{
    const rs_view *v = &c->v;
    uint32_t capacity = v->pool[RS_FULL].capacity;
    uint64_t *hashes = scratch(c, capacity, sizeof(*hashes));
    for (uint32_t group = 0; hashes && group < capacity + RS_NUM_ROOTS; group++) {
        uint32_t n = rs_num_kids(c->f, group);
        if (n < 2)
            continue;
        for (uint32_t i = 0; i < n; i++)
            hashes[i] = rs_ld(&v->node[c->f->kids[c->f->first_kid[group] + i]].hash);
        qsort(hashes, n, sizeof(*hashes), compare_hashes);
        for (uint32_t i = 1; i < n; i++)
            if (hashes[i] == hashes[i - 1])
                fail(c, "I3 hash %#llx twice below parent %u", (unsigned long long)hashes[i], group);
    }
    free(hashes);
}

static void check_bitmap(checker *c, int component)
{
    const rs_pool_view *pool = &c->v.pool[component];
    uint32_t words = (uint32_t)((pool->capacity + 63ull) / 64);
    for (uint32_t w = 0; w < words; w++) {
        uint64_t expected = 0;
        for (uint32_t bit = 0; bit < 64; bit++)
            expected |= (uint64_t)is_state(c, component, w * 64 + bit, RS_SLOT_FREE) << bit;
        if (rs_ld(&pool->bitmap[w]) != expected)
            fail(c, "I4 %s bitmap word %u: %#llx, free slots %#llx", POOL_NAME[component], w,
                 (unsigned long long)rs_ld(&pool->bitmap[w]), (unsigned long long)expected);
        if ((rs_ld(&pool->summary[w / 64]) >> (w % 64) & 1) != (expected != 0))
            fail(c, "I4 %s summary bit %u is wrong", POOL_NAME[component], w);
    }
    if (words % 64 && rs_ld(&pool->summary[words / 64]) >> (words % 64))
        fail(c, "I4 %s summary has bits behind its end", POOL_NAME[component]);
}

static void check_i4_states(checker *c, int component)
{
    const rs_pool_view *pool = &c->v.pool[component];
    uint32_t num[RS_SLOT_PUBLISHED + 1] = {0};
    for (rs_slot s = 0; s < pool->capacity; s++) {
        uint32_t state = rs_ld(&pool->state[s]);
        if (state > RS_SLOT_PUBLISHED)
            fail(c, "I4 %s slot %u: state %u", POOL_NAME[component], s, state);
        else
            num[state]++;
    }
    uint32_t free_slots = rs_ld(&pool->shm->num_free), staged = rs_ld(&pool->shm->num_staged),
             published = rs_ld(&pool->shm->num_published);
    if (free_slots != num[RS_SLOT_FREE] || staged != num[RS_SLOT_STAGED] || published != num[RS_SLOT_PUBLISHED])
        fail(c, "I4 %s: %u free, %u staged, %u published; counted %u, %u, %u", POOL_NAME[component], free_slots,
             staged, published, num[RS_SLOT_FREE], num[RS_SLOT_STAGED], num[RS_SLOT_PUBLISHED]);
    check_bitmap(c, component);
}

static void check_i5_children(checker *c)
{
    const rs_view *v = &c->v;
    for (rs_slot s = 0; s < v->pool[RS_FULL].capacity; s++) {
        if (!is_state(c, RS_FULL, s, RS_SLOT_PUBLISHED))
            continue;
        uint32_t num = rs_ld(&v->num_children[s]), counted = rs_num_kids(c->f, s);
        rs_slot child = rs_ld(&v->child[s]);
        if (num != counted)
            fail(c, "I5 full slot %u: num_children %u, counted %u", s, num, counted);
        if (child != RS_NONE && !(is_state(c, RS_FULL, child, RS_SLOT_PUBLISHED) && rs_ld(&v->node[child].parent) == s))
            fail(c, "I5 full slot %u: hint %#x is no child of it", s, child);
    }
}

static void check_i6_table(checker *c)
{
    const rs_view *v = &c->v;
    uint32_t capacity = v->pool[RS_FULL].capacity;
    uint8_t *found = scratch(c, capacity, 1);
    for (uint64_t b = 0; found && b < 1ull << v->plan.bucket_bits; b++) {
        for (rs_slot s = rs_ld(&v->bucket[b]); s != RS_NONE; s = rs_ld(&v->node[s].next)) {
            if (!is_state(c, RS_FULL, s, RS_SLOT_PUBLISHED) || found[s]) {
                fail(c, "I6 bucket %llu: slot %#x is not published, or stands in two chains", (unsigned long long)b, s);
                break;
            }
            found[s] = 1;
            if (rs_bucket(v, rs_ld(&v->node[s].hash)) != b)
                fail(c, "I6 full slot %u stands in bucket %llu", s, (unsigned long long)b);
        }
    }
    for (rs_slot s = 0; found && s < capacity; s++)
        if (is_state(c, RS_FULL, s, RS_SLOT_PUBLISHED) && !found[s])
            fail(c, "I6 full slot %u is in no chain", s);
    free(found);
}

/* Pins per block as the ledger has them, with their windows. */
typedef struct ledger { uint32_t *pins, *window[RS_NUM_COMPONENTS]; } ledger;

static void count_record(checker *c, ledger *l, uint32_t client, const rs_pin_shm *record)
{
    rs_slot s = rs_ld(&record->slot);
    uint32_t num_blocks = rs_ld(&record->num_blocks), mask = rs_ld(&record->mask);
    if (s == RS_NONE)
        return;
    if (rs_ld(&c->v.clients[client].state) == RS_CLIENT_FREE)
        fail(c, "I7 client %u is free and pins slot %#x", client, s);
    if (s >= c->v.pool[RS_FULL].capacity || !rs_reached(c->f, s)) {
        fail(c, "I7 client %u pins slot %#x, which is not in the tree", client, s);
        return;
    }
    if (num_blocks != c->f->depth[s] + 1)
        fail(c, "I7 client %u: pin on slot %u says %u blocks, it is block %u", client, s, num_blocks, c->f->depth[s]);
    if (mask >> RS_NUM_COMPONENTS)
        fail(c, "I7 client %u: pin on slot %u has mask %#x", client, s, mask);
    l->pins[s]++;
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (mask >> k & 1 && l->window[k])
            rs_window_mark(c->f, k, s, l->window[k]);
}

static void check_free_records(checker *c, uint32_t client, const rs_pin_shm *records, uint32_t num_used)
{
    uint32_t num = c->v.config.pins_per_client, length = 0;
    for (uint32_t i = rs_ld(&c->v.clients[client].free_pin); i != RS_NONE && length <= num; length++) {
        if (i >= num || rs_ld(&records[i].slot) != RS_NONE) {
            fail(c, "I7 client %u: record %#x in the free list is not free", client, i);
            return;
        }
        i = rs_ld(&records[i].link);
    }
    if (length + num_used != num)
        fail(c, "I7 client %u: %u records used, %u in the free list, of %u", client, num_used, length, num);
}

static void count_client(checker *c, ledger *l, uint32_t client)
{
    const rs_view *v = &c->v;
    const rs_client_shm *entry = &v->clients[client];
    uint32_t num = v->config.pins_per_client, num_used = 0;
    const rs_pin_shm *records = v->pins + (uint64_t)client * num;
    for (uint32_t i = 0; i < num; i++) {
        num_used += rs_ld(&records[i].slot) != RS_NONE;
        count_record(c, l, client, &records[i]);
    }
    count_record(c, l, client, &entry->insert_pin);
    if (rs_ld(&entry->num_pins) != num_used)
        fail(c, "I7 client %u: num_pins %u, counted %u", client, rs_ld(&entry->num_pins), num_used);
    check_free_records(c, client, records, num_used);
}

static void compare_pins(checker *c, int component, rs_a32 *pins, const uint32_t *expected)
{
    const char *what = POOL_NAME[component];
    const rs_pool_shm *pool = c->v.pool[component].shm;
    uint32_t sum = 0, num_pinned = 0;
    for (rs_slot s = 0; s < c->v.pool[RS_FULL].capacity; s++) {
        sum += expected[s];
        num_pinned += expected[s] != 0;
        if (rs_ld(&pins[s]) != expected[s])
            fail(c, "I7 full slot %u: %u %s pins, the ledger has %u", s, rs_ld(&pins[s]), what, expected[s]);
    }
    if (rs_ld(&pool->num_pins) != sum)
        fail(c, "I11 %s num_pins: %u, counted %u", what, rs_ld(&pool->num_pins), sum);
    if (component == RS_FULL)
        return;
    if (rs_ld(&pool->num_pinned) != num_pinned)
        fail(c, "I11 %s num_pinned: %u, counted %u", what, rs_ld(&pool->num_pinned), num_pinned);
    for (rs_slot s = 0; s < c->v.pool[RS_FULL].capacity; s++)
        if (expected[s] && rs_ld(&c->v.side[component].slot[s]) == RS_NONE)
            fail(c, "I7 full slot %u: %s pins, but no such slot", s, what);
}

static void check_i7_pins(checker *c)
{
    const rs_view *v = &c->v;
    uint32_t capacity = v->pool[RS_FULL].capacity;
    ledger l = {.pins = scratch(c, capacity, sizeof(uint32_t))};
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (rs_has(v, k))
            l.window[k] = scratch(c, capacity, sizeof(uint32_t));
    if (!c->no_memory) {
        for (uint32_t i = 0; i < v->config.max_clients; i++)
            count_client(c, &l, i);
        compare_pins(c, RS_FULL, v->pin_count, l.pins);
        for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
            if (!rs_has(v, k))
                continue;
            rs_forest_sum(v, c->f, l.window[k]);
            compare_pins(c, (int)k, v->side[k].pins, l.window[k]);
        }
    }
    free(l.pins);
    free(l.window[RS_SWA]);
    free(l.window[RS_MAMBA]);
}

static void check_cover(checker *c, int component)
{
    const rs_side_view *side = &c->v.side[component];
    uint32_t capacity = c->v.pool[RS_FULL].capacity;
    uint32_t *cover = scratch(c, capacity, sizeof(*cover));
    for (rs_slot b = 0; cover && b < capacity; b++)
        if (rs_ld(&side->is_end[b]) && rs_reached(c->f, b))
            rs_window_mark(c->f, (uint32_t)component, b, cover);
    if (cover)
        rs_forest_sum(&c->v, c->f, cover);
    for (rs_slot b = 0; cover && b < capacity; b++)
        if (rs_ld(&side->cover[b]) != cover[b])
            fail(c, "I8 full slot %u: %s cover %u, counted %u", b, POOL_NAME[component], rs_ld(&side->cover[b]),
                 cover[b]);
    free(cover);
}

static void check_i8_side_slots(checker *c, int component)
{
    const rs_view *v = &c->v;
    const rs_pool_view *pool = &v->pool[component];
    const rs_side_view *side = &v->side[component];
    const char *name = POOL_NAME[component];
    for (rs_slot s = 0; s < pool->capacity; s++) {
        if (!is_state(c, component, s, RS_SLOT_PUBLISHED))
            continue;
        rs_slot b = rs_ld(&pool->block[s]);
        if (!is_state(c, RS_FULL, b, RS_SLOT_PUBLISHED) || rs_ld(&side->slot[b]) != s)
            fail(c, "I8 %s slot %u: block %#x does not name it", name, s, b);
        else if (rs_ld(&side->cover[b]) == 0 && rs_ld(&side->pins[b]) == 0)
            fail(c, "I8 %s slot %u: no window covers it, no pin holds it", name, s);
    }
    for (rs_slot b = 0; b < v->pool[RS_FULL].capacity; b++) {
        rs_slot s = rs_ld(&side->slot[b]);
        uint32_t is_end = rs_ld(&side->is_end[b]);
        bool hangs = is_state(c, component, s, RS_SLOT_PUBLISHED) && rs_ld(&pool->block[s]) == b;
        if (s != RS_NONE && !hangs)
            fail(c, "I8 full slot %u: %s slot %#x does not hang on it", b, name, s);
        if (s == RS_NONE && is_end)
            fail(c, "I8 full slot %u: window end, but no %s slot", b, name);
        if (is_end > 1)
            fail(c, "I8 full slot %u: %s is_end %u", b, name, is_end);
    }
    check_cover(c, component);
}

static void check_i9_staged(checker *c)
{
    const rs_view *v = &c->v;
    uint32_t max_clients = v->config.max_clients;
    uint32_t *staged = scratch(c, (uint64_t)max_clients * RS_NUM_COMPONENTS, sizeof(*staged));
    for (int k = 0; staged && k < RS_NUM_COMPONENTS; k++) {
        for (rs_slot s = 0; s < v->pool[k].capacity; s++) {
            uint32_t owner = rs_ld(&v->pool[k].owner[s]);
            if (!is_state(c, k, s, RS_SLOT_STAGED))
                continue;
            if (owner >= max_clients || rs_ld(&v->clients[owner].state) == RS_CLIENT_FREE)
                fail(c, "I9 %s slot %u is staged by client %u, which is not there", POOL_NAME[k], s, owner);
            else
                staged[owner * RS_NUM_COMPONENTS + (uint32_t)k]++;
        }
    }
    for (uint32_t i = 0; staged && i < max_clients; i++) {
        if (rs_ld(&v->clients[i].state) > RS_CLIENT_DYING)
            fail(c, "I9 client %u: state %u", i, rs_ld(&v->clients[i].state));
        for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
            uint32_t num = rs_ld(&v->clients[i].num_staged[k]), counted = staged[i * RS_NUM_COMPONENTS + (uint32_t)k];
            if (num != counted)
                fail(c, "I9 client %u: %u %s slots staged, counted %u", i, num, POOL_NAME[k], counted);
        }
    }
    free(staged);
}

static bool belongs_in_list(const checker *c, int component, rs_slot s)
{
    const rs_view *v = &c->v;
    if (!is_state(c, component, s, RS_SLOT_PUBLISHED))
        return false;
    if (component == RS_FULL)
        return rs_evictable(v, s);
    rs_slot b = rs_ld(&v->pool[component].block[s]);
    return b < v->pool[RS_FULL].capacity && rs_ld(&v->side[component].is_end[b]);
}

static void check_list(checker *c, int component, uint32_t level, uint8_t *listed)
{
    const rs_pool_view *pool = &c->v.pool[component];
    const rs_lists_shm *lists = &pool->shm->lists;
    rs_slot before = RS_NONE;
    uint32_t length = 0;
    for (rs_slot s = rs_ld(&lists->head[level]); s != RS_NONE; s = rs_ld(&pool->list_next[s])) {
        if (!belongs_in_list(c, component, s) || listed[s]) {
            fail(c, "I10 %s list %u: slot %#x does not belong there, or is listed twice", POOL_NAME[component],
                 level, s);
            break;
        }
        if (rs_ld(&pool->list_prev[s]) != before || rs_ld(&pool->level[s]) != level)
            fail(c, "I10 %s slot %u: back link or level is wrong", POOL_NAME[component], s);
        listed[s] = 1;
        before = s;
        length++;
    }
    if (rs_ld(&lists->tail[level]) != before)
        fail(c, "I10 %s list %u: tail %#x, last %#x", POOL_NAME[component], level, rs_ld(&lists->tail[level]), before);
    if (rs_ld(&lists->count[level]) != length)
        fail(c, "I11 %s list %u: count %u, counted %u", POOL_NAME[component], level,
             rs_ld(&lists->count[level]), length);
    if (length && level >= rs_policy_levels(c->v.config.evict_policy))
        fail(c, "I10 %s list %u is not used by this policy", POOL_NAME[component], level);
}

static void check_i10_lists(checker *c, int component)
{
    uint32_t capacity = c->v.pool[component].capacity;
    uint8_t *listed = scratch(c, capacity, 1);
    for (uint32_t level = 0; listed && level < RS_MAX_LEVELS; level++)
        check_list(c, component, level, listed);
    for (rs_slot s = 0; listed && s < capacity; s++)
        if (belongs_in_list(c, component, s) && !listed[s])
            fail(c, "I10 %s slot %u is in no list", POOL_NAME[component], s);
    free(listed);
}

/* Pools and lists: with I4, I7, I10. */
static void check_i11_roots(checker *c)
{
    const rs_view *v = &c->v;
    uint32_t refs[RS_NUM_ROOTS];
    for (uint32_t g = 0; g < RS_NUM_ROOTS; g++)
        refs[g] = rs_num_kids(c->f, v->pool[RS_FULL].capacity + g);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        for (rs_slot s = 0; s < v->pool[k].capacity; s++) {
            uint32_t gen = rs_ld(&v->pool[k].gen[s]);
            if (!is_state(c, k, s, RS_SLOT_STAGED))
                continue;
            if (gen >= RS_NUM_ROOTS)
                fail(c, "I11 %s slot %u: gen %u", POOL_NAME[k], s, gen);
            else
                refs[gen]++;
        }
    }
    for (uint32_t g = 0; g < RS_NUM_ROOTS; g++)
        if (rs_ld(&v->hdr->root_refs[g]) != refs[g])
            fail(c, "I11 root %u: root_refs %u, counted %u", g, rs_ld(&v->hdr->root_refs[g]), refs[g]);
    if (rs_ld(&v->hdr->current_root) >= RS_NUM_ROOTS)
        fail(c, "I11 current root %u", rs_ld(&v->hdr->current_root));
}

static bool carries_side(const rs_view *v, rs_slot s)
{
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
        const rs_side_view *side = &v->side[k];
        if (rs_has(v, k) && (rs_ld(&side->slot[s]) != RS_NONE || rs_ld(&side->pins[s]) || rs_ld(&side->cover[s]) ||
                             rs_ld(&side->is_end[s])))
            return true;
    }
    return false;
}

static void check_i12_unpublished(checker *c)
{
    const rs_view *v = &c->v;
    for (rs_slot s = 0; s < v->pool[RS_FULL].capacity; s++) {
        if (is_state(c, RS_FULL, s, RS_SLOT_PUBLISHED))
            continue;
        if (rs_ld(&v->node[s].parent) != RS_NONE || rs_ld(&v->child[s]) != RS_NONE || rs_ld(&v->num_children[s]) ||
            rs_ld(&v->pin_count[s]) || carries_side(v, s))
            fail(c, "I12 full slot %u is not published and still has a parent, children, pins or side slots", s);
    }
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        for (rs_slot s = 0; s < v->pool[k].capacity; s++)
            if (!is_state(c, (int)k, s, RS_SLOT_PUBLISHED) && rs_ld(&v->pool[k].block[s]) != RS_NONE)
                fail(c, "I12 %s slot %u is not published and still names a block", POOL_NAME[k], s);
}

int rs_snapshot_check(const rs_snapshot *s, char *report, uint32_t report_bytes)
{
    checker c = {.v = s->v, .f = &s->forest, .report = report, .room = report_bytes};
    if (report_bytes)
        *report = 0;
    check_i1_identity(&c);
    check_i2_reaches_root(&c);
    check_i3_unique(&c);
    check_i5_children(&c);
    check_i6_table(&c);
    check_i7_pins(&c);
    check_i9_staged(&c);
    check_i11_roots(&c);
    check_i12_unpublished(&c);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        check_i4_states(&c, k);
        check_i10_lists(&c, k);
        if (k != RS_FULL && rs_has(&c.v, (uint32_t)k))
            check_i8_side_slots(&c, k);
    }
    return c.no_memory ? RS_ENOMEM : c.num_violations;
}
