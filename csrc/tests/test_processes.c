/* test_processes.c - clients in processes of their own: killed, stopped, forked, outlived by workers.
 *
 * RS_KILLS (150) clients are killed at random moments in processes_survive_random_kills.
 */
#include "harness.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { NUM_CLIENTS = 4, NUM_PATHS = 16, PATH = 30, SLOTS = 200, SIDE = 40, WINDOW = 4 };

/* -- small things ------------------------------------------------------------------------------------ */

static void kill_and_wait(pid_t pid)
{
    int status;
    CHECK_EQ(kill(pid, SIGKILL), 0);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status));
}

/* Run f in a child; returns once the child has written its one byte. */
static pid_t spawn(int fd, void (*f)(int fd, int ready), int *ready_fd)
{
    int ends[2];
    char byte;
    CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        f(fd, ends[1]);
        _exit(0);
    }
    close(ends[1]);
    CHECK(pid > 0 && read(ends[0], &byte, 1) == 1);
    if (ready_fd)
        *ready_fd = ends[0];
    else
        close(ends[0]);
    return pid;
}

static void say(int ready) { CHECK_EQ(write(ready, "x", 1), 1); }

static void sleep_for_ever(void)
{
    for (;;)
        pause();
}

static uint32_t reap_until(rs_client *c, uint32_t num_clients)
{
    rs_reap_result r;
    uint32_t num = 0;
    uint64_t deadline = rs_now_ns() + 5000000000ull;
    while (num < num_clients && rs_now_ns() < deadline) {
        CHECK_OK(rs_reap(c, &r));
        num += r.clients;
    }
    return num;
}

/* -- death ---------------------------------------------------------------------------------------------- */

static void hold_things(int fd, int ready)
{
    uint64_t path[10];
    int32_t slots[8];
    rs_client *c = attach(fd);
    make_path(path, 10, 1);
    publish(c, path, 10);
    publish_side(c, RS_SWA, path, 10, WINDOW);
    (void)pin_path(c, path, 10, RS_MASK_FULL | RS_MASK_SWA, 10);
    stage(c, RS_FULL, 5, slots);
    stage(c, RS_SWA, 3, slots);
    say(ready);
    sleep_for_ever();
}

static int small_region(void)
{
    rs_config cfg = small_config(64, 16, WINDOW, 0);
    return make_region(&cfg);
}

TEST(processes_dead_clients_are_reaped)
{
    int fd = small_region();
    rs_client *c = attach(fd);
    rs_reap_result r;
    pid_t pid = spawn(fd, hold_things, NULL);
    CHECK_OK(rs_reap(c, &r));
    CHECK_EQ(r.clients, 0); /* it lives */
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 5);
    kill_and_wait(pid);
    CHECK_OK(rs_reap(c, &r));
    CHECK_EQ(r.clients, 1);
    CHECK_EQ(r.pins, 1);
    CHECK_EQ(r.slots, 8);
    rs_stats stats = stats_of(c);
    CHECK_EQ(stats.pool[RS_FULL].num_staged + stats.pool[RS_SWA].num_staged, 0);
    CHECK_EQ(stats.pool[RS_FULL].num_pins, 0);
    CHECK_EQ(stats.reaped_clients, 1);
    CHECK_EQ(stats.pool[RS_FULL].num_published, 10); /* what was published stays */
    check_region(c);
}

static void hold_on_device(int fd, int ready)
{
    rs_client *c = attach(fd);
    int32_t slots[4];
    uint64_t path[3];
    CHECK_OK(rs_set_device(c));
    make_path(path, 3, 1);
    publish(c, path, 3);
    (void)pin_path(c, path, 3, RS_MASK_FULL, 3);
    stage(c, RS_FULL, 4, slots);
    say(ready);
    sleep_for_ever();
}

