/* region.c - sizes, making and validating index and SlotStore files.
 *
 * A region is made in a new, zero-filled file that nobody can find yet; READY is stored last.  Every
 * later mapping is checked against the plan computed from its own config (I1) before any other
 * field is used, and the handle keeps private copies of config and plan: garbage written later can
 * give wrong answers (caught by bounds checks), never an access outside the mapping.
 */
#include "core.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct store_header_shm {
    uint64_t magic, total_bytes, data_offset;
    uint32_t layout_version, abi;
    uint8_t epoch[16];
    rs_a32 state;
} store_header_shm;

static rs_offset place(uint64_t *end, uint64_t num, uint64_t size)
{
    rs_offset at = {(*end + RS_LINE - 1) / RS_LINE * RS_LINE};
    *end = at.bytes + num * size;
    return at;
}

static bool config_ok(const rs_config *cfg)
{
    const rs_pool_config *full = &cfg->pool[RS_FULL];
    if (cfg->block_size == 0 || full->num_slots == 0 || full->window_blocks != 0)
        return false;
    if (cfg->evict_policy >= RS_NUM_POLICIES || cfg->max_clients == 0 || cfg->max_clients > RS_MAX_CLIENTS)
        return false;
    if (cfg->pins_per_client == 0 || cfg->pins_per_client > 1u << 20 || cfg->event_capacity > 1ull << 32)
        return false;
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        const rs_pool_config *pool = &cfg->pool[k];
        if (pool->num_slots > RS_MAX_SLOTS)
            return false;
        if (k != RS_FULL && pool->num_slots && (pool->window_blocks == 0 || pool->window_blocks > RS_MAX_WINDOW))
            return false;
    }
    if (cfg->pool[RS_MAMBA].num_slots && cfg->pool[RS_MAMBA].window_blocks != 1)
        return false;
    return memchr(cfg->fingerprint, 0, sizeof cfg->fingerprint) && memchr(cfg->data_name, 0, sizeof cfg->data_name) &&
           memchr(cfg->hugepage_path, 0, sizeof cfg->hugepage_path);
}

static void plan_pool(const rs_pool_config *pool, int component, uint64_t full_slots, rs_plan *p, uint64_t *end)
{
    uint64_t n = pool->num_slots, words = (n + 63) / 64;
    p->pool[component].state = place(end, n, 1);
    p->pool[component].owner = place(end, n, 2);
    p->pool[component].gen = place(end, n, 1);
    p->pool[component].level = place(end, n, 1);
    p->pool[component].placed = place(end, n, 4);
    p->pool[component].list_prev = place(end, n, 4);
    p->pool[component].list_next = place(end, n, 4);
    p->pool[component].bitmap = place(end, words, 8);
    p->pool[component].summary = place(end, (words + 63) / 64, 8);
    if (component == RS_FULL || n == 0)
        return;
    p->pool[component].block = place(end, n, 4);
    p->side[component].slot = place(end, full_slots, 4);
    p->side[component].pins = place(end, full_slots, 4);
    p->side[component].cover = place(end, full_slots, 4);
    p->side[component].is_end = place(end, full_slots, 1);
}

