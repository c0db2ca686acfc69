/* Process 1 of every pod sandbox: holds the pod's namespaces and reaps its orphans. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int number) { exit(number == SIGTERM ? 0 : 1); }
static void reap(int number) { while (waitpid(-1, NULL, WNOHANG) > 0) {} (void)number; }

int main(void) {
    struct sigaction on_end = {.sa_handler = leave};
    struct sigaction on_child = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &on_end, NULL);
    sigaction(SIGTERM, &on_end, NULL);
    sigaction(SIGCHLD, &on_child, NULL);
    for (;;) pause();
}