TEST(processes_device_slots_are_quarantined)
{
    rs_config cfg = small_config(64, 0, 0, 0);
    cfg.reap_quarantine_ns = 300000000;
    int fd = make_region(&cfg);
    rs_client *c = attach(fd);
    rs_reap_result r;
    kill_and_wait(spawn(fd, hold_on_device, NULL));
    uint64_t began = rs_now_ns();
    CHECK_OK(rs_reap(c, &r));
    CHECK_EQ(r.dying, 1);
    CHECK_EQ(r.pins, 1); /* pins at once */
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 4);
    check_region(c);
    CHECK_EQ(reap_until(c, 1), 1);
    CHECK(rs_now_ns() - began >= 300000000);
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 0);
    check_region(c);
}

/* The client dies, a transfer worker that holds a dup of its lease lives on. */
static void hold_with_worker(int fd, int ready)
{
    rs_client *c = attach(fd);
    int32_t slots[4];
    stage(c, RS_FULL, 4, slots);
    int lease = dup(rs_lease_fd(c));
    CHECK(lease >= 0);
    pid_t worker = fork();
    if (worker == 0) {
        CHECK_EQ(write(ready, &worker, 1), 1);
        worker = getpid();
        CHECK_EQ(write(ready, &worker, sizeof(worker)), sizeof(worker));
        sleep_for_ever();
    }
    sleep_for_ever();
}

TEST(processes_lease_outlives_the_client_in_its_worker)
{
    int fd = small_region(), from_worker;
    rs_client *c = attach(fd);
    rs_reap_result r;
    pid_t worker, pid = spawn(fd, hold_with_worker, &from_worker);
    CHECK_EQ(read(from_worker, &worker, sizeof(worker)), sizeof(worker));
    kill_and_wait(pid);
    CHECK_OK(rs_reap(c, &r));
    CHECK_EQ(r.clients, 0); /* the worker may still write the slots */
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 4);
    CHECK_EQ(kill(worker, SIGKILL), 0);
    CHECK_EQ(reap_until(c, 1), 1);
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 0);
}

/* A forked child that never execs must not keep its parent's client alive. */
static void hold_and_fork(int fd, int ready)
{
    rs_client *c = attach(fd);
    int32_t slots[4];
    uint32_t got, stale, num;
    rs_match_result hit;
    rs_snapshot *s;
    rs_stats stats;
    uint64_t hash = 1;
    stage(c, RS_FULL, 4, slots);
    pid_t child = fork();
    if (child == 0) {
        CHECK_EQ(rs_allocate(c, RS_FULL, 1, slots, &got), RS_EFORKED);
        CHECK_EQ(rs_match(c, &hash, 1, RS_MASK_FULL, 0, &hit, slots, NULL), RS_EFORKED);
        CHECK_EQ(rs_release(c, (rs_pin){0, 1, 1}, &stale), RS_EFORKED);
        CHECK_EQ(rs_recycle(c, RS_FULL, slots, 4, &num), RS_EFORKED);
        CHECK_EQ(rs_evict(c, RS_FULL, 1, RS_REASON_REQUEST, &num), RS_EFORKED);
        CHECK_EQ(rs_reset(c), RS_EFORKED);
        CHECK_EQ(rs_get_stats(c, &stats), RS_EFORKED);
        CHECK_EQ(rs_snapshot_take(c, &s), RS_EFORKED);
        CHECK_OK(rs_detach(c)); /* frees the handle, gives nothing back */
        say(ready);
        child = getpid();
        CHECK_EQ(write(ready, &child, sizeof(child)), sizeof(child));
        sleep_for_ever();
    }
    sleep_for_ever();
}

TEST(processes_forked_children_hold_nothing)
{
    int fd = small_region(), from_child;
    rs_client *c = attach(fd);
    rs_reap_result r;
    pid_t child, pid = spawn(fd, hold_and_fork, &from_child);
    CHECK_EQ(read(from_child, &child, sizeof(child)), sizeof(child));
    CHECK_OK(rs_reap(c, &r));
    CHECK_EQ(r.clients, 0);
    CHECK_EQ(stats_of(c).pool[RS_FULL].num_staged, 4);
    kill_and_wait(pid);
    CHECK_EQ(reap_until(c, 1), 1);
    CHECK_EQ(kill(child, SIGKILL), 0);
    check_region(c);
}

