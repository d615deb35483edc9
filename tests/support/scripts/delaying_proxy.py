"""Passes TCP connections on, every byte so many seconds later, in each direction.

    delaying_proxy.py ADDRESS HOST:PORT SECONDS

Prints the port of ADDRESS at which it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def _send(late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    """An empty piece is the end."""
    clock = asyncio.get_running_loop().time
    while True:
        due, data = await late.get()
        await asyncio.sleep(due - clock())
        if not data:
            break
        writer.write(data)
        await writer.drain()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    sending = asyncio.create_task(_send(late, writer))
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            late.put_nowait((asyncio.get_running_loop().time() + delay, data))
    late.put_nowait((asyncio.get_running_loop().time() + delay, b""))
    with contextlib.suppress(OSError):
        await sending
    writer.close()


async def main(address: str, target: str, delay: float) -> None:
    host, _, port = target.rpartition(":")

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay)
        try:
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_pass_on(reader, to_writer, delay), _pass_on(to_reader, writer, delay))

    server = await asyncio.start_server(accept, address, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
