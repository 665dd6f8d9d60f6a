"""Stand-ins for ``ping`` and ``iperf3`` on hosts that have neither, for the shells of Mininet nodes.

Run as a script, never imported by the testbed: it must start fast (no imports beyond the standard library) and work in
whatever namespace its shell is in. Options and report lines are the common part of the real programs, so that Mininet's
own parsers and people's eyes find what they expect. The real programs are used where the host has them.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time

ICMP_ECHO_REPLY, ICMP_ECHO = 0, 8
PING_BYTES = 56
CHUNK_BYTES = 1 << 18
IPERF_PORT = 5201


def say(line: str) -> None:
    """A line on stdout, at once: somebody is watching."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parse(arguments: list[str], flags: str, values: str) -> tuple[dict[str, str], list[str]]:
    """Options as in getopt, but forgiving: -c1, -c 1, unknown options skipped."""
    options: dict[str, str] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if len(argument) > 1 and argument[0] == "-" and argument[1] in flags + values:
            letter, value = argument[1], argument[2:]
            if letter in values and not value and queue:
                value = queue.pop(0)
            options[letter] = value
        elif not argument.startswith("-"):
            rest.append(argument)
    return options, rest


def checksum(data: bytes) -> int:
    """The Internet checksum."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def bind_to(sock: socket.socket, where: str) -> None:
    """Bind to an address, or to a device."""
    try:
        sock.bind((socket.gethostbyname(where), 0))
    except OSError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, where.encode())


def echo_once(sock: socket.socket, address: str, sequence: int, patience_s: float) -> float | None:
    """One echo request; the round trip in milliseconds, None without an answer."""
    identity = os.getpid() & 0xFFFF
    payload = bytes(PING_BYTES)
    head = struct.pack("!BBHHH", ICMP_ECHO, 0, 0, identity, sequence)
    head = struct.pack("!BBHHH", ICMP_ECHO, 0, checksum(head + payload), identity, sequence)
    start = time.monotonic()
    sock.sendto(head + payload, (address, 0))
    while (left := start + patience_s - time.monotonic()) > 0:
        if not select.select([sock], [], [], left)[0]:
            break
        packet = sock.recv(2048)
        kind, _, _, got_identity, got_sequence = struct.unpack_from("!BBHHH", packet, (packet[0] & 15) * 4)
        if (kind, got_identity, got_sequence) == (ICMP_ECHO_REPLY, identity, sequence):
            return (time.monotonic() - start) * 1e3
    return None


def ping(arguments: list[str]) -> int:
    """``ping [-c count] [-W seconds] [-i seconds] [-I address or device] host``."""
    options, rest = parse(arguments, "qn", "cWiI")
    if not rest:
        sys.stderr.write("usage: ping [-c count] [-W timeout] [-i interval] [-I address or device] host\n")
        return 2
    address = socket.gethostbyname(rest[-1])
    count, interval = int(options.get("c", "0")), float(options.get("i", "1"))
    patience = float(options.get("W", "1"))
    sock = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    if "I" in options:
        bind_to(sock, options["I"])
    say(f"PING {rest[-1]} ({address}) {PING_BYTES}({PING_BYTES + 28}) bytes of data.")
    trips: list[float] = []
    sent, start = 0, time.monotonic()
    try:
        while not count or sent < count:
            if sent:
                time.sleep(interval)
            sent += 1
            try:
                trip = echo_once(sock, address, sent, patience)
            except OSError as error:
                say(f"ping: {error.strerror}")
                trip = None
            if trip is not None:
                trips.append(trip)
                say(f"{PING_BYTES + 8} bytes from {address}: icmp_seq={sent} ttl=64 time={trip:.3f} ms")
    except KeyboardInterrupt:
        say("")
    elapsed, loss = (time.monotonic() - start) * 1e3, 100 - 100 * len(trips) // max(sent, 1)
    say(f"--- {rest[-1]} ping statistics ---")
    say(f"{sent} packets transmitted, {len(trips)} received, {loss}% packet loss, time {elapsed:.0f}ms")
    if trips:
        mean = sum(trips) / len(trips)
        deviation = (sum((trip - mean) ** 2 for trip in trips) / len(trips)) ** 0.5
        say(f"rtt min/avg/max/mdev = {min(trips):.3f}/{mean:.3f}/{max(trips):.3f}/{deviation:.3f} ms")
    return 0 if trips else 1


def report(role: str, size: int, seconds: float) -> None:
    """The summary line of iperf3."""
    rate = size * 8 / seconds / 1e6 if seconds > 0 else 0.0
    say(f"[  5]   0.00-{seconds:.2f}   sec  {size / 1048576:.2f} MBytes  {rate:.1f} Mbits/sec                  {role}")


def serve(options: dict[str, str]) -> int:
    """``iperf3 -s``: take one client after the other, report what came in."""
    address, port = options.get("B", ""), int(options.get("p", IPERF_PORT))
    listener = socket.create_server((address, port))
    say(f"Server listening on {port}")
    buffer = bytearray(CHUNK_BYTES)
    while True:
        client, peer = listener.accept()
        say(f"Accepted connection from {peer[0]}, port {peer[1]}")
        total, start = 0, time.monotonic()
        while size := client.recv_into(buffer):
            total += size
        seconds = time.monotonic() - start
        client.sendall(struct.pack("!Qd", total, seconds))
        client.close()
        report("receiver", total, seconds)
        if "1" in options:
            return 0


def drive(options: dict[str, str]) -> int:
    """``iperf3 -c host``: send for -t seconds, then report what left and what the server says it received."""
    port, seconds = int(options.get("p", IPERF_PORT)), float(options.get("t", "10"))
    sock = socket.socket()
    if "w" in options:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, int(options["w"]))
    if "S" in options:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, int(options["S"], 0))
    if "B" in options:
        bind_to(sock, options["B"])
    try:
        sock.connect((socket.gethostbyname(options["c"]), port))
    except OSError as error:
        sys.stderr.write(f"iperf3: error - unable to connect to server: {error.strerror}\n")
        return 1
    say(f"Connecting to host {options['c']}, port {port}")
    data, total, start = bytes(CHUNK_BYTES), 0, time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        sock.settimeout(max(start + seconds - now, 0.001))
        try:
            total += sock.send(data)
        except TimeoutError:
            break
    elapsed = time.monotonic() - start
    sock.settimeout(None)
    sock.shutdown(socket.SHUT_WR)
    received = b""
    while len(received) < 16 and (more := sock.recv(16 - len(received))):
        received += more
    report("sender", total, elapsed)
    if len(received) == 16:
        report("receiver", *struct.unpack("!Qd", received))
    return 0


def iperf3(arguments: list[str]) -> int:
    """``iperf3 -s [-1]`` or ``iperf3 -c host``, with -p port, -B address or device, -t seconds, -w bytes, -S tos."""
    options, _ = parse(arguments, "s1", "cpBtwS")
    try:
        if "c" in options:
            return drive(options)
        if "s" in options:
            return serve(options)
    except KeyboardInterrupt:
        return 1
    sys.stderr.write("usage: iperf3 -s [-1] | -c host [-p port] [-B address or device] [-t seconds] [-S tos]\n")
    return 2


if __name__ == "__main__":
    sys.exit({"ping": ping, "iperf3": iperf3, "iperf": iperf3}[sys.argv[1]](sys.argv[2:]))