/* -- a lock holder that stops or dies ----------------------------------------------------------------------- */

static void hold_lock(int fd, int ready)
{
    rs_client *c = attach(fd);
    CHECK_OK(rs_lock(c, RS_NONE));
    rs_set32(&c->v, &c->v.num_children[7], 9); /* half a batch */
    say(ready);
    raise(SIGSTOP);
    CHECK_OK(rs_commit_locked(&c->v));
    rs_set32(&c->v, &c->v.num_children[7], 0);
    CHECK_OK(rs_commit_locked(&c->v));
    rs_unlock(c);
    say(ready);
    sleep_for_ever();
}

static void wait_stopped(pid_t pid)
{
    int status;
    CHECK_EQ(waitpid(pid, &status, WUNTRACED), pid);
    CHECK(WIFSTOPPED(status));
}

TEST(processes_stopped_lock_holder_makes_verbs_busy)
{
    int fd = small_region(), from_child;
    rs_client *c = attach(fd);
    uint64_t path[5];
    int32_t slots[8], unused[8];
    rs_match_result hit;
    rs_insert_result result;
    rs_stats stats;
    uint32_t got, stale, done;
    char byte;
    make_path(path, 5, 1);
    publish(c, path, 5);
    rs_pin pin = pin_path(c, path, 5, RS_MASK_FULL, 5);
    stage(c, RS_FULL, 2, slots);
    pid_t pid = spawn(fd, hold_lock, &from_child);
    wait_stopped(pid);
    uint64_t began = rs_now_ns();
    CHECK_EQ(full_hit(c, path, 5), 5); /* readers need no lock */
    CHECK_OK(rs_match(c, path, 5, RS_MASK_FULL, RS_QUERY_LOCK, &hit, slots + 2, NULL));
    CHECK_EQ(hit.status, RS_STATUS_BUSY);
    CHECK_EQ(hit.full_hit, 0);
    CHECK_EQ(rs_allocate(c, RS_FULL, 1, slots + 2, &got), RS_EBUSY);
    CHECK_EQ(got, 0);
    CHECK_OK(rs_insert(c, RS_FULL, path + 3, 2, slots, 2, 0, 0, &result, unused));
    CHECK_EQ(result.error, RS_INSERT_BUSY);
    CHECK_EQ(result.num_inserted + result.num_unused, 0);
    CHECK_EQ(rs_recycle(c, RS_FULL, slots, 2, &done), RS_EBUSY);
    CHECK_EQ(done, 0);
    CHECK_EQ(rs_release(c, pin, &stale), RS_EBUSY);
    CHECK_OK(rs_get_stats(c, &stats));
    CHECK(rs_now_ns() - began < 10 * RS_LOCK_DEADLINE_NS);
    CHECK(stats.lock_timeouts >= 5);
    CHECK_EQ(kill(pid, SIGCONT), 0);
    CHECK_EQ(read(from_child, &byte, 1), 1);
    release(c, pin);
    CHECK_OK(rs_recycle(c, RS_FULL, slots, 2, &done));
    CHECK_EQ(stats_of(c).lock_recoveries, 0);
    check_region(c);
    kill_and_wait(pid);
}

TEST(processes_killed_lock_holder_is_taken_over)
{
    int fd = small_region();
    rs_client *c = attach(fd);
    pid_t pid = spawn(fd, hold_lock, NULL);
    wait_stopped(pid);
    CHECK_EQ(kill(pid, SIGKILL), 0);
    uint64_t began = rs_now_ns();
    int32_t slot;
    stage(c, RS_FULL, 1, &slot);
    CHECK(rs_now_ns() - began < RS_LOCK_DEADLINE_NS);
    CHECK_EQ(stats_of(c).lock_recoveries, 1);
    check_region(c); /* the half batch is gone */
    CHECK_EQ(reap_until(c, 1), 1);
    check_region(c);
}

