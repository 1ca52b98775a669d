/* bench.c - what the C core costs: one row of JSON per measurement (benchmarks/bench_core.py).
 *
 * Times are medians over many calls, so that the moments when the machine does something else do not
 * count.  "limit" is what the same memory costs without an index: reading hash and parent of the
 * path's blocks, the slots being known.
 */
#include "harness.h"

#include <stdlib.h>
#include <string.h>

enum { TREE_BLOCKS = 100000, PATH = 2000, SHARED = 1000, LONGEST = 8192, NUM_LEAVES = 31000, CALLS = 2000 };

static uint64_t rng = 1;

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static double median_us(uint64_t *ns, uint32_t n)
{
    qsort(ns, n, sizeof(*ns), compare_u64);
    return (double)ns[n / 2] / 1e3;
}

/* Two reads of the clock with nothing in between. */
static double clock_us(void)
{
    static uint64_t ns[CALLS];
    for (uint32_t i = 0; i < CALLS; i++) {
        uint64_t began = rs_now_ns();
        ns[i] = rs_now_ns() - began;
    }
    return median_us(ns, CALLS);
}

static void row(const char *what, double value, const char *unit, double target, bool at_most, const char *limit)
{
    printf("{\"what\": \"%s\", \"measured\": \"%.2f %s\", \"target\": \"%s %g %s\", \"limit\": \"%s\", "
           "\"met\": %s, \"value\": %.4f}\n", what, value, unit, at_most ? "<=" : ">=", target, unit, limit,
           (at_most ? value <= target : value >= target) ? "true" : "false", value);
    fflush(stdout);
}

/* -- a tree of 2000-block paths that share 1000, and one path of 8192 -------------------------------------- */

typedef struct tree {
    rs_client *c;
    uint64_t (*path)[PATH], longest[LONGEST];
    uint32_t num_paths;
} tree;

static rs_client *index_of(uint32_t num_slots)
{
    rs_config cfg = small_config(num_slots, 0, 0, 0);
    cfg.max_clients = 64;
    return attach(make_region(&cfg));
}

/* Stage the whole pool, to be used up in the order of the ids or at random. */
static int32_t *stage_all(rs_client *c, uint32_t num_slots, bool shuffled)
{
    int32_t *slots = malloc(num_slots * sizeof(*slots));
    CHECK(slots != NULL);
    stage(c, RS_FULL, num_slots, slots);
    for (uint32_t i = num_slots; shuffled && i-- > 1;) {
        uint32_t j = random_below(&rng, i + 1);
        int32_t slot = slots[i];
        slots[i] = slots[j];
        slots[j] = slot;
    }
    return slots;
}

static void insert_with(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t start, int32_t **slots)
{
    static int32_t unused[LONGEST];
    rs_insert_result result;
    CHECK_OK(rs_insert(c, RS_FULL, hashes, n, *slots, n - start, start, 0, &result, unused));
    CHECK_EQ(result.num_inserted, n - start);
    *slots += n - start;
}

static tree make_tree(bool shuffled)
{
    tree t = {.c = index_of(TREE_BLOCKS), .num_paths = (TREE_BLOCKS - LONGEST - SHARED) / (PATH - SHARED)};
    int32_t *all = stage_all(t.c, TREE_BLOCKS, shuffled), *slots = all;
    uint32_t done;
    t.path = malloc(t.num_paths * sizeof(*t.path));
    CHECK(t.path != NULL);
    make_path(t.longest, LONGEST, 1);
    insert_with(t.c, t.longest, LONGEST, 0, &slots);
    for (uint32_t i = 0; i < t.num_paths; i++) {
        make_path(t.path[i], PATH, 2 + i);
        memcpy(t.path[i], t.path[0], SHARED * sizeof(uint64_t));
        insert_with(t.c, t.path[i], PATH, i ? SHARED : 0, &slots);
    }
    CHECK_OK(rs_recycle(t.c, RS_FULL, slots, (uint32_t)(all + TREE_BLOCKS - slots), &done));
    free(all);
    return t;
}

static uint64_t walk_known(const rs_view *v, const int32_t *slots, uint32_t n)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += rs_ld(&v->node[slots[i]].hash) + rs_ld_acq(&v->node[slots[i]].parent);
    return sum;
}

static void bench_match(const tree *t, uint32_t n, const char *order, double target_us, double clock)
{
    static uint64_t ns[CALLS], known_ns[CALLS], sink;
    static int32_t slots[LONGEST];
    char what[96], limit[64];
    rs_match_result result;
    for (uint32_t i = 0; i < CALLS; i++) {
        const uint64_t *path = n > PATH ? t->longest : t->path[random_below(&rng, t->num_paths)];
        uint64_t began = rs_now_ns();
        CHECK_OK(rs_match(t->c, path, n, RS_MASK_FULL, 0, &result, slots, NULL));
        ns[i] = rs_now_ns() - began;
        CHECK_EQ(result.full_hit, n);
        began = rs_now_ns();
        sink += walk_known(&t->c->v, slots, n);
        known_ns[i] = rs_now_ns() - began;
    }
    CHECK(sink != 0);
    snprintf(what, sizeof(what), "C match, %u blocks, %s slots", n, order);
    snprintf(limit, sizeof(limit), "%.2f us known slots", median_us(known_ns, CALLS) - clock);
    row(what, median_us(ns, CALLS) - clock, "us", target_us, true, limit);
}

