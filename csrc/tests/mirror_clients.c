/* mirror_clients.c - clients that come, go, die and are reaped. */
#include "mirror.h"

#include <string.h>

void op_attach(mirror *w, int i)
{
    bool device = below(w, 4) == 0;
    w->client[i] = attach(w->fd);
    w->dead[i] = w->dying[i] = false;
    if (device)
        CHECK_OK(rs_set_device(w->client[i]));
}

static void op_detach(mirror *w, int i)
{
    int slot = rs_client_slot(w->client[i]);
    CHECK_OK(rs_detach(w->client[i]));
    model_forget_client(&w->m, i, slot);
    w->client[i] = NULL;
}

/* What became of dead client i: nothing yet; pins gone, staged slots in quarantine; all gone. */
static void settle_dead(mirror *w, int i)
{
    rs_client *c = w->client[i];
    int slot = rs_client_slot(c);
    const rs_client_shm *entry = &w->watcher->v.clients[slot];
    if (rs_ld(&entry->state) == RS_CLIENT_FREE || rs_ld(&entry->incarnation) != rs_client_incarnation(c)) {
        model_forget_client(&w->m, i, slot);
        w->dead[i] = w->dying[i] = false;
        w->client[i] = NULL; /* the handle's memory stays: its process would be gone */
    } else if (rs_ld(&entry->state) == RS_CLIENT_DYING && !w->dying[i]) {
        for (int p = w->m.num_pins; p-- > 0;)
            if (w->m.pins[p].client == i)
                model_pin_drop(&w->m, p);
        model_drain(&w->m);
        w->dying[i] = true;
    }
}

static void settle_all_dead(mirror *w)
{
    for (int i = 0; i < MODEL_CLIENTS; i++)
        if (w->dead[i])
            settle_dead(w, i);
}

/* Every dead client goes, or is quarantined if it was a device's with staged slots, once. */
static void op_reap(mirror *w, int client)
{
    rs_reap_result r;
    bool was_dead[MODEL_CLIENTS], was_dying[MODEL_CLIENTS];
    memcpy(was_dead, w->dead, sizeof(was_dead));
    memcpy(was_dying, w->dying, sizeof(was_dying));
    CHECK_OK(rs_reap(w->dead[client] ? w->watcher : w->client[client], &r));
    settle_all_dead(w);
    for (int i = 0; i < MODEL_CLIENTS; i++)
        CHECK(!was_dead[i] || !w->client[i] || (w->dying[i] && !was_dying[i]));
}

/* A newcomer takes a dead client's place when no other is free. */
static void op_replace(mirror *w, int dead)
{
    int newcomer = dead, slot = rs_client_slot(w->client[dead]);
    for (int i = 0; i < MODEL_CLIENTS; i++)
        if (!w->client[i])
            return;
    rs_client *c = attach(w->fd);
    settle_all_dead(w);
    for (int i = 0; i < MODEL_CLIENTS; i++)
        if (!w->client[i])
            newcomer = i;
    CHECK(!w->client[newcomer]);
    CHECK(newcomer != dead || rs_client_slot(c) == slot);
    w->client[newcomer] = c;
}

void op_clients(mirror *w, int i)
{
    if (!w->client[i]) {
        op_attach(w, i);
        return;
    }
    if (w->dead[i]) {
        (below(w, 2) ? op_reap : op_replace)(w, i);
        return;
    }
    switch (below(w, 3)) {
    case 0: op_detach(w, i); break;
    case 1: kill_client(w->client[i]); w->dead[i] = true; break;
    default: op_reap(w, i);
    }
}