/* A newcomer that gets the dead lock holder's own table slot. */
TEST(processes_newcomer_inherits_the_lock_word)
{
    rs_config cfg = small_config(64, 0, 0, 0);
    cfg.max_clients = 1;
    int fd = make_region(&cfg);
    pid_t pid = spawn(fd, hold_lock, NULL);
    wait_stopped(pid);
    kill_and_wait(pid);
    rs_client *c = attach(fd);
    CHECK_EQ(rs_client_slot(c), 0);
    check_region(c);
    CHECK_EQ(stats_of(c).lock_recoveries, 1);
    CHECK_OK(rs_detach(c));
    check_fd(fd);
}

TEST(processes_client_table_full)
{
    rs_config cfg = small_config(16, 0, 0, 0);
    int fd = make_region(&cfg);
    rs_client *late, *c[4];
    for (int i = 0; i < 4; i++)
        c[i] = attach(fd);
    CHECK_EQ(rs_attach(fd, "late", &late), RS_ECLIENTS);
    CHECK_OK(rs_detach(c[2]));
    late = attach(fd);
    CHECK_EQ(rs_client_slot(late), 2);
    CHECK(rs_client_incarnation(late) > rs_client_incarnation(c[3]));
}

/* -- random kills ---------------------------------------------------------------------------------------------- */

/* Shared by all processes: the payload of every slot, as the SlotStore would hold it. */
typedef struct payload { rs_a64 word[RS_NUM_COMPONENTS][SLOTS]; rs_a64 num_checked, num_verbs; } payload;

static payload *shared;

static void random_put(rs_client *c, uint64_t *rng, const uint64_t *path, uint32_t n)
{
    int32_t slots[PATH], unused[PATH];
    rs_insert_result result;
    uint32_t got;
    int rc = rs_allocate(c, RS_FULL, n, slots, &got);
    CHECK(rc == RS_OK || rc == RS_EBUSY);
    for (uint32_t i = 0; i < got; i++)
        rs_raw(&shared->word[RS_FULL][slots[i]], path[i]);
    if (random_below(rng, 4) == 0 && got > 1)
        got--; /* leaves a slot staged until detach or death */
    CHECK_OK(rs_insert(c, RS_FULL, path, got, slots, got, 0, 0, &result, unused));
    if (random_below(rng, 3))
        return;
    uint32_t m = rs_min(n, WINDOW);
    rc = rs_allocate(c, RS_SWA, m, slots, &got);
    CHECK(rc == RS_OK || rc == RS_EBUSY);
    for (uint32_t i = 0; i < got; i++)
        rs_raw(&shared->word[RS_SWA][slots[i]], path[n - m + i]);
    if (got == m)
        CHECK_OK(rs_insert(c, RS_SWA, path, n, slots, m, 0, 0, &result, unused));
}

static void random_get(rs_client *c, uint64_t *rng, const uint64_t *path, uint32_t n)
{
    int32_t slots[PATH], swa[WINDOW];
    rs_match_result r;
    uint32_t stale;
    uint32_t mask = random_below(rng, 2) ? RS_MASK_FULL : RS_MASK_FULL | RS_MASK_SWA;
    CHECK_OK(rs_match(c, path, n, mask, RS_QUERY_LOCK, &r, slots, swa));
    for (uint32_t i = 0; i < r.common_hit; i++)
        CHECK(rs_ld(&shared->word[RS_FULL][slots[i]]) == path[i]);
    for (uint32_t i = 0; i < r.num_swa; i++)
        CHECK(rs_ld(&shared->word[RS_SWA][swa[i]]) == path[r.swa_start + i]);
    atomic_fetch_add(&shared->num_checked, r.common_hit);
    if (random_below(rng, 8)) /* else the pin is kept, until death */
        (void)rs_release(c, r.pin, &stale);
}

/* The lock holder may be stopped for a while. */
static rs_client *attach_patiently(int fd)
{
    rs_client *c;
    int rc;
    while ((rc = rs_attach(fd, "random", &c)) == RS_EBUSY)
        ;
    CHECK_OK(rc);
    return c;
}

