/* lock.c - the index lock, the liveness of its owners, the sequence, the undo journal.
 *
 * THE LOCK is a futex word: 0, or WAITERS | client slot + 1.  It names a client slot and not a
 * thread id, because engines run in pid namespaces of their own, where equal ids mean different
 * threads (a robust pthread mutex then lets two writers in).
 *
 * LIFE.  Client slot i owns two lock ranges far beyond the end of the index file, each held as an
 * open-file-description lock through an fd of its own (own open, close-on-exec, never mapped: a
 * mapping would keep the description, and with it the lock, alive):
 *   life   one holder, never dup'ed: gone when the process is gone.  Decides lock takeover.
 *   lease  dup'ed to transfer workers: gone when the last process that may touch the client's slot
 *          bytes is gone.  Decides reaping and reuse of the client slot.
 * Whoever acts on whether a byte is held tries to take it through a freshly opened fd.  F_OFD_GETLK
 * would be stale as it returns; taking it also keeps the answer true: while the taker holds the byte,
 * no new owner of that slot can appear.  Who only shows it asks, and keeps nobody from taking it.
 *
 * Guarantees:
 *   G1  At most one thread holds the lock.  The word goes from owner A to taker B only by B's
 *       compare-and-swap while B holds A's life byte, so A's process is dead and stores no more.
 *   G2  Nobody works on a half-done batch: each acquisition that finds journal entries, an odd
 *       sequence or unpublished events runs rs_recover_locked() before anything else.
 *   G3  A dead owner costs a waiter at most one slice (10 ms) and the rollback; a stopped one costs
 *       the deadline (200 ms), then the verb answers BUSY.
 *
 * SEQUENCE.  Moves only when something is unlinked: odd while it happens, even after; recovery
 * moves it forward, never back.  A reader that saw it even and unchanged around its walk saw no
 * slot change its meaning.
 *
 * JOURNAL.  See rs_log() in core.h.  Commit is one store of 0 to journal_len.  The order at commit
 * is: journal cleared, sequence even, ev_head moved; a death between any two is finished by
 * recovery: it finds an odd sequence or ev_head != ev_next and no entries.
 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Lock ranges start here; no index file is this long, and the ranges are advisory. */
#define BYTES_BASE (1ll << 60)
/* Spins before sleeping: a batch is about 1 us, a futex sleep about 50 us. */
#define SPINS 200

uint64_t rs_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static struct flock byte_range(uint32_t slot, int which, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = BYTES_BASE + 2ll * slot + which, .l_len = 1};
}

static int byte_op(int fd, uint32_t slot, int which, short type)
{
    struct flock range = byte_range(slot, which, type);
    int rc;
    do
        rc = fcntl(fd, F_OFD_SETLK, &range);
    while (rc != 0 && errno == EINTR);
    return rc;
}

int rs_byte_take(int fd, uint32_t slot, int which) { return byte_op(fd, slot, which, F_WRLCK); }

void rs_byte_drop(int fd, uint32_t slot, int which) { (void)byte_op(fd, slot, which, F_UNLCK); }

bool rs_byte_held(int fd, uint32_t slot, int which)
{
    struct flock range = byte_range(slot, which, F_WRLCK);
    return fcntl(fd, F_OFD_GETLK, &range) == 0 && range.l_type != F_UNLCK;
}

