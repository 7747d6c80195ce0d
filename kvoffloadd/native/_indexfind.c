/* Hashes keys, finds, places and removes their rows, and tells which hit. See cache/memory/index.py, which owns the table,
 * describes it and does the same in numpy where this was not compiled.
 *
 * Everything is called with the GIL, on the event loop: nothing else changes the table meanwhile. Addresses come from
 * index.py alone, which owns what they point to.
 */
#include "_native.h"

#include <string.h>

#define KEY_BYTES 32
#define HALVES (KEY_BYTES / 4)
#define BUCKETS 64
#define SLOTS 16
#define EMPTY 0
#define DEAD 1
#define FIRST_TAG 2
#define AHEAD 16 /* keys whose memory is asked for before it is needed: a large table is not in the cache */
#define HIGH_HALF UINT64_C(0xFFFFFFFF00000000)

/* The secret of `KeyHash`, word by word as index.py draws it. */
typedef struct {
    uint64_t factors[HALVES][2];
    uint64_t of_keyspace[2];
    uint64_t offset[2];
    uint64_t mixers[2];
} Secret;

/* The table of `Index`: addresses of its columns, how many top bits of a hash choose a segment, and how many of its
 * slots a segment uses before it is full.
 */
typedef struct {
    const unsigned char *keys;
    const uint16_t *keyspace;
    uint16_t *tags;
    uint32_t *rows;
    uint32_t *used; /* slots of each segment that are not empty */
    uint32_t *live; /* and those that are not dead either */
    const uint32_t *full;
    const uint32_t *directory;
    uint64_t depth;
} Table;

static uint64_t hash_key(const Secret *secret, uint64_t keyspace, const unsigned char *key)
{
    uint64_t low = keyspace * secret->of_keyspace[0] + secret->offset[0];
    uint64_t high = keyspace * secret->of_keyspace[1] + secret->offset[1];
    for (int i = 0; i < HALVES; i++) {
        uint32_t half;
        memcpy(&half, key + 4 * i, sizeof half);
        low += half * secret->factors[i][0];
        high += half * secret->factors[i][1];
    }
    uint64_t h = low >> 32 | (high & HIGH_HALF);
    h ^= h >> 32;
    h *= secret->mixers[0];
    h ^= h >> 29;
    h *= secret->mixers[1];
    return h ^ h >> 32;
}

static uint64_t home_of(const Table *table, uint64_t h)
{
    uint64_t segment = table->depth ? table->directory[h >> (64 - table->depth)] : 0;
    return segment * BUCKETS + (h & (BUCKETS - 1));
}

static void prefetch(const Table *table, uint64_t h)
{
    uint64_t bucket = home_of(table, h);
    __builtin_prefetch(table->tags + bucket * SLOTS);
    __builtin_prefetch(table->rows + bucket * SLOTS);
}

static uint16_t tag_of(uint64_t h)
{
    uint16_t tag = h >> 8 & 0xFFFF;
    return tag < FIRST_TAG ? FIRST_TAG : tag;
}

/* The bucket that takes the overflow: the next one of the same segment, round. */
static uint64_t next_of(uint64_t bucket)
{
    return (bucket & ~(uint64_t)(BUCKETS - 1)) | ((bucket + 1) & (BUCKETS - 1));
}

static int64_t find_row(const Table *table, uint64_t h, uint16_t keyspace, const unsigned char *key)
{
    uint64_t bucket = home_of(table, h);
    uint16_t tag = tag_of(h);
    for (int visited = 0; visited < BUCKETS; visited++) {
        const uint16_t *tags = table->tags + bucket * SLOTS;
        for (int slot = 0; slot < SLOTS; slot++) {
            if (tags[slot] != tag)
                continue;
            uint32_t row = table->rows[bucket * SLOTS + slot];
            if (table->keyspace[row] == keyspace && !memcmp(table->keys + (uint64_t)row * KEY_BYTES, key, KEY_BYTES))
                return row;
        }
        if (tags[SLOTS - 1] == EMPTY)
            break; /* it never overflowed */
        bucket = next_of(bucket);
    }
    return -1;
}

