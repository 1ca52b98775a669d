/* radixshm.h - public C API of the shared-memory radix index.
 *
 * One index lives in one POSIX shared-memory file.  A process attaches with rs_attach() and then
 * runs every verb directly on the mapping; there is no server on the hot path.  The only callers
 * are radixshmem/_native.py (through cffi, which reads the part of this file between the CDEF
 * markers) and the C tests.
 *
 * Contract shared by all verbs
 *   Requires   a handle from rs_attach(); arrays are valid for the stated lengths.
 *   Returns    RS_OK or a negative RS_E* code; misses and full pools are results, not errors.
 *   Ordering   a verb that returned is visible to every verb that starts later, in any process.
 *   If killed  at any instruction: the next process that takes the lock rolls the unfinished batch
 *              back; what the dead client held (pins, staged slots) is given back by a reaper.
 *   Threads    a handle may be used from several threads at once; rs_detach() must be the last.
 *   Fork       in the child every verb on the parent's handle returns RS_EFORKED.
 * Each function's comment names only what it adds to this.
 */
#ifndef RADIXSHM_H
#define RADIXSHM_H

#include <stdint.h>

/* CDEF-BEGIN */
enum {
    RS_FULL = 0, RS_SWA = 1, RS_MAMBA = 2, RS_NUM_COMPONENTS = 3,
    RS_MASK_FULL = 1, RS_MASK_SWA = 2, RS_MASK_MAMBA = 4,
    RS_LAYOUT_VERSION = 1,       /* of the regions that this build makes and accepts */
    RS_MAX_WINDOW = 1024,        /* blocks a side window may span */
    RS_MAX_CLIENTS = 1024,
    RS_MAX_LEVELS = 8,           /* lists per pool that an eviction policy may use */
    RS_NAME_BYTES = 128, RS_PATH_BYTES = 256, RS_LABEL_BYTES = 48
};

/* Eviction policies (rs_config.evict_policy). */
enum { RS_LRU = 0, RS_LFU = 1, RS_SLRU = 2, RS_FIFO = 3, RS_NUM_POLICIES = 4 };

/* Life of a region (rs_info.state). */
enum { RS_STATE_BUILDING = 1, RS_STATE_READY = 2, RS_STATE_RETIRED = 3 };

/* Life of a client entry (rs_client_info.state). */
enum { RS_CLIENT_FREE = 0, RS_CLIENT_ACTIVE = 1, RS_CLIENT_DYING = 2 };

/* One pool of slots.  num_slots 0: the component does not exist. */
typedef struct rs_pool_config {
    uint32_t num_slots;
    uint32_t window_blocks;      /* FULL: 0; SWA: 1..RS_MAX_WINDOW; MAMBA: 1 */
    uint64_t slot_bytes;         /* bytes the client asked for */
    uint64_t stride;             /* bytes from one slot to the next in the SlotStore; 0: index only */
    uint64_t offset;             /* of slot 0 in the SlotStore */
} rs_pool_config;

/* Everything a region is made from; constant once the region is READY, but for fingerprint, which
 * goes from empty to non-empty once (rs_set_fingerprint). */
typedef struct rs_config {
    rs_pool_config pool[3];
    uint32_t block_size;         /* tokens */
    uint32_t slot_align;
    uint32_t register_chunk_tokens;
    uint32_t evict_policy;
    uint32_t max_clients;        /* 1..RS_MAX_CLIENTS */
    uint32_t pins_per_client;    /* >= 1 */
    uint64_t event_capacity;     /* entries, rounded up to a power of two; 0: no events */
    uint64_t reap_quarantine_ns;
    uint64_t data_bytes;         /* budget the counts were planned from; 0: index only */
    double swa_ratio;
    double mamba_ratio;
    uint8_t epoch[16];           /* random, the same in index and SlotStore */
    char fingerprint[128];       /* RS_NAME_BYTES */
    char data_name[128];         /* SlotStore object; "" : index only */
    char hugepage_path[256];     /* RS_PATH_BYTES; "" : /dev/shm */
} rs_config;

typedef struct rs_info {
    rs_config config;
    uint64_t region_bytes;
    uint64_t generation;         /* resets so far */
    uint32_t layout_version;
    uint32_t state;              /* RS_STATE_* */
} rs_info;

/* Header of the SlotStore file, as rs_store_peek() returns it. */
typedef struct rs_store_info {
    uint64_t total_bytes;        /* header and padding included */
    uint64_t data_offset;        /* of the first pool */
    uint8_t epoch[16];
    uint32_t state;
    uint32_t layout_version;
} rs_store_info;

typedef struct rs_client rs_client;      /* private handle */
typedef struct rs_snapshot rs_snapshot;  /* private copy of an index */