int rs_plan_region(const rs_config *cfg, rs_plan *p)
{
    memset(p, 0, sizeof *p);
    if (!config_ok(cfg))
        return RS_EINVAL;
    uint64_t n = cfg->pool[RS_FULL].num_slots, end = sizeof(rs_header_shm);
    uint32_t windows = 0;
    for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        windows += cfg->pool[k].num_slots ? cfg->pool[k].window_blocks : 0;
    /* One unit of work (evict a block, pin a path, publish a window) logs at most 12 words per block
     * of its windows and 96 besides; a batch is many small units after at most one of each kind. */
    p->journal_worst = 96 + 12 * windows;
    p->journal_capacity = 2048 + 4 * p->journal_worst;
    while (cfg->event_capacity > p->event_capacity)
        p->event_capacity = p->event_capacity ? p->event_capacity * 2 : 64;
    while ((1ull << p->bucket_bits) < 2 * n) /* at most half full: few chains are longer than one */
        p->bucket_bits++;
    p->journal = place(&end, p->journal_capacity, sizeof(rs_jentry_shm));
    p->clients = place(&end, cfg->max_clients, sizeof(rs_client_shm));
    p->pins = place(&end, (uint64_t)cfg->max_clients * cfg->pins_per_client, sizeof(rs_pin_shm));
    p->events = place(&end, p->event_capacity, sizeof(rs_event_shm));
    p->node = place(&end, n, sizeof(rs_node_shm));
    p->child = place(&end, n, 4);
    p->num_children = place(&end, n, 4);
    p->pin_count = place(&end, n, 4);
    p->last_access = place(&end, n, 4);
    p->bucket = place(&end, 1ull << p->bucket_bits, 4);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        plan_pool(&cfg->pool[k], k, n, p, &end);
    p->region_bytes = (end + 4095) / 4096 * 4096;
    return RS_OK;
}

int rs_region_bytes(const rs_config *cfg, uint64_t *out)
{
    rs_plan plan;
    int rc = rs_plan_region(cfg, &plan);
    *out = plan.region_bytes;
    return rc;
}

#define AT(v, off) ((void *)((v)->base + (off).bytes))

static void point(rs_view *v)
{
    const rs_plan *p = &v->plan;
    v->journal = AT(v, p->journal);
    v->clients = AT(v, p->clients);
    v->pins = AT(v, p->pins);
    v->events = AT(v, p->events);
    v->node = AT(v, p->node);
    v->child = AT(v, p->child);
    v->num_children = AT(v, p->num_children);
    v->pin_count = AT(v, p->pin_count);
    v->last_access = AT(v, p->last_access);
    v->bucket = AT(v, p->bucket);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        rs_pool_view *pool = &v->pool[k];
        pool->capacity = v->config.pool[k].num_slots;
        pool->window = v->config.pool[k].window_blocks;
        pool->shm = &v->hdr->pool[k];
        pool->state = AT(v, p->pool[k].state);
        pool->owner = AT(v, p->pool[k].owner);
        pool->gen = AT(v, p->pool[k].gen);
        pool->level = AT(v, p->pool[k].level);
        pool->placed = AT(v, p->pool[k].placed);
        pool->list_prev = AT(v, p->pool[k].list_prev);
        pool->list_next = AT(v, p->pool[k].list_next);
        pool->bitmap = AT(v, p->pool[k].bitmap);
        pool->summary = AT(v, p->pool[k].summary);
        if (k == RS_FULL || pool->capacity == 0)
            continue;
        pool->block = AT(v, p->pool[k].block);
        v->side[k].slot = AT(v, p->side[k].slot);
        v->side[k].pins = AT(v, p->side[k].pins);
        v->side[k].cover = AT(v, p->side[k].cover);
        v->side[k].is_end = AT(v, p->side[k].is_end);
    }
}

int rs_view_init(rs_view *v, void *base, uint64_t num_bytes)
{
    rs_header_shm *hdr = base;
    memset(v, 0, sizeof *v);
    if (num_bytes < sizeof *hdr || hdr->magic != RS_MAGIC)
        return RS_ECORRUPT;
    if (hdr->layout_version != RS_LAYOUT_VERSION || hdr->abi != RS_ABI_WORD)
        return RS_EVERSION;
    memcpy(&v->config, &hdr->config, sizeof v->config);
    if (rs_plan_region(&v->config, &v->plan) != RS_OK)
        return RS_ECORRUPT;
    if (hdr->region_bytes != v->plan.region_bytes || num_bytes < v->plan.region_bytes)
        return RS_ECORRUPT;
    static const uint8_t zero[16];
    if (memcmp(v->config.epoch, zero, 16) == 0)
        return RS_ECORRUPT;
    v->base = base;
    v->hdr = hdr;
    v->me = RS_NONE;
    point(v);
    return RS_OK;
}

static void fill_none(rs_a32 *array, uint64_t n) { memset((void *)array, 0xff, n * 4); }

