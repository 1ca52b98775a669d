/* test_verbs.c - every verb in one process: results, counts, refusals. */
#include "world.h"

#include <string.h>

TEST(verbs_round_trip_has_exact_counts)
{
    world w = world_of(64, 0, 0, 0);
    uint64_t path[20];
    int32_t slots[20], found[20], unused[20];
    rs_insert_result inserted;
    rs_match_result result;
    uint32_t done;
    make_path(path, 20, 1);
    stage(w.c, RS_FULL, 20, slots);
    expect_slots(w.c, RS_FULL, 44, 20, 0);
    for (int i = 1; i < 20; i++)
        CHECK_EQ(slots[i], slots[0] + i); /* a run */
    CHECK_EQ(full_hit(w.c, path, 20), 0); /* nothing is matchable before insert */
    CHECK_OK(rs_insert(w.c, RS_FULL, path, 12, slots, 12, 0, 0, &inserted, unused));
    expect_insert(&inserted, RS_INSERT_OK, 12, 0);
    expect_slots(w.c, RS_FULL, 44, 8, 12);
    expect_hit(w.c, path, 20, RS_MASK_FULL, (hits){.full = 12, .common = 12});
    CHECK_OK(rs_match(w.c, path, 20, RS_MASK_FULL, 0, &result, found, NULL));
    CHECK_EQ(memcmp(found, slots, 12 * sizeof(*slots)), 0);
    CHECK_EQ(full_hit(w.c, path, 7), 7); /* may end mid-path */
    CHECK_EQ(full_hit(w.c, path + 1, 5), 0);
    CHECK_OK(rs_recycle(w.c, RS_FULL, slots + 12, 8, &done));
    CHECK_EQ(done, 8);
    expect_slots(w.c, RS_FULL, 52, 0, 12);
    CHECK_OK(rs_detach(w.c));
    check_fd(w.fd);
}

TEST(verbs_allocate_evicts_from_the_tail)
{
    world w = world_of(2000, 0, 0, 0);
    uint64_t path[1500];
    int32_t slots[1500];
    uint32_t done;
    make_path(path, 1500, 1);
    publish(w.c, path, 1500);
    stage(w.c, RS_FULL, 1500, slots);
    CHECK_EQ(full_hit(w.c, path, 1500), 500);
    expect_slots(w.c, RS_FULL, 0, 1500, 500);
    CHECK_OK(rs_recycle(w.c, RS_FULL, slots, 1500, &done));
    extend(w.c, path, 500, 1500);
    rs_pin pin = pin_path(w.c, path, 1500, RS_MASK_FULL, 1500);
    expect_allocated(w.c, RS_FULL, 1500, slots, 500);
    CHECK_EQ(full_hit(w.c, path, 1500), 1500);
    CHECK_EQ(stats_of(w.c).allocate_short[RS_FULL], 1);
    release(w.c, pin);
    expect_slots(w.c, RS_FULL, 0, 500, 1500);
}

TEST(verbs_insert_returns_exactly_the_redundant_slots)
{
    world w = world_of(64, 0, 0, 0);
    rs_client *other = attach(w.fd);
    uint64_t path[10];
    int32_t slots[10], unused[10];
    rs_insert_result result;
    make_path(path, 10, 1);
    publish(other, path, 6);
    stage(w.c, RS_FULL, 10, slots);
    CHECK_OK(rs_insert(w.c, RS_FULL, path, 10, slots, 10, 0, 0, &result, unused));
    expect_insert(&result, RS_INSERT_OK, 4, 6);
    CHECK_EQ(memcmp(unused, slots, 6 * sizeof(*slots)), 0);
    expect_slots(w.c, RS_FULL, 54, 0, 10);
    stage(w.c, RS_FULL, 10, slots);
    CHECK_OK(rs_insert(w.c, RS_FULL, path, 10, slots, 10, 0, RS_INSERT_KEEP_UNUSED, &result, unused));
    expect_insert(&result, RS_INSERT_OK, 0, 10);
    expect_slots(w.c, RS_FULL, 44, 10, 10);
}

TEST(verbs_insert_from_a_start)
{
    world w = world_of(64, 0, 0, 0);
    uint64_t path[10], branch[10];
    int32_t slots[10], unused[10];
    rs_insert_result result;
    make_path(path, 10, 1);
    publish(w.c, path, 4);
    stage(w.c, RS_FULL, 4, slots);
    CHECK_OK(rs_insert(w.c, RS_FULL, path, 10, slots, 4, 6, 0, &result, unused));
    expect_insert(&result, RS_INSERT_PREFIX_MISSING, 0, 4);
    expect_slots(w.c, RS_FULL, 60, 0, 4); /* recycled */
    extend(w.c, path, 4, 10);
    extend(w.c, path, 10, 10); /* nothing to do */
    CHECK_EQ(full_hit(w.c, path, 10), 10);
    make_path(branch, 10, 2);
    memcpy(branch, path, 5 * sizeof(*path));
    extend(w.c, branch, 5, 10);
    CHECK_EQ(full_hit(w.c, branch, 10), 10);
    CHECK_EQ(full_hit(w.c, path, 10), 10);
    expect_slots(w.c, RS_FULL, 49, 0, 15);
}

