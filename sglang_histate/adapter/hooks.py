"""What the patches call. Each function does nothing unless HiState's cache is the one in use.

Patches add calls to these functions and no logic of their own; see patches/histate.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any

from sglang_histate.policy.step import step_tokens

if TYPE_CHECKING:
    import torch

    from sglang_histate.adapter.capture import ForwardCapture


_STOCK_DETAILS = ("device", "host", "storage", "storage_backend")


def plan_capture(batch: Any) -> ForwardCapture | None:
    """``ScheduleBatch.prepare_for_extend``, at its end: what the coming forward pass has to capture."""
    plan = getattr(batch.tree_cache, "plan_capture", None)
    return None if plan is None else plan(batch.reqs)


def pending_capture(batch: Any) -> ForwardCapture | None:
    """``ForwardBatch.init_new``: the batch's capture, unless it was taken by an earlier forward pass."""
    capture = batch.histate_capture
    if capture is None or capture.finished or not batch.forward_mode.is_extend():
        return None
    return capture


def capture_inputs(backend: Any, layer: Any, forward_batch: Any, raw_inputs: torch.Tensor) -> None:
    """``GDNAttnBackend.forward_extend``, before the convolution overwrites its input."""
    capture = forward_batch.histate_capture
    if capture is None:
        return
    if not capture.prepared:
        prepare_sources(backend, forward_batch, raw_inputs.device)
    capture.capture_inputs(layer.layer_id, raw_inputs)


def prepare_sources(backend: Any, forward_batch: Any, device: torch.device) -> None:
    """Build the capture's index tensors, and FlashInfer's checkpoint plan where stock tracking did not ask for one."""
    lengths = [int(length) for length in forward_batch.extend_seq_lens_cpu]
    every = None
    if backend.kernel_dispatcher.extend_uses_state_checkpoints:
        every = _flashinfer_plan(backend.forward_metadata, lengths, device)
    forward_batch.histate_capture.prepare(lengths, device, every)