static void random_client(int fd, int ready)
{
    rs_client *c = attach_patiently(fd);
    uint64_t path[PATH], rng = test_seed ^ rs_client_incarnation(c);
    say(ready);
    for (;;) {
        uint32_t n = 1 + random_below(&rng, PATH), num, what = random_below(&rng, 100);
        rs_reap_result r;
        make_path(path, PATH, 1 + random_below(&rng, NUM_PATHS));
        if (what < 45)
            random_put(c, &rng, path, n);
        else if (what < 90)
            random_get(c, &rng, path, n);
        else if (what < 95)
            (void)rs_evict(c, RS_FULL, 10, RS_REASON_REQUEST, &num);
        else if (what < 98)
            (void)rs_reap(c, &r);
        else if (what == 98)
            (void)rs_reset(c);
        else if (what == 99 && random_below(&rng, 4) == 0) {
            int rc = rs_detach(c); /* BUSY: left to the reapers */
            CHECK(rc == RS_OK || rc == RS_EBUSY);
            c = attach_patiently(fd);
        }
        atomic_fetch_add(&shared->num_verbs, 1);
    }
}

static void wait_a_little(uint64_t *rng)
{
    struct timespec t = {0, 200000 + random_below(rng, 6000000)};
    nanosleep(&t, NULL); /* the moment of the kill is the random variable */
}

/* No client is left: give back what they held, and nothing may be missing. */
static void expect_clean(int fd)
{
    rs_client *c = attach(fd);
    rs_reap_result r;
    CHECK_OK(rs_reap(c, &r));
    rs_stats stats = stats_of(c);
    CHECK_EQ(stats.num_clients, 1);
    for (int k = 0; k < RS_NUM_COMPONENTS; k++) {
        CHECK_EQ(stats.pool[k].num_staged, 0);
        CHECK_EQ(stats.pool[k].num_pins, 0);
        uint64_t removed = 0;
        for (int i = 0; i < RS_NUM_REASONS; i++)
            removed += stats.evicted_blocks[k][i];
        CHECK_EQ(stats.inserted_blocks[k] - removed, stats.pool[k].num_published);
    }
    check_region(c);
    printf("     %llu verbs, %llu blocks read under pins, %llu recoveries, %llu clients reaped\n",
           (unsigned long long)rs_ld(&shared->num_verbs), (unsigned long long)rs_ld(&shared->num_checked),
           (unsigned long long)stats.lock_recoveries, (unsigned long long)stats.reaped_clients);
    CHECK(rs_ld(&shared->num_checked) > 0);
}

TEST(processes_survive_random_kills)
{
    rs_config cfg = small_config(SLOTS, SIDE, WINDOW, 0);
    cfg.max_clients = NUM_CLIENTS + 4;
    cfg.pins_per_client = 32;
    int fd = make_region(&cfg);
    pid_t pid[NUM_CLIENTS];
    uint64_t rng = test_seed, num_kills = test_setting("RS_KILLS", 150);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    for (int i = 0; i < NUM_CLIENTS; i++)
        pid[i] = spawn(fd, random_client, NULL);
    for (uint64_t kills = 0; kills < num_kills; kills++) {
        uint32_t i = random_below(&rng, NUM_CLIENTS), stopped = random_below(&rng, NUM_CLIENTS);
        uint64_t verbs = rs_ld(&shared->num_verbs), began = rs_now_ns();
        if (kills % 4 == 0 && stopped != i)
            CHECK_EQ(kill(pid[stopped], SIGSTOP), 0);
        wait_a_little(&rng);
        kill_and_wait(pid[i]);
        if (stopped != i)
            CHECK_EQ(kill(pid[stopped], SIGCONT), 0);
        pid[i] = spawn(fd, random_client, NULL);
        while (rs_ld(&shared->num_verbs) == verbs) /* somebody gets on */
            CHECK(rs_now_ns() - began < 5000000000ull);
    }
    for (int i = 0; i < NUM_CLIENTS; i++)
        kill_and_wait(pid[i]);
    expect_clean(fd);
}
