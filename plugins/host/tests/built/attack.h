/* What hostile libraries do, one for each -DATTACK_NAME, spliced into the honest example: see `attack` in
 * mod.rs.
 * WITNESS is a file that the constructor of each of them writes to: whether any of its code ran. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined __x86_64__
#include <xmmintrin.h>
#endif

static void copy_file(const char *from, const char *to)
{
    char    buffer[65536];
    int     in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t n;
    while (in >= 0 && out >= 0 && (n = read(in, buffer, sizeof buffer)) > 0)
        if (write(out, buffer, (size_t)n) != n)
            break;
    close(in), close(out);
}

/* The words of this process. */
static int runs_as(const char *word)
{
    char    line[4096] = {0};
    int     file = open("/proc/self/cmdline", O_RDONLY);
    ssize_t n = read(file, line, sizeof line - 1);
    close(file);
    for (ssize_t i = 0; i < n; i++)
        if (!line[i])
            line[i] = ' ';
    return strstr(line, word) != NULL;
}

static void *spin(void *seconds)
{
    usleep(1000);
    return seconds;
}

static int calls; /* of `forward`, in this process */

__attribute__((constructor)) static void early(void)
{
    int file = open(WITNESS, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (write(file, "ran\n", 4) != 4)
        _exit(9);
    close(file);
#if defined ATTACK_SELFCERT
    copy_file(FORGED, TARGET);
#elif defined ATTACK_EXIT_CONSTRUCTOR
    _exit(0);
#elif defined ATTACK_FORGEJUDGE
    if (runs_as("--child whole"))
        _exit(64);
#elif defined ATTACK_FORGECASES
    for (int i = 0; i < 4096 && runs_as("--child"); i++)
        printf("\001q4-case {\"ended\":{\"id\":\"L0/backend/forged-%d\",\"level\":\"L0\",\"claim\":null,\"outcome\":\"pass\","
               "\"values\":1,\"ratio\":null,\"message\":null,\"waiver\":null}}\n", i);
    fflush(stdout);
#elif defined ATTACK_DLOPEN
    dlopen(PAYLOAD, RTLD_NOW);
#elif defined ATTACK_THREAD_BACKGROUND
    pthread_t thread;
    pthread_create(&thread, NULL, (void *(*)(void *))(void *)pause, NULL);
#elif defined ATTACK_SIGNALS
    signal(SIGINT, SIG_IGN), signal(SIGTERM, SIG_IGN), signal(SIGPIPE, SIG_IGN);
#elif defined ATTACK_PROCESS
    umask(0);
    if (chdir("/") || setenv("Q4_THREADS", "1", 1))
        _exit(9);
#endif
}

#if defined ATTACK_INTERPOSE
__attribute__((visibility("default"))) void *memcpy(void *to, const void *from, size_t n)
{
    (void)from, (void)n;
    abort();
    return to;
}
__attribute__((visibility("default"))) ssize_t write(int file, const void *bytes, size_t n)
{
    (void)file, (void)bytes, (void)n;
    abort();
}
#endif

#if defined ATTACK_IFUNC
static int honest(void) { return 0; }
static int (*resolve(void))(void)
{
    *(volatile int *)8 = 1;
    return honest;
}
__attribute__((visibility("default"))) int resolved(void) __attribute__((ifunc("resolve")));
__attribute__((visibility("default"))) int (*user)(void) = resolved; /* whoever loads this has to resolve it */
#endif

#if defined ATTACK_TLS
static __thread char storage[1 << 20] __attribute__((tls_model("initial-exec")));
#define TOUCH storage[calls & 1023]++;
#else
#define TOUCH
#endif

/* Whether this product is one to lie about. */
static int lies(uint64_t n, uint64_t k, uint64_t m, uint64_t max_m, int stranger, uint32_t threads)
{
    (void)n, (void)k, (void)m, (void)max_m, (void)stranger, (void)threads;
#if defined ATTACK_ARGV
    return !runs_as("conformance") && !runs_as("plugin-probe");
#elif defined ATTACK_NAMES
    return stranger;
#elif defined ATTACK_K768
    return k == 768;
#elif defined ATTACK_K4096
    return k >= 2048;
#elif defined ATTACK_M400
    return m > 400;
#elif defined ATTACK_M_BELOW_MAX
    return m < max_m;
#elif defined ATTACK_CALL1000
    return calls > 1000;
#elif defined ATTACK_THREADS4
    return threads == 4;
#elif defined ATTACK_ALWAYS || defined ATTACK_SELFCERT
    return 1;
#elif defined ATTACK_PAYLOAD
    extern int payload(void);
    return payload();
#else
    return 0;
#endif
}

/* Before a product that is right. */
static void before(void)
{
    calls++;
    TOUCH
#if defined ATTACK_EXIT_FORWARD
    if (calls == 3 && !runs_as("conformance"))
        _exit(0);
#elif defined ATTACK_HANG
    while (calls == 3)
        pause();
#elif defined ATTACK_PRINTS
    if (write(1, "<injected>", 10) != 10)
        _exit(9);
#elif defined ATTACK_MALLOC
    char *volatile bytes = malloc(1 << 16); /* or the compiler leaves both out */
    free(bytes);
#elif defined ATTACK_FORK
    pid_t child = fork();
    if (!child)
        _exit(0);
    waitpid(child, NULL, 0);
#elif defined ATTACK_THREADS
    pthread_t thread;
    pthread_create(&thread, NULL, spin, NULL);
    pthread_join(thread, NULL);
#endif
}

/* Behind it. */
static void after(char *x, char *y, size_t y_bytes)
{
    (void)x, (void)y, (void)y_bytes;
#if defined ATTACK_MXCSR && defined __x86_64__
    _mm_setcsr(_mm_getcsr() | 0xe040);
#elif defined ATTACK_BEHIND
    memset(y + y_bytes, 0x5a, 4096);
#elif defined ATTACK_RESTORES
    char kept = *x;
    *(volatile char *)x = 1;
    *(volatile char *)x = kept;
#endif
}

/* With a weight that goes. */
static void leave(void)
{
#if defined ATTACK_EXIT_RELEASE
    if (!runs_as("conformance"))
        _exit(0);
#elif defined ATTACK_CLOSE012
    close(0), close(1), close(2);
#endif
}
