/* A stand-in for the CUDA driver, for tests: "device" memory is the host's, and each stream is a thread that
 * carries out its queue in order, so that copies are truly asynchronous.
 *
 * Beside the library lies a plan (LIBRARY.plan), read at every call, one order a line:
 *     fail CALL NTH CODE    the NTH call of that name returns CODE and does nothing
 *     corrupt NTH CODE      the NTH copy is not carried out; the next wait for its stream reports CODE
 *     sticky                ... and every wait for it from then on
 *     hold                  copies that have begun do not end while this stands
 * and a journal (LIBRARY.log) is written, one event a line, in the order in which things happened. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, ALREADY_PINNED = 712,
       NOT_PINNED = 713, NOT_READY = 600, ILLEGAL_ADDRESS = 700, NOT_SUPPORTED = 801 };
enum { RANGES_MAX = 256, CALLS_MAX = 64, STREAMS_MAX = 1024 };
static const size_t DEVICE_BYTES = (size_t)64 << 20;

struct range { uintptr_t start; size_t bytes; };
struct job { int kind; char *to; const char *from; size_t bytes; struct event *event; long mark; struct job *next; };
struct event { long recorded, reached; struct stream *stream; };
struct stream { int number, closing, fault; long queued, finished; struct job *first, *last; pthread_t thread; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static struct range device[RANGES_MAX], pinned[RANGES_MAX];
static struct stream *streams[STREAMS_MAX];
static int stream_count, retained;
static long copies;
static struct { char name[48]; long times; } calls[CALLS_MAX];
static __thread int entered;

static void beside(char *path, size_t room, const char *ending) {
    Dl_info self;
    dladdr((void *)beside, &self);
    snprintf(path, room, "%s.%s", self.dli_fname, ending);
}

/* Under the lock. */
static void note(const char *format, ...) {
    static FILE *log;
    char path[4096];
    va_list rest;
    if (!log) {
        beside(path, sizeof path, "log");
        log = fopen(path, "a");
    }
    va_start(rest, format);
    vfprintf(log, format, rest);
    va_end(rest);
    fputc('\n', log);
    fflush(log);
}

/* The number that the plan gives for the nth of something, else 0. For an order without numbers, 1. */
static int planned(const char *order, const char *name, long nth) {
    char path[4096], line[160], verb[48], what[48];
    long which;
    int code, found = 0;
    beside(path, sizeof path, "plan");
    FILE *plan = fopen(path, "r");
    if (!plan) return 0;
    while (!found && fgets(line, sizeof line, plan)) {
        if (sscanf(line, "%47s", verb) != 1 || strcmp(verb, order)) continue;
        if (!name) found = sscanf(line, "%*s %ld %d", &which, &code) == 2 ? (which == nth ? code : 0) : 1;
        else if (sscanf(line, "%*s %47s %ld %d", what, &which, &code) == 3)
            found = !strcmp(what, name) && which == nth ? code : 0;
    }
    fclose(plan);
    return found;
}

/* Counts a call and says whether it is to fail. Under the lock. */
static int called(const char *name) {
    int at = 0;
    while (calls[at].name[0] && strcmp(calls[at].name, name)) at++;
    strcpy(calls[at].name, name);
    return planned("fail", name, ++calls[at].times);
}

#define ENTER(name)                         \
    pthread_mutex_lock(&lock);              \
    int code = called(name);                \
    if (code) goto out
#define LEAVE                               \
    out:                                    \
    pthread_mutex_unlock(&lock);            \
    return code
#define NEED(condition, fault)              \
    if (!(condition)) { code = (fault); goto out; }

static struct range *slot(struct range *of, uintptr_t start) {
    for (int at = 0; at < RANGES_MAX; at++) if (of[at].start == start) return &of[at];
    return NULL;
}

static int inside(struct range *of, const void *start, size_t bytes) {
    uintptr_t at = (uintptr_t)start;
    for (int i = 0; i < RANGES_MAX; i++)
        if (of[i].start && at >= of[i].start && at + bytes <= of[i].start + of[i].bytes) return 1;
    return 0;
}

static int touches(struct range *range, const char *start, size_t bytes) {
    return (uintptr_t)start < range->start + range->bytes && range->start < (uintptr_t)start + bytes;
}

/* Whether a copy that has not ended touches a range. Under the lock. */
static int busy(struct range *range) {
    for (int i = 0; i < stream_count; i++)
        for (struct job *job = streams[i] ? streams[i]->first : NULL; job; job = job->next)
            if (job->bytes && (touches(range, job->to, job->bytes) || touches(range, job->from, job->bytes))) return 1;
    return 0;
}

