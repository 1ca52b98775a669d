/* attach.c - private handles: joining and leaving an index.
 *
 * A handle has three descriptors of the index file, each from an open of its own: file (mapped), life
 * and lease (lock.c).  In a forked child they are closed (fds.c), and every verb returns RS_EFORKED.
 */
#include "core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ATTACH_ROUNDS 20 /* a reaper may hold a free entry's bytes for a moment */
#define LEASE_TRIES 5

/* -- attach --------------------------------------------------------------------------------- */

static void free_handle(rs_client *c)
{
    if (c->v.base)
        munmap(c->v.base, c->map_bytes);
    rs_fd_close(&c->life);
    rs_fd_close(&c->lease);
    rs_fd_close(&c->file);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++)
        free(c->marks[k]);
    pthread_mutex_destroy(&c->insert_mutex);
    free(c);
}

static int map_index(rs_client *c, int fd)
{
    struct stat st;
    if (rs_fd_open(&c->file, fd) != 0 || rs_fd_open(&c->lease, fd) != 0 || rs_fd_open(&c->life, fd) != 0 ||
        fstat(c->file.fd, &st) != 0)
        return RS_ESYS;
    if ((uint64_t)st.st_size < sizeof(rs_header_shm))
        return RS_ECORRUPT;
    c->map_bytes = (uint64_t)st.st_size;
    void *base = mmap(NULL, c->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, c->file.fd, 0);
    if (base == MAP_FAILED)
        return RS_ESYS;
    int rc = rs_view_init(&c->v, base, c->map_bytes);
    c->v.base = base; /* also on failure: to be unmapped */
    if (rc == RS_OK)
        (void)madvise(base, c->map_bytes, MADV_DONTDUMP); /* a core dump needs no tenants' hashes */
    return rc;
}

static int allocate_marks(rs_client *c)
{
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        c->marks[k] = calloc((c->v.pool[k].capacity + 63) / 64 + 1, 8);
        if (!c->marks[k])
            return RS_ENOMEM;
    }
    return RS_OK;
}

static int state_rc(const rs_view *v)
{
    uint32_t state = rs_ld_acq(&v->hdr->state);
    if (state == RS_STATE_READY)
        return RS_OK;
    if (state == RS_STATE_RETIRED)
        return RS_ERETIRED;
    return state == RS_STATE_BUILDING ? RS_ENOTREADY : RS_ECORRUPT;
}