def _flashinfer_plan(metadata: Any, lengths: list[int], device: torch.device) -> int:
    """Ask FlashInfer for a state every n tokens of each sequence; n is the chunk of stock tracking. Returns n."""
    import torch
    from sglang.srt.runtime_context import mamba_cache_chunk_size

    if metadata.state_checkpoint_every_n_tokens:
        return int(metadata.state_checkpoint_every_n_tokens)
    every = int(mamba_cache_chunk_size())
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    starts[1:] = torch.cumsum(torch.tensor([length // every for length in lengths], dtype=torch.int64), dim=0)
    metadata.state_checkpoint_cu_starts = starts.to(device, non_blocking=True)
    metadata.num_state_checkpoints = int(starts[-1])
    metadata.state_checkpoint_every_n_tokens = every
    return every


def capture_states(
    layer: Any, forward_batch: Any, h: torch.Tensor | None, pool: torch.Tensor, slots: torch.Tensor
) -> None:
    """``GDNAttnBackend.forward_extend``, after the kernel: `h` its intermediate states, `pool` the written slots."""
    capture = forward_batch.histate_capture
    if capture is not None:
        capture.capture_states(layer.layer_id, h, pool, slots)


def finish_capture(forward_batch: Any) -> None:
    """``ModelRunner.forward``, at its end: planned == captured, or the server stops."""
    capture = forward_batch.histate_capture
    if capture is not None:
        capture.finish()


def chunk_grid(tree_cache: Any, stock_grid: int) -> int:
    """``PrefillAdder``: what a prefill chunk is cut to, in tokens, so that the next one starts where states can be named."""
    return lcm(stock_grid, getattr(tree_cache, "capture_grid", 1))


def step_budget(tree_cache: Any, left: int | None) -> int | None:
    """``PrefillAdder``: tokens of a step that any prompt may take; the rest, its tail, only a prompt that ends with it.

    None: nothing is chunked.
    """
    return left if left is None else left - getattr(tree_cache, "step_tail", 0)


def step_limit(tree_cache: Any, left: int | None, rest: int) -> int | None:
    """``PrefillAdder``: tokens that the next chunk of a prompt may have, of which `rest` are not computed yet."""
    tail = getattr(tree_cache, "step_tail", 0)
    return left if left is None or left <= 0 or not tail else step_tokens(rest, left, tail)


def request_arrived(tree_cache: Any, req: Any) -> None:
    """``Scheduler._add_request_to_queue``: start reading what the request will need while it waits."""
    arrived = getattr(tree_cache, "request_arrived", None)
    if arrived is not None:
        arrived(req)


def request_ready(tree_cache: Any, req: Any) -> bool:
    """``Scheduler._get_new_batch_prefill_raw``: False skips the request in this step."""
    ready = getattr(tree_cache, "request_ready", None)
    return True if ready is None else ready(req)


def scheduler_idle(scheduler: Any) -> None:
    """``Scheduler.on_idle``, first of all: time for what HiState does only then."""
    idle = getattr(scheduler.tree_cache, "scheduler_idle", None)
    if idle is not None:
        idle(scheduler)


def is_internal(tree_cache: Any, req: Any) -> bool:
    """``Scheduler.send_abort_output``: whether nobody waits for an answer to `req`."""
    internal = getattr(tree_cache, "is_internal", None)
    return False if internal is None else internal(req)


def add_cached_details(req: Any, details: dict[str, Any] | None) -> dict[str, Any] | None:
    """``get_cached_tokens_details``: what an answer says of the cache; `details` is None if nothing was reused."""
    state = getattr(req, "histate", None)
    if state is None or (details is None and state.details is None):
        return details
    reused = details or {"device": 0, "host": 0}
    return {**reused, "ssd_checkpoint": state.restored_from_ssd, **(state.details or {})}


def more_cached_details(details: dict[str, Any]) -> dict[str, Any]:
    """``cached_tokens_details_from_dict``: the fields of `details` that SGLang does not know."""
    return {name: value for name, value in details.items() if name not in _STOCK_DETAILS}


def add_internal_state(scheduler: Any, state: dict[str, Any], request: Any) -> None:
    """``get_internal_state``: HiState's own status under the key ``histate``, or the answer to a question of ours."""
    from sglang_histate.adapter import explain_routes, purge
    from sglang_histate.adapter.status import cache_status

    cache = scheduler.tree_cache
    answer = purge.answer(cache, request.rid) or explain_routes.answer(cache, request.rid)
    state["histate"] = answer or cache_status(cache)


def weights_change(scheduler: Any) -> None:
    """``SchedulerWeightUpdaterManager``: weights are about to be replaced, from a file or from memory."""
    tier = None if scheduler is None else getattr(scheduler.tree_cache, "tier", None)
    if tier is not None:
        tier.verification.trust.weights_change()


def install_routes(app: Any) -> None:
    """``http_server``: HiState's routes."""
    from sglang_histate.adapter.routes import install_routes as install

    install(app)


def group_flags(parser: Any) -> None:
    """``ServerArgs.add_cli_args``: HiState's flags in a group of their own."""
    from sglang_histate.adapter.flags import group_flags as group

    group(parser)


def uncounted_states(tree_cache: Any, req: Any) -> int:
    """``PrefillAdder``, one pool: states that `req` will take besides its own and that of a host hit."""
    pool = getattr(tree_cache, "one_pool", None)
    return 0 if pool is None else pool.uncounted_states(req)


def states_in_place_of_kv(tree_cache: Any) -> int:
    """``PrefillAdder``, one pool: states that would fit where evictable KV lies."""
    pool = getattr(tree_cache, "one_pool", None)
    return 0 if pool is None else pool.states_in_place_of_kv()


def kv_in_place_of_states(tree_cache: Any) -> int:
    """``PrefillBudget``, one pool: tokens of KV that would fit where evictable states lie."""
    pool = getattr(tree_cache, "one_pool", None)
    return 0 if pool is None else pool.kv_in_place_of_states()


def make_room_for_load_back(tree_cache: Any, kv_tokens: int) -> None:
    """``PrefillBudget``, one pool: make the admitted tokens real before a load-back keeps everything in its place."""
    pool = getattr(tree_cache, "one_pool", None)
    if pool is not None:
        pool.make_room(kv_tokens)


def states_to_take_ahead(tree_cache: Any, waiting: int) -> int:
    """``Scheduler``: for how many waiting requests a state is taken before they are looked at."""
    return 0 if getattr(tree_cache, "one_pool", None) is not None else waiting
