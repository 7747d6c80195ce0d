/* Copies many runs of bytes inside this process. Called through ctypes, without the GIL; see copyruns.py.
 *
 * Memory that peers share may be gone at any moment: a page was punched out, the file was cut off, or the kernel has
 * none to give where nobody wrote yet. Touching it is a SIGBUS, which ends the copy here and not the process. All that
 * reads or writes such memory is therefore in this file.
 *
 * Runs of a page and more bypass the cache: a plain copy first reads each destination line that it then overwrites, and
 * pushes the engine's working set out of the cache on the way. They are written one line after the other. Several pages
 * by turns need more write-combining buffers than some processors have: on an AMD EPYC 7003 four pages at once reached
 * half the speed of memcpy, one reaches 1.4 times it.
 *
 * A payload can be hashed while it is copied: its source is read again, from the cache, so it takes no second trip to
 * memory. On the same processor two threads that hash so copy at 0.8 to 1.0 of the speed of two that do not.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVO_STREAMING 1
#include <immintrin.h>
#endif

#define STREAMED_BYTES_MIN 4096
#define HASHED_BYTES 16384 /* copied, then hashed: half of a processor's first cache */
#define VECTOR 32
#define LINES (4 * VECTOR) /* two cache lines */

#ifdef KVO_STREAMING
/* `d` is 32-byte aligned, and `n` a multiple of LINES. */
__attribute__((target("avx2"))) static void stream_lines(unsigned char *d, const unsigned char *s, uint64_t n)
{
    for (uint64_t at = 0; at < n; at += LINES)
        for (uint64_t o = at; o < at + LINES; o += VECTOR)
            _mm256_stream_si256((__m256i *)(d + o), _mm256_loadu_si256((const __m256i *)(s + o)));
}

static void copy_streamed(unsigned char *d, const unsigned char *s, uint64_t n)
{
    uint64_t head = -(uintptr_t)d & (VECTOR - 1); /* streaming stores need an aligned destination */
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    uint64_t streamed = n - n % LINES;
    stream_lines(d, s, streamed);
    memcpy(d + streamed, s + streamed, n - streamed);
}
#endif

/* `streaming`: whether the processor can. */
static inline void copy_run(unsigned char *d, const unsigned char *s, uint64_t n, int streaming)
{
#ifdef KVO_STREAMING
    if (streaming && n >= STREAMED_BYTES_MIN) {
        copy_streamed(d, s, n);
        return;
    }
#else
    (void)streaming;
#endif
    memcpy(d, s, n);
}

static int can_stream(void)
{
#ifdef KVO_STREAMING
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}

/* Whoever is told of the end in another thread must see the streamed bytes. */
static void end_streaming(void)
{
#ifdef KVO_STREAMING
    _mm_sfence();
#endif
}

/* Where this thread goes on after a bus error; NULL: nowhere, the error is not ours. A signal handler reads it, so it
 * may not be memory that is allocated when a thread first asks for it; glibc has some for libraries that come late.
 */
#ifdef __GLIBC__
#define EARLY __attribute__((tls_model("initial-exec")))
#else
#define EARLY
#endif
static __thread sigjmp_buf *volatile rescue EARLY;
static __thread volatile sig_atomic_t passing_on EARLY;
/* The compiler moves no access over it: what is rescued lies between, and a run counts once it is copied. */
#define KEEP_ORDER() __atomic_signal_fence(__ATOMIC_SEQ_CST)

static struct sigaction before; /* who had the signal before us, faulthandler mostly */
static pthread_mutex_t installing = PTHREAD_MUTEX_INITIALIZER;

/* What happens to a bus error that is not ours: the same as without us. */
static void pass_on(int number, siginfo_t *info, void *context)
{
    int sent = info->si_code <= 0; /* by kill(2), not by an access that would only be repeated */
    if (before.sa_handler == SIG_IGN && !(before.sa_flags & SA_SIGINFO) && sent)
        return;
    if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN || passing_on) {
        /* `passing_on`: the one before us has us as the one before it, and raised the signal again. */
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    passing_on = 1;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else
        before.sa_handler(number);
    passing_on = 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    if (rescue != NULL && info->si_code > 0)
        siglongjmp(*rescue, 1);
    pass_on(number, info, context);
}

