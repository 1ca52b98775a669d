/* test_model.c - random verbs against the naive model, with a full comparison and a proof of the
 * invariants after each.  RS_OPS operations (100,000), spread over small worlds of changing shape.
 *
 * Half of the worlds use real chained hashes, the other half hashes of two bits: then unequal
 * blocks share hashes, and all chains of the hash table are long.
 */
#include "image.h"
#include "mirror.h"

#include <string.h>
#include <unistd.h>

enum { OPS_PER_WORLD = 2000, MAX_PATH = 14 };

/* -- looking at the index ------------------------------------------------------------------------ */

static void count_events(mirror *w)
{
    rs_event events[MODEL_EVENTS];
    uint32_t num, overflow;
    CHECK_OK(rs_events(w->watcher, &w->cursor, events, MODEL_EVENTS, &num, &overflow));
    CHECK_EQ(overflow, 0);
    for (uint32_t i = 0; i < num; i++) {
        w->live[events[i].component] += events[i].kind == RS_EVENT_STORED;
        w->live[events[i].component] -= events[i].kind == RS_EVENT_REMOVED;
    }
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        CHECK_EQ(w->live[k], model_count(&w->actual, k, RS_SLOT_PUBLISHED));
}

static void look(mirror *w)
{
    rs_snapshot *s;
    char report[2048];
    CHECK_OK(rs_snapshot_take(w->watcher, &s));
    if (rs_snapshot_check(s, report, sizeof(report)) != 0)
        FAIL("violations:\n%s", report);
    model_load(&w->actual, &s->v);
    CHECK_EQ(rs_ld(&s->v.hdr->journal_len), 0);
    rs_snapshot_free(s);
    count_events(w);
    /* Reaping is an operation of the test, not of the clock. */
    rs_raw(&w->watcher->v.hdr->last_reap_ns, UINT64_MAX);
}

/* -- paths ---------------------------------------------------------------------------------------- */

static uint64_t hash_after(mirror *w, uint64_t before)
{
    uint32_t symbol = below(w, 4);
    uint64_t chained = before ^ (symbol + 1) * 0x9e3779b97f4a7c15ull;
    return w->tiny_hashes ? symbol : random_next(&chained);
}

/* A path that starts like a published one, most of the time.  Returns its length. */
static int random_path(mirror *w, uint64_t *hashes)
{
    int n = 0, s = (int)below(w, (uint32_t)w->m.capacity[RS_FULL]);
    if (w->m.full[s].state == RS_SLOT_PUBLISHED && w->m.full[s].gen == w->m.root) {
        n = model_depth(&w->m, s) + 1;
        for (int i = n; i-- > 0; s = w->m.full[s].parent)
            hashes[i] = w->m.full[s].hash;
        n = (int)below(w, 4) ? n : (int)below(w, (uint32_t)n + 1);
    }
    int more = (int)below(w, 4) ? (int)below(w, 6) : 0;
    while (more-- > 0 && n < MAX_PATH) {
        hashes[n] = hash_after(w, n ? hashes[n - 1] : 7);
        n++;
    }
    return n;
}

/* Up to max slots that client has staged in component, picked at random. */
static int pick_staged(mirror *w, int client, int component, int max, int32_t *out)
{
    int num = 0, capacity = w->m.capacity[component], first = (int)below(w, (uint32_t)capacity);
    for (int i = 0; i < capacity && num < max; i++) {
        int s = (first + i) % capacity;
        int state = component == RS_FULL ? w->m.full[s].state : w->m.side[component][s].state;
        int owner = component == RS_FULL ? w->m.full[s].owner : w->m.side[component][s].owner;
        if (state == RS_SLOT_STAGED && owner == client)
            out[num++] = s;
    }
    return num;
}

static void unstage(mirror *w, int component, int slot)
{
    if (component == RS_FULL)
        w->m.full[slot] = (model_block){.state = RS_SLOT_FREE, .side = {NO_SLOT, NO_SLOT, NO_SLOT}};
    else
        w->m.side[component][slot] = (model_side){.state = RS_SLOT_FREE, .block = NO_SLOT};
}

static int gen_of(const mirror *w, int component, int slot)
{
    return component == RS_FULL ? w->m.full[slot].gen : w->m.side[component][slot].gen;
}

/* -- operations ------------------------------------------------------------------------------------ */

static int num_pins_of(const mirror *w, int client)
{
    int num = 0;
    for (int i = 0; i < w->m.num_pins; i++)
        num += w->m.pins[i].client == client;
    return num;
}

static uint32_t random_mask(mirror *w)
{
    uint32_t mask = RS_MASK_FULL;
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (w->m.capacity[k] && below(w, 2))
            mask |= 1u << k;
    return mask;
}

