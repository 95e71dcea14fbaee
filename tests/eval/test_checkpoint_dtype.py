"""The comparison of encodings: what is read from a slab file, what a line says, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eval.checkpoint_dtype import speed
from eval.checkpoint_dtype.__main__ import main
from eval.checkpoint_dtype.answers import Answer, Case, NotRestored, cases, computed, restored
from eval.checkpoint_dtype.comparison import HEADER, Pair, cells, line
from eval.checkpoint_dtype.states import StatesError, newest, relative_error
from sglang_histate.adapter.state_layout import StateLayout
from sglang_histate.config import CheckpointDtype
from sglang_histate.store import CheckpointStore


def store_one(root: Path, encoding: CheckpointDtype, states: torch.Tensor, positions: list[int]) -> None:
    """Write `states` ``[L, HV, V, K]`` at each position, the number of the write added to them."""
    layout = StateLayout(
        tuple(range(len(states))), tuple(states.shape[1:]), torch.float32, (5, 3), torch.bfloat16, encoding
    )
    record_layout = layout.record_layout()
    store = CheckpointStore.open(
        roots=[root],
        allow_any_filesystem=True,
        fingerprint={"state": layout.identity()},
        rank_name="dp0-tp0of1-pp0of1",
        size_bytes=4096 + 8 * record_layout.slab_bytes,
        layout=record_layout,
        record_buffers=8,
    )
    for number, position in enumerate(positions):
        record = store.acquire_record()
        assert record is not None
        for state, views in zip(states + number, layout.record_views(record.payload), strict=True):
            for place, part in zip(views.temporal, layout.codec.encode(state[None]), strict=True):
                place.copy_(part[0])
            views.conv.zero_()
        store.put(number.to_bytes(32, "big"), position, record)
    store.close()


@pytest.mark.parametrize("encoding", list(CheckpointDtype))
def test_the_newest_state_at_a_position_is_decoded(tmp_path, encoding) -> None:
    states = torch.randn(3, 2, 4, 8)
    store_one(tmp_path, encoding, states, [512, 512, 1024])
    found = newest(tmp_path, 512)
    bound = {"native": 0.0, "bf16": 2**-8, "int8": 0.02}[encoding.value]
    assert relative_error(found.states, states + 1) <= bound
    temporal = {"native": 4 * 64, "bf16": 2 * 64, "int8": 64 + 4 * 16}[encoding.value]
    assert found.size_bytes == 3 * (temporal + 5 * 3 * 2)
    with pytest.raises(StatesError, match="no checkpoint at token 64"):
        newest(tmp_path, 64)


def test_a_folder_without_a_slab_file(tmp_path) -> None:
    with pytest.raises(StatesError, match="0 slab files"):
        newest(tmp_path, 512)


def test_the_figures_of_a_line() -> None:
    exact = Answer([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    pairs = [
        Pair(0.1, Answer([1, 2, 9, 4], [-1.0, -2.5, -3.0, -4.0]), exact),
        Pair(0.3, Answer([1, 2, 3, 4], [-1.0, -2.0, -3.1, -4.0]), exact),
    ]
    one = line("bf16", 512, 1000, pairs)
    assert (one.cases, one.answers_equal, one.first_difference) == (2, 1, 2)
    assert one.state_error_mean == pytest.approx(0.2) and one.state_error_max == 0.3
    assert one.logprob_error_max == 0.5 and one.logprob_error_mean == pytest.approx(0.6 / 8)
    assert one.tokens_equal == 7 / 8
    assert len(cells(one)) == len(HEADER) and cells(one)[-2:] == ["1/2", "2"]
    assert cells(line("native", 512, 1000, [Pair(0.0, exact, exact)]))[-1] == "none"


def test_prompts_are_the_same_each_time_and_part_behind_the_prefix() -> None:
    first, second = cases(512, 2, seed=1)
    assert cases(512, 2, seed=1) == [first, second] and first.prefix != second.prefix
    assert len(first.prefix) == 512 and first.turn[0] != first.first_turn[0]


class FakeServer:
    """Answers with as many cached tokens as it is told to."""

    def __init__(self, cached: int, checkpoint: int) -> None:
        self.cached, self.checkpoint = cached, checkpoint

    def flush(self) -> None:
        pass

    def generate(self, prompt, count, **fields):
        return {
            "output_ids": [7] * count,
            "meta_info": {
                "cached_tokens": self.cached,
                "cached_tokens_details": {"ssd_checkpoint": self.checkpoint},
                "input_token_logprobs": [[None, 0, None], *[[-1.0, 7, None]] * 9],
            },
        }


CASE = Case(512, [1] * 512, [2], [3])


def test_what_was_not_restored_is_not_measured() -> None:
    with pytest.raises(NotRestored, match="not used"):
        restored(FakeServer(512, 0), CASE, [7] * 4)
    with pytest.raises(NotRestored, match="were cached"):
        restored(FakeServer(448, 512), CASE, [7] * 4)
    assert restored(FakeServer(512, 512), CASE, [7] * 4) == Answer([7] * 4, [-1.0] * 4)
    with pytest.raises(NotRestored, match="flushed"):
        computed(FakeServer(64, 0), CASE, 4)
    assert computed(FakeServer(0, 0), CASE, 4) == Answer([7] * 4, [-1.0] * 4)


def test_a_depth_off_the_interval_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--depths", "100"])
    assert "not a multiple of 512" in capsys.readouterr().err


def test_the_times_of_a_small_checkpoint(capsys) -> None:
    assert speed.main(["--layers", "1", "--runs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["encoding", "native", "bf16", "int8"]
    assert [float(line.split()[1]) for line in lines[1:]] == [2.0, 1.0, 0.6]