static void format_pool(rs_view *v, int component)
{
    rs_pool_view *pool = &v->pool[component];
    uint64_t n = pool->capacity, words = (n + 63) / 64;
    for (int level = 0; level < RS_MAX_LEVELS; level++) {
        rs_raw(&pool->shm->lists.head[level], RS_NONE);
        rs_raw(&pool->shm->lists.tail[level], RS_NONE);
    }
    if (n == 0)
        return;
    fill_none(pool->list_prev, n);
    fill_none(pool->list_next, n);
    for (uint64_t s = 0; s < n; s += 64)
        rs_raw(&pool->bitmap[s / 64], n - s >= 64 ? ~0ull : (1ull << (n - s)) - 1);
    for (uint64_t w = 0; w < words; w += 64)
        rs_raw(&pool->summary[w / 64], words - w >= 64 ? ~0ull : (1ull << (words - w)) - 1);
    rs_raw(&pool->shm->num_free, (uint32_t)n);
    if (component == RS_FULL)
        return;
    fill_none(pool->block, n);
    fill_none(v->side[component].slot, v->pool[RS_FULL].capacity);
}

static void format_view(rs_view *v)
{
    uint64_t n = v->pool[RS_FULL].capacity;
    for (uint64_t s = 0; s < n; s++) {
        rs_raw(&v->node[s].parent, RS_NONE);
        rs_raw(&v->node[s].next, RS_NONE);
    }
    fill_none(v->child, n);
    fill_none(v->bucket, 1ull << v->plan.bucket_bits);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        format_pool(v, k);
    uint32_t num_pins = v->config.pins_per_client;
    for (uint32_t i = 0; i < v->config.max_clients; i++) {
        rs_raw(&v->clients[i].insert_pin.slot, RS_NONE);
        for (uint32_t r = 0; r < num_pins; r++) {
            rs_pin_shm *record = &v->pins[(uint64_t)i * num_pins + r];
            rs_raw(&record->slot, RS_NONE);
            rs_raw(&record->link, r + 1 < num_pins ? r + 1 : RS_NONE);
        }
    }
}

static void *map_file(int fd, uint64_t min_bytes, int prot, uint64_t *num_bytes)
{
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size < 0 || (uint64_t)st.st_size < min_bytes)
        return NULL;
    *num_bytes = (uint64_t)st.st_size;
    void *base = mmap(NULL, *num_bytes, prot, MAP_SHARED, fd, 0);
    return base == MAP_FAILED ? NULL : base;
}

int rs_region_format(int fd, const rs_config *cfg)
{
    rs_plan plan;
    rs_view v;
    uint64_t num_bytes;
    int rc = rs_plan_region(cfg, &plan);
    if (rc != RS_OK)
        return rc;
    uint8_t *base = map_file(fd, plan.region_bytes, PROT_READ | PROT_WRITE, &num_bytes);
    if (!base)
        return RS_ESYS;
    rs_header_shm *hdr = (rs_header_shm *)base;
    rs_raw(&hdr->state, RS_STATE_BUILDING);
    memcpy(&hdr->config, cfg, sizeof *cfg);
    hdr->magic = RS_MAGIC;
    hdr->layout_version = RS_LAYOUT_VERSION;
    hdr->abi = RS_ABI_WORD;
    hdr->region_bytes = plan.region_bytes;
    rc = rs_view_init(&v, base, num_bytes);
    if (rc == RS_OK)
        format_view(&v);
    munmap(base, num_bytes);
    return rc;
}

static int set_state(int fd, uint64_t header_bytes, uint64_t magic, size_t state_offset, uint32_t state)
{
    uint64_t num_bytes;
    uint8_t *base = map_file(fd, header_bytes, PROT_READ | PROT_WRITE, &num_bytes);
    if (!base)
        return RS_ESYS;
    int rc = *(uint64_t *)base == magic ? RS_OK : RS_ECORRUPT;
    if (rc == RS_OK)
        atomic_store((rs_a32 *)(base + state_offset), state);
    munmap(base, num_bytes);
    return rc;
}