static void op_match(mirror *w, int client)
{
    uint64_t hashes[MAX_PATH];
    int32_t slots[MAX_PATH], swa[RS_MAX_WINDOW];
    int expected[MAX_PATH], n = random_path(w, hashes), hit = model_walk(&w->m, hashes, n, expected);
    uint32_t mask = random_mask(w), flags = below(w, 4);
    int joint = model_joint(&w->m, mask, expected, hit);
    rs_match_result r;
    CHECK_OK(rs_match(w->client[client], hashes, (uint32_t)n, mask, flags, &r, slots, swa));
    if ((flags & RS_QUERY_LOCK) && joint && num_pins_of(w, client) == (int)w->cfg.pins_per_client) {
        CHECK_EQ(r.status, RS_STATUS_PIN_LIMIT);
        CHECK_EQ(r.full_hit, 0);
        return;
    }
    CHECK_EQ(r.status, RS_STATUS_OK);
    CHECK_EQ(r.full_hit, hit);
    CHECK_EQ(r.common_hit, joint);
    for (int i = 0; i < hit; i++)
        CHECK_EQ(slots[i], expected[i]);
    int num_swa = mask & RS_MASK_SWA ? (joint < w->m.window[RS_SWA] ? joint : w->m.window[RS_SWA]) : 0;
    CHECK_EQ(r.num_swa, num_swa);
    CHECK_EQ(r.swa_start, joint - num_swa);
    for (int i = 0; i < num_swa; i++)
        CHECK_EQ(swa[i], w->m.full[expected[joint - num_swa + i]].side[RS_SWA]);
    CHECK_EQ(r.mamba_slot, (mask & RS_MASK_MAMBA) && joint ? w->m.full[expected[joint - 1]].side[RS_MAMBA] : -1);
    CHECK_EQ(r.pin.valid, (flags & RS_QUERY_LOCK) && joint);
    if (r.pin.valid)
        model_pin_add(&w->m, client, r.pin, expected[joint - 1], mask);
}

static void op_release(mirror *w, int client)
{
    int mine[MODEL_PINS], num = 0;
    uint32_t stale;
    for (int i = 0; i < w->m.num_pins; i++)
        if (w->m.pins[i].client == client)
            mine[num++] = i;
    if (num == 0)
        return;
    int i = mine[below(w, (uint32_t)num)];
    rs_pin pin = w->m.pins[i].pin;
    CHECK_OK(rs_release(w->client[client], pin, &stale));
    CHECK_EQ(stale, 0);
    model_pin_drop(&w->m, i);
    model_drain(&w->m);
    if (below(w, 4) == 0) {
        CHECK_OK(rs_release(w->client[client], pin, &stale));
        CHECK_EQ(stale, 1);
    }
}

static int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

static void op_allocate(mirror *w, int client)
{
    int k = (int)below(w, RS_NUM_COMPONENTS);
    if (!w->m.capacity[k])
        return;
    int32_t slots[MODEL_SLOTS];
    int removed[3], n = (int)below(w, below(w, 8) ? 6 : (uint32_t)w->m.capacity[k]) + 1;
    n = clamp(n, 1, w->m.capacity[k]);
    int num_free = model_count(&w->m, k, RS_SLOT_FREE), evictable = model_evictable(&w->m, k);
    uint32_t got;
    CHECK_OK(rs_allocate(w->client[client], (uint32_t)k, (uint32_t)n, slots, &got));
    look(w);
    model_take_evictions(&w->m, &w->actual, 1u << k, removed);
    if (k == RS_FULL) {
        CHECK_EQ(got, clamp(n, 0, num_free + evictable));
        CHECK_EQ(removed[k], clamp(n - num_free, 0, evictable));
    } else {
        CHECK_EQ(got, num_free + evictable >= n ? n : 0);
        CHECK(num_free >= n ? removed[k] == 0 : 1);
    }
    for (uint32_t i = 0; i < got; i++) {
        int s = slots[i];
        CHECK(i == 0 || slots[i - 1] < s);
        if (k == RS_FULL) {
            CHECK_EQ(w->m.full[s].state, RS_SLOT_FREE);
            w->m.full[s] = (model_block){.state = RS_SLOT_STAGED, .owner = rs_client_slot(w->client[client]),
                                         .gen = w->m.root, .side = {NO_SLOT, NO_SLOT, NO_SLOT}};
        } else {
            CHECK_EQ(w->m.side[k][s].state, RS_SLOT_FREE);
            w->m.side[k][s] = (model_side){RS_SLOT_STAGED, rs_client_slot(w->client[client]), w->m.root, NO_SLOT};
        }
    }
}

