/* What the files of softcuda share.
 *
 * One lock guards all state: `driver.lock`, taken by enter*() and given back by leave(). Streams' threads take it
 * between two operations and never while bytes move, so that calls stay as quick as the real driver's.
 */
#ifndef SOFTCUDA_INTERNAL_H
#define SOFTCUDA_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "softcuda.h"

#define DEVICES_MAX 16
#define GRANULE ((size_t)2 << 20)
#define PITCH_MAX 0x7fffffff
#define POISON 0xdb /* of bytes that nobody may rely on */

static inline size_t rounded(size_t size)
{
    return (size + GRANULE - 1) & ~(GRANULE - 1);
}

/* table.c: things sorted by a number, an address or a handle. */
typedef struct {
    uint64_t key;
} Item;

typedef struct {
    Item **items;
    size_t count, room;
} Table;

void *table_find(const Table *table, uint64_t key);
void *table_floor(const Table *table, uint64_t key); /* the one with the greatest key that is not above `key` */
size_t table_index(const Table *table, uint64_t key); /* how many have a smaller key */
void table_add(Table *table, Item *item);
void table_remove(Table *table, const Item *item);
uint64_t handle_new(void); /* never given twice, so that a stale handle is always noticed */

/* settings.c: the environment, read once. */
typedef struct {
    uint64_t devices, memory_bytes, driver_version, seed, register_max_bytes, register_ns_per_gib;
    uint64_t context_bytes, context_ns, init_ns;
    bool misuse_is_error;
    const char *hold; /* a path; NULL: copies are not held */
    int visible_count, visible[DEVICES_MAX];
    uint64_t sticky_after, hang_after, hang_device_to_host, hang_host_to_device, link_bytes_per_s, delay_copies_ns;
    uint64_t jitter_ns, fail_submit_every, corrupt_every, close_delay_ns, submit_ns;
    uint64_t init_error, context_error, open_error, import_error, register_holds_lock, no_batch, dead_exporter;
    uint64_t pitched_error, pitched_batch_error, no_pitched_batch, read_early;
    uint64_t query_error, query_fails_every, record_error, record_fails_every;
    uint64_t register_error_after, register_fails_every;
    uint64_t batch_hangs_after, pitched_batch_hangs_after;
    uint64_t packed, poison, no_host_pointers, no_stream_writes, host_offset, small_block, queue_depth;
} Settings;

const Settings *settings(void);

/* context.c */
typedef struct Stream Stream;
typedef struct Context {
    int ordinal; /* among the visible devices */
    int device;  /* the same in every process */
    unsigned retained;
    Stream *null_stream;
    uint64_t used_bytes;
    struct Block *small; /* where the next small allocation goes, if they share */
    CUresult broken;    /* what every call returns from now on */
    unsigned submitting; /* calls that wait for room in a stream's queue; other calls wait behind them */
} Context;

CUresult enter_any(void);            /* for calls that need no context */
CUresult enter(Context **current);   /* for calls that do; both take the lock if they return CUDA_SUCCESS */
CUresult leave(CUresult code);       /* gives the lock back */
Context *context_of_device(int device); /* NULL: not visible here */
CUuuid uuid_of(int device);

/* error.c */
CUresult misuse(CUresult code, const char *format, ...) __attribute__((format(printf, 2, 3)));
CUresult break_context(Context *context, CUresult code); /* every call in it fails from now on; the lock is held */

/* memory.c: ranges of addresses. */
typedef enum { ALLOCATED, OPENED, MAPPED, RESERVED, REGISTERED } Kind;
typedef struct Chunk {
    Item item;
    Context *home; /* the device's */
    size_t size;
    int handle_types;
    int fd;    /* -1: can't be exported */
    bool made; /* here, so that it counts */
    void *memory;
    unsigned handles, mappings;
} Chunk;

typedef struct Block {
    CUdeviceptr start;
    size_t size, used; /* as allocated, in all and so far */
    uint64_t nonce;    /* names the memory in all processes */
    int fd;
    unsigned allocations;
} Block;

typedef struct Range {
    Item item; /* the key is the first address */
    size_t size;
    Kind kind;
    Context *context; /* NULL: VMM memory belongs to none */
    Context *home;    /* OPENED: of the device that has the memory */
    Block *block;     /* ALLOCATED: the memory */
    uint64_t nonce;   /* OPENED: the block's */
    unsigned opens;   /* OPENED: how many closes it takes */
    uint32_t access;  /* MAPPED: a bit for each device that may use it */
    Chunk *chunk;     /* MAPPED: the memory */
    size_t pending;   /* operations under way that touch it */
} Range;

