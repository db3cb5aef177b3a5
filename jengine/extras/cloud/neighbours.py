"""Copies on the disks of other hosts: who keeps whose copies, and the collective that sends their
files.

All processes take part in an exchange, in the main thread and in the same order, since a process
that does not would let the others wait. The bytes of a copy travel in pieces of equal size: first
the names and sizes of its files, then their contents.
"""

import collections
import functools
import logging
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.checkpoint import commit
from jengine.checkpoint.manifest import MANIFEST, validate_checkpoint
from jengine.config.json_codec import decode, encode
from jengine.config.storage import StorageError, list_files, sync

_PIECE = 2**24  # bytes; each device that takes part holds two of them
_LEAST = 2**12  # bytes; few sizes mean few programs
_LENGTH = struct.Struct("<Q")  # of the names and sizes
_AXIS = "process"
_UNSENT = "A local copy could not be sent to another host"

Pairs: TypeAlias = tuple[
    tuple[int, int], ...
]  # processes that send, each with the one that gets it

_LOGGER = logging.getLogger("jengine")


def choose_keepers(places: Sequence[tuple[str, str]], neighbours: int) -> list[Pairs]:
    """Return which process keeps whose copies: for each neighbour pairs (owner, keeper).

    A keeper is on another host than the owner, so that one lost host leaves each copy somewhere.
    Where all processes are on one host, those with other directories count as other hosts. With
    different numbers of processes on the hosts a process may be without a keeper.

    Args:
      places: host name and directory of each process.
      neighbours: keepers for each copy, if there are as many other hosts.

    >>> choose_keepers([("a", "/disk"), ("a", "/disk"), ("b", "/disk"), ("b", "/disk")], 1)
    [((0, 2), (1, 3), (2, 0), (3, 1))]
    """
    hosts = [host for host, _ in places]
    if len(set(hosts)) == 1:
        hosts = [directory for _, directory in places]
    count = len(hosts)
    # Processes of a host stand side by side in the ring
    ring = sorted(range(count), key=lambda process: hosts.index(hosts[process]))

    def pair(distance: int) -> Pairs:
        pairs = ((ring[i], ring[(i + distance) % count]) for i in range(count))
        return tuple(
            sorted((owner, keeper) for owner, keeper in pairs if hosts[owner] != hosts[keeper])
        )

    # With as many processes on each host this is their number: process i of the next host
    step = max(range(1, count + 1), key=lambda distance: len(pair(distance)))
    return [
        pair(step * neighbour) for neighbour in range(1, min(neighbours, len(set(hosts)) - 1) + 1)
    ]


class Packed(NamedTuple):
    """Files of a copy as one sequence of bytes.

    Attributes:
      header: names and sizes.
      files: paths in this order.
      size: of all, in bytes.
    """

    header: bytes = b""
    files: tuple[Path, ...] = ()
    size: int = 0


def pack(copy: Path) -> Packed:
    """Return the files of a copy for `exchange`, which reads them; nothing if that cannot be."""
    try:
        sizes = {name: info.size for name, info in list_files(copy).items()}
    except (OSError, StorageError) as error:
        _LOGGER.warning(f"{_UNSENT}: {error}")
        return Packed()
    names = sorted(sizes, key=lambda name: (name == MANIFEST, name))  # the seal comes last
    text = encode([(name, sizes[name]) for name in names]).encode()
    header = _LENGTH.pack(len(text)) + text
    return Packed(header, tuple(copy / name for name in names), len(header) + sum(sizes.values()))


def unpack(content: memoryview, copy: Path, run: str) -> None:
    """Write a copy that `exchange` returned, with verified checksums, in the place of one with the
    same name.

    Raises:
      OSError, StorageError: it cannot be written, or other bytes have arrived.
    """
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    incoming = Path(commit.find_incoming(copy))
    try:
        commit.begin(copy, run)
        for name, size in decode(bytes(content[_LENGTH.size : start])):
            path = incoming / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[start : start + size])
            sync(path)
            start += size
        if (problem := validate_checkpoint(incoming, checksums=True)) is not None:
            raise OSError(f"{copy} is not what was sent: {problem}")
        commit.finish(copy)
    except Exception:
        commit.abandon(copy)
        raise


def exchange(pairs: Pairs, packed: Packed, sizes: Sequence[int]) -> memoryview | None:
    """Send what each process has packed to the one that stands beside it in `pairs`.

    Args:
      pairs: equal on all processes; each sends to at most one and gets from at most one.
      packed: what this process sends.
      sizes: `packed.size` of each process.

    Returns:
      The bytes that this process got, in memory; None if it got none.
    """
    longest = max((sizes[sender] for sender, _ in pairs), default=0)
    if longest == 0:
        return None
    index = jax.process_index()
    size = next((sizes[sender] for sender, receiver in pairs if receiver == index), 0)
    content = np.empty(size, np.uint8)
    piece = min(_PIECE, max(_LEAST, 1 << (longest - 1).bit_length()))
    is_sender = any(sender == index for sender, _ in pairs)
    pieces = _read(packed, piece) if is_sender else iter(())
    for start in range(0, longest, piece):
        own = np.zeros(piece, np.uint8)
        data = next(pieces, b"")
        own[: len(data)] = np.frombuffer(data, np.uint8)
        received = _permute(own, pairs)
        content[start : start + piece] = received[: max(0, size - start)]
    return content.data if size else None


def _read(packed: Packed, piece: int) -> Iterator[bytes | bytearray]:
    """Yield the bytes in pieces, fewer if a file cannot be read: the receiver will notice."""
    buffer = bytearray(packed.header)
    try:
        for path in packed.files:
            with open(path, "rb") as file:
                while data := file.read(max(0, piece - len(buffer))):
                    buffer += data
                    if len(buffer) == piece:
                        yield buffer
                        buffer = bytearray()
    except OSError as error:
        _LOGGER.warning(f"{_UNSENT}: {error}")
    yield buffer


def _permute(own: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return the bytes from the process that sends to this one; zeros if none does."""
    mesh, send = _compile(pairs)
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
    # Also if the program has set a mesh of its own
    with jax.set_mesh(mesh):
        sent = send(jax.make_array_from_process_local_data(sharding, own))
    return np.asarray(sent.addressable_data(0))


@functools.cache
def _compile(pairs: Pairs) -> tuple[Mesh, Any]:
    devices: dict[int, Any] = {}
    for device in jax.devices():
        devices.setdefault(device.process_index, device)
    mesh = Mesh(
        np.array([devices[process] for process in sorted(devices)]),
        (_AXIS,),
        axis_types=(AxisType.Auto,),
    )
    spec = PartitionSpec(_AXIS)
    send = jax.shard_map(
        lambda own: jax.lax.ppermute(own, _AXIS, pairs), mesh=mesh, in_specs=spec, out_specs=spec
    )
    return mesh, jax.jit(send)


def split_into_rounds(pairs: Sequence[tuple[int, int]]) -> list[Pairs]:
    """Return the pairs in groups in which each process sends at most once.

    >>> split_into_rounds([(0, 1), (0, 2), (3, 4)])
    [((0, 1), (3, 4)), ((0, 2),)]
    """
    rounds: dict[int, list[tuple[int, int]]] = {}
    sent: collections.Counter[int] = collections.Counter()
    for sender, receiver in pairs:
        rounds.setdefault(sent[sender], []).append((sender, receiver))
        sent[sender] += 1
    return [tuple(group) for group in rounds.values()]
