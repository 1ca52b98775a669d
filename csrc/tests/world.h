/* world.h - one region with one client, for tests of single verbs. */
#ifndef RS_TEST_WORLD_H
#define RS_TEST_WORLD_H

#include "harness.h"

typedef struct world { rs_config cfg; int fd; rs_client *c; } world;

static inline world world_of(uint32_t full, uint32_t swa, uint32_t window, uint32_t mamba)
{
    world w = {.cfg = small_config(full, swa, window, mamba)};
    w.fd = make_region(&w.cfg);
    w.c = attach(w.fd);
    return w;
}

static inline void expect_slots(rs_client *c, uint32_t component, uint32_t free, uint32_t staged, uint32_t published)
{
    rs_stats stats = stats_of(c);
    CHECK_EQ(stats.pool[component].num_free, free);
    CHECK_EQ(stats.pool[component].num_staged, staged);
    CHECK_EQ(stats.pool[component].num_published, published);
    check_region(c);
}

static inline rs_match_result match(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, int32_t *swa_slots)
{
    static int32_t slots[MAX_BLOCKS];
    rs_match_result result;
    CHECK_OK(rs_match(c, hashes, n, mask, 0, &result, slots, swa_slots));
    CHECK_EQ(result.status, RS_STATUS_OK);
    return result;
}

/* What a lookup finds; of what is not named, nothing. */
typedef struct hits { uint32_t full, common, num_swa; } hits;

static inline void expect_hit(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, hits expected)
{
    int32_t swa[MAX_BLOCKS];
    rs_match_result found = match(c, hashes, n, mask, swa);
    CHECK_EQ(found.full_hit, expected.full);
    CHECK_EQ(found.common_hit, expected.common);
    CHECK_EQ(found.num_swa, expected.num_swa);
    CHECK_EQ(found.swa_start, expected.common - expected.num_swa);
    CHECK_EQ(found.mamba_slot >= 0, (mask & RS_MASK_MAMBA) && expected.common);
}

static inline void expect_insert(const rs_insert_result *result, uint32_t error, uint32_t inserted, uint32_t unused)
{
    CHECK_EQ(result->error, error);
    CHECK_EQ(result->num_inserted, inserted);
    CHECK_EQ(result->num_unused, unused);
}

/* Ask for n slots, and be given `expected` of them. */
static inline void expect_allocated(rs_client *c, uint32_t component, uint32_t n, int32_t *slots, uint32_t expected)
{
    uint32_t got;
    CHECK_OK(rs_allocate(c, component, n, slots, &got));
    CHECK_EQ(got, expected);
}

static inline void expect_evicted(rs_client *c, uint32_t component, uint32_t n, uint32_t reason, uint32_t expected)
{
    uint32_t num;
    CHECK_OK(rs_evict(c, component, n, reason, &num));
    CHECK_EQ(num, expected);
}

#endif
