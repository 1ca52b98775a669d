/* clients.c - the client table, the ledger of pins, attach, detach, and reaping the dead.
 *
 * ORDER.  Attach and reap take a slot's lease byte, then its life byte (lock.c), then the index
 * lock.  Holding both bytes of slot i means: no process of its last client is left that could store
 * into the region or into the client's slots, and no new client can take the entry.
 *
 * Guarantees:
 *   C1  What an entry holds is given back exactly when its lease byte is free: while a transfer
 *       worker keeps a dup of the lease, nothing of the dead client is handed on.
 *   C2  A `device` client's staged slots wait for a deadline after its death (DMA that was under
 *       way may still land); its pins go at once, since reading DMA harms nobody.
 *   C3  Giving back is done in batches of RS_BATCH under the lock; killed in between, the entry is
 *       still there and the next reaper goes on.
 */
#include "core.h"

#include <string.h>

/* Slot states looked at per lock hold while searching a dead client's staged slots. */
#define SCAN_SLOTS 16384u
/* For how long a client that begins to reap keeps the others from it. */
#define REAP_CLAIM_NS 200000000ull

void rs_count(rs_client *c, uint32_t counter, uint64_t n)
{
    atomic_fetch_add_explicit(&c->v.clients[c->v.me].counters[counter], n, memory_order_relaxed);
}

/* -- ledger --------------------------------------------------------------------------------- */

rs_pin_shm *rs_pin_record(const rs_view *v, uint32_t client, uint32_t index)
{
    return &v->pins[(uint64_t)client * v->config.pins_per_client + index];
}

bool rs_pin_room_locked(const rs_view *v) { return rs_ld(&v->clients[v->me].free_pin) != RS_NONE; }

static void pin_block(rs_view *v, rs_pin_shm *record, rs_slot deepest, uint32_t num_blocks, uint32_t mask)
{
    if (rs_evictable(v, deepest))
        rs_leave_locked(v, RS_FULL, deepest);
    rs_add32(v, &v->pin_count[deepest], 1);
    rs_add32(v, &v->pool[RS_FULL].shm->num_pins, 1);
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if (mask & 1u << k)
            rs_side_pin_locked(v, k, deepest, 1);
    rs_set32(v, &record->num_blocks, num_blocks);
    rs_set32(v, &record->mask, mask);
    rs_set32(v, &record->slot, deepest);
}

static void unpin_block(rs_view *v, rs_pin_shm *record)
{
    rs_slot s = rs_bound(v, rs_ld(&record->slot), v->pool[RS_FULL].capacity);
    uint32_t mask = rs_ld(&record->mask);
    for (uint32_t k = RS_SWA; k < RS_NUM_COMPONENTS; k++)
        if ((mask & 1u << k) && rs_has(v, k))
            rs_side_pin_locked(v, k, s, -1);
    rs_set32(v, &record->slot, RS_NONE);
    rs_add32(v, &v->pool[RS_FULL].shm->num_pins, -1);
    rs_add32(v, &v->pin_count[s], -1);
    if (!rs_evictable(v, s))
        return;
    rs_pool_view *p = &v->pool[RS_FULL];
    if (rs_ld(&p->gen[s]) == rs_ld(&v->hdr->current_root)) {
        rs_enter_young_locked(v, RS_FULL, s, true);
        return;
    }
    /* Of an old root: it goes as soon as the drain comes by, before all others. */
    rs_enter_old_locked(v, RS_FULL, s, rs_ld(&p->level[s]), rs_ld(&p->placed[s]));
    rs_set32(v, &v->hdr->draining, 1);
}

void rs_pin_take_locked(rs_view *v, rs_slot deepest, uint32_t num_blocks, uint32_t mask, rs_pin *out)
{
    rs_client_shm *entry = &v->clients[v->me];
    uint32_t index = rs_bound(v, rs_ld(&entry->free_pin), v->config.pins_per_client);
    rs_pin_shm *record = rs_pin_record(v, v->me, index);
    uint64_t nonce = rs_ld(&entry->nonce) + 1;
    rs_set32(v, &entry->free_pin, rs_ld(&record->link));
    rs_set64(v, &entry->nonce, nonce);
    rs_set64(v, &record->nonce, nonce);
    rs_add32(v, &entry->num_pins, 1);
    pin_block(v, record, deepest, num_blocks, mask);
    *out = (rs_pin){.index = index, .valid = 1, .nonce = nonce};
}