static long futex(rs_a32 *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

static bool swap_word(rs_client *c, uint32_t old, uint32_t new)
{
    return atomic_compare_exchange_strong_explicit(&c->v.hdr->lock_word, &old, new, memory_order_acquire,
                                                   memory_order_relaxed);
}

/* The word named a dead owner? Then it is ours now. */
static bool take_from_dead(rs_client *c, uint32_t word, uint32_t mine)
{
    uint32_t owner = (word & ~RS_LOCK_WAITERS) - 1;
    if (owner == c->v.me)
        return false; /* another thread of this client */
    rs_fd probe;
    if (rs_fd_open(&probe, c->file.fd) != 0)
        return false;
    bool taken = rs_byte_take(probe.fd, owner, RS_BYTE_LIFE) == 0 && swap_word(c, word, mine);
    rs_fd_close(&probe); /* drops the byte */
    return taken;
}

static bool spin_for(rs_client *c, uint32_t mine)
{
    for (int i = 0; i < SPINS; i++) {
        if (rs_ld(&c->v.hdr->lock_word) == 0 && swap_word(c, 0, mine))
            return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    return false;
}

static int lock_slow(rs_client *c, uint32_t held_slot, uint32_t self)
{
    rs_a32 *word = &c->v.hdr->lock_word;
    uint32_t mine = (self + 1) | RS_LOCK_WAITERS; /* others may sleep: the next unlock wakes one */
    uint64_t deadline = rs_now_ns() + RS_LOCK_DEADLINE_NS;
    if (spin_for(c, self + 1))
        return RS_OK;
    for (;;) {
        uint32_t w = rs_ld(word), owner = (w & ~RS_LOCK_WAITERS) - 1;
        if (w == 0) {
            if (swap_word(c, 0, mine))
                return RS_OK;
            continue;
        }
        if (owner >= c->v.config.max_clients)
            return RS_ECORRUPT;
        if (owner == held_slot) { /* its life byte is ours: whoever the word names is dead */
            if (swap_word(c, w, mine))
                return RS_OK;
            continue;
        }
        if (!(w & RS_LOCK_WAITERS)) {
            if (!swap_word(c, w, w | RS_LOCK_WAITERS))
                continue;
            w |= RS_LOCK_WAITERS;
        }
        uint64_t now = rs_now_ns();
        if (now >= deadline)
            return RS_EBUSY;
        uint64_t slice = deadline - now < RS_LOCK_SLICE_NS ? deadline - now : RS_LOCK_SLICE_NS;
        struct timespec timeout = {0, (long)slice};
        if (futex(word, FUTEX_WAIT, w, &timeout) != 0 && errno == ETIMEDOUT && rs_ld(word) == w &&
            take_from_dead(c, w, mine))
            return RS_OK;
    }
}

void rs_unlock(rs_client *c)
{
    rs_a32 *word = &c->v.hdr->lock_word;
    int cancel_state = c->cancel_state; /* the next owner may be a thread of this client */
    if (atomic_exchange_explicit(word, 0, memory_order_release) & RS_LOCK_WAITERS)
        futex(word, FUTEX_WAKE, 1, NULL);
    pthread_setcancelstate(cancel_state, NULL);
}

static void batch_reset(rs_view *v)
{
    v->seq_open = false;
    v->dirty = false;
    v->full = false;
    v->corrupt = false;
    v->ev_pos = rs_ld(&v->hdr->ev_next);
}

static int acquire(rs_client *c, uint32_t held_slot)
{
    uint32_t zero = 0;
    if (atomic_compare_exchange_strong_explicit(&c->v.hdr->lock_word, &zero, c->v.me + 1, memory_order_acquire,
                                                memory_order_relaxed))
        return RS_OK;
    int rc = lock_slow(c, held_slot, c->v.me);
    if (rc == RS_EBUSY)
        rs_count(c, RS_C_LOCK_TIMEOUTS, 1);
    return rc;
}

int rs_lock(rs_client *c, uint32_t held_slot)
{
    rs_view *v = &c->v;
    rs_header_shm *hdr = v->hdr;
    int cancel_state; /* a cancelled thread must not take the lock with it */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    int rc = acquire(c, held_slot);
    if (rc != RS_OK) {
        pthread_setcancelstate(cancel_state, NULL);
        return rc;
    }
    c->cancel_state = cancel_state;
    if (rs_ld(&hdr->journal_len) || (rs_ld(&hdr->seq) & 1) || rs_ld(&hdr->ev_head) != rs_ld(&hdr->ev_next))
        rc = rs_recover_locked(v);
    if (rc != RS_OK) {
        rs_unlock(c);
        return rc;
    }
    batch_reset(v);
    return RS_OK;
}

void rs_unlink_begin_locked(rs_view *v)
{
    if (v->seq_open || RS_PLANTED(EVEN_UNLINK))
        return;
    rs_a64 *seq = &v->hdr->seq;
    rs_raw(seq, rs_ld(seq) | 1);
    atomic_thread_fence(memory_order_release); /* odd before the first unlinking store */
    v->seq_open = true;
    v->dirty = true;
}

uint32_t rs_journal_room(const rs_view *v)
{
    return v->plan.journal_capacity - rs_min(rs_ld(&v->hdr->journal_len), v->plan.journal_capacity);
}

int rs_commit_locked(rs_view *v)
{
    rs_header_shm *hdr = v->hdr;
    if (v->corrupt) {
        int rc = rs_recover_locked(v);
        batch_reset(v);
        return rc == RS_OK ? RS_ECORRUPT : rc;
    }
    if (v->dirty)
        rs_add32(v, &hdr->clock, 1);
    if (v->ev_pos != rs_ld(&hdr->ev_next))
        rs_set64(v, &hdr->ev_next, v->ev_pos);
    if (v->corrupt) /* those two may have filled the journal */
        return rs_commit_locked(v);
    if (RS_PLANTED(EARLY_EVENTS))
        rs_raw(&hdr->ev_head, v->ev_pos);
    atomic_store_explicit(&hdr->journal_len, 0, memory_order_release);
    if (v->seq_open)
        atomic_store_explicit(&hdr->seq, rs_ld(&hdr->seq) + 1, memory_order_release);
    if (rs_ld(&hdr->ev_head) != v->ev_pos)
        atomic_store_explicit(&hdr->ev_head, v->ev_pos, memory_order_release);
    batch_reset(v);
    return RS_OK;
}

static bool entry_ok(const rs_view *v, uint32_t i)
{
    uint64_t where = rs_ld(&v->journal[i].where), offset = where >> 4, size = where & 15;
    if ((size != 1 && size != 2 && size != 4 && size != 8) || offset % size != 0)
        return false;
    return offset >= offsetof(rs_header_shm, seq) && offset + size <= v->plan.region_bytes;
}

static void restore(rs_view *v, uint32_t i)
{
    uint64_t where = rs_ld(&v->journal[i].where), old = rs_ld(&v->journal[i].old);
    void *p = v->base + (where >> 4);
    switch (where & 15) {
    case 1: rs_raw((rs_a8 *)p, (uint8_t)old); break;
    case 2: rs_raw((rs_a16 *)p, (uint16_t)old); break;
    case 4: rs_raw((rs_a32 *)p, (uint32_t)old); break;
    default: rs_raw((rs_a64 *)p, old); break;
    }
}

int rs_recover_locked(rs_view *v)
{
    rs_header_shm *hdr = v->hdr;
    uint32_t n = rs_ld_acq(&hdr->journal_len);
    if (n > v->plan.journal_capacity)
        return RS_ECORRUPT;
    for (uint32_t i = 0; i < n; i++)
        if (!entry_ok(v, i))
            return RS_ECORRUPT;
    if (!RS_PLANTED(QUIET_ROLLBACK))
        rs_raw(&hdr->seq, rs_ld(&hdr->seq) | 1);
    atomic_thread_fence(memory_order_release);
    if (RS_PLANTED(CLEAR_FIRST))
        rs_raw(&hdr->journal_len, 0);
    /* Last to first; killed here, the next recovery does it all again with the same result, since
     * the length and the entries are untouched until the end. */
    for (uint32_t i = n; i-- > 0;)
        restore(v, RS_PLANTED(FORWARD_ROLLBACK) ? n - 1 - i : i);
    atomic_store_explicit(&hdr->journal_len, 0, memory_order_release);
    if (!RS_PLANTED(QUIET_ROLLBACK))
        atomic_store_explicit(&hdr->seq, (rs_ld(&hdr->seq) | 1) + 1, memory_order_release);
    atomic_store_explicit(&hdr->ev_head, rs_ld(&hdr->ev_next), memory_order_release);
    rs_raw(&hdr->recoveries, rs_ld(&hdr->recoveries) + 1);
    return RS_OK;
}