TEST(verbs_refuse_slots_that_are_not_the_callers)
{
    world w = world_of(32, 8, 3, 0);
    rs_client *other = attach(w.fd);
    uint64_t path[4];
    int32_t mine[4], theirs[4], unused[8];
    rs_insert_result result;
    uint32_t done, got;
    make_path(path, 4, 1);
    stage(w.c, RS_FULL, 4, mine);
    stage(other, RS_FULL, 4, theirs);
    int32_t bad[][2] = {{mine[0], theirs[0]}, {mine[0], 31}, {mine[0], -1}, {mine[0], 32}, {mine[0], INT32_MAX}};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(rs_recycle(w.c, RS_FULL, bad[i], 2, &done), RS_ENOTOWNER);
        CHECK_EQ(rs_insert(w.c, RS_FULL, path, 2, bad[i], 2, 0, 0, &result, unused), RS_ENOTOWNER);
    }
    int32_t twice[2] = {mine[1], mine[1]};
    CHECK_EQ(rs_recycle(w.c, RS_FULL, twice, 2, &done), RS_EDUPLICATE);
    CHECK_EQ(rs_insert(w.c, RS_FULL, path, 2, twice, 2, 0, 0, &result, unused), RS_EDUPLICATE);
    CHECK_EQ(rs_insert(w.c, RS_FULL, path, 4, mine, 3, 0, 0, &result, unused), RS_EINVAL);
    CHECK_EQ(rs_insert(w.c, RS_FULL, path, 2, mine, 3, 3, 0, &result, unused), RS_EINVAL);
    CHECK_EQ(rs_insert(w.c, RS_SWA, path, 2, mine, 1, 1, 0, &result, unused), RS_EINVAL);
    CHECK_EQ(rs_insert(w.c, RS_SWA, path, 2, mine, 3, 0, 0, &result, unused), RS_EINVAL);
    CHECK_EQ(rs_allocate(w.c, RS_FULL, 33, mine, &got), RS_ERANGE);
    CHECK_EQ(rs_allocate(w.c, RS_MAMBA, 1, mine, &got), RS_ENOCOMPONENT);
    CHECK_EQ(rs_allocate(w.c, 7, 1, mine, &got), RS_ENOCOMPONENT);
    CHECK_EQ(rs_recycle(w.c, RS_MAMBA, mine, 1, &done), RS_ENOCOMPONENT);
    CHECK_EQ(rs_evict(w.c, RS_MAMBA, 1, RS_REASON_REQUEST, &done), RS_ENOCOMPONENT);
    CHECK_EQ(rs_evict(w.c, RS_FULL, 1, 99, &done), RS_EINVAL);
    rs_match_result hit;
    CHECK_EQ(rs_match(w.c, path, 4, RS_MASK_MAMBA, 0, &hit, mine, NULL), RS_ENOCOMPONENT);
    CHECK_EQ(rs_match(w.c, path, 4, 0, 0, &hit, mine, NULL), RS_EINVAL);
    CHECK_EQ(rs_match(w.c, path, 4, 1u << 5, 0, &hit, mine, NULL), RS_EINVAL);
    expect_slots(w.c, RS_FULL, 24, 8, 0);
}

static uint32_t nodes_of(rs_client *c, rs_node nodes[64])
{
    rs_snapshot *s;
    uint32_t num;
    CHECK_OK(rs_snapshot_take(c, &s));
    CHECK_OK(rs_snapshot_nodes(s, 0, nodes, 64, &num));
    rs_snapshot_free(s);
    return num;
}

