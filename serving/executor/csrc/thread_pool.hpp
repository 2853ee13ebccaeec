// A pool of threads that waits politely.
//
// Work is handed out in chunks through one counter, so a thread that the machine keeps from running holds up nobody:
// the caller does the rest. Idle threads spin for a bounded time and then sleep; spinning without bound beside a busy
// process makes every barrier cost a scheduler slice.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace decoder {

class ThreadPool {
  public:
    explicit ThreadPool(int threads) {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    }

    ~ThreadPool() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Call body(begin, end, thread) over [0, items) in chunks; returns when all are done. Chunks are independent: their
    // number and owner never change a result.
    template <class Body>
    void run(int items, const Body& body) {
        if (items <= 0) return;
        if (workers_.empty() || items == 1) {
            body(0, items, 0);
            return;
        }
        const int grain = std::max(1, items / (threads() * kChunksPerThread));
        const uint32_t chunks = static_cast<uint32_t>((items + grain - 1) / grain);  // at most 8 per thread: 16 bits
        call_.store([](const void* context, int begin, int end, int thread) {
            (*static_cast<const Body*>(context))(begin, end, thread);
        });
        context_.store(&body);
        items_.store(items);
        grain_.store(grain);
        finished_.store(0);
        const uint64_t generation = (ticket_.load() >> 32) + 1;
        ticket_.store(generation << 32 | static_cast<uint64_t>(chunks) << 16);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        while (claim_and_run(0)) {
        }
        Waiter waiter;
        while (finished_.load(std::memory_order_acquire) != chunks) {
            if (!waiter.spin()) std::this_thread::yield();
        }
    }

  private:
    static constexpr int kChunksPerThread = 4;
    static constexpr std::chrono::microseconds kSpinTime{50};
    using Call = void (*)(const void*, int, int, int);

    // Pauses for a while; spin() turns false once the time is over.
    class Waiter {
      public:
        bool spin() {
            for (int i = 0; i < 16; ++i) pause();
            return std::chrono::steady_clock::now() - start_ < kSpinTime;
        }

      private:
        static void pause() {
#if defined(__x86_64__)
            _mm_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
        std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    };

    // Claim one chunk of the current job and run it. Whether chunks are left is read from the ticket itself, and the
    // next job's fields are written only when every chunk of the current one is finished; so a compare-exchange that
    // succeeds proves that the fields read before it belong to the ticket's generation.
    bool claim_and_run(int thread) {
        uint64_t ticket = ticket_.load();
        for (;;) {
            const Call call = call_.load();
            const void* context = context_.load();
            const int items = items_.load();
            const int grain = grain_.load();
            const uint32_t chunk = static_cast<uint16_t>(ticket);
            if (chunk >= static_cast<uint16_t>(ticket >> 16)) return false;
            if (ticket_.compare_exchange_weak(ticket, ticket + 1)) {
                const int begin = static_cast<int>(chunk) * grain;
                const int end = begin + grain < items ? begin + grain : items;
                call(context, begin, end, thread);
                finished_.fetch_add(1, std::memory_order_release);
                return true;
            }
        }
    }

    void work(int thread) {
        uint64_t seen = 0;
        for (;;) {
            Waiter waiter;
            while ((ticket_.load() >> 32) == seen) {
                if (waiter.spin()) continue;
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, [&] { return stop_ || (ticket_.load() >> 32) != seen; });
                sleepers_.fetch_sub(1);
                if (stop_) return;
            }
            seen = ticket_.load() >> 32;
            while (claim_and_run(thread)) {
            }
        }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    std::atomic<int> sleepers_{0};
    std::atomic<uint64_t> ticket_{0};  // generation (32 bits), number of chunks (16), next chunk (16)
    std::atomic<uint32_t> finished_{0};
    std::atomic<int> items_{0};
    std::atomic<int> grain_{1};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> context_{nullptr};
};

}  // namespace decoder
