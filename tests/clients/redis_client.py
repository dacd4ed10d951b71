"""What connectors do with the redis package, against a running `baton store serve`: redis_client.py URL"""

import hashlib
import os
import random
import sys
import threading

import redis


def strings(client):
    client.flushdb()
    assert client.ping()
    large = os.urandom(5_000_000)
    assert client.set("large", large) and client.get("large") == large
    assert client.getrange("large", 100, 199) == large[100:200]
    assert client.set("a", "x", nx=True) and client.set("a", "y", nx=True) is None
    assert client.set("a", "z", xx=True, get=True) == b"x"
    assert client.set("t", "1", ex=10) and 0 < client.ttl("t") <= 10 and client.pttl("t") > 0
    assert client.persist("t") and client.ttl("t") == -1
    assert client.exists("a", "large", "none") == 2 and client.delete("a", "large") == 2
    assert client.expire("t", 100) and client.strlen("t") == 1 and client.type("t") == b"string"


def batches(client):
    values = {f"k{n}": os.urandom(n * 1000) for n in range(100)}
    assert client.mset(values)
    assert client.mget([*values, "none"]) == [*values.values(), None]
    found = sorted(client.scan_iter(match="k9*"))
    assert found == sorted([b"k9"] + [b"k9%d" % n for n in range(10)]), found
    pipeline = client.pipeline(transaction=False)
    for n in range(1000):
        pipeline.set(f"p{n}", n)
        pipeline.get(f"p{n}")
    assert pipeline.execute()[1::2] == [b"%d" % n for n in range(1000)]


def about(client):
    assert client.dbsize() > 1000
    assert client.info()["maxmemory"] == 64 << 20
    assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
    assert client.client_setname("me") and client.client_getname() in ("me", b"me")
    try:
        client.lpush("l", 1)
    except redis.ResponseError as error:
        assert "unknown command" in str(error)
    else:
        raise AssertionError("there are no lists")


def at_once(url, seed):
    client, rng = redis.Redis.from_url(url), random.Random(seed)
    for _ in range(100):
        key = f"w{rng.randrange(30)}"
        if rng.random() < 0.5:
            value = os.urandom(rng.randrange(200_000))
            client.set(key, hashlib.sha256(value).digest() + value)
        else:
            got = client.get(key)
            assert got is None or hashlib.sha256(got[32:]).digest() == got[:32], key


def main():
    url = sys.argv[1]
    for version in (2, 3):
        client = redis.Redis.from_url(url, protocol=version)
        strings(client)
        batches(client)
        about(client)
    failed = []

    def guarded(seed):
        try:
            at_once(url, seed)
        except Exception as error:  # told below: a thread's end says nothing
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    print(f"redis {redis.__version__}: strings, batches, versions 2 and 3, threads")


main()