/* Before each use, since others install handlers too: a system call, and nothing more if ours is there. */
static void catch_bus_errors(void)
{
    struct sigaction now, ours;
    sigaction(SIGBUS, NULL, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)
        return;
    pthread_mutex_lock(&installing);
    sigaction(SIGBUS, NULL, &now);
    if (!((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error)) {
        before = now;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_bus_error;
        /* SA_NODEFER: the handler is left by a jump, after which the signal must not stay blocked. */
        ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        sigaction(SIGBUS, &ours, NULL);
    }
    pthread_mutex_unlock(&installing);
}

/* Copies size[i] bytes from src[i] to dst[i] for each i < count, in order. A source may not overlap any destination.
 * Returns how many runs were copied: less than count if a page of the next one is gone, some of whose bytes may be.
 */
uint64_t kvo_copy_runs(const uint64_t *src, const uint64_t *dst, const uint64_t *size, uint64_t count)
{
    volatile uint64_t at = 0; /* known behind the jump */
    sigjmp_buf here;
    int streaming = can_stream();
    catch_bus_errors();
    if (sigsetjmp(here, 0) == 0) {
        rescue = &here;
        KEEP_ORDER();
        for (uint64_t i = 0; i < count; KEEP_ORDER(), at = ++i)
            copy_run((unsigned char *)(uintptr_t)dst[i], (const unsigned char *)(uintptr_t)src[i], size[i], streaming);
    }
    rescue = NULL;
    end_streaming();
    return at;
}

/* Functions of xxhash.h, which are stable since xxHash 0.8.0: XXH3_createState, XXH3_freeState, XXH3_128bits_reset,
 * XXH3_128bits_update and XXH3_128bits_digest.
 */
typedef struct {
    uint64_t low, high;
} Digest;
typedef struct {
    void *(*create)(void);
    int (*destroy)(void *state);
    int (*reset)(void *state);
    int (*update)(void *state, const void *data, size_t bytes);
    Digest (*digest)(const void *state);
} Hash;

/* Copies payloads, of which number i consists of the next count[i] runs, in their order, and writes the hash of each
 * to two words of `digests`, high half first. For each, kvo_copy_runs holds. Returns how many payloads were copied:
 * less than `payloads` if a page of the next one is gone, and UINT64_MAX if there is no memory for the hash's state.
 */
uint64_t kvo_copy_payloads(const uint64_t *src, const uint64_t *dst, const uint64_t *size, const uint64_t *count,
                           uint64_t payloads, uint64_t *digests, const Hash *hash)
{
    volatile uint64_t at = 0;
    sigjmp_buf here;
    int streaming = can_stream();
    void *state = hash->create();
    if (state == NULL)
        return UINT64_MAX;
    catch_bus_errors();
    if (sigsetjmp(here, 0) == 0) {
        rescue = &here;
        KEEP_ORDER();
        for (uint64_t i = 0, run = 0; i < payloads; KEEP_ORDER(), at = ++i) {
            hash->reset(state);
            for (uint64_t end = run + count[i]; run < end; run++)
                for (uint64_t o = 0; o < size[run]; o += HASHED_BYTES) {
                    uint64_t n = size[run] - o < HASHED_BYTES ? size[run] - o : HASHED_BYTES;
                    const unsigned char *s = (const unsigned char *)(uintptr_t)src[run] + o;
                    copy_run((unsigned char *)(uintptr_t)dst[run] + o, s, n, streaming);
                    hash->update(state, s, n);
                }
            Digest found = hash->digest(state);
            digests[2 * i] = found.high;
            digests[2 * i + 1] = found.low;
        }
    }
    rescue = NULL;
    end_streaming();
    hash->destroy(state);
    return at;
}

/* Reads the aligned words at address[i] into value[i]; gone[i] is 1 where the page is gone, 0 elsewhere. Whoever sees a
 * word sees all that its writer wrote before it, on every architecture.
 */
void kvo_read_words(const uint64_t *address, uint64_t *value, unsigned char *gone, uint64_t count)
{
    volatile uint64_t at = 0;
    sigjmp_buf here;
    catch_bus_errors();
    if (sigsetjmp(here, 0) != 0) {
        gone[at] = 1;
        at = at + 1;
    }
    rescue = &here;
    KEEP_ORDER();
    for (; at < count; at = at + 1) {
        value[at] = __atomic_load_n((const uint64_t *)(uintptr_t)address[at], __ATOMIC_ACQUIRE);
        gone[at] = 0;
    }
    KEEP_ORDER();
    rescue = NULL;
}

/* Importable, so that packaging tools and `import` find it where they look; it has no Python functions. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copyruns", NULL, 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copyruns(void)
{
    return PyModuleDef_Init(&module);
}
