/* runner.c - the main() of the test program: each test in a fork of its own. */
#include "harness.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TESTS = 256 };

static struct { const char *name; void (*run)(void); } tests[MAX_TESTS];
static int num_tests;

void test_add(const char *name, void (*run)(void))
{
    if (num_tests == MAX_TESTS)
        abort();
    tests[num_tests].name = name;
    tests[num_tests++].run = run;
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool run_forked(int i)
{
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        tests[i].run();
        exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return false;
    if (WIFSIGNALED(status))
        fprintf(stderr, "%s: %s\n", tests[i].name, strsignal(WTERMSIG(status)));
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool wanted(const char *name, char **words, int num_words)
{
    bool chosen = false, any_choice = false;
    for (int i = 0; i < num_words; i++) {
        bool exclude = words[i][0] == '-';
        bool named = strstr(name, words[i] + exclude);
        if (exclude && named)
            return false;
        any_choice = any_choice || !exclude;
        chosen = chosen || (!exclude && named);
    }
    return chosen || !any_choice;
}

/* usage: runner [--no-fork] [part of a name to run | -part of a name to leave out]... */
int main(int argc, char **argv)
{
    int first = 1, num_failed = 0, num_run = 0;
    bool fork_each = argc < 2 || strcmp(argv[1], "--no-fork") != 0;
    first += !fork_each;
    test_seed = test_setting("RS_SEED", 20240607);
    printf("RS_SEED=%llu\n", (unsigned long long)test_seed);
    for (int i = 0; i < num_tests; i++) {
        if (!wanted(tests[i].name, argv + first, argc - first))
            continue;
        double began = seconds();
        bool ok = true;
        if (fork_each)
            ok = run_forked(i);
        else
            tests[i].run();
        num_run++;
        num_failed += !ok;
        printf("%s %s (%.2f s)\n", ok ? "ok  " : "FAIL", tests[i].name, seconds() - began);
        fflush(stdout);
    }
    printf("%d of %d tests failed\n", num_failed, num_run);
    return num_failed != 0 || num_run == 0;
}
