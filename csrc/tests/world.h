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

#endif
