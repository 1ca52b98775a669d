/* test_region.c - making, validating and looking at region files. */
#include "harness.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

TEST(region_states_decide_attach)
{
    rs_config cfg = small_config(16, 0, 0, 0);
    rs_client *c;
    int fd = make_region(&cfg);
    CHECK_OK(rs_region_set_state(fd, RS_STATE_BUILDING));
    CHECK_EQ(rs_attach(fd, "test", &c), RS_ENOTREADY);
    CHECK(c == NULL);
    CHECK_OK(rs_region_set_state(fd, RS_STATE_READY));
    c = attach(fd);
    CHECK_OK(rs_alive(c));
    CHECK_OK(rs_region_set_state(fd, RS_STATE_RETIRED));
    CHECK_EQ(rs_alive(c), RS_ERETIRED);
    uint64_t hash = 1;
    rs_match_result result;
    int32_t slot;
    CHECK_EQ(rs_match(c, &hash, 1, RS_MASK_FULL, 0, &result, &slot, NULL), RS_ERETIRED);
    rs_client *late;
    CHECK_EQ(rs_attach(fd, "test", &late), RS_ERETIRED);
    CHECK_OK(rs_detach(c));
}

static rs_header_shm *map_header(int fd)
{
    void *base = mmap(NULL, sizeof(rs_header_shm), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(base != MAP_FAILED);
    return base;
}

TEST(region_header_is_validated)
{
    rs_config cfg = small_config(16, 8, 3, 0);
    int fd = make_region(&cfg);
    rs_header_shm *hdr = map_header(fd), saved;
    rs_info info;
    rs_client *c;
    memcpy(&saved, hdr, sizeof(saved));
    CHECK_OK(rs_region_peek(fd, &info));
    CHECK_EQ(info.config.pool[RS_SWA].window_blocks, 3);
    CHECK_EQ(info.state, RS_STATE_READY);
#define REFUSED(change, code)                                                                     \
    do {                                                                                          \
        change;                                                                                   \
        CHECK_EQ(rs_region_peek(fd, &info), code);                                                \
        CHECK_EQ(rs_attach(fd, "test", &c), code);                                                \
        memcpy(hdr, &saved, sizeof(saved));                                                       \
    } while (0)
    REFUSED(hdr->magic++, RS_ECORRUPT);
    REFUSED(hdr->layout_version++, RS_EVERSION);
    REFUSED(hdr->abi ^= 1, RS_EVERSION);
    REFUSED(hdr->region_bytes += 4096, RS_ECORRUPT);
    REFUSED(memset(hdr->config.epoch, 0, 16), RS_ECORRUPT);
    REFUSED(hdr->config.pool[RS_FULL].num_slots = 1u << 30, RS_ECORRUPT);
    REFUSED(hdr->config.pool[RS_SWA].window_blocks = 0, RS_ECORRUPT);
    REFUSED(hdr->config.max_clients = 0, RS_ECORRUPT);
    REFUSED(hdr->config.evict_policy = 77, RS_ECORRUPT);
    REFUSED(memset(hdr->config.data_name, 'x', sizeof(hdr->config.data_name)), RS_ECORRUPT);
    CHECK_OK(rs_region_peek(fd, &info));
    CHECK_EQ(ftruncate(fd, 4096), 0);
    REFUSED((void)0, RS_ECORRUPT);
}

TEST(region_bad_configs_are_refused)
{
    rs_config good = small_config(16, 8, 3, 4);
    uint64_t num_bytes;
    CHECK_OK(rs_region_bytes(&good, &num_bytes));
#define UNPLANNABLE(change)                                                                       \
    do {                                                                                          \
        rs_config cfg = good;                                                                     \
        change;                                                                                   \
        CHECK_EQ(rs_region_bytes(&cfg, &num_bytes), RS_EINVAL);                                   \
    } while (0)
    UNPLANNABLE(cfg.pool[RS_FULL].num_slots = 0);
    UNPLANNABLE(cfg.pool[RS_FULL].num_slots = RS_MAX_SLOTS + 1);
    UNPLANNABLE(cfg.pool[RS_SWA].window_blocks = RS_MAX_WINDOW + 1);
    UNPLANNABLE(cfg.pool[RS_MAMBA].window_blocks = 2);
    UNPLANNABLE(cfg.block_size = 0);
    UNPLANNABLE(cfg.max_clients = RS_MAX_CLIENTS + 1);
    UNPLANNABLE(cfg.pins_per_client = 0);
}

TEST(region_bytes_per_slot_meet_the_target)
{
    rs_config small = small_config(1, 0, 0, 0), large = small_config(1u << 20, 0, 0, 0);
    uint64_t fixed, total;
    CHECK_OK(rs_region_bytes(&small, &fixed));
    CHECK_OK(rs_region_bytes(&large, &total));
    CHECK((total - fixed) / (1u << 20) <= 80);
}

TEST(store_header_round_trip)
{
    uint8_t epoch[16] = {9};
    rs_store_info info;
    int fd = memfd_create("store", MFD_CLOEXEC);
    CHECK_EQ(ftruncate(fd, 1 << 20), 0);
    CHECK_EQ(rs_store_peek(fd, &info), RS_ECORRUPT);
    CHECK_OK(rs_store_format(fd, 1 << 20, 4096, epoch));
    CHECK_OK(rs_store_peek(fd, &info));
    CHECK_EQ(info.state, RS_STATE_BUILDING);
    CHECK_OK(rs_store_set_state(fd, RS_STATE_READY));
    CHECK_OK(rs_store_peek(fd, &info));
    CHECK_EQ(info.state, RS_STATE_READY);
    CHECK_EQ(info.total_bytes, 1 << 20);
    CHECK_EQ(info.data_offset, 4096);
    CHECK_EQ(memcmp(info.epoch, epoch, 16), 0);
    CHECK_EQ(ftruncate(fd, 4096 * 2), 0);
    CHECK_EQ(rs_store_peek(fd, &info), RS_ECORRUPT);
}

TEST(region_peek_shows_clients_and_stats)
{
    rs_config cfg = small_config(32, 8, 3, 4);
    int fd = make_region(&cfg);
    rs_client *a = attach(fd), *b = attach(fd);
    uint64_t path[10];
    int32_t slots[4];
    make_path(path, 10, 1);
    publish(a, path, 10);
    publish_side(a, RS_SWA, path, 10, 3);
    rs_pin pin = pin_path(b, path, 10, RS_MASK_FULL | RS_MASK_SWA, 10);
    stage(b, RS_FULL, 4, slots);
    rs_stats stats;
    CHECK_OK(rs_peek_stats(fd, &stats));
    CHECK_EQ(stats.num_clients, 2);
    CHECK_EQ(stats.pool[RS_FULL].num_published, 10);
    CHECK_EQ(stats.pool[RS_FULL].num_staged, 4);
    CHECK_EQ(stats.pool[RS_SWA].num_published, 3);
    CHECK_EQ(stats.pool[RS_SWA].num_pins, 3);
    CHECK_EQ(stats.inserted_blocks[RS_FULL], 10);
    CHECK_EQ(stats.hit_blocks[RS_FULL], 10);
    CHECK_EQ(stats.queries, 1);
    rs_client_info info[4];
    uint32_t num;
    CHECK_OK(rs_peek_clients(fd, info, 4, &num));
    CHECK_EQ(num, 2);
    CHECK_EQ(info[1].slot, rs_client_slot(b));
    CHECK_EQ(info[1].incarnation, rs_client_incarnation(b));
    CHECK_EQ(info[1].num_pins, 1);
    CHECK_EQ(info[1].num_staged[RS_FULL], 4);
    CHECK_EQ(info[1].pid, getpid());
    CHECK_EQ(strcmp(info[1].label, "test"), 0);
    CHECK_EQ(info[1].alive, 1);
    CHECK_EQ(info[1].leased, 1);
    rs_snapshot *s;
    rs_snapshot_summary sum;
    CHECK_OK(rs_snapshot_peek(fd, &s));
    CHECK_OK(rs_snapshot_summarize(s, &sum));
    CHECK_EQ(sum.pinned[RS_FULL], 10);
    CHECK_EQ(sum.pinned[RS_SWA], 3);
    CHECK_EQ(sum.staged[RS_FULL], 4);
    CHECK_EQ(sum.free[RS_FULL], 18);
    CHECK_EQ(sum.num_pins, 1);
    rs_node nodes[32];
    CHECK_OK(rs_snapshot_nodes(s, 0, nodes, 32, &num));
    CHECK_EQ(num, 14);
    rs_snapshot_free(s);
    release(b, pin);
    CHECK_OK(rs_snapshot_take(a, &s));
    CHECK_OK(rs_snapshot_summarize(s, &sum));
    CHECK_EQ(sum.pinned[RS_FULL], 0);
    CHECK_EQ(sum.evictable[RS_FULL], 10);
    CHECK_EQ(sum.evictable[RS_SWA], 3);
    rs_snapshot_free(s);
    CHECK_OK(rs_detach(a));
    CHECK_OK(rs_detach(b));
    CHECK_OK(rs_peek_stats(fd, &stats)); /* folded into the header, and still there */
    CHECK_EQ(stats.hit_blocks[RS_FULL], 10);
    CHECK_EQ(stats.num_clients, 0);
    CHECK_EQ(stats.pool[RS_FULL].num_staged, 0);
    check_fd(fd);
}