void rs_pin_drop_locked(rs_view *v, uint32_t client, uint32_t index)
{
    rs_client_shm *entry = &v->clients[client];
    rs_pin_shm *record = rs_pin_record(v, client, index);
    if (rs_ld(&record->slot) == RS_NONE)
        return;
    unpin_block(v, record);
    rs_set32(v, &record->link, rs_ld(&entry->free_pin));
    rs_set32(v, &entry->free_pin, index);
    rs_add32(v, &entry->num_pins, -1);
}

void rs_insert_pin_move_locked(rs_view *v, uint32_t client, rs_slot deepest, uint32_t num_blocks)
{
    rs_pin_shm *record = &v->clients[client].insert_pin;
    if (rs_ld(&record->slot) != RS_NONE)
        unpin_block(v, record);
    if (deepest != RS_NONE)
        pin_block(v, record, deepest, num_blocks, RS_MASK_FULL);
}

/* -- giving an entry back ------------------------------------------------------------------- */

/* One batch of pins; *next is the first record not looked at. */
static uint32_t drop_pins_locked(rs_view *v, uint32_t client, uint32_t *next)
{
    uint32_t num = 0;
    if (*next == 0)
        rs_insert_pin_move_locked(v, client, RS_NONE, 0);
    while (*next < v->config.pins_per_client && num < RS_BATCH && rs_ld(&v->clients[client].num_pins) &&
           rs_journal_room(v) >= v->plan.journal_worst && !v->corrupt) {
        num += rs_ld(&rs_pin_record(v, client, *next)->slot) != RS_NONE;
        rs_pin_drop_locked(v, client, (*next)++);
    }
    return num;
}

/* One batch of staged slots of one pool, searching from *next. */
static uint32_t drop_staged_locked(rs_view *v, uint32_t client, uint32_t component, uint32_t *next)
{
    rs_pool_view *p = &v->pool[component];
    int32_t slots[RS_BATCH];
    uint32_t num = 0, end = *next + rs_min(SCAN_SLOTS, p->capacity - *next);
    for (; *next < end && num < RS_BATCH; (*next)++)
        if (rs_ld(&p->state[*next]) == RS_SLOT_STAGED && rs_ld(&p->owner[*next]) == client)
            slots[num++] = (int32_t)*next;
    rs_unstage_locked(v, client, component, slots, num);
    return num;
}

static bool entry_has_staged(const rs_view *v, uint32_t client)
{
    uint32_t num = 0;
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        num |= rs_ld(&v->clients[client].num_staged[k]);
    return num != 0;
}

/* Statistics of a client that is gone live on in the header. */
static void fold_counters_locked(rs_view *v, uint32_t client)
{
    for (int i = 0; i < RS_NUM_COUNTERS; i++) {
        rs_a64 *counter = &v->clients[client].counters[i];
        if (rs_ld(counter) == 0)
            continue;
        rs_add64(v, &v->hdr->counters[i], rs_ld(counter));
        rs_set64(v, counter, 0);
    }
}

static int lock_and(rs_client *c, uint32_t held_slot, int (*batch)(rs_view *, uint32_t, void *), uint32_t client, void *arg)
{
    int rc = rs_lock(c, held_slot);
    if (rc != RS_OK)
        return rc;
    int more = batch(&c->v, client, arg);
    rc = rs_commit_locked(&c->v);
    rs_unlock(c);
    return rc != RS_OK ? rc : more;
}

typedef struct clearing {
    rs_reap_result *out;
    uint32_t next_pin, next_slot[RS_NUM_COMPONENTS];
    bool dead;                   /* reaped, not detached: counted as such */
} clearing;

static int pins_batch(rs_view *v, uint32_t client, void *arg)
{
    clearing *k = arg;
    uint32_t num = drop_pins_locked(v, client, &k->next_pin);
    k->out->pins += num;
    if (k->dead)
        rs_add64(v, &v->hdr->reaped_pins, num);
    return k->next_pin < v->config.pins_per_client && rs_ld(&v->clients[client].num_pins) != 0;
}

static int slots_batch(rs_view *v, uint32_t client, void *arg)
{
    clearing *k = arg;
    for (uint32_t c = 0; c < RS_NUM_COMPONENTS; c++) {
        if (rs_ld(&v->clients[client].num_staged[c]) == 0 || k->next_slot[c] >= v->pool[c].capacity)
            continue;
        uint32_t num = drop_staged_locked(v, client, c, &k->next_slot[c]);
        k->out->slots += num;
        if (k->dead)
            rs_add64(v, &v->hdr->reaped_slots, num);
        return 1;
    }
    return 0;
}

