/* Counts the heap bytes of a process. It is preloaded, so that its functions replace the C library's allocator.

   A block counts with its usable size (`malloc_usable_size`), which is a few bytes above the requested size. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static atomic_llong live, peak;
static void *(*real_malloc)(size_t), *(*real_calloc)(size_t, size_t), *(*real_realloc)(void *, size_t);
static void *(*real_aligned)(size_t, size_t), *(*real_memalign)(size_t, size_t);
static int (*real_posix)(void **, size_t, size_t);
static void (*real_free)(void *);

/* dlsym itself may allocate memory before the real functions are known */
static char early[65536];
static size_t early_used;
static int is_early(const void *p) { return (const char *)p >= early && (const char *)p < early + sizeof early; }

static void find(void) {
    static int finding;
    if (finding) return;
    finding = 1;
    real_calloc = dlsym(RTLD_NEXT, "calloc");
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_aligned = dlsym(RTLD_NEXT, "aligned_alloc");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_posix = dlsym(RTLD_NEXT, "posix_memalign");
    real_free = dlsym(RTLD_NEXT, "free");
    finding = 0;
}

static void *take_early(size_t size) {
    size_t at = (early_used + 15) & ~(size_t)15;
    if (at + size > sizeof early) return NULL;
    early_used = at + size;
    return early + at;
}

static void *born(void *p) {
    if (p) {
        long long now = atomic_fetch_add(&live, (long long)malloc_usable_size(p)) + (long long)malloc_usable_size(p);
        long long seen = atomic_load(&peak);
        while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {}
    }
    return p;
}

static void dead(void *p) {
    if (p) atomic_fetch_sub(&live, (long long)malloc_usable_size(p));
}

void *malloc(size_t size) {
    if (!real_malloc) find();
    return real_malloc ? born(real_malloc(size)) : take_early(size);
}
void *calloc(size_t n, size_t size) {
    if (!real_calloc) find();
    return real_calloc ? born(real_calloc(n, size)) : take_early(n * size);
}
void *realloc(void *old, size_t size) {
    if (!real_realloc) find();
    if (is_early(old)) {
        void *fresh = malloc(size);
        if (fresh) memcpy(fresh, old, size);
        return fresh;
    }
    size_t before = old ? malloc_usable_size(old) : 0;
    void *fresh = real_realloc(old, size);
    if (fresh || size == 0) atomic_fetch_sub(&live, (long long)before);
    return born(fresh);
}
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (!real_posix) find();
    int code = real_posix(out, alignment, size);
    if (code == 0) born(*out);
    return code;
}
void *aligned_alloc(size_t alignment, size_t size) {
    if (!real_aligned) find();
    return born(real_aligned(alignment, size));
}
void *memalign(size_t alignment, size_t size) {
    if (!real_memalign) find();
    return born(real_memalign(alignment, size));
}
void free(void *p) {
    if (!p || is_early(p)) return;
    if (!real_free) find();
    dead(p);
    real_free(p);
}

long long remat_heap_live(void) { return atomic_load(&live); }
long long remat_heap_peak(void) { return atomic_load(&peak); }
void remat_heap_restart(void) { atomic_store(&peak, atomic_load(&live)); }
