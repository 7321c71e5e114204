/* A played machine: facts from a file, and what is to go wrong with it. Shared by the libraries that play vendors'.

   In: the file that MACHINE_VARIABLE names, "key value" lines, read again whenever it changes (replace it by rename).
   Out: `get` for the facts, ENTER for every function of a vendor's library: it fails, hangs or crashes as the file says,
   and with LOST where the file counts fewer GPUs. The includer defines MACHINE_VARIABLE and the codes OK, INVALID,
   UNINITIALIZED and LOST first.

   fail.GPU.FUNCTION CODE[/N]   the call fails with that code (each Nth call only); GPU or FUNCTION may be *
   hang.GPU.FUNCTION SECONDS    the call takes that long first
   crash.GPU.FUNCTION 1         the call ends the process */

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GPUS = 64, MIGS = 16, FACTS = 65536, KEY = 80, VALUE = 200, COUNTERS = 256 };

typedef struct { int gpu, mig; } Handle;
typedef struct { char key[KEY], value[VALUE]; } Fact;

static Handle handles[GPUS][1 + MIGS];
static Fact *facts;
static int facts_count, has_trouble, opened;
static struct stat seen;
static struct { char key[KEY]; unsigned calls; } counters[COUNTERS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int by_key(const void *a, const void *b) { return strcmp(((const Fact *)a)->key, ((const Fact *)b)->key); }

static void load(void) {
    const char *path = getenv(MACHINE_VARIABLE);
    struct stat now;
    if (!path || stat(path, &now)) { facts_count = 0; memset(&seen, 0, sizeof seen); return; }
    if (facts && now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    if (!facts) facts = calloc(FACTS, sizeof(Fact));
    char line[KEY + VALUE + 8];
    facts_count = has_trouble = 0;
    while (facts_count < FACTS && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        char *space = strchr(line, ' ');
        if (line[0] == '#' || line[0] == 0) continue;
        if (space) *space = 0;
        snprintf(facts[facts_count].key, KEY, "%.*s", KEY - 1, line);
        snprintf(facts[facts_count].value, VALUE, "%.*s", VALUE - 1, space ? space + 1 : "");
        has_trouble |= !strncmp(line, "fail.", 5) || !strncmp(line, "hang.", 5) || !strncmp(line, "crash.", 6);
        facts_count++;
    }
    fclose(file);
    qsort(facts, facts_count, sizeof(Fact), by_key);
    seen = now;
}

/* The value of a key, copied out; 0 where there is none. */
__attribute__((format(printf, 2, 3))) static int get(char *value, const char *format, ...) {
    Fact wanted;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(wanted.key, KEY, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&lock);
    Fact *found = facts ? bsearch(&wanted, facts, facts_count, sizeof(Fact), by_key) : NULL;
    if (found) strcpy(value, found->value);
    pthread_mutex_unlock(&lock);
    return found != NULL;
}

static int gpu_text(const Handle *h, const char *name, char *value) {
    return h->mig ? get(value, "gpu.%d.mig.%d.%s", h->gpu, h->mig - 1, name) : get(value, "gpu.%d.%s", h->gpu, name);
}

static int gpu_number(const Handle *h, const char *name, unsigned long long *number) {
    char value[VALUE];
    if (!gpu_text(h, name, value)) return 0;
    *number = strtoull(value, NULL, 0);
    return 1;
}

static unsigned calls_of(const char *key) {
    for (int i = 0; i < COUNTERS; i++) {
        if (!counters[i].key[0]) strcpy(counters[i].key, key);
        if (!strcmp(counters[i].key, key)) return ++counters[i].calls;
    }
    return 1;
}

/* What the file wants to go wrong: a rule for this GPU and function, then for either alone. */
static int trouble(const char *kind, int gpu, const char *function, char *value) {
    char key[KEY];
    snprintf(key, KEY, "%s.%d.%s", kind, gpu, function);
    if (get(value, "%s", key)) return 1;
    snprintf(key, KEY, "%s.%d.*", kind, gpu);
    if (get(value, "%s", key)) return 1;
    snprintf(key, KEY, "%s.*.%s", kind, function);
    return get(value, "%s", key);
}

static void refresh(void) {
    pthread_mutex_lock(&lock);
    load();
    pthread_mutex_unlock(&lock);
}

static int enter(int gpu, const char *function) {
    char value[VALUE], count[VALUE];
    if (!opened) return UNINITIALIZED;
    refresh();
    if (!has_trouble) return gpu >= 0 && (!get(count, "count") || gpu >= atoi(count)) ? LOST : OK;
    if (trouble("crash", gpu, function, value)) abort();
    if (trouble("hang", gpu, function, value)) {
        double seconds = atof(value);
        while (seconds > 0) { usleep(seconds > 0.05 ? 50000 : (useconds_t)(seconds * 1e6)); seconds -= 0.05; }
    }
    if (trouble("fail", gpu, function, value)) {
        char key[KEY];
        char *every = strchr(value, '/');
        snprintf(key, KEY, "%d.%s", gpu, function);
        pthread_mutex_lock(&lock);
        unsigned calls = calls_of(key);
        pthread_mutex_unlock(&lock);
        if (!every || calls % (unsigned)(atoi(every + 1) ? atoi(every + 1) : 1) == 0) return atoi(value);
    }
    if (gpu >= 0 && (!get(count, "count") || gpu >= atoi(count))) return LOST;
    return OK;
}

#define ENTER(h) do { int code = (h) ? enter((h)->gpu, __func__) : INVALID; if (code) return code; } while (0)

static Handle *handle(int gpu, int mig) {
    Handle *h = &handles[gpu][mig];
    h->gpu = gpu;
    h->mig = mig;
    return h;
}