/* A pin: an index into the client's ledger and the nonce that makes the handle single-use. */
typedef struct rs_pin { uint32_t index; uint32_t valid; uint64_t nonce; } rs_pin;

enum {
    RS_QUERY_LOCK = 1,           /* pin what was matched */
    RS_QUERY_NO_META = 2,        /* leave last_access alone */
    RS_QUERY_PROBE = 4           /* a health check: counts as no query, hit or miss */
};
/* rs_match_result.status */
enum { RS_STATUS_OK = 0, RS_STATUS_BUSY = 1, RS_STATUS_PIN_LIMIT = 2 };

typedef struct rs_match_result {
    uint32_t status;
    uint32_t full_hit;           /* blocks FULL can serve */
    uint32_t common_hit;         /* blocks every component of the mask can serve; pinned with LOCK */
    uint32_t swa_start;          /* first block of the SWA window = common_hit - num_swa */
    uint32_t num_swa;            /* slots written to swa_slots */
    int32_t mamba_slot;          /* of block common_hit - 1, or -1 */
    rs_pin pin;
} rs_match_result;

/* rs_insert_result.error */
enum {
    RS_INSERT_OK = 0, RS_INSERT_FULL_PATH_MISSING = 1, RS_INSERT_PREFIX_MISSING = 2,
    RS_INSERT_STALE_GENERATION = 3, RS_INSERT_BUSY = 4
};
enum { RS_INSERT_KEEP_UNUSED = 1 };      /* flags: leave redundant slots staged */

typedef struct rs_insert_result {
    uint32_t error;
    uint32_t num_inserted;
    uint32_t num_unused;         /* slots written to unused, in order */
} rs_insert_result;

enum { RS_EVENT_STORED = 1, RS_EVENT_REMOVED = 2, RS_EVENT_CLEARED = 3 };
enum { RS_REASON_NONE = 0, RS_REASON_CAPACITY = 1, RS_REASON_BACKGROUND = 2,
       RS_REASON_REQUEST = 3, RS_REASON_RESET = 4, RS_NUM_REASONS = 5 };

typedef struct rs_event {
    uint64_t number;             /* position in the stream, from 0 */
    uint64_t hash;
    uint64_t parent_hash;        /* 0 for a first block */
    uint16_t kind, reason, component;
    uint16_t client;             /* table slot of the client whose verb wrote it */
    uint32_t incarnation;        /* low half of that client's incarnation */
    uint32_t has_parent;
} rs_event;

typedef struct rs_pool_stats {
    uint32_t capacity, num_free, num_staged, num_published;
    uint32_t num_listed;         /* leaves (FULL) or window ends (side) in the eviction lists */
    uint32_t num_pins;           /* pins held on blocks of this pool, not distinct blocks */
} rs_pool_stats;

typedef struct rs_stats {
    rs_pool_stats pool[3];
    uint64_t inserted_blocks[3];
    uint64_t evicted_blocks[3][5];       /* by RS_REASON_* */
    uint64_t hit_blocks[3], miss_blocks[3];      /* blocks that queries asked for, per component of the mask */
    uint64_t queries, pins_taken, pins_released;
    uint64_t allocated_slots[3];
    uint64_t allocate_short[3];          /* allocations that came back short or empty */
    uint64_t allocate_busy[3];           /* ... because the lock's deadline passed */
    uint64_t recycled_slots[3];
    uint64_t stale_releases, lock_timeouts, pin_limits, walk_retries, walks_locked;
    uint64_t reaped_clients, reaped_pins, reaped_slots;
    uint64_t lock_recoveries, generation;
    uint64_t event_head, event_capacity;
    uint32_t num_clients;                /* ACTIVE entries */
    uint32_t draining;                   /* a reset's drain is unfinished */
} rs_stats;

typedef struct rs_client_info {
    uint32_t slot, state, device, pid;   /* pid: as the client saw itself, for display only */
    uint64_t incarnation, pid_namespace;
    uint64_t attached_unix_ns, deadline_ns;
    uint32_t num_pins, num_staged[3];
    uint32_t alive, leased;              /* its process; that, or a worker that may write its slots */
    uint64_t queries, hit_blocks, miss_blocks;
    char label[48];
} rs_client_info;

/* A node as rs_snapshot_nodes() lists it. */
typedef struct rs_node {
    uint32_t slot, state, owner, gen;
    int64_t parent;              /* slot; -1 - g: child of root g; INT64_MIN: none */
    uint64_t hash;
    uint32_t num_children, pins, last_access, pinned_path;  /* pinned_path: a pin at or below it */
    int32_t side[3];             /* [RS_SWA], [RS_MAMBA]; -1: none */
    uint32_t side_pins[3], cover[3], is_end[3];
} rs_node;

typedef struct rs_snapshot_summary {
    uint32_t free[3], staged[3], pinned[3], evictable[3];    /* slots; published = pinned + evictable */
    uint32_t num_pins;
} rs_snapshot_summary;

