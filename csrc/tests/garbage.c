/* garbage.c - see garbage.h.
 *
 * The input is a sequence of patches of 8 bytes: where (4), how (1), value (3).  `where` is taken modulo
 * what the region holds besides its journal, most of which is unused.
 */
#include "garbage.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { FULL = 40, SWA = 12, MAMBA = 6, WINDOW = 3, PATH = 12, PATCH_BYTES = 8, MAX_PATCHES = 64 };

typedef struct original {
    rs_config cfg;
    uint64_t num_bytes;
    uint8_t *bytes;
    uint64_t path[3][PATH];
} original;

/* A tree with branches, windows, pins and staged slots of clients that are gone. */
static const original *make_original(void)
{
    static original o;
    int32_t slots[FULL];
    if (o.bytes)
        return &o;
    o.cfg = small_config(FULL, SWA, WINDOW, MAMBA);
    CHECK_OK(rs_region_bytes(&o.cfg, &o.num_bytes));
    int fd = make_region(&o.cfg);
    rs_client *c = attach(fd);
    for (uint64_t i = 0; i < 3; i++)
        make_path(o.path[i], PATH, i);
    memcpy(o.path[1], o.path[0], 5 * sizeof(uint64_t));
    publish(c, o.path[0], PATH);
    extend(c, o.path[1], 5, 9);
    publish(c, o.path[2], 4);
    publish_side(c, RS_SWA, o.path[0], 7, WINDOW);
    publish_side(c, RS_SWA, o.path[0], PATH, WINDOW);
    publish_side(c, RS_MAMBA, o.path[1], 9, 1);
    (void)pin_path(c, o.path[0], PATH, RS_MASK_FULL | RS_MASK_SWA, PATH);
    stage(c, RS_FULL, 4, slots);
    stage(c, RS_SWA, 2, slots);
    kill_client(c);
    o.bytes = mmap(NULL, o.num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    CHECK(o.bytes != MAP_FAILED);
    close(fd);
    return &o;
}

static void patch(const original *o, uint8_t *region, const uint8_t *input, size_t num_bytes)
{
    rs_plan plan;
    CHECK_OK(rs_plan_region(&o->cfg, &plan));
    uint64_t spent = plan.clients.bytes - plan.journal.bytes - 64 * sizeof(rs_jentry_shm);
    size_t num_patches = num_bytes / PATCH_BYTES < MAX_PATCHES ? num_bytes / PATCH_BYTES : MAX_PATCHES;
    for (size_t i = 0; i < num_patches; i++, input += PATCH_BYTES) {
        uint32_t where, value = input[5] | input[6] << 8 | input[7] << 16;
        memcpy(&where, input, 4);
        uint64_t at = where % (o->num_bytes - spent);
        if (at >= plan.clients.bytes - spent)
            at += spent;
        uint32_t size = 1u << (input[4] & 3), aligned = (uint32_t)(at & ~(uint64_t)(size - 1));
        uint64_t x = value;
        if (input[4] & 4) /* small signed numbers and sentinels too */
            x = (uint64_t)(int64_t)(int8_t)value;
        memcpy(region + aligned, &x, size);
    }
}

static void verbs_of(rs_client *c, const original *o)
{
    int32_t slots[FULL], swa[RS_MAX_WINDOW], unused[FULL];
    rs_match_result hit;
    rs_insert_result result;
    rs_reap_result reaped;
    rs_event events[64];
    rs_stats stats;
    rs_info info;
    uint64_t cursor = 0;
    uint32_t num, num2;
    for (int i = 0; i < 3; i++) {
        uint32_t mask = RS_MASK_FULL | RS_MASK_SWA | RS_MASK_MAMBA;
        int rc = rs_match(c, o->path[i], PATH, mask, RS_QUERY_LOCK, &hit, slots, swa);
        if (rc == RS_OK)
            (void)rs_release(c, hit.pin, &num);
        if (rs_allocate(c, RS_FULL, 6, slots, &num) == RS_OK && num == 6) {
            (void)rs_insert(c, RS_FULL, o->path[i], 6, slots, 6, 0, RS_INSERT_KEEP_UNUSED, &result, unused);
            (void)rs_recycle(c, RS_FULL, slots, 6, &num);
        }
        if (rs_allocate(c, RS_SWA, WINDOW, slots, &num) == RS_OK && num == WINDOW)
            (void)rs_insert(c, RS_SWA, o->path[i], 6, slots, WINDOW, 0, 0, &result, unused);
        (void)rs_match(c, o->path[i], PATH, RS_MASK_FULL, 0, &hit, slots, NULL);
    }
    (void)rs_evict(c, RS_FULL, 3, RS_REASON_REQUEST, &num);
    (void)rs_evict(c, RS_SWA, 3, RS_REASON_REQUEST, &num);
    (void)rs_reap(c, &reaped);
    (void)rs_reset(c);
    (void)rs_events(c, &cursor, events, 64, &num, &num2);
    (void)rs_get_stats(c, &stats);
    (void)rs_get_info(c, &info);
    (void)rs_set_device(c);
    (void)rs_set_fingerprint(c, "x");
}

static void look_at(int fd)
{
    rs_info info;
    rs_stats stats;
    rs_client_info clients[8];
    rs_snapshot *s;
    rs_snapshot_summary sum;
    rs_node nodes[FULL];
    char report[512];
    uint32_t num;
    (void)rs_region_peek(fd, &info);
    (void)rs_peek_stats(fd, &stats);
    (void)rs_peek_clients(fd, clients, 8, &num);
    if (rs_snapshot_peek(fd, &s) != RS_OK)
        return;
    (void)rs_snapshot_check(s, report, sizeof(report));
    (void)rs_snapshot_summarize(s, &sum);
    (void)rs_snapshot_nodes(s, 0, nodes, FULL, &num);
    rs_snapshot_free(s);
}

void garbage_try(const uint8_t *input, size_t num_bytes)
{
    const original *o = make_original();
    int fd = memfd_create("garbage", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)o->num_bytes) == 0);
    uint8_t *region = mmap(NULL, o->num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    rs_client *early, *late;
    CHECK(region != MAP_FAILED);
    memcpy(region, o->bytes, o->num_bytes);
    CHECK_OK(rs_attach(fd, "early", &early));
    patch(o, region, input, num_bytes);
    look_at(fd);
    verbs_of(early, o);
    if (rs_attach(fd, "late", &late) == RS_OK) {
        verbs_of(late, o);
        look_at(fd);
        (void)rs_detach(late);
    }
    (void)rs_detach(early);
    munmap(region, o->num_bytes);
    close(fd);
}