static void carry_out(struct stream *stream, struct job *job) {
    long nth = ++copies;
    int bad = planned("corrupt", NULL, nth);
    note("begin %ld stream %d bytes %zu", nth, stream->number, job->bytes);
    while (planned("hold", NULL, 0)) {
        pthread_mutex_unlock(&lock);
        usleep(500);
        pthread_mutex_lock(&lock);
    }
    if (bad) stream->fault = bad;
    pthread_mutex_unlock(&lock);
    if (!bad) memmove(job->to, job->from, job->bytes);
    pthread_mutex_lock(&lock);
    note("end %ld", nth);
}

static void *work(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    while (!(stream->closing && !stream->first)) {
        struct job *job = stream->first;
        if (!job) { pthread_cond_wait(&moved, &lock); continue; }
        if (job->event) job->event->reached = job->mark;
        else carry_out(stream, job);
        stream->first = job->next;
        if (!stream->first) stream->last = NULL;
        stream->finished++;
        free(job);
        pthread_cond_broadcast(&moved);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void queue(struct stream *stream, struct job what) {
    struct job *job = malloc(sizeof *job);
    *job = what;
    job->next = NULL;
    if (stream->last) stream->last->next = job; else stream->first = job;
    stream->last = job;
    stream->queued++;
    pthread_cond_broadcast(&moved);
}

/* The fault of a stream, told once where it is not sticky. */
static int fault_of(struct stream *stream) {
    int fault = stream->fault;
    if (!planned("sticky", NULL, 0)) stream->fault = 0;
    return fault;
}

int cuInit(unsigned flags) { ENTER("cuInit"); NEED(!flags, INVALID_VALUE); LEAVE; }
int cuDeviceGetCount(int *count) { ENTER("cuDeviceGetCount"); *count = 2; LEAVE; }
int cuDeviceGet(int *number, int ordinal) {
    ENTER("cuDeviceGet"); NEED(ordinal >= 0 && ordinal < 2, INVALID_VALUE); *number = ordinal; LEAVE;
}
int cuDeviceGetName(char *name, int room, int number) {
    ENTER("cuDeviceGetName"); snprintf(name, room, "Stand-in %d", number); LEAVE;
}
int cuDeviceTotalMem_v2(size_t *bytes, int number) {
    (void)number;
    ENTER("cuDeviceTotalMem_v2"); *bytes = DEVICE_BYTES; LEAVE;
}
int cuDevicePrimaryCtxRetain(void **context, int number) {
    ENTER("cuDevicePrimaryCtxRetain"); *context = (void *)(uintptr_t)(number + 1); note("retained %d", ++retained); LEAVE;
}
int cuDevicePrimaryCtxRelease_v2(int number) {
    (void)number;
    ENTER("cuDevicePrimaryCtxRelease_v2"); note("retained %d", --retained); LEAVE;
}
int cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent"); NEED(retained > 0, INVALID_CONTEXT); entered = (int)(uintptr_t)context; LEAVE;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    ENTER("cuMemAlloc_v2");
    NEED(entered, INVALID_CONTEXT);
    NEED(bytes && bytes <= DEVICE_BYTES, OUT_OF_MEMORY);
    struct range *free_slot = slot(device, 0);
    NEED(free_slot, OUT_OF_MEMORY);
    *free_slot = (struct range){ (uintptr_t)malloc(bytes), bytes };
    *address = free_slot->start;
    note("allocated %zu", bytes);
    LEAVE;
}
int cuMemFree_v2(uint64_t address) {
    ENTER("cuMemFree_v2");
    NEED(entered, INVALID_CONTEXT);
    struct range *range = address ? slot(device, address) : NULL;
    NEED(range, INVALID_VALUE);
    note("freed %zu %s", range->bytes, busy(range) ? "busy" : "idle");
    free((void *)range->start);
    range->start = 0;
    LEAVE;
}
int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    ENTER("cuMemHostRegister_v2");
    NEED(entered, INVALID_CONTEXT);
    NEED(start && bytes && flags == 1, INVALID_VALUE);
    NEED(!slot(pinned, (uintptr_t)start), ALREADY_PINNED);
    struct range *range = slot(pinned, 0);
    NEED(range, OUT_OF_MEMORY);
    *range = (struct range){ (uintptr_t)start, bytes };
    note("pinned %zu", bytes);
    LEAVE;
}
int cuMemHostUnregister(void *start) {
    ENTER("cuMemHostUnregister");
    struct range *range = start ? slot(pinned, (uintptr_t)start) : NULL;
    NEED(range, NOT_PINNED);
    int mapped = msync(start, range->bytes, MS_ASYNC) == 0;
    note("unpinned %zu %s %s", range->bytes, mapped ? "mapped" : "unmapped", busy(range) ? "busy" : "idle");
    range->start = 0;
    LEAVE;
}