int rs_region_set_state(int fd, uint32_t state)
{
    return set_state(fd, sizeof(rs_header_shm), RS_MAGIC, offsetof(rs_header_shm, state), state);
}

int rs_store_set_state(int fd, uint32_t state)
{
    return set_state(fd, sizeof(store_header_shm), RS_STORE_MAGIC, offsetof(store_header_shm, state), state);
}

int rs_map_readonly(int fd, rs_view *v, uint64_t *map_bytes)
{
    void *base = map_file(fd, sizeof(rs_header_shm), PROT_READ, map_bytes);
    if (!base)
        return RS_ECORRUPT; /* too short to be a region */
    int rc = rs_view_init(v, base, *map_bytes);
    if (rc != RS_OK)
        munmap(base, *map_bytes);
    return rc;
}

void rs_unmap(rs_view *v, uint64_t map_bytes) { munmap(v->base, map_bytes); }

void rs_info_fill(const rs_view *v, rs_info *out)
{
    memset(out, 0, sizeof *out);
    out->config = v->config;
    memcpy(out->config.fingerprint, v->hdr->config.fingerprint, sizeof out->config.fingerprint);
    out->config.fingerprint[sizeof out->config.fingerprint - 1] = 0;
    out->region_bytes = v->plan.region_bytes;
    out->generation = rs_ld(&v->hdr->generation);
    out->layout_version = RS_LAYOUT_VERSION;
    out->state = rs_ld_acq(&v->hdr->state);
}

int rs_region_peek(int fd, rs_info *out)
{
    rs_view v;
    uint64_t map_bytes;
    int rc = rs_map_readonly(fd, &v, &map_bytes);
    if (rc == RS_EVERSION && pread(fd, &out->layout_version, sizeof out->layout_version,
                                   offsetof(rs_header_shm, layout_version)) != sizeof out->layout_version)
        rc = RS_ECORRUPT;
    if (rc != RS_OK)
        return rc;
    rs_info_fill(&v, out);
    rs_unmap(&v, map_bytes);
    return RS_OK;
}

int rs_store_format(int fd, uint64_t total_bytes, uint64_t data_offset, const uint8_t epoch[16])
{
    uint64_t num_bytes;
    store_header_shm *hdr = map_file(fd, sizeof *hdr, PROT_READ | PROT_WRITE, &num_bytes);
    if (!hdr)
        return RS_ESYS;
    bool ok = data_offset >= sizeof *hdr && data_offset <= total_bytes && total_bytes <= num_bytes;
    if (ok) {
        rs_raw(&hdr->state, RS_STATE_BUILDING);
        hdr->total_bytes = total_bytes;
        hdr->data_offset = data_offset;
        hdr->layout_version = RS_LAYOUT_VERSION;
        hdr->abi = RS_ABI_WORD;
        memcpy(hdr->epoch, epoch, 16);
        hdr->magic = RS_STORE_MAGIC;
    }
    munmap(hdr, num_bytes);
    return ok ? RS_OK : RS_EINVAL;
}

int rs_store_peek(int fd, rs_store_info *out)
{
    uint64_t num_bytes;
    store_header_shm *hdr = map_file(fd, sizeof *hdr, PROT_READ, &num_bytes);
    if (!hdr)
        return RS_ECORRUPT;
    int rc = RS_OK;
    if (hdr->magic != RS_STORE_MAGIC || hdr->total_bytes > num_bytes || hdr->data_offset > hdr->total_bytes)
        rc = RS_ECORRUPT;
    else if (hdr->layout_version != RS_LAYOUT_VERSION || hdr->abi != RS_ABI_WORD)
        rc = RS_EVERSION;
    memset(out, 0, sizeof *out);
    if (rc == RS_OK) {
        *out = (rs_store_info){.total_bytes = hdr->total_bytes, .data_offset = hdr->data_offset,
                               .state = rs_ld_acq(&hdr->state), .layout_version = hdr->layout_version};
        memcpy(out->epoch, hdr->epoch, 16);
    }
    munmap(hdr, num_bytes);
    return rc;
}
