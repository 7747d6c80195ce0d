/* A stream: a queue of operations, and a thread that does them one after another. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "internal.h"

#define LOOK_AGAIN_NS 20000

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void sleep_ns(uint64_t ns)
{
    if (!ns)
        return;
    struct timespec left = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* splitmix64 */
uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

Op *op_new(OpKind kind, size_t copies)
{
    Op *op = calloc(1, sizeof *op + copies * sizeof *op->copies);
    if (!op)
        abort();
    op->kind = kind;
    op->count = copies;
    return op;
}

/* The runs of a batch touch the same one or two ranges over and over: once is enough. */
void op_touches(Op *op, Range *range)
{
    for (size_t i = op->range_count; i && i + 2 > op->range_count; i--)
        if (op->ranges[i - 1] == range)
            return;
    if (op->range_count == op->range_room) {
        op->range_room = op->range_room ? op->range_room * 2 : 4;
        op->ranges = realloc(op->ranges, op->range_room * sizeof *op->ranges);
        if (!op->ranges)
            abort();
    }
    op->ranges[op->range_count++] = range;
    range->pending++;
}

void op_delete(Op *op)
{
    for (size_t i = 0; i < op->range_count; i++)
        op->ranges[i]->pending--;
    if (op->event)
        event_unuse(op->event);
    free(op->ranges);
    free(op->early);
    free(op);
}

static bool is_broken(const Stream *stream)
{
    return __atomic_load_n(&stream->context->broken, __ATOMIC_ACQUIRE);
}

/* As the real driver, whose lock the waiting call keeps: whoever else needs the context waits, too. */
static void wait_for_room(Stream *stream)
{
    uint64_t depth = settings()->queue_depth;
    stream->context->submitting++;
    stream->waiting++;
    while (depth && stream->queued - stream->done >= depth && !is_broken(stream))
        pthread_cond_wait(&driver.changed, &driver.lock);
    stream->waiting--;
    stream->context->submitting--;
    if (depth)
        pthread_cond_broadcast(&driver.changed);
}

void op_queue(Stream *stream, Op *op)
{
    wait_for_room(stream);
    *stream->last = op;
    stream->last = &op->next;
    stream->queued++;
    pthread_cond_signal(&stream->work);
}

static void fill(const Op *op)
{
    memset((void *)(uintptr_t)op->address, (int)op->value, op->size);
}

static void spin(const Stream *stream, const Op *op)
{
    const uint64_t *word = (const uint64_t *)(uintptr_t)op->address;
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < op->value && !is_broken(stream))
        sleep_ns(LOOK_AGAIN_NS);
}

static void op_run(Stream *stream, Op *op)
{
    if (is_broken(stream))
        return;
    if (settings()->jitter_ns)
        sleep_ns(random_next(&stream->random) % (settings()->jitter_ns + 1));
    switch (op->kind) {
    case COPIES:
        copies_run(stream, op);
        break;
    case FILL:
        fill(op);
        break;
    case WRITE:
        __atomic_store_n((uint64_t *)(uintptr_t)op->address, op->value, __ATOMIC_RELEASE);
        break;
    case DELAY:
        sleep_ns(op->value);
        break;
    case SPIN:
        spin(stream, op);
        break;
    case RECORD: /* op_end */
        break;
    }
}

static void op_end(Stream *stream, Op *op)
{
    stream->first = op->next;
    if (!stream->first)
        stream->last = &stream->first;
    stream->done++;
    if (op->kind == RECORD && op->event->done < op->value)
        op->event->done = op->value;
    op_delete(op);
    pthread_cond_broadcast(&driver.changed);
}

/* A destroyed stream still does what is queued, and stays for those who wait for it. */
static void *stream_main(void *argument)
{
    Stream *stream = argument;
    pthread_mutex_lock(&driver.lock);
    while (stream->first || !stream->destroyed) {
        if (!stream->first) {
            pthread_cond_wait(&stream->work, &driver.lock);
            continue;
        }
        Op *op = stream->first;
        pthread_mutex_unlock(&driver.lock);
        op_run(stream, op);
        pthread_mutex_lock(&driver.lock);
        op_end(stream, op);
    }
    while (stream->waiting)
        pthread_cond_wait(&driver.changed, &driver.lock);
    pthread_mutex_unlock(&driver.lock);
    pthread_cond_destroy(&stream->work);
    free(stream);
    return NULL;
}

/* Signals are for the program's own threads. */
static bool start_thread(Stream *stream)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, stream_main, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return !failed && !pthread_detach(thread);
}

Stream *stream_new(Context *context)
{
    Stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        abort();
    stream->item.key = handle_new();
    stream->context = context;
    stream->last = &stream->first;
    stream->random = settings()->seed * 0x100000000 + stream->item.key;
    pthread_cond_init(&stream->work, NULL);
    if (!start_thread(stream))
        abort();
    return stream;
}

/* The thread frees it. */
void stream_delete(Stream *stream)
{
    if (stream != stream->context->null_stream) {
        table_remove(&driver.streams, &stream->item);
        driver.counters.live_streams--;
    }
    stream->destroyed = true;
    pthread_cond_signal(&stream->work);
}

CUresult stream_wait(Stream *stream)
{
    uint64_t wanted = stream->queued;
    stream->waiting++;
    const Context *context = stream->context;
    while (stream->done < wanted && !context->broken)
        pthread_cond_wait(&driver.changed, &driver.lock);
    stream->waiting--;
    if (stream->destroyed)
        pthread_cond_broadcast(&driver.changed);
    return context->broken;
}