TEST(verbs_match_without_meta_changes_only_counters)
{
    world w = world_of(64, 8, 3, 0);
    uint64_t path[10];
    rs_node before[64], after[64];
    make_path(path, 10, 1);
    publish(w.c, path, 10);
    publish(w.c, path + 3, 5); /* the clock moves on */
    CHECK_EQ(nodes_of(w.c, before), 15);
    CHECK_EQ(full_hit(w.c, path, 10), 10);
    CHECK_EQ(nodes_of(w.c, after), 15);
    CHECK_EQ(memcmp(before, after, 15 * sizeof(*before)), 0);
    (void)match(w.c, path, 10, RS_MASK_FULL, NULL);
    CHECK_EQ(nodes_of(w.c, after), 15);
    CHECK(memcmp(before, after, 15 * sizeof(*before)) != 0);
    rs_stats stats = stats_of(w.c);
    CHECK_EQ(stats.queries, 2);
    CHECK_EQ(stats.hit_blocks[RS_FULL], 20);
    (void)match(w.c, path + 1, 9, RS_MASK_FULL, NULL);
    CHECK_EQ(stats_of(w.c).miss_blocks[RS_FULL], 9);
}

TEST(verbs_reset_in_the_middle_of_things)
{
    world w = world_of(64, 16, 4, 0);
    uint64_t path[10], other[5];
    int32_t slots[6], unused[6];
    rs_insert_result result;
    make_path(path, 10, 1);
    make_path(other, 5, 2);
    publish(w.c, path, 10);
    publish(w.c, other, 5);
    publish_side(w.c, RS_SWA, path, 6, 4);
    rs_pin pin = pin_path(w.c, path, 6, RS_MASK_FULL | RS_MASK_SWA, 6);
    stage(w.c, RS_FULL, 6, slots);
    CHECK_OK(rs_reset(w.c));
    CHECK_EQ(full_hit(w.c, path, 10), 0);
    expect_slots(w.c, RS_FULL, 52, 6, 6); /* the pinned path and the staged slots live on */
    expect_slots(w.c, RS_SWA, 12, 0, 4);
    CHECK_OK(rs_insert(w.c, RS_FULL, path, 6, slots, 6, 0, RS_INSERT_KEEP_UNUSED, &result, unused));
    expect_insert(&result, RS_INSERT_STALE_GENERATION, 0, 6);
    expect_slots(w.c, RS_FULL, 58, 0, 6);
    publish(w.c, path, 8); /* beside the old, pinned path */
    expect_slots(w.c, RS_FULL, 50, 0, 14);
    release(w.c, pin);
    expect_slots(w.c, RS_FULL, 56, 0, 8);
    expect_slots(w.c, RS_SWA, 16, 0, 0);
    CHECK_EQ(full_hit(w.c, path, 8), 8);
    CHECK_EQ(stats_of(w.c).generation, 1);
    CHECK_EQ(stats_of(w.c).draining, 0);
}

TEST(verbs_reset_runs_out_of_roots_only_while_all_are_pinned)
{
    world w = world_of(256, 0, 0, 0);
    uint64_t path[1];
    int32_t slot;
    for (int i = 0; i < 127; i++) {
        stage(w.c, RS_FULL, 1, &slot);
        CHECK_OK(rs_reset(w.c));
    }
    CHECK_EQ(rs_reset(w.c), RS_EROOTS);
    uint32_t done;
    CHECK_OK(rs_recycle(w.c, RS_FULL, &slot, 1, &done));
    CHECK_OK(rs_reset(w.c));
    make_path(path, 1, 1);
    publish(w.c, path, 1);
    check_region(w.c);
}

TEST(verbs_pins_are_released_once)
{
    world w = world_of(64, 0, 0, 0);
    uint64_t path[10];
    rs_pin pins[8];
    rs_match_result hit;
    int32_t slots[10];
    uint32_t stale;
    make_path(path, 10, 1);
    publish(w.c, path, 10);
    for (int i = 0; i < 8; i++)
        pins[i] = pin_path(w.c, path, 10 - (uint32_t)i % 3, RS_MASK_FULL, 10 - (uint32_t)i % 3);
    CHECK_OK(rs_match(w.c, path, 10, RS_MASK_FULL, RS_QUERY_LOCK, &hit, slots, NULL));
    CHECK_EQ(hit.status, RS_STATUS_PIN_LIMIT);
    CHECK_EQ(hit.full_hit, 0);
    CHECK_EQ(hit.pin.valid, 0);
    CHECK_EQ(stats_of(w.c).pin_limits, 1);
    release(w.c, pins[3]);
    CHECK_OK(rs_release(w.c, pins[3], &stale));
    CHECK_EQ(stale, 1);
    rs_pin again = pin_path(w.c, path, 4, RS_MASK_FULL, 4);
    CHECK_EQ(again.index, pins[3].index); /* the record is reused, the old handle stays dead */
    CHECK_OK(rs_release(w.c, pins[3], &stale));
    CHECK_EQ(stale, 1);
    rs_pin forged = {.index = 4000, .valid = 1, .nonce = 1}, none = {0};
    CHECK_OK(rs_release(w.c, forged, &stale));
    CHECK_EQ(stale, 1);
    release(w.c, none);
    CHECK_EQ(stats_of(w.c).stale_releases, 3);
    check_region(w.c);
    CHECK_OK(rs_detach(w.c));
    check_fd(w.fd);
}

