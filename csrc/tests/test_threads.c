/* test_threads.c - threads that share a handle, and threads with handles of their own.
 *
 * Every slot has a word of payload, as the SlotStore has bytes: its owner writes the block's hash
 * there before inserting, and whoever holds a pin reads it back.  With one handle the payload is
 * plain memory, so that the thread sanitizer proves that pin, insert and eviction order its accesses;
 * with several mappings of the region it cannot see that, and the payload is atomic.
 *
 * RS_ROUNDS (3000) rounds per thread.
 */
#include "harness.h"

#include <string.h>

enum { NUM_THREADS = 4, NUM_PATHS = 24, PATH = 40, SLOTS = 400, SIDE = 60, WINDOW = 4 };

typedef struct arena {
    uint64_t plain[RS_NUM_COMPONENTS][SLOTS];
    rs_a64 atomic[RS_NUM_COMPONENTS][SLOTS];
    bool shared_handle;
    uint64_t path[NUM_PATHS][PATH];
} arena;

typedef struct worker {
    pthread_t thread;
    arena *a;
    rs_client *c;
    uint64_t rng, num_hits;
} worker;

static void put(arena *a, uint32_t k, int32_t slot, uint64_t x)
{
    if (a->shared_handle)
        a->plain[k][slot] = x;
    else
        rs_raw(&a->atomic[k][slot], x);
}

static uint64_t get(arena *a, uint32_t k, int32_t slot)
{
    return a->shared_handle ? a->plain[k][slot] : rs_ld(&a->atomic[k][slot]);
}

static void recycle_all(rs_client *c, uint32_t k, const int32_t *slots, uint32_t n)
{
    uint32_t done = 0;
    while (done < n) {
        uint32_t now;
        int rc = rs_recycle(c, k, slots + done, n - done, &now);
        CHECK(rc == RS_OK || rc == RS_EBUSY);
        done += now;
    }
}

static void store_path(worker *w, const uint64_t *path, uint32_t n)
{
    int32_t slots[PATH], unused[PATH];
    uint32_t got;
    rs_insert_result result;
    int rc = rs_allocate(w->c, RS_FULL, n, slots, &got);
    CHECK(rc == RS_OK || rc == RS_EBUSY);
    for (uint32_t i = 0; i < got; i++)
        put(w->a, RS_FULL, slots[i], path[i]);
    CHECK_OK(rs_insert(w->c, RS_FULL, path, got, slots, got, 0, 0, &result, unused));
    uint32_t settled = result.num_inserted + result.num_unused;
    CHECK(result.error == RS_INSERT_BUSY || settled == got);
    recycle_all(w->c, RS_FULL, slots + settled, got - settled);
}

static void store_window(worker *w, const uint64_t *path, uint32_t n)
{
    int32_t slots[WINDOW], unused[WINDOW];
    uint32_t got, m = rs_min(n, WINDOW);
    rs_insert_result result;
    int rc = rs_allocate(w->c, RS_SWA, m, slots, &got);
    CHECK(rc == RS_OK || rc == RS_EBUSY);
    if (got < m) {
        recycle_all(w->c, RS_SWA, slots, got);
        return;
    }
    for (uint32_t i = 0; i < m; i++)
        put(w->a, RS_SWA, slots[i], path[n - m + i]);
    CHECK_OK(rs_insert(w->c, RS_SWA, path, n, slots, m, 0, 0, &result, unused));
    if (result.error == RS_INSERT_BUSY)
        recycle_all(w->c, RS_SWA, slots, m);
}

static void drop_pin(rs_client *c, rs_pin pin)
{
    uint32_t stale;
    int rc;
    while ((rc = rs_release(c, pin, &stale)) == RS_EBUSY)
        ;
    CHECK_OK(rc);
    CHECK_EQ(stale, 0);
}

static void read_pinned(worker *w, const uint64_t *path, uint32_t n, uint32_t mask)
{
    int32_t slots[PATH], swa[WINDOW];
    rs_match_result r;
    CHECK_OK(rs_match(w->c, path, n, mask, RS_QUERY_LOCK, &r, slots, swa));
    for (uint32_t i = 0; i < r.common_hit; i++)
        CHECK_EQ(get(w->a, RS_FULL, slots[i]), path[i]);
    for (uint32_t i = 0; i < r.num_swa; i++)
        CHECK_EQ(get(w->a, RS_SWA, swa[i]), path[r.swa_start + i]);
    w->num_hits += r.common_hit;
    drop_pin(w->c, r.pin);
}

static void peek_unpinned(worker *w, const uint64_t *path, uint32_t n)
{
    int32_t slots[PATH], swa[WINDOW];
    rs_match_result r;
    CHECK_OK(rs_match(w->c, path, n, RS_MASK_FULL | RS_MASK_SWA, 0, &r, slots, swa));
    CHECK(r.full_hit <= n && r.common_hit <= r.full_hit);
    for (uint32_t i = 0; i < r.full_hit; i++)
        CHECK(slots[i] >= 0 && slots[i] < SLOTS);
    for (uint32_t i = 0; i < r.num_swa; i++)
        CHECK(swa[i] >= 0 && swa[i] < SIDE);
}

