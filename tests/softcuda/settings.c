/* The environment: what the machine is like, and which faults it has. Read once, and strictly: a test with a misspelt
 * fault would pass without testing anything.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

#define PREFIX "SOFTCUDA_"

static Settings read_settings = {
    .devices = 2,
    .memory_bytes = (uint64_t)4 << 30,
    .driver_version = 13000,
    .seed = 1,
    .register_max_bytes = (uint64_t)512 << 30,
    .query_fails_every = 1,
    .record_fails_every = 1,
};

typedef struct {
    const char *name;
    uint64_t *value;
    bool flag; /* stands alone, without a value */
} Name;

static const Name VARIABLES[] = {
    {"DEVICES", &read_settings.devices, false},
    {"MEMORY_BYTES", &read_settings.memory_bytes, false},
    {"DRIVER_VERSION", &read_settings.driver_version, false},
    {"SEED", &read_settings.seed, false},
    {"REGISTER_MAX_BYTES", &read_settings.register_max_bytes, false},
    {"REGISTER_NS_PER_GIB", &read_settings.register_ns_per_gib, false},
    {"CONTEXT_BYTES", &read_settings.context_bytes, false},
    {"CONTEXT_NS", &read_settings.context_ns, false},
    {"INIT_NS", &read_settings.init_ns, false},
    {NULL, NULL, false},
};

static const Name FAULTS[] = {
    {"sticky_after", &read_settings.sticky_after, false},
    {"hang_after", &read_settings.hang_after, false},
    {"hang_device_to_host", &read_settings.hang_device_to_host, false},
    {"hang_host_to_device", &read_settings.hang_host_to_device, false},
    {"batch_hangs_after", &read_settings.batch_hangs_after, false},
    {"pitched_batch_hangs_after", &read_settings.pitched_batch_hangs_after, false},
    {"link_bytes_per_s", &read_settings.link_bytes_per_s, false},
    {"delay_copies_ns", &read_settings.delay_copies_ns, false},
    {"jitter_ns", &read_settings.jitter_ns, false},
    {"fail_submit_every", &read_settings.fail_submit_every, false},
    {"corrupt_every", &read_settings.corrupt_every, false},
    {"close_delay_ns", &read_settings.close_delay_ns, false},
    {"query_error", &read_settings.query_error, false},
    {"query_fails_every", &read_settings.query_fails_every, false},
    {"record_error", &read_settings.record_error, false},
    {"record_fails_every", &read_settings.record_fails_every, false},
    {"register_error_after", &read_settings.register_error_after, false},
    {"register_fails_every", &read_settings.register_fails_every, false},
    {"submit_ns", &read_settings.submit_ns, false},
    {"init_error", &read_settings.init_error, false},
    {"context_error", &read_settings.context_error, false},
    {"open_error", &read_settings.open_error, false},
    {"import_error", &read_settings.import_error, false},
    {"register_holds_lock", &read_settings.register_holds_lock, true},
    {"packed", &read_settings.packed, true},
    {"no_batch", &read_settings.no_batch, true},
    {"no_host_pointers", &read_settings.no_host_pointers, true},
    {"no_stream_writes", &read_settings.no_stream_writes, true},
    {"host_offset", &read_settings.host_offset, false},
    {"small_block", &read_settings.small_block, true},
    {"queue_depth", &read_settings.queue_depth, false},
    {"pitched_error", &read_settings.pitched_error, false},
    {"pitched_batch_error", &read_settings.pitched_batch_error, false},
    {"no_pitched_batch", &read_settings.no_pitched_batch, true},
    {"read_early", &read_settings.read_early, true},
    {"poison", &read_settings.poison, true},
    {"dead_exporter", &read_settings.dead_exporter, true},
    {NULL, NULL, false},
};

static void refuse(const char *what, const char *text)
{
    dprintf(STDERR_FILENO, "softcuda: %s: %s\n", what, text);
    abort();
}

/* Decimal digits alone: strtoull would take signs and blanks. */
static bool number(const char *text, uint64_t *value)
{
    size_t digits = strspn(text, "0123456789");
    errno = 0;
    *value = strtoull(text, NULL, 10);
    return digits && !text[digits] && !errno;
}

static const Name *find(const Name *names, const char *name)
{
    while (names->name && strcmp(names->name, name))
        names++;
    return names->name ? names : NULL;
}

static void read_fault(char *text)
{
    char *value = strchr(text, '=');
    if (value)
        *value++ = 0;
    const Name *fault = find(FAULTS, text);
    if (!fault)
        refuse("unknown fault", text);
    if (fault->flag != !value)
        refuse(fault->flag ? "fault takes no value" : "fault needs a value", text);
    if (fault->flag)
        *fault->value = 1;
    else if (!number(value, fault->value) || !*fault->value)
        refuse("fault's value is not a positive number", value);
}

static void read_faults(const char *list)
{
    char *text = strdup(list), *rest = text, *fault;
    while ((fault = strsep(&rest, ",")))
        read_fault(fault);
    free(text);
}

static void read_variable(const char *name, const char *value)
{
    const Name *variable = find(VARIABLES, name);
    if (variable) {
        if (!number(value, variable->value))
            refuse("not a number", value);
    } else if (!strcmp(name, "FAULTS")) {
        if (*value)
            read_faults(value);
    } else if (!strcmp(name, "MISUSE")) {
        if (strcmp(value, "abort") && strcmp(value, "error"))
            refuse("SOFTCUDA_MISUSE is abort or error, not", value);
        read_settings.misuse_is_error = !strcmp(value, "error");
    } else if (!strcmp(name, "HOLD")) {
        if (!*value)
            refuse("not a path", value);
        read_settings.hold = strdup(value);
    } else
        refuse("unknown variable", name);
}

/* As the real driver: the devices up to the first that does not exist; a device named twice hides all. */
static void read_visible(const char *list)
{
    char *text = strdup(list), *rest = text, *entry;
    uint64_t device;
    bool seen[DEVICES_MAX] = {false};
    while ((entry = strsep(&rest, ",")) && number(entry, &device) && device < read_settings.devices) {
        if (seen[device]) {
            read_settings.visible_count = 0;
            break;
        }
        seen[device] = true;
        read_settings.visible[read_settings.visible_count++] = (int)device;
    }
    free(text);
}

static void read_environment(void)
{
    for (char **entry = environ; *entry; entry++) {
        char name[64];
        size_t length = strcspn(*entry, "=");
        if (strncmp(*entry, PREFIX, strlen(PREFIX)) || length >= sizeof name || !(*entry)[length])
            continue;
        memcpy(name, *entry, length);
        name[length] = 0;
        read_variable(name + strlen(PREFIX), *entry + length + 1);
    }
    if (read_settings.devices > DEVICES_MAX)
        refuse("too many devices", getenv(PREFIX "DEVICES"));
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible)
        read_visible(visible);
    else
        for (int i = 0; i < (int)read_settings.devices; i++)
            read_settings.visible[read_settings.visible_count++] = i;
}

const Settings *settings(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, read_environment);
    return &read_settings;
}
