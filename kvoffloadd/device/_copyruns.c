/* Copies many runs of bytes inside this process. Called through ctypes, without the GIL; see copyruns.py.
 *
 * Long runs bypass the cache: a plain copy first reads each destination line that it then overwrites, and pushes the
 * engine's working set out of the cache on the way. Four pages at once keep several DRAM rows and hardware
 * prefetchers busy; one stream alone leaves the memory bus half idle. Short runs are better off with memcpy.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVO_STREAMING 1
#include <immintrin.h>
#endif

#define PAGE 4096
#define PAGES 4
#define STREAMED_BYTES_MIN (PAGE * PAGES)
#define LINE_PAIR 128

#ifdef KVO_STREAMING
/* `d` is 32-byte aligned; `groups` times four pages are copied. Prefetching past the source's end can't fault. */
__attribute__((target("avx2"))) static void stream_groups(unsigned char *d, const unsigned char *s, uint64_t groups)
{
    for (; groups; groups--, d += STREAMED_BYTES_MIN, s += STREAMED_BYTES_MIN) {
        for (int o = 0; o < PAGE; o += LINE_PAIR) {
            for (int p = 0; p < PAGES; p++) {
                const unsigned char *from = s + p * PAGE + o;
                unsigned char *to = d + p * PAGE + o;
                _mm_prefetch((const char *)from + 512, _MM_HINT_T0);
                _mm_prefetch((const char *)from + 576, _MM_HINT_T0);
                __m256i a = _mm256_loadu_si256((const __m256i *)from);
                __m256i b = _mm256_loadu_si256((const __m256i *)(from + 32));
                __m256i c = _mm256_loadu_si256((const __m256i *)(from + 64));
                __m256i e = _mm256_loadu_si256((const __m256i *)(from + 96));
                _mm256_stream_si256((__m256i *)to, a);
                _mm256_stream_si256((__m256i *)(to + 32), b);
                _mm256_stream_si256((__m256i *)(to + 64), c);
                _mm256_stream_si256((__m256i *)(to + 96), e);
            }
        }
    }
}

static void copy_long_run(unsigned char *d, const unsigned char *s, uint64_t n)
{
    uint64_t head = -(uintptr_t)d & 31; /* streaming stores need an aligned destination */
    memcpy(d, s, head);
    d += head, s += head, n -= head;
    uint64_t groups = n / STREAMED_BYTES_MIN, streamed = groups * STREAMED_BYTES_MIN;
    stream_groups(d, s, groups);
    memcpy(d + streamed, s + streamed, n - streamed);
}
#endif

/* Copies size[i] bytes from src[i] to dst[i] for each i < count. A source may not overlap any destination. */
void kvo_copy_runs(const uint64_t *src, const uint64_t *dst, const uint64_t *size, uint64_t count)
{
#ifdef KVO_STREAMING
    int streaming = __builtin_cpu_supports("avx2");
#endif
    for (uint64_t i = 0; i < count; i++) {
        const unsigned char *s = (const unsigned char *)(uintptr_t)src[i];
        unsigned char *d = (unsigned char *)(uintptr_t)dst[i];
#ifdef KVO_STREAMING
        if (streaming && size[i] >= STREAMED_BYTES_MIN) {
            copy_long_run(d, s, size[i]);
            continue;
        }
#endif
        memcpy(d, s, size[i]);
    }
#ifdef KVO_STREAMING
    _mm_sfence(); /* whoever is told of the end in another thread must see the streamed bytes */
#endif
}

/* Importable, so that packaging tools and `import` find it where they look; it has no Python functions. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copyruns", NULL, 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copyruns(void)
{
    return PyModuleDef_Init(&module);
}
