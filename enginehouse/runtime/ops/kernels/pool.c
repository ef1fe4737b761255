// One pool of threads for the whole process.
//
// A job is a function and a number of items. All that decides who computes what is one 64-bit word, `ticket`:
// the job's generation in the high half and the next free item in the low half. A thread claims an item by
// compare-and-swap, so a late thread can never take an item of a job it has not read: the generation differs.
//
// After a job a worker spins for a short while, because the next operation of the same step follows within
// microseconds; then it sleeps on a condition, so an idle server costs no CPU time.
#include "ops.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sched.h>
#include <time.h>

#define MAX_WORKERS 255
#define SPIN_NANOSECONDS 60000
#define SPINS_BEFORE_YIELD 2000
#define CLOSED 0xffffffffu

typedef void (*task_function)(const void *context, int64_t item);

static struct {
    _Atomic(task_function) task;
    _Atomic(const void *) context;
    atomic_int_fast64_t num_items;
    atomic_int_fast64_t num_threads;
    atomic_uint_fast64_t ticket;
    atomic_int_fast64_t num_done;
} job;

static pthread_mutex_t sleep_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake_up = PTHREAD_COND_INITIALIZER;
static atomic_int num_sleeping;
static atomic_bool stopping;
static atomic_flag in_use = ATOMIC_FLAG_INIT;
static pthread_t workers[MAX_WORKERS];
static int64_t num_workers;

ALWAYS_INLINE void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_nanoseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

// Computes items of the current job until none is free.
static void take_items(int64_t thread) {
    for (;;) {
        uint64_t ticket = atomic_load(&job.ticket);
        task_function task = atomic_load(&job.task);
        const void *context = atomic_load(&job.context);
        int64_t item = (int64_t)(ticket & CLOSED);
        if (item >= atomic_load(&job.num_items) || thread >= atomic_load(&job.num_threads)) return;
        if (!atomic_compare_exchange_weak(&job.ticket, &ticket, ticket + 1)) continue;
        task(context, item);
        atomic_fetch_add(&job.num_done, 1);
    }
}

static bool wait_for_job(uint64_t seen) {
    int64_t deadline = now_nanoseconds() + SPIN_NANOSECONDS;
    for (int spin = 1;; spin++) {
        if (atomic_load(&stopping)) return false;
        if (atomic_load(&job.ticket) >> 32 != seen) return true;
        pause_cpu();
        if (spin % 32 == 0 && now_nanoseconds() > deadline) break;
    }
    pthread_mutex_lock(&sleep_mutex);
    atomic_fetch_add(&num_sleeping, 1);
    while (atomic_load(&job.ticket) >> 32 == seen && !atomic_load(&stopping))
        pthread_cond_wait(&wake_up, &sleep_mutex);
    atomic_fetch_sub(&num_sleeping, 1);
    pthread_mutex_unlock(&sleep_mutex);
    return !atomic_load(&stopping);
}

static void *work(void *argument) {
    int64_t thread = (int64_t)(intptr_t)argument;
    uint64_t seen = 0;
    while (wait_for_job(seen)) {
        seen = atomic_load(&job.ticket) >> 32;
        take_items(thread);
    }
    return NULL;
}

static void wake_sleepers(void) {
    if (atomic_load(&num_sleeping) == 0) return;
    pthread_mutex_lock(&sleep_mutex);
    pthread_cond_broadcast(&wake_up);
    pthread_mutex_unlock(&sleep_mutex);
}

// A forked child has none of its parent's threads.
static void forget_workers(void) {
    num_workers = 0;
    atomic_store(&num_sleeping, 0);
    pthread_mutex_init(&sleep_mutex, NULL);
    pthread_cond_init(&wake_up, NULL);
    atomic_flag_clear(&in_use);
}

static void start_workers(int64_t wanted) {
    static bool fork_handler_set;
    if (!fork_handler_set) {
        pthread_atfork(NULL, NULL, forget_workers);
        fork_handler_set = true;
    }
    if (wanted > MAX_WORKERS) wanted = MAX_WORKERS;
    while (num_workers < wanted) {
        void *thread = (void *)(intptr_t)(num_workers + 1);
        // Without another thread the caller computes everything itself: slower, and just as right.
        if (pthread_create(&workers[num_workers], NULL, work, thread) != 0) return;
        num_workers++;
    }
}

void run_parallel(task_function task, const void *context, int64_t num_items, int64_t num_threads) {
    bool alone = num_threads <= 1 || num_items <= 1 || num_items > INT32_MAX;
    // A second caller at the same time computes alone instead of disturbing the first one's job.
    if (alone || atomic_flag_test_and_set(&in_use)) {
        for (int64_t item = 0; item < num_items; item++) task(context, item);
        return;
    }
    start_workers(num_threads - 1);
    // The old ticket is closed before the job's fields change, so that no thread pairs it with the new fields.
    uint64_t generation = atomic_load(&job.ticket) >> 32;
    atomic_store(&job.ticket, generation << 32 | CLOSED);
    atomic_store(&job.num_items, num_items);
    atomic_store(&job.task, task);
    atomic_store(&job.context, context);
    atomic_store(&job.num_threads, num_threads);
    atomic_store(&job.num_done, 0);
    atomic_store(&job.ticket, (generation + 1) << 32);
    wake_sleepers();
    take_items(0);
    for (int spin = 1; atomic_load(&job.num_done) < num_items; spin++) {
        pause_cpu();
        if (spin % SPINS_BEFORE_YIELD == 0) sched_yield();
    }
    atomic_flag_clear(&in_use);
}

// Ends the workers; the next job that wants them starts new ones.
EXPORT void enginehouse_stop_threads(void) {
    if (atomic_flag_test_and_set(&in_use)) return;
    pthread_mutex_lock(&sleep_mutex);
    atomic_store(&stopping, true);
    pthread_cond_broadcast(&wake_up);
    pthread_mutex_unlock(&sleep_mutex);
    for (int64_t worker = 0; worker < num_workers; worker++) pthread_join(workers[worker], NULL);
    num_workers = 0;
    atomic_store(&stopping, false);
    atomic_flag_clear(&in_use);
}