/* Put a row into the first free slot from its home on. Returns 0 if the segment has none. */
static int place_row(Table *table, uint64_t h, uint32_t row)
{
    uint64_t bucket = home_of(table, h);
    for (int visited = 0; visited < BUCKETS; visited++) {
        uint16_t *tags = table->tags + bucket * SLOTS;
        for (int slot = 0; slot < SLOTS; slot++) {
            if (tags[slot] >= FIRST_TAG)
                continue;
            table->used[bucket / BUCKETS] += tags[slot] == EMPTY;
            table->live[bucket / BUCKETS]++;
            tags[slot] = tag_of(h);
            table->rows[bucket * SLOTS + slot] = row;
            return 1;
        }
        bucket = next_of(bucket);
    }
    return 0;
}

/* Returns 0 if the row is not in the table. */
static int remove_row(Table *table, uint64_t h, uint32_t row)
{
    uint64_t bucket = home_of(table, h);
    uint16_t tag = tag_of(h);
    for (int visited = 0; visited < BUCKETS; visited++) {
        uint16_t *tags = table->tags + bucket * SLOTS;
        for (int slot = 0; slot < SLOTS; slot++) {
            if (tags[slot] != tag || table->rows[bucket * SLOTS + slot] != row)
                continue;
            tags[slot] = DEAD;
            table->live[bucket / BUCKETS]--;
            return 1;
        }
        bucket = next_of(bucket);
    }
    return 0;
}

/* What a call was given. */
typedef struct {
    Py_buffer keyspaces, keys, hashes;
    Py_ssize_t count; /* of keys */
    uint64_t keyspace;
} Keys;

static void release_keys(Keys *keys)
{
    release_buffer(&keys->keyspaces);
    release_buffer(&keys->keys);
    release_buffer(&keys->hashes);
}

/* Keys, the keyspace of all of them, an int, or of each, u16 or u64, and u64 hashes. */
static int get_keys(Keys *keys, PyObject *const *args, int hash_flags)
{
    if (take_buffer(args[1], &keys->keys, -1, PyBUF_SIMPLE) < 0)
        return -1;
    keys->count = keys->keys.len / KEY_BYTES;
    if (take_buffer(args[2], &keys->hashes, keys->count * (Py_ssize_t)sizeof(uint64_t), hash_flags) < 0)
        return -1;
    if (PyLong_Check(args[0])) {
        keys->keyspace = PyLong_AsUnsignedLongLong(args[0]);
        return PyErr_Occurred() ? -1 : 0;
    }
    if (take_buffer(args[0], &keys->keyspaces, -1, PyBUF_SIMPLE) < 0)
        return -1;
    Py_ssize_t bytes = keys->keyspaces.len;
    if (bytes != keys->count * (Py_ssize_t)sizeof(uint16_t) && bytes != keys->count * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes of keyspaces for %zd keys", bytes, keys->count);
        return -1;
    }
    return 0;
}

static uint64_t keyspace_of(const Keys *keys, Py_ssize_t i)
{
    if (keys->keyspaces.obj == NULL)
        return keys->keyspace;
    if (keys->keyspaces.len == keys->count * (Py_ssize_t)sizeof(uint16_t))
        return ((const uint16_t *)keys->keyspaces.buf)[i];
    return ((const uint64_t *)keys->keyspaces.buf)[i];
}