/* DYING, or FREE at last.  Returns 1 when the entry must wait for its deadline. */
static int close_batch(rs_view *v, uint32_t client, void *arg)
{
    clearing *k = arg;
    rs_client_shm *entry = &v->clients[client];
    if (k->dead && rs_ld(&entry->device) && rs_ld(&entry->state) == RS_CLIENT_ACTIVE &&
        entry_has_staged(v, client)) {
        rs_set64(v, &entry->deadline_ns, rs_now_ns() + v->config.reap_quarantine_ns);
        rs_set32(v, &entry->state, RS_CLIENT_DYING);
        k->out->dying++;
        return 1;
    }
    if (rs_ld(&entry->state) == RS_CLIENT_DYING && rs_now_ns() < rs_ld(&entry->deadline_ns)) {
        k->out->dying++;
        return 1;
    }
    if (entry_has_staged(v, client))
        return 0;
    fold_counters_locked(v, client);
    rs_set32(v, &entry->device, 0);
    rs_set32(v, &entry->state, RS_CLIENT_FREE);
    if (k->dead) {
        rs_add64(v, &v->hdr->reaped_clients, 1);
        k->out->clients++;
    }
    return 0;
}

int rs_entry_clear(rs_client *c, uint32_t client, uint32_t held_slot, rs_reap_result *out)
{
    clearing k = {.out = out, .dead = held_slot != RS_NONE};
    int rc;
    while ((rc = lock_and(c, held_slot, pins_batch, client, &k)) > 0)
        ;
    if (rc == RS_OK)
        rc = lock_and(c, held_slot, close_batch, client, &k);
    if (rc != RS_OK)
        return rc > 0 ? RS_OK : rc; /* waits for its deadline */
    while ((rc = lock_and(c, held_slot, slots_batch, client, &k)) > 0)
        ;
    if (rc == RS_OK && rs_ld(&c->v.clients[client].state) != RS_CLIENT_FREE)
        rc = lock_and(c, held_slot, close_batch, client, &k);
    return rc;
}

/* -- reaping -------------------------------------------------------------------------------- */

static int reap_entry(rs_client *c, uint32_t client, int fd, rs_reap_result *out)
{
    rs_client_shm *entry = &c->v.clients[client];
    if (rs_ld(&entry->state) == RS_CLIENT_FREE)
        return RS_OK;
    if (rs_ld(&entry->state) == RS_CLIENT_DYING && rs_now_ns() < rs_ld(&entry->deadline_ns))
        return RS_OK;
    if (rs_byte_take(fd, client, RS_BYTE_LEASE) != 0)
        return RS_OK; /* alive, or a worker of it is */
    int rc = RS_OK;
    if (rs_byte_take(fd, client, RS_BYTE_LIFE) == 0) {
        if (rs_ld(&entry->state) != RS_CLIENT_FREE)
            rc = rs_entry_clear(c, client, client, out);
        rs_byte_drop(fd, client, RS_BYTE_LIFE);
    }
    rs_byte_drop(fd, client, RS_BYTE_LEASE);
    return rc;
}

int rs_reap(rs_client *c, rs_reap_result *out)
{
    memset(out, 0, sizeof *out);
    if (rs_forked(c))
        return RS_EFORKED;
    int rc = RS_OK;
    rs_fd probe;
    if (rs_fd_open(&probe, c->file.fd) != 0)
        return RS_ESYS;
    for (uint32_t i = 0; i < c->v.config.max_clients && rc == RS_OK; i++)
        if (i != c->v.me)
            rc = reap_entry(c, i, probe.fd, out);
    rs_fd_close(&probe);
    if (rc == RS_OK && rs_ld(&c->v.hdr->draining))
        rc = rs_drain_all(c);
    if (rc == RS_OK)
        rs_raw(&c->v.hdr->last_reap_ns, rs_now_ns());
    return rc;
}

int rs_reap_if_due(rs_client *c, uint64_t min_interval_ns, rs_reap_result *out)
{
    memset(out, 0, sizeof *out);
    uint64_t last = rs_ld(&c->v.hdr->last_reap_ns), now = rs_now_ns();
    /* CLOCK_MONOTONIC starts anew at boot, shared memory too: last > now is another thread's. */
    if (now < last || now - last < min_interval_ns)
        return RS_OK;
    /* Claimed for a moment only: if this process is killed, or finds the index busy, another soon tries. */
    uint64_t claim = min_interval_ns < REAP_CLAIM_NS ? min_interval_ns : REAP_CLAIM_NS;
    rs_raw(&c->v.hdr->last_reap_ns, now - min_interval_ns + claim);
    return rs_reap(c, out);
}
