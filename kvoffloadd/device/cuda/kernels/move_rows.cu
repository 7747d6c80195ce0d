/* Moves rows of bytes within a GPU's memory: between the rows of a KV cache, which lie anywhere, and a staging buffer
 * that one DMA fills or empties.
 *
 * A warp moves PIECE_BYTES of one row. Where both sides have the same place in 16 bytes, it moves 16 at a time, and
 * single bytes at the ends; otherwise 4 at a time, or single bytes. Nothing here waits for anything.
 *
 * The same file is compiled as C for tests without a GPU: then `move_rows` is a function that makes the warps one after
 * the other.
 */
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned char u8;

typedef struct {
    u64 from, to, size;
} Row;

enum { WARP = 32, PIECE_BYTES = 4096 };

#ifdef __CUDACC_RTC__
#define DEVICE static __device__ __forceinline__
#define AT(type, address) ((type *)(address))
typedef uint4 u128;
#else
#define DEVICE static inline
#define AT(type, address) ((type *)(unsigned long)(address))
typedef struct {
    u64 low, high;
} u128;
#endif

/* One lane's share: every WARP-th unit, so that a warp's accesses lie side by side. */
#define MOVE_UNITS(name, type)                                     \
    DEVICE void name(u64 to, u64 from, u64 bytes, u32 lane)        \
    {                                                              \
        type *target = AT(type, to);                               \
        const type *source = AT(const type, from);                 \
        for (u64 unit = lane; unit < bytes / sizeof(type); unit += WARP) \
            target[unit] = source[unit];                           \
    }

MOVE_UNITS(move_16, u128)
MOVE_UNITS(move_4, u32)
MOVE_UNITS(move_1, u8)

DEVICE void move_piece(u64 to, u64 from, u64 bytes, u32 lane)
{
    u64 apart = to ^ from, unit = !(apart & 15) ? 16 : !(apart & 3) ? 4 : 1;
    u64 head = (unit - to % unit) % unit;
    if (head > bytes)
        head = bytes;
    u64 body = (bytes - head) / unit * unit, tail = head + body;
    move_1(to, from, head, lane);
    if (unit == 16)
        move_16(to + head, from + head, body, lane);
    else if (unit == 4)
        move_4(to + head, from + head, body, lane);
    else
        move_1(to + head, from + head, body, lane);
    move_1(to + tail, from + tail, bytes - tail, lane);
}

/* `warp` is the number of a piece: `pieces` of each row, as many as the longest has. */
DEVICE void move_by_warp(const Row *rows, u64 count, u32 pieces, u64 warp, u32 lane)
{
    u64 row = warp / pieces, begin = warp % pieces * PIECE_BYTES;
    if (row >= count || begin >= rows[row].size)
        return;
    u64 left = rows[row].size - begin;
    move_piece(rows[row].to + begin, rows[row].from + begin, left < PIECE_BYTES ? left : PIECE_BYTES, lane);
}

#ifdef __CUDACC_RTC__
extern "C" __global__ void move_rows(const Row *rows, u64 count, u32 pieces)
{
    u64 warps = (u64)gridDim.x * (blockDim.x / WARP), total = count * pieces;
    for (u64 warp = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; warp < total; warp += warps)
        move_by_warp(rows, count, pieces, warp, threadIdx.x % WARP);
}
#else
void move_rows(const Row *rows, u64 count, u32 pieces)
{
    for (u64 warp = 0; warp < count * pieces; warp++)
        for (u32 lane = 0; lane < WARP; lane++)
            move_by_warp(rows, count, pieces, warp, lane);
}
#endif
