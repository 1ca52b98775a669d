/* harness.c - see harness.h. */
#include "harness.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

uint64_t test_seed;
char test_note[128];

void test_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, args);
    fprintf(stderr, " %s\n", test_note);
    va_end(args);
    fflush(NULL);
    abort();
}

void test_equal(const char *file, int line, const char *a_text, long long a, const char *b_text, long long b)
{
    if (a != b)
        test_fail(file, line, "%s is %lld, %s is %lld", a_text, a, b_text, b);
}

uint64_t random_next(uint64_t *state)
{
    uint64_t x = (*state += 0x9e3779b97f4a7c15ull);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

uint64_t test_setting(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 0) : otherwise;
}

/* -- regions ------------------------------------------------------------------------------------ */

rs_config small_config(uint32_t full_slots, uint32_t swa_slots, uint32_t window, uint32_t mamba_slots)
{
    rs_config cfg = {
        .pool = {{.num_slots = full_slots, .slot_bytes = 64},
                 {.num_slots = swa_slots, .window_blocks = swa_slots ? window : 0, .slot_bytes = 64},
                 {.num_slots = mamba_slots, .window_blocks = mamba_slots ? 1 : 0, .slot_bytes = 64}},
        .block_size = 16, .slot_align = 1, .max_clients = 4, .pins_per_client = 8, .event_capacity = 64,
        .epoch = {1},
    };
    return cfg;
}

int make_region(const rs_config *cfg)
{
    uint64_t num_bytes;
    int fd = memfd_create("index", MFD_CLOEXEC);
    CHECK(fd >= 0);
    CHECK_OK(rs_region_bytes(cfg, &num_bytes));
    CHECK_EQ(ftruncate(fd, (off_t)num_bytes), 0);
    CHECK_OK(rs_region_format(fd, cfg));
    CHECK_OK(rs_region_set_state(fd, RS_STATE_READY));
    return fd;
}

rs_client *attach(int fd)
{
    rs_client *c;
    CHECK_OK(rs_attach(fd, "test", &c));
    return c;
}

void kill_client(rs_client *c)
{
    rs_fd_close(&c->life);
    rs_fd_close(&c->lease);
}

static void check_snapshot(rs_snapshot *s)
{
    char report[2048];
    int num = rs_snapshot_check(s, report, sizeof(report));
    if (num != 0)
        FAIL("%d violations:\n%s", num, report);
    rs_snapshot_free(s);
}

void check_region(rs_client *c)
{
    rs_snapshot *s;
    CHECK_OK(rs_snapshot_take(c, &s));
    check_snapshot(s);
}

void check_fd(int fd)
{
    rs_snapshot *s;
    CHECK_OK(rs_snapshot_peek(fd, &s));
    check_snapshot(s);
}

/* -- verbs -------------------------------------------------------------------------------------- */

void make_path(uint64_t *hashes, uint32_t n, uint64_t id)
{
    uint64_t state = id * 0x10001 + 1;
    for (uint32_t i = 0; i < n; i++)
        hashes[i] = random_next(&state);
}

void stage(rs_client *c, uint32_t component, uint32_t n, int32_t *slots)
{
    uint32_t got;
    CHECK_OK(rs_allocate(c, component, n, slots, &got));
    CHECK_EQ(got, n);
}

void extend(rs_client *c, const uint64_t *hashes, uint32_t start, uint32_t n)
{
    static _Thread_local int32_t slots[MAX_BLOCKS], unused[MAX_BLOCKS];
    rs_insert_result result;
    CHECK(n <= MAX_BLOCKS);
    stage(c, RS_FULL, n - start, slots);
    CHECK_OK(rs_insert(c, RS_FULL, hashes, n, slots, n - start, start, 0, &result, unused));
    CHECK_EQ(result.error, RS_INSERT_OK);
    CHECK_EQ(result.num_inserted, n - start);
}

void publish(rs_client *c, const uint64_t *hashes, uint32_t n) { extend(c, hashes, 0, n); }

void publish_side(rs_client *c, uint32_t component, const uint64_t *hashes, uint32_t n, uint32_t m)
{
    int32_t slots[RS_MAX_WINDOW], unused[RS_MAX_WINDOW];
    rs_insert_result result;
    stage(c, component, m, slots);
    CHECK_OK(rs_insert(c, component, hashes, n, slots, m, 0, 0, &result, unused));
    CHECK_EQ(result.error, RS_INSERT_OK);
}

uint32_t full_hit(rs_client *c, const uint64_t *hashes, uint32_t n)
{
    static _Thread_local int32_t slots[MAX_BLOCKS];
    rs_match_result result;
    CHECK(n <= MAX_BLOCKS);
    CHECK_OK(rs_match(c, hashes, n, RS_MASK_FULL, RS_QUERY_NO_META, &result, slots, NULL));
    CHECK_EQ(result.status, RS_STATUS_OK);
    return result.full_hit;
}

rs_pin pin_path(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, uint32_t expected_hit)
{
    static _Thread_local int32_t slots[MAX_BLOCKS], side[RS_MAX_WINDOW];
    rs_match_result result;
    CHECK_OK(rs_match(c, hashes, n, mask, RS_QUERY_LOCK, &result, slots, side));
    CHECK_EQ(result.status, RS_STATUS_OK);
    CHECK_EQ(result.common_hit, expected_hit);
    CHECK_EQ(result.pin.valid, expected_hit != 0);
    return result.pin;
}

void release(rs_client *c, rs_pin pin)
{
    uint32_t stale;
    CHECK_OK(rs_release(c, pin, &stale));
    CHECK_EQ(stale, 0);
}

rs_stats stats_of(rs_client *c)
{
    rs_stats stats;
    CHECK_OK(rs_get_stats(c, &stats));
    return stats;
}
