import gc
import threading
import time

from twinphase.engine.cpu_wait import CpuWait, thread_cpu_wait


def test_a_step_loses_what_its_longest_waiter_waited():
    done = threading.Event()
    worker = threading.Thread(target=done.wait, name="twinphase-1", daemon=True)
    other = threading.Thread(target=done.wait, name="reader", daemon=True)
    for thread in (worker, other):
        thread.start()
    try:
        me = threading.get_native_id()
        it = worker.native_id
        readings = iter([{me: 5.0, it: 1.0}, {me: 5.25, it: 4.0}, {me: 8.25, it: 4.0}, {me: 8.25}])
        asked = []

        def read(threads):
            asked.append(set(threads))
            return next(readings)

        wait = CpuWait(read)
        assert [wait() for _ in range(4)] == [0.0, 3.0, 6.0, 6.0]
        assert all({me, it} <= threads and other.native_id not in threads for threads in asked)
    finally:
        done.set()


def test_the_system_is_read():
    first = thread_cpu_wait()
    time.sleep(0.001)
    assert 0 <= first <= thread_cpu_wait()


class Dropped:
    """Garbage that only the collector frees, noting whether the list of threads is locked."""

    locked: list[bool] = []

    def __init__(self):
        self.itself = self

    def __del__(self):
        self.locked.append(threading._active_limbo_lock._is_owned())


def test_nothing_is_collected_while_the_list_of_threads_is_locked():
    """Collecting a thread pool there would wait for threads that cannot end."""
    wait = CpuWait(lambda threads: dict.fromkeys(threads, 0.0))
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for number in range(200):
            Dropped()
            _kept = [
                [] for _ in range(number % 7)
            ]  # so that the collector's turn comes at another place each time
            wait()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert len(Dropped.locked) == 200
    assert not any(Dropped.locked)
    assert gc.isenabled()