/* -- regions ------------------------------------------------------------------------------- */

/* Bytes of an index file for cfg.  Returns RS_EINVAL when cfg is not plannable. */
int rs_region_bytes(const rs_config *cfg, uint64_t *out);
/* Build an index in the zero-filled file fd (already sized to rs_region_bytes()).  Leaves it BUILDING. */
int rs_region_format(int fd, const rs_config *cfg);
/* Move an index (or SlotStore) file to a later state; READY is stored last of all. */
int rs_region_set_state(int fd, uint32_t state);
int rs_store_set_state(int fd, uint32_t state);
/* Validate an index header through a read-only mapping and copy it.  RS_ECORRUPT; RS_EVERSION, and
 * then of *out only layout_version is set, to the one that the file has. */
int rs_region_peek(int fd, rs_info *out);
/* SlotStore header page.  data_offset is where the first pool begins (a multiple of the page). */
int rs_store_format(int fd, uint64_t total_bytes, uint64_t data_offset, const uint8_t epoch[16]);
int rs_store_peek(int fd, rs_store_info *out);

/* -- attach -------------------------------------------------------------------------------- */

/* Join the READY index open as fd (which stays the caller's) as a client called label.
 * Returns RS_ERETIRED, RS_ENOTREADY, RS_ECORRUPT, RS_EVERSION, RS_ECLIENTS (table full),
 * RS_EBUSY, RS_ENOMEM, RS_ESYS (errno kept).
 * If killed: before the entry is active nothing happened; after, it is reaped like any client. */
int rs_attach(int fd, const char *label, rs_client **out);
/* Give back every pin and staged slot, free the entry and the handle (NULL is fine).  In a forked
 * child it only frees the private handle.  RS_EBUSY: the entry is left to the reapers. */
int rs_detach(rs_client *c);
int rs_client_slot(const rs_client *c);
uint64_t rs_client_incarnation(const rs_client *c);
/* fd whose dup keeps this client's lease alive in a transfer worker; owned by the handle. */
int rs_lease_fd(const rs_client *c);
/* Mark the client as one whose slots a device may write after its death (quarantine on reap). */
int rs_set_device(rs_client *c);
int rs_get_info(rs_client *c, rs_info *out);
/* RS_OK, RS_ERETIRED or RS_ECORRUPT.  Costs one load; callers use it before each verb. */
int rs_alive(const rs_client *c);
/* RS_OK when the file behind the mapping still has its full size, else RS_ECORRUPT. */
int rs_verify_file(const rs_client *c);
/* Stores fingerprint if none is there.  RS_EINVAL when another one is. */
int rs_set_fingerprint(rs_client *c, const char *fingerprint);

/* -- verbs --------------------------------------------------------------------------------- */

/* Longest published prefix of hashes[n].  full_slots[n] receives full_hit slots; swa_slots[window]
 * (NULL when SWA is not in the mask) receives num_swa.  Never blocks without RS_QUERY_LOCK unless
 * the walk keeps failing.  status BUSY or PIN_LIMIT: a zero hit, no pin. */
int rs_match(rs_client *c, const uint64_t *hashes, uint32_t n, uint32_t mask, uint32_t flags,
             rs_match_result *out, int32_t *full_slots, int32_t *swa_slots);
/* Drop a pin.  *stale = 1 when it was no longer held (counted, nothing changed).  RS_EBUSY: retry. */
int rs_release(rs_client *c, rs_pin pin, uint32_t *stale);
/* Stage up to n slots, evicting as needed.  FULL: *got may be short; side pools: n or 0.
 * RS_EBUSY: *got slots are staged (side pools: what could not be given back; recycle it).  RS_ERANGE: n above the pool's size. */
int rs_allocate(rs_client *c, uint32_t component, uint32_t n, int32_t *out, uint32_t *got);
/* Publish staged slots.  FULL: m == n - start, slots[i] holds block start + i.  Side: start == 0,
 * m <= n, right-aligned; slots before the window are redundant.  unused[m] receives the redundant
 * slots in order; without RS_INSERT_KEEP_UNUSED they are already recycled.  RS_EINVAL,
 * RS_ENOTOWNER, RS_EDUPLICATE: nothing changed. */
int rs_insert(rs_client *c, uint32_t component, const uint64_t *hashes, uint32_t n,
              const int32_t *slots, uint32_t m, uint32_t start, uint32_t flags,
              rs_insert_result *out, int32_t *unused);
/* Give staged slots back.  RS_ENOTOWNER, RS_EDUPLICATE: nothing changed.  RS_EBUSY: the first
 * *num_done were recycled, the rest are still staged. */
