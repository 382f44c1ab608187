"""Writes a FastAPI server with functions that stall, at random lines and under random names."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

HEAD = '''"""A server with functions that stall."""
import asyncio, json, os, re, socket, subprocess, threading, time
from fastapi import FastAPI, Request
app = FastAPI()
LOCK = threading.Lock()
SILENT = socket.create_server(("127.0.0.1", 0))
'''
TAIL = """
@app.get("/health")
async def health():
    return {}
@app.post("/usual")
async def usual(request: Request):
    await request.json()
    await asyncio.sleep(0.02)
    return {}
if __name__ == "__main__":
    import sys, uvicorn
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""


class Kind(NamedTuple):
    """A kind of stall. `function`: the source of what stalls, for `seconds`. `endpoint`: how a request comes to it."""

    function: str
    endpoint: str


_ON_LOOP = """
@app.post("/{path}")
async def {path}(request: Request):
    body = await request.json()
    {name}(body["seconds"], body["text"])
    return {{}}
"""
_IN_POOL = """
@app.post("/{path}")
def {path}(body: dict):
    {name}(body["seconds"], body["text"])
    return {{}}
"""
KINDS: Mapping[str, Kind] = {
    "sleep on the loop": Kind("    time.sleep(seconds)\n", _ON_LOOP),
    "subprocess on the loop": Kind('    subprocess.run(["sleep", str(seconds)], check=True)\n', _ON_LOOP),
    "network call on the loop": Kind(
        "    with socket.create_connection(SILENT.getsockname()) as asked:\n        asked.settimeout(seconds)\n"
        "        try:\n            asked.recv(100)\n        except TimeoutError:\n            pass\n",
        _ON_LOOP,
    ),
    "lock of another thread": Kind(
        "    with LOCK:\n        time.sleep(seconds)\n",
        """
def wait_{path}():
    with LOCK:
        pass
@app.post("/{path}")
def {path}(body: dict):
    threading.Thread(target={name}, args=(body["seconds"], body["text"])).start()
    time.sleep(0.02)
    wait_{path}()
    return {{}}
""",
    ),
    "slow regular expression": Kind(
        '    until = time.monotonic() + seconds\n    while time.monotonic() < until:\n        re.match(r"(a+)+b", "a" * 21)\n',
        _IN_POOL,
    ),
    "blocking write": Kind(
        "    read, write = os.pipe()\n    threading.Timer(seconds, lambda: os.read(read, 1 << 20)).start()\n"
        "    os.write(write, bytes(1 << 16))\n    os.write(write, text.encode())\n    os.close(write)\n",
        _ON_LOOP,
    ),
    "sleep in a callback": Kind(
        "    time.sleep(seconds)\n",
        """
@app.post("/{path}")
async def {path}(request: Request):
    body = await request.json()
    asyncio.get_running_loop().call_later(0.01, {name}, body["seconds"], body["text"])
    return {{}}
""",
    ),
    "slow tokenizer in a worker": Kind(
        "    until = time.monotonic() + seconds\n    tokens = []\n    while time.monotonic() < until:\n"
        '        tokens = [hash(word) % 1000 for word in (text * 50).split(" ")]\n    return tokens\n',
        """
@app.post("/{path}")
async def {path}(request: Request):
    body = await request.json()
    await asyncio.to_thread({name}, body["seconds"], body["text"])
    return {{}}
""",
    ),
    "slow query in a pool": Kind("    time.sleep(seconds)\n", _IN_POOL),
}
_VERBS = ("load", "find", "check", "render", "merge", "score", "build", "parse", "fetch", "rank")
_NOUNS = (
    "quota",
    "profile",
    "prompt",
    "index",
    "cache",
    "answer",
    "template",
    "session",
    "features",
    "history",
)


class Stalling(NamedTuple):
    """An injected stall: its path, the function that stalls, and the function that merely waits for it, if any."""

    kind: str
    path: str
    name: str
    waiter: str


def write_program(rng: random.Random, count: int) -> tuple[str, list[Stalling]]:
    """Returns the source of a server with so many stalls, each of a kind in turn, and the stalls."""
    names = rng.sample([f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS], count)
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(count)]
    rng.shuffle(kinds)
    stalls = [
        Stalling(kind, f"p{number}", name, f"wait_p{number}" if kind == "lock of another thread" else "")
        for number, (kind, name) in enumerate(zip(kinds, names))
    ]
    parts = [_write_stall(stall, rng) for stall in stalls]
    rng.shuffle(parts)
    return HEAD + "".join(parts) + TAIL, stalls


def _write_stall(stall: Stalling, rng: random.Random) -> str:
    kind = KINDS[stall.kind]
    filler = "".join(f"    step_{number} = {number}\n" for number in range(rng.randint(0, 6)))
    blank = "\n" * rng.randint(1, 9)
    function = f"{blank}def {stall.name}(seconds, text):\n{filler}{kind.function}"
    return function + kind.endpoint.format(path=stall.path, name=stall.name)
