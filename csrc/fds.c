/* fds.c - open file descriptions of index files, none of which outlives a fork.
 *
 * A fork duplicates descriptors, and with them the lock ranges (lock.c): a child that knows nothing of
 * them would keep its parent's clients alive, and a dead client's life byte from ever being taken.
 * So every such descriptor is on a list from the moment it exists, and a fork handler closes all of
 * them in the child.
 *
 * Guarantees: opening and listing, and closing and unlisting, are one step for a fork.  A child finds
 * -1 in every rs_fd.  (What starts another program goes by O_CLOEXEC.)
 */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static rs_fd *first;

static void before_fork(void) { pthread_mutex_lock(&mutex); }

static void after_fork_parent(void) { pthread_mutex_unlock(&mutex); }

static void after_fork_child(void)
{
    for (rs_fd *f = first; f; f = f->next) {
        close(f->fd);
        f->fd = -1;
    }
    first = NULL;
    pthread_mutex_unlock(&mutex);
}

static void install_fork_handler(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

static int lock_list(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int cancel_state; /* open and close are points of cancellation */
    pthread_once(&once, install_fork_handler);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
    pthread_mutex_lock(&mutex);
    return cancel_state;
}

static void unlock_list(int cancel_state)
{
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(cancel_state, NULL);
}

int rs_fd_open(rs_fd *f, int like)
{
    /* By descriptor, not by path: the name may meanwhile belong to a new region. */
    char path[48];
    snprintf(path, sizeof path, "/proc/self/fd/%d", like);
    int cancel_state = lock_list(), error = 0;
    f->fd = open(path, O_RDWR | O_CLOEXEC);
    if (f->fd >= 0) {
        f->next = first;
        first = f;
    } else {
        error = errno;
    }
    unlock_list(cancel_state);
    errno = error;
    return error ? -1 : 0;
}

void rs_fd_close(rs_fd *f)
{
    int cancel_state = lock_list();
    for (rs_fd **at = &first; *at; at = &(*at)->next)
        if (*at == f) {
            *at = f->next;
            break;
        }
    if (f->fd >= 0)
        close(f->fd);
    f->fd = -1;
    unlock_list(cancel_state);
}