static void bench_matches(double clock)
{
    static const struct { uint32_t n; double consecutive, shuffled; } sizes[] = {
        {128, 0.5, 1}, {1024, 2, 6}, {8192, 15, 50}};
    for (int shuffled = 0; shuffled < 2; shuffled++) {
        tree t = make_tree(shuffled);
        for (int i = 0; i < 3; i++)
            bench_match(&t, sizes[i].n, shuffled ? "shuffled" : "consecutive",
                        shuffled ? sizes[i].shuffled : sizes[i].consecutive, clock);
        free(t.path);
        CHECK_OK(rs_detach(t.c));
    }
}

/* -- insert and evict ------------------------------------------------------------------------------------------ */

/* New paths, in slots of a pool like the tree's; evicted in between, which is not measured. */
static void bench_insert(uint32_t n, double clock)
{
    static uint64_t ns[CALLS], hashes[LONGEST];
    static int32_t slots[LONGEST], unused[LONGEST];
    rs_client *c = index_of(TREE_BLOCKS);
    rs_insert_result result;
    char what[96];
    for (uint32_t i = 0; i < CALLS; i++) {
        make_path(hashes, n, 1000 + i);
        stage(c, RS_FULL, n, slots);
        uint64_t began = rs_now_ns();
        CHECK_OK(rs_insert(c, RS_FULL, hashes, n, slots, n, 0, 0, &result, unused));
        ns[i] = rs_now_ns() - began;
        CHECK_EQ(result.num_inserted, n);
    }
    snprintf(what, sizeof(what), "C insert, new path of %u blocks", n);
    row(what, median_us(ns, CALLS) - clock, "us", 2 + 0.015 * n, true, "");
    CHECK_OK(rs_detach(c));
}

static void bench_evict(double clock)
{
    static uint64_t ns[CALLS];
    rs_client *c = index_of(3 * NUM_LEAVES);
    uint64_t path[3];
    for (uint64_t i = 0; i < NUM_LEAVES; i++) {
        make_path(path, 3, i + 1);
        publish(c, path, 3);
    }
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_listed, NUM_LEAVES);
    for (uint32_t i = 0; i < CALLS; i++) {
        uint32_t num;
        uint64_t began = rs_now_ns();
        CHECK_OK(rs_evict(c, RS_FULL, 1, RS_REASON_REQUEST, &num));
        ns[i] = rs_now_ns() - began;
        CHECK_EQ(num, 1);
    }
    row("C evict, one block of 31k leaves", median_us(ns, CALLS) - clock, "us", 1, true, "");
    CHECK_OK(rs_detach(c));
}

/* -- hashing ------------------------------------------------------------------------------------------------------ */

enum { HASH_TOKENS = 16384, HASH_BLOCK = 16 };

/* XXH64 needs 46 multiplications per block of 16 tokens, and a core does one of 64 bits per cycle: what is
 * possible without the vector unit. */
static double multiply_bound(void)
{
    static uint64_t ns[CALLS / 10];
    enum { ROUNDS = 20000, CHAINS = 6 };
    uint64_t a = 3, b = 5, c = 7, d = 9, e = 11, f = 13, by = test_seed | 1;
    for (uint32_t i = 0; i < CALLS / 10; i++) {
        uint64_t began = rs_now_ns();
        for (int r = 0; r < ROUNDS; r++) {
            a *= by, b *= by, c *= by, d *= by, e *= by, f *= by;
            __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
        }
        ns[i] = rs_now_ns() - began;
    }
    return ROUNDS * CHAINS / (median_us(ns, CALLS / 10) * 1e3) / 46 * HASH_BLOCK;
}

static void bench_hash(double clock)
{
    static int64_t tokens[HASH_TOKENS];
    static uint64_t ns[CALLS], out[HASH_TOKENS / HASH_BLOCK];
    char limit[64];
    for (int i = 0; i < HASH_TOKENS; i++)
        tokens[i] = (int64_t)random_below(&rng, 128000);
    for (uint32_t i = 0; i < CALLS; i++) {
        uint64_t began = rs_now_ns();
        CHECK_OK(rs_hash_blocks(tokens, HASH_TOKENS, HASH_BLOCK, NULL, 0, out));
        ns[i] = rs_now_ns() - began;
    }
    snprintf(limit, sizeof(limit), "%.2f with the multiplier alone", multiply_bound());
    double us = median_us(ns, CALLS) - clock;
    row("C hashing, blocks of 16 tokens", HASH_TOKENS / (us * 1e3), "Gtokens/s", 1, false, limit);
}

int main(void)
{
    double clock = clock_us();
    bench_matches(clock);
    bench_insert(1, clock);
    bench_insert(64, clock);
    bench_insert(1000, clock);
    bench_evict(clock);
    bench_hash(clock);
    return 0;
}
