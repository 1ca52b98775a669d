/* test_crash.c - a verb killed at any instruction: enumerated, not sampled.
 *
 * A child runs one verb under ptrace, instruction by instruction.  At each stop the region is looked
 * at as it would stand if the child had died there:
 *
 *   between batches (empty journal)   it equals the last committed state, exempt fields apart
 *   within a batch                    a copy, recovered, equals the last committed state likewise
 *   always                            the recovered copy keeps I1..I12
 *
 * and as readers see it, who take no lock:
 *
 *   a block that matches has its hash already (tree.c, R1); nothing is unlinked or rolled back under an
 *   even, unmoved sequence (R2); no event is readable before its batch is committed
 *
 * A commit is where the journal's length goes to 0; the state there is the next one to compare with.
 * So each batch is proved to be there wholly or not at all, and to be undone byte by byte.
 *
 * Recovery itself is proved the same way: a victim is killed just before the commit of each batch of
 * each verb, when the journal is longest, and a newcomer attaches under ptrace; its attach takes the
 * lock over and recovers, and at each instruction of that a copy recovers to the same state.
 */
#include "crash_verbs.h"
#include "image.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_BATCHES = 64 };

/* -- the child ---------------------------------------------------------------------------------------- */

static void child(int fd, const verb *v)
{
    scene s = {.fd = fd};
    make_path(s.path, LONG, 1);
    make_path(s.branch, LONG, 2);
    if (v->prepare) {
        s.c = attach(fd);
        s.other = attach(fd);
        v->prepare(&s);
    }
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        FAIL("ptrace: %s", strerror(errno));
    raise(SIGSTOP);
    v->run(&s);
    raise(SIGSTOP);
    _exit(0);
}

static pid_t start(int fd, const verb *v)
{
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        child(fd, v);
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    if (!WIFSTOPPED(status))
        FAIL("%s: preparation failed", v->name);
    return pid;
}

/* One instruction; false when the verb is over. */
static bool step(pid_t pid, const verb *v)
{
    int status;
    CHECK(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0 && waitpid(pid, &status, 0) == pid);
    if (!WIFSTOPPED(status))
        FAIL("%s: ended early, status %#x", v->name, status);
    if (WSTOPSIG(status) == SIGSTOP)
        return false;
    if (WSTOPSIG(status) != SIGTRAP)
        FAIL("%s: signal %d", v->name, WSTOPSIG(status));
    return true;
}

static void end(pid_t pid)
{
    int status;
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid);
}

/* -- the observer --------------------------------------------------------------------------------------- */

static uint32_t journal_len(const uint8_t *region) { return rs_ld(&((const rs_header_shm *)region)->journal_len); }

typedef struct observer {
    int fd;
    uint8_t *region;             /* the live mapping */
    image seen, previous;        /* as of the last change, and of the one before */
    image base;                  /* last committed state */
    image copy;
    uint8_t *exempt;             /* bytes that a batch on `base` may leave changed */
    uint64_t num_steps, num_states;
    uint32_t num_batches;
    uint64_t before_commit[MAX_BATCHES];     /* number of the state just before each commit */
} observer;

static void observe(observer *o, int fd)
{
    rs_info info;
    CHECK_OK(rs_region_peek(fd, &info));
    *o = (observer){.fd = fd};
    o->region = mmap(NULL, info.region_bytes, PROT_READ, MAP_SHARED, fd, 0);
    CHECK(o->region != MAP_FAILED);
    o->seen = image_new(info.region_bytes);
    o->base = image_new(info.region_bytes);
    o->copy = image_new(info.region_bytes);
    o->previous = image_new(info.region_bytes);
    o->exempt = image_new(info.region_bytes).bytes;
}

/* Start from the state as it stands; an unfinished batch belongs to a victim. */
static void settle(observer *o, const verb *v)
{
    image_take(&o->seen, o->region);
    image_copy(&o->base, &o->seen);
    image_recover_and_check(&o->base, v->name);
    image_exempt(&o->base, o->exempt);
}

static void observer_free(observer *o)
{
    munmap(o->region, o->seen.num_bytes);
    image_free(&o->seen);
    image_free(&o->base);
    image_free(&o->copy);
    image_free(&o->previous);
    free(o->exempt);
    close(o->fd);
}