int rs_recycle(rs_client *c, uint32_t component, const int32_t *slots, uint32_t n, uint32_t *num_done);
/* Forget everything published.  Pinned and staged slots live on until released. */
int rs_reset(rs_client *c);
/* Evict up to n blocks (FULL) or slots (side) for reason; *num_evicted says how many went. */
int rs_evict(rs_client *c, uint32_t component, uint32_t n, uint32_t reason, uint32_t *num_evicted);

/* -- life and death ------------------------------------------------------------------------ */

typedef struct rs_reap_result { uint32_t clients, pins, slots, dying; } rs_reap_result;
/* Give back what dead clients hold.  Bounded batches; RS_EBUSY: some are left for the next call. */
int rs_reap(rs_client *c, rs_reap_result *out);
/* Like rs_reap, but only if nobody did within min_interval_ns. */
int rs_reap_if_due(rs_client *c, uint64_t min_interval_ns, rs_reap_result *out);

/* -- looking inside ------------------------------------------------------------------------ */

int rs_get_stats(rs_client *c, rs_stats *out);
/* Stats and clients through a read-only mapping of fd: works on a dead server's region. */
int rs_peek_stats(int fd, rs_stats *out);
int rs_peek_clients(int fd, rs_client_info *out, uint32_t max, uint32_t *num);
/* Copy out events numbered *cursor and up; *cursor moves past them.  *overflow = 1: some were lost
 * and the cursor was moved to the oldest one left. */
int rs_events(rs_client *c, uint64_t *cursor, rs_event *out, uint32_t max, uint32_t *num, uint32_t *overflow);
uint64_t rs_event_head(const rs_client *c);

/* Copy of the index taken under the lock. */
int rs_snapshot_take(rs_client *c, rs_snapshot **out);
/* Copy through a read-only mapping, unlocked: for a region that nobody uses.  An unfinished batch
 * is rolled back in the copy. */
int rs_snapshot_peek(int fd, rs_snapshot **out);
void rs_snapshot_free(rs_snapshot *s);
/* Prove invariants I1..I12 (layout.h).  Returns the number of violations; the first ones are
 * described, one a line, in report[report_bytes]. */
int rs_snapshot_check(const rs_snapshot *s, char *report, uint32_t report_bytes);
int rs_snapshot_summarize(const rs_snapshot *s, rs_snapshot_summary *out);
/* PUBLISHED and STAGED FULL slots with id >= first, at most max. */
int rs_snapshot_nodes(const rs_snapshot *s, uint32_t first, rs_node *out, uint32_t max, uint32_t *num);

/* -- hashing ------------------------------------------------------------------------------- */

/* Chained XXH64, seed 0: the prefix words (num_prefix little-endian int64) are fed first, then per
 * block of block_size tokens the tokens as little-endian int64; out[i] is the digest so far.
 * num_tokens / block_size full blocks are hashed; a rest is ignored. */
int rs_hash_blocks(const int64_t *tokens, uint64_t num_tokens, uint32_t block_size,
                   const int64_t *prefix, uint64_t num_prefix, uint64_t *out);
uint64_t rs_xxh64(const void *data, uint64_t num_bytes, uint64_t seed);

/* -- errors -------------------------------------------------------------------------------- */

const char *rs_error_name(int code);
const char *rs_error_text(int code);
/* CDEF-END */

/* One list of error codes: name, value, text. */
#define RS_ERRORS(X)                                                                              \
    X(RS_OK, 0, "ok")                                                                             \
    X(RS_EINVAL, -1, "an argument is out of its range")                                           \
    X(RS_EBUSY, -2, "the index lock was not free within its deadline")                            \
    X(RS_ENOMEM, -3, "out of private memory")                                                     \
    X(RS_ESYS, -4, "a system call failed")                                                        \
    X(RS_ECORRUPT, -5, "the region is corrupt")                                                   \
    X(RS_EVERSION, -6, "the region has another layout version or ABI")                            \
    X(RS_ENOTREADY, -7, "the region is still being built")                                        \
    X(RS_ERETIRED, -8, "the region was retired: its server stopped for good or made it anew")     \
    X(RS_ECLIENTS, -9, "the client table is full")                                                \
    X(RS_ENOTOWNER, -10, "slots: a slot is not staged by this client")                                   \
    X(RS_EDUPLICATE, -11, "slots: a slot is named twice")                                                \
    X(RS_ERANGE, -12, "more slots than the pool has")                                             \
    X(RS_EFORKED, -13, "the client belongs to the parent of this forked process")                 \
    X(RS_ENOCOMPONENT, -14, "the region has no pool for this component")                          \
    X(RS_EROOTS, -15, "pins and staged slots from before 127 earlier resets are still held")

enum {
#define RS_ERROR_VALUE(name, value, text) name = value,
    RS_ERRORS(RS_ERROR_VALUE)
#undef RS_ERROR_VALUE
};

#endif