static void op_recycle(mirror *w, int client)
{
    int k = (int)below(w, RS_NUM_COMPONENTS);
    int32_t slots[MODEL_SLOTS];
    uint32_t done;
    if (!w->m.capacity[k])
        return;
    int n = pick_staged(w, rs_client_slot(w->client[client]), k, (int)below(w, 8), slots);
    CHECK_OK(rs_recycle(w->client[client], (uint32_t)k, slots, (uint32_t)n, &done));
    CHECK_EQ(done, n);
    for (int i = 0; i < n; i++)
        unstage(w, k, slots[i]);
}

static void reject_all(mirror *w, int k, const int32_t *slots, int n, bool keep)
{
    for (int i = 0; i < n && !keep; i++)
        unstage(w, k, slots[i]);
}

static bool any_stale(const mirror *w, int k, const int32_t *slots, int n)
{
    bool stale = false;
    for (int i = 0; i < n; i++)
        stale = stale || gen_of(w, k, slots[i]) != w->m.root;
    return stale;
}

static void expect_unused(const rs_insert_result *r, const int32_t *unused, const int32_t *expected, int n)
{
    CHECK_EQ(r->num_unused, n);
    for (int i = 0; i < n; i++)
        CHECK_EQ(unused[i], expected[i]);
}

static void op_insert_full(mirror *w, int client)
{
    uint64_t hashes[MAX_PATH];
    int32_t slots[MODEL_SLOTS], unused[MODEL_SLOTS], redundant[MODEL_SLOTS] = {0};
    int path[MAX_PATH + 1], n = random_path(w, hashes);
    int m = pick_staged(w, rs_client_slot(w->client[client]), RS_FULL, n, slots), start = n - m;
    if (start > 0 && below(w, 2)) { /* insert from 0 what the slots last for */
        n = m;
        start = 0;
    }
    bool keep = below(w, 4) == 0;
    rs_insert_result r;
    CHECK_OK(rs_insert(w->client[client], RS_FULL, hashes, (uint32_t)n, slots, (uint32_t)m, (uint32_t)start,
                       keep ? RS_INSERT_KEEP_UNUSED : 0, &r, unused));
    int hit = model_walk(&w->m, hashes, n, path), num_redundant = 0, num_inserted = 0;
    if (m == 0) {
        CHECK_EQ(r.num_inserted + r.num_unused, 0);
        return;
    }
    if (any_stale(w, RS_FULL, slots, m) || hit < start) {
        bool stale = any_stale(w, RS_FULL, slots, m);
        CHECK_EQ(r.error, stale ? RS_INSERT_STALE_GENERATION : RS_INSERT_PREFIX_MISSING);
        CHECK_EQ(r.num_inserted, 0);
        expect_unused(&r, unused, slots, m);
        reject_all(w, RS_FULL, slots, m, keep && !stale);
        return;
    }
    CHECK_EQ(r.error, RS_INSERT_OK);
    int at = start ? path[start - 1] : -1 - w->m.root;
    for (int i = 0; i < m; i++) {
        int s = model_child(&w->m, at, hashes[start + i]);
        if (s == NO_SLOT) {
            s = slots[i];
            w->m.full[s] = (model_block){.state = RS_SLOT_PUBLISHED, .gen = w->m.root, .parent = at,
                                         .hash = hashes[start + i], .side = {NO_SLOT, NO_SLOT, NO_SLOT}};
            num_inserted++;
        } else {
            redundant[num_redundant++] = slots[i];
        }
        at = s;
    }
    CHECK_EQ(r.num_inserted, num_inserted);
    expect_unused(&r, unused, redundant, num_redundant);
    reject_all(w, RS_FULL, redundant, num_redundant, keep);
}

static void op_insert_side(mirror *w, int client)
{
    int k = RS_SWA + (int)below(w, 2), path[MAX_PATH];
    uint64_t hashes[MAX_PATH];
    int32_t slots[MODEL_SLOTS], unused[MODEL_SLOTS], redundant[MODEL_SLOTS] = {0};
    if (!w->m.capacity[k])
        return;
    int n = random_path(w, hashes), hit = model_walk(&w->m, hashes, n, path), num_redundant = 0;
    n = hit && below(w, 4) ? hit : n;
    int m = pick_staged(w, rs_client_slot(w->client[client]), k, clamp(n, 0, w->m.window[k] + 1), slots);
    bool keep = below(w, 4) == 0;
    rs_insert_result r;
    CHECK_OK(rs_insert(w->client[client], (uint32_t)k, hashes, (uint32_t)n, slots, (uint32_t)m, 0,
                       keep ? RS_INSERT_KEEP_UNUSED : 0, &r, unused));
    if (m == 0) {
        CHECK_EQ(r.num_inserted + r.num_unused, 0);
        return;
    }
    bool stale = any_stale(w, k, slots, m);
    if (stale || hit < n) {
        CHECK_EQ(r.error, stale ? RS_INSERT_STALE_GENERATION : RS_INSERT_FULL_PATH_MISSING);
        expect_unused(&r, unused, slots, m);
        reject_all(w, k, slots, m, keep && !stale);
        return;
    }
    CHECK_EQ(r.error, RS_INSERT_OK);
    for (int i = 0; i < m; i++) {
        int block = path[n - m + i];
        if (m - i > w->m.window[k] || w->m.full[block].side[k] != NO_SLOT) {
            redundant[num_redundant++] = slots[i];
            continue;
        }
        w->m.full[block].side[k] = slots[i];
        w->m.side[k][slots[i]] = (model_side){.state = RS_SLOT_PUBLISHED, .block = block};
    }
    w->m.full[path[n - 1]].is_end[k] = 1;
    CHECK_EQ(r.num_inserted, m - num_redundant);
    expect_unused(&r, unused, redundant, num_redundant);
    reject_all(w, k, redundant, num_redundant, keep);
}

