/* image.c - see image.h. */
#include "image.h"

#include <stdlib.h>
#include <string.h>

image image_new(uint64_t num_bytes)
{
    image im = {.num_bytes = num_bytes, .bytes = aligned_alloc(4096, num_bytes)};
    CHECK(im.bytes != NULL);
    memset(im.bytes, 0, num_bytes);
    return im;
}

void image_free(image *im)
{
    free(im->bytes);
    im->bytes = NULL;
}

static uint64_t journal_end(const rs_plan *plan, const uint8_t *region)
{
    uint32_t len = rs_ld(&((const rs_header_shm *)region)->journal_len);
    CHECK(len <= plan->journal_capacity);
    return plan->journal.bytes + len * sizeof(rs_jentry_shm);
}

void image_take(image *im, const uint8_t *region)
{
    const rs_config *cfg = &((const rs_header_shm *)region)->config;
    rs_plan plan;
    CHECK_OK(rs_plan_region(cfg, &plan));
    memcpy(im->bytes, region, journal_end(&plan, region));
    memcpy(im->bytes + plan.clients.bytes, region + plan.clients.bytes, im->num_bytes - plan.clients.bytes);
    CHECK_OK(rs_view_init(&im->v, im->bytes, im->num_bytes));
}

void image_copy(image *to, const image *from)
{
    memcpy(to->bytes, from->bytes, journal_end(&from->v.plan, from->bytes));
    memcpy(to->bytes + from->v.plan.clients.bytes, from->bytes + from->v.plan.clients.bytes,
           from->num_bytes - from->v.plan.clients.bytes);
    CHECK_OK(rs_view_init(&to->v, to->bytes, to->num_bytes));
}

bool image_equals_region(const image *im, const uint8_t *region)
{
    const rs_plan *plan = &im->v.plan;
    uint64_t end = journal_end(plan, region), rest = plan->clients.bytes;
    return memcmp(im->bytes, region, end) == 0 &&
           memcmp(im->bytes + rest, region + rest, im->num_bytes - rest) == 0;
}

void image_recover_and_check(image *im, const char *when)
{
    char report[1024];
    int rc = rs_recover_locked(&im->v);
    if (rc != RS_OK)
        FAIL("%s: recovery says %s", when, rs_error_name(rc));
    rs_snapshot s = {.v = im->v, .mem = im->bytes};
    CHECK_OK(rs_forest_build(&s.v, &s.forest));
    if (rs_snapshot_check(&s, report, sizeof(report)) != 0)
        FAIL("%s: %s", when, report);
    rs_forest_free(&s.forest);
}

/* -- what is not journaled ------------------------------------------------------------------------ */

static void exempt_range(const image *im, uint8_t *exempt, const volatile void *at, uint64_t num_bytes)
{
    memset(exempt + ((const volatile uint8_t *)at - im->bytes), 1, num_bytes);
}

#define EXEMPT(field) exempt_range(base, exempt, &(field), sizeof(field))

void image_exempt(const image *base, uint8_t *exempt)
{
    const rs_view *v = &base->v;
    uint64_t num_slots = v->pool[RS_FULL].capacity;
    memset(exempt, 0, base->num_bytes);
    EXEMPT(v->hdr->lock_word);
    EXEMPT(v->hdr->seq);
    EXEMPT(v->hdr->recoveries);
    EXEMPT(v->hdr->last_reap_ns);
    EXEMPT(v->hdr->config.fingerprint);
    exempt_range(base, exempt, v->journal, v->plan.clients.bytes - v->plan.journal.bytes);
    exempt_range(base, exempt, v->last_access, num_slots * 4);
    if (v->plan.event_capacity)
        exempt_range(base, exempt, v->events, v->plan.event_capacity * sizeof(rs_event_shm));
    for (uint64_t s = 0; s < num_slots; s++) {
        if (rs_ld(&v->pool[RS_FULL].state[s]) == RS_SLOT_PUBLISHED)
            continue;
        EXEMPT(v->node[s].hash);
        EXEMPT(v->node[s].next);
    }
    for (uint32_t i = 0; i < v->config.max_clients; i++) {
        rs_client_shm *entry = &v->clients[i];
        EXEMPT(entry->counters);
        if (rs_ld(&entry->state) != RS_CLIENT_FREE)
            continue;
        EXEMPT(entry->pid);
        EXEMPT(entry->pid_namespace);
        EXEMPT(entry->attached_unix_ns);
        EXEMPT(entry->label);
    }
}

