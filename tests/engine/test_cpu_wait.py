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
        me, it = threading.get_native_id(), worker.native_id
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