static void op_evict(mirror *w, int client)
{
    int k = (int)below(w, RS_NUM_COMPONENTS), removed[3];
    uint32_t n = below(w, 5), num;
    if (!w->m.capacity[k])
        return;
    int expected = clamp((int)n, 0, model_evictable(&w->m, k));
    CHECK_OK(rs_evict(w->client[client], (uint32_t)k, n, RS_REASON_REQUEST, &num));
    look(w);
    model_take_evictions(&w->m, &w->actual, 1u << k, removed);
    CHECK_EQ(removed[k], num);
    CHECK(k == RS_FULL ? (int)num == expected : (int)num >= expected);
}

static void op_reset(mirror *w, int client)
{
    CHECK_OK(rs_reset(w->client[client]));
    int root = (int)rs_ld(&w->watcher->v.hdr->current_root);
    for (int s = 0; s < w->m.capacity[RS_FULL]; s++)
        CHECK(w->m.full[s].state == RS_SLOT_FREE || w->m.full[s].gen != root);
    w->m.root = root;
    model_drain(&w->m);
}

static void one_op(mirror *w)
{
#define OP(name) {#name, op_##name}
    static const struct { const char *name; void (*run)(mirror *, int); } ops[] = {
        OP(match), OP(match), OP(release), OP(allocate), OP(insert_full), OP(insert_full), OP(insert_side),
        OP(recycle), OP(evict), {"clients", op_clients}, {"reset", op_reset}};
    enum { RESET = sizeof(ops) / sizeof(*ops) - 1, CLIENTS = RESET - 1 };
    int client = (int)below(w, MODEL_CLIENTS);
    uint32_t what = below(w, 200), op = what < 6 ? CLIENTS : what == 6 ? RESET : below(w, CLIENTS);
    if (!w->client[client] || (w->dead[client] && below(w, 8) == 0))
        op = CLIENTS;
    if (w->dead[client] && op != CLIENTS)
        return;
    if (w->verbose)
        fprintf(stderr, "client %d: %s\n", client, ops[op].name);
    ops[op].run(w, client);
    look(w);
    model_compare(&w->m, &w->actual);
}

static void run_world(uint64_t seed, uint64_t num_ops, bool verbose)
{
    mirror w = {.rng = seed, .verbose = verbose};
    uint32_t swa = below(&w, 4) ? 4 + below(&w, 20) : 0, mamba = below(&w, 2) ? 1 + below(&w, 8) : 0;
    w.tiny_hashes = below(&w, 2);
    w.cfg = small_config(8 + below(&w, 40), swa, 1 + below(&w, 6), mamba);
    w.cfg.max_clients = MODEL_CLIENTS + 1;
    w.cfg.pins_per_client = 1 + below(&w, 8);
    w.cfg.event_capacity = MODEL_EVENTS;
    w.cfg.evict_policy = below(&w, RS_NUM_POLICIES);
    w.fd = make_region(&w.cfg);
    for (int i = 0; i < MODEL_CLIENTS; i++)
        op_attach(&w, i);
    w.watcher = attach(w.fd);
    journal_watch_begin(w.watcher);
    look(&w);
    w.m = w.actual;
    for (uint64_t i = 0; i < num_ops; i++)
        one_op(&w);
    journal_watch_end();
    close(w.fd);
}

TEST(model_random_verbs)
{
    uint64_t num_ops = test_setting("RS_OPS", 100000), state = test_seed;
    for (uint64_t done = 0; done < num_ops; done += OPS_PER_WORLD) {
        uint64_t seed = random_next(&state);
        snprintf(test_note, sizeof(test_note), "(RS_WORLD=%#llx run model_replay)", (unsigned long long)seed);
        run_world(seed, OPS_PER_WORLD, false);
    }
    journal_watch_report();
}

/* One world by its seed, as a failure prints it. */
TEST(model_replay)
{
    uint64_t seed = test_setting("RS_WORLD", 0);
    if (seed)
        run_world(seed, OPS_PER_WORLD, true);
}
