/* Copies many runs of bytes inside this process, without the GIL. See device/copyruns.py, which has the kernel copy them
 * where this was not compiled.
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
 * A payload can be hashed while it is copied. Where all its runs are whole blocks of the hash function, the words that
 * are copied are hashed on the way, while the copy waits for memory; that needs AVX-512. Other payloads are read again,
 * from the cache: that takes no second trip to memory, but nothing is copied meanwhile.
 */
#include "_native.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
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

/* XXH3's 128 bits of whole blocks, with its default secret and no seed, as doc/xxhash_spec.md has it in
 * https://github.com/Cyan4973/xxHash. With the vectors of AVX2 it gained nothing.
 */
#define STRIPE 64
#define STRIPES 16
#define BLOCK (STRIPE * STRIPES)
/* Of the run behind the one that is copied, the first bytes are asked for: the processor's own prefetching ends with
 * the page, and most rows are in another page than the row before. On an AMD EPYC 9004, 256 to 512 bytes do, which
 * arrive while a row of 4 KiB is copied. To ask for more, or to ask within a run, too, was slower.
 */
#define ASKED_BYTES 512
#define LINE 64
#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87U
#define PRIME64_2 0xC2B2AE3D27D4EB4FU
#define PRIME64_3 0x165667B19E3779F9U
#define PRIME64_4 0x85EBCA77C2B2AE63U
#define PRIME64_5 0x27D4EB2F165667C5U

static const uint64_t secret_words[24] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};
#define SECRET(at) ((const unsigned char *)secret_words + (at))
static const uint64_t first_accumulators[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

/* Of stripe `k` of a block; `end`: the payload's last block, whose last stripe has another key. */
#define KEY(k, end) SECRET((end) && (k) == STRIPES - 1 ? 121 : 8 * (k))

/* Copies blocks, `n` bytes, and adds them to the accumulators. `last`: they end the payload. */
__attribute__((target("avx512f"))) static void copy_blocks(uint64_t *accumulators, unsigned char *d,
                                                           const unsigned char *s, uint64_t n, int last)
{
    __m512i a = _mm512_loadu_si512(accumulators), prime = _mm512_set1_epi64(PRIME32_1);
    for (const unsigned char *behind = s + n; s < behind; s += BLOCK, d += BLOCK) {
        int end = last && s + BLOCK == behind;
        for (int k = 0; k < STRIPES; k++) {
            __m512i x = _mm512_loadu_si512(s + k * STRIPE);
            _mm512_stream_si512((__m512i *)(d + k * STRIPE), x);
            __m512i keyed = _mm512_xor_si512(x, _mm512_loadu_si512(KEY(k, end)));
            __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
            a = _mm512_add_epi64(product, _mm512_add_epi64(a, _mm512_shuffle_epi32(x, _MM_PERM_BADC)));
        }
        if (end)
            break;
        a = _mm512_xor_si512(_mm512_xor_si512(a, _mm512_srli_epi64(a, 47)), _mm512_loadu_si512(SECRET(128)));
        __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(a, 32), prime), 32);
        a = _mm512_add_epi64(_mm512_mul_epu32(a, prime), high);
    }
    _mm512_storeu_si512(accumulators, a);
}

