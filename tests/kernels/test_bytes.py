"""The kernels' own code, run on the CPU, against the torch reference: bytes, flags, canaries, fan-out, layer groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.face import NO_SUCH_SLOT, NOT_FINITE
from kernels.reference import TorchKernels
from sglang_histate.config import CheckpointDtype

from .pools import POISON, Shape, empty, filled, shapes

REFERENCE = TorchKernels("the oracle")
QWEN_TP8 = Shape(layers=3, slots=4, temporal=(4, 128, 128), conv=(1024, 3))
FEW = settings(max_examples=40)
ENCODINGS = pytest.mark.parametrize("encoding", list(CheckpointDtype))


@pytest.fixture(params=["host_kernels", "c_kernels"])
def kernels(request):
    return request.getfixturevalue(request.param)


def records(count: int, size: int) -> torch.Tensor:
    """Poisoned records with a canary behind each."""
    return torch.full((count, size + 16), POISON, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def round_trip(kernels, data, shape: Shape, encoding: CheckpointDtype) -> None:
    pool = filled(shape, data.draw(st.integers(0, 1 << 30)), top=10.0 ** data.draw(st.integers(-44, 30)))
    slots = data.draw(st.lists(st.integers(0, shape.slots - 1), min_size=1, max_size=6))
    size = pool.form(encoding).record_bytes
    wanted, got = records(len(slots), size), records(len(slots), size)
    most = data.draw(st.integers(0, 5))
    wanted_flags = REFERENCE.pack(pool, slots, wanted, encoding)
    flags = kernels.pack(pool, slots, got, encoding, most_blocks=most)
    assert flags.tolist() == wanted_flags.tolist()
    finite = flags == 0  # of the others only the flag counts
    assert torch.equal(got[finite], wanted[finite]) and (got[:, size:] == POISON).all()

    targets = data.draw(
        st.lists(st.integers(0, shape.slots - 1), min_size=1, max_size=shape.slots, unique=True)
    )
    sources = [data.draw(st.integers(0, len(slots) - 1)) for _ in targets]
    first = data.draw(st.integers(0, shape.layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, shape.layers)))
    (wanted_pool, wanted_memory), (got_pool, got_memory) = empty(shape), empty(shape)
    REFERENCE.unpack(wanted, targets, wanted_pool, layers, encoding, sources=sources)
    kernels.unpack(wanted, targets, got_pool, layers, encoding, sources=sources, most_blocks=most)
    for wanted_bytes, got_bytes in zip(wanted_memory, got_memory, strict=True):
        assert torch.equal(wanted_bytes, got_bytes)  # what lies between the states too


@given(data=st.data())
@FEW
def test_native_bytes(host_kernels, data) -> None:
    round_trip(host_kernels, data, data.draw(shapes()), CheckpointDtype.NATIVE)


@given(data=st.data())
@FEW
def test_bf16_bytes(host_kernels, data) -> None:
    round_trip(host_kernels, data, data.draw(shapes(CheckpointDtype.BF16)), CheckpointDtype.BF16)


@given(data=st.data())
@FEW
def test_int8_bytes(host_kernels, data) -> None:
    round_trip(host_kernels, data, data.draw(shapes(CheckpointDtype.INT8)), CheckpointDtype.INT8)


@ENCODINGS
def test_a_rank_of_qwen35_9b(kernels, encoding) -> None:
    pool = filled(QWEN_TP8, seed=3)
    size = pool.form(encoding).record_bytes
    wanted, got = records(3, size), records(3, size)
    REFERENCE.pack(pool, [3, 0, 1], wanted, encoding)
    assert kernels.pack(pool, torch.tensor([3, 0, 1], dtype=torch.int32), got, encoding).tolist() == [0, 0, 0]
    assert torch.equal(got, wanted)
    (wanted_pool, _), (got_pool, _) = empty(QWEN_TP8), empty(QWEN_TP8)
    REFERENCE.unpack(wanted[1:2], [2, 0, 1], wanted_pool, None, encoding)
    kernels.unpack(got[1:2], [2, 0, 1], got_pool, None, encoding)  # one record to three slots
    assert same_bits(got_pool.temporal, wanted_pool.temporal) and same_bits(got_pool.conv, wanted_pool.conv)
    if encoding is CheckpointDtype.NATIVE:
        assert torch.equal(got_pool.temporal[:, 2], pool.temporal[:, 0])


@ENCODINGS
def test_a_model_without_windows(kernels, encoding) -> None:
    shape = Shape(layers=2, slots=3, temporal=(2, 5, 6), conv=(0, 3))
    pool = filled(shape, seed=10)
    size = pool.form(encoding).record_bytes
    wanted, got = records(2, size), records(2, size)
    REFERENCE.pack(pool, [2, 0], wanted, encoding)
    assert kernels.pack(pool, [2, 0], got, encoding).tolist() == [0, 0] and torch.equal(got, wanted)
    (wanted_pool, wanted_memory), (got_pool, got_memory) = empty(shape), empty(shape)
    REFERENCE.unpack(wanted, [1, 2], wanted_pool, None, encoding)
    kernels.unpack(wanted, [1, 2], got_pool, None, encoding)
    assert torch.equal(wanted_memory[0], got_memory[0])


@ENCODINGS
def test_more_slots_than_one_launch_takes(kernels, encoding) -> None:
    shape = Shape(layers=1, slots=150, temporal=(1, 3, 4), conv=(5, 3))
    pool = filled(shape, seed=4)
    slots = list(range(149, -1, -1))
    size = pool.form(encoding).record_bytes
    wanted, got = records(150, size), records(150, size)
    REFERENCE.pack(pool, slots, wanted, encoding)
    kernels.pack(pool, slots, got, encoding)
    assert torch.equal(got, wanted)
    sources = [(7 * i) % 150 for i in range(150)]
    (wanted_pool, wanted_memory), (got_pool, got_memory) = empty(shape), empty(shape)
    REFERENCE.unpack(wanted, slots, wanted_pool, None, encoding, sources=sources)
    kernels.unpack(wanted, slots, got_pool, None, encoding, sources=sources)
    assert all(torch.equal(a, b) for a, b in zip(wanted_memory, got_memory, strict=True))


@ENCODINGS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temporal", [(2, 5, 6), (1, 128, 128)])
def test_what_is_not_finite_is_flagged_wherever_it_is(host_kernels, encoding, bad, temporal) -> None:
    shape = Shape(layers=2, slots=3, temporal=temporal, conv=(3, 3))
    size = filled(shape, 0).form(encoding).record_bytes
    numbers = temporal[0] * temporal[1] * temporal[2]
    pool = filled(shape, seed=5)
    state, window = pool.temporal[1, 2].view(-1), pool.conv[1, 2].view(-1)
    for piece, places in ((state, [*range(0, numbers, numbers // 5), numbers - 1]), (window, range(9))):
        for place in places:
            before = piece[place].item()
            piece[place] = bad
            for form in (host_kernels, REFERENCE):
                flags = form.pack(pool, [0, 2, 1], records(3, size), encoding)
                assert flags.tolist() == [0, NOT_FINITE, 0], (form.name, place)
            piece[place] = before


@pytest.mark.parametrize("encoding", [CheckpointDtype.BF16, CheckpointDtype.INT8])
def test_a_number_that_the_encoding_makes_infinite_is_flagged(kernels, encoding) -> None:
    shape = Shape(layers=1, slots=1, temporal=(1, 4, 4), conv=(3, 3))
    for number in (torch.finfo(torch.float32).max, 3.39e38, 3.3e38):
        pool = filled(shape, seed=6)
        pool.temporal[0, 0, 0, 1, 2] = number
        size = pool.form(encoding).record_bytes
        wanted, got = records(1, size), records(1, size)
        flags = kernels.pack(pool, [0], got, encoding)
        assert flags.tolist() == REFERENCE.pack(pool, [0], wanted, encoding).tolist()
        back, _ = empty(shape)
        REFERENCE.unpack(wanted, [0], back, None, encoding)
        assert bool(flags[0]) == (not torch.isfinite(back.temporal).all())


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_flags_look_at_each_dtype_of_states_and_windows(kernels, kind) -> None:
    shape = Shape(layers=1, slots=1, temporal=(1, 3, 5), conv=(3, 3), temporal_dtype=kind, conv_dtype=kind)
    largest = torch.finfo(kind).max
    for piece in ("temporal", "conv"):
        for number, flag in ((largest, 0), (-largest, 0), (torch.nan, NOT_FINITE), (torch.inf, NOT_FINITE)):
            pool = filled(shape, seed=7)
            getattr(pool, piece).view(-1)[-1] = number
            got = records(1, pool.form(CheckpointDtype.NATIVE).record_bytes)
            assert kernels.pack(pool, [0], got, CheckpointDtype.NATIVE).tolist() == [flag], (piece, number)


@ENCODINGS
def test_slots_read_on_the_device_are_checked_there(c_kernels, encoding) -> None:
    """The path of slots on a device, whose numbers the host never sees."""
    import ctypes

    from kernels.compiled import ENCODINGS as NUMBERS
    from kernels.native import Pool

    shape = Shape(layers=2, slots=3, temporal=(2, 5, 6), conv=(3, 3))
    pool = filled(shape, seed=8)
    size = pool.form(encoding).record_bytes
    wanted, got = records(4, size), records(4, size)
    slots = torch.tensor([2, 3, -1, 0])
    flags = torch.full((4,), 77, dtype=torch.int32)
    code = c_kernels.library.histate_pack(
        *(ctypes.byref(Pool.of(pool)), slots.data_ptr(), 1, 4, got.data_ptr(), got.stride(0)),
        *(flags.data_ptr(), NUMBERS[encoding], 0, None),
    )
    assert code == 0 and flags.tolist() == [0, NO_SUCH_SLOT, NO_SUCH_SLOT, 0]
    REFERENCE.pack(pool, [2, 0], wanted[:2], encoding)
    assert torch.equal(got[[0, 3]], wanted[:2]) and (got[[1, 2]] == POISON).all()


def test_zero_channels_have_scale_zero(kernels) -> None:
    shape = Shape(layers=1, slots=1, temporal=(1, 128, 128), conv=(3, 3))
    pool = filled(shape, seed=9)
    pool.temporal[0, 0, 0, :, 17] = 0.0
    pool.temporal[0, 0, 0, ::2, 18] = -0.0
    form = pool.form(CheckpointDtype.INT8)
    got = records(1, form.record_bytes)
    assert kernels.pack(pool, [0], got, CheckpointDtype.INT8).tolist() == [0]
    scales = got[0, form.part_offsets[1] :][: 128 * 4].view(torch.float32)
    assert scales[17] == 0 and (scales != 0).sum() == 127
    back, _ = empty(shape)
    kernels.unpack(got, [0], back, None, CheckpointDtype.INT8)
    assert (back.temporal[0, 0, 0, :, 17] == 0).all()


def test_products_with_the_inverse_are_true_divisions(host_kernels) -> None:
    """Every number next to a tie, for scales of all kinds: the largest mantissa is the one where the method is weakest."""
    exponents = torch.tensor(
        [-149, -140, -126, -100, -81, -79, -3, 0, 5, 79, 81, 110, 120], dtype=torch.float64
    )
    mantissas = torch.cat(
        [torch.tensor([1.0, 2 - 2.0**-23, 1 + 2.0**-23, 1.5, 2 - 2.0**-22]), torch.rand(60) + 1]
    )
    scales = (mantissas.double()[:, None] * 2.0**exponents).flatten().float()
    scales = scales[(scales > 0) & (scales < 2.0**120)]
    ties = (torch.arange(127) + 0.5).double()
    near = (ties[:, None] * scales.double()).float()  # [127, C]
    rows = [near]
    for direction in (-torch.inf, torch.inf):
        step = near
        for _ in range(3):
            step = torch.nextafter(step, torch.full_like(step, direction))
            rows.append(step)
    state = torch.cat([torch.cat(rows), (scales.double() * 127).float()[None]])
    state = torch.cat([state, -state])
    shape = Shape(layers=1, slots=1, temporal=(1, *state.shape), conv=(1, 1))
    pool, _ = empty(shape)
    pool.temporal.copy_(state)
    pool.conv.zero_()
    size = pool.form(CheckpointDtype.INT8).record_bytes
    wanted, got = records(1, size), records(1, size)
    REFERENCE.pack(pool, [0], wanted, CheckpointDtype.INT8)
    assert host_kernels.pack(pool, [0], got, CheckpointDtype.INT8).tolist() == [0]
    assert torch.equal(got, wanted)