#define STEP(v, o) v->name, (unsigned long long)(o)->num_steps

static void expect_base(observer *o, const image *im, const verb *v, const char *what)
{
    int64_t at = image_difference(&o->base, im, o->exempt);
    if (at >= 0)
        FAIL("%s, step %llu, %s: %s differs from the last commit", STEP(v, o), what,
             image_field(&o->base, (uint64_t)at));
}

/* Was something that readers may have matched in `before` taken away in `now`? */
static bool unlinked(const rs_view *before, const rs_view *now)
{
    for (rs_slot s = 0; s < FULL; s++) {
        rs_slot parent = rs_ld(&before->node[s].parent);
        if (parent == RS_NONE)
            continue;
        if (parent != rs_ld(&now->node[s].parent))
            return true;
        for (int k = RS_SWA; k < RS_NUM_COMPONENTS; k++) {
            rs_slot side = rs_ld(&before->side[k].slot[s]);
            if (side != RS_NONE && side != rs_ld(&now->side[k].slot[s]))
                return true;
        }
    }
    return false;
}

/* `before` and `now` are one store apart. */
static void expect_fair_to_readers(observer *o, const image *before, const image *now, const verb *v)
{
    uint64_t seq = rs_ld(&before->v.hdr->seq);
    if (unlinked(&before->v, &now->v) && !(seq & 1))
        FAIL("%s, step %llu: unlinked under an even sequence", STEP(v, o));
    if (rs_ld(&now->v.hdr->seq) < seq)
        FAIL("%s, step %llu: the sequence went back", STEP(v, o));
    for (rs_slot s = 0; s < FULL; s++)
        if (rs_ld(&before->v.node[s].parent) != RS_NONE && rs_ld(&now->v.node[s].parent) != RS_NONE &&
            rs_ld(&before->v.node[s].hash) != rs_ld(&now->v.node[s].hash))
            FAIL("%s, step %llu: slot %u matched before it had its hash", STEP(v, o), s);
    if (rs_ld(&now->v.hdr->ev_head) > rs_ld(&now->v.hdr->ev_next) ||
        (journal_len(now->bytes) && rs_ld(&now->v.hdr->ev_head) != rs_ld(&o->base.v.hdr->ev_head)))
        FAIL("%s, step %llu: events are readable before the commit", STEP(v, o));
}

/* The region changed: look at it as a survivor would. */
static void examine(observer *o, const verb *v, bool recovering)
{
    uint32_t before = journal_len(o->seen.bytes);
    image_copy(&o->previous, &o->seen);
    image_take(&o->seen, o->region);
    expect_fair_to_readers(o, &o->previous, &o->seen, v);
    image_copy(&o->copy, &o->seen);
    bool committed = before != 0 && journal_len(o->seen.bytes) == 0;
    image_recover_and_check(&o->copy, v->name);
    if (unlinked(&o->seen.v, &o->copy.v) && rs_ld(&o->copy.v.hdr->seq) <= rs_ld(&o->seen.v.hdr->seq))
        FAIL("%s, step %llu: rolled back under the same sequence", STEP(v, o));
    CHECK(!(rs_ld(&o->copy.v.hdr->seq) & 1));
    o->num_states++;
    if (!committed || recovering) {
        expect_base(o, &o->copy, v, journal_len(o->seen.bytes) ? "rolled back" : "between batches");
        return;
    }
    CHECK(o->num_batches < MAX_BATCHES);
    o->before_commit[o->num_batches++] = o->num_states - 1;
    image_copy(&o->base, &o->copy);
    image_exempt(&o->base, o->exempt);
}

/* Step through the verb, or up to state number `until`. */
static void walk(observer *o, pid_t pid, const verb *v, uint64_t until)
{
    bool victim = journal_len(o->region) != 0;
    while (o->num_states < until && step(pid, v)) {
        o->num_steps++;
        if (image_equals_region(&o->seen, o->region))
            continue;
        examine(o, v, victim);
        victim = victim && journal_len(o->region) != 0;
    }
}

static int scene_region(void)
{
    rs_config cfg = small_config(FULL, SWA, WINDOW, MAMBA);
    return make_region(&cfg);
}

