/* test_side.c - SWA windows and MAMBA states: joint matches, side inserts, side pools. */
#include "world.h"

#define FULL_SWA (RS_MASK_FULL | RS_MASK_SWA)

TEST(side_swa_joint_match)
{
    world w = world_of(64, 32, 8, 0);
    uint64_t path[20], brief[5];
    make_path(path, 20, 1);
    make_path(brief, 5, 2);
    publish(w.c, path, 20);
    expect_hit(w.c, path, 20, FULL_SWA, (hits){.full = 20});
    publish_side(w.c, RS_SWA, path, 20, 8);
    expect_hit(w.c, path, 20, FULL_SWA, (hits){.full = 20, .common = 20, .num_swa = 8});
    expect_hit(w.c, path, 12, FULL_SWA, (hits){.full = 12});
    publish(w.c, brief, 5);
    publish_side(w.c, RS_SWA, brief, 5, 5);
    expect_hit(w.c, brief, 5, FULL_SWA, (hits){.full = 5, .common = 5, .num_swa = 5});
    expect_slots(w.c, RS_SWA, 19, 0, 13);
}

TEST(side_swa_window_of_one)
{
    world w = world_of(64, 8, 1, 0);
    uint64_t path[6];
    make_path(path, 6, 1);
    publish(w.c, path, 6);
    publish_side(w.c, RS_SWA, path, 4, 1);
    expect_hit(w.c, path, 6, FULL_SWA, (hits){.full = 6, .common = 4, .num_swa = 1});
    check_region(w.c);
}

TEST(side_mamba_state_at_a_boundary)
{
    world w = world_of(64, 16, 4, 8);
    uint64_t path[12];
    make_path(path, 12, 1);
    publish(w.c, path, 12);
    publish_side(w.c, RS_MAMBA, path, 8, 1);
    expect_hit(w.c, path, 12, RS_MASK_FULL | RS_MASK_MAMBA, (hits){.full = 12, .common = 8});
    expect_hit(w.c, path, 12, FULL_SWA | RS_MASK_MAMBA, (hits){.full = 12});
    publish_side(w.c, RS_SWA, path, 8, 4);
    expect_hit(w.c, path, 12, FULL_SWA | RS_MASK_MAMBA, (hits){.full = 12, .common = 8, .num_swa = 4});
    check_region(w.c);
}

TEST(side_insert_needs_its_path)
{
    world w = world_of(64, 16, 4, 0);
    uint64_t path[12];
    int32_t slots[6], unused[6];
    rs_insert_result result;
    make_path(path, 12, 1);
    publish(w.c, path, 6);
    stage(w.c, RS_SWA, 4, slots);
    CHECK_OK(rs_insert(w.c, RS_SWA, path, 12, slots, 4, 0, 0, &result, unused));
    expect_insert(&result, RS_INSERT_FULL_PATH_MISSING, 0, 4);
    expect_slots(w.c, RS_SWA, 16, 0, 0);
    stage(w.c, RS_SWA, 6, slots); /* two slots before the window are redundant */
    CHECK_OK(rs_insert(w.c, RS_SWA, path, 6, slots, 6, 0, RS_INSERT_KEEP_UNUSED, &result, unused));
    expect_insert(&result, RS_INSERT_OK, 4, 2);
    CHECK_EQ(unused[0], slots[0]);
    expect_slots(w.c, RS_SWA, 10, 2, 4);
}

TEST(side_allocation_is_all_or_none)
{
    world w = world_of(64, 16, 8, 0);
    uint64_t a[8], b[8];
    int32_t slots[16];
    make_path(a, 8, 1);
    make_path(b, 8, 2);
    publish(w.c, a, 8);
    publish(w.c, b, 8);
    publish_side(w.c, RS_SWA, a, 8, 8);
    publish_side(w.c, RS_SWA, b, 8, 8);
    rs_pin pin = pin_path(w.c, a, 8, FULL_SWA, 8);
    expect_allocated(w.c, RS_SWA, 9, slots, 0);
    expect_slots(w.c, RS_SWA, 0, 0, 16); /* nothing was evicted for what cannot be had */
    expect_allocated(w.c, RS_SWA, 8, slots, 8);
    expect_slots(w.c, RS_SWA, 0, 8, 8);
    release(w.c, pin);
    expect_allocated(w.c, RS_SWA, 8, slots + 8, 8);
    check_region(w.c);
}

/* A pin may end between two window ends; evicting the blocks below it, with their end, must leave
 * the pinned window whole. */
TEST(side_pinned_window_survives_eviction_below_it)
{
    world w = world_of(16, 16, 8, 0);
    uint64_t path[10];
    int32_t slots[16];
    make_path(path, 10, 1);
    publish(w.c, path, 10);
    publish_side(w.c, RS_SWA, path, 4, 4);
    publish_side(w.c, RS_SWA, path, 10, 8);
    rs_pin pin = pin_path(w.c, path, 6, FULL_SWA, 6);
    expect_allocated(w.c, RS_FULL, 16, slots, 10);
    check_region(w.c);
    expect_hit(w.c, path, 6, FULL_SWA, (hits){.full = 6, .common = 6, .num_swa = 6});
    release(w.c, pin);
    check_region(w.c);
    CHECK_OK(rs_reset(w.c));
    expect_slots(w.c, RS_SWA, 16, 0, 0);
}