int64_t image_difference(const image *a, const image *b, const uint8_t *exempt)
{
    for (uint64_t i = 0; i < a->num_bytes; i += 8) {
        if (memcmp(a->bytes + i, b->bytes + i, 8) == 0)
            continue;
        for (uint64_t j = i; j < i + 8; j++)
            if (a->bytes[j] != b->bytes[j] && !exempt[j])
                return (int64_t)j;
    }
    return -1;
}

void image_covered(const image *im, uint8_t *covered)
{
    memset(covered, 0, im->num_bytes);
    for (uint32_t i = 0; i < rs_ld(&im->v.hdr->journal_len); i++) {
        uint64_t where = rs_ld(&im->v.journal[i].where);
        CHECK((where >> 4) + (where & 15) <= im->num_bytes);
        memset(covered + (where >> 4), 1, where & 15);
    }
    /* The journal's own commit. */
    memset(covered + offsetof(rs_header_shm, journal_len), 1, sizeof(rs_a32));
    memset(covered + offsetof(rs_header_shm, ev_head), 1, sizeof(rs_a64));
}

const char *image_field(const image *im, uint64_t offset)
{
    static char text[96];
    const rs_plan *p = &im->v.plan;
    const struct { const char *name; rs_offset at; uint64_t size; } arrays[] = {
        {"header", {0}, 1}, {"journal", p->journal, sizeof(rs_jentry_shm)}, 
        {"client", p->clients, sizeof(rs_client_shm)},
        {"pin", p->pins, sizeof(rs_pin_shm)}, {"event", p->events, sizeof(rs_event_shm)}, 
        {"node", p->node, sizeof(rs_node_shm)},
        {"child", p->child, 4}, {"num_children", p->num_children, 4},
        {"pin_count", p->pin_count, 4}, {"last_access", p->last_access, 4}, {"bucket", p->bucket, 4},
#define POOL(k)                                                                                                    \
    {"state" #k, p->pool[k].state, 1}, {"owner" #k, p->pool[k].owner, 2}, {"gen" #k, p->pool[k].gen, 1},            \
        {"level" #k, p->pool[k].level, 1}, {"placed" #k, p->pool[k].placed, 4}, {"prev" #k, p->pool[k].list_prev, 4}, \
        {"list_next" #k, p->pool[k].list_next, 4}, {"bitmap" #k, p->pool[k].bitmap, 8},                             \
        {"summary" #k, p->pool[k].summary, 8}
        POOL(0), POOL(1), POOL(2),
#define SIDE(k)                                                                                                    \
    {"block" #k, p->pool[k].block, 4}, {"side" #k, p->side[k].slot, 4}, {"side_pins" #k, p->side[k].pins, 4},       \
        {"cover" #k, p->side[k].cover, 4}, {"is_end" #k, p->side[k].is_end, 1}
        SIDE(1), SIDE(2)};
    unsigned best = 0;
    for (unsigned i = 1; i < sizeof(arrays) / sizeof(*arrays); i++)
        if (arrays[i].at.bytes && arrays[i].at.bytes <= offset && arrays[i].at.bytes >= arrays[best].at.bytes)
            best = i;
    uint64_t in = offset - arrays[best].at.bytes;
    snprintf(text, sizeof(text), "%s[%llu] + %llu", arrays[best].name, (unsigned long long)(in / arrays[best].size),
             (unsigned long long)(in % arrays[best].size));
    return text;
}