static void step_verb(const verb *v, observer *o)
{
    observe(o, scene_region());
    pid_t pid = start(o->fd, v);
    settle(o, v);
    walk(o, pid, v, UINT64_MAX);
    end(pid);
    check_fd(o->fd);
    observer_free(o);
}

TEST(crash_every_verb_at_every_instruction)
{
    uint64_t num_steps = 0, num_states = 0, num_batches = 0;
    for (unsigned i = 0; i < num_crash_verbs; i++) {
        observer o;
        step_verb(&crash_verbs[i], &o);
        printf("     %-28s %7llu instructions, %5llu states, %2u batches\n", crash_verbs[i].name,
               (unsigned long long)o.num_steps, (unsigned long long)o.num_states, o.num_batches);
        CHECK(o.num_steps > 100);
        num_steps += o.num_steps;
        num_states += o.num_states;
        num_batches += o.num_batches;
    }
    printf("     total: killed at %llu instructions, %llu states of the region, %llu batches\n",
           (unsigned long long)num_steps, (unsigned long long)num_states, (unsigned long long)num_batches);
    CHECK(num_batches >= num_crash_verbs - 2);
}

static void prepare_survivor(scene *s) { CHECK_OK(rs_detach(s->other)); } /* leaves room for the victim's two */

/* A stepped verb is slow: its deadline for the lock may pass before it has found the owner dead. */
#define PATIENTLY(call)                                                                           \
    do {                                                                                          \
        int rc;                                                                                   \
        while ((rc = (call)) == RS_EBUSY)                                                         \
            ;                                                                                     \
        CHECK_OK(rc);                                                                             \
    } while (0)

static void run_survivor_set_device(scene *s) { PATIENTLY(rs_set_device(s->c)); }
static void run_survivor_attach(scene *s) { PATIENTLY(rs_attach(s->fd, "survivor", &s->c)); }

static void run_survivor_reap(scene *s)
{
    rs_reap_result result;
    PATIENTLY(rs_reap(s->c, &result));
}

/* Whoever takes the lock next recovers first: the shortest verb, a reap, an attach. */
static const verb survivors[] = {
    {"recovery", prepare_survivor, run_survivor_set_device},
    {"recovery and reap", prepare_survivor, run_survivor_reap},
    {"recovery and attach", NULL, run_survivor_attach},
};

/* Kill the verb in the given state, then step a survivor through the recovery. */
static uint64_t step_recovery(const verb *v, uint64_t state, const verb *survivor, uint64_t *num_states)
{
    observer o;
    observe(&o, scene_region());
    pid_t pid = survivor->prepare ? start(o.fd, survivor) : 0; /* attached before the victim is killed */
    pid_t victim = start(o.fd, v);
    settle(&o, v);
    walk(&o, victim, v, state);
    uint32_t len = journal_len(o.region);
    end(victim);
    CHECK(len != 0);
    pid = pid ? pid : start(o.fd, survivor);
    o.num_steps = o.num_states = 0;
    settle(&o, survivor);
    walk(&o, pid, survivor, UINT64_MAX);
    end(pid);
    check_fd(o.fd);
    CHECK(rs_ld(&((rs_header_shm *)o.region)->recoveries) > 0);
    *num_states += o.num_states;
    uint64_t num_steps = o.num_steps;
    observer_free(&o);
    return num_steps;
}

TEST(crash_recovery_at_every_instruction)
{
    uint64_t num_steps = 0, num_states = 0, num_recoveries = 0;
    for (unsigned i = 0; i < num_crash_verbs; i++) {
        observer o;
        step_verb(&crash_verbs[i], &o);
        for (uint32_t b = 0; b < o.num_batches; b++) {
            const verb *survivor = &survivors[num_recoveries % 8 < 2 ? num_recoveries % 8 + 1 : 0];
            num_steps += step_recovery(&crash_verbs[i], o.before_commit[b], survivor, &num_states);
            num_recoveries++;
        }
    }
    printf("     %llu recoveries killed at %llu instructions, %llu states of the region\n",
           (unsigned long long)num_recoveries, (unsigned long long)num_steps, (unsigned long long)num_states);
    CHECK(num_recoveries > num_crash_verbs);
}
