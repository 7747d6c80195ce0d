/* Sorted arrays of pointers: thousands of chunks are found in a few steps, and neighbours lie side by side. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

size_t table_index(const Table *table, uint64_t key)
{
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->items[middle]->key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void *table_find(const Table *table, uint64_t key)
{
    size_t index = table_index(table, key);
    return index < table->count && table->items[index]->key == key ? table->items[index] : NULL;
}

void *table_floor(const Table *table, uint64_t key)
{
    size_t index = key == UINT64_MAX ? table->count : table_index(table, key + 1);
    return index ? table->items[index - 1] : NULL;
}

void table_add(Table *table, Item *item)
{
    if (table->count == table->room) {
        table->room = table->room ? table->room * 2 : 64;
        table->items = realloc(table->items, table->room * sizeof *table->items);
        if (!table->items)
            abort();
    }
    size_t index = table_index(table, item->key);
    memmove(table->items + index + 1, table->items + index, (table->count - index) * sizeof *table->items);
    table->items[index] = item;
    table->count++;
}

void table_remove(Table *table, const Item *item)
{
    size_t index = table_index(table, item->key);
    table->count--;
    memmove(table->items + index, table->items + index + 1, (table->count - index) * sizeof *table->items);
}

uint64_t handle_new(void)
{
    static uint64_t last = 0x5c0000000000;
    return last += 16;
}