TEST(verbs_zero_hit_pins_nothing)
{
    world w = world_of(64, 0, 0, 0);
    uint64_t path[3];
    make_path(path, 3, 1);
    rs_pin pin = pin_path(w.c, path, 3, RS_MASK_FULL, 0);
    release(w.c, pin);
    CHECK_EQ(stats_of(w.c).pins_taken, 0);
    CHECK_EQ(stats_of(w.c).stale_releases, 0);
}

TEST(verbs_evict_counts_and_reasons)
{
    world w = world_of(64, 16, 4, 0);
    uint64_t a[10], b[10];
    make_path(a, 10, 1);
    make_path(b, 10, 2);
    publish(w.c, a, 10);
    publish_side(w.c, RS_SWA, a, 10, 4);
    expect_evicted(w.c, RS_FULL, 3, RS_REASON_BACKGROUND, 3);
    CHECK_EQ(full_hit(w.c, a, 10), 7); /* from the tail */
    expect_slots(w.c, RS_SWA, 16, 0, 0); /* a's end went, and with it the whole window */
    publish(w.c, b, 10);
    expect_evicted(w.c, RS_FULL, 100, RS_REASON_REQUEST, 17);
    rs_stats stats = stats_of(w.c);
    CHECK_EQ(stats.evicted_blocks[RS_FULL][RS_REASON_BACKGROUND], 3);
    CHECK_EQ(stats.evicted_blocks[RS_FULL][RS_REASON_REQUEST], 17);
    CHECK_EQ(stats.evicted_blocks[RS_SWA][RS_REASON_BACKGROUND], 4);
    expect_evicted(w.c, RS_FULL, 1, RS_REASON_REQUEST, 0);
    expect_slots(w.c, RS_FULL, 64, 0, 0);
}

TEST(verbs_lru_order)
{
    world w = world_of(64, 0, 0, 0);
    uint64_t path[8];
    int32_t slot;
    rs_match_result hit;
    make_path(path, 8, 1);
    for (int i = 0; i < 8; i++)
        publish(w.c, path + i, 1); /* eight paths of one block */
    static const int touched[] = {2, 0, 5};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(rs_match(w.c, path + touched[i], 1, RS_MASK_FULL, 0, &hit, &slot, NULL));
        uint64_t clock_mover = 1000 + (uint64_t)i;
        publish(w.c, &clock_mover, 1);
    }
    static const int order[] = {1, 3, 4, 6, 7};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(full_hit(w.c, path + order[i], 1), 1);
        expect_evicted(w.c, RS_FULL, 1, RS_REASON_REQUEST, 1);
        CHECK_EQ(full_hit(w.c, path + order[i], 1), 0);
    }
    check_region(w.c);
}

TEST(verbs_events_name_exactly_what_happened)
{
    world w = world_of(64, 16, 4, 0);
    uint64_t path[6], cursor = 0;
    rs_event events[64];
    uint32_t num, overflow, evicted;
    make_path(path, 6, 1);
    publish(w.c, path, 6);
    CHECK_OK(rs_evict(w.c, RS_FULL, 2, RS_REASON_REQUEST, &evicted));
    CHECK_OK(rs_reset(w.c));
    CHECK_OK(rs_events(w.c, &cursor, events, 64, &num, &overflow));
    CHECK_EQ(num, 6 + 2 + 1 + 4);
    CHECK_EQ(overflow, 0);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(events[i].kind, RS_EVENT_STORED);
        CHECK_EQ(events[i].hash, path[i]);
        CHECK_EQ(events[i].has_parent, i != 0);
        CHECK_EQ(events[i].parent_hash, i ? path[i - 1] : 0);
        CHECK_EQ(events[i].client, rs_client_slot(w.c));
    }
    CHECK_EQ(events[6].kind, RS_EVENT_REMOVED);
    CHECK_EQ(events[6].hash, path[5]);
    CHECK_EQ(events[6].reason, RS_REASON_REQUEST);
    CHECK_EQ(events[8].kind, RS_EVENT_CLEARED);
    CHECK_EQ(events[9].reason, RS_REASON_RESET);
    CHECK_EQ(cursor, rs_event_head(w.c));
    for (int i = 0; i < 12; i++)
        publish(w.c, path, 6), CHECK_OK(rs_reset(w.c));
    CHECK_OK(rs_events(w.c, &cursor, events, 64, &num, &overflow));
    CHECK_EQ(overflow, 1);
    CHECK_EQ(cursor, rs_event_head(w.c));
}
