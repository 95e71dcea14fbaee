"""The face of all forms of `pack` and `unpack`: what may be asked, and the checks that all of them make.

    pack     slots of a pool -> records, encoded; says which records must not be stored
    unpack   records -> slots, by groups of layers, one record to as many slots as wanted

Everything is queued on the current stream of the pool's device and nothing waits for it. Who calls orders the streams:
`pack` behind the writer of the slots, `unpack` behind the arrival of the bytes and behind the last use of the slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from sglang_histate.config import CheckpointDtype

from .table import ALIGNMENT_BYTES, PoolTable, RecordForm

# What a record's flag says; 0 is a record that may be stored. `csrc/index.cuh` has the same bits.
NOT_FINITE = 1
NO_SUCH_SLOT = 2

Slots = Sequence[int] | torch.Tensor


class Kernels(ABC):
    """One form of the two operations. `reason` says why it is this one."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason

    def pack(
        self,
        pool: PoolTable,
        slots: Slots,
        records: torch.Tensor,
        encoding: CheckpointDtype,
        *,
        flags: torch.Tensor | None = None,
        most_blocks: int = 0,
    ) -> torch.Tensor:
        """Write slot i of `slots` to ``records[i]`` (uint8 ``[n, >= record bytes]``) and return the flags, int32 ``[n]``.

        `slots` may be numbers, or an integer tensor on the host or on the pool's device; those on the device are read
        there, when it is their turn. `flags` is where to put the flags, else a new tensor on the pool's device. A record
        whose flag is not 0 holds a NaN or an infinity (`NOT_FINITE`), has a number that the encoding makes infinite
        (the same), or nothing at all (`NO_SUCH_SLOT`); it must never be stored. `most_blocks` bounds how much of the
        GPU is taken, 0 is all of it. Records may be pinned host memory.

        Raises:
            ValueError: records that are too small or not on 16 bytes, slots that the pool does not have (those on the
                device are checked there), an encoding that the states do not have.
        """
        form = _form_of(pool, records, encoding)
        wanted = _slot_tensor(pool, slots)
        count = len(wanted)
        if len(records) != count:
            raise ValueError(f"{count} slots cannot be packed into {len(records)} records")
        if flags is None:
            flags = torch.empty(count, dtype=torch.int32, device=pool.device)
        elif flags.shape != (count,) or flags.dtype is not torch.int32:
            raise ValueError(f"flags are int32 [{count}], not {flags.dtype} {list(flags.shape)}")
        if count:
            self._pack(pool, form, wanted, records, flags, most_blocks)
        return flags

    def unpack(
        self,
        records: torch.Tensor,
        slots: Slots,
        pool: PoolTable,
        layers: range | None,
        encoding: CheckpointDtype,
        *,
        sources: Sequence[int] | None = None,
        most_blocks: int = 0,
    ) -> None:
        """Write some layers of `records` (uint8 ``[n, >= record bytes]``) to slots; None means all layers.

        Slot i gets record ``sources[i]``. Without `sources` it gets record i, or all slots get the only record there is.
        Only the bytes of those layers are read. A slot on the device that the pool does not have ends the process:
        a request would go on from a stale state.

        Raises:
            ValueError: as in `pack`, and layers or records that are not there, or one slot twice.
        """
        form = _form_of(pool, records, encoding)
        wanted = _slot_tensor(pool, slots)
        of = _sources(sources, len(wanted), len(records))
        layers = range(pool.layers) if layers is None else layers
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= pool.layers:
            raise ValueError(f"{layers} is no group of a pool's {pool.layers} layers")
        if wanted.device.type == "cpu" and len(set(wanted.tolist())) != len(wanted):
            raise ValueError("a slot cannot get two records")
        if len(wanted):
            self._unpack(pool, form, wanted, records, of, layers, most_blocks)

    @abstractmethod
    def _pack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        flags: torch.Tensor,
        most_blocks: int,
    ) -> None: ...

    @abstractmethod
    def _unpack(
        self,
        pool: PoolTable,
        form: RecordForm,
        slots: torch.Tensor,
        records: torch.Tensor,
        sources: list[int],
        layers: range,
        most_blocks: int,
    ) -> None: ...


def _form_of(pool: PoolTable, records: torch.Tensor, encoding: CheckpointDtype) -> RecordForm:
    form = pool.form(encoding)
    if records.dim() != 2 or records.dtype is not torch.uint8 or records.stride(1) != 1:
        raise ValueError(f"records are uint8 [n, bytes], not {records.dtype} {list(records.shape)}")
    if records.shape[1] < form.record_bytes:
        raise ValueError(
            f"records of {records.shape[1]} bytes are too small: a state takes {form.record_bytes}"
        )
    if records.data_ptr() % ALIGNMENT_BYTES or (len(records) > 1 and records.stride(0) % ALIGNMENT_BYTES):
        raise ValueError(f"records must begin on {ALIGNMENT_BYTES} bytes")
    return form


def _slot_tensor(pool: PoolTable, slots: Slots) -> torch.Tensor:
    """Return int64 ``[n]``, on the host or on the pool's device."""
    wanted = torch.as_tensor(slots)
    if wanted.dim() != 1 or (len(wanted) and (wanted.is_floating_point() or wanted.dtype is torch.bool)):
        raise ValueError(f"slots are integers [n], not {wanted.dtype} {list(wanted.shape)}")
    wanted = wanted.to(torch.int64).contiguous()
    if wanted.device.type != "cpu":
        if wanted.device != pool.device:
            raise ValueError(f"slots on {wanted.device} name nothing on {pool.device}")
        return wanted
    if len(wanted) and not (int(wanted.min()) >= 0 and int(wanted.max()) < pool.slots):
        raise ValueError(f"slots {wanted.tolist()} are not all in a pool of {pool.slots}")
    return wanted


def _sources(sources: Sequence[int] | None, count: int, records: int) -> list[int]:
    if sources is None:
        if records not in (1, count):
            raise ValueError(f"{records} records for {count} slots: `sources` must say which slot gets which")
        return list(range(count)) if records == count else [0] * count
    if len(sources) != count:
        raise ValueError(f"{len(sources)} sources were given for {count} slots")
    if any(not 0 <= source < records for source in sources):
        raise ValueError(f"sources {list(sources)} are not all among {records} records")
    return list(sources)
