"""Networks of a given bandwidth and delay on one Linux machine: a network namespace for each process.

The namespaces are joined by a thread that passes packets from one tunnel device to another after a delay (the kernel's
own means for that, netem, is often not there); `tc` limits the rate of each device. Making them needs root.
"""

import ctypes
import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# linux/if_tun.h and sched.h
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
DEVICE, MTU = "lln0", 60_000
ADDRESS = (10, 219, 0)


def address(place: int) -> str:
    return ".".join(map(str, (*ADDRESS, place + 1)))


@contextmanager
def namespaces(number: int, *, megabits: float, delay: float) -> Iterator[list[list[str]]]:
    """Namespaces with `address(0)`, `address(1)`, ...; yields the arguments that run a command in each.

    Args:
        megabits: a second that each can send.
        delay: milliseconds from one to another.

    Raises:
        PermissionError, OSError: this process may not make network namespaces, or the system cannot.
    """
    if os.geteuid() != 0:
        raise PermissionError("network namespaces need root; leave --networks out to measure this machine alone")
    names = [f"lln-bench-{os.getpid()}-{i}" for i in range(number)]
    made: list[str] = []
    devices: list[int] = []
    stopped = threading.Event()
    hub = threading.Thread(target=_pass_on, args=(devices, delay / 1e3, stopped), daemon=True)
    try:
        for place, name in enumerate(names):
            _run("ip", "netns", "add", name)
            made.append(name)
            opened = threading.Thread(target=lambda name=name: devices.append(_open_device(name)))
            opened.start()
            opened.join()
            if len(devices) != place + 1:
                raise OSError("a tunnel device (/dev/net/tun) cannot be made here")
            own = ("ip", "-n", name)
            _run(*own, "link", "set", "lo", "up")
            _run(*own, "addr", "add", f"{address(place)}/24", "dev", DEVICE)
            _run(*own, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "10000", "up")
            shape = ("rate", f"{megabits}mbit", "burst", str(4 * MTU), "limit", str(1000 * MTU))
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *shape)
        hub.start()
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        stopped.set()
        if hub.ident is not None:
            hub.join()
        for device in devices:
            os.close(device)
        for name in made:
            _run("ip", "netns", "del", name)


def _open_device(name: str) -> int:
    """A tunnel device in a namespace. Only the thread that calls this enters it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as place:
        if libc.setns(place.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def _pass_on(devices: list[int], delay: float, stopped: threading.Event) -> None:
    """Pass packets on to where they go, `delay` seconds after they come."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    with selectors.DefaultSelector() as selector:
        for device in devices:
            selector.register(device, selectors.EVENT_READ)
        while not stopped.is_set():
            now = time.monotonic()
            ready = selector.select(max(0.0, min(0.05, waiting[0][0] - now)) if waiting else 0.05)
            for key, _ in ready:
                packet = os.read(key.fd, MTU + 100)
                if packet[0] >> 4 == 4 and tuple(packet[16:19]) == ADDRESS and 0 < packet[19] <= len(devices):
                    number += 1  # keeps the order of packets that come at the same time
                    heapq.heappush(waiting, (time.monotonic() + delay, number, packet[19] - 1, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, place, packet = heapq.heappop(waiting)
                os.write(devices[place], packet)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{command[0]} is not installed; networks need the package iproute2") from error
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from error
