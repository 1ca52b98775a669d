/* test_side.c - SWA windows and MAMBA states: joint matches, side inserts, side pools. */
#include "world.h"

TEST(side_swa_joint_match)
{
    world w = world_of(64, 32, 8, 0);
    uint64_t path[20], brief[5];
    int32_t swa[8];
    make_path(path, 20, 1);
    make_path(brief, 5, 2);
    publish(w.c, path, 20);
    rs_match_result hit = match(w.c, path, 20, RS_MASK_FULL | RS_MASK_SWA, swa);
    CHECK_EQ(hit.common_hit, 0);
    CHECK_EQ(hit.full_hit, 20);
    publish_side(w.c, RS_SWA, path, 20, 8);
    hit = match(w.c, path, 20, RS_MASK_FULL | RS_MASK_SWA, swa);
    CHECK_EQ(hit.common_hit, 20);
    CHECK_EQ(hit.swa_start, 12);
    CHECK_EQ(hit.num_swa, 8);
    hit = match(w.c, path, 12, RS_MASK_FULL | RS_MASK_SWA, swa);
    CHECK_EQ(hit.common_hit, 0);
    CHECK_EQ(hit.full_hit, 12);
    publish(w.c, brief, 5);
    publish_side(w.c, RS_SWA, brief, 5, 5);
    hit = match(w.c, brief, 5, RS_MASK_FULL | RS_MASK_SWA, swa);
    CHECK_EQ(hit.common_hit, 5);
    CHECK_EQ(hit.swa_start, 0);
    CHECK_EQ(hit.num_swa, 5);
    expect_slots(w.c, RS_SWA, 19, 0, 13);
}

TEST(side_swa_window_of_one)
{
    world w = world_of(64, 8, 1, 0);
    uint64_t path[6];
    int32_t swa[1];
    make_path(path, 6, 1);
    publish(w.c, path, 6);
    publish_side(w.c, RS_SWA, path, 4, 1);
    rs_match_result hit = match(w.c, path, 6, RS_MASK_FULL | RS_MASK_SWA, swa);
    CHECK_EQ(hit.full_hit, 6);
    CHECK_EQ(hit.common_hit, 4);
    CHECK_EQ(hit.swa_start, 3);
    check_region(w.c);
}

TEST(side_mamba_state_at_a_boundary)
{
    world w = world_of(64, 16, 4, 8);
    uint64_t path[12];
    int32_t swa[4];
    make_path(path, 12, 1);
    publish(w.c, path, 12);
    publish_side(w.c, RS_MAMBA, path, 8, 1);
    rs_match_result hit = match(w.c, path, 12, RS_MASK_FULL | RS_MASK_MAMBA, NULL);
    CHECK_EQ(hit.common_hit, 8);
    CHECK(hit.mamba_slot >= 0);
    CHECK_EQ(hit.num_swa, 0);
    hit = match(w.c, path, 12, RS_MASK_FULL | RS_MASK_SWA | RS_MASK_MAMBA, swa);
    CHECK_EQ(hit.common_hit, 0);
    CHECK_EQ(hit.mamba_slot, -1);
    publish_side(w.c, RS_SWA, path, 8, 4);
    hit = match(w.c, path, 12, RS_MASK_FULL | RS_MASK_SWA | RS_MASK_MAMBA, swa);
    CHECK_EQ(hit.common_hit, 8);
    CHECK_EQ(hit.swa_start, 4);
    check_region(w.c);
}

TEST(side_side_insert_needs_its_path)
{
    world w = world_of(64, 16, 4, 0);
    uint64_t path[12];
    int32_t slots[6], unused[6];
    rs_insert_result result;
    make_path(path, 12, 1);
    publish(w.c, path, 6);
    stage(w.c, RS_SWA, 4, slots);
    CHECK_OK(rs_insert(w.c, RS_SWA, path, 12, slots, 4, 0, 0, &result, unused));
    CHECK_EQ(result.error, RS_INSERT_FULL_PATH_MISSING);
    CHECK_EQ(result.num_unused, 4);
    expect_slots(w.c, RS_SWA, 16, 0, 0);
    stage(w.c, RS_SWA, 6, slots); /* two slots before the window are redundant */
    CHECK_OK(rs_insert(w.c, RS_SWA, path, 6, slots, 6, 0, RS_INSERT_KEEP_UNUSED, &result, unused));
    CHECK_EQ(result.num_inserted, 4);
    CHECK_EQ(result.num_unused, 2);
    CHECK_EQ(unused[0], slots[0]);
    expect_slots(w.c, RS_SWA, 10, 2, 4);
}

TEST(side_side_allocation_is_all_or_none)
{
    world w = world_of(64, 16, 8, 0);
    uint64_t a[8], b[8];
    int32_t slots[16];
    uint32_t got;
    make_path(a, 8, 1);
    make_path(b, 8, 2);
    publish(w.c, a, 8);
    publish(w.c, b, 8);
    publish_side(w.c, RS_SWA, a, 8, 8);
    publish_side(w.c, RS_SWA, b, 8, 8);
    rs_pin pin = pin_path(w.c, a, 8, RS_MASK_FULL | RS_MASK_SWA, 8);
    CHECK_OK(rs_allocate(w.c, RS_SWA, 9, slots, &got));
    CHECK_EQ(got, 0);
    expect_slots(w.c, RS_SWA, 0, 0, 16); /* nothing was evicted for what cannot be had */
    CHECK_OK(rs_allocate(w.c, RS_SWA, 8, slots, &got));
    CHECK_EQ(got, 8);
    expect_slots(w.c, RS_SWA, 0, 8, 8);
    release(w.c, pin);
    CHECK_OK(rs_allocate(w.c, RS_SWA, 8, slots + 8, &got));
    CHECK_EQ(got, 8);
    check_region(w.c);
}

/* A pin may end between two window ends; evicting the blocks below it, with their end, must leave
 * the pinned window whole. */
TEST(side_pinned_window_survives_eviction_below_it)
{
    world w = world_of(16, 16, 8, 0);
    uint64_t path[10];
    int32_t slots[16], swa[8];
    uint32_t got;
    make_path(path, 10, 1);
    publish(w.c, path, 10);
    publish_side(w.c, RS_SWA, path, 4, 4);
    publish_side(w.c, RS_SWA, path, 10, 8);
    rs_pin pin = pin_path(w.c, path, 6, RS_MASK_FULL | RS_MASK_SWA, 6);
    CHECK_OK(rs_allocate(w.c, RS_FULL, 16, slots, &got));
    check_region(w.c);
    CHECK_EQ(match(w.c, path, 6, RS_MASK_FULL | RS_MASK_SWA, swa).common_hit, 6);
    release(w.c, pin);
    check_region(w.c);
    CHECK_OK(rs_reset(w.c));
    expect_slots(w.c, RS_SWA, 16, 0, 0);
}
