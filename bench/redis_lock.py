# redis-py's Lock as its documentation uses it: lock = r.lock(name, timeout=30), acquire(), release(); where somebody
# else has it, another try every 100 ms. Speaks with contest.lua as client.c does.
#
#   redis_lock.py SOCKET

import random
import sys
import time

import redis

NAMES = 2000
connection = redis.Redis(unix_socket_path=sys.argv[1])
held = None


def cycle(name):
    lock = connection.lock(name, timeout=30)
    lock.acquire()
    lock.release()


for line in sys.stdin:
    line = line.strip()
    if line == "take":
        began = time.monotonic_ns()
        held = connection.lock("handover", timeout=30)
        held.acquire()
        print(began, time.monotonic_ns(), flush=True)
    elif line == "give":
        began = time.monotonic_ns()
        held.release()
        print(began, flush=True)
    else:
        n = int(line)
        start = time.monotonic_ns()
        for _ in range(n):
            cycle("py%d" % random.randrange(NAMES))
        print("%.2f" % ((time.monotonic_ns() - start) / 1e3 / n), flush=True)