static inline CUdeviceptr range_end(const Range *range)
{
    return range->item.key + range->size;
}

Range *range_new(Table *table, Kind kind, CUdeviceptr start, size_t size);
void range_delete(Table *table, Range *range);
Range *range_at(const Table *table, CUdeviceptr address); /* the one that holds the address, or NULL */
bool range_overlaps(const Table *table, CUdeviceptr start, size_t size);
CUresult range_idle(const Range *range, const char *call); /* or the misuse that it is to take it away now */
void allocation_delete(Range *range);
void registration_delete(Range *range); /* host.c */
bool is_mapped(CUdeviceptr start, size_t size); /* whether the process has memory there at all */
uint64_t nonce_new(void);
int memfd_new(const char *name, size_t size);
/* Maps where nothing of softcuda's has ever been: an address is never reused, so that a stale one is noticed. */
void *map_afresh(size_t size, size_t alignment, int protection, int flags, int fd);

/* ipc.c */
void opened_delete(Range *range);

/* vmm.c */
CUresult chunk_find(CUmemGenericAllocationHandle handle, Chunk **chunk, const char *call);
void chunk_unuse(Chunk *chunk); /* frees it when neither handles nor mappings are left */

/* queue.c: streams' threads and what waits for them. */
typedef enum { TO_DEVICE, TO_HOST, WITHIN_DEVICE, DIRECTIONS, EITHER } Direction;
typedef struct {
    CUdeviceptr to, from;
    size_t size;
    Direction direction;
    bool any_order; /* its source may be read before the stream comes to it */
} Copy;

typedef struct Event {
    Item item;
    Context *context;
    uint64_t recorded, done; /* tickets */
    size_t users;            /* operations and calls under way */
    bool destroyed;
} Event;

typedef enum { COPIES, FILL, WRITE, RECORD, DELAY, SPIN } OpKind;
typedef struct Op {
    struct Op *next;
    OpKind kind;
    Range **ranges; /* what it touches */
    size_t range_count, range_room;
    CUdeviceptr address;
    uint64_t value;
    size_t size;
    Event *event;
    bool hangs;
    unsigned char *early; /* sources that were read when they were submitted */
    size_t count;
    Copy copies[];
} Op;

struct Stream {
    Item item;
    Context *context;
    Op *first, **last;
    uint64_t queued, done;
    uint64_t random;
    size_t waiting; /* calls that wait for it */
    bool destroyed;
    pthread_cond_t work;
};

Op *op_new(OpKind kind, size_t copies);
void op_touches(Op *op, Range *range);
void op_delete(Op *op);
void op_queue(Stream *stream, Op *op); /* may let go of the lock, to wait for room */
Stream *stream_new(Context *context);
void stream_delete(Stream *stream);
CUresult stream_wait(Stream *stream); /* for all that is queued now; lets go of the lock meanwhile */
/* The stream of a handle, for work in `context`. */
CUresult stream_find(Context *context, CUstream handle, Stream **stream);
void event_unuse(Event *event);
void event_delete(Event *event);
uint64_t random_next(uint64_t *state);
uint64_t now_ns(void);
void sleep_ns(uint64_t ns);

/* copy.c */
CUresult device_touch(Op *op, const Context *context, CUdeviceptr start, size_t size, const char *call);
CUresult host_touch(Op *op, CUdeviceptr start, size_t size, bool staged, const char *call);
CUresult order_check(int order, const char *call);
CUresult flags_check(unsigned int flags, const char *call);
CUresult overlap_check(Op *op, const char *call);
bool submit_fails(void);
CUresult query_fault(void); /* what a query answers instead, or CUDA_SUCCESS */
void read_early(Op *op);
void copies_run(Stream *stream, Op *op);
void poison(CUdeviceptr start, size_t size); /* if it is asked for, and this process's own allocation; takes the lock */

/* functions.c: a name may stand there twice, its oldest form first. */
typedef struct {
    const char *name;
    int version; /* of CUDA, which brought this form */
    void (*function)(void);
} Entry;

extern const Entry FUNCTIONS[];
extern const size_t FUNCTION_COUNT;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* an operation has ended, or a context is broken */
    bool initialised, forked;
    Context contexts[DEVICES_MAX];
    CUdeviceptr next_address;
    Table device, reserved, host; /* of Range: usable device addresses, reserved ones, registrations */
    Table chunks, streams, events;
    uint64_t copies_begun, begun[DIRECTIONS], submits; /* for faults */
    uint64_t queries, records, registrations, registered_bytes;
    uint64_t link_free_ns[DIRECTIONS];
    struct softcuda_counters counters;
} Driver;

extern Driver driver;

#endif