int cuStreamCreate(struct stream **made, unsigned flags) {
    ENTER("cuStreamCreate");
    NEED(entered, INVALID_CONTEXT);
    NEED(flags == 1 && stream_count < STREAMS_MAX, INVALID_VALUE);
    struct stream *stream = calloc(1, sizeof *stream);
    stream->number = stream_count;
    streams[stream_count++] = stream;
    pthread_create(&stream->thread, NULL, work, stream);
    *made = stream;
    LEAVE;
}
int cuStreamDestroy_v2(struct stream *stream) {
    ENTER("cuStreamDestroy_v2");
    note("stream %d destroyed %s", stream->number, stream->first ? "busy" : "idle");
    stream->closing = 1;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_lock(&lock);
    streams[stream->number] = NULL;
    free(stream);
    LEAVE;
}
int cuStreamSynchronize(struct stream *stream) {
    ENTER("cuStreamSynchronize");
    long until = stream->queued;
    while (stream->finished < until) pthread_cond_wait(&moved, &lock);
    code = fault_of(stream);
    LEAVE;
}

int cuEventCreate(struct event **made, unsigned flags) {
    ENTER("cuEventCreate"); NEED(flags == 3, INVALID_VALUE); *made = calloc(1, sizeof **made); LEAVE;
}
int cuEventRecord(struct event *event, struct stream *stream) {
    ENTER("cuEventRecord");
    event->stream = stream;
    queue(stream, (struct job){ .event = event, .mark = ++event->recorded });
    LEAVE;
}
int cuEventQuery(struct event *event) {
    ENTER("cuEventQuery");
    NEED(event->reached >= event->recorded, NOT_READY);
    LEAVE;
}
int cuEventSynchronize(struct event *event) {
    ENTER("cuEventSynchronize");
    long until = event->recorded;
    while (event->reached < until) pthread_cond_wait(&moved, &lock);
    if (event->stream) code = fault_of(event->stream);
    LEAVE;
}
int cuEventDestroy_v2(struct event *event) { ENTER("cuEventDestroy_v2"); free(event); LEAVE; }

static int copy(const char *name, struct job job, struct range *to, struct range *from) {
    struct stream *stream = job.next ? (struct stream *)job.next : NULL;
    ENTER(name);
    NEED(entered && stream, INVALID_CONTEXT);
    NEED(inside(to, job.to, job.bytes) && inside(from, job.from, job.bytes), INVALID_VALUE);
    queue(stream, job);
    LEAVE;
}
#define JOB(target, source) \
    (struct job){ .to = (char *)(target), .from = (const char *)(source), .bytes = bytes, .next = (struct job *)stream }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, struct stream *stream) {
    return copy("cuMemcpyHtoDAsync_v2", JOB(to, from), device, pinned);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, struct stream *stream) {
    return copy("cuMemcpyDtoHAsync_v2", JOB(to, from), pinned, device);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, struct stream *stream) {
    return copy("cuMemcpyDtoDAsync_v2", JOB(to, from), device, device);
}

#ifndef WITHOUT_DMA_BUF
int cuMemGetHandleForAddressRange(void *handle, uint64_t from, size_t bytes, int type, unsigned long long flags) {
    ENTER("cuMemGetHandleForAddressRange");
    NEED(type == 1 && !flags && bytes % 4096 == 0, INVALID_VALUE);
    NEED(inside(device, (void *)from, bytes), INVALID_VALUE);
    int file = memfd_create("stand-in", MFD_CLOEXEC);
    if (write(file, (void *)from, bytes) != (ssize_t)bytes) code = NOT_SUPPORTED;
    *(int *)handle = file;
    LEAVE;
}
#endif

static const struct { int code; const char *name, *text; } errors[] = {
    { INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
    { OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
    { INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
    { ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
    { ALREADY_PINNED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "memory is already pinned" },
    { NOT_PINNED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory is not pinned" },
    { NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported" },
};
static int say(int code, const char **words, int text) {
    for (size_t at = 0; at < sizeof errors / sizeof *errors; at++)
        if (errors[at].code == code) { *words = text ? errors[at].text : errors[at].name; return OK; }
    *words = NULL;
    return INVALID_VALUE;
}
int cuGetErrorName(int code, const char **words) { return say(code, words, 0); }
#ifndef WITHOUT_ERROR_STRING
int cuGetErrorString(int code, const char **words) { return say(code, words, 1); }
#endif