/* hash_keys(secret, keyspaces, keys, hashes): write each key's hash. */
static PyObject *hash_keys(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer secret = {0};
    Keys keys = {.count = 0};
    (void)module;
    if (given != 4) {
        PyErr_SetString(PyExc_TypeError, "hash_keys(secret, keyspaces, keys, hashes)");
        return NULL;
    }
    if (take_buffer(args[0], &secret, sizeof(Secret), PyBUF_SIMPLE) == 0 && get_keys(&keys, args + 1, PyBUF_WRITABLE) == 0) {
        const unsigned char *key = keys.keys.buf;
        uint64_t *hashes = keys.hashes.buf;
        for (Py_ssize_t i = 0; i < keys.count; i++, key += KEY_BYTES)
            hashes[i] = hash_key(secret.buf, keyspace_of(&keys, i), key);
    }
    release_buffer(&secret);
    release_keys(&keys);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* find_rows(table, keyspaces, keys, hashes, rows): write each key's row, or -1, by its hash. */
static PyObject *find_rows(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer table = {0}, rows = {0};
    Keys keys = {.count = 0};
    (void)module;
    if (given != 5) {
        PyErr_SetString(PyExc_TypeError, "find_rows(table, keyspaces, keys, hashes, rows)");
        return NULL;
    }
    if (take_buffer(args[0], &table, sizeof(Table), PyBUF_SIMPLE) == 0 && get_keys(&keys, args + 1, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[4], &rows, keys.count * (Py_ssize_t)sizeof(int64_t), PyBUF_WRITABLE) == 0) {
        const unsigned char *key = keys.keys.buf;
        const uint64_t *hashes = keys.hashes.buf;
        for (Py_ssize_t i = 0; i < keys.count; i++, key += KEY_BYTES) {
            if (i + AHEAD < keys.count)
                prefetch(table.buf, hashes[i + AHEAD]);
            ((int64_t *)rows.buf)[i] = find_row(table.buf, hashes[i], (uint16_t)keyspace_of(&keys, i), key);
        }
    }
    release_buffer(&table);
    release_buffer(&rows);
    release_keys(&keys);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* What `place_rows` and `remove_rows` are given: a table, u64 hashes and as many u32 rows. */
typedef struct {
    Py_buffer table, hashes, rows;
    Py_ssize_t count;
} Rows;

static int get_rows(Rows *rows, PyObject *const *args)
{
    if (take_buffer(args[0], &rows->table, sizeof(Table), PyBUF_SIMPLE) < 0 || take_buffer(args[1], &rows->hashes, -1, PyBUF_SIMPLE) < 0)
        return -1;
    rows->count = rows->hashes.len / (Py_ssize_t)sizeof(uint64_t);
    return take_buffer(args[2], &rows->rows, rows->count * (Py_ssize_t)sizeof(uint32_t), PyBUF_SIMPLE);
}

static void release_rows(Rows *rows)
{
    release_buffer(&rows->table);
    release_buffer(&rows->hashes);
    release_buffer(&rows->rows);
}

/* rows_fit(table, hashes): whether no segment becomes more than full with keys of these hashes, in slots that are empty. */
static PyObject *rows_fit(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer buffer = {0}, hashes = {0};
    int all_fit = 1;
    (void)module;
    if (given != 2) {
        PyErr_SetString(PyExc_TypeError, "rows_fit(table, hashes)");
        return NULL;
    }
    if (take_buffer(args[0], &buffer, sizeof(Table), PyBUF_SIMPLE) == 0 && take_buffer(args[1], &hashes, -1, PyBUF_SIMPLE) == 0) {
        Table *table = buffer.buf;
        const uint64_t *of_keys = hashes.buf;
        Py_ssize_t count = hashes.len / (Py_ssize_t)sizeof(uint64_t), seen = 0;
        while (all_fit && seen < count) {
            uint64_t segment = home_of(table, of_keys[seen++]) / BUCKETS;
            all_fit = ++table->used[segment] <= table->full[segment];
        }
        while (seen) /* it was for counting alone */
            table->used[home_of(table, of_keys[--seen]) / BUCKETS]--;
    }
    release_buffer(&buffer);
    release_buffer(&hashes);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(all_fit);
}

/* place_rows(table, hashes, rows): put rows into free slots, one after the other. */
static PyObject *place_rows(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Rows rows = {.count = 0};
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "place_rows(table, hashes, rows)");
        return NULL;
    }
    if (get_rows(&rows, args) == 0) {
        const uint64_t *hashes = rows.hashes.buf;
        for (Py_ssize_t i = 0; i < rows.count; i++) {
            if (i + AHEAD < rows.count)
                prefetch(rows.table.buf, hashes[i + AHEAD]);
            if (!place_row(rows.table.buf, hashes[i], ((const uint32_t *)rows.rows.buf)[i])) {
                PyErr_SetString(PyExc_LookupError, "a segment has no free slot");
                break;
            }
        }
    }
    release_rows(&rows);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* remove_rows(table, hashes, rows): make their slots dead. Returns how many of the rows are in the table. */
static PyObject *remove_rows(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Rows rows = {.count = 0};
    Py_ssize_t removed = 0;
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "remove_rows(table, hashes, rows)");
        return NULL;
    }
    if (get_rows(&rows, args) == 0) {
        const uint64_t *hashes = rows.hashes.buf;
        for (Py_ssize_t i = 0; i < rows.count; i++) {
            if (i + AHEAD < rows.count)
                prefetch(rows.table.buf, hashes[i + AHEAD]);
            removed += remove_row(rows.table.buf, hashes[i], ((const uint32_t *)rows.rows.buf)[i]);
        }
    }
    release_rows(&rows);
    return PyErr_Occurred() ? NULL : PyLong_FromSsize_t(removed);
}