static void describe_entry(rs_client_shm *entry, const char *label)
{
    struct stat ns;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    rs_raw(&entry->pid, (uint32_t)getpid());
    rs_raw(&entry->pid_namespace, stat("/proc/self/ns/pid", &ns) == 0 ? (uint64_t)ns.st_ino : 0);
    rs_raw(&entry->attached_unix_ns, (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec);
    memset(entry->label, 0, sizeof entry->label);
    strncpy(entry->label, label ? label : "", sizeof entry->label - 1);
}

/* Both bytes of entry i are ours: clear what is left of its last client and take it.  1: it must
 * be left alone (DYING). */
static int activate(rs_client *c, uint32_t i, const char *label)
{
    rs_view *v = &c->v;
    rs_client_shm *entry = &v->clients[i];
    rs_reap_result reaped = {0};
    v->me = i;
    int rc = rs_lock(c, i); /* takes the word over if it names entry i: its owner is dead */
    if (rc != RS_OK)
        return rc;
    bool used = rs_ld(&entry->state) != RS_CLIENT_FREE;
    rs_unlock(c);
    if (used)
        rc = rs_entry_clear(c, i, i, &reaped);
    if (rc == RS_OK)
        rc = rs_lock(c, i);
    if (rc != RS_OK)
        return rc;
    if (rs_ld(&entry->state) != RS_CLIENT_FREE) {
        rs_unlock(c);
        return 1;
    }
    describe_entry(entry, label);
    c->incarnation = rs_ld(&v->hdr->next_incarnation) + 1;
    rs_set64(v, &v->hdr->next_incarnation, c->incarnation);
    rs_set64(v, &entry->incarnation, c->incarnation);
    rs_set32(v, &entry->state, RS_CLIENT_ACTIVE);
    rc = rs_commit_locked(v);
    rs_unlock(c);
    return rc;
}

static int try_entry(rs_client *c, uint32_t i, bool only_free, const char *label)
{
    if (only_free && rs_ld(&c->v.clients[i].state) != RS_CLIENT_FREE)
        return 1;
    if (rs_byte_take(c->lease.fd, i, RS_BYTE_LEASE) != 0)
        return 1;
    int rc = 1;
    if (rs_byte_take(c->life.fd, i, RS_BYTE_LIFE) == 0) {
        rc = activate(c, i, label);
        if (rc == RS_OK)
            return rc;
        rs_byte_drop(c->life.fd, i, RS_BYTE_LIFE);
    }
    rs_byte_drop(c->lease.fd, i, RS_BYTE_LEASE);
    return rc;
}

/* A free entry first, then a dead client's. */
static int join(rs_client *c, const char *label)
{
    for (int round = 0; round < ATTACH_ROUNDS; round++) {
        for (int pass = 0; pass < 2; pass++)
            for (uint32_t i = 0; i < c->v.config.max_clients; i++) {
                int rc = try_entry(c, i, pass == 0, label);
                if (rc <= RS_OK)
                    return rc;
            }
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    return RS_ECLIENTS;
}

int rs_attach(int fd, const char *label, rs_client **out)
{
    *out = NULL;
    rs_client *c = calloc(1, sizeof *c);
    if (!c)
        return RS_ENOMEM;
    c->file.fd = c->life.fd = c->lease.fd = -1;
    pthread_mutex_init(&c->insert_mutex, NULL);
    int rc = map_index(c, fd);
    if (rc == RS_OK)
        rc = state_rc(&c->v);
    if (rc == RS_OK)
        rc = allocate_marks(c);
    if (rc == RS_OK)
        rc = join(c, label);
    if (rc != RS_OK) {
        int saved = errno;
        free_handle(c);
        errno = saved;
        return rc;
    }
    rs_reap_result reaped;
    (void)rs_reap_if_due(c, RS_CLIENT_REAP_NS, &reaped); /* best effort, as in allocate */
    if (rs_ld(&c->v.hdr->draining))
        (void)rs_drain_all(c); /* a dead client's pins held an old root; BUSY leaves it to the next verb */
    *out = c;
    return RS_OK;
}

/* True when no dup of the lease is left: then nobody can write the client's slots any more.  A
 * reaper may hold the byte for a moment, hence the few tries. */
static bool lease_is_sole(rs_client *c)
{
    rs_fd_close(&c->lease);
    if (rs_fd_open(&c->lease, c->file.fd) != 0) /* holds the byte, once taken, until the entry is free */
        return false;
    for (int i = 0; i < LEASE_TRIES; i++) {
        if (rs_byte_take(c->lease.fd, c->v.me, RS_BYTE_LEASE) == 0)
            return true;
        struct timespec pause = {0, 1000000};
        nanosleep(&pause, NULL);
    }
    return false;
}

int rs_detach(rs_client *c)
{
    if (!c)
        return RS_OK;
    int rc = RS_OK;
    if (!rs_forked(c)) {
        rs_reap_result given_back = {0};
        rc = rs_verify_file(c); /* touching what was truncated would be SIGBUS */
        /* A worker still holds the lease: the reapers clear the entry when it is gone. */
        if (rc == RS_OK && lease_is_sole(c))
            rc = rs_entry_clear(c, c->v.me, RS_NONE, &given_back);
        if (rc == RS_OK && rs_ld(&c->v.hdr->draining))
            rc = rs_drain_all(c);
    }
    free_handle(c);
    return rc;
}

int rs_client_slot(const rs_client *c) { return (int)c->v.me; }

uint64_t rs_client_incarnation(const rs_client *c) { return c->incarnation; }

int rs_lease_fd(const rs_client *c) { return c->lease.fd; }

int rs_alive(const rs_client *c)
{
    if (rs_forked(c))
        return RS_EFORKED;
    uint32_t state = rs_ld_acq(&c->v.hdr->state);
    return state == RS_STATE_READY ? RS_OK : state == RS_STATE_RETIRED ? RS_ERETIRED : RS_ECORRUPT;
}

int rs_verify_file(const rs_client *c)
{
    struct stat st;
    if (rs_forked(c))
        return RS_EFORKED;
    return fstat(c->file.fd, &st) == 0 && (uint64_t)st.st_size >= c->map_bytes ? RS_OK : RS_ECORRUPT;
}

int rs_get_info(rs_client *c, rs_info *out)
{
    rs_info_fill(&c->v, out);
    return RS_OK;
}

int rs_set_device(rs_client *c)
{
    int rc = rs_verb_begin(c);
    if (rc != RS_OK)
        return rc;
    rs_set32(&c->v, &c->v.clients[c->v.me].device, 1);
    return rs_verb_end(c, RS_OK);
}

int rs_set_fingerprint(rs_client *c, const char *fingerprint)
{
    char *stored = c->v.hdr->config.fingerprint;
    size_t length = strnlen(fingerprint, sizeof c->v.config.fingerprint);
    if (length == 0 || length == sizeof c->v.config.fingerprint)
        return RS_EINVAL;
    int rc = rs_verb_begin(c);
    if (rc != RS_OK)
        return rc;
    if (stored[0] == 0) {
        /* The first byte last: readers see an empty string or the whole of it. */
        memcpy(stored + 1, fingerprint + 1, length);
        atomic_store_explicit((_Atomic char *)stored, fingerprint[0], memory_order_release);
    } else if (strncmp(stored, fingerprint, sizeof c->v.config.fingerprint) != 0) {
        rc = RS_EINVAL;
    }
    return rs_verb_end(c, rc);
}