static uint64_t merge(const uint64_t *accumulators, const unsigned char *key, uint64_t found)
{
    for (int i = 0; i < 8; i += 2) {
        uint64_t keys[2];
        memcpy(keys, key + 8 * i, sizeof keys);
        unsigned __int128 product =
            (unsigned __int128)(accumulators[i] ^ keys[0]) * (accumulators[i + 1] ^ keys[1]);
        found += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    found = (found ^ found >> 37) * 0x165667919E3779F9U;
    return found ^ found >> 32;
}

/* Copies the runs of one payload and writes its hash, if all of them are whole blocks that are to be streamed, and the
 * processor can; else it does nothing and returns 0. `more`: a run follows them.
 */
static int copy_as_blocks(const uint64_t *src, const uint64_t *dst, const uint64_t *size, uint64_t count, int more,
                          uint64_t *digest)
{
    uint64_t accumulators[8], bytes = 0, others = count == 0;
    for (uint64_t i = 0; i < count; i++)
        others |= dst[i] % STRIPE | size[i] % BLOCK | (size[i] < STREAMED_BYTES_MIN);
    if (others || !__builtin_cpu_supports("avx512f"))
        return 0;
    memcpy(accumulators, first_accumulators, sizeof accumulators);
    for (uint64_t i = 0; i < count; bytes += size[i++]) {
        int last = i + 1 == count;
        const char *ahead = (const char *)(uintptr_t)src[last && !more ? i : i + 1];
        for (uint64_t o = 0; o < ASKED_BYTES; o += LINE)
            _mm_prefetch(ahead + o, _MM_HINT_T0); /* no access: it does nothing where a page is gone */
        copy_blocks(accumulators, (unsigned char *)(uintptr_t)dst[i], (const unsigned char *)(uintptr_t)src[i], size[i],
                    last);
    }
    digest[0] = merge(accumulators, SECRET(117), ~(bytes * PRIME64_2));
    digest[1] = merge(accumulators, SECRET(11), bytes * PRIME64_1);
    return 1;
}
#else
static int copy_as_blocks(const uint64_t *src, const uint64_t *dst, const uint64_t *size, uint64_t count, int more,
                          uint64_t *digest)
{
    (void)src, (void)dst, (void)size, (void)count, (void)more, (void)digest;
    return 0;
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
static uint64_t copy_all(const uint64_t *src, const uint64_t *dst, const uint64_t *size, uint64_t count)
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
 * to two words of `digests`, high half first. For each, `copy_all` holds. Returns how many payloads were copied:
 * less than `payloads` if a page of the next one is gone, and UINT64_MAX if there is no memory for the hash's state.
 */
static uint64_t copy_and_hash(const uint64_t *src, const uint64_t *dst, const uint64_t *size, const uint64_t *count,
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
            int more = i + 1 < payloads && count[i + 1] > 0;
            if (copy_as_blocks(src + run, dst + run, size + run, count[i], more, digests + 2 * i)) {
                run += count[i];
                continue;
            }
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
static void read_all(const uint64_t *address, uint64_t *value, unsigned char *gone, uint64_t count)
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

/* copy_runs(src, dst, size): addresses and bytes of runs, u64 each. Returns how many were copied; see `copy_all`. */
static PyObject *copy_runs(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer src = {0}, dst = {0}, size = {0};
    uint64_t copied = 0;
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "copy_runs(src, dst, size)");
        return NULL;
    }
    if (take_buffer(args[0], &src, -1, PyBUF_SIMPLE) == 0 && take_buffer(args[1], &dst, src.len, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[2], &size, src.len, PyBUF_SIMPLE) == 0) {
        PyThreadState *state = PyEval_SaveThread();
        copied = copy_all(src.buf, dst.buf, size.buf, (uint64_t)src.len / sizeof(uint64_t));
        PyEval_RestoreThread(state);
    }
    release_buffer(&src);
    release_buffer(&dst);
    release_buffer(&size);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(copied);
}

/* copy_payloads(hash, src, dst, size, counts, digests): `hash`: the addresses of the functions of `Hash`; runs as for
 * copy_runs; how many of them each payload has, which add up to all; two words of digest for each. Returns how many
 * payloads were copied; see `copy_and_hash`.
 */
static PyObject *copy_payloads(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer hash = {0}, src = {0}, dst = {0}, size = {0}, counts = {0}, digests = {0};
    uint64_t copied = 0;
    (void)module;
    if (given != 6) {
        PyErr_SetString(PyExc_TypeError, "copy_payloads(hash, src, dst, size, counts, digests)");
        return NULL;
    }
    if (take_buffer(args[0], &hash, sizeof(Hash), PyBUF_SIMPLE) == 0 &&
        take_buffer(args[1], &src, -1, PyBUF_SIMPLE) == 0 && take_buffer(args[2], &dst, src.len, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[3], &size, src.len, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[4], &counts, -1, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[5], &digests, 2 * counts.len, PyBUF_WRITABLE) == 0) {
        PyThreadState *state = PyEval_SaveThread();
        copied = copy_and_hash(src.buf, dst.buf, size.buf, counts.buf, (uint64_t)counts.len / sizeof(uint64_t),
                               digests.buf, hash.buf);
        PyEval_RestoreThread(state);
        if (copied == UINT64_MAX)
            PyErr_SetString(PyExc_MemoryError, "no memory for the state of a hash");
    }
    Py_buffer *buffers[] = {&hash, &src, &dst, &size, &counts, &digests};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        release_buffer(buffers[i]);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(copied);
}

/* read_words(addresses, values, gone): see `read_all`. */
static PyObject *read_words(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer addresses = {0}, values = {0}, gone = {0};
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "read_words(addresses, values, gone)");
        return NULL;
    }
    if (take_buffer(args[0], &addresses, -1, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[1], &values, addresses.len, PyBUF_WRITABLE) == 0 &&
        take_buffer(args[2], &gone, addresses.len / (Py_ssize_t)sizeof(uint64_t), PyBUF_WRITABLE) == 0) {
        PyThreadState *state = PyEval_SaveThread();
        read_all(addresses.buf, values.buf, gone.buf, (uint64_t)addresses.len / sizeof(uint64_t));
        PyEval_RestoreThread(state);
    }
    release_buffer(&addresses);
    release_buffer(&values);
    release_buffer(&gone);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef kvo_copyruns[] = {
    KVO_METHOD("copy_runs", copy_runs),
    KVO_METHOD("copy_payloads", copy_payloads),
    KVO_METHOD("read_words", read_words),
    {NULL, NULL, 0, NULL},
};
