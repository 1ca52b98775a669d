/* crash_verbs.c - see crash_verbs.h. */
#include "crash_verbs.h"

#include <string.h>

static void nothing(scene *s) { (void)s; }

/* A tree with a branch, windows, a pin and staged slots of a bystander. */
static void furnish(scene *s)
{
    publish(s->c, s->path, 8);
    memcpy(s->branch, s->path, 4 * sizeof(*s->path));
    extend(s->c, s->branch, 4, 7);
    publish_side(s->c, RS_SWA, s->path, 5, WINDOW);
    publish_side(s->c, RS_SWA, s->path, 8, WINDOW);
    publish_side(s->c, RS_MAMBA, s->path, 6, 1);
    (void)pin_path(s->other, s->path, 3, RS_MASK_FULL, 3);
    stage(s->other, RS_FULL, 2, s->slots);
}

static void run_attach(scene *s) { s->c = attach(s->fd); }
static void run_detach(scene *s) { CHECK_OK(rs_detach(s->c)); }

static void prepare_detach(scene *s)
{
    furnish(s);
    s->pin = pin_path(s->c, s->path, 8, RS_MASK_FULL | RS_MASK_SWA, 8);
    stage(s->c, RS_FULL, 3, s->slots);
    stage(s->c, RS_SWA, 2, s->slots);
}

static void run_match(scene *s) { (void)full_hit(s->c, s->path, 8); }
static void run_pin(scene *s) { (void)pin_path(s->c, s->path, 8, RS_MASK_FULL | RS_MASK_SWA, 8); }

static void prepare_release(scene *s)
{
    furnish(s);
    s->pin = pin_path(s->c, s->path, 8, RS_MASK_FULL | RS_MASK_SWA, 8);
}

static void run_release(scene *s) { release(s->c, s->pin); }

/* The pin keeps a window whose end is evicted, and an old root's path. */
static void prepare_last_release(scene *s)
{
    uint32_t num;
    furnish(s);
    s->pin = pin_path(s->c, s->path, 5, RS_MASK_FULL | RS_MASK_SWA, 5);
    CHECK_OK(rs_evict(s->c, RS_FULL, 2, RS_REASON_REQUEST, &num));
    CHECK_OK(rs_reset(s->c));
    publish(s->c, s->branch, 2);
}

static void run_allocate(scene *s) { stage(s->c, RS_FULL, 5, s->slots); }

static void run_allocate_evicting(scene *s)
{
    uint32_t got;
    CHECK_OK(rs_allocate(s->c, RS_FULL, 18, s->slots, &got));
    CHECK(got >= 12);
}

static void run_allocate_side(scene *s) { stage(s->c, RS_SWA, 7, s->slots); }

static void prepare_insert(scene *s)
{
    furnish(s);
    stage(s->c, RS_FULL, 6, s->slots);
}

static void insert(scene *s, uint32_t component, const uint64_t *hashes, uint32_t n, uint32_t m)
{
    int32_t unused[FULL];
    rs_insert_result result;
    CHECK_OK(rs_insert(s->c, component, hashes, n, s->slots, m, component == RS_FULL ? n - m : 0, 0, &result, unused));
    CHECK_EQ(result.error, RS_INSERT_OK);
}

static void run_insert(scene *s) { insert(s, RS_FULL, s->path, 14, 6); }
static void run_insert_first(scene *s) { insert(s, RS_FULL, s->path + 8, 6, 6); }

static void run_insert_redundant(scene *s)
{
    memcpy(s->branch + 7, s->path + 8, 2 * sizeof(*s->path)); /* blocks 3..6 are there, 7 and 8 new */
    insert(s, RS_FULL, s->branch, 9, 6);
}

static void prepare_insert_side(scene *s)
{
    furnish(s);
    stage(s->c, RS_SWA, 4, s->slots);
}

static void run_insert_side(scene *s) { insert(s, RS_SWA, s->branch, 7, 4); }

static void run_recycle(scene *s)
{
    uint32_t done;
    CHECK_OK(rs_recycle(s->c, RS_FULL, s->slots, 6, &done));
}

static void run_evict(scene *s)
{
    uint32_t num;
    CHECK_OK(rs_evict(s->c, RS_FULL, 6, RS_REASON_REQUEST, &num));
    CHECK_EQ(num, 6);
}

static void run_evict_side(scene *s)
{
    uint32_t num;
    CHECK_OK(rs_evict(s->c, RS_SWA, 4, RS_REASON_REQUEST, &num));
}

static void run_reset(scene *s) { CHECK_OK(rs_reset(s->c)); }

static void prepare_reap(scene *s)
{
    prepare_detach(s);
    kill_client(s->c);
    s->c = attach(s->fd);
}

static void prepare_reap_device(scene *s)
{
    prepare_detach(s);
    CHECK_OK(rs_set_device(s->c));
    kill_client(s->c);
    s->c = attach(s->fd);
}

static void run_reap(scene *s)
{
    rs_reap_result result;
    CHECK_OK(rs_reap(s->c, &result));
    CHECK_EQ(result.clients + result.dying, 1);
    CHECK_OK(rs_reap(s->c, &result)); /* a device client's staged slots go the second time */
}

static void run_set_device(scene *s) { CHECK_OK(rs_set_device(s->c)); }
static void run_fingerprint(scene *s) { CHECK_OK(rs_set_fingerprint(s->c, "bytes")); }

const verb crash_verbs[] = {
    {"attach", NULL, run_attach},
    {"detach", prepare_detach, run_detach},
    {"match", furnish, run_match},
    {"match + pin", furnish, run_pin},
    {"release", prepare_release, run_release},
    {"last release of an old root", prepare_last_release, run_release},
    {"allocate", furnish, run_allocate},
    {"allocate, evicting", furnish, run_allocate_evicting},
    {"allocate SWA, evicting", furnish, run_allocate_side},
    {"insert", prepare_insert, run_insert},
    {"insert below the root", prepare_insert, run_insert_first},
    {"insert, partly redundant", prepare_insert, run_insert_redundant},
    {"insert SWA", prepare_insert_side, run_insert_side},
    {"recycle", prepare_insert, run_recycle},
    {"evict", furnish, run_evict},
    {"evict SWA", furnish, run_evict_side},
    {"reset", furnish, run_reset},
    {"reap", prepare_reap, run_reap},
    {"reap a device client", prepare_reap_device, run_reap},
    {"set_device", nothing, run_set_device},
    {"set_fingerprint", nothing, run_fingerprint},
};
const unsigned num_crash_verbs = sizeof(crash_verbs) / sizeof(*crash_verbs);