static void *work(void *arg)
{
    worker *w = arg;
    uint64_t rounds = test_setting("RS_ROUNDS", 3000);
    uint32_t num;
    for (uint64_t i = 0; i < rounds; i++) {
        const uint64_t *path = w->a->path[random_below(&w->rng, NUM_PATHS)];
        uint32_t n = 1 + random_below(&w->rng, PATH), what = random_below(&w->rng, 100);
        if (what < 30)
            store_path(w, path, n);
        else if (what < 40)
            store_window(w, path, n);
        else if (what < 70)
            read_pinned(w, path, n, what < 55 ? RS_MASK_FULL : RS_MASK_FULL | RS_MASK_SWA);
        else if (what < 98)
            peek_unpinned(w, path, n);
        else if (what == 98)
            (void)rs_evict(w->c, RS_FULL, 20, RS_REASON_REQUEST, &num);
        else if (random_below(&w->rng, 8) == 0)
            (void)rs_reset(w->c);
    }
    return NULL;
}

static void run_workers(bool shared_handle)
{
    static arena a;
    worker w[NUM_THREADS];
    rs_config cfg = small_config(SLOTS, SIDE, WINDOW, 0);
    cfg.max_clients = NUM_THREADS + 1;
    cfg.pins_per_client = 64;
    int fd = make_region(&cfg);
    uint64_t num_hits = 0;
    a.shared_handle = shared_handle;
    for (uint64_t i = 0; i < NUM_PATHS; i++) {
        make_path(a.path[i], PATH, i + 1);
        memcpy(a.path[i], a.path[0], (i % 4) * 8 * sizeof(uint64_t)); /* shared beginnings */
    }
    rs_client *c = attach(fd);
    for (uint64_t i = 0; i < NUM_THREADS; i++) {
        w[i] = (worker){.a = &a, .c = shared_handle ? c : attach(fd), .rng = test_seed + i};
        CHECK_EQ(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < NUM_THREADS; i++) {
        CHECK_EQ(pthread_join(w[i].thread, NULL), 0);
        num_hits += w[i].num_hits;
        check_region(w[i].c);
        if (!shared_handle)
            CHECK_OK(rs_detach(w[i].c));
    }
    rs_stats stats = stats_of(c);
    CHECK_EQ(stats.pool[RS_FULL].num_staged, 0);
    CHECK_EQ(stats.pool[RS_SWA].num_staged, 0);
    CHECK_EQ(stats.pool[RS_FULL].num_pins, 0);
    CHECK_EQ(stats.pins_taken, stats.pins_released);
    CHECK(num_hits > 0);
    check_region(c);
    CHECK_OK(rs_detach(c));
}

TEST(threads_sharing_one_handle) { run_workers(true); }
TEST(threads_with_handles_of_their_own) { run_workers(false); }

/* Readers walk long paths without the lock while a writer evicts and republishes them: a walk must
 * return a prefix that was there, in slots that carried it. */
typedef struct reading { rs_client *c; const uint64_t *path; rs_a32 stop; uint64_t num_walks; } reading;

static void *read_on(void *arg)
{
    reading *r = arg;
    static _Thread_local int32_t slots[MAX_BLOCKS];
    rs_match_result result;
    while (!rs_ld(&r->stop)) {
        CHECK_OK(rs_match(r->c, r->path, 1000, RS_MASK_FULL, 0, &result, slots, NULL));
        /* BUSY: the walk kept failing, and so did the lock: the writer never pauses. */
        CHECK(result.status == RS_STATUS_OK || result.status == RS_STATUS_BUSY);
        for (uint32_t i = 1; i < result.full_hit; i++)
            CHECK(slots[i] != slots[i - 1]);
        r->num_walks += result.full_hit != 0;
    }
    return NULL;
}

TEST(threads_walk_while_a_writer_unlinks)
{
    rs_config cfg = small_config(1200, 0, 0, 0);
    int fd = make_region(&cfg);
    rs_client *writer = attach(fd);
    uint64_t path[1000];
    pthread_t thread;
    make_path(path, 1000, 1);
    publish(writer, path, 1000);
    reading r = {.c = attach(fd), .path = path};
    CHECK_EQ(pthread_create(&thread, NULL, read_on, &r), 0);
    uint64_t rounds = test_setting("RS_ROUNDS", 3000) / 10, rng = test_seed;
    for (uint64_t i = 0; i < rounds; i++) {
        uint32_t num, keep = random_below(&rng, 1000);
        CHECK_OK(rs_evict(writer, RS_FULL, 1000 - keep, RS_REASON_REQUEST, &num));
        extend(writer, path, full_hit(writer, path, 1000), 1000);
    }
    rs_raw(&r.stop, 1);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(r.num_walks > 0);
    check_region(writer);
}