/* mark_hits(rows, missing, states): write 1 for each row of which no part is missing, else 0, also for -1. Returns how
 * many others there are but -1.
 */
static PyObject *mark_hits(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer rows = {0}, missing = {0}, states = {0};
    long incomplete = 0;
    (void)module;
    if (given != 3) {
        PyErr_SetString(PyExc_TypeError, "mark_hits(rows, missing, states)");
        return NULL;
    }
    if (take_buffer(args[0], &rows, -1, PyBUF_SIMPLE) == 0 && take_buffer(args[1], &missing, -1, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[2], &states, rows.len / (Py_ssize_t)sizeof(int64_t), PyBUF_WRITABLE) == 0) {
        const uint16_t *of_rows = missing.buf;
        int64_t end = missing.len / (Py_ssize_t)sizeof(uint16_t);
        for (Py_ssize_t i = 0; i < states.len; i++) {
            int64_t row = ((const int64_t *)rows.buf)[i];
            if (row >= end) {
                PyErr_Format(PyExc_IndexError, "row %lld of %lld", (long long)row, (long long)end);
                break;
            }
            int is_hit = row >= 0 && !of_rows[row];
            ((uint8_t *)states.buf)[i] = (uint8_t)is_hit;
            incomplete += row >= 0 && !is_hit;
        }
    }
    release_buffer(&rows);
    release_buffer(&missing);
    release_buffer(&states);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(incomplete);
}

/* add_counts(counts, rows, by, kinds, held): add to the u32 count of each u32 row, as often as it is named; `held` has for each
 * u16 kind how many rows of it have a count that is not 0. */
static PyObject *add_counts(PyObject *module, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer counts = {0}, rows = {0}, kinds = {0}, held = {0};
    (void)module;
    if (given != 5) {
        PyErr_SetString(PyExc_TypeError, "add_counts(counts, rows, by, kinds, held)");
        return NULL;
    }
    long by = PyLong_AsLong(args[2]);
    if (!PyErr_Occurred() && take_buffer(args[0], &counts, -1, PyBUF_WRITABLE) == 0 &&
        take_buffer(args[1], &rows, -1, PyBUF_SIMPLE) == 0 && take_buffer(args[3], &kinds, -1, PyBUF_SIMPLE) == 0 &&
        take_buffer(args[4], &held, -1, PyBUF_WRITABLE) == 0) {
        uint32_t *of_rows = counts.buf;
        int64_t *of_kinds = held.buf;
        const uint16_t *kind = kinds.buf;
        const uint32_t *row = rows.buf;
        Py_ssize_t named = rows.len / (Py_ssize_t)sizeof(uint32_t);
        uint64_t end = (uint64_t)counts.len / sizeof(uint32_t);
        uint64_t kinds_end = (uint64_t)held.len / sizeof(int64_t);
        if (end > (uint64_t)kinds.len / sizeof(uint16_t))
            end = (uint64_t)kinds.len / sizeof(uint16_t);
        for (Py_ssize_t i = 0; i < named; i++) {
            if (row[i] >= end || kind[row[i]] >= kinds_end) {
                PyErr_Format(PyExc_IndexError, "row %lu of %llu", (unsigned long)row[i], (unsigned long long)end);
                break;
            }
            uint32_t before = of_rows[row[i]], now = before + (uint32_t)by;
            of_rows[row[i]] = now;
            of_kinds[kind[row[i]]] += (now != 0) - (before != 0);
        }
    }
    release_buffer(&counts);
    release_buffer(&rows);
    release_buffer(&kinds);
    release_buffer(&held);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

PyMethodDef kvo_indexfind[] = {
    KVO_METHOD("hash_keys", hash_keys),
    KVO_METHOD("find_rows", find_rows),
    KVO_METHOD("rows_fit", rows_fit),
    KVO_METHOD("place_rows", place_rows),
    KVO_METHOD("remove_rows", remove_rows),
    KVO_METHOD("add_counts", add_counts),
    KVO_METHOD("mark_hits", mark_hits),
    {NULL, NULL, 0, NULL},
};
