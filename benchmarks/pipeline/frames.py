"""Frames between two processes of one machine: over a socket, or in memory that they share.

Each round a frame goes there and another one back, by both ways in turn. Wall seconds are the
least of all rounds, seconds of processors the median of both processes' together.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time

import torch

from shoal.pipeline.links import Links
from shoal.pipeline.packing import Packer

WAYS = {"socket": False, "shared": True}


class Meeting:
    """One end of both ways."""

    def __init__(self, sockets: list[socket.socket], peer: int) -> None:
        self.came, self.peer = threading.Event(), peer
        self.links = {
            way: Links({peer: sock}, Packer(), self.came.set, torch.device("cpu"), shares=shares)
            for (way, shares), sock in zip(WAYS.items(), sockets, strict=True)
        }

    def take(self, way: str) -> torch.Tensor:
        while not self.links[way].has(self.peer, 0):
            assert not self.links[way].gone(self.peer)
            self.came.wait(0.5)
            self.came.clear()
        return self.links[way].take(self.peer, 0)

    def give(self, way: str, tensor: torch.Tensor) -> None:
        self.links[way].send(self.peer, 0, tensor)


def processors_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def answer(descriptors: list[int], rounds: int, sizes: list[int]) -> None:
    there = Meeting([socket.socket(fileno=number) for number in descriptors], 0)
    for _ in sizes:
        for _ in range(rounds):
            for way in WAYS:
                begun = processors_s()
                tensor = there.take(way)
                there.give(way, tensor)
                there.give(way, torch.tensor(processors_s() - begun))
    for links in there.links.values():
        links.close()


def ask(rounds: int, sizes: list[int]) -> dict[str, dict[str, dict[str, float]]]:
    pairs = [socket.socketpair() for _ in WAYS]
    theirs = [theirs.fileno() for _, theirs in pairs]
    words = [*map(str, theirs), str(rounds), *map(str, sizes)]
    with subprocess.Popen([sys.executable, __file__, "--answer", *words], pass_fds=theirs):
        for _, other in pairs:
            other.close()
        here = Meeting([ours for ours, _ in pairs], 1)
        return {f"{size} MiB": one_size(here, rounds, size) for size in sizes}


def one_size(here: Meeting, rounds: int, size: int) -> dict[str, dict[str, float]]:
    tensor, found = torch.ones(size * 2**20, dtype=torch.uint8), {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, times in found.items():
            used, begun = processors_s(), time.perf_counter()
            here.give(way, tensor)
            assert torch.equal(here.take(way), tensor)
            wall = time.perf_counter() - begun
            times.append((wall, processors_s() - used + float(here.take(way))))
    return {
        way: {
            "wall_ms": 1e3 * min(wall for wall, _ in times),
            "processors_ms": 1e3 * statistics.median(used for _, used in times[2:]),
        }
        for way, times in found.items()
    }


def main() -> None:
    if sys.argv[1:2] == ["--answer"]:
        one, other, rounds, *sizes = map(int, sys.argv[2:])
        answer([one, other], rounds, sizes)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16], help="MiB")
    asked = parser.parse_args()
    print(json.dumps(ask(asked.rounds, asked.sizes), indent=1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
