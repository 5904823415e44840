// Threads that share the items of one loop. An item is claimed when a thread is ready for it, and the loop ends when the
// last item is done, not when the last thread has arrived: on a busy machine a thread that is not scheduled delays only the
// item it holds. (OpenMP waits for every thread at every loop; with two hundred loops a token it was several times slower.)
//
// The whole state of a loop is one word (its number, the number of items, the next item), so a late thread can never
// claim an item of a loop that has ended. Between loops threads spin for a moment, since the next starts within
// microseconds, and then sleep.

#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>

class Pool {
  public:
    using Body = void (*)(const void* context, long item, int worker);

    // Never destroyed: threads may still sleep in it when the process ends.
    static Pool& instance() {
        static Pool* pool = new Pool;
        return *pool;
    }

    // Calls body(context, i, worker) once for every i in [0, n), with worker in [0, threads).
    void run(long n, int threads, Body body, const void* context) {
        if (threads > MOST_THREADS) threads = MOST_THREADS;
        if (threads <= 1 || n <= 1 || n > MOST_ITEMS || !busy_.try_lock()) {  // locked: another caller uses the threads
            for (long i = 0; i < n; i++) body(context, i, 0);
            return;
        }
        while (started_ < threads - 1 && start(started_ + 1)) started_++;
        body_ = body, context_ = context;
        limit_.store(threads, std::memory_order_relaxed);
        left_.store(n, std::memory_order_relaxed);
        loop_ = (loop_ + 1) & LOOP_MASK;
        state_.store(loop_ << 40 | (uint64_t)n << 20);
        if (sleeping_.load() > 0) {
            std::lock_guard<std::mutex> hold(sleep_);
            wake_.notify_all();
        }
        take_items(0);
        for (long turn = 0; left_.load(std::memory_order_acquire) > 0; turn++) wait_a_moment(turn);
        busy_.unlock();
    }

  private:
    static constexpr long MOST_ITEMS = (1 << 20) - 1;
    static constexpr int MOST_THREADS = 256;
    static constexpr uint64_t LOOP_MASK = (1 << 24) - 1;
    static constexpr long SPINS = 2000;  // pauses before the core is given to other threads
    static constexpr std::chrono::microseconds PATIENCE{300};  // time that a thread spins before it sleeps

    std::atomic<uint64_t> state_{0};  // loop number, number of items, next item
    alignas(64) std::atomic<long> left_{0};  // items not yet done
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<int> limit_{1};
    Body body_ = nullptr;
    const void* context_ = nullptr;
    uint64_t loop_ = 0;
    int started_ = 0;
    std::mutex busy_, sleep_;
    std::condition_variable wake_;

    Pool() {
        // A forked child has no threads of this pool, and locks that they held stay locked: it starts with a new pool.
        pthread_atfork(nullptr, nullptr, [] { new (&instance()) Pool(Forked{}); });
    }
    struct Forked {};
    explicit Pool(Forked) {}

    static uint64_t items(uint64_t state) { return state >> 20 & MOST_ITEMS; }
    static uint64_t next(uint64_t state) { return state & MOST_ITEMS; }

    static void wait_a_moment(long turn) {
        if (turn % 64 == 63 && turn > SPINS) {
            sched_yield();
            return;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    struct Start {
        Pool* pool;
        int worker;
    };

    // Returns false if the system grants no more threads: the existing ones then do the work.
    bool start(int worker) {
        pthread_t thread;
        Start* arguments = new Start{this, worker};
        const auto entry = [](void* given) -> void* {
            const Start start = *static_cast<Start*>(given);
            delete static_cast<Start*>(given);
            start.pool->work(start.worker);
            return nullptr;
        };
        if (pthread_create(&thread, nullptr, entry, arguments)) {
            delete arguments;
            return false;
        }
        pthread_detach(thread);
        return true;
    }

    // Returns the state in which nothing was left to claim.
    uint64_t take_items(int worker) {
        uint64_t state = state_.load(std::memory_order_acquire);
        while (next(state) < items(state) && worker < limit_.load(std::memory_order_relaxed)) {
            if (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) continue;
            // The loop cannot end before this item is done, so its context is still valid.
            body_(context_, (long)next(state), worker);
            left_.fetch_sub(1, std::memory_order_release);
            state = state_.load(std::memory_order_acquire);
        }
        return state;
    }

    void work(int worker) {
        for (;;) {
            const uint64_t seen = take_items(worker) >> 40;
            const auto since = std::chrono::steady_clock::now();
            bool patient = true;
            for (long turn = 1; patient && state_.load(std::memory_order_acquire) >> 40 == seen; turn++) {
                wait_a_moment(turn);
                if (turn % 64 == 0) patient = std::chrono::steady_clock::now() - since < PATIENCE;
            }
            if (patient) continue;
            std::unique_lock<std::mutex> hold(sleep_);
            sleeping_.fetch_add(1);
            wake_.wait(hold, [&] { return state_.load() >> 40 != seen; });
            sleeping_.fetch_sub(1);
        }
    }
};

// Calls f(item, worker) once for every item, by up to `threads` threads.
template <class F>
void parallel(long n, int threads, const F& f) {
    if (threads <= 1 || n <= 1) {
        for (long i = 0; i < n; i++) f(i, 0);
        return;
    }
    Pool::instance().run(
        n, threads, [](const void* body, long item, int worker) { (*static_cast<const F*>(body))(item, worker); }, &f);
}
