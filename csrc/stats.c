/* stats.c - counters and clients of an index, of a living one or through a read-only mapping.
 *
 * A client's own counters stand in its entry and are folded into the header when it goes; the sum
 * over both is what is reported.  Folding happens under the lock, so a sum taken under it neither
 * misses nor doubles a client.
 */
#include "core.h"

#include <string.h>

static void sum_counters(const rs_view *v, uint64_t sum[RS_NUM_COUNTERS])
{
    for (int i = 0; i < RS_NUM_COUNTERS; i++) {
        sum[i] = rs_ld(&v->hdr->counters[i]);
        for (uint32_t c = 0; c < v->config.max_clients; c++)
            sum[i] += rs_ld(&v->clients[c].counters[i]);
    }
}

static void fill_counters(const uint64_t sum[RS_NUM_COUNTERS], rs_stats *out)
{
    out->queries = sum[RS_C_QUERIES];
    out->pins_taken = sum[RS_C_PINS_TAKEN];
    out->pins_released = sum[RS_C_PINS_RELEASED];
    out->stale_releases = sum[RS_C_STALE_RELEASES];
    out->lock_timeouts = sum[RS_C_LOCK_TIMEOUTS];
    out->pin_limits = sum[RS_C_PIN_LIMITS];
    out->walk_retries = sum[RS_C_WALK_RETRIES];
    out->walks_locked = sum[RS_C_WALKS_LOCKED];
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        out->hit_blocks[k] = sum[RS_C_HIT_FULL + k];
        out->miss_blocks[k] = sum[RS_C_MISS_FULL + k];
        out->allocate_short[k] = sum[RS_C_SHORT_FULL + k];
        out->allocate_busy[k] = sum[RS_C_BUSY_FULL + k];
    }
}

static void fill_pool(const rs_view *v, int component, rs_stats *out)
{
    const rs_pool_shm *pool = &v->hdr->pool[component];
    rs_pool_stats *to = &out->pool[component];
    to->capacity = v->pool[component].capacity;
    to->num_free = rs_ld(&pool->num_free);
    to->num_staged = rs_ld(&pool->num_staged);
    to->num_published = rs_ld(&pool->num_published);
    to->num_pins = rs_ld(&pool->num_pins);
    for (int level = 0; level < RS_MAX_LEVELS; level++)
        to->num_listed += rs_ld(&pool->lists.count[level]);
    out->inserted_blocks[component] = rs_ld(&pool->inserted);
    out->allocated_slots[component] = rs_ld(&pool->allocated);
    out->recycled_slots[component] = rs_ld(&pool->recycled);
    for (int reason = 0; reason < RS_NUM_REASONS; reason++)
        out->evicted_blocks[component][reason] = rs_ld(&pool->evicted[reason]);
}

static void fill_stats(const rs_view *v, rs_stats *out)
{
    uint64_t sum[RS_NUM_COUNTERS];
    memset(out, 0, sizeof(*out));
    sum_counters(v, sum);
    fill_counters(sum, out);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        fill_pool(v, k, out);
    out->reaped_clients = rs_ld(&v->hdr->reaped_clients);
    out->reaped_pins = rs_ld(&v->hdr->reaped_pins);
    out->reaped_slots = rs_ld(&v->hdr->reaped_slots);
    out->lock_recoveries = rs_ld(&v->hdr->recoveries);
    out->generation = rs_ld(&v->hdr->generation);
    out->event_head = rs_ld_acq(&v->hdr->ev_head);
    out->event_capacity = v->plan.event_capacity;
    out->draining = rs_ld(&v->hdr->draining);
    for (uint32_t c = 0; c < v->config.max_clients; c++)
        out->num_clients += rs_ld(&v->clients[c].state) == RS_CLIENT_ACTIVE;
}

int rs_get_stats(rs_client *c, rs_stats *out)
{
    if (rs_forked(c))
        return RS_EFORKED;
    int rc = rs_lock(c, RS_NONE);
    if (rc == RS_ECORRUPT)
        return rc;
    fill_stats(&c->v, out); /* BUSY: numbers in motion are better than none */
    if (rc == RS_OK)
        rs_unlock(c);
    return RS_OK;
}

int rs_peek_stats(int fd, rs_stats *out)
{
    rs_view v;
    uint64_t map_bytes;
    int rc = rs_map_readonly(fd, &v, &map_bytes);
    if (rc != RS_OK)
        return rc;
    fill_stats(&v, out);
    rs_unmap(&v, map_bytes);
    return RS_OK;
}

static void fill_client(const rs_view *v, uint32_t slot, int fd, rs_client_info *out)
{
    const rs_client_shm *entry = &v->clients[slot];
    memset(out, 0, sizeof(*out));
    out->slot = slot;
    out->state = rs_ld(&entry->state);
    out->device = rs_ld(&entry->device);
    out->pid = rs_ld(&entry->pid);
    out->incarnation = rs_ld(&entry->incarnation);
    out->pid_namespace = rs_ld(&entry->pid_namespace);
    out->attached_unix_ns = rs_ld(&entry->attached_unix_ns);
    out->deadline_ns = rs_ld(&entry->deadline_ns);
    out->num_pins = rs_ld(&entry->num_pins);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        out->num_staged[k] = rs_ld(&entry->num_staged[k]);
    out->alive = rs_byte_held(fd, slot, RS_BYTE_LIFE);
    out->leased = rs_byte_held(fd, slot, RS_BYTE_LEASE);
    out->queries = rs_ld(&entry->counters[RS_C_QUERIES]);
    out->hit_blocks = rs_ld(&entry->counters[RS_C_HIT_FULL]);
    out->miss_blocks = rs_ld(&entry->counters[RS_C_MISS_FULL]);
    memcpy(out->label, entry->label, sizeof(out->label) - 1);
}

int rs_peek_clients(int fd, rs_client_info *out, uint32_t max, uint32_t *num)
{
    rs_view v;
    uint64_t map_bytes;
    *num = 0;
    int rc = rs_map_readonly(fd, &v, &map_bytes);
    if (rc != RS_OK)
        return rc;
    for (uint32_t i = 0; i < v.config.max_clients && *num < max; i++)
        if (rs_ld(&v.clients[i].state) != RS_CLIENT_FREE)
            fill_client(&v, i, fd, &out[(*num)++]);
    rs_unmap(&v, map_bytes);
    return RS_OK;
}
