/* Copies as they are done, in a stream's thread, with the faults that were asked for. */
#include <string.h>
#include <unistd.h>

#include "internal.h"

static void break_down(const Stream *stream)
{
    pthread_mutex_lock(&driver.lock);
    break_context(stream->context, CUDA_ERROR_ILLEGAL_ADDRESS);
    pthread_mutex_unlock(&driver.lock);
}

/* For ever: its bytes stay in use, and its stream does nothing more. */
static void hang(void)
{
    for (;;)
        pause();
}

/* All streams share one link each way: a copy gets the bytes' time on it, behind those that came before. */
static void link_wait(const Op *op)
{
    uint64_t bytes[DIRECTIONS] = {0}, until = 0;
    if (!settings()->link_bytes_per_s)
        return;
    for (size_t i = 0; i < op->count; i++)
        bytes[op->copies[i].direction] += op->copies[i].size;
    pthread_mutex_lock(&driver.lock);
    uint64_t now = now_ns();
    for (Direction d = TO_DEVICE; d <= TO_HOST; d++) {
        if (!bytes[d])
            continue;
        if (driver.link_free_ns[d] < now)
            driver.link_free_ns[d] = now;
        driver.link_free_ns[d] += (uint64_t)((double)bytes[d] * 1e9 / (double)settings()->link_bytes_per_s);
        if (until < driver.link_free_ns[d])
            until = driver.link_free_ns[d];
    }
    pthread_mutex_unlock(&driver.lock);
    if (until > now)
        sleep_ns(until - now);
}

/* For as long as the file is there: a test decides when copies go on. */
static void hold_wait(void)
{
    const char *path = settings()->hold;
    while (path && !access(path, F_OK))
        sleep_ns(1000000);
}

static void shuffle(Op *op, uint64_t *random)
{
    for (size_t i = op->count; i > 1; i--) {
        size_t other = random_next(random) % i;
        Copy copy = op->copies[i - 1];
        op->copies[i - 1] = op->copies[other];
        op->copies[other] = copy;
    }
}

/* A program that unmaps its memory too early would die of a signal: better of a message. */
static bool host_is_there(const Stream *stream, const Op *op)
{
    for (size_t i = 0; i < op->range_count; i++) {
        const Range *range = op->ranges[i];
        if (range->kind != REGISTERED || is_mapped(range->item.key, range->size))
            continue;
        pthread_mutex_lock(&driver.lock);
        break_context(stream->context,
                      misuse(CUDA_ERROR_ILLEGAL_ADDRESS, "a copy runs, but registered memory at 0x%llx is unmapped",
                             (CUdeviceptr)range->item.key));
        pthread_mutex_unlock(&driver.lock);
        return false;
    }
    return true;
}

/* Bytes that nobody may rely on: of new memory, and of buffers that have done their work. */
void poison(CUdeviceptr start, size_t size)
{
    if (!settings()->poison)
        return;
    pthread_mutex_lock(&driver.lock);
    const Range *range = range_at(&driver.device, start);
    bool own = range && range->kind == ALLOCATED;
    pthread_mutex_unlock(&driver.lock);
    if (own)
        memset((void *)(uintptr_t)start, POISON, size);
}

static bool copy_run(Stream *stream, const Copy *copy)
{
    const Settings *s = settings();
    unsigned char *to = (unsigned char *)(uintptr_t)copy->to;
    uint64_t nth = __atomic_add_fetch(&driver.copies_begun, 1, __ATOMIC_RELAXED);
    uint64_t nth_of_kind = __atomic_add_fetch(&driver.begun[copy->direction], 1, __ATOMIC_RELAXED);
    if (nth == s->hang_after || (copy->direction == TO_HOST && nth_of_kind == s->hang_device_to_host) ||
        (copy->direction == TO_DEVICE && nth_of_kind == s->hang_host_to_device))
        hang();
    if (nth == s->sticky_after)
        break_down(stream);
    if (__atomic_load_n(&stream->context->broken, __ATOMIC_ACQUIRE))
        return false;
    memmove(to, (const void *)(uintptr_t)copy->from, copy->size);
    if (s->corrupt_every && nth % s->corrupt_every == 0)
        to[random_next(&stream->random) % copy->size] ^= 1 << random_next(&stream->random) % 8;
    return true;
}

static void count(const Op *op)
{
    uint64_t bytes[DIRECTIONS] = {0};
    for (size_t i = 0; i < op->count; i++)
        bytes[op->copies[i].direction] += op->copies[i].size;
    pthread_mutex_lock(&driver.lock);
    driver.counters.copies += op->count;
    driver.counters.bytes_to_device += bytes[TO_DEVICE];
    driver.counters.bytes_to_host += bytes[TO_HOST];
    driver.counters.bytes_within_device += bytes[WITHIN_DEVICE];
    pthread_mutex_unlock(&driver.lock);
}

void copies_run(Stream *stream, Op *op)
{
    sleep_ns(settings()->delay_copies_ns);
    hold_wait();
    link_wait(op);
    if (!host_is_there(stream, op))
        return;
    if (op->hangs)
        hang();
    shuffle(op, &stream->random);
    for (size_t i = 0; i < op->count; i++)
        if (!copy_run(stream, &op->copies[i]))
            return;
    for (size_t i = 0; i < op->count; i++)
        if (op->copies[i].direction == TO_HOST)
            poison(op->copies[i].from, op->copies[i].size);
    count(op);
}
